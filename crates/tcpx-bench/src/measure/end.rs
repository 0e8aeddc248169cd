//! Messages through a connection, as one end sees them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tcpx::{Connection, Region, RegionSlice, Report, Transfer};

use crate::cost::{Cost, cpu_us};
use crate::orders::{Mode, Run};
use crate::pattern::Pattern;
use crate::{Error, contents};

/// First tag of what the measuring end sends, and of what comes back. Threads have ranges of their
/// own.
const THERE: u64 = 1 << 20;
const BACK: u64 = 2 << 20;
const TAGS_OF_A_THREAD: u64 = 1 << 10;

/// Most memory that the messages in flight of one direction take.
pub(crate) const MOST_BYTES: u64 = 2 << 30;

/// Answers of a ping-pong that may wait for their acknowledgement.
const UNACKNOWLEDGED: usize = 8;

/// How many messages of this size may be in flight when `asked` are wanted.
pub fn depth(bytes: u64, asked: u16) -> u16 {
    let most = u16::try_from(MOST_BYTES / bytes.max(1)).unwrap_or(u16::MAX);
    asked.min(most.max(1))
}

/// Makes a region of so many bytes.
pub type Allocate<'a> = &'a (dyn Fn(u64) -> Result<Region, Error> + Sync);

/// Memory of one end: something to send and somewhere to receive, each for the whole depth of each
/// thread. It is kept while the sizes stay.
#[derive(Debug, Default)]
pub struct Buffers {
    sizes: (u64, u64),
    pub(crate) sources: Vec<Region>,
    pub(crate) sinks: Vec<Region>,
}

impl Buffers {
    /// Has room for a run.
    pub(crate) fn fit(&mut self, run: &Run, allocate: Allocate<'_>) -> Result<(), Error> {
        let threads = usize::from(run.more_threads) + 1;
        let sizes = (run.bytes, run.receives_of());
        let (sources, sinks) = (usize::from(run.depth) * threads, posted(run) * threads);
        if self.sizes == sizes && self.sources.len() >= sources && self.sinks.len() >= sinks {
            return Ok(());
        }
        // The old memory goes first: both might not fit.
        *self = Self::default();
        let regions = |count: usize, bytes: u64| -> Result<Vec<Region>, Error> {
            (0..count).map(|_| allocate(bytes)).collect()
        };
        self.sources = regions(sources, sizes.0)?;
        self.sinks = regions(sinks, sizes.1)?;
        self.sizes = sizes;
        Ok(())
    }
}

/// Receives that are posted at a time: one more than messages are in flight, so that there always
/// is one.
fn posted(run: &Run) -> usize {
    usize::from(depth(run.receives_of(), run.depth.saturating_add(1))).max(2)
}

/// What this end's part of a measurement gave.
#[derive(Debug, Default)]
pub struct Part {
    /// Of each message, or of each half of a round trip; empty where this end only receives.
    pub times: Vec<Duration>,
    /// From the first message to the last.
    pub elapsed: Duration,
    /// What it cost.
    pub cost: Cost,
}

/// One end of a connection, with its memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) buffers: &'a Buffers,
    pub(crate) run: &'a Run,
    /// The measuring end, or the other one.
    pub(crate) measures: bool,
}

/// What one thread does in one direction: it receives what was posted and what follows, or else
/// sends.
struct Job {
    thread: usize,
    posted: Option<VecDeque<Transfer>>,
}

/// Times what one end does.
pub(crate) fn timed<E>(work: impl FnOnce() -> Result<Part, E>) -> Result<Part, E> {
    let cpu = cpu_us();
    let started = Instant::now();
    let mut part = work()?;
    part.elapsed = started.elapsed();
    part.cost.cpu_us = cpu_us().saturating_sub(cpu);
    Ok(part)
}

impl End<'_> {
    /// The numbers that this end's contents are made of, and the other's.
    fn seeds(&self) -> Option<(u64, u64)> {
        let seed = self.run.seed?;
        let back = seed.rotate_left(32) ^ 0x5bd1_e995_5bd1_e995;
        Some(if self.measures {
            (seed, back)
        } else {
            (back, seed)
        })
    }

    /// Fresh contents in every source and none in any sink, if the run has them compared.
    pub(crate) fn prepare(&self) -> Result<(), Error> {
        let Some((own, _)) = self.seeds() else {
            return Ok(());
        };
        for (index, source) in (0u64..).zip(&self.buffers.sources) {
            contents::fill(
                source,
                self.run.bytes,
                Pattern::new(own.wrapping_add(index)),
            )?;
        }
        self.buffers.sinks.iter().try_for_each(contents::poison)
    }

    /// Compares what came into the first sinks.
    pub(crate) fn compare(&self) -> Result<(), Error> {
        let Some((_, others)) = self.seeds() else {
            return Ok(());
        };
        for (index, sink) in (0u64..self.run.depth.into()).zip(&self.buffers.sinks) {
            let pattern = Pattern::new(others.wrapping_add(index));
            contents::compare(sink, 0, self.run.bytes, pattern)?;
        }
        Ok(())
    }

    /// The part of one end in sends and receives. `ready` returns once the other end is ready too,
    /// or tells it that this one is: what it receives into is there then.
    pub(crate) fn take_part(
        &self,
        ready: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Part, Error> {
        self.prepare()?;
        let (sends, receives) = self.run.directions(self.measures);
        let (out, back) = match self.measures {
            true => (THERE, BACK),
            false => (BACK, THERE),
        };
        let mut jobs = Vec::new();
        for thread in 0..=usize::from(self.run.more_threads) {
            let posted = receives.then(|| self.post(thread, back)).transpose()?;
            let job = |posted| Job { thread, posted };
            jobs.extend(sends.then(|| job(None)));
            jobs.extend(posted.map(|posted| job(Some(posted))));
        }
        ready()?;
        let part = timed(|| match (self.run.mode, jobs.pop()) {
            (Mode::Latency, Some(Job { posted: None, .. })) => self.ping(),
            (Mode::Latency, Some(job)) => self.pong(job.posted.unwrap_or_default()),
            (_, last) => self.all(last, jobs, out, back),
        })?;
        if receives {
            self.compare()?;
        }
        Ok(part)
    }

    /// All jobs at once, one of them by this thread.
    fn all(&self, own: Option<Job>, others: Vec<Job>, out: u64, back: u64) -> Result<Part, Error> {
        let work = |job: Job| match job.posted {
            None => self.keep_in_flight(|index| self.send(job.thread, out, index)),
            Some(posted) => self.receive_all(posted, job.thread, back, |_| Ok(())),
        };
        std::thread::scope(|scope| {
            let work = &work;
            let others = others.into_iter().map(|job| scope.spawn(move || work(job)));
            let others: Vec<_> = others.collect();
            let mut whole = own.map_or_else(|| Ok(Part::default()), work)?;
            for other in others {
                let panicked =
                    || Error::failed("a thread ended before its time", "its message stands above");
                let part = other.join().unwrap_or_else(|_| Err(panicked()))?;
                whole.times.extend(part.times);
                whole.cost.join(&part.cost);
            }
            Ok(whole)
        })
    }

    fn tag(&self, first: u64, thread: usize, index: u32) -> u64 {
        first + thread as u64 * TAGS_OF_A_THREAD + u64::from(index) % (self.run.more_tags + 1)
    }

    /// Posts the first receives of a thread.
    fn post(&self, thread: usize, tag: u64) -> Result<VecDeque<Transfer>, Error> {
        let first = u32::try_from(posted(self.run)).unwrap_or(u32::MAX);
        let some = 0..first.min(self.run.count);
        some.map(|index| self.receive(thread, tag, index)).collect()
    }

    /// Receives all messages of a thread; `then` follows each.
    fn receive_all(
        &self,
        mut posted: VecDeque<Transfer>,
        thread: usize,
        tag: u64,
        mut then: impl FnMut(u32) -> Result<(), Error>,
    ) -> Result<Part, Error> {
        let mut part = Part::default();
        let first = u32::try_from(posted.len()).unwrap_or(u32::MAX);
        for index in 0..self.run.count {
            let Some(transfer) = posted.pop_front() else {
                break;
            };
            part.cost.spent.add(&self.of_size(transfer)?);
            then(index)?;
            let next = index.saturating_add(first);
            if next < self.run.count {
                posted.push_back(self.receive(thread, tag, next)?);
            }
        }
        Ok(part)
    }

    /// Starts all messages, as many of them in flight as the run says.
    pub(crate) fn keep_in_flight(
        &self,
        mut start: impl FnMut(u32) -> Result<Transfer, Error>,
    ) -> Result<Part, Error> {
        let mut part = Part::default();
        part.times.reserve(self.run.count as usize);
        let mut note = |report: Report| {
            part.times.push(report.elapsed);
            part.cost.spent.add(&report);
        };
        let depth = usize::from(self.run.depth);
        let mut running: VecDeque<Transfer> = VecDeque::with_capacity(depth);
        for index in 0..self.run.count {
            if running.len() >= depth
                && let Some(oldest) = running.pop_front()
            {
                note(oldest.wait()?);
            }
            running.push_back(start(index)?);
        }
        for transfer in running {
            note(transfer.wait()?);
        }
        Ok(part)
    }

    fn ping(&self) -> Result<Part, Error> {
        let mut part = Part::default();
        part.times.reserve(self.run.count as usize);
        let mut unacknowledged = VecDeque::with_capacity(UNACKNOWLEDGED);
        for index in 0..self.run.count {
            let back = self.receive(0, BACK, index)?;
            let now = Instant::now();
            unacknowledged.push_back(self.send(0, THERE, index)?);
            self.of_size(back)?;
            part.times.push(now.elapsed() / 2);
            settle(&mut unacknowledged, UNACKNOWLEDGED - 1)?;
        }
        settle(&mut unacknowledged, 0)?;
        Ok(part)
    }

    fn pong(&self, posted: VecDeque<Transfer>) -> Result<Part, Error> {
        let mut unacknowledged = VecDeque::with_capacity(UNACKNOWLEDGED);
        let part = self.receive_all(posted, 0, THERE, |index| {
            unacknowledged.push_back(self.send(0, BACK, index)?);
            settle(&mut unacknowledged, UNACKNOWLEDGED - 1)
        })?;
        settle(&mut unacknowledged, 0)?;
        Ok(part)
    }

    fn send(&self, thread: usize, tag: u64, index: u32) -> Result<Transfer, Error> {
        let depth = usize::from(self.run.depth);
        let source = &self.buffers.sources[thread * depth + index as usize % depth];
        let source = slice(source, self.run.bytes)?;
        Ok(self
            .connection
            .send(source, self.tag(tag, thread, index))
            .start()?)
    }

    fn receive(&self, thread: usize, tag: u64, index: u32) -> Result<Transfer, Error> {
        let posted = posted(self.run);
        let sink = &self.buffers.sinks[thread * posted + index as usize % posted];
        let sink = slice(sink, self.run.receives_of())?;
        Ok(self
            .connection
            .receive(sink, self.tag(tag, thread, index))
            .start()?)
    }

    fn of_size(&self, transfer: Transfer) -> Result<Report, Error> {
        let report = transfer.wait()?;
        if report.bytes == self.run.bytes {
            return Ok(report);
        }
        Err(Error::unexpected(
            "messages of the agreed size",
            format!("{} bytes instead of {}", report.bytes, self.run.bytes),
        ))
    }
}

/// The first bytes of a region.
pub(crate) fn slice(region: &Region, bytes: u64) -> Result<RegionSlice, Error> {
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    region
        .slice(..length)
        .map_err(Error::memory("take a message's memory"))
}

/// Waits for the oldest until `most` are left.
fn settle(transfers: &mut VecDeque<Transfer>, most: usize) -> Result<(), Error> {
    while transfers.len() > most
        && let Some(oldest) = transfers.pop_front()
    {
        oldest.wait()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_large_messages_are_in_flight_but_at_least_one() {
        assert_eq!(depth(1 << 10, 8), 8);
        assert_eq!(depth(256 << 20, 8), 8);
        assert_eq!(depth(1 << 30, 8), 2);
        assert_eq!(depth(u64::MAX, 8), 1);
        assert_eq!(depth(0, 8), 8);
    }
}
