//! The system's allocator, counting: for tests that prove that a path allocates nothing. Each test
//! program makes it its global allocator; those of other crates include this file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what is allocated in Rust; C libraries have an allocator of their own.
#[derive(Debug)]
pub struct Counting;

thread_local! {
    static OF_THREAD: Cell<u64> = const { Cell::new(0) };
}

static OF_PROGRAM: AtomicU64 = AtomicU64::new(0);

impl Counting {
    /// Allocations of the calling thread until now.
    pub fn of_thread() -> u64 {
        OF_THREAD.with(Cell::get)
    }

    /// Allocations of all threads until now.
    pub fn of_program() -> u64 {
        OF_PROGRAM.load(Ordering::Relaxed)
    }
}

fn count() {
    OF_PROGRAM.fetch_add(1, Ordering::Relaxed);
    // A thread that ends may allocate after its counter is gone.
    let _ = OF_THREAD.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches a
// constant-initialised cell and an atomic, which need no allocation themselves.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's duties are ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's duties are ours.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's duties are ours.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}
