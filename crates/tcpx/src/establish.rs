//! From an authenticated control stream to a running connection: settings, the network's set-up
//! rounds, data channels.

mod set_up;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_memory::{CopyWorker, MemoryKind, SmallCopies, TagKey};
use tcpx_net::{
    Auth, Channel, ControlStream, Exchange, LaneInbox, NetworkError, Readiness, Setup, Side,
};
use tcpx_wire::session::{Action, CHUNK_GRAIN_BYTES, Config};
use tcpx_wire::{Settings, handshake};

use crate::connection::{Connection, Patience, PeerInfo, Shared};
use crate::control::Control;
use crate::core::{Channels, Core, GpuWork, Jobs, Program, Resume};
use crate::driver::{Driver, READ};
use crate::error::Error;
use crate::event::Event;
use crate::options::{Options, ProgressMode};
pub(crate) use set_up::SetUp;

/// What the handshake left.
pub(crate) struct Authenticated {
    pub(crate) session: handshake::Session,
    pub(crate) side: Side,
    /// Client: the address it dialled. Server: the client.
    pub(crate) peer: SocketAddr,
    pub(crate) lanes: Option<LaneInbox>,
    /// Server: the address that it listens on.
    pub(crate) listening: Option<SocketAddr>,
}

/// Sets the connection up and gives it to a driver. Calls `tells` before the peer may hear that
/// this side is ready: a client may be connected from then on.
pub(crate) fn establish(
    control: ControlStream,
    authenticated: Authenticated,
    options: &Options,
    deadline: Instant,
    tells: &mut dyn FnMut(),
) -> Result<Connection, Error> {
    let config = session_config(options)?;
    let local = control
        .stream
        .local_addr()
        .map_err(|error| Error::system("reading the control socket's address", error))?;
    let (side, is_addressed) = (authenticated.side, config.addressed);
    let is_client = side == Side::Client;
    let control = Control::new(
        control,
        is_addressed,
        is_client,
        options.encrypt,
        &options.bounds,
    );
    let mut set_up = SetUp::new(
        control,
        config,
        options.bounds,
        authenticated.peer,
        deadline,
        tells,
    )?;
    let again = || {
        let session = authenticated.session.clone();
        (session, side, authenticated.lanes.clone())
    };
    let resume = is_addressed.then(again);
    let tag_key = TagKey::new(authenticated.session.key.shared_value(b"tcpx verified"));
    match agree(&mut set_up, authenticated, local, options) {
        Ok(agreed) => run(set_up, agreed, options, resume, tag_key),
        Err(error) => {
            // The peer may open lanes for as long as it has not heard why.
            if let Some((.., Some(lanes))) = &resume {
                lanes.agree(0);
            }
            Err(set_up.give_up(error))
        }
    }
}

/// What the set-up comes to.
struct Agreed {
    channels: Vec<Box<dyn Channel>>,
    /// The peer's.
    settings: Settings,
    worker: Arc<CopyWorker>,
}

/// Settings, the network's part, and both sides ready.
fn agree(
    set_up: &mut SetUp<'_>,
    authenticated: Authenticated,
    local: SocketAddr,
    options: &Options,
) -> Result<Agreed, Error> {
    let peer_settings = |set_up: &mut SetUp<'_>| {
        set_up.wait_for("the peer's settings", &mut (), |action| match action {
            Action::PeerSettings(settings) => Ok(*settings),
            other => Err(other),
        })
    };
    let network = &options.network;
    let first = match network.features(options.channels).is_addressed {
        true => None,
        false => Some(peer_settings(set_up)?),
    };
    let worker = match &options.gpu {
        Some(gpu) => CopyWorker::for_gpu(gpu)?,
        None => CopyWorker::host()?,
    };
    let gpu_worker = std::slice::from_ref(&worker);
    let setup = Setup {
        side: authenticated.side,
        session: &authenticated.session,
        local,
        peer: set_up.peer,
        channels: options.channels,
        deadline: set_up.deadline,
        encrypt: options.encrypt,
        dead_after: options.dead_after,
        congestion: &options.congestion,
        workers: options.gpu.as_ref().map_or(&[], |_| gpu_worker),
        lanes: authenticated.lanes,
        listening: authenticated.listening,
    };
    let channels = network.establish(&setup, set_up)?;
    let settings = match first {
        Some(settings) => settings,
        None => peer_settings(set_up)?,
    };
    set_up.ready();
    set_up.wait_for("the peer's data channels", &mut (), |action| match action {
        Action::PeerReady => Ok(()),
        other => Err(other),
    })?;
    Ok(Agreed {
        channels,
        settings,
        worker,
    })
}

/// Gives an established connection to its driver.
fn run(
    set_up: SetUp<'_>,
    agreed: Agreed,
    options: &Options,
    resume: Option<(handshake::Session, Side, Option<LaneInbox>)>,
    tag_key: TagKey,
) -> Result<Connection, Error> {
    let Agreed {
        channels,
        settings,
        worker,
    } = agreed;
    let system = |error| Error::system("starting the engine's thread", error);
    let features = options.network.features(options.channels);
    let poll_only = channels
        .iter()
        .any(|channel| matches!(channel.readiness(), Readiness::PollOnly));
    if poll_only && options.progress == ProgressMode::Manual {
        return Err(Error::Setting {
            what: "progress of the connection",
            expected:
                "Background: this network is foreign code, which the engine's thread alone may call"
                    .to_owned(),
            arrived: "Manual".to_owned(),
        });
    }
    let driver = if poll_only {
        Driver::new("tcpx-plugin")
    } else if features.works_in_poll {
        Driver::new("tcpx-engine")
    } else {
        Driver::shared()
    };
    let driver = driver.map_err(system)?;
    let id = driver.reserve();
    driver
        .watch(id, set_up.control.as_fd(), READ)
        .map_err(system)?;
    for channel in &channels {
        if let Readiness::Fd(fd) = channel.readiness() {
            driver.watch(id, fd, READ).map_err(system)?;
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
    let bounds = options.bounds;
    let core = Core::new(
        set_up,
        resume.map(|(session, side, inbox)| {
            let congestion = options.congestion.clone();
            Resume::new(session, side, inbox, congestion, &driver, id)
        }),
        Channels::new(channels, features.is_addressed, bounds.alone),
        Jobs::new(worker, options.unpack, tag_key, (&driver, id), bounds),
        GpuWork::new(options.gpu.clone(), small),
        Program::new(options.observer.clone(), path),
    );
    core.emit(&Event::Connected {
        peer: peer.address,
        network: peer.network.clone(),
        channels: peer.channels,
    });
    // Networks that can only be polled are those of foreign code.
    let patience = Patience::new(poll_only, options.deadlines.stall);
    let shared = Shared::new(core, Arc::clone(&driver), id, peer, patience);
    if options.progress == ProgressMode::Manual {
        shared.begin_manual();
    }
    shared.tell_status();
    driver.add(id, shared.clone()).map_err(system)?;
    Ok(Connection::new(shared))
}

/// What copies small messages to and from the GPU, where they may travel with their announcement.
/// Without it they take the way of large ones.
fn small_copies(options: &Options, eager_limit: u32) -> Option<SmallCopies> {
    let gpu = options.gpu.as_ref().filter(|_| eager_limit > 0)?;
    match SmallCopies::new(gpu) {
        Ok(Some(small)) if options.persistent_kernel => Some(small.with_persistent_kernel()),
        Ok(small) => small,
        Err(error) => {
            tracing::warn!(%error, "small messages of GPU memory travel as large ones");
            None
        }
    }
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

/// Our part of the settings, from the options and the network's defaults.
pub(crate) fn session_config(options: &Options) -> Result<Config, Error> {
    let network = options.network.features(options.channels);
    if options.encrypt && !network.is_addressed {
        let network = network.name;
        return Err(NetworkError::CannotEncrypt { network }.into());
    }
    if options.encrypt && options.auth == Auth::Insecure {
        return Err(NetworkError::EncryptionNeedsKey.into());
    }
    let (send_window, receive_window) = network.windows;
    let chunk_bytes = options.chunk_bytes.unwrap_or(network.chunk_bytes);
    let millis = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
    let eager_limit = if network.is_addressed {
        options.eager_limit
    } else {
        0
    };
    let settings = Settings {
        network: network.name,
        channels: network.channels,
        chunk_bytes,
        send_window: options.send_window.unwrap_or(send_window),
        receive_window: options.receive_window.unwrap_or(receive_window),
        eager_limit,
        eager_credit: options.bounds.eager_credit.max(eager_limit),
        heartbeat_ms: millis(options.heartbeat),
        dead_after_ms: millis(options.dead_after),
        limits: options.limits,
        memory: memory_name(options),
        software: options.software.clone(),
    };
    if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(CHUNK_GRAIN_BYTES) {
        return Err(Error::Setting {
            what: "chunk size",
            expected: format!("a multiple of {CHUNK_GRAIN_BYTES} bytes"),
            arrived: format!("{chunk_bytes} bytes"),
        });
    }
    settings.validate().map_err(|error| Error::Setting {
        what: error.field,
        expected: error.expected,
        arrived: error.arrived.to_string(),
    })?;
    let mut config = Config::new(settings);
    config.deadlines = options.deadlines;
    config.bounds = options.bounds.session;
    config.cancellable = network.is_addressed;
    config.addressed = network.is_addressed;
    config.seals_payload = options.encrypt;
    // Its chunks are kept until they are placed, and may be sent again.
    config.hold_until_placed = network.is_addressed;
    if options.chunk_bytes.is_none() {
        config.pieces = network.pieces;
        config.taper = network.taper;
    }
    Ok(config)
}
