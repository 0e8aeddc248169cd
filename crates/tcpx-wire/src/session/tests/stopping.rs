//! What follows a deadline or a cancel: both sides stop, or somebody does not.

use proptest::prelude::*;

use super::one_sided::{get, place, put, secret};
use super::pair::Pair;
use super::*;
use crate::window::Rights;

const SECOND: Duration = Duration::from_secs(1);
/// More than an operation takes to end behind its deadline.
const SOON: Duration = Duration::from_millis(100);

fn total(seconds: u64) -> Option<Deadlines> {
    Some(Deadlines {
        stall: SECOND * 20,
        total: Some(SECOND * seconds as u32),
    })
}

#[test]
fn deadlines_that_pass_at_once_quote_each_other() {
    let mut pair = Pair::new(small_chunks(2), 3);
    pair.fault_plan.no_unpack = true;
    let total = total(1);
    let sent = pair.send(
        0,
        SendRequest {
            deadlines: total,
            ..send(1, 9000, Level::Placed)
        },
    );
    let got = pair.receive(
        1,
        ReceiveRequest {
            deadlines: total,
            ..receive(1, 9000, Level::Placed)
        },
    );
    pair.settle(SECOND * 2);
    let EndCause::DeadlinePassed(ours) = pair.error(0, sent).cause else {
        panic!()
    };
    let EndCause::DeadlinePassed(theirs) = pair.error(1, got).cause else {
        panic!()
    };
    assert_eq!(
        (ours.owes, theirs.owes),
        (Owes::PeerAcknowledge, Owes::LocalUnpack)
    );
    let said = ours.peer.expect("the receiver says what it must do");
    assert!(said.contains("this side must unpack"), "{said}");
    pair.run(SECOND);
    pair.assert_clean();
}

/// A receive of `side` 1 whose payload is being copied, for as long as the data plane likes, and
/// its send.
fn copied_slowly(config: Config, limit: Option<Deadlines>) -> (Pair, OperationId, OperationId) {
    let mut pair = Pair::new(config, 1);
    (pair.fault_plan.no_unpack, pair.fault_plan.no_quiet) = (true, true);
    let got = pair.receive(
        1,
        ReceiveRequest {
            deadlines: limit,
            ..receive(1, 9000, Level::Placed)
        },
    );
    let sent = pair.send(0, send(1, 9000, Level::Placed));
    (pair, got, sent)
}

#[test]
fn what_the_data_plane_keeps_is_held_and_costs_nobody_else() {
    for cancels in [false, true] {
        let limit = total(1).filter(|_| !cancels);
        let (mut pair, got, sent) = copied_slowly(small_chunks(2), limit);
        pair.run(SECOND);
        if cancels {
            pair.with(1, |session, now| session.cancel(now, got));
        }
        pair.run(SOON);
        assert_eq!(pair.sides[1].operations[&got].memory, Some(Memory::Held));
        let error = pair.error(1, got);
        match error.cause {
            EndCause::Cancelled => assert!(cancels),
            EndCause::DeadlinePassed(_) => assert!(!cancels),
            other => panic!("{other}"),
        }
        pair.settle(SECOND * 5);
        let error = pair.error(0, sent);
        assert!(
            matches!(error.cause, EndCause::PeerCancelled { .. }),
            "{error}"
        );
        pair.fault_plan.no_unpack = false;
        let others = [
            pair.send(0, send(2, 9000, Level::Placed)),
            pair.receive(1, receive(2, 9000, Level::Placed)),
        ];
        pair.run(SECOND);
        for (side, other) in others.into_iter().enumerate() {
            pair.success(side, other);
        }
        pair.with(1, |session, now| session.data_quiet(now, got));
        pair.run(SECOND);
        assert!(pair.sides.iter().all(|side| side.closed.is_none()));
        assert!(
            (0..2).all(|side| pair.sides[side].session.snapshot(pair.now).is_empty()),
            "both have forgotten them"
        );
    }
}

#[test]
fn what_the_peer_cancels_is_held_as_soon() {
    let (mut pair, got, sent) = copied_slowly(small_chunks(2), None);
    pair.run(SECOND);
    pair.with(0, |session, now| session.cancel(now, sent));
    pair.run(SOON);
    assert_eq!(pair.sides[1].operations[&got].memory, Some(Memory::Held));
    let error = pair.error(1, got);
    let is_told = matches!(error.cause, EndCause::PeerCancelled { .. });
    assert!(is_told, "{error}");
}

#[test]
fn an_ordered_network_that_does_not_let_go_is_lost() {
    let mut config = small_chunks(2);
    config.cancellable = false;
    let (mut pair, got, sent) = copied_slowly(config, total(1));
    pair.settle(SECOND * 8);
    assert_eq!(pair.sides[1].operations[&got].memory, Some(Memory::Held));
    pair.run(SECOND);
    let closed = &pair.sides[1].closed;
    let Some(Some(ConnectionFailure::DataPlaneStuck { waited })) = closed else {
        panic!("{closed:?}");
    };
    assert!(*waited <= SOON, "{waited:?}");
    assert!(matches!(&pair.sides[0].closed, Some(Some(_))));
    assert_eq!(pair.error(0, sent).delivered, Delivered::Unknown);
}

/// Whatever it was, and however far.
#[test]
fn a_peer_that_does_not_answer_holds_nobody_up() {
    for (addressed, cancels) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut config = small_chunks(2);
        (config.addressed, config.hold_until_placed) = (addressed, addressed);
        let mut pair = Pair::new(config, 1);
        pair.fault_plan.no_unpack = true;
        pair.receive(1, receive(1, 9000, Level::Placed));
        pair.run(Duration::from_millis(10));
        let limit = total(1).filter(|_| !cancels);
        let wants = |request| SendRequest {
            deadlines: limit,
            ..request
        };
        let start = pair.now;
        let mut begun = vec![
            pair.send(0, wants(send(1, 9000, Level::Placed))),
            pair.send(0, wants(eager(2, 100, Level::Placed))),
            pair.send(0, wants(eager(2, 100, Level::Verified))),
            pair.send(0, wants(send(3, 9000, Level::Placed))),
            pair.send(0, wants(send(4, 0, Level::Placed))),
        ];
        pair.run(Duration::from_millis(10));
        pair.fault_plan.cut = true;
        begun.push(pair.send(0, wants(eager(5, 100, Level::Placed))));
        begun.push(pair.send(0, wants(send(6, 9000, Level::Placed))));
        let ends = match cancels {
            true => {
                let all = begun.clone();
                pair.with(0, move |session, now| {
                    all.into_iter().for_each(|one| session.cancel(now, one));
                });
                pair.now
            }
            false => start + SECOND,
        };
        pair.run(ends.saturating_since(pair.now) + SOON);
        for (index, one) in begun.into_iter().enumerate() {
            let error = pair.error(0, one);
            match error.cause {
                EndCause::Cancelled => assert!(cancels),
                EndCause::DeadlinePassed(_) => assert!(!cancels),
                other => panic!("{index}: {other}"),
            }
            let delivered = match index {
                0 | 1 | 2 | 4 => Delivered::Unknown,
                _ => error.delivered,
            };
            assert_eq!(error.delivered, delivered, "{index}");
            let memory = pair.sides[0].operations[&one].memory;
            assert_eq!(memory, Some(Memory::Released), "{index}");
        }
        assert!(!pair.sides[0].session.ended());
    }
}

/// Who put or got stalls, and says nothing more of it.
#[test]
fn an_owner_ends_by_its_deadline_what_a_stopped_peer_began() {
    let by_stall = Some(Deadlines {
        stall: SECOND,
        total: None,
    });
    for (gets, deadlines) in [false, true]
        .into_iter()
        .zip([total(1), by_stall].repeat(2))
    {
        let mut pair = Pair::new(small_chunks(2), 3);
        let rights = Rights::GetAndPut;
        let window = pair.sides[1].session.expose(secret(7), 1 << 20, rights);
        pair.fault_plan.lose_data = true;
        if gets {
            let request = get(300_000, Level::Placed, place(window, 0));
            let request = GetRequest {
                deadlines,
                ..request
            };
            pair.get(0, request);
        } else {
            let request = put(300_000, Level::Placed, place(window, 0));
            let request = SendRequest {
                deadlines,
                ..request
            };
            pair.send(0, request);
        }
        pair.run(SOON);
        let running = |pair: &Pair| {
            let states = pair.sides[1].session.snapshot(pair.now);
            states.iter().filter(|state| !state.completed).count()
        };
        assert_eq!(running(&pair), 1);
        pair.fault_plan.stopped[0] = pair.now + SECOND * 60;
        pair.run(SECOND + SOON);
        assert_eq!(running(&pair), 0, "gets: {gets}, {deadlines:?}");
    }
}

/// Two hundred of each kind at once, whatever each side takes at a time, and the peer stops
/// somewhere amid them.
fn all_end_although_the_peer_stops(config: &Config, after: Duration, seed: u64) {
    const BYTES: u64 = 20_000;
    let mut pair = Pair::new(config.clone(), seed);
    let rights = Rights::GetAndPut;
    let window = pair.sides[1].session.expose(secret(7), 1 << 20, rights);
    let (deadlines, begun) = (total(1), pair.now);
    for _ in 0..200 {
        let at = place(window, 0);
        let mut sends = vec![send(1, BYTES, Level::Placed), put(BYTES, Level::Placed, at)];
        if pair.sides[0].session.eager_allowed(100) {
            sends.push(eager(2, 100, Level::Placed));
        }
        for request in sends {
            let request = SendRequest {
                deadlines,
                ..request
            };
            pair.send(0, request);
        }
        let request = get(BYTES, Level::Placed, at);
        pair.get(
            0,
            GetRequest {
                deadlines,
                ..request
            },
        );
        let request = receive(3, BYTES, Level::Placed);
        pair.receive(
            0,
            ReceiveRequest {
                deadlines,
                ..request
            },
        );
    }
    pair.run(after);
    pair.fault_plan.stopped[1] = begun + SECOND * 5;
    // The data plane of this side takes its time too.
    let quiet = Duration::from_micros(pair.fault_plan.jitter);
    pair.run((begun + SECOND + SOON + quiet).saturating_since(pair.now));
    for (operation, watched) in &pair.sides[0].operations {
        assert!(watched.outcome.is_some(), "{operation:?} {watched:?}");
    }
    pair.run(SECOND * 20);
    assert!(pair.sides.iter().all(|side| side.closed.is_none()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_thousand_of_all_kinds_end_although_the_peer_stops(
        limits in any_limits(1),
        after in 0u64..1_000_000,
        backlog in 0u64..20,
        seed in any::<u64>(),
    ) {
        let mut config = limited(&small_chunks(2), limits);
        (config.addressed, config.bounds.backlog) = (true, backlog);
        config.ours.dead_after_ms = 100_000;
        all_end_although_the_peer_stops(&config, Duration::from_micros(after), seed);
    }
}
