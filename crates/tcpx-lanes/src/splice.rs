//! Memory that leaves by its pages, see [`PagePipe`]. Only the peer's acknowledgement tells that it may change.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx_memory::PagePipe;

use crate::socket_calls::{Moved, Part, Span};

/// With a smaller pipe, which a user with many of them gets, copying costs less than the calls.
const MIN_PIPE_BYTES: usize = 64 << 10;
/// Pipes of the process. With the largest, 64 of them take the 64 MiB after which Linux gives a user who is
/// not root small ones only.
const MOST_PIPES: usize = 64;

static PIPES: AtomicUsize = AtomicUsize::new(0);

/// One of the pipes that count together.
#[derive(Debug)]
struct Permit(&'static AtomicUsize);

impl Permit {
    fn take(pipes: &'static AtomicUsize) -> io::Result<Self> {
        let permit = Self(pipes);
        if pipes.fetch_add(1, Ordering::Relaxed) < MOST_PIPES {
            return Ok(permit);
        }
        Err(io::Error::other(format!(
            "the lanes of this process have {MOST_PIPES} pipes, the most they take"
        )))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A pipe between memory and one socket.
#[derive(Debug)]
pub struct Splice {
    pipe: PagePipe,
    _permit: Permit,
}

impl Splice {
    /// A pipe that takes at most `bytes` at a time.
    ///
    /// # Errors
    /// The system gives none that is worth it; send copies then.
    pub fn new(bytes: usize) -> io::Result<Self> {
        Self::counted_by(bytes, &PIPES)
    }

    fn counted_by(bytes: usize, pipes: &'static AtomicUsize) -> io::Result<Self> {
        let permit = Permit::take(pipes)?;
        let pipe = PagePipe::new(bytes)?;
        if pipe.capacity()? < MIN_PIPE_BYTES {
            return Err(io::Error::other(
                "the user's pipes are at their limit; raise fs.pipe-user-pages-soft",
            ));
        }
        Ok(Self {
            pipe,
            _permit: permit,
        })
    }

    /// Bytes that it has taken and the socket has not.
    pub const fn is_loaded(&self) -> bool {
        self.pipe.is_loaded()
    }

    /// Moves bytes of `part` to the socket. Call it with the rest until there is none: what an earlier
    /// call has loaded is the beginning of that rest.
    ///
    /// # Errors
    /// The system refuses. While nothing [is loaded](Self::is_loaded), the bytes can be sent in another
    /// way, and this pipe be dropped.
    pub fn send(&mut self, socket: impl AsFd, part: Part<'_>) -> io::Result<Moved> {
        let span = part.span()?;
        // SAFETY: a live range: `part.slice` keeps it for the call.
        unsafe { self.send_span(socket, span) }
    }

    /// As [`send`](Self::send), of memory that the caller vouches for.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    ///
    /// # Safety
    /// The span is readable memory.
    pub unsafe fn send_span(&mut self, socket: impl AsFd, span: Span) -> io::Result<Moved> {
        // SAFETY: the caller vouches for the span.
        let moved = unsafe { self.pipe.send(socket.as_fd(), span.start(), span.len()) }?;
        Ok(moved.map_or(Moved::WouldBlock, Moved::Bytes))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_beyond_the_limit_is_refused_and_a_dropped_one_makes_room() {
        static PIPES: AtomicUsize = AtomicUsize::new(0);
        let mut permits: Vec<_> = (0..MOST_PIPES)
            .map(|_| Permit::take(&PIPES).unwrap())
            .collect();
        assert!(Splice::counted_by(256 << 10, &PIPES).is_err());
        permits.pop();
        let last = Splice::counted_by(256 << 10, &PIPES).unwrap();
        assert!(Splice::counted_by(256 << 10, &PIPES).is_err());
        drop((last, permits));
        assert_eq!(PIPES.load(Ordering::Relaxed), 0);
    }
}
