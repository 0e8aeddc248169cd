//! The worker of a process without a GPU.

use super::queue::JobQueue;
use crate::cpu;

/// Runs jobs in order until the queue stops and is empty.
pub(super) fn run(queue: &JobQueue) {
    loop {
        // Read before the queue: after a stop nothing more is submitted.
        let stopping = queue.is_stopping();
        match queue.pop() {
            Some(ticket) => {
                let result = cpu::run(ticket.work());
                ticket.finish(result);
            }
            None if stopping => return,
            None => queue.sleep(None),
        }
    }
}
