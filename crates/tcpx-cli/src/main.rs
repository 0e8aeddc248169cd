//! The tcpx program.

fn main() -> std::process::ExitCode {
    tcpx_cli::main()
}
