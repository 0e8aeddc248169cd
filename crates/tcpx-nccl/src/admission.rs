//! Strangers at a listening socket of the plugin, until they prove that they know its secret.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nccl_net::export::{Log, NetError};
use rustix::event::PollFd;
use tcpx_lanes::Congestion;
use tcpx_lanes::door::{Arrival, Door, LineQuota};
use tcpx_lanes::hello::send_message;
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::socket::prepare_comm;
use tcpx_wire::Key;
use tcpx_wire::handshake::{Established, SessionId};

use crate::error;
use crate::held::{Listener, Stream};
use crate::link::Link;

/// Time for a handshake, which the other side polls like we do.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// A door, and what has come in.
#[derive(Debug)]
pub(crate) struct Admission {
    door: Door<Listener, Stream>,
    protection: Protection,
    admitted: VecDeque<Admitted>,
    lines: LineQuota,
}

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) link: Link,
    pub(crate) peer: SocketAddr,
    /// Names it at both ends.
    pub(crate) session: SessionId,
}

impl Admission {
    pub(crate) fn new(socket: Listener, (key, protection): (&Key, Protection)) -> Self {
        let congestion = Congestion::Automatic;
        Self {
            door: Door::new(socket, Some(key.identity()), congestion, HANDSHAKE_TIME),
            protection,
            admitted: VecDeque::new(),
            lines: LineQuota::new(Instant::now()),
        }
    }

    /// Waits for something to do here or at `others`, until `due` at the latest.
    pub(crate) fn wait<'a>(
        &'a mut self,
        others: impl IntoIterator<Item = PollFd<'a>>,
        due: Option<Instant>,
    ) -> io::Result<()> {
        self.door.wait(others, due)
    }

    /// The next connection that proved itself; `None`: none now. `name` is for the log.
    pub(crate) fn next(&mut self, log: &Log, name: &str) -> Result<Option<Admitted>, NetError> {
        if self.admitted.is_empty() {
            let failed = |error| error::system("poll", error, "raise the limits on memory");
            self.wait([], Some(Instant::now())).map_err(failed)?;
            self.turn(log, name);
        }
        Ok(self.admitted.pop_front())
    }

    fn turn(&mut self, log: &Log, name: &str) {
        for arrival in self.door.turn(false) {
            let (peer, reason) = match arrival {
                Arrival::Client(greeting, established) => {
                    let peer = greeting.peer();
                    match self.welcome(greeting.into_stream(), *established, peer) {
                        Ok(admitted) => {
                            self.admitted.push_back(admitted);
                            continue;
                        }
                        Err(error) => (peer, error.to_string()),
                    }
                }
                Arrival::LaneRequest(greeting, _) | Arrival::Lane(greeting, _) => {
                    (greeting.peer(), "a lane of the embedded network".to_owned())
                }
                Arrival::Refused {
                    is_silent: true, ..
                } => continue,
                Arrival::Refused { peer, reason, .. } => (peer, reason),
                // Our peer may wait in the backlog, so this is no end, but it must be seen.
                Arrival::Exhausted { error, .. } => {
                    self.tell(log, &format!("{name}: accept: {error}"));
                    continue;
                }
            };
            self.tell(log, &format!("{name}: refused {peer}: {reason}"));
        }
    }

    fn welcome(
        &self,
        stream: Stream,
        mut established: Established,
        peer: SocketAddr,
    ) -> io::Result<Admitted> {
        prepare_comm(&stream)?;
        send_message(&stream, &established.welcome())?;
        Ok(Admitted {
            link: Link::new(stream, Some(established.records), self.protection),
            peer,
            session: established.session.id,
        })
    }

    fn tell(&mut self, log: &Log, line: &str) {
        let (is_line, suppressed) = self.lines.take(Instant::now());
        if let Some(lines) = suppressed {
            log.warn(&format!("{lines} more connections were refused"));
        }
        if is_line {
            log.warn(line);
        }
    }
}
