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
pub type ScatterList = Vec<Fragment>;
