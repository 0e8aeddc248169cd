//! Gives the plugin its build id.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for path in tcpx_build_id::inputs(&root) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    println!(
        "cargo::rustc-env=TCPX_BUILD_ID={}",
        tcpx_build_id::of_sources(&root)?
    );
    Ok(())
}
