//! The driver as the worker uses it: streams, events and asynchronous copies.

use crate::bounce::BouncePool;
use crate::driver::{Api, sys};
use crate::error::{CudaError, MemoryError};
use crate::fence::Event;
use crate::gpu::MappedHost;
use crate::gpu::{Gpu, create_stream, device_alloc, ignore_captures};
use crate::kind::MemoryKind;

/// Events for work in flight on the streams.
pub(super) const BATCHES: usize = 512;

/// What is waited for at set-up.
pub(super) const FIRST_WORK: &str = "its first work";

/// One of the worker's streams. None of them synchronises with the default streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyStream {
    /// Host to device.
    In,
    /// Device to host.
    Out,
    /// Device to device.
    Across,
}

impl CopyStream {
    pub(super) const ALL: [Self; 3] = [Self::In, Self::Out, Self::Across];
}

/// The GPU from the worker's thread, on which its context stays current.
pub(super) struct Device {
    pub(super) gpu: Gpu,
    streams: [sys::CUstream; 3],
    events: Vec<Event>,
    /// Other devices' writes must be flushed before work here may read them.
    needs_flush: bool,
}

impl Device {
    /// Makes the context current on this thread for good, and everything the worker needs in it.
    pub(super) fn create(gpu: &Gpu) -> Result<Self, CudaError> {
        let api = gpu.api();
        // For the life of the thread. A capture must neither break our copies nor be broken by
        // them.
        ignore_captures(api)?;
        // SAFETY: the context is alive: the `Gpu` keeps it.
        api.check("cuCtxSetCurrent", unsafe {
            (api.cuCtxSetCurrent)(gpu.raw_context())
        })?;
        let mut device = Self {
            gpu: gpu.clone(),
            streams: [std::ptr::null_mut(); 3],
            events: Vec::with_capacity(BATCHES),
            // A driver that does not say may need it.
            needs_flush: gpu.needs_flush().unwrap_or(true),
        };
        device.fill()?;
        Ok(device)
    }

    /// Makes what a network card has written to this pool visible to work that is queued from now
    /// on.
    pub(super) fn see_card_writes(&self, pool: &BouncePool) -> Result<(), CudaError> {
        let in_gpu = matches!(pool.kind(), MemoryKind::Cuda { .. });
        if in_gpu && pool.is_written_by_card() && self.needs_flush {
            return self.gpu.flush_device_writes();
        }
        Ok(())
    }

    fn fill(&mut self) -> Result<(), CudaError> {
        let api = self.api();
        for stream in &mut self.streams {
            *stream = create_stream(api)?;
        }
        while self.events.len() < BATCHES {
            self.events.push(Event::create(api)?);
        }
        Ok(())
    }

    /// Runs one small copy on each stream, so that the driver has nothing left to set up on the
    /// transfer path.
    pub(super) fn warm_up(&self, staging: MappedHost) -> Result<(), CudaError> {
        // To free it would wait for the program's kernels.
        let scratch = device_alloc(&self.gpu, 4096)?;
        let host = staging.at(0).device;
        // SAFETY: the scratch memory is 4 KiB, the staging memory more, and both stay.
        unsafe {
            self.copy(CopyStream::In, scratch, host, 256)?;
            self.copy(CopyStream::Out, host + 1024, scratch, 256)?;
            self.copy(CopyStream::Across, scratch + 1024, scratch, 256)?;
        }
        let api = self.api();
        for (lane, event) in CopyStream::ALL.into_iter().zip(&self.events) {
            event.record(api, self.stream(lane))?;
            self.gpu.wait_until(FIRST_WORK, || event.is_ready(api))?;
        }
        Ok(())
    }

    pub(super) fn api(&self) -> &'static Api {
        self.gpu.api()
    }

    pub(super) fn stream(&self, lane: CopyStream) -> sys::CUstream {
        self.streams[lane as usize]
    }

    /// Events that are free.
    pub(super) fn free_events(&self) -> usize {
        self.events.len()
    }

    /// Takes an event and records it at the end of a stream.
    ///
    /// # Errors
    /// The driver's, or [`MemoryError::WorkerFailed`] when all events are in flight. Nobody can
    /// know then when what was issued ends.
    pub(super) fn mark(&mut self, lane: CopyStream) -> Result<Event, MemoryError> {
        let Some(event) = self.events.pop() else {
            return Err(MemoryError::WorkerFailed);
        };
        match event.record(self.api(), self.stream(lane)) {
            Ok(()) => Ok(event),
            Err(error) => {
                self.events.push(event);
                Err(error.into())
            }
        }
    }

    pub(super) fn give_back(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Copies between any two addresses that the device can reach.
    ///
    /// # Safety
    /// Both ranges must stay valid, and the destination untouched by others, until the stream has
    /// passed this copy.
    pub(super) unsafe fn copy(
        &self,
        lane: CopyStream,
        to: u64,
        from: u64,
        len: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.api().cuMemcpyAsync)(to, from, len, self.stream(lane)) };
        self.api().check("cuMemcpyAsync", code)
    }
}
