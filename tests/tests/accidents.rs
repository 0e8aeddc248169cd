//! One side is killed or stopped at a named point of the protocol; the other ends in time, with
//! errors that name the place.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use tcpx_tests::accident::{Accident, How, Point};
use tcpx_tests::instructions::{Carrier, Failure, Instructions};
use tcpx_tests::process::{Ended, Peer};
use tcpx_tests::scenario::{Scenario, Side};

const PEER: &str = env!("CARGO_BIN_EXE_peer");
/// Silence after which a peer counts as dead.
const DEAD_AFTER: Duration = Duration::from_secs(1);
/// A killed process is noticed by its sockets; a stopped one by its silence.
const BOUND: Duration = DEAD_AFTER.saturating_mul(10);
/// For everything before the accident.
const START: Duration = Duration::from_secs(60);
/// Accidents at a time; most of them only wait.
const AT_ONCE: usize = 6;

const BYTES: u64 = 16 << 20;

/// The sender is the client, the receiver the server.
const POINTS: [(Side, Point); 13] = [
    (Side::Client, Point::Connected),
    (Side::Client, Point::Started),
    (Side::Client, Point::ChunkPosted),
    (Side::Client, Point::ChunkSent),
    (Side::Client, Point::BeforeClose),
    (Side::Server, Point::Connected),
    (Side::Server, Point::Started),
    (Side::Server, Point::ChunkPosted),
    (Side::Server, Point::ChunkArrived),
    (Side::Server, Point::ChunkPlaced),
    (Side::Server, Point::HalfPlaced),
    (Side::Server, Point::BeforeClose),
    (Side::Client, Point::HalfPlaced),
];

fn accidents(carrier: &Carrier) {
    let mut left = VecDeque::new();
    for how in [How::Kill, How::Stop] {
        for (side, at) in POINTS {
            // The embedded network places bytes itself; a sender places none.
            let exists = at != Point::ChunkArrived || carrier.scatters();
            if exists && (side, at) != (Side::Client, Point::HalfPlaced) {
                left.push_back((side, Accident { at, how }));
            }
        }
    }
    let left = Mutex::new(left);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let next = left.lock().expect("no panic").pop_front();
                    let Some((side, accident)) = next else { break };
                    one(carrier, side, accident);
                }
            });
        }
    });
}

/// `victim` has the accident; the other side must notice.
fn one(carrier: &Carrier, victim: Side, accident: Accident) {
    let what = format!("{carrier:?}: {victim:?} {accident:?}");
    let scenario = Scenario::to_server(accident.at as u64, &[BYTES]);
    let mut server = Instructions::new(carrier.clone(), scenario);
    server.heartbeat = DEAD_AFTER / 5;
    server.dead_after = DEAD_AFTER;
    let mut client = server.clone();
    match victim {
        Side::Server => server.accident = Some(accident),
        Side::Client => client.accident = Some(accident),
    }
    let server = Peer::start(PEER, &server);
    client.connect = Some(server.address());
    let client = Peer::start(PEER, &client);
    let (victim, survivor) = match victim {
        Side::Server => (server, client),
        Side::Client => (client, server),
    };
    match accident.how {
        How::Kill => {
            let ended = victim.finish(START);
            assert!(ended.was_killed(), "{what}: {ended:?}");
            check(&what, accident, &survivor.finish(BOUND));
        }
        How::Stop => {
            victim.wait_stopped(START);
            check(&what, accident, &survivor.finish(BOUND));
        }
    }
}

fn check(what: &str, accident: Accident, ended: &Ended) {
    let summary = ended.summary();
    eprintln!("{what}: {summary:?}");
    assert_eq!(ended.status.code(), Some(1), "{what}: {ended:?}");
    assert_eq!(summary.defects, [""; 0], "{what}");
    let gone = |error: &String| {
        let known = match accident.how {
            How::Kill => ["without a goodbye", "reset by peer", "peer closed", "was lost"].as_slice(),
            How::Stop => ["nothing arrived from the peer for 1."].as_slice(),
        };
        known.iter().any(|words| error.contains(words))
    };
    for failure in &summary.failures {
        names_the_place(what, failure);
        assert!(gone(&failure.error), "{what}: {failure:?}");
    }
}

fn names_the_place(what: &str, failure: &Failure) {
    let error = &failure.error;
    assert!(error.contains("peer 127.0.0.1:"), "{what}: {error}");
    assert!(error.contains("tag 7000"), "{what}: {error}");
}

#[test]
fn over_tcp() {
    accidents(&Carrier::Tcp);
}

#[test]
fn over_our_plugin_with_its_device_queue() {
    accidents(&Carrier::plugin_unpack());
}

#[test]
fn over_the_double() {
    accidents(&Carrier::double());
}
