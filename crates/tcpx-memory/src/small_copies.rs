//! Copies of up to 128 KiB between GPU memory and the program, from the caller's own thread.

mod courier;
mod ends;
#[cfg(test)]
mod tests;

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use crate::driver::{Api, sys};
use crate::error::{CudaError, MemoryError};
use crate::fence::Fence;
use crate::gpu::{Current, Gpu, MappedHost, create_stream, destroy_stream, host_free};
use crate::lease::{Access, Hold};
use crate::slice::RegionSlice;
use courier::{Courier, ORDERS, Order};
use ends::Ends;

/// Copies under way at a time, at most: one that is longer than a slot takes several that follow each other.
const SLOTS: usize = u16::BITS as usize;
/// Bytes of a slot.
const SLOT: usize = 32 << 10;
/// Slots that copies of more than one leave to those of one.
const KEPT: usize = 4;
/// Longest wait for the first copies, at set-up.
const WARM_UP: Duration = Duration::from_secs(60);
/// How long a drop waits for what is under way.
const LAST_WAIT: Duration = Duration::from_secs(1);

const HOLDER: &str = "a small copy";
/// All may be orders at a time.
const _: () = assert!(SLOTS <= ORDERS);

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
    /// Each copy at its first slot.
    slots: [Option<Copy>; SLOTS],
    /// Slots in use by copies under way, and first ones of those whose end is to be told, a bit each.
    under_way: u16,
    writes: u16,
    /// How their ends are seen; `None` before set-up is over.
    ends: Option<Ends>,
    /// What copies where one small message follows another; `None` where that cannot be had.
    courier: Option<Courier>,
    /// The slots' bytes, and behind them the words of their ends.
    memory: MappedHost,
    /// The driver refused something: nothing is started any more.
    broken: bool,
}

// SAFETY: streams and events may be used from any thread, and the memory belongs to this value.
unsafe impl Send for SmallCopies {}

/// A copy under way, and what it touches.
struct Copy {
    /// The caller's name for a write; `None` for a read that was given up.
    token: Option<u64>,
    /// Where to and where from, and how much.
    way: (u64, u64),
    bytes: usize,
    /// Of a copy that is the courier's.
    order: Option<Order>,
    _memory: (RegionSlice, Hold),
}

impl SmallCopies {
    /// Most bytes of a copy.
    pub const MOST_BYTES: usize = 4 * SLOT;
    /// Bytes of all slots.
    const SLOT_BYTES: usize = SLOTS * SLOT;

    /// Pins memory and makes streams and events; for set-up.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(gpu: &Gpu) -> Result<Self, MemoryError> {
        let memory = MappedHost::alloc(gpu, Self::SLOT_BYTES + Ends::BYTES)?;
        let mut copies = Self {
            gpu: gpu.clone(),
            streams: [std::ptr::null_mut(); 2],
            slots: Default::default(),
            under_way: 0,
            writes: 0,
            ends: None,
            courier: None,
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
        let words = unsafe { host.add(Self::SLOT_BYTES) };
        let device = self.memory.device + Self::SLOT_BYTES as u64;
        let mut ends = Ends::new(&self.gpu, (words, device), self.streams[0])?;
        // Until all is seen to have ended, the GPU may still write there.
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

    /// Also copies by a kernel that stays on the GPU while small messages follow each other closely, without a call
    /// of the driver for each. Where the GPU or its driver cannot, all is as before.
    pub fn with_courier(mut self) -> Self {
        if self.courier.is_some() {
            // It may be there, with orders that no other knows.
            return self;
        }
        let can = self.ends.as_ref().is_some_and(|ends| !ends.must_ask());
        let made = can.then(|| {
            let _current = Current::enter(&self.gpu)?;
            Courier::new(&self.gpu)
        });
        if let Some(Err(error)) = &made {
            tracing::debug!(%error, "no kernel stays for small copies");
        }
        self.courier = made.and_then(Result::ok);
        self
    }

    /// Copies that the courier has made, ever.
    pub fn courier_copies(&self) -> u64 {
        self.courier.as_ref().map_or(0, Courier::copies)
    }

    /// Whether something is under way that [`Self::poll`] will tell of.
    pub fn is_busy(&self) -> bool {
        self.writes != 0
    }

    /// Whether [`Self::poll`] has something to tell or to do, as far as that is seen without a call of the driver,
    /// which also knows of errors.
    pub fn has_news(&self) -> bool {
        let ends = self.ends.as_ref();
        ends.is_some_and(|ends| {
            let is_news = |slot| ends.shows(slot) || self.is_left_behind(slot);
            set_bits(self.writes).any(is_news) || ends.must_ask() && self.is_busy()
        })
    }

    /// Whether the slot's copy is an order of a courier that is no longer there.
    fn is_left_behind(&self, slot: usize) -> bool {
        let order = self.slots[slot]
            .as_ref()
            .and_then(|copy| copy.order.as_ref());
        let courier = self.courier.as_ref().zip(order);
        courier.is_some_and(|(courier, order)| !courier.may_take(order))
    }

    /// Appends the bytes of `from`, which is memory of this GPU, to `into`, once `fence` is reached. `false`, and
    /// nothing appended, if that takes longer than `limit`, or if all slots are in use.
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
        if bytes > SLOT && self.has_given_up() {
            return Ok(false);
        }
        let Some((slot, address)) = self.find_slot(from) else {
            return Ok(false);
        };
        let hold = from.hold(Access::Read, HOLDER)?;
        let gpu = self.gpu.clone();
        let _current = Current::enter(&gpu)?;
        while !is_reached(fence)? {
            if start.elapsed() > limit {
                return Ok(false);
            }
        }
        let memory = (from.clone(), hold);
        self.launch(slot, self.device_address(slot), address, None, memory)?;
        while !self.land(slot)? {
            if start.elapsed() > limit {
                return Ok(false);
            }
        }
        // SAFETY: the slot has that many initialised bytes, and the copy to them has ended.
        let copied = unsafe { std::slice::from_raw_parts(self.host(slot), bytes) };
        into.extend_from_slice(copied);
        Ok(true)
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

    /// Appends the writes that have ended: the caller's token, and the bytes that are in place. Lets go of
    /// the memory of reads that were given up and have ended.
    pub fn poll(&mut self, ended: &mut Vec<(u64, Result<u64, MemoryError>)>) {
        for slot in set_bits(self.under_way) {
            let Some(copy) = &self.slots[slot] else {
                continue;
            };
            let (token, bytes) = (copy.token, copy.bytes as u64);
            let result = match self.land(slot) {
                Ok(false) => continue,
                Ok(true) => Ok(bytes),
                Err(error) => Err(error),
            };
            ended.extend(token.map(|token| (token, result)));
        }
    }

    /// Whether a read is still under way that was given up: the next long one would take too long too.
    fn has_given_up(&self) -> bool {
        let mut copies = self.slots.iter().flatten();
        copies.any(|copy| copy.token.is_none())
    }

    /// The first of enough free slots and the address of `memory`, if it can be copied here.
    fn find_slot(&mut self, memory: &RegionSlice) -> Option<(usize, u64)> {
        let is_ours = memory
            .region()
            .gpu()
            .is_some_and(|gpu| gpu.is_same(&self.gpu));
        if self.broken || !is_ours || !(1..=Self::MOST_BYTES).contains(&memory.len()) {
            return None;
        }
        let is_free = |slot: &usize| self.under_way & run(*slot, memory.len()) == 0;
        let slot = match slots_of(memory.len()) {
            1 => (0..SLOTS).find(is_free)?,
            long => (KEPT..=SLOTS - long).rev().find(is_free)?,
        };
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
        let bytes = memory.0.len();
        self.slots[slot] = Some(Copy {
            token,
            way: (to, from),
            bytes,
            order: None,
            _memory: memory,
        });
        self.under_way |= run(slot, bytes);
        self.writes |= u16::from(token.is_some()) << slot;
        if self.order(slot) {
            return Ok(());
        }
        let issued = self.issue(slot);
        issued.map_err(|error| self.give_up(slot, error))
    }

    /// Hands a copy to the courier, if that is there.
    fn order(&mut self, slot: usize) -> bool {
        // It carries them out one behind the other.
        let has_orders = self.slots.iter().flatten().any(|copy| copy.order.is_some());
        let (Some(courier), Some(ends), Some(copy)) =
            (&mut self.courier, &mut self.ends, &mut self.slots[slot])
        else {
            return false;
        };
        if copy.bytes <= courier::MOST_BYTES
            && (copy.bytes <= SLOT || !has_orders)
            && courier.is_here()
            && let Some(end) = ends.next(slot)
        {
            // SAFETY: the slot and the held memory have that many bytes, and stay until the end, as does the word
            // of the end. There are no more orders than slots.
            copy.order = Some(unsafe { courier.order(copy.way, copy.bytes as u32, end) });
        }
        copy.order.is_some()
    }

    /// Has the driver copy; the context is current.
    fn issue(&mut self, slot: usize) -> Result<(), CudaError> {
        let (Some(ends), Some(copy)) = (&mut self.ends, &self.slots[slot]) else {
            return Ok(());
        };
        let api = self.gpu.api();
        let stream = self.streams[usize::from(copy.token.is_none())];
        let (to, from) = copy.way;
        // SAFETY: the slot and the held memory have that many bytes, and stay until the end is seen.
        let code = unsafe { (api.cuMemcpyAsync)(to, from, copy.bytes, stream) };
        api.check("cuMemcpyAsync", code)?;
        ends.mark(slot, stream)?;
        if let Some(courier) = &mut self.courier
            && copy.bytes <= courier::MOST_BYTES
        {
            courier.note(Instant::now());
        }
        Ok(())
    }

    /// Frees the slot if its copy has ended.
    fn land(&mut self, slot: usize) -> Result<bool, MemoryError> {
        match self.has_ended(slot) {
            Ok(true) => {
                drop(self.take(slot));
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(error) => Err(self.give_up(slot, error)),
        }
    }

    fn has_ended(&mut self, slot: usize) -> Result<bool, CudaError> {
        let (Some(ends), Some(copy)) = (&mut self.ends, &mut self.slots[slot]) else {
            return Ok(false);
        };
        let (Some(courier), Some(order)) = (&mut self.courier, &mut copy.order) else {
            let stream = self.streams[usize::from(copy.token.is_none())];
            return ends.has_come(slot, stream);
        };
        if !ends.shows(slot) {
            if courier.is_open(order)? {
                return Ok(false);
            }
            // It may have told the end since the first look.
            if !ends.shows(slot) {
                copy.order = None;
                let gpu = self.gpu.clone();
                let _current = Current::enter(&gpu)?;
                return self.issue(slot).map(|()| false);
            }
        }
        courier.ended(order);
        Ok(true)
    }

    /// The copy's slots are free.
    fn take(&mut self, slot: usize) -> Option<Copy> {
        let copy = self.slots[slot].take()?;
        self.under_way &= !run(slot, copy.bytes);
        self.writes &= !(1 << slot);
        Some(copy)
    }

    /// Keeps the memory for ever, because something may still touch it.
    fn give_up(&mut self, slot: usize, error: CudaError) -> MemoryError {
        self.broken = true;
        std::mem::forget(self.take(slot));
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
        // SAFETY: no copy is under way that could use it.
        unsafe { host_free(&self.gpu, self.memory) };
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

/// The GPU's context is current.
fn is_reached(fence: Option<&Fence>) -> Result<bool, CudaError> {
    fence.map_or(Ok(true), Fence::is_reached_in_context)
}

impl Drop for SmallCopies {
    fn drop(&mut self) {
        let start = Instant::now();
        let mut ended = Vec::new();
        while !self.broken && self.under_way != 0 && start.elapsed() < LAST_WAIT {
            self.poll(&mut ended);
            thread::yield_now();
        }
        if self.broken || self.under_way != 0 {
            // A copy may still run: its memory, the streams and the slots stay until the process ends.
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(self.courier.take());
            return;
        }
        let (gpu, courier) = (self.gpu.clone(), self.courier.take());
        let Ok(_current) = Current::enter(&gpu) else {
            // As above.
            std::mem::forget(courier);
            return;
        };
        if let Some(courier) = courier {
            courier.end(LAST_WAIT);
        }
        self.destroy(gpu.api());
    }
}

impl fmt::Debug for SmallCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SmallCopies({:?})", self.gpu)
    }
}
