//! The listener: one port for control connections and lanes.
//!
//! One thread looks after a [door](tcpx_lanes::door) and sorts what comes.

mod acceptor;

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::lock;
use tcpx_lanes::socket;
use tcpx_lanes::waker::Waker;
use tcpx_memory::fork;
use tcpx_wire::handshake::Session;
use tcpx_wire::record::Records;

use crate::auth::Auth;
use crate::error::{NetworkError, SocketError};
use crate::lane_inbox::LaneInbox;
use acceptor::Acceptor;

/// The port that tcpx listens on when none is named.
pub const DEFAULT_PORT: u16 = 12345;

/// Authenticated sessions that may wait for [`Listener::accept`]; further clients are told that the
/// server is busy.
pub const MOST_WAITING: usize = 16;

/// How to listen.
#[derive(Debug, Clone)]
pub struct ListenOptions {
    /// Where; port 0 lets the system choose.
    pub address: SocketAddr,
    /// Who may connect.
    pub auth: Auth,
    /// The first authenticated session spends the key; later ones are refused as busy. Failed
    /// attempts spend nothing.
    pub one_time: bool,
    /// Congestion control of everything that is accepted.
    pub congestion: Congestion,
}

/// An authenticated control connection. What the peer sends next is still in the stream.
#[derive(Debug)]
pub struct Accepted {
    /// The stream: non-blocking, `TCP_NODELAY`.
    pub stream: TcpStream,
    /// The session that both sides now hold.
    pub session: Session,
    /// Seals and opens what follows in the stream.
    pub records: Records,
    /// The client.
    pub peer: SocketAddr,
    /// The address that the listener is bound to.
    pub listening: SocketAddr,
    /// Where lanes of this session arrive. Once all clones of it are dropped, further lanes are
    /// refused.
    pub lanes: LaneInbox,
}

/// Connections that a listener has turned away.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusals {
    /// How many, lanes among them.
    pub count: u64,
    /// Who was the last one, and why it was refused.
    pub last: Option<(SocketAddr, String)>,
}

#[derive(Debug)]
struct Inner {
    address: SocketAddr,
    refusals: Mutex<Refusals>,
    accepted: Mutex<VecDeque<Accepted>>,
    arrived: Condvar,
    stop: AtomicBool,
    /// Readable once `stop` is set.
    wake: Waker,
}

impl Inner {
    fn refusals(&self) -> Refusals {
        lock(&self.refusals).clone()
    }

    /// Whether as many clients wait as may.
    fn is_full(&self) -> bool {
        lock(&self.accepted).len() >= MOST_WAITING
    }
}

/// A listening port with its acceptor thread; dropping it closes both.
#[derive(Debug)]
pub struct Listener {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
    /// The process that listens, among those that forks made.
    generation: u32,
}

impl Listener {
    /// Listens.
    ///
    /// # Errors
    /// [`NetworkError::Socket`] when the address cannot be bound, the thread cannot be started or
    /// the system refuses that choice, [`NetworkError::ClientKey`] with a client's key.
    pub fn bind(options: ListenOptions) -> Result<Self, NetworkError> {
        let asked = options.address;
        let key = match &options.auth {
            Auth::Key(key) => Some(key.identity()),
            Auth::Insecure => None,
            Auth::Client(_) => return Err(NetworkError::ClientKey { address: asked }),
        };
        let fail = |operation| {
            move |cause: std::io::Error| SocketError::Io {
                operation,
                address: asked.to_string(),
                cause: cause.into(),
                hint: "; raise the limits on threads and descriptors",
            }
        };
        let socket = socket::listen(asked, &options.congestion)?;
        let address = socket.local_addr().map_err(fail("getsockname"))?;
        let wake = Waker::new().map_err(|error| fail("eventfd")(error.into()))?;
        let inner = Arc::new(Inner {
            address,
            refusals: Mutex::default(),
            accepted: Mutex::new(VecDeque::new()),
            arrived: Condvar::new(),
            stop: AtomicBool::new(false),
            wake,
        });
        let options = (options.one_time, options.congestion);
        let mut acceptor = Acceptor::new(socket, Arc::clone(&inner), key, options);
        let thread = std::thread::Builder::new()
            .name("tcpx-accept".to_owned())
            .spawn(move || acceptor.run())
            .map_err(fail("starting the acceptor thread"))?;
        Ok(Self {
            inner,
            thread: Some(thread),
            generation: fork::generation(),
        })
    }

    /// The address with the port that was bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.address
    }

    /// What was turned away until now.
    pub fn refusals(&self) -> Refusals {
        self.inner.refusals()
    }

    /// For [`accept_unless`](Self::accept_unless).
    pub fn nudge(&self) -> ListenerNudge {
        ListenerNudge(Arc::clone(&self.inner))
    }

    /// The next authenticated control connection.
    ///
    /// # Errors
    /// [`NetworkError::AcceptTimedOut`] when none came before the deadline,
    /// [`NetworkError::ListenerClosed`] when the acceptor has ended.
    pub fn accept(&self, deadline: Instant) -> Result<Accepted, NetworkError> {
        loop {
            if let Some(accepted) = self.accept_unless(deadline, true, || false)? {
                return Ok(accepted);
            }
        }
    }

    /// As [`accept`](Self::accept), but `None` once `other` is true, which is asked at first and
    /// after each [`ListenerNudge::nudge`]; with `takes` off that is all it waits for.
    ///
    /// # Errors
    /// As for [`accept`](Self::accept).
    pub fn accept_unless(
        &self,
        deadline: Instant,
        takes: bool,
        mut other: impl FnMut() -> bool,
    ) -> Result<Option<Accepted>, NetworkError> {
        let address = self.inner.address;
        let started = Instant::now();
        let mut waiting = lock(&self.inner.accepted);
        loop {
            if other() {
                return Ok(None);
            }
            if takes && let Some(accepted) = waiting.pop_front() {
                return Ok(Some(accepted));
            }
            if self.inner.stop.load(Ordering::Acquire) {
                return Err(NetworkError::ListenerClosed { address });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NetworkError::AcceptTimedOut {
                    address,
                    waited: started.elapsed(),
                });
            }
            waiting = self
                .inner
                .arrived
                .wait_timeout(waiting, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// Has those that wait at a listener look again.
#[derive(Debug, Clone)]
pub struct ListenerNudge(Arc<Inner>);

impl ListenerNudge {
    /// As [`Listener::refusals`], also when that has gone.
    pub fn refusals(&self) -> Refusals {
        self.0.refusals()
    }

    /// After what they wait for beside peers has come true.
    pub fn nudge(&self) {
        // Whoever has looked already waits before this has the lock.
        drop(lock(&self.0.accepted));
        self.0.arrived.notify_all();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.generation != fork::generation() {
            // The thread is the other process's, which goes on listening.
            std::mem::forget(self.thread.take());
            return;
        }
        self.inner.stop.store(true, Ordering::Release);
        self.inner.wake.wake();
        if let Some(thread) = self.thread.take() {
            // A panic there was reported by the panic hook; there is nothing left to undo.
            let _ = thread.join();
        }
    }
}
