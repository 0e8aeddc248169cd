//! A kernel that stays on the GPU for a moment: copies of up to 64 KiB without a call of the driver.
//!
//! A copy by the driver takes several microseconds to be issued, to run and to be seen. Where one small message
//! follows another, a kernel is called that looks for orders in mapped host memory, `kernels/courier.cu`. It
//! leaves by itself when none come, and in any case after about a millisecond: whoever waits for the
//! whole device, or for a multiprocessor to be free, waits hardly longer than that. An order that it has left
//! behind is the driver's to copy.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::driver::sys;
use crate::error::CudaError;
use crate::gpu::{
    Current, Function, Gpu, MappedHost, create_stream, destroy_stream, host_free, is_at_rest,
    parameter,
};

/// Threads of the one block; `kernels/courier.cu`, as are the next three.
const THREADS: u32 = 256;
pub(super) const ORDERS: usize = 16;
const ORDER_WORDS: usize = 8;
/// Most bytes of an order: the driver's own copy of more is under way as soon, and its engine is faster.
pub(super) const MOST_BYTES: usize = 64 << 10;
/// In place of a length: leave.
const LEAVE: u32 = u32::MAX;

/// Looks without an order after which the kernel leaves, of somewhat less than a microsecond each.
const PATIENCE: u32 = 96;
/// Looks and orders after which it leaves in any case; every 4 KiB of an order count as another.
const MOST: u32 = 512;

/// A copy so soon after the one before is likely to be followed by others.
const SOON: Duration = Duration::from_micros(250);
/// So many copies must follow each other closely before a kernel is called, at most: one after a stay of use, twice as
/// many after each without.
const MOST_WANTED: u32 = 64;
/// An order that takes longer than a copy by the driver might.
const SLOW: Duration = Duration::from_micros(100);
/// So many slow orders in a row mean that something keeps the kernel from running: another process on the
/// GPU, a debugger, launches that wait for their end.
const STRIKES: u32 = 8;
/// For how long none is called then.
const REST: Duration = Duration::from_secs(5);
/// Looks at an order's end before the driver is asked whether the kernel is still there.
const LOOKS: u32 = 256;

const RING_BYTES: usize = ORDERS * ORDER_WORDS * 8;
/// Apart, so that neither the CPU nor the GPU finds two in one line of a cache.
const APART: usize = 128;

/// Names those who call couriers.
static CALLERS: AtomicU64 = AtomicU64::new(0);

/// `tcpx_stay` of `kernels/courier.cu`.
#[repr(C)]
struct Stay {
    orders: u64,
    come: u64,
    left: u64,
    stay: u32,
    first: u32,
    patience: u32,
    most: u32,
}

/// An order given, until its end.
pub(super) struct Order {
    stay: u32,
    since: Instant,
    looks: u32,
}

pub(super) struct Courier {
    gpu: Gpu,
    kernel: Function,
    stream: sys::CUstream,
    caller: u64,
    /// The ring of orders and then the two words.
    memory: MappedHost,
    /// The last launch, and the number of the next order.
    stay: u32,
    next: u32,
    /// When the last small copy was begun.
    before: Option<Instant>,
    /// Copies by the driver, each soon after the one before, and after how many of them a kernel is called.
    in_a_row: u32,
    wanted: u32,
    /// The first order of a stay of which it is not known yet whether it had any.
    unjudged: Option<u32>,
    strikes: u32,
    rests_until: Option<Instant>,
    copies: u64,
}

// SAFETY: the stream may be used from any thread, and the memory belongs to this value.
unsafe impl Send for Courier {}

impl Courier {
    /// Loads the kernel and calls it once, to leave at once, so that the driver has nothing left to set up. Does not
    /// wait until it comes: a kernel of the program that waits for just this set-up may have taken all of the
    /// GPU. The context is current.
    ///
    /// # Errors
    /// [`CudaError::KernelUnavailable`], or the driver's refusal.
    pub(super) fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let kernel = gpu.courier_kernel()?;
        let memory = MappedHost::alloc(gpu, RING_BYTES + 2 * APART)?;
        let free = || {
            // SAFETY: nobody has been told of it yet.
            unsafe { host_free(gpu, memory) };
        };
        let mut courier = Self {
            gpu: gpu.clone(),
            kernel,
            stream: create_stream(gpu.api()).inspect_err(|_| free())?,
            caller: CALLERS.fetch_add(1, Ordering::Relaxed),
            memory,
            stay: 0,
            next: 1,
            before: None,
            in_a_row: 0,
            wanted: 1,
            unjudged: None,
            strikes: 0,
            rests_until: None,
            copies: 0,
        };
        let called = courier.launch();
        match called.and_then(|()| courier.retire(Duration::ZERO)) {
            Ok(_) => Ok(courier),
            Err(error) => {
                courier.end(Duration::ZERO);
                Err(error)
            }
        }
    }

    /// Whether the kernel is there. It may leave at any time.
    pub(super) fn is_here(&self) -> bool {
        self.said(RING_BYTES) == self.stay && !self.has_left()
    }

    /// Orders a copy, after which `value` is told at `end`.
    ///
    /// # Safety
    /// Source and destination must be memory that the GPU can reach and `bytes` long, and stay, unused by others,
    /// until the end is told or [`Self::is_open`] has said `false`. So must the word at `end`. No more than
    /// [`ORDERS`] orders may be open.
    pub(super) unsafe fn order(&mut self, way: (u64, u64), bytes: u32, end: (u64, u32)) -> Order {
        self.write(way, bytes, end);
        Order {
            stay: self.stay,
            since: Instant::now(),
            looks: 0,
        }
    }

    /// Writes the next order to the ring.
    fn write(&mut self, (to, from): (u64, u64), length: u32, (end, value): (u64, u32)) {
        let halves = |whole: u64| [whole as u32, (whole >> 32) as u32];
        let ([from_low, from_high], [to_low, to_high]) = (halves(from), halves(to));
        let [end_low, end_high] = halves(end);
        let values = [
            from_low, from_high, to_low, to_high, length, end_low, end_high, value,
        ];
        let number = self.next;
        self.next = number.wrapping_add(1);
        let line = number as usize % ORDERS * ORDER_WORDS;
        for (at, value) in values.into_iter().enumerate() {
            let word = self.memory.host.as_ptr().wrapping_add((line + at) * 8);
            // SAFETY: the ring is aligned and ours; the GPU only reads it.
            let word = unsafe { AtomicU64::from_ptr(word.cast()) };
            // Behind the bytes that the order is about.
            word.store(
                u64::from(number) << 32 | u64::from(value),
                Ordering::Release,
            );
        }
    }

    /// Orders carried out, ever.
    pub(super) fn copies(&self) -> u64 {
        self.copies
    }

    /// Notes that the driver copies at this time, and calls the kernel if more copies are likely to follow.
    /// The context is current.
    pub(super) fn note(&mut self, now: Instant) {
        let soon = self.before.is_some_and(|before| now - before < SOON);
        self.before = Some(now);
        self.in_a_row = if soon {
            self.in_a_row.saturating_add(1)
        } else {
            0
        };
        if !self.has_left() || self.rests_until.is_some_and(|until| now < until) {
            return;
        }
        if let Some(first) = self.unjudged.take() {
            // Copies that are never as close together as the kernel is patient would call it again and again.
            let twice = (self.wanted * 2).min(MOST_WANTED);
            self.wanted = if self.next == first { twice } else { 1 };
        }
        if self.in_a_row < self.wanted {
            return;
        }
        self.rests_until = None;
        if !self.gpu.may_call_courier(self.caller, now) {
            return;
        }
        self.unjudged = Some(self.next);
        if let Err(error) = self.launch() {
            tracing::debug!(%error, "no kernel stays for small copies");
            self.rest(now);
        } else if self.has_left() {
            // The launch itself has waited for its end.
            self.strike(now);
        }
    }

    /// Judges an order whose end was seen.
    pub(super) fn ended(&mut self, order: &Order) {
        let now = Instant::now();
        self.before = Some(now);
        self.copies += 1;
        if now - order.since > SLOW {
            self.strike(now);
        } else {
            self.strikes = 0;
        }
    }

    fn strike(&mut self, now: Instant) {
        self.strikes += 1;
        if self.strikes >= STRIKES {
            self.rest(now);
        }
    }

    fn rest(&mut self, now: Instant) {
        self.strikes = 0;
        self.rests_until = Some(now + REST);
    }

    /// Whether the kernel may still carry out an order whose end was not told when the caller looked. If not, it
    /// has left and touches nothing any more; then either the end is told by now, or it never will be.
    ///
    /// # Errors
    /// The driver's, for example when a kernel has broken the context.
    pub(super) fn is_open(&self, order: &mut Order) -> Result<bool, CudaError> {
        if !self.may_take(order) {
            return Ok(false);
        }
        order.looks += 1;
        if order.looks < LOOKS {
            return Ok(true);
        }
        order.looks = 0;
        let _current = Current::enter(&self.gpu)?;
        is_at_rest(self.gpu.api(), self.stream).map(|rests| !rests)
    }

    /// As [`Self::is_open`], as far as that is seen without the driver.
    pub(super) fn may_take(&self, order: &Order) -> bool {
        self.stay == order.stay && !self.has_left()
    }

    /// Launches the kernel; the one before has left.
    fn launch(&mut self) -> Result<(), CudaError> {
        let ring = self.memory.device;
        let come = ring + RING_BYTES as u64;
        let stay = Stay {
            orders: ring,
            come,
            left: come + APART as u64,
            stay: self.stay.wrapping_add(1),
            first: self.next,
            patience: PATIENCE,
            most: MOST,
        };
        // SAFETY: the parameter is of the kernel's type, and the memory stays until it has left. What it
        // copies is what `order` is promised.
        unsafe {
            let parameters = &mut [parameter(&stay)];
            self.kernel
                .launch(self.gpu.api(), (1, THREADS), self.stream, parameters)?;
        }
        self.stay = stay.stay;
        Ok(())
    }

    /// Whether no launch touches anything any more.
    fn has_left(&self) -> bool {
        self.said(RING_BYTES + APART) == self.stay
    }

    fn said(&self, at: usize) -> u32 {
        let word = self.memory.host.as_ptr().wrapping_add(at);
        // SAFETY: the word is aligned and ours; the GPU alone writes it, whole.
        let word = unsafe { AtomicU32::from_ptr(word.cast()) };
        word.load(Ordering::Acquire)
    }

    /// Sends the kernel away and waits until it is off the GPU, which takes a moment. `false` if that is not
    /// seen within the limit. The context is current.
    fn retire(&mut self, limit: Duration) -> Result<bool, CudaError> {
        if !self.has_left() {
            self.write((0, 0), LEAVE, (0, 0));
        }
        let start = Instant::now();
        while !is_at_rest(self.gpu.api(), self.stream)? {
            if start.elapsed() > limit {
                return Ok(false);
            }
            thread::yield_now();
        }
        Ok(true)
    }

    /// Ends it. Where the kernel is not seen to go within the limit, all that it needs stays until the process
    /// ends. The context is current, and no order open.
    pub(super) fn end(mut self, limit: Duration) {
        if self.retire(limit) != Ok(true) {
            // The GPU's context and module among it.
            std::mem::forget(self);
            return;
        }
        destroy_stream(self.gpu.api(), self.stream);
        // SAFETY: the kernel has left, and none is called any more.
        unsafe { host_free(&self.gpu, self.memory) };
    }
}
