//! Sends find their windows: those that the peer has posted, by tag and number. A send without one asks.

use std::collections::{BTreeMap, BTreeSet};

use super::action::{Action, OperationId};
use super::cancel::{Cancelling, cancel_frame};
use super::config::MAX_TRANSFER_BYTES;
use super::credit::within;
use super::error::{EndCause, SessionError};
use super::matching::{PostedWindow, TAGS};
use super::outgoing::{SendStage, numbered};
use super::posted::POSTED;
use super::stream::Plan;
use super::{Session, unexpected};
use crate::frame::{Frame, Grant, Role, Tag, TransferId};
use crate::plan::ChunkPlan;
use crate::time::Time;

/// Idle tags that the peer is asked to forget at a time.
const FORGET_AT_A_TIME: usize = 1024;

/// What this side's sends know of the peer's windows.
#[derive(Debug, Default)]
pub(super) struct SendWindows {
    /// Windows that no send has taken.
    known: usize,
    /// Sends to posted windows, and those that have yet to leave their former one.
    by_window: BTreeMap<u64, TransferId>,
    /// One behind the highest window that the peer has named.
    named: u64,
    /// Sends that have asked and were not answered.
    asking: BTreeSet<TransferId>,
    /// Sends that are yet to ask, as too many do.
    unasked: BTreeSet<TransferId>,
    /// When one of those could.
    asked: Time,
    /// Tags that the peer counts.
    counted_tags: usize,
    /// Sends whose tags it will when it has forgotten others, and those behind them.
    unroomed: BTreeSet<TransferId>,
    /// When it last had room for one of those.
    roomed: Time,
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

    /// Gives a send its number: it takes its window, or asks. An eager one has left before.
    pub(super) fn number_send(&mut self, now: Time, transfer: TransferId) {
        if self.send_windows.unroomed.is_empty() {
            self.number_first(now, transfer);
        } else {
            // Behind those before it, whatever their tags: the peer's program may receive in their order.
            self.send_windows.unroomed.insert(transfer);
        }
    }

    /// As [`Self::number_send`], of a send that none waits before; `false` if it has to wait for room.
    fn number_first(&mut self, now: Time, transfer: TransferId) -> bool {
        let Some(send) = self.sends.get(&transfer) else {
            return true;
        };
        let tag = send.tag;
        match self.count_tag(tag) {
            Counted::Now => {}
            Counted::AfterAnswer => {
                let counts = self.matching.sends.entry(tag).or_default();
                counts.held.insert(transfer);
                return true;
            }
            Counted::AfterOthers => {
                self.send_windows.unroomed.insert(transfer);
                return false;
            }
        }
        let counts = self.matching.sends.entry(tag).or_default();
        let number = counts.next;
        counts.next += 1;
        if let Some(send) = self.sends.get_mut(&transfer) {
            send.number = Some(number);
        }
        self.place_send(now, transfer);
        true
    }

    /// The number of an eager send, whose window, if there is one, is not used; `None` while its tag cannot count.
    pub(super) fn number_eager(&mut self, tag: Tag) -> Option<u64> {
        let is_first = self.send_windows.unroomed.is_empty();
        if !is_first || self.count_tag(tag) != Counted::Now {
            return None;
        }
        let counts = self.matching.sends.entry(tag).or_default();
        let number = counts.next;
        counts.next += 1;
        if !counts.posted.is_empty() && counts.posted.remove(number).is_some() {
            self.send_windows.known -= 1;
        }
        Some(number)
    }

    /// A numbered send without a window takes its own, or asks for a receive.
    fn place_send(&mut self, now: Time, transfer: TransferId) {
        let Some(send) = self.sends.get(&transfer) else {
            return;
        };
        let Some(number) = send.number else { return };
        let (tag, bytes, asked) = (send.tag, send.bytes, send.asked);
        let Some(counts) = self.matching.sends.get_mut(&tag) else {
            return;
        };
        if let Some(posted) = counts.posted.remove(number) {
            self.send_windows.known -= 1;
            self.send_windows.by_window.remove(&posted.plan.window);
            if PostedWindow::fits(posted.capacity, posted.level, bytes, asked) {
                return self.begin_in_window(now, transfer, posted);
            }
        }
        counts.waiting.insert(number, transfer);
        self.ask(transfer);
    }

    /// Asks for a receive, or waits for its turn to. A reply asks at once: what asked for it accounts for that.
    pub(super) fn ask(&mut self, transfer: TransferId) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        if send.to.tag().is_some() && !send.asking {
            let windows = &mut self.send_windows;
            let limit = self.agreed.map_or(0, |agreed| agreed.limits.asks);
            if within(ASKS, windows.asking.len(), 1, limit).is_err() {
                windows.unasked.insert(transfer);
                return;
            }
            windows.asking.insert(transfer);
        }
        send.stage = SendStage::Waiting;
        if std::mem::replace(&mut send.asking, true) {
            // The peer has yet to answer what it asked before.
            return;
        }
        self.transmit.push_back(Frame::Waiting {
            transfer,
            level: send.asked,
            bytes: send.bytes,
            to: numbered(send.to, send.number),
        });
    }

    /// A send has been granted its place, or ends: it waits for no receive any more, and has no number.
    pub(super) fn waits_no_more(&mut self, transfer: TransferId) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        if let Some(tag) = send.to.tag() {
            match send.number.take() {
                Some(number) => self.clear_number(tag, number),
                None => {
                    if let Some(counts) = self.matching.sends.get_mut(&tag) {
                        counts.held.remove(&transfer);
                    }
                }
            }
        }
        self.send_windows.unroomed.remove(&transfer);
        self.send_windows.unasked.remove(&transfer);
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
            self.send_windows.asked = self.has_room(OperationId::send(next));
            self.ask(next);
        }
    }

    /// When a send last had what this one waits for, if it does: room for its tag, or to ask for a receive.
    pub(super) fn ask_came(&self, transfer: TransferId) -> Option<Time> {
        let windows = &self.send_windows;
        if windows.unroomed.contains(&transfer) {
            return Some(windows.roomed);
        }
        let waits = windows.unasked.contains(&transfer);
        waits.then_some(windows.asked)
    }

    fn begin_in_window(&mut self, now: Time, transfer: TransferId, posted: PostedWindow) {
        self.send_windows.unasked.remove(&transfer);
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let window = posted.plan.window;
        let cut = posted.plan.cut().for_total(send.bytes);
        send.wire = TransferId::to_window(window);
        send.transmitted = true;
        if let Some(number) = send.number
            && let Some(counts) = self.matching.sends.get_mut(&send.tag)
        {
            counts.waiting.remove(number);
            counts.begun.insert(number, transfer);
        }
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
        if number < counts.next {
            let waiting = counts.waiting.get(number).copied();
            let Some(transfer) = waiting else {
                // That send has ended, or left with its payload: the peer meets it by its number.
                return Ok(());
            };
            let Some(send) = self.sends.get(&transfer) else {
                return Ok(());
            };
            let fits = PostedWindow::fits(capacity, posted.level, send.bytes, send.asked);
            if !send.leaving {
                if fits {
                    self.begin_in_window(now, transfer, posted);
                }
                return Ok(());
            }
            // It takes it, or asks, once the data plane has let go of its former window.
            self.send_windows
                .by_window
                .insert(posted.plan.window, transfer);
        }
        if counts.posted.get(number).is_some() {
            return Err(unexpected(
                FRAME,
                "each number once",
                format!("number {number} of tag {} arrived", tag.0),
            ));
        }
        let limit = self.config.ours.limits.windows;
        within(POSTED, self.send_windows.known, 1, limit)?;
        counts.posted.insert(number, posted);
        self.send_windows.known += 1;
        Ok(())
    }

    /// The peer has closed windows of this tag.
    pub(super) fn revoked_from(&mut self, now: Time, tag: Tag, number: u64) {
        let Some(counts) = self.matching.sends.get_mut(&tag) else {
            return;
        };
        let posted = counts.posted.split_off(number);
        self.send_windows.known -= posted.len();
        for (_, posted) in posted {
            self.send_windows.by_window.remove(&posted.plan.window);
        }
        let begun = counts.begun.split_off(number);
        // All of them, before one ends: their numbers are in use.
        for (number, transfer) in &begun {
            counts.waiting.insert(*number, *transfer);
        }
        for (_, transfer) in begun {
            self.leave_window(now, transfer);
        }
        self.tidy_sent(tag);
    }

    /// A send went to a window that was closed before it came: it waits again, unless it has ended here.
    fn leave_window(&mut self, now: Time, transfer: TransferId) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        if let Some(window) = send.wire.window() {
            self.send_windows.by_window.remove(&window);
        }
        send.wire = transfer;
        send.was_in_window = true;
        let operation = OperationId::send(transfer);
        let SendStage::Granted(granted) = &mut send.stage else {
            return;
        };
        self.send_stream
            .drop_from(operation, granted.plan.first_sequence);
        if send.course.completed && send.course.cancel.is_none() {
            // Its bytes are the program's again.
            let cancel = Cancelling::new(now, EndCause::Cancelled, false, now);
            send.course.cancel = Some(cancel);
        }
        if let Some(cancel) = &mut send.course.cancel {
            let quiet = cancel.quiet;
            // The peer may take what it asked for; else it has never begun it, and does not answer.
            let is_over = !send.asking;
            (cancel.peer_quiet, cancel.confirmed) = (is_over, is_over);
            if is_over {
                self.withdraw_number(transfer);
            } else {
                self.transmit
                    .extend(cancel_frame(transfer, Role::Sender, &cancel.cause));
                self.waits_no_more(transfer);
            }
            if quiet {
                self.release_send(transfer);
            }
            return self.settle_send(now, transfer);
        }
        send.course.clock.progressed(now);
        send.leaving = true;
        if send.busy() {
            self.actions.push_back(Action::Withdraw { operation });
        } else {
            self.window_left(now, transfer);
        }
    }

    /// The data plane has let go of a send whose window was closed: it begins anew.
    pub(super) fn window_left(&mut self, now: Time, transfer: TransferId) {
        self.drop_sent(transfer);
        self.release_send(transfer);
        if let Some(send) = self.sends.get_mut(&transfer) {
            send.leaving = false;
            send.was_in_window = false;
            send.stage = SendStage::Queued;
            if let Some((cut, window, level)) = send.granted_next.take() {
                self.waits_no_more(transfer);
                let plan = self.send_plan(cut, window);
                return self.begin_granted(now, transfer, plan, level);
            }
        }
        self.place_send(now, transfer);
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

    /// Tells the peer that the send of this number does not come.
    pub(super) fn withdraw_number(&mut self, transfer: TransferId) {
        if let Some(send) = self.sends.get_mut(&transfer)
            && let Some(number) = send.number.take()
        {
            let tag = send.tag;
            self.clear_number(tag, number);
            self.transmit.push_back(Frame::Withdraw { tag, number });
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

    /// A window that is kept for a send which has yet to leave its former one was closed.
    pub(super) fn forget_posted(&mut self, transfer: TransferId) {
        if let Some(window) = transfer.window()
            && let Some(of) = self.send_windows.by_window.get(&window)
            && let Some(send) = self.sends.get(of)
            && let Some(number) = send.number
            && let Some(counts) = self.matching.sends.get_mut(&send.tag)
            && counts.posted.remove(number).is_some()
        {
            self.send_windows.known -= 1;
            self.send_windows.by_window.remove(&window);
        }
    }

    /// Nothing has this number any more.
    fn clear_number(&mut self, tag: Tag, number: u64) {
        let Some(counts) = self.matching.sends.get_mut(&tag) else {
            return;
        };
        counts.waiting.remove(number);
        counts.begun.remove(number);
        // It was posted for a send that was still to leave its former window.
        if number < counts.next
            && let Some(posted) = counts.posted.remove(number)
        {
            self.send_windows.by_window.remove(&posted.plan.window);
            self.send_windows.known -= 1;
        }
    }

    /// Forgets the count of a tag that was never used.
    fn tidy_sent(&mut self, tag: Tag) {
        let counts = self.matching.sends.get(&tag);
        if counts.is_some_and(|counts| {
            counts.next == 0 && counts.is_idle() && counts.posted.is_empty() && !counts.is_counted
        }) {
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
        let counts = self.matching.receives_of(tag);
        let forgotten = counts.next <= number && counts.is_idle();
        self.matching.forget_received(tag, forgotten);
        self.transmit.push_back(Frame::Forgotten { tag, forgotten });
    }

    /// The peer has forgotten a count, or goes on with it.
    pub(super) fn forget_answered(
        &mut self,
        now: Time,
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
            counts.next = 0;
        }
        windows.unroomed.append(&mut counts.held);
        self.tidy_sent(tag);
        self.begin_unroomed(now);
        Ok(())
    }

    /// Sends begin whose tags there was no room for.
    pub(super) fn begin_unroomed(&mut self, now: Time) {
        while let Some(first) = self.send_windows.unroomed.pop_first()
            && self.number_first(now, first)
        {
            self.send_windows.roomed = self.has_room(OperationId::send(first));
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
        let known = self
            .matching
            .sends
            .iter()
            .map(|(tag, counts)| (tag, &counts.posted, counts.next));
        let known: Vec<_> = known.filter(|(_, posted, _)| !posted.is_empty()).collect();
        assert_eq!(self.send_windows.known, 0, "{known:?}");
        assert!(
            self.send_windows.asking.is_empty(),
            "{:?}",
            self.send_windows.asking
        );
        assert!(self.send_windows.by_window.is_empty());
        assert_eq!(peer.posting.open, 0, "{:#?}", peer.receives);
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
