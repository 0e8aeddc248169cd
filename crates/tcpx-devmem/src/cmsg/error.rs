//! Receives that must not be believed.

use std::fmt;

use tcpx_lanes::control_messages::BadControl;
use thiserror::Error;

/// Which of the two kinds a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Payload in the pool.
    Device,
    /// Payload copied to the iovec.
    Linear,
}

impl fmt::Display for RecordKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Linear => "linear",
        })
    }
}

/// Control messages that do not describe the receive.
///
/// After any of these the place in the stream is lost: close the socket, which gives every token
/// back, and send what was not acknowledged over another channel. Messages and records are counted
/// from 0.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmsgError {
    /// The kernel had more control messages than room (`MSG_CTRUNC`).
    #[error(
        "control buffer: a receive of {received} bytes had more control messages than room, {control_bytes} bytes of them arrived; close the channel and give recvmsg a larger control buffer, or turn off the socket option that adds messages"
    )]
    Truncated {
        /// Bytes of control messages that arrived.
        control_bytes: usize,
        /// Bytes that the receive returned.
        received: usize,
    },
    /// The bytes are no control messages.
    #[error(transparent)]
    Messages(#[from] BadControl),
    /// The message is one of the other kernel's.
    #[error(
        "control message {message}: expected device-memory records of type {device} or {linear}, type {arrived} of the other dialect arrived; close the channel and open it in the dialect of this kernel"
    )]
    OtherDialect {
        /// Its place among all messages.
        message: usize,
        /// Type of a device record.
        device: i32,
        /// Type of a linear record.
        linear: i32,
        /// What arrived.
        arrived: i32,
    },
    /// A record is not as long as its dialect says.
    #[error(
        "{kind} record {record}: expected {expected} bytes, {arrived} arrived; close the channel, this kernel speaks another dialect"
    )]
    RecordBytes {
        /// Its place among the records.
        record: usize,
        /// Which kind.
        kind: RecordKind,
        /// Bytes of a record in the dialect.
        expected: usize,
        /// Bytes that arrived.
        arrived: usize,
    },
    /// A record has a flag whose meaning is unknown.
    #[error(
        "{kind} record {record}: expected flags 0, 0x{arrived:x} arrived; close the channel, this kernel is newer than this program"
    )]
    Flags {
        /// Its place among the records.
        record: usize,
        /// Which kind.
        kind: RecordKind,
        /// What arrived.
        arrived: u32,
    },
    /// A fragment lies in a dma-buf that is not this pool.
    #[error(
        "device record {record}: expected dma-buf {expected}, a fragment of dma-buf {arrived} arrived; close the channel and check to which queue the flow is steered"
    )]
    UnknownDmabuf {
        /// Its place among the records.
        record: usize,
        /// The bound one.
        expected: u32,
        /// What arrived.
        arrived: u32,
    },
    /// A fragment reaches outside the pool.
    #[error(
        "device record {record}: expected a fragment inside the pool of {pool_bytes} bytes, {length} bytes at {pool_offset} arrived; close the channel"
    )]
    OutsidePool {
        /// Its place among the records.
        record: usize,
        /// Where it begins.
        pool_offset: u64,
        /// Its bytes.
        length: u32,
        /// Length of the pool in bytes.
        pool_bytes: u64,
    },
    /// The records are more than the receive returned.
    #[error(
        "{kind} record {record}: expected records of {received} bytes together, at least {described} arrived; close the channel"
    )]
    MoreThanReceived {
        /// The record that passes the end.
        record: usize,
        /// Which kind.
        kind: RecordKind,
        /// Bytes of the records up to and with this one.
        described: u64,
        /// Bytes that the receive returned.
        received: usize,
    },
    /// The records are less than the receive returned.
    #[error(
        "{records} records: expected {received} bytes together, {described} arrived; close the channel"
    )]
    LessThanReceived {
        /// How many records there were.
        records: usize,
        /// Their bytes.
        described: u64,
        /// Bytes that the receive returned.
        received: usize,
    },
    /// The receive returned more bytes than it was offered room for.
    #[error(
        "receive: expected at most the iovec's {iovec_bytes} bytes, {received} arrived; close the channel"
    )]
    MoreThanOffered {
        /// Length of the iovec in bytes.
        iovec_bytes: usize,
        /// Bytes that the receive returned.
        received: usize,
    },
}
