//! The handshake between threads that publish work and a worker's thread that parks or ends.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Whether the thread is parked, and whether it has stopped taking work.
pub(super) struct ParkGate {
    sleeping: AtomicBool,
    closed: AtomicBool,
}

impl ParkGate {
    pub(super) fn new() -> Self {
        Self {
            sleeping: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    /// Calls `park` unless there is work. A thread that publishes work meanwhile unparks this one.
    pub(super) fn sleep(&self, has_work: impl FnOnce() -> bool, park: impl FnOnce()) {
        self.sleeping.store(true, Ordering::SeqCst);
        // Pairs with the fence in `must_wake`: either this thread sees the work, or the publisher
        // sees that it sleeps.
        fence(Ordering::SeqCst);
        if !has_work() {
            park();
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// After publishing work: whether the thread must be unparked.
    pub(super) fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        self.sleeping.load(Ordering::SeqCst)
    }

    /// The thread takes work once more after this, and never again.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        // Pairs with the fence in `must_wake`: either this thread's last poll finds the work, or
        // the publisher, which asks after publishing, learns that it must take the work back.
        fence(Ordering::SeqCst);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::ParkGate;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};

    /// Takes all there is, as a queue does that is looked at before it is changed.
    fn take(queue: &AtomicUsize) -> usize {
        match queue.load(Ordering::Relaxed) {
            0 => 0,
            _ => queue.swap(0, Ordering::Relaxed),
        }
    }

    #[test]
    fn no_work_is_slept_through() {
        loom::model(|| {
            let shared = Arc::new((ParkGate::new(), AtomicUsize::new(0)));
            let worker = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (park_gate, queue) = &*shared;
                    let mut taken = 0;
                    // Without an unpark this never ends, and the model fails.
                    while taken < 2 {
                        match take(queue) {
                            0 => park_gate
                                .sleep(|| queue.load(Ordering::Relaxed) > 0, loom::thread::park),
                            some => taken += some,
                        }
                    }
                })
            };
            let (park_gate, queue) = &*shared;
            for _ in 0..2 {
                queue.fetch_add(1, Ordering::Relaxed);
                if park_gate.must_wake() {
                    worker.thread().unpark();
                }
            }
            worker.join().expect("the worker ends");
        });
    }

    #[test]
    fn work_published_while_the_thread_ends_is_taken_once() {
        loom::model(|| {
            let shared = Arc::new((ParkGate::new(), AtomicUsize::new(0)));
            let worker = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (park_gate, queue) = &*shared;
                    let taken = take(queue);
                    park_gate.close();
                    taken + take(queue)
                })
            };
            let (park_gate, queue) = &*shared;
            let mut taken = 0;
            for _ in 0..2 {
                if park_gate.is_closed() {
                    // Refused.
                    taken += 1;
                    continue;
                }
                queue.fetch_add(1, Ordering::Relaxed);
                park_gate.must_wake();
                if park_gate.is_closed() {
                    taken += take(queue);
                }
            }
            taken += worker.join().expect("the worker ends");
            assert_eq!(taken, 2, "every piece of work is taken once");
        });
    }
}
