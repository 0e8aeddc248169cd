//! Copies of up to 128 KiB between GPU memory and the program, and of up to 16 MiB within a GPU,
//! from the caller's own thread.

mod ends;
mod persistent;
mod slots;
#[cfg(test)]
mod tests;

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use crate::driver::sys;
use crate::error::{CudaError, MemoryError};
use crate::fence::Fence;
use crate::gpu::{Current, Gpu, MappedHost, PLACES, create_stream};
use crate::lease::Access;
use crate::region::append_in_pieces;
use crate::slice::RegionSlice;
use crate::worker::reaper;
use ends::EndWords;
use persistent::{PersistentCopyKernel, REQUESTS};
use slots::{Copy, CopySlots, Kind, Memory, SLOT, SLOTS};

/// How long the memory of copies in flight is looked after at the end of a connection; after that,
/// the next connection does.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// The pause between looks meanwhile.
const PAUSE: Duration = Duration::from_millis(1);
/// Connections of a GPU that copy small messages so; those of others travel as large ones do.
const CONNECTIONS: usize = 32;

const HOLDER: &str = "a small copy";
/// Every slot may be a request at a time.
const _: () = assert!(SLOTS <= REQUESTS);

/// Copies small messages to and from a GPU without a hand-over to the copy worker, which would take
/// longer than the copy.
///
/// It has its own pinned memory, which goes to the next connection afterwards, and shares its
/// streams with all of the GPU. [`Self::start_write`] and [`Self::poll`] never wait; [`Self::read`]
/// waits at most for its limit. So a kernel that spins until a transfer completes blocks none of
/// them.
pub struct SmallCopies {
    gpu: Gpu,
    /// To the GPU, and from it; all of the GPU share them.
    streams: [sys::CUstream; 2],
    slots: CopySlots,
    /// How completions are seen.
    ends: EndWords,
    /// Copies messages that follow each other closely; `None` if the GPU cannot run it.
    persistent: Option<PersistentCopyKernel>,
    /// Whether this connection asks for it.
    wants_persistent: bool,
    /// The slots, their completion words, and what the persistent kernel needs.
    memory: MappedHost,
    /// The driver refused something: no copy is started any more.
    broken: bool,
}

// SAFETY: streams may be used from any thread, and the memory belongs to this value.
unsafe impl Send for SmallCopies {}

/// What became of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SmallRead {
    /// The bytes were appended.
    Whole,
    /// No copy was started: all slots are in use, or the fence was not reached in time.
    NotStarted,
    /// The copy took too long. It goes on, and its bytes are of no use; until [`SmallCopies::poll`]
    /// has reported its token, it reads the memory.
    Abandoned,
}

impl SmallCopies {
    /// Most bytes of a read or write.
    pub const MOST_BYTES: usize = 4 * SLOT;
    /// Most bytes of a copy within the GPU: longer ones would hold up others of the same stream for
    /// more than some 10 us, as long as it takes to hand one to the copy worker.
    pub const MOST_WITHIN: usize = 16 << 20;
    /// Bytes of zeroed pinned memory of one, in whole pages, and of those of all connections of a
    /// GPU.
    const BYTES: usize =
        (SLOTS * SLOT + EndWords::BYTES + PersistentCopyKernel::BYTES).next_multiple_of(4096);
    pub(crate) const ALL_BYTES: usize = CONNECTIONS * Self::BYTES;

    /// What no other connection has; for set-up. `None` if others have all of it, which was made
    /// for the first one.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(gpu: &Gpu) -> Result<Option<Self>, MemoryError> {
        gpu.kept()?;
        let resting = std::mem::take(&mut *gpu.resting_small_copies());
        let mut found = None;
        for mut copies in resting {
            if found.is_none() && copies.is_at_rest() {
                found = Some(copies);
            } else if !copies.broken {
                gpu.resting_small_copies().push(copies);
            }
        }
        Ok(found)
    }

    /// Makes what all connections on a GPU will have, at the first one: a further stream may wait
    /// for kernels that run, and holds up all copies meanwhile (up to a second on an H200). They
    /// share four: the driver has few to look after.
    pub(crate) fn make_all(gpu: &Gpu, memory: MappedHost) -> Result<(), MemoryError> {
        let _current = Current::enter(gpu)?;
        let stream = || create_stream(gpu.api());
        let (streams, persistent) = ([stream()?, stream()?], [stream()?, stream()?]);
        for number in 0..CONNECTIONS {
            let memory = memory.at(number * Self::BYTES);
            let copies = Self::make(gpu, memory, streams, persistent)?;
            gpu.resting_small_copies().push(copies);
        }
        Ok(())
    }

    /// The context is current.
    fn make(
        gpu: &Gpu,
        memory: MappedHost,
        streams: [sys::CUstream; 2],
        persistent: [sys::CUstream; PLACES],
    ) -> Result<Self, MemoryError> {
        let mut copies = Self {
            gpu: gpu.clone(),
            streams,
            slots: CopySlots::default(),
            ends: EndWords::new(memory.at(SLOTS * SLOT)),
            persistent: None,
            wants_persistent: false,
            memory,
            // Until the first copies have completed, the GPU may still write there.
            broken: true,
        };
        copies.warm_up()?;
        copies.broken = false;
        copies.make_persistent_kernel(persistent);
        Ok(copies)
    }

    /// Leaves nothing behind, but what goes to the next connection.
    fn take(&mut self) -> Self {
        Self {
            gpu: self.gpu.clone(),
            slots: std::mem::take(&mut self.slots),
            persistent: self.persistent.take(),
            wants_persistent: false,
            broken: std::mem::replace(&mut self.broken, true),
            ..*self
        }
    }

    /// Whether nothing is in flight; sees to what has ended.
    fn is_at_rest(&mut self) -> bool {
        self.poll(&mut Vec::new());
        let has_left = self.persistent.as_mut().is_none_or(|persistent| {
            persistent.begin_anew();
            persistent.is_new() || persistent.has_left()
        });
        !self.broken && self.slots.is_empty() && has_left
    }

    /// Copies once on each stream, so that the driver has nothing left to set up.
    fn warm_up(&mut self) -> Result<(), CudaError> {
        let (first, second) = (self.device_address(0), self.device_address(1));
        for (slot, stream) in self.streams.into_iter().enumerate() {
            // SAFETY: both ends are in the pinned memory, and nobody else knows of it yet.
            let code = unsafe { (self.gpu.api().cuMemcpyAsync)(first, second, 64, stream) };
            self.gpu.api().check("cuMemcpyAsync", code)?;
            self.ends.mark(&self.gpu, slot, stream)?;
        }
        for (slot, stream) in self.streams.into_iter().enumerate() {
            let (gpu, ends) = (&self.gpu, &mut self.ends);
            gpu.wait_until("its first work", || ends.has_come(gpu, slot, stream))?;
        }
        Ok(())
    }

    /// Also copies with the persistent copy kernel, without a driver call for each message that
    /// follows another closely. If the GPU or its driver cannot run it, the driver copies
    /// everything.
    pub fn with_persistent_kernel(mut self) -> Self {
        self.wants_persistent = true;
        self
    }

    fn make_persistent_kernel(&mut self, streams: [sys::CUstream; PLACES]) {
        let memory = self.memory.at(SLOTS * SLOT + EndWords::BYTES);
        let made = PersistentCopyKernel::new(&self.gpu, memory, streams);
        self.persistent = made
            .inspect_err(|error| {
                tracing::debug!(%error, "small copies go on without the persistent kernel");
            })
            .ok();
    }

    /// Copies that the persistent kernel has made so far.
    pub fn persistent_copies(&self) -> u64 {
        self.persistent
            .as_ref()
            .map_or(0, PersistentCopyKernel::copies)
    }

    /// Whether a copy is in flight that [`Self::poll`] will report.
    pub fn is_busy(&self) -> bool {
        self.slots.reported().next().is_some()
    }

    /// Whether [`Self::poll`] has something to report or to do, as far as is visible without a
    /// driver call; only the driver knows about errors.
    pub fn has_news(&self) -> bool {
        let is_news = |slot| self.ends.shows(slot) || self.is_left_behind(slot);
        self.slots.reported().any(is_news)
    }

    /// Whether the slot's copy is a request that the persistent kernel left unserved.
    fn is_left_behind(&self, slot: usize) -> bool {
        let request = self.slots.get(slot).and_then(|copy| copy.request.as_ref());
        let persistent = self.persistent.as_ref().zip(request);
        persistent.is_some_and(|(persistent, request)| !persistent.may_take(request))
    }

    /// Appends the bytes of `from`, which is memory of this GPU, to `into`, once `fence` is
    /// reached: as far as that takes no longer than `limit`.
    ///
    /// # Errors
    /// The memory is leased for writing, or the driver's refusal.
    pub fn read(
        &mut self,
        from: &RegionSlice,
        fence: Option<&Fence>,
        limit: Duration,
        token: u64,
        into: &mut Vec<u8>,
    ) -> Result<SmallRead, MemoryError> {
        let (start, bytes) = (Instant::now(), from.len());
        if bytes > SLOT && self.slots.has_given_up() {
            return Ok(SmallRead::NotStarted);
        }
        let Some((slot, address)) = self.find_slot(from) else {
            return Ok(SmallRead::NotStarted);
        };
        let hold = from.hold(Access::Read, HOLDER)?;
        while !is_reached(fence)? {
            if start.elapsed() > limit {
                return Ok(SmallRead::NotStarted);
            }
        }
        let memory = ((from.clone(), hold), None);
        let way = (self.device_address(slot), address);
        self.launch(slot, Kind::Read, way, bytes, None, memory)?;
        while !self.reap(slot)? {
            if start.elapsed() > limit {
                self.slots.abandon(slot, token);
                return Ok(SmallRead::Abandoned);
            }
        }
        // SAFETY: the slot has that many initialised bytes, and the copy to them has ended.
        unsafe { append_in_pieces(self.host(slot), bytes, into) };
        Ok(SmallRead::Whole)
    }

    /// Starts writing `bytes` to `to`, which is memory of this GPU and as long; [`Self::poll`]
    /// reports the completion. `false` if nothing was started, because `fence` is not reached or
    /// all slots are in use.
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
        let memory = ((to.clone(), hold), None);
        let way = (address, self.device_address(slot));
        self.launch(slot, Kind::Write, way, bytes.len(), Some(token), memory)?;
        Ok(true)
    }

    /// Starts copying `from` to `to`, which is as long; both are memory that this GPU reaches.
    /// [`Self::poll`] reports the completion. `false` if nothing was started, because it does not
    /// suit, `fence` is not reached or all slots are in use.
    ///
    /// # Errors
    /// Memory is in use or leased otherwise, or the driver's refusal.
    pub fn start_within(
        &mut self,
        from: &RegionSlice,
        to: &RegionSlice,
        fence: Option<&Fence>,
        token: u64,
    ) -> Result<bool, MemoryError> {
        let bytes = to.len();
        let suits = from.len() == bytes && (1..=Self::MOST_WITHIN).contains(&bytes);
        let ours = |memory| self.address(memory).filter(|_| suits);
        let (Some(source), Some(address), Some(slot)) =
            (ours(from), ours(to), self.slots.find(SLOT))
        else {
            return Ok(false);
        };
        let holds = (
            from.hold(Access::Read, HOLDER)?,
            to.hold(Access::Write, HOLDER)?,
        );
        if !is_reached(fence)? {
            return Ok(false);
        }
        let memory = ((to.clone(), holds.1), Some((from.clone(), holds.0)));
        let way = (address, source);
        self.launch(slot, Kind::Within, way, bytes, Some(token), memory)?;
        Ok(true)
    }

    /// Appends the writes and abandoned reads that have completed: the caller's token, and the
    /// bytes. Their memory is free.
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
        let address = self.address(memory)?;
        if !(1..=Self::MOST_BYTES).contains(&memory.len()) {
            return None;
        }
        Some((self.slots.find(memory.len())?, address))
    }

    /// The address of memory of this GPU in one piece.
    fn address(&self, memory: &RegionSlice) -> Option<u64> {
        let gpu = memory.region().gpu();
        let is_ours = !self.broken && gpu.is_some_and(|gpu| gpu.is_same(&self.gpu));
        memory.device_address().filter(|_| is_ours)
    }

    /// Issues a copy.
    fn launch(
        &mut self,
        slot: usize,
        kind: Kind,
        way: (u64, u64),
        bytes: usize,
        token: Option<u64>,
        memory: (Memory, Option<Memory>),
    ) -> Result<(), MemoryError> {
        let copy = Copy {
            token,
            kind,
            way,
            bytes,
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
        let inline: &[u8] = if copy.kind == Kind::Write && copy.bytes <= persistent::MOST_INLINE {
            // SAFETY: the bytes to write lie in the slot, and none is written there before the copy
            // has ended.
            unsafe { std::slice::from_raw_parts(self.host(slot), copy.bytes) }
        } else {
            &[]
        };
        let (Some(persistent), Some(copy)) = (&mut self.persistent, self.slots.get_mut(slot))
        else {
            return false;
        };
        if self.wants_persistent && persistent.is_resident() {
            let end = self.ends.next(slot);
            // SAFETY: the slot and the held memory, whose addresses these are, have that many
            // bytes, and stay until the end, as does the word of the end. There are no more
            // requests than slots.
            copy.request =
                Some(unsafe { persistent.request(copy.way, copy.bytes as u32, inline, end) });
        }
        copy.request.is_some()
    }

    /// Has the driver copy.
    fn issue(&mut self, slot: usize) -> Result<(), CudaError> {
        let _current = Current::enter(&self.gpu)?;
        let Some(copy) = self.slots.get(slot) else {
            return Ok(());
        };
        let api = self.gpu.api();
        let stream = self.streams[usize::from(copy.kind == Kind::Read)];
        let (to, from) = copy.way;
        // SAFETY: the slot and the held memory, whose addresses these are, have that many bytes,
        // and stay until the end is seen.
        let code = unsafe { (api.cuMemcpyAsync)(to, from, copy.bytes, stream) };
        api.check("cuMemcpyAsync", code)?;
        self.ends.mark(&self.gpu, slot, stream)?;
        if let Some(persistent) = &mut self.persistent
            && self.wants_persistent
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
        let Some(copy) = self.slots.get_mut(slot) else {
            return Ok(false);
        };
        let (Some(persistent), Some(request)) = (&mut self.persistent, &mut copy.request) else {
            let stream = self.streams[usize::from(copy.kind == Kind::Read)];
            return self.ends.has_come(&self.gpu, slot, stream);
        };
        if !self.ends.shows(slot) {
            if persistent.is_open(request)? {
                return Ok(false);
            }
            // It may have completed since the first look.
            if !self.ends.shows(slot) {
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
        self.memory.at(slot * SLOT).host.as_ptr()
    }

    fn device_address(&self, slot: usize) -> u64 {
        self.memory.at(slot * SLOT).device
    }
}

fn is_reached(fence: Option<&Fence>) -> Result<bool, CudaError> {
    fence.map_or(Ok(true), Fence::is_reached)
}

impl Drop for SmallCopies {
    fn drop(&mut self) {
        if self.broken {
            // Copies may still run: the streams, the slots and what they hold stay until the
            // process ends.
            std::mem::forget(std::mem::take(&mut self.slots));
            return;
        }
        let mut copies = self.take();
        let gpu = self.gpu.clone();
        if copies.slots.is_empty() {
            return gpu.resting_small_copies().push(copies);
        }
        // Not here: this thread serves other connections.
        reaper::run(move || {
            let start = Instant::now();
            while !copies.is_at_rest() && !copies.broken && start.elapsed() < LAST_WAIT {
                thread::sleep(PAUSE);
            }
            if !copies.broken {
                gpu.resting_small_copies().push(copies);
            }
        });
    }
}

impl fmt::Debug for SmallCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SmallCopies({:?})", self.gpu)
    }
}
