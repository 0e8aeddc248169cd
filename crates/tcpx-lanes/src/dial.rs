//! Connecting to a [door](crate::door): the client's half of a handshake, over whichever way to the
//! peer works, and again where a crowded peer hangs up.
//!
//! Whoever wants a connection polls: [`Dial::poll`] never waits. [`Dial::run`] does, for callers
//! that have nothing else to do.

mod client;

use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, poll};
use tcpx_wire::handshake::{HandshakeError, Message};

use crate::error::SocketError;
use crate::hello;
use crate::socket::{self, DialOptions};
pub use client::{Client, ClientSide, Heard, Stream, Welcomed};

/// Pauses before a peer is dialled again that has hung up.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// A peer that hangs up only after this was silent before: its process rested, or had no core.
const SILENT_TIME: Duration = Duration::from_secs(1);
/// A peer that is crowded has room again within this.
pub const CROWDED: Duration = Duration::from_secs(3);
/// A way that has not been opened by then does not keep the next one waiting.
pub const HEAD_START: Duration = Duration::from_millis(100);

/// From where to where a connection is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// The address it leaves from; `None`: as the routes say.
    pub local: Option<IpAddr>,
    /// The interface it leaves through; `None`: as the routes say. Where the system does not permit
    /// to choose one, the address alone decides.
    pub interface: Option<String>,
    /// The peer's listening address.
    pub peer: SocketAddr,
}

impl Way {
    /// As the routes say.
    pub const fn to(peer: SocketAddr) -> Self {
        Self {
            local: None,
            interface: None,
            peer,
        }
    }
}

/// How long what may help is tried.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// How long a way keeps the next one waiting: until it was answered, or, with `opens`, until
    /// its connection is open.
    pub head_start: Duration,
    /// A connection that is open and not answered keeps the other ways waiting.
    pub opens: bool,
    /// A peer may hang up on every attempt for so long.
    pub hung_up: Duration,
    /// And so long it may be unreachable.
    pub unreachable: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            head_start: HEAD_START,
            opens: false,
            hung_up: CROWDED,
            unreachable: Duration::ZERO,
        }
    }
}

/// The client's half of a fresh handshake, and its first message.
type Side<C> = Box<dyn FnMut(SocketAddr) -> Result<(C, Message), SocketError> + Send>;

/// A connection under way.
pub struct Dial<C: ClientSide, S = TcpStream> {
    ways: Vec<Way>,
    side: Side<C>,
    options: DialOptions,
    patience: Patience,
    began: Instant,
    /// Of the ways: which is the next to try, and when.
    next: (usize, Instant),
    under_way: Vec<Client<C, S>>,
    failed: Vec<SocketError>,
    /// Since when every attempt has soon ended with the peer hanging up, and the pause before the
    /// next one.
    hung_up: Option<(Instant, Duration)>,
    /// When the attempt began.
    attempt: Instant,
}

/// A connection that a peer has answered. Dropped, it never was one, unless its proof is on its way
/// already.
#[derive(Debug)]
pub struct Opened<C: ClientSide, S = TcpStream> {
    /// The connection.
    pub client: Client<C, S>,
    /// What is still to be said.
    pub proof: Option<Message>,
    /// What the handshake has led to.
    pub outcome: C::Outcome,
}

impl<C: ClientSide, S: Stream> Opened<C, S> {
    /// Proves itself: the peer takes it.
    ///
    /// # Errors
    /// The connection failed meanwhile.
    pub fn join(self) -> Result<(S, Way, C::Outcome), SocketError> {
        let Client { stream, way, .. } = self.client;
        if let Some(proof) = &self.proof {
            let peer = way.peer;
            let sent = hello::send_message(stream.borrow(), proof);
            sent.map_err(|_| SocketError::CutOff { peer })?;
        }
        Ok((stream, way, self.outcome))
    }
}

impl<C: ClientSide, S: Stream> Dial<C, S> {
    /// Opens `ways` in their order, each a little after the one before, or once all before it have
    /// failed. The first that the peer answers is taken; the peer never had the others.
    pub fn new<const ENTROPY: usize>(
        ways: Vec<Way>,
        options: DialOptions,
        patience: Patience,
        mut side: impl FnMut([u8; ENTROPY]) -> Result<(C, Message), HandshakeError> + Send + 'static,
    ) -> Self {
        let now = Instant::now();
        let side = move |peer: SocketAddr| {
            let entropy = hello::entropy().map_err(|cause| SocketError::Io {
                operation: "reading random numbers",
                address: peer.to_string(),
                cause: cause.into(),
                hint: "; the system must offer getrandom",
            })?;
            side(entropy).map_err(|error| SocketError::Handshake { peer, error })
        };
        Self {
            ways,
            side: Box::new(side),
            options,
            patience,
            began: now,
            next: (0, now),
            under_way: Vec::new(),
            failed: Vec::new(),
            hung_up: None,
            attempt: now,
        }
    }

    /// The connection, once the peer has answered.
    ///
    /// # Errors
    /// Those of all ways, as they came: there will be none.
    pub fn poll(&mut self, now: Instant) -> Result<Option<Opened<C, S>>, Vec<SocketError>> {
        loop {
            if let Some(opened) = self.advance(now) {
                return Ok(Some(opened));
            }
            if self.begins_next(now) {
                self.begin(now);
                continue;
            }
            if !self.under_way.is_empty() || self.next.0 < self.ways.len() {
                return Ok(None);
            }
            let Some(next) = self.again(now) else {
                return Err(std::mem::take(&mut self.failed));
            };
            self.failed.clear();
            self.next = next;
        }
    }

    /// Takes what has come on connections under way.
    fn advance(&mut self, now: Instant) -> Option<Opened<C, S>> {
        let mut at = 0;
        while let Some(client) = self.under_way.get_mut(at) {
            match client.advance(now) {
                Ok(None) if client.proved => {
                    // The peer may take it: there must be no other one.
                    self.under_way.swap(0, at);
                    self.under_way.truncate(1);
                    self.next.0 = self.ways.len();
                    return None;
                }
                Ok(None) => at += 1,
                Ok(Some((proof, outcome))) => {
                    let client = self.under_way.swap_remove(at);
                    return Some(Opened {
                        client,
                        proof,
                        outcome,
                    });
                }
                Err(error) => {
                    self.under_way.swap_remove(at);
                    self.failed.push(error);
                }
            }
        }
        None
    }

    /// Whether another way is due.
    fn begins_next(&self, now: Instant) -> bool {
        let (next, at) = self.next;
        let is_open = self.patience.opens && self.under_way.iter().any(Client::is_open);
        // Where an attempt has failed, the next one is due at once.
        let is_due = now >= at || !self.failed.is_empty() && self.under_way.is_empty();
        next < self.ways.len() && is_due && !is_open
    }

    fn begin(&mut self, now: Instant) {
        let (next, _) = self.next;
        if self.failed.is_empty() && self.under_way.is_empty() {
            self.attempt = now;
        }
        self.next = (next + 1, now + self.patience.head_start);
        let way = &self.ways[next];
        match Client::begin(way, &self.options, &mut self.side) {
            Ok(client) => self.under_way.push(client),
            Err(error) => self.failed.push(error),
        }
    }

    /// From which way on they are tried again, and when, if that may help.
    fn again(&mut self, now: Instant) -> Option<(usize, Instant)> {
        let is_refusal = |error: &&SocketError| !error.is_silence() && !error.is_hang_up();
        if self.failed.iter().any(|error| is_refusal(&error)) {
            return None;
        }
        let (first, pause) = if self.failed.iter().any(SocketError::is_hang_up) {
            if now.saturating_duration_since(self.attempt) > SILENT_TIME {
                self.hung_up = None;
            }
            let (since, pause) = self.hung_up.unwrap_or((now, FIRST_PAUSE));
            self.hung_up = Some((since, (pause * 2).min(LONGEST_PAUSE)));
            let is_patient = now.saturating_duration_since(since) < self.patience.hung_up;
            if !is_patient {
                return None;
            }
            (0, pause)
        } else {
            let is_patient = now.saturating_duration_since(self.began) < self.patience.unreachable;
            let is_there = |error: &SocketError| matches!(error, SocketError::Refused { .. });
            let mut errors = self.failed.iter();
            let is_away =
                !self.failed.iter().any(is_there) && errors.any(SocketError::is_unreachable);
            if !is_patient || !is_away {
                return None;
            }
            // Another way would have the system take the peer for unreachable again.
            (self.ways.len().saturating_sub(1), LONGEST_PAUSE)
        };
        (now + pause < self.options.deadline).then_some((first, now + pause))
    }

    /// When it is to be polled again, whatever comes.
    pub fn due(&self) -> Instant {
        let deadlines = self.under_way.iter().map(|one| one.deadline);
        let next = (self.next.0 < self.ways.len()).then_some(self.next.1);
        let due = deadlines.chain(next).min();
        due.unwrap_or(self.options.deadline)
    }

    /// What to wait for before that.
    pub fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.under_way.iter().map(Client::watched)
    }

    /// Waits for it.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn run(mut self) -> Result<Opened<C, S>, Vec<SocketError>> {
        loop {
            let now = Instant::now();
            if let Some(opened) = self.poll(now)? {
                return Ok(opened);
            }
            let left = socket::timespec(self.due().saturating_duration_since(now));
            let mut watched: Vec<_> = self.watched().collect();
            // A signal is as if nothing had come.
            let _ = poll(&mut watched, Some(&left));
        }
    }
}

impl<C: ClientSide, S> fmt::Debug for Dial<C, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dial")
            .field("ways", &self.ways)
            .field("next", &self.next)
            .field("under_way", &self.under_way.len())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
