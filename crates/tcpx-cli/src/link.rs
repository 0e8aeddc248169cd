//! From flags to a connection: which network, which key, listening, connecting, and saying so.

#[cfg(feature = "devmem")]
mod devmem;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nccl_net::AbiVersion;
use tcpx::{
    Auth, Connection, Deadlines, Endpoint, Key, Network, NetworkError, Options, TcpNetwork,
};
use tcpx_net::interfaces::{self, InterfaceFilter};
use tcpx_net::{PluginMemory, PluginNetwork, PluginOptions, TcpOptions, every_address};
use zeroize::Zeroizing;

use crate::addresses;
use crate::args::link::{DEFAULT_PORT, LinkArgs, NetworkArgs, NetworkName};
use crate::environment;
use crate::error::Error;
use crate::interrupt::{self, LOOK};
use crate::key::{self, KeyOrigin, KeySources};
use crate::memory_choice::MemoryChoice;
use crate::output::chunk_lines::ChunkLines;
use crate::output::json::{self, Told};
use crate::output::say::{self, aside};
use crate::plugin_file::{Places, PluginFile, contents};
use crate::sizes::grouped;

/// How long the goodbye may take.
const GOODBYE: Duration = Duration::from_secs(10);

/// Silence below this would end connections to busy hosts.
const LEAST_DEAD_AFTER: Duration = Duration::from_secs(1);

/// Clients that a server of files serves at once; further ones wait.
const MOST_CLIENTS: usize = 64;

/// Everything that is decided before the other side is there.
#[derive(Debug)]
pub(crate) struct Link {
    options: Options,
    origin: KeyOrigin,
    network_line: String,
    /// Kept until the end: its drop prints what still waits.
    _chunk_lines: Option<ChunkLines>,
    /// Kept until the end: lanes that died, and a control connection that broke, come back to it.
    listening: OnceLock<Endpoint>,
}

impl Link {
    /// Decides for a server or a client.
    pub(crate) fn new(
        args: &LinkArgs,
        memory: &MemoryChoice,
        is_server: bool,
    ) -> Result<Self, Error> {
        let sources = KeySources::of_process(args.insecure, args.key_file.clone());
        let (auth, origin) = if let Some(key) = &args.own_key {
            (Auth::Key(key.clone()), KeyOrigin::Variable)
        } else if is_server {
            sources.for_server()?
        } else {
            sources.for_client()?
        };
        serve_metrics(args)?;
        let (network, network_line) = choose_network(&args.network, memory, args.timeout.0)?;
        let mut options = Options::new(network, auth);
        options.encrypt = args.network.encrypt;
        options.channels = args.network.channels.unwrap_or(0);
        options.congestion = args.network.congestion();
        if let Some(text) = args.network.unusable_nccl_chunk() {
            aside!(
                "note: NCCL_P2P_NET_CHUNKSIZE={text} is no chunk size for tcpx (a multiple of 4KiB) and is left out"
            );
        }
        options.chunk_bytes = match args.network.chunk_bytes() {
            None => None,
            Some(size) => Some(u32::try_from(size.0).map_err(|_| {
                Error::usage(
                    format!("a chunk of {size} is too large"),
                    "give --chunk-bytes less than 4GiB",
                )
            })?),
        };
        options.unpack = args.network.unpack;
        options.persistent_kernel = args.network.persistent_kernel;
        options.deadlines = Deadlines {
            stall: args.timeout.0,
            total: None,
        };
        options.connect_timeout = args.timeout.0;
        // A peer that says nothing for this long is gone: the user's limit, and no other one.
        options.dead_after = args.timeout.0.max(LEAST_DEAD_AFTER);
        options.gpu = memory.gpu.clone();
        options.software = software();
        if is_plugin(&args.network) {
            // A small message must not travel around the plugin that was asked for.
            options.eager_limit = 0;
        }
        options.one_time = is_server && !args.insecure;
        let chunk_lines = say::is_debug().then(ChunkLines::start);
        options.observer = chunk_lines.as_ref().map(ChunkLines::observer);
        Ok(Self {
            options,
            origin,
            network_line,
            _chunk_lines: chunk_lines,
            listening: OnceLock::new(),
        })
    }

    /// Has even the smallest payload take the data path, for a command that checks it.
    pub(crate) fn through_data_channels(mut self) -> Self {
        self.options.eager_limit = 0;
        self
    }

    /// A link that encrypts the contents unless told otherwise, and a line that says so where it
    /// does not.
    pub(crate) fn for_contents(
        args: &LinkArgs,
        plain: bool,
        memory: &MemoryChoice,
        is_server: bool,
    ) -> Result<Self, Error> {
        let encrypt = args.network.encrypt;
        if plain && encrypt {
            return Err(Error::usage(
                "--plain and --encrypt (or TCPX_ENCRYPT) contradict each other",
                "leave one of them out: contents are encrypted without either",
            ));
        }
        let link = Self::new(args, memory, is_server)?;
        let why_not = if encrypt {
            // Whether that is possible the network says.
            None
        } else if plain {
            Some("--plain was given")
        } else if args.insecure {
            Some("there is no key")
        } else if !is_tcp(&args.network) {
            Some("only the network tcp encrypts")
        } else {
            None
        };
        let Some(why_not) = why_not else {
            return Ok(link.encrypted());
        };
        aside!(
            "note: contents travel in the clear, as {why_not}: anyone on the path can read them"
        );
        Ok(link)
    }

    /// Encrypts payload, for a command that does so unless told otherwise.
    pub(crate) fn encrypted(mut self) -> Self {
        self.options.encrypt = true;
        self
    }

    /// Has the key serve more than one session.
    pub(crate) fn for_many(mut self) -> Self {
        self.options.one_time = false;
        self
    }

    /// Listens on a port; 0 takes a free one.
    pub(crate) fn listen(&self, args: &LinkArgs, port: u16) -> Result<Endpoint, Error> {
        let ip = args.bind.unwrap_or_else(every_address);
        Ok(Endpoint::listen(
            SocketAddr::new(ip, port),
            self.options.clone(),
        )?)
    }

    /// Connects to this very address.
    pub(crate) fn connect_to(&self, address: SocketAddr) -> Result<Connection, Error> {
        Ok(Endpoint::connect(address, &self.options)?)
    }

    /// Whether nobody else has the key yet.
    pub(crate) fn has_fresh_key(&self) -> bool {
        self.origin == KeyOrigin::Fresh
    }

    /// The key, for more links of the same process.
    pub(crate) fn key(&self) -> Option<Key> {
        match &self.options.auth {
            Auth::Key(key) => Some(key.clone()),
            Auth::Client(_) | Auth::Insecure => None,
        }
    }

    /// Listens, prints the line to run at the other side, and waits for it. Goes on listening for
    /// what the connection may lose, as long as this link lives.
    pub(crate) fn serve(&self, args: &LinkArgs, command: &str) -> Result<Connection, Error> {
        self.invite(args, command)?;
        self.accept(Some(args.wait.0))
    }

    /// Listens, and prints the line to run at the other side.
    pub(crate) fn invite(&self, args: &LinkArgs, command: &str) -> Result<(), Error> {
        let ip = args.bind.unwrap_or_else(every_address);
        let endpoint = Endpoint::listen(SocketAddr::new(ip, args.port), self.options.clone())?;
        let bound = endpoint.local_addr();
        say::invitation(format_args!("listening on {bound}; at the other side run:"));
        say::invitation(format_args!(
            "\n  {}\n",
            self.invitation(args, command, bound)
        ));
        // Not in the line: it would stay in the shell's history.
        if let (KeyOrigin::Fresh, Auth::Key(key)) = (&self.origin, &self.options.auth) {
            let key = Zeroizing::new(key.client_key().to_text());
            say::invitation(format_args!("key, which it asks for: {}", *key));
        }
        self.warn(args);
        self.listening.get_or_init(|| endpoint);
        Ok(())
    }

    /// Serves all clients that come, each in a thread of its own, until a signal comes.
    pub(crate) fn serve_together(
        &self,
        schema: &str,
        session: impl Fn(Connection) -> Result<Told, Error> + Sync,
    ) -> Result<Told, Error> {
        let served = |connection: Connection| {
            let peer = connection.peer().address;
            let told = session(connection);
            if let Err(error) | Ok(Told::Bad(_, error)) = &told {
                aside!("client {peer}:");
                say::failure(error);
            }
            // One object a client; its end is no end of the server.
            if let Err(error @ Error::Output(_)) = json::conclude(schema, told) {
                say::failure(&error);
            }
        };
        let running = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            loop {
                if running.load(Ordering::Relaxed) == MOST_CLIENTS {
                    if interrupt::check().is_err() {
                        return Ok(Told::Nothing);
                    }
                    std::thread::sleep(LOOK);
                    continue;
                }
                let connection = match self.accept(None) {
                    Ok(connection) => connection,
                    Err(error) if error.is_interrupted() => return Ok(Told::Nothing),
                    Err(error) => {
                        say::failure(&error);
                        std::thread::sleep(LOOK);
                        continue;
                    }
                };
                running.fetch_add(1, Ordering::Relaxed);
                let (served, running) = (&served, &running);
                let work = move || {
                    served(connection);
                    running.fetch_sub(1, Ordering::Relaxed);
                };
                let thread = std::thread::Builder::new().name("tcpx-client".into());
                if let Err(error) = thread.spawn_scoped(scope, work) {
                    running.fetch_sub(1, Ordering::Relaxed);
                    say::failure(&Error::process("start a thread")(error));
                }
            }
        })
    }

    /// The next client, within `limit`; without one, until a signal comes.
    pub(crate) fn accept(&self, limit: Option<Duration>) -> Result<Connection, Error> {
        let Some(endpoint) = self.listening.get() else {
            return Err(Error::failed(
                "the server does not listen yet",
                "report this as a defect of tcpx",
            ));
        };
        let started = Instant::now();
        loop {
            if let Err(error) = interrupt::check() {
                let refused = endpoint.refusals().count;
                if refused > 0 {
                    aside!("connections refused in all: {}", grouped(refused));
                }
                return Err(error);
            }
            let left = limit.map(|limit| limit.saturating_sub(started.elapsed()));
            let slice = left.unwrap_or(LOOK).min(LOOK);
            match endpoint.accept(slice) {
                Err(tcpx::Error::Network(NetworkError::AcceptTimedOut { .. }))
                    if left.is_none_or(|left| left > slice) => {}
                Err(tcpx::Error::Network(NetworkError::AcceptTimedOut { address, .. })) => {
                    return Err(Error::NoClient {
                        address,
                        waited: limit.unwrap_or_default(),
                        refusals: Box::new(endpoint.refusals()),
                    });
                }
                other => return Ok(other?),
            }
        }
    }

    /// Connects to the first of the server's addresses that answers.
    pub(crate) fn connect(&self, args: &LinkArgs, server: &str) -> Result<Connection, Error> {
        self.connect_within(args, server, Duration::ZERO, |_| false)
    }

    /// The same with a server that may start later: some failures are no end for a while.
    pub(crate) fn connect_within(
        &self,
        args: &LinkArgs,
        server: &str,
        patience: Duration,
        is_passing: fn(&Error) -> bool,
    ) -> Result<Connection, Error> {
        self.warn(args);
        let until = Instant::now() + patience;
        loop {
            match self.connect_once(args, server) {
                Err(error) if is_passing(&error) && Instant::now() < until => {
                    tracing::debug!(error = error.what(), "the server is not there yet");
                    std::thread::sleep(LOOK);
                    interrupt::check()?;
                }
                end => return end,
            }
        }
    }

    fn connect_once(&self, args: &LinkArgs, server: &str) -> Result<Connection, Error> {
        let addresses = addresses::resolve(server, args.port)?;
        let options = self.options.clone();
        interrupt::unless_interrupted(move || Ok(Endpoint::connect(&addresses[..], &options)?))
    }

    /// The path that `connection` got, for a person.
    pub(crate) fn describe(&self, connection: &Connection, memory: &MemoryChoice) -> String {
        let peer = connection.peer();
        format!(
            "connected to {}, which runs {}\n  network  {}\n  path     {}\n  memory   {}; at the peer: {}",
            peer.address,
            say::one_line(&peer.software),
            self.network_line,
            connection.path(),
            memory.describe(),
            say::one_line(&peer.memory),
        )
    }

    /// The line that a person runs at the other side.
    fn invitation(&self, args: &LinkArgs, command: &str, bound: SocketAddr) -> String {
        let mut more = String::new();
        match &self.origin {
            KeyOrigin::None => more.push_str(" --insecure"),
            KeyOrigin::File(_) => more.push_str(" --key-file FILE"),
            // The client asks for it, or has the variable, too.
            KeyOrigin::Fresh | KeyOrigin::Variable | KeyOrigin::Typed => {}
        }
        if bound.port() != DEFAULT_PORT {
            more.push_str(&format!(" --port {}", bound.port()));
        }
        if is_plugin(&args.network) {
            match &args.network.plugin {
                Some(path) => more.push_str(&format!(" --plugin {}", path.display())),
                None => more.push_str(" --network plugin"),
            }
        }
        #[cfg(feature = "devmem")]
        if args.network.network == Some(NetworkName::Devmem) {
            more.push_str(" --network devmem");
        }
        if args.network.encrypt {
            more.push_str(" --encrypt");
        }
        let ip = match interfaces::reachable(bound.ip()) {
            // A path may follow it behind a colon.
            IpAddr::V6(ip) if command.contains("SERVER_IP:") => format!("[{ip}]"),
            ip => ip.to_string(),
        };
        format!("tcpx {}{more}", command.replace("SERVER_IP", &ip))
    }

    pub(crate) fn warn(&self, args: &LinkArgs) {
        if args.insecure {
            aside!(
                "warning: --insecure: there is no key, anybody who reaches the port can take the place of the peer"
            );
        }
        match &self.origin {
            KeyOrigin::File(path) => key::warn_of_readers(path),
            KeyOrigin::Fresh | KeyOrigin::Variable | KeyOrigin::Typed | KeyOrigin::None => {}
        }
        let stays_here = args.bind.is_some_and(|ip| ip.is_loopback());
        if is_plugin(&args.network) && !args.insecure && !stays_here {
            aside!(
                "note: a plugin's own data connections are not authenticated; the key protects the control connection"
            );
        }
    }
}

/// Says goodbye: returns when the peer has everything.
pub(crate) fn part(connection: Connection) -> Result<(), Error> {
    #[cfg(feature = "devmem")]
    if connection.peer().network == "devmem"
        && let Some(line) = devmem::landed(&connection.statistics())
    {
        aside!("{line}");
    }
    Ok(connection.close(GOODBYE)?)
}

/// Says goodbye whatever came of the work: a program that just ended would leave the peer without
/// the last acknowledgements. The work's own error is the news, a failed goodbye only after good
/// work.
pub(crate) fn part_after<T>(connection: Connection, work: Result<T, Error>) -> Result<T, Error> {
    let parted = part(connection);
    let done = work?;
    parted.map(|()| done)
}

/// Whether the flags mean a plugin: asked for by name, or by giving its file on the command line.
pub(crate) fn is_plugin(args: &NetworkArgs) -> bool {
    match args.network {
        Some(name) => name == NetworkName::Plugin,
        None => args.plugin.is_some(),
    }
}

/// Whether the flags mean the embedded network.
pub(crate) fn is_tcp(args: &NetworkArgs) -> bool {
    match args.network {
        Some(name) => name == NetworkName::Tcp,
        None => args.plugin.is_none(),
    }
}

fn choose_network(
    args: &NetworkArgs,
    memory: &MemoryChoice,
    limit: Duration,
) -> Result<(Arc<dyn Network>, String), Error> {
    #[cfg(feature = "devmem")]
    if args.network == Some(NetworkName::Devmem) {
        return devmem::network(&args.devmem, memory);
    }
    if !is_plugin(args) {
        check_interfaces(args)?;
        let why = if args.network.is_some() {
            "asked for"
        } else {
            "the default, needs nothing else"
        };
        return Ok((
            Arc::new(TcpNetwork::new(TcpOptions {
                interfaces: args.interfaces().map(str::to_owned),
                loops: args.loops.unwrap_or(0),
                local: args.local(),
                ..TcpOptions::default()
            })),
            format!("tcp, embedded ({why})"),
        ));
    }
    let file = Places::of_process().find(args.plugin_file())?;
    let network = plugin_network(&file, args.abi, args.plugin_device, memory, limit)?;
    let line = format!(
        "plugin {} {}, device {} ({}), {} ({})",
        network.plugin_name(),
        network.version(),
        args.plugin_device,
        network.properties().name,
        file.path.display(),
        file.why
    );
    Ok((Arc::new(network), line))
}

/// A choice of interfaces that leaves none is a mistake that would otherwise show with the first
/// client.
fn check_interfaces(args: &NetworkArgs) -> Result<(), Error> {
    let chosen = args.interfaces.as_deref().map(str::trim);
    let Some(filter) = chosen.and_then(InterfaceFilter::parse) else {
        return Ok(());
    };
    let all = interfaces::interfaces()
        .map_err(|error| Error::from(tcpx::Error::from(NetworkError::from(error))))?;
    if all.iter().any(|one| filter.admits(&one.name)) {
        return Ok(());
    }
    let names: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
    Err(Error::usage(
        format!("`{filter}` allows no interface of this host"),
        format!("give --interfaces some of {}", names.join(", ")),
    ))
}

/// This program, with the commit that it was built from where that is known.
fn software() -> String {
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("TCPX_COMMIT"));
    let is_known = commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    match commit.get(..12).filter(|_| is_known) {
        Some(commit) => format!("tcpx {version} ({commit})"),
        None => format!("tcpx {version}"),
    }
}

/// Serves metrics where the flags ask for it, once a process.
fn serve_metrics(args: &LinkArgs) -> Result<(), Error> {
    static SERVED: OnceLock<()> = OnceLock::new();
    let Some(address) = &args.metrics else {
        return Ok(());
    };
    if SERVED.set(()).is_err() {
        return Ok(());
    }
    let bound = tcpx_status::serve_metrics(address).map_err(|source| {
        Error::usage(
            format!("no metrics can be served at {address}: {source}"),
            "give --metrics an address of this host and a free port, such as 127.0.0.1:9400",
        )
    })?;
    aside!("metrics at http://{bound}/metrics");
    Ok(())
}

/// Loads the plugin file and starts the plugin, within `limit`.
pub(crate) fn plugin_network(
    file: &PluginFile,
    abi: Option<AbiVersion>,
    device: usize,
    memory: &MemoryChoice,
    limit: Duration,
) -> Result<PluginNetwork, Error> {
    let memory = match &memory.gpu {
        Some(gpu) => PluginMemory::Gpu(gpu.clone()),
        None if environment::host_stands_in() => PluginMemory::StandIn,
        None => PluginMemory::Host,
    };
    // The loader maps what the file promises to hold: one that was cut short would end the process.
    contents::read(&file.path)?;
    let options = PluginOptions {
        path: file.path.clone(),
        abi,
        device,
        memory,
    };
    Ok(PluginNetwork::load_within(options, limit).map_err(tcpx::Error::from)?)
}
