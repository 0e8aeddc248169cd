//! Work for the copy worker: unpacking, digests, eager payloads.

use std::sync::Arc;
use std::time::Duration;

use tcpx_memory::{
    BouncePool, Fence, Job, Lease, MemoryError, MemoryKind, Region, RegionSlice, Work,
};
use tcpx_net::Ticket;
use tcpx_wire::descriptor::{Descriptors, Limits};
use tcpx_wire::scatter::ScatterList;
use tcpx_wire::session::{DataFailure, OperationId};

use super::Core;
use super::coverage::Coverage;
use super::operation::InFlight;
use super::tokens::Token;
use crate::event::{ChunkEvent, Event};

/// Fragments shown in an event.
const SAMPLE: usize = 8;
/// Bytes of the first fragment shown in an event.
const PROBE: usize = 64;

/// Buffers of small sends that are kept for others.
const SPARE: usize = 8;

/// How long the start of a send may wait for a small message's bytes: several times what the copy
/// takes on a GPU at rest.
const READ_LIMIT: Duration = Duration::from_micros(50);

impl Core {
    /// Hands fragments to the copy worker; `false` if that was not possible or not wanted.
    pub(super) fn unpack(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: Arc<BouncePool>,
        list: &ScatterList,
        bytes: u64,
        ticket: Ticket,
    ) -> bool {
        let now = self.now();
        let index = flight.event.index;
        let Some(operation) = self.operations.get_mut(&id) else {
            return false;
        };
        if operation.stopped {
            self.off_wire(id);
            return false;
        }
        let before = operation.parts.get(&index).map_or(0, Coverage::bytes);
        let total = before.saturating_add(bytes);
        self.session.chunk_arrived(now, id, index, total);
        let work = match self.unpack_job(id, flight, &pool, list, bytes) {
            Ok((work, descriptors)) => match self.check_parts(id, flight) {
                Ok(()) => Ok((work, descriptors)),
                Err(failure) => {
                    drop(work);
                    self.unpacker.give_list_back(descriptors);
                    Err(failure)
                }
            },
            Err(failure) => Err(failure),
        };
        match work {
            Ok((work, descriptors)) => {
                if let Some(operation) = self.operations.get_mut(&id) {
                    operation.off_wire(true);
                    operation.fragments += list.len() as u64;
                }
                let token = self.new_token(Token::Unpack(id, flight, ticket, descriptors));
                self.submit(work, token, id);
                true
            }
            Err(failure) => {
                self.off_wire(id);
                self.session.data_failed(now, id, Some(index), failure);
                false
            }
        }
    }

    /// As [`Self::unpack`] for a part of a chunk whose rest is still to come.
    pub(super) fn unpack_part(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: Arc<BouncePool>,
        list: &ScatterList,
        ticket: Ticket,
    ) -> bool {
        let now = self.now();
        let index = flight.event.index;
        let Some(operation) = self.operations.get_mut(&id).filter(|op| !op.stopped) else {
            return false;
        };
        operation.parts.entry(index).or_default();
        let bytes = list.fragments().iter().map(|f| u64::from(f.length)).sum();
        match self.unpack_job(id, flight, &pool, list, bytes) {
            Ok((work, descriptors)) => {
                if let Some(operation) = self.operations.get_mut(&id) {
                    operation.outstanding += 1;
                    operation.fragments += list.len() as u64;
                }
                let token = self.new_token(Token::UnpackPart(id, flight, ticket, descriptors));
                self.submit(work, token, id);
                true
            }
            Err(failure) => {
                self.session.data_failed(now, id, Some(index), failure);
                false
            }
        }
    }

    /// The last part of a chunk has come: checks that the parts are the chunk.
    fn check_parts(&mut self, id: OperationId, flight: InFlight) -> Result<(), DataFailure> {
        let parts = self
            .operations
            .get_mut(&id)
            .and_then(|operation| operation.parts.remove(&flight.event.index));
        match parts {
            None => Ok(()),
            Some(parts) => parts
                .check(flight.event.length.into())
                .map_err(DataFailure::Misreport),
        }
    }

    fn unpack_job(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: &BouncePool,
        list: &ScatterList,
        bytes: u64,
    ) -> Result<(Work, Arc<Descriptors>), DataFailure> {
        let length = u64::from(flight.event.length);
        let limits = Limits {
            pool_bytes: pool.len() as u64,
            destination_bytes: length,
            received_bytes: bytes,
        };
        let mut descriptors = self.unpacker.take_list();
        // Nobody else has a list that is taken.
        let built = Arc::make_mut(&mut descriptors).build(list, limits);
        let work = built
            .map_err(|error| DataFailure::Misreport(error.to_string()))
            .and_then(|()| self.unpack_work(id, flight, pool, &descriptors));
        match work {
            Ok(work) => Ok((work, descriptors)),
            Err(failure) => {
                self.unpacker.give_list_back(descriptors);
                Err(failure)
            }
        }
    }

    fn unpack_work(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: &BouncePool,
        descriptors: &Arc<Descriptors>,
    ) -> Result<Work, DataFailure> {
        let gone = || DataFailure::Misreport("its operation has ended".to_owned());
        let operation = self.operations.get_mut(&id).ok_or_else(gone)?;
        let start = usize::try_from(flight.event.offset).unwrap_or(usize::MAX);
        let to = operation
            .lease
            .slice(start..start.saturating_add(flight.event.length as usize))
            .map_err(|error| DataFailure::Memory(error.to_string()))?;
        let automatic = || {
            self.unpacker
                .worker
                .unpack_method_for(pool.kind(), to.kind(), descriptors)
        };
        let with = self.unpacker.method.unwrap_or_else(automatic);
        operation.method = Some(with);
        if let Some(parts) = operation.parts.get_mut(&flight.event.index) {
            parts.add(descriptors);
        }
        Ok(Work::Unpack {
            pool: pool.clone(),
            descriptors: Arc::clone(descriptors),
            to,
            with,
        })
    }

    /// Gives a job to the copy worker; a refusal is its result.
    pub(super) fn submit(&mut self, work: Work, token: u64, id: OperationId) {
        let fence = self.operations.get(&id).and_then(|op| op.fence.clone());
        let sink = Arc::clone(&self.sink);
        let job = Job {
            work,
            fence,
            sink,
            token,
        };
        if let Err(refused) = self.unpacker.worker.submit(job) {
            let error = refused.error;
            // Its list is used again.
            drop(refused.job);
            self.job_finished(token, Err(error));
        }
    }

    /// Takes what the copy worker has finished; `true` if anything was.
    pub(super) fn drain_worker(&mut self) -> bool {
        let mut finished = std::mem::take(&mut self.finished_jobs);
        self.sink.take(&mut finished);
        let any = !finished.is_empty();
        for (token, result) in finished.drain(..) {
            self.job_finished(token, result);
        }
        self.finished_jobs = finished;
        any
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
        if self.spare.len() < SPARE {
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
        let any = !finished.is_empty();
        for (token, result) in finished.drain(..) {
            self.job_finished(token, result);
        }
        self.finished_jobs = finished;
        any
    }

    fn job_finished(&mut self, token: u64, result: Result<u64, MemoryError>) {
        let now = self.now();
        match self.tokens.remove(&token) {
            Some(Token::Unpack(id, flight, ticket, descriptors)) => {
                self.unpacker.give_list_back(descriptors);
                let stopped = self.unpacked(id);
                let placed = result.is_ok() && !stopped;
                let channel = usize::from(flight.event.channel);
                if let (Err(error), false) = (&result, stopped) {
                    let index = Some(flight.event.index);
                    let failure = DataFailure::Memory(error.to_string());
                    self.session.data_failed(now, id, index, failure);
                }
                match result {
                    Err(error) if error.may_go_on() => self.pool_lost(channel, error),
                    _ => self.pool_read(channel, ticket, placed),
                }
            }
            Some(Token::UnpackPart(id, flight, ticket, descriptors)) => {
                self.unpacker.give_list_back(descriptors);
                let wanted = self.job_off(id);
                if let (Err(error), true) = (&result, wanted) {
                    let index = Some(flight.event.index);
                    let failure = DataFailure::Memory(error.to_string());
                    self.session.data_failed(now, id, index, failure);
                }
                let channel = usize::from(flight.event.channel);
                match result {
                    Err(error) if error.may_go_on() => self.pool_lost(channel, error),
                    _ => self.pool_read(channel, ticket, false),
                }
            }
            Some(Token::Digest(id)) => {
                if self.job_off(id) {
                    match result {
                        Ok(crc) => {
                            // The worker answers a CRC32C: 32 bits.
                            let crc = u32::try_from(crc).unwrap_or_default();
                            if let Some(operation) = self.operations.get_mut(&id) {
                                operation.digest = Some(crc);
                            }
                            self.session.digest(now, id, crc);
                        }
                        Err(error) => self.memory_failed(id, &error),
                    }
                }
            }
            Some(Token::Eager(id)) => {
                if self.job_off(id) {
                    match result {
                        Ok(_) => self.session.eager_copied(now, id),
                        Err(error) => self.memory_failed(id, &error),
                    }
                }
            }
            Some(Token::Send(..) | Token::Receive(..) | Token::Foreseen(_)) | None => {}
        }
    }

    /// Digest of the whole operation, for level *verified*.
    pub(super) fn start_digest(&mut self, id: OperationId, bytes: u64) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        match operation.lease.slice(..length) {
            Ok(of) => {
                operation.outstanding += 1;
                let token = self.new_token(Token::Digest(id));
                self.submit(Work::Checksum { of }, token, id);
            }
            Err(error) => self.memory_failed(id, &error),
        }
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

    fn memory_failed(&mut self, id: OperationId, error: &MemoryError) {
        let now = self.now();
        let failure = DataFailure::Memory(error.to_string());
        self.session.data_failed(now, id, None, failure);
    }

    pub(super) fn emit_arrival(&self, chunk: ChunkEvent, list: &ScatterList, pool: &BouncePool) {
        if self.observer.is_none() {
            return;
        }
        let fragments = list.fragments();
        let sample = fragments
            .iter()
            .take(SAMPLE)
            .map(|f| (f.source_offset, f.length, f.destination_offset))
            .collect();
        let probe = fragments.first().and_then(|first| {
            let start = usize::try_from(first.source_offset).ok()?;
            let length = usize::try_from(first.length).ok()?.min(PROBE);
            let mut bytes = vec![0; length];
            let part = pool.slice().slice(start..start.checked_add(length)?).ok()?;
            part.read_to(&mut bytes).ok()?;
            Some(bytes)
        });
        self.emit(&Event::ChunkArrived {
            chunk,
            fragments: fragments.len(),
            sample,
            probe,
        });
    }
}
