//! Transfers of an agent to itself: copies, for nothing of them leaves the process.

use std::sync::Arc;

use crate::abi::Status;
use crate::agent::Agent;
use crate::flight::Flight;
use crate::memory::{Hold, Registered};

/// Bytes that a poster copies by itself, and that are copied before it is looked whether the
/// transfer was taken back.
const AT_ONCE: u64 = 1 << 20;

impl Agent {
    /// Moves what a flight moves within this agent; `false` where memory of a GPU takes part, which
    /// the engine copies.
    pub(crate) fn move_within(self: &Arc<Self>, flight: &Arc<Flight>) -> bool {
        let plan = &flight.plan;
        let remotes = plan.remotes.iter();
        let remotes: Option<Vec<_>> = remotes.map(|it| self.region(&it.info.name)).collect();
        let Some(remotes) = remotes else {
            flight.end(Status::NOT_FOUND);
            return true;
        };
        if !plan.locals.iter().chain(&remotes).all(|one| one.is_host()) {
            return false;
        }
        let hold = |all: &[Arc<Registered>]| all.iter().map(Registered::hold).collect();
        let (locals, remotes): (Option<Vec<Hold>>, Option<Vec<Hold>>) =
            (hold(&plan.locals), hold(&remotes));
        let Some((locals, remotes)) = locals.zip(remotes) else {
            flight.end(Status::NOT_FOUND);
            return true;
        };
        let (agent, its) = (Arc::clone(self), Arc::clone(flight));
        let body = move || {
            let status = copy(&its, &locals, &remotes);
            drop((locals, remotes));
            let told = match &its.notice {
                Some(notice) if status == Status::SUCCESS => agent.notify(&agent.name, notice),
                _ => status,
            };
            its.end(told);
        };
        if plan.bytes <= AT_ONCE {
            body();
        } else if let Err(error) = self.spawn("tcpx-nixl-copy", body) {
            tracing::error!("no thread for a transfer of this agent to itself: {error}");
            flight.end(Status::BACKEND);
        }
        true
    }
}

fn copy(flight: &Flight, locals: &[Hold], remotes: &[Hold]) -> Status {
    for run in &flight.plan.runs {
        let local = (&locals[run.local as usize], run.local_offset);
        let remote = (&remotes[run.remote as usize], run.remote_offset);
        let ((from, start), (to, place)) = match flight.plan.is_write {
            true => (local, remote),
            false => (remote, local),
        };
        let mut done = 0;
        while done < run.len {
            if flight.is_over() {
                return Status::CANCELED;
            }
            let len = (run.len - done).min(AT_ONCE);
            if let Err(error) = from.copy_to(start + done, to, place + done, len) {
                tracing::error!("a transfer of this agent to itself failed: {error}");
                return Status::BACKEND;
            }
            done += len;
        }
    }
    Status::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::RemoteRegion;
    use crate::config::Config;
    use crate::plan::Plan;

    #[test]
    fn memory_of_one_agent_is_copied_where_it_lies() {
        let agent = Agent::start("agent", Config::read(&[], |_| None).unwrap()).unwrap();
        let at_once = AT_ONCE as usize;
        for len in [2, at_once, at_once + 1, 3 * at_once + 5] {
            let mut memory = [vec![1_u8; len], vec![2_u8; len]];
            let addresses = memory.each_mut().map(|bytes| bytes.as_mut_ptr().addr());
            let [one, other] = addresses.map(|address| agent.register(address, len, None).unwrap());
            let remote = |memory: &Registered| RemoteRegion {
                address: memory.address,
                info: agent.region_info(memory),
            };
            for (is_write, bytes) in [(true, 1), (false, 7)] {
                let pieces = [(0, len / 2), (len / 2, len - len / 2)];
                let locals =
                    pieces.map(|(at, len)| Some((Arc::clone(&one), one.address + at, len)));
                let remotes =
                    pieces.map(|(at, len)| Some((remote(&other), other.address + at, len)));
                let plan = Plan::new(is_write, locals.into_iter(), remotes.into_iter()).unwrap();
                let flight = Flight::new(Arc::new(plan), None);
                assert!(agent.move_within(&flight));
                while !flight.is_over() {
                    std::thread::yield_now();
                }
                assert_eq!(flight.status(), Status::SUCCESS);
                assert!(
                    memory
                        .iter()
                        .all(|all| all.iter().all(|byte| *byte == bytes))
                );
                memory[1].fill(7);
            }
            for registered in [&one, &other] {
                assert_eq!(agent.deregister(registered), Status::SUCCESS);
            }
            let plan = Plan::new(
                true,
                [Some((Arc::clone(&one), one.address, len))].into_iter(),
                [Some((remote(&other), other.address, len))].into_iter(),
            );
            let flight = Flight::new(Arc::new(plan.unwrap()), None);
            assert!(agent.move_within(&flight));
            assert_eq!(flight.status(), Status::NOT_FOUND, "it is deregistered");
        }
        agent.stop();
    }
}
