//! Work for the copy worker: unpacking, digests; and its ends.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tcpx_lanes::lock;
use tcpx_memory::{
    BouncePool, CompletionSink, CopyWorker, Fence, Job, KeyedTag, MemoryError, SubmitError, TagKey,
    UnpackMethod, Work,
};
use tcpx_net::Ticket;
use tcpx_wire::ScatterList;
use tcpx_wire::descriptor::{Descriptors, Limits};
use tcpx_wire::session::{DataFailure, OperationId};

use super::Core;
use super::coverage::Coverage;
use super::operation::{InFlight, Operation, Token};
use crate::driver::{DrivenId, Driver};
use crate::error::Error;
use crate::event::{ChunkEvent, Event};
use crate::options::Bounds;

/// Fragments shown in an event.
const SAMPLE: usize = 8;
/// Bytes of the first fragment shown in an event.
const PROBE: usize = 64;

impl Core {
    /// Hands fragments of a chunk to the copy worker; `false` if that was not possible or not
    /// wanted. `last` of so many bytes: the chunk is whole with them, which parts may have come of
    /// before; else its rest is still to come.
    pub(super) fn unpack(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: &BouncePool,
        list: &ScatterList,
        ticket: Ticket,
        last: Option<u64>,
    ) -> bool {
        let now = self.clock.now();
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
        match self.unpack_job(id, flight, pool, list, last) {
            Ok((work, descriptors)) => {
                if let Some(operation) = self.operations.get_mut(&id) {
                    operation.begin_unpack(last.is_some());
                    operation.fragments += list.len() as u64;
                }
                let token = Token::Unpack(id, flight, ticket, descriptors, last.is_some());
                let token = self.tokens.add(token);
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

    fn unpack_job(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: &BouncePool,
        list: &ScatterList,
        last: Option<u64>,
    ) -> Result<(Work, Arc<Descriptors>), DataFailure> {
        let gone = || DataFailure::Misreport("its operation has ended".to_owned());
        let operation = self.operations.get_mut(&id).ok_or_else(gone)?;
        let length = u64::from(flight.event.length);
        let sum = || list.iter().map(|f| u64::from(f.length)).sum();
        let limits = Limits {
            pool_bytes: pool.len() as u64,
            destination_bytes: length,
            received_bytes: last.unwrap_or_else(sum),
        };
        let mut descriptors = self.jobs.lists.take();
        // Nobody else has a list that is taken.
        let built = Arc::make_mut(&mut descriptors).build(list, limits);
        built.map_err(|error| DataFailure::Misreport(error.to_string()))?;
        let start = usize::try_from(flight.event.offset).unwrap_or(usize::MAX);
        let to = operation
            .lease
            .slice(start..start.saturating_add(flight.event.length as usize))
            .map_err(|error| DataFailure::Memory(error.to_string()))?;
        let worker = &self.jobs.worker;
        let automatic = || worker.unpack_method_for(pool.kind(), to.kind(), &descriptors);
        // What did not land in the pool may lie where a method that was asked for cannot reach.
        let reaches = |method: &UnpackMethod| method.is_possible(pool.kind(), to.kind());
        let wanted = self.jobs.method.filter(reaches);
        let with = wanted.unwrap_or_else(automatic);
        operation.method = Some(with);
        if let Some(parts) = operation.parts.get_mut(&flight.event.index) {
            parts.add(&descriptors);
        }
        if last.is_some()
            && let Some(parts) = operation.parts.remove(&flight.event.index)
        {
            // They must be the chunk.
            parts.check(length).map_err(DataFailure::Misreport)?;
        }
        let work = Work::Unpack {
            pool: pool.clone(),
            descriptors: Arc::clone(&descriptors),
            to,
            with,
        };
        Ok((work, descriptors))
    }

    /// Queues a job for the copy worker, behind those that wait already.
    pub(super) fn submit(&mut self, work: Work, token: u64, id: OperationId) {
        let fence = self.operations.get(&id).and_then(|op| op.fence.clone());
        self.jobs.submit(work, fence, token);
    }

    /// Takes what the copy worker has finished; `true` if anything was.
    pub(super) fn drain_worker(&mut self) -> bool {
        let finished = self.jobs.take_finished();
        let any = self.jobs_finished(finished);
        self.jobs.submit_waiting();
        any
    }

    /// Takes these ends, in the buffer that is used again; `true` if there are any.
    pub(super) fn jobs_finished(&mut self, mut finished: Vec<Finished>) -> bool {
        let any = !finished.is_empty();
        for (token, result) in finished.drain(..) {
            self.job_finished(token, result);
        }
        self.jobs.finished = finished;
        any
    }

    fn job_finished(&mut self, token: u64, result: Result<u64, MemoryError>) {
        let now = self.clock.now();
        match self.tokens.open.remove(&token) {
            Some(Token::Unpack(id, flight, ticket, descriptors, is_last)) => {
                self.jobs.lists.give_back(descriptors);
                let wanted = match is_last {
                    true => self.ended_of(id, Operation::unpacked),
                    false => self.job_off(id),
                };
                if let (Err(error), true) = (&result, wanted) {
                    let index = Some(flight.event.index);
                    let failure = DataFailure::Memory(error.to_string());
                    self.session.data_failed(now, id, index, failure);
                }
                let channel = usize::from(flight.event.channel);
                match result {
                    Err(error) if error.may_go_on() => {
                        self.channels.all[channel].keep();
                        self.fail(Error::Memory(error));
                    }
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
                Err(error) => self.read_failed(id, &error),
            },
            // Whatever became of it, the message travels otherwise.
            Some(Token::SmallRead(id)) => {
                self.job_off(id);
            }
            Some(Token::Window(..)) | None => {}
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
                let tag = Arc::new(KeyedTag::new(&self.jobs.tag_key));
                let token = self.tokens.add(Token::Digest(id, Arc::clone(&tag)));
                let tag = Some(tag);
                self.submit(Work::Checksum { of, tag }, token, id);
            }
            Err(error) => self.memory_failed(id, &error),
        }
    }

    pub(super) fn memory_failed(&mut self, id: OperationId, error: &MemoryError) {
        let failure = DataFailure::Memory(error.to_string());
        self.session
            .data_failed(self.clock.now(), id, None, failure);
    }

    pub(super) fn emit_arrival(&self, chunk: ChunkEvent, list: &ScatterList, pool: &BouncePool) {
        if self.program.observer.is_none() {
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

/// What one connection has with the copy worker.
pub(crate) struct Jobs {
    worker: Arc<CopyWorker>,
    /// How unpacking is done, if that was asked for.
    method: Option<UnpackMethod>,
    /// Of what is verified; it derives from the session's secret.
    tag_key: TagKey,
    sink: Arc<Sink>,
    bounds: Bounds,
    lists: Lists,
    /// Those that the worker has yet to take.
    waiting: VecDeque<Job>,
    /// How many it has.
    under_way: usize,
    /// Empty, with room for ends.
    pub(super) finished: Vec<Finished>,
}

impl Jobs {
    pub(crate) fn new(
        worker: Arc<CopyWorker>,
        method: Option<UnpackMethod>,
        tag_key: TagKey,
        (driver, id): (&Arc<Driver>, DrivenId),
        bounds: Bounds,
    ) -> Self {
        let sink = Sink {
            finished: Mutex::new(Vec::new()),
            looked_for: AtomicBool::new(false),
            driver: Arc::clone(driver),
            id,
        };
        Self {
            worker,
            method,
            tag_key,
            sink: Arc::new(sink),
            bounds,
            lists: Lists::default(),
            waiting: VecDeque::new(),
            under_way: 0,
            finished: Vec::new(),
        }
    }

    fn submit(&mut self, work: Work, fence: Option<Fence>, token: u64) {
        self.waiting.push_back(Job {
            work,
            fence,
            sink: Arc::clone(&self.sink) as _,
            token,
        });
        self.submit_waiting();
    }

    /// Gives the copy worker as many of the jobs that wait as it takes from one connection. A full
    /// queue delays them; any other refusal is a job's result.
    fn submit_waiting(&mut self) {
        while self.under_way < self.bounds.jobs
            && let Some(job) = self.waiting.pop_front()
        {
            let token = job.token;
            self.under_way += 1;
            match self.worker.submit_deferrable(job, self.bounds.queue) {
                Ok(()) => {}
                Err(SubmitError {
                    job,
                    error: MemoryError::QueueFull { .. },
                }) => {
                    self.under_way -= 1;
                    self.waiting.push_front(*job);
                    return;
                }
                Err(SubmitError { job, error }) => {
                    // Its list is used again.
                    drop(job);
                    self.sink.complete(token, Err(error));
                }
            }
        }
    }

    /// When the copy worker's queue must be tried again: jobs wait, and none of this connection is
    /// under way whose end would be the occasion.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        let is_stuck = self.under_way == 0 && !self.waiting.is_empty();
        is_stuck.then(|| Instant::now() + self.bounds.retry)
    }

    fn take_finished(&mut self) -> Vec<Finished> {
        let mut finished = std::mem::take(&mut self.finished);
        self.sink.take(&mut finished);
        self.under_way = self.under_way.saturating_sub(finished.len());
        finished
    }

    pub(crate) fn has_results(&self) -> bool {
        !lock(&self.sink.finished).is_empty()
    }

    /// Says whether somebody looks for results without being woken. Whoever stops takes a last look
    /// afterwards.
    pub(super) fn set_looked_for(&self, looked_for: bool) {
        self.sink.looked_for.store(looked_for, Ordering::SeqCst);
    }
}

/// Lists of chunks that have ended, so that a chunk needs no new memory.
#[derive(Default)]
struct Lists(Vec<Arc<Descriptors>>);

impl Lists {
    /// One that nobody else has.
    fn take(&mut self) -> Arc<Descriptors> {
        self.0.pop().unwrap_or_default()
    }

    /// Keeps a list for the next chunk, unless somebody else still has it; without room that few
    /// chunks need.
    fn give_back(&mut self, mut list: Arc<Descriptors>) {
        if self.0.len() < LISTS_KEPT
            && let Some(ours) = Arc::get_mut(&mut list)
        {
            ours.clear();
            ours.shrink_to(ROOM_KEPT);
            self.0.push(list);
        }
    }
}

/// Result of one job of the copy worker.
pub(crate) type Finished = (u64, Result<u64, MemoryError>);

/// Collects results and wakes the driver of the connection.
#[derive(Debug)]
struct Sink {
    finished: Mutex<Vec<Finished>>,
    /// A thread of the program looks for results by itself.
    looked_for: AtomicBool,
    driver: Arc<Driver>,
    id: DrivenId,
}

impl Sink {
    /// Moves the results so far to `into`, which is empty; both vectors keep their room.
    fn take(&self, into: &mut Vec<Finished>) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_come_back_without_the_room_of_a_long_one() {
        let mut lists = Lists::default();
        let mut list = lists.take();
        let entries = (0..100_000u64).map(|index| tcpx_wire::Fragment {
            source_offset: index * 3,
            length: 1,
            destination_offset: index,
        });
        let limits = Limits {
            pool_bytes: 300_000,
            destination_bytes: 100_000,
            received_bytes: 100_000,
        };
        let built =
            Arc::get_mut(&mut list).map(|list| list.build(&entries.collect::<Vec<_>>(), limits));
        assert_eq!(built, Some(Ok(())));
        let shared = Arc::clone(&list);
        lists.give_back(Arc::clone(&list));
        assert_eq!(lists.0.len(), 0, "somebody else has it");
        drop(shared);
        lists.give_back(list);
        let list = lists.take();
        assert!(list.is_empty() && list.capacity() < 10_000);
        let error = MemoryError::WorkerFailed;
        assert!(error.may_go_on() && !MemoryError::WorkerStopped.may_go_on());
    }
}
