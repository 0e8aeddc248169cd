//! Move GPU memory between hosts over plain TCP.
//!
//! An [`Endpoint`] listens or connects; a [`Connection`] starts sends and receives of [`Region`]s;
//! a [`Transfer`] ends exactly once, with a [`Report`] or an [`Error`] that names the peer, the
//! chunk and who owes the next step. Completion has three levels: *sent* (the source may be
//! reused), *placed* (every byte is at its destination and the sender knows) and *verified*
//! (keyed tags of both ends were compared).
//!
//! ```
//! use std::time::Duration;
//! use tcpx::{Auth, Endpoint, Options, Region};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let key = tcpx::generate_key()?;
//! let server = Endpoint::listen("127.0.0.1:0".parse()?, Options::tcp(Auth::Key(key.clone())))?;
//! let address = server.local_addr();
//! let client = std::thread::spawn(move || -> Result<(), tcpx::Error> {
//!     let connection = Endpoint::connect(address, &Options::tcp(Auth::Key(key)))?;
//!     let source = Region::host(5)?;
//!     source.write_from(0, b"hello")?;
//!     connection.send(source.all(), 42).start()?.wait()?;
//!     connection.close(Duration::from_secs(5))
//! });
//! let connection = server.accept(Duration::from_secs(10))?;
//! let destination = Region::host(4096)?;
//! let report = connection.receive(destination.all(), 42).start()?.wait()?;
//! assert_eq!(report.bytes, 5);
//! connection.close(Duration::from_secs(5))?;
//! client.join().expect("the client does not panic")?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod completion_queue;
mod connection;
mod control;
mod core;
mod drive;
mod driver;
mod endpoint;
mod error;
mod establish;
mod event;
mod notifications;
mod options;
mod progress_lease;
mod report;
mod transfer;
mod wait;
mod window;

pub use completion_queue::{Completion, CompletionQueue};
pub use connection::{Connection, PeerInfo};
pub use endpoint::Endpoint;
pub use error::{Error, ErrorKind, OperationName};
pub use event::{ChunkEvent, Event, Observer};
#[doc(hidden)]
pub use options::Bounds;
pub use options::{Options, ProgressMode, generate_key};
pub use report::{Progress, Report};
pub use tcpx_memory::{
    After, CudaError, Gpu, MemoryError, MemoryKind, PointerFault, Region, RegionSlice, UnpackMethod,
};
pub use tcpx_net::{
    Auth, ChannelStats, Congestion, KeyFileError, Lend, Local, Network, NetworkError,
    PluginNetwork, PluginOptions, Refusals, TcpNetwork, TcpOptions,
};
pub use tcpx_wire::frame::Limits;
pub use tcpx_wire::session::{Deadlines, Delivered};
pub use tcpx_wire::{ClientKey, Key, KeyError, Level, Rights, Role, WindowKey, WindowKeyError};
pub use transfer::Transfer;
pub use window::Window;

/// Transfers that have not started yet, as [`Connection`] makes them.
pub mod request {
    pub use crate::connection::{Batch, PreparedBatch, Request};
}

/// The examples of the guide, compiled with those of the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/rust.md")]
struct Guide;
