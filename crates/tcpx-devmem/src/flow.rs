//! TCP flows and the rules that put them on a queue.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use super::error::DevmemError;

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
