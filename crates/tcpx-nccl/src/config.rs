//! Settings, read once at `init` from the environment.

use std::ffi::OsString;
use std::ops::RangeInclusive;

use nccl_net::constants::MAX_NET_BYTES;
use nccl_net::export::NetError;
use tcpx_lanes::idle::MAX_LANES;
use tcpx_lanes::sealing::Protection;
use tcpx_wire::Key;

use crate::handle::array;
use crate::lanes::recv_stream::MAX_CHUNK_BYTES;

/// Of one message of one comm at a time, up to here one thread is quicker than waking others.
const DEFAULT_INLINE_BYTES: usize = 128 << 10;
/// Of several messages at a time, from here on each is better off with a thread of its own.
const CROWDED_BYTES: usize = 16 << 10;
/// Each chunk costs a dozen system calls; with larger ones a message takes too few lanes.
const DEFAULT_CHUNK_BYTES: usize = 256 << 10;

/// How received data reaches the host program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Flat, in host memory.
    Host,
    /// Flat, in host or GPU memory; a copy worker moves what lies in a GPU's.
    Cuda,
}

/// Which addresses are listened on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Settings of the plugin.
#[derive(Clone, Debug)]
pub struct Config {
    /// `TCPX_NET_DEVICE`: `host` (default) or `cuda`.
    pub mode: Mode,
    /// `TCPX_NET_STANDIN=host`: host memory stands in for device memory.
    pub standin: bool,
    /// `NCCL_SOCKET_IFNAME`, as it stands; empty when unset.
    pub interfaces: String,
    /// `NCCL_SOCKET_FAMILY`: `AF_INET` or `AF_INET6`; either when unset.
    pub family: Option<Family>,
    /// `TCPX_PORT_RANGE=lo-hi` for listening ports; any free port when unset.
    pub ports: Option<RangeInclusive<u16>>,
    /// `TCPX_NET_LANES`: connections to each peer process that carry large messages; 0 for none.
    pub lanes: Option<usize>,
    /// `TCPX_NET_RAILS`: devices that each interface stands for.
    pub rails: Option<usize>,
    /// `TCPX_NET_THREADS`: pairs of event loops.
    pub threads: Option<usize>,
    /// `TCPX_NET_INLINE_BYTES`: messages above take lanes, always.
    pub inline_bytes: usize,
    /// `TCPX_NET_CHUNK_BYTES`: largest part of a message that one lane carries.
    pub chunk_bytes: usize,
    /// `TCPX_NET_SPLICE`: large chunks are sent without a copy; 0 for with one.
    pub splice: bool,
    /// `TCPX_KEY`, the same for all ranks: who reads their handles does not get in without it, and
    /// control is sealed.
    pub key: Option<Key>,
    /// `TCPX_ENCRYPT`, the same for all ranks, which have a key: payload is sealed too.
    pub encrypts: bool,
}

impl Config {
    /// The key of the handshake with a peer that reads this in a handle, and what shows in the
    /// handle that both have the same `TCPX_KEY` and `TCPX_ENCRYPT`: nobody on the path can talk
    /// one of them out of either.
    pub(crate) fn handshake_key(&self, shown: &[u8; Key::BYTES]) -> (Key, [u8; Key::BYTES]) {
        let key = |secret: &[u8]| Key::generate(&mut |bytes| bytes.copy_from_slice(secret));
        match &self.key {
            None => (key(shown), [0; Key::BYTES]),
            Some(shared) => {
                let sealed: &[u8] = if self.encrypts { b" sealed" } else { b"" };
                let both = shared.secret_for(&[shown, sealed].concat());
                let (secret, check) = both.split_at(Key::BYTES);
                (key(secret), array(check))
            }
        }
    }

    /// How much of what its connections carry is sealed.
    pub(crate) const fn protection(&self) -> Protection {
        match (&self.key, self.encrypts) {
            (None, _) => Protection::None,
            (Some(_), false) => Protection::Headers,
            (Some(_), true) => Protection::All,
        }
    }

    /// Messages above take lanes while others are under way.
    pub(crate) fn crowded_bytes(&self) -> usize {
        self.inline_bytes.min(CROWDED_BYTES)
    }

    /// The same of a message that is alone, where another comm sent the last one: their messages
    /// take turns in the host's one thread. Half, as of the engine's eager limit.
    pub(crate) const fn beside_bytes(&self) -> usize {
        self.inline_bytes.div_ceil(2)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::Host,
            standin: false,
            interfaces: String::new(),
            family: None,
            ports: None,
            lanes: None,
            rails: None,
            threads: None,
            inline_bytes: DEFAULT_INLINE_BYTES,
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            splice: true,
            key: None,
            encrypts: false,
        }
    }
}

impl Config {
    /// Reads the process's environment.
    pub fn from_environment() -> Result<Self, NetError> {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    /// Reads variables through `lookup`; an empty value counts as unset.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, NetError> {
        let value = |name: &'static str| {
            lookup(name)
                .map(|v| v.to_string_lossy().trim().to_owned())
                .filter(|v| !v.is_empty())
        };
        let mut config = Self::default();
        // Whoever asks for it must not get less in silence.
        let no = ["0", "n", "no", "f", "false", "off"];
        let number = |name, range: RangeInclusive<usize>, expected| {
            value(name)
                .map(|text| match text.parse::<usize>() {
                    Ok(number) if range.contains(&number) => Ok(number),
                    _ => Err(bad(name, text, "not a usable number", expected)),
                })
                .transpose()
        };
        if let Some(text) = value("TCPX_NET_DEVICE") {
            let modes = [("host", Mode::Host), ("cuda", Mode::Cuda)];
            config.mode = kind("TCPX_NET_DEVICE", text, &modes, "host or cuda")?;
        }
        if let Some(text) = value("TCPX_NET_STANDIN") {
            config.standin = kind("TCPX_NET_STANDIN", text, &[("host", true)], "host")?;
        }
        config.interfaces = value("NCCL_SOCKET_IFNAME").unwrap_or_default();
        config.family = match value("NCCL_SOCKET_FAMILY").as_deref() {
            Some("AF_INET") => Some(Family::V4),
            Some("AF_INET6") => Some(Family::V6),
            // NCCL takes anything else for nothing too.
            _ => None,
        };
        if let Some(text) = value("TCPX_PORT_RANGE") {
            config.ports = Some(port_range(&text)?);
        }
        config.lanes = number("TCPX_NET_LANES", 0..=MAX_LANES, "0 to 64")?;
        if config.mode == Mode::Cuda && config.lanes == Some(0) {
            return Err(bad(
                "TCPX_NET_LANES",
                "0".to_owned(),
                "TCPX_NET_DEVICE=cuda moves GPU memory over lanes",
                "1 to 64, or unset",
            ));
        }
        config.rails = number("TCPX_NET_RAILS", 1..=16, "1 to 16")?;
        config.threads = number("TCPX_NET_THREADS", 1..=64, "1 to 64")?;
        if let Some(bytes) = number(
            "TCPX_NET_INLINE_BYTES",
            4096..=MAX_NET_BYTES,
            "bytes, from 4096 to 1073741824",
        )? {
            config.inline_bytes = bytes;
        }
        if let Some(bytes) = number(
            "TCPX_NET_CHUNK_BYTES",
            16384..=MAX_CHUNK_BYTES,
            "bytes, from 16384 to 1048576",
        )? {
            config.chunk_bytes = bytes;
        }
        if let Some(number) = number("TCPX_NET_SPLICE", 0..=1, "0 or 1")? {
            config.splice = number == 1;
        }
        if let Some(text) = value("TCPX_KEY") {
            let key = Key::parse(&text).map_err(|error| {
                bad(
                    "TCPX_KEY",
                    "...".to_owned(),
                    &error.to_string(),
                    "a server's key, as `tcpx key FILE` writes it, the same on every rank",
                )
            })?;
            config.key = Some(key);
        }
        let encrypts = value("TCPX_ENCRYPT");
        if let Some(text) = encrypts.filter(|text| !no.contains(&text.to_lowercase().as_str())) {
            if config.key.is_none() {
                return Err(bad(
                    "TCPX_ENCRYPT",
                    text,
                    "without a key nobody would know for whom",
                    "TCPX_KEY on all ranks, or 0",
                ));
            }
            config.encrypts = true;
        }
        Ok(config)
    }
}

/// One of the kinds that a variable names.
fn kind<T: Copy>(
    name: &'static str,
    value: String,
    kinds: &[(&str, T)],
    expected: &'static str,
) -> Result<T, NetError> {
    let known = kinds.iter().find(|(known, _)| *known == value);
    let known = known.map(|(_, kind)| *kind);
    known.ok_or_else(|| bad(name, value, "unknown kind", expected))
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, NetError> {
    let parsed = text.split_once('-').and_then(|(low, high)| {
        let low: u16 = low.trim().parse().ok()?;
        let high: u16 = high.trim().parse().ok()?;
        (low > 0 && low <= high).then_some(low..=high)
    });
    parsed.ok_or_else(|| {
        bad(
            "TCPX_PORT_RANGE",
            text.to_owned(),
            "not a range",
            "two ports, the lower first, as in 20000-20999",
        )
    })
}

fn bad(name: &str, value: String, why: &str, expected: &str) -> NetError {
    NetError::invalid_argument(format!("{name}={value:?}: {why}; expected {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config, NetError> {
        Config::from_lookup(|name| {
            pairs
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| OsString::from(*value))
        })
    }

    #[test]
    fn defaults_are_a_plugin_for_host_memory() {
        let config = read(&[]).unwrap();
        assert_eq!(config.mode, Mode::Host);
        assert!(!config.standin);
        assert_eq!(config.ports, None);
    }

    #[test]
    fn every_variable_is_read() {
        let config = read(&[
            ("TCPX_NET_DEVICE", "cuda"),
            ("TCPX_NET_STANDIN", "host"),
            ("NCCL_SOCKET_IFNAME", "^lo"),
            ("NCCL_SOCKET_FAMILY", "AF_INET6"),
            ("TCPX_PORT_RANGE", "20000-20010"),
            ("TCPX_NET_SPLICE", "0"),
            ("TCPX_ENCRYPT", "off"),
        ])
        .unwrap();
        assert_eq!(config.family, Some(Family::V6));
        assert_eq!(config.mode, Mode::Cuda);
        assert!(config.standin);
        assert!(!config.splice);
        assert_eq!(config.interfaces, "^lo");
        assert_eq!(config.ports, Some(20000..=20010));
    }

    #[test]
    fn a_key_is_a_servers_and_stays_out_of_errors() {
        let key = Key::generate(&mut |bytes| bytes.fill(7));
        let text = key.to_text();
        assert_eq!(read(&[("TCPX_KEY", &text)]).unwrap().key, Some(key.clone()));
        let encrypts = |more: &[(&str, &str)]| {
            let config = read(&[&[("TCPX_ENCRYPT", "1")], more].concat());
            config.map(|config| config.encrypts)
        };
        assert_eq!(encrypts(&[("TCPX_KEY", &text)]).ok(), Some(true));
        assert!(encrypts(&[]).is_err());
        for other in [&key.client_key().to_text()[..], &text[1..], "secret"] {
            let error = read(&[("TCPX_KEY", other)]).unwrap_err().to_string();
            assert!(
                error.contains("TCPX_KEY") && !error.contains(other),
                "{error}"
            );
        }
    }

    #[test]
    fn gpu_memory_without_lanes_is_refused() {
        let pairs = [("TCPX_NET_DEVICE", "cuda"), ("TCPX_NET_LANES", "0")];
        let text = read(&pairs).unwrap_err().to_string();
        assert!(
            text.contains("TCPX_NET_LANES") && text.contains("TCPX_NET_DEVICE"),
            "{text}"
        );
    }

    #[test]
    fn a_value_that_cannot_be_used_is_refused_by_name() {
        for (name, value) in [
            ("TCPX_NET_DEVICE", "gpu"),
            ("TCPX_NET_STANDIN", "cuda"),
            ("TCPX_NET_SPLICE", "yes"),
            ("TCPX_ENCRYPT", "1"),
            ("TCPX_PORT_RANGE", "20000"),
            ("TCPX_PORT_RANGE", "300-200"),
            ("TCPX_PORT_RANGE", "0-10"),
            ("TCPX_PORT_RANGE", "1-70000"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(name) && text.contains(value), "{text}");
        }
    }
}
