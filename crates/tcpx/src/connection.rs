//! A connection to one peer: where sends and receives start.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tcpx_lanes::lock;
use tcpx_memory::{Access, After, Fence, InContext, Lease, MemoryKind, RegionSlice};
use tcpx_net::{ChannelStats, PeerRead};
use tcpx_wire::frame::{Destination, Extent, Notified, TimeLeft};
use tcpx_wire::session::{
    Deadlines, GetRequest, OperationId, OperationKind, ReceiveRequest, SendRequest,
};
use tcpx_wire::{Level, PieceList, Place, Role, Tag};

mod one_sided;
mod patience;
mod shared;
mod told;
mod watching;

use crate::core::{Core, Operation, Readers};
use crate::error::Error;
use crate::event::Event;
use crate::transfer::{Transfer, TransferState};

pub use one_sided::{Batch, PreparedBatch};
pub(crate) use patience::Patience;
pub(crate) use shared::{Requests, Shared};

/// How long a close waits for memory that is let go of when its time is over.
const LETTING_GO: Duration = Duration::from_millis(100);

/// An authenticated connection with its data channels. Clones are the same connection.
///
/// When the last clone and the last [`Transfer`] are dropped, the connection closes in the
/// background as [`Connection::close`] does, but nobody learns how that went.
#[derive(Clone)]
pub struct Connection {
    handle: Arc<Handle>,
}

/// What the program holds of a connection, in [`Connection`]s and [`Transfer`]s. The engine keeps
/// the rest alive until nothing points at anybody's memory.
pub(crate) struct Handle(pub(crate) Arc<Shared>);

impl Connection {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self {
            handle: Arc::new(Handle(shared)),
        }
    }

    /// A send of `slice`; it runs from [`Request::start`] on.
    pub fn send(&self, slice: RegionSlice, tag: u64) -> Request<'_> {
        Request::new(self, OperationKind::Send, slice, tag)
    }

    /// A receive into `slice`, which must be at least as long as the matching send; it runs
    /// from [`Request::start`] on.
    ///
    /// By default it fails after 30 s without its send: a side that may wait for longer sets
    /// [`Request::deadlines`], or those of the [`Options`](crate::Options).
    ///
    /// Behind a shorter message the slice keeps what it held, unless a receive of the tag that was
    /// started before ended without a message: then bytes of a later message may stand there, which
    /// had begun to come and went elsewhere.
    pub fn receive(&self, slice: RegionSlice, tag: u64) -> Request<'_> {
        Request::new(self, OperationKind::Receive, slice, tag)
    }

    /// Who is at the other end, and what both sides agreed on.
    pub fn peer(&self) -> &PeerInfo {
        &self.handle.0.peer
    }

    /// Which path the bytes take, and why, in one line for a person. It changes when a
    /// channel has to take another path: then it is that of the last one that did.
    pub fn path(&self) -> String {
        self.handle.0.path()
    }

    /// The congestion control of the data channels' sockets at this end, as the kernel names it;
    /// `None` where the channels have no TCP sockets of ours, or where the engine hangs inside a
    /// plugin.
    pub fn congestion_control(&self) -> Option<String> {
        let core = self.handle.0.lock_in_time().ok()?;
        core.channels.congestion_control()
    }

    /// Counters of all data channels, summed; while the engine hangs inside a plugin, as they were
    /// when this was last asked.
    pub fn statistics(&self) -> ChannelStats {
        self.handle.0.statistics()
    }

    /// Makes all the progress that can be made now and never waits; whether there may be more to do
    /// at once. For [`ProgressMode::Manual`](crate::ProgressMode::Manual); in the background mode
    /// there is no need for it.
    ///
    /// # Errors
    /// [`Error::OtherProcess`] in a fork's child.
    pub fn progress(&self) -> Result<bool, Error> {
        let shared = &self.handle.0;
        shared.check_process()?;
        if shared.is_foreign() {
            shared.driver.wake(shared.id);
            return Ok(false);
        }
        Ok(shared.progress_once())
    }

    /// A descriptor that is readable while [`progress`](Self::progress) finds something to do, for
    /// the program's own `poll` or `epoll` under
    /// [`ProgressMode::Manual`](crate::ProgressMode::Manual). The descriptor is for waiting only:
    /// call `progress` until it returns false, then wait. What is due by the clock (a deadline, a
    /// heartbeat) the engine's thread sees to.
    ///
    /// # Errors
    /// [`Error::OtherProcess`] in a fork's child; [`Error::Setting`] in another mode or once the
    /// connection has ended; the system has no descriptor left.
    pub fn progress_fd(&self) -> Result<BorrowedFd<'_>, Error> {
        let shared = &self.handle.0;
        shared.check_process()?;
        if !shared.progress_owner.is_manual() {
            return Err(Error::Setting {
                what: "a descriptor for progress",
                expected: "a living connection whose mode of progress is Manual".to_owned(),
                arrived: "one on which the engine's thread makes progress".to_owned(),
            });
        }
        let none = || Error::system("making a descriptor for progress", Errno::MFILE.into());
        shared.progress_descriptor().ok_or_else(none)
    }

    /// Every live operation, where it stands and who owes its next step: one line each. While the
    /// engine hangs inside a plugin, one line that says so; so too while a plugin has not come back
    /// from closing a channel.
    pub fn status(&self) -> Vec<String> {
        let mut core = match self.handle.0.lock_in_time() {
            Ok(core) => core,
            Err(stuck) => return vec![stuck.to_string()],
        };
        core.clock.tick();
        let now = core.clock.now();
        let operations = core.session.snapshot(now);
        let pending = core.stuck_close();
        let operations = operations.into_iter();
        let lines = operations.map(|state| state.standing.to_string());
        lines
            .chain(pending.map(|error| error.to_string()))
            .collect()
    }

    /// Says goodbye: running transfers are finished and acknowledged first, however long that takes
    /// within `timeout`; receives that have no message yet end at once. Returns when both sides are
    /// done. What is left after `timeout` ends then, and this returns once nothing points at its
    /// memory, or a tenth of a second later. Where other handles of the connection are closed too,
    /// the longest time counts.
    ///
    /// # Errors
    /// The connection was lost before, or the goodbye did not end in time; it is closed all the
    /// same. Where a plugin has not come back from closing a channel, that is named
    /// ([`Error::CloseStuck`]): its thread stays, with what it closes, and nobody waits for it.
    pub fn close(self, timeout: Duration) -> Result<(), Error> {
        let started = Instant::now();
        self.begin_close(timeout)?;
        let shared = &self.handle.0;
        let longest = timeout.saturating_add(LETTING_GO);
        let mut outcome = lock(&shared.outcome);
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            let left = longest.saturating_sub(started.elapsed());
            if left.is_zero() {
                drop(outcome);
                return Err(shared.unfinished_goodbye(timeout));
            }
            outcome = shared
                .ended
                .wait_timeout(outcome, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Connection {
    /// As [`close`](Self::close), without waiting: the goodbye goes on in the background, and what
    /// is left after `timeout` ends then.
    ///
    /// # Errors
    /// [`Error::OtherProcess`] in a fork's child.
    pub fn begin_close(&self, timeout: Duration) -> Result<(), Error> {
        let shared = &self.handle.0;
        shared.check_process()?;
        shared.close(Some(timeout));
        Ok(())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.0.is_inherited() {
            // Whatever would be dropped with the last reference would close the parent's sockets'
            // streams.
            std::mem::forget(Arc::clone(&self.0));
            return;
        }
        self.0.close(None);
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.handle.0.peer)
            .field("path", &self.path())
            .field("handles", &Arc::strong_count(&self.handle))
            .finish_non_exhaustive()
    }
}

/// Who is at the other end, and what both sides agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Address of the control connection.
    pub address: SocketAddr,
    /// Name of the network.
    pub network: String,
    /// Data channels.
    pub channels: u16,
    /// Bytes of a chunk.
    pub chunk_bytes: u32,
    /// The memory that the peer moves, in its words.
    pub memory: String,
    /// The peer's software.
    pub software: String,
}

impl PeerInfo {
    /// As errors name it.
    fn name(&self) -> SocketAddr {
        self.address
    }
}

/// A send or a receive that has not started yet.
#[derive(Debug)]
#[must_use = "nothing is sent or received before start()"]
pub struct Request<'a> {
    connection: &'a Connection,
    kind: OperationKind,
    slice: RegionSlice,
    tag: u64,
    after: After,
    level: Level,
    deadlines: Option<Deadlines>,
}

impl<'a> Request<'a> {
    fn new(connection: &'a Connection, kind: OperationKind, slice: RegionSlice, tag: u64) -> Self {
        Self {
            connection,
            kind,
            slice,
            tag,
            after: After::DefaultStreams,
            level: Level::Placed,
            deadlines: None,
        }
    }

    /// What of the program's GPU work must come first. Without this, everything on the
    /// context's default streams comes first; work on other non-blocking streams is the
    /// caller's duty. Only GPU memory can wait for a stream or an event: for host memory
    /// that the GPU fills or reads, wait before you start.
    pub fn after(mut self, after: After) -> Self {
        self.after = after;
        self
    }

    /// When the operation counts as complete; [`Level::Placed`] by default.
    pub fn level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    /// Limits for this operation alone.
    pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = Some(deadlines);
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// The memory is in use or cannot be reached, the connection is gone, or too many
    /// operations run. Nothing was started then.
    pub fn start(self) -> Result<Transfer, Error> {
        let shared = &self.connection.handle.0;
        shared.check_process()?;
        let (kind, to) = (self.kind, To::Tag(self.tag));
        let context = match (&shared.gpu, self.slice.kind(), kind) {
            // A fence and a copy follow each other.
            (Some(gpu), MemoryKind::Cuda { .. }, OperationKind::Send) => {
                Some(InContext::enter(gpu)?)
            }
            _ => None,
        };
        let ready = self.ready(to)?;
        let total = match kind {
            OperationKind::Send => ready.bytes(),
            _ => 0,
        };
        let state = TransferState::new(total);
        let options = (self.level, self.deadlines);
        let operation = shared.with_core(|core| {
            if let Some(error) = core.refusal() {
                return Err(error);
            }
            let started = ready.start(core, false, options, &state);
            drop(context);
            started
        })??;
        let handle = Arc::clone(&self.connection.handle);
        Ok(Transfer::new(state, operation.into(), handle))
    }

    /// Has the memory at its disposal.
    fn ready(&self, to: To) -> Result<Ready, Error> {
        let fence = self.fence()?;
        Ok(Ready {
            to,
            kind: self.kind,
            lease: self.lease()?,
            fence,
        })
    }

    /// Keeps others away from the memory.
    fn lease(&self) -> Result<Lease, Error> {
        let access = access(self.kind);
        let start = self.slice.offset();
        let range = start..start + self.slice.len();
        let lease = || self.slice.region().lease(range.clone(), access);
        let lease = lease().or_else(|error| {
            // By a send whose acknowledgement may lie in the socket.
            self.connection.handle.0.drive_once(|| false);
            lease().map_err(|_| error)
        })?;
        Ok(lease)
    }

    /// Captures, on the caller's thread, what the copy worker has to wait for.
    fn fence(&self) -> Result<Option<Fence>, Error> {
        let shared = &self.connection.handle.0;
        let MemoryKind::Cuda { device } = self.slice.kind() else {
            return match self.after {
                After::Nothing | After::DefaultStreams => Ok(None),
                After::Stream(_) | After::Event(_) => Err(Error::Setting {
                    what: "what a transfer of host memory waits for",
                    expected: "nothing: wait for the stream or event, then start".to_owned(),
                    arrived: format!("{:?}", self.after),
                }),
            };
        };
        shared.check_memory(MemoryKind::Cuda { device })?;
        let gpu = shared.gpu.as_ref();
        Ok(gpu.map(|gpu| Fence::take(gpu, self.after)).transpose()?)
    }
}

/// What an operation does with this side's memory.
fn access(kind: OperationKind) -> Access {
    match kind.role() {
        Role::Sender => Access::Read,
        Role::Receiver => Access::Write,
    }
}

/// An operation whose memory is at its disposal.
#[derive(Debug)]
struct Ready {
    to: To,
    kind: OperationKind,
    lease: Lease,
    fence: Option<Fence>,
}

/// What it is for: a tag, or what of the peer's windows.
#[derive(Debug)]
enum To {
    Tag(u64),
    Place(Place),
    List(Arc<PieceList>),
    /// A list that the peer was told of, under this number.
    Told(u64, Arc<PieceList>),
}

impl Ready {
    fn bytes(&self) -> u64 {
        self.lease.range().len() as u64
    }

    /// Pieces of a list that the peer is yet to be told of.
    fn pieces(&self) -> Option<u32> {
        match &self.to {
            To::Tag(_) | To::Place(_) | To::Told(..) => None,
            To::List(list) => Some(list.pieces()),
        }
    }

    /// Where what a get is about lies, if this side reads it there.
    fn find(&self, core: &Core, level: Level) -> Option<PeerRead> {
        let find = |pieces: &mut dyn Iterator<Item = _>| {
            core.channels.find_in_windows(pieces, &self.lease)
        };
        match &self.to {
            // Both ends have to say what they have.
            _ if level == Level::Verified => None,
            To::Tag(_) => None,
            To::Place(place) => find(&mut std::iter::once((*place, self.bytes()))),
            To::List(list) | To::Told(_, list) => find(&mut list.places()),
        }
    }

    /// Starts it as a part of `state`: of a batch, where a notification may follow its puts.
    fn start(
        mut self,
        core: &mut Core,
        notified: bool,
        options: (Level, Option<Deadlines>),
        state: &Arc<TransferState>,
    ) -> Result<OperationId, Error> {
        let (kind, bytes) = (self.kind, self.bytes());
        let (level, deadlines) = options;
        let fenced = kind == OperationKind::Receive && core.is_fenced(self.fence.as_ref());
        let notified = match notified {
            true => Notified::Next,
            false => Notified::No,
        };
        let left = TimeLeft::ANY;
        let put = |to| Destination::Put { to, notified, left };
        let mut once = None;
        let (tag, to) = match &self.to {
            To::Tag(tag) => (*tag, Destination::next_receive(Tag(*tag))),
            To::Place(place) => (0, put(Extent::Place(*place))),
            To::Told(list, _) => (0, put(Extent::Pieces(*list))),
            To::List(pieces) => {
                let list = core.session.add_pieces(Arc::clone(pieces));
                let list = list.map_err(|error| core.request_error(error))?;
                once = Some(list);
                (0, put(Extent::Pieces(list)))
            }
        };
        let mut readers = Readers::default();
        let mut read = None;
        let started = if kind.role() == Role::Sender {
            let request = SendRequest {
                to,
                bytes,
                level,
                deadlines,
                eager: None,
                chunk_bytes: None,
            };
            let started = core.start_send(&mut self.lease, self.fence.as_ref(), request);
            started.map(|(id, its)| {
                readers = its;
                id
            })
        } else {
            core.pace.calls(core.clock.ticked());
            let now = core.clock.now();
            let started = match to {
                Destination::Put { to: from, .. } => {
                    let request = GetRequest {
                        from,
                        bytes,
                        level,
                        deadlines,
                    };
                    read = self.find(core, level);
                    match read {
                        Some(_) => core.session.read(now, request),
                        None => core.session.get(now, request),
                    }
                }
                _ => {
                    let request = ReceiveRequest {
                        tag: Tag(tag),
                        capacity: bytes,
                        level,
                        deadlines,
                        fenced,
                    };
                    core.session.receive(now, request)
                }
            };
            started.map_err(|error| core.request_error(error))
        };
        if let Some(list) = once {
            core.session.drop_pieces(list);
        }
        let id = started?;
        core.gpu.foresee(self.fence.as_ref(), core.bounds.fences);
        let role = kind.role();
        core.emit(&Event::Started { role, tag, bytes });
        let mut operation =
            Operation::new(kind, self.lease, Arc::clone(state), core.clock.ticked());
        operation.tag = tag;
        operation.fence = self.fence;
        operation.read_by(readers);
        core.operations.insert(id, operation);
        match read {
            Some(read) => core.begin_read(id, read),
            None if kind == OperationKind::Get => core.get_started(id),
            None => {}
        }
        if fenced {
            core.await_fence(id);
        }
        Ok(id)
    }
}
