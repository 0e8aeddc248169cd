//! What a process has changed on a card, written down before it is done.

use serde::{Deserialize, Serialize};

use super::kernel::Namespaces;
use super::rule::Rule;

/// Everything that tcpx processes have changed on one interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    /// Changes do not outlive the host's boot.
    pub(super) boot: String,
    pub(super) network: u64,
    pub(super) interface: String,
    pub(super) ifindex: u32,
    /// Put back when the last hold ends.
    pub(super) changes: Changes,
    pub(super) holds: Vec<Hold>,
}

/// Settings of the whole interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Changes {
    pub(super) flow_rules: Option<Change<bool>>,
    pub(super) header_split: Option<Change<u8>>,
    pub(super) threshold: Option<Change<u32>>,
    pub(super) indirection: Option<Change<Vec<u32>>>,
}

/// One changed setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Change<T> {
    /// What the first of us found.
    pub(super) before: T,
    /// What the last of us set.
    pub(super) after: T,
}

/// A process's hold on one queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hold {
    pub(super) pid: u32,
    /// Process numbers come again; together with this they do not.
    pub(super) started: u64,
    pub(super) processes: u64,
    pub(super) program: String,
    pub(super) queue: u32,
    /// Known once it is bound.
    pub(super) dmabuf_id: Option<u32>,
    pub(super) rules: Vec<HeldRule>,
}

/// A flow rule of a hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeldRule {
    pub(super) rule: Rule,
    /// Where it is; unknown until the driver has chosen.
    pub(super) at: Option<u32>,
}

impl Record {
    pub(super) fn new(place: &Namespaces, interface: &str, ifindex: u32) -> Self {
        Self {
            boot: place.boot.clone(),
            network: place.network,
            interface: interface.to_owned(),
            ifindex,
            changes: Changes::default(),
            holds: Vec::new(),
        }
    }

    /// Whether it is of this interface of a network namespace.
    pub(super) fn is_of(&self, network: u64, ifindex: u32) -> bool {
        (self.network, self.ifindex) == (network, ifindex)
    }

    /// Nothing is left to undo.
    pub(super) fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.changes == Changes::default()
    }

    pub(super) fn hold(&mut self, queue: u32) -> Option<&mut Hold> {
        self.holds.iter_mut().find(|hold| hold.queue == queue)
    }
}

/// Notes a change about to be made; `false` when there is nothing to do.
pub(super) fn note<T: PartialEq>(slot: &mut Option<Change<T>>, now: T, wanted: T) -> bool {
    if now == wanted {
        return false;
    }
    match slot {
        Some(change) => change.after = wanted,
        None => {
            *slot = Some(Change {
                before: now,
                after: wanted,
            });
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_first_found_stays_noted_through_later_changes() {
        let mut slot = None;
        assert!(!note(&mut slot, 2, 2));
        assert_eq!(slot, None);
        assert!(note(&mut slot, 1, 2));
        assert!(note(&mut slot, 2, 3));
        assert_eq!(
            slot,
            Some(Change {
                before: 1,
                after: 3
            })
        );
    }
}
