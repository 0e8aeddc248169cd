//! What a transfer moves: NIXL's two lists of pieces as runs, neighbours in one.

use std::collections::HashMap;
use std::sync::Arc;

use crate::abi::Status;
use crate::agent::RemoteRegion;
use crate::memory::Registered;

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
    pub(crate) runs: Vec<Run>,
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
                local: local_places.of(memory.name.id, || locals.push(memory)),
                remote: remote_places.of(region.info.name.id, || remotes.push(region)),
                local_offset: local_offset as u64,
                remote_offset,
                len: len as u64,
            };
            match runs.last_mut() {
                Some(last) if last.is_followed_by(&run) => last.len += run.len,
                _ => runs.push(run),
            }
        }
        part_destinations(&mut runs, is_write);
        let mut lengths = runs.iter().map(|run| run.len);
        let bytes = lengths.try_fold(0_u64, u64::checked_add);
        Ok(Self {
            is_write,
            locals,
            remotes,
            runs,
            bytes: bytes.ok_or(Status::INVALID_PARAM)?,
        })
    }

    /// Whether it moves from this memory, or to it.
    pub(crate) fn uses(&self, memory: &Arc<Registered>) -> bool {
        self.locals.iter().any(|local| Arc::ptr_eq(local, memory))
    }
}

/// Leaves bytes that several runs would write to one of them: nobody says which wins.
fn part_destinations(runs: &mut Vec<Run>, is_write: bool) {
    let destination = |run: &Run| match is_write {
        true => (run.remote, run.remote_offset),
        false => (run.local, run.local_offset),
    };
    let mut order: Vec<(u32, u64, u32)> = (0_u32..)
        .zip(runs.iter())
        .map(|(at, run)| (destination(run).0, destination(run).1, at))
        .collect();
    order.sort_unstable();
    let (mut of, mut written) = (u32::MAX, 0);
    for (region, start, at) in order {
        let run = &mut runs[at as usize];
        if region != of {
            (of, written) = (region, 0);
        }
        let again = u64::saturating_sub(written, start).min(run.len);
        written = written.max(start + run.len);
        run.local_offset += again;
        run.remote_offset += again;
        run.len -= again;
    }
    runs.retain(|run| run.len > 0);
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
    use crate::info::{RegionInfo, RegionNames};
    use crate::memory::Kind;

    fn plan(pieces: &[(usize, usize, usize)]) -> Result<Plan, Status> {
        let names = RegionNames::generate().unwrap();
        let name = |address| names.of(address, 1 << 30, None);
        let memory = Arc::new(Registered::new(name(0x1000), 0x1000, 1 << 30, Kind::Host));
        let region = RemoteRegion {
            address: 0x9000,
            info: RegionInfo {
                name: name(0x9000),
                bytes: 1 << 30,
                port: 1,
                on_gpu: false,
            },
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
        let lengths: Vec<_> = plan.runs.iter().map(|run| run.len).collect();
        assert_eq!(lengths, [16, 16]);
    }

    #[test]
    fn each_byte_of_a_destination_is_written_once() {
        let pieces = [
            (0, 50, 100),
            (1000, 0, 100),
            (2000, 60, 20),
            (3000, 400, 8),
            (4000, 404, 8),
        ];
        let plan = plan(&pieces).unwrap();
        let found: Vec<_> = plan
            .runs
            .iter()
            .map(|run| (run.local_offset, run.remote_offset, run.len))
            .collect();
        assert_eq!(
            found,
            [
                (50, 100, 50),
                (1000, 0, 100),
                (3000, 400, 8),
                (4004, 408, 4)
            ]
        );
        assert_eq!(plan.bytes, 162);
    }

    #[test]
    fn pieces_outside_are_refused() {
        assert_eq!(plan(&[(0, 1 << 30, 1)]).unwrap_err(), Status::INVALID_PARAM);
        assert_eq!(plan(&[(1 << 30, 0, 1)]).unwrap_err(), Status::INVALID_PARAM);
    }
}
