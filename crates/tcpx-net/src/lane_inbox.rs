//! Where the listener leaves the lanes of one session until its network takes them.

use std::collections::VecDeque;
use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Lanes that may wait in one inbox; a peer that joins more is refused.
pub const INBOX_CAPACITY: usize = 128;

/// An authenticated data stream of a session.
#[derive(Debug)]
pub struct AcceptedLane {
    /// The stream: non-blocking, `TCP_NODELAY`. What the peer sends next is still in it.
    pub stream: TcpStream,
    /// Its number, `0..lanes`.
    pub lane: u16,
    /// How many lanes the client said it would open.
    pub lanes: u16,
    /// Where it came from.
    pub peer: SocketAddr,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: Mutex<VecDeque<AcceptedLane>>,
    arrived: Condvar,
    /// Told of each arrival, once set.
    notify: OnceLock<fn()>,
    /// A connection that takes the place of the control connection.
    control: Mutex<Option<TcpStream>>,
    notify_control: OnceLock<Notify>,
}

/// Called when a control connection arrives.
struct Notify(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notify")
    }
}

/// The lanes that joined one session. Clones share the same inbox; when the last clone outside the
/// listener is dropped, further lanes of the session are refused.
#[derive(Debug, Clone, Default)]
pub struct LaneInbox(Arc<Inner>);

impl LaneInbox {
    /// An empty inbox.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a lane in; gives it back when the inbox is full.
    pub fn deliver(&self, lane: AcceptedLane) -> Option<AcceptedLane> {
        let mut waiting = self.lock();
        if waiting.len() >= INBOX_CAPACITY {
            return Some(lane);
        }
        waiting.push_back(lane);
        drop(waiting);
        self.0.arrived.notify_one();
        if let Some(notify) = self.0.notify.get() {
            notify();
        }
        None
    }

    /// Leaves a connection that takes the place of the session's control connection; a later one
    /// replaces one that still waits.
    pub(crate) fn deliver_control(&self, stream: TcpStream) {
        *self
            .0
            .control
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(stream);
        if let Some(Notify(notify)) = self.0.notify_control.get() {
            notify();
        }
    }

    /// A connection that takes the place of the session's control connection, if one came. It is
    /// authenticated; what the peer sends next is still in it.
    pub fn take_control(&self) -> Option<TcpStream> {
        self.0
            .control
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// From now on `notify` is called for each such connection; the first caller's stands.
    pub fn notify_control(&self, notify: Box<dyn Fn() + Send + Sync>) {
        self.0.notify_control.get_or_init(|| Notify(notify));
    }

    /// From now on `notify` is called for each arrival; the first caller's stands.
    pub(crate) fn notify(&self, notify: fn()) {
        self.0.notify.get_or_init(|| notify);
    }

    /// The next lane, if one waits.
    pub(crate) fn try_take(&self) -> Option<AcceptedLane> {
        self.lock().pop_front()
    }

    /// The next lane, or `None` when none came before the deadline.
    pub fn take(&self, deadline: Instant) -> Option<AcceptedLane> {
        let mut waiting = self.lock();
        loop {
            if let Some(lane) = waiting.pop_front() {
                return Some(lane);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            if left.is_zero() {
                return None;
            }
            waiting = self
                .0
                .arrived
                .wait_timeout(waiting, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// True when nobody but the listener holds this inbox any more.
    pub(crate) fn abandoned(&self) -> bool {
        Arc::strong_count(&self.0) <= 1
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<AcceptedLane>> {
        self.0
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
