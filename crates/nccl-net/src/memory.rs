//! Memory registered on a comm.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;

use crate::comm::CommCore;
use crate::constants::{PTR_CUDA, PTR_HOST};

/// Where registered memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryType {
    /// Host memory.
    Host,
    /// CUDA device memory.
    Cuda,
}

impl MemoryType {
    pub(crate) const fn raw(self) -> c_int {
        match self {
            Self::Host => PTR_HOST,
            Self::Cuda => PTR_CUDA,
        }
    }
}

/// Something that keeps registered memory alive.
pub type MemoryOwner = Arc<dyn Any + Send + Sync>;

/// A registration. Clones share it; requests in flight hold one, so it ends with the last user.
///
/// Closing the comm ends it too. A registration on a comm that was closed with requests in flight
/// is not given back to the plugin, which offers no way to do so.
#[derive(Clone)]
pub struct MemoryHandle {
    pub(crate) registration: Arc<Registration>,
}

pub(crate) struct Registration {
    pub(crate) core: Arc<CommCore>,
    pub(crate) handle: *mut c_void,
    pub(crate) data: *mut u8,
    pub(crate) len: usize,
    pub(crate) kind: MemoryType,
    /// Dropped after the registration, and after the close of a comm with requests in flight.
    pub(crate) _owner: Option<MemoryOwner>,
}

// SAFETY: addresses only; calls on the comm go through its lock.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl MemoryHandle {
    /// Bytes registered.
    pub fn len(&self) -> usize {
        self.registration.len
    }

    /// Whether nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.registration.len == 0
    }

    /// Kind of memory.
    pub fn memory_type(&self) -> MemoryType {
        self.registration.kind
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.core.deregister(self.handle);
    }
}

impl fmt::Debug for MemoryHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryHandle")
            .field("data", &self.registration.data)
            .field("len", &self.registration.len)
            .field("kind", &self.registration.kind)
            .finish_non_exhaustive()
    }
}
