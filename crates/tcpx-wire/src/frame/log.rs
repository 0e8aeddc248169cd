//! Frames of one direction, kept until the peer has them, so that another connection can go on where
//! one broke.

use std::collections::VecDeque;

use thiserror::Error;

use super::{Frame, FrameError, LEAST_PLAIN_BYTES, encode};

/// Numbers, encodes and keeps the frames of one direction.
///
/// The caller writes [`unwritten`](Self::unwritten) to the connection. When that breaks, the peer
/// says on the next one how many frames it has ([`rewind`](Self::rewind)), and what it has not comes
/// again.
#[derive(Debug)]
pub struct FrameLog {
    keep: bool,
    /// Whether long payload goes unsealed.
    plain: bool,
    /// Kept frames, oldest first, from `start` on.
    bytes: Vec<u8>,
    start: usize,
    /// Where each of them ends.
    ends: VecDeque<End>,
    /// Place of `bytes[start]`.
    base: u64,
    /// What was written ends here.
    written: u64,
    /// Sequence number of the first kept frame.
    first: u32,
}

/// The end of a frame.
#[derive(Clone, Copy, Debug)]
struct End {
    /// Counted from the first byte of the direction.
    at: u64,
    /// So many bytes before it go unsealed.
    plain: usize,
}

/// Bytes that are written next, all in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run<'a> {
    /// They are sealed.
    Sealed(&'a [u8]),
    /// They go as they are.
    Plain(&'a [u8]),
}

/// A position that the peer cannot have.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "control: expected the peer to have frames up to one of {first} to {last}, {arrived} arrived; run the same version on both sides"
)]
pub struct PositionError {
    /// Frames before this one are known to have arrived.
    pub first: u32,
    /// The next frame that would be sent whole.
    pub last: u32,
    /// What the peer says that it expects next.
    pub arrived: u32,
}

impl FrameLog {
    /// An empty log. Without `keep`, frames are forgotten once they are written; `plain`: payload is not encrypted.
    pub fn new(keep: bool, plain: bool) -> Self {
        Self {
            keep,
            plain,
            bytes: Vec::new(),
            start: 0,
            ends: VecDeque::new(),
            base: 0,
            written: 0,
            first: 0,
        }
    }

    /// Numbers a frame and appends it.
    ///
    /// # Errors
    /// When a field is out of bounds; nothing was appended then.
    pub fn push(&mut self, frame: &Frame) -> Result<(), FrameError> {
        // Far fewer frames than a u32 counts are kept.
        let sequence = self.first.wrapping_add(self.ends.len() as u32);
        encode(frame, sequence, &mut self.bytes)?;
        let plain = match frame {
            Frame::Eager { payload, .. } if self.plain && payload.len() >= LEAST_PLAIN_BYTES => {
                payload.len()
            }
            _ => 0,
        };
        let at = self.end();
        self.ends.push_back(End { at, plain });
        Ok(())
    }

    /// What is to be written next, up to where the way changes or some bytes behind `most`.
    pub fn next_run(&self, most: usize) -> Option<Run<'_>> {
        let bytes = self.unwritten();
        if bytes.is_empty() {
            return None;
        }
        let next = self.ends.partition_point(|end| end.at <= self.written);
        for (nth, end) in self.ends.range(next..).enumerate() {
            // Both lie in `bytes`.
            let ends = (end.at - self.written) as usize;
            if end.plain > 0 {
                return Some(match ends.saturating_sub(end.plain) {
                    0 if nth == 0 => Run::Plain(&bytes[..ends]),
                    sealed => Run::Sealed(&bytes[..sealed]),
                });
            }
            if ends > most {
                break;
            }
        }
        Some(Run::Sealed(bytes))
    }

    /// What is to be written next.
    pub fn unwritten(&self) -> &[u8] {
        let at = usize::try_from(self.written - self.base).unwrap_or(usize::MAX);
        self.bytes[self.start..].get(at..).unwrap_or_default()
    }

    /// Where the last frame ends.
    fn end(&self) -> u64 {
        self.base + self.held() as u64
    }

    /// The connection took this many bytes of [`unwritten`](Self::unwritten).
    pub fn wrote(&mut self, bytes: usize) {
        let end = self.end();
        self.written = self.written.saturating_add(bytes as u64).min(end);
        // In one go, when all is written, and not by the frame.
        if !self.keep && self.written == end {
            self.forget();
        }
    }

    /// Bytes that are held.
    pub fn held(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// The peer says that it has every frame before `next`. A number that had been passed is no news:
    /// what it said before another connection went on comes again behind that.
    ///
    /// # Errors
    /// When `next` was not reached.
    pub fn acknowledged(&mut self, next: u32) -> Result<(), PositionError> {
        if self.is_behind(next) {
            return Ok(());
        }
        self.reach(next)
    }

    /// Whether `next` comes before the first kept frame. Numbers wrap.
    fn is_behind(&self, next: u32) -> bool {
        (1..=u32::MAX / 2).contains(&self.first.wrapping_sub(next))
    }

    fn reach(&mut self, next: u32) -> Result<(), PositionError> {
        let whole = self.ends.partition_point(|end| end.at <= self.written);
        let count = next.wrapping_sub(self.first) as usize;
        if count > whole {
            return Err(PositionError {
                first: self.first,
                last: self.first.wrapping_add(whole as u32),
                arrived: next,
            });
        }
        let last = self.ends.drain(..count).next_back();
        if let Some(End { at: end, .. }) = last {
            let bytes = usize::try_from(end - self.base).unwrap_or(usize::MAX);
            self.start = self.bytes.len().min(self.start.saturating_add(bytes));
            self.base = end;
            // What is kept moves seldom, and never more of it than has gone.
            if self.start >= self.bytes.len() - self.start {
                self.bytes.drain(..self.start);
                self.start = 0;
            }
        }
        self.first = next;
        Ok(())
    }

    /// Another connection goes on, and the peer has every frame before `next`: all others are to be
    /// written again.
    ///
    /// # Errors
    /// When `next` was not reached or had been passed before: nothing is left of what it lacks.
    pub fn rewind(&mut self, next: u32) -> Result<(), PositionError> {
        self.reach(next)?;
        self.written = self.base;
        Ok(())
    }

    /// Drops everything that is held, written or not.
    pub fn forget(&mut self) {
        self.first = self.first.wrapping_add(self.ends.len() as u32);
        self.base = self.end();
        self.written = self.base;
        self.ends.clear();
        self.bytes.clear();
        self.start = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{FrameDecoder, HEADER_BYTES, encode};
    use proptest::prelude::*;

    fn beat(counter: u64) -> Frame {
        Frame::Heartbeat { counter }
    }

    /// A connection that takes and gives bytes, and breaks.
    struct Pipe {
        log: FrameLog,
        wire: VecDeque<u8>,
        decoder: FrameDecoder,
        arrived: Vec<u64>,
    }

    impl Pipe {
        fn write(&mut self, most: usize) {
            let bytes = self.log.unwritten();
            let count = bytes.len().min(most);
            self.wire.extend(&bytes[..count]);
            self.log.wrote(count);
        }

        fn read(&mut self, most: usize) {
            let count = self.wire.len().min(most);
            let bytes: Vec<u8> = self.wire.drain(..count).collect();
            let mut input = bytes.as_slice();
            while let Some(frame) = self.decoder.next(&mut input).unwrap() {
                let Frame::Heartbeat { counter } = frame else {
                    panic!("{frame:?}");
                };
                self.arrived.push(counter);
            }
        }

        /// What is on its way is lost; another connection goes on.
        fn break_and_resume(&mut self) {
            self.wire.clear();
            self.decoder.restart();
            self.log.rewind(self.decoder.next_sequence()).unwrap();
        }
    }

    proptest! {
        #[test]
        fn every_frame_arrives_once_and_in_order_whatever_breaks(
            steps in prop::collection::vec((0u8..10, 0usize..100), 0..400),
        ) {
            let mut pipe = Pipe {
                log: FrameLog::new(true, false),
                wire: VecDeque::new(),
                decoder: FrameDecoder::new(),
                arrived: Vec::new(),
            };
            let mut sent = 0;
            for (kind, size) in steps {
                match kind {
                    0..=3 => {
                        pipe.log.push(&beat(sent)).unwrap();
                        sent += 1;
                    }
                    4..=5 => pipe.write(size),
                    6..=7 => pipe.read(size),
                    8 => pipe.log.acknowledged(pipe.decoder.next_sequence()).unwrap(),
                    _ => pipe.break_and_resume(),
                }
            }
            pipe.break_and_resume();
            pipe.write(usize::MAX);
            pipe.read(usize::MAX);
            pipe.log.acknowledged(pipe.decoder.next_sequence()).unwrap();
            prop_assert_eq!(pipe.arrived, (0..sent).collect::<Vec<_>>());
            prop_assert_eq!(pipe.log.held(), 0);
        }
    }

    #[test]
    fn a_position_that_was_not_reached_or_was_passed_is_an_error() {
        let mut log = FrameLog::new(true, false);
        for counter in 0..3 {
            log.push(&beat(counter)).unwrap();
        }
        log.wrote(2 * (HEADER_BYTES + 8) + 1);
        assert_eq!(
            log.acknowledged(3),
            Err(PositionError {
                first: 0,
                last: 2,
                arrived: 3
            })
        );
        log.acknowledged(2).unwrap();
        assert!(log.rewind(1).is_err());
        assert!(log.rewind(u32::MAX).is_err());
        log.rewind(2).unwrap();
        assert_eq!(log.unwritten().len(), HEADER_BYTES + 8);
    }

    /// What a side said to have received lies in its own log, and goes out again with the rest of that.
    #[test]
    fn what_was_acknowledged_comes_again_behind_a_rewind() {
        let mut log = FrameLog::new(true, false);
        log.first = u32::MAX - 1;
        for counter in 0..4 {
            log.push(&beat(counter)).unwrap();
        }
        log.wrote(usize::MAX);
        log.acknowledged(u32::MAX).unwrap();
        log.rewind(1).unwrap();
        // Told on the old connection, and lost with it.
        log.acknowledged(u32::MAX).unwrap();
        log.acknowledged(0).unwrap();
        assert_eq!((log.first, log.held()), (1, HEADER_BYTES + 8));
        assert!(log.acknowledged(2).is_err(), "it was not written again yet");
    }

    #[test]
    fn numbers_wrap() {
        let mut log = FrameLog::new(true, false);
        log.first = u32::MAX;
        log.push(&beat(0)).unwrap();
        log.push(&beat(1)).unwrap();
        log.wrote(usize::MAX);
        log.acknowledged(0).unwrap();
        assert_eq!(log.held(), HEADER_BYTES + 8);
        log.acknowledged(1).unwrap();
        assert_eq!(log.held(), 0);
    }

    #[test]
    fn without_keeping_nothing_is_held_once_it_is_written() {
        let mut log = FrameLog::new(false, false);
        log.push(&beat(0)).unwrap();
        log.wrote(log.unwritten().len());
        assert_eq!(log.held(), 0);
        log.push(&beat(1)).unwrap();
        let mut decoder = FrameDecoder::new();
        decoder
            .next(&mut &*{
                let mut first = Vec::new();
                encode(&beat(0), 0, &mut first).unwrap();
                first
            })
            .unwrap();
        assert_eq!(decoder.next(&mut log.unwritten()), Ok(Some(beat(1))));
    }
}
