//! A card's settings: made fit for device memory, and put back.

use super::error::{DevmemError, Refusal, Why};
use super::netlink::{
    HeaderSplit, RingsChange, SPLIT_AUTO, SPLIT_OFF, SPLIT_ON, fix_split_off, header_split,
    set_header_split,
};
use super::record::{Change, Changes, Record, note};
use super::refusals::{Subject, is_absence};

/// The settings of the interface.
impl Subject<'_> {
    /// Changes what must be different for `queue`: each change is noted and saved before it is
    /// made. What the card does not have is left for the kernel to refuse, in its own words; what
    /// stands in the way beyond what the kernel itself checks is in the answer.
    pub(super) fn prepare(
        &self,
        record: &mut Record,
        queue: u32,
        save: &dyn Fn(&Record) -> Result<(), DevmemError>,
    ) -> Result<Option<DevmemError>, DevmemError> {
        if let Some(false) = self.flow_rules()? {
            note(&mut record.changes.flow_rules, false, true);
            save(record)?;
            self.turn_flow_rules(true)?;
        }
        let now = self.header_split()?;
        if let Some(split) = now.split {
            let split = match &record.changes.header_split {
                None if split == SPLIT_OFF => self.fix_split_off(record, save)?,
                _ => split,
            };
            if note(&mut record.changes.header_split, split, SPLIT_ON) {
                save(record)?;
                self.set_rings(RingsChange::Split(SPLIT_ON))?;
            }
        }
        // Turning the split on may give the threshold another value.
        if let Some(threshold) = self.header_split()?.threshold
            && note(&mut record.changes.threshold, threshold, 0)
        {
            save(record)?;
            self.set_rings(RingsChange::Threshold(0))?;
        }
        // Last: a driver that starts its rings anew may spread packets anew, too.
        self.spare(record, queue, save)
    }

    /// Finds out what was set where the split is off: off, or that the driver decides.
    fn fix_split_off(
        &self,
        record: &mut Record,
        save: &dyn Fn(&Record) -> Result<(), DevmemError>,
    ) -> Result<u8, DevmemError> {
        // Should this process die in between, the driver decides again: few set it themselves.
        note(&mut record.changes.header_split, SPLIT_AUTO, SPLIT_OFF);
        save(record)?;
        let found = fix_split_off(self.kernel, self.ifindex);
        record.changes.header_split = None;
        Ok(match found {
            Ok(true) => SPLIT_AUTO,
            Ok(false) => SPLIT_OFF,
            // Turning it on will say what is wrong.
            Err(error) => {
                tracing::debug!(
                    interface = self.interface,
                    ?error,
                    "tcp-data-split as it was set"
                );
                SPLIT_OFF
            }
        })
    }

    /// Takes a queue, and those held already, out of the spread of ordinary packets.
    fn spare(
        &self,
        record: &mut Record,
        queue: u32,
        save: &dyn Fn(&Record) -> Result<(), DevmemError>,
    ) -> Result<Option<DevmemError>, DevmemError> {
        let queues = match self.kernel.receive_queues(self.interface) {
            Ok(queues) => queues,
            Err(error) if is_absence(&error) => return Ok(None),
            Err(error) => return Err(self.failed("counting the queues", &error)),
        };
        let held: Vec<u32> = record.holds.iter().map(|hold| hold.queue).collect();
        let left: Vec<u32> = (0..queues)
            .filter(|one| *one != queue && !held.contains(one))
            .collect();
        if left.is_empty() {
            let interface = self.interface;
            let text = format!(
                "{interface} has a single receive queue, and other traffic needs one; run `ethtool -L {interface} combined 2`"
            );
            return Ok(Some(DevmemError::new(Why::SingleQueue, text)));
        }
        let Some(now) = self.indirection()? else {
            let what = "taking a queue out of the spread of ordinary packets";
            return Ok(Some(self.refused(what, Refusal::of(libc::EOPNOTSUPP))));
        };
        let is_ours = |one: &u32| *one == queue || held.contains(one);
        if !now.iter().any(is_ours) {
            return Ok(None);
        }
        let mut next = left.iter().copied().cycle();
        let wanted: Vec<u32> = now
            .iter()
            .map(|one| {
                if is_ours(one) {
                    next.next().unwrap_or(*one)
                } else {
                    *one
                }
            })
            .collect();
        note(&mut record.changes.indirection, now, wanted.clone());
        save(record)?;
        self.kernel
            .set_indirection(self.interface, &wanted)
            .map_err(|error| self.failed("spreading ordinary packets", &error))?;
        Ok(None)
    }

    /// Puts everything back, the last change first. What somebody else has changed since is left as
    /// it is. A setting that cannot be put back stays in `changes`, and its error is in the answer.
    pub(super) fn restore(&self, changes: &mut Changes) -> Vec<DevmemError> {
        let done = [
            put_back(
                &mut changes.indirection,
                || self.indirection(),
                |before| self.restore_indirection(before),
            ),
            put_back(
                &mut changes.threshold,
                || Ok(self.header_split()?.threshold),
                |before| self.set_rings(RingsChange::Threshold(*before)),
            ),
            put_back(
                &mut changes.header_split,
                || Ok(self.header_split()?.split),
                |&before| match self.set_rings(RingsChange::Split(before)) {
                    // It was off when the driver decided.
                    Err(_) if before == SPLIT_AUTO => self.set_rings(RingsChange::Split(SPLIT_OFF)),
                    done => done,
                },
            ),
            put_back(
                &mut changes.flow_rules,
                || self.flow_rules(),
                |before| self.turn_flow_rules(*before),
            ),
        ];
        done.into_iter().filter_map(Result::err).collect()
    }

    fn restore_indirection(&self, before: &Vec<u32>) -> Result<(), DevmemError> {
        let write = |table: &[u32]| {
            self.kernel
                .set_indirection(self.interface, table)
                .map_err(|error| self.failed("spreading ordinary packets", &error))
        };
        // The driver's own table also follows later changes of the number of queues, a table set by
        // hand does not; so the one that was the driver's is made the driver's again.
        let queues = self.kernel.receive_queues(self.interface).unwrap_or(0);
        let is_default = |table: &[u32]| {
            let numbers = (0..queues.max(1)).cycle();
            table
                .iter()
                .zip(numbers)
                .all(|(one, number)| *one == number)
        };
        if is_default(before) {
            write(&[])?;
            if self.indirection()?.as_ref() == Some(before) {
                return Ok(());
            }
        }
        write(before)
    }

    pub(super) fn header_split(&self) -> Result<HeaderSplit, DevmemError> {
        match header_split(self.kernel, self.ifindex) {
            Ok(found) => Ok(found),
            Err(error) => {
                let refusal = error.refusal("reading the ring settings")?;
                if refusal.errno == libc::EOPNOTSUPP {
                    return Ok(HeaderSplit::default());
                }
                Err(self.refused("reading the ring settings", refusal))
            }
        }
    }

    fn set_rings(&self, change: RingsChange) -> Result<(), DevmemError> {
        match set_header_split(self.kernel, self.ifindex, change) {
            Ok(()) => Ok(()),
            Err(error) => {
                let refusal = error.refusal("setting the header split")?;
                let words = refusal.words.as_deref().unwrap_or_default();
                Err(match change {
                    _ if words.contains("XDP") => self.xdp(refusal),
                    _ if matches!(refusal.errno, libc::EPERM | libc::EACCES) => {
                        self.refused("setting the header split", refusal)
                    }
                    RingsChange::Split(_) => self.bad_header_split(refusal),
                    RingsChange::Threshold(_) => self.bad_threshold(refusal),
                })
            }
        }
    }

    /// Whether flow rules are on; `None` when the card has no such switch.
    pub(super) fn flow_rules(&self) -> Result<Option<bool>, DevmemError> {
        match self.kernel.flow_rules_on(self.interface) {
            Ok(on) => Ok(Some(on)),
            Err(error) if is_absence(&error) => Ok(None),
            Err(error) => Err(self.failed("reading whether flow rules are on", &error)),
        }
    }

    fn turn_flow_rules(&self, on: bool) -> Result<(), DevmemError> {
        match self.kernel.turn_flow_rules(self.interface, on) {
            Ok(()) => Ok(()),
            // A card without flow rules cannot turn them on; steering will say so.
            Err(error) if is_absence(&error) || error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(())
            }
            Err(error) => Err(self.failed("turning flow rules on or off", &error)),
        }
    }

    pub(super) fn indirection(&self) -> Result<Option<Vec<u32>>, DevmemError> {
        match self.kernel.indirection(self.interface) {
            Ok(table) => Ok(Some(table)),
            Err(error) if is_absence(&error) => Ok(None),
            Err(error) => Err(self.failed("reading how packets are spread over queues", &error)),
        }
    }
}

/// Puts one setting back, if it was changed and nobody has changed it since.
fn put_back<T: PartialEq>(
    changed: &mut Option<Change<T>>,
    read: impl FnOnce() -> Result<Option<T>, DevmemError>,
    write: impl FnOnce(&T) -> Result<(), DevmemError>,
) -> Result<(), DevmemError> {
    if let Some(change) = changed
        && read()?.as_ref() == Some(&change.after)
    {
        write(&change.before)?;
    }
    *changed = None;
    Ok(())
}
