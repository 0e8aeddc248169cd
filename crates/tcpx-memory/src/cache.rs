//! Writing past a core's own cache, for a device that reads next.

use crate::error::MemoryError;
use crate::slice::RegionSlice;

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

impl RegionSlice {
    /// Copies `bytes` to byte `at` of this part with non-temporal stores, so that a device that
    /// reads them next finds them in memory, not in a core's cache. Blocks for GPU memory.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Busy`] for a plain slice, or the driver's
    /// refusal.
    pub fn write_past_caches(&self, at: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let part = self.slice(at..at.saturating_add(bytes.len()))?;
        #[cfg(target_arch = "x86_64")]
        if let Some(to) = part.host_ptr() {
            let _hold = part.hold(crate::lease::Access::Write, "a write past the caches")?;
            // SAFETY: `part` is as long as `bytes`, its region keeps the memory, and the hold keeps
            // everybody else away from it.
            unsafe { copy_past_caches(bytes, to) };
            return Ok(());
        }
        part.write_from(bytes)
    }
}

/// Copies whole lines of the destination with non-temporal stores, and the rest at both ends as
/// usual. A thread or device that sees what the calling thread publishes afterwards also sees the
/// bytes.
///
/// # Safety
/// `to` is valid for writes of as many bytes as `from` has, and nothing else touches them.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_past_caches(from: &[u8], to: *mut u8) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const PART: usize = size_of::<__m128i>();
    let (head, rest) = from.split_at(to.align_offset(LINE).min(from.len()));
    let (lines, tail) = rest.split_at(rest.len() - rest.len() % LINE);
    // SAFETY: the three pieces follow each other in `from` and in the destination, which is as
    // long; the middle one begins at a line there, as streaming stores need, and has whole ones.
    // SSE2 is part of x86-64.
    unsafe {
        to.copy_from_nonoverlapping(head.as_ptr(), head.len());
        let middle = to.add(head.len());
        for (index, line) in lines.chunks_exact(LINE).enumerate() {
            let (source, target) = (line.as_ptr(), middle.add(index * LINE));
            for part in (0..LINE).step_by(PART) {
                let value = _mm_loadu_si128(source.add(part).cast());
                _mm_stream_si128(target.add(part).cast(), value);
            }
        }
        let end = middle.add(lines.len());
        end.copy_from_nonoverlapping(tail.as_ptr(), tail.len());
        // Non-temporal stores are not ordered with other stores.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::error::MemoryError;
    use crate::region::Region;

    proptest! {
        #[test]
        fn bytes_past_the_caches_are_all_that_changes(at in 0usize..300, length in 0usize..1000) {
            let region = Region::host(1400).unwrap();
            let written: Vec<u8> = (0..length).map(|at| (at % 251) as u8 + 1).collect();
            let part = region.slice(7..1400).unwrap();
            part.write_past_caches(at, &written).unwrap();
            let mut read = vec![0; 1400];
            region.read_to(0, &mut read).unwrap();
            let (before, rest) = read.split_at(7 + at);
            let (there, behind) = rest.split_at(length);
            prop_assert_eq!(there, &written[..]);
            prop_assert!(before.iter().chain(behind).all(|byte| *byte == 0));
        }
    }

    #[test]
    fn bytes_past_the_caches_stay_in_their_part() {
        let region = Region::host(100).unwrap();
        let part = region.slice(10..20).unwrap();
        for (at, length) in [(0, 11), (10, 1), (usize::MAX, 1)] {
            let refused = part.write_past_caches(at, &vec![1; length]);
            assert!(
                matches!(refused, Err(MemoryError::OutOfBounds { .. })),
                "{at}"
            );
        }
    }
}
