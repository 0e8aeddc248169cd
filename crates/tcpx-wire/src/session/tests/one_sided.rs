//! Puts, gets, notifications and windows.

use std::sync::Arc;

use proptest::prelude::*;

use super::hostile::{drain_at, session};
use super::model::Random;
use super::pair::Pair;
use super::*;
use crate::PieceList;
use crate::frame::{Extent, Frame, Limits, Notified, PlacedChunks, RefuseReason, TransferId};
use crate::window::{Place, Rights, WindowSecret};

pub(super) const SECOND: Duration = Duration::from_secs(1);
const ROOM: u64 = 4 << 20;

pub(super) fn secret(byte: u8) -> WindowSecret {
    WindowSecret::generate(&mut |bytes| bytes.fill(byte))
}

pub(super) fn place(window: u64, offset: u64) -> Place {
    Place {
        window,
        secret: secret(7),
        offset,
    }
}

impl From<Place> for Extent {
    fn from(place: Place) -> Self {
        Self::Place(place)
    }
}

/// A list.
impl From<u64> for Extent {
    fn from(list: u64) -> Self {
        Self::Pieces(list)
    }
}

pub(super) fn put(bytes: u64, level: Level, to: impl Into<Extent>) -> SendRequest {
    SendRequest {
        to: Destination::Put {
            to: to.into(),
            notified: Notified::No,
            left: TimeLeft::ANY,
        },
        ..send(0, bytes, level)
    }
}

pub(super) fn notified(mut request: SendRequest) -> SendRequest {
    if let Destination::Put { notified, .. } = &mut request.to {
        *notified = Notified::Next;
    }
    request
}

pub(super) fn notification(bytes: usize, first: TransferId, count: u32) -> SendRequest {
    SendRequest {
        to: Destination::Notification { first, count },
        ..eager(0, bytes, Level::Placed)
    }
}

pub(super) fn get(bytes: u64, level: Level, from: impl Into<Extent>) -> GetRequest {
    GetRequest {
        from: from.into(),
        bytes,
        level,
        deadlines: None,
    }
}

/// A put and a get at every level, and where that may be a put that travels eagerly.
pub(super) fn at_every_level(
    pair: &mut Pair,
    bytes: u64,
    extent: impl Into<Extent> + Copy,
) -> Vec<(u64, OperationId)> {
    let mut operations = Vec::new();
    for level in [Level::Sent, Level::Placed, Level::Verified] {
        let request = put(bytes, level, extent);
        if bytes <= 16_384 {
            let to = request.to;
            let small = eager(0, bytes as usize, level);
            operations.push((bytes, pair.send(0, SendRequest { to, ..small })));
        }
        operations.push((bytes, pair.send(0, request)));
        operations.push((bytes, pair.get(0, get(bytes, level, extent))));
    }
    operations
}

fn expose(pair: &mut Pair, side: usize, rights: Rights) -> u64 {
    pair.sides[side].session.expose(secret(7), ROOM, rights)
}

pub(super) fn waiting(transfer: u64, bytes: u64, to: Destination) -> Frame {
    Frame::Waiting {
        transfer: TransferId(transfer),
        level: Level::Placed,
        bytes,
        to,
    }
}

fn payload(transfer: u64, to: Destination) -> Frame {
    Frame::Eager {
        transfer: TransferId(transfer),
        level: Level::Placed,
        to,
        payload: vec![1; 9].into(),
    }
}

pub(super) fn refused(cause: &EndCause) -> RefuseReason {
    match cause {
        EndCause::Refused { reason } => *reason,
        other => panic!("{other}"),
    }
}

fn transfer(operation: OperationId) -> TransferId {
    operation.sent_transfer().expect("a send")
}

#[test]
fn puts_and_gets_of_every_size_and_level_arrive() {
    for hold in [false, true] {
        let mut config = config();
        config.hold_until_placed = hold;
        config.addressed = hold;
        let mut pair = Pair::new(config, 4);
        let window = expose(&mut pair, 1, Rights::GetAndPut);
        let mut operations = Vec::new();
        for bytes in [0, 1, 4096, 16_384, 16_385, 600_000, ROOM] {
            let to = place(window, ROOM - bytes);
            operations.extend(at_every_level(&mut pair, bytes, to));
        }
        pair.settle(SECOND * 20);
        for (bytes, operation) in operations {
            assert_eq!(pair.success(0, operation).bytes, bytes);
        }
        pair.run(SECOND);
        pair.assert_clean();
    }
}

#[test]
fn one_sided_transfers_leave_the_order_of_tags_alone() {
    let mut pair = Pair::new(small_chunks(2), 9);
    let window = expose(&mut pair, 1, Rights::Put);
    let mut receives = Vec::new();
    for number in 1..20 {
        receives.push((number, pair.receive(1, receive(5, 100_000, Level::Placed))));
        pair.send(0, put(number * 3000, Level::Placed, place(window, 0)));
        pair.send(0, send(5, number * 2000, Level::Placed));
    }
    pair.settle(SECOND * 20);
    for (number, operation) in receives {
        assert_eq!(pair.success(1, operation).bytes, number * 2000);
    }
    pair.run(SECOND);
    pair.assert_clean();
    pair.assert_matched_in_order();
}

/// Rule: secret, rights and range are checked before the first byte, without overflow.
#[test]
fn a_refused_put_or_get_names_the_reason_and_writes_nothing() {
    let mut pair = Pair::new(config(), 2);
    let readable = expose(&mut pair, 1, Rights::Get);
    let writable = expose(&mut pair, 1, Rights::Put);
    let wrong = Place {
        secret: secret(8),
        ..place(writable, 0)
    };
    let cases = [
        (place(99, 0), 5, RefuseReason::UnknownWindow),
        (wrong, 5, RefuseReason::UnknownWindow),
        (place(readable, 0), 5, RefuseReason::NotPermitted),
        (place(writable, 0), ROOM + 1, RefuseReason::OutOfRange),
        (place(writable, ROOM), 1, RefuseReason::OutOfRange),
        (place(writable, u64::MAX), 2, RefuseReason::OutOfRange),
    ];
    for (to, bytes, reason) in cases {
        let operation = pair.send(0, put(bytes, Level::Placed, to));
        pair.settle(SECOND);
        let error = pair.error(0, operation);
        assert_eq!(
            (refused(&error.cause), error.delivered),
            (reason, Delivered::None)
        );
    }
    let cases = [
        (place(99, 0), 5, RefuseReason::UnknownWindow),
        (place(writable, 0), 5, RefuseReason::NotPermitted),
        (place(readable, u64::MAX), 1, RefuseReason::OutOfRange),
    ];
    for (from, bytes, reason) in cases {
        let operation = pair.get(0, get(bytes, Level::Placed, from));
        pair.settle(SECOND);
        let error = pair.error(0, operation);
        assert_eq!(
            (refused(&error.cause), error.delivered),
            (reason, Delivered::None)
        );
    }
    assert!(pair.sides[1].accepted.is_empty());
    pair.run(SECOND);
    pair.assert_clean();
}

/// Rule 17: a notification is held until the puts before it are placed.
#[test]
fn a_notification_comes_behind_its_puts() {
    let mut pair = Pair::new(small_chunks(3), 11);
    let window = expose(&mut pair, 1, Rights::Put);
    let mut all = Vec::new();
    for round in 0..30 {
        let puts: Vec<_> = (0..4u64)
            .map(|at| {
                let to = place(window, at * 100_000);
                let request = notified(put(round * 3000 + at, Level::Placed, to));
                transfer(pair.send(0, request))
            })
            .collect();
        let told = transfer(pair.send(0, notification(round as usize, puts[0], 4)));
        all.push((puts, told));
    }
    for _ in 0..400_000 {
        if pair.settled() {
            break;
        }
        pair.run(Duration::from_micros(20));
        let side = &pair.sides[1];
        for (puts, told) in &all {
            let Some(operation) = side.accepted.get(told) else {
                continue;
            };
            assert!(side.operations.contains_key(operation));
            for put in puts {
                let placed = &side.operations[&side.accepted[put]].outcome;
                assert!(matches!(placed, Some(Ok(_))), "{told:?} before {put:?}");
            }
        }
    }
    pair.settle(SECOND);
    for (_, told) in &all {
        pair.success(1, pair.sides[1].accepted[told]);
    }
    pair.run(SECOND);
    pair.assert_clean();
}

#[test]
fn a_notification_behind_a_failed_put_is_dropped() {
    for cancel in [false, true] {
        let mut pair = Pair::new(small_chunks(2), 5);
        let window = expose(&mut pair, 1, Rights::Put);
        let good = pair.send(0, notified(put(50_000, Level::Placed, place(window, 0))));
        let to = place(window, if cancel { 0 } else { ROOM });
        let bad = pair.send(0, notified(put(70_000, Level::Placed, to)));
        let told = pair.send(0, notification(9, transfer(good), 2));
        let next = pair.send(0, notification(9, transfer(told), 0));
        if cancel {
            pair.with(0, |session, now| session.cancel(now, bad));
        }
        pair.settle(SECOND * 10);
        pair.success(0, good);
        assert_eq!(refused(&pair.error(0, told).cause), RefuseReason::PutFailed);
        pair.success(0, next);
        assert!(!pair.sides[1].accepted.contains_key(&transfer(told)));
        pair.run(SECOND);
        pair.assert_clean();
    }
}

/// Rule 17: the owner closes the window alone, and what runs in it ends.
#[test]
fn revoking_a_window_ends_what_runs_there() {
    let mut pair = Pair::new(small_chunks(2), 6);
    let window = expose(&mut pair, 1, Rights::GetAndPut);
    let writes = pair.send(0, put(ROOM, Level::Placed, place(window, 0)));
    let reads = pair.get(0, get(ROOM, Level::Placed, place(window, 0)));
    pair.run(Duration::from_millis(2));
    assert!(!pair.settled(), "both run");
    pair.with(1, |session, now| session.revoke(now, window));
    let late = pair.send(0, put(1, Level::Placed, place(window, 0)));
    pair.settle(SECOND * 10);
    for operation in [writes, reads] {
        let cause = pair.error(0, operation).cause;
        assert!(matches!(cause, EndCause::PeerCancelled { .. }), "{cause}");
    }
    assert_eq!(
        refused(&pair.error(0, late).cause),
        RefuseReason::UnknownWindow
    );
    pair.run(SECOND);
    pair.assert_clean();
}

/// Who hears of a notification may use what the peer has got before, and the peer may write there.
#[test]
fn what_follows_a_get_waits_until_its_memory_is_free() {
    let mut session = session(config());
    let window = session.expose(secret(7), 4096, Rights::GetAndPut);
    let take = |session: &mut Session, frames: &[Frame]| {
        for frame in frames {
            session.frame(Time(0), frame.clone()).unwrap();
        }
        drain_at(session, Time(0)).1
    };
    let asked = Frame::Get {
        request: 0,
        from: place(window, 0).into(),
        bytes: 4096,
        level: Level::Placed,
        left: TimeLeft::ANY,
    };
    take(&mut session, &[asked]);
    let answer = SendRequest {
        to: Destination::Reply { request: 0 },
        ..send(0, 4096, Level::Placed)
    };
    let reply = session.send(Time(0), answer).unwrap();
    let granted = Frame::Grant {
        transfer: transfer(reply),
        grant: placing(4096, 0),
    };
    let actions = take(&mut session, &[granted]);
    assert!(matches!(actions[1], Action::PostSend { .. }), "{actions:?}");
    // The peer has it all; the network has not said yet that it is done with the source.
    let placed = Frame::Placed {
        transfer: transfer(reply),
        chunks: PlacedChunks::single(0),
    };
    let told = Destination::Notification {
        first: TransferId(0),
        count: 0,
    };
    let written = put(9, Level::Placed, place(window, 0)).to;
    let frames = [placed, payload(0, told), payload(1, written)];
    let actions = take(&mut session, &frames);
    assert!(
        matches!(actions[..], [Action::ChunkAcknowledged { .. }]),
        "{actions:?}"
    );
    session.chunk_sent(Time(0), reply, 0);
    let actions = drain_at(&mut session, Time(0)).1;
    let ended = |action: &Action| matches!(action, Action::Complete { operation, .. } if *operation == reply);
    assert!(ended(&actions[0]), "{actions:?}");
    assert!(
        matches!(
            actions[1..],
            [
                Action::NotificationArrives { .. },
                Action::PutArrives { .. }
            ]
        ),
        "{actions:?}"
    );
}

/// A caller that hears of ended sends later still frees their memory before a put needs it.
#[test]
fn an_ended_send_is_told_of_before_a_put_arrives() {
    let mut session = session(config());
    let window = session.expose(secret(7), 4096, Rights::Put);
    let sent = session.send(Time(0), eager(1, 9, Level::Placed)).unwrap();
    drain_at(&mut session, Time(0));
    let frames = [
        Frame::EagerDone {
            transfer: transfer(sent),
        },
        payload(0, put(9, Level::Placed, place(window, 0)).to),
    ];
    for frame in frames {
        session.frame(Time(0), frame).unwrap();
    }
    let [first, second] = [(); 2].map(|()| next_action(&mut session));
    assert!(
        matches!(first, Some(Action::Complete { operation, .. }) if operation == sent),
        "{first:?}"
    );
    assert!(
        matches!(second, Some(Action::PutArrives { .. })),
        "{second:?}"
    );
}

#[test]
fn nobody_waits_for_the_acknowledgement_of_a_get() {
    let mut session = session(config());
    let asked = get(9, Level::Placed, place(0, 0));
    let operation = session.get(Time(0), asked).unwrap();
    drain_at(&mut session, Time(0));
    let reply = payload(0, Destination::Reply { request: 0 });
    session.frame(Time(0), reply).unwrap();
    drain_at(&mut session, Time(0));
    session.eager_copied(Time(0), operation);
    let waiting = session.waiting();
    assert_eq!((waiting.acknowledgements, waiting.unawaited), (1, 1));
    drain_at(&mut session, Time(0));
    assert_eq!(session.waiting(), Waiting::default());
}

/// Rule 15: the initiator holds gets back, and asks as others end.
#[test]
fn many_gets_wait_for_each_other() {
    let mut pair = Pair::new(small_chunks(2), 8);
    let window = expose(&mut pair, 1, Rights::Get);
    let gets: Vec<_> = (0..1000)
        .map(|number| pair.get(0, get(number, Level::Placed, place(window, number))))
        .collect();
    let cancelled = gets[900];
    pair.with(0, |session, now| session.cancel(now, cancelled));
    pair.settle(SECOND * 100);
    for (bytes, operation) in (0..).zip(gets) {
        if operation != cancelled {
            assert_eq!(pair.success(0, operation).bytes, bytes);
        }
    }
    pair.run(SECOND);
    pair.assert_clean();
}

/// What a get asked for needs no room: its puts may be as many as the peer takes.
#[test]
fn an_answer_comes_beside_as_many_puts_as_may_be() {
    let mut config = config();
    config.ours.limits.puts = 2;
    let mut pair = Pair::new(config, 8);
    let window = expose(&mut pair, 1, Rights::Put);
    let readable = expose(&mut pair, 0, Rights::Get);
    let puts: Vec<_> = (0..9)
        .map(|at| pair.send(0, put(50_000, Level::Placed, place(window, at * 50_000))))
        .collect();
    let told = pair.send(0, notification(3, TransferId(0), 0));
    let read = pair.get(1, get(50_000, Level::Placed, place(readable, 0)));
    pair.settle(SECOND * 10);
    pair.success(1, read);
    for operation in puts.into_iter().chain([told]) {
        pair.success(0, operation);
    }
    pair.run(SECOND);
    pair.assert_clean();
}

/// The owner counts a get until it has answered, although its time has passed where it was asked.
#[test]
fn gets_that_end_unanswered_keep_their_room() {
    const LIMIT: u32 = 4;
    let mut owner = session(limited(
        &config(),
        Limits {
            gets: LIMIT,
            ..Limits::default()
        },
    ));
    let mut theirs = settings();
    theirs.limits.gets = LIMIT;
    let mut asking = Session::new(config(), Time(0)).unwrap();
    asking.ready();
    asking.frame(Time(0), Frame::from(theirs)).unwrap();
    asking.frame(Time(0), Frame::Ready).unwrap();
    drain_at(&mut asking, Time(0));
    let window = owner.expose(secret(7), ROOM, Rights::Get);
    let mut frames = Vec::new();
    for round in 1..=5 {
        for _ in 0..3 {
            let request = GetRequest {
                deadlines: stall(1),
                ..get(100_000, Level::Placed, place(window, 0))
            };
            asking.get(Time(1_000_000 * (round - 1)), request).unwrap();
        }
        let now = Time(1_000_000 * round);
        frames.extend(drain_at(&mut asking, now).0);
        asking.handle_timeout(now);
        let ended = drain_at(&mut asking, now);
        frames.extend(ended.0);
        assert_eq!(ended.1.len(), 3, "each ends: {:?}", ended.1);
    }
    let is_get = |frame: &&Frame| matches!(frame, Frame::Get { .. });
    assert_eq!(frames.iter().filter(is_get).count(), LIMIT as usize);
    let now = Time(5_000_000);
    for frame in frames.into_iter().filter(|frame| is_get(&frame)) {
        owner.frame(now, frame).unwrap();
    }
    // Each answer makes room for another one.
    let next = asking
        .get(now, get(1, Level::Placed, place(window, 0)))
        .unwrap();
    assert!(asking.queue_moved(next).is_some(), "it waits");
    let refusal = Frame::RefuseGet {
        request: 0,
        reason: RefuseReason::Cancelled,
    };
    asking.frame(now, refusal.clone()).unwrap();
    assert_eq!(asking.queue_moved(next), None);
    assert!(asking.frame(now, refusal).is_err(), "one answer each");
}

/// From when the owner takes it, a get that had to wait has the whole time that it may stall.
#[test]
fn a_get_that_was_queued_stalls_anew_when_it_leaves() {
    let mut theirs = settings();
    theirs.limits.gets = 1;
    let mut asking = Session::new(config(), Time(0)).unwrap();
    asking.ready();
    asking.frame(Time(0), Frame::from(theirs)).unwrap();
    asking.frame(Time(0), Frame::Ready).unwrap();
    drain_at(&mut asking, Time(0));
    for _ in 0..2 {
        let request = GetRequest {
            deadlines: stall(10),
            ..get(1, Level::Placed, place(0, 0))
        };
        asking.get(Time(0), request).unwrap();
    }
    let second = Duration::from_secs(1);
    let refusal = Frame::RefuseGet {
        request: 0,
        reason: RefuseReason::Cancelled,
    };
    asking.frame(Time(0) + 9 * second, refusal).unwrap();
    drain_at(&mut asking, Time(0) + 9 * second);
    let mut ends_at = |seconds: u32| {
        let now = Time(0) + seconds * second;
        asking.handle_timeout(now);
        let (_, actions) = drain_at(&mut asking, now);
        let ends = |action: &Action| matches!(action, Action::Complete { .. });
        actions.iter().any(ends)
    };
    assert!(!ends_at(18));
    assert!(ends_at(19));
}

/// The owner hears only of those that were not read.
#[test]
fn a_get_that_is_read_costs_the_peer_nothing() {
    let mut pair = Pair::new(config(), 3);
    let window = expose(&mut pair, 1, Rights::Get);
    let list = |pair: &mut Pair, window| {
        let pieces = [0, 8192].map(|offset| (place(window, offset), 5));
        let mut list = PieceList::default();
        pieces
            .iter()
            .for_each(|(place, bytes)| list.push(place, *bytes).unwrap());
        let list = pair.with(0, |session, _| session.add_pieces(Arc::new(list)));
        let list = list.unwrap();
        Extent::Pieces(list)
    };
    let before = pair.sides[1].frames_in.len();
    for (window, is_whole) in [(window, true), (window, false), (window + 1, false)] {
        let listed = list(&mut pair, window);
        for (extent, bytes) in [(place(window, 0).into(), 70_000), (listed, 10)] {
            let operation = pair.read(0, get(bytes, Level::Sent, extent), is_whole);
            if let Extent::Pieces(list) = extent {
                pair.with(0, |session, _| session.drop_pieces(list));
            }
            pair.settle(SECOND);
            let is_exposed = pair.sides[1].session.window(window).is_some();
            match is_exposed {
                true => {
                    let completed = pair.success(0, operation);
                    assert_eq!((completed.bytes, completed.level), (bytes, Level::Placed));
                }
                false => {
                    let cause = pair.error(0, operation).cause;
                    assert_eq!(refused(&cause), RefuseReason::UnknownWindow);
                }
            }
            let heard = pair.sides[1].frames_in[before..].iter();
            let heard = heard.filter(|frame| matches!(frame, Frame::Get { .. }));
            assert_eq!(heard.count() == 0, is_whole);
        }
        if !is_whole {
            pair.sides[1].frames_in.truncate(before);
        }
    }
    pair.run(SECOND);
    pair.assert_clean();
}

#[test]
fn a_get_being_read_ends_by_deadline_and_cancel() {
    let mut pair = Pair::new(config(), 3);
    let window = expose(&mut pair, 1, Rights::Get);
    pair.fault_plan.no_unpack = true;
    let request = get(70_000, Level::Placed, place(window, 0));
    let late = GetRequest {
        deadlines: stall(1),
        ..request
    };
    let [late, cancelled] = [late, request].map(|request| pair.read(0, request, true));
    pair.with(0, |session, now| session.cancel(now, cancelled));
    pair.settle(SECOND * 2);
    let ended = [late, cancelled].map(|operation| pair.error(0, operation).cause);
    assert!(
        matches!(ended, [EndCause::Stalled(_), EndCause::Cancelled]),
        "{ended:?}"
    );
    let heard = &pair.sides[1].frames_in;
    assert!(
        !heard
            .iter()
            .any(|frame| matches!(frame, Frame::Get { .. } | Frame::Cancel { .. }))
    );
    pair.run(SECOND);
    pair.assert_clean();
}

/// A get has no number of a tag: that it ends early moves no receive.
#[test]
fn a_get_that_ends_early_leaves_receives_their_numbers() {
    let mut pair = Pair::new(config(), 3);
    let window = expose(&mut pair, 1, Rights::Put);
    let sizes = [70_000, 80_000];
    let receives = sizes.map(|bytes| pair.receive(0, receive(0, bytes, Level::Placed)));
    let [cancelled, refused] =
        [(), ()].map(|()| pair.get(0, get(5, Level::Placed, place(window, 0))));
    pair.with(0, |session, now| session.cancel(now, cancelled));
    pair.run(SECOND);
    let ended = [cancelled, refused].map(|operation| pair.error(0, operation).cause);
    assert!(
        matches!(ended, [EndCause::Cancelled, EndCause::Refused { .. }]),
        "{ended:?}"
    );
    for bytes in sizes {
        pair.send(1, send(0, bytes, Level::Placed));
    }
    pair.settle(SECOND);
    for (bytes, operation) in sizes.into_iter().zip(receives) {
        assert_eq!(pair.success(0, operation).bytes, bytes);
    }
    pair.assert_matched_in_order();
    pair.assert_clean();
}

#[test]
fn closing_refuses_what_was_not_accepted() {
    let mut session = session(config());
    let window = session.expose(secret(7), 100, Rights::GetAndPut);
    let to = Destination::Put {
        to: place(window, 0).into(),
        notified: Notified::First,
        left: TimeLeft::ANY,
    };
    let zero = TransferId(0);
    let frames = [
        waiting(0, 100, to),
        Frame::Get {
            request: 0,
            from: place(window, 0).into(),
            bytes: 100,
            level: Level::Placed,
            left: TimeLeft::ANY,
        },
    ];
    for frame in frames {
        session.frame(Time(0), frame).unwrap();
    }
    let actions = drain_at(&mut session, Time(0)).1;
    assert_eq!(actions.len(), 2, "{actions:?}");
    session.close(Time(0), CLOSE);
    let frames = drain_at(&mut session, Time(0)).0;
    let reason = RefuseReason::Shutdown;
    let refusals = [
        Frame::Refuse {
            transfer: zero,
            reason,
        },
        Frame::RefuseGet { request: 0, reason },
    ];
    assert_eq!(frames[..2], refusals);
    assert_eq!(session.accept(Time(0), zero), None);
}

/// Whatever breaks the rules of one-sided frames ends the connection with an error.
#[test]
fn one_sided_frames_that_no_honest_peer_sends() {
    let ask = |request| Frame::Get {
        request,
        from: place(0, 0).into(),
        bytes: 1,
        level: Level::Placed,
        left: TimeLeft::ANY,
    };
    let reply = |request| Destination::Reply { request };
    let behind = |first, count| Destination::Notification {
        first: TransferId(first),
        count,
    };
    let cases: [&[Frame]; 7] = [
        &[waiting(0, 65_537, behind(0, 0))],
        &[waiting(0, 5, reply(1))],
        &[waiting(0, 6, reply(0))],
        &[waiting(0, 5, behind(0, 1))],
        &[waiting(0, 5, behind(u64::MAX, 1))],
        &[ask(1)],
        &[Frame::RefuseGet {
            request: 1,
            reason: RefuseReason::Shutdown,
        }],
    ];
    for frames in cases {
        let mut session = session(config());
        let asked = get(5, Level::Placed, place(3, 0));
        session.get(Time(0), asked).unwrap();
        drain_at(&mut session, Time(0));
        let (last, first) = frames.split_last().unwrap();
        for frame in first {
            session.frame(Time(0), frame.clone()).unwrap();
        }
        assert!(session.frame(Time(0), last.clone()).is_err(), "{frames:?}");
    }
    let mut flooded = session(config());
    flooded.expose(secret(7), 1, Rights::Get);
    let error = (0..).find_map(|request| flooded.frame(Time(0), ask(request)).err());
    let error = error.expect("a bound");
    assert!(matches!(error, SessionError::TooMany { .. }), "{error}");
}

#[derive(Clone, Debug)]
struct Schedule {
    seed: u64,
    channels: u16,
    jitter: u64,
    operations: u64,
    cancels: u64,
    revokes: u64,
    ahead: bool,
    limits: [Limits; 2],
}

fn any_schedule() -> impl Strategy<Value = Schedule> {
    (
        (any::<u64>(), 1u16..5, 1u64..3000, 1u64..60),
        prop_oneof![Just(0u64), 1u64..50],
        prop_oneof![Just(0u64), 1u64..15],
        any::<bool>(),
        [any_limits(1), any_limits(1)],
    )
        .prop_map(
            |((seed, channels, jitter, operations), cancels, revokes, ahead, limits)| Schedule {
                seed,
                channels,
                jitter,
                operations,
                cancels,
                revokes,
                ahead,
                limits,
            },
        )
}

fn play(schedule: &Schedule) {
    let mut config = small_chunks(schedule.channels);
    config.ours.eager_credit = 64 * 1024;
    config.addressed = schedule.ahead;
    let [ours, theirs] = schedule.limits.map(|limits| limited(&config, limits));
    let mut pair = Pair::of(ours, theirs, schedule.seed);
    pair.fault_plan.jitter = schedule.jitter;
    let mut random = Random(!schedule.seed);
    let mut windows = [0, 1].map(|side| expose(&mut pair, side, Rights::GetAndPut));
    let mut live = Vec::new();
    // Notifications and the puts that each follows.
    let mut notifications = Vec::new();
    for _ in 0..schedule.operations {
        let side = random.below(2) as usize;
        let bytes = [0, 1, 4096, 5000, 16_384, 60_000, 200_000][random.below(7) as usize];
        let to = place(windows[1 - side], random.below(ROOM / 4));
        let level = [Level::Sent, Level::Placed, Level::Verified][random.below(3) as usize];
        match random.below(5) {
            0 => {
                live.push((1 - side, pair.receive(1 - side, receive(1, bytes, level))));
                live.push((side, pair.send(side, send(1, bytes, level))));
            }
            1 if level < Level::Verified && random.chance(50) => {
                let request = get(bytes, level, to);
                let operation = pair.read(side, request, random.chance(50));
                live.push((side, operation));
            }
            1 => live.push((side, pair.get(side, get(bytes, level, to)))),
            2 => live.push((side, pair.send(side, put(bytes, level, to)))),
            _ => {
                let count = random.below(6) as u32;
                let mut puts = Vec::new();
                for _ in 0..count {
                    let operation = pair.send(side, notified(put(bytes, level, to)));
                    live.push((side, operation));
                    puts.push(operation);
                }
                let first = puts.first().map_or(TransferId(0), |put| transfer(*put));
                let told = pair.send(side, notification(9, first, count));
                notifications.push((side, told, puts));
            }
        }
        pair.run(Duration::from_micros(random.below(schedule.jitter * 2)));
        if random.chance(schedule.cancels) && !live.is_empty() {
            let (side, operation) = live[random.below(live.len() as u64) as usize];
            pair.with(side, |session, now| session.cancel(now, operation));
        }
        if random.chance(schedule.revokes) {
            let side = random.below(2) as usize;
            let window = windows[side];
            pair.with(side, |session, now| session.revoke(now, window));
            windows[side] = expose(&mut pair, side, Rights::GetAndPut);
        }
    }
    pair.run(SECOND);
    // Receives and sends of a tag whose other half was cancelled.
    for (side, operation) in live {
        pair.with(side, |session, now| session.cancel(now, operation));
    }
    pair.settle(SECOND * 100);
    pair.run(SECOND);
    while (0..2).any(|side| pair.sides[side].session.matching.waits(Tag(1))) {
        for side in 0..2 {
            if pair.sides[side].session.matching.waits(Tag(1)) {
                pair.receive(side, receive(1, 200_000, Level::Placed));
            }
        }
        pair.run(SECOND);
    }
    pair.assert_clean();
    for (side, told, puts) in notifications {
        let owner = &pair.sides[1 - side];
        let placed = |put: &OperationId| {
            let there = owner.accepted.get(&transfer(*put));
            let outcome = there.map(|there| &owner.operations[there].outcome);
            matches!(outcome, Some(Some(Ok(_))))
        };
        let delivered = owner.accepted.contains_key(&transfer(told));
        assert_eq!(delivered, puts.iter().all(placed));
        assert_eq!(
            pair.outcome(side, told).is_some_and(Result::is_ok),
            delivered
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn notifications_come_exactly_behind_what_was_placed(schedule in any_schedule()) {
        play(&schedule);
    }
}
