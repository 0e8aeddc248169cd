//! Progress by the program alone: nothing moves unless it asks, everything moves when it does, and
//! the peer notices none of it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tcpx::{
    CompletionQueue, Connection, Error, Level, Options, ProgressMode, Region, Rights, Transfer,
};

use crate::common::{self, contents, filled, random};

const LONG: Duration = Duration::from_secs(60);

/// Two ends of a connection, with such modes of progress.
fn pair(modes: [ProgressMode; 2], adjust: impl Fn(&mut Options)) -> (Connection, Connection) {
    common::pair(|side, options| {
        options.progress = modes[side];
        adjust(options);
    })
}

/// The engine's thread has nothing to see to during a test.
fn quiet(options: &mut Options) {
    options.heartbeat = Duration::from_secs(300);
    options.dead_after = Duration::from_secs(1000);
    options.deadlines.stall = Duration::from_secs(600);
}

/// Makes progress on all until `done`.
fn progress(all: &[&Connection], mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        for connection in all {
            connection.progress().expect("our own process");
        }
        assert!(began.elapsed() < LONG, "nothing moves");
    }
}

#[test]
fn one_thread_moves_messages_of_all_sizes_between_two_ends() {
    let (server, client) = pair([ProgressMode::Manual; 2], quiet);
    for bytes in [0, 8, 4096, 32 << 10, (32 << 10) + 1, 1 << 20, 9 << 20] {
        for level in [Level::Placed, Level::Verified] {
            let source = filled(&random(bytes));
            let sink = filled(&vec![0xAA; bytes]);
            let sent = client.send(source.all(), 1).level(level);
            let sent = sent.start().expect("room");
            let there = server.receive(sink.all(), 1).level(level);
            let there = there.start().expect("room");
            progress(&[&server, &client], || {
                sent.test().is_some() && there.test().is_some()
            });
            for end in [sent, there] {
                let report = end.wait().expect("it arrives");
                assert_eq!((report.bytes, report.level), (bytes as u64, level));
            }
            assert!(contents(&source) == contents(&sink));
        }
    }
}

#[test]
fn windows_and_notifications_move_by_hand() {
    let (owner, user) = pair([ProgressMode::Manual; 2], quiet);
    let memory = filled(&vec![0; 3 << 20]);
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let source = filled(&random(memory.len()));
    let put = user.put(source.all(), &window.key(), 0).notify(b"there");
    let put = put.start().expect("room");
    let mut notified = None;
    progress(&[&owner, &user], || {
        notified = notified.take().or_else(|| {
            owner
                .notification(Duration::ZERO)
                .expect("the peer is there")
        });
        notified.is_some() && put.test().is_some()
    });
    assert_eq!(notified.as_deref(), Some(b"there".as_slice()));
    put.wait().expect("placed");
    assert!(contents(&memory) == contents(&source));
    let back = filled(&vec![0; memory.len()]);
    let get = user
        .get(back.all(), &window.key(), 0)
        .start()
        .expect("room");
    progress(&[&owner, &user], || get.test().is_some());
    get.wait().expect("placed");
    assert!(contents(&back) == contents(&source));
    progress(&[&owner, &user], || owner.status().is_empty());
    window.revoke(LONG).expect("nothing runs");
}

#[test]
fn waits_make_the_progress_whatever_the_other_end_does() {
    for modes in [
        [ProgressMode::Manual; 2],
        [ProgressMode::Manual, ProgressMode::Background],
        [ProgressMode::Background, ProgressMode::Manual],
    ] {
        let (server, client) = pair(modes, quiet);
        let echo = thread::spawn(move || {
            for bytes in [8, 4096, 100_000, 5 << 20] {
                let region = filled(&vec![0; bytes]);
                let there = server.receive(region.all(), 1).start().expect("room");
                there.wait().expect("it arrives");
                let back = server.send(region.all(), 2).start().expect("room");
                back.wait().expect("acknowledged");
            }
            server.close(LONG)
        });
        for bytes in [8, 4096, 100_000, 5 << 20] {
            let source = filled(&random(bytes));
            let sink = filled(&vec![0; bytes]);
            let back = client.receive(sink.all(), 2).start().expect("room");
            let sent = client.send(source.all(), 1).start().expect("room");
            sent.wait().expect("acknowledged");
            back.wait().expect("the answer arrives");
            assert!(contents(&source) == contents(&sink));
        }
        client.close(LONG).expect("the peer says goodbye too");
        echo.join().expect("no panic").expect("a goodbye");
    }
}

#[test]
fn manual_progress_moves_only_when_asked() {
    let (server, client) = pair([ProgressMode::Manual, ProgressMode::Background], quiet);
    let ready = |limit: i64| {
        let descriptor = server.progress_fd().expect("it is by hand");
        let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: limit,
            tv_nsec: 0,
        };
        poll(&mut polled, Some(&limit)).expect("polled") > 0
    };
    while server.progress().expect("our own process") {}
    assert!(!ready(0), "the peer has said nothing");
    // The engine's thread looks once when a connection begins, which on a busy machine is when it
    // likes.
    let stood_still = (0..20).any(|_| {
        let sink = filled(&[0; 4096]);
        let there = server.receive(sink.all(), 1).start().expect("room");
        let source = filled(&random(4096));
        let sent = client.send(source.all(), 1).start().expect("room");
        assert!(ready(60), "the message lies in the socket");
        let stands = sent.wait_timeout(Duration::from_millis(100)).is_none()
            && there.progress().bytes_done == 0;
        progress(&[&server], || there.test().is_some());
        sent.wait().expect("acknowledged");
        there.wait().expect("it arrives");
        assert!(contents(&source) == contents(&sink));
        while server.progress().expect("our own process") {}
        stands
    });
    assert!(stood_still, "somebody else made the progress each time");
    assert!(matches!(client.progress_fd(), Err(Error::Setting { .. })));
}

#[test]
fn a_program_that_does_nothing_for_long_stays_connected() {
    // A busy machine does not keep the engine's thread from a heartbeat for so long.
    let dead_after = Duration::from_secs(5);
    let (server, client) = pair(
        [ProgressMode::Manual, ProgressMode::Background],
        |options| {
            options.heartbeat = Duration::from_millis(100);
            options.dead_after = dead_after;
        },
    );
    thread::sleep(2 * dead_after);
    let source = filled(&random(100_000));
    let sink = filled(&vec![0; 100_000]);
    let sent = client.send(source.all(), 1).start().expect("it lives");
    let there = server.receive(sink.all(), 1).start().expect("it lives");
    there.wait().expect("it arrives");
    sent.wait().expect("acknowledged");
    assert!(contents(&source) == contents(&sink));
}

#[test]
fn several_threads_may_wait_and_each_gets_its_own() {
    let (server, client) = pair([ProgressMode::Manual; 2], quiet);
    let each = |at: &Connection, sends: bool, tag: u64| {
        for round in 0..50 {
            let bytes = [16, 5000, 70_000][round % 3];
            let region = filled(&vec![tag as u8; bytes]);
            let transfer = match sends {
                true => at.send(region.all(), tag).start(),
                false => at.receive(region.all(), tag).start(),
            };
            transfer.expect("room").wait().expect("it arrives");
        }
    };
    thread::scope(|scope| {
        for tag in 0..3 {
            let (server, client) = (&server, &client);
            scope.spawn(move || each(server, tag == 1, tag));
            scope.spawn(move || each(client, tag != 1, tag));
        }
    });
}

#[test]
fn waits_and_queues_of_several_work_by_hand() {
    let pairs = [(); 2].map(|()| pair([ProgressMode::Manual; 2], quiet));
    let sinks = [(); 2].map(|()| filled(&[0; 64]));
    let source = filled(&random(64));
    let receive = |((server, _), sink): (&(Connection, Connection), &Region)| -> Transfer {
        server.receive(sink.all(), 1).start().expect("room")
    };
    let mut waiting: Vec<Transfer> = pairs.iter().zip(&sinks).map(receive).collect();
    let sent = pairs[1].1.send(source.all(), 1).start().expect("room");
    waiting.pop().expect("two").wait().expect("it arrives");
    assert!(contents(&sinks[1]) == contents(&source));
    sent.wait().expect("acknowledged");
    let queue = CompletionQueue::new().expect("a descriptor");
    waiting.pop().expect("the other").queue(&queue, 7);
    let sent = pairs[0].1.send(source.all(), 1).start().expect("room");
    let mut completions = Vec::new();
    progress(&[&pairs[0].0, &pairs[0].1], || {
        let came = queue.poll(&mut completions, 1, Duration::ZERO);
        came.expect("polled") > 0
    });
    assert_eq!(completions[0].key, 7);
    sent.wait().expect("acknowledged");
    assert!(queue.as_fd().try_clone_to_owned().is_ok());
}

#[test]
fn a_peer_that_goes_ends_what_waits_by_hand() {
    let (server, client) = pair([ProgressMode::Manual; 2], quiet);
    let sink = filled(&[0; 64]);
    let there = server.receive(sink.all(), 1).start().expect("room");
    let stop = Arc::new(AtomicBool::new(false));
    let closing = {
        let stop = Arc::clone(&stop);
        thread::spawn(move || {
            let closed = client.close(LONG);
            stop.store(true, Ordering::SeqCst);
            closed
        })
    };
    there.wait().expect_err("no send comes");
    progress(&[&server], || stop.load(Ordering::SeqCst));
    closing.join().expect("no panic").expect("a goodbye");
    server
        .send(sink.all(), 1)
        .start()
        .expect_err("it is closed");
    // One that was never asked for anything again.
    let (server, client) = pair([ProgressMode::Manual; 2], quiet);
    drop(server);
    client.close(LONG).expect("the engine's threads see to it");
}
