//! What becomes of chunks that lanes have written, and which lane takes the next.

use tcpx_memory::{CopyWorker, PinnedPool};

use super::*;

fn written(table: &TransmitTable, pool: &PinnedPool, slot: u16, lane: u16, spliced: bool) {
    let sequence = u64::from(slot);
    let header = ChunkHeader {
        sequence,
        transfer: TransferId(0),
        offset: 0,
        length: 8,
        attempt: 0,
    };
    let position = ChunkPosition {
        sequence,
        transfer: 0,
        offset: 0,
        length: 8,
        done: 0,
    };
    let pinned = pool.try_take().expect("a slot");
    table.enqueue(Outgoing {
        slot,
        header: header.encode(),
        position,
        payload: pinned.slice().slice(..8).expect("in the slot"),
        attempt: 0,
        permit: None,
        spliced: false,
    });
    drop(pinned);
    let Some(Taken::Chunk(mut chunk)) = table.take(lane) else {
        panic!("the chunk is queued");
    };
    chunk.spliced = spliced;
    assert!(table.written(chunk).is_none(), "it is kept");
}

/// A slot whose pages the kernel may still send must not be filled with something else, though
/// nobody waits for its chunk any more.
#[test]
fn pages_that_may_still_be_sent_are_kept_until_the_peer_has_read_past_them() {
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(4, true);
    written(&table, pool, 0, 0, true);
    written(&table, pool, 1, 1, true);
    written(&table, pool, 2, 0, true);
    assert_eq!(table.forget(0, 0, false), Forgotten::Free);
    assert_eq!(pool.free_slots(), free - 3, "chunk 0 was not read");
    assert!(table.has_unread_pages(0));
    assert_eq!(table.forget(1, 1, true), Forgotten::Free);
    assert_eq!(
        pool.free_slots(),
        free - 2,
        "another lane says nothing of it"
    );
    assert_eq!(table.forget(2, 2, true), Forgotten::Free);
    assert_eq!(pool.free_slots(), free, "chunk 2 came behind it");
    assert!(!table.has_unread_pages(0));
}

#[test]
fn copies_are_let_go_of_at_once() {
    let worker = CopyWorker::host().expect("a worker");
    let pool = worker.pinned();
    let free = pool.free_slots();
    let table = TransmitTable::new(4, true);
    written(&table, pool, 0, 0, false);
    assert_eq!(table.forget(0, 0, false), Forgotten::Free);
    assert_eq!(pool.free_slots(), free);
}

#[test]
fn lanes_at_rest_take_short_chunks_in_turn_and_long_ones_as_few_as_can() {
    let table = TransmitTable::new(4, true);
    let woken = |bytes: usize| {
        for lane in [1, 4, 63] {
            table.idle.insert(lane);
        }
        table.take_idle(bytes)
    };
    assert_eq!(
        [1, 1, 1, 1, 1].map(woken),
        [Some(1), Some(4), Some(63), Some(1), Some(4)]
    );
    assert_eq!([LONG, LONG].map(woken), [Some(1), Some(1)]);
    assert_eq!(table.take_idle(1), Some(63), "one that rests is found");
    assert_eq!(table.take_idle(1), Some(4));
    assert_eq!(table.take_idle(1), None);
}
