//! Bytes that are no frame, and frames that do not become bytes: the error names what is wrong, and
//! where.

use super::*;
use crate::frame::{GoodbyeReason, Grant, InvalidSettings, RefuseReason};

const ROOM: &str = "before a payload that the body has room for";

fn field(frame: &'static str, field: &'static str, expected: &str, arrived: u64) -> FrameError {
    FrameError::Field {
        frame,
        field,
        expected: expected.to_owned(),
        arrived,
    }
}

#[test]
fn each_header_error_names_what_arrived() {
    let good = bytes_of(&Frame::Ready, 0);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        decode_one(&bytes).unwrap_err()
    };
    assert_eq!(with(0, b'H'), FrameError::Magic { arrived: 0x5448 });
    assert_eq!(with(2, 0), field("unknown", "kind", "1 to 29", 0));
    assert_eq!(with(2, 30), field("unknown", "kind", "1 to 29", 30));
    assert_eq!(with(3, 4), field("ready", "fields", ROOM, 4));
    let most = format!("of at most {MAX_BODY_BYTES} bytes");
    assert_eq!(with(7, 1), field("ready", "a body", &most, 1 << 24));
    assert!(matches!(with(12, !good[12]), FrameError::Checksum { .. }));
}

/// Where a payload begins is said twice: by the header, and by the fields before it.
#[test]
fn a_payload_begins_where_its_fields_end() {
    for length in [0, 100, LEAST_PLAIN_BYTES] {
        let good = bytes_of(&eager_of(length), 0);
        let with = |fields: u8| {
            let mut bytes = good.clone();
            bytes[3] = fields;
            let (ours, whole) = (usize::from(good[3]), HEADER_BYTES + usize::from(fields));
            let sum = crc32c(&bytes[whole..]);
            bytes[HEADER_BYTES + ours - 4..HEADER_BYTES + ours].copy_from_slice(&sum.to_le_bytes());
            bytes[12..HEADER_BYTES].fill(0);
            let sum = crc32c(&bytes[..whole]);
            bytes[12..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
            // In one piece, and in two.
            let whole = decode_one(&bytes);
            let mut decoder = FrameDecoder::new();
            let (one, two) = bytes.split_at(bytes.len() / 2);
            assert_eq!(decoder.next(&mut &one[..]), Ok(None));
            assert_eq!(decoder.next(&mut &two[..]), whole);
            whole
        };
        assert_eq!(with(good[3]), Ok(Some(eager_of(length))));
        let short = with(good[3] - 1);
        assert!(matches!(short, Err(FrameError::Field { .. })), "{short:?}");
        if length > 0 {
            let long = field("eager", "its end", "behind the last field", 1);
            assert_eq!(with(good[3] + 1), Err(long));
        }
    }
    let mut beyond = bytes_of(&eager_of(0), 0);
    beyond[3] += 1;
    let refused = field("eager", "fields", ROOM, beyond[3].into());
    assert_eq!(decode_one(&beyond), Err(refused));
}

fn eager_of(length: usize) -> Frame {
    Frame::Eager {
        transfer: TransferId(7),
        level: Level::Placed,
        to: Destination::Reply { request: 3 },
        payload: vec![5; length].into(),
    }
}

#[test]
fn a_header_is_judged_before_its_body_arrives() {
    let mut header = bytes_of(&Frame::Ready, 0);
    header[4..8].copy_from_slice(&(MAX_BODY_BYTES as u32 + 1).to_le_bytes());
    let mut decoder = FrameDecoder::new();
    assert_eq!(decoder.next(&mut &header[..9]), Ok(None));
    let most = format!("of at most {MAX_BODY_BYTES} bytes");
    let refused = field("ready", "a body", &most, MAX_BODY_BYTES as u64 + 1);
    assert_eq!(decoder.next(&mut &header[9..]), Err(refused));
    assert_eq!(decoder.buffered(), 0);
}

#[test]
fn each_body_error_names_its_field() {
    let transfer = TransferId(1);
    let waiting = Frame::Waiting {
        transfer,
        level: Level::Placed,
        bytes: 3,
        to: Destination::next_receive(Tag(2)),
    };
    assert_eq!(
        decode_one(&tampered(&waiting, |bytes| bytes[HEADER_BYTES + 8] = 3)),
        Err(field("waiting", "level", "0 to 2", 3))
    );
    assert_eq!(
        decode_one(&tampered(&waiting, |bytes| bytes.truncate(HEADER_BYTES + 13))),
        Err(field("waiting", "bytes", "of 8 bytes", 4))
    );
    assert_eq!(
        decode_one(&tampered(&waiting, |bytes| bytes.push(0))),
        Err(field("waiting", "its end", "behind the last field", 1))
    );

    let grant = Frame::Grant {
        transfer,
        grant: Grant {
            chunk_bytes: 1,
            window: 0,
            level: Level::Sent,
            taper: Taper::new(1, 2),
        },
    };
    assert_eq!(
        decode_one(&tampered(&grant, |bytes| bytes[HEADER_BYTES + 8] = 0)),
        Err(field("grant", "chunk_bytes", "at least 1", 0))
    );
    for (at, name, expected, arrived) in [
        (21, "halvings", "1 to 8", 0),
        (21, "halvings", "1 to 8", 9),
        (22, "each", "1 to 1024", 0),
        (23, "each", "1 to 1024", 255 * 256 + 2),
    ] {
        let value = if at == 23 { 255 } else { arrived as u8 };
        assert_eq!(
            decode_one(&tampered(&grant, |bytes| bytes[HEADER_BYTES + at] = value)),
            Err(field("grant", name, expected, arrived))
        );
    }
    assert_eq!(
        decode_one(&tampered(&grant, |bytes| bytes.truncate(bytes.len() - 1))),
        Err(field("grant", "each", "of 2 bytes", 1))
    );

    let goodbye = Frame::Goodbye {
        reason: GoodbyeReason::Normal,
        detail: "é".into(),
    };
    assert_eq!(
        decode_one(&tampered(&goodbye, |bytes| *bytes.last_mut().unwrap() = b'x')),
        Err(field("goodbye", "detail", "in UTF-8", 0xc3))
    );
    assert_eq!(
        decode_one(&tampered(&goodbye, |bytes| bytes[HEADER_BYTES + 2] = 3)),
        Err(field("goodbye", "detail", "of at most 512 bytes", 0x302))
    );

    let refuse = Frame::Refuse {
        transfer,
        reason: RefuseReason::TooLarge { capacity: 5 },
    };
    assert_eq!(
        decode_one(&tampered(&refuse, |bytes| bytes[HEADER_BYTES + 8] = 1)),
        Err(field("refuse", "capacity", "0 for this reason", 5))
    );

    let channels = HEADER_BYTES + 2 + "tcp".len();
    assert_eq!(
        decode_one(&tampered(&Frame::from(settings()), |bytes| bytes
            [channels] =
            0)),
        Err(FrameError::Settings(InvalidSettings {
            field: "channels",
            expected: "1 to 1024".to_owned(),
            arrived: 0
        }))
    );
}

#[test]
fn a_frame_out_of_bounds_is_not_encoded() {
    let refused = |frame: &Frame| {
        let mut out = b"kept".to_vec();
        let error = encode(frame, 0, &mut out).unwrap_err();
        assert_eq!(out, b"kept");
        error
    };
    let payload = vec![0; MAX_EAGER_BYTES + 1].into();
    let too_long = refused(&Frame::Eager {
        transfer: TransferId(0),
        level: Level::Sent,
        to: Destination::next_receive(Tag(0)),
        payload,
    });
    assert_eq!(
        too_long,
        field(
            "eager",
            "payload",
            &format!("of at most {MAX_EAGER_BYTES} bytes"),
            MAX_EAGER_BYTES as u64 + 1
        )
    );
    let network = "n".repeat(65);
    assert!(matches!(
        refused(&Frame::from(Settings {
            network,
            ..settings()
        })),
        FrameError::Settings(InvalidSettings {
            field: "network",
            arrived: 65,
            ..
        })
    ));
    assert!(matches!(
        refused(&Frame::from(Settings {
            dead_after_ms: 500,
            ..settings()
        })),
        FrameError::Settings(InvalidSettings {
            field: "dead_after_ms",
            ..
        })
    ));
    assert_eq!(
        refused(&Frame::Grant {
            transfer: TransferId(0),
            grant: Grant {
                chunk_bytes: 0,
                window: 0,
                level: Level::Sent,
                taper: None
            }
        }),
        field("grant", "chunk_bytes", "at least 1", 0)
    );
}
