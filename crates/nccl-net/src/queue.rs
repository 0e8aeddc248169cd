//! The device-unpack queue in host-visible memory, read with the ordering it needs.

use std::ptr::{NonNull, addr_of_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::constants::{UNPACK_QUEUE_DEPTH, UNPACK_SLOT_ENTRIES};
use crate::device::{LoadMeta, NetUnpackMeta};

/// Index of a queue slot, always below 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueSlot(usize);

impl QueueSlot {
    /// The slot of the receive number `ordinal` of a comm, counted from 0: receives take slots in
    /// turn, whatever memory they go to.
    pub const fn of_receive(ordinal: u64) -> Self {
        Self((ordinal % UNPACK_QUEUE_DEPTH as u64) as usize)
    }

    /// The index.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// What is wrong with a queue slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The plugin's count is impossible.
    #[error(
        "queue slot {slot} claims {count} fragments, at most 2048 fit: the queue is corrupt or has \
         another layout; use a plugin with device-unpack version 7"
    )]
    CountTooLarge {
        /// Slot index.
        slot: usize,
        /// What it says.
        count: u64,
    },
}

/// Reads a queue that a plugin fills.
#[derive(Debug)]
pub struct UnpackQueue {
    meta: NonNull<NetUnpackMeta>,
}

// SAFETY: reads are volatile or atomic; `new` demands that the memory can be read from anywhere.
unsafe impl Send for UnpackQueue {}
// SAFETY: as above.
unsafe impl Sync for UnpackQueue {}

/// # Safety
/// `meta` points to a live queue.
unsafe fn count_of<'a>(meta: NonNull<NetUnpackMeta>, slot: QueueSlot) -> &'a AtomicU64 {
    // SAFETY: the index is in bounds; no reference to the queue itself is formed.
    unsafe {
        let count = addr_of_mut!((*meta.as_ptr()).cnt).cast::<u64>().add(slot.0);
        AtomicU64::from_ptr(count)
    }
}

/// # Safety
/// `meta` points to a live queue.
unsafe fn entries_of(meta: NonNull<NetUnpackMeta>, slot: QueueSlot) -> *mut LoadMeta {
    // SAFETY: the index is in bounds; no reference to the queue itself is formed.
    unsafe {
        addr_of_mut!((*meta.as_ptr()).mem)
            .cast::<[LoadMeta; UNPACK_SLOT_ENTRIES]>()
            .add(slot.0)
            .cast()
    }
}

impl UnpackQueue {
    /// # Safety
    /// `meta` is 16-byte aligned, readable and writable by the CPU, and stays so for the life of
    /// the value. The other side may write at any time.
    pub const unsafe fn new(meta: NonNull<NetUnpackMeta>) -> Self {
        Self { meta }
    }

    /// The fragments of a slot. Right once the receive that owns the slot tested as done, and until
    /// it is consumed. Offsets and lengths are the plugin's word: check them against the pool and
    /// the destination.
    pub fn read(&self, slot: QueueSlot) -> Result<Vec<LoadMeta>, QueueError> {
        let mut list = Vec::new();
        self.read_into(slot, &mut list)?;
        Ok(list)
    }

    /// As [`Self::read`], into a list whose memory is reused; it is cleared first. Returns the
    /// number of fragments.
    pub fn read_into(
        &self,
        slot: QueueSlot,
        list: &mut Vec<LoadMeta>,
    ) -> Result<usize, QueueError> {
        list.clear();
        // SAFETY: `new` vouches for the memory. Acquire: entries are read after the count.
        let count = unsafe { count_of(self.meta, slot) }.load(Ordering::Acquire);
        let entries = usize::try_from(count)
            .ok()
            .filter(|count| *count <= UNPACK_SLOT_ENTRIES)
            .ok_or(QueueError::CountTooLarge {
                slot: slot.0,
                count,
            })?;
        list.reserve(entries);
        // SAFETY: as above.
        let first = unsafe { entries_of(self.meta, slot) };
        for index in 0..entries {
            // SAFETY: `index` is below 2048. Volatile, because a faulty plugin may still write.
            list.push(unsafe { first.add(index).read_volatile() });
        }
        Ok(entries)
    }
}

impl UnpackQueue {
    /// As [`Self::read_into`], and empties the slot. A plugin that reports the slot's next receive
    /// before it has filled it is then seen to have nothing, not what was there before.
    pub fn take_into(
        &self,
        slot: QueueSlot,
        list: &mut Vec<LoadMeta>,
    ) -> Result<usize, QueueError> {
        let entries = self.read_into(slot, list)?;
        // SAFETY: `new` vouches for the memory. The plugin writes the slot again only after it was
        // consumed, which comes later.
        unsafe { count_of(self.meta, slot) }.store(0, Ordering::Release);
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Half a megabyte is too much for a test's stack.
    fn zeroed_queue() -> Box<NetUnpackMeta> {
        // SAFETY: all-zero integers are a value.
        unsafe { Box::<NetUnpackMeta>::new_zeroed().assume_init() }
    }

    fn fragment(n: u32) -> LoadMeta {
        LoadMeta {
            src_off: n,
            len: n + 1,
            dst_off: u64::from(n) << 33,
        }
    }

    /// Fills a slot as a plugin does.
    fn fill(meta: &mut NetUnpackMeta, slot: usize, list: &[LoadMeta]) {
        meta.mem[slot][..list.len()].copy_from_slice(list);
        meta.cnt[slot] = list.len() as u64;
    }

    #[test]
    fn what_lies_in_a_slot_is_read_and_slots_do_not_touch() {
        let mut meta = zeroed_queue();
        for slot in 0..16 {
            let list: Vec<_> = (0..2048).map(|n| fragment(n * 16 + slot)).collect();
            fill(&mut meta, slot as usize, &list);
        }
        meta.cnt[3] = 0;
        // SAFETY: the box outlives the reader.
        let reader = unsafe { UnpackQueue::new(NonNull::from(&mut *meta)) };
        let read = |slot: u32| reader.read(QueueSlot::of_receive(u64::from(slot) + 160));
        assert_eq!(read(3).unwrap(), []);
        for slot in (0..16).filter(|slot| *slot != 3) {
            let list = read(slot).unwrap();
            assert_eq!(list.len(), 2048);
            assert!((0..2048).all(|n| list[n as usize] == fragment(n * 16 + slot)));
        }
    }

    #[test]
    fn what_was_taken_is_not_there_a_second_time() {
        let mut meta = zeroed_queue();
        fill(&mut meta, 2, &[fragment(1), fragment(2)]);
        // SAFETY: the box outlives the reader.
        let reader = unsafe { UnpackQueue::new(NonNull::from(&mut *meta)) };
        let slot = QueueSlot::of_receive(2);
        let mut list = Vec::new();
        assert_eq!(reader.take_into(slot, &mut list), Ok(2));
        assert_eq!(list, [fragment(1), fragment(2)]);
        assert_eq!(reader.take_into(slot, &mut list), Ok(0));
        assert!(list.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_bytes_in_the_queue_give_a_list_or_a_typed_error(
            counts in prop::array::uniform16(prop_oneof![
                0_u64..=2050,
                any::<u64>(),
                Just(1 << 32),
            ]),
            seed in any::<u64>(),
        ) {
            let mut meta = zeroed_queue();
            meta.cnt = counts;
            let mut state = seed | 1;
            for entry in meta.mem.iter_mut().flatten() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *entry = LoadMeta { src_off: state as u32, len: (state >> 32) as u32, dst_off: !state };
            }
            let copy: Vec<Vec<LoadMeta>> = meta.mem.iter().map(|slot| slot.to_vec()).collect();
            // SAFETY: the box outlives the reader.
            let reader = unsafe { UnpackQueue::new(NonNull::from(&mut *meta)) };
            for slot in 0..16_u64 {
                let count = counts[slot as usize];
                match reader.read(QueueSlot::of_receive(slot)) {
                    Ok(list) => {
                        prop_assert!(count <= 2048);
                        prop_assert_eq!(&list[..], &copy[slot as usize][..count as usize]);
                    }
                    Err(error) => {
                        prop_assert!(count > 2048);
                        prop_assert_eq!(
                            error,
                            QueueError::CountTooLarge { slot: slot as usize, count }
                        );
                    }
                }
            }
        }
    }
}
