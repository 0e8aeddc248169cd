//! Descriptors cut into pieces of bounded length.

use tcpx_wire::{Descriptor, Descriptors, EvenPieces};

use super::feed::{Even, SHORTEST_UNIT};

/// What a launch is cut from.
#[derive(Clone, Copy, Debug)]
pub(super) struct List<'a> {
    pub(super) descriptors: &'a [Descriptor],
    /// The same copies as equally long pieces, where they are such.
    pub(super) even: Option<EvenPieces<'a>>,
}

impl<'a> From<&'a Descriptors> for List<'a> {
    fn from(all: &'a Descriptors) -> Self {
        Self {
            descriptors: all.as_slice(),
            even: all.even_pieces(),
        }
    }
}

/// A descriptor, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// From the start of the pool.
    pub(super) source: u64,
    pub(super) length: u32,
    /// From the start of the destination.
    pub(super) destination: u64,
}

/// Walks over descriptors in pieces.
#[derive(Clone, Debug, Default)]
pub(super) struct Cut {
    index: usize,
    done: u32,
    /// Pieces taken of a list's even form; nothing else is taken then.
    listed: usize,
    longest: u64,
    /// Whether a piece must be a descriptor again, which names its source in 32 bits.
    for_kernel: bool,
}

impl Cut {
    /// Pieces of at most `longest` bytes.
    pub(super) fn new(longest: u64) -> Self {
        Self {
            index: 0,
            done: 0,
            listed: 0,
            longest,
            for_kernel: false,
        }
    }

    /// Pieces that are descriptors, of at most `longest` bytes. A descriptor whose end passes 4 GiB
    /// stays whole, because its later pieces could not be named.
    pub(super) fn for_kernel(longest: u64) -> Self {
        Self {
            for_kernel: true,
            ..Self::new(longest)
        }
    }

    /// Whether nothing was taken yet.
    pub(super) fn is_at_start(&self) -> bool {
        self.index == 0 && self.done == 0 && self.listed == 0
    }

    /// Whether all was taken.
    pub(super) fn is_through(&self, list: List<'_>) -> bool {
        match self.listed(list) {
            Some(even) => self.listed == even.sources.len(),
            None => self.peek(list.descriptors).is_none(),
        }
    }

    /// Descriptors of which something is left.
    pub(super) fn descriptors_left(&self, descriptors: &[Descriptor]) -> usize {
        descriptors.len() - self.index
    }

    /// The list's even form, where its pieces are as long as a launch wants them.
    pub(super) fn listed<'a>(&self, list: List<'a>) -> Option<EvenPieces<'a>> {
        list.even.filter(|even| self.takes(even.unit))
    }

    /// Whether pieces of that length are as a launch wants them.
    pub(super) fn takes(&self, unit: u32) -> bool {
        unit >= SHORTEST_UNIT && u64::from(unit) <= self.longest
    }

    /// The next sources of the list's even form, of which `count` or more are left.
    pub(super) fn take_listed<'a>(
        &mut self,
        even: EvenPieces<'a>,
        count: usize,
    ) -> (Even, &'a [u32]) {
        let first = self.listed;
        self.listed += count;
        let end = self.listed == even.sources.len();
        let shape = Even {
            start: even.start + first as u64 * u64::from(even.unit),
            unit: even.unit,
            last: if end { even.last } else { even.unit },
        };
        (shape, &even.sources[first..self.listed])
    }

    /// Pieces of the list's even form that are left.
    pub(super) fn listed_left(&self, even: EvenPieces<'_>) -> usize {
        even.sources.len() - self.listed
    }

    /// Lists the sources of as many equally long pieces as follow each other in the destination; a
    /// shorter one ends the list. `None` where that would make pieces shorter than `shortest`.
    pub(super) fn even(
        &mut self,
        descriptors: &[Descriptor],
        shortest: u32,
        list: &mut [u32],
    ) -> Option<(Even, usize)> {
        let first = self.peek(descriptors)?;
        if first.length < shortest {
            return None;
        }
        let unit = first.length;
        let mut even = Even {
            start: first.destination,
            unit,
            last: unit,
        };
        let mut next = first.destination;
        let mut count = 0;
        while count < list.len() {
            if self.done == 0 {
                // Almost all of them: whole pieces, one after the other.
                let rest = descriptors.get(self.index..).unwrap_or_default();
                let before = count;
                for (place, whole) in list[count..].iter_mut().zip(rest) {
                    if whole.length != unit || whole.destination_offset != next {
                        break;
                    }
                    *place = whole.source_offset;
                    next += u64::from(unit);
                    count += 1;
                }
                self.index += count - before;
                if count > before {
                    even.last = unit;
                    continue;
                }
            }
            let Some(whole) = descriptors.get(self.index) else {
                break;
            };
            if whole.destination_offset + u64::from(self.done) != next {
                break;
            }
            let Some(source) = whole.source_offset.checked_add(self.done) else {
                break;
            };
            list[count] = source;
            count += 1;
            let rest = whole.length - self.done;
            if rest > unit {
                self.done += unit;
            } else {
                self.index += 1;
                self.done = 0;
            }
            even.last = rest.min(unit);
            if rest < unit {
                break;
            }
            next += u64::from(unit);
        }
        (count > 0).then_some((even, count))
    }

    fn limit(&self, descriptor: &Descriptor) -> u64 {
        let passes = descriptor
            .source_offset
            .checked_add(descriptor.length)
            .is_none();
        if self.for_kernel && passes {
            u64::MAX
        } else {
            self.longest
        }
    }

    /// The next piece, which stays the next.
    pub(super) fn peek(&self, descriptors: &[Descriptor]) -> Option<Piece> {
        let whole = descriptors.get(self.index)?;
        let rest = u64::from(whole.length - self.done);
        Some(Piece {
            source: u64::from(whole.source_offset) + u64::from(self.done),
            length: rest.min(self.limit(whole)) as u32,
            destination: whole.destination_offset + u64::from(self.done),
        })
    }

    /// The next piece.
    pub(super) fn next(&mut self, descriptors: &[Descriptor]) -> Option<Piece> {
        let piece = self.peek(descriptors)?;
        self.done += piece.length;
        if descriptors
            .get(self.index)
            .is_some_and(|whole| whole.length == self.done)
        {
            self.index += 1;
            self.done = 0;
        }
        Some(piece)
    }

    /// The next pieces as descriptors; only of a cut for the kernel.
    pub(super) fn descriptors<'a>(
        &'a mut self,
        descriptors: &'a [Descriptor],
    ) -> impl Iterator<Item = Descriptor> + 'a {
        std::iter::from_fn(move || self.next(descriptors)).map(|piece| Descriptor {
            // A descriptor that was cut ends below 4 GiB, see `limit`.
            source_offset: piece.source as u32,
            length: piece.length,
            destination_offset: piece.destination,
        })
    }
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

    #[test]
    fn pieces_cover_their_descriptor() {
        let list = [
            descriptor(3, 10_000, 5),
            descriptor(20_000, 1, 70_000),
            descriptor(1, 4096, 9),
        ];
        let mut cut = Cut::for_kernel(4096);
        let pieces: Vec<_> = cut.descriptors(&list).collect();
        let expected = [
            descriptor(3, 4096, 5),
            descriptor(4099, 4096, 4101),
            descriptor(8195, 1808, 8197),
            list[1],
            list[2],
        ];
        assert_eq!(pieces, expected);
    }

    #[test]
    fn for_the_kernel_a_source_that_passes_4_gib_stays_whole() {
        let list = [descriptor(u32::MAX - 10, 100_000, 1 << 40)];
        let mut cut = Cut::for_kernel(4096);
        assert_eq!(cut.descriptors(&list).collect::<Vec<_>>(), list);
        let mut cut = Cut::new(65_536);
        cut.next(&list);
        let last = Piece {
            source: (1 << 32) + 65_525,
            length: 34_464,
            destination: (1 << 40) + 65_536,
        };
        assert_eq!((cut.next(&list), cut.next(&list)), (Some(last), None));
    }
}
