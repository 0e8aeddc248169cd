//! What this process has allocated, what the simulation itself needs apart: nothing that it does
//! may need more and more.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, Ordering};

struct Counted;

static LIVE: AtomicIsize = AtomicIsize::new(0);

thread_local! {
    /// So many reasons for which this thread's allocations do not count.
    static ASIDE: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTED: Counted = Counted;

fn count(bytes: usize, sign: isize) {
    if ASIDE.get() == 0 {
        LIVE.fetch_add(bytes as isize * sign, Ordering::Relaxed);
    }
}

// SAFETY: the system's allocator, which does what this one promises.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's. Pages that nobody touches cost nothing.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, 1);
        count(layout.size(), -1);
        // SAFETY: the caller's.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Bytes that are allocated now.
pub fn live() -> usize {
    LIVE.load(Ordering::Relaxed).max(0) as usize
}

/// While this lives, what its thread allocates and gives back does not count.
pub struct Aside(());

pub fn aside() -> Aside {
    ASIDE.set(ASIDE.get() + 1);
    Aside(())
}

impl Aside {
    /// Until the thread ends.
    pub fn for_good(self) {
        std::mem::forget(self);
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        ASIDE.set(ASIDE.get() - 1);
    }
}
