//! The two tables against a network of lanes that deliver, die, and wake up late, in any order: each
//! chunk is written once, by one lane, and none is lost while a lane is left.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use tcpx_memory::Region;
use tcpx_wire::TransferId;
use tcpx_wire::chunk_header::ChunkHeader;

use super::receive_table::{Arrival, Claim, ReceiveState, ReceiveTable};
use super::transmit_table::{Forgotten, Outgoing, Taken, TransmitTable};
use crate::channel::ReceiveChunk;
use crate::error::ChunkPosition;

const LENGTH: u64 = 8;

/// One lane as both ends see it.
#[derive(Default)]
struct Lane {
    /// What its sender writes now.
    writing: Option<Outgoing>,
    /// Headers on their way.
    wire: VecDeque<ChunkHeader>,
    /// What its receiver reads now.
    reading: Option<Claim>,
    /// The header its receiver waits with.
    early: Option<ChunkHeader>,
    sender_dead: bool,
    receiver_dead: bool,
}

struct World {
    lanes: Vec<Lane>,
    transmit: TransmitTable,
    receive: ReceiveTable,
    chunks: u64,
    window: u64,
    posted_sends: u64,
    posted_receives: u64,
    /// By slot: what the sender's owner has there.
    slots: Vec<Option<u64>>,
    /// How often each chunk was written to its destination.
    placed: BTreeMap<u64, u32>,
    acks: VecDeque<u64>,
}

impl World {
    fn new(lanes: usize, window: u16, chunks: u64) -> Self {
        Self {
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            transmit: TransmitTable::new(window, true),
            receive: ReceiveTable::new(window),
            chunks,
            window: window.into(),
            posted_sends: 0,
            posted_receives: 0,
            slots: vec![None; window.into()],
            placed: BTreeMap::new(),
            acks: VecDeque::new(),
        }
    }

    /// Posts what the windows allow, as the session would.
    fn post(&mut self) {
        let oldest = self.slots.iter().flatten().min().copied();
        while self.posted_sends < self.chunks
            && oldest.is_none_or(|oldest| self.posted_sends - oldest < self.window)
            && let Some(slot) = self.slots.iter().position(Option::is_none)
        {
            let sequence = self.posted_sends;
            self.posted_sends += 1;
            self.slots[slot] = Some(sequence);
            let header = header(sequence);
            self.transmit.enqueue(Outgoing {
                slot: slot as u16,
                header: header.encode(),
                position: ChunkPosition {
                    sequence,
                    transfer: 1,
                    offset: sequence * LENGTH,
                    length: LENGTH,
                    done: 0,
                },
                payload: Region::host(LENGTH as usize).unwrap().all(),
                attempt: 0,
                permit: None,
                spliced: None,
            });
        }
        let first = (0..).find(|at| !self.placed.contains_key(at)).unwrap();
        while self.posted_receives < self.chunks && self.posted_receives - first < self.window {
            let sequence = self.posted_receives;
            self.posted_receives += 1;
            self.receive.post(ReceiveChunk {
                token: sequence,
                sequence,
                transfer: 1,
                offset: sequence * LENGTH,
                tag: 0,
                destination: Region::host(LENGTH as usize).unwrap().all(),
                fence: None,
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
            self.lanes[at]
                .wire
                .push_back(ChunkHeader::decode(&chunk.header).unwrap());
            if let Some(ended) = self.transmit.written(chunk) {
                self.ended(ended);
            }
            return;
        }
        match self.transmit.take(at as u16) {
            Some(Taken::Chunk(chunk)) => self.lanes[at].writing = Some(chunk),
            Some(Taken::Withdrawn(slot)) => self.slot_is_free(slot),
            None => {}
        }
    }

    fn ended(&mut self, chunk: Outgoing) {
        let slot = chunk.slot;
        self.transmit.free(slot);
        self.slot_is_free(slot);
    }

    /// A lane's receiver reads a header, or the payload behind it.
    fn arrive(&mut self, at: usize) {
        if self.lanes[at].receiver_dead {
            return;
        }
        if let Some(claim) = self.lanes[at].reading.take() {
            let sequence = claim.chunk.sequence;
            self.receive.set(claim.slot, ReceiveState::Empty);
            *self.placed.entry(sequence).or_default() += 1;
            self.acks.push_back(sequence);
            return;
        }
        let lane = &mut self.lanes[at];
        let Some(header) = lane.early.take().or_else(|| lane.wire.pop_front()) else {
            return;
        };
        match self.receive.claim(at as u16, &header) {
            Ok(Arrival::Claimed(claim)) => self.lanes[at].reading = Some(claim),
            Ok(Arrival::Unwanted) => {}
            Ok(Arrival::Early) => self.lanes[at].early = Some(header),
            Ok(Arrival::HeldBy(holder)) => {
                assert_ne!(usize::from(holder), at);
                self.kill_receiver(usize::from(holder));
                self.lanes[at].early = Some(header);
            }
            Err(violation) => panic!("{violation:?}"),
        }
    }

    fn kill_sender(&mut self, at: usize) {
        let alive = self.lanes.iter().filter(|lane| !lane.sender_dead).count();
        if self.lanes[at].sender_dead || alive == 1 {
            return;
        }
        self.lanes[at].sender_dead = true;
        if let Some(chunk) = self.lanes[at].writing.take()
            && let Some(ended) = self.transmit.put_back(chunk)
        {
            self.ended(ended);
        }
        self.transmit.requeue(at as u16);
    }

    /// The receiver's end of a lane is gone; its sender hears of it.
    fn kill_receiver(&mut self, at: usize) {
        assert!(self.lanes[at].sender_dead, "a living lane was superseded");
        self.lanes[at].receiver_dead = true;
        self.lanes[at].wire.clear();
        self.lanes[at].early = None;
        if let Some(claim) = self.lanes[at].reading.take() {
            self.receive.put_back(claim).unwrap();
        }
    }

    fn acknowledge(&mut self) {
        let Some(sequence) = self.acks.pop_front() else {
            return;
        };
        let Some(slot) = self.slots.iter().position(|held| *held == Some(sequence)) else {
            return;
        };
        if self.transmit.forget(slot as u16, sequence, true) == Forgotten::Free {
            self.slot_is_free(slot as u16);
        }
    }

    fn step(&mut self, kind: u8, at: usize) {
        match kind {
            0..=2 => self.send(at),
            3..=6 => self.arrive(at),
            7 | 8 => self.acknowledge(),
            _ => self.kill_sender(at),
        }
        self.post();
        self.check();
    }

    /// No destination is in two hands, and none is written twice.
    fn check(&self) {
        for (sequence, times) in &self.placed {
            assert_eq!(*times, 1, "chunk {sequence}");
        }
        let mut readers: Vec<_> = self
            .lanes
            .iter()
            .filter_map(|lane| Some(lane.reading.as_ref()?.chunk.sequence))
            .collect();
        let count = readers.len();
        readers.sort_unstable();
        readers.dedup();
        assert_eq!(readers.len(), count, "two lanes write one chunk");
    }
}

fn header(sequence: u64) -> ChunkHeader {
    ChunkHeader {
        sequence,
        transfer: TransferId(1),
        offset: sequence * LENGTH,
        total: 0,
        length: LENGTH as u32,
        attempt: 0,
        behind: 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn every_chunk_is_written_once_whatever_dies(
        lanes in 2usize..6,
        window in 1u16..9,
        chunks in 1u64..40,
        steps in prop::collection::vec((0u8..11, 0usize..6), 0..400),
    ) {
        let mut world = World::new(lanes, window, chunks);
        world.post();
        for (kind, at) in steps {
            world.step(kind, at % lanes);
        }
        // The rest without further deaths: what is left brings everything to its end.
        for _ in 0..20 * chunks as usize {
            for at in 0..lanes {
                world.step(0, at);
                world.step(3, at);
                world.step(7, at);
            }
        }
        prop_assert_eq!(world.placed.len() as u64, chunks);
        prop_assert!(world.slots.iter().all(Option::is_none), "a slot was lost");
    }
}
