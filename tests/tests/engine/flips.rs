//! Bits that flip on the way, as many as wanted ([`tcpx_tests::faults`]): where both ends compare
//! digests, or payload is sealed, none of them passes for good bytes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use tcpx::{Auth, Connection, Deadlines, Endpoint, Error, ErrorKind, Level, Options, Region};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::content::{Content, scramble};
use tcpx_tests::faults::{count, random};
use tcpx_tests::proxy::{Flips, Proxy};
use tcpx_wire::TransferId;
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};
use tcpx_wire::lane_seal::{HEADER_BYTES, LaneKeys, TAG_BYTES};
use tcpx_wire::record::{LENGTH_BYTES, Records};

/// What goes over a relay.
struct Shape {
    chunk_bytes: u32,
    /// What is longer goes in chunks: a control connection that a flip ends lives long enough for a
    /// frame.
    longest_frame: u32,
    /// Lengths of the transfers at a time: in a frame, sealed and not; in chunks.
    lengths: [u64; 4],
    /// Bytes of lanes, and of control connections, from one flip to the next, at most: some chunks,
    /// and frames, pass.
    lanes: u64,
    control: u64,
}

/// A flip ends what is sealed, and costs a lane: the fewer bytes between two of them the more there
/// are.
const SHORT: Shape = Shape {
    chunk_bytes: 4 << 10,
    longest_frame: 8 << 10,
    lengths: [300, 5_000, 12_000, 40_000],
    lanes: 16 << 10,
    control: 8 << 10,
};
const LONG: Shape = Shape {
    chunk_bytes: 64 << 10,
    longest_frame: 32 << 10,
    lengths: [300, 20_000, 100_000, 300_000],
    lanes: 256 << 10,
    control: 64 << 10,
};
/// One relay of so many has long ones.
const LONG_OF: u64 = 8;
/// Bytes of a connection's set-up from one flip to the next, at most.
const SET_UP: u64 = 300;
/// Times that each connection does its transfers, if it lives.
const TIMES: u64 = 32;

/// What came of transfers through a relay that flips bits.
#[derive(Default)]
struct Tally {
    good: u64,
    failed: u64,
    unconnected: u64,
    /// How transfers failed, by the name of the error.
    errors: BTreeMap<String, u64>,
}

/// Both ends, if a connection comes about: the client's tries end by themselves.
fn connect(
    endpoint: &Endpoint,
    relay: &Proxy,
    options: &Options,
) -> Option<(Connection, Connection)> {
    thread::scope(|scope| {
        let client = scope.spawn(|| Endpoint::connect(relay.address(), options));
        let server = loop {
            let is_last = client.is_finished();
            let accepted = endpoint.accept(Duration::from_millis(20));
            if accepted.is_ok() || is_last {
                break accepted;
            }
        };
        let client = client.join().expect("no panic");
        server.ok().zip(client.ok())
    })
}

/// One connection after the other through a relay, flipped in one way after the other from the
/// `first` on, until `flips` are as many as `wanted`, or it is late. Where both ends compare
/// digests, or payload is sealed, no flip may pass for good bytes; without them that is promised of
/// headers and control alone.
fn transfer_until_flipped(
    options: &Options,
    shape: &Shape,
    first: usize,
    flips: &Arc<Flips>,
    (wanted, until): (u64, Instant),
) -> Tally {
    let mut options = options.clone();
    options.eager_limit = shape.longest_frame;
    options.chunk_bytes = Some(shape.chunk_bytes);
    let endpoint =
        Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone()).expect("a free port");
    // Plain payload goes on behind a flip.
    let relay = Proxy::flipping(endpoint.local_addr(), flips, !options.encrypt);
    let mut tally = Tally::default();
    let level = match options.encrypt {
        true => Level::Placed,
        false => Level::Verified,
    };
    let memory = |bytes: u64| {
        (
            Source::new(Content::new(bytes, 0), bytes, 0),
            Destination::new(bytes, 0),
        )
    };
    let mut buffers = shape.lengths.map(memory);
    // In lanes, in control, in both; now and then in the set-up.
    let gaps = [
        [0, shape.lanes],
        [shape.control, 0],
        [0, shape.lanes],
        [2 * shape.control, 2 * shape.lanes],
        [0, shape.lanes],
        [SET_UP, 0],
    ];
    for gaps in gaps.into_iter().cycle().skip(first) {
        if flips.sum() >= wanted || Instant::now() >= until {
            break;
        }
        relay.flip(gaps.map(|gap| 0..gap));
        let Some((server, client)) = connect(&endpoint, &relay, &options) else {
            tally.unconnected += 1;
            continue;
        };
        for time in 0..TIMES {
            let several = shape
                .lengths
                .each_ref()
                .map(|bytes| Content::new(*bytes, time));
            let started = several.into_iter().zip(&mut buffers).zip(shape.lengths);
            let started = started.map(|((content, buffers), bytes)| {
                // What a failed transfer holds is its own.
                if !buffers.0.try_fill(content) || !buffers.1.try_poison() {
                    *buffers = memory(bytes);
                    assert!(buffers.0.try_fill(content), "nobody else holds it");
                }
                let receive = server
                    .receive(buffers.1.slice(), bytes)
                    .level(level)
                    .start();
                let send = client.send(buffers.0.slice(), bytes).level(level).start();
                [send, receive]
            });
            let started: Vec<_> = started.collect();
            let mut is_over = false;
            for ((content, (_, destination)), ends) in several.iter().zip(&buffers).zip(started) {
                let ends = ends.map(|start| start.and_then(|transfer| transfer.wait()));
                let is_good = ends.iter().any(Result::is_ok);
                let defect = is_good.then(|| destination.defect(*content)).flatten();
                assert_eq!(defect, None, "{ends:?}");
                *(if is_good {
                    &mut tally.good
                } else {
                    &mut tally.failed
                }) += 1;
                let mut errors = ends.iter().filter_map(|end| end.as_ref().err());
                is_over |= errors.any(|error| {
                    assert!(!matches!(error, Error::Defect { .. }), "{error}");
                    let name = format!("{:?}", error.kind());
                    *tally.errors.entry(name).or_default() += 1;
                    // Only where payload alone was changed is everything as before.
                    error.kind() != ErrorKind::Corrupt
                });
            }
            if is_over || flips.sum() >= wanted || Instant::now() >= until {
                break;
            }
        }
    }
    tally
}

/// Flips until there were enough, over several connections at once: most of the time each of them
/// waits for a lane, or a control connection, that takes the place of one that a flip has ended.
fn flips(encrypt: bool) {
    let (wanted, at_once) = (count("flips", 1000), count("relays", 8));
    let key = tcpx::generate_key().expect("there is randomness");
    let mut options = Options::tcp(Auth::Key(key));
    options.encrypt = encrypt;
    options.channels = 8;
    options.connect_timeout = Duration::from_secs(2);
    options.heartbeat = Duration::from_millis(200);
    options.dead_after = Duration::from_secs(2);
    options.deadlines = Deadlines {
        stall: Duration::from_secs(2),
        total: Some(Duration::from_secs(4)),
    };
    let flips = Arc::new(Flips::default());
    let started = Instant::now();
    let enough = (
        wanted,
        started + Duration::from_secs(count("flips_for", 3600)),
    );
    let tallies: Vec<Tally> = thread::scope(|scope| {
        let start = |number: u64| {
            let shape = match number % LONG_OF {
                0 => &LONG,
                _ => &SHORT,
            };
            let (options, flips) = (&options, &flips);
            scope.spawn(move || {
                transfer_until_flipped(options, shape, number as usize, flips, enough)
            })
        };
        let running: Vec<_> = (0..at_once).map(start).collect();
        let ended = running.into_iter().map(|one| one.join().expect("no panic"));
        ended.collect()
    });
    let sum = |of: fn(&Tally) -> u64| tallies.iter().map(of).sum::<u64>();
    let mut errors = BTreeMap::<&str, u64>::new();
    for (name, count) in tallies.iter().flat_map(|tally| &tally.errors) {
        *errors.entry(name).or_default() += count;
    }
    let good = sum(|tally| tally.good);
    let figures = json!({
        "what": if encrypt { "flipped bits, sealed" } else { "flipped bits, plain, verified" },
        "seconds": started.elapsed().as_secs_f64().round(),
        "flips": flips.sum(),
        "in_control": flips.control(),
        "in_lanes": flips.lanes(),
        "transfers_good": good,
        "transfers_failed": sum(|tally| tally.failed),
        "errors": errors,
        "connections_not_set_up": sum(|tally| tally.unconnected),
    });
    println!("{figures}");
    assert!(good > 0, "nothing came through at all");
}

#[test]
fn flipped_bits_of_plain_payload_are_found_by_digests() {
    flips(false);
}

#[test]
fn flipped_bits_of_sealed_payload_never_pass() {
    flips(true);
}

/// What all bytes of the payload are that somebody on the path changes.
const PLAIN: u8 = 0xA7;

/// A relay to `target` that adds the generator of CRC32C to long runs of [`PLAIN`], once in each
/// direction of a connection: the CRC32C of what it changed stays as it was. Counts what it
/// changed.
fn keep_crc(target: SocketAddr) -> (SocketAddr, Arc<AtomicU64>) {
    const GENERATOR: u64 = 0x82F6_3B78 << 1 | 1;
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let (address, changed) = (listener.local_addr(), Arc::new(AtomicU64::new(0)));
    let count = Arc::clone(&changed);
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = TcpStream::connect(target) else {
                return;
            };
            for (from, to) in [(&client, &server), (&server, &client)] {
                let [mut from, mut to] = [from, to].map(|end| end.try_clone().expect("cloned"));
                let count = Arc::clone(&count);
                thread::spawn(move || {
                    let (mut piece, mut is_done) = (vec![0; 64 << 10], false);
                    while let Ok(bytes @ 1..) = from.read(&mut piece) {
                        let run = piece[..bytes]
                            .windows(64)
                            .position(|run| run == [PLAIN; 64]);
                        if let Some(at) = run.filter(|_| !is_done) {
                            let place = piece[at + 32..].iter_mut();
                            place
                                .zip(GENERATOR.to_le_bytes())
                                .for_each(|(byte, bits)| *byte ^= bits);
                            count.fetch_add(1, Ordering::SeqCst);
                            is_done = true;
                        }
                        if to.write_all(&piece[..bytes]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Both);
                    let _ = from.shutdown(Shutdown::Both);
                });
            }
        }
    });
    (address.expect("bound"), changed)
}

/// Whoever knows the payload can change it and keep its CRC32C: the ends compare what has a key.
#[test]
fn changes_that_keep_a_crc32c_are_found() {
    // In chunks, and short enough to go with the announcement; asked for by both sides, or by the
    // receiver alone.
    for (bytes, sender) in [
        (300_000, Level::Verified),
        (300_000, Level::Placed),
        (20_000, Level::Verified),
        (20_000, Level::Placed),
    ] {
        let key = tcpx::generate_key().expect("there is randomness");
        let options = Options::tcp(Auth::Key(key));
        let endpoint =
            Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone()).expect("a free port");
        let (relay, changed) = keep_crc(endpoint.local_addr());
        let (server, client) = thread::scope(|scope| {
            let client = scope.spawn(|| Endpoint::connect(relay, &options).expect("connected"));
            let server = endpoint.accept(Duration::from_secs(20)).expect("accepted");
            (server, client.join().expect("no panic"))
        });
        let [source, destination] = [0, 1].map(|_| Region::host(bytes).expect("memory"));
        source.write_from(0, &vec![PLAIN; bytes]).expect("written");
        let receive = server.receive(destination.all(), 1).level(Level::Verified);
        let receive = receive.start().expect("started");
        // It is announced before the send begins.
        let hello = server.send(Region::host(1).expect("memory").all(), 2);
        let hello = hello.start().expect("started");
        let heard = client.receive(Region::host(1).expect("memory").all(), 2);
        heard.start().and_then(|heard| heard.wait()).expect("heard");
        hello.wait().expect("said");
        let send = client.send(source.all(), 1).level(sender).start();
        let ends = [receive.wait(), send.expect("started").wait()];
        assert!(changed.load(Ordering::SeqCst) > 0, "nothing was changed");
        for end in ends {
            let error = end.expect_err("it was changed");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
    }
}

/// Keys of both ends.
fn keys(seed: u64) -> [LaneKeys; 2] {
    let secret = |which: u64| std::array::from_fn(|at| scramble(seed ^ which ^ at as u64) as u8);
    let [one, other] = [1 << 62, 1 << 63].map(secret);
    [LaneKeys::new(one, other), LaneKeys::new(other, one)]
}

/// Records of a control connection, one behind the other: how many open, of some bytes each.
fn opened_records(records: &mut Records, mut stream: &[u8], sealed: &[u8]) -> usize {
    let mut out = [0; PART + TAG_BYTES];
    for (number, text) in sealed.chunks(PART).enumerate() {
        // One that says that it is longer is waited for.
        let length = Records::length(stream).ok().flatten();
        let record = length.and_then(|length| stream[LENGTH_BYTES..].get(..length));
        let opened = record.and_then(|record| {
            let out = out.get_mut(..record.len())?;
            let opened = records.open(record, out).ok()?;
            Some((record.len(), opened))
        });
        let Some((length, opened)) = opened else {
            return number;
        };
        assert_eq!(&out[..opened], text, "record {number}");
        stream = &stream[LENGTH_BYTES + length..];
    }
    PARTS
}

/// Chunks of a lane, likewise.
fn opened_chunks(keys: LaneKeys, stream: &mut [u8], sealed: &[u8]) -> usize {
    let (_, mut opener) = keys.start();
    let chunks = stream.chunks_mut(HEADER_BYTES + PART + TAG_BYTES);
    for ((number, text), chunk) in sealed.chunks(PART).enumerate().zip(chunks) {
        let (head, payload) = chunk.split_first_chunk_mut().expect("a header");
        let header = opener.open_header(head).ok();
        let Some(header) = header.map(|header| ChunkHeader::decode(&header).expect("as sealed"))
        else {
            return number;
        };
        assert_eq!(header.sequence, number as u64);
        let Ok(opened) = opener.open(payload) else {
            return number;
        };
        assert_eq!(opened, text, "chunk {number}");
    }
    PARTS
}

/// Bytes that each record, or chunk, of a stream seals, and how many there are.
const PART: usize = 400;
const PARTS: usize = 3;

/// Whatever bit of what both ends would write is flipped: what stands before it opens, and nothing
/// from there on. Without an engine a flip costs microseconds.
#[test]
fn nothing_opens_from_a_flipped_bit_of_a_sealed_stream_on() {
    let seed = random() >> 32;
    for number in 0..count("flips", 100_000) {
        let seed = seed << 32 | number;
        let mut sealed = [0; PARTS * PART];
        Content::new(seed, 0).fill(0, &mut sealed);
        let in_lane = number % 2 == 0;
        let [ours, theirs] = keys(seed);
        let mut stream = Vec::new();
        if in_lane {
            let (mut sealer, _) = ours.start();
            for (sequence, text) in (0..).zip(sealed.chunks(PART)) {
                let header = ChunkHeader {
                    sequence,
                    transfer: TransferId(seed),
                    offset: 0,
                    total: PART as u64,
                    length: PART as u32,
                    attempt: 0,
                    payload: ChunkPayload::Follows,
                };
                stream.extend_from_slice(&sealer.seal_header(&header.encode()));
                let mut text = text.to_vec();
                let tag = sealer.seal(&mut text);
                stream.extend_from_slice(&text);
                stream.extend_from_slice(&tag);
            }
        } else {
            let mut records = Records::new(ours);
            for text in sealed.chunks(PART) {
                assert_eq!(records.seal(text, &mut stream), PART);
            }
        }
        let bit = scramble(seed) as usize % (8 * stream.len());
        stream[bit / 8] ^= 1 << (bit % 8);
        let opened = match in_lane {
            true => opened_chunks(theirs, &mut stream, &sealed),
            false => opened_records(&mut Records::new(theirs), &stream, &sealed),
        };
        let before = bit / 8 / (stream.len() / PARTS);
        assert_eq!(
            opened, before,
            "bit {bit}, seed {seed}, in a lane: {in_lane}"
        );
    }
}
