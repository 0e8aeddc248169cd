//! Which sends one copy takes, and what becomes of each.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use tcpx_memory::{Access, CompletionSink, Lease, Region};

use super::super::{alone, staged_channel};
use super::*;
use crate::channel::SendChunk;
use crate::tcp::transmit_table::{Taken, Withdrawn, describe};

const CHUNK: usize = 192 << 10;
const LIMIT: Duration = Duration::from_secs(60);

/// Memory of so many chunks, each filled with its number and one.
fn source(chunks: usize) -> Lease {
    let region = Region::host(chunks * CHUNK).unwrap();
    for index in 0..chunks {
        let bytes = vec![index as u8 + 1; CHUNK];
        region.write_from(index * CHUNK, &bytes).unwrap();
    }
    region.lease(.., Access::Read).unwrap()
}

fn unstaged(source: &Lease, transfer: u64, sequence: u64, index: usize) -> Unstaged {
    let start = index * CHUNK;
    let (header, position) = describe(&SendChunk {
        token: sequence,
        sequence,
        transfer,
        offset: start as u64,
        index: index as u32,
        total: source.all().len() as u64,
        window: transfer,
        tag: 0,
        source: source.slice(start..start + CHUNK).unwrap(),
        fence: None,
    });
    Unstaged {
        header,
        position,
        source: source.slice(start..start + CHUNK).unwrap(),
        fence: None,
    }
}

/// Has sends wait as if as many copies were under way as may be, and then start.
fn start_together(shared: &Arc<ChannelShared>, sends: Vec<Unstaged>) {
    let copies = &shared.parts.staging.short_copies;
    copies.store(SHORT_COPIES, Ordering::SeqCst);
    for (slot, unstaged) in (0u16..).zip(sends) {
        ChannelShared::stage(shared, slot, unstaged);
        let waits = |state: &mut SendState| matches!(state, SendState::Waiting(_));
        assert!(
            shared.transmit.with_slot(slot, waits),
            "{slot} was not held back"
        );
    }
    copies.store(0, Ordering::SeqCst);
    ChannelShared::stage_waiting(shared);
}

/// The chunks that a lane finds, by slot, once so many are there.
fn queued(shared: &ChannelShared, count: usize) -> Vec<Outgoing> {
    let start = Instant::now();
    let mut found = Vec::new();
    while found.len() < count {
        assert!(start.elapsed() < LIMIT, "{} of {count} came", found.len());
        match shared.transmit.take(0) {
            Some(Taken::Chunk(chunk)) => found.push(chunk),
            Some(Taken::Withdrawn(slot)) => panic!("{slot} was withdrawn"),
            None => std::thread::yield_now(),
        }
    }
    found.sort_by_key(|chunk| chunk.slot);
    found
}

fn assert_bytes(chunk: &Outgoing, index: usize) {
    let mut bytes = vec![0; CHUNK];
    chunk.payload.read_to(&mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == index as u8 + 1), "{index}");
    assert_eq!(chunk.position.offset, (index * CHUNK) as u64);
}

/// For each chunk whether it lies in a slot behind the one before.
fn follows(chunks: &[Outgoing]) -> Vec<bool> {
    let at = |chunk: &Outgoing| chunk.payload.address();
    let behind = |pair: &[Outgoing]| at(&pair[1]) == at(&pair[0]) + CHUNK as u64;
    chunks.windows(2).map(behind).collect()
}

#[test]
fn sends_that_wait_go_together_as_far_as_a_slot_has_room() {
    let _alone = alone();
    let (shared, source) = (staged_channel(), source(7));
    let sends = (0..7).map(|index| unstaged(&source, 1, index as u64, index));
    start_together(&shared, sends.collect());
    let chunks = queued(&shared, 7);
    for (index, chunk) in chunks.iter().enumerate() {
        assert_bytes(chunk, index);
        assert!(chunk.permit.is_some());
    }
    // Five of them fill a slot.
    assert_eq!(follows(&chunks), [true, true, true, true, false, true]);
}

#[test]
fn what_does_not_follow_is_copied_apart() {
    let _alone = alone();
    let (shared, source) = (staged_channel(), source(5));
    let sends = vec![
        unstaged(&source, 1, 0, 0),
        unstaged(&source, 1, 1, 2),
        unstaged(&source, 1, 2, 3),
        unstaged(&source, 2, 3, 4),
    ];
    start_together(&shared, sends);
    let chunks = queued(&shared, 4);
    for (chunk, index) in chunks.iter().zip([0, 2, 3, 4]) {
        assert_bytes(chunk, index);
    }
    assert_eq!(follows(&chunks), [false, true, false]);
}

#[test]
fn sends_held_back_start_when_copies_end() {
    let _alone = alone();
    let (shared, source) = (staged_channel(), source(32));
    for index in 0..32 {
        let unstaged = unstaged(&source, 1, index as u64, index);
        ChannelShared::stage(&shared, index as u16, unstaged);
    }
    for (index, chunk) in queued(&shared, 32).iter().enumerate() {
        assert_bytes(chunk, index);
    }
    let start = Instant::now();
    while shared.parts.staging.short_copies.load(Ordering::SeqCst) > 0 {
        assert!(start.elapsed() < LIMIT, "copies are still counted");
        std::thread::yield_now();
    }
}

#[test]
fn one_that_is_taken_back_leaves_the_others_of_its_copy_alone() {
    let _alone = alone();
    let (shared, source) = (staged_channel(), source(3));
    let copies = &shared.parts.staging.short_copies;
    copies.store(SHORT_COPIES, Ordering::SeqCst);
    for index in 0..3 {
        let unstaged = unstaged(&source, 1, index as u64, index);
        ChannelShared::stage(&shared, index as u16, unstaged);
    }
    assert_eq!(shared.transmit.withdraw(1), Withdrawn::Later);
    copies.store(0, Ordering::SeqCst);
    ChannelShared::stage_waiting(&shared);
    let chunks = queued(&shared, 2);
    assert_bytes(&chunks[0], 0);
    assert_bytes(&chunks[1], 2);
    let events: Vec<_> = std::iter::from_fn(|| shared.next_event()).collect();
    assert!(
        matches!(
            events[..],
            [
                Event::SendWithdrawn { slot: 1 },
                Event::Copied { .. },
                Event::Copied { .. }
            ] | [
                Event::Copied { .. },
                Event::SendWithdrawn { slot: 1 },
                Event::Copied { .. }
            ]
        ),
        "{events:?}"
    );
}

/// Keeps the copy worker from its next job until the test lets go of the sender.
struct Gate {
    is_reached: AtomicBool,
    opens: Mutex<mpsc::Receiver<()>>,
}

impl CompletionSink for Gate {
    fn complete(&self, _: u64, _: Result<u64, MemoryError>) {
        self.is_reached.store(true, Ordering::SeqCst);
        let _ = lock(&self.opens).recv();
    }
}

#[test]
fn a_full_queue_of_the_copy_worker_delays_sends() {
    let _alone = alone();
    let (shared, source) = (staged_channel(), source(7));
    let worker = &shared.parts.staging.host.as_ref().unwrap().worker;
    let (shut, gate) = mpsc::channel();
    let gate = Arc::new(Gate {
        is_reached: AtomicBool::new(false),
        opens: Mutex::new(gate),
    });
    let nothing = source.slice(..0).unwrap();
    loop {
        let job = Job {
            work: Work::checksum(nothing.clone()),
            fence: None,
            sink: Arc::<Gate>::clone(&gate),
            token: 0,
        };
        // Once the worker stalls, no place comes free, whoever has them: other tests use the worker
        // too.
        let stands_still = gate.is_reached.load(Ordering::SeqCst);
        match worker.submit_deferrable(job, usize::MAX) {
            Ok(()) => {}
            Err(_) if stands_still => break,
            Err(_) => std::thread::yield_now(),
        }
    }
    for index in 0..7 {
        let unstaged = unstaged(&source, 1, index as u64, index);
        ChannelShared::stage(&shared, index as u16, unstaged);
    }
    drop(shut);
    for (index, chunk) in queued(&shared, 7).iter().enumerate() {
        assert_bytes(chunk, index);
    }
}

/// A copy that fails fails all that it took, and none else.
#[test]
fn an_error_of_a_copy_is_told_for_every_send_in_it() {
    let _alone = alone();
    let (shared, source) = (staged_channel(), source(2));
    let pool = &shared.parts.staging.host.as_ref().unwrap().send;
    let pinned = pool.try_take().unwrap();
    for slot in 0..2 {
        let unstaged = unstaged(&source, 1, slot.into(), slot.into());
        let waiting = SendState::Waiting(unstaged);
        shared.transmit.with_slot(slot, |state| *state = waiting);
    }
    let host = shared.parts.staging.host.as_ref().unwrap();
    let payload = pinned.slice().slice(..CHUNK).unwrap();
    let permit = || Permit::new(&host.lent, 64);
    let mut batch = shared.begin_copy(0, payload, permit()).unwrap();
    assert!(shared.join_copy(&mut batch, 1, &pinned, permit()));
    assert_eq!(batch.to.len(), 2 * CHUNK);
    shared.sends_copied(0, &Err(MemoryError::WorkerStopped), false);
    for expected in 0..2 {
        let event = shared.next_event();
        let failed = matches!(&event, Some(Event::SendFailed { slot, .. }) if *slot == expected);
        assert!(failed, "{event:?}");
    }
    assert!(shared.next_event().is_none());
}
