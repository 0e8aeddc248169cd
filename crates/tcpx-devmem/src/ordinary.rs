//! The channel's ordinary lane: chunks in memory of the host, once the payload lane has ended.
//!
//! It is silent until then. The side that gives the payload lane up sends a header of no bytes at
//! once, by which the other one hears of it; then each side sends what the other has not placed,
//! each chunk behind its header.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{RecvFlags, SendFlags};

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 12;
/// Most bytes of a chunk that came before that one call takes.
const DISCARD: usize = 64 << 10;

/// What precedes a chunk: its sequence and length, little endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    /// 0: no chunk follows, only the payload lane has ended.
    pub(super) length: u32,
}

impl Header {
    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: [u8; HEADER_BYTES]) -> Self {
        let [s0, s1, s2, s3, s4, s5, s6, s7, length @ ..] = bytes;
        Self {
            sequence: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            length: u32::from_le_bytes(length),
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct OrdinaryLane {
    socket: OwnedFd,
    /// What has come of the next header.
    head: [u8; HEADER_BYTES],
    filled: usize,
    /// Bytes of the current chunk that are here already, to be read first.
    pub(super) skip: u64,
    /// Bytes of it that are wanted.
    pub(super) take: u64,
}

impl OrdinaryLane {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            head: [0; HEADER_BYTES],
            filled: 0,
            skip: 0,
            take: 0,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads a header to its end, and gives it again until [`Self::begin`].
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::UnexpectedEof`] when the peer has closed.
    pub(super) fn header(&mut self) -> io::Result<Header> {
        while self.filled < HEADER_BYTES {
            self.filled += receive(&self.socket, &mut self.head[self.filled..])?;
        }
        Ok(Header::decode(self.head))
    }

    /// The chunk of the header follows: so many bytes to skip, and then so many to take.
    pub(super) fn begin(&mut self, skip: u64, take: u64) {
        (self.filled, self.skip, self.take) = (0, skip, take);
    }

    /// Whether what comes next must wait for a receive, or for room.
    pub(super) fn waits_for_room(&self) -> bool {
        self.skip == 0 && (self.take > 0 || self.filled == HEADER_BYTES)
    }

    /// Drops what it can of the bytes to skip; how many.
    ///
    /// # Errors
    /// As for [`Self::header`].
    pub(super) fn discard(&mut self) -> io::Result<u64> {
        let mut rest = [0; DISCARD];
        let most = usize::try_from(self.skip).map_or(DISCARD, |skip| skip.min(DISCARD));
        let bytes = receive(&self.socket, &mut rest[..most])? as u64;
        self.skip -= bytes;
        Ok(bytes)
    }
}

/// Sends a part of a header; how many bytes of it the socket took.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = rustix::io::retry_on_intr(|| rustix::net::send(socket, bytes, flags));
    Ok(sent?)
}

fn receive(socket: &OwnedFd, room: &mut [u8]) -> io::Result<usize> {
    let received =
        rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut *room, RecvFlags::DONTWAIT));
    match received {
        Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok((bytes, _)) => Ok(bytes),
        Err(error) => Err(error.into()),
    }
}
