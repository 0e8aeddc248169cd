//! The file in which the changes of all interfaces are recorded. Its folder is the lock.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use tcpx_lanes::IoError;

use super::error::{DevmemError, Why};
use super::record::Record;

/// Where the file lies when nothing else is said; it does not outlive the host's boot.
pub const STATE_FOLDER: &str = "/run/tcpx/devmem";

const FILE: &str = "cards.json";
const VERSION: u32 = 2;
/// How long another process may hold the records: it does so for a few calls into the kernel.
const RECORD_LOCK_LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);
/// No file of ours is near this long.
const MOST_BYTES: u64 = 4 << 20;

/// What the file holds.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    version: u32,
    cards: Vec<Record>,
}

/// The file's folder.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
}

/// The right to read and write records; one at a time on the host.
#[derive(Debug)]
pub(super) struct Records {
    path: PathBuf,
    cards: RefCell<Vec<Record>>,
    _lock: File,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Waits for the right to change records.
    pub(super) fn lock(&self) -> Result<Records, DevmemError> {
        fs::create_dir_all(&self.path)
            .map_err(|cause| failed("making the folder", &self.path, cause))?;
        let lock = File::open(&self.path).map_err(|cause| failed("opening", &self.path, cause))?;
        let deadline = Instant::now() + RECORD_LOCK_LIMIT;
        while let Err(cause) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            let is_held = matches!(
                cause,
                rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR
            );
            if !is_held || Instant::now() >= deadline {
                return Err(failed("locking", &self.path, cause.into()));
            }
            thread::sleep(PAUSE);
        }
        Ok(Records {
            path: self.path.join(FILE),
            cards: RefCell::new(self.read_records()?),
            _lock: lock,
        })
    }

    /// Every record. The file is replaced as a whole, so that it is read whole without the lock
    /// too.
    pub(super) fn read_records(&self) -> Result<Vec<Record>, DevmemError> {
        let path = self.path.join(FILE);
        let bad = |why: String| {
            let text = format!(
                "{} is no record of this version of tcpx: {why}; look at it, undo what it says by hand, and delete it",
                path.display()
            );
            DevmemError::new(Why::BadState, text)
        };
        let text = match fs::metadata(&path) {
            Ok(found) if found.len() > MOST_BYTES => {
                return Err(bad(format!("it is {} bytes long", found.len())));
            }
            Ok(_) => fs::read(&path),
            Err(cause) => Err(cause),
        };
        let text = match text {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(|cause| failed("reading", &path, cause))?,
        };
        let state: State = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
        match state.version {
            VERSION => Ok(state.cards),
            other => Err(bad(format!("its layout is {other}, not {VERSION}"))),
        }
    }
}

impl Records {
    /// The record of an interface.
    pub(super) fn read(&self, network: u64, ifindex: u32) -> Option<Record> {
        let cards = self.cards.borrow();
        let mut cards = cards.iter();
        cards.find(|one| one.is_of(network, ifindex)).cloned()
    }

    /// Every record.
    pub(super) fn list(&self) -> Vec<Record> {
        self.cards.borrow().clone()
    }

    /// Writes a record, or removes it when nothing is left in it.
    pub(super) fn write(&self, record: &Record) -> Result<(), DevmemError> {
        let mut cards = self.cards.borrow_mut();
        cards.retain(|one| !one.is_of(record.network, record.ifindex));
        if !record.is_empty() {
            cards.push(record.clone());
        }
        let path = &self.path;
        if cards.is_empty() {
            return match fs::remove_file(path) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    Err(failed("removing", path, cause))
                }
                _ => Ok(()),
            };
        }
        let state = State {
            version: VERSION,
            cards: cards.clone(),
        };
        let text = serde_json::to_vec_pretty(&state)
            .map_err(|cause| failed("writing", path, cause.into()))?;
        // Whoever dies in between leaves the old file or the new one, never half of one.
        let new = path.with_extension("new");
        fs::write(&new, text).map_err(|cause| failed("writing", &new, cause))?;
        fs::rename(&new, path).map_err(|cause| failed("renaming", &new, cause))
    }
}

fn failed(operation: &str, path: &Path, cause: io::Error) -> DevmemError {
    let (path, cause) = (path.display(), IoError::from(cause));
    let text = format!(
        "{operation} {path} failed: {cause}; run as root, or make the folder writable for this user"
    );
    DevmemError::new(Why::State, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Namespaces;
    use crate::record::Change;

    fn record() -> Record {
        let place = Namespaces {
            boot: "b".to_owned(),
            network: 7,
            processes: 8,
            pid: 1,
        };
        let mut record = Record::new(&place, "dm1", 3);
        record.changes.header_split = Some(Change {
            before: 1,
            after: 2,
        });
        record
    }

    #[test]
    fn records_read_back_and_empty_ones_are_removed() {
        let path = tempfile::tempdir().unwrap();
        let folder = Folder::new(path.path().join("a/b"));
        let (mut first, mut second) = (record(), record());
        second.ifindex = 4;
        let records = folder.lock().unwrap();
        records.write(&first).unwrap();
        records.write(&second).unwrap();
        assert_eq!(records.read(7, 3), Some(first.clone()));
        assert_eq!(
            folder.read_records(),
            Ok(vec![first.clone(), second.clone()])
        );
        first.changes = Default::default();
        records.write(&first).unwrap();
        records.write(&first).unwrap();
        assert_eq!(records.read(7, 3), None);
        assert_eq!(folder.read_records(), Ok(vec![second.clone()]));
        second.changes = Default::default();
        records.write(&second).unwrap();
        assert!(!path.path().join("a/b").join(FILE).exists());
        assert_eq!(records.list(), []);
    }

    #[test]
    fn one_at_a_time_has_the_lock() {
        let path = tempfile::tempdir().unwrap();
        let folder = Folder::new(path.path().to_owned());
        let records = folder.lock().unwrap();
        let other = folder.clone();
        let waiting = thread::spawn(move || other.lock().unwrap().list());
        records.write(&record()).unwrap();
        drop(records);
        assert_eq!(waiting.join().unwrap(), [record()]);
    }

    #[test]
    fn a_strange_file_is_named_and_left_alone() {
        let path = tempfile::tempdir().unwrap();
        let folder = Folder::new(path.path().to_owned());
        let file = path.path().join(FILE);
        for text in ["", "{}", "{\"version\": 2}", "[1"] {
            fs::write(&file, text).unwrap();
            let refused = folder.lock().unwrap_err();
            assert_eq!(refused.why(), Why::BadState, "{refused}");
            let named = format!("{} is no record", file.display());
            assert!(refused.to_string().starts_with(&named), "{refused}");
            assert_eq!(fs::read(&file).unwrap(), text.as_bytes());
        }
        fs::write(&file, "{\"version\": 3, \"cards\": []}").unwrap();
        let refused = folder.read_records().unwrap_err().to_string();
        assert!(refused.contains("its layout is 3, not 2"), "{refused}");
    }

    #[test]
    fn a_folder_that_is_not_there_has_no_records() {
        let folder = Folder::new("/nonexistent/tcpx".into());
        assert_eq!(folder.read_records(), Ok(Vec::new()));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_with_advice() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let folder = Folder::new(path.path().join("below"));
        let refused = folder.lock().unwrap_err();
        assert_eq!(refused.why(), Why::State, "{refused}");
    }
}
