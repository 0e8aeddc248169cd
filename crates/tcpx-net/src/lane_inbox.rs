//! Where the listener leaves the lanes of one session until its network takes them.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tcpx_lanes::lock;
use tcpx_lanes::waker::Waker;
use tcpx_wire::frame::Detail;
use tcpx_wire::lane_seal::LaneKeys;
use tcpx_wire::record::SESSION_OVER;

use crate::dial::ControlStream;
use crate::error::{NetworkError, SocketError};
use crate::network::Exchange;

/// Lanes that may wait in one inbox; a peer that joins more is refused.
pub const INBOX_CAPACITY: usize = 128;

/// An authenticated data stream of a session.
#[derive(Debug)]
pub struct AcceptedLane {
    /// The stream: non-blocking, `TCP_NODELAY`. What the peer sends next is still in it.
    pub stream: TcpStream,
    /// The secrets that both its ends hold, and nobody else.
    pub keys: LaneKeys,
    /// Its number, `0..lanes`.
    pub lane: u16,
    /// How many lanes the client said it would open; one that it opened before both sides agreed
    /// says what it wished.
    pub lanes: u16,
    /// Where it came from.
    pub peer: SocketAddr,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: Mutex<VecDeque<AcceptedLane>>,
    /// Lanes that may come back, once the set-up is done.
    agreed: OnceLock<u16>,
    /// Told of each arrival, once set.
    notify: OnceLock<fn()>,
    /// Readable after arrivals, while somebody waits for them.
    readable: Mutex<Option<Arc<Waker>>>,
    shortage: Mutex<Option<Shortage>>,
    /// A connection that takes the place of the control connection.
    control: Mutex<Option<Box<ControlStream>>>,
    notify_control: OnceLock<Notify>,
    /// Why the session has ended.
    over: OnceLock<String>,
}

/// The listener had no descriptor for a connection, which may be a lane.
#[derive(Debug)]
struct Shortage {
    since: Instant,
    /// When it last found that.
    at: Instant,
    /// The system's error.
    errno: i32,
}

/// A shortage ends the set-up that lasts as long, and is over when the listener has not found it
/// again for as long.
const SHORTAGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_millis(500));

/// Called when a control connection arrives.
struct Notify(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notify")
    }
}

/// The lanes that joined one session. Clones share the same inbox; when the last clone is dropped,
/// so are the lanes in it, and further ones of the session are refused.
#[derive(Debug, Clone, Default)]
pub struct LaneInbox(Arc<Inner>);

/// The inbox as long as anybody else has it.
#[derive(Debug)]
pub(crate) struct WeakInbox(Weak<Inner>);

impl WeakInbox {
    pub(crate) fn upgrade(&self) -> Option<LaneInbox> {
        self.0.upgrade().map(LaneInbox)
    }
}

fn lacks_descriptors(operation: &'static str, what: &str, cause: io::Error) -> SocketError {
    SocketError::Io {
        operation,
        address: what.to_owned(),
        cause: cause.into(),
        hint: "; raise the limit on descriptors (ulimit -n)",
    }
}

/// Tells the peer that the session has failed; a peer that does not hear it dials again.
fn say_over(
    ControlStream {
        stream,
        mut records,
    }: ControlStream,
    reason: &str,
) {
    let end = reason.floor_char_boundary(Detail::MAX_BYTES);
    let mut plain = SESSION_OVER.to_le_bytes().to_vec();
    plain.extend_from_slice(&reason.as_bytes()[..end]);
    let mut sealed = Vec::new();
    records.seal(&plain, &mut sealed);
    // It fits into the buffer of a socket that nothing was written to.
    drop((&stream).write_all(&sealed));
    drop(stream.shutdown(Shutdown::Write));
}

impl LaneInbox {
    /// An empty inbox.
    pub fn new() -> Self {
        Self::default()
    }

    /// The set-up is done: from now on only lanes `0..lanes` may come, in place of those that died,
    /// and with 0 none. The first answer stands.
    pub fn agree(&self, lanes: u16) {
        let mut waiting = lock(&self.0.waiting);
        let lanes = *self.0.agreed.get_or_init(|| lanes);
        waiting.retain(|waiting| waiting.lane < lanes);
    }

    /// Puts a lane in; gives it back when the inbox is full, or when the session has no such lane.
    /// A later stream of a lane takes the place of one that still waits: the client gave that one
    /// up.
    pub fn deliver(&self, lane: AcceptedLane) -> Option<AcceptedLane> {
        let mut waiting = lock(&self.0.waiting);
        if let Some(agreed) = self.0.agreed.get() {
            if lane.lane >= *agreed {
                return Some(lane);
            }
            waiting.retain(|waiting| waiting.lane != lane.lane);
        }
        if waiting.len() >= INBOX_CAPACITY {
            return Some(lane);
        }
        waiting.push_back(lane);
        drop(waiting);
        if let Some(readable) = lock(&self.0.readable).as_ref() {
            readable.wake();
        }
        if let Some(notify) = self.0.notify.get() {
            notify();
        }
        None
    }

    /// Leaves a connection that takes the place of the session's control connection; a later one
    /// replaces one that still waits.
    pub(crate) fn deliver_control(&self, stream: ControlStream) {
        let mut control = lock(&self.0.control);
        if let Some(reason) = self.0.over.get() {
            return say_over(stream, reason);
        }
        *control = Some(Box::new(stream));
        drop(control);
        if let Some(Notify(notify)) = self.0.notify_control.get() {
            notify();
        }
    }

    /// A connection that takes the place of the session's control connection, if one came. It is
    /// authenticated; what the peer sends next is still in it.
    pub fn take_control(&self) -> Option<Box<ControlStream>> {
        lock(&self.0.control).take()
    }

    /// The session has failed, for this reason: whoever would go on with it is told, once and for
    /// all.
    pub fn end(&self, reason: &str) {
        let mut control = lock(&self.0.control);
        self.0.over.get_or_init(|| reason.to_owned());
        if let Some(stream) = control.take() {
            say_over(*stream, reason);
        }
    }

    /// From now on `notify` is called for each such connection; the first caller's stands.
    pub fn notify_control(&self, notify: Box<dyn Fn() + Send + Sync>) {
        self.0.notify_control.get_or_init(|| Notify(notify));
    }

    /// From now on `notify` is called for each arrival; the first caller's stands.
    pub(crate) fn notify(&self, notify: fn()) {
        self.0.notify.get_or_init(|| notify);
    }

    /// The listener has no descriptor for what comes: whoever waits for lanes need not wait to its
    /// deadline.
    pub(crate) fn lacks_descriptors(&self, now: Instant, error: &io::Error) {
        let mut shortage = lock(&self.0.shortage);
        let lasting = shortage.as_ref().filter(|one| now < one.at + SHORTAGE.1);
        *shortage = Some(Shortage {
            since: lasting.map_or(now, |one| one.since),
            at: now,
            errno: error.raw_os_error().unwrap_or_default(),
        });
    }

    /// The error of a shortage that lasts.
    fn lasting_shortage(&self) -> Option<NetworkError> {
        let shortage = lock(&self.0.shortage);
        let lasts = |one: &&Shortage| {
            one.at >= one.since + SHORTAGE.0 && Instant::now() < one.at + SHORTAGE.1
        };
        let cause = io::Error::from_raw_os_error(shortage.as_ref().filter(lasts)?.errno);
        let lack = lacks_descriptors("accept", "the lanes of a session", cause);
        Some(lack.into())
    }

    /// The next lane, if one waits.
    pub(crate) fn try_take(&self) -> Option<AcceptedLane> {
        lock(&self.0.waiting).pop_front()
    }

    /// The next lane, or `None` when none came before the deadline; hears meanwhile whether the
    /// peer gives the set-up up. Only one at a time may wait.
    ///
    /// # Errors
    /// What [`Exchange::wait`] says, or the system has no descriptor left for what it needs or for
    /// lanes.
    pub fn take(
        &self,
        exchange: &mut dyn Exchange,
        deadline: Instant,
    ) -> Result<Option<AcceptedLane>, NetworkError> {
        let made = Waker::new()
            .map_err(|error| lacks_descriptors("eventfd", "waiting for lanes", error.into()))?;
        let readable = Arc::new(made);
        *lock(&self.0.readable) = Some(Arc::clone(&readable));
        let taken = self.take_as_told(&readable, exchange, deadline);
        // An inbox outlives its set-up; a descriptor need not.
        *lock(&self.0.readable) = None;
        taken
    }

    fn take_as_told(
        &self,
        readable: &Waker,
        exchange: &mut dyn Exchange,
        deadline: Instant,
    ) -> Result<Option<AcceptedLane>, NetworkError> {
        loop {
            // Quiet before the look: what comes after it makes it readable again.
            readable.clear();
            if let Some(lane) = self.try_take() {
                return Ok(Some(lane));
            }
            if let Some(shortage) = self.lasting_shortage() {
                return Err(shortage);
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            let readable = PollFd::new(readable, PollFlags::IN);
            exchange.wait(vec![readable], deadline.min(now + SHORTAGE.1))?;
        }
    }

    /// For the listener, which keeps nothing of a session that has ended.
    pub(crate) fn downgrade(&self) -> WeakInbox {
        WeakInbox(Arc::downgrade(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    fn lane(lane: u16, lanes: u16) -> AcceptedLane {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        AcceptedLane {
            peer: stream.peer_addr().unwrap(),
            stream,
            keys: LaneKeys::new([1; 32], [2; 32]),
            lane,
            lanes,
        }
    }

    fn waiting(inbox: &LaneInbox) -> Vec<u16> {
        std::iter::from_fn(|| inbox.try_take())
            .map(|lane| lane.lane)
            .collect()
    }

    #[test]
    fn lanes_beyond_the_agreed_number_are_refused() {
        let inbox = LaneInbox::new();
        assert!(inbox.deliver(lane(7, 8)).is_none());
        inbox.agree(2);
        assert!(inbox.deliver(lane(2, 3)).is_some());
        for number in [0, 1, 0, 1, 1] {
            assert!(inbox.deliver(lane(number, 2 + number)).is_none());
        }
        // One of each number waits at most, and the one from before the agreement is gone.
        assert_eq!(waiting(&inbox), [0, 1]);
    }

    #[test]
    fn a_session_whose_lanes_never_come_back_takes_none() {
        let inbox = LaneInbox::new();
        inbox.agree(0);
        assert!(inbox.deliver(lane(0, 1)).is_some());
        assert!(inbox.try_take().is_none());
    }

    #[test]
    fn lanes_that_nobody_took_end_with_their_session() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let inbox = LaneInbox::new();
        let known = inbox.downgrade();
        let waits = AcceptedLane {
            stream,
            ..lane(0, 1)
        };
        assert!(known.upgrade().unwrap().deliver(waits).is_none());
        drop(inbox);
        assert!(known.upgrade().is_none());
        assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    }
}
