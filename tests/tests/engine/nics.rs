//! Several links between two hosts: all of them carry bytes, none holds the others up, and one may
//! go in the middle of a transfer. The links are shaped far below what this machine can do, so that
//! their rates and not its speed decide. Needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails its test")]

use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tcpx_tests::namespaces::{Hosts, Told, skips};

const STRIPED: &str = env!("CARGO_BIN_EXE_striped");
/// Of a link, in Mb/s.
const RATE: u32 = 200;
const BYTES: u64 = 256 << 20;

/// One test at a time, so that they do not measure each other; `None` where it cannot run.
fn turn(test: &str) -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    (!skips(test)).then_some(turn)
}

/// A server on host b and a client on host a that sends `count` transfers.
fn start(hosts: &Hosts, bytes: u64, count: u64, interfaces: Option<&str>) -> (Told, Told) {
    start_with(hosts, bytes, count, interfaces.as_slice(), &[])
}

/// As [`start`], with all words that may follow at the client and at the server.
fn start_with(
    hosts: &Hosts,
    bytes: u64,
    count: u64,
    more: &[&str],
    at_server: &[&str],
) -> (Told, Told) {
    let (bytes, count) = (bytes.to_string(), count.to_string());
    let mut arguments = vec!["server", "7077", &bytes, &count];
    arguments.extend(at_server);
    let mut server = hosts.start(false, STRIPED, &arguments).unwrap();
    server.wait_for("listening").unwrap();
    let mut arguments = vec!["client", "10.78.0.2:7077", &bytes, &count];
    arguments.extend(more);
    let client = hosts.start(true, STRIPED, &arguments).unwrap();
    (server, client)
}

/// Bytes a second of a verified transfer over these interfaces; and the path.
fn rate(hosts: &Hosts, bytes: u64, interfaces: Option<&str>) -> (f64, String) {
    let (mut server, mut client) = start(hosts, bytes, 1, interfaces);
    let (path, _) = client.wait_for("path").unwrap();
    let (_, line) = client.wait_for("sent").unwrap();
    server.wait_for("verified").unwrap();
    client.wait_for("lanes_lost").unwrap();
    let rate = line["bytes_per_second"].as_f64().unwrap();
    (rate, path.as_str().unwrap().to_owned())
}

/// The links together carry at least this part of the sum, which is so many times the rate of one.
/// Once is enough: on a busy machine it is not the links' rates that decide.
fn adds_up(what: &str, least: f64, measure: impl Fn() -> (f64, f64, f64)) {
    let parts: Vec<f64> = (0..5)
        .map(|_| {
            let (one, all, times) = measure();
            let part = all / (times * one);
            let _ = writeln!(
                std::io::stderr(),
                "measured: one link {:.1} MB/s, {what} {:.1} MB/s, {part:.2} of {times} times",
                one / 1e6,
                all / 1e6
            );
            part
        })
        .take_while(|part| *part < least)
        .collect();
    assert!(parts.len() < 5, "{parts:?} of the sum of the links");
}

#[test]
fn four_links_carry_four_times_as_much() {
    let Some(_turn) = turn("four_links_carry_four_times_as_much") else {
        return;
    };
    let hosts = Hosts::new("four", &[RATE; 4]).unwrap();
    adds_up("four", 0.9, || {
        let (one, path) = rate(&hosts, BYTES / 4, Some("=nic0"));
        assert!(!path.contains("nic1"), "{path}");
        let (four, path) = rate(&hosts, BYTES, None);
        for nic in ["nic0", "nic1", "nic2", "nic3"] {
            assert!(path.contains(nic), "{path}");
        }
        (one, four, 4.0)
    });
}

#[test]
fn a_link_of_a_tenth_of_the_speed_adds_its_part() {
    let Some(_turn) = turn("a_link_of_a_tenth_of_the_speed_adds_its_part") else {
        return;
    };
    let hosts = Hosts::new("slow", &[RATE, RATE, RATE, RATE / 10]).unwrap();
    adds_up("three and a slow one", 0.94, || {
        let (one, _) = rate(&hosts, BYTES / 4, Some("=nic0"));
        let (all, path) = rate(&hosts, 2 * BYTES, None);
        assert!(path.contains("nic3"), "{path}");
        (one, all, 3.1)
    });
}

#[test]
fn lanes_go_where_either_side_allows_and_the_path_says_so() {
    let Some(_turn) = turn("lanes_go_where_either_side_allows_and_the_path_says_so") else {
        return;
    };
    let hosts = Hosts::new("allowed", &[RATE * 20; 3]).unwrap();
    hosts.label(2, "nic2:tail").unwrap();
    for (at_client, at_server, expected) in [
        (&[][..], &[][..], &["nic0", "nic1", "nic2"][..]),
        (&["=nic1"], &[], &["nic1"]),
        (&[], &["=nic2"], &["nic2"]),
        (&["nic1,nic2"], &["^nic1"], &["nic2"]),
    ] {
        let (mut server, mut client) = start_with(&hosts, 1 << 20, 1, at_client, at_server);
        let (path, _) = client.wait_for("path").unwrap();
        let path = path.as_str().unwrap();
        let named = ["nic0", "nic1", "nic2"].map(|nic| path.contains(nic));
        let wanted = ["nic0", "nic1", "nic2"].map(|nic| expected.contains(&nic));
        assert_eq!(named, wanted, "{at_client:?} {at_server:?}: {path}");
        assert!(path.contains("event loop"), "{path}");
        server.wait_for("verified").unwrap();
    }
}

#[test]
fn interfaces_that_lead_nowhere_are_errors_on_both_sides() {
    let Some(_turn) = turn("interfaces_that_lead_nowhere_are_errors_on_both_sides") else {
        return;
    };
    let hosts = Hosts::new("nowhere", &[RATE * 20; 3]).unwrap();
    // The receiver's first card answers for its second, or nobody does.
    for answers in [true, false] {
        hosts.answer_for_others(answers).unwrap();
        let (mut server, mut client) = start_with(&hosts, 1 << 20, 1, &["=nic1"], &["=nic2"]);
        let (at_client, _) = client.wait_for("refused").unwrap();
        let (at_server, _) = server.wait_for("refused").unwrap();
        let filter = if answers { "`=nic2`" } else { "`=nic1`" };
        for why in [at_client, at_server] {
            assert!(why.as_str().unwrap().contains(filter), "{why}");
        }
    }
    // A server that allows what nobody reaches does not take what came another way.
    let (mut server, mut client) = start_with(&hosts, 1 << 20, 1, &["^nic2"], &["=nic2"]);
    let (why, _) = server.wait_for("refused").unwrap();
    let why = why.as_str().unwrap();
    assert!(
        why.contains("`=nic2`") && why.contains("10.78.0.2"),
        "{why}"
    );
    let (why, _) = client.wait_for("refused").unwrap();
    assert!(why.as_str().unwrap().contains("`=nic2`"), "{why}");
}

/// Without further settings any card of a host answers for all of its addresses.
#[test]
fn cards_that_answer_for_each_other_lose_no_lane() {
    let Some(_turn) = turn("cards_that_answer_for_each_other_lose_no_lane") else {
        return;
    };
    let hosts = Hosts::flat("flat", 3).unwrap();
    for answers in [true, false] {
        hosts.answer_for_others(answers).unwrap();
        let (mut server, mut client) = start(&hosts, 32 << 20, 4, None);
        let (path, _) = client.wait_for("path").unwrap();
        for _ in 0..4 {
            client.wait_for("sent").unwrap();
            server.wait_for("verified").unwrap();
        }
        let (lost, line) = client.wait_for("lanes_lost").unwrap();
        assert_eq!(lost, 0, "{path}: {line}");
    }
}

#[test]
fn a_link_cut_in_mid_transfer_is_left_and_comes_back() {
    let Some(_turn) = turn("a_link_cut_in_mid_transfer_is_left_and_comes_back") else {
        return;
    };
    cut_and_mend("cut", 2, &[]);
}

#[test]
fn the_control_connections_link_may_be_cut() {
    let Some(_turn) = turn("the_control_connections_link_may_be_cut") else {
        return;
    };
    cut_and_mend("control", 0, &[]);
}

/// The client finds out from its system's vain tries: the silence that it grants the peer is longer
/// than a transfer may stall.
#[test]
fn a_control_connection_whose_link_is_cut_is_not_waited_for() {
    let Some(_turn) = turn("a_control_connection_whose_link_is_cut_is_not_waited_for") else {
        return;
    };
    cut_and_mend("unanswered", 0, &["", "patient"]);
}

fn cut_and_mend(name: &str, link: usize, more: &[&str]) {
    let hosts = Hosts::new(name, &[RATE; 4]).unwrap();
    let (mut server, mut client) = start_with(&hosts, BYTES, 3, more, more);
    client.wait_for("quarter").unwrap();
    hosts.cut(link).unwrap();
    client.wait_for("sent").unwrap();
    server.wait_for("verified").unwrap();
    hosts.restore_link(link).unwrap();
    for _ in 0..2 {
        client.wait_for("sent").unwrap();
        server.wait_for("verified").unwrap();
    }
    let (_, line) = client.wait_for("lanes_lost").unwrap();
    // On a busy machine another one may stall for too long.
    for what in ["lanes_lost", "chunks_resent", "lanes_restored"] {
        assert!(line[what].as_u64().unwrap() > 0, "{line}");
    }
}
