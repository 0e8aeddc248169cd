//! What a transfer moves: NIXL's two lists of pieces as runs, neighbours in one.

use std::collections::HashMap;
use std::sync::Arc;

use crate::abi::Status;
use crate::agent::RemoteRegion;
use crate::memory::Registered;

/// Runs at least this long are put and got by themselves; shorter ones are gathered.
const ALONE_BYTES: u64 = 128 * 1024;
/// So few runs are put and got by themselves whatever their length: filling and emptying staging memory has
/// each end wake threads, which takes longer than a frame for each run.
pub(crate) const FEW_RUNS: usize = 32;

/// Bytes that follow each other at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Which of [`Plan::locals`].
    pub(crate) local: u32,
    /// Which of [`Plan::remotes`].
    pub(crate) remote: u32,
    pub(crate) local_offset: u64,
    pub(crate) remote_offset: u64,
    pub(crate) len: u64,
}

/// A piece of one of NIXL's lists: which memory, the address, the length.
pub(crate) type Listed<T> = (T, usize, usize);

/// What a transfer moves.
#[derive(Debug)]
pub(crate) struct Plan {
    /// From here to the peer.
    pub(crate) is_write: bool,
    pub(crate) locals: Vec<Arc<Registered>>,
    pub(crate) remotes: Vec<RemoteRegion>,
    /// Runs that are moved by themselves.
    pub(crate) alone: Vec<Run>,
    /// Runs that are gathered.
    pub(crate) gathered: Vec<Run>,
    pub(crate) bytes: u64,
}

impl Plan {
    /// Makes runs of two lists of as many pieces.
    pub(crate) fn new(
        is_write: bool,
        local: impl ExactSizeIterator<Item = Option<Listed<Arc<Registered>>>>,
        remote: impl ExactSizeIterator<Item = Option<Listed<RemoteRegion>>>,
    ) -> Result<Self, Status> {
        if local.len() != remote.len() {
            return Err(Status::MISMATCH);
        }
        let mut locals: Vec<Arc<Registered>> = Vec::new();
        let mut remotes: Vec<RemoteRegion> = Vec::new();
        let mut runs: Vec<Run> = Vec::with_capacity(local.len());
        let mut bytes = 0u64;
        let (mut local_places, mut remote_places) = (Places::default(), Places::default());
        for (local, remote) in local.zip(remote) {
            let ((memory, address, len), (region, remote_address, remote_len)) =
                local.zip(remote).ok_or(Status::INVALID_PARAM)?;
            if len != remote_len {
                return Err(Status::MISMATCH);
            }
            let local_offset = memory
                .offset_of(address, len)
                .ok_or(Status::INVALID_PARAM)?;
            let remote_offset = region
                .offset_of(remote_address, len)
                .ok_or(Status::INVALID_PARAM)?;
            if len == 0 {
                continue;
            }
            let run = Run {
                local: local_places.of(memory.id, || locals.push(memory)),
                remote: remote_places.of(region.id, || remotes.push(region)),
                local_offset: local_offset as u64,
                remote_offset,
                len: len as u64,
            };
            bytes = bytes.checked_add(run.len).ok_or(Status::INVALID_PARAM)?;
            match runs.last_mut() {
                Some(last) if last.is_followed_by(&run) => last.len += run.len,
                _ => runs.push(run),
            }
        }
        let on_host = locals.iter().all(|memory| memory.is_host())
            && remotes.iter().all(|region| !region.on_gpu);
        let overlaps = || any_overlap(&runs, is_write);
        let (alone, gathered) = if !on_host || runs.len() == 1 {
            (runs, Vec::new())
        } else if overlaps() {
            // Nobody says which of them wins, but each alone would find its destination in use.
            (Vec::new(), runs)
        } else if runs.len() <= FEW_RUNS {
            (runs, Vec::new())
        } else {
            runs.into_iter().partition(|run| run.len >= ALONE_BYTES)
        };
        Ok(Self {
            is_write,
            locals,
            remotes,
            alone,
            gathered,
            bytes,
        })
    }
}

/// Whether two runs have bytes of their destination in common.
fn any_overlap(runs: &[Run], is_write: bool) -> bool {
    let mut destinations: Vec<(u32, u64, u64)> = runs
        .iter()
        .map(|run| match is_write {
            true => (run.remote, run.remote_offset, run.len),
            false => (run.local, run.local_offset, run.len),
        })
        .collect();
    destinations.sort_unstable();
    destinations
        .windows(2)
        .any(|pair| pair[0].0 == pair[1].0 && pair[0].1 + pair[0].2 > pair[1].1)
}

/// Where each region lies among those that a plan names.
#[derive(Default)]
struct Places {
    by_id: HashMap<u64, u32>,
    last: Option<(u64, u32)>,
}

impl Places {
    /// The place of region `id`; `add` adds it if it is new.
    fn of(&mut self, id: u64, add: impl FnOnce()) -> u32 {
        if let Some((last, place)) = self.last
            && last == id
        {
            return place;
        }
        let next = self.by_id.len() as u32;
        let place = *self.by_id.entry(id).or_insert_with(|| {
            add();
            next
        });
        self.last = Some((id, place));
        place
    }
}

impl Run {
    fn is_followed_by(&self, next: &Self) -> bool {
        self.local == next.local
            && self.remote == next.remote
            && self.local_offset + self.len == next.local_offset
            && self.remote_offset + self.len == next.remote_offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Kind;

    fn plan(pieces: &[(usize, usize, usize)]) -> Result<Plan, Status> {
        let memory = Arc::new(Registered::new(1, 0x1000, 1 << 30, Kind::Host));
        let region = RemoteRegion {
            id: 5,
            address: 0x9000,
            bytes: 1 << 30,
            port: 1,
            on_gpu: false,
        };
        let local: Vec<_> = pieces
            .iter()
            .map(|(at, _, len)| Some((Arc::clone(&memory), 0x1000 + at, *len)))
            .collect();
        let remote: Vec<_> = pieces
            .iter()
            .map(|(_, at, len)| Some((region, 0x9000 + at, *len)))
            .collect();
        Plan::new(true, local.into_iter(), remote.into_iter())
    }

    #[test]
    fn neighbours_become_one_run() {
        let plan = plan(&[(0, 0, 8), (8, 8, 8), (16, 24, 8), (24, 32, 0), (24, 32, 8)]).unwrap();
        assert_eq!(plan.bytes, 32);
        let lengths: Vec<_> = plan.alone.iter().map(|run| run.len).collect();
        assert_eq!(lengths, [16, 16]);
    }

    #[test]
    fn long_runs_go_alone_and_short_ones_together() {
        let short = |count| -> Vec<_> {
            (0..count)
                .map(|at| (at * 8192, at * 8192 + 64, 4096))
                .collect()
        };
        let mut pieces = short(FEW_RUNS);
        pieces.push((1 << 20, 1 << 20, 1 << 20));
        let many = plan(&pieces).unwrap();
        assert_eq!((many.alone.len(), many.gathered.len()), (1, FEW_RUNS));
        let few = plan(&short(FEW_RUNS)).unwrap();
        assert_eq!((few.alone.len(), few.gathered.len()), (FEW_RUNS, 0));
    }

    #[test]
    fn destinations_that_overlap_are_gathered() {
        let plan = plan(&[(0, 0, 1 << 20), (2 << 20, 100, 1 << 20)]).unwrap();
        assert_eq!((plan.alone.len(), plan.gathered.len()), (0, 2));
    }

    #[test]
    fn pieces_outside_are_refused() {
        assert_eq!(plan(&[(0, 1 << 30, 1)]).unwrap_err(), Status::INVALID_PARAM);
        assert_eq!(plan(&[(1 << 30, 0, 1)]).unwrap_err(), Status::INVALID_PARAM);
    }
}
