use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const POOL: usize = 4096;

fn fragment(source_offset: u64, length: u32, destination_offset: u64) -> Fragment {
    Fragment {
        source_offset,
        length,
        destination_offset,
    }
}

fn built(fragments: &[Fragment], limits: Limits) -> Result<Vec<Descriptor>, ScatterError> {
    let mut descriptors = Descriptors::new();
    let result = descriptors.build(fragments, limits);
    assert_eq!(
        result.is_err(),
        descriptors.is_empty() && limits.received_bytes > 0
    );
    result.map(|()| descriptors.as_slice().to_vec())
}

fn limits(received_bytes: u64) -> Limits {
    Limits {
        pool_bytes: 1 << 40,
        destination_bytes: 1 << 40,
        received_bytes,
    }
}

/// Cuts a destination into pieces, takes each from somewhere in the pool, often right after the
/// piece before it, and shuffles them or not.
fn any_list() -> impl Strategy<Value = Vec<Fragment>> {
    let piece = (
        0u32..80,
        prop_oneof![2 => Just(None), 1 => (0..POOL as u64).prop_map(Some)],
        0u64..2,
    );
    (vec(piece, 1..60), any::<bool>()).prop_flat_map(|(pieces, shuffled)| {
        let (mut source, mut destination) = (0, 0);
        let mut list = Vec::new();
        for (length, jump, gap) in pieces {
            source = jump.unwrap_or(source).min(POOL as u64 - u64::from(length));
            destination += gap * 3;
            list.push(fragment(source, length, destination));
            source += u64::from(length);
            destination += u64::from(length);
        }
        if shuffled {
            Just(list).prop_shuffle().boxed()
        } else {
            Just(list).boxed()
        }
    })
}

fn unpack(copies: impl Iterator<Item = (usize, usize, usize)>, destination: usize) -> Vec<u8> {
    let pool: Vec<u8> = (0..POOL).map(|at| (at * 7 + at / 256) as u8).collect();
    let mut bytes = vec![0xEE; destination];
    for (source, length, to) in copies {
        bytes[to..to + length].copy_from_slice(&pool[source..source + length]);
    }
    bytes
}

proptest! {
    #[test]
    fn merged_copies_move_the_same_bytes(list in any_list()) {
        let total = list.iter().map(|piece| u64::from(piece.length)).sum();
        let end = list
            .iter()
            .map(|piece| piece.destination_offset + u64::from(piece.length))
            .max()
            .unwrap_or(0);
        let mut descriptors = Descriptors::new();
        descriptors
            .build(
                &list,
                Limits { pool_bytes: POOL as u64, destination_bytes: end, received_bytes: total },
            )
            .unwrap();
        let plain = unpack(
            list.iter().map(|piece| {
                (
                    piece.source_offset as usize,
                    piece.length as usize,
                    piece.destination_offset as usize,
                )
            }),
            end as usize,
        );
        let merged = unpack(
            descriptors.as_slice().iter().map(|copy| {
                (
                    copy.source_offset as usize,
                    copy.length as usize,
                    copy.destination_offset as usize,
                )
            }),
            end as usize,
        );
        prop_assert_eq!(merged, plain);
        prop_assert_eq!(descriptors.bytes(), total);
        prop_assert!(descriptors.len() <= list.len());
        for pair in descriptors.as_slice().windows(2) {
            let touching = pair[0].source_offset + pair[0].length == pair[1].source_offset
                && pair[0].destination_offset + u64::from(pair[0].length)
                    == pair[1].destination_offset;
            prop_assert!(!touching, "{:?} were not merged", pair);
            prop_assert!(pair[0].destination_offset < pair[1].destination_offset);
        }
    }

    #[test]
    fn any_list_is_refused_or_within_its_limits(
        raw in vec((any::<u64>(), any::<u32>(), any::<u64>()), 0..8),
        small in vec((0u64..64, 0u32..16, 0u64..64), 0..8),
        received in 0u64..128,
    ) {
        for list in [raw, small] {
            let list: Vec<Fragment> = list.into_iter().map(|(s, l, d)| fragment(s, l, d)).collect();
            let limits = Limits { pool_bytes: 70, destination_bytes: 70, received_bytes: received };
            let mut descriptors = Descriptors::new();
            if descriptors.build(&list, limits).is_ok() {
                let mut written = [false; 70];
                for copy in descriptors.as_slice() {
                    prop_assert!(copy.source_offset + copy.length <= 70);
                    for at in copy.destination_offset..copy.destination_offset + u64::from(copy.length) {
                        prop_assert!(!std::mem::replace(&mut written[at as usize], true));
                    }
                }
                prop_assert_eq!(written.iter().filter(|byte| **byte).count() as u64, received);
            } else {
                prop_assert!(descriptors.is_empty());
            }
        }
    }
}

proptest! {
    #[test]
    fn even_pieces_are_the_same_copies(
        unit in 1u32..9,
        sources in vec(0u64..9, 1..20),
        last in 1u32..12,
        odd in prop::option::of((0usize..20, 0u32..3, 0u64..2)),
        start in 0u64..5,
    ) {
        // Pages anywhere in a pool, often neighbours; the last one of any length, and perhaps one
        // that is longer or shorter or lies further away.
        let mut destination = start;
        let count = sources.len();
        let list: Vec<_> = sources.iter().enumerate().map(|(index, page)| {
            let mut length = if index + 1 == count { last } else { unit };
            if let Some((at, less, gap)) = odd && at == index {
                length = (length + 1).saturating_sub(less).max(1);
                destination += gap;
            }
            let piece = fragment(page * 8, length, destination);
            destination += u64::from(length);
            piece
        }).collect();
        let is_even = list.windows(2).all(|two| {
            two[0].length == list[0].length
                && two[0].destination_offset + u64::from(two[0].length) == two[1].destination_offset
        }) && list[count - 1].length <= list[0].length;
        let mut descriptors = Descriptors::new();
        // What was there before leaves no trace.
        descriptors.build(&[fragment(0, 3, 0), fragment(8, 3, 3)], limits(6)).unwrap();
        let total = list.iter().map(|piece| u64::from(piece.length)).sum();
        descriptors.build(&list, limits(total)).unwrap();
        let pieces = descriptors.even_pieces();
        prop_assert_eq!(pieces.is_some(), is_even && count > 1, "{:?}", list);
        if let Some(EvenPieces { start, unit, last, sources }) = pieces {
            let again: Vec<_> = sources.iter().enumerate().map(|(index, source)| {
                let length = if index + 1 == sources.len() { last } else { unit };
                fragment(u64::from(*source), length, start + index as u64 * u64::from(unit))
            }).collect();
            prop_assert_eq!(again, list);
        }
    }
}

#[test]
fn even_lists_of_neighbouring_destinations_become_one() {
    let list = |from: u64, lengths: &[u32]| {
        let mut descriptors = Descriptors::new();
        let mut to = 0;
        let pieces = lengths.iter().enumerate().map(|(index, length)| {
            to += u64::from(*length);
            fragment(from + 100 * index as u64, *length, to - u64::from(*length))
        });
        let pieces: Vec<_> = pieces.collect();
        descriptors.build(&pieces, limits(to)).unwrap();
        descriptors
    };
    let (first, second) = (list(0, &[8, 8]), list(1000, &[8, 8, 5]));
    let mut joined = EvenList::new();
    assert!(joined.append(first.even_pieces().unwrap(), 0));
    assert!(joined.append(second.even_pieces().unwrap(), 16));
    let pieces = joined.pieces().unwrap();
    assert_eq!((pieces.start, pieces.unit, pieces.last), (0, 8, 5));
    assert_eq!(pieces.sources, [0, 100, 1000, 1100, 1200]);
    // Behind a shorter piece nothing fits, whatever comes later; nor do other units and gaps.
    assert!(!joined.append(first.even_pieces().unwrap(), 37));
    assert!(!joined.append(first.even_pieces().unwrap(), 0));
    assert_eq!(joined.pieces(), None);
    for (more, further) in [(list(0, &[7, 7]), 16), (list(0, &[8, 8]), 17)] {
        joined.clear();
        assert!(joined.append(first.even_pieces().unwrap(), 0));
        assert!(!joined.append(more.even_pieces().unwrap(), further));
    }
}

#[test]
fn neighbours_in_both_places_become_one_copy() {
    let list = [
        fragment(0, 4, 10),
        fragment(4, 6, 14),
        fragment(10, 2, 30),
        fragment(13, 2, 32),
    ];
    assert_eq!(
        built(&list, limits(14)).unwrap(),
        [
            Descriptor {
                source_offset: 0,
                length: 10,
                destination_offset: 10
            },
            Descriptor {
                source_offset: 10,
                length: 2,
                destination_offset: 30
            },
            Descriptor {
                source_offset: 13,
                length: 2,
                destination_offset: 32
            },
        ]
    );
}

#[test]
fn a_merged_copy_never_passes_its_length_field() {
    let half = 1 << 31;
    let list = [fragment(0, half, 0), fragment(1 << 31, half, 1 << 31)];
    assert_eq!(built(&list, limits(1 << 32)).unwrap().len(), 2);
    let swapped = [list[1], list[0]];
    assert_eq!(built(&swapped, limits(1 << 32)).unwrap().len(), 2);
}

#[test]
fn destinations_reach_beyond_four_gib() {
    let list = [fragment(7, 9, 5 << 32)];
    assert_eq!(
        built(&list, limits(9)).unwrap()[0].destination_offset,
        5 << 32
    );
}

#[test]
fn a_first_piece_at_zero_is_kept() {
    assert_eq!(built(&[fragment(0, 1, 0)], limits(1)).unwrap().len(), 1);
    assert_eq!(
        built(&[fragment(0, 0, 0), fragment(0, 1, 0)], limits(1))
            .unwrap()
            .len(),
        1
    );
}

#[test]
fn an_empty_list_is_only_legal_for_no_bytes() {
    assert_eq!(built(&[], limits(0)), Ok(vec![]));
    assert_eq!(built(&[fragment(3, 0, 9)], limits(0)), Ok(vec![]));
    assert_eq!(
        built(&[], limits(5)),
        Err(ScatterError::Total {
            expected: 5,
            arrived: 0
        })
    );
    assert_eq!(
        built(&[fragment(3, 0, 9)], limits(5)),
        Err(ScatterError::Total {
            expected: 5,
            arrived: 0
        })
    );
}

#[test]
fn each_broken_bound_is_named() {
    let tight = Limits {
        pool_bytes: 100,
        destination_bytes: 50,
        received_bytes: 10,
    };
    assert_eq!(
        built(&[fragment(0, 5, 0), fragment(91, 10, 5)], tight),
        Err(ScatterError::Source {
            index: 1,
            source_offset: 91,
            length: 10,
            pool_bytes: 100
        })
    );
    assert_eq!(
        built(&[fragment(u64::MAX, 2, 0)], tight),
        Err(ScatterError::Source {
            index: 0,
            source_offset: u64::MAX,
            length: 2,
            pool_bytes: 100
        })
    );
    assert_eq!(
        built(&[fragment(0, 10, 41)], tight),
        Err(ScatterError::Destination {
            index: 0,
            destination_offset: 41,
            length: 10,
            destination_bytes: 50
        })
    );
    assert_eq!(
        built(&[fragment(1 << 32, 10, 0)], limits(10)),
        Err(ScatterError::Source {
            index: 0,
            source_offset: 1 << 32,
            length: 10,
            pool_bytes: limits(10).pool_bytes
        })
    );
    assert_eq!(
        built(&[fragment(0, 9, 0)], tight),
        Err(ScatterError::Total {
            expected: 10,
            arrived: 9
        })
    );
    assert_eq!(
        built(&[fragment(0, 6, 10), fragment(50, 4, 8)], tight),
        Err(ScatterError::Overlap {
            destination_offset: 10,
            bytes: 2
        })
    );
    assert_eq!(
        built(&[fragment(0, 8, 10), fragment(50, 2, 12)], tight),
        Err(ScatterError::Overlap {
            destination_offset: 12,
            bytes: 2
        })
    );
}

#[test]
fn blocks_hold_what_a_queue_slot_holds() {
    let mut descriptors = Descriptors::new();
    let list: Vec<Fragment> = (0..5000).map(|at| fragment(at * 2, 1, at)).collect();
    descriptors.build(&list, limits(5000)).unwrap();
    let lengths: Vec<usize> = descriptors.blocks().map(<[Descriptor]>::len).collect();
    assert_eq!(lengths, [2048, 2048, 904]);
}

#[test]
fn building_again_reuses_the_room() {
    let mut descriptors = Descriptors::with_capacity(64);
    let room = descriptors.entries.as_ptr();
    for round in 0..10 {
        let list: Vec<Fragment> = (0..64)
            .rev()
            .map(|at| fragment(at * 3, 2, at * 3))
            .collect();
        descriptors.build(&list, limits(128)).unwrap();
        assert_eq!(
            descriptors.entries.as_ptr(),
            room,
            "round {round} allocated"
        );
    }
}
