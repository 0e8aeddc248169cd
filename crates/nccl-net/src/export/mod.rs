//! Writing a network plugin in Rust.
//!
//! Implement [`NetPlugin`] and the traits of its comms, then name the versions to export:
//!
//! ```text
//! nccl_net::export_plugin!(MyPlugin: v7, v8, v9, v10, v11, v12);
//! ```
//!
//! What the C side gets is decided here, once: no entry unwinds into the host (a panic becomes
//! `ncclInternalError`), pointers are checked for NULL, `*request` and `*done` are always
//! written, property strings live for ever, a panic-free answer exists for every misuse that can
//! be seen, and comms that a fork copied are refused in the child. What cannot be checked is the host's promise: that its non-NULL pointers are good and
//! that a comm is not used after its close.

mod cell;
mod comm;
mod connects;
mod entries;
mod error;
pub mod fork;
mod host_logger;
mod register;
mod tables;
mod traits;
mod transfer;

pub use cell::PluginCell;
pub use error::NetError;
pub use host_logger::{HostLogger, Log};
pub use tables::{
    table_v5, table_v6, table_v7, table_v8, table_v9, table_v10, table_v11, table_v12,
};
pub use traits::{
    Buffer, Exported, MemoryRegion, NetComm, NetConnect, NetListen, NetPlugin, NetRecv, NetSend,
    PeerHandle, RequestId,
};
