//! Transfers that have ended, for an event loop: one descriptor and one list.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::task::Wake;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::{error, lock};

/// How long an event loop stalls for what one of its tasks awaits, before it goes on with the
/// others: a small message is answered within that, and to be woken for it takes longer.
const FIRST_LOOK: Duration = Duration::from_micros(50);
/// After a look in vain none is as long for this many times its span: at most a twentieth of the
/// loop's time.
const PAUSE: u32 = 20;

/// What the engine's threads and the interpreter share.
#[derive(Debug)]
pub(crate) struct List {
    descriptor: OwnedFd,
    ended: Mutex<Vec<u64>>,
}

impl List {
    fn push(&self, token: u64) {
        let mut ended = lock(&self.ended);
        ended.push(token);
        if ended.len() == 1 {
            // Fails only if the counter is full, and then the descriptor is readable already.
            let _ = rustix::io::write(&self.descriptor, &1u64.to_ne_bytes());
        }
    }
}

/// Wakes an event loop for one transfer.
#[derive(Debug)]
pub(crate) struct Waker {
    list: Arc<List>,
    token: u64,
}

impl Wake for Waker {
    fn wake(self: Arc<Self>) {
        self.list.push(self.token);
    }
}

/// The transfers of one event loop: `fileno()` is readable while some of them have ended.
#[pyclass(frozen, module = "tcpx._tcpx")]
#[derive(Debug)]
pub(crate) struct Completions {
    list: Arc<List>,
    /// From when on a first look may last.
    look_from: Mutex<Instant>,
}

impl Completions {
    /// What `look` finds, which it is told how long it may wait for.
    pub(crate) fn first_look<T>(&self, look: impl FnOnce(Duration) -> Option<T>) -> Option<T> {
        let from = || lock(&self.look_from);
        let lasts = *from() <= Instant::now();
        let found = look(if lasts { FIRST_LOOK } else { Duration::ZERO });
        if lasts && found.is_none() {
            *from() = Instant::now() + FIRST_LOOK * PAUSE;
        }
        found
    }

    /// Whether `waker` tells of this token here.
    pub(crate) fn is_of(&self, waker: &Waker, token: u64) -> bool {
        waker.token == token && Arc::ptr_eq(&waker.list, &self.list)
    }

    pub(crate) fn waker(&self, token: u64) -> Arc<Waker> {
        Arc::new(Waker {
            list: Arc::clone(&self.list),
            token,
        })
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Self> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| error::system("making a descriptor to wait on", &error.into()))?;
        let ended = Mutex::new(Vec::new());
        Ok(Self {
            look_from: Mutex::new(Instant::now()),
            list: Arc::new(List { descriptor, ended }),
        })
    }

    /// The descriptor that an event loop watches for reading.
    fn fileno(&self) -> i32 {
        self.list.descriptor.as_raw_fd()
    }

    /// The tokens of the transfers that have ended since the last call.
    fn drain(&self) -> Vec<u64> {
        let mut counter = [0; 8];
        // Nothing to read is no error: another call has drained the list.
        let _ = rustix::io::read(&self.list.descriptor, &mut counter);
        std::mem::take(&mut *lock(&self.list.ended))
    }
}
