//! Lists as a launch of the unpack kernel reads them.

use tcpx_wire::Descriptor;

use super::cut::{Cut, List};

/// Entries that a launch carries; `kernels/unpack.cu`.
pub(super) const FEW: usize = 240;
/// Sources of an even list that a launch carries.
pub(super) const EVEN: usize = 1024;

/// Pieces in mapped memory up to which one launch is better than two.
const UNDIVIDED: usize = 8192;

/// Even lists of shorter pieces are not worth while.
pub(super) const SHORTEST_UNIT: u32 = 512;
/// An even list that ends before this many pieces would be one of many small launches.
const SHORTEST_EVEN: usize = 1024;

/// A list as a launch carries it, in the alignment that the kernel reads it with.
#[repr(C, align(16))]
pub(super) struct Inline(pub(super) [u32; EVEN]);

impl Inline {
    pub(super) const EMPTY: Self = Self([0; EVEN]);
}

const _: () = assert!(FEW * 16 <= EVEN * 4);

/// Equally long pieces that follow each other in the destination: only their sources are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Even {
    /// Where the first piece goes, from the start of the destination.
    pub(super) start: u64,
    /// Bytes of each piece, and of the last.
    pub(super) unit: u32,
    pub(super) last: u32,
}

/// What a written list is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Pieces.
    pub(super) count: usize,
    /// `None`: each entry is a whole descriptor.
    pub(super) even: Option<Even>,
}

/// Room for a list in memory that the device reads.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) at: *mut u8,
    /// Sources and entries that fit.
    pub(super) sources: usize,
    pub(super) entries: usize,
}

/// Writes the next pieces of a list: those of its even form as they stand, half of them where it is
/// long, so that one launch's end overlaps with the other's beginning; else as [`write`], up to
/// `most`.
///
/// # Safety
/// The room must be writable, aligned to 16 bytes, and used by nobody else.
pub(super) unsafe fn map(cut: &mut Cut, list: List<'_>, room: Room, most: usize) -> Shape {
    let Some(even) = cut.listed(list) else {
        let most = Room {
            sources: room.sources.min(most),
            entries: room.entries.min(most),
            ..room
        };
        // SAFETY: the caller's promise.
        return unsafe { write(cut, list.descriptors, most) };
    };
    let left = cut.listed_left(even);
    let share = if cut.is_at_start() && left > UNDIVIDED {
        left.div_ceil(2)
    } else {
        left
    };
    let (even, sources) = cut.take_listed(even, share.min(room.sources));
    // SAFETY: the caller's promise; no more than fit.
    unsafe {
        room.at
            .cast::<u32>()
            .copy_from_nonoverlapping(sources.as_ptr(), sources.len());
    }
    Shape {
        count: sources.len(),
        even: Some(even),
    }
}

/// Writes the next pieces of descriptors as an even list or as entries, as many as there is room
/// for, and says which.
///
/// # Safety
/// As [`map`].
unsafe fn write(cut: &mut Cut, descriptors: &[Descriptor], room: Room) -> Shape {
    // SAFETY: the caller's promise; any bytes are integers.
    let list = unsafe { std::slice::from_raw_parts_mut(room.at.cast::<u32>(), room.sources) };
    let mut ahead = cut.clone();
    if let Some((even, count)) = ahead.even(descriptors, SHORTEST_UNIT, list)
        && (count >= SHORTEST_EVEN.min(room.sources) || ahead.peek(descriptors).is_none())
    {
        *cut = ahead;
        return Shape {
            count,
            even: Some(even),
        };
    }
    let mut count = 0;
    for piece in cut.descriptors(descriptors).take(room.entries) {
        // SAFETY: the caller's promise.
        unsafe { room.at.cast::<Descriptor>().add(count).write(piece) };
        count += 1;
    }
    Shape { count, even: None }
}

/// Writes all that is left if a launch can carry it.
pub(super) fn carry(cut: &mut Cut, list: List<'_>, inline: &mut Inline) -> Option<Shape> {
    if let Some(even) = cut.listed(list) {
        let left = cut.listed_left(even);
        let room = inline.0.get_mut(..left)?;
        let (even, sources) = cut.take_listed(even, left);
        room.copy_from_slice(sources);
        return Some(Shape {
            count: left,
            even: Some(even),
        });
    }
    if cut.descriptors_left(list.descriptors) > EVEN {
        return None;
    }
    let mut ahead = cut.clone();
    let room = Room {
        at: inline.0.as_mut_ptr().cast(),
        sources: EVEN,
        entries: FEW,
    };
    // SAFETY: the list has room for either, and is aligned.
    let shape = unsafe { write(&mut ahead, list.descriptors, room) };
    ahead.is_through(list).then(|| {
        *cut = ahead;
        shape
    })
}

#[cfg(test)]
mod tests {
    use tcpx_wire::EvenPieces;

    use super::*;

    fn descriptor(source_offset: u32, length: u32, destination_offset: u64) -> Descriptor {
        Descriptor {
            source_offset,
            length,
            destination_offset,
        }
    }

    fn plain(descriptors: &[Descriptor]) -> List<'_> {
        List {
            descriptors,
            even: None,
        }
    }

    fn pages(count: u32) -> Vec<Descriptor> {
        (0..count)
            .map(|index| descriptor((count - index) * 8192, 4096, 7 + u64::from(index) * 4096))
            .collect()
    }

    #[test]
    fn pages_become_sources_and_a_shorter_one_may_end_them() {
        let mut list = pages(3);
        list.push(descriptor(99, 10, 7 + 3 * 4096));
        let mut inline = Inline::EMPTY;
        let mut cut = Cut::for_kernel(65_536);
        let even = Even {
            start: 7,
            unit: 4096,
            last: 10,
        };
        let shape = carry(&mut cut, plain(&list), &mut inline).unwrap();
        assert_eq!((shape.count, shape.even), (4, Some(even)));
        assert_eq!(inline.0[..4], [24_576, 16_384, 8192, 99]);
        assert!(cut.peek(&list).is_none());
    }

    #[test]
    fn merged_pages_are_listed_one_by_one() {
        let list = [
            descriptor(0, 4096, 0),
            descriptor(40_960, 12_288, 4096),
            descriptor(8192, 4096, 16_384),
        ];
        let mut inline = Inline::EMPTY;
        let shape = carry(&mut Cut::for_kernel(65_536), plain(&list), &mut inline).unwrap();
        assert_eq!((shape.count, shape.even.unwrap().last), (5, 4096));
        assert_eq!(inline.0[..5], [0, 40_960, 45_056, 49_152, 8192]);
    }

    #[test]
    fn gaps_and_odd_lengths_are_listed_whole() {
        let mut inline = Inline::EMPTY;
        for list in [
            [(0, 4096), (4097, 4096), (8193, 4096)],
            [(0, 1000), (1000, 4096), (5096, 1000)],
            [(0, 4), (4, 4), (8, 4)],
        ] {
            let list = list.map(|(to, length)| descriptor(20_000 - 2 * to, length, to.into()));
            let mut cut = Cut::for_kernel(65_536);
            let shape = carry(&mut cut, plain(&list), &mut inline).unwrap();
            assert_eq!((shape.count, shape.even), (3, None));
            assert!(cut.peek(&list).is_none());
        }
    }

    #[test]
    fn a_list_too_long_for_a_launch_stays_untouched() {
        let list = pages(1025);
        let mut cut = Cut::for_kernel(65_536);
        let mut inline = Inline::EMPTY;
        assert!(carry(&mut cut, plain(&list), &mut inline).is_none());
        assert_eq!(cut.descriptors_left(&list), 1025);
    }

    /// Launches of a list as (first piece's destination, pieces, last piece's length).
    fn mapped(count: usize, unit: u32, last: u32, longest: u64) -> Vec<(u64, usize, u32)> {
        let sources: Vec<u32> = (0..count as u32).rev().collect();
        let even = EvenPieces {
            start: 9,
            unit,
            last,
            sources: &sources,
        };
        let list = List {
            descriptors: &[],
            even: Some(even),
        };
        let mut memory = vec![0u32; 16_384];
        let room = Room {
            at: memory.as_mut_ptr().cast(),
            sources: memory.len(),
            entries: memory.len() / 4,
        };
        let mut cut = Cut::for_kernel(longest);
        let (mut launches, mut written) = (Vec::new(), Vec::new());
        while !cut.is_through(list) {
            // SAFETY: the memory is as large as said.
            let shape = unsafe { map(&mut cut, list, room, 64) };
            written.extend_from_slice(&memory[..shape.count]);
            let even = shape.even.unwrap();
            launches.push((even.start, shape.count, even.last));
        }
        assert!(launches.is_empty() || written == sources);
        launches
    }

    #[test]
    fn a_long_even_list_is_launched_in_parts() {
        assert_eq!(mapped(3, 512, 7, 4096), [(9, 3, 7)]);
        assert_eq!(mapped(8192, 512, 512, 4096), [(9, 8192, 512)]);
        let half = 9 + 5000 * 512;
        assert_eq!(
            mapped(9999, 512, 7, 4096),
            [(9, 5000, 512), (half, 4999, 7)]
        );
        let starts = [0, 16_384, 32_768].map(|pieces| 9 + pieces * 512);
        assert_eq!(
            mapped(40_000, 512, 512, 4096),
            [
                (starts[0], 16_384, 512),
                (starts[1], 16_384, 512),
                (starts[2], 7232, 512)
            ]
        );
    }

    #[test]
    fn an_even_form_of_pieces_too_short_or_too_long_is_not_used() {
        // No descriptors beside it here, so nothing is left to launch.
        assert_eq!(mapped(9999, 511, 511, 4096), []);
        assert_eq!(mapped(9999, 8192, 8192, 4096), []);
    }

    #[test]
    fn a_launch_carries_an_even_form_that_fits() {
        let sources: Vec<u32> = (0..1025).collect();
        for (count, fits) in [(2, true), (1024, true), (1025, false)] {
            let even = EvenPieces {
                start: 3,
                unit: 1448,
                last: 5,
                sources: &sources[..count],
            };
            let list = List {
                descriptors: &[],
                even: Some(even),
            };
            let mut inline = Inline::EMPTY;
            let mut cut = Cut::for_kernel(4096);
            let shape = carry(&mut cut, list, &mut inline);
            assert_eq!(
                (shape.is_some(), cut.is_through(list)),
                (fits, fits),
                "{count}"
            );
            if let Some(shape) = shape {
                let even = shape.even.unwrap();
                assert_eq!((shape.count, even.start, even.last), (count, 3, 5));
                assert_eq!(inline.0[..count], sources[..count]);
            }
        }
    }
}
