//! A stream of bytes, in any slicing, to frames.

use super::field::{self, PayloadBytes};
use super::{
    EAGER, Frame, FrameError, HEADER_BYTES, LEAST_PLAIN_BYTES, MAGIC, MAX_BODY_BYTES, kind_name,
};
use crate::array;
use crate::crc::{crc32c, crc32c_of_parts};

/// Bytes from a frame's start whose checksum is taken in one go: most frames are no longer.
const START_BYTES: usize = 64;

/// Turns the bytes of one direction into frames.
///
/// Holds at most one frame's bytes; a frame that arrives whole is read in place. After an error
/// the stream has no place to go on from, so the same error repeats.
///
/// ```
/// use tcpx_wire::frame::{self, Frame, FrameDecoder};
///
/// let mut bytes = Vec::new();
/// frame::encode(&Frame::Ready, 0, &mut bytes)?;
/// let mut decoder = FrameDecoder::new();
/// let mut input = bytes.as_slice();
/// while let Some(frame) = decoder.next(&mut input)? {
///     assert_eq!(frame, Frame::Ready);
/// }
/// assert!(input.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct FrameDecoder {
    /// Beginning of a frame whose end has not arrived.
    partial: Vec<u8>,
    /// Its header, once that is whole.
    header: Option<Header>,
    /// What has come of its payload, where that may go [unsealed](LEAST_PLAIN_BYTES).
    payload: Vec<u8>,
    sequence: u32,
    read: u64,
    failed: Option<FrameError>,
    /// Buffer of a payload that is used no more.
    spare: Vec<u8>,
}

impl FrameDecoder {
    /// A decoder at the beginning of a direction.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes from the front of `input` up to the end of one frame.
    ///
    /// `None` means that `input` is used up and the next frame not complete.
    ///
    /// # Errors
    /// When the bytes are not the next frame; final.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Frame>, FrameError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.advance(input);
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            self.partial = Vec::new();
            self.payload = Vec::new();
            self.header = None;
        }
        result
    }

    /// Bytes of an incomplete frame that are held; not 0 at the end of a stream means that the
    /// stream was cut.
    pub fn buffered(&self) -> usize {
        self.partial.len() + self.payload.len()
    }

    /// Bytes that come next and may be unsealed: what lacks of a payload whose own fields have all
    /// come.
    pub fn plain_next(&self) -> usize {
        match &self.header {
            Some(header) if self.partial.len() == HEADER_BYTES + header.fields => header
                .plain_payload()
                .map_or(0, |bytes| bytes - self.payload.len()),
            _ => 0,
        }
    }

    /// Takes the buffer of a payload back that is used no more: the next payload comes in it,
    /// without new memory. Its contents do not matter.
    pub fn use_again(&mut self, buffer: Vec<u8>) {
        self.spare = buffer;
    }

    /// Bytes of the frames that have come whole.
    pub fn read(&self) -> u64 {
        self.read
    }

    /// Another connection goes on: what has arrived of an incomplete frame comes again, or of one
    /// that was changed on its way.
    pub fn restart(&mut self) {
        self.partial.clear();
        self.payload.clear();
        self.header = None;
        self.failed = None;
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Option<Frame>, FrameError> {
        if self.partial.is_empty()
            && let Some((bytes, rest)) = input.split_first_chunk()
        {
            let header = Header::parse(bytes)?;
            if let Some((body, rest)) = rest.split_at_checked(header.body_bytes) {
                *input = rest;
                return self.complete_whole(&header, bytes, body).map(Some);
            }
        }
        let header = match self.header {
            Some(header) => header,
            None => {
                self.fill(input, HEADER_BYTES);
                let Some(bytes) = self.partial.first_chunk() else {
                    return Ok(None);
                };
                let header = *self.header.insert(Header::parse(bytes)?);
                if let Some(bytes) = header.plain_payload() {
                    self.payload = std::mem::take(&mut self.spare);
                    self.payload.clear();
                    self.payload.reserve_exact(bytes);
                }
                header
            }
        };
        let whole = HEADER_BYTES + header.body_bytes;
        match header.plain_payload() {
            // Its bytes come to lie where they are handed on.
            Some(bytes) => {
                self.fill(input, HEADER_BYTES + header.fields);
                if self.partial.len() == HEADER_BYTES + header.fields {
                    move_up_to(input, &mut self.payload, bytes);
                }
            }
            None => self.fill(input, whole),
        }
        if self.buffered() < whole {
            return Ok(None);
        }
        self.header = None;
        let partial = std::mem::take(&mut self.partial);
        let Some((bytes, body)) = partial.split_first_chunk() else {
            return Ok(None);
        };
        let result = match header.plain_payload() {
            Some(_) => {
                let payload = std::mem::take(&mut self.payload);
                self.complete(&header, bytes, body, PayloadBytes::Apart(payload))
            }
            None => self.complete_whole(&header, bytes, body),
        };
        // The allocation serves the next partial frame.
        self.partial = partial;
        self.partial.clear();
        result.map(Some)
    }

    /// Moves input until `length` bytes are held or the input ends.
    fn fill(&mut self, input: &mut &[u8], length: usize) {
        move_up_to(input, &mut self.partial, length);
    }

    /// A frame that lies in one piece.
    fn complete_whole(
        &mut self,
        header: &Header,
        bytes: &[u8; HEADER_BYTES],
        body: &[u8],
    ) -> Result<Frame, FrameError> {
        let (fields, payload) = match header.kind {
            EAGER => body.split_at(header.fields.min(body.len())),
            _ => (body, &body[..0]),
        };
        self.complete(header, bytes, fields, PayloadBytes::Here(payload))
    }

    fn complete(
        &mut self,
        header: &Header,
        bytes: &[u8; HEADER_BYTES],
        fields: &[u8],
        payload: PayloadBytes<'_>,
    ) -> Result<Frame, FrameError> {
        let expected = checksum(bytes, fields);
        if header.crc != expected {
            return Err(FrameError::Checksum {
                expected,
                arrived: header.crc,
            });
        }
        if header.sequence != self.sequence {
            return Err(FrameError::Sequence {
                expected: self.sequence,
                arrived: header.sequence,
            });
        }
        let frame = field::parse(header.kind, fields, payload, &mut self.spare)?;
        // One that was changed on its way comes again under its number.
        self.sequence = self.sequence.wrapping_add(1);
        self.read += (HEADER_BYTES + header.body_bytes) as u64;
        Ok(frame)
    }
}

/// CRC32C of a frame but for an eager payload, which has its own.
fn checksum(bytes: &[u8; HEADER_BYTES], fields: &[u8]) -> u32 {
    let (near, rest) = fields.split_at(fields.len().min(START_BYTES - HEADER_BYTES));
    // In one piece with the header, whose checksum counts as 0.
    let mut start = [0; START_BYTES];
    start[..12].copy_from_slice(&bytes[..12]);
    let start = &mut start[..HEADER_BYTES + near.len()];
    start[HEADER_BYTES..].copy_from_slice(near);
    match rest {
        [] => crc32c(start),
        _ => crc32c_of_parts(&[start, rest]),
    }
}

/// Moves input until `to` holds `length` bytes or the input ends.
fn move_up_to(input: &mut &[u8], to: &mut Vec<u8>, length: usize) {
    let missing = length.saturating_sub(to.len());
    let (taken, rest) = input.split_at(missing.min(input.len()));
    to.extend_from_slice(taken);
    *input = rest;
}

/// A header whose kind is known and whose body fits.
#[derive(Clone, Copy, Debug)]
struct Header {
    kind: u8,
    /// Bytes of the body before an eager payload; 0 for other kinds.
    fields: usize,
    body_bytes: usize,
    sequence: u32,
    crc: u32,
}

impl Header {
    fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let (magic, [kind, fields]) = (u16::from_le_bytes(array(bytes, 0)), array(bytes, 2));
        if magic != MAGIC {
            return Err(FrameError::Magic { arrived: magic });
        }
        let Some(frame) = kind_name(kind) else {
            return Err(FrameError::kind(kind));
        };
        let arrived = u32::from_le_bytes(array(bytes, 4));
        let body_bytes = arrived as usize;
        // Of other kinds it is 0.
        if fields != 0 && (kind != EAGER || usize::from(fields) > body_bytes) {
            let expected = "before a payload that the body has room for";
            return Err(FrameError::field(frame, "fields", expected, fields.into()));
        }
        if body_bytes > MAX_BODY_BYTES {
            let expected = format!("of at most {MAX_BODY_BYTES} bytes");
            return Err(FrameError::field(frame, "a body", expected, arrived.into()));
        }
        Ok(Self {
            kind,
            fields: fields.into(),
            body_bytes,
            sequence: u32::from_le_bytes(array(bytes, 8)),
            crc: u32::from_le_bytes(array(bytes, 12)),
        })
    }
}

impl Header {
    /// Bytes of a payload that may come unsealed.
    fn plain_payload(&self) -> Option<usize> {
        let bytes = self.body_bytes - self.fields;
        (self.kind == EAGER && bytes >= LEAST_PLAIN_BYTES).then_some(bytes)
    }
}

#[cfg(test)]
mod tests;
