//! What a host holds: comms and requests behind opaque pointers, marked so that a mix-up is seen.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use super::error::NetError;
use super::fork::generation;
use super::traits::{NetComm, NetPlugin, RequestId};

/// First word of every comm and request, so that a foreign or mixed-up pointer is refused.
const COMM_MARK: u64 = 0x7463_7078_636f_6d6d;
const REQUEST_MARK: u64 = 0x7463_7078_7265_7175;

const FREE: u8 = 0;
const IN_FLIGHT: u8 = 1;

/// One comm of any kind.
pub(super) enum CommKind<P: NetPlugin> {
    Listen(P::Listen),
    Send(P::Send),
    Recv(P::Recv),
}

impl<P: NetPlugin> CommKind<P> {
    pub(super) fn close(self) -> Result<(), NetError> {
        match self {
            Self::Listen(_) => Ok(()),
            Self::Send(comm) => comm.close(),
            Self::Recv(comm) => comm.close(),
        }
    }
}

#[repr(C)]
pub(super) struct CommBox<P: NetPlugin> {
    mark: u64,
    /// The process that made it.
    generation: u32,
    pub(super) kind: CommKind<P>,
    requests: [RequestSlot<P>; RequestId::LIMIT],
}

/// What `*request` points to.
#[repr(C)]
pub(super) struct RequestSlot<P: NetPlugin> {
    mark: u64,
    state: AtomicU8,
    index: u32,
    comm: AtomicPtr<CommBox<P>>,
}

impl<P: NetPlugin> CommBox<P> {
    /// Moves a comm to the heap; the pointer is the host's until it closes it.
    pub(super) fn into_raw(kind: CommKind<P>) -> *mut c_void {
        let requests = std::array::from_fn(|index| RequestSlot {
            mark: REQUEST_MARK,
            state: AtomicU8::new(FREE),
            // At most 32 slots.
            index: index as u32,
            comm: AtomicPtr::new(ptr::null_mut()),
        });
        let comm = Box::into_raw(Box::new(Self {
            mark: COMM_MARK,
            generation: generation(),
            kind,
            requests,
        }));
        // SAFETY: freshly made and not shared yet.
        for slot in unsafe { &(*comm).requests } {
            slot.comm.store(comm, Ordering::Release);
        }
        comm.cast()
    }

    /// A comm of this process.
    ///
    /// # Safety
    /// `comm` is NULL, foreign but readable, or a comm that was not closed.
    pub(super) unsafe fn from_ptr<'a>(comm: *mut c_void) -> Result<&'a Self, NetError> {
        // SAFETY: forwarded.
        let comm = unsafe { Self::marked(comm) }?;
        comm.check_process()?;
        Ok(comm)
    }

    /// What a fork copied is for the parent alone.
    fn check_process(&self) -> Result<(), NetError> {
        if self.generation == generation() {
            return Ok(());
        }
        Err(NetError::invalid_usage(
            "the comm belongs to the process that this one was forked from: make communicators after the fork",
        ))
    }

    /// # Safety
    /// As for [`Self::from_ptr`].
    unsafe fn marked<'a>(comm: *mut c_void) -> Result<&'a Self, NetError> {
        let comm = checked_ptr::<Self>(comm, "comm")?;
        // SAFETY: readable by the caller's promise; the mark stands first in a C layout.
        if unsafe { comm.cast::<u64>().read() } != COMM_MARK {
            return Err(NetError::invalid_argument(
                "the pointer is no comm of this plugin",
            ));
        }
        // SAFETY: the mark says that it came from `into_raw`, and it was not closed.
        Ok(unsafe { comm.as_ref() })
    }

    /// Takes back from the host a comm that `check` accepts; `None` for one that a fork copied:
    /// only the parent may end it, so the copy stays.
    ///
    /// # Safety
    /// As for [`Self::from_ptr`], and the host does not use the comm or its requests again.
    pub(super) unsafe fn close(
        comm: *mut c_void,
        check: impl FnOnce(&Self) -> Result<(), NetError>,
    ) -> Result<Option<Box<Self>>, NetError> {
        // SAFETY: forwarded.
        let marked = unsafe { Self::marked(comm) }?;
        check(marked)?;
        if marked.check_process().is_err() {
            return Ok(None);
        }
        let comm: *mut Self = comm.cast();
        // SAFETY: it came from `into_raw`; the first word is cleared so that a second close of
        // memory that was not reused yet is refused rather than freed twice.
        unsafe {
            (*comm).mark = 0;
            Ok(Some(Box::from_raw(comm)))
        }
    }

    pub(super) fn sender(&self) -> Result<&P::Send, NetError> {
        match &self.kind {
            CommKind::Send(comm) => Ok(comm),
            _ => Err(NetError::invalid_argument("expected a send comm")),
        }
    }

    pub(super) fn receiver(&self) -> Result<&P::Recv, NetError> {
        match &self.kind {
            CommKind::Recv(comm) => Ok(comm),
            _ => Err(NetError::invalid_argument("expected a receive comm")),
        }
    }

    pub(super) fn listener(&self) -> Result<&P::Listen, NetError> {
        match &self.kind {
            CommKind::Listen(comm) => Ok(comm),
            _ => Err(NetError::invalid_argument("expected a listen comm")),
        }
    }

    /// Registration works on either kind.
    pub(super) fn transfer_comm(&self) -> Result<&dyn NetComm<Memory = P::Memory>, NetError> {
        match &self.kind {
            CommKind::Send(comm) => Ok(comm),
            CommKind::Recv(comm) => Ok(comm),
            CommKind::Listen(_) => Err(NetError::invalid_argument(
                "expected a send or receive comm, got a listen comm",
            )),
        }
    }

    /// The pointer that names a request for the host.
    pub(super) fn post(&self, id: RequestId) -> Result<*mut c_void, NetError> {
        let slot = usize::try_from(id.0)
            .ok()
            .and_then(|index| self.requests.get(index))
            .ok_or_else(|| NetError::internal("the plugin named a request beyond its limit"))?;
        if slot.state.swap(IN_FLIGHT, Ordering::AcqRel) == IN_FLIGHT {
            return Err(NetError::internal(
                "the plugin named a request that still runs",
            ));
        }
        Ok(ptr::from_ref(slot).cast_mut().cast())
    }
}

impl<P: NetPlugin> RequestSlot<P> {
    /// # Safety
    /// `request` is NULL, foreign but readable, or a request of a comm that was not closed.
    pub(super) unsafe fn from_ptr<'a>(request: *mut c_void) -> Result<&'a Self, NetError> {
        let slot = checked_ptr::<Self>(request, "request")?;
        // SAFETY: readable by the caller's promise; the mark stands first in a C layout.
        if unsafe { slot.cast::<u64>().read() } != REQUEST_MARK {
            return Err(NetError::invalid_argument(
                "the pointer is no request of this plugin",
            ));
        }
        // SAFETY: the mark says that it lies in a comm of ours, which was not closed.
        Ok(unsafe { slot.as_ref() })
    }

    pub(super) fn id(&self) -> RequestId {
        RequestId(self.index)
    }

    /// Tests the request; frees it when done.
    pub(super) fn test(&self) -> Result<Option<usize>, NetError> {
        if self.state.load(Ordering::Acquire) != IN_FLIGHT {
            return Err(NetError::invalid_usage(
                "the request is not in flight: do not test it again after done",
            ));
        }
        let comm = self.comm.load(Ordering::Acquire);
        // SAFETY: set to the comm that this slot lies in before the slot was reachable.
        let comm = unsafe { &*comm };
        comm.check_process()?;
        let done = comm.transfer_comm()?.test(self.id())?;
        if done.is_some() {
            // The plugin may reuse the id from here on, but only in a later call of the host.
            self.state.store(FREE, Ordering::Release);
        }
        Ok(done)
    }
}

/// NULL and misaligned pointers are refused with the name of what was expected.
pub(super) fn checked_ptr<T>(
    pointer: *mut c_void,
    what: &'static str,
) -> Result<NonNull<T>, NetError> {
    let pointer = NonNull::new(pointer.cast::<T>())
        .ok_or_else(|| NetError::invalid_argument(format!("the {what} pointer is NULL")))?;
    if !pointer.is_aligned() {
        return Err(NetError::invalid_argument(format!(
            "the {what} pointer is misaligned"
        )));
    }
    Ok(pointer)
}
