//! One connection that has not proved itself yet.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, recv};
use tcpx_wire::handshake::{
    Established, HandshakeError, LaneAccepted, LaneRequest, LaneServer, Message, ServerHandshake,
    ServerStep,
};

use crate::auth::{self, PEEK_BYTES};

/// A connection must have proved itself this long after it was accepted.
pub(super) const DEADLINE: Duration = Duration::from_secs(3);

/// Bytes that a refused peer may still send before we close without waiting for it.
const FAREWELL_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(super) struct Greeting {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) deadline: Instant,
    state: State,
}

#[derive(Debug)]
enum State {
    Hello(Box<ServerHandshake>),
    Lane(Box<LaneServer>),
    /// Refused: waits for the peer to close, so that our answer is not lost to a reset.
    Farewell {
        left: usize,
    },
}

/// What a connection came to when it became readable.
#[derive(Debug)]
pub(super) enum Progress {
    /// Wait for more.
    Waiting,
    /// A client proved itself; welcome it once its session is registered.
    Control(Box<Established>),
    /// It wants to be a lane: look its session up and call [`Greeting::answer`] or
    /// [`Greeting::refuse`].
    LaneRequest(Box<LaneRequest>),
    /// A lane proved itself.
    Lane(Box<LaneAccepted>),
    /// It got an answer and must go, for this reason.
    Refused(String),
    /// It must go without an answer, for this reason.
    Failed(String),
    /// It has gone: it had been refused before, or is a lane that its client, which knows the session's secret, does not
    /// want after all.
    Gone,
}

impl Greeting {
    pub(super) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        now: Instant,
        handshake: ServerHandshake,
    ) -> Self {
        let state = State::Hello(Box::new(handshake));
        Self {
            stream,
            peer,
            deadline: now + DEADLINE,
            state,
        }
    }

    /// Whether it has said what a client or a lane says, and was not refused.
    pub(super) fn has_spoken(&self) -> bool {
        match &self.state {
            State::Hello(handshake) => handshake.has_hello(),
            State::Lane(_) => true,
            State::Farewell { .. } => false,
        }
    }

    pub(super) fn is_farewell(&self) -> bool {
        matches!(self.state, State::Farewell { .. })
    }

    /// Why the connection goes when its time is over.
    pub(super) fn overdue(&self) -> String {
        let missing = match &self.state {
            State::Hello(handshake) => handshake.closed(),
            State::Lane(lane) => lane.closed(),
            State::Farewell { .. } => return "refused before".to_owned(),
        };
        let waited = DEADLINE.as_secs();
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
    pub(super) fn advance(&mut self) -> Progress {
        match self.try_advance() {
            Ok(progress) => progress,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Progress::Waiting,
            Err(_) if !matches!(self.state, State::Hello(_)) => Progress::Gone,
            Err(error) => Progress::Failed(error.to_string()),
        }
    }

    fn try_advance(&mut self) -> io::Result<Progress> {
        let stream = &self.stream;
        match &mut self.state {
            State::Hello(handshake) => {
                let step = auth::receive_message(stream, |input| handshake.receive(input))?;
                let Some(step) = step else {
                    return Ok(Progress::Failed(handshake.closed().to_string()));
                };
                match step {
                    Ok(ServerStep::NeedMore) => Ok(Progress::Waiting),
                    Ok(ServerStep::Send(message)) => {
                        auth::send_message(stream, &message)?;
                        Ok(Progress::Waiting)
                    }
                    Ok(ServerStep::Done(established)) => Ok(Progress::Control(established)),
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
                let step = auth::receive_message(stream, |input| lane.receive(input))?;
                let Some(step) = step else {
                    return Ok(Progress::Gone);
                };
                match step {
                    Ok(Some(accepted)) => Ok(Progress::Lane(Box::new(accepted))),
                    Ok(None) => Ok(Progress::Waiting),
                    Err(error) => Ok(Progress::Failed(error.to_string())),
                }
            }
            State::Farewell { left } => {
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
    pub(super) fn answer(&mut self, lane: LaneServer, message: &Message) -> io::Result<()> {
        self.state = State::Lane(Box::new(lane));
        auth::send_message(&self.stream, message)
    }

    /// Answers and waits for the peer to go.
    pub(super) fn refuse(&mut self, message: &Message) -> io::Result<()> {
        self.state = State::Farewell {
            left: FAREWELL_BYTES,
        };
        auth::send_message(&self.stream, message)?;
        self.stream.shutdown(Shutdown::Write)
    }
}
