//! Reading of answers. Total: any bytes are messages, or an error that says where they stop being some.

use super::{ATTRIBUTE_HEADER, GENERIC_HEADER, HEADER, aligned};

const NOOP: u16 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// The request is not repeated in the answer.
const CAPPED: u16 = 0x100;
/// Attributes follow the error.
const HAS_ATTRIBUTES: u16 = 0x200;
/// The kernel's own words.
const WORDS: u16 = 1;
/// `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER` are no part of the type.
const TYPE_MASK: u16 = 0x3fff;

/// Why bytes are no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetlinkError {
    /// A message or attribute ends before its header does.
    #[error("{what} at byte {at} has {left} bytes left for a header of {needed}")]
    HeaderCut {
        /// `message` or `attribute`.
        what: &'static str,
        /// Where it starts.
        at: usize,
        /// Bytes left there.
        left: usize,
        /// Bytes of a header.
        needed: usize,
    },
    /// A message or attribute claims a length that cannot be.
    #[error("{what} at byte {at} says it is {length} bytes long, with {left} left")]
    Length {
        /// `message` or `attribute`.
        what: &'static str,
        /// Where it starts.
        at: usize,
        /// What it says.
        length: usize,
        /// Bytes left there.
        left: usize,
    },
    /// An attribute has another size than its meaning demands.
    #[error("attribute {kind} has {arrived} bytes, not {expected}")]
    AttributeBytes {
        /// Its type.
        kind: u16,
        /// Bytes it should have.
        expected: usize,
        /// Bytes it has.
        arrived: usize,
    },
}

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
pub fn messages(bytes: &[u8]) -> Messages<'_> {
    Messages { bytes, at: 0 }
}

/// See [`messages`].
#[derive(Clone, Debug)]
pub struct Messages<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, NetlinkError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let length = |rest: &[u8]| word(rest, 0) as usize;
            let message = match cut("message", self.bytes, &mut self.at, HEADER, length)? {
                Ok(message) => message,
                Err(error) => return Some(Err(error)),
            };
            let kind = half(message, 4);
            let sequence = word(message, 8);
            let body = &message[HEADER..];
            let answer = match kind {
                NOOP => continue,
                ERROR | DONE => end(kind, half(message, 6), body),
                family => object(family, body),
            };
            let answer = answer.map(|answer| Message { sequence, answer });
            if answer.is_err() {
                self.at = self.bytes.len();
            }
            return Some(answer);
        }
    }
}

/// The next whole part of `bytes`, which `at` is then behind: `header` bytes that begin with its length, as
/// `length` reads it, and what follows. After an error `at` is at the end.
fn cut<'a>(
    what: &'static str,
    bytes: &'a [u8],
    at: &mut usize,
    header: usize,
    length: impl Fn(&[u8]) -> usize,
) -> Option<Result<&'a [u8], NetlinkError>> {
    let start = *at;
    let rest = bytes.get(start..).filter(|rest| !rest.is_empty())?;
    let left = rest.len();
    *at = bytes.len();
    if left < header {
        return Some(Err(NetlinkError::HeaderCut {
            what,
            at: start,
            left,
            needed: header,
        }));
    }
    let length = length(rest);
    if !(header..=left).contains(&length) {
        return Some(Err(NetlinkError::Length {
            what,
            at: start,
            length,
            left,
        }));
    }
    *at = start + aligned(length);
    Some(Ok(&rest[..length]))
}

fn object(family: u16, body: &[u8]) -> Result<Answer<'_>, NetlinkError> {
    let attributes = body.get(GENERIC_HEADER..).ok_or(NetlinkError::HeaderCut {
        what: "message",
        at: 0,
        left: body.len(),
        needed: GENERIC_HEADER,
    })?;
    let command = body[0];
    Ok(Answer::Object {
        family,
        command,
        attributes,
    })
}

/// An error message repeats the request, or its header alone, before the attributes. The end of a dump
/// has them right after its number.
fn end(kind: u16, flags: u16, body: &[u8]) -> Result<Answer<'_>, NetlinkError> {
    let short = |needed| NetlinkError::HeaderCut {
        what: "message",
        at: 0,
        left: body.len(),
        needed,
    };
    // Old kernels end a dump without a number.
    if kind == DONE && body.len() < 4 {
        return Ok(Answer::End {
            errno: 0,
            words: None,
        });
    }
    let number = body.first_chunk::<4>().ok_or_else(|| short(4))?;
    let errno = i32::from_ne_bytes(*number)
        .checked_neg()
        .unwrap_or(i32::MAX);
    let skip = if kind == DONE {
        4
    } else if body.len() < 4 + HEADER {
        return Err(short(4 + HEADER));
    } else if flags & CAPPED != 0 {
        4 + HEADER
    } else {
        4usize.saturating_add(word(body, 4) as usize)
    };
    let mut words = None;
    if flags & HAS_ATTRIBUTES != 0 {
        let rest = skip
            .checked_next_multiple_of(4)
            .and_then(|skip| body.get(skip..));
        for attribute in attributes(rest.unwrap_or_default()) {
            let attribute = attribute?;
            if attribute.kind == WORDS {
                words = attribute.text();
            }
        }
    }
    Ok(Answer::End { errno, words })
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
    /// [`NetlinkError::AttributeBytes`].
    pub fn u8(&self) -> Result<u8, NetlinkError> {
        self.array().map(u8::from_ne_bytes)
    }

    /// As a number of two bytes.
    ///
    /// # Errors
    /// [`NetlinkError::AttributeBytes`].
    pub fn u16(&self) -> Result<u16, NetlinkError> {
        self.array().map(u16::from_ne_bytes)
    }

    /// As a number of four bytes.
    ///
    /// # Errors
    /// [`NetlinkError::AttributeBytes`].
    pub fn u32(&self) -> Result<u32, NetlinkError> {
        self.array().map(u32::from_ne_bytes)
    }

    /// As text, up to the zero that ends it; `None` when it is not UTF-8.
    pub fn text(&self) -> Option<&'a str> {
        let text = self.bytes.split(|&byte| byte == 0).next()?;
        std::str::from_utf8(text).ok()
    }

    fn array<const N: usize>(&self) -> Result<[u8; N], NetlinkError> {
        self.bytes
            .try_into()
            .map_err(|_| NetlinkError::AttributeBytes {
                kind: self.kind,
                expected: N,
                arrived: self.bytes.len(),
            })
    }
}

/// The attributes in a message or in another attribute. After an error nothing follows.
pub fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes { bytes, at: 0 }
}

/// See [`attributes`].
#[derive(Clone, Debug)]
pub struct Attributes<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<Attribute<'a>, NetlinkError>;

    fn next(&mut self) -> Option<Self::Item> {
        let length = |rest: &[u8]| usize::from(half(rest, 0));
        let whole = cut(
            "attribute",
            self.bytes,
            &mut self.at,
            ATTRIBUTE_HEADER,
            length,
        )?;
        Some(whole.map(|whole| Attribute {
            kind: half(whole, 2) & TYPE_MASK,
            bytes: &whole[ATTRIBUTE_HEADER..],
        }))
    }
}

/// Two bytes that the caller has checked to be there.
fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

/// Four bytes that the caller has checked to be there.
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
