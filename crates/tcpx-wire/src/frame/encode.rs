//! Frame to bytes.

use super::{
    Frame, FrameError, HEADER_BYTES, MAGIC, MAX_BODY_BYTES, MAX_EAGER_BYTES, MAX_SETUP_BYTES,
    most_payload,
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
    check(frame)?;
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    frame.put(out);

    let bytes = &mut out[start..];
    // `check` bounds every field, so the length fits; see `the_longest_frames_fit`.
    let body_bytes = (bytes.len() - HEADER_BYTES) as u32;
    let header = &mut bytes[..HEADER_BYTES];
    header[0..2].copy_from_slice(&MAGIC.to_le_bytes());
    header[2] = frame.kind();
    header[4..8].copy_from_slice(&body_bytes.to_le_bytes());
    header[8..12].copy_from_slice(&sequence.to_le_bytes());
    let mut summed = HEADER_BYTES + body_bytes as usize;
    if let Frame::Eager { payload, .. } = frame {
        summed -= payload.len();
        // At most 48 bytes: transfer, level, a put's destination, the payload's checksum.
        header[3] = (summed - HEADER_BYTES) as u8;
    }
    let crc = crc32c(&bytes[..summed]);
    bytes[12..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    Ok(())
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
