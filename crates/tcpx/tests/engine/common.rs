//! Two ends of a connection, and memory with known bytes.

use std::thread;
use std::time::Duration;

use tcpx::{Auth, Connection, Endpoint, Options, Region, generate_key};

const LONG: Duration = Duration::from_secs(60);

/// The server's end and the client's, with options that are changed for each: 0 is the server.
pub(crate) fn pair(change: impl Fn(usize, &mut Options)) -> (Connection, Connection) {
    let key = generate_key().expect("randomness");
    let [server, client] = [0, 1].map(|side| {
        let mut options = Options::tcp(Auth::Key(key.clone()));
        // A busy machine may keep an end from running for long.
        options.dead_after = 10 * LONG;
        options.deadlines.stall = 10 * LONG;
        change(side, &mut options);
        options
    });
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = Endpoint::listen(address, server).expect("a free port");
    let address = server.local_addr();
    let client = thread::spawn(move || Endpoint::connect(address, &client).expect("it listens"));
    let accepted = server.accept(LONG).expect("the client connects");
    (accepted, client.join().expect("no panic"))
}

pub(crate) fn random(bytes: usize) -> Vec<u8> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).expect("randomness");
    random
}

pub(crate) fn filled(bytes: &[u8]) -> Region {
    let region = Region::host(bytes.len()).expect("memory");
    region.write_from(0, bytes).expect("free");
    region
}

pub(crate) fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_to(0, &mut bytes).expect("free");
    bytes
}
