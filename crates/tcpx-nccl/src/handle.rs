//! What `listen` hands out and `connect` reads.
//!
//! Little endian: magic 8, highest version that the process speaks u16, address family u16 (4 or
//! 6), port u16, lowest version u16, address 16, secret 16, listen id u64, and of the process's
//! door: port u16, 1 if lanes may come u8; release 3, zero 2; process u64, secret 16; check of the
//! key 16; the first bytes of the commit 8.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nccl_net::export::{NetError, PeerHandle};
use tcpx_lanes::protocols::{self, Build};
use tcpx_wire::handshake::Version;

const MAGIC: [u8; 8] = *b"tcpxnet\x01";
const FAMILY_V4: u16 = 4;
const FAMILY_V6: u16 = 6;

/// A decoded handle. `Debug` leaves the secret out.
#[derive(Clone, PartialEq, Eq)]
pub struct Handle {
    /// Where to connect.
    pub address: SocketAddr,
    /// Of the handshake, unless there is a key: who holds the handle may connect, or who has the
    /// key, too.
    pub secret: [u8; 16],
    /// Number of the listen comm in its process, for the logs of both sides.
    pub listen_id: u64,
    /// Where the process can be reached for lanes, and for connections that take another's place.
    pub door: Door,
    /// What the listener's key makes of the secret; zero without one.
    pub check: [u8; 16],
    /// Which versions of the protocol, and which release that is.
    pub build: Build,
}

/// Where a process can be reached. `Debug` leaves the secret out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Door {
    /// Port at the handle's address.
    pub port: u16,
    /// Names the process among others at the same address, now or earlier.
    pub process: u64,
    /// Key of the handshake.
    pub secret: [u8; 16],
    /// Lanes may come.
    pub lanes: bool,
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Door")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle")
            .field("address", &self.address)
            .field("listen_id", &self.listen_id)
            .field("door", &self.door)
            .finish_non_exhaustive()
    }
}

impl Handle {
    /// Writes the handle.
    pub fn encode(&self) -> PeerHandle {
        let mut bytes = [0; PeerHandle::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        let family = match self.address.ip() {
            IpAddr::V4(ip) => {
                bytes[16..20].copy_from_slice(&ip.octets());
                FAMILY_V4
            }
            IpAddr::V6(ip) => {
                bytes[16..32].copy_from_slice(&ip.octets());
                FAMILY_V6
            }
        };
        bytes[10..12].copy_from_slice(&family.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.address.port().to_le_bytes());
        bytes[32..48].copy_from_slice(&self.secret);
        bytes[48..56].copy_from_slice(&self.listen_id.to_le_bytes());
        let door = &self.door;
        bytes[56..58].copy_from_slice(&door.port.to_le_bytes());
        bytes[58] = u8::from(door.lanes);
        bytes[64..72].copy_from_slice(&door.process.to_le_bytes());
        bytes[72..88].copy_from_slice(&door.secret);
        bytes[88..104].copy_from_slice(&self.check);
        write_build(&mut bytes, &self.build);
        PeerHandle(bytes)
    }

    /// Reads a handle.
    pub fn decode(PeerHandle(bytes): &PeerHandle) -> Result<Self, NetError> {
        let bad = |why: String| {
            NetError::invalid_argument(format!(
                "this is not a handle of the tcpx plugin: {why}; both sides must load the same plugin"
            ))
        };
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if bytes[..8] != MAGIC {
            return Err(bad(format!(
                "expected it to start with {MAGIC:02x?}, got {:02x?}",
                &bytes[..8]
            )));
        }
        let build = Build {
            highest: Version(u16_at(8)),
            lowest: Version(u16_at(14)),
            release: array(&bytes[59..62]),
            commit: array(&bytes[104..112]),
        };
        // Before the rest, which may look otherwise in another version.
        protocols::own_build()
            .agree(&build)
            .map_err(|error| NetError::invalid_argument(error.to_string()))?;
        let ip = match u16_at(10) {
            FAMILY_V4 => IpAddr::V4(Ipv4Addr::from(array::<4>(&bytes[16..20]))),
            FAMILY_V6 => IpAddr::V6(Ipv6Addr::from(array::<16>(&bytes[16..32]))),
            other => {
                return Err(bad(format!("expected address family 4 or 6, got {other}")));
            }
        };
        let (port, door) = (u16_at(12), u16_at(56));
        if port == 0 || door == 0 {
            return Err(bad("expected ports above 0, got 0".to_owned()));
        }
        Ok(Self {
            address: SocketAddr::new(ip, port),
            secret: array(&bytes[32..48]),
            listen_id: u64::from_le_bytes(array(&bytes[48..56])),
            door: Door {
                port: door,
                process: u64::from_le_bytes(array(&bytes[64..72])),
                secret: array(&bytes[72..88]),
                lanes: bytes[58] & 1 == 1,
            },
            check: array(&bytes[88..104]),
            build,
        })
    }
}

/// Says which versions and which release that is.
pub(crate) fn write_build(bytes: &mut [u8; PeerHandle::BYTES], build: &Build) {
    bytes[8..10].copy_from_slice(&build.highest.0.to_le_bytes());
    bytes[14..16].copy_from_slice(&build.lowest.0.to_le_bytes());
    bytes[59..62].copy_from_slice(&build.release);
    bytes[104..112].copy_from_slice(&build.commit);
}

/// The first `N` bytes; missing ones are zero, which callers exclude by their ranges.
pub(crate) fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().zip(bytes) {
        *to = *from;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(address: &str) -> Handle {
        Handle {
            address: address.parse().unwrap(),
            secret: *b"0123456789abcdef",
            listen_id: 77,
            door: Door {
                port: 4001,
                process: u64::MAX - 1,
                secret: *b"fedcba9876543210",
                lanes: true,
            },
            check: *b"what a key makes",
            build: Build::OURS,
        }
    }

    #[test]
    fn both_families_survive_the_round_trip() {
        for address in ["127.0.0.1:4000", "[fd00::12:34]:65535"] {
            let mut handle = handle(address);
            assert_eq!(Handle::decode(&handle.encode()).unwrap(), handle);
            handle.door.lanes = false;
            assert_eq!(Handle::decode(&handle.encode()).unwrap(), handle);
        }
    }

    #[test]
    fn foreign_and_damaged_handles_are_refused() {
        let good = handle("127.0.0.1:4000").encode();
        for (at, value) in [(0, [0, b'c']), (10, [5, 0]), (12, [0, 0]), (56, [0, 0])] {
            let mut bytes = good;
            bytes.0[at..at + 2].copy_from_slice(&value);
            assert!(Handle::decode(&bytes).is_err(), "byte {at}");
        }
        assert!(Handle::decode(&PeerHandle([0; PeerHandle::BYTES])).is_err());
    }

    #[test]
    fn a_handle_of_another_version_names_both() {
        let mut newer = handle("127.0.0.1:4000");
        newer.build = Build {
            lowest: Version(70),
            highest: Version(71),
            release: [7, 1, 0],
            commit: [0xcd; Build::COMMIT_BYTES],
        };
        let why = Handle::decode(&newer.encode()).unwrap_err().to_string();
        for part in [
            "protocols 70 to 71",
            "tcpx 7.1.0 (commit cdcd",
            "protocol 3",
            "this side is older",
        ] {
            assert!(why.contains(part), "{part}: {why}");
        }
    }

    #[test]
    fn the_secret_stays_out_of_debug_output() {
        let handle = handle("127.0.0.1:4000");
        for text in [format!("{handle:?}"), format!("{:?}", handle.encode())] {
            // The first bytes of both secrets, as lists of numbers show them.
            for shown in ["48, 49", "102, 101", "secret"] {
                assert!(!text.contains(shown), "{text}");
            }
        }
    }
}
