//! libnccl-net-tcpx.so: tcpx as a network plugin for NCCL.
//!
//! One TCP connection for each comm, driven in the caller's thread inside `isend`, `irecv` and
//! `test`, for small messages and for order; large ones take lanes that all comms to one peer
//! process share, driven by event loops (`lanes`). By default the plugin serves host memory. With
//! `TCPX_NET_DEVICE=cuda` it takes CUDA pointers too, and a copy worker moves their bytes.
//!
//! All tables, v6 to v12, are this one implementation.
//! The ABI ends in `nccl-net`; everything here implements its safe traits, whatever the version
//! of the table.
//!
//! Every variable that it reads is in docs/variables.md; `tcpx status` shows its comms and lanes.

mod admission;
mod config;
mod connector;
mod device;
mod dialer;
mod environment;
mod error;
#[doc(hidden)]
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod handle;
mod header;
mod held;
mod inbound;
mod interfaces;
mod landing;
mod lanes;
mod link;
mod listener;
mod memory;
mod pin;
mod plugin;
mod receive;
mod resume;
mod ring;
mod send;
mod stall;
mod status;
mod tuner;

use std::ffi::{CStr, c_char};

pub use config::{Config, Mode};
pub use connector::Connector;
pub use handle::Handle;
pub use listener::ListenComm;
pub use memory::Memory;
pub use plugin::TcpxPlugin;
pub use receive::RecvComm;
pub use send::SendComm;
pub use tuner::TcpxTuner;

nccl_net::export_plugin!(
    TcpxPlugin:
    ncclNetPlugin_v6: NetV6,
    ncclNetPlugin_v7: NetV7,
    ncclNetPlugin_v8: NetV8,
    ncclNetPlugin_v9: NetV9,
    ncclNetPlugin_v10: NetV10,
    ncclNetPlugin_v11: NetV11,
    ncclNetPlugin_v12: NetV12,
);
nccl_net::export_tuner!(TcpxTuner);

/// `build_id` with the terminating zero of a C string.
const BUILD_ID: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("TCPX_BUILD_ID"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the build id holds a zero byte"),
    };

/// A pointer to a constant string.
#[derive(Debug)]
#[repr(transparent)]
pub struct BuildId(*const c_char);

// SAFETY: it points to a constant.
unsafe impl Sync for BuildId {}

/// Version and source hash of this file, as a C string: `const char *tcpx_build_id`.
#[unsafe(no_mangle)]
pub static tcpx_build_id: BuildId = BuildId(BUILD_ID.as_ptr());

/// Version and source hash of this plugin: `tcpx-nccl VERSION sources HASH`.
pub fn build_id() -> &'static str {
    env!("TCPX_BUILD_ID")
}
