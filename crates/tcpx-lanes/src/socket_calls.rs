//! Non-blocking socket calls over memory in place: the one file that hands addresses to the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};
use tcpx_memory::RegionSlice;

use crate::socket::set_option;

/// Most payload bytes that one call offers.
pub const WIRE_CALL: usize = 1 << 20;

/// Most pieces in one call; the kernel takes 1024.
pub const MAX_SPANS: usize = 512;

/// What a call into the socket did.
#[derive(Debug)]
pub enum Moved {
    /// This many bytes, at least one.
    Bytes(usize),
    /// The socket has no room or no data now.
    WouldBlock,
    /// The peer has ended its direction (receive only).
    End,
}

/// A span of memory for the kernel to read or write.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Span(libc::iovec);

// SAFETY: an address and a length. Whoever passes it to an unsafe call vouches for the access.
unsafe impl Send for Span {}

impl Span {
    /// No bytes.
    pub const EMPTY: Self = Self::new(std::ptr::null_mut(), 0);

    /// `len` bytes at `start`.
    pub const fn new(start: *mut u8, len: usize) -> Self {
        Self(libc::iovec {
            iov_base: start.cast(),
            iov_len: len,
        })
    }

    /// What is left of it after `bytes`.
    pub fn from(self, bytes: usize) -> Self {
        let bytes = bytes.min(self.0.iov_len);
        let start = self.0.iov_base.cast::<u8>().wrapping_add(bytes);
        Self::new(start, self.0.iov_len - bytes)
    }

    /// Its first `bytes`, at most all.
    pub fn first(self, bytes: usize) -> Self {
        Self::new(self.0.iov_base.cast(), bytes.min(self.0.iov_len))
    }

    /// Where it begins.
    pub const fn start(self) -> *const u8 {
        self.0.iov_base.cast_const().cast()
    }

    /// Its bytes.
    pub const fn len(self) -> usize {
        self.0.iov_len
    }

    /// Whether it has no bytes.
    pub const fn is_empty(self) -> bool {
        self.0.iov_len == 0
    }

    /// Borrowed bytes, for reading.
    pub fn of(bytes: &[u8]) -> Self {
        Self::new(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Borrowed bytes, for writing.
    pub const fn of_mut(bytes: &mut [u8]) -> Self {
        Self::new(bytes.as_mut_ptr(), bytes.len())
    }
}

/// The part of a slice that a call may touch.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// The slice.
    pub slice: &'a RegionSlice,
    /// Offset of the part's first byte.
    pub from: usize,
    /// Bytes of the part.
    pub len: usize,
}

impl Part<'_> {
    /// Where it lies: inside its slice, in memory that the CPU reaches.
    fn spans(&self) -> io::Result<impl Iterator<Item = Span>> {
        let outside = || io::Error::new(io::ErrorKind::InvalidInput, "part outside its slice");
        let end = self.from.checked_add(self.len).ok_or_else(outside)?;
        let parts = self
            .slice
            .host_parts(self.from..end)
            .map_err(|_| outside())?;
        let parts = parts.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "memory that the CPU cannot reach",
            )
        })?;
        Ok(parts.map(|(start, len)| Span::new(start, len)))
    }

    /// Where as much of its start lies as lies in one place.
    pub(crate) fn span(&self) -> io::Result<Span> {
        Ok(self.spans()?.next().unwrap_or(Span::EMPTY))
    }

    /// Offers it to `call` as far as one call goes, behind `head`; or in front of `behind` where
    /// that is all of it.
    fn with_spans<R>(
        &self,
        head: Span,
        behind: Span,
        call: impl FnOnce(&[Span]) -> R,
    ) -> io::Result<R> {
        let mut spans = self.spans()?;
        let first = spans.next().unwrap_or(Span::EMPTY);
        if first.len() == self.len || first.len() >= WIRE_CALL {
            // With more payload to come, bytes behind this call's part are payload too.
            let behind = match self.len <= WIRE_CALL {
                true => behind,
                false => Span::EMPTY,
            };
            return Ok(call(&[head, first.first(WIRE_CALL), behind]));
        }
        let mut offered = [Span::EMPTY; MAX_SPANS];
        (offered[0], offered[1]) = (head, first);
        let (mut count, mut bytes) = (2, first.len());
        for span in spans {
            if count == MAX_SPANS - 1 || bytes == WIRE_CALL {
                break;
            }
            let span = span.first(WIRE_CALL - bytes);
            (offered[count], bytes) = (span, bytes + span.len());
            count += 1;
        }
        if bytes == self.len {
            offered[count] = behind;
            count += 1;
        }
        Ok(call(&offered[..count]))
    }
}

/// Whether a call has failed because the memory that it was given is not mapped, or not to be used
/// so; the socket is as it was.
pub fn is_fault(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EFAULT)
}

/// Runs a system call that returns a byte count.
fn retry_interrupted(mut system_call: impl FnMut() -> libc::ssize_t) -> io::Result<Moved> {
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
    Ok(match retry_interrupted(system_call)? {
        Moved::Bytes(0) => Moved::End,
        moved => moved,
    })
}

fn message(spans: &[Span]) -> libc::msghdr {
    // SAFETY: msghdr is plain data for which all zeroes is the empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = spans.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = spans.len().min(MAX_SPANS) as _;
    message
}

/// Offers the spans to the kernel in one call.
///
/// # Errors
/// The connection is broken.
///
/// # Safety
/// Every span is readable memory of its length for the call.
pub unsafe fn send_spans(socket: impl AsFd, spans: &[Span]) -> io::Result<Moved> {
    let message = message(spans);
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    let socket = socket.as_fd();
    // SAFETY: the descriptor is borrowed; the message points to spans that the caller vouches for.
    retry_interrupted(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
}

/// Fills the spans, which are not all empty, in order with what has arrived.
///
/// # Errors
/// The connection is broken.
///
/// # Safety
/// Every span is writable memory of its length for the call, and nobody else refers to it.
pub unsafe fn receive_spans(socket: impl AsFd, spans: &[Span]) -> io::Result<Moved> {
    let mut message = message(spans);
    let socket = socket.as_fd();
    // SAFETY: as for `send_spans`; the kernel writes into the message only what it owns there.
    call_receive(|| unsafe {
        libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT)
    })
}

/// Sends `head` and then `part` in one call.
///
/// # Errors
/// The connection is broken, or the part is not readable.
pub fn send(socket: impl AsFd, head: &[u8], part: Part<'_>) -> io::Result<Moved> {
    // SAFETY: live ranges that the kernel only reads: `head` is borrowed, and `part.slice` keeps
    // the payload alive for the call.
    part.with_spans(Span::of(head), Span::EMPTY, |spans| unsafe {
        send_spans(socket, spans)
    })?
}

/// Sends `head` and then `body` in one call, which are not both empty. Where one of them is, that
/// is a plain `send`: it takes a tenth of a microsecond less.
///
/// # Errors
/// The connection is broken.
pub fn send_both(socket: impl AsFd, head: &[u8], body: &[u8]) -> io::Result<Moved> {
    if let (alone, []) | ([], alone) = (head, body) {
        return send_bytes(socket, alone);
    }
    // SAFETY: two live ranges that are borrowed, and that the kernel only reads.
    unsafe { send_spans(socket, &[Span::of(head), Span::of(body)]) }
}

/// Sends bytes.
///
/// # Errors
/// The connection is broken.
pub fn send_bytes(socket: impl AsFd, bytes: &[u8]) -> io::Result<Moved> {
    send_flagged(socket, bytes, SendFlags::empty())
}

/// Sends bytes that more will follow at once.
///
/// # Errors
/// The connection is broken.
pub fn send_more(socket: impl AsFd, bytes: &[u8]) -> io::Result<Moved> {
    send_flagged(socket, bytes, SendFlags::MORE)
}

fn send_flagged(socket: impl AsFd, bytes: &[u8], flags: SendFlags) -> io::Result<Moved> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT | flags;
    moved(rustix::io::retry_on_intr(|| {
        rustix::net::send(&socket, bytes, flags)
    }))
}

/// What a call says that moved bytes, or could not.
fn moved(result: rustix::io::Result<usize>) -> io::Result<Moved> {
    match result {
        Ok(bytes) => Ok(Moved::Bytes(bytes)),
        Err(rustix::io::Errno::AGAIN) => Ok(Moved::WouldBlock),
        Err(error) => Err(error.into()),
    }
}

/// Receives into `part` and, once that is full, into `behind`, in one call.
///
/// # Errors
/// The connection is broken, or the part is not writable.
pub fn receive(socket: impl AsFd, part: Part<'_>, behind: &mut [u8]) -> io::Result<Moved> {
    // SAFETY: the region behind `part` is kept alive by its slice. Writing to it is what the
    // receive was posted for; the request's owner holds the write lease until its end is reported.
    // `behind` is borrowed exclusively.
    part.with_spans(Span::EMPTY, Span::of_mut(behind), |spans| unsafe {
        receive_spans(socket, spans)
    })?
}

/// Receives into `aside` and, once that is full, into `behind`, in one call.
///
/// # Errors
/// The connection is broken.
pub fn receive_aside(socket: impl AsFd, aside: &mut [u8], behind: &mut [u8]) -> io::Result<Moved> {
    // SAFETY: two live ranges that are borrowed exclusively.
    unsafe { receive_spans(socket, &[Span::of_mut(aside), Span::of_mut(behind)]) }
}

/// Receives into ordinary memory, at least one byte of it. The plain call costs less than one with
/// spans.
///
/// # Errors
/// The connection is broken.
pub fn receive_bytes(socket: impl AsFd, into: &mut [u8]) -> io::Result<Moved> {
    let received =
        rustix::io::retry_on_intr(|| rustix::net::recv(&socket, &mut *into, RecvFlags::DONTWAIT));
    Ok(match moved(received.map(|(bytes, _)| bytes))? {
        Moved::Bytes(0) => Moved::End,
        moved => moved,
    })
}

/// Copies from another process's memory, in its order, into `part` and, once that is full, into
/// `behind`. The kernel asks whether this process may: process_vm_readv(2). Less than all may come
/// where one call does not take it, or where the other process has no memory; of `remote` no more
/// than [`MAX_SPANS`] are taken.
///
/// # Errors
/// There is no such process, this one may not read its memory, or nothing is where the first span
/// says; or the part is not writable.
pub fn read_process(
    process: rustix::process::Pid,
    remote: &[Span],
    part: Part<'_>,
    behind: &mut [u8],
) -> io::Result<usize> {
    // SAFETY: as for `receive`.
    part.with_spans(Span::EMPTY, Span::of_mut(behind), |spans| unsafe {
        read_process_spans(process, remote, spans)
    })?
}

/// As [`read_process`], into borrowed memory alone.
///
/// # Errors
/// As there.
pub fn read_process_bytes(
    process: rustix::process::Pid,
    at: Span,
    into: &mut [u8],
) -> io::Result<usize> {
    // SAFETY: a live range that is borrowed exclusively.
    unsafe { read_process_spans(process, &[at], &[Span::of_mut(into)]) }
}

/// As [`copy_spans`], of a part to as many bytes as it has.
///
/// # Errors
/// Nothing is there.
pub fn copy_checked(part: Part<'_>, mut into: &mut [u8]) -> io::Result<()> {
    for span in part.spans()? {
        let (place, rest) = std::mem::take(&mut into).split_at_mut(span.len());
        // SAFETY: the slice keeps its memory, and the place is borrowed exclusively.
        unsafe { copy_spans(span, Span::of_mut(place)) }?;
        into = rest;
    }
    Ok(())
}

/// Copies as much memory of this process as both spans have. The kernel copies: where nothing is
/// any more it says so, and a plain copy ends the process. It is plain where the kernel lets no
/// process read memory so, as in some sandboxes.
///
/// # Errors
/// Nothing is there.
///
/// # Safety
/// Both are memory of their lengths for the call, but for what its owner has unmapped by mistake,
/// and what is written to is writable. What else touches the bytes meanwhile is their owner's own
/// doing.
pub unsafe fn copy_spans(from: Span, into: Span) -> io::Result<()> {
    let own = rustix::process::getpid();
    let len = from.len().min(into.len());
    let mut done = 0;
    while done < len {
        let rest = [from, into].map(|span| span.first(len).from(done));
        // SAFETY: the caller's promise.
        match unsafe { read_process_spans(own, &rest[..1], &rest[1..]) } {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => {
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy(from.start(), into.start().cast_mut(), len) };
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills the local spans in order from the remote ones.
///
/// # Safety
/// Every local span is writable memory of its length for the call, and nobody else refers to it.
unsafe fn read_process_spans(
    process: rustix::process::Pid,
    remote: &[Span],
    local: &[Span],
) -> io::Result<usize> {
    // No more than a thousand each, which fits.
    let counts = [local, remote].map(|spans| spans.len().min(MAX_SPANS) as libc::c_ulong);
    // SAFETY: the caller vouches for the local spans. The kernel reads the remote ones in another
    // address space, and checks each: they may say anything.
    let moved = retry_interrupted(|| unsafe {
        libc::process_vm_readv(
            process.as_raw_nonzero().get(),
            local.as_ptr().cast(),
            counts[0],
            remote.as_ptr().cast(),
            counts[1],
            0,
        )
    })?;
    match moved {
        Moved::Bytes(bytes) => Ok(bytes),
        Moved::WouldBlock | Moved::End => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// Drops up to `len` bytes without copying them anywhere: tcp(7), `MSG_TRUNC`.
///
/// # Errors
/// The connection is broken.
pub fn discard(socket: impl AsFd, len: usize) -> io::Result<Moved> {
    let socket = socket.as_fd();
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
pub enum Ended {
    /// More may come.
    Not,
    /// The peer has ended its direction in order; so many bytes wait to be read.
    ByPeer {
        /// Bytes.
        waiting: usize,
    },
    /// It was reset, or the system gave it up.
    Broken(io::Error),
}

/// Looks at a socket without reading from it.
pub fn ended(socket: BorrowedFd<'_>) -> io::Result<Ended> {
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
pub fn set_low_water(socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
}
