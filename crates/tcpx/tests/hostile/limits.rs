//! Limits: waits without an end, and more work than a queue takes.

use std::thread;
use std::time::Duration;

use tcpx::{Auth, Connection, Endpoint, Level, Region, Transfer};

use crate::{key, local, pair, tcp};

#[test]
fn a_wait_may_have_no_end() {
    let mut options = tcp(Auth::Key(key()));
    options.connect_timeout = Duration::MAX;
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let client = thread::spawn(move || Endpoint::connect(address, &options).expect("it listens"));
    let server = endpoint.accept(Duration::MAX).expect("a client");
    let client = client.join().expect("no panic");
    let (source, destination) = (
        Region::host(8).expect("memory"),
        Region::host(8).expect("memory"),
    );
    let receive = server.receive(destination.all(), 1).start().expect("room");
    let sending = thread::spawn(move || {
        client
            .send(source.all(), 1)
            .start()
            .expect("room")
            .wait()
            .expect("sent");
        client.close(Duration::MAX)
    });
    let received = receive.wait_timeout(Duration::MAX).expect("an outcome");
    assert_eq!(received.expect("received").bytes, 8);
    server.close(Duration::MAX).expect("a goodbye");
    sending.join().expect("no panic").expect("a goodbye");
}

#[test]
fn more_digests_than_a_queue_takes_are_delayed() {
    // Two connections ask for 7,000 digests at once, and the copy worker queues 4,096 jobs.
    const EACH: usize = 3500;
    const FINISHED: usize = 20;
    const LEN: usize = 1 << 20;
    let options = tcp(Auth::Key(key()));
    let pairs: Vec<_> = (0..2).map(|_| pair(&options, &options)).collect();
    let source = Region::host(LEN).expect("memory");
    let receive = |server: &Connection| {
        // Pages that nothing has arrived in take no memory.
        let room = Region::host(LEN).expect("memory");
        let receive = server.receive(room.all(), 1).level(Level::Verified);
        receive.start().expect("room")
    };
    let send = |client: &Connection| {
        let send = client.send(source.all(), 1).level(Level::Verified);
        send.start().expect("room")
    };
    let all = |start: &dyn Fn(usize) -> Transfer| -> Vec<Vec<Transfer>> {
        (0..2)
            .map(|at| (0..EACH).map(|_| start(at)).collect())
            .collect()
    };
    let receives = all(&|at| receive(&pairs[at].0));
    let sends = all(&|at| send(&pairs[at].1));
    for transfer in receives
        .iter()
        .chain(&sends)
        .flat_map(|one| &one[..FINISHED])
    {
        let outcome = transfer.wait_timeout(Duration::MAX).expect("an outcome");
        outcome.expect("delayed, not failed");
    }
    let failed = sends
        .iter()
        .flatten()
        .filter_map(Transfer::test)
        .find(Result::is_err);
    assert_eq!(failed, None);
}
