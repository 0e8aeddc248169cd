//! The unpack method `host` where an end is device memory: bring the touched pool ranges to the
//! CPU, gather, send the result on. In batches, one after the other.

use std::ops::Range;

use super::STAGING;
use super::cut::Cut;
use super::device::{CopyStream, Device};
use super::engine::Step;
use crate::error::{CudaError, MemoryError};
use crate::fence::Event;
use crate::gpu::MappedHost;
use crate::job::Work;
use crate::slice::RegionSlice;

/// Bytes of a batch, and pieces of it.
const BATCH_BYTES: usize = STAGING / 4;
const BATCH_PIECES: usize = 512;
/// Neighbouring ranges are fetched together with a gap up to this many bytes between them.
const GAP: usize = 4 << 10;
/// Where gathered bytes lie in the staging memory; before them lies what was fetched.
const GATHERED: usize = STAGING / 2;
/// Bytes that gaps may take up, so that a batch always fits.
const GAPS: usize = GATHERED - BATCH_BYTES;

const _: () = assert!(GATHERED + BATCH_BYTES <= STAGING && BATCH_BYTES <= GATHERED);

/// A fragment, or a part of one, in the batch at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batched {
    source: usize,
    destination: usize,
    len: usize,
    /// Where its source was fetched to.
    fetched: usize,
}

enum State {
    /// The next batch is to be made and its pool ranges fetched.
    Next,
    /// The pool ranges are on their way.
    Fetching(Event),
    /// The gathered bytes are on their way.
    Sending(Event),
}

/// Why a batch ends early.
enum Failed {
    /// The driver refused; work in flight is tracked.
    Refused(CudaError),
    /// Copies are in flight whose end nothing will report.
    Lost(MemoryError),
}

/// An unpack job of the CPU's.
pub(super) struct HostUnpack {
    cut: Cut,
    pieces: Vec<Batched>,
    state: State,
    error: Option<MemoryError>,
}

impl HostUnpack {
    pub(super) fn new() -> Self {
        Self {
            cut: Cut::new(BATCH_BYTES as u64),
            pieces: Vec::with_capacity(BATCH_PIECES),
            state: State::Next,
            error: None,
        }
    }

    pub(super) fn step(&mut self, work: &Work, device: &mut Device, staging: MappedHost) -> Step {
        let Work::Unpack {
            pool,
            descriptors,
            to,
            ..
        } = work
        else {
            return Step::Done(Err(MemoryError::WorkerFailed));
        };
        let moved: Result<(), Failed> = match self.state {
            State::Fetching(event) => match self.wait(event, device) {
                None => return Step::Waiting,
                Some(Ok(())) => self.gather(pool.slice(), to, device, staging),
                Some(Err(error)) => Err(Failed::Lost(error.into())),
            },
            State::Sending(event) => match self.wait(event, device) {
                None => return Step::Waiting,
                Some(landed) => landed.map_err(|error| Failed::Lost(error.into())),
            },
            State::Next if device.free_events() == 0 => return Step::Waiting,
            State::Next => {
                if self.error.is_some() || !self.fill(descriptors.as_slice()) {
                    return Step::Done(match self.error.take() {
                        Some(error) => Err(error),
                        None => Ok(descriptors.bytes()),
                    });
                }
                self.fetch(pool.slice(), to, device, staging)
            }
        };
        match moved {
            Ok(()) => {}
            Err(Failed::Refused(error)) => {
                self.error.get_or_insert_with(|| error.into());
            }
            Err(Failed::Lost(error)) => return Step::Lost(error),
        }
        Step::Progress
    }

    /// Whether a copy has completed; after an error nothing will report it.
    fn wait(&mut self, event: Event, device: &mut Device) -> Option<Result<(), CudaError>> {
        let ready = event.is_ready(device.api());
        if ready == Ok(false) {
            return None;
        }
        device.give_back(event);
        self.state = State::Next;
        Some(ready.map(drop))
    }

    /// Cuts the next batch; `false` when there is none.
    fn fill(&mut self, descriptors: &[tcpx_wire::Descriptor]) -> bool {
        self.pieces.clear();
        let mut bytes = 0;
        while self.pieces.len() < BATCH_PIECES {
            let Some(piece) = self.cut.peek(descriptors) else {
                break;
            };
            let len = piece.length as usize;
            if !self.pieces.is_empty() && bytes + len > BATCH_BYTES {
                break;
            }
            self.cut.next(descriptors);
            bytes += len;
            self.pieces.push(Batched {
                source: piece.source as usize,
                destination: piece.destination as usize,
                len,
                fetched: 0,
            });
        }
        !self.pieces.is_empty()
    }

    /// Brings the batch's pool ranges to the staging memory, if the CPU cannot read them in place.
    fn fetch(
        &mut self,
        pool: &RegionSlice,
        to: &RegionSlice,
        device: &mut Device,
        staging: MappedHost,
    ) -> Result<(), Failed> {
        let (None, Some(address)) = (pool.host_ptr(), pool.device_address()) else {
            return self.gather(pool, to, device, staging);
        };
        let mut result = Ok(());
        for (range, at) in plan(&mut self.pieces) {
            let (from, into) = (address + range.start as u64, staging.at(at).device);
            // SAFETY: the job keeps the pool until its last event; the plan fits the staging
            // memory, which no other job uses meanwhile.
            result = unsafe { device.copy(CopyStream::Out, into, from, range.len()) };
            if result.is_err() {
                break;
            }
        }
        // After an error, too: what was issued must have ended before the job does.
        let marked = device.mark(CopyStream::Out).map_err(Failed::Lost)?;
        self.state = State::Fetching(marked);
        result.map_err(Failed::Refused)
    }

    /// Puts the batch in its order and sends it on.
    fn gather(
        &mut self,
        pool: &RegionSlice,
        to: &RegionSlice,
        device: &mut Device,
        staging: MappedHost,
    ) -> Result<(), Failed> {
        if self.error.is_some() {
            return Ok(());
        }
        let in_place = to.host_ptr();
        let mut at = GATHERED;
        for piece in &self.pieces {
            let source = match pool.host_ptr() {
                Some(pool) => pool.wrapping_add(piece.source),
                None => staging.at(piece.fetched).host.as_ptr(),
            };
            let destination = match in_place {
                Some(to) => to.wrapping_add(piece.destination),
                None => staging.at(at).host.as_ptr(),
            };
            // SAFETY: descriptors were checked against pool and destination, the plan fits the
            // staging memory, and the job's holds keep others away. Pool and destination may be one
            // region.
            unsafe { destination.copy_from(source, piece.len) };
            at += piece.len;
        }
        let (None, Some(address)) = (in_place, to.device_address()) else {
            return Ok(());
        };
        let mut result = Ok(());
        let mut at = GATHERED;
        for run in self
            .pieces
            .chunk_by(|one, next| one.destination + one.len == next.destination)
        {
            let len: usize = run.iter().map(|piece| piece.len).sum();
            let (from, into) = (staging.at(at).device, address + run[0].destination as u64);
            // SAFETY: as above; the job keeps the destination until its last event.
            result = unsafe { device.copy(CopyStream::In, into, from, len) };
            if result.is_err() {
                break;
            }
            at += len;
        }
        let marked = device.mark(CopyStream::In).map_err(Failed::Lost)?;
        self.state = State::Sending(marked);
        result.map_err(Failed::Refused)
    }
}

/// Decides which pool ranges to fetch, and where to: adjacent and nearly adjacent ones together.
/// Tells each piece where its source will be.
fn plan(pieces: &mut [Batched]) -> Vec<(Range<usize>, usize)> {
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_unstable_by_key(|&index| pieces[index].source);
    let mut ranges: Vec<(Range<usize>, usize)> = Vec::with_capacity(pieces.len());
    let (mut gaps, mut next) = (GAPS, 0);
    for index in order {
        let piece = &mut pieces[index];
        let end = piece.source + piece.len;
        if let Some((range, at)) = ranges.last_mut() {
            let gap = piece.source.saturating_sub(range.end);
            if gap <= GAP.min(gaps) {
                gaps -= gap;
                range.end = range.end.max(end);
                piece.fetched = *at + (piece.source - range.start);
                next = *at + range.len();
                continue;
            }
        }
        piece.fetched = next;
        ranges.push((piece.source..end, next));
        next += piece.len;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(source: usize, len: usize) -> Batched {
        Batched {
            source,
            destination: 0,
            len,
            fetched: usize::MAX,
        }
    }

    #[test]
    fn near_ranges_are_fetched_together_and_far_ones_apart() {
        let mut pieces = [
            piece(9000, 10),
            piece(100, 50),
            piece(1_000_000, 7),
            piece(160, 40),
            piece(120, 5),
        ];
        let ranges = plan(&mut pieces);
        // 9,000 lies more than 4 KiB behind 200.
        assert_eq!(
            ranges,
            [
                (100..200, 0),
                (9000..9010, 100),
                (1_000_000..1_000_007, 110)
            ]
        );
        let fetched: Vec<_> = pieces.iter().map(|piece| piece.fetched).collect();
        assert_eq!(fetched, [100, 0, 110, 60, 20]);
    }

    #[test]
    fn a_batch_always_fits_the_staging_memory() {
        // The worst case: as many pieces as there may be, each with the widest gap, as many bytes
        // as there may be.
        let len = BATCH_BYTES / BATCH_PIECES;
        let mut pieces: Vec<_> = (0..BATCH_PIECES)
            .map(|index| piece(index * (len + GAP), len))
            .collect();
        let ranges = plan(&mut pieces);
        let end = ranges.iter().map(|(range, at)| at + range.len()).max();
        assert!(end.is_some_and(|end| end <= GATHERED), "{end:?}");
    }
}
