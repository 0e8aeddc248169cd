//! A stand-in for the buffer daemon of Google's hosts: its Unix sockets, frames and descriptors, and ways to misbehave.
//!
//! | socket | question | answer |
//! |---|---|---|
//! | `get_gpu_fd_PCI` | raw bytes: the PCI address | one byte, and a descriptor beside it |
//! | `get_gpu_metadata_PCI` | raw bytes: the PCI address | raw bytes: `{int fd; size_t size; size_t align}` |
//! | `rx_rule_manager`, `rx_rule_uninstall` | a rule for a flow | raw bytes: `Ok.` |
//! | `rxdm_application_registry` | register or leave | raw bytes: `Ok.` |
//!
//! A frame is a length in two bytes, the high one first, and a protobuf message. The descriptor is memory of this
//! process (a memfd), where the daemon's is GPU memory.

mod message;
mod serve;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

pub use message::{Flow, Message, frame};

/// How the daemon behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// As it should.
    Good,
    /// Accepts and never answers.
    Silent,
    /// Answers with something else.
    Garbage,
    /// Closes instead of an answer.
    Closes,
    /// Answers the first half of each answer and then nothing.
    Half,
    /// Has no room for another rule.
    Full,
}

impl Behaviour {
    /// Every behaviour, by the name that the program takes.
    pub const ALL: [(&'static str, Self); 6] = [
        ("good", Self::Good),
        ("silent", Self::Silent),
        ("garbage", Self::Garbage),
        ("closes", Self::Closes),
        ("half", Self::Half),
        ("full", Self::Full),
    ];
}

/// A question that came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Name of the socket.
    pub socket: String,
    /// What was asked.
    pub message: Message,
}

/// What every connection shares.
#[derive(Debug)]
struct Shared {
    behaviour: Behaviour,
    bytes: u64,
    memory: OwnedFd,
    asked: Mutex<Vec<Asked>>,
    stopping: AtomicBool,
}

/// The daemon; its sockets are gone when it is dropped.
#[derive(Debug)]
pub struct BufferDaemon {
    folder: PathBuf,
    shared: Arc<Shared>,
    threads: Vec<(PathBuf, JoinHandle<()>)>,
}

/// What the receive memory of a GPU must be aligned to.
pub const ALIGN: u64 = 2 << 20;

impl BufferDaemon {
    /// Serves the GPUs at these PCI addresses from sockets in `folder`, each with `bytes` of receive memory.
    ///
    /// # Errors
    /// A socket cannot be made, for example because it is there already or its path has more than 107 bytes.
    pub fn start(
        folder: &Path,
        gpus: &[&str],
        bytes: u64,
        behaviour: Behaviour,
    ) -> io::Result<Self> {
        let memory = memfd_create("receive memory", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, bytes)?;
        let shared = Arc::new(Shared {
            behaviour,
            bytes,
            memory,
            asked: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        let mut daemon = Self {
            folder: folder.to_owned(),
            shared,
            threads: Vec::new(),
        };
        for name in [
            "rx_rule_manager",
            "rx_rule_uninstall",
            "rxdm_application_registry",
        ] {
            daemon.serve(name.to_owned())?;
        }
        for gpu in gpus {
            daemon.serve(format!("get_gpu_fd_{gpu}"))?;
            daemon.serve(format!("get_gpu_metadata_{gpu}"))?;
        }
        Ok(daemon)
    }

    /// Everything that was asked so far.
    pub fn asked(&self) -> Vec<Asked> {
        let asked = self.shared.asked.lock();
        asked.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn serve(&mut self, name: String) -> io::Result<()> {
        let path = self.folder.join(&name);
        let listener = UnixListener::bind(&path)?;
        let shared = Arc::clone(&self.shared);
        let thread =
            std::thread::Builder::new().spawn(move || serve::accept(&listener, &name, &shared))?;
        self.threads.push((path, thread));
        Ok(())
    }
}

impl Drop for BufferDaemon {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        for (path, thread) in self.threads.drain(..) {
            // Wakes the accept; whoever still asks is left alone: its connection has a time limit.
            let _ = std::os::unix::net::UnixStream::connect(&path);
            let _ = thread.join();
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Longest that a connection is kept.
const LONGEST: Duration = Duration::from_secs(60);
