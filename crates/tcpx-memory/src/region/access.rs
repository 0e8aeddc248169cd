//! Safe access to a region's bytes. Every call leases what it touches, so it cannot race with a
//! transfer.

use std::ops::{Range, RangeBounds};

use super::{HostParts, Region};
use crate::cpu;
use crate::error::MemoryError;
use crate::job::Work;
use crate::lease::{Access, Lease};
use crate::worker::blocking;

/// Bytes that one call copies to a buffer for a message: glibc copies more by `rep movsb`, which
/// some processors do at a twentieth of the speed from the beginning of a page to byte 16 of one,
/// where long buffers of `malloc` begin.
const PIECE_BYTES: usize = 2048;

const READER: &str = "a read by the program";
const WRITER: &str = "a write by the program";

/// Appends the `len` bytes at `from` to the buffer of a message, [`PIECE_BYTES`] at a time.
///
/// # Safety
/// The bytes must be initialised and stay as they are meanwhile.
pub(crate) unsafe fn append_in_pieces(from: *const u8, len: usize, bytes: &mut Vec<u8>) {
    bytes.reserve(len);
    for at in (0..len).step_by(PIECE_BYTES) {
        let (piece, filled) = (PIECE_BYTES.min(len - at), bytes.len());
        // SAFETY: by the caller's promise; there is room for as many bytes, and they are set before
        // they count.
        unsafe {
            from.add(at).copy_to(bytes.as_mut_ptr().add(filled), piece);
            bytes.set_len(filled + piece);
        }
    }
}

impl Region {
    /// Copies `bytes` into the region at `offset`. Blocks; for GPU memory it first waits for the
    /// work on the default streams.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Busy`], or the driver's refusal.
    pub fn write_from(&self, offset: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        self.slice(span(offset, bytes.len()))?.write_from(bytes)
    }

    /// Copies from the region at `offset` into `bytes`. Blocks; for GPU memory it first waits for
    /// the work on the default streams.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Busy`], or the driver's refusal.
    pub fn read_to(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.slice(span(offset, bytes.len()))?.read_to(bytes)
    }

    /// Calls `read` with the bytes of a range.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Busy`], [`MemoryError::NotCpuAccessible`].
    pub fn with_bytes<R>(
        &self,
        range: impl RangeBounds<usize>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, MemoryError> {
        let lease = self.lease_as(range, Access::Read, READER)?;
        let pointer = cpu_pointer(&lease)?;
        // SAFETY: the bytes are initialised and alive while the lease is, and nobody writes them
        // while it is held.
        Ok(read(unsafe {
            std::slice::from_raw_parts(pointer, lease.range().len())
        }))
    }

    /// Calls `change` with the bytes of a range.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Busy`], [`MemoryError::NotCpuAccessible`].
    pub fn with_bytes_mut<R>(
        &self,
        range: impl RangeBounds<usize>,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, MemoryError> {
        let lease = self.lease_as(range, Access::Write, WRITER)?;
        let pointer = cpu_pointer(&lease)?;
        // SAFETY: the bytes are initialised and alive while the lease is, and nobody else touches
        // them while it is held.
        Ok(change(unsafe {
            std::slice::from_raw_parts_mut(pointer, lease.range().len())
        }))
    }

    /// CRC32C (Castagnoli) of a range. Blocks; for GPU memory it first waits for the work on the
    /// default streams.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Busy`], or the driver's refusal.
    pub fn checksum(&self, range: impl RangeBounds<usize>) -> Result<u32, MemoryError> {
        let of = self.lease_as(range, Access::Read, READER)?.all();
        let work = Work::checksum(of);
        let sum = match self.kind().is_cpu_accessible() {
            true => cpu::run(&work)?,
            false => blocking::in_turn(work)?,
        };
        // Of 32 bits.
        Ok(sum as u32)
    }

    /// Writes bytes of host memory that the caller holds a lease on; the range must have been
    /// checked.
    pub(crate) fn write_held(&self, offset: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let mut from = bytes.as_ptr();
        for (to, len) in self.parts(span(offset, bytes.len()))? {
            // SAFETY: the range was checked, its parts have as many bytes, and a lease keeps others
            // away from it. The program's slice may be part of foreign memory, hence a copy that
            // allows overlap.
            unsafe {
                to.copy_from(from, len);
                from = from.add(len);
            }
        }
        Ok(())
    }

    /// As [`Self::write_held`]: appends them to `bytes`.
    pub(crate) fn append_held(
        &self,
        range: Range<usize>,
        bytes: &mut Vec<u8>,
    ) -> Result<(), MemoryError> {
        bytes.reserve(range.len());
        for (from, len) in self.parts(range)? {
            // SAFETY: as in `write_held`.
            unsafe { append_in_pieces(from, len, bytes) };
        }
        Ok(())
    }

    /// As [`Self::write_held`]: reads them.
    pub(crate) fn read_held(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let mut to = bytes.as_mut_ptr();
        for (from, len) in self.parts(span(offset, bytes.len()))? {
            // SAFETY: as in `write_held`.
            unsafe {
                from.copy_to(to, len);
                to = to.add(len);
            }
        }
        Ok(())
    }

    fn parts(&self, range: Range<usize>) -> Result<HostParts<'_>, MemoryError> {
        let kind = self.kind();
        let parts = self.host_parts(range);
        parts.ok_or(MemoryError::NotCpuAccessible { kind })
    }
}

/// A range whose end cannot wrap; one that would is out of bounds of any region.
fn span(offset: usize, len: usize) -> Range<usize> {
    offset..offset.saturating_add(len)
}

fn cpu_pointer(lease: &Lease) -> Result<*mut u8, MemoryError> {
    lease
        .all()
        .host_ptr()
        .ok_or_else(|| MemoryError::NotCpuAccessible {
            kind: lease.region().kind(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let region = Region::host(100).unwrap();
        region.write_from(90, b"0123456789").unwrap();
        let mut back = [0; 4];
        region.read_to(93, &mut back).unwrap();
        assert_eq!(&back, b"3456");
        region
            .with_bytes_mut(93..95, |bytes| bytes.fill(b'x'))
            .unwrap();
        region
            .with_bytes(90.., |bytes| assert_eq!(bytes, b"012xx56789"))
            .unwrap();
    }

    #[test]
    fn nothing_is_touched_outside() {
        let region = Region::host(100).unwrap();
        assert!(matches!(
            region.write_from(91, &[1; 10]),
            Err(MemoryError::OutOfBounds { .. })
        ));
        assert!(region.write_from(usize::MAX, &[1; 10]).is_err());
        assert!(region.read_to(101, &mut []).is_err());
        assert!(region.with_bytes_mut(..101, |_| ()).is_err());
    }

    #[test]
    fn checksums_are_crc32c() {
        let region = Region::host(20).unwrap();
        region.write_from(3, b"123456789").unwrap();
        assert_eq!(region.checksum(3..12), Ok(0xE306_9283));
        assert!(region.checksum(..21).is_err());
    }

    #[test]
    fn a_closure_that_reads_twice_may_and_one_that_writes_may_not() {
        let region = Region::host(20).unwrap();
        let inner = region.clone();
        let nested = region.with_bytes(.., |_| {
            inner
                .with_bytes(.., |_| ())
                .and_then(|()| inner.write_from(0, &[1]))
        });
        assert!(matches!(
            nested,
            Ok(Err(MemoryError::Busy {
                held: Access::Read,
                ..
            }))
        ));
    }
}
