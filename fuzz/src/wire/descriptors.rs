//! Scatter lists as a hostile network would report them.

use tcpx_wire::{Descriptors, Fragment, Limits, ScatterList};

/// Most fragments tried; the check below is quadratic.
const MOST: usize = 256;

/// Input: how (u8: bit 0 takes the true sum as received bytes), pool u64, destination u64,
/// received u64, then fragments of 20 bytes.
pub fn run(data: &[u8]) {
    let Some(([how], rest)) = data.split_first_chunk() else {
        return;
    };
    let Some((limits, rest)) = rest.split_first_chunk::<24>() else {
        return;
    };
    let list: ScatterList = rest
        .chunks_exact(20)
        .take(MOST)
        .map(|piece| Fragment {
            source_offset: u64_at(piece, 0),
            length: u32::from_le_bytes([piece[8], piece[9], piece[10], piece[11]]),
            destination_offset: u64_at(piece, 12),
        })
        .collect();
    let total = list.iter().map(|piece| u64::from(piece.length)).sum();
    let limits = Limits {
        pool_bytes: u64_at(limits, 0),
        destination_bytes: u64_at(limits, 8),
        received_bytes: if how & 1 == 1 {
            total
        } else {
            u64_at(limits, 16)
        },
    };

    let mut descriptors = Descriptors::new();
    let result = descriptors.build(&list, limits);
    assert_eq!(result.is_ok(), legal(&list, limits), "{result:?}");
    if result.is_err() {
        assert!(descriptors.is_empty());
        return;
    }
    assert_eq!(descriptors.bytes(), limits.received_bytes);
    assert!(descriptors.len() <= list.len());
    assert_eq!(
        descriptors.blocks().map(<[_]>::len).sum::<usize>(),
        descriptors.len()
    );
    // Same map from destination to source: every piece lies inside one copy at one distance.
    for piece in list.iter().filter(|piece| piece.length > 0) {
        let inside = descriptors.as_slice().iter().any(|copy| {
            let Some(skipped) = piece
                .destination_offset
                .checked_sub(copy.destination_offset)
            else {
                return false;
            };
            skipped + u64::from(piece.length) <= u64::from(copy.length)
                && u64::from(copy.source_offset) + skipped == piece.source_offset
        });
        assert!(inside, "{piece:?} was lost");
    }
    // The even form, where there is one, is the very pieces of the list.
    if let Some(even) = descriptors.even_pieces() {
        let pieces = list.iter().filter(|piece| piece.length > 0);
        let mut next = even.start;
        let mut count = 0;
        for (index, piece) in pieces.enumerate() {
            let last = index + 1 == even.sources.len();
            assert_eq!(piece.source_offset, u64::from(even.sources[index]));
            assert_eq!(piece.length, if last { even.last } else { even.unit });
            assert_eq!(piece.destination_offset, next);
            next += u64::from(piece.length);
            count += 1;
        }
        assert_eq!(count, even.sources.len());
    }
}

/// The rules, said again in the plainest way.
fn legal(fragments: &[Fragment], limits: Limits) -> bool {
    let pieces: Vec<&Fragment> = fragments.iter().filter(|piece| piece.length > 0).collect();
    let fits = |offset: u64, piece: &Fragment, end: u64| {
        u128::from(offset) + u128::from(piece.length) <= u128::from(end)
    };
    let each = pieces.iter().all(|piece| {
        fits(piece.source_offset, piece, limits.pool_bytes)
            && fits(piece.destination_offset, piece, limits.destination_bytes)
            && piece.source_offset <= u64::from(u32::MAX)
    });
    let sum: u64 = pieces.iter().map(|piece| u64::from(piece.length)).sum();
    each && sum == limits.received_bytes
        && pieces.iter().enumerate().all(|(index, left)| {
            pieces[index + 1..].iter().all(|right| {
                left.destination_offset + u64::from(left.length) <= right.destination_offset
                    || right.destination_offset + u64::from(right.length) <= left.destination_offset
            })
        })
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}
