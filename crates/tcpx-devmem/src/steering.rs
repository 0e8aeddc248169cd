//! Rules that put flows on a held queue.

use super::error::{DevmemError, Refusal, Why};
use super::kernel::RuleTable;
use super::record::{HeldRule, Hold, Record};
use super::refusals::{Subject, refusal};
use super::rule::Rule;
use super::state::Records;

/// Makes a rule. It is written down before it is made, so that whatever dies in between leaves no
/// rule that nobody knows.
pub(super) fn insert(
    subject: &Subject<'_>,
    records: &Records,
    record: &mut Record,
    rule: Rule,
) -> Result<u32, DevmemError> {
    let table = table(subject)?;
    let others: Vec<u32> = table.rules.iter().map(|(at, _)| *at).collect();
    if let Some((at, Some(other))) = table
        .rules
        .iter()
        .find(|(_, other)| other.is_some_and(|other| other.same_packets(&rule)))
    {
        let (interface, queue) = (subject.interface, other.queue);
        let text = format!(
            "{interface} has a rule for {rule} already, to queue {queue} (rule {at}); run `ethtool -N {interface} delete {at}` if nobody needs it"
        );
        return Err(DevmemError::new(Why::FlowTaken, text));
    }
    let full = |refusal| subject.rules_full(others.len(), refusal);
    let at = if table.driver_places {
        None
    } else {
        // Low places win where rules overlap, and ours name one connection: they may come last.
        let free = (0..table.places).rev().find(|at| !others.contains(at));
        Some(free.ok_or_else(|| full(Refusal::of(libc::ENOSPC)))?)
    };
    let hold = record.hold(rule.queue).ok_or_else(|| {
        let by = "nobody any more: its record was removed";
        subject.queue_taken(rule.queue, by, Refusal::of(libc::ENOENT))
    })?;
    hold.rules.push(HeldRule { rule, at });
    records.write(record)?;
    let outcome = subject.kernel.insert_rule(subject.interface, &rule, at);
    let hold = record.hold(rule.queue);
    match outcome {
        Ok(at) => {
            let noted = hold.and_then(|hold| hold.rules.iter_mut().rfind(|one| one.rule == rule));
            if let Some(noted) = noted {
                noted.at = Some(at);
            }
            records.write(record)?;
            Ok(at)
        }
        Err(error) => {
            if let Some(hold) = hold {
                hold.rules.retain(|one| one.rule != rule);
            }
            records.write(record)?;
            let refusal = refusal(&error);
            Err(match refusal.errno {
                libc::ENOSPC => full(refusal),
                _ => subject.refused("making a flow rule", refusal),
            })
        }
    }
}

/// Removes a rule of ours; one that is gone, or has become somebody else's, is left.
pub(super) fn remove(
    subject: &Subject<'_>,
    table: &RuleTable,
    held: &HeldRule,
) -> Result<(), DevmemError> {
    let is_it = |(at, rule): &&(u32, Option<Rule>)| {
        *rule == Some(held.rule) && held.at.is_none_or(|known| known == *at)
    };
    let Some((at, _)) = table.rules.iter().find(is_it) else {
        return Ok(());
    };
    match subject.kernel.delete_rule(subject.interface, *at) {
        Ok(()) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Err(error) => Err(subject.failed("removing a flow rule", &error)),
    }
}

/// Removes every rule of a hold; what cannot be removed stays in it.
pub(super) fn remove_all(subject: &Subject<'_>, hold: &mut Hold) -> Vec<DevmemError> {
    if hold.rules.is_empty() {
        return Vec::new();
    }
    let table = match table(subject) {
        Ok(table) => table,
        Err(error) => return vec![error],
    };
    let mut failed = Vec::new();
    hold.rules
        .retain(|held| match remove(subject, &table, held) {
            Ok(()) => false,
            Err(error) => {
                failed.push(error);
                true
            }
        });
    failed
}

pub(super) fn table(subject: &Subject<'_>) -> Result<RuleTable, DevmemError> {
    subject
        .kernel
        .rules(subject.interface)
        .map_err(|error| subject.failed("reading the flow rules", &error))
}
