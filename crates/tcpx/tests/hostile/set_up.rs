//! A side that gives the set-up up says why, and the other one neither waits longer nor has to
//! guess.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{Auth, Endpoint, Error, Options, Refusals, TcpNetwork};
use tcpx_net::dial::dial_lane;
use tcpx_net::{
    Channel, DialOptions, Exchange, Features, Network, NetworkError, Setup, SocketError,
};
use tcpx_wire::frame::{Frame, FrameDecoder, GoodbyeReason};

use crate::peer::Peer;
use crate::{LONG, key, local};

/// Far beyond what any of these tests takes: whoever waits for it has not heard the peer.
const NEVER: Duration = Duration::from_secs(600);

fn options(auth: &Auth) -> Options {
    let mut options = Options::tcp(auth.clone());
    options.connect_timeout = NEVER;
    let mut drawn = [0; 2];
    getrandom::fill(&mut drawn).expect("randomness");
    let [frames, pending] = drawn.map(|one| usize::from(one % 4));
    options.bounds.frames = [1, 1, 2, 16][frames];
    options.bounds.pending = [2, 2, 3, 32][pending];
    options
}

/// The embedded network on a host that has none of the interfaces that its user allows.
#[derive(Debug, Default)]
struct Nowhere(TcpNetwork);

impl Nowhere {
    fn error() -> NetworkError {
        NetworkError::Socket(SocketError::NoInterface {
            filter: "=none-such".to_owned(),
            found: "nothing but lo".to_owned(),
        })
    }
}

impl Network for Nowhere {
    fn features(&self, asked: u16) -> Features {
        Features {
            is_addressed: false,
            ..self.0.features(asked)
        }
    }

    fn establish(
        &self,
        _setup: &Setup<'_>,
        _exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        Err(Self::error())
    }
}

/// The goodbye of a side that gives up.
fn goodbye(peer: &mut Peer) -> String {
    peer.stream.set_read_timeout(Some(LONG)).expect("a socket");
    let mut bytes = Vec::new();
    peer.stream
        .read_to_end(&mut bytes)
        .expect("an orderly end, not a reset");
    let bytes = peer.open(&bytes);
    let (mut decoder, mut rest) = (FrameDecoder::new(), bytes.as_slice());
    while let Some(frame) = decoder.next(&mut rest).expect("a legal frame") {
        if let Frame::Goodbye { reason, detail } = frame {
            assert_eq!(reason, GoodbyeReason::Error);
            return detail.to_string();
        }
    }
    panic!("no goodbye");
}

#[test]
fn encryption_on_one_side_alone_is_no_connection() {
    for encrypts in [true, false] {
        let auth = Auth::Key(key());
        let (mut server, mut client) = (options(&auth), options(&auth));
        (server.encrypt, client.encrypt) = (encrypts, !encrypts);
        let endpoint = Endpoint::listen(local(), server).expect("a free port");
        let address = endpoint.local_addr();
        let client = thread::spawn(move || Endpoint::connect(address, &client));
        let accepted = endpoint.accept(LONG).map(drop);
        let connected = client.join().expect("no panic").map(drop);
        for outcome in [accepted, connected] {
            // One of them may hear it from the other first.
            match outcome {
                Err(Error::Network(NetworkError::EncryptionDiffers { .. })) => {}
                Err(Error::Network(NetworkError::GivenUp { reason, .. })) => {
                    assert!(reason.contains("encrypts payload"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn impossible_encryption_is_refused_at_once() {
    let mut insecure = options(&Auth::Insecure);
    insecure.encrypt = true;
    let mut elsewhere = options(&Auth::Key(key()));
    elsewhere.encrypt = true;
    elsewhere.network = Arc::new(Nowhere::default());
    let cannot = NetworkError::CannotEncrypt {
        network: "tcp".to_owned(),
    };
    let cases = [
        (insecure, NetworkError::EncryptionNeedsKey),
        (elsewhere, cannot),
    ];
    for (options, expected) in cases {
        let listens = Endpoint::listen(local(), options.clone()).map(drop);
        let connects = Endpoint::connect(local(), &options).map(drop);
        for outcome in [listens, connects] {
            let Err(Error::Network(error)) = outcome else {
                panic!("{outcome:?}");
            };
            assert_eq!(error, expected);
        }
    }
}

#[test]
fn both_ends_say_why_the_set_up_failed() {
    let auth = Auth::Key(key());
    for at_server in [true, false] {
        let (mut server, mut client) = (options(&auth), options(&auth));
        let nowhere = if at_server { &mut server } else { &mut client };
        nowhere.network = Arc::new(Nowhere::default());
        let endpoint = Endpoint::listen(local(), server).expect("a free port");
        let address = endpoint.local_addr();
        let client = thread::spawn(move || Endpoint::connect(address, &client));
        let accepted = endpoint.accept(LONG).map(drop);
        let connected = client.join().expect("no panic").map(drop);
        let (ours, theirs) = match at_server {
            true => (accepted, connected),
            false => (connected, accepted),
        };
        let Err(Error::Network(ours)) = ours else {
            panic!("{ours:?}");
        };
        assert_eq!(ours, Nowhere::error());
        let Err(Error::Network(NetworkError::GivenUp { reason, .. })) = theirs else {
            panic!("{theirs:?}");
        };
        assert_eq!(reason, ours.to_string());
    }
}

#[test]
fn an_overtaken_client_hears_that_the_server_is_busy() {
    let auth = Auth::Key(key());
    let mut once = options(&auth);
    once.one_time = true;
    let endpoint = Endpoint::listen(local(), once).expect("a free port");
    let server = endpoint.local_addr();
    // Between the first client and the server: holds its proof back until another client is done.
    let between = TcpListener::bind(local()).expect("a free port");
    let address = between.local_addr().expect("it is bound");
    let faster = options(&auth);
    let relay = thread::spawn(move || {
        let mut client = between.accept().expect("it comes").0;
        let mut upstream = TcpStream::connect(server).expect("it listens");
        let mut bytes = [0; 4096];
        let hello = client.read(&mut bytes).expect("its hello");
        upstream.write_all(&bytes[..hello]).expect("it reads");
        let answer = upstream.read(&mut bytes).expect("its answer");
        client.write_all(&bytes[..answer]).expect("it reads");
        let proof = client.read(&mut bytes).expect("its proof");
        let overtaking = thread::spawn(move || Endpoint::connect(server, &faster));
        let accepted = endpoint.accept(LONG).expect("the faster one");
        upstream.write_all(&bytes[..proof]).expect("it reads");
        while let Ok(count @ 1..) = upstream.read(&mut bytes) {
            client.write_all(&bytes[..count]).expect("it reads");
        }
        let refused = endpoint.refusals();
        assert_eq!(refused.count, 1, "{refused:?}");
        let faster = overtaking.join().expect("no panic");
        drop((faster.expect("it is set up"), accepted));
    });
    let error = Endpoint::connect(address, &options(&auth)).map(drop);
    let error = error.expect_err("the key is spent");
    assert!(
        error
            .to_string()
            .contains("its one-time key has been used already"),
        "{error:?}"
    );
    relay.join().expect("no panic");
}

#[test]
fn a_client_that_gives_up_before_its_lanes_is_not_waited_for() {
    let auth = Auth::Key(key());
    let mut options = options(&auth);
    (options.bounds.frames, options.bounds.pending) = (1, 2);
    let endpoint = Endpoint::listen(local(), options).expect("a free port");
    let address = endpoint.local_addr();
    for says_why in [true, false] {
        let (mut peer, session) = Peer::connect(address, &auth);
        // One lane of two.
        peer.send(&Frame::Setup {
            payload: b"TCPL\x03\x00\x02\x00\x01\x00\x00\x00".to_vec(),
        });
        let until = DialOptions::until(Instant::now() + LONG);
        let _lane = dial_lane(tcpx_net::Way::to(address), &session, 0, 2, &until).expect("a lane");
        if says_why {
            // Behind more than the other side takes at a time, and nothing else comes.
            (0..400).for_each(|counter| peer.send(&Frame::Heartbeat { counter }));
            peer.send(&Frame::Goodbye {
                reason: GoodbyeReason::Error,
                detail: "\x1b[2Jthe second\nlane found no way".into(),
            });
        } else {
            peer.stream.shutdown(Shutdown::Write).expect("it is open");
        }
        let error = endpoint.accept(LONG).map(drop).expect_err("no set-up");
        match error {
            Error::Network(NetworkError::GivenUp { reason, .. }) if says_why => {
                assert_eq!(reason, "[2Jthe secondlane found no way");
            }
            Error::Network(NetworkError::Control { .. }) if !says_why => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_a_peer_sends_that_nobody_can_use_is_named_to_it() {
    let auth = Auth::Key(key());
    let endpoint = Endpoint::listen(local(), options(&auth)).expect("a free port");
    let (mut peer, _session) = Peer::connect(endpoint.local_addr(), &auth);
    peer.send(&Frame::Setup {
        payload: b"GET / HTTP/1.1".to_vec(),
    });
    let accepting = thread::spawn(move || endpoint.accept(LONG).map(drop));
    // More that the other side has not read when it gives up must not make a reset of its words.
    let more = peer.encode(&Frame::Ready);
    peer.stream.write_all(&more).expect("it is open");
    let said = goodbye(&mut peer);
    drop(peer);
    let error = accepting.join().expect("no panic").expect_err("no set-up");
    assert!(matches!(
        error,
        Error::Network(NetworkError::Mismatch { .. })
    ));
    assert!(error.to_string().starts_with(&said), "{said}: {error}");
}

/// A lane that nobody takes must not stay open: each is a descriptor of the server.
#[test]
fn a_session_with_one_lane_refuses_more_of_them() {
    let options = Options::tcp(Auth::Key(key()));
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a port");
    let address = endpoint.local_addr();
    let accepting = thread::spawn(move || {
        let one = endpoint.accept(LONG).expect("a peer with the key");
        (endpoint, one)
    });
    let (mut peer, session) = Peer::connect(address, &options.auth);
    let first = peer.set_up(address, &session);
    let _accepted = accepting.join().expect("no panic");
    let until = DialOptions::until(Instant::now() + LONG);
    let dial = |lane, lanes| dial_lane(tcpx_net::Way::to(address), &session, lane, lanes, &until);
    is_closed(dial(1, 2).expect("it has proved itself").stream);
    // One that comes again takes the first one's place.
    let _again = dial(0, 1).expect("it has proved itself");
    is_closed(first);
}

/// The client has begun with its own wish, and the server has to bear lanes that nobody wants after
/// all.
#[test]
fn lanes_that_are_opened_in_vain_are_no_refusals() {
    let auth = Auth::Key(key());
    let [mut fewer, mut more] = [options(&auth), options(&auth)];
    (fewer.channels, more.channels) = (1, 8);
    let endpoint = Endpoint::listen(local(), fewer).expect("a free port");
    let address = endpoint.local_addr();
    for _ in 0..10 {
        thread::scope(|scope| {
            let accepted = scope.spawn(|| endpoint.accept(LONG).expect("a peer with the key"));
            let connected = Endpoint::connect(address, &more).expect("it listens");
            drop((accepted.join().expect("no panic"), connected));
        });
    }
    assert_eq!(endpoint.refusals(), Refusals::default());
}

fn is_closed(mut lane: TcpStream) {
    lane.set_nonblocking(false).expect("a socket");
    lane.set_read_timeout(Some(LONG)).expect("a socket");
    match lane.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("the lane is open: {other:?}"),
    }
}
