//! What connections leave behind in a process: nothing.
//!
//! In a process of its own, because descriptors and threads are the whole process's.

use std::sync::Arc;

use tcpx::{Connection, TcpNetwork};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::child;
use tcpx_tests::content::Content;
use tcpx_tests::double;
use tcpx_tests::faults::count;
use tcpx_tests::pair::{LONG, Listening, close, double_network};
use tcpx_tests::support::wait;

/// Connections after which what the process shares is there.
const WARM_UP: u64 = 5;

/// What the allocator may keep of them, however many they were.
const MOST_GROWTH_MIB: u64 = 32;

/// Open descriptors and threads.
fn resources() -> (usize, usize) {
    let count = |folder| {
        let entries = std::fs::read_dir(folder).expect("the system tells");
        entries.count()
    };
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Mebibytes of the process's memory that are in RAM.
fn memory() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("the system tells");
    let pages = pages.split(' ').nth(1).and_then(|field| field.parse().ok());
    pages.map_or(0, |pages: u64| (pages * 4096) >> 20)
}

fn use_and_close(listening: &Listening, number: u64) {
    let (server, client) = listening.connect();
    // More than travels with its announcement.
    let bytes = 200_000 + number;
    let content = Content::new(8, number);
    let source = Source::new(content, bytes, 0);
    let destination = Destination::new(bytes, 0);
    let run = |from: &Connection, to: &Connection| {
        let receive = to.receive(destination.slice(), 1).start().expect("room");
        let send = from.send(source.slice(), 1).start().expect("room");
        send.wait().expect("it arrives");
        receive.wait().expect("it arrives");
        assert_eq!(destination.defect(content), None);
        destination.poison();
    };
    run(&client, &server);
    run(&server, &client);
    match number % 3 {
        0 => close(server, client),
        1 => drop((server, client)),
        _ => {
            drop(client);
            // The peer's goodbye may have ended it before.
            let _ = server.close(LONG);
        }
    }
}

fn return_to_the_baseline(listening: &Listening, connections: u64) {
    for number in 0..WARM_UP {
        use_and_close(listening, number);
    }
    // Dropped connections say goodbye in the background.
    let settled = || {
        let mut last = resources();
        wait(LONG, "the warm-up to settle", || {
            let now = resources();
            let same = now == last;
            last = now;
            same.then_some(now)
        })
    };
    let (before, memory_before) = (settled(), memory());
    for number in 0..connections {
        use_and_close(listening, number);
    }
    let mut last = resources();
    let deadline = std::time::Instant::now() + LONG;
    while last.0 > before.0 || last.1 > before.1 {
        assert!(
            std::time::Instant::now() < deadline,
            "descriptors and threads: {before:?} before, {last:?} after {connections} connections"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
        last = resources();
    }
    let memory_after = memory();
    println!(
        "{}",
        serde_json::json!({
            "what": "connects and closes", "times": connections,
            "before": { "descriptors": before.0, "threads": before.1, "mib": memory_before },
            "after": { "descriptors": last.0, "threads": last.1, "mib": memory_after },
        })
    );
    assert!(
        memory_after <= memory_before + MOST_GROWTH_MIB,
        "{memory_before} MiB before, {memory_after} after {connections} connections"
    );
}

#[test]
fn connections_give_descriptors_and_threads_back() {
    child::run(&[], || {
        let listening = Listening::new(double_network(), |_| {}, |_| {});
        let before = double::stats();
        return_to_the_baseline(&listening, 60);
        // The last goodbye may still be under way.
        wait(LONG, "the plugin's comms to be closed", || {
            let after = double::stats();
            let same = (after.open_comms, after.registrations)
                == (before.open_comms, before.registrations);
            same.then_some(())
        });
        let listening = Listening::new(Arc::new(TcpNetwork::default()), |_| {}, |_| {});
        return_to_the_baseline(&listening, count("connects", 300));
    });
}
