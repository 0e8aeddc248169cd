//! The engine for C; its header is `include/tcpx.h`.

pub mod codes;
pub mod connection;
pub mod endpoint;
pub mod failure;
mod options;
pub mod queue;
pub mod region;
mod releases;
pub(crate) mod text;
pub mod transfer;
pub mod types;
pub mod window;
