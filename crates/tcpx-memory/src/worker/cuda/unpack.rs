//! Unpacking with one copy for each descriptor.

use tcpx_wire::Descriptor;

use super::cut::Cut;
use super::device::Lane;
use super::engine::{Engine, Step};
use crate::error::{CudaError, MemoryError};
use crate::job::Work;
use crate::kind::MemoryKind;
use crate::worker::queue::Ticket;

/// Copies issued in one step.
const COPIES: usize = 64;
/// Bounds of what one warp copies. A multiple of both ends' alignment, so that every piece of a
/// descriptor is aligned as its first one.
const SMALLEST_PIECE: u64 = 4 << 10;
const LARGEST_PIECE: u64 = 64 << 10;
/// Warps of a multiprocessor.
const WARPS: u64 = 64;

/// An unpack job that has started.
pub(super) struct Unpacking {
    ticket: Ticket,
    lane: Lane,
    pool: u64,
    to: u64,
    cut: Cut,
}

impl Unpacking {
    /// A job whose ends the device can address, else the ticket back.
    pub(super) fn new(ticket: Ticket) -> Result<Self, Box<Ticket>> {
        let ends = match ticket.work() {
            Work::Unpack { pool, to, .. } => {
                let lane = copy_lane(pool.kind(), to.kind());
                let addresses = pool.slice().device_address().zip(to.device_address());
                addresses.map(|(pool, to)| (lane, pool, to))
            }
            _ => None,
        };
        let Some((lane, pool, to)) = ends else {
            return Err(Box::new(ticket));
        };
        Ok(Self {
            lane,
            pool,
            to,
            // A copy engine takes any length.
            cut: Cut::new(u64::MAX),
            ticket,
        })
    }

    pub(super) fn into_parts(self) -> (Lane, Ticket) {
        (self.lane, self.ticket)
    }

    /// Queues the next part. `Done` says that all of it, or all up to an error, is in flight.
    pub(super) fn step(&mut self, engine: &Engine<'_>) -> Step {
        let Work::Unpack { descriptors, .. } = self.ticket.work() else {
            return Step::Done(Err(MemoryError::WorkerFailed));
        };
        let (bytes, descriptors) = (descriptors.bytes(), descriptors.as_slice());
        let ends = (self.pool, self.to);
        match copy(engine, self.lane, ends, &mut self.cut, descriptors) {
            Err(error) => Step::Done(Err(error.into())),
            Ok(()) if self.cut.peek(descriptors).is_none() => Step::Done(Ok(bytes)),
            Ok(()) => Step::Progress,
        }
    }
}

/// Issues some copies.
fn copy(
    engine: &Engine<'_>,
    lane: Lane,
    (pool, to): (u64, u64),
    cut: &mut Cut,
    descriptors: &[Descriptor],
) -> Result<(), CudaError> {
    for _ in 0..COPIES {
        let Some(piece) = cut.next(descriptors) else {
            break;
        };
        let (source, destination) = (pool + piece.source, to + piece.destination);
        // SAFETY: the ticket keeps pool and destination until the stream has passed the job, and its
        // descriptors were checked against both.
        unsafe {
            engine
                .device
                .copy(lane, destination, source, piece.length as usize)?
        };
    }
    Ok(())
}

fn copy_lane(pool: MemoryKind, to: MemoryKind) -> Lane {
    match (pool, to) {
        (MemoryKind::Cuda { .. }, MemoryKind::Cuda { .. }) => Lane::Across,
        (MemoryKind::Cuda { .. }, _) => Lane::Out,
        _ => Lane::In,
    }
}

/// Bytes a warp: enough pieces to fill every multiprocessor first, then as few as possible.
pub(super) fn piece_bytes(bytes: u64, multiprocessors: u32) -> u64 {
    let warps = u64::from(multiprocessors.max(1)) * WARPS;
    bytes
        .div_ceil(warps)
        .next_multiple_of(SMALLEST_PIECE)
        .clamp(SMALLEST_PIECE, LARGEST_PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_grow_with_the_transfer() {
        assert_eq!(piece_bytes(1, 132), 4096);
        assert_eq!(piece_bytes(4 << 20, 132), 4096);
        assert_eq!(piece_bytes(64 << 20, 132), 8192);
        assert_eq!(piece_bytes(1 << 30, 132), 65_536);
        assert_eq!(piece_bytes(u64::MAX >> 1, 132), 65_536);
    }
}
