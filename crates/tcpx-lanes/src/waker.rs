//! Waking a thread that waits on a descriptor: with one system call per batch, and with none while
//! the thread looks by itself.

#[cfg(all(test, loom))]
mod model;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU8, Ordering};

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::event::{EventfdFlags, eventfd};

/// There is work.
const RAISED: u8 = 1;
/// The consumer was woken for it, or is about to be.
const WOKEN: u8 = 2;
/// The consumer looks without being woken.
const LOOKED_FOR: u8 = 4;
/// Remembers that a wake-up is under way, so that further ones cost no system call, and that none
/// is needed while the consumer looks by itself.
///
/// Producers publish their work and then call [`raise`](Self::raise); the consumer calls
/// [`lower`](Self::lower) and then looks for work. Work published before a `raise` that returned
/// `false` is seen by the consumer after its next `lower`, for which it is woken unless it has said
/// that it looks. Everything is one word that only read-modify-writes change, so that each sees
/// what those before it published.
#[derive(Debug)]
struct Raised(AtomicU8);

impl Raised {
    fn new() -> Self {
        Self(AtomicU8::new(0))
    }

    /// True when the caller must wake the consumer.
    fn raise(&self) -> bool {
        let before = self.change(|state| match state {
            state if state & RAISED != 0 => state,
            state if state & LOOKED_FOR != 0 => state | RAISED,
            state => state | RAISED | WOKEN,
        });
        before & (RAISED | LOOKED_FOR) == 0
    }

    /// Before looking for work; whether somebody has woken the consumer for it, or is about to.
    fn lower(&self) -> bool {
        self.0.fetch_and(LOOKED_FOR, Ordering::AcqRel) & WOKEN != 0
    }

    /// As [`lower`](Self::lower), for a consumer whose wakes are counted: `unread` of them were
    /// announced and not read yet; the answer is how many are then. `read` takes those that came,
    /// unless the consumer looks by itself.
    ///
    /// It reads first: a wake that comes after the flag was lowered is for work that it may not see
    /// any more.
    fn lower_and_read(&self, unread: u64, read: impl FnOnce() -> u64) -> u64 {
        let taken = if self.is_looked_for() { 0 } else { read() };
        // Whatever was taken had been announced before, or is by the flag that is lowered now.
        (unread + u64::from(self.lower())).saturating_sub(taken)
    }

    /// The consumer looks without being woken from now on, or no longer; true when it must be woken
    /// for what was raised meanwhile.
    fn set_looked_for(&self, looked_for: bool) -> bool {
        let before = self.change(|state| match state {
            state if looked_for => state | LOOKED_FOR,
            state if state & RAISED != 0 => (state | WOKEN) & !LOOKED_FOR,
            state => state & !(LOOKED_FOR | WOKEN),
        });
        !looked_for && before & (RAISED | WOKEN) == RAISED
    }

    /// Whether somebody raised it. Who publishes work after this has answered `false` raises it.
    fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire) & RAISED != 0
    }

    fn is_looked_for(&self) -> bool {
        self.0.load(Relaxed) & LOOKED_FOR != 0
    }

    /// Returns what it was before.
    fn change(&self, to: impl Fn(u8) -> u8) -> u8 {
        let changed = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| Some(to(state)));
        // It always answers `Some`.
        changed.unwrap_or_else(|state| state)
    }
}

/// An eventfd behind a flag: a burst of wake-ups costs one system call.
#[derive(Debug)]
pub struct Waker {
    descriptor: OwnedFd,
    raised: Raised,
    /// The consumer's own count of writes that it has seen announced and not read yet.
    unread: AtomicU64,
}

impl Waker {
    /// One that nobody has woken.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> rustix::io::Result<Self> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            descriptor,
            raised: Raised::new(),
            unread: AtomicU64::new(0),
        })
    }

    /// Makes the descriptor readable, unless the consumer looks by itself.
    pub fn wake(&self) {
        if self.raised.raise() {
            self.write();
        }
    }

    /// Whether there is something to look for; the consumer's question while it looks by itself.
    pub fn is_raised(&self) -> bool {
        self.raised.is_raised()
    }

    /// The consumer looks without waiting on the descriptor, or no longer: what was raised
    /// meanwhile makes the descriptor readable then.
    pub fn set_looked_for(&self, looked_for: bool) {
        if self.raised.set_looked_for(looked_for) {
            self.write();
        }
    }

    /// Ends a wait for the descriptor, without anything to look for.
    pub(crate) fn interrupt(&self) {
        self.write();
    }

    fn write(&self) {
        // A full counter (EAGAIN) is readable already; nothing else can fail here.
        let _ = rustix::io::write(&self.descriptor, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor quiet; call it before looking for work. Costs nothing while nobody has
    /// raised it, and no system call while the consumer looks by itself.
    pub fn clear(&self) {
        let unread = self.unread.load(Relaxed);
        if unread == 0 && !self.raised.is_raised() {
            return;
        }
        let unread = self.raised.lower_and_read(unread, || {
            let mut count = [0u8; 8];
            // EAGAIN: whoever raised it is about to write.
            let read = rustix::io::read(&self.descriptor, &mut count);
            read.map_or(0, |_| u64::from_ne_bytes(count))
        });
        self.unread.store(unread, Relaxed);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(waker: &Waker) -> bool {
        let mut watched = [PollFd::new(waker, PollFlags::IN)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut watched, Some(&at_once)).expect("the descriptor can be waited on") > 0
    }

    #[test]
    fn a_consumer_that_looks_needs_no_descriptor_until_it_stops() {
        let waker = Waker::new().expect("an eventfd");
        waker.set_looked_for(true);
        waker.wake();
        assert!(waker.is_raised() && !is_readable(&waker));
        waker.clear();
        assert!(!waker.is_raised());
        waker.wake();
        waker.set_looked_for(false);
        assert!(is_readable(&waker), "what was not seen is announced");
        waker.clear();
        assert!(!waker.is_raised() && !is_readable(&waker));
    }

    #[test]
    fn a_raise_during_a_read_quiets_nothing_later() {
        let raised = Raised::new();
        assert!(raised.raise());
        let mut wakes = 1;
        let unread = raised.lower_and_read(0, || {
            wakes += u64::from(raised.raise());
            std::mem::take(&mut wakes)
        });
        assert_eq!(unread, 0);
        assert!(raised.raise(), "nobody wakes the consumer any more");
    }

    #[test]
    fn what_was_announced_before_a_look_is_quiet_after() {
        let waker = Waker::new().expect("an eventfd");
        waker.wake();
        waker.set_looked_for(true);
        waker.clear();
        waker.set_looked_for(false);
        // The write is still unread: one more look makes it quiet.
        waker.clear();
        assert!(!is_readable(&waker));
    }
}
