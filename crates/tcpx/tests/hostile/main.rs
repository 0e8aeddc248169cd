//! Peers that hold the key and mean harm, libraries that hang, observers that panic.

mod forks;
mod gated;
mod limits;
mod peer;
mod set_up;
mod starving;

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{
    Auth, Connection, Endpoint, Error, Event, Key, Network, Observer, Options, Region, TcpNetwork,
    Transfer,
};
use tcpx_net::{DialOptions, dial};
use tcpx_wire::frame::{CancelReason, Destination, Frame};
use tcpx_wire::{Level, Role, Tag, TransferId};

use crate::gated::gated;
use crate::peer::Peer;

/// Far more than anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// Longer than that: who waits for a heartbeat fails.
const HEARTBEAT: Duration = Duration::from_secs(300);

fn key() -> Key {
    Key::generate(&mut |bytes| getrandom::fill(bytes).expect("the system has randomness"))
}

fn local() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Of an end that a busy machine may keep from running for long.
fn over(network: Arc<dyn Network>, auth: Auth) -> Options {
    let mut options = Options::new(network, auth);
    options.dead_after = 10 * LONG;
    options.deadlines.stall = 10 * LONG;
    options
}

fn tcp(auth: Auth) -> Options {
    over(Arc::new(TcpNetwork::default()), auth)
}

fn pair(server: &Options, client: &Options) -> (Connection, Connection) {
    let endpoint = Endpoint::listen(local(), server.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let client = client.clone();
    let client = thread::spawn(move || Endpoint::connect(address, &client).expect("it listens"));
    let accepted = endpoint.accept(LONG).expect("the client connects");
    (accepted, client.join().expect("no panic"))
}

#[test]
fn an_endless_set_up_meets_its_deadline_cheaply() {
    let floods: [fn(u64) -> Frame; 2] = [
        |counter| Frame::Heartbeat { counter },
        |_| Frame::Setup {
            payload: vec![0; 32 * 1024],
        },
    ];
    for flood in floods {
        let mut options = tcp(Auth::Key(key()));
        options.connect_timeout = Duration::from_secs(2);
        let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
        let (mut peer, _session) = Peer::connect(endpoint.local_addr(), &options.auth);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let flooding = thread::spawn(move || {
            let mut counter = 0;
            while !stopped.load(Ordering::Relaxed) {
                let mut bytes = Vec::new();
                while bytes.len() < 256 * 1024 {
                    bytes.extend(peer.encode(&flood(counter)));
                    counter += 1;
                }
                if peer.stream.write_all(&bytes).is_err() {
                    return;
                }
            }
        });
        let (done, waiting) = mpsc::channel();
        let accepting = thread::spawn(move || {
            let error = endpoint.accept(LONG).map(drop).expect_err("no set-up");
            done.send(error).expect("the test waits");
        });
        let answer = waiting.recv_timeout(LONG / 2);
        stop.store(true, Ordering::Relaxed);
        flooding.join().expect("no panic");
        accepting.join().expect("no panic");
        assert!(answer.is_ok(), "the set-up outlasted its deadline");
    }
}

#[test]
fn silent_peers_with_a_key_delay_nobody() {
    let options = tcp(Auth::Key(key()));
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let until = DialOptions::until(Instant::now() + LONG);
    let silent: Vec<_> = (0..4)
        .map(|_| dial(address, &options.auth, &until).expect("it listens"))
        .collect();
    let client = thread::spawn(move || Endpoint::connect(address, &options));
    let good = endpoint
        .accept(LONG)
        .expect("it is set up beside the others");
    let client = client.join().expect("no panic").expect("it is set up");
    drop(silent);
    for _ in 0..4 {
        endpoint.accept(LONG).expect_err("it said nothing");
    }
    client.close(LONG).expect("an orderly goodbye");
    good.close(LONG).expect("an orderly goodbye");
}

#[test]
fn a_peer_that_reads_nothing_does_not_keep_the_connection() {
    let options = tcp(Auth::Key(key()));
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let accepting = thread::spawn(move || endpoint.accept(LONG).expect("a peer with the key"));
    let (mut peer, session) = Peer::connect(address, &options.auth);
    let _lane = peer.set_up(address, &session);
    let connection = accepting.join().expect("no panic");
    // It may not take anything for long, be it that it is lost or that the machine is busy.
    let second = Some(Duration::from_secs(1));
    peer.stream.set_write_timeout(second).expect("a socket");
    let waits = Region::host(1).expect("memory");
    let waits = connection.receive(waits.all(), 2).start().expect("room");
    // Each cancel of a known transfer is answered; nobody reads the answers.
    peer.send(&Frame::Waiting {
        transfer: TransferId(0),
        level: Level::Placed,
        bytes: 1 << 20,
        to: Destination::next_receive(Tag(1)),
    });
    let cancel = Frame::Cancel {
        transfer: TransferId(0),
        from: Role::Sender,
        reason: CancelReason::Requested,
        detail: "".into(),
    };
    let is_lost = Arc::new(AtomicBool::new(false));
    let has_seen = Arc::clone(&is_lost);
    let sending = thread::spawn(move || {
        let mut bytes = Vec::new();
        while !has_seen.load(Ordering::SeqCst) {
            if bytes.is_empty() {
                for _ in 0..4096 {
                    bytes.extend(peer.encode(&cancel));
                }
            }
            match peer.stream.write(&bytes) {
                Ok(count) => drop(bytes.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
        peer
    });
    let ended = waits
        .wait_timeout(LONG)
        .expect("a peer that reads nothing loses the connection");
    ended.expect_err("the backlog was too much");
    is_lost.store(true, Ordering::SeqCst);
    let _peer = sending.join().expect("no panic");
    let started = Instant::now();
    let error = connection
        .close(LONG)
        .expect_err("the backlog was too much");
    assert!(matches!(error, Error::ConnectionLost { .. }), "{error}");
    assert!(started.elapsed() < LONG / 2, "{error}");
}

/// A peer that has not heard how its session failed asks to go on with it: it is told, once and for
/// all.
#[test]
fn who_would_go_on_with_a_failed_session_is_told_why() {
    let options = tcp(Auth::Key(key()));
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let (mut peer, session) = Peer::connect(address, &options.auth);
    let _lane = peer.set_up(address, &session);
    let connection = endpoint.accept(LONG).expect("a peer with the key");
    peer.send(&Frame::GoodbyeAck);
    let memory = Region::host(8).expect("memory");
    let receive = connection.receive(memory.all(), 1).start();
    receive.and_then(Transfer::wait).expect_err("a breach");
    for _ in 0..2 {
        let told = peer::resume(address, &session);
        assert!(told.contains("goodbye ack"), "{told}");
    }
    drop(connection);
}

#[test]
fn frames_left_over_from_a_long_turn_are_not_forgotten() {
    let (gate, network) = gated();
    let mut options = over(network, Auth::Key(key()));
    options.heartbeat = HEARTBEAT;
    options.dead_after = 3 * HEARTBEAT;
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let accepting = thread::spawn(move || endpoint.accept(LONG).expect("a peer with the key"));
    let (mut peer, session) = Peer::connect(address, &options.auth);
    let _lane = peer.set_up(address, &session);
    let connection = accepting.join().expect("no panic");
    let destination = Region::host(5).expect("memory");
    let receive = connection
        .receive(destination.all(), 7)
        .start()
        .expect("room");
    let mut bytes = Vec::new();
    for counter in 0..66_500 {
        bytes.extend(peer.encode(&Frame::Heartbeat { counter }));
    }
    bytes.extend(peer.encode(&Frame::Eager {
        transfer: TransferId(0),
        level: Level::Placed,
        to: Destination::next_receive(Tag(7)),
        payload: b"hello".to_vec().into(),
    }));
    gate.shut();
    let mut stream = peer.stream.try_clone().expect("a socket");
    let writing = thread::spawn(move || stream.write_all(&bytes).expect("it reads"));
    gate.entered();
    gate.open();
    let report = receive.wait_timeout(LONG);
    writing.join().expect("no panic");
    assert_eq!(report.expect("in time").expect("it arrives").bytes, 5);
    // Whatever the engine said does not matter here.
    peer.stream.set_nonblocking(true).expect("a socket");
    drop(peer.stream.read(&mut [0; 64]));
}

#[test]
fn a_hanging_library_blocks_neither_cancel_nor_drop_nor_close() {
    let auth = Auth::Key(key());
    let (gate, network) = gated();
    let (server, client) = pair(&over(network, auth.clone()), &tcp(auth));
    let region = Region::host(1 << 20).expect("memory");
    let receive = server.receive(region.all(), 1).start().expect("room");
    gate.shut();
    // Something arrives, so the engine calls its network, which hangs.
    let source = Region::host(8).expect("memory");
    let _send = client.send(source.all(), 2).start().expect("room");
    gate.entered();
    let (done, waiting) = mpsc::channel();
    let other = server.clone();
    let calls = thread::spawn(move || {
        receive.cancel();
        drop(receive);
        let closed = other.close(Duration::from_millis(50));
        done.send(closed).expect("the test waits");
    });
    let closed = waiting.recv_timeout(LONG);
    gate.open();
    calls.join().expect("no panic");
    let closed = closed.expect("no call waits for the library");
    assert!(matches!(closed, Err(Error::TimedOut { .. })), "{closed:?}");
    // What was asked meanwhile is seen to once the library comes back.
    let client = thread::spawn(move || client.close(LONG));
    server.close(LONG).expect("an orderly goodbye");
    client.join().expect("no panic").ok();
    assert!(region.read_to(0, &mut [0; 1]).is_ok(), "the memory is back");
}

#[test]
fn an_observer_that_panics_harms_no_connection() {
    struct Panics;
    impl Observer for Panics {
        fn event(&self, event: &Event) {
            assert!(
                !matches!(event, Event::ChunkPlaced { .. } | Event::Completed { .. }),
                "an observer's own mistake"
            );
        }
    }
    let auth = Auth::Key(key());
    let mut watched = tcp(auth.clone());
    watched.observer = Some(Arc::new(Panics));
    let plain = tcp(auth);
    for (server, client) in [pair(&watched, &plain), pair(&plain, &plain)] {
        let source = Region::host(1 << 20).expect("memory");
        let destination = Region::host(1 << 20).expect("memory");
        let receive = server.receive(destination.all(), 1).start().expect("room");
        let send = client.send(source.all(), 1).start().expect("room");
        let sent = send.wait_timeout(LONG).expect("in time");
        sent.expect("it arrives");
        let received = receive.wait_timeout(LONG);
        received.expect("in time").expect("it arrives");
    }
}

#[test]
fn an_unposted_send_is_tried_again_without_events() {
    let auth = Auth::Key(key());
    let (gate, network) = gated();
    gate.poll_only.store(true, Ordering::Release);
    let mut polled = over(network, auth.clone());
    let mut plain = tcp(auth);
    for options in [&mut polled, &mut plain] {
        options.heartbeat = HEARTBEAT;
        options.dead_after = 3 * HEARTBEAT;
    }
    let (server, client) = pair(&polled, &plain);
    gate.refuses.store(true, Ordering::Release);
    let source = Region::host(1 << 20).expect("memory");
    let destination = Region::host(1 << 20).expect("memory");
    let receive = client.receive(destination.all(), 1).start().expect("room");
    let _send = server.send(source.all(), 1).start().expect("room");
    let started = Instant::now();
    while gate.refused.load(Ordering::Acquire) < 100 {
        assert!(started.elapsed() < LONG, "not tried again");
        thread::yield_now();
    }
    gate.refuses.store(false, Ordering::Release);
    let received = receive.wait_timeout(LONG);
    received.expect("in time").expect("it arrives");
}
