//! The worker of a process without a GPU.

use super::queue::JobQueue;
use crate::cpu;

/// Says that a job fails, as those of a GPU may, where a simulation has set it.
#[cfg(feature = "simulation")]
pub static FAILS: std::sync::OnceLock<fn() -> bool> = std::sync::OnceLock::new();
/// How many jobs have room in the queue, where a simulation has set it.
#[cfg(feature = "simulation")]
pub static HOST_ROOM: std::sync::OnceLock<usize> = std::sync::OnceLock::new();

/// Runs jobs in order until the queue stops and is empty.
pub(super) fn run(queue: &JobQueue) {
    loop {
        // Read before the queue: after a stop nothing more is submitted.
        let stopping = queue.is_stopping();
        match queue.pop() {
            Some(ticket) => {
                #[cfg(feature = "simulation")]
                if FAILS.get().is_some_and(|fails| fails()) {
                    ticket.finish(Err(crate::CudaError::NoCurrentContext.into()));
                    continue;
                }
                let result = cpu::run(ticket.work());
                ticket.finish(result);
            }
            None if stopping => return,
            None => queue.sleep(None),
        }
    }
}
