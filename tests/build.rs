//! Builds the double of Google's plugin as a shared object that tests load.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=double");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let library = out.join("libtcpx_double.so");
    let compiler = cc::Build::new().get_compiler();
    // A shared object, also where the programs are linked statically.
    let flags = compiler.args().iter().filter(|flag| *flag != "-static");
    let status = std::process::Command::new(compiler.path())
        .args(flags)
        .args(["-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread"])
        .args(["-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"])
        .args(
            ["google_double.c", "connect.c", "pool.c", "transfer.c"]
                .map(|file| format!("double/{file}")),
        )
        .arg("-o")
        .arg(&library)
        .status()
        .expect("the C compiler runs");
    assert!(status.success(), "the double does not compile: {status}");
    println!("cargo::rustc-env=TCPX_DOUBLE_SO={}", library.display());
}
