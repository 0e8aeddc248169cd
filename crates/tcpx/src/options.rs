//! What a user may choose for an endpoint or a connection.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tcpx_memory::{Gpu, UnpackMethod};
use tcpx_net::{Auth, Congestion, Network};
use tcpx_wire::Key;
use tcpx_wire::frame::{Limits, MAX_EAGER_BYTES};
use tcpx_wire::session::{Deadlines, SessionBounds};

use crate::error::Error;
use crate::event::Observer;

/// Who makes progress on a connection; each side chooses for itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProgressMode {
    /// A thread that waits makes progress while it waits, and the engine's thread at all other
    /// times.
    #[default]
    Background,
    /// Only the program makes progress: in [`Transfer::wait`](crate::Transfer::wait) and its
    /// relatives, in [`Transfer::test`](crate::Transfer::test), and in
    /// [`Connection::progress`](crate::Connection::progress). No thread is woken for what the peer
    /// sends. A program that does none of these for a while receives nothing meanwhile, but stays
    /// connected: the engine's thread still sends heartbeats and sees to deadlines. Once the
    /// connection closes or is lost, that thread finishes it.
    ///
    /// For programs with a thread that polls anyway, and for hosts with few cores. Networks of
    /// foreign code (plugins) do not have it.
    Manual,
}

/// How much a side does at a time, whatever its peer asks for: nothing depends on it but speed and
/// fairness. Tests draw it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// How long a turn may take before the lock and the thread are given to others.
    pub turn: Duration,
    /// Jobs that one connection has with the copy worker at a time; the others wait in the
    /// connection.
    pub jobs: usize,
    /// How long the start of a send may wait for a small message's bytes: by default several times
    /// what the copy takes on a GPU at rest.
    pub small_read: Duration,
    /// Pause before a copy worker is tried again whose queue other connections have filled.
    pub retry: Duration,
    /// Set-ups of peers at a time; further ones wait at the listener.
    pub set_ups: usize,
    /// Frames that a set-up takes before it looks at the clock.
    pub frames: usize,
    /// What the peer says ahead of its turn while a set-up waits for lanes; more stays in the
    /// socket.
    pub pending: usize,
    /// Messages beyond that which no peer needs to send ahead of their turn while this side waits
    /// for its part; one round of set-up is two or three, and what has come is counted once for all
    /// frames that are taken.
    pub ahead: usize,
    /// Eager bytes that a side holds for messages without a receive; not less than its longest one.
    pub eager_credit: u32,
    /// Of its session.
    pub session: SessionBounds,
    /// Bytes queued for the peer before the session is asked for no more frames. Every kind of
    /// frame is bounded by a window of its own, so this only limits what lies in user memory.
    pub queued: u64,
    /// Frames after which the peer is told what has arrived, and bytes of them, which must be fewer
    /// than it queues.
    pub told_frames: u32,
    /// See there.
    pub told_bytes: usize,
    /// Short steps of a turn, frames and actions, between two looks at the clock.
    pub steps: u32,
    /// Jobs of all connections with the copy worker at a time before those of this one wait; more
    /// of its queue is for jobs that hold a slot of a network.
    pub queue: usize,
    /// How long a connection that nobody holds any more may take for its goodbye. What is left of
    /// it then is nothing that its program would hear of: sends of level *sent*, and what the peer
    /// does in its windows.
    pub leave: Duration,
    /// So many messages in a row must have come one at a time before a thread that waits for one
    /// moves its bytes too.
    pub alone: u8,
    /// Fences that are looked at ahead; those of more operations are looked at when their bytes
    /// move.
    pub fences: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            turn: Duration::from_micros(200),
            jobs: 64,
            small_read: Duration::from_micros(50),
            retry: Duration::from_millis(1),
            set_ups: 16,
            frames: 16,
            pending: 32,
            ahead: 64,
            eager_credit: 2 << 20,
            session: SessionBounds::default(),
            queued: 2 << 20,
            told_frames: 64,
            told_bytes: 256 << 10,
            steps: 32,
            queue: 3072,
            leave: Duration::from_secs(5),
            alone: 8,
            fences: 64,
        }
    }
}

/// Settings of an endpoint or a connection.
///
/// [`Options::new`] gives defaults that need no tuning: the given network, automatic sizes.
#[derive(Clone)]
pub struct Options {
    /// The network that carries the payload. Both sides must choose the same kind.
    pub network: Arc<dyn Network>,
    /// How the two sides prove themselves to each other.
    pub auth: Auth,
    /// Encrypts payload, which else only small messages are: both sides must. Only the embedded
    /// network can, and only with a key. False by default.
    pub encrypt: bool,
    /// Data channels; 0 lets the network choose. For the embedded network: its lanes.
    pub channels: u16,
    /// Congestion control of every TCP socket of ours: set first and read back, or an error.
    pub congestion: Congestion,
    /// Bytes that one request of the network carries; `None` lets the network choose. The smaller
    /// of both sides' values is used.
    pub chunk_bytes: Option<u32>,
    /// Chunks in flight per channel when sending; `None` lets the network choose.
    pub send_window: Option<u16>,
    /// Chunks in flight per channel when receiving; `None` lets the network choose.
    pub receive_window: Option<u16>,
    /// How scattered payload is put in place; `None` takes the fastest way that works here.
    pub unpack: Option<UnpackMethod>,
    /// Limits of every operation that sets none of its own.
    pub deadlines: Deadlines,
    /// Limit for the whole set-up of a connection; 10 s by default.
    pub connect_timeout: Duration,
    /// Control connection idle time after which a heartbeat is sent; 1 s by default.
    pub heartbeat: Duration,
    /// Silence of the peer after which it counts as dead; 10 s by default.
    pub dead_after: Duration,
    /// Largest message that travels with its announcement, over the control connection, while no
    /// other one is under way; half of it beside others. 128 KiB by default, which is the most.
    pub eager_limit: u32,
    /// What this side takes of its peer at a time: the peer keeps the rest, and begins that as
    /// others end.
    pub limits: Limits,
    #[doc(hidden)]
    pub bounds: Bounds,
    /// The GPU whose memory this side moves; `None` for host memory only.
    pub gpu: Option<Gpu>,
    /// Whether a kernel stays on the GPU for a moment where one small message follows another, and
    /// copies them without a call of the driver for each; true by default. It takes 256 threads of
    /// one multiprocessor, and whoever waits for the whole device waits for it too, about a
    /// millisecond at most.
    pub persistent_kernel: bool,
    /// Who makes progress; [`ProgressMode::Background`] by default.
    pub progress: ProgressMode,
    /// Told about every step, for progress bars, logs and tests.
    pub observer: Option<Arc<dyn Observer>>,
    /// A listening endpoint accepts one authenticated session only, then its key is spent.
    pub one_time: bool,
    /// What the peer gets to know of this program
    /// ([`PeerInfo::software`](crate::PeerInfo::software)); our name and version by default.
    pub software: String,
}

impl Options {
    /// Defaults for `network` with `auth`.
    pub fn new(network: Arc<dyn Network>, auth: Auth) -> Self {
        Self {
            network,
            auth,
            encrypt: false,
            channels: 0,
            congestion: Congestion::Automatic,
            chunk_bytes: None,
            send_window: None,
            receive_window: None,
            unpack: None,
            deadlines: Deadlines::default(),
            connect_timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(1),
            dead_after: Duration::from_secs(10),
            eager_limit: MAX_EAGER_BYTES as u32,
            limits: Limits::default(),
            bounds: Bounds::default(),
            gpu: None,
            persistent_kernel: true,
            progress: ProgressMode::Background,
            observer: None,
            one_time: false,
            software: concat!("tcpx ", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }

    /// Defaults for the embedded TCP network.
    pub fn tcp(auth: Auth) -> Self {
        Self::new(Arc::new(tcpx_net::TcpNetwork::default()), auth)
    }
}

/// A fresh key for [`Auth::Key`], from the system's randomness.
///
/// # Errors
/// The system has none.
pub fn generate_key() -> Result<Key, Error> {
    let mut filled = Ok(());
    let key = Key::generate(&mut |bytes| filled = getrandom::fill(bytes));
    filled.map_err(|error| Error::system("making a key", io::Error::other(error)))?;
    Ok(key)
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("network", &self.network.features(self.channels).name)
            .field("encrypt", &self.encrypt)
            .field("channels", &self.channels)
            .field("congestion", &self.congestion)
            .field("chunk_bytes", &self.chunk_bytes)
            .field("unpack", &self.unpack)
            .field("deadlines", &self.deadlines)
            .finish_non_exhaustive()
    }
}
