//! Where connections come in: strangers at a listening socket, until they prove that they know its
//! key.
//!
//! Strangers cost a small, bounded amount and never delay a good connection: the system keeps those
//! that say nothing to itself while it can, handshakes are advanced as bytes arrive, each has an
//! absolute deadline, and where there are too many one that has said nothing gives way.

mod admission;
mod greeting;

use std::borrow::Borrow;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use tcpx_wire::handshake::{Established, LaneAccepted, LaneRequest, ServerHandshake};
use tcpx_wire::key::Identity;

use self::admission::{Seen, Source, draw};
pub use self::greeting::Greeting;
use self::greeting::Progress;
use crate::congestion::Congestion;
use crate::dial::Stream;
use crate::{hello, protocols, socket};

/// Connections taken from the backlog before those at hand get their turn.
const ACCEPT_BATCH: usize = 512;
/// How long the listening socket is left alone after the system had no descriptor for it.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);
/// How often a log is told of that.
const EXHAUSTED_PERIOD: Duration = Duration::from_secs(60);
/// Seconds for which the system keeps a connection on which nothing has come.
const DEFERRED: libc::c_int = 1;

/// A listening socket with the connections that are in their handshake.
#[derive(Debug)]
pub struct Door<L, S> {
    socket: L,
    key: Option<Identity>,
    congestion: Congestion,
    /// A connection must have proved itself this long after it was accepted.
    patience: Duration,
    greetings: Vec<Greeting<S>>,
    seen: Seen,
    /// The listening socket is not watched before this.
    paused_until: Option<Instant>,
    /// When the lack of descriptors was news last.
    exhausted: Option<Instant>,
    /// Whether something came to the listening socket, and on each connection, when they were last
    /// waited for.
    listens: bool,
    ready: Vec<bool>,
}

/// What has come of connections at a door.
#[derive(Debug)]
pub enum Arrival<S> {
    /// A client proved itself; it is to be welcomed, or turned away.
    Client(Greeting<S>, Box<Established>),
    /// It wants to be a lane: its session is to be looked up, to answer or refuse it.
    LaneRequest(Greeting<S>, Box<LaneRequest>),
    /// A lane proved itself.
    Lane(Greeting<S>, Box<LaneAccepted>),
    /// One was turned away, for this reason; or it went without a word.
    Refused {
        /// Who.
        peer: SocketAddr,
        /// Why.
        reason: String,
        /// It had said nothing, as one that looks whether somebody listens.
        is_silent: bool,
    },
    /// The system has no descriptor for another connection.
    Exhausted {
        /// Its error.
        error: io::Error,
        /// Nobody here could give one back: connections wait.
        waits: bool,
        /// For the log, once a minute.
        news: Option<String>,
    },
}

impl<L: Borrow<TcpListener>, S: Stream> Door<L, S> {
    /// For a listening socket; without a key nobody proves anything.
    pub fn new(
        socket: L,
        key: Option<Identity>,
        congestion: Congestion,
        patience: Duration,
    ) -> Self {
        // Whoever connects speaks first. Where the system cannot wait for that, it comes here to be
        // silent.
        let deferred = socket::set_option(
            socket.borrow(),
            libc::IPPROTO_TCP,
            libc::TCP_DEFER_ACCEPT,
            DEFERRED,
        );
        if let Err(error) = deferred {
            tracing::debug!(%error, "silent connections are accepted");
        }
        Self {
            socket,
            key,
            congestion,
            patience,
            greetings: Vec::new(),
            seen: Seen::default(),
            paused_until: None,
            exhausted: None,
            listens: false,
            ready: Vec::new(),
        }
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Waits for something to do here or at `others`, until `due` at the latest.
    ///
    /// # Errors
    /// The system's refusal to wait.
    pub fn wait<'a>(
        &'a mut self,
        others: impl IntoIterator<Item = PollFd<'a>>,
        due: Option<Instant>,
    ) -> io::Result<()> {
        let now = Instant::now();
        let paused = self.is_paused(now);
        let deadlines = self.greetings.iter().map(|one| one.came + self.patience);
        let timeout = deadlines
            .chain(self.paused_until.filter(|_| paused))
            .chain(due)
            .min()
            .map(|due| socket::timespec(due.saturating_duration_since(now)));
        let listening = if paused {
            PollFlags::empty()
        } else {
            PollFlags::IN
        };
        let mut watched = vec![PollFd::new(self.socket.borrow(), listening)];
        watched.extend(
            self.greetings
                .iter()
                .map(|one| PollFd::new(one.stream.borrow(), PollFlags::IN)),
        );
        watched.extend(others);
        match poll(&mut watched, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready = watched.iter().map(|one| !one.revents().is_empty());
        self.listens = ready.next() == Some(true);
        self.ready = ready.take(self.greetings.len()).collect();
        Ok(())
    }

    /// Does what was waited for. While it `is_busy`, no new client is taken.
    pub fn turn(&mut self, is_busy: impl Fn() -> bool) -> Vec<Arrival<S>> {
        let now = Instant::now();
        let mut arrivals = Vec::new();
        let ready = std::mem::take(&mut self.ready);
        let ready = ready.into_iter().chain(std::iter::repeat(false));
        for (greeting, is_ready) in std::mem::take(&mut self.greetings).into_iter().zip(ready) {
            if is_ready {
                self.advance(now, greeting, &mut arrivals);
            } else if now < greeting.came + self.patience {
                self.greetings.push(greeting);
            } else if !greeting.is_farewell() {
                let reason = greeting.overdue(self.patience);
                arrivals.push(refused(greeting.peer, reason, false));
            }
        }
        if std::mem::take(&mut self.listens) && !self.is_paused(now) {
            self.accept_batch(now, &is_busy, &mut arrivals);
        }
        arrivals
    }

    /// Goes on with one that was answered, or that was refused and waits for its peer to go.
    pub fn keep(&mut self, greeting: Greeting<S>) {
        self.greetings.push(greeting);
    }

    /// Whether the [mark](LaneRequest::mark) of a lane's request, which is good, comes for the
    /// first time.
    pub fn is_fresh(&mut self, mark: &[u8; 16]) -> bool {
        self.seen.is_fresh(mark)
    }

    fn advance(&mut self, now: Instant, mut greeting: Greeting<S>, to: &mut Vec<Arrival<S>>) {
        let arrival = match greeting.advance(now, &mut self.seen) {
            Progress::Waiting => return self.greetings.push(greeting),
            Progress::Client(established) => Arrival::Client(greeting, established),
            Progress::LaneRequest(request) => Arrival::LaneRequest(greeting, request),
            Progress::Lane(accepted) => Arrival::Lane(greeting, accepted),
            Progress::Refused(reason) => {
                let refused = refused(greeting.peer, reason, false);
                self.greetings.push(greeting);
                refused
            }
            Progress::Failed(reason) => refused(greeting.peer, reason, false),
            Progress::Silent(reason) => refused(greeting.peer, reason, true),
            Progress::Gone => return,
        };
        to.push(arrival);
    }

    fn accept_batch(&mut self, now: Instant, is_busy: &dyn Fn() -> bool, to: &mut Vec<Arrival<S>>) {
        for _ in 0..ACCEPT_BATCH {
            match self.socket.borrow().accept() {
                Ok((stream, peer)) => {
                    self.greet(now, stream.into(), socket::canonical(peer), is_busy(), to);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_exhausted(&error) => {
                    let waits = !self.make_descriptor(now, to);
                    let news = self.exhausted_news(now, &error);
                    to.push(Arrival::Exhausted { error, waits, news });
                    if waits {
                        self.paused_until = Some(now + EXHAUSTED_PAUSE);
                        return;
                    }
                }
                // The connection died in the backlog: accept(2) says to go on with the next.
                Err(_) => {}
            }
        }
    }

    fn exhausted_news(&mut self, now: Instant, error: &io::Error) -> Option<String> {
        let last = self.exhausted;
        if last.is_some_and(|last| now.saturating_duration_since(last) < EXHAUSTED_PERIOD) {
            return None;
        }
        self.exhausted = Some(now);
        Some(format!(
            "no descriptor for another connection: {error}; raise the limit (ulimit -n)"
        ))
    }

    fn greet(
        &mut self,
        now: Instant,
        stream: S,
        peer: SocketAddr,
        is_busy: bool,
        to: &mut Vec<Arrival<S>>,
    ) {
        let prepared = socket::prepare_accepted(stream.borrow());
        let entropy = match prepared.and_then(|()| hello::entropy()) {
            Ok(entropy) => entropy,
            Err(error) => return to.push(refused(peer, error.to_string(), false)),
        };
        if let Err(error) = self.congestion.apply_to_accepted(stream.borrow()) {
            tracing::debug!(%peer, %error, "the listener's congestion control stays");
        }
        self.make_room(now, peer, to);
        let mut handshake =
            ServerHandshake::new(self.key.as_ref(), protocols::own_build(), entropy);
        if is_busy {
            handshake = handshake.busy();
        }
        // A client has spoken already as a rule: it is no silent one for a moment.
        self.advance(now, Greeting::new(stream, peer, now, handshake), to);
    }

    /// Has another one give way to a newcomer, if there are too many.
    fn make_room(&mut self, now: Instant, peer: SocketAddr, to: &mut Vec<Arrival<S>>) {
        let candidates = self.greetings.iter().map(|one| one.candidate(now));
        if let Some(index) = admission::victim(candidates, Source::of(peer.ip()), draw) {
            self.evict(index, to);
        }
    }

    /// Has one that has not proved itself give its descriptor back; whether there was one.
    fn make_descriptor(&mut self, now: Instant, to: &mut Vec<Arrival<S>>) -> bool {
        let candidates = self.greetings.iter().map(|one| one.candidate(now));
        let victim = admission::any_victim(candidates, draw);
        if let Some(index) = victim {
            self.evict(index, to);
        }
        victim.is_some()
    }

    fn evict(&mut self, index: usize, to: &mut Vec<Arrival<S>>) {
        let gone = self.greetings.swap_remove(index);
        let reason = "too many connections that have not proved themselves";
        to.push(refused(gone.peer, reason.to_owned(), false));
    }
}

fn refused<S>(peer: SocketAddr, reason: String, is_silent: bool) -> Arrival<S> {
    Arrival::Refused {
        peer,
        reason,
        is_silent,
    }
}

fn is_exhausted(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}

/// Lines of a log about strangers, at a bounded rate.
#[derive(Debug)]
pub struct LineQuota {
    period: Instant,
    lines: u32,
    suppressed: u64,
}

/// Lines per period; what is beyond is counted.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(1);

impl LineQuota {
    /// Of a period that begins.
    pub const fn new(now: Instant) -> Self {
        Self {
            period: now,
            lines: 0,
            suppressed: 0,
        }
    }

    /// Whether there may be another line; and how many there were not in the period before, once.
    pub fn take(&mut self, now: Instant) -> (bool, Option<u64>) {
        let mut before = None;
        if now.saturating_duration_since(self.period) >= PERIOD {
            before = Some(self.suppressed).filter(|lines| *lines > 0);
            *self = Self::new(now);
        }
        let is_line = self.lines < LINES;
        match is_line {
            true => self.lines += 1,
            false => self.suppressed += 1,
        }
        (is_line, before)
    }
}
