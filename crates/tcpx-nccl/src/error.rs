//! What goes wrong inside the plugin: the `ncclResult_t` for the caller, and a line for the host's
//! logger.

use std::fmt::Display;

use nccl_net::ResultCode;
use nccl_net::export::{NetError, RequestId};

/// A failed system call.
pub(crate) fn system(operation: impl Display, error: impl Display, hint: &str) -> NetError {
    let why = format!("{operation} failed: {error}; {hint}");
    NetError::new(ResultCode::SystemError, why)
}

/// A failed copy to, from or on the GPU, from what says why.
pub(crate) fn copy<E: Display>(comm: &str, operation: &str) -> impl Fn(E) -> NetError {
    move |error| {
        let why = format!("{comm}: {operation}: {error}");
        NetError::new(ResultCode::UnhandledCudaError, why)
    }
}

/// The peer closed or reset the connection, with so many bytes of the message `done`; its `total`
/// is 0 before its header.
pub(crate) fn peer_closed(comm: &str, why: &str, sequence: u64, done: u64, total: u64) -> NetError {
    let why = format!(
        "{comm}: the peer closed the connection ({why}) at message {sequence}, {done} of {total} \
         bytes; look at the peer's log for why it ended"
    );
    NetError::new(ResultCode::SystemError, why)
}

/// The lanes that carry the peer's large messages broke.
pub(crate) fn lanes_ended(comm: &str, why: &str) -> NetError {
    let why = format!("{comm}: {why}; messages are lost, look at the peer's log for why it ended");
    NetError::new(ResultCode::SystemError, why)
}

/// The host gave memory back that a request still used; the oldest one is named.
pub(crate) fn deregistered(comm: &str, sequence: u64) -> NetError {
    NetError::invalid_usage(format!(
        "{comm}: memory was deregistered while message {sequence} used it, so the connection was given up; \
         deregister after test said done"
    ))
}

/// Memory cannot be given back.
pub(crate) fn memory_held(comm: &str) -> NetError {
    let why = format!(
        "{comm}: a lane or a copy has not let go of the comm's memory, so it must not be freed; end the process"
    );
    NetError::new(ResultCode::SystemError, why)
}

/// The bytes on the connection are not what the protocol says.
pub(crate) fn protocol(comm: &str, expected: impl Display, arrived: impl Display) -> NetError {
    NetError::internal(format!(
        "{comm}: expected {expected}, got {arrived}; the connection is unusable, both sides must run the same \
         plugin version"
    ))
}

/// A request that this comm does not know (any more).
pub(crate) fn unknown_request(comm: &str, id: RequestId) -> NetError {
    NetError::internal(format!(
        "{comm}: request {} is not in flight; never test a request again after done",
        id.0
    ))
}
