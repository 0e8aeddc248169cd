//! Chunks that leave by their pages, see [`PagePipe`]. Only the peer's answer tells that a chunk may change.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx_memory::PagePipe;

use crate::socket::{Moved, Span};

/// Most bytes in the pipe: a chunk of the default size.
const PIPE_BYTES: usize = 256 << 10;
/// With a smaller pipe, which a user with many of them gets, copying costs less than the calls.
const MIN_PIPE_BYTES: usize = 64 << 10;
/// Pipes of the process. All together take a quarter of the 64 MiB after which Linux gives a user who is
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

/// A pipe between chunks and one socket.
#[derive(Debug)]
pub(super) struct Splice {
    pipe: PagePipe,
    _permit: Permit,
}

impl Splice {
    pub(super) fn new() -> io::Result<Self> {
        Self::counted_by(&PIPES)
    }

    fn counted_by(pipes: &'static AtomicUsize) -> io::Result<Self> {
        let permit = Permit::take(pipes)?;
        let pipe = PagePipe::new(PIPE_BYTES)?;
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
    pub(super) const fn is_loaded(&self) -> bool {
        self.pipe.is_loaded()
    }

    /// Moves bytes of `span` to the socket. Call it with the rest until there is none: what an earlier
    /// call has loaded is the beginning of that rest. An error while nothing is loaded: the bytes can be
    /// sent in another way.
    ///
    /// # Safety
    /// The span is readable memory, which nobody writes to before the peer has read it.
    pub(super) unsafe fn send(&mut self, stream: &TcpStream, span: Span) -> io::Result<Moved> {
        // SAFETY: the caller vouches for the span.
        let moved = unsafe { self.pipe.send(stream.as_fd(), span.start(), span.len()) }?;
        Ok(moved.map_or(Moved::Later, Moved::Bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_beyond_the_limit_is_refused_and_a_dropped_one_makes_room() {
        static PIPES: AtomicUsize = AtomicUsize::new(0);
        let mut permits: Vec<_> = (0..MOST_PIPES)
            .map(|_| Permit::take(&PIPES).unwrap())
            .collect();
        assert!(Splice::counted_by(&PIPES).is_err());
        permits.pop();
        let last = Splice::counted_by(&PIPES).unwrap();
        assert!(Splice::counted_by(&PIPES).is_err());
        drop((last, permits));
        assert_eq!(PIPES.load(Ordering::Relaxed), 0);
    }
}
