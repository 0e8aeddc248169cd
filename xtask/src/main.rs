//! Tasks of the tcpx repository, run as `cargo xtask COMMAND`.

mod bench_docs;
mod command_line;
mod dependencies;
mod devmem_vm;
mod dist;
mod doctor;
mod gate;
mod header;
mod kernels;
mod last_release;
mod lines;
mod simulate;
mod site;
mod variables;
mod workspace;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  bench-docs [--check]   write docs/benchmarks.{md,svg} and benchmarks/tables.md, or say that one is stale
  command-line [--check] write docs/command-line.md from what `tcpx --help` prints
  dependencies           check that docs/dependencies.md gives a reason for every dependency
  devmem-vm [SCRIPT...]  run tests/devmem-vm/scripts on a real kernel in an emulated machine
  dist [--target TRIPLE] [PART...]
                         make what users install in target/dist and target/packages, and try it; parts:
                         --packages (folder, tarball, deb, RPM), --static (one static program), --wheel
                         (the Python package), --image (tries the Containerfile), --check (tries all
                         packages); --out DIR: the folder alone
  doctor [--check]       write docs/doctor.md from the checks that `tcpx doctor` knows
  gate BASE [...]        whether this tree is as fast as the commit BASE (CONTRIBUTING.md)
  header [--check]       write crates/tcpx-capi/include/*.h from their sources, or say that one is stale
  last-release [COMMIT]  move bytes between this tree and the release that tests/last-release names
  lines [COMMIT]         lines of product Rust, and the change since the commit
  kernels [--check]      make the PTX of kernels/*.cu with NVRTC, or say that it is stale
  simulate [...]         the engine on a simulated system, from seeds (tests/README.md)
  site                   the documents as pages for a browser, in target/site, by mdbook, once every link in
                         them leads to a file
  variables              check that docs/variables.md has every variable that the sources read";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("", [].as_slice()),
    };
    let outcome = match command {
        "bench-docs" => bench_docs::run(rest),
        "command-line" => command_line::run(rest),
        "dependencies" => dependencies::run(rest),
        "devmem-vm" => devmem_vm::run(rest),
        "dist" => dist::run(rest),
        "doctor" => doctor::run(rest),
        "gate" => gate::run(rest),
        "header" => header::run(rest),
        "last-release" => last_release::run(rest),
        "lines" => lines::run(rest),
        "site" => site::run(rest),
        "simulate" => simulate::run(rest),
        "variables" => variables::run(rest),
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
