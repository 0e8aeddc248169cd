//! Counted matching: send number n of a tag meets receive number n. Both sides count.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::action::OperationId;
use super::config::eager_cost;
use super::error::SessionError;
use super::limits::{ASKS, TAGS, within};
use super::stream::Plan;
use super::unexpected;
use crate::frame::{Destination, Eager, Level, Limits, Tag, TransferId};

/// A transfer of the peer that waits for a receive.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) transfer: TransferId,
    pub(super) tag: Tag,
    pub(super) number: u64,
    pub(super) bytes: u64,
    pub(super) level: Level,
    /// Pieces of a list that it covers.
    pub(super) pieces: u32,
    /// The payload of an eager transfer.
    pub(super) eager: Option<Eager>,
    /// It counts among those that ask for a receive which is not there.
    is_ask: bool,
}

impl Arrival {
    pub(super) fn new(transfer: TransferId, level: Level, bytes: u64, to: Destination) -> Self {
        let (tag, number) = match to {
            Destination::Receive { tag, number } => (tag, number),
            _ => (Tag(0), 0),
        };
        Self {
            transfer,
            tag,
            number,
            bytes,
            level,
            pieces: 0,
            eager: None,
            is_ask: false,
        }
    }

    /// Credit that it takes, if it is eager.
    pub(super) fn credit(&self) -> u64 {
        let kept = self.eager.as_ref().map_or(0, Eager::kept);
        eager_cost(kept, self.pieces)
    }
}

/// Whether a send goes to such a window without being granted. Both sides ask this of the same
/// values.
pub(super) fn fits(capacity: u64, level: Level, bytes: u64, asked: Level) -> bool {
    (1..=capacity).contains(&bytes) && asked <= level
}

/// A window of the peer for one send.
#[derive(Clone, Copy, Debug)]
pub(super) struct PostedWindow {
    pub(super) capacity: u64,
    pub(super) plan: Plan,
    pub(super) level: Level,
}

/// The sender's count of one tag.
#[derive(Debug, Default)]
pub(super) struct SendTag {
    /// Number of the next send.
    pub(super) next: u64,
    /// A send has had a number since both sides began at 0.
    pub(super) is_used: bool,
    /// One behind the highest number that the peer has announced a receive of.
    pub(super) announced: u64,
    /// Windows of the numbers from the next one on; `None` where the receive has ended.
    pub(super) posted: BTreeMap<u64, Option<PostedWindow>>,
    /// Sends that have asked for a receive, or go to a posted window.
    pub(super) numbered: BTreeMap<u64, OperationId>,
    /// Sends without a number, in their order: until the peer has answered whether the count may be
    /// forgotten, or one may ask.
    pub(super) held: BTreeSet<OperationId>,
    pub(super) is_forgetting: bool,
    /// The peer counts it, or will with the next frame.
    pub(super) is_counted: bool,
}

impl SendTag {
    /// No send of it is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.numbered.is_empty() && self.held.is_empty() && !self.is_forgetting
    }

    /// Takes the next number; whether the peer has announced a receive of it.
    pub(super) fn take_number(&mut self) -> (u64, bool) {
        let number = self.next;
        self.next += 1;
        self.is_used = true;
        self.posted.remove(&number);
        (number, number < self.announced)
    }

    /// The receive of the next number has ended.
    pub(super) fn is_next_ended(&self) -> bool {
        matches!(self.posted.get(&self.next), Some(None))
    }

    /// Nothing of it need be known.
    pub(super) fn is_unused(&self) -> bool {
        self.next == 0 && self.announced == 0 && self.is_idle() && !self.is_counted
    }
}

/// A receive that was announced to the peer, and whose transfer has not come.
#[derive(Debug)]
pub(super) enum Announced {
    Receive(OperationId),
    /// It has ended, and the peer is to answer what becomes of its number; the transfer that came
    /// for it meanwhile.
    Ended(Option<Arrival>),
}

/// The receiver's count of one tag.
#[derive(Debug, Default)]
pub(super) struct ReceiveTag {
    /// One behind the highest number that was announced, or has come.
    pub(super) next: u64,
    /// It counts among those that the peer uses.
    is_counted: bool,
    pub(super) announced: BTreeMap<u64, Announced>,
    /// Those of them that have ended.
    ended: usize,
    /// Receives that the peer does not know of: they meet transfers from the next number on.
    pub(super) queue: VecDeque<OperationId>,
    /// Transfers without a receive. Where receives are queued they wait for what comes before them.
    arrivals: BTreeMap<u64, Arrival>,
    /// Windows in a row that were opened in vain, as an eager send came.
    pub(super) vain: u8,
}

impl ReceiveTag {
    fn is_unused(&self) -> bool {
        self.next == 0 && !self.is_counted && self.queue.is_empty() && self.is_idle()
    }

    /// Every number before the next one has been met.
    pub(super) fn is_idle(&self) -> bool {
        self.announced.is_empty() && self.arrivals.is_empty()
    }

    /// Whether further receives may be announced: not while one that was started later may yet get
    /// the transfer of one that has ended.
    pub(super) fn is_settled(&self) -> bool {
        self.arrivals.is_empty() && self.ended == 0
    }

    /// Whether a transfer of this number may meet a receive that is queued: none before it may come
    /// for one that has ended.
    pub(super) fn is_in_order(&self, number: u64) -> bool {
        let has_ended = |(_, receive): (&u64, &Announced)| matches!(receive, Announced::Ended(_));
        self.ended == 0 || !self.announced.range(..number).any(has_ended)
    }
}

/// Counts of all tags.
#[derive(Debug, Default)]
pub(super) struct Matching {
    pub(super) sends: BTreeMap<Tag, SendTag>,
    receives: BTreeMap<Tag, ReceiveTag>,
    /// Tags that the peer uses.
    counted: usize,
    /// Arrivals that ask for a receive which is not there.
    asks: usize,
    /// Receives that are announced, of all tags.
    pub(super) announced: usize,
    /// The number of each transfer that waits for a receive, or has come for one that ended.
    arrivals: BTreeMap<TransferId, (Tag, u64)>,
}

/// A map keeps room for eleven entries when the last one is taken: as many tags as a peer may use
/// would keep it.
fn free_empty<V>(map: &mut BTreeMap<u64, V>) {
    if map.is_empty() {
        *map = BTreeMap::new();
    }
}

impl Matching {
    pub(super) fn receives_of(&mut self, tag: Tag) -> &mut ReceiveTag {
        self.receives.entry(tag).or_default()
    }

    /// Tags that the receiver counts.
    #[cfg(test)]
    pub(super) fn received_tags(&self) -> usize {
        self.receives.len()
    }

    /// A send of this tag exists.
    pub(super) fn is_sent(&mut self, tag: Tag) {
        let counts = self.receives.entry(tag).or_default();
        self.counted += usize::from(!std::mem::replace(&mut counts.is_counted, true));
    }

    /// A transfer of this number comes: whether it is the next one, which is counted then.
    ///
    /// # Errors
    /// The peer uses more tags than it may.
    pub(super) fn is_next(
        &mut self,
        tag: Tag,
        number: u64,
        is_asking: bool,
        limits: &Limits,
    ) -> Result<bool, SessionError> {
        let counts = self.receives.entry(tag).or_default();
        if is_asking {
            counts.vain = 0;
        }
        if number != counts.next {
            return Ok(false);
        }
        counts.next += 1;
        self.counted += usize::from(!std::mem::replace(&mut counts.is_counted, true));
        self.check_tags(limits).map(|()| true)
    }

    /// Both sides count the numbers of a tag from 0 again.
    pub(super) fn begin_again(&mut self, tag: Tag) -> Result<(), SessionError> {
        let counts = self.receives_of(tag);
        if counts.is_idle() {
            counts.next = 0;
            return Ok(());
        }
        Err(unexpected(
            "unposted",
            "a tag that no number is in use of",
            format!("tag {} is", tag.0),
        ))
    }

    /// Checks that the peer uses no more tags than it may.
    pub(super) fn check_tags(&self, limits: &Limits) -> Result<(), SessionError> {
        within(TAGS, self.counted, 0, limits.tags)
    }

    /// Gives the first so many receives that are queued their numbers.
    pub(super) fn announce(&mut self, tag: Tag, receives: usize) -> Vec<(OperationId, u64)> {
        let counts = self.receives.entry(tag).or_default();
        let mut numbers = Vec::with_capacity(receives);
        for operation in counts.queue.drain(..receives) {
            let receive = Announced::Receive(operation);
            counts.announced.insert(counts.next, receive);
            numbers.push((operation, counts.next));
            counts.next += 1;
        }
        self.announced += numbers.len();
        numbers
    }

    /// Takes an announced receive out of the count: its number is used, or comes to nothing.
    pub(super) fn take_announced(&mut self, tag: Tag, number: u64) -> Option<Announced> {
        let counts = self.receives.entry(tag).or_default();
        let taken = counts.announced.remove(&number)?;
        free_empty(&mut counts.announced);
        self.announced -= 1;
        if let Announced::Ended(arrival) = &taken {
            counts.ended -= 1;
            let arrival = arrival.as_ref();
            arrival.map(|arrival| self.arrivals.remove(&arrival.transfer));
        }
        Some(taken)
    }

    /// The receive of this number has ended, for which this transfer has come.
    pub(super) fn end_announced(&mut self, tag: Tag, number: u64, arrival: Option<Arrival>) {
        if let Some(arrival) = &arrival {
            self.arrivals.insert(arrival.transfer, (tag, number));
        }
        let counts = self.receives_of(tag);
        if let Some(receive) = counts.announced.get_mut(&number) {
            counts.ended += usize::from(matches!(receive, Announced::Receive(_)));
            *receive = Announced::Ended(arrival);
        }
    }

    /// Forgets the receiver's count of a tag that is not used.
    pub(super) fn tidy(&mut self, tag: Tag) {
        if self.receives.get(&tag).is_some_and(ReceiveTag::is_unused) {
            self.receives.remove(&tag);
        }
    }

    /// The peer does not use this tag any more: whether both begin to count anew.
    pub(super) fn forget_received(&mut self, tag: Tag, number: u64) -> bool {
        let counts = self.receives.entry(tag).or_default();
        self.counted -= usize::from(std::mem::take(&mut counts.is_counted));
        let forgotten = counts.next <= number && counts.is_idle();
        if forgotten {
            counts.next = 0;
        }
        self.tidy(tag);
        forgotten
    }

    /// A transfer waits for a receive.
    ///
    /// # Errors
    /// It asks for one, and as many do already as may. Nothing asks that came for a receive which
    /// has ended.
    pub(super) fn add_arrival(
        &mut self,
        mut arrival: Arrival,
        limits: Option<&Limits>,
    ) -> Result<(), SessionError> {
        // Credit counts only what its buffer holds now.
        arrival.is_ask = false;
        if let Some(eager) = &mut arrival.eager {
            if let Eager::Bytes(payload) = eager {
                payload.shrink();
            }
        } else if let Some(limits) = limits {
            within(ASKS, self.asks, 1, limits.asks)?;
            self.asks += 1;
            arrival.is_ask = true;
        }
        let (tag, number) = (arrival.tag, arrival.number);
        self.arrivals.insert(arrival.transfer, (tag, number));
        self.receives_of(tag).arrivals.insert(number, arrival);
        Ok(())
    }

    /// Queues a receive of this tag, if one begins; takes the first one of the queue, and the
    /// transfer that waits for it and for nothing else.
    pub(super) fn pair(
        &mut self,
        tag: Tag,
        begins: Option<OperationId>,
    ) -> Option<(OperationId, Arrival)> {
        let counts = self.receives_of(tag);
        counts.queue.extend(begins);
        let receive = *counts.queue.front()?;
        let (number, _) = counts.arrivals.first_key_value()?;
        let is_next = counts.is_in_order(*number);
        let (_, arrival) = is_next.then(|| counts.arrivals.pop_first())??;
        counts.queue.pop_front();
        free_empty(&mut counts.arrivals);
        self.count_out(&arrival);
        Some((receive, arrival))
    }

    fn count_out(&mut self, arrival: &Arrival) {
        self.arrivals.remove(&arrival.transfer);
        self.asks -= usize::from(arrival.is_ask);
    }

    #[cfg(test)]
    pub(super) fn arrivals(&self) -> usize {
        self.arrivals.len()
    }

    pub(super) fn has_arrival(&self, transfer: TransferId) -> bool {
        self.arrivals.contains_key(&transfer)
    }

    /// Takes the transfer of this name, if it waits for a receive, or has come for one that ended.
    pub(super) fn remove_arrival(&mut self, transfer: TransferId) -> Option<Arrival> {
        let (tag, number) = *self.arrivals.get(&transfer)?;
        let counts = self.receives.get_mut(&tag)?;
        let arrival = match counts.announced.get_mut(&number) {
            Some(Announced::Ended(arrival)) => arrival.take()?,
            _ => counts.arrivals.remove(&number)?,
        };
        free_empty(&mut counts.arrivals);
        self.count_out(&arrival);
        Some(arrival)
    }

    /// Takes every transfer that waits for a receive.
    pub(super) fn take_arrivals(&mut self) -> Vec<Arrival> {
        let mut taken = Vec::new();
        for tag in self.receives.values_mut() {
            taken.extend(std::mem::take(&mut tag.arrivals).into_values());
        }
        for arrival in &taken {
            self.count_out(arrival);
        }
        taken.sort_by_key(|arrival| arrival.transfer);
        taken
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Counts of the receiver that something is left of.
    #[cfg(test)]
    pub(super) fn leftovers(&self) -> impl Iterator<Item = (&Tag, &ReceiveTag)> {
        let is_over = |counts: &ReceiveTag| counts.queue.is_empty() && counts.is_idle();
        self.receives
            .iter()
            .filter(move |(_, counts)| !is_over(counts))
    }

    #[cfg(test)]
    pub(super) fn waits(&self, tag: Tag) -> bool {
        self.receives
            .get(&tag)
            .is_some_and(|counts| !counts.arrivals.is_empty())
    }
}
