//! Launches in flight: each has a list, a counter and a flag of its own, which the kernel itself
//! sets.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::device::FIRST_WORK;
use super::kernel::{Flag, Kernels};
use crate::driver::{Api, sys};
use crate::error::CudaError;
use crate::fence::Event;
use crate::gpu::{Gpu, MappedHost, create_stream, device_alloc};

/// Descriptors of a list's first launch, so few that the GPU begins soon, and of each further one,
/// so many that launches cost little.
pub(super) const FIRST_ENTRIES: usize = 2048;
pub(super) const LIST_ENTRIES: usize = 8192;
const LIST_BYTES: usize = LIST_ENTRIES * 16;
/// Sources of an even list that fit into the same room.
pub(super) const LIST_SOURCES: usize = LIST_BYTES / 4;
const SLOTS: usize = 16;
/// Apart, so that neither the CPU nor the GPU finds two in one line of a cache.
const APART: usize = 128;
const FLAGS_BYTES: usize = SLOTS * APART;
/// Two, so that the start of a launch overlaps with the end of the one before.
const STREAMS: usize = 2;
/// After this long without an answer the streams themselves are asked.
const STREAM_QUERY_DELAY: Duration = Duration::from_millis(2);

pub(super) struct LaunchSlots {
    streams: [sys::CUstream; STREAMS],
    events: Vec<Event>,
    memory: MappedHost,
    counters: u64,
    value: u32,
    next: usize,
    /// The slot, and what its flag becomes.
    armed: VecDeque<(usize, u32)>,
    /// Launches that have ended, ever.
    landed: u64,
    /// Since when no launch has ended, and which stream takes the next one.
    since: Instant,
    turn: usize,
    asked: bool,
}

// SAFETY: streams and events may be used from any thread, and the memory belongs to this value.
unsafe impl Send for LaunchSlots {}

impl LaunchSlots {
    /// Bytes of zeroed pinned memory that the flags and lists take.
    pub(super) const BYTES: usize = FLAGS_BYTES + SLOTS * LIST_BYTES;

    /// `memory` is these slots' alone for good; the context is current.
    pub(super) fn create(
        gpu: &Gpu,
        kernels: &Kernels,
        memory: MappedHost,
    ) -> Result<Self, CudaError> {
        let mut slots = Self {
            streams: [std::ptr::null_mut(); STREAMS],
            events: Vec::with_capacity(STREAMS),
            memory,
            counters: 0,
            value: 0,
            next: 0,
            armed: VecDeque::with_capacity(SLOTS),
            landed: 0,
            since: Instant::now(),
            turn: 0,
            asked: false,
        };
        let prepared = slots.prepare(gpu, kernels);
        prepared.map(|()| slots)
    }

    /// After an error something may be in flight, so that what was made stays until the process
    /// ends.
    fn prepare(&mut self, gpu: &Gpu, kernels: &Kernels) -> Result<(), CudaError> {
        let api = gpu.api();
        for stream in &mut self.streams {
            *stream = create_stream(api)?;
            self.events.push(Event::create(api)?);
        }
        self.counters = device_alloc(gpu, FLAGS_BYTES)?;
        // SAFETY: the mapped memory is zeroed and as large, and both stay.
        let code = unsafe {
            (api.cuMemcpyAsync)(
                self.counters,
                self.memory.device,
                FLAGS_BYTES,
                self.streams[0],
            )
        };
        api.check("cuMemcpyAsync", code)?;
        kernels.warm_up(api, self.streams[0], self.counters)?;
        self.events[0].record(api, self.streams[0])?;
        gpu.wait_until(FIRST_WORK, || self.events[0].is_ready(api))
    }

    /// A slot with nothing in flight; they are used in turn.
    pub(super) fn take(&mut self) -> Option<usize> {
        if self.armed.len() == SLOTS {
            return None;
        }
        let slot = self.next;
        debug_assert!(self.armed.iter().all(|(armed, _)| *armed != slot));
        self.next = (self.next + 1) % SLOTS;
        Some(slot)
    }

    /// The stream for the next launch: changed only where launches may overlap, because a change
    /// costs time.
    pub(super) fn stream(&mut self) -> sys::CUstream {
        self.turn = if self.armed.is_empty() {
            0
        } else {
            (self.turn + 1) % STREAMS
        };
        self.streams[self.turn]
    }

    /// Launches that have ended, ever, and launches that have been armed, ever.
    pub(super) fn landed(&self) -> u64 {
        self.landed
    }

    pub(super) fn armed(&self) -> u64 {
        self.landed + self.armed.len() as u64
    }

    /// The slot's list for the CPU and for the device.
    pub(super) fn list(&self, slot: usize) -> (*mut u8, u64) {
        let at = FLAGS_BYTES + slot * LIST_BYTES;
        let host = self.memory.host.as_ptr().wrapping_add(at);
        (host, self.memory.device + at as u64)
    }

    /// Expects an answer of the slot's launch.
    pub(super) fn arm(&mut self, slot: usize) -> Flag {
        self.value = self.value.wrapping_add(1).max(1);
        if self.armed.is_empty() {
            self.since = Instant::now();
        }
        self.armed.push_back((slot, self.value));
        self.asked = false;
        Flag {
            counter: self.counters + (slot * APART) as u64,
            flag: self.memory.device + (slot * APART) as u64,
            value: self.value,
        }
    }

    /// The launch of the slot armed last was refused. The slot is the next one again: the one
    /// behind it may still be in flight.
    pub(super) fn disarm(&mut self, slot: usize) {
        if self.armed.back().is_some_and(|(last, _)| *last == slot) {
            self.armed.pop_back();
            self.next = slot;
        }
    }

    /// Ends launches whose flag says so, in turn; whether there were any.
    pub(super) fn reap(&mut self) -> bool {
        let before = self.armed.len();
        while let Some(&(slot, value)) = self.armed.front() {
            let flag = self.memory.host.as_ptr().wrapping_add(slot * APART);
            // SAFETY: four aligned bytes of ours, which the device writes at once.
            let flag = unsafe { AtomicU32::from_ptr(flag.cast()) };
            if flag.load(Ordering::Acquire) != value {
                break;
            }
            self.armed.pop_front();
            self.landed += 1;
        }
        let any = self.armed.len() != before;
        if any {
            self.since = Instant::now();
        }
        any
    }

    /// Whether no launch has ended for so long that the streams should be asked.
    pub(super) fn is_silent(&self) -> bool {
        !self.armed.is_empty() && self.since.elapsed() > STREAM_QUERY_DELAY
    }

    /// Learns from the streams whether work goes on; the context is current. Where both are
    /// through, all launches have ended.
    pub(super) fn ask_streams(&mut self, api: &Api) -> Result<(), CudaError> {
        self.since = Instant::now();
        if !self.asked {
            for (event, stream) in self.events.iter().zip(self.streams) {
                event.record(api, stream)?;
            }
            self.asked = true;
        }
        let mut through = true;
        for event in &self.events {
            through &= event.is_ready(api)?;
        }
        if through {
            self.landed += self.armed.len() as u64;
            self.armed.clear();
        }
        Ok(())
    }
}
