//! Where received files go: a partial file beside the final name, which appears whole or not at
//! all.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    self as sys, AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, Timespec,
    Timestamps,
};
use rustix::io::Errno;

use super::manifest::{Entry, Kind, PARTIAL_END, PARTIAL_START};
use crate::interrupt;
use crate::sizes::Amount;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod turns;

#[cfg(test)]
use turns::before_call;
#[cfg(not(test))]
fn before_call() {}

/// What went wrong at the destination; nothing incomplete has a final name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    #[error("{} exists already and is no {expected}", .path.display())]
    OtherKind {
        path: PathBuf,
        expected: &'static str,
    },
    #[error("{} is being written by another transfer", .0.display())]
    Busy(PathBuf),
    #[error("the partial file of {} was moved or removed while it was written", .0.display())]
    Lost(PathBuf),
    #[error("{} has {free} free, the transfer needs {needed}", .directory.display())]
    NoSpace {
        directory: PathBuf,
        needed: Amount,
        free: Amount,
    },
    #[error("could not {doing} in {}: {source}", .directory.display())]
    Io {
        doing: &'static str,
        directory: PathBuf,
        source: io::Error,
    },
}

/// The directory that everything goes into.
#[derive(Debug)]
pub(crate) struct Store {
    root: OwnedFd,
    path: PathBuf,
    overwrite: bool,
    /// Permissions that this user's new files do not get.
    umask: u32,
    /// Directories that were there and could not be written, with the modes that they get back.
    unlocked: Vec<(OwnedFd, Mode)>,
}

/// Which file it is, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

/// What lies at a file's place before the transfer.
#[derive(Debug)]
pub(crate) enum Present {
    /// A file of the same size has the final name.
    Final { bytes: u64 },
    /// What an earlier transfer left. Nobody else changes it while it is held.
    Partial { claim: Claim, bytes: u64 },
}

/// The contents of what is present.
#[derive(Debug)]
pub(crate) struct Hashed {
    /// BLAKE3 of all bytes so far.
    pub(crate) hasher: blake3::Hasher,
    pub(crate) identity: Identity,
}

/// A partial file that is locked, and that has its name: no other transfer writes it, gives it
/// another name or takes it away.
///
/// The lock is the file's, not the name's. While a transfer waits between opening a file and
/// locking it, the one that has the lock may give the file its final name. So the name is looked at
/// behind the lock, and every transfer keeps the lock until it no longer uses the name.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
    parent: OwnedFd,
    temporary: String,
}

/// A file under its temporary name.
///
/// Dropped before it is published or kept, it stays: [`PartialFile::remove`] takes it away.
#[derive(Debug)]
pub(crate) struct PartialFile {
    claim: Claim,
    name: String,
    shown: PathBuf,
    pub(crate) bytes: u64,
    /// Bytes of these that are on the disk.
    flushed: u64,
}

/// A directory, and no link to one.
const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// How often a partial file may change its owner while this transfer tries to have it.
const MOST_TRIES: usize = 100;

/// Files that are flushed at once.
const FLUSHES: usize = 8;

/// Zeros of this length and place become a hole.
const HOLE: usize = 64 << 10;

/// Bytes that the page cache may hold of a file, so that its last flush is short.
const MOST_UNFLUSHED: u64 = 256 << 20;

impl Store {
    /// Opens the directory.
    pub(crate) fn open(path: &Path, overwrite: bool) -> Result<Self, StoreError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = sys::open(path, flags, Mode::empty()).map_err(|source| StoreError::Io {
            doing: "open the directory",
            directory: path.to_owned(),
            source: source.into(),
        })?;
        Ok(Self {
            root,
            path: path.to_owned(),
            overwrite,
            umask: umask(),
            unlocked: Vec::new(),
        })
    }

    fn failed(&self, doing: &'static str) -> impl Fn(Errno) -> StoreError {
        move |source| StoreError::Io {
            doing,
            directory: self.path.clone(),
            source: source.into(),
        }
    }

    /// The directory that holds `path`, and the name in it. No symbolic link is followed on the
    /// way.
    fn parent<'a>(&self, path: &'a str) -> Result<(OwnedFd, &'a str), StoreError> {
        let (parents, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut at = sys::openat(
            &self.root,
            ".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(self.failed("open the directory"))?;
        for part in parents.split('/').filter(|part| !part.is_empty()) {
            at = sys::openat(&at, part, DIRECTORY, Mode::empty()).map_err(|error| match error {
                Errno::NOTDIR | Errno::LOOP => StoreError::OtherKind {
                    path: self.path.join(parents),
                    expected: "directory",
                },
                other => self.failed("open a directory")(other),
            })?;
        }
        Ok((at, name))
    }

    /// The same; `None` where a directory on the way is missing, which then comes with the
    /// transfer.
    fn parent_if_there<'a>(&self, path: &'a str) -> Result<Option<(OwnedFd, &'a str)>, StoreError> {
        match self.parent(path) {
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(None)
            }
            other => other.map(Some),
        }
    }

    /// The type and size of what has the final name.
    fn kind_and_size(
        &self,
        parent: &OwnedFd,
        name: &str,
    ) -> Result<Option<(FileType, u64)>, StoreError> {
        before_call();
        match sys::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some((
                FileType::from_raw_mode(stat.st_mode),
                u64::try_from(stat.st_size).unwrap_or(0),
            ))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(self.failed("look at a file")(error)),
        }
    }

    /// Something else has the name of `entry`.
    pub(crate) fn exists(&self, entry: &Entry) -> StoreError {
        StoreError::Exists(self.path.join(&entry.path))
    }

    /// Refuses what cannot become `entry`, before anything was written.
    pub(crate) fn check(&self, entry: &Entry) -> Result<(), StoreError> {
        let Some((parent, name)) = self.parent_if_there(&entry.path)? else {
            return Ok(());
        };
        let path = || self.path.join(&entry.path);
        let other_kind = |expected| {
            Err(StoreError::OtherKind {
                path: path(),
                expected,
            })
        };
        match (self.kind_and_size(&parent, name)?, &entry.kind) {
            (None, _) | (Some((FileType::Directory, _)), Kind::Directory) => Ok(()),
            (Some(_), Kind::Directory) => other_kind("directory"),
            (Some((FileType::Directory, _)), Kind::Link { .. }) => other_kind("link"),
            (Some((FileType::Directory, _)), _) => other_kind("file"),
            (Some((FileType::Symlink, _)), Kind::Link { target }) => {
                let there = sys::readlinkat(&parent, name, Vec::new());
                if self.overwrite || there.is_ok_and(|there| there.as_bytes() == target.as_bytes())
                {
                    Ok(())
                } else {
                    Err(StoreError::Exists(path()))
                }
            }
            // Equal contents are found out later.
            (Some((FileType::RegularFile, bytes)), Kind::File { bytes: wanted, .. })
                if bytes == *wanted =>
            {
                Ok(())
            }
            (Some(_), _) if self.overwrite => Ok(()),
            (Some(_), _) => Err(StoreError::Exists(path())),
        }
    }

    /// Refuses more than fits.
    pub(crate) fn check_space(&self, needed: u64) -> Result<(), StoreError> {
        if let Ok(space) = sys::fstatvfs(&self.root) {
            let free = space.f_bavail.saturating_mul(space.f_frsize);
            if free < needed {
                return Err(StoreError::NoSpace {
                    directory: self.path.clone(),
                    needed: Amount(needed),
                    free: Amount(free),
                });
            }
        }
        Ok(())
    }

    /// Makes the directory of `entry`; `false` if it is there.
    pub(crate) fn make_directory(&mut self, entry: &Entry) -> Result<bool, StoreError> {
        let (parent, name) = self.parent(&entry.path)?;
        // What is in it has to be written first, whatever its mode is at the end.
        let mode = Mode::from_raw_mode(entry.mode & 0o777) | Mode::RWXU;
        match sys::mkdirat(&parent, name, mode) {
            Ok(()) => return Ok(true),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(self.failed("create a directory")(error)),
        }
        let opened = sys::openat(&parent, name, DIRECTORY, Mode::empty())
            .and_then(|directory| Ok((sys::fstat(&directory)?.st_mode & 0o7777, directory)));
        let (mode, directory) = opened.map_err(self.failed("look at a directory"))?;
        let mode = Mode::from_raw_mode(mode);
        // Of another user's it is the first file that says so.
        if !mode.contains(Mode::RWXU) && sys::fchmod(&directory, mode | Mode::RWXU).is_ok() {
            self.unlocked.push((directory, mode));
        }
        Ok(false)
    }

    /// Gives directories that were there their modes back.
    fn lock_again(&mut self) {
        for (directory, mode) in self.unlocked.drain(..) {
            let _ = sys::fchmod(&directory, mode);
        }
    }

    /// What is there of the file already: one of the same size, or what an earlier transfer left of
    /// it.
    pub(crate) fn present(&self, entry: &Entry) -> Result<Option<Present>, StoreError> {
        let Kind::File { bytes: wanted, .. } = entry.kind else {
            return Ok(None);
        };
        let Some((parent, name)) = self.parent_if_there(&entry.path)? else {
            return Ok(None);
        };
        if let Some((FileType::RegularFile, bytes)) = self.kind_and_size(&parent, name)?
            && bytes == wanted
        {
            return Ok(Some(Present::Final { bytes }));
        }
        let Some(claim) = self.claim(entry, OFlags::empty())? else {
            return Ok(None);
        };
        let bytes = claim.file.metadata().map_or(0, |metadata| metadata.len());
        let is_beginning = (1..=wanted).contains(&bytes);
        Ok(is_beginning.then_some(Present::Partial { claim, bytes }))
    }

    /// Reads what is present; `None` if it cannot be read, or is no longer there.
    pub(crate) fn hash(&self, entry: &Entry, present: &mut Present) -> Option<Hashed> {
        match present {
            Present::Partial { claim, bytes } => hashed(&mut claim.file, *bytes),
            Present::Final { bytes } => {
                let (parent, name) = self.parent(&entry.path).ok()?;
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                before_call();
                let file = sys::openat(&parent, name, flags, Mode::empty()).ok()?;
                let mut file = File::from(file);
                let metadata = file.metadata().ok()?;
                let is_there = metadata.is_file() && metadata.len() == *bytes;
                is_there.then(|| hashed(&mut file, *bytes))?
            }
        }
    }

    /// Has the partial file of `entry` for this transfer alone; `None` if there is none and
    /// `create` does not say [`OFlags::CREATE`].
    fn claim(&self, entry: &Entry, create: OFlags) -> Result<Option<Claim>, StoreError> {
        let shown = || self.path.join(&entry.path);
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | create;
        for _ in 0..MOST_TRIES {
            let (parent, name) = self.parent(&entry.path)?;
            let temporary = temporary(name);
            before_call();
            let opened = sys::openat(&parent, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR);
            let file = match opened {
                Err(Errno::NOENT) => return Ok(None),
                other => other.map_err(self.failed("open a partial file"))?,
            };
            before_call();
            match sys::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(StoreError::Busy(shown())),
                Err(error) => return Err(self.failed("lock a partial file")(error)),
            }
            let claim = Claim {
                file: File::from(file),
                parent,
                temporary,
            };
            let failed = self.failed("look at a partial file");
            if !claim.has_name().map_err(&failed)? {
                continue;
            }
            let stat = sys::fstat(&claim.file).map_err(&failed)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Err(StoreError::OtherKind {
                    path: shown().with_file_name(&claim.temporary),
                    expected: "file",
                });
            }
            if stat.st_nlink == 1 {
                return Ok(Some(claim));
            }
            // It has a final name as well, from a process that ended between giving it that one and
            // taking this one.
            claim.remove();
        }
        Err(StoreError::Busy(shown()))
    }

    /// Goes on with the partial file of `entry` after its first `from` bytes; these are of `claim`.
    pub(crate) fn begin(
        &self,
        entry: &Entry,
        claim: Option<Claim>,
        from: u64,
    ) -> Result<PartialFile, StoreError> {
        let shown = self.path.join(&entry.path);
        let (parent, name) = self.parent(&entry.path)?;
        let claim = match claim {
            Some(claim) => claim,
            None => self
                .claim(entry, OFlags::CREATE)?
                .ok_or_else(|| StoreError::Busy(shown.clone()))?,
        };
        // Behind the lock: whoever gave the file its name had it before.
        if !self.overwrite && self.kind_and_size(&parent, name)?.is_some() {
            claim.remove();
            return Err(StoreError::Exists(shown));
        }
        before_call();
        let mut file = &claim.file;
        file.set_len(from)
            .and_then(|()| file.seek(SeekFrom::Start(from)))
            .map_err(|source| StoreError::Io {
                doing: "go on with a partial file",
                directory: self.path.clone(),
                source,
            })?;
        Ok(PartialFile {
            claim,
            name: name.to_owned(),
            shown,
            bytes: from,
            flushed: from,
        })
    }

    /// Writes out what the files hold, so that their names can follow. Several at once: the file
    /// system writes its journal once for those that wait together.
    pub(crate) fn flush(&self, files: &mut [(PartialFile, Entry)]) -> Result<(), StoreError> {
        let share = files.len().div_ceil(FLUSHES).max(1);
        let flush = |files: &mut [(PartialFile, Entry)]| {
            files.iter_mut().try_for_each(|(file, _)| file.flush())
        };
        let flushed = std::thread::scope(|scope| {
            let threads = files
                .chunks_mut(share)
                .map(|files| std::thread::Builder::new().spawn_scoped(scope, move || flush(files)));
            let threads = threads.collect::<io::Result<Vec<_>>>()?;
            let ends = threads.into_iter().map(|thread| {
                let end = thread.join();
                end.unwrap_or_else(|_| Err(io::Error::other("a thread ended without a result")))
            });
            ends.collect::<io::Result<()>>()
        });
        flushed.map_err(|source| StoreError::Io {
            doing: "flush the files",
            directory: self.path.clone(),
            source,
        })
    }

    /// Gives a flushed file its mode, its time and its final name.
    pub(crate) fn publish(&self, partial: PartialFile, entry: &Entry) -> Result<(), StoreError> {
        let failed = self.failed("give the file its name");
        let PartialFile {
            claim, name, shown, ..
        } = partial;
        self.dress(&claim.file, entry).map_err(&failed)?;
        if !claim.has_name().map_err(&failed)? {
            return Err(StoreError::Lost(shown));
        }
        let (parent, from, to) = (&claim.parent, claim.temporary.as_str(), name.as_str());
        before_call();
        let named = if self.overwrite {
            sys::renameat(parent, from, parent, to)
        } else {
            match sys::renameat_with(parent, from, parent, to, RenameFlags::NOREPLACE) {
                // Not every file system has it.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    sys::linkat(parent, from, parent, to, AtFlags::empty()).and_then(|()| {
                        before_call();
                        sys::unlinkat(parent, from, AtFlags::empty())
                    })
                }
                other => other,
            }
        };
        match named {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => {
                claim.remove();
                Err(StoreError::Exists(shown))
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Gives a file that was there already the mode and the time of `entry`, where its owner lets
    /// files be replaced.
    pub(crate) fn refresh(&self, entry: &Entry, identity: Identity) -> Result<(), StoreError> {
        if !self.overwrite {
            return Ok(());
        }
        let (parent, name) = self.parent(&entry.path)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let failed = self.failed("set mode and time");
        let file = sys::openat(&parent, name, flags, Mode::empty()).map_err(&failed)?;
        let is_same = Identity::of(&sys::fstat(&file).map_err(&failed)?) == identity;
        // Another transfer may have replaced it by its own.
        if is_same {
            self.dress(&file, entry).map_err(&failed)
        } else {
            Ok(())
        }
    }

    /// Makes the symbolic link of `entry`; `false` if it is there, or is none.
    pub(crate) fn link(&self, entry: &Entry) -> Result<bool, StoreError> {
        let Kind::Link { target } = &entry.kind else {
            return Ok(false);
        };
        let (parent, name) = self.parent(&entry.path)?;
        let failed = self.failed("create a symbolic link");
        match sys::symlinkat(target.as_str(), &parent, name) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let there = sys::readlinkat(&parent, name, Vec::new());
                if there.is_ok_and(|there| there.as_bytes() == target.as_bytes()) {
                    return Ok(false);
                }
                if !self.overwrite {
                    return Err(StoreError::Exists(self.path.join(&entry.path)));
                }
                // No file has a name with a slash in it, so none has this partial file.
                let temporary = temporary(&format!("{name}/"));
                let _ = sys::unlinkat(&parent, temporary.as_str(), AtFlags::empty());
                sys::symlinkat(target.as_str(), &parent, temporary.as_str()).map_err(&failed)?;
                sys::renameat(&parent, temporary.as_str(), &parent, name).map_err(&failed)?;
            }
            Err(error) => return Err(failed(error)),
        }
        // Some file systems keep no time for a link.
        let _ = sys::utimensat(&parent, name, &times(entry), AtFlags::SYMLINK_NOFOLLOW);
        Ok(true)
    }

    /// Makes names durable, and gives directories their modes and times, the inner ones first. Of
    /// one that was there the mode is its owner's, and so is the time unless something was put into
    /// it: `is_new` knows an entry that was not there.
    pub(crate) fn finish(
        &mut self,
        entries: &[Entry],
        is_new: impl Fn(usize) -> bool,
    ) -> Result<(), StoreError> {
        self.lock_again();
        let new = (0..entries.len()).filter(|&index| is_new(index));
        let parents = new.filter_map(|index| entries[index].path.rsplit_once('/'));
        let changed: BTreeSet<&str> = parents.map(|(parent, _)| parent).collect();
        let failed = self.failed("set mode and time");
        for (index, entry) in entries.iter().enumerate().rev() {
            if entry.kind != Kind::Directory {
                continue;
            }
            let (parent, name) = self.parent(&entry.path)?;
            let directory = sys::openat(&parent, name, DIRECTORY, Mode::empty())
                .map_err(self.failed("open a directory"))?;
            sys::fsync(&directory).map_err(self.failed("flush a directory"))?;
            if is_new(index) || self.overwrite {
                self.dress(&directory, entry).map_err(&failed)?;
            } else if changed.contains(entry.path.as_str()) {
                sys::futimens(&directory, &times(entry)).map_err(&failed)?;
            }
        }
        sys::fsync(&self.root).map_err(self.failed("flush the directory"))
    }

    /// Mode and time. This user's umask holds, as for all of his new files.
    fn dress(&self, file: impl AsFd, entry: &Entry) -> Result<(), Errno> {
        before_call();
        let mode = entry.mode & 0o777 & !self.umask;
        sys::fchmod(&file, Mode::from_raw_mode(mode))?;
        sys::futimens(&file, &times(entry))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.lock_again();
    }
}

impl Claim {
    /// Whether the temporary name is still this file's.
    fn has_name(&self) -> Result<bool, Errno> {
        before_call();
        let ours = sys::fstat(&self.file)?;
        match sys::statat(
            &self.parent,
            self.temporary.as_str(),
            AtFlags::SYMLINK_NOFOLLOW,
        ) {
            Ok(named) => Ok(Identity::of(&named) == Identity::of(&ours)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes the temporary name away.
    fn remove(self) {
        if self.has_name() == Ok(true) {
            before_call();
            let _ = sys::unlinkat(&self.parent, self.temporary.as_str(), AtFlags::empty());
        }
    }
}

impl Drop for Claim {
    /// A process that another thread has just forked has the file open for a moment more.
    fn drop(&mut self) {
        let _ = sys::flock(&self.file, FlockOperation::Unlock);
    }
}

impl Present {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Final { bytes } | Self::Partial { bytes, .. } => *bytes,
        }
    }

    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Final { .. })
    }
}

impl PartialFile {
    /// Appends `bytes`; of zeros a hole.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let directory = self.shown.parent().unwrap_or(&self.shown).to_owned();
        self.append(bytes).map_err(|source| StoreError::Io {
            doing: "write",
            directory,
            source,
        })
    }

    fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        static ZEROS: [u8; HOLE] = [0; HOLE];
        before_call();
        let mut file = &self.claim.file;
        while !bytes.is_empty() {
            // Up to the next place where a hole may begin; it may come in two parts.
            let to_next = HOLE - (self.bytes % HOLE as u64) as usize;
            let (part, rest) = bytes.split_at(to_next.min(bytes.len()));
            if part == &ZEROS[..part.len()] {
                file.seek(SeekFrom::Current(part.len() as i64))?;
            } else {
                file.write_all(part)?;
            }
            self.bytes += part.len() as u64;
            bytes = rest;
        }
        if self.bytes - self.flushed >= MOST_UNFLUSHED
            && let Err(error) = self.flush()
        {
            // The system may have dropped what it could not write.
            let _ = self.claim.file.set_len(self.flushed);
            self.bytes = self.flushed;
            return Err(error);
        }
        Ok(())
    }

    /// Writes out what it holds. A hole at the end counts.
    fn flush(&mut self) -> io::Result<()> {
        self.claim.file.set_len(self.bytes)?;
        self.claim.file.sync_data()?;
        self.flushed = self.bytes;
        Ok(())
    }

    /// Leaves what arrived for a later transfer.
    pub(crate) fn keep(&self) {
        let _ = self.claim.file.set_len(self.bytes);
    }

    /// Takes the file away.
    pub(crate) fn remove(self) {
        self.claim.remove();
    }

    /// For a person: where the bytes are that a later transfer goes on with.
    pub(crate) fn kept_at(&self) -> PathBuf {
        self.shown.with_file_name(&self.claim.temporary)
    }
}

/// The name of the partial file for `name`: the same at each start, so that a later one finds it.
fn temporary(name: &str) -> String {
    let digest = blake3::hash(name.as_bytes()).to_hex();
    format!("{PARTIAL_START}{}{PARTIAL_END}", &digest.as_str()[..16])
}

fn times(entry: &Entry) -> Timestamps {
    let time = Timespec {
        tv_sec: entry.seconds,
        tv_nsec: entry.nanoseconds.into(),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

/// Permissions that new files of this process do not get; all of others, where the system does not
/// say. The system call that reads them sets them, for files that other threads make meanwhile.
fn umask() -> u32 {
    const PRIVATE: u32 = 0o077;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let octal = lines.find_map(|line| line.strip_prefix("Umask:"));
    octal.map_or(PRIVATE, |octal| {
        u32::from_str_radix(octal.trim(), 8).unwrap_or(PRIVATE)
    })
}

fn hashed(file: &mut File, bytes: u64) -> Option<Hashed> {
    before_call();
    let identity = Identity::of(&sys::fstat(&*file).ok()?);
    let hasher = hash(file, bytes).ok()?;
    Some(Hashed { hasher, identity })
}

/// BLAKE3 of the first `bytes` of `file`; ends early when a signal comes.
pub(crate) fn hash(file: &mut File, bytes: u64) -> io::Result<blake3::Hasher> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut left = bytes;
    while left > 0 {
        if interrupt::check().is_err() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let count = usize::try_from(left)
            .unwrap_or(buffer.len())
            .min(buffer.len());
        file.read_exact(&mut buffer[..count])?;
        hasher.update(&buffer[..count]);
        left -= count as u64;
    }
    Ok(hasher)
}
