//! Equally long pieces, named by their sources alone.

use super::Descriptor;

/// Copies of equally long pieces that follow each other in the destination, as the packets or pages
/// of one receive do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvenPieces<'a> {
    /// Where the first piece goes, in bytes from the start of the destination.
    pub start: u64,
    /// Bytes of every piece but the last.
    pub unit: u32,
    /// Bytes of the last piece: at least 1, at most `unit`.
    pub last: u32,
    /// Where the pieces lie in the bounce pool; at least two.
    pub sources: &'a [u32],
}

/// Collects pieces for as long as they are even.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvenList {
    sources: Vec<u32>,
    start: u64,
    unit: u32,
    last: u32,
    /// Behind the last piece, in the destination.
    next: u64,
    is_uneven: bool,
}

impl EvenList {
    /// No pieces.
    pub fn new() -> Self {
        Self::default()
    }

    /// No pieces, with room for `pieces`.
    pub fn with_capacity(pieces: usize) -> Self {
        Self {
            sources: Vec::with_capacity(pieces),
            ..Self::default()
        }
    }

    /// Removes all pieces and keeps their room.
    pub fn clear(&mut self) {
        self.sources.clear();
        self.is_uneven = false;
    }

    /// Lets go of room for more than `pieces`.
    pub fn shrink_to(&mut self, pieces: usize) {
        self.sources.shrink_to(pieces);
    }

    /// The pieces, unless one did not fit; `None` for fewer than two.
    pub fn pieces(&self) -> Option<EvenPieces<'_>> {
        (self.sources.len() > 1).then_some(EvenPieces {
            start: self.start,
            unit: self.unit,
            last: self.last,
            sources: &self.sources,
        })
    }

    /// Adds a piece that is not empty; `expected` pieces will be added in all. Whether it fitted:
    /// if not, there are no pieces until the next [`Self::clear`].
    pub fn push(&mut self, piece: Descriptor, expected: usize) -> bool {
        if !self.fits(
            piece.destination_offset,
            |unit| piece.length <= unit,
            piece.length,
        ) {
            return false;
        }
        if self.sources.len() == 1 {
            // The first that fits behind another: the others may well do so, too.
            self.sources.reserve(expected.saturating_sub(1));
        }
        self.sources.push(piece.source_offset);
        self.last = piece.length;
        self.next = piece.destination_offset + u64::from(piece.length);
        true
    }

    /// Adds the pieces of another list whose destination lies `further` bytes behind this one's.
    /// Whether they fitted, as for [`Self::push`].
    pub fn append(&mut self, more: EvenPieces<'_>, further: u64) -> bool {
        let start = more.start.saturating_add(further);
        if !self.fits(start, |unit| more.unit == unit, more.unit) {
            return false;
        }
        self.sources.extend_from_slice(more.sources);
        self.last = more.last;
        let whole = (more.sources.len() as u64 - 1) * u64::from(more.unit);
        self.next = start + whole + u64::from(more.last);
        true
    }

    /// Whether pieces from `start` on may follow; the first of all says what the unit is.
    fn fits(&mut self, start: u64, is_alike: impl Fn(u32) -> bool, unit: u32) -> bool {
        if self.is_uneven {
            return false;
        }
        if self.sources.is_empty() {
            (self.start, self.unit, self.last, self.next) = (start, unit, unit, start);
        }
        self.is_uneven = start != self.next || self.last != self.unit || !is_alike(self.unit);
        if self.is_uneven {
            self.sources.clear();
        }
        !self.is_uneven
    }
}
