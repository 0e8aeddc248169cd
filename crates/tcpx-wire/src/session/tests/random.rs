//! Random schedules of two honest sides: whatever happens, every operation ends once, rightly.

use proptest::prelude::*;

use super::model::Random;
use super::pair::Pair;
use super::*;
use crate::frame::Limits;
use crate::plan::Taper;

#[derive(Clone, Debug)]
struct Schedule {
    seed: u64,
    channels: u16,
    send_window: u16,
    receive_window: u16,
    jitter: u64,
    operations: u64,
    /// Percent of operations that are cancelled.
    cancels: u64,
    hold_until_placed: bool,
    cancellable: bool,
    close: bool,
    /// Acknowledgements and eager payloads wait for others.
    holds: bool,
    /// Receives are posted to the peer; most messages follow each other as the receives do.
    addressed: bool,
    /// Shorter chunks at the end of what each side receives.
    tapers: [Option<Taper>; 2],
    limits: [Limits; 2],
    eager: (u32, u32),
}

fn any_taper() -> impl Strategy<Value = Option<Taper>> {
    (0u8..3, 1u16..6).prop_map(|(halvings, each)| Taper::new(halvings, each))
}

fn any_schedule() -> impl Strategy<Value = Schedule> {
    (
        (any::<u64>(), 1u16..9, 1u16..6, 1u16..6),
        (1u64..3000, 1u64..80),
        prop_oneof![Just(0u64), 1u64..60],
        ([any_limits(1), any_limits(1)], any_eager()),
        (
            any::<bool>(),
            prop::bool::weighted(0.8),
            any::<bool>(),
            any::<bool>(),
            prop::bool::weighted(0.6),
            [any_taper(), any_taper()],
        ),
    )
        .prop_map(
            |(
                (seed, channels, send_window, receive_window),
                (jitter, operations),
                cancels,
                (limits, eager),
                flags,
            )| {
                let (hold_until_placed, cancellable, close, holds, addressed, tapers) = flags;
                Schedule {
                    seed,
                    channels,
                    send_window,
                    receive_window,
                    jitter,
                    operations,
                    cancels,
                    hold_until_placed,
                    cancellable: cancellable || addressed,
                    close,
                    holds,
                    addressed,
                    tapers,
                    limits,
                    eager,
                }
            },
        )
}

fn any_level(random: &mut Random) -> Level {
    [Level::Sent, Level::Placed, Level::Placed, Level::Verified][random.below(4) as usize]
}

fn play(schedule: &Schedule) {
    let mut config = small_chunks(schedule.channels);
    config.ours.send_window = schedule.send_window;
    config.ours.receive_window = schedule.receive_window;
    (config.ours.eager_limit, config.ours.eager_credit) = schedule.eager;
    config.hold_until_placed = schedule.hold_until_placed;
    config.cancellable = schedule.cancellable;
    config.addressed = schedule.addressed;
    if schedule.tapers.iter().any(Option::is_some) {
        config.ours.chunk_bytes = 4 * CHUNK_GRAIN_BYTES;
    }
    let [ours, theirs] = [0, 1].map(|side| Config {
        taper: schedule.tapers[side],
        ..limited(&config, schedule.limits[side])
    });
    let mut pair = Pair::of(ours, theirs, schedule.seed);
    pair.fault_plan.jitter = schedule.jitter;
    pair.fault_plan.holds = schedule.holds;
    let mut random = Random(!schedule.seed);
    // One entry per message: what is sent from which side, and the receive that must match it.
    let mut tags = Vec::new();
    for _ in 0..schedule.operations {
        let alike = schedule.addressed && random.chance(90);
        let tag = if alike { 0 } else { random.below(4) };
        let side = if schedule.addressed && random.chance(95) {
            0
        } else {
            random.below(2) as usize
        };
        tags.push((side, tag, true));
        let (side, tag, _) = tags[tags.len() - 1];
        tags.push((1 - side, tag, false));
    }
    for at in (1..tags.len()).rev() {
        let to = match schedule.addressed {
            false => random.below(at as u64 + 1) as usize,
            true => at - random.below(at.min(9) as u64 + 1) as usize,
        };
        tags.swap(at, to);
    }
    let mut live = Vec::new();
    let mut cancelled = Vec::new();
    for (side, tag, sends) in tags {
        if pair.sides[side].closed.is_some() || pair.sides[side].session.closing() {
            break;
        }
        let usual = schedule.addressed && random.chance(90);
        let level = if usual {
            Level::Placed
        } else {
            any_level(&mut random)
        };
        let operation = if sends {
            let bytes = match usual {
                true => 20_000,
                false => [0, 1, 4096, 5000, 16_384, 60_000, 200_000][random.below(7) as usize],
            };
            let session = &pair.sides[side].session;
            let request = if random.chance(50) && session.eager_allowed(bytes) {
                eager(tag, bytes as usize, level)
            } else if random.chance(40) && session.exposed_allowed(bytes) {
                exposed(tag, bytes as u32, level)
            } else {
                send(tag, bytes, level)
            };
            pair.send(side, request)
        } else {
            let capacity = match usual {
                true => 20_000,
                false if random.chance(90) => 200_000,
                false => 5000,
            };
            let mut request = receive(tag, capacity, level);
            request.fenced = random.chance(10);
            pair.receive(side, request)
        };
        live.push((side, operation));
        pair.run(Duration::from_micros(random.below(schedule.jitter * 2)));
        if random.chance(schedule.cancels) {
            let (side, operation) = live[random.below(live.len() as u64) as usize];
            pair.with(side, |session, now| session.cancel(now, operation));
            cancelled.push((side, operation));
        }
    }
    // What waits for room does so for as long as others wait for receives that have ended.
    pair.settle(Duration::from_secs(10_000));
    pair.run(Duration::from_secs(1));
    // Eager payloads whose senders ended at level sent, and whose receives were cancelled.
    for side in 0..2 {
        for tag in 0..4 {
            while pair.sides[side].closed.is_none()
                && pair.sides[side].session.matching.waits(Tag(tag))
            {
                pair.receive(side, receive(tag, 200_000, Level::Placed));
            }
        }
    }
    pair.settle(Duration::from_secs(10_000));
    pair.run(Duration::from_secs(1));
    if schedule.cancellable {
        pair.assert_clean();
        for side in 0..2 {
            assert!(pair.sides[side].closed.is_none());
        }
    }
    pair.assert_matched_in_order();
    if schedule.cancellable {
        pair.assert_ended_by(&cancelled);
    }
    if schedule.cancels == 0 && !schedule.addressed {
        for side in &pair.sides {
            for stream in [&side.sends.sequences, &side.receives.sequences] {
                let chunks = stream.len() as u64;
                assert!(stream.iter().copied().eq(0..chunks), "sequences have gaps");
            }
        }
    }
    if schedule.close {
        pair.with(0, |session, now| {
            session.close(now, Duration::from_secs(100))
        });
        pair.run(Duration::from_secs(1));
        assert!(pair.sides.iter().all(|side| side.closed.is_some()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_operation_ends_once_and_successes_are_true(schedule in any_schedule()) {
        play(&schedule);
    }
}
