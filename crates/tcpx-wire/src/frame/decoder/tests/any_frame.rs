//! What holds for every frame, and for any bytes.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::frame::{
    CancelReason, Detail, Exposure, Extent, GoodbyeReason, Grant, Limits, Notified, NumberUse,
    RefuseReason, Role, TimeLeft, drawn_limits,
};
use crate::window::{Place, WindowSecret};

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
    let limit = || 1..=Limits::MOST;
    let limits = drawn_limits(limit, limit());
    (numbers, texts, limits).prop_map(|(numbers, (network, memory, software), limits)| {
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
            limits,
            memory,
            software,
        }
    })
}

fn any_use() -> impl Strategy<Value = NumberUse> {
    prop_oneof![
        Just(NumberUse::Skipped),
        Just(NumberUse::Used),
        Just(NumberUse::Ended),
        Just(NumberUse::Forgotten)
    ]
}

fn any_placed() -> impl Strategy<Value = PlacedChunks> {
    (any::<u32>(), any::<u64>()).prop_map(|(first, bits)| PlacedChunks { first, bits })
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
    let grant = || {
        (1u32.., any::<u64>(), level(), any_taper()).prop_map(
            |(chunk_bytes, window, level, taper)| Grant {
                chunk_bytes,
                window,
                level,
                taper,
            },
        )
    };
    let role = || prop_oneof![Just(Role::Sender), Just(Role::Receiver)];
    let detail = || "\\PC{0,200}".prop_map(Detail::from);
    let refuse = prop_oneof![
        any::<u64>().prop_map(|capacity| RefuseReason::TooLarge { capacity }),
        Just(RefuseReason::Cancelled),
        Just(RefuseReason::Shutdown),
        Just(RefuseReason::UnknownWindow),
        Just(RefuseReason::NotPermitted),
        Just(RefuseReason::OutOfRange),
        Just(RefuseReason::MemoryFailed),
        Just(RefuseReason::PutFailed),
    ];
    let place = || {
        (any::<u64>(), any::<[u8; 16]>(), any::<u64>()).prop_map(|(window, secret, offset)| Place {
            window,
            secret: WindowSecret::from_bytes(secret),
            offset,
        })
    };
    let extent = || {
        prop_oneof![
            place().prop_map(Extent::Place),
            any::<u64>().prop_map(Extent::Pieces)
        ]
    };
    let notified = || {
        prop_oneof![
            Just(Notified::No),
            Just(Notified::First),
            Just(Notified::Next)
        ]
    };
    let left = || {
        (any::<u32>(), any::<u32>())
            .prop_map(|(stall_ms, total_ms)| TimeLeft { stall_ms, total_ms })
    };
    let destination = || {
        prop_oneof![
            (tag(), any::<u64>()).prop_map(|(tag, number)| Destination::Receive { tag, number }),
            (extent(), notified(), left()).prop_map(|(to, notified, left)| Destination::Put {
                to,
                notified,
                left
            }),
            any::<u64>().prop_map(|request| Destination::Reply { request }),
            (id(), any::<u32>())
                .prop_map(|(first, count)| Destination::Notification { first, count }),
        ]
    };
    let cancel = prop_oneof![
        Just(CancelReason::Requested),
        Just(CancelReason::DeadlineExpired),
        Just(CancelReason::ChannelFailed),
        Just(CancelReason::MemoryFailed),
        Just(CancelReason::Shutdown),
    ];
    let goodbye = prop_oneof![
        Just(GoodbyeReason::Normal),
        Just(GoodbyeReason::Shutdown),
        Just(GoodbyeReason::Error),
    ];
    prop_oneof![
        any_settings().prop_map(Frame::from),
        vec(any::<u8>(), 0..300).prop_map(|payload| Frame::Setup { payload }),
        Just(Frame::Ready),
        (any::<u64>(), any::<bool>(), vec(any::<u8>(), 0..300))
            .prop_map(|(list, last, part)| Frame::Pieces { list, last, part }),
        any::<u64>().prop_map(|list| Frame::DropPieces { list }),
        (id(), level(), any::<u64>(), destination()).prop_map(|(transfer, level, bytes, to)| {
            Frame::Waiting {
                transfer,
                level,
                bytes,
                to,
            }
        }),
        (id(), grant()).prop_map(|(transfer, grant)| Frame::Grant { transfer, grant }),
        (id(), refuse.clone()).prop_map(|(transfer, reason)| Frame::Refuse { transfer, reason }),
        (any::<u64>(), extent(), any::<u64>(), level(), left()).prop_map(
            |(request, from, bytes, level, left)| {
                Frame::Get {
                    request,
                    from,
                    bytes,
                    level,
                    left,
                }
            }
        ),
        (any::<u64>(), refuse).prop_map(|(request, reason)| Frame::RefuseGet { request, reason }),
        (id(), level(), destination(), vec(any::<u8>(), 0..300)).prop_map(
            |(transfer, level, to, payload)| Frame::Eager {
                transfer,
                level,
                to,
                payload: payload.into(),
            }
        ),
        (id(), level(), destination(), any::<(u16, u64, u32)>()).prop_map(
            |(transfer, level, to, (entry, mark, bytes))| Frame::Exposed {
                transfer,
                level,
                to,
                at: Exposure { entry, mark, bytes },
            }
        ),
        id().prop_map(|transfer| Frame::EagerDone { transfer }),
        any::<u32>().prop_map(|bytes| Frame::EagerCredit { bytes }),
        (id(), any_placed()).prop_map(|(transfer, chunks)| Frame::Placed { transfer, chunks }),
        (id(), any::<u128>()).prop_map(|(transfer, tag)| Frame::Digest { transfer, tag }),
        (id(), any::<u128>(), any::<bool>()).prop_map(|(transfer, tag, matches)| {
            Frame::Verdict {
                transfer,
                tag,
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
        any::<u64>().prop_map(|read| Frame::Received { read }),
        any::<u16>().prop_map(|lane| Frame::Redial { lane }),
        (tag(), any::<u64>(), any::<u64>(), grant()).prop_map(|(tag, number, capacity, grant)| {
            Frame::Posted {
                tag,
                number,
                capacity,
                grant,
            }
        }),
        (tag(), any::<u64>()).prop_map(|(tag, number)| Frame::Unpost { tag, number }),
        (tag(), any::<u64>(), any_use()).prop_map(|(tag, number, used)| Frame::Unposted {
            tag,
            number,
            used
        }),
        (tag(), any::<u64>()).prop_map(|(tag, number)| Frame::Forget { tag, number }),
        (tag(), any::<bool>()).prop_map(|(tag, forgotten)| Frame::Forgotten { tag, forgotten }),
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
        kind in 0u8..30,
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
