//! Who is not a peer disturbs nobody, costs little, and is one line in the log.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tcpx_tests::instructions::{Carrier, Instructions};
use tcpx_tests::process::Peer;
use tcpx_tests::scenario::Scenario;
use tcpx_tests::support::wait;
use tcpx_wire::handshake::{Build, ClientHandshake};
use tcpx_wire::key::Key;

const PEER: &str = env!("CARGO_BIN_EXE_peer");
/// Time in which a connection must prove itself.
const PROOF: Duration = Duration::from_secs(3);
const BOUND: Duration = PROOF.saturating_mul(10);
const LIMIT: Duration = Duration::from_secs(120);
/// More than the listener holds from one address.
const SILENT: usize = 200;

#[derive(Clone, Copy, Debug)]
enum Stranger {
    WrongKey,
    NoKey,
    NewerVersion,
    RandomBytes,
    HttpGet,
    TlsHello,
    ConnectAndClose,
    HalfAHello,
    Silence,
}

impl Stranger {
    const ALL: [Self; 9] = [
        Self::WrongKey,
        Self::NoKey,
        Self::NewerVersion,
        Self::RandomBytes,
        Self::HttpGet,
        Self::TlsHello,
        Self::ConnectAndClose,
        Self::HalfAHello,
        Self::Silence,
    ];

    /// What the log line about it says.
    fn reason(self) -> &'static str {
        match self {
            Self::WrongKey => "key",
            Self::NoKey => "key",
            Self::NewerVersion => "99",
            Self::RandomBytes | Self::HttpGet | Self::TlsHello => "not tcpx",
            Self::ConnectAndClose | Self::HalfAHello => "closed",
            Self::Silence => "came within 3 s",
        }
    }

    /// Does its thing; the connection is open as long as the stream lives.
    fn visit(self, address: SocketAddr) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(BOUND))?;
        let hello = |key: Option<&Key>| {
            let key = key.map(Key::client_key);
            let (_, hello) = ClientHandshake::new(key.as_ref(), &Build::OURS, [7; 32]);
            hello.to_vec()
        };
        let key = Key::generate(&mut |bytes| bytes.fill(9));
        match self {
            Self::WrongKey => {
                stream.write_all(&hello(Some(&key)))?;
                // What it learns is that its key is another one.
                let mut answer = Vec::new();
                stream.read_to_end(&mut answer)?;
                // A crowded server hangs up without an answer.
                let rest = answer.get(32..).ok_or(io::ErrorKind::UnexpectedEof)?;
                assert!(rest.iter().all(|byte| *byte == 0), "{answer:?}");
            }
            Self::NoKey => stream.write_all(&hello(None))?,
            Self::NewerVersion => {
                let mut hello = hello(Some(&key));
                hello[8..12].copy_from_slice(&[99, 0, 98, 0]);
                stream.write_all(&hello)?;
            }
            Self::RandomBytes => {
                let mut bytes = [0; 4096];
                getrandom::fill(&mut bytes).expect("there is randomness");
                // Never the first byte of the protocol.
                bytes[0] |= 0x80;
                stream.write_all(&bytes)?;
            }
            Self::HttpGet => stream.write_all(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")?,
            Self::TlsHello => stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03tls says hello to whom it may concern")?,
            Self::ConnectAndClose => {
                stream.shutdown(Shutdown::Both)?;
            }
            Self::HalfAHello => {
                stream.write_all(&hello(Some(&key))[..30])?;
                stream.shutdown(Shutdown::Write)?;
            }
            Self::Silence => {}
        }
        Ok(stream)
    }
}

/// The server's log lines about a connection from this address.
fn lines_about(log: &str, stranger: SocketAddr) -> Vec<String> {
    let name = format!("peer={stranger} ");
    let lines = log.lines().filter(|line| line.contains(&name));
    lines.map(str::to_owned).collect()
}

#[test]
fn strangers_are_a_line_each_and_a_client_gets_through() {
    let scenario = Scenario::shuffled(0x57, 400, 4 << 20);
    let instructions = Instructions::new(Carrier::Tcp, scenario);
    let server = Peer::start(PEER, &instructions);
    let address = server.address();

    // At a pace at which the listener logs every one.
    let mut seen = Vec::new();
    for stranger in Stranger::ALL {
        let stream = stranger.visit(address).expect("it listens");
        let from = stream.local_addr().expect("it is connected");
        let line = wait(BOUND, "the log line", || {
            lines_about(&server.log(), from).into_iter().next()
        });
        assert!(line.contains(" WARN "), "{stranger:?}: {line}");
        assert!(line.contains("connection refused"), "{stranger:?}: {line}");
        assert!(line.contains(stranger.reason()), "{stranger:?}: {line}");
        seen.push((stranger, from, stream));
    }

    // A crowd that says nothing is there before the good client, and others come all the time.
    let crowd: Vec<_> = (0..SILENT)
        .map(|_| Stranger::Silence.visit(address).expect("it listens"))
        .collect();
    let client = Instructions {
        connect: Some(address),
        ..instructions.clone()
    };
    let done = AtomicBool::new(false);
    let (server, client, (visits, tries)) = thread::scope(|scope| {
        let others = scope.spawn(|| {
            let (mut visits, mut tries) = (0, 0);
            while !done.load(Ordering::Relaxed) {
                // Under load, and at the end, the server may turn them away in any way it likes.
                tries += Stranger::ALL.len();
                visits += Stranger::ALL
                    .iter()
                    .filter(|stranger| stranger.visit(address).is_ok())
                    .count();
                thread::sleep(Duration::from_millis(10));
            }
            (visits, tries)
        });
        let client = Peer::start(PEER, &client).finish(LIMIT);
        let server = server.finish(LIMIT);
        done.store(true, Ordering::Relaxed);
        (server, client, others.join().expect("no panic"))
    });
    assert!(visits > 0);
    assert_eq!(client.good().succeeded, 800);
    assert_eq!(server.good().succeeded, 800);
    drop(crowd);
    for (stranger, from, _stream) in seen {
        let lines = lines_about(&server.log, from);
        assert_eq!(lines.len(), 1, "{stranger:?}: {lines:#?}");
    }
    // A crowd is not a line each, however long the others kept coming.
    let lines = server.log.matches("connection refused").count();
    assert!(lines < SILENT + tries, "{lines} lines: {}", server.log);
}

#[test]
fn a_client_with_another_key_learns_it() {
    let scenario = Scenario::each(0x2e, &[100_000]);
    let instructions = Instructions::new(Carrier::Tcp, scenario);
    let server = Peer::start(PEER, &instructions);
    let good = Instructions {
        connect: Some(server.address()),
        ..instructions.clone()
    };
    let other_key = Instructions::new(Carrier::Tcp, instructions.scenario).key;
    let bad = Instructions {
        key: other_key,
        ..good.clone()
    };
    let bad = Peer::start(PEER, &bad).finish(LIMIT);
    let error = bad.summary().set_up.as_ref().expect("no connection");
    assert!(error.contains("the peer's key is another one"), "{error}");
    assert_eq!(Peer::start(PEER, &good).finish(LIMIT).good().succeeded, 2);
    assert_eq!(server.finish(LIMIT).good().succeeded, 2);
}

#[test]
fn peers_on_different_networks_tell_each_other_so() {
    let scenario = Scenario::each(0x2f, &[100_000]);
    let instructions = Instructions::new(Carrier::Tcp, scenario);
    let server = Peer::start(PEER, &instructions);
    let client = Instructions {
        connect: Some(server.address()),
        carrier: Carrier::double(),
        ..instructions
    };
    let client = Peer::start(PEER, &client).finish(LIMIT);
    for end in [client, server.finish(LIMIT)] {
        let error = end.summary().set_up.as_ref().expect("no connection");
        assert!(
            error.contains("`tcp`") && error.contains("`plugin:GPUDirectTCPX_v7`"),
            "{error}"
        );
    }
}
