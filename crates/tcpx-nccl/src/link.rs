//! A connection behind its handshake: what it carries goes as it is or, where the ranks have a key,
//! sealed in [records](tcpx_wire::record). Unless they encrypt, long payload goes bare behind the
//! record of its head, which says how long it is.
//!
//! Places of the stream are counted in the caller's bytes. A record counts as sent once all of it
//! is in the socket, for only then may the peer have opened it; until then the caller offers its
//! bytes again.

use std::error::Error;
use std::io;
use std::net::TcpStream;
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use tcpx_lanes::lock;
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::socket_calls::{self as socket, Moved, Span};
use tcpx_wire::lane_seal::{Opener, Sealer};
use tcpx_wire::record::{
    LENGTH_BYTES, MOST_BYTES, RecordError, Records, record_head, sealed_bytes,
};

use crate::held::Stream;

/// Records that one call into the socket moves: with 4 the rate on two cores is 0.8 to 0.9, with 16
/// and 32 it is the same.
const RECORDS: usize = 12;
const ROOM: usize = RECORDS * sealed_bytes(MOST_BYTES);
/// A record seals in front how many bytes follow it bare.
const BARE_BYTES: usize = 4;
/// Most bytes of the caller's in one record.
const TEXT_BYTES: usize = MOST_BYTES - BARE_BYTES;
/// Payload of so many bytes and more goes bare where ranks do not encrypt: to seal 2 KB makes a
/// round trip a sixth longer.
const LEAST_BARE_BYTES: usize = 1 << 10;
/// What is asked of the socket where payload comes bare: a head and a message of 4 KiB. More would
/// be copied twice.
const AHEAD: usize = (4 << 10) + 128;

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Link {
    stream: Stream,
    sealed: Option<Box<Sealed>>,
}

/// The two directions of a connection that is sealed: the monitor sends too, and so does who reads.
#[derive(Debug)]
struct Sealed {
    protection: Protection,
    outward: Mutex<Outward>,
    inward: Mutex<Inward>,
}

impl Link {
    /// Protected so far with what a handshake has left for that.
    pub(crate) fn new(stream: Stream, records: Option<Records>, protection: Protection) -> Self {
        let records = records.filter(|_| protection != Protection::None);
        let sealed = records.map(|records| {
            let (sealer, opener) = records.into_halves();
            Box::new(Sealed {
                protection,
                outward: Mutex::new(Outward::new(sealer, protection)),
                inward: Mutex::new(Inward::new(opener, protection)),
            })
        });
        Self { stream, sealed }
    }

    /// The connection of a lane, and what seals and opens the rest of what it carries. Nothing may
    /// be half sent.
    pub(crate) fn into_lane(self) -> (Stream, Option<(Protection, Sealer, Opener)>) {
        let seals = self.sealed.map(|sealed| {
            let Sealed {
                protection,
                outward,
                inward,
            } = *sealed;
            (protection, inner(outward).sealer, inner(inward).opener)
        });
        (self.stream, seals)
    }

    /// Sends a record of the plugin's, all of it or nothing; what the socket does not take at once
    /// goes in front of whatever follows. Only between messages.
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
        // SAFETY: no payload.
        unsafe { self.send_message(bytes, Span::EMPTY) }
    }

    /// As [`send_bytes`](Self::send_bytes), of a head and the payload behind it.
    ///
    /// # Errors
    /// The connection is broken.
    ///
    /// # Safety
    /// The payload is readable memory of its length for the call.
    pub(crate) unsafe fn send_message(&self, head: &[u8], payload: Span) -> io::Result<Moved> {
        match &self.sealed {
            // SAFETY: the caller's; the head is borrowed.
            None => unsafe { socket::send_spans(&self.stream, &[Span::of(head), payload]) },
            // SAFETY: the caller's.
            Some(sealed) => unsafe { lock(&sealed.outward).send(&self.stream, head, payload) },
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

    /// As [`receive_bytes`](Self::receive_bytes), and takes nothing from the socket that lies
    /// behind a record of these bytes.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn receive_no_more(&self, into: &mut [u8]) -> io::Result<Moved> {
        match &self.sealed {
            None => socket::receive_bytes(&self.stream, into),
            Some(sealed) => {
                let most = sealed_bytes(BARE_BYTES + into.len());
                let spans = [Span::of_mut(into)];
                // SAFETY: borrowed exclusively for the call.
                unsafe { lock(&sealed.inward).receive(&self.stream, &spans, most) }
            }
        }
    }

    /// As [`receive_bytes`](Self::receive_bytes), into these spans one behind the other, which are
    /// not all empty.
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
    /// Payload of so many bytes and more goes bare.
    bare_from: usize,
    bytes: Vec<u8>,
    /// Of `bytes`: in the socket.
    sent: usize,
    /// Bytes that they seal of what the caller offers, and those that it was told are sent.
    plain: usize,
    taken: usize,
    /// Bytes behind those that go bare, and that the socket has not taken.
    bare: usize,
}

impl Outward {
    const fn new(sealer: Sealer, protection: Protection) -> Self {
        Self {
            sealer,
            bare_from: match protection {
                Protection::All => usize::MAX,
                _ => LEAST_BARE_BYTES,
            },
            bytes: Vec::new(),
            sent: 0,
            plain: 0,
            taken: 0,
            bare: 0,
        }
    }

    const fn has_begun(&self) -> bool {
        self.taken < self.plain || self.bare > 0
    }

    /// One call into the socket, with what goes bare behind the records; whether it has all
    /// records.
    ///
    /// # Safety
    /// As for [`Link::send_message`].
    unsafe fn write(&mut self, stream: &Stream, payload: Span) -> io::Result<bool> {
        let (records, bare) = (&self.bytes[self.sent..], payload.first(self.bare));
        if records.is_empty() && bare.is_empty() {
            return Ok(true);
        }
        // SAFETY: records of ours, and the caller's.
        let moved = unsafe { socket::send_spans(stream, &[Span::of(records), bare]) }?;
        if let Moved::Bytes(bytes) = moved {
            let sealed = bytes.min(records.len());
            self.sent += sealed;
            self.bare -= bytes - sealed;
        }
        Ok(self.sent == self.bytes.len())
    }

    fn send_whole(&mut self, stream: &Stream, bytes: &[u8]) -> io::Result<Moved> {
        debug_assert!(!self.has_begun(), "within a message");
        // SAFETY: no payload.
        unsafe {
            if !self.write(stream, Span::EMPTY)? {
                return Ok(Moved::WouldBlock);
            }
            self.seal(bytes, Span::EMPTY);
            // Nobody offers them again.
            self.taken = self.plain;
            self.write(stream, Span::EMPTY)?;
        }
        Ok(Moved::Bytes(bytes.len()))
    }

    /// # Safety
    /// As for [`Link::send_message`].
    unsafe fn send(&mut self, stream: &Stream, head: &[u8], payload: Span) -> io::Result<Moved> {
        // SAFETY: the caller's.
        unsafe {
            if !self.has_begun() {
                if !self.write(stream, Span::EMPTY)? {
                    return Ok(Moved::WouldBlock);
                }
                self.seal(head, payload);
            }
            let bare = self.bare;
            let done = match self.write(stream, payload)? {
                true => self.plain,
                // All records but the last one seal as much.
                false => self.sent / sealed_bytes(MOST_BYTES) * TEXT_BYTES,
            };
            let news = done - self.taken + bare - self.bare;
            self.taken = done;
            Ok(match news {
                0 => Moved::WouldBlock,
                bytes => Moved::Bytes(bytes),
            })
        }
    }

    /// Seals as much of these bytes as there is room for, in place of the records before.
    ///
    /// # Safety
    /// As for [`Link::send_message`].
    unsafe fn seal(&mut self, head: &[u8], payload: Span) {
        self.bytes.clear();
        (self.sent, self.plain, self.taken) = (0, 0, 0);
        let (bare, payload) = match payload.len() >= self.bare_from {
            // A head is far shorter than the records here; what is longer than 4 GiB is offered
            // again.
            true => (payload.len().try_into().unwrap_or(u32::MAX), Span::EMPTY),
            false => (0, payload),
        };
        self.bare = bare as usize;
        let offered = head.len() + payload.len();
        for _ in 0..RECORDS {
            let text = (offered - self.plain).min(TEXT_BYTES);
            let (from, to) = (self.plain, self.plain + text);
            self.bytes
                .extend_from_slice(&record_head(BARE_BYTES + text));
            let start = self.bytes.len();
            let behind = if to == offered { bare } else { 0 };
            self.bytes.extend_from_slice(&behind.to_le_bytes());
            self.bytes
                .extend_from_slice(&head[from.min(head.len())..to.min(head.len())]);
            let payload = payload
                .first(to.saturating_sub(head.len()))
                .from(from.saturating_sub(head.len()));
            if !payload.is_empty() {
                // SAFETY: not empty, and the caller vouches for it.
                let bytes = unsafe { std::slice::from_raw_parts(payload.start(), payload.len()) };
                self.bytes.extend_from_slice(bytes);
            }
            let tag = self.sealer.seal(&mut self.bytes[start..]);
            self.bytes.extend_from_slice(&tag);
            self.plain = to;
            if to == offered {
                break;
            }
        }
    }
}

/// Records that came out of the socket.
#[derive(Debug)]
struct Inward {
    opener: Opener,
    /// Most that is asked of the socket. Where payload comes bare, that is less.
    most: usize,
    /// Has room for that, and for any record, once it has been used.
    bytes: Vec<u8>,
    /// Of `bytes`: what was opened, or came bare, and was not taken, and what has come behind it
    /// and its tag.
    opened: Range<usize>,
    came: Range<usize>,
    /// Bytes that come bare in front of the next record.
    bare: usize,
    /// The last read took all that there was.
    is_drained: bool,
}

impl Inward {
    const fn new(opener: Opener, protection: Protection) -> Self {
        Self {
            opener,
            most: match protection {
                Protection::All => ROOM,
                _ => AHEAD,
            },
            bytes: Vec::new(),
            opened: 0..0,
            came: 0..0,
            bare: 0,
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
                    // SAFETY: the caller's.
                    match unsafe { self.read(stream, rest, most) }? {
                        Moved::Bytes(0) => continue,
                        moved => return Ok(moved),
                    }
                }
                let bytes = rest.len().min(self.opened.len());
                let from = self.bytes[self.opened.start..][..bytes].as_ptr();
                // SAFETY: the caller vouches for the span, which nobody else refers to; `from` has
                // as many bytes.
                unsafe { from.copy_to_nonoverlapping(rest.start().cast_mut(), bytes) };
                self.opened.start += bytes;
                rest = rest.from(bytes);
                moved += bytes;
            }
        }
        Ok(Moved::Bytes(moved))
    }

    /// Opens the next record that seals anything, if it has come whole, or takes what has come
    /// bare.
    fn open(&mut self) -> io::Result<bool> {
        while self.opened.is_empty() {
            let (start, came) = (self.came.start, &mut self.bytes[self.came.clone()]);
            if self.bare > 0 {
                let bytes = self.bare.min(came.len());
                self.opened = start..start + bytes;
                self.came.start += bytes;
                self.bare -= bytes;
                return Ok(bytes > 0);
            }
            let length = Records::length(came).map_err(forged)?;
            let Some(length) = length else {
                return Ok(false);
            };
            let Some(sealed) = came.get_mut(LENGTH_BYTES..LENGTH_BYTES + length) else {
                return Ok(false);
            };
            let opened = self.opener.open(sealed).map_err(forged)?;
            let arrived = opened.len();
            let bare = opened.first_chunk().copied().map(u32::from_le_bytes);
            self.bare = match bare {
                Some(bare) if bare == 0 || self.most < ROOM => bare as usize,
                _ => return Err(forged(RecordError::Length { arrived })),
            };
            let start = start + LENGTH_BYTES;
            self.opened = start + BARE_BYTES..start + arrived;
            self.came.start = start + length;
        }
        Ok(true)
    }

    /// Reads more, behind what has come; nothing is opened then. What comes bare goes to where it
    /// is wanted; gives how much that is.
    ///
    /// # Safety
    /// As for [`Link::receive_spans`].
    unsafe fn read(&mut self, stream: &Stream, wanted: Span, most: usize) -> io::Result<Moved> {
        let room = self.most.max(sealed_bytes(MOST_BYTES));
        self.bytes.resize(room, 0);
        self.bytes.copy_within(self.came.clone(), 0);
        self.came = 0..self.came.len();
        let most = most.min(self.most);
        // A record that is longer than what the caller wants must be there whole, too.
        let most = match Records::length(&self.bytes[self.came.clone()]) {
            Ok(Some(length)) => most.max(LENGTH_BYTES + length),
            _ => most,
        };
        let bare = wanted.first(self.bare);
        let aside = match bare.len() == self.bare {
            true => &mut self.bytes[self.came.end..most],
            false => &mut [],
        };
        let asked = bare.len() + aside.len();
        let moved = match bare.is_empty() {
            true => socket::receive_bytes(stream, aside)?,
            // SAFETY: the caller's, and a buffer of ours.
            false => unsafe { socket::receive_spans(stream, &[bare, Span::of_mut(aside)]) }?,
        };
        Ok(match moved {
            Moved::Bytes(bytes) => {
                let placed = bytes.min(bare.len());
                self.bare -= placed;
                self.came.end += bytes - placed;
                self.is_drained = bytes < asked;
                Moved::Bytes(placed)
            }
            Moved::End if self.bare > 0 || !self.came.is_empty() => {
                let why = "the connection ended within a record, or the payload behind one";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
            }
            nothing => nothing,
        })
    }
}

#[cfg(any(test, fuzzing))]
impl Link {
    /// A connection over TCP as after a handshake that left nothing to seal, and its other end.
    pub(crate) fn bare() -> (Self, TcpStream) {
        let (near, far) = tcp_pair();
        (Self::new(near, None, Protection::None), far)
    }
}

/// Both ends of a TCP connection, this one prepared as a comm's.
#[cfg(any(test, fuzzing))]
pub(crate) fn tcp_pair() -> (Stream, TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it is bound");
    let near = TcpStream::connect(address).expect("it listens");
    tcpx_lanes::socket::prepare_accepted(&near).expect("a socket");
    let (far, _) = listener.accept().expect("it was connected");
    (Stream::new(near), far)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;
    use tcpx_wire::lane_seal::LaneKeys;

    use super::*;

    fn link(end: UnixStream, (send, receive): (u8, u8), protection: Protection) -> Link {
        end.set_nonblocking(true).unwrap();
        let keys = LaneKeys::new([send; 32], [receive; 32]);
        // The calls in use are those of any stream socket.
        let stream = Stream::new(TcpStream::from(OwnedFd::from(end)));
        Link::new(stream, Some(Records::new(keys)), protection)
    }

    /// Both ends of a connection, and the two sockets between them.
    fn pair(protection: Protection) -> (Link, UnixStream, UnixStream, Link) {
        let ((near, to_near), (far, to_far)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        for between in [&to_near, &to_far] {
            between.set_nonblocking(true).unwrap();
        }
        let [near, far] =
            [(near, (1, 2)), (far, (2, 1))].map(|(end, keys)| link(end, keys, protection));
        (near, to_near, to_far, far)
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
            encrypts: bool,
        ) {
            let protection = if encrypts { Protection::All } else { Protection::Headers };
            let (near, to_near, to_far, far) = pair(protection);
            let text: Vec<u8> = (0..4 << 20).map(|at: usize| (at >> 8) as u8 ^ at as u8 ^ seed).collect();
            let (mut sent, mut received, mut held) = (0, Vec::<u8>::new(), Vec::new());
            let (mut payload, mut end) = (0, 0);
            let mut step = |kind: u8, most: usize, cut: usize| match kind {
                0 | 1 => {
                    if !near.has_begun() {
                        end = text.len().min(sent + most);
                        payload = end.min(sent + cut);
                    }
                    let (head, rest) = text[sent..end].split_at(payload.saturating_sub(sent));
                    // SAFETY: borrowed for the call.
                    let moved = unsafe { near.send_message(head, Span::of(rest)) };
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
                step(3, 1, 1 << 20)?;
            }
            prop_assert!(received == text[..received.len()], "other bytes arrived");
            prop_assert_eq!(received.len(), sent);
        }
    }

    #[test]
    fn a_changed_byte_ends_what_is_received() {
        for protection in [Protection::Headers, Protection::All] {
            let (near, mut to_near, mut to_far, far) = pair(protection);
            let text = *b"a message that nobody on the path reads";
            assert!(matches!(near.send_bytes(&text), Ok(Moved::Bytes(39))));
            let mut wire = [0; sealed_bytes(BARE_BYTES + 39)];
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
    }

    /// Sends a head of 24 bytes and payload; what went over the wire, and what the receiver makes
    /// of it if `change` had it.
    fn through(
        protection: Protection,
        payload: &[u8],
        change: impl FnOnce(&mut [u8]),
    ) -> (Vec<u8>, io::Result<[Vec<u8>; 2]>) {
        let (near, mut to_near, mut to_far, far) = pair(protection);
        // SAFETY: borrowed for the call.
        let sent = unsafe { near.send_message(&[9; 24], Span::of(payload)) };
        let whole = 24 + payload.len();
        assert!(matches!(sent, Ok(Moved::Bytes(bytes)) if bytes == whole));
        drop(near);
        let mut wire = Vec::new();
        to_near.set_nonblocking(false).unwrap();
        to_near.read_to_end(&mut wire).unwrap();
        let as_sent = wire.clone();
        change(&mut wire);
        to_far.write_all(&wire).unwrap();
        let mut got = Vec::new();
        while got.len() < whole {
            let mut into = vec![0; whole - got.len()];
            match far.receive_bytes(&mut into) {
                Ok(Moved::Bytes(bytes)) => got.extend_from_slice(&into[..bytes]),
                Ok(_) => {}
                Err(error) => return (as_sent, Err(error)),
            }
        }
        let payload = got.split_off(24);
        (as_sent, Ok([got, payload]))
    }

    #[test]
    fn only_long_payload_of_who_does_not_encrypt_goes_bare() {
        let bytes: Vec<u8> = (0..40_000_usize).map(|at| ((at * 7) >> 3) as u8).collect();
        for (protection, len, is_bare) in [
            (Protection::Headers, LEAST_BARE_BYTES - 1, false),
            (Protection::Headers, LEAST_BARE_BYTES, true),
            (Protection::Headers, 40_000, true),
            (Protection::All, 40_000, false),
        ] {
            let payload = &bytes[..len];
            let (wire, got) = through(protection, payload, |_| {});
            assert!(got.unwrap() == [vec![9; 24], payload.to_vec()]);
            assert_eq!(wire.ends_with(payload), is_bare);
            assert!(!wire.windows(8).any(|part| part == [9; 8]));
            // Also of how much of it goes bare, in front of the head.
            for at in [0, 2, 5, 20, 40] {
                let (_, got) = through(protection, payload, |wire| wire[at] ^= 1);
                assert!(got.is_err(), "byte {at}");
            }
            let (_, got) = through(protection, payload, |wire| wire[1000] ^= 1);
            assert_eq!(got.is_ok(), is_bare);
        }
    }

    #[test]
    fn an_end_within_a_record_is_no_end_in_order() {
        let (near, mut to_near, mut to_far, far) = pair(Protection::All);
        assert!(matches!(near.send_bytes(&[1; 100]), Ok(Moved::Bytes(100))));
        let mut wire = [0; sealed_bytes(BARE_BYTES + 100)];
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
        let (near, to_near, to_far, far) = pair(Protection::All);
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
        let (_, _, mut opener) = seals.unwrap();
        let mut wire = vec![0; sealed_bytes(BARE_BYTES + 500)];
        (&*stream).read_exact(&mut wire).unwrap();
        assert_eq!(
            opener.open(&mut wire[LENGTH_BYTES..]).unwrap()[BARE_BYTES..],
            [2; 500]
        );
    }
}
