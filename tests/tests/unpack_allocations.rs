//! Once warmed, a chunk that is received in fragments and unpacked needs no new memory.

use tcpx::{Options, Region, UnpackMethod};
use tcpx_tests::counting::Counting;
use tcpx_tests::double;
use tcpx_tests::pair::{Listening, close, double_network};

const CHUNK: usize = 512 << 10;

// The double, which is C, is not counted.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn chunks_of_a_long_transfer_allocate_nothing_once_warm() {
    const SHORT: usize = 16;
    const LONGER: usize = 144;
    let _serial = double::serial();
    let by_kernel = |options: &mut Options| options.unpack = Some(UnpackMethod::Kernel);
    let (server, client) = Listening::new(double_network(), by_kernel, by_kernel).connect();
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
    close(server, client);
}
