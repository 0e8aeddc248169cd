//! From chunks to the payload stream: what was posted, how far it was written, and how far the peer
//! has it. No system calls here.
//!
//! A chunk is kept until the peer says that it has all of it: until then the peer may ask for any of
//! its bytes again, on another path. So *sent* means *received by the peer* here, until there is no other
//! path any more.

use std::collections::VecDeque;
use std::sync::Arc;

use tcpx_memory::RegionSlice;

use super::slots::SendSlot;
use tcpx_net::channel::Completion;

/// The sending half of a channel.
#[derive(Debug, Default)]
pub(super) struct Outflow {
    queue: VecDeque<Sending>,
    /// Where in the stream the next chunk begins.
    end: u64,
    /// Bytes that a socket has taken.
    written: u64,
    /// Bytes that the peer has.
    confirmed: u64,
}

#[derive(Debug)]
struct Sending {
    token: u64,
    /// Where it begins in the stream.
    start: u64,
    length: u64,
    source: Source,
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

/// The next bytes to write.
#[derive(Debug)]
pub(super) struct Next<'a> {
    pub(super) source: &'a Source,
    /// Where in the chunk to begin.
    pub(super) from: usize,
    /// Bytes from there to the chunk's end.
    pub(super) length: usize,
}

/// A word of the peer about a place in the stream that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BadPlace {
    pub(super) least: u64,
    pub(super) most: u64,
}

impl Outflow {
    /// Queues a chunk; the answer names it for [`Self::staged`].
    pub(super) fn post(&mut self, token: u64, length: u64, source: Source) -> u64 {
        let start = self.end;
        self.end += length;
        self.queue.push_back(Sending {
            token,
            start,
            length,
            source,
        });
        start
    }

    /// The chunk that begins at `start` can be sent from here now.
    pub(super) fn staged(&mut self, start: u64, source: Source) {
        if let Ok(at) = self.queue.binary_search_by_key(&start, |one| one.start) {
            self.queue[at].source = source;
        }
    }

    /// Chunks posted and not confirmed.
    pub(super) fn posted(&self) -> usize {
        self.queue.len()
    }

    /// Whether there are bytes that no socket has taken.
    pub(super) fn is_pending(&self) -> bool {
        self.written < self.end
    }

    /// The next bytes to write; `None` when all are written.
    pub(super) fn next(&self) -> Option<Next<'_>> {
        if !self.is_pending() {
            return None;
        }
        let after = self.queue.partition_point(|one| one.start <= self.written);
        let sending = self.queue.get(after.checked_sub(1)?)?;
        // What is past its end in a chunk of no bytes has a successor that begins there too.
        let from = self.written - sending.start;
        Some(Next {
            source: &sending.source,
            from: usize::try_from(from).ok()?,
            length: usize::try_from(sending.length.checked_sub(from)?).ok()?,
        })
    }

    /// The chunks in slots: their places, and the memory that each was copied from. They wait for
    /// [`Self::staged`] then.
    pub(super) fn take_from_slots(&mut self) -> Vec<(u64, RegionSlice)> {
        let take = |one: &mut Sending| match std::mem::replace(&mut one.source, Source::Staging) {
            Source::Device { slice, .. } => Some((one.start, slice)),
            other => {
                one.source = other;
                None
            }
        };
        self.queue.iter_mut().filter_map(take).collect()
    }

    /// A socket has taken so many of the next bytes.
    pub(super) fn wrote(&mut self, bytes: usize) {
        self.written = self.end.min(self.written + bytes as u64);
    }

    /// The peer has all bytes before `place`.
    ///
    /// # Errors
    /// The peer cannot have those, or had more before.
    pub(super) fn confirm(
        &mut self,
        place: u64,
        out: &mut Vec<Completion>,
    ) -> Result<u64, BadPlace> {
        self.check(place)?;
        self.confirmed = place;
        Ok(self.end_confirmed(out))
    }

    /// What a socket has taken is never asked for again.
    pub(super) fn let_go(&mut self, out: &mut Vec<Completion>) -> u64 {
        self.confirmed = self.written;
        self.end_confirmed(out)
    }

    fn end_confirmed(&mut self, out: &mut Vec<Completion>) -> u64 {
        let mut chunks = 0;
        while let Some(first) = self.queue.front() {
            let sent = first.start + first.length <= self.confirmed;
            if !sent || matches!(first.source, Source::Staging) {
                break;
            }
            out.push(Completion::Sent { token: first.token });
            self.queue.pop_front();
            chunks += 1;
        }
        chunks
    }

    /// The peer has all bytes before `place`, and wants those from there on another path.
    ///
    /// # Errors
    /// As [`Self::confirm`].
    pub(super) fn rewind(
        &mut self,
        place: u64,
        out: &mut Vec<Completion>,
    ) -> Result<u64, BadPlace> {
        let chunks = self.confirm(place, out)?;
        self.written = place;
        Ok(chunks)
    }

    fn check(&self, place: u64) -> Result<(), BadPlace> {
        if (self.confirmed..=self.written).contains(&place) {
            return Ok(());
        }
        Err(BadPlace {
            least: self.confirmed,
            most: self.written,
        })
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
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tcpx_memory::Region;

    fn outflow(lengths: &[u64]) -> Outflow {
        let mut outflow = Outflow::default();
        for (token, length) in (0u64..).zip(lengths) {
            let region = Region::host(*length as usize).unwrap();
            outflow.post(token, *length, Source::Host(region.all()));
        }
        outflow
    }

    /// Writes what is next in pieces of at most `most` bytes; start and length of each within its chunk.
    fn write_all(outflow: &mut Outflow, most: usize) -> Vec<(usize, usize)> {
        let mut pieces = Vec::new();
        while let Some(next) = outflow.next() {
            let bytes = next.length.min(most);
            pieces.push((next.from, bytes));
            outflow.wrote(bytes);
        }
        pieces
    }

    fn tokens(out: &[Completion]) -> Vec<u64> {
        let token = |one: &Completion| match one {
            Completion::Sent { token } => *token,
            other => panic!("{other:?}"),
        };
        out.iter().map(token).collect()
    }

    #[test]
    fn chunks_are_written_one_after_the_other_and_end_when_the_peer_has_them() {
        let mut outflow = outflow(&[10, 3, 7]);
        assert_eq!(
            write_all(&mut outflow, 6),
            [(0, 6), (6, 4), (0, 3), (0, 6), (6, 1)]
        );
        let mut out = Vec::new();
        assert_eq!(outflow.confirm(9, &mut out), Ok(0));
        assert_eq!(outflow.confirm(13, &mut out), Ok(2));
        assert_eq!(outflow.confirm(20, &mut out), Ok(1));
        assert_eq!((tokens(&out), outflow.posted()), (vec![0, 1, 2], 0));
    }

    #[test]
    fn a_rewind_writes_again_what_the_peer_lacks() {
        let mut outflow = outflow(&[10, 3, 7]);
        write_all(&mut outflow, 100);
        let mut out = Vec::new();
        assert_eq!(outflow.rewind(11, &mut out), Ok(1));
        assert_eq!(tokens(&out), [0]);
        assert_eq!(write_all(&mut outflow, 100), [(1, 2), (0, 7)]);
        assert_eq!(outflow.rewind(20, &mut out), Ok(2));
        assert!(outflow.next().is_none());
    }

    #[test]
    fn a_place_that_cannot_be_is_refused() {
        let mut outflow = outflow(&[10]);
        outflow.wrote(6);
        let mut out = Vec::new();
        assert_eq!(
            outflow.confirm(7, &mut out),
            Err(BadPlace { least: 0, most: 6 })
        );
        assert_eq!(outflow.confirm(5, &mut out), Ok(0));
        assert_eq!(
            outflow.rewind(4, &mut out),
            Err(BadPlace { least: 5, most: 6 })
        );
        assert!(out.is_empty());
    }

    #[test]
    fn a_chunk_that_is_still_copied_outlives_the_close() {
        let mut outflow = outflow(&[10]);
        let start = outflow.post(7, 5, Source::Staging);
        assert_eq!(outflow.close(), [0]);
        outflow.staged(start, Source::Failed);
        assert_eq!(outflow.close(), [7]);
    }
}
