//! Memory that leaves by its pages, see `PagePipe`. Only the peer's acknowledgement tells that it
//! may change.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::page_pipe::PagePipe;
use crate::socket_calls::{self as calls, Moved, Part, Span};

/// With a smaller pipe, which a user with many of them gets, copying costs less than the calls.
const MIN_PIPE_BYTES: usize = 64 << 10;
/// Pipes of the process. With the largest, 64 of them take the 64 MiB after which Linux gives a
/// user who is not root small ones only.
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

/// A pipe that takes at most `bytes` at a time; none that is not worth it.
fn pipe(bytes: usize, pipes: &'static AtomicUsize) -> io::Result<(PagePipe, Permit)> {
    let permit = Permit::take(pipes)?;
    let pipe = PagePipe::new(bytes)?;
    if pipe.capacity()? < MIN_PIPE_BYTES {
        return Err(io::Error::other(
            "the user's pipes are at their limit; raise fs.pipe-user-pages-soft",
        ));
    }
    Ok((pipe, permit))
}

/// How one lane lends memory: by a pipe that it makes when it first does, and else by copying, once
/// the system has refused.
#[derive(Debug)]
pub struct Lender(State);

#[derive(Debug)]
enum State {
    /// Not tried yet; bytes that the pipe takes at most.
    Untried(usize),
    /// By pages.
    Ready(PagePipe, #[expect(dead_code, reason = "it is held")] Permit),
    /// By copying; with the reason, until it was [taken](Lender::take_refusal).
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
    /// One whose pipe takes at most `bytes` at a time.
    pub const fn new(bytes: usize) -> Self {
        Self(State::Untried(bytes))
    }

    /// One that copies.
    pub const fn never() -> Self {
        Self(State::Refused(None))
    }

    /// Sends `head`, and then `payload` without a copy, in as many calls as it takes: each gets
    /// what is left.
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
        if let State::Untried(bytes) = self.0 {
            self.0 = match pipe(bytes, &PIPES) {
                Ok((pipe, permit)) => State::Ready(pipe, permit),
                Err(error) => State::Refused(Some(error)),
            };
        }
        let copied = |moved| Sent { moved, lent: false };
        if let State::Ready(pipe, _) = &mut self.0 {
            if !head.is_empty() {
                return calls::send_more(socket, head).map(copied);
            }
            // SAFETY: the caller vouches for the payload.
            match unsafe { pipe.send(socket.as_fd(), payload) } {
                Ok(moved) => {
                    let lent = matches!(moved, Moved::Bytes(_));
                    return Ok(Sent { moved, lent });
                }
                // What the pipe has taken and the socket has not is still to be sent.
                Err(error) if pipe.is_loaded() || !is_refusal(&error) => return Err(error),
                Err(error) => self.0 = State::Refused(Some(error)),
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
        match &mut self.0 {
            State::Refused(error) => error.take(),
            State::Untried(_) | State::Ready(..) => None,
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
    fn a_pipe_beyond_the_limit_is_refused() {
        static PIPES: AtomicUsize = AtomicUsize::new(0);
        let mut permits: Vec<_> = (0..MOST_PIPES)
            .map(|_| Permit::take(&PIPES).unwrap())
            .collect();
        assert!(pipe(256 << 10, &PIPES).is_err());
        permits.pop();
        let last = pipe(256 << 10, &PIPES).unwrap();
        assert!(pipe(256 << 10, &PIPES).is_err());
        drop((last, permits));
        assert_eq!(PIPES.load(Ordering::Relaxed), 0);
    }
}
