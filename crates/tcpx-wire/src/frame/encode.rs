//! Frame to bytes.

use super::{
    Destination, Detail, EAGER_FIELDS, EncodeError, Frame, Grant, HEADER_BYTES, MAGIC,
    MAX_BODY_BYTES, MAX_EAGER_BYTES, MAX_SETUP_BYTES, RefuseReason, Settings,
};
use crate::crc::{Joiner, crc32c};
use crate::pieces::MAX_PART_BYTES;
use crate::window::Place;

/// Appends the frame's bytes to `out`.
///
/// `sequence` counts the frames of this direction from 0 and wraps after `u32::MAX`.
///
/// # Errors
/// When a field is out of bounds; `out` is then unchanged.
pub fn encode(frame: &Frame, sequence: u32, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    encode_with(&mut Joiner::default(), frame, sequence, out)
}

/// As [`encode`], with what the frames before have left.
pub(super) fn encode_with(
    joiner: &mut Joiner,
    frame: &Frame,
    sequence: u32,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    check(frame)?;
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    body(frame, out);

    let bytes = &mut out[start..];
    // `check` bounds every field, so the length fits; see `the_longest_frames_fit`.
    let body_bytes = (bytes.len() - HEADER_BYTES) as u32;
    let header = &mut bytes[..HEADER_BYTES];
    header[0..2].copy_from_slice(&MAGIC.to_le_bytes());
    header[2] = frame.kind();
    header[4..8].copy_from_slice(&body_bytes.to_le_bytes());
    header[8..12].copy_from_slice(&sequence.to_le_bytes());
    let of_payload = match frame {
        Frame::Eager { payload, .. } => payload.known_crc32c(),
        _ => None,
    };
    let crc = match of_payload {
        Some(known) => {
            let (start, payload) = bytes.split_at(HEADER_BYTES + EAGER_FIELDS);
            joiner.with_known(start, payload, known)
        }
        None => crc32c(bytes),
    };
    bytes[12..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    Ok(())
}

fn check(frame: &Frame) -> Result<(), EncodeError> {
    let at_most = |payload: &[u8], limit| {
        if payload.len() <= limit {
            return Ok(());
        }
        Err(EncodeError::TooLong {
            frame: frame.name(),
            field: "payload",
            limit,
            actual: payload.len(),
        })
    };
    match frame {
        Frame::Settings(settings) => Ok(settings.validate()?),
        Frame::Setup { payload, .. } => at_most(payload, MAX_SETUP_BYTES),
        Frame::Eager { payload, .. } => at_most(payload, MAX_EAGER_BYTES),
        Frame::Pieces { part, .. } => at_most(part, MAX_PART_BYTES),
        Frame::Grant { grant, .. } | Frame::Posted { grant, .. } if grant.chunk_bytes == 0 => {
            Err(EncodeError::ZeroChunk)
        }
        _ => Ok(()),
    }
}

fn body(frame: &Frame, out: &mut Vec<u8>) {
    let mut body = Body(out);
    match frame {
        Frame::Settings(settings) => body.settings(settings),
        Frame::Setup {
            round,
            last,
            payload,
        } => {
            body.put(round.to_le_bytes());
            body.put([u8::from(*last)]);
            body.0.extend_from_slice(payload);
        }
        Frame::Ready | Frame::GoodbyeAck => {}
        Frame::Waiting {
            transfer,
            tag,
            number,
            bytes,
            level,
        } => {
            body.put(transfer.0.to_le_bytes());
            body.put(tag.0.to_le_bytes());
            body.put(number.to_le_bytes());
            body.put(bytes.to_le_bytes());
            body.put([*level as u8]);
        }
        Frame::Grant { transfer, grant } => {
            body.put(transfer.0.to_le_bytes());
            body.grant(grant);
        }
        Frame::Posted {
            tag,
            number,
            capacity,
            grant,
        } => {
            body.put(tag.0.to_le_bytes());
            body.put(number.to_le_bytes());
            body.put(capacity.to_le_bytes());
            body.grant(grant);
        }
        Frame::Revoke { tag, number }
        | Frame::Withdraw { tag, number }
        | Frame::Forget { tag, number } => {
            body.put(tag.0.to_le_bytes());
            body.put(number.to_le_bytes());
        }
        Frame::Forgotten { tag, forgotten } => {
            body.put(tag.0.to_le_bytes());
            body.put([u8::from(*forgotten)]);
        }
        Frame::Refuse { transfer, reason } => {
            body.put(transfer.0.to_le_bytes());
            body.refuse_reason(*reason);
        }
        Frame::Destination { transfer, to } => {
            body.put(transfer.0.to_le_bytes());
            body.destination(to);
        }
        Frame::Get {
            request,
            from,
            bytes,
            level,
        } => {
            body.put(request.to_le_bytes());
            body.place(from);
            body.put(bytes.to_le_bytes());
            body.put([*level as u8]);
        }
        Frame::Pieces { list, last, part } => {
            body.put(list.to_le_bytes());
            body.put([u8::from(*last)]);
            body.0.extend_from_slice(part);
        }
        Frame::DropPieces { list } => body.put(list.to_le_bytes()),
        Frame::GetPieces {
            request,
            list,
            bytes,
            level,
        } => {
            body.put(request.to_le_bytes());
            body.put(list.to_le_bytes());
            body.put(bytes.to_le_bytes());
            body.put([*level as u8]);
        }
        Frame::RefuseGet { request, reason } => {
            body.put(request.to_le_bytes());
            body.refuse_reason(*reason);
        }
        Frame::Eager {
            transfer,
            tag,
            number,
            level,
            payload,
        } => {
            body.put(transfer.0.to_le_bytes());
            body.put(tag.0.to_le_bytes());
            body.put(number.to_le_bytes());
            body.put([*level as u8]);
            body.0.extend_from_slice(payload);
        }
        Frame::EagerDone { transfer } => body.put(transfer.0.to_le_bytes()),
        Frame::EagerCredit { bytes } => body.put(bytes.to_le_bytes()),
        Frame::Placed { transfer, chunks } => {
            body.put(transfer.0.to_le_bytes());
            body.put(chunks.first().to_le_bytes());
            body.put(chunks.count().to_le_bytes());
            body.0.extend(chunks.bitmap());
        }
        Frame::Digest { transfer, crc32c } => {
            body.put(transfer.0.to_le_bytes());
            body.put(crc32c.to_le_bytes());
        }
        Frame::Verdict {
            transfer,
            crc32c,
            matches,
        } => {
            body.put(transfer.0.to_le_bytes());
            body.put(crc32c.to_le_bytes());
            body.put([u8::from(*matches)]);
        }
        Frame::Cancel {
            transfer,
            from,
            reason,
            detail,
        } => {
            body.put(transfer.0.to_le_bytes());
            body.put([*from as u8, *reason as u8]);
            body.text(detail);
        }
        Frame::Cancelled { transfer, from } => {
            body.put(transfer.0.to_le_bytes());
            body.put([*from as u8]);
        }
        Frame::Heartbeat { counter } => body.put(counter.to_le_bytes()),
        Frame::Received { next } => body.put(next.to_le_bytes()),
        Frame::Goodbye { reason, detail } => {
            body.put([*reason as u8]);
            body.text(detail);
        }
    }
}

/// Appends fields; every text in it is already bounded.
struct Body<'a>(&'a mut Vec<u8>);

impl Body<'_> {
    fn put<const BYTES: usize>(&mut self, bytes: [u8; BYTES]) {
        self.0.extend_from_slice(&bytes);
    }

    fn grant(&mut self, grant: &Grant) {
        let Grant {
            chunk_bytes,
            window,
            level,
            taper,
        } = *grant;
        self.put(chunk_bytes.to_le_bytes());
        self.put(window.to_le_bytes());
        self.put([level as u8]);
        if let Some(taper) = taper {
            self.put([taper.halvings()]);
            self.put(taper.each().to_le_bytes());
        }
    }

    fn refuse_reason(&mut self, reason: RefuseReason) {
        let (reason, capacity) = match reason {
            RefuseReason::TooLarge { capacity } => (0, capacity),
            RefuseReason::Cancelled => (1, 0),
            RefuseReason::Shutdown => (2, 0),
            RefuseReason::DeadlineExpired => (3, 0),
            RefuseReason::UnknownWindow => (4, 0),
            RefuseReason::NotPermitted => (5, 0),
            RefuseReason::OutOfRange => (6, 0),
            RefuseReason::MemoryFailed => (7, 0),
            RefuseReason::PutFailed => (8, 0),
        };
        self.put([reason]);
        self.put(u64::to_le_bytes(capacity));
    }

    fn place(&mut self, place: &Place) {
        self.put(place.window.to_le_bytes());
        self.put(*place.secret.as_bytes());
        self.put(place.offset.to_le_bytes());
    }

    fn destination(&mut self, to: &Destination) {
        match to {
            Destination::Window { place, notified } => {
                self.put([0]);
                self.place(place);
                self.put([u8::from(*notified)]);
            }
            Destination::Reply { request } => {
                self.put([1]);
                self.put(request.to_le_bytes());
            }
            Destination::Notification { first, count } => {
                self.put([2]);
                self.put(first.0.to_le_bytes());
                self.put(count.to_le_bytes());
            }
            Destination::Pieces { list, notified } => {
                self.put([3]);
                self.put(list.to_le_bytes());
                self.put([u8::from(*notified)]);
            }
        }
    }

    /// Length as u16, then the bytes.
    fn text(&mut self, text: &str) {
        const { assert!(Detail::MAX_BYTES <= u16::MAX as usize) };
        self.put((text.len() as u16).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
    }

    fn settings(&mut self, settings: &Settings) {
        let Settings {
            network,
            channels,
            chunk_bytes,
            send_window,
            receive_window,
            eager_limit,
            eager_credit,
            heartbeat_ms,
            dead_after_ms,
            memory,
            software,
        } = settings;
        self.text(network);
        self.put(channels.to_le_bytes());
        self.put(chunk_bytes.to_le_bytes());
        self.put(send_window.to_le_bytes());
        self.put(receive_window.to_le_bytes());
        self.put(eager_limit.to_le_bytes());
        self.put(eager_credit.to_le_bytes());
        self.put(heartbeat_ms.to_le_bytes());
        self.put(dead_after_ms.to_le_bytes());
        self.text(memory);
        self.text(software);
    }
}

// The payload and the fixed fields beside it.
const _: () = assert!(MAX_SETUP_BYTES + 64 <= MAX_BODY_BYTES);
const _: () = assert!(MAX_EAGER_BYTES + 64 <= MAX_BODY_BYTES);
const _: () = assert!(MAX_PART_BYTES + 64 <= MAX_BODY_BYTES);
