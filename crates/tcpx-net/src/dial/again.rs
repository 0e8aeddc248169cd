//! Another control connection for a session, over whichever way works.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use tcpx_lanes::congestion::Congestion;
use tcpx_wire::handshake::{LaneClient, Session};
use tcpx_wire::record::Records;

use super::{DialOptions, LaneDial, begin, race};
use crate::channel::Way;
use crate::error::NetworkError;

/// For one way: longer than any path takes that is worth it.
const ATTEMPT: Duration = Duration::from_secs(1);

/// A connection that takes the place of a session's control connection, and its own keys.
#[derive(Debug)]
pub struct ControlStream {
    /// The stream: non-blocking, `TCP_NODELAY`. What the peer sends next is still in it.
    pub stream: TcpStream,
    /// Seals and opens what follows in the stream.
    pub records: Records,
}

/// Opens a connection that takes the place of a session's control connection over one of `ways`, which are
/// tried in their order, each a little after the one before. Takes at most a second and a tenth of one for each way.
///
/// # Errors
/// That of the way that failed last, as of [`dial_lane`](super::dial_lane); without ways
/// [`NetworkError::Control`].
pub fn dial_control_again(
    ways: &[Way],
    session: &Session,
    congestion: &Congestion,
) -> Result<ControlStream, NetworkError> {
    let opened = race(ways, |way| begin_over(way, session, congestion));
    let (dial, keys) = opened.map_err(|mut errors| {
        for error in &errors {
            tracing::debug!(%error, "no control connection this way");
        }
        errors.pop().unwrap_or_else(|| NetworkError::Control {
            reason: "there is no way to open another one over".to_owned(),
        })
    })?;
    let (stream, records) = (dial.stream, Records::new(keys));
    Ok(ControlStream { stream, records })
}

fn begin_over(
    way: &Way,
    session: &Session,
    congestion: &Congestion,
) -> Result<LaneDial, NetworkError> {
    let options = DialOptions {
        deadline: Instant::now() + ATTEMPT,
        interface: way.interface.clone(),
        source: way.local,
        congestion: congestion.clone(),
    };
    begin(way.peer, &options, |entropy| {
        Ok(LaneClient::resume(session, entropy))
    })
}
