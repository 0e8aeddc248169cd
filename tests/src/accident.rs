//! What happens to a peer program at a named point of the protocol.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use tcpx::{Event, Observer};

/// Points at which a program can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Point {
    /// The connection is up.
    Connected,
    /// The first transfer started.
    Started,
    /// The first chunk was given to the network.
    ChunkPosted,
    /// The first chunk was sent.
    ChunkSent,
    /// The first chunk arrived in fragments.
    ChunkArrived,
    /// The first chunk is at its destination.
    ChunkPlaced,
    /// Half of what arrives is at its destination.
    HalfPlaced,
    /// Every transfer has ended and the goodbye has not begun.
    BeforeClose,
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// `SIGKILL`: the system closes its sockets.
    Kill,
    /// `SIGSTOP`: its sockets stay open and nobody answers.
    Stop,
    /// `SIGSTOP`, as long as the test likes; then it goes on.
    Rest,
}

/// An end at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accident {
    /// When.
    pub at: Point,
    /// How.
    pub how: How,
}

impl Accident {
    /// Whether an error of the other side says that this happened.
    pub fn explains(self, error: &str) -> bool {
        let words = match self.how {
            How::Kill => [
                "the peer closed ",
                "reset by peer",
                "Broken pipe",
                "the peer is gone",
            ]
            .as_slice(),
            How::Stop => &["nothing arrived from the peer for "],
            How::Rest => &[],
        };
        words.iter().any(|words| error.contains(words))
    }

    /// Ends or stops this process.
    fn happen(self) {
        let signal = match self.how {
            How::Kill => Signal::KILL,
            How::Stop | How::Rest => Signal::STOP,
        };
        // A process may always signal itself. Another thread may take the signal, so this one goes
        // no further meanwhile.
        let _ = kill_process(getpid(), signal);
        if self.how == How::Rest {
            return;
        }
        std::thread::sleep(ENOUGH);
        std::process::abort();
    }
}

/// Time for a signal to arrive, and for a test to end a stopped program.
const ENOUGH: Duration = Duration::from_secs(120);

/// Counts what arrives, and has accidents.
#[derive(Debug)]
pub struct Witness {
    accident: Option<Accident>,
    happened: AtomicBool,
    half: u64,
    placed: AtomicU64,
    arrivals: AtomicU64,
}

impl Witness {
    /// For a program that `incoming` bytes will arrive at.
    pub fn new(accident: Option<Accident>, incoming: u64) -> Self {
        Self {
            accident,
            happened: AtomicBool::new(false),
            half: incoming / 2,
            placed: AtomicU64::new(0),
            arrivals: AtomicU64::new(0),
        }
    }

    /// Chunks that arrived in fragments.
    pub fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Relaxed)
    }

    /// The program is at this point.
    pub fn reach(&self, at: Point) {
        if let Some(accident) = self.accident
            && at == accident.at
            && !self.happened.swap(true, Ordering::Relaxed)
        {
            accident.happen();
        }
    }
}

impl Observer for Witness {
    fn event(&self, event: &Event) {
        match event {
            Event::Connected { .. } => self.reach(Point::Connected),
            Event::Started { .. } => self.reach(Point::Started),
            Event::ChunkPosted(_) => self.reach(Point::ChunkPosted),
            Event::ChunkSent(_) => self.reach(Point::ChunkSent),
            Event::ChunkArrived { .. } => {
                self.arrivals.fetch_add(1, Ordering::Relaxed);
                self.reach(Point::ChunkArrived);
            }
            Event::ChunkPlaced { chunk, .. } => {
                let length = u64::from(chunk.length);
                let placed = self.placed.fetch_add(length, Ordering::Relaxed) + length;
                self.reach(Point::ChunkPlaced);
                if placed >= self.half {
                    self.reach(Point::HalfPlaced);
                }
            }
            _ => {}
        }
    }
}
