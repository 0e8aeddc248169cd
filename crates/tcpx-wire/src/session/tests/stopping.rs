//! What follows a deadline or a cancel: both sides stop, or somebody does not.

use super::deadlines::stalled;
use super::pair::Pair;
use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn deadlines_that_pass_at_once_quote_each_other() {
    let mut pair = Pair::new(small_chunks(2), 3);
    pair.weather.no_unpack = true;
    let total = Some(Deadlines {
        stall: SECOND * 20,
        total: Some(SECOND),
    });
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

#[test]
fn a_data_plane_that_does_not_let_go_costs_the_connection() {
    let mut pair = Pair::new(config(), 1);
    (pair.weather.no_unpack, pair.weather.no_quiet) = (true, true);
    let request = ReceiveRequest {
        deadlines: stall(1),
        ..receive(1, 10, Level::Placed)
    };
    let got = pair.receive(1, request);
    let sent = pair.send(0, send(1, 10, Level::Placed));
    pair.settle(SECOND * 8);
    assert_eq!(pair.sides[1].operations[&got].memory, Some(Memory::Held));
    assert_eq!(stalled(&pair.error(1, got)).owes, Owes::LocalUnpack);
    pair.run(SECOND);
    let waited = SECOND * 5;
    assert_eq!(
        pair.sides[1].closed,
        Some(Some(ConnectionFailure::DataPlaneStuck { waited }))
    );
    assert!(matches!(
        &pair.sides[0].closed,
        Some(Some(ConnectionFailure::PeerFailed { .. }))
    ));
    let error = pair.error(0, sent);
    assert!(
        matches!(error.cause, EndCause::PeerCancelled { .. }),
        "{error}"
    );
    assert_eq!(error.delivered, Delivered::Unknown);
}

#[test]
fn a_peer_that_does_not_answer_a_cancel_holds_nobody_up() {
    let mut pair = Pair::new(small_chunks(2), 1);
    pair.weather.no_unpack = true;
    let sent = pair.send(0, send(1, 9000, Level::Placed));
    pair.receive(1, receive(1, 9000, Level::Placed));
    pair.run(Duration::from_millis(10));
    pair.weather.cut = true;
    pair.with(0, |session, now| session.cancel(now, sent));
    pair.run(Duration::from_millis(4900));
    assert_eq!(pair.outcome(0, sent), None);
    pair.run(Duration::from_millis(200));
    let error = pair.error(0, sent);
    assert_eq!(
        (error.cause, error.delivered),
        (EndCause::Cancelled, Delivered::Unknown)
    );
    assert_eq!(
        pair.sides[0].operations[&sent].memory,
        Some(Memory::Released)
    );
}
