//! What each side takes of the other one at a time.
//!
//! Both count alike: from the frame that asks to the last frame about it, whichever side sends
//! that. Frames of a direction keep their order, so that the side which takes never counts more
//! than the one which asks. That one keeps back what does not fit, and begins it as others end; to
//! the other one it is a breach.

use std::collections::BTreeSet;

use super::Session;
use super::action::{Action, OperationId};
use super::config::{self, MAX_EXPOSED_BYTES};
use super::error::{RequestError, SessionError};
use super::matching::{PostedWindow, SendTag, fits};
use super::one_sided::Queued;
use super::operation::{Operation, Origin, Posted, Stage};
use super::stall::OperationKind;
use super::stream::Plan;
use super::unexpected;
use crate::frame::{
    Eager, Frame, LEAST_PLAIN_BYTES, Level, Limits, Notified, NumberUse, Role, Tag, TimeLeft,
    TransferId,
};
use crate::time::Time;

/// What sends of the peer are that wait for a receive, which is not there.
pub(super) const ASKS: &str = "transfers that wait for a receive";
/// What a sender has its receiver count.
pub(super) const TAGS: &str = "tags, and has forgotten none";
/// What a receiver has its sender keep. Receives beyond are granted when their sends ask.
pub(super) const POSTED: &str = "announced receives";

/// Idle tags are forgotten once less than this part of a limit of tags is free, so many at a time.
const FREE_TAG_PARTS: usize = 8;
/// Credit is given back once it is more than this part of the whole.
const CREDIT_PARTS: u64 = 8;

/// Whether so many more fit; the error is what the side that takes them says of the peer.
pub(super) fn within(
    what: &'static str,
    counted: usize,
    more: u32,
    limit: u32,
) -> Result<(), SessionError> {
    if counted as u64 + u64::from(more) <= u64::from(limit) {
        return Ok(());
    }
    let limit = limit.into();
    Err(SessionError::TooMany { what, limit })
}

/// What one side has asked of the other, by kind.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct UnderWay {
    operations: [u32; 4],
    /// Of lists, in all of them.
    pieces: u32,
}

impl UnderWay {
    /// Counts one of so many pieces, if it fits.
    pub(super) fn begin(
        &mut self,
        limits: &Limits,
        kind: OperationKind,
        pieces: u32,
    ) -> Result<(), SessionError> {
        self.check(limits, kind)?;
        let what = "pieces of operations under way";
        within(what, self.pieces as usize, pieces, limits.pieces)?;
        self.operations[place(kind)] += 1;
        self.pieces += pieces;
        Ok(())
    }

    /// Whether one more fits, be it of no pieces.
    pub(super) fn check(&self, limits: &Limits, kind: OperationKind) -> Result<(), SessionError> {
        let (what, limit) = match place(kind) {
            0 => (ASKS, limits.asks),
            1 => ("puts under way", limits.puts),
            2 => ("notifications under way", limits.notifications),
            _ => ("gets under way", limits.gets),
        };
        within(what, self.operations[place(kind)] as usize, 1, limit)
    }

    /// The last frame about one was sent, or has come.
    pub(super) fn end(&mut self, kind: OperationKind, pieces: u32) {
        self.operations[place(kind)] -= 1;
        self.pieces -= pieces;
    }
}

/// What is counted together.
fn place(kind: OperationKind) -> usize {
    match kind {
        OperationKind::Send | OperationKind::Receive => 0,
        OperationKind::Put | OperationKind::PeerPut => 1,
        OperationKind::Notification | OperationKind::PeerNotification => 2,
        OperationKind::Get | OperationKind::PeerGet => 3,
    }
}

/// Operations of this side, and eager payload.
impl Session {
    /// Whether so many sends, puts and notifications, and receives and gets, may start now.
    ///
    /// # Errors
    /// The first bound that does not allow it.
    pub fn check_rooms(&self, sends: usize, receives: usize) -> Result<(), RequestError> {
        for (more, role) in [(sends, Role::Sender), (receives, Role::Receiver)] {
            if more > 0 {
                self.check_room(role, more - 1)?;
            }
        }
        Ok(())
    }

    /// Whether an operation may start beside so many others that do.
    pub(super) fn check_room(&self, role: Role, others: usize) -> Result<(), RequestError> {
        if self.closing() {
            return Err(RequestError::Closed);
        }
        let limit = self.config.bounds.max_operations;
        if self.operations.own(role).saturating_add(others) >= limit {
            return Err(RequestError::Full { limit });
        }
        Ok(())
    }

    /// Whether payload of this length would travel eagerly in the clear, where somebody on the path
    /// could change it: such is not to be verified, its checksum has no key.
    pub fn is_bare(&self, bytes: u64) -> bool {
        !self.config.seals_payload && bytes >= LEAST_PLAIN_BYTES as u64
    }

    /// Whether a payload of this length may travel eagerly now: beside other sends one of half the
    /// limit at most.
    pub fn eager_allowed(&self, bytes: u64) -> bool {
        let limit = self
            .agreed
            .map_or(0, |agreed| match self.operations.len(Role::Sender) {
                0 => agreed.eager_limit,
                _ => agreed.eager_beside(),
            });
        limit > 0 && bytes <= limit.into() && self.has_free(bytes, 0)
    }

    /// Whether a payload of this length may be exposed now, by its place in memory that the peer
    /// reads.
    pub fn exposed_allowed(&self, bytes: u64) -> bool {
        bytes <= MAX_EXPOSED_BYTES && self.has_free(0, 0)
    }

    /// The same, of a payload for so many pieces of a list.
    pub(super) fn has_credit(&self, eager: &Eager, pieces: u32) -> bool {
        let goes = match eager {
            Eager::Bytes(_) => self.eager_allowed(eager.bytes()),
            Eager::Exposed(_) => self.exposed_allowed(eager.bytes()),
        };
        goes && self.has_free(eager.kept(), pieces)
    }

    fn has_free(&self, bytes: u64, pieces: u32) -> bool {
        self.agreed.is_some_and(|agreed| {
            let free = u64::from(agreed.eager_credit).saturating_sub(self.eager_used);
            config::eager_cost(bytes, pieces) <= free
        })
    }

    /// Eager payload left this side's buffer.
    pub(super) fn return_credit(&mut self, bytes: u64) {
        self.eager_held = self.eager_held.saturating_sub(bytes);
        self.credit_owed += bytes;
    }

    /// Whether credit goes back: not for every payload, and in time for the longest.
    pub(super) fn credit_is_due(&self) -> bool {
        let ours = &self.config.ours;
        let (owed, credit) = (self.credit_owed, u64::from(ours.eager_credit));
        owed > credit / CREDIT_PARTS || owed > credit.saturating_sub(ours.eager_limit.into())
    }

    /// The peer takes an operation that was queued, since it was heard last: the operation waits
    /// from then on for what comes of it. When that was.
    fn has_room(&mut self, operation: OperationId) -> Time {
        let came = self.heard();
        if let Some(it) = self.operations.get_mut(operation) {
            it.clock.progressed(came);
        }
        came
    }
}

/// What this side's sends know of the peer's windows and limits.
#[derive(Debug, Default)]
pub(super) struct SendWindows {
    /// Numbers that the peer has announced receives of, and no send has.
    pub(super) ahead: usize,
    /// One behind the highest window that the peer has named.
    named: u64,
    /// The first sends of their tags, which are yet to ask, as too many do.
    pub(super) unasked: BTreeSet<OperationId>,
    /// Tags that the peer counts.
    pub(super) counted_tags: usize,
    /// Sends whose tags it will when it has forgotten others, and those behind them.
    pub(super) unroomed: BTreeSet<OperationId>,
    /// When a send last got room for its tag, or to ask.
    pub(super) room_came: Time,
    /// Tags that the peer was asked to forget.
    pub(super) forgetting: usize,
}

/// When the peer counts a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    /// With the next frame, or it does already.
    Now,
    /// When it has answered whether it forgets that one.
    AfterAnswer,
    /// When it has forgotten others.
    AfterOthers,
}

impl SendWindows {
    pub(super) fn has_named(&self, window: u64) -> bool {
        window < self.named
    }

    /// The peer names its windows in their order.
    pub(super) fn name(&mut self, frame: &'static str, window: u64) -> Result<(), SessionError> {
        let is_new = window >= self.named && TransferId(window).window().is_none();
        if !is_new {
            return Err(unexpected(
                frame,
                "a window that had no name before",
                format!("window {window} had one"),
            ));
        }
        self.named = window + 1;
        Ok(())
    }
}

/// Tags, and sends that ask for receives.
impl Session {
    /// Has a tag counted, if the peer has room for it.
    fn count_tag(&mut self, tag: Tag) -> Counted {
        let limit = self.agreed.map_or(0, |agreed| agreed.limits.tags);
        let known = self.matching.sends.get(&tag);
        if known.is_some_and(|counts| counts.is_forgetting) {
            return Counted::AfterAnswer;
        }
        if known.is_some_and(|counts| counts.is_counted) {
            return Counted::Now;
        }
        let free = (limit as usize).saturating_sub(self.send_windows.counted_tags);
        let wanted = limit as usize / FREE_TAG_PARTS + 1;
        if free < wanted {
            self.forget_idle_tags(wanted);
        }
        if within(TAGS, self.send_windows.counted_tags, 1, limit).is_err() {
            return Counted::AfterOthers;
        }
        self.matching.sends.entry(tag).or_default().is_counted = true;
        self.send_windows.counted_tags += 1;
        Counted::Now
    }

    /// Gives a send its number, if it can have it now: it takes its window, or asks. An eager one
    /// has left before.
    pub(super) fn number_send(&mut self, operation: OperationId) {
        if self.send_windows.unroomed.is_empty() {
            self.number_first(operation);
        } else {
            // Behind those before it, whatever their tags: the peer's program may receive in their
            // order.
            self.send_windows.unroomed.insert(operation);
        }
    }

    /// As [`Self::number_send`], of a send that none waits before; `false` if it has to wait for
    /// room.
    fn number_first(&mut self, operation: OperationId) -> bool {
        let Some(it) = self.operations.get(operation) else {
            return true;
        };
        let tag = it.tag;
        if self.count_tag(tag) == Counted::AfterOthers {
            self.send_windows.unroomed.insert(operation);
            return false;
        }
        let counts = self.matching.sends.entry(tag).or_default();
        counts.held.insert(operation);
        self.number_held(tag);
        true
    }

    /// Gives sends of a tag their numbers, as far as their windows or the peer's limit allow it.
    pub(super) fn number_held(&mut self, tag: Tag) {
        let now = self.heard();
        while let Some(limits) = self.agreed.map(|agreed| agreed.limits)
            && let Some(counts) = self.matching.sends.get_mut(&tag)
            && !counts.is_forgetting
            && let Some(first) = counts.held.first().copied()
            && let Some(it) = self.operations.get_mut(first)
        {
            let posted = counts.posted.get(&counts.next).copied().flatten();
            let posted = posted.filter(|to| fits(to.capacity, to.level, it.bytes, it.asked));
            if posted.is_none() {
                if self.asked.begin(&limits, OperationKind::Send, 0).is_err() {
                    self.send_windows.unasked.insert(first);
                    return;
                }
                it.is_counted = true;
            }
            counts.held.remove(&first);
            let (number, was_announced) = counts.take_number();
            counts.numbered.insert(number, first);
            it.number = Some(number);
            self.send_windows.ahead -= usize::from(was_announced);
            self.send_windows.unasked.remove(&first);
            if posted.is_none() {
                self.ask_peer(first);
            }
            self.pass_ended(tag);
            if let Some(posted) = posted {
                self.begin_in_window(now, first, posted);
            }
        }
    }

    /// The number of an eager send, whose window, if there is one, is not used; `None` while its
    /// tag cannot count.
    pub(super) fn number_eager(&mut self, tag: Tag, is_bare: bool) -> Option<u64> {
        let is_first = self.send_windows.unroomed.is_empty();
        if !is_first || self.count_tag(tag) != Counted::Now {
            return None;
        }
        let counts = self.matching.sends.entry(tag).or_default();
        let posted = counts.posted.get(&counts.next).and_then(Option::as_ref);
        let is_verified = posted.is_some_and(|posted| posted.level == Level::Verified);
        if !counts.held.is_empty() || is_bare && is_verified {
            return None;
        }
        let (number, was_announced) = counts.take_number();
        let is_ended = counts.is_next_ended();
        self.send_windows.ahead -= usize::from(was_announced);
        if is_ended {
            self.pass_ended(tag);
        }
        Some(number)
    }

    pub(super) fn pass_ended(&mut self, tag: Tag) {
        while let Some(counts) = self.matching.sends.get_mut(&tag)
            && let Some(None) = counts.posted.get(&counts.next)
        {
            let number = counts.next;
            counts.posted.remove(&number);
            counts.next += 1;
            self.send_windows.ahead -= 1;
            if counts.next == counts.announced && !counts.is_used {
                (counts.next, counts.announced) = (0, 0);
                self.tidy_sent(tag);
                return self.number_is(tag, number, NumberUse::Forgotten);
            }
            self.number_is(tag, number, NumberUse::Skipped);
        }
    }

    /// Answers what becomes of the number of a receive that has ended.
    pub(super) fn number_is(&mut self, tag: Tag, number: u64, used: NumberUse) {
        self.transmit
            .push_back(Frame::Unposted { tag, number, used });
    }

    /// Asks the peer to take a send, once.
    pub(super) fn ask_peer(&mut self, operation: OperationId) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        it.stage = Stage::Asked;
        let transfer = operation.transfer();
        it.wire = Some(transfer);
        if !std::mem::replace(&mut it.has_asked, true) {
            self.transmit.push_back(Frame::Waiting {
                transfer,
                level: it.asked,
                bytes: it.bytes,
                to: it.destination(),
            });
        }
    }

    fn begin_in_window(&mut self, now: Time, operation: OperationId, posted: PostedWindow) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        let window = posted.plan.window;
        let cut = posted.plan.cut().for_total(it.bytes);
        let transfer = TransferId::to_window(window);
        it.wire = Some(transfer);
        it.is_begun = true;
        self.operations.name(operation, transfer);
        self.begin_granted(now, operation, cut, window, posted.level);
    }

    /// The peer has opened a window for the receive of this number, which a send has.
    pub(super) fn window_came(&mut self, now: Time, tag: Tag, number: u64, posted: PostedWindow) {
        let counts = self.matching.sends.get(&tag);
        if let Some(operation) = counts.and_then(|counts| counts.numbered.get(&number).copied())
            && let Some(it) = self.operations.get(operation)
            && matches!(it.stage, Stage::Asked)
            && fits(posted.capacity, posted.level, it.bytes, it.asked)
        {
            self.begin_in_window(now, operation, posted);
        }
        // Else that send has ended, or left with its payload: the peer meets it by its number.
    }

    /// A send has been granted its place, or ends: it waits for no receive any more, and has no
    /// number.
    pub(super) fn waits_no_more(&mut self, operation: OperationId) {
        let it = self.operations.get_mut(operation);
        if let Some(it) = it.filter(|it| it.wants_receive()) {
            let (tag, number) = (it.tag, it.number.take());
            self.leave_tag(operation, tag, number);
            self.uncount(operation);
        }
    }

    /// A send of this tag, with this number or none, waits no more.
    pub(super) fn leave_tag(&mut self, operation: OperationId, tag: Tag, number: Option<u64>) {
        if let Some(counts) = self.matching.sends.get_mut(&tag) {
            if let Some(number) = number {
                counts.numbered.remove(&number);
            } else if counts.held.remove(&operation) && self.send_windows.unasked.remove(&operation)
            {
                // The one behind it may ask, or has a window.
                self.send_windows.unasked.extend(counts.held.first());
                self.number_held(tag);
            }
        }
        self.send_windows.unroomed.remove(&operation);
    }

    /// Asks for receives, as far as the peer takes that.
    pub(super) fn ask_unasked(&mut self) {
        let Some(limits) = self.agreed.map(|agreed| agreed.limits) else {
            return;
        };
        while self.asked.check(&limits, OperationKind::Send).is_ok()
            && let Some(next) = self.send_windows.unasked.pop_first()
        {
            self.send_windows.room_came = self.has_room(next);
            if let Some(it) = self.operations.get(next) {
                self.number_held(it.tag);
            }
        }
    }

    /// Forgets the count of a tag that is not used.
    pub(super) fn tidy_sent(&mut self, tag: Tag) {
        let counts = self.matching.sends.get(&tag);
        if counts.is_some_and(SendTag::is_unused) {
            self.matching.sends.remove(&tag);
        }
    }

    /// Asks the peer to forget tags that it counts and nothing is under way of. What it does not
    /// count takes no room; it would be asked for that again and again while a receive of the peer
    /// has it keep the count.
    fn forget_idle_tags(&mut self, most: usize) {
        if self.send_windows.forgetting > 0 {
            return;
        }
        let idle = self.matching.sends.iter();
        let idle = idle.filter(|(_, counts)| counts.is_counted && counts.is_idle());
        let idle: Vec<Tag> = idle.take(most).map(|(tag, _)| *tag).collect();
        idle.into_iter().for_each(|tag| self.forget_tag(tag));
    }

    fn forget_tag(&mut self, tag: Tag) {
        if let Some(counts) = self.matching.sends.get_mut(&tag)
            && counts.is_counted
            && counts.is_idle()
        {
            counts.is_forgetting = true;
            self.send_windows.forgetting += 1;
            let number = counts.next;
            self.transmit.push_back(Frame::Forget { tag, number });
        }
    }

    /// A send of this tag is over: the peer may forget it where others have no room.
    pub(super) fn tag_rests(&mut self, tag: Tag) {
        if !self.send_windows.unroomed.is_empty() && !self.ended() {
            self.forget_tag(tag);
        }
    }

    /// Sends begin whose tags there was no room for.
    pub(super) fn begin_unroomed(&mut self) {
        while let Some(first) = self.send_windows.unroomed.pop_first()
            && self.number_first(first)
        {
            self.send_windows.room_came = self.has_room(first);
        }
    }
}

/// Receives that may be posted.
#[derive(Debug, Default)]
pub(super) struct Posting {
    pub(super) candidates: BTreeSet<OperationId>,
    /// Windows that are open, and no send has come to.
    pub(super) open: usize,
    pub(super) next_window: u64,
}

impl Posting {
    /// A name for a window, which none had before.
    pub(super) fn name_window(&mut self) -> u64 {
        self.next_window += 1;
        self.next_window - 1
    }
}

/// Posted windows: a receive that waits opens its memory for the one send that it will meet, and
/// says so.
///
/// The send of its number then writes there without asking. A send that does not fit, or that left
/// before it knew the window, is met as if there were none: the window is closed first. A posted
/// receive has a number, and so have those before it: where one of them ends early, the peer
/// answers what becomes of its number. A transfer that comes for it meets the next receive that has
/// none.
impl Session {
    /// A receive waits for its send: it is posted, if that is worth it and there is room.
    pub(super) fn post_receive_soon(&mut self, operation: OperationId, bytes: u64, level: Level) {
        let is_worth_it = self.wants_window(bytes, level) || self.agreed.is_none();
        if self.config.addressed && is_worth_it {
            self.posting.candidates.insert(operation);
            self.post_candidates();
        }
    }

    /// Whether a send for such a receive is better not eager.
    fn wants_window(&self, capacity: u64, level: Level) -> bool {
        let eager_limit = self.agreed.map_or(0, |agreed| agreed.eager_beside());
        capacity > eager_limit.into() || level == Level::Verified && self.is_bare(capacity)
    }

    /// Posts receives as far as there is room.
    pub(super) fn post_candidates(&mut self) {
        while self.may_post()
            && !self.closing()
            && let Some(operation) = self.posting.candidates.first().copied()
        {
            if !self.post_window(operation) {
                return;
            }
            self.posting.candidates.remove(&operation);
        }
    }

    /// Posts a receive, if that is worth it and may be; `false` if there is no room, until others
    /// have met their sends.
    fn post_window(&mut self, operation: OperationId) -> bool {
        let (Some(agreed), Some(it)) = (self.agreed, self.operations.get(operation)) else {
            return true;
        };
        let (capacity, tag, level) = (it.bytes, it.tag, it.asked);
        let waits = it.is_live() && matches!(it.stage, Stage::Queued) && it.offered.is_none();
        let is_free = matches!(it.origin, Origin::Receive { fenced: false });
        if !waits || !is_free || !self.wants_window(capacity, level) {
            return true;
        }
        let counts = self.matching.receives_of(tag);
        if counts.vain >= self.config.bounds.vain_windows {
            return true;
        }
        let mut number = it.number;
        if number.is_none()
            && let Ok(before) = counts.queue.binary_search(&operation)
        {
            let limit = agreed.limits.windows;
            if !counts.is_settled() || before >= limit as usize {
                return true;
            }
            if within(POSTED, self.matching.announced + before, 1, limit).is_err() {
                return false;
            }
            for (announced, its_number) in self.matching.announce(tag, before + 1) {
                if let Some(it) = self.operations.get_mut(announced) {
                    it.number = Some(its_number);
                }
                number = Some(its_number);
            }
        }
        let Some(number) = number else { return true };
        let cut = self
            .config
            .cut(capacity, 0, agreed.chunk_bytes, self.is_alone());
        let window = self.posting.name_window();
        let plan = Plan::named(cut, window);
        self.posting.open += 1;
        self.operations
            .name(operation, TransferId::to_window(window));
        if let Some(it) = self.operations.get_mut(operation) {
            it.stage = Stage::Posted(Box::new(Posted {
                window,
                plan,
                closing: false,
                asked_by: None,
            }));
        }
        self.urgent.push_back(Action::OpenWindow {
            operation,
            window,
            cut,
            tag,
        });
        let grant = plan.grant(level);
        self.transmit.push_back(Frame::Posted {
            tag,
            number,
            capacity,
            grant,
        });
        true
    }

    /// Whether no other transfer to here is under way.
    pub(super) fn is_alone(&self) -> bool {
        self.operations.names(Role::Receiver) == self.posting.open
    }
}

/// One-sided operations of this side.
impl Session {
    /// A put or a notification of this side leaves, or waits until the peer takes it.
    pub(super) fn start_one_sided(&mut self, operation: OperationId, eager: Option<Eager>) {
        let Some(it) = self.operations.get(operation) else {
            return;
        };
        let one_sided = &mut self.one_sided;
        let transfer = operation.transfer();
        let group = match it.origin {
            Origin::Put {
                notified: Notified::First | Notified::Next,
                ..
            } => Some(*one_sided.starting.get_or_insert(transfer)),
            Origin::Notification { count: 1.., .. } => {
                one_sided.starting = None;
                None
            }
            _ => None,
        };
        let queued = Queued { eager, group };
        let queue = queue_of(&it.origin);
        if one_sided.queued[queue].is_empty() && self.takes(operation) {
            self.ask_for_room(operation, queued);
        } else {
            self.one_sided.queued[queue].insert(operation, queued);
        }
    }

    /// Whether the peer takes this put, get or notification now; it counts from here on.
    fn takes(&mut self, operation: OperationId) -> bool {
        let (Some(agreed), Some(it)) = (&self.agreed, self.operations.get_mut(operation)) else {
            return false;
        };
        let limits = &agreed.limits;
        let is_told = match it.origin {
            Origin::Put { to: named, .. } | Origin::Get { from: named, .. } => {
                self.piece_lists.may_name(limits, named)
            }
            _ => true,
        };
        let kind = it.origin.kind();
        it.is_counted = is_told && self.asked.begin(limits, kind, it.pieces).is_ok();
        it.is_counted
    }

    /// Asks the peer to take a put or a notification, or to answer a get.
    fn ask_for_room(&mut self, operation: OperationId, queued: Queued) {
        let Some(it) = self.operations.get(operation) else {
            return;
        };
        let (mut origin, level, bytes) = (it.origin.clone(), it.asked, it.bytes);
        let mut named = None;
        if let Origin::Put { to: extent, .. } | Origin::Get { from: extent, .. } = &mut origin {
            named = Some(*extent);
            *extent = self.name_on_wire(*extent);
        }
        if let Origin::Put { notified, .. } = &mut origin {
            let asked = &mut self.one_sided.asked_group;
            *notified = match queued.group {
                None => Notified::No,
                group if *asked == group => Notified::Next,
                group => {
                    *asked = group;
                    Notified::First
                }
            };
        }
        let transfer = operation.transfer();
        let mut digest = None;
        let (mut stage, mut number) = (Stage::Asked, None);
        let to = origin.destination(Tag(0), None);
        let frame = match (queued.eager, origin) {
            (_, Origin::Get { from, .. }) => {
                let request = self.one_sided.next_get;
                self.one_sided.next_get += 1;
                self.one_sided.gets.insert(request, operation);
                number = Some(request);
                Frame::Get {
                    request,
                    from,
                    bytes,
                    level,
                    left: TimeLeft::ANY,
                }
            }
            (Some(eager), _) => {
                digest = eager.crc32c();
                stage = Stage::SENT;
                eager.frame(transfer, level, to)
            }
            (None, _) => Frame::Waiting {
                transfer,
                level,
                bytes,
                to,
            },
        };
        if let Some(it) = self.operations.get_mut(operation) {
            match &mut it.origin {
                Origin::Get { request, .. } => *request = number,
                _ => it.wire = Some(transfer),
            }
            it.has_asked = true;
            it.digests.ours = digest;
            it.stage = stage;
        }
        self.transmit.push_back(frame);
        if let Some(extent) = named {
            self.named(extent);
        }
    }

    /// An operation ends that may not have left.
    pub(super) fn dequeue(&mut self, operation: OperationId, it: &Operation) {
        if !matches!(
            it.origin,
            Origin::Put { .. } | Origin::Notification { .. } | Origin::Get { .. }
        ) {
            return;
        }
        let queue = queue_of(&it.origin);
        let queued = self.one_sided.queued[queue].remove(&operation);
        if queued.is_none() && !it.is_read() {
            return;
        }
        if let Some(eager) = queued.and_then(|queued| queued.eager) {
            self.eager_used -= config::eager_cost(eager.kept(), it.pieces);
        }
        if let Origin::Put { to: named, .. } | Origin::Get { from: named, .. } = it.origin {
            self.named(named);
        }
        self.ask_queued();
    }

    /// Asks for what is queued, the oldest first, as far as the peer takes it.
    pub(super) fn ask_queued(&mut self) {
        if self.ended() {
            return;
        }
        for queue in 0..self.one_sided.queued.len() {
            while let Some((operation, _)) = self.one_sided.queued[queue].first_key_value()
                && let operation = *operation
                && self.takes(operation)
            {
                self.one_sided.credit_came = self.has_room(operation);
                if let Some(queued) = self.one_sided.queued[queue].remove(&operation) {
                    self.ask_for_room(operation, queued);
                }
            }
        }
    }
}

/// Where an operation waits: puts and gets by themselves, and apart from them puts before a
/// notification, and notifications, which wait for the peer's program too.
fn queue_of(origin: &Origin) -> usize {
    match origin {
        Origin::Put {
            notified: Notified::No,
            ..
        } => 0,
        Origin::Get { .. } => 2,
        _ => 1,
    }
}

#[cfg(test)]
impl Session {
    /// Nothing of posted windows is left on either side, and both count alike.
    pub(super) fn assert_counts_agree(&self, peer: &Self) {
        if self.ended() || peer.ended() {
            return;
        }
        assert_eq!(self.send_windows.ahead, 0);
        assert_eq!(self.operations.names(Role::Sender), 0);
        let peers = (peer.posting.open, peer.matching.announced);
        assert_eq!(peers, (0, 0), "{:#?}", peer.operations);
        for (tag, counts) in &self.matching.sends {
            assert!(
                counts.is_idle() && counts.posted.is_empty(),
                "{tag:?} {counts:?}"
            );
        }
        assert!(self.send_windows.unasked.is_empty() && self.send_windows.unroomed.is_empty());
        let ended: Vec<_> = peer.matching.leftovers().collect();
        assert!(ended.is_empty(), "{ended:?}");
    }
}
