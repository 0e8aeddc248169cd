//! A comm's receives against lanes that deliver, end, and wake up late, in any order: each chunk is written once,
//! by one lane at a time, and none is lost.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use nccl_net::export::{Buffer, RequestId};
use tcpx_wire::ChunkHeader;

use super::carriage::header;
use super::group::Group;
use super::inlet::{Claimed, Inlet, Part};
use crate::shuffle::Shuffle;

const LANES: usize = 3;
/// More than there are slots for, so that each of them serves several.
const MESSAGES: u64 = 3 * RequestId::LIMIT as u64;
const CHUNKS: u64 = 3;
const CHUNK_BYTES: u64 = 4;
const BYTES: u64 = CHUNKS * CHUNK_BYTES;

/// One lane as both ends see it.
#[derive(Default)]
struct Lane {
    id: u64,
    /// On their way.
    wire: VecDeque<ChunkHeader>,
    /// What its sender keeps.
    unacked: VecDeque<ChunkHeader>,
    /// What its receiver reads now.
    reading: Option<(Part, ChunkHeader)>,
    /// What its receiver waits with.
    parked: Option<ChunkHeader>,
    sender_dead: bool,
    receiver_dead: bool,
}

struct World {
    random: Shuffle,
    inlet: Inlet,
    group: Arc<Group>,
    memory: Vec<[u8; BYTES as usize]>,
    lanes: Vec<Lane>,
    ids: u64,
    queue: VecDeque<ChunkHeader>,
    posted: u64,
    /// How often each chunk was written whole.
    written: BTreeMap<(u64, u64), u32>,
    open: BTreeSet<u64>,
}

impl World {
    fn new(seed: u64) -> Self {
        let (inlet, group) = (Inlet::new(1), Arc::new(Group::default()));
        assert!(inlet.join(Arc::clone(&group)));
        let lane = |id| Lane {
            id,
            ..Lane::default()
        };
        Self {
            random: Shuffle::new(seed),
            inlet,
            group,
            memory: vec![[0; BYTES as usize]; RequestId::LIMIT],
            lanes: (0..LANES as u64).map(lane).collect(),
            ids: LANES as u64,
            queue: VecDeque::new(),
            posted: 0,
            written: BTreeMap::new(),
            open: BTreeSet::new(),
        }
    }

    fn below(&mut self, most: usize) -> usize {
        self.random.below(most)
    }

    /// Posts receives while there are slots, and queues their messages, as a grant lets the sender do.
    fn post(&mut self) {
        let oldest = self.open.first().copied().unwrap_or(self.posted);
        while self.posted < MESSAGES && self.posted - oldest < RequestId::LIMIT as u64 {
            let sequence = self.posted;
            let slot = &mut self.memory[sequence as usize % RequestId::LIMIT];
            let buffer = Buffer {
                data: slot.as_mut_ptr(),
                len: slot.len(),
            };
            self.inlet.post(sequence, buffer, None);
            let chunk = |at| header(1, sequence, at * CHUNK_BYTES, CHUNK_BYTES as u32, BYTES);
            self.queue.extend((0..CHUNKS).map(chunk));
            self.open.insert(sequence);
            self.posted += 1;
        }
    }

    fn send(&mut self, at: usize) {
        let lane = &mut self.lanes[at];
        if lane.sender_dead || lane.unacked.len() > 3 {
            return;
        }
        if let Some(chunk) = self.queue.pop_front() {
            lane.wire.push_back(chunk);
            lane.unacked.push_back(chunk);
        }
    }

    /// The receiving end has read a chunk to its end, and says so.
    fn acknowledge(&mut self, at: usize) {
        let lane = &mut self.lanes[at];
        if !lane.sender_dead {
            lane.unacked.pop_front();
        }
    }

    fn receive(&mut self, at: usize) {
        if self.lanes[at].receiver_dead {
            return;
        }
        if let Some((part, chunk)) = self.lanes[at].reading.take() {
            let key = (chunk.sequence, chunk.offset);
            self.acknowledge(at);
            *self.written.entry(key).or_default() += 1;
            self.inlet.complete_part(&part, true);
            return;
        }
        let lane = &mut self.lanes[at];
        let Some(chunk) = lane.parked.take().or_else(|| lane.wire.pop_front()) else {
            return;
        };
        match self.inlet.claim(&self.group, lane.id, &chunk) {
            Ok(Claimed::Write(part)) => {
                let is_read = |one: &Lane| {
                    one.reading.as_ref().is_some_and(|(_, other)| {
                        (other.sequence, other.offset) == (chunk.sequence, chunk.offset)
                    })
                };
                assert!(!self.lanes.iter().any(is_read), "two lanes write {chunk:?}");
                self.lanes[at].reading = Some((part, chunk));
            }
            Ok(Claimed::Drain) => self.acknowledge(at),
            Ok(Claimed::Held(holder)) => {
                lane.parked = Some(chunk);
                let holder = self.lanes.iter().position(|lane| lane.id == holder);
                self.end_receiver(holder.expect("it holds a chunk"));
            }
            Err(()) => panic!("{:?}", self.inlet.refusal()),
        }
    }

    fn end_receiver(&mut self, at: usize) {
        let lane = &mut self.lanes[at];
        lane.receiver_dead = true;
        lane.parked = None;
        if let Some((part, _)) = lane.reading.take() {
            self.inlet.put_back(&part);
        }
    }

    /// The sending end gives the lane up, which its receiver may learn much later.
    fn end_sender(&mut self, at: usize) {
        let lane = &mut self.lanes[at];
        lane.sender_dead = true;
        for chunk in lane.unacked.drain(..).rev() {
            let attempt = chunk.attempt.saturating_add(1);
            self.queue.push_front(ChunkHeader { attempt, ..chunk });
        }
    }

    /// A lane that both ends gave up is dialled again.
    fn redial(&mut self, at: usize) {
        if self.lanes[at].sender_dead && self.lanes[at].receiver_dead {
            self.lanes[at] = Lane {
                id: self.ids,
                ..Lane::default()
            };
            self.ids += 1;
        }
    }

    fn step(&mut self, ends: bool) {
        let at = self.below(LANES);
        match self.below(if ends { 20 } else { 16 }) {
            0..=4 => self.send(at),
            5..=13 => self.receive(at),
            // What one end gave up the other one does not keep for ever.
            14 if self.lanes[at].sender_dead => self.end_receiver(at),
            14 if self.lanes[at].receiver_dead => self.end_sender(at),
            14 | 15 => self.redial(at),
            16 | 17 => self.end_sender(at),
            18 => self.end_receiver(at),
            _ => self.post(),
        }
        let inlet = &self.inlet;
        self.open
            .retain(|sequence| inlet.progress(*sequence) != Some((BYTES, BYTES)));
    }
}

#[test]
fn whatever_becomes_of_lanes_each_chunk_is_written_once() {
    for seed in 0..300 {
        let mut world = World::new(seed);
        world.post();
        for _ in 0..2_000 {
            world.step(true);
        }
        let mut steps = 0;
        while !world.open.is_empty() || world.posted < MESSAGES {
            world.step(false);
            world.post();
            steps += 1;
            assert!(steps < 100_000, "seed {seed}: {:?} never come", world.open);
        }
        let chunks = (MESSAGES * CHUNKS) as usize;
        assert_eq!(world.written.len(), chunks, "seed {seed}");
        let twice = world.written.iter().find(|(_, count)| **count != 1);
        assert_eq!(twice, None, "seed {seed}");
        assert_eq!(world.inlet.refusal(), None);
    }
}
