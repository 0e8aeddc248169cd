//! Notifications of the peer that wait for the program.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tcpx_lanes::lock;

use crate::drive::EngineWatch;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Notifications {
    inbox: Mutex<Inbox>,
    changed: Condvar,
    /// There is one, or none will come any more; for looking without the lock.
    ready: AtomicBool,
    /// Others wait until some of these are collected.
    postponed: AtomicBool,
}

#[derive(Debug, Default)]
struct Inbox {
    waiting: VecDeque<Vec<u8>>,
    /// Those that the program has taken, and their bytes, since the session was told.
    collected: (u64, u64),
    ended: bool,
    /// Threads that sleep until the next one: to wake none is a call of the kernel too.
    sleeping: usize,
    /// Whom to wake at the next one, and what may keep the engine's thread at it meanwhile.
    waker: Option<(Waker, Option<EngineWatch>)>,
}

/// What a look for a notification finds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Notification(Vec<u8>),
    /// None yet.
    Nothing,
    /// None any more.
    Ended,
}

impl Notifications {
    /// The caller wakes the waker that this returns when it holds no lock any more: waking runs the
    /// program's code.
    #[must_use]
    pub(crate) fn push(&self, notification: Vec<u8>) -> Option<Waker> {
        let mut inbox = lock(&self.inbox);
        inbox.waiting.push_back(notification);
        self.ready.store(true, Ordering::Release);
        if inbox.sleeping > 0 {
            self.changed.notify_one();
        }
        inbox.waker.take().map(|(waker, _)| waker)
    }

    /// None will come any more. The waker is as for [`push`](Self::push).
    #[must_use]
    pub(crate) fn end(&self) -> Option<Waker> {
        let mut inbox = lock(&self.inbox);
        inbox.ended = true;
        self.ready.store(true, Ordering::Release);
        self.changed.notify_all();
        inbox.waker.take().map(|(waker, _)| waker)
    }

    /// As [`take`](Self::take); where nothing is found, `waker` is woken at the next change, in
    /// place of the one before.
    pub(crate) fn take_or_wake(&self, waker: &Waker, watch: Option<EngineWatch>) -> Found {
        let mut inbox = lock(&self.inbox);
        let found = self.take_from(&mut inbox);
        let replaced = match found {
            Found::Nothing => inbox.waker.replace((waker.clone(), watch)),
            _ => None,
        };
        drop(inbox);
        // Dropping a waker runs the program's code.
        drop(replaced);
        found
    }

    /// What the program has taken since it was asked last.
    pub(crate) fn take_collected(&self) -> (u64, u64) {
        std::mem::take(&mut lock(&self.inbox).collected)
    }

    pub(crate) fn set_postponed(&self, postponed: bool) {
        self.postponed.store(postponed, Ordering::Release);
    }

    /// Whether others wait for one to be taken.
    pub(crate) fn has_postponed(&self) -> bool {
        self.postponed.load(Ordering::Acquire)
    }

    /// Whether [`take`](Self::take) finds something.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    pub(crate) fn take(&self) -> Found {
        self.take_from(&mut lock(&self.inbox))
    }

    fn take_from(&self, inbox: &mut Inbox) -> Found {
        let Some(notification) = inbox.waiting.pop_front() else {
            return match inbox.ended {
                true => Found::Ended,
                false => Found::Nothing,
            };
        };
        inbox.collected.0 += 1;
        inbox.collected.1 += notification.len() as u64;
        let ready = inbox.ended || !inbox.waiting.is_empty();
        self.ready.store(ready, Ordering::Release);
        Found::Notification(notification)
    }

    /// Sleeps until there is one, at most for `limit`.
    pub(crate) fn sleep(&self, limit: Duration) {
        let mut inbox = lock(&self.inbox);
        let nothing = |inbox: &mut Inbox| inbox.waiting.is_empty() && !inbox.ended;
        inbox.sleeping += 1;
        let slept = self.changed.wait_timeout_while(inbox, limit, nothing);
        slept.unwrap_or_else(PoisonError::into_inner).0.sleeping -= 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_came_before_the_end_is_still_taken() {
        let notifications = Notifications::default();
        assert_eq!(notifications.take(), Found::Nothing);
        assert!(!notifications.is_ready());
        assert!(notifications.push(vec![1]).is_none());
        assert!(notifications.end().is_none());
        notifications.sleep(Duration::MAX);
        assert_eq!(notifications.take(), Found::Notification(vec![1]));
        assert!(notifications.is_ready());
        assert_eq!(notifications.take(), Found::Ended);
        assert_eq!(notifications.take_collected(), (1, 1));
        assert_eq!(notifications.take_collected(), (0, 0));
    }
}
