//! The network: channels whose payload lands in a bound queue's pool.

use std::os::fd::AsFd;
use std::sync::Arc;

use tcpx_lanes::waker::Waker;

use super::bound::{ReceiveQueue, SendPath};
use super::calls::{LinuxSockets, SocketCalls};
use super::channel::{DevmemChannel, Parts};
use super::inflow::{Inflow, Target};
use super::landing::LandingRing;
use super::pool_use::{PoolUse, limit_queue};
use super::set_up::{self, Lanes};
use super::slots::{SLOT_BYTES, SendSlots};
use super::stage::Stage;
use super::zero_copy;
use tcpx_net::channel::Channel;
use tcpx_net::error::{NetworkError, SocketError};
use tcpx_net::network::{Exchange, Features, Network, Setup};

/// The network's name.
pub(super) const NAME: &str = "devmem";

/// Chunks in flight for each channel and direction.
const WINDOW: u16 = 16;
/// Longest pool: offsets of fragments are 32 bits wide where they are unpacked.
const MOST_POOL: u64 = 1 << 32;
/// Most channels of one connection.
const MAX_CHANNELS: u16 = 32;

/// What the network may use. Without any of it, payload goes through host memory on both sides, and
/// the network is a slow way of plain TCP.
#[derive(Debug, Default)]
pub struct DevmemOptions {
    /// Queues that payload lands in; channels take them in turn.
    pub receive: Vec<ReceiveQueue>,
    /// Memory that the card sends from; without it, the CPU sends. Chunks are copied to it first.
    pub send: Option<SendPath>,
    /// The interface that payload leaves through; `None`: that of the first queue or of `send`,
    /// else as the routes say.
    pub interface: Option<String>,
}

/// Device-memory TCP of the mainline kernel.
#[derive(Debug)]
pub struct DevmemNetwork {
    receive: Vec<(ReceiveQueue, Target)>,
    send: Option<Arc<SendSlots>>,
    interface: Option<String>,
    calls: Arc<dyn SocketCalls>,
}

impl DevmemNetwork {
    /// A network over these queues.
    ///
    /// # Errors
    /// A pool of more than 4 GiB; memory to send from that is in use by others, or shorter than one
    /// chunk (1 MiB).
    pub fn new(options: DevmemOptions) -> Result<Self, NetworkError> {
        Self::with_calls(options, Arc::new(LinuxSockets))
    }

    /// As [`Self::new`], with other system calls: for tests of what a kernel may answer.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn with_calls(
        options: DevmemOptions,
        calls: Arc<dyn SocketCalls>,
    ) -> Result<Self, NetworkError> {
        let failed = |cause: String| NetworkError::Memory {
            network: NAME.to_owned(),
            cause,
        };
        for queue in &options.receive {
            let bytes = queue.pool.len() as u64;
            if bytes > MOST_POOL {
                return Err(failed(format!(
                    "the pool of {} has {bytes} bytes, the unpackers reach {MOST_POOL}; bind less",
                    queue.interface
                )));
            }
        }
        let interface = options
            .interface
            .or_else(|| options.receive.first().map(|queue| queue.interface.clone()))
            .or_else(|| options.send.as_ref().map(|path| path.interface.clone()));
        let send = match options.send {
            Some(path) if path.memory().len() < SLOT_BYTES => {
                return Err(failed(format!(
                    "the memory to send from has {} bytes, one chunk needs {SLOT_BYTES}; bind more",
                    path.memory().len()
                )));
            }
            Some(path) => Some(SendSlots::new(path).map_err(|error| failed(error.to_string()))?),
            None => None,
        };
        let with_target = |queue: ReceiveQueue| {
            let target = Target {
                pool: Arc::clone(&queue.pool),
                dmabuf_id: queue.dmabuf_id,
                usage: PoolUse::of(queue.pool.len() as u64),
            };
            (queue, target)
        };
        Ok(Self {
            receive: options.receive.into_iter().map(with_target).collect(),
            send,
            interface,
            calls,
        })
    }

    fn channel(
        &self,
        index: usize,
        lanes: Lanes,
        setup: &Setup<'_>,
    ) -> Result<DevmemChannel, NetworkError> {
        let memory = |error: tcpx_memory::MemoryError| NetworkError::Memory {
            network: NAME.to_owned(),
            cause: error.to_string(),
        };
        let system = |operation: &'static str, cause: std::io::Error| SocketError::Io {
            operation,
            address: setup.peer.to_string(),
            cause: cause.into(),
            hint: "; raise the limit on descriptors (ulimit -n)",
        };
        let queue = self.queue(index);
        let landing = LandingRing::new().map_err(memory)?;
        let signal = Waker::new().map_err(|error| system("eventfd", error.into()))?;
        let signal = Arc::new(signal);
        let send = match &self.send {
            Some(slots) => zero_copy::enable(lanes.payload.as_fd())
                .map(|()| Some(Arc::clone(slots)))
                .map_err(|error| system("SO_ZEROCOPY", error))?,
            None => None,
        };
        let lands = match queue {
            Some((queue, _)) => format!(
                "payload lands in {} MiB of {} through queue {} of {}",
                queue.pool.len() >> 20,
                queue.pool.kind(),
                queue.queue,
                queue.interface
            ),
            None => "payload lands in host memory".to_owned(),
        };
        let leaves = match &send {
            Some(_) => "leaves device memory",
            None => "leaves host memory",
        };
        let parts = Parts {
            name: format!("{NAME} to {}; {lands}, {leaves}", setup.peer),
            plain_name: format!("{NAME} to {}; over plain TCP", setup.peer),
            calls: Arc::clone(&self.calls),
            payload: lanes.payload.into(),
            ordinary: lanes.ordinary.into(),
            rule: lanes.rule,
            inflow: Inflow::new(queue.map(|(_, target)| target.clone()), landing),
            stage: Stage::new(setup.workers, send, Arc::clone(&signal)).map_err(memory)?,
            signal,
            window: WINDOW,
        };
        Ok(DevmemChannel::new(parts).map_err(|error| system("epoll_create", error.into()))?)
    }

    /// Before any payload may come: what waits unread leaves room in the pool.
    fn limit_queues(&self, lanes: &[Lanes], setup: &Setup<'_>) -> Result<(), NetworkError> {
        let parts: Vec<_> = self
            .receive
            .iter()
            .enumerate()
            .map(|(number, (_, target))| {
                let taken_in_turn = lanes.len().saturating_sub(number);
                let more = taken_in_turn.div_ceil(self.receive.len()) as u64;
                target.usage.part_for(target.pool.len() as u64, more)
            })
            .collect();
        for (lane, part) in lanes.iter().zip(parts.iter().cycle()) {
            limit_queue(&lane.payload, *part).map_err(|cause| SocketError::Io {
                operation: "SO_RCVBUF",
                address: setup.peer.to_string(),
                cause: cause.into(),
                hint: "; the peer may have closed the connection: look at its log",
            })?;
        }
        Ok(())
    }

    fn queue(&self, index: usize) -> Option<&(ReceiveQueue, Target)> {
        let count = self.receive.len().max(1);
        self.receive.get(index % count)
    }
}

impl Network for DevmemNetwork {
    fn features(&self, asked: u16) -> Features {
        Features {
            name: NAME.to_owned(),
            channels: asked.clamp(1, MAX_CHANNELS),
            chunk_bytes: 1 << 20,
            pieces: 1,
            taper: None,
            windows: (WINDOW, WINDOW),
            is_addressed: false,
            works_in_poll: true,
        }
    }

    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let wanted = setup.channels.clamp(1, MAX_CHANNELS);
        let interface = self.interface.as_deref();
        let mut lanes = set_up::open(wanted, interface, setup, exchange)?;
        self.limit_queues(&lanes, setup)?;
        let steered = lanes.iter_mut().enumerate().try_for_each(|(index, lanes)| {
            if let Some((queue, _)) = self.queue(index) {
                lanes.rule = Some(queue.steer(lanes.flow(setup.peer)?)?);
            }
            Ok(())
        });
        set_up::agree_on_start(steered, setup, exchange)?;
        let mut channels: Vec<Box<dyn Channel>> = Vec::with_capacity(lanes.len());
        for (index, lanes) in lanes.into_iter().enumerate() {
            channels.push(Box::new(self.channel(index, lanes, setup)?));
        }
        Ok(channels)
    }
}
