//! What may wait for transmission.

use super::pair::Pair;
use super::*;

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
