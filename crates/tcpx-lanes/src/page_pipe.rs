//! Sending pages instead of copies of them.
//!
//! `vmsplice` puts references to a range's pages into a pipe, and `splice` moves them into a
//! socket: the sender copies nothing, and the receiver or the card reads the memory itself. The
//! price: the memory must not change until the peer has read it, which the kernel does not report.
//! Only the peer can.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::{
    PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice,
};

use crate::socket_calls::{Moved, Span};

/// A pipe between memory and one socket.
#[derive(Debug)]
pub(crate) struct PagePipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Most bytes that one load offers.
    bytes: usize,
    /// Bytes in the pipe: the first of what is to be sent next.
    loaded: usize,
}

impl PagePipe {
    /// A pipe for `bytes` bytes, or for fewer where the system gives no larger one; it works with
    /// any size, with more calls.
    ///
    /// # Errors
    /// The process has no descriptors left, or the user no pipes.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let _ = fcntl_setpipe_size(&write, bytes);
        Ok(Self {
            read,
            write,
            bytes,
            loaded: 0,
        })
    }

    /// Bytes that the system lets it hold.
    ///
    /// # Errors
    /// The system does not report it.
    pub(crate) fn capacity(&self) -> io::Result<usize> {
        Ok(fcntl_getpipe_size(&self.write)?)
    }

    /// Whether the pipe holds bytes that the socket has not taken.
    pub(crate) const fn is_loaded(&self) -> bool {
        self.loaded > 0
    }

    /// Moves some of `span` to the non-blocking `socket`. Call it with the rest until there is
    /// none: what an earlier call has loaded is the beginning of that rest.
    ///
    /// # Errors
    /// The system refuses. While nothing [is loaded](Self::is_loaded), the bytes can be sent in
    /// another way; otherwise what the pipe has taken is still to be sent.
    ///
    /// # Safety
    /// The span is readable memory. Pages that are written to before the peer has read them arrive
    /// changed.
    pub(crate) unsafe fn send(&mut self, socket: BorrowedFd<'_>, span: Span) -> io::Result<Moved> {
        if self.loaded == 0 {
            // SAFETY: the caller vouches for the span.
            self.loaded = unsafe { self.load(span.first(self.bytes)) }?;
        }
        let more = if span.len() > self.loaded {
            SpliceFlags::MORE
        } else {
            SpliceFlags::empty()
        };
        let flags = SpliceFlags::NONBLOCK | more;
        match retry_on_intr(|| splice(&self.read, None, socket, None, self.loaded, flags)) {
            Ok(moved) => {
                self.loaded = self.loaded.saturating_sub(moved);
                Ok(Moved::Bytes(moved))
            }
            Err(Errno::AGAIN) => Ok(Moved::WouldBlock),
            Err(error) => Err(error.into()),
        }
    }

    /// Puts references to pages into the empty pipe; how many of their bytes.
    ///
    /// # Safety
    /// The span is readable memory.
    unsafe fn load(&self, span: Span) -> io::Result<usize> {
        loop {
            // SAFETY: the caller vouches for the span, which is an iovec; its pages stay alive by
            // the references that the pipe takes.
            let loaded = unsafe {
                libc::vmsplice(
                    self.write.as_raw_fd(),
                    (&raw const span).cast(),
                    1,
                    libc::SPLICE_F_NONBLOCK,
                )
            };
            match usize::try_from(loaded) {
                // An empty pipe has room.
                Ok(0) => return Err(io::Error::other("an empty pipe took nothing")),
                Ok(loaded) => return Ok(loaded),
                Err(_) => {}
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Keeps a [`send`](Self::send) to a socket that the peer has closed from ending the process:
    /// unlike other ways of sending, it cannot be told to raise no `SIGPIPE`. It changes the
    /// calling thread's signal mask for good, so it is for threads of our own.
    pub(crate) fn ignore_broken_pipes() {
        // SAFETY: the set lives on the stack and is initialised before it is read; only this
        // thread's mask changes.
        unsafe {
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGPIPE);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Sends all of `bytes` and reads what the socket is full of, whenever it is.
    fn carry(bytes: &[u8], to: BorrowedFd<'_>, from: &mut impl Read) -> Vec<u8> {
        let mut pipe = PagePipe::new(256 << 10).unwrap();
        let (mut sent, mut got) = (0, Vec::new());
        while sent < bytes.len() {
            let rest = &bytes[sent..];
            // SAFETY: `bytes` outlives the reading and does not change.
            if let Moved::Bytes(moved) = unsafe { pipe.send(to, Span::of(rest)) }.unwrap() {
                sent += moved;
            } else {
                assert!(pipe.is_loaded());
                let mut some = [0; 65_536];
                let count = from.read(&mut some).unwrap();
                got.extend_from_slice(&some[..count]);
            }
        }
        assert!(!pipe.is_loaded());
        got
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at / 7 % 251) as u8).collect()
    }

    #[test]
    fn bytes_arrive_in_order_however_full_the_socket_is() {
        // An odd start and an odd length.
        let bytes = &pattern(1_000_003)[3..];
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        to.set_nonblocking(true).unwrap();
        let (mut from, _) = listener.accept().unwrap();
        let mut got = carry(bytes, to.as_fd(), &mut from);
        drop(to);
        from.read_to_end(&mut got).unwrap();
        assert_eq!(got, bytes);
    }

    #[test]
    fn what_the_peer_has_not_read_is_a_page_and_no_copy_of_it() {
        let mut bytes = vec![1_u8; 4096];
        let (to, mut from) = UnixStream::pair().unwrap();
        to.set_nonblocking(true).unwrap();
        carry(&bytes, to.as_fd(), &mut from);
        bytes.fill(2);
        std::hint::black_box(&bytes);
        let mut got = [0; 4096];
        from.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == 2));
    }

    #[test]
    fn a_peer_that_has_closed_is_an_error_and_no_signal() {
        std::thread::spawn(|| {
            PagePipe::ignore_broken_pipes();
            let (to, from) = UnixStream::pair().unwrap();
            drop(from);
            let bytes = pattern(4096);
            let mut pipe = PagePipe::new(4096).unwrap();
            // SAFETY: `bytes` outlives the pipe.
            let error = unsafe { pipe.send(to.as_fd(), Span::of(&bytes)) }.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
            assert!(pipe.is_loaded(), "the bytes are still to be sent");
            // SAFETY: the set lives on the stack and is initialised before it is read.
            let is_held_back = unsafe {
                let mut pending = std::mem::zeroed::<libc::sigset_t>();
                libc::sigpending(&raw mut pending);
                libc::sigismember(&raw const pending, libc::SIGPIPE) == 1
            };
            assert!(
                is_held_back,
                "the signal waits for a thread that never takes it"
            );
        })
        .join()
        .unwrap();
    }

    #[test]
    fn unreadable_memory_is_refused_before_loading() {
        let (to, _from) = UnixStream::pair().unwrap();
        let mut pipe = PagePipe::new(4096).unwrap();
        let nowhere = Span::new(std::ptr::without_provenance_mut(64), 64);
        // SAFETY: page 0 is mapped by nobody, which is what the kernel is to say.
        let refused = unsafe { pipe.send(to.as_fd(), nowhere) };
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EFAULT));
        assert!(!pipe.is_loaded());
    }
}
