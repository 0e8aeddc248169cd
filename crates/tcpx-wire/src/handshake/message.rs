//! Bytes of the handshake: fixed sizes, fixed places.

use std::fmt;
use std::ops::Deref;

use super::error::Status;
use super::noise::{EPHEMERAL_BYTES, MARK_BYTES, TAG_BYTES};
use super::session::{SessionId, SessionKey};
use super::{Build, HandshakeError, Version};
use crate::key::ID_BYTES;
use crate::{array, record};

/// First bytes of every connection, both ways. The line ends and the control character make a
/// text protocol differ, and a transport that translates line ends damage it visibly.
pub(super) const MAGIC: [u8; 8] = *b"TCPX\r\n\x1a\n";

/// Magic, versions, purpose or status, authentication, lane, software: the same in all versions.
pub(super) const HEAD_BYTES: usize = 32;
/// Session id, session secret, the build of the server.
pub(super) const SESSION_BYTES: usize = SessionId::BYTES + SessionKey::BYTES + Build::BYTES;
/// Noise's first message without a key, and with one: the client says which.
pub(super) const OPEN_BYTES: usize = EPHEMERAL_BYTES;
pub(super) const KEYED_BYTES: usize = EPHEMERAL_BYTES + ID_BYTES + TAG_BYTES;
/// What follows the beginning of a client hello with a key: Noise's message and a mark.
pub(super) const MARKED_BYTES: usize = KEYED_BYTES + MARK_BYTES;
/// Noise's second message.
pub(super) const SECOND_BYTES: usize = EPHEMERAL_BYTES + SESSION_BYTES + TAG_BYTES;
pub(super) const SERVER_HELLO_BYTES: usize = HEAD_BYTES + SECOND_BYTES;
/// A record of nothing: that it opens proves the client.
pub(super) const CONFIRM_BYTES: usize = record::sealed_bytes(0);
/// A record of one byte, the status.
pub(super) const WELCOME_BYTES: usize = record::sealed_bytes(1);
/// What a lane says openly: the beginning, lanes, session.
pub(super) const LANE_CLAIM_BYTES: usize = 56;
/// Random bytes of each side of a lane.
pub(super) const LANE_NONCE_BYTES: usize = 32;
/// What proves that a side knows the session's secret, and has seen what the other one said.
pub(super) const LANE_PROOF_BYTES: usize = 16;
pub(super) const LANE_HELLO_BYTES: usize = LANE_CLAIM_BYTES + LANE_NONCE_BYTES + MARK_BYTES;
pub(super) const LANE_ANSWER_BYTES: usize = HEAD_BYTES + LANE_NONCE_BYTES + LANE_PROOF_BYTES;
const LONGEST: usize = SERVER_HELLO_BYTES;

pub(super) const PURPOSE_CONTROL: u8 = 0;
pub(super) const PURPOSE_LANE: u8 = 1;
pub(super) const PURPOSE_RESUME: u8 = 2;

/// Bytes to send, at most a hello long; dereferences to a slice.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    bytes: [u8; LONGEST],
    length: usize,
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl<const BYTES: usize> From<&[u8; BYTES]> for Message {
    fn from(bytes: &[u8; BYTES]) -> Self {
        const { assert!(BYTES <= LONGEST) };
        let mut message = Self {
            bytes: [0; LONGEST],
            length: BYTES,
        };
        message.bytes[..BYTES].copy_from_slice(bytes);
        message
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({} bytes)", self.length)
    }
}

/// The beginning of a hello or answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// What its sender is.
    pub(super) build: Build,
    /// Purpose from a client, status from a server.
    pub(super) kind: u8,
    pub(super) auth: u8,
    /// Lane number in a lane hello, else zero.
    pub(super) extra: u16,
    pub(super) zero: u8,
}

impl Head {
    pub(super) fn new(build: &Build, kind: u8, auth: u8, extra: u16) -> Self {
        Self {
            build: *build,
            kind,
            auth,
            extra,
            zero: 0,
        }
    }

    /// The parts that are zero in a message that is no lane's.
    pub(super) fn padding(&self) -> u64 {
        u64::from(self.zero) << 16 | u64::from(self.extra)
    }

    /// What a server's answer means to a client of this `build` that joins as a lane of so many, or
    /// to a new session: the version that both sides speak.
    pub(super) fn accepted(
        self,
        message: &'static str,
        build: &Build,
        lane: Option<(u16, u16)>,
    ) -> Result<Version, HandshakeError> {
        let agreed = build.agree(&self.build)?;
        Err(match (Status::parse(message, self.kind)?, lane) {
            (Status::Ok, _) => return Ok(agreed),
            (Status::Busy, _) => HandshakeError::Busy,
            (Status::KeyRequired, _) => HandshakeError::KeyRequired,
            (Status::KeyNotExpected, _) => HandshakeError::KeyNotExpected,
            (Status::WrongKey, None) => HandshakeError::WrongKey,
            (Status::WrongKey, Some((lane, _))) => HandshakeError::LaneProof { lane },
            (Status::UnknownSession, Some(_)) => HandshakeError::UnknownSession,
            (Status::LaneOutOfRange, Some((lane, lanes))) => {
                HandshakeError::LaneOutOfRange { lane, lanes }
            }
            (Status::Version | Status::UnknownSession | Status::LaneOutOfRange, _) => {
                HandshakeError::value(message, "status", "0, 2 to 4 or 7", self.kind)
            }
        })
    }

    /// A message with this beginning and zeros after it.
    pub(super) fn start<const BYTES: usize>(self) -> [u8; BYTES] {
        const { assert!(BYTES >= HEAD_BYTES) };
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        let build = self.build.encode();
        let (range, software) = build.split_at(Build::RANGE_BYTES);
        bytes[8..12].copy_from_slice(range);
        bytes[12] = self.kind;
        bytes[13] = self.auth;
        bytes[14..16].copy_from_slice(&self.extra.to_le_bytes());
        bytes[SOFTWARE_AT..ZERO_AT].copy_from_slice(software);
        bytes
    }

    fn parse(bytes: &[u8; HEAD_BYTES]) -> Self {
        let mut build = [0; Build::BYTES];
        let (range, software) = build.split_at_mut(Build::RANGE_BYTES);
        range.copy_from_slice(&bytes[8..12]);
        software.copy_from_slice(&bytes[SOFTWARE_AT..ZERO_AT]);
        Self {
            build: Build::decode(&build),
            kind: bytes[12],
            auth: bytes[13],
            extra: u16::from_le_bytes(array(bytes, 14)),
            zero: bytes[ZERO_AT..].iter().fold(0, |all, byte| all | byte),
        }
    }
}

const SOFTWARE_AT: usize = 16;
const ZERO_AT: usize = SOFTWARE_AT + Build::BYTES - Build::RANGE_BYTES;
const _: () = assert!(ZERO_AT <= HEAD_BYTES);

/// Collects one message at a time out of slices of any length.
#[derive(Clone, Debug)]
pub(super) struct Collector {
    bytes: [u8; LONGEST],
    held: usize,
}

impl Collector {
    pub(super) fn new() -> Self {
        Self {
            bytes: [0; LONGEST],
            held: 0,
        }
    }

    /// The beginning of the message, which stays held; `None` when more input is needed.
    ///
    /// A peer that speaks something else is noticed at its first wrong byte.
    pub(super) fn head(&mut self, input: &mut &[u8]) -> Result<Option<Head>, HandshakeError> {
        self.fill(input, HEAD_BYTES);
        let compared = self.held.min(MAGIC.len());
        if self.bytes[..compared] != MAGIC[..compared] {
            return Err(HandshakeError::NotTcpx {
                first_bytes: self.bytes[..compared].escape_ascii().to_string(),
            });
        }
        Ok((self.held >= HEAD_BYTES).then(|| Head::parse(&array(&self.bytes, 0))))
    }

    /// The whole message; `None` when more input is needed.
    pub(super) fn message<const BYTES: usize>(&mut self, input: &mut &[u8]) -> Option<[u8; BYTES]> {
        const { assert!(BYTES <= LONGEST) };
        self.bytes(input, BYTES).map(|bytes| array(bytes, 0))
    }

    /// The whole message, as long as its beginning says; `None` when more input is needed.
    pub(super) fn bytes(&mut self, input: &mut &[u8], length: usize) -> Option<&[u8]> {
        debug_assert!(length <= LONGEST);
        self.fill(input, length);
        if self.held < length {
            return None;
        }
        self.held = 0;
        Some(&self.bytes[..length])
    }

    /// Bytes of the message that have arrived.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    fn fill(&mut self, input: &mut &[u8], length: usize) {
        let missing = length.saturating_sub(self.held).min(input.len());
        let (taken, rest) = input.split_at(missing);
        self.bytes[self.held..self.held + missing].copy_from_slice(taken);
        self.held += missing;
        *input = rest;
    }
}
