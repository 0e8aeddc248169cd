//! Sends without a copy, and what a socket's error queue says about them.
//!
//! Each such call has a number. Until the kernel reports that number, it or the card may still read
//! what was sent.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use tcpx_lanes::control_messages::ControlMessages;
use tcpx_lanes::socket::set_option;

/// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED` of `linux/errqueue.h`.
const ORIGIN_ZEROCOPY: u8 = 5;
const CODE_COPIED: u8 = 1;

/// Zero-copy sends that the kernel is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedSends {
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
pub(crate) fn done(socket: BorrowedFd<'_>) -> io::Result<Option<FinishedSends>> {
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
fn read(control: &[u8]) -> io::Result<Option<FinishedSends>> {
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
        return Ok(Some(FinishedSends {
            first: u32::from_ne_bytes([i0, i1, i2, i3]),
            last: u32::from_ne_bytes([d0, d1, d2, d3]),
            copied: code & CODE_COPIED != 0,
        }));
    }
    Err(bad(
        "the error queue had a message that is no report".to_owned()
    ))
}

/// Memory that the kernel may still send from: zero-copy sends of one socket whose end the kernel
/// has not reported, by their number, each with the slot that it reads. Reports name ranges, and
/// may come in any order.
#[derive(Debug)]
pub(crate) struct InKernel<S> {
    /// Number of the first entry; numbers wrap.
    first: u32,
    slots: VecDeque<Option<S>>,
}

impl<S> Default for InKernel<S> {
    fn default() -> Self {
        Self {
            first: 0,
            slots: VecDeque::new(),
        }
    }
}

/// A report about sends that were not made, or were reported before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("zero-copy report: expected sends within {first}..{next}, {}..={} arrived", .done.first, .done.last)]
pub(crate) struct BadReport {
    done: FinishedSends,
    first: u32,
    next: u32,
}

impl<S> InKernel<S> {
    /// The next send was made from this slot.
    pub(crate) fn sent(&mut self, slot: S) {
        self.slots.push_back(Some(slot));
    }

    /// The number of the next send.
    pub(crate) fn next(&self) -> u32 {
        self.first.wrapping_add(self.slots.len() as u32)
    }

    /// The kernel holds nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Lets go of the slots that a report names.
    ///
    /// # Errors
    /// The report cannot be; nothing was let go of.
    pub(crate) fn done(&mut self, done: FinishedSends) -> Result<(), BadReport> {
        let place = |number: u32| usize::try_from(number.wrapping_sub(self.first)).ok();
        let bad = BadReport {
            done,
            first: self.first,
            next: self.next(),
        };
        let (Some(from), Some(to)) = (place(done.first), place(done.last)) else {
            return Err(bad);
        };
        if from > to || to >= self.slots.len() {
            return Err(bad);
        }
        if self.slots.range(from..=to).any(Option::is_none) {
            return Err(bad);
        }
        for slot in self.slots.range_mut(from..=to) {
            *slot = None;
        }
        while let Some(None) = self.slots.front() {
            self.slots.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        Ok(())
    }

    /// The slots that no report has named, one for each send; nothing more is to be reported on.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = S> {
        std::mem::take(&mut self.slots).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
        let expected = FinishedSends {
            first: 3,
            last: 9,
            copied: true,
        };
        assert_eq!(read, Some(expected));
    }

    #[test]
    fn socket_errors_and_strange_messages_are_errors() {
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

    fn range(first: u32, last: u32) -> FinishedSends {
        FinishedSends {
            first,
            last,
            copied: false,
        }
    }

    /// The number of the first send, and slots whose references tell who holds them.
    fn sent(first: u32, count: usize) -> (InKernel<Arc<()>>, Vec<Arc<()>>) {
        let slots: Vec<_> = (0..count).map(|_| Arc::new(())).collect();
        let mut in_kernel = InKernel {
            first,
            slots: VecDeque::new(),
        };
        for slot in &slots {
            in_kernel.sent(Arc::clone(slot));
        }
        (in_kernel, slots)
    }

    fn held(slots: &[Arc<()>]) -> Vec<bool> {
        slots.iter().map(|one| Arc::strong_count(one) > 1).collect()
    }

    #[test]
    fn reports_in_any_order_free_each_slot_once() {
        let (mut in_kernel, slots) = sent(u32::MAX - 1, 4);
        in_kernel.done(range(0, 1)).unwrap();
        assert_eq!(held(&slots), [true, true, false, false]);
        assert!(in_kernel.done(range(1, 1)).is_err(), "reported before");
        in_kernel.done(range(u32::MAX - 1, u32::MAX)).unwrap();
        assert!(in_kernel.is_empty());
        assert_eq!(held(&slots), [false; 4]);
        assert!(in_kernel.done(range(2, 2)).is_err(), "never sent");
    }

    #[test]
    fn a_report_that_runs_past_the_sends_frees_nothing() {
        let (mut in_kernel, slots) = sent(0, 1);
        for (first, last) in [(0, 1), (1, 0), (5, 5), (u32::MAX, 0)] {
            let refused = in_kernel.done(range(first, last));
            assert!(refused.is_err(), "{first}..={last}");
        }
        assert_eq!(held(&slots), [true]);
        in_kernel.done(range(0, 0)).unwrap();
        assert_eq!(held(&slots), [false]);
    }
}
