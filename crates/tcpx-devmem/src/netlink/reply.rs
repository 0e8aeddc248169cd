//! Reading of answers. Total: any bytes are messages, or an error that says where they stop being
//! some.

use netlink_packet_core::{
    NLA_HEADER_SIZE, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP,
    NetlinkBuffer, NlasIterator, parse_u8, parse_u16, parse_u32,
};

use super::{GENERIC_HEADER, HEADER, NetlinkError, aligned};

/// `NLMSGERR_ATTR_MSG`: the kernel's own words.
const WORDS: u16 = 1;

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// The number of the request that it answers.
    pub sequence: u32,
    /// What it says.
    pub answer: Answer<'a>,
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The request ended: 0, or a positive error number with the kernel's words.
    End {
        /// 0 for success.
        errno: i32,
        /// The kernel's own words.
        words: Option<&'a str>,
    },
    /// Attributes of one object.
    Object {
        /// The family that speaks.
        family: u16,
        /// Its command: what kind of object this is.
        command: u8,
        /// For [`attributes`].
        attributes: &'a [u8],
    },
}

/// The messages in what one receive returned. After an error nothing follows.
pub fn messages(bytes: &[u8]) -> impl Iterator<Item = Result<Message<'_>, NetlinkError>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        while !rest.is_empty() {
            let here = std::mem::take(&mut rest);
            let found = match NetlinkBuffer::new_checked(here) {
                Ok(found) => found,
                Err(error) => return Some(Err(error)),
            };
            let length = found.length() as usize;
            let next = here.get(aligned(length)..).unwrap_or_default();
            let body = &here[HEADER..length];
            let answer = match found.message_type() {
                NLMSG_NOOP => {
                    rest = next;
                    continue;
                }
                NLMSG_ERROR | NLMSG_DONE => end(&found, body),
                family => object(family, body),
            };
            return Some(answer.map(|answer| {
                rest = next;
                let sequence = found.sequence_number();
                Message { sequence, answer }
            }));
        }
        None
    })
}

fn object(family: u16, body: &[u8]) -> Result<Answer<'_>, NetlinkError> {
    let attributes = body
        .get(GENERIC_HEADER..)
        .ok_or_else(|| short(body, GENERIC_HEADER))?;
    Ok(Answer::Object {
        family,
        command: body[0],
        attributes,
    })
}

/// An error message repeats the request, or its header alone, before the attributes. The end of a
/// dump has them right after its number.
fn end<'a>(message: &NetlinkBuffer<&[u8]>, body: &'a [u8]) -> Result<Answer<'a>, NetlinkError> {
    let is_dump = message.message_type() == NLMSG_DONE;
    // Old kernels end a dump without a number.
    if is_dump && body.len() < 4 {
        return Ok(Answer::End {
            errno: 0,
            words: None,
        });
    }
    let (number, rest) = body
        .split_first_chunk::<4>()
        .ok_or_else(|| short(body, 4))?;
    let errno = i32::from_ne_bytes(*number)
        .checked_neg()
        .unwrap_or(i32::MAX);
    let repeated = match rest.get(..HEADER) {
        _ if is_dump => 0,
        None => return Err(short(body, 4 + HEADER)),
        Some(_) if message.flags() & NLM_F_CAPPED != 0 => HEADER,
        Some(header) => NetlinkBuffer::new(header).length() as usize,
    };
    let mut words = None;
    if message.flags() & NLM_F_ACK_TLVS != 0 {
        let start = repeated.checked_next_multiple_of(4);
        let inside = start.and_then(|start| rest.get(start..));
        for attribute in attributes(inside.unwrap_or_default()) {
            let attribute = attribute?;
            if attribute.kind == WORDS {
                words = attribute.text();
            }
        }
    }
    Ok(Answer::End { errno, words })
}

fn short(body: &[u8], needed: usize) -> NetlinkError {
    NetlinkError::invalid_buffer("netlink message", body.len(), needed)
}

/// One attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// Its type, without flags.
    pub kind: u16,
    /// Its bytes: a value, or more attributes.
    pub bytes: &'a [u8],
}

impl<'a> Attribute<'a> {
    /// As a number of one byte.
    ///
    /// # Errors
    /// It has another size.
    pub fn u8(&self) -> Result<u8, NetlinkError> {
        parse_u8(self.bytes)
    }

    /// As a number of two bytes.
    ///
    /// # Errors
    /// It has another size.
    pub fn u16(&self) -> Result<u16, NetlinkError> {
        parse_u16(self.bytes)
    }

    /// As a number of four bytes.
    ///
    /// # Errors
    /// It has another size.
    pub fn u32(&self) -> Result<u32, NetlinkError> {
        parse_u32(self.bytes)
    }

    /// As text, up to the zero that ends it; `None` when it is not UTF-8.
    pub fn text(&self) -> Option<&'a str> {
        let text = self.bytes.split(|&byte| byte == 0).next()?;
        std::str::from_utf8(text).ok()
    }
}

/// The attributes in a message or in another attribute. After an error nothing follows.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = Result<Attribute<'_>, NetlinkError>> {
    NlasIterator::new(bytes).map(|found| {
        found.map(|found| {
            let (kind, end) = (found.kind(), usize::from(found.length()));
            Attribute {
                kind,
                bytes: &found.into_inner()[NLA_HEADER_SIZE..end],
            }
        })
    })
}
