//! Batches of jobs in flight on the worker's streams, and how they complete.

use super::super::device::CopyStream;
use super::{Engine, RESERVE, STARTS};
use crate::error::{CudaError, MemoryError};
use crate::fence::Event;
use crate::job::Work;
use crate::slice::RegionSlice;
use crate::worker::queue::Ticket;

/// Jobs in flight on a stream that complete together.
pub(super) struct Batch {
    event: Event,
    /// How many tickets complete with it.
    tickets: usize,
    /// Bytes, if these are copies that [`Copies`](super::Copies) counts.
    copied: Option<usize>,
    outcome: Result<u64, MemoryError>,
}

impl Engine {
    /// Completes what the streams have finished, at most one copy of each stream: reporting a
    /// completion takes as long as a short copy, and the next copies must start meanwhile.
    pub(super) fn reap(&mut self) -> bool {
        let mut progress = false;
        for lane in CopyStream::ALL {
            while let Some(front) = self.batches[lane as usize].front() {
                let ready = front.event.is_ready(self.device.api());
                if ready == Ok(false) {
                    break;
                }
                let Some(batch) = self.batches[lane as usize].pop_front() else {
                    break;
                };
                self.device.give_back(batch.event);
                self.copied(lane, batch.copied);
                for _ in 0..batch.tickets {
                    let Some(ticket) = self.in_flight[lane as usize].pop_front() else {
                        break;
                    };
                    match &ready {
                        Ok(_) => {
                            let bytes = ticket.work().bytes();
                            let outcome = batch.outcome.clone();
                            ticket.finish(outcome.map(|all| all.min(bytes)));
                        }
                        // Other engines of a broken context may still run.
                        Err(error) => ticket.abandon(error.clone().into()),
                    }
                }
                progress = true;
                if batch.copied.is_some() {
                    break;
                }
            }
        }
        progress
    }

    /// Starts copies that wait for nothing, as many as keep the GPU busy, and no more at a time
    /// than [`STARTS`], for the same reason.
    pub(super) fn start_copies(&mut self) -> bool {
        let mut progress = false;
        for lane in [CopyStream::In, CopyStream::Out] {
            let at = lane as usize;
            for _ in 0..STARTS {
                if self.device.free_events() <= RESERVE {
                    break;
                }
                let first = self.in_flight[at].len();
                let Some(run) = self.copies[at].next(&mut self.in_flight[at]) else {
                    break;
                };
                progress = true;
                let work = self.in_flight[at].get(first).map(Ticket::work);
                let issued = work.map_or(Ok(()), |work| self.issue(lane, work, run.bytes));
                let outcome = issued.map(|()| run.bytes as u64);
                self.follow(
                    lane,
                    run.tickets,
                    Some(run.bytes),
                    outcome.map_err(MemoryError::from),
                );
            }
        }
        progress
    }

    /// Copies `bytes` from the first byte that this work names.
    pub(super) fn issue(
        &self,
        lane: CopyStream,
        work: &Work,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let (from, to) = work.ends();
        let (Some(source), Some(destination)) = (
            from.device_address(),
            to.and_then(RegionSlice::device_address),
        ) else {
            // Only device-accessible memory gets here, and all of it has an address.
            return Ok(());
        };
        // SAFETY: the tickets keep all of both ranges and their leases until the batch has ended.
        unsafe { self.device.copy(lane, destination, source, bytes) }
    }

    /// Tracks a job on a stream until it completes. After an error a part of the job may be in
    /// flight, so the job ends only when the stream has passed it.
    pub(in crate::worker::cuda) fn track(
        &mut self,
        lane: CopyStream,
        ticket: Ticket,
        outcome: Result<u64, MemoryError>,
    ) {
        self.in_flight[lane as usize].push_back(ticket);
        self.follow(lane, 1, None, outcome);
    }

    /// A copy has completed, or nothing will ever report it.
    fn copied(&mut self, lane: CopyStream, bytes: Option<usize>) {
        if let (Some(copies), Some(bytes)) = (self.copies.get_mut(lane as usize), bytes) {
            copies.ended(bytes);
        }
    }

    /// As [`Self::track`], for the last `tickets` in flight.
    fn follow(
        &mut self,
        lane: CopyStream,
        tickets: usize,
        copied: Option<usize>,
        outcome: Result<u64, MemoryError>,
    ) {
        match self.device.mark(lane) {
            Ok(event) => self.batches[lane as usize].push_back(Batch {
                event,
                tickets,
                copied,
                outcome,
            }),
            Err(error) => {
                self.copied(lane, copied);
                for _ in 0..tickets {
                    if let Some(ticket) = self.in_flight[lane as usize].pop_back() {
                        ticket.abandon(error.clone());
                    }
                }
            }
        }
    }
}
