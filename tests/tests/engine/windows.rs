//! Puts, gets and notifications over every network, both ends exposing and using; memory around the
//! pieces stays as it was.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tcpx::{Connection, Level, Network, Region, Rights, TcpNetwork, Transfer, Window, WindowKey};
use tcpx_net::TcpOptions;
use tcpx_tests::content::Choices;
use tcpx_tests::pair::{LONG, Listening, close, double_network};

/// Bytes of each end's window, and around it.
const WINDOW: usize = 4 << 20;
const GUARD: usize = 4096;

/// One end: memory that the peer uses, and what must be in it.
struct End {
    connection: Connection,
    memory: Region,
    model: Vec<u8>,
    window: Window,
    choices: Choices,
}

impl End {
    fn new(connection: Connection, seed: u64) -> Self {
        let mut choices = Choices::new(seed);
        let model: Vec<u8> = (0..WINDOW + 2 * GUARD)
            .map(|_| choices.any() as u8)
            .collect();
        let memory = Region::host(model.len()).expect("memory");
        memory.write_from(0, &model).expect("free");
        let slice = memory.slice(GUARD..GUARD + WINDOW).expect("within");
        let window = connection.expose(slice, Rights::GetAndPut);
        Self {
            window: window.expect("connected"),
            connection,
            memory,
            model,
            choices,
        }
    }

    fn found(&self) -> Vec<u8> {
        let mut found = vec![0; self.memory.len()];
        self.memory.read_to(0, &mut found).expect("free");
        found
    }

    /// A piece of a window: mostly small, some longer than a chunk.
    fn piece(&mut self) -> (usize, usize) {
        let most = [1, 64, 5000, 20_000, 200_000, 3 << 20];
        let most = most[self.choices.below(most.len() as u64) as usize];
        let bytes = self.choices.below(most) as usize;
        (
            self.choices.below((WINDOW - bytes) as u64 + 1) as usize,
            bytes,
        )
    }

    fn level(&mut self) -> Level {
        [Level::Placed, Level::Verified][self.choices.below(2) as usize]
    }
}

fn ended(transfer: Transfer) {
    transfer.wait().expect("it ends well");
}

/// Writes random pieces of the peer's window and reads others, each checked with a model of it.
fn use_window(user: &mut End, key: &WindowKey, model: &mut [u8], rounds: usize) {
    for round in 0..rounds {
        let (offset, bytes) = user.piece();
        let level = user.level();
        let there = &mut model[GUARD + offset..GUARD + offset + bytes];
        let local = Region::host(bytes).expect("memory");
        if user.choices.below(2) == 0 {
            let source: Vec<u8> = (0..bytes).map(|_| user.choices.any() as u8).collect();
            local.write_from(0, &source).expect("free");
            there.copy_from_slice(&source);
            let put = user.connection.put(local.all(), key, offset as u64);
            ended(put.level(level).start().expect("room"));
        } else {
            let get = user.connection.get(local.all(), key, offset as u64);
            ended(get.level(level).start().expect("room"));
            let mut found = vec![0; bytes];
            local.read_to(0, &mut found).expect("free");
            assert!(
                found == there,
                "round {round}: {bytes} bytes from {offset} on"
            );
        }
    }
}

/// Both ends at once, each in the other's window.
fn both_use_windows(listening: &Listening, rounds: usize) {
    let (server, client) = listening.connect();
    let mut ends = [End::new(server, 1), End::new(client, 2)];
    let keys = [ends[0].window.key(), ends[1].window.key()];
    let [one, other] = &mut ends;
    let (mut of_one, mut of_other) = (one.model.clone(), other.model.clone());
    thread::scope(|scope| {
        scope.spawn(|| use_window(one, &keys[1], &mut of_other, rounds));
        use_window(other, &keys[0], &mut of_one, rounds);
    });
    (ends[0].model, ends[1].model) = (of_one, of_other);
    for end in &ends {
        assert!(end.found() == end.model, "something else was written");
    }
    // Messages of a tag between them, and batches with notifications, one after the other.
    let [one, other] = &mut ends;
    for round in 0..20_u8 {
        let message = Region::host(100_000).expect("memory");
        let room = Region::host(100_000).expect("memory");
        let receiving = one.connection.receive(room.all(), 5).start().expect("room");
        let sending = other.connection.send(message.all(), 5).start();
        let from = Region::host(WINDOW).expect("memory");
        let bytes: Vec<u8> = (0..WINDOW).map(|at| at as u8 ^ round).collect();
        from.write_from(0, &bytes).expect("free");
        let mut batch = other.connection.batch().notify(&[round; 300]);
        let mut offset = 0;
        while offset < WINDOW {
            let piece = (1 + other.choices.below(400_000) as usize).min(WINDOW - offset);
            let slice = from.slice(offset..offset + piece).expect("within");
            batch = batch.put(slice, &keys[0], offset as u64);
            offset += piece;
        }
        let batch = batch.start().expect("room");
        let told = one.connection.notification(LONG).expect("connected");
        assert_eq!(told.as_deref(), Some(&[round; 300][..]));
        one.model[GUARD..GUARD + WINDOW].copy_from_slice(&bytes);
        assert!(one.found() == one.model, "round {round}");
        ended(batch);
        ended(sending.expect("room"));
        ended(receiving);
    }
    // What is refused costs this operation alone.
    let wrong = WindowKey {
        bytes: u64::MAX,
        ..keys[0]
    };
    let piece = Region::host(50_000).expect("memory");
    let put = other.connection.put(piece.all(), &wrong, WINDOW as u64 - 1);
    assert!(put.start().expect("room").wait().is_err());
    let get = other.connection.get(piece.all(), &wrong, WINDOW as u64 - 1);
    assert!(get.start().expect("room").wait().is_err());
    assert!(one.found() == one.model);
    use_window(other, &keys[0], &mut one.model, 5);
    let [one, other] = ends;
    one.window.revoke(LONG).expect("nothing runs");
    let put = other.connection.put(piece.all(), &keys[0], 0).start();
    assert!(put.expect("room").wait().is_err());
    drop(other.window);
    close(one.connection, other.connection);
}

fn over(network: Arc<dyn Network>, rounds: usize) {
    both_use_windows(&Listening::new(network, |_| {}, |_| {}), rounds);
}

#[test]
fn windows_over_tcp() {
    over(Arc::new(TcpNetwork::default()), 300);
}

#[test]
fn windows_over_tcp_with_lanes() {
    let lanes = TcpOptions {
        lanes: 5,
        ..TcpOptions::default()
    };
    over(Arc::new(TcpNetwork::new(lanes)), 300);
}

#[test]
fn windows_over_tcp_through_slots() {
    both_use_windows(&Listening::staged(), 200);
}

#[test]
fn windows_over_a_plugin() {
    over(double_network(), 100);
}

#[test]
fn windows_without_eager_payload() {
    let off = |options: &mut tcpx::Options| options.eager_limit = 0;
    let network = Arc::new(TcpNetwork::default());
    both_use_windows(&Listening::new(network, off, off), 100);
}

/// A revoke at any moment: what is reported as placed is there, and nothing is written afterwards.
#[test]
fn a_revoked_window_is_written_no_more() {
    for network in [double_network(), Arc::new(TcpNetwork::default())] {
        let listening = Listening::new(network, |_| {}, |_| {});
        let (server, client) = listening.connect();
        let mut choices = Choices::new(5);
        for round in 0..30_u8 {
            let memory = Region::host(WINDOW).expect("memory");
            let window = server.expose(memory.all(), Rights::Put).expect("connected");
            let source = Region::host(WINDOW).expect("memory");
            source
                .write_from(0, &vec![round + 1; WINDOW])
                .expect("free");
            let mut puts = VecDeque::new();
            for at in 0..8 {
                let range = at * WINDOW / 8..(at + 1) * WINDOW / 8;
                let offset = range.start as u64;
                let slice = source.slice(range).expect("within");
                puts.push_back(
                    client
                        .put(slice, &window.key(), offset)
                        .start()
                        .expect("room"),
                );
            }
            thread::sleep(Duration::from_micros(choices.below(1500)));
            window.revoke(LONG).expect("what runs there ends");
            let mut after = vec![0; WINDOW];
            memory.read_to(0, &mut after).expect("free");
            for (at, put) in puts.into_iter().enumerate() {
                let part = &after[at * WINDOW / 8..(at + 1) * WINDOW / 8];
                if put.wait().is_ok() {
                    assert!(part.iter().all(|byte| *byte == round + 1), "put {at}");
                }
            }
            let mut later = vec![0; WINDOW];
            memory.read_to(0, &mut later).expect("free");
            assert!(later == after, "round {round}: written after the revoke");
        }
        close(server, client);
    }
}

#[test]
fn ten_thousand_windows_leave_nothing_behind() {
    let network = Arc::new(TcpNetwork::default());
    let (server, client) = Listening::new(network, |_| {}, |_| {}).connect();
    let memory = Region::host(1 << 20).expect("memory");
    let piece = Region::host(64).expect("memory");
    let mut open = VecDeque::new();
    for number in 0..10_000_u64 {
        let window = server.expose(memory.all(), Rights::Put).expect("connected");
        if number % 10 == 0 {
            ended(
                client
                    .put(piece.all(), &window.key(), number)
                    .start()
                    .expect("room"),
            );
        }
        open.push_back(window);
        if open.len() > 100 {
            open.pop_front();
        }
    }
    drop(open);
    close(server, client);
    drop(piece);
    assert_eq!(memory.shares(), 1, "a window keeps its memory");
}
