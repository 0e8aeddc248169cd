//! What both sides hold after the handshake.

use std::fmt;

use subtle::ConstantTimeEq;

/// An agreed session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Names the session; not secret.
    pub id: SessionId,
    /// Proves membership of the session.
    pub key: SessionKey,
    /// Capabilities that both sides have; unknown bits may be set.
    pub capabilities: u64,
    /// Both sides proved that they hold the shared key; `false` when neither uses one.
    pub authenticated: bool,
}

impl Session {
    /// Capability bit: the control connection can be replaced by another one, which goes on where it
    /// broke.
    pub const RESUMES: u64 = 1;

    /// Capability bit: grants may ask for shorter chunks at a transfer's end.
    pub const TAPERS: u64 = 2;

    /// Capability bit: eager payloads may have more than 16 KiB.
    pub const LONG_EAGER: u64 = 4;

    /// Capability bit: chunk headers say how much follows the chunk at once.
    pub const TELLS_BEHIND: u64 = 16;

    /// Whether both sides say in a chunk's header how much follows it at once.
    pub fn tells_behind(&self) -> bool {
        self.capabilities & Self::TELLS_BEHIND != 0
    }

    /// Whether both sides take eager payloads of more than 16 KiB.
    pub fn takes_long_eager(&self) -> bool {
        self.capabilities & Self::LONG_EAGER != 0
    }

    /// Whether both sides know shorter chunks at a transfer's end.
    pub fn tapers(&self) -> bool {
        self.capabilities & Self::TAPERS != 0
    }

    /// Whether both sides can replace the control connection.
    pub fn resumes(&self) -> bool {
        self.capabilities & Self::RESUMES != 0
    }
}

/// Names a session on the server that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; Self::BYTES]);

impl SessionId {
    /// Bytes of an id.
    pub const BYTES: usize = 16;
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({self})")
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The key of one session; `Debug` hides it.
#[derive(Clone)]
pub struct SessionKey(pub(super) [u8; Self::BYTES]);

impl SessionKey {
    /// Bytes of a session key.
    pub const BYTES: usize = 32;
}

impl PartialEq for SessionKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for SessionKey {}

impl fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKey(hidden)")
    }
}
