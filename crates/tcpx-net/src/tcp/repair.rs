//! Bringing dead lanes back: the client opens them anew, the server takes what comes, and asks for
//! what does not: a lane that is swallowed while only the server sends is dead to the server alone.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::dial::Patience;
use tcpx_lanes::redial::{ATTEMPT, DialState, News, Redial};
use tcpx_wire::handshake::Session;

use super::agree::Cards;
use super::loss::Lost;
use super::open::bind_to_card;
use super::shared::{ChannelShared, lock};
use super::watch;
use crate::channel::Way;
use crate::dial::{DialOptions, LaneDial, begin_lane, most_telling, prepared};
use crate::lane_inbox::{AcceptedLane, LaneInbox};
use crate::network::Setup;

/// How the lanes of a channel come back.
#[derive(Debug)]
pub(super) struct Repair {
    side: Restores,
    redial: Mutex<Redial<LaneDial>>,
}

/// Who brings them back.
#[derive(Debug)]
pub(super) enum Restores {
    /// Not at all.
    Never,
    /// This side opens them.
    Dials(Dialler),
    /// The peer opens them, to our cards.
    Takes(LaneInbox, Cards),
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

impl Repair {
    pub(super) fn new(side: Restores) -> Self {
        if let Restores::Takes(inbox, _) = &side {
            // From now on, what arrives there is taken soon.
            inbox.notify(watch::wake);
        }
        Self {
            side,
            redial: Mutex::default(),
        }
    }

    /// The way of each lane that this side opens.
    pub(super) fn routes(&self) -> &[Way] {
        match &self.side {
            Restores::Dials(dialler) => &dialler.routes,
            _ => &[],
        }
    }

    /// For how long there has been no lane.
    pub(super) fn bare(&self, now: Instant) -> Option<Duration> {
        lock(&self.redial).bare(now)
    }

    /// Does what is due; when there is more to come.
    pub(super) fn advance(&self, channel: &Arc<ChannelShared>, now: Instant) -> Option<Duration> {
        let mut redial = lock(&self.redial);
        if let Restores::Takes(inbox, cards) = &self.side {
            take_arrived(channel, &mut redial, inbox, cards);
        }
        let lanes = 0..channel.roster.lanes();
        let places: Vec<DialState> = lanes.map(|lane| channel.roster.stands(lane, now)).collect();
        let dial = |lane: u16| match &self.side {
            Restores::Dials(dialler) => {
                let way = dialler.routes.get(usize::from(lane))?.clone();
                Some(dialler.begin(lane, vec![way], now + ATTEMPT, Patience::default()))
            }
            _ => None,
        };
        let name = &channel.parts.name;
        for news in redial.advance(now, &places, dial) {
            let (lane, error) = match news {
                News::Vacate(lane) => {
                    channel.lane_lost(lane, Lost::Replaced);
                    continue;
                }
                News::Fill(lane, link) => match prepared(link) {
                    Ok(joined) => {
                        ChannelShared::restore(channel, lane, joined);
                        continue;
                    }
                    Err(error) => {
                        redial.broke(lane);
                        (lane, error)
                    }
                },
                News::Failed(lane, errors) => (lane, most_telling(errors)),
            };
            tracing::debug!(channel = %name, lane, %error, "a lane is still dead");
        }
        if matches!(self.side, Restores::Takes(..)) {
            channel.roster.ask_for_lost(now, redial.coming());
        }
        let repairs = !matches!(self.side, Restores::Never) && channel.roster.has_lost();
        (repairs || !redial.is_idle()).then(|| redial.next(now))
    }
}

/// Takes what the peer has opened.
fn take_arrived(
    channel: &Arc<ChannelShared>,
    redial: &mut Redial<LaneDial>,
    inbox: &LaneInbox,
    cards: &Cards,
) {
    while let Some(arrived) = inbox.try_take() {
        let AcceptedLane {
            stream,
            keys,
            lane,
            lanes,
            peer,
        } = arrived;
        if lane >= channel.roster.lanes() {
            tracing::warn!(
                channel = %channel.parts.name, %peer, lane, lanes,
                "a lane came that the channel does not have; it is closed"
            );
            continue;
        }
        let _ = bind_to_card(&stream, cards);
        // The peer opens a lane anew when the old stream is dead, whether we noticed or not.
        channel.lane_lost(lane, Lost::Replaced);
        redial.came(lane, (stream, Way::to(peer), keys));
    }
}
