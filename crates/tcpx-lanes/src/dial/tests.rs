use std::net::{Ipv4Addr, TcpListener};

use tcpx_wire::handshake::ClientHandshake;

use super::*;
use crate::protocols;

type Any = Dial<Welcomed>;

fn dial(ways: Vec<Way>, until: Instant, patience: Patience) -> Any {
    Dial::new(ways, DialOptions::until(until), patience, |entropy| {
        let (client, hello) = ClientHandshake::new(None, protocols::own_build(), entropy);
        Ok((Welcomed(client), hello))
    })
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

/// From an address that this host does not have, which is for documents.
fn nowhere(peer: SocketAddr) -> Way {
    Way {
        local: Some(Ipv4Addr::new(192, 0, 2, 7).into()),
        ..Way::to(peer)
    }
}

/// Polls by a clock of the test's, in steps; after which time it gave up, if it did before `until`.
fn gives_up(
    dial: &mut Any,
    start: Instant,
    until: Duration,
    mut step: impl FnMut(&Any) -> Duration,
) -> Option<Duration> {
    let mut now = start;
    while now < start + until {
        match dial.poll(now) {
            Ok(None) => now += step(dial),
            Ok(Some(_)) => panic!("nobody answers"),
            Err(_) => return Some(now - start),
        }
    }
    None
}

#[test]
fn only_a_peer_that_hangs_up_again_is_given_up() {
    for (takes, gives_way) in [(Duration::from_millis(50), true), (SILENT_TIME * 2, false)] {
        let (listener, peer) = listener();
        let start = Instant::now();
        let mut dial = dial(
            vec![Way::to(peer)],
            start + 60 * CROWDED,
            Patience::default(),
        );
        let mut taken = 0;
        let given_up = gives_up(&mut dial, start, 5 * CROWDED, |dial| {
            if dial.under_way.is_empty() {
                return LONGEST_PAUSE;
            }
            if dial.under_way.iter().any(Client::is_open) && taken == 0 {
                taken = 1;
                drop(listener.accept().unwrap());
                return takes;
            }
            taken = 0;
            Duration::from_millis(1)
        });
        assert_eq!(given_up.is_some(), gives_way, "{given_up:?}");
        assert!(
            given_up.is_none_or(|after| after < 2 * CROWDED),
            "{given_up:?}"
        );
    }
}

#[test]
fn an_unreachable_peer_is_dialled_until_its_limit() {
    let peer = listener().1;
    for minutes in [0, 1, 60] {
        let start = Instant::now();
        let patience = Patience {
            unreachable: Duration::from_secs(60 * minutes),
            ..Patience::default()
        };
        let mut dial = dial(
            vec![nowhere(peer)],
            start + Duration::from_secs(7200),
            patience,
        );
        let after = gives_up(&mut dial, start, Duration::from_secs(7200), |_| {
            LONGEST_PAUSE
        });
        let after = after.expect("it gives up").as_secs_f64();
        assert!((after - 60.0 * minutes as f64).abs() < 2.0, "{after}");
    }
}

#[test]
fn of_a_peer_that_was_unreachable_the_last_way_is_tried_again() {
    let peer = listener().1;
    let start = Instant::now();
    let patience = Patience {
        unreachable: Duration::from_secs(60),
        ..Patience::default()
    };
    let ways = vec![nowhere(peer); 3];
    let mut dial = dial(ways, start + Duration::from_secs(60), patience);
    assert!(dial.poll(Instant::now()).unwrap().is_none());
    assert_eq!(dial.next.0, 2);
}

#[test]
fn a_way_that_fails_is_followed_by_the_next_at_once() {
    let (listener, peer) = listener();
    let start = Instant::now();
    let patience = Patience {
        head_start: Duration::from_secs(3600),
        ..Patience::default()
    };
    let ways = vec![nowhere(peer), Way::to(peer)];
    let mut dial = dial(ways, start + Duration::from_secs(60), patience);
    assert!(dial.poll(Instant::now()).unwrap().is_none());
    assert_eq!(dial.under_way[0].way, Way::to(peer));
    drop(listener);
}

#[test]
fn a_way_that_is_open_keeps_the_next_waiting_where_it_opens() {
    let (_listener, peer) = listener();
    for opens in [false, true] {
        let start = Instant::now();
        let patience = Patience {
            opens,
            ..Patience::default()
        };
        let ways = vec![Way::to(peer); 2];
        let mut dial = dial(ways, start + Duration::from_secs(60), patience);
        let until = start + Duration::from_secs(20);
        assert!(dial.poll(Instant::now()).unwrap().is_none());
        while !dial.under_way.iter().any(Client::is_open) {
            // The first way alone.
            dial.next.1 = until;
            assert!(Instant::now() < until && dial.poll(Instant::now()).unwrap().is_none());
        }
        dial.next.1 = start;
        assert!(dial.poll(Instant::now()).unwrap().is_none());
        assert_eq!(dial.under_way.len(), if opens { 1 } else { 2 });
    }
}
