//! After the first connection on a GPU, none asks the driver for anything that waits for the
//! program's kernels or holds up copies of the process: whatever comes, moves and goes.
//!
//! The only test of its process: it looks at every call.

#[expect(dead_code, reason = "not every test needs all of it")]
#[path = "engine/common.rs"]
mod common;

use std::time::Duration;

use common::{pair, random};
use tcpx::{Connection, Region, RegionSlice};
use tcpx_memory::{CopyWorker, Gpu, fake_driver};

const LONG: Duration = Duration::from_secs(300);

/// In the announcement, in one chunk, and in several.
const SIZES: [usize; 5] = [1, 4096, 100_000, 300_000, (3 << 20) + 5];

/// GPU memory of the program, which is there before and after all connections.
struct Memory {
    from: Region,
    to: Region,
    bytes: Vec<u8>,
}

impl Memory {
    fn new(gpu: &Gpu) -> Self {
        let bytes = random(SIZES[SIZES.len() - 1]);
        let region = || Region::cuda(gpu, bytes.len()).expect("memory");
        let (from, to) = (region(), region());
        from.write_from(0, &bytes).expect("free");
        Self { from, to, bytes }
    }

    fn ends(&self, size: usize) -> (RegionSlice, RegionSlice) {
        let of = |region: &Region| region.slice(..size).expect("inside");
        (of(&self.from), of(&self.to))
    }

    fn transfer(&self, sender: &Connection, receiver: &Connection, size: usize) {
        self.to.write_from(0, &vec![0; size]).expect("free");
        let (from, to) = self.ends(size);
        let receive = receiver.receive(to, 7).start().expect("a receive");
        let send = sender.send(from, 7).start().expect("a send");
        send.wait().expect("it is sent");
        receive.wait().expect("it arrives");
        let mut arrived = vec![0; size];
        self.to.read_to(0, &mut arrived).expect("free");
        assert!(arrived == self.bytes[..size], "{size} bytes");
    }
}

/// A pair of connections that move all sizes both ways; with an end in order, or in the middle of a
/// transfer.
fn connections(gpu: &Gpu, memory: &Memory, in_order: bool) {
    let (server, client) = pair(|_, options| {
        options.gpu = Some(gpu.clone());
        // As a rule in time, never, and after a while.
        options.bounds.small_read = Duration::from_micros(u64::from(random(1)[0] % 3) * 50);
    });
    for size in SIZES {
        memory.transfer(&server, &client, size);
        memory.transfer(&client, &server, size);
    }
    if in_order {
        std::thread::scope(|scope| {
            scope.spawn(|| server.close(LONG).expect("an end"));
            client.close(LONG).expect("an end");
        });
    } else {
        let (from, to) = memory.ends(SIZES[SIZES.len() - 1]);
        let receive = client.receive(to, 8).start().expect("a receive");
        let _send = server.send(from, 8).start().expect("a send");
        drop(server);
        // It ends somehow, and with it the use of its memory.
        drop(receive.wait());
    }
}

#[test]
fn connections_make_no_call_that_waits_for_kernels() {
    fake_driver::install();
    let gpu = Gpu::open(0).expect("the fake");
    let memories: Vec<_> = (0..4).map(|_| Memory::new(&gpu)).collect();
    connections(&gpu, &memories[0], true);
    let before = fake_driver::costly_calls();
    assert!(before.contains(&"cuMemHostRegister"), "{before:?}");
    // One after the other, and together.
    for round in 0..3 {
        connections(&gpu, &memories[0], round % 2 == 0);
    }
    std::thread::scope(|scope| {
        for (number, memory) in memories.iter().enumerate() {
            let gpu = &gpu;
            scope.spawn(move || connections(gpu, memory, number % 2 == 0));
        }
    });
    // Many at a time, more than have a part of their own.
    let pair = || pair(|_, options| options.gpu = Some(gpu.clone()));
    let crowd: Vec<_> = (0..16).map(|_| pair()).collect();
    for (server, client) in &crowd {
        for size in [4096, 300_000] {
            memories[0].transfer(server, client, size);
        }
    }
    drop(crowd);
    // What was left in flight is seen to, and what nobody uses given back.
    assert!(CopyWorker::wait_until_idle(LONG));
    let after = fake_driver::costly_calls();
    let late = &after[before.len()..];
    assert!(late.is_empty(), "after the first connection: {late:?}");
}
