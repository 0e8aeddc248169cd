//! Copies of up to 128 KiB between GPU memory and the program, from the caller's own thread.

mod ends;
mod persistent;
mod slots;
#[cfg(test)]
mod tests;

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use crate::driver::{Api, sys};
use crate::error::{CudaError, MemoryError};
use crate::fence::Fence;
use crate::gpu::{Current, Gpu, MappedHost, create_stream, destroy_stream, host_free};
use crate::lease::{Access, Held};
use crate::region::append_in_pieces;
use crate::slice::RegionSlice;
use ends::Ends;
use persistent::{PersistentCopyKernel, REQUESTS};
use slots::{Copy, SLOT, SLOTS, Slots};

/// Longest wait for the first copies, at set-up.
const WARM_UP: Duration = Duration::from_secs(60);
/// How long a drop waits for copies in flight.
const LAST_WAIT: Duration = Duration::from_secs(1);

const HOLDER: &str = "a small copy";
/// Every slot may be a request at a time.
const _: () = assert!(SLOTS <= REQUESTS);

/// Copies small messages to and from a GPU without a hand-over to the copy worker, which would take
/// longer than the copy.
///
/// It has its own streams and pinned memory. [`Self::start_write`] and [`Self::poll`] never wait;
/// [`Self::read`] waits at most for its limit. So a kernel that spins until a transfer completes
/// blocks none of them.
pub struct SmallCopies {
    gpu: Gpu,
    /// To the GPU, and from it.
    streams: [sys::CUstream; 2],
    slots: Slots,
    /// How completions are seen; `None` until set-up is complete.
    ends: Option<Ends>,
    /// Copies messages that follow each other closely; `None` if the GPU cannot run it.
    persistent: Option<PersistentCopyKernel>,
    /// The slots, then their completion words.
    memory: MappedHost,
    /// The driver refused something: no copy is started any more.
    broken: bool,
}

// SAFETY: streams and events may be used from any thread, and the memory belongs to this value.
unsafe impl Send for SmallCopies {}

impl SmallCopies {
    /// Most bytes of a copy.
    pub const MOST_BYTES: usize = 4 * SLOT;
    /// Bytes of all slots.
    const BYTES: usize = SLOTS * SLOT;

    /// Pins memory and makes streams and events; for set-up.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(gpu: &Gpu) -> Result<Self, MemoryError> {
        let memory = MappedHost::alloc(gpu, Self::BYTES + Ends::BYTES)?;
        let mut copies = Self {
            gpu: gpu.clone(),
            streams: [std::ptr::null_mut(); 2],
            slots: Slots::default(),
            ends: None,
            persistent: None,
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
        let host = self.memory.host;
        // SAFETY: the words lie behind the slots, in the same allocation.
        let words = unsafe { host.add(Self::BYTES) };
        let device = self.memory.device + Self::BYTES as u64;
        let mut ends = Ends::new(&self.gpu, (words, device), self.streams[0])?;
        // Until the first copies have completed, the GPU may still write there.
        self.broken = true;
        let (first, second) = (self.device_address(0), self.device_address(1));
        for (slot, stream) in self.streams.into_iter().enumerate() {
            // SAFETY: both ends are in the pinned memory, and nobody else knows of it yet.
            let code = unsafe { (api.cuMemcpyAsync)(first, second, 64, stream) };
            api.check("cuMemcpyAsync", code)?;
            ends.mark(slot, stream)?;
            let start = Instant::now();
            while !ends.has_come(slot, stream)? {
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
        self.ends = Some(ends);
        self.broken = false;
        Ok(())
    }

    /// Also copies with the persistent copy kernel, without a driver call for each message that
    /// follows another closely. If the GPU or its driver cannot run it, the driver copies everything.
    pub fn with_persistent_kernel(mut self) -> Self {
        if self.persistent.is_some() {
            // It may hold requests that only it knows.
            return self;
        }
        let can = self.ends.as_ref().is_some_and(|ends| !ends.must_ask());
        let made = can.then(|| {
            let _current = Current::enter(&self.gpu)?;
            PersistentCopyKernel::new(&self.gpu)
        });
        if let Some(Err(error)) = &made {
            tracing::debug!(%error, "small copies go on without the persistent kernel");
        }
        self.persistent = made.and_then(Result::ok);
        self
    }

    /// Copies that the persistent kernel has made so far.
    pub fn persistent_copies(&self) -> u64 {
        self.persistent
            .as_ref()
            .map_or(0, PersistentCopyKernel::copies)
    }

    /// Whether a write is in flight that [`Self::poll`] will report.
    pub fn is_busy(&self) -> bool {
        self.slots.writes().next().is_some()
    }

    /// Whether [`Self::poll`] has something to report or to do, as far as is visible without a driver
    /// call; only the driver knows about errors.
    pub fn has_news(&self) -> bool {
        let ends = self.ends.as_ref();
        ends.is_some_and(|ends| {
            let is_news = |slot| ends.shows(slot) || self.is_left_behind(slot);
            self.slots.writes().any(is_news) || ends.must_ask() && self.is_busy()
        })
    }

    /// Whether the slot's copy is a request that the persistent kernel left unserved.
    fn is_left_behind(&self, slot: usize) -> bool {
        let request = self.slots.get(slot).and_then(|copy| copy.request.as_ref());
        let persistent = self.persistent.as_ref().zip(request);
        persistent.is_some_and(|(persistent, request)| !persistent.may_take(request))
    }

    /// Appends the bytes of `from`, which is memory of this GPU, to `into`, once `fence` is reached.
    /// `false`, and nothing appended, if that takes longer than `limit`, or if all slots are in use.
    ///
    /// # Errors
    /// The memory is leased for writing, or the driver's refusal.
    pub fn read(
        &mut self,
        from: &RegionSlice,
        fence: Option<&Fence>,
        limit: Duration,
        into: &mut Vec<u8>,
    ) -> Result<bool, MemoryError> {
        let (start, bytes) = (Instant::now(), from.len());
        if bytes > SLOT && self.slots.has_given_up() {
            return Ok(false);
        }
        let Some((slot, address)) = self.find_slot(from) else {
            return Ok(false);
        };
        let hold = from.hold(Access::Read, HOLDER)?;
        while !is_reached(fence)? {
            if start.elapsed() > limit {
                return Ok(false);
            }
        }
        let memory = (from.clone(), hold);
        self.launch(slot, self.device_address(slot), address, None, memory)?;
        while !self.reap(slot)? {
            if start.elapsed() > limit {
                return Ok(false);
            }
        }
        // SAFETY: the slot has that many initialised bytes, and the copy to them has ended.
        unsafe { append_in_pieces(self.host(slot), bytes, into) };
        Ok(true)
    }

    /// Starts writing `bytes` to `to`, which is memory of this GPU and as long; [`Self::poll`] reports
    /// the completion.
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

    /// Appends the writes that have completed: the caller's token, and the bytes in place. Releases
    /// the memory of abandoned reads that have completed.
    pub fn poll(&mut self, ended: &mut Vec<(u64, Result<u64, MemoryError>)>) {
        for slot in self.slots.in_use() {
            let Some(copy) = self.slots.get(slot) else {
                continue;
            };
            let (token, bytes) = (copy.token, copy.bytes as u64);
            let result = match self.reap(slot) {
                Ok(false) => continue,
                Ok(true) => Ok(bytes),
                Err(error) => Err(error),
            };
            ended.extend(token.map(|token| (token, result)));
        }
    }

    /// The first of enough free slots and the address of `memory`, if it can be copied here.
    fn find_slot(&self, memory: &RegionSlice) -> Option<(usize, u64)> {
        let is_ours = memory
            .region()
            .gpu()
            .is_some_and(|gpu| gpu.is_same(&self.gpu));
        if self.broken || !is_ours || !(1..=Self::MOST_BYTES).contains(&memory.len()) {
            return None;
        }
        let slot = self.slots.find(memory.len())?;
        Some((slot, memory.device_address()?))
    }

    /// Issues a copy of which one end is the slot's.
    fn launch(
        &mut self,
        slot: usize,
        to: u64,
        from: u64,
        token: Option<u64>,
        memory: (RegionSlice, Held),
    ) -> Result<(), MemoryError> {
        let copy = Copy {
            token,
            way: (to, from),
            bytes: memory.0.len(),
            request: None,
            _memory: memory,
        };
        self.slots.put(slot, copy);
        if self.request(slot) {
            return Ok(());
        }
        let issued = self.issue(slot);
        issued.map_err(|error| self.give_up(slot, error))
    }

    /// Hands a copy to the persistent kernel, if it runs.
    fn request(&mut self, slot: usize) -> bool {
        // It serves requests one after the other.
        let has_time = |bytes| bytes <= SLOT || !self.slots.has_requests();
        let suits = |copy: &Copy| copy.bytes <= persistent::MOST_BYTES && has_time(copy.bytes);
        let Some(copy) = self.slots.get(slot).filter(|copy| suits(copy)) else {
            return false;
        };
        let inline: &[u8] = if copy.token.is_some() && copy.bytes <= persistent::MOST_INLINE {
            // SAFETY: the bytes to write lie in the slot, and none is written there before the copy has ended.
            unsafe { std::slice::from_raw_parts(self.host(slot), copy.bytes) }
        } else {
            &[]
        };
        let (Some(persistent), Some(ends), Some(copy)) = (
            &mut self.persistent,
            &mut self.ends,
            self.slots.get_mut(slot),
        ) else {
            return false;
        };
        if persistent.is_resident()
            && let Some(end) = ends.next(slot)
        {
            // SAFETY: the slot and the held memory have that many bytes, and stay until the end, as does the word
            // of the end. There are no more requests than slots.
            copy.request =
                Some(unsafe { persistent.request(copy.way, copy.bytes as u32, inline, end) });
        }
        copy.request.is_some()
    }

    /// Has the driver copy.
    fn issue(&mut self, slot: usize) -> Result<(), CudaError> {
        let _current = Current::enter(&self.gpu)?;
        let (Some(ends), Some(copy)) = (&mut self.ends, self.slots.get(slot)) else {
            return Ok(());
        };
        let api = self.gpu.api();
        let stream = self.streams[usize::from(copy.token.is_none())];
        let (to, from) = copy.way;
        // SAFETY: the slot and the held memory have that many bytes, and stay until the end is seen.
        let code = unsafe { (api.cuMemcpyAsync)(to, from, copy.bytes, stream) };
        api.check("cuMemcpyAsync", code)?;
        ends.mark(slot, stream)?;
        if let Some(persistent) = &mut self.persistent
            && copy.bytes <= persistent::MOST_BYTES
        {
            persistent.note(Instant::now());
        }
        Ok(())
    }

    /// Frees the slot if its copy has ended.
    fn reap(&mut self, slot: usize) -> Result<bool, MemoryError> {
        match self.has_ended(slot) {
            Ok(true) => {
                drop(self.slots.take(slot));
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(error) => Err(self.give_up(slot, error)),
        }
    }

    fn has_ended(&mut self, slot: usize) -> Result<bool, CudaError> {
        let (Some(ends), Some(copy)) = (&mut self.ends, self.slots.get_mut(slot)) else {
            return Ok(false);
        };
        let (Some(persistent), Some(request)) = (&mut self.persistent, &mut copy.request) else {
            let stream = self.streams[usize::from(copy.token.is_none())];
            return ends.has_come(slot, stream);
        };
        if !ends.shows(slot) {
            if persistent.is_open(request)? {
                return Ok(false);
            }
            // It may have completed since the first look.
            if !ends.shows(slot) {
                copy.request = None;
                return self.issue(slot).map(|()| false);
            }
        }
        persistent.ended(request);
        Ok(true)
    }

    /// Keeps the memory allocated for good, because something may still touch it.
    fn give_up(&mut self, slot: usize, error: CudaError) -> MemoryError {
        self.broken = true;
        std::mem::forget(self.slots.take(slot));
        error.into()
    }

    fn host(&self, slot: usize) -> *mut u8 {
        let at = slot * SLOT;
        self.memory.host.as_ptr().wrapping_add(at)
    }

    fn device_address(&self, slot: usize) -> u64 {
        self.memory.device + (slot * SLOT) as u64
    }

    fn destroy(&mut self, api: &Api) {
        if let Some(ends) = &mut self.ends {
            ends.destroy(api);
        }
        for stream in self.streams.into_iter().filter(|stream| !stream.is_null()) {
            destroy_stream(api, stream);
        }
        // SAFETY: no copy in flight could use it.
        unsafe { host_free(&self.gpu, self.memory) };
    }
}

fn is_reached(fence: Option<&Fence>) -> Result<bool, CudaError> {
    fence.map_or(Ok(true), Fence::is_reached)
}

impl Drop for SmallCopies {
    fn drop(&mut self) {
        let start = Instant::now();
        let mut ended = Vec::new();
        while !self.broken && !self.slots.is_empty() && start.elapsed() < LAST_WAIT {
            self.poll(&mut ended);
            thread::yield_now();
        }
        if self.broken || !self.slots.is_empty() {
            // A copy may still run: its memory, the streams and the slots stay until the process ends.
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(self.persistent.take());
            return;
        }
        let (gpu, persistent) = (self.gpu.clone(), self.persistent.take());
        let Ok(_current) = Current::enter(&gpu) else {
            // As above.
            std::mem::forget(persistent);
            return;
        };
        if let Some(persistent) = persistent {
            persistent.end(LAST_WAIT);
        }
        self.destroy(gpu.api());
    }
}

impl fmt::Debug for SmallCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SmallCopies({:?})", self.gpu)
    }
}
