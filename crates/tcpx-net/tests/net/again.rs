//! Another control connection for a session, over whichever of its ways works.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use tcpx_net::{
    Auth, Congestion, DialOptions, Dialled, Listener, NetworkError, SocketError, Way,
    begin_control, dial, dial_first,
};

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

/// A client's first connection to the listener.
fn dialled(listener: &Listener, auth: &Auth) -> Dialled {
    dial(listener.local_addr(), auth, &DialOptions::until(deadline())).unwrap()
}

/// Another one for its session.
fn dial_over(dialled: &Dialled, ways: &[Way]) -> Result<TcpStream, Vec<SocketError>> {
    let (session, now) = (&dialled.session, Instant::now());
    let again = begin_control(ways.to_vec(), session, &Congestion::Automatic, now).run()?;
    let (stream, ..) = again.join().map_err(|error| vec![error])?;
    Ok(stream)
}

#[test]
fn a_failed_way_leaves_it_to_the_next() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth.clone());
    let address = listener.local_addr();
    let dialled = dialled(&listener, &auth);
    let accepted = listener.accept(deadline()).unwrap();
    let mut ours = dial_over(&dialled, &[way(nobody()), way(address), way(address)]).unwrap();
    let start = Instant::now();
    let mut theirs = loop {
        if let Some(stream) = accepted.lanes.take_control() {
            break stream.stream;
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
    let dialled = dialled(&listener, &auth);
    let refused = dial_over(&dialled, &[way(nobody())]).unwrap_err();
    assert_eq!(refused, [SocketError::Refused { peer: nobody() }]);
    assert_eq!(dial_over(&dialled, &[]).unwrap_err(), []);
}

#[test]
fn a_way_whose_other_end_says_nothing_does_not_hold_the_caller() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth.clone());
    let dialled = dialled(&listener, &auth);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let ways = [way(silent.local_addr().unwrap())];
    let start = Instant::now();
    dial_over(&dialled, &ways).unwrap_err();
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
}

/// More than one after the other could be given up in time.
#[test]
fn silent_addresses_do_not_hold_up_one_that_answers() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth.clone());
    let silent: Vec<_> = (0..5)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let mut addresses: Vec<_> = silent.iter().map(|one| one.local_addr().unwrap()).collect();
    addresses.extend([nobody(), listener.local_addr()]);
    let start = Instant::now();
    let options = DialOptions::until(start + 10 * PATIENCE);
    let dialled = dial_first(&addresses, &auth, &options).unwrap();
    assert_eq!(dialled.peer, listener.local_addr());
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
}

#[test]
fn a_wrong_key_is_named_before_silent_addresses() {
    let listener = listener(Auth::Key(key(1)));
    let addresses = [nobody(), listener.local_addr(), nobody()];
    let options = DialOptions::until(deadline());
    let error = dial_first(&addresses, &Auth::Key(key(2)), &options).unwrap_err();
    assert!(
        matches!(error, NetworkError::Socket(SocketError::Handshake { peer, .. }) if peer == listener.local_addr()),
        "{error:?}"
    );
    let none = dial_first(&[], &Auth::Key(key(1)), &options).unwrap_err();
    assert!(matches!(none, NetworkError::Control { .. }), "{none:?}");
}
