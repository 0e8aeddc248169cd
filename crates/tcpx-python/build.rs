//! Links a wheel for other hosts with the unwinder that the C library uses.

use std::env;
use std::process::Command;

/// Zig's linker, which makes such a wheel, puts an unwinder of its own into the module. At its end
/// Python 3.13 and older unwinds threads that nobody waits for, by the C library and so by
/// `libgcc_s`: two unwinders do not understand each other, and the process would crash. Each Linux
/// with glibc has the library.
fn main() {
    println!("cargo:rerun-if-env-changed=TCPX_GLIBC");
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("TCPX_GLIBC").is_none() {
        return;
    }
    let (target, host) = (env::var("TARGET"), env::var("HOST"));
    let compiler = if target == host {
        "cc".to_owned()
    } else {
        let processor = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
        format!("{processor}-linux-gnu-gcc")
    };
    let answer = Command::new(&compiler)
        .arg("-print-file-name=libgcc_s.so.1")
        .output();
    let path = answer
        .map(|answer| String::from_utf8_lossy(&answer.stdout).trim().to_owned())
        .unwrap_or_default();
    // A compiler that does not have the file answers with its bare name.
    assert!(
        path.contains('/'),
        "{compiler} does not find libgcc_s.so.1, which the wheel is linked with: install GCC for its processor"
    );
    println!("cargo:rustc-cdylib-link-arg={path}");
}
