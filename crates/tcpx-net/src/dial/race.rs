//! Several ways to one peer, tried side by side: the first that the peer answers is taken.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, poll};
use tcpx_lanes::socket;

use crate::auth::{Client, ClientSide};
use crate::error::NetworkError;

/// A way that has not been opened by then does not keep the next one waiting.
const HEAD_START: Duration = Duration::from_millis(100);

/// Opens `ways` in their order, each a little after the one before, or once all before it have failed. The first that
/// the peer answers proves itself: the peer takes that one, and never had the others.
///
/// # Errors
/// Those of all ways, as they came.
pub(super) fn race<W, S: ClientSide>(
    ways: impl IntoIterator<Item = W, IntoIter: ExactSizeIterator>,
    mut begin: impl FnMut(W) -> Result<Client<S>, NetworkError>,
) -> Result<(Client<S>, S::Outcome), Vec<NetworkError>> {
    let mut ways = ways.into_iter();
    let mut dials: Vec<Client<S>> = Vec::new();
    let mut failed = Vec::new();
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if (dials.is_empty() || now >= next)
            && let Some(way) = ways.next()
        {
            next = now + HEAD_START;
            match begin(way) {
                Ok(dial) => dials.push(dial),
                Err(error) => failed.push(error),
            }
            continue;
        }
        let due = dials.iter().map(|dial| dial.deadline).min();
        let Some(due) = due else {
            return Err(failed);
        };
        let due = if ways.len() > 0 { due.min(next) } else { due };
        let mut watched: Vec<PollFd<'_>> = dials.iter().map(Client::watched).collect();
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
            let proven = answered.and_then(|(proof, outcome)| dial.send(&proof).map(|()| outcome));
            match proven {
                Ok(outcome) => return Ok((dial, outcome)),
                Err(error) => failed.push(error),
            }
        }
    }
}
