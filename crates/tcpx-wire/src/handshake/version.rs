//! Which protocols a side speaks, and which release of tcpx it is.

use std::fmt;

use super::HandshakeError;
use crate::array;

/// A version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u16);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a side says of itself in the first bytes of every connection: all versions of the protocol
/// from `lowest` to `highest`, and what software it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Build {
    /// The lowest version.
    pub lowest: Version,
    /// The highest version.
    pub highest: Version,
    /// Major, minor and patch number of the release.
    pub release: [u8; 3],
    /// The first bytes of the commit that it was built from; zero where nobody said.
    pub commit: [u8; Self::COMMIT_BYTES],
}

impl Build {
    /// What this crate speaks. Where versions differ, the agreed one
    /// ([`Session::protocol`](super::Session::protocol)) decides; there is one version so far.
    pub const OURS: Self = Self {
        lowest: Version(3),
        highest: Version(3),
        release: [
            number(env!("CARGO_PKG_VERSION_MAJOR")),
            number(env!("CARGO_PKG_VERSION_MINOR")),
            number(env!("CARGO_PKG_VERSION_PATCH")),
        ],
        // Of what is released: a commit that every build knew would have each build all anew.
        commit: match option_env!("TCPX_COMMIT") {
            Some(text) => commit(text),
            None => [0; Self::COMMIT_BYTES],
        },
    };

    /// Bytes of a commit that travel.
    pub const COMMIT_BYTES: usize = 8;

    /// The highest version that both sides speak.
    ///
    /// # Errors
    /// There is none.
    pub fn agree(&self, peer: &Self) -> Result<Version, HandshakeError> {
        let agreed = self.highest.min(peer.highest);
        if agreed < self.lowest.max(peer.lowest) {
            let (ours, theirs) = (*self, *peer);
            return Err(HandshakeError::Version(Box::new(Mismatch { ours, theirs })));
        }
        Ok(agreed)
    }

    /// The version of a session, which its other connections speak; what software it is, the first
    /// one has said.
    pub(super) const fn only(version: Version) -> Self {
        Self {
            lowest: version,
            highest: version,
            release: [0; 3],
            commit: [0; Self::COMMIT_BYTES],
        }
    }

    /// Bytes of it.
    pub const BYTES: usize = Self::RANGE_BYTES + 3 + Self::COMMIT_BYTES;
    /// Bytes of both versions, which come first.
    pub(super) const RANGE_BYTES: usize = 4;

    /// Highest and lowest version, release, commit.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (range, software) = bytes.split_at_mut(Self::RANGE_BYTES);
        let (release, commit) = software.split_at_mut(self.release.len());
        range[..2].copy_from_slice(&self.highest.0.to_le_bytes());
        range[2..].copy_from_slice(&self.lowest.0.to_le_bytes());
        release.copy_from_slice(&self.release);
        commit.copy_from_slice(&self.commit);
        bytes
    }

    /// Reads it.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            highest: Version(u16::from_le_bytes(array(bytes, 0))),
            lowest: Version(u16::from_le_bytes(array(bytes, 2))),
            release: array(bytes, Self::RANGE_BYTES),
            commit: array(bytes, Self::RANGE_BYTES + 3),
        }
    }
}

/// A number of a release.
const fn number(text: &str) -> u8 {
    let (bytes, mut value, mut at) = (text.as_bytes(), 0, 0);
    while at < bytes.len() {
        value = value * 10 + (bytes[at] - b'0');
        at += 1;
    }
    value
}

/// The first bytes of a commit in hexadecimal digits; zero where it is none.
const fn commit(text: &str) -> [u8; Build::COMMIT_BYTES] {
    const fn digit(byte: u8) -> Option<u8> {
        match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        }
    }
    let (text, mut bytes, mut at) = (text.as_bytes(), [0; Build::COMMIT_BYTES], 0);
    while at < bytes.len() {
        if text.len() < 2 * bytes.len() {
            return [0; Build::COMMIT_BYTES];
        }
        match (digit(text[2 * at]), digit(text[2 * at + 1])) {
            (Some(high), Some(low)) => bytes[at] = high << 4 | low,
            _ => return [0; Build::COMMIT_BYTES],
        }
        at += 1;
    }
    bytes
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.release {
            [0, 0, 0] => write!(f, "tcpx (")?,
            [major, minor, patch] => write!(f, "tcpx {major}.{minor}.{patch} (")?,
        }
        if self.commit != [0; Self::COMMIT_BYTES] {
            write!(f, "commit ")?;
            let mut bytes = self.commit.iter();
            bytes.try_for_each(|byte| write!(f, "{byte:02x}"))?;
            write!(f, ", ")?;
        }
        match self.lowest == self.highest {
            true => write!(f, "protocol {})", self.highest),
            false => write!(f, "protocols {} to {})", self.lowest, self.highest),
        }
    }
}

/// Two sides that have no version in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// This side.
    pub ours: Build,
    /// The peer, as it says.
    pub theirs: Build,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ours, theirs } = self;
        // There is no common version: one of both ends before the other one begins.
        let (older, newer) = match ours.highest < theirs.lowest {
            true => ("this side", theirs),
            false => ("the peer", ours),
        };
        write!(
            f,
            "this side is {ours}, the peer is {theirs}, and no protocol is spoken by both; {older} is older: install there what the other side has, {newer}"
        )
    }
}
