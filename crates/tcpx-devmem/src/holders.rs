//! Who holds queues, which of them are dead, and undoing what they left.

use serde::Serialize;

use super::error::DevmemError;
use super::kernel::{Kernel, Namespaces};
use super::record::{Hold, Record};
use super::refusals::Subject;
use super::steering;

/// What is known about a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Holder {
    /// It runs.
    Alive,
    /// It has ended without undoing its changes.
    Dead,
    /// Its number is of another namespace of processes, where we cannot look.
    #[serde(rename = "of another namespace of processes")]
    Unknown,
}

pub(super) fn holder(kernel: &dyn Kernel, place: &Namespaces, hold: &Hold) -> Holder {
    if hold.processes != place.processes {
        return Holder::Unknown;
    }
    match kernel.process_start(hold.pid) {
        Ok(Some(started)) if started == hold.started => Holder::Alive,
        Ok(_) => Holder::Dead,
        Err(_) => Holder::Unknown,
    }
}

/// Undoes what dead holders left.
pub(super) fn clean(
    kernel: &dyn Kernel,
    place: &Namespaces,
    record: &mut Record,
) -> Vec<DevmemError> {
    end(kernel, record, |hold| {
        holder(kernel, place, hold) == Holder::Dead
    })
}

/// Ends holds: removes their rules, and puts the settings back when no hold is left. What cannot be
/// undone stays in the record, and its error is in the answer.
pub(super) fn end(
    kernel: &dyn Kernel,
    record: &mut Record,
    ends: impl Fn(&Hold) -> bool,
) -> Vec<DevmemError> {
    let interface = record.interface.clone();
    let subject = Subject {
        kernel,
        interface: &interface,
        ifindex: record.ifindex,
    };
    let mut failed = Vec::new();
    record.holds.retain_mut(|hold| {
        if !ends(hold) {
            return true;
        }
        failed.extend(steering::remove_all(&subject, hold));
        !hold.rules.is_empty()
    });
    if record.holds.is_empty() {
        failed.extend(subject.restore(&mut record.changes));
    }
    failed
}
