//! Lanes that are opened at once, by the thread that wants them.

use std::mem::replace;
use std::time::Instant;

use rustix::event::{PollFd, Timespec, poll};

use super::repair::Dialler;
use crate::channel::Way;
use crate::dial::{AnsweredLane, JoinedLane, LaneDial, Redials};
use crate::error::{NetworkError, SocketError};
use crate::network::{Exchange, Meanwhile};

/// Lanes on their way to the listener's answers, from 0 on. They join the session once it is known that they are wanted;
/// the others are closed, and the server has never had them.
pub(super) struct Dials {
    dialler: Dialler,
    deadline: Instant,
    dials: Vec<Dial>,
}

struct Dial {
    lane: u16,
    way: Way,
    /// Answers may come in through another card, as where cards of one network answer for each other: while none comes,
    /// the way is tried without the card's name too.
    shared: bool,
    /// Until the peer's wish is known: a lane that overtakes the client's proof is refused, and opened once more.
    is_early: bool,
    redials: Redials,
    state: State,
}

enum State {
    Begins(Instant),
    UnderWay(Box<LaneDial>),
    Ended(Result<Box<AnsweredLane>, NetworkError>),
}

/// A lane, and the way that it took.
type Opened = Result<(JoinedLane, Way), NetworkError>;

impl Dials {
    pub(super) fn new(dialler: Dialler, deadline: Instant) -> Self {
        Self {
            dialler,
            deadline,
            dials: Vec::new(),
        }
    }

    /// The peer's wish is known: those that begin from now on are of this dialler and have this deadline.
    pub(super) fn agreed(&mut self, dialler: Dialler, deadline: Instant) {
        (self.dialler, self.deadline) = (dialler, deadline);
    }

    pub(super) fn count(&self) -> usize {
        self.dials.len()
    }

    /// Another one, which begins when they next [go on](Meanwhile::advance).
    pub(super) fn want(&mut self, lane: u16, way: Way, shared: bool, is_early: bool) {
        self.dials.push(Dial {
            lane,
            shared: shared && way.interface.is_some(),
            way,
            is_early,
            redials: Redials::default(),
            state: State::Begins(Instant::now()),
        });
    }

    /// Waits for the first `lanes` of them, which join the session; says which way each took.
    ///
    /// # Errors
    /// What [`Exchange::wait`] says: a peer that has gone cuts lanes off too.
    pub(super) fn finish(
        mut self,
        lanes: usize,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Opened>, NetworkError> {
        self.dials.truncate(lanes);
        loop {
            self.advance();
            for dial in &mut self.dials {
                if dial.is_early
                    && let State::Ended(Err(error)) = &dial.state
                {
                    tracing::debug!(%error, "a lane was opened early in vain");
                    (dial.is_early, dial.state) = (false, State::Begins(Instant::now()));
                }
            }
            let due = self.dials.iter().filter_map(|dial| match &dial.state {
                State::Begins(at) => Some(*at),
                State::UnderWay(dial) => Some(dial.deadline),
                State::Ended(_) => None,
            });
            let Some(due) = due.min() else {
                break;
            };
            exchange.wait(self.awaits(), due)?;
        }
        let join = |dial: Dial| match dial.state {
            State::Ended(answered) => {
                let joined = answered.and_then(|lane| lane.join());
                Some(joined.map(|joined| (joined, dial.way)))
            }
            State::Begins(_) | State::UnderWay(_) => None,
        };
        Ok(self.dials.into_iter().filter_map(join).collect())
    }
}

impl Meanwhile for Dials {
    fn awaits(&self) -> Vec<PollFd<'_>> {
        let under_way = self.dials.iter().filter_map(|dial| match &dial.state {
            State::UnderWay(dial) => Some(dial.watched()),
            State::Begins(_) | State::Ended(_) => None,
        });
        under_way.collect()
    }

    fn advance(&mut self) {
        let mut watched = self.awaits();
        if !watched.is_empty() {
            // A signal is as if nothing had come.
            let _ = poll(&mut watched, Some(&Timespec::default()));
        }
        let ready: Vec<bool> = watched
            .iter()
            .map(|one| !one.revents().is_empty())
            .collect();
        let mut ready = ready.into_iter();
        for dial in &mut self.dials {
            let is_ready = matches!(dial.state, State::UnderWay(_)) && ready.next() == Some(true);
            dial.advance(is_ready, &self.dialler, self.deadline);
        }
    }
}

impl Dial {
    fn advance(&mut self, is_ready: bool, dialler: &Dialler, deadline: Instant) {
        let now = Instant::now();
        self.state = match replace(&mut self.state, State::Begins(now)) {
            State::Begins(at) if now >= at => {
                let left = deadline.saturating_duration_since(now);
                let until = now + if self.shared { left / 2 } else { left };
                match dialler.begin(self.lane, &self.way, until) {
                    Ok(dial) => State::UnderWay(Box::new(dial)),
                    Err(error) => State::Ended(Err(error)),
                }
            }
            State::UnderWay(mut dial) => match dial.advance_if(is_ready) {
                Ok(None) => State::UnderWay(dial),
                Ok(Some((proof, keys))) => State::Ended(Ok(Box::new(AnsweredLane {
                    dial: *dial,
                    proof,
                    keys,
                }))),
                Err(error) => self.failed(error, now, deadline),
            },
            waits_or_ended => waits_or_ended,
        };
    }

    fn failed(&mut self, error: NetworkError, now: Instant, deadline: Instant) -> State {
        match error {
            NetworkError::Socket(SocketError::ConnectTimedOut { .. })
            | NetworkError::TimedOut { .. }
                if self.shared =>
            {
                tracing::warn!(
                    peer = %self.way.peer, interface = self.way.interface,
                    "nothing comes back through this card unless others may bring it, so all lanes may share one: where cards have one network, set net.ipv4.conf.all.arp_ignore=1 and net.ipv4.conf.all.arp_announce=2"
                );
                (self.way.interface, self.shared) = (None, false);
                State::Begins(now)
            }
            error => match self.redials.pause(&error, deadline) {
                Some(pause) => State::Begins(now + pause),
                None => State::Ended(Err(error)),
            },
        }
    }
}
