//! The loop of a GPU's copy worker. Nothing in it waits for the GPU: it polls and continues.

mod batches;

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::copies::Copies;
use super::device::{CopyStream, Device};
use super::host_unpack::HostUnpack;
use super::kernel_jobs::KernelJobs;
use super::pipe::{CpuSteps, Pipe};
use super::unpack::Unpacking;
use crate::awake::{self, Awake};
use crate::bounce::UnpackMethod;
use crate::checksum::Checksum;
use crate::cpu;
use crate::ending;
use crate::error::{CudaError, MemoryError};
use crate::gpu::MappedHost;
use crate::job::Work;
use crate::kind::MemoryKind;
use crate::slice::RegionSlice;
use crate::worker::queue::{JobQueue, Ticket};
use batches::Batch;

/// Jobs that may wait for their fence. Until it is full, no fence keeps later jobs from starting.
const WAITING_LIMIT: usize = 4096;
/// Fences polled in one round.
const LOOKS: usize = 64;
/// Jobs started in one round, so that completions are not kept waiting: the driver takes 3 us for
/// each, and lanes wait for the first.
const STARTS: usize = 8;
/// Events kept for steps of jobs that have started.
const RESERVE: usize = 64;
/// CPU work up to this many bytes is done at once, more in steps.
const AT_ONCE: u64 = 1 << 20;
/// How long to busy-poll after the last progress or job, if cores are spare: longer than the way of
/// a transfer of 4 MiB, because a pause costs more than it says and the next job comes soon.
const SPIN: Duration = Duration::from_micros(500);
/// The pause between polls after that.
const PAUSE: Duration = Duration::from_micros(20);
/// The pause while only fences are waited for, which may take as long as the caller's kernels.
const LONG_PAUSE: Duration = Duration::from_micros(100);

/// How far a step came.
pub(super) enum Step {
    /// Nothing could be done now.
    Waiting,
    /// Something was done.
    Progress,
    /// The job has ended, and nothing of it is in flight.
    Done(Result<u64, MemoryError>),
    /// Something of it is in flight, and nothing will report when that ends.
    Lost(MemoryError),
}

/// A job that the CPU takes part in, step by step.
enum Staged {
    Pipe(Pipe),
    Host(HostUnpack),
    Cpu(CpuSteps),
}

/// Everything the thread works with.
pub(super) struct Engine {
    pub(super) device: Device,
    staging: MappedHost,
    /// Set when copies that cannot be tracked use the staging memory.
    staging_lost: Option<MemoryError>,
    kernels: Result<KernelJobs, CudaError>,
    queue: Arc<JobQueue>,
    batches: [VecDeque<Batch>; 3],
    /// What the batches are about, in their order.
    in_flight: [VecDeque<Ticket>; 3],
    copies: [Copies; 2],
    waiting: VecDeque<Ticket>,
    unpacking: VecDeque<Unpacking>,
    staged: VecDeque<Ticket>,
    active: Option<(Ticket, Staged)>,
}

impl Engine {
    pub(super) fn new(
        device: Device,
        staging: MappedHost,
        kernels: Result<KernelJobs, CudaError>,
        queue: Arc<JobQueue>,
    ) -> Self {
        Self {
            device,
            staging,
            staging_lost: None,
            kernels,
            queue,
            batches: std::array::from_fn(|_| VecDeque::with_capacity(super::device::BATCHES)),
            in_flight: std::array::from_fn(|_| VecDeque::with_capacity(super::device::BATCHES)),
            copies: Default::default(),
            waiting: VecDeque::with_capacity(WAITING_LIMIT),
            unpacking: VecDeque::with_capacity(64),
            staged: VecDeque::with_capacity(64),
            active: None,
        }
    }

    /// Why there is no kernel, if there is none.
    pub(super) fn no_kernel(&self) -> Option<CudaError> {
        self.kernels.as_ref().err().cloned()
    }

    /// Works until the queue is stopped and all accepted jobs have ended.
    pub(super) fn run(mut self) {
        let awake = Awake::begin();
        let mut last = Instant::now();
        loop {
            // Read before the queue: after a stop nothing more is submitted.
            let stopping = self.queue.is_stopping();
            let progress = match ending::enter() {
                Some(_inside) => self.round(stopping),
                None => awake.asleep(|| ending::stand_still()),
            };
            if progress {
                last = Instant::now();
                continue;
            }
            let pause = match (self.is_idle(), self.is_working()) {
                (true, _) if stopping => break,
                (true, _) => None,
                (false, true) => Some(PAUSE),
                (false, false) => Some(LONG_PAUSE),
            };
            let looks = pause != Some(LONG_PAUSE) && last.elapsed() < SPIN && awake.may_look();
            if looks {
                awake::give_way();
                continue;
            }
            match pause {
                // Jobs that cannot be taken, and the wish to end, must not cut the pause short.
                Some(pause) if stopping || !self.has_room() => {
                    awake.asleep(|| thread::sleep(pause));
                }
                Some(_) => awake.asleep(|| self.queue.sleep(pause)),
                None => {
                    awake.asleep(|| self.queue.sleep(None));
                    last = Instant::now();
                }
            }
        }
    }

    /// Does what can be done now; whether there was anything.
    pub(super) fn round(&mut self, stopping: bool) -> bool {
        let mut progress = self.reap();
        progress |= self.look_at_fences(stopping);
        progress |= self.start_jobs();
        progress |= self.start_copies();
        progress |= self.kernels.as_mut().is_ok_and(KernelJobs::step);
        progress |= self.step_unpacking();
        progress |= self.step_staged();
        progress
    }

    /// Whether something of ours is in flight, except jobs that wait for the caller's work.
    fn is_working(&self) -> bool {
        self.active.is_some()
            || !self.staged.is_empty()
            || !self.unpacking.is_empty()
            || self.copies.iter().any(|copies| copies.len() > 0)
            || self
                .kernels
                .as_ref()
                .is_ok_and(|kernels| !kernels.is_idle())
            || self.batches.iter().any(|lane| !lane.is_empty())
    }

    /// Whether a job could be taken from the queue.
    fn has_room(&self) -> bool {
        let has_room = |copies: &Copies| copies.len() < WAITING_LIMIT;
        self.device.free_events() > RESERVE
            && self.waiting.len() < WAITING_LIMIT
            && self.copies.iter().all(has_room)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && !self.is_working()
    }

    /// Starts jobs whose fence has been reached; when stopping, ends the others.
    fn look_at_fences(&mut self, stopping: bool) -> bool {
        let mut progress = false;
        for _ in 0..self.waiting.len().min(LOOKS) {
            if self.device.free_events() <= RESERVE {
                break;
            }
            let Some(ticket) = self.waiting.pop_front() else {
                break;
            };
            match ticket.is_fence_reached() {
                Ok(true) => self.start(ticket),
                Ok(false) if stopping => ticket.finish(Err(MemoryError::WorkerStopped)),
                Ok(false) => {
                    self.waiting.push_back(ticket);
                    continue;
                }
                Err(error) => ticket.finish(Err(error.into())),
            }
            progress = true;
        }
        progress
    }

    fn start_jobs(&mut self) -> bool {
        let mut progress = false;
        for _ in 0..STARTS {
            if !self.has_room() {
                break;
            }
            let Some(ticket) = self.queue.pop() else {
                break;
            };
            match ticket.is_fence_reached() {
                Ok(true) => self.start(ticket),
                Ok(false) => self.waiting.push_back(ticket),
                Err(error) => ticket.finish(Err(error.into())),
            }
            progress = true;
        }
        progress
    }

    /// Starts a job that waits for nothing.
    fn start(&mut self, ticket: Ticket) {
        let work = ticket.work();
        let bytes = work.bytes();
        if bytes == 0 {
            if let Work::Checksum { tag, .. } = work {
                // Nothing has a tag, too; its CRC32C is 0.
                Checksum::new(tag.as_ref()).finish();
            }
            return ticket.finish(Ok(0));
        }
        if let Work::Unpack { pool, .. } = work
            && let Err(error) = self.device.see_card_writes(pool)
        {
            return ticket.finish(Err(error.into()));
        }
        let (from, to) = work.ends();
        let kinds = (from.kind(), to.map(RegionSlice::kind));
        let on_cpu =
            kinds.0.is_cpu_accessible() && kinds.1.is_none_or(MemoryKind::is_cpu_accessible);
        let on_device =
            kinds.0.is_device_accessible() && kinds.1.is_some_and(MemoryKind::is_device_accessible);
        match work {
            _ if on_cpu && bytes <= AT_ONCE => {
                let result = cpu::run(work);
                ticket.finish(result);
            }
            _ if on_cpu => self.staged.push_back(ticket),
            Work::Copy { from, to } if on_device && (from.is_in_pieces() || to.is_in_pieces()) => {
                let other = match &mut self.kernels {
                    Ok(kernels) => kernels.push(ticket),
                    Err(_) => Some(ticket),
                };
                if let Some(ticket) = other {
                    self.unpack(ticket);
                }
            }
            Work::Copy { from, to } if on_device => {
                let lane = lane_of(from.kind(), to.kind());
                if let Some(copies) = self.copies.get_mut(lane as usize) {
                    return copies.push(ticket);
                }
                let issued = self.issue(lane, work, from.len());
                self.track(
                    lane,
                    ticket,
                    issued.map(|()| bytes).map_err(MemoryError::from),
                );
            }
            Work::Unpack {
                with: UnpackMethod::Kernel,
                ..
            } if on_device => match &mut self.kernels {
                Ok(kernels) => {
                    // Its pool is pinned or on the GPU, which has an address there.
                    if let Some(ticket) = kernels.push(ticket) {
                        self.unpack(ticket);
                    }
                }
                Err(error) => {
                    let error = error.clone().into();
                    ticket.finish(Err(error));
                }
            },
            Work::Unpack {
                with: UnpackMethod::D2d,
                ..
            } if on_device => self.unpack(ticket),
            Work::Copy { .. } | Work::Unpack { .. } | Work::Checksum { .. } => {
                self.staged.push_back(ticket);
            }
        }
    }

    /// One copy for each descriptor or piece.
    fn unpack(&mut self, ticket: Ticket) {
        match Unpacking::new(ticket) {
            Ok(unpacking) => self.unpacking.push_back(unpacking),
            Err(ticket) => self.staged.push_back(*ticket),
        }
    }

    /// One step of the oldest unpack job; the others follow in turn.
    fn step_unpacking(&mut self) -> bool {
        if self.device.free_events() < 2 {
            return false;
        }
        let Some(mut unpacking) = self.unpacking.pop_front() else {
            return false;
        };
        match unpacking.step(self) {
            Step::Waiting => {
                self.unpacking.push_front(unpacking);
                false
            }
            Step::Progress => {
                self.unpacking.push_back(unpacking);
                true
            }
            Step::Done(outcome) => {
                let (lane, ticket) = unpacking.into_parts();
                self.track(lane, ticket, outcome);
                true
            }
            Step::Lost(error) => {
                unpacking.into_parts().1.abandon(error);
                true
            }
        }
    }

    /// One step of the job that the CPU takes part in. One at a time: they share the staging
    /// memory.
    fn step_staged(&mut self) -> bool {
        if self.active.is_none() {
            let Some(ticket) = self.staged.pop_front() else {
                return false;
            };
            if let Some(error) = &self.staging_lost {
                let error = error.clone();
                ticket.finish(Err(error));
                return true;
            }
            match Staged::new(ticket.work()) {
                Ok(task) => self.active = Some((ticket, task)),
                Err(error) => {
                    ticket.finish(Err(error));
                    return true;
                }
            }
        }
        let Some((ticket, mut task)) = self.active.take() else {
            return false;
        };
        let step = match &mut task {
            Staged::Pipe(pipe) => pipe.step(&mut self.device, self.staging),
            Staged::Host(unpack) => unpack.step(ticket.work(), &mut self.device, self.staging),
            Staged::Cpu(steps) => steps.step(ticket.work()),
        };
        match step {
            Step::Done(result) => {
                // It may hold memory too, which is free once the end is told.
                drop(task);
                ticket.finish(result);
            }
            Step::Lost(error) => {
                self.staging_lost = Some(error.clone());
                ticket.abandon(error);
            }
            Step::Waiting => {
                self.active = Some((ticket, task));
                return false;
            }
            Step::Progress => self.active = Some((ticket, task)),
        }
        true
    }
}

pub(super) fn lane_of(from: MemoryKind, to: MemoryKind) -> CopyStream {
    match (from, to) {
        (MemoryKind::Cuda { .. }, MemoryKind::Cuda { .. }) => CopyStream::Across,
        (MemoryKind::Cuda { .. }, _) => CopyStream::Out,
        _ => CopyStream::In,
    }
}

impl Staged {
    fn new(work: &Work) -> Result<Self, MemoryError> {
        let (from, to) = work.ends();
        let on_cpu =
            from.kind().is_cpu_accessible() && to.is_none_or(|to| to.kind().is_cpu_accessible());
        match work {
            _ if on_cpu => Ok(Self::Cpu(CpuSteps::new())),
            Work::Copy { from, to } => Pipe::copy(from, to).map(Self::Pipe),
            Work::Checksum { of, tag } => Pipe::checksum(of, tag.as_ref()).map(Self::Pipe),
            Work::Unpack { .. } => Ok(Self::Host(HostUnpack::new())),
        }
    }
}
