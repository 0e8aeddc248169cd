//! Plain send and receive loops over loopback and host memory: what the machine gives to anybody.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use tcpx::Congestion;
use tcpx_net::NetworkError;

use crate::Error;
use crate::end::{Part, timed};
use crate::meter::Sample;
use crate::orders::{Mode, Run};

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
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let is_divided = run.bytes / u64::from(streams) >= LEAST_PART;
        let (part, count) = match is_divided {
            true => (run.bytes.div_ceil(streams.into()), run.count),
            false => (run.bytes, run.count.div_ceil(streams.into())),
        };
        Self {
            part: bytes(part),
            count,
            slots: run.depth.into(),
        }
    }

    /// Bytes that all streams move in one direction; a division may round up.
    fn moved(self, streams: u16) -> u64 {
        self.part as u64 * u64::from(self.count) * u64::from(streams)
    }

    /// Memory that was touched before anything is timed: a page fault costs more than a copy.
    fn memory(self, byte: u8) -> Vec<u8> {
        vec![byte; self.part * self.slots as usize]
    }

    /// Where a message lies in a stream's memory.
    fn slot(self, index: u32) -> std::ops::Range<usize> {
        let from = self.part * (index % self.slots) as usize;
        from..from + self.part
    }
}

/// Measures plain loops over so many streams, both ends in this process, a thread for each end of
/// each direction.
pub(crate) fn measure(
    run: &Run,
    streams: u16,
    congestion: &Congestion,
    limit: Duration,
) -> Result<Sample, Error> {
    let socket = || Socket::new(Domain::IPV4, Type::STREAM, None);
    let pair = || -> Result<[TcpStream; 2], Error> {
        let failed = Error::system("connect plain sockets");
        let (listening, near) = socket()
            .and_then(|listening| Ok((listening, socket()?)))
            .map_err(&failed)?;
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        // As lanes get it: before they listen or connect.
        let given = congestion.apply_to_listen(&listening, at);
        given
            .and_then(|()| congestion.apply_to_dial(&near, at))
            .map_err(NetworkError::from)?;
        let connect = || {
            listening.bind(&at.into())?;
            listening.listen(1)?;
            near.connect_timeout(&listening.local_addr()?, limit)?;
            listening.accept()
        };
        let (far, _) = connect().map_err(&failed)?;
        Ok([near.into(), far.into()])
    };
    let pairs: Result<Vec<_>, _> = (0..streams).map(|_| pair()).collect();
    let pairs = pairs?;
    let share = Share::of(run, streams);
    let (there, back) = run.directions(true);
    let ways = pairs.iter().flat_map(|[near, far]| {
        let there = there.then_some((near, far));
        there.into_iter().chain(back.then_some((far, near)))
    });
    let moved = || {
        for stream in pairs.iter().flatten() {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(limit))?;
            stream.set_write_timeout(Some(limit))?;
        }
        match run.mode {
            Mode::Latency => ping_pong(&pairs[0], share),
            _ => stream_all(ways.collect(), share),
        }
    };
    let directions = if run.mode == Mode::One { 1 } else { 2 };
    Ok(Sample {
        part: moved().map_err(Error::system("move bytes through a plain stream"))?,
        moved: share.moved(streams) * directions,
        ..Sample::default()
    })
}

/// Every stream's messages at once.
fn stream_all(ways: Vec<(&TcpStream, &TcpStream)>, share: Share) -> io::Result<Part> {
    let mut ways: Vec<_> = ways
        .into_iter()
        .map(|way| (way, share.memory(0x3c), share.memory(0xa5)))
        .collect();
    timed(|| {
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for ((from, to), source, sink) in &mut ways {
                let send = |index| write(from, &source[share.slot(index)]);
                threads.push(scope.spawn(move || (0..share.count).try_for_each(send)));
                let receive = |index| read(to, &mut sink[share.slot(index)]);
                threads.push(scope.spawn(move || (0..share.count).try_for_each(receive)));
            }
            let mut ends = threads.into_iter().map(|thread| thread.join());
            let other = |_| Err(io::ErrorKind::Other.into());
            ends.try_for_each(|end| end.unwrap_or_else(other))
        })
        .map(|()| Part::default())
    })
}

/// A message there and back, over and over.
fn ping_pong([near, far]: &[TcpStream; 2], share: Share) -> io::Result<Part> {
    let (mut here, mut there) = (share.memory(0x3c), share.memory(0xa5));
    timed(|| {
        std::thread::scope(|scope| {
            let answer = scope.spawn(|| {
                (0..share.count).try_for_each(|_| {
                    read(far, &mut there[share.slot(0)])?;
                    write(far, &there[share.slot(0)])
                })
            });
            let mut part = Part::default();
            part.times.reserve(share.count as usize);
            for _ in 0..share.count {
                let started = Instant::now();
                write(near, &here[share.slot(0)])?;
                read(near, &mut here[share.slot(0)])?;
                part.times.push(started.elapsed() / 2);
            }
            let other = |_| Err(io::ErrorKind::Other.into());
            answer.join().unwrap_or_else(other).map(|()| part)
        })
    })
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
    use crate::Op;

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
        for (mode, directions) in [(Mode::Latency, 2), (Mode::One, 1), (Mode::Both, 2)] {
            let run = Run::new(mode, Op::Send, 300_000, 7, 3);
            let streams = if mode == Mode::Latency { 1 } else { 3 };
            let sample = measure(&run, streams, &Congestion::Automatic, limit).expect("measured");
            let times = if mode == Mode::Latency { 7 } else { 0 };
            assert_eq!(sample.part.times.len(), times);
            assert_eq!(sample.moved, 300_000 * 7 * directions);
        }
    }
}
