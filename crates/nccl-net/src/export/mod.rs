//! Writing a network plugin in Rust.
//!
//! Implement [`NetPlugin`] and the traits of its comms, then name the versions to export:
//!
//! ```text
//! nccl_net::export_plugin!(MyPlugin: ncclNetPlugin_v9: NetV9, ncclNetPlugin_v10: NetV10);
//! ```
//!
//! What the C side gets is decided here, once: no entry unwinds into the host (a panic becomes
//! `ncclInternalError`), pointers are checked for NULL, `*request` and `*done` are always written,
//! property strings live for ever, a panic-free answer exists for every misuse that can be seen,
//! and comms that a fork copied are refused in the child. What cannot be checked is the host's
//! promise: that its non-NULL pointers are good and that a comm is not used after its close.

mod cell;
mod comm;
mod connects;
pub(crate) mod entries;
mod error;
pub mod fork;
mod host_logger;
pub(crate) mod register;
mod tables;
mod traits;
pub(crate) mod transfer;

pub use cell::PluginCell;
pub use error::NetError;
pub use host_logger::{HostLogger, Log};
pub(crate) use tables::Entry;
pub use tables::Export;
pub use traits::{
    Buffer, Exported, MemoryRegion, NetComm, NetConnect, NetListen, NetPlugin, NetRecv, NetSend,
    PeerHandle, RequestId,
};
