//! A connection to one peer: where sends and receives start.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tcpx_memory::{Access, After, Fence, InContext, Lease, MemoryKind, RegionSlice};
use tcpx_net::ChannelStats;
use tcpx_wire::frame::Destination;
use tcpx_wire::session::{Deadlines, OperationId, OperationKind, ReceiveRequest, SendRequest};
use tcpx_wire::{Level, Role, Tag};

mod one_sided;
mod patience;
mod peer;
mod shared;
mod told;
mod watching;

use crate::core::{Core, NewOperation, Operation};
use crate::error::Error;
use crate::event::Event;
use crate::transfer::{Transfer, TransferState};

pub(crate) use one_sided::Deferred;
pub use one_sided::{Batch, PreparedBatch};
pub(crate) use patience::Patience;
pub use peer::PeerInfo;
pub(crate) use shared::Shared;

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
        Request::new(self, Role::Sender, slice, tag)
    }

    /// A receive into `slice`, which must be at least as long as the matching send; it runs
    /// from [`Request::start`] on.
    ///
    /// By default it fails after 30 s without its send: a side that may wait for longer sets
    /// [`Request::deadlines`], or those of the [`Options`](crate::Options).
    pub fn receive(&self, slice: RegionSlice, tag: u64) -> Request<'_> {
        Request::new(self, Role::Receiver, slice, tag)
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
    /// `None` where the channels have no TCP sockets of ours, or where the engine hangs inside a plugin.
    pub fn congestion_control(&self) -> Option<String> {
        let core = self.handle.0.lock_in_time().ok()?;
        core.congestion_control()
    }

    /// Counters of all data channels, summed; while the engine hangs inside a plugin, as they were
    /// when this was last asked.
    pub fn statistics(&self) -> ChannelStats {
        self.handle.0.statistics()
    }

    /// Makes all the progress that can be made now and never waits; whether there may be more to do at once. For
    /// [`ProgressMode::Manual`](crate::ProgressMode::Manual); in the background mode there is no need for it.
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

    /// A descriptor that is readable while [`progress`](Self::progress) finds something to do, for the program's own
    /// `poll` or `epoll` under [`ProgressMode::Manual`](crate::ProgressMode::Manual). The descriptor is for waiting
    /// only: call `progress` until it returns false, then wait. What is due by the clock (a deadline, a heartbeat) the
    /// engine's thread sees to.
    ///
    /// # Errors
    /// [`Error::OtherProcess`] in a fork's child; [`Error::Setting`] in another mode or once the connection has ended;
    /// the system has no descriptor left.
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
    /// engine hangs inside a plugin, one line that says so; so too while a plugin has not come back from
    /// closing a channel.
    pub fn status(&self) -> Vec<String> {
        let mut core = match self.handle.0.lock_in_time() {
            Ok(core) => core,
            Err(stuck) => return vec![stuck.to_string()],
        };
        core.tick();
        let now = core.now();
        let operations = core.session.snapshot(now);
        let pending = core.stuck_close();
        let operations = operations.into_iter();
        let lines = operations.map(|state| state.standing.to_string());
        lines
            .chain(pending.map(|error| error.to_string()))
            .collect()
    }

    /// Says goodbye: running transfers are finished and acknowledged first. Returns when both
    /// sides are done, at the latest after `timeout`.
    ///
    /// # Errors
    /// The connection was lost before, or the goodbye did not end in time; it is closed all the
    /// same. Where a plugin has not come back from closing a channel, that is named
    /// ([`Error::CloseStuck`]): its thread stays, with what it closes, and nobody waits for it.
    pub fn close(self, timeout: Duration) -> Result<(), Error> {
        let started = Instant::now();
        let shared = &self.handle.0;
        shared.check_process()?;
        shared.close();
        let mut outcome = shared.outcome();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            let left = timeout.saturating_sub(started.elapsed());
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

impl Drop for Handle {
    fn drop(&mut self) {
        if self.0.is_inherited() {
            // Whatever would be dropped with the last reference would close the parent's sockets' streams.
            std::mem::forget(Arc::clone(&self.0));
            return;
        }
        self.0.close();
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

/// A send or a receive that has not started yet.
#[derive(Debug)]
#[must_use = "nothing is sent or received before start()"]
pub struct Request<'a> {
    connection: &'a Connection,
    role: Role,
    slice: RegionSlice,
    tag: u64,
    after: After,
    level: Level,
    deadlines: Option<Deadlines>,
}

impl<'a> Request<'a> {
    fn new(connection: &'a Connection, role: Role, slice: RegionSlice, tag: u64) -> Self {
        Self {
            connection,
            role,
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
        let (role, tag, bytes) = (self.role, self.tag, self.slice.len() as u64);
        shared.check_process()?;
        let context = match (&shared.gpu, self.slice.kind(), role) {
            // A fence and a copy follow each other.
            (Some(gpu), MemoryKind::Cuda { .. }, Role::Sender) => Some(InContext::enter(gpu)?),
            _ => None,
        };
        let fence = self.fence(shared)?;
        let lease = self.lease()?;
        let (kind, total) = match role {
            Role::Sender => (OperationKind::Send, bytes),
            Role::Receiver => (OperationKind::Receive, 0),
        };
        let state = TransferState::new(total);
        let operation = shared.with(|core| {
            if let Some(error) = core.refusal() {
                return Err(error);
            }
            let fenced = role == Role::Receiver && core.is_fenced(fence.as_ref());
            let id = match role {
                Role::Sender => self.submit_send(core, &lease, fence.as_ref())?,
                Role::Receiver => self.submit_receive(core, fenced)?,
            };
            drop(context);
            core.foresee(fence.as_ref());
            let operation = NewOperation {
                role,
                kind,
                tag,
                lease,
                fence,
                state: Arc::clone(&state),
            };
            core.emit(&Event::Started { role, tag, bytes });
            let operation = Operation::new(operation, core.ticked());
            core.operations.insert(id, operation);
            if fenced {
                core.await_fence(id);
            }
            Ok(id)
        })??;
        let handle = Arc::clone(&self.connection.handle);
        Ok(Transfer::new(state, operation.into(), handle))
    }

    fn submit_send(
        &self,
        core: &mut Core,
        lease: &Lease,
        fence: Option<&Fence>,
    ) -> Result<OperationId, Error> {
        let request = SendRequest {
            to: Destination::next_receive(Tag(self.tag)),
            bytes: self.slice.len() as u64,
            level: self.level,
            deadlines: self.deadlines,
            eager: None,
        };
        core.start_send(lease, fence, request)
    }

    fn submit_receive(&self, core: &mut Core, fenced: bool) -> Result<OperationId, Error> {
        core.pace.calls(core.ticked());
        let request = ReceiveRequest {
            tag: Tag(self.tag),
            capacity: self.slice.len() as u64,
            level: self.level,
            deadlines: self.deadlines,
            fenced,
        };
        let now = core.now();
        let started = core.session.receive(now, request);
        started.map_err(|error| core.request_error(error))
    }

    /// Keeps others away from the memory.
    fn lease(&self) -> Result<Lease, Error> {
        let access = match self.role {
            Role::Sender => Access::Read,
            Role::Receiver => Access::Write,
        };
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
    fn fence(&self, shared: &Shared) -> Result<Option<Fence>, Error> {
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
