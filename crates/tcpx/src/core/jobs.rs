//! Work for the copy worker: unpacking, digests; and its ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tcpx_lanes::lock;
use tcpx_memory::{
    BouncePool, CompletionSink, CopyWorker, Job, KeyedTag, MemoryError, SubmitError, UnpackMethod,
    Work,
};
use tcpx_net::Ticket;
use tcpx_wire::ScatterList;
use tcpx_wire::descriptor::{Descriptors, Limits};
use tcpx_wire::session::{DataFailure, OperationId};

use super::Core;
use super::coverage::Coverage;
use super::operation::{InFlight, Token};
use crate::driver::{DrivenId, Driver};
use crate::event::{ChunkEvent, Event};

/// Fragments shown in an event.
const SAMPLE: usize = 8;
/// Bytes of the first fragment shown in an event.
const PROBE: usize = 64;

impl Core {
    /// Hands fragments of a chunk to the copy worker; `false` if that was not possible or not wanted. `last` of
    /// so many bytes: the chunk is whole with them, which parts may have come of before; else its rest is still
    /// to come.
    pub(super) fn unpack(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: &BouncePool,
        list: &ScatterList,
        ticket: Ticket,
        last: Option<u64>,
    ) -> bool {
        let now = self.now();
        let index = flight.event.index;
        let Some(operation) = self.operations.get_mut(&id) else {
            return false;
        };
        if operation.stopped {
            if last.is_some() {
                self.off_wire(id);
            }
            return false;
        }
        if let Some(bytes) = last {
            let before = operation.parts.get(&index).map_or(0, Coverage::bytes);
            let total = before.saturating_add(bytes);
            self.session.chunk_arrived(now, id, index, total);
        } else {
            operation.parts.entry(index).or_default();
        }
        let sum = || list.iter().map(|f| u64::from(f.length)).sum();
        let mut work = self.unpack_job(id, flight, pool, list, last.unwrap_or_else(sum));
        if last.is_some()
            && work.is_ok()
            && let Err(failure) = self.check_parts(id, flight)
        {
            work = Err(failure);
        }
        match work {
            Ok((work, descriptors)) => {
                if let Some(operation) = self.operations.get_mut(&id) {
                    operation.begin_unpack(last.is_some());
                    operation.fragments += list.len() as u64;
                }
                let is_last = last.is_some();
                let token = Token::Unpack(id, flight, ticket, descriptors, is_last);
                let token = self.new_token(token);
                self.submit(work, token, id);
                true
            }
            Err(failure) => {
                if last.is_some() {
                    self.off_wire(id);
                }
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
        built.map_err(|error| DataFailure::Misreport(error.to_string()))?;
        let work = self.unpack_work(id, flight, pool, &descriptors)?;
        Ok((work, descriptors))
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
        // What did not land in the pool may lie where a method that was asked for cannot reach.
        let reaches = |method: &UnpackMethod| method.is_possible(pool.kind(), to.kind());
        let wanted = self.unpacker.method.filter(reaches);
        let with = wanted.unwrap_or_else(automatic);
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

    /// Queues a job for the copy worker, behind those that wait already.
    pub(super) fn submit(&mut self, work: Work, token: u64, id: OperationId) {
        let fence = self.operations.get(&id).and_then(|op| op.fence.clone());
        let sink = Arc::clone(&self.sink);
        self.waiting_jobs.push_back(Job {
            work,
            fence,
            sink,
            token,
        });
        self.submit_waiting();
    }

    /// Gives the copy worker as many of the jobs that wait as it takes from one connection. A full
    /// queue delays them; any other refusal is a job's result.
    fn submit_waiting(&mut self) {
        while self.jobs_under_way < self.bounds.jobs
            && let Some(job) = self.waiting_jobs.pop_front()
        {
            let token = job.token;
            match self.unpacker.worker.submit_deferrable(job) {
                Ok(()) => self.jobs_under_way += 1,
                Err(SubmitError {
                    job,
                    error: MemoryError::QueueFull { .. },
                }) => {
                    self.waiting_jobs.push_front(*job);
                    return;
                }
                Err(SubmitError { job, error }) => {
                    // Its list is used again.
                    drop(job);
                    self.job_finished(token, Err(error));
                }
            }
        }
    }

    /// When the copy worker's queue must be tried again: jobs wait, and none of this connection is
    /// under way whose end would be the occasion.
    pub(super) fn retry_jobs_at(&self) -> Option<Instant> {
        let is_stuck = self.jobs_under_way == 0 && !self.waiting_jobs.is_empty();
        is_stuck.then(|| Instant::now() + self.bounds.retry)
    }

    /// Takes what the copy worker has finished; `true` if anything was.
    pub(super) fn drain_worker(&mut self) -> bool {
        let mut finished = std::mem::take(&mut self.finished_jobs);
        self.sink.take(&mut finished);
        self.jobs_under_way = self.jobs_under_way.saturating_sub(finished.len());
        let any = self.jobs_finished(finished);
        self.submit_waiting();
        any
    }

    /// Takes these ends, in the buffer that is used again; `true` if there are any.
    pub(super) fn jobs_finished(&mut self, mut finished: Vec<Finished>) -> bool {
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
            Some(Token::Unpack(id, flight, ticket, descriptors, is_last)) => {
                self.unpacker.give_list_back(descriptors);
                let wanted = match is_last {
                    true => self.unpacked(id),
                    false => self.job_off(id),
                };
                if let (Err(error), true) = (&result, wanted) {
                    let index = Some(flight.event.index);
                    let failure = DataFailure::Memory(error.to_string());
                    self.session.data_failed(now, id, index, failure);
                }
                let channel = usize::from(flight.event.channel);
                match result {
                    Err(error) if error.may_go_on() => self.pool_lost(channel, error),
                    result => self.pool_read(channel, ticket, is_last && wanted && result.is_ok()),
                }
            }
            Some(Token::Digest(id, tag)) => {
                if self.job_off(id) {
                    match result {
                        Ok(crc) => {
                            // The worker answers a CRC32C: 32 bits.
                            let crc = u32::try_from(crc).unwrap_or_default();
                            if let Some(operation) = self.operations.get_mut(&id) {
                                operation.digest = Some(crc);
                            }
                            let tag = tag.get().unwrap_or_default();
                            self.session.digest(now, id, crc, tag);
                        }
                        Err(error) => self.memory_failed(id, &error),
                    }
                }
            }
            Some(Token::Fence(id)) => match result {
                Ok(_) => self.session.fence_reached(now, id),
                Err(error) => self.memory_failed(id, &error),
            },
            Some(Token::Eager(id)) => {
                if self.job_off(id) {
                    match result {
                        Ok(_) => self.session.eager_copied(now, id),
                        Err(error) => self.memory_failed(id, &error),
                    }
                }
            }
            Some(Token::Read(id, read)) => match result {
                Ok(_) => self.read_on(id, read),
                Err(_) => self.read_ended(id, false),
            },
            // Whatever became of it, the message travels otherwise.
            Some(Token::SmallRead(id)) => {
                self.job_off(id);
            }
            Some(Token::Send(..) | Token::Receive(..) | Token::Window(..)) | None => {}
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
                let tag = Arc::new(KeyedTag::new(&self.tag_key));
                let token = self.new_token(Token::Digest(id, Arc::clone(&tag)));
                let tag = Some(tag);
                self.submit(Work::Checksum { of, tag }, token, id);
            }
            Err(error) => self.memory_failed(id, &error),
        }
    }

    pub(super) fn memory_failed(&mut self, id: OperationId, error: &MemoryError) {
        let now = self.now();
        let failure = DataFailure::Memory(error.to_string());
        self.session.data_failed(now, id, None, failure);
    }

    pub(super) fn emit_arrival(&self, chunk: ChunkEvent, list: &ScatterList, pool: &BouncePool) {
        if self.observer.is_none() {
            return;
        }
        let sample = list
            .iter()
            .take(SAMPLE)
            .map(|f| (f.source_offset, f.length, f.destination_offset))
            .collect();
        let probe = list.first().and_then(|first| {
            let start = usize::try_from(first.source_offset).ok()?;
            let length = usize::try_from(first.length).ok()?.min(PROBE);
            let mut bytes = vec![0; length];
            let part = pool.slice().slice(start..start.checked_add(length)?).ok()?;
            part.read_to(&mut bytes).ok()?;
            Some(bytes)
        });
        self.emit(&Event::ChunkArrived {
            chunk,
            fragments: list.len(),
            sample,
            probe,
        });
    }
}

/// Lists kept for the next chunks, and descriptors that one of them keeps room for.
const LISTS_KEPT: usize = 32;
const ROOM_KEPT: usize = 4096;

/// How unpacking is done on this connection.
#[derive(Debug)]
pub(crate) struct Unpacker {
    pub(crate) worker: Arc<CopyWorker>,
    pub(crate) method: Option<UnpackMethod>,
    /// Lists of chunks that have ended, so that a chunk needs no new memory.
    pub(super) lists: Vec<Arc<Descriptors>>,
}

impl Unpacker {
    pub(crate) fn new(worker: Arc<CopyWorker>, method: Option<UnpackMethod>) -> Self {
        Self {
            worker,
            method,
            lists: Vec::new(),
        }
    }

    /// A list that nobody else has.
    pub(super) fn take_list(&mut self) -> Arc<Descriptors> {
        self.lists.pop().unwrap_or_default()
    }

    /// Keeps a list for the next chunk, unless somebody else still has it; without room that few chunks need.
    pub(super) fn give_list_back(&mut self, mut list: Arc<Descriptors>) {
        if self.lists.len() < LISTS_KEPT
            && let Some(ours) = Arc::get_mut(&mut list)
        {
            ours.clear();
            ours.shrink_to(ROOM_KEPT);
            self.lists.push(list);
        }
    }
}

/// Result of one job of the copy worker.
pub(crate) type Finished = (u64, Result<u64, MemoryError>);

/// Collects results and wakes the driver of the connection.
#[derive(Debug)]
pub(crate) struct Sink {
    finished: Mutex<Vec<Finished>>,
    /// A thread of the program looks for results by itself.
    looked_for: AtomicBool,
    driver: Arc<Driver>,
    id: DrivenId,
}

impl Sink {
    pub(crate) fn new(driver: Arc<Driver>, id: DrivenId) -> Arc<Self> {
        Arc::new(Self {
            finished: Mutex::new(Vec::new()),
            looked_for: AtomicBool::new(false),
            driver,
            id,
        })
    }

    /// Says whether somebody looks for results without being woken. Whoever stops takes a last look
    /// afterwards.
    pub(crate) fn set_looked_for(&self, looked_for: bool) {
        self.looked_for.store(looked_for, Ordering::SeqCst);
    }

    pub(crate) fn has_results(&self) -> bool {
        !lock(&self.finished).is_empty()
    }

    /// Moves the results so far to `into`, which is empty; both vectors keep their room.
    pub(crate) fn take(&self, into: &mut Vec<Finished>) {
        let mut finished = lock(&self.finished);
        std::mem::swap(&mut *finished, into);
    }
}

impl CompletionSink for Sink {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        lock(&self.finished).push((token, result));
        if !self.looked_for.load(Ordering::SeqCst) {
            self.driver.wake(self.id);
        }
    }
}
