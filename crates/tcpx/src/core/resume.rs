//! A control connection that breaks, or falls silent, while the peer lives: another one takes its place,
//! over any way that works, and goes on with the frame that the peer expects next.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_lanes::health::Retry;
use tcpx_lanes::lock;
use tcpx_net::{
    Congestion, ControlStream, LaneInbox, Side, Way, dial_control_again, is_unanswered, transport,
};
use tcpx_wire::{Time, handshake};

use super::Core;
use crate::control::ControlEnd;
use crate::driver::{DrivenId, Driver};
use crate::error::Error;

/// Silence of the peer after which its system is asked to answer, while a transfer may wait for it.
const QUIET: Duration = Duration::from_millis(400);
/// Between two looks whether it did.
const LOOK: Duration = Duration::from_millis(100);
/// Between two times that channels are told of the peer: they count in longer spans.
const TELL_AGAIN: Duration = Duration::from_millis(1);
/// From the start of a round over all ways to the next one, doubled by each round in vain up to the longest. It is shorter
/// than [`GRACE`] at first: a connection that breaks soon after it came back is dialled before a peer without lanes gives up.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// Time for the next connection where the control connection and all lanes broke, as they do when the peer's process ends:
/// a peer that lives has dialled by then, which takes [`ROUND_TRIPS`] more from far away.
const GRACE: Duration = Duration::from_millis(50);
/// Of a connection and its handshake, and one for a side that hears of the end before the other one.
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
    Dial {
        inner: Arc<Dial>,
        rounds: Retry,
        /// No look at the socket before.
        look: Instant,
        /// When the peer's system was asked.
        asked: Instant,
    },
    /// The peer opens it.
    Take(LaneInbox),
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

struct Dial {
    session: handshake::Session,
    congestion: Congestion,
    opened: Mutex<Option<Box<ControlStream>>>,
    /// A thread is at it.
    busy: AtomicBool,
    driver: Arc<Driver>,
    id: DrivenId,
}

impl Dial {
    fn run(&self, ways: &[Way]) {
        match dial_control_again(ways, &self.session, &self.congestion) {
            Ok(stream) => {
                *lock(&self.opened) = Some(Box::new(stream));
            }
            Err(error) => tracing::debug!(%error, "no control connection over any way"),
        }
        self.busy.store(false, Ordering::Release);
        self.driver.wake(self.id);
    }
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
        let source = match (side, inbox) {
            (Side::Server, Some(inbox)) => {
                let driver = Arc::clone(driver);
                inbox.notify_control(Box::new(move || driver.wake(id)));
                Source::Take(inbox)
            }
            _ => Source::Dial {
                look: now,
                asked: now,
                rounds: Retry::new(FIRST_PAUSE, LONGEST_PAUSE),
                inner: Arc::new(Dial {
                    session,
                    congestion,
                    opened: Mutex::new(None),
                    busy: AtomicBool::new(false),
                    driver: Arc::clone(driver),
                    id,
                }),
            },
        };
        Self {
            side: source,
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

    fn arrived(&self) -> Option<Box<ControlStream>> {
        match &self.side {
            Source::Take(inbox) => inbox.take_control(),
            Source::Dial { inner, .. } => lock(&inner.opened).take(),
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
                self.control.leave();
                resume.lost = Some(end);
                None
            }
            _ => Some(end),
        }
    }

    /// Goes on over another connection if one has come; `true` if so.
    pub(super) fn replace_control(&mut self) -> bool {
        if self.ended.is_some() || self.session.ended() {
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
        if let Source::Dial { rounds, .. } = &mut resume.side {
            rounds.succeeded(self.ticked, FIRST_PAUSE);
        }
        self.control.replace(*stream);
        true
    }

    /// Opens another control connection when this one broke or is silent for too long, and ends the
    /// wait for one when the peer is gone. Returns when to look again.
    pub(super) fn look_after_control(&mut self) -> Option<Time> {
        if self.ended.is_some() || self.session.ended() {
            return None;
        }
        let now = self.ticked;
        let resume = self.resume.as_mut()?;
        let mut channels = self.channels.iter();
        let lanes_live = resume.lost.is_none() || channels.all(|state| state.channel.is_alive());
        let gone = resume.gone_at(lanes_live, now);
        if gone.is_some_and(|at| now >= at)
            && let Some(end) = resume.lost.take()
        {
            self.fail(Error::control(self.peer, end));
            self.perform_actions();
            return None;
        }
        let gone = gone.map(|at| self.time_of(at));
        gone.into_iter().chain(self.dial_control()).min()
    }

    /// Opens another control connection where that is due. Returns when to look again.
    fn dial_control(&mut self) -> Option<Time> {
        let resume = self.resume.as_ref()?;
        if matches!(resume.side, Source::Take(_)) {
            return None;
        }
        let broken = resume.lost.is_some();
        let patience = self.patience()?;
        let heard = self.session.heard();
        // As a rule it was heard a moment ago.
        let silence = match self.operations.is_empty() {
            true => patience,
            false => QUIET.min(patience),
        };
        if !broken && self.now() < heard + silence {
            return Some(heard + silence);
        }
        let now = self.ticked;
        let heard = self.instant_of(heard);
        let suspect = match broken {
            true => Suspect::Broken,
            false => self.ask_system(heard, now),
        };
        let Some(Source::Dial { inner, rounds, .. }) =
            self.resume.as_mut().map(|resume| &mut resume.side)
        else {
            return None;
        };
        let next = rounds.at().unwrap_or(now);
        let mut due = match suspect {
            Suspect::Broken => next,
            Suspect::NotBefore(look) => (heard + patience).max(next).min(look),
            Suspect::Nothing => (heard + patience).max(next),
        };
        if due <= now && !inner.busy.swap(true, Ordering::AcqRel) {
            rounds.failed(now);
            due = rounds.at().unwrap_or(now);
            let mut ways: Vec<Way> = self
                .channels
                .iter()
                .flat_map(|state| state.channel.ways())
                .collect();
            let first = Way {
                local: None,
                interface: None,
                peer: self.peer.address,
            };
            if !ways.contains(&first) {
                ways.push(first);
            }
            // The way of the connection that is silent comes last.
            let ours = self.control.local_ip();
            ways.sort_by_key(|way| way.local.is_none() || way.local == ours);
            let dial = Arc::clone(inner);
            let started = std::thread::Builder::new()
                .name("tcpx-resume".to_owned())
                .spawn(move || dial.run(&ways));
            if let Err(error) = started {
                tracing::warn!(%error, "no thread to open a control connection; trying again");
                inner.busy.store(false, Ordering::Release);
            }
        }
        // While a thread is at it, its end wakes the engine.
        let idle = !inner.busy.load(Ordering::Acquire);
        idle.then(|| self.time_of(due.max(now)))
    }

    /// Asks the peer's system now and then for an answer while a transfer may wait for the peer, which says
    /// nothing. A process that rests or is busy has a system that answers all the same.
    fn ask_system(&mut self, heard: Instant, now: Instant) -> Suspect {
        let Some(Source::Dial { look, asked, .. }) =
            self.resume.as_mut().map(|resume| &mut resume.side)
        else {
            return Suspect::Nothing;
        };
        if self.operations.is_empty() {
            return Suspect::Nothing;
        }
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
            let now = self.now();
            self.session.probe(now);
            self.write_control();
        }
        Suspect::NotBefore(due)
    }

    /// Tells the channels that the peer has spoken, if it has since `before`.
    pub(super) fn tell_that_peer_was_heard(&mut self, before: Time) {
        let heard = self.session.heard();
        let told = |at: Time| heard < at + TELL_AGAIN;
        if heard == before || self.told_heard.is_some_and(told) {
            return;
        }
        self.told_heard = Some(heard);
        let patience = self.patience().unwrap_or_default();
        let rested = heard.saturating_since(before) > patience;
        for state in self.channels.iter_mut() {
            state.channel.peer_heard(rested);
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
        fn look(&mut self, lanes_live: bool, at: Instant) -> Option<Time> {
            self.channel.is_dead.store(!lanes_live, Ordering::SeqCst);
            self.core.ticked = at;
            self.core.look_after_control()
        }
    }

    #[test]
    fn a_peer_whose_connections_all_broke_is_gone_after_a_while() {
        let mut scene = Scene::without_control();
        let at = scene.core.ticked;
        assert_eq!(scene.look(true, at + GRACE), None);
        let broke = at + 2 * GRACE;
        let gone = scene.core.time_of(broke + GRACE);
        assert_eq!(scene.look(false, broke), Some(gone));
        let last = broke + GRACE - Duration::from_micros(1);
        assert_eq!(scene.look(false, last), Some(gone));
        assert!(scene.core.ended.is_none());
        assert_eq!(scene.look(false, broke + GRACE), None);
        assert!(matches!(scene.core.ended, Some(Err(_))));
    }

    #[test]
    fn a_peer_from_far_has_time_to_dial() {
        let mut scene = Scene::without_control();
        let far = Duration::from_millis(70);
        scene.core.resume.as_mut().unwrap().round_trip = far;
        let broke = scene.core.ticked;
        let gone = broke + GRACE + 4 * far;
        let at = scene.core.time_of(gone);
        assert_eq!(scene.look(false, broke), Some(at));
        scene.look(false, gone - Duration::from_micros(1));
        assert!(scene.core.ended.is_none());
        scene.look(false, gone);
        assert!(matches!(scene.core.ended, Some(Err(_))));
    }

    #[test]
    fn a_lane_that_came_back_shows_that_the_peer_lives() {
        let mut scene = Scene::without_control();
        let broke = scene.core.ticked;
        scene.look(false, broke);
        assert_eq!(scene.look(true, broke + GRACE), None);
        let again = broke + 2 * GRACE;
        let gone = scene.core.time_of(again + GRACE);
        assert_eq!(scene.look(false, again), Some(gone));
        assert!(scene.core.ended.is_none());
    }
}
