//! The control connection: frames in and out of one non-blocking stream.

use std::io;
use std::net::{IpAddr, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tcpx_net::{TcpCounters, tcp_counters};
use tcpx_wire::frame::{EncodeError, Frame, FrameDecoder, FrameError, FrameLog, PositionError};

/// Most bytes queued for the peer before the session is asked for no more frames. Every kind of
/// frame is bounded by a window of its own, so this only limits what lies in user memory.
const MAX_QUEUED: usize = 2 << 20;

/// Bytes asked of the socket at a time.
const READ_BYTES: usize = 256 * 1024;

/// Reads of what nobody wants at a time.
const DRAINED_READS: usize = 16;

/// The peer is told what has arrived after so many frames, or so many bytes of them.
const TELL_FRAMES: u32 = 64;
const TELL_BYTES: usize = 256 << 10;

/// Why the control connection ended.
#[derive(Debug)]
pub(crate) enum ControlEnd {
    /// End of stream without a goodbye.
    Eof,
    /// The stream failed.
    Io(io::Error),
    /// The peer sent something that is not the protocol.
    Frame(FrameError),
    /// The session made a frame that the protocol does not allow.
    Encode(EncodeError),
    /// The peer claims to have what was not sent, or to lack what it had.
    Position(PositionError),
}

impl ControlEnd {
    /// The connection broke, rather than what the peer said on it.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::Eof | Self::Io(_))
    }
}

/// Bytes with which each side begins on a connection that takes another's place: the number of the
/// frame that it expects next.
const POSITION_BYTES: usize = 4;

/// Both sides say where they are before frames go on.
#[derive(Debug, Default)]
struct Position {
    /// Bytes of ours that the socket has taken.
    sent: usize,
    theirs: [u8; POSITION_BYTES],
    /// Bytes of theirs that have arrived.
    have: usize,
}

impl Position {
    fn is_done(&self) -> bool {
        self.sent == POSITION_BYTES && self.have == POSITION_BYTES
    }
}

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
    decoder: FrameDecoder,
    input: Box<[u8]>,
    /// Bytes of `input` that were read and not yet decoded.
    unread: Range<usize>,
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
    log: FrameLog,
    /// Another connection may go on where this one breaks.
    resumable: bool,
    /// Frames and their bytes that the peer was not told to have arrived.
    untold: (u32, usize),
    /// Until both sides know where to go on.
    position: Option<Position>,
    /// The connection broke and another one is waited for.
    away: bool,
    finished_writing: bool,
    /// The socket takes nothing any more.
    broken: bool,
}

impl Control {
    /// `stream` must be non-blocking; `leftover` are bytes that arrived with the handshake;
    /// `resumable`: both sides can go on over another connection.
    pub(crate) fn new(stream: TcpStream, leftover: &[u8], resumable: bool) -> Self {
        // Untouched pages of it cost nothing.
        let mut input = vec![0; READ_BYTES.max(leftover.len())].into_boxed_slice();
        input[..leftover.len()].copy_from_slice(leftover);
        Self {
            stream,
            carried_before: TcpCounters::default(),
            decoder: FrameDecoder::new(),
            input,
            unread: 0..leftover.len(),
            ahead: None,
            asks: Asks::Always,
            heard: false,
            drained: false,
            is_empty: false,
            log: FrameLog::new(resumable),
            resumable,
            untold: (0, 0),
            position: None,
            away: false,
            finished_writing: false,
            broken: false,
        }
    }

    /// The next frame, or `None` when the peer has sent nothing complete.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, ControlEnd> {
        let received = self.next_frame();
        self.is_empty = matches!(received, Ok(None));
        received
    }

    fn next_frame(&mut self) -> Result<Option<Frame>, ControlEnd> {
        if self.away || !self.receive_position()? {
            return Ok(None);
        }
        loop {
            let mut rest = &self.input[self.unread.clone()];
            let before = rest.len();
            let decoded = self.decoder.next(&mut rest);
            let taken = before - rest.len();
            self.unread.start += taken;
            self.untold.1 += taken;
            match decoded.map_err(ControlEnd::Frame)? {
                Some(Frame::Received { next }) if self.resumable => {
                    self.log.acknowledged(next).map_err(ControlEnd::Position)?;
                    continue;
                }
                Some(frame) => {
                    self.tell()?;
                    return Ok(Some(frame));
                }
                None => {}
            }
            // Without a frame the decoder has taken all input.
            if std::mem::take(&mut self.drained) {
                return Ok(None);
            }
            let ahead = self.ahead.take();
            if self.asks == Asks::Not && ahead.is_none() {
                return Ok(None);
            }
            match ahead.unwrap_or_else(|| receive(&self.stream, &mut self.input)) {
                Ok(0) => return Err(ControlEnd::Eof),
                Ok(count) => {
                    self.heard = true;
                    self.unread = 0..count;
                    self.drained = count < self.input.len();
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

    /// Whether any bytes have come since this was asked last, be it a part of a frame.
    pub(crate) fn has_heard(&mut self) -> bool {
        std::mem::take(&mut self.heard)
    }

    /// Whether anything has come, or the end; [`Control::receive`] gives it.
    pub(crate) fn look(&mut self) -> bool {
        if self.away || self.position.is_some() || self.ahead.is_some() || !self.unread.is_empty() {
            return true;
        }
        let read = receive(&self.stream, &mut self.input);
        if read == Err(Errno::AGAIN) {
            return false;
        }
        self.ahead = Some(read);
        true
    }

    /// How often the socket is asked from now on.
    pub(crate) fn ask(&mut self, asks: Asks) {
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
    fn tell(&mut self) -> Result<(), ControlEnd> {
        self.untold.0 += 1;
        let due = self.untold.0 >= TELL_FRAMES || self.untold.1 >= TELL_BYTES;
        if due && self.resumable && !self.finished_writing {
            self.untold = (0, 0);
            let next = self.decoder.next_sequence();
            let told = self.log.push(&Frame::Received { next });
            told.map_err(ControlEnd::Encode)?;
        }
        Ok(())
    }

    /// Reads the peer's position on a connection that took another's place; true when frames follow.
    fn receive_position(&mut self) -> Result<bool, ControlEnd> {
        let Some(position) = &mut self.position else {
            return Ok(true);
        };
        while position.have < POSITION_BYTES {
            match receive(&self.stream, &mut position.theirs[position.have..]) {
                Ok(0) => return Err(ControlEnd::Eof),
                Ok(count) => position.have += count,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(ControlEnd::Io(error.into())),
            }
            if position.have == POSITION_BYTES {
                let next = u32::from_le_bytes(position.theirs);
                self.log.rewind(next).map_err(ControlEnd::Position)?;
            }
        }
        if position.is_done() {
            self.position = None;
        }
        Ok(true)
    }

    /// Writes our position; true when frames may follow.
    fn send_position(&mut self) -> bool {
        let ours = self.decoder.next_sequence().to_le_bytes();
        let Some(position) = &mut self.position else {
            return true;
        };
        while position.sent < POSITION_BYTES {
            match send(&self.stream, &ours[position.sent..], SendFlags::NOSIGNAL) {
                Ok(count) if count > 0 => position.sent += count,
                Err(Errno::INTR) => {}
                // A broken stream shows when it is read.
                Ok(_) | Err(_) => return false,
            }
        }
        if position.is_done() {
            self.position = None;
        }
        self.position.is_none()
    }

    /// The connection broke; nothing goes in or out before another one takes its place.
    pub(crate) fn leave(&mut self) {
        self.away = true;
    }

    pub(crate) fn is_away(&self) -> bool {
        self.away
    }

    /// Another connection goes on where the old one broke; that one is closed.
    pub(crate) fn replace(&mut self, stream: TcpStream) {
        self.carried_before = self.carried();
        self.stream = stream;
        self.unread = 0..0;
        self.ahead = None;
        self.drained = false;
        self.decoder.restart();
        self.position = Some(Position::default());
        self.away = false;
        self.broken = false;
    }

    /// Bytes of TCP that went over it and those before it, as far as the kernel tells.
    pub(crate) fn carried(&self) -> TcpCounters {
        let now = tcp_counters(&self.stream).unwrap_or_default();
        TcpCounters {
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
        self.log.held() < MAX_QUEUED
    }

    /// Queues a frame; [`Control::flush`] sends it.
    pub(crate) fn queue(&mut self, frame: &Frame) -> Result<(), ControlEnd> {
        if self.broken && !self.resumable {
            return Ok(());
        }
        self.log.push(frame).map_err(ControlEnd::Encode)
    }

    /// Gives queued bytes to the socket.
    ///
    /// A socket that takes nothing any more is no error here: what the peer said before it closed
    /// may still wait to be read, a goodbye above all. Reading comes to the end of the stream soon.
    pub(crate) fn flush(&mut self) {
        if self.away || !self.send_position() {
            return;
        }
        while !self.broken && !self.log.unwritten().is_empty() {
            match send(&self.stream, self.log.unwritten(), SendFlags::NOSIGNAL) {
                Ok(count) if count > 0 => self.log.wrote(count),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Ok(_) | Err(_) => self.broken = true,
            }
        }
        if self.broken && !self.resumable {
            self.forget();
        }
    }

    /// Bytes wait for the socket to become writable.
    pub(crate) fn wants_write(&self) -> bool {
        let position = self.position.as_ref();
        let positioned = position.is_none_or(|position| position.sent < POSITION_BYTES);
        !self.away && !self.broken && positioned && !self.log.unwritten().is_empty()
    }

    /// Drops what the socket has not taken.
    pub(crate) fn forget(&mut self) {
        self.log.forget();
    }

    /// Reads and drops what still comes, a bounded part of it, so that a peer that never stops sending
    /// holds nobody; `true` once the peer has closed its end.
    pub(crate) fn drain(&mut self) -> bool {
        self.unread = 0..0;
        self.ahead = None;
        for _ in 0..DRAINED_READS {
            match receive(&self.stream, &mut self.input) {
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

/// As the standard library does, but without what that adds to a call made so often: each counts.
fn receive(stream: &TcpStream, into: &mut [u8]) -> rustix::io::Result<usize> {
    recv(stream, into, RecvFlags::empty()).map(|(count, _)| count)
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
