//! What may wait for transmission.

use super::hostile::{drain_at, session};
use super::pair::Pair;
use super::*;
use crate::frame::{Frame, TransferId};

#[test]
fn only_eager_payloads_and_their_acknowledgements_bear_waiting() {
    let mut pair = Pair::new(config(), 5);
    assert_eq!(pair.sides[0].session.waiting(), Waiting::default());
    let now = pair.now;
    let session = &mut pair.sides[0].session;
    session.send(now, eager(1, 100, Level::Placed)).unwrap();
    session.send(now, eager(1, 50, Level::Sent)).unwrap();
    let waiting = Waiting {
        eager: 2,
        eager_bytes: 150,
        ..Waiting::default()
    };
    assert_eq!((session.waiting(), session.sends_under_way()), (waiting, 2));
    session.send(now, send(1, 1 << 20, Level::Placed)).unwrap();
    assert!(session.waiting().urgent);
}

#[test]
fn acknowledgements_that_wait_are_counted() {
    let mut pair = Pair::new(config(), 6);
    for _ in 0..3 {
        pair.receive(1, receive(1, 100, Level::Placed));
        pair.send(0, eager(1, 100, Level::Placed));
    }
    pair.fault_plan.holds = true;
    let mut most = 0;
    for _ in 0..1000 {
        pair.run(Duration::from_micros(1));
        let waiting = pair.sides[1].session.waiting();
        assert!(!waiting.urgent);
        most = most.max(waiting.acknowledgements);
    }
    assert!((1..=3).contains(&most), "{most}");
    pair.settle(Duration::from_secs(1));
    assert_eq!(pair.sides[0].session.sends_under_way(), 0);
}

/// Its copy to a GPU takes longest, and runs while the rest is done.
#[test]
fn a_message_is_delivered_before_a_send_that_ended_earlier() {
    let (mut session, now) = (session(config()), Time(0));
    let sent = session.send(now, eager(1, 8, Level::Placed)).unwrap();
    let receive = receive(1, 8, Level::Placed);
    let received = session.receive(now, receive).unwrap();
    drain_at(&mut session, now);
    let transfer = TransferId(0);
    session.frame(now, Frame::EagerDone { transfer }).unwrap();
    let message = Frame::Eager {
        transfer,
        level: Level::Placed,
        to: Destination::Receive {
            tag: Tag(1),
            number: 0,
        },
        payload: vec![7; 8].into(),
    };
    session.frame(now, message).unwrap();
    let (_, actions) = drain_at(&mut session, now);
    let named = actions.iter().filter_map(|action| match action {
        Action::DeliverEager { operation, .. } => Some((*operation, "delivered")),
        Action::Complete { operation, .. } => Some((*operation, "ended")),
        _ => None,
    });
    let named: Vec<_> = named.collect();
    assert_eq!(named, [(received, "delivered"), (sent, "ended")]);
}
