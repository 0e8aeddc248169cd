//! The engine over the double of Google's plugin: fragments, small pools, consumption in order.

use std::sync::{Arc, Mutex};

use tcpx::{Connection, Event, Level, Observer, Options, ProgressMode, Region, UnpackMethod};
use tcpx_tests::double;
use tcpx_tests::pair::{LONG, Listening, double_network};
use tcpx_tests::scenario::sizes_up_to;
use tcpx_tests::support::wait;

#[derive(Default)]
struct Fragments(Mutex<Vec<usize>>);

impl Observer for Fragments {
    fn event(&self, event: &Event) {
        if let Event::ChunkArrived { fragments, .. } = event {
            self.0.lock().expect("no panic").push(*fragments);
        }
    }
}

fn pair(configure: impl Fn(&mut Options)) -> (Connection, Connection) {
    Listening::new(double_network(), &configure, &configure).connect()
}

fn random_region(len: usize) -> (Region, Vec<u8>) {
    let mut bytes = vec![0; len];
    getrandom::fill(&mut bytes).expect("randomness");
    let region = Region::host(len).expect("memory");
    region.write_from(0, &bytes).expect("it is free");
    (region, bytes)
}

fn check(region: &Region, expected: &[u8]) {
    region
        .with_bytes(.., |bytes| {
            assert!(bytes[..expected.len()] == *expected, "contents differ");
            assert!(
                bytes[expected.len()..].iter().all(|byte| *byte == 0xA5),
                "wrote past the end"
            );
        })
        .expect("it is free");
}

fn poisoned(len: usize) -> Region {
    let region = Region::host(len + 4096).expect("memory");
    region
        .write_from(0, &vec![0xA5; len + 4096])
        .expect("it is free");
    region
}

#[test]
fn every_size_through_the_double() {
    let _serial = double::serial();
    for (channels, method) in [
        (1, UnpackMethod::Host),
        (2, UnpackMethod::D2d),
        (4, UnpackMethod::Kernel),
    ] {
        let fragments = Arc::new(Fragments::default());
        let observer = fragments.clone();
        let (server, client) = pair(|options| {
            options.channels = channels;
            options.unpack = Some(method);
            options.observer = Some(observer.clone());
            options.eager_limit = 0;
        });
        for len in sizes_up_to(9 << 20) {
            let (source, bytes) = random_region(len);
            let destination = poisoned(len);
            let receive = server.receive(destination.all(), 7).start().expect("room");
            let send = client
                .send(source.all(), 7)
                .level(Level::Verified)
                .start()
                .expect("room");
            send.wait().unwrap_or_else(|error| panic!("{len}: {error}"));
            let report = receive
                .wait()
                .unwrap_or_else(|error| panic!("{len}: {error}"));
            assert_eq!(report.bytes, len as u64);
            if len > 0 {
                assert!(report.fragments > 0, "the queue was not used");
                assert_eq!(report.unpack_method, Some(method));
            }
            check(&destination, &bytes);
        }
        let seen = fragments.0.lock().expect("no panic").clone();
        assert!(seen.iter().any(|count| *count > 100), "{seen:?}");
        client.close(LONG).expect("an orderly goodbye");
        server.close(LONG).expect("an orderly goodbye");
    }
}

/// A transfer larger than the plugin's pool goes on only because every chunk is consumed.
#[test]
fn transfers_larger_than_the_pool_complete() {
    let _serial = double::serial();
    double::set_pool_bytes(2 << 20);
    let (server, client) = pair(|_| {});
    for len in [4 << 20, 64 << 20] {
        let before = double::stats();
        let (source, bytes) = random_region(len);
        let destination = poisoned(len);
        let receive = server.receive(destination.all(), 1).start().expect("room");
        let send = client.send(source.all(), 1).start().expect("room");
        send.wait().expect("it arrives");
        let report = receive.wait().expect("it arrives");
        assert_eq!(u64::from(report.chunks), (len as u64).div_ceil(512 << 10));
        check(&destination, &bytes);
        // The last one may be under way.
        wait(LONG, "all chunks to be consumed", || {
            let consumed = double::stats().consumes - before.consumes;
            (consumed == u64::from(report.chunks)).then_some(())
        });
    }
    client.close(LONG).expect("an orderly goodbye");
    server.close(LONG).expect("an orderly goodbye");
}

#[test]
fn progress_by_the_program_alone_is_refused_for_foreign_code() {
    let by_hand = |options: &mut Options| options.progress = ProgressMode::Manual;
    let (server, _) = Listening::new(double_network(), by_hand, |_| {}).try_connect();
    let error = server.expect_err("the engine's thread alone may call it");
    assert!(error.to_string().contains("Background"), "{error}");
}
