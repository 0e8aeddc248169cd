//! Where the chunks of a lane go: to the open windows of its channel.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_lanes::receive_lane::{Answer, End, Progress, ReceiveLane, Target, Violation};
use tcpx_lanes::sealing::ReceiveSeal;
use tcpx_lanes::socket_calls::{self as calls, Moved, Part};
use tcpx_memory::RegionSlice;
use tcpx_wire::chunk_header::ChunkHeader;
use tcpx_wire::lane_seal::Forged;

use super::local::{MemoryOwner, Read, Source};
use super::loss::Lost;
use super::receive_table::{Arrival, Claim, position};
use super::shared::{ChannelShared, LaneSocket};
use crate::error::ChunkPosition;

/// Bytes of a short chunk that are read at a time, into memory that stays in the core's own cache.
const ASIDE: usize = 160 << 10;

thread_local! {
    /// Where a thread reads short chunks to before they go to their slots; empty until there is
    /// one. One for all its lanes: those of each would push each other out of the cache.
    static READ_ASIDE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The receiving half of a lane of a channel.
pub(super) fn receive_lane(
    shared: Arc<ChannelShared>,
    socket: Arc<LaneSocket>,
    seal: ReceiveSeal,
) -> ReceiveLane<OpenWindows> {
    // Control says how far it was read.
    ReceiveLane::sealed(OpenWindows { shared, socket }, seal, None)
}

/// The open windows of a channel, as one of its lanes finds them.
#[derive(Debug)]
pub(super) struct OpenWindows {
    shared: Arc<ChannelShared>,
    socket: Arc<LaneSocket>,
}

/// A chunk in the lane's hands.
#[derive(Debug)]
pub(super) struct Reading {
    claim: Claim,
    /// Its destination, or a pinned slot; `None` until there is one.
    into: Option<RegionSlice>,
    /// Its header, if its payload lies in the peer's memory, and where that is once it was looked
    /// up.
    exposed: Option<(ChunkHeader, Option<Source>)>,
}

impl OpenWindows {
    /// The memory that a chunk's payload goes to, if there is some now.
    fn landing<'a>(
        &self,
        claim: &Claim,
        into: &'a mut Option<RegionSlice>,
    ) -> Option<&'a RegionSlice> {
        if into.is_none() {
            *into = self.shared.landing(claim, self.socket.lane);
        }
        into.as_ref()
    }

    /// So many bytes of payload have come.
    fn count(&self, bytes: usize) {
        let received = &self.shared.counters.bytes_received;
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Copies some of a chunk from where it lies in the peer's memory. That of a GPU the copy
    /// worker copies, as it does from a slot.
    fn copy(&self, reading: &mut Reading, done: usize) -> io::Result<Progress> {
        let Reading {
            claim,
            into,
            exposed: Some((header, source)),
        } = reading
        else {
            return Ok(Progress::Withdrawn);
        };
        let local = &self.shared.parts.local;
        if source.is_none() {
            *source = local.find(header, claim.destination.kind())?;
        }
        let (Some(source), Some(peer)) = (source, &local.peer) else {
            return Ok(Progress::Withdrawn);
        };
        if let MemoryOwner::Gpu(memory) = &source.place {
            let bytes = memory.len();
            *into = Some(memory.clone());
            self.count(bytes);
            return Ok(Progress::Moved(Moved::Bytes(bytes)));
        }
        let Some(into) = self.landing(claim, into) else {
            return Ok(Progress::NoRoom);
        };
        Ok(match peer.read(source, into, done)? {
            Read::LetGo => Progress::Withdrawn,
            Read::Bytes(bytes) => {
                self.count(bytes);
                Progress::Moved(Moved::Bytes(bytes))
            }
        })
    }

    fn receive(
        &self,
        claim: &Claim,
        into: &RegionSlice,
        done: usize,
        behind: &mut [u8],
    ) -> io::Result<Moved> {
        let socket = self.socket.as_fd();
        let left = into.len() - done;
        let staging = &self.shared.parts.staging;
        if !staging.takes_past_caches(&claim.destination, into.len()) {
            let part = Part {
                slice: into,
                from: done,
                len: left,
            };
            return calls::receive(socket, part, behind);
        }
        READ_ASIDE.with_borrow_mut(|aside| {
            aside.resize(ASIDE, 0);
            let aside = &mut aside[..left.min(ASIDE)];
            let behind = match aside.len() == left {
                true => behind,
                false => &mut [],
            };
            let moved = calls::receive_aside(socket, aside, behind)?;
            if let Moved::Bytes(bytes) = moved {
                into.write_past_caches(done, &aside[..bytes.min(aside.len())])
                    .map_err(io::Error::other)?;
            }
            Ok(moved)
        })
    }
}

impl Target for OpenWindows {
    type Claim = Reading;
    const LOW_WATER: usize = 128 << 10;

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn turn_bytes(&self) -> usize {
        self.shared.parts.turn_bytes
    }

    fn takes_exposed(&self) -> bool {
        self.shared.parts.local.peer.is_some()
    }

    fn claim(&mut self, header: &ChunkHeader) -> Result<Answer<Reading>, Violation> {
        let (shared, lane) = (&self.shared, self.socket.lane);
        let arrival = shared.without_holder(|| shared.receive.claim(lane, header))?;
        Ok(match arrival {
            Arrival::Claimed(claim) => Answer::Write(Reading {
                claim,
                into: None,
                exposed: header.is_exposed().then_some((*header, None)),
            }),
            Arrival::Unwanted => Answer::Drain,
            // This lane is woken when the other one has let go.
            Arrival::HeldBy(_) => Answer::Park,
        })
    }

    fn read(
        &mut self,
        reading: &mut Reading,
        done: usize,
        behind: &mut [u8],
    ) -> io::Result<Progress> {
        if reading.claim.window.is_closing() {
            return Ok(Progress::Withdrawn);
        }
        if reading.exposed.is_some() {
            return self.copy(reading, done);
        }
        let Reading { claim, into, .. } = reading;
        let Some(into) = self.landing(claim, into) else {
            return Ok(Progress::NoRoom);
        };
        let moved = match self.receive(claim, into, done, behind) {
            Err(cause) if calls::is_fault(&cause) => {
                let error = self.shared.unmapped("receiving", into);
                self.shared.receive.fail(claim, error);
                self.shared.roster.signal.wake();
                return Ok(Progress::Withdrawn);
            }
            moved => moved?,
        };
        if let Moved::Bytes(bytes) = moved {
            self.count(bytes.min(into.len() - done));
        }
        Ok(Progress::Moved(moved))
    }

    fn place(&mut self, reading: &mut Reading, done: usize, opened: &[u8]) -> io::Result<bool> {
        let Reading { claim, into, .. } = reading;
        let Some(into) = self.landing(claim, into) else {
            return Ok(false);
        };
        let staging = &self.shared.parts.staging;
        let placed = match staging.takes_past_caches(&claim.destination, into.len()) {
            true => into.write_past_caches(done, opened),
            false => into
                .slice(done..done + opened.len())
                .and_then(|part| part.write_from(opened)),
        };
        placed.map_err(io::Error::other)?;
        self.count(opened.len());
        Ok(true)
    }

    fn is_withdrawn(&self, reading: &Reading) -> bool {
        reading.claim.window.is_closing()
    }

    fn complete(&mut self, reading: Reading) {
        let Reading {
            claim,
            into: Some(into),
            exposed,
        } = reading
        else {
            // Bytes were read, so there was memory for them.
            return;
        };
        let mark = exposed.and_then(|(_, source)| match source? {
            Source {
                mark,
                place: MemoryOwner::Gpu(_),
            } => Some(mark),
            _ => None,
        });
        let received = &self.shared.counters.chunks_received;
        received.fetch_add(1, Ordering::Relaxed);
        ChannelShared::deliver(&self.shared, claim, into, mark);
    }

    fn put_back(&mut self, reading: Reading) {
        let Reading { claim, into, .. } = reading;
        drop(into);
        self.shared.receive.put_back(claim);
        self.shared.roster.signal.wake();
    }

    fn dropped(&mut self, bytes: usize) {
        let discarded = &self.shared.counters.bytes_discarded;
        discarded.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn ended(&mut self, end: End) {
        let lane = self.socket.lane;
        let how = match end {
            End::ByPeer => Lost::ByPeer,
            End::Broken { within, cause } => {
                if cause.get_ref().is_some_and(|inner| inner.is::<Forged>()) {
                    let forged = &self.shared.counters.lanes_forged;
                    forged.fetch_add(1, Ordering::Relaxed);
                }
                let position = within.map(|(header, done)| ChunkPosition {
                    done: done as u64,
                    ..position(&header)
                });
                Lost::broken("receiving", position, cause)
            }
            End::Violation(violation) => return self.shared.protocol_error(lane, violation),
        };
        self.shared.lane_lost(lane, how);
    }

    fn close(&mut self) {
        // Another lane may wait for what this one had.
        self.shared.wake_waiting();
        self.shared.half_gone(self.socket.lane);
    }
}
