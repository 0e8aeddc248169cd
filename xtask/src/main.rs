//! Tasks of the tcpx repository, run as `cargo xtask COMMAND`.

mod kernels;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  kernels [--check]      make the PTX of kernels/*.cu with NVRTC, or say that it is stale";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("", [].as_slice()),
    };
    let outcome = match command {
        "kernels" => kernels::run(rest),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
