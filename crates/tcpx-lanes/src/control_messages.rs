//! Control messages of a socket, one after another, as 64-bit Linux lays them out.

use std::iter::FusedIterator;

/// Bytes in front of a message's payload: length u64, level i32, type i32.
pub const HEADER_BYTES: usize = 16;

/// Messages begin at multiples of this.
const ALIGNMENT: usize = 8;

/// Rounds up to the place where the next message begins; the largest value is rounded down.
pub const fn cmsg_align(bytes: usize) -> usize {
    bytes.saturating_add(ALIGNMENT - 1) & !(ALIGNMENT - 1)
}

/// What the length field of a message with so many bytes of payload says.
pub const fn cmsg_len(payload: usize) -> usize {
    HEADER_BYTES.saturating_add(payload)
}

/// Bytes that a message with so many bytes of payload takes in the buffer.
pub const fn cmsg_space(payload: usize) -> usize {
    cmsg_align(cmsg_len(payload))
}

const _: () = assert!(cmsg_space(12) == 32 && cmsg_space(24) == 40 && cmsg_space(0) == 16);

/// A control message as it lies in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlMessage<'a> {
    /// The protocol it belongs to.
    pub level: i32,
    /// Its type at that level.
    pub kind: i32,
    /// Its content; nothing is known of its alignment.
    pub payload: &'a [u8],
}

/// Bytes that are no control messages. Messages are counted from 0.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadControl {
    /// The buffer ends inside a message's header.
    #[error(
        "control message {message}: expected a header of {HEADER_BYTES} bytes at {offset}, {arrived} bytes are left; pass exactly the bytes that recvmsg filled, else close the channel"
    )]
    HeaderCut {
        /// Its place among all messages.
        message: usize,
        /// Where it begins.
        offset: usize,
        /// Bytes from there to the end.
        arrived: usize,
    },
    /// A message says it is shorter than its header or longer than the buffer.
    #[error(
        "control message {message}: expected a length of {HEADER_BYTES} to {most} bytes at {offset}, {arrived} arrived; close the channel"
    )]
    Length {
        /// Its place among all messages.
        message: usize,
        /// Where it begins.
        offset: usize,
        /// Bytes from there to the end.
        most: usize,
        /// What the header says.
        arrived: u64,
    },
}

/// The control messages of a buffer in order; ends after the first error.
#[derive(Clone, Debug)]
pub struct ControlMessages<'a> {
    control: &'a [u8],
    /// Where the next message begins.
    at: usize,
    /// How many came before it.
    index: usize,
}

impl<'a> ControlMessages<'a> {
    /// Reads the bytes that the kernel filled, `msg_controllen` of them after the call.
    pub fn new(control: &'a [u8]) -> Self {
        Self {
            control,
            at: 0,
            index: 0,
        }
    }

    /// Number of messages that came so far, the failed one included.
    pub fn seen(&self) -> usize {
        self.index
    }

    fn read(&self) -> Result<(ControlMessage<'a>, usize), BadControl> {
        let rest = &self.control[self.at..];
        let Some((header, _)) = rest.split_first_chunk::<HEADER_BYTES>() else {
            return Err(BadControl::HeaderCut {
                message: self.index,
                offset: self.at,
                arrived: rest.len(),
            });
        };
        let [l0, l1, l2, l3, l4, l5, l6, l7, level @ .., k0, k1, k2, k3] = *header;
        let length = u64::from_ne_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
        let end = usize::try_from(length).unwrap_or(usize::MAX);
        let payload = rest.get(HEADER_BYTES..end).ok_or(BadControl::Length {
            message: self.index,
            offset: self.at,
            most: rest.len(),
            arrived: length,
        })?;
        let message = ControlMessage {
            level: i32::from_ne_bytes(level),
            kind: i32::from_ne_bytes([k0, k1, k2, k3]),
            payload,
        };
        // The last message may lack its padding.
        Ok((message, (self.at + cmsg_align(end)).min(self.control.len())))
    }
}

impl<'a> Iterator for ControlMessages<'a> {
    type Item = Result<ControlMessage<'a>, BadControl>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.control.len() {
            return None;
        }
        let read = self.read();
        self.index += 1;
        self.at = read.map_or(self.control.len(), |(_, next)| next);
        Some(read.map(|(message, _)| message))
    }
}

impl FusedIterator for ControlMessages<'_> {}
