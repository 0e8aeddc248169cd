//! Counted matching: send number n of a tag meets receive number n. Both sides count.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::action::OperationId;
use super::config::eager_cost;
use super::credit::within;
use super::error::SessionError;
use super::stream::Plan;
use crate::frame::{Destination, Level, Limits, Payload, RefuseReason, Tag, TransferId};
use crate::range_set::RangeSet;

/// What a sender has its receiver count.
pub(super) const TAGS: &str = "tags, and has forgotten none";
/// How far ahead of the receives of its tag a send's number may be: more than any side has under way.
const FARTHEST_AHEAD: u64 = 1 << 20;
/// Most ranges of withdrawn numbers, of all tags: more than any side has sends under way between them.
const MOST_HOLES: u32 = 1 << 15;

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
    pub(super) eager: Option<Payload>,
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
        }
    }

    /// Credit that it takes, if it is eager.
    pub(super) fn credit(&self) -> u64 {
        eager_cost(self.bytes, self.pieces)
    }
}

/// What belongs to numbers of one tag, in their order.
#[derive(Debug)]
pub(super) struct ByNumber<T>(VecDeque<(u64, T)>);

impl<T> Default for ByNumber<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> ByNumber<T> {
    fn place(&self, number: u64) -> Result<usize, usize> {
        let held = |(held, _): &(u64, T)| *held;
        if self.0.back().map(held).is_none_or(|last| last < number) {
            return Err(self.0.len());
        }
        // There where none is missing before it.
        let first = self.0.front().map_or(0, held);
        let at = number.wrapping_sub(first) as usize;
        match self.0.get(at).map(held) {
            Some(found) if found == number => Ok(at),
            _ => self.0.binary_search_by_key(&number, held),
        }
    }

    pub(super) fn insert(&mut self, number: u64, value: T) {
        match self.place(number) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => self.0.insert(at, (number, value)),
        }
    }

    pub(super) fn get(&self, number: u64) -> Option<&T> {
        let at = self.place(number).ok()?;
        self.0.get(at).map(|(_, value)| value)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<T> {
        let at = self.place(number).ok()?;
        self.0.remove(at).map(|(_, value)| value)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes those from this number on.
    pub(super) fn split_off(&mut self, number: u64) -> VecDeque<(u64, T)> {
        let at = self.place(number).unwrap_or_else(|at| at);
        self.0.split_off(at)
    }
}

/// A window of the peer for one send.
#[derive(Clone, Copy, Debug)]
pub(super) struct PostedWindow {
    pub(super) capacity: u64,
    pub(super) plan: Plan,
    pub(super) level: Level,
}

impl PostedWindow {
    /// Whether a send goes there without being granted. Both sides ask this of the same values.
    pub(super) fn fits(capacity: u64, level: Level, bytes: u64, asked: Level) -> bool {
        (1..=capacity).contains(&bytes) && asked <= level
    }
}

/// The sender's count of one tag.
#[derive(Debug, Default)]
pub(super) struct SendTag {
    /// Number of the next send.
    pub(super) next: u64,
    /// Windows of the peer that no send has taken.
    pub(super) posted: ByNumber<PostedWindow>,
    /// Sends without a window.
    pub(super) waiting: ByNumber<TransferId>,
    /// Sends to posted windows.
    pub(super) begun: ByNumber<TransferId>,
    /// Sends that get a number once the peer has answered whether the count may be forgotten, or has room for it.
    pub(super) held: BTreeSet<TransferId>,
    pub(super) is_forgetting: bool,
    /// The peer counts it, or will with the next frame.
    pub(super) is_counted: bool,
}

impl SendTag {
    /// No send of it is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
            && self.begun.is_empty()
            && self.held.is_empty()
            && !self.is_forgetting
    }
}

/// The receiver's count of one tag.
#[derive(Debug, Default)]
pub(super) struct ReceiveTag {
    /// Number of the next receive.
    pub(super) next: u64,
    /// One behind the highest number that a send is known to have.
    pub(super) sent: u64,
    /// It counts among those that the peer uses.
    is_counted: bool,
    /// Receives without a transfer.
    pub(super) receives: ByNumber<OperationId>,
    /// Transfers without a receive.
    pub(super) arrivals: ByNumber<Arrival>,
    /// Receives that have ended, and whose transfers are still to come.
    pub(super) ended: ByNumber<RefuseReason>,
    /// Sends that do not come, and whose receives are still to come.
    holes: RangeSet,
    /// Windows in a row that were opened in vain, as an eager send came.
    pub(super) vain: u8,
}

impl ReceiveTag {
    fn is_unused(&self) -> bool {
        self.sent == 0 && self.is_idle()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.receives.is_empty()
            && self.arrivals.is_empty()
            && self.ended.is_empty()
            && self.holes.is_empty()
    }

    /// Whether a transfer that comes without a window may have this number.
    pub(super) fn may_arrive(&self, number: u64) -> bool {
        let is_ahead = number >= self.next
            && number - self.next < FARTHEST_AHEAD
            && self.arrivals.get(number).is_none()
            && !self.holes.contains(number);
        is_ahead || self.receives.get(number).is_some() || self.ended.get(number).is_some()
    }
}

/// Counts of all tags.
#[derive(Debug, Default)]
pub(super) struct Matching {
    pub(super) sends: BTreeMap<Tag, SendTag>,
    receives: BTreeMap<Tag, ReceiveTag>,
    /// Tags that the peer uses.
    counted: usize,
    /// Arrivals without their payload.
    asks: usize,
    /// Where each arrival waits.
    arrivals: BTreeMap<TransferId, (Tag, u64)>,
    /// Ranges of withdrawn numbers.
    holes: usize,
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

    /// The send of this number exists.
    pub(super) fn is_sent(&mut self, tag: Tag, number: u64) {
        let counts = self.receives.entry(tag).or_default();
        counts.sent = counts.sent.max(number.saturating_add(1));
        self.counted += usize::from(!std::mem::replace(&mut counts.is_counted, true));
    }

    /// Checks that the peer uses no more tags than it may, and has left out no more of their numbers.
    pub(super) fn check_tags(&self, limits: &Limits) -> Result<(), SessionError> {
        within("ranges of withdrawn sends", self.holes, 0, MOST_HOLES)?;
        within(TAGS, self.counted, 0, limits.tags)
    }

    /// The number of a receive that is posted now.
    pub(super) fn count_receive(&mut self, tag: Tag) -> u64 {
        let counts = self.receives.entry(tag).or_default();
        let number = counts.next;
        counts.next += 1;
        self.pass_holes(tag);
        number
    }

    /// The send of this number does not come, and no receive has it.
    pub(super) fn add_hole(&mut self, tag: Tag, number: u64) {
        let counts = self.receives.entry(tag).or_default();
        self.holes -= counts.holes.ranges();
        counts.holes.insert(number..number + 1);
        self.holes += counts.holes.ranges();
        self.pass_holes(tag);
    }

    /// The next receive of a tag has no number that does not come.
    fn pass_holes(&mut self, tag: Tag) {
        if let Some(counts) = self.receives.get_mut(&tag) {
            let next = counts.holes.take_first(counts.next);
            self.holes -= usize::from(next != counts.next);
            counts.next = next;
        }
    }

    /// Whether the peer may ask for a receive that is not there.
    pub(super) fn check_asks(&self, limits: &Limits) -> Result<(), SessionError> {
        within(super::send_windows::ASKS, self.asks, 1, limits.asks)
    }

    /// Forgets the receiver's count of a tag that was never used by the peer.
    pub(super) fn tidy(&mut self, tag: Tag) {
        if self.receives.get(&tag).is_some_and(ReceiveTag::is_unused) {
            self.receives.remove(&tag);
        }
    }

    /// The peer does not use this tag any more; its count is kept as long as something here needs it.
    pub(super) fn forget_received(&mut self, tag: Tag, forgotten: bool) {
        if let Some(counts) = self.receives.get_mut(&tag) {
            self.counted -= usize::from(std::mem::take(&mut counts.is_counted));
        }
        if forgotten {
            self.receives.remove(&tag);
        }
    }

    pub(super) fn add_arrival(&mut self, mut arrival: Arrival) {
        // Credit counts only what its buffer holds now.
        if let Some(payload) = &mut arrival.eager {
            payload.shrink();
        }
        let place = (arrival.tag, arrival.number);
        self.arrivals.insert(arrival.transfer, place);
        self.asks += usize::from(arrival.eager.is_none());
        let tag = self.receives_of(arrival.tag);
        tag.arrivals.insert(arrival.number, arrival);
    }

    pub(super) fn take_arrival(&mut self, tag: Tag, number: u64) -> Option<Arrival> {
        let arrival = self.receives_of(tag).arrivals.remove(number)?;
        self.arrivals.remove(&arrival.transfer);
        self.asks -= usize::from(arrival.eager.is_none());
        Some(arrival)
    }

    #[cfg(test)]
    pub(super) fn arrivals(&self) -> usize {
        self.arrivals.len()
    }

    pub(super) fn has_arrival(&self, transfer: TransferId) -> bool {
        self.arrivals.contains_key(&transfer)
    }

    /// Takes the transfer of this name, if it waits for a receive.
    pub(super) fn remove_arrival(&mut self, transfer: TransferId) -> Option<Arrival> {
        let (tag, number) = *self.arrivals.get(&transfer)?;
        self.take_arrival(tag, number)
    }

    /// Takes every transfer that waits for a receive.
    pub(super) fn take_arrivals(&mut self) -> Vec<Arrival> {
        self.arrivals.clear();
        self.asks = 0;
        let mut taken = Vec::new();
        for tag in self.receives.values_mut() {
            let arrivals = tag.arrivals.split_off(0);
            taken.extend(arrivals.into_iter().map(|(_, arrival)| arrival));
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
        self.receives.iter().filter(|(_, counts)| !counts.is_idle())
    }

    #[cfg(test)]
    pub(super) fn waits(&self, tag: Tag) -> bool {
        self.receives
            .get(&tag)
            .is_some_and(|counts| !counts.arrivals.is_empty())
    }
}
