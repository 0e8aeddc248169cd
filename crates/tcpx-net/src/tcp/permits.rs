//! A bound on the pinned slots that hold bytes to send.
//!
//! Sends and receives share one pool per GPU. Sends that took all of it would wait for the peer to
//! receive, while the peer's sends wait for us: so sends leave a quarter to receives, which always
//! come to an end.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tcpx_memory::CopyWorker;

use super::shared::{Shared, lock};
use super::wakers::Wakers;

/// The slots of one worker's pool that sends may hold; one per worker and process.
#[derive(Debug)]
pub(super) struct Permits {
    taken: AtomicUsize,
    has_waiting: AtomicBool,
    waiting: Mutex<Vec<Weak<Wakers>>>,
    /// Channels that hold slots for chunks that are not there yet.
    ahead: Mutex<Vec<Weak<Shared>>>,
    any_ahead: AtomicBool,
}

/// The right to hold one slot for a send; dropping it wakes those who wait.
#[derive(Debug)]
pub(super) struct Permit(Arc<Permits>);

type Registry = Vec<(Weak<CopyWorker>, Weak<Permits>)>;

impl Permits {
    pub(super) fn of(worker: &Arc<CopyWorker>) -> Arc<Self> {
        static REGISTRY: Mutex<Registry> = Mutex::new(Vec::new());
        let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
        registry
            .retain(|(worker, permits)| worker.strong_count() > 0 && permits.strong_count() > 0);
        let address = Arc::as_ptr(worker);
        let known = registry
            .iter()
            .find(|(held, _)| std::ptr::eq(held.as_ptr(), address));
        if let Some(permits) = known.and_then(|(_, permits)| permits.upgrade()) {
            return permits;
        }
        let permits = Arc::new(Self {
            taken: AtomicUsize::new(0),
            has_waiting: AtomicBool::new(false),
            waiting: Mutex::new(Vec::new()),
            ahead: Mutex::new(Vec::new()),
            any_ahead: AtomicBool::new(false),
        });
        registry.push((Arc::downgrade(worker), Arc::downgrade(&permits)));
        permits
    }

    /// Takes a permit while fewer than three quarters of `slots` are taken. Otherwise `wakers` is
    /// woken once one is given back.
    pub(super) fn take(self: &Arc<Self>, slots: usize, wakers: &Arc<Wakers>) -> Option<Permit> {
        let most = (slots - slots / 4).max(1);
        self.try_take(most)
            .or_else(|| self.wait_or_take(most, wakers))
    }

    /// There was none a moment ago.
    fn wait_or_take(self: &Arc<Self>, most: usize, wakers: &Arc<Wakers>) -> Option<Permit> {
        let mut waiting = lock(&self.waiting);
        let known = waiting
            .iter()
            .any(|held| std::ptr::eq(held.as_ptr(), Arc::as_ptr(wakers)));
        if !known {
            waiting.push(Arc::downgrade(wakers));
        }
        drop(waiting);
        self.has_waiting.store(true, Ordering::SeqCst);
        // A second look: one given back before the line above woke nobody.
        self.try_take(most)
    }

    /// Takes a permit for bytes that nobody waits for yet: while fewer than a quarter of `slots` are taken.
    pub(super) fn take_spare(self: &Arc<Self>, slots: usize) -> Option<Permit> {
        self.try_take(slots / 4)
    }

    /// Notes that a channel has begun to hold slots for chunks that are not there yet.
    pub(super) fn lend(&self, shared: &Weak<Shared>) {
        let mut ahead = lock(&self.ahead);
        ahead.retain(|held| held.strong_count() > 0);
        if !ahead.iter().any(|held| held.ptr_eq(shared)) {
            ahead.push(Weak::clone(shared));
        }
        drop(ahead);
        self.any_ahead.store(true, Ordering::SeqCst);
    }

    /// Has all channels give back the slots that they hold for chunks that are not there yet: chunks that
    /// are there have none. Those that copies write to come back when these end.
    pub(super) fn reclaim(&self) {
        if self.any_ahead.swap(false, Ordering::SeqCst) {
            let ahead = std::mem::take(&mut *lock(&self.ahead));
            for shared in ahead.iter().filter_map(Weak::upgrade) {
                shared.give_back_ahead();
            }
        }
    }

    /// Whether sends hold slots.
    pub(super) fn are_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed) > 0
    }

    fn try_take(self: &Arc<Self>, most: usize) -> Option<Permit> {
        self.taken
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |taken| {
                (taken < most).then_some(taken + 1)
            })
            .is_ok()
            .then(|| Permit(Arc::clone(self)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::SeqCst);
        if self.0.has_waiting.swap(false, Ordering::SeqCst) {
            let waiting = std::mem::take(&mut *lock(&self.0.waiting));
            for wakers in waiting.iter().filter_map(Weak::upgrade) {
                wakers.wake_any_sender();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_given_back_between_the_look_and_the_wait_is_taken() {
        let worker = CopyWorker::host().expect("a worker");
        let permits = Permits::of(&worker);
        let wakers = Arc::new(Wakers::new(1).expect("an eventfd"));
        let all: Vec<Permit> = (0..3)
            .map(|_| permits.take(4, &wakers).expect("three of four"))
            .collect();
        assert!(permits.try_take(3).is_none());
        // Nobody waits yet, so this wakes nobody.
        drop(all);
        assert!(!permits.has_waiting.load(Ordering::SeqCst));
        let late = permits.wait_or_take(3, &wakers);
        assert!(late.is_some(), "it would wait for what is there");
    }
}
