//! Operations on lists of pieces.

use std::sync::Arc;

use proptest::prelude::*;

use super::hostile::{drain_at, least_time, session};
use super::one_sided::{
    SECOND, at_every_level, get, notification, notified, place, put, refused, secret, waiting,
};
use super::pair::Pair;
use super::*;
use crate::frame::{Extent, Frame, Limits, RefuseReason, TransferId};
use crate::pieces::PieceList;
use crate::window::{Place, Rights};

const ROOM: u64 = 1 << 20;

fn list(pieces: impl IntoIterator<Item = (Place, u64)>) -> PieceList {
    let mut list = PieceList::default();
    for (place, length) in pieces {
        list.push(&place, length).unwrap();
    }
    list
}

/// So many pieces of so many bytes, twice as far apart.
fn strided(window: u64, count: u64, length: u64) -> PieceList {
    list((0..count).map(|at| (place(window, at * 2 * length), length)))
}

fn add(pair: &mut Pair, list: &PieceList) -> u64 {
    let list = Arc::new(list.clone());
    pair.with(0, |session, _| session.add_pieces(list)).unwrap()
}

fn expose(pair: &mut Pair, rights: Rights) -> u64 {
    pair.sides[1].session.expose(secret(7), ROOM, rights)
}

#[test]
fn puts_and_gets_of_lists_arrive_and_lists_serve_again() {
    for addressed in [false, true] {
        let mut config = config();
        (config.hold_until_placed, config.addressed) = (addressed, addressed);
        let mut pair = Pair::new(config, 4);
        let window = expose(&mut pair, Rights::GetAndPut);
        let mut operations = Vec::new();
        for (count, length) in [(1, 1), (100, 7), (128, 4096)] {
            let pieces = strided(window, count, length);
            let (list, bytes) = (add(&mut pair, &pieces), pieces.bytes());
            for _ in 0..2 {
                operations.extend(at_every_level(&mut pair, bytes, list));
            }
            pair.with(0, |session, _| session.drop_pieces(list));
        }
        pair.settle(SECOND * 20);
        for (bytes, operation) in operations {
            assert_eq!(pair.success(0, operation).bytes, bytes);
        }
        pair.run(SECOND);
        pair.assert_clean();
        let refused = pair.with(0, |session, now| {
            session.send(now, put(1, Level::Placed, 0))
        });
        assert!(matches!(
            refused,
            Err(RequestError::NotListed { list: 0, bytes: 1 })
        ));
    }
}

#[test]
fn rule_13_every_start_checks_window_and_rights_again() {
    let mut pair = Pair::new(config(), 3);
    let window = expose(&mut pair, Rights::Put);
    let list = add(&mut pair, &strided(window, 10, 100));
    let first = pair.send(0, put(1000, Level::Placed, list));
    pair.settle(SECOND);
    pair.success(0, first);
    let read = pair.get(0, get(1000, Level::Placed, list));
    pair.settle(SECOND);
    assert_eq!(
        refused(&pair.error(0, read).cause),
        RefuseReason::NotPermitted
    );
    pair.with(1, |session, now| session.revoke(now, window));
    let second = pair.send(0, put(1000, Level::Placed, list));
    pair.settle(SECOND);
    assert_eq!(
        refused(&pair.error(0, second).cause),
        RefuseReason::UnknownWindow
    );
    pair.run(SECOND);
    pair.assert_clean();
}

#[test]
fn rule_14_one_bad_piece_refuses_all_before_the_first_byte() {
    let mut pair = Pair::new(config(), 5);
    let good = expose(&mut pair, Rights::GetAndPut);
    let readable = expose(&mut pair, Rights::Get);
    let wrong = Place {
        secret: secret(8),
        ..place(good, 0)
    };
    for (piece, length, reason) in [
        (place(good, ROOM - 99), 100, RefuseReason::OutOfRange),
        (place(good, ROOM), 1, RefuseReason::OutOfRange),
        (place(readable, 0), 100, RefuseReason::NotPermitted),
        (wrong, 100, RefuseReason::UnknownWindow),
        (place(77, 0), 100, RefuseReason::UnknownWindow),
    ] {
        let pieces = list([(place(good, 500), 50), (piece, length)]);
        let list = add(&mut pair, &pieces);
        let operation = pair.send(0, put(pieces.bytes(), Level::Placed, list));
        pair.settle(SECOND);
        let error = pair.error(0, operation);
        assert_eq!(
            (refused(&error.cause), error.delivered),
            (reason, Delivered::None)
        );
    }
    assert!(pair.sides[1].accepted.is_empty());
}

#[test]
fn rule_13_whoever_names_pieces_holds_back_at_the_bound() {
    let mut pair = Pair::new(config(), 5);
    let window = expose(&mut pair, Rights::Put);
    let most = Limits::default().pieces;
    let half: Vec<_> = (0..2)
        .map(|_| list((0..u64::from(most) / 2).map(|at| (place(window, at * 2), 1))))
        .collect();
    let first = add(&mut pair, &half[0]);
    let second = add(&mut pair, &half[1]);
    let more = list([(place(window, 0), 1)]);
    let full = RequestError::TooManyPieces { most };
    let refused = pair.with(0, |session, _| session.add_pieces(Arc::new(more.clone())));
    assert_eq!(refused, Err(full));
    pair.with(0, |session, _| session.drop_pieces(first));
    let third = add(&mut pair, &more);
    pair.settle(SECOND);
    let bytes = half[1].bytes();
    let running: Vec<_> = (0..2)
        .map(|_| pair.send(0, put(bytes, Level::Placed, second)))
        .collect();
    let waits = pair.send(0, put(1, Level::Placed, third));
    let session = &pair.sides[0].session;
    assert!(session.queue_moved(waits).is_some(), "it waits for others");
    pair.settle(SECOND * 10);
    pair.success(0, waits);
    running
        .iter()
        .for_each(|one| assert_eq!(pair.success(0, *one).bytes, bytes));
}

#[test]
fn a_list_names_no_more_windows_than_its_owner_takes() {
    for most in 1..4 {
        let limits = Limits {
            list_windows: most,
            ..Limits::default()
        };
        let mut pair = Pair::of(config(), limited(&config(), limits), 5);
        let windows: Vec<u64> = (0..=most).map(|_| expose(&mut pair, Rights::Put)).collect();
        let of = |windows: &[u64]| list(windows.iter().map(|window| (place(*window, 0), 1)));
        let (fits, more) = (of(&windows[1..]), of(&windows));
        let refused = pair.with(0, |session, _| session.add_pieces(Arc::new(more.clone())));
        assert_eq!(refused, Err(RequestError::TooManyWindows { most }));
        let fits = add(&mut pair, &fits);
        let put = pair.send(0, put(most.into(), Level::Placed, fits));
        pair.settle(SECOND);
        pair.success(0, put);
        let part = more.parts().remove(0);
        let owner = &mut pair.sides[1].session;
        let told = owner.frame(
            pair.now,
            Frame::Pieces {
                list: 1,
                last: true,
                part,
            },
        );
        assert!(
            matches!(told, Err(SessionError::TooMany { .. })),
            "{told:?}"
        );
    }
}

#[test]
fn rule_14_each_piece_counts_for_256_bytes_of_credit() {
    let mut pair = Pair::new(config(), 7);
    let window = expose(&mut pair, Rights::Put);
    // 16,000 bytes of the limit, and 249,600 and 600 of the credit of 262,144 bytes.
    let pieces = strided(window, 975, 1);
    let list = add(&mut pair, &pieces);
    let small = |to| SendRequest {
        to,
        ..eager(0, 975, Level::Placed)
    };
    let mut to = put(975, Level::Placed, list).to;
    for _ in 0..2 {
        pair.send(0, small(to));
    }
    let mut frames = Vec::new();
    pair.run(Duration::from_millis(20));
    for frame in &pair.sides[1].frames_in {
        if let Frame::Eager { to, .. } | Frame::Waiting { to, .. } = frame {
            frames.push((frame.name(), *to));
        }
    }
    if let Destination::Put { left, .. } = &mut to {
        // The usual 30 s, and not less.
        left.stall_ms = 30_001;
    }
    assert_eq!(frames, [("eager", to), ("waiting", to)]);
    // A peer that does not hold back is refused.
    let mut session = session(config());
    session.expose(secret(7), ROOM, Rights::Put);
    session
        .frame(Time(0), part(0, true, &strided(0, 975, 1)))
        .unwrap();
    let put = |transfer| Frame::Eager {
        transfer: TransferId(transfer),
        level: Level::Placed,
        to: put(975, Level::Placed, 0).to,
        payload: vec![1; 975].into(),
    };
    session.frame(Time(0), put(0)).unwrap();
    let used = 2 * (975 + 975 * 256);
    let refused = session.frame(Time(0), put(1)).unwrap_err();
    assert!(
        refused.to_string().contains(&format!(" {used} bytes of ")),
        "{refused}"
    );
}

#[test]
fn rule_14_a_chunk_of_many_pieces_is_shorter() {
    let granted = |count, length| {
        let mut pair = Pair::new(config(), 7);
        let window = expose(&mut pair, Rights::Put);
        let pieces = strided(window, count, length);
        let list = add(&mut pair, &pieces);
        pair.send(0, put(pieces.bytes(), Level::Placed, list));
        pair.settle(SECOND);
        let grant = |frame: &Frame| match frame {
            Frame::Grant { grant, .. } => Some(grant.chunk_bytes),
            _ => None,
        };
        pair.sides[0].frames_in.iter().find_map(grant).unwrap()
    };
    // Of 512 KiB in work: the bytes and 256 more for each piece.
    assert_eq!(granted(1, 1 << 19), 512 << 10);
    assert_eq!(granted(1 << 11, 256), 256 << 10);
    assert_eq!(granted(1 << 17, 4), 8 << 10);
    assert_eq!(granted(1 << 18, 1), 4 << 10);
}

/// Parts of lists of the peer, and what names them; the last frame is one too many.
fn hostile(frames: Vec<Frame>) -> SessionError {
    let mut session = session(config());
    session.expose(secret(7), ROOM, Rights::GetAndPut);
    let mut frames = frames.into_iter().peekable();
    while let Some(frame) = frames.next() {
        let taken = session.frame(Time(0), frame);
        drain_at(&mut session, Time(0));
        match frames.peek() {
            Some(_) => taken.unwrap(),
            None => return taken.unwrap_err(),
        }
    }
    panic!("no frame")
}

fn part(list: u64, last: bool, pieces: &PieceList) -> Frame {
    let part = pieces.parts().remove(0);
    Frame::Pieces { list, last, part }
}

#[test]
fn rule_13_lists_beyond_the_bound_end_the_connection() {
    let one = strided(0, 1, 1);
    let get = |list, bytes| Frame::Get {
        request: 0,
        from: Extent::Pieces(list),
        bytes,
        level: Level::Placed,
        left: TimeLeft::ANY,
    };
    let unexpected = |error: SessionError| matches!(error, SessionError::Unexpected { .. });
    assert!(unexpected(hostile(vec![part(1, true, &one)])));
    assert!(unexpected(hostile(vec![
        part(0, true, &one),
        part(0, true, &one)
    ])));
    assert!(unexpected(hostile(vec![part(0, false, &one), get(0, 1)])));
    assert!(unexpected(hostile(vec![
        part(0, true, &one),
        Frame::DropPieces { list: 1 }
    ])));
    let drop = Frame::DropPieces { list: 0 };
    assert!(unexpected(hostile(vec![
        part(0, true, &one),
        drop.clone(),
        drop.clone()
    ])));
    assert!(unexpected(hostile(vec![
        part(0, true, &one),
        drop,
        get(0, 1)
    ])));
    let put = vec![waiting(0, 1, put(1, Level::Placed, 0).to)];
    assert!(unexpected(hostile(put)));
    let bytes = Frame::Pieces {
        list: 0,
        last: true,
        part: vec![0xff],
    };
    assert!(unexpected(hostile(vec![bytes])));
    let most = Limits::default().pieces.into();
    let many = strided(0, most, 1);
    let full = hostile(vec![part(0, true, &many), part(1, false, &one)]);
    assert!(matches!(full, SessionError::TooMany { .. }));
    let nothing = |list| part(list, true, &PieceList::default());
    let mut empty: Vec<_> = (0..=most).map(nothing).collect();
    assert!(matches!(
        hostile(std::mem::take(&mut empty)),
        SessionError::TooMany { .. }
    ));
}

#[derive(Clone, Debug)]
enum Step {
    Add(u64, u64),
    Drop(usize),
    Put(usize, bool),
    Get(usize),
    Cancel(usize),
    Revoke(usize),
    Expose,
    Run(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let which = || 0usize..6;
    prop_oneof![
        4 => (1u64..40, 1u64..3000).prop_map(|(count, length)| Step::Add(count, length)),
        1 => which().prop_map(Step::Drop),
        6 => (which(), any::<bool>()).prop_map(|(list, behind)| Step::Put(list, behind)),
        6 => which().prop_map(Step::Get),
        1 => which().prop_map(Step::Cancel),
        1 => which().prop_map(Step::Revoke),
        1 => Just(Step::Expose),
        4 => (1u64..2000).prop_map(Step::Run),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// The model: an operation on a list that lies in its window may succeed; on one that does not,
    /// or whose window was closed before it began, it never does. Whatever was cancelled, closed or
    /// cut, each ends once and nothing is left.
    #[test]
    fn random_operations_on_lists_end_as_windows_allow(
        addressed: bool,
        seed: u64,
        steps in prop::collection::vec(any_step(), 1..60),
        cut in prop::option::weighted(0.3, 0u64..3000),
        limits in [any_limits(40), any_limits(40)],
    ) {
        let mut config = small_chunks(2);
        (config.hold_until_placed, config.addressed) = (addressed, addressed);
        let [ours, theirs] = limits.map(|limits| limited(&config, limits));
        let mut pair = Pair::of(ours, theirs, seed);
        let mut windows = vec![(expose(&mut pair, Rights::GetAndPut), true)];
        // Number, bytes, window, whether it fits there.
        let mut lists: Vec<(u64, u64, usize, bool)> = Vec::new();
        let mut operations = Vec::new();
        for step in steps {
            match step {
                Step::Add(count, length) => {
                    let window = windows.len() - 1;
                    let far = if count % 7 == 0 { ROOM } else { 0 };
                    let pieces = list((0..count).map(|at| (place(windows[window].0, far + at * 2 * length), length)));
                    let list = Arc::new(pieces.clone());
                    match pair.with(0, |session, _| session.add_pieces(list)) {
                        Ok(list) => lists.push((list, pieces.bytes(), window, far == 0)),
                        Err(error) => {
                            let most = limits[1].pieces;
                            prop_assert_eq!(error, RequestError::TooManyPieces { most });
                        }
                    }
                }
                Step::Drop(at) if at < lists.len() => {
                    let (list, ..) = lists.remove(at);
                    pair.with(0, |session, _| session.drop_pieces(list));
                }
                Step::Put(at, behind) if at < lists.len() => {
                    let (list, bytes, window, fits) = lists[at];
                    let request = put(bytes, Level::Placed, list);
                    let request = if behind { notified(request) } else { request };
                    let operation = pair.send(0, request);
                    operations.push((operation, fits && windows[window].1));
                    if let (true, Some(first)) = (behind, operation.sent_transfer()) {
                        pair.send(0, notification(5, first, 1));
                    }
                }
                Step::Get(at) if at < lists.len() => {
                    let (list, bytes, window, fits) = lists[at];
                    let (request, ends_well) = (get(bytes, Level::Placed, list), fits && windows[window].1);
                    let operation = match pair.random.chance(50) {
                        true => {
                            let is_whole = ends_well && pair.random.chance(50);
                            pair.read(0, request, is_whole)
                        }
                        false => pair.get(0, request),
                    };
                    operations.push((operation, ends_well));
                }
                Step::Cancel(at) if at < operations.len() => {
                    let operation = operations[at].0;
                    pair.with(0, |session, now| session.cancel(now, operation));
                }
                Step::Revoke(at) if at < windows.len() => {
                    windows[at].1 = false;
                    let window = windows[at].0;
                    pair.with(1, |session, now| session.revoke(now, window));
                }
                Step::Expose => windows.push((expose(&mut pair, Rights::GetAndPut), true)),
                Step::Run(micros) => pair.run(Duration::from_micros(micros)),
                _ => {}
            }
        }
        if let Some(after) = cut {
            pair.run(Duration::from_micros(after));
            pair.fault_plan.cut = true;
        }
        pair.settle(SECOND * 60);
        for (operation, allowed) in operations {
            prop_assert!(allowed || pair.outcome(0, operation).is_some_and(Result::is_err));
        }
        pair.run(SECOND * 20);
        if cut.is_none() {
            pair.assert_clean();
        }
    }
}

/// A list is checked as it comes: what names it afterwards costs the same, however many pieces and
/// windows it has.
#[test]
fn what_names_a_long_list_costs_as_with_a_short_one() {
    let now = Time(0);
    let cost = |windows: u64, each: u64, is_bad: bool| {
        let mut owner = session(config());
        for _ in 0..windows {
            owner.expose(secret(7), ROOM, Rights::Get);
        }
        // In no order, so that no two are one run; the last one ends one byte behind its window.
        let pieces = (0..windows).flat_map(|window| {
            (0..each).map(move |at| (place(window, (at * 2 + at % 3) % (ROOM - 1)), 1))
        });
        let bad = is_bad.then_some((place(windows - 1, ROOM), 1));
        let list = list(pieces.chain(bad));
        let parts = list.parts();
        for (at, part) in parts.iter().enumerate() {
            let part = Frame::Pieces {
                list: 0,
                last: at + 1 == parts.len(),
                part: part.clone(),
            };
            owner.frame(now, part).unwrap();
        }
        let mut request = 0;
        least_time(|| {
            for _ in 0..50 {
                let get = Frame::Get {
                    request,
                    from: Extent::Pieces(0),
                    bytes: list.bytes(),
                    level: Level::Placed,
                    left: TimeLeft::ANY,
                };
                owner.frame(now, get).unwrap();
                let (frames, actions) = drain_at(&mut owner, now);
                assert_eq!(
                    (frames.len(), actions.len()),
                    if is_bad { (1, 0) } else { (0, 1) }
                );
                if !is_bad {
                    owner.refuse_get(request, RefuseReason::MemoryFailed);
                    drain_at(&mut owner, now);
                }
                request += 1;
            }
        })
    };
    for is_bad in [false, true] {
        let short = cost(1, 2, is_bad);
        let [long, wide] = [cost(1, 200_000, is_bad), cost(20_000, 5, is_bad)];
        assert!(long < 20 * short, "{short:?} and {long:?}");
        assert!(wide < 20 * short, "{short:?} and {wide:?}");
    }
}
