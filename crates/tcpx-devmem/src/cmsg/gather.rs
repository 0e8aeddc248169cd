//! The pieces of many receives as one scatter list.

use tcpx_wire::{Fragment, ScatterList};
use thiserror::Error;

use super::dialect::Binding;
use super::error::CmsgError;
use super::pieces::{Piece, Received};
use crate::tokens::{TokenError, TokenSet};

/// Bytes that the kernel copied to host memory, and where they belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPiece {
    /// Where they lie in the host memory, in bytes.
    pub host_offset: u64,
    /// How many.
    pub length: u64,
    /// Where they belong in the destination, in bytes.
    pub destination_offset: u64,
}

/// What one receive added, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Added {
    /// In the pool.
    pub device: u64,
    /// In host memory, from the start of the iovec; the next receive may use what follows.
    pub host: u64,
}

/// A chunk as its receives bring it: fragments in the pool, pieces in host memory.
///
/// Destinations run in stream order from 0, or from where [`Self::restart`] said. Meant to be
/// cleared and filled again: once it has held the longest chunk it allocates nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    list: ScatterList,
    host: Vec<HostPiece>,
    device_bytes: u64,
    host_bytes: u64,
    /// Where in the destination the first byte belongs.
    base: u64,
}

impl Gathered {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a receive whose iovec began at `host_offset` of the host memory, and its tokens to
    /// `tokens`.
    ///
    /// The host memory must not be written again before the host pieces were copied: let the next
    /// iovec begin [`Added::host`] bytes further.
    ///
    /// # Errors
    /// When the control messages do not describe the receive, or a token came twice. What was
    /// gathered before stays as it was; the socket must be closed.
    pub fn add(
        &mut self,
        received: Received<'_>,
        binding: Binding,
        host_offset: u64,
        tokens: &mut TokenSet,
    ) -> Result<Added, GatherError> {
        let (fragments, pieces) = (self.list.len(), self.host.len());
        let added = self.fill(received, binding, host_offset, tokens);
        match added {
            Ok(added) => {
                // Their sum fitted; see `fill`.
                self.device_bytes += added.device;
                self.host_bytes += added.host;
            }
            Err(_) => {
                self.list.truncate(fragments);
                self.host.truncate(pieces);
            }
        }
        added
    }

    /// Removes everything and keeps the room.
    pub fn clear(&mut self) {
        self.restart(0);
    }

    /// As [`Self::clear`]; what is added next belongs at `destination_offset` and behind it. For a
    /// chunk that is handed on in parts.
    pub fn restart(&mut self, destination_offset: u64) {
        self.list.clear();
        self.host.clear();
        self.device_bytes = 0;
        self.host_bytes = 0;
        self.base = destination_offset;
    }

    /// The fragments in the pool; together [`Self::device_bytes`].
    pub fn list(&self) -> &ScatterList {
        &self.list
    }

    /// The pieces in host memory; together [`Self::host_bytes`].
    pub fn host_pieces(&self) -> &[HostPiece] {
        &self.host
    }

    /// Bytes in the pool.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Bytes in host memory.
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes
    }

    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.device_bytes + self.host_bytes
    }

    fn fill(
        &mut self,
        received: Received<'_>,
        binding: Binding,
        host_offset: u64,
        tokens: &mut TokenSet,
    ) -> Result<Added, GatherError> {
        let more = received.bytes as u64;
        let mut destination_offset = self.base.saturating_add(self.bytes());
        if destination_offset.checked_add(more).is_none() || host_offset.checked_add(more).is_none()
        {
            return Err(GatherError::TooLong {
                gathered: destination_offset,
                host_offset,
                received: more,
            });
        }
        let mut added = Added::default();
        for piece in received.pieces(binding) {
            let (host_at, length) = match piece? {
                Piece::Device(device) => {
                    tokens.insert(device.token)?;
                    self.list.push(Fragment {
                        source_offset: device.pool_offset,
                        length: device.length,
                        destination_offset,
                    });
                    added.device += u64::from(device.length);
                    destination_offset += u64::from(device.length);
                    continue;
                }
                Piece::Linear {
                    iovec_offset,
                    length,
                } => (iovec_offset, length.into()),
                Piece::Plain { length } => (0, length),
            };
            self.host.push(HostPiece {
                host_offset: host_offset + host_at,
                length,
                destination_offset,
            });
            added.host += length;
            destination_offset += length;
        }
        Ok(added)
    }
}

/// A receive that cannot be added.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GatherError {
    /// The control messages do not describe it.
    #[error(transparent)]
    Control(#[from] CmsgError),
    /// A token cannot be kept.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// Its bytes have no offset in 64 bits.
    #[error(
        "receive: {received} bytes after {gathered}, at {host_offset} of the host memory, pass 2^64; close the channel"
    )]
    TooLong {
        /// Bytes gathered before.
        gathered: u64,
        /// Where the iovec began in the host memory.
        host_offset: u64,
        /// Bytes that the receive returned.
        received: u64,
    },
}
