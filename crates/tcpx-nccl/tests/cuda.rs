//! CUDA pointers, with host memory standing in for a GPU's: the copy worker moves it through pinned slots.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "not every test needs all of it")]
mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{
    Pair, Registered, SIZES, finish, host_config, pair, plugin, posted, random, transfer,
};
use nccl_net::ResultCode;
use nccl_net::export::{NetComm, NetRecv, NetSend, RequestId};
use nccl_net_tcpx::{Config, Mode};
use tcpx_memory::{CopyWorker, PinnedSlot};

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

/// All slots that are free; nothing can be copied meanwhile.
fn take_all(worker: &CopyWorker) -> Vec<PinnedSlot> {
    std::iter::from_fn(|| worker.pinned().try_take()).collect()
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
fn a_send_waits_for_slots_and_leaves_half_of_them_to_receives() {
    let _alone = alone();
    let worker = CopyWorker::host().unwrap();
    let pair = pair(&plugin(config()));
    let mut from = Registered::new(&pair.send, random(1 << 20, 5), true);
    let mut to = Registered::new(&pair.receive, vec![0; 1 << 20], true);
    let mut held = take_all(&worker);
    let half = worker.pinned().slots() / 2;
    held.truncate(half);
    let both = start(&pair, &mut from, &mut to);
    stays(&pair, both);
    held.truncate(half - 8);
    finish(&pair, both.0, both.1);
    assert!(to.bytes == from.bytes);
}

#[test]
fn a_receive_that_finds_no_slot_goes_on_when_one_is_free() {
    let _alone = alone();
    let worker = CopyWorker::host().unwrap();
    let pair = pair(&plugin(config()));
    let mut from = Registered::new(&pair.send, random(4 << 20, 5), false);
    let mut to = Registered::new(&pair.receive, vec![0; 4 << 20], true);
    // A large message of host memory takes lanes once the receiver grants, which it does for this one.
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
fn deregistered_memory_is_neither_read_nor_written_and_its_requests_fail() {
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
fn a_message_that_comes_beside_the_lanes_for_cuda_memory_is_refused() {
    let _alone = alone();
    let pair = pair(&plugin(config()));
    // As a peer sends whose plugin takes host memory only.
    let mut from = Registered::new(&pair.send, vec![1; 100], false);
    let mut to = Registered::new(&pair.receive, vec![0xee; 100], true);
    let (_, receive) = start(&pair, &mut from, &mut to);
    let error = common::until("the refusal", || pair.receive.test(receive).err());
    assert!(error.to_string().contains("TCPX_NET_DEVICE"), "{error}");
    assert!(to.bytes.iter().all(|byte| *byte == 0xee));
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
