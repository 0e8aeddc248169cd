//! The cases over a connection. Both processes call the same function; one of them leads.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tcpx::{After, Connection, Gpu, Region, Transfer};

use crate::arguments::Load;
use crate::link::Pipe;
use crate::{Outcome, text};

const POISON: u8 = 0xA5;

/// One of the two processes.
pub(crate) struct Side<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) gpu: Option<&'a Gpu>,
    pub(crate) after: After,
    /// Sends where only one side does, and keeps the time.
    pub(crate) leads: bool,
}

/// What a case gave.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figures {
    pub(crate) gb_per_second: f64,
    /// Half of a round trip, or the time of a transfer where one is in flight: median and p99.
    pub(crate) latency_us: Option<(f64, f64)>,
    pub(crate) cpu_seconds_per_gb: f64,
}

/// Sources and destinations of this process.
struct Buffers {
    sources: Vec<Region>,
    destinations: Vec<Region>,
    /// Transfers that the peer has destinations for.
    sends: usize,
    /// Sources that differ.
    contents: usize,
}

impl Buffers {
    /// For transfers of `bytes` with `depth` in flight; one more can be received.
    fn new(side: &Side<'_>, bytes: usize, depth: usize, directions: [bool; 2]) -> Outcome<Self> {
        let [sends, receives] = directions;
        let (contents, regions) = (depth, depth + 1);
        Ok(Self {
            sources: side.sources(bytes, if sends { contents } else { 0 })?,
            destinations: side.destinations(bytes, if receives { regions } else { 0 })?,
            sends: if sends { regions } else { 0 },
            contents,
        })
    }
}

/// Processor seconds of this process.
pub(crate) fn cpu() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        now.tv_sec.unsigned_abs(),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    )
    .as_secs_f64()
}

impl Side<'_> {
    fn region(&self, bytes: usize) -> Outcome<Region> {
        match self.gpu {
            Some(gpu) => Region::cuda(gpu, bytes),
            None => Region::host(bytes),
        }
        .map_err(text)
    }

    fn send(&self, region: &Region, tag: u64) -> Outcome<Transfer> {
        let send = self.connection.send(region.all(), tag);
        send.after(self.after).start().map_err(text)
    }

    fn receive(&self, region: &Region, tag: u64) -> Outcome<Transfer> {
        let receive = self.connection.receive(region.all(), tag);
        receive.after(self.after).start().map_err(text)
    }

    fn sources(&self, bytes: usize, count: usize) -> Outcome<Vec<Region>> {
        (0..count)
            .map(|index| {
                let region = self.region(bytes)?;
                region.write_from(0, &content(bytes, index)).map_err(text)?;
                Ok(region)
            })
            .collect()
    }

    fn destinations(&self, bytes: usize, count: usize) -> Outcome<Vec<Region>> {
        let poison = vec![POISON; bytes];
        (0..count)
            .map(|_| {
                let region = self.region(bytes)?;
                region.write_from(0, &poison).map_err(text)?;
                Ok(region)
            })
            .collect()
    }

    /// Sends each source once to a poisoned destination of the other process, which compares it.
    fn verify<R: Read, W: Write>(
        &self,
        pipe: &mut Pipe<R, W>,
        buffers: &Buffers,
        tag: u64,
    ) -> Outcome<()> {
        let receives: Vec<Transfer> = buffers
            .destinations
            .iter()
            .map(|region| self.receive(region, tag))
            .collect::<Outcome<_>>()?;
        pipe.meet()?;
        let sends: Vec<Transfer> = (0..buffers.sends)
            .map(|index| self.send(&buffers.sources[index % buffers.contents], tag))
            .collect::<Outcome<_>>()?;
        for transfer in receives.into_iter().chain(sends) {
            transfer.wait().map_err(text)?;
        }
        for (index, region) in buffers.destinations.iter().enumerate() {
            let mut got = vec![0; region.len()];
            region.read_to(0, &mut got).map_err(text)?;
            if got != content(region.len(), index % buffers.contents) {
                return Err(format!(
                    "transfer {index} of {} bytes arrived wrong",
                    got.len()
                ));
            }
        }
        pipe.meet()
    }
}

/// Bytes that both processes know and that no other transfer of a case has.
fn content(len: usize, index: usize) -> Vec<u8> {
    let mut state = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; len.next_multiple_of(8)];
    for word in bytes.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state.to_ne_bytes();
    }
    bytes.truncate(len);
    bytes
}

/// Keeps `depth` transfers going until `count` have ended; the time of each.
fn keep_going(
    load: Load,
    mut start: impl FnMut(usize) -> Outcome<Transfer>,
) -> Outcome<Vec<Duration>> {
    let mut running: VecDeque<(Instant, Transfer)> = VecDeque::with_capacity(load.depth);
    let mut times = Vec::with_capacity(load.count);
    for index in 0..load.count + load.depth {
        if index >= load.depth {
            let Some((since, transfer)) = running.pop_front() else {
                break;
            };
            transfer.wait().map_err(text)?;
            times.push(since.elapsed());
        }
        if index < load.count {
            running.push_back((Instant::now(), start(index)?));
        }
    }
    Ok(times)
}

/// The two CPU times together, and whatever else the leader reports.
fn figures<R: Read, W: Write>(
    side: &Side<'_>,
    pipe: &mut Pipe<R, W>,
    (bytes, seconds): (f64, f64),
    spent: f64,
    latency_us: Option<(f64, f64)>,
) -> Outcome<Figures> {
    let mut cpu = spent;
    if side.leads {
        cpu += pipe.hear()?.parse::<f64>().map_err(text)?;
    } else {
        pipe.tell(&spent.to_string())?;
    }
    Ok(Figures {
        gb_per_second: bytes / seconds / 1e9,
        latency_us,
        cpu_seconds_per_gb: cpu / (bytes / 1e9),
    })
}

pub(crate) fn percentiles(mut times: Vec<Duration>, share: f64) -> (f64, f64) {
    times.sort_unstable();
    let at = |hundredths: usize| {
        let index = (times.len() * hundredths / 100).min(times.len().saturating_sub(1));
        times
            .get(index)
            .map_or(0.0, |time| time.as_secs_f64() * 1e6 * share)
    };
    (at(50), at(99))
}

pub(crate) fn stream<R: Read, W: Write>(
    side: &Side<'_>,
    pipe: &mut Pipe<R, W>,
    load: Load,
) -> Outcome<Figures> {
    const TAG: u64 = 1;
    let regions = load.depth + 1;
    let buffers = Buffers::new(side, load.bytes, load.depth, [side.leads, !side.leads])?;
    side.verify(pipe, &buffers, TAG)?;
    let (start, spent) = (Instant::now(), cpu());
    let times = if side.leads {
        keep_going(load, |index| {
            side.send(&buffers.sources[index % load.depth], TAG)
        })?
    } else {
        // One more than the sender has in flight, so that a receive is always posted.
        let load = Load {
            depth: regions,
            ..load
        };
        keep_going(load, |index| {
            side.receive(&buffers.destinations[index % regions], TAG)
        })?
    };
    let (seconds, spent) = (start.elapsed().as_secs_f64(), cpu() - spent);
    let moved = load.bytes as f64 * load.count as f64;
    let latency = (load.depth == 1).then(|| percentiles(times, 1.0));
    figures(side, pipe, (moved, seconds), spent, latency)
}

pub(crate) fn both<R: Read, W: Write>(
    side: &Side<'_>,
    pipe: &mut Pipe<R, W>,
    load: Load,
) -> Outcome<Figures> {
    const TAG: u64 = 2;
    let regions = load.depth + 1;
    let buffers = Buffers::new(side, load.bytes, load.depth, [true, true])?;
    side.verify(pipe, &buffers, TAG)?;
    let (start, spent) = (Instant::now(), cpu());
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            keep_going(load, |index| {
                side.send(&buffers.sources[index % load.depth], TAG)
            })
        });
        let load = Load {
            depth: regions,
            ..load
        };
        keep_going(load, |index| {
            side.receive(&buffers.destinations[index % regions], TAG)
        })?;
        sender
            .join()
            .map_err(|_| "the sender panicked".to_owned())?
    })?;
    let (seconds, spent) = (start.elapsed().as_secs_f64(), cpu() - spent);
    let moved = 2.0 * load.bytes as f64 * load.count as f64;
    figures(side, pipe, (moved, seconds), spent, None)
}

pub(crate) fn ping<R: Read, W: Write>(
    side: &Side<'_>,
    pipe: &mut Pipe<R, W>,
    bytes: usize,
    count: usize,
) -> Outcome<Figures> {
    const TAG: u64 = 3;
    let buffers = Buffers::new(side, bytes, 1, [true, true])?;
    side.verify(pipe, &buffers, TAG)?;
    let (source, destination) = (&buffers.sources[0], &buffers.destinations[0]);
    let warm_up = (count / 10).max(1);
    let mut times = Vec::with_capacity(count);
    let (mut start, mut spent) = (Instant::now(), cpu());
    let mut next = side.receive(destination, TAG)?;
    pipe.meet()?;
    for index in 0..count + warm_up {
        if index == warm_up {
            (start, spent) = (Instant::now(), cpu());
        }
        let since = Instant::now();
        let sent = if side.leads {
            let sent = side.send(source, TAG)?;
            next.wait().map_err(text)?;
            times.push(since.elapsed());
            sent
        } else {
            next.wait().map_err(text)?;
            side.send(source, TAG)?
        };
        // Posted before the peer can answer the next message.
        let last = index + 1 == count + warm_up;
        next = if last {
            sent
        } else {
            let next = side.receive(destination, TAG)?;
            sent.wait().map_err(text)?;
            next
        };
    }
    next.wait().map_err(text)?;
    let (seconds, spent) = (start.elapsed().as_secs_f64(), cpu() - spent);
    let moved = 2.0 * bytes as f64 * count as f64;
    let times = times.split_off(warm_up.min(times.len()));
    let latency = side.leads.then(|| percentiles(times, 0.5));
    figures(side, pipe, (moved, seconds), spent, latency)
}
