//! The receiving side of a connection: the calls of the host program.

use std::sync::Arc;

use nccl_net::export::{Buffer, MemoryRegion, NetComm, NetError, NetRecv, RequestId};
use tcpx_lanes::monitor::{Look, TICK, Watched};
use tcpx_status::{ConnectionReport, Counters};

use crate::admission::Admitted;
use crate::device::Device;
use crate::error;
use crate::inbound::{Inbound, Phase, Request, Target};
use crate::landing::Landing;
use crate::lanes::runtime::Runtime;
use crate::memory::{BufferPlace, Memory};
use crate::plugin::ProcessState;
use crate::status::{Comm, Glance, Held, Told};

/// A receiving comm.
#[derive(Debug)]
pub struct RecvComm {
    shared: Arc<ProcessState>,
    state: Told<State>,
    /// Keeps the process's door open; let go of last.
    _runtime: Arc<Runtime>,
}

#[derive(Debug)]
struct State {
    inbound: Inbound,
    /// Receives that the host was told are done, and their bytes.
    received: (u64, u64),
}

impl RecvComm {
    /// A comm that an authenticated connection introduces.
    pub(crate) fn new(
        shared: Arc<ProcessState>,
        admitted: Admitted,
        number: u64,
        name: String,
    ) -> Result<Self, NetError> {
        let inline_bytes = shared.config.crowded_bytes();
        let runtime = shared.runtime()?;
        let lanes = shared
            .takes_lanes()
            .then(|| Landing::new(Arc::clone(&runtime), number, inline_bytes));
        let link = Arc::new(admitted.link);
        let inbound = Inbound::new(link, name, lanes, admitted.comeback);
        let peer = inbound.peer();
        let state = State {
            inbound,
            received: (0, 0),
        };
        let state = Told::new(state, peer);
        let tended = Tended {
            comm: state.glance(),
            shared: Arc::clone(&shared),
            read: 0,
        };
        runtime.watch_over(tended)?;
        Ok(Self {
            shared,
            state,
            _runtime: runtime,
        })
    }

    fn lock(&self) -> Held<'_, State> {
        self.state.lock()
    }
}

impl NetComm for RecvComm {
    type Memory = Memory;

    fn register(&self, region: MemoryRegion) -> Result<Memory, NetError> {
        let device = Device::for_registration(&self.shared, region)?;
        if let Some(device) = &device {
            let state = self.lock();
            // There is a runtime: without one the settings would have been refused.
            if let Some(lanes) = &state.inbound.lanes {
                lanes.runtime.watch(device);
            }
        }
        Memory::new(region, device.as_ref())
    }

    fn deregister(&self, memory: Memory) -> Result<(), NetError> {
        let mut state = self.lock();
        let given_up = state.inbound.give_up(memory.id());
        memory.deregister(given_up, &self.shared.log)
    }

    fn close(self) -> Result<(), NetError> {
        let closed = self.state.end(|state| state.inbound.close());
        closed.map_or(Ok(()), |(_, closed)| closed)
    }

    fn test(&self, id: RequestId) -> Result<Option<usize>, NetError> {
        let mut state = self.lock();
        let inbound = &mut state.inbound;
        let Some((sequence, _)) = inbound.ring.find(id) else {
            return Err(error::unknown_request(&state.inbound.name, id));
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
            return Err(error::unknown_request(&state.inbound.name, id));
        };
        match request.phase {
            Phase::Done => {
                let size = request.size;
                state.inbound.ring.remove(id);
                state.count(size);
                Ok(Some(size))
            }
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
            BufferPlace::Host => Target::Host(buffer),
            BufferPlace::Device(slice) => {
                on_device = Some(slice);
                Target::Gpu
            }
        };
        inbound.alive()?;
        if inbound.ring.is_full() {
            inbound.progress(&self.shared.log)?;
            return Ok(None);
        }
        let number = inbound.ring.posted();
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
}

/// A comm as the monitor knows it.
#[derive(Debug)]
struct Tended {
    comm: Glance<State>,
    shared: Arc<ProcessState>,
    /// Bytes that it had read at the last look.
    read: u64,
}

impl Watched for Tended {
    fn check_liveness(&mut self) -> Look {
        let Self { comm, shared, read } = self;
        let tend = |state: &mut State| state.inbound.tend(read, &shared.log);
        comm.with_comm(tend, Look::In(TICK), Look::Gone)
    }
}

impl State {
    fn count(&mut self, bytes: usize) {
        self.received = (self.received.0 + 1, self.received.1 + bytes as u64);
    }
}

impl Comm for State {
    fn describe(&self, report: &mut ConnectionReport) {
        self.inbound.describe(report);
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

#[cfg(test)]
mod tests {
    use nccl_net::export::{HostLogger, NetConnect, NetListen, NetPlugin};

    use super::*;
    use crate::config::Config;
    use crate::plugin::TcpxPlugin;

    #[test]
    fn a_close_says_so_where_a_copy_may_still_write_to_the_memory() {
        let config = Config {
            interfaces: "lo".to_owned(),
            lanes: Some(1),
            threads: Some(1),
            ..Config::default()
        };
        let plugin = TcpxPlugin::with_config(config, HostLogger::default()).unwrap();
        for is_copying in [false, true] {
            let (handle, listen) = plugin.listen(0).unwrap();
            let mut connect = plugin.connect(0, &handle).unwrap();
            let (mut send, mut receive) = (None, None);
            while send.is_none() || receive.is_none() {
                send = send.or_else(|| connect.poll().unwrap());
                receive = receive.or_else(|| listen.accept().unwrap());
            }
            let receive = receive.unwrap();
            let recv_stream = {
                let state = receive.lock();
                Arc::clone(&state.inbound.lanes.as_ref().unwrap().recv_stream)
            };
            if is_copying {
                recv_stream.begin_copy();
            }
            let closed = receive.close();
            assert_eq!(closed.is_err(), is_copying, "{closed:?}");
            drop(send);
        }
    }
}
