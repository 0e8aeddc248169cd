//! Files that are fetched, several clients at once, what is left out, and peers that lie.

use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tcpx::{Auth, Connection, Endpoint, Level, Options, Region, Transfer};

use crate::files::{Places, contents, fetch, list_tree, names_in, send, sender, serve};
use crate::support::{Running, Server, passes, run, tcpx};

fn share(folder: &Path) -> Server {
    let folder = folder.to_str().expect("text");
    Server::start(tcpx(&["send", "--host", "--serve", folder]))
}

#[test]
fn a_shared_folder_is_fetched_from_by_one_client_after_another() {
    let places = Places::new();
    for path in ["model/a.bin", "model/deep/b.bin", "c.bin"] {
        places.write(path, 70_001);
    }
    symlink("a.bin", places.from.join("model/link")).expect("linked");
    let server = share(&places.from);
    assert!(server.invitation.contains("tcpx receive 127.0.0.1:PATH"));
    let fetched = run(fetch(&server, &["model/deep", "c.bin"], &places.out, &[]));
    fetched.assert_code(0).assert_says("received");
    assert_eq!(
        list_tree(&places.out.join("deep")),
        list_tree(&places.from.join("model/deep"))
    );
    assert_eq!(
        fs::read(places.out.join("c.bin")).expect("there"),
        contents(70_001)
    );
    // The rest of it; what is there is compared, and does not travel.
    let fetched = run(fetch(&server, &["."], &places.out, &["--json"]));
    let told: serde_json::Value =
        serde_json::from_str(&fetched.assert_code(0).stdout).expect("JSON");
    assert_eq!(told["schema"], "tcpx.receive");
    assert_eq!(told["bytes_there_before"], 70_001, "{told}");
    assert_eq!(
        list_tree(&places.out.join("model")),
        list_tree(&places.from.join("model"))
    );
    server.running.signal(Signal::TERM);
    server.running.end().assert_code(0);
}

#[test]
fn nothing_outside_of_a_shared_folder_is_told_or_sent() {
    let places = Places::new();
    let shared = places.from.join("shared");
    places.write("secret", 4_000);
    places.write("shared/a", 4_000);
    places.write("shared/.tcpx-0123456789abcdef.partial", 4_000);
    for (link, target) in [("out", "../secret"), ("up", ".."), ("abs", "/etc")] {
        symlink(target, shared.join(link)).expect("linked");
    }
    let server = share(&shared);
    for path in [
        "../secret",
        "..",
        "/etc/hostname",
        "a/../../secret",
        "out",
        "up/secret",
        "abs/hostname",
        "missing",
        ".tcpx-0123456789abcdef.partial",
    ] {
        let refused = run(fetch(&server, &[path], &places.out, &[]));
        refused
            .assert_code(1)
            .assert_complains("is not in the folder that is shared");
        assert!(names_in(&places.out).is_empty(), "{path}");
    }
    // Links that lead out are left out, whatever the client asks for.
    for more in [&[][..], &["-L"]] {
        let fetched = run(fetch(&server, &["."], &places.out, more));
        fetched.assert_code(23).assert_complains("left out: ");
        assert_eq!(names_in(&places.out), ["a"]);
    }
}

/// What a peer of ours says and hears, message by message.
struct Peer(Connection);

impl Peer {
    fn options(key: &str) -> Options {
        let mut options = Options::tcp(Auth::parse(key).expect("a key"));
        options.encrypt = true;
        options
    }

    fn connect(server: &Server) -> Self {
        let address: SocketAddr = format!("127.0.0.1:{}", server.port).parse().expect("one");
        let options = Self::options(server.key.as_deref().expect("a key"));
        Self(Endpoint::connect(address, &options).expect("connected"))
    }

    fn expect(&self, tag: u64) -> (Region, Transfer) {
        let region = Region::host(64 << 10).expect("memory");
        let receive = self.0.receive(region.all(), tag);
        let transfer = receive.level(Level::Verified).start().expect("posted");
        (region, transfer)
    }

    fn hear(&self, (region, transfer): (Region, Transfer)) -> String {
        let bytes = transfer.wait().expect("heard").bytes as usize;
        let text = region.with_bytes(..bytes, |text| String::from_utf8_lossy(text).into_owned());
        text.expect("readable")
    }

    fn say(&self, tag: u64, message: &serde_json::Value) {
        self.say_text(tag, &message.to_string());
    }

    fn say_text(&self, tag: u64, text: &str) {
        let region = Region::host(text.len()).expect("memory");
        region.write_from(0, text.as_bytes()).expect("written");
        let send = self.0.send(region.all(), tag).level(Level::Verified);
        send.start().expect("started").wait().expect("sent");
    }
}

/// The request or answer of a sender with these entries, and its manifest.
fn offer(entries: &serde_json::Value, dry_run: bool) -> (serde_json::Value, serde_json::Value) {
    let manifest = serde_json::json!({
        "entries": entries, "left_out": { "count": 0, "first": [] },
    });
    let text = manifest.to_string();
    let offer = serde_json::json!({
        "bytes": text.len(), "digest": blake3::hash(text.as_bytes()).to_string(),
        "key": vec![7; 32], "dry_run": dry_run,
    });
    (offer, manifest)
}

fn file(bytes: usize) -> serde_json::Value {
    serde_json::json!({ "file": { "bytes": bytes, "on_disk": bytes } })
}

fn entry(path: &str, kind: serde_json::Value) -> serde_json::Value {
    serde_json::json!({
        "path": path, "mode": 0o644, "seconds": 0, "nanoseconds": 0, "kind": kind,
    })
}

/// Asks the server to take this, as no client of ours would, and is refused.
fn refused(server: &Server, (mut offer, manifest): (serde_json::Value, serde_json::Value)) {
    let peer = Peer::connect(server);
    let word = peer.expect(4);
    offer["want"] = "push".into();
    peer.say(1, &offer);
    peer.say(5, &manifest);
    let told = peer.hear(word);
    assert!(told.starts_with(r#"{"Err":{"why":"#), "{manifest}: {told}");
}

#[test]
fn hostile_names_are_refused_and_nothing_is_written() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out");
    fs::create_dir(&out).expect("created");
    let link = |target: &str| serde_json::json!({ "link": { "target": target } });
    for entries in [
        vec![entry("../escaped", file(5))],
        vec![entry("/tmp/escaped", file(5))],
        vec![entry("..", file(5))],
        vec![entry("", file(5))],
        vec![entry("a\nb", file(5))],
        vec![entry("\u{1b}[2J", file(5))],
        vec![entry("l", link("..")), entry("l/escaped", file(5))],
        vec![entry("l", link("../escaped"))],
    ] {
        let server = serve(&out, &[]);
        refused(&server, offer(&entries.into(), false));
        let server = server.running.end();
        server.assert_code(1);
        let escaped = server.stderr.escape_debug();
        assert!(!server.stderr.contains('\u{1b}'), "{escaped}");
        assert!(names_in(&out).is_empty(), "{escaped}");
        assert_eq!(names_in(directory.path()), ["out"], "{escaped}");
    }
}

#[test]
fn a_list_of_files_that_differs_from_its_digest_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = serve(directory.path(), &[]);
    let (mut offer, manifest) = offer(&vec![entry("b", file(0))].into(), false);
    offer["digest"] = blake3::hash(b"another list").to_string().into();
    refused(&server, (offer, manifest));
    let server = server.running.end();
    server
        .assert_code(1)
        .assert_complains("digests of the list");
    assert!(names_in(directory.path()).is_empty());
}

#[test]
fn a_server_gives_a_client_nothing_that_it_did_not_ask_for() {
    let key = tcpx::generate_key().expect("a key");
    let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), Peer::options(&key.to_text()));
    let endpoint = endpoint.expect("listening");
    for (path, dry_run, more) in [
        (".bashrc", false, &[][..]),
        ("model2", false, &[]),
        ("wanted/../x", false, &[]),
        // It would write although nothing was to be moved.
        ("wanted", false, &["--dry-run"]),
    ] {
        let out = tempfile::tempdir().expect("a directory");
        let port = endpoint.local_addr().port().to_string();
        let out_text = out.path().to_str().expect("text");
        let mut client = tcpx(&["receive", "127.0.0.1:wanted", "--out", out_text]);
        client
            .args(["--host", "--timeout", "10s", "--port", &port])
            .args(more);
        client.env("TCPX_KEY", key.client_key().to_text());
        let client = Running::start(client);
        let peer = Peer(endpoint.accept(Duration::from_secs(60)).expect("a client"));
        peer.hear(peer.expect(1));
        let answer = peer.expect(4);
        let (offer, manifest) = offer(&vec![entry(path, file(5))].into(), dry_run);
        peer.say(9, &serde_json::json!({ "Ok": offer }));
        peer.say(5, &manifest);
        if more.is_empty() {
            let told = peer.hear(answer);
            assert!(told.starts_with(r#"{"Err":{"why":"#), "{told}");
        } else {
            // It says no more than that it agrees to move nothing.
            peer.say(3, &serde_json::json!({ "Ok": "something else" }));
        }
        client.end().assert_code(1);
        assert!(names_in(out.path()).is_empty(), "{path}");
    }
}

#[test]
fn a_sender_learns_no_digest_and_changes_no_mode() {
    let places = Places::new();
    let path = places.out.join("secret");
    fs::write(&path, contents(5_000)).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("set");
    let digest = blake3::hash(&contents(5_000)).to_string();
    let server = serve(&places.out, &["--keep"]);
    for guess in [None, Some(blake3::hash(b"a guess").to_string())] {
        let peer = Peer::connect(&server);
        let [answer, present, kept, word] = [2, 6, 8, 4].map(|tag| peer.expect(tag));
        let mut secret = entry("secret", file(5_000));
        secret["mode"] = 0o666.into();
        let (mut offer, manifest) = offer(&vec![secret].into(), false);
        offer["want"] = "push".into();
        peer.say(1, &offer);
        peer.say(5, &manifest);
        let mut heard = vec![peer.hear(answer), peer.hear(present)];
        peer.say(7, &serde_json::json!([guess]));
        heard.push(peer.hear(word));
        assert!(heard[2].contains("exists already"), "{heard:?}");
        assert!(
            heard.iter().all(|text| !text.contains(&digest)),
            "{heard:?}"
        );
        drop(kept);
    }
    let there = path.metadata().expect("there");
    assert_eq!(there.permissions().mode() & 0o777, 0o600);
    assert_eq!(names_in(&places.out), ["secret"]);
}

#[test]
fn silent_and_slow_clients_delay_no_other() {
    let places = Places::new();
    let server = serve(&places.out, &["--keep", "--timeout", "10m"]);
    let silent = [(); 3].map(|()| Peer::connect(&server));
    let large = places.write("slow", 64 << 20);
    let slow = Running::start(sender(&server, &[&large], &["--bwlimit", "16MB"]));
    for name in ["a", "b", "c"] {
        let file = places.write(name, 200_000);
        run(sender(&server, &[&file], &[])).assert_code(0);
        assert!(fs::read(places.out.join(name)).expect("there") == contents(200_000));
    }
    slow.end().assert_code(0);
    assert!(fs::read(places.out.join("slow")).expect("there") == contents(64 << 20));
    server.running.signal(Signal::TERM);
    server.running.end().assert_code(0);
    drop(silent);
}

#[test]
fn what_cannot_be_sent_is_left_out_and_listed() {
    let places = Places::new();
    let tree = places.from.join("tree");
    places.write("tree/good", 5_000);
    places.write("tree/deep/good", 5_000);
    places.write("tree/a\nb", 1);
    places.write("tree/\u{202e}gpj.exe", 1);
    fs::write(tree.join(OsStr::from_bytes(b"latin-\xe4")), b"x").expect("written");
    symlink("nowhere/at/all/../x", tree.join("dangling")).expect("linked");
    symlink("/usr", tree.join("directory")).expect("linked");
    let _socket = UnixListener::bind(tree.join("socket")).expect("bound");
    let (server, client) = send(serve(&places.out, &[]), &tree, &[]);
    for side in [server, client] {
        side.assert_code(23)
            .assert_complains("6 of the things to send were left out");
        for why in [
            "has control characters or changes of direction in it",
            "not UTF-8",
            "leads nowhere",
            "-L",
            "a socket",
        ] {
            side.assert_complains(why);
        }
        assert!(!side.stderr.contains('\u{202e}'), "{}", side.stderr);
    }
    let mut names = names_in(&places.out.join("tree"));
    names.sort();
    assert_eq!(names, ["deep", "good"]);
}

#[test]
fn the_snapshot_of_a_hub_arrives_as_files() {
    let places = Places::new();
    places.write("hub/blobs/1234", 90_000);
    let snapshot = places.from.join("hub/snapshots/main");
    fs::create_dir_all(snapshot.join("deep")).expect("created");
    symlink("../../blobs/1234", snapshot.join("model.safetensors")).expect("linked");
    symlink("../../../blobs/1234", snapshot.join("deep/config.json")).expect("linked");
    symlink("..", snapshot.join("deep/loop")).expect("linked");
    passes(send(serve(&places.out, &[]), &snapshot, &[]));
    for name in ["model.safetensors", "deep/config.json"] {
        let path = places.out.join("main").join(name);
        assert!(path.symlink_metadata().expect("there").is_file(), "{name}");
        assert!(fs::read(path).expect("there") == contents(90_000));
    }
    // The whole hub keeps its links, unless they are to give way.
    let server = serve(&places.out, &["--keep"]);
    let hub = places.from.join("hub");
    run(sender(&server, &[&hub], &[])).assert_code(0);
    assert_eq!(list_tree(&places.out.join("hub")), list_tree(&hub));
    fs::remove_dir_all(places.out.join("hub")).expect("removed");
    let followed = run(sender(&server, &[&hub], &["-L"]));
    followed
        .assert_code(23)
        .assert_complains("a directory that it is in");
    let model = places.out.join("hub/snapshots/main/model.safetensors");
    assert!(model.symlink_metadata().expect("there").is_file());
}

#[test]
fn names_of_any_script_arrive() {
    let places = Places::new();
    let names = [
        "\u{1f469}\u{200d}\u{1f4bb}.bin",
        "\u{645}\u{6cc}\u{200c}\u{62e}\u{648}\u{627}\u{647}\u{645}",
        "\u{5e9}\u{5dc}\u{5d5}\u{5dd}\u{200f}.txt",
        "\u{e01}\u{200b}\u{e02}",
        "o\u{308}\u{feff}",
    ];
    for name in names {
        places.write(&format!("tree/{name}"), 100);
    }
    let tree = places.from.join("tree");
    passes(send(serve(&places.out, &[]), &tree, &[]));
    assert_eq!(list_tree(&places.out.join("tree")), list_tree(&tree));
}

#[test]
fn patterns_choose_what_is_sent() {
    let places = Places::new();
    for path in [
        "m/a.bin",
        "m/a.txt",
        "m/logs/b.bin",
        "m/deep/c.bin",
        "m/deep/empty/d.txt",
    ] {
        places.write(path, 1_000);
    }
    let model = places.from.join("m");
    let more = ["--include", "*.bin", "--exclude", "logs/"];
    passes(send(serve(&places.out, &[]), &model, &more));
    let there: Vec<_> = list_tree(&places.out.join("m")).into_keys().collect();
    assert_eq!(there, ["", "a.bin", "deep", "deep/c.bin"]);
    // With a slash it is the path that counts; a client that fetches says it to the server.
    let server = share(&places.from);
    let out = places.out.join("again");
    fs::create_dir(&out).expect("created");
    run(fetch(&server, &["m"], &out, &["--include", "deep/**"])).assert_code(0);
    let there: Vec<_> = list_tree(&out.join("m")).into_keys().collect();
    assert_eq!(
        there,
        ["", "deep", "deep/c.bin", "deep/empty", "deep/empty/d.txt"]
    );
}

#[test]
fn a_dry_run_says_what_would_move_and_writes_nothing() {
    let places = Places::new();
    places.write("m/new", 2_000_000);
    places.write("m/there", 3_000_000);
    fs::create_dir(places.out.join("m")).expect("created");
    fs::copy(places.from.join("m/there"), places.out.join("m/there")).expect("copied");
    let _socket = UnixListener::bind(places.from.join("m/socket")).expect("bound");
    let before = list_tree(&places.out);
    let server = serve(&places.out, &["--keep"]);
    let sent = run(sender(&server, &[&places.from.join("m")], &["--dry-run"]));
    let server = share(&places.from);
    let fetched = run(fetch(&server, &["m"], &places.out, &["-n"]));
    for end in [sent, fetched] {
        end.assert_code(23)
            .assert_says("2.00 MB to move; 3.00 MB were there already");
        assert!(!end.stderr.contains("arrived"), "{}", end.stderr);
        end.assert_says("to move  \"m/new\"")
            .assert_says("there    \"m/there\"");
    }
    assert_eq!(list_tree(&places.out), before);
}

#[test]
fn holes_stay_holes() {
    let places = Places::new();
    let path = places.from.join("image");
    let file = fs::File::create(&path).expect("created");
    use std::os::unix::fs::FileExt;
    file.write_all_at(&contents(100_000), 20 << 20)
        .expect("written");
    file.set_len((64 << 20) + 5).expect("sized");
    passes(send(serve(&places.out, &[]), &path, &[]));
    let there = places.out.join("image").metadata().expect("there");
    assert_eq!(there.len(), (64 << 20) + 5);
    assert!(there.blocks() * 512 < 1 << 20, "{} blocks", there.blocks());
    assert!(fs::read(places.out.join("image")).expect("read") == fs::read(&path).expect("read"));
}

#[test]
fn a_limited_rate_is_kept_at_either_end() {
    let places = Places::new();
    let file = places.write("a", 3 << 20);
    for limited in ["sender", "receiver"] {
        let limit = |end| match end == limited {
            true => &["--bwlimit", "2MiB"][..],
            false => &[],
        };
        let started = Instant::now();
        let server = serve(&places.out, &[&["--overwrite"], limit("receiver")].concat());
        passes(send(server, &file, limit("sender")));
        // The first of three pieces goes at once.
        assert!(started.elapsed() >= Duration::from_secs(1), "{limited}");
        fs::remove_file(places.out.join("a")).expect("removed");
    }
}

/// A program of a user whom modes stop, where the tests run as one whom they do not.
fn as_a_user(mut command: Command, folders: &[&Path]) -> Command {
    if !rustix::process::geteuid().is_root() {
        return command;
    }
    for folder in folders {
        let status = Command::new("chown")
            .arg("-R")
            .arg("65534")
            .arg(folder)
            .status();
        assert!(status.expect("chown runs").success());
    }
    command.uid(65_534).gid(65_534);
    command
}

#[test]
fn a_folder_that_nobody_may_write_is_sent_again() {
    let places = Places::new();
    let root = places.from.parent().expect("a parent");
    let program = root.join("tcpx");
    fs::copy(env!("CARGO_BIN_EXE_tcpx"), &program).expect("copied");
    for path in [root, &program] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("set");
    }
    let user = |command: Command| {
        let mut own = Command::new(&program);
        own.args(command.get_args()).env("HOME", root);
        for (name, value) in command.get_envs() {
            value.map(|value| own.env(name, value));
        }
        as_a_user(own, &[&places.from, &places.out])
    };
    let model = places.from.join("model");
    places.write("model/deep/a", 1_000);
    places.write("model/secret", 1_000);
    fs::set_permissions(model.join("secret"), fs::Permissions::from_mode(0o000)).expect("set");
    let out = places.out.to_str().expect("text");
    for round in 0..2 {
        let set = |mode| {
            for path in ["", "deep"] {
                let mode = fs::Permissions::from_mode(mode);
                fs::set_permissions(model.join(path), mode).expect("set");
            }
        };
        set(0o755);
        places.write(&format!("model/deep/b{round}"), 2_000);
        set(0o555);
        let server = Server::start(user(tcpx(&["receive", "--host", "--out", out])));
        let client = user(sender(&server, &[&model], &[]));
        let (server, client) = server.finish(client);
        server.assert_code(23);
        // What it cannot read is known before anything is sent.
        client
            .assert_code(23)
            .assert_complains("secret\": Permission denied");
        for path in ["model", "model/deep"] {
            let there = places.out.join(path).metadata().expect("there");
            assert_eq!(there.permissions().mode() & 0o777, 0o555, "{path}");
        }
        assert!(places.out.join(format!("model/deep/b{round}")).exists());
    }
    for path in [&model, &places.out.join("model")] {
        for path in [path.clone(), path.join("deep")] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("set");
        }
    }
}

#[test]
fn two_servers_and_two_clients_leave_whole_files_in_one_folder() {
    let places = Places::new();
    let servers = [(); 2].map(|()| serve(&places.out, &["--keep", "--overwrite"]));
    let files = [0, 1].map(|which| {
        let path = places.write(&format!("{which}/a"), 3 << 20);
        let mut bytes = contents(3 << 20);
        bytes
            .iter_mut()
            .for_each(|byte| *byte = byte.wrapping_add(which));
        fs::write(&path, &bytes).expect("written");
        (path, bytes)
    });
    let mut good = 0;
    for _ in 0..6 {
        let clients = [0, 1].map(|which| {
            let (path, _) = &files[which];
            Running::start(sender(&servers[which], &[path], &[]))
        });
        let ends = clients.map(Running::end);
        let there = fs::read(places.out.join("a")).expect("one of them");
        assert!(files.iter().any(|(_, bytes)| *bytes == there));
        for (end, (_, bytes)) in ends.iter().zip(&files) {
            match end.code {
                Some(0) => good += 1,
                _ => drop(end.assert_code(1).assert_complains("another transfer")),
            }
            let other_failed = ends.iter().filter(|end| end.code == Some(0)).count() == 1;
            assert!(!(end.code == Some(0) && other_failed) || there == *bytes);
        }
        assert_eq!(names_in(&places.out), ["a"]);
    }
    assert!(good >= 6, "{good}");
}

#[test]
fn a_client_that_lies_about_what_it_has_harms_itself_alone() {
    let places = Places::new();
    places.write("a", 5_000);
    let server = share(&places.from);
    let wanted = serde_json::json!({
        "want": "pull", "paths": ["a"], "follow": false, "include": [], "exclude": [],
        "dry_run": false,
    });
    for (present, digests) in [
        (r#"[{"index":9,"bytes":5000,"is_final":true}]"#, ""),
        (
            r#"[{"index":0,"bytes":1,"is_final":true},{"index":0,"bytes":1,"is_final":true}]"#,
            "",
        ),
        (r#"[{"index":0,"bytes":5001,"is_final":false}]"#, "[null]"),
        (r#"[{"index":-1,"bytes":0,"is_final":false}]"#, ""),
        ("[{", ""),
    ] {
        let peer = Peer::connect(&server);
        let [offered, manifest, digest, word] = [9, 5, 7, 3].map(|tag| peer.expect(tag));
        peer.say(1, &wanted);
        assert!(peer.hear(offered).starts_with(r#"{"Ok":"#));
        assert!(peer.hear(manifest).contains(r#""path":"a""#));
        peer.say(2, &serde_json::json!({ "Ok": present.len() }));
        peer.say_text(6, present);
        if digests.is_empty() {
            assert!(peer.hear(word).starts_with(r#"{"Err":"#), "{present}");
        } else {
            // Nothing that it claims is believed: its digest would be that of other bytes.
            assert_eq!(peer.hear(digest), digests);
            peer.say_text(8, "[true]");
        }
    }
    // More than any list is.
    let peer = Peer::connect(&server);
    let [offered, manifest, word] = [9, 5, 3].map(|tag| peer.expect(tag));
    peer.say(1, &wanted);
    peer.hear(offered);
    peer.hear(manifest);
    peer.say(2, &serde_json::json!({ "Ok": 1_u64 << 40 }));
    assert!(peer.hear(word).contains("a longer list"));
    run(fetch(&server, &["a"], &places.out, &[])).assert_code(0);
    assert!(fs::read(places.out.join("a")).expect("there") == contents(5_000));
    server.running.signal(Signal::KILL);
    let ended = server.running.end();
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}
