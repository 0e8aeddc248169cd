//! Sends, receives, and their ends.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::text::{answer, needed};
use crate::error::{Failure, Outcome, guard};
use crate::handles::{self, Handle, Object};
use crate::plugin::codes::TCPX_TIMEOUT;
use crate::plugin::end::{End, Piece};
use crate::plugin::types::{
    TCPX_SIZE_UNKNOWN, tcpx_completion, tcpx_memory, tcpx_recv_comm, tcpx_request, tcpx_send_comm,
};

/// Tests in a row before a wait lets others run.
const EAGER_TESTS: u32 = 64;
/// Pause between tests after that; plugins have no wake-up.
const PAUSE: Duration = Duration::from_micros(50);

fn post(end: &Arc<End>, piece: Piece) -> Outcome<*mut tcpx_request> {
    let enter = |number| handles::insert(Object::Request(Arc::clone(end), number));
    let posted = end.post(piece, enter)?;
    Ok(posted.map_or(std::ptr::null_mut(), Handle::to_pointer))
}

fn forget(request: Option<Handle>) {
    handles::remove(request);
}

/// Sends `size` bytes at `data`, which lie in `mhandle`'s memory. The peer's receives take sends in
/// the order of posting; `tag` is for logs. TCPX_SUCCESS with NULL in `*request` means no room now:
/// 16 requests are in flight or done and not yet tested; test the oldest, then post again. What the
/// plugin does not take yet is posted by the tests of the comm's requests, in order.
///
/// # Safety
/// `request` is NULL or can be written. The bytes are not written until the request is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_isend(
    send_comm: *mut tcpx_send_comm,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    mhandle: *mut tcpx_memory,
    request: *mut *mut tcpx_request,
) -> c_int {
    guard("tcpx_isend", || {
        needed("request", request)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { request.write(std::ptr::null_mut()) };
        let (_, end) = handles::sender(send_comm)?;
        let (handle, memory) = handles::memory(mhandle)?;
        let posted = post(&end, memory.piece(handle, data, size, tag)?)?;
        // SAFETY: as above.
        unsafe { request.write(posted) };
        Ok(())
    })
}

/// Receives at most `sizes[0]` bytes to `data[0]`, which lies in `mhandles[0]`'s memory; `n` must
/// be 1. A message larger than that makes some plugins write past the end: agree on sizes before.
/// TCPX_SUCCESS with NULL in `*request` means no room now: 16 receives are in flight or not
/// consumed; finish and consume the oldest, then post again. What the plugin does not take yet, as
/// some do before the peer's send, is posted by the tests of the comm's requests, in order.
///
/// # Safety
/// The arrays are NULL or have one element; `request` is NULL or can be written. Nobody touches
/// the memory until the request is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_irecv(
    recv_comm: *mut tcpx_recv_comm,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    mhandles: *mut *mut tcpx_memory,
    request: *mut *mut tcpx_request,
) -> c_int {
    guard("tcpx_irecv", || {
        needed("request", request)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { request.write(std::ptr::null_mut()) };
        single("n", n)?;
        if data.is_null() || sizes.is_null() || tags.is_null() || mhandles.is_null() {
            return Err(Failure::argument(
                "data, sizes, tags or mhandles is NULL: pass arrays of one element",
            ));
        }
        // SAFETY: not NULL, and by the caller's promise they have one element.
        let (data, size, tag, mhandle) =
            unsafe { (data.read(), sizes.read(), tags.read(), mhandles.read()) };
        let (_, end) = handles::receiver(recv_comm)?;
        let (handle, memory) = handles::memory(mhandle)?;
        let posted = post(&end, memory.piece(handle, data, size, tag)?)?;
        // SAFETY: as above.
        unsafe { request.write(posted) };
        Ok(())
    })
}

fn single(name: &str, n: c_int) -> Outcome<()> {
    if n != 1 {
        return Err(Failure::argument(format!(
            "{name} is {n}: requests are made one at a time, pass 1"
        )));
    }
    Ok(())
}

/// Moves the comm on, and says whether a request is done: 1 in `*done`, once. `size` may be NULL;
/// with `*done == 1` it receives the bytes, or TCPX_SIZE_UNKNOWN.
///
/// Any request of a comm may be tested, in any order: the library tests the plugin's oldest one and
/// keeps what it learns for the others. After `*done == 1` a send's handle has ended, and a receive
/// waits for tcpx_irecv_consumed; test neither again.
///
/// An error means that the comm has failed. It stays so; close it.
///
/// # Safety
/// `done` and `size` are NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_test(
    request: *mut tcpx_request,
    done: *mut c_int,
    size: *mut c_int,
) -> c_int {
    guard("tcpx_test", || {
        needed("done", done)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { done.write(0) };
        let (end, number) = handles::request(request)?;
        let Some(completion) = end.test(number, forget)? else {
            return Ok(());
        };
        // SAFETY: as above. No request is larger than an `int` can say.
        unsafe {
            let unknown = TCPX_SIZE_UNKNOWN as c_int;
            answer(size, c_int::try_from(completion.size).unwrap_or(unknown));
            done.write(1);
        }
        Ok(())
    })
}

/// Tests a request until it is done, then never again, and tells size, descriptors and their
/// number. `completion` may be NULL. After TCPX_SUCCESS it is as after tcpx_test with `*done == 1`.
///
/// After `timeout_ms` milliseconds TCPX_TIMEOUT: the request is still in flight and may be waited
/// for again; 0 tests once. The bound holds between calls of the plugin: one that hangs inside a
/// call holds this thread.
///
/// # Safety
/// `completion` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_wait_request(
    request: *mut tcpx_request,
    timeout_ms: u32,
    completion: *mut tcpx_completion,
) -> c_int {
    guard("tcpx_wait_request", || {
        let (end, number) = handles::request(request)?;
        let started = Instant::now();
        let limit = Duration::from_millis(u64::from(timeout_ms));
        let mut tests = 0_u32;
        let found = loop {
            if let Some(found) = end.test(number, forget)? {
                break found;
            }
            if started.elapsed() >= limit {
                return Err(Failure::new(
                    TCPX_TIMEOUT,
                    format!(
                        "not done after {timeout_ms} ms: {}; see whether the peer still runs, then \
                         wait again or close the comm",
                        end.standing(number)
                    ),
                ));
            }
            tests = tests.saturating_add(1);
            if tests < EAGER_TESTS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(PAUSE);
            }
        };
        // SAFETY: the caller's promise.
        unsafe { answer(completion, found) };
        Ok(())
    })
}

/// Size and descriptors of a receive that is done and not consumed, for programs that found it done
/// with tcpx_test.
///
/// # Safety
/// `completion` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_get_completion(
    request: *mut tcpx_request,
    completion: *mut tcpx_completion,
) -> c_int {
    guard("tcpx_get_completion", || {
        needed("completion", completion)?;
        let (end, number) = handles::request(request)?;
        let found = end.completion(number)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { completion.write(found) };
        Ok(())
    })
}

/// Gives a receive back, after its bytes are unpacked: its pool space, its descriptors and its
/// handle. `n` must be 1. Every receive that is done needs it, whatever the memory and the plugin,
/// in the order of posting; out of order is TCPX_INVALID_USAGE and changes nothing.
///
/// # Safety
/// Nobody reads the receive's pool space or descriptors any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_irecv_consumed(
    recv_comm: *mut tcpx_recv_comm,
    n: c_int,
    request: *mut tcpx_request,
) -> c_int {
    guard("tcpx_irecv_consumed", || {
        single("n", n)?;
        let (_, end) = handles::receiver(recv_comm)?;
        let (of, number) = handles::request(request)?;
        if !Arc::ptr_eq(&end, &of) {
            return Err(Failure::argument(
                "request is not of recv_comm: pass the comm that it was posted on",
            ));
        }
        end.consume(number, forget)
    })
}
