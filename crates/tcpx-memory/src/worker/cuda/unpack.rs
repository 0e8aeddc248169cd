//! Unpacking on the device: one copy per descriptor, or kernel launches.

use tcpx_wire::Descriptor;

use super::cut::Cut;
use super::device::Lane;
use super::engine::{Engine, Step};
use super::feed::{self, Inline};
use super::kernel::{Flag, Source};
use super::staging::BLOCK_ENTRIES;
use crate::bounce::UnpackMethod;
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
    pub(super) fn new(
        ticket: Ticket,
        multiprocessors: u32,
    ) -> Result<Self, Box<(Ticket, MemoryError)>> {
        let Work::Unpack {
            pool,
            descriptors,
            to,
            with,
        } = ticket.work()
        else {
            return Err(Box::new((ticket, MemoryError::WorkerStopped)));
        };
        let (Some(source), Some(destination)) =
            (pool.slice().device_address(), to.device_address())
        else {
            let error = MemoryError::MethodNotPossible {
                method: *with,
                pool: pool.kind(),
                destination: to.kind(),
                instead: UnpackMethod::automatic(pool.kind(), to.kind()),
            };
            return Err(Box::new((ticket, error)));
        };
        let (lane, cut) = match with {
            UnpackMethod::Kernel => {
                let piece = piece_bytes(descriptors.bytes(), multiprocessors);
                (Lane::Unpack, Cut::for_kernel(piece))
            }
            // A copy engine takes any length.
            UnpackMethod::D2d | UnpackMethod::Host => {
                (copy_lane(pool.kind(), to.kind()), Cut::new(u64::MAX))
            }
        };
        Ok(Self {
            lane,
            pool: source,
            to: destination,
            cut,
            ticket,
        })
    }

    pub(super) fn into_parts(self) -> (Lane, Ticket) {
        (self.lane, self.ticket)
    }

    /// Queues the next part. `Done` says that all of it, or all up to an error, is under way.
    pub(super) fn step(&mut self, engine: &mut Engine<'_>) -> Step {
        let Work::Unpack { descriptors, .. } = self.ticket.work() else {
            return Step::Done(Err(MemoryError::WorkerStopped));
        };
        let (bytes, descriptors) = (descriptors.bytes(), descriptors.as_slice());
        let (cut, to) = (&mut self.cut, (self.pool, self.to));
        let queued = match self.lane {
            Lane::Unpack => launch(engine, to, cut, descriptors),
            lane => copy(engine, lane, to, cut, descriptors).map(|()| true),
        };
        match queued {
            Err(error) => Step::Done(Err(error.into())),
            Ok(_) if self.cut.peek(descriptors).is_none() => Step::Done(Ok(bytes)),
            Ok(true) => Step::Progress,
            Ok(false) => Step::Waiting,
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

/// Launches for some pieces; `false` when no block for their list is free.
fn launch(
    engine: &mut Engine<'_>,
    (pool, to): (u64, u64),
    cut: &mut Cut,
    descriptors: &[Descriptor],
) -> Result<bool, CudaError> {
    let kernels = engine.device.kernels.as_ref().map_err(Clone::clone)?;
    let (api, stream) = (engine.device.api(), engine.device.stream(Lane::Unpack));
    let mut list = Inline::EMPTY;
    if let Some(shape) = feed::carry(cut, descriptors, &mut list) {
        let source = Source::Inline(&list);
        // SAFETY: the ticket keeps pool and destination until the stream has passed the job, and its
        // descriptors were checked against both.
        unsafe { kernels.unpack(api, stream, (pool, to), shape, source, Flag::default())? };
        return Ok(true);
    }
    let Some((block, host, address)) = engine.staging.take_block() else {
        return Ok(false);
    };
    // SAFETY: the block has room for that many, aligned, and no launch reads it now.
    let shape = unsafe { feed::write(cut, descriptors, host, BLOCK_ENTRIES, BLOCK_ENTRIES) };
    let source = Source::Mapped(address);
    // SAFETY: as above; the block is given back when the stream has passed the launch.
    let launched =
        unsafe { kernels.unpack(api, stream, (pool, to), shape, source, Flag::default()) };
    // Without an event the block is lost, which is safe; the context is broken then anyway.
    engine.fly_block(Lane::Unpack, block)?;
    launched.map(|()| true)
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
