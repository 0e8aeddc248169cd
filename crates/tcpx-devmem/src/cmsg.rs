//! What the kernel says about a device-memory receive: control messages in, checked pieces out.
//!
//! A `recvmsg` with [`RECEIVE_FLAG`] leaves payload where the network card put it and describes it
//! in control messages, one a fragment, in stream order. [`Received::pieces`] reads them;
//! [`Gathered`] turns the pieces of many receives into one scatter list. Nothing here allocates
//! (beyond the lists' first growth), reads a socket or trusts a number.
//!
//! Two dialects exist, see [`Dialect`]. Integers are in the byte order of the host: kernel and
//! reader are the same machine. Background: `docs/guides/device-memory.md`.

mod dialect;
mod error;
mod gather;
mod pieces;

pub use dialect::{Binding, Dialect, RECEIVE_FLAG, SOL_SOCKET};
pub use error::{CmsgError, RecordKind};
pub use gather::{Added, GatherError, Gathered, HostPiece};
pub use pieces::{DeviceFragment, Piece, Pieces, Received};
pub use tcpx_lanes::control_messages::BadControl;

#[cfg(test)]
mod tests;
