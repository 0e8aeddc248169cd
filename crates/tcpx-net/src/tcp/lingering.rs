//! Pages that the kernel may still send although nobody waits for their chunk any more.
//!
//! A chunk that was sent by its pages lies in the socket, not a copy of it. If it is given up there,
//! its slot must not be filled with something else before the peer is done with it: it would
//! get bytes that belong to another transfer. Only knowledge frees a slot: the peer has placed a chunk that came
//! later on the same lane. That its system has acknowledged the bytes says nothing where it is on this host, perhaps
//! behind a virtual card: then it reads the pages themselves afterwards, also those of a lane that was reset.
//! A lane that comes back is read only after its former stream was closed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx_memory::RegionSlice;

use super::permits::Permit;
use super::shared::lock;

#[derive(Debug)]
struct Pages {
    /// Whose socket refers to them.
    lane: u16,
    /// Their place among all that was written.
    order: u64,
    _payload: RegionSlice,
    _permit: Option<Permit>,
}

/// Bounded by the pinned slots there are.
#[derive(Debug, Default)]
pub(super) struct Lingering {
    pages: Mutex<Vec<Pages>>,
    count: AtomicUsize,
}

impl Lingering {
    /// Keeps a payload as it is.
    pub(super) fn keep(&self, lane: u16, order: u64, payload: RegionSlice, permit: Option<Permit>) {
        let mut pages = lock(&self.pages);
        pages.push(Pages {
            lane,
            order,
            _payload: payload,
            _permit: permit,
        });
        self.count.store(pages.len(), Ordering::Release);
    }

    /// Slots that are kept.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    pub(super) fn has(&self, lane: u16) -> bool {
        lock(&self.pages).iter().any(|one| one.lane == lane)
    }

    /// The peer has read what this lane wrote before this place.
    pub(super) fn read(&self, lane: u16, order: u64) {
        self.release(|one| one.lane == lane && one.order < order);
    }

    fn release(&self, which: impl Fn(&Pages) -> bool) {
        if self.count() == 0 {
            return;
        }
        let mut pages = lock(&self.pages);
        let (gone, left) = pages.drain(..).partition::<Vec<_>, _>(|one| which(one));
        self.count.store(left.len(), Ordering::Release);
        *pages = left;
        drop(pages);
        // Outside of the lock: permits that come back wake others.
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use tcpx_memory::{CopyWorker, PinnedPool};
    use tcpx_wire::TransferId;
    use tcpx_wire::chunk_header::ChunkHeader;

    use super::super::staging::alone;
    use super::super::transmit_table::{Forgotten, Outgoing, Taken, TransmitTable};
    use crate::error::ChunkPosition;

    fn written(table: &TransmitTable, pool: &PinnedPool, slot: u16, lane: u16, spliced: bool) {
        let mut chunk = taken(table, pool, slot, lane);
        chunk.spliced = spliced.then_some(lane);
        assert!(table.written(chunk).is_none(), "it is kept");
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
            behind: 0,
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
            spliced: None,
        });
        drop(pinned);
        match table.take(lane) {
            Some(Taken::Chunk(chunk)) => chunk,
            other => panic!("the chunk is queued: {other:?}"),
        }
    }

    /// A slot whose pages the kernel may still send must not be filled with something else, though
    /// nobody waits for its chunk any more.
    #[test]
    fn pages_that_may_still_be_sent_are_kept_until_the_peer_has_read_past_them() {
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
        assert_eq!(table.requeue(0), 1);
        let Some(Taken::Chunk(mut chunk)) = table.take(1) else {
            panic!("it is queued");
        };
        chunk.spliced = Some(1);
        assert!(table.written(chunk).is_none());
        assert_eq!(pool.free_slots(), free - 2);
        // Now the acknowledgement of what came over lane 0 is heard. Nobody has read lane 1.
        assert_eq!(table.forget(1, 1, true), Forgotten::Free);
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
        assert_eq!(table.requeue(0), 1);
        assert_eq!(table.forget(1, 1, false), Forgotten::Settled);
        assert_eq!((pool.free_slots(), table.lingering.count()), (free - 2, 2));
        assert!(matches!(table.take(1), Some(Taken::Withdrawn(1))));
        // The peer reads the lane that takes its place only after it has closed this one.
        written(&table, pool, 2, 0, true);
        assert_eq!(table.forget(2, 2, true), Forgotten::Free);
        assert_eq!((pool.free_slots(), table.lingering.count()), (free, 0));
    }

    /// A chunk in a lane's hands that nobody wants any more: its pages are kept whether the lane writes the rest
    /// or dies with it.
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
            let ended = match dies {
                false => table.written(chunk),
                true => table.put_back(chunk),
            };
            drop(ended.expect("it has ended"));
            assert_eq!(table.lingering.count(), 1, "the lane dies: {dies}");
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
        assert_eq!(table.lingering.count(), 1);
        let mut chunk = taken(&table, pool, 0, 0);
        chunk.spliced = Some(0);
        assert_eq!(table.forget(0, 0, true), Forgotten::Later);
        drop(table.written(chunk).expect("it has ended"));
        assert_eq!((table.lingering.count(), pool.free_slots()), (0, free));
    }
}
