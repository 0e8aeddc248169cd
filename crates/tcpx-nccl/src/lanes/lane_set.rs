//! The lanes from this process to one peer process, and the queue that feeds them.

mod status;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use nccl_net::export::{Log, NetError};
use tcpx_lanes::event_loop::Remote;
use tcpx_lanes::health::{Clock, Presence, Retry, STALL_BEHIND};
use tcpx_lanes::lane_group::LaneGroup;
use tcpx_lanes::lock;
#[cfg(test)]
use tcpx_lanes::monitor::Monitor;
use tcpx_lanes::monitor::{Attention, Look, REST, TICK, Watched};
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::tcp_info::transport;
use tcpx_wire::ClientKey;

use super::hello::{Greeting, GroupId, Hello};
use super::outlet::Chunk;
use super::retention::Retention;
use super::transmit_lane::transmit_lane;
use super::users::Users;
use crate::dialer::{Dialer, PairDialer};
use crate::error;
use crate::held::Stream;
use crate::link::Link;

/// Chunks that wait for a lane; a comm that finds no room tries again at its next call.
const QUEUE_CHUNKS: usize = 2048;
/// Smallest part of a message that is worth a lane of its own. With half of it, all-reduces of 1 MiB of two ranks on 16
/// cores, whose messages then wake twice as many threads, took 289 us in place of 253, and at times 664.
const SMALL_PART_BYTES: usize = 128 << 10;
/// The peer's loop answers by itself, so this is a broken path and not a slow program.
const CONNECT_TIME: Duration = Duration::from_secs(15);
/// And nobody waits longer for a peer that does not answer at all: it rests.
pub(crate) const DEAD_AFTER: Duration = Duration::from_secs(60);
/// Between two steps of a dialled lane.
const STEP: Duration = Duration::from_millis(2);
/// How long a lane may stand still is doubled each time, up to this, for the peer may have no memory to read to.
pub(crate) const LONGEST_STALL: Duration = Duration::from_secs(60);

/// Where the peer process takes lanes, and from where they are dialled.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) local: SocketAddr,
    pub(crate) address: SocketAddr,
    pub(crate) key: ClientKey,
    pub(crate) protection: Protection,
}

/// Lanes to one peer process.
#[derive(Debug)]
pub(crate) struct LaneSet {
    own: Weak<Self>,
    group: GroupId,
    peer: Peer,
    chunks: LaneGroup<Chunk>,
    /// Bytes of the chunks that wait, or that a lane has begun; of lent ones, until the peer has read them.
    load: Arc<AtomicUsize>,
    /// The place of each lane in an event loop.
    lanes: Vec<Remote>,
    /// How many loops those are: so many lanes move at a time.
    at_a_time: usize,
    comms: Users,
    failed: AtomicBool,
    why: OnceLock<String>,
    /// Large chunks go without a copy.
    splice: AtomicBool,
    log: Arc<Log>,
    /// Of the loops in which the lanes lie, by lane.
    retention: Vec<Arc<Retention>>,
    /// Whether the monitor looks at the lanes.
    attention: Attention,
    /// How often the peer had moved when a comm that closes found that it does not, and when.
    silence: Mutex<Option<(u64, Instant)>>,
    /// Lanes that brought what the peer did not seal.
    forged: AtomicU64,
    /// Lanes that have ended and are not dialled yet, each with the reason.
    ended: Mutex<Vec<(u16, String)>>,
    /// Lanes that are not there: they did not come yet, or have ended.
    missing: AtomicUsize,
    dialling: Mutex<Dialling>,
    told: status::Told,
}

/// What those know of a lane who look after it.
#[derive(Debug)]
struct LaneState {
    /// How often it was dialled.
    epoch: u32,
    standing: Place,
    clock: Clock,
    stream: Weak<Stream>,
    /// How long it may stand still.
    patience: Duration,
    /// Chunks that had been read when that was last changed.
    read: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A loop drives it.
    Works,
    /// The loop is to let go of it.
    Ends,
    Gone,
}

#[derive(Debug)]
struct Dialling {
    /// Lanes that are being dialled.
    dials: Vec<(u16, PairDialer)>,
    /// Authenticated, until their places are free.
    links: Vec<(u16, [Link; 2])>,
    lanes: Vec<LaneState>,
    /// When the lanes were looked at.
    looked: Instant,
    deadline: Instant,
    /// All lanes were there once.
    done: bool,
    failed: Option<Instant>,
    /// Since when there has been no lane.
    bare: Option<Instant>,
    /// When lanes that ended are dialled.
    retry: Retry,
    /// When the peer's loops were heard, and how many chunks they had read by then.
    presence: Presence,
    heard: (Instant, u64),
}

/// How the connecting stands.
#[derive(Debug)]
pub(crate) enum Standing {
    /// Ask again.
    Connecting,
    /// Chunks may be queued; `true` for the first who hears it.
    Ready(bool),
    /// There are no lanes; the comm goes on without.
    Failed(String),
}

impl LaneSet {
    /// A set whose lanes are to be connected to `peer`, each for the place of the same number, which lie in so
    /// many loops as there are `retentions`; with `splice`, large chunks go without a copy.
    pub(crate) fn new(
        group: GroupId,
        peer: Peer,
        lanes: Vec<Remote>,
        retentions: &[Arc<Retention>],
        splice: bool,
        attention: Attention,
        log: Arc<Log>,
    ) -> Arc<Self> {
        let now = Instant::now();
        let until = now + CONNECT_TIME;
        let dial = |(lane, _)| {
            let dialer = || peer.dialer(until);
            (lane, PairDialer::new([dialer(), dialer()]))
        };
        let dials = (0..).zip(&lanes).map(dial).collect();
        Arc::new_cyclic(|own| Self {
            own: Weak::clone(own),
            at_a_time: retentions.len().min(lanes.len()),
            group,
            chunks: LaneGroup::new(lanes.len().max(1), QUEUE_CHUNKS),
            load: Arc::default(),
            comms: Users::default(),
            failed: AtomicBool::new(false),
            why: OnceLock::new(),
            splice: AtomicBool::new(splice),
            log,
            retention: retentions
                .iter()
                .cycle()
                .take(lanes.len().max(1))
                .cloned()
                .collect(),
            attention,
            silence: Mutex::default(),
            ended: Mutex::default(),
            forged: AtomicU64::new(0),
            missing: AtomicUsize::new(lanes.len()),
            dialling: Mutex::new(Dialling {
                dials,
                links: Vec::new(),
                lanes: lanes.iter().map(|_| LaneState::new(now)).collect(),
                looked: now,
                deadline: now + CONNECT_TIME,
                done: false,
                failed: None,
                bare: None,
                retry: Retry::default(),
                presence: Presence::new(),
                heard: (now, 0),
            }),
            peer,
            lanes,
            told: status::Told::default(),
        })
    }

    pub(crate) const fn group(&self) -> GroupId {
        self.group
    }

    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Where a lane keeps copies.
    pub(super) fn retention(&self, lane: u16) -> &Arc<Retention> {
        // There is one for each lane.
        &self.retention[usize::from(lane)]
    }

    /// The chunks that wait, and what the lanes have done.
    pub(crate) fn chunks(&self) -> &LaneGroup<Chunk> {
        &self.chunks
    }

    /// Where the chunks of a comm are counted.
    pub(super) fn load(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.load)
    }

    /// Bytes of the next part of a message of `total` bytes, of which `left` wait and at most `largest` make
    /// a part.
    pub(super) fn part_bytes(&self, total: usize, left: usize, largest: usize) -> usize {
        let load = self.load.load(Ordering::Relaxed);
        part_bytes(total, left, largest, self.at_a_time, load)
    }

    /// Whether nothing waits for a lane, and the peer has read all that lanes took.
    fn is_idle(&self) -> bool {
        // In this order: a chunk that a lane takes weighs until it is counted.
        self.load.load(Ordering::SeqCst) == 0
            && self.chunks.queued() == 0
            && self.chunks.done().all(|done| done.under_way() == 0)
    }

    /// When the connecting failed, if it did.
    pub(crate) fn unreachable_since(&self) -> Option<Instant> {
        lock(&self.dialling).failed
    }

    /// Drives the connecting; whichever comm waits for it may call.
    pub(crate) fn connect(&self, now: Instant) -> Standing {
        if let Some(why) = self.failure() {
            return Standing::Failed(why.to_owned());
        }
        let mut dialling = lock(&self.dialling);
        if dialling.done {
            return Standing::Ready(false);
        }
        self.redial(&mut dialling, now);
        let missing = self.missing.load(Ordering::SeqCst);
        if missing > 0 && now >= dialling.deadline {
            self.fail(format!(
                "{missing} of {} lanes are not connected after {} s",
                self.lanes.len(),
                CONNECT_TIME.as_secs()
            ));
        }
        if let Some(why) = self.failure() {
            dialling.dials.clear();
            dialling.failed = Some(now);
            return Standing::Failed(why.to_owned());
        }
        if missing > 0 {
            return Standing::Connecting;
        }
        dialling.done = true;
        // It has answered: from now on its silence is known.
        dialling.presence.note(false);
        Standing::Ready(true)
    }

    /// Takes every dialled lane a step further; the lanes whose dialling has failed, with the reasons.
    fn dial(&self, dialling: &mut Dialling, now: Instant) -> Vec<(u16, String)> {
        let (mut at, mut failures) = (0, Vec::new());
        while let Some((lane, dialer)) = dialling.dials.get_mut(at) {
            match dialer.poll(now) {
                Ok(None) => {
                    at += 1;
                    continue;
                }
                Ok(Some(links)) => dialling.links.push((*lane, links)),
                Err(why) => failures.push((*lane, why)),
            }
            dialling.dials.swap_remove(at);
        }
        failures
    }

    /// Gives a lane that is connected to its loop.
    fn start(&self, dialling: &mut Dialling, lane: u16, links: [Link; 2]) -> Result<(), String> {
        let index = usize::from(lane);
        let (Some(set), Some(place), Some(state)) = (
            self.own.upgrade(),
            self.lanes.get(index),
            dialling.lanes.get_mut(index),
        ) else {
            return Ok(());
        };
        let hello = Hello {
            group: self.group,
            // At most 64.
            lanes: self.lanes.len() as u16,
            lane,
            epoch: state.epoch,
        };
        Greeting::Lane(hello).send_on_both(&links)?;
        state.epoch += 1;
        state.standing = Place::Works;
        let [link, answers] = links;
        let ((stream, seals), (answers, _)) = (link.into_lane(), answers.into_lane());
        let stream = Arc::new(stream);
        state.stream = Arc::downgrade(&stream);
        let lane = transmit_lane(set, lane, (stream, answers), seals);
        place.start(Box::new(lane));
        Ok(())
    }

    /// How many lanes brought what the peer did not seal.
    pub(crate) const fn forged(&self) -> &AtomicU64 {
        &self.forged
    }

    /// A lane has ended. What the peer may not have read of its chunks goes over the others, or over itself once
    /// it is back.
    pub(super) fn lane_ended(&self, lane: u16, chunks: Vec<Chunk>, why: &str) {
        if self.is_closing() || self.failure().is_some() {
            return;
        }
        let (resends, mut worn_out) = (chunks.len(), false);
        self.chunks.push_again(chunks.into_iter().map(|mut chunk| {
            chunk.put_back();
            worn_out |= chunk.header.attempt == u8::MAX;
            chunk.header.attempt = chunk.header.attempt.saturating_add(1);
            chunk
        }));
        let address = self.peer.address;
        self.log.info(&format!(
            "lane {lane} to {address} ended: {why}; {resends} chunks are sent again"
        ));
        if worn_out {
            let count = u32::from(u8::MAX) + 1;
            return self.fail(format!(
                "{count} lanes to {address} ended with a chunk: {why}"
            ));
        }
        lock(&self.ended).push((lane, why.to_owned()));
        self.missing.fetch_add(1, Ordering::SeqCst);
        self.attention.hurry();
        // Whoever woke this lane last meant any lane.
        self.resume_all();
    }

    /// Ends every lane; what others still wait for is sent again over the next ones.
    pub(super) fn end_lanes(&self) {
        let mut dialling = lock(&self.dialling);
        for (state, place) in dialling.lanes.iter_mut().zip(&self.lanes) {
            if state.standing == Place::Works {
                state.standing = Place::Ends;
                place.remove();
            }
        }
    }

    /// Dials lanes that have ended, and looks for those that stand still.
    fn tend(&self) -> Look {
        self.attention.lower();
        let is_whole = self.missing.load(Ordering::SeqCst) == 0;
        if !self.is_open() || is_whole && self.is_idle() {
            return Look::Asleep;
        }
        // Spares the comms a wake-up.
        self.attention.keep();
        let mut dialling = lock(&self.dialling);
        if !dialling.done {
            return Look::In(TICK);
        }
        let now = Instant::now();
        self.look(&mut dialling, now);
        self.redial(&mut dialling, now);
        match dialling.dials.is_empty() && dialling.links.is_empty() {
            true => Look::In(TICK),
            false => Look::In(STEP),
        }
    }

    /// For how long the peer has not moved, as comms that close have seen.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        let moves = self.chunks.moves();
        let mut silence = lock(&self.silence);
        match *silence {
            Some((before, since)) if before == moves => now.saturating_duration_since(since),
            _ => {
                *silence = Some((moves, now));
                Duration::ZERO
            }
        }
    }

    /// A comm that closed had no reason to wait any longer.
    pub(super) fn end_silence(&self) {
        *lock(&self.silence) = None;
    }

    /// Ends lanes that are dead while others live. Others that stand still are dialled anew: only a connection that
    /// comes about tells that the peer is not at rest, and that the fault is the lane's; then it takes the lane's place.
    /// Nothing is lost with a lane, whose chunks all have a receive and are kept until they are read.
    fn look(&self, dialling: &mut Dialling, now: Instant) {
        let before = dialling.looked;
        if now < before + TICK {
            return;
        }
        dialling.looked = now;
        let rested = now.saturating_duration_since(before) > REST;
        if rested {
            dialling.bare = None;
        }
        let Dialling {
            lanes,
            dials,
            presence,
            heard,
            ..
        } = dialling;
        let reads = self.chunks.done().map(|done| done.acknowledged).sum();
        if heard.1 != reads {
            presence.note(now.saturating_duration_since(heard.0) > REST);
            *heard = (now, reads);
        }
        let at_work = presence.at_work(now);
        for (lane, (state, done)) in (0..).zip(lanes.iter_mut().zip(self.chunks.done())) {
            let read = done.acknowledged;
            if state.read != read {
                (state.read, state.patience) = (read, STALL_BEHIND);
            }
            let stream = state.stream.upgrade();
            let transport = stream.and_then(|stream| transport(&*stream));
            let transport = transport.unwrap_or_default();
            let rested = rested || state.standing != Place::Works;
            let (clock, patience) = (&mut state.clock, state.patience);
            let dead = clock.look(now, done.owes(), transport, rested, at_work, patience);
            if dead.is_some() {
                state.end(&self.lanes[usize::from(lane)]);
            } else if clock.stands(now) >= patience && !dials.iter().any(|(one, _)| *one == lane) {
                dials.push((lane, self.peer.redialer(now)));
            }
        }
    }

    fn redial(&self, dialling: &mut Dialling, now: Instant) {
        let is_alone = || self.missing.load(Ordering::SeqCst) >= self.lanes.len();
        let mut last = None;
        for (lane, why) in std::mem::take(&mut *lock(&self.ended)) {
            if let Some(state) = dialling.lanes.get_mut(usize::from(lane)) {
                state.standing = Place::Gone;
            }
            last = Some(why);
        }
        let waits = !dialling.retry.is_due(now) && !is_alone();
        for lane in 0..self.lanes.len() as u16 {
            let is_gone = dialling.lanes[usize::from(lane)].standing == Place::Gone;
            if is_gone && !waits && !dialling.has(lane) {
                dialling.dials.push((lane, self.peer.redialer(now)));
            }
        }
        let mut failures = self.dial(dialling, now);
        for (lane, stream) in std::mem::take(&mut dialling.links) {
            let state = &mut dialling.lanes[usize::from(lane)];
            match state.standing {
                Place::Gone => match self.start(dialling, lane, stream) {
                    Ok(()) => {
                        self.missing.fetch_sub(1, Ordering::SeqCst);
                        dialling.retry = Retry::default();
                        dialling.bare = None;
                        if dialling.done {
                            let address = self.peer.address;
                            self.log.info(&format!("lane {lane} to {address} is back"));
                        }
                    }
                    // It is dialled again.
                    Err(why) => last = Some(why),
                },
                // It moves again.
                Place::Works if state.clock.stands(now) < state.patience => {}
                Place::Works => {
                    state.end(&self.lanes[usize::from(lane)]);
                    dialling.links.push((lane, stream));
                }
                Place::Ends => dialling.links.push((lane, stream)),
            }
        }
        if is_alone() {
            let bare = *dialling.bare.get_or_insert(now);
            if now.saturating_duration_since(bare) >= DEAD_AFTER {
                failures.push((0, format!("none was back in {} s", DEAD_AFTER.as_secs())));
            }
        }
        for (lane, why) in failures {
            let state = &mut dialling.lanes[usize::from(lane)];
            if state.standing == Place::Works {
                // It can be no worse than what there is.
                state.clock.rested(now);
                continue;
            }
            if !dialling.done {
                return self.fail(why);
            }
            if is_alone() {
                let last = last.map_or_else(String::new, |last| format!("{last}; "));
                let address = self.peer.address;
                return self.fail(format!("the last lane to {address} ended: {last}{why}"));
            }
            dialling.retry.failed(now);
        }
    }

    /// A comm begins to use the lanes; `false` when they are closing already.
    pub(crate) fn enter(&self) -> bool {
        if !self.comms.enter() {
            return false;
        }
        if self.failed.load(Ordering::SeqCst) {
            self.leave();
            return false;
        }
        true
    }

    /// A comm is done with the lanes; the last one closes them.
    pub(crate) fn leave(&self) {
        if self.comms.leave() {
            self.resume_all();
        }
    }

    /// Whether the set can serve another comm.
    pub(crate) fn is_open(&self) -> bool {
        !self.comms.is_closed() && !self.failed.load(Ordering::SeqCst)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.comms.is_closed()
    }

    /// Whether large chunks go without a copy.
    pub(super) fn splices(&self) -> bool {
        self.splice.load(Ordering::Relaxed)
    }

    /// The system refuses; from now on chunks are copied.
    pub(super) fn stop_splicing(&self, error: &io::Error) {
        if self.splice.swap(false, Ordering::Relaxed) {
            self.log.info(&format!(
                "large messages are copied into sockets, which costs processor time: {error}"
            ));
        }
    }

    /// Queues a chunk and wakes a lane for it; gives it back when there is no room.
    #[expect(clippy::result_large_err, reason = "the chunk itself comes back")]
    pub(crate) fn push(&self, chunk: Chunk) -> Result<(), Chunk> {
        self.chunks.push(chunk)?;
        self.has_pushed();
        Ok(())
    }

    /// As [`push`](Self::push), beyond the room too; of such chunks there is a bounded number.
    pub(super) fn push_in_any_case(&self, chunk: Chunk) {
        if let Err(chunk) = self.chunks.push(chunk) {
            self.chunks.push_again([chunk]);
        }
        self.has_pushed();
    }

    fn has_pushed(&self) {
        self.attention.draw();
        if self.failed.load(Ordering::SeqCst) {
            // No lane will take it.
            self.drain();
        }
        if let Some(lane) = self.chunks.take_idle()
            && let Some(lane) = self.lanes.get(usize::from(lane))
        {
            lane.resume();
        }
    }

    fn resume_all(&self) {
        self.lanes.iter().for_each(Remote::resume);
    }

    /// Ends every lane for good: chunks are lost, so every comm must fail.
    pub(crate) fn fail(&self, why: String) {
        let _ = self.why.set(why);
        self.failed.store(true, Ordering::SeqCst);
        self.drain();
        self.resume_all();
    }

    fn drain(&self) {
        while self.chunks.pop().is_some() {}
    }

    /// Why the lanes ended, if they did.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failed
            .load(Ordering::SeqCst)
            .then(|| self.why.get().map_or("they ended", String::as_str))
    }

    /// The failure as an answer for a comm.
    pub(crate) fn check(&self, comm: &str) -> Result<(), NetError> {
        match self.failure() {
            None => Ok(()),
            Some(why) => Err(error::lanes_ended(comm, why)),
        }
    }
}

/// A set as the monitor knows it.
#[derive(Debug)]
pub(super) struct Tended(pub(super) Weak<LaneSet>);

impl Watched for Tended {
    fn look(&mut self) -> Look {
        self.0.upgrade().map_or(Look::Gone, |set| set.tend())
    }
}

impl LaneState {
    fn new(now: Instant) -> Self {
        Self {
            epoch: 0,
            standing: Place::Gone,
            clock: Clock::new(now),
            stream: Weak::new(),
            patience: STALL_BEHIND,
            read: 0,
        }
    }

    /// Its loop is to let go of it.
    fn end(&mut self, place: &Remote) {
        self.standing = Place::Ends;
        self.patience = (self.patience * 2).min(LONGEST_STALL);
        place.remove();
    }
}

impl Dialling {
    /// Whether a lane is dialled, or was and waits for its place.
    fn has(&self, lane: u16) -> bool {
        let dials = self.dials.iter().map(|(lane, _)| *lane);
        let links = self.links.iter().map(|(lane, _)| *lane);
        dials.chain(links).any(|one| one == lane)
    }
}

impl Peer {
    pub(crate) fn dialer(&self, until: Instant) -> Dialer {
        self.any_dialer(until, false)
    }

    fn any_dialer(&self, until: Instant, was_there: bool) -> Dialer {
        let key = (self.key.clone(), self.protection);
        Dialer::new(self.local, self.address, key, until, was_there)
    }

    /// For a pair of connections that was there before.
    pub(crate) fn redialer(&self, now: Instant) -> PairDialer {
        let dialer = || self.any_dialer(now + DEAD_AFTER, true);
        PairDialer::new([dialer(), dialer()])
    }
}

/// Parts begin at pages of a message, where they can.
const PAGE_BYTES: usize = 4096;

/// While half of the `lanes` that move at a time have a part each at most, a message is spread over all of them. What
/// waits for the peer alone is no load: counted, it made 256 KiB with eight in flight one part each, at 0.7 of the rate.
fn part_bytes(total: usize, left: usize, largest: usize, lanes: usize, load: usize) -> usize {
    let lanes = lanes.max(1);
    let most = if load < lanes * largest / 2 {
        (total / lanes).clamp(SMALL_PART_BYTES.min(largest), largest)
    } else {
        largest
    };
    // Parts of one size, and no small rest.
    let even = left.div_ceil(left.div_ceil(most).max(1));
    even.next_multiple_of(PAGE_BYTES).min(most).min(left)
}

#[cfg(test)]
impl LaneSet {
    /// A set that nobody connects.
    pub(crate) fn without_lanes(splice: bool) -> Arc<Self> {
        let nobody = SocketAddr::from(([127, 0, 0, 1], 0));
        let peer = Peer {
            protection: Protection::None,
            local: nobody,
            address: nobody,
            key: tcpx_wire::Key::generate(&mut |bytes| bytes.fill(7)).client_key(),
        };
        let log = Arc::new(Log::new(nccl_net::export::HostLogger::default(), c"TCPX"));
        let retention = [Retention::new().unwrap()];
        let attention = Monitor::new("nobody").attention();
        Self::new(
            [7; 16],
            peer,
            Vec::new(),
            &retention,
            splice,
            attention,
            log,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::part_bytes;

    const KIB: usize = 1 << 10;

    fn parts(total: usize, lanes: usize, mut load: usize) -> Vec<usize> {
        let (mut left, mut parts) = (total, Vec::new());
        while left > 0 {
            let bytes = part_bytes(total, left, 256 * KIB, lanes, load);
            assert!(bytes > 0 && bytes <= left, "{bytes} of {left}");
            parts.push(bytes / KIB);
            left -= bytes;
            load += bytes;
        }
        parts
    }

    #[test]
    fn idle_lanes_share_a_message_and_busy_ones_get_large_parts() {
        assert_eq!(parts(256 * KIB, 12, 0), [128; 2]);
        assert_eq!(parts(256 * KIB, 12, 3 << 20), [256]);
        assert_eq!(parts(256 * KIB, 2, 0), [128; 2]);
        assert_eq!(parts(256 * KIB, 1, 0), [256]);
        assert_eq!(parts(100 * KIB, 12, 0), [100]);
        assert_eq!(parts(300 * KIB, 2, 1 << 20), [152, 148]);
        assert_eq!(parts(4 << 20, 12, 0), [256; 16]);
        // The first lanes get small parts; once all have enough, the rest is large.
        let mixed = parts(2 << 20, 12, 1 << 20);
        assert!(mixed[0] < 200 && mixed.last() > Some(&200), "{mixed:?}");
        for (total, largest) in [(1, 16_384), (usize::MAX >> 1, 1 << 24), (70_000, 65_536)] {
            let bytes = part_bytes(total, total, largest, 0, 0);
            assert!(bytes > 0 && bytes <= total.min(largest));
        }
    }
}
