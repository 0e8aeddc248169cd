//! Sending pages instead of copies of them.
//!
//! `vmsplice` puts references to a chunk's pages into a pipe, and `splice` moves them into the socket:
//! the sender copies nothing, and the receiver or the card reads the chunk where it lies. The price: the
//! chunk must stay as it is until the peer has read it, which only the peer can tell.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with};

use crate::socket::{self, Moved, Span};

/// Most bytes in the pipe: a chunk of the default size.
const PIPE_BYTES: usize = 256 << 10;
/// With a smaller pipe, which a user with many of them gets, copying costs less than the calls.
const MIN_PIPE_BYTES: usize = 64 << 10;
/// Pipes of the process. All together take a quarter of the 64 MiB after which Linux gives a user who is
/// not root small ones only.
const MOST_PIPES: usize = 64;

static PIPES: AtomicUsize = AtomicUsize::new(0);

/// One of the pipes that the process may have.
#[derive(Debug)]
struct Permit;

impl Permit {
    fn take() -> io::Result<Self> {
        let permit = Self;
        if PIPES.fetch_add(1, Ordering::Relaxed) < MOST_PIPES {
            return Ok(permit);
        }
        Err(io::Error::other(format!(
            "the lanes of this process have {MOST_PIPES} pipes, the most they take"
        )))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        PIPES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A pipe between chunks and one socket.
#[derive(Debug)]
pub(super) struct Splice {
    read: OwnedFd,
    write: OwnedFd,
    /// Bytes in the pipe: the first of what is to be sent next.
    loaded: usize,
    _permit: Permit,
}

impl Splice {
    pub(super) fn new() -> io::Result<Self> {
        let permit = Permit::take()?;
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let _ = fcntl_setpipe_size(&write, PIPE_BYTES);
        if fcntl_getpipe_size(&write)? < MIN_PIPE_BYTES {
            return Err(io::Error::other(
                "the user's pipes are at their limit; raise fs.pipe-user-pages-soft",
            ));
        }
        Ok(Self {
            read,
            write,
            loaded: 0,
            _permit: permit,
        })
    }

    /// Bytes that it has taken and the socket has not.
    pub(super) const fn is_loaded(&self) -> bool {
        self.loaded > 0
    }

    /// Moves bytes of `span` to the socket. Call it with the rest until there is none: what an earlier
    /// call has loaded is the beginning of that rest. An error while nothing is loaded: the bytes can be
    /// sent in another way.
    ///
    /// # Safety
    /// The span is readable memory, which nobody writes to before the peer has read it.
    pub(super) unsafe fn send(&mut self, stream: &TcpStream, span: Span) -> io::Result<Moved> {
        if self.loaded == 0 {
            // SAFETY: the caller vouches for the span; the pages stay alive by the pipe's references.
            match unsafe { socket::load_pipe(&self.write, span.first(PIPE_BYTES)) } {
                Moved::Bytes(bytes) => self.loaded = bytes,
                Moved::Broken(error) => return Err(error),
                // An empty pipe has room.
                Moved::Later | Moved::End => {
                    return Err(io::Error::other("an empty pipe took nothing"));
                }
            }
        }
        let moved = socket::move_pipe(
            &self.read,
            stream.as_raw_fd(),
            self.loaded,
            span.len() > self.loaded,
        );
        if let Moved::Bytes(bytes) = moved {
            self.loaded = self.loaded.saturating_sub(bytes);
        }
        Ok(moved)
    }
}

/// Keeps a `splice` to a lane that the peer has closed from ending the process: unlike a send, it cannot
/// be told to raise no `SIGPIPE`. For threads of our own.
pub(super) fn ignore_broken_pipes() {
    // SAFETY: the set lives on the stack and is initialised before it is read; only this thread's mask
    // changes.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// The limit is the process's.
    static TURN: Mutex<()> = Mutex::new(());

    #[test]
    fn bytes_arrive_in_order_however_full_the_socket_is() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = (0..1_000_003).map(|at| (at / 7 % 251) as u8).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        to.set_nonblocking(true).unwrap();
        let (mut from, _) = listener.accept().unwrap();
        // An odd start and an odd length.
        let whole = Span::of(&bytes[3..]);
        let mut splice = Splice::new().unwrap();
        let (mut sent, mut got) = (0, Vec::new());
        while sent < whole.len() {
            // SAFETY: `bytes` outlives the reading below and does not change.
            match unsafe { splice.send(&to, whole.from(sent)) }.unwrap() {
                Moved::Bytes(bytes) => sent += bytes,
                Moved::Later => {
                    let mut some = vec![0; 65_536];
                    let count = from.read(&mut some).unwrap();
                    got.extend_from_slice(&some[..count]);
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(!splice.is_loaded());
        drop((splice, to));
        from.read_to_end(&mut got).unwrap();
        assert_eq!(got, bytes[3..]);
    }

    #[test]
    fn a_pipe_beyond_the_limit_is_refused_and_a_dropped_one_makes_room() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut permits: Vec<_> = (0..MOST_PIPES).map_while(|_| Permit::take().ok()).collect();
        assert!(Splice::new().is_err());
        permits.pop();
        assert!(Splice::new().is_ok());
    }
}
