//! Cuts a message into fragments the way network segments would fall into pages.

use nccl_net::constants::UNPACK_SLOT_ENTRIES;

use crate::config::PAGE_BYTES;
use crate::shuffle::Shuffle;

/// (start, length) pairs inside one page, as segments of several sizes leave them.
const SHAPES: [&[(u16, u16)]; 8] = [
    &[(0, 4096)],
    &[(0, 1448), (1448, 1448), (2896, 1200)],
    &[(64, 1448), (2112, 1448)],
    &[(1, 4095)],
    &[(7, 1447), (1502, 2593)],
    &[(130, 3966)],
    &[(40, 23), (63, 1985), (2048, 2048)],
    &[(513, 1448), (1961, 2135)],
];

/// One fragment of a message before it has a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Which of the message's pages.
    pub(crate) page: u32,
    /// First byte inside the page.
    pub(crate) start: u32,
    /// Bytes.
    pub(crate) len: u32,
    /// Offset in the message.
    pub(crate) offset: u64,
}

/// Fills `pieces` with fragments that cover `bytes` in order, on at most `max_pages` pages and in
/// at most one queue slot; gives the pages used, or `None` when the message does not fit.
pub(crate) fn plan(
    bytes: usize,
    max_pages: usize,
    shuffle: &mut Shuffle,
    pieces: &mut Vec<Piece>,
) -> Option<usize> {
    pieces.clear();
    if bytes > max_pages.min(UNPACK_SLOT_ENTRIES) * PAGE_BYTES {
        return None;
    }
    let mut offset = 0;
    let mut pages = 0;
    while offset < bytes {
        let shape = SHAPES[shuffle.below(SHAPES.len())];
        let held: usize = shape.iter().map(|&(_, len)| usize::from(len)).sum();
        let rest = (bytes - offset).saturating_sub(held);
        // Whole pages must be able to take what this shape would leave.
        let entries_left = UNPACK_SLOT_ENTRIES.saturating_sub(pieces.len() + shape.len());
        let pages_left = max_pages - pages - 1;
        let shape = if rest <= entries_left.min(pages_left) * PAGE_BYTES
            && pieces.len() + shape.len() <= UNPACK_SLOT_ENTRIES
        {
            shape
        } else {
            SHAPES[0]
        };
        for &(start, len) in shape {
            let len = usize::from(len).min(bytes - offset);
            if len == 0 {
                break;
            }
            pieces.push(Piece {
                // Bounded by the entries of a queue slot and by the page size.
                page: pages as u32,
                start: u32::from(start),
                len: len as u32,
                offset: offset as u64,
            });
            offset += len;
        }
        pages += 1;
    }
    Some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 4 << 20;

    #[track_caller]
    fn check(bytes: usize, max_pages: usize, seed: u64) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let pages = plan(bytes, max_pages, &mut Shuffle::new(seed), &mut pieces).unwrap();
        assert!(pages <= max_pages, "{pages} of {max_pages} pages");
        assert!(pieces.len() <= UNPACK_SLOT_ENTRIES, "{}", pieces.len());
        let mut offset = 0;
        let mut before: Option<Piece> = None;
        for piece in &pieces {
            assert!(piece.len > 0);
            assert!((piece.start + piece.len) as usize <= PAGE_BYTES);
            assert_eq!(piece.offset, offset);
            if let Some(before) = before {
                let later_page = piece.page == before.page + 1;
                let behind = piece.page == before.page && piece.start >= before.start + before.len;
                assert!(later_page || behind, "{before:?} then {piece:?}");
            }
            offset += u64::from(piece.len);
            before = Some(*piece);
        }
        assert_eq!(offset, bytes as u64);
        pieces
    }

    #[test]
    fn every_size_up_to_the_largest_request_fits_one_queue_slot() {
        for seed in 1..20 {
            for bytes in [0, 1, 23, 4095, 4096, 4097, 524_287, 524_289, MAX - 1, MAX] {
                check(bytes, 4096, seed);
                check(bytes, bytes.div_ceil(PAGE_BYTES), seed);
            }
        }
    }

    #[test]
    fn half_a_mebibyte_falls_into_more_than_100_uneven_unaligned_fragments() {
        let pieces = check(512 << 10, 4096, 5);
        assert!(pieces.len() > 100, "{}", pieces.len());
        assert!(pieces.iter().any(|p| p.len == 1448));
        assert!(pieces.iter().any(|p| p.len == 4096));
        assert!(pieces.iter().any(|p| p.len % 2 == 1));
        assert!(pieces.iter().any(|p| p.start % 4096 != 0));
    }

    #[test]
    fn a_message_beyond_the_pool_or_the_slot_does_not_fit() {
        let mut pieces = Vec::new();
        let mut shuffle = Shuffle::new(3);
        assert_eq!(plan(4097, 1, &mut shuffle, &mut pieces), None);
        assert_eq!(
            plan(8 << 20, 100_000, &mut shuffle, &mut pieces),
            Some(2048)
        );
        assert_eq!(
            plan((8 << 20) + 1, 100_000, &mut shuffle, &mut pieces),
            None
        );
    }
}
