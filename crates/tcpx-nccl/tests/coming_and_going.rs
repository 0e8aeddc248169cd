//! Comms that come and go leave nothing behind: no descriptor, no thread, no memory with them.
//!
//! A test program of its own, whose tests take turns: each counts what the whole process holds.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

#[expect(dead_code, reason = "not every test needs all of it")]
mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use common::{MIB, Pair, Registered, lane_config, pair, plugin, stream_between, transfer, until};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Held by the test whose turn it is.
static TURN: Mutex<()> = Mutex::new(());

/// Descriptors and threads of this process.
fn held() -> (usize, usize) {
    let count = |folder| std::fs::read_dir(folder).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// A plugin with a comm that uses lanes or not, from its beginning to its end.
fn cycle(transfers: bool) {
    let plugin = plugin(lane_config());
    let pair = pair(&plugin);
    if transfers {
        let mut from = Registered::new(&pair.send, vec![7; MIB], false);
        let mut to = Registered::new(&pair.receive, vec![0; MIB], false);
        transfer(&pair, &mut from, &mut to, MIB, MIB);
        assert!(to.bytes == from.bytes);
    }
}

/// Runs cycles beside three busy loops, all on one core.
fn cycles(count: usize) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let all = sched_getaffinity(None).unwrap();
    let core = (0..CpuSet::MAX_CPU).find(|core| all.is_set(*core)).unwrap();
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).unwrap();
    cycle(true);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending(&done);
        for _ in 0..3 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let before = held();
        for number in 0..count {
            cycle(number % 4 == 0);
        }
        // A socket is kept until the peer's system has its last bytes, and let go of by the next
        // comm.
        until("the end of every descriptor and thread", || {
            let now = held();
            if now.0 > before.0 || now.1 > before.1 {
                cycle(false);
                return None;
            }
            Some(())
        });
    });
}

/// Ends the busy loops, also where an assertion fails beside them.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn sixteen_comms_share_three_lanes() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let plugin = plugin(lane_config());
    let pairs: Vec<Pair> = (0..16).map(|_| pair(&plugin)).collect();
    std::thread::scope(|scope| {
        for pair in &pairs {
            let (send, receive) = (&pair.send, &pair.receive);
            scope.spawn(move || stream_between(send, receive, MIB + 7, 30));
        }
    });
    // 16 own connections and 3 lanes, each seen from both ends, 2 listeners at most beside them.
    let sockets = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .filter(|link| link.to_string_lossy().starts_with("socket:"))
        .count();
    assert!(sockets < 16 * 2 * 3, "{sockets} sockets");
}

#[test]
fn comms_that_come_and_go_leave_no_descriptor() {
    cycles(20);
}

#[test]
#[ignore = "minutes"]
fn two_thousand_comms_leave_no_descriptor() {
    cycles(2000);
}
