//! `libplugin_TCPX.so`: tcpx as a backend of [NIXL](https://github.com/ai-dynamo/nixl), which vLLM,
//! SGLang and others move their key-value caches with.
//!
//! NIXL loads the file by its name and calls [`nixl_plugin_init`], the one way in. The guide for
//! users is `docs/nixl.md`; how two agents talk is in `message.rs`.
//!
//! - `abi`, `guard`, `plugin`: the C++ interface, written in Rust alone.
//! - `agent`, `link`, `conn`: listeners, connections, what they carry out.
//! - `memory`, `plan`, `flight`: registered memory, what a transfer moves, how far it is.

#![allow(
    non_snake_case,
    reason = "NIXL makes the file's name from the backend's, which is written so"
)]

#[cfg(not(target_arch = "x86_64"))]
compile_error!("the layouts of NIXL's interface are those of x86-64");

mod abi;
mod agent;
mod bytes;
mod config;
mod conn;
mod flight;
#[doc(hidden)]
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guard;
mod info;
mod link;
mod logging;
mod memory;
mod message;
mod plan;
mod plugin;
mod within;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use plugin::{nixl_plugin_fini, nixl_plugin_init};

/// Locks, also what a thread held that panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
