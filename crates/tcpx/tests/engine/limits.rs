//! Honest programs that ask for more than the peer takes at a time: what is beyond waits, and
//! nothing breaks.

use std::collections::VecDeque;
use std::thread;
use std::time::Duration;

use tcpx::{
    Connection, Deadlines, ErrorKind, Limits, Options, ProgressMode, Region, Rights, Transfer,
};

use crate::common::{self, contents, filled, random};

const LONG: Duration = Duration::from_secs(120);

/// Two ends; the server's, which owns what the client writes and reads, makes progress as told.
fn pair(mode: ProgressMode, adjust: fn(&mut Options)) -> (Connection, Connection) {
    common::pair(|side, options| {
        if side == 0 {
            options.progress = mode;
        }
        // Every put is announced, and none waits for credit.
        options.eager_limit = 0;
        adjust(options);
    })
}

/// Little at a time.
fn two(options: &mut Options) {
    options.limits = Limits {
        puts: 2,
        notifications: 2,
        gets: 2,
        asks: 2,
        windows: 2,
        tags: 2,
        pieces: 2,
        list_windows: 1,
    };
}

/// As many puts under way as may be, until the peer's gets from here are done.
fn puts_beside_gets(adjust: fn(&mut Options), gets: usize, under_way: usize) {
    const PUT: usize = 4096;
    const SLOTS: usize = 4100;
    let (owner, user) = pair(ProgressMode::Background, adjust);
    let memory = Region::host(SLOTS * PUT).expect("memory");
    let window = owner.expose(memory.all(), Rights::Put).expect("open");
    let key = window.key();
    let theirs = filled(&random(4096));
    let read = user.expose(theirs.all(), Rights::Get).expect("open");
    let from = read.key();
    let expected = contents(&theirs);
    let getting = thread::spawn(move || {
        for _ in 0..gets {
            let to = Region::host(4096).expect("memory");
            let get = owner.get(to.all(), &from, 0).start().expect("room");
            get.wait().expect("a get beside puts");
            assert!(contents(&to) == expected);
        }
        owner
    });
    let source = filled(&random(SLOTS * PUT));
    let mut running = VecDeque::new();
    let mut number = 0;
    while !getting.is_finished() {
        let range = number % SLOTS * PUT..(number % SLOTS + 1) * PUT;
        let slice = source.slice(range.clone()).expect("in it");
        match user.put(slice, &key, range.start as u64).start() {
            Ok(put) => {
                running.push_back(put);
                number += 1;
            }
            // This program has as many under way as it may.
            Err(error) => assert_eq!(error.kind(), ErrorKind::Operation, "{error}"),
        }
        if running.len() >= under_way
            && let Some(put) = running.pop_front()
        {
            put.wait().expect("a put beside gets");
        }
    }
    let owner = getting.join().expect("no get failed");
    for put in running {
        put.wait().expect("a put beside gets");
    }
    // Who put hears of the end as soon as the bytes are there, and the owner counts it out after
    // that.
    window.revoke(LONG).expect("nothing runs");
    if number >= SLOTS {
        assert!(contents(&memory) == contents(&source));
    }
    drop(owner);
}

#[test]
fn puts_and_the_peers_gets_run_side_by_side() {
    puts_beside_gets(|_| (), 300, 4096);
}

/// Gets whose time passes unanswered, while their owner's program does something else; then both go
/// on.
fn gets_that_end_unanswered(adjust: fn(&mut Options)) {
    const EACH: usize = 100_000;
    const GETS: usize = 600;
    let (owner, user) = pair(ProgressMode::Manual, adjust);
    let bytes = random(EACH * 4);
    let memory = filled(&bytes);
    let window = owner.expose(memory.all(), Rights::Get).expect("open");
    let key = window.key();
    let to = Region::host(EACH * GETS).expect("memory");
    let get = |number: usize, stall| {
        let slice = to.slice(number * EACH..(number + 1) * EACH).expect("in it");
        let deadlines = Deadlines { stall, total: None };
        let get = user.get(slice, &key, (number % 4 * EACH) as u64);
        get.deadlines(deadlines).start().expect("room")
    };
    let soon = Duration::from_millis(20);
    let late: Vec<_> = (0..GETS).map(|number| get(number, soon)).collect();
    // The engine's thread has a turn for what is due, such as its first one, and answers what it
    // finds then.
    let is_late = |get: Transfer| match get.wait() {
        Ok(_) => false,
        Err(error) => error.kind() == ErrorKind::TimedOut || panic!("{error}"),
    };
    assert!(
        late.into_iter()
            .map(is_late)
            .filter(|is_late| *is_late)
            .count()
            > 0
    );
    let next = get(1, LONG);
    let sent = user.send(to.slice(..8).expect("in it"), 1).start();
    let sent = sent.expect("room");
    let there = Region::host(8).expect("memory");
    let received = owner.receive(there.all(), 1).start().expect("room");
    received.wait().expect("the connection goes on");
    let served = thread::spawn(move || {
        let report = next.wait().expect("gets go on");
        sent.wait().expect("the connection goes on");
        report
    });
    while !served.is_finished() {
        owner.progress().expect("the connection goes on");
    }
    assert_eq!(served.join().expect("no panic").bytes, EACH as u64);
    assert!(contents(&to)[EACH..2 * EACH] == bytes[EACH..2 * EACH]);
}

#[test]
fn gets_that_end_unanswered_leave_the_connection_well() {
    gets_that_end_unanswered(|_| ());
}

#[test]
fn puts_beside_gets_of_a_peer_that_takes_two() {
    puts_beside_gets(two, 200, 100);
}

#[test]
fn gets_that_end_unanswered_by_an_owner_that_takes_two() {
    gets_that_end_unanswered(two);
}

/// Batches of puts with notifications, which the peer's program collects late, beside puts alone.
#[test]
fn notifications_that_nobody_collects_hold_no_put_up() {
    const BATCHES: u8 = 20;
    let (owner, user) = pair(ProgressMode::Background, two);
    let memory = Region::host(1 << 20).expect("memory");
    let window = owner.expose(memory.all(), Rights::Put).expect("open");
    let key = window.key();
    let sources: Vec<_> = (0..BATCHES).map(|_| filled(&random(3 * 4096))).collect();
    let part = |number: u8, at: usize| {
        let slice = sources[usize::from(number)].slice(at * 4096..(at + 1) * 4096);
        let place = (usize::from(number) * 3 + at) * 8192;
        (slice.expect("in it"), place as u64)
    };
    // What can never fit is refused, and says why.
    let three = (0..3).fold(user.batch(), |batch, at| {
        let (slice, place) = part(0, at);
        batch.put(slice, &key, place)
    });
    let error = three.start().expect_err("three pieces");
    assert!(error.to_string().contains("lists of 2 pieces"), "{error}");
    let batches: Vec<_> = (0..BATCHES)
        .map(|number| {
            let batch = (0..2).fold(user.batch(), |batch, at| {
                let (slice, place) = part(number, at);
                batch.put(slice, &key, place)
            });
            batch.notify(&[number]).start().expect("room")
        })
        .collect();
    let alone = filled(&random(4096));
    let put = user.put(alone.all(), &key, 1 << 19);
    let put = put.start().expect("room");
    put.wait().expect("no program has to collect anything");
    for number in 0..BATCHES {
        let told = owner.notification(LONG).expect("alive");
        assert_eq!(told, Some(vec![number]));
    }
    for batch in batches {
        batch.wait().expect("collected");
    }
}

/// Sends and receives of many tags, in an order of the programs' own.
#[test]
fn many_tags_and_sends_to_a_peer_that_takes_two() {
    let (receiver, sender) = pair(ProgressMode::Background, two);
    let sources: Vec<_> = (0..60).map(|_| filled(&random(5000))).collect();
    let sends: Vec<_> = (0..)
        .zip(&sources)
        .map(|(at, source)| sender.send(source.all(), at % 7).start().expect("room"))
        .collect();
    for (at, source) in (0..).zip(&sources) {
        let to = Region::host(5000).expect("memory");
        let receive = receiver.receive(to.all(), at % 7).start().expect("room");
        receive.wait().expect("sent");
        assert!(contents(&to) == contents(source), "message {at}");
    }
    for send in sends {
        send.wait().expect("received");
    }
}

/// A batch of which the peer cannot keep all lists: it keeps none of them.
#[test]
fn a_batch_that_cannot_be_prepared_leaves_nothing_behind() {
    let (owner, user) = pair(ProgressMode::Background, two);
    let memory = Region::host(1 << 16).expect("memory");
    let window = owner.expose(memory.all(), Rights::GetAndPut).expect("open");
    let (key, here) = (window.key(), filled(&random(4 * 4096)));
    let slice = |at: usize| here.slice(at * 4096..(at + 1) * 4096).expect("in it");
    let puts = || {
        let first = user.put(slice(0), &key, 0);
        first.put(slice(1), &key, 8192)
    };
    for _ in 0..3 {
        let both = puts().get(slice(2), &key, 0).get(slice(3), &key, 8192);
        let error = both.prepare().expect_err("four pieces");
        assert!(error.to_string().contains("lists of 2 pieces"), "{error}");
    }
    let prepared = puts().prepare().expect("room");
    for _ in 0..3 {
        let started = prepared.start().expect("room");
        started.wait().expect("applied");
    }
}
