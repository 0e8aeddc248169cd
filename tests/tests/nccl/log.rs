//! What our plugin file says through the logger of its host: what it chose and why, and why a call
//! failed.

#![expect(clippy::unwrap_used, reason = "what fails here fails its test")]

use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nccl_net::{
    Handle128, ListenComm, LoadOptions, LogLevel, LogRecord, MemoryType, Plugin, PostOutcome,
    RecvComm, SendComm, clear_log_sink, set_log_sink,
};
use rustix::process::Resource;
use tcpx_tests::child::{LANES, LOOPBACK, NO_LANES};
use tcpx_tests::namespaces::{Hosts, skips};
use tcpx_tests::nccl_link::{
    HOST, Link, MIB, accepted, good, handle_in, leave_handle, listening, started, until,
    until_calmly,
};
use tcpx_tests::nccl_part::Opaque;
use tcpx_tests::support::limit;
use tcpx_tests::{child, plugin_file};

static LINES: Mutex<Vec<(LogLevel, String)>> = Mutex::new(Vec::new());

fn keep(record: &LogRecord<'_>) {
    let line = (record.level, record.message.to_owned());
    LINES.lock().unwrap().push(line);
}

#[track_caller]
fn said(level: LogLevel, words: &[&str]) {
    let lines = LINES.lock().unwrap();
    let is_it = |line: &&(LogLevel, String)| {
        line.0 == level && words.iter().all(|word| line.1.contains(word))
    };
    assert!(
        lines.iter().any(|line| is_it(&line)),
        "{words:?}: {lines:?}"
    );
}

/// Connects to a handle, and accepts who connects here.
fn met(plugin: &Plugin, handle: Handle128, listen: ListenComm) -> (SendComm, RecvComm) {
    let (mut connecting, mut accepting) = (plugin.connect(0, handle).unwrap(), listen.accept());
    let (mut send, mut receive) = (None, None);
    until("connecting", || {
        send = send.take().or_else(|| connecting.poll().unwrap());
        receive = receive.take().or_else(|| accepting.poll().unwrap());
        send.is_some() && receive.is_some()
    });
    (send.unwrap(), receive.unwrap())
}

#[test]
fn choices_and_the_reasons_of_failures_reach_the_hosts_logger() {
    const TEST: &str = "choices_and_the_reasons_of_failures_reach_the_hosts_logger";
    child::run_as(TEST, &[LOOPBACK, LANES], || {
        set_log_sink(keep, LogLevel::Info);
        let plugin = Plugin::load(LoadOptions::new(plugin_file::path())).unwrap();
        plugin.init().unwrap();
        said(
            LogLevel::Info,
            &[
                "NET/TCPX : ",
                "interfaces lo (NCCL_SOCKET_IFNAME admits them), 8 devices",
            ],
        );
        let chunk = "set NCCL_P2P_NET_CHUNKSIZE=524288: ";
        said(LogLevel::Info, &["NET/TCPX : ", chunk]);

        assert!(plugin.properties(99).is_err());
        let (handle, listen) = plugin.listen(0).unwrap();
        said(LogLevel::Info, &["messages above 131072 bytes", "lanes"]);
        let (mut send, mut receive) = met(&plugin, handle, listen);
        let (mut from, mut to) = (vec![1; 5000], vec![0; 5000]);
        // SAFETY: the bytes outlive the comms.
        let source = unsafe { send.register(from.as_mut_ptr(), 5000, MemoryType::Host) }.unwrap();
        // SAFETY: as above.
        let target = unsafe { receive.register(to.as_mut_ptr(), 5000, MemoryType::Host) }.unwrap();
        let posted = receive.irecv(&target, 0, 4999, 0);
        assert!(matches!(posted, Ok(PostOutcome::Posted(_))));
        let posted = send.isend(&source, 0, 5000, 0);
        assert!(matches!(posted, Ok(PostOutcome::Posted(_))));
        until("both errors", || {
            let there = receive.test_head().is_err();
            let here = send.test_head().is_err() || send.isend(&source, 0, 1, 0).is_err();
            there && here
        });
        said(
            LogLevel::Warn,
            &["test: receive comm", "has 5000 bytes", "holds 4999"],
        );
        said(LogLevel::Warn, &["send comm", "refused message"]);
        clear_log_sink();
    });
}

#[test]
fn a_start_that_fails_says_why_in_the_hosts_log() {
    const TEST: &str = "a_start_that_fails_says_why_in_the_hosts_log";
    child::run_as(TEST, &[("NCCL_SOCKET_IFNAME", "=nosuch0")], || {
        set_log_sink(keep, LogLevel::Warn);
        let plugin = Plugin::load(LoadOptions::new(plugin_file::path())).unwrap();
        assert!(plugin.init().is_err());
        said(
            LogLevel::Warn,
            &["NCCL_SOCKET_IFNAME=\"=nosuch0\"", "correct the variable"],
        );
        clear_log_sink();
    });
}

#[test]
fn a_lack_of_descriptors_is_said_once_a_minute() {
    const TEST: &str = "a_lack_of_descriptors_is_said_once_a_minute";
    child::run_as(TEST, &[LOOPBACK, LANES], || {
        set_log_sink(keep, LogLevel::Warn);
        let plugin = Plugin::load(LoadOptions::new(plugin_file::path())).unwrap();
        plugin.init().unwrap();
        let (handle, listen) = plugin.listen(0).unwrap();
        let door = u16::from_le_bytes([handle.0[56], handle.0[57]]);
        limit(Resource::Nofile, 200);
        let mut files = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            files.push(file);
        }
        // A stranger takes the last descriptor, and is at the door once it speaks.
        files.pop();
        let mut stranger = TcpStream::connect(("127.0.0.1", door)).unwrap();
        stranger.write_all(b"?").unwrap();
        let told = || {
            let lines = LINES.lock().unwrap();
            let lines = lines.iter().map(|(_, line)| line);
            let told = lines.filter(|line| line.contains("(os error 24)"));
            told.cloned().collect::<Vec<_>>()
        };
        until_calmly("the first line", || !told().is_empty());
        // The door tries ten times a second.
        std::thread::sleep(Duration::from_secs(2));
        let lines = told();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("no descriptor for another connection"));
        assert!(lines[0].contains("raise the limit (ulimit -n)"));
        clear_log_sink();
        drop((files, stranger, listen));
    });
}

/// The peer: both ways at once, until it is killed.
fn exchange(folder: &Path) {
    let (table, context) = started(12);
    let (listen, handle) = listening(&*table, context);
    leave_handle(&folder.join("peer"), &handle);
    let own = handle_in(&folder.join("own"));
    let link = Link::between(&*table, context, listen, own);
    let (mut data, mut target) = (vec![7; MIB], vec![0; MIB]);
    let (_, from) = table.reg_mr(link.send, &mut data, HOST);
    let (_, to) = table.reg_mr(link.receive, &mut target, HOST);
    loop {
        let at = target.as_mut_ptr();
        let received = good(table.irecv(link.receive, at, MIB, to, ptr::null_mut()));
        let sent = good(table.isend(link.send, data.as_mut_ptr(), MIB, from));
        link.finish(received);
        link.finish(sent);
    }
}

/// Longest time that the survivor may take to hear of it, on a busy host.
const SOON: Duration = Duration::from_secs(20);

/// A peer is killed amid messages both ways; both comms of the survivor fail soon, and its log says
/// why.
fn killed(test: &str, peer: &str, lanes: (&str, &str)) {
    if child::is_child(peer) {
        return exchange(Path::new(&std::env::var("TCPX_TEST_FILE").unwrap()));
    }
    child::run_as(test, &[LOOPBACK, lanes], || {
        set_log_sink(keep, LogLevel::Info);
        let plugin = Plugin::load(LoadOptions::new(plugin_file::path())).unwrap();
        plugin.init().unwrap();
        let (own, listen) = plugin.listen(0).unwrap();
        let folder = tempfile::tempdir().unwrap();
        leave_handle(&folder.path().join("own"), &own.0);
        let meeting = ("TCPX_TEST_FILE", folder.path().to_str().unwrap());
        let process = child::start(test, peer, &[LOOPBACK, lanes, meeting]);
        let handle = Handle128(handle_in(&folder.path().join("peer")));
        let (mut send, mut receive) = met(&plugin, handle, listen);
        let (mut from, mut to) = (vec![1; MIB], vec![0; MIB]);
        // SAFETY: the bytes outlive the comms.
        let source = unsafe { send.register(from.as_mut_ptr(), MIB, MemoryType::Host) }.unwrap();
        // SAFETY: as above.
        let target = unsafe { receive.register(to.as_mut_ptr(), MIB, MemoryType::Host) }.unwrap();
        let (mut sent, mut received) = (0, 0);
        let (mut send_failed, mut receive_failed) = (false, false);
        // A call that has failed is not made again: its lines would crowd out the other comm's.
        let mut step = || {
            if !send_failed {
                send_failed = send.isend(&source, 0, MIB, 0).is_err();
                match send.test_head() {
                    Ok(done) => sent += usize::from(done.is_some()),
                    Err(_) => send_failed = true,
                }
            }
            if !receive_failed {
                receive_failed = receive.irecv(&target, 0, MIB, 0).is_err();
                match receive.test_head() {
                    Ok(done) => received += usize::from(done.is_some()),
                    Err(_) => receive_failed = true,
                }
            }
            (sent.min(received), send_failed, receive_failed)
        };
        until("messages both ways", || {
            let (messages, send_failed, receive_failed) = step();
            assert!(!send_failed && !receive_failed);
            messages >= 5
        });
        // Only the process that was started above.
        drop(process);
        let killed = Instant::now();
        until("both errors", || {
            let (_, send_failed, receive_failed) = step();
            send_failed && receive_failed
        });
        let took = killed.elapsed();
        assert!(took < SOON, "{took:?}");
        for comm in ["send comm", "receive comm"] {
            said(
                LogLevel::Warn,
                &[comm, "look at the peer's log for why it ended"],
            );
        }
        clear_log_sink();
    });
}

#[test]
fn a_killed_peer_ends_both_ways_soon_with_the_reason() {
    killed(
        "a_killed_peer_ends_both_ways_soon_with_the_reason",
        "the peer of a_killed_peer_ends_both_ways_soon",
        LANES,
    );
}

#[test]
fn a_killed_peer_ends_both_ways_soon_without_lanes() {
    killed(
        "a_killed_peer_ends_both_ways_soon_without_lanes",
        "the peer of a_killed_peer_ends_both_ways_soon_without_lanes",
        NO_LANES,
    );
}

/// Messages to a peer that takes them, from when they flow until the log says for this reason that
/// none moves any more.
fn sends_until_told() {
    set_log_sink(keep, LogLevel::Warn);
    let plugin = Plugin::load(LoadOptions::new(plugin_file::path())).unwrap();
    plugin.init().unwrap();
    let folder = PathBuf::from(std::env::var_os("TCPX_TEST_FILE").unwrap());
    let handle = Handle128(handle_in(&folder.join("handle")));
    let mut connecting = plugin.connect(0, handle).unwrap();
    let mut send = None;
    until("connecting", || {
        send = connecting.poll().unwrap();
        send.is_some()
    });
    let (mut send, mut from) = (send.unwrap(), vec![1; MIB]);
    // SAFETY: the bytes outlive the comm.
    let source = unsafe { send.register(from.as_mut_ptr(), MIB, MemoryType::Host) }.unwrap();
    let words = std::env::var("TCPX_TEST_WORDS").unwrap();
    let mut sent = 0;
    until_calmly("why nothing moves", || {
        assert!(send.isend(&source, 0, MIB, 0).is_ok());
        sent += usize::from(send.test_head().unwrap().is_some());
        if sent == 5 {
            std::fs::write(folder.join("flows"), "").unwrap();
        }
        // A report that comes while the kernel just tries again cannot know yet; the next one does.
        let lines = LINES.lock().unwrap();
        lines
            .iter()
            .any(|(_, line)| line.contains("without progress") && line.contains(&words))
    });
    clear_log_sink();
}

/// The peer: takes so many messages, and stays until it is ended.
fn takes(messages: usize) {
    let folder = PathBuf::from(std::env::var_os("TCPX_TEST_FILE").unwrap());
    let (table, context) = started(12);
    let (listen, handle) = listening(&*table, context);
    leave_handle(&folder.join("handle"), &handle);
    let receive = accepted(&*table, listen);
    let mut target = vec![0; MIB];
    let (_, to) = table.reg_mr(receive, &mut target, HOST);
    for _ in 0..messages {
        let mut request: Opaque = ptr::null_mut();
        until_calmly("a message", || {
            if request.is_null() {
                let at = target.as_mut_ptr();
                let posted = good(table.irecv(receive, at, MIB, to, ptr::null_mut()));
                request = posted;
            }
            !request.is_null() && table.test(request).1 == 1
        });
    }
    loop {
        std::thread::park();
    }
}

#[test]
fn a_host_that_vanishes_amid_messages_is_said_not_to_answer() {
    const TEST: &str = "a_host_that_vanishes_amid_messages_is_said_not_to_answer";
    if child::is_child("takes all") {
        return takes(usize::MAX);
    }
    if child::is_child("sends to who vanishes") {
        return sends_until_told();
    }
    if skips(TEST) {
        return;
    }
    let hosts = Hosts::flat("vanishes", 1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let start = |on_a, role| {
        let environment = [
            ("NCCL_SOCKET_IFNAME", "nic0"),
            NO_LANES,
            ("TCPX_TEST_FILE", folder.path().to_str().unwrap()),
            ("TCPX_TEST_WORDS", "the peer's host must answer"),
        ];
        hosts.start_part(on_a, (TEST, role), &environment).unwrap()
    };
    let _receiver = start(false, "takes all");
    let sender = start(true, "sends to who vanishes");
    until_calmly("messages", || folder.path().join("flows").exists());
    hosts.unplug(0).unwrap();
    assert!(sender.end().unwrap().success());
}

#[test]
fn a_peer_that_posts_no_more_receives_is_said_to_read_nothing() {
    const TEST: &str = "a_peer_that_posts_no_more_receives_is_said_to_read_nothing";
    if child::is_child("takes some") {
        return takes(6);
    }
    if child::is_child("sends to who takes some") {
        return sends_until_told();
    }
    let folder = tempfile::tempdir().unwrap();
    let environment = [
        LOOPBACK,
        NO_LANES,
        ("TCPX_TEST_FILE", folder.path().to_str().unwrap()),
        ("TCPX_TEST_WORDS", "the peer must read it"),
    ];
    let receiver = child::start(TEST, "takes some", &environment);
    let sender = child::start(TEST, "sends to who takes some", &environment);
    sender.succeeds();
    drop(receiver);
}
