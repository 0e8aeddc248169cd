//! The thread that frees CUDA memory.
//!
//! Freeing can wait for a kernel of the user that itself waits for a transfer, so no thread that
//! moves transfers forward may do it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

use crate::error::{CudaError, MemoryError};
use crate::lock;

type Work = Box<dyn FnOnce() + Send>;

static REAPER: Mutex<Option<mpsc::Sender<Work>>> = Mutex::new(None);

/// Longest wait for frees that are in flight before an allocation fails.
const FREE_WAIT: Duration = Duration::from_secs(5);

/// Runs `work` on the reaper's thread, or here if there can be no thread.
pub(crate) fn run(work: impl FnOnce() + Send + 'static) {
    let mut work: Work = Box::new(work);
    let mut reaper = lock(&REAPER);
    if let Some(sender) = reaper.as_ref() {
        match sender.send(work) {
            Ok(()) => return,
            Err(unsent) => work = unsent.0,
        }
    }
    let (sender, receiver) = mpsc::channel::<Work>();
    let started = thread::Builder::new()
        .name("tcpx-free".to_owned())
        .spawn(move || receiver.into_iter().for_each(run_one));
    match started {
        Ok(_) => {
            // The new thread lives until its sender is dropped, so this cannot fail.
            let unsent = sender.send(work).err();
            *reaper = Some(sender);
            drop(reaper);
            if let Some(unsent) = unsent {
                (unsent.0)();
            }
        }
        Err(error) => {
            tracing::warn!(%error, "no thread to free CUDA memory on");
            drop(reaper);
            work();
        }
    }
}

/// The owner of foreign memory may panic when it is dropped; other memory must still be freed.
fn run_one(work: Work) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!("the owner of foreign memory panicked");
    }
}

/// Allocates; when there is no memory left, waits for frees in flight and tries once more.
pub(crate) fn retry<T>(allocate: impl Fn() -> Result<T, MemoryError>) -> Result<T, MemoryError> {
    match allocate() {
        Err(MemoryError::Cuda(CudaError::OutOfMemory { .. })) => {
            flush(FREE_WAIT);
            allocate()
        }
        other => other,
    }
}

/// Waits until everything handed over so far has run, or `limit` has passed.
pub(crate) fn flush(limit: Duration) -> bool {
    if lock(&REAPER).is_none() {
        // Nothing was ever handed over.
        return true;
    }
    let (done, wait): (SyncSender<()>, _) = mpsc::sync_channel(1);
    run(move || {
        // After the wait nothing can report it.
        done.send(()).ok();
    });
    !matches!(wait.recv_timeout(limit), Err(RecvTimeoutError::Timeout))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::kind::MemoryKind;

    #[test]
    fn an_allocation_waits_for_frees_under_way() {
        let freed = Arc::new(AtomicU32::new(0));
        for _ in 0..10 {
            let freed = Arc::clone(&freed);
            run(move || {
                freed.fetch_add(1, Ordering::SeqCst);
            });
        }
        let tries = Cell::new(0);
        let answer = retry(|| {
            tries.set(tries.get() + 1);
            if tries.get() == 1 {
                return Err(CudaError::OutOfMemory {
                    device: 0,
                    bytes: 1,
                    what: MemoryKind::Pinned,
                }
                .into());
            }
            Ok(freed.load(Ordering::SeqCst))
        });
        assert_eq!((answer, tries.get()), (Ok(10), 2));
    }
}
