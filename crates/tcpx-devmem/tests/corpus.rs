//! Replays the inputs kept for the fuzz targets through the same assertions.

#[path = "../../../fuzz/src/devmem/mod.rs"]
#[expect(
    unreachable_pub,
    reason = "the same sources are a module of the fuzz crate"
)]
mod targets;

#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn control_message_inputs_hold() {
    replay("cmsg", targets::cmsg::run);
}

#[test]
fn netlink_inputs_hold() {
    replay("netlink", targets::netlink::run);
}
