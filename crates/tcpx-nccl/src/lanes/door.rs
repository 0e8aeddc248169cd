//! Where lanes come in: a listening socket of the process for each of its addresses.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tcpx_lanes::event_loop::Receivers;
use tcpx_lanes::waker::Waker;
use tcpx_wire::Key;

use super::group::Registry;
use super::receive_lane::receive_lane;
use crate::admission::{Admission, Admitted};
use crate::handle::Door;
use crate::held::Listener;
use crate::log::Log;

/// Handshakes that may be under way: many peers come at once when a job starts.
const MAX_PENDING: usize = 256;
/// Lanes that a process has open; a peer that knows the secret must not fill its memory.
const MAX_LANES: usize = 16_384;
/// Between looks at the deadlines of handshakes, and at a backlog that could not be taken.
const TICK: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

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
    /// Accepts lanes from `listener` for the loops, with what `secret` authenticates.
    pub(crate) fn open(
        listener: Listener,
        secret: [u8; Key::BYTES],
        process: u64,
        loops: Receivers,
        registry: Arc<Registry>,
        log: Arc<Log>,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let wake = Arc::new(Waker::new()?);
        let stop = Arc::new(AtomicBool::new(false));
        let mut acceptor = Acceptor {
            admission: Admission::new(listener, secret, MAX_PENDING),
            wake: wake.clone(),
            stop: stop.clone(),
            loops,
            registry,
            log,
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
    loops: Receivers,
    registry: Arc<Registry>,
    log: Arc<Log>,
}

impl Acceptor {
    fn run(&mut self) {
        while !self.stop.load(Ordering::SeqCst) {
            self.take();
            let watch = PollFlags::IN;
            let mut sockets = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), watch)];
            let pending = self.admission.pending();
            sockets.extend(pending.map(|stream| PollFd::from_borrowed_fd(stream.as_fd(), watch)));
            let choked = self.admission.is_choked();
            let tick = (sockets.len() > 1 || choked).then_some(&TICK);
            if !choked {
                let listener = self.admission.listener().as_fd();
                sockets.push(PollFd::from_borrowed_fd(listener, watch));
            }
            // EINTR is one more look around; nothing else can fail for sockets of ours.
            let _ = poll(&mut sockets, tick);
        }
    }

    fn take(&mut self) {
        loop {
            match self.admission.next(&self.log, "lane door") {
                Ok(Some(Admitted { stream, peer })) => {
                    let open = self.loops.sources();
                    if open >= MAX_LANES {
                        self.log
                            .warn(&format!("refused a lane from {peer}: {open} are open"));
                        continue;
                    }
                    let Some(place) = self.loops.place() else {
                        return;
                    };
                    let (registry, log) = (self.registry.clone(), self.log.clone());
                    let lane = receive_lane(stream, registry, place.clone(), log);
                    place.start(Box::new(lane));
                }
                Ok(None) => return,
                Err(error) => {
                    self.log.warn(&format!("lane door: {error}"));
                    return;
                }
            }
        }
    }
}
