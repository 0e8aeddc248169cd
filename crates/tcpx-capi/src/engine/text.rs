//! Arguments in and texts out.

use std::ffi::{CStr, c_char, c_void};
use std::time::Duration;

use super::types::TCPX_FOREVER;
use crate::error::{Failure, Outcome};

/// Longer than any program waits; it can be added to any clock.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Milliseconds of C; TCPX_FOREVER has no end.
pub(super) fn duration(ms: u32) -> Duration {
    match ms {
        TCPX_FOREVER => YEAR,
        ms => Duration::from_millis(u64::from(ms)),
    }
}

/// An argument that must not be NULL.
pub(crate) fn needed<T>(name: &str, pointer: *const T) -> Outcome<()> {
    if pointer.is_null() {
        return Err(Failure::argument(format!(
            "{name} is NULL, and the call needs it"
        )));
    }
    Ok(())
}

/// A text of C.
///
/// # Safety
/// `text` is NULL or a NUL-terminated string that stays as it is for `'a`.
pub(super) unsafe fn text<'a>(name: &str, text: *const c_char) -> Outcome<&'a str> {
    needed(name, text)?;
    // SAFETY: not NULL; the rest is the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| Failure::argument(format!("{name} is not UTF-8")))
}

/// Bytes of C.
///
/// # Safety
/// `data` is NULL, or `bytes` bytes there can be read for `'a`.
pub(super) unsafe fn bytes<'a>(name: &str, data: *const c_void, bytes: usize) -> Outcome<&'a [u8]> {
    if bytes == 0 {
        return Ok(&[]);
    }
    needed(name, data)?;
    if bytes > isize::MAX as usize {
        return Err(Failure::argument(format!("{bytes} bytes at {name}")));
    }
    // SAFETY: not NULL, of a length that a slice may have; the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data.cast(), bytes) })
}

/// Gives bytes to C: to `buffer` if they fit in `room`, and how many they are to `needed`.
///
/// # Safety
/// `buffer` is NULL or has `room` bytes that can be written; `needed` is NULL or can be written.
pub(super) unsafe fn give(
    content: &[u8],
    buffer: *mut u8,
    room: usize,
    needed: *mut usize,
) -> Outcome<()> {
    // SAFETY: the caller's promise.
    unsafe { answer(needed, content.len()) };
    if content.is_empty() {
        return Ok(());
    }
    if buffer.is_null() || room < content.len() {
        return Err(Failure::argument(format!(
            "{} bytes do not fit in {}: pass a larger buffer",
            content.len(),
            if buffer.is_null() { 0 } else { room }
        )));
    }
    // SAFETY: the caller's memory has room for them, and is none of ours.
    unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), buffer, content.len()) };
    Ok(())
}

/// As [`give`], for a text with its NUL.
///
/// # Safety
/// As for [`give`].
pub(super) unsafe fn give_text(
    content: &str,
    buffer: *mut c_char,
    room: usize,
    needed: *mut usize,
) -> Outcome<()> {
    let mut content = content.replace('\0', "?").into_bytes();
    content.push(0);
    // SAFETY: forwarded.
    unsafe { give(&content, buffer.cast(), room, needed) }
}

/// Fills an answer of C.
///
/// # Safety
/// `to` is NULL or can be written.
pub(crate) unsafe fn answer<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { to.write(value) };
    }
}
