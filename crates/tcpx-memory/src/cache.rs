//! Bytes out of a core's own cache, for a device that reads them next.

use crate::slice::RegionSlice;

/// Bytes that a cache keeps together.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

impl RegionSlice {
    /// Says that the calling core is done with bytes that it has just written and that a device reads next:
    /// from the cache of one core a GPU reads at half the speed. A hint; processors that do not know it
    /// do nothing, and the bytes stay as they are.
    pub fn leave_core(&self) {
        #[cfg(target_arch = "x86_64")]
        if let Some(first) = self.host_ptr() {
            for at in (0..self.len()).step_by(LINE) {
                let line = first.wrapping_add(at);
                // SAFETY: the instruction changes no memory and no register, and faults for no address;
                // processors without it take it for a NOP.
                unsafe {
                    std::arch::asm!(
                        "cldemote [{line}]",
                        line = in(reg) line,
                        options(nostack, preserves_flags)
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::region::Region;

    #[test]
    fn bytes_that_leave_a_core_stay_as_they_are() {
        let region = Region::host(10_000).unwrap();
        let written: Vec<u8> = (0..10_000).map(|at| (at % 251) as u8).collect();
        region.write_from(0, &written).unwrap();
        for range in [0..10_000, 63..65, 9_999..10_000, 5..5] {
            region.slice(range).unwrap().leave_core();
        }
        let mut read = vec![0; 10_000];
        region.read_to(0, &mut read).unwrap();
        assert_eq!(read, written);
    }
}
