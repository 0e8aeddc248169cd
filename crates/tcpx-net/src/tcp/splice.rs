//! Slots that leave by their pages, see [`PagePipe`].
//!
//! A slot must stay as it is until the peer has read it, which only the peer's acknowledgement tells, see
//! [`TransmitTable`](super::transmit_table::TransmitTable).

use std::io;
use std::os::fd::BorrowedFd;

use tcpx_memory::PagePipe;

use super::io::{Moved, Part, WIRE_CALL, address};

/// A pipe between slots and one socket.
#[derive(Debug)]
pub(super) struct Splice(PagePipe);

impl Splice {
    pub(super) fn new() -> io::Result<Self> {
        PagePipe::new(WIRE_CALL).map(Self)
    }

    /// Moves bytes of `part` to the socket. Call it with the rest until there is none: what an earlier
    /// call has loaded is the beginning of that rest.
    ///
    /// # Errors
    /// The system refuses. What was not moved can be sent in another way, and this pipe be dropped.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>, part: Part<'_>) -> io::Result<Moved> {
        let start = address(&part)?;
        // SAFETY: a live range: `part.slice` keeps it for the call.
        let moved = unsafe { self.0.send(socket, start, part.len) }?;
        Ok(moved.map_or(Moved::WouldBlock, Moved::Bytes))
    }
}
