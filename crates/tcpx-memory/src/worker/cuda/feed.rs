//! Lists as a launch of the unpack kernel reads them.

use tcpx_wire::Descriptor;

use super::cut::Cut;

/// Entries that a launch carries; `kernels/unpack.cu`.
pub(super) const FEW: usize = 240;
/// Sources of an even list that a launch carries.
pub(super) const EVEN: usize = 1024;

/// Even lists of shorter pieces are not worth while.
const SHORTEST_UNIT: u32 = 512;
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

/// Writes the next pieces as an even list or as entries, at most `sources` or `entries` of them, and says
/// which.
///
/// # Safety
/// `room` must be writable for as many, aligned to 16 bytes, and used by nobody else.
pub(super) unsafe fn write(
    cut: &mut Cut,
    descriptors: &[Descriptor],
    room: *mut u8,
    sources: usize,
    entries: usize,
) -> Shape {
    // SAFETY: the caller's promise; any bytes are integers.
    let list = unsafe { std::slice::from_raw_parts_mut(room.cast::<u32>(), sources) };
    let mut ahead = cut.clone();
    if let Some((even, count)) = ahead.even(descriptors, SHORTEST_UNIT, list)
        && (count >= SHORTEST_EVEN.min(sources) || ahead.peek(descriptors).is_none())
    {
        *cut = ahead;
        return Shape {
            count,
            even: Some(even),
        };
    }
    let mut count = 0;
    for piece in cut.descriptors(descriptors).take(entries) {
        // SAFETY: the caller's promise.
        unsafe { room.cast::<Descriptor>().add(count).write(piece) };
        count += 1;
    }
    Shape { count, even: None }
}

/// Writes all that is left if a launch can carry it.
pub(super) fn carry(cut: &mut Cut, descriptors: &[Descriptor], list: &mut Inline) -> Option<Shape> {
    if cut.descriptors_left(descriptors) > EVEN {
        return None;
    }
    let mut ahead = cut.clone();
    // SAFETY: the list has room for either, and is aligned.
    let shape = unsafe {
        write(
            &mut ahead,
            descriptors,
            list.0.as_mut_ptr().cast(),
            EVEN,
            FEW,
        )
    };
    ahead.peek(descriptors).is_none().then(|| {
        *cut = ahead;
        shape
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(source_offset: u32, length: u32, destination_offset: u64) -> Descriptor {
        Descriptor {
            source_offset,
            length,
            destination_offset,
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
        let shape = carry(&mut cut, &list, &mut inline).unwrap();
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
        let shape = carry(&mut Cut::for_kernel(65_536), &list, &mut inline).unwrap();
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
            let shape = carry(&mut cut, &list, &mut inline).unwrap();
            assert_eq!((shape.count, shape.even), (3, None));
            assert!(cut.peek(&list).is_none());
        }
    }

    #[test]
    fn a_list_too_long_for_a_launch_stays_untouched() {
        let list = pages(1025);
        let mut cut = Cut::for_kernel(65_536);
        let mut inline = Inline::EMPTY;
        assert!(carry(&mut cut, &list, &mut inline).is_none());
        assert_eq!(cut.descriptors_left(&list), 1025);
    }
}
