//! Another control connection for a session, over whichever way works.

use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::socket;
use tcpx_wire::handshake::{LaneClient, Session};
use tcpx_wire::record::Records;

use super::{DialOptions, no_random};
use crate::auth::{self, Client};
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

/// One round over all ways.
struct Round {
    session: Session,
    congestion: Congestion,
    /// Whether it is over. Held by the way that proves itself: the server is to take one connection, and not two.
    over: Mutex<bool>,
    answers: Sender<Result<ControlStream, NetworkError>>,
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
    let (answers, heard) = channel();
    let round = Arc::new(Round {
        session: session.clone(),
        congestion: congestion.clone(),
        over: Mutex::new(false),
        answers,
    });
    let mut last = NetworkError::Control {
        reason: "there is no way to open another one over".to_owned(),
    };
    let mut open = 0;
    for way in ways {
        let (round, tried) = (Arc::clone(&round), way.clone());
        let started = std::thread::Builder::new()
            .name("tcpx-resume".to_owned())
            .spawn(move || round.try_way(&tried));
        match started {
            Ok(_) => open += 1,
            Err(cause) => {
                last = NetworkError::Io {
                    operation: "starting a thread",
                    address: way.peer.to_string(),
                    cause: cause.into(),
                    hint: "; raise the limit on threads",
                }
            }
        }
        let now = Instant::now();
        if let Some(stream) = wait(&heard, &mut open, now + HEAD_START, &mut last) {
            return Ok(stream);
        }
    }
    let until = Instant::now() + 2 * ATTEMPT;
    match wait(&heard, &mut open, until, &mut last) {
        Some(stream) => Ok(stream),
        None => {
            // Whoever comes now finds nobody who wants it.
            *round.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
            heard.try_iter().find_map(Result::ok).ok_or(last)
        }
    }
}

/// The stream of a way that works, if one comes in time; of `open` ways those that fail leave their error.
fn wait(
    heard: &Receiver<Result<ControlStream, NetworkError>>,
    open: &mut usize,
    until: Instant,
    last: &mut NetworkError,
) -> Option<ControlStream> {
    while *open > 0 {
        match heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => {
                *open -= 1;
                *last = error;
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
        }
    }
    None
}

impl Round {
    fn try_way(&self, way: &Way) {
        if let Err(error) = self.open(way) {
            tracing::debug!(peer = %way.peer, interface = way.interface, %error, "no control connection this way");
            // Whoever asked may have an answer already.
            drop(self.answers.send(Err(error)));
        }
    }

    fn open(&self, way: &Way) -> Result<(), NetworkError> {
        let options = DialOptions {
            deadline: Instant::now() + ATTEMPT,
            interface: way.interface.clone(),
            source: way.local,
            capabilities: 0,
            congestion: self.congestion.clone(),
        };
        let stream = socket::connect(way.peer, &options)?;
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        if *over {
            return Err(NetworkError::Control {
                reason: "another way was faster".to_owned(),
            });
        }
        let entropy = auth::entropy().map_err(|cause| no_random(way.peer, cause))?;
        let side = LaneClient::resume(&self.session, entropy);
        let dial = Client::new(stream, way.peer, side, options.deadline);
        let (dial, proof, keys) = dial.run()?;
        dial.send(&proof)?;
        let (stream, records) = (dial.stream, Records::new(keys));
        *over = true;
        // Before the lock is let go of: whoever ends the round takes it then, and finds this.
        drop(self.answers.send(Ok(ControlStream { stream, records })));
        Ok(())
    }
}
