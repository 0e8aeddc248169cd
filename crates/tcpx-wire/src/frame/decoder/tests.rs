use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::frame::{
    CancelReason, Detail, EncodeError, GoodbyeReason, InvalidPlaced, InvalidSettings, Level,
    MAX_EAGER_BYTES, MAX_SETUP_BYTES, PlacedChunks, RefuseReason, Role, Settings, Tag, TransferId,
    encode,
};
use crate::plan::Taper;

fn bytes_of(frame: &Frame, sequence: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(frame, sequence, &mut bytes).unwrap();
    bytes
}

fn decode_one(mut bytes: &[u8]) -> Result<Option<Frame>, FrameError> {
    FrameDecoder::new().next(&mut bytes)
}

/// Changes the bytes of a frame and makes its checksum fit again.
fn tampered(frame: &Frame, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = bytes_of(frame, 0);
    change(&mut bytes);
    let body_bytes = (bytes.len() - HEADER_BYTES) as u32;
    bytes[4..8].copy_from_slice(&body_bytes.to_le_bytes());
    bytes[12..16].fill(0);
    let crc = crc32c_of_parts(&[&bytes]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn settings() -> Settings {
    Settings {
        network: "tcp".into(),
        channels: 8,
        chunk_bytes: 1 << 20,
        send_window: 12,
        receive_window: 16,
        eager_limit: 16 * 1024,
        eager_credit: 256 * 1024,
        heartbeat_ms: 500,
        dead_after_ms: 5000,
        memory: "host".into(),
        software: "tcpx 0.1.0".into(),
    }
}

fn any_taper() -> impl Strategy<Value = Option<Taper>> {
    (0..=Taper::MAX_HALVINGS, 1..=Taper::MAX_EACH)
        .prop_map(|(halvings, each)| Taper::new(halvings, each))
}

fn any_settings() -> impl Strategy<Value = Settings> {
    let numbers = (
        1..=Settings::MAX_CHANNELS,
        1..=Settings::MAX_CHUNK_BYTES,
        1u16..,
        1u16..,
        0..=MAX_EAGER_BYTES as u32,
        any::<u16>(),
        1..u32::MAX / 2,
        1..u32::MAX / 2,
    );
    let texts = ("[a-zé:]{1,32}", "\\PC{0,16}", "\\PC{0,16}");
    (numbers, texts).prop_map(|(numbers, (network, memory, software))| {
        let (channels, chunk_bytes, send_window, receive_window, eager_limit, more, beat, gap) =
            numbers;
        Settings {
            network,
            channels,
            chunk_bytes,
            send_window,
            receive_window,
            eager_limit,
            eager_credit: eager_limit + u32::from(more),
            heartbeat_ms: beat,
            dead_after_ms: beat + gap,
            memory,
            software,
        }
    })
}

fn any_placed() -> impl Strategy<Value = PlacedChunks> {
    (
        any::<u32>(),
        1..=PlacedChunks::MAX_COUNT,
        vec(any::<u16>(), 0..50),
    )
        .prop_map(|(first, count, chunks)| {
            let first = first.min(u32::MAX - u32::from(count));
            let mut set = PlacedChunks::new(first, count).unwrap();
            for chunk in chunks {
                set.insert(first + u32::from(chunk % count));
            }
            set
        })
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let id = || any::<u64>().prop_map(TransferId);
    let tag = || any::<u64>().prop_map(Tag);
    let level = || {
        prop_oneof![
            Just(Level::Sent),
            Just(Level::Placed),
            Just(Level::Verified)
        ]
    };
    let role = || prop_oneof![Just(Role::Sender), Just(Role::Receiver)];
    let detail = || "\\PC{0,200}".prop_map(Detail::from);
    let refuse = prop_oneof![
        any::<u64>().prop_map(|capacity| RefuseReason::TooLarge { capacity }),
        Just(RefuseReason::Cancelled),
        Just(RefuseReason::Shutdown),
        Just(RefuseReason::DeadlineExpired),
    ];
    let cancel = prop_oneof![
        Just(CancelReason::Requested),
        Just(CancelReason::DeadlineExpired),
        Just(CancelReason::ChannelFailed),
        Just(CancelReason::MemoryFailed),
        Just(CancelReason::Shutdown),
        Just(CancelReason::Protocol),
    ];
    let goodbye = prop_oneof![
        Just(GoodbyeReason::Normal),
        Just(GoodbyeReason::Shutdown),
        Just(GoodbyeReason::Error),
    ];
    prop_oneof![
        any_settings().prop_map(Frame::Settings),
        (any::<u16>(), any::<bool>(), vec(any::<u8>(), 0..300)).prop_map(
            |(round, last, payload)| Frame::Setup {
                round,
                last,
                payload
            }
        ),
        Just(Frame::Ready),
        (id(), tag(), any::<u64>(), level()).prop_map(|(transfer, tag, bytes, level)| {
            Frame::Announce {
                transfer,
                tag,
                bytes,
                level,
            }
        }),
        (id(), 1u32.., any::<u64>(), level(), any_taper()).prop_map(
            |(transfer, chunk_bytes, first_sequence, level, taper)| Frame::Grant {
                transfer,
                chunk_bytes,
                first_sequence,
                level,
                taper,
            }
        ),
        (id(), refuse).prop_map(|(transfer, reason)| Frame::Refuse { transfer, reason }),
        (id(), tag(), level(), vec(any::<u8>(), 0..300)).prop_map(
            |(transfer, tag, level, payload)| Frame::Eager {
                transfer,
                tag,
                level,
                payload
            }
        ),
        id().prop_map(|transfer| Frame::EagerDone { transfer }),
        any::<u32>().prop_map(|bytes| Frame::EagerCredit { bytes }),
        (id(), any_placed()).prop_map(|(transfer, chunks)| Frame::Placed { transfer, chunks }),
        (id(), any::<u32>()).prop_map(|(transfer, crc32c)| Frame::Digest { transfer, crc32c }),
        (id(), any::<u32>(), any::<bool>()).prop_map(|(transfer, crc32c, matches)| {
            Frame::Verdict {
                transfer,
                crc32c,
                matches,
            }
        }),
        (id(), role(), cancel, detail()).prop_map(|(transfer, from, reason, detail)| {
            Frame::Cancel {
                transfer,
                from,
                reason,
                detail,
            }
        }),
        (id(), role()).prop_map(|(transfer, from)| Frame::Cancelled { transfer, from }),
        any::<u64>().prop_map(|counter| Frame::Heartbeat { counter }),
        (goodbye, detail()).prop_map(|(reason, detail)| Frame::Goodbye { reason, detail }),
        Just(Frame::GoodbyeAck),
        any::<u32>().prop_map(|next| Frame::Received { next }),
    ]
}

proptest! {
    #[test]
    fn frames_survive_any_slicing(
        frames in vec(any_frame(), 1..12),
        cuts in vec(1usize..200, 1..20),
    ) {
        let mut bytes = Vec::new();
        for (sequence, frame) in (0..).zip(&frames) {
            encode(frame, sequence, &mut bytes).unwrap();
        }
        let mut decoder = FrameDecoder::new();
        let mut arrived = Vec::new();
        let mut rest = bytes.as_slice();
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (mut slice, later) = rest.split_at((*cut).min(rest.len()));
            rest = later;
            while let Some(frame) = decoder.next(&mut slice).unwrap() {
                arrived.push(frame);
            }
            prop_assert!(slice.is_empty());
        }
        prop_assert_eq!(arrived, frames);
        prop_assert_eq!(decoder.buffered(), 0);
    }

    #[test]
    fn any_damaged_byte_is_noticed(
        frame in any_frame(),
        at in any::<prop::sample::Index>(),
        by in 1u8..,
    ) {
        let mut bytes = bytes_of(&frame, 0);
        let at = at.index(bytes.len());
        bytes[at] ^= by;
        let result = decode_one(&bytes);
        prop_assert!(!matches!(result, Ok(Some(_))), "byte {} passed: {:?}", at, result);
    }

    #[test]
    fn any_body_with_a_fitting_checksum_is_a_frame_or_an_error(
        kind in 0u8..20,
        body in vec(any::<u8>(), 0..120),
    ) {
        let bytes = tampered(&Frame::Ready, |bytes| {
            bytes[2] = kind;
            bytes.extend_from_slice(&body);
        });
        if let Ok(Some(frame)) = decode_one(&bytes) {
            // Accepted means canonical: the frame has these bytes and no others.
            prop_assert_eq!(bytes_of(&frame, 0), bytes);
        }
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
    assert_eq!(with(2, 0), FrameError::Kind { arrived: 0 });
    assert_eq!(with(2, 19), FrameError::Kind { arrived: 19 });
    assert_eq!(with(3, 4), FrameError::Flags { arrived: 4 });
    assert_eq!(with(7, 1), FrameError::BodyTooLong { arrived: 1 << 24 });
    assert!(matches!(with(12, !good[12]), FrameError::Checksum { .. }));
}

#[test]
fn a_header_is_judged_before_its_body_arrives() {
    let mut header = bytes_of(&Frame::Ready, 0);
    header[4..8].copy_from_slice(&(MAX_BODY_BYTES as u32 + 1).to_le_bytes());
    let mut decoder = FrameDecoder::new();
    assert_eq!(decoder.next(&mut &header[..9]), Ok(None));
    assert_eq!(
        decoder.next(&mut &header[9..]),
        Err(FrameError::BodyTooLong {
            arrived: MAX_BODY_BYTES as u32 + 1
        })
    );
    assert_eq!(decoder.buffered(), 0);
}

#[test]
fn a_repeated_or_missing_frame_is_an_error_that_stays() {
    let mut decoder = FrameDecoder::new();
    let first = bytes_of(&Frame::Ready, 0);
    let second = bytes_of(&Frame::Ready, 1);
    assert_eq!(decoder.next(&mut &first[..]), Ok(Some(Frame::Ready)));
    let error = FrameError::Sequence {
        expected: 1,
        arrived: 0,
    };
    assert_eq!(decoder.next(&mut &first[..]), Err(error.clone()));
    assert_eq!(decoder.next(&mut &second[..]), Err(error));
}

#[test]
fn each_body_error_names_its_field() {
    let transfer = TransferId(1);
    let announce = Frame::Announce {
        transfer,
        tag: Tag(2),
        bytes: 3,
        level: Level::Placed,
    };
    assert_eq!(
        decode_one(&tampered(&announce, |bytes| *bytes.last_mut().unwrap() = 3)),
        Err(FrameError::Value {
            frame: "announce",
            field: "level",
            expected: "0 to 2",
            arrived: 3
        })
    );
    assert_eq!(
        decode_one(&tampered(&announce, |bytes| bytes.truncate(HEADER_BYTES + 20))),
        Err(FrameError::Truncated {
            frame: "announce",
            field: "bytes",
            needed: 8,
            left: 4
        })
    );
    assert_eq!(
        decode_one(&tampered(&announce, |bytes| bytes.push(0))),
        Err(FrameError::TrailingBytes {
            frame: "announce",
            left: 1
        })
    );

    let grant = Frame::Grant {
        transfer,
        chunk_bytes: 1,
        first_sequence: 0,
        level: Level::Sent,
        taper: Taper::new(1, 2),
    };
    assert_eq!(
        decode_one(&tampered(&grant, |bytes| bytes[HEADER_BYTES + 8] = 0)),
        Err(FrameError::Value {
            frame: "grant",
            field: "chunk_bytes",
            expected: "at least 1",
            arrived: 0
        })
    );
    for (at, field, expected, arrived) in [
        (21, "halvings", "1 to 8", 0),
        (21, "halvings", "1 to 8", 9),
        (22, "each", "1 to 1024", 0),
        (23, "each", "1 to 1024", 255 * 256 + 2),
    ] {
        let value = if at == 23 { 255 } else { arrived as u8 };
        assert_eq!(
            decode_one(&tampered(&grant, |bytes| bytes[HEADER_BYTES + at] = value)),
            Err(FrameError::Value {
                frame: "grant",
                field,
                expected,
                arrived
            })
        );
    }
    assert_eq!(
        decode_one(&tampered(&grant, |bytes| bytes.truncate(bytes.len() - 1))),
        Err(FrameError::Truncated {
            frame: "grant",
            field: "each",
            needed: 2,
            left: 1
        })
    );

    let goodbye = Frame::Goodbye {
        reason: GoodbyeReason::Normal,
        detail: "é".into(),
    };
    assert_eq!(
        decode_one(&tampered(&goodbye, |bytes| *bytes.last_mut().unwrap() = b'x')),
        Err(FrameError::Text {
            frame: "goodbye",
            field: "detail",
            at: 0
        })
    );
    assert_eq!(
        decode_one(&tampered(&goodbye, |bytes| bytes[HEADER_BYTES + 2] = 3)),
        Err(FrameError::TooLong {
            frame: "goodbye",
            field: "detail",
            limit: 512,
            arrived: 0x302
        })
    );

    let refuse = Frame::Refuse {
        transfer,
        reason: RefuseReason::TooLarge { capacity: 5 },
    };
    assert_eq!(
        decode_one(&tampered(&refuse, |bytes| bytes[HEADER_BYTES + 8] = 1)),
        Err(FrameError::Value {
            frame: "refuse",
            field: "capacity",
            expected: "0 for this reason",
            arrived: 5
        })
    );

    let placed = Frame::Placed {
        transfer,
        chunks: PlacedChunks::single(3),
    };
    assert_eq!(
        decode_one(&tampered(&placed, |bytes| *bytes.last_mut().unwrap() = 3)),
        Err(FrameError::Placed(InvalidPlaced::StrayBits { count: 1 }))
    );

    let channels = HEADER_BYTES + 2 + "tcp".len();
    assert_eq!(
        decode_one(&tampered(&Frame::Settings(settings()), |bytes| bytes
            [channels] =
            0)),
        Err(FrameError::Settings(InvalidSettings::Range {
            field: "channels",
            arrived: 0,
            least: 1,
            most: 1024
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
    let payload = vec![0; MAX_EAGER_BYTES + 1];
    let too_long = refused(&Frame::Eager {
        transfer: TransferId(0),
        tag: Tag(0),
        level: Level::Sent,
        payload,
    });
    assert_eq!(
        too_long,
        EncodeError::TooLong {
            frame: "eager",
            field: "payload",
            limit: MAX_EAGER_BYTES,
            actual: MAX_EAGER_BYTES + 1
        }
    );
    let network = "n".repeat(65);
    assert!(matches!(
        refused(&Frame::Settings(Settings {
            network,
            ..settings()
        })),
        EncodeError::Settings(InvalidSettings::Text {
            field: "network",
            arrived: 65,
            ..
        })
    ));
    assert!(matches!(
        refused(&Frame::Settings(Settings {
            dead_after_ms: 500,
            ..settings()
        })),
        EncodeError::Settings(InvalidSettings::Range {
            field: "dead_after_ms",
            ..
        })
    ));
    assert_eq!(
        refused(&Frame::Grant {
            transfer: TransferId(0),
            chunk_bytes: 0,
            first_sequence: 0,
            level: Level::Sent,
            taper: None
        }),
        EncodeError::ZeroChunk
    );
}

#[test]
fn the_longest_frames_fit() {
    let longest = [
        Frame::Setup {
            round: 0,
            last: true,
            payload: vec![7; MAX_SETUP_BYTES],
        },
        Frame::Eager {
            transfer: TransferId(u64::MAX),
            tag: Tag(u64::MAX),
            level: Level::Verified,
            payload: vec![7; MAX_EAGER_BYTES],
        },
    ];
    for frame in longest {
        let bytes = bytes_of(&frame, 0);
        assert!(bytes.len() - HEADER_BYTES <= MAX_BODY_BYTES);
        assert_eq!(decode_one(&bytes), Ok(Some(frame)));
    }
}

#[test]
fn a_payload_comes_in_a_buffer_that_was_given_back_whatever_that_held() {
    let eager = |payload: &[u8]| Frame::Eager {
        transfer: TransferId(1),
        tag: Tag(2),
        level: Level::Placed,
        payload: payload.to_vec(),
    };
    let mut decoder = FrameDecoder::new();
    let buffer = Vec::from([0xff; 64]);
    let at = buffer.as_ptr();
    decoder.use_again(buffer);
    for (sequence, payload) in [&b"short"[..], &[7; 5000], b""].into_iter().enumerate() {
        let frame = eager(payload);
        let arrived = decoder.next(&mut &*bytes_of(&frame, sequence as u32));
        assert_eq!(arrived, Ok(Some(frame)));
        if let (0, Ok(Some(Frame::Eager { payload, .. }))) = (sequence, arrived) {
            assert_eq!(payload.as_ptr(), at);
            decoder.use_again(payload);
        }
    }
}
