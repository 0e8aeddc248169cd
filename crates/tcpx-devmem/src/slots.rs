//! Places in memory that a card can send from.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use tcpx_lanes::lock;
use tcpx_lanes::waker::Waker;
use tcpx_memory::{Access, MemoryError, RegionSlice};

use super::bound::SendPath;

/// Bytes of a slot; the longest chunk that is sent from one.
pub(super) const SLOT_BYTES: usize = 1 << 20;

/// The memory of a [`SendPath`], cut in slots that the channels of a network share.
#[derive(Debug)]
pub(super) struct SendSlots {
    path: SendPath,
    /// Rides on a lease of all of it.
    memory: RegionSlice,
    count: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<u64>,
    /// Slots that a card may read for ever.
    lost: BTreeSet<u64>,
    /// Told when a slot comes back, as somebody found none.
    waiting: Vec<Arc<Waker>>,
}

/// A slot in use; it is free again with the last reference.
#[derive(Debug)]
pub(super) struct SendSlot {
    slots: Arc<SendSlots>,
    offset: u64,
}

impl SendSlots {
    pub(super) fn new(path: SendPath) -> Result<Arc<Self>, MemoryError> {
        let region = path.memory().region().clone();
        let lease = region.lease_as(.., Access::Write, "the slots that a card sends from")?;
        let count = (region.len() / SLOT_BYTES) as u64;
        let free = (0..count).rev().map(|slot| slot * SLOT_BYTES as u64);
        Ok(Arc::new(Self {
            path,
            memory: lease.all(),
            count,
            state: Mutex::new(State {
                free: free.collect(),
                ..State::default()
            }),
        }))
    }

    pub(super) fn path(&self) -> &SendPath {
        &self.path
    }

    /// Whether no slot will ever be free again.
    pub(super) fn are_lost(&self) -> bool {
        lock(&self.state).lost.len() as u64 == self.count
    }

    /// A free slot; else `signal` is raised when one comes back.
    pub(super) fn take(self: &Arc<Self>, signal: &Arc<Waker>) -> Option<Arc<SendSlot>> {
        let mut state = lock(&self.state);
        let Some(offset) = state.free.pop() else {
            if !state.waiting.iter().any(|one| Arc::ptr_eq(one, signal)) {
                state.waiting.push(Arc::clone(signal));
            }
            return None;
        };
        Some(Arc::new(SendSlot {
            slots: Arc::clone(self),
            offset,
        }))
    }
}

impl SendSlot {
    /// Where it begins in the bound memory, in bytes.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The kernel's number for the bound memory.
    pub(super) fn dmabuf_id(&self) -> u32 {
        self.slots.path.dmabuf_id
    }

    /// A card may read it for ever: it is never free again.
    pub(super) fn keep_for_good(&self) {
        lock(&self.slots.state).lost.insert(self.offset);
    }

    /// Its first bytes.
    pub(super) fn slice(&self, bytes: usize) -> Result<RegionSlice, MemoryError> {
        let start = usize::try_from(self.offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(bytes.min(SLOT_BYTES));
        self.slots.memory.slice(start..end)
    }
}

impl Drop for SendSlot {
    fn drop(&mut self) {
        let mut state = lock(&self.slots.state);
        if !state.lost.contains(&self.offset) {
            state.free.push(self.offset);
        }
        for signal in state.waiting.drain(..) {
            signal.wake();
        }
    }
}
