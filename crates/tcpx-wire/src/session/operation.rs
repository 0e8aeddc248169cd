//! The table of operations: what each is, how far it is, who must act next, and which of its clocks
//! runs.
//!
//! An operation goes `Queued -> Asked -> Moving -> Over`, and by `Stopping` where something ends it
//! early: [`Stage`] says how far its transfer is, [`End`] how far its end.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::action::{Covered, OperationId};
use super::chunk_set::ChunkSet;
use super::config::Deadlines;
use super::error::{Delivered, EndCause};
use super::matching::Arrival;
use super::stall::{OperationKind, Owes, StallReport};
use super::stream::Plan;
use crate::frame::{Destination, Extent, Level, Notified, Role, Tag, TimeLeft, TransferId};
use crate::numbered::{Numbered, take_out};
use crate::time::Time;

/// Why an operation exists.
#[derive(Clone, Debug)]
pub(super) enum Origin {
    Send,
    Receive {
        /// GPU work of the caller comes first.
        fenced: bool,
    },
    Put {
        to: Extent,
        notified: Notified,
    },
    Notification {
        first: TransferId,
        count: u32,
    },
    Get {
        from: Extent,
        /// Its number once it left.
        request: Option<u64>,
    },
    PeerPut {
        covered: Covered,
        /// The puts before the notification that follows.
        group: Option<u64>,
    },
    PeerNotification {
        /// As of a put.
        group: Option<u64>,
        /// It has a place among those that the program is to collect.
        is_told: bool,
    },
    PeerGet {
        request: u64,
        /// What of this side's windows its answer is read from.
        covered: Covered,
    },
}

impl Origin {
    pub(super) fn kind(&self) -> OperationKind {
        match self {
            Self::Send => OperationKind::Send,
            Self::Receive { .. } => OperationKind::Receive,
            Self::Put { .. } => OperationKind::Put,
            Self::Notification { .. } => OperationKind::Notification,
            Self::Get { .. } => OperationKind::Get,
            Self::PeerPut { .. } => OperationKind::PeerPut,
            Self::PeerNotification { .. } => OperationKind::PeerNotification,
            Self::PeerGet { .. } => OperationKind::PeerGet,
        }
    }

    /// Where its transfer goes, as the peer is told.
    pub(super) fn destination(&self, tag: Tag, number: Option<u64>) -> Destination {
        match *self {
            Self::Put { to, notified } => Destination::Put {
                to,
                notified,
                left: TimeLeft::ANY,
            },
            Self::Notification { first, count } => Destination::Notification { first, count },
            Self::PeerGet { request, .. } => Destination::Reply { request },
            _ => Destination::Receive {
                tag,
                number: number.unwrap_or(0),
            },
        }
    }

    /// What the peer does in windows of this side.
    pub(super) fn covered(&self) -> Option<&Covered> {
        match self {
            Self::PeerPut { covered, .. } | Self::PeerGet { covered, .. } => Some(covered),
            _ => None,
        }
    }
}

/// One operation of this side or of the peer.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) origin: Origin,
    /// 0 unless it is a send or a receive.
    pub(super) tag: Tag,
    /// Its number among those of its tag, while it waits, or is in the window of one: it may be
    /// another one's afterwards.
    pub(super) number: Option<u64>,
    /// What both sides call its transfer; none while there is none that the peer knows, or has
    /// still to hear of.
    pub(super) wire: Option<TransferId>,
    /// Length of the transfer; until that is known, what a receive can hold.
    pub(super) bytes: u64,
    /// Pieces of a list that it covers.
    pub(super) pieces: u32,
    /// Bytes of a send's chunks, if they are not as the peer says.
    pub(super) chunk_bytes: Option<u32>,
    /// It counts against a limit of the side that takes it.
    pub(super) is_counted: bool,
    pub(super) asked: Level,
    /// What both sides reach, once that is agreed.
    pub(super) level: Level,
    /// A send's first frame has left; something came to a receive's window, perhaps not a whole
    /// chunk.
    pub(super) is_begun: bool,
    /// It has asked for a receive, which a send does once.
    pub(super) has_asked: bool,
    /// The transfer that a receive takes once its window is closed, or its fence reached.
    pub(super) offered: Option<Box<Arrival>>,
    pub(super) digests: Digests,
    pub(super) clock: OperationClock,
    pub(super) stage: Stage,
    pub(super) end: End,
}

/// Tags of both memories; of eager payload their CRC32C.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Digests {
    /// The data plane computes one.
    pub(super) computing: bool,
    pub(super) ours: Option<u128>,
    pub(super) theirs: Option<u128>,
}

/// How far its transfer is.
#[derive(Debug)]
pub(super) enum Stage {
    /// The peer has not heard of it.
    Queued,
    /// The peer was asked to take or send it, and has to answer.
    Asked,
    /// The window of a receive is open, and no send has come to it.
    Posted(Box<Posted>),
    /// Its payload travels with the frame that asks, or is read by this side.
    Eager {
        /// It is at its destination.
        done: bool,
        /// The sender waits for a verdict.
        verdict_wanted: bool,
        /// Bytes of the sender's credit that the payload occupies here.
        credit: u64,
    },
    /// Its chunks are under way. In a box: without it small ones, which end soon, would be moved
    /// about with room for all this.
    Moving(Box<Moving>),
}

impl Stage {
    /// A payload of this side travels with the frame that asks, or one of the peer's is read.
    pub(super) const SENT: Self = Self::Eager {
        done: false,
        verdict_wanted: false,
        credit: 0,
    };
}

/// The open window of a receive that no send has come to.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) window: u64,
    /// How a transfer that fills it is cut.
    pub(super) plan: Plan,
    /// The data plane was asked to let go of it.
    pub(super) closing: bool,
    /// The transfer whose sender asked, and will find the window.
    pub(super) asked_by: Option<Arrival>,
}

/// What has moved of a transfer in chunks.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) plan: Plan,
    /// The data plane has it as a window: every chunk may come at any time.
    pub(super) is_window: bool,
    /// The send's window was closed, and the data plane has yet to let go of it.
    pub(super) is_leaving: bool,
    /// Chunks that were given to the data plane, that it has sent or that have arrived, and that
    /// are at their destination: for a send, as far as the peer said so.
    pub(super) posted: ChunkSet,
    pub(super) passed: ChunkSet,
    pub(super) placed: ChunkSet,
    pub(super) placed_bytes: u64,
    /// Placed here and not acknowledged.
    pub(super) unacked: Vec<u32>,
}

impl Moving {
    pub(super) fn new(plan: Plan, is_window: bool) -> Self {
        Self {
            plan,
            is_window,
            is_leaving: false,
            posted: ChunkSet::default(),
            passed: ChunkSet::default(),
            placed: ChunkSet::default(),
            placed_bytes: 0,
            unacked: Vec::new(),
        }
    }

    pub(super) fn all_placed(&self) -> bool {
        self.placed.len() == self.plan.chunks
    }

    /// The data plane has a place for the chunk.
    pub(super) fn is_posted(&self, index: u32) -> bool {
        self.is_window && index < self.plan.chunks || self.posted.contains(index)
    }

    /// Chunks that the data plane holds, or keeps for sending again.
    pub(super) fn held(&self) -> impl Iterator<Item = u32> {
        let moving = self.posted.difference(&self.passed);
        moving.chain(self.passed.difference(&self.placed))
    }
}

/// How far its end is.
#[derive(Debug)]
pub(super) enum End {
    /// It runs.
    Open,
    /// Something ends it early.
    Stopping(Box<Stopping>),
    /// It was reported complete; what is left is the peer's part.
    Over,
}

/// An operation that ends early. The peer hears of it unless it never heard of the operation.
#[derive(Debug)]
pub(super) struct Stopping {
    pub(super) cause: EndCause,
    /// It was reported complete.
    pub(super) is_reported: bool,
    /// This side's data plane let go of the memory, which the peer was told.
    pub(super) is_quiet: bool,
    /// The peer's has, as it said.
    pub(super) is_peer_quiet: bool,
    pub(super) since: Time,
}

/// How far a transfer is, for its sender, or for a receiver that ends early.
#[derive(Debug, PartialEq)]
pub(super) enum Progress {
    Going,
    /// The operation ends; `last` when the peer owes nothing more.
    Done {
        level: Level,
        last: bool,
    },
    Corrupt {
        expected: u128,
        got: u128,
    },
}

/// The chunk that is waited for and who owes it.
type Culprit = (Option<u32>, Owes);

impl Operation {
    pub(super) fn role(&self) -> Role {
        self.origin.kind().role()
    }

    pub(super) fn destination(&self) -> Destination {
        self.origin.destination(self.tag, self.number)
    }

    pub(super) fn moving(&self) -> Option<&Moving> {
        match &self.stage {
            Stage::Moving(moving) => Some(moving),
            _ => None,
        }
    }

    pub(super) fn stopping(&mut self) -> Option<&mut Stopping> {
        match &mut self.end {
            End::Stopping(stopping) => Some(stopping),
            _ => None,
        }
    }

    /// It runs, and nothing ends it early.
    pub(super) fn is_live(&self) -> bool {
        matches!(self.end, End::Open)
    }

    pub(super) fn is_stopping(&self) -> bool {
        matches!(self.end, End::Stopping(_))
    }

    /// It was reported complete.
    pub(super) fn is_reported(&self) -> bool {
        match &self.end {
            End::Open => false,
            End::Stopping(stopping) => stopping.is_reported,
            End::Over => true,
        }
    }

    /// It ends early, and the data plane has let go of its memory.
    pub(super) fn is_quiet(&self) -> bool {
        matches!(&self.end, End::Stopping(stopping) if stopping.is_quiet)
    }

    /// It goes on once the data plane has let go of its window.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.is_live() && self.is_leaving()
    }

    fn is_leaving(&self) -> bool {
        match &self.stage {
            Stage::Posted(posted) => posted.closing,
            Stage::Moving(moving) => moving.is_leaving,
            _ => false,
        }
    }

    /// The transfer of a receive has come, or that of a send is taken.
    pub(super) fn is_matched(&self) -> bool {
        matches!(self.stage, Stage::Eager { .. } | Stage::Moving(_))
    }

    /// A send that asks for a receive, or has a window: one that left with its payload does not.
    pub(super) fn wants_receive(&self) -> bool {
        matches!(self.origin, Origin::Send) && !matches!(self.stage, Stage::Eager { .. })
    }

    /// The data plane may touch its memory.
    pub(super) fn is_busy(&self) -> bool {
        let receives = self.role() == Role::Receiver;
        self.digests.computing
            || match &self.stage {
                Stage::Queued | Stage::Asked => false,
                Stage::Posted(_) => true,
                Stage::Eager { done, .. } => receives && !done,
                Stage::Moving(moving) if receives => match moving.is_window {
                    true => !moving.all_placed(),
                    false => moving.posted.len() != moving.placed.len(),
                },
                Stage::Moving(moving) => moving.posted.len() != moving.passed.len(),
            }
    }

    /// A get that this side makes by itself.
    pub(super) fn is_read(&self) -> bool {
        let is_eager = matches!(self.stage, Stage::Eager { .. });
        is_eager && matches!(self.origin, Origin::Get { request: None, .. })
    }

    /// All of it is at its destination, and for a send the peer has said so.
    pub(super) fn all_placed(&self) -> bool {
        match &self.stage {
            Stage::Eager { done, .. } => *done,
            Stage::Moving(moving) => moving.all_placed(),
            _ => false,
        }
    }

    /// The peer says nothing more of a send, unless one of the sides ends it early.
    pub(super) fn is_answered(&self) -> bool {
        let is_verified = self.digests.theirs.is_some();
        match &self.stage {
            Stage::Eager { done, .. } => match self.digests.theirs {
                Some(_) => *done || self.digests.ours != self.digests.theirs,
                None => *done && self.asked < Level::Verified,
            },
            Stage::Moving(moving) => {
                moving.all_placed() && (self.level < Level::Verified || is_verified)
            }
            _ => false,
        }
    }

    /// `released`: the data plane is known to be done with the memory whatever it reported.
    pub(super) fn progress(&self, released: bool) -> Progress {
        let (ours, theirs) = (self.digests.ours, self.digests.theirs);
        let all_placed = self.all_placed();
        let level = match self.level {
            Level::Verified => Level::Verified,
            _ => self.asked,
        };
        if self.role() == Role::Receiver {
            return match all_placed && self.level < Level::Verified {
                true => Progress::Done {
                    level: Level::Placed,
                    last: true,
                },
                false => Progress::Going,
            };
        }
        match &self.stage {
            Stage::Eager { .. } => match (ours, theirs) {
                (Some(expected), Some(got)) if got != expected => {
                    return Progress::Corrupt { expected, got };
                }
                (_, None) if level == Level::Verified => return Progress::Going,
                _ if all_placed => {}
                _ if self.is_begun && level == Level::Sent => {}
                _ => return Progress::Going,
            },
            Stage::Moving(moving) if !moving.is_leaving => {
                let all_sent = moving.passed.len() == moving.plan.chunks;
                if !(all_sent || released && all_placed) || self.digests.computing {
                    return Progress::Going;
                }
                match (level, ours, theirs) {
                    (Level::Verified, Some(expected), Some(got)) if all_placed => match got {
                        got if got == expected => {}
                        got => return Progress::Corrupt { expected, got },
                    },
                    (Level::Verified, ..) => return Progress::Going,
                    (Level::Placed, ..) if !all_placed => return Progress::Going,
                    _ => {}
                }
            }
            _ => return Progress::Going,
        }
        Progress::Done {
            level,
            last: all_placed,
        }
    }

    pub(super) fn delivered(&self) -> Delivered {
        if self.all_placed() {
            return Delivered::All;
        }
        let is_told = matches!(&self.end, End::Stopping(stopping) if stopping.is_peer_quiet);
        let (is_begun, bytes) = match (self.role(), &self.stage) {
            (Role::Sender, Stage::Queued) => (false, 0),
            // An empty one may be complete at the peer.
            (Role::Sender, Stage::Asked) => (self.bytes == 0 && self.is_begun && !is_told, 0),
            (Role::Sender, Stage::Moving(moving)) => {
                (!moving.posted.is_empty(), moving.placed_bytes)
            }
            (Role::Receiver, Stage::Moving(moving)) => (
                moving.is_window || !moving.posted.is_empty(),
                moving.placed_bytes,
            ),
            (Role::Receiver, Stage::Eager { .. }) => (true, 0),
            _ => (self.is_begun, 0),
        };
        match is_begun {
            false => Delivered::None,
            true if is_told || self.role() == Role::Receiver => Delivered::Partial { bytes },
            true => Delivered::Unknown,
        }
    }

    /// What it waits for before anything moves.
    fn awaits(&self) -> Owes {
        match self.origin {
            Origin::Send => Owes::PeerPostReceive,
            Origin::Receive { .. } => Owes::PeerSendMatching,
            _ => Owes::PeerAnswer,
        }
    }

    pub(super) fn culprit(&self) -> Culprit {
        let sends = self.role() == Role::Sender;
        let owes = match &self.stage {
            _ if self.is_leaving() => Owes::LocalStop,
            Stage::Queued if self.offered.is_some() => Owes::LocalFence,
            Stage::Asked | Stage::Eager { .. } if sends && !self.is_begun => Owes::LocalControl,
            Stage::Queued | Stage::Asked | Stage::Posted(_) => self.awaits(),
            Stage::Eager { done: false, .. } if sends => self.awaits(),
            Stage::Eager { done: false, .. } => Owes::LocalUnpack,
            Stage::Moving(moving) => {
                let until_sent = self.asked == Level::Sent && self.level < Level::Verified;
                let found = match sends {
                    true => moving.sending(until_sent && !self.is_reported()),
                    false => moving.receiving(),
                };
                match found {
                    Some((chunk, owes)) => return (Some(chunk), owes),
                    None => self.verifies(),
                }
            }
            Stage::Eager { .. } => self.verifies(),
        };
        (None, owes)
    }

    /// What is left once everything is placed.
    fn verifies(&self) -> Owes {
        let waits = self.level.max(self.asked) == Level::Verified && self.digests.theirs.is_none();
        match self.role() {
            _ if self.digests.computing => Owes::LocalDigest,
            Role::Sender if waits => Owes::PeerVerdict,
            Role::Receiver if waits => Owes::PeerDigest,
            _ => Owes::Nobody,
        }
    }

    pub(super) fn standing(&self, now: Time, (chunk, owes): Culprit) -> StallReport {
        let plan = self.moving().map(|moving| &moving.plan);
        let at = chunk.zip(plan).map(|(chunk, plan)| plan.chunk(chunk));
        StallReport {
            kind: self.origin.kind(),
            tag: self.tag,
            transfer: self.wire,
            chunk,
            channel: at.map(|at| at.channel),
            offset: at.map_or(0, |at| at.offset),
            bytes_done: match &self.stage {
                Stage::Eager { done: true, .. } => self.bytes,
                Stage::Moving(moving) => moving.placed_bytes,
                _ => 0,
            },
            bytes_total: self.bytes,
            waited: self.clock.waited(now),
            owes,
            peer: None,
        }
    }
}

impl Moving {
    fn sending(&self, until_sent: bool) -> Option<(u32, Owes)> {
        let done = if until_sent {
            &self.passed
        } else {
            &self.placed
        };
        if let Some(chunk) = self.missing(done) {
            let owes = if !self.posted.contains(chunk) {
                Owes::EarlierTransfer
            } else if !self.passed.contains(chunk) {
                Owes::LocalNetworkSend
            } else {
                Owes::PeerAcknowledge
            };
            return Some((chunk, owes));
        }
        let unsent = self.missing(&self.passed)?;
        Some((unsent, Owes::LocalNetworkSend))
    }

    /// An arrived chunk that is not placed blocks the others, whichever was sent first.
    fn receiving(&self) -> Option<(u32, Owes)> {
        if let Some(chunk) = self.passed.difference(&self.placed).next() {
            return Some((chunk, Owes::LocalUnpack));
        }
        let chunk = self.missing(&self.placed)?;
        let owes = match self.is_posted(chunk) {
            true => Owes::PeerSend,
            false => Owes::EarlierTransfer,
        };
        Some((chunk, owes))
    }

    fn missing(&self, from: &ChunkSet) -> Option<u32> {
        let missing = u32::try_from(from.first_missing()).ok();
        missing.filter(|chunk| *chunk < self.plan.chunks)
    }
}

/// Every operation: in two halves, of which one takes bytes of the peer, and by the names that the
/// peer has for them.
#[derive(Debug, Default)]
pub(super) struct Table {
    halves: [Numbered<OperationId, Operation>; 2],
    /// By the part of this side; sends are left out that bear the name of their own.
    names: [BTreeMap<TransferId, OperationId>; 2],
    next: [u64; 2],
    /// How many of each half the peer began.
    peers: [usize; 2],
}

impl Table {
    pub(super) fn half(&self, role: Role) -> &Numbered<OperationId, Operation> {
        &self.halves[role as usize]
    }

    pub(super) fn len(&self, role: Role) -> usize {
        self.half(role).len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.halves.iter().all(Numbered::is_empty)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (OperationId, &Operation)> {
        let all = self.halves.iter().flatten();
        all.map(|(operation, it)| (*operation, it))
    }

    pub(super) fn get(&self, operation: OperationId) -> Option<&Operation> {
        self.halves[operation.role() as usize].get(&operation)
    }

    pub(super) fn get_mut(&mut self, operation: OperationId) -> Option<&mut Operation> {
        self.halves[operation.role() as usize].get_mut(&operation)
    }

    /// How many operations of this part there were.
    pub(super) fn begun(&self, role: Role) -> u64 {
        self.next[role as usize]
    }

    /// The name of the next operation of this part.
    pub(super) fn next_id(&mut self, role: Role) -> OperationId {
        let next = &mut self.next[role as usize];
        *next += 1;
        OperationId::new(role, *next - 1)
    }

    pub(super) fn insert(&mut self, operation: OperationId, it: Operation) -> &mut Operation {
        let half = operation.role() as usize;
        self.peers[half] += usize::from(it.origin.kind().is_peers());
        (self.halves[half].entry(operation).insert_entry(it)).into_mut()
    }

    pub(super) fn take_out(&mut self, operation: OperationId) -> Option<Operation> {
        let half = operation.role() as usize;
        let it = take_out(&mut self.halves[half], &operation)?;
        self.peers[half] -= usize::from(it.origin.kind().is_peers());
        Some(it)
    }

    /// Operations that this side began.
    pub(super) fn own(&self, role: Role) -> usize {
        self.len(role) - self.peers[role as usize]
    }

    /// The operation that has such a name in frames, in which this side has this part.
    pub(super) fn named(&self, role: Role, transfer: TransferId) -> Option<OperationId> {
        match (role, transfer.window()) {
            (Role::Sender, None) => Some(OperationId::new(role, transfer.0)),
            _ => self.names[role as usize].get(&transfer).copied(),
        }
    }

    /// The same, and what it is.
    pub(super) fn find(
        &mut self,
        role: Role,
        transfer: TransferId,
    ) -> Option<(OperationId, &mut Operation)> {
        let operation = self.named(role, transfer)?;
        Some((operation, self.get_mut(operation)?))
    }

    pub(super) fn name(&mut self, operation: OperationId, transfer: TransferId) {
        self.names[operation.role() as usize].insert(transfer, operation);
    }

    /// The operation bears this name no more.
    pub(super) fn unname(&mut self, operation: OperationId, transfer: TransferId) {
        if let Entry::Occupied(name) = self.names[operation.role() as usize].entry(transfer)
            && *name.get() == operation
        {
            name.remove();
        }
    }

    /// Names of transfers to here.
    pub(super) fn names(&self, role: Role) -> usize {
        self.names[role as usize].len()
    }
}

/// The times of one operation.
#[derive(Clone, Debug)]
pub(super) struct OperationClock {
    deadlines: Deadlines,
    created: Time,
    progress: Time,
    armed: Option<Time>,
}

/// Which deadline passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expired {
    Stall,
    Total,
}

impl OperationClock {
    pub(super) fn progressed(&mut self, now: Time) {
        self.progress = self.progress.max(now);
    }

    fn waited(&self, now: Time) -> Duration {
        now.saturating_since(self.progress)
    }

    /// When the first deadline passes if nothing happens.
    pub(super) fn due(&self) -> Time {
        let stall = self.progress + self.deadlines.stall;
        self.ends_at().map_or(stall, |end| stall.min(end))
    }

    /// When the total deadline passes.
    pub(super) fn ends_at(&self) -> Option<Time> {
        let total = self.deadlines.total?;
        Some(self.created + total)
    }

    /// What the peer is told, if that happens now. It ends nothing before this side does.
    pub(super) fn left(&self, now: Time) -> TimeLeft {
        let ms = |left: Duration| {
            let ms = left.as_millis().saturating_add(1);
            u32::try_from(ms).unwrap_or(u32::MAX)
        };
        let total = self.ends_at().map(|end| end.saturating_since(now));
        TimeLeft {
            stall_ms: ms(self.deadlines.stall),
            total_ms: total.map_or(u32::MAX, ms),
        }
    }

    pub(super) fn expired(&self, now: Time) -> Option<Expired> {
        if self.ends_at().is_some_and(|end| end <= now) {
            Some(Expired::Total)
        } else if self.progress + self.deadlines.stall <= now {
            Some(Expired::Stall)
        } else {
            None
        }
    }
}

/// One wake-up per operation, never later than its deadline. Progress moves deadlines without
/// touching this; a wake-up that turns out early is set again.
#[derive(Debug, Default)]
pub(super) struct Timers(BTreeSet<(Time, OperationId)>);

impl Timers {
    /// The clock of an operation that begins.
    pub(super) fn begin(
        &mut self,
        now: Time,
        operation: OperationId,
        deadlines: Deadlines,
    ) -> OperationClock {
        let mut clock = OperationClock {
            deadlines,
            created: now,
            progress: now,
            armed: None,
        };
        let due = clock.due();
        self.arm(&mut clock, operation, due);
        clock
    }

    pub(super) fn arm(&mut self, clock: &mut OperationClock, operation: OperationId, at: Time) {
        self.disarm(clock, operation);
        clock.armed = Some(at);
        self.0.insert((at, operation));
    }

    pub(super) fn disarm(&mut self, clock: &mut OperationClock, operation: OperationId) {
        if let Some(at) = clock.armed.take() {
            self.0.remove(&(at, operation));
        }
    }

    pub(super) fn first(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Takes an operation whose wake-up is due out of the list.
    pub(super) fn take_due(&mut self, now: Time) -> Option<OperationId> {
        let first = self.0.first().copied().filter(|(at, _)| *at <= now)?;
        self.0.remove(&first);
        Some(first.1)
    }
}
