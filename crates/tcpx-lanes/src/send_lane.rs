//! The sending half of a lane: takes the next chunk from its [`Owner`] whenever its socket has
//! room.
//!
//! Where the peer acknowledges, the owner hears how far it has read. Acknowledgements come over a
//! socket of their own: the system resets a connection whose process ends before it has read all
//! that came on it, and drops what it was still to send.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::epoll::EventFlags;
use tcpx_wire::lane_seal::Opener;

use crate::event_loop::{BROKE, Source, Turn};
use crate::receive_lane::{ACKNOWLEDGEMENT_BYTES, SEALED_ACKNOWLEDGEMENT_BYTES};
use crate::socket_calls::{self as calls, Moved};

/// Bytes that a lane may move before the others of its loop get their turn, by default.
pub const TURN_BYTES: usize = 4 << 20;

/// Whose chunks a lane carries. All of its answers are immediate: nothing here waits.
pub trait Owner: Send + Debug {
    /// A chunk; as long as it exists, its memory stays as it is.
    type Chunk: Send + Debug;

    /// The lane's stream.
    fn socket(&self) -> BorrowedFd<'_>;

    /// Where the peer says how far it has read, if it does.
    fn answers(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Bytes that the lane may write before the others of its loop get their turn.
    fn turn_bytes(&self) -> usize {
        TURN_BYTES
    }

    /// A turn begins; whether the lane goes on.
    fn begin(&mut self) -> bool;

    /// A turn finds this chunk begun.
    fn resume(&mut self, _chunk: &mut Self::Chunk) {}

    /// Bytes not acknowledged after which the next chunks are for other lanes.
    fn most_unacked(&self) -> u64 {
        u64::MAX
    }

    /// The next chunk.
    fn next(&mut self) -> NextChunk<Self::Chunk>;

    /// Bytes that a chunk takes in the stream, header and all.
    fn wire_bytes(&self, chunk: &Self::Chunk) -> usize;

    /// Sends what follows the first `done` bytes of a chunk, counted from its header.
    ///
    /// # Errors
    /// The stream is broken.
    fn send(&mut self, chunk: &mut Self::Chunk, done: usize) -> io::Result<Moved>;

    /// The memory of a chunk cannot be read, and nothing of it was sent: takes it, so that the lane
    /// goes on with the next, or gives it back, which ends the lane.
    ///
    /// # Errors
    /// The chunk.
    fn unreadable(&mut self, chunk: Self::Chunk, _cause: &io::Error) -> Result<(), Self::Chunk> {
        Err(chunk)
    }

    /// All of a chunk is in the socket, and ends at this place of the stream.
    fn written(&mut self, chunk: Self::Chunk, end: u64);

    /// The peer has read the stream up to this place.
    fn read_to(&mut self, _place: u64) {}

    /// The lane has found its end, perhaps within a chunk of which so many bytes are in the socket;
    /// [`close`](Self::close) follows.
    fn ended(&mut self, within: Option<(&Self::Chunk, usize)>, cause: io::Error);

    /// The lane is over, perhaps with a chunk that is not all in the socket.
    fn close(&mut self, unwritten: Option<Self::Chunk>);
}

/// What a lane does next.
#[derive(Debug)]
pub enum NextChunk<C> {
    /// It sends this chunk.
    Chunk(C),
    /// It rests until it is resumed.
    Rest,
    /// It ends, once the peer has read everything.
    End,
}

/// The sending half of a lane.
#[derive(Debug)]
pub struct SendLane<O: Owner> {
    owner: O,
    /// The chunk that is being written, and how many of its bytes are.
    current: Option<(O::Chunk, usize)>,
    /// Bytes of chunks that are in the socket to their end.
    sent: u64,
    /// Bytes that the peer has acknowledged.
    read: u64,
    /// Opens acknowledgements, where they are sealed.
    opener: Option<Opener>,
    record: [u8; SEALED_ACKNOWLEDGEMENT_BYTES],
    record_bytes: usize,
}

impl<O: Owner> SendLane<O> {
    /// A lane whose stream is at its first byte, and whose peer seals no acknowledgements.
    pub fn new(owner: O) -> Self {
        Self::opening(owner, None)
    }

    /// A lane whose stream is at its first byte; `opener` opens what the peer acknowledges.
    pub fn opening(owner: O, opener: Option<Opener>) -> Self {
        Self {
            owner,
            current: None,
            sent: 0,
            read: 0,
            opener,
            record: [0; SEALED_ACKNOWLEDGEMENT_BYTES],
            record_bytes: 0,
        }
    }

    /// Its owner.
    pub fn owner(&mut self) -> &mut O {
        &mut self.owner
    }

    /// Makes sure that there is a chunk to write; else how the turn ends.
    fn take(&mut self) -> Option<Turn> {
        if self.current.is_some() {
            return None;
        }
        let unacked = self.sent - self.read;
        if unacked >= self.owner.most_unacked() {
            return Some(Turn::Rest);
        }
        match self.owner.next() {
            NextChunk::Chunk(chunk) => {
                self.current = Some((chunk, 0));
                None
            }
            NextChunk::End if unacked == 0 || self.owner.answers().is_none() => Some(Turn::End),
            NextChunk::Rest | NextChunk::End => Some(Turn::Rest),
        }
    }

    /// Writes some of the current chunk; `None` when the socket is full.
    fn write(&mut self) -> io::Result<Option<usize>> {
        let Some((chunk, done)) = &mut self.current else {
            return Ok(None);
        };
        let bytes = match self.owner.send(chunk, *done) {
            Ok(Moved::Bytes(bytes)) => bytes,
            Ok(Moved::WouldBlock) => return Ok(None),
            Ok(Moved::End) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(cause) if *done == 0 && calls::is_fault(&cause) => {
                return self.leave_out(cause).map(|()| Some(0));
            }
            Err(cause) => return Err(cause),
        };
        *done += bytes;
        let whole = self.owner.wire_bytes(chunk);
        if *done == whole
            && let Some((chunk, _)) = self.current.take()
        {
            self.sent += whole as u64;
            self.owner.written(chunk, self.sent);
        }
        Ok(Some(bytes))
    }

    /// Goes on without the current chunk, of which nothing was sent, if the owner takes it.
    fn leave_out(&mut self, cause: io::Error) -> io::Result<()> {
        let Some((chunk, _)) = self.current.take() else {
            return Ok(());
        };
        self.owner.unreadable(chunk, &cause).map_err(|chunk| {
            self.current = Some((chunk, 0));
            cause
        })
    }

    /// Tells the owner how far the peer has read. Its end is the lane's.
    fn read_acknowledgements(&mut self) -> io::Result<()> {
        let whole = match self.opener {
            None => ACKNOWLEDGEMENT_BYTES,
            Some(_) => SEALED_ACKNOWLEDGEMENT_BYTES,
        };
        while let Some(answers) = self.owner.answers() {
            let rest = &mut self.record[self.record_bytes..whole];
            match calls::receive_bytes(answers, rest)? {
                Moved::WouldBlock => return Ok(()),
                Moved::End => return Err(io::ErrorKind::UnexpectedEof.into()),
                Moved::Bytes(bytes) => self.record_bytes += bytes,
            }
            if self.record_bytes < whole {
                continue;
            }
            self.record_bytes = 0;
            if let Some(opener) = &mut self.opener {
                let opened = opener.open(&mut self.record);
                opened.map_err(|forged| io::Error::new(io::ErrorKind::InvalidData, forged))?;
            }
            let read = self.record.first_chunk().copied();
            let read = u64::from_le_bytes(read.unwrap_or_default());
            if !(self.read..=self.sent).contains(&read) {
                let (before, sent) = (self.read, self.sent);
                return Err(io::Error::other(format!(
                    "the peer has acknowledged {read} bytes, expected {before} to {sent}"
                )));
            }
            self.read = read;
            self.owner.read_to(read);
        }
        Ok(())
    }

    fn steps(&mut self) -> io::Result<Turn> {
        // Until nothing is to be read: the socket is watched for edges. Before the owner says that
        // the lane is over: a peer that was done may have closed another lane first.
        self.read_acknowledgements()?;
        if !self.owner.begin() {
            return Ok(Turn::End);
        }
        if let Some((chunk, _)) = &mut self.current {
            self.owner.resume(chunk);
        }
        let most = self.owner.turn_bytes();
        let mut share = most;
        while share > 0 {
            if self.current.is_none() && share < most {
                self.read_acknowledgements()?;
            }
            if let Some(turn) = self.take() {
                return Ok(turn);
            }
            match self.write()? {
                None => return Ok(Turn::Rest),
                Some(bytes) => share = share.saturating_sub(bytes),
            }
        }
        Ok(Turn::Again)
    }
}

impl<O: Owner> Source for SendLane<O> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.owner.socket()
    }

    fn interest(&self) -> EventFlags {
        EventFlags::OUT
    }

    fn waits_for_it(&self) -> bool {
        self.current.is_some()
    }

    fn answers(&self) -> Option<BorrowedFd<'_>> {
        self.owner.answers()
    }

    fn turn(&mut self) -> Turn {
        self.steps().unwrap_or_else(|cause| {
            let within = self.current.as_ref().map(|(chunk, done)| (chunk, *done));
            self.owner.ended(within, cause);
            Turn::End
        })
    }

    fn broke(&mut self) {
        self.owner.ended(None, io::Error::other(BROKE));
    }

    fn finish(&mut self) {
        let unwritten = self.current.take().map(|(chunk, _)| chunk);
        self.owner.close(unwritten);
    }
}
