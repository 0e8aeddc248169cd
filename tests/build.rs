//! Builds the double of Google's plugin, and plugins that fail, as shared objects that tests load.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=double");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let double = [
        "google_double.c",
        "connect.c",
        "gpu.c",
        "misbehave.c",
        "pool.c",
        "transfer.c",
    ];
    build(&out, "TCPX_DOUBLE_SO", "libtcpx_double.so", &double, &[]);
    build(
        &out,
        "TCPX_HABITS_SO",
        "libtcpx_habits.so",
        &["habits.c"],
        &[],
    );
    build(
        &out,
        "TCPX_LIBERAL_SO",
        "libtcpx_liberal.so",
        &["liberal.c"],
        &[],
    );
    build(&out, "TCPX_CLOCK_SO", "libtcpx_clock.so", &["clock.c"], &[]);
    let bad = ["bad_plugin.c"];
    build(&out, "TCPX_BAD_SO", "libtcpx_bad.so", &bad, &[]);
    build(&out, "TCPX_OLD_SO", "libtcpx_old.so", &bad, &["-DOLD"]);
}

/// Compiles `sources`; the crate's `env!(variable)` is the file's path.
fn build(out: &Path, variable: &str, name: &str, sources: &[&str], defines: &[&str]) {
    let library = out.join(name);
    let compiler = cc::Build::new().get_compiler();
    // A shared object, also where the programs are linked statically.
    let flags = compiler.args().iter().filter(|flag| *flag != "-static");
    let status = std::process::Command::new(compiler.path())
        .args(flags)
        .args(["-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread"])
        .args(["-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"])
        .args(defines)
        .args(sources.iter().map(|file| format!("double/{file}")))
        .arg("-o")
        .arg(&library)
        .status()
        .expect("the C compiler runs");
    assert!(status.success(), "{name} does not compile: {status}");
    println!("cargo::rustc-env={variable}={}", library.display());
}
