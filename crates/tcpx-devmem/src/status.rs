//! What tcpx processes have changed on this host's cards, and undoing what dead ones left.

use serde::Serialize;

use super::bind::Devmem;
use super::error::DevmemError;
use super::holders::{self, Holder, holder};
use super::kernel::Namespaces;
use super::netlink::{SPLIT_AUTO, SPLIT_OFF, SPLIT_ON};
use super::record::{Changes, Hold, Record};

/// Changes on one interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The interface.
    pub interface: String,
    /// Whether it belongs to this network namespace and boot, so that [`Devmem::release`] can work
    /// on it.
    pub here: bool,
    /// Who holds queues of it.
    pub holds: Vec<HoldStatus>,
    /// Each changed setting, as a sentence: `tcp-data-split: off, now on`.
    pub changes: Vec<String>,
}

/// A process's hold on a queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HoldStatus {
    /// The process.
    pub pid: u32,
    /// Its program.
    pub program: String,
    /// Whether it lives.
    pub holder: Holder,
    /// The queue.
    pub queue: u32,
    /// The bound memory's number, once it is bound.
    #[serde(rename = "memory")]
    pub dmabuf_id: Option<u32>,
    /// Each flow rule, as a sentence.
    pub rules: Vec<String>,
}

/// What [`Devmem::release`] did on one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Released {
    /// The interface, as it was before.
    pub before: Status,
    /// What is left: living holders and their changes, or what could not be undone.
    pub left: Option<Status>,
    /// Why something could not be undone.
    pub failed: Vec<DevmemError>,
}

impl Devmem {
    /// Everything that is recorded, by interface. Changes nothing and needs no privilege.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn status(&self) -> Result<Vec<Status>, DevmemError> {
        let place = self.place()?;
        let found = self.folder.read_records()?;
        Ok(found
            .iter()
            .map(|record| self.describe(&place, record))
            .collect())
    }

    /// Undoes what dead processes left on the interfaces of this network namespace, or on one of
    /// them.
    ///
    /// # Errors
    /// The records cannot be read or written.
    pub fn release(&self, interface: Option<&str>) -> Result<Vec<Released>, DevmemError> {
        let place = self.place()?;
        let records = self.folder.lock()?;
        let mut released = Vec::new();
        for mut record in records.list() {
            let before = self.describe(&place, &record);
            if interface.is_some_and(|interface| interface != record.interface) {
                continue;
            }
            if !before.here && record.boot == place.boot {
                released.push(Released {
                    left: Some(before.clone()),
                    before,
                    failed: Vec::new(),
                });
                continue;
            }
            let name = self.kernel.interface_name(record.ifindex);
            let failed = match name {
                // Settings go with the interface, and with the boot.
                _ if record.boot != place.boot => forget(&mut record),
                Ok(None) => forget(&mut record),
                Ok(Some(name)) => {
                    record.interface = name;
                    holders::clean(&*self.kernel, &place, &mut record)
                }
                Err(error) => {
                    let subject = self.subject(&record.interface, record.ifindex);
                    vec![subject.failed("naming", &error)]
                }
            };
            records.write(&record)?;
            released.push(Released {
                left: (!record.is_empty()).then(|| self.describe(&place, &record)),
                before,
                failed,
            });
        }
        Ok(released)
    }

    fn describe(&self, place: &Namespaces, record: &Record) -> Status {
        let hold = |hold: &Hold| HoldStatus {
            pid: hold.pid,
            program: hold.program.clone(),
            holder: if record.boot == place.boot {
                holder(&*self.kernel, place, hold)
            } else {
                Holder::Dead
            },
            queue: hold.queue,
            dmabuf_id: hold.dmabuf_id,
            rules: hold
                .rules
                .iter()
                .map(|held| held.rule.to_string())
                .collect(),
        };
        Status {
            interface: record.interface.clone(),
            here: record.boot == place.boot && record.network == place.network,
            holds: record.holds.iter().map(hold).collect(),
            changes: sentences(&record.changes),
        }
    }
}

fn forget(record: &mut Record) -> Vec<DevmemError> {
    record.holds.clear();
    record.changes = Changes::default();
    Vec::new()
}

fn sentences(changes: &Changes) -> Vec<String> {
    let on = |value: bool| if value { "on" } else { "off" };
    let split = |value: u8| match value {
        SPLIT_AUTO => "auto".to_owned(),
        SPLIT_OFF => "off".to_owned(),
        SPLIT_ON => "on".to_owned(),
        other => other.to_string(),
    };
    let mut found = Vec::new();
    if let Some(change) = &changes.flow_rules {
        let (before, after) = (on(change.before), on(change.after));
        found.push(format!("ntuple-filters: {before}, now {after}"));
    }
    if let Some(change) = &changes.header_split {
        let (before, after) = (split(change.before), split(change.after));
        found.push(format!("tcp-data-split: {before}, now {after}"));
    }
    if let Some(change) = &changes.threshold {
        found.push(format!(
            "hds-thresh: {}, now {}",
            change.before, change.after
        ));
    }
    if let Some(change) = &changes.indirection {
        let moved = change.before.iter().zip(&change.after);
        let moved = moved.filter(|(before, after)| before != after).count();
        found.push(format!(
            "RSS table: {moved} of {} entries moved to other queues",
            change.before.len()
        ));
    }
    found
}
