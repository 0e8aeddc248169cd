//! After the first comms on a GPU, none asks the driver for anything that waits for the program's kernels or holds up
//! copies of the process, whatever comes, moves and goes.
//!
//! The only test of its process: it looks at every call.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "not every test needs all of it")]
mod common;

use common::{Registered, host_config, pair, plugin, random, transfer};
use nccl_net_tcpx::{Config, Mode};
use tcpx_memory::fake_driver;

/// On NCCL's thread, and in one slot and several.
const SIZES: [usize; 3] = [100, 300_000, (3 << 20) + 5];

/// Comms from their beginning to their end.
fn cycle() {
    let plugin = plugin(Config {
        mode: Mode::Cuda,
        lanes: Some(3),
        threads: Some(2),
        ..host_config()
    });
    let pair = pair(&plugin);
    for (seed, size) in SIZES.into_iter().enumerate() {
        let mut from = Registered::new(&pair.send, random(size, seed as u64 + 1), true);
        let mut to = Registered::new(&pair.receive, vec![0; size], true);
        transfer(&pair, &mut from, &mut to, size, size);
        assert!(to.bytes == from.bytes, "{size} bytes");
    }
}

#[test]
fn comms_come_and_go_without_a_call_that_waits_for_kernels() {
    fake_driver::install();
    fake_driver::make_current();
    cycle();
    let before = fake_driver::costly_calls();
    assert!(before.contains(&"cuMemHostAlloc"), "{before:?}");
    (0..3).for_each(|_| cycle());
    let after = fake_driver::costly_calls();
    let late = &after[before.len()..];
    assert!(late.is_empty(), "after the first comms: {late:?}");
}
