//! Memory that leaves by its pages, see `PagePipe`. Only the peer's acknowledgement tells that it may change.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::page_pipe::PagePipe;

use crate::socket_calls::{self as calls, Moved, Part, Span};

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

    /// Moves bytes of `span` to the socket. Call it with the rest until there is none: what an earlier call has
    /// loaded is the beginning of that rest.
    ///
    /// # Errors
    /// The system refuses. While nothing [is loaded](Self::is_loaded), the bytes can be sent in another
    /// way, and this pipe be dropped.
    ///
    /// # Safety
    /// The span is readable memory.
    unsafe fn send(&mut self, socket: impl AsFd, span: Span) -> io::Result<Moved> {
        // SAFETY: the caller vouches for the span.
        let moved = unsafe { self.pipe.send(socket.as_fd(), span.start(), span.len()) }?;
        Ok(moved.map_or(Moved::WouldBlock, Moved::Bytes))
    }
}

/// How one lane lends memory: by a pipe that it makes when it first does, and else by copying, once the system
/// has refused.
#[derive(Debug)]
pub enum Lender {
    /// Not tried yet; bytes that the pipe takes at most.
    Untried(usize),
    /// By pages.
    Ready(Splice),
    /// By copying; with the reason, until it was [taken](Self::take_refusal).
    Refused(Option<io::Error>),
}

/// What [`Lender::send`] came to.
#[derive(Debug)]
pub struct Sent {
    /// As of any call.
    pub moved: Moved,
    /// Pages of the payload were lent: the kernel may refer to them until the peer has read them.
    pub lent: bool,
}

impl Lender {
    /// Sends `head`, and then `payload` without a copy, in as many calls as it takes: each gets what is left.
    ///
    /// # Errors
    /// The connection is broken.
    ///
    /// # Safety
    /// The payload is readable memory.
    pub unsafe fn send(
        &mut self,
        socket: impl AsFd,
        head: &[u8],
        payload: Span,
    ) -> io::Result<Sent> {
        if let Self::Untried(bytes) = *self {
            *self = match Splice::new(bytes) {
                Ok(splice) => Self::Ready(splice),
                Err(error) => Self::Refused(Some(error)),
            };
        }
        let copied = |moved| Sent { moved, lent: false };
        if let Self::Ready(splice) = self {
            if !head.is_empty() {
                return calls::send_more(socket, head).map(copied);
            }
            // SAFETY: the caller vouches for the payload.
            match unsafe { splice.send(&socket, payload) } {
                Ok(moved) => {
                    let lent = matches!(moved, Moved::Bytes(_));
                    return Ok(Sent { moved, lent });
                }
                // What the pipe has taken and the socket has not is still to be sent.
                Err(error) if splice.is_loaded() || !is_refusal(&error) => return Err(error),
                Err(error) => *self = Self::Refused(Some(error)),
            }
        }
        // SAFETY: the head is borrowed; the caller vouches for the payload.
        unsafe { calls::send_spans(socket, &[Span::of(head), payload]) }.map(copied)
    }

    /// As [`send`](Self::send), of the part of a slice.
    ///
    /// # Errors
    /// The connection is broken, or the part is not readable.
    pub fn send_part(
        &mut self,
        socket: impl AsFd,
        head: &[u8],
        part: Part<'_>,
    ) -> io::Result<Sent> {
        let span = part.span()?.first(calls::WIRE_CALL);
        // SAFETY: a live range: `part.slice` keeps it for the call.
        unsafe { self.send(socket, head, span) }
    }

    /// Why it copies from now on, the first time that it is asked.
    pub fn take_refusal(&mut self) -> Option<io::Error> {
        match self {
            Self::Refused(error) => error.take(),
            Self::Untried(_) | Self::Ready(_) => None,
        }
    }
}

/// The system does not send pages in this way, whatever the state of the connection.
fn is_refusal(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
            | io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::NetworkDown
    )
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
