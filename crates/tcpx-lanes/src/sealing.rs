//! What protects the chunks of a lane: sealed headers, and sealed payload where both sides agreed
//! on encryption.
//!
//! Payload is sealed from its source into memory of the lane, and opened in memory of the lane:
//! pages that are lent are never sealed ones, and bytes that the peer did not seal never reach a
//! destination.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use tcpx_memory::RegionSlice;
use tcpx_wire::chunk_header::ChunkHeader;
use tcpx_wire::lane_seal::{
    Forged, HEADER_BYTES, LaneKeys, Opener, RECORD_BYTES, Sealer, TAG_BYTES, sealed_payload_bytes,
};

use crate::socket_calls::{self as calls, Moved};

/// Records that one call into the socket moves: they and their source stay in the core's own cache.
const RECORDS: usize = 2;
const ROOM: usize = RECORDS * (RECORD_BYTES + TAG_BYTES);

/// How much of what a lane carries is sealed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protection {
    /// Nothing: the peers share no key.
    #[default]
    None,
    /// Headers; payload is as it is.
    Headers,
    /// Headers and payload.
    All,
}

impl Protection {
    /// Both directions of a lane whose handshake left these keys.
    pub fn start(self, keys: LaneKeys) -> (SendSeal, ReceiveSeal) {
        let (sealer, opener) = keys.start();
        (self.seal(sealer), self.open(opener))
    }

    /// What a lane sends.
    pub fn seal(self, sealer: Sealer) -> SendSeal {
        match self {
            Self::None => SendSeal::Plain,
            Self::Headers => SendSeal::Headers(sealer),
            Self::All => SendSeal::All(sealer, Box::default()),
        }
    }

    /// What a lane receives.
    pub fn open(self, opener: Opener) -> ReceiveSeal {
        match self {
            Self::None => ReceiveSeal::Plain,
            Self::Headers => ReceiveSeal::Headers(opener),
            Self::All => ReceiveSeal::All(opener, Box::default()),
        }
    }
}

/// Payload that is sealed from where it lies.
pub trait Payload {
    /// How many bytes it has.
    fn bytes(&self) -> usize;

    /// Copies a part of it, which is as long as `to`.
    ///
    /// # Errors
    /// It is not readable.
    fn copy(&self, part: Range<usize>, to: &mut [u8]) -> io::Result<()>;
}

impl Payload for RegionSlice {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn copy(&self, part: Range<usize>, to: &mut [u8]) -> io::Result<()> {
        let part = self.slice(part).map_err(io::Error::other)?;
        part.read_to(to).map_err(io::Error::other)
    }
}

impl Payload for [u8] {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn copy(&self, part: Range<usize>, to: &mut [u8]) -> io::Result<()> {
        to.copy_from_slice(&self[part]);
        Ok(())
    }
}

/// What stands in front of a chunk's payload: its header, as it goes out.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    bytes: [u8; HEADER_BYTES],
    len: usize,
}

impl Head {
    /// Its bytes behind the first `done`.
    pub fn rest(&self, done: usize) -> &[u8] {
        self.bytes[..self.len].get(done..).unwrap_or_default()
    }

    /// How many bytes it has.
    #[expect(clippy::len_without_is_empty, reason = "it always has some")]
    pub const fn len(&self) -> usize {
        self.len
    }
}

/// Seals what a lane sends.
#[derive(Debug)]
pub enum SendSeal {
    /// Nothing of it.
    Plain,
    /// Headers.
    Headers(Sealer),
    /// Headers and payload.
    All(Sealer, Box<SendRecords>),
}

/// Records of a chunk that are on their way into the socket.
#[derive(Debug, Default)]
pub struct SendRecords {
    /// Has [`ROOM`] once it has been used.
    bytes: Vec<u8>,
    /// Of `bytes`: in the socket.
    sent: usize,
    /// Of `bytes`: sealed.
    filled: usize,
    /// Bytes of the chunk's payload that were sealed.
    sealed: usize,
}

impl SendSeal {
    /// Begins a chunk: nothing else may be sent before it is, and it begins once.
    pub fn begin(&mut self, header: &[u8; ChunkHeader::BYTES]) -> Head {
        let sealer = match self {
            Self::Plain => {
                let mut bytes = [0; HEADER_BYTES];
                bytes[..ChunkHeader::BYTES].copy_from_slice(header);
                let len = ChunkHeader::BYTES;
                return Head { bytes, len };
            }
            Self::Headers(sealer) => sealer,
            Self::All(sealer, records) => {
                (records.sent, records.filled, records.sealed) = (0, 0, 0);
                sealer
            }
        };
        Head {
            bytes: sealer.seal_header(header),
            len: HEADER_BYTES,
        }
    }

    /// Whether payload is sealed.
    pub const fn seals_payload(&self) -> bool {
        matches!(self, Self::All(..))
    }

    /// Bytes that a chunk with so many bytes of payload takes in the stream.
    pub fn wire_bytes(&self, payload: usize) -> usize {
        match self {
            Self::Plain => ChunkHeader::BYTES + payload,
            Self::Headers(_) => HEADER_BYTES + payload,
            Self::All(..) => HEADER_BYTES + sealed_payload_bytes(payload),
        }
    }

    /// Sends `head`, what is left of it, and then more of the payload, sealed. `None` where payload
    /// goes as it is.
    ///
    /// # Errors
    /// The connection is broken, or the payload is not readable.
    pub fn send(
        &mut self,
        socket: impl AsFd,
        head: &[u8],
        payload: &(impl Payload + ?Sized),
    ) -> Option<io::Result<Moved>> {
        match self {
            Self::Plain | Self::Headers(_) => None,
            Self::All(sealer, records) => Some(records.send(sealer, socket, head, payload)),
        }
    }
}

impl SendRecords {
    fn send(
        &mut self,
        sealer: &mut Sealer,
        socket: impl AsFd,
        head: &[u8],
        payload: &(impl Payload + ?Sized),
    ) -> io::Result<Moved> {
        if self.sent == self.filled {
            self.fill(sealer, payload)?;
        }
        let moved = calls::send_both(socket, head, &self.bytes[self.sent..self.filled])?;
        if let Moved::Bytes(bytes) = moved {
            self.sent += bytes.saturating_sub(head.len());
        }
        Ok(moved)
    }

    /// Seals as much of the rest as there is room for.
    fn fill(&mut self, sealer: &mut Sealer, payload: &(impl Payload + ?Sized)) -> io::Result<()> {
        self.bytes.resize(ROOM, 0);
        (self.sent, self.filled) = (0, 0);
        for _ in 0..RECORDS {
            let end = payload.bytes().min(self.sealed + RECORD_BYTES);
            let part = self.sealed..end;
            if part.is_empty() {
                break;
            }
            let bytes = part.len();
            let (text, behind) = self.bytes[self.filled..].split_at_mut(bytes);
            payload.copy(part, text)?;
            behind[..TAG_BYTES].copy_from_slice(&sealer.seal(text));
            self.filled += bytes + TAG_BYTES;
            self.sealed = end;
        }
        Ok(())
    }
}

/// Opens what a lane receives.
#[derive(Debug)]
pub enum ReceiveSeal {
    /// Nothing is sealed.
    Plain,
    /// Headers are.
    Headers(Opener),
    /// Headers and payload are.
    All(Opener, Box<ReceiveRecords>),
}

/// Records of a chunk that came out of the socket.
#[derive(Debug, Default)]
pub struct ReceiveRecords {
    /// Has [`ROOM`] once it has been used.
    bytes: Vec<u8>,
    /// Of `bytes`: where the next record begins, and where ends what has come.
    start: usize,
    end: usize,
    /// Bytes at `start` that were opened and not [taken](ReceiveSeal::take).
    opened: usize,
}

/// What comes next of sealed payload.
#[derive(Debug)]
pub enum NextRecord<'a> {
    /// What the peer sealed; it is the same until it is [taken](ReceiveSeal::take).
    Opened(&'a [u8]),
    /// So many bytes came from the socket, and `behind` of them are behind the payload.
    Came {
        /// Bytes.
        bytes: usize,
        /// Bytes of them.
        behind: usize,
    },
    /// Nothing has come.
    WouldBlock,
    /// The stream has ended.
    End,
}

impl ReceiveSeal {
    /// Bytes of a header in the stream.
    pub const fn header_bytes(&self) -> usize {
        match self {
            Self::Plain => ChunkHeader::BYTES,
            Self::Headers(_) | Self::All(..) => HEADER_BYTES,
        }
    }

    /// Whether payload is sealed.
    pub const fn seals_payload(&self) -> bool {
        matches!(self, Self::All(..))
    }

    /// Bytes that a chunk with so many bytes of payload takes in the stream.
    pub const fn wire_bytes(&self, payload: usize) -> usize {
        match self {
            Self::Plain | Self::Headers(_) => self.header_bytes() + payload,
            Self::All(..) => HEADER_BYTES + sealed_payload_bytes(payload),
        }
    }

    /// The header's bytes, once all have come.
    ///
    /// # Errors
    /// The peer did not seal it.
    pub fn open_header(
        &mut self,
        record: &mut [u8; HEADER_BYTES],
    ) -> Result<[u8; ChunkHeader::BYTES], Forged> {
        match self {
            Self::Plain => Ok(std::array::from_fn(|at| record[at])),
            Self::Headers(opener) | Self::All(opener, _) => opener.open_header(record),
        }
    }

    /// What comes next where `left` bytes of a chunk's payload are not taken yet; what follows the
    /// payload goes into `behind`. Only for [sealed payload](Self::seals_payload).
    ///
    /// # Errors
    /// The stream is broken, or the peer did not seal what came.
    pub fn next(
        &mut self,
        socket: impl AsFd,
        left: usize,
        behind: &mut [u8],
    ) -> io::Result<NextRecord<'_>> {
        match self {
            Self::All(opener, records) => records.next(opener, socket, left, behind),
            Self::Plain | Self::Headers(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// What was opened has been used.
    pub fn take(&mut self) {
        if let Self::All(_, records) = self {
            records.start += records.opened + TAG_BYTES;
            records.opened = 0;
        }
    }

    /// Bytes that are still to come from the socket where `left` bytes of a chunk's payload are not
    /// taken yet.
    pub fn wire_left(&self, left: usize) -> usize {
        match self {
            Self::Plain | Self::Headers(_) => left,
            Self::All(_, records) => {
                sealed_payload_bytes(left).saturating_sub(records.end - records.start)
            }
        }
    }
}

impl ReceiveRecords {
    fn next(
        &mut self,
        opener: &mut Opener,
        socket: impl AsFd,
        left: usize,
        behind: &mut [u8],
    ) -> io::Result<NextRecord<'_>> {
        if self.opened == 0 {
            let record = left.min(RECORD_BYTES) + TAG_BYTES;
            if self.end - self.start < record {
                return self.read(socket, left, behind);
            }
            let sealed = &mut self.bytes[self.start..self.start + record];
            let opened = opener
                .open(sealed)
                .map_err(|forged| io::Error::new(io::ErrorKind::InvalidData, forged))?;
            self.opened = opened.len();
        }
        let opened = &self.bytes[self.start..self.start + self.opened];
        Ok(NextRecord::Opened(opened))
    }

    fn read(
        &mut self,
        socket: impl AsFd,
        left: usize,
        behind: &mut [u8],
    ) -> io::Result<NextRecord<'static>> {
        self.bytes.resize(ROOM, 0);
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let to_come = sealed_payload_bytes(left) - self.end;
        let wanted = to_come.min(ROOM - self.end);
        let behind = match wanted == to_come {
            true => behind,
            false => &mut [],
        };
        let aside = &mut self.bytes[self.end..self.end + wanted];
        Ok(match calls::receive_aside(socket, aside, behind)? {
            Moved::WouldBlock => NextRecord::WouldBlock,
            Moved::End => NextRecord::End,
            Moved::Bytes(bytes) => {
                self.end += bytes.min(wanted);
                NextRecord::Came {
                    bytes,
                    behind: bytes.saturating_sub(wanted),
                }
            }
        })
    }
}
