//! The queue's bytes.

use tcpx_memory::Region;

use super::*;
use crate::channel::SendChunk;

#[test]
fn bytes_in_the_queue_are_those_of_its_chunks_until_a_lane_comes_upon_them() {
    let table = TransmitTable::new(2, 4);
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
    for bytes in [12_000, 8000, 0] {
        let Some(Taken::Chunk(chunk)) = table.take(0) else {
            panic!("a chunk")
        };
        assert_eq!(table.queued_bytes(), bytes);
        assert!(table.written(chunk).is_none(), "it is kept");
    }
    assert_eq!(table.requeue(0), 3);
    assert_eq!(table.queued_bytes(), 13_000);
}
