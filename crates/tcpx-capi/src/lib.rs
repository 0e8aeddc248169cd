//! `libtcpx.so`: the historic C calls over any ncclNet plugin.
//!
//! The header `include/tcpx.h` is made from this crate by `cargo xtask header`; what a C program
//! may rely on is written there, at each call. Behind it:
//!
//! - Every pointer that the library gives out is a number in a table (`handles`), with the
//!   number of times that its place was used. A pointer that was closed, finished or never given
//!   out is answered with [`codes::TCPX_BAD_HANDLE`], not followed. Raw pointers would be a few
//!   nanoseconds faster beside a plugin call, and a use after close would be silent corruption.
//! - The plugin's rules are kept by crate `nccl-net` and by the comm's ledger (`end`): at most 16
//!   requests, only the oldest one tested, never after done, consumed first in, first out.
//! - No panic crosses into C ([`error`]).

pub mod codes;
mod descriptors;
mod end;
pub mod error;
mod handles;
pub mod library;
pub mod log;
pub mod memory;
pub mod setup;
pub mod transfer;
pub mod types;
