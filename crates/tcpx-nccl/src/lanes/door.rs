//! Where lanes and comms' own connections come in: a listening socket of the process for each of
//! its addresses.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nccl_net::export::Log;
use rustix::event::{PollFd, PollFlags};
use tcpx_lanes::event_loop::{Loop, Loops};
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::socket;
use tcpx_lanes::socket_calls::Moved;
use tcpx_lanes::waker::Waker;
use tcpx_wire::Key;

use super::group::Registry;
use super::hello::{Greeting, Hello, Part, Resumption};
use super::receive_lane::{receive_lane, refuse};
use crate::admission::{Admission, Admitted};
use crate::handle::Door;
use crate::held::Listener;
use crate::link::Link;

/// Connections that may wait for the other one of their pair: many peers come at once when a job
/// starts.
const MAX_PENDING: usize = 256;
/// Halves of lanes that a process has open, its own sending ones among them; a peer that knows the
/// secret must not fill its memory.
const MOST_HALVES: usize = 32_768;
/// Time to say what a connection is for, and for the other one of its pair to come; its peer dials
/// both at once.
const HELLO_TIME: Duration = Duration::from_secs(10);
/// Between looks at the deadlines of those that have proved themselves.
const TICK: Duration = Duration::from_secs(1);

/// A listening socket and the thread that accepts from it.
#[derive(Debug)]
pub(crate) struct LaneDoor {
    address: IpAddr,
    door: Door,
    wake: Arc<Waker>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl LaneDoor {
    /// Accepts what `key` authenticates, and seals if it says so, from `listener`, made of the
    /// `secret` that its handles show: lanes for the loops, of which there may be none, and
    /// connections for comms.
    pub(crate) fn open(
        listener: Listener,
        secret: [u8; Key::BYTES],
        key: (&Key, Protection),
        process: u64,
        loops: Loops,
        registry: Arc<Registry>,
        log: Arc<Log>,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let lanes = loops.fewest().is_some();
        let wake = Arc::new(Waker::new()?);
        let stop = Arc::new(AtomicBool::new(false));
        let mut acceptor = Acceptor {
            admission: Admission::new(listener, key, None),
            wake: wake.clone(),
            stop: stop.clone(),
            loops,
            registry,
            log,
            newcomers: Vec::new(),
            halves: Halves::default(),
        };
        let thread = std::thread::Builder::new()
            .name("tcpx-nccl-door".to_owned())
            .spawn(move || acceptor.run())?;
        Ok(Self {
            address: address.ip(),
            door: Door {
                port: address.port(),
                process,
                secret,
                lanes,
            },
            wake,
            stop,
            thread: Some(thread),
            process: std::process::id(),
        })
    }

    /// The address that it listens on.
    pub(crate) const fn address(&self) -> IpAddr {
        self.address
    }

    /// What a handle says of it.
    pub(crate) const fn door(&self) -> Door {
        self.door
    }
}

impl Drop for LaneDoor {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if self.process != std::process::id() {
            // A fork left the thread in the other process.
            std::mem::forget(thread);
            return;
        }
        self.stop.store(true, Ordering::SeqCst);
        self.wake.wake();
        let _ = thread.join();
    }
}

struct Acceptor {
    admission: Admission,
    wake: Arc<Waker>,
    stop: Arc<AtomicBool>,
    loops: Loops,
    registry: Arc<Registry>,
    log: Arc<Log>,
    /// Authenticated, and silent about what they are for.
    newcomers: Vec<Newcomer>,
    halves: Halves,
}

/// Connections that wait for the other one of their pair, the oldest first. One that waits in vain
/// is reset: its end in order would say that its comm is gone.
#[derive(Default)]
struct Halves(VecDeque<Half>);

struct Half {
    greeting: Greeting,
    part: Part,
    link: Link,
    until: Instant,
}

impl Halves {
    /// The pair, payload's first, if the other one is there.
    fn pair(&mut self, half: Half) -> Option<[Link; 2]> {
        let is_other = |one: &Half| one.greeting == half.greeting && one.part != half.part;
        let other = self.0.iter().position(is_other);
        let Some(other) = other.and_then(|at| self.0.remove(at)) else {
            if self.0.len() >= MAX_PENDING
                && let Some(oldest) = self.0.pop_front()
            {
                socket::abort(oldest.link.as_fd());
            }
            self.0.push_back(half);
            return None;
        };
        Some(match half.part {
            Part::Payload => [half.link, other.link],
            Part::Answers => [other.link, half.link],
        })
    }

    fn expire(&mut self, now: Instant) {
        self.0.retain(|half| {
            let waits = now < half.until;
            if !waits {
                socket::abort(half.link.as_fd());
            }
            waits
        });
    }
}

struct Newcomer {
    link: Link,
    peer: SocketAddr,
    until: Instant,
    hello: [u8; Greeting::BYTES],
    /// Bytes of `hello` that have come.
    have: usize,
}

impl Acceptor {
    fn run(&mut self) {
        while !self.stop.load(Ordering::SeqCst) {
            self.take();
            let watch = |one| PollFd::from_borrowed_fd(one, PollFlags::IN);
            let newcomers = self.newcomers.iter().map(|one| watch(one.link.as_fd()));
            let others = newcomers.chain([watch(self.wake.as_fd())]);
            let waits = !self.newcomers.is_empty() || !self.halves.0.is_empty();
            let tick = waits.then(|| Instant::now() + TICK);
            // Nothing can fail for sockets of ours; without memory it is one more look around.
            let _ = self.admission.wait(others, tick);
        }
    }

    fn take(&mut self) {
        loop {
            match self.admission.next(&self.log, "lane door") {
                Ok(Some(Admitted { link, peer, .. })) => self.newcomers.push(Newcomer {
                    link,
                    peer,
                    until: Instant::now() + HELLO_TIME,
                    hello: [0; Greeting::BYTES],
                    have: 0,
                }),
                Ok(None) => break,
                Err(error) => {
                    self.log.warn(&format!("lane door: {error}"));
                    break;
                }
            }
        }
        let now = Instant::now();
        self.halves.expire(now);
        for mut newcomer in std::mem::take(&mut self.newcomers) {
            let rest = &mut newcomer.hello[newcomer.have..];
            match newcomer.link.receive_no_more(rest) {
                Ok(Moved::Bytes(bytes)) => newcomer.have += bytes,
                Ok(Moved::WouldBlock) if now < newcomer.until => {}
                // It has ended, or says nothing; an end in order would say that its comm is gone.
                _ => {
                    socket::abort(newcomer.link.as_fd());
                    continue;
                }
            }
            match newcomer.have {
                Greeting::BYTES => self.enter(newcomer),
                _ => self.newcomers.push(newcomer),
            }
        }
    }

    /// A connection has said what it is for.
    fn enter(
        &mut self,
        Newcomer {
            link,
            peer,
            until,
            hello,
            ..
        }: Newcomer,
    ) {
        let (greeting, part) = match Greeting::decode(&hello) {
            Ok(greeted) => greeted,
            Err(violation) => return refuse(&self.log, &peer.to_string(), &violation),
        };
        match greeting {
            // The end of a connection tells its sender that the comm is gone.
            Greeting::Comm(Resumption { session, .. }) if self.registry.comm(session).is_none() => {
                return;
            }
            Greeting::Comm(_) | Greeting::Lane(_) => {}
        }
        let half = Half {
            greeting,
            part,
            link,
            until,
        };
        let Some(pair) = self.halves.pair(half) else {
            return;
        };
        match greeting {
            Greeting::Lane(hello) => self.open(&hello, pair, peer),
            Greeting::Comm(Resumption { session, epoch }) => {
                if let Some(inbox) = self.registry.comm(session) {
                    inbox.put(epoch, pair);
                }
            }
        }
    }

    /// Both connections of a lane are there.
    fn open(&self, hello: &Hello, pair: [Link; 2], peer: SocketAddr) {
        let open = self.loops.sources();
        if open >= MOST_HALVES {
            self.log
                .warn(&format!("refused a lane from {peer}: {open} are open"));
            return;
        }
        let Some(place) = self.loops.fewest().map(Loop::place) else {
            return;
        };
        let (registry, log) = (self.registry.clone(), self.log.clone());
        match receive_lane(pair, hello, registry, place.clone(), log) {
            Ok(lane) => place.start(Box::new(lane)),
            Err(violation) => refuse(&self.log, &peer.to_string(), &violation),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpStream;

    use tcpx_wire::handshake::SessionId;

    use super::*;

    fn half(epoch: u32, part: Part, until: Instant) -> (Half, TcpStream) {
        let (link, far) = Link::bare();
        let session = SessionId([7; 16]);
        let half = Half {
            greeting: Greeting::Comm(Resumption { session, epoch }),
            part,
            link,
            until,
        };
        (half, far)
    }

    #[test]
    fn half_a_pair_is_reset_and_not_ended() {
        let (mut halves, now) = (Halves::default(), Instant::now());
        let mut far = Vec::new();
        for epoch in 0..MAX_PENDING as u32 + 1 {
            let (half, peer) = half(epoch, Part::Answers, now + HELLO_TIME);
            assert!(halves.pair(half).is_none());
            far.push(peer);
        }
        let (last, _far) = half(MAX_PENDING as u32, Part::Payload, now);
        assert!(halves.pair(last).is_some());
        let paired = far.pop();
        halves.expire(now + HELLO_TIME);
        for mut peer in far {
            let error = peer.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
        drop(paired);
    }
}
