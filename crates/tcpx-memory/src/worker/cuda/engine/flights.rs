//! What is under way on the worker's streams, and how it ends.

use super::super::device::Lane;
use super::{Engine, RESERVE, STARTS};
use crate::error::{CudaError, MemoryError};
use crate::fence::Event;
use crate::job::Work;
use crate::slice::RegionSlice;
use crate::worker::queue::Ticket;

/// Jobs under way on a stream.
pub(super) struct Flight {
    event: Event,
    /// How many tickets end with it.
    tickets: usize,
    /// Bytes, if it is of copies that are counted, see [`Copies`](super::Copies).
    copied: Option<usize>,
    outcome: Result<u64, MemoryError>,
}

impl Engine<'_> {
    /// Ends what the streams have finished; of each one a copy at most, because telling of its end takes as long
    /// as a short one, and what follows the next is to be under way by then.
    pub(super) fn land(&mut self) -> bool {
        let mut progress = false;
        for lane in Lane::ALL {
            while let Some(front) = self.flights[lane as usize].front() {
                let ready = front.event.is_ready(self.device.api());
                if ready == Ok(false) {
                    break;
                }
                let Some(flight) = self.flights[lane as usize].pop_front() else {
                    break;
                };
                self.device.give_back(flight.event);
                self.copied(lane, flight.copied);
                for _ in 0..flight.tickets {
                    let Some(ticket) = self.aloft[lane as usize].pop_front() else {
                        break;
                    };
                    match &ready {
                        Ok(_) => {
                            let bytes = ticket.work().bytes();
                            let outcome = flight.outcome.clone();
                            ticket.finish(outcome.map(|all| all.min(bytes)));
                        }
                        // Other engines of a broken context may still be at work.
                        Err(error) => ticket.abandon(error.clone().into()),
                    }
                }
                progress = true;
                if flight.copied.is_some() {
                    break;
                }
            }
        }
        progress
    }

    /// Begins copies that wait for nothing, as many as keep the GPU busy; no more at a time than jobs, for the
    /// same reason.
    pub(super) fn start_copies(&mut self) -> bool {
        let mut progress = false;
        for lane in [Lane::In, Lane::Out] {
            let at = lane as usize;
            for _ in 0..STARTS {
                if self.device.free_events() <= RESERVE {
                    break;
                }
                let first = self.aloft[at].len();
                let Some(run) = self.copies[at].next(&mut self.aloft[at]) else {
                    break;
                };
                progress = true;
                let work = self.aloft[at].get(first).map(Ticket::work);
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

    /// Copies so many bytes, from the first of those that this work names.
    fn issue(&self, lane: Lane, work: &Work, bytes: usize) -> Result<(), CudaError> {
        let (from, to) = work.ends();
        let (Some(source), Some(destination)) = (
            from.device_address(),
            to.and_then(RegionSlice::device_address),
        ) else {
            // Only device-accessible ends come here, and all of those have an address.
            return Ok(());
        };
        // SAFETY: the tickets keep all of both ranges and their leases until the flight has landed.
        unsafe { self.device.copy(lane, destination, source, bytes) }
    }

    /// Copies from device memory to device memory, of this GPU or another one.
    pub(super) fn issue_across(
        &self,
        from: &RegionSlice,
        to: &RegionSlice,
    ) -> Result<(), CudaError> {
        let (Some(source), Some(destination)) = (from.device_address(), to.device_address()) else {
            // As above.
            return Ok(());
        };
        let gpus = (from.region().gpu(), to.region().gpu());
        match gpus {
            (Some(from_gpu), Some(to_gpu)) if !from_gpu.is_same(to_gpu) => {
                // SAFETY: the ticket keeps both regions and their leases until the flight has landed.
                unsafe {
                    self.device
                        .copy_peer((to_gpu, destination), (from_gpu, source), from.len())
                }
            }
            // SAFETY: as above.
            _ => unsafe {
                self.device
                    .copy(Lane::Across, destination, source, from.len())
            },
        }
    }

    /// Follows a job on a stream to its end. After an error some of the job may be under way, so the
    /// job ends only when the stream has passed it.
    pub(in crate::worker::cuda) fn fly(
        &mut self,
        lane: Lane,
        ticket: Ticket,
        outcome: Result<u64, MemoryError>,
    ) {
        self.aloft[lane as usize].push_back(ticket);
        self.follow(lane, 1, None, outcome);
    }

    /// A copy has ended, or will never be heard of.
    fn copied(&mut self, lane: Lane, bytes: Option<usize>) {
        if let (Some(copies), Some(bytes)) = (self.copies.get_mut(lane as usize), bytes) {
            copies.ended(bytes);
        }
    }

    /// As [`Self::fly`], for the last so many tickets that are aloft.
    fn follow(
        &mut self,
        lane: Lane,
        tickets: usize,
        copied: Option<usize>,
        outcome: Result<u64, MemoryError>,
    ) {
        match self.device.mark(lane) {
            Ok(event) => self.flights[lane as usize].push_back(Flight {
                event,
                tickets,
                copied,
                outcome,
            }),
            Err(error) => {
                self.copied(lane, copied);
                for _ in 0..tickets {
                    if let Some(ticket) = self.aloft[lane as usize].pop_back() {
                        ticket.abandon(error.clone());
                    }
                }
            }
        }
    }
}
