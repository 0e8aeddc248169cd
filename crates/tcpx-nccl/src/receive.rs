//! The receiving side of a connection: the calls of the host program.

use std::sync::Arc;

use nccl_net::constants::UNPACK_MAX_RECEIVE_BYTES;
use nccl_net::export::{Buffer, DeviceQueue, MemoryRegion, NetComm, NetError, NetRecv, RequestId};
use tcpx_lanes::monitor::{Look, TICK, Watched};
use tcpx_status::{ConnectionReport, Counters};

use crate::admission::Admitted;
use crate::config::Mode;
use crate::device::Device;
use crate::error;
use crate::inbound::{Inbound, Phase, Request, Target};
use crate::landing::Landing;
use crate::lanes::runtime::Runtime;
use crate::memory::{Memory, Place};
use crate::plugin::Shared;
use crate::resume::Comeback;
use crate::scatter::Scatter;
use crate::status::{Comm, Glance, Held, Told};

/// A receiving comm.
#[derive(Debug)]
pub struct RecvComm {
    shared: Arc<Shared>,
    /// Receives keep their request until they are consumed: there is a device queue.
    keeps_received: bool,
    state: Told<State>,
    /// Keeps the process's door open; let go of last.
    _runtime: Arc<Runtime>,
}

#[derive(Debug)]
struct State {
    inbound: Inbound,
    /// Receives consumed so far: the next one to be consumed.
    consumed: u64,
    /// Receives that the host was told are done, and their bytes.
    received: (u64, u64),
}

impl RecvComm {
    /// A comm on an authenticated connection; with `device_queue`, one that can receive into
    /// device memory.
    pub(crate) fn new(
        shared: Arc<Shared>,
        admitted: Admitted,
        number: u64,
        name: String,
        device_queue: bool,
    ) -> Result<(Self, Option<DeviceQueue>), NetError> {
        let scatter = if device_queue && shared.config.mode == Mode::Unpack {
            // Without a GPU the plugin still serves host memory; device memory is then refused
            // when it is registered.
            let device = Device::current(&shared)
                .inspect_err(|error| shared.log.info(&format!("{name}: {error}")))
                .ok();
            Some(Scatter::new(&shared.config, device, shared.seed())?)
        } else {
            None
        };
        let queue = scatter.as_ref().map(Scatter::device_queue);
        let inline_bytes = shared.config.crowded_bytes();
        let runtime = shared.runtime()?;
        let lanes = shared
            .takes_lanes()
            .then(|| Landing::new(Arc::clone(&runtime), number, inline_bytes));
        let link = Arc::new(admitted.link);
        let comeback = Comeback::new(&runtime, admitted.session, admitted.peer.ip());
        let inbound = Inbound::new(link, name, scatter, lanes, Some(comeback));
        let peer = inbound.peer();
        let state = State {
            inbound,
            consumed: 0,
            received: (0, 0),
        };
        let state = Told::new(state, peer);
        let tended = Tended {
            comm: state.glance(),
            shared: Arc::clone(&shared),
            read: 0,
        };
        if let Err(error) = runtime.monitor.watch(Box::new(tended)) {
            let inbound = &mut state.lock().inbound;
            let name = &inbound.name;
            shared
                .log
                .warn(&format!("{name} does not come back: {error}"));
            inbound.comeback = None;
        }
        let comm = Self {
            shared,
            keeps_received: queue.is_some(),
            state,
            _runtime: runtime,
        };
        Ok((comm, queue))
    }

    fn lock(&self) -> Held<'_, State> {
        self.state.lock()
    }
}

impl NetComm for RecvComm {
    type Memory = Memory;

    fn register(&self, region: MemoryRegion) -> Result<Memory, NetError> {
        let device = Device::for_registration(&self.shared, region)?;
        if let Some(device) = &device
            && self.shared.config.mode == Mode::Cuda
        {
            let state = self.lock();
            // There is a runtime: without one the settings would have been refused.
            if let Some(lanes) = &state.inbound.lanes {
                lanes.runtime.watch(device);
            }
        } else if let Some(device) = &device {
            // The pool was made in accept: the device that gathers from it must be the same.
            let state = self.lock();
            let scatter = state.inbound.scatter.as_ref();
            if !scatter
                .and_then(Scatter::device)
                .is_some_and(|own| own.is(device))
            {
                return Err(NetError::invalid_argument(format!(
                    "{}: device memory of {device:?} cannot be received: accept was called without a \
                     device handle, or with another GPU's context or none; call it as regMr is called",
                    state.inbound.name
                )));
            }
        }
        Memory::new(region, device.as_ref())
    }

    fn deregister(&self, memory: Memory) -> Result<(), NetError> {
        let mut state = self.lock();
        let given_up = state.inbound.give_up(memory.id());
        memory.deregister(given_up, &self.shared.log)
    }

    fn test(&self, id: RequestId) -> Result<Option<usize>, NetError> {
        let mut state = self.lock();
        let inbound = &mut state.inbound;
        let Some((sequence, _)) = inbound.ring.find(id) else {
            return Err(state.unknown(id, "is not in flight"));
        };
        // What lanes brought needs no system call.
        if let Some(bytes) = inbound.landed(sequence) {
            inbound.ring.remove(id);
            state.count(bytes);
            return Ok(Some(bytes));
        }
        if inbound.alive().is_ok()
            && let Some(lanes) = &mut inbound.lanes
            && !lanes.is_time_to_look()
        {
            return Ok(None);
        }
        let progress = inbound
            .progress(&self.shared.log)
            .or_else(|_| inbound.outlook(sequence));
        let Some(request) = inbound.ring.by_id(id) else {
            return Err(state.unknown(id, "is not in flight"));
        };
        match request.phase {
            Phase::Done { reported: false } => {
                request.phase = Phase::Done { reported: true };
                let size = request.size;
                if !self.keeps_received {
                    state.inbound.ring.remove(id);
                }
                state.count(size);
                Ok(Some(size))
            }
            Phase::Done { reported: true } => Err(state.unknown(id, "was reported done before")),
            _ => self.state.answer(progress.map(|()| None)),
        }
    }
}

impl NetRecv for RecvComm {
    fn irecv(
        &self,
        buffer: Buffer,
        _tag: i32,
        memory: &Memory,
    ) -> Result<Option<RequestId>, NetError> {
        let place = memory.place(buffer)?;
        let mut state = self.lock();
        let inbound = &mut state.inbound;
        let mut on_device = None;
        let target = match place {
            Place::Host => Target::Host(buffer),
            Place::Device(slice) if self.shared.config.mode == Mode::Cuda => {
                on_device = Some(slice);
                Target::Gpu
            }
            Place::Device(_) if inbound.scatter.is_none() => {
                return Err(NetError::invalid_argument(format!(
                    "{}: a receive into device memory needs a device queue, and accept was not asked \
                     for one; pass a device handle of type 1, version 7 to accept",
                    inbound.name
                )));
            }
            Place::Device(_) if buffer.len > UNPACK_MAX_RECEIVE_BYTES => {
                let (limit, why) = (
                    UNPACK_MAX_RECEIVE_BYTES,
                    "a queue slot holds 2048 fragments",
                );
                let sequence = inbound.ring.posted();
                return Err(inbound.too_large(sequence, buffer.len as u64, limit as u64, why));
            }
            Place::Device(_) => Target::Device,
        };
        inbound.alive()?;
        if inbound.ring.is_full() {
            inbound.progress(&self.shared.log)?;
            return Ok(None);
        }
        let number = inbound.ring.posted();
        // Also for host memory: an empty slot says that nothing is to be gathered.
        if let Some(scatter) = &mut inbound.scatter {
            scatter.post(number);
        }
        if let Some(lanes) = &mut inbound.lanes {
            lanes.post(number, buffer, on_device);
        }
        let id = inbound
            .ring
            .post(Request::new(target, buffer.len, memory.id()));
        // What fails now is told again by test, which is where the host looks for it.
        let _ = inbound.progress(&self.shared.log);
        Ok(id)
    }

    fn keeps_received(&self) -> bool {
        self.keeps_received
    }

    fn consumed(&self, id: RequestId) -> Result<(), NetError> {
        if !self.keeps_received {
            return Ok(());
        }
        let mut state = self.lock();
        let number = state.consumed;
        let oldest = state.inbound.ring.by_sequence(number).map(|oldest| {
            let reported = matches!(oldest.phase, Phase::Done { reported: true });
            (reported, matches!(oldest.target, Target::Device))
        });
        let disorder = |why: &str| {
            Err(NetError::internal(format!(
                "{}: irecvConsumed {why}; consume receives strictly in the order of irecv, after test said done",
                state.inbound.name
            )))
        };
        let Some((reported, is_device)) = oldest else {
            return disorder("was called with no receive outstanding");
        };
        if crate::ring::id(number) != id {
            return disorder(&format!(
                "named request {}, the oldest is request {} (receive {number})",
                id.0,
                crate::ring::id(number).0
            ));
        }
        if !reported {
            return disorder(&format!("came before receive {number} was done"));
        }
        state.inbound.ring.remove(id);
        state.consumed += 1;
        if let (true, Some(scatter)) = (is_device, &mut state.inbound.scatter) {
            scatter.consume(number);
        }
        // Pages came back: a message that waited for them goes on without waiting for a test.
        let _ = state.inbound.progress(&self.shared.log);
        Ok(())
    }
}

/// A comm as the monitor knows it.
#[derive(Debug)]
struct Tended {
    comm: Glance<State>,
    shared: Arc<Shared>,
    /// Bytes that it had read at the last look.
    read: u64,
}

impl Watched for Tended {
    fn look(&mut self) -> Look {
        let Self { comm, shared, read } = self;
        let tend = |state: &mut State| state.inbound.tend(read, &shared.log);
        comm.look(tend, Look::In(TICK), Look::Gone)
    }
}

impl State {
    fn count(&mut self, bytes: usize) {
        self.received = (self.received.0 + 1, self.received.1 + bytes as u64);
    }

    fn unknown(&self, id: RequestId, why: &str) -> NetError {
        error::unknown_request(&self.inbound.name, id, why)
    }
}

impl Comm for State {
    fn tell(&self, report: &mut ConnectionReport) {
        self.inbound.tell(report);
    }

    fn counters(&self) -> Counters {
        let (operations_completed, bytes_received) = self.received;
        Counters {
            bytes_received,
            operations_completed,
            operations_failed: u64::from(self.failure().is_some()),
            ..self.inbound.counters()
        }
    }

    fn failure(&self) -> Option<&NetError> {
        self.inbound.failure()
    }
}
