//! Plain send and receive loops over host memory: what the machine gives to anybody.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tcpx::Connection;
use tcpx_net::plain;

use crate::cost::{Cost, cpu_us};
use crate::end::Part;
use crate::meter::{Meter, Sample};
use crate::orders::{Answer, MOST_IN_FLIGHT, Mode, Order, Run, Talk};
use crate::serve::{reached_from, same_congestion};
use crate::{Error, Op};

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
    fn of(run: &Run, streams: u16) -> Self {
        let (streams, slots) = (streams.max(1), run.depth.into());
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        match run.bytes / u64::from(streams) >= LEAST_PART {
            true => Self {
                part: bytes(run.bytes.div_ceil(streams.into())),
                count: run.count,
                slots,
            },
            false => Self {
                part: bytes(run.bytes),
                count: run.count.div_ceil(streams.into()),
                slots,
            },
        }
    }

    /// Bytes that all streams move in one direction; a division may round up.
    fn moved(self, streams: u16) -> u64 {
        self.part as u64 * u64::from(self.count) * u64::from(streams)
    }

    /// Where a message lies in a stream's memory.
    fn slot(&self, index: u32) -> std::ops::Range<usize> {
        let from = self.part * (index % self.slots) as usize;
        from..from + self.part
    }
}

/// A stream at one end, with memory that was touched before anything is timed: a page fault costs more than a copy.
struct End {
    stream: TcpStream,
    source: Vec<u8>,
    sink: Vec<u8>,
}

/// The other end's part.
pub(crate) fn serve(
    connection: &Connection,
    talk: &mut dyn Talk,
    run: &Run,
    streams: u16,
    limit: Duration,
) -> Result<Answer, Error> {
    run.check()?;
    if streams == 0 || streams > MOST_IN_FLIGHT || run.op != Op::Send {
        return Err(Error::unexpected(
            "1 to 64 plain streams",
            format!("{streams}"),
        ));
    }
    let peer = connection.peer().address.ip();
    let address = SocketAddr::new(reached_from(peer), 0);
    let listener =
        plain::listen(address, &same_congestion(connection)).map_err(tcpx::Error::from)?;
    let at = listener.local_addr();
    talk.say(&Answer::At {
        at: at.map_err(Error::system("look at the listening socket"))?,
        congestion: plain::congestion_control(&listener),
    })?;
    let until = Instant::now() + limit;
    let mut accepted = Vec::with_capacity(streams.into());
    while accepted.len() < usize::from(streams) {
        let (stream, from) = plain::accept(&listener, until).map_err(tcpx::Error::from)?;
        if from.ip() == peer {
            accepted.push(stream);
        }
    }
    let part = work(run, accepted, limit, false)?;
    Ok(Answer::Done { cost: part.cost })
}

/// Measures plain loops over so many streams; the congestion control of their ends in words.
pub(crate) fn measure(
    meter: &mut Meter<'_>,
    run: &Run,
    streams: u16,
    span: Duration,
) -> Result<(Sample, String), Error> {
    let patience = meter.patience(run, span);
    meter.talk.say(&Order::Plain { run: *run, streams })?;
    let (at, there) = meet(meter, patience)?;
    let until = Instant::now() + meter.limit;
    let congestion = same_congestion(meter.connection);
    let connected: Result<Vec<_>, _> = (0..streams)
        .map(|_| plain::connect(at, &congestion, until))
        .collect();
    let connected = connected.map_err(tcpx::Error::from)?;
    let here = connected.first().and_then(plain::congestion_control);
    let started = Instant::now();
    let part = work(run, connected, meter.limit, true);
    let theirs = meter.talk.done(patience);
    let all = started.elapsed();
    let part = part.map(|part| match run.mode {
        Mode::Latency => part,
        // This end's last call says little of what has arrived.
        _ => Part {
            elapsed: all,
            ..part
        },
    });
    let ways = if run.mode == Mode::One { 1 } else { 2 };
    let moved = Share::of(run, streams).moved(streams) * ways;
    Ok((Sample::of(part, theirs, moved)?, controls(here, there)))
}

/// Where to meet the other end, and the congestion control there.
pub(crate) fn meet(
    meter: &mut Meter<'_>,
    limit: Duration,
) -> Result<(SocketAddr, Option<String>), Error> {
    match meter.talk.answer(limit)? {
        Answer::At { at, congestion } => {
            // Its address as it is: one of a single link says of which.
            let mut address = meter.connection.peer().address;
            address.set_port(at.port());
            Ok((address, congestion))
        }
        other => Err(Error::unexpected("where to meet", format!("{other:?}"))),
    }
}

/// The congestion controls of both ends, for a note.
pub(crate) fn controls(here: Option<String>, there: Option<String>) -> String {
    let (here, there) = (here.unwrap_or_default(), there.unwrap_or_default());
    match there.is_empty() || there == here {
        true => here,
        false => format!("{here} here and {there} there"),
    }
}

/// Runs all streams, a thread for each direction of each.
fn work(
    run: &Run,
    streams: Vec<TcpStream>,
    limit: Duration,
    measures: bool,
) -> Result<Part, Error> {
    let share = Share::of(run, u16::try_from(streams.len()).unwrap_or(u16::MAX));
    let (sends, receives) = run.directions(measures);
    let bytes = |wanted: bool| {
        if wanted {
            share.part * share.slots as usize
        } else {
            0
        }
    };
    let latency = run.mode == Mode::Latency;
    let end = |stream: TcpStream| {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        Ok(End {
            stream,
            source: vec![0x3c; bytes(sends || latency)],
            sink: vec![0xa5; bytes(receives && !latency)],
        })
    };
    let ends: io::Result<Vec<End>> = streams.into_iter().map(end).collect();
    let mut ends = ends.map_err(failed)?;
    let cpu = cpu_us();
    let started = Instant::now();
    let mut part = Part::default();
    match &mut ends[..] {
        [end] if latency => part.times = ping_pong(end, share, measures).map_err(failed)?,
        ends => std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for End {
                stream,
                source,
                sink,
            } in ends
            {
                let stream = &*stream;
                if sends {
                    let all = move |index| write(stream, &source[share.slot(index)]);
                    threads.push(scope.spawn(move || (0..share.count).try_for_each(all)));
                }
                if receives {
                    threads.push(scope.spawn(move || {
                        (0..share.count)
                            .try_for_each(|index| read(stream, &mut sink[share.slot(index)]))
                    }));
                }
            }
            let other = || Err(io::ErrorKind::Other.into());
            let ends = threads.into_iter().map(|thread| thread.join());
            let ends: Vec<io::Result<()>> =
                ends.map(|end| end.unwrap_or_else(|_| other())).collect();
            ends.into_iter().collect::<io::Result<()>>().map_err(failed)
        })?,
    }
    part.elapsed = started.elapsed();
    part.cost = Cost {
        cpu_us: cpu_us().saturating_sub(cpu),
        ..Cost::default()
    };
    Ok(part)
}

fn failed(source: io::Error) -> Error {
    Error::system("move bytes through a plain stream")(source)
}

fn ping_pong(end: &mut End, share: Share, measures: bool) -> io::Result<Vec<Duration>> {
    let (stream, memory) = (&end.stream, &mut end.source[share.slot(0)]);
    let mut times = Vec::with_capacity(if measures { share.count as usize } else { 0 });
    for _ in 0..share.count {
        let started = Instant::now();
        if measures {
            write(stream, memory)?;
            read(stream, memory)?;
            times.push(started.elapsed() / 2);
        } else {
            read(stream, memory)?;
            write(stream, memory)?;
        }
    }
    Ok(times)
}

fn write(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    let mut pieces = bytes.chunks(CALL);
    pieces.try_for_each(|piece| stream.write_all(piece))
}

fn read(mut stream: &TcpStream, into: &mut [u8]) -> io::Result<()> {
    let mut pieces = into.chunks_mut(CALL);
    pieces.try_for_each(|piece| stream.read_exact(piece))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_messages_are_divided_and_small_ones_dealt_out() {
        let share = |bytes| Share::of(&Run::new(Mode::One, Op::Send, bytes, 5, 3), 4);
        let large = share((1 << 20) + 1);
        let (part, count, slots) = ((1 << 18) + 1, 5, 3);
        assert_eq!(large, Share { part, count, slots });
        let small = share(1000);
        assert_eq!((small.part, small.count, small.moved(4)), (1000, 2, 8000));
    }

    #[test]
    fn every_mode_moves_what_it_should() {
        let limit = Duration::from_secs(20);
        for mode in [Mode::Latency, Mode::One, Mode::Both] {
            let run = Run::new(mode, Op::Send, 300_000, 7, 3);
            let streams = if mode == Mode::Latency { 1 } else { 3 };
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listening");
            let at = listener.local_addr().expect("an address");
            std::thread::scope(|scope| {
                let server = scope.spawn(|| {
                    let accepted = (0..streams).map(|_| listener.accept().expect("a stream").0);
                    work(&run, accepted.collect(), limit, false)
                });
                let connect = |_| TcpStream::connect(at).expect("connected");
                let connected = (0..streams).map(connect).collect();
                let part = work(&run, connected, limit, true).expect("measured");
                let times = if mode == Mode::Latency { 7 } else { 0 };
                assert_eq!(part.times.len(), times);
                server.join().expect("no panic").expect("served");
            });
        }
    }
}
