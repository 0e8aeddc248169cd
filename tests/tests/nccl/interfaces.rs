//! Our plugin file between two hosts that have several networks in common, or one that is odd.
//! Needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails its test")]

use std::path::PathBuf;
use std::ptr;

use rustix::process::Resource;
use tcpx_tests::child;
use tcpx_tests::namespaces::{Hosts, skips};
use tcpx_tests::nccl_link::{accepted, connected, handle_in, leave_handle, listening, started};
use tcpx_tests::nccl_messages::{receive_all, send_all};
use tcpx_tests::plugin_file;
use tcpx_tests::support::limit;

const FILE: &str = "TCPX_TEST_FILE";
/// Large enough for lanes.
const LEN: usize = 1 << 20;

fn meeting() -> PathBuf {
    std::env::var_os(FILE).unwrap().into()
}

/// Listens, leaves the handle in the file, and takes one message.
fn listen() {
    let (table, context) = started(12);
    let (listen, handle) = listening(&*table, context);
    leave_handle(&meeting(), &handle);
    let receive = accepted(&*table, listen);
    receive_all(&*table, receive, (LEN, 1), |_| true);
}

/// Connects to the handle in the file, and sends one message.
fn connect() {
    let (table, context) = started(12);
    let send = connected(&*table, context, handle_in(&meeting()));
    send_all(&*table, send, LEN, 1);
    assert_eq!(table.close_send(send), 0);
}

/// NCCL may pair devices of different networks. Many hosts drop a packet that does not come over
/// the interface where they would send its answer.
#[test]
fn a_strict_host_is_reached_over_the_routes() {
    const TEST: &str = "a_strict_host_is_reached_over_the_routes";
    if child::is_child("listen") {
        return listen();
    }
    if child::is_child("connect") {
        return connect();
    }
    if skips(TEST) {
        return;
    }
    let hosts = Hosts::new("routes", &[1000, 1000]).unwrap();
    let strict = "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $f; done";
    for on_a in [true, false] {
        let done = hosts.start(on_a, "sh", &["-ec", strict]).unwrap();
        assert!(done.end().unwrap().success());
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("handle");
    let start = |on_a, role, interface| {
        let environment = [
            ("NCCL_SOCKET_IFNAME", interface),
            child::LANES,
            (FILE, file.to_str().unwrap()),
        ];
        hosts.start_part(on_a, (TEST, role), &environment).unwrap()
    };
    // The devices lie on different links.
    let ends = [
        start(false, "listen", "nic1"),
        start(true, "connect", "nic0"),
    ];
    for end in ends {
        assert!(end.end().unwrap().success());
    }
}

/// Bytes that have left by an interface of this host.
fn sent_by(interface: &str) -> u64 {
    let table = std::fs::read_to_string("/proc/net/dev").unwrap();
    let line = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let sent = numbers.split_whitespace().nth(8)?;
        (name.trim() == interface).then(|| sent.parse().unwrap())
    };
    table.lines().find_map(line).unwrap()
}

/// The routes know one card for all of it.
#[test]
fn a_device_sends_by_its_card_beside_a_like_network() {
    const TEST: &str = "a_device_sends_by_its_card_beside_a_like_network";
    if child::is_child("listen") {
        return listen();
    }
    if child::is_child("connect") {
        connect();
        let (first, second) = (sent_by("nic0"), sent_by("nic1"));
        assert!(
            second >= LEN as u64 && first < LEN as u64,
            "{first} and {second} bytes"
        );
        return;
    }
    if skips(TEST) {
        return;
    }
    let hosts = Hosts::flat("flat", 2).unwrap();
    hosts.answer_for_others(false).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("handle");
    let start = |on_a, role| {
        let environment = [
            ("NCCL_SOCKET_IFNAME", "nic1"),
            child::LANES,
            (FILE, file.to_str().unwrap()),
        ];
        hosts.start_part(on_a, (TEST, role), &environment).unwrap()
    };
    for end in [start(false, "listen"), start(true, "connect")] {
        assert!(end.end().unwrap().success());
    }
}

/// A message from one to the other of two hosts, which are made so, by ranks that prepare so, with
/// these variables.
fn meets(
    (test, name): (&str, &str),
    change: impl Fn(&Hosts) -> anyhow::Result<()>,
    prepare: impl Fn(),
    variables: &[(&str, &str)],
) {
    for (role, part) in [("listen", listen as fn()), ("connect", connect)] {
        if child::is_child(role) {
            prepare();
            return part();
        }
    }
    if skips(test) {
        return;
    }
    let hosts = Hosts::new(name, &[1000]).unwrap();
    change(&hosts).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("handle");
    let mut environment = vec![child::LANES, (FILE, file.to_str().unwrap())];
    environment.extend(variables);
    let start = |on_a, role| hosts.start_part(on_a, (test, role), &environment).unwrap();
    for end in [start(false, "listen"), start(true, "connect")] {
        assert!(end.end().unwrap().success());
    }
}

#[test]
fn hosts_that_have_ipv6_alone_reach_each_other() {
    let test = "hosts_that_have_ipv6_alone_reach_each_other";
    meets((test, "ipv6"), |hosts| hosts.keep_ipv6("fd78"), || (), &[]);
}

#[test]
fn hosts_whose_addresses_stand_on_loopback_reach_each_other() {
    let test = "hosts_whose_addresses_stand_on_loopback_reach_each_other";
    meets((test, "routed"), Hosts::keep_routed, || (), &[]);
}

/// Leaves this thread, and those that it starts, as little as a strict container does.
fn confine() {
    limit(Resource::Memlock, 64 << 10);
    limit(Resource::Nofile, 256);
    let (version, data) = ([0x2008_0522_u32, 0], [0_u32; 6]);
    let hidden = [
        (c"/", ptr::null(), libc::MS_REC | libc::MS_PRIVATE),
        (c"/proc", c"tmpfs".as_ptr(), 0),
    ];
    // SAFETY: mounts of this thread alone, with texts that end; then capset's third version, whose
    // sets are all empty.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
        for (place, kind, flags) in hidden {
            let none = c"none".as_ptr();
            let mounted = libc::mount(none, place.as_ptr(), kind, flags, ptr::null());
            assert_eq!(mounted, 0, "{place:?}");
        }
        let set = libc::syscall(libc::SYS_capset, version.as_ptr(), data.as_ptr());
        assert_eq!(set, 0);
    }
}

#[test]
fn ranks_without_any_privileges_reach_each_other() {
    let test = "ranks_without_any_privileges_reach_each_other";
    // Without /proc a program does not find its own file, nor what lies beside it.
    let plugin = plugin_file::path().to_str().unwrap();
    meets(
        (test, "confined"),
        |_| Ok(()),
        confine,
        &[(plugin_file::OTHER, plugin)],
    );
}
