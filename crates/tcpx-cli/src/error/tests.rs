//! Every error that the program can print has one form: at most four lines, each fact once, in
//! words.

use std::net::SocketAddr;
use std::path::PathBuf;

use tcpx::NetworkError;
use tcpx_net::{IoError, SocketError};
use tcpx_wire::Tag;
use tcpx_wire::handshake::HandshakeError;
use tcpx_wire::session::{
    Delivered, OperationError, OperationKind, Owes, RequestError, SessionError, StallReport,
};

use super::*;
use crate::output::say::block;
use crate::sizes::Amount;

/// A time that shows whether all its digits are printed.
const LONG: Duration = Duration::from_nanos(1_077_315_441);

fn peer() -> SocketAddr {
    ([192, 0, 2, 7], 12_345).into()
}

fn path() -> PathBuf {
    "/a/b".into()
}

fn cause(kind: io::ErrorKind) -> IoError {
    io::Error::from(kind).into()
}

fn system() -> io::Error {
    io::Error::from_raw_os_error(11)
}

fn stall() -> Box<StallReport> {
    Box::new(StallReport {
        kind: OperationKind::Send,
        tag: Tag(42),
        transfer: None,
        chunk: None,
        channel: None,
        offset: 4096,
        bytes_done: 4096,
        bytes_total: 8192,
        waited: LONG,
        owes: Owes::PeerPostReceive,
        peer: None,
    })
}

fn failures() -> Vec<ConnectionFailure> {
    vec![
        ConnectionFailure::Control {
            cause: "the peer closed it".into(),
        },
        ConnectionFailure::Channels {
            cause: "none is left".into(),
        },
        ConnectionFailure::SetUp {
            cause: "the peer has no such network; choose another one".into(),
        },
        ConnectionFailure::Protocol(SessionError::NetworkMismatch {
            ours: "tcp".into(),
            theirs: "devmem".into(),
        }),
        ConnectionFailure::PeerDead {
            silent: LONG,
            limit: LONG,
        },
        ConnectionFailure::DataPlaneStuck { waited: LONG },
        ConnectionFailure::CloseTimedOut { limit: LONG },
    ]
}

fn networks() -> Vec<NetworkError> {
    let peer = peer();
    let refused = |error| NetworkError::Socket(error);
    vec![
        refused(SocketError::Refused { peer }),
        NetworkError::NoAddress {
            errors: vec![
                SocketError::ConnectTimedOut {
                    peer: ([192, 0, 2, 8], 12345).into(),
                    waited: LONG,
                },
                SocketError::Refused { peer },
            ],
        },
        refused(SocketError::Unreachable {
            peer,
            cause: cause(io::ErrorKind::NetworkUnreachable),
        }),
        refused(SocketError::ConnectTimedOut { peer, waited: LONG }),
        refused(SocketError::Io {
            operation: "bind",
            address: peer.to_string(),
            cause: cause(io::ErrorKind::AddrInUse),
            hint: "",
        }),
        refused(SocketError::Io {
            operation: "bind",
            address: peer.to_string(),
            cause: cause(io::ErrorKind::PermissionDenied),
            hint: "",
        }),
        refused(SocketError::CutOff { peer }),
        refused(SocketError::Unanswered { peer }),
        refused(SocketError::Handshake {
            peer,
            error: HandshakeError::WrongKey,
        }),
        refused(SocketError::Handshake {
            peer,
            error: HandshakeError::Busy,
        }),
        NetworkError::TimedOut {
            peer,
            operation: "opening the lanes",
        },
        NetworkError::GivenUp {
            peer,
            reason: "no memory; free some".into(),
        },
        refused(SocketError::Io {
            operation: "starting a thread for a lane",
            address: peer.to_string(),
            cause: system().into(),
            hint: "; raise the limit on threads",
        }),
        NetworkError::NoWay {
            peer,
            filter: "eth9".into(),
            found: "no route".into(),
        },
        NetworkError::PluginStuck {
            network: "plugin:x".into(),
            call: "loading",
            waited: LONG,
        },
    ]
}

fn engine() -> Vec<tcpx::Error> {
    let peer = peer();
    let operation = |cause| tcpx::Error::Operation {
        peer,
        path: "tcp".into(),
        operation: tcpx::OperationName {
            kind: OperationKind::Send,
            tag: 42,
        },
        error: Box::new(OperationError {
            cause,
            delivered: Delivered::Partial { bytes: 4096 },
        }),
    };
    let mut all = vec![
        operation(EndCause::TooLarge {
            bytes: 9,
            capacity: 8,
        }),
        operation(EndCause::Cancelled),
        operation(EndCause::Stalled(stall())),
        operation(EndCause::DeadlinePassed(stall())),
        operation(EndCause::Corrupt {
            expected: 1,
            got: 2,
        }),
        tcpx::Error::Request {
            peer,
            error: RequestError::Full { limit: 4096 },
        },
        tcpx::Error::Closed { peer },
        tcpx::Error::OtherProcess { what: "endpoint" },
        tcpx::Error::TimedOut {
            peer,
            what: "closing",
            limit: LONG,
        },
        tcpx::Error::EngineStuck { peer, stuck: LONG },
        tcpx::Error::CloseStuck {
            peer,
            channel: 0,
            call: "deregMr or closeSend",
            stuck: LONG,
        },
        tcpx::Error::Defect {
            peer,
            cause: "index out of bounds".into(),
        },
        tcpx::Error::Setting {
            what: "chunk size",
            expected: "a multiple of 4096 bytes".into(),
            arrived: "1 bytes".into(),
        },
        tcpx::Error::Setting {
            what: "gets",
            expected: "1 to 1048576".into(),
            arrived: "0".into(),
        },
        tcpx::Error::System {
            what: "starting the engine's thread",
            cause: system().into(),
        },
    ];
    all.extend(networks().into_iter().map(tcpx::Error::from));
    all.extend(failures().into_iter().map(|failure| {
        let failure = Box::new(failure);
        tcpx::Error::ConnectionLost { peer, failure }
    }));
    all
}

fn own() -> Vec<Error> {
    let text = || String::from("something is wrong");
    let hint = || String::from("correct it");
    let refusals = |count| Refusals {
        count,
        last: (count > 0).then(|| (peer(), "another key; copy it again".into())),
    };
    vec![
        Error::Usage {
            what: text(),
            hint: hint(),
        },
        Error::Memory {
            doing: "make room",
            source: MemoryError::OutOfBounds {
                start: 1,
                end: 9,
                len: 4,
            },
        },
        Error::gpu(
            "GPU 0 cannot be used: there is no driver; install it",
            hint(),
        ),
        Error::Key(KeyError::Missing),
        Error::Plugin(PluginFileError::Missing(path())),
        Error::PluginContents(ContentsError::NotAFile(path())),
        Error::Manifest(ManifestError::Outside("../x".into())),
        Error::Store(StoreError::Exists(path())),
        Error::Interrupted { signal: 2 },
        Error::At {
            place: format!("peer {}, after 1 MiB of 2 MiB", peer()),
            source: Box::new(Error::NothingMoved { limit: LONG }),
        },
        Error::Io {
            doing: "open",
            path: path(),
            source: system(),
        },
        Error::Process {
            doing: "start a thread",
            source: system(),
        },
        Error::Output(system()),
        Error::LeftOut { count: 1 },
        Error::NoClient {
            address: peer(),
            waited: LONG,
            refusals: Box::new(refusals(0)),
        },
        Error::NoClient {
            address: peer(),
            waited: LONG,
            refusals: Box::new(refusals(1200)),
        },
        Error::NothingMoved { limit: LONG },
        Error::Address {
            address: "nosuch".into(),
            why: "no such name".into(),
        },
        Error::Contents(Difference {
            offset: 1,
            expected: 2,
            arrived: 3,
        }),
        Error::Digest {
            what: "the digests",
            ours: "a".into(),
            theirs: "b".into(),
        },
        Error::Peer(Reason {
            why: text(),
            hint: hint(),
        }),
        Error::Unexpected {
            expected: "a request",
            arrived: "nothing".into(),
        },
        Error::Failed {
            what: text(),
            hint: hint(),
        },
    ]
}

/// Those about files, keys and plugins that hold words of the system, or figures.
fn inner() -> Vec<Error> {
    vec![
        KeyError::Prompt(system()).into(),
        KeyError::Write {
            path: path(),
            source: system(),
        }
        .into(),
        ContentsError::Unreadable {
            path: path(),
            error: system(),
        }
        .into(),
        ContentsError::TooLarge {
            path: path(),
            bytes: 1 << 40,
        }
        .into(),
        StoreError::NoSpace {
            directory: path(),
            needed: Amount(2 << 30),
            free: Amount(1 << 30),
        }
        .into(),
        StoreError::Io {
            doing: "write",
            directory: path(),
            source: system(),
        }
        .into(),
    ]
}

/// Has the compiler ask for a sample of each new kind of error.
fn is_in_own(error: &Error) -> bool {
    match error {
        Error::Engine(_) => false,
        Error::Usage { .. }
        | Error::Memory { .. }
        | Error::Key(_)
        | Error::Plugin(_)
        | Error::PluginContents(_)
        | Error::Manifest(_)
        | Error::Store(_)
        | Error::LeftOut { .. }
        | Error::Interrupted { .. }
        | Error::At { .. }
        | Error::Io { .. }
        | Error::Process { .. }
        | Error::Output(_)
        | Error::NoClient { .. }
        | Error::NothingMoved { .. }
        | Error::Address { .. }
        | Error::Contents(_)
        | Error::Digest { .. }
        | Error::Peer(_)
        | Error::Unexpected { .. }
        | Error::Failed { .. } => true,
    }
}

/// Whether a number has more digits behind its point than a person reads.
fn has_long_number(text: &str) -> bool {
    let mut words = text.split(|c: char| !(c.is_ascii_digit() || c == '.'));
    words.any(|word| match word.split('.').collect::<Vec<_>>()[..] {
        // An IPv4 address has more points.
        [_, digits] => digits.len() > 3,
        _ => false,
    })
}

#[test]
fn every_error_says_each_thing_once_and_in_words() {
    assert!(own().iter().all(is_in_own));
    for error in own()
        .into_iter()
        .chain(inner())
        .chain(engine().into_iter().map(Error::from))
    {
        let (what, hint) = (error.what(), error.hint());
        let place = error.place().unwrap_or_default().to_owned();
        let whole = format!("{what}\n{place}\n{hint}");
        assert!(!what.is_empty() && !hint.is_empty(), "{error:?}");
        assert_eq!(whole.lines().count(), 3, "one line each: {whole}");
        let block = block(&error);
        assert!((2..=4).contains(&block.len()), "{block:?}");
        assert!(
            block.iter().all(|line| line.lines().count() == 1),
            "{block:?}"
        );
        assert!(!what.contains(&hint), "the hint twice: {whole}");
        assert!(place.is_empty() || !what.contains(&place), "{whole}");
        assert!(
            whole.matches("192.0.2.7").count() <= 1 || what.contains("last from"),
            "{whole}"
        );
        for sign in [
            " { ",
            "Some(",
            "Os {",
            "kind:",
            "\\n",
            "Error(",
            "PosixError",
        ] {
            assert!(
                !whole.contains(sign),
                "`{sign}` is for programmers: {whole}"
            );
        }
        assert!(!has_long_number(&whole), "too many digits: {whole}");
        assert!(!hint.contains("connect timeout"), "no such flag: {whole}");
        let is_known = !hint.contains("run it again with --debug");
        assert!(is_known, "nothing to do: {whole}");
    }
}

#[test]
fn the_advice_of_a_library_error_becomes_the_hint() {
    let source = MemoryError::OutOfBounds {
        start: 1,
        end: 9,
        len: 4,
    };
    let error = Error::memory("read it back")(source);
    assert_eq!(
        error.what(),
        "read it back: range 1..9 does not fit in 4 bytes"
    );
    assert_eq!(error.hint(), "give a range inside 0..4");
}

#[test]
fn a_lost_peer_is_named_by_how_it_was_lost() {
    let address = SocketAddr::from(([127, 0, 0, 1], 7));
    let peer = address;
    let silent = Duration::from_secs(30);
    let failure = |failure| tcpx::Error::ConnectionLost {
        peer,
        failure: Box::new(failure),
    };
    let lane = |kind: io::ErrorKind| tcpx::Error::ChannelLost {
        peer,
        channel: 0,
        error: Box::new(ChannelError::LaneLost {
            channel: "tcp".into(),
            lane: 0,
            peer: address,
            operation: "sending",
            position: None,
            cause: io::Error::from(kind).into(),
        }),
    };
    let limit = silent;
    for (error, how) in [
        (
            failure(ConnectionFailure::PeerDead { silent, limit }),
            "host unreachable or network cut",
        ),
        (lane(io::ErrorKind::ConnectionReset), "process ended"),
        (lane(io::ErrorKind::HostUnreachable), "host unreachable"),
        (lane(io::ErrorKind::TimedOut), "network cut"),
    ] {
        let error = Error::from(error);
        assert_eq!(error.what(), format!("the peer went away ({how})"));
        assert!(error.hint().starts_with("look at the other side"));
    }
    let refused = failure(ConnectionFailure::SetUp { cause: "no".into() });
    assert!(!Error::from(refused).what().contains("went away"));
}
