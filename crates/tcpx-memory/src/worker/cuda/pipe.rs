//! Copies and checksums that the CPU takes part in, through the worker's pinned memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::STAGING;
use super::device::{CopyStream, Device};
use super::engine::Step;
use crate::checksum::{Checksum, KeyedTag};
use crate::cpu;
use crate::error::{CudaError, MemoryError};
use crate::fence::Event;
use crate::gpu::MappedHost;
use crate::job::Work;
use crate::slice::RegionSlice;

/// Bytes of one piece: what the CPU does in one step.
const PIECE: usize = 1 << 20;
/// Pieces in flight at a time.
const SLOTS: usize = STAGING / PIECE / 2;

/// What happens with the bytes on the CPU's side.
enum Side {
    /// Read here on the way in, perhaps in pieces.
    Source(RegionSlice),
    /// Written here on the way out, perhaps in pieces.
    Destination(RegionSlice),
    /// Only looked at on the way out.
    Checksum(Box<Checksum>),
}

/// Bytes on their way between pageable memory, or a checksum, and the device.
pub(super) struct Pipe {
    side: Side,
    /// The end that the device can address.
    device: RegionSlice,
    len: usize,
    issued: usize,
    landed: usize,
    under_way: VecDeque<(Event, usize)>,
    error: Option<CudaError>,
}

impl Pipe {
    /// A copy of which one end is in pageable memory.
    pub(super) fn copy(from: &RegionSlice, to: &RegionSlice) -> Result<Self, MemoryError> {
        let is_on_host =
            |memory: &RegionSlice| memory.host_parts(0..0).map(|parts| parts.is_some());
        match (is_on_host(from)?, is_on_host(to)?) {
            (true, false) => Self::new(Side::Source(from.clone()), to),
            (false, true) => Self::new(Side::Destination(to.clone()), from),
            _ => Err(MemoryError::NotCpuAccessible { kind: from.kind() }),
        }
    }

    /// The checksum of device memory.
    pub(super) fn checksum(
        of: &RegionSlice,
        tag: Option<&Arc<KeyedTag>>,
    ) -> Result<Self, MemoryError> {
        Self::new(Side::Checksum(Box::new(Checksum::new(tag))), of)
    }

    fn new(side: Side, device: &RegionSlice) -> Result<Self, MemoryError> {
        if device.device_parts(0..0)?.is_none() {
            return Err(MemoryError::NotCpuAccessible {
                kind: device.kind(),
            });
        }
        Ok(Self {
            side,
            device: device.clone(),
            len: device.len(),
            issued: 0,
            landed: 0,
            under_way: VecDeque::with_capacity(SLOTS),
            error: None,
        })
    }

    pub(super) fn step(&mut self, device: &mut Device, staging: MappedHost) -> Step {
        if let Some(&(event, len)) = self.under_way.front() {
            match event.is_ready(device.api()) {
                Ok(false) => {}
                ready => {
                    self.under_way.pop_front();
                    device.give_back(event);
                    match ready {
                        // What came after an error is not all.
                        Ok(_) if self.error.is_some() => {}
                        Ok(_) => self.take_out(staging, len),
                        // Other engines of a broken context may still be at work.
                        Err(error) => return Step::Lost(error.into()),
                    }
                    return Step::Progress;
                }
            }
        }
        let ended = self.error.is_some() || self.landed == self.len;
        if ended && self.under_way.is_empty() {
            return Step::Done(self.result());
        }
        if ended
            || self.issued == self.len
            || self.under_way.len() == SLOTS
            || device.free_events() == 0
        {
            return Step::Waiting;
        }
        let (lane, issued) = self.issue(device, staging);
        // Of the copies to several pieces some may be in flight, after an error too.
        self.error = issued.err();
        let len = PIECE.min(self.len - self.issued);
        match device.mark(lane) {
            Ok(event) => self.under_way.push_back((event, len)),
            // The copy is in flight, and nothing will report when it ends.
            Err(error) => return Step::Lost(error),
        }
        self.issued += len;
        Step::Progress
    }

    fn result(&mut self) -> Result<u64, MemoryError> {
        match (self.error.take(), &self.side) {
            (Some(error), _) => Err(error.into()),
            (None, Side::Checksum(sum)) => Ok(u64::from(sum.finish())),
            (None, Side::Source(_) | Side::Destination(_)) => Ok(self.len as u64),
        }
    }

    /// Sends the next piece on its way, on the lane.
    fn issue(&self, device: &Device, staging: MappedHost) -> (CopyStream, Result<(), CudaError>) {
        let len = PIECE.min(self.len - self.issued);
        let slot = slot_of(self.issued);
        let lane = match &self.side {
            Side::Source(source) => {
                let host = staging.at(slot).host.as_ptr();
                // SAFETY: the job's hold keeps the source, the slot has room, and no copy uses it.
                let copy = |part: *mut u8, at, len| unsafe {
                    host.add(at).copy_from_nonoverlapping(part, len);
                };
                for_parts(source, self.issued..self.issued + len, copy);
                CopyStream::In
            }
            Side::Destination(_) | Side::Checksum(_) => CopyStream::Out,
        };
        let mut mapped = staging.at(slot).device;
        let range = self.issued..self.issued + len;
        let parts = self.device.device_parts(range).ok().flatten();
        for (address, len) in parts.into_iter().flatten() {
            let (to, from) = match lane {
                CopyStream::In => (address, mapped),
                _ => (mapped, address),
            };
            // SAFETY: the job keeps the memory until its last event, and so does the slot.
            if let Err(error) = unsafe { device.copy(lane, to, from, len) } {
                return (lane, Err(error));
            }
            mapped += len as u64;
        }
        (lane, Ok(()))
    }

    /// Uses a piece that has arrived; pieces arrive in order.
    fn take_out(&mut self, staging: MappedHost, len: usize) {
        let slot = staging.at(slot_of(self.landed)).host.as_ptr();
        match &mut self.side {
            Side::Source(_) => {}
            Side::Destination(destination) => {
                // SAFETY: the job's hold keeps the destination, and the copy to the slot has ended.
                let copy = |part: *mut u8, at, len| unsafe {
                    part.copy_from_nonoverlapping(slot.add(at), len);
                };
                for_parts(destination, self.landed..self.landed + len, copy);
            }
            // SAFETY: the slot has that many initialised bytes, and the copy to it has ended.
            Side::Checksum(sum) => sum.update(unsafe { std::slice::from_raw_parts(slot, len) }),
        }
        self.landed += len;
    }
}

/// The parts of a range of host memory: each one's address, where it lies in the range, and its
/// length.
fn for_parts(
    memory: &RegionSlice,
    range: Range<usize>,
    mut act: impl FnMut(*mut u8, usize, usize),
) {
    let parts = memory.host_parts(range).ok().flatten();
    let mut at = 0;
    for (part, len) in parts.into_iter().flatten() {
        act(part, at, len);
        at += len;
    }
}

/// Where in the staging memory the piece at `at` goes.
fn slot_of(at: usize) -> usize {
    at / PIECE % SLOTS * PIECE
}

/// Large work on memory that the CPU can address, in steps.
pub(super) struct CpuSteps {
    done: usize,
    sum: Option<Checksum>,
}

impl CpuSteps {
    pub(super) fn new() -> Self {
        Self { done: 0, sum: None }
    }

    pub(super) fn step(&mut self, work: &Work) -> Step {
        match cpu::step(work, &mut self.done, PIECE, &mut self.sum) {
            Ok(None) => Step::Progress,
            Ok(Some(value)) => Step::Done(Ok(value)),
            Err(error) => Step::Done(Err(error)),
        }
    }
}
