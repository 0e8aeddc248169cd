//! Memory that is open to the peer.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use tcpx::{Rights, WindowKey};
use tcpx_memory::lock;

use super::failure::guard;
use super::region::slice;
use super::text::{duration, give, needed};
use super::types::{
    TCPX_RIGHT_GET, TCPX_RIGHT_PUT, TCPX_WINDOW_KEY_MAX, tcpx_connection, tcpx_region, tcpx_window,
};
use crate::error::{Failure, Outcome};
use crate::handles::{self, Object};

const _: () = assert!(WindowKey::BYTES <= TCPX_WINDOW_KEY_MAX);

/// A window of this side.
#[derive(Debug)]
pub(crate) struct Window {
    /// `None` once it is revoked.
    window: Mutex<Option<tcpx::Window>>,
    key: WindowKey,
}

/// A key that C carried over.
///
/// # Safety
/// `bytes` bytes at `key` can be read.
pub(super) unsafe fn window_key(key: *const c_void, bytes: usize) -> Outcome<WindowKey> {
    needed("key", key)?;
    // SAFETY: the caller's promise.
    let bytes = unsafe { super::text::bytes("key", key, bytes) }?;
    WindowKey::from_bytes(bytes).map_err(|error| super::failure::setting(error.to_string()))
}

/// Opens `bytes` bytes from `offset` of a region to the connection's peer, which may do there what
/// `rights` say: TCPX_RIGHT_GET, TCPX_RIGHT_PUT or both. The memory is in use only while a put or
/// get of the peer touches it.
///
/// CUDA memory is outside of every stream's order here: have your work on it ended before you tell
/// the peer to begin.
///
/// # Safety
/// `window` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_expose(
    connection: *mut tcpx_connection,
    region: *mut tcpx_region,
    offset: usize,
    bytes: usize,
    rights: c_int,
    window: *mut *mut tcpx_window,
) -> c_int {
    const BOTH: c_int = TCPX_RIGHT_GET | TCPX_RIGHT_PUT;
    guard("tcpx_expose", || {
        needed("window", window)?;
        let (_, connection) = handles::connection(connection)?;
        let slice = slice(region, offset, bytes)?;
        let rights = match rights {
            TCPX_RIGHT_GET => Rights::Get,
            TCPX_RIGHT_PUT => Rights::Put,
            BOTH => Rights::GetAndPut,
            other => {
                return Err(Failure::argument(format!(
                    "rights are {other}: pass TCPX_RIGHT_GET, TCPX_RIGHT_PUT or both"
                )));
            }
        };
        let opened = connection.connection.expose(slice, rights)?;
        let made = Window {
            key: opened.key(),
            window: Mutex::new(Some(opened)),
        };
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { handles::enter(Object::Window(Arc::new(made)), window) }
    })
}

/// What lets the peer in: `*bytes` bytes at `buffer`, at most TCPX_WINDOW_KEY_MAX. Carry them over
/// by any means, such as a message; whoever holds them and this connection may use the window.
///
/// # Safety
/// `buffer` is NULL or has `room` bytes; `bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_window_key(
    window: *mut tcpx_window,
    buffer: *mut c_void,
    room: usize,
    bytes: *mut usize,
) -> c_int {
    guard("tcpx_window_key", || {
        needed("bytes", bytes)?;
        let (_, window) = handles::window(window)?;
        // SAFETY: the caller's promise.
        unsafe { give(&window.key.to_bytes(), buffer.cast(), room, bytes) }
    })
}

/// Closes a window and ends its handle: the peer starts nothing there any more, and what it has
/// under way ends early. Returns when nothing of the peer points at the memory; TCPX_ERR_TIMED_OUT
/// when that is not so within `timeout_ms`, and the window is closed all the same.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_window_revoke(window: *mut tcpx_window, timeout_ms: u32) -> c_int {
    guard("tcpx_window_revoke", || {
        let (handle, window) = handles::window(window)?;
        handles::take(handle)?;
        let open = lock(&window.window).take();
        match open {
            Some(open) => Ok(open.revoke(duration(timeout_ms))?),
            None => Ok(()),
        }
    })
}
