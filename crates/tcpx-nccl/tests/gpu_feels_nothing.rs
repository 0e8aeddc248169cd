//! After the first comms on a GPU, none asks the driver for anything that waits for the program's
//! kernels or holds up copies of the process, whatever comes, moves and goes.
//!
//! The only test of its process: it looks at every call.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "not every test needs all of it")]
mod common;

use nccl_net::export::{MemoryRegion, NetComm};

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
        let (from, to) = (random(size, seed as u64 + 1), vec![0; size]);
        fake_driver::adopt(&from);
        fake_driver::adopt(&to);
        let mut from = Registered::new(&pair.send, from, true);
        let mut to = Registered::new(&pair.receive, to, true);
        transfer(&pair, &mut from, &mut to, size, size);
        assert!(to.bytes == from.bytes, "{size} bytes");
    }
}

/// A call with a wrong address was taken, and ended the process when its bytes were moved.
fn wild_memory_is_refused() {
    let plugin = plugin(Config {
        mode: Mode::Cuda,
        ..host_config()
    });
    let pair = pair(&plugin);
    let region = MemoryRegion {
        data: std::ptr::without_provenance_mut(0x1_2345_6000),
        len: 4096,
        cuda: true,
    };
    let refused = [pair.send.register(region), pair.receive.register(region)];
    for refused in refused {
        let error = refused.map(drop).expect_err("nothing is there").to_string();
        assert!(error.contains("knows no memory there"), "{error}");
    }
}

#[test]
fn comms_come_and_go_without_a_call_that_waits_for_kernels() {
    fake_driver::install();
    fake_driver::make_current();
    cycle();
    let before = fake_driver::costly_calls();
    assert!(before.contains(&"cuMemHostRegister"), "{before:?}");
    (0..3).for_each(|_| cycle());
    let after = fake_driver::costly_calls();
    let late = &after[before.len()..];
    assert!(late.is_empty(), "after the first comms: {late:?}");
    wild_memory_is_refused();
}
