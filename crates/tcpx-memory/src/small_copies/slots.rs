//! The slots of pinned memory that copies in flight use.

use super::persistent::WorkRequest;
use crate::lease::Held;
use crate::slice::RegionSlice;

/// Copies in flight at a time, at most: one that is longer than a slot takes several that follow
/// each other.
pub(super) const SLOTS: usize = u16::BITS as usize;
/// Bytes of a slot.
pub(super) const SLOT: usize = 32 << 10;
/// Slots that copies of more than one leave to those of one.
const KEPT: usize = 4;

/// What a copy does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// From the slot to the GPU.
    Write,
    /// From the GPU to the slot.
    Read,
    /// Within the GPU: of the slot it has the word of its end alone.
    Within,
}

/// Memory of the GPU that a copy touches, held for it.
pub(super) type Memory = (RegionSlice, Held);

/// A copy in flight, and what it touches.
pub(super) struct Copy {
    /// The caller's name for a copy whose end is to be reported: any but a read that its caller
    /// waits for.
    pub(super) token: Option<u64>,
    pub(super) kind: Kind,
    /// Where to and where from, and how much.
    pub(super) way: (u64, u64),
    pub(super) bytes: usize,
    /// Of a copy that is the persistent kernel's.
    pub(super) request: Option<WorkRequest>,
    /// The other end of one within the GPU comes last.
    pub(super) _memory: (Memory, Option<Memory>),
}

impl Copy {
    /// Bytes of slots that it takes.
    fn room(&self) -> usize {
        match self.kind {
            Kind::Within => SLOT,
            _ => self.bytes,
        }
    }
}

/// Copies in flight.
#[derive(Default)]
pub(super) struct CopySlots {
    /// Each copy at its first slot.
    copies: [Option<Copy>; SLOTS],
    /// Slots in use, and first ones of copies whose end is to be reported, a bit each.
    in_use: u16,
    reported: u16,
}

impl CopySlots {
    /// The first of enough free slots for so many bytes, which are no more than a copy has.
    pub(super) fn find(&self, bytes: usize) -> Option<usize> {
        let is_free = |slot: &usize| self.in_use & run(*slot, bytes) == 0;
        match slots_of(bytes) {
            1 => (0..SLOTS).find(is_free),
            long => (KEPT..=SLOTS - long).rev().find(is_free),
        }
    }

    /// Puts a copy in the slots that were found for it.
    pub(super) fn put(&mut self, slot: usize, copy: Copy) {
        self.in_use |= run(slot, copy.room());
        self.reported |= u16::from(copy.token.is_some()) << slot;
        self.copies[slot] = Some(copy);
    }

    /// The copy whose first slot this is.
    pub(super) fn get(&self, slot: usize) -> Option<&Copy> {
        self.copies[slot].as_ref()
    }

    /// The caller waits no longer for a read, and is told of its end.
    pub(super) fn abandon(&mut self, slot: usize, token: u64) {
        if let Some(copy) = &mut self.copies[slot] {
            copy.token = Some(token);
            self.reported |= 1 << slot;
        }
    }

    pub(super) fn get_mut(&mut self, slot: usize) -> Option<&mut Copy> {
        self.copies[slot].as_mut()
    }

    /// Frees the slots of the copy whose first one this is.
    pub(super) fn take(&mut self, slot: usize) -> Option<Copy> {
        let copy = self.copies[slot].take()?;
        self.in_use &= !run(slot, copy.room());
        self.reported &= !(1 << slot);
        Some(copy)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_use == 0
    }

    /// Slots in use, first ones among them.
    pub(super) fn in_use(&self) -> impl Iterator<Item = usize> + use<> {
        set_bits(self.in_use)
    }

    /// First slots of copies whose end is to be reported.
    pub(super) fn reported(&self) -> impl Iterator<Item = usize> + use<> {
        set_bits(self.reported)
    }

    /// Whether an abandoned read is still in flight: the next long one would take too long too.
    pub(super) fn has_given_up(&self) -> bool {
        let mut copies = self.copies.iter().flatten();
        copies.any(|copy| copy.kind == Kind::Read)
    }

    /// Whether any copy is the persistent kernel's.
    pub(super) fn has_requests(&self) -> bool {
        let mut copies = self.copies.iter().flatten();
        copies.any(|copy| copy.request.is_some())
    }
}

/// Slots that so many bytes take.
fn slots_of(bytes: usize) -> usize {
    bytes.div_ceil(SLOT)
}

/// Bits of the slots that so many bytes take from this one on.
fn run(first: usize, bytes: usize) -> u16 {
    let row = (1_u32 << slots_of(bytes)) - 1;
    (row as u16) << first
}

/// The numbers of the bits that are set.
fn set_bits(mut bits: u16) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let next = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        next
    })
}
