//! CUDA pointers, with host memory standing in for a GPU's: the copy worker moves it through pinned
//! slots.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "not every test needs all of it")]
mod common;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{
    Pair, Registered, SIZES, finish, host_config, pair, plugin, posted, random, transfer,
};
use nccl_net::ResultCode;
use nccl_net::export::{NetComm, NetRecv, NetSend, RequestId};
use nccl_net_tcpx::{Config, Mode};
use tcpx_memory::{
    CompletionSink, CopyWorker, Job, MemoryError, PinnedPool, PinnedSlot, Region, Work,
};

/// All tests of this process share the worker for host memory, and its slots.
static SLOTS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config() -> Config {
    Config {
        mode: Mode::Cuda,
        standin: true,
        lanes: Some(3),
        threads: Some(2),
        ..host_config()
    }
}

/// All slots that receives may have, of which the last may come back behind the end of their
/// message; nothing can be copied meanwhile.
fn take_all(worker: &CopyWorker) -> Vec<PinnedSlot> {
    let mut held = Vec::new();
    common::until("the slots", || {
        held.extend(std::iter::from_fn(|| worker.pinned().try_take()));
        let in_use = worker.pinned_in_use() / PinnedPool::SLOT_BYTES;
        (in_use == held.len()).then_some(())
    });
    held
}

/// Posts a transfer of the whole buffers and gives sender's and receiver's request.
fn start(pair: &Pair, from: &mut Registered, to: &mut Registered) -> (RequestId, RequestId) {
    let len = to.bytes.len();
    let receive = posted(pair.receive.irecv(to.buffer(0, len), 0, &to.memory));
    let len = from.bytes.len();
    let send = posted(pair.send.isend(from.buffer(0, len), 0, &from.memory));
    (send, receive)
}

/// Looks at a transfer for a while, in which it must not end.
fn stays(pair: &Pair, (send, receive): (RequestId, RequestId)) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(50) {
        assert_eq!(pair.send.test(send).unwrap(), None);
        assert_eq!(pair.receive.test(receive).unwrap(), None);
    }
}

#[test]
fn every_size_lands_where_it_was_posted_and_nowhere_else() {
    let _alone = alone();
    // Parts smaller and larger than a slot.
    for chunk_bytes in [16 << 10, 256 << 10, 3 << 20] {
        let pair = pair(&plugin(Config {
            chunk_bytes,
            ..config()
        }));
        for (number, size) in SIZES.into_iter().chain(SIZES).enumerate() {
            let data = random(size, number as u64 + 3);
            let mut from = Registered::new(&pair.send, data.clone(), true);
            let mut to = Registered::new(&pair.receive, vec![0xee; size + 64], true);
            transfer(&pair, &mut from, &mut to, size, size);
            assert!(to.bytes[..size] == data, "{size} bytes in {chunk_bytes}");
            assert!(to.bytes[size..].iter().all(|byte| *byte == 0xee));
        }
    }
}

#[test]
fn every_slot_comes_back() {
    let _alone = alone();
    let worker = CopyWorker::host().unwrap();
    let before = worker.pinned().free_slots();
    let pair = pair(&plugin(config()));
    let mut from = Registered::new(&pair.send, random(40 << 20, 5), true);
    let mut to = Registered::new(&pair.receive, vec![0; 40 << 20], true);
    for _ in 0..4 {
        let (send, receive) = start(&pair, &mut from, &mut to);
        finish(&pair, send, receive);
        assert!(to.bytes == from.bytes);
        to.bytes.fill(0);
    }
    common::until("the slots", || {
        (worker.pinned().free_slots() == before).then_some(())
    });
}

#[test]
fn comms_whose_peers_read_nothing_hold_no_slot_of_another_one() {
    let _alone = alone();
    let plugin = plugin(config());
    // More than all slots of the worker; nobody posts a receive.
    let stopped: Vec<_> = (0..5)
        .map(|number| {
            let pair = pair(&plugin);
            let mut from = Registered::new(&pair.send, random(80 << 20, number + 2), true);
            let len = from.bytes.len();
            let mut grant = Registered::new(&pair.receive, vec![0; 100], true);
            let mut small = Registered::new(&pair.send, vec![1; 100], true);
            transfer(&pair, &mut small, &mut grant, 100, 100);
            let send = posted(pair.send.isend(from.buffer(0, len), 0, &from.memory));
            (pair, from, send)
        })
        .collect();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(100) {
        for (pair, _, send) in &stopped {
            assert_eq!(pair.send.test(*send).unwrap(), None);
        }
    }
    let pair = pair(&plugin);
    let mut from = Registered::new(&pair.send, random(20 << 20, 5), true);
    let mut to = Registered::new(&pair.receive, vec![0; 20 << 20], true);
    let len = from.bytes.len();
    transfer(&pair, &mut from, &mut to, len, len);
    assert!(to.bytes == from.bytes);
}

#[test]
fn a_receive_that_finds_no_slot_goes_on_when_one_is_free() {
    let _alone = alone();
    let worker = CopyWorker::host().unwrap();
    let pair = pair(&plugin(config()));
    let mut from = Registered::new(&pair.send, random(4 << 20, 5), false);
    let mut to = Registered::new(&pair.receive, vec![0; 4 << 20], true);
    // A large message of host memory takes lanes once the receiver grants, which it does for this
    // one.
    let mut small = Registered::new(&pair.send, random(100, 5), true);
    transfer(&pair, &mut small, &mut to, 100, 4 << 20);
    let held = take_all(&worker);
    let both = start(&pair, &mut from, &mut to);
    stays(&pair, both);
    drop(held);
    finish(&pair, both.0, both.1);
    assert!(to.bytes == from.bytes);
}

#[test]
fn deregistered_memory_is_neither_read_nor_written() {
    let _alone = alone();
    let worker = CopyWorker::host().unwrap();
    let pair = pair(&plugin(config()));
    let mut from = Registered::new(&pair.send, vec![1; 64 << 20], true);
    let mut to = Registered::new(&pair.receive, vec![0; 64 << 20], true);
    let held = take_all(&worker);
    let both = start(&pair, &mut from, &mut to);
    stays(&pair, both);
    drop(held);
    // Some of it is under way now.
    let _ = pair.send.test(both.0);
    let Registered { mut bytes, memory } = to;
    pair.receive.deregister(memory).unwrap();
    bytes.fill(7);
    pair.send.deregister(from.memory).unwrap();
    let error = pair.receive.test(both.1).unwrap_err();
    assert_eq!(error.code(), ResultCode::InvalidUsage, "{error}");
    assert!(pair.send.test(both.0).is_err());
    drop(pair);
    assert!(bytes.iter().all(|byte| *byte == 7), "written after deregMr");
}

#[test]
fn host_memory_lands_in_the_gpus_and_back() {
    let _alone = alone();
    let pair = pair(&plugin(config()));
    // As with NCCL's LL: sent from host memory, received into the GPU's; large ones before a grant
    // too.
    for (number, size) in SIZES
        .into_iter()
        .chain([3 << 20, 16, 65_536, 70_000, 16])
        .enumerate()
    {
        for (sends, receives) in [(false, true), (true, false), (true, true)] {
            let data = random(size, number as u64 + 3);
            let mut from = Registered::new(&pair.send, data.clone(), sends);
            let mut to = Registered::new(&pair.receive, vec![0xee; size + 64], receives);
            transfer(&pair, &mut from, &mut to, size, size);
            assert!(to.bytes[..size] == data, "{size} bytes, {sends} {receives}");
            assert!(to.bytes[size..].iter().all(|byte| *byte == 0xee));
        }
    }
}

#[test]
fn a_small_message_for_the_gpu_waits_for_a_slot() {
    let _alone = alone();
    let worker = CopyWorker::host().unwrap();
    let pair = pair(&plugin(config()));
    let mut from = Registered::new(&pair.send, random(100, 5), false);
    let mut to = Registered::new(&pair.receive, vec![0; 100], true);
    let held = take_all(&worker);
    let len = to.bytes.len();
    let receive = posted(pair.receive.irecv(to.buffer(0, len), 0, &to.memory));
    let send = posted(pair.send.isend(from.buffer(0, len), 0, &from.memory));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(50) {
        assert_eq!(pair.receive.test(receive).unwrap(), None);
    }
    drop(held);
    finish(&pair, send, receive);
    assert!(to.bytes == from.bytes);
}

#[test]
fn messages_of_either_memory_arrive_in_posting_order() {
    let _alone = alone();
    let pair = pair(&plugin(config()));
    const SPACE: usize = 300_000;
    const MESSAGES: usize = 200;
    let len = |n: usize| match n % 5 {
        0 => 16,
        1 => SPACE - n,
        2 => 0,
        3 => 20_000 + n,
        _ => 70_000 + n,
    };
    let data = random(16 * SPACE, 9);
    let mut sources = [false, true].map(|cuda| Registered::new(&pair.send, data.clone(), cuda));
    let mut targets =
        [false, true].map(|cuda| Registered::new(&pair.receive, vec![0; 16 * SPACE], cuda));
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    let (mut sent, mut received) = (0, 0);
    common::until("a crowd of messages", || {
        // A slot of the target is looked at before it is posted again.
        while receives.len() < MESSAGES.min(received + 8) {
            let n = receives.len();
            let target = &mut targets[n / 3 % 2];
            let buffer = target.buffer(n % 16 * SPACE, SPACE);
            match pair.receive.irecv(buffer, 0, &target.memory).unwrap() {
                Some(id) => receives.push(id),
                None => break,
            }
        }
        while sends.len() < MESSAGES.min(sent + 8) {
            let n = sends.len();
            let source = &mut sources[n / 2 % 2];
            let buffer = source.buffer(n % 16 * SPACE, len(n));
            match pair.send.isend(buffer, 0, &source.memory).unwrap() {
                Some(id) => sends.push(id),
                None => break,
            }
        }
        if sent < sends.len() && pair.send.test(sends[sent]).unwrap().is_some() {
            sent += 1;
        }
        if received < receives.len()
            && let Some(size) = pair.receive.test(receives[received]).unwrap()
        {
            assert_eq!(size, len(received), "message {received}");
            let at = received % 16 * SPACE;
            let bytes = &mut targets[received / 3 % 2].bytes[at..at + SPACE];
            assert!(bytes[..size] == data[at..at + size], "message {received}");
            assert!(bytes[size..].iter().all(|byte| *byte == 0));
            bytes.fill(0);
            received += 1;
        }
        (sent == MESSAGES && received == MESSAGES).then_some(())
    });
}

/// Nobody asks how a job ended.
struct Silent;

impl CompletionSink for Silent {
    fn complete(&self, _token: u64, _result: Result<u64, MemoryError>) {}
}

#[test]
fn what_waits_to_be_copied_outlives_lanes_and_sender() {
    let _alone = alone();
    let worker = CopyWorker::host().unwrap();
    let space = Region::host(512 << 20).unwrap();
    let plugin = plugin(config());
    for round in 0..4 {
        let pair = pair(&plugin);
        let mut from = Registered::new(&pair.send, random(700_000, round + 1), false);
        let mut to = Registered::new(&pair.receive, vec![0; 700_000], true);
        let mut first = Registered::new(&pair.send, vec![0; 100], true);
        transfer(&pair, &mut first, &mut to, 100, 700_000);
        // Work that lies ahead of what is to come.
        let halves = space.all().split_at(256 << 20).unwrap();
        for (from, to) in halves.0.pieces(64 << 20).zip(halves.1.pieces(64 << 20)) {
            let job = Job {
                work: Work::Copy { from, to },
                fence: None,
                sink: Arc::new(Silent),
                token: 0,
            };
            worker.submit(job).map_err(|refused| refused.error).unwrap();
        }
        let (send, receive) = start(&pair, &mut from, &mut to);
        let mut received = None;
        common::until("the send", || {
            received = received.or_else(|| pair.receive.test(receive).unwrap());
            pair.send.test(send).unwrap()
        });
        let Pair {
            send: sender,
            receive: receiver,
            ..
        } = pair;
        drop(sender);
        common::until("the receive", || {
            received = received.or_else(|| receiver.test(receive).unwrap());
            received
        });
        assert!(to.bytes == from.bytes);
    }
}

#[test]
fn a_comm_without_lanes_registers_no_cuda_memory_for_sends() {
    let _alone = alone();
    // The settings refuse this; lanes that cannot be opened come to the same.
    let pair = pair(&plugin(Config {
        lanes: Some(0),
        ..config()
    }));
    let mut bytes = vec![0; 100];
    let region = nccl_net::export::MemoryRegion {
        data: bytes.as_mut_ptr(),
        len: bytes.len(),
        cuda: true,
    };
    let error = pair.send.register(region).unwrap_err();
    assert!(error.to_string().contains("lanes"), "{error}");
}
