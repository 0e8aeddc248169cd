//! Connecting to a listener: the control connection and its lanes.

mod again;
mod race;

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tcpx_lanes::{protocols, socket};
use tcpx_wire::handshake::{ClientHandshake, HandshakeError, LaneClient, Message, Session};
use tcpx_wire::lane_seal::LaneKeys;
use tcpx_wire::record::Records;

use crate::auth::{self, Auth, Client, ClientSide};
use crate::error::{NetworkError, SocketError};

pub use again::{ControlStream, dial_control_again};
use race::race;
pub use tcpx_lanes::socket::DialOptions;

/// Times that a connection is dialled again which the peer closed without an answer, and pauses before.
const REDIALS: u32 = 20;
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A control connection whose server has proved itself, and this side's proof is on its way. What the peer sends next is
/// still in the stream: its first record is the welcome, which
/// [`Established::read_welcome`](tcpx_wire::handshake::Established::read_welcome) reads.
#[derive(Debug)]
pub struct Dialled {
    /// The address that it came about at.
    pub peer: SocketAddr,
    /// The stream: non-blocking, `TCP_NODELAY`.
    pub stream: TcpStream,
    /// The session that both sides now hold.
    pub session: Session,
    /// Seals and opens what follows in the stream.
    pub records: Records,
}

/// Opens a control connection.
///
/// # Errors
/// Refused, unreachable and unanswered connections have their own [`NetworkError`]; peers that are not tcpx, and keys
/// or versions that do not fit, are a [`NetworkError::Handshake`].
pub fn dial(
    address: SocketAddr,
    auth: &Auth,
    options: &DialOptions,
) -> Result<Dialled, NetworkError> {
    dial_first(&[address], auth, options)
}

/// The same, at whichever of a peer's addresses answers first: they are tried in their order, each a little after the one
/// before (RFC 8305).
///
/// # Errors
/// As [`dial`]: that of a peer which answered otherwise than expected, if one did, else the last; of the others a line
/// in the log.
pub fn dial_first(
    addresses: &[SocketAddr],
    auth: &Auth,
    options: &DialOptions,
) -> Result<Dialled, NetworkError> {
    let key = auth.client_key();
    with_redials(options.deadline, || {
        let opened = race(addresses, |address| {
            begin(*address, options, |entropy| {
                Ok(ClientHandshake::new(
                    key.as_ref(),
                    protocols::own_build(),
                    entropy,
                ))
            })
        });
        let (client, established) = opened.map_err(most_telling)?;
        let (peer, stream) = (client.peer, client.stream);
        tracing::info!(
            %peer,
            congestion_control = socket::congestion_control(&stream),
            "connected"
        );
        Ok(Dialled {
            peer,
            stream,
            session: established.session,
            records: established.records,
        })
    })
}

/// The error that says most of why no address of a peer answered.
fn most_telling(mut errors: Vec<NetworkError>) -> NetworkError {
    let is_answer = |error: &NetworkError| !error.is_silence();
    let telling = match errors.iter().position(is_answer) {
        Some(at) => Some(errors.remove(at)),
        None => errors.pop(),
    };
    for other in errors {
        tracing::warn!(error = %other, "no connection at this address");
    }
    telling.unwrap_or_else(|| NetworkError::Control {
        reason: "there is no address to connect to".to_owned(),
    })
}

/// Times that a connection was dialled again.
#[derive(Debug, Default)]
pub(crate) struct Redials(u32);

impl Redials {
    /// The pause before a connection is dialled again that a peer, crowded by strangers, has closed before it read from
    /// it; none where that is not what has happened, or it was too often, or it would be too late.
    pub(crate) fn pause(&mut self, error: &NetworkError, deadline: Instant) -> Option<Duration> {
        let NetworkError::CutOff { peer } = error else {
            return None;
        };
        let pause = (FIRST_PAUSE * (1 << self.0)).min(LONGEST_PAUSE);
        if self.0 == REDIALS || Instant::now() + pause >= deadline {
            return None;
        }
        self.0 += 1;
        tracing::debug!(%peer, "closed without an answer; dialling again");
        Some(pause)
    }
}

/// Dials, and again after each pause that [`Redials`] gives.
fn with_redials<T>(
    deadline: Instant,
    mut dial: impl FnMut() -> Result<T, NetworkError>,
) -> Result<T, NetworkError> {
    let mut redials = Redials::default();
    loop {
        let outcome = dial();
        let error = outcome.as_ref().err();
        match error.and_then(|error| redials.pause(error, deadline)) {
            Some(pause) => std::thread::sleep(pause),
            None => return outcome,
        }
    }
}

/// A lane that has joined its session.
#[derive(Debug)]
pub struct JoinedLane {
    /// The stream: non-blocking, `TCP_NODELAY`.
    pub stream: TcpStream,
    /// The secrets that both its ends hold, and nobody else.
    pub keys: LaneKeys,
}

/// A lane on its way to the listener's answer.
pub(crate) type LaneDial = Client<LaneClient>;

/// A lane that the listener has answered, and that has yet to join its session. Dropped, it never was one.
pub(crate) struct AnsweredLane {
    pub(crate) dial: LaneDial,
    pub(crate) proof: Message,
    pub(crate) keys: LaneKeys,
}

impl AnsweredLane {
    /// Joins the session.
    ///
    /// # Errors
    /// The connection failed meanwhile.
    pub(crate) fn join(self) -> Result<JoinedLane, NetworkError> {
        let Self { dial, proof, keys } = self;
        dial.send(&proof)?;
        socket::prepare_lane(&dial.stream).map_err(|cause| dial.io(cause))?;
        let stream = dial.stream;
        Ok(JoinedLane { stream, keys })
    }
}

/// Opens lane `lane` of `lanes` of a session.
///
/// # Errors
/// As [`dial`]; a listener that no longer knows the session refuses with
/// [`NetworkError::Handshake`].
pub fn dial_lane(
    address: SocketAddr,
    session: &Session,
    lane: u16,
    lanes: u16,
    options: &DialOptions,
) -> Result<JoinedLane, NetworkError> {
    with_redials(options.deadline, || {
        open_lane(begin_lane(address, session, lane, lanes, options)?)
    })
}

/// Opens a lane that was [begun](begin_lane).
pub(crate) fn open_lane(dial: LaneDial) -> Result<JoinedLane, NetworkError> {
    let (dial, proof, keys) = dial.run()?;
    AnsweredLane { dial, proof, keys }.join()
}

/// Begins what [`dial_lane`] does, once: whoever opens lanes knows whether their session still lives.
pub(crate) fn begin_lane(
    peer: SocketAddr,
    session: &Session,
    lane: u16,
    lanes: u16,
    options: &DialOptions,
) -> Result<LaneDial, NetworkError> {
    begin(peer, options, |entropy| {
        LaneClient::new(session, lane, lanes, entropy)
    })
}

/// Begins to connect to `peer`, with the handshake of one of its sides.
fn begin<S, const ENTROPY: usize>(
    peer: SocketAddr,
    options: &DialOptions,
    side: impl FnOnce([u8; ENTROPY]) -> Result<(S, Message), HandshakeError>,
) -> Result<Client<S>, NetworkError>
where
    S: ClientSide,
{
    let stream = socket::begin_connect(peer, options)?;
    // While it connects.
    let entropy = auth::entropy().map_err(|cause| SocketError::Io {
        operation: "reading random numbers",
        address: peer.to_string(),
        cause: cause.into(),
        hint: "; the system must offer getrandom",
    })?;
    let side = side(entropy).map_err(|error| NetworkError::Handshake { peer, error })?;
    Ok(Client::new(stream, peer, side, options.deadline))
}
