//! The two tables against a network of lanes that deliver, die, and wake up late, in any order: each
//! chunk is written once, by one lane, none is lost while a lane is left, and no window is written once
//! its owner was told that it is closed.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;
use tcpx_memory::{Access, Region, RegionSlice};
use tcpx_wire::chunk_header::ChunkHeader;
use tcpx_wire::{ChunkPlan, TransferId};

use super::receive_table::{Arrival, Claim, Closing, ReceiveTable, Window};
use super::transmit_table::{Forgotten, Outgoing, Taken, TransmitTable};
use crate::channel::{Completion, ReceiveWindow};
use crate::error::{ChannelError, ChunkPosition};

const LENGTH: u32 = 8;
/// Windows that the receiver's owner opens ahead of what the sender has begun.
const AHEAD: usize = 3;

/// A header, and whether all of its payload follows.
#[derive(Clone, Copy)]
struct Sent {
    header: ChunkHeader,
    whole: bool,
}

/// One lane as both ends see it.
#[derive(Default)]
struct Lane {
    /// What its sender writes now.
    writing: Option<Outgoing>,
    /// What is on its way.
    wire: VecDeque<Sent>,
    /// What its receiver reads now.
    reading: Option<(Claim, Sent)>,
    /// What its receiver waits with, until another lane lets go of it.
    parked: Option<Sent>,
    sender_dead: bool,
    receiver_dead: bool,
}

/// A transfer, and its window. They are called 10 apart.
struct Transfer {
    cut: ChunkPlan,
    plan: ChunkPlan,
    region: Region,
    /// The sequence of its first chunk.
    first: u64,
    /// By chunk: how often it was written, and whether the owner was told.
    written: Vec<u32>,
    placed: Vec<bool>,
    /// The owner knows that it has come.
    begun: bool,
    /// Chunks whose copy failed.
    failed: BTreeSet<u32>,
    /// It was closed before it was whole.
    cancelled: bool,
    /// The owner knows that nothing points at its memory.
    closed: bool,
}

/// A chunk that the copy worker moves to its destination.
struct Copying {
    window: Arc<Window>,
    index: u32,
    name: u64,
    destination: RegionSlice,
}

struct World {
    lanes: Vec<Lane>,
    transmit: TransmitTable,
    receive: ReceiveTable,
    transfers: Vec<Transfer>,
    opened: usize,
    /// By sequence: the transfer and the index of the chunk.
    chunks: Vec<(usize, u32)>,
    posted: usize,
    window: usize,
    /// By slot: what the sender's owner has there.
    slots: Vec<Option<u64>>,
    copying: VecDeque<Copying>,
    /// What the sender's owner hears: a chunk was placed, or is not wanted any more.
    heard: VecDeque<(u64, bool)>,
    unwanted: BTreeSet<u64>,
}

fn name(transfer: usize) -> u64 {
    10 * transfer as u64
}

fn transfer(name: u64) -> usize {
    (name / 10) as usize
}

/// The bytes of a chunk.
fn content(transfer: usize, index: u32, length: u32) -> Vec<u8> {
    vec![1 + (transfer as u8).wrapping_mul(16).wrapping_add(index as u8) % 200; length as usize]
}

impl World {
    /// Of windows of so many bytes each, for transfers that are as long or shorter.
    fn new(lanes: usize, window: u16, lengths: &[(u64, u64)]) -> Self {
        let mut chunks = Vec::new();
        let transfer = |(at, (longest, bytes)): (usize, &(u64, u64))| {
            let cut = ChunkPlan::even(*longest, LENGTH);
            let plan = cut.for_total(1 + bytes % longest);
            let first = chunks.len() as u64;
            chunks.extend((0..plan.count()).map(|index| (at, index)));
            let region = Region::host(*longest as usize).unwrap();
            Transfer {
                cut,
                plan,
                region,
                first,
                written: vec![0; plan.count() as usize],
                placed: vec![false; plan.count() as usize],
                begun: false,
                failed: BTreeSet::new(),
                cancelled: false,
                closed: false,
            }
        };
        let transfers = lengths.iter().enumerate().map(transfer).collect();
        Self {
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            transmit: TransmitTable::new(lanes as u16, window),
            receive: ReceiveTable::new(),
            transfers,
            opened: 0,
            chunks,
            posted: 0,
            window: window.into(),
            slots: vec![None; window.into()],
            copying: VecDeque::new(),
            heard: VecDeque::new(),
            unwanted: BTreeSet::new(),
        }
    }

    /// Opens windows and posts sends, as the sessions would.
    fn post(&mut self) {
        let begun = self.chunks.get(self.posted);
        let begun = begun.map_or(self.transfers.len(), |(transfer, _)| *transfer);
        while self.opened < self.transfers.len().min(begun + AHEAD) {
            let one = &self.transfers[self.opened];
            let lease = one.region.lease(.., Access::Write).unwrap();
            let opened = self.receive.open(ReceiveWindow {
                token: self.opened as u64,
                window: name(self.opened),
                cut: one.cut,
                destination: lease.all(),
                fence: None,
            });
            assert!(opened.is_ok());
            self.opened += 1;
        }
        let oldest = self.slots.iter().flatten().min().copied();
        while let Some(&(transfer, index)) = self.chunks.get(self.posted)
            && transfer < self.opened
            && oldest.is_none_or(|oldest| self.posted as u64 - oldest < self.window as u64)
        {
            let sequence = self.posted as u64;
            if self.unwanted.contains(&sequence) {
                self.posted += 1;
                continue;
            }
            let Some(slot) = self.slots.iter().position(Option::is_none) else {
                return;
            };
            self.posted += 1;
            self.slots[slot] = Some(sequence);
            let plan = self.transfers[transfer].plan;
            let (offset, length) = plan.range(index);
            let header = ChunkHeader {
                sequence: index.into(),
                transfer: TransferId(name(transfer)),
                offset,
                total: plan.bytes(),
                length,
                attempt: 0,
                behind: 0,
            };
            self.transmit.enqueue(Outgoing {
                slot: slot as u16,
                header: header.encode(),
                position: ChunkPosition {
                    sequence,
                    transfer: transfer as u64,
                    offset,
                    length: length.into(),
                    done: 0,
                },
                payload: Region::host(length as usize).unwrap().all(),
                attempt: 0,
                permit: None,
                spliced: None,
            });
        }
    }

    fn slot_is_free(&mut self, slot: u16) {
        self.slots[usize::from(slot)] = None;
    }

    /// A lane's sender takes a chunk, or finishes the one it has.
    fn send(&mut self, at: usize) {
        if self.lanes[at].sender_dead {
            return;
        }
        if let Some(chunk) = self.lanes[at].writing.take() {
            self.put_on_wire(at, &chunk, true);
            let slot = chunk.slot;
            if self.transmit.written(at as u16, chunk, 0) {
                self.ended(slot);
            }
            return;
        }
        match self.transmit.take(at as u16) {
            Some(Taken::Chunk(chunk)) => self.lanes[at].writing = Some(chunk),
            Some(Taken::Withdrawn(slot)) => self.slot_is_free(slot),
            None => {}
        }
    }

    fn put_on_wire(&mut self, at: usize, chunk: &Outgoing, whole: bool) {
        let header = ChunkHeader::decode(&chunk.header).unwrap();
        self.lanes[at].wire.push_back(Sent { header, whole });
    }

    fn ended(&mut self, slot: u16) {
        self.transmit.free(slot);
        self.slot_is_free(slot);
    }

    /// A lane's receiver reads a header, or the payload behind it; `stages`: to a slot.
    fn arrive(&mut self, at: usize, stages: bool) {
        if self.lanes[at].receiver_dead || self.lanes[at].parked.is_some() {
            return;
        }
        if let Some((claim, sent)) = self.lanes[at].reading.take() {
            if claim.window.is_closing() {
                self.receive.put_back(claim);
            } else if !sent.whole {
                self.lanes[at].reading = Some((claim, sent));
            } else if stages {
                let index = claim.index();
                let Claim {
                    window,
                    destination,
                    ..
                } = claim;
                self.receive.copies(&window, index);
                self.copying.push_back(Copying {
                    window,
                    index,
                    name: sent.header.transfer.0,
                    destination,
                });
            } else {
                self.write(sent.header.transfer.0, claim.index(), &claim.destination);
                self.receive.arrived(claim);
            }
            return;
        }
        if let Some(sent) = self.lanes[at].wire.pop_front() {
            self.claim(at, sent);
        }
    }

    fn claim(&mut self, at: usize, sent: Sent) {
        match self.receive.claim(at as u16, &sent.header) {
            Ok(Arrival::Claimed(claim)) => {
                let transfer = &self.transfers[transfer(sent.header.transfer.0)];
                assert!(!transfer.closed, "a closed window has chunks");
                self.lanes[at].reading = Some((claim, sent));
            }
            Ok(Arrival::Unwanted) => {}
            Ok(Arrival::HeldBy(holder)) => {
                assert_ne!(usize::from(holder), at);
                assert!(
                    self.lanes[usize::from(holder)].sender_dead,
                    "a living lane was superseded"
                );
                self.lanes[at].parked = Some(sent);
                self.kill_receiver(usize::from(holder));
            }
            Err(violation) => panic!("{violation:?}"),
        }
    }

    /// The bytes of a chunk go where they belong.
    fn write(&mut self, name: u64, index: u32, destination: &RegionSlice) {
        let at = transfer(name);
        let one = &mut self.transfers[at];
        assert!(!one.closed, "a closed window is written");
        let (offset, length) = one.plan.range(index);
        assert_eq!(destination.offset() as u64, offset);
        destination.write_from(&content(at, index, length)).unwrap();
        one.written[index as usize] += 1;
    }

    /// The copy worker ends with its oldest copy.
    fn copy(&mut self, fails: bool) {
        let Some(Copying {
            window,
            index,
            name,
            destination,
        }) = self.copying.pop_front()
        else {
            return;
        };
        let error = if fails {
            self.transfers[transfer(name)].failed.insert(index);
            Some(ChannelError::Cancelled)
        } else {
            self.write(name, index, &destination);
            None
        };
        drop(destination);
        self.receive.copied(&window, index, error);
    }

    fn kill_sender(&mut self, at: usize) {
        let alive = self.lanes.iter().filter(|lane| !lane.sender_dead).count();
        if self.lanes[at].sender_dead || alive == 1 {
            return;
        }
        self.lanes[at].sender_dead = true;
        let writing = self.lanes[at].writing.take();
        if let Some(chunk) = &writing {
            // Some of it has left.
            self.put_on_wire(at, chunk, false);
        }
        let mut freed = Vec::new();
        self.transmit
            .lane_ended(at as u16, writing, |slot| freed.push(slot));
        freed.into_iter().for_each(|slot| self.ended(slot));
    }

    /// The receiver's end of a lane is gone.
    fn kill_receiver(&mut self, at: usize) {
        let lane = &mut self.lanes[at];
        lane.receiver_dead = true;
        lane.wire.clear();
        lane.parked = None;
        if let Some((claim, _)) = lane.reading.take() {
            self.receive.put_back(claim);
        }
        let woken = self.receive.waiting.take_all();
        for other in (0..self.lanes.len()).filter(|other| woken & (1 << other) != 0) {
            if let Some(sent) = self.lanes[other].parked.take() {
                self.claim(other, sent);
            }
        }
    }

    /// Both ends of a lane notice that it is dead.
    fn kill(&mut self, at: usize) {
        self.kill_sender(at);
        if self.lanes[at].sender_dead && !self.lanes[at].receiver_dead {
            self.kill_receiver(at);
        }
    }

    fn hear(&mut self) {
        let Some((sequence, placed)) = self.heard.pop_front() else {
            return;
        };
        self.unwanted.insert(sequence);
        let Some(slot) = self.slots.iter().position(|held| *held == Some(sequence)) else {
            return;
        };
        if self.transmit.forget(slot as u16, sequence, placed) == Forgotten::Free {
            self.slot_is_free(slot as u16);
        }
    }

    /// The receiver's owner closes one of its windows.
    fn cancel(&mut self, at: usize) {
        if at >= self.opened || self.transfers[at].closed {
            return;
        }
        self.transfers[at].cancelled = true;
        let reads = |lane: &Lane| {
            let reading = lane.reading.as_ref();
            reading.is_some_and(|(_, sent)| sent.header.transfer.0 == name(at))
        };
        let mut readers = 0;
        for (lane, _) in (0u64..).zip(&self.lanes).filter(|(_, lane)| reads(lane)) {
            readers |= 1 << lane;
        }
        let copies = self.copying.iter().any(|copy| copy.name == name(at));
        match self.receive.close(name(at)) {
            Closing::Done => {
                assert!(readers == 0 && !copies, "its memory is in use");
                self.window_ended(at);
            }
            // One that was closed before may have been asked for already.
            Closing::AskLanes(lanes) | Closing::Copying(lanes) => {
                assert!(lanes == readers || lanes == 0)
            }
        }
    }

    /// The receiver's owner asks what has become of its windows.
    fn poll(&mut self) {
        let mut out = Vec::new();
        self.receive.drain(&mut out);
        for completion in out {
            match completion {
                Completion::Begun { token, total } => {
                    let one = &mut self.transfers[token as usize];
                    assert!(!one.closed, "news of a closed window");
                    assert!(!std::mem::replace(&mut one.begun, true), "told twice");
                    assert_eq!(total, one.plan.bytes());
                }
                Completion::Placed {
                    token,
                    index,
                    offset,
                    bytes,
                } => {
                    let one = &mut self.transfers[token as usize];
                    assert!(one.begun && !one.closed, "news of a closed window");
                    assert_eq!((offset, bytes), one.plan.range(index));
                    assert_eq!(one.written[index as usize], 1, "it is there");
                    let placed = &mut one.placed[index as usize];
                    assert!(!std::mem::replace(placed, true), "told twice");
                    self.heard.push_back((one.first + u64::from(index), true));
                }
                Completion::NotPlaced { token, index, .. } => {
                    let one = &self.transfers[token as usize];
                    assert!(one.begun && one.failed.contains(&index) && !one.closed);
                }
                Completion::Closed { token, .. } => self.window_ended(token as usize),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Nothing points at the window's memory any more, says the table.
    fn window_ended(&mut self, at: usize) {
        let one = &mut self.transfers[at];
        assert!(!std::mem::replace(&mut one.closed, true), "closed twice");
        let whole = one.placed.iter().all(|placed| *placed);
        assert!(whole || one.cancelled, "closed before it was whole");
        let lease = one.region.lease(.., Access::Write);
        assert!(lease.is_ok(), "something holds its memory: {lease:?}");
        // The sender hears that nobody waits for the rest.
        let chunks = (one.first..).zip(&one.placed);
        let rest = chunks.filter(|(_, placed)| !**placed);
        let rest: Vec<_> = rest.map(|(sequence, _)| (sequence, false)).collect();
        self.heard.extend(rest);
    }

    fn step(&mut self, kind: u8, at: usize, window: usize) {
        match kind {
            0..=5 => self.send(at),
            6..=9 => self.arrive(at, false),
            10..=13 => self.arrive(at, true),
            14..=16 => self.copy(false),
            17..=20 => self.hear(),
            21..=23 => self.poll(),
            24 => self.cancel(window),
            25 => self.copy(true),
            26 => self.kill(at),
            _ => self.kill_sender(at),
        }
        self.post();
        self.check();
    }

    /// No destination is in two hands, and none is written twice.
    fn check(&self) {
        for (at, one) in self.transfers.iter().enumerate() {
            assert!(one.written.iter().all(|times| *times <= 1), "transfer {at}");
        }
        let read = self.lanes.iter().filter_map(|lane| lane.reading.as_ref());
        let read = read.map(|(claim, sent)| (sent.header.transfer.0, claim.index()));
        let copied = self.copying.iter().map(|copy| (copy.name, copy.index));
        let mut hands: Vec<_> = read.chain(copied).collect();
        let count = hands.len();
        hands.sort_unstable();
        hands.dedup();
        assert_eq!(hands.len(), count, "one chunk is in two hands");
        let is_closed = |(name, _): &(u64, u32)| self.transfers[transfer(*name)].closed;
        assert!(!hands.iter().any(is_closed), "a closed window is in use");
    }

    /// The bytes are where they belong, and nowhere else.
    fn check_bytes(&self, at: usize) {
        let one = &self.transfers[at];
        let mut bytes = vec![0; one.region.len()];
        one.region.read_to(0, &mut bytes).unwrap();
        for (index, times) in (0..).zip(&one.written) {
            let (offset, length) = one.plan.range(index);
            let expected = match times {
                0 => vec![0; length as usize],
                _ => content(at, index, length),
            };
            let start = offset as usize;
            assert_eq!(bytes[start..start + length as usize], expected);
        }
        let behind = &bytes[one.plan.bytes() as usize..];
        assert!(behind.iter().all(|byte| *byte == 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn every_chunk_is_written_once_and_no_closed_window_whatever_dies(
        lanes in 2usize..6,
        window in 1u16..9,
        lengths in prop::collection::vec((1u64..60, 0u64..60), 1..8),
        steps in prop::collection::vec((0u8..28, 0usize..6, 0usize..8), 0..500),
    ) {
        let mut world = World::new(lanes, window, &lengths);
        world.post();
        for (kind, at, window) in steps {
            world.step(kind, at % lanes, window);
        }
        // What could not be copied is waited for until its window is closed.
        for at in 0..world.transfers.len() {
            if !world.transfers[at].failed.is_empty() {
                world.cancel(at);
            }
        }
        // The rest without further deaths: what is left brings everything to its end.
        for _ in 0..20 * world.chunks.len() {
            for at in 0..lanes {
                for kind in [0, 6, 10, 14, 17, 21] {
                    world.step(kind, at, 0);
                }
            }
        }
        for at in 0..world.transfers.len() {
            let one = &world.transfers[at];
            prop_assert!(one.closed, "window {} never ended", at);
            prop_assert!(one.cancelled || one.placed.iter().all(|placed| *placed));
            world.check_bytes(at);
        }
        for _ in 0..2 * world.chunks.len() {
            world.step(17, 0, 0);
            (0..lanes).for_each(|at| world.step(0, at, 0));
        }
        prop_assert!(world.slots.iter().all(Option::is_none), "a slot was lost");
        let mut done = world.transmit.chunks.done();
        prop_assert!(done.all(|done| done.owes().is_none()), "a chunk was not counted");
        let mut out = Vec::new();
        world.receive.drain(&mut out);
        prop_assert!(out.is_empty(), "{out:?}");
    }
}
