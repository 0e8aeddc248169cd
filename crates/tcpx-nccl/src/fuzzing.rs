//! What the fuzz targets `nccl_records`, `nccl_comm` and `nccl_lane` assert, for any bytes of a
//! peer.
//!
//! Here and not in `fuzz/`, because what they look at is private. The tests replay the corpus.

mod comm;
mod lane;
mod records;

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use nccl_net::export::Buffer;
use tcpx_lanes::sealing::Protection;
use tcpx_wire::record::Records;

pub use comm::comm;
pub use lane::lane;
pub use records::records;

use crate::held::Stream;
use crate::link::Link;

/// Bytes of the receives that are posted.
const CAPACITIES: [usize; 4] = [100, 1000, 64, 3000];
/// Before, between and behind them.
const GUARD: usize = 64;
const POISON: u8 = 0xa5;

/// Buffers with guards around them, and what should be in them.
struct Memory {
    found: Vec<u8>,
    expected: Vec<u8>,
}

impl Memory {
    fn new() -> Self {
        let all = CAPACITIES.iter().sum::<usize>() + (CAPACITIES.len() + 1) * GUARD;
        Self {
            found: vec![POISON; all],
            expected: vec![POISON; all],
        }
    }

    const fn start(number: usize) -> usize {
        let mut start = GUARD;
        let mut before = 0;
        while before < number {
            start += CAPACITIES[before] + GUARD;
            before += 1;
        }
        start
    }

    fn buffer(&mut self, number: usize) -> Buffer {
        let start = Self::start(number);
        Buffer {
            data: self.found[start..start + CAPACITIES[number]].as_mut_ptr(),
            len: CAPACITIES[number],
        }
    }

    /// The model writes, as far as there is something to write.
    fn expect(&mut self, number: usize, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= CAPACITIES[number]);
        let start = Self::start(number) + offset;
        self.expected[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn check(&self) {
        assert!(self.found == self.expected, "other bytes than expected");
    }
}

/// A connection's end for the code under test, which opens what `records` say as far as it is
/// protected, and the peer's.
fn connection(records: Records, protection: Protection) -> (Link, UnixStream) {
    let (near, far) = UnixStream::pair().expect("two descriptors");
    near.set_nonblocking(true).expect("a socket");
    far.set_nonblocking(true).expect("a socket");
    // The calls in use are those of any stream socket.
    let near = Stream::new(TcpStream::from(OwnedFd::from(near)));
    (Link::new(near, Some(records), protection), far)
}

/// Sends the stream in pieces of at most `most` bytes, each followed by `look`, then the end.
fn feed(peer: UnixStream, stream: &[u8], most: usize, mut look: impl FnMut()) -> UnixStream {
    let mut peer = peer;
    for piece in stream.chunks(most) {
        // It may be closed already; what arrived before counts.
        if peer.write_all(piece).is_err() {
            break;
        }
        look();
    }
    let _ = peer.shutdown(std::net::Shutdown::Write);
    look();
    peer
}

/// Reads a little-endian number from where it is known to be.
fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_breaks_nothing() {
        replay("nccl_records", super::records);
        replay("nccl_comm", super::comm);
        replay("nccl_lane", super::lane);
    }
}
