//! Two sessions, the connection between them and their data planes, driven by one seeded clock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use super::model::*;
use super::*;
use crate::frame::{Frame, TransferId};
use crate::time::Time;

/// What may go wrong or slow, and how much.
#[derive(Clone, Debug)]
pub(super) struct FaultPlan {
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
    /// What may wait for transmission does.
    pub(super) holds: bool,
    /// Greatest delay of a frame to each side, of data, and of becoming quiet, where that is
    /// another one.
    pub(super) frames: [Option<u64>; 2],
    pub(super) data: Option<u64>,
    pub(super) quiet: Option<u64>,
    /// Until when each side's process stalls.
    pub(super) stopped: [Time; 2],
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Frame,
    Data {
        channel: u16,
    },
    /// A chunk arrives on an addressed network.
    Packet {
        window: u64,
        /// Index, offset and length.
        chunk: (u32, u64, u32),
        total: u64,
    },
    /// GPU work that a receive comes after is done.
    Fence {
        operation: OperationId,
    },
    Sent {
        operation: OperationId,
        index: u32,
        channel: u16,
        generation: u32,
    },
    Placed {
        operation: OperationId,
        index: u32,
        channel: u16,
        generation: u32,
    },
    Copied {
        operation: OperationId,
    },
    /// A get that this side makes by itself is over: all was read, or it was not exposed any more.
    Read {
        operation: OperationId,
        is_whole: bool,
    },
    Digest {
        operation: OperationId,
        crc32c: u32,
    },
    Quiet {
        operation: OperationId,
    },
    /// The program collects a notification.
    Collected {
        bytes: u64,
    },
    /// What waited for transmission leaves.
    Speak,
}

pub(super) struct Side {
    pub(super) session: Session,
    pub(super) operations: BTreeMap<OperationId, Watched>,
    pub(super) sends: Lanes,
    pub(super) receives: Lanes,
    pub(super) granted: BTreeSet<TransferId>,
    /// Windows of the peer that this side knows, and which send went to each.
    pub(super) named: BTreeSet<u64>,
    pub(super) sent_to: BTreeMap<u64, OperationId>,
    /// Windows of this side.
    pub(super) windows: BTreeMap<u64, OpenWindow>,
    pub(super) closed: Option<Option<ConnectionFailure>>,
    /// Lanes that the peer lacks.
    pub(super) asked_for: Vec<u16>,
    /// Puts and notifications of the peer that were accepted.
    pub(super) accepted: BTreeMap<TransferId, OperationId>,
    /// Frames on their way to this side.
    pub(super) inbox: VecDeque<Frame>,
    pub(super) inbox_at: Time,
    pub(super) frames_in: Vec<Frame>,
    /// Data on its way to this side, then at the head of each channel.
    pub(super) data: BTreeMap<u16, VecDeque<(u64, u32)>>,
    pub(super) heads: BTreeMap<u16, VecDeque<(u64, u32)>>,
    pub(super) data_at: BTreeMap<u16, Time>,
    pub(super) setup_done: bool,
    /// Whose bytes a sequence number carries to this side.
    pub(super) data_of: BTreeMap<u64, TransferId>,
    /// By sequence: what a network that can send again keeps.
    pub(super) kept: BTreeMap<u64, (OperationId, u32)>,
    /// An [`Event::Speak`] is to come; it has come.
    pub(super) holds: bool,
    pub(super) speaks: bool,
}

pub(super) struct Pair {
    pub(super) now: Time,
    pub(super) sides: [Side; 2],
    pub(super) random: Random,
    pub(super) fault_plan: FaultPlan,
    events: BinaryHeap<Reverse<(Time, u64, usize, Event)>>,
    scheduled: u64,
}

impl Side {
    /// A chunk was placed; after the last one the window is closed.
    fn placed_in_window(&mut self, window: u64, operation: OperationId) {
        let watched = self.operations.get_mut(&operation).unwrap();
        let done = self.windows.get(&window).is_some_and(|open| {
            let chunks = open.plan.map(|plan| plan.count());
            chunks == Some(watched.placed.len() as u32)
        });
        if done {
            self.windows.remove(&window);
            watched.window_open = false;
        }
    }
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
            named: BTreeSet::new(),
            sent_to: BTreeMap::new(),
            windows: BTreeMap::new(),
            closed: None,
            asked_for: Vec::new(),
            accepted: BTreeMap::new(),
            inbox: VecDeque::new(),
            inbox_at: now,
            frames_in: Vec::new(),
            data: BTreeMap::new(),
            heads: BTreeMap::new(),
            kept: BTreeMap::new(),
            data_at: BTreeMap::new(),
            setup_done: true,
            data_of: BTreeMap::new(),
            holds: false,
            speaks: false,
        };
        Self {
            now,
            sides: [side(a), side(b)],
            random: Random(seed),
            fault_plan: FaultPlan {
                jitter: 100,
                cut: false,
                no_send: false,
                lose_data: false,
                no_unpack: false,
                no_digest: false,
                no_quiet: false,
                corrupt: false,
                holds: false,
                frames: [None; 2],
                data: None,
                quiet: None,
                stopped: [now; 2],
            },
            events: BinaryHeap::new(),
            scheduled: 0,
        }
    }

    pub(super) fn send(&mut self, side: usize, request: SendRequest) -> OperationId {
        let (bytes, tag) = (request.bytes, request.to.tag().unwrap_or(Tag(0)));
        let deadlines = request.deadlines;
        let operation = self.sides[side].session.send(self.now, request).unwrap();
        self.watch(side, operation, bytes, tag, deadlines);
        self.drain(side);
        operation
    }

    pub(super) fn receive(&mut self, side: usize, request: ReceiveRequest) -> OperationId {
        let (bytes, tag) = (request.capacity, request.tag);
        let operation = self.sides[side].session.receive(self.now, request).unwrap();
        self.watch(side, operation, bytes, tag, request.deadlines);
        if request.fenced {
            self.schedule(side, Event::Fence { operation });
        }
        self.drain(side);
        operation
    }

    fn watch(
        &mut self,
        side: usize,
        operation: OperationId,
        bytes: u64,
        tag: Tag,
        deadlines: Option<Deadlines>,
    ) -> &mut Watched {
        let total = deadlines.and_then(|deadlines| deadlines.total);
        let watched = Watched {
            bytes,
            tag: tag.0,
            due: total.map(|total| self.now + total),
            ..Watched::default()
        };
        let operations = &mut self.sides[side].operations;
        assert!(!operations.contains_key(&operation));
        operations.entry(operation).or_insert(watched)
    }

    /// Watches an operation that the peer began; no tag orders it.
    pub(super) fn watch_peers(&mut self, side: usize, operation: OperationId, bytes: u64) {
        self.watch(side, operation, bytes, Tag(1 << 40 | operation.0), None);
    }

    /// As that, of this side.
    fn watch_get(
        &mut self,
        side: usize,
        operation: OperationId,
        request: &GetRequest,
    ) -> &mut Watched {
        let tag = Tag(1 << 40 | operation.0);
        self.watch(side, operation, request.bytes, tag, request.deadlines)
    }

    pub(super) fn get(&mut self, side: usize, request: GetRequest) -> OperationId {
        let operation = self.sides[side].session.get(self.now, request).unwrap();
        self.watch_get(side, operation, &request);
        self.drain(side);
        operation
    }

    /// A get that this side makes by itself; the peer is asked where not all of it is read.
    pub(super) fn read(&mut self, side: usize, request: GetRequest, is_whole: bool) -> OperationId {
        let operation = self.sides[side].session.read(self.now, request).unwrap();
        self.watch_get(side, operation, &request).copying = true;
        if !self.fault_plan.no_unpack {
            let read = Event::Read {
                operation,
                is_whole,
            };
            self.schedule(side, read);
        }
        self.drain(side);
        operation
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

    /// Every operation with a deadline has ended in time, as long as its own side went on.
    pub(super) fn assert_in_time(&self) {
        for (at, side) in self.sides.iter().enumerate() {
            for (operation, watched) in &side.operations {
                let (Some(due), None) = (watched.due, &watched.outcome) else {
                    continue;
                };
                let late = self
                    .now
                    .saturating_since(due.max(self.fault_plan.stopped[at]));
                assert!(
                    late <= Duration::from_millis(100),
                    "{operation:?} of side {at} is {late:?} late: {:#?}",
                    side.session.snapshot(self.now)
                );
            }
        }
    }

    /// The next thing that happens, if before `end`.
    fn step(&mut self, end: Time) -> bool {
        for side in 0..2 {
            if self.is_stopped(side) {
                continue;
            }
            if self.sides[side].setup_done && !self.sides[side].session.local_ready {
                self.sides[side].session.ready();
            }
            self.drain(side);
        }
        let event = self.events.peek().map(|Reverse((at, ..))| *at);
        let timer = (0..2)
            .filter_map(|side| {
                let due = self.sides[side].session.next_timeout()?;
                Some((due.max(self.fault_plan.stopped[side]), side))
            })
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
                if self.is_stopped(side) {
                    // In their order, once it goes on.
                    self.schedule_at(side, self.fault_plan.stopped[side], event);
                    return true;
                }
                self.happen(side, event);
                self.drain(side);
            }
            (None, _) => return false,
        }
        true
    }

    pub(super) fn is_stopped(&self, side: usize) -> bool {
        self.now < self.fault_plan.stopped[side]
    }

    pub(super) fn schedule(&mut self, side: usize, event: Event) {
        let delay = Duration::from_micros(self.random.below(self.fault_plan.jitter) + 1);
        self.schedule_at(side, self.now + delay, event);
    }

    pub(super) fn schedule_quiet(&mut self, side: usize, operation: OperationId) {
        let most = self.fault_plan.quiet.unwrap_or(self.fault_plan.jitter);
        let delay = Duration::from_micros(self.random.below(most) + 1);
        self.schedule_at(side, self.now + delay, Event::Quiet { operation });
    }

    pub(super) fn schedule_at(&mut self, side: usize, at: Time, event: Event) {
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
                if self.fault_plan.cut {
                    return;
                }
                match frame {
                    Frame::Grant { transfer, grant } => {
                        side.granted.insert(transfer);
                        side.named.insert(grant.window);
                    }
                    Frame::Posted { grant, .. } => {
                        side.named.insert(grant.window);
                    }
                    _ => {}
                }
                side.frames_in.push(frame.clone());
                side.session.frame(now, frame).expect("an honest peer");
            }
            Event::Data { channel } => {
                let arrived = side.data.get_mut(&channel).and_then(VecDeque::pop_front);
                side.heads.entry(channel).or_default().extend(arrived);
                self.accept(at, channel);
            }
            Event::Packet {
                window,
                chunk,
                total,
            } => self.packet(at, window, chunk, total),
            Event::Fence { operation } => side.session.fence_reached(now, operation),
            Event::Sent {
                operation,
                index,
                channel,
                generation,
            } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                let live = !watched.quiet && watched.generation == generation;
                if live && watched.held.remove(&index) {
                    side.sends.release(channel);
                    side.session.chunk_sent(now, operation, index);
                }
            }
            Event::Placed {
                operation,
                index,
                channel,
                generation,
            } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                let live = !watched.quiet && watched.generation == generation;
                if live && watched.held.remove(&index) {
                    watched.placed.insert(index);
                    match watched.window {
                        Some(window) => side.placed_in_window(window, operation),
                        None => side.receives.release(channel),
                    }
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
            Event::Read {
                operation,
                is_whole,
            } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                if !watched.quiet {
                    watched.copying = false;
                    match is_whole {
                        true => {
                            watched.copied = Some(Vec::new());
                            side.session.eager_copied(now, operation);
                        }
                        false => side.session.ask_owner(now, operation),
                    }
                }
            }
            Event::Digest { operation, crc32c } => {
                let watched = side.operations.get_mut(&operation).unwrap();
                if !watched.quiet && std::mem::take(&mut watched.digesting) {
                    side.session.digest(now, operation, crc32c, crc32c.into());
                }
            }
            Event::Quiet { operation } => self.become_quiet(at, operation),
            Event::Collected { bytes } => side.session.notifications_collected(1, bytes),
            Event::Speak => (side.holds, side.speaks) = (false, true),
        }
    }

    /// Takes everything the session wants out of it.
    pub(super) fn drain(&mut self, at: usize) {
        loop {
            let mut idle = true;
            while let Some(action) = next_action(&mut self.sides[at].session) {
                idle = false;
                self.act(at, action);
            }
            while !self.holds(at)
                && let Some(output) = self.sides[at].session.poll(Takes::Frames(self.now))
            {
                idle = false;
                let frame = match output {
                    Output::Frame(frame) => frame,
                    Output::Action(action) => {
                        self.act(at, action);
                        continue;
                    }
                };
                let most = self.fault_plan.frames[1 - at].unwrap_or(self.fault_plan.jitter);
                let delay = Duration::from_micros(self.random.below(most) + 1);
                let peer = &mut self.sides[1 - at];
                peer.inbox_at = peer.inbox_at.max(self.now + delay);
                peer.inbox.push_back(frame);
                let arrives = peer.inbox_at;
                self.schedule_at(1 - at, arrives, Event::Frame);
            }
            if idle {
                self.sides[at].speaks = false;
                return;
            }
        }
    }

    /// Whether everything that waits for transmission may go on waiting, and does.
    fn holds(&mut self, at: usize) -> bool {
        let side = &mut self.sides[at];
        let waiting = side.session.waiting();
        let any = waiting.acknowledgements + waiting.eager > 0;
        if !self.fault_plan.holds || !any || waiting.urgent || side.speaks {
            return false;
        }
        if !std::mem::replace(&mut side.holds, true) {
            self.schedule(at, Event::Speak);
        }
        true
    }

    /// Receives of a tag were matched in the order in which they were posted, if none of them ended
    /// before: a send that came for that one meets a later one.
    pub(super) fn assert_matched_in_order(&self) {
        for (at, side) in self.sides.iter().enumerate() {
            let mut last = BTreeMap::new();
            let ended: BTreeSet<u64> = side
                .operations
                .iter()
                .filter(|(operation, watched)| {
                    operation.sent_transfer().is_none() && matches!(watched.outcome, Some(Err(_)))
                })
                .map(|(_, watched)| watched.tag)
                .collect();
            for (operation, watched) in &side.operations {
                let ended_well = matches!(watched.outcome, Some(Ok(_)));
                let is_receive = operation.sent_transfer().is_none();
                if !is_receive || !ended_well || ended.contains(&watched.tag) {
                    continue;
                }
                let transfer = watched
                    .matched
                    .map(|(transfer, _)| self.message(at, transfer));
                let before = last.insert(watched.tag, transfer);
                assert!(
                    before.is_none_or(|before| before < transfer),
                    "{operation:?}"
                );
            }
        }
    }

    /// No more operations of a tag say that the peer ended them than its program has.
    pub(super) fn assert_ended_by(&self, cancelled: &[(usize, OperationId)]) {
        let mut ends = BTreeMap::new();
        for (side, operation) in cancelled {
            let tag = self.sides[*side].operations[operation].tag;
            let sends = operation.sent_transfer().is_some();
            *ends.entry((*side, sends, tag)).or_insert(0) += 1;
        }
        for (at, side) in self.sides.iter().enumerate() {
            for (operation, watched) in &side.operations {
                if let Some(Err(error)) = &watched.outcome
                    && matches!(error.cause, EndCause::PeerCancelled { .. })
                {
                    let sends = operation.sent_transfer().is_some();
                    let ended = ends.entry((1 - at, !sends, watched.tag)).or_insert(0);
                    *ended -= 1;
                    assert!(*ended >= 0, "{operation:?}: {error}");
                }
            }
        }
    }

    /// The peer's own name of a transfer to this side.
    pub(super) fn message(&self, at: usize, transfer: TransferId) -> TransferId {
        match transfer.window() {
            Some(window) => self.sides[1 - at].sent_to[&window].sent_transfer().unwrap(),
            None => transfer,
        }
    }

    /// Nothing is left anywhere in either session.
    pub(super) fn assert_clean(&self) {
        for (at, side) in self.sides.iter().enumerate() {
            let session = &side.session;
            assert!(session.operations.is_empty(), "{:#?}", session.operations);
            assert_eq!(session.operations.names(Role::Receiver), 0);
            assert_eq!(session.eager_held, 0);
            let peer = &self.sides[1 - at].session;
            assert_eq!(session.eager_used, peer.credit_owed);
            let limit = peer.config.ours.eager_limit.into();
            let fits = config::eager_cost(limit, 0) <= peer.config.ours.eager_credit.into();
            assert!(
                !fits
                    || limit == 0
                    || peer.ended()
                    || session.ended()
                    || session.eager_allowed(limit),
                "what is owed leaves no room for a payload"
            );
            assert!(session.streams.iter().all(ChunkStream::is_idle));
            assert_eq!(session.matching.arrivals(), 0);
            session.assert_counts_agree(peer);
            assert!(side.windows.is_empty(), "open windows: {:?}", side.windows);
            session.assert_nothing_one_sided();
            let config = &session.config;
            if config.hold_until_placed {
                assert!(side.kept.is_empty(), "kept for ever: {:?}", side.kept);
            }
        }
    }
}
