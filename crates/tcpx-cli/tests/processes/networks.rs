//! Hosts whose networks are set up as tests on loopback never see them. Needs root.

use std::fs;
use std::path::Path;
use std::process::Command;

use tcpx_tests::namespaces::{Hosts, skips};

use crate::files::contents;
use crate::support::{Running, Server, program, run};

const TCPX: &str = env!("CARGO_BIN_EXE_tcpx");

/// A file of this folder moves from host `a` to host `b` at this address; the line that `b`
/// printed.
fn moves(folder: &Path, address: &str, bind: &[&str], start: impl Fn(bool) -> Command) -> String {
    let (file, out) = (folder.join("weights.bin"), folder.join("out"));
    fs::create_dir(&out).expect("created");
    fs::write(&file, contents(3 << 20)).expect("written");
    let [file, out] = [&file, &out].map(|path| path.to_str().expect("text"));
    let receive = [&["receive", "--host", "--out", out], bind].concat();
    let server = Server::start(program(start(false), &receive));
    let send = ["send", file, address, "--host", "--port", &server.port];
    let mut send = program(start(true), &send);
    send.env("TCPX_KEY", server.key.as_ref().expect("a fresh key"));
    run(send).assert_code(0);
    let invitation = server.invitation.clone();
    server.running.end().assert_code(0);
    let arrived = fs::read(folder.join("out/weights.bin")).expect("arrived");
    assert!(arrived == contents(3 << 20));
    invitation
}

#[test]
fn hosts_that_share_one_link_and_no_more_reach_each_other() {
    if skips("hosts_that_share_one_link_and_no_more_reach_each_other") {
        return;
    }
    let hosts = Hosts::new("fe80", &[1000]).expect("two hosts");
    hosts.keep_ipv6("fe80").expect("no other address");
    let folder = tempfile::tempdir().expect("a folder");
    let start = |on_a| hosts.command(on_a, TCPX);
    moves(folder.path(), "fe80::2%nic0", &["--bind", "::"], start);
}

/// Debian gives a host's own name to 127.0.1.1.
#[test]
fn a_host_whose_name_leads_to_itself_is_reached_by_others() {
    const TEST: &str = "a_host_whose_name_leads_to_itself_is_reached_by_others";
    if skips(TEST) {
        return;
    }
    let hosts = Hosts::new("own-name", &[1000]).expect("two hosts");
    let folder = tempfile::tempdir().expect("a folder");
    let start = |on_a: bool| {
        let (own, other, at) = if on_a {
            ("node-a", "node-b", "10.78.0.2")
        } else {
            ("node-b", "node-a", "10.78.0.1")
        };
        let names = folder.path().join(own);
        let text = format!("127.0.0.1 localhost\n127.0.1.1 {own}\n{at} {other}\n");
        fs::write(&names, text).expect("written");
        let mut command = hosts.command(on_a, "unshare");
        let script = "hostname $1; mount --bind $0 /etc/hosts; shift; exec \"$@\"";
        command.args(["--mount", "--uts", "sh", "-ec", script]);
        command.arg(names).args([own, TCPX]);
        command
    };
    let invitation = moves(folder.path(), "node-b", &["--bind", "0.0.0.0"], start);
    assert!(invitation.contains("10.78.0.2"), "{invitation}");
    // The first rank's own name, as job schedulers give it to all.
    let key = tcpx::generate_key().expect("a key").to_text();
    let rank = |rank: &str| {
        let words = [
            "perf", "--host", "--size", "64KiB", "--rounds", "1", "--wait", "5m",
        ];
        let mut command = program(start(rank == "1"), &words);
        command.env("TCPX_KEY", &key).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "node-b").env("RANK", rank);
        Running::start(command)
    };
    let ranks = ["0", "1"].map(rank);
    for rank in ranks {
        rank.end().assert_code(0);
    }
}

#[test]
fn a_names_address_that_vanishes_does_not_hold_up_the_next() {
    const TEST: &str = "a_names_address_that_vanishes_does_not_hold_up_the_next";
    if skips(TEST) {
        return;
    }
    let hosts = Hosts::new("vanish", &[1000]).expect("two hosts");
    // Nobody on the link has the card's address, and the system asks again for hours.
    let lost = "ip neigh add 10.78.0.3 lladdr 02:00:00:00:00:99 dev nic0; \
                echo 100 > /proc/sys/net/ipv4/tcp_syn_retries";
    let mut command = hosts.command(true, "sh");
    command.args(["-ec", lost]);
    run(command).assert_code(0);
    let folder = tempfile::tempdir().expect("a folder");
    let names = folder.path().join("hosts");
    fs::write(&names, "10.78.0.3 far\n10.78.0.2 far\n").expect("written");
    let client = |port: &str, timeout: &str| {
        let mut command = hosts.command(true, "unshare");
        let script = "mount --bind $0 /etc/hosts; exec \"$@\"";
        command.args(["--mount", "sh", "-ec", script]);
        command.arg(&names).arg(TCPX);
        let words = [
            "transfer",
            "far",
            "--host",
            "--port",
            port,
            "--timeout",
            timeout,
        ];
        program(command, &words)
    };
    let server = ["transfer", "server", "--host", "--bind", "0.0.0.0"];
    let server = Server::start(program(hosts.command(false, TCPX), &server));
    let mut patient = client(&server.port, "60m");
    patient.env("TCPX_KEY", server.key.as_ref().expect("a fresh key"));
    run(patient).assert_code(0);
    let port = server.port.clone();
    server.running.end().assert_code(0);
    // Nobody is there: each address has its reason.
    let mut lonely = client(&port, "2s");
    lonely.arg("--insecure");
    run(lonely)
        .assert_code(1)
        .assert_complains(&format!("10.78.0.3:{port} did not answer"))
        .assert_complains(&format!("10.78.0.2:{port} refused the connection"));
}

#[test]
fn a_routed_loopback_address_is_the_last_choice() {
    const TEST: &str = "a_routed_loopback_address_is_the_last_choice";
    if skips(TEST) {
        return;
    }
    let hosts = Hosts::new("env", &[1000]).expect("two hosts");
    let env = || {
        let file = tcpx_tests::plugin_file::path().to_str().expect("text");
        let words = ["env", "nccl", "--plugin", file];
        run(program(hosts.command(true, TCPX), &words))
    };
    env()
        .assert_code(0)
        .assert_says("export NCCL_SOCKET_IFNAME=nic0");
    hosts.keep_routed().expect("no other address");
    env()
        .assert_code(0)
        .assert_says("export NCCL_SOCKET_IFNAME=lo")
        .assert_says("no other interface is up with an IPv4 address; routes may lead to its own");
}
