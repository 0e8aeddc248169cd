//! A receive queue whose payload lands in a pool.

use std::sync::Arc;

use tcpx_memory::BouncePool;

use super::error::DevmemError;
use super::flow::{Flow, FlowRule, Steering};

/// A bound receive queue, as the data path sees it. Clones are the same queue; the last of them and of
/// the rules made from it unbinds the queue and puts the card's settings back.
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
