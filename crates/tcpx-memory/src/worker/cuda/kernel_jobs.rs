//! The worker's jobs for the kernels: unpacks and copies of memory in pieces, several in one launch
//! where they wait together. The kernels signal completion through host memory, so that polling
//! costs no driver call.

use std::collections::VecDeque;

use tcpx_wire::{Descriptor, Descriptors, EvenList};

use super::cut::{Cut, List};
use super::feed::{EVEN, Inline};
use super::kernel::{Kernels, LaunchEnds};
use super::launch;
use super::slots::LaunchSlots;
use super::unpack::{parts, piece_bytes};
use crate::error::CudaError;
use crate::gpu::{Gpu, MappedHost};
use crate::job::Work;
use crate::slice::RegionSlice;
use crate::worker::queue::Ticket;

/// Jobs that may share a launch. Their descriptors are as many as a launch can carry.
const TOGETHER: usize = 16;
const TOGETHER_DESCRIPTORS: usize = EVEN;

/// Mean length of pieces from which copies move them: they need no multiprocessor, and are as fast.
const LONG_PIECES: usize = 256 << 10;
/// With two launches for pieces and this many bytes of theirs in flight, no further one starts:
/// those that wait become one then.
const ENOUGH: usize = 4 << 20;
/// How many waiting jobs are searched for one that may join a launch.
const LOOKS: usize = 64;

/// Everything about the kernels that the thread works with; the context is current.
pub(super) struct KernelJobs {
    gpu: Gpu,
    kernels: Kernels,
    slots: LaunchSlots,
    /// Where lists are written that a launch carries.
    list: Box<Inline>,
    waiting: [Waiting; 3],
    /// Which of these comes next.
    turn: usize,
    /// What is being launched, and what waits for its end, oldest first.
    current: Option<Group>,
    under_way: VecDeque<Group>,
    /// Groups that have ended, to be used again.
    spare: Vec<Group>,
    /// Set when the GPU gave no answer any more.
    broken: Option<CudaError>,
}

/// What a launch does; the index of those that wait for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LaunchKind {
    /// Unpacks.
    #[default]
    Unpack,
    /// Moves pieces from memory with one address to their places.
    Scatter,
    /// Moves pieces to memory with one address.
    Pack,
}

/// A job, and what was found out about the launch that it needs: once, as it may have many pieces.
struct Asked {
    ticket: Ticket,
    way: LaunchKind,
    /// What the places at the end with one address count from: jobs with the same may share a
    /// launch.
    pool: u64,
    /// Its descriptors or pieces.
    count: usize,
}

/// Jobs that wait for a launch.
#[derive(Default)]
struct Waiting {
    asked: VecDeque<Asked>,
    /// How many of those at the front get launches of their own: they shared one that was refused.
    alone: usize,
    /// Launches in flight, and the bytes of pieces that they move.
    in_flight: usize,
    bytes: usize,
}

impl Waiting {
    fn landed(&mut self, group: &Group) {
        self.in_flight -= 1;
        self.bytes -= group.bytes;
    }

    fn may_start(&self) -> bool {
        !self.asked.is_empty() && (self.in_flight < 2 || self.bytes < ENOUGH)
    }

    /// Takes the next job that may share a launch with one of this pool, if it has at most so many
    /// descriptors.
    fn mate(&mut self, pool: u64, most: usize) -> Option<Asked> {
        let mut looked_at = self.asked.iter().take(LOOKS);
        let at = looked_at.position(|asked| asked.pool == pool)?;
        if self.asked.get(at)?.count > most {
            return None;
        }
        self.asked.remove(at)
    }
}

/// Jobs that share their launches. Its lists keep their room.
#[derive(Default)]
struct Group {
    way: LaunchKind,
    bytes: usize,
    jobs: Vec<Asked>,
    /// The pieces of several jobs, from the lowest destination: as an even list where that is what
    /// they are together, else as descriptors. Both are empty where there is one unpack.
    even: EvenList,
    joined: Vec<Descriptor>,
    ends: LaunchEnds,
    cut: Cut,
    /// Something of it was launched, and more is to be.
    has_begun: bool,
    /// An error of a launch; reported after earlier launches have ended.
    error: Option<CudaError>,
    /// Launches that have been armed once its last one was.
    until: u64,
}

impl KernelJobs {
    /// Prepares streams and memory for the kernels.
    pub(super) fn create(
        gpu: &Gpu,
        kernels: Kernels,
        memory: MappedHost,
    ) -> Result<Self, CudaError> {
        let slots = LaunchSlots::create(gpu, &kernels, memory)?;
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
            slots,
            list: Box::new(Inline::EMPTY),
            waiting: Default::default(),
            turn: 0,
            current: None,
            under_way: VecDeque::with_capacity(64),
            spare: Vec::with_capacity(64),
            broken: None,
        })
    }

    /// Takes a job whose memory the device can address: an unpack, or a copy of memory in pieces at
    /// one end or both. The job, where it is no kernel's.
    pub(super) fn push(&mut self, ticket: Ticket) -> Option<Ticket> {
        let Some((way, pool, count)) = need(ticket.work()) else {
            return Some(ticket);
        };
        match &self.broken {
            Some(error) => ticket.finish(Err(error.clone().into())),
            None => self.waiting[way as usize].asked.push_back(Asked {
                ticket,
                way,
                pool,
                count,
            }),
        }
        None
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.iter().all(|waiting| waiting.asked.is_empty())
            && self.current.is_none()
            && self.under_way.is_empty()
    }

    /// Ends what the kernels have finished and launches what waits; whether there was anything to
    /// do.
    pub(super) fn step(&mut self) -> bool {
        let mut progress = self.reap();
        if self.current.is_none() {
            self.current = self.next_group();
        }
        let Some(group) = &mut self.current else {
            return progress;
        };
        let room = (&mut self.slots, &mut *self.list);
        match group.launch(&self.gpu, &self.kernels, room) {
            Launched::Nothing => return progress,
            Launched::Some => progress = true,
            Launched::All => {
                group.until = self.slots.armed();
                self.under_way.extend(self.current.take());
                progress = true;
            }
            Launched::Refused => {
                self.divide();
                progress = true;
            }
        }
        progress
    }

    fn reap(&mut self) -> bool {
        if !self.slots.reap() && self.slots.is_silent() {
            let asked = self.slots.ask_streams(self.gpu.api());
            if let Err(error) = asked {
                self.give_up(&error);
                return true;
            }
        }
        let mut any = false;
        while let Some(first) = self.under_way.front()
            && first.until <= self.slots.landed()
        {
            let Some(mut group) = self.under_way.pop_front() else {
                break;
            };
            self.waiting[group.way as usize].landed(&group);
            for Asked { ticket, .. } in group.jobs.drain(..) {
                let result = match &group.error {
                    Some(error) => Err(error.clone().into()),
                    None => Ok(ticket.work().bytes()),
                };
                ticket.finish(result);
            }
            self.spare.push(group);
            any = true;
        }
        any
    }

    /// Jobs that wait together, as one group.
    fn next_group(&mut self) -> Option<Group> {
        let ways = self.waiting.len();
        let mut turns = (0..ways).map(|further| (self.turn + further) % ways);
        let turn = turns.find(|&turn| self.waiting[turn].may_start())?;
        self.turn = turn + 1;
        let waiting = &mut self.waiting[turn];
        let first = waiting.asked.pop_front()?;
        let most = if waiting.alone > 0 { 1 } else { TOGETHER };
        waiting.alone = waiting.alone.saturating_sub(1);
        let mut group = self.spare.pop().unwrap_or_default();
        group.begin(&self.gpu, &first);
        // The first pieces are wanted soon: launches become longer as others hold them up.
        let longest = match group.way {
            LaunchKind::Unpack => usize::MAX,
            LaunchKind::Scatter | LaunchKind::Pack => (2 * waiting.bytes).min(ENOUGH),
        };
        let (pool, mut descriptors) = (first.pool, first.count);
        let mut bytes = first.ticket.work().bytes() as usize;
        group.jobs.push(first);
        while group.jobs.len() < most
            && bytes < longest
            && let Some(next) = waiting.mate(pool, TOGETHER_DESCRIPTORS.saturating_sub(descriptors))
        {
            descriptors += next.count;
            bytes += next.ticket.work().bytes() as usize;
            group.jobs.push(next);
        }
        group.join(&self.gpu);
        // Unpacks are not held up: their pool must be given back.
        group.bytes = if group.way == LaunchKind::Unpack {
            0
        } else {
            bytes
        };
        waiting.in_flight += 1;
        waiting.bytes += group.bytes;
        Some(group)
    }

    /// Puts the jobs of the current group back, of which nothing was launched: each gets a launch
    /// of its own, so that one job's fault is not that of its neighbours.
    fn divide(&mut self) {
        let Some(mut group) = self.current.take() else {
            return;
        };
        let waiting = &mut self.waiting[group.way as usize];
        waiting.landed(&group);
        waiting.alone += group.jobs.len();
        for asked in group.jobs.drain(..).rev() {
            waiting.asked.push_front(asked);
        }
        self.spare.push(group);
    }

    /// Keeps the memory of everything launched for ever, because something may still touch it.
    fn give_up(&mut self, error: &CudaError) {
        let launched = self.under_way.drain(..).chain(self.current.take());
        for Asked { ticket, .. } in launched.flat_map(|group| group.jobs) {
            ticket.abandon(error.clone().into());
        }
        for waiting in std::mem::take(&mut self.waiting) {
            for Asked { ticket, .. } in waiting.asked {
                ticket.finish(Err(error.clone().into()));
            }
        }
        self.broken = Some(error.clone());
    }
}

/// How far the launches of a group came.
enum Launched {
    Nothing,
    Some,
    All,
    /// The first launch of several jobs was refused.
    Refused,
}

impl Group {
    /// Starts from the group's first job.
    fn begin(&mut self, gpu: &Gpu, first: &Asked) {
        self.error = None;
        self.way = first.way;
        self.has_begun = false;
        self.joined.clear();
        self.even.clear();
        self.ends = LaunchEnds {
            pool: first.pool,
            to: destination_of(first).unwrap_or_default(),
            packs: first.way == LaunchKind::Pack,
        };
        let bytes = first.ticket.work().bytes();
        self.cut = Cut::for_kernel(piece_bytes(bytes, gpu.multiprocessors()));
    }

    /// Puts the lists of several jobs together, in the order of their destinations: chunks of one
    /// transfer are one list then.
    fn join(&mut self, gpu: &Gpu) {
        let is_listed = self.way != LaunchKind::Unpack;
        if self.jobs.len() < 2 && !is_listed {
            return;
        }
        let bytes = self.jobs.iter().map(|job| job.ticket.work().bytes()).sum();
        self.cut = Cut::for_kernel(piece_bytes(bytes, gpu.multiprocessors()));
        if is_listed {
            return self.list_pieces();
        }
        self.jobs.sort_unstable_by_key(destination_of);
        let lowest = self.jobs.first().and_then(destination_of);
        self.ends.to = lowest.unwrap_or_default();
        if self.join_even() {
            return;
        }
        self.even.clear();
        for (descriptors, further) in lists(&self.jobs, self.ends.to) {
            let all = descriptors.as_slice().iter();
            self.joined.extend(all.map(|one| Descriptor {
                destination_offset: one.destination_offset + further,
                ..*one
            }));
        }
    }

    /// The pieces of copies: where each lies among the bytes with one address, and where in the
    /// other memory, from the lowest piece.
    fn list_pieces(&mut self) {
        let LaunchEnds { pool, packs, .. } = self.ends;
        let mut lowest = u64::MAX;
        self.joined
            .reserve(self.jobs.iter().map(|job| job.count).sum());
        for job in &self.jobs {
            let Work::Copy { from, to } = job.ticket.work() else {
                continue;
            };
            for (source, destination, len) in parts(from, to, 0) {
                let (near, far) = if packs {
                    (destination, source)
                } else {
                    (source, destination)
                };
                self.joined.push(Descriptor {
                    // All that has one address is within 4 GiB of the pool, see `need` and
                    // `near_end`.
                    source_offset: (near - pool) as u32,
                    length: len as u32,
                    destination_offset: far,
                });
                lowest = lowest.min(far);
            }
        }
        self.ends.to = lowest;
        for piece in &mut self.joined {
            piece.destination_offset -= self.ends.to;
        }
    }

    /// As one even list, if all of them together are one.
    fn join_even(&mut self) -> bool {
        lists(&self.jobs, self.ends.to).all(|(descriptors, further)| {
            let pieces = descriptors.even_pieces();
            pieces.is_some_and(|pieces| {
                self.cut.takes(pieces.unit) && self.even.append(pieces, further)
            })
        })
    }

    /// One launch, if there is a slot for it. An error ends the group as if all were launched.
    fn launch(
        &mut self,
        gpu: &Gpu,
        kernels: &Kernels,
        (slots, room): (&mut LaunchSlots, &mut Inline),
    ) -> Launched {
        let api = gpu.api();
        let first = self.jobs.first().map(|job| job.ticket.work());
        let list = match (&self.jobs[..], first) {
            ([_], Some(Work::Unpack { descriptors, .. })) => descriptors.as_ref().into(),
            _ => List {
                descriptors: &self.joined,
                even: self.even.pieces(),
            },
        };
        let cut = &mut self.cut;
        let room = (slots, room);
        // SAFETY: the tickets keep pool and destinations until the slots have landed, and the
        // descriptors were checked against both; the context is current.
        let launched = unsafe { launch::pieces(api, kernels, room, self.ends, cut, list) };
        match launched {
            Ok(true) if !cut.is_through(list) => {
                self.has_begun = true;
                Launched::Some
            }
            Ok(true) => Launched::All,
            Ok(false) => Launched::Nothing,
            Err(_) if self.jobs.len() > 1 && !self.has_begun => Launched::Refused,
            Err(error) => {
                self.error = Some(error);
                Launched::All
            }
        }
    }
}

/// Which launch a job needs, what the places at its end with one address count from, and how many
/// pieces it has. `None` where it is no kernel's, which moves many short pieces in one launch.
fn need(work: &Work) -> Option<(LaunchKind, u64, usize)> {
    match work {
        Work::Unpack {
            pool, descriptors, ..
        } => {
            let pool = pool.slice().device_address()?;
            Some((LaunchKind::Unpack, pool, descriptors.len()))
        }
        Work::Copy { from, to } => {
            u32::try_from(from.len()).ok()?;
            let (pool, packs) = near_end(from, to)?;
            let count = parts(from, to, 0).count();
            let way = if packs {
                LaunchKind::Pack
            } else {
                LaunchKind::Scatter
            };
            (from.len() / count.max(1) < LONG_PIECES).then_some((way, pool, count))
        }
        Work::Checksum { .. } => None,
    }
}

/// An entry names one end of a copy in 32 bits: an address to count from, and whether bytes go
/// there. `None` where neither end lies within 4 GiB.
fn near_end(from: &RegionSlice, to: &RegionSlice) -> Option<(u64, bool)> {
    let of = |near: &RegionSlice| match near.device_address() {
        Some(address) => {
            // Slots of one pool lie in one region.
            let is_short = u32::try_from(near.region().len()).is_ok();
            let before = if is_short { near.offset() } else { 0 };
            Some(address - before as u64)
        }
        None => {
            let parts = near.device_parts(0..near.len()).ok()??;
            let (mut lowest, mut end) = (u64::MAX, 0);
            for (start, len) in parts {
                (lowest, end) = (lowest.min(start), end.max(start + len as u64));
            }
            // The same for jobs whose pieces lie near each other.
            let even = lowest & !u64::from(u32::MAX);
            let reaches = |base: u64| u32::try_from(end.checked_sub(base)?).ok().map(|_| base);
            reaches(even).or_else(|| reaches(lowest))
        }
    };
    match (from.is_in_pieces(), to.is_in_pieces()) {
        (true, false) => of(to).map(|base| (base, true)),
        (false, _) => of(from).map(|base| (base, false)),
        (true, true) => of(from)
            .map(|base| (base, false))
            .or_else(|| of(to).map(|base| (base, true))),
    }
}

fn destination_of(job: &Asked) -> Option<u64> {
    job.ticket.work().ends().1?.device_address()
}

/// The lists of unpacks, and how far each one's destination lies behind `lowest`.
fn lists(jobs: &[Asked], lowest: u64) -> impl Iterator<Item = (&Descriptors, u64)> {
    jobs.iter().filter_map(move |job| match job.ticket.work() {
        Work::Unpack { descriptors, .. } => {
            let further = destination_of(job).unwrap_or_default() - lowest;
            Some((descriptors.as_ref(), further))
        }
        _ => None,
    })
}
