//! The ncclNet plugin ABI, from both sides.
//!
//! - *Layouts*: tables ([`tables`]) and properties ([`raw_properties`]) of ncclNet v5 to v12,
//!   the device handle and the unpack queue ([`device`]), numbers ([`constants`]). Sizes and
//!   offsets are checked when the crate is compiled.
//! - *Loading*: [`Plugin`] finds the newest table of a shared library and drives it through one
//!   API. The rules of the contract (one accept, same handle buffer, 16 requests, head-only test,
//!   consumption in order, pointers that outlive the call) are kept by its types; [`bounded()`] is
//!   for calls that may not return.
//! - *The device queue*: [`UnpackQueue`] reads what a plugin received.
//! - *Exporting*: [`export`] turns a safe trait into the C table that a host loads, and [`tuner`]
//!   another one that says how many channels suit the network.

mod adapt;
mod bounded;
mod comm;
pub mod constants;
pub mod device;
mod error;
pub mod export;
mod finalize;
mod library;
mod limiter;
mod logger;
#[cfg(test)]
mod loopback;
#[cfg(test)]
mod loopback_tests;
mod memory;
mod plugin;
mod private_request;
mod properties;
mod queue;
pub mod raw_properties;
mod request;
mod result;
mod setup;
pub mod tables;
pub mod tuner;

pub use bounded::{NoAnswer, bounded};
pub use comm::{MAX_REQUEST_BYTES, RecvComm, SendComm};
pub use device::LoadMeta;
pub use error::{CallError, HostError, LoadError};
pub use library::{CallObserver, CallReport, LoadOptions};
pub use logger::{LogLevel, LogRecord, LogSink, clear_log_sink, set_log_sink};
pub use memory::{MemoryHandle, MemoryOwner, MemoryType};
pub use plugin::Plugin;
pub use private_request::PrivateRequest;
pub use properties::{DeviceOffload, PointerSupport, Properties};
pub use queue::{QueueError, QueueSlot, UnpackQueue};
pub use request::{Done, PostOutcome, Ticket};
pub use result::{RawResult, ResultCode};
pub use setup::{Accepting, Connecting, DeviceHandle, Handle128, ListenComm};
pub use tables::AbiVersion;

/// Locks what a panic may have left locked: whoever changes it leaves nothing half done where it
/// can panic.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
