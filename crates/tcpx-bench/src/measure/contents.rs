//! Fresh contents in memory of either kind, and their comparison.

use tcpx::Region;

use crate::Error;
use crate::pattern::Pattern;

/// How much is filled, read or compared at a time, in bytes.
const PIECE: usize = 4 << 20;

/// Writes the pattern into the first `bytes` of `region`.
///
/// # Errors
/// The memory cannot be written.
pub fn fill(region: &Region, bytes: u64, pattern: Pattern) -> Result<(), Error> {
    each_piece(0, bytes, |offset, piece| {
        pattern.fill(offset as u64, piece);
        let written = region.write_from(offset, piece);
        written.map_err(Error::memory("fill the source"))
    })
}

/// Writes a value that is no payload over the whole region, so that a byte that never arrives is
/// seen.
///
/// # Errors
/// The memory cannot be written.
pub fn poison(region: &Region) -> Result<(), Error> {
    each_piece(0, region.len() as u64, |offset, piece| {
        piece.fill(0xa5);
        let written = region.write_from(offset, piece);
        written.map_err(Error::memory("poison the destination"))
    })
}

/// Compares every byte of `region` from `from` to `to` with the pattern.
///
/// # Errors
/// The first byte that differs, or why the memory cannot be read.
pub fn compare(region: &Region, from: u64, to: u64, pattern: Pattern) -> Result<(), Error> {
    each_piece(from, to, |offset, piece| {
        let read = region.read_to(offset, piece);
        read.map_err(Error::memory("read the destination back"))?;
        Ok(pattern.compare(offset as u64, piece)?)
    })
}

fn each_piece(
    from: u64,
    bytes: u64,
    mut work: impl FnMut(usize, &mut [u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut piece = vec![0; PIECE.min(bytes)];
    let mut offset = usize::try_from(from).unwrap_or(usize::MAX);
    while offset < bytes {
        let count = PIECE.min(bytes - offset);
        work(offset, &mut piece[..count])?;
        offset += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts_in_a_comparison() {
        let bytes = PIECE as u64 + 3;
        let region = Region::host(PIECE + 4096).expect("memory");
        let pattern = Pattern::new(5);
        fill(&region, bytes, pattern).expect("filled");
        let compare = || compare(&region, 0, bytes, pattern);
        compare().expect("equal");
        for at in [0, PIECE - 1, PIECE, PIECE + 2] {
            let mut byte = [0];
            region.read_to(at, &mut byte).expect("read");
            region.write_from(at, &[byte[0] ^ 1]).expect("written");
            assert!(matches!(compare(), Err(Error::Contents(_))), "{at}");
            region.write_from(at, &byte).expect("written");
        }
        compare().expect("equal again");
        poison(&region).expect("poisoned");
        assert!(compare().is_err());
    }
}
