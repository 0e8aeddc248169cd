//! Where received files go: a partial file beside the final name, which appears whole or not at all.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    self as sys, AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Timespec, Timestamps,
};
use rustix::io::Errno;

use super::manifest::{Entry, Kind, PARTIAL_END, PARTIAL_START};
use crate::interrupt;
use crate::sizes::Size;

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
    #[error("{} has {free} free, the transfer needs {needed}", .directory.display())]
    NoSpace {
        directory: PathBuf,
        needed: Size,
        free: Size,
    },
    #[error("could not {doing} in {}: {source}", .directory.display())]
    Io {
        doing: &'static str,
        directory: PathBuf,
        source: io::Error,
    },
}

impl StoreError {
    /// What a person can do about it.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::Exists(_) => {
                "start the server with --overwrite to replace it, or choose another --out directory"
            }
            Self::OtherKind { .. } => "move it away, or choose another --out directory",
            Self::Busy(_) => "wait for the other transfer, or choose another --out directory",
            Self::NoSpace { .. } => "free some space there, or choose another --out directory",
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    "free some space there, or choose another --out directory"
                }
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    "choose an --out directory that this user may write"
                }
                io::ErrorKind::NotFound => "create the --out directory first",
                io::ErrorKind::FileTooLarge => {
                    "raise the file size limit (ulimit -f), or use another file system"
                }
                _ => "look at the --out directory and its file system, then try again",
            },
        }
    }
}

/// The directory that everything goes into.
#[derive(Debug)]
pub(crate) struct Store {
    root: OwnedFd,
    path: PathBuf,
    overwrite: bool,
}

/// What lies at a file's place before the transfer.
#[derive(Debug)]
pub(crate) struct Present {
    pub(crate) bytes: u64,
    /// BLAKE3 of these bytes so far.
    pub(crate) hasher: blake3::Hasher,
    /// Whether they have the final name.
    pub(crate) is_final: bool,
}

/// A file under its temporary name.
///
/// Dropped before it is published or kept, it stays: [`PartialFile::remove`] takes it away.
#[derive(Debug)]
pub(crate) struct PartialFile {
    file: File,
    parent: OwnedFd,
    temporary: String,
    name: String,
    shown: PathBuf,
    pub(crate) bytes: u64,
    unflushed: usize,
}

/// Bytes that the page cache may hold of a file, so that its last flush is short.
const MOST_UNFLUSHED: usize = 256 << 20;

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
        })
    }

    fn failed(&self, doing: &'static str) -> impl Fn(Errno) -> StoreError {
        move |source| StoreError::Io {
            doing,
            directory: self.path.clone(),
            source: source.into(),
        }
    }

    /// The directory that holds `path`, and the name in it. No symbolic link is followed on the way.
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
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            at = sys::openat(&at, part, flags, Mode::empty()).map_err(|error| match error {
                Errno::NOTDIR | Errno::LOOP => StoreError::OtherKind {
                    path: self.path.join(parents),
                    expected: "directory",
                },
                other => self.failed("open a directory")(other),
            })?;
        }
        Ok((at, name))
    }

    /// The type and size of what has the final name.
    fn look(&self, parent: &OwnedFd, name: &str) -> Result<Option<(FileType, u64)>, StoreError> {
        match sys::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some((
                FileType::from_raw_mode(stat.st_mode),
                u64::try_from(stat.st_size).unwrap_or(0),
            ))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(self.failed("look at a file")(error)),
        }
    }

    /// Refuses what cannot become `entry`, before anything was written.
    pub(crate) fn check(&self, entry: &Entry) -> Result<(), StoreError> {
        let (parent, name) = match self.parent(&entry.path) {
            // Its directory comes with the transfer.
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(());
            }
            other => other?,
        };
        let path = || self.path.join(&entry.path);
        let other_kind = |expected| {
            Err(StoreError::OtherKind {
                path: path(),
                expected,
            })
        };
        match (self.look(&parent, name)?, &entry.kind) {
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
            (Some((FileType::RegularFile, bytes)), Kind::File { bytes: wanted })
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
                    needed: Size(needed),
                    free: Size(free),
                });
            }
        }
        Ok(())
    }

    /// Makes the directory of `entry`, if it is not there.
    pub(crate) fn make_directory(&self, entry: &Entry) -> Result<(), StoreError> {
        let (parent, name) = self.parent(&entry.path)?;
        match sys::mkdirat(&parent, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(self.failed("create a directory")(error)),
        }
    }

    /// What is there of the file already: the whole file, or what an earlier transfer left of it.
    pub(crate) fn present(&self, entry: &Entry) -> Result<Option<Present>, StoreError> {
        let Kind::File { bytes: wanted } = entry.kind else {
            return Ok(None);
        };
        let (parent, name) = self.parent(&entry.path)?;
        let (name, is_final) = match self.look(&parent, name)? {
            Some((FileType::RegularFile, bytes)) if bytes == wanted => (name.to_owned(), true),
            _ => (temporary(name), false),
        };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = sys::openat(&parent, name.as_str(), flags, Mode::empty()) else {
            return Ok(None);
        };
        let mut file = File::from(file);
        let Some(bytes) = file
            .metadata()
            .ok()
            .filter(std::fs::Metadata::is_file)
            .map(|metadata| metadata.len())
            .filter(|&bytes| bytes <= wanted && (bytes > 0 || is_final))
        else {
            return Ok(None);
        };
        match hash(&mut file, bytes) {
            Ok(hasher) => Ok(Some(Present {
                bytes,
                hasher,
                is_final,
            })),
            // It is sent anew.
            Err(_) => Ok(None),
        }
    }

    /// Opens the partial file of `entry` and goes on after its first `from` bytes.
    pub(crate) fn begin(&self, entry: &Entry, from: u64) -> Result<PartialFile, StoreError> {
        let (parent, name) = self.parent(&entry.path)?;
        if !self.overwrite && self.look(&parent, name)?.is_some() {
            return Err(StoreError::Exists(self.path.join(&entry.path)));
        }
        let temporary = temporary(name);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = sys::openat(&parent, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR)
            .map_err(self.failed("create a partial file"))?;
        if sys::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(StoreError::Busy(self.path.join(&entry.path)));
        }
        let mut file = File::from(file);
        file.set_len(from)
            .and_then(|()| file.seek(SeekFrom::Start(from)))
            .map_err(|source| StoreError::Io {
                doing: "go on with a partial file",
                directory: self.path.clone(),
                source,
            })?;
        Ok(PartialFile {
            file,
            parent,
            temporary,
            name: name.to_owned(),
            shown: self.path.join(&entry.path),
            bytes: from,
            unflushed: 0,
        })
    }

    /// Writes out what the files hold, so that their names can follow.
    pub(crate) fn flush(&self, files: &[(PartialFile, Entry)]) -> Result<(), StoreError> {
        match files {
            [] => Ok(()),
            [(only, _)] => only.file.sync_all().map_err(|source| StoreError::Io {
                doing: "flush the file",
                directory: self.path.clone(),
                source,
            }),
            _ => sys::syncfs(&self.root).map_err(self.failed("flush the files")),
        }
    }

    /// Gives a flushed file its mode, its time and its final name.
    pub(crate) fn publish(&self, partial: PartialFile, entry: &Entry) -> Result<(), StoreError> {
        let failed = self.failed("give the file its name");
        dress(&partial.file, entry).map_err(&failed)?;
        let PartialFile {
            parent,
            temporary,
            name,
            shown,
            ..
        } = partial;
        let (from, to) = (temporary.as_str(), name.as_str());
        let named = if self.overwrite {
            sys::renameat(&parent, from, &parent, to)
        } else {
            match sys::renameat_with(&parent, from, &parent, to, RenameFlags::NOREPLACE) {
                // Not every file system has it.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    sys::linkat(&parent, from, &parent, to, AtFlags::empty())
                        .and_then(|()| sys::unlinkat(&parent, from, AtFlags::empty()))
                }
                other => other,
            }
        };
        match named {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => {
                let _ = sys::unlinkat(&parent, from, AtFlags::empty());
                Err(StoreError::Exists(shown))
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Gives a file that was there already the mode and the time of `entry`.
    pub(crate) fn refresh(&self, entry: &Entry) -> Result<(), StoreError> {
        let (parent, name) = self.parent(&entry.path)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file =
            sys::openat(&parent, name, flags, Mode::empty()).map_err(self.failed("open a file"))?;
        dress(&file, entry).map_err(self.failed("set mode and time"))
    }

    /// Makes the symbolic link of `entry`.
    pub(crate) fn link(&self, entry: &Entry) -> Result<(), StoreError> {
        let Kind::Link { target } = &entry.kind else {
            return Ok(());
        };
        let (parent, name) = self.parent(&entry.path)?;
        let failed = self.failed("create a symbolic link");
        match sys::symlinkat(target.as_str(), &parent, name) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let there = sys::readlinkat(&parent, name, Vec::new());
                if there.is_ok_and(|there| there.as_bytes() == target.as_bytes()) {
                    return Ok(());
                }
                if !self.overwrite {
                    return Err(StoreError::Exists(self.path.join(&entry.path)));
                }
                let temporary = temporary(name);
                let _ = sys::unlinkat(&parent, temporary.as_str(), AtFlags::empty());
                sys::symlinkat(target.as_str(), &parent, temporary.as_str()).map_err(&failed)?;
                sys::renameat(&parent, temporary.as_str(), &parent, name).map_err(&failed)?;
            }
            Err(error) => return Err(failed(error)),
        }
        // Some file systems keep no time for a link.
        let _ = sys::utimensat(&parent, name, &times(entry), AtFlags::SYMLINK_NOFOLLOW);
        Ok(())
    }

    /// Makes names durable, and gives directories their modes and times: the inner ones first.
    pub(crate) fn finish(&self, entries: &[Entry]) -> Result<(), StoreError> {
        for entry in entries.iter().rev().filter(|e| e.kind == Kind::Directory) {
            let (parent, name) = self.parent(&entry.path)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let directory = sys::openat(&parent, name, flags, Mode::empty())
                .map_err(self.failed("open a directory"))?;
            sys::fsync(&directory).map_err(self.failed("flush a directory"))?;
            dress(&directory, entry).map_err(self.failed("set mode and time"))?;
        }
        sys::fsync(&self.root).map_err(self.failed("flush the directory"))
    }
}

impl PartialFile {
    /// Appends `bytes`.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.unflushed += bytes.len();
        let mut written = self.file.write_all(bytes);
        if self.unflushed >= MOST_UNFLUSHED {
            self.unflushed = 0;
            written = written.and_then(|()| self.file.sync_data());
        }
        written.map_err(|source| StoreError::Io {
            doing: "write",
            directory: self.shown.parent().unwrap_or(&self.shown).to_owned(),
            source,
        })?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Takes the file away.
    pub(crate) fn remove(self) {
        let _ = sys::unlinkat(&self.parent, self.temporary.as_str(), AtFlags::empty());
    }

    /// For a person: where the bytes are that a later transfer goes on with.
    pub(crate) fn kept_at(&self) -> PathBuf {
        self.shown.with_file_name(OsString::from(&self.temporary))
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

/// Mode and time; a stream has none of its own.
fn dress(file: impl AsFd, entry: &Entry) -> Result<(), Errno> {
    sys::fchmod(&file, Mode::from_raw_mode(entry.mode & 0o777))?;
    if entry.kind != Kind::Stream {
        sys::futimens(&file, &times(entry))?;
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn file(path: &str, bytes: u64) -> Entry {
        Entry {
            path: path.into(),
            mode: 0o640,
            seconds: 1_000_000_000,
            nanoseconds: 5,
            kind: Kind::File { bytes },
        }
    }

    fn names_in(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).expect("readable");
        let name = |entry: io::Result<std::fs::DirEntry>| {
            let name = entry.expect("an entry").file_name();
            name.into_string().expect("utf-8")
        };
        entries.map(name).collect()
    }

    fn publish(store: &Store, entry: &Entry, contents: &[u8]) -> Result<(), StoreError> {
        let mut partial = store.begin(entry, 0)?;
        partial.write(contents)?;
        let ready = [(partial, entry.clone())];
        store.flush(&ready)?;
        let [(partial, _)] = ready;
        store.publish(partial, entry)
    }

    #[test]
    fn the_final_name_appears_only_when_published() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = Store::open(directory.path(), false).expect("opened");
        let entry = file("a", 5);
        let mut partial = store.begin(&entry, 0).expect("created");
        partial.write(b"hello").expect("written");
        assert!(!directory.path().join("a").exists());
        let ready = [(partial, entry.clone())];
        store.flush(&ready).expect("flushed");
        let [(partial, _)] = ready;
        store.publish(partial, &entry).expect("published");
        assert_eq!(names_in(directory.path()), ["a"]);
        let path = directory.path().join("a");
        let metadata = path.metadata().expect("there");
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o640);
        let time = metadata.modified().expect("a time");
        let since = time
            .duration_since(std::time::UNIX_EPOCH)
            .expect("after 1970");
        assert_eq!(since, std::time::Duration::new(1_000_000_000, 5));
        assert_eq!(std::fs::read(path).expect("readable"), b"hello");
    }

    #[test]
    fn what_an_earlier_transfer_left_is_found_and_extended() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = Store::open(directory.path(), false).expect("opened");
        let entry = file("a", 5);
        let mut partial = store.begin(&entry, 0).expect("created");
        partial.write(b"hel").expect("written");
        drop(partial);
        let present = store.present(&entry).expect("read").expect("there");
        assert_eq!((present.bytes, present.is_final), (3, false));
        assert_eq!(present.hasher.finalize(), blake3::hash(b"hel"));
        let mut partial = store.begin(&entry, 3).expect("opened");
        partial.write(b"lo").expect("written");
        store.publish(partial, &entry).expect("published");
        let contents = std::fs::read(directory.path().join("a")).expect("readable");
        assert_eq!(contents, b"hello");
    }

    #[test]
    fn two_transfers_never_write_one_partial_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = Store::open(directory.path(), false).expect("opened");
        let first = store.begin(&file("a", 5), 0).expect("created");
        let second = store.begin(&file("a", 5), 0);
        assert!(matches!(second, Err(StoreError::Busy(_))), "{second:?}");
        drop(first);
        store.begin(&file("a", 5), 0).expect("free again");
    }

    #[test]
    fn an_existing_file_is_kept_even_if_it_appears_late() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = Store::open(directory.path(), false).expect("opened");
        let entry = file("a", 5);
        let partial = store.begin(&entry, 0).expect("created");
        std::fs::write(directory.path().join("a"), b"old").expect("written");
        let published = store.publish(partial, &entry);
        assert!(matches!(published, Err(StoreError::Exists(_))));
        assert!(matches!(store.check(&entry), Err(StoreError::Exists(_))));
        assert_eq!(names_in(directory.path()), ["a"]);
        let replacing = Store::open(directory.path(), true).expect("opened");
        publish(&replacing, &entry, b"hello").expect("replaced");
        let contents = std::fs::read(directory.path().join("a")).expect("readable");
        assert_eq!(contents, b"hello");
    }

    #[test]
    fn no_symbolic_link_is_followed_out_of_the_directory() {
        let directory = tempfile::tempdir().expect("a directory");
        let inside = directory.path().join("in");
        std::fs::create_dir(&inside).expect("created");
        symlink(directory.path(), inside.join("up")).expect("linked");
        symlink(directory.path().join("outside"), inside.join("a")).expect("linked");
        let store = Store::open(&inside, true).expect("opened");
        let through = store.begin(&file("up/x", 0), 0);
        assert!(
            matches!(through, Err(StoreError::OtherKind { .. })),
            "{through:?}"
        );
        publish(&store, &file("a", 1), b"x").expect("replaced");
        assert!(!directory.path().join("outside").exists());
        // A partial file that is a link is not written through either.
        let target = directory.path().join("target");
        symlink(&target, inside.join(temporary("b"))).expect("linked");
        assert!(store.begin(&file("b", 1), 0).is_err());
        assert!(!target.exists());
    }

    #[test]
    fn more_than_the_disk_holds_is_refused_before_the_start() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = Store::open(directory.path(), false).expect("opened");
        let error = store.check_space(u64::MAX).expect_err("too much");
        assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    }

    #[test]
    fn a_missing_directory_is_named() {
        let error = Store::open(Path::new("/nonexistent/out"), false).expect_err("missing");
        assert!(error.to_string().contains("/nonexistent/out"), "{error}");
        assert_eq!(error.hint(), "create the --out directory first");
    }
}
