//! Posted windows and counted matching: the rules that decide who meets whom.

use super::hostile::{drain_at, session};
use super::pair::Pair;
use super::*;
use crate::ChunkPlan;
use crate::frame::{Frame, RefuseReason, TransferId};

fn addressed() -> Config {
    Config {
        addressed: true,
        hold_until_placed: true,
        ..small_chunks(1)
    }
}

fn frames_to(pair: &Pair, side: usize, wanted: fn(&Frame) -> bool) -> usize {
    let frames = pair.sides[side].frames_in.iter();
    frames.filter(|frame| wanted(frame)).count()
}

/// A posted receive costs no round trip, whatever its tag and however much of it is filled.
#[test]
fn a_send_to_a_posted_receive_asks_nothing() {
    let mut pair = Pair::new(addressed(), 1);
    let receives = [3, 1, 2].map(|tag| pair.receive(1, receive(tag, 200_000, Level::Placed)));
    pair.run(Duration::from_millis(1));
    let sends = [(1, 200_000), (2, 20_000), (3, 199_999)]
        .map(|(tag, bytes)| pair.send(0, send(tag, bytes, Level::Placed)));
    pair.settle(Duration::from_secs(1));
    for (sent, bytes) in sends.iter().zip([200_000, 20_000, 199_999]) {
        assert_eq!(pair.success(0, *sent).bytes, bytes);
    }
    for (received, bytes) in receives.iter().zip([199_999, 200_000, 20_000]) {
        assert_eq!(pair.success(1, *received).bytes, bytes);
    }
    assert_eq!(
        frames_to(&pair, 1, |frame| matches!(frame, Frame::Waiting { .. })),
        0
    );
    pair.run(Duration::from_millis(5));
    pair.assert_clean();
}

/// As of memory that the peer's data plane copies at once.
#[test]
fn a_send_may_have_longer_chunks_than_its_receive_was_cut_into() {
    let mut pair = Pair::new(addressed(), 1);
    let posted = pair.receive(1, receive(1, 200_000, Level::Placed));
    pair.run(Duration::from_millis(1));
    let long = |tag, chunk_bytes| SendRequest {
        chunk_bytes: Some(chunk_bytes),
        ..send(tag, 200_000, Level::Verified)
    };
    let sends = [long(1, 1 << 20), long(2, 65_536)].map(|request| pair.send(0, request));
    pair.run(Duration::from_millis(1));
    let granted = pair.receive(1, receive(2, 300_000, Level::Placed));
    pair.settle(Duration::from_secs(1));
    for (sent, received) in sends.into_iter().zip([posted, granted]) {
        assert_eq!(pair.success(0, sent).bytes, 200_000);
        assert_eq!(pair.success(1, received).bytes, 200_000);
    }
    pair.run(Duration::from_millis(5));
    pair.assert_clean();
}

/// Rule 4: eager is chosen by size alone, and a window that is known is closed for it.
#[test]
fn rule_4_a_small_message_into_a_large_receive_is_eager() {
    let mut pair = Pair::new(addressed(), 2);
    let received = pair.receive(1, receive(1, 1 << 20, Level::Placed));
    pair.run(Duration::from_millis(1));
    let sent = pair.send(0, eager(1, 4096, Level::Placed));
    pair.settle(Duration::from_secs(1));
    assert_eq!(pair.success(1, received).bytes, 4096);
    pair.success(0, sent);
    pair.run(Duration::from_millis(5));
    pair.assert_clean();
}

/// Windows that small messages make vain are no longer opened, until a long one asks.
#[test]
fn receives_of_small_messages_are_not_posted_for_ever() {
    for opened in [1, 8] {
        are_posted_in_vain(opened);
    }
}

fn are_posted_in_vain(opened: usize) {
    let mut config = addressed();
    config.bounds.vain_windows = opened as u8;
    let mut pair = Pair::new(config, 6);
    let large = 1 << 20;
    for _ in 0..3 * opened {
        let received = pair.receive(1, receive(1, large, Level::Placed));
        pair.run(Duration::from_millis(1));
        let sent = pair.send(0, eager(1, 4096, Level::Placed));
        pair.settle(Duration::from_secs(1));
        assert_eq!(pair.success(1, received).bytes, 4096);
        pair.success(0, sent);
    }
    let is_posted = |frame: &Frame| matches!(frame, Frame::Posted { .. });
    assert_eq!(frames_to(&pair, 0, is_posted), opened);
    for asked in [1, 1, 1] {
        let received = pair.receive(1, receive(1, large, Level::Placed));
        pair.run(Duration::from_millis(1));
        let sent = pair.send(0, send(1, large, Level::Placed));
        pair.settle(Duration::from_secs(1));
        pair.success(1, received);
        pair.success(0, sent);
        let is_waiting = |frame: &Frame| matches!(frame, Frame::Waiting { .. });
        assert_eq!(frames_to(&pair, 1, is_waiting), asked);
    }
    assert_eq!(frames_to(&pair, 0, is_posted), opened + 2);
    pair.run(Duration::from_millis(5));
    pair.assert_clean();
}

/// Rule 4: a send that cannot go to the window asks, and is answered.
#[test]
fn rule_4_what_does_not_fit_a_window_is_answered() {
    let mut pair = Pair::new(addressed(), 3);
    let small = pair.receive(1, receive(1, 20_000, Level::Placed));
    let plain = pair.receive(1, receive(2, 20_000, Level::Placed));
    pair.run(Duration::from_millis(1));
    let large = pair.send(0, send(1, 20_001, Level::Placed));
    let verified = pair.send(0, send(2, 20_000, Level::Verified));
    pair.settle(Duration::from_secs(1));
    let too_large = EndCause::TooLarge {
        bytes: 20_001,
        capacity: 20_000,
    };
    for (side, operation) in [(0, large), (1, small)] {
        let error = pair.error(side, operation);
        assert_eq!(
            (error.cause, error.delivered),
            (too_large.clone(), Delivered::None)
        );
    }
    assert_eq!(pair.success(0, verified).level, Level::Verified);
    assert_eq!(pair.success(1, plain).level, Level::Verified);
    pair.run(Duration::from_millis(5));
    pair.assert_clean();
}

/// A peer writes to a window, and says then that it has more than that holds.
#[test]
fn a_window_written_before_a_refusal_is_not_called_untouched() {
    let mut pair = Pair::new(addressed(), 4);
    let small = pair.receive(1, receive(1, 20_000, Level::Placed));
    pair.run(Duration::from_millis(1));
    pair.with(1, |session, _| session.window_touched(small));
    pair.send(0, send(1, 20_001, Level::Placed));
    pair.settle(Duration::from_secs(1));
    let error = pair.error(1, small);
    assert!(matches!(error.cause, EndCause::TooLarge { .. }));
    assert_eq!(error.delivered, Delivered::Partial { bytes: 0 });
}

/// Rule 6: receives that end and are posted again, as those with time-outs are, lose no send that
/// was on its way.
#[test]
fn rule_6_receives_with_time_outs_lose_no_send() {
    let mut crossed = 0;
    for seed in 0..200 {
        let mut pair = Pair::new(addressed(), seed);
        let first = pair.receive(1, receive(1, 20_000, Level::Placed));
        pair.run(Duration::from_millis(1));
        // Data takes longer than the end of the receive does.
        pair.fault_plan.data = Some(3000);
        let sent = pair.send(0, send(1, 20_000, Level::Placed));
        pair.run(Duration::from_micros(seed));
        pair.with(1, |session, now| session.cancel(now, first));
        pair.run(Duration::from_millis(seed / 20));
        if let Some(Err(error)) = pair.outcome(0, sent) {
            // Its first byte had come to a receive that ended then.
            assert!(matches!(error.cause, EndCause::PeerCancelled { .. }));
            continue;
        }
        let last = pair.receive(1, receive(1, 20_000, Level::Placed));
        pair.settle(Duration::from_secs(1));
        pair.success(0, sent);
        pair.success(1, last);
        crossed += 1;
        pair.run(Duration::from_millis(5));
        pair.assert_clean();
    }
    assert!(crossed > 20, "{crossed}");
}

/// Rule 6: what comes behind a send that lost its receive is received behind it, by receives that
/// were not announced.
#[test]
fn rule_6_receives_with_time_outs_keep_the_order() {
    for seed in 0..100 {
        let mut pair = Pair::new(addressed(), seed);
        let first = pair.receive(1, receive(1, 20_000, Level::Placed));
        pair.run(Duration::from_millis(1));
        pair.fault_plan.data = Some(1_000_000);
        let mut sends = vec![pair.send(0, send(1, 20_000, Level::Placed))];
        for _ in 0..3 {
            sends.push(pair.send(0, eager(1, 8, Level::Placed)));
        }
        pair.with(1, |session, now| session.cancel(now, first));
        pair.fault_plan.data = None;
        for (at, sent) in sends.into_iter().enumerate() {
            let received = pair.receive(1, receive(1, 20_000, Level::Placed));
            pair.run(Duration::from_micros(seed * 10) + Duration::from_secs(2));
            assert_eq!(pair.success(1, received).bytes, [20_000, 8, 8, 8][at]);
            pair.success(0, sent);
        }
        pair.run(Duration::from_secs(1));
        pair.assert_clean();
    }
}

/// Rule 6: a number is the one of its receive for ever. Those of receives that have ended are
/// skipped.
#[test]
fn rule_6_numbers_of_receives_that_end_are_skipped() {
    for ends in [
        vec![1],
        vec![0],
        vec![4],
        vec![1, 3],
        vec![3, 4],
        vec![0, 1, 2],
    ] {
        let mut pair = Pair::new(addressed(), 4);
        let receives: Vec<_> = (0..5)
            .map(|_| pair.receive(1, receive(1, 20_000, Level::Placed)))
            .collect();
        pair.run(Duration::from_millis(1));
        for end in &ends {
            pair.with(1, |session, now| session.cancel(now, receives[*end]));
        }
        pair.run(Duration::from_millis(1));
        let sends: Vec<_> = (0..5 - ends.len())
            .map(|_| pair.send(0, send(1, 20_000, Level::Placed)))
            .collect();
        pair.settle(Duration::from_secs(1));
        for (at, received) in receives.into_iter().enumerate() {
            match ends.contains(&at) {
                true => assert_eq!(pair.error(1, received).cause, EndCause::Cancelled),
                false => assert_eq!(pair.success(1, received).bytes, 20_000),
            }
        }
        for sent in sends {
            pair.success(0, sent);
        }
        let asked = frames_to(&pair, 1, |frame| matches!(frame, Frame::Waiting { .. }));
        assert_eq!(asked, 0);
        pair.run(Duration::from_millis(5));
        pair.assert_matched_in_order();
        pair.assert_clean();
    }
}

/// An operation that has ended stays as it ended, and a receive ends with what was sent for it
/// alone.
#[test]
fn a_receive_that_ends_changes_no_end_and_no_other_receive() {
    for level in [Level::Sent, Level::Placed] {
        let mut pair = Pair::new(addressed(), 3);
        let receives = [(); 3].map(|()| pair.receive(1, receive(1, 20_000, Level::Placed)));
        pair.run(Duration::from_millis(1));
        pair.fault_plan.data = Some(1_000_000);
        let sent = pair.send(0, send(1, 20_000, level));
        pair.run(Duration::from_micros(300));
        assert_eq!(pair.outcome(0, sent).is_some(), level == Level::Sent);
        pair.with(1, |session, now| session.cancel(now, receives[0]));
        pair.fault_plan.data = None;
        pair.run(Duration::from_secs(2));
        assert_eq!(pair.outcome(1, receives[1]), None);
        let next = [(); 2].map(|()| pair.send(0, send(1, 20_000, Level::Placed)));
        pair.run(Duration::from_secs(1));
        for at in [1, 2] {
            pair.success(1, receives[at]);
            pair.success(0, next[at - 1]);
        }
        if level == Level::Placed {
            // It waits for the next receive.
            let last = pair.receive(1, receive(1, 20_000, Level::Placed));
            pair.settle(Duration::from_secs(1));
            pair.success(1, last);
        }
        pair.success(0, sent);
        pair.run(Duration::from_millis(5));
        pair.assert_clean();
    }
}

/// Receives of which the peer was not told end without a word, and what ends is forgotten on both
/// sides.
#[test]
fn receives_that_end_leave_no_counts_behind() {
    let mut pair = Pair::new(addressed(), 7);
    for tag in 0..100 {
        let ended =
            [8, 20_000, 20_000, 8].map(|bytes| pair.receive(1, receive(tag, bytes, Level::Placed)));
        pair.run(Duration::from_millis(1));
        for operation in ended {
            pair.with(1, |session, now| session.cancel(now, operation));
        }
        pair.run(Duration::from_millis(1));
    }
    pair.settle(Duration::from_secs(1));
    assert!(pair.sides[0].session.matching.sends.is_empty());
    assert_eq!(pair.sides[1].session.matching.received_tags(), 0);
    pair.assert_clean();
}

/// Rule 8: no window is opened before the caller's GPU work is done, whichever side was first.
#[test]
fn rule_8_a_fenced_receive_is_posted_when_its_fence_is_reached() {
    for asks_first in [false, true] {
        let now = Time(0);
        let mut session = session(addressed());
        let waiting = Frame::Waiting {
            transfer: TransferId(0),
            level: Level::Placed,
            bytes: 20_000,
            to: Destination::next_receive(Tag(1)),
        };
        if asks_first {
            session.frame(now, waiting.clone()).unwrap();
        }
        let request = ReceiveRequest {
            fenced: true,
            ..receive(1, 20_000, Level::Placed)
        };
        let operation = session.receive(now, request).unwrap();
        if !asks_first {
            session.frame(now, waiting).unwrap();
        }
        let (frames, actions) = drain_at(&mut session, now);
        assert!(
            frames.is_empty() && actions.is_empty(),
            "{frames:?} {actions:?}"
        );
        session.fence_reached(now, operation);
        let (frames, actions) = drain_at(&mut session, now);
        assert!(matches!(frames[..], [Frame::Grant { .. }]), "{frames:?}");
        assert!(
            matches!(actions[0], Action::OpenWindow { .. }),
            "{actions:?}"
        );
    }
}

/// Short chunks keep all lanes busy with one transfer, and cost more than long ones where others
/// follow it. A window that waits may do so for long: it is none of those.
#[test]
fn a_receive_beside_another_is_cut_into_long_chunks() {
    let now = Time(0);
    let mut session = session(Config {
        ours: settings(),
        pieces: 8,
        least_chunk_bytes: 4096,
        ..addressed()
    });
    let long = session.agreed().unwrap().chunk_bytes;
    let bytes = 4 * u64::from(long);
    let mut post = |begun: Option<OperationId>| {
        if let Some(operation) = begun {
            session.window_begins(now, operation, ChunkPlan::even(bytes, long));
        }
        let request = receive(1, bytes, Level::Placed);
        let operation = session.receive(now, request).unwrap();
        let (frames, _) = drain_at(&mut session, now);
        match frames[..] {
            [Frame::Posted { grant, .. }] => (operation, grant.chunk_bytes),
            _ => panic!("{frames:?}"),
        }
    };
    let (first, alone) = post(None);
    assert_eq!(alone, long / 2);
    let (_, waiting) = post(None);
    assert_eq!(waiting, alone);
    let (_, beside) = post(Some(first));
    assert_eq!(beside, long);
}

/// Rule 5: counts are forgotten when nothing of a tag is under way, and both sides begin at 0
/// again.
#[test]
fn rule_5_idle_tags_are_forgotten() {
    const TAGS: u32 = 64;
    let mut config = addressed();
    config.ours.limits.tags = TAGS;
    let mut pair = Pair::new(config, 5);
    let kept = pair.receive(1, receive(0, 20_000, Level::Placed));
    for tag in 0..1000u64 {
        let bytes = if tag % 2 == 0 { 20_000 } else { 8 };
        let tag = tag + 1;
        let received = pair.receive(1, receive(tag, bytes, Level::Placed));
        let sent = match bytes {
            8 => pair.send(0, eager(tag, 8, Level::Placed)),
            _ => pair.send(0, send(tag, bytes, Level::Placed)),
        };
        while pair.outcome(1, received).is_none() || pair.outcome(0, sent).is_none() {
            pair.run(Duration::from_micros(200));
        }
        pair.sides[1].frames_in.clear();
        for side in &mut pair.sides {
            side.operations.remove(&sent);
            side.operations.retain(|operation, _| *operation == kept);
            side.sent_to.clear();
        }
    }
    let counted = pair.sides[0].session.matching.sends.len();
    assert!(counted <= TAGS as usize, "{counted}");
    let counted = pair.sides[1].session.matching.received_tags();
    assert!(counted <= TAGS as usize + 1, "{counted}");
    // A tag that was forgotten counts from 0, one that waits did not change.
    for tag in [0, 1, 2, 999] {
        let received = match tag {
            0 => kept,
            _ => pair.receive(1, receive(tag, 20_000, Level::Placed)),
        };
        let sent = pair.send(0, send(tag, 20_000, Level::Placed));
        pair.run(Duration::from_millis(2));
        pair.success(1, received);
        pair.success(0, sent);
    }
}

/// As many as it may count, while this side can say nothing.
#[test]
fn a_peer_forgets_all_its_tags_at_once() {
    let one = Limits {
        puts: 1,
        notifications: 1,
        gets: 1,
        asks: 1,
        windows: 1,
        tags: 100,
        ..Limits::default()
    };
    let mut config = limited(&addressed(), one);
    config.bounds.backlog = 0;
    let now = Time(0);
    let theirs = config.ours.clone();
    let mut session = Session::new(config, now).unwrap();
    session.frame(now, Frame::from(theirs)).unwrap();
    drain_at(&mut session, now);
    for tag in 0..100 {
        let (tag, number) = (Tag(tag), 0);
        session.frame(now, Frame::Forget { tag, number }).unwrap();
    }
}

/// A number that was forgotten comes again: the send that has it now does not lose it with the end
/// of the one before.
#[test]
fn a_send_keeps_its_number_when_an_earlier_one_of_it_ends() {
    let now = Time(0);
    let mut session = Session::new(addressed(), now).unwrap();
    session.ready();
    let mut theirs = settings();
    theirs.limits.tags = 1;
    session.frame(now, Frame::from(theirs)).unwrap();
    session.frame(now, Frame::Ready).unwrap();
    drain_at(&mut session, now);
    let asked_to_forget = |session: &mut Session, tag: u64| {
        let (frames, _) = drain_at(session, now);
        let forgets =
            |frame: &Frame| matches!(frame, Frame::Forget { tag: Tag(one), .. } if *one == tag);
        assert!(frames.iter().any(forgets), "{frames:?}");
        let (tag, forgotten) = (Tag(tag), true);
        session
            .frame(now, Frame::Forgotten { tag, forgotten })
            .unwrap();
    };
    session.send(now, eager(1, 8, Level::Placed)).unwrap();
    session.send(now, send(2, 20_000, Level::Placed)).unwrap();
    asked_to_forget(&mut session, 1);
    let again = session.send(now, send(1, 20_000, Level::Placed)).unwrap();
    let (transfer, reason) = (TransferId(1), RefuseReason::Cancelled);
    session
        .frame(now, Frame::Refuse { transfer, reason })
        .unwrap();
    asked_to_forget(&mut session, 2);
    let transfer = TransferId(0);
    session.frame(now, Frame::EagerDone { transfer }).unwrap();
    let posted = Frame::Posted {
        tag: Tag(1),
        number: 0,
        capacity: 20_000,
        grant: placing(4096, 0),
    };
    session.frame(now, posted).unwrap();
    let (_, actions) = drain_at(&mut session, now);
    let goes = |action: &Action| matches!(action, Action::PostSend { operation, .. } if *operation == again);
    assert!(actions.iter().any(goes), "{actions:?}");
}

/// A queued send stalls only while no other one gets what it waits for, and anew from when it gets
/// that itself.
#[test]
fn a_queued_send_stalls_only_while_no_room_comes() {
    let [one, many] = [1, Limits::default().tags];
    for (tags, asks) in [(one, many), (many, one), (one, one)] {
        let limits = Limits {
            tags,
            asks,
            ..Limits::default()
        };
        let mut pair = Pair::of(config(), limited(&config(), limits), 1);
        let sends = [1, 2, 3, 4].map(|tag| {
            let mut request = send(tag, 20_000, Level::Placed);
            request.deadlines = stall(10);
            pair.send(0, request)
        });
        for (at, sent) in sends.into_iter().enumerate() {
            pair.run(Duration::from_secs(6));
            let received = pair.receive(1, receive(at as u64 + 1, 20_000, Level::Placed));
            pair.run(Duration::from_secs(1));
            pair.success(0, sent);
            pair.success(1, received);
        }
        pair.assert_clean();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Messages and receives go on meeting, whichever receives were given up before: one that
    /// crossed the end of its receive waits for the next one that is started.
    #[test]
    fn receives_that_are_given_up_keep_no_message_from_others(
        limits in [any_limits(1), any_limits(1)],
        steps in prop::collection::vec((0u8..4, any::<prop::sample::Index>(), 0u64..400), 1..40),
        is_slow in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let [a, b] = limits.map(|limits| limited(&addressed(), limits));
        let mut pair = Pair::of(a, b, seed);
        pair.fault_plan.data = is_slow.then_some(3000);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let failed = |pair: &Pair, side, operation: &OperationId| {
            matches!(pair.outcome(side, *operation), Some(Err(_)))
        };
        for (step, which, pause) in steps {
            match step {
                0 => sends.push(pair.send(0, send(1, 20_000, Level::Placed))),
                1 if !receives.is_empty() => {
                    let given_up = *which.get(&receives);
                    pair.with(1, |session, now| session.cancel(now, given_up));
                }
                _ => receives.push(pair.receive(1, receive(1, 20_000, Level::Placed))),
            }
            pair.run(Duration::from_micros(pause));
        }
        for _ in 0..10 {
            pair.run(Duration::from_secs(1));
            // A message that had begun to come ended with its receive.
            sends.retain(|sent| !failed(&pair, 0, sent));
            receives.retain(|received| !failed(&pair, 1, received));
            while sends.len() < receives.len() {
                sends.push(pair.send(0, send(1, 20_000, Level::Placed)));
            }
            while receives.len() < sends.len() {
                receives.push(pair.receive(1, receive(1, 20_000, Level::Placed)));
            }
            pair.run(Duration::from_secs(1));
            if pair.settled() {
                break;
            }
            sends.push(pair.send(0, send(1, 20_000, Level::Placed)));
            receives.push(pair.receive(1, receive(1, 20_000, Level::Placed)));
        }
        for (sent, received) in sends.into_iter().zip(receives) {
            pair.success(0, sent);
            pair.success(1, received);
        }
        pair.assert_clean();
    }

    /// A program whose peer receives in the order in which it sends needs no more than one of
    /// anything at a time, whatever its tags are and however early the receives are there.
    #[test]
    fn programs_of_one_order_end_under_any_limits(
        limits in [any_limits(1), any_limits(1)],
        messages in prop::collection::vec((0usize..2, 0u64..3, any::<bool>(), any::<bool>(), 0u64..300), 1..30),
        is_addressed in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let config = if is_addressed { addressed() } else { small_chunks(1) };
        let [a, b] = limits.map(|limits| limited(&config, limits));
        let mut pair = Pair::of(a, b, seed);
        let mut started = Vec::new();
        for &(side, tag, is_short, receives_first, pause) in &messages {
            let bytes = if is_short { 8 } else { 20_000 };
            let mut halves = [1 - side, side];
            if !receives_first {
                halves.reverse();
            }
            for half in halves {
                let operation = match half == side {
                    false => pair.receive(half, receive(tag, 20_000, Level::Placed)),
                    true if is_short => pair.send(half, eager(tag, 8, Level::Placed)),
                    true => pair.send(half, send(tag, bytes, Level::Placed)),
                };
                started.push((half, operation));
                pair.run(Duration::from_micros(pause));
            }
        }
        pair.settle(Duration::from_secs(1));
        for (side, operation) in started {
            pair.success(side, operation);
        }
        pair.run(Duration::from_secs(1));
        pair.assert_clean();
        // Nothing asks for ever: no more than once for each send, in each direction.
        for side in 0..2 {
            let asked = frames_to(&pair, side, |frame| matches!(frame, Frame::Forget { .. }));
            prop_assert!(asked <= messages.len(), "{asked} of {}", messages.len());
        }
    }
}
