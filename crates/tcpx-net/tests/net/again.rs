//! Another control connection for a session, over whichever of its ways works.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Instant;

use tcpx_net::{Auth, Congestion, DialOptions, NetworkError, Way, dial, dial_control_again};

use crate::support::*;

fn way(peer: SocketAddr) -> Way {
    Way {
        local: None,
        interface: None,
        peer,
    }
}

/// An address that refuses connections.
fn nobody() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 1))
}

#[test]
fn a_way_that_fails_leaves_it_to_the_next_and_the_server_takes_one_connection() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth.clone());
    let address = listener.local_addr();
    let dialled = dial(address, &auth, &DialOptions::until(deadline())).unwrap();
    let accepted = listener.accept(deadline()).unwrap();
    let dial_over = |ways: &[Way]| {
        let automatic = Congestion::Automatic;
        dial_control_again(ways, &dialled.session, &automatic)
    };
    let mut ours = dial_over(&[way(nobody()), way(address), way(address)]).unwrap();
    let start = Instant::now();
    let mut theirs = loop {
        if let Some(stream) = accepted.lanes.take_control() {
            break stream;
        }
        assert!(start.elapsed() < PATIENCE, "the server took none");
        thread::yield_now();
    };
    // The one that the client was given, and no other that came after it.
    ours.set_nonblocking(false).unwrap();
    ours.write_all(b"where we were").unwrap();
    theirs.set_nonblocking(false).unwrap();
    theirs.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = [0; 13];
    theirs.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"where we were");
    assert!(accepted.lanes.take_control().is_none());
}

#[test]
fn without_a_way_that_works_the_error_is_that_of_the_last() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth.clone());
    let dialled = dial(
        listener.local_addr(),
        &auth,
        &DialOptions::until(deadline()),
    )
    .unwrap();
    let dial_over = |ways: &[Way]| {
        let automatic = Congestion::Automatic;
        dial_control_again(ways, &dialled.session, &automatic).unwrap_err()
    };
    let refused = dial_over(&[way(nobody())]);
    assert_eq!(refused, NetworkError::Refused { peer: nobody() });
    let none = dial_over(&[]);
    assert!(matches!(none, NetworkError::Control { .. }), "{none:?}");
}

#[test]
fn a_way_whose_other_end_says_nothing_does_not_hold_the_caller() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth.clone());
    let dialled = dial(
        listener.local_addr(),
        &auth,
        &DialOptions::until(deadline()),
    )
    .unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let ways = [way(silent.local_addr().unwrap())];
    let start = Instant::now();
    dial_control_again(&ways, &dialled.session, &Congestion::Automatic).unwrap_err();
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
}
