//! From an authenticated control stream to a running connection: settings, the network's set-up
//! rounds, data channels.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use tcpx_memory::{CopyWorker, MemoryKind, SmallCopies};
use tcpx_net::{Channel, Exchange, LaneInbox, NetworkError, Readiness, Setup, Side};
use tcpx_wire::handshake;
use tcpx_wire::session::{Action, CHUNK_GRAIN_BYTES, Config};
use tcpx_wire::{Session, Settings, Time};

use crate::connection::{Connection, Patience, PeerInfo, Shared};
use crate::control::Control;
use crate::core::{Core, Parts, Resume, Unpacker};
use crate::driver::{Driver, timespec};
use crate::error::Error;
use crate::event::Event;
use crate::options::Options;
use crate::sink::Sink;

/// What the handshake left.
pub(crate) struct Authenticated {
    pub(crate) stream: TcpStream,
    pub(crate) leftover: Vec<u8>,
    pub(crate) session: handshake::Session,
    pub(crate) side: Side,
    /// Client: the address it dialled. Server: the client's address.
    pub(crate) peer: SocketAddr,
    pub(crate) lanes: Option<LaneInbox>,
    /// Server: the address that it listens on.
    pub(crate) listening: Option<SocketAddr>,
}

/// Sets the connection up and gives it to a driver.
pub(crate) fn establish(
    authenticated: Authenticated,
    options: &Options,
    deadline: Instant,
) -> Result<Connection, Error> {
    let Authenticated {
        stream,
        leftover,
        session: secrets,
        side,
        peer,
        lanes,
        listening,
    } = authenticated;
    let local = stream
        .local_addr()
        .map_err(|error| Error::system("reading the control socket's address", error))?;
    let control = Control::new(stream, &leftover, secrets.resumes());
    let mut set_up = SetUp::new(control, options, peer, deadline, secrets.tapers())?;
    let inbox = lanes.clone();
    let settings = set_up.wait("the peer's settings", |action| match action {
        Action::PeerSettings(settings) => Ok(settings),
        other => Err(other),
    })?;
    let worker = match &options.gpu {
        Some(gpu) => CopyWorker::for_gpu(gpu)?,
        None => CopyWorker::host()?,
    };
    let gpu_worker = std::slice::from_ref(&worker);
    let setup = Setup {
        side,
        session: &secrets,
        local,
        peer,
        channels: options.channels,
        deadline,
        congestion: &options.congestion,
        workers: options.gpu.as_ref().map_or(&[], |_| gpu_worker),
        lanes,
        listening,
    };
    let channels = options.network.establish(&setup, &mut set_up)?;
    set_up.session.ready();
    set_up.wait("the peer's data channels", |action| match action {
        Action::PeerReady => Ok(()),
        other => Err(other),
    })?;
    let resume = secrets.resumes().then_some((secrets, side, inbox));
    run(set_up, channels, settings, worker, options, resume)
}

/// Gives an established connection to its driver.
fn run(
    set_up: SetUp,
    channels: Vec<Box<dyn Channel>>,
    settings: Settings,
    worker: Arc<CopyWorker>,
    options: &Options,
    resume: Option<(handshake::Session, Side, Option<LaneInbox>)>,
) -> Result<Connection, Error> {
    let system = |error| Error::system("starting the engine's thread", error);
    let poll_only = channels
        .iter()
        .any(|channel| matches!(channel.readiness(), Readiness::PollOnly));
    let driver = if poll_only {
        Driver::new("tcpx-plugin")
    } else if options.network.works_in_poll() {
        Driver::new("tcpx-engine")
    } else {
        Driver::shared()
    };
    let driver = driver.map_err(system)?;
    let id = driver.reserve();
    driver
        .watch(id, set_up.control.as_fd(), false)
        .map_err(system)?;
    for channel in &channels {
        if let Readiness::Fd(fd) = channel.readiness() {
            driver.watch(id, fd, false).map_err(system)?;
        }
    }
    let agreed = set_up.session.agreed().ok_or(Error::TimedOut {
        peer: set_up.peer,
        what: "the exchange of settings",
        limit: Duration::ZERO,
    })?;
    let peer = PeerInfo {
        address: set_up.peer,
        network: settings.network,
        channels: agreed.channels,
        chunk_bytes: agreed.chunk_bytes,
        memory: settings.memory,
        software: settings.software,
    };
    let path = describe_path(&channels, &peer, options);
    tracing::info!(peer = %peer.address, %path, "connected");
    let small = small_copies(options, agreed.eager_limit);
    let core = Core::new(Parts {
        session: set_up.session,
        control: set_up.control,
        channels,
        unpacker: Unpacker::new(worker, options.unpack),
        gpu: options.gpu.clone(),
        small,
        sink: Sink::new(Arc::clone(&driver), id),
        observer: options.observer.clone(),
        peer: set_up.peer,
        origin: set_up.origin,
        resume: resume.map(|(session, side, inbox)| {
            let congestion = options.congestion.clone();
            Resume::new(session, side, inbox, congestion, &driver, id)
        }),
        early: set_up.pending,
    });
    core.emit(&Event::Connected {
        peer: peer.address,
        network: peer.network.clone(),
        channels: peer.channels,
    });
    // Networks that can only be polled are those of foreign code.
    let patience = Patience::new(poll_only, options.deadlines.stall);
    let shared = Shared::new(core, Arc::clone(&driver), id, peer, path, patience);
    driver.add(id, shared.clone()).map_err(system)?;
    Ok(Connection::new(shared))
}

/// What copies small messages to and from the GPU, where they may travel with their announcement.
/// Without it they take the way of large ones.
fn small_copies(options: &Options, eager_limit: u32) -> Option<SmallCopies> {
    let gpu = options.gpu.as_ref().filter(|_| eager_limit > 0)?;
    SmallCopies::new(gpu)
        .inspect_err(|error| {
            tracing::warn!(%error, "small messages of GPU memory travel as large ones");
        })
        .ok()
}

fn describe_path(channels: &[Box<dyn Channel>], peer: &PeerInfo, options: &Options) -> String {
    let first = channels.first().map(|channel| channel.path());
    let channels = match (first, peer.channels) {
        (None, _) => "no data channel".to_owned(),
        (Some(first), 1) => first,
        (Some(first), count) => format!("{count} channels, {first}"),
    };
    let memory = memory_name(options);
    let chunk = peer.chunk_bytes / 1024;
    format!(
        "{channels}; chunks of {chunk} KiB; {memory} here, {} there",
        peer.memory
    )
}

fn memory_name(options: &Options) -> String {
    match &options.gpu {
        Some(gpu) => MemoryKind::Cuda {
            device: gpu.ordinal(),
        }
        .to_string(),
        None => MemoryKind::Host.to_string(),
    }
}

/// A control connection before it has a driver: the caller's thread pumps it.
struct SetUp {
    session: Session,
    control: Control,
    peer: SocketAddr,
    origin: Instant,
    deadline: Instant,
    round: u16,
    /// Actions that came before their time.
    pending: VecDeque<Action>,
}

impl SetUp {
    fn new(
        control: Control,
        options: &Options,
        peer: SocketAddr,
        deadline: Instant,
        tapers: bool,
    ) -> Result<Self, Error> {
        let config = session_config(options, tapers)?;
        let session =
            Session::new(config, Time(0)).map_err(|error| Error::protocol(peer, error))?;
        Ok(Self {
            session,
            control,
            peer,
            origin: Instant::now(),
            deadline,
            round: 0,
            pending: VecDeque::new(),
        })
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// Pumps until `pick` takes an action; it gives back those that it does not want yet.
    fn wait<T>(
        &mut self,
        what: &'static str,
        pick: impl Fn(Action) -> Result<T, Action>,
    ) -> Result<T, Error> {
        let mut looked_at = 0;
        loop {
            self.transmit()?;
            while let Some(action) = self.session.poll_action() {
                if let Action::Closed { failure } = action {
                    return Err(match failure {
                        Some(failure) => Error::lost(self.peer, failure),
                        None => Error::Closed { peer: self.peer },
                    });
                }
                self.pending.push_back(action);
            }
            if self.pending.len() > MOST_PENDING {
                return Err(NetworkError::Control {
                    reason: format!(
                        "the peer sent more than {MOST_PENDING} set-up messages ahead of their turn"
                    ),
                }
                .into());
            }
            while looked_at < self.pending.len() {
                if let Some(action) = self.pending.remove(looked_at) {
                    match pick(action) {
                        Ok(found) => return Ok(found),
                        Err(other) => self.pending.insert(looked_at, other),
                    }
                }
                looked_at += 1;
            }
            self.read(what)?;
        }
    }

    fn transmit(&mut self) -> Result<(), Error> {
        let now = self.now();
        while self.control.has_room()
            && let Some(frame) = self.session.poll_transmit(now)
        {
            self.control
                .queue(&frame)
                .map_err(|end| Error::control(self.peer, end))?;
        }
        self.control.flush();
        Ok(())
    }

    /// Waits for bytes or time, then feeds them to the session.
    fn read(&mut self, what: &'static str) -> Result<(), Error> {
        let now = Instant::now();
        if now >= self.deadline {
            return Err(NetworkError::TimedOut {
                peer: self.peer,
                operation: what,
            }
            .into());
        }
        if !self.take_frames()? {
            self.sleep(now);
            self.take_frames()?;
        }
        let now = self.now();
        if self.session.next_timeout().is_some_and(|due| due <= now) {
            self.session.handle_timeout(now);
        }
        Ok(())
    }

    /// Waits until bytes arrive or something is due.
    fn sleep(&self, now: Instant) {
        let due = self.session.next_timeout().map_or(self.deadline, |due| {
            self.origin + Duration::from_micros(due.0)
        });
        let sleep = self.deadline.min(due).saturating_duration_since(now);
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, self.control.wants_write());
        let timeout = timespec(sleep);
        // Interrupted or timed out: the loop looks at everything again.
        let _ = poll(
            &mut [PollFd::new(&self.control.as_fd(), flags)],
            Some(&timeout),
        );
    }

    /// Feeds frames that have arrived to the session, a few at a time, so that a peer that never
    /// stops sending outlasts neither the deadline nor the memory; `true` if there were any.
    fn take_frames(&mut self) -> Result<bool, Error> {
        for taken in 0..FRAMES_AT_A_TIME {
            let received = self.control.receive();
            let Some(frame) = received.map_err(|end| Error::control(self.peer, end))? else {
                return Ok(taken > 0);
            };
            let now = self.now();
            self.session
                .frame(now, frame)
                .map_err(|error| Error::protocol(self.peer, error))?;
        }
        Ok(true)
    }
}

impl Exchange for SetUp {
    fn exchange(&mut self, payload: &[u8]) -> Result<Vec<u8>, NetworkError> {
        let control = |error: Error| match error {
            Error::Network(error) => error,
            other => NetworkError::Control {
                reason: other.to_string(),
            },
        };
        let expected = self.round;
        self.round += 1;
        self.session
            .setup(expected, false, payload.to_vec())
            .map_err(|error| NetworkError::Control {
                reason: error.to_string(),
            })?;
        let (round, payload) = self
            .wait(
                "the peer's part of the network set-up",
                |action| match action {
                    Action::Setup { round, payload, .. } => Ok((round, payload)),
                    other => Err(other),
                },
            )
            .map_err(control)?;
        if round != expected {
            return Err(NetworkError::Control {
                reason: format!("expected set-up round {expected}, round {round} arrived"),
            });
        }
        Ok(payload)
    }
}

/// Our part of the settings, from the options and the network's defaults. `tapers`: the peer knows
/// shorter chunks at the end.
fn session_config(options: &Options, tapers: bool) -> Result<Config, Error> {
    let network = &options.network;
    let (send_window, receive_window) = network.windows();
    let chunk_bytes = options.chunk_bytes.unwrap_or_else(|| network.chunk_bytes());
    let millis = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
    let eager_limit = if network.allows_eager() {
        options.eager_limit
    } else {
        0
    };
    let settings = Settings {
        network: network.name(),
        channels: network.channel_count(options.channels),
        chunk_bytes,
        send_window: options.send_window.unwrap_or(send_window),
        receive_window: options.receive_window.unwrap_or(receive_window),
        eager_limit,
        eager_credit: EAGER_CREDIT.max(eager_limit),
        heartbeat_ms: millis(options.heartbeat),
        dead_after_ms: millis(options.dead_after),
        memory: memory_name(options),
        software: concat!("tcpx ", env!("CARGO_PKG_VERSION")).to_owned(),
    };
    if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(CHUNK_GRAIN_BYTES) {
        return Err(Error::Setting {
            what: "chunk size",
            expected: format!("a multiple of {CHUNK_GRAIN_BYTES} bytes"),
            arrived: format!("{chunk_bytes} bytes"),
        });
    }
    settings.validate().map_err(|error| Error::Setting {
        what: "settings of the connection",
        expected: "values in their bounds".to_owned(),
        arrived: error.to_string(),
    })?;
    let mut config = Config::new(settings);
    config.deadlines = options.deadlines;
    config.cancellable = network.can_cancel();
    config.report_acknowledged = true;
    config.hold_until_placed = network.matches_by_sequence();
    config.window_spans = network.matches_by_sequence();
    config.close_timeout = CLOSE_TIMEOUT;
    if options.chunk_bytes.is_none() {
        config.pieces = network.pieces(options.channels);
        config.taper = tapers.then(|| network.taper(options.channels)).flatten();
    }
    Ok(config)
}

/// Messages of the peer that may come before their turn; one round of set-up is two or three.
const MOST_PENDING: usize = 64;
/// Frames taken before the clock is looked at.
const FRAMES_AT_A_TIME: usize = 16;
/// Eager bytes that a side holds for messages without a receive.
const EAGER_CREDIT: u32 = 2 * 1024 * 1024;
/// Longest orderly goodbye.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
