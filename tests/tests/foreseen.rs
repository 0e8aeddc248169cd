//! Sends that are copied to pinned slots while the peer has yet to grant them. Host memory takes the way of
//! GPU memory here.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tcpx::{Connection, Deadlines, Error, Transfer};
use tcpx_memory::{CopyWorker, PinnedPool};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::content::Content;
use tcpx_tests::pair::{LONG, Listening, close};
use tcpx_tests::process::wait;

const MIB: u64 = 1 << 20;

/// Two ends that share the slots of this process, which nobody else uses meanwhile.
struct Pair {
    worker: Arc<CopyWorker>,
    server: Connection,
    client: Connection,
    _alone: MutexGuard<'static, ()>,
}

impl Pair {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let worker = CopyWorker::host().expect("a worker");
        let (server, client) = Listening::staged().connect();
        Self {
            worker,
            server,
            client,
            _alone: alone,
        }
    }

    fn held(&self) -> usize {
        self.worker.pinned_in_use()
    }

    /// Starts a send that nobody receives yet, and waits until bytes of it lie in slots.
    fn foreseen(&self, source: &Source, number: u64) -> Transfer {
        let send = self.client.send(source.slice(), number).start();
        let send = send.expect("room");
        wait(LONG, "bytes of the send in slots", || {
            (self.held() > 0).then_some(())
        });
        assert_eq!(send.progress().bytes_done, 0);
        send
    }

    fn assert_nothing_is_held(&self) {
        wait(LONG, "no slot in use", || (self.held() == 0).then_some(()));
    }

    fn receive(&self, content: Content, bytes: u64, number: u64) {
        let destination = Destination::new(bytes, 0);
        let receive = self.server.receive(destination.slice(), number).start();
        let receive = receive.expect("room");
        receive.wait().expect("it arrives");
        assert_eq!(destination.defect(content), None, "{bytes} bytes");
    }

    fn transfer(&self, bytes: u64, number: u64) {
        let content = Content::new(21, number);
        let source = Source::new(content, bytes, 5);
        let send = self.client.send(source.slice(), number).start();
        self.receive(content, bytes, number);
        send.expect("room").wait().expect("it arrives");
    }
}

fn rewrite(source: &Source) -> bool {
    let slice = source.slice();
    let range = slice.offset()..slice.offset() + 1;
    let free = slice.region().lease(range, tcpx_memory::Access::Write);
    free.is_ok()
}

#[test]
fn what_was_copied_before_the_grant_arrives_and_the_rest_too() {
    let pair = Pair::new();
    for (number, bytes) in [MIB / 2, MIB, 3 * MIB + 77, 4 * MIB]
        .into_iter()
        .enumerate()
    {
        let number = number as u64;
        let content = Content::new(21, number);
        let source = Source::new(content, bytes, 3);
        let send = pair.foreseen(&source, number);
        pair.receive(content, bytes, number);
        send.wait().expect("it arrives");
        assert!(rewrite(&source), "its memory is the program's again");
        pair.assert_nothing_is_held();
    }
    close(pair.server, pair.client);
}

#[test]
fn a_long_send_takes_no_slot_before_its_grant() {
    let pair = Pair::new();
    let content = Content::new(21, 0);
    let source = Source::new(content, 5 * MIB, 0);
    let send = pair.client.send(source.slice(), 0).start().expect("room");
    // Both are announced in order: where the second is foreseen, the first would be.
    let short = Source::new(Content::new(21, 1), MIB, 0);
    let second = pair.foreseen(&short, 1);
    assert!(
        pair.held() <= 4 * PinnedPool::SLOT_BYTES,
        "only the second's"
    );
    pair.receive(content, 5 * MIB, 0);
    pair.receive(Content::new(21, 1), MIB, 1);
    send.wait().expect("it arrives");
    second.wait().expect("it arrives");
    pair.assert_nothing_is_held();
    close(pair.server, pair.client);
}

#[test]
fn a_send_that_is_cancelled_or_runs_out_of_time_gives_all_back() {
    let pair = Pair::new();
    let source = Source::new(Content::new(21, 0), 4 * MIB, 0);
    let send = pair.foreseen(&source, 0);
    send.cancel();
    let error = send.wait().expect_err("nobody received it");
    assert!(matches!(error, Error::Cancelled { .. }), "{error}");
    assert!(rewrite(&source));
    pair.assert_nothing_is_held();
    drop(pair.foreseen(&source, 1));
    pair.assert_nothing_is_held();
    let deadlines = Deadlines {
        total: Some(Duration::from_millis(50)),
        ..Deadlines::default()
    };
    let late = pair.client.send(source.slice(), 2).deadlines(deadlines);
    let error = late.start().expect("room").wait();
    let error = error.expect_err("nobody received it");
    assert!(
        error.to_string().contains("owes a matching receive"),
        "{error}"
    );
    assert!(rewrite(&source));
    pair.assert_nothing_is_held();
    pair.transfer(4 * MIB, 3);
    close(pair.server, pair.client);
}

#[test]
fn a_peer_that_goes_away_leaves_nothing_in_slots() {
    let pair = Pair::new();
    let source = Source::new(Content::new(21, 0), 4 * MIB, 0);
    let send = pair.foreseen(&source, 0);
    let Pair {
        worker,
        server,
        client,
        _alone,
    } = pair;
    drop(server);
    send.wait().expect_err("nobody received it");
    assert!(rewrite(&source));
    let pool = worker.pinned();
    wait(LONG, "no slot in use", || {
        (pool.slots() == pool.free_slots()).then_some(())
    });
    drop(client);
}

/// More sends than may hold slots, in both directions.
#[test]
fn many_short_sends_arrive_whatever_was_copied_of_them() {
    let pair = Pair::new();
    let contents: Vec<_> = (0..24).map(|number| Content::new(21, number)).collect();
    let sources: Vec<_> = contents
        .iter()
        .map(|content| Source::new(*content, 2 * MIB + 99, 1))
        .collect();
    let destinations: Vec<_> = contents
        .iter()
        .map(|_| Destination::new(2 * MIB + 99, 0))
        .collect();
    let ends = |index: usize| match index % 2 {
        0 => (&pair.client, &pair.server),
        _ => (&pair.server, &pair.client),
    };
    let sends: Vec<_> = (0..sources.len())
        .map(|index| {
            let send = ends(index).0.send(sources[index].slice(), index as u64);
            send.start().expect("room")
        })
        .collect();
    let receives: Vec<_> = (0..sources.len())
        .map(|index| {
            let slice = destinations[index].slice();
            let receive = ends(index).1.receive(slice, index as u64);
            receive.start().expect("room")
        })
        .collect();
    for transfer in receives.into_iter().chain(sends) {
        transfer.wait().expect("it arrives");
    }
    for (content, destination) in contents.iter().zip(&destinations) {
        assert_eq!(destination.defect(*content), None);
    }
    pair.assert_nothing_is_held();
    close(pair.server, pair.client);
}
