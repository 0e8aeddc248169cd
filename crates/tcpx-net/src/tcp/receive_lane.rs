//! The receiving half of a lane: reads a header, finds the window that it names, and reads the payload
//! to where it belongs.

mod gathering;

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::event::epoll::EventFlags;
use tcpx_lanes::event_loop::{Source, Turn};
use tcpx_lanes::socket_calls::{self as io, Moved, Part};
use tcpx_memory::RegionSlice;
use tcpx_wire::chunk_header::ChunkHeader;

use super::loss::Lost;
use super::receive_table::{Arrival, Claim, position};
use super::shared::{LaneSocket, Shared, Violation};
use super::staging::Landing;
use crate::error::ChunkPosition;
use gathering::Gathering;

/// Bytes that a lane may read before the others of its loop get their turn.
const TURN_BYTES: usize = 4 << 20;

/// Bytes of a short chunk that are read at a time, into memory that stays in the core's own cache.
const ASIDE: usize = 160 << 10;

thread_local! {
    /// Where a thread reads short chunks to before they go to their slots; empty until there is one. One for all
    /// its lanes: those of each would push each other out of the cache.
    static READ_ASIDE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// In the middle of a payload the lane is not woken for less than this.
const LOW_WATER: usize = 128 << 10;

#[derive(Debug)]
pub(super) struct ReceiveLane {
    shared: Arc<Shared>,
    socket: Arc<LaneSocket>,
    header: [u8; ChunkHeader::BYTES],
    /// Bytes of `header` that have arrived.
    have: usize,
    state: State,
    /// Bytes that must wait in the socket before the lane is woken.
    low_water: usize,
    gathering: Gathering,
}

#[derive(Debug)]
enum State {
    /// Reads a header.
    Header,
    /// Another lane has the chunk, and is to let go of it.
    Waiting(ChunkHeader),
    /// No pinned slot is free.
    Unplaced(ChunkHeader, Claim),
    /// Reads payload.
    Payload {
        header: ChunkHeader,
        claim: Claim,
        into: RegionSlice,
        done: usize,
    },
    /// Reads payload that nobody wants.
    Unwanted { header: ChunkHeader, left: usize },
}

/// What one step of the lane came to.
enum Step {
    Moved(usize),
    Rest,
    End,
}

impl ReceiveLane {
    pub(super) fn new(shared: Arc<Shared>, socket: Arc<LaneSocket>) -> Self {
        let header = [0; ChunkHeader::BYTES];
        Self {
            shared,
            socket,
            header,
            have: 0,
            state: State::Header,
            low_water: 1,
            gathering: Gathering::default(),
        }
    }

    fn step(&mut self) -> Step {
        match std::mem::replace(&mut self.state, State::Header) {
            State::Header => self.read_header(),
            State::Waiting(header) => self.arrive(header),
            State::Unplaced(header, claim) => self.place(header, claim),
            State::Payload {
                header,
                claim,
                into,
                done,
            } => self.read_payload(header, claim, into, done),
            State::Unwanted { header, left } => self.drop_payload(header, left),
        }
    }

    /// Before the lane rests after a turn that moved so many bytes: has the kernel wake it for a useful number of
    /// them. If so many have come meanwhile, setting the mark wakes the lane too.
    fn rest(&mut self, moved: usize) -> Turn {
        let tells = match &self.state {
            State::Waiting(_) | State::Unplaced(..) => self.gathering.rest_for_owner(),
            State::Header | State::Payload { .. } | State::Unwanted { .. } => {
                self.gathering.rest(moved >= self.low_water, Instant::now)
            }
        };
        if tells {
            self.shared.wakers.signal.wake();
        }
        let wanted = match &self.state {
            State::Payload { into, done, .. } => {
                let more = self.gathering.low_water();
                more.unwrap_or_else(|| (into.len() - done).min(LOW_WATER))
            }
            State::Header => self.gathering.low_water().unwrap_or(1),
            State::Waiting(_) | State::Unplaced(..) | State::Unwanted { .. } => 1,
        };
        if wanted != self.low_water && io::set_low_water(self.socket.as_fd(), wanted).is_ok() {
            self.low_water = wanted;
        }
        match self.gathering.naps() {
            true => Turn::Nap,
            false => Turn::Rest,
        }
    }

    fn read_header(&mut self) -> Step {
        if self.have < ChunkHeader::BYTES {
            match io::receive_bytes(self.socket.as_fd(), &mut self.header[self.have..]) {
                Ok(Moved::Bytes(bytes)) => self.have += bytes,
                Ok(Moved::WouldBlock) => return Step::Rest,
                Ok(Moved::End) if self.have == 0 => {
                    self.shared.lane_lost(self.socket.lane, Lost::ByPeer);
                    return Step::End;
                }
                Ok(Moved::End) => return self.lost(None, ended_early()),
                Err(error) => return self.lost(None, error),
            }
        }
        if self.have < ChunkHeader::BYTES {
            return Step::Moved(0);
        }
        self.have = 0;
        match ChunkHeader::decode(&self.header) {
            Ok(header) => {
                if header.behind > 0 && !self.shared.tells_behind {
                    return self.violation(Violation {
                        expected: "a chunk that says nothing of those behind it".to_owned(),
                        arrived: format!(
                            "{} units behind chunk {} of window {}",
                            header.behind, header.index, header.window
                        ),
                        position: Some(at(&header, 0)),
                    });
                }
                self.gathering.begin(header.bytes_behind());
                self.arrive(header)
            }
            Err(error) => self.violation(Violation {
                expected: "a chunk header".to_owned(),
                arrived: format!("something else ({error})"),
                position: None,
            }),
        }
    }

    /// A header is complete: finds its window.
    fn arrive(&mut self, header: ChunkHeader) -> Step {
        match self.shared.receive.claim(self.socket.lane, &header) {
            Ok(Arrival::Claimed(claim)) => self.place(header, claim),
            Ok(Arrival::Unwanted) => {
                self.state = State::Unwanted {
                    header,
                    left: header.length as usize,
                };
                Step::Moved(0)
            }
            Ok(Arrival::HeldBy(holder)) => {
                // Its sender gave that lane up. Nothing of it may be written once this one begins,
                // so it ends first; this lane is woken when it has.
                self.shared.lane_lost(holder, Lost::Superseded);
                self.state = State::Waiting(header);
                Step::Rest
            }
            Err(violation) => self.violation(violation),
        }
    }

    /// Finds the memory that the payload is read into.
    fn place(&mut self, header: ChunkHeader, claim: Claim) -> Step {
        if claim.window.is_closing() {
            return self.let_go(header, claim, 0);
        }
        match self.shared.landing(&claim, self.socket.lane) {
            Landing::At(into) => {
                self.state = State::Payload {
                    header,
                    claim,
                    into,
                    done: 0,
                };
                Step::Moved(0)
            }
            Landing::Later => {
                self.state = State::Unplaced(header, claim);
                Step::Rest
            }
        }
    }

    fn read_payload(
        &mut self,
        header: ChunkHeader,
        claim: Claim,
        into: RegionSlice,
        done: usize,
    ) -> Step {
        if claim.window.is_closing() {
            drop(into);
            return self.let_go(header, claim, done);
        }
        let left = into.len() - done;
        let moved = self.receive(&claim, &into, done);
        let bytes = match moved {
            Ok(Moved::Bytes(bytes)) => bytes,
            other => {
                self.state = State::Payload {
                    header,
                    claim,
                    into,
                    done,
                };
                return match other {
                    Ok(Moved::WouldBlock | Moved::Bytes(_)) => Step::Rest,
                    Ok(Moved::End) => self.lost(Some(at(&header, done)), ended_early()),
                    Err(error) => self.lost(Some(at(&header, done)), error),
                };
            }
        };
        let counters = &self.shared.counters;
        counters.wire_calls.fetch_add(1, Ordering::Relaxed);
        counters
            .bytes_received
            .fetch_add(bytes.min(left) as u64, Ordering::Relaxed);
        if bytes < left {
            self.state = State::Payload {
                header,
                claim,
                into,
                done: done + bytes,
            };
        } else {
            self.have = bytes - left;
            counters.chunks_received.fetch_add(1, Ordering::Relaxed);
            let bytes = into.len();
            let later = || self.gathering.holds(bytes, Instant::now);
            if Shared::deliver(&self.shared, claim, into, later) {
                self.gathering.told();
            }
        }
        Step::Moved(bytes)
    }

    /// Reads what follows the first `done` bytes of a chunk, and behind its end the next header.
    fn receive(
        &mut self,
        claim: &Claim,
        into: &RegionSlice,
        done: usize,
    ) -> std::io::Result<Moved> {
        let socket = self.socket.as_fd();
        let left = into.len() - done;
        let staging = &self.shared.staging;
        if !staging.takes_past_caches(&claim.destination, into.len()) {
            let part = Part {
                slice: into,
                from: done,
                len: left,
            };
            return io::receive(socket, part, &mut self.header);
        }
        let header = self.header.as_mut_slice();
        READ_ASIDE.with_borrow_mut(|aside| {
            aside.resize(ASIDE, 0);
            let aside = &mut aside[..left.min(ASIDE)];
            let behind = match aside.len() == left {
                true => header,
                false => &mut [],
            };
            let moved = io::receive_aside(socket, aside, behind)?;
            if let Moved::Bytes(bytes) = moved {
                into.write_past_caches(done, &aside[..bytes.min(aside.len())])
                    .map_err(std::io::Error::other)?;
            }
            Ok(moved)
        })
    }

    fn drop_payload(&mut self, header: ChunkHeader, left: usize) -> Step {
        let moved = io::discard(self.socket.as_fd(), left);
        let done = header.length as usize - left;
        let bytes = match moved {
            Ok(Moved::Bytes(bytes)) => bytes,
            Ok(Moved::WouldBlock) => {
                self.state = State::Unwanted { header, left };
                return Step::Rest;
            }
            Ok(Moved::End) => return self.lost(Some(at(&header, done)), ended_early()),
            Err(error) => return self.lost(Some(at(&header, done)), error),
        };
        self.shared
            .counters
            .bytes_discarded
            .fetch_add(bytes as u64, Ordering::Relaxed);
        if bytes < left {
            self.state = State::Unwanted {
                header,
                left: left - bytes,
            };
        }
        Step::Moved(bytes)
    }

    /// Gives up a chunk whose window was closed; the rest of it is read and dropped.
    fn let_go(&mut self, header: ChunkHeader, claim: Claim, done: usize) -> Step {
        self.put_back(claim);
        let left = header.length as usize - done;
        self.state = State::Unwanted { header, left };
        Step::Moved(0)
    }

    fn put_back(&self, claim: Claim) {
        self.shared.receive.put_back(claim);
        self.shared.wakers.signal.wake();
    }

    /// A lane that does not read, because its chunk has no place yet, hears nothing of its end either:
    /// asks whether the rest of the chunk can still come.
    fn dies_waiting(&self) -> Option<Step> {
        let header = match &self.state {
            State::Waiting(header) | State::Unplaced(header, _) => header,
            State::Header | State::Payload { .. } | State::Unwanted { .. } => return None,
        };
        let cause = match io::ended(self.socket.as_fd()) {
            Ok(io::Ended::Not) => return None,
            // Everything that came before is in the socket, and may be enough.
            Ok(io::Ended::ByPeer { waiting }) if waiting >= header.length as usize => return None,
            Ok(io::Ended::ByPeer { .. }) => ended_early(),
            Ok(io::Ended::Broken(cause)) | Err(cause) => cause,
        };
        Some(self.lost(Some(at(header, 0)), cause))
    }

    fn violation(&self, violation: Violation) -> Step {
        self.shared.protocol_error(self.socket.lane, violation);
        Step::End
    }

    fn lost(&self, position: Option<ChunkPosition>, cause: std::io::Error) -> Step {
        self.shared
            .lane_lost(self.socket.lane, Lost::broken("receiving", position, cause));
        Step::End
    }
}

impl Source for ReceiveLane {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn interest(&self) -> EventFlags {
        EventFlags::IN | EventFlags::RDHUP
    }

    fn turn(&mut self) -> Turn {
        let mut share = TURN_BYTES;
        while share > 0 {
            let step = match self.step() {
                Step::Rest => self.dies_waiting().unwrap_or(Step::Rest),
                step => step,
            };
            match step {
                Step::Moved(bytes) => share = share.saturating_sub(bytes),
                Step::Rest => return self.rest(TURN_BYTES - share),
                Step::End => return Turn::End,
            }
        }
        if self.gathering.goes_on(Instant::now) {
            self.shared.wakers.signal.wake();
        }
        Turn::Again
    }

    fn finish(&mut self) {
        let claim = match std::mem::replace(&mut self.state, State::Header) {
            State::Unplaced(_, claim) => Some(claim),
            State::Payload { claim, into, .. } => {
                drop(into);
                Some(claim)
            }
            State::Header | State::Waiting(_) | State::Unwanted { .. } => None,
        };
        if let Some(claim) = claim {
            self.put_back(claim);
        }
        // Another lane may wait for what this one had.
        self.shared.wake_waiting();
        self.shared.half_gone(self.socket.lane);
    }
}

fn at(header: &ChunkHeader, done: usize) -> ChunkPosition {
    ChunkPosition {
        done: done as u64,
        ..position(header)
    }
}

fn ended_early() -> std::io::Error {
    std::io::Error::new(
        std::io::ErrorKind::UnexpectedEof,
        "the peer closed the lane in the middle of a chunk",
    )
}
