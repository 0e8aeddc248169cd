//! Times that a program gives are those that count, short ones and long ones.

use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{Auth, Connection, Endpoint, ErrorKind, Options, ProgressMode, Region, Rights};

use crate::common::{filled, pair, random};

/// Far more than anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// How late a wait may end.
const LATE: Duration = Duration::from_millis(100);
/// A busy machine may delay all of so many waits but one.
const TRIES: usize = 40;

fn below(bound: Duration) -> Duration {
    let random = random(4).try_into().map(u32::from_le_bytes);
    bound.mul_f64(f64::from(random.expect("four bytes")) / f64::from(u32::MAX))
}

/// Times of all lengths: none, below 10 ms, and longer.
fn drawn() -> [Duration; 4] {
    let longer = below(Duration::from_millis(150));
    let [short, shorter] = [10_000, 2_000].map(|micros| below(Duration::from_micros(micros)));
    [Duration::ZERO, shorter, short, longer]
}

/// A time above an hour.
fn hours() -> Duration {
    Duration::from_secs(3601) + below(Duration::from_secs(1_000_000))
}

/// `wait` is given a time, and takes as long: never less, and not much more. It says when it began.
fn takes_its_time(what: &str, mut wait: impl FnMut(Duration) -> Instant) {
    for asked in drawn() {
        let mut least = Duration::MAX;
        for _ in 0..TRIES {
            let took = wait(asked).elapsed();
            assert!(took >= asked, "{what}: {took:?} of {asked:?}");
            least = least.min(took - asked);
            if least < LATE {
                break;
            }
        }
        assert!(least < LATE, "{what}: {asked:?}, {least:?} late");
    }
}

fn listen(options: &Options) -> (Endpoint, SocketAddr) {
    let address = "127.0.0.1:0".parse().expect("an address");
    let endpoint = Endpoint::listen(address, options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    (endpoint, address)
}

fn options() -> Options {
    Options::tcp(Auth::Key(tcpx::generate_key().expect("randomness")))
}

#[test]
fn an_accept_lasts_as_long_as_it_is_told() {
    let (endpoint, _) = listen(&options());
    takes_its_time("accept", |asked| {
        let began = Instant::now();
        let error = endpoint.accept(asked).map(drop).expect_err("nobody comes");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        began
    });
}

#[test]
fn a_connect_lasts_as_long_as_it_is_told() {
    let mut options = options();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    // Nobody accepts there: clients prove themselves, and wait for the rest.
    let (_endpoint, unaccepted) = listen(&options);
    let silent = silent.local_addr().expect("it is bound");
    for addresses in [vec![silent], vec![unaccepted], vec![silent; 3]] {
        takes_its_time("connect", |asked| {
            options.connect_timeout = asked;
            let began = Instant::now();
            let error = Endpoint::connect(addresses.as_slice(), &options).map(drop);
            let error = error.expect_err("no answer");
            assert!(began.elapsed() < LONG, "{error}");
            began
        });
    }
}

/// A client whose peer's program does nothing, and a send to it that nobody receives.
fn unanswered() -> (Connection, Connection, tcpx::Transfer) {
    let (server, client) = pair(|side, options| {
        if side == 0 {
            options.progress = ProgressMode::Manual;
        }
    });
    let source = filled(&random(1 << 20));
    let sent = client.send(source.all(), 1).start().expect("room");
    (server, client, sent)
}

#[test]
fn a_close_lasts_as_long_as_it_is_told() {
    takes_its_time("close", |asked| {
        let (_server, client, sent) = unanswered();
        let began = Instant::now();
        client.close(asked).expect_err("nobody receives");
        sent.wait().expect_err("it ended with its connection");
        began
    });
}

#[test]
fn a_revoke_ends_in_time_whatever_its_peer_does() {
    for asked in drawn() {
        let mut least = Duration::MAX;
        for _ in 0..TRIES {
            let (owner, user) = pair(|side, options| {
                if side == 1 {
                    options.progress = ProgressMode::Manual;
                }
            });
            let memory = filled(&random(8 << 20));
            let window = owner.expose(memory.all(), Rights::Get).expect("open");
            let to = Region::host(8 << 20).expect("memory");
            let get = user.get(to.all(), &window.key(), 0).start().expect("room");
            user.progress().expect("alive");
            // Its answer fills the sockets, and goes no farther.
            let until = Instant::now() + Duration::from_millis(5);
            while Instant::now() < until {
                thread::yield_now();
            }
            let began = Instant::now();
            // Ended early or not, this is when it has ended.
            let _ = window.revoke(asked);
            least = least.min(began.elapsed().saturating_sub(asked));
            drop(get);
            if least < LATE {
                break;
            }
        }
        assert!(least < LATE, "revoke: {asked:?}, {least:?} late");
    }
}

#[test]
fn waits_of_hours_end_when_there_is_nothing_to_wait_for() {
    let mut options = options();
    options.connect_timeout = hours();
    let (endpoint, address) = listen(&options);
    let accepting = thread::spawn(move || endpoint.accept(hours()).expect("a client"));
    let client = Endpoint::connect(address, &options).expect("it listens");
    let server = accepting.join().expect("no panic");
    let memory = Region::host(4096).expect("memory");
    let window = server.expose(memory.all(), Rights::Put).expect("open");
    let source = filled(&random(4096));
    let put = client.put(source.all(), &window.key(), 0).start();
    put.expect("room").wait().expect("applied");
    window.revoke(hours()).expect("nothing runs");
    let message = filled(&random(1 << 20));
    let sent = client.send(message.all(), 1).start().expect("room");
    let closing = thread::spawn(move || client.close(hours()));
    let to = Region::host(1 << 20).expect("memory");
    let received = server.receive(to.all(), 1).start().expect("room");
    received.wait().expect("the close waits for it");
    sent.wait().expect("the close waits for it");
    server.close(hours()).expect("a goodbye");
    closing.join().expect("no panic").expect("a goodbye");
}
