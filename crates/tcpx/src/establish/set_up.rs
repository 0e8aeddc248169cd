//! A control connection before it has a driver: the caller's thread pumps it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use tcpx_net::{Exchange, Meanwhile, NetworkError, SocketError};
use tcpx_wire::session::{Action, Config, ConnectionFailure, Output, Takes};
use tcpx_wire::{Frame, Session, Time};

use crate::control::Control;
use crate::core::Clock;
use crate::driver::timespec;
use crate::error::Error;
use crate::options::Bounds;

/// How long a side that gives up waits for the peer to have heard why, and how long when its own
/// time is over.
const FAREWELL: (Duration, Duration) = (Duration::from_millis(500), Duration::from_millis(50));
/// How long a side whose lanes or connects failed listens for the peer's reason, which may be the
/// cause and has to come from a host that may be busy or far away.
const REASON: Duration = Duration::from_secs(1);

pub(crate) struct SetUp<'a> {
    pub(crate) session: Session,
    pub(crate) control: Control,
    pub(crate) peer: SocketAddr,
    pub(crate) clock: Clock,
    pub(super) deadline: Instant,
    pub(crate) bounds: Bounds,
    /// Actions that came before their time.
    pub(crate) pending: VecDeque<Action>,
    /// Called before the peer may hear that this side is ready.
    tells: &'a mut dyn FnMut(),
}

impl<'a> SetUp<'a> {
    pub(crate) fn new(
        control: Control,
        config: Config,
        bounds: Bounds,
        peer: SocketAddr,
        deadline: Instant,
        tells: &'a mut dyn FnMut(),
    ) -> Result<Self, Error> {
        let session =
            Session::new(config, Time(0)).map_err(|error| Error::protocol(peer, error))?;
        Ok(Self {
            session,
            control,
            peer,
            clock: Clock::new(bounds),
            deadline,
            bounds,
            pending: VecDeque::new(),
            tells,
        })
    }

    fn now(&mut self) -> Time {
        self.clock.tick();
        self.clock.now()
    }

    /// Pumps until `pick` takes an action, and has `other` go on; `pick` gives back those that it
    /// does not want yet.
    pub(super) fn wait_for<T>(
        &mut self,
        what: &'static str,
        other: &mut dyn Meanwhile,
        pick: impl Fn(Action) -> Result<T, Action>,
    ) -> Result<T, Error> {
        let mut looked_at = 0;
        loop {
            self.transmit()?;
            other.advance();
            self.keep_actions()?;
            while looked_at < self.pending.len() {
                if let Some(action) = self.pending.remove(looked_at) {
                    match pick(action) {
                        Ok(found) => return Ok(found),
                        Err(other) => self.pending.insert(looked_at, other),
                    }
                }
                looked_at += 1;
            }
            if Instant::now() >= self.deadline {
                return Err(NetworkError::TimedOut {
                    peer: self.peer,
                    operation: what,
                }
                .into());
            }
            if !self.take_frames()? {
                self.sleep(other.awaits(), self.deadline);
                self.take_frames()?;
            }
            self.keep_time();
        }
    }

    /// Keeps what the session wants done for its time, unless it has ended.
    fn keep_actions(&mut self) -> Result<(), Error> {
        while let Some(Output::Action(action)) = self.session.poll(Takes::Actions) {
            let Action::Closed { failure } = action else {
                self.pending.push_back(action);
                continue;
            };
            return Err(match failure {
                Some(ConnectionFailure::PeerFailed { detail }) => NetworkError::GivenUp {
                    peer: self.peer,
                    reason: detail.chars().filter(|one| !one.is_control()).collect(),
                }
                .into(),
                Some(failure) => Error::lost(self.peer, failure),
                None => Error::Closed { peer: self.peer },
            });
        }
        if self.pending.len() > self.bounds.pending + self.bounds.ahead {
            return Err(NetworkError::Control {
                reason: "the peer sent too many set-up messages ahead of their turn".to_owned(),
            }
            .into());
        }
        Ok(())
    }

    fn transmit(&mut self) -> Result<(), Error> {
        let now = self.now();
        while self.control.has_room()
            && let Some(output) = self.session.poll(Takes::Frames(now))
        {
            match output {
                Output::Action(action) => self.pending.push_back(action),
                Output::Frame(frame) => {
                    let queued = self.control.queue(frame);
                    queued.map_err(|end| Error::control(self.peer, end))?;
                }
            }
        }
        self.control.flush();
        Ok(())
    }

    fn keep_time(&mut self) {
        let now = self.now();
        if self.session.next_timeout().is_some_and(|due| due <= now) {
            self.session.handle_timeout(now);
        }
    }

    /// Waits until bytes arrive, one of the others is ready or something is due.
    fn sleep<'b>(&'b self, mut watched: Vec<PollFd<'b>>, until: Instant) {
        let due = self
            .session
            .next_timeout()
            .map_or(until, |due| self.clock.instant_of(due));
        let sleep = until.min(due).saturating_duration_since(Instant::now());
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, watched.is_empty() || self.has_room());
        flags.set(PollFlags::OUT, self.control.wants_write());
        let control = self.control.as_fd();
        // Its end would be reported whatever is asked for.
        if !flags.is_empty() {
            watched.push(PollFd::from_borrowed_fd(control, flags));
        }
        // Interrupted or timed out: the loop looks at everything again.
        let _ = poll(&mut watched, Some(&timespec(sleep)));
    }

    /// Feeds frames that have arrived to the session, a few at a time, so that a peer that never
    /// stops sending outlasts neither the deadline nor the memory; `true` if there were any.
    fn take_frames(&mut self) -> Result<bool, Error> {
        for taken in 0..self.bounds.frames {
            let frame = match self.control.receive() {
                Ok(Some(Frame::Received { .. })) => continue,
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(taken > 0),
                Err(end) => {
                    // What came before the end of the stream may say why it ended.
                    self.keep_actions()?;
                    return Err(Error::control(self.peer, end));
                }
            };
            let now = self.now();
            self.session
                .frame(now, frame)
                .map_err(|error| Error::protocol(self.peer, error))?;
        }
        Ok(true)
    }

    /// Whether more may come before its time. A peer that is ready says what it likes while this
    /// side still waits for lanes; what is too much stays in the socket meanwhile.
    fn has_room(&self) -> bool {
        self.pending.len() < self.bounds.pending
    }

    /// Takes and says what there is, without waiting; `true` if it has taken something, and more
    /// may be there.
    fn take_arrivals(&mut self) -> Result<bool, Error> {
        let has_heard = self.has_room() && self.take_frames()?;
        self.keep_actions()?;
        self.keep_time();
        self.transmit()?;
        Ok(has_heard)
    }

    /// The set-up ends with an error, or with that of the peer if it gave up first; else the peer
    /// is told why.
    pub(super) fn give_up(mut self, error: Error) -> Error {
        let theirs = match self.session.ended() {
            true => None,
            false => self.reason_of_peer(&error),
        };
        let error = theirs.unwrap_or(error);
        let now = self.now();
        let cause = error.to_string();
        // A session that has ended says what it had to say, and not this.
        self.session.fail(now, ConnectionFailure::SetUp { cause });
        if self.transmit().is_ok() {
            self.part();
        }
        error
    }

    /// Why the peer gave up. Lanes fail when it did, and its word about that may still be under
    /// way.
    fn reason_of_peer(&mut self, error: &Error) -> Option<Error> {
        let wait = match error {
            Error::Network(
                NetworkError::Socket(
                    SocketError::Handshake { .. }
                    | SocketError::CutOff { .. }
                    | SocketError::Io { .. }
                    | SocketError::Refused { .. },
                )
                | NetworkError::Plugin {
                    call: "connect", ..
                },
            ) => REASON,
            // What else this side's plugin says is no consequence of what the peer did, whose
            // connect may have failed of it meanwhile.
            Error::Network(NetworkError::Plugin { .. }) => return None,
            _ => Duration::ZERO,
        };
        let until = self.deadline.min(Instant::now() + wait);
        self.pending.clear();
        loop {
            match self.take_arrivals() {
                Err(theirs @ Error::Network(NetworkError::GivenUp { .. })) => return Some(theirs),
                Err(_) => return None,
                Ok(_) if Instant::now() >= until => return None,
                // Nobody takes the rest any more, which would be in the way.
                Ok(true) => self.pending.clear(),
                Ok(false) => self.sleep(Vec::new(), until),
            }
        }
    }

    /// Waits for the peer to close its end: closing before would destroy what it has not read yet.
    fn part(&mut self) {
        let now = Instant::now();
        let until = (now + FAREWELL.0).min(self.deadline.max(now + FAREWELL.1));
        loop {
            self.control.flush();
            if !self.control.wants_write() {
                self.control.finish_writing();
            }
            if self.control.drain() || Instant::now() >= until {
                return;
            }
            // A session that has ended and had no operation has nothing due before that.
            self.sleep(Vec::new(), until);
        }
    }
}

/// As a network hears it.
fn for_network(error: Error) -> NetworkError {
    match error {
        Error::Network(error) => error,
        other => NetworkError::Control {
            reason: other.to_string(),
        },
    }
}

impl Exchange for SetUp<'_> {
    fn exchange(
        &mut self,
        payload: &[u8],
        other: &mut dyn Meanwhile,
    ) -> Result<Vec<u8>, NetworkError> {
        self.session
            .setup(payload.to_vec())
            .map_err(|error| NetworkError::Control {
                reason: error.to_string(),
            })?;
        self.wait_for(
            "the peer's part of the network set-up",
            other,
            |action| match action {
                Action::Setup(payload) => Ok(payload),
                other => Err(other),
            },
        )
        .map_err(for_network)
    }

    fn ready(&mut self) {
        (self.tells)();
        self.session.ready();
    }

    fn wait(
        &mut self,
        descriptors: Vec<PollFd<'_>>,
        deadline: Instant,
    ) -> Result<(), NetworkError> {
        if !self.take_arrivals().map_err(for_network)? {
            self.sleep(descriptors, deadline);
        }
        self.take_arrivals().map_err(for_network).map(drop)
    }
}
