//! What each thread of this process did meanwhile, for finding the one that holds up the others.

use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

use crate::output::say::aside;

/// Run time, time in the run queue (nanoseconds) and number of turns on a core, by thread.
type Snapshot = BTreeMap<String, [u64; 3]>;

/// Says what it saw when it is dropped.
#[derive(Debug)]
pub(super) struct Threads {
    what: String,
    since: Instant,
    before: Snapshot,
}

fn snapshot() -> Snapshot {
    let mut all = Snapshot::new();
    for task in fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
    {
        let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let numbers: Vec<u64> = read("schedstat")
            .split_whitespace()
            .filter_map(|number| number.parse().ok())
            .collect();
        if let &[run, wait, turns] = numbers.as_slice() {
            let name = format!(
                "{} {}",
                read("comm").trim(),
                task.file_name().to_string_lossy()
            );
            all.insert(name, [run, wait, turns]);
        }
    }
    all
}

impl Threads {
    /// Starts to watch, if that is wanted.
    pub(super) fn watch(wanted: bool, what: &str) -> Option<Self> {
        wanted.then(|| Self {
            what: what.to_owned(),
            since: Instant::now(),
            before: snapshot(),
        })
    }
}

impl Drop for Threads {
    /// One line a thread that ran at least a hundredth of the time: name, share of a core, share of the
    /// time that it waited for one, turns a second.
    fn drop(&mut self) {
        let nanos = self.since.elapsed().as_nanos() as f64;
        for (name, now) in snapshot() {
            let before = self.before.get(&name).copied().unwrap_or_default();
            let [run, wait, turns] = [0, 1, 2].map(|at| now[at].saturating_sub(before[at]) as f64);
            if run > nanos / 100.0 {
                let name = name.rsplit_once(' ').map_or("", |(name, _)| name);
                aside!(
                    "  {} {name:<16} {:>3.0} % of a core, {:>3.0} % queued, {:>7.0} turns/s, {:>5.1} us each",
                    self.what,
                    100.0 * run / nanos,
                    100.0 * wait / nanos,
                    turns / nanos * 1e9,
                    run / turns.max(1.0) / 1e3,
                );
            }
        }
    }
}
