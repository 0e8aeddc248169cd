//! Replays the inputs kept for the fuzz targets through the same assertions.

use std::fs;
use std::path::Path;

#[path = "../../../fuzz/src/devmem/mod.rs"]
#[expect(
    unreachable_pub,
    reason = "the same sources are a module of the fuzz crate"
)]
mod targets;

fn replay(target: &str, run: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let mut inputs = 0;
    for entry in fs::read_dir(&folder).expect("the corpus is checked in") {
        let path = entry.expect("a readable folder").path();
        let input = fs::read(&path).expect("a readable input");
        // Shown only when an assertion fails.
        println!("{}", path.display());
        run(&input);
        inputs += 1;
    }
    assert!(inputs > 0, "{} is empty", folder.display());
}

#[test]
fn control_message_inputs_hold() {
    replay("cmsg", targets::cmsg::run);
}

#[test]
fn netlink_inputs_hold() {
    replay("netlink", targets::netlink::run);
}

#[test]
fn companion_inputs_hold() {
    replay("companion", targets::companion::run);
}
