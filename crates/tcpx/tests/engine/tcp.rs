//! Transfers between two endpoints of this process over the embedded network.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use tcpx::{
    After, Auth, Connection, Deadlines, Endpoint, Error, ErrorKind, Key, Level, Options, Region,
};

/// Far more than anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn key() -> Key {
    Key::generate(&mut |bytes| getrandom::fill(bytes).expect("the system has randomness"))
}

fn pair(configure: impl Fn(&mut Options)) -> (Connection, Connection) {
    let key = key();
    let mut options = Options::tcp(Auth::Key(key));
    // A busy machine may keep an end from running for long.
    options.dead_after = 10 * LONG;
    options.deadlines.stall = 10 * LONG;
    configure(&mut options);
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = Endpoint::listen(address, options.clone()).expect("a free port");
    let address = server.local_addr();
    let client = thread::spawn(move || Endpoint::connect(address, &options).expect("it listens"));
    let accepted = server.accept(LONG).expect("the client connects");
    (accepted, client.join().expect("no panic"))
}

fn random(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    getrandom::fill(&mut bytes).expect("the system has randomness");
    bytes
}

fn region(bytes: &[u8]) -> Region {
    let region = Region::host(bytes.len()).expect("memory");
    region.write_from(0, bytes).expect("nobody else holds it");
    region
}

fn contents(region: &Region, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read_to(0, &mut bytes).expect("nobody else holds it");
    bytes
}

#[test]
fn every_size_arrives_at_every_level() {
    every_size_arrives(pair(|_| {}));
}

#[test]
fn every_size_arrives_encrypted() {
    let (server, client) = pair(|options| options.encrypt = true);
    assert!(client.path().contains("encrypted"), "{}", client.path());
    every_size_arrives((server, client));
}

fn every_size_arrives((server, client): (Connection, Connection)) {
    for len in [
        0,
        1,
        23,
        4095,
        4096,
        4097,
        16 << 10,
        (16 << 10) + 1,
        (64 << 10) + 7,
        128 << 10,
        (128 << 10) + 1,
        (512 << 10) - 1,
        512 << 10,
        (512 << 10) + 1,
        7 << 20,
    ] {
        for level in [Level::Sent, Level::Placed, Level::Verified] {
            let bytes = random(len);
            let source = region(&bytes);
            let destination = region(&vec![0xA5; len + 64]);
            let receive = server.receive(destination.all(), 7).start().expect("room");
            let send = client
                .send(source.all(), 7)
                .level(level)
                .start()
                .expect("room");
            let sent = send
                .wait()
                .unwrap_or_else(|error| panic!("{len} {level:?}: {error}"));
            let received = receive
                .wait()
                .unwrap_or_else(|error| panic!("{len} {level:?}: {error}"));
            assert_eq!((sent.bytes, received.bytes), (len as u64, len as u64));
            assert!(sent.level >= level);
            let got = contents(&destination, len + 64);
            assert!(got[..len] == bytes, "{len} bytes differ");
            assert!(
                got[len..].iter().all(|byte| *byte == 0xA5),
                "wrote past the end"
            );
        }
    }
    client.close(LONG).expect("an orderly goodbye");
    server.close(LONG).expect("an orderly goodbye");
}

#[test]
fn both_directions_at_once() {
    let (server, client) = pair(|options| options.channels = 2);
    let run = |connection: Connection, tag: u64, other: u64, seed: u8| {
        thread::spawn(move || {
            let mut transfers = Vec::new();
            let mut regions = Vec::new();
            for index in 0..20usize {
                let len = index * 100_003;
                let source = region(&vec![seed.wrapping_add(index as u8); len]);
                let destination = region(&vec![0; len]);
                transfers.push(
                    connection
                        .receive(destination.all(), other)
                        .start()
                        .expect("room"),
                );
                transfers.push(connection.send(source.all(), tag).start().expect("room"));
                regions.push((destination, len, index));
            }
            for transfer in transfers {
                transfer.wait().expect("it arrives");
            }
            for (destination, len, index) in regions {
                let expected = (seed ^ 0x40).wrapping_add(index as u8);
                assert!(
                    contents(&destination, len)
                        .iter()
                        .all(|byte| *byte == expected)
                );
            }
            connection.close(LONG).expect("an orderly goodbye");
        })
    };
    let here = run(server, 1, 2, 0x00);
    let there = run(client, 2, 1, 0x40);
    here.join().expect("no panic");
    there.join().expect("no panic");
}

#[test]
fn too_small_a_receive_is_an_error_on_both_sides() {
    let (server, client) = pair(|_| {});
    for len in [100, 1 << 20] {
        let source = region(&random(len));
        let destination = region(&vec![0xA5; len]);
        let receive = server
            .receive(destination.slice(..len - 1).expect("in range"), 9)
            .start()
            .expect("room");
        let send = client.send(source.all(), 9).start().expect("room");
        let error = send.wait().expect_err("it does not fit");
        assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
        let error = receive.wait().expect_err("it does not fit");
        assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
        assert!(contents(&destination, len).iter().all(|byte| *byte == 0xA5));
    }
}

#[test]
fn a_receive_without_a_send_ends_with_who_owes_what() {
    let (server, _client) = pair(|_| {});
    let destination = region(&[0; 64]);
    let deadlines = Deadlines {
        stall: Duration::from_millis(100),
        total: None,
    };
    let receive = server
        .receive(destination.all(), 5)
        .deadlines(deadlines)
        .start()
        .expect("room");
    let error = receive.wait().expect_err("nobody sends");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(
        error
            .to_string()
            .contains("the peer must start a matching send"),
        "{error}"
    );
}

#[test]
fn a_peer_that_vanishes_ends_every_operation() {
    let (server, client) = pair(|_| {});
    let destination = region(&vec![0; 64 << 20]);
    let receive = server.receive(destination.all(), 5).start().expect("room");
    let source = region(&vec![1; 64 << 20]);
    let send = client.send(source.all(), 6).start().expect("room");
    drop(client);
    drop(send);
    let error = receive.wait().expect_err("the peer is gone");
    assert!(error.to_string().contains("peer"), "{error}");
    drop(region(&[]));
    server.close(LONG).ok();
}

#[test]
fn memory_under_transfer_is_not_readable() {
    let (server, _client) = pair(|_| {});
    let destination = region(&[0; 64]);
    let receive = server.receive(destination.all(), 5).start().expect("room");
    assert!(destination.read_to(0, &mut [0; 1]).is_err());
    receive.cancel();
    let error = receive.wait().expect_err("it was cancelled");
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    assert!(destination.read_to(0, &mut [0; 1]).is_ok());
}

#[test]
fn host_memory_cannot_wait_for_gpu_work_and_says_so() {
    let (server, _client) = pair(|_| {});
    let source = region(&[0; 64]);
    // SAFETY: host memory waits for none: nobody gets to them.
    for after in unsafe { [After::stream(64), After::event(64)] } {
        let refused = server.send(source.all(), 5).after(after).start();
        let error = refused.expect_err("nothing would wait");
        assert!(matches!(error, Error::Setting { .. }), "{error}");
    }
}

/// Starts so many sends of as many bytes before any is received; what has gone over lanes since.
fn chunks_of(client: &Connection, server: &Connection, bytes: usize, count: u64) -> u64 {
    let chunks = || client.statistics().chunks_sent;
    let before = chunks();
    let sources: Vec<Region> = (0..count).map(|_| region(&random(bytes))).collect();
    let sinks: Vec<Region> = sources.iter().map(|_| region(&vec![0; bytes])).collect();
    let send = |(source, tag): (&Region, u64)| client.send(source.all(), tag).start();
    let sent: Vec<_> = sources.iter().zip(0..).map(send).collect();
    for (tag, sink) in (0..).zip(&sinks) {
        let there = server.receive(sink.all(), tag).start().expect("room");
        there.wait().expect("it arrives");
    }
    for sent in sent {
        sent.expect("room").wait().expect("acknowledged");
    }
    for (source, sink) in sources.iter().zip(&sinks) {
        assert_eq!(contents(source, bytes), contents(sink, bytes));
    }
    chunks() - before
}

#[test]
fn messages_below_the_eager_limit_take_no_lanes() {
    const LIMIT: usize = 32 << 10;
    for lanes in [1, 2] {
        let (server, client) = pair(|options| {
            options.channels = lanes;
            options.eager_limit = LIMIT as u32;
        });
        for _ in 0..2 {
            assert_eq!(chunks_of(&client, &server, LIMIT, 1), 0);
            // Half of the receiver's credit: the rest may still be on its way back.
            assert_eq!(chunks_of(&client, &server, LIMIT / 2, 64), 0);
            // Beside others a long one takes lanes.
            assert_eq!(chunks_of(&client, &server, LIMIT, 2), 1);
            assert!(chunks_of(&client, &server, LIMIT + 1, 1) > 0);
        }
    }
}

/// Both ends are used to an answer, or another message, at once, and then there is none.
#[test]
fn what_waited_for_company_leaves_without_it() {
    let (server, client) = pair(|options| {
        // Nothing else is to carry along what waits.
        options.heartbeat = 3 * LONG;
        options.dead_after = 9 * LONG;
        options.deadlines.stall = LONG;
    });
    let source = region(&random(4096));
    let sinks: Vec<Region> = (0..8).map(|_| region(&[0; 4096])).collect();
    let send = |from: &Connection, tag| from.send(source.all(), tag).start().expect("room");
    let receive =
        |at: &Connection, sink: &Region, tag| at.receive(sink.all(), tag).start().expect("room");
    for _ in 0..20 {
        for round in 0..50 {
            let there = receive(&server, &sinks[0], 1);
            let back = receive(&client, &sinks[1], 2);
            let sent = send(&client, 1);
            there.wait().expect("it arrives");
            let answered = send(&server, 2);
            back.wait().expect("the answer arrives");
            if round % 8 == 0 {
                sent.wait().expect("acknowledged");
                answered.wait().expect("acknowledged");
            }
        }
        // An acknowledgement that no answer follows.
        let there = receive(&server, &sinks[0], 1);
        let sent = send(&client, 1);
        there.wait().expect("it arrives");
        sent.wait().expect("acknowledged");
        // Messages behind others, and nobody who waits where they come from.
        let all: Vec<_> = sinks.iter().map(|sink| receive(&server, sink, 1)).collect();
        let sent: Vec<_> = sinks.iter().map(|_| send(&client, 1)).collect();
        for there in all {
            there.wait().expect("it arrives");
        }
        for sent in sent {
            sent.wait().expect("acknowledged");
        }
    }
    client.close(LONG).expect("an orderly goodbye");
    server.close(LONG).ok();
}

/// Long enough that it does not travel with its announcement.
const LARGE: usize = 200 << 10;
/// More than what was posted takes to reach the peer.
const A_MOMENT: Duration = Duration::from_millis(5);
/// The same on a machine that is a little busy.
const LONG_ENOUGH: Duration = Duration::from_millis(40);

/// Sends one message from `client` to `server` that fills its receive, of which the client knows
/// before it sends if it hears of it within `moment`.
fn one_large(server: &Connection, client: &Connection, tag: u64, moment: Duration) {
    let source = region(&random(LARGE));
    let sink = region(&vec![0xA5; LARGE]);
    let there = server.receive(sink.all(), tag).start().expect("room");
    thread::sleep(moment);
    let sent = client.send(source.all(), tag).start().expect("room");
    there.wait().expect("it arrives");
    sent.wait().expect("acknowledged");
    assert_eq!(contents(&source, LARGE), contents(&sink, LARGE));
}

/// Where cores are few nobody needs to be told that a message is on its way.
#[test]
fn large_messages_that_follow_each_other_are_not_announced() {
    let few_cores = thread::available_parallelism().is_ok_and(|cores| cores.get() <= 4);
    for lanes in [1, 3] {
        let (server, client) = pair(|options| {
            options.channels = lanes;
            options.heartbeat = 3 * LONG;
            options.dead_after = 9 * LONG;
        });
        for _ in 0..4 {
            one_large(&server, &client, 3, LONG_ENOUGH);
        }
        // Bytes of announcements of ten messages, each of which comes so long behind its receive.
        let said = |moment| {
            let before = client.statistics();
            for tag in 10..20 {
                one_large(&server, &client, tag, moment);
            }
            let after = client.statistics();
            assert!(
                after.chunks_sent - before.chunks_sent >= 10,
                "they take lanes"
            );
            after.control_bytes_sent - before.control_bytes_sent
        };
        // An announcement has 41 bytes; the first grant ahead may come late now and then, and on a
        // busy machine more of them: then they have more time.
        let moments = (0..6).map(|round| LONG_ENOUGH * (1 << round));
        let said: Vec<_> = moments
            .map(said)
            .take_while(|said| few_cores && *said >= 5 * 41)
            .collect();
        assert!(said.len() < 6, "{said:?} bytes of announcements");
        client.close(LONG).expect("an orderly goodbye");
        server.close(LONG).expect("an orderly goodbye");
    }
}

/// Whatever is sent instead of what was guessed: each receive gets the message that it is due.
#[test]
fn odd_messages_reach_the_receives_that_are_due() {
    for lanes in [1, 2] {
        let (server, client) = pair(|options| options.channels = lanes);
        for round in 0..30 {
            for _ in 0..(2 + round % 5) {
                one_large(&server, &client, 1, A_MOMENT);
            }
            // Tags and lengths of what is sent; the receives are one of each tag more than one of
            // the first.
            let odd = [0, 7, 100 << 10, LARGE - 1, LARGE][round % 5];
            let sends = [
                (1 + round as u64 % 2, odd),
                (1, LARGE),
                (2, LARGE),
                (1, LARGE),
            ];
            let tags = [1, 1, 2, 1, 2];
            let sinks: Vec<Region> = tags.iter().map(|_| region(&vec![0xA5; LARGE])).collect();
            let mut receives: Vec<_> = tags
                .iter()
                .zip(&sinks)
                .map(|(tag, sink)| {
                    (
                        *tag,
                        sink,
                        server.receive(sink.all(), *tag).start().expect("room"),
                    )
                })
                .collect();
            if round % 3 > 0 {
                thread::sleep(A_MOMENT);
            }
            let sources = sends.map(|(_, len)| region(&random(len)));
            let sent: Vec<_> = sends
                .iter()
                .zip(&sources)
                .map(|((tag, _), source)| client.send(source.all(), *tag).start().expect("room"))
                .collect();
            for ((tag, len), source) in sends.iter().zip(&sources) {
                let due = receives
                    .iter()
                    .position(|(of, ..)| of == tag)
                    .expect("one is left");
                let (_, sink, there) = receives.remove(due);
                let report = there.wait().expect("it arrives");
                assert_eq!(report.bytes, *len as u64, "round {round}, tag {tag}");
                assert_eq!(contents(source, *len), contents(sink, *len));
            }
            for sent in sent {
                sent.wait().expect("acknowledged");
            }
            for (_, _, there) in receives {
                there.cancel();
                assert!(there.wait().is_err(), "nothing was sent to it");
            }
            // The client has to know before it sends again, and knows when it hears what was said
            // behind that.
            let heard = client.receive(sinks[0].all(), 9).start().expect("room");
            let said = server.send(sinks[1].slice(..8).expect("within"), 9);
            said.start().expect("room").wait().expect("acknowledged");
            heard.wait().expect("it arrives");
        }
        client.close(LONG).expect("an orderly goodbye");
        server.close(LONG).expect("an orderly goodbye");
    }
}

#[test]
fn a_receive_given_up_loses_no_message() {
    let (server, client) = pair(|_| {});
    for round in 0..20 {
        for _ in 0..3 {
            one_large(&server, &client, 1, A_MOMENT);
        }
        let [given_up, next, last] = [0; 3].map(|_| region(&vec![0xA5; LARGE]));
        let receive = |into: &Region| server.receive(into.all(), 1).start().expect("room");
        let (first, second) = (receive(&given_up), receive(&next));
        thread::sleep(A_MOMENT);
        first.cancel();
        assert!(first.wait().is_err(), "nothing was sent");
        assert!(contents(&given_up, LARGE).iter().all(|byte| *byte == 0xA5));
        if round % 2 == 0 {
            thread::sleep(A_MOMENT);
        }
        let sources = [0; 2].map(|_| region(&random(LARGE)));
        let sends = [0, 1].map(|at| client.send(sources[at].all(), 1).start().expect("room"));
        // A message that crossed the end of the first receive is for one that is posted after that.
        let third = receive(&last);
        for ended in sends.into_iter().chain([second, third]) {
            ended.wait().expect("it arrives");
        }
        let sent = sources.map(|one| contents(&one, LARGE));
        let mut received = [&next, &last].map(|one| contents(one, LARGE));
        if received[0] != sent[0] {
            received.reverse();
        }
        assert!(sent == received, "both came");
    }
    client.close(LONG).expect("an orderly goodbye");
    server.close(LONG).expect("an orderly goodbye");
}

/// Whether connections that are made one after the other are accepted so.
fn are_accepted_in_order() -> bool {
    const COUNT: u64 = 64;
    let options = Options::tcp(Auth::Key(key()));
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = Endpoint::listen(address, options.clone()).expect("a free port");
    let address = server.local_addr();
    let accepting = thread::spawn(move || {
        let accept = |_| server.accept(LONG).expect("a client connects");
        (0..COUNT).map(accept).collect::<Vec<_>>()
    });
    let connected = (0..COUNT).map(|number| {
        let one = Endpoint::connect(address, &options).expect("it listens");
        let told = one.notify(&number.to_le_bytes()).expect("room");
        (one, told)
    });
    let connected: Vec<_> = connected.collect();
    let accepted = accepting.join().expect("no panic");
    let numbers = accepted
        .iter()
        .map(|one| one.notification(LONG).expect("alive"));
    let made = (0..COUNT).map(|number| Some(number.to_le_bytes().to_vec()));
    let in_order = numbers.eq(made);
    drop(connected);
    in_order
}

#[test]
fn connections_are_accepted_in_the_order_they_were_made() {
    // A busy machine may hold one up for longer than others wait for it.
    assert!((0..5).any(|_| are_accepted_in_order()));
}

#[test]
fn endpoints_accept_and_connect_with_many_peers() {
    let options = Options::tcp(Auth::Key(key()));
    let listen = || {
        let address = "127.0.0.1:0".parse().expect("an address");
        Endpoint::listen(address, options.clone()).expect("a free port")
    };
    let all = [listen(), listen(), listen()];
    let address = |of: usize| all[of].local_addr();
    let connections: Vec<Connection> = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (one, here) in all.iter().enumerate() {
            for peer in (0..all.len()).filter(|peer| *peer != one) {
                let there = address(peer);
                threads.push(scope.spawn(move || here.connect_to(there).expect("it listens")));
            }
            threads.push(scope.spawn(move || here.accept(Duration::MAX).expect("one comes")));
            threads.push(scope.spawn(move || here.accept(Duration::MAX).expect("another comes")));
        }
        let ended = threads.into_iter().map(|one| one.join().expect("no panic"));
        ended.collect()
    });
    assert_eq!(connections.len(), 12);
    let source = region(&random(4096));
    let sinks: Vec<Region> = connections.iter().map(|_| region(&[0; 4096])).collect();
    let received = connections.iter().zip(&sinks);
    let received: Vec<_> = received
        .map(|(one, sink)| one.receive(sink.all(), 1).start().expect("room"))
        .collect();
    for one in &connections {
        let sent = one.send(source.all(), 1).start().expect("room");
        sent.wait().expect("placed");
    }
    for one in received {
        one.wait().expect("it has arrived");
    }
    for sink in &sinks {
        assert_eq!(contents(sink, 4096), contents(&source, 4096));
    }
}

#[test]
fn a_peer_is_found_at_any_address_of_its_name() {
    let options = Options::tcp(Auth::Key(key()));
    let server = Endpoint::listen("127.0.0.1:0".parse().expect("one"), options.clone());
    let server = server.expect("a free port");
    let alive = server.local_addr();
    // A port that was free a moment ago, and which the system gives to nobody while we hold it
    // unlistened.
    let silent = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .expect("a socket");
    let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
    rustix::net::bind(&silent, &any).expect("a free port");
    let dead = rustix::net::getsockname(&silent).expect("it is bound");
    let dead = SocketAddr::try_from(dead).expect("an address of ours");
    let client = thread::spawn(move || {
        // Both stay until the server has them.
        let first = Endpoint::connect(&[dead, alive][..], &options).expect("the second listens");
        // As `HOST:PORT`, which is looked up.
        let name = format!("localhost:{}", alive.port());
        [first, Endpoint::connect(name, &options).expect("found")]
    });
    let first = server.accept(LONG).expect("the client connects");
    let second = server.accept(LONG).expect("it connects again");
    drop((first, second, client.join().expect("no panic")));
}

#[test]
fn an_address_that_leads_nowhere_is_said() {
    let options = Options::tcp(Auth::Key(key()));
    let nobody: &[SocketAddr] = &[];
    let errors = [
        Endpoint::connect("no port", &options),
        Endpoint::connect(nobody, &options),
    ];
    for error in errors {
        let error = error.expect_err("nobody is there");
        assert_eq!(error.kind(), ErrorKind::Connect);
        assert!(error.to_string().contains("HOST:PORT"), "{error}");
    }
}
