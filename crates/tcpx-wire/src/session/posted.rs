//! Posted windows: a receive that waits opens its memory for the one send that it will meet, and says so.
//!
//! The send of its number then writes there without asking. A send that does not fit, or that left before it
//! knew the window, is met as if there were none: the window is closed first. A receive that ends early, while
//! no send of its number is known, gives its number to the receive behind it; the windows of both are closed,
//! and the peer is told, which sends anew what it had sent there.

use std::collections::BTreeSet;

use super::Session;
use super::action::{Action, OperationId};
use super::cancel::{by_peer, cancel_frame};
use super::credit::within;
use super::error::{EndCause, SessionError};
use super::matching::{Arrival, PostedWindow};
use super::one_sided::Origin;
use super::stream::Plan;
use crate::frame::{CancelReason, Frame, RefuseReason, Role, Tag, TransferId};
use crate::plan::ChunkPlan;
use crate::time::Time;

/// What a receiver has its sender keep: windows that no send has taken. Receives beyond are granted when their sends ask.
pub(super) const POSTED: &str = "posted windows";

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
    pub(super) asked_by: Option<TransferId>,
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
            && let Some(agreed) = &self.agreed
            && within(POSTED, self.posting.open, 1, agreed.limits.windows).is_ok()
            && let Some(operation) = self.posting.candidates.pop_first()
        {
            self.post_window(operation);
        }
    }

    fn post_window(&mut self, operation: OperationId) {
        let (Some(agreed), Some(receive)) = (self.agreed, self.receives.get(&operation)) else {
            return;
        };
        let capacity = receive.capacity;
        if !receive.waits() || receive.fenced || capacity <= agreed.eager_beside().into() {
            return;
        }
        let (tag, Some(number), level) = (receive.tag, receive.number, receive.asked) else {
            return;
        };
        if self.matching.receives_of(tag).vain >= MOST_VAIN {
            return;
        }
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
        let counts = self.matching.receives_of(tag);
        counts.vain = 0;
        if let Some(number) = receive.number {
            counts.receives.remove(number);
            self.matching.is_sent(tag, number);
        }
        if let Some(asked_by) = posted.asked_by {
            self.by_transfer.remove(&asked_by);
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
        let fits = PostedWindow::fits(capacity, asked, arrival.bytes, arrival.level);
        if arrival.eager.is_none() && fits && !posted.closing {
            posted.asked_by = Some(arrival.transfer);
            self.by_transfer.insert(arrival.transfer, operation);
            return;
        }
        let counts = self.matching.receives_of(receive.tag);
        counts.receives.remove(arrival.number);
        counts.vain = counts.vain.saturating_add(arrival.eager.is_some().into());
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

    /// Has the data plane let go of a window that no send has come to; the receive goes on then.
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
        match self.take_offered(operation) {
            Some(arrival) => self.match_up(now, operation, arrival),
            None => self.post_receive_soon(operation),
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
                self.by_transfer.remove(&asked_by);
            }
        }
    }

    /// A receive ends that has no transfer: takes it out of the count. `true` if the peer was told of its window's end,
    /// and answers.
    pub(super) fn uncount_receive(&mut self, operation: OperationId, cause: &EndCause) -> bool {
        let Some(receive) = self.receives.get(&operation) else {
            return false;
        };
        let (tag, Some(number)) = (receive.tag, receive.number) else {
            return false;
        };
        let posted = receive.posted.as_ref();
        let (window, asked_by) = (
            posted.map(|posted| posted.window),
            posted.and_then(|posted| posted.asked_by),
        );
        let is_theirs = posted.is_some_and(|posted| posted.ended_as.is_some());
        // The peer knows already of one that is being closed.
        let window = window.filter(|_| !receive.is_withdrawn());
        let counts = self.matching.receives_of(tag);
        if counts.receives.remove(number).is_none() {
            return false;
        }
        if is_theirs {
            // Its send has ended.
            self.matching.is_sent(tag, number);
            return false;
        }
        if number < counts.sent {
            if let Some(window) = window {
                // Whatever its sender has done, it learns from this frame that nobody takes it.
                let transfer = TransferId::to_window(window);
                let told = cancel_frame(transfer, Role::Receiver, cause);
                let is_told = told.is_some();
                self.transmit.extend(told);
                if asked_by.is_none() {
                    counts.ended.insert(number, refusal_for(cause));
                }
                return is_told;
            }
            counts.ended.insert(number, refusal_for(cause));
            return false;
        }
        if let Some(window) = window {
            self.by_transfer.remove(&TransferId::to_window(window));
        }
        // The next receives move up.
        let behind = counts.receives.split_off(number);
        counts.next -= 1;
        let mut closed = window.is_some();
        let mut moved = Vec::with_capacity(behind.len());
        for (held, other) in behind {
            counts.receives.insert(held - 1, other);
            moved.push(other);
        }
        for other in moved {
            if let Some(receive) = self.receives.get_mut(&other) {
                receive.number = receive.number.map(|number| number - 1);
                closed |= receive.posted.is_some() && !receive.is_withdrawn();
            }
            self.close_window(other);
        }
        if closed && !self.ended() {
            self.transmit.push_back(Frame::Revoke { tag, number });
        }
        self.matching.tidy(tag);
        false
    }

    /// The send of this number does not come.
    pub(super) fn send_withdrawn(
        &mut self,
        now: Time,
        tag: Tag,
        number: u64,
    ) -> Result<(), SessionError> {
        let counts = self.matching.receives_of(tag);
        if !counts.may_arrive(number) {
            if number < counts.next {
                // Its receive has ended with it.
                return Ok(());
            }
            return Err(super::unexpected(
                "withdraw",
                "the number of a send that has not come",
                format!("{number} arrived of tag {}", tag.0),
            ));
        }
        let ended = counts.ended.remove(number);
        let receive = counts.receives.remove(number);
        if ended.is_none() && receive.is_none() {
            self.matching.add_hole(tag, number);
        }
        self.matching.is_sent(tag, number);
        self.matching.check_tags(&self.config.ours.limits)?;
        if let Some(operation) = receive {
            let detail = "the send of its number was withdrawn";
            let cause = by_peer(Role::Sender, CancelReason::Requested, detail);
            self.cancel_operation(now, operation, cause);
        }
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

/// What a transfer hears whose receive has ended so.
pub(super) fn refusal_for(cause: &EndCause) -> RefuseReason {
    match cause {
        EndCause::Stalled(_) | EndCause::DeadlinePassed(_) => RefuseReason::DeadlineExpired,
        EndCause::Closed => RefuseReason::Shutdown,
        EndCause::Data { .. } => RefuseReason::MemoryFailed,
        _ => RefuseReason::Cancelled,
    }
}
