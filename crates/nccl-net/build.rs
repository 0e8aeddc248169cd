//! Compiles the variadic logger, the one thing Rust cannot define.

fn main() {
    println!("cargo::rerun-if-changed=c/logger.c");
    cc::Build::new()
        .file("c/logger.c")
        .flag("-fvisibility=hidden")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .compile("nccl_net_logger");
}
