use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tcpx::{Auth, Endpoint, Options, Region};

use crate::support::{Ended, Running, Server, tcpx};

/// Bytes without a pattern that repeats at any power of two.
fn contents(bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|index| (index % 251) as u8 ^ (index / 65_521) as u8)
        .collect()
}

fn names_in(directory: &Path) -> Vec<String> {
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

fn serve(out: &Path, more: &[&str]) -> Server {
    let out = out.to_str().expect("text");
    Server::start(tcpx(
        &[&["transfer", "server", "--host", "--out", out], more].concat(),
    ))
}

fn send(server: Server, file: &Path, more: &[&str]) -> (Ended, Ended) {
    let file = ["--host", "--file", file.to_str().expect("text")];
    let client = server.client(&["transfer"], &[&file[..], more].concat());
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
                .find(|line| line.starts_with("SHA-256 "))
                .map(str::to_owned);
            line.unwrap_or_else(|| panic!("no digest in {ended:?}"))
        };
        server.assert_code(0).assert_says("transfer: PASSED");
        client.assert_code(0).assert_says("transfer: PASSED");
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
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out");
    fs::create_dir(&out).expect("created");
    let file = directory.path().join("a");
    fs::write(&file, contents((20 << 20) + 5)).expect("written");
    let plugin = ["--network", "plugin", "--abi", "v7"];
    let (server, client) = send(serve(&out, &plugin), &file, &plugin);
    server.assert_code(0);
    client.assert_code(0);
    assert!(fs::read(out.join("a")).expect("readable") == contents((20 << 20) + 5));
}

#[test]
fn an_existing_file_is_kept_unless_overwriting_was_asked_for() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out");
    fs::create_dir(&out).expect("created");
    fs::write(out.join("a"), b"old").expect("written");
    let file = directory.path().join("a");
    fs::write(&file, b"new").expect("written");

    let (server, client) = send(serve(&out, &[]), &file, &[]);
    for side in [server, client] {
        side.assert_code(1)
            .assert_says("transfer: FAILED")
            .assert_complains("exists already");
        side.assert_complains("--overwrite");
    }
    assert_eq!(fs::read(out.join("a")).expect("readable"), b"old");
    assert_eq!(names_in(&out), ["a"]);

    let (server, client) = send(serve(&out, &["--overwrite"]), &file, &[]);
    server.assert_code(0);
    client.assert_code(0);
    assert_eq!(fs::read(out.join("a")).expect("readable"), b"new");
}

#[test]
fn a_server_without_a_place_for_files_refuses_them() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("a");
    fs::write(&file, b"new").expect("written");
    let server = Server::start(tcpx(&["transfer", "server", "--host"]));
    let (server, client) = send(server, &file, &[]);
    for side in [server, client] {
        side.assert_code(1).assert_complains("--out DIR");
    }
}

/// Asks the server to take a file with this name, as no client of ours would.
fn offer(server: &Server, name: &str) {
    let key = server
        .key
        .as_deref()
        .expect("a key")
        .parse()
        .expect("a right key");
    let address: SocketAddr = format!("127.0.0.1:{}", server.port)
        .parse()
        .expect("an address");
    let connection = Endpoint::connect(address, &Options::tcp(Auth::Key(key))).expect("connected");
    let answer = Region::host(4096).expect("memory");
    let answered = connection.receive(answer.all(), 2).start().expect("posted");
    let request =
        serde_json::json!({ "want": "file", "name": name, "bytes": 5, "piece_bytes": 4096 })
            .to_string();
    let region = Region::host(request.len()).expect("memory");
    region.write_from(0, request.as_bytes()).expect("written");
    connection
        .send(region.all(), 1)
        .start()
        .expect("started")
        .wait()
        .expect("sent");
    let bytes = answered.wait().expect("answered").bytes;
    let text = answer.with_bytes(..usize::try_from(bytes).expect("small"), |text| {
        String::from_utf8_lossy(text).into_owned()
    });
    let text = text.expect("readable");
    assert!(text.contains("refused"), "{name}: {text}");
}

#[test]
fn hostile_names_are_refused_and_nothing_is_written() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out");
    fs::create_dir(&out).expect("created");
    for name in [
        "../escaped",
        "/tmp/escaped",
        "..",
        "",
        ".bashrc",
        "a/b",
        "a\nb",
        "\u{1b}[2J",
    ] {
        let server = serve(&out, &[]);
        offer(&server, name);
        let server = server.running.end();
        server
            .assert_code(1)
            .assert_says("transfer: FAILED")
            .assert_complains("file name");
        assert!(
            !server.stderr.contains('\u{1b}'),
            "{}",
            server.stderr.escape_debug()
        );
        assert!(names_in(&out).is_empty(), "{name}");
        assert_eq!(names_in(directory.path()), ["out"], "{name}");
    }
}

/// A file of zeros that takes no space.
fn sparse(path: &Path, bytes: u64) {
    fs::File::create(path)
        .expect("created")
        .set_len(bytes)
        .expect("sized");
}

#[test]
fn a_sender_killed_in_the_middle_leaves_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out");
    fs::create_dir(&out).expect("created");
    let file = directory.path().join("a");
    sparse(&file, 2 << 30);
    let server = serve(&out, &[]);
    let client = server.client(
        &["transfer"],
        &["--host", "--file", file.to_str().expect("text")],
    );
    let mut client = Running::start(client);
    // In the middle: some pieces are written, and far from all.
    let until = Instant::now() + Duration::from_secs(60);
    let written = |out: &Path| {
        let mut entries = fs::read_dir(out).expect("readable").filter_map(Result::ok);
        entries
            .next()
            .and_then(|entry| entry.metadata().ok())
            .map_or(0, |metadata| metadata.len())
    };
    while written(&out) < 16 << 20 {
        assert!(Instant::now() < until, "nothing arrives");
        std::thread::sleep(Duration::from_millis(1));
    }
    client.kill();
    let server = server.running.end();
    server
        .assert_code(1)
        .assert_says("transfer: FAILED")
        .assert_complains("127.0.0.1");
    assert!(names_in(&out).is_empty(), "{:?}", names_in(&out));
}

#[test]
fn a_receiver_that_cannot_write_on_is_an_error_at_both_ends() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out");
    fs::create_dir(&out).expect("created");
    let file = directory.path().join("a");
    sparse(&file, 64 << 20);
    // At most 16 MiB a file, in units of 512 bytes; without the signal the write itself fails.
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg("ulimit -f 32768; trap '' XFSZ; exec \"$0\" \"$@\"");
    let program = tcpx(&[
        "transfer",
        "server",
        "--host",
        "--out",
        out.to_str().expect("text"),
    ]);
    command.arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let (server, client) = send(Server::start(command), &file, &[]);
    for side in [server, client] {
        side.assert_code(1)
            .assert_says("transfer: FAILED")
            .assert_complains("could not write in");
        side.assert_complains("ulimit -f");
    }
    assert!(names_in(&out).is_empty(), "{:?}", names_in(&out));
}

#[test]
fn what_is_no_file_is_refused_before_connecting() {
    let ended = Running::start(tcpx(&["transfer", "127.0.0.1", "--file", "/"])).end();
    ended.assert_code(2).assert_complains("is not a file");
    let ended = Running::start(tcpx(&["transfer", "127.0.0.1", "--file", "/nonexistent"])).end();
    ended.assert_code(1).assert_complains("/nonexistent");
}
