//! Pages that the kernel may still send although nobody waits for their chunk any more.
//!
//! A chunk that was sent by its pages lies in the socket, not a copy of it. If it is given up there,
//! its slot must not be filled with something else before the socket is done with it: the peer would
//! get bytes that belong to another transfer.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx_memory::RegionSlice;

use super::permits::Permit;
use super::shared::lock;

/// A peer inside this host reads the pages themselves, after it has acknowledged them; this long is
/// left to it.
const GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Pages {
    /// Whose socket refers to them.
    lane: u16,
    /// Their place among all that was written.
    order: u64,
    since: Instant,
    _payload: RegionSlice,
    _permit: Option<Permit>,
}

/// Bounded by the pinned slots there are.
#[derive(Debug, Default)]
pub(super) struct Lingering {
    pages: Mutex<Vec<Pages>>,
    any: AtomicBool,
}

impl Lingering {
    /// Keeps a payload as it is.
    pub(super) fn keep(&self, lane: u16, order: u64, payload: RegionSlice, permit: Option<Permit>) {
        lock(&self.pages).push(Pages {
            lane,
            order,
            since: Instant::now(),
            _payload: payload,
            _permit: permit,
        });
        self.any.store(true, Ordering::Release);
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    pub(super) fn has(&self, lane: u16) -> bool {
        lock(&self.pages).iter().any(|one| one.lane == lane)
    }

    /// The peer has read what this lane wrote before this place.
    pub(super) fn read(&self, lane: u16, order: u64) {
        self.release(|one| one.lane == lane && one.order < order);
    }

    /// The lane's socket has nothing any more that was written before this place.
    pub(super) fn acknowledged(&self, lane: u16, order: u64) {
        self.release(|one| one.lane == lane && one.order < order && one.since.elapsed() >= GRACE);
    }

    /// The lane's socket is gone.
    pub(super) fn lane_gone(&self, lane: u16) {
        self.release(|one| one.lane == lane && one.since.elapsed() >= GRACE);
    }

    fn release(&self, which: impl Fn(&Pages) -> bool) {
        if self.is_empty() {
            return;
        }
        let mut pages = lock(&self.pages);
        let (gone, left) = pages.drain(..).partition::<Vec<_>, _>(|one| which(one));
        self.any.store(!left.is_empty(), Ordering::Release);
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
        let sequence = u64::from(slot);
        let header = ChunkHeader {
            sequence,
            transfer: TransferId(0),
            offset: 0,
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
        let Some(Taken::Chunk(mut chunk)) = table.take(lane) else {
            panic!("the chunk is queued");
        };
        chunk.spliced = spliced.then_some(lane);
        assert!(table.written(chunk).is_none(), "it is kept");
    }

    /// A slot whose pages the kernel may still send must not be filled with something else, though
    /// nobody waits for its chunk any more.
    #[test]
    fn pages_that_may_still_be_sent_are_kept_until_the_peer_has_read_past_them() {
        let _alone = alone();
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
        let _alone = alone();
        let worker = CopyWorker::host().expect("a worker");
        let pool = worker.pinned();
        let free = pool.free_slots();
        let table = TransmitTable::new(4, true);
        written(&table, pool, 0, 0, false);
        assert_eq!(table.forget(0, 0, false), Forgotten::Free);
        assert_eq!(pool.free_slots(), free);
    }
}
