//! Words that two processes of a host share: one writes them, the other looks.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Longest words of a peer that are mapped.
const MOST_BYTES: usize = 1 << 30;

/// Words in memory that other processes may have mapped, too.
#[derive(Debug)]
pub struct SharedWords {
    start: NonNull<AtomicU64>,
    words: usize,
    file: OwnedFd,
}

// SAFETY: the words are atomic, and the mapping lives as long as this.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// So many zeros, at least one, for another process to [open](Self::open).
    ///
    /// # Errors
    /// The system has no memory or no descriptor.
    pub fn new(words: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("tcpx-words", flags)?;
        ftruncate(&file, (words * size_of::<u64>()) as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, words, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// The words of another process, which may write them at any time; they cannot be written here.
    ///
    /// # Errors
    /// The file may become shorter, or holds too much, or no word.
    pub fn open(file: OwnedFd) -> io::Result<Self> {
        let seals = fcntl_get_seals(&file)?;
        let bytes = usize::try_from(fstat(&file)?.st_size).unwrap_or(usize::MAX);
        // A page that is gone would end this process.
        if !seals.contains(SealFlags::SHRINK) || !(8..=MOST_BYTES).contains(&bytes) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(file, bytes / 8, ProtFlags::READ)
    }

    fn map(file: OwnedFd, words: usize, protection: ProtFlags) -> io::Result<Self> {
        let (bytes, flags) = (words * size_of::<u64>(), MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, protection, flags, &file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, words, file })
    }

    /// The words. Those that were [opened](Self::open) are for loads alone.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped as long as this lives; whoever else writes does so by whole words, or what
        // is read means nothing.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl AsFd for SharedWords {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: mapped by this, whole, and nobody borrows it any more.
        unsafe { munmap(self.start.as_ptr().cast(), self.words * size_of::<u64>()) }.ok();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn words_are_seen_by_who_opened_them() {
        let own = SharedWords::new(1000).unwrap();
        let opened = SharedWords::open(own.as_fd().try_clone_to_owned().unwrap()).unwrap();
        own.words()[999].store(7, Ordering::Release);
        assert_eq!(opened.words()[999].load(Ordering::Acquire), 7);
        assert_eq!(opened.words().len(), 1000);
    }

    #[test]
    fn a_file_that_may_shrink_is_refused() {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 4096).unwrap();
        assert!(SharedWords::open(file).is_err());
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert!(SharedWords::open(file).is_err(), "it is empty");
    }
}
