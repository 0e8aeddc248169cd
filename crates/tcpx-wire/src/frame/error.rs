//! Why bytes are not a frame, or a frame not bytes.

use thiserror::Error;

use super::InvalidSettings;

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
    /// A field, or the length of what there is of one, is not what it can be.
    #[error(
        "{frame} frame: expected {field} {expected}, {arrived} arrived; run the same version on both sides"
    )]
    Field {
        /// Name of the frame.
        frame: &'static str,
        /// Name of the field.
        field: &'static str,
        /// What it can be.
        expected: String,
        /// The value, or the bytes of it, that arrived.
        arrived: u64,
    },
    /// The peer's settings are out of bounds.
    #[error(transparent)]
    Settings(#[from] InvalidSettings),
}

impl FrameError {
    pub(super) fn field(
        frame: &'static str,
        field: &'static str,
        expected: impl Into<String>,
        arrived: u64,
    ) -> Self {
        Self::Field {
            frame,
            field,
            expected: expected.into(),
            arrived,
        }
    }

    /// A kind that does not exist.
    pub(super) fn kind(arrived: u8) -> Self {
        Self::field("unknown", "kind", "1 to 29", arrived.into())
    }
}
