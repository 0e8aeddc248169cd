//! Kernels launched from the caller's own thread.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_wire::Descriptors;

use super::cut::Cut;
use super::feed::Inline;
use super::kernel::{Ends, Kernels};
use super::launch::{self, Sum};
use super::slots::Slots;
use super::unpack::piece_bytes;
use crate::bounce::UnpackMethod;
use crate::error::{CudaError, MemoryError};
use crate::gpu::{Current, Gpu};
use crate::job::Work;
use crate::kind::MemoryKind;
use crate::lease::Held;

/// How long a drop waits for work in flight.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// Unpacks and checksums from the thread that polls, without a hand-over to the copy worker: the shortest
/// way for a caller that has a thread to spare.
///
/// One piece of work at a time. It has streams of its own, and the kernel itself signals its completion,
/// through host memory. Neither [`Self::start`] nor [`Self::poll`] waits for the GPU, so a kernel that
/// spins until the work completes does not stop them.
pub struct Unpacker {
    gpu: Gpu,
    kernels: Kernels,
    slots: Slots,
    /// Where lists are written that a launch carries.
    list: Box<Inline>,
    running: Option<Running>,
    /// Set when the GPU gave no answer any more; nothing can be started then.
    broken: Option<MemoryError>,
}

struct Running {
    task: Task,
    /// An error of a launch; reported after earlier launches have ended.
    error: Option<CudaError>,
    work: Work,
    holds: [Option<Held>; 2],
}

enum Task {
    Unpack {
        ends: Ends,
        cut: Cut,
        descriptors: Arc<Descriptors>,
    },
    /// Copies on the first stream, which an event follows.
    Copies {
        pool: u64,
        to: u64,
        descriptors: Arc<Descriptors>,
        issued: bool,
    },
    Sum(Sum),
}

impl Unpacker {
    /// Loads the kernels and prepares streams and memory; for set-up.
    ///
    /// # Errors
    /// The driver's refusal, [`CudaError::KernelUnavailable`] among them.
    pub fn new(gpu: &Gpu) -> Result<Self, MemoryError> {
        let _current = Current::enter(gpu)?;
        let kernels = Kernels::load(gpu)?;
        let slots = Slots::create(gpu, &kernels)?;
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
            slots,
            list: Box::new(Inline::EMPTY),
            running: None,
            broken: None,
        })
    }

    /// Starts an unpack with [`UnpackMethod::Kernel`] or [`UnpackMethod::D2d`], or a checksum of GPU memory. Its memory is leased until
    /// [`Self::poll`] has reported its end.
    ///
    /// # Errors
    /// Lengths, bounds, memory in use, memory that this GPU's kernels cannot reach, or other work in flight.
    pub fn start(&mut self, work: Work) -> Result<(), MemoryError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if self.running.is_some() {
            return Err(MemoryError::UnpackerBusy);
        }
        work.check()?;
        let task = self.task(&work)?;
        let _current = Current::enter(&self.gpu)?;
        let holds = work.hold()?;
        self.running = Some(Running {
            task,
            error: None,
            work,
            holds,
        });
        self.launch()
    }

    /// The result once all of it is visible to everyone: the bytes moved, or the checksum. `None` while it is
    /// in flight, and when there is none.
    ///
    /// # Errors
    /// The driver's, for example when a kernel has broken the context.
    pub fn poll(&mut self) -> Result<Option<u64>, MemoryError> {
        if self.running.is_none() {
            return Ok(None);
        }
        if !self.slots.reap() && self.slots.is_silent() {
            let _current = Current::enter(&self.gpu)?;
            if let Err(error) = self.slots.ask_streams(self.gpu.api()) {
                return Err(self.give_up(error.into()));
            }
        }
        if !self.is_launched() {
            let _current = Current::enter(&self.gpu)?;
            self.launch()?;
        }
        if self.slots.is_busy() || !self.is_launched() || !self.are_copies_done()? {
            return Ok(None);
        }
        let Some(Running {
            task, error, work, ..
        }) = self.running.take()
        else {
            return Ok(None);
        };
        match (error, task) {
            (Some(error), _) => Err(error.into()),
            (None, _) if work.bytes() == 0 => Ok(Some(0)),
            (None, Task::Unpack { .. } | Task::Copies { .. }) => Ok(Some(work.bytes())),
            (None, Task::Sum(sum)) => Ok(sum.finish(&self.slots).map(u64::from)),
        }
    }

    /// Starts and polls without a pause until the end.
    ///
    /// # Errors
    /// Those of [`Self::start`] and [`Self::poll`]; [`CudaError::TimedOut`] after `limit`, and then the
    /// work goes on: poll for its end.
    pub fn run(&mut self, work: Work, limit: Duration) -> Result<u64, MemoryError> {
        self.start(work)?;
        let start = Instant::now();
        loop {
            if let Some(result) = self.poll()? {
                return Ok(result);
            }
            if start.elapsed() > limit {
                return Err(CudaError::TimedOut {
                    device: self.gpu.ordinal(),
                    what: "the unpack kernel",
                    after: limit,
                }
                .into());
            }
            std::hint::spin_loop();
        }
    }

    fn task(&self, work: &Work) -> Result<Task, MemoryError> {
        let (from, to) = work.ends();
        for slice in [Some(from), to].into_iter().flatten() {
            if slice.is_in_pieces() {
                return Err(MemoryError::InPieces { kind: slice.kind() });
            }
            let is_reached = match slice.kind() {
                MemoryKind::Host => false,
                MemoryKind::Pinned => true,
                MemoryKind::Cuda { .. } => slice
                    .region()
                    .gpu()
                    .is_some_and(|gpu| gpu.is_same(&self.gpu)),
            };
            if !is_reached {
                return Err(MemoryError::WrongWorker {
                    worker: self.gpu.kind(),
                    kind: slice.kind(),
                });
            }
        }
        let address = from.device_address().unwrap_or(0);
        match work {
            Work::Unpack {
                descriptors,
                to,
                with: UnpackMethod::Kernel,
                ..
            } => {
                let piece = piece_bytes(descriptors.bytes(), self.gpu.multiprocessors());
                Ok(Task::Unpack {
                    ends: Ends {
                        pool: address,
                        to: to.device_address().unwrap_or(0),
                        packs: false,
                    },
                    cut: Cut::for_kernel(piece),
                    descriptors: Arc::clone(descriptors),
                })
            }
            Work::Unpack {
                descriptors,
                to,
                with: UnpackMethod::D2d,
                ..
            } => Ok(Task::Copies {
                pool: address,
                to: to.device_address().unwrap_or(0),
                descriptors: Arc::clone(descriptors),
                issued: false,
            }),
            Work::Checksum { of } => Ok(Task::Sum(Sum::new(&self.kernels, address, of.len()))),
            Work::Unpack { .. } | Work::Copy { .. } => Err(MemoryError::WrongWorker {
                worker: self.gpu.kind(),
                kind: from.kind(),
            }),
        }
    }

    fn is_launched(&self) -> bool {
        match &self.running {
            None => true,
            Some(running) if running.error.is_some() || running.work.bytes() == 0 => true,
            Some(running) => match &running.task {
                Task::Unpack {
                    cut, descriptors, ..
                } => cut.is_through(descriptors.as_ref().into()),
                Task::Copies { issued, .. } => *issued,
                Task::Sum(sum) => sum.is_launched(),
            },
        }
    }

    /// Whether no copies are in flight.
    fn are_copies_done(&mut self) -> Result<bool, MemoryError> {
        let Some(Running {
            task: Task::Copies { issued: true, .. },
            ..
        }) = &self.running
        else {
            return Ok(true);
        };
        let _current = Current::enter(&self.gpu)?;
        let done = self.slots.are_copies_done(self.gpu.api());
        done.map_err(|error| self.give_up(error.into()))
    }

    /// Launches as much as there are slots for; the context is current.
    fn launch(&mut self) -> Result<(), MemoryError> {
        self.copy()?;
        while !self.is_launched() {
            let Some(running) = &mut self.running else {
                break;
            };
            let (api, kernels, slots) = (self.gpu.api(), &self.kernels, &mut self.slots);
            let launched = match &mut running.task {
                Task::Unpack {
                    ends,
                    cut,
                    descriptors,
                } => {
                    let (ends, list) = (*ends, descriptors.as_ref().into());
                    let room = (slots, &mut *self.list);
                    // SAFETY: the work and its holds are kept until every slot has landed, and its
                    // descriptors were checked against both ends.
                    unsafe { launch::pieces(api, kernels, room, ends, cut, list) }
                }
                // Issued above.
                Task::Copies { .. } => break,
                // SAFETY: as above.
                Task::Sum(sum) => unsafe { sum.launch(api, kernels, slots) },
            };
            match launched {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => running.error = Some(error),
            }
        }
        Ok(())
    }

    /// Issues copies, if that is the work; the context is current.
    fn copy(&mut self) -> Result<(), MemoryError> {
        let Some(Running {
            task:
                Task::Copies {
                    pool,
                    to,
                    descriptors,
                    issued: issued @ false,
                },
            error,
            ..
        }) = &mut self.running
        else {
            return Ok(());
        };
        let (api, stream) = (self.gpu.api(), self.slots.copy_stream());
        let copied = descriptors.as_slice().iter().try_for_each(|one| {
            let (to, from) = (
                *to + one.destination_offset,
                *pool + u64::from(one.source_offset),
            );
            // SAFETY: as in `launch`.
            let code = unsafe { (api.cuMemcpyAsync)(to, from, one.length as usize, stream) };
            api.check("cuMemcpyAsync", code)
        });
        // Even after an error some copies may be in flight.
        *error = copied.err();
        *issued = true;
        let marked = self.slots.mark_copies(api);
        // Without a mark nothing would report their end.
        marked.map_err(|error| self.give_up(error.into()))
    }

    /// Keeps the memory for ever, because something may still touch it.
    fn give_up(&mut self, error: MemoryError) -> MemoryError {
        if let Some(running) = self.running.take() {
            std::mem::forget((running.work, running.holds));
        }
        self.broken = Some(error.clone());
        error
    }
}

impl Drop for Unpacker {
    fn drop(&mut self) {
        let start = Instant::now();
        while self.running.is_some() && start.elapsed() < LAST_WAIT {
            // An error ends the work just as well.
            if !matches!(self.poll(), Ok(None)) {
                break;
            }
            std::thread::yield_now();
        }
        if self.running.is_some() {
            let error = MemoryError::WorkerStopped;
            self.give_up(error);
        }
        if self.broken.is_some() {
            // A launch may still run: streams, kernels and lists stay until the process ends.
            return;
        }
        if let Ok(_current) = Current::enter(&self.gpu)
            && self.slots.retire(self.gpu.api())
        {
            self.slots.destroy(&self.gpu);
            self.kernels.unload(&self.gpu);
        }
    }
}

impl fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Unpacker({:?})", self.gpu)
    }
}
