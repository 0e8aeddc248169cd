//! Deadlines in every state, and whom they name.

use super::one_sided::{get, place, put, secret};
use super::pair::Pair;
use super::*;
use crate::frame::{CancelReason, Frame, Role};
use crate::window::Rights;

const SECOND: Duration = Duration::from_secs(1);

fn stalled(error: &OperationError) -> &StallReport {
    match &error.cause {
        EndCause::Stalled(report) => report,
        other => panic!("expected a stall, got {other}"),
    }
}

/// Runs one transfer of 3 chunks whose `impatient` side allows one second; its error.
fn one_stall(
    level: Level,
    impatient: Role,
    fault_plan: impl FnOnce(&mut Pair),
) -> (Pair, OperationError) {
    let mut pair = Pair::new(small_chunks(2), 1);
    fault_plan(&mut pair);
    let sender = impatient == Role::Sender;
    let patience = |short| if short { stall(1) } else { stall(20) };
    let sent = pair.send(
        0,
        SendRequest {
            deadlines: patience(sender),
            ..send(42, 10_000, level)
        },
    );
    let got = pair.receive(
        1,
        ReceiveRequest {
            deadlines: patience(!sender),
            ..receive(42, 10_000, level)
        },
    );
    pair.run(SECOND * 3);
    assert!(pair.settled(), "one side's deadline ends both");
    let (own, other) = if sender {
        (pair.error(0, sent), pair.error(1, got))
    } else {
        (pair.error(1, got), pair.error(0, sent))
    };
    let EndCause::PeerCancelled {
        from,
        reason,
        detail,
    } = other.cause
    else {
        panic!("expected the peer's cancel, got {other}");
    };
    assert_eq!((from, reason), (impatient, CancelReason::DeadlineExpired));
    let quoted = stalled(&own);
    assert_eq!(detail, quoted.to_string(), "the peer's words are quoted");
    assert_eq!(quoted.kind.role(), impatient);
    assert_eq!((quoted.tag, quoted.bytes_total), (Tag(42), 10_000));
    pair.assert_clean();
    (pair, own)
}

#[test]
fn a_send_that_nobody_receives_blames_the_peer() {
    for (request, delivered) in [
        (send(5, 1000, Level::Placed), Delivered::None),
        (
            eager(5, 1000, Level::Placed),
            Delivered::Partial { bytes: 0 },
        ),
    ] {
        let mut pair = Pair::new(config(), 1);
        let start = pair.now;
        let sent = pair.send(
            0,
            SendRequest {
                deadlines: stall(2),
                ..request
            },
        );
        pair.settle(SECOND * 5);
        assert!(pair.now.saturating_since(start) < Duration::from_millis(2100));
        let error = pair.error(0, sent);
        let report = stalled(&error);
        assert_eq!(report.owes, Owes::PeerPostReceive);
        assert!(report.waited >= SECOND * 2);
        assert_eq!(
            (report.chunk, report.bytes_done, report.bytes_total),
            (None, 0, 1000)
        );
        assert_eq!(error.delivered, delivered);
        pair.run(SECOND);
        pair.assert_clean();
        let late = pair.receive(1, receive(5, 1000, Level::Placed));
        pair.run(SECOND);
        assert_eq!(
            pair.outcome(1, late),
            None,
            "the cancelled send is not matched"
        );
    }
}

#[test]
fn a_receive_that_nobody_sends_to_blames_the_peer() {
    let mut pair = Pair::new(config(), 1);
    let got = pair.receive(
        1,
        ReceiveRequest {
            deadlines: stall(1),
            ..receive(5, 10, Level::Placed)
        },
    );
    pair.settle(SECOND * 2);
    let error = pair.error(1, got);
    let report = stalled(&error);
    assert_eq!(
        (report.owes, report.transfer),
        (Owes::PeerSendMatching, None)
    );
    assert_eq!(error.delivered, Delivered::None);
    pair.assert_clean();
}

#[test]
fn a_network_that_does_not_send() {
    let (_, error) = one_stall(Level::Placed, Role::Sender, |pair| {
        pair.fault_plan.no_send = true
    });
    let report = stalled(&error);
    assert_eq!(
        (report.owes, report.chunk),
        (Owes::LocalNetworkSend, Some(0))
    );
    let (_, error) = one_stall(Level::Placed, Role::Receiver, |pair| {
        pair.fault_plan.no_send = true
    });
    assert_eq!(stalled(&error).owes, Owes::PeerSend);
    assert_eq!(error.delivered, Delivered::Partial { bytes: 0 });
}

#[test]
fn data_that_is_lost() {
    let (_, error) = one_stall(Level::Placed, Role::Sender, |pair| {
        pair.fault_plan.lose_data = true
    });
    let report = stalled(&error);
    assert_eq!(
        (report.owes, report.chunk),
        (Owes::PeerAcknowledge, Some(0))
    );
    assert_eq!(
        error.delivered,
        Delivered::Partial { bytes: 0 },
        "told by the receiver"
    );
    let (_, error) = one_stall(Level::Placed, Role::Receiver, |pair| {
        pair.fault_plan.lose_data = true
    });
    assert_eq!(stalled(&error).owes, Owes::PeerSend);
}

#[test]
fn data_that_is_never_unpacked_is_the_receivers_fault() {
    let (_, error) = one_stall(Level::Placed, Role::Receiver, |pair| {
        pair.fault_plan.no_unpack = true
    });
    let report = stalled(&error);
    assert_eq!((report.owes, report.channel), (Owes::LocalUnpack, Some(0)));
    let line = report.to_string();
    for part in [
        "tag 42",
        "transfer 0",
        "chunk 0",
        "channel 0",
        "offset 0",
        "0 of 10000 bytes",
        "unpack",
    ] {
        assert!(line.contains(part), "{part:?} is missing in {line:?}");
    }
    assert!(!line.contains('\n'));
    let (_, error) = one_stall(Level::Placed, Role::Sender, |pair| {
        pair.fault_plan.no_unpack = true
    });
    assert_eq!(stalled(&error).owes, Owes::PeerAcknowledge);
}

#[test]
fn an_arrived_chunk_is_blamed_before_an_earlier_missing_one() {
    let mut pair = Pair::new(small_chunks(2), 1);
    pair.fault_plan.lose_data = true;
    let request = ReceiveRequest {
        deadlines: stall(1),
        ..receive(1, 12_000, Level::Placed)
    };
    let got = pair.receive(1, request);
    pair.send(0, send(1, 12_000, Level::Placed));
    pair.run(Duration::from_millis(5));
    pair.with(1, |session, now| {
        session.chunk_arrived(now, got, 2, 12_000 - 8192)
    });
    pair.settle(SECOND * 2);
    let error = pair.error(1, got);
    let report = stalled(&error);
    assert_eq!(
        (report.owes, report.chunk, report.offset),
        (Owes::LocalUnpack, Some(2), 8192)
    );
}

#[test]
fn checksums_that_never_come() {
    let (_, error) = one_stall(Level::Verified, Role::Sender, |pair| {
        pair.fault_plan.no_digest = true
    });
    assert_eq!(stalled(&error).owes, Owes::LocalDigest);
    assert_eq!(error.delivered, Delivered::All);
    let (_, error) = one_stall(Level::Verified, Role::Receiver, |pair| {
        pair.fault_plan.no_digest = true
    });
    assert_eq!(stalled(&error).owes, Owes::LocalDigest);
    assert_eq!(error.delivered, Delivered::All);

    for (impatient, owes) in [(0, Owes::PeerVerdict), (1, Owes::PeerDigest)] {
        let mut pair = Pair::new(small_chunks(2), 1);
        pair.fault_plan.no_digest = true;
        let patience = |side| {
            if side == impatient {
                stall(1)
            } else {
                stall(20)
            }
        };
        let request = send(1, 10_000, Level::Verified);
        let sent = pair.send(
            0,
            SendRequest {
                deadlines: patience(0),
                ..request
            },
        );
        let request = receive(1, 10_000, Level::Verified);
        let got = pair.receive(
            1,
            ReceiveRequest {
                deadlines: patience(1),
                ..request
            },
        );
        pair.run(Duration::from_millis(50));
        let operation = [sent, got][impatient];
        let watched = pair.sides[impatient]
            .operations
            .get_mut(&operation)
            .unwrap();
        assert!(std::mem::take(&mut watched.digesting));
        pair.with(impatient, |session, now| {
            session.digest(now, operation, 1, 1)
        });
        pair.settle(SECOND * 3);
        let error = pair.error(impatient, operation);
        assert_eq!(stalled(&error).owes, owes);
        assert_eq!(error.delivered, Delivered::All);
    }
}

#[test]
fn an_eager_payload_that_is_not_copied() {
    let mut pair = Pair::new(config(), 1);
    pair.fault_plan.no_unpack = true;
    let sent = pair.send(0, eager(3, 100, Level::Placed));
    let request = ReceiveRequest {
        deadlines: stall(1),
        ..receive(3, 100, Level::Placed)
    };
    let got = pair.receive(1, request);
    pair.settle(SECOND * 2);
    assert_eq!(stalled(&pair.error(1, got)).owes, Owes::LocalUnpack);
    assert!(pair.error(0, sent).to_string().contains("unpack"));
    pair.run(SECOND);
    pair.assert_clean();
}

#[test]
fn a_transfer_behind_another_one_names_it() {
    let mut config = small_chunks(1);
    (config.ours.send_window, config.ours.receive_window) = (1, 1);
    let mut pair = Pair::new(config, 1);
    pair.fault_plan.no_send = true;
    let mut operations = Vec::new();
    for (tag, seconds) in [(1, 9), (2, 1)] {
        let request = send(tag, 9000, Level::Placed);
        let sent = pair.send(
            0,
            SendRequest {
                deadlines: stall(seconds),
                ..request
            },
        );
        let request = receive(tag, 9000, Level::Placed);
        let got = pair.receive(
            1,
            ReceiveRequest {
                deadlines: stall(9),
                ..request
            },
        );
        operations.push((sent, got));
    }
    pair.run(SECOND * 2);
    let error = pair.error(0, operations[1].0);
    assert_eq!(stalled(&error).owes, Owes::EarlierTransfer);
    assert_eq!(error.delivered, Delivered::None);
    assert_eq!(pair.error(1, operations[1].1).delivered, Delivered::None);
    assert_eq!(
        pair.outcome(0, operations[0].0),
        None,
        "the other one goes on"
    );
    let owes: Vec<_> = pair.sides[0]
        .session
        .snapshot(pair.now)
        .iter()
        .map(|state| state.standing.owes)
        .collect();
    assert_eq!(owes, [Owes::LocalNetworkSend]);
}

#[test]
fn set_up_that_does_not_finish() {
    let mut pair = Pair::unconnected(config(), config(), 1);
    pair.sides[1].setup_done = false;
    let sent = pair.send(
        0,
        SendRequest {
            deadlines: stall(1),
            ..send(1, 100, Level::Placed)
        },
    );
    let got = pair.receive(
        1,
        ReceiveRequest {
            deadlines: stall(20),
            ..receive(1, 100, Level::Placed)
        },
    );
    pair.run(Duration::from_millis(500));
    let owes =
        |pair: &Pair, side: usize| pair.sides[side].session.snapshot(pair.now)[0].standing.owes;
    assert_eq!(
        (owes(&pair, 0), owes(&pair, 1)),
        (Owes::PeerSetup, Owes::LocalSetup)
    );
    pair.settle(SECOND * 2);
    assert_eq!(stalled(&pair.error(0, sent)).owes, Owes::PeerSetup);
    assert_eq!(pair.error(1, got).delivered, Delivered::None);
}

#[test]
fn a_control_connection_that_takes_nothing() {
    let mut session = Session::new(config(), Time(0)).unwrap();
    session.frame(Time(0), Frame::from(settings())).unwrap();
    while next_action(&mut session).is_some() {}
    let request = SendRequest {
        deadlines: stall(1),
        ..send(1, 10, Level::Placed)
    };
    session.send(Time(0), request).unwrap();
    assert_eq!(session.next_timeout(), Some(Time(1_000_000)));
    session.handle_timeout(Time(1_000_000));
    let Some(Action::Complete {
        outcome: Err(error),
        ..
    }) = next_action(&mut session)
    else {
        panic!("the deadline passed");
    };
    assert_eq!(stalled(&error).owes, Owes::LocalControl);
}

#[test]
fn steady_progress_meets_the_total_deadline_alone() {
    let mut config = small_chunks(1);
    (config.ours.send_window, config.ours.receive_window) = (1, 1);
    for total in [None, Some(SECOND * 5)] {
        let mut pair = Pair::new(config.clone(), 1);
        pair.fault_plan.jitter = 400_000;
        if total.is_some() {
            // What is slow is the data: the peer answers soon.
            (pair.fault_plan.frames, pair.fault_plan.quiet) = ([Some(20_000); 2], Some(1000));
        }
        let deadlines = Some(Deadlines {
            stall: SECOND * 2,
            total,
        });
        let start = pair.now;
        let request = send(1, 4096 * 40, Level::Placed);
        let sent = pair.send(
            0,
            SendRequest {
                deadlines,
                ..request
            },
        );
        let request = receive(1, 4096 * 40, Level::Placed);
        let got = pair.receive(
            1,
            ReceiveRequest {
                deadlines: stall(2),
                ..request
            },
        );
        pair.settle(SECOND * 100);
        let took = pair.now.saturating_since(start);
        if total.is_none() {
            assert!(took > SECOND * 10);
            pair.success(0, sent);
            pair.success(1, got);
        } else {
            assert!(took < SECOND * 7, "{took:?}");
            let error = pair.error(0, sent);
            assert!(
                matches!(error.cause, EndCause::DeadlinePassed(_)),
                "{error}"
            );
            let EndCause::PeerCancelled { .. } = pair.error(1, got).cause else {
                panic!()
            };
            let (Delivered::Partial { bytes: at_least }, Delivered::Partial { bytes }) =
                (error.delivered, pair.error(1, got).delivered)
            else {
                panic!("{error}");
            };
            assert!(at_least > 0);
            assert_eq!(at_least, bytes, "both sides know the same");
        }
    }
}

/// Many operations at once, most of which wait for much longer than their limit: as long as others
/// move, none stalls.
#[test]
fn what_waits_behind_others_does_not_stall() {
    const BYTES: u64 = 8 * 4096;
    const EACH: u64 = 12;
    let few = Limits {
        puts: 2,
        gets: 2,
        ..Limits::default()
    };
    for (limits, addressed) in [
        (Limits::default(), true),
        (Limits::default(), false),
        (few, true),
    ] {
        let mut config = small_chunks(1);
        (config.ours.send_window, config.ours.receive_window) = (1, 1);
        config.addressed = addressed;
        let mut pair = Pair::new(limited(&config, limits), 1);
        (pair.fault_plan.jitter, pair.fault_plan.frames) = (60_000, [Some(1000); 2]);
        let window = (pair.sides[1].session).expose(secret(7), EACH * BYTES, Rights::GetAndPut);
        let start = pair.now;
        for number in 0..EACH {
            let at = place(window, number * BYTES);
            for request in [send(1, BYTES, Level::Placed), put(BYTES, Level::Placed, at)] {
                let deadlines = stall(1);
                pair.send(
                    0,
                    SendRequest {
                        deadlines,
                        ..request
                    },
                );
            }
            let request = get(BYTES, Level::Placed, at);
            let deadlines = stall(1);
            pair.get(
                0,
                GetRequest {
                    deadlines,
                    ..request
                },
            );
            pair.receive(1, receive(1, BYTES, Level::Placed));
        }
        pair.settle(SECOND * 30);
        assert!(pair.now.saturating_since(start) > SECOND * 3);
        for side in &pair.sides {
            for watched in side.operations.values() {
                assert!(matches!(watched.outcome, Some(Ok(_))), "{watched:?}");
            }
        }
        pair.run(SECOND);
        pair.assert_clean();
    }
}

/// Transfers take turns on one lane, so that each waits for all the others between its chunks, much
/// longer than its limit.
#[test]
fn what_waits_for_its_next_turn_does_not_stall() {
    const BYTES: u64 = 3 * 4096;
    const PUTS: u64 = 20;
    let mut config = small_chunks(1);
    (config.ours.send_window, config.ours.receive_window) = (2, 2);
    (config.addressed, config.bounds.turn_bytes) = (true, 4096);
    config.hold_until_placed = true;
    let mut pair = Pair::new(config, 1);
    pair.fault_plan.data = Some(400_000);
    let window = (pair.sides[1].session).expose(secret(7), PUTS * BYTES, Rights::GetAndPut);
    let start = pair.now;
    let puts: Vec<_> = (0..PUTS)
        .map(|number| {
            let request = put(BYTES, Level::Placed, place(window, number * BYTES));
            let deadlines = stall(1);
            pair.send(
                0,
                SendRequest {
                    deadlines,
                    ..request
                },
            )
        })
        .collect();
    pair.settle(SECOND * 60);
    assert!(pair.now.saturating_since(start) > SECOND * 3);
    for put in puts {
        pair.success(0, put);
    }
    pair.assert_clean();
}

/// Who began an operation says how long it may take; the limits of the side that serves it are for
/// its own.
#[test]
fn the_peers_part_lasts_as_long_as_who_began_it_waits() {
    let patient = Config {
        deadlines: stall(100).unwrap(),
        ..small_chunks(1)
    };
    let impatient = Config {
        deadlines: stall(1).unwrap(),
        ..patient.clone()
    };
    let mut pair = Pair::of(patient, impatient, 1);
    pair.fault_plan.data = Some(20_000_000);
    let window = (pair.sides[1].session).expose(secret(7), 8192, Rights::GetAndPut);
    let started = [
        pair.send(0, put(4096, Level::Placed, place(window, 0))),
        pair.get(0, get(4096, Level::Placed, place(window, 4096))),
    ];
    let start = pair.now;
    pair.settle(SECOND * 50);
    assert!(pair.now.saturating_since(start) > SECOND);
    for operation in started {
        pair.success(0, operation);
    }
}

/// Of all kinds, at times of their own.
#[test]
fn a_thousand_operations_to_a_stopped_peer_end_in_time() {
    const EACH: u64 = 250;
    let lengths = [8, 4096, 10_000];
    for eager_limit in [0, 4096] {
        let mut config = small_chunks(2);
        (config.addressed, config.ours.eager_limit) = (true, eager_limit);
        let mut pair = Pair::new(config, 1);
        let window = (pair.sides[1].session).expose(secret(7), EACH * 10_000, Rights::GetAndPut);
        pair.run(SECOND);
        pair.fault_plan.stopped[1] = pair.now + SECOND * 5;
        let mut started = Vec::new();
        for number in 0..EACH {
            let bytes = lengths[number as usize % lengths.len()];
            let deadlines = Some(Deadlines {
                stall: SECOND * 30,
                total: Some(Duration::from_micros(100_000 + number * 1234)),
            });
            let at = place(window, number * 10_000);
            for request in [
                send(number, bytes, Level::Placed),
                put(bytes, Level::Verified, at),
            ] {
                let request = SendRequest {
                    deadlines,
                    ..request
                };
                started.push(pair.send(0, request));
            }
            let request = get(bytes, Level::Placed, at);
            let request = GetRequest {
                deadlines,
                ..request
            };
            started.push(pair.get(0, request));
            let request = receive(number, bytes, Level::Placed);
            let request = ReceiveRequest {
                deadlines,
                ..request
            };
            started.push(pair.receive(0, request));
            pair.run(Duration::from_micros(500));
        }
        for _ in 0..100 {
            pair.run(Duration::from_millis(5));
            pair.assert_in_time();
        }
        for operation in started {
            let error = pair.error(0, operation);
            let is_late = matches!(error.cause, EndCause::DeadlinePassed(_));
            assert!(is_late, "{error}");
        }
        pair.run(SECOND * 6);
        pair.assert_clean();
    }
}

#[test]
fn what_a_lost_connection_takes_along_ends_by_its_deadline() {
    let mut config = small_chunks(1);
    config.addressed = true;
    let mut pair = Pair::new(config, 1);
    (pair.fault_plan.data, pair.fault_plan.no_quiet) = (Some(100_000_000), true);
    let window = (pair.sides[1].session).expose(secret(7), 4096, Rights::GetAndPut);
    let request = get(4096, Level::Placed, place(window, 0));
    let deadlines = Some(Deadlines {
        stall: SECOND * 30,
        total: Some(SECOND),
    });
    let request = GetRequest {
        deadlines,
        ..request
    };
    let got = pair.get(0, request);
    pair.run(SECOND / 2);
    let cause = "it is lost".to_owned();
    let failure = ConnectionFailure::SetUp { cause };
    pair.with(0, |session, now| session.fail(now, failure));
    for _ in 0..100 {
        pair.run(Duration::from_millis(10));
        pair.assert_in_time();
    }
    let error = pair.error(0, got);
    assert!(
        matches!(error.cause, EndCause::ConnectionLost { .. }),
        "{error}"
    );
}
