//! Our own plugin file, loaded as a host program loads any plugin.
//!
//! The plugin reads its variables once in a process, so each test has a process of its own.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::time::{Duration, Instant};

use nccl_net::{
    AbiVersion, DeviceOffload, Done, Handle128, HostError, LoadOptions, MemoryHandle, MemoryType,
    Plugin, PostOutcome, RecvComm, SendComm,
};
use tcpx_tests::child::{self, LOOPBACK};
use tcpx_tests::plugin_file;
use tcpx_tests::scenario::sizes_up_to;

/// Everything here runs on loopback within this time, or something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

#[track_caller]
fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(
            Instant::now() < deadline,
            "{what}: nothing after {PATIENCE:?}"
        );
        std::thread::yield_now();
    }
}

fn random(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    getrandom::fill(&mut bytes).unwrap();
    bytes
}

fn load() -> Plugin {
    let plugin = Plugin::load(LoadOptions::new(plugin_file::path())).unwrap();
    assert_eq!(plugin.version(), AbiVersion::V12);
    assert_eq!(plugin.name(), "TCPX");
    plugin.init().unwrap();
    assert!(plugin.devices().unwrap() >= 1);
    plugin
}

fn connect(plugin: &Plugin) -> (SendComm, RecvComm) {
    let (handle, listen) = plugin.listen(0).unwrap();
    let mut connecting = plugin.connect(0, handle).unwrap();
    let mut accepting = listen.accept();
    let (mut send, mut receive) = (None, None);
    until("connecting", || {
        if send.is_none() {
            send = connecting.poll().unwrap();
        }
        if receive.is_none() {
            receive = accepting.poll().unwrap();
        }
        (send.is_some() && receive.is_some()).then_some(())
    });
    (send.unwrap(), receive.unwrap())
}

fn register_send(comm: &SendComm, bytes: &mut [u8], kind: MemoryType) -> MemoryHandle {
    // SAFETY: every test keeps the bytes until its comms are closed.
    unsafe { comm.register(bytes.as_mut_ptr(), bytes.len(), kind) }.unwrap()
}

fn register_receive(comm: &RecvComm, bytes: &mut [u8], kind: MemoryType) -> MemoryHandle {
    // SAFETY: as above.
    unsafe { comm.register(bytes.as_mut_ptr(), bytes.len(), kind) }.unwrap()
}

/// Sends `len` bytes into a receive of `capacity`.
#[track_caller]
fn transfer(
    (send, from): (&mut SendComm, &MemoryHandle),
    (receive, to): (&mut RecvComm, &MemoryHandle),
    len: usize,
    capacity: usize,
) -> Done {
    assert!(matches!(
        receive.irecv(to, 0, capacity, 0),
        Ok(PostOutcome::Posted(_))
    ));
    assert!(matches!(
        send.isend(from, 0, len, 0),
        Ok(PostOutcome::Posted(_))
    ));
    let (mut sent, mut received) = (false, None);
    until("a transfer", || {
        sent = sent || send.test_head().unwrap().is_some();
        if received.is_none() {
            received = receive.test_head().unwrap();
        }
        received.filter(|_| sent)
    })
}

#[test]
fn the_file_carries_the_id_of_the_sources_it_was_built_from() {
    // `path` has compared the file with the sources; the symbol says the same.
    let id = tcpx_build_id::of_file(plugin_file::path()).unwrap();
    assert_eq!(id, Some(plugin_file::build_id_symbol()));
}

#[test]
fn host_memory_arrives_in_place_in_every_size() {
    child::run(
        "host_memory_arrives_in_place_in_every_size",
        &[LOOPBACK],
        || {
            let plugin = load();
            let properties = plugin.properties(0).unwrap();
            assert_eq!(properties.offload, DeviceOffload::None);
            assert!(properties.pointer_support.host() && !properties.pointer_support.cuda());
            assert_eq!(properties.name, "lo");
            let (mut send, mut receive) = connect(&plugin);
            assert!(receive.device_handle().is_none());
            for size in sizes_up_to(4 << 20) {
                let mut data = random(size);
                let mut target = vec![0xee; size + 64];
                let from = register_send(&send, &mut data, MemoryType::Host);
                let to = register_receive(&receive, &mut target, MemoryType::Host);
                let done = transfer((&mut send, &from), (&mut receive, &to), size, size + 64);
                assert_eq!(done.bytes, Some(size));
                assert!(target[..size] == data, "{size} bytes");
                assert!(
                    target[size..].iter().all(|byte| *byte == 0xee),
                    "{size} bytes"
                );
            }
            send.close().unwrap();
            receive.close().unwrap();
        },
    );
}

#[test]
fn a_message_above_its_receive_fails_on_both_sides() {
    child::run(
        "a_message_above_its_receive_fails_on_both_sides",
        &[LOOPBACK],
        || {
            let plugin = load();
            let (mut send, mut receive) = connect(&plugin);
            let mut data = random(5000);
            let mut target = vec![0xee; 5000];
            let from = register_send(&send, &mut data, MemoryType::Host);
            let to = register_receive(&receive, &mut target, MemoryType::Host);
            assert!(matches!(
                receive.irecv(&to, 0, 4999, 0),
                Ok(PostOutcome::Posted(_))
            ));
            assert!(matches!(
                send.isend(&from, 0, 5000, 0),
                Ok(PostOutcome::Posted(_))
            ));
            let error = until("the receiver's error", || receive.test_head().err());
            assert_eq!(code(&error), 3);
            assert!(target.iter().all(|byte| *byte == 0xee));
            let error = until("the sender's error", || {
                send.test_head()
                    .err()
                    .or_else(|| send.isend(&from, 0, 1, 0).err())
            });
            assert_eq!(code(&error), 6);
        },
    );
}

fn code(error: &HostError) -> i32 {
    match error {
        HostError::Call(call) => call.rc.to_raw(),
        other => panic!("expected an answer of the plugin, got {other}"),
    }
}

#[test]
fn a_variable_that_cannot_be_used_stops_init() {
    child::run(
        "a_variable_that_cannot_be_used_stops_init",
        &[LOOPBACK, ("TCPX_NET_DEVICE", "gpu")],
        || {
            let plugin = Plugin::load(LoadOptions::new(plugin_file::path())).unwrap();
            assert_eq!(code(&plugin.init().unwrap_err()), 4);
        },
    );
}

#[test]
fn a_peer_process_that_dies_is_a_system_error_again_and_again() {
    const NAME: &str = "a_peer_process_that_dies_is_a_system_error_again_and_again";
    const PEER: &str = "the peer that dies";
    if child::is_child(PEER) {
        send_until_killed();
        return;
    }
    child::run(NAME, &[LOOPBACK], || {
        let plugin = load();
        let (handle, listen) = plugin.listen(0).unwrap();
        let handle: String = handle.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut peer = child::start(NAME, PEER, &[LOOPBACK, ("TCPX_TEST_HANDLE", &handle)]);
        let mut accepting = listen.accept();
        let mut receive = until("the peer", || accepting.poll().unwrap());
        // The first message has come whole, the second never will: it is larger than what the
        // sockets hold, and nobody reads it before the peer is dead.
        let mut target = vec![0; 256 << 20];
        let to = register_receive(&receive, &mut target, MemoryType::Host);
        assert!(matches!(
            receive.irecv(&to, 0, 16, 0),
            Ok(PostOutcome::Posted(_))
        ));
        until("the first message", || receive.test_head().unwrap());
        peer.kill().unwrap();
        peer.wait().unwrap();
        assert!(matches!(
            receive.irecv(&to, 0, 256 << 20, 0),
            Ok(PostOutcome::Posted(_))
        ));
        for _ in 0..3 {
            let error = until("the end of the peer", || receive.test_head().err());
            assert_eq!(code(&error), 2);
        }
    });
}

/// The peer: sends 16 bytes, then 256 MiB that nobody reads.
fn send_until_killed() {
    let text = std::env::var("TCPX_TEST_HANDLE").unwrap();
    let mut handle = [0; 128];
    for (at, byte) in handle.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    }
    let plugin = load();
    let mut connecting = plugin.connect(0, Handle128(handle)).unwrap();
    let mut send = until("the receiver", || connecting.poll().unwrap());
    let mut data = vec![7; 256 << 20];
    let from = register_send(&send, &mut data, MemoryType::Host);
    for len in [16, 256 << 20] {
        assert!(matches!(
            send.isend(&from, 0, len, 0),
            Ok(PostOutcome::Posted(_))
        ));
    }
    // The parent ends this process; should the parent itself end, the sends fail.
    until("the end", || match send.test_head() {
        Ok(Some(done)) if done.ticket.0 == 1 => Some(()),
        Ok(_) => None,
        Err(_) => Some(()),
    });
}
