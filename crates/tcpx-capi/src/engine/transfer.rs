//! Sends, receives, puts, gets, notifications, and their ends.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx::{After, MemoryKind, Report, Transfer as Started};

use super::failure::{again, guard};
use super::options::TransferOptions;
use super::region::slice;
use super::text::{answer, bytes as bytes_of, duration, needed};
use super::types::*;
use super::window::window_key;
use crate::error::{Failure, Outcome};
use crate::handles::{self, Object};

/// A waiting thread makes sure this often that the engine lives.
const LOOK: Duration = Duration::from_secs(1);

/// A transfer, and whether its end is reported to a queue.
#[derive(Debug)]
pub(crate) struct Transfer {
    started: Started,
    queued: AtomicBool,
}

/// Gives a transfer to C.
///
/// # Safety
/// `transfer` can be written.
unsafe fn enter(started: Started, transfer: *mut *mut tcpx_transfer) -> Outcome<()> {
    let made = Transfer {
        started,
        queued: AtomicBool::new(false),
    };
    // SAFETY: the caller's promise.
    unsafe { handles::enter(Object::Transfer(Arc::new(made)), transfer) }
}

pub(super) const NO_REPORT: tcpx_report = tcpx_report {
    bytes: 0,
    nanoseconds: 0,
    level: 0,
    has_digest: 0,
    digest: 0,
    reserved0: 0,
    reserved: [0; 4],
};

pub(super) fn report_of(report: &Report) -> tcpx_report {
    tcpx_report {
        bytes: report.bytes,
        nanoseconds: u64::try_from(report.elapsed.as_nanos()).unwrap_or(u64::MAX),
        level: match report.level {
            tcpx::Level::Sent => TCPX_LEVEL_SENT,
            tcpx::Level::Placed => TCPX_LEVEL_PLACED,
            tcpx::Level::Verified => TCPX_LEVEL_VERIFIED,
        },
        has_digest: c_int::from(report.digest.is_some()),
        digest: report.digest.unwrap_or_default(),
        ..NO_REPORT
    }
}

/// Starts a send of `bytes` bytes from `offset` of a region; it meets the peer's receives of the
/// same tag in the order of both. Returns at once. `options` may be NULL.
///
/// Until the transfer has ended nobody may write these bytes.
///
/// # Safety
/// `options` is NULL or filled; `transfer` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_send(
    connection: *mut tcpx_connection,
    region: *mut tcpx_region,
    offset: usize,
    bytes: usize,
    tag: u64,
    options: *const tcpx_transfer_options,
    transfer: *mut *mut tcpx_transfer,
) -> c_int {
    guard("tcpx_send", || {
        needed("transfer", transfer)?;
        let (_, connection) = handles::connection(connection)?;
        // SAFETY: the caller's promise.
        let options = unsafe { TransferOptions::new(options) }?.without_notification()?;
        let slice = slice(region, offset, bytes)?;
        let mut send = connection.connection.send(slice, tag);
        send = send.level(options.level).after(options.after);
        if let Some(deadlines) = options.deadlines {
            send = send.deadlines(deadlines);
        }
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { enter(send.start()?, transfer) }
    })
}

/// Starts a receive into `bytes` bytes from `offset` of a region, at least as many as the matching
/// send has: the report says how many came. Returns at once. `options` may be NULL.
///
/// Until the transfer has ended nobody may touch these bytes. A receive fails after 30 s without
/// its send, unless `stall_ms` or `timeout_ms` says otherwise.
///
/// # Safety
/// `options` is NULL or filled; `transfer` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_receive(
    connection: *mut tcpx_connection,
    region: *mut tcpx_region,
    offset: usize,
    bytes: usize,
    tag: u64,
    options: *const tcpx_transfer_options,
    transfer: *mut *mut tcpx_transfer,
) -> c_int {
    guard("tcpx_receive", || {
        needed("transfer", transfer)?;
        let (_, connection) = handles::connection(connection)?;
        // SAFETY: the caller's promise.
        let options = unsafe { TransferOptions::new(options) }?.without_notification()?;
        let slice = slice(region, offset, bytes)?;
        let mut receive = connection.connection.receive(slice, tag);
        receive = receive.level(options.level).after(options.after);
        if let Some(deadlines) = options.deadlines {
            receive = receive.deadlines(deadlines);
        }
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { enter(receive.start()?, transfer) }
    })
}

/// Starts a write of `bytes` bytes from `offset` of a region into the peer's window, from
/// `window_offset` on. The peer's program takes no part; the transfer succeeds when every byte is
/// there. `key` is what tcpx_window_key gave at the peer. `options` may be NULL.
///
/// # Safety
/// The key can be read; `options` is NULL or filled; `transfer` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_put(
    connection: *mut tcpx_connection,
    region: *mut tcpx_region,
    offset: usize,
    bytes: usize,
    key: *const c_void,
    key_bytes: usize,
    window_offset: u64,
    options: *const tcpx_transfer_options,
    transfer: *mut *mut tcpx_transfer,
) -> c_int {
    let piece = tcpx_piece {
        operation: TCPX_PUT,
        reserved: 0,
        region,
        offset,
        bytes,
        key,
        key_bytes,
        window_offset,
    };
    guard("tcpx_put", || {
        // SAFETY: the caller's promise.
        unsafe { start(connection, &[piece], options, transfer) }
    })
}

/// Starts a read of `bytes` bytes from the peer's window, from `window_offset` on, into a region
/// from `offset` on. Otherwise as tcpx_put.
///
/// # Safety
/// As for tcpx_put.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_get(
    connection: *mut tcpx_connection,
    region: *mut tcpx_region,
    offset: usize,
    bytes: usize,
    key: *const c_void,
    key_bytes: usize,
    window_offset: u64,
    options: *const tcpx_transfer_options,
    transfer: *mut *mut tcpx_transfer,
) -> c_int {
    let piece = tcpx_piece {
        operation: TCPX_GET,
        reserved: 0,
        region,
        offset,
        bytes,
        key,
        key_bytes,
        window_offset,
    };
    guard("tcpx_get", || {
        // SAFETY: the caller's promise.
        unsafe { start(connection, &[piece], options, transfer) }
    })
}

/// Starts puts and gets that end together, as one transfer, in no order among them: with the first
/// error, if there is one. All of them are checked before the first byte moves.
///
/// # Safety
/// `pieces` has `count` elements whose keys can be read; `options` is NULL or filled; `transfer` is
/// NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_batch(
    connection: *mut tcpx_connection,
    pieces: *const tcpx_piece,
    count: usize,
    options: *const tcpx_transfer_options,
    transfer: *mut *mut tcpx_transfer,
) -> c_int {
    guard("tcpx_batch", || {
        if count == 0 {
            return Err(Failure::argument("count is 0: pass at least one piece"));
        }
        needed("pieces", pieces)?;
        if count > isize::MAX as usize / size_of::<tcpx_piece>() {
            return Err(Failure::argument(format!("{count} pieces")));
        }
        // SAFETY: not NULL, `count` elements by the caller's promise, of a length that a slice may
        // have.
        let pieces = unsafe { std::slice::from_raw_parts(pieces, count) };
        // SAFETY: the caller's promise.
        unsafe { start(connection, pieces, options, transfer) }
    })
}

/// # Safety
/// As for [`tcpx_batch`].
unsafe fn start(
    connection: *mut tcpx_connection,
    pieces: &[tcpx_piece],
    options: *const tcpx_transfer_options,
    transfer: *mut *mut tcpx_transfer,
) -> Outcome<()> {
    needed("transfer", transfer)?;
    let (_, connection) = handles::connection(connection)?;
    // SAFETY: the caller's promise.
    let options = unsafe { TransferOptions::new(options) }?;
    let mut batch = connection.connection.batch().level(options.level);
    let mut on_gpu = false;
    for (index, piece) in pieces.iter().enumerate() {
        let of_piece = |failure: Failure| match pieces.len() {
            1 => failure,
            _ => failure.about(&format!("piece {index}")),
        };
        let slice = slice(piece.region, piece.offset, piece.bytes).map_err(of_piece)?;
        // SAFETY: the caller's promise.
        let key = unsafe { window_key(piece.key, piece.key_bytes) }.map_err(of_piece)?;
        on_gpu |= matches!(slice.kind(), MemoryKind::Cuda { .. });
        batch = match (piece.operation, piece.reserved) {
            (TCPX_PUT, 0) => batch.put(slice, &key, piece.window_offset),
            (TCPX_GET, 0) => batch.get(slice, &key, piece.window_offset),
            (operation, _) => {
                return Err(of_piece(Failure::argument(format!(
                    "operation is {operation}: pass TCPX_PUT or TCPX_GET, and 0 for reserved"
                ))));
            }
        };
    }
    if on_gpu || options.after != After::DefaultStreams {
        batch = batch.after(options.after);
    }
    if let Some(deadlines) = options.deadlines {
        batch = batch.deadlines(deadlines);
    }
    if let Some(notification) = options.notification {
        batch = batch.notify(notification);
    }
    // SAFETY: not NULL, and the caller lets us write there.
    unsafe { enter(batch.start()?, transfer) }
}

/// Sends `bytes` bytes, at most TCPX_NOTIFICATION_MAX, that the peer's program gets from
/// tcpx_notification. The transfer ends when they wait there.
///
/// # Safety
/// `bytes` bytes at `data` can be read; `transfer` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_notify(
    connection: *mut tcpx_connection,
    data: *const c_void,
    bytes: usize,
    transfer: *mut *mut tcpx_transfer,
) -> c_int {
    guard("tcpx_notify", || {
        needed("transfer", transfer)?;
        let (_, connection) = handles::connection(connection)?;
        // SAFETY: the caller's promise.
        let data = unsafe { bytes_of("data", data, bytes) }?;
        let started = connection.connection.notify(data)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { enter(started, transfer) }
    })
}

/// Whether a transfer has ended: 1 in `*done` if so. Never blocks. An error means that the transfer
/// has failed with it. `report` may be NULL; it is filled when the transfer has succeeded.
///
/// # Safety
/// `done` and `report` are NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_test(
    transfer: *mut tcpx_transfer,
    done: *mut c_int,
    report: *mut tcpx_report,
) -> c_int {
    guard("tcpx_transfer_test", || {
        needed("done", done)?;
        let (_, transfer) = handles::transfer(transfer)?;
        let outcome = transfer.started.test();
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { done.write(c_int::from(outcome.is_some())) };
        if let Some(outcome) = outcome {
            let ended = report_of(&outcome?);
            // SAFETY: the caller's promise.
            unsafe { answer(report, ended) };
        }
        Ok(())
    })
}

/// Waits for the end of a transfer, at most `timeout_ms`: TCPX_AGAIN when it still runs then. With
/// TCPX_FOREVER the transfer's own deadlines bound the wait. Any other error is how it failed. The
/// answer stays the same however often it is asked for; `report` may be NULL.
///
/// # Safety
/// `report` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_wait(
    transfer: *mut tcpx_transfer,
    timeout_ms: u32,
    report: *mut tcpx_report,
) -> c_int {
    guard("tcpx_transfer_wait", || {
        let (_, transfer) = handles::transfer(transfer)?;
        let until = Instant::now() + duration(timeout_ms);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if let Some(outcome) = transfer.started.wait_timeout(left.min(LOOK)) {
                let ended = report_of(&outcome?);
                // SAFETY: the caller's promise.
                unsafe { answer(report, ended) };
                return Ok(());
            }
            if left <= LOOK {
                return Err(again(
                    "the transfer still runs after the time given: wait again, cancel or release it",
                ));
            }
        }
    })
}

/// Has a queue told of the end of a transfer, under `key`: at once if it has ended. The handle
/// stays; released now, the transfer runs on, and only its completion tells how it ended. Once for
/// each transfer.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_transfer_queue(
    transfer: *mut tcpx_transfer,
    queue: *mut tcpx_queue,
    key: u64,
) -> c_int {
    guard("tcpx_transfer_queue", || {
        let (_, transfer) = handles::transfer(transfer)?;
        let (_, queue) = handles::queue(queue)?;
        if transfer.queued.swap(true, Ordering::AcqRel) {
            return Err(Failure::usage(
                "the transfer reports to a queue: poll that, or wait for the transfer alone",
            ));
        }
        transfer.started.report_to(&queue, key);
        Ok(())
    })
}

/// Asks for an early end. The transfer still ends once: with TCPX_ERR_CANCELLED, or as it would
/// have if that came first.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_transfer_cancel(transfer: *mut tcpx_transfer) -> c_int {
    guard("tcpx_transfer_cancel", || {
        let (_, transfer) = handles::transfer(transfer)?;
        transfer.started.cancel();
        Ok(())
    })
}

/// Bytes placed so far, and bytes in all (0 until a receive has met its send). Each may be NULL.
///
/// # Safety
/// `bytes_done` and `bytes_total` are NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_progress(
    transfer: *mut tcpx_transfer,
    bytes_done: *mut u64,
    bytes_total: *mut u64,
) -> c_int {
    guard("tcpx_transfer_progress", || {
        let (_, transfer) = handles::transfer(transfer)?;
        let progress = transfer.started.progress();
        // SAFETY: the caller's promise.
        unsafe {
            answer(bytes_done, progress.bytes_done);
            answer(bytes_total, progress.bytes_total);
        }
        Ok(())
    })
}

/// Ends the handle. A transfer that runs is cancelled, unless it reports to a queue; its memory
/// stays in use until nothing points at it.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_transfer_release(transfer: *mut tcpx_transfer) -> c_int {
    guard("tcpx_transfer_release", || {
        let (handle, transfer) = handles::transfer(transfer)?;
        handles::take(handle)?;
        // Another thread may be waiting for it, and holds it.
        if !transfer.queued.load(Ordering::Acquire) && transfer.started.test().is_none() {
            transfer.started.cancel();
        }
        Ok(())
    })
}
