//! What a receive yields: which bytes of a bounce pool belong where.

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
///
/// Meant to be cleared and filled again: once it has held the longest list it allocates nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScatterList {
    fragments: Vec<Fragment>,
}

impl ScatterList {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty list with room for `fragments` pieces.
    pub fn with_capacity(fragments: usize) -> Self {
        Self {
            fragments: Vec::with_capacity(fragments),
        }
    }

    /// Adds a piece at the end.
    pub fn push(&mut self, fragment: Fragment) {
        self.fragments.push(fragment);
    }

    /// Removes all pieces and keeps their room.
    pub fn clear(&mut self) {
        self.fragments.clear();
    }

    /// Keeps the first `fragments` pieces.
    pub fn truncate(&mut self, fragments: usize) {
        self.fragments.truncate(fragments);
    }

    /// The pieces in order.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.fragments.len()
    }

    /// Whether there is no piece.
    pub fn is_empty(&self) -> bool {
        self.fragments.is_empty()
    }
}

impl Extend<Fragment> for ScatterList {
    fn extend<T: IntoIterator<Item = Fragment>>(&mut self, fragments: T) {
        self.fragments.extend(fragments);
    }
}

impl FromIterator<Fragment> for ScatterList {
    fn from_iter<T: IntoIterator<Item = Fragment>>(fragments: T) -> Self {
        Self {
            fragments: fragments.into_iter().collect(),
        }
    }
}
