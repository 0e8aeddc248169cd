//! A control connection that breaks, or falls silent, while the peer lives: another one takes its
//! place, over any way that works, and goes on with the frame that the peer expects next.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_lanes::redial::{DialState, News, Redial};
use tcpx_net::{
    Congestion, ControlStream, LaneDial, LaneInbox, Side, Way, begin_control, is_unanswered,
    transport,
};
use tcpx_wire::{Time, handshake};

use super::Core;
use super::channels::ChannelState;
use crate::control::ControlEnd;
use crate::driver::{DrivenId, Driver};
use crate::error::Error;

/// Silence of the peer after which its system is asked to answer, while a transfer may wait for it.
const QUIET: Duration = Duration::from_millis(400);
/// Between two looks whether it did.
const LOOK: Duration = Duration::from_millis(100);
/// Between two times that channels are told of the peer: they count in longer spans.
const TELL_AGAIN: Duration = Duration::from_millis(1);
/// Time for the next connection where the control connection and all lanes broke, as they do when
/// the peer's process ends: a peer that lives has dialled by then, which takes [`ROUND_TRIPS`] more
/// from far away.
const GRACE: Duration = Duration::from_millis(50);
/// Of a connection and its handshake, and one for a side that hears of the end before the other
/// one.
const ROUND_TRIPS: u32 = 4;

/// How a session's control connection comes back.
pub(crate) struct Resume {
    side: Source,
    /// How the connection ended, while another one is waited for.
    lost: Option<ControlEnd>,
    /// Since when no lane lives either.
    all_lost: Option<Instant>,
    /// What an answer took on the last connection.
    round_trip: Duration,
    replaced: bool,
}

/// Where the new connection comes from.
enum Source {
    /// This side opens it.
    Dial(Box<Dialling>),
    /// The peer opens it.
    Take(LaneInbox),
}

/// What this side needs for that.
struct Dialling {
    session: handshake::Session,
    congestion: Congestion,
    redial: Redial<LaneDial>,
    opened: Option<Box<ControlStream>>,
    /// No look at the socket before.
    look: Instant,
    /// When the peer's system was asked.
    asked: Instant,
}

/// What the silence of the peer comes to.
enum Suspect {
    /// Nobody waits for it.
    Nothing,
    /// Its system answers, as far as is known; to be looked at again then.
    NotBefore(Instant),
    /// The control connection carries nothing any more.
    Broken,
}

impl Resume {
    pub(crate) fn new(
        session: handshake::Session,
        side: Side,
        inbox: Option<LaneInbox>,
        congestion: Congestion,
        driver: &Arc<Driver>,
        id: DrivenId,
    ) -> Self {
        let now = Instant::now();
        let side = match (side, inbox) {
            (Side::Server, Some(inbox)) => {
                let driver = Arc::clone(driver);
                inbox.notify_control(Box::new(move || driver.wake(id)));
                Source::Take(inbox)
            }
            _ => Source::Dial(Box::new(Dialling {
                session,
                congestion,
                redial: Redial::default(),
                opened: None,
                look: now,
                asked: now,
            })),
        };
        Self {
            side,
            lost: None,
            all_lost: None,
            round_trip: Duration::ZERO,
            replaced: false,
        }
    }

    /// When the peer counts as gone, unless a connection comes before.
    fn gone_at(&mut self, lanes_live: bool, now: Instant) -> Option<Instant> {
        let all_lost = self.lost.is_some() && !lanes_live;
        self.all_lost = all_lost.then(|| self.all_lost.unwrap_or(now));
        Some(self.all_lost? + GRACE + self.round_trip * ROUND_TRIPS)
    }

    /// The session has failed: a peer that has not heard of it, and would go on, is told why.
    pub(super) fn end(&self, error: &Error) {
        if let Source::Take(inbox) = &self.side {
            inbox.end(&error.failure().to_string());
        }
    }

    fn dialling(&mut self) -> Option<&mut Dialling> {
        match &mut self.side {
            Source::Dial(dialling) => Some(dialling),
            Source::Take(_) => None,
        }
    }

    fn arrived(&mut self) -> Option<Box<ControlStream>> {
        match &mut self.side {
            Source::Take(inbox) => inbox.take_control(),
            Source::Dial(dialling) => dialling.opened.take(),
        }
    }
}

impl Core {
    /// The control connection broke. Gives the reason back where that is the end.
    pub(super) fn leave_control(&mut self, end: ControlEnd) -> Option<ControlEnd> {
        match &mut self.resume {
            Some(resume) if end.is_loss() => {
                tracing::warn!(peer = %self.peer, reason = ?end, "the control connection broke; waiting for another");
                let transport = transport(&self.control).unwrap_or_default();
                resume.round_trip = transport.round_trip;
                self.control.disconnect();
                resume.lost = Some(end);
                None
            }
            _ => Some(end),
        }
    }

    /// Goes on over another connection if one has come; `true` if so.
    pub(super) fn replace_control(&mut self) -> bool {
        if self.is_ending() {
            return false;
        }
        let Some(resume) = &mut self.resume else {
            return false;
        };
        let Some(stream) = resume.arrived() else {
            return false;
        };
        tracing::info!(peer = %self.peer, "the control connection goes on over another one");
        resume.lost = None;
        resume.replaced = true;
        self.control.replace(*stream);
        true
    }

    /// Opens another control connection when this one broke or is silent for too long, and ends the
    /// wait for one when the peer is gone. Returns when to look again.
    pub(super) fn look_after_control(&mut self) -> Option<Time> {
        if self.is_ending() {
            return None;
        }
        let now = self.clock.ticked();
        let resume = self.resume.as_mut()?;
        let mut channels = self.channels.all.iter();
        let lanes_live = resume.lost.is_none() || channels.all(|state| state.channel.is_alive());
        let gone = resume.gone_at(lanes_live, now);
        if gone.is_some_and(|at| now >= at)
            && let Some(end) = resume.lost.take()
        {
            self.fail(Error::control(self.peer, end));
            self.perform_actions();
            return None;
        }
        let gone = gone.map(|at| self.clock.time_of(at));
        gone.into_iter().chain(self.dial_control()).min()
    }

    /// Opens another control connection where that is due. Returns when to look again.
    fn dial_control(&mut self) -> Option<Time> {
        let resume = self.resume.as_mut()?;
        let broken = resume.lost.is_some();
        let dialling = resume.dialling()?;
        let is_idle = dialling.redial.is_idle() && dialling.opened.is_none();
        let patience = self.patience()?;
        let heard = self.session.heard();
        // As a rule it was heard a moment ago.
        let silence = match self.operations.is_empty() {
            true => patience,
            false => QUIET.min(patience),
        };
        let is_heard = !broken && self.clock.now() < heard + silence;
        if is_heard && is_idle {
            return Some(heard + silence);
        }
        let now = self.clock.ticked();
        let heard = self.clock.instant_of(heard);
        let suspect = match broken {
            true => Suspect::Broken,
            false if is_heard => Suspect::NotBefore(heard + silence),
            false => self.ask_system(heard, now),
        };
        let due = match suspect {
            Suspect::Broken => now,
            Suspect::NotBefore(look) => (heard + patience).min(look),
            Suspect::Nothing => heard + patience,
        };
        // One that is silent is as good as none: the next connection takes its place at once.
        let place = match due <= now {
            true => DialState::Vacant,
            false => DialState::Filled,
        };
        let next = self.step_dials(place, now);
        Some(self.clock.time_of(next.unwrap_or(due).max(now)))
    }

    /// Takes what is dialled further; when again, if there is anything.
    fn step_dials(&mut self, place: DialState, now: Instant) -> Option<Instant> {
        let (channels, control, peer) = (&self.channels.all, &self.control, self.peer);
        let Dialling {
            session,
            congestion,
            redial,
            opened,
            ..
        } = self.resume.as_mut()?.dialling()?;
        let dial = |_| {
            let ways = ways(channels, control.local_ip(), peer);
            Some(begin_control(ways, session, congestion, now))
        };
        for news in redial.advance(now, &[place], dial) {
            match news {
                News::Fill(_, link) => *opened = Some(Box::new(link.into())),
                News::Failed(_, errors) => {
                    for error in errors {
                        tracing::debug!(%error, "no control connection over this way");
                    }
                }
                News::Vacate(_) => {}
            }
        }
        if opened.is_some() {
            // The next turn goes on over it.
            return Some(now);
        }
        (place == DialState::Vacant).then(|| now + redial.next(now))
    }

    /// Asks the peer's system now and then for an answer while a transfer may wait for the peer,
    /// which says nothing. A process that rests or is busy has a system that answers all the same.
    fn ask_system(&mut self, heard: Instant, now: Instant) -> Suspect {
        let dialling = self.resume.as_mut().and_then(Resume::dialling);
        let Some(Dialling { look, asked, .. }) = dialling.filter(|_| !self.operations.is_empty())
        else {
            return Suspect::Nothing;
        };
        let due = (heard + QUIET).max(*look);
        if now < due {
            return Suspect::NotBefore(due);
        }
        if is_unanswered(&self.control) {
            return Suspect::Broken;
        }
        *look = now + LOOK;
        let due = *look;
        if now >= *asked + QUIET {
            *asked = now;
            self.session.probe(self.clock.now());
            self.write_control();
        }
        Suspect::NotBefore(due)
    }

    /// Tells the channels that the peer has spoken, if it has since `before`.
    pub(super) fn tell_that_peer_was_heard(&mut self, before: Time) {
        let heard = self.session.heard();
        let told = |at: Time| heard < at + TELL_AGAIN;
        if heard == before || self.channels.last_activity_reported.is_some_and(told) {
            return;
        }
        self.channels.last_activity_reported = Some(heard);
        let patience = self.patience().unwrap_or_default();
        let rested = heard.saturating_since(before) > patience;
        for state in self.channels.all.iter_mut() {
            state.channel.peer_active(rested);
        }
    }

    /// The longest silence of a peer at work: it speaks at least every third part of the time after
    /// which it counts as dead.
    fn patience(&self) -> Option<Duration> {
        Some(self.session.agreed()?.dead_after * 2 / 5)
    }

    /// Whether another connection has taken the control connection's place since the last call.
    pub(crate) fn control_was_replaced(&mut self) -> bool {
        let resume = self.resume.as_mut();
        resume.is_some_and(|resume| std::mem::take(&mut resume.replaced))
    }
}

/// Over which another control connection is dialled: those of living lanes first, that of the
/// connection which is silent last.
fn ways(channels: &[ChannelState], ours: Option<IpAddr>, peer: SocketAddr) -> Vec<Way> {
    let of_channels = channels.iter().flat_map(|state| state.channel.ways());
    let mut ways: Vec<Way> = of_channels.collect();
    let first = Way::to(peer);
    if !ways.contains(&first) {
        ways.push(first);
    }
    ways.sort_by_key(|way| way.local.is_none() || way.local == ours);
    ways
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::sync::atomic::Ordering;

    use super::super::tests::{LIMIT, Scene};
    use super::*;

    impl Scene {
        /// The server of a session whose peer's control connection ends.
        fn without_control() -> Self {
            let mut scene = Self::new();
            scene.core.resume = Some(Resume {
                side: Source::Take(LaneInbox::new()),
                lost: None,
                all_lost: None,
                round_trip: Duration::ZERO,
                replaced: false,
            });
            scene.peer.shutdown(Shutdown::Write).unwrap();
            let start = Instant::now();
            while !scene.core.control.is_away() {
                assert!(start.elapsed() < LIMIT, "nobody hears of it");
                scene.core.progress();
            }
            let resume = scene.core.resume.as_mut().unwrap();
            let measured = std::mem::take(&mut resume.round_trip);
            assert!(measured > Duration::ZERO, "the kernel knows it");
            scene
        }

        /// When a look at this time is to be followed by another one.
        fn check_at(&mut self, lanes_live: bool, at: Instant) -> Option<Time> {
            self.channel.is_dead.store(!lanes_live, Ordering::SeqCst);
            self.core.clock.set(at);
            self.core.look_after_control()
        }
    }

    #[test]
    fn a_peer_whose_connections_all_broke_is_gone_after_a_while() {
        let mut scene = Scene::without_control();
        let at = scene.core.clock.ticked();
        assert_eq!(scene.check_at(true, at + GRACE), None);
        let broke = at + 2 * GRACE;
        let gone = scene.core.clock.time_of(broke + GRACE);
        assert_eq!(scene.check_at(false, broke), Some(gone));
        let last = broke + GRACE - Duration::from_micros(1);
        assert_eq!(scene.check_at(false, last), Some(gone));
        assert!(scene.core.refusal().is_none());
        assert_eq!(scene.check_at(false, broke + GRACE), None);
        assert!(scene.core.ending.is_loss());
    }

    #[test]
    fn a_peer_from_far_has_time_to_dial() {
        let mut scene = Scene::without_control();
        let far = Duration::from_millis(70);
        scene.core.resume.as_mut().unwrap().round_trip = far;
        let broke = scene.core.clock.ticked();
        let gone = broke + GRACE + 4 * far;
        let at = scene.core.clock.time_of(gone);
        assert_eq!(scene.check_at(false, broke), Some(at));
        scene.check_at(false, gone - Duration::from_micros(1));
        assert!(scene.core.refusal().is_none());
        scene.check_at(false, gone);
        assert!(scene.core.ending.is_loss());
    }

    #[test]
    fn a_lane_that_came_back_shows_that_the_peer_lives() {
        let mut scene = Scene::without_control();
        let broke = scene.core.clock.ticked();
        scene.check_at(false, broke);
        assert_eq!(scene.check_at(true, broke + GRACE), None);
        let again = broke + 2 * GRACE;
        let gone = scene.core.clock.time_of(again + GRACE);
        assert_eq!(scene.check_at(false, again), Some(gone));
        assert!(scene.core.refusal().is_none());
    }
}
