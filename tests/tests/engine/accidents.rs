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
/// Silence after which a peer counts as dead that is to be stopped: a killed one is noticed by its
/// sockets, before it is silent for `LONG`.
const DEAD_AFTER: Duration = Duration::from_secs(3);
/// For everything before the accident, and for what comes behind it, on a machine that does other
/// things too.
const LONG: Duration = Duration::from_secs(120);
/// Accidents at a time; most of them only wait.
const AT_ONCE: usize = 6;

/// More than all windows hold, so that nothing ends without both engines.
const BYTES: u64 = 40 << 20;
const CHUNK_BYTES: u32 = 256 << 10;

/// The sender is the client, the receiver the server.
const POINTS: [(Side, Point); 12] = [
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
];

fn accidents(carrier: &Carrier) {
    let mut left = VecDeque::new();
    for how in [How::Kill, How::Stop] {
        for (side, at) in POINTS {
            // The embedded network places bytes itself, in windows that are whole receives.
            let skipped = match (side, at) {
                (_, Point::ChunkArrived) => !carrier.scatters(),
                (Side::Server, Point::ChunkPosted) => matches!(carrier, Carrier::Tcp),
                _ => false,
            };
            if !skipped {
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

/// `side` has the accident; the other one must notice.
fn one(carrier: &Carrier, side: Side, accident: Accident) {
    let what = format!("{carrier:?}: {side:?} {accident:?}");
    let scenario = Scenario::to_server(accident.at as u64, &[BYTES]);
    let mut server = Instructions::new(carrier.clone(), scenario);
    server.chunk_bytes = Some(CHUNK_BYTES);
    server.heartbeat = DEAD_AFTER / 5;
    server.dead_after = match accident.how {
        How::Kill => LONG,
        How::Stop | How::Rest => DEAD_AFTER,
    };
    let mut client = server.clone();
    match side {
        Side::Server => server.accident = Some(accident),
        Side::Client => client.accident = Some(accident),
    }
    let server = Peer::start(PEER, &server);
    client.connect = Some(server.address());
    let client = Peer::start(PEER, &client);
    let (victim, survivor) = match side {
        Side::Server => (server, client),
        Side::Client => (client, server),
    };
    match accident.how {
        How::Kill => {
            let ended = victim.finish(LONG);
            assert!(ended.was_killed(), "{what}: {ended:?}");
            check(&what, side, accident, &survivor.finish(LONG / 2));
        }
        How::Stop | How::Rest => {
            victim.wait_stopped(LONG);
            check(&what, side, accident, &survivor.finish(LONG / 2));
        }
    }
}

fn check(what: &str, side: Side, accident: Accident, ended: &Ended) {
    let summary = ended.summary();
    let late = accident.at == Point::BeforeClose;
    assert_eq!(summary.defects, [""; 0], "{what}");
    let errors = summary.failures.iter().map(|failure| &failure.error);
    let whole = [&summary.set_up, &summary.close].into_iter().flatten();
    for error in errors.chain(whole) {
        assert!(accident.explains(error), "{what}: {error}");
    }
    if late && (side == Side::Client || summary.failures.is_empty()) {
        // What was acknowledged is not lost; the goodbye may or may not have been answered. But a
        // receiver may end before it could tell the sender that it has everything.
        assert_eq!(summary.succeeded, 1, "{what}: {ended:?}");
    } else if let Some(set_up) = &summary.set_up {
        assert_eq!(accident.at, Point::Connected, "{what}: {set_up}");
    } else {
        assert_eq!(
            (summary.succeeded, summary.failures.len()),
            (0, 1),
            "{what}"
        );
        assert!(summary.close.is_some(), "{what}: {summary:?}");
    }
    for failure in &summary.failures {
        names_the_place(what, accident, failure);
    }
}

/// Peer, tag, chunk, offset, bytes done, and who owes the next step.
fn names_the_place(what: &str, accident: Accident, failure: &Failure) {
    let error = &failure.error;
    let has = |words: &str| error.contains(words);
    let must = |words: &str| assert!(has(words), "{what}: {words:?} is not in: {error}");
    if failure.kind == "ConnectionLost" {
        // It was lost before this side could start its transfer.
        assert!(
            matches!(accident.at, Point::Connected | Point::Started),
            "{what}: {error}"
        );
        return must("connection to 127.0.0.1:");
    }
    assert_eq!(failure.kind, "Operation", "{what}: {error}");
    must("peer 127.0.0.1:");
    must("tag 7000");
    if has("data channel failed: ") {
        // The chunk was on the wire when that broke.
        must(": chunk ");
        let place = "0 channel 0 offset ";
        let names = [": transfer ", ": transfer to window "];
        assert!(
            names.iter().any(|name| has(&format!("{name}{place}"))),
            "{what}: {error}"
        );
        return;
    }
    must(&format!(" of {BYTES} bytes done"));
    assert!(has(" must ") && has(" next"), "{what}: {error}");
    // Perhaps nothing has come yet, or the sender may not send yet.
    let early = [Point::Connected, Point::Started, Point::ChunkPosted];
    if !early.contains(&accident.at) {
        assert!(
            has("transfer 0 chunk ") || has("transfer to window 0 chunk "),
            "{what}: {error}"
        );
        must(" channel 0 offset ");
    }
}

#[test]
fn over_tcp() {
    accidents(&Carrier::Tcp);
}

#[test]
fn over_the_double() {
    accidents(&Carrier::double());
}
