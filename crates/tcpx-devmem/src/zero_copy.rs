//! Sends without a copy, and what a socket's error queue says about them.
//!
//! Each such call has a number. Until the kernel reports that number, it or the card may still read what
//! was sent.

mod in_kernel;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use tcpx_lanes::control_messages::ControlMessages;
use tcpx_lanes::socket::set_option;

pub(crate) use in_kernel::InKernel;

/// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED` of `linux/errqueue.h`.
const ORIGIN_ZEROCOPY: u8 = 5;
const CODE_COPIED: u8 = 1;

/// Zero-copy sends that the kernel is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The first call's number; a socket counts its zero-copy sends from 0.
    pub first: u32,
    /// The last call's number.
    pub last: u32,
    /// The kernel copied the bytes after all.
    pub copied: bool,
}

/// Has the socket report on sends without a copy.
pub(crate) fn enable(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(&socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)
}

/// The next report about sends without a copy; `None` when there is none.
pub(crate) fn done(socket: BorrowedFd<'_>) -> io::Result<Option<Done>> {
    /// Room for an extended error with an address behind it.
    #[repr(C, align(8))]
    struct Room([u8; 128]);

    let mut control = Room([0; 128]);
    let mut message: libc::msghdr =
        // SAFETY: msghdr is plain data for which all zeroes is the empty message.
        unsafe { std::mem::zeroed() };
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the message points at nothing but the live control buffer.
    if unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) } < 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock => Ok(None),
            _ => Err(error),
        };
    }
    let filled = (message.msg_controllen as usize).min(control.0.len());
    read(&control.0[..filled])
}

/// Reads an extended error.
fn read(control: &[u8]) -> io::Result<Option<Done>> {
    let bad = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    for found in ControlMessages::new(control) {
        let found = found.map_err(|error| bad(error.to_string()))?;
        let is_error = matches!(
            (found.level, found.kind),
            (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
        );
        // errno u32, origin u8, type u8, code u8, pad u8, info u32, data u32
        let Some(
            &[
                e0,
                e1,
                e2,
                e3,
                origin,
                _,
                code,
                _,
                i0,
                i1,
                i2,
                i3,
                d0,
                d1,
                d2,
                d3,
            ],
        ) = found.payload.first_chunk().filter(|_| is_error)
        else {
            continue;
        };
        let errno = i32::from_ne_bytes([e0, e1, e2, e3]);
        if errno != 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if origin != ORIGIN_ZEROCOPY {
            continue;
        }
        return Ok(Some(Done {
            first: u32::from_ne_bytes([i0, i1, i2, i3]),
            last: u32::from_ne_bytes([d0, d1, d2, d3]),
            copied: code & CODE_COPIED != 0,
        }));
    }
    Err(bad(
        "the error queue had a message that is no report".to_owned()
    ))
}

#[cfg(test)]
mod tests {
    use tcpx_lanes::control_messages::cmsg_len;

    use super::*;

    fn report(level: i32, kind: i32, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&cmsg_len(body.len()).to_ne_bytes());
        bytes.extend_from_slice(&level.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    fn error(errno: u32, origin: u8, code: u8, info: u32, data: u32) -> Vec<u8> {
        let mut body = errno.to_ne_bytes().to_vec();
        body.extend_from_slice(&[origin, 0, code, 0]);
        body.extend_from_slice(&info.to_ne_bytes());
        body.extend_from_slice(&data.to_ne_bytes());
        report(libc::SOL_IP, libc::IP_RECVERR, &body)
    }

    #[test]
    fn a_report_names_a_range_of_calls() {
        let read = read(&error(0, ORIGIN_ZEROCOPY, CODE_COPIED, 3, 9)).unwrap();
        let expected = Done {
            first: 3,
            last: 9,
            copied: true,
        };
        assert_eq!(read, Some(expected));
    }

    #[test]
    fn the_sockets_own_error_comes_through_and_strange_messages_are_errors() {
        let refused = read(&error(111, 2, 0, 0, 0)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(111));
        for control in [
            Vec::new(),
            error(0, 4, 0, 0, 0),
            report(libc::SOL_IP, libc::IP_RECVERR, &[0; 15]),
            report(1, 29, &[0; 16]),
            vec![1; 40],
        ] {
            let refused = read(&control).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{control:?}");
        }
    }
}
