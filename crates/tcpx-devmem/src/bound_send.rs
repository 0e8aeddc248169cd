//! Sends out of bound memory.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use tcpx_lanes::control_messages::{cmsg_len, cmsg_space};

use crate::calls::{count, message};
use crate::cmsg::{Dialect, SOL_SOCKET};

const ID_BYTES: usize = size_of::<u32>();

/// A control message with the number of the bound memory, aligned for its header.
#[repr(C, align(8))]
struct Control([u8; cmsg_space(ID_BYTES)]);

impl Control {
    fn of(dmabuf_id: u32) -> Self {
        let mut bytes = [0; cmsg_space(ID_BYTES)];
        bytes[..8].copy_from_slice(&cmsg_len(ID_BYTES).to_ne_bytes());
        bytes[8..12].copy_from_slice(&SOL_SOCKET.to_ne_bytes());
        bytes[12..16].copy_from_slice(&Dialect::Mainline.device_type().to_ne_bytes());
        bytes[16..20].copy_from_slice(&dmabuf_id.to_ne_bytes());
        Self(bytes)
    }
}

pub(super) fn send(
    socket: BorrowedFd<'_>,
    dmabuf_id: u32,
    offset: u64,
    length: usize,
) -> io::Result<usize> {
    let offset = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut control = Control::of(dmabuf_id);
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
