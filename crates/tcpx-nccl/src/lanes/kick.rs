//! Waking an event loop, for nothing while it is awake.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// A counter of reasons to look around, and an eventfd for a loop that sleeps.
///
/// A poster publishes its work and then calls [`kick`](Self::kick). A loop reads
/// [`count`](Self::count), looks for work, and sleeps only when [`sleep`](Self::sleep) says that
/// the count has not changed since. All of it is sequentially consistent: either the poster sees
/// the loop asleep, or the loop sees the count.
#[derive(Debug)]
pub(crate) struct Kick {
    descriptor: OwnedFd,
    count: AtomicU64,
    asleep: AtomicBool,
}

impl Kick {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            descriptor: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            count: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
        })
    }

    /// Makes the loop look around; `true` when it slept, which cost a system call.
    pub(crate) fn kick(&self) -> bool {
        self.count.fetch_add(1, Ordering::SeqCst);
        let slept = self.asleep.swap(false, Ordering::SeqCst);
        if slept {
            // The loop watches for edges and never reads. A counter at its end (EAGAIN) would need
            // 2^64 kicks.
            let _ = rustix::io::write(&self.descriptor, &1u64.to_ne_bytes());
        }
        slept
    }

    /// Kicks so far.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Whether the loop may sleep now: nothing happened since the count was `seen`.
    pub(crate) fn sleep(&self, seen: u64) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.count.load(Ordering::SeqCst) == seen {
            return true;
        }
        self.asleep.store(false, Ordering::SeqCst);
        false
    }

    /// The loop is awake again.
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
