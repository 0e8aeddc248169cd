//! The control connection: frames in and out of one non-blocking stream.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use tcpx_wire::frame::{EncodeError, Frame, FrameDecoder, FrameError, encode};

/// Most bytes queued for the peer before the session is asked for no more frames. Every kind of
/// frame is bounded by a window of its own, so this only limits what lies in user memory.
const MAX_QUEUED: usize = 1 << 20;

/// Bytes asked of the socket at a time.
const READ_BYTES: usize = 64 * 1024;

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
}

/// Framed, non-blocking control stream.
#[derive(Debug)]
pub(crate) struct Control {
    stream: TcpStream,
    decoder: FrameDecoder,
    /// Bytes read and not yet decoded: `input[consumed..]`.
    input: Vec<u8>,
    consumed: usize,
    out: Vec<u8>,
    /// Bytes of `out` that the socket has taken.
    written: usize,
    sequence: u32,
    finished_writing: bool,
    /// The socket takes nothing any more.
    broken: bool,
}

impl Control {
    /// `stream` must be non-blocking; `leftover` are bytes that arrived with the handshake.
    pub(crate) fn new(stream: TcpStream, leftover: &[u8]) -> Self {
        let mut input = Vec::with_capacity(READ_BYTES);
        input.extend_from_slice(leftover);
        Self {
            stream,
            decoder: FrameDecoder::new(),
            input,
            consumed: 0,
            out: Vec::with_capacity(64 * 1024),
            written: 0,
            sequence: 0,
            finished_writing: false,
            broken: false,
        }
    }

    /// The next frame, or `None` when the peer has sent nothing complete.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, ControlEnd> {
        loop {
            let mut rest = &self.input[self.consumed..];
            let decoded = self.decoder.next(&mut rest);
            self.consumed = self.input.len() - rest.len();
            if let Some(frame) = decoded.map_err(ControlEnd::Frame)? {
                return Ok(Some(frame));
            }
            // Without a frame the decoder has taken all input.
            self.input.resize(READ_BYTES, 0);
            self.consumed = 0;
            let read = self.stream.read(&mut self.input);
            self.input.truncate(*read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(ControlEnd::Eof),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ControlEnd::Io(error)),
            }
        }
    }

    /// Room for another frame from the session.
    pub(crate) fn has_room(&self) -> bool {
        self.out.len() - self.written < MAX_QUEUED
    }

    /// Queues a frame; [`Control::flush`] sends it.
    pub(crate) fn queue(&mut self, frame: &Frame) -> Result<(), ControlEnd> {
        if self.broken {
            return Ok(());
        }
        encode(frame, self.sequence, &mut self.out).map_err(ControlEnd::Encode)?;
        self.sequence = self.sequence.wrapping_add(1);
        Ok(())
    }

    /// Gives queued bytes to the socket.
    ///
    /// A socket that takes nothing any more is no error here: what the peer said before it closed
    /// may still wait to be read, a goodbye above all. Reading comes to the end of the stream soon.
    pub(crate) fn flush(&mut self) {
        while self.written < self.out.len() {
            match self.stream.write(&self.out[self.written..]) {
                Ok(count) if count > 0 => self.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => self.broken = true,
            }
            if self.broken {
                break;
            }
        }
        self.forget();
    }

    /// Bytes wait for the socket to become writable.
    pub(crate) fn wants_write(&self) -> bool {
        self.written < self.out.len()
    }

    /// Drops what the socket has not taken.
    pub(crate) fn forget(&mut self) {
        self.out.clear();
        self.written = 0;
    }

    /// Reads and drops what still comes; `true` once the peer has closed its end.
    pub(crate) fn drain(&mut self) -> bool {
        self.input.resize(READ_BYTES, 0);
        self.consumed = 0;
        let ended = loop {
            match self.stream.read(&mut self.input) {
                Ok(0) => break true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break true,
            }
        };
        self.input.clear();
        ended
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

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
