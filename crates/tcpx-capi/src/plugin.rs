//! The historic C calls over any ncclNet plugin; its header is `include/tcpx_plugin.h`.
//!
//! The plugin's rules are kept by crate `nccl-net` and by the comm's ledger (`end`): at most 16
//! requests, only the oldest one tested, never after done, consumed first in, first out.

mod close;
pub mod codes;
mod descriptors;
pub(crate) mod end;
pub mod library;
pub mod log;
pub mod memory;
pub mod setup;
pub mod transfer;
pub mod types;
