//! Windows over the embedded network: puts, gets, batches, notifications, and what may go wrong.

use std::thread;
use std::time::Duration;

use tcpx::{
    CompletionQueue, Connection, Deadlines, Error, ErrorKind, Level, Region, Rights, WindowKey,
};

use crate::common::{self, contents, filled, random};

const LONG: Duration = Duration::from_secs(120);
const WINDOW: usize = 8 << 20;

fn pair() -> (Connection, Connection) {
    common::pair(|_, _| ())
}

/// A small generator, so that a failure can be repeated.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % bound.max(1)
    }
}

#[test]
fn random_puts_and_gets_are_what_a_model_says() {
    let (owner, user) = pair();
    let memory = filled(&random(WINDOW));
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let key = WindowKey::from_bytes(&window.key().to_bytes()).expect("a key");
    let mut model = contents(&memory);
    let mut seeded = Seeded(7);
    let sizes = [0, 1, 23, 4096, 16_384, 16_385, 131_072, 300_000, 3 << 20];
    for round in 0..400 {
        let bytes = sizes[seeded.below(sizes.len())];
        let offset = seeded.below(WINDOW - bytes + 1);
        let range = offset..offset + bytes;
        let level = [Level::Placed, Level::Verified][round % 2];
        let report = if seeded.below(2) == 0 {
            let source = random(bytes);
            model[range].copy_from_slice(&source);
            let put = user.put(filled(&source).all(), &key, offset as u64);
            put.level(level)
                .start()
                .expect("room")
                .wait()
                .expect("placed")
        } else {
            let destination = Region::host(bytes).expect("memory");
            let get = user.get(destination.all(), &key, offset as u64);
            let report = get.level(level).start().expect("room").wait();
            assert!(contents(&destination) == model[range], "round {round}");
            report.expect("placed")
        };
        assert_eq!((report.bytes, report.level), (bytes as u64, level));
    }
    assert!(contents(&memory) == model);
    window.revoke(LONG).expect("nothing runs");
}

#[test]
fn a_short_put_does_not_wait_for_a_long_one() {
    const HUGE: usize = 512 << 20;
    let (owner, user) = pair();
    let memory = Region::host(HUGE + WINDOW).expect("memory");
    let window = owner.expose(memory.all(), Rights::Put).expect("open");
    let (key, source) = (window.key(), Region::host(HUGE).expect("memory"));
    let queue = CompletionQueue::new().expect("a queue");
    let long = user.put(source.all(), &key, 0).start().expect("room");
    long.queue(&queue, 0);
    let short = filled(&random(WINDOW));
    let short = user.put(short.all(), &key, HUGE as u64);
    short.start().expect("room").queue(&queue, 1);
    let mut ended = Vec::new();
    while ended.len() < 2 {
        queue.poll(&mut ended, 2, LONG).expect("a queue");
    }
    let keys: Vec<_> = ended.iter().map(|completion| completion.key).collect();
    assert_eq!(keys, [1, 0]);
    for completion in ended {
        completion.outcome.expect("placed");
    }
}

#[test]
fn a_notification_comes_when_its_batch_is_applied() {
    let (owner, user) = pair();
    let memory = Region::host(WINDOW).expect("memory");
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let key = window.key();
    let pieces = 64;
    let piece = WINDOW / pieces;
    for round in 0..20_u8 {
        let source = random(WINDOW);
        let from = filled(&source);
        let mut batch = user.batch().notify(&[round; 9]);
        for at in 0..pieces {
            let start = at * piece;
            let slice = from.slice(start..start + piece).expect("within");
            batch = batch.put(slice, &key, start as u64);
        }
        let transfer = batch.start().expect("room");
        let told = owner.notification(LONG).expect("connected");
        assert_eq!(told.as_deref(), Some(&[round; 9][..]));
        assert!(contents(&memory) == source, "round {round}");
        let report = transfer.wait().expect("applied");
        assert_eq!(report.bytes, WINDOW as u64);
    }
    assert_eq!(owner.notification(Duration::ZERO).expect("connected"), None);
}

#[test]
fn a_notification_behind_gets_comes_when_they_have_ended() {
    let (owner, user) = pair();
    let source = random(1 << 20);
    let memory = filled(&source);
    let window = owner.expose(memory.all(), Rights::Get).expect("open");
    let destination = Region::host(1 << 20).expect("memory");
    let batch = user
        .batch()
        .notify(b"read")
        .get(destination.all(), &window.key(), 0);
    let transfer = batch.start().expect("room");
    let told = owner.notification(LONG).expect("connected");
    assert_eq!(told.as_deref(), Some(&b"read"[..]));
    // The owner may change the memory from now on.
    memory.write_from(0, &vec![0; 1 << 20]).expect("free");
    transfer.wait().expect("placed");
    assert!(contents(&destination) == source);
}

#[test]
fn notifications_come_in_order_once_and_wait_for_room() {
    let (owner, user) = pair();
    let sender = thread::spawn(move || {
        for number in 0..3000_u32 {
            let bytes = vec![number as u8; number as usize % 7000];
            let started = user.notify(&bytes).expect("room");
            // Some wait at the peer, which collects them slowly.
            if number % 100 == 99 {
                started.wait().expect("taken");
            } else {
                std::mem::forget(started);
            }
        }
        user
    });
    for number in 0..3000_u32 {
        let bytes = owner.notification(LONG).expect("connected").expect("sent");
        assert_eq!(bytes.len(), number as usize % 7000);
        assert!(bytes.iter().all(|byte| *byte == number as u8), "{number}");
    }
    let user = sender.join().expect("no panic");
    // More than the peer's credit: some are asked for over lanes, and others come by then.
    for number in 0..1000_u32 {
        let bytes = number.to_le_bytes().repeat(14_500);
        std::mem::forget(user.notify(&bytes).expect("room"));
    }
    for number in 0..1000_u32 {
        let bytes = owner.notification(LONG).expect("connected").expect("sent");
        assert!(bytes == number.to_le_bytes().repeat(14_500), "{number}");
    }
    let most = vec![5; 64 << 10];
    let sent = user.notify(&most).expect("room");
    assert_eq!(owner.notification(LONG).expect("connected"), Some(most));
    sent.wait().expect("taken");
    let error = user.notify(&vec![0; (64 << 10) + 1]).expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Setting, "{error}");
    user.close(LONG).expect("in order");
    let error = owner.notification(LONG).expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn what_a_window_does_not_allow_is_refused_and_writes_nothing() {
    let (owner, user) = pair();
    let memory = filled(&[7; 4096]);
    let guarded = memory.slice(1024..3072).expect("within");
    let window = owner.expose(guarded, Rights::Put).expect("open");
    let key = window.key();
    let source = filled(&[1; 4096]);
    let refused = |error: Error, said: &str| {
        assert!(error.to_string().contains(said), "{error}");
        assert!(contents(&memory).iter().all(|byte| *byte == 7), "written");
    };
    // What the key itself says needs no peer.
    let put = |slice, key: &WindowKey, offset| user.put(slice, key, offset).start();
    let small = source.slice(..8).expect("within");
    let error = put(source.all(), &key, 0).expect_err("too long");
    refused(error, "piece of the window's 2048 bytes");
    let error = put(small.clone(), &key, u64::MAX).expect_err("too far");
    refused(error, "piece of the window's 2048 bytes");
    let error = user
        .get(small.clone(), &key, 0)
        .start()
        .expect_err("no right");
    refused(error, "right");
    // A key that lies is found out by the owner.
    let longer = WindowKey {
        bytes: u64::MAX,
        ..key
    };
    for offset in [2041, 2048, u64::MAX - 8] {
        let transfer = put(small.clone(), &longer, offset).expect("it asks");
        refused(transfer.wait().expect_err("outside"), "within the window");
    }
    let transfer = put(source.all(), &longer, 0).expect("it asks");
    refused(transfer.wait().expect_err("outside"), "within the window");
    let readable = WindowKey {
        rights: Rights::GetAndPut,
        ..key
    };
    let transfer = user
        .get(small.clone(), &readable, 0)
        .start()
        .expect("it asks");
    refused(transfer.wait().expect_err("no right"), "does not allow");
    let other = owner.expose(memory.all(), Rights::Put).expect("open").key();
    let mixed = WindowKey {
        window: key.window,
        ..other
    };
    let transfer = put(small.clone(), &mixed, 0).expect("it asks");
    refused(transfer.wait().expect_err("wrong secret"), "does not exist");
    // `other` was revoked when its window was dropped.
    let transfer = put(small.clone(), &other, 0).expect("it asks");
    refused(transfer.wait().expect_err("revoked"), "does not exist");
    // The connection serves on.
    put(small, &key, 2040)
        .expect("room")
        .wait()
        .expect("placed");
    assert_eq!(contents(&memory)[3064..3072], [1; 8]);
}

/// Memory that the owner's program uses is not written behind its back.
#[test]
fn memory_in_use_is_refused() {
    let (owner, user) = pair();
    let memory = Region::host(1 << 20).expect("memory");
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let receiving = owner.receive(memory.slice(..4096).expect("within"), 1);
    let receiving = receiving.start().expect("room");
    let source = filled(&[3; 8192]);
    let put = user
        .put(source.all(), &window.key(), 0)
        .start()
        .expect("room");
    let error = put.wait().expect_err("in use");
    assert!(error.to_string().contains("in use"), "{error}");
    let beside = user.put(source.all(), &window.key(), 4096).start();
    beside.expect("room").wait().expect("placed");
    receiving.cancel();
    assert!(receiving.wait().is_err());
    let put = user
        .put(source.all(), &window.key(), 0)
        .start()
        .expect("room");
    put.wait().expect("free again");
}

#[test]
fn revoking_ends_what_runs_and_frees_the_memory() {
    for round in 0..30 {
        let (owner, user) = pair();
        let memory = Region::host(64 << 20).expect("memory");
        let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
        let key = window.key();
        let local = Region::host(64 << 20).expect("memory");
        let (first, second) = (local.slice(..32 << 20), local.slice(32 << 20..));
        let put = user.put(first.expect("within"), &key, 0).notify(b"never");
        let put = put.start().expect("room");
        let get = user.get(second.expect("within"), &key, 32 << 20);
        let get = get.start().expect("room");
        thread::sleep(Duration::from_micros(200 * round));
        window.revoke(LONG).expect("it ends");
        // Nothing of the peer points at it any more.
        memory.write_from(0, &vec![9; 64 << 20]).expect("free");
        let outcomes = [put.wait().is_ok(), get.wait().is_ok()];
        let told = owner.notification(Duration::ZERO).expect("connected");
        assert_eq!(told.is_some(), outcomes[0], "round {round}: {outcomes:?}");
        assert!(contents(&memory).iter().all(|byte| *byte == 9));
        let late = user.put(local.slice(..8).expect("within"), &key, 0).start();
        assert!(late.expect("it asks").wait().is_err());
    }
}

#[test]
fn a_lost_peer_ends_puts_gets_windows_and_notifications() {
    let (owner, user) = pair();
    let memory = Region::host(1 << 20).expect("memory");
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let key = window.key();
    let destination = Region::host(1 << 20).expect("memory");
    user.get(destination.all(), &key, 0)
        .start()
        .expect("room")
        .wait()
        .expect("placed");
    user.close(LONG).expect("in order");
    let error = owner.notification(LONG).expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    window.revoke(LONG).expect("nothing runs");
    let error = owner.expose(memory.all(), Rights::Put).expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn thousands_of_puts_and_gets_under_way_all_end() {
    let (owner, user) = pair();
    let memory = filled(&random(1 << 20));
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let key = window.key();
    let expected = contents(&memory);
    let source = filled(&expected);
    let destination = Region::host(1 << 20).expect("memory");
    let mut batch = user.batch();
    let piece = 512;
    for at in 0..2048 {
        let range = at * piece..(at + 1) * piece;
        batch = if at % 2 == 0 {
            batch.get(
                destination.slice(range).expect("within"),
                &key,
                (at * piece) as u64,
            )
        } else {
            batch.put(
                source.slice(range).expect("within"),
                &key,
                (at * piece) as u64,
            )
        };
    }
    let report = batch.start().expect("room").wait().expect("all placed");
    assert_eq!(report.bytes, 1 << 20);
    let got = contents(&destination);
    for at in (0..2048).step_by(2) {
        let range = at * piece..(at + 1) * piece;
        assert!(got[range.clone()] == expected[range], "piece {at}");
    }
}

#[test]
fn a_deadline_of_a_get_counts() {
    let (owner, user) = pair();
    let memory = Region::host(64 << 20).expect("memory");
    let window = owner.expose(memory.all(), Rights::Get).expect("open");
    let destination = Region::host(64 << 20).expect("memory");
    let get = user.get(destination.all(), &window.key(), 0);
    let get = get.deadlines(Deadlines {
        stall: LONG,
        total: Some(Duration::ZERO),
    });
    let error = get.start().expect("room").wait().expect_err("at once");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    // The connection serves on.
    let get = user.get(destination.all(), &window.key(), 0).start();
    get.expect("room").wait().expect("placed");
}

/// Wakes nobody, and counts how often.
struct Count(std::sync::atomic::AtomicUsize);

impl std::task::Wake for Count {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }
}

#[test]
fn a_task_is_woken_by_a_notification_and_by_the_end() {
    let (owner, user) = pair();
    let count = std::sync::Arc::new(Count(0.into()));
    let waker = std::sync::Arc::clone(&count).into();
    let mut context = std::task::Context::from_waker(&waker);
    let woken = |times: usize| {
        let until = std::time::Instant::now() + LONG;
        while count.0.load(std::sync::atomic::Ordering::SeqCst) < times {
            assert!(std::time::Instant::now() < until, "not woken");
            thread::yield_now();
        }
    };
    assert!(owner.poll_notification(&mut context).is_pending());
    user.notify(b"one").expect("room").wait().expect("taken");
    woken(1);
    match owner.poll_notification(&mut context) {
        std::task::Poll::Ready(Ok(bytes)) => assert_eq!(bytes, b"one"),
        other => panic!("{other:?}"),
    }
    // A thread that polls keeps the connection, and then does not come back.
    assert_eq!(owner.notification(Duration::ZERO).expect("alive"), None);
    assert!(owner.poll_notification_late(&mut context).is_pending());
    assert_eq!(owner.notification(Duration::ZERO).expect("alive"), None);
    user.notify(b"two").expect("room").wait().expect("taken");
    woken(2);
    match owner.poll_notification_late(&mut context) {
        std::task::Poll::Ready(Ok(bytes)) => assert_eq!(bytes, b"two"),
        other => panic!("{other:?}"),
    }
    assert!(owner.poll_notification(&mut context).is_pending());
    user.close(LONG).expect("in order");
    woken(3);
    match owner.poll_notification(&mut context) {
        std::task::Poll::Ready(Err(error)) => assert_eq!(error.kind(), ErrorKind::Closed),
        other => panic!("{other:?}"),
    }
}

#[test]
fn programs_that_only_poll_get_every_end() {
    let (owner, user) = pair();
    let memory = Region::host(WINDOW).expect("memory");
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let key = window.key();
    for bytes in [0, 4096, 100_000, 3 << 20].repeat(20) {
        let until = std::time::Instant::now() + LONG;
        let source = filled(&random(bytes));
        let destination = Region::host(bytes).expect("memory");
        let put = user.put(source.all(), &key, 0).notify(b"put");
        let put = put.start().expect("room");
        let mut notified = false;
        while put.wait_timeout(Duration::ZERO).is_none() || !notified {
            notified |= owner.notification(Duration::ZERO).expect("alive").is_some();
            assert!(std::time::Instant::now() < until, "a put does not end");
        }
        let get = user.get(destination.all(), &key, 0).start().expect("room");
        let report = loop {
            if let Some(report) = get.wait_timeout(Duration::ZERO) {
                break report.expect("placed");
            }
            assert!(std::time::Instant::now() < until, "a get does not end");
        };
        assert_eq!(report.bytes, bytes as u64);
        assert_eq!(contents(&destination), contents(&source));
    }
}

#[test]
fn a_batch_ends_when_all_of_its_parts_have() {
    let (owner, user) = pair();
    let memory = Region::host(64 << 20).expect("memory");
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let wrong = owner
        .expose(memory.all(), Rights::GetAndPut)
        .expect("open")
        .key();
    let long = Region::host(48 << 20).expect("memory");
    let short = Region::host(100).expect("memory");
    for gets in [false, true] {
        // The second part is refused long before the first one has ended.
        let batch = user.batch().notify(b"never");
        let batch = match gets {
            false => batch
                .put(long.all(), &window.key(), 0)
                .put(short.all(), &wrong, 0),
            true => batch
                .get(long.all(), &window.key(), 0)
                .get(short.all(), &wrong, 0),
        };
        let error = batch.start().expect("room").wait().expect_err("revoked");
        assert!(error.to_string().contains("does not exist"), "{error}");
        // Nothing points at the memory of any part.
        long.write_from(0, &vec![3; 48 << 20]).expect("free");
        short.write_from(0, &[3; 100]).expect("free");
    }
    user.notify(b"last").expect("room").wait().expect("taken");
    let told = owner.notification(LONG).expect("connected");
    assert_eq!(told.as_deref(), Some(&b"last"[..]), "after a failed batch");
}

/// Pieces of up to `most` bytes in no order, where they lie in the window and in memory here; at
/// neither end do they overlap.
fn shuffled(seeded: &mut Seeded, count: usize, most: usize) -> Vec<(usize, usize, usize)> {
    let place = WINDOW / count;
    let mut order: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        order.swap(at, seeded.below(at + 1));
    }
    let one = |(at, of): (usize, &usize)| {
        let len = 1 + seeded.below(most.min(place));
        let gap = place - len;
        let (here, there) = (seeded.below(gap + 1), seeded.below(gap + 1));
        (at * place + here, of * place + there, len)
    };
    order.iter().enumerate().map(one).collect()
}

/// Whatever network, memory or key makes each piece an operation of its own does as this key does.
fn singly(key: WindowKey) -> WindowKey {
    let takes_lists = false;
    WindowKey { takes_lists, ..key }
}

#[test]
fn batches_of_pieces_move_these_and_nothing_else() {
    for encrypt in [false, true] {
        let (owner, user) = common::pair(|_, options| options.encrypt = encrypt);
        let (memory, local) = (filled(&random(WINDOW)), filled(&random(WINDOW)));
        let (mut model, mut mine) = (contents(&memory), contents(&local));
        // Two windows over one region, whose pieces interleave.
        let windows: Vec<_> = (0..2)
            .map(|_| owner.expose(memory.all(), Rights::GetAndPut).expect("open"))
            .collect();
        let keys: Vec<_> = windows.iter().map(|window| window.key()).collect();
        let mut seeded = Seeded(if encrypt { 5 } else { 3 });
        for (count, most) in [
            (2, 9),
            (65, 64),
            (700, 4096),
            (3000, 2000),
            (40, WINDOW),
            (9000, 1),
        ] {
            for round in 0..6 {
                let pieces = shuffled(&mut seeded, count, most);
                let (is_put, single) = (round % 2 == 0, round == 5 && count < 4000);
                let mut batch = user.batch().level(match round {
                    0 | 1 => Level::Verified,
                    _ => Level::Placed,
                });
                let mut bytes = 0;
                for (here, there, len) in &pieces {
                    let slice = local.slice(*here..here + len).expect("within");
                    let key = keys[seeded.below(2)];
                    let key = if single { singly(key) } else { key };
                    let (from, to) = (*here..here + len, *there..there + len);
                    batch = match is_put {
                        true => batch.put(slice, &key, *there as u64),
                        false => batch.get(slice, &key, *there as u64),
                    };
                    match is_put {
                        true => model[to].copy_from_slice(&mine[from]),
                        false => mine[from].copy_from_slice(&model[to]),
                    }
                    bytes += *len as u64;
                }
                let transfer = batch.notify(b"done").start().expect("room");
                let told = owner.notification(LONG).expect("connected");
                assert_eq!(told.as_deref(), Some(&b"done"[..]));
                assert!(
                    contents(&memory) == model,
                    "{count} {round}: outside, or wrong"
                );
                assert_eq!(transfer.wait().expect("placed").bytes, bytes);
                assert!(
                    contents(&local) == mine,
                    "{count} {round}: outside, or wrong"
                );
            }
        }
    }
}

/// More than a side takes at a time, and than it took in all before.
#[test]
fn a_batch_of_20000_operations_moves_every_byte() {
    const PARTS: usize = 20_000;
    let (owner, user) = pair();
    let (memory, local) = (Region::host(PARTS).expect("memory"), filled(&random(PARTS)));
    let window = owner.expose(memory.all(), Rights::Put).expect("open");
    let key = singly(window.key());
    let mut batch = user.batch().notify(b"all");
    for at in 0..PARTS {
        let slice = local.slice(at..at + 1).expect("within");
        batch = batch.put(slice, &key, at as u64);
    }
    let transfer = batch.start().expect("room");
    assert!(owner.notification(LONG).expect("connected").is_some());
    assert!(contents(&memory) == contents(&local));
    assert_eq!(transfer.wait().expect("placed").bytes, PARTS as u64);
}

#[test]
fn a_prepared_batch_starts_again_and_is_checked_again() {
    let (owner, user) = pair();
    let (memory, local) = (
        Region::host(WINDOW).expect("memory"),
        filled(&random(WINDOW)),
    );
    let window = owner.expose(memory.all(), Rights::Put).expect("open");
    let key = window.key();
    let pieces = shuffled(&mut Seeded(11), 2000, 4096);
    let mut batch = user.batch().notify(b"again");
    for (here, there, len) in &pieces {
        let slice = local.slice(*here..here + len).expect("within");
        batch = batch.put(slice, &key, *there as u64);
    }
    let prepared = batch.prepare().expect("room");
    for _ in 0..10 {
        let bytes = random(WINDOW);
        local.write_from(0, &bytes).expect("free");
        let transfer = prepared.start().expect("room");
        assert!(owner.notification(LONG).expect("connected").is_some());
        let found = contents(&memory);
        for (here, there, len) in &pieces {
            assert!(found[*there..there + len] == bytes[*here..here + len]);
        }
        transfer.wait().expect("placed");
    }
    window.revoke(LONG).expect("nothing runs");
    let transfer = prepared.start().expect("it asks");
    let error = transfer.wait().expect_err("revoked");
    assert!(error.to_string().contains("does not exist"), "{error}");
}

#[test]
fn pieces_at_the_bound_are_refused_or_wait_for_others() {
    let (owner, user) = pair();
    let memory = Region::host(WINDOW).expect("memory");
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let key = window.key();
    let local = filled(&random(WINDOW));
    let of = |count: usize, key: &WindowKey| {
        let mut batch = user.batch();
        for at in 0..count {
            let slice = local.slice(at * 2..at * 2 + 1).expect("within");
            batch = batch.put(slice, key, (count - at) as u64 * 3);
        }
        batch
    };
    let error = of((1 << 20) + 1, &key).start().expect_err("too many");
    assert_eq!(error.kind(), ErrorKind::Setting, "{error}");
    let most = of(1 << 18, &key).prepare().expect("room");
    let error = of(2, &key).start().expect_err("no room");
    assert!(error.to_string().contains("pieces at most"), "{error}");
    drop(most);
    of(2, &key).start().expect("room").wait().expect("placed");
    // More operations than run at a time, and than a connection has.
    let transfer = of(9000, &singly(key)).start().expect("room");
    assert_eq!(transfer.wait().expect("placed").bytes, 9000);
    let cancelled = of(9000, &singly(key)).start().expect("room");
    cancelled.cancel();
    let _ = cancelled.wait();
    window.revoke(LONG).expect("nothing runs");
}

#[test]
fn a_lost_peer_ends_a_batch_of_pieces_whose_others_wait() {
    for list in [true, false] {
        let (owner, user) = pair();
        let memory = Region::host(WINDOW).expect("memory");
        let window = owner.expose(memory.all(), Rights::Put).expect("open");
        let key = window.key();
        let key = if list { key } else { singly(key) };
        let local = filled(&random(WINDOW));
        let mut batch = user.batch().notify(b"never");
        for (here, there, len) in shuffled(&mut Seeded(1), 2000, 4096) {
            let slice = local.slice(here..here + len).expect("within");
            batch = batch.put(slice, &key, there as u64);
        }
        let started = batch.start().expect("room");
        drop((window, owner));
        // It may have been faster.
        let _ = started.wait();
        local
            .write_from(0, &[0; WINDOW])
            .expect("nothing points at it");
    }
}
