//! Transfers that succeed, and their order.

use super::model::Random;
use super::pair::Pair;
use super::*;
use crate::frame::{Frame, LEAST_PLAIN_BYTES};

const SIZES: [u64; 10] = [
    0,
    1,
    23,
    4095,
    4096,
    4097,
    512 * 1024 - 1,
    512 * 1024,
    512 * 1024 + 1,
    64 << 20,
];

fn both_ways(config: &Config, bytes: u64, level: Level, seed: u64) {
    let mut pair = Pair::new(config.clone(), seed);
    let mut operations = Vec::new();
    for side in 0..2 {
        operations.push((side, pair.send(side, send(7, bytes, level))));
        operations.push((
            1 - side,
            pair.receive(1 - side, receive(7, bytes + 5, level)),
        ));
    }
    pair.settle(Duration::from_secs(20));
    for (side, operation) in operations {
        let completed = pair.success(side, operation);
        assert_eq!(completed.bytes, bytes);
        let receives = operation.sent_transfer().is_none();
        assert_eq!(
            completed.level,
            if receives {
                level.max(Level::Placed)
            } else {
                level
            }
        );
    }
    pair.run(Duration::from_millis(100));
    pair.assert_clean();
    for side in &pair.sides {
        let chunks = bytes.div_ceil(config.ours.chunk_bytes.into());
        assert!(
            side.sends.sequences.iter().copied().eq(0..chunks),
            "consecutive"
        );
        assert!(
            side.receives.sequences.iter().copied().eq(0..chunks),
            "consecutive"
        );
    }
}

#[test]
fn every_size_and_level_arrives_in_both_directions() {
    for (seed, bytes) in (0..).zip(SIZES) {
        for level in [Level::Sent, Level::Placed, Level::Verified] {
            both_ways(&config(), bytes, level, seed);
        }
    }
}

#[test]
fn chunk_counts_beyond_4_gib_are_right() {
    both_ways(&config(), (5 << 30) + 3, Level::Placed, 5);
}

#[test]
fn many_small_chunks_on_one_channel_and_on_many() {
    for channels in [1, 3, 64] {
        both_ways(
            &small_chunks(channels),
            1_000_003,
            Level::Placed,
            channels.into(),
        );
    }
}

#[test]
fn windows_of_one_still_progress() {
    let mut config = small_chunks(2);
    config.ours.send_window = 1;
    config.ours.receive_window = 1;
    both_ways(&config, 100_000, Level::Verified, 3);
}

#[test]
fn chunks_that_hold_their_window_until_they_are_placed() {
    let mut config = small_chunks(3);
    config.hold_until_placed = true;
    both_ways(&config, 500_000, Level::Placed, 4);
}

#[test]
fn sides_with_different_settings_use_the_lesser() {
    let (mut a, mut b) = (small_chunks(8), small_chunks(3));
    a.ours.chunk_bytes = 64 * 1024;
    b.ours.receive_window = 2;
    let mut pair = Pair::of(a, b, 1);
    let agreed = *pair.sides[0].session.agreed().unwrap();
    assert_eq!(
        (agreed.channels, agreed.chunk_bytes, agreed.send_window),
        (3, 4096, 2)
    );
    let sent = pair.send(0, send(1, 300_000, Level::Placed));
    pair.receive(1, receive(1, 300_000, Level::Placed));
    pair.settle(Duration::from_secs(5));
    assert_eq!(pair.success(0, sent).bytes, 300_000);
}

#[test]
fn eager_transfers_reach_every_level() {
    for level in [Level::Sent, Level::Placed, Level::Verified] {
        for receiver_level in [Level::Placed, Level::Verified] {
            let sealing = Config {
                seals_payload: true,
                ..config()
            };
            let mut pair = Pair::new(sealing, 9);
            let mut sends = Vec::new();
            for size in [16 * 1024, 0, 1, 23] {
                sends.push((pair.send(0, eager(1, size, level)), size));
            }
            pair.run(Duration::from_millis(5));
            for (operation, _) in &sends {
                let ended = pair.outcome(0, *operation).is_some();
                assert_eq!(ended, level == Level::Sent, "only sent may end unreceived");
            }
            for (_, size) in &sends {
                let got = pair.receive(1, receive(1, 16 * 1024, receiver_level));
                pair.run(Duration::from_millis(5));
                assert_eq!(pair.success(1, got).bytes, *size as u64);
                let copied = pair.sides[1].operations[&got].copied.as_ref().unwrap();
                assert_eq!(copied.len(), *size);
            }
            for (operation, _) in sends {
                assert_eq!(pair.success(0, operation).level, level);
            }
            pair.run(Duration::from_millis(5));
            pair.assert_clean();
            assert!(pair.sides[1].sends.sequences.is_empty());
        }
    }
}

/// Somebody on the path may have changed it, and its checksum has no key.
#[test]
fn clear_payload_is_verified_by_a_key_or_not_at_all() {
    let bytes = LEAST_PLAIN_BYTES;
    for (sender, is_eager, ends) in [
        (Level::Sent, true, [Level::Sent, Level::Placed]),
        (Level::Placed, true, [Level::Placed; 2]),
        (Level::Verified, false, [Level::Verified; 2]),
    ] {
        let mut pair = Pair::new(config(), 9);
        let sent = pair.send(0, eager(1, bytes, sender));
        pair.run(Duration::from_millis(5));
        let got = pair.receive(1, receive(1, bytes as u64, Level::Verified));
        pair.settle(Duration::from_secs(5));
        let levels = [pair.success(0, sent), pair.success(1, got)].map(|end| end.level);
        assert_eq!(levels, ends, "{sender:?}");
        assert_eq!(pair.sides[1].operations[&got].copied.is_some(), is_eager);
        pair.run(Duration::from_millis(5));
        pair.assert_clean();
    }
}

#[test]
fn a_sender_out_of_eager_credit_asks_and_order_is_kept() {
    let mut pair = Pair::new(config(), 2);
    let sends: Vec<_> = (0..40)
        .map(|_| pair.send(0, eager(1, 8_000, Level::Placed)))
        .collect();
    pair.run(Duration::from_millis(5));
    let frames = &pair.sides[1].frames_in;
    let eagers = frames
        .iter()
        .filter(|frame| matches!(frame, Frame::Eager { .. }))
        .count();
    let asking = frames
        .iter()
        .filter(|frame| matches!(frame, Frame::Waiting { .. }))
        .count();
    assert_eq!((eagers, asking), (32, 8));
    assert!(!pair.sides[0].session.eager_allowed(8_000));
    let receives: Vec<_> = (0..40)
        .map(|_| pair.receive(1, receive(1, 8_000, Level::Placed)))
        .collect();
    pair.settle(Duration::from_secs(5));
    for (sent, received) in sends.iter().zip(&receives) {
        pair.success(0, *sent);
        pair.success(1, *received);
    }
    pair.run(Duration::from_millis(5));
    assert!(
        pair.sides[0].session.eager_allowed(8_000),
        "the credit came back"
    );
    pair.assert_clean();
}

#[test]
fn a_lone_message_above_half_the_limit_goes_eagerly() {
    let mut pair = Pair::new(config(), 2);
    let sends: Vec<_> = [16 * 1024, 16 * 1024, 8 * 1024, 8 * 1024 + 1]
        .map(|bytes| pair.send(0, eager(1, bytes, Level::Placed)))
        .into();
    pair.run(Duration::from_millis(5));
    let kinds: Vec<_> = pair.sides[1]
        .frames_in
        .iter()
        .map(Frame::name)
        .filter(|name| ["eager", "waiting"].contains(name))
        .collect();
    assert_eq!(kinds, ["eager", "waiting", "eager", "waiting"]);
    let receives = [(); 4].map(|()| pair.receive(1, receive(1, 16 * 1024, Level::Placed)));
    pair.settle(Duration::from_secs(5));
    for (sent, received) in sends.into_iter().zip(receives) {
        pair.success(0, sent);
        pair.success(1, received);
    }
}

#[test]
fn a_thousand_transfers_match_first_in_first_out_per_tag() {
    let mut random = Random(11);
    let mut pair = Pair::new(small_chunks(4), 11);
    let mut expected: Vec<(u64, u64, OperationId)> = Vec::new();
    for _ in 0..1000 {
        let (tag, bytes) = (random.below(10), random.below(60_000));
        let request = if random.chance(30) && bytes <= 16_384 {
            eager(tag, bytes as usize, Level::Placed)
        } else {
            send(tag, bytes, Level::Placed)
        };
        expected.push((tag, bytes, pair.send(0, request)));
    }
    // Tags in another order than they were sent, each first in, first out.
    let mut tags: Vec<u64> = expected.iter().map(|(tag, ..)| *tag).collect();
    for at in (1..tags.len()).rev() {
        tags.swap(at, random.below(at as u64 + 1) as usize);
    }
    let mut received = Vec::new();
    for tag in tags {
        received.push((tag, pair.receive(1, receive(tag, 60_000, Level::Placed))));
        pair.run(Duration::from_micros(random.below(300)));
    }
    pair.settle(Duration::from_secs(60));
    for tag in 0..10 {
        let sent = expected
            .iter()
            .filter(|(of, ..)| *of == tag)
            .map(|(_, bytes, _)| *bytes);
        let got = received
            .iter()
            .filter(|(of, _)| *of == tag)
            .map(|(_, operation)| pair.success(1, *operation).bytes);
        assert!(sent.eq(got), "tag {tag} out of order");
    }
    pair.run(Duration::from_millis(50));
    pair.assert_clean();
}

#[test]
fn too_small_a_receive_ends_both_sides_unwritten() {
    let mut pair = Pair::new(config(), 1);
    for request in [
        send(1, 100_000, Level::Placed),
        eager(1, 1000, Level::Placed),
    ] {
        let bytes = request.bytes;
        let sent = pair.send(0, request);
        let got = pair.receive(1, receive(1, 999, Level::Placed));
        pair.settle(Duration::from_secs(1));
        let error = OperationError {
            cause: EndCause::TooLarge {
                bytes,
                capacity: 999,
            },
            delivered: Delivered::None,
        };
        assert_eq!(pair.error(0, sent), error);
        assert_eq!(pair.error(1, got), error);
        assert!(pair.sides[1].operations[&got].copied.is_none());
    }
    pair.run(Duration::from_millis(5));
    assert!(pair.sides[1].receives.sequences.is_empty());
    pair.assert_clean();
}

#[test]
fn either_side_can_ask_for_verification() {
    for (ours, theirs) in [
        (Level::Sent, Level::Verified),
        (Level::Verified, Level::Placed),
    ] {
        let mut pair = Pair::new(config(), 1);
        let sent = pair.send(0, send(1, 3 << 20, ours));
        let got = pair.receive(1, receive(1, 3 << 20, theirs));
        pair.settle(Duration::from_secs(1));
        assert_eq!(pair.success(0, sent).level, Level::Verified);
        assert_eq!(pair.success(1, got).level, Level::Verified);
    }
}

#[test]
fn different_checksums_fail_both_sides() {
    for request in [
        send(1, 3 << 20, Level::Verified),
        send(1, 0, Level::Verified),
        eager(1, 100, Level::Verified),
        eager(1, 100, Level::Placed),
    ] {
        let mut pair = Pair::new(config(), 1);
        pair.fault_plan.corrupt = true;
        let sent = pair.send(0, request);
        let got = pair.receive(1, receive(1, 3 << 20, Level::Verified));
        pair.settle(Duration::from_secs(1));
        let (a, b) = (pair.error(0, sent), pair.error(1, got));
        assert!(matches!(a.cause, EndCause::Corrupt { expected, got } if expected == got ^ 1));
        assert_eq!(a, b);
        pair.run(Duration::from_millis(5));
        pair.assert_clean();
    }
}

#[test]
fn acknowledgements_are_coalesced() {
    let mut pair = Pair::new(small_chunks(4), 8);
    pair.send(0, send(1, 4096 * 10_000, Level::Placed));
    pair.receive(1, receive(1, 4096 * 10_000, Level::Placed));
    pair.settle(Duration::from_secs(30));
    let acks = pair.sides[0]
        .frames_in
        .iter()
        .filter(|frame| matches!(frame, Frame::Placed { .. }));
    let acks = acks.count();
    assert!(acks < 5000, "{acks} frames for 10000 chunks");
}

#[test]
fn more_operations_than_allowed_are_refused() {
    let mut config = config();
    config.bounds.max_operations = 3;
    let mut session = Session::new(config, Time(0)).unwrap();
    for _ in 0..3 {
        session.send(Time(0), send(1, 1, Level::Placed)).unwrap();
        session
            .receive(Time(0), receive(1, 1, Level::Placed))
            .unwrap();
    }
    let full = RequestError::Full { limit: 3 };
    assert_eq!(
        session.send(Time(0), send(1, 1, Level::Placed)),
        Err(full.clone())
    );
    assert_eq!(
        session.receive(Time(0), receive(1, 1, Level::Placed)),
        Err(full)
    );
    let mut request = send(1, MAX_TRANSFER_BYTES + 1, Level::Placed);
    let mut session = Session::new(super::config(), Time(0)).unwrap();
    let too_long = Err(RequestError::TooLong {
        bytes: request.bytes,
    });
    assert_eq!(session.send(Time(0), request.clone()), too_long);
    request.bytes = 3;
    request.eager = Some(vec![0; 2].into());
    let length = Err(RequestError::EagerLength {
        bytes: 3,
        payload: 2,
    });
    assert_eq!(session.send(Time(0), request), length);
}
