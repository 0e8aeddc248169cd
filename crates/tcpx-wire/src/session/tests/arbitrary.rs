//! Any frame, report and request in any order.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::hostile::{drain_at, session};
use super::*;
use crate::ChunkPlan;
use crate::frame::{
    CancelReason, Extent, Frame, Notified, NumberUse, PlacedChunks, RefuseReason, Role, TransferId,
};
use crate::pieces::PieceList;
use crate::plan::Taper;
use crate::window::{Place, Rights, WindowSecret};

fn any_level() -> impl Strategy<Value = Level> {
    prop_oneof![
        Just(Level::Sent),
        Just(Level::Placed),
        Just(Level::Verified)
    ]
}

/// A chunk size with or without shorter chunks, which may not fit.
/// A grant of chunks of these numbers.
fn any_grant(numbers: impl Strategy<Value = u64>) -> impl Strategy<Value = Grant> {
    (numbers, any_level(), any_cut()).prop_map(|(window, level, (chunk_bytes, taper))| Grant {
        chunk_bytes,
        window,
        level,
        taper,
    })
}

fn any_cut() -> impl Strategy<Value = (u32, Option<Taper>)> {
    let taper = (0u8..3, 1u16..4).prop_map(|(halvings, each)| Taper::new(halvings, each));
    prop_oneof![
        2 => Just((4096, None)),
        1 => (prop_oneof![Just(4096), Just(8192), Just(16_384)], taper),
    ]
}

fn any_use() -> impl Strategy<Value = NumberUse> {
    prop_oneof![
        Just(NumberUse::Skipped),
        Just(NumberUse::Used),
        Just(NumberUse::Ended),
        Just(NumberUse::Forgotten)
    ]
}

/// Frames with small numbers, so that many of them mean something.
fn any_frame() -> impl Strategy<Value = Frame> {
    let id = || {
        prop_oneof![
            3 => (0u64..6).prop_map(TransferId),
            1 => (0u64..6).prop_map(TransferId::to_window),
        ]
    };
    let role = || prop_oneof![Just(Role::Sender), Just(Role::Receiver)];
    let number = || prop_oneof![0u64..4, Just(100_000), any::<u64>()];
    prop_oneof![
        6 => (id(), any_level(), number(), any_destination()).prop_map(
            |(transfer, level, bytes, to)| Frame::Waiting { transfer, level, bytes, to }
        ),
        3 => (id(), any_level(), any_destination(), 0usize..40).prop_map(
            |(transfer, level, to, bytes)| {
                let payload = vec![0; bytes].into();
                Frame::Eager { transfer, level, to, payload }
            }
        ),
        3 => (id(), any_level(), any_destination(), any::<(u16, u64)>(), 0u32..40).prop_map(
            |(transfer, level, to, (entry, mark), bytes)| {
                let at = Exposure { entry, mark, bytes };
                Frame::Exposed { transfer, level, to, at }
            }
        ),
        4 => (id(), any_grant(number())).prop_map(|(transfer, grant)| {
            Frame::Grant { transfer, grant }
        }),
        1 => (id(), number()).prop_map(|(transfer, capacity)| {
            Frame::Refuse { transfer, reason: RefuseReason::TooLarge { capacity } }
        }),
        1 => id().prop_map(|transfer| Frame::EagerDone { transfer }),
        1 => (0u32..50).prop_map(|bytes| Frame::EagerCredit { bytes }),
        4 => (id(), 0u32..30).prop_map(|(transfer, chunk)| {
            Frame::Placed { transfer, chunks: PlacedChunks::single(chunk) }
        }),
        1 => (id(), 0u128..3).prop_map(|(transfer, tag)| Frame::Digest { transfer, tag }),
        1 => (id(), 0u128..3, any::<bool>()).prop_map(|(transfer, tag, matches)| {
            Frame::Verdict { transfer, tag, matches }
        }),
        2 => (id(), role()).prop_map(|(transfer, from)| {
            Frame::Cancel { transfer, from, reason: CancelReason::Requested, detail: "no".into() }
        }),
        2 => (id(), role()).prop_map(|(transfer, from)| Frame::Cancelled { transfer, from }),
        1 => (0u64..2).prop_map(|counter| Frame::Heartbeat { counter }),
        3 => (number(), number(), any_grant(number())).prop_map(|(number, capacity, grant)| {
            Frame::Posted { tag: Tag(1), number, capacity, grant }
        }),
        2 => number().prop_map(|number| Frame::Unpost { tag: Tag(1), number }),
        2 => (number(), any_use()).prop_map(|(number, used)| {
            Frame::Unposted { tag: Tag(1), number, used }
        }),
        1 => number().prop_map(|number| Frame::Forget { tag: Tag(1), number }),
        1 => any::<bool>().prop_map(|forgotten| Frame::Forgotten { tag: Tag(1), forgotten }),
        4 => (0u64..4, any_extent(), number(), any_level()).prop_map(
            |(request, from, bytes, level)| {
                let left = TimeLeft::ANY;
                Frame::Get { request, from, bytes, level, left }
            }
        ),
        3 => (0u64..3, any::<bool>(), any_part()).prop_map(|(list, last, part)| {
            Frame::Pieces { list, last, part }
        }),
        1 => (0u64..3).prop_map(|list| Frame::DropPieces { list }),
        1 => (0u16..3).prop_map(|lane| Frame::Redial { lane }),
        1 => (0u64..3).prop_map(|request| {
            Frame::RefuseGet { request, reason: RefuseReason::OutOfRange }
        }),
    ]
}

/// Places in the one window that there is, as a rule.
fn any_place() -> impl Strategy<Value = Place> {
    let offset = prop_oneof![4 => 0u64..9000, 1 => any::<u64>()];
    (prop::bool::weighted(0.9), offset).prop_map(|(right, offset)| Place {
        window: 0,
        secret: WindowSecret::from_bytes([u8::from(right); 16]),
        offset,
    })
}

/// Of pieces in that window.
fn any_part() -> impl Strategy<Value = Vec<u8>> {
    let piece = (any_place(), 1u64..5000);
    prop::collection::vec(piece, 0..4).prop_map(|pieces| {
        let mut list = PieceList::default();
        for (place, length) in pieces {
            // One that wraps is left out.
            let _ = list.push(&place, length);
        }
        list.parts().remove(0)
    })
}

fn any_extent() -> impl Strategy<Value = Extent> {
    prop_oneof![
        any_place().prop_map(Extent::Place),
        (0u64..3).prop_map(Extent::Pieces)
    ]
}

fn any_notified() -> impl Strategy<Value = Notified> {
    prop_oneof![
        Just(Notified::No),
        Just(Notified::First),
        Just(Notified::Next)
    ]
}

fn any_destination() -> impl Strategy<Value = Destination> {
    let number = prop_oneof![0u64..4, Just(100_000), any::<u64>()];
    prop_oneof![
        12 => (0u64..3, number)
            .prop_map(|(tag, number)| Destination::Receive { tag: Tag(tag), number }),
        6 => (any_extent(), any_notified())
            .prop_map(|(to, notified)| Destination::Put {
                to,
                notified,
                left: TimeLeft::ANY,
            }),
        2 => (0u64..3).prop_map(|request| Destination::Reply { request }),
        2 => (0u64..6, 0u32..4).prop_map(|(first, count)| {
            Destination::Notification { first: TransferId(first), count }
        }),
    ]
}

#[derive(Clone, Debug)]
enum Input {
    Frame(Frame),
    Send(u64, Level),
    Eager(usize, Level),
    Receive(u64, Level),
    Get(u64, Level),
    Revoke,
    Sent(usize, u32),
    Arrived(usize, u32, u64),
    InWindow(usize, u32, u64),
    Fence(usize),
    Placed(usize, u32),
    Copied(usize),
    Digest(usize, u32),
    Quiet(usize),
    Cancel(usize),
    Wait(u64),
}

fn any_input() -> impl Strategy<Value = Input> {
    let which = || 0usize..8;
    prop_oneof![
        12 => any_frame().prop_map(Input::Frame),
        3 => (0u64..200_000, any_level()).prop_map(|(bytes, level)| Input::Send(bytes, level)),
        1 => (0usize..100, any_level()).prop_map(|(bytes, level)| Input::Eager(bytes, level)),
        3 => (0u64..200_000, any_level()).prop_map(|(bytes, level)| Input::Receive(bytes, level)),
        2 => (0u64..200_000, any_level()).prop_map(|(bytes, level)| Input::Get(bytes, level)),
        1 => Just(Input::Revoke),
        3 => (which(), 0u32..30).prop_map(|(at, chunk)| Input::Sent(at, chunk)),
        3 => (which(), 0u32..30, prop_oneof![Just(4096u64), any::<u64>()])
            .prop_map(|(at, chunk, bytes)| Input::Arrived(at, chunk, bytes)),
        3 => (which(), 0u32..30, prop_oneof![Just(20_000u64), 1..200_000u64])
            .prop_map(|(at, chunk, total)| Input::InWindow(at, chunk, total)),
        1 => which().prop_map(Input::Fence),
        3 => (which(), 0u32..30).prop_map(|(at, chunk)| Input::Placed(at, chunk)),
        1 => which().prop_map(Input::Copied),
        2 => (which(), 0u32..3).prop_map(|(at, crc32c)| Input::Digest(at, crc32c)),
        2 => which().prop_map(Input::Quiet),
        2 => which().prop_map(Input::Cancel),
        1 => (0u64..3_000_000).prop_map(Input::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// A peer and a data plane that say anything at any time: no panic, exactly one end each.
    #[test]
    fn any_input_ends_every_operation_exactly_once(
        addressed: bool,
        limits in any_limits(4),
        inputs in prop::collection::vec(any_input(), 1..120),
    ) {
        let mut config = small_chunks(3);
        config.deadlines.stall = Duration::from_secs(4);
        config.addressed = addressed;
        config.ours.limits = limits;
        let mut session = session(config);
        session.expose(WindowSecret::from_bytes([1; 16]), 10_000, Rights::GetAndPut);
        let mut now = Time(0);
        let mut operations = Vec::new();
        let mut ended = BTreeMap::new();
        let mut failed = false;
        let mut closed = 0;
        for input in inputs {
            let at = |at: usize, operations: &Vec<OperationId>| {
                operations.get(at).copied().unwrap_or_else(|| OperationId::new(Role::Receiver, at as u64))
            };
            match input {
                Input::Frame(frame) => {
                    if let Err(error) = session.frame(now, frame) {
                        let text = error.to_string();
                        prop_assert!(!text.is_empty());
                        session.fail(now, error.into());
                        failed = true;
                    }
                }
                Input::Send(bytes, level) => operations.extend(session.send(now, send(1, bytes, level))),
                Input::Eager(bytes, level) => operations.extend(session.send(now, eager(1, bytes, level))),
                Input::Receive(bytes, level) => {
                    let request = ReceiveRequest { fenced: bytes % 5 == 0, ..receive(1, bytes, level) };
                    operations.extend(session.receive(now, request));
                }
                Input::InWindow(of, chunk, total) => {
                    let operation = at(of, &operations);
                    session.window_begins(now, operation, ChunkPlan::even(total, 4096));
                    session.chunk_arrived(now, operation, chunk, 4096);
                }
                Input::Fence(of) => session.fence_reached(now, at(of, &operations)),
                Input::Get(bytes, level) => {
                    let from = Place { window: 0, secret: WindowSecret::from_bytes([1; 16]), offset: 0 };
                    let request = GetRequest { from: Extent::Place(from), bytes, level, deadlines: None };
                    operations.extend(session.get(now, request));
                }
                Input::Revoke => session.revoke(now, 0),
                Input::Sent(of, chunk) => session.chunk_sent(now, at(of, &operations), chunk),
                Input::Arrived(of, chunk, bytes) => session.chunk_arrived(now, at(of, &operations), chunk, bytes),
                Input::Placed(of, chunk) => session.chunk_placed(now, at(of, &operations), chunk),
                Input::Copied(of) => session.eager_copied(now, at(of, &operations)),
                Input::Digest(of, crc32c) => session.digest(now, at(of, &operations), crc32c, crc32c.into()),
                Input::Quiet(of) => session.data_quiet(now, at(of, &operations)),
                Input::Cancel(of) => session.cancel(now, at(of, &operations)),
                Input::Wait(micros) => {
                    now = now + Duration::from_micros(micros);
                    session.handle_timeout(now);
                }
            }
            let _ = session.snapshot(now);
            let mut actions: VecDeque<_> = drain_at(&mut session, now).1.into();
            while let Some(action) = actions.pop_front() {
                match action {
                    Action::PutArrives { transfer, .. } | Action::NotificationArrives { transfer, .. } => {
                        if transfer.0 % 3 == 2 {
                            session.refuse_arrival(transfer, RefuseReason::MemoryFailed);
                        } else {
                            operations.extend(session.accept(now, transfer));
                        }
                        actions.extend(drain_at(&mut session, now).1);
                    }
                    Action::GetArrives { request, bytes, level, .. } => {
                        let to = Destination::Reply { request };
                        let answer = SendRequest { to, ..send(0, bytes, level) };
                        operations.extend(session.send(now, answer));
                        actions.extend(drain_at(&mut session, now).1);
                    }
                    Action::Complete { operation, .. } => *ended.entry(operation).or_insert(0) += 1,
                    Action::Closed { .. } => closed += 1,
                    _ => {}
                }
            }
        }
        // Whatever happened, time ends it.
        let mut wakes = 0;
        while let Some(due) = session.next_timeout() {
            wakes += 1;
            prop_assert!(wakes < 1000, "time does not advance: {due} {session:#?}");
            now = now.max(due);
            session.handle_timeout(now);
            for action in drain_at(&mut session, now).1 {
                match action {
                    Action::Complete { operation, .. } => *ended.entry(operation).or_insert(0) += 1,
                    Action::Closed { .. } => closed += 1,
                    _ => {}
                }
            }
        }
        prop_assert_eq!(closed, 1, "failed: {}", failed);
        for operation in operations {
            prop_assert_eq!(ended.remove(&operation), Some(1));
        }
        prop_assert!(ended.is_empty());
    }
}
