//! What this side does on a GPU beside the copy worker: small messages, and looks at the program's
//! work there.

use std::collections::VecDeque;

use tcpx_memory::{Fence, Gpu, SmallCopies, Work};
use tcpx_wire::session::OperationId;

use super::Core;
use super::operation::Token;

/// How often a fence is looked at ahead: the caller's GPU work may take long.
const LOOKS: u8 = 8;
/// Looks at copies under way, which cost nothing, between two at the socket.
const LOOKS_AT_COPIES: usize = 64;

pub(crate) struct GpuWork {
    /// Whose memory this side moves, if any.
    pub(crate) device: Option<Gpu>,
    /// For payload of GPU memory that travels with its announcement.
    pub(super) small: Option<SmallCopies>,
    /// Looked at before they are needed, while the peer or the wire has its turn: asking the driver
    /// takes microseconds, and its answer lasts.
    fences: VecDeque<(Fence, u8)>,
}

impl GpuWork {
    pub(crate) fn new(device: Option<Gpu>, small: Option<SmallCopies>) -> Self {
        Self {
            device,
            small,
            fences: VecDeque::new(),
        }
    }

    /// A small copy is under way.
    pub(super) fn is_copying(&self) -> bool {
        self.small.as_ref().is_some_and(SmallCopies::is_busy)
    }

    /// Whether one has ended.
    pub(super) fn has_copied(&mut self) -> bool {
        let small = self.small.as_ref().filter(|small| small.is_busy());
        small.is_some_and(|small| (0..LOOKS_AT_COPIES).any(|_| small.has_news()))
    }

    /// Notes a fence that somebody will ask for, beside fewer than `most` others.
    pub(crate) fn foresee(&mut self, fence: Option<&Fence>, most: usize) {
        if let Some(fence) = fence.filter(|fence| fence.gpu().is_some())
            && self.fences.len() < most
        {
            self.fences.push_back((fence.clone(), LOOKS));
        }
    }

    /// Looks at one fence, when there is nothing else to do.
    pub(super) fn look_at_fence(&mut self) {
        let Some((fence, left)) = self.fences.pop_front() else {
            return;
        };
        // An error is told to whoever needs the fence.
        if fence.is_reached() == Ok(false) && left > 1 {
            self.fences.push_back((fence, left - 1));
        }
    }
}

impl Core {
    /// Whether a receive has to wait for GPU work of the program before the peer may hear of its
    /// window.
    pub(crate) fn is_fenced(&self, fence: Option<&Fence>) -> bool {
        // An error is told to whoever needs the fence.
        let is_ahead = |fence: &Fence| fence.is_reached() == Ok(false);
        self.channels.is_addressed && fence.is_some_and(is_ahead)
    }

    /// Tells the session when a receive's fence is reached.
    pub(crate) fn await_fence(&mut self, id: OperationId) {
        let nothing = self.one_sided.lease_nothing().map(|lease| lease.all());
        match nothing {
            Ok(nothing) => {
                let token = self.tokens.add(Token::Fence(id));
                self.submit(Work::checksum(nothing), token, id);
            }
            Err(error) => self.memory_failed(id, &error),
        }
    }
}
