//! Asking other processes.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::http::body;
use crate::report::{Report, SCHEMA, VERSION};
use crate::server::{folders, is_private, process_of};

/// Longest wait for a process that is asked: it may be stopped.
const PROCESS_ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// Longest answer, in bytes.
const LONGEST_ANSWER: u64 = 64 << 20;

/// Why a process did not tell.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It cannot be asked, or did not answer.
    #[error("process {pid} does not answer: {cause}")]
    Io {
        /// The process.
        pid: u32,
        /// The system's error.
        cause: io::Error,
    },
    /// It is there and says nothing.
    #[error("process {pid} does not answer within {waited:?}: it is stopped, or its host is busy")]
    Silent {
        /// The process.
        pid: u32,
        /// For how long it was waited for.
        waited: Duration,
    },
    /// Its answer is none of ours.
    #[error("process {pid} answers something else: {why}")]
    Answer {
        /// The process.
        pid: u32,
        /// What is wrong with it.
        why: String,
    },
}

/// Who can be asked, and who cannot.
#[derive(Debug, Default)]
pub struct Processes {
    /// Each process that can be asked, with its socket; one that has loaded several libraries of
    /// ours has a socket for each.
    pub found: Vec<(u32, PathBuf)>,
    /// Folders whose sockets are not asked: they are another user's, or open to others.
    pub untrusted: Vec<PathBuf>,
}

/// The processes of this user, for root those of everybody. What ended processes left is removed.
pub fn processes() -> Processes {
    let user = rustix::process::geteuid().as_raw();
    let Processes {
        mut found,
        mut untrusted,
    } = Processes::default();
    for folder in folders() {
        let Ok(metadata) = fs::symlink_metadata(&folder) else {
            continue;
        };
        let owner = metadata.uid();
        if !(owner == user || user == 0) || !is_private(&folder, owner) {
            untrusted.push(folder);
            continue;
        }
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let Some(pid) = process_of(&path) else {
                continue;
            };
            match UnixStream::connect(&path).map_err(|error| error.kind()) {
                Err(io::ErrorKind::ConnectionRefused) if owner == user => {
                    // Nobody listens there any more.
                    let _ = fs::remove_file(&path);
                }
                // Of another user's, or it has just gone.
                Err(io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {}
                _ => found.push((pid, path)),
            }
        }
    }
    found.sort();
    Processes { found, untrusted }
}

/// Asks the process behind a socket.
///
/// # Errors
/// It does not answer within some seconds, or what it answers is no report of this version.
pub fn ask_process(pid: u32, socket: &Path) -> Result<Report, ReadError> {
    let waited = PROCESS_ANSWER_LIMIT;
    let failed = |cause: io::Error| match cause.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ReadError::Silent { pid, waited },
        _ => ReadError::Io { pid, cause },
    };
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    stream
        .set_read_timeout(Some(PROCESS_ANSWER_LIMIT))
        .map_err(failed)?;
    stream
        .set_write_timeout(Some(PROCESS_ANSWER_LIMIT))
        .map_err(failed)?;
    stream
        .write_all(b"GET /status HTTP/1.0\r\n\r\n")
        .map_err(failed)?;
    let mut answer = Vec::new();
    stream
        .take(LONGEST_ANSWER)
        .read_to_end(&mut answer)
        .map_err(failed)?;
    report_in(&answer).map_err(|why| ReadError::Answer { pid, why })
}

/// The report that an answer brings, or what is wrong with it.
pub(crate) fn report_in(answer: &[u8]) -> Result<Report, String> {
    let text = body(answer).ok_or("it is no answer with a report")?;
    let report: Report = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if report.schema != SCHEMA || report.version != VERSION {
        let (schema, version) = (&report.schema, report.version);
        return Err(format!("version {version} of {schema}"));
    }
    Ok(report)
}
