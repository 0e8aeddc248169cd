//! Requests in flight, in the order of posting.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

use crate::constants::MAX_REQUESTS_PER_COMM;
use crate::memory::MemoryHandle;
use crate::queue::QueueSlot;

/// Number of a request within its comm, counted from 0 in the order of posting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What became of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum PostOutcome {
    /// In flight.
    Posted(Ticket),
    /// No room now: test, consume, then post again.
    Full,
}

/// A finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Which one.
    pub ticket: Ticket,
    /// Bytes moved, when the plugin says so; Google's never does.
    pub bytes: Option<usize>,
    /// Receives of a comm with a device queue: the slot that describes the data.
    pub slot: Option<QueueSlot>,
}

pub(crate) struct InFlight {
    pub(crate) request: NonNull<c_void>,
    pub(crate) ticket: Ticket,
    pub(crate) len: usize,
    /// First byte.
    pub(crate) data: *mut c_void,
    /// Keeps the memory registered.
    pub(crate) memory: MemoryHandle,
}

/// A queue of requests with a bound.
pub(crate) struct RequestRing {
    requests: VecDeque<InFlight>,
    next: u64,
}

// SAFETY: request pointers belong to the plugin, whose calls are not tied to a thread.
unsafe impl Send for RequestRing {}
// SAFETY: as above; shared access reads lengths only.
unsafe impl Sync for RequestRing {}

impl RequestRing {
    pub(crate) fn new() -> Self {
        Self {
            requests: VecDeque::with_capacity(MAX_REQUESTS_PER_COMM),
            next: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Takes a request that a post returned; NULL means that there was no room.
    pub(crate) fn push(
        &mut self,
        request: *mut c_void,
        data: *mut c_void,
        len: usize,
        memory: &MemoryHandle,
    ) -> PostOutcome {
        let Some(request) = NonNull::new(request) else {
            return PostOutcome::Full;
        };
        let ticket = Ticket(self.next);
        self.next += 1;
        self.requests.push_back(InFlight {
            request,
            ticket,
            len,
            data,
            memory: memory.clone(),
        });
        PostOutcome::Posted(ticket)
    }

    pub(crate) fn push_back(&mut self, request: InFlight) {
        self.requests.push_back(request);
    }

    pub(crate) fn head(&self) -> Option<&InFlight> {
        self.requests.front()
    }

    pub(crate) fn pop_head(&mut self) -> Option<InFlight> {
        self.requests.pop_front()
    }
}
