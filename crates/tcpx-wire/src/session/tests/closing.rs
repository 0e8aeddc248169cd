//! Closing in order, and peers that die.

use super::pair::Pair;
use super::*;
use crate::frame::{Frame, GoodbyeReason, RefuseReason, Role};

#[test]
fn closing_waits_for_what_is_under_way_and_tells_the_peer() {
    for seed in 0..20 {
        let mut pair = Pair::new(small_chunks(3), seed);
        let sent = pair.send(0, send(1, 3_000_000, Level::Sent));
        let got = pair.receive(1, receive(1, 3_000_000, Level::Placed));
        let unmatched = pair.receive(0, receive(5, 10, Level::Placed));
        let refused = pair.send(1, send(6, 10, Level::Placed));
        pair.run(Duration::from_millis(2));
        pair.with(0, |session, now| session.close(now, CLOSE));
        assert_eq!(pair.error(0, unmatched).cause, EndCause::Closed);
        let closed = pair.sides[0]
            .session
            .send(pair.now, send(1, 1, Level::Placed));
        assert_eq!(closed, Err(RequestError::Closed));
        pair.run(Duration::from_millis(500));
        assert_eq!(pair.success(0, sent).bytes, 3_000_000);
        assert_eq!(pair.success(1, got).bytes, 3_000_000, "not lost by closing");
        let reason = RefuseReason::Shutdown;
        assert_eq!(pair.error(1, refused).cause, EndCause::Refused { reason });
        for side in &pair.sides {
            assert_eq!(side.closed, Some(None));
            assert_eq!(side.session.next_timeout(), None);
        }
        pair.assert_clean();
    }
}

#[test]
fn a_lane_that_one_side_lacks_is_asked_for_until_the_end() {
    let mut pair = Pair::new(config(), 1);
    pair.with(1, |session, _| session.ask_for_lane(2));
    pair.run(Duration::from_millis(5));
    pair.with(1, |session, _| session.ask_for_lane(0));
    pair.run(Duration::from_millis(5));
    assert_eq!(pair.sides[0].asked_for, [2, 0]);
    pair.with(0, |session, now| session.close(now, CLOSE));
    pair.run(Duration::from_millis(50));
    pair.with(1, |session, _| session.ask_for_lane(1));
    let next = pair.with(1, |session, now| session.poll(Takes::Frames(now)));
    assert_eq!(next, None);
}

#[test]
fn acknowledgements_leave_before_the_goodbye() {
    let mut config = small_chunks(3);
    config.ack_delay = Duration::from_millis(900);
    let mut pair = Pair::new(config, 1);
    let sent = pair.send(0, send(1, 100_000, Level::Placed));
    pair.receive(1, receive(1, 100_000, Level::Placed));
    pair.with(1, |session, now| session.close(now, CLOSE));
    pair.run(Duration::from_millis(100));
    // The question came after the close.
    pair.error(0, sent);
    assert_eq!(pair.sides[0].closed, Some(None));
}

#[test]
fn both_sides_may_close_at_once() {
    for seed in 0..20 {
        let mut pair = Pair::new(config(), seed);
        for side in 0..2 {
            pair.with(side, |session, now| session.close(now, CLOSE));
        }
        pair.run(Duration::from_millis(50));
        for side in &pair.sides {
            assert_eq!(side.closed, Some(None));
        }
    }
}

#[test]
fn closing_ends_even_when_nothing_else_does() {
    let mut pair = Pair::new(config(), 1);
    pair.fault_plan.no_unpack = true;
    let sent = pair.send(0, send(1, 100, Level::Placed));
    let got = pair.receive(1, receive(1, 100, Level::Placed));
    pair.run(Duration::from_millis(5));
    pair.with(0, |session, now| session.close(now, CLOSE));
    pair.run(Duration::from_millis(1900));
    assert!(pair.sides[0].closed.is_none());
    pair.run(Duration::from_millis(200));
    let limit = Duration::from_secs(2);
    let failure = ConnectionFailure::CloseTimedOut { limit };
    assert_eq!(pair.sides[0].closed, Some(Some(failure.clone())));
    let cause = pair.error(0, sent).cause;
    let (reason, standing) = lost(&cause);
    assert_eq!((reason, standing.kind.role()), (&failure, Role::Sender));
    assert!(matches!(
        pair.error(1, got).cause,
        EndCause::PeerClosed {
            reason: GoodbyeReason::Shutdown,
            ..
        }
    ));
}

/// Its peer is late, as any program may be.
#[test]
fn closing_takes_as_long_as_it_was_told() {
    let minute = Duration::from_secs(60);
    for limit in [
        Duration::from_micros(1),
        minute,
        minute * 120,
        Duration::MAX,
    ] {
        let mut config = small_chunks(2);
        config.addressed = true;
        let mut pair = Pair::new(config, 1);
        let sent = pair.send(
            0,
            SendRequest {
                deadlines: stall(1000),
                ..send(1, 100_000, Level::Placed)
            },
        );
        pair.run(Duration::from_millis(5));
        pair.with(0, |session, now| session.close(now, limit));
        // Another handle of it has less time, and waits no longer for that.
        pair.with(0, |session, now| session.close(now, Duration::ZERO));
        pair.run(minute - Duration::from_millis(100));
        if limit < minute {
            let failure = ConnectionFailure::CloseTimedOut { limit };
            assert_eq!(pair.sides[0].closed, Some(Some(failure)));
            continue;
        }
        assert_eq!(pair.outcome(0, sent), None);
        let got = pair.receive(1, receive(1, 100_000, Level::Placed));
        pair.run(Duration::from_millis(100));
        assert_eq!(pair.success(0, sent).bytes, 100_000);
        pair.success(1, got);
        for side in &pair.sides {
            assert_eq!(side.closed, Some(None));
        }
    }
}

#[test]
fn a_goodbye_without_answer_ends_too() {
    let mut pair = Pair::new(config(), 1);
    pair.fault_plan.cut = true;
    pair.with(0, |session, now| session.close(now, CLOSE));
    pair.run(Duration::from_secs(3));
    assert!(matches!(
        pair.sides[0].closed,
        Some(Some(ConnectionFailure::CloseTimedOut { .. }))
    ));
}

#[test]
fn an_idle_connection_lives_on_heartbeats() {
    let mut pair = Pair::new(config(), 1);
    pair.run(Duration::from_secs(3600));
    for side in &pair.sides {
        assert!(side.closed.is_none());
        let beats = side
            .frames_in
            .iter()
            .filter(|frame| matches!(frame, Frame::Heartbeat { .. }));
        let beats = beats.count();
        assert!((3500..=3600).contains(&beats), "{beats}");
    }
}

#[test]
fn frames_that_wait_to_leave_do_for_heartbeats() {
    let mut pair = Pair::new(config(), 1);
    pair.run(Duration::from_millis(10));
    let mut now = pair.now;
    let session = &mut pair.sides[0].session;
    session.send(now, send(1, 1 << 20, Level::Placed)).unwrap();
    // The control connection takes nothing for a while.
    for _ in 0..5 {
        now = now + Duration::from_secs(1);
        session.handle_timeout(now);
    }
    let left = |session: &mut Session, now| {
        let frames: Vec<_> = hostile::drain_at(session, now).0;
        let beats = frames
            .iter()
            .filter(|one| matches!(one, Frame::Heartbeat { .. }));
        (frames.len(), beats.count())
    };
    assert_eq!(left(session, now), (1, 0), "the question alone");
    now = now + Duration::from_secs(1);
    session.handle_timeout(now);
    assert_eq!(left(session, now), (1, 1), "it was silent since");
}

#[test]
fn a_silent_peer_is_given_up_even_while_data_flows() {
    let mut pair = Pair::new(small_chunks(1), 1);
    let got = pair.receive(1, receive(1, 1 << 40, Level::Placed));
    let sent = pair.send(0, send(1, 1 << 30, Level::Placed));
    pair.fault_plan.jitter = 2000;
    pair.run(Duration::from_millis(50));
    pair.fault_plan.cut = true;
    pair.run(Duration::from_millis(9900));
    assert!(pair.sides.iter().all(|side| side.closed.is_none()));
    pair.run(Duration::from_millis(300));
    for side in &pair.sides {
        let Some(Some(ConnectionFailure::PeerDead { silent, limit })) = &side.closed else {
            panic!("{:?}", side.closed);
        };
        assert_eq!(*limit, Duration::from_secs(10));
        assert!((*limit..*limit + Duration::from_millis(1)).contains(silent));
    }
    assert_eq!(pair.error(0, sent).delivered, Delivered::Unknown);
    let Delivered::Partial { bytes } = pair.error(1, got).delivered else {
        panic!()
    };
    assert!(bytes > 0);
}

#[test]
fn a_peer_whose_frame_takes_long_lives_while_parts_of_it_come() {
    let mut pair = Pair::new(config(), 1);
    pair.run(Duration::from_millis(10));
    let mut now = pair.now;
    let session = &mut pair.sides[0].session;
    for _ in 0..20 {
        now = now + Duration::from_secs(9);
        session.note_peer_alive(now);
        session.handle_timeout(now);
        assert!(!session.ended());
    }
    now = now + Duration::from_secs(10);
    session.handle_timeout(now);
    assert!(session.ended());
}

#[test]
fn an_impatient_peer_gets_heartbeats_in_time() {
    let mut impatient = config();
    (impatient.ours.heartbeat_ms, impatient.ours.dead_after_ms) = (50, 300);
    let mut pair = Pair::of(config(), impatient, 1);
    pair.run(Duration::from_secs(60));
    assert!(pair.sides.iter().all(|side| side.closed.is_none()));
}
