//! Where a flow's bytes really land: nothing else proves that a rule works.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::cmsg::{Binding, Dialect, Piece, Received};
use crate::tokens::{Returned, TokenSet};
use rustix::event::PollFlags;
use tcpx_lanes::socket::wait;
use tcpx_memory::{Access, Gpu, MemoryError, Region};

use super::calls::{LinuxSockets, SocketCalls};
use super::receive_queue::ReceiveQueue;
use tcpx_net::error::IoError;

const OFFER_BYTES: usize = 1 << 20;
const RECORDS: usize = 1024;

/// Where the bytes of one connection landed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Landed {
    /// Who sent them.
    pub peer: Option<SocketAddr>,
    /// Bytes in the pool.
    pub device: u64,
    /// In so many fragments.
    pub fragments: u64,
    /// Bytes that the card did not split off, beside those in the pool.
    pub linear: u64,
    /// Bytes of receives without any device memory.
    pub plain: u64,
    /// The first byte of the stream that is not what was expected.
    pub wrong: Option<u64>,
}

impl Landed {
    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.device + self.linear + self.plain
    }
}

/// Why nothing could be said.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LandingError {
    /// Nobody came.
    #[error(
        "nobody connected to {address} within {waited:.1?}; start the sender, and check that a firewall lets the port through"
    )]
    Nobody {
        /// Where we listened.
        address: SocketAddr,
        /// How long.
        waited: Duration,
    },
    /// The sender stopped in the middle.
    #[error(
        "{peer} sent {} bytes and then neither more nor the end within {waited:.1?}; start the sender again",
        landed.bytes()
    )]
    Silent {
        /// Who.
        peer: SocketAddr,
        /// What came.
        landed: Box<Landed>,
        /// How long we waited in all.
        waited: Duration,
    },
    /// The kernel cannot give what arrived.
    #[error(
        "receiving failed after {} bytes: {cause}; a packet that the card split wrongly does this on the kernels of today (try `ethtool -K INTERFACE gro off`)",
        landed.bytes()
    )]
    Receive {
        /// What came before.
        landed: Box<Landed>,
        /// The system's reason.
        cause: IoError,
    },
    /// What the kernel said about the receive makes no sense, or memory failed.
    #[error("after {} bytes: {cause}; report this with `uname -a`", landed.bytes())]
    Broken {
        /// What came before.
        landed: Box<Landed>,
        /// What is wrong.
        cause: String,
    },
}

/// Accepts one connection on a non-blocking listener and reads it to its end, comparing its bytes with
/// `pattern`, again and again. `gpu` is whose memory the pool is.
///
/// # Errors
/// Nobody connected, the sender stopped, or the kernel failed.
pub fn watch_landing(
    queue: &ReceiveQueue,
    gpu: Option<&Gpu>,
    listener: &TcpListener,
    pattern: &[u8],
    limit: Duration,
) -> Result<Landed, LandingError> {
    let deadline = Instant::now() + limit;
    let mut landed = Landed::default();
    let (stream, peer) = accept(listener, deadline).map_err(|cause| match cause.kind() {
        io::ErrorKind::TimedOut => LandingError::Nobody {
            address: listener
                .local_addr()
                .unwrap_or_else(|_| ([0, 0, 0, 0], 0).into()),
            waited: limit,
        },
        _ => LandingError::Receive {
            landed: Box::default(),
            cause: cause.into(),
        },
    })?;
    landed.peer = Some(peer);
    let broken = |landed: &Landed, cause: String| LandingError::Broken {
        landed: Box::new(landed.clone()),
        cause,
    };
    let memory = |error: MemoryError| broken(&Landed::default(), error.to_string());
    let offer = Region::host(OFFER_BYTES).map_err(memory)?;
    let offer = offer
        .lease_as(.., Access::Write, "a landing test")
        .map_err(memory)?
        .all();
    let mut control = vec![0; Dialect::Mainline.control_bytes(RECORDS)];
    let mut buffer = vec![0; OFFER_BYTES];
    let binding = Binding::Mainline {
        pool_bytes: queue.pool.len() as u64,
        dmabuf_id: queue.dmabuf_id,
    };
    loop {
        let failed = |landed: &Landed, cause: io::Error| LandingError::Receive {
            landed: Box::new(landed.clone()),
            cause: cause.into(),
        };
        match wait(&stream, PollFlags::IN, deadline) {
            Ok(true) => {}
            Ok(false) => {
                return Err(LandingError::Silent {
                    peer,
                    landed: Box::new(landed),
                    waited: limit,
                });
            }
            Err(cause) => return Err(failed(&landed, cause)),
        }
        let arrival = match LinuxSockets.receive(stream.as_fd(), &offer, &mut control) {
            Ok(arrival) if arrival.bytes == 0 => return Ok(landed),
            Ok(arrival) => arrival,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(cause) => return Err(failed(&landed, cause)),
        };
        if let Some(gpu) = gpu
            && gpu.needs_flush().unwrap_or(true)
        {
            gpu.flush_device_writes()
                .map_err(|error| broken(&landed, error.to_string()))?;
        }
        let received = Received {
            bytes: arrival.bytes,
            iovec_bytes: offer.len(),
            control: &control[..arrival.control_bytes],
            truncated: arrival.truncated,
        };
        let mut tokens = TokenSet::new();
        for piece in received.pieces(binding) {
            let piece = piece.map_err(|error| broken(&landed, error.to_string()))?;
            let (source, at, length) = match piece {
                Piece::Device(fragment) => {
                    tokens
                        .insert(fragment.token)
                        .map_err(|error| broken(&landed, error.to_string()))?;
                    (
                        queue.pool.slice(),
                        fragment.pool_offset,
                        u64::from(fragment.length),
                    )
                }
                Piece::Linear {
                    iovec_offset,
                    length,
                } => (&offer, iovec_offset, u64::from(length)),
                Piece::Plain { length } => (&offer, 0, length),
            };
            // The parser has checked both against what they lie in.
            let (start, count) = (at as usize, length as usize);
            let bytes = &mut buffer[..count];
            source
                .slice(start..start + count)
                .and_then(|part| part.read_to(bytes))
                .map_err(|error| broken(&landed, error.to_string()))?;
            compare(&mut landed, bytes, pattern);
            match piece {
                Piece::Device(_) => {
                    landed.device += length;
                    landed.fragments += 1;
                }
                Piece::Linear { .. } => landed.linear += length,
                Piece::Plain { .. } => landed.plain += length,
            }
        }
        while let Some(batch) = tokens.batch(Dialect::Mainline) {
            let answer = LinuxSockets
                .give_back(
                    stream.as_fd(),
                    batch.level(),
                    batch.option(),
                    batch.as_bytes(),
                )
                .map_err(|cause| failed(&landed, cause))?;
            // What is left of a batch comes again with the next turn.
            match batch.answered(answer) {
                Ok(Returned::All | Returned::Part { .. }) => {}
                Err(error) => return Err(broken(&landed, error.to_string())),
            }
        }
    }
}

/// Notes the first byte that differs from the pattern, which goes on from the bytes before.
fn compare(landed: &mut Landed, bytes: &[u8], pattern: &[u8]) {
    if landed.wrong.is_some() || pattern.is_empty() {
        return;
    }
    let before = landed.bytes();
    let skip = (before % pattern.len() as u64) as usize;
    let expected = pattern.iter().cycle().skip(skip);
    let differs = bytes
        .iter()
        .zip(expected)
        .position(|(one, other)| one != other);
    landed.wrong = differs.map(|at| before + at as u64);
}

fn accept(listener: &TcpListener, deadline: Instant) -> io::Result<(TcpStream, SocketAddr)> {
    loop {
        if !wait(listener, PollFlags::IN, deadline)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match listener.accept() {
            Ok((stream, peer)) => {
                stream.set_nonblocking(true)?;
                return Ok((stream, peer));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_goes_on_over_the_pieces() {
        let mut landed = Landed::default();
        compare(&mut landed, b"abca", b"abc");
        landed.device += 4;
        compare(&mut landed, b"bcab", b"abc");
        assert_eq!(landed.wrong, None);
        landed.plain += 4;
        compare(&mut landed, b"cax", b"abc");
        assert_eq!(landed.wrong, Some(10));
        compare(&mut landed, b"y", b"abc");
        assert_eq!(landed.wrong, Some(10));
    }
}
