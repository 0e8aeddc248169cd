//! Grants ahead of announcements.

use super::model::Watched;
use super::pair::Pair;
use super::*;
use crate::frame::{CancelReason, Frame, Role};

mod refused;

const BYTES: u64 = 40_000;
const MOMENT: Duration = Duration::from_millis(2);

fn guessing() -> Config {
    let mut config = small_chunks(3);
    config.grants_ahead = true;
    config.hold_until_placed = true;
    config
}

/// Side 0 sends to side 1, whose receives have been guessed rightly so far.
fn streaming() -> Pair {
    streaming_with(guessing())
}

fn streaming_with(config: Config) -> Pair {
    let mut pair = Pair::new(config, 7);
    for _ in 0..4 {
        pair.receive(1, receive(1, BYTES, Level::Placed));
        pair.send(0, send(1, BYTES, Level::Placed));
        pair.settle(Duration::from_secs(1));
    }
    pair.run(MOMENT);
    for side in &mut pair.sides {
        side.frames_in.clear();
    }
    pair
}

/// Names of the frames that arrived at a side since this was asked last, but for heartbeats.
fn arrived(pair: &mut Pair, side: usize) -> Vec<&'static str> {
    let frames = std::mem::take(&mut pair.sides[side].frames_in);
    let names = frames.iter().map(Frame::name);
    names.filter(|name| *name != "heartbeat").collect()
}

fn transfer_of(pair: &Pair, side: usize, operation: OperationId) -> Option<u64> {
    let watched: &Watched = &pair.sides[side].operations[&operation];
    watched.matched.map(|(transfer, _)| transfer.0)
}

#[test]
fn a_transfer_like_those_before_is_not_announced_and_needs_no_answer_to_begin() {
    let mut pair = streaming();
    let receives: Vec<_> = (0..3)
        .map(|_| pair.receive(1, receive(1, BYTES, Level::Placed)))
        .collect();
    pair.run(MOMENT);
    assert_eq!(
        arrived(&mut pair, 0)
            .iter()
            .filter(|name| **name == "grant-ahead")
            .count(),
        3
    );
    let sends: Vec<_> = (0..3)
        .map(|_| pair.send(0, send(1, BYTES, Level::Placed)))
        .collect();
    // The chunks are posted at once.
    assert!(
        sends
            .iter()
            .all(|send| !pair.sides[0].operations[send].held.is_empty())
    );
    pair.settle(Duration::from_secs(1));
    assert_eq!(arrived(&mut pair, 1), [""; 0], "nothing had to be said");
    for (receive, send) in receives.iter().zip(&sends) {
        assert_eq!(pair.success(1, *receive).bytes, BYTES);
        assert_eq!(
            transfer_of(&pair, 1, *receive),
            send.sent_transfer().map(|id| id.0)
        );
    }
    pair.run(MOMENT);
    pair.assert_clean();
}

#[test]
fn where_that_is_wanted_the_first_of_several_transfers_is_announced_and_begins_all_the_same() {
    let mut config = guessing();
    config.announces_granted = true;
    let mut pair = streaming_with(config);
    for _ in 0..3 {
        pair.receive(1, receive(1, BYTES, Level::Placed));
    }
    pair.run(MOMENT);
    arrived(&mut pair, 0);
    let sends: Vec<_> = (0..3)
        .map(|_| pair.send(0, send(1, BYTES, Level::Placed)))
        .collect();
    assert!(!pair.sides[0].operations[&sends[0]].held.is_empty());
    pair.settle(Duration::from_secs(1));
    pair.run(MOMENT);
    assert_eq!(arrived(&mut pair, 1), ["announce"]);
    assert!(!arrived(&mut pair, 0).contains(&"grant"));
    pair.assert_clean();
}

#[test]
fn transfers_that_both_sides_want_verified_are_granted_ahead_and_those_that_one_does_are_not() {
    for (asked, sends, guessed) in [
        (Level::Verified, Level::Verified, true),
        (Level::Placed, Level::Verified, true),
        (Level::Verified, Level::Placed, false),
        (Level::Placed, Level::Sent, true),
    ] {
        let mut pair = Pair::new(guessing(), 7);
        for _ in 0..6 {
            let there = pair.receive(1, receive(1, BYTES, asked));
            pair.run(MOMENT);
            pair.send(0, send(1, BYTES, sends));
            pair.settle(Duration::from_secs(1));
            assert_eq!(
                pair.success(1, there).level,
                asked.max(sends).max(Level::Placed)
            );
        }
        let ahead = arrived(&mut pair, 0).contains(&"grant-ahead");
        assert_eq!(ahead, guessed, "{asked:?} {sends:?}");
    }
}

#[test]
fn nothing_is_guessed_of_receives_that_are_longer_than_what_comes_or_short_or_of_an_eager_stream() {
    for (capacity, bytes, is_eager) in [
        (BYTES, BYTES - 1, false),
        (9000, 9000, false),
        (9000, 9000, true),
    ] {
        let mut pair = Pair::new(guessing(), 7);
        for _ in 0..8 {
            pair.receive(1, receive(1, capacity, Level::Placed));
            let request = match is_eager {
                true => eager(1, bytes as usize, Level::Placed),
                false => send(1, bytes, Level::Placed),
            };
            pair.send(0, request);
            pair.settle(Duration::from_secs(1));
        }
        assert!(
            !arrived(&mut pair, 0).contains(&"grant-ahead"),
            "{capacity} {bytes}"
        );
    }
}

#[test]
fn a_wrong_guess_is_declined_and_every_message_gets_the_receive_that_it_would_have_got() {
    type Message = (u64, u64, bool);
    let usual: Message = (1, BYTES, false);
    // The last one of each row is what nobody guessed: another tag, another length, another way.
    for other in [
        (2, BYTES, false),
        (1, BYTES - 1, false),
        (1, 100, true),
        (1, 0, false),
    ] {
        let mut pair = streaming();
        let other_receive = pair.receive(1, receive(2, BYTES, Level::Placed));
        let receives: Vec<_> = (0..3)
            .map(|_| pair.receive(1, receive(1, BYTES, Level::Placed)))
            .collect();
        pair.run(MOMENT);
        let sends: Vec<_> = [other, usual, usual, usual]
            .into_iter()
            .map(|(tag, bytes, is_eager)| {
                let request = match is_eager {
                    true => eager(tag, bytes as usize, Level::Placed),
                    false => send(tag, bytes, Level::Placed),
                };
                pair.send(0, request)
            })
            .collect();
        pair.run(Duration::from_secs(1));
        // By tag, in the order of the sends.
        let mut due: Vec<_> = receives.iter().rev().copied().collect();
        let mut others = vec![other_receive];
        for (send, tag) in sends.iter().zip([other.0, 1, 1, 1]) {
            let queue = if tag == 1 { &mut due } else { &mut others };
            let Some(receive) = queue.pop() else {
                assert!(
                    pair.outcome(0, *send).is_none(),
                    "there is no receive for it"
                );
                continue;
            };
            let transfer = send.sent_transfer().map(|transfer| transfer.0);
            assert_eq!(transfer_of(&pair, 1, receive), transfer, "{other:?}");
            pair.success(1, receive);
        }
    }
}

#[test]
fn an_announcement_that_crosses_its_grant_ahead_is_granted_by_it() {
    let mut pair = streaming();
    // Both at the same time: neither has heard of the other.
    let receives: Vec<_> = (0..2)
        .map(|_| pair.receive(1, receive(1, BYTES, Level::Placed)))
        .collect();
    for _ in 0..2 {
        pair.send(0, send(1, BYTES, Level::Placed));
    }
    pair.settle(Duration::from_secs(1));
    pair.run(MOMENT);
    assert_eq!(arrived(&mut pair, 1), ["announce"; 2]);
    assert!(!arrived(&mut pair, 0).contains(&"grant"));
    assert!(
        receives
            .iter()
            .all(|receive| pair.success(1, *receive).bytes == BYTES)
    );
    pair.assert_clean();
}

#[test]
fn an_announcement_that_crosses_a_wrong_guess_is_matched_as_ever() {
    let mut pair = streaming();
    let longer = BYTES + 1;
    let first = pair.receive(1, receive(1, BYTES, Level::Placed));
    let second = pair.receive(1, receive(2, longer, Level::Placed));
    pair.send(0, send(2, longer, Level::Placed));
    pair.send(0, send(1, BYTES, Level::Placed));
    pair.settle(Duration::from_secs(1));
    assert_eq!(pair.success(1, first).bytes, BYTES);
    assert_eq!(pair.success(1, second).bytes, longer);
    pair.run(MOMENT);
    assert!(!arrived(&mut pair, 1).contains(&"decline"), "both saw it");
    pair.assert_clean();
}

#[test]
fn a_receive_that_was_granted_ahead_ends_at_once_and_what_was_not_sent_is_not_lost() {
    let mut pair = streaming();
    let [ended, next] = [0, 1].map(|_| pair.receive(1, receive(1, BYTES, Level::Placed)));
    pair.run(MOMENT);
    pair.with(1, |session, now| session.cancel(now, ended));
    pair.run(MOMENT);
    assert_eq!(pair.error(1, ended).delivered, Delivered::None);
    assert!(matches!(pair.error(1, ended).cause, EndCause::Cancelled));
    assert_eq!(arrived(&mut pair, 1), ["decline"]);
    let sent = pair.send(0, send(1, BYTES, Level::Placed));
    pair.settle(Duration::from_secs(1));
    pair.success(0, sent);
    assert_eq!(pair.success(1, next).bytes, BYTES);
    pair.run(MOMENT);
    pair.assert_clean();
}

#[test]
fn a_transfer_that_was_sent_to_a_receive_which_has_just_ended_is_cancelled_and_the_others_go_on() {
    let mut pair = streaming();
    let [ended, next] = [0, 1].map(|_| pair.receive(1, receive(1, BYTES, Level::Placed)));
    pair.run(MOMENT);
    let lost = pair.send(0, send(1, BYTES, Level::Placed));
    let sent = pair.send(0, send(1, BYTES, Level::Placed));
    pair.with(1, |session, now| session.cancel(now, ended));
    pair.settle(Duration::from_secs(1));
    let error = pair.error(0, lost);
    assert!(
        matches!(
            error.cause,
            EndCause::PeerCancelled {
                from: Role::Receiver,
                reason: CancelReason::Requested,
                ..
            }
        ),
        "{error:?}"
    );
    pair.success(0, sent);
    pair.success(1, next);
    pair.run(MOMENT);
    pair.assert_clean();
}

#[test]
fn a_deadline_ends_a_receive_that_was_granted_ahead_as_one_that_waits() {
    let mut pair = streaming();
    let request = ReceiveRequest {
        deadlines: stall(3),
        ..receive(1, BYTES, Level::Placed)
    };
    let waits = pair.receive(1, request);
    pair.run(MOMENT);
    assert!(arrived(&mut pair, 0).contains(&"grant-ahead"));
    pair.run(Duration::from_millis(3000));
    let EndCause::Stalled(report) = pair.error(1, waits).cause else {
        panic!("{:?}", pair.error(1, waits));
    };
    assert_eq!(
        (report.owes, report.transfer, report.bytes_total),
        (Owes::PeerSendMatching, None, BYTES)
    );
    pair.run(MOMENT);
    pair.assert_clean();
}

#[test]
fn a_session_closes_in_order_behind_grants_ahead() {
    for closes in [0, 1] {
        let mut pair = streaming();
        let waits = pair.receive(1, receive(1, BYTES, Level::Placed));
        pair.run(MOMENT);
        pair.with(closes, |session, now| session.close(now));
        pair.run(MOMENT);
        let error = pair.error(1, waits);
        assert_eq!(error.delivered, Delivered::None, "{error:?}");
        for side in &pair.sides {
            assert_eq!(side.closed, Some(None), "side {closes} closes");
        }
    }
}

#[test]
fn guesses_are_made_again_after_wrong_ones_but_ever_later() {
    let mut pair = streaming();
    let mut waits = Vec::new();
    for _ in 0..4 {
        // Guessed, and wrong.
        let guessed = pair.receive(1, receive(1, BYTES, Level::Placed));
        pair.run(MOMENT);
        assert!(arrived(&mut pair, 0).contains(&"grant-ahead"));
        pair.send(0, eager(1, 10, Level::Placed));
        pair.settle(Duration::from_secs(1));
        assert_eq!(pair.success(1, guessed).bytes, 10);
        for count in 1.. {
            pair.receive(1, receive(1, BYTES, Level::Placed));
            pair.run(MOMENT);
            let again = arrived(&mut pair, 0).contains(&"grant-ahead");
            pair.send(0, send(1, BYTES, Level::Placed));
            pair.settle(Duration::from_secs(1));
            if again {
                waits.push(count);
                break;
            }
        }
    }
    assert_eq!(waits, [5, 9, 17, 33]);
}

/// The level of an announcement that was long ago is that of all transfers since.
#[test]
fn transfers_are_not_verified_for_ever_because_some_were() {
    let mut pair = Pair::new(guessing(), 7);
    let mut levels = Vec::new();
    for asked in [
        [Level::Verified; 4],
        [Level::Placed; 4],
        [Level::Placed; 4],
        [Level::Sent; 4],
    ]
    .concat()
    {
        pair.receive(1, receive(1, BYTES, Level::Placed));
        pair.run(MOMENT);
        let sent = pair.send(0, send(1, BYTES, asked));
        pair.settle(Duration::from_secs(1));
        levels.push((asked, pair.success(0, sent).level));
    }
    let dearer = levels.iter().filter(|(asked, got)| got > asked).count();
    assert_eq!(dearer, 0, "{levels:?}");
}

/// Everything else that waits for a data plane to let go is bounded by `cancel_timeout`.
#[test]
fn a_data_plane_that_does_not_let_go_of_a_wrong_guess_is_noticed() {
    let mut config = guessing();
    config.deadlines.stall = Duration::from_secs(1_000_000);
    let mut pair = Pair::new(config, 7);
    for _ in 0..4 {
        pair.receive(1, receive(1, BYTES, Level::Placed));
        pair.send(0, send(1, BYTES, Level::Placed));
        pair.settle(Duration::from_secs(1));
    }
    pair.receive(1, receive(1, BYTES, Level::Placed));
    pair.run(MOMENT);
    pair.weather.no_quiet = true;
    // The guess was wrong; this pair has nothing to do with it.
    let got = pair.receive(1, receive(2, 100, Level::Placed));
    let sent = pair.send(0, send(2, 100, Level::Placed));
    pair.run(Duration::from_secs(1000));
    assert!(
        pair.outcome(1, got).is_some() && pair.outcome(0, sent).is_some(),
        "a quarter of an hour later: {:#?}",
        pair.sides[1].session.snapshot(pair.now)
    );
}

#[test]
fn a_session_that_closes_amid_a_wrong_guess_ends_what_comes_back() {
    let mut pair = streaming();
    pair.weather.quiet = Some(50_000);
    let waits = [0, 1].map(|_| pair.receive(1, receive(1, BYTES, Level::Placed)));
    pair.run(MOMENT);
    pair.send(0, eager(2, 10, Level::Sent));
    while !arrived(&mut pair, 1).contains(&"decline") {
        pair.run(Duration::from_micros(1));
    }
    pair.with(1, |session, now| session.close(now));
    pair.settle(Duration::from_secs(1));
    for waits in waits {
        assert!(matches!(pair.error(1, waits).cause, EndCause::Closed));
    }
    pair.run(Duration::from_secs(1));
    assert!(pair.sides.iter().all(|side| side.closed == Some(None)));
}

#[test]
fn the_announcement_of_what_was_granted_ahead_counts_as_progress() {
    let mut config = guessing();
    config.announces_granted = true;
    let mut pair = streaming_with(config);
    let request = ReceiveRequest {
        deadlines: stall(3),
        ..receive(1, BYTES, Level::Placed)
    };
    let waits = pair.receive(1, request);
    pair.run(Duration::from_millis(2500));
    pair.weather.lose_data = true;
    pair.send(0, send(1, BYTES, Level::Placed));
    pair.run(Duration::from_millis(2500));
    assert!(pair.outcome(1, waits).is_none());
    pair.run(Duration::from_secs(1));
    assert!(matches!(pair.error(1, waits).cause, EndCause::Stalled(_)));
}

#[test]
fn guesses_go_on_after_a_recall_that_crossed_a_wrong_guess() {
    let mut pair = streaming();
    let given_up = pair.receive(1, receive(1, BYTES, Level::Placed));
    pair.send(0, send(2, BYTES, Level::Placed));
    pair.with(1, |session, now| session.cancel(now, given_up));
    let other = pair.receive(1, receive(2, BYTES, Level::Placed));
    pair.settle(Duration::from_secs(1));
    assert_eq!(pair.success(1, other).bytes, BYTES);
    for _ in 0..10 {
        pair.receive(1, receive(1, BYTES, Level::Placed));
        pair.send(0, send(1, BYTES, Level::Placed));
        pair.settle(Duration::from_secs(1));
    }
    arrived(&mut pair, 0);
    pair.receive(1, receive(1, BYTES, Level::Placed));
    pair.run(MOMENT);
    assert!(arrived(&mut pair, 0).contains(&"grant-ahead"));
}
