//! In how many seeds each thing occurred that a run is there for: one that never does tests
//! nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const NAMES: [&str; 36] = [
    "reset",
    "half-close",
    "stall",
    "stall of all",
    "swallowed link",
    "cut lane",
    "lane left alone",
    "flipped bit",
    "refused dial",
    "time jump",
    "thread that rests",
    "held lane",
    "slow copies",
    "failed copy",
    "death",
    "one byte at a time",
    "tiny window",
    "cancel",
    "close amid operations",
    "deadline that passed",
    "revoke",
    "leave",
    "fork",
    "several peers",
    "peer that takes nothing",
    "lent pages",
    "flood of messages",
    "lie: never",
    "lie: twice",
    "lie: late",
    "lie: altered",
    "lie: old",
    "early acknowledgement",
    "lanes beyond the agreed",
    "payload read where it lies",
    "full queue",
];

/// Shared with the processes of all seeds: in how many each was seen, and which this one has seen.
struct Tally {
    seeds: &'static [AtomicU64; NAMES.len()],
    /// Most bytes that a run had allocated for each end of a connection.
    most: &'static AtomicU64,
    seen: AtomicU64,
}

static TALLY: OnceLock<Tally> = OnceLock::new();

/// Before the first seed.
pub fn begin() -> std::io::Result<()> {
    // SAFETY: new memory, of zeroes, which stays until the process ends.
    let (seeds, most) = unsafe {
        let memory = libc::mmap(
            std::ptr::null_mut(),
            size_of::<([AtomicU64; NAMES.len()], AtomicU64)>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if memory == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let shared: &([AtomicU64; NAMES.len()], AtomicU64) = &*memory.cast();
        (&shared.0, &shared.1)
    };
    let seen = AtomicU64::new(0);
    TALLY.get_or_init(|| Tally { seeds, most, seen });
    Ok(())
}

/// It has occurred in this seed.
pub fn saw(name: &str) {
    let Some(tally) = TALLY.get() else {
        return;
    };
    let Some(at) = NAMES.iter().position(|one| *one == name) else {
        crate::system::fail(&format!("{name} is not counted"));
    };
    if tally.seen.fetch_or(1 << at, Ordering::Relaxed) & (1 << at) == 0 {
        tally.seeds[at].fetch_add(1, Ordering::Relaxed);
    }
}

/// A run had allocated so many bytes for each end of a connection.
pub fn needed(bytes: usize) {
    if let Some(tally) = TALLY.get() {
        tally.most.fetch_max(bytes as u64, Ordering::Relaxed);
    }
}

/// The most of that among all runs.
pub fn most_needed() -> u64 {
    TALLY
        .get()
        .map_or(0, |tally| tally.most.load(Ordering::Relaxed))
}

/// In how many seeds each was seen, the rarest first.
pub fn all() -> Vec<(u64, &'static str)> {
    let counts = TALLY.get().map(|tally| tally.seeds);
    let counts = counts.into_iter().flatten();
    let mut all: Vec<_> = counts
        .map(|count| count.load(Ordering::Relaxed))
        .zip(NAMES)
        .collect();
    all.sort_unstable();
    all
}
