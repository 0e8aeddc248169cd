//! The persistent copy kernel: copies of up to 64 KiB without a driver call.
//!
//! The driver takes several microseconds to issue a copy, run it and report its end. If small
//! messages follow each other closely, we launch a kernel that polls for requests in mapped host
//! memory (`kernels/persistent_copy.cu`). It leaves by itself when none arrive, and in any case
//! after about a millisecond, so that code that waits for the whole device, or for a free
//! multiprocessor, waits hardly longer than that. The driver copies requests that it did not serve.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::driver::sys;
use crate::error::CudaError;
use crate::gpu::{Current, Function, Gpu, MappedHost, PLACES, is_at_rest, parameter};

/// Threads of the one block; `kernels/persistent_copy.cu`, as are the next three.
const THREADS: u32 = 256;
pub(super) const REQUESTS: usize = 16;
const REQUEST_WORDS: usize = 16;
/// Where inline data begins.
const DATA: usize = 8;
/// Most bytes that travel in the request itself, four in a word.
pub(super) const MOST_INLINE: usize = (REQUEST_WORDS - DATA) * 4;
/// Most bytes of a request: beyond them the driver's copy starts as soon, and its engine is faster.
pub(super) const MOST_BYTES: usize = 64 << 10;
/// In place of a length: leave; there too.
const LEAVE: u32 = u32::MAX;

/// The kernel leaves after this many polls without a request, each somewhat below a microsecond.
const IDLE_POLLS: u32 = 96;
/// The kernel leaves after this many polls and requests; every 4 KiB of a request count as one.
const MAX_POLLS: u32 = 512;

/// A copy that follows another within this time launches the kernel: it polls for longer than that,
/// so copies that go on like this find it, and copies further apart never launch it in vain.
const SOON: Duration = Duration::from_micros(64);
/// A request that takes longer than this is slow: the driver might have been faster.
const SLOW: Duration = Duration::from_micros(100);
/// This many slow requests in a row mean that something keeps the kernel from running: another
/// process on the GPU, a debugger, launches that wait for their end.
const MAX_SLOW: u32 = 8;
/// No launch for this long after that.
const PAUSE: Duration = Duration::from_secs(5);
/// Polls of a request's completion before we ask the driver whether the kernel still runs.
const POLLS: u32 = 256;

const RING_BYTES: usize = REQUESTS * REQUEST_WORDS * 8;
/// Distance between the two words, so that they never share a cache line.
const APART: usize = 128;

/// The next number for [`Gpu::place_for_persistent`].
static CALLERS: AtomicU64 = AtomicU64::new(0);

/// `tcpx_residency` of `kernels/persistent_copy.cu`.
#[repr(C)]
struct Residency {
    requests: u64,
    entered: u64,
    left: u64,
    residency: u32,
    first: u32,
    idle_polls: u32,
    max_polls: u32,
}

/// A request that was written and has not completed.
pub(super) struct WorkRequest {
    residency: u32,
    since: Instant,
    polls: u32,
}

pub(super) struct PersistentCopyKernel {
    gpu: Gpu,
    kernel: Function,
    /// One for each place, shared with all others.
    streams: [sys::CUstream; PLACES],
    /// Where it was launched last.
    place: usize,
    caller: u64,
    /// The ring of requests, then the words `entered` and `left`.
    memory: MappedHost,
    /// Number of the last launch, and of the next request.
    residency: u32,
    next: u32,
    /// When the last small copy began.
    last_copy: Option<Instant>,
    slow_in_a_row: u32,
    paused_until: Option<Instant>,
    copies: u64,
}

// SAFETY: the stream may be used from any thread, and the memory belongs to this value.
unsafe impl Send for PersistentCopyKernel {}

impl PersistentCopyKernel {
    /// Bytes of zeroed pinned memory that it takes.
    pub(super) const BYTES: usize = RING_BYTES + 2 * APART;

    /// Launches the kernel once, to leave at once, so that the driver has nothing left to set up.
    /// Does not wait for it: a kernel of the program that waits for this set-up may occupy the
    /// whole GPU. `memory` is this kernel's alone for good. The context is current.
    ///
    /// # Errors
    /// [`CudaError::KernelUnavailable`], or the driver's refusal.
    pub(super) fn new(
        gpu: &Gpu,
        memory: MappedHost,
        streams: [sys::CUstream; PLACES],
    ) -> Result<Self, CudaError> {
        let mut persistent = Self {
            gpu: gpu.clone(),
            kernel: gpu.module()?.function(gpu, c"tcpx_persistent_copy")?,
            streams,
            place: 0,
            caller: CALLERS.fetch_add(1, Ordering::Relaxed),
            memory,
            residency: 0,
            next: 1,
            last_copy: None,
            slow_in_a_row: 0,
            paused_until: None,
            copies: 0,
        };
        persistent.launch()?;
        persistent.write((0, 0), LEAVE, &[], (0, 0));
        Ok(persistent)
    }

    /// Whether it was launched to leave at once, and never since.
    pub(super) fn is_new(&self) -> bool {
        self.residency == 1 && self.next == 2
    }

    /// For another connection, once [it has left](Self::has_left).
    pub(super) fn begin_anew(&mut self) {
        (self.copies, self.last_copy) = (0, None);
    }

    /// Whether the kernel runs. It may leave at any time.
    pub(super) fn is_resident(&self) -> bool {
        self.word(RING_BYTES) == self.residency && !self.has_left()
    }

    /// Requests a copy, after which the kernel writes `end.1` to the word at `end.0`. `inline` is
    /// what the source has, if that is no more than [`MOST_INLINE`] and known here, else empty; it
    /// saves the GPU a look at the source.
    ///
    /// # Safety
    /// Source and destination must be `bytes` of memory that the GPU can reach. They and the word
    /// at `end` must stay, unused by others, until that word is written or [`Self::is_open`] has
    /// returned `false`. No more than [`REQUESTS`] requests may be open.
    pub(super) unsafe fn request(
        &mut self,
        way: (u64, u64),
        bytes: u32,
        inline: &[u8],
        end: (u64, u32),
    ) -> WorkRequest {
        debug_assert!(inline.is_empty() || inline.len() == bytes as usize);
        debug_assert!(inline.len() <= MOST_INLINE);
        self.write(way, bytes, inline, end);
        WorkRequest {
            residency: self.residency,
            since: Instant::now(),
            polls: 0,
        }
    }

    /// Writes the next request to the ring.
    fn write(
        &mut self,
        (to, from): (u64, u64),
        length: u32,
        inline: &[u8],
        (end, value): (u64, u32),
    ) {
        let from = if inline.is_empty() { from } else { 0 };
        let halves = |whole: u64| [whole as u32, (whole >> 32) as u32];
        let ([from_low, from_high], [to_low, to_high]) = (halves(from), halves(to));
        let [end_low, end_high] = halves(end);
        let fields = [
            from_low, from_high, to_low, to_high, length, end_low, end_high, value,
        ];
        let mut values = [0; REQUEST_WORDS];
        values[..DATA].copy_from_slice(&fields);
        for (value, bytes) in values[DATA..].iter_mut().zip(inline.chunks(4)) {
            let mut whole = [0; 4];
            whole[..bytes.len()].copy_from_slice(bytes);
            *value = u32::from_le_bytes(whole);
        }
        let number = self.next;
        self.next = number.wrapping_add(1);
        let line = number as usize % REQUESTS * REQUEST_WORDS;
        for (at, value) in values.into_iter().enumerate() {
            let word = self.memory.host.as_ptr().wrapping_add((line + at) * 8);
            // SAFETY: the ring is aligned and ours; the GPU only reads it.
            let word = unsafe { AtomicU64::from_ptr(word.cast()) };
            // Release: the bytes to copy are visible before the request.
            word.store(
                u64::from(number) << 32 | u64::from(value),
                Ordering::Release,
            );
        }
    }

    /// Requests served so far.
    pub(super) fn copies(&self) -> u64 {
        self.copies
    }

    /// Notes a copy by the driver, and launches the kernel if more copies are likely to follow.
    /// The context is current.
    pub(super) fn note(&mut self, now: Instant) {
        let soon = self.last_copy.is_some_and(|before| now - before < SOON);
        self.last_copy = Some(now);
        if !soon || !self.has_left() || self.paused_until.is_some_and(|until| now < until) {
            return;
        }
        self.paused_until = None;
        let Some(place) = self.gpu.place_for_persistent(self.caller, now) else {
            return;
        };
        self.place = place;
        if let Err(error) = self.launch() {
            tracing::debug!(%error, "small copies go on without the persistent kernel");
            self.pause(now);
        } else if self.has_left() {
            // The launch itself waited for the kernel's end.
            self.note_slow(now);
        }
    }

    /// Notes a request that has completed.
    pub(super) fn ended(&mut self, request: &WorkRequest) {
        let now = Instant::now();
        self.last_copy = Some(now);
        self.copies += 1;
        if now - request.since > SLOW {
            self.note_slow(now);
        } else {
            self.slow_in_a_row = 0;
        }
    }

    fn note_slow(&mut self, now: Instant) {
        self.slow_in_a_row += 1;
        if self.slow_in_a_row >= MAX_SLOW {
            self.pause(now);
        }
    }

    fn pause(&mut self, now: Instant) {
        self.slow_in_a_row = 0;
        self.paused_until = Some(now + PAUSE);
    }

    /// Whether the kernel may still serve a request whose completion the caller has not seen. If
    /// not, the kernel has left and touches nothing any more: the completion is visible now, or
    /// never.
    ///
    /// # Errors
    /// The driver's, for example when a kernel has broken the context.
    pub(super) fn is_open(&self, request: &mut WorkRequest) -> Result<bool, CudaError> {
        if !self.may_take(request) {
            return Ok(false);
        }
        request.polls += 1;
        if request.polls < POLLS {
            return Ok(true);
        }
        request.polls = 0;
        let _current = Current::enter(&self.gpu)?;
        is_at_rest(self.gpu.api(), self.stream()).map(|rests| !rests)
    }

    /// As [`Self::is_open`], without asking the driver.
    pub(super) fn may_take(&self, request: &WorkRequest) -> bool {
        self.residency == request.residency && !self.has_left()
    }

    fn stream(&self) -> sys::CUstream {
        self.streams[self.place]
    }

    /// Launches the kernel; the last one has left.
    fn launch(&mut self) -> Result<(), CudaError> {
        let ring = self.memory.device;
        let entered = ring + RING_BYTES as u64;
        let residency = Residency {
            requests: ring,
            entered,
            left: entered + APART as u64,
            residency: self.residency.wrapping_add(1),
            first: self.next,
            idle_polls: IDLE_POLLS,
            max_polls: MAX_POLLS,
        };
        // SAFETY: the parameter has the kernel's type, and its memory stays until the kernel has
        // left. Callers of `request` promise that of what it copies.
        unsafe {
            let parameters = &mut [parameter(&residency)];
            self.kernel
                .launch(self.gpu.api(), (1, THREADS), self.stream(), parameters)?;
        }
        self.residency = residency.residency;
        Ok(())
    }

    /// Whether every launch has left and touches nothing any more.
    pub(super) fn has_left(&self) -> bool {
        self.word(RING_BYTES + APART) == self.residency
    }

    fn word(&self, at: usize) -> u32 {
        let word = self.memory.host.as_ptr().wrapping_add(at);
        // SAFETY: the word is aligned and ours; the GPU alone writes it, whole.
        let word = unsafe { AtomicU32::from_ptr(word.cast()) };
        word.load(Ordering::Acquire)
    }
}
