//! One connection that has not proved itself yet.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, recv};
use tcpx_wire::handshake::{
    Established, HandshakeError, LaneAccepted, LaneRequest, LaneServer, Message, ServerHandshake,
    ServerStep,
};

use super::admission::{Candidate, Seen, Source};
use crate::dial::Stream;
use crate::hello::{PEEK_BYTES, receive_message, send_message};

/// Longest round trip for which one that has said what a client says is spared.
const SPARED: Duration = Duration::from_secs(1);

/// Bytes that a refused peer may still send before we close without waiting for it.
const FAREWELL_BYTES: usize = 64 * 1024;

/// A connection that has not proved itself yet.
#[derive(Debug)]
pub struct Greeting<S> {
    /// The connection.
    pub stream: S,
    /// Who it is.
    pub peer: SocketAddr,
    pub(super) came: Instant,
    /// When it said what a client or a lane says.
    spoke: Option<Instant>,
    state: State,
}

#[derive(Debug)]
enum State {
    Hello(Box<ServerHandshake>),
    Lane(Box<LaneServer>),
    /// Refused: waits for the peer to close, so that our answer is not lost to a reset.
    Draining {
        left: usize,
    },
}

/// What a connection came to when it became readable.
#[derive(Debug)]
pub(super) enum Progress {
    /// Wait for more.
    Waiting,
    /// A client proved itself; welcome it once its session is registered.
    Client(Box<Established>),
    /// It wants to be a lane: look its session up and call [`Greeting::answer`] or
    /// [`Greeting::refuse`].
    LaneRequest(Box<LaneRequest>),
    /// A lane proved itself.
    Lane(Box<LaneAccepted>),
    /// It got an answer and must go, for this reason.
    Refused(String),
    /// It must go without an answer, for this reason.
    Failed(String),
    /// It has gone without a word.
    Silent(String),
    /// It has gone: it had been refused before, or is a lane that its client, which knows the
    /// session's secret, does not want after all.
    Gone,
}

impl<S: Stream> Greeting<S> {
    pub(super) fn new(
        stream: S,
        peer: SocketAddr,
        now: Instant,
        handshake: ServerHandshake,
    ) -> Self {
        Self {
            stream,
            peer,
            came: now,
            spoke: None,
            state: State::Hello(Box::new(handshake)),
        }
    }

    /// What counts of it where one must give way.
    pub(super) fn candidate(&self, now: Instant) -> Candidate {
        let is_spared = |spoke: Instant| now.saturating_duration_since(spoke) < SPARED;
        Candidate {
            source: Source::of(self.peer.ip()),
            has_spoken: self.spoke.is_some_and(is_spared),
        }
    }

    pub(super) fn is_farewell(&self) -> bool {
        matches!(self.state, State::Draining { .. })
    }

    /// Why the connection goes when its time is over.
    pub(super) fn overdue(&self, waited: Duration) -> String {
        let missing = match &self.state {
            State::Hello(handshake) => handshake.closed(),
            State::Lane(lane) => lane.closed(),
            State::Draining { .. } => return "refused before".to_owned(),
        };
        let waited = waited.as_secs();
        match missing {
            HandshakeError::Truncated {
                message,
                expected,
                arrived,
            } => {
                format!("{arrived} of the {expected} bytes of its {message} came within {waited} s")
            }
            HandshakeError::LeftAtProof => format!("no client proof came within {waited} s"),
            other => format!("silent for {waited} s: {other}"),
        }
    }

    /// Takes what has arrived.
    pub(super) fn advance(&mut self, now: Instant, seen: &mut Seen) -> Progress {
        match self.try_advance(now, seen) {
            Ok(progress) => progress,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Progress::Waiting,
            Err(_) if !matches!(self.state, State::Hello(_)) => Progress::Gone,
            Err(error) => Progress::Failed(error.to_string()),
        }
    }

    fn try_advance(&mut self, now: Instant, seen: &mut Seen) -> io::Result<Progress> {
        let stream = self.stream.borrow();
        match &mut self.state {
            State::Hello(handshake) => {
                let mut is_fresh = |mark: &[u8; 16]| seen.is_fresh(mark);
                let step = receive_message(stream, |input| {
                    handshake.receive_fresh(input, &mut is_fresh)
                })?;
                let Some(step) = step else {
                    let closed = handshake.closed();
                    let is_silent = matches!(closed, HandshakeError::Truncated { arrived: 0, .. });
                    return Ok(match is_silent {
                        true => Progress::Silent(closed.to_string()),
                        false => Progress::Failed(closed.to_string()),
                    });
                };
                match step {
                    Ok(ServerStep::NeedMore) => Ok(Progress::Waiting),
                    Ok(ServerStep::Send(message)) => {
                        self.spoke = Some(now);
                        send_message(stream, &message)?;
                        Ok(Progress::Waiting)
                    }
                    Ok(ServerStep::Done(established)) => Ok(Progress::Client(established)),
                    Ok(ServerStep::Lane(request)) => Ok(Progress::LaneRequest(Box::new(request))),
                    Ok(ServerStep::Refuse { send, error }) => Ok(match self.refuse(&send) {
                        Ok(()) => Progress::Refused(error.to_string()),
                        // It has gone by now, and counts all the same.
                        Err(_) => Progress::Failed(error.to_string()),
                    }),
                    Err(error) => Ok(Progress::Failed(error.to_string())),
                }
            }
            State::Lane(lane) => {
                let step = receive_message(stream, |input| lane.receive(input))?;
                let Some(step) = step else {
                    return Ok(Progress::Gone);
                };
                match step {
                    Ok(Some(accepted)) => Ok(Progress::Lane(Box::new(accepted))),
                    Ok(None) => Ok(Progress::Waiting),
                    Err(error) => Ok(Progress::Failed(error.to_string())),
                }
            }
            State::Draining { left } => {
                let mut bytes = [0; PEEK_BYTES];
                let (_, arrived) = recv(stream, &mut bytes, RecvFlags::DONTWAIT)?;
                *left = left.saturating_sub(arrived);
                Ok(if arrived == 0 || *left == 0 {
                    Progress::Gone
                } else {
                    Progress::Waiting
                })
            }
        }
    }

    /// Goes on as a lane of a known session.
    ///
    /// # Errors
    /// It has gone.
    pub fn answer(&mut self, lane: LaneServer, message: &Message, now: Instant) -> io::Result<()> {
        self.state = State::Lane(Box::new(lane));
        self.spoke = Some(now);
        send_message(self.stream.borrow(), message)
    }

    /// Answers and waits for the peer to go.
    ///
    /// # Errors
    /// It has gone.
    pub fn refuse(&mut self, message: &Message) -> io::Result<()> {
        self.state = State::Draining {
            left: FAREWELL_BYTES,
        };
        self.spoke = None;
        let stream = self.stream.borrow();
        send_message(stream, message)?;
        stream.shutdown(Shutdown::Write)
    }
}
