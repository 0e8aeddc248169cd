//! What the data path gets: queues and memory that are bound, and flows that are steered to them.

use std::any::Any;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use tcpx_memory::{BouncePool, DmaBuf, RegionSlice};

use super::error::DevmemError;

/// A bound receive queue, as the data path sees it. Clones are the same queue; the last of them and
/// of the rules made from it unbinds the queue and puts the card's settings back.
#[derive(Clone, Debug)]
pub struct ReceiveQueue {
    /// Where payload lands. Fragment offsets count from its start.
    pub pool: Arc<BouncePool>,
    /// The kernel's number for the bound memory, in every device record.
    pub dmabuf_id: u32,
    /// The card's interface.
    pub interface: String,
    /// The interface's number.
    pub ifindex: u32,
    /// The queue's number, from 0.
    pub queue: u32,
    steering: Arc<dyn Steering>,
}

impl ReceiveQueue {
    /// A queue out of its parts. `steering` owns the binding.
    pub fn new(
        pool: Arc<BouncePool>,
        dmabuf_id: u32,
        interface: String,
        ifindex: u32,
        queue: u32,
        steering: Arc<dyn Steering>,
    ) -> Self {
        Self {
            pool,
            dmabuf_id,
            interface,
            ifindex,
            queue,
            steering,
        }
    }

    /// Puts a flow on this queue for as long as the answer lives.
    ///
    /// The kernel does not check that a rule works: only device records prove it.
    ///
    /// # Errors
    /// The card or its driver refuses the rule.
    pub fn steer(&self, flow: Flow) -> Result<FlowRule, DevmemError> {
        FlowRule::new(Arc::clone(&self.steering), flow)
    }
}

/// Memory bound for sending on one interface. Clones are the same binding; the last one unbinds.
#[derive(Clone, Debug)]
pub struct SendPath {
    /// The kernel's number for the bound memory, for `SCM_DEVMEM_DMABUF`.
    pub dmabuf_id: u32,
    /// The card's interface; the socket must be bound to it (`SO_BINDTODEVICE`).
    pub interface: String,
    /// The interface's number.
    pub ifindex: u32,
    memory: DmaBuf,
    _binding: Arc<dyn Any + Send + Sync>,
}

impl SendPath {
    /// A path out of its parts; `binding` unbinds when it is dropped.
    pub fn new(
        memory: DmaBuf,
        dmabuf_id: u32,
        interface: String,
        ifindex: u32,
        binding: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            dmabuf_id,
            interface,
            ifindex,
            memory,
            _binding: binding,
        }
    }

    /// The memory.
    pub fn memory(&self) -> &DmaBuf {
        &self.memory
    }

    /// Where a slice lies in the bound memory, in bytes from its start: what the iovec of a send
    /// must point at. `None` when the slice is of another region.
    pub fn offset_of(&self, slice: &RegionSlice) -> Option<u64> {
        self.memory.offset_of(slice)
    }
}

/// One direction of a TCP connection, as packets arrive here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Our end: the packets' destination.
    pub local: SocketAddr,
    /// The peer's end: the packets' source. `None` steers every peer of the local port.
    pub remote: Option<SocketAddr>,
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.remote {
            Some(remote) => write!(f, "{remote} to {}", self.local),
            None => write!(f, "anyone to {}", self.local),
        }
    }
}

/// Who puts flows on a bound queue and takes them off again: the kernel, or a fake in tests. What
/// implements it owns the binding.
pub trait Steering: Send + Sync + fmt::Debug {
    /// Makes a rule; the answer names it for [`Self::remove`].
    ///
    /// # Errors
    /// The card or its driver refuses the rule.
    fn insert(&self, flow: Flow) -> Result<u32, DevmemError>;

    /// Removes a rule. It is called from destructors: what fails is logged, and stays recorded for
    /// `tcpx devmem release`.
    fn remove(&self, rule: u32);
}

/// A flow that goes to the queue; dropping it ends that. It keeps the queue bound.
#[derive(Debug)]
pub struct FlowRule {
    steering: Arc<dyn Steering>,
    rule: u32,
}

impl FlowRule {
    pub(super) fn new(steering: Arc<dyn Steering>, flow: Flow) -> Result<Self, DevmemError> {
        let rule = steering.insert(flow)?;
        Ok(Self { steering, rule })
    }
}

impl Drop for FlowRule {
    fn drop(&mut self) {
        self.steering.remove(self.rule);
    }
}
