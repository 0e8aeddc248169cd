//! Encoding of requests.

use netlink_packet_core::{
    DefaultNla, Emitable, NLA_F_NESTED, NLM_F_ACK, NLM_F_REQUEST, NetlinkBuffer,
};

use super::{GENERIC_HEADER, HEADER};

/// Every family here is at version 1.
const VERSION: u8 = 1;

/// One request that one message answers, with its attributes in the order of the calls.
#[derive(Clone, Debug)]
pub struct Request {
    family: u16,
    command: u8,
    attributes: Vec<DefaultNla>,
}

impl Request {
    /// A request without attributes.
    pub const fn new(family: u16, command: u8) -> Self {
        Self {
            family,
            command,
            attributes: Vec::new(),
        }
    }

    /// Adds an attribute of any bytes.
    #[must_use]
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.attributes.push(DefaultNla::new(kind, value.to_vec()));
        self
    }

    /// Adds an attribute of one byte.
    #[must_use]
    pub fn u8(self, kind: u16, value: u8) -> Self {
        self.bytes(kind, &[value])
    }

    /// Adds an attribute of four bytes.
    #[must_use]
    pub fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds a text, with the zero that ends it.
    #[must_use]
    pub fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds what `inside` adds as one attribute of attributes.
    #[must_use]
    pub fn nested(self, kind: u16, inside: impl FnOnce(Self) -> Self) -> Self {
        let inside = inside(Self::new(self.family, self.command));
        self.bytes(
            kind | NLA_F_NESTED,
            &inside.encode(0)[HEADER + GENERIC_HEADER..],
        )
    }

    /// The message, with the number that its answers will bear.
    pub fn encode(&self, sequence: u32) -> Vec<u8> {
        let attributes = self.attributes.as_slice();
        let length = HEADER + GENERIC_HEADER + attributes.buffer_len();
        let mut bytes = vec![0; length];
        let mut message = NetlinkBuffer::new(&mut bytes);
        message.set_length(u32::try_from(length).unwrap_or(u32::MAX));
        message.set_message_type(self.family);
        message.set_flags(NLM_F_REQUEST | NLM_F_ACK);
        message.set_sequence_number(sequence);
        let (head, inside) = bytes[HEADER..].split_at_mut(GENERIC_HEADER);
        head[..2].copy_from_slice(&[self.command, VERSION]);
        attributes.emit(inside);
        bytes
    }
}
