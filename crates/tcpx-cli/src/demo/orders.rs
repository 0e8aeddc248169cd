//! What the demo's two processes tell each other over the second one's standard input and output: a line of JSON each.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// From the receiver to the sender.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub(crate) enum Order {
    /// Choose the memory.
    Start {
        gpu: Option<u32>,
        host: bool,
        timeout_ms: u64,
    },
    /// Fill the source, say so, connect and send.
    Send(SendOrder),
}

/// One transfer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SendOrder {
    pub(crate) network: NetworkOrder,
    /// Port on 127.0.0.1.
    pub(crate) port: u16,
    /// Travels through the pipe, never through arguments.
    pub(crate) key: String,
    pub(crate) bytes: u64,
    pub(crate) seed: u64,
    pub(crate) how: How,
}

/// How the bytes get from the sender's memory to the receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum How {
    /// Sent to a receive of the same tag.
    Send,
    /// Put into the receiver's window.
    Put,
    /// Got from the sender's window.
    Get,
    /// Put in pieces, in any order, with a notification behind them.
    Batch,
}

impl How {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Send => "send, receive",
            Self::Put => "put",
            Self::Get => "get",
            Self::Batch => "batch, notified",
        }
    }
}

/// Which network to use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum NetworkOrder {
    Tcp,
    Plugin { path: PathBuf },
}

impl NetworkOrder {
    pub(crate) fn short(&self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Plugin { .. } => "plugin",
        }
    }
}

/// From the sender to the receiver.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub(crate) enum Reply {
    /// The memory, for a person.
    Started { memory: String },
    /// The source is filled; connecting now.
    Prepared,
    /// The transfer is placed.
    Sent {
        elapsed_us: u64,
        crc32c: u32,
        head: Vec<u8>,
    },
    /// It is not.
    Failed { what: String, hint: String },
}
