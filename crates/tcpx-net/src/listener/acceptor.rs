//! The acceptor thread's loop.

use std::collections::HashMap;
use std::fmt;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::door::{Arrival, Door, LineQuota};
use tcpx_lanes::hello::send_message;
use tcpx_lanes::{lock, socket};
use tcpx_wire::handshake::{
    Established, HandshakeError, LaneAccepted, LaneRequest, SessionId, SessionKey,
};
use tcpx_wire::key::Identity;
use tcpx_wire::record::Records;

use super::{Accepted, Inner};
use crate::dial::ControlStream;
use crate::lane_inbox::{AcceptedLane, LaneInbox, WeakInbox};

/// A connection must have proved itself this long after it was accepted.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(3);

type Greeting = tcpx_lanes::door::Greeting<TcpStream>;

#[derive(Debug)]
struct Registered {
    key: SessionKey,
    lanes: WeakInbox,
}

#[derive(Debug)]
pub(super) struct Acceptor {
    door: Door<TcpListener, TcpStream>,
    inner: Arc<Inner>,
    one_time: bool,
    /// Lanes of sessions that are not known, until what had come before them has been read: their
    /// clients' proofs, perhaps, behind which they open lanes at once.
    early: Vec<(Greeting, LaneRequest)>,
    sessions: HashMap<SessionId, Registered>,
    spent: bool,
    /// Of log lines about strangers.
    lines: LineQuota,
}

impl Acceptor {
    pub(super) fn new(
        socket: TcpListener,
        inner: Arc<Inner>,
        key: Option<Identity>,
        (one_time, congestion): (bool, Congestion),
    ) -> Self {
        Self {
            lines: LineQuota::new(Instant::now()),
            door: Door::new(socket, key, congestion, HANDSHAKE_LIMIT),
            inner,
            one_time,
            early: Vec::new(),
            sessions: HashMap::new(),
            spent: false,
        }
    }

    pub(super) fn run(&mut self) {
        while !self.inner.stop.load(Ordering::Acquire) {
            let due = (!self.early.is_empty()).then(Instant::now);
            let wake = PollFd::new(&self.inner.wake, PollFlags::IN);
            if let Err(error) = self.door.wait([wake], due) {
                tracing::error!(%error, "poll failed; the listener ends");
                break;
            }
            let early = std::mem::take(&mut self.early);
            let is_busy = || self.spent || self.inner.is_full();
            for arrival in self.door.turn(is_busy) {
                self.take(Instant::now(), arrival);
            }
            for (greeting, request) in early {
                self.answer_lane(Instant::now(), greeting, request);
            }
        }
        self.inner.stop.store(true, Ordering::Release);
        self.inner.arrived.notify_all();
    }

    fn take(&mut self, now: Instant, arrival: Arrival<TcpStream>) {
        match arrival {
            Arrival::Client(greeting, established) => self.admit(now, greeting, *established),
            Arrival::LaneRequest(greeting, request) => match self.session(&request) {
                None => self.early.push((greeting, *request)),
                Some(_) => self.answer_lane(now, greeting, *request),
            },
            Arrival::Lane(greeting, accepted) => self.admit_lane(now, greeting, *accepted),
            Arrival::Refused { peer, reason, .. } => self.refused(now, peer, &reason),
            Arrival::Exhausted { error, waits, news } => {
                if let Some(news) = news {
                    tracing::warn!("{news}");
                }
                if waits {
                    let sessions = self.sessions.values();
                    let lanes = sessions.filter_map(|session| session.lanes.upgrade());
                    lanes.for_each(|lanes| lanes.lacks_descriptors(now, &error));
                }
            }
        }
    }

    /// A client has proved itself.
    fn admit(&mut self, now: Instant, mut greeting: Greeting, mut established: Established) {
        let peer = greeting.peer;
        // Another client may have been faster since this one said hello.
        if self.spent || self.inner.is_full() {
            self.refused(now, peer, &"no further session is taken");
            if greeting.refuse(&established.turn_away()).is_ok() {
                self.door.keep(greeting);
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
        if let Err(error) = send_message(&greeting.stream, &established.welcome()) {
            self.sessions.remove(&established.session.id);
            self.refused(now, peer, &error);
            return;
        }
        self.spent = self.one_time;
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
        let mark = request.mark();
        let (answer, error) = match self.session(&request) {
            Some(session) => match request.accept(&session.key) {
                Ok((server, answer)) if self.door.is_fresh(&mark) => {
                    return match greeting.answer(server, &answer, now) {
                        Ok(()) => self.door.keep(greeting),
                        Err(error) => self.refused(now, greeting.peer, &error),
                    };
                }
                Ok(_) => {
                    let error = HandshakeError::Replayed;
                    return self.refused(now, greeting.peer, &error);
                }
                Err(refusal) => *refusal,
            },
            None => request.refuse(),
        };
        self.refused(now, greeting.peer, &error);
        if greeting.refuse(&answer).is_ok() {
            self.door.keep(greeting);
        }
    }

    /// A lane has proved itself.
    fn admit_lane(&mut self, now: Instant, greeting: Greeting, accepted: LaneAccepted) {
        let (peer, stream) = (greeting.peer, greeting.stream);
        let session = self.sessions.get(&accepted.session);
        let Some(lanes) = session.and_then(|session| session.lanes.upgrade()) else {
            return self.refused(now, peer, &"the lane's session has ended");
        };
        if accepted.resumes {
            tracing::info!(%peer, session = %accepted.session, "control connection resumed");
            let records = Records::new(accepted.keys);
            return lanes.deliver_control(ControlStream { stream, records });
        }
        if let Err(error) = socket::prepare_lane(&stream) {
            return self.refused(now, peer, &error);
        }
        let lane = AcceptedLane {
            stream,
            keys: accepted.keys,
            lane: accepted.lane,
            lanes: accepted.lanes,
            peer,
        };
        if lanes.deliver(lane).is_some() {
            self.refused(now, peer, &"the session has more lanes than fit");
        }
    }

    /// Counts a connection that was turned away, and says so on one line.
    fn refused(&mut self, now: Instant, peer: SocketAddr, reason: &dyn fmt::Display) {
        let mut refusals = lock(&self.inner.refusals);
        refusals.count += 1;
        refusals.last = Some((peer, reason.to_string()));
        drop(refusals);
        let (is_line, suppressed) = self.lines.take(now);
        if let Some(connections) = suppressed {
            tracing::warn!(connections, "more connections were refused");
        }
        if is_line {
            tracing::warn!(%peer, %reason, "connection refused");
        }
    }
}
