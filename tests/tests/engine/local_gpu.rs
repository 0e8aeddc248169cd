//! Two ends on one host: payload in memory of a GPU is copied from where it lies, within a process
//! and between two.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use rustix::process::Signal;
use tcpx::{Auth, Connection, Key, Level, Options, Region, Rights, Transfer, WindowKey};
use tcpx_memory::{Gpu, fake_driver, peer_mappings};
use tcpx_net::{Local, LocalSizes};
use tcpx_tests::child;
use tcpx_tests::content::Choices;
use tcpx_tests::pair::{LONG, Listening, close, connect_back, process, tell_window, told_window};
use tcpx_tests::process::Running;
use tcpx_tests::support::{random, until};

use crate::local::network;

const READ_WHERE_IT_LIES: &str = "GPU memory is read where it lies";
/// In one chunk, in several of the usual length, and with an end of its own.
const SIZES: [usize; 5] = [20_000, 1 << 20, (1 << 20) + 1, 5 << 20, (9 << 20) + 3];
const MOST: usize = 10 << 20;

/// Memory of the GPU that is allocated, or mapped by segments.
fn memory(gpu: &Gpu, in_segments: bool) -> Region {
    if !in_segments {
        return Region::cuda(gpu, MOST).expect("memory");
    }
    let segments = [4 << 20, 2 << 20, 4 << 20];
    let address = fake_driver::segments(gpu, &segments);
    // SAFETY: mapped for good.
    unsafe { Region::from_cuda_raw(gpu, address, MOST, Arc::new(())) }
}

fn content(region: &Region, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    region.read_to(0, &mut content).expect("free");
    content
}

fn with_gpu(gpu: &Gpu) -> impl Fn(&mut Options) {
    let gpu = gpu.clone();
    move |options| options.gpu = Some(gpu.clone())
}

fn wait(transfer: Result<Transfer, tcpx::Error>) {
    transfer.and_then(Transfer::wait).expect("it is placed");
}

/// Transfers until the payload goes past the lanes.
fn until_local(of: &Connection, transfer: impl Fn()) {
    let until = Instant::now() + LONG;
    loop {
        let bytes = |end: &Connection| {
            let statistics = end.statistics();
            statistics.tcp_bytes_sent + statistics.tcp_bytes_received
        };
        let before = bytes(of);
        transfer();
        if bytes(of) - before < 1 << 19 {
            return;
        }
        assert!(Instant::now() < until, "payload still goes over lanes");
    }
}

#[test]
fn gpu_memory_of_one_process_is_copied_where_it_lies() {
    child::run(&[], || {
        fake_driver::install();
        let gpu = Gpu::open(0).expect("the fake");
        let sizes = LocalSizes {
            imports: 1,
            chunk: 2 << 20,
            ..LocalSizes::default()
        };
        let listening = Listening::new(network(Local::On, sizes), with_gpu(&gpu), with_gpu(&gpu));
        let (server, client) = listening.connect();
        for end in [&server, &client] {
            assert!(end.path().contains(READ_WHERE_IT_LIES), "{}", end.path());
        }
        let (source, destination) = (memory(&gpu, false), memory(&gpu, false));
        // For it there is no room beside the first one: it goes over lanes.
        let further = memory(&gpu, false);
        let window = server.expose(destination.all(), Rights::GetAndPut);
        let window = window.expect("connected");
        let part = |region: &Region, bytes| region.slice(..bytes).expect("inside");
        let send = |bytes, level| {
            let receive = server
                .receive(part(&destination, bytes), 1)
                .level(level)
                .start();
            wait(client.send(part(&source, bytes), 1).level(level).start());
            wait(receive);
        };
        window.revoke(LONG).expect("nobody uses it");
        until_local(&client, || send(1 << 20, Level::Placed));
        for (bytes, level) in SIZES
            .into_iter()
            .zip([Level::Placed, Level::Verified].repeat(3))
        {
            let sent = random(bytes);
            source.write_from(0, &sent).expect("free");
            destination.write_from(0, &vec![0xEE; bytes]).expect("free");
            send(bytes, level);
            assert!(
                content(&destination, bytes) == sent,
                "{bytes} bytes were sent"
            );
        }
        let window = server.expose(destination.all(), Rights::GetAndPut);
        let window = window.expect("connected");
        let back = Region::host(MOST).expect("memory");
        for (bytes, level) in SIZES
            .into_iter()
            .zip([Level::Verified, Level::Placed].repeat(3))
        {
            let sent = random(bytes);
            source.write_from(0, &sent).expect("free");
            further.write_from(0, &sent).expect("free");
            let put = client.put(part(&source, bytes), &window.key(), 0);
            wait(put.level(level).start());
            let put = client.put(part(&further, bytes), &window.key(), 0);
            wait(put.level(level).start());
            // From the GPU to host memory.
            let get = client.get(part(&back, bytes), &window.key(), 0);
            wait(get.level(level).start());
            let same = back.with_bytes(..bytes, |came| came == sent).expect("free");
            assert!(same, "{bytes} bytes were put and got");
        }
        close(server, client);
    });
}

/// Neither reaches the other's memory.
#[test]
fn memory_of_two_gpus_of_one_process_goes_over_lanes() {
    child::run(&[], || {
        fake_driver::install_two();
        let gpus = [0, 1].map(|ordinal| Gpu::open(ordinal).expect("the fake"));
        let [of_server, of_client] = gpus.each_ref().map(with_gpu);
        let network = network(Local::On, LocalSizes::default());
        let (server, client) = Listening::new(network, of_server, of_client).connect();
        let [there, here] = gpus.each_ref().map(|gpu| memory(gpu, false));
        let back = Region::host(MOST).expect("memory");
        let window = server.expose(there.all(), Rights::GetAndPut);
        let window = window.expect("connected");
        for bytes in SIZES.into_iter().chain(SIZES) {
            let sent = random(bytes);
            let part = |region: &Region| region.slice(..bytes).expect("inside");
            here.write_from(0, &sent).expect("free");
            wait(client.put(part(&here), &window.key(), 0).start());
            assert!(content(&there, bytes) == sent, "{bytes} bytes were put");
            for into in [&here, &back] {
                into.write_from(0, &vec![0xEE; bytes]).expect("free");
                wait(client.get(part(into), &window.key(), 0).start());
                assert!(content(into, bytes) == sent, "{bytes} bytes were got");
            }
            // The other way the client is the one that reads.
            let receive = client.receive(part(&here), 1).start();
            wait(server.send(part(&there), 1).start());
            wait(receive);
            assert!(content(&here, bytes) == sent, "{bytes} bytes were sent");
        }
        drop(window);
        close(server, client);
    });
}

/// Pieces in an order of their own at both ends, none beside the next: in each place of so many
/// bytes all but one.
fn shuffled(client: &Connection, source: &Region, key: &WindowKey, place: usize) -> Vec<usize> {
    let pieces = MOST / place;
    let mut order: Vec<usize> = (0..pieces).collect();
    Choices::new(place as u64).shuffle(&mut order);
    let mut batch = client.batch();
    for (from, to) in order.iter().enumerate() {
        let part = source.slice(from * place..(from + 1) * place - 1);
        batch = batch.put(part.expect("within"), key, (to * place) as u64);
    }
    wait(batch.start());
    order
}

fn options(key: Key, gpu: &Gpu) -> Options {
    let mut options = Options::new(network(Local::On, LocalSizes::default()), Auth::Key(key));
    with_gpu(gpu)(&mut options);
    options
}

fn other_process() {
    fake_driver::install();
    let gpu = Gpu::open(0).expect("the fake");
    let connection = connect_back(|key| options(key, &gpu));
    let memory = memory(&gpu, true);
    let window = connection.expose(memory.all(), Rights::GetAndPut);
    let window = window.expect("connected");
    tell_window(&connection, &window);
    // Until it is told so, or the other one ends.
    let empty = Region::host(0).expect("memory");
    let word = |tag| connection.receive(empty.all(), tag).start();
    if word(2).and_then(Transfer::wait).is_ok() {
        window.revoke(LONG).expect("nobody uses it");
        drop(memory);
        drop(word(3).and_then(Transfer::wait));
    }
}

/// A process with memory in segments, connected, and the key of its window.
fn start_other(test: &str, gpu: &Gpu) -> (Running, Connection, WindowKey) {
    let (process, connection, _) = process(test, "other", &[], |key| options(key, gpu));
    assert!(connection.path().contains(READ_WHERE_IT_LIES));
    let window = told_window(&connection);
    (process, connection, window)
}

/// What is mapped of the other's is unmapped in time.
fn until_nothing_is_open() {
    until("memory of the peer is unmapped", || {
        (fake_driver::opened() == [0, 0] && peer_mappings()[0] == 0).then_some(())
    });
    // No transfer waits for any of these.
    let [handles, segments] = fake_driver::closers();
    let is_one = |all: &BTreeSet<String>, of: &[&str]| all.iter().all(|name| of.contains(&&**name));
    assert!(is_one(&handles, &["tcpx-close"]), "{handles:?}");
    assert!(
        is_one(&segments, &["tcpx-free", "tcpx-local"]),
        "{segments:?}"
    );
}

#[test]
fn gpu_memory_of_another_process_is_copied_where_it_lies() {
    let test = "gpu_memory_of_another_process_is_copied_where_it_lies";
    if child::is_child("other") {
        return other_process();
    }
    child::run_as(test, &[], || {
        fake_driver::install();
        let gpu = Gpu::open(0).expect("the fake");
        let (process, connection, window) = start_other(test, &gpu);
        let (source, back) = (memory(&gpu, true), memory(&gpu, false));
        let part = |region: &Region, bytes| region.slice(..bytes).expect("inside");
        let put = |bytes| wait(connection.put(part(&source, bytes), &window, 0).start());
        let get = |bytes| wait(connection.get(part(&back, bytes), &window, 0).start());
        until_local(&connection, || put(MOST));
        until_local(&connection, || get(MOST));
        assert_eq!(fake_driver::opened(), [0, 1]);
        let own = std::process::id();
        let mut processes = tcpx_status::processes().found.into_iter();
        let (_, socket) = processes.find(|(pid, _)| *pid == own).expect("it tells");
        let report = tcpx_status::ask_process(own, &socket).expect("it answers");
        assert_eq!(report.mappings.open, 1);
        assert!(report.connections[0].path.contains(READ_WHERE_IT_LIES));
        for bytes in SIZES {
            let sent = random(bytes);
            source.write_from(0, &sent).expect("free");
            back.write_from(0, &vec![0xEE; bytes]).expect("free");
            put(bytes);
            get(bytes);
            assert!(
                content(&back, bytes) == sent,
                "{bytes} bytes were put and got"
            );
        }
        // What was got once since it was written, its owner has no part in any more.
        let sent = content(&back, MOST);
        process.signal(Signal::STOP);
        for bytes in SIZES {
            back.write_from(0, &vec![0xEE; MOST]).expect("free");
            get(bytes);
            assert!(
                content(&back, bytes) == sent[..bytes],
                "{bytes} bytes were got"
            );
        }
        process.signal(Signal::CONT);
        // A chunk of the first lies in more parts than the peer is told of.
        for place in [300, 5000, 70_000] {
            let sent = random(MOST);
            source.write_from(0, &sent).expect("free");
            let order = shuffled(&connection, &source, &window, place);
            get(MOST);
            let came = content(&back, MOST);
            for (from, to) in order.iter().enumerate() {
                let range = |at: usize| at * place..(at + 1) * place - 1;
                assert!(
                    came[range(*to)] == sent[range(from)],
                    "places of {place} bytes"
                );
            }
        }
        // To pieces of host memory, from pieces.
        let (all, host) = (content(&back, MOST), Region::host(MOST).expect("memory"));
        let places = |at: usize| (at * 50_000, at * 70_000 + 1, 49_999 - at);
        let mut batch = connection.batch();
        for (to, from, len) in (0..140).rev().map(places) {
            let part = host.slice(to..to + len).expect("within");
            batch = batch.get(part, &window, from as u64);
        }
        wait(batch.start());
        let came = content(&host, MOST);
        for (to, from, len) in (0..140).map(places) {
            assert!(came[to..to + len] == all[from..from + len], "at {to}");
        }
        // What the other process deregisters is let go of, while the connection lives.
        let word = Region::host(0).expect("memory");
        wait(connection.send(word.all(), 2).start());
        until_nothing_is_open();
        connection.close(LONG).expect("an end in order");
        process.succeeds();
    });
}

/// The one whose memory is read dies amid that: what has come is no success unless it is right, and
/// nothing comes after the end.
#[test]
fn a_reader_of_gpu_memory_whose_owner_is_killed_ends() {
    const ROUNDS: u64 = 6;
    let test = "a_reader_of_gpu_memory_whose_owner_is_killed_ends";
    if child::is_child("other") {
        return other_process();
    }
    child::run_as(test, &[], || {
        fake_driver::install();
        let gpu = Gpu::open(0).expect("the fake");
        let mut random = Choices::new(5);
        for round in 0..ROUNDS {
            let (process, connection, window) = start_other(test, &gpu);
            let back = memory(&gpu, false);
            let get = || connection.get(back.all(), &window, 0).start();
            until_local(&connection, || wait(get()));
            let before = content(&back, MOST);
            back.write_from(0, &vec![0xEE; MOST]).expect("free");
            let running = get();
            for _ in 0..random.below(200) {
                std::thread::yield_now();
            }
            drop(process);
            let ended = running.and_then(Transfer::wait);
            let came = content(&back, MOST);
            assert!(ended.is_err() || came == before, "round {round}");
            back.write_from(0, &vec![0xDD; MOST]).expect("free");
            drop(connection);
            until_nothing_is_open();
            let late = content(&back, MOST).iter().any(|byte| *byte != 0xDD);
            assert!(!late, "round {round}: bytes came after the end");
        }
    });
}

/// Whoever frees memory while another process reads it takes it away amid that.
#[test]
fn memory_of_a_gpu_goes_back_once_its_reader_has_ended() {
    let test = "memory_of_a_gpu_goes_back_once_its_reader_has_ended";
    if child::is_child("other") {
        return other_process();
    }
    child::run_as(test, &[], || {
        fake_driver::install();
        let gpu = Gpu::open(0).expect("the fake");
        let (process, connection, window) = start_other(test, &gpu);
        let (owner, address) = (Arc::new(()), fake_driver::segments(&gpu, &[MOST]));
        let memory = Arc::downgrade(&owner);
        // SAFETY: mapped for good.
        let source = unsafe { Region::from_cuda_raw(&gpu, address, MOST, owner) };
        let put = || connection.put(source.all(), &window, 0).start();
        until_local(&connection, || wait(put()));
        process.signal(Signal::STOP);
        drop(source);
        assert!(Region::wait_for_frees(LONG));
        assert!(
            memory.strong_count() > 0,
            "a reader that says nothing may read"
        );
        process.signal(Signal::CONT);
        until("the memory is given back", || {
            (memory.strong_count() == 0).then_some(())
        });
        connection.close(LONG).expect("an end in order");
    });
}
