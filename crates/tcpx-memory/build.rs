//! Compiles the kernels' lane functions for the CPU.

fn main() {
    let kernels = "kernels";
    for file in ["unpack_lane.h", "unpack_host.c"] {
        println!("cargo::rerun-if-changed={kernels}/{file}");
    }
    cc::Build::new()
        .file(format!("{kernels}/unpack_host.c"))
        .std("c11")
        .opt_level(2)
        .flag_if_supported("-Wno-unknown-pragmas")
        .compile("tcpx_kernels_host");
}
