//! A comm's sends and receives against lanes that deliver, end, and wake up late, in any order: each chunk is written
//! once, by one lane at a time, none is lost, and each brings what its send was posted with, although the host writes
//! something else there as soon as the send is done.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use nccl_net::export::{Buffer, RequestId};
use tcpx_lanes::lane_group::LaneGroup;
use tcpx_lanes::socket_calls::Span;
use tcpx_wire::ChunkHeader;

use super::carriage::header;
use super::group::Group;
use super::inlet::{Claimed, Inlet, Part};
use super::outlet::{Chunk, Outlet};
use super::retention::{Kept, Retention};
use crate::shuffle::Shuffle;

const LANES: usize = 3;
/// More than there are slots for, so that each of them serves several.
const MESSAGES: u64 = 3 * RequestId::LIMIT as u64;
const CHUNKS: u64 = 3;
const CHUNK_BYTES: u64 = 4;
const BYTES: u64 = CHUNKS * CHUNK_BYTES;

/// A chunk in a socket: what was written there stays, whatever becomes of its memory.
type InSocket = (ChunkHeader, [u8; CHUNK_BYTES as usize]);
type Message = [u8; BYTES as usize];

/// What the host sends as a message.
fn content(sequence: u64) -> Message {
    std::array::from_fn(|at| (sequence * 31 + at as u64 * 7 + 1) as u8)
}

fn slot(sequence: u64) -> usize {
    sequence as usize % RequestId::LIMIT
}

/// What a lane that sends a chunk finds in its memory.
fn in_socket(chunk: &Chunk) -> InSocket {
    let mut bytes = [0; CHUNK_BYTES as usize];
    // SAFETY: memory of the world, or a slot that the chunk keeps.
    let payload = unsafe { std::slice::from_raw_parts(chunk.payload.start(), chunk.payload.len()) };
    bytes.copy_from_slice(payload);
    (chunk.header, bytes)
}

/// One lane as both ends see it.
#[derive(Default)]
struct Lane {
    id: u64,
    /// On their way.
    wire: VecDeque<InSocket>,
    /// Chunks that were sent, and read of them.
    sent: u64,
    read: u64,
    /// What its receiver reads now.
    reading: Option<(Part, InSocket)>,
    /// What its receiver waits with.
    parked: Option<InSocket>,
    sender_dead: bool,
    receiver_dead: bool,
}

struct World {
    random: Shuffle,
    inlet: Inlet,
    group: Arc<Group>,
    outlet: Arc<Outlet>,
    /// Room for some of the chunks under way.
    retention: Arc<Retention>,
    /// Slots that are taken, so that there is no room at times.
    _taken: Vec<Kept>,
    /// The host's, at both ends, by slot.
    sources: Vec<Message>,
    memory: Vec<Message>,
    lanes: Vec<Lane>,
    ids: u64,
    queue: LaneGroup<Chunk>,
    posted: u64,
    /// Sends that the host was told are done.
    sent: BTreeSet<u64>,
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
        let retention = Retention::new().unwrap();
        // SAFETY: borrowed for the call.
        let take = |_| unsafe { retention.copy(Span::of(&[0])) }.map(|(kept, _)| kept);
        Self {
            _taken: (0..12).filter_map(take).collect(),
            random: Shuffle::new(seed),
            inlet,
            group,
            outlet: Arc::new(Outlet::new(Arc::default())),
            retention,
            sources: vec![[0; BYTES as usize]; RequestId::LIMIT],
            memory: vec![[0; BYTES as usize]; RequestId::LIMIT],
            lanes: (0..LANES as u64).map(lane).collect(),
            ids: LANES as u64,
            queue: LaneGroup::new(LANES, (MESSAGES * CHUNKS) as usize),
            posted: 0,
            sent: BTreeSet::new(),
            written: BTreeMap::new(),
            open: BTreeSet::new(),
        }
    }

    fn below(&mut self, most: usize) -> usize {
        self.random.below(most)
    }

    /// Posts receives while there are slots, and queues their messages, as a grant lets the sender do.
    fn post(&mut self) {
        let first = self.posted.saturating_sub(RequestId::LIMIT as u64);
        let unsent = (first..self.posted).find(|sequence| !self.sent.contains(sequence));
        let oldest = self.open.first().copied().into_iter().chain(unsent).min();
        let oldest = oldest.unwrap_or(self.posted);
        while self.posted < MESSAGES && self.posted - oldest < RequestId::LIMIT as u64 {
            let sequence = self.posted;
            let to = &mut self.memory[slot(sequence)];
            let buffer = Buffer {
                data: to.as_mut_ptr(),
                len: to.len(),
            };
            self.inlet.post(sequence, buffer, None);
            self.sources[slot(sequence)] = content(sequence);
            let payload = Span::of(&self.sources[slot(sequence)]);
            self.outlet.begin(sequence, BYTES as usize);
            for at in (0..BYTES).step_by(CHUNK_BYTES as usize) {
                let header = header(1, sequence, at, CHUNK_BYTES as u32, BYTES);
                let payload = payload.from(at as usize).first(CHUNK_BYTES as usize);
                let pushed = self.queue.push(self.outlet.chunk(header, payload));
                assert!(pushed.is_ok(), "there is room for all");
            }
            self.open.insert(sequence);
            self.posted += 1;
        }
    }

    fn send(&mut self, at: usize) {
        let lane = &mut self.lanes[at];
        if lane.sender_dead || lane.sent - lane.read > 3 {
            return;
        }
        if let Some(mut chunk) = self.queue.take(at as u16) {
            self.queue.took(at as u16);
            lane.wire.push_back(in_socket(&chunk));
            chunk.retain(&self.retention);
            lane.sent += 1;
            self.queue.keep(at as u16, lane.sent, chunk);
        }
    }

    /// The host tests its sends, and uses the memory of those that are done for something else at once.
    fn test_sends(&mut self) {
        for sequence in self.posted.saturating_sub(RequestId::LIMIT as u64)..self.posted {
            if !self.sent.contains(&sequence) && self.outlet.is_sent(sequence) {
                self.sent.insert(sequence);
                self.sources[slot(sequence)].fill(0xee);
            }
        }
    }

    /// The receiving end has read a chunk to its end, and says so.
    fn acknowledge(&mut self, at: usize) {
        let lane = &mut self.lanes[at];
        if !lane.sender_dead {
            lane.read += 1;
            let chunk = self.queue.read_to(at as u16, lane.read);
            chunk.expect("it is kept").acknowledged();
        }
    }

    fn receive(&mut self, at: usize) {
        if self.lanes[at].receiver_dead {
            return;
        }
        if let Some((part, (chunk, bytes))) = self.lanes[at].reading.take() {
            let key = (chunk.sequence, chunk.offset);
            self.acknowledge(at);
            *self.written.entry(key).or_default() += 1;
            let start = chunk.offset as usize;
            let to = &mut self.memory[slot(chunk.sequence)][start..start + bytes.len()];
            to.copy_from_slice(&bytes);
            self.inlet.complete_part(&part, true);
            return;
        }
        let lane = &mut self.lanes[at];
        let Some(chunk) = lane.parked.take().or_else(|| lane.wire.pop_front()) else {
            return;
        };
        let header = chunk.0;
        match self.inlet.claim(&self.group, lane.id, &header) {
            Ok(Claimed::Write(part)) => {
                let is_read = |one: &Lane| {
                    one.reading.as_ref().is_some_and(|(_, (other, _))| {
                        (other.sequence, other.offset) == (header.sequence, header.offset)
                    })
                };
                assert!(
                    !self.lanes.iter().any(is_read),
                    "two lanes write {header:?}"
                );
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
        lane.sent = lane.read;
        let again = self.queue.end(at as u16).into_iter().map(|mut chunk| {
            chunk.header.attempt = chunk.header.attempt.saturating_add(1);
            chunk
        });
        self.queue.push_again(again);
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
        self.test_sends();
        for (lane, done) in self.lanes.iter().zip(self.queue.done()) {
            assert_eq!(done.under_way(), lane.sent - lane.read);
        }
        let (inlet, memory) = (&self.inlet, &self.memory);
        self.open.retain(|sequence| {
            let is_whole = inlet.progress(*sequence) == Some((BYTES, BYTES));
            let found = memory[slot(*sequence)];
            assert!(
                !is_whole || found == content(*sequence),
                "of {sequence}: {found:?}"
            );
            !is_whole
        });
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
