//! One-sided transfers of this side: puts, gets, batches of them, notifications.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tcpx_memory::{After, Fence, InContext, Lease, MemoryKind, RegionSlice};
use tcpx_wire::frame::{Destination, TransferId};
use tcpx_wire::session::{
    Deadlines, GetRequest, MAX_NOTIFICATION_BYTES, OperationId, OperationKind, SendRequest,
};
use tcpx_wire::{Level, Place, Rights, Role, Tag, WindowKey, WindowSecret};

use super::{Connection, Request};
use crate::core::{Core, NewOperation, Notice, Operation};
use crate::drive::EngineWatch;
use crate::error::Error;
use crate::event::Event;
use crate::notifications::Found;
use crate::transfer::{Operations, Transfer, TransferState};
use crate::wait::deadline;
use crate::window::Window;

/// How often a thread that waits for a notification makes sure that the engine lives.
const LIVENESS_CHECK: Duration = Duration::from_secs(1);

impl Connection {
    /// Opens `slice` to the peer: whoever holds the window's key may put into it and get from it,
    /// as far as `rights` allow. The memory is in use only while an operation of the peer touches
    /// it; an operation that finds it in use is refused.
    ///
    /// Memory of a GPU is outside of every stream's order here: have your work on it ended before
    /// you tell the peer to begin.
    ///
    /// # Errors
    /// The connection is gone, or cannot reach the memory.
    pub fn expose(&self, slice: RegionSlice, rights: Rights) -> Result<Window, Error> {
        let shared = &self.handle.0;
        shared.check_process()?;
        shared.check_memory(slice.kind())?;
        let mut random = Ok(());
        let secret = WindowSecret::generate(&mut |bytes| random = getrandom::fill(bytes));
        random.map_err(|error| Error::system("making a window's key", io::Error::other(error)))?;
        let bytes = slice.len() as u64;
        let opened = shared.with(|core| {
            if let Some(error) = core.refusal() {
                return Err(error);
            }
            let key = |session: &mut tcpx_wire::Session| WindowKey {
                window: session.expose(secret, bytes, rights),
                bytes,
                rights,
                secret,
            };
            Ok(core.expose(key, slice))
        })?;
        let (key, uses) = opened?;
        Ok(Window::new(Arc::clone(shared), key, uses))
    }

    /// Starts a write of `slice` into the peer's window, from byte `offset` of that on; it runs
    /// from [`Put::start`] on. It has succeeded when every byte is there: the peer's program takes
    /// no part.
    pub fn put(&self, slice: RegionSlice, to: &WindowKey, offset: u64) -> Put<'_> {
        Put(self.batch().put(slice, to, offset))
    }

    /// Starts a read into `slice`, which it fills, from byte `offset` of the peer's window on; it
    /// runs from [`Get::start`] on.
    pub fn get(&self, slice: RegionSlice, from: &WindowKey, offset: u64) -> Get<'_> {
        Get(self.batch().get(slice, from, offset))
    }

    /// Puts and gets that run together as one transfer, which ends when all of them have. They come
    /// in no order.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            connection: self,
            parts: Vec::new(),
            after: After::DefaultStreams,
            level: Level::Placed,
            deadlines: None,
            notification: None,
        }
    }

    /// Sends a notification: up to 64 KiB that the peer's program gets from
    /// [`Connection::notification`]. The transfer ends when they wait there.
    ///
    /// # Errors
    /// It is too long, the connection is gone, or too many operations run.
    pub fn notify(&self, bytes: &[u8]) -> Result<Transfer, Error> {
        self.batch().notify(bytes).start()
    }

    /// The next notification of the peer, in the order in which they were completed; waits for it
    /// at most `timeout`. `None` when there is none by then. Without a time it polls, as
    /// [`Transfer::wait_timeout`].
    ///
    /// # Errors
    /// How the connection ended, once every notification was taken.
    pub fn notification(&self, timeout: Duration) -> Result<Option<Vec<u8>>, Error> {
        let shared = &self.handle.0;
        shared.check_process()?;
        let notifications = shared.notifications();
        let mut found = notifications.take();
        if found == Found::Nothing && timeout.is_zero() {
            shared.drive_once(|| notifications.is_ready());
            found = notifications.take();
        } else if found == Found::Nothing {
            let limit = deadline(Instant::now(), timeout);
            if shared.drive(|| notifications.is_ready(), limit) {
                found = notifications.take();
            }
            let _watch = (found == Found::Nothing).then(|| shared.watch());
            while found == Found::Nothing
                && let left = limit.saturating_duration_since(Instant::now())
                && !left.is_zero()
            {
                found = notifications.wait(left.min(LIVENESS_CHECK));
            }
        }
        match self.found(found)? {
            None => shared.stuck().map_or(Ok(None), Err),
            some => Ok(some),
        }
    }

    /// As [`Connection::notification`], for a task: [`Poll::Pending`] after noting the task that is
    /// woken when there is something; that of the last call counts.
    ///
    /// # Errors
    /// As [`Connection::notification`].
    pub fn poll_notification(&self, context: &mut Context<'_>) -> Poll<Result<Vec<u8>, Error>> {
        let shared = &self.handle.0;
        self.take_or_wake(context, || Some(shared.watch()))
    }

    /// As [`Connection::poll_notification`], for a task that steps back behind threads which drive the
    /// connection by waiting or polling: where one of them stops in between, the task is woken up to
    /// a millisecond late.
    ///
    /// # Errors
    /// As [`Connection::notification`].
    pub fn poll_notification_late(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Vec<u8>, Error>> {
        self.take_or_wake(context, || None)
    }

    fn take_or_wake(
        &self,
        context: &mut Context<'_>,
        watch: impl FnOnce() -> Option<EngineWatch>,
    ) -> Poll<Result<Vec<u8>, Error>> {
        let shared = &self.handle.0;
        if let Err(error) = shared.check_process() {
            return Poll::Ready(Err(error));
        }
        let found = match shared.notifications().take() {
            Found::Nothing => {
                let watch = watch();
                shared.notifications().take_or_wake(context.waker(), watch)
            }
            found => found,
        };
        match self.found(found) {
            Ok(None) => Poll::Pending,
            Ok(Some(bytes)) => Poll::Ready(Ok(bytes)),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn found(&self, found: Found) -> Result<Option<Vec<u8>>, Error> {
        let shared = &self.handle.0;
        match found {
            Found::Notification(bytes) => {
                if shared.notifications().has_postponed() {
                    shared.with(Core::accept_notifications)?;
                }
                Ok(Some(bytes))
            }
            Found::Nothing => Ok(None),
            Found::Ended => {
                let closed = Error::Closed {
                    peer: self.peer().name(),
                };
                Err(shared.lock_in_time()?.refusal().unwrap_or(closed))
            }
        }
    }
}

/// A put that has not started yet.
#[derive(Debug)]
#[must_use = "nothing is written before start()"]
pub struct Put<'a>(Batch<'a>);

/// A get that has not started yet.
#[derive(Debug)]
#[must_use = "nothing is read before start()"]
pub struct Get<'a>(Batch<'a>);

/// Puts and gets that have not started yet.
#[derive(Debug)]
#[must_use = "nothing is moved before start()"]
pub struct Batch<'a> {
    connection: &'a Connection,
    parts: Vec<Part>,
    after: After,
    level: Level,
    deadlines: Option<Deadlines>,
    notification: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Part {
    kind: OperationKind,
    slice: RegionSlice,
    key: WindowKey,
    offset: u64,
}

macro_rules! one_sided_options {
    ($name:ident) => {
        impl $name<'_> {
            /// What of the program's GPU work must come first; as for a send.
            pub fn after(mut self, after: After) -> Self {
                self.0 = self.0.after(after);
                self
            }

            /// When it counts as complete; [`Level::Placed`] by default.
            pub fn level(mut self, level: Level) -> Self {
                self.0 = self.0.level(level);
                self
            }

            /// Limits for this operation alone.
            pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
                self.0 = self.0.deadlines(deadlines);
                self
            }

            /// Sends a notification behind it, see [`Batch::notify`].
            pub fn notify(mut self, bytes: &[u8]) -> Self {
                self.0 = self.0.notify(bytes);
                self
            }

            /// Starts it.
            ///
            /// # Errors
            /// As [`Batch::start`].
            pub fn start(self) -> Result<Transfer, Error> {
                self.0.start()
            }
        }
    };
}
one_sided_options!(Put);
one_sided_options!(Get);

impl Batch<'_> {
    /// Adds a write of `slice` into the peer's window, from byte `offset` of that on.
    pub fn put(self, slice: RegionSlice, to: &WindowKey, offset: u64) -> Self {
        self.with(OperationKind::Put, slice, to, offset)
    }

    /// Adds a read into `slice`, which it fills, from byte `offset` of the peer's window on.
    pub fn get(self, slice: RegionSlice, from: &WindowKey, offset: u64) -> Self {
        self.with(OperationKind::Get, slice, from, offset)
    }

    fn with(
        mut self,
        kind: OperationKind,
        slice: RegionSlice,
        key: &WindowKey,
        offset: u64,
    ) -> Self {
        self.parts.push(Part {
            kind,
            slice,
            key: *key,
            offset,
        });
        self
    }

    /// What of the program's GPU work must come first; as for a send.
    pub fn after(mut self, after: After) -> Self {
        self.after = after;
        self
    }

    /// When each part counts as complete; [`Level::Placed`] by default.
    pub fn level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    /// Limits for each part.
    pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = Some(deadlines);
        self
    }

    /// Sends a notification of up to 64 KiB behind the parts: the peer's program gets it, once, when
    /// every put has been applied there and every get has ended here; never when one of them failed.
    /// The transfer ends after it.
    pub fn notify(mut self, bytes: &[u8]) -> Self {
        self.notification = Some(bytes.to_vec());
        self
    }

    /// Starts all of it. The transfer ends when every part has: with the first error, if there was one.
    ///
    /// # Errors
    /// A piece does not lie in its window or is not allowed there, memory is in use or cannot be
    /// reached, the notification is too long, the connection is gone, or too many operations run.
    /// Nothing was started then.
    pub fn start(self) -> Result<Transfer, Error> {
        let shared = &self.connection.handle.0;
        shared.check_process()?;
        self.check()?;
        let on_gpu = |part: &Part| matches!(part.slice.kind(), MemoryKind::Cuda { .. });
        let any_on_gpu = self.parts.iter().any(on_gpu);
        let context = match &shared.gpu {
            // A fence and a copy follow each other.
            Some(gpu) if any_on_gpu => Some(InContext::enter(gpu)?),
            _ => None,
        };
        let mut ready = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let role = match part.kind {
                OperationKind::Get => Role::Receiver,
                _ => Role::Sender,
            };
            let request = Request {
                connection: self.connection,
                slice: part.slice.clone(),
                tag: 0,
                // Only memory of a GPU waits for its streams.
                after: match any_on_gpu && !on_gpu(part) {
                    true => After::Nothing,
                    false => self.after,
                },
                level: self.level,
                deadlines: self.deadlines,
            };
            ready.push(Ready {
                place: part.key.at(part.offset),
                kind: part.kind,
                lease: request.lease(role)?,
                fence: request.fence(shared)?,
            });
        }
        let notice = self.notification;
        let total = ready
            .iter()
            .map(|part| part.lease.range().len() as u64)
            .sum();
        let state = TransferState::of_parts(total, ready.len() + usize::from(notice.is_some()));
        let options = (self.level, self.deadlines);
        let operations = shared.with(|core| {
            if let Some(error) = core.refusal() {
                return Err(error);
            }
            let started = start_parts(core, ready, notice, options, &state);
            drop(context);
            started
        })??;
        let handle = Arc::clone(&self.connection.handle);
        Ok(Transfer::new(state, operations, handle))
    }

    /// What can be known without the peer.
    fn check(&self) -> Result<(), Error> {
        let setting = |what, expected: String, arrived: String| {
            Err(Error::Setting {
                what,
                expected,
                arrived,
            })
        };
        if self.parts.is_empty() && self.notification.is_none() {
            let expected = "a put, a get or a notification".to_owned();
            return setting("a batch", expected, "nothing".to_owned());
        }
        if let Some(bytes) = self.notification.as_ref().map(Vec::len)
            && bytes as u64 > MAX_NOTIFICATION_BYTES
        {
            let expected = format!("at most {MAX_NOTIFICATION_BYTES} bytes");
            return setting("a notification", expected, format!("{bytes} bytes"));
        }
        for part in &self.parts {
            let (allowed, what) = match part.kind {
                OperationKind::Get => (part.key.rights.allow_get(), "a get"),
                _ => (part.key.rights.allow_put(), "a put"),
            };
            let rights = part.key.rights;
            if !allowed {
                let expected = "a window that was exposed with the right to it".to_owned();
                return setting(what, expected, format!("one with {rights:?}"));
            }
            let (bytes, offset) = (part.slice.len() as u64, part.offset);
            let end = offset.checked_add(bytes);
            if end.is_none_or(|end| end > part.key.bytes) {
                let expected = format!("a piece of the window's {} bytes", part.key.bytes);
                return setting(what, expected, format!("{bytes} bytes from {offset} on"));
            }
        }
        Ok(())
    }
}

/// A part whose memory is at its disposal.
struct Ready {
    place: Place,
    kind: OperationKind,
    lease: Lease,
    fence: Option<Fence>,
}

impl Ready {
    fn role(&self) -> Role {
        match self.kind {
            OperationKind::Get => Role::Receiver,
            _ => Role::Sender,
        }
    }
}

/// A notification that leaves once every part of its batch has ended here: with gets among them, only
/// this side knows when that is.
#[derive(Debug)]
pub(crate) struct Deferred {
    running: AtomicUsize,
    notice: Mutex<Option<Notice>>,
}

impl Deferred {
    /// One of the parts has ended well: what is due now.
    pub(crate) fn part_ended(&self) -> Option<Notice> {
        if self.running.fetch_sub(1, Ordering::Relaxed) > 1 {
            return None;
        }
        self.take()
    }

    /// One of the parts has failed: the notification never leaves. Whether this was the first to say so.
    pub(crate) fn part_failed(&self) -> bool {
        self.take().is_some()
    }

    fn take(&self) -> Option<Notice> {
        let notice = self.notice.lock();
        notice.unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Starts every part; the session has been asked whether it takes them all.
fn start_parts(
    core: &mut Core,
    ready: Vec<Ready>,
    notice: Option<Vec<u8>>,
    (level, deadlines): (Level, Option<Deadlines>),
    state: &Arc<TransferState>,
) -> Result<Operations, Error> {
    let is_get = |part: &&Ready| part.kind == OperationKind::Get;
    let gets = ready.iter().filter(is_get).count();
    let puts = ready.len() - gets;
    core.session
        .check_rooms(puts + usize::from(notice.is_some()), gets)
        .map_err(|error| core.request_error(error))?;
    let notice = notice.map(|bytes| Notice {
        bytes,
        deadlines,
        state: Arc::clone(state),
        follows: !ready.is_empty(),
    });
    let (notice, deferred) = match notice {
        Some(notice) if gets > 0 => {
            let deferred = Deferred {
                running: AtomicUsize::new(ready.len()),
                notice: Mutex::new(Some(notice)),
            };
            (None, Some(Arc::new(deferred)))
        }
        notice => (notice, None),
    };
    let mut operations = Operations::default();
    let mut first = None;
    for part in ready {
        let id = match part.kind {
            OperationKind::Get => start_get(core, &part, (level, deadlines))?,
            _ => start_put(core, &part, notice.is_some(), (level, deadlines))?,
        };
        first = first.or_else(|| id.sent_transfer());
        insert(core, id, part, state, deferred.clone());
        operations.push(id);
    }
    if let Some(notice) = notice {
        let first = first.unwrap_or(TransferId(0));
        let count = u32::try_from(puts).unwrap_or(u32::MAX);
        operations.push(core.notify(notice, first, count)?);
    }
    Ok(operations)
}

fn start_put(
    core: &mut Core,
    part: &Ready,
    notified: bool,
    (level, deadlines): (Level, Option<Deadlines>),
) -> Result<OperationId, Error> {
    let bytes = part.lease.range().len() as u64;
    let request = SendRequest {
        tag: Tag(0),
        bytes,
        level,
        deadlines,
        eager: None,
        destination: Some(Destination::Window {
            place: part.place,
            notified,
        }),
    };
    core.start_send(&part.lease, part.fence.as_ref(), request)
}

fn start_get(
    core: &mut Core,
    part: &Ready,
    (level, deadlines): (Level, Option<Deadlines>),
) -> Result<OperationId, Error> {
    core.pace.calls(core.ticked());
    let request = GetRequest {
        from: part.place,
        bytes: part.lease.range().len() as u64,
        level,
        deadlines,
    };
    let now = core.now();
    let started = core.session.get(now, request);
    started.map_err(|error| core.request_error(error))
}

fn insert(
    core: &mut Core,
    id: OperationId,
    part: Ready,
    state: &Arc<TransferState>,
    deferred: Option<Arc<Deferred>>,
) {
    let role = part.role();
    core.foresee(part.fence.as_ref());
    core.emit(&Event::Started {
        role,
        tag: 0,
        bytes: part.lease.range().len() as u64,
    });
    let operation = NewOperation {
        role,
        kind: part.kind,
        tag: 0,
        lease: part.lease,
        fence: part.fence,
        state: Arc::clone(state),
    };
    let mut operation = Operation::new(operation, core.ticked());
    operation.deferred = deferred;
    core.operations.insert(id, operation);
}
