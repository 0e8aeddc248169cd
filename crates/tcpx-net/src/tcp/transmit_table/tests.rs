//! The queue's bytes, and pages that the kernel may still send although nobody waits for their
//! chunk any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use tcpx_memory::{CopyWorker, PinnedPool, Region};
use tcpx_wire::TransferId;
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};

use super::super::staging::alone;
use super::*;
use crate::channel::SendChunk;
use crate::error::ChunkPosition;

/// Puts a chunk of so many bytes in the queue.
fn queue(table: &TransmitTable, slot: u16, bytes: usize) {
    let payload = Region::host(bytes).unwrap().all();
    let (header, position) = describe(&SendChunk {
        token: slot.into(),
        sequence: slot.into(),
        transfer: 1,
        offset: 0,
        index: 0,
        total: bytes as u64,
        window: slot.into(),
        tag: 0,
        source: payload.clone(),
        fence: None,
    });
    table.enqueue(Outgoing::new(slot, header, position, payload));
}

/// Short chunks are lent as long as lanes are left for others.
#[test]
fn half_of_the_lanes_are_left_beside_as_many_chunks() {
    for lanes in 1..=12 {
        let table = TransmitTable::new(lanes, 16);
        for under_way in 0..=lanes {
            let expected = under_way <= lanes / 2;
            assert_eq!(table.leaves_lanes(), expected, "{under_way} on {lanes}");
            // Some lanes have two of them, others none.
            table.chunks.took(under_way % lanes / 2);
        }
    }
}

#[test]
fn one_more_lane_is_woken_for_each_quarter_of_a_mebibyte() {
    const CHUNK: u64 = LANE_BYTES / 2;
    let (table, lanes) = (TransmitTable::new(8, 16), 8);
    table.chunks.rest_all(0xFF);
    assert!(!table.is_worth_another(lanes), "there is nothing");
    let mut woken = 0;
    for slot in 0..12 {
        queue(&table, slot, CHUNK as usize);
        if table.is_worth_another(lanes) {
            assert_eq!(table.chunks.take_idle(), Some(woken));
            woken += 1;
        }
        assert_eq!(u64::from(woken), (u64::from(slot) + 1).div_ceil(2));
    }
    // Lanes without room leave theirs to others.
    table.chunks.set_full(0, true);
    assert!(table.is_worth_another(lanes));
}

#[test]
fn queued_bytes_are_those_of_queued_chunks() {
    let table = TransmitTable::new(2, 4);
    for slot in 0..4 {
        queue(&table, slot, 1000 << slot);
    }
    assert_eq!(table.queued_bytes(), 15_000);
    assert_eq!(table.withdraw(1), Withdrawn::Later);
    assert_eq!(table.queued_bytes(), 15_000, "its place is in the queue");
    let Some(Taken::Chunk(first)) = table.take(0) else {
        panic!("the first chunk")
    };
    assert!(matches!(table.take(0), Some(Taken::Withdrawn(1))));
    assert_eq!(table.queued_bytes(), 12_000);
    assert_eq!(table.lane_ended(0, [first], |_| panic!("it has ended")), 1);
    assert_eq!(table.queued_bytes(), 13_000);
    for bytes in [12_000, 8000, 0] {
        let Some(Taken::Chunk(chunk)) = table.take(0) else {
            panic!("a chunk")
        };
        assert_eq!(table.queued_bytes(), bytes);
        assert!(!table.written(0, chunk, 0), "it is kept");
    }
    assert_eq!(requeued(&table, 0), 3);
    assert_eq!(table.queued_bytes(), 13_000);
}

#[test]
fn a_lane_keeps_what_it_writes_while_somebody_waits() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let table = TransmitTable::new(2, 4);
    let chunk = taken(&table, worker.pinned(), 1, 0);
    table.let_go(0);
    assert!(!table.is_to_let_go(0, 1), "another chunk was meant");
    assert_eq!(table.withdraw(1), Withdrawn::InHand(0));
    assert!(!table.is_to_let_go(0, 1), "it was not asked for");
    table.let_go(0);
    assert!(!table.is_to_let_go(1, 1), "that is another lane");
    assert!(table.is_to_let_go(0, 1));
    assert!(!table.is_to_let_go(0, 1), "it was asked for once");
    assert!(table.written(0, chunk, 0), "its slot is free then");
}

fn written(table: &TransmitTable, pool: &PinnedPool, slot: u16, lane: u16, spliced: bool) {
    let mut chunk = taken(table, pool, slot, lane);
    chunk.spliced = spliced.then_some(lane);
    assert!(!table.written(lane, chunk, 0), "it is kept");
}

/// A lane dies with nothing in its hands; how many chunks go again.
fn requeued(table: &TransmitTable, lane: u16) -> usize {
    table.lane_ended(lane, [], |slot| panic!("slot {slot} has ended"))
}

fn has_unread_pages(table: &TransmitTable, lane: u16) -> bool {
    let is_lent = |chunk: &Outgoing| chunk.spliced == Some(lane);
    table.chunks.keeps(lane, is_lent)
}

/// A chunk of a pinned slot in a lane's hands.
fn taken(table: &TransmitTable, pool: &PinnedPool, slot: u16, lane: u16) -> Outgoing {
    let sequence = u64::from(slot);
    let header = ChunkHeader {
        sequence,
        transfer: TransferId(0),
        offset: 0,
        total: 0,
        length: 8,
        attempt: 0,
        payload: ChunkPayload::Follows,
    };
    let position = ChunkPosition {
        sequence,
        transfer: 0,
        offset: 0,
        length: 8,
        done: 0,
    };
    let pinned = pool.try_take().expect("a slot");
    let payload = pinned.slice().slice(..8).expect("in the slot");
    table.enqueue(Outgoing::new(slot, header.encode(), position, payload));
    drop(pinned);
    match table.take(lane) {
        Some(Taken::Chunk(chunk)) => chunk,
        other => panic!("the chunk is queued: {other:?}"),
    }
}

/// A slot whose pages the kernel may still send must not be filled with something else, though
/// nobody waits for its chunk any more.
#[test]
fn pages_are_kept_until_the_peer_has_read_past_them() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(2, 4);
    written(&table, pool, 0, 0, true);
    written(&table, pool, 1, 1, true);
    written(&table, pool, 2, 0, true);
    assert_eq!(table.forget(0, 0, false), Forgotten::Free);
    assert_eq!(pool.free_slots(), free - 3, "chunk 0 was not read");
    assert!(has_unread_pages(&table, 0));
    assert_eq!(table.forget(1, 1, true), Forgotten::Free);
    assert_eq!(
        pool.free_slots(),
        free - 2,
        "another lane says nothing of it"
    );
    assert_eq!(table.forget(2, 2, true), Forgotten::Free);
    assert_eq!(pool.free_slots(), free, "chunk 2 came behind it");
    assert!(!has_unread_pages(&table, 0));
}

#[test]
fn copies_are_let_go_of_at_once() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(2, 4);
    written(&table, pool, 0, 0, false);
    assert_eq!(table.forget(0, 0, false), Forgotten::Free);
    assert_eq!(pool.free_slots(), free);
}

/// The peer's acknowledgement does not say which lane it read the chunk from.
#[test]
fn a_chunk_sent_twice_says_nothing_of_its_lanes() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(2, 4);
    // Chunk 1 goes out on lane 0, which dies; the peer has read it, but that is not known yet.
    written(&table, pool, 1, 0, true);
    // Chunk 0 is in lane 1's socket and is given up: its pages linger.
    written(&table, pool, 0, 1, true);
    assert_eq!(table.forget(0, 0, false), Forgotten::Free);
    // Chunk 1 is written again, on lane 1.
    assert_eq!(requeued(&table, 0), 1);
    let Some(Taken::Chunk(mut chunk)) = table.take(1) else {
        panic!("it is queued");
    };
    chunk.spliced = Some(1);
    assert!(!table.written(1, chunk, 0));
    assert_eq!(pool.free_slots(), free - 2);
    // Now the acknowledgement of what came over lane 0 is heard. Nobody has read lane 1.
    assert_eq!(table.forget(1, 1, true), Forgotten::Free);
    assert_eq!(pool.free_slots(), free - 1, "lane 1 was not read");
    written(&table, pool, 2, 1, true);
    assert_eq!(table.forget(2, 2, true), Forgotten::Free);
    assert_eq!(pool.free_slots(), free);
}

/// As above, while the second lane still has the chunk in its hands.
#[test]
fn a_chunk_placed_while_it_is_sent_again_keeps_its_pages() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(2, 4);
    written(&table, pool, 1, 0, true);
    assert_eq!(requeued(&table, 0), 1);
    let Some(Taken::Chunk(mut chunk)) = table.take(1) else {
        panic!("it is queued");
    };
    chunk.spliced = Some(1);
    // What came over lane 0 is acknowledged before lane 1 has written all of it.
    assert_eq!(table.forget(1, 1, true), Forgotten::Later);
    assert!(table.written(1, chunk, 0));
    assert_eq!(pool.free_slots(), free - 1, "lane 1 was not read");
    written(&table, pool, 2, 1, true);
    assert_eq!(table.forget(2, 2, true), Forgotten::Free);
    assert_eq!(pool.free_slots(), free);
}

#[test]
fn no_end_of_a_lane_frees_pages_that_it_sent() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(2, 4);
    written(&table, pool, 0, 0, true);
    written(&table, pool, 1, 0, true);
    assert_eq!(table.forget(0, 0, false), Forgotten::Free);
    // The lane dies. Its other chunk is queued again, and nobody wants it any more.
    assert_eq!(requeued(&table, 0), 1);
    assert_eq!(table.forget(1, 1, false), Forgotten::Settled);
    assert_eq!((pool.free_slots(), table.chunks.unwanted()), (free - 2, 2));
    assert!(matches!(table.take(1), Some(Taken::Withdrawn(1))));
    // The peer reads the lane that takes its place only after it has closed this one.
    written(&table, pool, 2, 0, true);
    assert_eq!(table.forget(2, 2, true), Forgotten::Free);
    assert_eq!((pool.free_slots(), table.chunks.unwanted()), (free, 0));
}

/// A chunk in a lane's hands that nobody wants any more: its pages are kept whether the lane writes
/// the rest or dies with it.
#[test]
fn a_chunk_given_up_in_a_lanes_hands_leaves_its_pages() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    for dies in [false, true] {
        let table = TransmitTable::new(2, 4);
        let mut chunk = taken(&table, pool, 0, 0);
        chunk.spliced = Some(0);
        assert_eq!(table.forget(0, 0, false), Forgotten::Later);
        let mut freed = Vec::new();
        match dies {
            false => assert!(table.written(0, chunk, 0)),
            true => assert_eq!(table.lane_ended(0, [chunk], |slot| freed.push(slot)), 0),
        }
        assert_eq!(freed.len(), usize::from(dies), "it has ended");
        assert_eq!(table.chunks.unwanted(), 1, "the lane dies: {dies}");
        assert_eq!(pool.free_slots(), free - 1);
        drop(table);
        assert_eq!(pool.free_slots(), free, "no lane is left");
    }
}

#[test]
fn what_the_peer_placed_before_its_lane_lets_go_is_read() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(2, 4);
    written(&table, pool, 1, 0, true);
    assert_eq!(table.forget(1, 1, false), Forgotten::Free);
    assert_eq!(table.chunks.unwanted(), 1);
    let mut chunk = taken(&table, pool, 0, 0);
    chunk.spliced = Some(0);
    assert_eq!(table.forget(0, 0, true), Forgotten::Later);
    assert!(table.written(0, chunk, 0), "it has ended");
    assert_eq!((table.chunks.unwanted(), pool.free_slots()), (0, free));
}

/// A peer that says too early that it has read a chunk gets its bytes again from the slot, whatever
/// lies there then.
#[test]
fn a_lent_slot_stays_until_the_peers_system_has_its_bytes() {
    let _alone = alone();
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(2, 4);
    let (acknowledged, calls) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let (of_lane, counted) = (Arc::clone(&acknowledged), Arc::clone(&calls));
    let asked = move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        of_lane.load(Ordering::SeqCst)
    };
    table.lends(0, Some(Acknowledged(Box::new(asked))));
    // Nothing is lent yet: the system is not asked.
    written(&table, pool, 3, 0, false);
    assert_eq!(table.forget(3, 3, true), Forgotten::Free);
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    written(&table, pool, 0, 0, true);
    // What was copied is nobody's concern.
    written(&table, pool, 1, 0, false);
    assert_eq!(table.forget(1, 1, true), Forgotten::Free);
    assert_eq!(table.forget(0, 0, true), Forgotten::Free);
    assert_eq!((pool.free_slots(), table.chunks.unwanted()), (free - 1, 1));
    acknowledged.store(true, Ordering::SeqCst);
    written(&table, pool, 2, 0, true);
    assert_eq!(table.forget(2, 2, true), Forgotten::Free);
    assert_eq!((pool.free_slots(), table.chunks.unwanted()), (free, 0));
}
