//! Strangers at a listening socket of the plugin, until they prove that they know its secret.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_net::export::{Log, NetError};
use rustix::event::PollFd;
use tcpx_lanes::Congestion;
use tcpx_lanes::door::{Arrival, Door, LineQuota};
use tcpx_lanes::hello::send_message;
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::socket::prepare_lane;
use tcpx_wire::Key;
use tcpx_wire::handshake::Established;

use crate::error;
use crate::held::{Listener, Stream};
use crate::lanes::runtime::Runtime;
use crate::link::Link;
use crate::resume::Comeback;

/// Time for a handshake, which the other side polls like we do.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// A door, and what has come in.
#[derive(Debug)]
pub(crate) struct Admission {
    door: Door<Listener, Stream>,
    protection: Protection,
    /// Where comms' own connections come in, if this is where comms are introduced.
    runtime: Option<Arc<Runtime>>,
    admitted: VecDeque<Admitted>,
    lines: LineQuota,
}

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) link: Link,
    pub(crate) peer: SocketAddr,
    /// Where the connections of the comm that it introduces come.
    pub(crate) comeback: Option<Comeback>,
}

impl Admission {
    pub(crate) fn new(
        socket: Listener,
        (key, protection): (&Key, Protection),
        runtime: Option<Arc<Runtime>>,
    ) -> Self {
        let congestion = Congestion::Automatic;
        Self {
            door: Door::new(socket, Some(key.identity()), congestion, HANDSHAKE_TIME),
            protection,
            runtime,
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
        for arrival in self.door.turn(|| false) {
            let (peer, reason) = match arrival {
                Arrival::Client(greeting, established) => {
                    let peer = greeting.peer;
                    match self.welcome(greeting.stream, *established, peer) {
                        Ok(admitted) => {
                            self.admitted.push_back(admitted);
                            continue;
                        }
                        Err(error) => (peer, error.to_string()),
                    }
                }
                Arrival::LaneRequest(greeting, _) | Arrival::Lane(greeting, _) => {
                    (greeting.peer, "a lane of the embedded network".to_owned())
                }
                Arrival::Refused {
                    is_silent: true, ..
                } => continue,
                Arrival::Refused { peer, reason, .. } => (peer, reason),
                // Our peer may wait in the backlog, so this is no end, but it must be seen.
                Arrival::Exhausted { news, .. } => {
                    if let Some(news) = news {
                        log.warn(&format!("{name}: {news}"));
                    }
                    continue;
                }
            };
            self.log_refusal(log, &format!("{name}: refused {peer}: {reason}"));
        }
    }

    fn welcome(
        &self,
        stream: Stream,
        mut established: Established,
        peer: SocketAddr,
    ) -> io::Result<Admitted> {
        prepare_lane(&stream)?;
        // Before the peer can dial them.
        let (session, peer_ip) = (established.session.id, peer.ip());
        let runtime = self.runtime.as_deref();
        let comeback = runtime.map(|runtime| Comeback::new(runtime, session, peer_ip));
        send_message(&stream, &established.welcome())?;
        Ok(Admitted {
            link: Link::new(stream, Some(established.records), self.protection),
            peer,
            comeback,
        })
    }

    fn log_refusal(&mut self, log: &Log, line: &str) {
        let (is_line, suppressed) = self.lines.take(Instant::now());
        if let Some(lines) = suppressed {
            log.warn(&format!("{lines} more connections were refused"));
        }
        if is_line {
            log.warn(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::io::Write;
    use std::net::TcpStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    use nccl_net::export::HostLogger;

    use super::*;
    use crate::dialer::Dialer;
    use crate::listener::listen_on;

    /// Comes some thousand times a second, and says one byte every other time.
    fn come(address: SocketAddr, stop: &AtomicBool) {
        let mut open = VecDeque::new();
        for number in 0.. {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            let stranger = TcpStream::connect(address);
            if let (Ok(stranger), 0) = (&stranger, number % 2) {
                let _ = (&*stranger).write_all(b"T");
            }
            open.extend(stranger);
            if open.len() > 400 {
                open.pop_front();
            }
            std::thread::sleep(Duration::from_micros(150));
        }
    }

    #[test]
    fn a_host_that_seldom_polls_connects_beside_strangers() {
        let socket = listen_on(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = socket.local_addr().unwrap();
        let key = Key::generate(&mut |bytes| bytes.fill(7));
        let mut admission = Admission::new(socket, (&key, Protection::None), None);
        let log = Log::new(HostLogger::default(), c"TCPX");
        let stop = AtomicBool::new(false);
        let until = Instant::now() + Duration::from_secs(60);
        let polls = std::thread::scope(|scope| {
            scope.spawn(|| come(address, &stop));
            let local = SocketAddr::from(([127, 0, 0, 1], 0));
            let client = (key.client_key(), Protection::None);
            let mut dialer = Dialer::new(local, address, client, until);
            let mut polls = 0;
            let mut is_in = false;
            while !is_in && Instant::now() < until {
                assert!(dialer.poll(Instant::now()).is_ok());
                // It has other things to do.
                std::thread::sleep(Duration::from_millis(100));
                polls += 1;
                is_in = admission.next(&log, "a test").unwrap().is_some();
            }
            stop.store(true, Ordering::Relaxed);
            is_in.then_some(polls)
        });
        // A connection that the system was too busy to keep comes again after a second.
        assert!(polls.is_some_and(|polls| polls < 100), "{polls:?}");
    }
}
