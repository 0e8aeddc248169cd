//! A process that rests for a while in the middle of a transfer, as under a debugger or while a
//! machine is moved: the transfer goes on behind that as if nothing had been.

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tcpx_tests::accident::{Accident, How, Point};
use tcpx_tests::faults::count;
use tcpx_tests::instructions::{Carrier, Instructions};
use tcpx_tests::process::{Ended, Peer};
use tcpx_tests::proxy::{Fault, Line, Proxy};
use tcpx_tests::scenario::{Scenario, Side};
use tcpx_tests::support::wait;

const PEER: &str = env!("CARGO_BIN_EXE_peer");
/// Longer than a lane may stall, and than the control connection may be silent before the
/// client opens another one; less than the silence of a dead peer.
fn rest() -> Duration {
    Duration::from_secs(count("rest", 5))
}
/// For everything before the rest, and for what comes behind it.
const LONG: Duration = Duration::from_secs(300);

/// More than all windows hold, so that chunks of every lane are under way.
const BYTES: u64 = 64 << 20;
const CHUNK_BYTES: u32 = 256 << 10;
const LANES: u16 = 4;

/// Bytes after which one lane is held up.
const HELD_AFTER: u64 = 5 << 20;
/// The others have used up what may be under way behind the oldest chunk when nothing moved for so
/// long.
const STILL: Duration = Duration::from_millis(300);
const HELD: u16 = 1;
/// Some looks at the lane, and less than it may stall.
const HELD_FURTHER: Duration = Duration::from_secs(1);
/// What the lane stalls in all beside the rest: less than the three seconds that it may.
const AT_MOST: Duration = Duration::from_millis(2500);

struct Peers {
    server: Peer,
    client: Peer,
    proxy: Proxy,
}

impl Peers {
    /// The sender is the client, the receiver the server; one of them may have an accident.
    fn start(seed: u64, accident: Option<(Side, Accident)>, held: bool) -> Self {
        let scenario = Scenario::to_server(seed, &[BYTES, BYTES]);
        let mut server = Instructions::new(Carrier::Tcp, scenario);
        server.channels = LANES;
        server.chunk_bytes = Some(CHUNK_BYTES);
        server.dead_after = 2 * rest();
        let mut client = server.clone();
        match accident {
            Some((Side::Server, accident)) => server.accident = Some(accident),
            Some((Side::Client, accident)) => client.accident = Some(accident),
            None => {}
        }
        let server = Peer::start(PEER, &server);
        let proxy = Proxy::start(server.address());
        if held {
            proxy.break_line(Line::Lane(HELD), HELD_AFTER, Fault::Stall);
        }
        client.connect = Some(proxy.address());
        let client = Peer::start(PEER, &client);
        Self {
            server,
            client,
            proxy,
        }
    }

    fn of(&self, side: Side) -> &Peer {
        match side {
            Side::Server => &self.server,
            Side::Client => &self.client,
        }
    }

    fn carried_beside_the_held(&self) -> u64 {
        let others = (0..LANES).filter(|lane| *lane != HELD);
        others
            .map(|lane| self.proxy.carried(Line::Lane(lane)))
            .sum()
    }

    fn end(self) -> [Ended; 2] {
        [self.client.finish(LONG), self.server.finish(LONG)]
    }

    fn end_with_all_lanes(self, what: &str) {
        for ended in self.end() {
            let summary = ended.good();
            let lost = (summary.lanes_lost, summary.chunks_resent);
            let log = &ended.log;
            assert_eq!(lost, (0, 0), "{what}: {summary:#?}; it logged:\n{log}");
        }
    }
}

/// A process rests from a point of the protocol on.
fn rests(side: Side, at: Point) {
    let how = How::Rest;
    let peers = Peers::start(at as u64, Some((side, Accident { at, how })), false);
    peers.of(side).wait_stopped(LONG);
    // The rest is what is tested.
    thread::sleep(rest());
    peers.of(side).signal(Signal::CONT);
    peers.end_with_all_lanes(&format!("{side:?} at {at:?}"));
}

/// A process rests while one lane is behind the others, as lanes are that share a loop: by the
/// clock alone it has then stalled for longer than a lane may.
fn rests_with_a_lane_behind(side: Side) {
    let peers = Peers::start(99, None, true);
    wait(LONG, "the lane to be held up", || {
        (peers.proxy.carried(Line::Lane(HELD)) >= HELD_AFTER).then_some(())
    });
    let held = Instant::now();
    let mut carried = (peers.carried_beside_the_held(), Instant::now());
    wait(LONG, "the other lanes to wait for it", || {
        let now = peers.carried_beside_the_held();
        if now != carried.0 {
            carried = (now, Instant::now());
        }
        (carried.1.elapsed() >= STILL).then_some(())
    });
    peers.of(side).stop();
    thread::sleep(rest());
    peers.of(side).signal(Signal::CONT);
    // Nor does the rest count once the process is heard again: the lane has its time anew.
    thread::sleep(HELD_FURTHER);
    peers.proxy.wake(Line::Lane(HELD));
    let what = format!("{side:?} with a lane behind");
    // On a busy machine all this may take longer than a lane may stall.
    if held.elapsed() < rest() + AT_MOST {
        peers.end_with_all_lanes(&what);
    } else {
        for ended in peers.end() {
            ended.good();
        }
    }
}

fn rests_everywhere(side: Side, points: [Point; 2]) {
    thread::scope(|scope| {
        for at in points {
            scope.spawn(move || rests(side, at));
        }
        scope.spawn(move || rests_with_a_lane_behind(side));
    });
}

#[test]
fn a_receiver_that_rests_loses_no_lane() {
    rests_everywhere(Side::Server, [Point::ChunkPlaced, Point::HalfPlaced]);
}

#[test]
fn a_sender_that_rests_loses_no_lane() {
    rests_everywhere(Side::Client, [Point::ChunkPosted, Point::ChunkSent]);
}
