//! What our plugin file says through the logger of its host: what it chose and why, and why a call failed.

#![expect(clippy::unwrap_used, reason = "what fails here fails its test")]

use std::sync::Mutex;

use nccl_net::{
    LoadOptions, LogLevel, LogRecord, MemoryType, Plugin, PostOutcome, clear_log_sink, set_log_sink,
};
use tcpx_tests::nccl_link::until;
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

#[test]
fn choices_and_the_reasons_of_failures_reach_the_hosts_logger() {
    const TEST: &str = "choices_and_the_reasons_of_failures_reach_the_hosts_logger";
    child::run(TEST, &[child::LOOPBACK, child::LANES], || {
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
        let (mut connecting, mut accepting) = (plugin.connect(0, handle).unwrap(), listen.accept());
        let (mut send, mut receive) = (None, None);
        until("connecting", || {
            send = send.take().or_else(|| connecting.poll().unwrap());
            receive = receive.take().or_else(|| accepting.poll().unwrap());
            send.is_some() && receive.is_some()
        });
        let (mut send, mut receive) = (send.unwrap(), receive.unwrap());
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
    child::run(TEST, &[("NCCL_SOCKET_IFNAME", "=nosuch0")], || {
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
