//! Host memory for the bytes that did not land in the pool.

use std::sync::Arc;

use tcpx_memory::{Access, BouncePool, MemoryError, Region, RegionSlice};

/// Bytes of a channel's landing area: a few chunks, all of which may have come plain.
const BYTES: usize = 4 << 20;
/// Less room than this is not offered while more will come: each offer costs a system call, and
/// cuts a fragment in two.
const LEAST_OFFER: usize = 64 << 10;

/// A ring of host memory. Receives write at its head; what they wrote is handed on in parts, and
/// the parts come back in the same order.
#[derive(Debug)]
pub(super) struct LandingRing {
    slice: RegionSlice,
    pool: Arc<BouncePool>,
    /// Where the next byte goes.
    head: usize,
    /// Bytes behind the head that are not free: written, or skipped at the ring's end.
    used: usize,
    /// Those of `used` that were not handed on yet.
    open: usize,
    /// Those of `open` that were written.
    written: usize,
}

impl LandingRing {
    /// Ordinary memory: to pin some for each channel would hold up copies of the program.
    pub(super) fn new() -> Result<Self, MemoryError> {
        Self::of(&Region::host(BYTES)?)
    }

    fn of(region: &Region) -> Result<Self, MemoryError> {
        let lease = region.lease_as(.., Access::Write, "a channel's landing area")?;
        Ok(Self {
            slice: lease.all(),
            pool: Arc::new(BouncePool::new(lease.all())),
            head: 0,
            used: 0,
            open: 0,
            written: 0,
        })
    }

    /// The ring as a source of fragments.
    pub(super) fn pool(&self) -> &Arc<BouncePool> {
        &self.pool
    }

    /// Where a receive of at most `want` bytes may write, and the place's offset in the ring.
    /// `None` until parts come back.
    pub(super) fn offer(&mut self, want: usize) -> Option<(usize, RegionSlice)> {
        if self.used == self.open && self.written == 0 {
            (self.head, self.used, self.open) = (0, 0, 0);
        }
        let length = self.slice.len();
        let enough = want.min(LEAST_OFFER);
        let mut room = self.room();
        if room < enough && self.head + room == length && self.used + room < length {
            // The ring's end is too short: go on at its start.
            self.used += room;
            self.open += room;
            self.head = 0;
            room = self.room();
        }
        if room == 0 || room < enough {
            return None;
        }
        let start = self.head;
        let slice = self.slice.slice(start..start + room.min(want)).ok()?;
        Some((start, slice))
    }

    /// Free bytes from the head on without a break.
    fn room(&self) -> usize {
        let length = self.slice.len();
        (length - self.used).min(length - self.head)
    }

    /// So many bytes were written to the last offer.
    pub(super) fn wrote(&mut self, bytes: usize) {
        self.head += bytes;
        self.used += bytes;
        self.open += bytes;
        self.written += bytes;
        if self.head == self.slice.len() {
            self.head = 0;
        }
    }

    /// Bytes written and not handed on.
    pub(super) fn written(&self) -> usize {
        self.written
    }

    /// Whether what was written since the last part is so much that it should be handed on.
    pub(super) fn presses(&self) -> bool {
        self.written >= self.slice.len() / 2
    }

    /// Hands on what was written; give the answer to [`Self::release`] when it was read.
    pub(super) fn hand_on(&mut self) -> usize {
        self.written = 0;
        std::mem::take(&mut self.open)
    }

    /// The oldest part was read.
    pub(super) fn release(&mut self, part: usize) {
        self.used = self.used.saturating_sub(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(bytes: usize) -> LandingRing {
        LandingRing::of(&Region::host(bytes).unwrap()).unwrap()
    }

    /// Writes up to `bytes` and returns where.
    fn write(landing: &mut LandingRing, bytes: usize) -> Option<(usize, usize)> {
        let (start, slice) = landing.offer(bytes)?;
        landing.wrote(slice.len());
        Some((start, slice.len()))
    }

    #[test]
    fn offers_go_round_and_never_touch_what_is_not_read() {
        let mut landing = ring(4 * LEAST_OFFER);
        let part = 3 * LEAST_OFFER / 2;
        assert_eq!(write(&mut landing, part), Some((0, part)));
        let first = landing.hand_on();
        assert_eq!(write(&mut landing, part), Some((part, part)));
        let second = landing.hand_on();
        // What is left at the end is a whole offer.
        assert_eq!(write(&mut landing, part), Some((2 * part, LEAST_OFFER)));
        assert_eq!(write(&mut landing, part), None);
        landing.release(first);
        assert_eq!(write(&mut landing, part), Some((0, part)));
        assert_eq!(write(&mut landing, 1), None);
        let third = landing.hand_on();
        landing.release(second);
        landing.release(third);
        assert_eq!(landing.used, 0);
    }

    #[test]
    fn a_short_end_is_skipped_and_comes_back_with_its_part() {
        let mut landing = ring(4 * LEAST_OFFER);
        let most = 7 * LEAST_OFFER / 2;
        assert_eq!(write(&mut landing, most), Some((0, most)));
        let first = landing.hand_on();
        assert_eq!(write(&mut landing, LEAST_OFFER), None);
        landing.release(first);
        // Nothing is in use any more: the start is free again, and all of it.
        assert_eq!(write(&mut landing, most), Some((0, most)));
        let second = landing.hand_on();
        assert_eq!(write(&mut landing, 100), Some((most, 100)));
        let third = landing.hand_on();
        landing.release(second);
        assert_eq!(write(&mut landing, LEAST_OFFER), Some((0, LEAST_OFFER)));
        let fourth = landing.hand_on();
        assert_eq!(
            fourth,
            LEAST_OFFER + LEAST_OFFER / 2 - 100,
            "with the skipped end"
        );
        landing.release(third);
        landing.release(fourth);
        assert_eq!(landing.used, 0);
    }

    #[test]
    fn an_unwritten_offer_costs_nothing() {
        let mut landing = ring(2 * LEAST_OFFER);
        for _ in 0..100 {
            assert_eq!(landing.offer(usize::MAX).unwrap().0, 0);
        }
        landing.wrote(5);
        assert_eq!((landing.written(), landing.presses()), (5, false));
        landing.wrote(LEAST_OFFER);
        assert!(landing.presses());
    }

    #[test]
    fn a_full_ring_offers_nothing_until_a_part_comes_back() {
        let mut landing = ring(2 * LEAST_OFFER);
        assert_eq!(write(&mut landing, usize::MAX), Some((0, 2 * LEAST_OFFER)));
        let part = landing.hand_on();
        assert!(landing.offer(1).is_none());
        landing.release(part);
        assert!(landing.offer(1).is_some());
    }
}
