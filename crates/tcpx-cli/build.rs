//! Lets the program know the build id of the plugin file that belongs to it.

use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    tcpx_build_id::for_build_script(Path::new(env!("CARGO_MANIFEST_DIR")))
}
