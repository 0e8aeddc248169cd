//! Gives the plugin its build id.

use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    // A host may unload the file while a copy worker of the process still runs its code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    tcpx_build_id::for_build_script(Path::new(env!("CARGO_MANIFEST_DIR")))
}
