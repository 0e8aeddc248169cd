//! Deadlines, cancels and closes take the time that they are given, also while the peer's process
//! is stopped: its sockets are full, and nobody answers. Afterwards both ends go on over the same
//! connection.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use tcpx::{
    Auth, Connection, Deadlines, Endpoint, Error, Key, Level, Options, ProgressMode, Region,
    Rights, TcpNetwork, Transfer, WindowKey,
};
use tcpx_net::{DialOptions, Local, TcpOptions};
use tcpx_tests::child;
use tcpx_tests::pair::{
    LONG, Listening, close, connect_back, new_key, process, tell_window, told_window,
};
use tcpx_tests::process::Running;
use tcpx_wire::session::{Delivered, EndCause};

/// Of each operation.
const DEADLINE: Duration = Duration::from_millis(200);
/// Behind it, on a machine that does other things too. What took its time before took five seconds.
const LATE: Duration = Duration::from_millis(2300);

/// More than all sockets hold, in chunks that each hold more than one does.
const BYTES: usize = 24 << 20;
const CHUNK_BYTES: u32 = 512 << 10;
const SOCKET_BUFFER: u32 = 64 << 10;

/// Where gets read in the window, behind what puts write.
const READ: u64 = BYTES as u64;

/// What lanes there are, whether they are sealed, and whether payload is read where it lies.
#[derive(Clone, Copy, Debug)]
struct Lanes {
    count: u16,
    sealed: bool,
    local: bool,
}

fn options(
    key: Key,
    Lanes {
        count,
        sealed,
        local,
    }: Lanes,
) -> Options {
    let network = TcpNetwork::new(TcpOptions {
        lanes: count,
        socket_buffer: SOCKET_BUFFER,
        local: if local { Local::On } else { Local::Off },
        ..TcpOptions::default()
    });
    let mut options = Options::new(Arc::new(network), Auth::Key(key));
    options.encrypt = sealed;
    options.chunk_bytes = Some(CHUNK_BYTES);
    options.deadlines.stall = 10 * LONG;
    options.dead_after = LONG;
    options
}

const TO_POSTED: u64 = 1;
const ECHO: u64 = 3;

/// The process that is stopped: it exposes a window, has posted a receive, and says back what it
/// hears.
fn stopped_process(lanes: Lanes) {
    let connection = connect_back(|key| options(key, lanes));
    let memory = Region::host(2 * BYTES).expect("memory");
    let window = connection.expose(memory.all(), Rights::GetAndPut);
    let window = window.expect("connected");
    let destination = Region::host(BYTES).expect("memory");
    let posted = connection.receive(destination.all(), TO_POSTED).start();
    let word = Region::host(WindowKey::BYTES).expect("memory");
    tell_window(&connection, &window);
    let posted = posted.expect("connected");
    let echo = |tag| {
        let heard = connection.receive(word.all(), tag).start()?.wait()?;
        // The send had ended, and its memory was filled with something else: none of that is
        // success.
        if let Some(Ok(_)) = posted.test() {
            let is_sent = destination.with_bytes(.., |bytes| bytes.iter().all(|byte| *byte == 0));
            assert!(is_sent.expect("free"), "it got what nobody sent");
        }
        let back = word.slice(..heard.bytes as usize).expect("within");
        connection.send(back, tag).start()?.wait()
    };
    while echo(ECHO).is_ok() {}
    drop((posted, window));
}

/// A peer in another process.
struct Peer {
    process: Running,
    connection: Connection,
    window: WindowKey,
    _endpoint: Endpoint,
}

impl Peer {
    fn start(test: &str, role: &str, lanes: Lanes) -> Self {
        let (process, connection, endpoint) = process(test, role, &[], |key| options(key, lanes));
        Self {
            window: told_window(&connection),
            process,
            connection,
            _endpoint: endpoint,
        }
    }

    /// The process goes on, and the connection does all that it did, in memory that operations
    /// which ended early had.
    fn goes_on(&self, own: &Region) {
        let connection = &self.connection;
        let content: Vec<u8> = (0..BYTES).map(|at| (at / 3) as u8).collect();
        own.write_from(0, &content).expect("free");
        // The peer hears of it right behind the end of a former one.
        let put = connection.put(own.all(), &self.window, 0).start();
        self.process.signal(Signal::CONT);
        put.and_then(Transfer::wait).expect("a put is placed");
        let back = Region::host(BYTES).expect("memory");
        let got = connection.get(back.all(), &self.window, 0).start();
        got.and_then(Transfer::wait).expect("a get is answered");
        let is_same = back.with_bytes(.., |bytes| bytes == content);
        assert!(is_same.expect("free"), "something came late");
        let word = Region::host(16).expect("memory");
        let send = connection.send(word.all(), ECHO).start().expect("room");
        send.wait().expect("the peer receives");
        let heard = connection.receive(word.all(), ECHO).start().expect("room");
        assert_eq!(heard.wait().expect("the peer answers").bytes, 16);
    }
}

/// Operations of all kinds, each with memory of its own.
fn start_all(peer: &Peer, deadlines: Deadlines) -> Vec<(&'static str, Region, Transfer)> {
    let Peer {
        connection: c,
        window,
        ..
    } = peer;
    let region = |bytes| Region::host(bytes).expect("memory");
    let mut all = Vec::new();
    let mut add = |what, memory: Region, started: Result<Transfer, Error>| {
        all.push((what, memory, started.expect("room")));
    };
    let memory = region(BYTES);
    let send = c.send(memory.all(), TO_POSTED).deadlines(deadlines);
    add("a send to a posted receive", memory, send.start());
    for (what, bytes, tag, level) in [
        ("a send without a receive", BYTES, 10, Level::Placed),
        ("a small send", 100, 11, Level::Placed),
        ("a small send, verified", 100, 12, Level::Verified),
        ("an empty send", 0, 13, Level::Placed),
    ] {
        let memory = region(bytes);
        let send = c.send(memory.all(), tag).level(level).deadlines(deadlines);
        add(what, memory, send.start());
    }
    let memory = region(BYTES);
    let receive = c.receive(memory.all(), 14).deadlines(deadlines);
    add("a receive", memory, receive.start());
    for (what, bytes) in [("a put", BYTES), ("a small put", 100)] {
        let memory = region(bytes);
        let put = c.put(memory.all(), window, 0).deadlines(deadlines);
        add(what, memory, put.start());
    }
    let memory = region(BYTES);
    let get = c.get(memory.all(), window, READ).deadlines(deadlines);
    add("a get", memory, get.start());
    let memory = region(3000);
    let piece = |at: usize| memory.slice(at..at + 1000).expect("within");
    let batch = c
        .batch()
        .put(piece(0), window, 0)
        .put(piece(1000), window, 9000);
    let batch = batch.get(piece(2000), window, READ).notify(b"behind it");
    add(
        "a batch",
        memory.clone(),
        batch.deadlines(deadlines).start(),
    );
    let notice = c.batch().notify(b"alone").deadlines(deadlines);
    add("a notification", region(0), notice.start());
    all
}

fn end_in_time(test: &str, cancels: bool) {
    let role = |lanes: Lanes| format!("{test} {lanes:?}");
    match LANES.iter().find(|lanes| child::is_child(&role(**lanes))) {
        Some(lanes) => stopped_process(*lanes),
        None => LANES
            .iter()
            .for_each(|lanes| all_end_in_time(test, &role(*lanes), *lanes, cancels)),
    }
}

fn all_end_in_time(test: &str, role: &str, lanes: Lanes, cancels: bool) {
    let peer = Peer::start(test, role, lanes);
    peer.process.stop();
    let total = (!cancels).then_some(DEADLINE);
    let stall = 10 * LONG;
    let all = start_all(&peer, Deadlines { stall, total });
    let begun = Instant::now();
    if cancels {
        // Until sockets are full.
        thread::sleep(DEADLINE);
        all.iter().for_each(|(.., transfer)| transfer.cancel());
    }
    for (what, memory, transfer) in &all {
        let left = (DEADLINE + LATE).saturating_sub(begun.elapsed());
        let ended = transfer.wait_timeout(left);
        let ended = ended.unwrap_or_else(|| panic!("{lanes:?}: {what} does not end"));
        let error = ended.expect_err("its peer is stopped");
        let Error::Operation { error: end, .. } = &error else {
            panic!("{lanes:?}: {what}: {error:?}");
        };
        let is_right = match &end.cause {
            EndCause::Cancelled => cancels,
            EndCause::DeadlinePassed(_) => !cancels,
            _ => false,
        };
        assert!(is_right, "{lanes:?}: {what}: {error}");
        assert_ne!(end.delivered, Delivered::All, "{lanes:?}: {what}: {error}");
        let is_free = memory.with_bytes_mut(.., |bytes| bytes.fill(0xEE));
        is_free.unwrap_or_else(|error| panic!("{lanes:?}: {what}: {error}"));
    }
    let (_, own, _) = &all[0];
    peer.goes_on(own);
}

/// One lane and several, plain and sealed; and a peer that reads payload where it lies.
const LANES: [Lanes; 5] = [
    Lanes {
        count: 1,
        sealed: false,
        local: false,
    },
    Lanes {
        count: 8,
        sealed: false,
        local: false,
    },
    Lanes {
        count: 1,
        sealed: true,
        local: false,
    },
    Lanes {
        count: 8,
        sealed: true,
        local: false,
    },
    Lanes {
        count: 2,
        sealed: false,
        local: true,
    },
];

#[test]
fn deadlines_end_operations_while_the_peer_is_stopped() {
    let test = "deadlines_end_operations_while_the_peer_is_stopped";
    end_in_time(test, false);
}

#[test]
fn cancels_end_operations_while_the_peer_is_stopped() {
    let test = "cancels_end_operations_while_the_peer_is_stopped";
    end_in_time(test, true);
}

#[test]
fn a_revoke_ends_while_the_peer_reads_nothing() {
    let test = "a_revoke_ends_while_the_peer_reads_nothing";
    let lanes = LANES[1];
    if child::is_child(test) {
        return stopped_getter(lanes);
    }
    let peer = Peer::start(test, test, lanes);
    let memory = Region::host(10 * BYTES).expect("memory");
    let window = peer.connection.expose(memory.all(), Rights::Get);
    let window = window.expect("connected");
    tell_window(&peer.connection, &window);
    // It stops itself as its get has begun to come.
    peer.process.wait_stopped(LONG);
    let begun = Instant::now();
    window.revoke(LONG).expect("nobody uses it any more");
    assert!(begun.elapsed() < DEADLINE + LATE, "{:?}", begun.elapsed());
    let is_free = memory.with_bytes_mut(.., |bytes| bytes.fill(0xEE));
    is_free.expect("nothing points at it");
    peer.goes_on(&Region::host(BYTES).expect("memory"));
}

/// Gets from a window of its peer, and stops in the middle of that.
fn stopped_getter(lanes: Lanes) {
    let connection = connect_back(|key| options(key, lanes));
    let memory = Region::host(BYTES).expect("memory");
    let window = connection.expose(memory.all(), Rights::GetAndPut);
    let window = window.expect("connected");
    tell_window(&connection, &window);
    let key = told_window(&connection);
    let word = Region::host(WindowKey::BYTES).expect("memory");
    let big = Region::host(10 * BYTES).expect("memory");
    let get = connection.get(big.all(), &key, 0).start().expect("room");
    while get.progress().bytes_done == 0 {
        thread::yield_now();
    }
    kill_process(rustix::process::getpid(), Signal::STOP).expect("it is us");
    get.wait().expect_err("its window is revoked");
    let echo = |tag| {
        let heard = connection.receive(word.all(), tag).start()?.wait()?;
        let back = word.slice(..heard.bytes as usize).expect("within");
        connection.send(back, tag).start()?.wait()
    };
    while echo(ECHO).is_ok() {}
}

/// Sends of one chunk each, to receives that a stopped process has posted.
const SHORT: usize = 200 << 10;
const SHORT_SENDS: u64 = 48;
const FIRST_SHORT: u64 = 100;

/// The process that is stopped: what it receives is as it was sent.
fn stopped_receiver(lanes: Lanes) {
    let connection = connect_back(|key| options(key, lanes));
    let posted = (FIRST_SHORT..FIRST_SHORT + SHORT_SENDS).map(|tag| {
        let memory = Region::host(SHORT).expect("memory");
        let receive = connection.receive(memory.all(), tag).start();
        (memory, receive.expect("connected"))
    });
    let posted: Vec<_> = posted.collect();
    let word = Region::host(WindowKey::BYTES).expect("memory");
    let window = connection
        .expose(word.all(), Rights::Put)
        .expect("connected");
    tell_window(&connection, &window);
    let heard = connection.receive(word.all(), ECHO).start();
    heard
        .and_then(Transfer::wait)
        .expect("it says when all has ended");
    for (memory, receive) in posted {
        if receive.wait().is_ok() {
            let is_sent = memory.with_bytes(.., |bytes| bytes.iter().all(|byte| *byte == 0));
            assert!(is_sent.expect("free"), "it got what nobody sent");
        }
    }
    connection.close(LONG).expect("all was right");
}

#[test]
fn what_is_read_once_its_send_has_ended_is_no_success() {
    let test = "what_is_read_once_its_send_has_ended_is_no_success";
    let lanes = LANES[4];
    if child::is_child(test) {
        return stopped_receiver(lanes);
    }
    for _ in 0..5 {
        let peer = Peer::start(test, test, lanes);
        peer.process.stop();
        let total = Some(DEADLINE);
        let stall = 10 * LONG;
        let sends = (FIRST_SHORT..FIRST_SHORT + SHORT_SENDS).map(|tag| {
            let memory = Region::host(SHORT).expect("memory");
            let send = peer.connection.send(memory.all(), tag);
            let send = send.deadlines(Deadlines { stall, total }).start();
            (memory, send.expect("room"))
        });
        let sends: Vec<_> = sends.collect();
        for (memory, send) in &sends {
            let ended = send.wait_timeout(DEADLINE + LATE).expect("it ends in time");
            ended.expect_err("its peer is stopped");
            let poisoned = memory.with_bytes_mut(.., |bytes| bytes.fill(0xEE));
            poisoned.expect("nothing points at it");
        }
        let word = Region::host(16).expect("memory");
        let told = peer.connection.send(word.all(), ECHO).start();
        peer.process.signal(Signal::CONT);
        told.and_then(Transfer::wait).expect("it is received");
        peer.process.succeeds();
    }
}

/// The receiver is later than any limit that the engine could have thought of by itself.
#[test]
fn a_close_waits_for_a_late_receiver_as_long_as_it_was_told() {
    const LATER: Duration = Duration::from_millis(5500);
    let network = Arc::new(TcpNetwork::new(TcpOptions::default()));
    let listening = Listening::new(network, |_| {}, |_| {});
    let (server, client) = listening.connect();
    let source = Region::host(BYTES).expect("memory");
    let send = client.send(source.all(), 1).start().expect("room");
    thread::scope(|scope| {
        let closing = scope.spawn(|| client.close(LONG));
        thread::sleep(LATER);
        let destination = Region::host(BYTES).expect("memory");
        let receive = server.receive(destination.all(), 1).start().expect("room");
        assert_eq!(receive.wait().expect("it comes").bytes, BYTES as u64);
        send.wait().expect("it was waited for");
        closing.join().expect("no panic").expect("all was done");
    });
}

/// A batch has many parts, and a notification behind them.
#[test]
fn a_close_waits_for_all_of_a_batch() {
    const PARTS: usize = 600;
    let network = Arc::new(TcpNetwork::new(TcpOptions::default()));
    let manual = |server: &mut Options| server.progress = ProgressMode::Manual;
    let listening = Listening::new(network, manual, |_| {});
    let (server, client) = listening.connect();
    let memory = Region::host(8 * PARTS).expect("memory");
    let window = server.expose(memory.all(), Rights::Put).expect("connected");
    // Each is an operation of its own.
    let key = WindowKey {
        takes_lists: false,
        ..window.key()
    };
    let source = Region::host(memory.len()).expect("memory");
    let mut batch = client.batch();
    for at in (0..memory.len()).step_by(8) {
        let part = source.slice(at..at + 8).expect("within");
        batch = batch.put(part, &key, at as u64);
    }
    let batch = batch.notify(b"all").start().expect("room");
    client.begin_close(LONG).expect("it is this process");
    let closing = thread::spawn(move || client.close(LONG));
    while !closing.is_finished() {
        server.progress().expect("it is this process");
        thread::yield_now();
    }
    batch.wait().expect("it was waited for");
    closing.join().expect("no panic").expect("all was done");
    let notice = server.notification(LONG).expect("it came");
    assert_eq!(notice.as_deref(), Some(&b"all"[..]));
}

/// A peer that has proved itself says nothing more: it holds up nobody's accept.
#[test]
fn an_accept_ends_in_time_while_a_peer_is_silent() {
    let network = || Arc::new(TcpNetwork::new(TcpOptions::default()));
    let key = new_key();
    let mut options = Options::new(network(), Auth::Key(key.clone()));
    options.connect_timeout = LONG;
    let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone());
    let endpoint = endpoint.expect("a free port");
    let until = DialOptions::until(Instant::now() + LONG);
    let silent = tcpx_net::dial(endpoint.local_addr(), &Auth::Key(key), &until);
    let silent = silent.expect("it proves itself");
    for limit in [0, 5, 100].map(Duration::from_millis) {
        let begun = Instant::now();
        endpoint.accept(limit).expect_err("nobody is set up");
        let took = begun.elapsed();
        assert!((limit..limit + LATE).contains(&took), "{limit:?}: {took:?}");
    }
    let address = endpoint.local_addr();
    thread::scope(|scope| {
        let connecting = scope.spawn(|| Endpoint::connect(address, &options));
        let accepted = endpoint.accept(Duration::MAX).expect("another one");
        let connected = connecting.join().expect("no panic").expect("it listens");
        close(accepted, connected);
    });
    drop(silent);
}

/// Its listener takes the connection and is a process that never runs, or says nothing.
#[test]
fn a_connect_ends_in_time_where_nobody_answers() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = silent.local_addr().expect("it is bound");
    let key = new_key();
    let network = Arc::new(TcpNetwork::new(TcpOptions::default()));
    let mut options = Options::new(network, Auth::Key(key));
    for limit in [1, 5, 200].map(Duration::from_millis) {
        options.connect_timeout = limit;
        let begun = Instant::now();
        Endpoint::connect(address, &options).expect_err("nobody answers");
        let took = begun.elapsed();
        assert!((limit..limit + LATE).contains(&took), "{limit:?}: {took:?}");
    }
}

#[test]
fn a_close_ends_what_is_left_when_its_time_is_over() {
    let network = Arc::new(TcpNetwork::new(TcpOptions::default()));
    let listening = Listening::new(network, |_| {}, |_| {});
    for limit in [0, 1, 300].map(Duration::from_millis) {
        let (server, client) = listening.connect();
        let source = Region::host(BYTES).expect("memory");
        let send = client.send(source.all(), 1).start().expect("room");
        let begun = Instant::now();
        client.close(limit).expect_err("nobody receives");
        let took = begun.elapsed();
        assert!((limit..limit + LATE).contains(&took), "{limit:?}: {took:?}");
        let ended = send.wait_timeout(LATE).expect("it has ended");
        ended.expect_err("nobody has received it");
        let is_free = source.with_bytes_mut(.., |bytes| bytes.fill(0xEE));
        is_free.expect("nothing points at it");
        server.close(LONG).expect("its peer has gone");
    }
    // Longer than any clock.
    let (server, client) = listening.connect();
    thread::scope(|scope| {
        let closing = scope.spawn(|| client.close(Duration::MAX));
        server.close(Duration::MAX).expect("an orderly goodbye");
        closing.join().expect("no panic").expect("as well");
    });
    let (server, client) = listening.connect();
    close(server, client);
}
