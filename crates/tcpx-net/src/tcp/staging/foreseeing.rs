//! Copies of the first chunks of a send while the peer has yet to grant it, so that a lane can send them at
//! once. Chunks that are there come first: such a copy begins only where none waits and slots abound, and
//! its slot goes back when a chunk finds none.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_memory::{Fence, Job, MemoryError, RegionSlice, Work};

use super::super::permits::Permit;
use super::super::shared::{Shared, lock};
use super::super::transmit_table::{LONG, Unstaged};
use super::AHEAD;
use super::ahead::{CopyEnd, Found};
use super::sending::{SHORT_COPIES, copying};
use crate::channel::{Cancel, Foreseen};

/// What a send is copied from.
#[derive(Debug, Clone)]
pub(super) struct Source {
    bytes: RegionSlice,
    fence: Option<Fence>,
}

/// Where the bytes of a chunk lie that is not there yet.
#[derive(Debug)]
pub(super) struct Place {
    payload: RegionSlice,
    permit: Permit,
}

impl Shared {
    /// Begins to copy a send's first chunks, if nothing speaks against it.
    pub(in super::super) fn foresee(shared: &Arc<Self>, send: Foreseen) -> bool {
        let Foreseen {
            token,
            transfer,
            source: bytes,
            chunk_bytes,
            fence,
        } = send;
        let length = bytes.len() as u64;
        // A copy that waited for the program's own GPU work would hold its slot for as long.
        let is_ready = fence.as_ref().is_none_or(Fence::was_reached);
        if !is_ready || chunk_bytes as usize >= LONG || !shared.staging.is_needed(&bytes) {
            return false;
        }
        let source = Source { bytes, fence };
        let mut ahead = lock(&shared.staging.ahead);
        if !ahead.offer(token, transfer, source, length, chunk_bytes.into()) {
            return false;
        }
        drop(ahead);
        Self::copy_ahead(shared);
        lock(&shared.staging.ahead).has_begun(token)
    }

    /// Begins copies for chunks that are not there yet, while all that are have theirs.
    pub(super) fn copy_ahead(shared: &Arc<Self>) {
        let staging = &shared.staging;
        loop {
            // Held over taking the slot, as for chunks that are there.
            let waiting = lock(&staging.waiting);
            let busy = staging.short_copies.load(Ordering::SeqCst) >= SHORT_COPIES;
            if !waiting.is_empty() || busy {
                return;
            }
            let mut ahead = lock(&staging.ahead);
            let Some(next) = ahead.next() else {
                return;
            };
            let Some((source, length)) = next.range() else {
                return;
            };
            let fence = next.source.fence.clone();
            let Some(worker) = staging.worker(source.kind()) else {
                return;
            };
            let pinned = &worker.pool;
            let slots = pinned.slots();
            // Receives need slots too.
            if pinned.free_slots() <= slots / 2 {
                return;
            }
            let Some(permit) = worker.permits.take_spare(slots, &shared.wakers) else {
                return;
            };
            let Some(slot) = pinned.try_take_rested() else {
                return;
            };
            let Ok(payload) = slot.slice().slice(..length) else {
                return;
            };
            let to = payload.clone();
            let Some(number) = ahead.begin(Place { payload, permit }) else {
                return;
            };
            staging.short_copies.fetch_add(1, Ordering::SeqCst);
            drop(ahead);
            drop(waiting);
            drop(slot);
            staging.any_ahead.store(true, Ordering::SeqCst);
            let job = Job {
                work: Work::Copy { from: source, to },
                fence,
                sink: Arc::<Self>::clone(shared),
                token: AHEAD | u64::from(number),
            };
            if let Err(refused) = worker.worker.submit(job) {
                let error = MemoryError::from(refused);
                shared.copy_ahead_ended(number, &Err(error));
                staging.short_copies.fetch_sub(1, Ordering::SeqCst);
                // Who found too many copies under way relies on the end of each.
                if staging.has_waiting() {
                    Self::stage_waiting(shared);
                }
                return;
            }
        }
    }

    /// A copy of [`Self::copy_ahead`] has ended.
    pub(super) fn copied_ahead(&self, number: u32, result: &Result<u64, MemoryError>) {
        self.copy_ahead_ended(number, result);
        self.short_copy_ended();
    }

    fn copy_ahead_ended(&self, number: u32, result: &Result<u64, MemoryError>) {
        let end = lock(&self.staging.ahead).copy_ended(number, result.is_ok());
        match end {
            CopyEnd::Chunk(slot) => self.end_sends(slot, result),
            CopyEnd::Free(place) => drop(place),
            CopyEnd::Kept => return,
        }
        self.tell_ended_ahead();
    }

    /// Gives a chunk the slot with its bytes, if it was copied or is being copied; else it comes back.
    pub(in super::super) fn stage_ahead(&self, slot: u16, unstaged: Unstaged) -> Option<Unstaged> {
        let position = unstaged.position;
        let mut ahead = lock(&self.staging.ahead);
        let found = ahead.find(position.transfer, position.offset, position.length, slot);
        let (place, copied) = match found {
            Found::Copied(place) => (place, true),
            Found::Copying(place) => (place, false),
            Found::Nothing(free) => {
                drop(ahead);
                drop(free);
                self.tell_ended_ahead();
                return Some(unstaged);
            }
        };
        let Place { payload, permit } = place;
        // Before the end of the copy can look for it.
        self.transmit.with(slot, |state| {
            *state = copying(slot, &unstaged, payload, Some(permit));
        });
        drop(ahead);
        // Nobody reads the source for this chunk any more.
        drop(unstaged);
        if copied {
            self.end_sends(slot, &Ok(position.length));
        }
        self.tell_ended_ahead();
        None
    }

    /// Gives back the slots that no chunk has taken over, for chunks that are there and have none. Those that copies
    /// write to come back when these end.
    pub(super) fn reclaim_ahead(&self) {
        if self.staging.any_ahead.swap(false, Ordering::SeqCst) {
            self.give_back_ahead();
        }
    }

    /// Gives back the slots that no chunk has taken over.
    pub(in super::super) fn give_back_ahead(&self) {
        let places = lock(&self.staging.ahead).give_back();
        drop(places);
        self.tell_ended_ahead();
    }

    /// The sends of [`Self::foresee`] that have ended since the last call.
    pub(in super::super) fn ended_ahead(&self) -> Vec<u64> {
        lock(&self.staging.ahead).take_ended()
    }

    /// Takes a send of [`Self::foresee`] back; `None` if it is none.
    pub(in super::super) fn cancel_ahead(&self, token: u64) -> Option<Cancel> {
        let (places, is_pending) = lock(&self.staging.ahead).cancel(token)?;
        drop(places);
        Some(if is_pending {
            Cancel::Pending
        } else {
            Cancel::Done
        })
    }

    fn tell_ended_ahead(&self) {
        if lock(&self.staging.ahead).has_ended_some() {
            self.wakers.signal.wake();
        }
    }
}

impl super::ahead::Next<'_, Source> {
    /// The bytes to copy, and how many they are.
    fn range(&self) -> Option<(RegionSlice, usize)> {
        let start = usize::try_from(self.offset).ok()?;
        let length = usize::try_from(self.length).ok()?;
        let end = start.checked_add(length)?;
        let bytes = self.source.bytes.slice(start..end).ok()?;
        Some((bytes, length))
    }
}
