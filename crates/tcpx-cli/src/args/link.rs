//! Flags that several commands share: how the sides are linked, over which network, from which
//! memory.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args, Command, FromArgMatches, ValueEnum};
use nccl_net::AbiVersion;
use tcpx::{Congestion, Key, Local, TcpOptions, UnpackMethod};

use super::without_empty_variables;
use crate::error::Error;
use crate::sizes::{Limit, Size};

/// The default port of servers.
pub(crate) const DEFAULT_PORT: u16 = 12345;

/// Where Google's hosts keep the vendor's plugin file.
pub(crate) const VENDOR_PLUGIN: &str = "/usr/local/tcpx/lib64/libnccl-net-tcpx.so";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NetworkName {
    /// The embedded network: plain TCP, nothing else needed.
    Tcp,
    /// An NCCL network plugin.
    Plugin,
    /// Device-memory TCP of Linux 6.12 and later: the network card puts payload straight into GPU
    /// memory.
    #[cfg(feature = "devmem")]
    Devmem,
}

/// How the two sides are linked.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Connection")]
pub(crate) struct LinkArgs {
    /// Port of the server.
    #[arg(short, long, default_value_t = DEFAULT_PORT)]
    pub(crate) port: u16,
    /// Address the server listens on [default: every address of the host, IPv4 and IPv6].
    #[arg(long, value_name = "ADDR")]
    pub(crate) bind: Option<IpAddr>,
    /// File that holds the key (otherwise: TCPX_KEY; a server makes a fresh key, a client asks at
    /// the terminal).
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    pub(crate) key_file: Option<PathBuf>,
    /// Use no key: anyone who reaches the port can connect.
    #[arg(long)]
    pub(crate) insecure: bool,
    /// A key that this process made for a second process that it started.
    #[arg(skip)]
    pub(crate) own_key: Option<Key>,
    /// Fail if there is no progress, or no sign of life from the peer, for this long.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub(crate) timeout: Limit,
    /// Longest time that a server waits for its client.
    #[arg(long, value_name = "TIME", default_value = "1h")]
    pub(crate) wait: Limit,
    /// Serve counters as OpenMetrics at this address, such as 127.0.0.1:9400, to whoever reaches
    /// it.
    #[arg(long, value_name = "ADDR:PORT", env = "TCPX_METRICS")]
    pub(crate) metrics: Option<String>,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

/// Which network carries the bytes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Network")]
pub(crate) struct NetworkArgs {
    /// Network to use [default: tcp; plugin if --plugin is given].
    #[arg(long, value_enum)]
    pub(crate) network: Option<NetworkName>,
    /// Plugin file [default: UCCL_TCPX_PLUGIN_PATH, else the vendor's at /usr/local/tcpx/lib64,
    /// else our own].
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<PathBuf>,
    /// Used if a plugin is asked for and --plugin is not given.
    #[arg(hide = true, long, value_name = "PATH", env = "UCCL_TCPX_PLUGIN_PATH")]
    pub(crate) default_plugin: Option<PathBuf>,
    /// Version of the plugin's table, v5 to v12 [default: its newest].
    #[arg(hide = true, long, value_name = "vN", value_parser = abi)]
    pub(crate) abi: Option<AbiVersion>,
    /// Device of the plugin, counted from 0.
    #[arg(hide = true, long, value_name = "N", default_value_t = 0)]
    pub(crate) plugin_device: usize,
    /// Data channels (plugin) or TCP lanes (tcp) [default: 1 channel; lanes to suit the host].
    #[arg(long, value_name = "N", env = "UCCL_TCPX_NUM_CHANNELS", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) channels: Option<u16>,
    /// Event loops of this process for TCP lanes [default: one for every two cores, at least 2
    /// where there are two, at most 12].
    #[arg(hide = true, long, value_name = "N", env = "TCPX_LOOPS", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) loops: Option<u16>,
    /// Bytes of one request [default: NCCL_P2P_NET_CHUNKSIZE, else 512KiB on a plugin and automatic
    /// on tcp].
    #[arg(hide = true, long, value_name = "SIZE", env = "UCCL_TCPX_CHUNK_BYTES")]
    pub(crate) chunk_bytes: Option<Size>,
    /// Used if --chunk-bytes is not given.
    #[arg(hide = true, long, value_name = "SIZE", env = "NCCL_P2P_NET_CHUNKSIZE")]
    pub(crate) nccl_chunk_bytes: Option<String>,
    #[cfg(feature = "devmem")]
    #[command(flatten)]
    pub(crate) devmem: CardArgs,
    /// Interfaces that TCP lanes may use, as in NCCL_SOCKET_IFNAME: name beginnings between commas,
    /// = in front for whole names, ^ for all others [default: NCCL_SOCKET_IFNAME, else the cards
    /// nearest to the GPU].
    #[arg(long, value_name = "LIST", env = "TCPX_SOCKET_IFNAME")]
    pub(crate) interfaces: Option<String>,
    /// Used if --interfaces is not given.
    #[arg(hide = true, long, value_name = "LIST", env = "NCCL_SOCKET_IFNAME")]
    pub(crate) nccl_interfaces: Option<String>,
    /// Congestion control of the TCP sockets, one of
    /// /proc/sys/net/ipv4/tcp_available_congestion_control [default: the host's; within one host
    /// for bbr cubic, else reno].
    #[arg(long, value_name = "NAME", env = "TCPX_CONGESTION")]
    pub(crate) congestion: Option<String>,
    /// Encrypt payload too, with AES-256-GCM: both sides must, and need a key; only on tcp.
    /// `tcpx send`, `receive` and `transfer` do so unless they are given --plain.
    #[arg(long, env = "TCPX_ENCRYPT", value_parser = FalseyValueParser::new())]
    pub(crate) encrypt: bool,
    /// How bytes travel within this host: over TCP, or read by the peer where they lie, with
    /// encryption too [default: TCPX_LOCAL, else local where the kernel lets it and nothing is
    /// encrypted].
    #[arg(long, value_enum)]
    pub(crate) path: Option<PathName>,
    /// Copy small GPU messages that follow each other closely with a persistent kernel, without a
    /// driver call for each.
    #[arg(hide = true, long, value_name = "0|1", env = "TCPX_PERSISTENT_KERNEL", value_parser = FalseyValueParser::new(), default_value = "1", hide_possible_values = true, action = ArgAction::Set)]
    pub(crate) persistent_kernel: bool,
    /// How scattered fragments reach their destination: host, d2d or kernel [default: the fastest
    /// that works here].
    #[arg(hide = true, long, value_name = "METHOD", env = "UCCL_TCPX_UNPACK_IMPL", value_parser = unpack)]
    pub(crate) unpack: Option<UnpackMethod>,
}

/// How bytes travel within a host.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathName {
    Tcp,
    Local,
}

impl NetworkArgs {
    /// Whether peers on this host read payload where it lies.
    pub(crate) fn local(&self) -> Local {
        match self.path {
            None => TcpOptions::default().local,
            Some(PathName::Tcp) => Local::Off,
            Some(PathName::Local) => Local::On,
        }
    }
}

/// What the network devmem takes.
#[cfg(feature = "devmem")]
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Network")]
pub(crate) struct CardArgs {
    /// Interface whose card puts payload into device memory (devmem) [default: this side receives
    /// through host memory].
    #[arg(long, value_name = "NAME")]
    pub(crate) devmem_interface: Option<String>,
    /// Receive queue for device memory [default: the last free one].
    #[arg(hide = true, long, value_name = "N", requires = "devmem_interface")]
    pub(crate) devmem_queue: Option<u32>,
    /// Bytes of device memory for payload.
    #[arg(hide = true, long, value_name = "SIZE", default_value = "64MiB")]
    pub(crate) devmem_pool: Size,
    /// Has the card send out of device memory too (Linux 6.16 and later).
    #[arg(hide = true, long, requires = "devmem_interface")]
    pub(crate) devmem_send: bool,
}

/// Which memory the bytes leave or reach.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Memory")]
pub(crate) struct MemoryArgs {
    /// Use this GPU's memory [default: GPU 0 if there is one, else host memory].
    #[arg(long, value_name = "N", conflicts_with = "host")]
    pub(crate) gpu: Option<u32>,
    /// Use host memory.
    #[arg(long)]
    pub(crate) host: bool,
}

impl MemoryArgs {
    /// Host memory.
    pub(crate) fn host() -> Self {
        Self {
            gpu: None,
            host: true,
        }
    }
}

fn unpack(text: &str) -> Result<UnpackMethod, String> {
    text.parse()
        .map_err(|_| format!("expected host, d2d or kernel, got `{text}`"))
}

/// `v7` (or `7`) as a version of the plugin's table.
pub(crate) fn abi(text: &str) -> Result<AbiVersion, String> {
    let number = text.strip_prefix('v').unwrap_or(text).parse();
    let is_it = |version: &AbiVersion| number == Ok(version.number());
    let found = AbiVersion::ALL.into_iter().find(is_it);
    found.ok_or_else(|| format!("expected one of v5 to v12, got `{text}`"))
}

impl LinkArgs {
    /// What a command has of which no such flag was given.
    pub(crate) fn defaults() -> Result<Self, Error> {
        let command = Self::augment_args(Command::new("tcpx"));
        let matches = without_empty_variables(command).try_get_matches_from(["tcpx"]);
        let read = matches.and_then(|matches| Self::from_arg_matches(&matches));
        read.map_err(|error| {
            Error::usage(
                error.to_string().trim_end().to_owned(),
                "correct that variable, or unset it",
            )
        })
    }
}

impl NetworkArgs {
    /// The plugin file that was named, by its flag or its variable.
    pub(crate) fn plugin_file(&self) -> Option<&Path> {
        self.plugin.as_deref().or(self.default_plugin.as_deref())
    }

    /// The chunk size given for this program, else the one given for NCCL.
    pub(crate) fn chunk_bytes(&self) -> Option<Size> {
        self.chunk_bytes.or_else(|| self.nccl_chunk())
    }

    /// The chunk size given for NCCL, if it can be one of ours.
    fn nccl_chunk(&self) -> Option<Size> {
        let size: Size = self.nccl_chunk_bytes.as_ref()?.parse().ok()?;
        let is_usable = size.0 > 0 && size.0.is_multiple_of(4096) && size.0 <= u32::MAX.into();
        is_usable.then_some(size)
    }

    /// A chunk size that was given for NCCL, would count, and cannot be one of ours.
    pub(crate) fn unusable_nccl_chunk(&self) -> Option<&str> {
        let counts = self.chunk_bytes.is_none() && self.nccl_chunk().is_none();
        self.nccl_chunk_bytes.as_deref().filter(|_| counts)
    }

    /// The congestion control given, if any.
    pub(crate) fn congestion(&self) -> Congestion {
        // An empty variable counts as unset.
        match self.congestion.as_deref().map(str::trim) {
            None | Some("") => Congestion::Automatic,
            Some(name) => Congestion::Named(name.to_owned()),
        }
    }

    /// The interfaces given for this program, else those given for NCCL.
    pub(crate) fn interfaces(&self) -> Option<&str> {
        let given = [&self.interfaces, &self.nccl_interfaces];
        // An empty variable counts as unset.
        let mut given = given.into_iter().flatten().map(|text| text.trim());
        given.find(|text| !text.is_empty())
    }
}
