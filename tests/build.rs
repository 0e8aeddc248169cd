//! Builds the double of Google's plugin as a shared object that tests load.

use std::path::PathBuf;

fn main() {
    let source = "double/google_double.c";
    println!("cargo::rerun-if-changed={source}");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let library = out.join("libtcpx_double.so");
    let status = cc::Build::new()
        .get_compiler()
        .to_command()
        .args(["-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread"])
        .args(["-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"])
        .arg(source)
        .arg("-o")
        .arg(&library)
        .status()
        .expect("the C compiler runs");
    assert!(status.success(), "{source} does not compile: {status}");
    println!("cargo::rustc-env=TCPX_DOUBLE_SO={}", library.display());
}
