//! A plugin that lies or fails: a typed error on both sides, never a wrong success, nothing left
//! open.

use std::time::Duration;

use tcpx::{Connection, Deadlines, Error, Level};
use tcpx_tests::double::{self, Call, Fault, Lie};
use tcpx_tests::pair::{LONG, Listening, double_network, try_move};
use tcpx_tests::support::until;

const CHUNK: usize = 512 << 10;

fn connected() -> (Connection, Connection) {
    // One channel, so that the lie hits the receive that the test means.
    Listening::new(double_network(), one_channel, one_channel).connect()
}

fn one_channel(options: &mut tcpx::Options) {
    options.channels = 1;
    options.eager_limit = 0;
    options.deadlines = Deadlines {
        stall: Duration::from_secs(10),
        total: None,
    };
}

fn part(server: Connection, client: Connection) {
    for end in [server, client] {
        // The channel was lost, or the other end went first.
        let _ = end.close(LONG);
    }
}

/// Runs a test that must leave no comm behind.
fn leaving_nothing_open(test: impl FnOnce()) {
    let before = double::stats().open_comms;
    test();
    until("the comms are closed", || {
        (double::stats().open_comms <= before).then_some(())
    });
}

fn lied_to(lie: Lie) -> Error {
    let mut found = None;
    leaving_nothing_open(|| {
        let (server, client) = connected();
        // Every slot of the queue has held a chunk before: what is left in it looks right.
        let (received, sent, defect) = try_move(&client, &server, 32 * CHUNK, Level::Placed);
        assert!(
            received.is_ok() && sent.is_ok() && defect.is_none(),
            "{received:?} {sent:?}"
        );
        double::lie_next(lie);
        let (received, sent, defect) = try_move(&client, &server, 2 * CHUNK, Level::Placed);
        assert!(
            received.is_err() && sent.is_err(),
            "{lie:?} was believed, contents: {defect:?}; {received:?} {sent:?}"
        );
        found = received.err();
        part(server, client);
    });
    found.unwrap_or_else(|| panic!("{lie:?} was believed"))
}

#[test]
fn every_lie_in_the_device_queue_is_a_named_error() {
    let _serial = double::serial();
    for lie in Lie::IN_QUEUE {
        let words = match lie {
            Lie::CountBeyond => "claims 2049 fragments",
            Lie::CountHuge => "claims 18446744073709551615 fragments",
            Lie::CountZero => "524288 bytes together, 0 bytes arrived",
            Lie::OutsidePool => "inside the pool of",
            Lie::OutsideTarget => "expected a destination inside 524288 bytes",
            Lie::SumShort => "expected fragments of 524288 bytes together",
            // The byte too many lies behind the destination, or on its neighbour.
            Lie::SumLong | Lie::Overlap => "expected",
            _ => unreachable!("not in the queue"),
        };
        let error = lied_to(lie).to_string();
        assert!(error.contains(words), "{lie:?}: {error}");
    }
}

#[test]
fn a_completion_without_bytes_is_not_the_slots_last() {
    let _serial = double::serial();
    let error = lied_to(Lie::DoneEarly).to_string();
    assert!(error.contains("together, 0 bytes arrived"), "{error}");
}

#[test]
fn every_lie_in_a_size_ends_in_an_error() {
    let _serial = double::serial();
    for lie in Lie::IN_SIZE {
        let error = lied_to(lie).to_string();
        let size = match lie {
            Lie::SizeShort => "524287",
            Lie::SizeLong => "524289",
            _ => "-7",
        };
        assert!(error.contains(size), "{lie:?}: {error}");
    }
}

/// One of both ends failed, and says which call did.
#[track_caller]
fn assert_named<E: ToString>(call: &str, code: i32, errors: [Option<E>; 2]) {
    let errors = errors.into_iter().flatten();
    let words: Vec<_> = errors.map(|error| error.to_string()).collect();
    let named = words.iter().any(|words| words.contains(call));
    assert!(named, "{call} returned {code}: {words:?}");
}

#[test]
fn a_failed_call_of_a_transfer_ends_it_and_is_named() {
    let _serial = double::serial();
    for (call, name) in [
        (Call::RegMr, "regMr"),
        (Call::Isend, "isend"),
        (Call::Irecv, "irecv"),
        (Call::Test, "test"),
        (Call::Consumed, "irecvConsumed"),
    ] {
        for (code, after) in [
            (1, 0),
            (2, 3),
            (3, 0),
            (4, 1),
            (5, 0),
            (6, 2),
            (7, 0),
            (99, 0),
        ] {
            leaving_nothing_open(|| {
                let (server, client) = connected();
                // Memory is registered as a whole: the third registration never comes.
                let after = if call == Call::RegMr {
                    after.min(1)
                } else {
                    after
                };
                let fault = Fault::returns(call, code, after);
                let (received, sent, _) = try_move(&client, &server, 8 * CHUNK, Level::Placed);
                assert_named(name, code, [received.err(), sent.err()]);
                part(server, client);
                drop(fault);
            });
        }
    }
}

#[test]
fn a_failed_call_of_the_set_up_ends_it_and_is_named() {
    let _serial = double::serial();
    for (call, name) in [
        (Call::Properties, "getProperties"),
        (Call::Listen, "listen"),
        (Call::Connect, "connect"),
        (Call::Accept, "accept"),
    ] {
        for (code, after) in [(1, 0), (3, 1), (99, 0)] {
            let before = double::stats().open_comms;
            let listening = Listening::new(double_network(), one_channel, one_channel);
            let fault = Fault::returns(call, code, after);
            let (server, client) = listening.try_connect();
            assert_named(name, code, [server.err(), client.err()]);
            drop(fault);
            // A plugin of this kind accepts on threads of its own: the listen comm of an accept
            // that is given up stays open on purpose, one on each side.
            until("the comms are closed", || {
                (double::stats().open_comms <= before + 2).then_some(())
            });
        }
    }
}

#[test]
fn a_failed_release_changes_no_outcome() {
    let _serial = double::serial();
    for call in [
        Call::DeregMr,
        Call::CloseSend,
        Call::CloseRecv,
        Call::CloseListen,
    ] {
        leaving_nothing_open(|| {
            let fault = Fault::returns(call, 2, 0);
            let (server, client) = connected();
            let (received, sent, defect) = try_move(&client, &server, 8 * CHUNK, Level::Placed);
            assert!(
                received.is_ok() && sent.is_ok() && defect.is_none(),
                "{received:?} {sent:?}"
            );
            part(server, client);
            drop(fault);
        });
    }
}
