//! `libtcpx.so`: the C library.
//!
//! Two headers are made from this crate by `cargo xtask header`; what a C program may rely on is
//! written there, at each call: `include/tcpx.h` for the engine ([`engine`]), and
//! `include/tcpx_plugin.h` for the historic calls over any ncclNet plugin ([`plugin`]).
//!
//! - Every pointer that the library gives out is a number in a table (`handles`), with the
//!   number of times that its place was used. A pointer that was closed, finished or never given
//!   out is answered with an error, not followed. Raw pointers would be a few nanoseconds faster,
//!   and a use after close would be silent corruption.
//! - No panic crosses into C ([`error`]).

pub mod engine;
pub mod error;
mod handles;
pub mod plugin;
