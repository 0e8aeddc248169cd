//! Pinned staging for sends from device memory: copies run ahead of the socket, in pieces.

use std::collections::VecDeque;
use std::sync::Arc;

use nccl_net::export::NetError;
use tcpx_lanes::socket_calls::Span;
use tcpx_memory::{Job, MemoryError, PinnedPool, RegionSlice, Work};

use crate::copies::Copies;
use crate::device::Device;
use crate::error;
use crate::ring::Ring;
use crate::send::{Request, Source};

/// Bytes of one piece: large enough for the copy engine and for a socket call.
const PIECE_BYTES: usize = 512 << 10;
/// What its jobs do, for errors.
const COPYING: &str = "copying from device memory";
/// Pieces copied or waiting for the socket.
const PIECES: usize = 8;

/// A piece of a send.
#[derive(Debug)]
struct Piece {
    sequence: u64,
    /// The copy's place among those in flight, its number modulo `PIECES`.
    place: usize,
    /// Where it was copied to.
    bytes: RegionSlice,
    sent: usize,
}

/// The staged pieces of one send comm, in slots that all comms share.
#[derive(Debug)]
pub(crate) struct Staging {
    device: Device,
    pool: PinnedPool,
    copies: Arc<Copies<PIECES>>,
    pieces: VecDeque<Piece>,
    pieces_made: usize,
    /// The first byte that no piece covers.
    sequence: u64,
    offset: usize,
}

impl Staging {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            pool: device.worker().slots_to_send(PIECES),
            copies: Arc::new(Copies::new()),
            pieces: VecDeque::with_capacity(PIECES),
            pieces_made: 0,
            sequence: 0,
            offset: 0,
        }
    }

    /// Starts copies for posted sends while slots are free.
    pub(crate) fn fill(&mut self, comm: &str, ring: &mut Ring<Request>) -> Result<(), NetError> {
        while self.pieces.len() < PIECES {
            let Some(request) = ring.by_sequence(self.sequence) else {
                // Finished and gone, or not posted yet.
                if self.sequence >= ring.posted() {
                    return Ok(());
                }
                self.next_request();
                continue;
            };
            let source = match &request.source {
                Source::Device(source) if self.offset < request.size => source,
                _ => {
                    self.next_request();
                    continue;
                }
            };
            let len = PIECE_BYTES.min(request.size - self.offset);
            let place = self.pieces_made % PIECES;
            // The next call tries again.
            let Some(slot) = self.pool.try_take() else {
                return Ok(());
            };
            let from = source.slice.slice(self.offset..self.offset + len);
            let to = slot.slice().slice(..len);
            let (from, to) = from
                .and_then(|from| Ok((from, to?)))
                .map_err(error::copy(comm, "cutting a send into pieces"))?;
            let bytes = to.clone();
            self.copies.start(place);
            let job = Job {
                work: Work::Copy { from, to },
                // NCCL posts a send when its kernel has written the bytes; that kernel may still
                // run, so waiting for a stream would be waiting for ourselves.
                fence: None,
                sink: self.copies.clone(),
                // Below 8.
                token: place as u64,
            };
            if let Err(refused) = self.device.worker().submit(job) {
                self.copies.reset(place);
                return match refused.error {
                    // The next call tries again.
                    MemoryError::QueueFull { .. } => Ok(()),
                    error => Err(error::copy(comm, COPYING)(error)),
                };
            }
            self.pieces.push_back(Piece {
                sequence: self.sequence,
                place,
                bytes,
                sent: 0,
            });
            self.pieces_made += 1;
            self.offset += len;
        }
        Ok(())
    }

    /// The next bytes of request `sequence`, when their copy has ended.
    pub(crate) fn ready(&self, comm: &str, sequence: u64) -> Result<Option<Span>, NetError> {
        let Some(piece) = self.pieces.front().filter(|p| p.sequence == sequence) else {
            return Ok(None);
        };
        let ended = self
            .copies
            .finished(piece.place)
            .map_err(error::copy(comm, COPYING))?;
        if !ended {
            return Ok(None);
        }
        let start = piece.bytes.host_ptr();
        Ok(start.map(|start| Span::new(start, piece.bytes.len()).from(piece.sent)))
    }

    /// The socket took so many bytes of the front piece.
    pub(crate) fn sent(&mut self, bytes: usize) {
        let Some(piece) = self.pieces.front_mut().filter(|_| bytes > 0) else {
            return;
        };
        piece.sent += bytes;
        if piece.sent >= piece.bytes.len() {
            self.copies.reset(piece.place);
            self.pieces.pop_front();
        }
    }

    fn next_request(&mut self) {
        self.sequence += 1;
        self.offset = 0;
    }
}

impl Staging {
    /// Waits until no copy reads the host program's memory; 5 s at most.
    pub(crate) fn wait_quiet(&self) {
        self.copies.wait_quiet();
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The host program may free its memory after the comm is closed.
        self.wait_quiet();
    }
}
