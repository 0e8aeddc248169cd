//! Two sessions, the connection between them and their data planes, driven by one seeded clock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use super::model::*;
use super::*;
use crate::frame::{Frame, TransferId};
use crate::time::Time;

/// What may go wrong or slow, and how much.
#[derive(Clone, Debug)]
pub(super) struct Weather {
    /// Greatest delay of every step in microseconds.
    pub(super) jitter: u64,
    /// Neither side's frames arrive.
    pub(super) cut: bool,
    /// The network never finishes sending.
    pub(super) no_send: bool,
    /// Data leaves and never arrives.
    pub(super) lose_data: bool,
    /// Data arrives and is never unpacked.
    pub(super) no_unpack: bool,
    pub(super) no_digest: bool,
    pub(super) no_quiet: bool,
    /// The receiver's digests are wrong.
    pub(super) corrupt: bool,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Frame,
    Data {
        channel: u16,
    },
    Sent {
        operation: OperationId,
        index: u32,
        channel: u16,
    },
    Placed {
        operation: OperationId,
        index: u32,
        channel: u16,
    },
    Copied {
        operation: OperationId,
    },
    Digest {
        operation: OperationId,
        crc32c: u32,
    },
    Quiet {
        operation: OperationId,
    },
}

pub(super) struct Side {
    pub(super) session: Session,
    pub(super) operations: BTreeMap<OperationId, Watched>,
    pub(super) sends: Lanes,
    pub(super) receives: Lanes,
    pub(super) granted: BTreeSet<TransferId>,
    pub(super) closed: Option<Option<ConnectionFailure>>,
    /// Frames on their way to this side.
    inbox: VecDeque<Frame>,
    inbox_at: Time,
    pub(super) frames_in: Vec<Frame>,
    /// Data on its way to this side, then at the head of each channel.
    data: BTreeMap<u16, VecDeque<(u64, u32)>>,
    heads: BTreeMap<u16, VecDeque<(u64, u32)>>,
    data_at: BTreeMap<u16, Time>,
    pub(super) setup_done: bool,
}

pub(super) struct Pair {
    pub(super) now: Time,
    pub(super) sides: [Side; 2],
    pub(super) random: Random,
    pub(super) weather: Weather,
    events: BinaryHeap<Reverse<(Time, u64, usize, Event)>>,
    scheduled: u64,
}

impl Pair {
    pub(super) fn new(config: Config, seed: u64) -> Self {
        Self::of(config.clone(), config, seed)
    }

    pub(super) fn of(a: Config, b: Config, seed: u64) -> Self {
        let mut pair = Self::unconnected(a, b, seed);
        pair.run(Duration::from_millis(10));
        assert!(pair.sides[0].session.may_post() && pair.sides[1].session.may_post());
        pair
    }

    /// Before any frame was exchanged; call `ready` and `run`.
    pub(super) fn unconnected(a: Config, b: Config, seed: u64) -> Self {
        let now = Time(1_000_000);
        let side = |config| Side {
            session: Session::new(config, now).unwrap(),
            operations: BTreeMap::new(),
            sends: Lanes::default(),
            receives: Lanes::default(),
            granted: BTreeSet::new(),
            closed: None,
            inbox: VecDeque::new(),
            inbox_at: now,
            frames_in: Vec::new(),
            data: BTreeMap::new(),
            heads: BTreeMap::new(),
            data_at: BTreeMap::new(),
            setup_done: true,
        };
        Self {
            now,
            sides: [side(a), side(b)],
            random: Random(seed),
            weather: Weather {
                jitter: 100,
                cut: false,
                no_send: false,
                lose_data: false,
                no_unpack: false,
                no_digest: false,
                no_quiet: false,
                corrupt: false,
            },
            events: BinaryHeap::new(),
            scheduled: 0,
        }
    }

    pub(super) fn send(&mut self, side: usize, request: SendRequest) -> OperationId {
        let bytes = request.bytes;
        let operation = self.sides[side].session.send(self.now, request).unwrap();
        self.watch(side, operation, bytes);
        self.drain(side);
        operation
    }

    pub(super) fn receive(&mut self, side: usize, request: ReceiveRequest) -> OperationId {
        let bytes = request.capacity;
        let operation = self.sides[side].session.receive(self.now, request).unwrap();
        self.watch(side, operation, bytes);
        self.drain(side);
        operation
    }

    fn watch(&mut self, side: usize, operation: OperationId, bytes: u64) {
        let watched = Watched {
            bytes,
            ..Watched::default()
        };
        assert!(
            self.sides[side]
                .operations
                .insert(operation, watched)
                .is_none()
        );
    }

    pub(super) fn with<T>(&mut self, side: usize, f: impl FnOnce(&mut Session, Time) -> T) -> T {
        let result = f(&mut self.sides[side].session, self.now);
        self.drain(side);
        result
    }

    pub(super) fn outcome(
        &self,
        side: usize,
        operation: OperationId,
    ) -> Option<&Result<Completed, OperationError>> {
        self.sides[side].operations[&operation].outcome.as_ref()
    }

    pub(super) fn error(&self, side: usize, operation: OperationId) -> OperationError {
        self.outcome(side, operation)
            .expect("the operation ended")
            .clone()
            .expect_err("the operation failed")
    }

    pub(super) fn success(&self, side: usize, operation: OperationId) -> Completed {
        self.outcome(side, operation)
            .expect("the operation ended")
            .clone()
            .expect("the operation succeeded")
    }

    /// Every operation of both sides ended.
    pub(super) fn settled(&self) -> bool {
        let ended = |side: &Side| {
            side.operations
                .values()
                .all(|watched| watched.outcome.is_some())
        };
        self.sides.iter().all(ended)
    }

    /// Runs for a span of virtual time.
    pub(super) fn run(&mut self, span: Duration) {
        let end = self.now + span;
        while self.step(end) {}
        self.now = end;
    }

    /// Runs until every operation ended.
    pub(super) fn settle(&mut self, within: Duration) {
        let end = self.now + within;
        while !self.settled() && self.step(end) {}
        assert!(self.settled(), "unfinished: {:#?}", self.unfinished());
    }

    fn unfinished(&self) -> Vec<OperationState> {
        let states = self.sides.iter();
        states
            .flat_map(|side| side.session.snapshot(self.now))
            .collect()
    }

    /// The next thing that happens, if before `end`.
    fn step(&mut self, end: Time) -> bool {
        for side in 0..2 {
            if self.sides[side].setup_done && !self.sides[side].session.local_ready {
                self.sides[side].session.ready();
            }
            self.drain(side);
        }
        let event = self.events.peek().map(|Reverse((at, ..))| *at);
        let timer = (0..2)
            .filter_map(|side| Some((self.sides[side].session.next_timeout()?, side)))
            .min();
        match (event, timer) {
            (event, Some((at, side))) if event.is_none_or(|event| at < event) => {
                if at > end {
                    return false;
                }
                self.now = self.now.max(at);
                self.sides[side].session.handle_timeout(self.now);
                let again = self.sides[side].session.next_timeout();
                assert!(
                    again.is_none_or(|again| again > self.now),
                    "timer does not advance"
                );
                self.drain(side);
            }
            (Some(at), _) => {
                if at > end {
                    return false;
                }
                let Some(Reverse((at, _, side, event))) = self.events.pop() else {
                    return false;
                };
                self.now = self.now.max(at);
                self.happen(side, event);
                self.drain(side);
            }
            (None, _) => return false,
        }
        true
    }

    fn schedule(&mut self, side: usize, event: Event) {
        let delay = Duration::from_micros(self.random.below(self.weather.jitter) + 1);
        self.schedule_at(side, self.now + delay, event);
    }

    fn schedule_at(&mut self, side: usize, at: Time, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((at, self.scheduled, side, event)));
    }

    fn happen(&mut self, at: usize, event: Event) {
        let now = self.now;
        let side = &mut self.sides[at];
        match event {
            Event::Frame => {
                let Some(frame) = side.inbox.pop_front() else {
                    return;
                };
                if self.weather.cut {
                    return;
                }
                if let Frame::Grant { transfer, .. } = frame {
                    side.granted.insert(transfer);
                }
                side.frames_in.push(frame.clone());
                side.session.frame(now, frame).expect("an honest peer");
            }
            Event::Data { channel } => {
                let arrived = side.data.get_mut(&channel).and_then(VecDeque::pop_front);
                side.heads.entry(channel).or_default().extend(arrived);
                self.accept(at, channel);
            }
            Event::Sent {
                operation,
                index,
                channel,
            } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                if !watched.quiet && watched.held.remove(&index) {
                    side.sends.release(channel);
                    side.session.chunk_sent(now, operation, index);
                }
            }
            Event::Placed {
                operation,
                index,
                channel,
            } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                if !watched.quiet && watched.held.remove(&index) {
                    watched.placed.insert(index);
                    side.receives.release(channel);
                    side.session.chunk_placed(now, operation, index);
                }
            }
            Event::Copied { operation } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                if !watched.quiet {
                    watched.copying = false;
                    side.session.eager_copied(now, operation);
                }
            }
            Event::Digest { operation, crc32c } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                if !watched.quiet {
                    watched.digesting = false;
                    side.session.digest(now, operation, crc32c);
                }
            }
            Event::Quiet { operation } => self.become_quiet(at, operation),
        }
    }

    fn become_quiet(&mut self, at: usize, operation: OperationId) {
        let side = &mut self.sides[at];
        let watched = side.operations.get_mut(&operation).unwrap();
        watched.quiet = true;
        let sends = operation.sent_transfer().is_some();
        let lanes = if sends {
            &mut side.sends
        } else {
            &mut side.receives
        };
        let agreed = *side.session.agreed().unwrap();
        // The sequence number of a chunk follows from any posted one.
        for index in std::mem::take(&mut watched.held) {
            let channel = watched_channel(&side.session, operation, index, agreed.channels);
            lanes.release(channel);
        }
        for queue in lanes.posted.values_mut() {
            queue.retain(|(_, of, _)| *of != operation);
        }
        side.session.data_quiet(self.now, operation);
    }

    /// Matches the data at the head of a channel with the receives posted there: both ascend, so a
    /// later receive means that the transfer of the data was dropped.
    fn accept(&mut self, at: usize, channel: u16) {
        loop {
            let side = &mut self.sides[at];
            let Some(head) = side.heads.get_mut(&channel) else {
                return;
            };
            let Some((sequence, length)) = head.front().copied() else {
                return;
            };
            let posted = side.receives.posted.entry(channel).or_default();
            let Some(found) = posted.iter().position(|(posted, ..)| *posted >= sequence) else {
                return;
            };
            head.pop_front();
            if posted[found].0 > sequence {
                continue;
            }
            let Some((_, operation, chunk)) = posted.remove(found) else {
                return;
            };
            assert_eq!(chunk.length, length, "both sides cut alike");
            let watched = side.operations.get_mut(&operation).unwrap();
            if watched.quiet {
                continue;
            }
            watched.placed_bytes += u64::from(length);
            side.session
                .chunk_arrived(self.now, operation, chunk.index, length.into());
            if !self.weather.no_unpack {
                let index = chunk.index;
                self.schedule(
                    at,
                    Event::Placed {
                        operation,
                        index,
                        channel,
                    },
                );
            }
        }
    }

    /// Takes everything the session wants out of it.
    pub(super) fn drain(&mut self, at: usize) {
        loop {
            let mut idle = true;
            while let Some(action) = self.sides[at].session.poll_action() {
                idle = false;
                self.act(at, action);
            }
            while let Some(frame) = self.sides[at].session.poll_transmit(self.now) {
                idle = false;
                let delay = Duration::from_micros(self.random.below(self.weather.jitter) + 1);
                let peer = &mut self.sides[1 - at];
                peer.inbox_at = peer.inbox_at.max(self.now + delay);
                peer.inbox.push_back(frame);
                let arrives = peer.inbox_at;
                self.schedule_at(1 - at, arrives, Event::Frame);
            }
            if idle {
                return;
            }
        }
    }

    fn act(&mut self, at: usize, action: Action) {
        let side = &mut self.sides[at];
        assert!(side.closed.is_none(), "after Closed: {action:?}");
        match action {
            Action::PeerSettings(_) | Action::PeerReady | Action::Setup { .. } => {}
            Action::ChunkAcknowledged { .. } => {}
            Action::Matched {
                operation,
                transfer,
                chunks,
                ..
            } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(watched.outcome.is_none() && watched.held.is_empty());
                assert_eq!(watched.matched.replace((transfer, chunks)), None);
            }
            Action::PostSend {
                operation,
                chunk,
                transfer,
                ..
            } => {
                let agreed = *side.session.agreed().unwrap();
                assert!(side.granted.contains(&transfer), "posted before the grant");
                side.sends.post(chunk, agreed.channels, agreed.send_window);
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(watched.outcome.is_none() && !watched.stopped);
                assert_eq!(watched.matched.map(|(matched, _)| matched), Some(transfer));
                watched.transfer = Some(transfer);
                assert!(watched.held.insert(chunk.index));
                let Chunk { index, channel, .. } = chunk;
                if self.weather.no_send {
                    return;
                }
                self.schedule(
                    at,
                    Event::Sent {
                        operation,
                        index,
                        channel,
                    },
                );
                if !self.weather.lose_data {
                    self.transport(1 - at, chunk);
                }
            }
            Action::PostReceive {
                operation,
                chunk,
                transfer,
                ..
            } => {
                let agreed = *side.session.agreed().unwrap();
                side.receives
                    .post(chunk, agreed.channels, agreed.receive_window);
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(watched.outcome.is_none() && !watched.stopped);
                assert!(chunk.offset + u64::from(chunk.length) <= watched.bytes);
                assert_eq!(watched.matched.map(|(matched, _)| matched), Some(transfer));
                watched.transfer = Some(transfer);
                assert!(watched.held.insert(chunk.index));
                let posted = side.receives.posted.entry(chunk.channel).or_default();
                posted.push_back((chunk.sequence, operation, chunk));
                self.accept(at, chunk.channel);
            }
            Action::DeliverEager { operation, payload } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(payload.len() as u64 <= watched.bytes && watched.copied.is_none());
                assert!(watched.matched.is_some());
                watched.copying = true;
                watched.copied = Some(payload);
                if !self.weather.no_unpack {
                    self.schedule(at, Event::Copied { operation });
                }
            }
            Action::ComputeDigest { operation, bytes } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                watched.digesting = true;
                let wrong = self.weather.corrupt && operation.sent_transfer().is_none();
                let right = match &watched.copied {
                    Some(payload) => crc32c(payload),
                    None => digest_of(bytes),
                };
                let crc32c = right ^ u32::from(wrong);
                if !self.weather.no_digest {
                    self.schedule(at, Event::Digest { operation, crc32c });
                }
            }
            Action::StopData { operation } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                assert!(
                    watched.touches_memory() && !watched.stopped,
                    "needless or repeated stop"
                );
                watched.stopped = true;
                if !self.weather.no_quiet {
                    self.schedule(at, Event::Quiet { operation });
                }
            }
            Action::Complete {
                operation,
                outcome,
                memory,
            } => {
                self.completed(at, operation, outcome, memory);
            }
            Action::Closed { failure } => {
                let ended = |watched: &Watched| watched.outcome.is_some();
                assert!(
                    side.operations.values().all(ended),
                    "closed before the operations"
                );
                side.closed = Some(failure);
            }
        }
    }

    fn completed(
        &mut self,
        at: usize,
        operation: OperationId,
        outcome: Result<Completed, OperationError>,
        memory: Memory,
    ) {
        let watched = self.sides[at].operations.get_mut(&operation).unwrap();
        assert!(watched.outcome.is_none(), "{operation:?} completed twice");
        assert_eq!(
            watched.touches_memory(),
            memory == Memory::Held,
            "{operation:?} {outcome:?}"
        );
        if let Ok(Completed { bytes, level }) = outcome {
            match operation.sent_transfer() {
                Some(transfer) if level >= Level::Placed => {
                    self.check_placed(1 - at, transfer, bytes)
                }
                Some(_) => {}
                None if watched.copied.is_some() => {}
                None => assert_eq!(watched.placed_bytes, bytes, "no wrong success"),
            }
        }
        let watched = self.sides[at].operations.get_mut(&operation).unwrap();
        watched.outcome = Some(outcome);
        watched.memory = Some(memory);
    }

    /// A sender was told that everything is placed: it must be.
    fn check_placed(&self, receiver: usize, transfer: TransferId, bytes: u64) {
        let side = &self.sides[receiver];
        let found = side.operations.values().find(|watched| {
            watched.held.is_empty()
                && watched.transfer == Some(transfer)
                && watched.bytes >= bytes
                && watched.copied.is_none()
                && watched.placed_bytes > 0
        });
        match found {
            Some(watched) => assert_eq!(watched.placed_bytes, bytes, "no wrong success"),
            // Eager and empty transfers have no chunks.
            None => assert!(bytes <= u64::from(side.session.config.ours.eager_limit)),
        }
    }

    fn transport(&mut self, to: usize, chunk: Chunk) {
        let delay = Duration::from_micros(self.random.below(self.weather.jitter) + 1);
        let side = &mut self.sides[to];
        let channel = chunk.channel;
        let at = side.data_at.entry(channel).or_insert(self.now);
        *at = (*at).max(self.now + delay);
        let at = *at;
        side.data
            .entry(channel)
            .or_default()
            .push_back((chunk.sequence, chunk.length));
        self.schedule_at(to, at, Event::Data { channel });
    }

    /// Nothing is left anywhere in either session.
    pub(super) fn assert_clean(&self) {
        for side in &self.sides {
            let session = &side.session;
            assert!(session.sends.is_empty(), "{:#?}", session.sends);
            assert!(session.receives.is_empty(), "{:#?}", session.receives);
            assert!(session.by_transfer.is_empty());
            assert_eq!(session.eager_held, 0);
            assert_eq!(session.eager_used, 0);
            assert!(session.send_stream.idle() && session.receive_stream.idle());
            assert_eq!(session.matching.arrivals(), 0);
        }
    }
}

fn watched_channel(session: &Session, operation: OperationId, index: u32, channels: u16) -> u16 {
    let first = match operation.sent_transfer() {
        Some(transfer) => match &session.sends[&transfer].stage {
            outgoing::SendStage::Granted(granted) => granted.plan.first_sequence,
            _ => panic!("chunks without a grant"),
        },
        None => match &session.receives[&operation].matched.as_ref().unwrap().stage {
            incoming::ReceiveStage::Granted(granted) => granted.plan.first_sequence,
            incoming::ReceiveStage::Eager { .. } => panic!("chunks without a grant"),
        },
    };
    ((first + u64::from(index)) % u64::from(channels)) as u16
}
