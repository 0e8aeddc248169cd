//! Frames that no honest peer sends, and frames that cross.

use std::collections::VecDeque;

use super::*;
use crate::frame::{
    CancelReason, Extent, Frame, GoodbyeReason, Notified, NumberUse, PlacedChunks, RefuseReason,
    Role, TransferId,
};

const T0: TransferId = TransferId(0);

/// A session whose peer is the test: set up, its first frames taken.
pub(super) fn session(config: Config) -> Session {
    let mut session = Session::new(config, Time(0)).unwrap();
    session.ready();
    session.frame(Time(0), Frame::from(settings())).unwrap();
    session.frame(Time(0), Frame::Ready).unwrap();
    drain(&mut session);
    session
}

pub(super) fn drain(session: &mut Session) -> (Vec<Frame>, Vec<Action>) {
    drain_at(session, Time(0))
}

pub(super) fn drain_at(session: &mut Session, now: Time) -> (Vec<Frame>, Vec<Action>) {
    let (mut frames, mut actions) = (Vec::new(), Vec::new());
    loop {
        let mut next = |takes| session.poll(takes);
        match next(Takes::Frames(now)).or_else(|| next(Takes::Actions)) {
            Some(Output::Frame(frame)) => frames.push(frame),
            Some(Output::Action(action)) => actions.push(action),
            None => return (frames, actions),
        }
    }
}

pub(super) fn to_receive(number: u64) -> Destination {
    let tag = Tag(1);
    Destination::Receive { tag, number }
}

fn waiting(transfer: u64, bytes: u64) -> Frame {
    Frame::Waiting {
        transfer: TransferId(transfer),
        level: Level::Placed,
        bytes,
        to: to_receive(transfer),
    }
}

fn payload(transfer: u64, bytes: usize) -> Frame {
    Frame::Eager {
        transfer: TransferId(transfer),
        level: Level::Placed,
        to: to_receive(transfer),
        payload: vec![1; bytes].into(),
    }
}

fn grant(chunk_bytes: u32, window: u64) -> Frame {
    Frame::Grant {
        transfer: T0,
        grant: placing(chunk_bytes, window),
    }
}

fn placed(first: u32, chunks: &[u32]) -> Frame {
    let bits = chunks
        .iter()
        .fold(0, |bits, chunk| bits | 1 << (chunk - first));
    Frame::Placed {
        transfer: T0,
        chunks: PlacedChunks { first, bits },
    }
}

/// The error that the last of these frames causes.
pub(super) fn error(
    session: &mut Session,
    frames: impl IntoIterator<Item = Frame>,
) -> SessionError {
    let mut frames = frames.into_iter().peekable();
    while let Some(frame) = frames.next() {
        drain(session);
        let result = session.frame(Time(0), frame.clone());
        if frames.peek().is_none() {
            return result.expect_err(&format!("{frame:?} is illegal"));
        }
        result.unwrap();
    }
    panic!("no frames");
}

/// Whether an error names this.
fn says(error: &SessionError, what: &str) -> bool {
    error.to_string().contains(what)
}

fn sending(bytes: u64) -> Session {
    let mut session = session(config());
    session
        .send(Time(0), send(1, bytes, Level::Placed))
        .unwrap();
    drain(&mut session);
    session
}

#[test]
fn settings_come_first_once_and_within_bounds() {
    let fresh = || Session::new(config(), Time(0)).unwrap();
    let unexpected = |error| matches!(error, SessionError::Unexpected { .. });
    assert!(unexpected(error(&mut fresh(), [waiting(0, 1)])));
    assert!(unexpected(error(&mut fresh(), [Frame::Ready])));
    let twice = [Frame::from(settings()), Frame::from(settings())];
    assert!(unexpected(error(&mut fresh(), twice)));
    let with = |change: fn(&mut Settings)| {
        let mut theirs = settings();
        change(&mut theirs);
        error(&mut fresh(), [Frame::from(theirs)])
    };
    assert!(matches!(
        with(|s| s.channels = 0),
        SessionError::Settings(_)
    ));
    assert!(matches!(
        with(|s| s.receive_window = 0),
        SessionError::Settings(_)
    ));
    let setting = |error| match error {
        SessionError::Settings(invalid) => (invalid.field, invalid.arrived),
        other => panic!("{other}"),
    };
    for arrived in [4095, 4097] {
        let found = match arrived {
            4095 => with(|s| s.chunk_bytes = 4095),
            _ => with(|s| s.chunk_bytes = 4097),
        };
        assert_eq!(setting(found), ("chunk_bytes", arrived));
    }
    assert!(matches!(
        with(|s| s.network = "plugin:x".into()),
        SessionError::NetworkMismatch { .. }
    ));
    let patience = with(|s| (s.heartbeat_ms, s.dead_after_ms) = (1, 2));
    assert_eq!(setting(patience), ("dead_after_ms", 2));
    assert!(unexpected(error(&mut session(config()), [Frame::Ready])));
}

#[test]
fn a_transfer_has_its_name_and_its_number_alone() {
    let named = |frame, name: u64| match frame {
        Frame::Waiting {
            level, bytes, to, ..
        } => Frame::Waiting {
            transfer: TransferId(name),
            level,
            bytes,
            to,
        },
        Frame::Eager {
            level, to, payload, ..
        } => Frame::Eager {
            transfer: TransferId(name),
            level,
            to,
            payload,
        },
        other => other,
    };
    // A window's name, a name that waits, and a payload behind a later transfer.
    for wrong in [
        vec![waiting(u64::MAX, 5)],
        vec![waiting(0, 5), waiting(0, 5)],
        vec![named(waiting(0, 5), 1), named(payload(1, 5), 0)],
    ] {
        let found = error(&mut session(config()), wrong);
        assert!(says(&found, "transfers that count up"), "{found}");
    }
    // A number that waits, and one that no side can have come to.
    for wrong in [
        vec![waiting(0, 5), named(waiting(0, 5), 1)],
        vec![named(waiting(1 << 40, 5), 1)],
    ] {
        let found = error(&mut session(config()), wrong);
        assert!(matches!(found, SessionError::Unexpected { .. }), "{found}");
    }
}

#[test]
fn an_absurd_length_is_refused() {
    let found = error(&mut session(config()), [waiting(0, u64::MAX)]);
    assert!(says(&found, &format!("has {} of", u64::MAX)), "{found}");
    let found = error(&mut session(config()), [payload(0, 16 * 1024 + 1)]);
    assert!(says(&found, "has 16385 of 16384"), "{found}");
}

#[test]
fn eager_payload_beyond_the_credit_is_refused() {
    let frames = (0..17).map(|at| payload(at, 16 * 1024));
    let found = error(&mut session(config()), frames);
    let beyond = "transfer 16 makes it 278528 bytes of 262144";
    assert!(says(&found, beyond), "{found}");
}

#[test]
fn a_short_payload_that_waits_holds_no_long_buffer() {
    let mut session = session(config());
    for transfer in 0..2 {
        let mut payload = Vec::with_capacity(16 * 1024);
        payload.extend([transfer as u8; 8]);
        let frame = Frame::Eager {
            transfer: TransferId(transfer),
            level: Level::Placed,
            to: to_receive(transfer),
            payload: payload.into(),
        };
        session.frame(Time(0), frame).unwrap();
        let request = receive(1, 8, Level::Placed);
        session.receive(Time(0), request).unwrap();
        let (_, actions) = drain(&mut session);
        let delivered = actions.into_iter().find_map(|action| match action {
            Action::DeliverEager { payload, .. } => Some(payload),
            _ => None,
        });
        let Some(Eager::Bytes(payload)) = delivered else {
            panic!("it brought its bytes");
        };
        let payload = payload.into_bytes();
        assert_eq!(payload, [transfer as u8; 8]);
        assert!(payload.capacity() < 1024, "{} bytes", payload.capacity());
    }
}

#[test]
fn empty_eager_payloads_are_bounded_too() {
    // Each costs 256 bytes of credit.
    let frames = (0..1025).map(|at| payload(at, 0));
    let found = error(&mut session(config()), frames);
    assert!(says(&found, "no more credit used"), "{found}");
}

/// Rule 7: whoever asks for more than was agreed is refused; an honest side holds back.
#[test]
fn rule_7_unanswered_sends_are_bounded() {
    let limit = u64::from(settings().limits.asks);
    let frames = (0..=limit).map(|at| waiting(at, 100_000));
    let found = error(&mut session(config()), frames);
    assert!(
        matches!(found, SessionError::TooMany { limit: of, .. } if of == limit),
        "{found:?}"
    );
    let mut honest = session(config());
    for _ in 0..2000 {
        honest
            .send(Time(0), send(1, 100_000, Level::Placed))
            .unwrap();
    }
    let frames = drain(&mut honest).0;
    assert_eq!(frames.len(), 1024);
    // One answer, one question more.
    let refused = Frame::Refuse {
        transfer: T0,
        reason: RefuseReason::Cancelled,
    };
    honest.frame(Time(0), refused).unwrap();
    let asked = |frame: &Frame| matches!(frame, Frame::Waiting { .. });
    assert_eq!(
        drain(&mut honest)
            .0
            .iter()
            .filter(|frame| asked(frame))
            .count(),
        1
    );
}

#[test]
fn credit_that_was_never_used_does_not_come_back() {
    let mut session = session(config());
    session.send(Time(0), eager(1, 100, Level::Placed)).unwrap();
    let found = error(
        &mut session,
        [
            Frame::EagerCredit { bytes: 216 },
            Frame::EagerCredit { bytes: 41 },
        ],
    );
    let back = "41 bytes of 40 came back";
    assert!(found.to_string().contains(back), "{found}");
}

#[test]
fn a_grant_must_continue_the_stream_in_agreed_chunks() {
    const MOST: &str = "chunks as agreed";
    let chunk = 512 * 1024;
    for (wrong, field) in [
        (grant(chunk, 1), "its first chunk's number"),
        (grant(chunk, u64::MAX), "its first chunk's number"),
        (grant(chunk + 4096, 0), MOST),
        (grant(4097, 0), MOST),
        (grant(0, 0), MOST),
    ] {
        let found = error(&mut sending(1 << 20), [wrong]);
        assert!(says(&found, field), "{found}");
    }
    let found = error(&mut sending(1 << 20), [grant(chunk, 0), grant(chunk, 2)]);
    assert!(matches!(found, SessionError::Unexpected { .. }));
    let mut session = session(config());
    session.send(Time(0), send(1, 1, Level::Verified)).unwrap();
    let found = error(&mut session, [grant(chunk, 0)]);
    assert!(says(&found, "the level that was asked for"), "{found}");
}

#[test]
fn acknowledgements_of_what_was_not_sent_or_twice_are_refused() {
    let refused = |frames: Vec<Frame>, problem: &str| {
        let found = error(&mut sending(100 << 20), frames);
        assert!(says(&found, "of 200 of transfer 0 was"), "{found}");
        assert!(says(&found, problem), "{found}");
    };
    let granted = || grant(512 * 1024, 0);
    refused(vec![granted(), placed(200, &[200])], "was never sent");
    refused(
        vec![granted(), placed(u32::MAX - 7, &[u32::MAX])],
        "was never sent",
    );
    // 4 channels with a window of 12: chunk 48 is not posted.
    refused(vec![granted(), placed(0, &[47, 48])], "was never sent");
    refused(
        vec![granted(), placed(0, &[1]), placed(1, &[1])],
        "was acknowledged before",
    );
    let overlapping = vec![granted(), placed(0, &[0, 1, 2]), placed(2, &[2, 3])];
    refused(overlapping, "was acknowledged before");
}

#[test]
fn frames_for_transfers_that_do_not_exist_are_refused() {
    let transfer = TransferId(3);
    let chunks = PlacedChunks::single(0);
    let frames = [
        Frame::Grant {
            transfer,
            grant: placing(4096, 0),
        },
        Frame::Refuse {
            transfer,
            reason: RefuseReason::Cancelled,
        },
        Frame::EagerDone { transfer },
        Frame::Placed { transfer, chunks },
        Frame::Digest { transfer, tag: 0 },
        Frame::Verdict {
            transfer,
            tag: 0,
            matches: true,
        },
        Frame::Cancel {
            transfer,
            from: Role::Sender,
            reason: CancelReason::Requested,
            detail: "".into(),
        },
        Frame::Cancel {
            transfer,
            from: Role::Receiver,
            reason: CancelReason::Requested,
            detail: "".into(),
        },
        Frame::Cancelled {
            transfer,
            from: Role::Sender,
        },
        Frame::Cancelled {
            transfer,
            from: Role::Receiver,
        },
    ];
    for frame in frames {
        let found = error(&mut session(config()), [frame.clone()]);
        assert!(says(&found, "a live transfer"), "{frame:?}: {found}");
    }
}

#[test]
fn frames_in_the_wrong_state_are_refused() {
    let verdict = |matches| Frame::Verdict {
        transfer: T0,
        tag: 0,
        matches,
    };
    let granted = || grant(512 * 1024, 0);
    let refuse = |capacity| Frame::Refuse {
        transfer: T0,
        reason: RefuseReason::TooLarge { capacity },
    };
    for frames in [
        vec![Frame::EagerDone { transfer: T0 }],
        vec![placed(0, &[0])],
        vec![verdict(true)],
        vec![granted(), verdict(true)],
        vec![granted(), verdict(false)],
        vec![granted(), refuse(1)],
        vec![refuse(1000)],
        vec![Frame::Cancelled {
            transfer: T0,
            from: Role::Receiver,
        }],
        vec![Frame::GoodbyeAck],
        vec![
            Frame::Heartbeat { counter: 0 },
            Frame::Heartbeat { counter: 2 },
        ],
        vec![Frame::Heartbeat { counter: 1 }],
    ] {
        let last = frames.last().cloned();
        let found = error(&mut sending(1000), frames);
        assert!(!says(&found, "a live transfer"), "{last:?}: {found}");
    }
    for extra in [Frame::EagerDone { transfer: T0 }, verdict(true)] {
        let mut session = session(config());
        session.send(Time(0), eager(1, 4, Level::Verified)).unwrap();
        let found = error(&mut session, [Frame::EagerDone { transfer: T0 }, extra]);
        assert!(matches!(found, SessionError::Unexpected { .. }), "{found}");
    }
    let digest = Frame::Digest {
        transfer: T0,
        tag: 1,
    };
    let mut session = session(config());
    session
        .receive(Time(0), receive(1, 100, Level::Verified))
        .unwrap();
    let found = error(&mut session, [waiting(0, 100), digest.clone(), digest]);
    assert!(matches!(
        found,
        SessionError::Unexpected {
            frame: "digest",
            ..
        }
    ));
}

#[test]
fn a_peer_that_asks_but_never_reads_is_cut_off() {
    let mut session = session(config());
    let mut result = Ok(());
    for transfer in 0..400_000 {
        let cancel = Frame::Cancel {
            transfer: TransferId(transfer),
            from: Role::Sender,
            reason: CancelReason::Requested,
            detail: "".into(),
        };
        result = session
            .frame(Time(0), waiting(transfer, 5))
            .and_then(|()| session.frame(Time(0), cancel));
        if result.is_err() {
            break;
        }
    }
    assert!(matches!(result, Err(SessionError::TooMany { .. })));
}

fn notification(transfer: u64, bytes: usize) -> Frame {
    Frame::Eager {
        transfer: TransferId(transfer),
        level: Level::Placed,
        to: Destination::Notification {
            first: TransferId(0),
            count: 0,
        },
        payload: vec![7; bytes].into(),
    }
}

/// As many come as the program leaves room for, whichever of number and bytes is full first; each
/// that is collected makes room for others, and so does one that fails.
#[test]
fn notifications_wait_until_others_are_collected() {
    for (most, unread_bytes, room) in [(1, 100, 1), (3, 100, 3), (9, 10, 3), (9, 1, 1)] {
        let mut config = config();
        (config.bounds.unread_bytes, config.ours.limits.notifications) = (unread_bytes, most);
        let mut session = session(config);
        let told = |session: &mut Session| {
            let (_, actions) = drain(session);
            let arrives = |one: &Action| match one {
                Action::NotificationArrives { transfer, .. } => Some(*transfer),
                _ => None,
            };
            actions.iter().filter_map(arrives).collect::<Vec<_>>()
        };
        for transfer in 0..u64::from(most) {
            session.frame(Time(0), notification(transfer, 3)).unwrap();
        }
        let mut came = 0;
        let mut uncollected = VecDeque::from(told(&mut session));
        while let Some(first) = uncollected.pop_front() {
            let left = most as usize - came;
            assert_eq!(uncollected.len() + 1, left.min(room));
            assert_eq!(session.has_postponed(), left > room);
            assert_eq!(first, TransferId(came as u64), "in their order");
            if came % 2 == 0 {
                let operation = session.accept(Time(0), first).unwrap();
                session.eager_copied(Time(0), operation);
                assert_eq!(told(&mut session), [], "it was not collected");
                session.notifications_collected(1, 3);
            } else {
                session.refuse_arrival(first, RefuseReason::MemoryFailed);
            }
            uncollected.extend(told(&mut session));
            came += 1;
        }
        assert_eq!(came, most as usize);
    }
}

#[test]
fn notifications_that_end_before_there_is_room_are_forgotten() {
    const MOST: u32 = 10;
    let mut config = config();
    (config.bounds.unread_bytes, config.ours.limits.notifications) = (1, MOST);
    let mut session = session(config);
    for transfer in 0..10_000 {
        let cancel = Frame::Cancel {
            transfer: TransferId(transfer),
            from: Role::Sender,
            reason: CancelReason::Requested,
            detail: "".into(),
        };
        session.frame(Time(0), notification(transfer, 8)).unwrap();
        // The first is the program's to collect, which it does not.
        if transfer > 0 {
            session.frame(Time(0), cancel).unwrap();
        }
        drain(&mut session);
        assert!(session.one_sided.due.len() <= 2 * MOST as usize + 1);
    }
}

/// A side that allows many puts owes as many answers to a peer that stalls meanwhile.
#[test]
fn answers_to_as_many_puts_as_are_allowed_may_wait() {
    const PUTS: u64 = 100_000;
    let mut config = config();
    config.ours.limits.puts = PUTS as u32;
    config.ours.eager_credit = 256 * PUTS as u32;
    let mut session = session(config);
    for transfer in 0..PUTS {
        let place = one_sided::place(0, 0);
        let to = Destination::Put {
            to: Extent::Place(place),
            notified: Notified::No,
            left: TimeLeft::ANY,
        };
        let put = one_sided::waiting(transfer, 10, to);
        session.frame(Time(0), put).unwrap();
    }
}

#[test]
fn after_a_protocol_error_the_peer_is_told_and_everything_ends() {
    let mut session = sending(1000);
    let found = error(&mut session, [Frame::EagerDone { transfer: T0 }]);
    session.fail(Time(0), found.clone().into());
    let (frames, actions) = drain(&mut session);
    let [
        Frame::Goodbye {
            reason: GoodbyeReason::Error,
            detail,
        },
    ] = &frames[..]
    else {
        panic!("{frames:?}");
    };
    assert!(detail.contains("eager done"));
    let failure = ConnectionFailure::Protocol(found);
    let [
        Action::Complete {
            outcome: Err(error),
            ..
        },
        Action::Closed {
            failure: Some(last),
        },
    ] = &actions[..]
    else {
        panic!("{actions:?}");
    };
    assert_eq!(lost(&error.cause).0, &failure);
    assert_eq!(*last, failure);
    assert!(
        session.frame(Time(0), waiting(9, 9)).is_ok(),
        "what follows is ignored"
    );
    assert_eq!(drain(&mut session), (vec![], vec![]));
}

/// The least time of a few runs of this.
pub(super) fn least_time(mut run: impl FnMut()) -> Duration {
    let time = |()| {
        let began = std::time::Instant::now();
        run();
        began.elapsed()
    };
    [(); 5].map(time).into_iter().min().unwrap()
}

/// What a peer ends is found by its name: it costs no more among many others.
#[test]
fn a_cancel_costs_the_same_among_many_tags() {
    let cost = |tags: u64| {
        let mut config = config();
        config.bounds.max_operations = 1 << 20;
        let mut session = session(config);
        for tag in 0..tags {
            session
                .receive(Time(0), receive(tag, 8, Level::Placed))
                .unwrap();
        }
        let mut next = 0;
        least_time(|| {
            for _ in 0..50 {
                let first = TransferId(next);
                let to = Destination::Notification { first, count: 0 };
                let waiting = one_sided::waiting(next, 10, to);
                let cancel = Frame::Cancel {
                    transfer: TransferId(next),
                    from: Role::Sender,
                    reason: CancelReason::Requested,
                    detail: "".into(),
                };
                session.frame(Time(0), waiting).unwrap();
                session.frame(Time(0), cancel).unwrap();
                drain(&mut session);
                next += 1;
            }
        })
    };
    let (few, many) = (cost(1), cost(30_000));
    assert!(many < 20 * few, "{few:?} and {many:?}");
}

/// Frames that name numbers of tags create no state but what was announced or counts.
#[test]
fn numbers_that_nobody_announced_are_refused() {
    let (tag, used) = (Tag(1), NumberUse::Used);
    for (frame, expected) in [
        (
            Frame::Unpost { tag, number: 0 },
            "a number that was announced",
        ),
        (
            Frame::Unposted {
                tag,
                number: 0,
                used,
            },
            "the number of a receive that has ended",
        ),
    ] {
        let mut config = config();
        config.addressed = true;
        let mut session = session(config);
        let found = error(&mut session, [frame]);
        assert!(says(&found, expected), "{found}");
        assert!(session.matching.sends.is_empty());
        assert_eq!(session.matching.received_tags(), 0);
    }
}
