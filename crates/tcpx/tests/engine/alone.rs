//! Long messages of which one goes at a time each way: whoever waits for one moves it, and others
//! as soon as nobody waits.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{Connection, TcpNetwork, Transfer};
use tcpx_net::{Local, TcpOptions};

use super::common::{contents, filled, pair, random};

const LONG: Duration = Duration::from_secs(60);
/// More than travels over the control connection.
const BYTES: usize = 300 << 10;
/// More than are looked at before it counts as usual that messages go one at a time.
const MANY: u64 = 30;

/// Over lanes.
fn lanes() -> (Connection, Connection) {
    pair(|_, options| {
        options.network = Arc::new(TcpNetwork::new(TcpOptions {
            local: Local::Off,
            ..TcpOptions::default()
        }));
    })
}

fn start_send(from: &Connection, bytes: &[u8], tag: u64) -> Transfer {
    from.send(filled(bytes).all(), tag).start().expect("room")
}

/// So many messages, `depth` of them at a time.
fn messages(from: &Connection, to: &Connection, count: u64, depth: u64) {
    thread::scope(|scope| {
        scope.spawn(|| {
            let sent = random(BYTES);
            for _ in 0..count / depth {
                let sends: Vec<_> = (0..depth).map(|_| start_send(from, &sent, 1)).collect();
                for send in sends {
                    send.wait().expect("it is received");
                }
            }
            start_send(from, &sent, 2).wait().expect("it is received");
        });
        let memory: Vec<_> = (0..depth + 1).map(|_| filled(&vec![0; BYTES])).collect();
        let post = |index: u64| {
            let memory = &memory[usize::try_from(index % (depth + 1)).expect("few")];
            to.receive(memory.all(), 1).start().expect("room")
        };
        let mut posted: std::collections::VecDeque<_> =
            (0..count.min(depth + 1)).map(post).collect();
        for index in depth + 1..count + depth + 1 {
            let received = posted.pop_front().expect("one for each");
            received.wait().expect("it is sent");
            if index < count {
                posted.push_back(post(index));
            }
        }
        let last = filled(&vec![0; BYTES]);
        let received = to.receive(last.all(), 2).start().expect("room");
        received.wait().expect("it is sent");
        for memory in &memory {
            assert_eq!(contents(memory), contents(&last));
        }
    });
}

#[test]
fn messages_one_at_a_time_and_several_take_turns() {
    let (server, client) = lanes();
    for depth in [1, 8, 1, 2, 1] {
        messages(&client, &server, 8 * MANY, depth);
        messages(&server, &client, 8 * MANY, depth);
    }
}

/// Each wait has left everything to a thread that came back so far.
#[test]
fn a_message_moves_while_both_programs_compute() {
    let (server, client) = lanes();
    for _ in 0..10 {
        messages(&client, &server, MANY, 1);
        let memory = filled(&vec![0; BYTES]);
        let received = server.receive(memory.all(), 3).start().expect("room");
        let sent = start_send(&client, &random(BYTES), 3);
        let until = Instant::now() + LONG;
        // Asking how far it is moves nothing.
        while received.progress().bytes_done < BYTES as u64 {
            assert!(Instant::now() < until, "nobody moves it");
            thread::yield_now();
        }
        sent.wait().expect("it is received");
        received.wait().expect("it is sent");
    }
}

#[test]
fn a_wait_that_moves_messages_ends_with_its_connection() {
    let (server, client) = lanes();
    messages(&client, &server, MANY, 1);
    let memory = filled(&vec![0; BYTES]);
    let received = server.receive(memory.all(), 3).start().expect("room");
    thread::scope(|scope| {
        let waits = scope.spawn(|| received.wait());
        client.close(LONG).expect("nothing is under way");
        waits.join().expect("no panic").expect_err("nothing comes");
    });
}

/// One of them moves the messages of both.
#[test]
fn two_threads_wait_for_long_messages_of_their_own() {
    let (server, client) = lanes();
    messages(&client, &server, MANY, 1);
    let sent = random(BYTES);
    let pass = |tag| {
        for _ in 0..MANY {
            let memory = filled(&vec![0; BYTES]);
            let received = server.receive(memory.all(), tag).start().expect("room");
            start_send(&client, &sent, tag)
                .wait()
                .expect("it is received");
            received.wait().expect("it is sent");
            assert_eq!(contents(&memory), sent);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| pass(3));
        pass(4);
    });
}
