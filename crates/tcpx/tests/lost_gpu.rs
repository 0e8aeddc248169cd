//! A GPU whose copies can no longer be followed, as after a reset of it: whatever is under way ends
//! with an error at both ends, also what waits for the pinned memory that those copies keep.
//!
//! The only test of its process: it breaks the driver.

#[expect(dead_code, reason = "not every test needs all of it")]
#[path = "engine/common.rs"]
mod common;

use std::sync::Arc;
use std::time::Duration;

use common::pair;
use tcpx::{Gpu, Local, Region, Rights, TcpNetwork, TcpOptions, Transfer};
use tcpx_memory::fake_driver;

const LONG: Duration = Duration::from_secs(20);
/// More than there is pinned memory for at a time.
const PUTS: usize = 60;
const BYTES: usize = 1 << 20;

#[test]
fn what_waits_behind_copies_that_cannot_be_followed_ends() {
    fake_driver::install_two();
    for (device, sends) in [(0, true), (1, false)] {
        let gpu = Gpu::open(device).expect("the fake");
        let (server, client) = pair(|_, options| {
            options.gpu = Some(gpu.clone());
            options.network = Arc::new(TcpNetwork::new(TcpOptions {
                local: Local::Off,
                ..TcpOptions::default()
            }));
        });
        let near = Region::cuda(&gpu, PUTS * BYTES).expect("memory");
        let host = Region::host(PUTS * BYTES).expect("memory");
        let part = |of: &Region, at: usize| of.slice(at * BYTES..(at + 1) * BYTES).expect("inside");
        (0..PUTS).for_each(|at| fake_driver::lose_streams_of(&part(&near, at)));
        // From the GPU to the peer, or from there into the GPU.
        let (from, to) = if sends {
            (&near, &host)
        } else {
            (&host, &near)
        };
        let window = server.expose(to.all(), Rights::Put).expect("a window");
        let put = |at| {
            let offset = (at * BYTES) as u64;
            client.put(part(from, at), &window.key(), offset).start()
        };
        // One after the first failure may be refused.
        let running: Vec<Transfer> = (0..PUTS).filter_map(|at| put(at).ok()).collect();
        assert!(!running.is_empty(), "the connection is whole at first");
        for (at, put) in running.into_iter().enumerate() {
            let ended = put.wait_timeout(LONG);
            let ended = ended.unwrap_or_else(|| panic!("put {at} does not end"));
            assert!(ended.is_err(), "put {at}: {ended:?}");
        }
    }
}
