//! Copies of a few KiB between GPU memory and the program, from the caller's own thread.

#[cfg(test)]
mod tests;

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use crate::driver::{Api, sys};
use crate::error::{CudaError, MemoryError};
use crate::fence::{Event, Fence};
use crate::gpu::{Current, Gpu, MappedHost, create_stream, destroy_stream, host_free};
use crate::lease::{Access, Hold};
use crate::slice::RegionSlice;

/// Copies under way at a time.
const SLOTS: usize = 16;
/// Longest wait for the first copies, at set-up.
const WARM_UP: Duration = Duration::from_secs(60);
/// How long a drop waits for what is under way.
const LAST_WAIT: Duration = Duration::from_secs(1);

const HOLDER: &str = "a small copy";

/// Moves small messages to and from a GPU without a hand-over to the copy worker, which would take longer
/// than the copy.
///
/// It has streams and pinned memory of its own. [`Self::start_write`] and [`Self::poll`] never wait;
/// [`Self::read`] waits no longer than it is told. So a kernel that spins until a transfer completes stops
/// none of them.
pub struct SmallCopies {
    gpu: Gpu,
    /// To the GPU, and from it.
    streams: [sys::CUstream; 2],
    slots: Vec<Slot>,
    memory: MappedHost,
    /// The driver refused something: nothing is started any more.
    broken: bool,
}

// SAFETY: streams and events may be used from any thread, and the memory belongs to this value.
unsafe impl Send for SmallCopies {}

struct Slot {
    event: Event,
    copy: Option<Copy>,
}

/// A copy under way, and what it touches.
struct Copy {
    /// The caller's name for a write; `None` for a read that was given up.
    token: Option<u64>,
    bytes: usize,
    _memory: (RegionSlice, Hold),
}

impl SmallCopies {
    /// Most bytes of a copy.
    pub const MOST_BYTES: usize = 16 << 10;

    /// Pins memory and makes streams and events; for set-up.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(gpu: &Gpu) -> Result<Self, MemoryError> {
        let memory = MappedHost::alloc(gpu, SLOTS * Self::MOST_BYTES)?;
        let mut copies = Self {
            gpu: gpu.clone(),
            streams: [std::ptr::null_mut(); 2],
            slots: Vec::with_capacity(SLOTS),
            memory,
            broken: false,
        };
        let _current = Current::enter(gpu)?;
        copies.prepare()?;
        Ok(copies)
    }

    /// Also copies once on each stream, so that the driver has nothing left to set up.
    fn prepare(&mut self) -> Result<(), CudaError> {
        let api = self.gpu.api();
        for stream in &mut self.streams {
            *stream = create_stream(api)?;
        }
        for _ in 0..SLOTS {
            let event = Event::create(api)?;
            self.slots.push(Slot { event, copy: None });
        }
        let (first, second) = (self.device_address(0), self.device_address(1));
        for (slot, stream) in self.slots.iter().zip(self.streams) {
            // SAFETY: both ends are in the pinned memory, and nobody else knows of it yet.
            let code = unsafe { (api.cuMemcpyAsync)(first, second, 64, stream) };
            api.check("cuMemcpyAsync", code)?;
            slot.event.record(api, stream)?;
            let start = Instant::now();
            while !slot.event.is_ready(api)? {
                if start.elapsed() > WARM_UP {
                    return Err(CudaError::TimedOut {
                        device: self.gpu.ordinal(),
                        what: "its first work",
                        after: WARM_UP,
                    });
                }
                thread::yield_now();
            }
        }
        Ok(())
    }

    /// Whether something is under way that [`Self::poll`] will tell of.
    pub fn is_busy(&self) -> bool {
        let is_write = |copy: &Copy| copy.token.is_some();
        self.slots
            .iter()
            .any(|slot| slot.copy.as_ref().is_some_and(is_write))
    }

    /// The bytes of `from`, which is memory of this GPU, once `fence` is reached. `None` if that takes
    /// longer than `limit`, or if all slots are in use.
    ///
    /// # Errors
    /// The memory is leased for writing, or the driver's refusal.
    pub fn read(
        &mut self,
        from: &RegionSlice,
        fence: Option<&Fence>,
        limit: Duration,
    ) -> Result<Option<Vec<u8>>, MemoryError> {
        let (start, bytes) = (Instant::now(), from.len());
        let Some((slot, address)) = self.find_slot(from) else {
            return Ok(None);
        };
        let hold = from.hold(Access::Read, HOLDER)?;
        let gpu = self.gpu.clone();
        let _current = Current::enter(&gpu)?;
        while !is_reached(fence)? {
            if start.elapsed() > limit {
                return Ok(None);
            }
        }
        let memory = (from.clone(), hold);
        self.launch(slot, self.device_address(slot), address, None, memory)?;
        while !self.land(slot)? {
            if start.elapsed() > limit {
                return Ok(None);
            }
        }
        // SAFETY: the slot has that many initialised bytes, and the copy to them has ended.
        let copied = unsafe { std::slice::from_raw_parts(self.host(slot), bytes) };
        Ok(Some(copied.to_vec()))
    }

    /// Starts writing `bytes` to `to`, which is memory of this GPU and as long; [`Self::poll`] tells the end.
    /// `false` if nothing was started, because `fence` is not reached or all slots are in use.
    ///
    /// # Errors
    /// The memory is in use or leased for reading, or the driver's refusal.
    pub fn start_write(
        &mut self,
        to: &RegionSlice,
        bytes: &[u8],
        fence: Option<&Fence>,
        token: u64,
    ) -> Result<bool, MemoryError> {
        if to.len() != bytes.len() {
            return Err(MemoryError::LengthMismatch {
                from: bytes.len(),
                to: to.len(),
            });
        }
        let Some((slot, address)) = self.find_slot(to) else {
            return Ok(false);
        };
        let hold = to.hold(Access::Write, HOLDER)?;
        let gpu = self.gpu.clone();
        let _current = Current::enter(&gpu)?;
        if !is_reached(fence)? {
            return Ok(false);
        }
        // SAFETY: the slot has room for that many bytes, and no copy uses it.
        unsafe {
            self.host(slot)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
        let memory = (to.clone(), hold);
        self.launch(
            slot,
            address,
            self.device_address(slot),
            Some(token),
            memory,
        )?;
        Ok(true)
    }

    /// Appends the writes that have ended: the caller's token, and the bytes that are in place.
    pub fn poll(&mut self, ended: &mut Vec<(u64, Result<u64, MemoryError>)>) {
        if self.slots.iter().all(|slot| slot.copy.is_none()) {
            return;
        }
        let gpu = self.gpu.clone();
        let current = Current::enter(&gpu);
        for index in 0..self.slots.len() {
            let Some(copy) = &self.slots[index].copy else {
                continue;
            };
            let (token, bytes) = (copy.token, copy.bytes as u64);
            let landed = match &current {
                Ok(_) => self.land(index),
                Err(error) => Err(self.give_up(index, error.clone())),
            };
            let result = match landed {
                Ok(false) => continue,
                Ok(true) => Ok(bytes),
                Err(error) => Err(error),
            };
            ended.extend(token.map(|token| (token, result)));
        }
    }

    /// A free slot and the address of `memory`, if it can be copied here.
    fn find_slot(&mut self, memory: &RegionSlice) -> Option<(usize, u64)> {
        let is_ours = memory
            .region()
            .gpu()
            .is_some_and(|gpu| gpu.is_same(&self.gpu));
        if self.broken || !is_ours || !(1..=Self::MOST_BYTES).contains(&memory.len()) {
            return None;
        }
        let slot = self.slots.iter().position(|slot| slot.copy.is_none())?;
        Some((slot, memory.device_address()?))
    }

    /// Issues a copy of which one end is the slot's; the context is current.
    fn launch(
        &mut self,
        slot: usize,
        to: u64,
        from: u64,
        token: Option<u64>,
        memory: (RegionSlice, Hold),
    ) -> Result<(), MemoryError> {
        let api = self.gpu.api();
        let bytes = memory.0.len();
        let stream = self.streams[usize::from(token.is_none())];
        self.slots[slot].copy = Some(Copy {
            token,
            bytes,
            _memory: memory,
        });
        // SAFETY: the slot and the held memory have that many bytes, and stay until the event.
        let code = unsafe { (api.cuMemcpyAsync)(to, from, bytes, stream) };
        let issued = api.check("cuMemcpyAsync", code);
        let marked = issued.and_then(|()| self.slots[slot].event.record(api, stream));
        marked.map_err(|error| self.give_up(slot, error))
    }

    /// Frees the slot if its copy has ended; the context is current.
    fn land(&mut self, slot: usize) -> Result<bool, MemoryError> {
        match self.slots[slot].event.is_ready(self.gpu.api()) {
            Ok(false) => Ok(false),
            Ok(true) => {
                self.slots[slot].copy = None;
                Ok(true)
            }
            Err(error) => Err(self.give_up(slot, error)),
        }
    }

    /// Keeps the memory for ever, because something may still touch it.
    fn give_up(&mut self, slot: usize, error: CudaError) -> MemoryError {
        self.broken = true;
        std::mem::forget(self.slots[slot].copy.take());
        error.into()
    }

    fn host(&self, slot: usize) -> *mut u8 {
        let at = slot * Self::MOST_BYTES;
        self.memory.host.as_ptr().wrapping_add(at)
    }

    fn device_address(&self, slot: usize) -> u64 {
        self.memory.device + (slot * Self::MOST_BYTES) as u64
    }

    fn destroy(&mut self, api: &Api) {
        self.slots
            .drain(..)
            .for_each(|slot| slot.event.destroy(api));
        for stream in self.streams.into_iter().filter(|stream| !stream.is_null()) {
            destroy_stream(api, stream);
        }
        // SAFETY: no copy is under way that could use it.
        unsafe { host_free(&self.gpu, self.memory) };
    }
}

/// The GPU's context is current.
fn is_reached(fence: Option<&Fence>) -> Result<bool, CudaError> {
    fence.map_or(Ok(true), Fence::is_reached_in_context)
}

impl Drop for SmallCopies {
    fn drop(&mut self) {
        let start = Instant::now();
        let mut ended = Vec::new();
        while !self.broken
            && self.slots.iter().any(|slot| slot.copy.is_some())
            && start.elapsed() < LAST_WAIT
        {
            self.poll(&mut ended);
            thread::yield_now();
        }
        if self.broken || self.slots.iter().any(|slot| slot.copy.is_some()) {
            // A copy may still run: its memory, the streams and the slots stay until the process ends.
            std::mem::forget(std::mem::take(&mut self.slots));
            return;
        }
        let gpu = self.gpu.clone();
        if let Ok(_current) = Current::enter(&gpu) {
            self.destroy(gpu.api());
        }
    }
}

impl fmt::Debug for SmallCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SmallCopies({:?})", self.gpu)
    }
}
