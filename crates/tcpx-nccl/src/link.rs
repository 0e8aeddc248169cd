//! A connection behind its handshake: what it carries goes as it is or, where the ranks encrypt, sealed in
//! [records](tcpx_wire::record).
//!
//! Places of the stream are counted in bytes that are not sealed. A record counts as sent once all of it is in the socket,
//! for only then may the peer have opened it; until then the caller offers its bytes again.

use std::error::Error;
use std::io;
use std::net::TcpStream;
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use tcpx_lanes::lock;
use tcpx_lanes::socket_calls::{self as socket, Moved, Span};
use tcpx_wire::lane_seal::{Opener, Sealer, TAG_BYTES};
use tcpx_wire::record::{LENGTH_BYTES, MOST_BYTES, Records, sealed_bytes};

use crate::held::Stream;

/// Records that one call into the socket moves: with 4 the rate on two cores is 0.8 to 0.9, with 16 and 32 it is the same.
const RECORDS: usize = 12;
const ROOM: usize = RECORDS * sealed_bytes(MOST_BYTES);

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Link {
    stream: Stream,
    sealed: Option<Box<Sealed>>,
}

/// The two directions of a connection that is sealed: the monitor sends too, and so does who reads.
#[derive(Debug)]
struct Sealed {
    outward: Mutex<Outward>,
    inward: Mutex<Inward>,
}

impl Link {
    /// Sealed, if a handshake has left keys for that.
    pub(crate) fn new(stream: Stream, records: Option<Records>) -> Self {
        let sealed = records.map(|records| {
            let (sealer, opener) = records.into_halves();
            Box::new(Sealed {
                outward: Mutex::new(Outward::new(sealer)),
                inward: Mutex::new(Inward::new(opener)),
            })
        });
        Self { stream, sealed }
    }

    /// The connection of a lane, and what seals and opens the rest of what it carries. Nothing may be half sent.
    pub(crate) fn into_lane(self) -> (Stream, Option<(Sealer, Opener)>) {
        let seals = self.sealed.map(|sealed| {
            let Sealed { outward, inward } = *sealed;
            (inner(outward).sealer, inner(inward).opener)
        });
        (self.stream, seals)
    }

    /// Sends a record of the plugin's, all of it or nothing; what the socket does not take at once goes in front of
    /// whatever follows. Only between messages.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn send_whole(&self, bytes: &[u8]) -> io::Result<Moved> {
        match &self.sealed {
            None => socket::send_bytes(&self.stream, bytes),
            Some(sealed) => lock(&sealed.outward).send_whole(&self.stream, bytes),
        }
    }

    /// Sends some of these bytes. What it did not take comes first at the next call.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn send_bytes(&self, bytes: &[u8]) -> io::Result<Moved> {
        match &self.sealed {
            None => socket::send_bytes(&self.stream, bytes),
            // SAFETY: borrowed for the call.
            Some(_) => unsafe { self.send_spans(&[Span::of(bytes)]) },
        }
    }

    /// As [`send_bytes`](Self::send_bytes), of these spans one behind the other.
    ///
    /// # Errors
    /// The connection is broken.
    ///
    /// # Safety
    /// Every span is readable memory of its length for the call.
    pub(crate) unsafe fn send_spans(&self, spans: &[Span]) -> io::Result<Moved> {
        match &self.sealed {
            // SAFETY: the caller's.
            None => unsafe { socket::send_spans(&self.stream, spans) },
            // SAFETY: the caller's.
            Some(sealed) => unsafe { lock(&sealed.outward).send(&self.stream, spans) },
        }
    }

    /// Whether bytes that were offered are on their way in part: nothing else may be offered now.
    pub(crate) fn has_begun(&self) -> bool {
        self.sealed
            .as_deref()
            .is_some_and(|sealed| lock(&sealed.outward).has_begun())
    }

    /// Receives some bytes.
    ///
    /// # Errors
    /// The connection is broken, or something between the hosts changes what they send.
    pub(crate) fn receive_bytes(&self, into: &mut [u8]) -> io::Result<Moved> {
        match &self.sealed {
            None => socket::receive_bytes(&self.stream, into),
            // SAFETY: borrowed exclusively for the call.
            Some(_) => unsafe { self.receive_spans(&[Span::of_mut(into)]) },
        }
    }

    /// As [`receive_bytes`](Self::receive_bytes), and takes nothing from the socket that lies behind a record of these
    /// bytes.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn receive_no_more(&self, into: &mut [u8]) -> io::Result<Moved> {
        match &self.sealed {
            None => socket::receive_bytes(&self.stream, into),
            Some(sealed) => {
                let most = sealed_bytes(into.len());
                let spans = [Span::of_mut(into)];
                // SAFETY: borrowed exclusively for the call.
                unsafe { lock(&sealed.inward).receive(&self.stream, &spans, most) }
            }
        }
    }

    /// As [`receive_bytes`](Self::receive_bytes), into these spans one behind the other, which are not all empty.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// Every span is writable memory of its length for the call, and nobody else refers to it.
    pub(crate) unsafe fn receive_spans(&self, spans: &[Span]) -> io::Result<Moved> {
        match &self.sealed {
            // SAFETY: the caller's.
            None => unsafe { socket::receive_spans(&self.stream, spans) },
            // SAFETY: the caller's.
            Some(sealed) => unsafe { lock(&sealed.inward).receive(&self.stream, spans, ROOM) },
        }
    }
}

/// Whether something between the hosts has changed what came: it is not what the peer sealed.
pub(crate) fn is_forged(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

fn forged(error: impl Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn inner<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl Deref for Link {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.stream
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Records on their way into the socket.
#[derive(Debug)]
struct Outward {
    sealer: Sealer,
    bytes: Vec<u8>,
    /// Of `bytes`: in the socket.
    sent: usize,
    /// Bytes that they seal of what the caller offers, and those that it was told are sent.
    plain: usize,
    taken: usize,
}

impl Outward {
    const fn new(sealer: Sealer) -> Self {
        Self {
            sealer,
            bytes: Vec::new(),
            sent: 0,
            plain: 0,
            taken: 0,
        }
    }

    const fn has_begun(&self) -> bool {
        self.taken < self.plain
    }

    /// One call into the socket; whether it has all records.
    fn write(&mut self, stream: &Stream) -> io::Result<bool> {
        if self.sent < self.bytes.len()
            && let Moved::Bytes(bytes) = socket::send_bytes(stream, &self.bytes[self.sent..])?
        {
            self.sent += bytes;
        }
        Ok(self.sent == self.bytes.len())
    }

    fn send_whole(&mut self, stream: &Stream, bytes: &[u8]) -> io::Result<Moved> {
        debug_assert!(!self.has_begun(), "within a message");
        if !self.write(stream)? {
            return Ok(Moved::WouldBlock);
        }
        // SAFETY: borrowed for the call.
        unsafe { self.seal(&[Span::of(bytes)]) };
        // Nobody offers them again.
        self.taken = self.plain;
        self.write(stream)?;
        Ok(Moved::Bytes(bytes.len()))
    }

    /// # Safety
    /// As for [`Link::send_spans`].
    unsafe fn send(&mut self, stream: &Stream, spans: &[Span]) -> io::Result<Moved> {
        if !self.has_begun() {
            if !self.write(stream)? {
                return Ok(Moved::WouldBlock);
            }
            // SAFETY: the caller's.
            unsafe { self.seal(spans) };
        }
        let done = match self.write(stream)? {
            true => self.plain,
            // All records but the last one seal as much.
            false => self.sent / sealed_bytes(MOST_BYTES) * MOST_BYTES,
        };
        let news = done - self.taken;
        self.taken = done;
        Ok(match news {
            0 => Moved::WouldBlock,
            bytes => Moved::Bytes(bytes),
        })
    }

    /// Seals as much of these bytes as there is room for, in place of the records before.
    ///
    /// # Safety
    /// As for [`Link::send_spans`].
    unsafe fn seal(&mut self, spans: &[Span]) {
        self.bytes.clear();
        (self.sent, self.plain, self.taken) = (0, 0, 0);
        let offered: usize = spans.iter().map(|span| span.len()).sum();
        let most = offered.min(RECORDS * MOST_BYTES);
        let mut spans = spans.iter().copied();
        let mut rest = Span::EMPTY;
        while self.plain < most {
            let record = (most - self.plain).min(MOST_BYTES);
            // At most `MOST_BYTES` and a tag.
            let length = (record + TAG_BYTES) as u16;
            self.bytes.extend_from_slice(&length.to_le_bytes());
            let start = self.bytes.len();
            while self.bytes.len() < start + record {
                if rest.is_empty() {
                    match spans.next() {
                        Some(span) => rest = span,
                        None => return,
                    }
                    continue;
                }
                let piece = rest.first(start + record - self.bytes.len());
                // SAFETY: not empty, and the caller vouches for it.
                let piece = unsafe { std::slice::from_raw_parts(piece.start(), piece.len()) };
                self.bytes.extend_from_slice(piece);
                rest = rest.from(piece.len());
            }
            let tag = self.sealer.seal(&mut self.bytes[start..]);
            self.bytes.extend_from_slice(&tag);
            self.plain += record;
        }
    }
}

/// Records that came out of the socket.
#[derive(Debug)]
struct Inward {
    opener: Opener,
    /// Has [`ROOM`] once it has been used.
    bytes: Vec<u8>,
    /// Of `bytes`: what was opened and not taken, and what has come behind it and its tag.
    opened: Range<usize>,
    came: Range<usize>,
    /// The last read took all that there was.
    is_drained: bool,
}

impl Inward {
    const fn new(opener: Opener) -> Self {
        Self {
            opener,
            bytes: Vec::new(),
            opened: 0..0,
            came: 0..0,
            is_drained: false,
        }
    }

    /// Asks the socket for no more than `most` sealed bytes.
    ///
    /// # Safety
    /// As for [`Link::receive_spans`].
    unsafe fn receive(
        &mut self,
        stream: &Stream,
        spans: &[Span],
        most: usize,
    ) -> io::Result<Moved> {
        let mut moved = 0;
        for span in spans {
            let mut rest = *span;
            while !rest.is_empty() {
                if self.opened.is_empty() && !self.open()? {
                    let is_drained = std::mem::take(&mut self.is_drained);
                    match moved {
                        0 if is_drained => return Ok(Moved::WouldBlock),
                        0 => {}
                        bytes => return Ok(Moved::Bytes(bytes)),
                    }
                    match self.read(stream, most)? {
                        Moved::Bytes(_) => continue,
                        nothing => return Ok(nothing),
                    }
                }
                let bytes = rest.len().min(self.opened.len());
                let from = self.bytes[self.opened.start..][..bytes].as_ptr();
                // SAFETY: the caller vouches for the span, which nobody else refers to; `from` has as many bytes.
                unsafe { from.copy_to_nonoverlapping(rest.start().cast_mut(), bytes) };
                self.opened.start += bytes;
                rest = rest.from(bytes);
                moved += bytes;
            }
        }
        Ok(Moved::Bytes(moved))
    }

    /// Opens the next record that seals anything, if it has come whole.
    fn open(&mut self) -> io::Result<bool> {
        while self.opened.is_empty() {
            let came = &mut self.bytes[self.came.clone()];
            let length = Records::length(came).map_err(forged)?;
            let Some(length) = length else {
                return Ok(false);
            };
            let Some(sealed) = came.get_mut(LENGTH_BYTES..LENGTH_BYTES + length) else {
                return Ok(false);
            };
            let opened = self.opener.open(sealed).map_err(forged)?.len();
            let start = self.came.start + LENGTH_BYTES;
            self.opened = start..start + opened;
            self.came.start = start + length;
        }
        Ok(true)
    }

    /// Reads more, behind what has come; nothing is opened then.
    fn read(&mut self, stream: &Stream, most: usize) -> io::Result<Moved> {
        self.bytes.resize(ROOM, 0);
        self.bytes.copy_within(self.came.clone(), 0);
        self.came = 0..self.came.len();
        // A record that is longer than what the caller wants must be there whole, too.
        let most = match Records::length(&self.bytes[self.came.clone()]) {
            Ok(Some(length)) => most.max(LENGTH_BYTES + length),
            _ => most,
        };
        let room = &mut self.bytes[self.came.end..most.min(ROOM)];
        let asked = room.len();
        let moved = socket::receive_bytes(stream, room)?;
        match moved {
            Moved::Bytes(bytes) => {
                self.came.end += bytes;
                self.is_drained = bytes < asked;
            }
            Moved::End if !self.came.is_empty() => {
                let why = "the connection ended within a record";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
            }
            _ => {}
        }
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;
    use tcpx_wire::lane_seal::LaneKeys;

    use super::*;

    fn link(end: UnixStream, send: u8, receive: u8) -> Link {
        end.set_nonblocking(true).unwrap();
        let keys = LaneKeys::new([send; 32], [receive; 32]);
        // The calls in use are those of any stream socket.
        let stream = Stream::new(TcpStream::from(OwnedFd::from(end)));
        Link::new(stream, Some(Records::new(keys)))
    }

    /// Both ends of a connection, and the two sockets between them.
    fn pair() -> (Link, UnixStream, UnixStream, Link) {
        let ((near, to_near), (far, to_far)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        for between in [&to_near, &to_far] {
            between.set_nonblocking(true).unwrap();
        }
        (link(near, 1, 2), to_near, to_far, link(far, 2, 1))
    }

    /// Passes on what has come, at most so many bytes of it, as far as there is room.
    fn carry(mut from: &UnixStream, mut to: &UnixStream, held: &mut Vec<u8>, most: usize) {
        let mut bytes = vec![0; most];
        if let Ok(count) = from.read(&mut bytes) {
            held.extend_from_slice(&bytes[..count]);
        }
        if let Ok(count) = to.write(held) {
            held.drain(..count);
        }
    }

    proptest! {
        #[test]
        fn bytes_arrive_in_order_however_they_are_cut(
            steps in prop::collection::vec((0u8..5, 1usize..200_000, 1usize..60_000), 1..200),
            seed: u8,
        ) {
            let (near, to_near, to_far, far) = pair();
            let text: Vec<u8> = (0..4 << 20).map(|at: usize| (at >> 8) as u8 ^ at as u8 ^ seed).collect();
            let (mut sent, mut received, mut held) = (0, Vec::<u8>::new(), Vec::new());
            let mut step = |kind: u8, most: usize, cut: usize| match kind {
                0 | 1 => {
                    let rest = &text[sent..text.len().min(sent + most)];
                    let (head, rest) = rest.split_at(rest.len().min(cut));
                    // SAFETY: borrowed for the call.
                    let moved = unsafe { near.send_spans(&[Span::of(head), Span::EMPTY, Span::of(rest)]) };
                    if let Moved::Bytes(bytes) = moved.unwrap() {
                        sent += bytes;
                    }
                    prop_assert!(!near.has_begun() || sent < text.len());
                    Ok(())
                }
                2 => {
                    carry(&to_near, &to_far, &mut held, cut);
                    Ok(())
                }
                _ => {
                    let (mut one, mut other) = (vec![0; cut], vec![0; most]);
                    let spans = [Span::of_mut(&mut one), Span::of_mut(&mut other)];
                    // SAFETY: borrowed exclusively for the call.
                    if let Moved::Bytes(bytes) = unsafe { far.receive_spans(&spans) }.unwrap() {
                        received.extend(one.iter().chain(&other).take(bytes));
                    }
                    // What may have been opened counts as sent.
                    prop_assert!(received.len() <= sent);
                    Ok(())
                }
            };
            for (kind, most, cut) in steps {
                step(kind, most, cut)?;
            }
            let mut rounds = 0;
            while rounds < 64 {
                rounds += 1;
                step(2, 1, 1 << 20)?;
                step(3, 1 << 20, 1)?;
            }
            prop_assert!(received == text[..received.len()], "other bytes arrived");
            prop_assert_eq!(received.len(), sent);
        }
    }

    #[test]
    fn a_changed_byte_ends_what_is_received() {
        let (near, mut to_near, mut to_far, far) = pair();
        let text = *b"a message that nobody on the path reads";
        assert!(matches!(near.send_bytes(&text), Ok(Moved::Bytes(39))));
        let mut wire = [0; sealed_bytes(39)];
        to_near.read_exact(&mut wire).unwrap();
        let is_seen = |part: &[u8]| wire.windows(part.len()).any(|window| window == part);
        assert!(!is_seen(&text[..8]) && !is_seen(&text[31..]));
        wire[20] ^= 4;
        to_far.write_all(&wire).unwrap();
        let mut into = [7; 39];
        let error = far.receive_bytes(&mut into).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        assert_eq!(into, [7; 39]);
    }

    #[test]
    fn an_end_within_a_record_is_no_end_in_order() {
        let (near, mut to_near, mut to_far, far) = pair();
        assert!(matches!(near.send_bytes(&[1; 100]), Ok(Moved::Bytes(100))));
        let mut wire = [0; sealed_bytes(100)];
        to_near.read_exact(&mut wire).unwrap();
        to_far.write_all(&wire[..60]).unwrap();
        drop(to_far);
        let mut into = [0; 100];
        assert!(matches!(
            far.receive_bytes(&mut into),
            Ok(Moved::WouldBlock)
        ));
        let error = far.receive_bytes(&mut into).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
    }

    #[test]
    fn a_lane_s_hello_takes_nothing_of_what_follows_it() {
        let (near, to_near, to_far, far) = pair();
        assert!(matches!(near.send_whole(&[1; 32]), Ok(Moved::Bytes(32))));
        assert!(matches!(near.send_bytes(&[2; 500]), Ok(Moved::Bytes(500))));
        carry(&to_near, &to_far, &mut Vec::new(), 1 << 10);
        let mut hello = [0; 32];
        assert!(matches!(
            far.receive_no_more(&mut hello),
            Ok(Moved::Bytes(32))
        ));
        assert_eq!(hello, [1; 32]);
        let (stream, seals) = far.into_lane();
        let (_, mut opener) = seals.unwrap();
        let mut wire = vec![0; sealed_bytes(500)];
        (&*stream).read_exact(&mut wire).unwrap();
        assert_eq!(opener.open(&mut wire[LENGTH_BYTES..]).unwrap(), [2; 500]);
    }
}
