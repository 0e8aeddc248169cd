//! What may wait for transmission.

use super::hostile::{drain_at, session};
use super::pair::Pair;
use super::*;
use crate::frame::{Frame, PlacedChunks, TransferId};

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
    pair.weather.holds = true;
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

/// A chunk of a send was sent, or acknowledged: whether hearing of the first at once matters.
#[test]
fn that_a_chunk_was_sent_matters_only_where_nothing_else_tells_of_its_end() {
    let held = || Config {
        hold_until_placed: true,
        ..config()
    };
    let now = Time(0);
    let granted = |config: Config, level| {
        let mut session = session(config);
        let id = session.send(now, send(1, 300_000, level)).unwrap();
        drain_at(&mut session, now);
        let grant = Frame::Grant {
            transfer: TransferId(0),
            grant: Grant {
                level: level.max(Level::Placed),
                ..placing(512 * 1024, 0)
            },
        };
        session.frame(now, grant).unwrap();
        drain_at(&mut session, now);
        (session, id)
    };
    let placed = || Frame::Placed {
        transfer: TransferId(0),
        chunks: PlacedChunks::single(0),
    };
    // The acknowledgement tells of its end.
    let (mut session, id) = granted(held(), Level::Placed);
    assert!(!session.waits_for_sent());
    session.chunk_sent(now, id, 0);
    assert!(!session.waits_for_sent());
    // It came first.
    let (mut session, id) = granted(held(), Level::Placed);
    session.frame(now, placed()).unwrap();
    assert!(session.waits_for_sent());
    session.chunk_sent(now, id, 0);
    assert!(!session.waits_for_sent());
    // The send ends with it; then the peer's part is left.
    let (mut session, id) = granted(held(), Level::Sent);
    assert!(session.waits_for_sent());
    session.chunk_sent(now, id, 0);
    assert!(!session.waits_for_sent());
    // It is to end early.
    let (mut session, id) = granted(held(), Level::Placed);
    session.cancel(now, id);
    assert!(session.waits_for_sent());
    // The window moves on with it.
    assert!(granted(config(), Level::Placed).0.waits_for_sent());
}

/// A send whose window is full of chunks that are all placed, and of which one was not reported sent.
fn stuck(window: u16) -> (Session, usize) {
    let mut config = small_chunks(1);
    config.ours.send_window = window;
    config.hold_until_placed = true;
    let mut session = session(config);
    let now = Time(0);
    let bytes = u64::from(window) * 4096;
    session.send(now, send(1, bytes, Level::Placed)).unwrap();
    session.send(now, send(1, 4096, Level::Placed)).unwrap();
    drain_at(&mut session, now);
    for (transfer, first) in [(TransferId(0), 0), (TransferId(1), window.into())] {
        let grant = placing(4096, first);
        session
            .frame(now, Frame::Grant { transfer, grant })
            .unwrap();
    }
    drain_at(&mut session, now);
    for index in 0..u32::from(window) {
        let (transfer, chunks) = (TransferId(0), PlacedChunks::single(index));
        session
            .frame(now, Frame::Placed { transfer, chunks })
            .unwrap();
    }
    let posted = drain_at(&mut session, now).1;
    let posted = posted
        .iter()
        .filter(|action| matches!(action, Action::PostSend { .. }));
    let posted = posted.count();
    (session, posted)
}

/// Nothing is under way and nothing can be posted: only the Sent event of the first chunk goes on from here.
#[test]
fn a_window_that_only_a_sent_event_can_open_waits_for_it() {
    for window in [1, 4] {
        let (session, posted) = stuck(window);
        assert_eq!(posted, 0);
        assert!(
            session.waits_for_sent(),
            "window {window}: nobody is woken for the event that opens it"
        );
    }
}
