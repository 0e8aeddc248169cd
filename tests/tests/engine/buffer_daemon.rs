//! Google's start-up against the stand-in for the buffer daemon, byte for byte as the plugin does it.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use tcpx_tests::buffer_daemon::{ALIGN, Behaviour, BufferDaemon, Flow, Message, frame};

const PCI: &str = "0000:04:00.0";
const BYTES: u64 = 1 << 20;
/// The answer to a rule, as it was observed.
const OK: [u8; 7] = [0x00, 0x05, 0x0a, 0x03, b'O', b'k', b'.'];

fn connect(folder: &Path, name: &str) -> UnixStream {
    let stream = UnixStream::connect(folder.join(name)).expect("somebody listens");
    let limit = Some(Duration::from_secs(30));
    stream.set_read_timeout(limit).expect("a limit");
    stream
}

/// Asks for the GPU's memory with a frame written out by hand.
fn ask_for_gpu(folder: &Path, name: &str) -> UnixStream {
    let mut stream = connect(folder, &format!("{name}_{PCI}"));
    let question = [&[0x00, 0x0e, 0x0a, 0x0c], PCI.as_bytes()].concat();
    stream.write_all(&question).expect("asked");
    stream
}

fn rule() -> Flow {
    Flow {
        flow_type: 1,
        source: ("10.0.1.2".into(), 45_000),
        destination: ("10.0.1.3".into(), 41_000),
        gpu: PCI.into(),
    }
}

fn receive_descriptor(stream: &UnixStream) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0xff; 1];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received =
        rustix::net::recvmsg(stream, &mut parts, &mut ancillary, flags).expect("an answer");
    assert_eq!(received.bytes, 1);
    let mut descriptors = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(some) => some.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let descriptor = descriptors.next().expect("a descriptor");
    assert_eq!(descriptors.count(), 0);
    descriptor
}

#[test]
fn the_plugin_s_start_up_gets_memory_rules_and_registration() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon =
        BufferDaemon::start(folder.path(), &[PCI], BYTES, Behaviour::Good).expect("started");

    let mut stream = connect(folder.path(), "rxdm_application_registry");
    stream
        .write_all(&frame(&Message::Register(true)))
        .expect("asked");
    let mut answer = [0; 7];
    stream.read_exact(&mut answer).expect("an answer");

    let mut stream = ask_for_gpu(folder.path(), "get_gpu_metadata");
    let mut answer = [0; 28];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer[..4], [0x00, 0x1a, 0x0a, 0x18]);
    let word = |at: usize| u64::from_ne_bytes(answer[at..at + 8].try_into().expect("8 bytes"));
    assert_eq!((word(12), word(20)), (BYTES, ALIGN));

    let stream = ask_for_gpu(folder.path(), "get_gpu_fd");
    let memory = File::from(receive_descriptor(&stream));
    assert_eq!(memory.metadata().expect("a file").len(), BYTES);
    memory.write_all_at(b"payload", BYTES - 7).expect("written");
    let again = File::from(receive_descriptor(&ask_for_gpu(
        folder.path(),
        "get_gpu_fd",
    )));
    let mut bytes = [0; 7];
    again.read_exact_at(&mut bytes, BYTES - 7).expect("read");
    assert_eq!(&bytes, b"payload", "every client maps the same memory");

    for name in ["rx_rule_manager", "rx_rule_uninstall"] {
        let mut stream = connect(folder.path(), name);
        stream
            .write_all(&frame(&Message::Rule(rule())))
            .expect("asked");
        let mut answer = [0; 7];
        stream.read_exact(&mut answer).expect("an answer");
        assert_eq!(answer, OK);
    }
    let rules = daemon
        .asked()
        .into_iter()
        .filter(|asked| asked.message == Message::Rule(rule()));
    let sockets: Vec<String> = rules.map(|asked| asked.socket).collect();
    assert_eq!(sockets, ["rx_rule_manager", "rx_rule_uninstall"]);
}

#[test]
fn a_daemon_without_room_refuses_rules_and_still_removes_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let _daemon =
        BufferDaemon::start(folder.path(), &[PCI], BYTES, Behaviour::Full).expect("started");
    let ask = |name: &str| {
        let mut stream = connect(folder.path(), name);
        stream
            .write_all(&frame(&Message::Rule(rule())))
            .expect("asked");
        let mut answer = [0; 7];
        stream.read_exact(&mut answer).expect("an answer");
        answer
    };
    assert_ne!(ask("rx_rule_manager"), OK);
    assert_eq!(ask("rx_rule_uninstall"), OK);
}

#[test]
fn a_question_for_another_gpu_or_of_another_kind_ends_the_connection() {
    let folder = tempfile::tempdir().expect("a folder");
    let _daemon =
        BufferDaemon::start(folder.path(), &[PCI], BYTES, Behaviour::Good).expect("started");
    let other = Message::Raw(b"0000:05:00.0".to_vec());
    for (socket, message) in [
        (format!("get_gpu_fd_{PCI}"), other.clone()),
        (format!("get_gpu_metadata_{PCI}"), other),
        ("rx_rule_manager".to_owned(), Message::Register(true)),
    ] {
        let mut stream = connect(folder.path(), &socket);
        stream.write_all(&frame(&message)).expect("asked");
        assert_eq!(stream.read(&mut [0; 16]).expect("an end"), 0, "{socket}");
    }
}

#[test]
fn a_daemon_that_ended_leaves_no_socket() {
    let folder = tempfile::tempdir().expect("a folder");
    drop(BufferDaemon::start(folder.path(), &[PCI], BYTES, Behaviour::Good).expect("started"));
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("a folder").count(),
        0
    );
}
