//! Frames of the buffer daemon, as far as questions that change nothing need them.

use std::io;

/// Field 1, bytes.
const RAW_BYTES: u8 = 0x0a;

/// A frame whose message holds `bytes` in field 1.
pub(super) fn raw(bytes: &[u8]) -> io::Result<Vec<u8>> {
    // One byte of length in the message is enough for a PCI address.
    let length = u8::try_from(bytes.len())
        .ok()
        .filter(|length| *length < 0x80)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let mut frame = (u16::from(length) + 2).to_be_bytes().to_vec();
    frame.extend([RAW_BYTES, length]);
    frame.extend(bytes);
    Ok(frame)
}

/// Field 1 of a message; fields before it are skipped. `None` when there is none, or the message is damaged.
pub(super) fn raw_bytes(mut message: &[u8]) -> Option<&[u8]> {
    while !message.is_empty() {
        let (key, rest) = varint(message)?;
        let (value, rest) = match key & 7 {
            0 => (&[][..], varint(rest)?.1),
            1 => rest.split_at_checked(8)?,
            2 => {
                let (length, rest) = varint(rest)?;
                rest.split_at_checked(usize::try_from(length).ok()?)?
            }
            5 => rest.split_at_checked(4)?,
            _ => return None,
        };
        if key == u64::from(RAW_BYTES) {
            return Some(value);
        }
        message = rest;
    }
    None
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0_u64;
    for (index, byte) in bytes.iter().enumerate().take(9) {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[index + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_the_frame_that_the_daemon_expects() {
        assert_eq!(raw(b"Ok.").expect("short"), b"\x00\x05\x0a\x03Ok.");
        assert!(raw(&[0; 128]).is_err());
    }

    #[test]
    fn raw_bytes_are_found_behind_other_fields_and_damage_gives_none() {
        assert_eq!(raw_bytes(b"\x0a\x03Ok."), Some(&b"Ok."[..]));
        assert_eq!(
            raw_bytes(b"\x18\x96\x01\x25abcd\x29abcdefgh\x0a\x01x"),
            Some(&b"x"[..])
        );
        assert_eq!(raw_bytes(b"\x0a\x80\x01"), None);
        for damaged in [
            &b""[..],
            b"\x0a",
            b"\x0a\x05Ok.",
            b"\x0b\x01x",
            &[0xff; 40],
            b"\x12\x03",
        ] {
            assert_eq!(raw_bytes(damaged), None, "{damaged:?}");
        }
    }
}
