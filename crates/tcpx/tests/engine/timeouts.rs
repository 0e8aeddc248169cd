//! Times that a program gives are those that count, short ones and long ones.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, exit};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tcpx::{
    Auth, Connection, Deadlines, Endpoint, Error, ErrorKind, Key, Level, Options, ProgressMode,
    Region, Rights, WindowKey,
};

use crate::common::{contents, filled, pair, random};

/// Far more than anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// How late a wait may end.
const LATE: Duration = Duration::from_millis(100);
/// A busy machine may delay all of so many waits but one.
const TRIES: usize = 40;
/// Of messages that travel with their announcement, of others, and of those of several chunks.
const LENGTHS: [usize; 3] = [8, 200_000, 300_000];

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

/// Does not outlive the test that started it, stopped or not.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The peer of a process that is to stop it: it opens a window, and receives one message once it
/// goes on.
fn be_stopped(address: &str, key: &str) -> ! {
    let auth = Auth::Key(Key::parse(key).expect("a key"));
    let address: SocketAddr = address.parse().expect("an address");
    let mut options = Options::tcp(auth);
    options.dead_after = 10 * LONG;
    let peer = Endpoint::connect(address, &options).expect("it listens");
    let there = Region::host(LENGTHS[2]).expect("memory");
    let window = peer.expose(there.all(), Rights::GetAndPut).expect("open");
    let named = filled(&window.key().to_bytes());
    let named = peer.send(named.all(), 0).start().expect("room");
    named.wait().expect("the parent receives it");
    let to = Region::host(LENGTHS[2]).expect("memory");
    let received = peer.receive(to.all(), 1).start().expect("room");
    received.wait().expect("it comes");
    peer.close(LONG).expect("a goodbye");
    exit(0)
}

/// Of all kinds and lengths, to a process that stalls. How late they end is for a session's model
/// to say: here a busy machine may be late itself.
#[test]
fn a_thousand_operations_to_a_stopped_process_end() {
    const NAME: &str = "timeouts::a_thousand_operations_to_a_stopped_process_end";
    const ADDRESS: &str = "TEST_ADDRESS";
    const KEY: &str = "TEST_KEY";
    if let [Ok(address), Ok(key)] = [ADDRESS, KEY].map(std::env::var) {
        be_stopped(&address, &key);
    }
    let key = tcpx::generate_key().expect("randomness");
    let mut options = Options::tcp(Auth::Key(key.clone()));
    options.dead_after = 10 * LONG;
    let (endpoint, address) = listen(&options);
    let mut command = Command::new(std::env::current_exe().expect("it is there"));
    command.args(["--exact", NAME, "--nocapture"]);
    command.env(ADDRESS, address.to_string());
    let child = command.env(KEY, key.to_text()).spawn();
    let mut child = Ended(child.expect("it starts"));
    let client = endpoint.accept(LONG).expect("it connects");
    let named = filled(&[0; WindowKey::BYTES]);
    let received = client.receive(named.all(), 0).start().expect("room");
    received.wait().expect("its window");
    let window = WindowKey::from_bytes(&contents(&named)).expect("a key");
    let process = Pid::from_child(&child.0);
    kill_process(process, Signal::STOP).expect("our own child");
    let stopped = waitpid(Some(process), WaitOptions::UNTRACED).expect("our own child");
    assert!(stopped.expect("it was waited for").1.stopped());
    let mut running = Vec::new();
    for number in 0..250 {
        let bytes = LENGTHS[number % LENGTHS.len()];
        let level = [Level::Placed, Level::Verified][number % 2];
        let deadlines = Deadlines {
            stall: LONG,
            total: Some(Duration::from_millis(100 + number as u64)),
        };
        let tag = 100 + number as u64;
        let memory = [(); 4].map(|()| Region::host(bytes).expect("memory"));
        let [sent, received, put, got] = [0, 1, 2, 3].map(|at: usize| memory[at].all());
        let two_sided = [client.send(sent, tag), client.receive(received, tag)];
        let two_sided = two_sided.map(|one| one.level(level).deadlines(deadlines).start());
        let one_sided = [client.put(put, &window, 0), client.get(got, &window, 0)];
        let one_sided = one_sided.map(|one| one.level(level).deadlines(deadlines).start());
        let started = two_sided.into_iter().chain(one_sided);
        let started = started.map(|one| one.expect("room"));
        running.extend(memory.into_iter().zip(started));
    }
    for (memory, transfer) in running {
        let error = transfer.wait().expect_err("nobody answers");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        let is_held = matches!(error, Error::MemoryHeld { .. });
        assert!(is_held || memory.read_to(0, &mut [0]).is_ok(), "{error}");
    }
    // The connection serves on once the process does.
    kill_process(process, Signal::CONT).expect("our own child");
    let source = filled(&random(LENGTHS[2]));
    let sent = client.send(source.all(), 1).start().expect("room");
    sent.wait().expect("it is there");
    client.close(LONG).expect("a goodbye");
    assert!(child.0.wait().expect("it ends").success());
}
