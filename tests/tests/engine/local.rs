//! Two ends on one host: payload in host memory is read where it lies, as whole and as timely as over lanes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tcpx::{
    Auth, Connection, Deadlines, Endpoint, Key, Level, Options, Region, Rights, TcpNetwork,
    Transfer,
};
use tcpx_net::{Local, TcpOptions};
use tcpx_tests::child;
use tcpx_tests::content::Choices;
use tcpx_tests::pair::{LONG, Listening, close};

const READ_WHERE_IT_LIES: &str = "host memory is read where it lies";

fn network(local: Local) -> Arc<TcpNetwork> {
    Arc::new(TcpNetwork::new(TcpOptions {
        lanes: 2,
        local,
        ..TcpOptions::default()
    }))
}

fn random(bytes: usize) -> Vec<u8> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).expect("there is randomness");
    random
}

fn region(bytes: &[u8]) -> Region {
    let region = Region::host(bytes.len()).expect("memory");
    region.write_from(0, bytes).expect("free");
    region
}

fn holds(region: &Region, bytes: &[u8]) -> bool {
    let same = region.with_bytes(.., |held| held == bytes);
    same.expect("free")
}

/// What went over TCP, of both ends.
fn over_tcp(server: &Connection, client: &Connection) -> u64 {
    server.statistics().tcp_bytes_sent + client.statistics().tcp_bytes_sent
}

#[test]
fn payload_is_read_where_it_lies_and_comes_whole() {
    let listening = Listening::new(network(Local::On), |_| {}, |_| {});
    let (server, client) = listening.connect();
    for end in [&server, &client] {
        assert!(end.path().contains(READ_WHERE_IT_LIES), "{}", end.path());
    }
    let before = over_tcp(&server, &client);
    let mut moved = 0;
    let sizes = [1, 200 << 10, 1 << 20, (1 << 20) + 1, (9 << 20) + 3];
    for (bytes, level) in sizes
        .into_iter()
        .zip([Level::Placed, Level::Verified].repeat(3))
    {
        let content = random(bytes);
        let (source, destination) = (region(&content), Region::host(bytes).expect("memory"));
        let receive = server.receive(destination.all(), 1).level(level).start();
        let send = client.send(source.all(), 1).level(level).start();
        let sent = send.and_then(Transfer::wait).expect("it is received");
        assert_eq!(sent.bytes, bytes as u64);
        receive.and_then(Transfer::wait).expect("it is sent");
        assert!(holds(&destination, &content), "{bytes} bytes were sent");

        let (memory, back) = (
            Region::host(bytes).expect("memory"),
            Region::host(bytes).expect("memory"),
        );
        let window = server.expose(memory.all(), Rights::GetAndPut);
        let window = window.expect("connected");
        let put = client.put(source.all(), &window.key(), 0).level(level);
        put.start().and_then(Transfer::wait).expect("it is placed");
        let get = client.get(back.all(), &window.key(), 0).level(level);
        get.start()
            .and_then(Transfer::wait)
            .expect("it is answered");
        window.revoke(LONG).expect("nobody uses it");
        assert!(holds(&memory, &content), "{bytes} bytes were put");
        assert!(holds(&back, &content), "{bytes} bytes were got");
        moved += 3 * bytes as u64;
    }
    let went = over_tcp(&server, &client) - before;
    assert!(went < moved / 4, "{went} of {moved} bytes went over TCP");
    close(server, client);
}

/// Pieces of some kilobytes in an order of their own, at both ends: hundreds to a chunk.
#[test]
fn lists_of_pieces_are_read_where_they_lie() {
    const PIECES: usize = 2000;
    let listening = Listening::new(network(Local::On), |_| {}, |_| {});
    let (server, client) = listening.connect();
    for piece in [700, 5000, 70_000] {
        let bytes = PIECES * piece;
        let content = random(bytes);
        let (source, memory) = (region(&content), Region::host(bytes).expect("memory"));
        let window = server.expose(memory.all(), Rights::Put).expect("connected");
        let mut order: Vec<usize> = (0..PIECES).collect();
        Choices::new(piece as u64).shuffle(&mut order);
        let mut batch = client.batch();
        for (from, to) in order.iter().enumerate() {
            let part = source.slice(from * piece..(from + 1) * piece);
            batch = batch.put(part.expect("within"), &window.key(), (to * piece) as u64);
        }
        batch
            .start()
            .and_then(Transfer::wait)
            .expect("all is placed");
        let mut expected = vec![0; bytes];
        for (from, to) in order.iter().enumerate() {
            let part = &content[from * piece..(from + 1) * piece];
            expected[to * piece..(to + 1) * piece].copy_from_slice(part);
        }
        assert!(holds(&memory, &expected), "pieces of {piece} bytes");
        window.revoke(LONG).expect("nobody uses it");
    }
    close(server, client);
}

/// The source is its program's again as soon as its send has ended, whatever the peer is about to read.
#[test]
fn what_a_send_has_given_back_is_no_success_of_its_receive() {
    const BYTES: usize = 8 << 20;
    const ROUNDS: u64 = 200;
    let listening = Listening::new(network(Local::On), |_| {}, |_| {});
    let (server, client) = listening.connect();
    let content = random(BYTES);
    let (source, destination) = (region(&content), Region::host(BYTES).expect("memory"));
    let mut random = Choices::new(1);
    let mut cut = 0;
    for tag in 0..ROUNDS {
        source.write_from(0, &content).expect("it was given back");
        let receive = server.receive(destination.all(), tag).start();
        // Some are not cut, however busy the machine is.
        let cuts = tag % 10 > 0;
        let total = cuts.then(|| Duration::from_micros(random.below(3000)));
        let deadlines = Deadlines { total, stall: LONG };
        let send = client.send(source.all(), tag).deadlines(deadlines).start();
        let sent = send.and_then(Transfer::wait);
        let poisoned = source.with_bytes_mut(.., |bytes| bytes.fill(0xEE));
        poisoned.expect("it was given back");
        let received = receive.expect("connected").wait();
        cut += u64::from(sent.is_err());
        assert!(
            received.is_err() || holds(&destination, &content),
            "round {tag}: {sent:?}, {received:?}"
        );
    }
    assert!(cut > 0 && cut < ROUNDS, "{cut} of {ROUNDS} were cut");
    close(server, client);
}

#[test]
fn who_wants_no_local_path_or_encrypts_has_none() {
    for (server, client, encrypt) in [
        (Local::Off, Local::On, false),
        (Local::On, Local::Off, false),
        (Local::Auto, Local::Auto, true),
    ] {
        let change = |local: Local| {
            move |options: &mut Options| {
                options.network = network(local);
                options.encrypt = encrypt;
            }
        };
        let listening = Listening::new(network(Local::Off), change(server), change(client));
        let (server, client) = listening.connect();
        let content = random(3 << 20);
        let (source, destination) = (region(&content), region(&content));
        let receive = server.receive(destination.all(), 1).start();
        let send = client.send(source.all(), 1).start();
        send.and_then(Transfer::wait).expect("it is received");
        receive.and_then(Transfer::wait).expect("it is sent");
        for end in [&server, &client] {
            assert!(!end.path().contains("local"), "{}", end.path());
            assert!(end.statistics().bytes_received + end.statistics().bytes_sent > 0);
        }
        assert!(over_tcp(&server, &client) > content.len() as u64);
        close(server, client);
    }
}

const ROUNDS: u64 = 12;
const LARGE: usize = 64 << 20;

fn options(key: &str) -> Options {
    let key = Key::parse(key).expect("a key");
    Options::new(network(Local::On), Auth::Key(key))
}

/// A process that sends or receives until it is killed.
fn killed_process(sends: bool) {
    let variable = |name| std::env::var(name).expect("it was started with it");
    let address: SocketAddr = variable("TEST_ADDRESS").parse().expect("an address");
    let connection = Endpoint::connect(address, &options(&variable("TEST_KEY")));
    let connection = connection.expect("it listens");
    let memory = Region::host(LARGE).expect("memory");
    loop {
        let ended = match sends {
            true => connection.send(memory.all(), 1).start(),
            false => connection.receive(memory.all(), 1).start(),
        };
        if ended.and_then(Transfer::wait).is_err() {
            return;
        }
    }
}

fn other_is_killed(test: &str, sends: bool) {
    if child::is_child(test) {
        return killed_process(sends);
    }
    let key = Key::generate(&mut |bytes| getrandom::fill(bytes).expect("there is randomness"));
    let key = key.to_text().to_string();
    let mut random = Choices::new(u64::from(sends));
    for round in 0..ROUNDS {
        let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), options(&key));
        let endpoint = endpoint.expect("a free port");
        let address = endpoint.local_addr().to_string();
        let environment = [("TEST_ADDRESS", &*address), ("TEST_KEY", &*key)];
        let mut process = child::start(test, test, &environment);
        let connection = endpoint.accept(LONG).expect("the process connects");
        assert!(connection.path().contains(READ_WHERE_IT_LIES));
        let memory = Region::host(LARGE).expect("memory");
        let start = || match sends {
            true => connection.receive(memory.all(), 1).start(),
            false => connection.send(memory.all(), 1).start(),
        };
        for _ in 0..random.below(3) {
            start().and_then(Transfer::wait).expect("it lives");
        }
        let transfer = start().expect("connected");
        let some = random.below(LARGE as u64);
        while transfer.progress().bytes_done < some && transfer.test().is_none() {
            std::thread::yield_now();
        }
        process.kill().expect("it is our child");
        process.wait().expect("it is our child");
        let last = transfer.wait();
        let free = memory.with_bytes_mut(.., |bytes| bytes.fill(0xEE));
        free.unwrap_or_else(|error| panic!("round {round}: {last:?}: {error}"));
        std::thread::sleep(Duration::from_millis(20));
        let untouched = memory.with_bytes(.., |bytes| bytes.iter().all(|byte| *byte == 0xEE));
        assert!(untouched.expect("free"), "round {round}: {last:?}");
    }
}

#[test]
fn a_receiver_whose_sender_is_killed_ends() {
    other_is_killed("a_receiver_whose_sender_is_killed_ends", true);
}

#[test]
fn a_sender_whose_receiver_is_killed_ends() {
    other_is_killed("a_sender_whose_receiver_is_killed_ends", false);
}
