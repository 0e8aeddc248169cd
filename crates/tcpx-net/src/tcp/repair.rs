//! Bringing dead lanes back: the client opens them anew, the server takes what comes, and asks for what does not: a
//! lane that is swallowed while only the server sends is dead to the server alone.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::dial::Patience;
use tcpx_lanes::health::{PAUSE, Retry};
use tcpx_lanes::monitor::TICK;
use tcpx_wire::handshake::Session;

use super::agree::Cards;
use super::loss::Lost;
use super::open::bind_to_card;
use super::roster::Missing;
use super::shared::{Shared, lock};
use super::watch;
use crate::channel::Way;
use crate::dial::{DialOptions, JoinedLane, LaneDial, begin_lane, join_lane, most_telling};
use crate::lane_inbox::{AcceptedLane, LaneInbox};
use crate::network::Setup;

/// Between two rounds of which the first one brought its lanes back.
const SHORT_PAUSE: Duration = Duration::from_millis(20);
/// For one attempt.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Between two steps of lanes that are dialled.
const STEP: Duration = Duration::from_millis(2);

/// How the lanes of a channel come back.
#[derive(Debug)]
pub(super) enum Repair {
    /// Not at all.
    Never,
    /// This side opens them.
    Dial(Redial),
    /// The peer opens them.
    Take(Arrivals),
}

/// What the client needs to open a lane.
#[derive(Debug)]
pub(super) struct Dialler {
    session: Session,
    /// By lane.
    routes: Vec<Way>,
    /// Of every lane.
    congestion: Congestion,
}

impl Dialler {
    pub(super) fn new(setup: &Setup<'_>, routes: Vec<Way>) -> Self {
        Self {
            session: setup.session.clone(),
            routes,
            congestion: setup.congestion.clone(),
        }
    }

    /// Begins to open one lane.
    pub(super) fn begin(
        &self,
        lane: u16,
        ways: Vec<Way>,
        deadline: Instant,
        patience: Patience,
    ) -> LaneDial {
        let lanes = u16::try_from(self.routes.len()).unwrap_or(u16::MAX);
        let options = DialOptions {
            congestion: self.congestion.clone(),
            deadline,
        };
        begin_lane(ways, &self.session, (lane, lanes), options, patience)
    }
}

/// The client's lanes that are dead.
#[derive(Debug)]
pub(super) struct Redial {
    dialler: Dialler,
    round: Mutex<Round>,
}

#[derive(Debug, Default)]
struct Round {
    dials: Vec<(u16, LaneDial)>,
    /// A dial of this round has failed.
    failed: bool,
    next: Retry,
}

impl Redial {
    pub(super) fn new(dialler: Dialler) -> Self {
        Self {
            dialler,
            round: Mutex::default(),
        }
    }

    /// The way of each lane.
    pub(super) fn routes(&self) -> &[Way] {
        &self.dialler.routes
    }

    /// Dials what is lost; when there is more to do.
    fn advance(&self, channel: &Arc<Shared>, now: Instant) -> Option<Duration> {
        let mut round = lock(&self.round);
        let Round {
            dials,
            failed,
            next,
        } = &mut *round;
        let lost = channel.roster.lost();
        // A peer that ended its lanes in order may be about to say goodbye.
        let is_due = |one: &&Missing| one.vacant && (one.broke || now >= one.since + PAUSE);
        let is_round = !dials.is_empty();
        if is_round || next.is_due(now) {
            for lane in lost.iter().filter(is_due).map(|one| one.lane) {
                let way = self.dialler.routes.get(usize::from(lane)).cloned();
                if let Some(way) = way.filter(|_| !dials.iter().any(|(one, _)| *one == lane)) {
                    let (until, patience) = (now + ATTEMPT, Patience::default());
                    let dial = self.dialler.begin(lane, vec![way], until, patience);
                    dials.push((lane, dial));
                }
            }
        }
        dials.retain_mut(|(lane, dial)| {
            let joined = match dial.poll(now) {
                Ok(None) => return true,
                Ok(Some(opened)) => join_lane(opened),
                Err(errors) => Err(most_telling(errors)),
            };
            match joined {
                Ok((joined, _)) => *failed |= Shared::restore(channel, *lane, joined).is_some(),
                Err(error) => {
                    tracing::debug!(channel = %channel.parts.name, lane, %error, "a lane is still dead");
                    *failed = true;
                }
            }
            false
        });
        if !dials.is_empty() {
            return Some(STEP);
        }
        if is_round {
            match std::mem::take(failed) {
                true => next.failed(now),
                false => next.succeeded(now, SHORT_PAUSE),
            }
        }
        (!lost.is_empty()).then_some(TICK)
    }
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
    /// Does what is due; when there is more to come.
    pub(super) fn advance(&self, channel: &Arc<Shared>) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::Dial(redial) => redial.advance(channel, Instant::now()),
            Self::Take(arrivals) => take_arrived(channel, arrivals).then_some(TICK),
        }
    }
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
