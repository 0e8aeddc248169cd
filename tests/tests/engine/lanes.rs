//! Lanes that break in the middle of a transfer: it completes, every byte in place, and what the
//! dead lane still has goes nowhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tcpx::{Auth, Connection, Endpoint, Level, Options, TcpNetwork};
use tcpx_net::{ChannelStats, Lend, TcpOptions};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::child;
use tcpx_tests::content::Content;
use tcpx_tests::pair::{LONG, close, new_key};
use tcpx_tests::proxy::{Fault, Line, Proxy};
use tcpx_tests::support::wait;

const LANES: u16 = 4;
const BYTES: u64 = 24 << 20;
/// A lane has carried some chunks by then and is in the middle of one.
const BREAK_AFTER: u64 = (1 << 20) + 77_777;
/// Silence after which a side gives the other up; two fifths of it and it tries another way.
const DEAD_AFTER: Duration = Duration::from_secs(15);
/// Bytes of a control connection beyond its set-up: some transfers' worth.
const BREAK_CONTROL_AFTER: u64 = 4_003;
/// Transfers within which every lane carries that much.
const MOST: u64 = 50;

struct Ends {
    server: Connection,
    client: Connection,
    proxy: Proxy,
    _endpoint: Endpoint,
}

fn connect(stage_host: bool) -> Ends {
    connect_with(LANES, stage_host, Some(256 << 10))
}

/// Without a size chunks have that of the network, and become shorter towards the end.
fn connect_with(lanes: u16, stage_host: bool, chunk_bytes: Option<u32>) -> Ends {
    let network = TcpOptions {
        stage_host,
        // Both ends are here, and trust each other.
        lend: Lend::Always,
        ..TcpOptions::default()
    };
    connect_over(network, lanes, chunk_bytes)
}

fn connect_over(network: TcpOptions, lanes: u16, chunk_bytes: Option<u32>) -> Ends {
    let network = TcpNetwork::new(network);
    let mut options = Options::new(Arc::new(network), Auth::Key(new_key()));
    options.channels = lanes;
    options.chunk_bytes = chunk_bytes;
    options.heartbeat = Duration::from_millis(300);
    options.dead_after = DEAD_AFTER;
    // A busy machine finds late that a lane stalls.
    options.deadlines.stall = 10 * LONG;
    let endpoint =
        Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone()).expect("a free port");
    let proxy = Proxy::start(endpoint.local_addr());
    let address = proxy.address();
    let client = thread::spawn(move || Endpoint::connect(address, &options));
    let server = endpoint.accept(LONG).expect("the client connects");
    let client = client.join().expect("no panic").expect("it listens");
    Ends {
        server,
        client,
        proxy,
        _endpoint: endpoint,
    }
}

/// One transfer, compared byte by byte and by checksum.
fn transfer(from: &Connection, to: &Connection, number: u64) -> Destination {
    let content = Content::new(9, number);
    let source = Source::new(content, BYTES, 0);
    let destination = Destination::new(BYTES, 17);
    let receive = to
        .receive(destination.slice(), number)
        .level(Level::Verified)
        .start()
        .expect("room");
    let send = from.send(source.slice(), number).start().expect("room");
    send.wait().expect("the other lanes carry it");
    receive.wait().expect("the other lanes carry it");
    assert_eq!(destination.defect(content), None);
    destination
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    wait(LONG, what, || condition().then_some(()));
}

fn sum(ends: &Ends) -> ChannelStats {
    let mut both = ends.server.statistics();
    both += ends.client.statistics();
    both
}

/// A transfer during which lanes break; upwards the client sends.
fn breaks(fault: Fault, lanes: &[u16], upwards: bool, stage_host: bool) {
    breaks_of(LANES, fault, lanes, upwards, stage_host);
}

/// As [`breaks`], of a connection with so many lanes.
fn breaks_of(count: u16, fault: Fault, lanes: &[u16], upwards: bool, stage_host: bool) {
    let what = format!("{fault:?} of {lanes:?}, upwards: {upwards}, staged: {stage_host}");
    let ends = connect_with(count, stage_host, Some(256 << 10));
    for lane in lanes {
        ends.proxy.break_line(Line::Lane(*lane), BREAK_AFTER, fault);
    }
    let (from, to) = match upwards {
        true => (&ends.client, &ends.server),
        false => (&ends.server, &ends.client),
    };
    // Which lane carries how much of a transfer is for the lanes to decide.
    let struck = |lane: &u16| ends.proxy.carried(Line::Lane(*lane)) >= BREAK_AFTER;
    let mut destinations = Vec::new();
    while !lanes.iter().all(struck) {
        let number = destinations.len() as u64 + 1;
        destinations.push(transfer(from, to, number));
        assert!(number < MOST, "{what}: a lane carries nothing");
    }
    let stats = from.statistics();
    assert!(stats.chunks_resent > 0, "{what}: {stats:?}");
    // What was held up comes now; the destination is the program's again and stays as it is.
    for lane in lanes {
        ends.proxy.wake(Line::Lane(*lane));
    }
    wait_until(&what, || {
        let dead = lanes
            .iter()
            .all(|lane| ends.proxy.opened(Line::Lane(*lane)) > 1);
        // On a busy machine one may count as dead a second time.
        dead && ends.client.statistics().lanes_restored >= lanes.len() as u64
            && ends.server.statistics().lanes_restored >= lanes.len() as u64
    });
    for (number, destination) in (1..).zip(&destinations) {
        assert_eq!(destination.defect(Content::new(9, number)), None, "{what}");
    }
    // The lanes that came back carry their part.
    let before: Vec<_> = lanes
        .iter()
        .map(|lane| ends.proxy.carried(Line::Lane(*lane)))
        .collect();
    let mut number = destinations.len() as u64 + 1;
    let most = number + MOST;
    while lanes
        .iter()
        .zip(&before)
        .any(|(lane, before)| ends.proxy.carried(Line::Lane(*lane)) == *before)
    {
        transfer(from, to, number);
        number += 1;
        assert!(
            number < most,
            "{what}: a lane that came back carries nothing"
        );
    }
    assert!(sum(&ends).lanes_lost >= lanes.len() as u64, "{what}");
    close(ends.server, ends.client);
}

#[test]
fn a_lane_that_is_reset() {
    breaks(Fault::Reset, &[1], true, false);
    breaks(Fault::Reset, &[2], false, true);
}

#[test]
fn a_lane_that_is_closed_in_mid_chunk() {
    breaks(Fault::Close, &[0], true, true);
    breaks(Fault::Close, &[3], false, false);
}

#[test]
fn a_lane_that_stalls_and_wakes_up_late() {
    breaks(Fault::Stall, &[1], true, false);
    breaks(Fault::Stall, &[1], false, true);
}

#[test]
fn a_lane_that_swallows_everything_and_wakes_up_late() {
    breaks(Fault::Swallow, &[0], true, true);
    breaks(Fault::Swallow, &[2], false, false);
}

#[test]
fn all_lanes_but_one() {
    breaks(Fault::Reset, &[0, 1, 2], true, false);
    breaks(Fault::Stall, &[1, 2, 3], false, false);
}

/// Lanes that break one after the other, some of them among the last and shorter chunks.
#[test]
fn lanes_that_break_while_chunks_become_shorter() {
    for (stage_host, fault) in [(false, Fault::Reset), (true, Fault::Close)] {
        let ends = connect_with(LANES, stage_host, None);
        let breaks_after = |lane: u16| u64::from(lane) * (4 << 20) + BREAK_AFTER;
        for lane in 1..LANES {
            ends.proxy
                .break_line(Line::Lane(lane), breaks_after(lane), fault);
        }
        let struck = || {
            let carried = |lane| ends.proxy.carried(Line::Lane(lane));
            (1..LANES).all(|lane| carried(lane) >= breaks_after(lane))
        };
        let mut number = 0;
        while !struck() {
            number += 1;
            assert!(number < MOST, "a lane carries nothing");
            transfer(&ends.client, &ends.server, number);
        }
        let stats = ends.client.statistics();
        // 21 chunks of 1 MiB, four of a half and four of a quarter, and no others.
        assert_eq!(ends.server.statistics().chunks_received, 29 * number);
        assert!(stats.chunks_resent > 0, "{fault:?}: {stats:?}");
        close(ends.server, ends.client);
    }
}

/// Transfers run in both directions at once while every lane but one breaks, one after the other,
/// so that slots whose pages a dead lane still has are filled with something else at once.
fn slots_break(fault: Fault) {
    let what = format!("{fault:?}");
    let ends = connect(true);
    for lane in 1..LANES {
        let after = u64::from(lane) * (BREAK_AFTER + 3_333);
        ends.proxy.break_line(Line::Lane(lane), after, fault);
    }
    let struck = || {
        (1..LANES).all(|lane| {
            let after = u64::from(lane) * (BREAK_AFTER + 3_333);
            ends.proxy.carried(Line::Lane(lane)) >= after
        })
    };
    let run = |from: &Connection, to: &Connection, first: u64| {
        let mut destinations = Vec::new();
        let mut number = first;
        let mut left = 4;
        while left > 0 {
            left -= u32::from(struck());
            destinations.push((number, transfer(from, to, number)));
            number += 1;
            assert!(number < first + MOST, "{what}: a lane carries nothing");
        }
        destinations
    };
    let destinations = thread::scope(|scope| {
        let (server, client) = (&ends.server, &ends.client);
        let runs = [
            (client, server, 1_000),
            (client, server, 2_000),
            (server, client, 3_000),
        ]
        .map(|(from, to, first)| scope.spawn(move || run(from, to, first)));
        runs.map(|run| run.join().expect("every transfer ends well"))
    });
    let stats = sum(&ends);
    assert!(stats.chunks_resent > 0, "{what}: {stats:?}");
    assert!(stats.bytes_spliced > 0, "{what}: {stats:?}");
    for lane in 1..LANES {
        ends.proxy.wake(Line::Lane(lane));
    }
    let restored = u64::from(LANES) - 1;
    wait_until(&what, || {
        ends.client.statistics().lanes_restored >= restored
            && ends.server.statistics().lanes_restored >= restored
    });
    for (number, destination) in destinations.iter().flatten() {
        assert_eq!(destination.defect(Content::new(9, *number)), None, "{what}");
    }
    close(ends.server, ends.client);
}

#[test]
fn slots_of_lanes_that_are_reset_or_closed() {
    slots_break(Fault::Reset);
    slots_break(Fault::Close);
}

#[test]
fn slots_of_lanes_that_stall() {
    slots_break(Fault::Stall);
}

#[test]
fn slots_of_lanes_that_swallow_everything() {
    slots_break(Fault::Swallow);
}

/// The control connection breaks while transfers run one after the other in both directions.
fn control_breaks(fault: Fault, also_a_lane: bool) {
    let what = format!("{fault:?}, also a lane: {also_a_lane}");
    let ends = connect(false);
    ends.proxy
        .break_line(Line::Control, BREAK_CONTROL_AFTER, fault);
    if also_a_lane {
        ends.proxy
            .break_line(Line::Lane(0), BREAK_AFTER, Fault::Stall);
    }
    let mut number = 1;
    let mut most = MOST;
    while ends.proxy.opened(Line::ControlAgain) == 0 || most > number + 3 {
        if ends.proxy.opened(Line::ControlAgain) > 0 {
            // A few more, over the connection that took its place.
            most = most.min(number + 3);
        }
        transfer(&ends.client, &ends.server, number);
        transfer(&ends.server, &ends.client, number);
        number += 1;
        assert!(number < MOST, "{what}: it never broke");
    }
    assert!(
        ends.proxy.carried(Line::Control) >= BREAK_CONTROL_AFTER,
        "{what}"
    );
    ends.proxy.wake(Line::Control);
    transfer(&ends.client, &ends.server, MOST + 1);
    close(ends.server, ends.client);
}

#[test]
fn a_control_connection_that_is_reset() {
    control_breaks(Fault::Reset, false);
}

#[test]
fn a_control_connection_that_is_closed() {
    control_breaks(Fault::Close, true);
}

#[test]
fn a_control_connection_that_stalls_and_wakes_up_late() {
    control_breaks(Fault::Stall, false);
}

#[test]
fn a_control_connection_that_swallows_everything() {
    control_breaks(Fault::Swallow, true);
}

#[test]
fn all_lanes_at_once() {
    let all: Vec<u16> = (0..LANES).collect();
    breaks(Fault::Reset, &all, true, false);
    breaks(Fault::Close, &all, false, true);
}

#[test]
fn the_only_lane() {
    breaks_of(1, Fault::Reset, &[0], true, false);
    breaks_of(1, Fault::Close, &[0], false, true);
    breaks_of(1, Fault::Reset, &[0], false, true);
}

#[test]
fn the_only_lane_that_stalls_or_swallows_everything() {
    breaks_of(1, Fault::Stall, &[0], true, true);
    breaks_of(1, Fault::Swallow, &[0], true, false);
}

/// The client, which could dial them, has nothing to send and hears of nothing: it is asked to.
#[test]
fn lanes_that_swallow_all_while_the_server_sends() {
    breaks_of(1, Fault::Stall, &[0], false, true);
    breaks_of(1, Fault::Swallow, &[0], false, false);
    breaks_of(2, Fault::Swallow, &[0, 1], false, false);
}

/// As on a host with two cores, and by whichever side has something to send: the client alone can
/// open lanes.
#[test]
fn the_second_of_two_lanes_is_opened_once_there_is_work_for_it() {
    child::run(&[], || {
        for upwards in [true, false] {
            let network = TcpOptions {
                loops: 2,
                ..TcpOptions::default()
            };
            let ends = connect_over(network, 0, None);
            let streams = |end: &Connection| end.statistics().streams;
            assert_eq!((streams(&ends.client), streams(&ends.server)), (1, 1));
            assert_eq!(ends.proxy.opened(Line::Lane(1)), 0);
            let (from, to) = match upwards {
                true => (&ends.client, &ends.server),
                false => (&ends.server, &ends.client),
            };
            let mut number = 0;
            while streams(&ends.client) < 2 || streams(&ends.server) < 2 {
                number += 1;
                assert!(number < 10_000, "upwards: {upwards}: it was never opened");
                transfer(from, to, number);
            }
            while ends.proxy.carried(Line::Lane(1)) < BREAK_AFTER {
                number += 1;
                assert!(number < 20_000, "upwards: {upwards}: it carries nothing");
                transfer(from, to, number);
            }
            // It did not come back. On a busy machine a lane may count as dead, and then does.
            let stats = sum(&ends);
            assert!(stats.lanes_restored <= stats.lanes_lost, "{stats:?}");
            close(ends.server, ends.client);
        }
    });
}

/// Says so when it is dropped, also by a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// It costs speed, not the transfer.
#[test]
fn a_lane_that_is_reset_ten_times_a_second() {
    for lanes in [1, 2] {
        let ends = connect_with(lanes, false, Some(64 << 10));
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let _over = Over(&over);
            scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    ends.proxy.reset(Line::Lane(0));
                    thread::sleep(Duration::from_millis(100));
                }
            });
            let mut number = 0;
            // Each reset may have come between two chunks.
            while ends.proxy.opened(Line::Lane(0)) < 10 || sum(&ends).chunks_resent == 0 {
                number += 1;
                assert!(number < 100_000, "{lanes} lanes: nothing was sent again");
                transfer(&ends.client, &ends.server, number);
                transfer(&ends.server, &ends.client, number);
            }
        });
        close(ends.server, ends.client);
    }
}

/// The error comes when the time is over that a peer may be silent.
#[test]
fn no_lane_comes_back() {
    for lanes in [1, LANES] {
        let ends = connect_with(lanes, false, Some(256 << 10));
        for lane in 0..lanes {
            ends.proxy
                .break_line(Line::Lane(lane), BREAK_AFTER, Fault::Reset);
            ends.proxy.refuse(Line::Lane(lane));
        }
        let source = Source::new(Content::new(9, 1), 4 * BYTES, 0);
        let destination = Destination::new(4 * BYTES, 17);
        let receive = ends.server.receive(destination.slice(), 1).start().unwrap();
        let send = ends.client.send(source.slice(), 1).start().unwrap();
        let errors = [send.wait().unwrap_err(), receive.wait().unwrap_err()];
        let texts = errors.map(|error| error.to_string());
        let told = format!("no lane is left of {lanes}");
        assert!(texts.iter().any(|text| text.contains(&told)), "{texts:?}");
    }
}

/// Each has more under way than it can have slots.
#[test]
fn peers_that_do_not_read_keep_no_slots_from_others() {
    let good = connect(true);
    let source = Source::new(Content::new(9, 1), 100 << 20, 0);
    let stalled: Vec<_> = (0..4)
        .map(|_| {
            let destination = Destination::new(100 << 20, 0);
            let ends = connect_with(2, true, None);
            for lane in 0..2 {
                ends.proxy
                    .break_line(Line::Lane(lane), BREAK_AFTER, Fault::Stall);
                ends.proxy.refuse(Line::Lane(lane));
            }
            let receive = ends.server.receive(destination.slice(), 1).start();
            let receive = receive.expect("room");
            let send = ends.client.send(source.slice(), 1).start().expect("room");
            wait_until("a lane to stall", || {
                ends.proxy.carried(Line::Lane(0)) >= BREAK_AFTER
            });
            (ends, receive, send)
        })
        .collect();
    for number in 1..4 {
        transfer(&good.client, &good.server, number);
        transfer(&good.server, &good.client, number);
    }
    drop(stalled);
    close(good.server, good.client);
}
