//! The receiver's part in grants ahead: which receives it grants, and what becomes of them.

use std::collections::VecDeque;

use super::{Foresight, MOST, fits_level};
use crate::frame::{Frame, Level, Role, Tag, TransferId};
use crate::session::action::{Action, OperationId};
use crate::session::cancel::cancel_frame;
use crate::session::config::Agreed;
use crate::session::error::{EndCause, SessionError};
use crate::session::incoming::Incoming;
use crate::session::matching::Arrival;
use crate::session::one_sided::Origin;
use crate::session::{Session, unexpected};
use crate::time::Time;

/// Longest transfer that is granted ahead: one that takes long has little to gain, and is cut better by what is
/// known when it comes.
const LONGEST: u64 = 16 << 20;
/// Most chunks granted ahead, about: far fewer than a network lets others run ahead of those that were left out.
const MOST_CHUNKS: u64 = 4096;
/// Transfers in a row that would have been guessed rightly before the first guess.
const FIRST_GUESS: u32 = 2;
/// The same, at most, after wrong guesses: twice as many after each.
const LAST_GUESS: u32 = 256;
/// Right guesses in a row after which earlier wrong ones are forgotten.
const FORGIVEN: u32 = 64;

/// Grants ahead of the peer's transfers.
#[derive(Debug)]
pub(in crate::session) struct GivenAhead {
    epoch: u32,
    /// In the order of their transfers, of which the first is the next that is to arrive.
    open: VecDeque<Guess>,
    /// One behind the last transfer that the peer has announced.
    announced: u64,
    /// The peer was asked to decline them.
    recalled: bool,
    /// Receives that the data plane has yet to let go of before they wait again, and by when it has to.
    withdrawn: usize,
    withdrawn_by: Option<Time>,
    /// Transfers in a row that were, or would have been, guessed rightly.
    right: u32,
    needed: u32,
    /// What the sender asked for last.
    level: Level,
}

impl Default for GivenAhead {
    fn default() -> Self {
        Self {
            epoch: 0,
            open: VecDeque::new(),
            announced: 0,
            recalled: false,
            withdrawn: 0,
            withdrawn_by: None,
            right: 0,
            needed: FIRST_GUESS,
            level: Level::default(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Guess {
    operation: OperationId,
    tag: Tag,
    bytes: u64,
    level: Level,
    chunks: u32,
}

impl Guess {
    fn fits(&self, arrival: &Arrival) -> bool {
        let is_alike = (self.tag, self.bytes) == (arrival.tag, arrival.bytes);
        arrival.eager.is_none() && is_alike && fits_level(arrival.level, self.level)
    }
}

impl GivenAhead {
    /// When the data plane has to have let go of what was withdrawn.
    pub(in crate::session) fn withdrawn_by(&self) -> Option<Time> {
        self.withdrawn_by
    }

    /// Matches have to wait: receives that come before others are not back yet.
    pub(in crate::session) fn holds_matching(&self) -> bool {
        self.withdrawn > 0
    }

    fn has_room(&self) -> bool {
        let chunks = self.open.iter().map(|guess| u64::from(guess.chunks));
        self.open.len() < MOST && chunks.sum::<u64>() < MOST_CHUNKS
    }

    fn was_right(&mut self) {
        self.right = self.right.saturating_add(1);
        if self.right >= FORGIVEN {
            self.needed = FIRST_GUESS;
        }
    }

    fn was_wrong(&mut self) {
        self.right = 0;
        self.needed = self.needed.saturating_mul(2).min(LAST_GUESS);
    }
}

#[cfg(test)]
impl GivenAhead {
    pub(super) fn is_idle(&self) -> bool {
        self.open.is_empty() && self.withdrawn == 0
    }

    pub(super) fn epoch(&self) -> u32 {
        self.epoch
    }
}

impl Session {
    /// Whether `operation` would have been guessed for this transfer, which it is about to be matched to.
    pub(in crate::session) fn learn_from(&mut self, operation: OperationId, arrival: &Arrival) {
        let posted = self.receives.get(&operation).map(|receive| receive.origin);
        let is_posted = posted == Some(Origin::Posted);
        if !self.config.grants_ahead || arrival.eager.is_some() || !is_posted {
            self.given_ahead.right = 0;
            return;
        }
        let next = self.next_waiting();
        let guessed = next.is_some_and(|(oldest, receive)| {
            let is_likely = self.is_likely(receive, arrival.level);
            oldest == operation && is_likely && receive.capacity == arrival.bytes
        });
        let given = &mut self.given_ahead;
        given.level = arrival.level;
        if guessed {
            given.was_right();
        } else {
            given.right = 0;
        }
    }

    /// The receive that has waited longest, among those that are looked at.
    fn next_waiting(&self) -> Option<(OperationId, &Incoming)> {
        let mut looked_at = self.receives.iter().take(2 * MOST);
        let found = looked_at.find(|(_, receive)| receive.waits())?;
        Some((*found.0, found.1))
    }

    /// Whether a transfer of the receive's whole length whose sender asks for this level is one that is granted ahead.
    fn is_likely(&self, receive: &Incoming, asked: Level) -> bool {
        (u64::from(self.config.ours.eager_limit) + 1..=LONGEST).contains(&receive.capacity)
            && fits_level(asked, receive.asked.max(asked))
    }

    /// Whether receives are granted ahead: guesses have been right.
    pub(in crate::session) fn guesses(&self) -> bool {
        self.config.grants_ahead && self.given_ahead.right >= self.given_ahead.needed
    }

    /// Grants what waits, where guesses have been right.
    pub(in crate::session) fn grant_ahead(&mut self) {
        let given = &self.given_ahead;
        let free = !given.recalled && given.withdrawn == 0 && self.matching.arrivals() == 0;
        if !self.guesses() || !free || self.closing() || !self.may_post() {
            return;
        }
        let Some(agreed) = self.agreed else { return };
        while self.given_ahead.has_room()
            && let Some((operation, receive)) = self.next_waiting()
            && self.is_likely(receive, self.given_ahead.level)
        {
            let (tag, bytes) = (receive.tag, receive.capacity);
            let level = receive.asked.max(self.given_ahead.level);
            self.grant_one_ahead(operation, tag, bytes, level, &agreed);
        }
        self.pump_receives();
    }

    fn grant_one_ahead(
        &mut self,
        operation: OperationId,
        tag: Tag,
        bytes: u64,
        level: Level,
        agreed: &Agreed,
    ) {
        let transfer = self.end_of_open();
        self.matching.remove_receive(tag, operation);
        let plan = self.begin_receiving(operation, transfer, bytes, level, Foresight::Open, agreed);
        self.given_ahead.open.push_back(Guess {
            operation,
            tag,
            bytes,
            level,
            chunks: plan.chunks,
        });
        self.transmit.push_back(Frame::GrantAhead {
            transfer,
            epoch: self.given_ahead.epoch,
            tag,
            bytes,
            grant: plan.grant(level),
        });
    }

    /// No transfer has begun that is not over.
    pub(in crate::session) fn only_open(&self) -> bool {
        self.by_transfer.len() == self.given_ahead.open.len()
    }

    /// Whether a transfer that is announced is one that was granted ahead, as guessed. Else it is to be matched, and
    /// no grant is open any more.
    pub(in crate::session) fn was_granted_ahead(
        &mut self,
        now: Time,
        arrival: &Arrival,
        one_sided: bool,
    ) -> bool {
        // Those before it were sent to their grants.
        self.begun_before(now, arrival.transfer);
        let Some(guess) = self.given_ahead.open.front() else {
            return false;
        };
        if !one_sided && guess.fits(arrival) {
            self.given_ahead.level = arrival.level;
            let (operation, bytes) = (guess.operation, guess.bytes);
            self.actions.push_back(Action::Begins { operation, bytes });
            self.begun_before(now, TransferId(arrival.transfer.0.saturating_add(1)));
            return true;
        }
        self.given_ahead.was_wrong();
        self.void_given(now);
        false
    }

    /// Transfers that were granted ahead and may have been sent: one behind the last.
    fn end_of_open(&self) -> TransferId {
        let open = self.given_ahead.open.len() as u64;
        TransferId(self.next_arrival.saturating_add(open))
    }

    /// Whether this announcement comes behind the first chunks of its transfer, which had crossed its grant: then it
    /// says nothing new.
    pub(in crate::session) fn comes_late(&mut self, arrival: &Arrival) -> bool {
        let announced = &mut self.given_ahead.announced;
        let transfer = arrival.transfer.0;
        let is_late =
            arrival.eager.is_none() && (*announced..self.next_arrival).contains(&transfer);
        *announced = (*announced).max(transfer.saturating_add(1));
        is_late
    }

    /// The number of the transfer that the peer may announce next, or of a later one that it may as well.
    pub(in crate::session) fn may_announce(&self, transfer: TransferId) -> bool {
        transfer.0 >= self.next_arrival && transfer <= self.end_of_open()
    }

    /// The peer has said something of this transfer that it says of such only as it has sent.
    pub(in crate::session) fn begun_with(&mut self, now: Time, transfer: TransferId) {
        if transfer.0 >= self.next_arrival && transfer < self.end_of_open() {
            self.begun_before(now, TransferId(transfer.0.saturating_add(1)));
        }
    }

    /// The transfers before this one have been sent, or are being.
    fn begun_before(&mut self, now: Time, end: TransferId) {
        while self.next_arrival < end.0
            && let Some(guess) = self.given_ahead.open.pop_front()
        {
            self.next_arrival = self.next_arrival.saturating_add(1);
            self.given_ahead.was_right();
            self.begun(now, guess.operation);
        }
    }

    fn begun(&mut self, now: Time, operation: OperationId) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let Some(matched) = &mut receive.matched else {
            return;
        };
        matched.foresight = Foresight::None;
        receive.clock.progressed(now);
        let transfer = matched.transfer;
        // It has ended, and the peer did not know.
        if let Some(cancel) = &receive.cancel {
            self.transmit
                .extend(cancel_frame(transfer, Role::Receiver, &cancel.cause));
            self.settle_receive(now, operation);
        }
    }

    pub(in crate::session) fn declined(
        &mut self,
        now: Time,
        epoch: u32,
        next: TransferId,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "decline";
        let ours = self.given_ahead.epoch;
        if epoch != ours || !self.config.grants_ahead {
            return Err(unexpected(
                FRAME,
                "the epoch of the grants ahead",
                format!("it is {ours}, and {epoch} arrived"),
            ));
        }
        if !self.may_announce(next) {
            return Err(SessionError::TransferOrder {
                frame: FRAME,
                expected: TransferId(self.next_arrival),
                arrived: next,
            });
        }
        self.begun_before(now, next);
        // Also after a recall: who ends receives that wait is not to make guesses that cost the peer a transfer.
        self.given_ahead.was_wrong();
        self.void_given(now);
        Ok(())
    }

    /// What is open comes to nothing.
    fn void_given(&mut self, now: Time) {
        let given = &mut self.given_ahead;
        given.epoch = given.epoch.wrapping_add(1);
        given.recalled = false;
        for guess in std::mem::take(&mut given.open) {
            self.void(guess.operation);
        }
        if self.given_ahead.withdrawn > 0 {
            let until = now + self.config.cancel_timeout;
            self.given_ahead.withdrawn_by.get_or_insert(until);
        }
        self.pump_receives();
    }

    fn void(&mut self, operation: OperationId) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let Some(matched) = &mut receive.matched else {
            return;
        };
        self.by_transfer.remove(&matched.transfer);
        if let Some(cancel) = &receive.cancel {
            matched.foresight = Foresight::Void;
            if cancel.quiet {
                self.receives.remove(&operation);
            }
            return;
        }
        matched.foresight = Foresight::Withdrawn;
        let first = matched.first_sequence();
        self.receive_stream.drop_from(operation, first);
        self.given_ahead.withdrawn += 1;
        self.actions.push_back(Action::Withdraw { operation });
    }

    /// The data plane has let go of a receive whose transfer does not come.
    pub(in crate::session) fn withdrawn(&mut self, now: Time, operation: OperationId) {
        let given = &mut self.given_ahead;
        given.withdrawn = given.withdrawn.saturating_sub(1);
        if given.withdrawn == 0 {
            given.withdrawn_by = None;
        }
        self.release_receive(operation);
        if let Some(receive) = self.receives.get_mut(&operation) {
            match &mut receive.cancel {
                // The program has ended it meanwhile.
                Some(cancel) => {
                    cancel.quiet = true;
                    if let Some(matched) = &mut receive.matched {
                        matched.foresight = Foresight::Void;
                    }
                    self.settle_receive(now, operation);
                }
                None => {
                    receive.matched = None;
                    self.matching.add_receive(receive.tag, operation);
                    if self.closing() {
                        self.begin_cancel_receive(now, operation, EndCause::Closed);
                    }
                }
            }
        }
        if self.given_ahead.withdrawn == 0 && !self.ended() {
            self.match_what_waited(now);
        }
    }

    /// Matches the arrivals that had to wait for receives.
    fn match_what_waited(&mut self, now: Time) {
        for transfer in self.matching.waiting_arrivals() {
            let tag = self.matching.tag_of(transfer);
            if let Some(operation) = tag.and_then(|tag| self.matching.take_receive(tag))
                && let Some(arrival) = self.matching.remove_arrival(transfer)
            {
                self.match_up(now, operation, arrival);
            }
        }
        self.grant_ahead();
    }

    /// Asks the peer to decline what is open.
    pub(in crate::session) fn recall(&mut self) {
        if !self.ended() && !std::mem::replace(&mut self.given_ahead.recalled, true) {
            let epoch = self.given_ahead.epoch;
            self.transmit.push_back(Frame::Recall { epoch });
        }
    }

    /// Ends the receives that are open, as those that wait end when the session closes.
    pub(in crate::session) fn close_open(&mut self, now: Time) {
        let open: Vec<_> = self.given_ahead.open.iter().copied().collect();
        for guess in open {
            self.cancel_operation(now, guess.operation, EndCause::Closed);
        }
    }
}
