//! Faults at random moments, as often as wanted ([`tcpx_tests::faults`]). Nothing here depends on speed: what took how
//! long is printed, and `cargo xtask faults` shows it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{Auth, Connection, Deadlines, Endpoint, Error, Key, Level, NetworkError, Options};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::content::Content;
use tcpx_tests::faults::count;
use tcpx_tests::instructions::{Carrier, Instructions, Summary};
use tcpx_tests::part;
use tcpx_tests::process::{Peer, wait};
use tcpx_tests::proxy::Proxy;
use tcpx_tests::scenario::{Scenario, Side};

const PEER: &str = env!("CARGO_BIN_EXE_peer");
/// Ten times what anything here may take.
const LONG: Duration = Duration::from_secs(60);

/// One at a time: each has the machine to itself.
static SERIAL: Mutex<()> = Mutex::new(());

fn random() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("there is randomness");
    u64::from_ne_bytes(bytes)
}

fn key() -> Key {
    tcpx::generate_key().expect("there is randomness")
}

/// Shows how long something took, the middle and the worst of a hundred.
fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |of_hundred: usize| times[(times.len() * of_hundred).div_ceil(100).max(1) - 1];
    let (median, p99) = (at(50).as_millis(), at(99).as_millis());
    println!(
        "{what}: {} times, median {median} ms, p99 {p99} ms",
        times.len()
    );
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

/// What this process does with a peer, and when that came to nothing.
enum Outcome {
    /// The other end never came.
    NobodyCame,
    SetUpFailed(Error, Instant),
    Played(Box<Summary>),
}

/// This process's part of a transfer that something breaks.
fn play_until_it_breaks(
    connected: Result<Connection, Error>,
    scenario: &Scenario,
    side: Side,
) -> Outcome {
    let connection = match connected {
        Ok(connection) => connection,
        Err(Error::Network(NetworkError::AcceptTimedOut { .. })) => return Outcome::NobodyCame,
        Err(error) => return Outcome::SetUpFailed(error, Instant::now()),
    };
    Outcome::Played(Box::new(part::play(&connection, scenario, side)))
}

/// How long after `broken` it ended, if it was broken by that.
fn ended_after(outcome: Outcome, broken: Instant) -> Option<Duration> {
    let (at, error) = match outcome {
        Outcome::NobodyCame => return None,
        Outcome::SetUpFailed(error, at) => (at, error.to_string()),
        Outcome::Played(summary) => {
            assert_eq!(summary.defects, [""; 0], "{summary:#?}");
            let whole = summary.succeeded == SIZES.len() as u64;
            assert!(whole || summary.failed.is_some(), "{summary:#?}");
            let first = summary.failures.first().map(|failure| &failure.error);
            (summary.failed?, first?.clone())
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
    Some(at.saturating_duration_since(broken))
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

/// SIGKILL of a peer process at a random moment of 2 GiB, whichever side it is: this one ends, has no transfer that counts as good
/// with a wrong byte, says why, and has nothing left of it.
#[test]
fn a_peer_that_is_killed_at_any_moment() {
    let _serial = SERIAL.lock();
    let (mut times, mut before) = (Vec::new(), None);
    let warm_up = 4;
    for number in 0..warm_up + count("kills", 6) {
        if number == warm_up {
            // What the process shares is there.
            before = Some((resources().1, threads()));
        }
        let mut instructions = instructions(number);
        let scenario = instructions.scenario.clone();
        let options = instructions.options().expect("they are good");
        let victim = match number % 2 {
            0 => {
                let endpoint =
                    Endpoint::listen(([127, 0, 0, 1], 0).into(), options).expect("a free port");
                instructions.connect = Some(endpoint.local_addr());
                let ours = move || {
                    let connected = endpoint.accept(Duration::from_secs(2));
                    play_until_it_breaks(connected, &scenario, Side::Server)
                };
                (thread::spawn(ours), Peer::start(PEER, &instructions))
            }
            _ => {
                let server = Peer::start(PEER, &instructions);
                let address = server.address();
                let ours = move || {
                    let connected = Endpoint::connect(address, &options);
                    play_until_it_breaks(connected, &scenario, Side::Client)
                };
                (thread::spawn(ours), server)
            }
        };
        let (survivor, victim) = victim;
        // Of the set-up and of the transfers.
        thread::sleep(Duration::from_micros(random() % 1_000_000));
        victim.kill();
        let killed = Instant::now();
        let took = ended_after(survivor.join().expect("no panic"), killed);
        times.extend(took.filter(|_| number >= warm_up));
        let _ = victim.finish(LONG);
    }
    wait_for_nothing_left(before.expect("it was warm"));
    show("this end ended after a kill of its peer", times);
}

/// All connections are reset at a random moment, and none comes about any more: both ends end and say why.
#[test]
fn connections_that_are_all_reset_at_any_moment() {
    let _serial = SERIAL.lock();
    let mut times = Vec::new();
    for number in 0..count("resets", 4) {
        let instructions = instructions(number);
        let scenario = &instructions.scenario;
        let options = &instructions.options().expect("they are good");
        let endpoint =
            Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone()).expect("a free port");
        let proxy = Proxy::start(endpoint.local_addr());
        let address = proxy.address();
        let (outcomes, cut) = thread::scope(|scope| {
            let server = scope.spawn(move || {
                let connected = endpoint.accept(Duration::from_secs(2));
                play_until_it_breaks(connected, scenario, Side::Server)
            });
            let client = scope.spawn(move || {
                let connected = Endpoint::connect(address, options);
                play_until_it_breaks(connected, scenario, Side::Client)
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

/// Random transfers between two ends, some of which are cancelled, over connections that come and go: every byte is right, and
/// memory, descriptors and threads do not grow.
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
    println!(
        "{transfers} random transfers, {cancelled} of them cancelled, over {connections} connections; memory, descriptors and threads at most {} MiB, {}, {} in the first half and {} MiB, {}, {} in the second",
        early.0 >> 20,
        early.1,
        early.2,
        late.0 >> 20,
        late.1,
        late.2
    );
    assert!(late.0 <= early.0 + (64 << 20), "{early:?} {late:?}");
    // A goodbye may be under way.
    assert!(
        late.1 <= early.1 + 16 && late.2 <= early.2 + 8,
        "{early:?} {late:?}"
    );
}

/// A relay that flips single bits.
struct Flipper {
    address: SocketAddr,
    flips: Arc<AtomicU64>,
    /// Bytes from one flip to the next in a control connection and in a lane, at most; 0: none there.
    gaps: Arc<[AtomicU64; 2]>,
}

impl Flipper {
    fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let (flips, gaps) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new([AtomicU64::new(0), AtomicU64::new(0)]),
        );
        let (counted, wanted) = (Arc::clone(&flips), Arc::clone(&gaps));
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (counted, wanted) = (Arc::clone(&counted), Arc::clone(&wanted));
                thread::spawn(move || relay(client, target, &counted, &wanted));
            }
        });
        Self {
            address,
            flips,
            gaps,
        }
    }
}

fn relay(
    mut client: TcpStream,
    target: SocketAddr,
    flips: &Arc<AtomicU64>,
    gaps: &Arc<[AtomicU64; 2]>,
) {
    let mut head = [0; 16];
    let Ok(mut server) = TcpStream::connect(target) else {
        return;
    };
    if client.read_exact(&mut head).is_err() || server.write_all(&head).is_err() {
        return;
    }
    let gap = gaps[usize::from(head[12] == 1)].load(Ordering::Relaxed);
    let (Ok(from), Ok(to)) = (client.try_clone(), server.try_clone()) else {
        return;
    };
    let counted = Arc::clone(flips);
    let up = thread::spawn(move || pump(from, to, gap, &counted));
    pump(server, client, gap, flips);
    let _ = up.join();
}

fn pump(mut from: TcpStream, mut to: TcpStream, gap: u64, flips: &AtomicU64) {
    let mut piece = vec![0; 64 << 10];
    let next = || match gap {
        0 => u64::MAX,
        gap => random() % gap,
    };
    let mut left = next();
    while let Ok(count @ 1..) = from.read(&mut piece) {
        let mut passed = 0;
        while left < (count - passed) as u64 {
            passed += left as usize;
            piece[passed] ^= 1 << (random() % 8);
            flips.fetch_add(1, Ordering::Relaxed);
            passed += 1;
            left = next();
        }
        left -= (count - passed) as u64;
        if to.write_all(&piece[..count]).is_err() {
            break;
        }
    }
    for stream in [&from, &to] {
        // It may be down already.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// Flips until there were enough. Where both ends compare digests, or payload is sealed, no flip may pass for good bytes;
/// without them that is promised of headers and control alone.
fn flips(encrypt: bool) {
    let _serial = SERIAL.lock();
    let wanted = count("flips", 150);
    let mut options = Options::tcp(Auth::Key(key()));
    options.encrypt = encrypt;
    options.channels = 4;
    options.chunk_bytes = Some(64 << 10);
    options.connect_timeout = Duration::from_secs(2);
    options.heartbeat = Duration::from_millis(200);
    options.dead_after = Duration::from_secs(2);
    options.deadlines = Deadlines {
        stall: Duration::from_secs(2),
        total: Some(Duration::from_secs(5)),
    };
    let endpoint =
        Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone()).expect("a free port");
    let flipper = Flipper::start(endpoint.local_addr());
    let (mut good, mut bad, mut unconnected) = (0u64, 0u64, 0u64);
    let bytes = 4 << 20;
    for round in 0.. {
        if flipper.flips.load(Ordering::Relaxed) >= wanted {
            break;
        }
        // In lanes, in control, in both; now and then in the handshake.
        let gaps = [[0, 1 << 20], [8 << 10, 0], [16 << 10, 4 << 20], [300, 0]][round as usize % 4];
        for (held, gap) in flipper.gaps.iter().zip(gaps) {
            held.store(gap, Ordering::Relaxed);
        }
        let (server, client) = thread::scope(|scope| {
            let client = scope.spawn(|| Endpoint::connect(flipper.address, &options));
            // Whether the client comes is not sure.
            let server = endpoint.accept(Duration::from_millis(500));
            (server, client.join().expect("no panic"))
        });
        let (Ok(server), Ok(client)) = (server, client) else {
            unconnected += 1;
            continue;
        };
        let level = if encrypt {
            Level::Placed
        } else {
            Level::Verified
        };
        for number in 0..4 {
            let content = Content::new(8, round * 4 + number);
            let (source, destination) =
                (Source::new(content, bytes, 0), Destination::new(bytes, 0));
            let receive = server
                .receive(destination.slice(), number)
                .level(level)
                .start();
            let send = client.send(source.slice(), number).level(level).start();
            let (Ok(receive), Ok(send)) = (receive, send) else {
                bad += 1;
                break;
            };
            let ends = [send.wait(), receive.wait()];
            let is_good = ends.iter().any(Result::is_ok);
            let defect = is_good.then(|| destination.defect(content)).flatten();
            assert_eq!(defect, None, "round {round}, transfer {number}: {ends:?}");
            *(if is_good { &mut good } else { &mut bad }) += 1;
            if let Some(error) = ends.iter().find_map(|end| end.as_ref().err()) {
                assert!(!matches!(error, Error::Defect { .. }), "{error}");
            }
        }
    }
    let flipped = flipper.flips.load(Ordering::Relaxed);
    let how = if encrypt { "sealed" } else { "plain, verified" };
    println!(
        "{how}: {flipped} flips; {good} transfers good, {bad} failed, {unconnected} connections not set up"
    );
    assert!(good > 0, "nothing came through at all");
}

#[test]
fn flipped_bits_of_plain_payload_are_found_where_digests_are_compared() {
    flips(false);
}

#[test]
fn flipped_bits_of_sealed_payload_never_pass() {
    flips(true);
}

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

/// Silent strangers keep coming from a thousand addresses, one of sixteen from the client's own, while clients with a long way
/// connect one after the other.
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
    let (times, most) = thread::scope(|scope| {
        scope.spawn(|| {
            // Each stays a while: as many as a listener holds are there at any time.
            let mut present = std::collections::VecDeque::new();
            for number in 0u32.. {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                let own = match number % 16 {
                    0 => Ipv4Addr::LOCALHOST,
                    _ => Ipv4Addr::from(0x7f01_0000 + number % 1000),
                };
                present.extend(from_address(own, address));
                came.fetch_add(1, Ordering::Relaxed);
                if present.len() > 400 {
                    present.pop_front();
                }
            }
        });
        wait(LONG, "a crowd", || {
            (came.load(Ordering::Relaxed) > 1000).then_some(())
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
    println!(
        "{strangers} strangers came, {refused} connections were refused; {grown} MiB more memory, {} descriptors",
        most.1
    );
    assert!(refused > 0);
    // What the listener may hold, the strangers' own ends, and what the clients have.
    assert!(
        most.1 < before.1 + 1024 + 401 + 200,
        "{} descriptors",
        most.1
    );
    assert!(grown <= 64, "{grown} MiB more");
}
