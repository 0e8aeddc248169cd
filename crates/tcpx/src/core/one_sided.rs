//! What the peer does in windows of this side, and its notifications.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

use tcpx_memory::{
    Access, Fence, Gather, Lease, MemoryError, ReadUntilWritten, Region, RegionSlice, Work,
};
use tcpx_net::{Direction, PeerRead};
use tcpx_wire::frame::{Destination, Eager, RefuseReason, TransferId};
use tcpx_wire::session::{Action, Covered, Deadlines, OperationId, OperationKind, SendRequest};
use tcpx_wire::{Level, Numbered, PieceList, WindowKey};

use super::operation::Token;
use super::{Core, Operation, Readers};
use crate::error::Error;
use crate::notifications::Notifications;
use crate::transfer::TransferState;
use crate::window::{Use, Uses};

/// A window that the peer may use.
struct Exposed {
    /// The peer reads it where it lies until this is dropped: before the memory is free.
    read: Option<ReadUntilWritten>,
    slice: RegionSlice,
    uses: Arc<Uses>,
}

impl Drop for Exposed {
    fn drop(&mut self) {
        self.read = None;
        self.uses.revoke();
    }
}

/// Windows of this side, and the peer's notifications.
#[derive(Default)]
pub(crate) struct OneSided {
    windows: Numbered<u64, Exposed>,
    notifications: Arc<Notifications>,
    /// Those that the peer has begun, in this order, and what has come of which before others: the
    /// program hears of them in the order in which they became due, whichever way they travel.
    heard: BTreeMap<OperationId, Option<Vec<u8>>>,
    /// Puts and gets of the peer whose memory an operation still has that may be over for the peer.
    pub(super) behind_lingering: Vec<Action>,
    /// Operations that [come](Operation::comes): bytes come soon that nobody sends before they are
    /// asked for.
    pub(super) coming: usize,
    /// Gets that this side makes by itself, in host memory, the oldest first.
    pub(super) reads: VecDeque<(OperationId, PeerRead)>,
    /// Memory of operations whose bytes travel with their frames.
    nothing: Option<Region>,
    gathers: Gathers,
}

/// Pieces from which the memory of a list is kept for all operations that name it, each by a short
/// frame.
const KEPT_PIECES: u32 = 64;

/// The memory of long lists that the peer keeps here, or why they have none.
#[derive(Default)]
struct Gathers {
    /// By the list's address, which is its own as long as this refers to it, and by whether it is
    /// written.
    kept: HashMap<(usize, bool), KeptGather>,
}

type KeptGather = (Weak<PieceList>, Result<Gather, MemoryError>);

impl Gathers {
    fn find(
        &mut self,
        list: &Arc<PieceList>,
        access: Access,
        make: impl FnOnce() -> Result<Gather, MemoryError>,
    ) -> Result<&Gather, MemoryError> {
        let key = (Arc::as_ptr(list).addr(), access == Access::Write);
        if !self.kept.contains_key(&key) {
            self.kept.retain(|_, (list, _)| list.strong_count() > 0);
        }
        let (_, made) = (self.kept.entry(key)).or_insert_with(|| (Arc::downgrade(list), make()));
        made.as_ref().map_err(MemoryError::clone)
    }
}

/// A notification that follows what a batch moves.
#[derive(Debug)]
pub(crate) struct Notice {
    pub(crate) bytes: Vec<u8>,
    /// Of the batch as a whole, which began then.
    pub(crate) deadlines: Deadlines,
    pub(crate) began: Instant,
    /// It reports the end of its batch, not its own.
    pub(crate) follows: bool,
}

impl OneSided {
    pub(crate) fn notifications(&self) -> Arc<Notifications> {
        Arc::clone(&self.notifications)
    }

    /// A lease of no bytes, for what travels with its frame.
    pub(super) fn lease_nothing(&mut self) -> Result<Lease, MemoryError> {
        let nothing = match self.nothing.take() {
            Some(nothing) => nothing,
            None => Region::host(0)?,
        };
        let lease = nothing.lease(.., Access::Read);
        self.nothing = Some(nothing);
        lease
    }
}

impl Core {
    /// Opens a window of these bytes.
    pub(crate) fn expose(
        &mut self,
        key: impl FnOnce(&mut tcpx_wire::Session) -> WindowKey,
        slice: RegionSlice,
    ) -> (WindowKey, Arc<Uses>) {
        let key = key(&mut self.session);
        let uses = Arc::<Uses>::default();
        let exposed = Exposed {
            read: None,
            slice,
            uses: Arc::clone(&uses),
        };
        self.one_sided.windows.insert(key.window, exposed);
        (key, uses)
    }

    /// Closes a window.
    pub(crate) fn revoke(&mut self, window: u64) {
        self.session.revoke(self.clock.now(), window);
        self.one_sided.windows.remove(&window);
        // They hold its memory.
        self.one_sided.gathers = Gathers::default();
    }

    /// The connection has ended: nothing can be done in windows any more.
    pub(super) fn end_one_sided(&mut self) {
        self.one_sided.windows.clear();
        self.one_sided.behind_lingering.clear();
        self.one_sided.gathers = Gathers::default();
        // What has come is the program's, whatever was to come before it.
        for bytes in std::mem::take(&mut self.one_sided.heard).into_values() {
            let pushed = bytes.map(|bytes| self.one_sided.notifications.push(bytes));
            self.program.wakers.extend(pushed.flatten());
        }
        self.program
            .wakers
            .extend(self.one_sided.notifications.end());
        self.program.ended_some = true;
    }

    pub(super) fn perform_one_sided(&mut self, action: Action) {
        match action {
            Action::PutArrives {
                transfer,
                ref covered,
                bytes,
            } => {
                if let Err(error) = self.take_put(transfer, covered, bytes)
                    && !self.waits_for_lingering(&error, &action)
                {
                    tracing::warn!(peer = %self.peer, ?covered, bytes, %error, "a put of the peer is refused");
                    let reason = RefuseReason::MemoryFailed;
                    self.session.refuse_arrival(transfer, reason);
                }
            }
            Action::NotificationArrives {
                transfer,
                bytes,
                eager,
            } => self.take_notification(transfer, bytes, eager),
            Action::GetArrives {
                request,
                ref covered,
                bytes,
                level,
            } => {
                if let Err(error) = self.answer_get(request, covered, bytes, level)
                    && !self.waits_for_lingering(&error, &action)
                {
                    tracing::warn!(peer = %self.peer, ?covered, bytes, %error, "a get of the peer is refused");
                    self.session.refuse_get(request, RefuseReason::MemoryFailed);
                }
            }
            _ => {}
        }
    }

    fn take_put(
        &mut self,
        transfer: TransferId,
        covered: &Covered,
        bytes: u64,
    ) -> Result<(), Error> {
        let (lease, used) = self.lease_covered(covered, bytes, Access::Write)?;
        if let Some(put) = self.take_from_peer(transfer, OperationKind::PeerPut, lease) {
            put.used = used;
            put.comes = true;
            self.one_sided.coming += 1;
        }
        Ok(())
    }

    /// Whether the memory may be in use by what the peer has ended, so that what it does there next
    /// [waits](Self::lingering_ended) for that.
    fn waits_for_lingering(&mut self, error: &Error, action: &Action) -> bool {
        let waits =
            matches!(error, Error::Memory(MemoryError::Busy { .. })) && self.is_any_lingering();
        if waits {
            let limits = self.session.limits();
            let most = limits.puts as usize + limits.gets as usize;
            let (session, behind) = (&self.session, &mut self.one_sided.behind_lingering);
            if behind.len() > 2 * most {
                // Of puts that have ended at the peer meanwhile.
                behind.retain(|action| match action {
                    Action::PutArrives { transfer, .. } => session.waits(*transfer),
                    _ => true,
                });
            }
            behind.push(action.clone());
        }
        waits
    }

    fn is_any_lingering(&self) -> bool {
        self.operations.values().any(Operation::may_linger)
    }

    /// An operation that may have been over for the peer has let go of its memory.
    pub(super) fn lingering_ended(&mut self) {
        if self.one_sided.behind_lingering.is_empty() || self.is_any_lingering() {
            return;
        }
        for action in std::mem::take(&mut self.one_sided.behind_lingering) {
            self.perform_one_sided(action);
        }
    }

    /// The memory of pieces of windows. The session has checked their bounds.
    fn lease_covered(
        &mut self,
        covered: &Covered,
        bytes: u64,
        access: Access,
    ) -> Result<(Lease, Vec<Use>), Error> {
        const HOLDER: &str = "the peer, in a window";
        let OneSided {
            windows, gathers, ..
        } = &mut self.one_sided;
        let exposed = |window: &u64| {
            let exposed = windows.get(window);
            exposed.ok_or(Error::Closed { peer: self.peer })
        };
        let piece = |offset: u64, bytes: u64| {
            let far = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
            far(offset)..far(offset).saturating_add(far(bytes))
        };
        match covered {
            Covered::Range { window, offset } => {
                let exposed = exposed(window)?;
                let piece = exposed.slice.slice(piece(*offset, bytes))?;
                let range = piece.offset()..piece.offset() + piece.len();
                let lease = piece.region().lease_as(range, access, HOLDER)?;
                Ok((lease, vec![Uses::begin(&exposed.uses)]))
            }
            Covered::Pieces(list) => {
                let named = list.windows().iter();
                let exposed: Vec<_> = named
                    .map(|(window, _)| exposed(window))
                    .collect::<Result<_, _>>()?;
                let make = || {
                    let parents: Vec<_> = exposed.iter().map(|one| one.slice.clone()).collect();
                    let pieces = list.runs().iter().flat_map(|run| {
                        let window = run.window as usize;
                        let length = run.length;
                        let offsets = run.offsets();
                        offsets.map(move |offset| (window, piece(offset, length)))
                    });
                    Gather::new(&parents, pieces, access)
                };
                let region = match list.pieces() {
                    KEPT_PIECES.. => gathers.find(list, access, make)?.region(HOLDER)?,
                    _ => make()?.region(HOLDER)?,
                };
                let uses = exposed.iter().map(|one| Uses::begin(&one.uses)).collect();
                Ok((region.lease(.., access)?, uses))
            }
        }
    }

    /// Takes a transfer of the peer into memory that it has.
    fn take_from_peer(
        &mut self,
        transfer: TransferId,
        kind: OperationKind,
        lease: Lease,
    ) -> Option<&mut Operation> {
        let id = self.session.accept(self.clock.now(), transfer)?;
        if kind == OperationKind::PeerNotification {
            self.one_sided.heard.insert(id, None);
        }
        let operation = Operation::new(kind, lease, TransferState::new(0), self.clock.ticked());
        Some(self.operations.entry(id).insert_entry(operation).into_mut())
    }

    fn take_notification(&mut self, transfer: TransferId, bytes: u64, eager: bool) {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let lease = match eager {
            true => self.one_sided.lease_nothing(),
            false => Region::host(length).and_then(|region| region.lease(.., Access::Write)),
        };
        match lease {
            Ok(lease) => {
                self.take_from_peer(transfer, OperationKind::PeerNotification, lease);
            }
            Err(error) => {
                tracing::warn!(peer = %self.peer, bytes, %error, "a notification of the peer is refused");
                let reason = RefuseReason::MemoryFailed;
                self.session.refuse_arrival(transfer, reason);
            }
        }
    }

    /// Tells the session which notifications the program has collected, for which others wait.
    pub(crate) fn collect_notifications(&mut self) {
        let notifications = &self.one_sided.notifications;
        // Who collects one from here on comes here too.
        notifications.set_postponed(true);
        let (count, bytes) = notifications.take_collected();
        self.session.notifications_collected(count, bytes);
        notifications.set_postponed(self.session.has_postponed());
    }

    /// A get is asked for.
    pub(crate) fn get_started(&mut self, id: OperationId) {
        if let Some(get) = self.operations.get_mut(&id) {
            // A short answer comes with its frame.
            get.comes = !self.session.eager_allowed(get.lease.range().len() as u64);
            self.one_sided.coming += usize::from(get.comes);
        }
    }

    /// A notification of the peer has come, or ended otherwise.
    pub(super) fn notification_ended(&mut self, id: OperationId, came: Option<Vec<u8>>) {
        let OneSided {
            heard,
            notifications,
            ..
        } = &mut self.one_sided;
        match came {
            Some(bytes) => _ = heard.insert(id, Some(bytes)),
            None => _ = heard.remove(&id),
        }
        while let Some(mut first) = heard.first_entry()
            && let Some(bytes) = first.get_mut().take()
        {
            first.remove();
            self.program.wakers.extend(notifications.push(bytes));
        }
    }

    fn answer_get(
        &mut self,
        request: u64,
        covered: &Covered,
        bytes: u64,
        level: Level,
    ) -> Result<(), Error> {
        let (mut lease, used) = self.lease_covered(covered, bytes, Access::Read)?;
        self.expose_windows(covered);
        let send = SendRequest {
            to: Destination::Reply { request },
            bytes,
            level: level.max(Level::Placed),
            deadlines: None,
            eager: None,
            chunk_bytes: None,
        };
        let (id, readers) = self.start_send(&mut lease, None, send)?;
        let (kind, state) = (OperationKind::PeerGet, TransferState::new(bytes));
        let mut operation = Operation::new(kind, lease, state, self.clock.ticked());
        operation.used = used;
        operation.read_by(readers);
        self.operations.insert(id, operation);
        Ok(())
    }

    /// The peer may get there: it does the next time without this side, where it can.
    fn expose_windows(&mut self, covered: &Covered) {
        let Some(only) = self.channels.only() else {
            return;
        };
        let (session, windows) = (&self.session, &mut self.one_sided.windows);
        let mut expose = |window: u64| {
            if let Some(exposed) = windows.get_mut(&window)
                && !exposed.read.as_ref().is_some_and(ReadUntilWritten::lasts)
                && let Some(place) = session.window(window)
            {
                exposed.read = None;
                exposed.read = only.expose_window(&place, &exposed.slice);
            }
        };
        match covered {
            Covered::Range { window, .. } => expose(*window),
            Covered::Pieces(list) => list
                .windows()
                .iter()
                .for_each(|(window, _)| expose(*window)),
        }
    }

    /// Begins a get that this side makes by itself.
    pub(crate) fn begin_read(&mut self, id: OperationId, read: PeerRead) {
        let Some(get) = self.operations.get_mut(&id) else {
            return;
        };
        if read.gpu_memory().is_some() {
            let to = get.lease.all();
            return self.begin_copy(id, read, to);
        }
        get.outstanding += 1;
        self.one_sided.reads.push_back((id, read));
    }

    /// Copies what lies in memory of a GPU.
    pub(super) fn begin_copy(&mut self, id: OperationId, read: PeerRead, to: RegionSlice) {
        let (Some(operation), Some(from)) = (self.operations.get_mut(&id), read.gpu_memory())
        else {
            return;
        };
        operation.outstanding += 1;
        let (from, fence) = (from.clone(), operation.fence.clone());
        let token = self.tokens.add(Token::Read(id, read));
        // This thread does it at once if it is short.
        let started = match &mut self.gpu.small {
            Some(small) => small.start_within(&from, &to, fence.as_ref(), token),
            None => Ok(false),
        };
        match started {
            Ok(true) => {}
            Ok(false) => self.submit(Work::Copy { from, to }, token, id),
            Err(error) => {
                self.tokens.open.remove(&token);
                self.read_failed(id, &error);
            }
        }
    }

    /// Reads as much in windows as there is time for; `true` if there was anything.
    pub(super) fn read_windows(&mut self) -> bool {
        let mut any = false;
        while let Some((id, read)) = self.one_sided.reads.pop_front() {
            any = true;
            self.read_on(id, read);
            if self.clock.is_spent(true) {
                break;
            }
        }
        any
    }

    /// Reads on in windows, in host memory or after a copy.
    pub(super) fn read_on(&mut self, id: OperationId, mut read: PeerRead) {
        let (Some(get), Some(only)) = (self.operations.get(&id), self.channels.only()) else {
            return;
        };
        let into = get.lease.slice(..read.bytes()).map_err(io::Error::other);
        let ended = into.and_then(|into| only.read_on(&mut read, &into));
        // It took its time, of which the report tells.
        self.clock.tick();
        match ended.unwrap_or(Some(false)) {
            None => self.one_sided.reads.push_front((id, read)),
            Some(is_whole) => self.read_ended(id, is_whole),
        }
    }

    /// What was to be read is there, or windows are not what they were: then the peer says what is.
    pub(super) fn read_ended(&mut self, id: OperationId, is_whole: bool) {
        if !self.job_off(id) {
            return;
        }
        let now = self.clock.now();
        if is_whole {
            return self.session.eager_copied(now, id);
        }
        // What a send of the peer exposes no more has ended there, which it says.
        if self.is_get(id) {
            self.get_started(id);
            self.session.ask_owner(now, id);
        }
    }

    /// What was to be read could not be copied.
    pub(super) fn read_failed(&mut self, id: OperationId, error: &MemoryError) {
        if self.is_get(id) {
            return self.read_ended(id, false);
        }
        if self.job_off(id) {
            self.memory_failed(id, error);
        }
    }

    fn is_get(&self, id: OperationId) -> bool {
        let operation = self.operations.get(&id);
        operation.is_some_and(|operation| operation.kind == OperationKind::Get)
    }

    /// Starts a send; its payload goes with the announcement where that is faster, or its place
    /// does.
    pub(crate) fn start_send(
        &mut self,
        lease: &mut Lease,
        fence: Option<&Fence>,
        request: SendRequest,
    ) -> Result<(OperationId, Readers), Error> {
        let bytes = request.bytes;
        // Before the bytes are read, which takes a while from a GPU.
        self.pace.calls(self.clock.ticked());
        let is_keyed = request.level == Level::Verified && self.session.is_bare(bytes);
        let (at, exposed) = self.place_of(lease, fence, &request).unzip();
        let mut abandoned = None;
        let eager = match at {
            Some(at) => Some(Eager::Exposed(at)),
            None if self.session.eager_allowed(bytes) && !is_keyed => {
                let (payload, copy) = self.read_small(lease, fence)?;
                abandoned = copy;
                payload.map(Eager::from)
            }
            None => None,
        };
        let announced = eager.is_none();
        if self.gpu.device.is_some() {
            self.clock.tick();
        }
        let only = self.channels.only().filter(|_| eager.is_none());
        let chunk_bytes = only.and_then(|only| only.chunk_bytes(&lease.all()));
        let request = SendRequest {
            eager,
            chunk_bytes,
            ..request
        };
        let started = self.session.send(self.clock.now(), request);
        if announced && started.is_ok() {
            self.channels.expect(bytes, Direction::Out);
        }
        let id = started.map_err(|error| self.request_error(error))?;
        if let Some(token) = abandoned {
            self.tokens.open.insert(token, Token::SmallRead(id));
        }
        let is_copied = abandoned.is_some();
        Ok((id, Readers { exposed, is_copied }))
    }

    /// Starts a notification behind `count` puts from `first` on.
    pub(crate) fn notify(
        &mut self,
        notice: Notice,
        state: Arc<TransferState>,
        first: TransferId,
        count: u32,
    ) -> Result<OperationId, Error> {
        let bytes = notice.bytes.len() as u64;
        let spent = self.clock.ticked().saturating_duration_since(notice.began);
        let total = notice.deadlines.total;
        let deadlines = Deadlines {
            total: total.map(|total| total.saturating_sub(spent)),
            ..notice.deadlines
        };
        let request = SendRequest {
            to: Destination::Notification { first, count },
            bytes,
            level: Level::Placed,
            deadlines: Some(deadlines),
            eager: None,
            chunk_bytes: None,
        };
        let ((id, readers), lease) = if self.session.eager_allowed(bytes) {
            let lease = self.one_sided.lease_nothing()?;
            let request = SendRequest {
                eager: Some(notice.bytes.into()),
                ..request
            };
            let started = self.session.send(self.clock.now(), request);
            let id = started.map_err(|error| self.request_error(error))?;
            ((id, Readers::default()), lease)
        } else {
            let region = Region::host(notice.bytes.len())?;
            region.write_from(0, &notice.bytes)?;
            let mut lease = region.lease(.., Access::Read)?;
            (self.start_send(&mut lease, None, request)?, lease)
        };
        let kind = OperationKind::Notification;
        let mut operation = Operation::new(kind, lease, state, self.clock.ticked());
        operation.follows = notice.follows;
        operation.read_by(readers);
        self.operations.insert(id, operation);
        Ok(id)
    }
}
