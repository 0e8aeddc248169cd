//! First in, first out matching per tag: arrivals with receives.

use std::collections::{BTreeMap, BTreeSet};

use super::action::OperationId;
use crate::frame::{Level, Payload, Tag, TransferId};

/// A transfer of the peer that waits for a receive.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) transfer: TransferId,
    pub(super) tag: Tag,
    pub(super) bytes: u64,
    pub(super) level: Level,
    /// The payload of an eager transfer.
    pub(super) eager: Option<Payload>,
}

/// What waits on either side. Numbers of transfers and operations grow, so the least one of a tag
/// is the oldest.
#[derive(Debug, Default)]
pub(super) struct Matching {
    arrivals: BTreeMap<TransferId, Arrival>,
    arrivals_by_tag: BTreeSet<(Tag, TransferId)>,
    receives_by_tag: BTreeSet<(Tag, OperationId)>,
}

impl Matching {
    /// The oldest waiting receive of the tag; it waits no more.
    pub(super) fn take_receive(&mut self, tag: Tag) -> Option<OperationId> {
        let mut waiting = self.receives_by_tag.range((tag, OperationId::FIRST)..);
        let found = *waiting.next().filter(|(of, _)| *of == tag)?;
        self.receives_by_tag.remove(&found);
        Some(found.1)
    }

    /// The oldest waiting arrival of the tag; it waits no more.
    pub(super) fn take_arrival(&mut self, tag: Tag) -> Option<Arrival> {
        let mut waiting = self.arrivals_by_tag.range((tag, TransferId(0))..);
        let (_, transfer) = *waiting.next().filter(|(of, _)| *of == tag)?;
        self.remove_arrival(transfer)
    }

    pub(super) fn remove_arrival(&mut self, transfer: TransferId) -> Option<Arrival> {
        let arrival = self.arrivals.remove(&transfer)?;
        self.arrivals_by_tag.remove(&(arrival.tag, transfer));
        Some(arrival)
    }

    pub(super) fn add_arrival(&mut self, mut arrival: Arrival) {
        // Credit counts only what its buffer holds now.
        if let Some(payload) = &mut arrival.eager {
            payload.shrink();
        }
        self.arrivals_by_tag.insert((arrival.tag, arrival.transfer));
        self.arrivals.insert(arrival.transfer, arrival);
    }

    pub(super) fn add_receive(&mut self, tag: Tag, operation: OperationId) {
        self.receives_by_tag.insert((tag, operation));
    }

    pub(super) fn remove_receive(&mut self, tag: Tag, operation: OperationId) -> bool {
        self.receives_by_tag.remove(&(tag, operation))
    }

    pub(super) fn arrivals(&self) -> usize {
        self.arrivals.len()
    }

    pub(super) fn first_arrival(&self) -> Option<TransferId> {
        self.arrivals
            .first_key_value()
            .map(|(transfer, _)| *transfer)
    }

    /// Those that wait, the oldest first.
    pub(super) fn waiting_arrivals(&self) -> Vec<TransferId> {
        self.arrivals.keys().copied().collect()
    }

    pub(super) fn tag_of(&self, arrival: TransferId) -> Option<Tag> {
        self.arrivals.get(&arrival).map(|arrival| arrival.tag)
    }

    pub(super) fn first_receive(&self) -> Option<(Tag, OperationId)> {
        self.receives_by_tag.first().copied()
    }

    #[cfg(test)]
    pub(super) fn waits(&self, tag: Tag) -> bool {
        self.arrivals_by_tag.iter().any(|(of, _)| *of == tag)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
