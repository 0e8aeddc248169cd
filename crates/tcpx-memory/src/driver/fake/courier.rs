//! The kernel of small copies that stays, on the CPU: it looks for orders when somebody looks at any stream.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{Operation, World, pointer};

/// `tcpx_stay` of `kernels/courier.cu`, and how far the kernel is.
#[repr(C)]
#[derive(Clone)]
pub(super) struct Stay {
    orders: u64,
    come: u64,
    left: u64,
    stay: u32,
    number: u32,
    patience: u32,
    most: u32,
    looks: u32,
    spent: u32,
    is_here: bool,
}

/// A word in the memory of the code under test.
fn word<'a>(at: u64) -> &'a AtomicU32 {
    // SAFETY: the code under test promises an aligned word that stays until the kernel has left.
    unsafe { AtomicU32::from_ptr(pointer(at as usize).cast()) }
}

impl Stay {
    /// # Safety
    /// The parameter must be a `tcpx_stay`.
    pub(super) unsafe fn new(parameter: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let (longs, shorts) = unsafe {
            let shorts = parameter.add(24).cast::<[u32; 4]>().read();
            (parameter.cast::<[u64; 3]>().read(), shorts)
        };
        let ([orders, come, left], [stay, number, patience, most]) = (longs, shorts);
        Self {
            orders,
            come,
            left,
            stay,
            number,
            patience,
            most,
            looks: 0,
            spent: 0,
            is_here: false,
        }
    }

    /// Comes, looks once, or leaves; whether it stays.
    fn step(&mut self) -> bool {
        if !self.is_here {
            self.is_here = true;
            word(self.come).store(self.stay, Ordering::Release);
            return true;
        }
        let stays = self.spent < self.most && self.looks < self.patience && self.look();
        if !stays {
            word(self.left).store(self.stay, Ordering::Release);
        }
        stays
    }

    /// Carries out the next order if it is there; `false` if that is to leave.
    fn look(&mut self) -> bool {
        self.spent += 1;
        self.looks += 1;
        let line = self.orders + u64::from(self.number % 16 * 64);
        let mut values = [0; 8];
        for (at, value) in values.iter_mut().enumerate() {
            let at = pointer(line as usize + at * 8).cast();
            // SAFETY: as for words.
            let seen = unsafe { AtomicU64::from_ptr(at) }.load(Ordering::Acquire);
            if (seen >> 32) as u32 != self.number {
                return true;
            }
            *value = seen as u32;
        }
        let [
            from_low,
            from_high,
            to_low,
            to_high,
            length,
            end_low,
            end_high,
            told,
        ] = values;
        if length == u32::MAX {
            return false;
        }
        let whole = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let (from, to) = (whole(from_low, from_high), whole(to_low, to_high));
        // SAFETY: the code under test promises that both are there until the end is told; freed memory is
        // poisoned and never unmapped.
        unsafe { pointer(to as usize).copy_from(pointer(from as usize), length as usize) };
        word(whole(end_low, end_high)).store(told, Ordering::Release);
        self.number = self.number.wrapping_add(1);
        self.looks = 0;
        true
    }
}

impl World {
    /// Lets every kernel that is first in its stream do its next step; whether any was there.
    pub(super) fn run_couriers(&mut self) -> bool {
        let mut any = false;
        for queue in self.streams.values_mut() {
            if let Some(Operation::Stay(stay)) = queue.front_mut() {
                any = true;
                if self.deserted.remove(&stay.orders) {
                    stay.patience = 0;
                }
                if !stay.step() {
                    queue.pop_front();
                }
            }
        }
        any
    }
}
