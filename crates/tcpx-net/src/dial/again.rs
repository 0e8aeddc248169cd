//! Another control connection for a session, over whichever way works.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, poll};
use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::socket;
use tcpx_wire::handshake::{LaneClient, Session};
use tcpx_wire::record::Records;

use super::{DialOptions, LaneDial, begin};
use crate::channel::Way;
use crate::error::NetworkError;

/// For one way: longer than any path takes that is worth it.
const ATTEMPT: Duration = Duration::from_secs(1);
/// A way that has not been opened by then does not keep the next one waiting.
const HEAD_START: Duration = Duration::from_millis(100);

/// A connection that takes the place of a session's control connection, and its own keys.
#[derive(Debug)]
pub struct ControlStream {
    /// The stream: non-blocking, `TCP_NODELAY`. What the peer sends next is still in it.
    pub stream: TcpStream,
    /// Seals and opens what follows in the stream.
    pub records: Records,
}

/// Opens a connection that takes the place of a session's control connection over one of `ways`, which are
/// tried in their order, each a little after the one before. The first that the server answers proves itself: the server
/// takes that one, and never had the others. Takes at most a second and a tenth of one for each way.
///
/// # Errors
/// That of the way that failed last, as of [`dial_lane`](super::dial_lane); without ways
/// [`NetworkError::Control`].
pub fn dial_control_again(
    ways: &[Way],
    session: &Session,
    congestion: &Congestion,
) -> Result<ControlStream, NetworkError> {
    let mut last = NetworkError::Control {
        reason: "there is no way to open another one over".to_owned(),
    };
    let mut ways = ways.iter();
    let mut dials: Vec<LaneDial> = Vec::new();
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if (dials.is_empty() || now >= next)
            && let Some(way) = ways.next()
        {
            next = now + HEAD_START;
            match begin_over(way, session, congestion) {
                Ok(dial) => dials.push(dial),
                Err(error) => last = failed(error),
            }
            continue;
        }
        let due = dials.iter().map(|dial| dial.deadline).min();
        let Some(due) = due else {
            return Err(last);
        };
        let due = if ways.len() > 0 { due.min(next) } else { due };
        let mut watched: Vec<PollFd<'_>> = dials.iter().map(LaneDial::watched).collect();
        let left = socket::timespec(due.saturating_duration_since(now));
        // A signal is as if nothing had come.
        let _ = poll(&mut watched, Some(&left));
        let ready: Vec<bool> = watched
            .iter()
            .map(|one| !one.revents().is_empty())
            .collect();
        for (nth, is_ready) in ready.into_iter().enumerate().rev() {
            let answered = match dials[nth].advance_if(is_ready) {
                Ok(None) => continue,
                Ok(Some(answered)) => Ok(answered),
                Err(error) => Err(error),
            };
            let dial = dials.swap_remove(nth);
            let proven = answered.and_then(|(proof, keys)| dial.send(&proof).map(|()| keys));
            match proven {
                Ok(keys) => {
                    let (stream, records) = (dial.stream, Records::new(keys));
                    return Ok(ControlStream { stream, records });
                }
                Err(error) => last = failed(error),
            }
        }
    }
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

fn failed(error: NetworkError) -> NetworkError {
    tracing::debug!(%error, "no control connection this way");
    error
}
