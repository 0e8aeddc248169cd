//! Messages that travel with their announcement: their bytes go over the control connection, at
//! once.

use std::io;

use tcpx_memory::{
    Fence, Lease, MemoryError, MemoryKind, Region, RegionSlice, SmallCopies, SmallRead, Work,
};
use tcpx_net::Exposed;
use tcpx_wire::Level;
use tcpx_wire::frame::{Destination, Eager, Exposure, MAX_EAGER_BYTES};
use tcpx_wire::session::{DataFailure, OperationId, OperationKind, SendRequest};

use super::Core;
use super::operation::Token;

const _: () = assert!(SmallCopies::MOST_BYTES == MAX_EAGER_BYTES);

impl Core {
    /// The bytes of a message that is to travel with its announcement; `None` if they cannot be had
    /// at once, because the program's GPU work comes first. Where a copy goes on all the same, its
    /// token.
    pub(crate) fn read_small(
        &mut self,
        from: &mut Lease,
        fence: Option<&Fence>,
    ) -> Result<(Option<Vec<u8>>, Option<u64>), MemoryError> {
        let token = self.tokens.name();
        let mut payload = self.control.buffer();
        let read = match &mut self.gpu.small {
            _ if from.range().is_empty() => Ok(SmallRead::Whole),
            _ if !matches!(from.region().kind(), MemoryKind::Cuda { .. }) => {
                from.append_to(&mut payload).map(|()| SmallRead::Whole)
            }
            Some(small) => {
                let limit = self.bounds.small_read;
                small.read(&from.all(), fence, limit, token, &mut payload)
            }
            None => Ok(SmallRead::NotStarted),
        };
        if read == Ok(SmallRead::Whole) {
            return Ok((Some(payload), None));
        }
        self.control.give_back(payload);
        read.map(|read| (None, (read == SmallRead::Abandoned).then_some(token)))
    }

    /// Takes the eager payloads that have reached the GPU; `true` if any has.
    pub(super) fn poll_small(&mut self) -> bool {
        let Some(small) = &mut self.gpu.small else {
            return false;
        };
        let mut finished = std::mem::take(&mut self.jobs.finished);
        small.poll(&mut finished);
        self.jobs_finished(finished)
    }

    /// Where the payload of a send lies, if that is told in place of its bytes.
    pub(super) fn place_of(
        &self,
        lease: &Lease,
        fence: Option<&Fence>,
        request: &SendRequest,
    ) -> Option<(Exposure, Exposed)> {
        // The source must be whole, and stays its program's until the peer has read it.
        let goes = fence.is_none_or(Fence::was_reached)
            && request.level == Level::Placed
            && !matches!(request.to, Destination::Notification { .. })
            && self.session.exposed_allowed(request.bytes);
        let only = self.channels.only().filter(|_| goes)?;
        only.expose(&lease.all())
    }

    /// Copies an eager payload to its destination.
    pub(super) fn deliver_eager(&mut self, id: OperationId, payload: Eager) {
        self.channels.alone.short_came();
        match payload {
            Eager::Bytes(payload) => self.deliver_bytes(id, payload.into_bytes()),
            Eager::Exposed(at) => match self.deliver_exposed(id, &at) {
                // What the peer exposes no more has ended there, which it says.
                Ok(()) => {}
                Err(error) => {
                    let failure = DataFailure::Memory(format!("of the peer: {error}"));
                    self.session
                        .data_failed(self.clock.now(), id, None, failure);
                }
            },
        }
    }

    fn deliver_exposed(&mut self, id: OperationId, at: &Exposure) -> io::Result<()> {
        let only = self.channels.only();
        let only = only.ok_or(io::ErrorKind::Unsupported)?;
        let Some(operation) = self.operations.get(&id) else {
            return Ok(());
        };
        let (lease, bytes) = (&operation.lease, at.bytes as usize);
        let kind = lease.region().kind();
        let Some(mut read) = only.find_exposed(at, kind)? else {
            return Ok(());
        };
        let into = lease.slice(..bytes).map_err(io::Error::other)?;
        if read.gpu_memory().is_some() {
            self.begin_copy(id, read, into);
            return Ok(());
        }
        let into = match kind {
            MemoryKind::Host => into,
            _ => Region::host(bytes).map_err(io::Error::other)?.all(),
        };
        let is_whole = loop {
            if let Some(is_whole) = only.read_on(&mut read, &into)? {
                break is_whole;
            }
        };
        if is_whole && kind == MemoryKind::Host {
            self.session.eager_copied(self.clock.now(), id);
        } else if is_whole {
            let mut payload = Vec::new();
            into.append_to(&mut payload).map_err(io::Error::other)?;
            self.place_eager(id, &payload);
        }
        Ok(())
    }

    fn deliver_bytes(&mut self, id: OperationId, payload: Vec<u8>) {
        if let Some(operation) = self.operations.get_mut(&id)
            && operation.kind == OperationKind::PeerNotification
        {
            operation.message = Some(payload);
            return self.session.eager_copied(self.clock.now(), id);
        }
        self.place_eager(id, &payload);
        self.control.use_again(payload);
    }

    fn place_eager(&mut self, id: OperationId, payload: &[u8]) {
        let now = self.clock.now();
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        if payload.is_empty() {
            self.session.eager_copied(now, id);
            return;
        }
        let lease = &mut operation.lease;
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
        let token = self.tokens.add(Token::Eager(id));
        let fence = self.operations.get(&id).and_then(|op| op.fence.clone());
        let started = match &mut self.gpu.small {
            Some(small) => small.start_write(&to, payload, fence.as_ref(), token),
            None => Ok(false),
        };
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
            self.tokens.open.remove(&token);
        } else if let Some(operation) = self.operations.get_mut(&id) {
            operation.outstanding += 1;
        }
        if let Some(work) = job? {
            self.submit(work, token, id);
        }
        Ok(())
    }
}
