//! Names the library for the dynamic linker: `libtcpx.so.` and the number of its interface,
//! `TCPX_ABI`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtcpx.so.0");
    // Plugins start threads that call back into the logger: the code is never unmapped.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
