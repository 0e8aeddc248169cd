//! Copies between pinned memory and the GPU that could start now, and which of them go as one.
//!
//! A copy costs a GPU some microseconds besides its bytes, a seventh of the time of 1 MiB. So no
//! more start than keep the GPU busy, and waiting ones that are adjacent at both ends become one
//! copy.

use std::collections::VecDeque;

use crate::job::Work;
use crate::slice::RegionSlice;
use crate::worker::queue::Ticket;

/// With two copies and this many bytes in flight, no further copy starts.
const ENOUGH: usize = 4 << 20;
/// Most bytes of copies that become one.
const LONGEST: usize = 4 << 20;
/// How many waiting copies are searched for one that is adjacent to others.
const LOOKS: usize = 64;

/// The copies of one direction that wait.
#[derive(Default)]
pub(super) struct Copies {
    waiting: VecDeque<Ticket>,
    /// Bytes in flight.
    in_flight: usize,
    /// Copies in flight.
    count: usize,
}

/// Copies that go as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) tickets: usize,
    pub(super) bytes: usize,
}

impl Copies {
    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Takes a copy that waits for nothing else.
    pub(super) fn push(&mut self, ticket: Ticket) {
        self.waiting.push_back(ticket);
    }

    /// Moves the tickets of the next copy to `tickets`, in the order of their bytes, if one may
    /// begin.
    pub(super) fn next(&mut self, tickets: &mut VecDeque<Ticket>) -> Option<Run> {
        if self.count >= 2 && self.in_flight >= ENOUGH {
            return None;
        }
        let first = self.waiting.pop_front()?;
        let mut bytes = length(&first);
        // The first bytes are wanted soon: copies become longer as others hold them up.
        let longest = (2 * self.in_flight).min(LONGEST);
        let before = tickets.len();
        tickets.push_back(first);
        while bytes < longest {
            let Some((at, is_behind)) = self.neighbour(tickets, before, longest - bytes) else {
                break;
            };
            let Some(ticket) = self.waiting.remove(at) else {
                break;
            };
            bytes += length(&ticket);
            if is_behind {
                tickets.push_back(ticket);
            } else {
                tickets.insert(before, ticket);
            }
        }
        self.count += 1;
        self.in_flight += bytes;
        Some(Run {
            tickets: tickets.len() - before,
            bytes,
        })
    }

    /// A copy of `bytes` has ended.
    pub(super) fn ended(&mut self, bytes: usize) {
        self.count = self.count.saturating_sub(1);
        self.in_flight = self.in_flight.saturating_sub(bytes);
    }

    /// A copy of at most `room` bytes that goes on where the last of these ends, or ends where the
    /// first of them begins; whether it is the former.
    fn neighbour(
        &self,
        tickets: &VecDeque<Ticket>,
        first: usize,
        room: usize,
    ) -> Option<(usize, bool)> {
        let (first, last) = (tickets.get(first)?, tickets.back()?);
        let looked_at = self.waiting.iter().take(LOOKS).enumerate();
        looked_at
            .filter(|(_, ticket)| length(ticket) <= room)
            .find_map(|(at, ticket)| {
                let is_behind = follows(last, ticket);
                (is_behind || follows(ticket, first)).then_some((at, is_behind))
            })
    }
}

fn length(ticket: &Ticket) -> usize {
    ticket.work().ends().0.len()
}

/// Whether one copy goes on where another ends, at both ends and in the same memory.
fn follows(before: &Ticket, behind: &Ticket) -> bool {
    let (
        Work::Copy { from, to },
        Work::Copy {
            from: next,
            to: into,
        },
    ) = (before.work(), behind.work())
    else {
        return false;
    };
    let touch = |one: &RegionSlice, other: &RegionSlice| {
        one.offset() + one.len() == other.offset() && one.region().id() == other.region().id()
    };
    touch(from, next) && touch(to, into)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::error::MemoryError;
    use crate::job::{CompletionSink, Job};
    use crate::region::Region;

    struct Nobody;

    impl CompletionSink for Nobody {
        fn complete(&self, _token: u64, _result: Result<u64, MemoryError>) {}
    }

    const MIB: usize = 1 << 20;

    /// Memory at both ends of copies, of which only the addresses matter.
    struct Ends {
        from: Region,
        to: Region,
    }

    impl Ends {
        fn new() -> Self {
            let memory = || Region::host(64 * MIB).unwrap();
            Self {
                from: memory(),
                to: memory(),
            }
        }

        /// A copy of a whole MiB between these places.
        fn copy(&self, from: usize, to: usize) -> Ticket {
            let part = |region: &Region, at: usize| region.slice(at * MIB..(at + 1) * MIB).unwrap();
            let work = Work::Copy {
                from: part(&self.from, from),
                to: part(&self.to, to),
            };
            Ticket::admit(Job {
                work,
                fence: None,
                sink: Arc::new(Nobody),
                token: 0,
            })
            .unwrap()
        }
    }

    /// Begins what may begin: where each copy's parts come from.
    fn begin(copies: &mut Copies) -> Vec<Vec<usize>> {
        let mut tickets = VecDeque::new();
        let runs: Vec<Run> = std::iter::from_fn(|| copies.next(&mut tickets)).collect();
        runs.into_iter()
            .map(|run| {
                let parts = tickets.drain(..run.tickets).map(|ticket| {
                    let place = ticket.work().ends().0.offset() / MIB;
                    ticket.finish(Ok(0));
                    place
                });
                let parts: Vec<usize> = parts.collect();
                assert_eq!(run.bytes, parts.len() * MIB);
                parts
            })
            .collect()
    }

    #[test]
    fn adjacent_copies_merge_except_the_first() {
        let (ends, mut copies) = (Ends::new(), Copies::default());
        // In whichever order they come.
        for place in [3, 5, 4, 0, 2, 1, 9, 6, 8, 7] {
            copies.push(ends.copy(place, 20 + place));
        }
        assert_eq!(begin(&mut copies), [vec![3], vec![4, 5], vec![0, 1, 2]]);
        assert_eq!(copies.len(), 4);
    }

    #[test]
    fn no_more_copies_begin_than_keep_the_gpu_busy() {
        let (ends, mut copies) = (Ends::new(), Copies::default());
        // None follows another one: each goes alone.
        for place in 0..12 {
            copies.push(ends.copy(2 * place, place));
        }
        assert_eq!(begin(&mut copies).len(), 4);
        copies.ended(MIB);
        assert_eq!(begin(&mut copies).len(), 1);
        (0..4).for_each(|_| copies.ended(MIB));
        assert_eq!(begin(&mut copies).len(), 4);
    }

    #[test]
    fn copies_with_a_gap_or_other_memory_do_not_merge() {
        let (ends, other, mut copies) = (Ends::new(), Ends::new(), Copies::default());
        copies.push(ends.copy(0, 0));
        copies.push(ends.copy(1, 2));
        copies.push(ends.copy(3, 3));
        copies.push(other.copy(2, 3));
        assert_eq!(begin(&mut copies), [[0], [1], [3], [2]]);
    }

    #[test]
    fn a_copy_never_becomes_longer_than_the_bound() {
        let (ends, mut copies) = (Ends::new(), Copies::default());
        for place in 0..40 {
            copies.push(ends.copy(place, place));
        }
        let mut lengths = Vec::new();
        loop {
            let begun = begin(&mut copies);
            if begun.is_empty() {
                break;
            }
            for run in begun {
                lengths.push(run.len());
                copies.ended(run.len() * MIB);
            }
        }
        assert_eq!(lengths.iter().sum::<usize>(), 40);
        assert!(lengths.iter().all(|run| run * MIB <= LONGEST));
    }
}
