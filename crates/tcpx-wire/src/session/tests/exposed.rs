//! Payload that the receiver reads where it lies.

use super::hostile::{drain, error, session, to_receive};
use super::pair::Pair;
use super::*;
use crate::frame::{CancelReason, Frame, TransferId};

const BYTES: u32 = 64 << 10;

fn frame(transfer: u64, bytes: u32) -> Frame {
    let (entry, mark) = (1, transfer);
    Frame::Exposed {
        transfer: TransferId(transfer),
        level: Level::Placed,
        to: to_receive(transfer),
        at: Exposure { entry, mark, bytes },
    }
}

fn delivered(session: &mut Session) -> Option<(OperationId, Exposure)> {
    let (_, actions) = drain(session);
    actions.into_iter().find_map(|action| match action {
        Action::DeliverEager {
            operation,
            payload: Eager::Exposed(at),
        } => Some((operation, at)),
        _ => None,
    })
}

#[test]
fn a_message_is_placed_whoever_comes_first() {
    for receive_first in [true, false] {
        let mut pair = Pair::new(config(), 3);
        let bytes = u64::from(BYTES);
        let send = |pair: &mut Pair| pair.send(0, exposed(1, BYTES, Level::Placed));
        let receive = |pair: &mut Pair| pair.receive(1, receive(1, bytes, Level::Placed));
        let (sent, got) = match receive_first {
            true => {
                let got = receive(&mut pair);
                pair.run(Duration::from_millis(10));
                (send(&mut pair), got)
            }
            false => {
                let sent = send(&mut pair);
                pair.run(Duration::from_millis(10));
                (sent, receive(&mut pair))
            }
        };
        pair.settle(Duration::from_secs(1));
        for (side, operation) in [(0, sent), (1, got)] {
            let done = pair.success(side, operation);
            assert_eq!((done.bytes, done.level), (bytes, Level::Placed));
        }
        assert!(pair.sides[1].operations[&got].copied.is_some());
        pair.assert_clean();
    }
}

/// Its source is its program's again before anybody has read it, or nobody has hashed what is read.
#[test]
fn sends_that_end_sooner_or_are_compared_are_announced() {
    for level in [Level::Sent, Level::Verified] {
        let mut pair = Pair::new(config(), 4);
        let got = pair.receive(1, receive(1, BYTES.into(), Level::Placed));
        let sent = pair.send(0, exposed(1, BYTES, level));
        pair.settle(Duration::from_secs(1));
        assert_eq!(pair.success(0, sent).level, level);
        assert!(pair.sides[1].operations[&got].copied.is_none());
    }
}

#[test]
fn what_is_exposed_no_more_ends_as_its_sender_says() {
    for matched in [true, false] {
        let mut session = session(config());
        session.frame(Time(0), frame(0, BYTES)).unwrap();
        let take = |session: &mut Session| {
            let request = receive(1, BYTES.into(), Level::Placed);
            session.receive(Time(0), request).unwrap()
        };
        let got = matched.then(|| take(&mut session));
        // It finds nothing there, and says nothing.
        assert_eq!(delivered(&mut session).is_some(), matched);
        let cancel = Frame::Cancel {
            transfer: TransferId(0),
            from: Role::Sender,
            reason: CancelReason::DeadlineExpired,
            detail: "late".into(),
        };
        session.frame(Time(0), cancel).unwrap();
        let (_, actions) = drain(&mut session);
        let Some(got) = got else {
            // Another one meets the next receive.
            take(&mut session);
            assert_eq!(delivered(&mut session), None);
            session.frame(Time(0), frame(1, BYTES)).unwrap();
            assert!(delivered(&mut session).is_some());
            continue;
        };
        let stops =
            |action: &Action| matches!(action, Action::StopData { operation } if *operation == got);
        assert!(actions.iter().any(stops), "{actions:?}");
        session.data_quiet(Time(0), got);
        let (_, actions) = drain(&mut session);
        let ends = |action: &Action| matches!(action, Action::Complete { operation, outcome: Err(_), .. } if *operation == got);
        assert!(actions.iter().any(ends), "{actions:?}");
    }
}

#[test]
fn what_lies_elsewhere_takes_as_much_credit_as_its_place() {
    let mut session = session(config());
    let credit = settings().eager_credit;
    let many = u64::from(credit) / config::eager_cost(0, 0);
    for transfer in 0..many {
        session.frame(Time(0), frame(transfer, BYTES)).unwrap();
    }
    assert_eq!(session.eager_held, u64::from(credit));
    let found = error(&mut session, [frame(many, BYTES)]);
    assert!(found.to_string().contains("credit"), "{found}");
}

#[test]
fn a_message_longer_than_one_copy_is_refused() {
    let most = MAX_EXPOSED_BYTES as u32;
    session(config()).frame(Time(0), frame(0, most)).unwrap();
    let found = error(&mut session(config()), [frame(0, most + 1)]);
    assert!(found.to_string().contains("bytes"), "{found}");
    let mut pair = Pair::new(config(), 5);
    assert!(!pair.sides[0].session.exposed_allowed(MAX_EXPOSED_BYTES + 1));
    let got = pair.receive(1, receive(1, 2 * MAX_EXPOSED_BYTES, Level::Placed));
    pair.send(0, exposed(1, most + 1, Level::Placed));
    pair.settle(Duration::from_secs(1));
    assert!(pair.sides[1].operations[&got].copied.is_none());
}
