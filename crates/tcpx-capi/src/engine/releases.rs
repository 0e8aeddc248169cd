//! Memory of the program that the engine is done with.
//!
//! The last reference to a region may end on a thread of the engine, which may hold locks then. So
//! the program's functions are called from a thread of their own, one after the other.

use std::ffi::c_void;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use tcpx_memory::{fork, lock};

/// A function of the program and its argument.
struct Release {
    call: unsafe extern "C" fn(*mut c_void),
    user: *mut c_void,
}

// SAFETY: C promises with `tcpx_region_wrap` that the function may be called from any thread.
unsafe impl Send for Release {}
// SAFETY: as above; it is called once.
unsafe impl Sync for Release {}

/// The owner of a region's memory; from [`Owner::arm`] on its end gives the memory back.
pub(super) struct Owner {
    release: Option<(Release, Sender<Release>)>,
    armed: AtomicBool,
    generation: u32,
}

impl Owner {
    /// The owner of memory that `call` gives back with `user`, if there is one.
    pub(super) fn new(
        call: Option<unsafe extern "C" fn(*mut c_void)>,
        user: *mut c_void,
    ) -> io::Result<Self> {
        let release = match call {
            Some(call) => Some((Release { call, user }, sender()?)),
            None => None,
        };
        Ok(Self {
            release,
            armed: AtomicBool::new(false),
            generation: fork::generation(),
        })
    }

    pub(super) fn arm(&self) {
        self.armed.store(true, Ordering::Release);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // What a fork's child inherited is its parent's to give back.
        if let Some((release, sender)) = self.release.take()
            && self.armed.load(Ordering::Acquire)
            && self.generation == fork::generation()
        {
            // The thread outlives all senders.
            let _ = sender.send(release);
        }
    }
}

/// Leads to the thread, which the first region of this sort starts.
fn sender() -> io::Result<Sender<Release>> {
    static SENDER: Mutex<Option<Sender<Release>>> = Mutex::new(None);
    let mut known = lock(&SENDER);
    if let Some(sender) = &*known {
        return Ok(sender.clone());
    }
    let (sender, releases) = channel::<Release>();
    thread::Builder::new()
        .name("tcpx-release".to_owned())
        .spawn(move || {
            for release in releases {
                // SAFETY: the program's own function with what it asked to be handed, once; nothing
                // of the library points at the memory any more.
                unsafe { (release.call)(release.user) };
            }
        })?;
    *known = Some(sender.clone());
    Ok(sender)
}
