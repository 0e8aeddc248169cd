//! Non-blocking socket calls over raw memory: the one place that hands addresses to the kernel.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::error::PluginError;
use crate::held::Held;

/// Most pieces in one call; the kernel takes 1024.
pub(crate) const MAX_SPANS: usize = 512;

/// A connection of this process.
pub(crate) type Stream = Held<TcpStream>;
/// A listening socket of this process.
pub(crate) type Listener = Held<TcpListener>;

/// A span of memory for the kernel to read or write.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Span(libc::iovec);

// SAFETY: an address and a length; who passes it to `send` or `receive` vouches for the access.
unsafe impl Send for Span {}

impl Span {
    pub(crate) const EMPTY: Self = Self::new(std::ptr::null_mut(), 0);

    pub(crate) const fn new(start: *mut u8, len: usize) -> Self {
        Self(libc::iovec {
            iov_base: start.cast(),
            iov_len: len,
        })
    }

    /// What is left of it after `bytes`.
    pub(crate) fn from(self, bytes: usize) -> Self {
        let bytes = bytes.min(self.0.iov_len);
        let start = self.0.iov_base.cast::<u8>().wrapping_add(bytes);
        Self::new(start, self.0.iov_len - bytes)
    }

    /// Its first `bytes`, at most all.
    pub(crate) fn first(self, bytes: usize) -> Self {
        Self::new(self.0.iov_base.cast(), bytes.min(self.0.iov_len))
    }

    pub(crate) const fn start(self) -> *const u8 {
        self.0.iov_base.cast_const().cast()
    }

    pub(crate) const fn len(self) -> usize {
        self.0.iov_len
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self::new(bytes.as_ptr().cast_mut(), bytes.len())
    }

    pub(crate) const fn of_mut(bytes: &mut [u8]) -> Self {
        Self::new(bytes.as_mut_ptr(), bytes.len())
    }
}

/// What one call did.
#[derive(Debug)]
pub(crate) enum Moved {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing now.
    Later,
    /// The peer's end of file (receiving only).
    End,
    /// The connection is broken.
    Broken(io::Error),
}

/// Offers the spans to the kernel in one call.
///
/// # Safety
/// Every span is readable memory of its length for the call.
pub(crate) unsafe fn send(stream: &TcpStream, spans: &[Span]) -> Moved {
    let message = message(spans);
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    outcome(false, || {
        // SAFETY: the descriptor is open, the message points to spans that the caller vouches for.
        returned(unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, flags) })
    })
}

/// Fills the spans, in order, with what has arrived.
///
/// # Safety
/// Every span is writable memory of its length for the call, and nobody else refers to it.
pub(crate) unsafe fn receive(stream: &TcpStream, spans: &[Span]) -> Moved {
    let mut message = message(spans);
    let flags = libc::MSG_DONTWAIT;
    outcome(true, || {
        // SAFETY: as for `send`; the kernel writes into the message only what it owns there.
        returned(unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, flags) })
    })
}

/// Ends a connection at once: the peer learns of it, and what it has not got is not sent. Closing with
/// `SO_LINGER` would do so too, but not while a forked process holds a copy of the socket.
pub(crate) fn reset(stream: &TcpStream) {
    // It fails only for what is no socket.
    let _ = rustix::net::connect_unspec(stream);
}

/// Sends plain bytes that more will follow.
pub(crate) fn send_more(stream: &TcpStream, bytes: &[u8]) -> Moved {
    send_flagged(stream, bytes, SendFlags::MORE)
}

/// Sends plain bytes. As with [`receive_bytes`], the plain call costs less than one with a list of spans, and
/// NCCL's thread makes one for every few polls.
pub(crate) fn send_bytes(stream: &TcpStream, bytes: &[u8]) -> Moved {
    send_flagged(stream, bytes, SendFlags::empty())
}

fn send_flagged(stream: &TcpStream, bytes: &[u8], flags: SendFlags) -> Moved {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT | flags;
    outcome(false, || rustix::net::send(stream, bytes, flags))
}

/// Receives plain bytes.
pub(crate) fn receive_bytes(stream: &TcpStream, bytes: &mut [u8]) -> Moved {
    let flags = RecvFlags::DONTWAIT;
    outcome(true, || {
        rustix::net::recv(stream, &mut *bytes, flags).map(|(count, _)| count)
    })
}

fn message(spans: &[Span]) -> libc::msghdr {
    // SAFETY: a message header of zeros is a valid, empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = spans.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = spans.len().min(MAX_SPANS);
    message
}

/// What a call of the C library says.
fn returned(moved: isize) -> rustix::io::Result<usize> {
    usize::try_from(moved)
        .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
}

fn outcome(receiving: bool, mut call: impl FnMut() -> rustix::io::Result<usize>) -> Moved {
    loop {
        return match call() {
            Ok(0) if receiving => Moved::End,
            // The system's memory for socket buffers comes back.
            Ok(0) | Err(Errno::AGAIN | Errno::NOBUFS) => Moved::Later,
            Ok(bytes) => Moved::Bytes(bytes),
            Err(Errno::INTR) => continue,
            Err(error) => Moved::Broken(error.into()),
        };
    }
}

/// Prepares an established connection for messages.
pub(crate) fn prepare(stream: &TcpStream) -> Result<(), PluginError> {
    let set = |result: io::Result<()>, what: &str| {
        result.map_err(|error| {
            PluginError::system(
                what,
                &error,
                "the connection was probably reset, see the peer",
            )
        })
    };
    set(
        stream.set_nonblocking(true),
        "making a connection non-blocking",
    )?;
    set(stream.set_nodelay(true), "setting TCP_NODELAY")?;
    // A host that vanished without a word is noticed by probes, not by a wait without end.
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(std::time::Duration::from_secs(10))
        .with_interval(std::time::Duration::from_secs(5))
        .with_retries(4);
    // No TCP_USER_TIMEOUT: it would also end a connection whose receiver merely posts nothing for
    // a while, which is a program at work.
    set(
        socket2::SockRef::from(stream).set_tcp_keepalive(&keepalive),
        "setting keepalive",
    )
}
