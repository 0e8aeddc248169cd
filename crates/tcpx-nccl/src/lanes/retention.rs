//! Copies of short chunks, kept until the peer has read them: with its copy a send is done, as it
//! would be once the kernel had copied it into a socket, and a lane that ends has the copy sent
//! again.

use std::sync::{Arc, Mutex};

use tcpx_lanes::lock;
use tcpx_lanes::socket_calls::Span;
use tcpx_memory::{MemoryError, Region};

/// Largest chunk that is copied; of larger ones the pages are lent, which costs less.
pub(crate) const SLOT_BYTES: usize = 64 << 10;
/// Slots of a loop: 1 MiB, so that what a loop copies stays in its core's cache.
const SLOTS: usize = 16;

/// The slots of one loop's lanes.
#[derive(Debug)]
pub(crate) struct Retention {
    memory: Region,
    /// The one that was freed last goes first: it is in the cache.
    free: Mutex<Vec<usize>>,
}

/// A copy; dropping it frees its slot.
#[derive(Debug)]
pub(crate) struct RetainedCopy {
    retention: Arc<Retention>,
    slot: usize,
}

impl Retention {
    /// All that there will be: nothing is allocated later.
    pub(crate) fn new() -> Result<Arc<Self>, MemoryError> {
        Ok(Arc::new(Self {
            memory: Region::host(SLOTS * SLOT_BYTES)?,
            free: Mutex::new((0..SLOTS).rev().collect()),
        }))
    }

    /// Copies a payload of a slot at most; `None` while no slot is free. Gives the copy and where
    /// it lies.
    ///
    /// # Safety
    /// The payload is readable, and nobody writes to it during the call.
    pub(crate) unsafe fn copy(self: &Arc<Self>, payload: Span) -> Option<(RetainedCopy, Span)> {
        if payload.len() > SLOT_BYTES {
            return None;
        }
        let memory = self.memory.all().host_ptr()?;
        let slot = lock(&self.free).pop()?;
        let kept = RetainedCopy {
            retention: Arc::clone(self),
            slot,
        };
        let to = memory.wrapping_add(slot * SLOT_BYTES);
        // SAFETY: the slot lies in the region, which `kept` holds, and is ours alone until that is
        // dropped; it is no memory of the host program's, so the two do not overlap. The caller
        // vouches for the payload.
        unsafe { std::ptr::copy_nonoverlapping(payload.start(), to, payload.len()) };
        Some((kept, Span::new(to, payload.len())))
    }
}

impl Drop for RetainedCopy {
    fn drop(&mut self) {
        lock(&self.retention.free).push(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(retention: &Arc<Retention>, bytes: &[u8]) -> Option<(RetainedCopy, Span)> {
        // SAFETY: borrowed for the call.
        unsafe { retention.copy(Span::of(bytes)) }
    }

    #[test]
    fn a_slot_serves_one_copy_at_a_time_and_there_are_no_more() {
        let retention = Retention::new().unwrap();
        let mut copies: Vec<_> = (0..SLOTS)
            .map(|at| copy(&retention, &[at as u8; SLOT_BYTES]).unwrap())
            .collect();
        assert!(copy(&retention, &[1]).is_none());
        for (at, (_, span)) in copies.iter().enumerate() {
            // SAFETY: a slot that its copy keeps.
            let bytes = unsafe { std::slice::from_raw_parts(span.start(), span.len()) };
            assert!(bytes.len() == SLOT_BYTES && bytes.iter().all(|byte| *byte == at as u8));
        }
        let (freed, before) = copies.remove(3);
        drop(freed);
        let (_again, span) = copy(&retention, &[1]).unwrap();
        assert_eq!((span.start(), span.len()), (before.start(), 1));
    }

    #[test]
    fn what_is_larger_than_a_slot_is_not_copied() {
        let retention = Retention::new().unwrap();
        assert!(copy(&retention, &[1; SLOT_BYTES + 1]).is_none());
    }
}
