//! Versions and result codes of the engine.

use std::ffi::{CStr, c_char, c_int};

/// Version of the header: its first number.
pub const TCPX_VERSION_MAJOR: c_int = 0;
/// The second one.
pub const TCPX_VERSION_MINOR: c_int = 2;
/// The third one.
pub const TCPX_VERSION_PATCH: c_int = 0;
/// Number of the binary interface, which the library's file name ends with (libtcpx.so.0). New
/// calls and new names for reserved fields leave it as it is; anything that a compiled program
/// could notice changes it.
pub const TCPX_ABI: c_int = 0;

const _: () = {
    assert!(same(env!("CARGO_PKG_VERSION_MAJOR"), TCPX_VERSION_MAJOR));
    assert!(same(env!("CARGO_PKG_VERSION_MINOR"), TCPX_VERSION_MINOR));
    assert!(same(env!("CARGO_PKG_VERSION_PATCH"), TCPX_VERSION_PATCH));
};

/// Whether the digits of `text` are those of `number`.
const fn same(text: &str, number: c_int) -> bool {
    matches!(c_int::from_str_radix(text, 10), Ok(read) if read == number)
}

/// Done.
pub const TCPX_OK: c_int = 0;
/// Nothing has failed: the time given to this call ran out before what it waited for came.
pub const TCPX_AGAIN: c_int = -1;
/// No connection came about: nobody listens there, another key, another network or version.
pub const TCPX_ERR_CONNECT: c_int = -2;
/// A deadline has passed; what it bounded has ended.
pub const TCPX_ERR_TIMED_OUT: c_int = -3;
/// The connection ended amid its work.
pub const TCPX_ERR_CONNECTION_LOST: c_int = -4;
/// One side closed the connection in order.
pub const TCPX_ERR_CLOSED: c_int = -5;
/// This program cancelled the transfer.
pub const TCPX_ERR_CANCELLED: c_int = -6;
/// The receive is smaller than the send; nothing was written. Both sides end with this.
pub const TCPX_ERR_TOO_LARGE: c_int = -7;
/// Source and destination differ.
pub const TCPX_ERR_CORRUPT: c_int = -8;
/// One transfer failed or was refused; the connection may live on.
pub const TCPX_ERR_TRANSFER: c_int = -9;
/// A setting, a key, or a piece of a window cannot work.
pub const TCPX_ERR_SETTING: c_int = -10;
/// Memory is in use, cannot be reached, or cannot be had.
pub const TCPX_ERR_MEMORY: c_int = -11;
/// The operating system refused something.
pub const TCPX_ERR_SYSTEM: c_int = -12;
/// A defect of libtcpx.
pub const TCPX_ERR_DEFECT: c_int = -13;
/// An argument is NULL, out of range or too small; nothing was done.
pub const TCPX_ERR_ARGUMENT: c_int = -32;
/// A handle that libtcpx did not give out, of another kind, or one that has ended; nothing was
/// done.
pub const TCPX_ERR_HANDLE: c_int = -33;
/// The call is not allowed now; nothing was done.
pub const TCPX_ERR_USAGE: c_int = -34;
/// This process is a fork's child, and libtcpx was in use before the fork; nothing was done.
pub const TCPX_ERR_FORKED: c_int = -35;

/// The library's version, "MAJOR.MINOR.PATCH"; valid for ever. Compare it with the header's.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// The library's TCPX_ABI. A program works with a library whose number is that of its header.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_abi() -> c_int {
    TCPX_ABI
}

/// The name of a code without its prefix, such as "TIMED_OUT"; valid for ever, never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_error_name(code: c_int) -> *const c_char {
    words(code).0.as_ptr()
}

/// What to do about a code, in one line; valid for ever, never NULL. tcpx_error_text says what
/// happened.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_error_advice(code: c_int) -> *const c_char {
    words(code).1.as_ptr()
}

/// Name and advice.
const fn words(code: c_int) -> (&'static CStr, &'static CStr) {
    match code {
        TCPX_OK => (c"OK", c"nothing is wrong"),
        TCPX_AGAIN => (c"AGAIN", c"call again, or cancel what you wait for"),
        TCPX_ERR_CONNECT => (
            c"CONNECT",
            c"check that the peer listens at this address with the same key and version; `tcpx doctor` finds firewalls",
        ),
        TCPX_ERR_TIMED_OUT => (
            c"TIMED_OUT",
            c"see which side the text says must act next; allow more time, or repair that side",
        ),
        TCPX_ERR_CONNECTION_LOST => (
            c"CONNECTION_LOST",
            c"see the peer's messages, then connect afresh and repeat what was not delivered",
        ),
        TCPX_ERR_CLOSED => (c"CLOSED", c"connect afresh"),
        TCPX_ERR_CANCELLED => (
            c"CANCELLED",
            c"start it again if it is still wanted; tcpx_error_delivered says what the destination holds",
        ),
        TCPX_ERR_TOO_LARGE => (
            c"TOO_LARGE",
            c"post a receive that is at least as long as the send",
        ),
        TCPX_ERR_CORRUPT => (
            c"CORRUPT",
            c"do not write the source, nor use the destination, while a transfer runs; if neither did, test the hosts' memory",
        ),
        TCPX_ERR_TRANSFER => (
            c"TRANSFER",
            c"see the text; the connection may be used on",
        ),
        TCPX_ERR_SETTING => (c"SETTING", c"correct what the text names"),
        TCPX_ERR_MEMORY => (
            c"MEMORY",
            c"wait for the transfers that use these bytes, or ask for less",
        ),
        TCPX_ERR_SYSTEM => (
            c"SYSTEM",
            c"check the limits on open files, threads and memory (`ulimit -a`)",
        ),
        TCPX_ERR_DEFECT => (
            c"DEFECT",
            c"close what the call was about, and report the text",
        ),
        TCPX_ERR_ARGUMENT => (c"ARGUMENT", c"correct the argument that the text names"),
        TCPX_ERR_HANDLE => (
            c"HANDLE",
            c"pass a handle that libtcpx gave out and that has not ended",
        ),
        TCPX_ERR_USAGE => (c"USAGE", c"see the text for what must come first"),
        TCPX_ERR_FORKED => (
            c"FORKED",
            c"use libtcpx in one process of a fork: begin after the fork, or replace the child with exec",
        ),
        _ => (c"UNKNOWN", c"libtcpx returns no such code"),
    }
}

/// Every code.
#[cfg(test)]
const ALL: [c_int; 18] = [
    TCPX_OK,
    TCPX_AGAIN,
    TCPX_ERR_CONNECT,
    TCPX_ERR_TIMED_OUT,
    TCPX_ERR_CONNECTION_LOST,
    TCPX_ERR_CLOSED,
    TCPX_ERR_CANCELLED,
    TCPX_ERR_TOO_LARGE,
    TCPX_ERR_CORRUPT,
    TCPX_ERR_TRANSFER,
    TCPX_ERR_SETTING,
    TCPX_ERR_MEMORY,
    TCPX_ERR_SYSTEM,
    TCPX_ERR_DEFECT,
    TCPX_ERR_ARGUMENT,
    TCPX_ERR_HANDLE,
    TCPX_ERR_USAGE,
    TCPX_ERR_FORKED,
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_has_a_name_and_an_advice_of_its_own() {
        let names: BTreeSet<_> = ALL.iter().map(|code| words(*code).0).collect();
        let advices: BTreeSet<_> = ALL.iter().map(|code| words(*code).1).collect();
        assert_eq!((names.len(), advices.len()), (ALL.len(), ALL.len()));
        assert!(!names.contains(words(1).0) && !names.contains(words(-14).0));
    }
}
