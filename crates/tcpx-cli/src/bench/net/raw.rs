//! Plain send and receive loops over host memory: what the machine gives to anybody.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tcpx::Congestion;
use tcpx_net::plain;

use super::engine::{Part, depth};
use super::orders::{Cost, Drive, Mode, RawRun};
use crate::error::Error;
use crate::pattern::Pattern;
use crate::perf::summary::ProcessorTime;

/// Most bytes of one call.
const CALL: usize = 1 << 20;

/// A message is divided among the streams if each gets this much, in bytes.
const LEAST_PART: u64 = 64 << 10;

/// What one stream moves in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    /// Bytes at a time.
    part: usize,
    /// How often.
    count: u32,
    /// Different places that are used in turn.
    slots: u32,
}

impl Share {
    /// Where a message lies in a stream's memory.
    fn slot(&self, index: u32) -> std::ops::Range<usize> {
        let from = self.part * (index % self.slots) as usize;
        from..from + self.part
    }
}

impl RawRun {
    fn share(&self) -> Share {
        let (run, streams) = (&self.run, u64::from(self.streams.max(1)));
        let divided = run.bytes / streams >= LEAST_PART;
        let part = if divided {
            run.bytes.div_ceil(streams)
        } else {
            run.bytes
        };
        Share {
            part: usize::try_from(part).unwrap_or(usize::MAX),
            count: if divided {
                run.count
            } else {
                run.count.div_ceil(u32::from(self.streams.max(1)))
            },
            slots: depth(run.bytes, run.depth).into(),
        }
    }

    /// Bytes that all streams move in one direction; a division may round up.
    pub(super) fn bytes(&self) -> u64 {
        let share = self.share();
        share.part as u64 * u64::from(share.count) * u64::from(self.streams)
    }
}

/// Memory of every stream, touched before anything is timed: a page fault costs more than a copy.
#[derive(Debug)]
pub(super) struct Memory {
    sources: Vec<Vec<u8>>,
    sinks: Vec<Vec<u8>>,
}

impl Memory {
    /// For one end; the measuring one sends first.
    pub(super) fn new(run: &RawRun, measures: bool) -> Self {
        let share = run.share();
        let bytes = share.part.saturating_mul(share.slots as usize);
        // Round trips go through one piece of memory.
        let (sends, receives) = match run.run.mode {
            Mode::Latency => (true, false),
            _ => run.run.directions(measures),
        };
        let source = || {
            let mut source = vec![0x3c; bytes];
            if let Some(seed) = run.run.seed {
                Pattern::new(seed).fill(0, &mut source);
            }
            source
        };
        let of = |wanted: bool| if wanted { usize::from(run.streams) } else { 0 };
        Self {
            sources: (0..of(sends)).map(|_| source()).collect(),
            sinks: (0..of(receives)).map(|_| vec![0xa5; bytes]).collect(),
        }
    }
}

/// Accepts the streams, from the peer of the connection only, and does the other end's part.
pub(super) fn serve(
    run: &RawRun,
    memory: &mut Memory,
    listener: &std::net::TcpListener,
    peer: IpAddr,
    limit: Duration,
) -> Result<Cost, Error> {
    let until = Instant::now() + limit;
    let mut streams = Vec::with_capacity(run.streams.into());
    while streams.len() < usize::from(run.streams) {
        let (stream, from) = plain::accept(listener, until).map_err(tcpx::Error::from)?;
        if from.ip() == peer {
            streams.push(stream);
        }
    }
    let cpu = ProcessorTime::start();
    work(run, memory, &streams, false, limit)?;
    Ok(Cost {
        cpu_us: cpu.microseconds(),
        ..Cost::default()
    })
}

/// Connects the streams and does the measuring end's part. The part's `elapsed` ends with this end's
/// last call: whoever times a direction waits for the other end's report.
pub(super) fn measure(
    run: &RawRun,
    memory: &mut Memory,
    at: SocketAddr,
    congestion: &Congestion,
    limit: Duration,
) -> Result<(Part, String), Error> {
    let until = Instant::now() + limit;
    let streams = (0..run.streams)
        .map(|_| plain::connect(at, congestion, until))
        .collect::<Result<Vec<_>, _>>()
        .map_err(tcpx::Error::from)?;
    let control = streams
        .first()
        .and_then(plain::congestion_control)
        .unwrap_or_default();
    let cpu = ProcessorTime::start();
    let started = Instant::now();
    let times = work(run, memory, &streams, true, limit)?;
    let part = Part {
        times,
        elapsed: started.elapsed(),
        cost: Cost {
            cpu_us: cpu.microseconds(),
            ..Cost::default()
        },
    };
    Ok((part, control))
}

/// Runs all streams, a thread for each direction of each.
fn work(
    run: &RawRun,
    memory: &mut Memory,
    streams: &[TcpStream],
    measures: bool,
    limit: Duration,
) -> Result<Vec<Duration>, Error> {
    for stream in streams {
        prepare(stream, run.drive, limit).map_err(failed)?;
    }
    let share = run.share();
    if run.run.mode == Mode::Latency {
        let ([stream], [memory]) = (streams, &mut memory.sources[..]) else {
            return Err(Error::unexpected(
                "one stream for round trips",
                streams.len().to_string(),
            ));
        };
        let wire = Wire { stream, limit };
        return wire.ping_pong(memory, share, measures).map_err(failed);
    }
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (stream, memory) in streams.iter().zip(&memory.sources) {
            let wire = Wire { stream, limit };
            threads.push(scope.spawn(move || wire.send_all(memory, share).map_err(failed)));
        }
        for (stream, memory) in streams.iter().zip(&mut memory.sinks) {
            let wire = Wire { stream, limit };
            threads.push(scope.spawn(move || wire.receive_all(memory, share, run.run.seed)));
        }
        let ends: Vec<_> = threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(failed(io::ErrorKind::Other.into())))
            })
            .collect();
        ends.into_iter().collect::<Result<(), _>>()
    })?;
    Ok(Vec::new())
}

fn prepare(stream: &TcpStream, drive: Drive, limit: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(drive == Drive::Spinning)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))
}

fn failed(source: io::Error) -> Error {
    Error::process("move bytes through a plain stream")(source)
}

/// A stream whose calls may return without having done anything.
#[derive(Clone, Copy)]
struct Wire<'a> {
    stream: &'a TcpStream,
    limit: Duration,
}

impl Wire<'_> {
    fn send_all(self, memory: &[u8], share: Share) -> io::Result<()> {
        (0..share.count).try_for_each(|index| self.write(&memory[share.slot(index)]))
    }

    fn receive_all(self, memory: &mut [u8], share: Share, seed: Option<u64>) -> Result<(), Error> {
        for index in 0..share.count {
            let slot = share.slot(index);
            let from = slot.start as u64;
            self.read(&mut memory[slot.clone()]).map_err(failed)?;
            if let Some(seed) = seed {
                Pattern::new(seed)
                    .compare(from, &memory[slot])
                    .map_err(Error::Contents)?;
            }
        }
        Ok(())
    }

    fn ping_pong(
        self,
        memory: &mut [u8],
        share: Share,
        measures: bool,
    ) -> io::Result<Vec<Duration>> {
        let memory = &mut memory[share.slot(0)];
        let mut times = Vec::with_capacity(if measures { share.count as usize } else { 0 });
        for _ in 0..share.count {
            if measures {
                let started = Instant::now();
                self.write(memory)?;
                self.read(memory)?;
                times.push(started.elapsed() / 2);
            } else {
                self.read(memory)?;
                self.write(memory)?;
            }
        }
        Ok(times)
    }

    fn write(self, mut rest: &[u8]) -> io::Result<()> {
        let mut stream = self.stream;
        while !rest.is_empty() {
            let piece = &rest[..rest.len().min(CALL)];
            let done = self.again(|| stream.write(piece))?;
            rest = &rest[done..];
        }
        Ok(())
    }

    fn read(self, into: &mut [u8]) -> io::Result<()> {
        let mut stream = self.stream;
        let mut done = 0;
        while done < into.len() {
            let end = into.len().min(done + CALL);
            match self.again(|| stream.read(&mut into[done..end]))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    /// Repeats a call that had nothing to do: at once on a spinning stream; a blocking one has waited for
    /// the whole limit then.
    fn again(self, mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
        let mut since = None;
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if since.get_or_insert_with(Instant::now).elapsed() > self.limit {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    std::hint::spin_loop();
                }
                done => return done,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::net::orders::{Op, Run};

    fn run(mode: Mode, bytes: u64, count: u32, streams: u16) -> RawRun {
        RawRun {
            run: Run::new(mode, Op::Send, bytes, count, 3),
            streams,
            drive: Drive::Blocking,
        }
    }

    #[test]
    fn large_messages_are_divided_and_small_ones_dealt_out() {
        let large = run(Mode::One, (1 << 20) + 1, 5, 4);
        assert_eq!(
            large.share(),
            Share {
                part: (1 << 18) + 1,
                count: 5,
                slots: 3
            }
        );
        let small = run(Mode::One, 1000, 5, 4);
        assert_eq!(
            small.share(),
            Share {
                part: 1000,
                count: 2,
                slots: 3
            }
        );
        assert_eq!(small.bytes(), 8000);
    }

    #[test]
    fn every_mode_moves_what_it_should_and_wrong_contents_are_seen() {
        let limit = Duration::from_secs(20);
        let control = Congestion::Named("reno".into());
        for mode in [Mode::Latency, Mode::One, Mode::Both] {
            for drive in [Drive::Blocking, Drive::Spinning] {
                let streams = if mode == Mode::Latency { 1 } else { 3 };
                let mut order = run(mode, 300_000, 7, streams);
                order.drive = drive;
                order.run.seed = (mode != Mode::Latency).then_some(9);
                let listener = plain::listen(SocketAddr::from(([127, 0, 0, 1], 0)), &control)
                    .expect("listening");
                let at = listener.local_addr().expect("an address");
                let mut wrong = order;
                std::thread::scope(|scope| {
                    let server = scope.spawn(|| {
                        serve(
                            &order,
                            &mut Memory::new(&order, false),
                            &listener,
                            at.ip(),
                            limit,
                        )
                    });
                    let (part, used) =
                        measure(&order, &mut Memory::new(&order, true), at, &control, limit)
                            .expect("measured");
                    assert_eq!(used, "reno");
                    assert_eq!(part.times.len(), if mode == Mode::Latency { 7 } else { 0 });
                    server.join().expect("no panic").expect("served");
                });
                if mode == Mode::One {
                    wrong.run.seed = Some(10);
                    std::thread::scope(|scope| {
                        let server = scope.spawn(|| {
                            serve(
                                &wrong,
                                &mut Memory::new(&wrong, false),
                                &listener,
                                at.ip(),
                                limit,
                            )
                        });
                        // The other end may close before everything is written.
                        let _ =
                            measure(&order, &mut Memory::new(&order, true), at, &control, limit);
                        let error = server
                            .join()
                            .expect("no panic")
                            .expect_err("wrong contents");
                        assert!(matches!(error, Error::Contents(_)), "{error}");
                    });
                }
            }
        }
    }
}
