//! Frame to bytes.

use super::{
    EAGER, Frame, FrameError, HEADER_BYTES, MAGIC, MAX_BODY_BYTES, MAX_EAGER_BYTES,
    MAX_SETUP_BYTES, most_payload,
};
use crate::crc::crc32c;
use crate::pieces::MAX_PART_BYTES;

/// Appends the frame's bytes to `out`.
///
/// `sequence` counts the frames of this direction from 0 and wraps after `u32::MAX`.
///
/// # Errors
/// When a field is out of bounds; `out` is then unchanged.
pub fn encode(frame: &Frame, sequence: u32, out: &mut Vec<u8>) -> Result<(), FrameError> {
    let payload = encode_head(frame, sequence, out)?;
    out.extend_from_slice(payload);
    Ok(())
}

/// As [`encode`], but for the payload of an eager frame, which is returned: it follows.
///
/// # Errors
/// As [`encode`].
pub fn encode_head<'a>(
    frame: &'a Frame,
    sequence: u32,
    out: &mut Vec<u8>,
) -> Result<&'a [u8], FrameError> {
    check(frame)?;
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    frame.put(out);
    let bytes = &mut out[start..];
    let fields = bytes.len() - HEADER_BYTES;
    let payload: &[u8] = match frame {
        Frame::Eager { payload, .. } => payload,
        _ => &[],
    };
    // `check` bounds every field, so the length fits; see `the_longest_frames_fit`.
    let body_bytes = (fields + payload.len()) as u32;
    let header = &mut bytes[..HEADER_BYTES];
    header[0..2].copy_from_slice(&MAGIC.to_le_bytes());
    header[2] = frame.kind();
    header[4..8].copy_from_slice(&body_bytes.to_le_bytes());
    header[8..12].copy_from_slice(&sequence.to_le_bytes());
    if frame.kind() == EAGER {
        // At most 48 bytes: transfer, level, a put's destination, the payload's checksum.
        header[3] = fields as u8;
    }
    let crc = crc32c(bytes);
    bytes[12..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    Ok(payload)
}

fn check(frame: &Frame) -> Result<(), FrameError> {
    let actual = match frame {
        Frame::Settings(settings) => return Ok(settings.validate()?),
        Frame::Grant { grant, .. } | Frame::Posted { grant, .. } if grant.chunk_bytes == 0 => {
            return Err(FrameError::field("grant", "chunk_bytes", "at least 1", 0));
        }
        Frame::Setup { payload, .. } | Frame::Pieces { part: payload, .. } => payload.len(),
        Frame::Eager { payload, .. } => payload.len(),
        _ => return Ok(()),
    };
    let limit = most_payload(frame.kind());
    if actual <= limit {
        return Ok(());
    }
    let expected = format!("of at most {limit} bytes");
    Err(FrameError::field(
        frame.name(),
        "payload",
        expected,
        actual as u64,
    ))
}

// The payload and the fixed fields beside it.
const _: () = assert!(MAX_SETUP_BYTES + 64 <= MAX_BODY_BYTES);
const _: () = assert!(MAX_EAGER_BYTES + 64 <= MAX_BODY_BYTES);
const _: () = assert!(MAX_PART_BYTES + 64 <= MAX_BODY_BYTES);
