//! Who has which piece, without copies and slots.

use super::*;

const PIECE: u64 = 100;

/// Pieces of a send with this token, of transfer 7, are begun at places of their number.
fn begun(bytes: u64, pieces: usize) -> Ahead<&'static str, u32> {
    let mut ahead = Ahead::default();
    assert!(ahead.offer(1, 7, "source", bytes, PIECE));
    for number in 0..pieces as u32 {
        assert_eq!(ahead.begin(number), Some(number));
    }
    assert_eq!(ahead.has_begun(1), pieces > 0);
    ahead
}

fn lengths(ahead: &mut Ahead<&'static str, u32>) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    while let Some(next) = ahead.next() {
        found.push((next.offset, next.length));
        assert_eq!(
            ahead.begin(found.len() as u32),
            Some(found.len() as u32 - 1)
        );
    }
    found
}

#[test]
fn pieces_are_cut_as_chunks_are_and_only_so_many() {
    let of = |bytes| {
        let mut ahead = Ahead::default();
        assert!(ahead.offer(1, 7, "source", bytes, PIECE));
        lengths(&mut ahead)
    };
    assert_eq!(of(250), [(0, 100), (100, 100), (200, 50)]);
    assert_eq!(of(0), []);
    assert_eq!(of(10_000).len(), PIECES);
}

#[test]
fn sends_are_few() {
    let mut ahead = Ahead::<(), u32>::default();
    for send in 0..SENDS as u64 {
        assert!(ahead.offer(send, send, (), 1, 1));
    }
    assert!(!ahead.offer(9, 9, (), 1, 1));
    assert!(!ahead.has_begun(0), "nothing was begun");
    assert!(ahead.offer(9, 9, (), 1, 1));
    assert!(!ahead.offer(10, 10, (), 1, 0), "pieces without bytes");
}

#[test]
fn chunks_take_over_their_pieces_copied_or_not_and_the_last_ends_the_send() {
    let mut ahead = begun(1000, 2);
    assert_eq!(ahead.copy_ended(0, true), CopyEnd::Kept);
    assert_eq!(ahead.find(7, 0, PIECE, 40), Found::Copied(0));
    assert_eq!(ahead.next(), None, "it is granted: nothing more is begun");
    assert!(!ahead.has_ended_some());
    assert_eq!(ahead.find(7, 100, PIECE, 41), Found::Copying(1));
    assert_eq!(ahead.take_ended(), [1]);
    assert_eq!(ahead.copy_ended(1, true), CopyEnd::Chunk(41));
    assert_eq!(ahead.find(7, 200, PIECE, 42), Found::Nothing(vec![]));
    assert_eq!(ahead.cancel(1), None);
}

#[test]
fn the_error_of_a_copy_is_its_chunks_if_one_has_come() {
    let mut ahead = begun(1000, 2);
    assert_eq!(ahead.find(7, 0, PIECE, 40), Found::Copying(0));
    assert_eq!(ahead.copy_ended(0, false), CopyEnd::Chunk(40));
    assert_eq!(ahead.copy_ended(1, false), CopyEnd::Free(1));
    assert_eq!(ahead.take_ended(), [1]);
    let mut ahead = begun(1000, 1);
    assert_eq!(ahead.copy_ended(0, false), CopyEnd::Free(0));
    assert_eq!(ahead.next(), None, "nothing more is begun");
}

#[test]
fn chunks_that_are_cut_otherwise_give_all_back() {
    let mut ahead = begun(1000, 3);
    assert_eq!(ahead.copy_ended(1, true), CopyEnd::Kept);
    assert_eq!(
        ahead.find(8, 0, PIECE, 40),
        Found::Nothing(vec![]),
        "another's"
    );
    assert_eq!(ahead.find(7, 0, 64, 40), Found::Nothing(vec![1]));
    assert!(!ahead.has_ended_some(), "two copies still run");
    assert_eq!(ahead.find(7, 0, PIECE, 41), Found::Nothing(vec![]));
    assert_eq!(ahead.copy_ended(0, true), CopyEnd::Free(0));
    assert_eq!(ahead.copy_ended(2, true), CopyEnd::Free(2));
    assert_eq!(ahead.take_ended(), [1]);
}

#[test]
fn one_that_is_cancelled_ends_once_no_copy_reads_it() {
    let mut ahead = begun(1000, 2);
    assert_eq!(ahead.copy_ended(0, true), CopyEnd::Kept);
    assert_eq!(ahead.copy_ended(1, true), CopyEnd::Kept);
    let (mut places, is_copying) = ahead.cancel(1).unwrap();
    places.sort_unstable();
    assert_eq!((places, is_copying), (vec![0, 1], false));
    assert!(!ahead.has_ended_some(), "the answer said so");

    let mut ahead = begun(1000, 2);
    assert_eq!(ahead.copy_ended(0, true), CopyEnd::Kept);
    assert_eq!(ahead.cancel(1), Some((vec![0], true)));
    assert!(ahead.take_ended().is_empty());
    assert_eq!(ahead.copy_ended(1, true), CopyEnd::Free(1));
    assert_eq!(ahead.cancel(1), Some((vec![], true)), "its end is told");
    assert_eq!(ahead.take_ended(), [1]);
    assert_eq!(ahead.cancel(1), None);
}

#[test]
fn what_is_given_back_is_all_that_no_chunk_has() {
    let mut ahead = begun(1000, 3);
    assert_eq!(ahead.copy_ended(1, true), CopyEnd::Kept);
    assert_eq!(ahead.find(7, 0, PIECE, 40), Found::Copying(0));
    assert_eq!(ahead.give_back(), [1]);
    assert_eq!(ahead.find(7, 200, PIECE, 41), Found::Nothing(vec![]));
    assert_eq!(ahead.copy_ended(2, true), CopyEnd::Free(2));
    assert_eq!(ahead.take_ended(), [1]);
    assert_eq!(ahead.copy_ended(0, true), CopyEnd::Chunk(40));
}
