//! The part of a send comm that has to do with lanes.

use nccl_net::export::RequestId;

use super::{POLLS_BETWEEN_LOOKS, Progress, Source, State};
use crate::error::PluginError;
use crate::lanes::carriage::{Carriage, Load};

impl State {
    /// How far a request is; `None` for one that is not in flight.
    pub(super) fn standing(&mut self, id: RequestId) -> Option<Progress> {
        let (sequence, request) = self.ring.find(id)?;
        let outlet = self.carriage.as_ref().map(Carriage::outlet);
        Some(match (request.on_lanes, outlet) {
            (true, Some(outlet)) if request.written == request.size => {
                if outlet.is_sent(sequence) {
                    Progress::Done
                } else {
                    Progress::OnLanes
                }
            }
            (false, _) if request.done() => Progress::Done,
            _ => Progress::Waiting,
        })
    }

    /// The host takes memory back: nothing reads it when this returns. Gives the failure of a comm
    /// that had requests there; NCCL frees memory before it closes a comm that it aborts.
    pub(super) fn give_up(&mut self, memory: u64) -> Option<PluginError> {
        let outlet = self.carriage.as_ref().map(Carriage::outlet);
        let sequence = self.ring.find_first(|sequence, request| {
            let over = match outlet {
                Some(outlet) if request.on_lanes => {
                    request.written == request.size && outlet.is_sent(sequence)
                }
                _ => request.done(),
            };
            request.memory == memory && !over
        })?;
        let failure = PluginError::Deregistered {
            comm: self.name.clone(),
            sequence,
        };
        let failure = self.failure.get_or_insert(failure).clone();
        if let Some(carriage) = &self.carriage {
            carriage.close();
        }
        // The receiver must not wait for what will not come.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        Some(failure)
    }

    /// One call in many, so that an end of the comm's own connection is seen soon.
    pub(super) const fn is_time_to_look(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.failure.is_some() || self.polls.is_multiple_of(POLLS_BETWEEN_LOOKS)
    }

    pub(super) fn check_lanes(&mut self) -> Result<(), PluginError> {
        match &self.carriage {
            Some(carriage) => {
                let standing = carriage.set().check(&self.name);
                if standing.is_err() {
                    // A refusal explains more than the lanes that ended after it.
                    self.read_back()?;
                }
                standing
            }
            None => Ok(()),
        }
    }

    /// Whether the message whose turn it is goes over lanes: it is large, none of it is on the
    /// comm's own connection, and the receiver grants.
    pub(super) fn takes_lanes(&mut self) -> bool {
        if self.carriage.is_none() || !self.granting {
            // Chunks in the queue stay there whatever the receiver says later.
            return self.ring.by_sequence(self.next).is_some_and(|r| r.on_lanes);
        }
        let lanes_above = self.lanes_above;
        self.ring.by_sequence(self.next).is_some_and(|request| {
            request.on_lanes
                || (request.size > lanes_above
                    && request.written == 0
                    && matches!(request.source, Source::Host(_)))
        })
    }

    /// Queues the message whose turn it is, once its receive is posted; the bytes queued now.
    pub(super) fn load(&mut self) -> Result<usize, PluginError> {
        let sequence = self.next;
        let stream = self.stream_number;
        let (Some(carriage), Some(request)) = (&self.carriage, self.ring.by_sequence(sequence))
        else {
            return Ok(0);
        };
        let Source::Host(payload) = &request.source else {
            return Ok(0);
        };
        if sequence >= self.granted {
            return Ok(0);
        }
        request.on_lanes = true;
        let before = request.written;
        request.written = carriage.queue(Load {
            stream,
            sequence,
            payload: *payload,
            queued: before,
        });
        let queued = request.written - before;
        if request.written == request.size {
            self.next += 1;
        }
        Ok(queued)
    }
}
