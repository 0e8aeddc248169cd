//! The safe traits that an exported plugin implements.

use std::ffi::CStr;

use super::cell::PluginCell;
use super::error::NetError;
use super::host_logger::HostLogger;
use crate::constants::{HANDLE_BYTES, NCCL_MAX_REQUESTS};
use crate::properties::Properties;

/// What a listening plugin sends to a connecting one: the first 112 of the 128 handle bytes.
///
/// The last 16 belong to this module, which keeps the state of a pending connect there. The bytes
/// come from a peer: treat them as hostile.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PeerHandle(pub [u8; Self::BYTES]);

impl std::fmt::Debug for PeerHandle {
    /// Leaves the bytes out: plugins keep secrets in them.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerHandle").finish_non_exhaustive()
    }
}

impl PeerHandle {
    /// Bytes that a plugin may use.
    pub const BYTES: usize = HANDLE_BYTES - 16;
}

/// Names a request within its comm: an index below [`RequestId::LIMIT`], chosen by the plugin,
/// taken from the moment of posting until `test` reports done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

impl RequestId {
    /// Most requests that one comm can hold at once.
    pub const LIMIT: usize = NCCL_MAX_REQUESTS;
}

/// Memory handed over for one send or receive. The host promises that it stays valid until the
/// request is done; reading or writing through the pointer is the plugin's unsafe business.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Start; may be NULL when `len` is 0.
    pub data: *mut u8,
    /// Bytes.
    pub len: usize,
}

// SAFETY: an address and a length; code that dereferences it vouches for the access.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// Memory to register on a comm.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion {
    /// Start.
    pub data: *mut u8,
    /// Bytes.
    pub len: usize,
    /// CUDA memory rather than host memory.
    pub cuda: bool,
}

// SAFETY: an address and a length; code that dereferences it vouches for the access.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

/// A network plugin. Every method may be called from any thread, none may block.
pub trait NetPlugin: Sized + Send + Sync + 'static {
    /// Name in the table; `NCCL_NET` selects by it.
    const NAME: &'static CStr;

    /// A registration. Shared, because a host may use it on one thread while it registers more on
    /// another.
    type Memory: Send + Sync + 'static;
    /// A listening comm.
    type Listen: NetListen<Recv = Self::Recv>;
    /// A connect in progress.
    type Connect: NetConnect<Send = Self::Send>;
    /// A sending comm.
    type Send: NetSend<Memory = Self::Memory>;
    /// A receiving comm.
    type Recv: NetRecv<Memory = Self::Memory>;

    /// Starts the plugin. Runs once in a process, however often the host calls `init`, unless it
    /// fails: then the next call tries again.
    fn init(logger: HostLogger) -> Result<Self, NetError>;

    /// Number of devices.
    fn devices(&self) -> Result<usize, NetError>;

    /// Properties of device `dev`, below the number of devices. `max_recvs` must be 1.
    fn properties(&self, dev: usize) -> Result<Properties, NetError>;

    /// Starts listening on a device.
    fn listen(&self, dev: usize) -> Result<(PeerHandle, Self::Listen), NetError>;

    /// Starts to connect; the result is polled until it gives a comm.
    fn connect(&self, dev: usize, handle: &PeerHandle) -> Result<Self::Connect, NetError>;
}

/// A listening comm. It is asked until it accepted one peer, then closed.
pub trait NetListen: Send + Sync + 'static {
    /// The comm it gives.
    type Recv;

    /// `None`: no peer yet, ask again.
    fn accept(&self) -> Result<Option<Self::Recv>, NetError>;
}

/// A connect in progress.
pub trait NetConnect: Send + 'static {
    /// The comm it gives.
    type Send;

    /// `None`: not yet, ask again.
    fn poll(&mut self) -> Result<Option<Self::Send>, NetError>;
}

/// What send and receive comms share. A host registers memory on one thread while it posts and
/// tests on another, hence `&self`.
pub trait NetComm: Send + Sync + 'static {
    /// A registration.
    type Memory;

    /// Registers memory.
    fn register(&self, region: MemoryRegion) -> Result<Self::Memory, NetError>;

    /// Gives a registration back. The default drops it.
    fn deregister(&self, memory: Self::Memory) -> Result<(), NetError> {
        drop(memory);
        Ok(())
    }

    /// Closes the comm. The default drops it.
    ///
    /// # Errors
    /// Something may still touch memory of the host's.
    fn close(self) -> Result<(), NetError>
    where
        Self: Sized,
    {
        drop(self);
        Ok(())
    }

    /// Drives the comm and answers for one request: `None` while it runs, its bytes once done.
    /// After that the id is free again.
    fn test(&self, request: RequestId) -> Result<Option<usize>, NetError>;
}

/// A sending comm. Dropping it closes it too.
pub trait NetSend: NetComm {
    /// Posts a send; `None` when there is no room now.
    fn isend(
        &self,
        buffer: Buffer,
        tag: i32,
        memory: &Self::Memory,
    ) -> Result<Option<RequestId>, NetError>;
}

/// A receiving comm. Dropping it closes it too.
pub trait NetRecv: NetComm {
    /// Posts a receive; `None` when there is no room now. A message larger than the buffer is an
    /// error of the receive's `test`, a smaller one is not.
    fn irecv(
        &self,
        buffer: Buffer,
        tag: i32,
        memory: &Self::Memory,
    ) -> Result<Option<RequestId>, NetError>;
}

/// A plugin with its process-wide state; implemented by [`crate::export_plugin!`].
pub trait Exported: NetPlugin {
    /// The state.
    fn cell() -> &'static PluginCell<Self>;
}
