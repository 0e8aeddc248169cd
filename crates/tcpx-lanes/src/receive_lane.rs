//! The receiving half of a lane: reads a header, asks its [`Target`] where the payload goes, and
//! reads it there.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::epoll::EventFlags;
use tcpx_wire::chunk_header::ChunkHeader;
use tcpx_wire::lane_seal::{HEADER_BYTES, Sealer, TAG_BYTES};

use crate::event_loop::{BROKE, Source, Turn};
use crate::sealing::{NextRecord, ReceiveSeal};
use crate::send_lane::TURN_BYTES;
use crate::socket_calls::{self as calls, Moved};

/// In the middle of many chunks the lane acknowledges no fewer bytes than this.
const ACKNOWLEDGED_TOGETHER: u64 = 256 << 10;
/// Bytes of an acknowledgement: how many bytes of the stream's chunks were read, to the end of a
/// chunk.
pub const ACKNOWLEDGEMENT_BYTES: usize = 8;
/// Bytes of one where the lane is sealed.
pub(crate) const SEALED_ACKNOWLEDGEMENT_BYTES: usize = ACKNOWLEDGEMENT_BYTES + TAG_BYTES;

/// Where the chunks of a lane go. All of its answers are immediate: nothing here waits.
pub trait Target: Send + Debug {
    /// The right to write the payload of one chunk.
    type Claim: Send + Debug;

    /// In the middle of a payload the lane is not woken for fewer bytes than this.
    const LOW_WATER: usize;

    /// The lane's stream.
    fn socket(&self) -> BorrowedFd<'_>;

    /// Where the lane tells the sender how far it has read, if it does: chunks are kept until then.
    /// Nothing else goes over this socket.
    fn answers(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Bytes that the lane may read before the others of its loop get their turn.
    fn turn_bytes(&self) -> usize {
        TURN_BYTES
    }

    /// Whether the peer may expose chunks: their payload is [read](Self::read) where it lies, and
    /// nothing of it comes from the stream.
    fn takes_exposed(&self) -> bool {
        false
    }

    /// Whose chunk this is; asked once more behind [`Answer::Park`].
    ///
    /// # Errors
    /// The peer broke the protocol; the lane ends.
    fn claim(&mut self, header: &ChunkHeader) -> Result<Answer<Self::Claim>, Violation>;

    /// Reads from the stream, or of an exposed chunk where it lies, what follows the first `done`
    /// bytes of the payload, and from the stream behind its end into `behind`.
    ///
    /// # Errors
    /// The stream is broken.
    fn read(
        &mut self,
        claim: &mut Self::Claim,
        done: usize,
        behind: &mut [u8],
    ) -> io::Result<Progress>;

    /// On a lane whose payload is sealed, in place of [`read`](Self::read): writes behind the first
    /// `done` bytes of the payload what the peer sealed. `false` while there is no memory for it:
    /// resume the lane when there is.
    ///
    /// # Errors
    /// It cannot be written there.
    fn place(
        &mut self,
        _claim: &mut Self::Claim,
        _done: usize,
        _opened: &[u8],
    ) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// On a lane whose payload is sealed: whether the claim was withdrawn.
    fn is_withdrawn(&self, _claim: &Self::Claim) -> bool {
        false
    }

    /// All of the payload was read.
    fn complete(&mut self, claim: Self::Claim);

    /// The lane ends in the middle of the chunk, which may come again over another one; or the
    /// claim was withdrawn, and the rest of the chunk is read and dropped.
    fn put_back(&mut self, claim: Self::Claim);

    /// So many bytes that nobody wants were read.
    fn dropped(&mut self, _bytes: usize) {}

    /// The lane has found its end; [`close`](Self::close) follows.
    fn ended(&mut self, end: End);

    /// Nothing of the lane touches a destination any more.
    fn close(&mut self);
}

/// What becomes of a chunk.
#[derive(Debug)]
pub enum Answer<C> {
    /// It is read to where the claim says.
    Write(C),
    /// It is not known yet, or another lane that holds it must let go first. Resume the lane when
    /// that has changed.
    Park,
    /// Nobody wants it: it is read and dropped.
    Drain,
}

/// What [`Target::read`] came to.
#[derive(Debug)]
pub enum Progress {
    /// The call's result.
    Moved(Moved),
    /// There is no memory to read to now. Resume the lane when there is.
    NoRoom,
    /// The claim was withdrawn.
    Withdrawn,
}

/// What the peer did against the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// What the protocol says.
    pub expected: String,
    /// What arrived.
    pub arrived: String,
    /// The chunk, if it was one.
    pub chunk: Option<ChunkHeader>,
}

/// How a lane ends.
#[derive(Debug)]
pub enum End {
    /// The peer closed it between two chunks.
    ByPeer,
    /// Its stream failed.
    Broken {
        /// The chunk that was arriving, and how many bytes of its payload had.
        within: Option<(ChunkHeader, usize)>,
        /// Why.
        cause: io::Error,
    },
    /// The peer broke the protocol.
    Violation(Violation),
}

/// The receiving half of a lane.
#[derive(Debug)]
pub struct ReceiveLane<T: Target> {
    target: T,
    seal: ReceiveSeal,
    /// Seals acknowledgements.
    sealer: Option<Sealer>,
    header: [u8; HEADER_BYTES],
    /// Bytes of `header` that have arrived.
    have: usize,
    state: State<T::Claim>,
    /// Bytes that must wait in the socket before the lane is woken.
    low_water: usize,
    /// Bytes of chunks that were read to their end.
    read: u64,
    /// Those that the sender was told of.
    acknowledged: u64,
}

#[derive(Debug)]
enum State<C> {
    /// Reads a header.
    Header,
    /// The chunk's place is not known yet.
    Parked(ChunkHeader),
    /// Reads payload, which without a claim nobody wants; `waits`: there is no memory for it now.
    Payload {
        header: ChunkHeader,
        claim: Option<C>,
        done: usize,
        waits: bool,
    },
}

/// What one step of the lane came to.
enum Step {
    Moved(usize),
    Rest,
    End(End),
}

impl<T: Target> ReceiveLane<T> {
    /// A lane whose stream is at its first byte, and of which nothing is sealed.
    pub fn new(target: T) -> Self {
        Self::sealed(target, ReceiveSeal::Plain, None)
    }

    /// A lane whose stream is at its first byte; `sealer` seals what it acknowledges.
    pub fn sealed(target: T, seal: ReceiveSeal, sealer: Option<Sealer>) -> Self {
        Self {
            target,
            seal,
            sealer,
            header: [0; HEADER_BYTES],
            have: 0,
            state: State::Header,
            low_water: 1,
            read: 0,
            acknowledged: 0,
        }
    }

    fn step(&mut self) -> Result<Step, Violation> {
        match std::mem::replace(&mut self.state, State::Header) {
            State::Header => self.read_header(),
            State::Parked(header) => self.arrive(header),
            State::Payload {
                header,
                claim: None,
                ..
            } if header.is_exposed() => Ok(self.complete(header, None, 0)),
            State::Payload {
                header,
                claim,
                done,
                ..
            } if self.seal.seals_payload() && !header.is_exposed() => {
                Ok(self.open_payload(header, claim, done))
            }
            State::Payload {
                header,
                claim,
                done,
                ..
            } => Ok(self.read_payload(header, claim, done)),
        }
    }

    /// Reads some of the first `bytes` of the header; `None` when they are there.
    fn fill(&mut self, bytes: usize) -> Option<Step> {
        if self.have < bytes {
            let rest = &mut self.header[self.have..bytes];
            match calls::receive_bytes(self.target.socket(), rest) {
                Ok(Moved::Bytes(bytes)) => self.have += bytes,
                Ok(Moved::WouldBlock) => return Some(Step::Rest),
                Ok(Moved::End) if self.have == 0 => return Some(Step::End(End::ByPeer)),
                Ok(Moved::End) => return Some(broken(None, ended_early())),
                Err(error) => return Some(broken(None, error)),
            }
        }
        if self.have < bytes {
            return Some(Step::Moved(0));
        }
        self.have = 0;
        None
    }

    fn read_header(&mut self) -> Result<Step, Violation> {
        if let Some(step) = self.fill(self.seal.header_bytes()) {
            return Ok(step);
        }
        let header = match self.seal.open_header(&mut self.header) {
            Ok(header) => header,
            Err(forged) => {
                return Ok(broken(
                    None,
                    io::Error::new(io::ErrorKind::InvalidData, forged),
                ));
            }
        };
        match ChunkHeader::decode(&header) {
            Ok(header) => self.arrive(header),
            Err(error) => Err(Violation {
                expected: "a chunk header".to_owned(),
                arrived: format!("something else ({error})"),
                chunk: None,
            }),
        }
    }

    /// A header is complete: finds where its payload goes.
    fn arrive(&mut self, header: ChunkHeader) -> Result<Step, Violation> {
        if header.is_exposed() && !self.target.takes_exposed() {
            return Err(Violation {
                expected: "a chunk whose payload follows".to_owned(),
                arrived: "one whose payload lies in the sender's memory".to_owned(),
                chunk: Some(header),
            });
        }
        let claim = match self.target.claim(&header)? {
            Answer::Write(claim) => Some(claim),
            Answer::Drain => None,
            Answer::Park => {
                self.state = State::Parked(header);
                return Ok(Step::Rest);
            }
        };
        Ok(self.go_on(header, claim, 0, false))
    }

    /// The lane is at this place of a payload.
    fn go_on(
        &mut self,
        header: ChunkHeader,
        claim: Option<T::Claim>,
        done: usize,
        waits: bool,
    ) -> Step {
        self.state = State::Payload {
            header,
            claim,
            done,
            waits,
        };
        Step::Moved(0)
    }

    /// The claim was withdrawn: the rest of the payload is dropped.
    fn release(&mut self, header: ChunkHeader, claim: Option<T::Claim>, done: usize) -> Step {
        if let Some(claim) = claim {
            self.target.put_back(claim);
        }
        self.go_on(header, None, done, false)
    }

    fn read_payload(
        &mut self,
        header: ChunkHeader,
        mut claim: Option<T::Claim>,
        done: usize,
    ) -> Step {
        let left = header.length as usize - done;
        let read = match &mut claim {
            Some(claim) => {
                let behind = match header.is_exposed() {
                    true => 0,
                    false => self.seal.header_bytes(),
                };
                self.target.read(claim, done, &mut self.header[..behind])
            }
            None => calls::discard(self.target.socket(), left).map(Progress::Moved),
        };
        let (bytes, waits) = match read {
            Ok(Progress::Moved(Moved::Bytes(bytes))) => (bytes, false),
            Ok(Progress::Withdrawn) => return self.release(header, claim, done),
            Ok(Progress::NoRoom) => (0, true),
            _ => (0, false),
        };
        if claim.is_none() {
            self.target.dropped(bytes);
        }
        if bytes >= left {
            self.have = bytes - left;
            return self.complete(header, claim, bytes);
        }
        self.go_on(header, claim, done + bytes, waits);
        match read {
            Ok(Progress::Moved(Moved::End)) => broken(Some((header, done)), ended_early()),
            Err(error) => broken(Some((header, done)), error),
            _ if bytes > 0 => Step::Moved(bytes),
            _ => Step::Rest,
        }
    }

    /// A chunk's payload was all read, after `bytes` more were, and is at its place if somebody
    /// wants it.
    fn complete(&mut self, header: ChunkHeader, claim: Option<T::Claim>, bytes: usize) -> Step {
        if let Some(claim) = claim {
            self.target.complete(claim);
        }
        // Behind that: who hears of it may end, and the receiver must not take its end for a loss.
        self.acknowledge(&header);
        Step::Moved(bytes)
    }

    /// As [`read_payload`](Self::read_payload), of sealed payload: what nobody wants is opened all
    /// the same, so that what follows is.
    fn open_payload(
        &mut self,
        header: ChunkHeader,
        mut claim: Option<T::Claim>,
        done: usize,
    ) -> Step {
        let left = header.length as usize - done;
        if claim
            .as_ref()
            .is_some_and(|claim| self.target.is_withdrawn(claim))
        {
            return self.release(header, claim, done);
        }
        let socket = self.target.socket();
        let (mut now_done, mut waits) = (done, false);
        let step = match self.seal.next(socket, left, &mut self.header) {
            Ok(NextRecord::Opened(opened)) => {
                let placing = match &mut claim {
                    Some(claim) => self.target.place(claim, done, opened),
                    None => {
                        self.target.dropped(opened.len());
                        Ok(true)
                    }
                };
                match placing {
                    Ok(true) => {
                        now_done += opened.len();
                        self.seal.take();
                        Step::Moved(0)
                    }
                    Ok(false) => {
                        waits = true;
                        Step::Rest
                    }
                    Err(error) => broken(Some((header, done)), error),
                }
            }
            Ok(NextRecord::Came { bytes, behind }) => {
                self.have = behind;
                Step::Moved(bytes)
            }
            Ok(NextRecord::WouldBlock) => Step::Rest,
            Ok(NextRecord::End) => broken(Some((header, done)), ended_early()),
            Err(error) => broken(Some((header, done)), error),
        };
        if now_done == header.length as usize {
            return self.complete(header, claim, 0);
        }
        self.go_on(header, claim, now_done, waits);
        step
    }

    /// A chunk was read to its end, of which the sender hears now if it was told of little lately,
    /// else before the lane rests.
    fn acknowledge(&mut self, header: &ChunkHeader) {
        let bytes = match header.is_exposed() {
            true => self.seal.header_bytes(),
            false => self.seal.wire_bytes(header.length as usize),
        };
        self.read += bytes as u64;
        if self.read - self.acknowledged >= ACKNOWLEDGED_TOGETHER {
            self.tell_sender();
        }
    }

    fn tell_sender(&mut self) {
        if self.acknowledged == self.read {
            return;
        }
        self.acknowledged = self.read;
        let Some(answers) = self.target.answers() else {
            return;
        };
        let mut record = [0; SEALED_ACKNOWLEDGEMENT_BYTES];
        let (text, tag) = record.split_at_mut(ACKNOWLEDGEMENT_BYTES);
        text.copy_from_slice(&self.read.to_le_bytes());
        let bytes = match &mut self.sealer {
            None => ACKNOWLEDGEMENT_BYTES,
            Some(sealer) => {
                tag.copy_from_slice(&sealer.seal(text));
                SEALED_ACKNOWLEDGEMENT_BYTES
            }
        };
        // Those of the chunks that a sender leaves unacknowledged fit any buffer. One that is gone,
        // or that has lost this way back, ends the lane's stream itself, behind all that it has
        // sent.
        let _ = calls::send_bytes(answers, &record[..bytes]);
    }

    /// Before the lane rests: has the kernel wake it for a useful number of bytes. If so many have
    /// come meanwhile, setting the mark wakes the lane too.
    fn rest(&mut self) -> Turn {
        let wanted = match &self.state {
            State::Payload {
                header,
                done,
                waits: false,
                ..
            } => self.wire_left(header, *done).clamp(1, T::LOW_WATER),
            _ => 1,
        };
        if wanted != self.low_water && calls::set_low_water(self.target.socket(), wanted).is_ok() {
            self.low_water = wanted;
        }
        Turn::Rest
    }

    fn end(&mut self, end: End) -> Turn {
        self.target.ended(end);
        Turn::End
    }

    /// The chunk that the lane does not read because it has no place now, and how much of it was
    /// read.
    fn waiting(&self) -> Option<(ChunkHeader, usize)> {
        match &self.state {
            State::Parked(header) => Some((*header, 0)),
            State::Payload {
                header,
                done,
                waits: true,
                ..
            } => Some((*header, *done)),
            _ => None,
        }
    }

    /// Bytes that are still to come from the stream for a chunk of which `done` bytes are at their
    /// place.
    fn wire_left(&self, header: &ChunkHeader, done: usize) -> usize {
        match header.is_exposed() {
            true => 0,
            false => self.seal.wire_left(header.length as usize - done),
        }
    }

    /// A lane that does not read, because its chunk has no place yet, hears nothing of its end
    /// either: asks whether the rest of the chunk can still come.
    fn dies_waiting(&self) -> Option<Step> {
        let (header, done) = self.waiting()?;
        let left = self.wire_left(&header, done);
        let cause = match calls::ended(self.target.socket()) {
            Ok(calls::Ended::Not) => return None,
            // Everything that came before is in the socket, and may be enough.
            Ok(calls::Ended::ByPeer { waiting }) if waiting >= left => return None,
            Ok(calls::Ended::ByPeer { .. }) => ended_early(),
            Ok(calls::Ended::Broken(cause)) | Err(cause) => cause,
        };
        Some(broken(Some((header, done)), cause))
    }
}

fn broken(within: Option<(ChunkHeader, usize)>, cause: io::Error) -> Step {
    Step::End(End::Broken { within, cause })
}

fn ended_early() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "the peer closed the lane in the middle of a chunk",
    )
}

impl<T: Target> Source for ReceiveLane<T> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.target.socket()
    }

    fn interest(&self) -> EventFlags {
        EventFlags::IN | EventFlags::RDHUP
    }

    fn turn(&mut self) -> Turn {
        let mut share = self.target.turn_bytes();
        while share > 0 {
            let step = match self.step() {
                Ok(Step::Rest) => self.dies_waiting().unwrap_or(Step::Rest),
                Ok(step) => step,
                Err(violation) => Step::End(End::Violation(violation)),
            };
            match step {
                Step::Moved(bytes) => share = share.saturating_sub(bytes),
                Step::Rest => {
                    self.tell_sender();
                    return self.rest();
                }
                Step::End(end) => return self.end(end),
            }
        }
        Turn::Again
    }

    fn broke(&mut self) {
        let cause = io::Error::other(BROKE);
        self.target.ended(End::Broken {
            within: None,
            cause,
        });
    }

    fn finish(&mut self) {
        // Whose comm has everything may close right after, and its process end.
        self.tell_sender();
        let state = std::mem::replace(&mut self.state, State::Header);
        if let State::Payload {
            claim: Some(claim), ..
        } = state
        {
            self.target.put_back(claim);
        }
        self.target.close();
    }
}
