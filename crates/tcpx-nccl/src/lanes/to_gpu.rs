//! A chunk, or a whole small message, on its way into GPU memory: read into pinned slots, and
//! copied from there.

use std::sync::Arc;

use tcpx_lanes::socket_calls::Span;
use tcpx_memory::{Job, PinnedPool, RegionSlice, Work};

use super::recv_stream::RecvStream;
use crate::memory::DeviceSlice;

/// What is left of bytes whose place is in GPU memory.
#[derive(Debug)]
pub(crate) struct ToGpu {
    to: DeviceSlice,
    /// The slot that is being filled, cut to its piece, and the bytes in it.
    piece: Option<(RegionSlice, usize)>,
}

impl ToGpu {
    pub(crate) const fn new(to: DeviceSlice) -> Self {
        Self { to, piece: None }
    }

    /// Bytes that are missing.
    pub(super) fn left(&self) -> usize {
        let filled = self.piece.as_ref().map_or(0, |(_, filled)| *filled);
        self.to.slice.len() - filled
    }

    /// Where the next bytes go; `None` when no slot is free. The pool then wakes the lanes, see
    /// `Runtime::watch`.
    pub(crate) fn room(&mut self) -> Option<Span> {
        if self.piece.is_none() {
            let slot = self.to.device.worker().pinned().try_take()?;
            let len = self.to.slice.len().min(PinnedPool::SLOT_BYTES);
            self.piece = Some((slot.slice().slice(..len).ok()?, 0));
        }
        let (piece, filled) = self.piece.as_ref()?;
        Some(Span::new(piece.host_ptr()?, piece.len()).from(*filled))
    }

    /// So many bytes of the last [`Self::room`] have arrived. The comm hears of them when they are
    /// copied.
    pub(crate) fn arrived(&mut self, bytes: usize, recv_stream: &Arc<RecvStream>, sequence: u64) {
        let Some((piece, filled)) = &mut self.piece else {
            return;
        };
        *filled += bytes;
        if *filled < piece.len() {
            return;
        }
        let Some((from, _)) = self.piece.take() else {
            return;
        };
        let submitted = self.to.slice.split_at(from.len()).and_then(|(to, rest)| {
            self.to.slice = rest;
            recv_stream.begin_copy();
            let job = Job {
                work: Work::Copy { from, to },
                // Only this receive's own memory is written, which NCCL's kernel leaves to us.
                fence: None,
                sink: Arc::<RecvStream>::clone(recv_stream),
                token: sequence,
            };
            self.to.device.worker().submit(job).map_err(|refused| {
                recv_stream.end_copy();
                refused.error
            })
        });
        if let Err(error) = submitted {
            recv_stream.copy_failed(&error);
        }
    }
}
