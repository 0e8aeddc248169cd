//! The loop of a GPU's copy worker. Nothing in it waits for the GPU: it looks, and goes on.

use std::collections::VecDeque;
use std::hint;
use std::thread;
use std::time::{Duration, Instant};

use super::device::{Device, Lane};
use super::gather::Gather;
use super::kernel::Flag;
use super::pipe::{CpuSteps, Pipe};
use super::staging::{BLOCK_BYTES, Staging};
use super::unpack::Unpacking;
use crate::bounce::UnpackMethod;
use crate::checksum::{SumFactors, SumPlan};
use crate::cpu;
use crate::error::{CudaError, MemoryError};
use crate::fence::Event;
use crate::job::Work;
use crate::kind::MemoryKind;
use crate::slice::RegionSlice;
use crate::worker::queue::{JobQueue, Ticket};

/// Jobs that may wait for their fence. Until it is full, no fence keeps later jobs from starting.
const WAITING_LIMIT: usize = 4096;
/// Fences looked at in one round.
const LOOKS: usize = 64;
/// Jobs started in one round, so that completions are not kept waiting.
const STARTS: usize = 32;
/// Events kept for steps of jobs that have started.
const RESERVE: usize = 64;
/// CPU work up to this many bytes is done at once, more in steps.
const AT_ONCE: u64 = 1 << 20;
/// How long to look without a pause after the last progress, where there are cores to spare: longer than a
/// copy of 4 MiB over the bus, because a pause costs more than it says.
const SPIN: Duration = Duration::from_micros(100);
/// The pause between looks after that.
const PAUSE: Duration = Duration::from_micros(20);
/// The pause while only fences are waited for, which may take as long as the caller's kernels.
const LONG_PAUSE: Duration = Duration::from_micros(100);

/// Work under way on a stream.
struct Flight {
    event: Event,
    done: Done,
}

/// What to do when a flight lands.
enum Done {
    /// The last of a job.
    Job {
        ticket: Ticket,
        outcome: Result<u64, MemoryError>,
    },
    /// A launch has read its descriptors.
    Block(usize),
    /// A checksum's sums are in a block.
    Sums {
        ticket: Ticket,
        blocks: usize,
        factors: Box<SumFactors>,
        block: usize,
    },
}

/// How far a step came.
pub(super) enum Step {
    /// Nothing could be done now.
    Waiting,
    /// Something was done.
    Progress,
    /// The job has ended, and nothing of it is under way.
    Done(Result<u64, MemoryError>),
}

/// A job that the CPU takes part in, step by step.
enum Staged {
    Pipe(Pipe),
    Gather(Gather),
    Cpu(CpuSteps),
}

/// Everything the thread works with.
pub(super) struct Engine<'queue> {
    pub(super) device: Device,
    pub(super) staging: Staging,
    queue: &'queue JobQueue,
    flights: [VecDeque<Flight>; 4],
    waiting: VecDeque<Ticket>,
    unpacking: VecDeque<Unpacking>,
    staged: VecDeque<Ticket>,
    active: Option<(Ticket, Staged)>,
}

impl<'queue> Engine<'queue> {
    pub(super) fn new(device: Device, staging: Staging, queue: &'queue JobQueue) -> Self {
        Self {
            device,
            staging,
            queue,
            flights: std::array::from_fn(|_| VecDeque::with_capacity(super::device::FLIGHTS)),
            waiting: VecDeque::with_capacity(WAITING_LIMIT),
            unpacking: VecDeque::with_capacity(64),
            staged: VecDeque::with_capacity(64),
            active: None,
        }
    }

    /// Works until the queue is stopped and all accepted jobs have ended.
    pub(super) fn run(mut self) {
        let may_spin = thread::available_parallelism().is_ok_and(|cores| cores.get() > 2);
        let mut last = Instant::now();
        loop {
            // Read before the queue: whoever stops it has submitted all there will be.
            let stopping = self.queue.is_stopping();
            let mut progress = self.land();
            progress |= self.look_at_fences(stopping);
            progress |= self.start_jobs();
            progress |= self.step_unpacking();
            progress |= self.step_staged();
            if progress {
                last = Instant::now();
            } else if self.is_idle() {
                if stopping {
                    break;
                }
                self.queue.sleep(None);
                last = Instant::now();
            } else if may_spin && self.is_working() && last.elapsed() < SPIN {
                hint::spin_loop();
            } else {
                self.queue
                    .sleep(Some(if self.is_working() { PAUSE } else { LONG_PAUSE }));
            }
        }
        self.staging.destroy(&self.device);
        self.device.destroy();
    }

    /// Whether something of ours is under way, beside jobs that wait for the caller's work.
    fn is_working(&self) -> bool {
        self.active.is_some()
            || !self.staged.is_empty()
            || !self.unpacking.is_empty()
            || self.flights.iter().any(|lane| !lane.is_empty())
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && !self.is_working()
    }

    /// Ends what the streams have finished.
    fn land(&mut self) -> bool {
        let mut progress = false;
        for lane in Lane::ALL {
            while let Some(front) = self.flights[lane as usize].front() {
                let ready = front.event.is_ready(self.device.api());
                if ready == Ok(false) {
                    break;
                }
                let Some(Flight { event, done }) = self.flights[lane as usize].pop_front() else {
                    break;
                };
                self.device.give_back(event);
                match done {
                    Done::Block(block) => self.staging.give_back_block(block),
                    Done::Sums {
                        ticket,
                        blocks,
                        factors,
                        block,
                    } => {
                        let sum = factors.finish(self.staging.sums(block, blocks));
                        self.staging.give_back_block(block);
                        let sum = ready.map(|_| u64::from(sum));
                        ticket.finish(sum.map_err(MemoryError::from));
                    }
                    Done::Job { ticket, outcome } => {
                        ticket.finish(ready.map_err(MemoryError::from).and(outcome));
                    }
                }
                progress = true;
            }
        }
        progress
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
            if self.device.free_events() <= RESERVE || self.waiting.len() == WAITING_LIMIT {
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
            // The CRC32C of nothing is 0, too.
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
            Work::Copy { from, to } if on_device => {
                let lane = lane_of(from.kind(), to.kind());
                let issued = self.issue_copy(lane, from, to);
                self.fly(
                    lane,
                    ticket,
                    issued.map(|()| bytes).map_err(MemoryError::from),
                );
            }
            Work::Unpack {
                with: UnpackMethod::D2d | UnpackMethod::Kernel,
                ..
            } => {
                let multiprocessors = self.device.gpu.multiprocessors();
                match Unpacking::new(ticket, multiprocessors) {
                    Ok(unpacking) => self.unpacking.push_back(unpacking),
                    Err(refused) => {
                        let (ticket, error) = *refused;
                        ticket.finish(Err(error));
                    }
                }
            }
            Work::Checksum { .. } => self.start_checksum(ticket),
            Work::Copy { .. } | Work::Unpack { .. } => self.staged.push_back(ticket),
        }
    }

    fn issue_copy(
        &self,
        lane: Lane,
        from: &RegionSlice,
        to: &RegionSlice,
    ) -> Result<(), CudaError> {
        let (Some(source), Some(destination)) = (from.device_address(), to.device_address()) else {
            // Only device-accessible ends come here, and all of those have an address.
            return Ok(());
        };
        let gpus = (from.region().gpu(), to.region().gpu());
        match gpus {
            (Some(from_gpu), Some(to_gpu)) if lane == Lane::Across && !from_gpu.is_same(to_gpu) => {
                // SAFETY: the ticket keeps both regions and their leases until the flight has landed.
                unsafe {
                    self.device
                        .copy_peer((to_gpu, destination), (from_gpu, source), from.len())
                }
            }
            // SAFETY: as above.
            _ => unsafe { self.device.copy(lane, destination, source, from.len()) },
        }
    }

    /// By the kernel where there is one and a place for its sums, else by the CPU.
    fn start_checksum(&mut self, ticket: Ticket) {
        let (Work::Checksum { of }, Ok(kernels)) = (ticket.work(), &self.device.kernels) else {
            return self.staged.push_back(ticket);
        };
        let Some(address) = of.device_address() else {
            return self.staged.push_back(ticket);
        };
        let plan = SumPlan::new(address, of.len() as u64, kernels.sum_blocks());
        if plan.blocks as usize * 4 > BLOCK_BYTES {
            return self.staged.push_back(ticket);
        }
        let Some((block, _, sums)) = self.staging.take_block() else {
            return self.staged.push_back(ticket);
        };
        let (api, stream) = (self.device.api(), self.device.stream(Lane::Unpack));
        // SAFETY: the ticket keeps the bytes, and the block is given back, once the stream has passed
        // the launch.
        let launched = unsafe { kernels.checksum(api, stream, &plan, sums, Flag::default()) };
        if let Err(error) = launched {
            self.staging.give_back_block(block);
            return ticket.finish(Err(error.into()));
        }
        match self.device.mark(Lane::Unpack) {
            Ok(Some(event)) => {
                let done = Done::Sums {
                    ticket,
                    blocks: plan.blocks as usize,
                    factors: Box::new(plan.factors()),
                    block,
                };
                self.flights[Lane::Unpack as usize].push_back(Flight { event, done });
            }
            Ok(None) => ticket.abandon(MemoryError::WorkerStopped),
            Err(error) => ticket.abandon(error.into()),
        }
    }

    /// Follows a job on a stream to its end. After an error some of the job may be under way, so the
    /// job ends only when the stream has passed it.
    pub(super) fn fly(&mut self, lane: Lane, ticket: Ticket, outcome: Result<u64, MemoryError>) {
        match self.device.mark(lane) {
            Ok(Some(event)) => {
                let done = Done::Job { ticket, outcome };
                self.flights[lane as usize].push_back(Flight { event, done });
            }
            Ok(None) => ticket.abandon(MemoryError::WorkerStopped),
            Err(error) => ticket.abandon(error.into()),
        }
    }

    /// Gives a block back once a stream has passed the launch that reads it.
    pub(super) fn fly_block(&mut self, lane: Lane, block: usize) -> Result<(), CudaError> {
        if let Some(event) = self.device.mark(lane)? {
            self.flights[lane as usize].push_back(Flight {
                event,
                done: Done::Block(block),
            });
        }
        Ok(())
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
                self.fly(lane, ticket, outcome);
                true
            }
        }
    }

    /// One step of the job that the CPU takes part in. One at a time: they share the staging memory.
    fn step_staged(&mut self) -> bool {
        if self.active.is_none() {
            let Some(ticket) = self.staged.pop_front() else {
                return false;
            };
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
            Staged::Pipe(pipe) => pipe.step(&mut self.device, &self.staging),
            Staged::Gather(gather) => gather.step(ticket.work(), &mut self.device, &self.staging),
            Staged::Cpu(steps) => steps.step(ticket.work()),
        };
        match step {
            Step::Done(result) => ticket.finish(result),
            Step::Waiting => {
                self.active = Some((ticket, task));
                return false;
            }
            Step::Progress => self.active = Some((ticket, task)),
        }
        true
    }
}

fn lane_of(from: MemoryKind, to: MemoryKind) -> Lane {
    match (from, to) {
        (MemoryKind::Cuda { .. }, MemoryKind::Cuda { .. }) => Lane::Across,
        (MemoryKind::Cuda { .. }, _) => Lane::Out,
        _ => Lane::In,
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
            Work::Checksum { of } => Pipe::checksum(of).map(Self::Pipe),
            Work::Unpack { .. } => Ok(Self::Gather(Gather::new())),
        }
    }
}
