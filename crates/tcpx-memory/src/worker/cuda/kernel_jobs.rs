//! The worker's jobs for the kernels: unpacks, several in one launch where they wait together, and
//! checksums. The kernels signal completion through host memory, so that polling costs no driver call.

use std::collections::VecDeque;

use tcpx_wire::{Descriptor, Descriptors, EvenList};

use super::cut::{Cut, List};
use super::feed::{EVEN, Inline};
use super::kernel::Kernels;
use super::launch::{self, Sum};
use super::slots::Slots;
use super::unpack::piece_bytes;
use crate::bounce::UnpackMethod;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::job::Work;
use crate::worker::queue::Ticket;

/// Jobs that may share a launch. Their descriptors are as many as a launch can carry.
const TOGETHER: usize = 16;
const TOGETHER_DESCRIPTORS: usize = EVEN;

/// Everything about the kernels that the thread works with; the context is current.
pub(super) struct KernelJobs {
    gpu: Gpu,
    kernels: Kernels,
    slots: Slots,
    /// Where lists are written that a launch carries.
    list: Box<Inline>,
    waiting: VecDeque<Ticket>,
    /// How many of those at the front get launches of their own: they shared one that was refused.
    alone: usize,
    /// What is being launched, and what waits for its end, oldest first.
    current: Option<Group>,
    under_way: VecDeque<Group>,
    /// Groups that have ended, to be used again.
    spare: Vec<Group>,
    /// Set when the GPU gave no answer any more.
    broken: Option<CudaError>,
}

/// Jobs that share their launches. Its lists keep their room.
#[derive(Default)]
struct Group {
    tickets: Vec<Ticket>,
    /// The pieces of several jobs, from the lowest destination: as an even list where that is what they are
    /// together, else as descriptors. Both are empty where there is one job.
    even: EvenList,
    joined: Vec<Descriptor>,
    ends: (u64, u64),
    cut: Cut,
    sum: Option<Sum>,
    /// Something of it was launched, and more is to be.
    has_begun: bool,
    /// An error of a launch; reported after earlier launches have ended.
    error: Option<CudaError>,
    /// Launches that have been armed once its last one was.
    until: u64,
}

impl KernelJobs {
    /// Prepares streams and memory for the kernels.
    pub(super) fn create(gpu: &Gpu, kernels: Kernels) -> Result<Self, CudaError> {
        let slots = Slots::create(gpu, &kernels)?;
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
            slots,
            list: Box::new(Inline::EMPTY),
            waiting: VecDeque::with_capacity(64),
            alone: 0,
            current: None,
            under_way: VecDeque::with_capacity(64),
            spare: Vec::with_capacity(64),
            broken: None,
        })
    }

    /// Ends everything; every launch has signalled its completion. What is broken stays until the process ends.
    pub(super) fn destroy(mut self) {
        if self.broken.is_none() && self.slots.retire(self.gpu.api()) {
            self.slots.destroy(&self.gpu);
            self.kernels.unload(&self.gpu);
        }
    }

    /// Takes a job whose memory the device can address.
    pub(super) fn push(&mut self, ticket: Ticket) {
        match &self.broken {
            Some(error) => ticket.finish(Err(error.clone().into())),
            None => self.waiting.push_back(ticket),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.current.is_none() && self.under_way.is_empty()
    }

    /// Ends what the kernels have finished and launches what waits; whether there was anything to do.
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
            let sum = group.sum.as_ref().and_then(|sum| sum.finish(&self.slots));
            for ticket in group.tickets.drain(..) {
                let result = match (&group.error, sum) {
                    (Some(error), _) => Err(error.clone().into()),
                    (None, Some(sum)) => Ok(u64::from(sum)),
                    (None, None) => Ok(ticket.work().bytes()),
                };
                ticket.finish(result);
            }
            self.spare.push(group);
            any = true;
        }
        any
    }

    /// The jobs that wait together at the front, as one group.
    fn next_group(&mut self) -> Option<Group> {
        let first = self.waiting.pop_front()?;
        let most = if self.alone > 0 { 1 } else { TOGETHER };
        self.alone = self.alone.saturating_sub(1);
        let mut group = self.spare.pop().unwrap_or_default();
        group.begin(&self.gpu, &self.kernels, &first);
        let mut descriptors = count(&first);
        group.tickets.push(first);
        while group.sum.is_none()
            && group.tickets.len() < most
            && let Some(next) = self.waiting.front()
            && pool_of(next) == Some(group.ends.0)
            && descriptors + count(next) <= TOGETHER_DESCRIPTORS
        {
            descriptors += count(next);
            group.tickets.extend(self.waiting.pop_front());
        }
        group.join(&self.gpu);
        Some(group)
    }

    /// Puts the jobs of the current group back, of which nothing was launched: each gets a launch of its own, so
    /// that one job's fault is not that of its neighbours.
    fn divide(&mut self) {
        let Some(mut group) = self.current.take() else {
            return;
        };
        self.alone += group.tickets.len();
        for ticket in group.tickets.drain(..).rev() {
            self.waiting.push_front(ticket);
        }
        self.spare.push(group);
    }

    /// Keeps the memory of everything launched for ever, because something may still touch it.
    fn give_up(&mut self, error: &CudaError) {
        let launched = self.under_way.drain(..).chain(self.current.take());
        for ticket in launched.flat_map(|group| group.tickets) {
            ticket.abandon(error.clone().into());
        }
        for ticket in self.waiting.drain(..) {
            ticket.finish(Err(error.clone().into()));
        }
        self.alone = 0;
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
    fn begin(&mut self, gpu: &Gpu, kernels: &Kernels, first: &Ticket) {
        (self.sum, self.error, self.cut) = (None, None, Cut::default());
        self.has_begun = false;
        self.joined.clear();
        self.even.clear();
        if let Work::Checksum { of } = first.work() {
            let address = of.device_address().unwrap_or_default();
            self.sum = Some(Sum::new(kernels, address, of.len()));
        } else {
            let ends = (pool_of(first), destination_of(first));
            self.ends = (ends.0.unwrap_or_default(), ends.1.unwrap_or_default());
            self.cut = Cut::for_kernel(piece_bytes(first.work().bytes(), gpu.multiprocessors()));
        }
    }

    /// Puts the lists of several jobs together, in the order of their destinations: chunks of one transfer
    /// are one list then.
    fn join(&mut self, gpu: &Gpu) {
        if self.tickets.len() < 2 {
            return;
        }
        self.tickets.sort_unstable_by_key(destination_of);
        let lowest = self.tickets.first().and_then(destination_of);
        self.ends.1 = lowest.unwrap_or_default();
        let bytes = self
            .tickets
            .iter()
            .map(|ticket| ticket.work().bytes())
            .sum();
        self.cut = Cut::for_kernel(piece_bytes(bytes, gpu.multiprocessors()));
        if self.join_even() {
            return;
        }
        self.even.clear();
        for (descriptors, further) in lists(&self.tickets, self.ends.1) {
            let all = descriptors.as_slice().iter();
            self.joined.extend(all.map(|one| Descriptor {
                destination_offset: one.destination_offset + further,
                ..*one
            }));
        }
    }

    /// As one even list, if all of them together are one.
    fn join_even(&mut self) -> bool {
        lists(&self.tickets, self.ends.1).all(|(descriptors, further)| {
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
        (slots, room): (&mut Slots, &mut Inline),
    ) -> Launched {
        let api = gpu.api();
        let launched = match &mut self.sum {
            // SAFETY: the ticket keeps the bytes until the slot has landed; the context is current.
            Some(sum) => unsafe { sum.launch(api, kernels, slots) },
            None => {
                let list = match (&self.tickets[..], self.tickets.first().map(Ticket::work)) {
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
                        return Launched::Some;
                    }
                    other => other,
                }
            }
        };
        match launched {
            Ok(true) => Launched::All,
            Ok(false) => Launched::Nothing,
            Err(_) if self.tickets.len() > 1 && !self.has_begun => Launched::Refused,
            Err(error) => {
                self.error = Some(error);
                Launched::All
            }
        }
    }
}

/// Where the pool of a kernel's unpack begins; `None` of other work.
fn pool_of(ticket: &Ticket) -> Option<u64> {
    match ticket.work() {
        Work::Unpack {
            pool,
            with: UnpackMethod::Kernel,
            ..
        } => pool.slice().device_address(),
        _ => None,
    }
}

fn destination_of(ticket: &Ticket) -> Option<u64> {
    ticket.work().ends().1?.device_address()
}

/// The lists of unpacks, and how far each one's destination lies behind `lowest`.
fn lists(tickets: &[Ticket], lowest: u64) -> impl Iterator<Item = (&Descriptors, u64)> {
    tickets
        .iter()
        .filter_map(move |ticket| match ticket.work() {
            Work::Unpack { descriptors, .. } => {
                let further = destination_of(ticket).unwrap_or_default() - lowest;
                Some((descriptors.as_ref(), further))
            }
            _ => None,
        })
}

fn count(ticket: &Ticket) -> usize {
    match ticket.work() {
        Work::Unpack { descriptors, .. } => descriptors.len(),
        _ => 0,
    }
}
