//! Worse fault_plan than in `random`: control and data at very different speeds, deadlines, cancels
//! and closes at any moment, data planes that let go late or never.

use proptest::prelude::*;

use super::model::Random;
use super::pair::Pair;
use super::*;
use crate::frame::Limits;

/// Longer than sends wait one after the other for receives that do not come.
const CLOSES: Duration = Duration::from_secs(10_000);

#[derive(Clone, Debug)]
struct Storm {
    seed: u64,
    channels: u16,
    windows: (u16, u16),
    jitter: u64,
    frames: [Option<u64>; 2],
    data: Option<u64>,
    quiet: Option<u64>,
    operations: u64,
    cancels: u64,
    /// Percent of operations with a short deadline.
    deadlines: u64,
    /// Percent of operations that are not like the others.
    unusual: u64,
    both_ways: bool,
    hold: bool,
    fences: bool,
    holds: bool,
    /// After how many operations which side closes.
    close: Option<(u64, usize)>,
    /// After how many operations data planes let go of nothing any more.
    stuck: Option<u64>,
    /// Most operations of a side.
    capacity: usize,
    limits: [Limits; 2],
    eager: (u32, u32),
    /// Percent of steps after which a process stalls.
    stops: u64,
    mixed_levels: bool,
    /// Frames that may wait beside those that limits allow, and chunks that are acknowledged
    /// together.
    backlog: u64,
    ack_batch: u32,
    /// Windows that are made vain before receives wait.
    vain_windows: u8,
}

fn any_storm() -> impl Strategy<Value = Storm> {
    let speed = || {
        prop_oneof![
            2 => Just(None), 2 => Just(Some(1u64)), 2 => (1u64..300_000).prop_map(Some), 1 => (1u64..5000).prop_map(Some)
        ]
    };
    (
        (any::<u64>(), 1u16..7, (1u16..6, 1u16..6), 1u64..3000),
        ([speed(), speed()], speed(), speed()),
        (
            2u64..90,
            prop_oneof![Just(0u64), 1u64..70],
            prop_oneof![Just(0u64), 1u64..50],
            prop_oneof![Just(3u64), 1u64..40],
        ),
        (
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
        ),
        (
            prop::option::weighted(0.4, (1u64..90, 0usize..2)),
            prop::option::weighted(0.1, 1u64..60),
            prop_oneof![2 => Just(4096usize), 1 => 2usize..40],
            [any_limits(1), any_limits(1)],
            any_eager(),
            prop_oneof![Just(0u64), 1u64..20],
            (0u64..20, 1u32..65, 1u8..9),
        ),
    )
        .prop_map(
            |(
                (seed, channels, windows, jitter),
                (frames, data, quiet),
                (operations, cancels, deadlines, unusual),
                (both_ways, hold, fences, holds, mixed_levels),
                (close, stuck, capacity, limits, eager, stops, costs),
            )| {
                let (backlog, ack_batch, vain_windows) = costs;
                Storm {
                    seed,
                    channels,
                    windows,
                    jitter,
                    frames,
                    data,
                    quiet,
                    operations,
                    cancels,
                    deadlines,
                    unusual,
                    both_ways,
                    hold,
                    fences,
                    holds,
                    close,
                    stuck,
                    capacity,
                    limits,
                    eager,
                    stops,
                    mixed_levels,
                    backlog,
                    ack_batch,
                    vain_windows,
                }
            },
        )
}

fn fault_plan(storm: &Storm) -> Pair {
    let mut config = small_chunks(storm.channels);
    config.ours.send_window = storm.windows.0;
    config.ours.receive_window = storm.windows.1;
    (config.ours.eager_limit, config.ours.eager_credit) = storm.eager;
    config.ours.dead_after_ms = 100_000;
    config.hold_until_placed = storm.hold;
    config.addressed = true;
    config.bounds.max_operations = storm.capacity;
    (config.bounds.backlog, config.ack_batch) = (storm.backlog, storm.ack_batch);
    config.bounds.vain_windows = storm.vain_windows;
    let [ours, theirs] = storm.limits.map(|limits| limited(&config, limits));
    let mut pair = Pair::of(ours, theirs, storm.seed);
    pair.fault_plan.jitter = storm.jitter;
    pair.fault_plan.frames = storm.frames;
    pair.fault_plan.data = storm.data;
    pair.fault_plan.quiet = storm.quiet;
    pair.fault_plan.holds = storm.holds;
    pair
}

fn blow(storm: &Storm) {
    let mut pair = fault_plan(storm);
    let mut random = Random(!storm.seed);
    let mut tags = Vec::new();
    for _ in 0..storm.operations {
        let tag = if random.chance(100 - storm.unusual) {
            0
        } else {
            random.below(3)
        };
        let side = usize::from(storm.both_ways && random.chance(50));
        tags.push((side, tag, true));
        tags.push((1 - side, tag, false));
    }
    for at in (1..tags.len()).rev() {
        let to = at - random.below(at.min(12) as u64 + 1) as usize;
        tags.swap(at, to);
    }
    // The slowest of all, as a bound of one step.
    let slow = [
        storm.frames[0],
        storm.frames[1],
        storm.data,
        storm.quiet,
        Some(storm.jitter),
    ];
    let slow = slow.into_iter().flatten().max().unwrap_or(1);
    let mut live = Vec::new();
    let mut count = 0;
    for (side, tag, sends) in tags {
        count += 1;
        if random.chance(storm.stops) {
            let side = random.below(2) as usize;
            let until = pair.now + Duration::from_micros(random.below(slow * 20));
            let stopped = &mut pair.fault_plan.stopped[side];
            *stopped = until.max(*stopped);
        }
        if storm.stuck.is_some_and(|after| count > after) {
            pair.fault_plan.no_quiet = true;
        }
        if let Some((after, closes)) = storm.close
            && count == after
        {
            pair.run(pair.fault_plan.stopped[closes].saturating_since(pair.now));
            pair.with(closes, |session, now| session.close(now, CLOSES));
        }
        if pair
            .sides
            .iter()
            .any(|side| side.closed.is_some() || side.session.ended())
        {
            break;
        }
        let usual = random.chance(100 - storm.unusual);
        let levels = [Level::Sent, Level::Placed, Level::Placed, Level::Verified];
        let level = match usual && !storm.mixed_levels {
            true => Level::Placed,
            false => levels[random.below(4) as usize],
        };
        let deadlines = random.chance(storm.deadlines).then(|| Deadlines {
            stall: Duration::from_micros(1 + random.below(slow * 8)),
            total: random
                .chance(30)
                .then(|| Duration::from_micros(1 + random.below(slow * 16))),
        });
        let deadlines = deadlines.or(Some(Deadlines {
            stall: Duration::from_secs(60),
            total: None,
        }));
        let is_stopped = pair.is_stopped(side);
        let session = &mut pair.sides[side].session;
        if session.closing() {
            continue;
        }
        let role = match sends {
            true => Role::Sender,
            false => Role::Receiver,
        };
        let full = session.operations.len(role) >= storm.capacity;
        if !full && !is_stopped {
            let operation = if sends {
                let bytes = match usual {
                    true => 20_000,
                    false => [0, 1, 4096, 5000, 16_384, 60_000, 200_000][random.below(7) as usize],
                };
                let session = &pair.sides[side].session;
                let mut request = match random.below(10) {
                    0..4 if session.eager_allowed(bytes) => eager(tag, bytes as usize, level),
                    4..7 if session.exposed_allowed(bytes) => exposed(tag, bytes as u32, level),
                    _ => send(tag, bytes, level),
                };
                request.deadlines = deadlines;
                if random.chance(30) {
                    let agreed = pair.sides[side].session.agreed();
                    request.chunk_bytes = agreed.map(|agreed| 4 * agreed.chunk_bytes);
                }
                pair.send(side, request)
            } else {
                let capacity = match usual {
                    true => 20_000,
                    false if random.chance(80) => 200_000,
                    false => 5000,
                };
                let mut request = receive(tag, capacity, level);
                request.deadlines = deadlines;
                request.fenced = storm.fences && random.chance(20);
                pair.receive(side, request)
            };
            live.push((side, operation));
        }
        let pause = match random.below(4) {
            0 => 0,
            1 => random.below(storm.jitter * 2),
            2 => random.below(slow / 2 + 1),
            _ => random.below(slow * 3),
        };
        pair.run(Duration::from_micros(pause));
        pair.assert_in_time();
        if random.chance(storm.cancels) && !live.is_empty() {
            // Mostly young ones.
            let back = random.below(live.len().min(6) as u64) as usize;
            let at = match random.chance(80) {
                true => live.len() - 1 - back,
                false => random.below(live.len() as u64) as usize,
            };
            let (side, operation) = live[at];
            if !pair.is_stopped(side) {
                pair.with(side, |session, now| session.cancel(now, operation));
            }
        }
    }
    // What waits for room does so for as long as others wait for receives that have ended.
    pair.settle(Duration::from_secs(10_000));
    pair.run(Duration::from_secs(5));
    let alive = pair.sides.iter().all(|side| side.closed.is_none());
    if alive && storm.stuck.is_none() {
        for side in 0..2 {
            for tag in 0..3 {
                while pair.sides[side].session.matching.waits(Tag(tag)) {
                    pair.receive(side, receive(tag, 200_000, Level::Placed));
                    pair.settle(Duration::from_secs(100));
                }
            }
        }
        pair.settle(Duration::from_secs(100));
        pair.run(Duration::from_secs(20));
        let alive = pair.sides.iter().all(|side| side.closed.is_none());
        if alive && !pair.sides.iter().any(|side| side.session.closing()) {
            pair.assert_clean();
        }
        assert!(alive || storm.close.is_some(), "{:?}", pair.sides[0].closed);
    }
    pair.assert_matched_in_order();
    // Both sides name the same message.
    for at in 0..2 {
        for (operation, watched) in &pair.sides[at].operations {
            let Some(Ok(done)) = &watched.outcome else {
                continue;
            };
            if operation.sent_transfer().is_some() {
                continue;
            }
            let (transfer, _) = watched.matched.expect("it succeeded");
            let transfer = pair.message(at, transfer);
            let sent = &pair.sides[1 - at].operations[&OperationId::new(Role::Sender, transfer.0)];
            assert_eq!((sent.tag, sent.bytes), (watched.tag, done.bytes));
        }
    }
    if pair.sides.iter().all(|side| side.closed.is_none()) {
        pair.with(0, |session, now| session.close(now, CLOSES));
    }
    pair.run(2 * CLOSES);
    assert!(
        pair.sides.iter().all(|side| side.closed.is_some()),
        "closes"
    );
    if storm.stuck.is_none() {
        for side in &pair.sides {
            assert_eq!(side.closed, Some(None), "in order");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_weather_every_operation_ends_once_and_rightly(storm in any_storm()) {
        blow(&storm);
    }
}
