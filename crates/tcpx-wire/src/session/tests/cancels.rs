//! Cancels, data failures and lost connections at every point of a transfer.

use super::pair::Pair;
use super::*;
use crate::frame::{CancelReason, Role};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Sender,
    Receiver,
    Both,
}

/// Cancels a transfer after a time, then sends another one over the same channels.
fn cancel_after(request: SendRequest, who: Who, micros: u64, seed: u64) -> (bool, bool) {
    let mut pair = Pair::new(small_chunks(3), seed);
    let bytes = request.bytes;
    let sent = pair.send(0, request);
    pair.run(Duration::from_micros(micros / 3));
    let got = pair.receive(1, receive(1, bytes, Level::Placed));
    pair.run(Duration::from_micros(micros - micros / 3));
    if who != Who::Receiver {
        pair.with(0, |session, now| session.cancel(now, sent));
    }
    if who != Who::Sender {
        pair.with(1, |session, now| session.cancel(now, got));
    }
    pair.run(Duration::from_millis(20));
    // Whoever is left without a partner goes too.
    pair.with(0, |session, now| session.cancel(now, sent));
    pair.with(1, |session, now| session.cancel(now, got));
    pair.settle(Duration::from_secs(1));
    let (ours, theirs) = (
        pair.outcome(0, sent).cloned().unwrap(),
        pair.outcome(1, got).cloned().unwrap(),
    );
    if let Err(error) = &ours {
        let told = matches!(
            error.cause,
            EndCause::Cancelled | EndCause::PeerCancelled { .. }
        );
        assert!(told, "{error}");
        assert_ne!(
            error.delivered,
            Delivered::Unknown,
            "an answering peer leaves no doubt"
        );
        assert!(theirs.is_err(), "{ours:?} but {theirs:?}");
    }
    let after = pair.send(0, send(2, 50_000, Level::Verified));
    pair.receive(1, receive(2, 50_000, Level::Placed));
    pair.settle(Duration::from_secs(1));
    pair.success(0, after);
    pair.run(Duration::from_millis(20));
    pair.assert_clean();
    assert!(pair.sides.iter().all(|side| side.closed.is_none()));
    (ours.is_ok(), theirs.is_ok())
}

#[test]
fn cancels_at_every_moment_end_both_sides_alike() {
    let (mut early, mut late) = (0, 0);
    for request in [
        send(1, 100_000, Level::Placed),
        send(1, 100_000, Level::Verified),
        send(1, 0, Level::Placed),
        eager(1, 5000, Level::Placed),
        eager(1, 5000, Level::Verified),
    ] {
        for who in [Who::Sender, Who::Receiver, Who::Both] {
            for micros in (0..2400).step_by(60) {
                let (sender, receiver) = cancel_after(request.clone(), who, micros, micros);
                assert_eq!(sender, receiver, "{request:?} {who:?} {micros}");
                if sender { late += 1 } else { early += 1 }
            }
        }
    }
    assert!(early > 50 && late > 50, "{early} early, {late} late");
}

#[test]
fn a_send_at_level_sent_is_cancelled_only_before_it_left() {
    for micros in (0..2400).step_by(100) {
        for who in [Who::Sender, Who::Both] {
            cancel_sent(who, micros);
        }
    }
}

fn cancel_sent(who: Who, micros: u64) {
    let mut pair = Pair::new(small_chunks(3), micros);
    let sent = pair.send(0, send(1, 100_000, Level::Sent));
    let got = pair.receive(1, receive(1, 100_000, Level::Placed));
    pair.run(Duration::from_micros(micros));
    let left = pair.outcome(0, sent).is_some();
    pair.with(0, |session, now| session.cancel(now, sent));
    if who == Who::Both {
        pair.with(1, |session, now| session.cancel(now, got));
    }
    pair.settle(Duration::from_secs(1));
    pair.run(Duration::from_millis(20));
    if left {
        pair.success(0, sent);
    }
    if left && who == Who::Sender {
        pair.success(1, got);
    }
    pair.assert_clean();
}

#[test]
fn data_failures_say_what_failed_on_both_sides() {
    let failures = [
        (
            DataFailure::Channel("connection reset".into()),
            CancelReason::ChannelFailed,
        ),
        (
            DataFailure::Memory("copy engine error 700".into()),
            CancelReason::MemoryFailed,
        ),
    ];
    for (failure, reason) in failures {
        for side in 0..2 {
            let mut pair = Pair::new(small_chunks(3), 1);
            pair.fault_plan.no_unpack = true;
            let operations = [
                pair.send(0, send(1, 100_000, Level::Placed)),
                pair.receive(1, receive(1, 100_000, Level::Placed)),
            ];
            pair.run(Duration::from_millis(2));
            let failed = failure.clone();
            pair.with(side, |session, now| {
                session.data_failed(now, operations[side], Some(3), failed)
            });
            pair.settle(Duration::from_secs(1));
            let cause = EndCause::Data {
                chunk: Some(3),
                failure: failure.clone(),
            };
            assert_eq!(pair.error(side, operations[side]).cause, cause);
            let told = pair.error(1 - side, operations[1 - side]).cause;
            let EndCause::PeerCancelled {
                from,
                reason: why,
                detail,
            } = told
            else {
                panic!("{told}")
            };
            assert_eq!((from, why), ([Role::Sender, Role::Receiver][side], reason));
            assert!(detail.contains(&failure.to_string()), "{detail}");
            pair.run(Duration::from_millis(20));
            pair.assert_clean();
        }
    }
}

#[test]
fn a_data_plane_that_reports_nonsense_fails_the_operation() {
    type Report = fn(&mut Session, Time, OperationId, OperationId);
    let reports: [(&str, Report); 9] = [
        ("never posted", |session, now, _, got| {
            session.chunk_arrived(now, got, 99, 4096)
        }),
        ("never posted", |session, now, _, got| {
            session.chunk_arrived(now, got, u32::MAX, 4096)
        }),
        ("4095 arrived", |session, now, _, got| {
            session.chunk_arrived(now, got, 0, 4095)
        }),
        ("0 arrived", |session, now, _, got| {
            session.chunk_arrived(now, got, 0, 0)
        }),
        ("expected 1808", |session, now, _, got| {
            session.chunk_arrived(now, got, 2, 4096)
        }),
        ("arrived twice", |session, now, _, got| {
            session.chunk_arrived(now, got, 1, 4096);
            session.chunk_arrived(now, got, 1, 4096);
        }),
        ("never arrived", |session, now, _, got| {
            session.chunk_placed(now, got, 0)
        }),
        ("never posted", |session, now, sent, _| {
            session.chunk_sent(now, sent, 3)
        }),
        ("sent twice", |session, now, sent, _| {
            session.chunk_sent(now, sent, 1);
            session.chunk_sent(now, sent, 1);
        }),
    ];
    for (words, report) in reports {
        let mut pair = Pair::new(small_chunks(3), 1);
        pair.fault_plan.no_send = true;
        let sent = pair.send(0, send(1, 10_000, Level::Placed));
        let got = pair.receive(1, receive(1, 10_000, Level::Placed));
        pair.run(Duration::from_millis(2));
        for side in 0..2 {
            pair.with(side, |session, now| {
                if (words.contains("sent") || words == "never posted") || side == 1 {
                    report(session, now, sent, got);
                }
            });
        }
        pair.settle(Duration::from_secs(1));
        let text = [
            pair.error(0, sent).to_string(),
            pair.error(1, got).to_string(),
        ]
        .concat();
        assert!(text.contains(words), "{words:?} is missing in {text:?}");
        assert!(text.contains("misreported"), "{text}");
    }
}

#[test]
fn a_network_without_cancels_ends_every_operation() {
    for side in 0..2 {
        let mut config = small_chunks(3);
        config.cancellable = false;
        let mut pair = Pair::new(config, 1);
        pair.fault_plan.no_unpack = true;
        let granted = [
            pair.send(0, send(1, 100_000, Level::Placed)),
            pair.receive(1, receive(1, 100_000, Level::Placed)),
        ];
        let waiting = pair.receive(0, receive(9, 10, Level::Placed));
        let unmatched = pair.receive(1, receive(8, 10, Level::Placed));
        pair.run(Duration::from_millis(5));
        pair.with(1, |session, now| session.cancel(now, unmatched));
        pair.run(Duration::from_millis(5));
        assert_eq!(pair.error(1, unmatched).cause, EndCause::Cancelled);
        assert!(
            pair.sides[1].closed.is_none(),
            "what was not granted costs nothing"
        );
        pair.with(side, |session, now| session.cancel(now, granted[side]));
        pair.settle(Duration::from_secs(1));
        assert_eq!(pair.error(side, granted[side]).cause, EndCause::Cancelled);
        let told = pair.error(1 - side, granted[1 - side]);
        assert!(
            matches!(told.cause, EndCause::PeerCancelled { .. }),
            "{told}"
        );
        assert!(matches!(
            pair.error(0, waiting).cause,
            EndCause::ConnectionLost { .. } | EndCause::PeerClosed { .. }
        ));
        pair.run(Duration::from_millis(5));
        for side in &pair.sides {
            assert!(matches!(
                side.closed,
                Some(Some(
                    ConnectionFailure::ChannelStateLost { .. }
                        | ConnectionFailure::PeerFailed { .. }
                ))
            ));
        }
    }
}

#[test]
fn a_lost_connection_waits_for_the_data_plane() {
    for no_quiet in [false, true] {
        let mut pair = Pair::new(small_chunks(3), 1);
        (pair.fault_plan.no_unpack, pair.fault_plan.no_quiet) = (true, no_quiet);
        let sent = pair.send(0, send(1, 100_000, Level::Placed));
        let got = pair.receive(1, receive(1, 100_000, Level::Placed));
        let idle = pair.receive(1, receive(3, 1, Level::Placed));
        pair.send(0, eager(4, 100, Level::Placed));
        pair.run(Duration::from_millis(5));
        let failure = ConnectionFailure::Control {
            cause: "connection reset by peer".into(),
        };
        for side in 0..2 {
            let failure = failure.clone();
            pair.with(side, |session, now| session.fail(now, failure));
        }
        assert_eq!(
            pair.error(0, sent).delivered,
            Delivered::Unknown,
            "everything had left"
        );
        assert_eq!(pair.error(1, idle).delivered, Delivered::None);
        assert_eq!(pair.outcome(1, got), None, "its memory is in use");
        assert_eq!(pair.sides[0].closed, Some(Some(failure.clone())));
        pair.settle(Duration::from_secs(6));
        let cause = pair.error(1, got).cause;
        let (reason, standing) = lost(&cause);
        assert_eq!(reason, &failure);
        assert_eq!(standing.kind.role(), Role::Receiver);
        assert!(standing.chunk.is_some(), "{standing}");
        assert_eq!(
            pair.error(1, got).delivered,
            Delivered::Partial { bytes: 0 }
        );
        let memory = if no_quiet {
            Memory::Held
        } else {
            Memory::Released
        };
        assert_eq!(pair.sides[1].operations[&got].memory, Some(memory));
        pair.drain(1);
        assert_eq!(pair.sides[1].closed, Some(Some(failure)));
        for side in &mut pair.sides {
            assert_eq!(
                side.session.next_timeout(),
                None,
                "nothing is left to wait for"
            );
            let refused = side.session.send(pair.now, send(1, 1, Level::Placed));
            assert_eq!(refused, Err(RequestError::Closed));
        }
    }
}

#[test]
fn a_cancelled_send_gives_its_held_windows_back() {
    let mut config = small_chunks(1);
    config.hold_until_placed = true;
    (config.ours.send_window, config.ours.receive_window) = (2, 2);
    let mut pair = Pair::new(config, 1);
    pair.fault_plan.lose_data = true;
    let sent = pair.send(0, send(1, 100_000, Level::Placed));
    pair.receive(1, receive(1, 100_000, Level::Placed));
    pair.run(Duration::from_millis(5));
    assert!(!pair.sides[0].operations[&sent].touches_memory());
    pair.with(0, |session, now| session.cancel(now, sent));
    pair.settle(Duration::from_secs(1));
    pair.run(Duration::from_millis(5));
    pair.assert_clean();
    pair.fault_plan.lose_data = false;
    let next = pair.send(0, send(1, 100_000, Level::Placed));
    pair.receive(1, receive(1, 100_000, Level::Placed));
    pair.settle(Duration::from_secs(1));
    pair.success(0, next);
}

#[test]
fn cancelling_an_empty_transfer_spares_its_neighbour() {
    for side in 0..2 {
        let mut config = small_chunks(1);
        (config.ours.send_window, config.ours.receive_window) = (1, 1);
        let mut pair = Pair::new(config, 1);
        // Keeps the empty transfer open.
        pair.fault_plan.no_digest = true;
        let empty = [
            pair.send(0, send(1, 0, Level::Verified)),
            pair.receive(1, receive(1, 0, Level::Placed)),
        ];
        pair.run(Duration::from_millis(5));
        let next = [
            pair.send(0, send(2, 200_000, Level::Placed)),
            pair.receive(1, receive(2, 200_000, Level::Placed)),
        ];
        pair.run(Duration::from_millis(1));
        assert_eq!(pair.outcome(side, empty[side]), None, "still open");
        assert_eq!(pair.outcome(side, next[side]), None, "under way");
        pair.with(side, |session, now| session.cancel(now, empty[side]));
        pair.settle(Duration::from_secs(1));
        pair.success(0, next[0]);
        pair.success(1, next[1]);
    }
}
