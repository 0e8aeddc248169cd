//! One control message after another, whatever they say.

use std::iter::FusedIterator;

use super::error::CmsgError;
use super::layout::{HEADER_BYTES, cmsg_align, field};

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
    pub(super) fn seen(&self) -> usize {
        self.index
    }

    fn read(&self) -> Result<(ControlMessage<'a>, usize), CmsgError> {
        let rest = self.control.get(self.at..).unwrap_or_default();
        let header = (|| {
            let length = u64::from_ne_bytes(field(rest, 0)?);
            let level = i32::from_ne_bytes(field(rest, 8)?);
            let kind = i32::from_ne_bytes(field(rest, 12)?);
            Some((length, level, kind))
        })();
        let (length, level, kind) = header.ok_or(CmsgError::HeaderCut {
            message: self.index,
            offset: self.at,
            arrived: rest.len(),
        })?;
        let end = usize::try_from(length).ok();
        let (end, payload) = end
            .and_then(|end| Some((end, rest.get(HEADER_BYTES..end)?)))
            .ok_or(CmsgError::MessageLength {
                message: self.index,
                offset: self.at,
                most: rest.len(),
                arrived: length,
            })?;
        let message = ControlMessage {
            level,
            kind,
            payload,
        };
        // The last message may lack its padding.
        Ok((message, (self.at + cmsg_align(end)).min(self.control.len())))
    }
}

impl<'a> Iterator for ControlMessages<'a> {
    type Item = Result<ControlMessage<'a>, CmsgError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.control.len() {
            return None;
        }
        let read = self.read();
        self.index += 1;
        Some(match read {
            Ok((message, next)) => {
                self.at = next;
                Ok(message)
            }
            Err(error) => {
                self.at = self.control.len();
                Err(error)
            }
        })
    }
}

impl FusedIterator for ControlMessages<'_> {}
