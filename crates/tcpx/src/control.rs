//! The control connection: frames, sealed in records, in and out of one non-blocking stream. Where
//! payload is not encrypted, the bytes of a message from
//! [`LEAST_PLAIN_BYTES`](tcpx_wire::frame::LEAST_PLAIN_BYTES) on lie between the records as they
//! are; their checksum is sealed.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tcpx_lanes::resend::{Impossible, NextPart, Resend};
use tcpx_lanes::socket_calls::{self as calls, Moved};
use tcpx_net::{ControlStream, TcpCounters, tcp_counters};
use tcpx_wire::frame::{Frame, FrameDecoder, FrameError, LEAST_PLAIN_BYTES, encode_head};
use tcpx_wire::handshake::{Established, HandshakeError};
use tcpx_wire::record::{self, LENGTH_BYTES, RecordError, Records, SESSION_OVER};

use crate::options::Bounds;

/// Bytes asked of the socket at a time.
const READ_BYTES: usize = 256 * 1024;

/// What is read begins at a page, as what the peer writes does in its kernel: some processors copy
/// at a twentieth of the speed to a place that lies 1 to 31 bytes farther into its page than the
/// source does.
const PAGE_BYTES: usize = 4096;

/// Bytes that are sealed before the socket gets them: the longest frame goes out in one call, as
/// unsealed it would.
const SEALED_BYTES: usize = 160 * 1024;

/// Bytes of the buffers of payload that are kept for others.
const SPARE_BYTES: usize = 512 << 10;

/// Unsealed bytes up to which a copy, behind what is sealed, costs less than a call of their own.
const COPIED_BYTES: usize = 16 * 1024;

/// Reads of what nobody wants at a time.
const DRAINED_READS: usize = 16;

/// Why the control connection ended.
#[derive(Debug)]
pub(crate) enum ControlEnd {
    /// End of stream without a goodbye.
    Eof,
    /// The stream failed.
    Io(io::Error),
    /// The server does not take this client after all.
    Welcome(HandshakeError),
    /// What came is not what the peer sealed.
    Record(RecordError),
    /// The peer sent something that is not the protocol, or this side would have.
    Frame(FrameError),
    /// The peer claims to have what was not sent, or to lack what it had.
    Position(Impossible),
    /// The peer has ended the session, for this reason.
    Over(String),
}

impl ControlEnd {
    /// The connection broke, rather than what the peer said on it. Bytes that the peer did not seal
    /// are not its own.
    pub(crate) fn is_loss(&self) -> bool {
        match self {
            Self::Eof | Self::Io(_) | Self::Record(_) => true,
            // Of a message that is not sealed: records do not open where they were changed.
            Self::Frame(error) => matches!(error, FrameError::Checksum { .. }),
            Self::Welcome(_) | Self::Position(_) | Self::Over(_) => false,
        }
    }
}

/// Bytes that each side seals first on a connection that takes another's place: how many bytes of
/// whole frames it has read.
const POSITION_BYTES: usize = 8;

/// How often the socket is asked for what has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asks {
    /// Whenever frames are wanted.
    Always,
    /// Until it has no more: the thread that reads waits on the descriptor then, which was ready.
    Once,
    /// Not at all: the descriptor was not ready.
    Not,
}

/// Framed, non-blocking control stream.
#[derive(Debug)]
pub(crate) struct Control {
    stream: TcpStream,
    /// What streams carried whose place it took.
    carried_before: TcpCounters,
    /// The keys of this connection and of no other one.
    records: Records,
    decoder: FrameDecoder,
    /// Bytes that were read, and room for as many as are asked for: no byte of it is written before
    /// one has come.
    input: Vec<u8>,
    /// What was read and is neither opened nor, where it is unsealed, decoded.
    came: Range<usize>,
    /// One record.
    opened: Box<[u8]>,
    /// Bytes of `opened` that were not yet decoded.
    unread: Range<usize>,
    /// Whether long messages come unsealed.
    plain: bool,
    /// What a read has given that [`Control::look`] did ahead of time.
    ahead: Option<rustix::io::Result<usize>>,
    asks: Asks,
    /// Bytes have come since somebody asked.
    heard: bool,
    /// The last read took all that there was.
    drained: bool,
    /// [`Control::receive`] had nothing more to give.
    is_empty: bool,
    /// What goes to the peer.
    log: Resend,
    /// The number of the frame that goes there next, and room to encode it.
    sequence: u32,
    encoded: Vec<u8>,
    /// Payload that goes there from where it lies, and where each ends; behind so many that the
    /// peer has.
    messages: VecDeque<(u64, Vec<u8>)>,
    arrived_messages: u64,
    /// Buffers of payload that has gone, and their bytes.
    spare: Vec<Vec<u8>>,
    spare_bytes: usize,
    /// The beginning of that, sealed where it must be; the socket has taken it up to `taken`.
    sealed: Vec<u8>,
    taken: usize,
    /// Another connection may go on where this one breaks.
    resumable: bool,
    /// As in [`Bounds`].
    most_queued: u64,
    report_after: (u32, usize),
    /// Frames and their bytes that the peer was not told to have arrived.
    unreported: (u32, usize),
    /// Until the server has welcomed this client.
    awaits_welcome: bool,
    /// Until the peer has said where to go on.
    is_positioning: bool,
    /// The connection broke and another one is waited for.
    away: bool,
    finished_writing: bool,
    /// The socket takes nothing any more.
    broken: bool,
}

impl Control {
    /// The stream must be non-blocking; `resumable`: both sides can go on over another connection;
    /// `awaits_welcome`: the server's welcome comes first; `encrypts`: both sides seal all payload.
    pub(crate) fn new(
        ControlStream { stream, records }: ControlStream,
        resumable: bool,
        awaits_welcome: bool,
        encrypts: bool,
        bounds: &Bounds,
    ) -> Self {
        Self {
            stream,
            carried_before: TcpCounters::default(),
            records,
            decoder: FrameDecoder::new(),
            input: Vec::with_capacity(READ_BYTES),
            came: 0..0,
            opened: vec![0; record::MOST_BYTES + record::TAG_BYTES].into_boxed_slice(),
            unread: 0..0,
            plain: !encrypts,
            ahead: None,
            asks: Asks::Always,
            heard: false,
            drained: false,
            is_empty: false,
            log: Resend::default(),
            sequence: 0,
            encoded: Vec::new(),
            messages: VecDeque::new(),
            arrived_messages: 0,
            spare: Vec::new(),
            spare_bytes: 0,
            sealed: Vec::new(),
            taken: 0,
            resumable,
            most_queued: bounds.queued,
            report_after: (bounds.told_frames, bounds.told_bytes),
            unreported: (0, 0),
            awaits_welcome,
            is_positioning: false,
            away: false,
            finished_writing: false,
            broken: false,
        }
    }

    /// The next frame, or `None` when the peer has sent nothing complete. What the peer has
    /// received of a stream that can go on is seen to here, and nothing for the session.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, ControlEnd> {
        let received = self.next_frame();
        self.is_empty = matches!(received, Ok(None));
        received
    }

    fn next_frame(&mut self) -> Result<Option<Frame>, ControlEnd> {
        if self.away {
            return Ok(None);
        }
        loop {
            if self.is_positioning {
                if self.take_position()? {
                    continue;
                }
            } else if !self.awaits_welcome || self.take_welcome()? {
                match self.decode().map_err(ControlEnd::Frame)? {
                    Some(Frame::Received { read }) if self.resumable => {
                        self.log.acknowledged(read).map_err(ControlEnd::Position)?;
                        self.free_messages();
                        return Ok(Some(Frame::Received { read }));
                    }
                    Some(frame) => {
                        self.report_received()?;
                        return Ok(Some(frame));
                    }
                    None => {}
                }
            }
            // Without a frame the decoder has taken all that was opened.
            if self.open().map_err(ControlEnd::Record)? {
                continue;
            }
            if std::mem::take(&mut self.drained) {
                return Ok(None);
            }
            let ahead = self.ahead.take();
            if self.asks == Asks::Not && ahead.is_none() {
                return Ok(None);
            }
            match ahead.unwrap_or_else(|| self.read()) {
                // As one that was faster has it closed.
                Ok(0) if self.awaits_welcome => {
                    return Err(ControlEnd::Welcome(HandshakeError::Busy));
                }
                Ok(0) => return Err(ControlEnd::Eof),
                Ok(count) => {
                    self.heard = true;
                    self.came.end += count;
                    self.drained = self.came.end < self.input.capacity();
                    if self.drained && self.asks == Asks::Once {
                        self.asks = Asks::Not;
                    }
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(ControlEnd::Io(error.into())),
            }
        }
    }

    /// The next frame of what was opened, and of what has come unsealed behind it.
    fn decode(&mut self) -> Result<Option<Frame>, FrameError> {
        let mut decoded = Ok(None);
        let mut taken = 0;
        if !self.unread.is_empty() {
            let mut rest = &self.opened[self.unread.clone()];
            decoded = self.decoder.next(&mut rest);
            taken = self.unread.len() - rest.len();
            self.unread.start += taken;
        }
        if let Ok(None) = decoded
            && self.plain
        {
            let came = &self.input[self.came.clone()];
            let mut rest = &came[..came.len().min(self.decoder.plain_next())];
            let before = rest.len();
            if before > 0 {
                decoded = self.decoder.next(&mut rest);
                self.came.start += before - rest.len();
                taken += before - rest.len();
            }
        }
        self.unreported.1 += taken;
        decoded
    }

    /// Opens the next record, if it has come whole, once what was opened before has been decoded.
    fn open(&mut self) -> Result<bool, RecordError> {
        debug_assert!(self.unread.is_empty());
        let came = &self.input[self.came.clone()];
        if self.awaits_plain() {
            return Ok(false);
        }
        let Some(length) = Records::length(came)? else {
            return Ok(false);
        };
        let Some(sealed) = came.get(LENGTH_BYTES..LENGTH_BYTES + length) else {
            return Ok(false);
        };
        let opened = self.records.open(sealed, &mut self.opened[..length])?;
        self.came.start += LENGTH_BYTES + length;
        self.unread = 0..opened;
        Ok(true)
    }

    /// Whether what comes next is not sealed.
    fn awaits_plain(&self) -> bool {
        self.plain && self.decoder.plain_next() > 0
    }

    /// Asks the socket for more, behind what has come.
    fn read(&mut self) -> rustix::io::Result<usize> {
        let kept = self.came.len();
        let page = self.input.as_ptr().align_offset(PAGE_BYTES);
        let to = page + kept.next_multiple_of(PAGE_BYTES);
        if self.input.len() < to {
            self.input.resize(to, 0);
        }
        if kept > 0 {
            self.input.copy_within(self.came.clone(), to - kept);
        }
        self.input.truncate(to);
        self.came = to - kept..to;
        let room = spare_capacity(&mut self.input);
        recv(&self.stream, room, RecvFlags::empty()).map(|(count, _)| count)
    }

    /// Whether any bytes have come since this was asked last, be it a part of a frame.
    pub(crate) fn has_heard(&mut self) -> bool {
        std::mem::take(&mut self.heard)
    }

    /// Whether anything has come, or the end; [`Control::receive`] gives it.
    pub(crate) fn has_input(&mut self) -> bool {
        // What has come may be more than a part of a record; then whoever receives says so.
        if self.away || self.ahead.is_some() || !self.unread.is_empty() || !self.is_empty {
            return true;
        }
        let read = self.read();
        if read == Err(Errno::AGAIN) {
            return false;
        }
        self.ahead = Some(read);
        true
    }

    /// How often the socket is asked from now on.
    pub(crate) fn set_asks(&mut self, asks: Asks) {
        self.asks = asks;
    }

    /// Has the socket asked again, whatever is known of the descriptor; whether it was not before.
    pub(crate) fn ask_again(&mut self) -> bool {
        std::mem::replace(&mut self.asks, Asks::Always) == Asks::Not
    }

    /// Has the next payload that comes in a frame use this buffer.
    pub(crate) fn use_again(&mut self, payload: Vec<u8>) {
        self.decoder.use_again(payload);
    }

    /// Everything that had come was read and taken.
    pub(crate) fn is_drained(&self) -> bool {
        self.is_empty && self.ahead.is_none()
    }

    /// Asks the socket again, whatever the last read has found.
    pub(crate) fn look_again(&mut self) {
        (self.drained, self.asks) = (false, Asks::Always);
    }

    /// Counts a frame, and tells the peer now and then what has arrived.
    fn report_received(&mut self) -> Result<(), ControlEnd> {
        self.unreported.0 += 1;
        let due =
            self.unreported.0 >= self.report_after.0 || self.unreported.1 >= self.report_after.1;
        if due && self.resumable && !self.finished_writing {
            self.unreported = (0, 0);
            let read = self.decoder.read();
            self.push(Frame::Received { read })?;
        }
        Ok(())
    }

    /// Takes the server's welcome; whether it has come.
    fn take_welcome(&mut self) -> Result<bool, ControlEnd> {
        let opened = &self.opened[self.unread.clone()];
        let Some(status) = opened.first_chunk::<1>() else {
            return Ok(false);
        };
        Established::read_welcome(status).map_err(ControlEnd::Welcome)?;
        self.unread.start += 1;
        self.awaits_welcome = false;
        Ok(true)
    }

    /// Takes the peer's position on a connection that took another's place; whether it has come.
    fn take_position(&mut self) -> Result<bool, ControlEnd> {
        let opened = &self.opened[self.unread.clone()];
        let Some(read) = opened.first_chunk::<POSITION_BYTES>() else {
            let arrived = opened.len();
            return match arrived {
                0 => Ok(false),
                // It is one record.
                _ => Err(ControlEnd::Record(RecordError::Length { arrived })),
            };
        };
        let read = u64::from_le_bytes(*read);
        self.unread.start += POSITION_BYTES;
        if read == SESSION_OVER {
            let reason = &self.opened[self.unread.clone()];
            return Err(ControlEnd::Over(
                String::from_utf8_lossy(reason).into_owned(),
            ));
        }
        self.is_positioning = false;
        self.log.rewind(read).map_err(ControlEnd::Position)?;
        self.free_messages();
        Ok(true)
    }

    /// The connection broke; nothing goes in or out before another one takes its place. The peer
    /// hears of it where only one direction broke, or only this side has noticed.
    pub(crate) fn disconnect(&mut self) {
        self.away = true;
        self.shutdown();
    }

    pub(crate) fn is_away(&self) -> bool {
        self.away
    }

    /// Another connection goes on where the old one broke; that one is closed.
    pub(crate) fn replace(&mut self, ControlStream { stream, records }: ControlStream) {
        self.carried_before = self.carried();
        self.stream = stream;
        self.records = records;
        self.came = 0..0;
        self.unread = 0..0;
        self.sealed.clear();
        self.taken = 0;
        self.ahead = None;
        self.drained = false;
        self.decoder.restart();
        self.is_positioning = true;
        self.away = false;
        self.broken = false;
        let position = self.decoder.read().to_le_bytes();
        self.records.seal(&position, &mut self.sealed);
    }

    /// Bytes of TCP that went over it and those before it, as far as the kernel tells.
    pub(crate) fn carried(&self) -> TcpCounters {
        let now = tcp_counters(&self.stream).unwrap_or_default();
        TcpCounters {
            retransmits: self.carried_before.retransmits + now.retransmits,
            sent: self.carried_before.sent + now.sent,
            received: self.carried_before.received + now.received,
        }
    }

    /// This side's address on the connection.
    pub(crate) fn local_ip(&self) -> Option<IpAddr> {
        Some(self.stream.local_addr().ok()?.ip())
    }

    /// Room for another frame from the session.
    pub(crate) fn has_room(&self) -> bool {
        self.log.end() - self.log.read() < self.most_queued
    }

    /// Queues a frame; [`Control::flush`] sends it.
    pub(crate) fn queue(&mut self, frame: Frame) -> Result<(), ControlEnd> {
        if self.broken && !self.resumable {
            return Ok(());
        }
        self.push(frame)
    }

    fn push(&mut self, frame: Frame) -> Result<(), ControlEnd> {
        self.encoded.clear();
        let payload =
            encode_head(&frame, self.sequence, &mut self.encoded).map_err(ControlEnd::Frame)?;
        self.sequence = self.sequence.wrapping_add(1);
        self.log.push(&self.encoded);
        let plain = self.plain && payload.len() >= LEAST_PLAIN_BYTES;
        let bytes = payload.len();
        if !plain {
            self.log.push(payload);
        }
        match frame {
            Frame::Eager { payload, .. } if plain => {
                let number = self.arrived_messages + self.messages.len() as u64;
                let end = self.log.begin(number, bytes);
                self.messages.push_back((end, payload.into_bytes()));
            }
            Frame::Eager { payload, .. } => self.give_back(payload.into_bytes()),
            _ => {}
        }
        Ok(())
    }

    /// An empty buffer for payload to send.
    pub(crate) fn buffer(&mut self) -> Vec<u8> {
        let buffer = self.spare.pop().unwrap_or_default();
        self.spare_bytes -= buffer.capacity();
        buffer
    }

    /// Keeps a [buffer](Self::buffer) for others.
    pub(crate) fn give_back(&mut self, mut payload: Vec<u8>) {
        let kept = self.spare_bytes + payload.capacity();
        if payload.capacity() > 0 && kept <= SPARE_BYTES {
            self.spare_bytes = kept;
            payload.clear();
            self.spare.push(payload);
        }
    }

    /// Has the buffers of payload that is not written again.
    fn free_messages(&mut self) {
        let read = self.log.read();
        while let Some((_, payload)) = self.messages.pop_front_if(|(end, _)| *end <= read) {
            self.arrived_messages += 1;
            self.give_back(payload);
        }
    }

    /// Gives queued bytes to the socket.
    ///
    /// A socket that takes nothing any more is no error here: what the peer said before it closed
    /// may still wait to be read, a goodbye above all. Reading comes to the end of the stream soon.
    pub(crate) fn flush(&mut self) {
        if self.away {
            return;
        }
        while !self.broken && self.has_unsent() && (self.taken < self.sealed.len() || self.seal()) {
            let sealed = &self.sealed[self.taken..];
            match calls::send_both(&self.stream, sealed, self.unsealed()) {
                Ok(Moved::Bytes(count)) if count > 0 => {
                    let behind = count.saturating_sub(sealed.len());
                    self.taken += count - behind;
                    self.wrote(behind);
                }
                Ok(Moved::WouldBlock) => return,
                Ok(_) | Err(_) => self.broken = true,
            }
        }
        if self.broken && !self.resumable {
            self.forget();
        }
    }

    /// What goes behind that from where it lies.
    fn unsealed(&self) -> &[u8] {
        match self.log.next() {
            NextPart::Message(number, from) if !self.is_positioning => {
                message(&self.messages, number - self.arrived_messages, from)
            }
            _ => &[],
        }
    }

    /// Whether something was sealed that the socket has not taken, or is to be written.
    fn has_unsent(&self) -> bool {
        self.taken < self.sealed.len() || !self.is_positioning && self.log.has_unwritten()
    }

    /// The connection has taken so much of what is next, or what is sealed has it.
    fn wrote(&mut self, bytes: usize) {
        self.log.wrote(bytes);
        if !self.resumable && !self.log.has_unwritten() {
            self.log.forget();
            self.free_messages();
        }
    }

    /// Seals what is queued, a bounded part of it; whether there was anything.
    fn seal(&mut self) -> bool {
        self.sealed.clear();
        self.taken = 0;
        while !self.is_positioning && self.sealed.len() < SEALED_BYTES {
            let gone = match self.log.next() {
                NextPart::Bytes(bytes) => self.records.seal(bytes, &mut self.sealed),
                NextPart::Message(number, from) => {
                    let bytes = message(&self.messages, number - self.arrived_messages, from);
                    if bytes.is_empty() || bytes.len() > COPIED_BYTES {
                        break;
                    }
                    self.sealed.extend_from_slice(bytes);
                    bytes.len()
                }
                NextPart::New => break,
            };
            self.wrote(gone);
        }
        !self.sealed.is_empty() || !self.unsealed().is_empty()
    }

    /// Bytes wait for the socket to become writable.
    pub(crate) fn wants_write(&self) -> bool {
        !self.away && !self.broken && self.has_unsent()
    }

    /// Drops what the socket has not taken.
    pub(crate) fn forget(&mut self) {
        self.log.forget();
        self.free_messages();
        self.sealed.clear();
        self.taken = 0;
    }

    /// Reads and drops what still comes, a bounded part of it, so that a peer that never stops
    /// sending holds nobody; `true` once the peer has closed its end.
    pub(crate) fn drain(&mut self) -> bool {
        self.came = 0..0;
        self.unread = 0..0;
        self.ahead = None;
        for _ in 0..DRAINED_READS {
            match self.read() {
                Ok(0) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
        false
    }

    /// Tells the peer that nothing more comes.
    pub(crate) fn finish_writing(&mut self) {
        if !std::mem::replace(&mut self.finished_writing, true) {
            // A peer that is gone needs no telling.
            drop(self.stream.shutdown(std::net::Shutdown::Write));
        }
    }

    pub(crate) fn shutdown(&self) {
        // The peer may have closed first; there is nothing left to do then.
        drop(self.stream.shutdown(std::net::Shutdown::Both));
    }
}

/// The payload that comes after so many of these, from this byte of it on.
fn message(messages: &VecDeque<(u64, Vec<u8>)>, nth: u64, from: usize) -> &[u8] {
    let message = messages.get(nth as usize);
    message.map_or(&[], |(_, payload)| &payload[from..])
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener};
    use std::time::{Duration, Instant};

    use tcpx_wire::frame::{Destination, LEAST_PLAIN_BYTES, MAX_EAGER_BYTES, encode};
    use tcpx_wire::lane_seal::LaneKeys;
    use tcpx_wire::record::{MOST_BYTES, sealed_bytes};
    use tcpx_wire::{Level, Tag, TransferId};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Records of both ends of a connection; each `seed` makes other keys.
    pub(crate) fn records(seed: u8) -> (Records, Records) {
        let keys = |send, receive| Records::new(LaneKeys::new([send; 32], [receive; 32]));
        (keys(seed, 0), keys(0, seed))
    }

    /// A connection: its end for a [`Control`], and the network's end of that.
    fn connection(seed: u8) -> (ControlStream, TcpStream, Records) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        near.set_nonblocking(true).unwrap();
        let far = listener.accept().unwrap().0;
        far.set_read_timeout(Some(LIMIT)).unwrap();
        let (ours, theirs) = records(seed);
        let stream = ControlStream {
            stream: near,
            records: ours,
        };
        (stream, far, theirs)
    }

    fn eager(number: u64, bytes: usize) -> Frame {
        Frame::Eager {
            transfer: TransferId(number),
            level: Level::Placed,
            to: Destination::next_receive(Tag(1)),
            payload: vec![b'x'; bytes].into(),
        }
    }

    /// Has everything sent, and returns what went over the network.
    fn sent(control: &mut Control, network: &mut TcpStream) -> Vec<u8> {
        let plain = (control.log.end() - control.log.written()) as usize;
        let count = control.sealed.len() - control.taken
            + plain
            + plain.div_ceil(MOST_BYTES) * sealed_bytes(0);
        control.flush();
        assert!(!control.wants_write(), "the socket has room for it");
        let mut bytes = vec![0; count];
        network.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// What each record of these sealed.
    pub(crate) fn opened(records: &mut Records, mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(length) = Records::length(bytes).unwrap() {
            let (sealed, rest) = bytes[LENGTH_BYTES..].split_at(length);
            let mut out = vec![0; length];
            let count = records.open(sealed, &mut out).unwrap();
            out.truncate(count);
            all.push(out);
            bytes = rest;
        }
        all
    }

    pub(crate) fn frames(bytes: &[u8], decoder: &mut FrameDecoder) -> Vec<Frame> {
        let mut rest = bytes;
        std::iter::from_fn(|| decoder.next(&mut rest).unwrap()).collect()
    }

    #[test]
    fn nothing_of_a_frame_can_be_read_on_the_way() {
        let (stream, mut network, mut theirs) = connection(1);
        let mut control = Control::new(stream, false, false, true, &Bounds::default());
        let said = [eager(0, 100), eager(1, MAX_EAGER_BYTES), eager(2, 0)];
        let mut bytes = Vec::new();
        for frame in &said {
            control.queue(frame.clone()).unwrap();
            bytes.extend(sent(&mut control, &mut network));
        }
        assert!(!bytes.windows(8).any(|eight| eight == b"xxxxxxxx"));
        let plain = opened(&mut theirs, &bytes).concat();
        assert_eq!(frames(&plain, &mut FrameDecoder::new()), said);
    }

    /// Two ends of a session, with the network between them in the test's hands.
    struct Both {
        sender: Control,
        receiver: Control,
        from: TcpStream,
        to: TcpStream,
    }

    impl Both {
        /// A connection: both ends, and the network's end of each.
        fn connect(seed: u8) -> (ControlStream, ControlStream, TcpStream, TcpStream) {
            let (sender, from, theirs) = connection(seed);
            let (mut receiver, to, _) = connection(seed);
            receiver.records = theirs;
            from.set_nonblocking(true).unwrap();
            (sender, receiver, from, to)
        }

        fn new(encrypts: bool) -> Self {
            let (sender, receiver, from, to) = Self::connect(1);
            Self {
                sender: Control::new(sender, true, false, encrypts, &Bounds::default()),
                receiver: Control::new(receiver, true, false, encrypts, &Bounds::default()),
                from,
                to,
            }
        }

        /// Moves what was sent, in slices of so many bytes, changed by `change`; what the receiver
        /// makes of it, so many frames.
        fn carry(
            &mut self,
            frames: usize,
            slice: usize,
            mut change: impl FnMut(&mut [u8]),
        ) -> Result<Vec<Frame>, ControlEnd> {
            let mut wire = Vec::new();
            let mut part = vec![0; 64 << 10];
            while self.sender.wants_write() || wire.is_empty() {
                self.sender.flush();
                while let Ok(count) = self.from.read(&mut part) {
                    wire.extend_from_slice(&part[..count]);
                }
            }
            change(&mut wire);
            let mut arrived = Vec::new();
            let mut slices = wire.chunks(slice);
            let until = Instant::now() + LIMIT;
            while arrived.len() < frames {
                if let Some(bytes) = slices.next() {
                    self.to.write_all(bytes).unwrap();
                }
                while let Some(frame) = self.receiver.receive()? {
                    arrived.push(frame);
                }
                assert!(Instant::now() < until);
            }
            Ok(arrived)
        }
    }

    const LONG: [usize; 6] = [
        LEAST_PLAIN_BYTES,
        LEAST_PLAIN_BYTES + 1,
        COPIED_BYTES,
        COPIED_BYTES + 1,
        MAX_EAGER_BYTES,
        LEAST_PLAIN_BYTES + 7,
    ];

    #[test]
    fn messages_arrive_sealed_or_not_however_the_network_cuts_them() {
        let sizes = [0, 100, LEAST_PLAIN_BYTES - 1].into_iter().chain(LONG);
        let mut said: Vec<Frame> = (0..).zip(sizes).map(|(n, size)| eager(n, size)).collect();
        said.insert(5, Frame::Heartbeat { counter: 1 });
        said.push(Frame::Heartbeat { counter: 2 });
        for encrypts in [false, true] {
            for slice in [61, 4096, 1 << 20] {
                let mut both = Both::new(encrypts);
                for frame in &said {
                    both.sender.queue(frame.clone()).unwrap();
                }
                let mut longest = 0;
                let arrived = both.carry(said.len(), slice, |wire| {
                    let runs = wire.split(|byte| *byte != b'x').map(<[u8]>::len);
                    longest = runs.max().unwrap_or_default();
                });
                assert!(arrived.unwrap() == said, "slices of {slice}");
                // A run of chance is short.
                match encrypts {
                    true => assert!(longest < 16),
                    false => assert!(longest >= MAX_EAGER_BYTES),
                }
            }
        }
    }

    #[test]
    fn what_is_read_begins_at_a_page_behind_what_was_kept() {
        let (stream, mut network, _) = connection(1);
        let mut control = Control::new(stream, false, false, false, &Bounds::default());
        for kept in [0, 1, PAGE_BYTES, PAGE_BYTES + 1] {
            control.came = 7..7 + kept;
            control.input.resize(control.came.end, 0);
            control.input[control.came.clone()].fill(3);
            network.write_all(b"news").unwrap();
            let until = Instant::now() + LIMIT;
            while control.read() == Err(Errno::AGAIN) {
                assert!(Instant::now() < until);
            }
            let came = &control.input[control.came.start..][..kept + 4];
            assert!(came[..kept].iter().all(|byte| *byte == 3) && came[kept..] == *b"news");
            assert_eq!(came[kept..].as_ptr().align_offset(PAGE_BYTES), 0, "{kept}");
        }
    }

    #[test]
    fn the_buffers_of_messages_that_have_arrived_serve_again() {
        let mut both = Both::new(false);
        let said = [0, 1, 2].map(|number| eager(number, MAX_EAGER_BYTES));
        for frame in &said {
            both.sender.queue(frame.clone()).unwrap();
        }
        assert!(both.carry(3, 1 << 20, |_| {}).unwrap() == said);
        assert_eq!(
            (both.sender.messages.len(), both.sender.spare.len()),
            (3, 0)
        );
        // Of the first two, which are as many bytes as it tells of.
        both.receiver.flush();
        let mut told = vec![0; 1000];
        let count = both.to.read(&mut told).unwrap();
        both.from.write_all(&told[..count]).unwrap();
        let until = Instant::now() + LIMIT;
        while both.sender.messages.len() > 1 {
            let came = both.sender.receive().unwrap();
            assert!(came.is_none_or(|frame| matches!(frame, Frame::Received { .. })));
            assert!(Instant::now() < until);
        }
        assert_eq!(both.sender.spare.len(), 2);
    }

    /// What is short stays sealed in any case: names of files, digests.
    #[test]
    fn what_is_short_is_sealed() {
        let (stream, mut network, _) = connection(1);
        let mut control = Control::new(stream, false, false, false, &Bounds::default());
        control.queue(eager(0, LEAST_PLAIN_BYTES - 1)).unwrap();
        let bytes = sent(&mut control, &mut network);
        assert!(!bytes.windows(16).any(|some| some == [b'x'; 16]));
    }

    /// A bit of a message that is not sealed flips: its checksum, which is sealed, tells; the
    /// message comes again.
    #[test]
    fn a_changed_message_comes_again_over_another_way() {
        for bytes in LONG {
            let mut both = Both::new(false);
            let said = [Frame::Heartbeat { counter: 9 }, eager(0, bytes)];
            said.iter()
                .for_each(|frame| both.sender.queue(frame.clone()).unwrap());
            let flipped = both.carry(2, 1 << 20, |wire| {
                *wire.last_mut().unwrap() ^= 4;
            });
            let end = flipped.unwrap_err();
            assert!(
                matches!(end, ControlEnd::Frame(FrameError::Checksum { .. })),
                "{end:?}"
            );
            assert!(end.is_loss());
            both.receiver.disconnect();
            both.sender.disconnect();

            let (sender, receiver, from, to) = Both::connect(2);
            (both.from, both.to) = (from, to);
            both.sender.replace(sender);
            both.receiver.replace(receiver);
            // Both say where to go on: the heartbeat has arrived.
            both.receiver.flush();
            let mut position = [0; sealed_bytes(POSITION_BYTES)];
            both.to.read_exact(&mut position).unwrap();
            both.from.write_all(&position).unwrap();
            let until = Instant::now() + LIMIT;
            while both.sender.is_positioning {
                assert!(both.sender.receive().unwrap().is_none());
                assert!(Instant::now() < until);
            }
            let arrived = both.carry(1, 1 << 20, |_| {}).unwrap();
            assert!(arrived == said[1..]);
        }
    }

    #[test]
    fn a_bit_that_flips_on_the_way_never_makes_a_frame() {
        for bit in 0..8 * 60 {
            let (stream, mut network, mut theirs) = connection(1);
            let mut control = Control::new(stream, false, false, false, &Bounds::default());
            let (mut plain, mut sealed) = (Vec::new(), Vec::new());
            encode(&Frame::Heartbeat { counter: 3 }, 0, &mut plain).unwrap();
            theirs.seal(&plain, &mut sealed);
            let bit = bit % (8 * sealed.len());
            sealed[bit / 8] ^= 1 << (bit % 8);
            network.write_all(&sealed).unwrap();
            network.shutdown(std::net::Shutdown::Write).unwrap();
            let until = Instant::now() + LIMIT;
            let end = loop {
                match control.receive() {
                    Err(end) => break end,
                    Ok(Some(frame)) => panic!("bit {bit}: {frame:?}"),
                    Ok(None) => assert!(Instant::now() < until),
                }
            };
            assert!(
                matches!(end, ControlEnd::Record(_) | ControlEnd::Eof),
                "{end:?}"
            );
            assert!(end.is_loss());
        }
    }

    /// The records of each connection open in their order, from the first number on and each number
    /// once: the other end counts them. What goes out again is sealed anew.
    #[test]
    fn another_connection_goes_on_under_its_own_keys() {
        let (stream, mut network, mut theirs) = connection(1);
        let mut control = Control::new(stream, true, false, false, &Bounds::default());
        let said: Vec<Frame> = (0..5).map(|number| eager(number, 100)).collect();
        let mut first = Vec::new();
        for frame in &said {
            control.queue(frame.clone()).unwrap();
            first.extend(sent(&mut control, &mut network));
        }
        let plain = opened(&mut theirs, &first);
        assert_eq!(plain.len(), 5);
        assert_eq!(frames(&plain.concat(), &mut FrameDecoder::new()), said);

        let (stream, mut network, mut theirs) = connection(2);
        control.disconnect();
        control.replace(stream);
        // The other side has the first two frames.
        let mut position = Vec::new();
        let read = (plain[0].len() + plain[1].len()) as u64;
        theirs.seal(&read.to_le_bytes(), &mut position);
        network.write_all(&position).unwrap();
        let until = Instant::now() + LIMIT;
        while control.is_positioning {
            assert!(control.receive().unwrap().is_none());
            assert!(Instant::now() < until);
        }
        let second = sent(&mut control, &mut network);
        let plain = opened(&mut theirs, &second);
        assert_eq!(plain[0], 0u64.to_le_bytes(), "what it has read");
        let mut again = Vec::new();
        for (number, frame) in (2..).zip(&said[2..]) {
            encode(frame, number, &mut again).unwrap();
        }
        assert_eq!(plain[1..].concat(), again);
        // Nothing that was sealed is sealed alike.
        let sealed_before: Vec<&[u8]> = first.chunks(16).collect();
        assert!(second.chunks(16).all(|some| !sealed_before.contains(&some)));
    }
}
