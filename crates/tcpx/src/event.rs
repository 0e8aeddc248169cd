//! One vocabulary of what happens, from which progress bars, logs and test assertions derive.

use std::net::SocketAddr;
use std::time::Duration;

use tcpx_wire::{Level, Role};

/// Receives the events of a connection.
///
/// Called on engine threads while the connection is locked: must not block and must not start
/// anything on the connection. Cancelling, and dropping transfers and connections, is fine. A panic
/// is caught and logged.
pub trait Observer: Send + Sync {
    /// Something happened.
    fn event(&self, event: &Event);
}

/// A step of a connection or of a transfer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// Control connection and data channels are up.
    Connected {
        /// The peer's control address.
        peer: SocketAddr,
        /// Name of the network.
        network: String,
        /// Data channels.
        channels: u16,
    },
    /// A data channel had to take another path; nothing was lost.
    PathChanged {
        /// Which channel.
        channel: u16,
        /// The path it takes now.
        path: String,
        /// Why, and what to do, one line.
        why: String,
    },
    /// An operation was accepted from the program.
    Started {
        /// Our part in it.
        role: Role,
        /// What it matches on.
        tag: u64,
        /// Bytes to send, or room to receive.
        bytes: u64,
    },
    /// A chunk was given to its data channel.
    ChunkPosted(ChunkEvent),
    /// A chunk's source may be reused.
    ChunkSent(ChunkEvent),
    /// A chunk arrived as fragments and waits to be unpacked.
    ChunkArrived {
        /// The chunk.
        chunk: ChunkEvent,
        /// Fragments as the network reported them.
        fragments: usize,
        /// The first fragments, for a person to look at: pool offset, length, destination offset.
        sample: Vec<(u64, u32, u64)>,
        /// First bytes of the first fragment as they lie in the pool, when the CPU can read them.
        probe: Option<Vec<u8>>,
    },
    /// A chunk is at its destination.
    ChunkPlaced {
        /// The chunk.
        chunk: ChunkEvent,
        /// Time from its posting.
        elapsed: Duration,
    },
    /// An operation ended well.
    Completed {
        /// Our part in it.
        role: Role,
        /// What it matched on.
        tag: u64,
        /// Bytes moved.
        bytes: u64,
        /// What is known about them.
        level: Level,
    },
    /// An operation ended with an error.
    Failed {
        /// Our part in it.
        role: Role,
        /// What it matched on.
        tag: u64,
        /// The error, one line.
        error: String,
    },
    /// The connection ended; `error` is `None` after an orderly goodbye.
    Closed {
        /// Why, one line.
        error: Option<String>,
    },
}

/// Which chunk an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkEvent {
    /// Our part in the transfer.
    pub role: Role,
    /// The sender's number of the transfer; 2^63 and the window's name if it goes to a posted
    /// window.
    pub transfer: u64,
    /// The transfer's tag.
    pub tag: u64,
    /// Index in the transfer.
    pub index: u32,
    /// The channel that carries it.
    pub channel: u16,
    /// First byte in the transfer.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}
