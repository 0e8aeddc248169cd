//! How many round trips a connection takes, counted and not timed: a relay carries what is under
//! way one trip further only when nothing else can happen, which is when every other thread of this
//! process sleeps. So the count is the same on any host, and this is the only test of its process.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{Auth, Endpoint, Options, generate_key};

/// Far beyond what anything in this process takes; no figure depends on it.
const LONG: Duration = Duration::from_secs(600);

/// A stream through the relay.
struct Stream {
    ends: [TcpStream; 2],
    ended: [bool; 2],
    /// The trip behind which the client's end is connected.
    open: u64,
}

/// Bytes under way; none: the end of the stream.
struct UnderWay {
    arrives: u64,
    stream: usize,
    to: usize,
    bytes: Vec<u8>,
}

struct Relay {
    listener: TcpListener,
    server: SocketAddr,
    streams: Vec<Stream>,
    under_way: Vec<UnderWay>,
    /// Trips that have passed, two for a round.
    now: u64,
}

impl Relay {
    fn new(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        Self {
            listener,
            server,
            streams: Vec::new(),
            under_way: Vec::new(),
            now: 0,
        }
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("it is bound")
    }

    /// Carries until all are done; the trips behind which each was.
    fn run<const ENDS: usize>(mut self, done: &[AtomicBool; ENDS]) -> [u64; ENDS] {
        let until = Instant::now() + LONG;
        let mut trips = [None; ENDS];
        loop {
            assert!(
                Instant::now() < until,
                "not quiet, or not done, after {} trips",
                self.now
            );
            if self.collect() || !self.is_quiet() || self.collect() {
                thread::sleep(Duration::from_micros(200));
                continue;
            }
            for (trips, done) in trips.iter_mut().zip(done) {
                if done.load(Ordering::SeqCst) {
                    trips.get_or_insert(self.now);
                }
            }
            if trips.iter().all(Option::is_some) {
                return trips.map(Option::unwrap_or_default);
            }
            let Some(next) = self.under_way.iter().map(|one| one.arrives).min() else {
                // Somebody waits for a time, or runs again after all seemed to sleep. Neither is a
                // trip.
                thread::sleep(Duration::from_millis(1));
                continue;
            };
            self.now = next;
            self.deliver();
        }
    }

    /// Takes what the ends have said; whether there was something.
    fn collect(&mut self) -> bool {
        let mut any = false;
        while let Ok((client, _)) = self.listener.accept() {
            let server = TcpStream::connect(self.server).expect("it listens");
            for end in [&client, &server] {
                end.set_nonblocking(true).expect("a socket");
                end.set_nodelay(true).expect("a socket");
            }
            self.streams.push(Stream {
                ends: [client, server],
                ended: [false; 2],
                open: self.now + 2,
            });
            any = true;
        }
        let mut bytes = vec![0; 64 << 10];
        for (number, stream) in self.streams.iter_mut().enumerate() {
            for from in [0, 1] {
                while !stream.ended[from] {
                    let count = match stream.ends[from].read(&mut bytes) {
                        Ok(count) => count,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        Err(_) => 0,
                    };
                    stream.ended[from] = count == 0;
                    self.under_way.push(UnderWay {
                        arrives: self.now.max(stream.open) + 1,
                        stream: number,
                        to: 1 - from,
                        bytes: bytes[..count].to_vec(),
                    });
                    any = true;
                }
            }
        }
        any
    }

    fn deliver(&mut self) {
        let now = self.now;
        for one in self.under_way.extract_if(.., |one| one.arrives <= now) {
            let mut to = &self.streams[one.stream].ends[one.to];
            match one.bytes.as_slice() {
                // The other end may have gone.
                [] => drop(to.shutdown(Shutdown::Write)),
                bytes => to.write_all(bytes).expect("a set-up fits in the buffers"),
            }
        }
    }

    /// Whether nothing can happen by itself: all that was sent has arrived, every other thread
    /// sleeps, and none has run since.
    fn is_quiet(&self) -> bool {
        let before = sleepers();
        before.is_some() && !self.has_packets_under_way() && sleepers() == before
    }

    /// Whether the kernel has still to move something between the ends, which on a busy host it
    /// does later.
    fn has_packets_under_way(&self) -> bool {
        let ports = [self.address().port(), self.server.port()].map(|port| format!("{port:04X}"));
        let table = fs::read_to_string("/proc/self/net/tcp").expect("the system tells");
        table.lines().skip(1).any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_ours = [1, 2].iter().any(|at| {
                ports
                    .iter()
                    .any(|port| fields[*at].ends_with(port.as_str()))
            });
            // Being connected (SYN_SENT, SYN_RECV), or with bytes that are not acknowledged; a
            // listener counts otherwise.
            let moves = ["02", "03"].contains(&fields[3]) || !fields[4].starts_with("00000000:");
            is_ours && fields[3] != "0A" && moves
        })
    }
}

/// The other threads and how often each has gone to sleep; `None` if one does not sleep.
fn sleepers() -> Option<Vec<(String, String)>> {
    let own = fs::read_link("/proc/thread-self").expect("the system tells");
    let mut all = Vec::new();
    for thread in fs::read_dir("/proc/self/task").expect("the system tells") {
        let thread = thread.ok()?;
        if own.ends_with(thread.file_name()) {
            continue;
        }
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name));
            line.unwrap_or_default().to_owned()
        };
        if !field("State:").contains("S (sleeping)") {
            return None;
        }
        let switches = field("voluntary_ctxt_switches:") + &field("nonvoluntary_ctxt_switches:");
        all.push((thread.file_name().to_string_lossy().into_owned(), switches));
    }
    Some(all)
}

#[test]
fn a_connection_takes_four_round_trips() {
    for lanes in [1, 8] {
        // The server has the client's last word a trip later. On a busy host a thread may meet a
        // lane before the client's proof, which lay there with it: that lane takes another round.
        let mut took = Vec::new();
        while took.len() < 20 && took.last() != Some(&FOUR) {
            took.push(trips(lanes));
        }
        assert_eq!(took.iter().min(), Some(&FOUR), "{lanes} lanes: {took:?}");
    }
}

/// Trips until client and server are done: four rounds.
const FOUR: [u64; 2] = [2 * 4, 2 * 4 + 1];

/// Trips that a connection of so many lanes takes: until the client is done, and the server.
fn trips(lanes: u16) -> [u64; 2] {
    let mut options = Options::tcp(Auth::Key(generate_key().expect("there is randomness")));
    options.channels = lanes;
    // Nothing is said because time passes.
    options.heartbeat = LONG;
    options.dead_after = 2 * LONG;
    options.connect_timeout = LONG;
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = Endpoint::listen(address, options.clone()).expect("a free port");
    let relay = Relay::new(server.local_addr());
    let address = relay.address();
    let done = [AtomicBool::new(false), AtomicBool::new(false)];
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let accepted = server.accept(LONG);
            done[1].store(true, Ordering::SeqCst);
            accepted
        });
        let connected = scope.spawn(|| {
            let connected = Endpoint::connect(address, &options);
            done[0].store(true, Ordering::SeqCst);
            connected
        });
        let trips = relay.run(&done);
        drop(connected.join().expect("no panic").expect("it listens"));
        drop(
            accepted
                .join()
                .expect("no panic")
                .expect("the client connects"),
        );
        trips
    })
}
