//! Sends find their windows: those that the peer has posted, by tag and number. A send without one asks.

use std::collections::{BTreeMap, BTreeSet};

use super::action::{Action, OperationId};
use super::cancel::Cancelling;
use super::config::MAX_TRANSFER_BYTES;
use super::credit::within;
use super::error::{EndCause, SessionError};
use super::matching::{PostedWindow, SendTag, TAGS, fits};
use super::outgoing::{SendStage, numbered};
use super::posted::POSTED;
use super::stream::Plan;
use super::{Session, unexpected};
use crate::frame::{Frame, Grant, NumberUse, Tag, TransferId};
use crate::plan::ChunkPlan;
use crate::time::Time;

/// Idle tags that the peer is asked to forget at a time.
const FORGET_AT_A_TIME: usize = 1024;

/// What this side's sends know of the peer's windows.
#[derive(Debug, Default)]
pub(super) struct SendWindows {
    /// Numbers that the peer has announced receives of, and no send has.
    ahead: usize,
    /// Sends to posted windows.
    by_window: BTreeMap<u64, TransferId>,
    /// One behind the highest window that the peer has named.
    named: u64,
    /// Sends that have asked and were not answered.
    asking: BTreeSet<TransferId>,
    /// The first sends of their tags, which are yet to ask, as too many do.
    unasked: BTreeSet<TransferId>,
    /// Tags that the peer counts.
    counted_tags: usize,
    /// Sends whose tags it will when it has forgotten others, and those behind them.
    unroomed: BTreeSet<TransferId>,
    /// When a send last got room for its tag, or to ask.
    pub(super) room_came: Time,
    /// Tags that the peer was asked to forget.
    forgetting: usize,
}

/// What of a limit of tags is in use when idle ones are forgotten, in eighths.
const FORGET_EIGHTHS: usize = 7;
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

/// What sends of the peer are that wait for a receive, which is not there.
pub(super) const ASKS: &str = "transfers that wait for a receive";

impl SendWindows {
    pub(super) fn clear(&mut self) {
        self.unasked.clear();
    }

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

impl Session {
    /// This side's name of a transfer that the peer names so.
    pub(super) fn sent_as(&self, transfer: TransferId) -> TransferId {
        let window = transfer.window();
        let found = window.and_then(|window| self.send_windows.by_window.get(&window));
        found.copied().unwrap_or(transfer)
    }

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
        if self.send_windows.counted_tags + 1 > limit as usize * FORGET_EIGHTHS / 8 {
            self.forget_idle_tags();
        }
        if within(TAGS, self.send_windows.counted_tags, 1, limit).is_err() {
            return Counted::AfterOthers;
        }
        let counts = self.matching.sends.entry(tag).or_default();
        if counts.is_forgetting {
            return Counted::AfterAnswer;
        }
        counts.is_counted = true;
        self.send_windows.counted_tags += 1;
        Counted::Now
    }

    /// Gives a send its number, if it can have it now: it takes its window, or asks. An eager one has left before.
    pub(super) fn number_send(&mut self, transfer: TransferId) {
        if self.send_windows.unroomed.is_empty() {
            self.number_first(transfer);
        } else {
            // Behind those before it, whatever their tags: the peer's program may receive in their order.
            self.send_windows.unroomed.insert(transfer);
        }
    }

    /// As [`Self::number_send`], of a send that none waits before; `false` if it has to wait for room.
    fn number_first(&mut self, transfer: TransferId) -> bool {
        let Some(send) = self.sends.get(&transfer) else {
            return true;
        };
        let tag = send.tag;
        let counted = self.count_tag(tag);
        if counted == Counted::AfterOthers {
            self.send_windows.unroomed.insert(transfer);
            return false;
        }
        let counts = self.matching.sends.entry(tag).or_default();
        counts.held.insert(transfer);
        self.number_held(tag);
        true
    }

    /// Gives sends of a tag their numbers, as far as their windows or the peer's limit allow it.
    fn number_held(&mut self, tag: Tag) {
        let now = self.heard();
        let limit = self.agreed.map_or(0, |agreed| agreed.limits.asks);
        while let Some(counts) = self.matching.sends.get_mut(&tag)
            && !counts.is_forgetting
            && let Some(first) = counts.held.first().copied()
            && let Some(send) = self.sends.get_mut(&first)
        {
            let posted = counts.posted.get(&counts.next).copied().flatten();
            let posted = posted.filter(|to| fits(to.capacity, to.level, send.bytes, send.asked));
            let asks = self.send_windows.asking.len();
            if posted.is_none() && within(ASKS, asks, 1, limit).is_err() {
                self.send_windows.unasked.insert(first);
                return;
            }
            counts.held.remove(&first);
            counts.numbered.insert(counts.next, first);
            send.number = Some(counts.next);
            self.send_windows.unasked.remove(&first);
            if posted.is_none() {
                self.send_windows.asking.insert(first);
                self.ask(first);
            }
            self.take_number(tag);
            if let Some(posted) = posted {
                self.begin_in_window(now, first, posted);
            }
        }
    }

    /// The number of an eager send, whose window, if there is one, is not used; `None` while its tag cannot count.
    pub(super) fn number_eager(&mut self, tag: Tag) -> Option<u64> {
        let is_first = self.send_windows.unroomed.is_empty();
        if !is_first || self.count_tag(tag) != Counted::Now {
            return None;
        }
        let counts = self.matching.sends.entry(tag).or_default();
        counts.held.is_empty().then(|| self.take_number(tag))
    }

    /// The next number of a tag, and those behind it are passed whose receives have ended.
    fn take_number(&mut self, tag: Tag) -> u64 {
        let counts = self.matching.sends.entry(tag).or_default();
        let number = counts.next;
        counts.next += 1;
        counts.is_used = true;
        counts.posted.remove(&number);
        self.send_windows.ahead -= usize::from(number < counts.announced);
        self.pass_ended(tag);
        number
    }

    fn pass_ended(&mut self, tag: Tag) {
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

    /// Asks the peer to take a send, once.
    pub(super) fn ask(&mut self, transfer: TransferId) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        send.stage = SendStage::Waiting;
        if !std::mem::replace(&mut send.asking, true) {
            self.transmit.push_back(Frame::Waiting {
                transfer,
                level: send.asked,
                bytes: send.bytes,
                to: numbered(send.to, send.number),
            });
        }
    }

    /// A send has been granted its place, or ends: it waits for no receive any more, and has no number.
    pub(super) fn waits_no_more(&mut self, transfer: TransferId) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let windows = &mut self.send_windows;
        if let Some(tag) = send.to.tag()
            && let Some(counts) = self.matching.sends.get_mut(&tag)
        {
            if let Some(number) = send.number.take() {
                counts.numbered.remove(&number);
            } else if counts.held.remove(&transfer) && windows.unasked.remove(&transfer) {
                // The one behind it may ask, or has a window.
                windows.unasked.extend(counts.held.first());
                self.number_held(tag);
            }
        }
        self.send_windows.unroomed.remove(&transfer);
        if self.send_windows.asking.remove(&transfer) {
            self.ask_unasked();
        }
    }

    /// Asks for receives, as far as the peer takes that.
    pub(super) fn ask_unasked(&mut self) {
        let limit = self.agreed.map_or(0, |agreed| agreed.limits.asks);
        while within(ASKS, self.send_windows.asking.len(), 1, limit).is_ok()
            && let Some(next) = self.send_windows.unasked.pop_first()
        {
            self.send_windows.room_came = self.has_room(OperationId::send(next));
            if let Some(send) = self.sends.get(&next) {
                self.number_held(send.tag);
            }
        }
    }

    fn begin_in_window(&mut self, now: Time, transfer: TransferId, posted: PostedWindow) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let window = posted.plan.window;
        let cut = posted.plan.cut().for_total(send.bytes);
        send.wire = TransferId::to_window(window);
        send.transmitted = true;
        self.send_windows.by_window.insert(window, transfer);
        let plan = self.send_plan(cut, window);
        self.begin_granted(now, transfer, plan, posted.level);
    }

    /// The peer has posted a receive.
    pub(super) fn posted(
        &mut self,
        now: Time,
        tag: Tag,
        number: u64,
        capacity: u64,
        grant: Grant,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "posted";
        let agreed = self.agreed.filter(|_| self.config.addressed);
        let Some(agreed) = agreed else {
            return Err(unexpected(
                FRAME,
                "a network with addressed windows",
                "this one is ordered",
            ));
        };
        let transfer = TransferId::to_window(grant.window);
        if capacity == 0 || capacity > MAX_TRANSFER_BYTES {
            return Err(unexpected(
                FRAME,
                "a window that a transfer fits into, and no longer than any",
                format!("transfer {transfer} has one of {capacity} bytes"),
            ));
        }
        let plan = grant.plan(FRAME, transfer, capacity, &agreed)?;
        self.send_windows.name(FRAME, grant.window)?;
        let posted = PostedWindow {
            capacity,
            plan,
            level: grant.level,
        };
        let counts = self.matching.sends.entry(tag).or_default();
        let first = counts.announced.max(counts.next);
        if counts.posted.contains_key(&number) {
            return Err(unexpected(
                FRAME,
                "each number once",
                format!("number {number} of tag {} arrived", tag.0),
            ));
        }
        if number >= first {
            let before = usize::try_from(number - first).unwrap_or(usize::MAX);
            let before = self.send_windows.ahead.saturating_add(before);
            let limit = self.config.ours.limits.windows;
            within(POSTED, before, 1, limit)?;
            self.send_windows.ahead = before + 1;
        }
        counts.announced = counts.announced.max(number + 1);
        if number >= counts.next {
            counts.posted.insert(number, Some(posted));
            self.number_held(tag);
        } else if let Some(transfer) = counts.numbered.get(&number).copied()
            && let Some(send) = self.sends.get(&transfer)
            && matches!(send.stage, SendStage::Waiting)
            && fits(capacity, posted.level, send.bytes, send.asked)
        {
            self.begin_in_window(now, transfer, posted);
        }
        // Else that send has ended, or left with its payload: the peer meets it by its number.
        Ok(())
    }

    /// A receive has ended that the peer had announced: its number is skipped, unless a send has it.
    pub(super) fn unposted(
        &mut self,
        now: Time,
        tag: Tag,
        number: u64,
    ) -> Result<(), SessionError> {
        let counts = self.matching.sends.get_mut(&tag);
        let counts = counts.filter(|counts| number < counts.announced);
        let counts = counts.ok_or_else(|| {
            unexpected(
                "unpost",
                "a number that was announced",
                format!("{number} of tag {} arrived", tag.0),
            )
        })?;
        if number >= counts.next {
            counts.posted.insert(number, None);
            self.pass_ended(tag);
            self.number_held(tag);
            return Ok(());
        }
        let transfer = counts.numbered.get(&number).copied();
        let send = transfer.and_then(|transfer| self.sends.get(&transfer));
        match transfer.zip(send.and_then(|send| send.wire.window())) {
            Some((transfer, window)) => self.leave_window(now, transfer, window),
            None => self.number_is(tag, number, NumberUse::Used),
        }
        Ok(())
    }

    /// Answers what becomes of the number of a receive that has ended.
    fn number_is(&mut self, tag: Tag, number: u64, used: NumberUse) {
        self.transmit
            .push_back(Frame::Unposted { tag, number, used });
    }

    /// A send went to a window that was closed before it came: it asks, unless it has ended here.
    fn leave_window(&mut self, now: Time, transfer: TransferId, window: u64) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let (tag, Some(number)) = (send.tag, send.number) else {
            return;
        };
        let operation = OperationId::send(transfer);
        let SendStage::Granted(granted) = &send.stage else {
            return;
        };
        let first_sequence = granted.plan.first_sequence;
        if send.course.cancel.is_some() {
            // The peer was told of that by the window's name, and answers it.
            return self.number_is(tag, number, NumberUse::Ended);
        }
        self.send_windows.by_window.remove(&window);
        send.wire = transfer;
        self.send_stream.drop_from(operation, first_sequence);
        if send.course.completed {
            // Its bytes are the program's again, and the peer has taken none of them.
            let mut cancel = Cancelling::new(now, EndCause::Cancelled, false, now);
            (cancel.peer_quiet, cancel.confirmed) = (true, true);
            send.course.cancel = Some(cancel);
            self.number_is(tag, number, NumberUse::Ended);
            self.release_send(transfer);
            return self.settle_send(now, transfer);
        }
        send.course.clock.progressed(now);
        send.leaving = true;
        if send.busy() {
            self.actions.push_back(Action::Withdraw { operation });
        } else {
            self.window_left(transfer);
        }
    }

    /// The data plane has let go of a send whose window was closed: it asks for another receive, which the announced one
    /// accounts for.
    pub(super) fn window_left(&mut self, transfer: TransferId) {
        self.drop_sent(transfer);
        self.release_send(transfer);
        self.ask(transfer);
        self.has_left(transfer, NumberUse::Used);
    }

    /// A send has left its window, and goes on or ends.
    pub(super) fn has_left(&mut self, transfer: TransferId, used: NumberUse) {
        if let Some(send) = self.sends.get_mut(&transfer)
            && std::mem::take(&mut send.leaving)
            && let (tag, Some(number)) = (send.tag, send.number)
        {
            self.number_is(tag, number, used);
        }
    }

    /// The network need not keep what was sent of this transfer.
    fn drop_sent(&mut self, transfer: TransferId) {
        if self.config.hold_until_placed
            && let Some(send) = self.sends.get(&transfer)
            && let SendStage::Granted(granted) = &send.stage
        {
            for index in granted.sent.difference(&granted.acked) {
                let chunk = granted.plan.chunk(index);
                self.send_stream.release(&chunk);
                self.actions.push_back(Action::ChunkDropped { chunk });
            }
        }
    }

    /// A send is over: its window is nobody's any more.
    pub(super) fn forget_send_window(&mut self, transfer: TransferId) {
        self.waits_no_more(transfer);
        let Some(send) = self.sends.get(&transfer) else {
            return;
        };
        if let Some(window) = send.wire.window() {
            self.send_windows.by_window.remove(&window);
        }
        if let Some(tag) = send.to.tag() {
            self.tag_rests(tag);
        }
    }

    /// Forgets the count of a tag that is not used.
    fn tidy_sent(&mut self, tag: Tag) {
        if self
            .matching
            .sends
            .get(&tag)
            .is_some_and(SendTag::is_unused)
        {
            self.matching.sends.remove(&tag);
        }
    }

    /// Asks the peer to forget tags that it counts and nothing is under way of. What it does not count takes no room; it
    /// would be asked for that again and again while a receive of the peer has it keep the count.
    fn forget_idle_tags(&mut self) {
        if self.send_windows.forgetting > 0 {
            return;
        }
        let idle = self.matching.sends.iter_mut();
        let idle = idle.filter(|(_, counts)| counts.is_counted && counts.is_idle());
        for (tag, counts) in idle.take(FORGET_AT_A_TIME) {
            counts.is_forgetting = true;
            self.send_windows.forgetting += 1;
            self.transmit.push_back(Frame::Forget {
                tag: *tag,
                number: counts.next,
            });
        }
    }

    /// A send of this tag is over: the peer may forget it where others have no room.
    fn tag_rests(&mut self, tag: Tag) {
        if self.send_windows.unroomed.is_empty() || self.ended() {
            return;
        }
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

    /// The peer asks whether a count may be forgotten.
    pub(super) fn forget_asked(&mut self, tag: Tag, number: u64) {
        let forgotten = self.matching.forget_received(tag, number);
        self.transmit.push_back(Frame::Forgotten { tag, forgotten });
    }

    /// The peer has forgotten a count, or goes on with it.
    pub(super) fn forget_answered(
        &mut self,
        tag: Tag,
        forgotten: bool,
    ) -> Result<(), SessionError> {
        let counts = self.matching.sends.get_mut(&tag);
        let Some(counts) = counts.filter(|counts| counts.is_forgetting) else {
            return Err(unexpected(
                "forgotten",
                "a tag that was to be forgotten",
                format!("tag {} was not", tag.0),
            ));
        };
        counts.is_forgetting = false;
        let windows = &mut self.send_windows;
        windows.forgetting = windows.forgetting.saturating_sub(1);
        // What the peer keeps for receives of its own it does not count, until a send comes again.
        windows.counted_tags -= usize::from(std::mem::take(&mut counts.is_counted));
        if forgotten {
            windows.ahead -= counts.announced.saturating_sub(counts.next) as usize;
            (counts.next, counts.announced, counts.is_used) = (0, 0, false);
            counts.posted.clear();
        }
        windows.unroomed.append(&mut counts.held);
        self.tidy_sent(tag);
        self.begin_unroomed();
        Ok(())
    }

    /// Sends begin whose tags there was no room for.
    pub(super) fn begin_unroomed(&mut self) {
        while let Some(first) = self.send_windows.unroomed.pop_first()
            && self.number_first(first)
        {
            self.send_windows.room_came = self.has_room(OperationId::send(first));
        }
    }

    /// The chunks of a transfer to a window, behind those of others.
    pub(super) fn send_plan(&self, cut: ChunkPlan, window: u64) -> Plan {
        let channels = self.agreed.map_or(1, |agreed| agreed.channels);
        Plan::new(cut, self.send_stream.end(), channels, window)
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
        assert!(
            self.send_windows.asking.is_empty(),
            "{:?}",
            self.send_windows.asking
        );
        assert!(self.send_windows.by_window.is_empty());
        let peers = (peer.posting.open, peer.matching.announced);
        assert_eq!(peers, (0, 0), "{:#?}", peer.receives);
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
