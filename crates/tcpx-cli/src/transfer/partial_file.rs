//! A file that appears under its final name whole, or not at all.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::file_name::FileName;
use crate::sizes::Size;

/// What went wrong with the file at its destination; nothing is left under its final name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PartialFileError {
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    #[error("{} has {free} free, the file needs {needed}", .directory.display())]
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

impl PartialFileError {
    /// What a person can do about it.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::Exists(_) => {
                "start the server with --overwrite to replace it, or choose another --out directory"
            }
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

/// A file being written under a temporary name beside its final one.
///
/// Dropped before [`PartialFile::publish`], it is removed.
#[derive(Debug)]
pub(crate) struct PartialFile {
    file: NamedTempFile,
    directory: PathBuf,
    target: PathBuf,
    overwrite: bool,
}

impl PartialFile {
    /// Checks the destination and the free space, and opens the temporary file.
    pub(crate) fn create(
        directory: &Path,
        name: &FileName,
        bytes: u64,
        overwrite: bool,
    ) -> Result<Self, PartialFileError> {
        let target = directory.join(name);
        // Only a courtesy: `publish` is what cannot overwrite.
        if !overwrite && target.symlink_metadata().is_ok() {
            return Err(PartialFileError::Exists(target));
        }
        let file = tempfile::Builder::new()
            .prefix(".tcpx-")
            .suffix(".partial")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory)
            .map_err(|source| PartialFileError::Io {
                doing: "create a temporary file",
                directory: directory.to_owned(),
                source,
            })?;
        if let Ok(space) = rustix::fs::fstatvfs(file.as_file()) {
            let free = space.f_bavail.saturating_mul(space.f_frsize);
            if free < bytes {
                return Err(PartialFileError::NoSpace {
                    directory: directory.to_owned(),
                    needed: Size(bytes),
                    free: Size(free),
                });
            }
        }
        Ok(Self {
            file,
            directory: directory.to_owned(),
            target,
            overwrite,
        })
    }

    /// Appends `bytes`.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), PartialFileError> {
        self.file
            .as_file_mut()
            .write_all(bytes)
            .map_err(|source| self.error("write", source))
    }

    /// Makes the contents durable and gives the file its final name.
    pub(crate) fn publish(self) -> Result<PathBuf, PartialFileError> {
        self.file
            .as_file()
            .sync_all()
            .map_err(|source| self.error("flush the file", source))?;
        let Self {
            file,
            directory,
            target,
            overwrite,
        } = self;
        let named = if overwrite {
            file.persist(&target)
        } else {
            file.persist_noclobber(&target)
        };
        if let Err(failed) = named {
            return Err(if failed.error.kind() == io::ErrorKind::AlreadyExists {
                PartialFileError::Exists(target)
            } else {
                PartialFileError::Io {
                    doing: "give the file its name",
                    directory,
                    source: failed.error,
                }
            });
        }
        // The name itself is durable only once its directory is.
        match File::open(&directory).and_then(|opened| opened.sync_all()) {
            Ok(()) => Ok(target),
            Err(source) => Err(PartialFileError::Io {
                doing: "flush the directory",
                directory,
                source,
            }),
        }
    }

    fn error(&self, doing: &'static str, source: io::Error) -> PartialFileError {
        PartialFileError::Io {
            doing,
            directory: self.directory.clone(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> FileName {
        FileName::from_peer(text).expect("a plain name")
    }

    fn names_in(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).expect("readable");
        entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .into_string()
                    .expect("utf-8")
            })
            .collect()
    }

    #[test]
    fn the_final_name_appears_only_when_published() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file =
            PartialFile::create(directory.path(), &name("a"), 5, false).expect("created");
        file.write(b"he").expect("written");
        file.write(b"llo").expect("written");
        assert!(!directory.path().join("a").exists());
        let target = file.publish().expect("published");
        assert_eq!(std::fs::read(target).expect("readable"), b"hello");
        assert_eq!(names_in(directory.path()), ["a"]);
    }

    #[test]
    fn a_dropped_file_leaves_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file =
            PartialFile::create(directory.path(), &name("a"), 5, false).expect("created");
        file.write(b"hello").expect("written");
        drop(file);
        assert!(names_in(directory.path()).is_empty());
    }

    #[test]
    fn an_existing_file_is_kept_even_if_it_appears_during_the_transfer() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = PartialFile::create(directory.path(), &name("a"), 0, false).expect("created");
        std::fs::write(directory.path().join("a"), b"old").expect("written");
        assert!(matches!(file.publish(), Err(PartialFileError::Exists(_))));
        assert!(matches!(
            PartialFile::create(directory.path(), &name("a"), 0, false),
            Err(PartialFileError::Exists(_))
        ));
        assert_eq!(
            std::fs::read(directory.path().join("a")).expect("readable"),
            b"old"
        );
        assert_eq!(names_in(directory.path()), ["a"]);
    }

    #[test]
    fn overwrite_replaces_the_whole_file() {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("a"), b"a longer old file").expect("written");
        let mut file = PartialFile::create(directory.path(), &name("a"), 3, true).expect("created");
        file.write(b"new").expect("written");
        file.publish().expect("published");
        assert_eq!(
            std::fs::read(directory.path().join("a")).expect("readable"),
            b"new"
        );
    }

    #[test]
    fn a_symbolic_link_is_not_followed() {
        let directory = tempfile::tempdir().expect("a directory");
        let outside = directory.path().join("outside");
        std::fs::create_dir(directory.path().join("in")).expect("created");
        std::os::unix::fs::symlink(&outside, directory.path().join("in/a")).expect("linked");
        let inside = directory.path().join("in");
        assert!(matches!(
            PartialFile::create(&inside, &name("a"), 0, false),
            Err(PartialFileError::Exists(_))
        ));
        let file = PartialFile::create(&inside, &name("a"), 0, true).expect("created");
        file.publish().expect("published");
        assert!(!outside.exists());
    }

    #[test]
    fn more_than_the_disk_holds_is_refused_before_the_first_byte() {
        let directory = tempfile::tempdir().expect("a directory");
        let error = PartialFile::create(directory.path(), &name("a"), u64::MAX, false)
            .expect_err("too much");
        assert!(matches!(error, PartialFileError::NoSpace { .. }), "{error}");
        assert!(names_in(directory.path()).is_empty());
    }

    #[test]
    fn a_missing_directory_is_named() {
        let error = PartialFile::create(Path::new("/nonexistent/out"), &name("a"), 0, false)
            .expect_err("missing");
        assert!(error.to_string().contains("/nonexistent/out"), "{error}");
        assert_eq!(error.hint(), "create the --out directory first");
    }
}
