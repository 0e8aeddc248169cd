//! Engine transfers over the device-memory network, with a kernel that replays what a real one may
//! do.

use std::sync::{Arc, Mutex};

use tcpx::{Connection, Event, Level, Observer, Region};
use tcpx_tests::content::Content;
use tcpx_tests::fake_kernel::{Counts, FakeKernel, FaultPlan, Reports};
use tcpx_tests::pair::{Listening, close};

const POOL: usize = 8 << 20;

/// Sizes that end before, at and behind the ends of packets, pages and chunks.
const SIZES: [u64; 8] = [
    1,
    1448,
    4096,
    100_000,
    (1 << 20) - 1,
    1 << 20,
    (3 << 20) + 5,
    20 << 20,
];

/// Notes changes of path.
#[derive(Debug, Default)]
struct Changes(Mutex<Vec<String>>);

impl Observer for Changes {
    fn event(&self, event: &Event) {
        if let Event::PathChanged { why, .. } = event {
            self.0.lock().expect("no panic").push(why.clone());
        }
    }
}

/// Sends each size from one end to the other, and checks every byte.
fn transfer(from: &Connection, to: &Connection, seed: u64, sizes: &[u64]) {
    let mut started = Vec::new();
    for (number, bytes) in (0u64..).zip(sizes) {
        let content = Content::new(seed, number);
        let length = usize::try_from(*bytes).expect("it fits");
        let (source, target) = (
            Region::host(length).expect("memory"),
            Region::host(length).expect("memory"),
        );
        source
            .with_bytes_mut(.., |bytes| content.fill(0, bytes))
            .expect("ours");
        target
            .with_bytes_mut(.., |bytes| bytes.fill(0x5a))
            .expect("ours");
        let receive = to.receive(target.all(), number).start().expect("it starts");
        let send = from.send(source.all(), number).start().expect("it starts");
        started.push((send, receive, target, content));
    }
    for (send, receive, target, content) in started {
        let sent = send.wait().expect("it ends well");
        let received = receive.wait().expect("it ends well");
        assert_eq!((sent.level, received.level), (Level::Placed, Level::Placed));
        let difference = target.with_bytes(.., |bytes| content.difference(0, bytes));
        assert_eq!(difference.expect("ours"), None);
    }
}

/// What a test's two ends saw.
struct Seen {
    counts: Counts,
    changes: Vec<String>,
    path: String,
    bytes_in_pool: u64,
    lanes_lost: u64,
}

/// Both directions at once, into a pool of `pool` bytes under this fault_plan at both ends.
fn run(pool: usize, fault_plan: FaultPlan, sizes: &[u64]) -> Seen {
    let (server_kernel, server_network) = FakeKernel::network(pool, fault_plan.clone());
    let (client_kernel, client_network) = FakeKernel::network(pool, fault_plan);
    let changes = Arc::new(Changes::default());
    let observer = Arc::clone(&changes);
    let listening = Listening::new(
        server_network,
        |server| {
            server.channels = 2;
            server.observer = Some(observer);
        },
        |client| {
            client.channels = 2;
            client.network = client_network;
        },
    );
    let (server, client) = listening.connect();
    assert_eq!((server_kernel.steered(), client_kernel.steered()), (2, 2));
    std::thread::scope(|scope| {
        scope.spawn(|| transfer(&client, &server, 1, sizes));
        transfer(&server, &client, 2, sizes);
    });
    let seen = Seen {
        counts: server_kernel.counts(),
        changes: changes.0.lock().expect("no panic").clone(),
        path: server.path(),
        bytes_in_pool: server.statistics().bytes_in_pool,
        lanes_lost: server.statistics().lanes_lost,
    };
    close(server, client);
    assert_eq!((server_kernel.steered(), client_kernel.steered()), (0, 0));
    seen
}

/// As [`run`], where nothing but device memory is to be expected.
fn run_undisturbed(pool: usize, fault_plan: FaultPlan, sizes: &[u64]) -> Counts {
    let seen = run(pool, fault_plan, sizes);
    assert_eq!(seen.changes, Vec::<String>::new());
    assert!(seen.path.contains("queue 1 of lo"), "{}", seen.path);
    assert_eq!(seen.bytes_in_pool, seen.counts.device_bytes);
    assert_eq!(seen.counts.strange_returns, 0);
    let total: u64 = sizes.iter().sum();
    assert_eq!(seen.counts.device_bytes + seen.counts.linear_bytes, total);
    seen.counts
}

#[test]
fn every_size_arrives_through_the_pool_in_both_directions() {
    let counts = run_undisturbed(POOL, FaultPlan::default(), &SIZES);
    assert!(counts.fragments > 18_000, "{counts:?}");
}

#[test]
fn tokens_go_back_together() {
    let counts = run_undisturbed(POOL, FaultPlan::default(), &[20 << 20]);
    assert!(counts.returns * 100 < counts.fragments, "{counts:?}");
}

#[test]
fn linear_bytes_among_fragments_find_their_place() {
    let fault_plan = FaultPlan {
        linear_every: Some(3),
        ..FaultPlan::default()
    };
    let counts = run_undisturbed(POOL, fault_plan, &SIZES);
    assert!(counts.linear_bytes > 500_000, "{counts:?}");
}

#[test]
fn packets_that_are_linear_throughout_are_data_too() {
    let fault_plan = FaultPlan {
        linear_every: Some(1),
        linear_bytes: 1448,
        ..FaultPlan::default()
    };
    let counts = run_undisturbed(POOL, fault_plan, &SIZES);
    assert_eq!(counts.fragments, 0);
}

#[test]
fn packed_pages_and_jumbo_packets_arrive() {
    for packet in [100, 1000, 4096] {
        let fault_plan = FaultPlan {
            packet,
            packed: true,
            ..FaultPlan::default()
        };
        run_undisturbed(POOL, fault_plan, &SIZES);
    }
}

#[test]
fn a_pool_smaller_than_a_chunk_starves_and_recovers() {
    // 64 pages: a chunk of 1 MiB needs 725 of them at this packet size.
    let counts = run_undisturbed(256 << 10, FaultPlan::default(), &[1 << 20, 5 << 20, 3]);
    assert!(counts.dry > 0, "{counts:?}");
}

#[test]
fn one_byte_packets_starve_the_pool_and_recover() {
    let fault_plan = FaultPlan {
        packet: 1,
        ..FaultPlan::default()
    };
    run_undisturbed(256 << 10, fault_plan, &[20_000, 1]);
}

#[test]
fn plain_bytes_in_the_middle_are_data_and_said_once() {
    let fault_plan = FaultPlan {
        plain: 700_001..5_000_000,
        ..FaultPlan::default()
    };
    let seen = run(POOL, fault_plan, &SIZES);
    assert_eq!(seen.counts.plain_bytes, 2 * (5_000_000 - 700_001));
    // One word for each channel.
    assert_eq!(seen.changes.len(), 2, "{:?}", seen.changes);
    assert!(seen.changes[0].contains("plain data"), "{:?}", seen.changes);
    assert!(seen.path.contains("host memory for now"), "{}", seen.path);
}

#[test]
fn the_path_follows_every_change() {
    let fault_plan = FaultPlan {
        plain: 700_001..2_000_000,
        fails_at: Some((3_000_000, libc::ENODEV)),
        ..FaultPlan::default()
    };
    let seen = run(POOL, fault_plan, &SIZES);
    assert!(
        seen.changes.iter().any(|why| why.contains("plain data")),
        "{:?}",
        seen.changes
    );
    assert!(seen.path.contains("over plain TCP"), "{}", seen.path);
}

#[test]
fn a_binding_that_ends_goes_on_as_plain_data() {
    let fault_plan = FaultPlan {
        plain: 1_000_003..u64::MAX,
        ..FaultPlan::default()
    };
    let seen = run(POOL, fault_plan, &SIZES);
    assert_eq!(seen.counts.device_bytes, 2 * 1_000_003);
}

/// What was not placed comes over the ordinary lane.
fn goes_on_over_plain_tcp(fault_plan: FaultPlan, words: &str) {
    let seen = run(POOL, fault_plan, &SIZES);
    assert_eq!(
        (seen.changes.len(), seen.lanes_lost),
        (2, 2),
        "{:?}",
        seen.changes
    );
    // The other end may have been the first to give the payload lane up.
    let told = seen.changes.iter().any(|why| why.contains(words));
    let peers = |why: &String| why.contains("the peer");
    assert!(told || seen.changes.iter().all(peers), "{:?}", seen.changes);
    assert!(seen.path.contains("over plain TCP"), "{}", seen.path);
}

#[test]
fn enodev_for_ever_moves_the_stream_to_plain_tcp() {
    for at in [0, 1, 1_234_567] {
        let fault_plan = FaultPlan {
            fails_at: Some((at, libc::ENODEV)),
            ..FaultPlan::default()
        };
        goes_on_over_plain_tcp(fault_plan, "mixed in one packet");
    }
}

#[test]
fn efault_moves_the_stream_to_plain_tcp() {
    let fault_plan = FaultPlan {
        fails_at: Some((3_000_000, libc::EFAULT)),
        linear_every: Some(5),
        ..FaultPlan::default()
    };
    goes_on_over_plain_tcp(fault_plan, "cannot hand the next bytes out");
}

#[test]
fn a_record_that_lies_moves_the_stream_to_plain_tcp() {
    let fault_plan = FaultPlan {
        lies_at: Some(2_000_000),
        ..FaultPlan::default()
    };
    goes_on_over_plain_tcp(fault_plan, "cannot be believed");
}

#[test]
fn tokens_that_the_kernel_refuses_move_the_stream_to_plain_tcp() {
    let fault_plan = FaultPlan {
        refuses_tokens_at: Some((5, libc::EINVAL)),
        ..FaultPlan::default()
    };
    goes_on_over_plain_tcp(fault_plan, "tokens cannot be given back");
}

#[test]
fn the_pages_of_a_closed_connection_serve_the_other_channel() {
    let fault_plan = FaultPlan {
        refuses_tokens_at: Some((1, libc::EINVAL)),
        ..FaultPlan::default()
    };
    // One page: the first channel to have it keeps it until its connection is closed.
    let seen = run(4096, fault_plan, &SIZES);
    assert_eq!(seen.changes.len(), 2, "{:?}", seen.changes);
    assert!(seen.path.contains("over plain TCP"), "{}", seen.path);
}

#[test]
fn errno_525_is_met_with_more_room() {
    let fault_plan = FaultPlan {
        too_small: 2,
        ..FaultPlan::default()
    };
    run_undisturbed(POOL, fault_plan, &SIZES[..5]);
}

#[test]
fn errno_525_for_ever_moves_the_stream_to_plain_tcp() {
    let fault_plan = FaultPlan {
        too_small: u32::MAX,
        ..FaultPlan::default()
    };
    goes_on_over_plain_tcp(fault_plan, "no room for one record");
}

#[test]
fn tokens_freed_in_part_are_given_back_again() {
    let fault_plan = FaultPlan {
        frees_at_most: 100,
        ..FaultPlan::default()
    };
    let seen = run(POOL, fault_plan, &SIZES);
    assert_eq!(seen.changes, Vec::<String>::new());
}

#[test]
fn bound_slots_are_kept_until_the_kernel_reports() {
    let fault_plan = FaultPlan {
        sends: true,
        ..FaultPlan::default()
    };
    let counts = run_undisturbed(POOL, fault_plan, &SIZES);
    assert!(counts.device_sends > 20, "{counts:?}");
    assert!(counts.reports > 0, "{counts:?}");
}

#[test]
fn a_send_that_finds_no_room_waits_for_a_report() {
    let fault_plan = FaultPlan {
        sends: true,
        no_room_every: Some(3),
        ..FaultPlan::default()
    };
    let counts = run_undisturbed(POOL, fault_plan, &SIZES);
    assert!(counts.no_room > 0, "{counts:?}");
}

#[test]
fn a_refused_send_moves_the_stream_to_plain_tcp() {
    let fault_plan = FaultPlan {
        sends: true,
        send_fails_at: Some((5, libc::EINVAL)),
        ..FaultPlan::default()
    };
    goes_on_over_plain_tcp(fault_plan, "out of device memory failed");
}

#[test]
fn reports_that_come_in_another_order_free_each_slot_once() {
    let fault_plan = FaultPlan {
        sends: true,
        reports: Reports::Backwards,
        ..FaultPlan::default()
    };
    let counts = run_undisturbed(POOL, fault_plan, &SIZES);
    assert!(counts.reports > 0, "{counts:?}");
}

#[test]
fn a_slot_that_the_card_has_not_let_go_of_is_never_used_again() {
    let fault_plan = FaultPlan {
        sends: true,
        send_fails_at: Some((2, libc::EINVAL)),
        reports: Reports::Never,
        ..FaultPlan::default()
    };
    let (kernel, network) = FakeKernel::network(POOL, fault_plan);
    let listening = Listening::new(network, |_| (), |_| ());
    for round in 0..2 {
        let (server, client) = listening.connect();
        transfer(&client, &server, round, &[3 << 20]);
        close(server, client);
    }
    let counts = kernel.counts();
    assert!(counts.device_sends > 2, "both rounds sent: {counts:?}");
    assert_eq!(counts.reused_early, 0, "{counts:?}");
}

#[test]
fn a_side_without_a_queue_receives_through_host_memory() {
    let (kernel, network) = FakeKernel::network(POOL, FaultPlan::default());
    let listening = Listening::new(
        network,
        |_| (),
        |client| {
            let options = tcpx_devmem::DevmemOptions::default();
            let plain = tcpx_devmem::DevmemNetwork::new(options).expect("a network");
            client.network = Arc::new(plain);
        },
    );
    let (server, client) = listening.connect();
    assert!(client.path().contains("host memory"), "{}", client.path());
    transfer(&server, &client, 3, &SIZES);
    transfer(&client, &server, 4, &SIZES);
    assert_eq!(client.statistics().bytes_in_pool, 0);
    assert_eq!(kernel.counts().device_bytes, SIZES.iter().sum::<u64>());
    close(server, client);
}

#[test]
fn nothing_is_held_between_transfers() {
    let (kernel, network) = FakeKernel::network(POOL, FaultPlan::default());
    let listening = Listening::new(network, |_| (), |_| ());
    let (server, client) = listening.connect();
    for round in 0..20 {
        transfer(&client, &server, round, &[1, 5000, 300_000]);
    }
    close(server, client);
    // Closing a socket gives its tokens back; all were given back before that.
    assert_eq!(
        (kernel.tokens_held(), kernel.counts().freed_by_close),
        (0, 0)
    );
}
