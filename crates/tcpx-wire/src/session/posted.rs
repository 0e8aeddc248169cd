//! Posted windows: a receive that waits opens its memory for the one send that it will meet, and says so.
//!
//! The send of its number then writes there without asking. A send that does not fit, or that left before it
//! knew the window, is met as if there were none: the window is closed first. A posted receive has a number, and so have
//! those before it: where one of them ends early, the peer answers what becomes of its number. A transfer that comes for it
//! meets the next receive that has none.

use std::collections::BTreeSet;

use super::Session;
use super::action::{Action, OperationId};
use super::credit::within;
use super::error::SessionError;
use super::matching::{Announced, Arrival, fits};
use super::one_sided::Origin;
use super::stream::Plan;
use super::unexpected;
use crate::frame::{Frame, NumberUse, Tag, TransferId};
use crate::plan::ChunkPlan;
use crate::time::Time;

/// What a receiver has its sender keep. Receives beyond are granted when their sends ask.
pub(super) const POSTED: &str = "announced receives";

/// Windows of a tag in a row that eager sends made vain, after which its receives wait to be asked. Opening and
/// closing so many takes about as long as the round trip that a long send then asks in.
pub(super) const MOST_VAIN: u8 = 8;

/// The open window of a receive that no send has come to.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) window: u64,
    /// How a transfer that fills it is cut.
    pub(super) plan: Plan,
    /// The data plane was asked to let go of it.
    pub(super) closing: bool,
    /// CRC32C of the source, said before the first chunk came.
    pub(super) expected: Option<u32>,
    /// The transfer whose sender asked, and will find the window.
    pub(super) asked_by: Option<Arrival>,
    /// What the peer calls the transfer whose end it has told.
    pub(super) ended_as: Option<TransferId>,
}

/// Receives that may be posted.
#[derive(Debug, Default)]
pub(super) struct Posting {
    candidates: BTreeSet<OperationId>,
    /// Windows that are open, and no send has come to.
    pub(super) open: usize,
    next_window: u64,
}

impl Posting {
    /// A name for a window, which none had before.
    pub(super) fn name_window(&mut self) -> u64 {
        self.next_window += 1;
        self.next_window - 1
    }

    pub(super) fn has_named(&self, window: u64) -> bool {
        window < self.next_window
    }

    pub(super) fn clear(&mut self) {
        self.candidates.clear();
    }
}

impl Session {
    /// A receive waits for its send: it is posted, if that is worth it and there is room.
    pub(super) fn post_receive_soon(&mut self, operation: OperationId) {
        let eager_limit = self.agreed.map_or(0, |agreed| agreed.eager_beside());
        let receive = self.receives.get(&operation);
        let is_long = receive.is_some_and(|receive| receive.capacity > eager_limit.into());
        if self.config.addressed && (is_long || self.agreed.is_none()) {
            self.posting.candidates.insert(operation);
            self.post_candidates();
        }
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

    /// Posts a receive, if that is worth it and may be; `false` if there is no room, until others have met their sends.
    fn post_window(&mut self, operation: OperationId) -> bool {
        let (Some(agreed), Some(receive)) = (self.agreed, self.receives.get(&operation)) else {
            return true;
        };
        let (capacity, tag, level) = (receive.capacity, receive.tag, receive.asked);
        if !receive.waits() || receive.fenced || capacity <= agreed.eager_beside().into() {
            return true;
        }
        let counts = self.matching.receives_of(tag);
        if counts.vain >= MOST_VAIN {
            return true;
        }
        let mut number = receive.number;
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
                if let Some(receive) = self.receives.get_mut(&announced) {
                    receive.number = Some(its_number);
                }
                number = Some(its_number);
            }
        }
        let Some(number) = number else { return true };
        let alone = self.is_alone();
        let cut = self.config.cut(capacity, 0, agreed.chunk_bytes, alone);
        let window = self.posting.name_window();
        let plan = Plan::named(cut, window);
        self.posting.open += 1;
        let transfer = TransferId::to_window(window);
        self.by_transfer.insert(transfer, operation);
        if let Some(receive) = self.receives.get_mut(&operation) {
            receive.posted = Some(Posted {
                window,
                plan,
                closing: false,
                expected: None,
                asked_by: None,
                ended_as: None,
            });
        }
        self.open_window(operation, window, cut, tag);
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
        self.by_transfer.len() == self.posting.open
    }

    /// Has the data plane open a window, before the peer can hear of it.
    pub(super) fn open_window(
        &mut self,
        operation: OperationId,
        window: u64,
        cut: ChunkPlan,
        tag: Tag,
    ) {
        self.urgent.push_back(Action::OpenWindow {
            operation,
            window,
            cut,
            tag,
        });
    }

    /// The header of a chunk of a transfer of `total` bytes has come to the window of a receive, which is matched to it. The
    /// data plane has checked that it fits, and says so before it says anything of its chunks.
    pub fn window_begins(&mut self, now: Time, operation: OperationId, total: u64) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let is_live = receive.course.cancel.is_none();
        let Some(posted) = receive.posted.take_if(|posted| is_live && !posted.closing) else {
            return;
        };
        self.posting.open -= 1;
        let (tag, level) = (receive.tag, receive.asked);
        receive.course.clock.progressed(now);
        self.matching.receives_of(tag).vain = 0;
        self.matching.is_sent(tag);
        if let Some(number) = receive.number.take() {
            self.matching.take_announced(tag, number);
        }
        if let Some(asked_by) = posted.asked_by {
            self.by_transfer.remove(&asked_by.transfer);
        }
        let plan = posted.plan.for_total(total);
        let transfer = TransferId::to_window(posted.window);
        self.begin_matched(operation, transfer, plan, level, posted.expected);
        self.post_candidates();
    }

    /// A transfer without a window came for a posted receive: whether its sender finds the window anyway. Else
    /// that is closed first, and the transfer is taken then.
    pub(super) fn finds_window(&mut self, operation: OperationId, arrival: Arrival) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let (capacity, asked) = (receive.capacity, receive.asked);
        let Some(posted) = &mut receive.posted else {
            return;
        };
        let fits = fits(capacity, asked, arrival.bytes, arrival.level);
        if arrival.eager.is_none() && fits && !posted.closing {
            self.by_transfer.insert(arrival.transfer, operation);
            posted.asked_by = Some(arrival);
            return;
        }
        let (tag, number) = (receive.tag, receive.number.take());
        let counts = self.matching.receives_of(tag);
        counts.vain = counts.vain.saturating_add(arrival.eager.is_some().into());
        if let Some(number) = number {
            self.matching.take_announced(tag, number);
        }
        self.offer(operation, arrival);
        self.close_window(operation);
    }

    /// A transfer waits until its receive may take it.
    pub(super) fn offer(&mut self, operation: OperationId, arrival: Arrival) {
        if let Some(receive) = self.receives.get_mut(&operation) {
            self.by_transfer.insert(arrival.transfer, operation);
            receive.offered = Some(arrival);
        }
    }

    /// The transfer that waits for this receive.
    pub(super) fn take_offered(&mut self, operation: OperationId) -> Option<Arrival> {
        let receive = self.receives.get_mut(&operation)?;
        let arrival = receive.offered.take()?;
        self.by_transfer.remove(&arrival.transfer);
        Some(arrival)
    }

    /// Has the data plane let go of a window that its send does not come to; the receive goes on then.
    fn close_window(&mut self, operation: OperationId) {
        let posted = self
            .receives
            .get_mut(&operation)
            .and_then(|receive| receive.posted.as_mut());
        if let Some(posted) = posted
            && !std::mem::replace(&mut posted.closing, true)
        {
            // What the peer still says of it means nothing.
            self.by_transfer
                .remove(&TransferId::to_window(posted.window));
            self.actions.push_back(Action::Withdraw { operation });
        }
    }

    /// The data plane has let go of the window of a receive that goes on.
    pub(super) fn window_closed(&mut self, now: Time, operation: OperationId) {
        self.forget_window(operation);
        if let Some(arrival) = self.take_offered(operation) {
            self.match_up(now, operation, arrival);
        }
        self.post_candidates();
    }

    /// The window of a receive is no more.
    pub(super) fn forget_window(&mut self, operation: OperationId) {
        self.posting.candidates.remove(&operation);
        if let Some(receive) = self.receives.get_mut(&operation)
            && let Some(posted) = receive.posted.take()
        {
            self.posting.open -= 1;
            let transfer = TransferId::to_window(posted.window);
            self.by_transfer.remove(&transfer);
            if let Some(asked_by) = posted.asked_by {
                self.by_transfer.remove(&asked_by.transfer);
            }
        }
    }

    /// A receive ends that has no transfer: takes it out of the count. Its number, if it has one, is the peer's to use
    /// or to skip, unless that has ended the send of it.
    pub(super) fn uncount_receive(&mut self, operation: OperationId) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let tag = receive.tag;
        let Some(number) = receive.number.take() else {
            let queue = &mut self.matching.receives_of(tag).queue;
            if let Ok(at) = queue.binary_search(&operation) {
                queue.remove(at);
            }
            return self.matching.tidy(tag);
        };
        let posted = receive.posted.as_mut();
        if posted
            .as_ref()
            .is_some_and(|posted| posted.ended_as.is_some())
        {
            self.matching.is_sent(tag);
            self.matching.take_announced(tag, number);
            return;
        }
        let mut asked_by = None;
        if let Some(posted) = posted {
            // What the peer still says of its window means nothing.
            let window = TransferId::to_window(posted.window);
            self.by_transfer.remove(&window);
            asked_by = posted.asked_by.take();
        }
        if let Some(asked_by) = &asked_by {
            self.by_transfer.remove(&asked_by.transfer);
        }
        if !self.ended() {
            self.matching.end_announced(tag, number, asked_by);
            self.transmit.push_back(Frame::Unpost { tag, number });
        }
    }

    /// The peer says what becomes of the number of a receive that has ended.
    pub(super) fn unpost_answered(
        &mut self,
        now: Time,
        tag: Tag,
        number: u64,
        used: NumberUse,
    ) -> Result<(), SessionError> {
        let counts = self.matching.receives_of(tag);
        let Some(Announced::Ended(_)) = counts.announced.get(&number) else {
            self.matching.tidy(tag);
            return Err(unexpected(
                "unposted",
                "the number of a receive that has ended",
                format!("{number} of tag {} arrived", tag.0),
            ));
        };
        let ended = self.matching.take_announced(tag, number);
        if used == NumberUse::Forgotten {
            self.matching.begin_again(tag)?;
        }
        if let Some(Announced::Ended(Some(arrival))) = ended {
            match used {
                NumberUse::Used => self.meet(now, arrival, None)?,
                _ => self.drop_arrival(&arrival),
            }
        }
        while let Some(operation) = self.matching.receives_of(tag).queue.front().copied()
            && let Some(arrival) = self.matching.first_arrival(tag)
        {
            self.matching.receives_of(tag).queue.pop_front();
            self.match_up(now, operation, arrival);
        }
        let queue = self.matching.receives_of(tag).queue.iter().copied();
        self.posting.candidates.extend(queue);
        self.matching.tidy(tag);
        self.post_candidates();
        Ok(())
    }

    /// The GPU work is done that a receive was [fenced](super::ReceiveRequest::fenced) by.
    pub fn fence_reached(&mut self, now: Time, operation: OperationId) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        if !std::mem::take(&mut receive.fenced) || receive.course.cancel.is_some() {
            return;
        }
        receive.course.clock.progressed(now);
        let (is_open, is_ours) = (receive.posted.is_some(), receive.origin == Origin::Posted);
        if !is_open && let Some(arrival) = self.take_offered(operation) {
            self.match_up(now, operation, arrival);
        } else if is_ours {
            self.post_receive_soon(operation);
        }
    }
}
