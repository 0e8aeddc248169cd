//! Peers on the same host: the receiver of a chunk copies it from where it lies in the sender's memory.
//!
//! Nothing but its owner writes memory, so deadlines, cancels and deregistrations are local as on every path. A sender
//! [exposes](exposed) a chunk in an entry of its table and says on a lane which one; the receiver
//! [reads](peer_memory) entry, payload and entry again. Only an entry that is still the chunk's after the last byte
//! is success: a sender that lets go of memory empties the entry first.
//!
//! Which process the peer is [the kernel says](proof), and the peer's memory holds what the two ends of the session alone
//! know. The kernel asks for the right to read with each call.

mod exposed;
mod peer_memory;
mod proof;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tcpx_memory::MemoryKind;

use super::transmit_table::Outgoing;
pub(super) use exposed::Exposed;
use exposed::Table;
pub(super) use peer_memory::{PeerMemory, Read, Source};
pub(super) use proof::Door;

/// Whether payload may be read where it lies in the memory of a peer on the same host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local {
    /// Never.
    Off,
    /// Where the kernel proves the peer's process, and lets its memory be read; not with encryption.
    Auto,
    /// With encryption too.
    On,
}

impl Local {
    /// What `TCPX_LOCAL` says: `off`, `on`, or anything else for automatic.
    pub(super) fn of_process() -> Self {
        match std::env::var("TCPX_LOCAL").as_deref() {
            Ok("off") => Self::Off,
            Ok("on") => Self::On,
            _ => Self::Auto,
        }
    }

    /// Whether it is tried where payload is encrypted, or not.
    pub(super) fn is_wanted(self, encrypt: bool) -> bool {
        match self {
            Self::Off => false,
            Self::Auto => !encrypt,
            Self::On => true,
        }
    }
}

/// Payload below this many bytes follows its header: reading it elsewhere takes calls of its own, which copying it twice
/// does not.
const LEAST_BYTES: usize = 16 << 10;

/// What one side of a channel knows of a peer on its host.
#[derive(Debug, Default)]
pub(super) struct LocalPath {
    /// Where chunks are exposed, if the peer reads them.
    table: Option<Arc<Table>>,
    /// The peer's memory, if this side reads it.
    pub(super) peer: Option<PeerMemory>,
    /// An exposed chunk was not read: what follows goes over lanes.
    has_failed: AtomicBool,
    /// The owner was not told that.
    has_news: AtomicBool,
}

impl LocalPath {
    /// Exposes a chunk that nobody was told of, if the peer may read it; its lane says so in the header.
    pub(super) fn expose(&self, chunk: &Outgoing) -> Option<Exposed> {
        let table = self.table.as_ref()?;
        let is_host = chunk.payload.kind() == MemoryKind::Host && chunk.permit.is_none();
        let goes = is_host
            && chunk.attempt == 0
            && chunk.payload.len() >= LEAST_BYTES
            && !self.has_failed.load(Ordering::Relaxed);
        goes.then(|| table.expose(chunk.slot, &chunk.header, &chunk.payload))?
    }

    /// A lane ended with an exposed chunk: the peer may have failed to read it.
    pub(super) fn failed(&self) {
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            self.has_news.store(true, Ordering::Relaxed);
        }
    }

    /// Why chunks are exposed no more, said once.
    pub(super) fn news(&self) -> Option<&'static str> {
        let is_new = self.has_news.load(Ordering::Relaxed);
        (is_new && self.has_news.swap(false, Ordering::Relaxed)).then_some(
            "a lane ended with payload that the peer was to read where it lies; TCPX_LOCAL=off has it sent from the start",
        )
    }

    /// What a person is told of it; nothing for a peer of another host.
    pub(super) fn describe(&self) -> &'static str {
        let exposes = self.table.is_some() && !self.has_failed.load(Ordering::Relaxed);
        match (exposes, self.peer.is_some()) {
            (true, true) => ", local: host memory is read where it lies",
            (true, false) => ", local: host memory is read where it lies by the peer",
            (false, true) => ", local: host memory of the peer is read where it lies",
            (false, false) => "",
        }
    }
}
