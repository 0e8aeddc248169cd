use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn set(tokens: impl IntoIterator<Item = u32>) -> TokenSet {
    let mut set = TokenSet::new();
    for token in tokens {
        set.insert(token).unwrap();
    }
    set
}

fn pairs(set: &TokenSet) -> Vec<(u64, u64)> {
    set.ranges()
        .map(|range| (range.start, range.end - range.start))
        .collect()
}

fn sent(batch: &Batch<'_>) -> Vec<(u32, u32)> {
    batch
        .as_bytes()
        .chunks_exact(8)
        .map(|pair| {
            let word = |at: usize| u32::from_ne_bytes(pair[at..at + 4].try_into().unwrap());
            (word(0), word(4))
        })
        .collect()
}

#[test]
fn tokens_join_into_ranges_in_any_order() {
    assert_eq!(pairs(&set([5, 7, 6, 1, 9, 10, 8])), [(1, 1), (5, 6)]);
    assert_eq!(
        pairs(&set([u32::MAX, 0, u32::MAX - 1, 1])),
        [(0, 2), (u64::from(u32::MAX) - 1, 2)]
    );
}

#[test]
fn a_token_comes_once() {
    let mut tokens = set([4, 5, 6]);
    for token in 4..=6 {
        assert_eq!(tokens.insert(token), Err(TokenError::Twice { token }));
    }
    assert_eq!(pairs(&tokens), [(4, 3)]);
    let mut other = set([2, 3, 6, 9]);
    assert_eq!(
        tokens.append(&mut other),
        Err(TokenError::Twice { token: 6 })
    );
    assert_eq!(
        (pairs(&tokens), pairs(&other)),
        (vec![(2, 5)], vec![(6, 1), (9, 1)])
    );
    assert_eq!((tokens.fragments(), other.fragments()), (5, 2));
}

#[test]
fn a_batch_is_the_kernels_layout() {
    let mut tokens = set([3, 4, 0x0102_0304]);
    let batch = tokens.batch(Dialect::Mainline).unwrap();
    assert_eq!((batch.level(), batch.option()), (libc::SOL_SOCKET, 80));
    assert_eq!(batch.fragments(), 3);
    let words = [3u32, 2, 0x0102_0304, 1].map(u32::to_ne_bytes);
    assert_eq!(batch.as_bytes(), words.as_flattened());
    assert_eq!(tokens.batch(Dialect::Google).unwrap().option(), 97);
}

#[test]
fn a_batch_has_at_most_128_ranges() {
    let mut tokens = set((0..300).map(|at| at * 2));
    let mut lengths = Vec::new();
    while let Some(batch) = tokens.batch(Dialect::Mainline) {
        lengths.push(sent(&batch).len());
        let all = batch.fragments() as i32;
        assert_eq!(batch.answered(all), Ok(Returned::All));
    }
    assert_eq!(lengths, [128, 128, 44]);
}

#[test]
fn a_batch_has_at_most_1024_fragments() {
    let mut tokens = set((10..1000).chain(2000..3500));
    let mut batches = Vec::new();
    while let Some(batch) = tokens.batch(Dialect::Mainline) {
        batches.push(sent(&batch));
        let all = batch.fragments() as i32;
        assert_eq!(batch.answered(all), Ok(Returned::All));
    }
    assert_eq!(
        batches,
        [
            vec![(10, 990), (2000, 34)],
            vec![(2034, 1024)],
            vec![(3058, 442)]
        ]
    );
    assert!(tokens.is_empty());
}

#[test]
fn fewer_freed_than_sent_leave_the_batch_to_be_sent_again() {
    let mut tokens = set([1, 2, 3, 9]);
    let batch = tokens.batch(Dialect::Mainline).unwrap();
    assert_eq!(batch.answered(3), Ok(Returned::Part { left: 1 }));
    // What a receive brings now may carry a number that is already free.
    assert_eq!(
        tokens.insert(20),
        Err(TokenError::Unsettled {
            fragments: 4,
            freed: 3
        })
    );
    let batch = tokens.batch(Dialect::Mainline).unwrap();
    assert_eq!(sent(&batch), [(1, 3), (9, 1)]);
    assert_eq!(batch.answered(1), Ok(Returned::All));
    assert!(tokens.is_empty() && tokens.insert(20).is_ok());
}

#[test]
fn tokens_that_the_kernel_does_not_free_are_reported_and_kept() {
    let mut tokens = set([1, 2, 3]);
    let batch = tokens.batch(Dialect::Mainline).unwrap();
    assert_eq!(batch.answered(2), Ok(Returned::Part { left: 1 }));
    let batch = tokens.batch(Dialect::Mainline).unwrap();
    assert_eq!(
        batch.answered(0),
        Err(TokenError::NotFreed { sent: 3, freed: 2 })
    );
    assert_eq!(tokens.fragments(), 3);
    tokens.clear();
    assert!(tokens.batch(Dialect::Mainline).is_none());
}

#[test]
fn a_call_that_failed_loses_no_token() {
    let mut tokens = set([1, 2]);
    assert!(tokens.batch(Dialect::Mainline).is_some());
    assert!(matches!(
        tokens.insert(3),
        Err(TokenError::Unsettled { .. })
    ));
    let batch = tokens.batch(Dialect::Mainline).unwrap();
    assert_eq!(batch.answered(2), Ok(Returned::All));
}

#[test]
fn impossible_answers_are_refused() {
    for (dialect, answer) in [
        (Dialect::Mainline, 3),
        (Dialect::Mainline, -1),
        (Dialect::Mainline, i32::MAX),
        (Dialect::Google, 2),
        (Dialect::Google, -1),
    ] {
        let mut tokens = set([1, 2]);
        assert_eq!(
            tokens.batch(dialect).unwrap().answered(answer),
            Err(TokenError::Answer {
                sent: 2,
                before: 0,
                answer
            })
        );
        assert_eq!(tokens.fragments(), 2);
    }
}

#[test]
fn googles_kernel_answers_zero() {
    let mut tokens = set([1, 2]);
    let batch = tokens.batch(Dialect::Google).unwrap();
    assert_eq!(batch.answered(0), Ok(Returned::All));
    assert!(tokens.is_empty());
}

#[test]
fn the_last_token_never_wraps() {
    let mut tokens = set([u32::MAX]);
    assert_eq!(pairs(&tokens), [(u32::MAX.into(), 1)]);
    let batch = tokens.batch(Dialect::Mainline).unwrap();
    assert_eq!(sent(&batch), [(u32::MAX, 1)]);
    assert_eq!(batch.answered(1), Ok(Returned::All));
}

proptest! {
    /// Against a set of numbers: what is in, what joins, what a kernel would free.
    #[test]
    fn every_token_is_given_back_once(
        groups in vec(vec(prop_oneof![0u32..200, 0u32..4000, any::<u32>()], 0..400), 1..6),
        slow in 1i32..2000,
    ) {
        let mut model = BTreeSet::new();
        let mut tokens = TokenSet::new();
        for group in groups {
            let mut part = TokenSet::new();
            let mut own = BTreeSet::new();
            for token in group {
                if own.contains(&token) {
                    prop_assert_eq!(part.insert(token), Err(TokenError::Twice { token }));
                } else if model.contains(&token) {
                    prop_assert_eq!(tokens.insert(token), Err(TokenError::Twice { token }));
                } else {
                    part.insert(token).unwrap();
                    own.insert(token);
                }
            }
            tokens.append(&mut part).unwrap();
            prop_assert!(part.is_empty() && part.fragments() == 0);
            model.append(&mut own);
        }
        prop_assert_eq!(tokens.fragments(), model.len() as u64);
        for (one, next) in tokens.ranges().zip(tokens.ranges().skip(1)) {
            prop_assert!(one.end < next.start, "{one:?} and {next:?} did not join");
        }
        while let Some(batch) = tokens.batch(Dialect::Mainline) {
            let ranges = sent(&batch);
            prop_assert!(ranges.len() <= 128 && batch.fragments() <= 1024);
            let mut freed = 0;
            for (start, count) in ranges {
                for token in start..=start + (count - 1) {
                    if freed < slow && model.remove(&token) {
                        freed += 1;
                    }
                }
            }
            let _ = batch.answered(freed).unwrap();
        }
        prop_assert!(model.is_empty() && tokens.is_empty());
    }
}
