//! The socket calls that read and write regions in place.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tcpx_memory::RegionSlice;

use crate::socket::set_option;

/// Most payload bytes that one call offers.
pub(super) const WIRE_CALL: usize = 1 << 20;

/// What a call into the socket did.
#[derive(Debug)]
pub(super) enum Moved {
    /// This many bytes.
    Bytes(usize),
    /// The socket has no room or no data now.
    WouldBlock,
    /// The peer has ended its direction (receive only).
    End,
}

/// The part of a slice that a call may touch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) slice: &'a RegionSlice,
    pub(super) from: usize,
    pub(super) len: usize,
}

/// The address of a part, after checking that it lies in its slice and that the CPU reaches it.
pub(super) fn address(part: &Part<'_>) -> io::Result<*mut u8> {
    let end = part.from.checked_add(part.len);
    if end.is_none_or(|end| end > part.slice.len()) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "part outside its slice",
        ));
    }
    let base = part.slice.host_ptr().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "memory that the CPU cannot reach",
        )
    })?;
    // SAFETY: `from <= len` was checked above and `base` points at `len` bytes of one allocation
    // that `part.slice` keeps alive.
    Ok(unsafe { base.add(part.from) })
}

/// Runs a system call that returns a byte count.
pub(super) fn call(mut system_call: impl FnMut() -> libc::ssize_t) -> io::Result<Moved> {
    loop {
        if let Ok(bytes) = usize::try_from(system_call()) {
            return Ok(Moved::Bytes(bytes));
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock => return Ok(Moved::WouldBlock),
            io::ErrorKind::Interrupted => {}
            _ => return Err(error),
        }
    }
}

/// As [`call`], for receives into a buffer that is not empty: no bytes mean the end of the stream.
fn call_receive(system_call: impl FnMut() -> libc::ssize_t) -> io::Result<Moved> {
    Ok(match call(system_call)? {
        Moved::Bytes(0) => Moved::End,
        moved => moved,
    })
}

fn message(parts: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is plain data for which all zeroes is the empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    message
}

/// Sends `head` and then `part` in one call.
pub(super) fn send(socket: BorrowedFd<'_>, head: &[u8], part: Part<'_>) -> io::Result<Moved> {
    let payload = address(&part)?;
    let mut parts = [
        libc::iovec {
            iov_base: head.as_ptr().cast_mut().cast(),
            iov_len: head.len(),
        },
        libc::iovec {
            iov_base: payload.cast(),
            iov_len: part.len.min(WIRE_CALL),
        },
    ];
    let message = message(&mut parts);
    // SAFETY: the message points at two live ranges that the kernel only reads: `head` is borrowed,
    // and `part.slice` keeps the payload alive for the call.
    call(|| unsafe {
        libc::sendmsg(
            socket.as_raw_fd(),
            &raw const message,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        )
    })
}

/// Sends `part` without a copy: its bytes must not change before the socket's error queue has reported
/// the call.
pub(super) fn send_uncopied(socket: BorrowedFd<'_>, part: Part<'_>) -> io::Result<Moved> {
    let payload = address(&part)?;
    // SAFETY: a live range that the kernel only reads; its pages stay alive by the references that the
    // kernel takes.
    call(|| unsafe {
        libc::send(
            socket.as_raw_fd(),
            payload.cast(),
            part.len.min(WIRE_CALL),
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_ZEROCOPY,
        )
    })
}

/// Sends `head`, which more bytes follow at once.
pub(super) fn send_more(socket: BorrowedFd<'_>, head: &[u8]) -> io::Result<Moved> {
    // SAFETY: `head` is a live range that the kernel only reads.
    call(|| unsafe {
        libc::send(
            socket.as_raw_fd(),
            head.as_ptr().cast(),
            head.len(),
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE,
        )
    })
}

/// Receives into `part` and, once that is full, into `behind`, in one call.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    part: Part<'_>,
    behind: &mut [u8],
) -> io::Result<Moved> {
    let payload = libc::iovec {
        iov_base: address(&part)?.cast(),
        iov_len: part.len.min(WIRE_CALL),
    };
    // With more payload to come, bytes behind this call's part are payload too.
    let behind = if part.len > WIRE_CALL {
        &mut []
    } else {
        behind
    };
    // SAFETY: the region behind `part` is kept alive by its slice. Writing to it is what the receive was
    // posted for; the request's owner holds the write lease until its end is reported.
    unsafe { receive_both(socket, payload, behind) }
}

/// Receives into `aside` and, once that is full, into `behind`, in one call.
pub(super) fn receive_aside(
    socket: BorrowedFd<'_>,
    aside: &mut [u8],
    behind: &mut [u8],
) -> io::Result<Moved> {
    let first = libc::iovec {
        iov_base: aside.as_mut_ptr().cast(),
        iov_len: aside.len(),
    };
    // SAFETY: `aside` is a live exclusive range of that length.
    unsafe { receive_both(socket, first, behind) }
}

/// # Safety
/// `first` is a live range that may be written to.
unsafe fn receive_both(
    socket: BorrowedFd<'_>,
    first: libc::iovec,
    behind: &mut [u8],
) -> io::Result<Moved> {
    let behind = libc::iovec {
        iov_base: behind.as_mut_ptr().cast(),
        iov_len: behind.len(),
    };
    let mut parts = [first, behind];
    let mut message = message(&mut parts);
    // SAFETY: the message points at two live ranges: the caller vouches for the first, and `behind` is
    // borrowed exclusively.
    call_receive(|| unsafe {
        libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT)
    })
}

/// Receives into ordinary memory.
pub(super) fn receive_bytes(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<Moved> {
    // SAFETY: `into` is a live exclusive range of that length.
    call_receive(|| unsafe {
        libc::recv(
            socket.as_raw_fd(),
            into.as_mut_ptr().cast(),
            into.len(),
            libc::MSG_DONTWAIT,
        )
    })
}

/// Drops up to `len` bytes without copying them anywhere: tcp(7), `MSG_TRUNC`.
pub(super) fn discard(socket: BorrowedFd<'_>, len: usize) -> io::Result<Moved> {
    // SAFETY: with MSG_TRUNC a TCP socket counts the bytes and writes nothing, so the null buffer
    // is never touched.
    call_receive(|| unsafe {
        libc::recv(
            socket.as_raw_fd(),
            std::ptr::null_mut(),
            len.min(WIRE_CALL),
            libc::MSG_DONTWAIT | libc::MSG_TRUNC,
        )
    })
}

/// Whether a socket that nobody reads has come to its end.
#[derive(Debug)]
pub(super) enum Ended {
    /// More may come.
    Not,
    /// The peer has ended its direction in order; so many bytes wait to be read.
    ByPeer { waiting: usize },
    /// It was reset, or the system gave it up.
    Broken(io::Error),
}

/// Looks at a socket without reading from it.
pub(super) fn ended(socket: BorrowedFd<'_>) -> io::Result<Ended> {
    let mut watched = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::io::retry_on_intr(|| poll(&mut watched, Some(&now)))?;
    let found = watched[0].revents();
    if found.intersects(PollFlags::ERR | PollFlags::HUP) {
        let error = rustix::net::sockopt::socket_error(socket)?.err();
        let cause = error.unwrap_or(rustix::io::Errno::CONNRESET);
        return Ok(Ended::Broken(cause.into()));
    }
    if !found.contains(PollFlags::RDHUP) {
        return Ok(Ended::Not);
    }
    let waiting = usize::try_from(rustix::io::ioctl_fionread(socket)?).unwrap_or(usize::MAX);
    Ok(Ended::ByPeer { waiting })
}

/// Sets how many bytes must wait before the socket counts as readable (`SO_RCVLOWAT`).
pub(super) fn set_low_water(socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
}
