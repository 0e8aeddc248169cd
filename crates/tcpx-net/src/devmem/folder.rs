//! The folder in which records of changes lie, one file for an interface.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::error::DevmemError;
use super::record::{Record, VERSION};

/// Where records lie when nothing else is said; it does not outlive the host's boot.
pub const STATE_FOLDER: &str = "/run/tcpx/devmem";

/// How long another process may hold the records: it does so for a few calls into the kernel.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);
/// No record is near this long.
const MOST_BYTES: u64 = 4 << 20;

/// A folder of records.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
}

/// The right to read and write records; one at a time on the host.
#[derive(Debug)]
pub(super) struct Records<'a> {
    folder: &'a Folder,
    _lock: Option<File>,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Waits for the right to change records.
    pub(super) fn lock(&self) -> Result<Records<'_>, DevmemError> {
        fs::create_dir_all(&self.path)
            .map_err(|cause| failed("making the folder", &self.path, cause))?;
        let path = self.path.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|cause| failed("opening", &path, cause))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR)
                    if Instant::now() < deadline =>
                {
                    thread::sleep(PAUSE);
                }
                Err(cause) => return Err(failed("locking", &path, cause.into())),
            }
        }
        Ok(Records {
            folder: self,
            _lock: Some(lock),
        })
    }

    /// For looking only; files are replaced as a whole, so that each is read whole.
    pub(super) fn look(&self) -> Records<'_> {
        Records {
            folder: self,
            _lock: None,
        }
    }
}

impl Records<'_> {
    /// The record of an interface.
    pub(super) fn read(&self, network: u64, ifindex: u32) -> Result<Option<Record>, DevmemError> {
        read(&self.path(network, ifindex))
    }

    /// Every record. What cannot be read comes as its error.
    pub(super) fn list(&self) -> Result<Vec<Result<Record, DevmemError>>, DevmemError> {
        let entries = match fs::read_dir(&self.folder.path) {
            Ok(entries) => entries,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(cause) => return Err(failed("reading", &self.folder.path, cause)),
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry
                .map_err(|cause| failed("reading", &self.folder.path, cause))?
                .path();
            if path
                .extension()
                .is_some_and(|extension| extension == "json")
            {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths
            .iter()
            .filter_map(|path| read(path).transpose())
            .collect())
    }

    /// Writes a record, or removes it when nothing is left in it.
    pub(super) fn write(&self, record: &Record) -> Result<(), DevmemError> {
        let path = self.path(record.network, record.ifindex);
        if record.is_empty() {
            return match fs::remove_file(&path) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    Err(failed("removing", &path, cause))
                }
                _ => Ok(()),
            };
        }
        let text = serde_json::to_vec_pretty(record)
            .map_err(|cause| failed("writing", &path, cause.into()))?;
        // Whoever dies in between leaves the old record or the new one, never half of one.
        let new = path.with_extension("new");
        fs::write(&new, text).map_err(|cause| failed("writing", &new, cause))?;
        fs::rename(&new, &path).map_err(|cause| failed("renaming", &new, cause))
    }

    fn path(&self, network: u64, ifindex: u32) -> PathBuf {
        self.folder.path.join(format!("{network}-{ifindex}.json"))
    }
}

fn read(path: &Path) -> Result<Option<Record>, DevmemError> {
    let bad = |why: String| DevmemError::BadState {
        path: path.display().to_string(),
        why,
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(failed("opening", path, cause)),
    };
    let length = file
        .metadata()
        .map_err(|cause| failed("reading", path, cause))?
        .len();
    if length > MOST_BYTES {
        return Err(bad(format!("it is {length} bytes long")));
    }
    let record: Record = serde_json::from_reader(io::BufReader::new(file))
        .map_err(|error| bad(error.to_string()))?;
    if record.version != VERSION {
        return Err(bad(format!(
            "its layout is {}, not {VERSION}",
            record.version
        )));
    }
    Ok(Some(record))
}

fn failed(operation: &'static str, path: &Path, cause: io::Error) -> DevmemError {
    DevmemError::State {
        operation,
        path: path.display().to_string(),
        cause: cause.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devmem::kernel::Place;
    use crate::devmem::record::Change;

    fn record() -> Record {
        let place = Place {
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
    fn a_record_reads_back_and_an_empty_one_is_removed() {
        let path = tempfile::tempdir().unwrap();
        let folder = Folder::new(path.path().join("a/b"));
        let mut record = record();
        let records = folder.lock().unwrap();
        records.write(&record).unwrap();
        assert_eq!(records.read(7, 3), Ok(Some(record.clone())));
        assert_eq!(folder.look().list(), Ok(vec![Ok(record.clone())]));
        record.changes = Default::default();
        records.write(&record).unwrap();
        records.write(&record).unwrap();
        assert_eq!(records.read(7, 3), Ok(None));
        assert_eq!(records.list(), Ok(Vec::new()));
    }

    #[test]
    fn strange_files_are_named_and_left_alone() {
        let path = tempfile::tempdir().unwrap();
        let folder = Folder::new(path.path().to_owned());
        let other = path.path().join("7-3.json");
        for text in ["", "{}", "{\"version\": 1}", "[1"] {
            fs::write(&other, text).unwrap();
            let refused = folder.lock().unwrap().read(7, 3).unwrap_err();
            assert!(
                matches!(&refused, DevmemError::BadState { path, .. } if path.ends_with("7-3.json")),
                "{refused}"
            );
            assert_eq!(folder.look().list().unwrap().len(), 1);
        }
        let mut newer = record();
        newer.version = 2;
        fs::write(&other, serde_json::to_vec(&newer).unwrap()).unwrap();
        let refused = folder.look().read(7, 3).unwrap_err().to_string();
        assert!(refused.contains("its layout is 2, not 1"), "{refused}");
    }

    #[test]
    fn a_folder_that_is_not_there_has_no_records() {
        let folder = Folder::new("/nonexistent/tcpx".into());
        assert_eq!(folder.look().list(), Ok(Vec::new()));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_with_advice() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let folder = Folder::new(path.path().join("below"));
        let refused = folder.lock().unwrap_err();
        assert!(matches!(refused, DevmemError::State { .. }), "{refused}");
    }
}
