//! A connection to one peer.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_memory::lock;

use super::failure::{again, guard};
use super::text::{answer, duration, give, give_text, needed};
use super::types::{tcpx_connection, tcpx_statistics};
use crate::error::Outcome;
use crate::handles::{self, Object};

/// A waiting thread looks this often whether its connection was closed.
const LOOK: Duration = Duration::from_millis(500);
/// Of a close that nobody waits for.
const GOODBYE: Duration = Duration::from_secs(5);

/// A connection, and notifications that a program had no room for.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(super) connection: tcpx::Connection,
    unread: Mutex<VecDeque<Vec<u8>>>,
}

/// Gives a connection to C.
///
/// # Safety
/// `connection` can be written.
pub(super) unsafe fn enter(
    made: tcpx::Connection,
    connection: *mut *mut tcpx_connection,
) -> Outcome<()> {
    let made = Connection {
        connection: made,
        unread: Mutex::default(),
    };
    // SAFETY: the caller's promise.
    unsafe { handles::enter(Object::Connection(Arc::new(made)), connection) }
}

/// The peer's address, "ADDRESS:PORT".
///
/// # Safety
/// `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_connection_peer(
    connection: *mut tcpx_connection,
    buffer: *mut c_char,
    room: usize,
    needed_bytes: *mut usize,
) -> c_int {
    guard("tcpx_connection_peer", || {
        let (_, connection) = handles::connection(connection)?;
        let peer = connection.connection.peer().address.to_string();
        // SAFETY: the caller's promise.
        unsafe { give_text(&peer, buffer, room, needed_bytes) }
    })
}

/// Which path the bytes take, and why, in one line for a person.
///
/// # Safety
/// `buffer` is NULL or has `room` bytes; `needed_bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_connection_path(
    connection: *mut tcpx_connection,
    buffer: *mut c_char,
    room: usize,
    needed_bytes: *mut usize,
) -> c_int {
    guard("tcpx_connection_path", || {
        let (_, connection) = handles::connection(connection)?;
        // SAFETY: the caller's promise.
        unsafe { give_text(&connection.connection.path(), buffer, room, needed_bytes) }
    })
}

/// The connection's counters.
///
/// # Safety
/// `statistics` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_connection_statistics(
    connection: *mut tcpx_connection,
    statistics: *mut tcpx_statistics,
) -> c_int {
    guard("tcpx_connection_statistics", || {
        needed("statistics", statistics)?;
        let (_, connection) = handles::connection(connection)?;
        let counted = connection.connection.statistics();
        let filled = tcpx_statistics {
            bytes_sent: counted.bytes_sent,
            bytes_received: counted.bytes_received,
            chunks_sent: counted.chunks_sent,
            chunks_received: counted.chunks_received,
            chunks_resent: counted.chunks_resent,
            lanes_lost: counted.lanes_lost,
            lanes_restored: counted.lanes_restored,
            streams: counted.streams,
            control_bytes_sent: counted.control_bytes_sent,
            control_bytes_received: counted.control_bytes_received,
            reserved: [0; 6],
        };
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { statistics.write(filled) };
        Ok(())
    })
}

/// Makes all the progress that can be made now, without waiting, and says in `*more` whether there
/// may be more to do at once (1 or 0). For connections with TCPX_PROGRESS_MANUAL; others need it
/// not.
///
/// # Safety
/// `more` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_connection_progress(
    connection: *mut tcpx_connection,
    more: *mut c_int,
) -> c_int {
    guard("tcpx_connection_progress", || {
        let (_, connection) = handles::connection(connection)?;
        let found = connection.connection.progress()?;
        // SAFETY: the caller's promise.
        unsafe { answer(more, found.into()) };
        Ok(())
    })
}

/// A descriptor that is readable while tcpx_connection_progress finds something to do, for poll and
/// epoll: make progress until there is no more, then wait. It is the connection's: neither read nor
/// close it. Connections with TCPX_PROGRESS_MANUAL have one, until they end.
///
/// # Safety
/// `descriptor` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_connection_progress_descriptor(
    connection: *mut tcpx_connection,
    descriptor: *mut c_int,
) -> c_int {
    guard("tcpx_connection_progress_descriptor", || {
        needed("descriptor", descriptor)?;
        let (_, connection) = handles::connection(connection)?;
        let found = connection.connection.progress_fd()?.as_raw_fd();
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { descriptor.write(found) };
        Ok(())
    })
}

/// The peer's next notification, in the order in which they were completed: up to `room` bytes of
/// it at `buffer`, and how many it has in `*bytes`. TCPX_AGAIN when there is none within
/// `timeout_ms`. With too little room it is TCPX_ERR_ARGUMENT, and the notification stays the next
/// one; TCPX_NOTIFICATION_MAX bytes are always enough.
///
/// # Safety
/// `buffer` is NULL or has `room` bytes; `bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_notification(
    connection: *mut tcpx_connection,
    timeout_ms: u32,
    buffer: *mut c_void,
    room: usize,
    bytes: *mut usize,
) -> c_int {
    guard("tcpx_notification", || {
        needed("bytes", bytes)?;
        let until = Instant::now() + duration(timeout_ms);
        loop {
            // Each look finds out whether it was closed.
            let (_, connection) = handles::connection(connection)?;
            let left = until.saturating_duration_since(Instant::now());
            let unread = lock(&connection.unread).pop_front();
            let found = match unread {
                Some(found) => Some(found),
                None => connection.connection.notification(left.min(LOOK))?,
            };
            if let Some(found) = found {
                // SAFETY: the caller's promise.
                let given = unsafe { give(&found, buffer.cast(), room, bytes) };
                if given.is_err() {
                    lock(&connection.unread).push_front(found);
                }
                return given;
            }
            if left <= LOOK {
                return Err(again("no notification came in the time given: call again"));
            }
        }
    })
}

/// Closes a connection: running transfers are finished first, as long as that takes within
/// `timeout_ms`, and the peer says goodbye too. Returns when both sides are done. What is left
/// after `timeout_ms` ends then. 0 leaves all that to the library, which takes five seconds at
/// most, and always succeeds.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_connection_close(
    connection: *mut tcpx_connection,
    timeout_ms: u32,
) -> c_int {
    guard("tcpx_connection_close", || {
        let (handle, connection) = handles::connection(connection)?;
        handles::take(handle)?;
        let closing = connection.connection.clone();
        drop(connection);
        if timeout_ms == 0 {
            return Ok(closing.begin_close(GOODBYE)?);
        }
        Ok(closing.close(duration(timeout_ms))?)
    })
}
