//! The port under good clients, strangers, and bad luck.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx_net::dial::dial_lane;
use tcpx_net::{
    Auth, Congestion, DialOptions, Dialled, ListenOptions, Listener, NetworkError, SocketError,
    Way, dial, every_address,
};
use tcpx_wire::handshake::{Build, ClientHandshake, Established, HandshakeError, Session, Step};
use tcpx_wire::record::{LENGTH_BYTES, sealed_bytes};

use crate::support::*;

fn until() -> DialOptions {
    DialOptions::until(deadline())
}

fn local() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// In which way a handshake did not come about.
fn handshake_error(error: NetworkError) -> HandshakeError {
    match error {
        NetworkError::Socket(SocketError::Handshake { error, .. }) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn both_ends_hold_one_session_and_the_stream_goes_on() {
    for auth in [Auth::Key(key(1)), Auth::Insecure] {
        let listener = listener(auth.clone());
        let mut dialled = dial(listener.local_addr(), &auth, &until()).unwrap();
        // At once, so that it sits right behind the handshake.
        dialled.stream.write_all(b"the first frame").unwrap();
        let mut accepted = listener.accept(deadline()).unwrap();
        assert_eq!(dialled.session, accepted.session);
        assert!(accepted.stream.nodelay().unwrap() && dialled.stream.nodelay().unwrap());
        accepted.stream.set_nonblocking(false).unwrap();
        let mut bytes = [0; 15];
        accepted.stream.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"the first frame");
    }
}

#[test]
fn each_way_in_which_keys_differ_has_its_own_error() {
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let with_key = listener(Auth::Key(key(1)));
    let without = listener(Auth::Insecure);
    let wrong = dial(with_key.local_addr(), &Auth::Key(key(2)), &until()).unwrap_err();
    assert_eq!(handshake_error(wrong), HandshakeError::WrongKey);
    let required = dial(with_key.local_addr(), &Auth::Insecure, &until()).unwrap_err();
    assert_eq!(handshake_error(required), HandshakeError::KeyRequired);
    let unexpected = dial(without.local_addr(), &Auth::Key(key(1)), &until()).unwrap_err();
    assert_eq!(handshake_error(unexpected), HandshakeError::KeyNotExpected);
    let refused = dial(address, &Auth::Insecure, &until()).unwrap_err();
    assert_eq!(refused, SocketError::Refused { peer: address }.into());
    let nobody = with_key.accept(Instant::now()).unwrap_err();
    assert!(
        matches!(nobody, NetworkError::AcceptTimedOut { .. }),
        "{nobody:?}"
    );
}

#[test]
fn a_peer_that_is_not_tcpx_or_of_another_version_is_named() {
    let answers = [
        (
            b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n".to_vec(),
            "\"SSH-2.0-\" arrived",
        ),
        (
            [b"TCPX\r\n\x1a\n\x63\x00\x62\x00".as_slice(), &[0; 120]].concat(),
            "protocols 98 to 99",
        ),
    ];
    for (answer, words) in answers {
        let stranger = TcpListener::bind(local()).unwrap();
        let address = stranger.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = stranger.accept().unwrap();
            stream.write_all(&answer).unwrap();
            // Until the client gives up.
            while stream.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
        });
        let error = dial(address, &Auth::Key(key(1)), &until()).unwrap_err();
        assert!(
            handshake_error(error.clone()).to_string().contains(words),
            "{error}"
        );
        server.join().unwrap();
    }
}

#[test]
fn a_silent_server_ends_the_dial_at_its_deadline() {
    let silent = TcpListener::bind(local()).unwrap();
    let options = DialOptions::until(Instant::now() + Duration::from_millis(50));
    let error = dial(silent.local_addr().unwrap(), &Auth::Insecure, &options).unwrap_err();
    let unanswered = SocketError::Unanswered {
        peer: silent.local_addr().unwrap(),
    };
    assert_eq!(error, unanswered.into());
}

#[test]
fn a_clients_key_connects_and_cannot_serve() {
    let server = listener(Auth::Key(key(1)));
    let client = Auth::Client(key(1).client_key());
    dial(server.local_addr(), &client, &until()).unwrap();
    let options = ListenOptions {
        address: local(),
        auth: client,
        one_time: false,
        congestion: Congestion::Automatic,
    };
    let error = Listener::bind(options).unwrap_err();
    assert!(matches!(error, NetworkError::ClientKey { .. }), "{error:?}");
}

#[test]
fn a_one_time_key_is_spent_by_its_first_session() {
    let auth = Auth::Key(key(1));
    let options = ListenOptions {
        address: local(),
        auth: auth.clone(),
        one_time: true,
        congestion: Congestion::Automatic,
    };
    let listener = Listener::bind(options).unwrap();
    let address = listener.local_addr();
    for _ in 0..3 {
        dial(address, &Auth::Key(key(2)), &until()).unwrap_err();
    }
    let dialled = dial(address, &auth, &until()).unwrap();
    let accepted = listener.accept(deadline()).unwrap();
    let late = dial(address, &auth, &until()).unwrap_err();
    assert_eq!(handshake_error(late), HandshakeError::Busy);
    // Lanes of the one session still come.
    dial_lane(Way::to(address), &dialled.session, 0, 1, &until()).unwrap();
    assert_eq!(next_lane(&accepted).lane, 0);
}

#[test]
fn a_listener_on_every_address_takes_ipv4_and_ipv6() {
    let every = every_address();
    let listener = Listener::bind(ListenOptions {
        address: (every, 0).into(),
        auth: Auth::Insecure,
        one_time: false,
        congestion: Congestion::Automatic,
    })
    .unwrap();
    let port = listener.local_addr().port();
    let mut from = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
    if every.is_ipv6() {
        from.push(IpAddr::V6(Ipv6Addr::LOCALHOST));
    } else {
        let test = "a_listener_on_every_address_takes_ipv4_and_ipv6";
        eprintln!("skipped: {test}: no IPv6 here");
    }
    for ip in from {
        let dialled = dial((ip, port).into(), &Auth::Insecure, &until()).unwrap();
        let accepted = listener.accept(deadline()).unwrap();
        assert_eq!(accepted.session, dialled.session);
        assert_eq!(accepted.peer, dialled.stream.local_addr().unwrap());
    }
}

/// What a server says to a client that has proved itself. A client that has its welcome is counted.
fn welcome(dialled: &mut Dialled) -> Result<(), HandshakeError> {
    let mut sealed = [0; sealed_bytes(1)];
    let mut opened = sealed;
    dialled.stream.set_nonblocking(false).unwrap();
    dialled.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    dialled.stream.read_exact(&mut sealed).unwrap();
    let length = dialled
        .records
        .open(&sealed[LENGTH_BYTES..], &mut opened)
        .unwrap();
    Established::read_welcome(&opened[..length])
}

#[test]
fn sessions_that_nobody_accepts_are_bounded() {
    let listener = listener(Auth::Insecure);
    let address = listener.local_addr();
    let dial_it = || dial(address, &Auth::Insecure, &until());
    let mut waiting: Vec<_> = (1..16).map(|_| dial_it().unwrap()).collect();
    for dialled in &mut waiting {
        welcome(dialled).unwrap();
    }
    // One that says hello while there is a place, and proves itself when there is none any more.
    let mut late = TcpStream::connect(address).unwrap();
    late.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut handshake, hello) =
        ClientHandshake::new(None, &Build::OURS, [7; ClientHandshake::ENTROPY_BYTES]);
    late.write_all(&hello).unwrap();
    let (proof, established) = loop {
        let mut byte = [0];
        late.read_exact(&mut byte).unwrap();
        if let Step::Send(proof) = handshake.receive(&mut byte.as_slice()).unwrap() {
            break (proof, handshake.take_unwelcomed().unwrap());
        }
    };
    let mut last = dial_it().unwrap();
    welcome(&mut last).unwrap();
    late.write_all(&proof).unwrap();
    let mut late = Dialled {
        peer: listener.local_addr(),
        stream: late,
        session: established.session,
        records: established.records,
    };
    let refused = welcome(&mut late).unwrap_err();
    assert!(matches!(refused, HandshakeError::Busy), "{refused:?}");
    let error = dial_it().unwrap_err();
    assert_eq!(handshake_error(error), HandshakeError::Busy);
    let first = listener.accept(deadline()).unwrap();
    assert_eq!(first.session, waiting[0].session);
    welcome(&mut dial_it().unwrap()).unwrap();
}

#[test]
fn a_lane_needs_a_living_session_and_its_key() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth.clone());
    let address = listener.local_addr();
    let dialled = dial(address, &auth, &until()).unwrap();
    let accepted = listener.accept(deadline()).unwrap();
    let stranger = dial(address, &auth, &until()).unwrap();
    let forged = Session {
        id: dialled.session.id,
        ..stranger.session
    };
    let error = dial_lane(Way::to(address), &forged, 0, 1, &until()).unwrap_err();
    assert_eq!(
        handshake_error(error),
        HandshakeError::LaneProof { lane: 0 }
    );
    dial_lane(Way::to(address), &dialled.session, 3, 4, &until()).unwrap();
    let lane = next_lane(&accepted);
    assert_eq!((lane.lane, lane.lanes), (3, 4));
    drop(accepted);
    let error = dial_lane(Way::to(address), &dialled.session, 0, 4, &until()).unwrap_err();
    assert!(error.to_string().contains("does not know"), "{error}");
}

#[test]
fn only_control_connections_give_up_on_a_peer_that_rests() {
    let listener = listener(Auth::Insecure);
    let address = listener.local_addr();
    let dialled = dial(address, &Auth::Insecure, &until()).unwrap();
    let accepted = listener.accept(deadline()).unwrap();
    let dialled_lane = dial_lane(Way::to(address), &dialled.session, 0, 1, &until())
        .unwrap()
        .stream;
    let lane = next_lane(&accepted);
    let timeout = |stream: &TcpStream| {
        socket2::SockRef::from(stream)
            .tcp_user_timeout()
            .unwrap()
            .filter(|time| !time.is_zero())
    };
    for stream in [&dialled.stream, &accepted.stream] {
        assert_eq!(timeout(stream), Some(Duration::from_secs(10)));
    }
    for stream in [&dialled_lane, &lane.stream] {
        assert_eq!(timeout(stream), None);
    }
}

/// A good client, and whether it was served while a stranger that came before it was still waited
/// for: whoever waits for strangers first serves it after their deadline.
fn overtakes(address: SocketAddr, listener: &Listener, auth: &Auth) -> bool {
    let silent = TcpStream::connect(address).unwrap();
    let dialled = dial(address, auth, &until()).unwrap();
    assert_eq!(
        listener.accept(deadline()).unwrap().session,
        dialled.session
    );
    silent.set_nonblocking(true).unwrap();
    let answer = (&silent).read(&mut [0]);
    answer.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn strangers_neither_delay_a_good_client_nor_stay() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth.clone());
    let address = listener.local_addr();
    let hello = ClientHandshake::new(Some(&key(1).client_key()), &Build::OURS, [9; 32]).1;
    let mut strangers: Vec<_> = (0..200)
        .map(|index| {
            let mut stream = TcpStream::connect(address).unwrap();
            match index % 4 {
                0 => {}
                1 => stream
                    .write_all(b"GET / HTTP/1.1\r\nHost: tcpx\r\n\r\n")
                    .unwrap(),
                2 => stream.write_all(&hello[..20]).unwrap(),
                _ => stream.write_all(&hello).unwrap(),
            }
            stream
        })
        .collect();
    // Once is enough: on a starved machine a stranger's three seconds may pass while nobody runs.
    let overtaken = (0..5).filter(|_| overtakes(address, &listener, &auth));
    assert!(overtaken.count() > 0, "good clients wait for strangers");
    // All are turned away: the oldest at once, the others by their deadline.
    for stream in &mut strangers {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut bytes = [0; 128];
        while stream.read(&mut bytes).is_ok_and(|bytes| bytes > 0) {}
    }
}

#[test]
fn a_handshake_that_comes_byte_by_byte_is_good() {
    let auth = Auth::Key(key(1));
    let listener = listener(auth);
    // On a starved machine a client's three seconds may pass meanwhile: once is enough.
    let good = (0..10).any(|_| comes_byte_by_byte(&listener).is_ok());
    assert!(good, "none was taken");
}

fn comes_byte_by_byte(listener: &Listener) -> std::io::Result<()> {
    let (mut handshake, first) =
        ClientHandshake::new(Some(&key(1).client_key()), &Build::OURS, [9; 32]);
    let mut stream = TcpStream::connect(listener.local_addr())?;
    stream.set_nodelay(true)?;
    let slowly = |mut stream: &TcpStream, bytes: &[u8]| {
        bytes.iter().try_for_each(|byte| {
            std::thread::yield_now();
            stream.write_all(&[*byte])
        })
    };
    slowly(&stream, &first)?;
    let mut buffer = [0; 1];
    loop {
        stream.read_exact(&mut buffer)?;
        match handshake.receive(&mut buffer.as_slice()).unwrap() {
            Step::NeedMore => {}
            Step::Send(message) => slowly(&stream, &message)?,
            Step::Done(established) => {
                let accepted = listener.accept(deadline()).unwrap();
                assert_eq!(accepted.session, established.session);
                return Ok(());
            }
        }
    }
}

#[test]
fn a_closed_listener_frees_its_port() {
    let listener = listener(Auth::Insecure);
    let address = listener.local_addr();
    let idle = TcpStream::connect(address).unwrap();
    drop(listener);
    assert_eq!(
        dial(address, &Auth::Insecure, &until()).unwrap_err(),
        SocketError::Refused { peer: address }.into()
    );
    drop(idle);
    let options = ListenOptions {
        address,
        auth: Auth::Insecure,
        one_time: false,
        congestion: Congestion::Automatic,
    };
    drop(Listener::bind(options.clone()).unwrap());
    let _taken = TcpListener::bind(address).unwrap();
    let error = Listener::bind(options).unwrap_err();
    assert!(error.to_string().contains("choose another port"), "{error}");
}

/// What a stranger does who comes again and again.
#[derive(Clone, Copy, Debug)]
enum Crowd {
    /// Says nothing, from the client's own address.
    Silent,
    /// Says nothing, from a thousand addresses.
    SilentFromEverywhere,
    /// Says what a client has said before, from the client's own address.
    Replays,
    /// The same, from a thousand addresses.
    ReplaysFromEverywhere,
}

impl Crowd {
    /// Comes so often a second at most, until it is to stop; the last ones stay for a while. How
    /// often a second it was.
    fn come(self, address: SocketAddr, hello: &[u8], stop: &AtomicBool) -> f64 {
        let a_second = match self {
            Self::SilentFromEverywhere | Self::ReplaysFromEverywhere => 15_000,
            Self::Silent | Self::Replays => 1000,
        };
        let began = Instant::now();
        let mut open = std::collections::VecDeque::new();
        for number in 0_u32.. {
            if stop.load(Ordering::Relaxed) {
                return f64::from(number) / began.elapsed().as_secs_f64();
            }
            let due = began + Duration::from_secs(1) * number / a_second;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let stranger = self.connect(address, number);
            if let (Self::Replays | Self::ReplaysFromEverywhere, Ok(stranger)) = (self, &stranger) {
                let _ = (&*stranger).write_all(hello);
            }
            open.extend(stranger);
            if open.len() > 200 {
                open.pop_front();
            }
        }
        unreachable!("nobody stops it");
    }

    fn connect(self, address: SocketAddr, number: u32) -> std::io::Result<TcpStream> {
        let kind = (socket2::Domain::IPV4, socket2::Type::STREAM);
        let socket = socket2::Socket::new(kind.0, kind.1, None)?;
        if let Self::SilentFromEverywhere | Self::ReplaysFromEverywhere = self {
            let last = (number % 1000 + 1).to_be_bytes();
            let from = Ipv4Addr::new(127, 1, last[2], last[3]);
            socket.bind(&SocketAddr::from((from, 0)).into())?;
        }
        // Whoever waits for each of its connections comes seldom.
        socket.set_nonblocking(!matches!(self, Self::Replays))?;
        let _ = socket.connect(&address.into());
        Ok(socket.into())
    }
}

/// Connects once, over a network that takes so long each way, and says whether the server welcomed
/// it; `None`: this process had no core.
fn is_welcomed(address: SocketAddr, delay: Duration, entropy: u32) -> Option<bool> {
    let began = Instant::now();
    let key = key(1).client_key();
    let entropy: Vec<u8> = entropy
        .to_le_bytes()
        .repeat(ClientHandshake::ENTROPY_BYTES / 4);
    let entropy = entropy.try_into().unwrap();
    let (mut handshake, mut say) = ClientHandshake::new(Some(&key), &Build::OURS, entropy);
    let mut attempt = || -> std::io::Result<()> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        loop {
            std::thread::sleep(delay);
            stream.write_all(&say)?;
            say = loop {
                let mut byte = [0];
                stream.read_exact(&mut byte)?;
                match handshake.receive(&mut byte.as_slice()) {
                    Ok(Step::NeedMore) => {}
                    Ok(Step::Send(message)) => break message,
                    Ok(Step::Done(_)) => return Ok(()),
                    Err(error) => return Err(std::io::Error::other(error)),
                }
            };
        }
    };
    let is_in = attempt().is_ok();
    (is_in || began.elapsed() < 2 * delay + Duration::from_millis(300)).then_some(is_in)
}

/// So many clients connect with each delay, one after the other, while crowds come.
fn clients_come(clients: usize) {
    let listener = listener(Auth::Key(key(1)));
    let address = listener.local_addr();
    let recorded = ClientHandshake::new(Some(&key(1).client_key()), &Build::OURS, [1; 32]).1;
    let mut entropy = 1;
    for crowd in [
        Crowd::Silent,
        Crowd::SilentFromEverywhere,
        Crowd::Replays,
        Crowd::ReplaysFromEverywhere,
    ] {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let came = scope.spawn(|| crowd.come(address, &recorded, &stop));
            let mut busy = 0;
            // Until there are as many as there ever are.
            std::thread::sleep(Duration::from_millis(300));
            let delays = [0, 10, 50, 200].into_iter().cycle().take(4 * clients);
            for delay in delays.map(Duration::from_millis) {
                entropy += 1;
                let is_in = is_welcomed(address, delay, entropy);
                stop.store(is_in == Some(false), Ordering::Relaxed);
                assert_ne!(is_in, Some(false), "{crowd:?}, {delay:?}");
                match is_in {
                    Some(_) => drop(listener.accept(deadline()).unwrap()),
                    None => busy += 1,
                }
            }
            stop.store(true, Ordering::Relaxed);
            let a_second = came.join().unwrap();
            println!("{crowd:?}, {a_second:.0} a second; {busy} clients had no core");
        });
    }
}

#[test]
fn a_client_is_in_after_its_round_trip_whoever_else_comes() {
    clients_come(2);
}

#[test]
#[ignore = "two minutes"]
fn each_client_is_in_after_its_round_trip_whoever_else_comes() {
    clients_come(60);
}
