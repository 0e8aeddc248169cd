//! Files through a relay that flips bits: whatever becomes of their transfer, each that is there
//! has its own name and contents, and after a success all of them are.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use tcpx_tests::faults::{count, random};
use tcpx_tests::proxy::{Flips, Proxy};

use crate::support::{Server, run, tcpx};

/// A flip through the engine alone costs a hundredth of one through processes.
const DEARER: u64 = 100;
/// Transfers at a time: most of the time each waits.
const AT_ONCE: usize = 4;
/// Bytes from one flip to the next, at most; 0: none.
const GAPS: [u64; 6] = [0, 0, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
const FOLDER: &str = "names";

/// Files by their names, most of which are longer than what they hold: that says whose it is.
fn files() -> BTreeMap<String, Vec<u8>> {
    let file = |number: usize| {
        let letters = (0..8).map(|_| format!("{:016x}", random()));
        let name = format!("{number}-{}", letters.collect::<String>());
        let bytes = [40, 200, 1_000, 20_000, 100_000][(number % 50).saturating_sub(45)];
        let contents = name.bytes().rev().cycle().take(bytes).collect();
        (name, contents)
    };
    (0..200).map(file).collect()
}

/// What is in the folder that was sent. Partial files are left out, as is what has no place there.
fn arrived(out: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let names = names.map(|name| name.into_string().expect("text"));
        names.filter(|name| !name.ends_with(".partial")).collect()
    };
    let outside = names(out).into_iter().find(|name| name != FOLDER);
    assert_eq!(outside, None, "nothing of this name was sent");
    let folder = out.join(FOLDER);
    let read = |name: String| {
        let contents = fs::read(folder.join(&name)).expect("a file");
        (name, contents)
    };
    names(&folder).into_iter().map(read).collect()
}

/// Sends the files through a relay, without progress for so long at most; whether both sides say
/// that they have arrived.
fn send(
    sent: &BTreeMap<String, Vec<u8>>,
    source: &Path,
    limit: &str,
    gaps: [u64; 2],
    flips: &Arc<Flips>,
) -> bool {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path();
    let plain: &[&str] = match random() % 2 {
        0 => &["--plain"],
        _ => &[],
    };
    let limits = ["--timeout", limit, "--wait", limit];
    let folder = out.to_str().expect("text");
    let serve = ["receive", "--host", "--out", folder];
    let serve = [&serve[..], &limits, plain].concat();
    let mut server = Server::start(tcpx(&serve));
    let port = server.port.parse().expect("a port");
    let relay = Proxy::flipping(([127, 0, 0, 1], port).into(), flips, !plain.is_empty());
    relay.flip(gaps.map(|gap| 0..gap));
    server.port = relay.address().port().to_string();
    let send = ["send", source.to_str().expect("text")];
    let client = server.client(&send, &[&["--host"], &limits[..2], plain].concat());
    let client = run(client);
    let server = server.running.end();
    let arrived = arrived(out);
    let succeeded = [&client, &server].map(|end| end.code == Some(0));
    if succeeded.contains(&true) {
        let is_whole = arrived == *sent;
        assert!(is_whole, "{}\n{}", server.stdout, client.stdout);
    }
    for (name, contents) in &arrived {
        let is_whole = sent.get(name) == Some(contents);
        assert!(is_whole, "{name} is no file that was sent");
    }
    succeeded == [true; 2]
}

#[test]
fn flipped_bits_give_no_file_another_name_or_contents() {
    let sent = files();
    let directory = tempfile::tempdir().expect("a directory");
    let source = directory.path().join(FOLDER);
    fs::create_dir(&source).expect("created");
    for (name, contents) in &sent {
        fs::write(source.join(name), contents).expect("written");
    }
    let wanted = count("flips", 2_000).div_ceil(DEARER);
    let flips = Arc::new(Flips::default());
    let is_good = send(&sent, &source, "60s", [0; 2], &flips);
    assert!(is_good, "without a flip");
    let started = Instant::now();
    let until = started + Duration::from_secs(count("flips_for", 3600));
    let transfers = thread::scope(|scope| {
        let until_enough = || {
            let mut ends = [0u64; 2];
            while flips.sum() < wanted && Instant::now() < until {
                let gaps = [(); 2].map(|()| GAPS[(random() % 6) as usize]);
                ends[usize::from(send(&sent, &source, "5s", gaps, &flips))] += 1;
            }
            ends
        };
        let running = [(); AT_ONCE].map(|()| scope.spawn(until_enough));
        let ended = running.map(|one| one.join().expect("no panic"));
        [0, 1].map(|which: usize| ended.iter().map(|ends| ends[which]).sum::<u64>())
    });
    println!(
        "{{\"what\":\"flipped bits, files\",\"seconds\":{},\"flips\":{},\"in_control\":{},\"in_lanes\":{},\
         \"transfers_good\":{},\"transfers_failed\":{}}}",
        started.elapsed().as_secs(),
        flips.sum(),
        flips.control(),
        flips.lanes(),
        transfers[1],
        transfers[0],
    );
}
