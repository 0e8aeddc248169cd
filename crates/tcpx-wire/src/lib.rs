//! The tcpx protocol without I/O.
//!
//! Everything here is a function of bytes and values: no socket, no clock, no thread, no unsafe
//! code. Callers move the bytes and pass the time. Whatever arrives from a peer, a plugin or the
//! kernel becomes a checked value or a typed error, never a panic.
//!
//! The bytes are specified in `docs/wire-protocol.md`.

#![forbid(unsafe_code)]

pub mod frame;
pub mod session;
pub mod time;

pub use frame::{Frame, Level, Role, Settings, Tag, TransferId};
pub use session::Session;
pub use time::Time;
