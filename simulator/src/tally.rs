//! In how many seeds each thing occurred that a run is there for: one that never does tests nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const NAMES: [&str; 27] = [
    "reset",
    "half-close",
    "stall",
    "stall of all",
    "swallowed link",
    "flipped bit",
    "refused dial",
    "time jump",
    "thread that rests",
    "slow copies",
    "death",
    "one byte at a time",
    "tiny window",
    "cancel",
    "deadline that passed",
    "revoke",
    "leave",
    "fork",
    "several peers",
    "lent pages",
    "lie: never",
    "lie: twice",
    "lie: late",
    "lie: altered",
    "lie: old",
    "early acknowledgement",
    "lanes beyond the agreed",
];

/// Shared with the processes of all seeds: in how many each was seen, and which this one has seen.
struct Tally {
    seeds: &'static [AtomicU64; NAMES.len()],
    seen: AtomicU64,
}

static TALLY: OnceLock<Tally> = OnceLock::new();

/// Before the first seed.
pub fn begin() -> std::io::Result<()> {
    // SAFETY: new memory, of zeroes, which stays until the process ends.
    let seeds = unsafe {
        let memory = libc::mmap(
            std::ptr::null_mut(),
            size_of::<[AtomicU64; NAMES.len()]>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if memory == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        &*memory.cast()
    };
    let seen = AtomicU64::new(0);
    TALLY.get_or_init(|| Tally { seeds, seen });
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
