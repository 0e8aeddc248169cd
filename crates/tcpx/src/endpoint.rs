//! Where connections begin: listening and connecting.

mod set_ups;
mod told;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx_memory::{CopyWorker, fork};
use tcpx_net::{
    Accepted, ControlStream, DialOptions, Dialled, ListenOptions, Listener, NetworkError, Refusals,
    Side, dial_first,
};

use crate::connection::Connection;
use crate::error::Error;
use crate::establish::{Authenticated, establish, session_config};
use crate::options::Options;
use crate::wait::deadline;
use set_ups::{HELD, SetUps};
use told::Told;

/// A listening port: control connections and all lanes of the embedded network use it.
///
/// Keep it as long as the connections that it accepted: lanes that died, and a control connection
/// that broke, come back to it. Without it such a connection lives on what it has left.
#[derive(Debug)]
pub struct Endpoint {
    listener: Listener,
    /// The process that listens, among those that forks made.
    generation: u32,
    options: Options,
    set_ups: SetUps,
    is_closed: AtomicBool,
    /// Tells of this endpoint while it lives.
    _told: Told,
}

impl Endpoint {
    /// Listens on `address`; port 0 takes a free one.
    ///
    /// # Errors
    /// The address cannot be used, or a setting cannot work.
    pub fn listen(address: SocketAddr, options: Options) -> Result<Self, Error> {
        // What cannot work is said here rather than to each peer.
        session_config(&options)?;
        prepare_gpu(&options);
        let listener = Listener::bind(ListenOptions {
            address,
            auth: options.auth.clone(),
            one_time: options.one_time,
            congestion: options.congestion.clone(),
        })?;
        Ok(Self {
            _told: Told::new(listener.local_addr(), listener.nudge()),
            set_ups: SetUps::new(listener.nudge(), options.bounds.set_ups, HELD),
            listener,
            is_closed: AtomicBool::new(false),
            generation: fork::generation(),
            options,
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// What was turned away until now: peers with another key, strangers, one too many.
    pub fn refusals(&self) -> Refusals {
        self.listener.refusals()
    }

    /// Waits at most `timeout` for a connection with a peer. Peers that fail to prove themselves
    /// are logged and cost nobody anything. One that has proved itself is set up beside others that
    /// do so meanwhile, within the `connect_timeout` of the options. Connections come in the order
    /// in which their clients were told that they are connected, but a client that does not finish
    /// its part holds up others for a second at most; what is left, also what is still under way
    /// after `timeout`, is for the next calls. Call it again for each further peer, also after an
    /// error: peers connect only while somebody does.
    ///
    /// # Errors
    /// Nobody came in time, or the set-up with an authenticated peer failed.
    pub fn accept(&self, timeout: Duration) -> Result<Connection, Error> {
        loop {
            if let Some(accepted) = self.accept_unless(timeout, || false)? {
                return Ok(accepted);
            }
        }
    }

    /// As [`accept`](Self::accept), but `None` once `other` is true, which is asked at first and
    /// after each [`nudge`](Self::nudge).
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn accept_unless(
        &self,
        timeout: Duration,
        other: impl Fn() -> bool,
    ) -> Result<Option<Connection>, Error> {
        if self.generation != fork::generation() {
            return Err(Error::OtherProcess { what: "endpoint" });
        }
        let until = deadline(Instant::now(), timeout);
        loop {
            if let Some(ended) = self.set_ups.take() {
                return ended.map(Some);
            }
            if other() {
                return Ok(None);
            }
            if self.is_closed.load(Ordering::Acquire) {
                let address = self.local_addr();
                return Err(NetworkError::ListenerClosed { address }.into());
            }
            let (set_ups, takes) = (&self.set_ups, !self.set_ups.are_full());
            let look = set_ups.looks_at().map_or(until, |at| at.min(until));
            let accepted = self.listener.accept_unless(look, takes, || {
                set_ups.has_ended() || other() || self.is_closed.load(Ordering::Acquire)
            });
            match accepted {
                Ok(Some(accepted)) => self.set_up(accepted)?,
                Ok(None) => {}
                Err(NetworkError::AcceptTimedOut { .. }) if look < until => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Ends each [`accept`](Self::accept), of other threads and of later. Connections that it
    /// accepted live on.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.nudge();
    }

    /// Has each [`accept_unless`](Self::accept_unless) look again.
    pub fn nudge(&self) {
        self.listener.nudge().nudge();
    }

    /// Sets a connection up, elsewhere.
    fn set_up(&self, accepted: Accepted) -> Result<(), Error> {
        let control = ControlStream {
            stream: accepted.stream,
            records: accepted.records,
        };
        let authenticated = Authenticated {
            session: accepted.session,
            side: Side::Server,
            peer: accepted.peer,
            lanes: Some(accepted.lanes),
            listening: Some(accepted.listening),
        };
        let options = self.options.clone();
        let until = deadline(Instant::now(), options.connect_timeout);
        self.set_ups
            .start(move |tells| establish(control, authenticated, &options, until, tells))
    }

    /// Connects to another listening endpoint with this one's options; it may accept peers
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub fn connect_to(&self, address: impl ToSocketAddrs) -> Result<Connection, Error> {
        Self::connect(address, &self.options)
    }

    /// Connects to a listening endpoint, without one of our own. `address` is a [`SocketAddr`], or
    /// a name such as `"host-a:12345"`; of several addresses, each is tried a little after the one
    /// before, and the first that answers is taken.
    ///
    /// Looking a name up takes as long as the system takes for it; `connect_timeout` bounds the
    /// rest, which takes as long as the other side's program is not in [`accept`](Self::accept).
    ///
    /// ```no_run
    /// # use tcpx::{Auth, Endpoint, Key, Options};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let options = Options::tcp(Auth::Key(Key::parse(&std::env::var("TCPX_KEY")?)?));
    /// let connection = Endpoint::connect("host-a:12345", &options)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The name is not known, the peer cannot be reached, is not tcpx, has another key or other
    /// settings, or did not finish the set-up in time.
    pub fn connect(address: impl ToSocketAddrs, options: &Options) -> Result<Connection, Error> {
        session_config(options)?;
        prepare_gpu(options);
        let found = address.to_socket_addrs().map_err(Error::unresolved)?;
        let mut addresses: Vec<_> = found.collect();
        let until = deadline(Instant::now(), options.connect_timeout);
        let mut outcome = Err(Error::unresolved(io::Error::other("it has no address")));
        while !addresses.is_empty() {
            let dialled = dial_first(
                &addresses,
                &options.auth,
                &DialOptions {
                    congestion: options.congestion.clone(),
                    deadline: until,
                },
            )?;
            addresses.retain(|address| *address != dialled.peer);
            outcome = Self::set_up_with(dialled, options, until);
            match &outcome {
                Err(Error::Network(error)) if error.is_silence() => {}
                _ => break,
            }
        }
        outcome
    }

    fn set_up_with(
        dialled: Dialled,
        options: &Options,
        until: Instant,
    ) -> Result<Connection, Error> {
        let control = ControlStream {
            stream: dialled.stream,
            records: dialled.records,
        };
        let authenticated = Authenticated {
            session: dialled.session,
            side: Side::Client,
            peer: dialled.peer,
            lanes: None,
            listening: None,
        };
        establish(control, authenticated, options, until, &mut || ())
    }
}

/// Begins what the first connection on a GPU takes, so that it is done beside all else that a
/// set-up does.
fn prepare_gpu(options: &Options) {
    if let Some(gpu) = &options.gpu {
        CopyWorker::prepare(gpu);
    }
}
