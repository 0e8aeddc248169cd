//! Faults at random moments, as often as wanted ([`tcpx_tests::faults`]). Nothing here depends on
//! speed: what took how long is printed, and `--nocapture` shows it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use tcpx::{Auth, Connection, Endpoint, Error, Event, Key, NetworkError, Observer, Options};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::content::Content;
use tcpx_tests::faults::{count, random};
use tcpx_tests::instructions::{Carrier, Instructions, Summary};
use tcpx_tests::part;
use tcpx_tests::process::{Peer, program};
use tcpx_tests::proxy::Proxy;
use tcpx_tests::scenario::{Scenario, Side};
use tcpx_tests::support::wait;

/// Ten times what anything here may take.
const LONG: Duration = Duration::from_secs(60);

/// What takes longer is shown.
const PROMPT: Duration = Duration::from_millis(200);

/// One at a time: each has the machine to itself.
static SERIAL: Mutex<()> = Mutex::new(());

fn key() -> Key {
    tcpx::generate_key().expect("there is randomness")
}

/// Shows how long something took, as one line of JSON.
fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |of_hundred: usize| {
        let index = (times.len() * of_hundred).div_ceil(100).max(1) - 1;
        times.get(index).map(Duration::as_millis)
    };
    let [median, p90, p99, most] = [50, 90, 99, 100].map(at);
    let times = times.len();
    print_figures(json!({
        "what": what, "times": times,
        "median_ms": median, "p90_ms": p90, "p99_ms": p99, "most_ms": most,
    }));
}

fn print_figures(figures: serde_json::Value) {
    println!("{figures}");
}

/// Bytes of the process's memory that are in RAM, and its open descriptors.
fn resources() -> (u64, usize) {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("the system tells");
    let pages: u64 = pages
        .split(' ')
        .nth(1)
        .and_then(|field| field.parse().ok())
        .expect("a number");
    let descriptors = std::fs::read_dir("/proc/self/fd")
        .expect("the system tells")
        .count();
    (pages * 4096, descriptors)
}

/// 2 GiB, a part after the other.
const SIZES: [u64; 64] = [32 << 20; 64];

/// When a connection ended, by its own account: a program may learn it later, because it has other
/// things to do.
#[derive(Default)]
struct End(OnceLock<Instant>);

impl End {
    /// Of the next connection with these options.
    fn of(options: &mut Options) -> Arc<Self> {
        let end = Arc::new(Self::default());
        options.observer = Some(Arc::clone(&end) as Arc<dyn Observer>);
        end
    }
}

impl Observer for End {
    fn event(&self, event: &Event) {
        if matches!(event, Event::Closed { error: Some(_) }) {
            self.0.get_or_init(Instant::now);
        }
    }
}

/// What this process does with a peer, and when that came to nothing.
enum Outcome {
    /// The other end never came.
    NobodyCame,
    SetUpFailed(Error, Instant),
    Played(Box<Summary>, Option<Instant>),
}

/// This process's part of a transfer that something breaks.
fn play_until_it_breaks(
    connected: Result<Connection, Error>,
    end: &End,
    scenario: &Scenario,
    side: Side,
) -> Outcome {
    let connection = match connected {
        Ok(connection) => connection,
        Err(Error::Network(NetworkError::AcceptTimedOut { .. })) => return Outcome::NobodyCame,
        Err(error) => return Outcome::SetUpFailed(error, Instant::now()),
    };
    let summary = part::play(&connection, scenario, side);
    Outcome::Played(Box::new(summary), end.0.get().copied())
}

/// How long after `broken` it ended, if it was broken by that.
fn ended_after(outcome: Outcome, broken: Instant) -> Option<Duration> {
    let (amid, at, error) = match outcome {
        Outcome::NobodyCame => return None,
        Outcome::SetUpFailed(error, at) => ("the set-up", at, error.to_string()),
        Outcome::Played(summary, ended) => {
            assert_eq!(summary.defects, [""; 0], "{summary:#?}");
            let whole = summary.succeeded == SIZES.len() as u64;
            assert!(whole || summary.failed.is_some(), "{summary:#?}");
            let first = summary.failures.first().map(|failure| &failure.error);
            ("transfers", ended?, first?.clone())
        }
    };
    let says_why = [
        "closed",
        "lost",
        "reset by peer",
        "Broken pipe",
        "gone",
        "refused",
    ];
    assert!(says_why.iter().any(|word| error.contains(word)), "{error}");
    let took = at.saturating_duration_since(broken);
    if took > PROMPT {
        println!("{} ms amid {amid}: {error}", took.as_millis());
    }
    Some(took)
}

fn instructions(number: u64) -> Instructions {
    let mut scenario = Scenario::to_server(number, &SIZES);
    scenario.gives_up = true;
    let mut instructions = Instructions::new(Carrier::Tcp, scenario);
    instructions.channels = 4;
    instructions
}

/// Waits until this process has no more descriptors and threads than before.
fn wait_for_nothing_left(before: (usize, usize)) {
    wait(
        LONG,
        "what broken connections hold to be given back",
        || {
            let now = (resources().1, threads());
            (now.0 <= before.0 && now.1 <= before.1).then_some(())
        },
    );
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// SIGKILL of a peer process at a random moment of 2 GiB, whichever side it is: this one ends, has
/// no transfer that counts as good with a wrong byte, says why, and has nothing left of it.
#[test]
fn a_peer_that_is_killed_at_any_moment() {
    let _serial = SERIAL.lock();
    let (mut times, mut before) = (Vec::new(), None);
    let (peer, warm_up) = (&program(env!("CARGO_BIN_EXE_peer")), 4);
    for number in 0..warm_up + count("kills", 6) {
        if number == warm_up {
            // What the process shares is there.
            before = Some((resources().1, threads()));
        }
        let mut instructions = instructions(number);
        let scenario = instructions.scenario.clone();
        let mut options = instructions.options().expect("they are good");
        let end = End::of(&mut options);
        let (survivor, victim) = match number % 2 {
            0 => {
                let endpoint =
                    Endpoint::listen(([127, 0, 0, 1], 0).into(), options).expect("a free port");
                instructions.connect = Some(endpoint.local_addr());
                let ours = move || {
                    let connected = endpoint.accept(Duration::from_secs(2));
                    play_until_it_breaks(connected, &end, &scenario, Side::Server)
                };
                (thread::spawn(ours), Peer::start(peer, &instructions))
            }
            _ => {
                let server = Peer::start(peer, &instructions);
                let address = server.address();
                let ours = move || {
                    let connected = Endpoint::connect(address, &options);
                    play_until_it_breaks(connected, &end, &scenario, Side::Client)
                };
                (thread::spawn(ours), server)
            }
        };
        // Of the set-up and of the transfers.
        thread::sleep(Duration::from_micros(random() % 1_000_000));
        victim.signal(Signal::KILL);
        let killed = Instant::now();
        let took = ended_after(survivor.join().expect("no panic"), killed);
        times.extend(took.filter(|_| number >= warm_up));
        let _ = victim.finish(LONG);
    }
    wait_for_nothing_left(before.expect("it was warm"));
    show("this end ended after a kill of its peer", times);
}

/// All connections are reset at a random moment, and none comes about any more: both ends end and
/// say why.
#[test]
fn connections_that_are_all_reset_at_any_moment() {
    let _serial = SERIAL.lock();
    let mut times = Vec::new();
    for number in 0..count("resets", 4) {
        let instructions = instructions(number);
        let scenario = &instructions.scenario;
        let mut options = [(); 2].map(|()| instructions.options().expect("they are good"));
        let ends = options.each_mut().map(End::of);
        let [ours, theirs] = options;
        let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), ours).expect("a free port");
        let proxy = Proxy::start(endpoint.local_addr());
        let address = proxy.address();
        let (outcomes, cut) = thread::scope(|scope| {
            let [server_end, client_end] = &ends;
            let server = scope.spawn(move || {
                let connected = endpoint.accept(Duration::from_secs(2));
                play_until_it_breaks(connected, server_end, scenario, Side::Server)
            });
            let client = scope.spawn(move || {
                let connected = Endpoint::connect(address, &theirs);
                play_until_it_breaks(connected, client_end, scenario, Side::Client)
            });
            thread::sleep(Duration::from_micros(random() % 1_000_000));
            proxy.cut();
            let cut = Instant::now();
            let ends = [server, client].map(|end| end.join().expect("no panic"));
            (ends, cut)
        });
        times.extend(outcomes.into_iter().filter_map(|end| ended_after(end, cut)));
    }
    show("an end ended after a reset of all connections", times);
}

/// Random transfers between two ends, some of which are cancelled, over connections that come and
/// go: every byte is right, and memory, descriptors and threads do not grow.
#[test]
fn random_transfers_leave_nothing_behind() {
    let _serial = SERIAL.lock();
    let wanted = Duration::from_secs(count("seconds", 8));
    let options = Options::tcp(Auth::Key(key()));
    let endpoint =
        Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let (mut transfers, mut cancelled, mut connections) = (0u64, 0u64, 0u64);
    let (mut early, mut late) = ((0, 0, 0), (0, 0, 0));
    let started = Instant::now();
    while started.elapsed() < wanted {
        let (server, client) = thread::scope(|scope| {
            let client = scope.spawn(|| Endpoint::connect(address, &options));
            let server = endpoint.accept(LONG).expect("it comes");
            (
                server,
                client.join().expect("no panic").expect("it listens"),
            )
        });
        connections += 1;
        for _ in 0..random() % 200 {
            let (from, to) = match random() % 2 {
                0 => (&server, &client),
                _ => (&client, &server),
            };
            let several = (0..1 + random() % 8).map(|tag| {
                transfers += 1;
                let content = Content::new(random(), transfers);
                let bytes = random() % (1 << (random() % 23));
                let (source, destination) =
                    (Source::new(content, bytes, 0), Destination::new(bytes, 0));
                let receive = to.receive(destination.slice(), tag).start().expect("room");
                let send = from.send(source.slice(), tag).start().expect("room");
                if random().is_multiple_of(16) {
                    cancelled += 1;
                    send.cancel();
                    // A send whose receive alone is cancelled waits for the next one.
                    receive.cancel();
                }
                (content, destination, source, send, receive)
            });
            for (content, destination, _source, send, receive) in several.collect::<Vec<_>>() {
                let ends = [send.wait(), receive.wait()];
                if ends[1].is_ok() {
                    assert_eq!(destination.defect(content), None, "{ends:?}");
                }
                let is_lost =
                    |end: &Result<_, Error>| matches!(end, Err(Error::ConnectionLost { .. }));
                assert!(!ends.iter().any(is_lost), "{ends:?}");
            }
            let now = (resources().0, resources().1, threads());
            let most = |a: (u64, usize, usize)| (a.0.max(now.0), a.1.max(now.1), a.2.max(now.2));
            match started.elapsed() < wanted / 2 {
                true => early = most(early),
                false => late = most(late),
            }
        }
        thread::scope(|scope| {
            scope.spawn(|| client.close(LONG).expect("an orderly goodbye"));
            server.close(LONG).expect("an orderly goodbye");
        });
    }
    let held = |(bytes, descriptors, threads): (u64, usize, usize)| json!({ "mib": bytes >> 20, "descriptors": descriptors, "threads": threads });
    print_figures(json!({
        "what": "random transfers", "seconds": wanted.as_secs(), "transfers": transfers,
        "cancelled": cancelled, "connections": connections,
        "most_in_first_half": held(early), "most_in_second_half": held(late),
    }));
    assert!(late.0 <= early.0 + (64 << 20), "{early:?} {late:?}");
    // A goodbye may be under way.
    assert!(
        late.1 <= early.1 + 16 && late.2 <= early.2 + 8,
        "{early:?} {late:?}"
    );
}

/// One of sixteen from the client's own address.
const STRANGERS_A_SECOND: u32 = 16_000;
/// Strangers that are there at a time.
const PRESENT: usize = 1200;
/// Half a round trip to the listener of the next test.
const TRIP: Duration = Duration::from_millis(25);

/// A path on which every byte is under way for a trip.
fn path_to(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    thread::spawn(move || {
        for client in listener.incoming() {
            let Ok(client) = client else { return };
            let Ok(server) = TcpStream::connect(server) else {
                continue;
            };
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else {
                    continue;
                };
                let (under_way, arrives) = channel::<(Instant, Vec<u8>)>();
                thread::spawn(move || {
                    for (at, bytes) in arrives {
                        thread::sleep(at.saturating_duration_since(Instant::now()));
                        if to.write_all(&bytes).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Both);
                });
                thread::spawn(move || {
                    let mut bytes = vec![0; 64 << 10];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if under_way
                            .send((Instant::now() + TRIP, bytes[..count].to_vec()))
                            .is_err()
                        {
                            break;
                        }
                    }
                });
            }
        }
    });
    address
}

/// A connection from an address of this host's loopback network.
fn from_address(own: Ipv4Addr, to: SocketAddr) -> Option<OwnedFd> {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let stranger = socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
    bind(&stranger, &SocketAddrV4::new(own, 0)).ok()?;
    connect(&stranger, &to).ok()?;
    Some(stranger)
}

/// Silent strangers keep coming from a thousand addresses, one of sixteen from the client's own,
/// while clients with a long way connect one after the other.
#[test]
fn strangers_from_a_thousand_addresses_keep_no_client_out() {
    let _serial = SERIAL.lock();
    let clients = count("clients", 5);
    let options = Options::tcp(Auth::Key(key()));
    let endpoint =
        Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let path = path_to(address);
    let done = AtomicBool::new(false);
    let came = AtomicU64::new(0);
    let before = resources();
    let started = Instant::now();
    let (times, most) = thread::scope(|scope| {
        scope.spawn(|| {
            // Each stays a while: more than a listener holds are there at any time.
            let mut present = std::collections::VecDeque::new();
            for number in 0u32.. {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                let due = started + Duration::from_secs(1) * number / STRANGERS_A_SECOND;
                thread::sleep(due.saturating_duration_since(Instant::now()));
                let own = match number % 16 {
                    0 => Ipv4Addr::LOCALHOST,
                    _ => Ipv4Addr::from(0x7f01_0000 + number % 1000),
                };
                present.extend(from_address(own, address));
                came.fetch_add(1, Ordering::Relaxed);
                if present.len() > PRESENT {
                    present.pop_front();
                }
            }
        });
        wait(LONG, "a crowd", || {
            (came.load(Ordering::Relaxed) > PRESENT as u64).then_some(())
        });
        let mut times = Vec::new();
        let mut most = (0, 0);
        for number in 0..clients {
            let started = Instant::now();
            let options = &options;
            let client = scope.spawn(move || (Endpoint::connect(path, options), started.elapsed()));
            let server = endpoint.accept(LONG).expect("the client gets through");
            let (client, took) = client.join().expect("no panic");
            let client = client.expect("it gets through");
            times.push(took);
            let content = Content::new(8, number);
            let (source, destination) = (
                Source::new(content, 100_000, 0),
                Destination::new(100_000, 0),
            );
            let receive = server
                .receive(destination.slice(), 1)
                .start()
                .expect("room");
            client
                .send(source.slice(), 1)
                .start()
                .expect("room")
                .wait()
                .expect("it arrives");
            receive.wait().expect("it arrives");
            assert_eq!(destination.defect(content), None);
            let now = resources();
            most = (most.0.max(now.0), most.1.max(now.1));
        }
        done.store(true, Ordering::Relaxed);
        (times, most)
    });
    show(
        "a client with a round trip of 50 ms connected among strangers",
        times,
    );
    let grown = most.0.saturating_sub(before.0) >> 20;
    let (strangers, refused) = (came.load(Ordering::Relaxed), endpoint.refusals().count);
    print_figures(json!({
        "what": "strangers", "came": strangers, "refused": refused,
        "a_second": strangers / started.elapsed().as_secs().max(1),
        "mib_more": grown, "descriptors": most.1,
    }));
    assert!(refused > 0);
    // What the listener may hold, the strangers' own ends, and what the clients have.
    assert!(
        most.1 < before.1 + 1024 + PRESENT + 200,
        "{} descriptors",
        most.1
    );
    assert!(grown <= 64, "{grown} MiB more");
}
