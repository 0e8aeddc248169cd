//! A process that rests for a while in the middle of a transfer, as under a debugger or while a machine
//! is moved: the transfer goes on behind that as if nothing had been.

use std::thread;
use std::time::Duration;

use tcpx_tests::accident::{Accident, How, Point};
use tcpx_tests::instructions::{Carrier, Instructions};
use tcpx_tests::process::Peer;
use tcpx_tests::scenario::{Scenario, Side};

const PEER: &str = env!("CARGO_BIN_EXE_peer");
/// Longer than a lane may stand still, and than the control connection may be silent before the
/// client opens another one; less than the silence of a dead peer.
const REST: Duration = Duration::from_secs(5);
const DEAD_AFTER: Duration = Duration::from_secs(10);
/// For everything before the rest, and for what comes behind it.
const LONG: Duration = Duration::from_secs(60);

/// More than all windows hold, so that chunks of every lane are under way.
const BYTES: u64 = 64 << 20;
const CHUNK_BYTES: u32 = 256 << 10;
const LANES: u16 = 4;

/// The sender is the client, the receiver the server.
fn rests(side: Side, at: Point) {
    let what = format!("{side:?} at {at:?}");
    let how = How::Rest;
    let scenario = Scenario::to_server(at as u64, &[BYTES, BYTES]);
    let mut server = Instructions::new(Carrier::Tcp, scenario);
    server.channels = LANES;
    server.chunk_bytes = Some(CHUNK_BYTES);
    server.dead_after = DEAD_AFTER;
    let mut client = server.clone();
    match side {
        Side::Server => server.accident = Some(Accident { at, how }),
        Side::Client => client.accident = Some(Accident { at, how }),
    }
    let server = Peer::start(PEER, &server);
    client.connect = Some(server.address());
    let client = Peer::start(PEER, &client);
    let resting = match side {
        Side::Server => &server,
        Side::Client => &client,
    };
    resting.wait_stopped(LONG);
    // The rest is what is tested.
    thread::sleep(REST);
    resting.go_on();
    for ended in [client.finish(LONG), server.finish(LONG)] {
        let summary = ended.good();
        let lost = (summary.lanes_lost, summary.chunks_resent);
        assert_eq!(
            lost,
            (0, 0),
            "{what}: {summary:#?}; it logged:\n{}",
            ended.log
        );
    }
}

#[test]
fn a_receiver_that_rests_loses_no_lane() {
    thread::scope(|scope| {
        for at in [Point::ChunkPlaced, Point::HalfPlaced] {
            scope.spawn(move || rests(Side::Server, at));
        }
    });
}

#[test]
fn a_sender_that_rests_loses_no_lane() {
    thread::scope(|scope| {
        for at in [Point::ChunkPosted, Point::ChunkSent] {
            scope.spawn(move || rests(Side::Client, at));
        }
    });
}
