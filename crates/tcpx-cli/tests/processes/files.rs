use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use rustix::process::Signal;
use tcpx_tests::plugin_file;
use tcpx_tests::support::until;

use crate::support::{Ended, Running, Server, ask, passes, run, tcpx};

/// Bytes without a pattern that repeats at any power of two.
pub(crate) fn contents(bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|index| (index % 251) as u8 ^ (index / 65_521) as u8)
        .collect()
}

/// Two folders.
pub(crate) struct Places {
    _directory: tempfile::TempDir,
    /// What is sent or shared, and what it goes into.
    pub(crate) from: PathBuf,
    pub(crate) out: PathBuf,
}

impl Places {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let [from, out] = ["from", "out"].map(|name| {
            let path = directory.path().join(name);
            fs::create_dir(&path).expect("created");
            path
        });
        Self {
            _directory: directory,
            from,
            out,
        }
    }

    pub(crate) fn write(&self, path: &str, bytes: usize) -> PathBuf {
        let path = self.from.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("created");
        fs::write(&path, contents(bytes)).expect("written");
        path
    }
}

pub(crate) fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("readable");
    entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect()
}

pub(crate) fn serve(out: &Path, more: &[&str]) -> Server {
    let out = out.to_str().expect("text");
    Server::start(tcpx(&[&["receive", "--host", "--out", out], more].concat()))
}

/// The command that sends `paths` to the server.
pub(crate) fn sender(server: &Server, paths: &[&Path], more: &[&str]) -> Command {
    let paths = paths.iter().map(|path| path.to_str().expect("text"));
    let send = ["send"].into_iter().chain(paths).collect::<Vec<_>>();
    server.client(&send, &[&["--host"], more].concat())
}

pub(crate) fn send(server: Server, file: &Path, more: &[&str]) -> (Ended, Ended) {
    let client = sender(&server, &[file], more);
    server.finish(client)
}

#[test]
fn a_file_arrives_whole_under_its_name_with_equal_digests() {
    let directory = tempfile::tempdir().expect("a directory");
    for bytes in [0, 1, 4097, (8 << 20) + 1, 40 << 20] {
        let out = directory.path().join(format!("out-{bytes}"));
        fs::create_dir(&out).expect("created");
        let file = directory.path().join("model.safetensors");
        fs::write(&file, contents(bytes)).expect("written");
        let (server, client) = send(serve(&out, &[]), &file, &[]);
        let digest = |ended: &Ended| {
            let line = ended
                .stdout
                .lines()
                .find(|line| line.starts_with("BLAKE3 "))
                .map(str::to_owned);
            line.unwrap_or_else(|| panic!("no digest in {ended:?}"))
        };
        server
            .assert_code(0)
            .assert_says("received \"model.safetensors\"");
        client
            .assert_code(0)
            .assert_says("sent \"model.safetensors\"");
        assert_eq!(digest(&server), digest(&client));
        assert_eq!(names_in(&out), ["model.safetensors"]);
        assert!(
            fs::read(out.join("model.safetensors")).expect("readable") == contents(bytes),
            "{bytes} bytes differ"
        );
    }
}

#[test]
fn a_file_goes_through_the_plugin_as_well() {
    let places = Places::new();
    let out = places.out.as_path();
    let file = places.write("a", (20 << 20) + 5);
    plugin_file::path();
    let plugin = ["--network", "plugin"];
    passes(send(serve(out, &plugin), &file, &plugin));
    assert!(fs::read(out.join("a")).expect("readable") == contents((20 << 20) + 5));
}

#[test]
fn an_existing_file_is_kept_unless_overwriting_was_asked_for() {
    let places = Places::new();
    let out = places.out.as_path();
    fs::write(out.join("a"), b"old").expect("written");
    let file = places.from.join("a");
    fs::write(&file, b"new").expect("written");

    let (server, client) = send(serve(out, &[]), &file, &[]);
    for side in [server, client] {
        side.assert_code(1).assert_complains("exists already");
        side.assert_complains("--overwrite");
    }
    assert_eq!(fs::read(out.join("a")).expect("readable"), b"old");
    assert_eq!(names_in(out), ["a"]);

    passes(send(serve(out, &["--overwrite"]), &file, &[]));
    assert_eq!(fs::read(out.join("a")).expect("readable"), b"new");
}

#[test]
fn who_asks_a_server_for_another_thing_is_told_which_to_start() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("a");
    fs::write(&file, b"new").expect("written");
    let folder = directory.path().to_str().expect("text");
    let servers: [&[&str]; 3] = [
        &["transfer", "server", "--host"],
        &["receive", "--host", "--out", folder],
        &["send", "--host", "--serve", folder],
    ];
    for (asks, right) in [(0, "tcpx receive"), (1, "tcpx send --serve DIR")] {
        for (index, arguments) in servers.iter().enumerate() {
            if index == asks + 1 {
                continue;
            }
            let server = Server::start(tcpx(arguments));
            let client = match asks {
                0 => sender(&server, &[&file], &[]),
                _ => fetch(&server, &["a"], directory.path(), &[]),
            };
            let client = run(client);
            client.assert_code(1).assert_complains(right);
        }
    }
}

/// The command that fetches `paths` of the server's folder.
pub(crate) fn fetch(server: &Server, paths: &[&str], out: &Path, more: &[&str]) -> Command {
    let sources = paths.iter().map(|path| format!("127.0.0.1:{path}"));
    let out = ["--out", out.to_str().expect("text"), "--port", &server.port];
    let mut command = tcpx(&["receive", "--host"]);
    command.args(sources).args(out).args(more);
    if let Some(key) = &server.key {
        command.env("TCPX_KEY", key);
    }
    command
}

/// What a person sees of a tree: kinds, names, contents, modes and times.
pub(crate) fn list_tree(root: &Path) -> BTreeMap<String, String> {
    let mut seen = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    while let Some(path) = todo.pop() {
        let metadata = path.symlink_metadata().expect("there");
        let mode = metadata.mode();
        let (seconds, nanoseconds) = (metadata.mtime(), metadata.mtime_nsec());
        let contents = if metadata.is_dir() {
            let entries = fs::read_dir(&path).expect("readable");
            todo.extend(entries.map(|entry| entry.expect("an entry").path()));
            "directory".to_owned()
        } else if metadata.is_symlink() {
            format!("{:?}", fs::read_link(&path).expect("a link"))
        } else {
            blake3::hash(&fs::read(&path).expect("readable")).to_string()
        };
        let name = path
            .strip_prefix(root)
            .expect("below")
            .display()
            .to_string();
        let line = format!("{mode:o} {seconds}.{nanoseconds} {contents}");
        seen.insert(name, line);
    }
    seen
}

/// A tree with what people have: shards, links, dotfiles, empty files, modes.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("snapshots/main")).expect("created");
    fs::create_dir_all(root.join("blobs/.hidden")).expect("created");
    for shard in 0..30 {
        let bytes = contents(100_000 + shard);
        fs::write(root.join(format!("blobs/{shard}.bin")), bytes).expect("written");
    }
    fs::write(root.join("blobs/.hidden/.env"), b"").expect("written");
    fs::write(root.join("run.sh"), b"#!/bin/sh\n").expect("written");
    let mode = fs::Permissions::from_mode(0o750);
    fs::set_permissions(root.join("run.sh"), mode).expect("set");
    symlink("../../blobs/3.bin", root.join("snapshots/main/model")).expect("linked");
    let old = SystemTime::UNIX_EPOCH + Duration::new(1_500_000_000, 123_456_789);
    let file = fs::File::options().append(true).open(root.join("run.sh"));
    file.expect("opened").set_modified(old).expect("set");
}

#[test]
fn a_directory_keeps_names_modes_times_and_links() {
    let directory = tempfile::tempdir().expect("a directory");
    let (from, out) = (directory.path().join("model"), directory.path().join("out"));
    fs::create_dir(&out).expect("created");
    tree(&from);
    passes(send(serve(&out, &[]), &from, &[]));
    assert_eq!(list_tree(&out.join("model")), list_tree(&from));
    assert_eq!(names_in(&out), ["model"]);
    // Once more: everything is there, and one shard that is not is sent.
    fs::remove_file(out.join("model/blobs/7.bin")).expect("removed");
    let (_, client) = passes(send(serve(&out, &[]), &from, &[]));
    client.assert_says("were there already");
    let (_, client) = passes(send(serve(&out, &[]), &from, &[]));
    client.assert_says(": nothing moved; ");
    assert_eq!(list_tree(&out.join("model")), list_tree(&from));
}

#[test]
fn several_paths_arrive_side_by_side() {
    let places = Places::new();
    let out = places.out.as_path();
    tree(&places.from.join("model"));
    let other = places.write(".dot", 3 << 20);
    let server = serve(out, &[]);
    let client = sender(&server, &[&places.from.join("model"), &other], &[]);
    passes(server.finish(client));
    let model = list_tree(&out.join("model"));
    assert_eq!(model, list_tree(&places.from.join("model")));
    assert!(fs::read(out.join(".dot")).expect("readable") == contents(3 << 20));
}

#[test]
fn a_server_that_keeps_serves_until_a_signal() {
    let places = Places::new();
    let out = places.out.as_path();
    let server = serve(out, &["--keep"]);
    for name in ["a", "b"] {
        let file = places.from.join(name);
        fs::write(&file, contents(100_000)).expect("written");
        run(sender(&server, &[&file], &[])).assert_code(0);
    }
    // One that it refuses is no reason to end.
    fs::write(out.join("c"), b"old").expect("written");
    let file = places.from.join("c");
    fs::write(&file, b"new").expect("written");
    let refused = run(sender(&server, &[&file], &[]));
    refused.assert_code(1).assert_complains("exists already");
    server.running.signal(Signal::TERM);
    server.running.end().assert_code(0);
    let mut names = names_in(out);
    names.sort();
    assert_eq!(names, ["a", "b", "c"]);
}

/// Bytes of a file that nobody has sent to its end when 16 MiB of it have arrived: at [`SLOWLY`]
/// seconds are left.
const LONG: u64 = 160 << 20;
const SLOWLY: [&str; 2] = ["--bwlimit", "16MB"];

/// A server and a client in the middle of a file: some of it is written, and far from all.
fn in_the_middle(out: &Path, files: &[&Path], more: &[&str]) -> (Server, Running) {
    let written = || {
        let mut entries = fs::read_dir(out).expect("readable").filter_map(Result::ok);
        let metadata = entries.next().and_then(|entry| entry.metadata().ok());
        metadata.map_or(0, |metadata| metadata.len())
    };
    let before = written();
    let server = serve(out, more);
    let client = Running::start(sender(&server, files, more));
    until("some of it", || {
        (written() != before && written() >= 16 << 20).then_some(())
    });
    (server, client)
}

/// The only name in `out`, which is that of a partial file.
fn partial(out: &Path) -> PathBuf {
    let names = names_in(out);
    let [name] = &names[..] else {
        panic!("{names:?}")
    };
    assert!(
        name.starts_with(".tcpx-") && name.ends_with(".partial"),
        "{name}"
    );
    out.join(name)
}

fn random(path: &Path, bytes: u64) {
    let mut reader = blake3::Hasher::new().finalize_xof();
    let mut file = fs::File::create(path).expect("created");
    let mut block = vec![0; 1 << 20];
    for _ in 0..bytes >> 20 {
        reader.fill(&mut block);
        file.write_all(&block).expect("written");
    }
}

#[test]
fn an_interrupted_file_goes_on_where_it_ended() {
    let places = Places::new();
    let (out, file) = (places.out.as_path(), places.from.join("a"));
    random(&file, LONG);
    // The client is killed, the server ends and says what it keeps.
    let (server, client) = in_the_middle(out, &[&file], &SLOWLY);
    client.signal(Signal::KILL);
    let server = server.running.end();
    server.assert_code(1).assert_complains("the peer went away");
    server.assert_complains("kept: ");
    let kept = partial(out);
    let there = kept.metadata().expect("there").len();
    assert!(there >= 16 << 20, "{there}");
    // The server is killed: nobody says anything, and the bytes are there all the same.
    let (server, client) = in_the_middle(out, &[&file], &SLOWLY);
    server.running.signal(Signal::KILL);
    client
        .end()
        .assert_code(1)
        .assert_complains("the peer went away");
    assert_eq!(partial(out), kept);
    // What lies there is checked, not trusted.
    let mut spoiled = fs::File::options().write(true).open(&kept).expect("opened");
    spoiled.write_all(b"spoiled").expect("written");
    drop(spoiled);
    let (server, client) = in_the_middle(out, &[&file], &SLOWLY);
    client.signal(Signal::INT);
    let client = client.end();
    client
        .assert_code(130)
        .assert_complains("cancelled by the user")
        .assert_complains("run the same line again if the server stays (--keep, --serve)")
        .assert_complains("the transfer goes on with what is there");
    assert!(
        !client.stdout.contains("were there already"),
        "{}",
        client.stdout
    );
    let server = server.running.end();
    server
        .assert_code(1)
        .assert_complains("the peer reports: cancelled by the user");
    let (_, client) = passes(send(serve(out, &[]), &file, &[]));
    client.assert_says("were there already");
    assert_eq!(names_in(out), ["a"]);
    assert!(fs::read(out.join("a")).expect("readable") == fs::read(&file).expect("readable"));
}

#[test]
fn a_signal_ends_the_server_in_order() {
    let places = Places::new();
    let (out, file) = (places.out.as_path(), places.from.join("a"));
    random(&file, LONG);
    let (server, client) = in_the_middle(out, &[&file], &SLOWLY);
    server.running.signal(Signal::TERM);
    let server = server.running.end();
    server.assert_code(143).assert_complains("kept: ");
    let client = client.end();
    client
        .assert_code(1)
        .assert_complains("the peer reports: cancelled by the user");
    client.assert_complains("where: peer 127.0.0.1:");
    partial(out);
    // One that only waits.
    let server = serve(out, &[]);
    server.running.signal(Signal::HUP);
    server.running.end().assert_code(129);
}

#[test]
fn a_file_that_changes_is_left_out_and_the_others_arrive() {
    let directory = tempfile::tempdir().expect("a directory");
    let [out, file, shrunk, other] = ["out", "a", "b", "c"].map(|name| directory.path().join(name));
    fs::create_dir(&out).expect("created");
    random(&file, LONG);
    random(&shrunk, 5 << 20);
    fs::write(&other, b"as it was").expect("written");
    let (server, client) = in_the_middle(&out, &[&file, &shrunk, &other], &SLOWLY);
    // The same size: only its time tells.
    let writer = fs::File::options().write(true).open(&file).expect("opened");
    writer.write_all_at(b"new", 0).expect("written");
    fs::File::create(&shrunk).expect("emptied");
    for end in [client.end(), server.running.end()] {
        end.assert_code(23);
        for name in ["a", "b"] {
            end.assert_complains(&format!(
                "left out: \"{name}\": it changed while it was sent"
            ));
        }
    }
    let names: Vec<_> = names_in(&out)
        .into_iter()
        .filter(|name| !name.ends_with(".partial"))
        .collect();
    assert_eq!(names, ["c"]);
    assert_eq!(fs::read(out.join("c")).expect("there"), b"as it was");
}

#[test]
fn a_peer_that_stops_for_long_is_waited_for() {
    let places = Places::new();
    let (out, file) = (places.out.as_path(), places.from.join("a"));
    random(&file, LONG);
    let patient = [&SLOWLY[..], &["--timeout", "2m"]].concat();
    let (server, client) = in_the_middle(out, &[&file], &patient);
    server.running.signal(Signal::STOP);
    // Longer than the 10 s after which the engine's default gives a peer up.
    std::thread::sleep(Duration::from_secs(14));
    server.running.signal(Signal::CONT);
    client.end().assert_code(0);
    server.running.end().assert_code(0);
    assert!(fs::read(out.join("a")).expect("readable") == fs::read(&file).expect("readable"));
}

#[test]
fn json_tells_of_success_and_failure_and_a_full_pipe_is_one() {
    let places = Places::new();
    let (out, file) = (places.out.as_path(), places.from.join("a"));
    fs::write(&file, contents(70_000)).expect("written");
    let (_, client) = passes(send(serve(out, &[]), &file, &["--json"]));
    let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
    let value = read(&client.stdout);
    assert_eq!(value["schema"], "tcpx.send");
    assert_eq!(
        (&value["ok"], &value["bytes"]),
        (&true.into(), &70_000.into())
    );
    let digest = blake3::hash(&contents(70_000)).to_string();
    assert_eq!(value["blake3"], digest);
    // The same again with other contents.
    fs::write(&file, contents(70_001)).expect("written");
    let (_, client) = send(serve(out, &[]), &file, &["--json"]);
    client.assert_code(1);
    let value = read(&client.stdout);
    assert_eq!(value["ok"], false);
    let what = value["error"]["what"].as_str().expect("text");
    assert!(what.contains("exists already"), "{what}");
    let server = serve(out, &["--overwrite"]);
    let mut client = sender(&server, &[&file], &["--json"]);
    let full = fs::File::options()
        .write(true)
        .open("/dev/full")
        .expect("opened");
    let status = client
        .stdout(full)
        .stderr(Stdio::null())
        .status()
        .expect("runs");
    assert_eq!(status.code(), Some(1));
    server.running.end().assert_code(0);
}

#[test]
fn a_receiver_that_cannot_write_on_is_an_error_at_both_ends() {
    let places = Places::new();
    let out = places.out.as_path();
    let file = places.from.join("a");
    random(&file, 64 << 20);
    // At most 16 MiB a file, in units of 512 bytes; the program ignores the signal, so that the
    // write itself fails.
    let server = serve_behind("ulimit -f 32768", out);
    let (server, client) = send(server, &file, &[]);
    for side in [&server, &client] {
        side.assert_code(1).assert_complains("could not write in");
        side.assert_complains("ulimit -f");
    }
    server.assert_complains("kept: ");
    // What was written is not sent again.
    let kept = partial(out).metadata().expect("there").len();
    assert!((8 << 20..=16 << 20).contains(&kept), "{kept}");
    let (_, client) = passes(send(serve(out, &[]), &file, &[]));
    client.assert_says("were there already");
    assert_eq!(names_in(out), ["a"]);
    assert_eq!(out.join("a").metadata().expect("there").len(), 64 << 20);
}

/// A server that a shell starts behind `setting`.
fn serve_behind(setting: &str, out: &Path) -> Server {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("{setting}; exec \"$0\" \"$@\""));
    let out = out.to_str().expect("text");
    let program = tcpx(&["receive", "--host", "--out", out]);
    command.arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    Server::start(command)
}

#[test]
fn the_receivers_umask_and_modes_are_its_own() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out");
    fs::create_dir_all(out.join("model")).expect("created");
    let from = directory.path().join("model");
    fs::create_dir(&from).expect("created");
    let set = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("set");
    };
    for name in ["there", "new"] {
        fs::write(from.join(name), contents(5_000)).expect("written");
        set(&from.join(name), 0o666);
    }
    set(&from, 0o777);
    fs::write(out.join("model/there"), contents(5_000)).expect("written");
    set(&out.join("model/there"), 0o600);
    set(&out.join("model"), 0o700);
    let (_, client) = passes(send(serve_behind("umask 027", &out), &from, &[]));
    client.assert_says("were there already");
    let modes = ["model", "model/there", "model/new"];
    let modes = modes.map(|name| out.join(name).metadata().expect("there").mode() & 0o777);
    assert_eq!(modes, [0o700, 0o600, 0o640]);
}

#[test]
fn two_servers_of_one_folder_leave_each_others_files_alone() {
    let places = Places::new();
    let (out, file) = (places.out.as_path(), places.from.join("a"));
    fs::write(&file, b"other").expect("written");
    let [large, other] = ["large", "other"].map(|name| {
        let folder = places.from.join(name);
        fs::create_dir(&folder).expect("created");
        let path = folder.join("a");
        random(&path, LONG);
        let file = fs::File::options().write(true).open(&path).expect("opened");
        file.write_all_at(name.as_bytes(), 0).expect("written");
        path
    });
    let slowly = |server: &Server, file: &Path| {
        let client = Running::start(sender(server, &[file], &SLOWLY));
        let written = || {
            let names = names_in(out);
            let partial = names.iter().find(|name| name.ends_with(".partial"));
            partial.is_some_and(|name| out.join(name).metadata().is_ok_and(|it| it.len() > 0))
        };
        until("some of it", || written().then_some(()));
        client
    };
    let server = serve(out, &[]);
    let client = slowly(&server, &large);
    let (refuses, refused) = send(serve(out, &["--overwrite"]), &file, &[]);
    for side in [refuses, refused] {
        side.assert_code(1)
            .assert_complains("is being written by another transfer");
    }
    client.end().assert_code(0);
    server.running.end().assert_code(0);
    assert_eq!(names_in(out), ["a"]);
    assert!(fs::read(out.join("a")).expect("readable") == fs::read(&large).expect("readable"));
    // One that would replace it, and ends early.
    let server = serve(out, &["--overwrite"]);
    let client = slowly(&server, &other);
    client.signal(Signal::KILL);
    let server = server.running.end();
    server.assert_code(1).assert_complains("kept: ");
    assert!(fs::read(out.join("a")).expect("readable") == fs::read(&large).expect("readable"));
}

#[test]
fn what_is_no_file_is_refused_before_connecting() {
    for (arguments, code, complaint) in [
        (&["send", "/", "127.0.0.1"][..], 2, "has no name"),
        (&["send", "/nonexistent", "127.0.0.1"], 1, "/nonexistent"),
        (&["send", "/dev/null", "127.0.0.1"], 1, "a device"),
        (&["send", "127.0.0.1"], 2, "the host to send to is missing"),
        (&["send", "/tmp", "/etc"], 2, "/etc is a path"),
        (&["receive", "127.0.0.1"], 2, "not HOST:PATH"),
        (&["receive", "--dry-run"], 2, "its flags"),
        (
            &["send", "x", "h", "--include", "[", "--host"],
            2,
            "pattern",
        ),
        (
            &["send", "/etc/hostname", "h", "--bwlimit", "1KB"],
            2,
            "--bwlimit",
        ),
    ] {
        let ended = ask(arguments);
        ended.assert_code(code).assert_complains(complaint);
    }
}
