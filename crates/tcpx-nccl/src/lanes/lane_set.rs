//! The lanes from this process to one peer process, and the queue that feeds them.

mod status;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use nccl_net::export::{Log, NetError};
use tcpx_lanes::event_loop::Remote;
use tcpx_lanes::health::{Clock, PeerLiveness};
use tcpx_lanes::lane_group::LaneGroup;
#[cfg(test)]
use tcpx_lanes::monitor::Monitor;
use tcpx_lanes::monitor::{Look, MonitorHandle, REST, TICK, Watched};
use tcpx_lanes::redial::{DialState, News, Redial};
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::tcp_info::transport;
use tcpx_lanes::{SocketError, lock};
use tcpx_wire::ClientKey;

use super::hello::{Greeting, GroupId, Hello};
use super::retention::Retention;
use super::send_stream::Chunk;
use super::transmit_lane::transmit_lane;
use crate::dialer::{AGAIN_TIME, Dialer, PairDialer};
use crate::error;
use crate::held::Stream;
use crate::link::Link;

/// Chunks that wait for a lane; a comm that finds no room tries again at its next call.
const QUEUE_CHUNKS: usize = 2048;
/// Smallest part of a message that is worth a lane of its own. With half of it, all-reduces of 1
/// MiB of two ranks on 16 cores, whose messages then wake twice as many threads, took 289 us in
/// place of 253, and at times 664.
const SMALL_PART_BYTES: usize = 128 << 10;
/// The peer's loop answers by itself, so this is a broken path and not a slow program.
const CONNECT_TIME: Duration = Duration::from_secs(15);
/// And nobody waits longer for a peer that does not answer at all: it rests.
pub(crate) const DEAD_AFTER: Duration = Duration::from_secs(60);

/// The last comm has left.
const CLOSED: usize = usize::MAX;

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
    pub(crate) group: GroupId,
    peer: Peer,
    /// Those that wait, and what the lanes have done.
    pub(crate) chunks: LaneGroup<Chunk>,
    /// Bytes of the chunks that wait, or that a lane has begun; of lent ones, until the peer has
    /// read them.
    load: Arc<AtomicUsize>,
    /// The place of each lane in an event loop.
    lanes: Vec<Remote>,
    /// How many loops those are: so many lanes move at a time.
    at_a_time: usize,
    /// Comms that use the lanes; [`CLOSED`] once the last one has left: nobody enters any more.
    comms: AtomicUsize,
    failed: AtomicBool,
    why: OnceLock<String>,
    /// Large chunks go without a copy.
    splice: AtomicBool,
    log: Arc<Log>,
    /// Of the loops in which the lanes lie, by lane.
    retention: Vec<Arc<Retention>>,
    /// Whether the monitor looks at the lanes.
    monitor_handle: MonitorHandle,
    /// How often the peer had moved when a comm that closes found that it does not, and when.
    silence: Mutex<Option<(u64, Instant)>>,
    /// Lanes that brought what the peer did not seal.
    pub(crate) forged: AtomicU64,
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
    standing: Standing,
    clock: Clock,
    stream: Weak<Stream>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// A loop drives it.
    Works,
    /// The loop is to let go of it.
    Ends,
    Gone,
}

#[derive(Debug)]
struct Dialling {
    redial: Redial<PairDialer>,
    lanes: Vec<LaneState>,
    /// When the lanes were looked at.
    looked: Instant,
    deadline: Instant,
    /// All lanes were there once.
    done: bool,
    failed: Option<Instant>,
    /// Why the lane ended that ended last.
    last: Option<String>,
    /// When the peer's loops were heard, and how many chunks they had read by then.
    peer_liveness: PeerLiveness,
    heard: (Instant, u64),
}

/// How far the connecting is.
#[derive(Debug)]
pub(crate) enum Connecting {
    /// Ask again.
    Waits,
    /// Chunks may be queued; `true` for the first who hears it.
    Ready(bool),
    /// There are no lanes; the comm goes on without.
    Failed(String),
}

impl LaneSet {
    /// A set whose lanes are to be connected to `peer`, each for the place of the same number,
    /// which lie in so many loops as there are `retentions`; with `splice`, large chunks go without
    /// a copy.
    pub(crate) fn new(
        group: GroupId,
        peer: Peer,
        lanes: Vec<Remote>,
        retentions: &[Arc<Retention>],
        splice: bool,
        monitor_handle: MonitorHandle,
        log: Arc<Log>,
    ) -> Arc<Self> {
        let now = Instant::now();
        Arc::new_cyclic(|own| Self {
            own: Weak::clone(own),
            at_a_time: retentions.len().min(lanes.len()),
            group,
            chunks: LaneGroup::new(lanes.len().max(1), QUEUE_CHUNKS),
            load: Arc::default(),
            comms: AtomicUsize::new(0),
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
            monitor_handle,
            silence: Mutex::default(),
            ended: Mutex::default(),
            forged: AtomicU64::new(0),
            missing: AtomicUsize::new(lanes.len()),
            dialling: Mutex::new(Dialling {
                redial: Redial::default(),
                lanes: lanes.iter().map(|_| LaneState::new(now)).collect(),
                looked: now,
                deadline: now + CONNECT_TIME,
                done: false,
                failed: None,
                last: None,
                peer_liveness: PeerLiveness::new(),
                heard: (now, 0),
            }),
            peer,
            lanes,
            told: status::Told::default(),
        })
    }

    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Where a lane keeps copies.
    pub(super) fn retention(&self, lane: u16) -> &Arc<Retention> {
        // There is one for each lane.
        &self.retention[usize::from(lane)]
    }

    /// Where the chunks of a comm are counted.
    pub(super) fn load(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.load)
    }

    /// Bytes of the next part of a message of `total` bytes, of which `left` wait and at most
    /// `largest` make a part.
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
    pub(crate) fn connect(&self, now: Instant) -> Connecting {
        if let Some(why) = self.failure() {
            return Connecting::Failed(why.to_owned());
        }
        let mut dialling = lock(&self.dialling);
        if dialling.done {
            return Connecting::Ready(false);
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
            dialling.redial.stop();
            dialling.failed = Some(now);
            return Connecting::Failed(why.to_owned());
        }
        if missing > 0 {
            return Connecting::Waits;
        }
        dialling.done = true;
        // It has answered: from now on its silence is known.
        dialling.peer_liveness.note(false);
        Connecting::Ready(true)
    }

    /// Gives a lane that is connected to its loop; `false` where it has broken already.
    fn start(&self, state: &mut LaneState, lane: u16, links: [Link; 2]) -> bool {
        let (Some(set), Some(place)) = (self.own.upgrade(), self.lanes.get(usize::from(lane)))
        else {
            return true;
        };
        let hello = Hello {
            group: self.group,
            // At most 64.
            lanes: self.lanes.len() as u16,
            lane,
            epoch: state.epoch,
        };
        // Also where one has broken already: the other one's peer may hear of it.
        state.epoch += 1;
        if !Greeting::Lane(hello).send(&links) {
            return false;
        }
        state.standing = Standing::Works;
        let [link, answers] = links;
        let ((stream, seals), (answers, _)) = (link.into_lane(), answers.into_lane());
        let stream = Arc::new(stream);
        state.stream = Arc::downgrade(&stream);
        let lane = transmit_lane(set, lane, (stream, answers), seals);
        place.start(Box::new(lane));
        self.missing.fetch_sub(1, Ordering::SeqCst);
        true
    }

    /// A lane has ended. What the peer may not have read of its chunks goes over the others, or
    /// over itself once it is back.
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
        self.monitor_handle.hurry();
        // Whoever woke this lane last meant any lane.
        self.resume_all();
    }

    /// Ends every lane; what others still wait for is sent again over the next ones.
    pub(super) fn end_lanes(&self) {
        let mut dialling = lock(&self.dialling);
        for (state, place) in dialling.lanes.iter_mut().zip(&self.lanes) {
            if state.standing == Standing::Works {
                state.standing = Standing::Ends;
                place.remove();
            }
        }
    }

    /// Dials lanes that have ended, and looks for those that stall.
    fn tend(&self) -> Look {
        self.monitor_handle.lower();
        let is_whole = self.missing.load(Ordering::SeqCst) == 0;
        if !self.is_open() || is_whole && self.is_idle() {
            return Look::Asleep;
        }
        // Spares the comms a wake-up.
        self.monitor_handle.keep();
        let mut dialling = lock(&self.dialling);
        if !dialling.done {
            return Look::In(TICK);
        }
        let now = Instant::now();
        self.check_lanes(&mut dialling, now);
        Look::In(self.redial(&mut dialling, now).unwrap_or(TICK))
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

    /// Ends lanes that are dead while others live. Others that stall are dialled anew: only a
    /// connection that comes about tells that the peer is not at rest, and that the fault is the
    /// lane's; then it takes the lane's place. Nothing is lost with a lane, whose chunks all have a
    /// receive and are kept until they are read.
    fn check_lanes(&self, dialling: &mut Dialling, now: Instant) {
        let before = dialling.looked;
        if now < before + TICK {
            return;
        }
        dialling.looked = now;
        let rested = now.saturating_duration_since(before) > REST;
        let Dialling {
            lanes,
            peer_liveness,
            heard,
            ..
        } = dialling;
        let reads = self.chunks.done().map(|done| done.acknowledged).sum();
        if heard.1 != reads {
            peer_liveness.note(now.saturating_duration_since(heard.0) > REST);
            *heard = (now, reads);
        }
        let at_work = peer_liveness.at_work(now);
        let places = self.lanes.iter().zip(self.chunks.done());
        for (state, (place, done)) in lanes.iter_mut().zip(places) {
            let stream = state.stream.upgrade();
            let transport = stream.and_then(|stream| transport(&*stream));
            let transport = transport.unwrap_or_default();
            let rested = rested || state.standing != Standing::Works;
            let dead = state
                .clock
                .check_lane(now, done, transport, rested, at_work);
            if dead.is_some() {
                state.standing = Standing::Ends;
                place.remove();
            }
        }
    }

    /// Takes what is dialled further; when again, if that is to be soon.
    fn redial(&self, dialling: &mut Dialling, now: Instant) -> Option<Duration> {
        let Dialling {
            redial,
            lanes,
            last,
            done,
            ..
        } = dialling;
        for (lane, why) in std::mem::take(&mut *lock(&self.ended)) {
            if let Some(state) = lanes.get_mut(usize::from(lane)) {
                state.standing = Standing::Gone;
            }
            *last = Some(why);
        }
        let places: Vec<DialState> = lanes.iter().map(|lane| lane.place(now)).collect();
        let until = now + if *done { AGAIN_TIME } else { CONNECT_TIME };
        let dial = |_| Some(PairDialer::new(|| self.peer.dialer(until)));
        let mut unreached: Option<SocketError> = None;
        for news in redial.advance(now, &places, dial) {
            match news {
                News::Vacate(lane) => lanes[usize::from(lane)].end(&self.lanes[usize::from(lane)]),
                News::Fill(lane, links) => {
                    if !self.start(&mut lanes[usize::from(lane)], lane, links) {
                        redial.broke(lane);
                    } else if *done {
                        let address = self.peer.address;
                        self.log.info(&format!("lane {lane} to {address} is back"));
                    }
                }
                News::Failed(lane, _) if places[usize::from(lane)] == DialState::Doubtful => {
                    // Another one can be no worse than what there is.
                    let clock = &mut lanes[usize::from(lane)].clock;
                    clock.rested(now);
                    clock.given_up();
                }
                News::Failed(_, error) if unreached.as_ref().is_none_or(|one| !one.is_answer()) => {
                    unreached = Some(error);
                }
                News::Failed(..) => {}
            }
        }
        let next = (!redial.is_idle()).then(|| redial.next(now));
        let is_alone = self.missing.load(Ordering::SeqCst) >= self.lanes.len();
        let why = match unreached {
            Some(error) if !*done || is_alone && error.is_answer() => Some(error.to_string()),
            _ => None,
        };
        let is_over = redial.bare(now).is_some_and(|bare| bare >= DEAD_AFTER);
        let late = || format!("none was back in {} s", DEAD_AFTER.as_secs());
        if let Some(why) = why.or_else(|| is_over.then(late)) {
            let last = last.take().filter(|_| *done);
            self.fail(match last {
                Some(last) => {
                    let address = self.peer.address;
                    format!("the last lane to {address} ended: {last}; {why}")
                }
                None => why,
            });
        }
        next
    }

    /// A comm begins to use the lanes; `false` when they are closing already.
    pub(crate) fn enter(&self) -> bool {
        let more = |comms| (comms != CLOSED).then(|| comms + 1);
        let entered = self.change_comms(more).is_some();
        if entered && self.failed.load(Ordering::SeqCst) {
            self.release_comm();
            return false;
        }
        entered
    }

    /// A comm is done with the lanes; the last one closes them. Counting and closing are one step:
    /// who enters meanwhile is counted before, or sees the end.
    pub(crate) fn release_comm(&self) {
        let less = |comms| match comms {
            0 | CLOSED => None,
            1 => Some(CLOSED),
            more => Some(more - 1),
        };
        if self.change_comms(less) == Some(1) {
            self.resume_all();
        }
    }

    /// How many there were before, if that changes.
    fn change_comms(&self, to: impl Fn(usize) -> Option<usize>) -> Option<usize> {
        let changed = self
            .comms
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, to);
        changed.ok()
    }

    /// Whether the set can serve another comm.
    pub(crate) fn is_open(&self) -> bool {
        !self.is_closing() && !self.failed.load(Ordering::SeqCst)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.comms.load(Ordering::SeqCst) == CLOSED
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
        self.monitor_handle.request_check();
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
    fn check_liveness(&mut self) -> Look {
        self.0.upgrade().map_or(Look::Gone, |set| set.tend())
    }
}

impl LaneState {
    fn new(now: Instant) -> Self {
        Self {
            epoch: 0,
            standing: Standing::Gone,
            clock: Clock::new(now),
            stream: Weak::new(),
        }
    }

    /// How it stands for whoever dials.
    fn place(&self, now: Instant) -> DialState {
        match self.standing {
            Standing::Works if self.clock.is_doubtful(now) => DialState::Doubtful,
            Standing::Works => DialState::Filled,
            Standing::Ends => DialState::Leaving,
            Standing::Gone => DialState::Vacant,
        }
    }

    /// Its loop is to let go of it, as another one has come about.
    fn end(&mut self, place: &Remote) {
        self.standing = Standing::Ends;
        self.clock.given_up();
        place.remove();
    }
}

impl Peer {
    pub(crate) fn dialer(&self, until: Instant) -> Dialer {
        let key = (self.key.clone(), self.protection);
        Dialer::new(self.local, self.address, key, until)
    }
}

/// Parts begin at pages of a message, where they can.
const PAGE_BYTES: usize = 4096;

/// While half of the `lanes` that move at a time have a part each at most, a message is spread over
/// all of them. What waits for the peer alone is no load: counted, it made 256 KiB with eight in
/// flight one part each, at 0.7 of the rate.
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
impl Peer {
    /// One that nobody reaches.
    pub(crate) fn nobody() -> Self {
        let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
        Self {
            local: nobody,
            address: nobody,
            key: tcpx_wire::Key::generate(&mut |bytes| bytes.fill(7)).client_key(),
            protection: Protection::None,
        }
    }
}

#[cfg(test)]
impl LaneSet {
    /// A set that nobody connects.
    pub(crate) fn without_lanes(splice: bool) -> Arc<Self> {
        Self::of_lanes(Vec::new(), splice)
    }

    /// A set whose peer is nobody.
    fn of_lanes(lanes: Vec<Remote>, splice: bool) -> Arc<Self> {
        let log = Arc::new(Log::new(nccl_net::export::HostLogger::default(), c"TCPX"));
        let retention = [Retention::new().unwrap()];
        let monitor_handle = Monitor::new("nobody").handle();
        Self::new(
            [7; 16],
            Peer::nobody(),
            lanes,
            &retention,
            splice,
            monitor_handle,
            log,
        )
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use tcpx_lanes::event_loop::EventLoops;

    use super::*;

    #[test]
    fn a_comm_entering_at_the_end_is_counted_or_told() {
        let sets: Vec<_> = (0..200).map(|_| LaneSet::without_lanes(false)).collect();
        let start = std::sync::Barrier::new(2);
        let closed_under_a_comm = std::thread::scope(|scope| {
            scope.spawn(|| {
                for set in &sets {
                    assert!(set.enter());
                    start.wait();
                    set.release_comm();
                }
            });
            let round = |set: &LaneSet| {
                start.wait();
                if !set.enter() {
                    return false;
                }
                let closed = (0..100).any(|_| set.is_closing());
                set.release_comm();
                closed
            };
            // Every round, so that the other thread is never left waiting.
            sets.iter().filter(|set| round(set)).count()
        });
        // Both have left each of them by now, and the end is final.
        let open = |set: &&Arc<LaneSet>| !set.is_closing() || set.enter();
        assert_eq!(
            (closed_under_a_comm, sets.iter().filter(open).count()),
            (0, 0)
        );
    }

    #[test]
    fn a_broken_lanes_rest_is_no_half_of_the_next() {
        let loops = EventLoops::start("test", 1).unwrap();
        let set = LaneSet::of_lanes(vec![loops.spread(1)[0].place()], false);
        let now = Instant::now();
        let mut hellos = Vec::new();
        for breaks in [true, false] {
            let [(link, mut far), (answers, _far)] = [Link::bare(), Link::bare()];
            if breaks {
                tcpx_lanes::socket::abort(answers.as_fd());
            }
            lock(&set.dialling).redial.came(0, [link, answers]);
            let connecting = set.connect(now);
            assert_eq!(matches!(connecting, Connecting::Waits), breaks);
            let mut hello = [0; Greeting::BYTES];
            far.read_exact(&mut hello).unwrap();
            hellos.push(Greeting::decode(&hello).unwrap().0);
        }
        assert_ne!(hellos[0], hellos[1]);
    }

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
