//! The socket calls of the data path, behind one trait, so that tests can stand in for the kernel.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use tcpx_lanes::control_messages::{cmsg_len, cmsg_space};

use crate::cmsg::{Dialect, RECEIVE_FLAG, SOL_SOCKET};
use crate::zero_copy::FinishedSends;
use tcpx_memory::RegionSlice;

/// What one receive gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrival {
    /// Bytes of the stream; 0 is its end.
    pub bytes: usize,
    /// Bytes of control messages.
    pub control_bytes: usize,
    /// Whether control messages found no room.
    pub truncated: bool,
}

/// System calls on a connected, non-blocking TCP socket, those of this host where nothing else is
/// said. Errors are the system's. None of them waits: what cannot be done now fails with
/// [`io::ErrorKind::WouldBlock`]. Interrupted calls are made again.
pub trait SocketCalls: Send + Sync + Debug {
    /// Receives device memory: `recvmsg` with `MSG_SOCK_DEVMEM`. At most `into.len()` bytes come,
    /// in the pool or in `into`; the control messages say where.
    fn receive(
        &self,
        socket: BorrowedFd<'_>,
        into: &RegionSlice,
        control: &mut [u8],
    ) -> io::Result<Arrival> {
        let mut part = iovec(into)?;
        let mut message = message(&mut part, control);
        let flags = RECEIVE_FLAG | libc::MSG_DONTWAIT;
        // SAFETY: the message points at two live ranges: `control` is borrowed exclusively, and
        // `into` keeps its region alive and rides on its owner's lease for writing.
        let bytes =
            count(|| unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
        Ok(Arrival {
            bytes,
            control_bytes: (message.msg_controllen as usize).min(control.len()),
            truncated: message.msg_flags & libc::MSG_CTRUNC != 0,
        })
    }

    /// Receives ordinary bytes; 0 is the end of the stream.
    fn receive_plain(&self, socket: BorrowedFd<'_>, into: &RegionSlice) -> io::Result<usize> {
        let part = iovec(into)?;
        // SAFETY: `into` keeps the range alive and rides on its owner's lease for writing.
        count(|| unsafe {
            libc::recv(
                socket.as_raw_fd(),
                part.iov_base,
                part.iov_len,
                libc::MSG_DONTWAIT,
            )
        })
    }

    /// `setsockopt` with tokens; what it answers is for the tokens' owner to judge.
    fn give_back(
        &self,
        socket: BorrowedFd<'_>,
        level: i32,
        option: i32,
        tokens: &[u8],
    ) -> io::Result<i32> {
        let length = libc::socklen_t::try_from(tokens.len())
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: the kernel only reads `tokens`, which is a live range of that length.
        let answer = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                level,
                option,
                tokens.as_ptr().cast(),
                length,
            )
        };
        // Success is a positive count here, unlike with any other option.
        if answer >= 0 {
            Ok(answer)
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Sends bytes that the CPU reaches; the answer is how many the kernel took a copy of.
    fn send(&self, socket: BorrowedFd<'_>, from: &RegionSlice) -> io::Result<usize> {
        let part = iovec(from)?;
        // SAFETY: the kernel only reads the range, which `from` keeps alive.
        count(|| unsafe {
            libc::send(
                socket.as_raw_fd(),
                part.iov_base,
                part.iov_len,
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        })
    }

    /// Sends bytes of bound memory without a copy; the answer is how many the kernel took. They
    /// must not change before [`Self::done`] names the call.
    fn send_device(
        &self,
        socket: BorrowedFd<'_>,
        dmabuf_id: u32,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        let offset = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut control = BoundMemoryMessage::of(dmabuf_id);
        let mut part = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(offset),
            iov_len: length,
        };
        let message = message(&mut part, &mut control.0);
        let flags = libc::MSG_ZEROCOPY | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the kernel reads the control message, which is live, and takes the iovec's base
        // for an offset in the bound memory: it touches nothing of this process.
        count(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
    }

    /// Ends the connection at once: the peer sees a reset, and what was not sent never will be. The
    /// socket stays, for what [`Self::done`] has to say about sends.
    fn reset(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(rustix::net::connect_unspec(socket)?)
    }

    /// The next report about zero-copy sends; `None` when there is none.
    ///
    /// # Errors
    /// The system's, or the socket's own error that came this way.
    fn done(&self, socket: BorrowedFd<'_>) -> io::Result<Option<FinishedSends>> {
        crate::zero_copy::done(socket)
    }
}

const ID_BYTES: usize = size_of::<u32>();

/// A control message with the number of the bound memory, aligned for its header.
#[repr(C, align(8))]
struct BoundMemoryMessage([u8; cmsg_space(ID_BYTES)]);

impl BoundMemoryMessage {
    fn of(dmabuf_id: u32) -> Self {
        let mut bytes = [0; cmsg_space(ID_BYTES)];
        bytes[..8].copy_from_slice(&cmsg_len(ID_BYTES).to_ne_bytes());
        bytes[8..12].copy_from_slice(&SOL_SOCKET.to_ne_bytes());
        bytes[12..16].copy_from_slice(&Dialect::Mainline.device_type().to_ne_bytes());
        bytes[16..20].copy_from_slice(&dmabuf_id.to_ne_bytes());
        Self(bytes)
    }
}

/// Runs a system call that returns a count, again when it is interrupted.
fn count(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn iovec(slice: &RegionSlice) -> io::Result<libc::iovec> {
    let base = slice.host_ptr().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "memory that the CPU cannot reach",
        )
    })?;
    Ok(libc::iovec {
        iov_base: base.cast(),
        iov_len: slice.len(),
    })
}

fn message(part: &mut libc::iovec, control: &mut [u8]) -> libc::msghdr {
    // SAFETY: msghdr is plain data for which all zeroes is the empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    if !control.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = control.len() as _;
    }
    message
}

/// The real system calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinuxSockets;

impl SocketCalls for LinuxSockets {}
