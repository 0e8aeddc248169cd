//! The ways to learn of a transfer's end beside waiting for it alone.

use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tcpx::{
    Auth, Completion, CompletionQueue, Connection, Endpoint, Error, ErrorKind, Key, Options,
    Region, Transfer,
};

/// Far more than anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn pair() -> (Connection, Connection) {
    let key = Key::generate(&mut |bytes| getrandom::fill(bytes).expect("randomness"));
    let mut options = Options::tcp(Auth::Key(key));
    // A busy machine may keep an end from running for long.
    options.dead_after = 10 * LONG;
    options.deadlines.stall = 10 * LONG;
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = Endpoint::listen(address, options.clone()).expect("a free port");
    let address = server.local_addr();
    let client = thread::spawn(move || Endpoint::connect(address, &options).expect("it listens"));
    let accepted = server.accept(LONG).expect("the client connects");
    (accepted, client.join().expect("no panic"))
}

fn memory(bytes: usize) -> Region {
    Region::host(bytes).expect("memory")
}

fn receive(at: &Connection, bytes: usize, tag: u64) -> Transfer {
    at.receive(memory(bytes).all(), tag).start().expect("room")
}

fn send(from: &Connection, bytes: usize, tag: u64) -> Transfer {
    from.send(memory(bytes).all(), tag).start().expect("room")
}

fn collect(queue: &CompletionQueue, count: usize) -> Vec<Completion> {
    let mut all = Vec::new();
    while all.len() < count {
        let most = count - all.len();
        let taken = queue.poll(&mut all, most, LONG).expect("it can wait");
        assert!(taken > 0, "{} of {count} came", all.len());
    }
    all.sort_by_key(|completion| completion.key);
    all
}

fn is_readable(queue: &CompletionQueue, within: Duration) -> bool {
    let within = Timespec {
        tv_sec: within.as_secs().cast_signed(),
        tv_nsec: 0,
    };
    let mut polled = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
    poll(&mut polled, Some(&within)).expect("polled") > 0
}

#[test]
fn a_queue_gets_each_completion_once_under_its_key() {
    let (server, client) = pair();
    let (other_server, other_client) = pair();
    let queue = CompletionQueue::new().expect("a descriptor");
    let sizes = [0, 8, 4096, 300_000];
    for round in 0..10 {
        for (key, bytes) in (0..).zip(sizes) {
            receive(&server, bytes, 1).queue(&queue, key);
            receive(&other_server, bytes, 1).queue(&queue, 10 + key);
            send(&client, bytes, 1).queue(&queue, 20 + key);
            let sent = send(&other_client, bytes, 1);
            if round % 2 == 0 {
                // It has ended before.
                while sent.test().is_none() {
                    thread::yield_now();
                }
            }
            sent.queue(&queue, 30 + key);
        }
        let all = collect(&queue, 16);
        let expected =
            (0..4).flat_map(|side| (0..).zip(sizes).map(move |(k, b)| (side * 10 + k, b)));
        for (completion, (key, bytes)) in all.into_iter().zip(expected) {
            assert_eq!(completion.key, key);
            assert_eq!(completion.outcome.expect("moved").bytes, bytes as u64);
        }
        let mut none = Vec::new();
        assert_eq!(
            queue.poll(&mut none, 9, Duration::ZERO).expect("it looks"),
            0
        );
    }
}

#[test]
fn a_queue_is_readable_exactly_while_completions_wait() {
    let (server, client) = pair();
    let queue = CompletionQueue::new().expect("a descriptor");
    for key in 0..3 {
        receive(&server, 8, 1).queue(&queue, key);
    }
    assert!(!is_readable(&queue, Duration::ZERO));
    for _ in 0..3 {
        send(&client, 8, 1).wait().expect("placed");
    }
    let mut taken = Vec::new();
    for left in (0..3).rev() {
        assert!(is_readable(&queue, LONG), "{} and {left} come", taken.len());
        let taken = queue.poll(&mut taken, 1, Duration::ZERO).expect("it looks");
        assert_eq!(taken, 1);
    }
    assert!(!is_readable(&queue, Duration::ZERO));
    let keys: Vec<u64> = taken.iter().map(|completion| completion.key).collect();
    assert_eq!(keys, [0, 1, 2]);
}

#[test]
fn a_queue_hears_of_transfers_that_their_connection_ends() {
    let (server, client) = pair();
    let queue = CompletionQueue::new().expect("a descriptor");
    receive(&server, 8, 1).queue(&queue, 7);
    drop(client);
    let all = collect(&queue, 1);
    assert_eq!(all[0].key, 7);
    assert!(all[0].outcome.is_err(), "{all:?}");
}

/// Has a thread told how often it was woken.
struct Told(Sender<()>);

impl Wake for Told {
    fn wake(self: Arc<Self>) {
        // Who has what he wanted listens no more.
        let _ = self.0.send(());
    }
}

fn poll_once(transfer: &mut Transfer, waker: &Waker) -> Poll<Result<tcpx::Report, Error>> {
    Pin::new(transfer).poll(&mut Context::from_waker(waker))
}

#[test]
fn a_future_is_woken_at_its_end_by_its_last_waker() {
    let (server, client) = pair();
    for bytes in [0, 8, 300_000] {
        for _ in 0..20 {
            let mut received = receive(&server, bytes, 1);
            let (first, unused) = channel();
            let (last, woken) = channel();
            let (first, last) = (Arc::new(Told(first)).into(), Arc::new(Told(last)).into());
            assert!(poll_once(&mut received, &first).is_pending());
            assert!(poll_once(&mut received, &last).is_pending());
            assert!(poll_once(&mut received, &last).is_pending());
            send(&client, bytes, 1).wait().expect("placed");
            woken.recv_timeout(LONG).expect("woken");
            assert!(unused.try_recv().is_err());
            let Poll::Ready(Ok(report)) = poll_once(&mut received, &last) else {
                panic!("woken before its end");
            };
            assert_eq!(report.bytes, bytes as u64);
        }
    }
}

/// Uses the connection from inside of the waker.
struct Asks(Connection, Sender<usize>);

impl Wake for Asks {
    fn wake(self: Arc<Self>) {
        let _ = self.1.send(self.0.status().len());
    }
}

#[test]
fn a_waker_may_use_the_connection() {
    let (server, client) = pair();
    let mut received = receive(&server, 8, 1);
    let (told, woken) = channel();
    let waker = Arc::new(Asks(server.clone(), told)).into();
    assert!(poll_once(&mut received, &waker).is_pending());
    send(&client, 8, 1).wait().expect("placed");
    assert_eq!(woken.recv_timeout(LONG), Ok(0));
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a defect of the program");
    }
}

#[test]
fn a_kept_handle_can_be_cancelled_and_its_end_does_not_cancel() {
    let (server, client) = pair();
    let queue = CompletionQueue::new().expect("a descriptor");
    let kept = receive(&server, 8, 1);
    kept.report_to(&queue, 1);
    let dropped = receive(&server, 8, 2);
    dropped.report_to(&queue, 2);
    drop(dropped);
    send(&client, 8, 2).wait().expect("placed");
    let first = collect(&queue, 1);
    assert_eq!(first[0].key, 2);
    assert_eq!(first[0].outcome.as_ref().map(|report| report.bytes), Ok(8));
    kept.cancel();
    let second = collect(&queue, 1);
    let cancelled = |error: &Error| error.kind() == ErrorKind::Cancelled;
    assert!(second[0].outcome.as_ref().is_err_and(cancelled));
    assert!(kept.wait().as_ref().is_err_and(cancelled));
}

#[test]
fn a_waker_that_panics_ends_nothing() {
    let (server, client) = pair();
    let mut received = receive(&server, 8, 1);
    assert!(poll_once(&mut received, &Arc::new(Panics).into()).is_pending());
    send(&client, 8, 1).wait().expect("placed");
    received.wait().expect("it has arrived");
    let again = receive(&server, 8, 1);
    send(&client, 8, 1).wait().expect("placed");
    again.wait().expect("the connection lives");
}

#[test]
fn a_wait_may_be_as_long_as_time_can_say() {
    let (server, client) = pair();
    let received = receive(&server, 8, 1);
    let sent = send(&client, 8, 1);
    received
        .wait_timeout(Duration::MAX)
        .expect("ended")
        .expect("it has arrived");
    sent.wait_timeout(Duration::MAX)
        .expect("ended")
        .expect("placed");
    let queue = CompletionQueue::new().expect("a descriptor");
    receive(&server, 8, 1).queue(&queue, 0);
    let sent = thread::spawn(move || send(&client, 8, 1).wait());
    let mut all = Vec::new();
    assert_eq!(
        queue.poll(&mut all, 1, Duration::MAX).expect("it can wait"),
        1
    );
    sent.join().expect("no panic").expect("placed");
}
