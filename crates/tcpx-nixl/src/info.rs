//! What an agent's metadata says of this backend: where the agent listens, and which memory is
//! which. NIXL carries both as opaque bytes.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ring::hmac;
use subtle::ConstantTimeEq;
use tcpx::{Auth, ClientKey};
use tcpx_net::interfaces::{self, InterfaceFilter, InterfaceKind};
use tcpx_net::protocols::{self, Build};

use crate::bytes::{Reader, push_short_bytes};

const MAGIC: [u8; 4] = *b"TCPX";
/// Addresses that an agent names at most.
const MOST_ADDRESSES: usize = 64;

/// What names one life of an agent: another one of the same name has another.
pub(crate) type AgentId = [u8; 16];

/// Where an agent listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionInfo {
    /// How metadata of regions and messages look follows from its protocols.
    pub(crate) build: Build,
    pub(crate) agent: AgentId,
    /// A host's kernel, since it started: whether loopback reaches it.
    pub(crate) host: [u8; 16],
    pub(crate) port: u16,
    /// What to connect to the listener with, unless all agents were given a key.
    pub(crate) key: Option<ClientKey>,
    /// In the order in which they are to be tried.
    pub(crate) addresses: Vec<IpAddr>,
}

impl ConnectionInfo {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(MAGIC);
        bytes.extend(self.build.encode());
        bytes.extend(self.agent);
        bytes.extend(self.host);
        bytes.extend(self.port.to_le_bytes());
        let key = self
            .key
            .as_ref()
            .map(ClientKey::to_text)
            .unwrap_or_default();
        push_short_bytes(&mut bytes, key.as_bytes());
        let count = self.addresses.len().min(MOST_ADDRESSES);
        bytes.push(count as u8);
        for address in &self.addresses[..count] {
            match address {
                IpAddr::V4(address) => push_short_bytes(&mut bytes, &address.octets()),
                IpAddr::V6(address) => push_short_bytes(&mut bytes, &address.octets()),
            }
        }
        bytes
    }

    /// Reads it.
    ///
    /// # Errors
    /// It is no metadata of this backend, or of a release that speaks no version of ours: why.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let damaged = || "it is damaged, or of an early release of tcpx".to_owned();
        let mut reader = Reader(bytes);
        if reader.array().ok_or_else(damaged)? != MAGIC {
            return Err("it is none of the backend TCPX".to_owned());
        }
        let build = Build::decode(&reader.array().ok_or_else(damaged)?);
        // Before the rest, which may look otherwise in another version.
        let agreed = protocols::own_build().agree(&build);
        agreed.map_err(|error| error.to_string())?;
        Self::read(reader, build).ok_or_else(damaged)
    }

    fn read(mut reader: Reader<'_>, build: Build) -> Option<Self> {
        let (agent, host, port) = (reader.array()?, reader.array()?, reader.u16()?);
        let key = match reader.short_bytes()? {
            [] => None,
            text => match Auth::parse(std::str::from_utf8(text).ok()?).ok()? {
                Auth::Client(key) => Some(key),
                _ => return None,
            },
        };
        let count = usize::from(reader.u8()?);
        if count > MOST_ADDRESSES {
            return None;
        }
        let mut addresses = Vec::with_capacity(count);
        for _ in 0..count {
            let octets = reader.short_bytes()?;
            let v4 = <[u8; 4]>::try_from(octets).map(IpAddr::from);
            let v6 = <[u8; 16]>::try_from(octets).map(IpAddr::from);
            addresses.push(v4.or(v6).ok()?);
        }
        reader.end()?;
        Some(Self {
            build,
            agent,
            host,
            port,
            key,
            addresses,
        })
    }

    /// Where to connect, port `port`, from the host `here`: loopback reaches only the same host.
    pub(crate) fn candidates(&self, here: &[u8; 16], port: u16) -> Vec<SocketAddr> {
        self.addresses
            .iter()
            .filter(|address| !address.is_loopback() || self.host == *here)
            .map(|address| SocketAddr::new(*address, port))
            .collect()
    }
}

/// What only those know who have a region's metadata.
#[derive(Clone, Copy)]
pub(crate) struct RegionSecret([u8; Self::BYTES]);

impl RegionSecret {
    pub(crate) const BYTES: usize = 16;
}

/// Takes the same time wherever they differ.
impl PartialEq for RegionSecret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for RegionSecret {}

impl fmt::Debug for RegionSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegionSecret(..)")
    }
}

/// Names a region to the agent that registered it, and proves that its metadata was given to
/// whoever says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionName {
    pub(crate) id: u64,
    pub(crate) secret: RegionSecret,
}

/// What an agent makes the names of its regions with.
pub(crate) struct RegionNames(hmac::Key);

impl fmt::Debug for RegionNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegionNames(..)")
    }
}

impl RegionNames {
    /// Of a new agent, of the system's random bytes.
    pub(crate) fn generate() -> Result<Self, getrandom::Error> {
        let mut key = [0; 32];
        getrandom::fill(&mut key)?;
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, &key)))
    }

    /// The name of memory whenever it is registered: NIXL takes metadata of an address that it
    /// knows only where nothing in it has changed.
    pub(crate) fn of(&self, address: usize, len: usize, gpu: Option<u32>) -> RegionName {
        let device = gpu.map_or(u64::MAX, u64::from);
        let place = [address as u64, len as u64, device].map(u64::to_le_bytes);
        let tag = hmac::sign(&self.0, place.as_flattened());
        let (mut id, mut secret) = ([0; 8], [0; RegionSecret::BYTES]);
        let (first, rest) = tag.as_ref().split_at(id.len());
        id.copy_from_slice(first);
        secret.copy_from_slice(&rest[..RegionSecret::BYTES]);
        RegionName {
            id: u64::from_le_bytes(id),
            secret: RegionSecret(secret),
        }
    }
}

impl RegionName {
    pub(crate) const BYTES: usize = 8 + RegionSecret::BYTES;

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (id, secret) = bytes.split_at_mut(8);
        id.copy_from_slice(&self.id.to_le_bytes());
        secret.copy_from_slice(&self.secret.0);
        bytes
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            id: reader.u64()?,
            secret: RegionSecret(reader.array()?),
        })
    }
}

/// What peers are told of the memory of a region: who has it may read and write that memory, and no
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionInfo {
    pub(crate) name: RegionName,
    /// Its length in bytes.
    pub(crate) bytes: u64,
    /// The port where connections for this memory go: that of its GPU.
    pub(crate) port: u16,
    pub(crate) on_gpu: bool,
}

impl RegionInfo {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(MAGIC);
        bytes.extend(self.name.to_bytes());
        bytes.extend(self.bytes.to_le_bytes());
        bytes.extend(self.port.to_le_bytes());
        bytes.push(u8::from(self.on_gpu));
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.array()? != MAGIC {
            return None;
        }
        let name = RegionName::read(&mut reader)?;
        let (bytes, port) = (reader.u64()?, reader.u16()?);
        let on_gpu = match reader.u8()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        reader.end()?;
        Some(Self {
            name,
            bytes,
            port,
            on_gpu,
        })
    }
}

/// Names this host's kernel since it started, or this process where the kernel does not tell.
pub(crate) fn this_host() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: Vec<u8> = text
        .bytes()
        .filter_map(|byte| (byte as char).to_digit(16))
        .map(|digit| digit as u8)
        .collect();
    let mut host = [0; 16];
    if digits.len() == 32 {
        for (byte, pair) in host.iter_mut().zip(digits.chunks(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
    } else {
        host[..4].copy_from_slice(&std::process::id().to_le_bytes());
    }
    host
}

/// Addresses of this host that peers may reach, the likeliest first; loopback ones last.
pub(crate) fn own_addresses(allowed: Option<&str>) -> Vec<IpAddr> {
    let filter = allowed.and_then(InterfaceFilter::parse);
    let all = interfaces::interfaces().unwrap_or_else(|error| {
        tracing::warn!("the interfaces of this host cannot be listed: {error}");
        Vec::new()
    });
    let rank = |kind: InterfaceKind| match kind {
        InterfaceKind::Physical => 0,
        InterfaceKind::Virtual => 1,
        InterfaceKind::Veth => 2,
        InterfaceKind::Bridge => 3,
        InterfaceKind::Loopback => 4,
    };
    let (mut found, mut on_one_link) = (Vec::new(), None);
    for interface in &all {
        let is_loopback = interface.kind == InterfaceKind::Loopback;
        let admitted = match &filter {
            Some(filter) => filter.admits(&interface.name),
            None => is_loopback || !interfaces::is_container_name(&interface.name),
        };
        if !interface.up || !admitted {
            continue;
        }
        for address in &interface.addresses {
            let usable = match address {
                IpAddr::V4(address) => !address.is_link_local() && !address.is_unspecified(),
                // An address of one link needs the link's name, which means nothing at the peer.
                IpAddr::V6(address) => {
                    !address.is_unicast_link_local() && !address.is_unspecified()
                }
            };
            if usable {
                let speed = interface.speed.unwrap_or(0);
                let order = (
                    rank(interface.kind),
                    std::cmp::Reverse(speed),
                    address.is_ipv6(),
                );
                found.push((order, *address));
            } else {
                on_one_link = Some(*address);
            }
        }
    }
    if let Some(address) = on_one_link
        && found.iter().all(|(_, address)| address.is_loopback())
    {
        tracing::warn!(
            "this host alone can reach its agents: {address} counts on one link, and no interface has another address"
        );
    }
    found.sort();
    found.dedup();
    found.into_iter().map(|(_, address)| address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> ConnectionInfo {
        let key = tcpx::Key::parse("2NGI7HSPVT2H7BKI6GI6VKCQ42OBPANL").unwrap();
        ConnectionInfo {
            build: Build::OURS,
            agent: [7; 16],
            host: [8; 16],
            port: 4711,
            key: Some(key.client_key()),
            addresses: vec![
                "10.0.0.1".parse().unwrap(),
                "fd00::1".parse().unwrap(),
                "127.0.0.1".parse().unwrap(),
            ],
        }
    }

    #[test]
    fn what_is_written_is_read_and_any_cut_is_refused() {
        let bytes = info().to_bytes();
        assert_eq!(ConnectionInfo::from_bytes(&bytes), Ok(info()));
        for len in 0..bytes.len() {
            assert!(ConnectionInfo::from_bytes(&bytes[..len]).is_err(), "{len}");
        }
        let region = RegionInfo {
            name: RegionNames::generate().unwrap().of(0x1000, 2, Some(0)),
            bytes: 2,
            port: 3,
            on_gpu: true,
        };
        let bytes = region.to_bytes();
        assert_eq!(RegionInfo::from_bytes(&bytes), Some(region));
        for len in 0..bytes.len() {
            assert_eq!(RegionInfo::from_bytes(&bytes[..len]), None, "{len}");
        }
    }

    #[test]
    fn a_region_has_its_name_again_and_no_other_has_it() {
        let [ours, theirs] = [(); 2].map(|()| RegionNames::generate().unwrap());
        let name = ours.of(0x1000, 64, None);
        assert_eq!(name, ours.of(0x1000, 64, None));
        for other in [
            ours.of(0x1001, 64, None),
            ours.of(0x1000, 65, None),
            ours.of(0x1000, 64, Some(0)),
            theirs.of(0x1000, 64, None),
        ] {
            assert_ne!(name.id, other.id);
            assert_ne!(name.secret, other.secret);
            let guessed = RegionName {
                id: name.id,
                secret: other.secret,
            };
            assert_ne!(name, guessed, "a number that is known opens nothing");
        }
        let shown = format!("{ours:?} {name:?}");
        assert!(
            shown.contains("RegionNames(..)") && shown.contains("RegionSecret(..)"),
            "{shown}"
        );
    }

    #[test]
    fn loopback_is_tried_on_the_same_host_alone() {
        let info = info();
        assert_eq!(info.candidates(&[8; 16], 1).len(), 3);
        let elsewhere = info.candidates(&[0; 16], 1);
        assert_eq!(
            elsewhere,
            [
                "10.0.0.1:1".parse().unwrap(),
                "[fd00::1]:1".parse().unwrap()
            ]
        );
    }
}
