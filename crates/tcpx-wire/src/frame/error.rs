//! Why bytes are not a frame, or a frame not bytes.

use thiserror::Error;

use super::{InvalidSettings, MAX_BODY_BYTES};

/// The bytes that arrived are not the next frame; the connection cannot be used further.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// The header does not begin like a frame.
    #[error(
        "frame: expected magic 0x5458, 0x{arrived:04x} arrived; the stream lost its place, reconnect"
    )]
    Magic {
        /// What arrived.
        arrived: u16,
    },
    /// The kind is not known.
    #[error("frame: kind {arrived} is unknown; run the same version on both sides")]
    Kind {
        /// What arrived.
        arrived: u8,
    },
    /// Fields before a payload that the body has no room for, or that this kind has not.
    #[error(
        "frame: expected fewer bytes before a payload than {arrived}; run the same version on both sides"
    )]
    Fields {
        /// What arrived.
        arrived: u8,
    },
    /// The body is longer than any frame's.
    #[error("frame: expected a body of at most {limit} bytes, {arrived} announced; reconnect", limit = MAX_BODY_BYTES)]
    BodyTooLong {
        /// Announced bytes.
        arrived: u32,
    },
    /// The checksum does not match the bytes.
    #[error(
        "frame: checksum of the bytes is 0x{expected:08x}, 0x{arrived:08x} arrived; the bytes were damaged on the way, reconnect"
    )]
    Checksum {
        /// CRC32C of the bytes that arrived.
        expected: u32,
        /// The value in the header.
        arrived: u32,
    },
    /// A frame is missing or came twice.
    #[error("frame: expected sequence {expected}, {arrived} arrived; reconnect")]
    Sequence {
        /// The next number.
        expected: u32,
        /// The value in the header.
        arrived: u32,
    },
    /// The body ends inside a field.
    #[error(
        "{frame} frame: field {field} needs {needed} bytes, {left} are left; run the same version on both sides"
    )]
    Truncated {
        /// Name of the frame.
        frame: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Bytes the field takes.
        needed: usize,
        /// Bytes left in the body.
        left: usize,
    },
    /// The body goes on after the last field.
    #[error(
        "{frame} frame: expected its end, {left} more bytes arrived; run the same version on both sides"
    )]
    TrailingBytes {
        /// Name of the frame.
        frame: &'static str,
        /// Bytes left in the body.
        left: usize,
    },
    /// A field holds a value that it cannot have.
    #[error(
        "{frame} frame: expected {field} {expected}, {arrived} arrived; run the same version on both sides"
    )]
    Value {
        /// Name of the frame.
        frame: &'static str,
        /// Name of the field.
        field: &'static str,
        /// The legal values.
        expected: &'static str,
        /// What arrived.
        arrived: u64,
    },
    /// A field is longer than it may be.
    #[error("{frame} frame: expected {field} of at most {limit} bytes, {arrived} arrived")]
    TooLong {
        /// Name of the frame.
        frame: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Most bytes.
        limit: usize,
        /// Bytes that arrived.
        arrived: usize,
    },
    /// A text is not UTF-8.
    #[error("{frame} frame: expected {field} as UTF-8, byte {at} is not; reconnect")]
    Text {
        /// Name of the frame.
        frame: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Bytes of the text that are UTF-8.
        at: usize,
    },
    /// The peer's settings are out of bounds.
    #[error(transparent)]
    Settings(#[from] InvalidSettings),
}

/// A frame that no receiver would take.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeError {
    /// A field is longer than it may be.
    #[error("{frame} frame: {field} may have {limit} bytes, it has {actual}; split or shorten it")]
    TooLong {
        /// Name of the frame.
        frame: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Most bytes.
        limit: usize,
        /// Bytes it has.
        actual: usize,
    },
    /// A chunk length of zero never ends a transfer.
    #[error("grant frame: chunk_bytes must be at least 1")]
    ZeroChunk,
    /// The settings are out of bounds.
    #[error(transparent)]
    Settings(#[from] InvalidSettings),
}
