//! A checked scatter list in the form that every unpacker reads.

mod even;

use std::mem::{offset_of, size_of};

use thiserror::Error;

pub use even::{EvenList, EvenPieces};

/// One piece of a received chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Where it lies in the bounce pool, in bytes.
    pub source_offset: u64,
    /// Its bytes.
    pub length: u32,
    /// Where it belongs in the destination, in bytes.
    pub destination_offset: u64,
}

/// The fragments of one receive, unchecked, in the order in which they arrived.
pub type ScatterList = Vec<Fragment>;

/// One copy from the bounce pool to the destination.
///
/// Same layout as an entry of the NCCL device queue (`loadMeta`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Descriptor {
    /// Where the bytes lie in the bounce pool.
    pub source_offset: u32,
    /// Number of bytes; at least 1.
    pub length: u32,
    /// Where they belong in the destination.
    pub destination_offset: u64,
}

const _: () = assert!(
    size_of::<Descriptor>() == 16
        && offset_of!(Descriptor, length) == 4
        && offset_of!(Descriptor, destination_offset) == 8
);

/// What a scatter list may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Length of the bounce pool in bytes.
    pub pool_bytes: u64,
    /// Length of the posted destination in bytes.
    pub destination_bytes: u64,
    /// Bytes that the network says it received; the list must add up to them.
    pub received_bytes: u64,
}

/// The copies that unpack one receive.
///
/// After [`Descriptors::build`] succeeded: every source lies inside the pool, every destination
/// inside the posted buffer, no two destinations overlap, and the lengths add up to the received
/// bytes. Meant to be built into again and again: once it has held the longest list it allocates
/// nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    entries: Vec<Descriptor>,
    /// The same copies before neighbours were merged, where they are even.
    even: EvenList,
    bytes: u64,
    /// Behind the last byte of any source, and of any destination.
    ends: (u64, u64),
}

impl Descriptors {
    /// Most descriptors of a block; the NCCL device queue has as many in a slot.
    pub const BLOCK: usize = 2048;

    /// No copies.
    pub fn new() -> Self {
        Self::default()
    }

    /// No copies, with room for `descriptors`.
    pub fn with_capacity(descriptors: usize) -> Self {
        Self {
            entries: Vec::with_capacity(descriptors),
            even: EvenList::with_capacity(descriptors),
            ..Self::default()
        }
    }

    /// Replaces the content by the copies of `list`: checked, neighbours merged, pieces of no
    /// bytes dropped.
    ///
    /// One pass when the destinations ascend; otherwise the copies are sorted by destination.
    ///
    /// # Errors
    /// When the list breaks `limits`; there are then no copies.
    pub fn build(&mut self, list: &[Fragment], limits: Limits) -> Result<(), ScatterError> {
        let result = self.fill(list, limits);
        if result.is_err() {
            self.clear();
        }
        result
    }

    /// Removes all copies and keeps their room.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.even.clear();
        self.bytes = 0;
        self.ends = (0, 0);
    }

    /// All copies.
    pub fn as_slice(&self) -> &[Descriptor] {
        &self.entries
    }

    /// The same copies as equally long pieces, where they are such and came in the order of their
    /// destinations.
    pub fn even_pieces(&self) -> Option<EvenPieces<'_>> {
        self.even.pieces()
    }

    /// Descriptors for which there is room without new memory.
    pub fn capacity(&self) -> usize {
        self.entries.capacity()
    }

    /// Lets go of room for more than `descriptors`, so that one long list does not hold memory for
    /// ever.
    pub fn shrink_to(&mut self, descriptors: usize) {
        self.entries.shrink_to(descriptors);
        self.even.shrink_to(descriptors);
    }

    /// All copies in blocks of at most [`Self::BLOCK`].
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = &[Descriptor]> {
        self.entries.chunks(Self::BLOCK)
    }

    /// Number of copies.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is to be copied.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Where the pool must at least end, so that every source lies inside.
    pub fn source_end(&self) -> u64 {
        self.ends.0
    }

    /// Where the destination must at least end.
    pub fn destination_end(&self) -> u64 {
        self.ends.1
    }

    /// Bytes of all copies together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fill(&mut self, fragments: &[Fragment], limits: Limits) -> Result<(), ScatterError> {
        self.clear();
        let mut bytes = 0u64;
        let mut ascending = true;
        // Where the last copy ends; none ends at 0, so nothing merges into the first.
        let (mut source_end, mut destination_end) = (0, 0);
        for (index, fragment) in fragments.iter().enumerate() {
            if fragment.length == 0 {
                continue;
            }
            let (descriptor, ends) = check(index, fragment, limits)?;
            // Lengths of u32 in a slice cannot pass u64.
            bytes += u64::from(fragment.length);
            ascending &= fragment.destination_offset >= destination_end;
            let adjacent = fragment.source_offset == source_end
                && fragment.destination_offset == destination_end;
            (source_end, destination_end) = ends;
            self.ends = (
                self.ends.0.max(source_end),
                self.ends.1.max(destination_end),
            );
            self.even.push(descriptor, fragments.len());
            append(&mut self.entries, descriptor, adjacent);
        }
        if bytes != limits.received_bytes {
            return Err(ScatterError::Total {
                expected: limits.received_bytes,
                arrived: bytes,
            });
        }
        if !ascending {
            self.order()?;
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Sorts by destination, refuses overlaps and merges what became neighbours; in place.
    fn order(&mut self) -> Result<(), ScatterError> {
        self.entries
            .sort_unstable_by_key(|entry| entry.destination_offset);
        let mut kept: usize = 0;
        for index in 0..self.entries.len() {
            let entry = self.entries[index];
            let Some(last) = kept.checked_sub(1).map(|last| &mut self.entries[last]) else {
                kept = 1;
                continue;
            };
            let end = last.destination_offset + u64::from(last.length);
            if entry.destination_offset < end {
                return Err(ScatterError::Overlap {
                    destination_offset: entry.destination_offset,
                    bytes: (end - entry.destination_offset).min(entry.length.into()),
                });
            }
            let source_end = u64::from(last.source_offset) + u64::from(last.length);
            let merged = last.length.checked_add(entry.length);
            match merged {
                Some(length)
                    if entry.destination_offset == end
                        && u64::from(entry.source_offset) == source_end =>
                {
                    last.length = length;
                }
                _ => {
                    self.entries[kept] = entry;
                    kept += 1;
                }
            }
        }
        self.entries.truncate(kept);
        Ok(())
    }
}

/// Checks one fragment alone; also yields the ends of its source and destination.
fn check(
    index: usize,
    fragment: &Fragment,
    limits: Limits,
) -> Result<(Descriptor, (u64, u64)), ScatterError> {
    let Fragment {
        source_offset,
        length,
        destination_offset,
    } = *fragment;
    let source_end = source_offset
        .checked_add(length.into())
        .filter(|end| *end <= limits.pool_bytes && source_offset <= u32::MAX.into())
        .ok_or(ScatterError::Source {
            index,
            source_offset,
            length,
            pool_bytes: limits.pool_bytes,
        })?;
    let destination_end = destination_offset
        .checked_add(length.into())
        .filter(|end| *end <= limits.destination_bytes)
        .ok_or(ScatterError::Destination {
            index,
            destination_offset,
            length,
            destination_bytes: limits.destination_bytes,
        })?;
    let descriptor = Descriptor {
        source_offset: source_offset as u32,
        length,
        destination_offset,
    };
    Ok((descriptor, (source_end, destination_end)))
}

/// Lengthens the last copy when `next` continues it, else adds a copy.
fn append(entries: &mut Vec<Descriptor>, next: Descriptor, adjacent: bool) {
    if adjacent
        && let Some(last) = entries.last_mut()
        && let Some(length) = last.length.checked_add(next.length)
    {
        last.length = length;
    } else {
        entries.push(next);
    }
}

/// A scatter list that must not be unpacked.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScatterError {
    /// A fragment reads outside the bounce pool, or its source cannot be named in 32 bits.
    #[error(
        "fragment {index}: expected a source inside the pool of {pool_bytes} bytes, in its first 4 GiB, {length} bytes at {source_offset} arrived; close the channel"
    )]
    Source {
        /// Its place in the list.
        index: usize,
        /// Its source.
        source_offset: u64,
        /// Its length in bytes.
        length: u32,
        /// Length of the pool in bytes.
        pool_bytes: u64,
    },
    /// A fragment writes outside the posted destination.
    #[error(
        "fragment {index}: expected a destination inside {destination_bytes} bytes, {length} bytes at {destination_offset} arrived; close the channel"
    )]
    Destination {
        /// Its place in the list.
        index: usize,
        /// Its destination.
        destination_offset: u64,
        /// Its length in bytes.
        length: u32,
        /// Length of the destination in bytes.
        destination_bytes: u64,
    },
    /// Two fragments write the same bytes.
    #[error(
        "expected every destination byte once, {bytes} bytes at {destination_offset} came twice; close the channel"
    )]
    Overlap {
        /// First byte written twice.
        destination_offset: u64,
        /// How many.
        bytes: u64,
    },
    /// The fragments are not what was received.
    #[error(
        "expected fragments of {expected} bytes together, {arrived} bytes arrived; close the channel"
    )]
    Total {
        /// Bytes that the network reported.
        expected: u64,
        /// Bytes of the fragments.
        arrived: u64,
    },
}

#[cfg(test)]
mod tests;
