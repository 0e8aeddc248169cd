//! Once warmed, a chunk that is received in fragments and unpacked needs no new memory.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tcpx::{Auth, Connection, Endpoint, Key, Options, Region, UnpackMethod};
use tcpx_net::{PluginMemory, PluginNetwork, PluginOptions};
use tcpx_tests::counting::Counting;
use tcpx_tests::double;

const LONG: Duration = Duration::from_secs(60);
const CHUNK: usize = 512 << 10;

// The double, which is C, is not counted.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn pair() -> (Connection, Connection) {
    let network = PluginNetwork::load(PluginOptions {
        path: Path::new(double::path()).to_owned(),
        abi: None,
        device: 0,
        memory: PluginMemory::StandIn,
    });
    let network = Arc::new(network.expect("the double starts"));
    let key = Key::generate(&mut |bytes| getrandom::fill(bytes).expect("randomness"));
    let mut options = Options::new(network, Auth::Key(key));
    options.unpack = Some(UnpackMethod::Kernel);
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = Endpoint::listen(address, options.clone()).expect("a free port");
    let address = server.local_addr();
    let client = thread::spawn(move || Endpoint::connect(address, &options).expect("it listens"));
    let accepted = server.accept(LONG).expect("the client connects");
    (accepted, client.join().expect("no panic"))
}

#[test]
fn chunks_of_a_long_transfer_allocate_nothing_once_warm() {
    const SHORT: usize = 16;
    const LONGER: usize = 144;
    let _serial = double::serial();
    let (server, client) = pair();
    let source = Region::host(LONGER * CHUNK).expect("memory");
    let destination = Region::host(LONGER * CHUNK).expect("memory");
    let transfer = |chunks: usize| {
        let bytes = chunks * CHUNK;
        let before = Counting::of_program();
        let to = destination.slice(..bytes).expect("in bounds");
        let from = source.slice(..bytes).expect("in bounds");
        let receive = server.receive(to, 7).start().expect("room");
        let send = client.send(from, 7).start().expect("room");
        send.wait().expect("it arrives");
        let report = receive.wait().expect("it arrives");
        assert!(report.fragments >= chunks as u64, "the queue was not used");
        Counting::of_program() - before
    };
    // Every list and table has held as much as it will ever hold.
    transfer(LONGER);
    transfer(LONGER);
    // The least of some, because what a thread does now and then is not the chunks'.
    let least = |chunks| (0..5).map(|_| transfer(chunks)).min().unwrap_or_default();
    let (short, longer) = (least(SHORT), least(LONGER));
    let more = longer.saturating_sub(short);
    eprintln!("{SHORT} chunks: {short} allocations, {LONGER} chunks: {longer}");
    assert!(
        more < ((LONGER - SHORT) / 8) as u64,
        "{more} allocations for {} chunks more",
        LONGER - SHORT
    );
    client.close(LONG).expect("an orderly goodbye");
    server.close(LONG).expect("an orderly goodbye");
}
