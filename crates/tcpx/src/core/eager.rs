//! Messages that travel with their announcement: their bytes go over the control connection, at once.

use std::time::Duration;

use tcpx_memory::{Fence, Lease, MemoryError, MemoryKind, Region, RegionSlice, SmallCopies, Work};
use tcpx_wire::frame::MAX_EAGER_BYTES;
use tcpx_wire::session::{OperationId, OperationKind};

use super::Core;
use super::tokens::Token;

const _: () = assert!(SmallCopies::MOST_BYTES == MAX_EAGER_BYTES);

/// Bytes of messages under way up to which those above 16 KiB travel so: one stream and one copy more take as long
/// for them as the two further crossings of the network that chunks on lanes need.
const MOST_AT_ONCE: u64 = 320 << 10;
/// The same where there is but one lane, which is no faster than the control connection.
const MOST_BESIDE_ONE_LANE: u64 = 1536 << 10;

/// Buffers of small sends that are kept for others, and their bytes.
const SPARE: usize = 8;
const SPARE_BYTES: usize = 512 << 10;

/// How long the start of a send may wait for a small message's bytes: several times what the copy
/// takes on a GPU at rest.
const READ_LIMIT: Duration = Duration::from_micros(50);

/// Most bytes of a message that goes over the control connection whatever is under way there.
const SHORT_EAGER_BYTES: u64 = 16 * 1024;

impl Core {
    /// Whether a message travels with its announcement, over the control connection: one above 16 KiB only
    /// while that connection brings what is under way sooner than the channels would, and takes a way that
    /// payload takes.
    pub(crate) fn goes_at_once(&mut self, bytes: u64) -> bool {
        if !self.session.eager_allowed(bytes) {
            return false;
        }
        if bytes <= SHORT_EAGER_BYTES {
            return true;
        }
        if self.lanes_beside == 0 {
            return false;
        }
        let under_way = self.session.bytes_under_way(MAX_EAGER_BYTES as u64);
        self.overflows = overflows(under_way + bytes, self.lanes_beside, self.overflows);
        !self.overflows
    }

    /// The bytes of a message that is to travel with its announcement; `None` if they cannot be had at
    /// once, because the program's GPU work comes first.
    pub(crate) fn read_small(
        &mut self,
        from: &Lease,
        fence: Option<&Fence>,
    ) -> Result<Option<Vec<u8>>, MemoryError> {
        let mut payload = self.spare.pop().unwrap_or_default();
        let read = match &mut self.small {
            _ if from.range().is_empty() => Ok(true),
            _ if !matches!(from.region().kind(), MemoryKind::Cuda { .. }) => {
                from.append_to(&mut payload).map(|()| true)
            }
            Some(small) => small.read(&from.all(), fence, READ_LIMIT, &mut payload),
            None => Ok(false),
        };
        if read == Ok(true) {
            return Ok(Some(payload));
        }
        self.use_again(payload);
        read.map(|_| None)
    }

    /// Keeps the buffer of a small send for the next one.
    pub(super) fn use_again(&mut self, mut payload: Vec<u8>) {
        let kept: usize = self.spare.iter().map(Vec::capacity).sum();
        if self.spare.len() < SPARE && kept + payload.capacity() <= SPARE_BYTES {
            payload.clear();
            self.spare.push(payload);
        }
    }

    /// Takes the eager payloads that have reached the GPU; `true` if any has.
    pub(super) fn poll_small(&mut self) -> bool {
        let Some(small) = &mut self.small else {
            return false;
        };
        let mut finished = std::mem::take(&mut self.finished_jobs);
        small.poll(&mut finished);
        self.jobs_finished(finished)
    }

    /// Has payload that came set out for a GPU before anything else is done: that takes longest.
    pub(super) fn deliver_first(&mut self) {
        if self.small.is_none() {
            return;
        }
        while let Some((operation, payload)) = self.session.poll_delivery() {
            self.deliver_eager(operation, payload);
        }
    }

    /// Copies an eager payload to its destination.
    pub(super) fn deliver_eager(&mut self, id: OperationId, payload: Vec<u8>) {
        if let Some(operation) = self.operations.get_mut(&id)
            && operation.kind == OperationKind::PeerNotification
        {
            operation.message = Some(payload);
            let now = self.now();
            return self.session.eager_copied(now, id);
        }
        self.place_eager(id, &payload);
        self.control.use_again(payload);
    }

    fn place_eager(&mut self, id: OperationId, payload: &[u8]) {
        let now = self.now();
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        if payload.is_empty() {
            self.session.eager_copied(now, id);
            return;
        }
        let lease = &operation.lease;
        let copied = match lease.region().kind() {
            MemoryKind::Cuda { .. } => lease
                .slice(..payload.len())
                .and_then(|to| self.deliver_to_gpu(id, to, payload)),
            // The lease is the operation's, so this is the only writer.
            _ => lease
                .write_from(payload)
                .map(|()| self.session.eager_copied(now, id)),
        };
        if let Err(error) = copied {
            self.memory_failed(id, &error);
        }
    }

    /// Starts the copy of an eager payload: here if that is possible at once, else on the worker.
    fn deliver_to_gpu(
        &mut self,
        id: OperationId,
        to: RegionSlice,
        payload: &[u8],
    ) -> Result<(), MemoryError> {
        let token = self.new_token(Token::Eager(id));
        let fence = self.operations.get(&id).and_then(|op| op.fence.clone());
        let started = self.start_write(&to, payload, fence.as_ref(), token);
        let job = match started {
            Ok(true) => Ok(None),
            Ok(false) => Region::host(payload.len()).and_then(|staging| {
                staging.write_from(0, payload)?;
                let from = staging.all();
                Ok(Some(Work::Copy { from, to }))
            }),
            Err(error) => Err(error),
        };
        if job.is_err() {
            self.tokens.remove(&token);
        } else if let Some(operation) = self.operations.get_mut(&id) {
            operation.outstanding += 1;
        }
        if let Some(work) = job? {
            self.submit(work, token, id);
        }
        Ok(())
    }

    fn start_write(
        &mut self,
        to: &RegionSlice,
        payload: &[u8],
        fence: Option<&Fence>,
        token: u64,
    ) -> Result<bool, MemoryError> {
        match &mut self.small {
            Some(small) => small.start_write(to, payload, fence, token),
            None => Ok(false),
        }
    }
}

/// Whether lanes bring so many bytes sooner than the control connection: more than it is good for, and then, as
/// taking turns between both ways is slower than either, more than four fifths of that.
fn overflows(bytes: u64, lanes: u16, did: bool) -> bool {
    let most = match lanes {
        1 => MOST_BESIDE_ONE_LANE,
        _ => MOST_AT_ONCE,
    };
    bytes > if did { most / 5 * 4 } else { most }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_messages_take_lanes_from_the_bound_on_until_a_fifth_of_it_is_free() {
        for (lanes, most) in [
            (1, MOST_BESIDE_ONE_LANE),
            (2, MOST_AT_ONCE),
            (16, MOST_AT_ONCE),
        ] {
            assert!(!overflows(most, lanes, false) && overflows(most + 1, lanes, false));
            let back = most / 5 * 4;
            assert!(!overflows(back, lanes, true) && overflows(back + 1, lanes, true));
        }
    }

    #[test]
    fn one_message_at_a_time_comes_back_from_the_lanes() {
        // Though the one before has only just been acknowledged.
        assert!(!overflows(2 * MAX_EAGER_BYTES as u64, 16, true));
    }
}
