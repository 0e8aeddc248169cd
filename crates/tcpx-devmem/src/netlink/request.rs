//! Encoding of requests.

use super::{ATTRIBUTE_HEADER, GENERIC_HEADER, HEADER, aligned};

/// `NLM_F_REQUEST | NLM_F_ACK`.
const ASK: u16 = 0x1 | 0x4;
/// `NLM_F_ROOT | NLM_F_MATCH`.
const DUMP: u16 = 0x100 | 0x200;
/// `NLA_F_NESTED`.
const NESTED: u16 = 0x8000;
/// Every family here is at version 1.
const VERSION: u8 = 1;

/// One request, with its attributes in the order of the calls.
#[derive(Clone, Debug)]
pub struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// A request that one message answers.
    pub fn new(family: u16, command: u8) -> Self {
        Self::with_flags(family, command, ASK)
    }

    /// A request that a message for each object answers.
    pub fn dump(family: u16, command: u8) -> Self {
        Self::with_flags(family, command, ASK | DUMP)
    }

    fn with_flags(family: u16, command: u8, flags: u16) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend([0; 4]);
        bytes.extend(family.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend([command, VERSION, 0, 0]);
        debug_assert_eq!(bytes.len(), HEADER + GENERIC_HEADER);
        Self { bytes }
    }

    /// Adds an attribute of any bytes.
    #[must_use]
    pub fn bytes(self, kind: u16, value: &[u8]) -> Self {
        self.attribute(kind, value)
    }

    /// Adds an attribute of one byte.
    #[must_use]
    pub fn u8(self, kind: u16, value: u8) -> Self {
        self.attribute(kind, &[value])
    }

    /// Adds an attribute of four bytes.
    #[must_use]
    pub fn u32(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_ne_bytes())
    }

    /// Adds a text, with the zero that ends it.
    #[must_use]
    pub fn text(self, kind: u16, value: &str) -> Self {
        self.attribute(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds what `inside` adds as one attribute of attributes.
    #[must_use]
    pub fn nested(mut self, kind: u16, inside: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self = inside(self.attribute(kind | NESTED, &[]));
        let length = self.bytes.len() - start;
        self.set_length(start, length);
        self
    }

    /// The message, with the number that its answers will bear.
    pub fn encode(&self, sequence: u32) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        bytes
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let start = self.bytes.len();
        self.bytes.extend([0; 2]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.set_length(start, ATTRIBUTE_HEADER + value.len());
        self.bytes.resize(aligned(self.bytes.len()), 0);
        self
    }

    /// Our attributes are names, numbers and a few nests; one that outgrew its length field would be
    /// refused by the kernel as malformed.
    fn set_length(&mut self, start: usize, length: usize) {
        let length = u16::try_from(length).unwrap_or(0);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }
}
