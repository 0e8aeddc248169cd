//! Forks: what a plugin made before one belongs to the other process.
//!
//! A child has copies of comms, locks and sockets, but none of the threads. It must not use the
//! copies: what it wrote would go out on its parent's connections, and a lock that a thread of the
//! parent held would stay held. It makes everything anew.

use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Forks between the process that loaded the plugin and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> std::ffi::c_int;
}

unsafe extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Has `handler` run in the child of every fork from now on, before anything else of the plugin.
/// `false` when the system has no memory for that.
///
/// # Safety
/// The handler calls only what POSIX calls async-signal-safe, and its code stays mapped.
pub unsafe fn on_fork(handler: unsafe extern "C" fn()) -> bool {
    // SAFETY: a function that stays, by the caller's promise.
    unsafe { pthread_atfork(None, None, Some(handler)) == 0 }
}

/// Names this process among those that forks of the plugin's process made.
pub fn generation() -> u32 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // Without memory for it forks go unseen, as they would without this module.
        // SAFETY: it touches one atomic; a file with handlers is not unmapped before they are gone.
        let _ = unsafe { on_fork(in_child) };
    });
    FORKS.load(Ordering::Relaxed)
}

/// A value that each process has for itself: a fork's child begins with a new one.
#[derive(Debug)]
pub struct PerProcess<T>(AtomicPtr<Owned<T>>);

#[derive(Debug)]
struct Owned<T> {
    generation: u32,
    value: T,
}

impl<T: Default> PerProcess<T> {
    /// No value yet, for a `static`.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// This process's value, made on first use.
    pub fn get(&self) -> &T {
        let generation = generation();
        let known = self.0.load(Ordering::Acquire);
        // SAFETY: NULL or a box that is freed only by our drop.
        if let Some(owned) = unsafe { known.as_ref() }
            && owned.generation == generation
        {
            return &owned.value;
        }
        let fresh = Box::into_raw(Box::new(Owned {
            generation,
            value: T::default(),
        }));
        // What a parent left is never looked at again, nor freed: a lock in it may be held.
        let kept = match self
            .0
            .compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: ours, and nothing else has the pointer.
                drop(unsafe { Box::from_raw(fresh) });
                other
            }
        };
        // SAFETY: not NULL; another thread of this process made it, hence of this generation.
        unsafe { &(*kept).value }
    }
}

impl<T: Default> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let owned = *self.0.get_mut();
        // SAFETY: NULL or a box of ours, and no reference is left.
        if unsafe { owned.as_ref() }.is_some_and(|owned| owned.generation == generation()) {
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(owned) });
        }
    }
}

// SAFETY: owns a `T` and hands out shared references to it.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for PerProcess<T> {}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_value_is_made_once_and_shared_by_all_threads() {
        let value = PerProcess::<Mutex<Vec<u32>>>::new();
        std::thread::scope(|scope| {
            for number in 0..8 {
                let value = &value;
                scope.spawn(move || value.get().lock().unwrap().push(number));
            }
        });
        assert_eq!(value.get().lock().unwrap().len(), 8);
    }
}
