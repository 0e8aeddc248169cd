//! Messages through a connection of ours, as one end sees them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tcpx::{After, Connection, Region, RegionSlice, Report, Transfer};
use tcpx_memory::CopyWorker;

use super::orders::{Cost, Mode, Op, Run};
use crate::error::Error;
use crate::memory_choice::{self, MemoryChoice};
use crate::pattern::Pattern;
use crate::perf::summary::ProcessorTime;

/// Tag of what the measuring end sends.
const THERE: u64 = 43;
/// Tag of what comes back.
const BACK: u64 = 44;

/// Most memory that the messages in flight of one direction take.
const MOST_IN_FLIGHT: u64 = 2 << 30;

/// Answers of a ping-pong that may wait for their acknowledgement.
const UNACKNOWLEDGED: usize = 8;

/// How many messages of this size may be in flight when `asked` are wanted.
pub(super) fn depth(bytes: u64, asked: u16) -> u16 {
    let most = u16::try_from(MOST_IN_FLIGHT / bytes.max(1)).unwrap_or(u16::MAX);
    asked.min(most.max(1))
}

/// Memory of one end for one size: something to send and somewhere to receive, each for the whole depth.
#[derive(Debug)]
pub(super) struct Buffers {
    bytes: u64,
    sources: Vec<Region>,
    sinks: Vec<Region>,
}

impl Buffers {
    pub(super) fn new(memory: &MemoryChoice, bytes: u64, depth: u16) -> Result<Self, Error> {
        // One more than is in flight, so that a receive is always posted.
        let posted = crate::bench::net::engine::depth(bytes, depth.saturating_add(1));
        let regions = |count: u16| {
            (0..count)
                .map(|_| memory.allocate_pages(bytes))
                .collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            bytes,
            sources: regions(depth)?,
            sinks: regions(posted.max(2))?,
        })
    }

    pub(super) fn fits(&self, bytes: u64, depth: u16) -> bool {
        self.bytes == bytes && self.sources.len() >= usize::from(depth)
    }

    pub(super) fn sources(&self) -> &[Region] {
        &self.sources
    }

    pub(super) fn sinks(&self) -> &[Region] {
        &self.sinks
    }

    fn source(&self, index: u32, depth: u16) -> &Region {
        &self.sources[index as usize % self.sources.len().min(usize::from(depth.max(1)))]
    }

    fn sink(&self, index: u32) -> &Region {
        &self.sinks[index as usize % self.sinks.len()]
    }

    /// Fresh contents in every source, none in any sink.
    pub(super) fn prepare(&self, seed: u64) -> Result<(), Error> {
        for (index, source) in (0u64..).zip(&self.sources) {
            memory_choice::fill(source, self.bytes, Pattern::new(seed.wrapping_add(index)))?;
        }
        self.sinks.iter().try_for_each(memory_choice::poison)
    }

    /// Compares the first `count` sinks with the sources of an end that prepared with `seed`.
    pub(super) fn compare(&self, seed: u64, count: u16) -> Result<(), Error> {
        for (index, sink) in (0u64..count.into()).zip(&self.sinks) {
            memory_choice::compare(sink, self.bytes, Pattern::new(seed.wrapping_add(index)))?;
        }
        Ok(())
    }
}

/// What this end's part of a measurement gave.
#[derive(Debug, Default)]
pub(crate) struct Part {
    /// Of each message, or of each half of a round trip; empty where this end only receives.
    pub(crate) times: Vec<Duration>,
    /// From the first message to the last.
    pub(crate) elapsed: Duration,
    pub(crate) cost: Cost,
}

/// One end of a connection, with its memory.
#[derive(Debug)]
pub(super) struct End<'a> {
    pub(super) connection: &'a Connection,
    pub(super) buffers: &'a Buffers,
    pub(super) memory: &'a MemoryChoice,
}

/// Receives that are posted, or will be in their turn.
#[derive(Default)]
struct Incoming {
    posted: VecDeque<Transfer>,
    next: u32,
}

impl End<'_> {
    /// The part of one end. `ready` returns once the other end is ready too, or tells it that this one is: what it
    /// receives into is there then.
    pub(super) fn take_part(
        &self,
        run: &Run,
        measures: bool,
        ready: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Part, Error> {
        // What the two ends send is made from one number.
        let seeds = run.seed.map(|seed| {
            let back = seed.rotate_left(32) ^ 0x5bd1_e995_5bd1_e995;
            if measures { (seed, back) } else { (back, seed) }
        });
        if let Some((own, _)) = seeds {
            self.buffers.prepare(own)?;
        }
        let pins = Pins::of(self.memory)?;
        let cpu = ProcessorTime::start();
        let mut part = match run.op {
            Op::Send => self.send_and_receive(run, measures, &pins, ready)?,
            _ => self.move_alone(run, measures, &pins, ready)?,
        };
        part.cost.cpu_us = cpu.microseconds();
        part.cost.pinned = pins.most();
        if let Some((_, others)) = seeds {
            self.buffers.compare(others, run.depth)?;
        }
        Ok(part)
    }

    fn send_and_receive(
        &self,
        run: &Run,
        measures: bool,
        pins: &Pins,
        ready: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Part, Error> {
        let (out, back) = if measures {
            (THERE, BACK)
        } else {
            (BACK, THERE)
        };
        let (sends, receives) = run.directions(measures);
        let incoming = match receives {
            true => self.post(run, back)?,
            false => Incoming::default(),
        };
        let started = Instant::now();
        ready()?;
        let mut part = match (run.mode, sends, receives) {
            (Mode::Latency, true, _) => return self.ping(run, pins),
            (Mode::Latency, ..) => self.pong(run, incoming, pins)?,
            (_, true, true) => self.both(run, incoming, out, back, pins)?,
            (_, true, false) => return self.send_all(run, out, pins),
            _ => self.receive_all(run, incoming, back, pins)?,
        };
        part.elapsed = started.elapsed();
        Ok(part)
    }

    /// Posts the first receives.
    fn post(&self, run: &Run, tag: u64) -> Result<Incoming, Error> {
        let mut incoming = Incoming {
            posted: VecDeque::with_capacity(self.buffers.sinks.len()),
            next: 0,
        };
        self.refill(run, tag, &mut incoming)?;
        Ok(incoming)
    }

    fn refill(&self, run: &Run, tag: u64, incoming: &mut Incoming) -> Result<(), Error> {
        let depth = (usize::from(run.depth) + 1).min(self.buffers.sinks.len());
        while incoming.next < run.count && incoming.posted.len() < depth {
            let sink = self.slice(self.buffers.sink(incoming.next))?;
            incoming.posted.push_back(self.receive(run, sink, tag)?);
            incoming.next += 1;
        }
        Ok(())
    }

    fn receive_all(
        &self,
        run: &Run,
        mut incoming: Incoming,
        tag: u64,
        pins: &Pins,
    ) -> Result<Part, Error> {
        let mut part = Part::default();
        while let Some(transfer) = incoming.posted.pop_front() {
            part.cost.spent.add(&of_size(transfer, run)?);
            pins.look();
            self.refill(run, tag, &mut incoming)?;
        }
        Ok(part)
    }

    fn send_all(&self, run: &Run, tag: u64, pins: &Pins) -> Result<Part, Error> {
        let mut part = Part::default();
        part.times.reserve(run.count as usize);
        let mut note = |report: Report| {
            part.times.push(report.elapsed);
            part.cost.spent.add(&report);
        };
        let mut sent: VecDeque<Transfer> = VecDeque::with_capacity(usize::from(run.depth));
        let started = Instant::now();
        for index in 0..run.count {
            if sent.len() >= usize::from(run.depth)
                && let Some(oldest) = sent.pop_front()
            {
                note(oldest.wait()?);
                pins.look();
            }
            let source = self.slice(self.buffers.source(index, run.depth))?;
            sent.push_back(self.send(run, source, tag)?);
        }
        for transfer in sent {
            note(transfer.wait()?);
        }
        part.elapsed = started.elapsed();
        Ok(part)
    }

    /// Sends and receives at once, each from a thread of its own.
    fn both(
        &self,
        run: &Run,
        incoming: Incoming,
        out: u64,
        back: u64,
        pins: &Pins,
    ) -> Result<Part, Error> {
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| self.receive_all(run, incoming, back, pins));
            let sent = self.send_all(run, out, pins);
            let received = receiving.join().unwrap_or_else(|_| {
                Err(Error::failed(
                    "the receiving thread ended before its time",
                    "its message stands above",
                ))
            });
            let mut part = sent?;
            part.cost.spent.join(&received?.cost.spent);
            Ok(part)
        })
    }

    fn ping(&self, run: &Run, pins: &Pins) -> Result<Part, Error> {
        let mut times = Vec::with_capacity(run.count as usize);
        let mut unacknowledged = VecDeque::with_capacity(UNACKNOWLEDGED);
        let started = Instant::now();
        for index in 0..run.count {
            let sink = self.slice(self.buffers.sink(index))?;
            let source = self.slice(self.buffers.source(index, 1))?;
            let back = self.receive(run, sink, BACK)?;
            let now = Instant::now();
            unacknowledged.push_back(self.send(run, source, THERE)?);
            of_size(back, run)?;
            times.push(now.elapsed() / 2);
            pins.look();
            settle(&mut unacknowledged, UNACKNOWLEDGED - 1)?;
        }
        let elapsed = started.elapsed();
        settle(&mut unacknowledged, 0)?;
        Ok(Part {
            times,
            elapsed,
            ..Part::default()
        })
    }

    fn pong(&self, run: &Run, mut incoming: Incoming, pins: &Pins) -> Result<Part, Error> {
        let mut part = Part::default();
        let mut unacknowledged = VecDeque::with_capacity(UNACKNOWLEDGED);
        let mut index = 0;
        while let Some(transfer) = incoming.posted.pop_front() {
            part.cost.spent.add(&of_size(transfer, run)?);
            let source = self.slice(self.buffers.source(index, 1))?;
            unacknowledged.push_back(self.send(run, source, BACK)?);
            index += 1;
            pins.look();
            self.refill(run, THERE, &mut incoming)?;
            settle(&mut unacknowledged, UNACKNOWLEDGED - 1)?;
        }
        settle(&mut unacknowledged, 0)?;
        Ok(part)
    }

    fn send(&self, run: &Run, source: RegionSlice, tag: u64) -> Result<Transfer, Error> {
        let send = self.connection.send(source, tag);
        Ok(send.after(after(run)).start()?)
    }

    fn receive(&self, run: &Run, sink: RegionSlice, tag: u64) -> Result<Transfer, Error> {
        let receive = self.connection.receive(sink, tag);
        Ok(receive.after(after(run)).start()?)
    }

    pub(super) fn slice(&self, region: &Region) -> Result<RegionSlice, Error> {
        let length = usize::try_from(self.buffers.bytes).unwrap_or(usize::MAX);
        region
            .slice(..length)
            .map_err(Error::memory("take a message's memory"))
    }
}

/// What a message waits for on the GPU.
pub(super) fn after(run: &Run) -> After {
    if run.at_once {
        After::Nothing
    } else {
        After::DefaultStreams
    }
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

fn of_size(transfer: Transfer, run: &Run) -> Result<Report, Error> {
    let report = transfer.wait()?;
    if report.bytes == run.bytes {
        return Ok(report);
    }
    Err(Error::unexpected(
        "messages of the agreed size",
        format!("{} bytes instead of {}", report.bytes, run.bytes),
    ))
}

/// Pinned slots in use, looked at when a message ends.
pub(super) struct Pins {
    worker: Option<std::sync::Arc<CopyWorker>>,
    most: std::sync::atomic::AtomicU64,
}

impl Pins {
    pub(super) fn of(memory: &MemoryChoice) -> Result<Self, Error> {
        let worker = match &memory.gpu {
            None => None,
            Some(gpu) => {
                Some(CopyWorker::for_gpu(gpu).map_err(Error::memory("find the copy worker"))?)
            }
        };
        Ok(Self {
            worker,
            most: std::sync::atomic::AtomicU64::new(0),
        })
    }

    pub(super) fn look(&self) {
        if let Some(worker) = &self.worker {
            let used = worker.pinned_in_use();
            self.most
                .fetch_max(used as u64, std::sync::atomic::Ordering::Relaxed);
        }
    }

    pub(super) fn most(&self) -> u64 {
        self.most.load(std::sync::atomic::Ordering::Relaxed)
    }
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
