//! The tcpx protocol without I/O.
//!
//! Everything here is a function of bytes and values: no socket, no clock, no thread, no unsafe
//! code. Callers move the bytes and pass the time. Whatever arrives from a peer, a plugin or the
//! kernel becomes a checked value or a typed error, never a panic.
//!
//! The bytes are specified in `docs/wire-protocol.md`.

#![forbid(unsafe_code)]

pub mod chunk_header;
pub mod crc;
pub mod descriptor;
pub mod frame;
pub mod handshake;
pub mod key;
pub mod lane_seal;
pub mod pieces;
pub mod plan;
pub mod range_set;
pub mod record;
pub mod scatter;
pub mod session;
pub mod time;
pub mod window;

pub use chunk_header::{ChunkHeader, ChunkHeaderError};
pub use descriptor::{Descriptor, Descriptors, EvenList, EvenPieces, Limits, ScatterError};
pub use frame::{Frame, FrameDecoder, FrameError, Level, Role, Settings, Tag, TransferId};
pub use key::{
    AnyKey, ClientKey, Clients, Identity, Key, KeyError, KeyId, KeyName, KeyNameError, KnownClient,
};
pub use pieces::{PieceList, PieceListError, PieceRun};
pub use plan::{ChunkPlan, Taper};
pub use scatter::{Fragment, ScatterList};
pub use session::Session;
pub use time::Time;
pub use window::{Place, Rights, WindowKey, WindowKeyError, WindowSecret};
