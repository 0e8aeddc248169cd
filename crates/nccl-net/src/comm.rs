//! Send and receive comms, within the rules that plugins set.
//!
//! A comm holds its requests in the order of posting, tests the head only, never after done, never
//! holds more than the plugin can, and is closed once. Received slots are consumed in order.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::constants::MAX_REQUESTS_PER_COMM;
use crate::error::{CallError, HostError};
use crate::lock;
use crate::memory::{MemoryHandle, MemoryOwner, MemoryType, Registration};
use crate::plugin::Plugin;
use crate::queue::QueueSlot;
use crate::request::{Done, InFlight, PostOutcome, RequestRing, Ticket};
use crate::setup::{AlignedHandle, DeviceHandle, DeviceStorage, PluginBuffer};

/// Largest single send or receive, in bytes: completion reports sizes as an `int`.
pub const MAX_REQUEST_BYTES: usize = c_int::MAX as usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Send,
    Recv,
}

/// The open comm. Registrations share it; every call on it holds its lock.
pub(crate) struct CommCore {
    pub(crate) plugin: Plugin,
    side: Side,
    state: Mutex<CommState>,
}

struct CommState {
    /// `None` once closed.
    comm: Option<NonNull<c_void>>,
    /// Memory handles to give back before the close.
    registered: Vec<*mut c_void>,
}

// SAFETY: the pointers belong to the plugin, whose calls are not tied to a thread; the lock keeps
// them one at a time.
unsafe impl Send for CommCore {}
// SAFETY: as above.
unsafe impl Sync for CommCore {}

impl CommCore {
    pub(crate) fn new(plugin: Plugin, side: Side, comm: NonNull<c_void>) -> Arc<Self> {
        Arc::new(Self {
            plugin,
            side,
            state: Mutex::new(CommState {
                comm: Some(comm),
                registered: Vec::new(),
            }),
        })
    }

    /// Nothing panics while the lock is held, so a poisoned one is only a panic elsewhere.
    fn state(&self) -> MutexGuard<'_, CommState> {
        lock(&self.state)
    }

    /// # Safety
    /// See [`SendComm::register`].
    unsafe fn register(
        self: &Arc<Self>,
        data: *mut u8,
        len: usize,
        kind: MemoryType,
        owner: Option<MemoryOwner>,
    ) -> Result<MemoryHandle, HostError> {
        if len > MAX_REQUEST_BYTES && self.plugin.version() < crate::AbiVersion::V8 {
            return Err(HostError::TooLarge {
                bytes: len,
                max: MAX_REQUEST_BYTES,
            });
        }
        let mut handle = ptr::null_mut();
        let mut state = self.state();
        let comm = state.comm.ok_or(HostError::SetupEnded)?.as_ptr();
        // SAFETY: an open comm; the caller vouches for the memory.
        let rc = unsafe {
            self.plugin
                .inner
                .calls()?
                .reg_mr(comm, data.cast(), len, kind.raw(), &mut handle)
        };
        if rc == 0 {
            state.registered.push(handle);
        }
        drop(state);
        self.plugin.inner.report("regMr", rc)?;
        Ok(MemoryHandle {
            registration: Arc::new(Registration {
                core: Arc::clone(self),
                handle,
                data,
                len,
                kind,
                _owner: owner,
            }),
        })
    }

    /// Gives a memory handle back, unless the comm is closed.
    pub(crate) fn deregister(&self, handle: *mut c_void) {
        let mut state = self.state();
        let Some(comm) = state.comm else { return };
        // A plugin may hand out equal handles (NULL among them): one entry goes for each.
        if let Some(at) = state.registered.iter().position(|known| *known == handle) {
            state.registered.swap_remove(at);
        }
        // A comm is of a plugin that was started.
        let Ok(calls) = self.plugin.inner.calls() else {
            return;
        };
        // SAFETY: an open comm and a handle of it that nothing uses any more.
        let rc = unsafe { calls.dereg_mr(comm.as_ptr(), handle) };
        drop(state);
        // Called from drops: the observer has seen an error.
        let _ = self.plugin.inner.report("deregMr", rc);
    }

    /// Closes the comm, once. Registrations are given back first, unless requests are in flight:
    /// then the plugin may still use them, and closing comes first.
    pub(crate) fn close(&self, in_flight: bool) -> Result<(), CallError> {
        let mut state = self.state();
        let Some(comm) = state.comm.take() else {
            return Ok(());
        };
        let comm = comm.as_ptr();
        let inner = &self.plugin.inner;
        // A comm is of a plugin that was started.
        let Ok(calls) = inner.calls() else {
            return Ok(());
        };
        let registered = std::mem::take(&mut state.registered);
        let mut first_error = Ok(());
        if !in_flight {
            for handle in registered {
                // SAFETY: the comm is still open for the plugin, and no request uses the handle.
                let rc = unsafe { calls.dereg_mr(comm, handle) };
                let result = inner.report("deregMr", rc);
                first_error = first_error.and(result);
            }
        }
        let (call, rc) = match self.side {
            // SAFETY: the one close of this comm: its pointer has been taken.
            Side::Send => ("closeSend", unsafe { calls.close_send(comm) }),
            // SAFETY: as above.
            Side::Recv => ("closeRecv", unsafe { calls.close_recv(comm) }),
        };
        drop(state);
        let result = inner.report(call, rc);
        first_error.and(result)
    }

    /// Runs a call on the open comm.
    pub(crate) fn with_comm<T>(&self, call: impl FnOnce(*mut c_void) -> T) -> Result<T, HostError> {
        let state = self.state();
        Ok(call(state.comm.ok_or(HostError::SetupEnded)?.as_ptr()))
    }

    /// Checks a piece of registered memory and gives its address.
    fn piece(
        self: &Arc<Self>,
        memory: &MemoryHandle,
        offset: usize,
        len: usize,
    ) -> Result<*mut c_void, HostError> {
        let registration = &*memory.registration;
        if !Arc::ptr_eq(self, &registration.core) {
            return Err(HostError::ForeignMemory);
        }
        if len > MAX_REQUEST_BYTES {
            return Err(HostError::TooLarge {
                bytes: len,
                max: MAX_REQUEST_BYTES,
            });
        }
        if offset
            .checked_add(len)
            .is_none_or(|end| end > registration.len)
        {
            return Err(HostError::OutOfRange {
                offset,
                len,
                registered: registration.len,
            });
        }
        Ok(registration.data.wrapping_add(offset).cast())
    }

    /// Tests the head of a ring.
    fn test_head(
        &self,
        ring: &mut RequestRing,
    ) -> Result<Option<(InFlight, Option<usize>)>, HostError> {
        /// A size that no plugin reports, to see whether one was.
        const UNWRITTEN: c_int = -1;
        let Some(head) = ring.head() else {
            return Ok(None);
        };
        let (request, posted) = (head.request.as_ptr(), head.len);
        let mut done = 0;
        let mut sizes = [UNWRITTEN; 8];
        let calls = self.plugin.inner.calls()?;
        // SAFETY: the head request of an open comm, not done so far.
        let rc = self.with_comm(|_| unsafe { calls.test(request, &mut done, &mut sizes) })?;
        let reported = if rc != 0 || done != 0 {
            self.plugin.inner.report("test", rc)
        } else {
            Ok(())
        };
        // Done is final even beside an error: the plugin may reuse the request.
        let finished = if done != 0 { ring.pop_head() } else { None };
        reported?;
        let Some(finished) = finished else {
            return Ok(None);
        };
        let bytes = match sizes[0] {
            UNWRITTEN => None,
            size => match usize::try_from(size) {
                Ok(bytes) if bytes <= posted => Some(bytes),
                _ => {
                    return Err(HostError::ImpossibleSize {
                        reported: i64::from(size),
                        posted,
                    });
                }
            },
        };
        Ok(Some((finished, bytes)))
    }
}

impl Drop for CommCore {
    fn drop(&mut self) {
        // Only a comm that came beside an error reaches this open; the observer sees the result.
        let _ = self.close(false);
    }
}

/// Registration and close: the same on both sides.
macro_rules! common_methods {
    ($comm:ident) => {
        impl $comm {
            /// Registers memory on this comm.
            ///
            /// # Safety
            /// `data..data + len` is memory of that kind and stays so until every clone of the
            /// handle is gone and no request uses it. While a request is in flight nobody writes
            /// what it sends, and nobody touches what it receives into.
            pub unsafe fn register(
                &self,
                data: *mut u8,
                len: usize,
                kind: MemoryType,
            ) -> Result<MemoryHandle, HostError> {
                // SAFETY: forwarded.
                unsafe { self.core.register(data, len, kind, None) }
            }

            /// Registers memory that `owner` keeps alive: the registration, and every request
            /// that uses it, holds the owner.
            ///
            /// # Safety
            /// As for [`Self::register`], with the lifetime taken care of by `owner`.
            pub unsafe fn register_owned(
                &self,
                data: *mut u8,
                len: usize,
                kind: MemoryType,
                owner: MemoryOwner,
            ) -> Result<MemoryHandle, HostError> {
                // SAFETY: forwarded.
                unsafe { self.core.register(data, len, kind, Some(owner)) }
            }

            /// Requests posted and not done.
            pub fn in_flight(&self) -> usize {
                self.ring.len()
            }

            /// Closes the comm now. Without requests in flight, memory is deregistered first.
            pub fn close(self) -> Result<(), HostError> {
                Ok(self.core.close(!self.ring.is_empty())?)
            }
        }

        impl Drop for $comm {
            fn drop(&mut self) {
                // The comm first, then (as fields are dropped) the memory of requests in flight.
                let _ = self.core.close(!self.ring.is_empty());
            }
        }

        impl fmt::Debug for $comm {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($comm))
                    .field("plugin", &self.core.plugin.name())
                    .field("in_flight", &self.ring.len())
                    .finish_non_exhaustive()
            }
        }
    };
}

/// The sending end of a connection.
pub struct SendComm {
    pub(crate) core: Arc<CommCore>,
    pub(crate) ring: RequestRing,
    /// The plugin keeps pointers into it.
    _handle: PluginBuffer<AlignedHandle>,
}

common_methods!(SendComm);

impl SendComm {
    pub(crate) fn new(core: Arc<CommCore>, handle: PluginBuffer<AlignedHandle>) -> Self {
        Self {
            core,
            ring: RequestRing::new(),
            _handle: handle,
        }
    }

    /// Posts a send of `len` bytes at `offset` of registered memory. Plugins match sends and
    /// receives in the order of posting; the tag is for logs.
    pub fn isend(
        &mut self,
        memory: &MemoryHandle,
        offset: usize,
        len: usize,
        tag: i32,
    ) -> Result<PostOutcome, HostError> {
        let data = self.core.piece(memory, offset, len)?;
        if self.ring.len() >= MAX_REQUESTS_PER_COMM {
            return Ok(PostOutcome::Full);
        }
        let mut request = ptr::null_mut();
        let handle = memory.registration.handle;
        let inner = &self.core.plugin.inner;
        let calls = inner.calls()?;
        let rc = self.core.with_comm(|comm| {
            // SAFETY: an open comm with room, a piece of memory registered on it, which the ring
            // keeps registered until the request is done.
            unsafe { calls.isend(comm, data, len, tag, handle, &mut request) }
        })?;
        inner.report("isend", rc)?;
        Ok(self.ring.push(request, data, len, memory))
    }

    /// Drives the comm and tests the oldest send. `None`: it still runs, or none is in flight.
    ///
    /// Done means that the memory may be reused, not that the peer has the data.
    pub fn test_head(&mut self) -> Result<Option<Done>, HostError> {
        let finished = self.core.test_head(&mut self.ring)?;
        Ok(finished.map(|(request, bytes)| Done {
            ticket: request.ticket,
            bytes,
            slot: None,
        }))
    }
}

/// The receiving end of a connection.
pub struct RecvComm {
    pub(crate) core: Arc<CommCore>,
    pub(crate) ring: RequestRing,
    /// Received, not consumed: they still take a place in the plugin.
    received: RequestRing,
    device: Option<DeviceHandle>,
    /// The plugin keeps pointers to it.
    _storage: PluginBuffer<DeviceStorage>,
}

common_methods!(RecvComm);

impl RecvComm {
    pub(crate) fn new(
        core: Arc<CommCore>,
        device: Option<DeviceHandle>,
        storage: PluginBuffer<DeviceStorage>,
    ) -> Self {
        Self {
            core,
            ring: RequestRing::new(),
            received: RequestRing::new(),
            device,
            _storage: storage,
        }
    }

    /// The plugin's device queue, when it made one.
    pub fn device_handle(&self) -> Option<DeviceHandle> {
        self.device
    }

    /// Receives that are done and wait for [`Self::consume_next`].
    pub fn unconsumed(&self) -> usize {
        self.received.len()
    }

    /// Posts a receive of at most `len` bytes to `offset` of registered memory. A message larger
    /// than that breaks the plugin's contract: some write past the end.
    pub fn irecv(
        &mut self,
        memory: &MemoryHandle,
        offset: usize,
        len: usize,
        tag: i32,
    ) -> Result<PostOutcome, HostError> {
        let data = self.core.piece(memory, offset, len)?;
        if self.ring.len() + self.received.len() >= MAX_REQUESTS_PER_COMM {
            return Ok(PostOutcome::Full);
        }
        let mut request = ptr::null_mut();
        let handle = memory.registration.handle;
        let inner = &self.core.plugin.inner;
        let calls = inner.calls()?;
        let rc = self.core.with_comm(|comm| {
            // SAFETY: as in `SendComm::isend`.
            unsafe { calls.irecv(comm, data, len, tag, handle, &mut request) }
        })?;
        inner.report("irecv", rc)?;
        Ok(self.ring.push(request, data, len, memory))
    }

    /// Drives the comm and tests the oldest receive. `None`: it still runs, or none is in flight.
    ///
    /// With a device queue, the result names the slot that describes the data, and the receive
    /// must be consumed. A slot without fragments means that the data lies in place (host memory)
    /// or that there is none.
    pub fn test_head(&mut self) -> Result<Option<Done>, HostError> {
        let Some((request, bytes)) = self.core.test_head(&mut self.ring)? else {
            return Ok(None);
        };
        let ticket = request.ticket;
        let slot = if self.device.is_some() {
            self.received.push_back(request);
            Some(QueueSlot::of_receive(ticket.0))
        } else {
            if self.core.plugin.inner.calls()?.has_consume() {
                self.consume(request.request)?;
            }
            None
        };
        Ok(Some(Done {
            ticket,
            bytes,
            slot,
        }))
    }

    /// Gives the oldest received slot back to the plugin. The bytes must have been unpacked.
    pub fn consume_next(&mut self, ticket: Ticket) -> Result<(), HostError> {
        let next = self.received.head().map(|head| (head.ticket, head.request));
        match next {
            Some((first, request)) if first == ticket => {
                self.consume(request)?;
                self.received.pop_head();
                Ok(())
            }
            _ => Err(HostError::ConsumeOrder {
                asked: ticket.0,
                next: next.map(|(first, _)| first.0),
            }),
        }
    }

    fn consume(&self, request: NonNull<c_void>) -> Result<(), HostError> {
        let inner = &self.core.plugin.inner;
        let calls = inner.calls()?;
        let rc = self.core.with_comm(|comm| {
            // SAFETY: an open comm and its oldest finished receive.
            unsafe { calls.irecv_consumed(comm, request.as_ptr()) }
        })?;
        Ok(inner.report("irecvConsumed", rc)?)
    }
}
