//! Which lane takes the next chunk.

use tcpx_memory::Region;

use super::*;
use crate::channel::SendChunk;

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

#[test]
fn behind_a_short_chunk_lanes_that_rest_go_first() {
    let table = TransmitTable::new(4, true);
    assert_eq!(table.next_after_short(3), Next::Rest);
    assert_eq!(table.take_idle(LONG), Some(3), "it rests");
    // Only whether the queue is empty counts here.
    table.push(0, 1);
    assert_eq!(table.next_after_short(3), Next::Go, "nobody else is there");
    assert_eq!(table.take_idle(LONG), None, "it does not rest");
    table.idle.insert(1);
    table.idle.insert(5);
    let turns: Vec<_> = [3, 5, 1]
        .map(|lane| table.next_after_short(lane))
        .into_iter()
        .collect();
    assert_eq!(turns, [Next::Wake(5), Next::Wake(1), Next::Wake(3)]);
    assert_eq!(table.take_idle(LONG), Some(1), "the last of them rests");
}

#[test]
fn a_lane_that_has_found_something_is_not_at_rest_however_it_was_woken() {
    let table = TransmitTable::new(4, true);
    table.idle.insert(2);
    table.with(0, |state| *state = SendState::Withdrawn);
    table.push(0, 1);
    assert!(matches!(table.take(2), Some(Taken::Withdrawn(0))));
    assert_eq!(table.take_idle(1), None, "it has its hands full");
}

#[test]
fn bytes_in_the_queue_are_those_of_its_chunks_until_a_lane_comes_upon_them() {
    let table = TransmitTable::new(4, true);
    let queue = |slot: u16, bytes: usize| {
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
        table.enqueue(Outgoing {
            slot,
            header,
            position,
            payload,
            attempt: 0,
            permit: None,
            spliced: None,
        });
    };
    for slot in 0..4 {
        queue(slot, 1000 << slot);
    }
    assert_eq!(table.queued_bytes(), 15_000);
    assert_eq!(table.withdraw(1), Withdrawn::Later);
    assert_eq!(table.queued_bytes(), 15_000, "its place is in the queue");
    let Some(Taken::Chunk(first)) = table.take(0) else {
        panic!("the first chunk")
    };
    assert!(matches!(table.take(0), Some(Taken::Withdrawn(1))));
    assert_eq!(table.queued_bytes(), 12_000);
    assert!(table.put_back(first).is_none());
    assert_eq!(table.queued_bytes(), 13_000);
    for bytes in [9000, 1000, 0] {
        let Some(Taken::Chunk(chunk)) = table.take(0) else {
            panic!("a chunk")
        };
        assert_eq!(table.queued_bytes(), bytes);
        assert!(table.written(chunk).is_none(), "it is kept");
    }
    assert_eq!(table.requeue(0), 3);
    assert_eq!(table.queued_bytes(), 13_000);
}
