//! Unpacking with one copy for each descriptor, and copies of memory in pieces with one for each.

use tcpx_wire::Descriptor;

use super::cut::Cut;
use super::device::CopyStream;
use super::engine::{Engine, Step, lane_of};
use crate::error::{CudaError, MemoryError};
use crate::job::Work;
use crate::slice::RegionSlice;
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
    lane: CopyStream,
    rest: Rest,
}

/// What is left to copy.
enum Rest {
    /// Descriptors, from the pool at an address to the destination at another one.
    Descriptors { pool: u64, to: u64, cut: Cut },
    /// All from this byte on.
    From(usize),
}

impl Unpacking {
    /// An unpack, or a copy of memory in pieces, whose ends the device can address; else the ticket
    /// back.
    pub(super) fn new(ticket: Ticket) -> Result<Self, Box<Ticket>> {
        let started = match ticket.work() {
            Work::Unpack { pool, to, .. } => {
                let addresses = pool.slice().device_address().zip(to.device_address());
                addresses.map(|(address, to_address)| {
                    let rest = Rest::Descriptors {
                        pool: address,
                        to: to_address,
                        // A copy engine takes any length.
                        cut: Cut::new(u64::MAX),
                    };
                    (lane_of(pool.kind(), to.kind()), rest)
                })
            }
            Work::Copy { from, to } => Some((lane_of(from.kind(), to.kind()), Rest::From(0))),
            Work::Checksum { .. } => None,
        };
        match started {
            Some((lane, rest)) => Ok(Self { ticket, lane, rest }),
            None => Err(Box::new(ticket)),
        }
    }

    pub(super) fn into_parts(self) -> (CopyStream, Ticket) {
        (self.lane, self.ticket)
    }

    /// Queues the next part. `Done` says that all of it, or all up to an error, is in flight.
    pub(super) fn step(&mut self, engine: &Engine) -> Step {
        let work = self.ticket.work();
        let copied = match (work, &mut self.rest) {
            (Work::Unpack { descriptors, .. }, Rest::Descriptors { pool, to, cut }) => {
                let descriptors = descriptors.as_slice();
                copy(engine, self.lane, (*pool, *to), cut, descriptors)
                    .map(|()| cut.peek(descriptors).is_none())
            }
            (Work::Copy { from, to }, Rest::From(done)) => {
                let start = *done;
                let copied = copy_parts(engine, self.lane, (from, to), done);
                if copied.is_ok() && *done == start {
                    // Only memory that the device can address gets here.
                    return Step::Done(Err(MemoryError::WorkerFailed));
                }
                copied.map(|()| *done == from.len())
            }
            _ => return Step::Done(Err(MemoryError::WorkerFailed)),
        };
        match copied {
            Err(error) => Step::Done(Err(error.into())),
            Ok(true) => Step::Done(Ok(work.bytes())),
            Ok(false) => Step::Progress,
        }
    }
}

/// Addresses and lengths of what one copy can move, from a byte on: the source, the destination,
/// the length. Nothing of memory that the device cannot address.
pub(super) fn parts<'a>(
    from: &'a RegionSlice,
    to: &'a RegionSlice,
    start: usize,
) -> impl Iterator<Item = (u64, u64, usize)> + 'a {
    let parts = |end: &'a RegionSlice| {
        let parts = end.device_parts(start..end.len()).ok().flatten();
        parts.into_iter().flatten()
    };
    let (mut sources, mut destinations) = (parts(from), parts(to));
    let (mut source, mut destination) = ((0, 0), (0, 0));
    std::iter::from_fn(move || {
        if source.1 == 0 {
            source = sources.next()?;
        }
        if destination.1 == 0 {
            destination = destinations.next()?;
        }
        let len = source.1.min(destination.1);
        let part = (source.0, destination.0, len);
        for end in [&mut source, &mut destination] {
            *end = (end.0 + len as u64, end.1 - len);
        }
        Some(part)
    })
}

/// Issues some copies of memory in pieces.
fn copy_parts(
    engine: &Engine,
    lane: CopyStream,
    (from, to): (&RegionSlice, &RegionSlice),
    done: &mut usize,
) -> Result<(), CudaError> {
    let start = *done;
    for (source, destination, len) in parts(from, to, start).take(COPIES) {
        // SAFETY: the ticket keeps both ends and their leases until the stream has passed the job.
        unsafe { engine.device.copy(lane, destination, source, len)? };
        *done += len;
    }
    Ok(())
}

/// Issues some copies.
fn copy(
    engine: &Engine,
    lane: CopyStream,
    (pool, to): (u64, u64),
    cut: &mut Cut,
    descriptors: &[Descriptor],
) -> Result<(), CudaError> {
    for _ in 0..COPIES {
        let Some(piece) = cut.next(descriptors) else {
            break;
        };
        let (source, destination) = (pool + piece.source, to + piece.destination);
        // SAFETY: the ticket keeps pool and destination until the stream has passed the job, and
        // its descriptors were checked against both.
        unsafe {
            engine
                .device
                .copy(lane, destination, source, piece.length as usize)?
        };
    }
    Ok(())
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
