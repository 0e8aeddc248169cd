//! Waking a thread that waits on a descriptor, with one system call per batch.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::event::{EventfdFlags, eventfd};

/// Remembers that a wake-up is under way, so that further ones cost no system call.
///
/// Producers publish their work and then call [`raise`](Self::raise); the consumer calls
/// [`lower`](Self::lower) and then looks for work. Work published before a `raise` that returned
/// `false` is seen by the consumer after its next `lower`.
#[derive(Debug)]
pub(crate) struct Raised(AtomicBool);

impl Raised {
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// True when the caller must wake the consumer.
    pub(crate) fn raise(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Before looking for work; whether it was raised. A swap and not a store: it must see what the
    /// raisers published.
    pub(crate) fn lower(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }

    /// Whether somebody raised it. Who publishes work after this has answered `false` raises it.
    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// An eventfd behind a [`Raised`] flag.
#[derive(Debug)]
pub(crate) struct Signal {
    descriptor: OwnedFd,
    raised: Raised,
    /// The consumer's own count of writes that it has seen announced and not read yet.
    unread: AtomicU64,
}

impl Signal {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            descriptor,
            raised: Raised::new(),
            unread: AtomicU64::new(0),
        })
    }

    /// Makes the descriptor readable.
    pub(crate) fn raise(&self) {
        if self.raised.raise() {
            // A full counter (EAGAIN) is readable already; nothing else can fail here.
            let _ = rustix::io::write(&self.descriptor, &1u64.to_ne_bytes());
        }
    }

    /// Makes the descriptor quiet; call it before looking for work. Costs nothing while nobody has
    /// raised it.
    pub(crate) fn clear(&self) {
        let unread = self.unread.load(Relaxed);
        if unread == 0 && !self.raised.is_raised() {
            return;
        }
        let mut count = [0u8; 8];
        // EAGAIN: whoever raised it is about to write.
        let read = match rustix::io::read(&self.descriptor, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        };
        let announced = u64::from(self.raised.lower());
        self.unread
            .store((unread + announced).saturating_sub(read), Relaxed);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::Raised;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn work_published_before_a_silent_raise_is_seen() {
        loom::model(|| {
            let shared = Arc::new((Raised::new(), AtomicUsize::new(0), AtomicUsize::new(0)));
            let producers: Vec<_> = (0..2)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || {
                        let (raised, work, wakes) = &*shared;
                        work.fetch_add(1, Ordering::Relaxed);
                        if raised.raise() {
                            wakes.fetch_add(1, Ordering::Release);
                        }
                    })
                })
                .collect();
            let (raised, work, wakes) = &*shared;
            // The consumer's descriptor is the count of wakes; it must end with nothing unseen.
            let woken_before = wakes.load(Ordering::Acquire);
            raised.lower();
            let seen = work.load(Ordering::Relaxed);
            for producer in producers {
                producer.join().expect("a producer ends");
            }
            let woken_after = wakes.load(Ordering::Acquire);
            assert!(
                seen == 2 || woken_after > woken_before,
                "work was published, and neither seen nor announced"
            );
        });
    }
}
