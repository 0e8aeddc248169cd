//! From chunks to a lane: what was posted, and how far it was written. No system calls here.
//!
//! A chunk is kept until the peer has placed it: when the payload lane ends, all that is kept is
//! written again, to the ordinary lane. So *sent* means *placed by the peer* here.

use std::collections::VecDeque;
use std::sync::Arc;

use tcpx_memory::RegionSlice;

use super::ordinary::{HEADER_BYTES, Header};
use super::slots::SendSlot;
use tcpx_net::channel::Completion;

/// The sending half of a channel.
#[derive(Debug, Default)]
pub(super) struct Outflow {
    queue: VecDeque<Sending>,
    /// The chunk that is written next, by its place in the queue.
    next: usize,
    /// Bytes that a socket has taken of it, its header's first.
    written: usize,
    /// Chunks follow a header, as on the ordinary lane.
    framed: bool,
}

#[derive(Debug)]
struct Sending {
    token: u64,
    sequence: u64,
    length: usize,
    source: Source,
    /// A socket took all of it, be it the payload lane's.
    sent: bool,
    /// The peer has it.
    placed: bool,
}

/// Where the bytes of a chunk can be sent from.
#[derive(Debug)]
pub(super) enum Source {
    /// The CPU reaches them.
    Host(RegionSlice),
    /// The network card reaches them, in this slot. The slice is where they were copied from.
    Device {
        slot: Arc<SendSlot>,
        slice: RegionSlice,
    },
    /// They are being copied to where they can be sent from.
    Staging,
    /// They could not be copied.
    Failed,
}

/// What one call may write next.
#[derive(Debug)]
pub(super) enum NextWrite {
    /// A chunk's header, from so many bytes on.
    Header([u8; HEADER_BYTES], usize),
    Host(RegionSlice),
    Device {
        slot: Arc<SendSlot>,
        offset: u64,
        length: usize,
    },
}

impl Outflow {
    pub(super) fn post(&mut self, token: u64, sequence: u64, length: usize, source: Source) {
        self.queue.push_back(Sending {
            token,
            sequence,
            length,
            source,
            sent: false,
            placed: false,
        });
    }

    /// The chunk of this sequence can be sent from here now.
    pub(super) fn staged(&mut self, sequence: u64, source: Source) {
        if let Some(one) = self.find(sequence) {
            one.source = source;
        }
    }

    fn find(&mut self, sequence: u64) -> Option<&mut Sending> {
        let mut queue = self.queue.iter_mut();
        queue.find(|one| one.sequence == sequence)
    }

    /// Chunks posted and not placed.
    pub(super) fn posted(&self) -> usize {
        self.queue.len()
    }

    /// Whether there are bytes that no socket has taken.
    pub(super) fn is_pending(&self) -> bool {
        self.next < self.queue.len()
    }

    /// What to write next, at most so many bytes of a chunk; `None` when all is written, or while
    /// the chunk is being copied.
    pub(super) fn next(&self, most: usize) -> Option<NextWrite> {
        let sending = self.queue.get(self.next)?;
        let header = self.header_bytes();
        if self.written < header {
            let header = Header {
                sequence: sending.sequence,
                length: u32::try_from(sending.length).ok()?,
            };
            return Some(NextWrite::Header(header.encode(), self.written));
        }
        let from = self.written - header;
        let length = most.min(sending.length - from);
        match &sending.source {
            Source::Host(slice) => slice.slice(from..from + length).ok().map(NextWrite::Host),
            Source::Device { slot, .. } => Some(NextWrite::Device {
                offset: slot.offset() + from as u64,
                slot: Arc::clone(slot),
                length,
            }),
            Source::Staging | Source::Failed => None,
        }
    }

    fn header_bytes(&self) -> usize {
        if self.framed { HEADER_BYTES } else { 0 }
    }

    /// A socket has taken so many of the next bytes.
    pub(super) fn wrote(&mut self, bytes: usize) {
        let header = self.header_bytes();
        let Some(sending) = self.queue.get_mut(self.next) else {
            return;
        };
        self.written += bytes;
        if self.written >= header + sending.length {
            sending.sent = true;
            self.next += 1;
            self.written = 0;
        }
    }

    /// The chunks in slots: their sequences, and the memory that each was copied from. They wait
    /// for [`Self::staged`] then.
    pub(super) fn take_from_slots(&mut self) -> Vec<(u64, RegionSlice)> {
        let take = |one: &mut Sending| match std::mem::replace(&mut one.source, Source::Staging) {
            Source::Device { slice, .. } => Some((one.sequence, slice)),
            other => {
                one.source = other;
                None
            }
        };
        self.queue.iter_mut().filter_map(take).collect()
    }

    /// The peer has placed the chunk of this sequence; `false` if it cannot have it.
    pub(super) fn placed(&mut self, sequence: u64) -> bool {
        let Some(one) = self.find(sequence) else {
            return true;
        };
        one.placed = true;
        one.sent
    }

    /// Whether the request of this token ends without another word of the peer.
    pub(super) fn is_placed(&self, token: u64) -> bool {
        let mut queue = self.queue.iter();
        queue.any(|one| one.token == token && one.placed)
    }

    /// Ends the chunks that the peer has placed, unless something still reads them; how many.
    pub(super) fn end_placed(&mut self, out: &mut Vec<Completion>) -> u64 {
        let mut chunks = 0;
        let mut at = 0;
        while let Some(one) = self.queue.get(at) {
            let half_written = at == self.next && self.written > 0;
            if !one.placed || half_written || matches!(one.source, Source::Staging) {
                at += 1;
                continue;
            }
            out.push(Completion::Sent { token: one.token });
            self.queue.remove(at);
            self.next -= usize::from(at < self.next);
            chunks += 1;
        }
        chunks
    }

    /// The payload lane has ended: what the peer has not placed is written again, each chunk behind
    /// a header. How many had been written before, be it in part.
    pub(super) fn start_over(&mut self) -> u64 {
        let again = self.next + usize::from(self.written > 0);
        (self.next, self.written, self.framed) = (0, 0, true);
        again as u64
    }

    /// Ends everything but the chunks that are still being copied; the tokens of those that ended.
    pub(super) fn close(&mut self) -> Vec<u64> {
        let mut ended = Vec::new();
        self.queue.retain(|one| {
            let staging = matches!(one.source, Source::Staging);
            if !staging {
                ended.push(one.token);
            }
            staging
        });
        (self.next, self.written) = (0, 0);
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tcpx_memory::Region;

    fn outflow(lengths: &[usize]) -> Outflow {
        let mut outflow = Outflow::default();
        for (token, length) in (0u64..).zip(lengths) {
            let region = Region::host(*length).unwrap();
            outflow.post(token, 10 + token, *length, Source::Host(region.all()));
        }
        outflow
    }

    /// Writes what is next in pieces of at most `most` bytes; the length of each, without headers.
    fn write_all(outflow: &mut Outflow, most: usize) -> Vec<usize> {
        let mut pieces = Vec::new();
        while let Some(next) = outflow.next(most) {
            let bytes = match next {
                NextWrite::Header(bytes, from) => (bytes.len() - from).min(most),
                NextWrite::Host(slice) => {
                    pieces.push(slice.len());
                    slice.len()
                }
                NextWrite::Device { .. } => panic!("{next:?}"),
            };
            outflow.wrote(bytes);
        }
        pieces
    }

    fn end_placed(outflow: &mut Outflow) -> Vec<u64> {
        let mut out = Vec::new();
        let count = outflow.end_placed(&mut out);
        assert_eq!(count, out.len() as u64);
        let token = |one: &Completion| match one {
            Completion::Sent { token } => *token,
            other => panic!("{other:?}"),
        };
        out.iter().map(token).collect()
    }

    #[test]
    fn chunks_are_written_in_order_and_end_when_placed() {
        let mut outflow = outflow(&[10, 3, 7]);
        assert_eq!(write_all(&mut outflow, 6), [6, 4, 3, 6, 1]);
        assert!(outflow.placed(11) && outflow.placed(11));
        assert_eq!(end_placed(&mut outflow), [1]);
        assert!(outflow.placed(12) && outflow.placed(10) && outflow.placed(99));
        assert_eq!(end_placed(&mut outflow), [0, 2]);
        assert_eq!((outflow.posted(), outflow.is_pending()), (0, false));
    }

    #[test]
    fn what_is_not_placed_is_written_again_behind_headers() {
        let mut outflow = outflow(&[10, 3, 7, 5]);
        outflow.wrote(10);
        outflow.wrote(3);
        outflow.wrote(2);
        assert!(outflow.placed(10));
        assert_eq!(end_placed(&mut outflow), [0]);
        assert_eq!(outflow.start_over(), 2);
        assert!(outflow.placed(11), "it had been written");
        assert_eq!(end_placed(&mut outflow), [1]);
        let Some(NextWrite::Header(bytes, 0)) = outflow.next(100) else {
            panic!("a header is first");
        };
        let header = Header::decode(bytes);
        assert_eq!((header.sequence, header.length), (12, 7));
        assert_eq!(write_all(&mut outflow, 5), [5, 2, 5]);
    }

    #[test]
    fn a_half_written_chunk_is_written_to_its_end() {
        let mut outflow = outflow(&[10]);
        outflow.wrote(10);
        outflow.start_over();
        outflow.wrote(1);
        assert!(outflow.placed(10));
        assert!(end_placed(&mut outflow).is_empty());
        assert_eq!(write_all(&mut outflow, 100), [10]);
        assert_eq!(end_placed(&mut outflow), [0]);
    }

    #[test]
    fn a_chunk_that_was_not_sent_cannot_be_placed() {
        let mut outflow = outflow(&[10]);
        outflow.wrote(6);
        assert!(!outflow.placed(10));
    }

    #[test]
    fn a_chunk_that_is_still_copied_outlives_the_close() {
        let mut outflow = outflow(&[10]);
        outflow.post(7, 11, 5, Source::Staging);
        assert_eq!(outflow.close(), [0]);
        outflow.staged(11, Source::Failed);
        assert_eq!(outflow.close(), [7]);
    }
}
