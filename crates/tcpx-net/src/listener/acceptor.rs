//! The acceptor thread's loop.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use tcpx_lanes::{lock, protocols, socket};
use tcpx_wire::handshake::{
    Established, LaneAccepted, LaneRequest, ServerHandshake, SessionId, SessionKey,
};
use tcpx_wire::key::Identity;
use tcpx_wire::record::Records;

use super::admission::{self, Candidate, Random, Source};
use super::greeting::{Greeting, Progress};
use super::reports::Reports;
use super::{Accepted, Inner, ListenOptions, MOST_WAITING};
use crate::auth;
use crate::dial::ControlStream;
use crate::lane_inbox::{AcceptedLane, LaneInbox, WeakInbox};
use crate::peer::Peer;

/// Connections taken from the backlog before those at hand get their turn.
const ACCEPT_BATCH: usize = 64;
/// How long the listening socket is left alone after the system had no descriptor for it.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct Registered {
    key: SessionKey,
    lanes: WeakInbox,
}

#[derive(Debug)]
pub(super) struct Acceptor {
    socket: TcpListener,
    inner: Arc<Inner>,
    options: ListenOptions,
    key: Option<Identity>,
    greetings: Vec<Greeting>,
    /// Lanes of sessions that are not known, until what had come before them has been read: their clients' proofs,
    /// perhaps, behind which they open lanes at once.
    early: Vec<(Greeting, LaneRequest)>,
    random: Random,
    sessions: HashMap<SessionId, Registered>,
    spent: bool,
    /// The listening socket is not watched before this.
    paused_until: Option<Instant>,
    reports: Reports,
}

/// What becomes of a greeting after its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    Yes,
    No,
}

impl Acceptor {
    pub(super) fn new(
        socket: TcpListener,
        inner: Arc<Inner>,
        key: Option<Identity>,
        options: ListenOptions,
    ) -> Self {
        Self {
            reports: Reports::new(Arc::clone(&inner), Instant::now()),
            socket,
            inner,
            options,
            key,
            greetings: Vec::new(),
            early: Vec::new(),
            random: Random::new(),
            sessions: HashMap::new(),
            spent: false,
            paused_until: None,
        }
    }

    pub(super) fn run(&mut self) {
        let mut ready = Vec::new();
        while !self.inner.stop.load(Ordering::Acquire) {
            if let Err(error) = self.wait(&mut ready) {
                tracing::error!(%error, "poll failed; the listener ends");
                break;
            }
            let early = std::mem::take(&mut self.early);
            self.advance_greetings(&ready);
            for (greeting, request) in early {
                self.answer_lane(Instant::now(), greeting, request);
            }
            let listening = ready.first().is_some_and(|events| !events.is_empty());
            if listening && !self.is_paused(Instant::now()) {
                self.accept_batch();
            }
        }
        self.inner.stop.store(true, Ordering::Release);
        self.inner.arrived.notify_all();
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Waits for something to do. `ready`: the listening socket's events, then each greeting's.
    fn wait(&mut self, ready: &mut Vec<PollFlags>) -> io::Result<()> {
        let now = Instant::now();
        let paused = self.is_paused(now);
        let deadlines = self.greetings.iter().map(|greeting| greeting.deadline);
        let timeout = deadlines
            .chain(self.paused_until.filter(|_| paused))
            .chain(self.early.iter().map(|_| now))
            .min()
            .map(|deadline| socket::timespec(deadline.saturating_duration_since(now)));
        let listening = if paused {
            PollFlags::empty()
        } else {
            PollFlags::IN
        };
        let mut watched = Vec::with_capacity(2 + self.greetings.len());
        watched.push(PollFd::new(&self.inner.wake, PollFlags::IN));
        watched.push(PollFd::new(&self.socket, listening));
        watched.extend(
            self.greetings
                .iter()
                .map(|one| PollFd::new(&one.stream, PollFlags::IN)),
        );
        match poll(&mut watched, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        ready.clear();
        ready.extend(watched.iter().skip(1).map(PollFd::revents));
        Ok(())
    }

    fn advance_greetings(&mut self, ready: &[PollFlags]) {
        let greetings = std::mem::take(&mut self.greetings);
        let now = Instant::now();
        let events = ready
            .iter()
            .skip(1)
            .copied()
            .chain(std::iter::repeat(PollFlags::empty()));
        for (mut greeting, events) in greetings.into_iter().zip(events) {
            if events.is_empty() && now < greeting.deadline {
                self.greetings.push(greeting);
                continue;
            }
            if events.is_empty() {
                if !greeting.is_farewell() {
                    self.reports
                        .refused(now, greeting.peer, &greeting.overdue());
                }
                continue;
            }
            let progress = greeting.advance();
            self.apply(now, greeting, progress);
        }
    }

    fn apply(&mut self, now: Instant, greeting: Greeting, progress: Progress) {
        let peer = greeting.peer;
        let keep = match progress {
            Progress::Waiting => Keep::Yes,
            Progress::Control(established) => return self.admit(now, greeting, *established),
            Progress::LaneRequest(request) if self.session(&request).is_none() => {
                return self.early.push((greeting, *request));
            }
            Progress::LaneRequest(request) => return self.answer_lane(now, greeting, *request),
            Progress::Lane(accepted) => return self.admit_lane(now, greeting, *accepted),
            Progress::Refused(reason) => {
                self.reports.refused(now, peer, &reason);
                Keep::Yes
            }
            Progress::Failed(reason) => {
                self.reports.refused(now, peer, &reason);
                Keep::No
            }
            Progress::Gone => Keep::No,
        };
        if keep == Keep::Yes {
            self.greetings.push(greeting);
        }
    }

    fn is_busy(&self) -> bool {
        self.spent || lock(&self.inner.accepted).len() >= MOST_WAITING
    }

    /// A client has proved itself.
    fn admit(&mut self, now: Instant, mut greeting: Greeting, mut established: Established) {
        let peer = Peer::new(greeting.peer, established.client);
        // Another client may have been faster since this one said hello.
        if self.is_busy() {
            self.reports
                .refused(now, peer, &"no further session is taken");
            if greeting.refuse(&established.turn_away()).is_ok() {
                self.greetings.push(greeting);
            }
            return;
        }
        self.sessions
            .retain(|_, session| session.lanes.upgrade().is_some());
        let lanes = LaneInbox::new();
        // Before the client can have our settings, behind which it opens lanes.
        let registered = Registered {
            key: established.session.key.clone(),
            lanes: lanes.downgrade(),
        };
        self.sessions.insert(established.session.id, registered);
        if let Err(error) = auth::send_message(&greeting.stream, &established.welcome()) {
            self.sessions.remove(&established.session.id);
            self.reports.refused(now, peer, &error);
            return;
        }
        self.spent = self.options.one_time;
        tracing::info!(
            %peer,
            session = %established.session.id,
            congestion_control = socket::congestion_control(&greeting.stream),
            "client authenticated"
        );
        let accepted = Accepted {
            stream: greeting.stream,
            session: established.session,
            records: established.records,
            peer,
            listening: self.inner.address,
            lanes,
        };
        lock(&self.inner.accepted).push_back(accepted);
        // Not all of those that wait take one.
        self.inner.arrived.notify_all();
    }

    /// The session that a lane asks for.
    fn session(&self, request: &LaneRequest) -> Option<&Registered> {
        let session = self.sessions.get(&request.session());
        session.filter(|session| session.lanes.upgrade().is_some())
    }

    fn answer_lane(&mut self, now: Instant, mut greeting: Greeting, request: LaneRequest) {
        let answered = match self.session(&request) {
            Some(session) => match request.accept(&session.key) {
                Ok((server, answer)) => greeting.answer(server, &answer),
                Err(refusal) => {
                    let (answer, error) = *refusal;
                    self.reports.refused(now, greeting.peer, &error);
                    greeting.refuse(&answer)
                }
            },
            None => {
                let (answer, error) = request.refuse();
                self.reports.refused(now, greeting.peer, &error);
                greeting.refuse(&answer)
            }
        };
        match answered {
            Ok(()) => self.greetings.push(greeting),
            Err(error) => self.reports.refused(now, greeting.peer, &error),
        }
    }

    /// A lane has proved itself.
    fn admit_lane(&mut self, now: Instant, greeting: Greeting, accepted: LaneAccepted) {
        let Greeting { stream, peer, .. } = greeting;
        let session = self.sessions.get(&accepted.session);
        let Some(lanes) = session.and_then(|session| session.lanes.upgrade()) else {
            return self
                .reports
                .refused(now, peer, &"the lane's session has ended");
        };
        if accepted.resumes {
            tracing::info!(%peer, session = %accepted.session, "control connection resumed");
            let records = Records::new(accepted.keys);
            return lanes.deliver_control(ControlStream { stream, records });
        }
        if let Err(error) = socket::prepare_lane(&stream) {
            return self.reports.refused(now, peer, &error);
        }
        let lane = AcceptedLane {
            stream,
            keys: accepted.keys,
            lane: accepted.lane,
            lanes: accepted.lanes,
            peer,
        };
        if lanes.deliver(lane).is_some() {
            self.reports
                .refused(now, peer, &"the session has more lanes than fit");
        }
    }

    fn accept_batch(&mut self) {
        for _ in 0..ACCEPT_BATCH {
            match self.socket.accept() {
                Ok((stream, peer)) => self.greet(stream, socket::canonical(peer)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_exhausted(&error) => {
                    let now = Instant::now();
                    self.reports.exhausted(now, &error);
                    if !self.make_descriptor(now) {
                        let sessions = self.sessions.values();
                        let lanes = sessions.filter_map(|session| session.lanes.upgrade());
                        lanes.for_each(|lanes| lanes.lacks_descriptors(now, &error));
                        self.paused_until = Some(now + EXHAUSTED_PAUSE);
                        return;
                    }
                }
                // The connection died in the backlog: accept(2) says to go on with the next.
                Err(_) => {}
            }
        }
    }

    fn greet(&mut self, stream: std::net::TcpStream, peer: SocketAddr) {
        let now = Instant::now();
        let entropy = match socket::prepare_accepted(&stream).and_then(|()| auth::entropy()) {
            Ok(entropy) => entropy,
            Err(error) => return self.reports.refused(now, peer, &error),
        };
        if let Err(error) = self.options.congestion.apply_to_accepted(&stream) {
            tracing::debug!(%peer, %error, "the listener's congestion control stays");
        }
        self.make_room(now, peer);
        let mut handshake =
            ServerHandshake::new(self.key.as_ref(), protocols::own_build(), entropy);
        if self.is_busy() {
            handshake = handshake.busy();
        }
        // A client has spoken already as a rule: it is no silent one for a moment.
        let mut greeting = Greeting::new(stream, peer, now, handshake);
        let progress = greeting.advance();
        self.apply(now, greeting, progress);
    }

    /// Has another one give way to a newcomer, if there are too many.
    fn make_room(&mut self, now: Instant, peer: SocketAddr) {
        let random = &mut self.random;
        let source = Source::of(peer.ip());
        let victim = admission::victim(candidates(&self.greetings), source, |below| {
            random.below(below)
        });
        if let Some(index) = victim {
            self.evict(now, index);
        }
    }

    /// Has one that has not proved itself give its descriptor back; whether there was one.
    fn make_descriptor(&mut self, now: Instant) -> bool {
        let random = &mut self.random;
        let victim =
            admission::any_victim(candidates(&self.greetings), |below| random.below(below));
        if let Some(index) = victim {
            self.evict(now, index);
        }
        victim.is_some()
    }

    fn evict(&mut self, now: Instant, index: usize) {
        let gone = self.greetings.swap_remove(index);
        self.reports.refused(
            now,
            gone.peer,
            &"too many connections that have not proved themselves",
        );
    }
}

fn candidates(greetings: &[Greeting]) -> impl Iterator<Item = Candidate> + Clone {
    greetings.iter().map(|greeting| Candidate {
        source: Source::of(greeting.peer.ip()),
        has_spoken: greeting.has_spoken(),
    })
}

fn is_exhausted(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}
