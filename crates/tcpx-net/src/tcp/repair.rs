//! Bringing dead lanes back: the client opens them anew, the server takes what comes, and asks for what does not: a
//! lane that is swallowed while only the server sends is dead to the server alone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::health::{PAUSE, Retry};
use tcpx_wire::handshake::Session;

use super::agree::Cards;
use super::loss::Lost;
use super::open::bind_to_card;
use super::roster::Missing;
use super::shared::{Shared, lock};
use super::watch;
use crate::channel::Way;
use crate::dial::{DialOptions, JoinedLane, LaneDial, begin_lane, open_lane};
use crate::error::NetworkError;
use crate::lane_inbox::{AcceptedLane, LaneInbox};
use crate::network::Setup;

/// Between two rounds of which the first one brought its lanes back.
const SHORT_PAUSE: Duration = Duration::from_millis(20);
/// For one attempt.
const ATTEMPT: Duration = Duration::from_secs(2);

/// How the lanes of a channel come back.
#[derive(Debug)]
pub(super) enum Repair {
    /// Not at all.
    Never,
    /// This side opens them.
    Dial(Arc<Dialler>),
    /// The peer opens them.
    Take(Arrivals),
}

/// What the client needs to open a lane.
#[derive(Debug)]
pub(super) struct Dialler {
    pub(super) session: Session,
    /// By lane.
    pub(super) routes: Vec<Way>,
    /// Of every lane.
    pub(super) congestion: Congestion,
    /// A thread is at it.
    busy: AtomicBool,
    next: Mutex<Retry>,
}

impl Dialler {
    pub(super) fn new(setup: &Setup<'_>, routes: Vec<Way>) -> Self {
        Self {
            session: setup.session.clone(),
            routes,
            congestion: setup.congestion.clone(),
            busy: AtomicBool::new(false),
            next: Mutex::default(),
        }
    }

    /// Opens one lane.
    fn open(&self, lane: u16, deadline: Instant) -> Result<JoinedLane, NetworkError> {
        let Some(way) = self.routes.get(usize::from(lane)) else {
            return Err(NetworkError::Control {
                reason: format!("lane {lane} of {} has no route", self.routes.len()),
            });
        };
        open_lane(self.begin(lane, way, deadline)?)
    }

    /// Begins to open one lane.
    pub(super) fn begin(
        &self,
        lane: u16,
        way: &Way,
        deadline: Instant,
    ) -> Result<LaneDial, NetworkError> {
        let lanes = u16::try_from(self.routes.len()).unwrap_or(u16::MAX);
        let options = DialOptions {
            deadline,
            interface: way.interface.clone(),
            source: way.local,
            congestion: self.congestion.clone(),
        };
        begin_lane(way.peer, &self.session, lane, lanes, &options)
    }

    /// Tries each lost lane once, the last lost one first, also one that is lost meanwhile: to dial where nothing answers
    /// takes long.
    fn run(&self, channel: &std::sync::Weak<Shared>) {
        let mut tried = 0_u64;
        let mut all = true;
        let next = |tried| next_to_dial(&channel.upgrade()?.roster.lost(), tried);
        while let Some(lane) = next(tried) {
            tried |= 1 << lane;
            let opened = self.open(lane, Instant::now() + ATTEMPT);
            let Some(channel) = channel.upgrade().filter(|channel| !channel.is_over()) else {
                break;
            };
            match opened {
                Ok(stream) => all &= Shared::restore(&channel, lane, stream).is_none(),
                Err(error) => {
                    tracing::debug!(channel = %channel.parts.name, lane, %error, "a lane is still dead");
                    all = false;
                }
            }
        }
        let now = Instant::now();
        match all {
            true => lock(&self.next).succeeded(now, SHORT_PAUSE),
            false => lock(&self.next).failed(now),
        }
        self.busy.store(false, Ordering::Release);
        watch::wake();
    }
}

/// The lane that was lost last of those that are not in `tried`, a set of bits.
fn next_to_dial(lost: &[Missing], tried: u64) -> Option<u16> {
    let untried = |one: &&Missing| one.vacant && tried & 1 << one.lane == 0;
    let last = lost.iter().filter(untried).max_by_key(|one| one.since);
    last.map(|one| one.lane)
}

/// Lanes that the peer opens anew.
#[derive(Debug)]
pub(super) struct Arrivals {
    inbox: LaneInbox,
    /// Our cards.
    cards: Cards,
    /// Those whose place is not empty yet.
    waiting: Mutex<Vec<AcceptedLane>>,
}

impl Arrivals {
    /// From now on, what arrives in the inbox is taken soon.
    pub(super) fn new(inbox: LaneInbox, cards: Cards) -> Self {
        inbox.notify(watch::wake);
        Self {
            inbox,
            cards,
            waiting: Mutex::new(Vec::new()),
        }
    }
}

impl Repair {
    /// Does what is due; true while there is more to come.
    pub(super) fn advance(&self, channel: &Arc<Shared>) -> bool {
        match self {
            Self::Never => false,
            Self::Dial(dialler) => dial_lost(channel, dialler),
            Self::Take(arrivals) => take_arrived(channel, arrivals),
        }
    }
}

fn dial_lost(channel: &Arc<Shared>, dialler: &Arc<Dialler>) -> bool {
    let lost = channel.roster.lost();
    if lost.is_empty() {
        return false;
    }
    let now = Instant::now();
    // A peer that ended its lanes in order may be about to say goodbye.
    let is_due = |one: &Missing| one.vacant && (one.broke || now >= one.since + PAUSE);
    let paused = !lock(&dialler.next).is_due(now);
    if paused || !lost.iter().any(is_due) || dialler.busy.swap(true, Ordering::AcqRel) {
        return true;
    }
    let (weak, inner) = (Arc::downgrade(channel), Arc::clone(dialler));
    let started = std::thread::Builder::new()
        .name("tcpx-redial".to_owned())
        .spawn(move || inner.run(&weak));
    if let Err(error) = started {
        tracing::warn!(%error, "no thread to open a lane anew; trying again");
        lock(&dialler.next).failed(now);
        dialler.busy.store(false, Ordering::Release);
    }
    true
}

fn take_arrived(channel: &Arc<Shared>, arrivals: &Arrivals) -> bool {
    let mut waiting = lock(&arrivals.waiting);
    while let Some(arrived) = arrivals.inbox.try_take() {
        if arrived.lane >= channel.roster.lanes() {
            tracing::warn!(
                channel = %channel.parts.name, peer = %arrived.peer, lane = arrived.lane, lanes = arrived.lanes,
                "a lane came that the channel does not have; it is closed"
            );
            continue;
        }
        let _ = bind_to_card(&arrived.stream, &arrivals.cards);
        // The peer opens a lane anew when the old stream is dead, whether we noticed or not.
        channel.lane_lost(arrived.lane, Lost::Replaced);
        waiting.retain(|other| other.lane != arrived.lane);
        waiting.push(arrived);
    }
    for arrived in std::mem::take(&mut *waiting) {
        let AcceptedLane {
            stream,
            keys,
            lane,
            lanes,
            peer,
        } = arrived;
        let joined = JoinedLane { stream, keys };
        if let Some(JoinedLane { stream, keys }) = Shared::restore(channel, lane, joined) {
            waiting.push(AcceptedLane {
                stream,
                keys,
                lane,
                lanes,
                peer,
            });
        }
    }
    let coming = waiting.iter().fold(0, |lanes, one| lanes | 1 << one.lane);
    channel.roster.ask_for_lost(Instant::now(), coming);
    !waiting.is_empty() || !channel.roster.lost().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_that_was_lost_later_does_not_wait_for_those_that_are_dialled_in_vain() {
        let now = Instant::now();
        let mut lost: Vec<Missing> = (0..3)
            .map(|lane| Missing {
                lane,
                since: now,
                broke: true,
                vacant: true,
            })
            .collect();
        assert!(next_to_dial(&lost, 0b111).is_none());
        lost[1].since = now + ATTEMPT;
        assert_eq!(next_to_dial(&lost, 0b001), Some(1));
        assert_eq!(next_to_dial(&lost, 0b011), Some(2));
        lost[1].vacant = false;
        assert_eq!(next_to_dial(&lost, 0b100), Some(0));
    }
}
