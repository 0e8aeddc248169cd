//! Sends that are copied to pinned slots: in order, and short ones several at a time.
//!
//! A copy costs a GPU some microseconds beside its bytes, as much as those of a short chunk. So
//! only a few copies of short chunks are under way at a time; those that wait meanwhile follow each
//! other in memory, and one copy takes to one slot what fits there.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_memory::{Fence, Job, MemoryError, PinnedPool, PinnedSlot, PoolHalf, RegionSlice, Work};

use super::super::permits::Permit;
use super::super::shared::{ChannelShared, Event, lock};
use super::super::transmit_table::{LONG, Outgoing, SendState, Unstaged};
use super::{COUNTED, Worker, take_slot};
use crate::error::ChannelError;

/// Copies of short chunks under way at a time: one that runs, and those that follow at once.
pub(super) const SHORT_COPIES: usize = 3;

/// Sends that one copy takes to one slot.
struct Batch {
    first: u16,
    last: u16,
    transfer: u64,
    source: RegionSlice,
    to: RegionSlice,
    fence: Option<Fence>,
}

impl ChannelShared {
    /// Queues a send that needs a slot, and starts its copy if one is free.
    pub(in super::super) fn stage(shared: &Arc<Self>, slot: u16, unstaged: Unstaged) {
        shared
            .transmit
            .with_slot(slot, |state| *state = SendState::Waiting(unstaged));
        lock(&shared.parts.staging.waiting).push_back(slot);
        Self::stage_waiting(shared);
    }

    /// Queues a send from memory of a GPU that the peer reads where it lies, once what it waits for
    /// is there.
    pub(in super::super) fn send_where_it_lies(
        shared: &Arc<Self>,
        outgoing: Outgoing,
        fence: Option<Fence>,
    ) {
        let slot = outgoing.slot;
        let waits = fence.filter(|fence| !fence.was_reached());
        let worker = shared.parts.staging.worker(outgoing.payload.kind());
        let (Some(fence), Some(Worker { worker, .. })) = (waits, worker) else {
            shared.transmit.enqueue(outgoing);
            return shared.wake_sender();
        };
        // Nothing of it: the worker sees the fence reached.
        let of = outgoing.payload.slice(..0);
        shared.transmit.with_slot(slot, |state| {
            *state = SendState::Copying {
                outgoing,
                cancelled: false,
                next: None,
            };
        });
        let submitted = of.map(|of| Job {
            work: Work::checksum(of),
            fence: Some(fence),
            sink: Arc::<Self>::clone(shared),
            token: slot.into(),
        });
        let submitted = submitted.and_then(|job| worker.submit(job).map_err(MemoryError::from));
        if let Err(error) = submitted {
            shared.end_sends(slot, &Err(error));
        }
    }

    /// Starts the copies of waiting sends, in order, while slots are free.
    pub(in super::super) fn stage_waiting(shared: &Arc<Self>) {
        let staging = &shared.parts.staging;
        // Set before looking, so that a slot that comes back meanwhile leads to another look.
        staging.has_waiting.store(true, Ordering::SeqCst);
        loop {
            // Held over taking the slot: two threads must not start copies out of order.
            let mut waiting = lock(&staging.waiting);
            let Some(&slot) = waiting.front() else {
                staging.has_waiting.store(false, Ordering::SeqCst);
                return;
            };
            let next = shared.transmit.with_slot(slot, |state| match state {
                SendState::Waiting(unstaged) => {
                    let ready = unstaged.fence.as_ref().is_none_or(Fence::was_reached);
                    let (source, sequence) = (&unstaged.source, unstaged.position.sequence);
                    // Not the source itself: its copy may end before this does.
                    Some((source.kind(), source.len(), ready, sequence))
                }
                _ => None,
            });
            let Some((kind, length, ready, sequence)) = next else {
                // Taken back.
                waiting.pop_front();
                drop(waiting);
                shared.transmit.free(slot);
                shared.report(Event::SendWithdrawn { slot });
                continue;
            };
            let Some(worker) = staging.worker(kind) else {
                return;
            };
            // Copies that wait for the program's own GPU work hold up nothing.
            let counted = ready && length < LONG;
            // Who ends one looks here again.
            if counted && staging.short_copies.load(Ordering::SeqCst) >= SHORT_COPIES {
                return;
            }
            let pinned = take_slot(&worker.send, length, PoolHalf::Lower, sequence);
            let Some(pinned) = pinned else {
                return;
            };
            let Ok(payload) = pinned.slice().slice(..length) else {
                return;
            };
            let permit = || Permit::new(&worker.lent, worker.send.slots());
            let Some(mut batch) = shared.begin_copy(slot, payload, permit()) else {
                // Taken back since: the next round removes its entry.
                continue;
            };
            waiting.pop_front();
            if counted {
                while let Some(&next) = waiting.front()
                    && batch.source.len() < PinnedPool::SLOT_BYTES
                    && shared.join_copy(&mut batch, next, &pinned, permit())
                {
                    waiting.pop_front();
                }
                staging.short_copies.fetch_add(1, Ordering::SeqCst);
            }
            drop(waiting);
            drop(pinned);
            let job = Job {
                work: Work::Copy {
                    from: batch.source,
                    to: batch.to,
                },
                fence: batch.fence,
                sink: Arc::<Self>::clone(shared),
                token: u64::from(batch.first) | if counted { COUNTED } else { 0 },
            };
            if let Err(refused) = worker.worker.submit(job) {
                if counted {
                    staging.short_copies.fetch_sub(1, Ordering::SeqCst);
                }
                shared.end_sends(batch.first, &Err(MemoryError::from(refused)));
            }
        }
    }

    /// The first send of a copy to `payload`; `None` if it does not wait any more.
    fn begin_copy(&self, slot: u16, payload: RegionSlice, permit: Permit) -> Option<Batch> {
        self.transmit.with_slot(slot, |state| {
            let SendState::Waiting(unstaged) = state else {
                return None;
            };
            let batch = Batch {
                first: slot,
                last: slot,
                transfer: unstaged.position.transfer,
                source: unstaged.source.clone(),
                to: payload.clone(),
                fence: unstaged.fence.take(),
            };
            *state = copying(slot, unstaged, payload, permit);
            Some(batch)
        })
    }

    /// Has a copy take this send along, if it waits, follows what the copy takes, and the slot has
    /// room.
    fn join_copy(&self, batch: &mut Batch, slot: u16, pinned: &PinnedSlot, permit: Permit) -> bool {
        let joined = self.transmit.with_slot(slot, |state| {
            let SendState::Waiting(unstaged) = state else {
                return None;
            };
            // The sends of one transfer wait for the same work of the GPU.
            if unstaged.position.transfer != batch.transfer {
                return None;
            }
            let source = batch.source.joined(&unstaged.source)?;
            let to = pinned.slice().slice(..source.len()).ok()?;
            let payload = to.slice(batch.source.len()..).ok()?;
            *state = copying(slot, unstaged, payload, permit);
            Some((source, to))
        });
        let Some((source, to)) = joined else {
            return false;
        };
        self.transmit.with_slot(batch.last, |state| {
            if let SendState::Copying { next, .. } = state {
                *next = Some(slot);
            }
        });
        (batch.source, batch.to, batch.last) = (source, to, slot);
        true
    }

    /// The copy has ended that took this send and those linked to it.
    pub(super) fn sends_copied(
        &self,
        first: u16,
        result: &Result<u64, MemoryError>,
        counted: bool,
    ) {
        self.end_sends(first, result);
        if counted {
            self.short_copy_ended();
        }
    }

    pub(super) fn short_copy_ended(&self) {
        self.parts
            .staging
            .short_copies
            .fetch_sub(1, Ordering::SeqCst);
        if let Some(shared) = self.own.upgrade()
            && self.parts.staging.has_waiting()
        {
            Self::stage_waiting(&shared);
        }
    }

    pub(super) fn end_sends(&self, first: u16, result: &Result<u64, MemoryError>) {
        let mut next = Some(first);
        while let Some(slot) = next {
            next = self.send_copied(slot, result);
        }
    }

    /// Returns the next send of the same copy.
    fn send_copied(&self, slot: u16, result: &Result<u64, MemoryError>) -> Option<u16> {
        let copied = self.transmit.with_slot(slot, |state| {
            match std::mem::replace(state, SendState::Free) {
                SendState::Copying {
                    outgoing,
                    cancelled,
                    next,
                } => Some((outgoing, cancelled, next)),
                other => {
                    *state = other;
                    None
                }
            }
        });
        let (outgoing, cancelled, next) = copied?;
        let error = match result {
            Ok(_) if cancelled => ChannelError::Cancelled,
            Ok(_) => {
                // First: the chunk's end may be reported as soon as a lane can see it.
                if outgoing.permit.is_some() {
                    self.report(Event::Copied { slot });
                }
                self.transmit.enqueue(outgoing);
                self.wake_sender_of_copy();
                // While it was copied, the monitor may have found nothing to look after.
                self.monitor_handle.request_check();
                if self.closing.load(Ordering::Acquire) {
                    self.roster.signal.wake();
                }
                return next;
            }
            Err(error) => self.copy_failed("copying a chunk to a pinned slot", error),
        };
        drop(outgoing);
        self.transmit.free(slot);
        self.report(Event::SendFailed { slot, error });
        next
    }
}

pub(super) fn copying(
    slot: u16,
    unstaged: &Unstaged,
    payload: RegionSlice,
    permit: Permit,
) -> SendState {
    SendState::Copying {
        outgoing: Outgoing {
            slot,
            header: unstaged.header,
            position: unstaged.position,
            payload,
            attempt: 0,
            permit: Some(permit),
            spliced: None,
            exposed: None,
        },
        cancelled: false,
        next: None,
    }
}
