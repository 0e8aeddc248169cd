//! Files through a relay that knows what they hold, and changes it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, thread};

use crate::support::{Ended, Server, ask, run, tcpx};

/// What stands in the file, and what the relay makes of it.
const RIGHT: &[u8; 16] = b"what was written";
const WRONG: &[u8; 16] = b"what another had";

const BYTES: usize = 300_000;

fn file(mark: &[u8; 16]) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    bytes[150_000..150_016].copy_from_slice(mark);
    bytes
}

/// A relay in front of a server that puts other bytes of the same length in the place of some, and
/// counts that.
struct Relay {
    address: SocketAddr,
    changed: Arc<AtomicUsize>,
}

impl Relay {
    fn start(server: SocketAddr, changes: Vec<(Vec<u8>, Vec<u8>)>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let changed = Arc::new(AtomicUsize::new(0));
        let (changes, count) = (Arc::new(changes), Arc::clone(&changed));
        thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let Ok(server) = TcpStream::connect(server) else {
                    return;
                };
                for (from, to, changes) in [
                    (&client, &server, Arc::clone(&changes)),
                    (&server, &client, Arc::default()),
                ] {
                    let [from, to] = [from, to].map(|end| end.try_clone().expect("cloned"));
                    let count = Arc::clone(&count);
                    thread::spawn(move || pump(from, to, &changes, &count));
                }
            }
        });
        Self { address, changed }
    }
}

fn pump(
    mut from: TcpStream,
    mut to: TcpStream,
    changes: &[(Vec<u8>, Vec<u8>)],
    changed: &AtomicUsize,
) {
    // A part of what is looked for may have come; it goes on when nothing follows.
    let longest = changes.iter().map(|(old, _)| old.len()).max().unwrap_or(1);
    let wait = Duration::from_millis(20);
    from.set_read_timeout(Some(wait)).expect("set");
    for end in [&from, &to] {
        end.set_nodelay(true).expect("set");
    }
    let (mut piece, mut held) = (vec![0; 16 << 10], Vec::new());
    loop {
        let passed = match from.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => {
                held.extend_from_slice(&piece[..count]);
                for (old, new) in changes {
                    while let Some(at) = held.windows(old.len()).position(|one| one == old) {
                        held[at..at + old.len()].copy_from_slice(new);
                        changed.fetch_add(1, Ordering::SeqCst);
                    }
                }
                held.len().saturating_sub(longest - 1)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                held.len()
            }
            Err(_) => break,
        };
        if to.write_all(&held[..passed]).is_err() {
            break;
        }
        held.drain(..passed);
    }
    let _ = to.write_all(&held);
    for (end, how) in [(&to, Shutdown::Write), (&from, Shutdown::Read)] {
        let _ = end.shutdown(how);
    }
}

/// Files by their names.
type Files = Vec<(String, Vec<u8>)>;

/// Sends the file through a relay that also puts the digest of its own contents in the place of the
/// right one; how both sides ended, how much it changed, and what is in the folder then.
fn send(more: &[&str]) -> ([Ended; 2], usize, Files) {
    let directory = tempfile::tempdir().expect("a directory");
    let (out, source) = (directory.path().join("out"), directory.path().join("a"));
    fs::create_dir(&out).expect("created");
    fs::write(&source, file(RIGHT)).expect("written");
    let folder = out.to_str().expect("text");
    let serve = ["receive", "-v", "--host", "--out", folder];
    let mut command = tcpx(&[&serve[..], more].concat());
    // The contents pass the relay.
    command.env("TCPX_LOCAL", "off");
    let mut server = Server::start(command);
    let port = server.port.parse().expect("a port");
    let digests = [RIGHT, WRONG].map(|mark| blake3::hash(&file(mark)).as_bytes().to_vec());
    let [right, wrong] = digests;
    let changes = vec![(RIGHT.to_vec(), WRONG.to_vec()), (right, wrong)];
    let relay = Relay::start(([127, 0, 0, 1], port).into(), changes);
    server.port = relay.address.port().to_string();
    let send = ["send", source.to_str().expect("text")];
    let client = server.client(&send, &[&["-v", "--host"], more].concat());
    let client = run(client);
    let server = server.running.end();
    let entries = fs::read_dir(&out).expect("readable");
    let named = entries.map(|entry| {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        (name.into_owned(), fs::read(&path).expect("readable"))
    });
    let named = named.filter(|(name, _)| !name.ends_with(".partial"));
    (
        [server, client],
        relay.changed.load(Ordering::SeqCst),
        named.collect(),
    )
}

#[test]
fn contents_changed_on_the_way_get_no_name() {
    // What is sent in the clear can be changed; what cannot be changed is that it is noticed.
    // The mark may come in two parts, with a pause between them; hardly ten times in a row.
    let tries = (0..10).map(|_| send(&["--plain"]));
    let mut changed = tries.filter(|(_, changed, _)| *changed > 0);
    let (ends, _, named) = changed.next().expect("contents that the relay can read");
    let names: Vec<_> = named.iter().map(|(name, _)| name).collect();
    assert!(names.is_empty(), "{names:?}");
    for end in ends {
        end.assert_code(1);
        end.assert_complains("contents travel in the clear, as --plain was given");
        end.assert_complains("digests of a file are not equal");
    }
}

#[test]
fn contents_are_encrypted_unless_told_otherwise() {
    let (ends, changed, named) = send(&[]);
    assert_eq!(changed, 0, "the relay could read them");
    for end in ends {
        end.assert_code(0).assert_complains("payload encrypted");
        assert!(!end.stderr.contains("in the clear"), "{}", end.stderr);
    }
    assert!(named == [("a".to_owned(), file(RIGHT))]);
}

#[test]
fn one_side_alone_cannot_send_in_the_clear() {
    let server = Server::start(tcpx(&["transfer", "server", "--host", "--plain"]));
    let printed = server.invitation.clone();
    assert!(printed.contains(" --plain"), "{printed}");
    let client = server.client(&["transfer"], &["--host"]);
    let (server, client) = server.finish(client);
    for end in [server, client] {
        end.assert_code(1).assert_complains("--plain");
    }
    let both = ["transfer", "127.0.0.1", "--plain", "--encrypt"];
    let ended = ask(&both);
    ended.assert_code(2).assert_complains("contradict");
    let server = Server::start(tcpx(&["transfer", "server", "--host", "--insecure"]));
    let client = server.client(&["transfer"], &["--host", "--insecure"]);
    let (server, client) = server.finish(client);
    for end in [server, client] {
        end.assert_code(0);
        end.assert_complains("contents travel in the clear, as there is no key");
    }
}
