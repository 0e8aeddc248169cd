//! Two ends on one host: payload in host memory is read where it lies, as whole and as timely as
//! over lanes.

use std::ffi::CString;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tcpx::{
    Auth, Connection, Deadlines, ErrorKind, Key, Level, Options, Region, Rights, TcpNetwork,
    Transfer, WindowKey,
};
use tcpx_net::{Local, LocalSizes, TcpOptions};
use tcpx_tests::child;
use tcpx_tests::content::Choices;
use tcpx_tests::pair::{
    LONG, Listening, close, connect_back, process, tell_window, told_window, variable,
};
use tcpx_tests::support::{random, until};

const READ_WHERE_IT_LIES: &str = "host memory is read where it lies";

pub(crate) fn network(local: Local, local_sizes: LocalSizes) -> Arc<TcpNetwork> {
    Arc::new(TcpNetwork::new(TcpOptions {
        lanes: 2,
        local,
        local_sizes,
        ..TcpOptions::default()
    }))
}

/// Little at a time.
const SMALL: LocalSizes = LocalSizes {
    least: 1,
    slice: 997,
    messages: 1,
    windows: 1,
    imports: 1,
    chunk: 2 << 20,
    parts: 3,
};

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

/// Payload bytes that each end counts as sent, and as received.
fn payload_moved(ends: [&Connection; 2]) -> [u64; 4] {
    let [server, client] = ends.map(Connection::statistics);
    [
        server.bytes_sent,
        server.bytes_received,
        client.bytes_sent,
        client.bytes_received,
    ]
}

#[test]
fn payload_is_read_where_it_lies_and_comes_whole() {
    for sizes in [LocalSizes::default(), SMALL] {
        payload_comes_whole(sizes);
    }
}

fn payload_comes_whole(sizes: LocalSizes) {
    let listening = Listening::new(network(Local::On, sizes), |_| {}, |_| {});
    let (server, client) = listening.connect();
    for end in [&server, &client] {
        assert!(end.path().contains(READ_WHERE_IT_LIES), "{}", end.path());
    }
    let before = over_tcp(&server, &client);
    let mut moved = 0;
    let sizes = [1, 70_000, 200 << 10, 1 << 20, (1 << 20) + 1, (9 << 20) + 3];
    for (bytes, level) in sizes
        .into_iter()
        .zip([Level::Placed, Level::Verified].repeat(3))
    {
        let counted = payload_moved([&server, &client]);
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
        if bytes > 1 {
            let now = payload_moved([&server, &client]);
            let counted = now
                .into_iter()
                .zip(counted)
                .map(|(now, before)| now - before);
            let bytes = bytes as u64;
            assert_eq!(
                counted.collect::<Vec<_>>(),
                [bytes, 2 * bytes, 2 * bytes, bytes]
            );
        }
        moved += 3 * bytes as u64;
    }
    let went = over_tcp(&server, &client) - before;
    assert!(went < moved / 4, "{went} of {moved} bytes went over TCP");
    close(server, client);
}

/// Pieces of some kilobytes in an order of their own, at both ends: hundreds to a chunk.
#[test]
fn lists_of_pieces_are_read_where_they_lie() {
    let listening = Listening::new(network(Local::On, SMALL), |_| {}, |_| {});
    let (server, client) = listening.connect();
    // In one turn, in parts that no entry has room for, and in chunks.
    for (pieces, piece) in [
        (900, 700),
        (3, 70_000),
        (2000, 500),
        (2000, 5000),
        (2000, 70_000),
    ] {
        let bytes = pieces * piece;
        let content = random(bytes);
        let (source, memory) = (region(&content), Region::host(bytes).expect("memory"));
        let window = server.expose(memory.all(), Rights::Put).expect("connected");
        let mut order: Vec<usize> = (0..pieces).collect();
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
        assert!(
            holds(&memory, &expected),
            "{pieces} pieces of {piece} bytes"
        );
        window.revoke(LONG).expect("nobody uses it");
    }
    close(server, client);
}

/// The source is its program's again as soon as its send has ended, whatever the peer is about to
/// read.
#[test]
fn what_a_send_has_given_back_is_no_success_of_its_receive() {
    const BYTES: usize = 8 << 20;
    const ROUNDS: u64 = 400;
    let listening = Listening::new(network(Local::On, LocalSizes::default()), |_| {}, |_| {});
    let (server, client) = listening.connect();
    let content = random(BYTES);
    let (source, destination) = (region(&content), Region::host(BYTES).expect("memory"));
    let mut random = Choices::new(1);
    let mut cut = 0;
    for tag in 0..ROUNDS {
        source.write_from(0, &content).expect("it was given back");
        let bytes = [BYTES, 1 << 20, 70_000][tag as usize % 3];
        let part = |region: &Region| region.slice(..bytes).expect("within");
        let post = || server.receive(part(&destination), tag).start();
        // Of some the receive comes after the send has ended.
        let posted = (tag % 7 > 0).then(post);
        // Some are not cut, however busy the machine is.
        let cuts = tag % 10 > 0;
        let most = bytes as u64 / 2800;
        let total = cuts.then(|| Duration::from_micros(random.below(most)));
        let deadlines = Deadlines { total, stall: LONG };
        let send = client.send(part(&source), tag).deadlines(deadlines).start();
        let later = posted.is_none() && !cuts;
        let posted = if later { Some(post()) } else { posted };
        let sent = send.and_then(Transfer::wait);
        let poisoned = source.with_bytes_mut(.., |bytes| bytes.fill(0xEE));
        poisoned.expect("it was given back");
        cut += u64::from(sent.is_err());
        let Some(receive) = posted else {
            continue;
        };
        let received = receive.expect("connected").wait();
        let same = destination.with_bytes(..bytes, |came| came == &content[..bytes]);
        assert!(
            received.is_err() || same.expect("free"),
            "round {tag}: {sent:?}, {received:?}"
        );
    }
    assert!(cut > 0 && cut < ROUNDS, "{cut} of {ROUNDS} were cut");
    close(server, client);
}

#[test]
fn who_wants_no_local_path_or_encrypts_has_none() {
    let (off, encrypted) = (
        ", not local: the peer has it",
        ", not local: payload is encrypted",
    );
    for (server, client, encrypt, why_not) in [
        (Local::Off, Local::On, false, ["", off]),
        (Local::On, Local::Off, false, [off, ""]),
        (Local::Auto, Local::Auto, true, [encrypted; 2]),
    ] {
        let change = |local: Local| {
            move |options: &mut Options| {
                options.network = network(local, LocalSizes::default());
                options.encrypt = encrypt;
            }
        };
        let listening = Listening::new(
            network(Local::Off, LocalSizes::default()),
            change(server),
            change(client),
        );
        let (server, client) = listening.connect();
        let content = random(3 << 20);
        let (source, destination) = (region(&content), region(&content));
        let receive = server.receive(destination.all(), 1).start();
        let send = client.send(source.all(), 1).start();
        send.and_then(Transfer::wait).expect("it is received");
        receive.and_then(Transfer::wait).expect("it is sent");
        for (end, why_not) in [&server, &client].into_iter().zip(why_not) {
            let path = end.path();
            assert!(
                !path.contains(READ_WHERE_IT_LIES) && path.contains(why_not),
                "{path}"
            );
            assert!(!why_not.is_empty() || !path.contains("local"), "{path}");
            assert!(end.statistics().bytes_received + end.statistics().bytes_sent > 0);
        }
        assert!(over_tcp(&server, &client) > content.len() as u64);
        close(server, client);
    }
}

/// Gets as many bytes as the region has from the start of the window.
fn get_all(client: &Connection, into: &Region, key: &WindowKey) -> Result<(), tcpx::Error> {
    let get = client.get(into.all(), key, 0).start();
    get.and_then(Transfer::wait).map(drop)
}

/// Where a window has no entry in the table, its owner answers each get, as ever.
#[test]
fn more_windows_than_are_exposed_are_got_from_all_the_same() {
    const BYTES: usize = 20_000;
    for places in [1, 2, 7, 1024] {
        let sizes = LocalSizes {
            windows: places,
            slice: 3000,
            ..LocalSizes::default()
        };
        let listening = Listening::new(network(Local::On, sizes), |_| {}, |_| {});
        let (server, client) = listening.connect();
        let back = Region::host(BYTES).expect("memory");
        for _ in 0..3 {
            let windows: Vec<_> = (0..8)
                .map(|_| {
                    let content = random(BYTES);
                    let window = server.expose(region(&content).all(), Rights::Get);
                    (window.expect("connected"), content)
                })
                .collect();
            let mut asked = 0;
            for round in 0..3 {
                for (window, content) in &windows {
                    let before = server.statistics().bytes_sent;
                    get_all(&client, &back, &window.key()).expect("it is there");
                    assert!(holds(&back, content));
                    let sent = server.statistics().bytes_sent - before;
                    asked += u64::from(round > 0 && sent > 0);
                }
            }
            assert_eq!(asked, 2 * 8_u64.saturating_sub(places.into()));
        }
        close(server, client);
    }
}

#[test]
fn lists_and_their_notifications_need_no_owner() {
    let listening = Listening::new(network(Local::On, LocalSizes::default()), |_| {}, |_| {});
    let (server, client) = listening.connect();
    for (pieces, piece) in [(2, 20_000), (300, 700), (1000, 1000)] {
        let bytes = pieces * piece;
        let contents = [random(bytes), random(bytes)];
        let windows = contents.each_ref().map(|content| {
            let window = server.expose(region(content).all(), Rights::Get);
            window.expect("connected")
        });
        let (back, mut order) = (region(&vec![0; bytes]), (0..pieces).collect::<Vec<_>>());
        Choices::new(pieces as u64).shuffle(&mut order);
        let mut expected = vec![0; bytes];
        let mut batch = client.batch().notify(b"all are here");
        for (to, from) in order.into_iter().enumerate() {
            let (of, at) = (from % 2, from * piece);
            let (from, to) = (at..at + piece, to * piece..(to + 1) * piece);
            let part = back.slice(to.clone()).expect("within");
            batch = batch.get(part, &windows[of].key(), at as u64);
            expected[to].copy_from_slice(&contents[of][from]);
        }
        let batch = batch.prepare().expect("connected");
        for round in 0..3 {
            back.write_from(0, &vec![0; bytes]).expect("free");
            let before = server.statistics().bytes_sent;
            let got = batch.start().expect("connected");
            let told = server.notification(LONG).expect("connected");
            assert_eq!(told.as_deref(), Some(&b"all are here"[..]));
            assert!(holds(&back, &expected), "{pieces} pieces");
            got.wait().expect("all is there");
            let sent = server.statistics().bytes_sent - before;
            assert_eq!(sent >= bytes as u64, round == 0, "{pieces} pieces");
        }
    }
    close(server, client);
}

/// Whatever this side knows of the window already, its owner says what is wrong.
#[test]
fn a_get_beyond_what_a_key_allows_is_refused_by_its_owner() {
    const BYTES: usize = 4096;
    let listening = Listening::new(network(Local::On, LocalSizes::default()), |_| {}, |_| {});
    let (server, client) = listening.connect();
    let memory = region(&random(2 * BYTES));
    let part = memory.slice(..BYTES).expect("within");
    let open = |rights| server.expose(part.clone(), rights).expect("connected");
    let [readable, writable] = [Rights::Get, Rights::Put].map(open);
    let back = Region::host(BYTES).expect("memory");
    let key = readable.key();
    get_all(&client, &back, &key).expect("it is allowed");
    let longer = WindowKey {
        bytes: 2 * BYTES as u64,
        ..key
    };
    let stolen = WindowKey {
        secret: writable.key().secret,
        ..key
    };
    let unasked = WindowKey {
        rights: Rights::Get,
        ..writable.key()
    };
    let get = |key: &WindowKey, offset| {
        let get = client.get(back.all(), key, offset).start();
        get.and_then(Transfer::wait)
    };
    for (key, offset, reason) in [
        (longer, 1, "does not lie within"),
        (stolen, 0, "does not exist"),
        (unasked, 0, "does not allow it"),
    ] {
        let refused = get(&key, offset).expect_err("it is not allowed");
        assert!(refused.to_string().contains(reason), "{refused}");
        get_all(&client, &back, &readable.key()).expect("it is allowed");
    }
    let key = readable.key();
    readable.revoke(LONG).expect("nobody uses it");
    let refused = get(&key, 0).expect_err("it is closed");
    assert!(refused.to_string().contains("does not exist"), "{refused}");
    close(server, client);
}

/// The memory of a window is its program's once that is closed, and once the program may write
/// there.
#[test]
fn what_was_got_was_in_the_window_all_the_while() {
    const BYTES: usize = 300_000;
    const ROUNDS: u8 = 200;
    let sizes = LocalSizes {
        slice: 20_000,
        windows: 2,
        ..LocalSizes::default()
    };
    let listening = Listening::new(network(Local::On, sizes), |_| {}, |_| {});
    let (server, client) = listening.connect();
    let (memory, back) = (region(&vec![0; BYTES]), region(&vec![0; BYTES]));
    let (said, keys) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for key in keys {
                while get_all(&client, &back, &key).is_ok() {
                    assert!(filled(&back).is_some_and(|byte| byte != POISON));
                }
            }
        });
        let mut random = Choices::new(3);
        for round in 0..ROUNDS {
            let window = server.expose(memory.all(), Rights::GetAndPut);
            let window = window.expect("connected");
            said.send(window.key()).expect("it reads");
            for step in 0..5 {
                std::thread::sleep(Duration::from_micros(random.below(500)));
                // Refused while the owner reads it for the peer.
                let byte = round.wrapping_mul(5).wrapping_add(step) / 2;
                let _ = memory.with_bytes_mut(.., |bytes| bytes.fill(byte));
            }
            window.revoke(LONG).expect("it ends");
            fill(&memory, POISON);
            fill(&memory, round);
        }
        drop(said);
    });
    close(server, client);
}

/// What it was got from once, its process has no part in any more.
#[test]
fn gets_go_on_while_the_owner_of_the_window_is_stopped() {
    const TEST: &str = "gets_go_on_while_the_owner_of_the_window_is_stopped";
    const BYTES: usize = 1 << 20;
    if child::is_child(OTHER) {
        return other_process();
    }
    child::run_as(TEST, &[], || {
        let size = BYTES.to_string();
        let environment = [("TEST_BYTES", &*size), ("TEST_DOES", "is got from")];
        let (process, connection, _endpoint) = process(TEST, OTHER, &environment, options);
        let window = told_window(&connection);
        let (all, some) = (region(&vec![2; BYTES]), region(&vec![2; 5000]));
        get_all(&connection, &some, &window).expect("it runs");
        process.signal(Signal::STOP);
        for into in [&all, &some] {
            for _ in 0..20 {
                fill(into, POISON);
                get_all(&connection, into, &window).expect("it need not run");
                assert_eq!(filled(into), Some(1));
            }
        }
        // Where both ends have to say what they have, it is waited for.
        let deadlines = Deadlines {
            total: Some(Duration::from_millis(100)),
            stall: LONG,
        };
        let get = connection.get(some.all(), &window, 0);
        let get = get.level(Level::Verified).deadlines(deadlines).start();
        let late = get.and_then(Transfer::wait).expect_err("it is stopped");
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        process.signal(Signal::CONT);
        get_all(&connection, &some, &window).expect("it runs");
        process.signal(Signal::KILL);
        until("a get finds that its owner is gone", || {
            get_all(&connection, &some, &window).err()
        });
    });
}

/// What the other process does that is killed or stopped.
const DOES: [&str; 4] = ["sends", "receives", "is put to", "is got from"];
const SIZES: [usize; 5] = [20 << 10, 64 << 10, 300 << 10, 1 << 20, 32 << 20];
/// No program's bytes are these.
const POISON: u8 = 0xEE;

fn options(key: Key) -> Options {
    Options::new(network(Local::On, LocalSizes::default()), Auth::Key(key))
}

fn fill(region: &Region, byte: u8) {
    let filled = region.with_bytes_mut(.., |bytes| bytes.fill(byte));
    filled.expect("nothing points at it");
}

/// Whether it is all one byte, and which.
fn filled(region: &Region) -> Option<u8> {
    let same = region.with_bytes(.., |bytes| {
        let first = bytes[0];
        bytes.iter().all(|byte| *byte == first).then_some(first)
    });
    same.expect("nothing points at it")
}

/// What was placed is what its sender had sent, whole.
fn assert_sent(region: &Region, round: u64) {
    let byte = filled(region);
    assert!(
        byte.is_some_and(|byte| byte != POISON),
        "round {round}: {byte:?}"
    );
}

/// A forked process keeps all that its parent had open, as long as the file is there.
fn fork_and_stay(file: &str) {
    let file = CString::new(file).expect("a path");
    // SAFETY: the child calls nothing but what a forked process of several threads may.
    unsafe {
        if libc::fork() == 0 {
            while libc::access(file.as_ptr(), libc::F_OK) == 0 {
                libc::usleep(10_000);
            }
            libc::_exit(0);
        }
    }
}

fn other_process() {
    let connection = connect_back(options);
    if let Ok(file) = std::env::var("TEST_FORK") {
        fork_and_stay(&file);
    }
    let memory = Region::host(variable("TEST_BYTES").parse().expect("a number"));
    let memory = memory.expect("memory");
    let does = variable("TEST_DOES");
    let mut random = Choices::new(connection.peer().address.port().into());
    let _window = does.starts_with("is").then(|| {
        fill(&memory, 1);
        let window = connection.expose(memory.all(), Rights::GetAndPut);
        let window = window.expect("connected");
        tell_window(&connection, &window);
        window
    });
    for byte in (1..100).cycle() {
        let ended = match &*does {
            "sends" => {
                fill(&memory, byte);
                // Some are taken back amid their way.
                let total =
                    (random.below(4) == 0).then(|| Duration::from_micros(random.below(300)));
                let deadlines = Deadlines { total, stall: LONG };
                let send = connection.send(memory.all(), 1).deadlines(deadlines);
                let ended = send.start().and_then(Transfer::wait);
                fill(&memory, POISON);
                ended.map(drop)
            }
            "receives" => {
                let receive = connection.receive(memory.all(), 1).start();
                let ended = receive.and_then(Transfer::wait);
                ended.map(|_| assert_sent(&memory, 0))
            }
            _ => connection.notification(LONG).map(drop),
        };
        if ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionLost) {
            return;
        }
    }
}

fn descriptors() -> usize {
    let listed = std::fs::read_dir("/proc/self/fd");
    listed.expect("there is a list").count()
}

/// One round: the other process is killed or stopped at some moment of a transfer.
fn part(test: &str, round: u64, random: &mut Choices) {
    let does = DOES[random.below(4) as usize];
    let bytes = SIZES[random.below(5) as usize];
    let (stops, forks) = (random.below(2) == 0, random.below(3) == 0);
    let what = format!("round {round}: {bytes} bytes, it {does}, stops {stops}, forks {forks}");
    let file = tempfile::NamedTempFile::new().expect("a file");
    let size = bytes.to_string();
    let mut environment = vec![("TEST_BYTES", &*size), ("TEST_DOES", does)];
    if forks {
        environment.push(("TEST_FORK", file.path().to_str().expect("text")));
    }
    let (process, connection, endpoint) = process(test, OTHER, &environment, options);
    assert!(connection.path().contains(READ_WHERE_IT_LIES), "{what}");
    let memory = region(&vec![2; bytes]);
    let window = does.starts_with("is").then(|| told_window(&connection));
    let stall = if stops {
        Duration::from_millis(300)
    } else {
        LONG
    };
    let deadlines = Deadlines { total: None, stall };
    let start = || {
        let started = match (does, &window) {
            ("sends", _) => connection
                .receive(memory.all(), 1)
                .deadlines(deadlines)
                .start(),
            (_, Some(window)) if does == "is put to" => connection
                .put(memory.all(), window, 0)
                .deadlines(deadlines)
                .start(),
            (_, Some(window)) => connection
                .get(memory.all(), window, 0)
                .deadlines(deadlines)
                .start(),
            _ => connection
                .send(memory.all(), 1)
                .deadlines(deadlines)
                .start(),
        };
        started.expect("connected")
    };
    for _ in 0..random.below(20) {
        // A busy machine may stall for as long.
        if start().wait().is_ok() {
            assert_sent(&memory, round);
        }
    }
    let transfer = start();
    for _ in 0..random.below(200) {
        std::hint::spin_loop();
    }
    let signal = if stops { Signal::STOP } else { Signal::KILL };
    process.signal(signal);
    let ended = transfer.wait();
    match &ended {
        Ok(_) => assert_sent(&memory, round),
        // The other side may have taken its send back before.
        Err(error) => match error.kind() {
            ErrorKind::ConnectionLost | ErrorKind::TimedOut => {}
            ErrorKind::Operation if does == "sends" => {}
            _ => panic!("{what}: {error}"),
        },
    }
    fill(&memory, POISON);
    if stops {
        // It goes on with what it was about.
        process.signal(Signal::CONT);
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(filled(&memory), Some(POISON), "{what}: {ended:?}");
    drop((connection, endpoint));
    drop(process);
    assert_eq!(filled(&memory), Some(POISON), "{what}: {ended:?}");
}

const OTHER: &str = "the process that is killed or stopped";

/// Rounds of one process.
const AT_A_TIME: u64 = 50;

fn peers_die(test: &str, rounds: u64) {
    if child::is_child(OTHER) {
        return other_process();
    }
    for first in (0..rounds).step_by(AT_A_TIME as usize) {
        let first = first.to_string();
        child::run_as(test, &[("TEST_FIRST", &first)], || {
            let first = std::env::var("TEST_FIRST").expect("it was started with it");
            let first: u64 = first.parse().expect("a number");
            let mut random = Choices::new(first);
            part(test, first, &mut random);
            let before = descriptors();
            for round in first + 1..rounds.min(first + AT_A_TIME) {
                part(test, round, &mut random);
            }
            until(&format!("no more than {before} descriptors"), || {
                (descriptors() <= before).then_some(())
            });
        });
        if child::is_child(test) {
            return;
        }
    }
}

#[test]
fn what_a_peer_was_part_of_ends_when_it_dies_or_stops() {
    peers_die("what_a_peer_was_part_of_ends_when_it_dies_or_stops", 16);
}

#[test]
#[ignore = "300 processes: run with --ignored"]
fn what_300_peers_were_part_of_ends_when_they_die_or_stop() {
    peers_die(
        "what_300_peers_were_part_of_ends_when_they_die_or_stop",
        300,
    );
}
