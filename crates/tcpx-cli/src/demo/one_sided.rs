//! The parts of the demo in which one process alone moves bytes, in and out of the other's window.

use std::time::Duration;

use tcpx::{Connection, RegionSlice, Rights, WindowKey};

use crate::error::Error;

/// Pieces of a batch.
pub(super) const PIECES: usize = 64;

/// What the owner of the window is notified of.
const DONE: &[u8] = b"done";

/// How long one look for a notification takes; the connection's own limits bound all of them.
const LOOK: Duration = Duration::from_secs(1);

/// How long the peer may take to let go of a window after it has said that it is done.
const LETTING_GO: Duration = Duration::from_secs(10);

/// Exposes the memory, gives its key to the peer, and returns when that has said that it is done.
pub(super) fn lend(
    connection: &Connection,
    slice: RegionSlice,
    rights: Rights,
) -> Result<(), Error> {
    let window = connection.expose(slice, rights)?;
    connection.notify(&window.key().to_bytes())?.wait()?;
    let told = notification(connection)?;
    if told != DONE {
        return Err(Error::Unexpected {
            expected: "the notification that the window was used",
            arrived: format!("{} other bytes", told.len()),
        });
    }
    window.revoke(LETTING_GO)?;
    Ok(())
}

/// Puts the memory into the peer's window, in so many pieces of which the last come first, and
/// notifies it; how long that took.
pub(super) fn put(
    connection: &Connection,
    slice: RegionSlice,
    pieces: usize,
) -> Result<Duration, Error> {
    let key = key(connection)?;
    let piece = slice.len().div_ceil(pieces).max(1);
    let mut batch = connection.batch().notify(DONE);
    for start in (0..slice.len()).step_by(piece).rev() {
        let part = slice.slice(start..slice.len().min(start + piece));
        let part = part.map_err(Error::memory("take a piece"))?;
        batch = batch.put(part, &key, start as u64);
    }
    Ok(batch.start()?.wait()?.elapsed)
}

/// Gets the peer's window into the memory, and notifies it; how long that took.
pub(super) fn get(connection: &Connection, slice: RegionSlice) -> Result<Duration, Error> {
    let key = key(connection)?;
    let get = connection.get(slice, &key, 0).notify(DONE);
    Ok(get.start()?.wait()?.elapsed)
}

fn key(connection: &Connection) -> Result<WindowKey, Error> {
    let bytes = notification(connection)?;
    WindowKey::from_bytes(&bytes).map_err(|error| Error::Unexpected {
        expected: "the key of the peer's window",
        arrived: error.to_string(),
    })
}

fn notification(connection: &Connection) -> Result<Vec<u8>, Error> {
    loop {
        if let Some(bytes) = connection.notification(LOOK)? {
            return Ok(bytes);
        }
    }
}
