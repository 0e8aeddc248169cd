//! One-sided transfers of this side: puts, gets, batches of them, notifications.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tcpx_memory::{After, Gather, InContext, MemoryKind, RegionSlice};
use tcpx_wire::frame::TransferId;
use tcpx_wire::session::{Deadlines, MAX_NOTIFICATION_BYTES, OperationKind};
use tcpx_wire::{Level, PieceList, Rights, WindowKey, WindowSecret};

use super::{Connection, Ready, Request, To, access};
use crate::core::{Core, Notice};
use crate::drive::EngineWatch;
use crate::error::Error;
use crate::notifications::Found;
use crate::transfer::{Operations, Transfer, TransferState};
use crate::wait::deadline;
use crate::window::Window;

impl Connection {
    /// Opens `slice` to the peer: whoever holds the window's key may put into it and get from it,
    /// as far as `rights` allow. The memory is in use only while an operation of the peer touches
    /// it; an operation that finds it in use is refused. A peer on the same host that has got
    /// something there reads the window by itself from then on, until an operation of this side
    /// writes there: this side counts no such get, and none keeps it from writing, as the peer asks
    /// for what it has not read by then.
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
        let is_on_gpu = is_on_gpu(&slice);
        let opened = shared.with_core(|core| {
            if let Some(error) = core.refusal() {
                return Err(error);
            }
            let is_addressed = core.channels.is_addressed;
            let key = |session: &mut tcpx_wire::Session| WindowKey {
                window: session.expose(secret, bytes, rights),
                bytes,
                rights,
                takes_lists: is_addressed,
                is_on_gpu,
                secret,
            };
            Ok(core.expose(key, slice))
        })?;
        let (key, uses) = opened?;
        Ok(Window::new(Arc::clone(shared), key, uses))
    }

    /// A write of `slice` into the peer's window, from byte `offset` of that on; it runs from
    /// [`Batch::start`] on. It has succeeded when every byte is there: the peer's program takes
    /// no part.
    pub fn put(&self, slice: RegionSlice, to: &WindowKey, offset: u64) -> Batch<'_> {
        self.batch().put(slice, to, offset)
    }

    /// A read into `slice`, which it fills, from byte `offset` of the peer's window on; it
    /// runs from [`Batch::start`] on.
    pub fn get(&self, slice: RegionSlice, from: &WindowKey, offset: u64) -> Batch<'_> {
        self.batch().get(slice, from, offset)
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
            let is_ready = || notifications.is_ready();
            // Another thread may be faster.
            while found == Found::Nothing
                && shared.wait(limit, is_ready, |left| notifications.sleep(left))
            {
                found = notifications.take();
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

    /// As [`Connection::poll_notification`], for a task that steps back behind threads which drive
    /// the connection by waiting or polling: where one of them stops in between, the task is woken
    /// up to a millisecond late.
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
                    shared.with_core(Core::collect_notifications)?;
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

/// Bytes from which a part with memory of a GPU is an operation of its own: its chunks are
/// neighbours then, and neighbours are copied together.
const SINGLE_ON_GPU: usize = 1 << 20;

fn is_on_gpu(slice: &RegionSlice) -> bool {
    matches!(slice.kind(), MemoryKind::Cuda { .. })
}

#[derive(Debug)]
struct Part {
    kind: OperationKind,
    slice: RegionSlice,
    key: WindowKey,
    offset: u64,
}

impl Batch<'_> {
    /// Adds a write of `slice` into the peer's window, from byte `offset` of that on.
    pub fn put(self, slice: RegionSlice, to: &WindowKey, offset: u64) -> Self {
        self.with_part(OperationKind::Put, slice, to, offset)
    }

    /// Adds a read into `slice`, which it fills, from byte `offset` of the peer's window on.
    pub fn get(self, slice: RegionSlice, from: &WindowKey, offset: u64) -> Self {
        self.with_part(OperationKind::Get, slice, from, offset)
    }

    fn with_part(
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

    /// Sends a notification of up to 64 KiB behind the parts: the peer's program gets it, once,
    /// when every put has been applied there and every get has ended here; never when one of them
    /// failed. The transfer ends after it.
    pub fn notify(mut self, bytes: &[u8]) -> Self {
        self.notification = Some(bytes.to_vec());
        self
    }

    /// Starts all of it. The transfer ends when every part has: with the first error, if there was
    /// one.
    ///
    /// Puts into windows that [take lists](WindowKey::takes_lists) are one operation, however many
    /// they are, and so are gets: they end together, and what is said of each part is said of all
    /// of them. Memory of a GPU and host memory are apart in that, at either end, and parts of 1
    /// MiB and more with memory of a GPU are left out. Every other part is an operation of its own.
    ///
    /// # Errors
    /// A piece does not lie in its window or is not allowed there, memory is in use or cannot be
    /// reached, the notification is too long, the connection is gone, or too many operations or
    /// pieces run. Nothing was started then: where a part fails to start behind others, the
    /// transfer ends with the reason.
    pub fn start(self) -> Result<Transfer, Error> {
        let connection = self.connection;
        connection.handle.0.check_process()?;
        self.check()?;
        let (plan, notification) = self.plan()?;
        plan.start(connection, notification)
    }

    /// Tells the peer now which pieces it is about, so that it can start many times without that.
    ///
    /// # Errors
    /// As [`Batch::start`].
    pub fn prepare(self) -> Result<PreparedBatch, Error> {
        let connection = self.connection.clone();
        connection.handle.0.check_process()?;
        self.check()?;
        let (mut plan, notification) = self.plan()?;
        connection.handle.0.with_core(|core| {
            for at in 0..plan.listed.len() {
                let list = Arc::clone(&plan.listed[at].list);
                match core.session.add_pieces(list) {
                    Ok(list) => plan.listed[at].told = Some(list),
                    Err(error) => {
                        plan.drop_lists(core);
                        return Err(core.request_error(error));
                    }
                }
            }
            let told = plan.listed.iter().filter_map(|one| one.told);
            told.for_each(|list| core.session.tell_pieces(list));
            Ok::<_, Error>(())
        })??;
        Ok(PreparedBatch {
            connection,
            plan,
            notification,
        })
    }

    /// Its operations, and the notification behind them.
    fn plan(self) -> Result<(Plan, Option<Vec<u8>>), Error> {
        let Self {
            parts,
            after,
            level,
            deadlines,
            notification,
            ..
        } = self;
        let mut listed = Vec::new();
        let mut singles = parts;
        for kind in [OperationKind::Put, OperationKind::Get] {
            // Where the memory is: here, and at the peer.
            for ends in [(false, false), (false, true), (true, false), (true, true)] {
                let takes = |part: &Part| {
                    part.kind == kind && part.are_on_gpu() == ends && part.is_listed()
                };
                if singles.iter().filter(|part| takes(part)).count() < 2 {
                    continue;
                }
                let (of_list, others) = singles.into_iter().partition(takes);
                singles = others;
                listed.push(Listed::new(kind, of_list)?);
            }
        }
        let plan = Plan {
            listed,
            singles,
            after,
            level,
            deadlines,
        };
        Ok((plan, notification))
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

impl Part {
    /// Whether it is a piece of a list where there are several.
    fn is_listed(&self) -> bool {
        let most = match self.are_on_gpu() {
            (false, false) => usize::MAX,
            _ => SINGLE_ON_GPU - 1,
        };
        self.key.takes_lists && (1..=most).contains(&self.slice.len())
    }

    /// Whether memory of a GPU is what it touches here, and at the peer.
    fn are_on_gpu(&self) -> (bool, bool) {
        (is_on_gpu(&self.slice), self.key.is_on_gpu)
    }
}

/// A batch that can start many times, one after the other or at a time as far as its memory allows
/// that.
#[derive(Debug)]
pub struct PreparedBatch {
    connection: Connection,
    plan: Plan,
    notification: Option<Vec<u8>>,
}

impl PreparedBatch {
    /// Starts it, see [`Batch::start`]; the peer checks its windows and rights again, or has taken
    /// nothing back since it did.
    ///
    /// # Errors
    /// As [`Batch::start`].
    pub fn start(&self) -> Result<Transfer, Error> {
        self.connection.handle.0.check_process()?;
        self.plan.start(&self.connection, self.notification.clone())
    }
}

impl Drop for PreparedBatch {
    fn drop(&mut self) {
        if self.plan.listed.iter().any(|one| one.told.is_some()) {
            // Where the connection is gone, so are its lists.
            let plan = &self.plan;
            let _ = self
                .connection
                .handle
                .0
                .with_core(|core| plan.drop_lists(core));
        }
    }
}

/// The operations of a batch.
#[derive(Debug)]
struct Plan {
    listed: Vec<Listed>,
    singles: Vec<Part>,
    after: After,
    level: Level,
    deadlines: Option<Deadlines>,
}

/// Parts that are one operation.
#[derive(Debug)]
struct Listed {
    kind: OperationKind,
    list: Arc<PieceList>,
    /// The peer has the list, under this number.
    told: Option<u64>,
    gather: Gather,
}

impl Listed {
    fn new(kind: OperationKind, parts: Vec<Part>) -> Result<Self, Error> {
        let mut list = PieceList::default();
        let mut parents: Vec<RegionSlice> = Vec::new();
        let mut places = HashMap::new();
        let mut last = None;
        let mut pieces = Vec::with_capacity(parts.len());
        let count = parts.len();
        for part in parts {
            let pushed = list.push(&part.key.at(part.offset), part.slice.len() as u64);
            pushed.map_err(|error| Error::Setting {
                what: "a batch",
                expected: error.to_string(),
                arrived: format!("{count} parts"),
            })?;
            let region = part.slice.region();
            let parent = match last {
                Some((id, parent)) if id == region.id() => parent,
                _ => *places.entry(region.id()).or_insert_with(|| {
                    parents.push(region.all());
                    parents.len() - 1
                }),
            };
            last = Some((region.id(), parent));
            let start = part.slice.offset();
            pieces.push((parent, start..start + part.slice.len()));
        }
        Ok(Self {
            kind,
            list: Arc::new(list),
            told: None,
            gather: Gather::new(&parents, pieces.into_iter(), access(kind))?,
        })
    }
}

impl Plan {
    /// No operation names its lists any more.
    fn drop_lists(&self, core: &mut Core) {
        let told = self.listed.iter().filter_map(|one| one.told);
        told.for_each(|list| core.session.drop_pieces(list));
    }

    fn start(
        &self,
        connection: &Connection,
        notification: Option<Vec<u8>>,
    ) -> Result<Transfer, Error> {
        let shared = &connection.handle.0;
        let any_on_gpu = self.singles.iter().any(|part| is_on_gpu(&part.slice))
            || self.listed.iter().any(|listed| listed.gather.is_on_gpu());
        let context = match &shared.gpu {
            // A fence and a copy follow each other.
            Some(gpu) if any_on_gpu => Some(InContext::enter(gpu)?),
            _ => None,
        };
        let request = |slice: RegionSlice, kind| Request {
            connection,
            kind,
            tag: 0,
            // Only memory of a GPU waits for its streams.
            after: match any_on_gpu && !is_on_gpu(&slice) {
                true => After::Nothing,
                false => self.after,
            },
            slice,
            level: self.level,
            deadlines: self.deadlines,
        };
        let mut ready = Vec::with_capacity(self.listed.len() + self.singles.len());
        for listed in &self.listed {
            let region = || listed.gather.region("a transfer");
            let region = region().or_else(|error| {
                // By a put whose acknowledgement may lie in the socket.
                shared.drive_once(|| false);
                region().map_err(|_| error)
            })?;
            let to = match listed.told {
                Some(list) => To::Told(list, Arc::clone(&listed.list)),
                None => To::List(Arc::clone(&listed.list)),
            };
            ready.push(request(region.all(), listed.kind).ready(to)?);
        }
        for part in &self.singles {
            let to = To::Place(part.key.at(part.offset));
            ready.push(request(part.slice.clone(), part.kind).ready(to)?);
        }
        let total = ready.iter().map(|part| part.bytes()).sum();
        let parts = ready.len() + usize::from(notification.is_some());
        let state = TransferState::of_parts(total, parts);
        let options = (self.level, self.deadlines);
        let operations = shared.with_core(|core| {
            if let Some(error) = core.refusal() {
                return Err(error);
            }
            let started = start_parts(core, ready, notification, options, &state);
            drop(context);
            started
        })??;
        Ok(Transfer::new(
            state,
            operations,
            Arc::clone(&connection.handle),
        ))
    }
}

/// Starts every part, if the session takes them all.
fn start_parts(
    core: &mut Core,
    ready: Vec<Ready>,
    notice: Option<Vec<u8>>,
    options: (Level, Option<Deadlines>),
    state: &Arc<TransferState>,
) -> Result<Operations, Error> {
    let is_get = |part: &&Ready| part.kind == OperationKind::Get;
    let gets = ready.iter().filter(is_get).count();
    let puts = ready.len() - gets;
    // The peer is told of each list with its operation, and keeps it no longer.
    let longest = ready.iter().filter_map(Ready::pieces).max();
    core.session
        .check_rooms(puts + usize::from(notice.is_some()), gets)
        .and_then(|()| longest.map_or(Ok(()), |pieces| core.session.check_pieces(pieces)))
        .map_err(|error| core.request_error(error))?;
    let mut notice = notice.map(|bytes| Notice {
        bytes,
        deadlines: options.1.unwrap_or_else(|| core.session.deadlines()),
        began: core.clock.ticked(),
        follows: !ready.is_empty(),
    });
    if gets > 0 {
        // Only this side knows when they have ended.
        state.set_notice(notice.take());
    }
    let mut operations = Operations::default();
    let (mut first, mut failed) = (None, None);
    for part in ready {
        if failed.is_some() {
            core.program.wakers.extend(state.end(Ok(None)));
            continue;
        }
        match part.start(core, notice.is_some(), options, state) {
            Ok(id) => {
                first = first.or_else(|| id.sent_transfer());
                operations.push(id);
            }
            Err(error) => failed = Some(error),
        }
    }
    if let Some(notice) = notice.filter(|_| failed.is_none() || !operations.is_empty()) {
        let first = first.unwrap_or(TransferId(0));
        let count = operations.len().try_into().unwrap_or(u32::MAX);
        match core.notify(notice, Arc::clone(state), first, count) {
            Ok(id) => operations.push(id),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    match failed {
        Some(error) if operations.is_empty() => return Err(error),
        // What runs ends the transfer, and soon.
        Some(error) => {
            let now = core.clock.now();
            operations
                .iter()
                .for_each(|one| core.session.cancel(now, one));
            core.program.wakers.extend(state.end(Err(error)));
        }
        None => {}
    }
    Ok(operations)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use tcpx_memory::{Access, Region};
    use tcpx_wire::Place;

    use super::*;
    use crate::core::tests::{LIMIT, Scene};
    use crate::driver::Driven;

    fn key() -> WindowKey {
        WindowKey {
            window: 1,
            bytes: 1 << 20,
            rights: Rights::GetAndPut,
            takes_lists: false,
            is_on_gpu: false,
            secret: WindowSecret::generate(&mut |_| {}),
        }
    }

    #[test]
    fn a_batch_of_which_a_part_cannot_start_ends_and_says_why() {
        let memory = Region::host(4096).unwrap();
        let place: Place = key().at(0);
        for (at, notice) in [(0, None), (1, None), (2, None), (1, Some(vec![7]))] {
            let mut scene = Scene::new();
            let ready = |part: usize| Ready {
                // Nobody knows the list.
                to: match part == at {
                    true => To::Told(99, Arc::default()),
                    false => To::Place(place),
                },
                kind: OperationKind::Put,
                lease: memory.lease(.., Access::Read).unwrap(),
                fence: None,
            };
            let parts = 3 + usize::from(notice.is_some());
            let state = TransferState::of_parts(3 * 4096, parts);
            let ready = (0..3).map(ready).collect();
            let options = (Level::Placed, None);
            let started = start_parts(&mut scene.core, ready, notice, options, &state);
            assert_eq!(started.is_err(), at == 0, "nothing had started");
            let began = Instant::now();
            while at > 0 && !state.has_ended() {
                assert!(began.elapsed() < LIMIT, "it does not end");
                scene.core.clock.tick();
                scene.core.progress();
            }
            let outcome = started.map(|_| state.outcome());
            let error = outcome.map_or_else(Some, |outcome| outcome?.err());
            assert!(matches!(error, Some(Error::Request { .. })), "{error:?}");
        }
    }

    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_defect_that_comes_again_ends_all_that_waits() {
        const PARTS: usize = 4;
        let scene = Scene::new();
        let channel = Arc::clone(&scene.channel);
        let (shared, _peer) = scene.into_shared();
        let connection = Connection::new(Arc::clone(&shared));
        let memory = Region::host(2 * PARTS * 8).unwrap();
        let mut batch = connection.batch();
        for at in 0..2 * PARTS {
            let slice = memory.slice(at * 8..(at + 1) * 8).unwrap();
            batch = batch.put(slice, &key(), at as u64 * 8);
        }
        let batch = batch.notify(b"behind all of them").start().unwrap();
        let open = connection.expose(Region::host(8).unwrap().all(), Rights::Put);
        let woken = Arc::new(Woken(AtomicUsize::new(0)));
        let waker = Arc::clone(&woken).into();
        let waits = connection.poll_notification(&mut Context::from_waker(&waker));
        assert!(waits.is_pending() && batch.test().is_none());
        channel.panics.store(true, Ordering::SeqCst);
        while !shared.progress().finished {}
        let is_defect = |error: &Error| matches!(error, Error::Defect { .. });
        let ended = batch.test().expect("an end").unwrap_err();
        assert!(is_defect(&ended), "{ended}");
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        let found = connection.notification(LIMIT).unwrap_err();
        assert!(is_defect(&found), "{found}");
        open.unwrap().revoke(Duration::ZERO).unwrap();
        let closed = connection.close(LIMIT).unwrap_err();
        assert!(is_defect(&closed), "{closed}");
        channel.panics.store(false, Ordering::SeqCst);
    }
}
