//! Completions of many transfers in one place.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use tcpx::CompletionQueue;

use super::codes::TCPX_OK;
use super::failure::guard;
use super::text::{duration, needed};
use super::transfer::{NO_REPORT, report_of};
use super::types::{tcpx_completion_entry, tcpx_queue};
use crate::error::Failure;
use crate::handles::{self, Object};

/// A polling thread looks this often whether its queue was closed.
const LOOK: Duration = Duration::from_millis(500);

/// Completions that one call takes at most.
const MOST: usize = 1024;

/// Makes a queue, for transfers of any number of connections.
///
/// # Safety
/// `queue` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_queue_new(queue: *mut *mut tcpx_queue) -> c_int {
    guard("tcpx_queue_new", || {
        needed("queue", queue)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { handles::enter(Object::Queue(CompletionQueue::new()?), queue) }
    })
}

/// A descriptor that is readable while completions wait in the queue, for poll() and epoll. It
/// belongs to the queue: do not read or close it.
///
/// # Safety
/// `descriptor` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_queue_descriptor(
    queue: *mut tcpx_queue,
    descriptor: *mut c_int,
) -> c_int {
    guard("tcpx_queue_descriptor", || {
        needed("descriptor", descriptor)?;
        let (_, queue) = handles::queue(queue)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { descriptor.write(queue.as_fd().as_raw_fd()) };
        Ok(())
    })
}

/// Takes at most `room` completions, oldest first, and says in `*count` how many. Without one it
/// waits at most `timeout_ms`; then `*count` is 0, which is no error. The text of a failure is that
/// of tcpx_transfer_wait on the transfer, if its handle was kept.
///
/// # Safety
/// `entries` has `room` elements; `count` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_queue_poll(
    queue: *mut tcpx_queue,
    entries: *mut tcpx_completion_entry,
    room: usize,
    timeout_ms: u32,
    count: *mut usize,
) -> c_int {
    guard("tcpx_queue_poll", || {
        needed("count", count)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { count.write(0) };
        needed("entries", entries)?;
        if room == 0 {
            return Err(Failure::argument("room is 0: pass at least one element"));
        }
        let until = Instant::now() + duration(timeout_ms);
        let mut taken = Vec::new();
        let most = room.min(MOST);
        loop {
            // Each look finds out whether it was closed.
            let (_, queue) = handles::queue(queue)?;
            let left = until.saturating_duration_since(Instant::now());
            if queue.poll(&mut taken, most, left.min(LOOK))? > 0 || left <= LOOK {
                break;
            }
        }
        for (index, completion) in taken.iter().enumerate() {
            let (code, report) = match &completion.outcome {
                Ok(report) => (TCPX_OK, report_of(report)),
                Err(error) => (Failure::from(error.clone()).code, NO_REPORT),
            };
            let entry = tcpx_completion_entry {
                key: completion.key,
                code,
                reserved: 0,
                report,
            };
            // SAFETY: at most `room` elements, which the caller lets us write.
            unsafe { entries.add(index).write(entry) };
        }
        // SAFETY: as above.
        unsafe { count.write(taken.len()) };
        Ok(())
    })
}

/// Ends a queue; its descriptor is closed once no transfer is left that reports to it. Completions
/// that nobody has taken are lost, transfers are not.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_queue_close(queue: *mut tcpx_queue) -> c_int {
    guard("tcpx_queue_close", || {
        let (handle, queue) = handles::queue(queue)?;
        handles::take(handle)?;
        drop(queue);
        Ok(())
    })
}
