//! Connecting to a listener: the control connection and its lanes.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::dial::{Dial, HEAD_START, Opened, Patience};
use tcpx_lanes::redial::ATTEMPT;
use tcpx_lanes::{SocketError, protocols, socket};
use tcpx_wire::handshake::{ClientHandshake, LaneClient, Session};
use tcpx_wire::lane_seal::LaneKeys;
use tcpx_wire::record::Records;

use crate::auth::Auth;
use crate::channel::Way;
use crate::error::NetworkError;

pub use tcpx_lanes::socket::DialOptions;

/// A control connection whose server has proved itself, and this side's proof is on its way. What
/// the peer sends next is still in the stream: its first record is the welcome, which
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
/// [`NetworkError::Socket`]: refused, unreachable and unanswered connections, peers that are not
/// tcpx, and keys or versions that do not fit.
pub fn dial(
    address: SocketAddr,
    auth: &Auth,
    options: &DialOptions,
) -> Result<Dialled, NetworkError> {
    dial_first(&[address], auth, options)
}

/// The same, at whichever of a peer's addresses answers first: they are tried in their order, each
/// a little after the one before (RFC 8305).
///
/// # Errors
/// As [`dial`]: that of a peer which answered otherwise than expected, if one did; where all of
/// several are silent [`NetworkError::NoAddress`].
pub fn dial_first(
    addresses: &[SocketAddr],
    auth: &Auth,
    options: &DialOptions,
) -> Result<Dialled, NetworkError> {
    let key = auth.client_key();
    let ways = addresses.iter().copied().map(Way::to).collect();
    let dial = Dial::new(ways, options.clone(), Patience::default(), move |entropy| {
        let build = protocols::own_build();
        Ok(ClientHandshake::new(key.as_ref(), build, entropy))
    });
    let opened = dial.run().map_err(|mut errors| {
        if errors.len() < 2 || !errors.iter().all(SocketError::is_silence) {
            return most_telling(errors);
        }
        // A host that refuses says more than one that does not answer.
        errors.sort_by_key(SocketError::is_answer);
        NetworkError::NoAddress { errors }
    })?;
    let (stream, way, established) = opened.join()?;
    tracing::info!(
        peer = %way.peer,
        congestion_control = socket::congestion_control(&stream),
        "connected"
    );
    Ok(Dialled {
        peer: way.peer,
        stream,
        session: established.session,
        records: established.records,
    })
}

/// The error that says most of why no way to a peer led anywhere.
pub(crate) fn most_telling(mut errors: Vec<SocketError>) -> NetworkError {
    let telling = match errors.iter().position(|error| !error.is_silence()) {
        Some(at) => Some(errors.remove(at)),
        None => errors.pop(),
    };
    for error in errors {
        tracing::warn!(%error, "no connection at this address");
    }
    let nowhere = || NetworkError::Control {
        reason: "there is no way to connect over".to_owned(),
    };
    telling.map_or_else(nowhere, NetworkError::Socket)
}

/// A lane that has joined its session.
#[derive(Debug)]
pub struct JoinedLane {
    /// The stream: non-blocking, `TCP_NODELAY`.
    pub stream: TcpStream,
    /// The secrets that both its ends hold, and nobody else.
    pub keys: LaneKeys,
}

/// A connection of a session on its way to the listener's answer: a lane, or one that takes the
/// place of the control connection.
pub type LaneDial = Dial<LaneClient>;

/// What it leads to: a stream that has joined the session, the way it takes, and its keys.
pub type LaneLink = (TcpStream, Way, LaneKeys);

/// Begins to open lane `lane` of `lanes` of a session over one of these ways.
pub(crate) fn begin_lane(
    ways: Vec<Way>,
    session: &Session,
    (lane, lanes): (u16, u16),
    options: DialOptions,
    patience: Patience,
) -> LaneDial {
    let session = session.clone();
    Dial::new(ways, options, patience, move |entropy| {
        LaneClient::new(&session, lane, lanes, entropy)
    })
}

/// Has a lane that the listener has answered join its session; says which way it takes.
///
/// # Errors
/// The connection failed meanwhile.
pub(crate) fn join_lane(opened: Opened<LaneClient>) -> Result<(JoinedLane, Way), NetworkError> {
    let link = opened.join()?;
    let way = link.1.clone();
    Ok((prepared(link)?, way))
}

/// A stream that has joined its session, with the options of a lane.
///
/// # Errors
/// The system does not set them.
pub(crate) fn prepared((stream, _, keys): LaneLink) -> Result<JoinedLane, NetworkError> {
    socket::prepare_lane(&stream).map_err(|cause| NetworkError::Control {
        reason: cause.to_string(),
    })?;
    Ok(JoinedLane { stream, keys })
}

/// Opens lane `lane` of `lanes` of a session.
///
/// # Errors
/// As [`dial`]; a listener that no longer knows the session refuses.
pub fn dial_lane(
    way: Way,
    session: &Session,
    lane: u16,
    lanes: u16,
    options: &DialOptions,
) -> Result<JoinedLane, NetworkError> {
    let options = options.clone();
    let dial = begin_lane(
        vec![way],
        session,
        (lane, lanes),
        options,
        Patience::default(),
    );
    Ok(join_lane(dial.run().map_err(most_telling)?)?.0)
}

/// A connection that takes the place of a session's control connection, and its own keys.
#[derive(Debug)]
pub struct ControlStream {
    /// The stream: non-blocking, `TCP_NODELAY`. What the peer sends next is still in it.
    pub stream: TcpStream,
    /// Seals and opens what follows in the stream.
    pub records: Records,
}

impl From<LaneLink> for ControlStream {
    fn from((stream, _, keys): LaneLink) -> Self {
        let records = Records::new(keys);
        Self { stream, records }
    }
}

/// Begins to open a connection that takes the place of a session's control connection over one of
/// `ways`, which are tried in their order, each a little after the one before. It takes at most two
/// seconds and a tenth of one for each way.
pub fn begin_control(
    ways: Vec<Way>,
    session: &Session,
    congestion: &Congestion,
    now: Instant,
) -> LaneDial {
    let session = session.clone();
    let options = DialOptions {
        deadline: now + ATTEMPT + HEAD_START * ways.len() as u32,
        congestion: congestion.clone(),
    };
    // Whoever wants it knows whether the session still lives, and tries again.
    let patience = Patience {
        hung_up: Duration::ZERO,
        ..Patience::default()
    };
    Dial::new(ways, options, patience, move |entropy| {
        Ok(LaneClient::resume(&session, entropy))
    })
}
