//! From a device to a pair of comms: listen, connect, accept.

use std::ffi::c_void;
use std::fmt;
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};

use crate::comm::{CommCore, RecvComm, SendComm, Side};
use crate::constants::{
    HANDLE_BYTES, NET_DEVICE_HOST, NET_DEVICE_UNPACK, NET_DEVICE_UNPACK_VERSION,
};
use crate::device::RawDeviceHandle;
use crate::error::HostError;
use crate::plugin::Plugin;
use crate::properties::DeviceOffload;

/// What `listen` writes and a peer's `connect` reads; travels over a channel of the caller's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle128(pub [u8; HANDLE_BYTES]);

/// Memory that a plugin keeps pointers to: fixed in place, freed when the value is dropped.
pub(crate) struct PluginBuffer<T>(NonNull<T>);

impl<T> PluginBuffer<T> {
    fn new(value: T) -> Self {
        Self(NonNull::from(Box::leak(Box::new(value))))
    }

    fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// Leaves the memory to a plugin that may still use it.
    fn abandon(self) {
        std::mem::forget(self);
    }
}

impl<T> Drop for PluginBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: it came from a box and is dropped once; the plugin's use ended with its comm.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

// SAFETY: an owned allocation of plain bytes or raw pointers.
unsafe impl<T> Send for PluginBuffer<T> {}
// SAFETY: it is only read and written through `&mut` owners.
unsafe impl<T> Sync for PluginBuffer<T> {}

/// The handle, aligned as plugins that overlay a struct on it expect.
#[repr(C, align(16))]
pub(crate) struct AlignedHandle([u8; HANDLE_BYTES]);

/// A device handle and the pointer to it that `accept` takes.
#[repr(C, align(16))]
pub(crate) struct DeviceStorage {
    handle: RawDeviceHandle,
    pointer: *mut RawDeviceHandle,
}

/// The device queue that a plugin made for a receive comm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceHandle {
    /// Address of the plugin's structure, usually in device memory.
    pub address: NonZeroUsize,
    /// Its bytes; 24 for device-unpack version 7.
    pub size: usize,
    /// Whether tests must go on for the queue to advance.
    pub needs_proxy_progress: bool,
}

impl Plugin {
    /// Starts listening on a device. The handle goes to the peer.
    pub fn listen(&self, dev: usize) -> Result<(Handle128, ListenComm), HostError> {
        let dev_index = self.device(dev)?;
        let offload = self.properties(dev)?.offload;
        let buffer = PluginBuffer::new(AlignedHandle([0; HANDLE_BYTES]));
        let mut comm = ptr::null_mut();
        // SAFETY: initialised, the device exists, the buffer holds 128 bytes.
        let rc = unsafe {
            self.inner
                .calls()?
                .listen(dev_index, buffer.as_ptr().cast(), &mut comm)
        };
        self.inner.report("listen", rc)?;
        let comm = NonNull::new(comm).ok_or(HostError::NullComm { call: "listen" })?;
        // SAFETY: the plugin has written the handle and writes no more.
        let handle = Handle128(unsafe { (*buffer.as_ptr()).0 });
        Ok((
            handle,
            ListenComm {
                plugin: self.clone(),
                comm,
                offload,
                _handle: buffer,
            },
        ))
    }

    /// Starts to connect to a peer that listens; the result is polled until it gives a comm.
    pub fn connect(&self, dev: usize, handle: Handle128) -> Result<Connecting, HostError> {
        let dev = self.device(dev)?;
        Ok(Connecting {
            plugin: self.clone(),
            dev,
            buffer: Some(PluginBuffer::new(AlignedHandle(handle.0))),
            polled: false,
        })
    }
}

/// A connect in progress.
pub struct Connecting {
    plugin: Plugin,
    dev: i32,
    /// The plugin keeps a pointer in it: the same buffer goes in on every poll.
    buffer: Option<PluginBuffer<AlignedHandle>>,
    polled: bool,
}

impl Connecting {
    /// Asks the plugin; `None` means not yet. After a comm or an error it has ended.
    pub fn poll(&mut self) -> Result<Option<SendComm>, HostError> {
        let calls = self.plugin.inner.calls()?;
        let buffer = self.buffer.take().ok_or(HostError::SetupEnded)?;
        self.polled = true;
        let mut comm = ptr::null_mut();
        // SAFETY: initialised, the device exists, the buffer is the one of the first poll.
        let rc = unsafe { calls.connect(self.dev, buffer.as_ptr().cast(), &mut comm) };
        if let Err(error) = self.plugin.inner.report("connect", rc) {
            // A comm beside an error is still ours to close; report the first error.
            if let Some(comm) = NonNull::new(comm) {
                let _ = CommCore::new(self.plugin.clone(), Side::Send, comm).close(false);
            }
            buffer.abandon();
            return Err(error.into());
        }
        match NonNull::new(comm) {
            None => {
                self.buffer = Some(buffer);
                Ok(None)
            }
            Some(comm) => {
                let core = CommCore::new(self.plugin.clone(), Side::Send, comm);
                Ok(Some(SendComm::new(core, buffer)))
            }
        }
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        // A plugin's thread may still connect with this buffer, and there is no cancel.
        if self.polled
            && let Some(buffer) = self.buffer.take()
        {
            buffer.abandon();
        }
    }
}

/// A listening comm: good for exactly one accept.
pub struct ListenComm {
    plugin: Plugin,
    comm: NonNull<c_void>,
    offload: DeviceOffload,
    _handle: PluginBuffer<AlignedHandle>,
}

// SAFETY: one owner, and the plugin's calls are not tied to a thread.
unsafe impl Send for ListenComm {}

impl ListenComm {
    /// Starts to accept; the result is polled until it gives a comm. Consumes the listen comm: a
    /// second accept on it ends the process in some plugins.
    pub fn accept(self) -> Accepting {
        let (kind, version) = if self.offload == DeviceOffload::UNPACK_V7 {
            (NET_DEVICE_UNPACK, NET_DEVICE_UNPACK_VERSION)
        } else {
            (NET_DEVICE_HOST, 0)
        };
        // Real storage whatever the plugin says: a NULL inner pointer crashes some.
        let storage = PluginBuffer::new(DeviceStorage {
            handle: RawDeviceHandle::request(kind, version),
            pointer: ptr::null_mut(),
        });
        // SAFETY: freshly made; the pointer leads to its neighbour, which does not move.
        unsafe {
            let device = storage.as_ptr();
            (*device).pointer = &raw mut (*device).handle;
        }
        Accepting {
            listen: Some(self),
            storage: Some(storage),
            polled: false,
        }
    }
}

impl Drop for ListenComm {
    fn drop(&mut self) {
        // A comm is of a plugin that was started.
        let Ok(calls) = self.plugin.inner.calls() else {
            return;
        };
        // SAFETY: the one close of this comm.
        let rc = unsafe { calls.close_listen(self.comm.as_ptr()) };
        // Nobody is left to take an error; the observer has seen it.
        let _ = self.plugin.inner.report("closeListen", rc);
    }
}

/// An accept. Its listen comm is closed when it is dropped.
pub struct Accepting {
    /// Until it is dropped.
    listen: Option<ListenComm>,
    /// While it is in progress.
    storage: Option<PluginBuffer<DeviceStorage>>,
    polled: bool,
}

impl Accepting {
    /// Asks the plugin; `None` means no peer yet. After a comm or an error it has ended. Some
    /// plugins block here until the peer connects.
    pub fn poll(&mut self) -> Result<Option<RecvComm>, HostError> {
        let storage = self.storage.take().ok_or(HostError::SetupEnded)?;
        let listen = self.listen.as_ref().ok_or(HostError::SetupEnded)?;
        self.polled = true;
        let mut comm = ptr::null_mut();
        let device = storage.as_ptr();
        // SAFETY: the listen comm is open and was not accepted on; the storage stays in place.
        let rc = unsafe {
            listen.plugin.inner.calls()?.accept(
                listen.comm.as_ptr(),
                &mut comm,
                &mut (*device).pointer,
            )
        };
        if let Err(error) = listen.plugin.inner.report("accept", rc) {
            if let Some(comm) = NonNull::new(comm) {
                let _ = CommCore::new(listen.plugin.clone(), Side::Recv, comm).close(false);
            }
            storage.abandon();
            return Err(error.into());
        }
        let Some(comm) = NonNull::new(comm) else {
            self.storage = Some(storage);
            return Ok(None);
        };
        // SAFETY: the plugin filled it during the call.
        let raw = unsafe { (*device).handle };
        let queue = (listen.offload == DeviceOffload::UNPACK_V7
            && raw.net_device_type == NET_DEVICE_UNPACK
            && raw.net_device_version == NET_DEVICE_UNPACK_VERSION)
            .then(|| NonZeroUsize::new(raw.handle.addr()))
            .flatten()
            .map(|address| DeviceHandle {
                address,
                size: raw.size,
                needs_proxy_progress: raw.needs_proxy_progress != 0,
            });
        let core = CommCore::new(listen.plugin.clone(), Side::Recv, comm);
        Ok(Some(RecvComm::new(core, queue, storage)))
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        let (Some(listen), Some(storage)) = (&self.listen, self.storage.take()) else {
            return;
        };
        // A plugin with a device queue accepts on a thread of its own, which goes on using the
        // listen comm: closing it now would be a use after free. It stays open instead.
        if self.polled && listen.offload != DeviceOffload::None {
            std::mem::forget(self.listen.take());
            storage.abandon();
        }
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connecting")
            .field("plugin", &self.plugin.name())
            .field("dev", &self.dev)
            .field("ended", &self.buffer.is_none())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ListenComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListenComm")
            .field("plugin", &self.plugin.name())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Accepting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accepting")
            .field("ended", &self.storage.is_none())
            .finish_non_exhaustive()
    }
}
