//! A fork's child has copies of everything and owns nothing of it.

use std::thread;
use std::time::Duration;

use tcpx::{Auth, Connection, Endpoint, Error, Region};

use crate::{LONG, key, local, pair, tcp};

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(code: i32) -> !;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
}

/// Runs `work` in a fork's child; whether it said that all was well.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `work`, which takes no lock of this process, and leaves.
    let child = unsafe { fork() };
    if child == 0 {
        let code = if work() { 0 } else { 1 };
        // SAFETY: ends the child without running this process's destructors.
        unsafe { _exit(code) };
    }
    let mut status = 0;
    // SAFETY: our child.
    let waited = unsafe { waitpid(child, &raw mut status, 0) };
    waited == child && status == 0
}

fn exchange(server: &Connection, client: &Connection) {
    let (source, destination) = (
        Region::host(8).expect("memory"),
        Region::host(8).expect("memory"),
    );
    let receive = server.receive(destination.all(), 1).start().expect("room");
    client
        .send(source.all(), 1)
        .start()
        .expect("room")
        .wait()
        .expect("sent");
    receive.wait().expect("received");
}

#[test]
fn a_forks_child_that_drops_its_copies_leaves_the_parents() {
    let options = tcp(Auth::Key(key()));
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let client = {
        let options = options.clone();
        thread::spawn(move || Endpoint::connect(address, &options).expect("it listens"))
    };
    let server = endpoint.accept(LONG).expect("a client");
    let client = client.join().expect("no panic");
    exchange(&server, &client);
    let region = Region::host(8).expect("memory");
    let waiting = server.receive(region.all(), 2).start().expect("room");
    // What the child does with its copies, which are bitwise the parent's.
    let all = (client, server, waiting, endpoint);
    let dropped = in_child(|| {
        // SAFETY: the child has a copy of the whole process, of which this is the only use.
        drop(unsafe { std::ptr::read(&all) });
        true
    });
    assert!(dropped);
    let (client, server, waiting, endpoint) = all;
    exchange(&server, &client);
    let source = Region::host(8).expect("memory");
    client
        .send(source.all(), 2)
        .start()
        .expect("room")
        .wait()
        .expect("sent");
    waiting.wait().expect("received");
    // The endpoint still listens.
    let again = thread::spawn(move || Endpoint::connect(address, &options).expect("it listens"));
    endpoint.accept(LONG).expect("another client");
    drop(again.join());
}

#[test]
fn a_forks_child_is_told_that_nothing_is_its_own() {
    let options = tcp(Auth::Key(key()));
    let (server, client) = pair(&options, &options);
    let region = Region::host(8).expect("memory");
    let waiting = server.receive(region.all(), 2).start().expect("room");
    let refused = in_child(|| {
        let other = |error: Error| matches!(error, Error::OtherProcess { .. });
        let started = client.send(region.all(), 1).start().map(drop);
        let tested = waiting.test().map(|outcome| outcome.map(drop));
        let waited = waiting
            .wait_timeout(Duration::MAX)
            .map(|outcome| outcome.map(drop));
        waiting.cancel();
        started.is_err_and(other)
            && tested.is_some_and(|outcome| outcome.is_err_and(other))
            && waited.is_some_and(|outcome| outcome.is_err_and(other))
            && client.statistics() == Default::default()
            && client.status().len() == 1
            && client.clone().close(LONG).is_err_and(other)
    });
    assert!(refused);
    let source = Region::host(8).expect("memory");
    client
        .send(source.all(), 2)
        .start()
        .expect("room")
        .wait()
        .expect("sent");
    waiting.wait().expect("the child has not cancelled it");
}
