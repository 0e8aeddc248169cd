//! What a transfer holds: names, kinds, sizes, modes and times. A manifest from a peer is hostile until checked.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The longest name that common file systems take, in bytes.
const LONGEST_NAME: usize = 255;
/// The longest path, in bytes.
const LONGEST_PATH: usize = 4096;
/// Entries of one transfer.
const MOST_ENTRIES: usize = 1 << 20;
/// Bytes of an encoded manifest.
pub(crate) const MOST_BYTES: u64 = 256 << 20;

/// Names of partial files, which a peer may not use: see `store`.
pub(super) const PARTIAL_START: &str = ".tcpx-";
pub(super) const PARTIAL_END: &str = ".partial";

fn is_partial(name: &str) -> bool {
    name.starts_with(PARTIAL_START) && name.ends_with(PARTIAL_END)
}

/// One thing to move. Its path is relative to the directory that the server puts everything into.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) path: String,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Time of the last change, since 1970.
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
    pub(crate) kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Kind {
    Directory,
    File {
        bytes: u64,
    },
    /// Bytes whose number is known at their end: standard input, a pipe.
    Stream,
    /// A symbolic link.
    Link {
        target: String,
    },
}

impl Entry {
    /// Bytes that are known before the transfer.
    pub(crate) fn bytes(&self) -> u64 {
        match self.kind {
            Kind::File { bytes } => bytes,
            _ => 0,
        }
    }
}

/// Bytes of all files.
pub(crate) fn total(entries: &[Entry]) -> u64 {
    entries
        .iter()
        .fold(0, |sum, entry| sum.saturating_add(entry.bytes()))
}

/// For a person: what is moved.
pub(crate) fn describe(entries: &[Entry]) -> String {
    let size = if entries.iter().any(|entry| entry.kind == Kind::Stream) {
        "size not known yet".to_owned()
    } else {
        crate::sizes::Size(total(entries)).to_string()
    };
    match entries {
        [only] => format!("\"{}\" ({size})", only.path.escape_debug()),
        _ => {
            let files = entries.iter().filter(|entry| is_content(entry)).count();
            let plural = if files == 1 { "" } else { "s" };
            format!("{files} file{plural} ({size})")
        }
    }
}

/// Whether the entry has bytes of its own.
pub(crate) fn is_content(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::File { .. } | Kind::Stream)
}

/// Why a manifest from the peer is not used. Names are shown escaped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ManifestError {
    #[error("the peer sent an empty file name")]
    Empty,
    #[error("the peer sent a file name of {0} bytes, at most {LONGEST_NAME} are allowed")]
    LongName(usize),
    #[error("the peer sent a path of {0} bytes, at most {LONGEST_PATH} are allowed")]
    LongPath(usize),
    #[error("the peer sent the file name \"{0}\", which leaves the --out directory")]
    Outside(String),
    #[error("the peer sent the file name \"{0}\", which has control characters in it")]
    Control(String),
    #[error("the peer sent the file name \"{0}\", which this program uses for partial files")]
    Reserved(String),
    #[error("the peer sent the file name \"{0}\" twice")]
    Twice(String),
    #[error("the peer sent \"{0}\" without the directory that it is in")]
    NoParent(String),
    #[error("the symbolic link \"{link}\" points to \"{target}\", outside of what is sent")]
    LinkOutside { link: String, target: String },
    #[error("the peer sent {0} entries, at most {MOST_ENTRIES} are allowed")]
    TooMany(usize),
    #[error("the peer sent the time of \"{0}\" with more than 999,999,999 nanoseconds")]
    Time(String),
}

fn shown(name: &str) -> String {
    name.escape_debug()
        .filter(|&c| !is_invisible(c))
        .take(80)
        .collect()
}

/// Accepts entries that stay inside the directory they are put into.
pub(crate) fn check(entries: &[Entry]) -> Result<(), ManifestError> {
    if entries.len() > MOST_ENTRIES {
        return Err(ManifestError::TooMany(entries.len()));
    }
    let mut directories = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for entry in entries {
        check_path(&entry.path)?;
        if entry.nanoseconds > 999_999_999 {
            return Err(ManifestError::Time(shown(&entry.path)));
        }
        if !seen.insert(entry.path.as_str()) {
            return Err(ManifestError::Twice(shown(&entry.path)));
        }
        if let Some((parent, _)) = entry.path.rsplit_once('/')
            && !directories.contains(parent)
        {
            return Err(ManifestError::NoParent(shown(&entry.path)));
        }
        match &entry.kind {
            Kind::Directory => {
                directories.insert(entry.path.as_str());
            }
            Kind::Link { target } => check_link(&entry.path, target)?,
            Kind::File { .. } | Kind::Stream => {}
        }
    }
    Ok(())
}

fn check_path(path: &str) -> Result<(), ManifestError> {
    if path.len() > LONGEST_PATH {
        return Err(ManifestError::LongPath(path.len()));
    }
    if path.chars().any(|c| c.is_control() || is_invisible(c)) {
        return Err(ManifestError::Control(shown(path)));
    }
    if path.is_empty() {
        return Err(ManifestError::Empty);
    }
    for name in path.split('/') {
        if name.is_empty() || name == "." || name == ".." {
            return Err(ManifestError::Outside(shown(path)));
        }
        if name.len() > LONGEST_NAME {
            return Err(ManifestError::LongName(name.len()));
        }
        if is_partial(name) {
            return Err(ManifestError::Reserved(shown(path)));
        }
    }
    Ok(())
}

/// A link may point to anything below the first directory of its own path, and nowhere else.
fn check_link(path: &str, target: &str) -> Result<(), ManifestError> {
    let outside = || ManifestError::LinkOutside {
        link: shown(path),
        target: shown(target),
    };
    if target.is_empty()
        || target.starts_with('/')
        || target.len() > LONGEST_PATH
        || target.chars().any(|c| c.is_control() || is_invisible(c))
    {
        return Err(outside());
    }
    // Behind a name, which may be another link, `..` can lead anywhere.
    let (mut depth, mut named) = (path.split('/').count() - 1, false);
    for name in target.split('/') {
        match name {
            "" | "." => {}
            ".." if named || depth <= 1 => return Err(outside()),
            ".." => depth -= 1,
            _ => named = true,
        }
    }
    Ok(())
}

/// Characters that change how the text around them is shown (directional overrides, zero width).
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// An entry of this host, and where its bytes are; `None` for standard input.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) entry: Entry,
    pub(crate) source: Option<PathBuf>,
}

/// Everything below `paths`, directories before what is in them; `-` is standard input, sent as `name`.
pub(crate) fn collect(paths: &[PathBuf], name: &str) -> Result<Vec<Found>, Error> {
    let mut found = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            found.push(Found {
                entry: Entry {
                    path: name.to_owned(),
                    mode: 0o644,
                    seconds: 0,
                    nanoseconds: 0,
                    kind: Kind::Stream,
                },
                source: None,
            });
            continue;
        }
        let failed = Error::io("open", path);
        // A link that is named is followed: its target is what the user means.
        let metadata = path.metadata().map_err(failed)?;
        let resolved;
        let mut named = path.as_path();
        if named.file_name().is_none() {
            resolved = path.canonicalize().map_err(failed)?;
            named = &resolved;
        }
        let Some(name) = named.file_name() else {
            return Err(Error::usage(
                format!("{} has no name of its own", path.display()),
                "name a file or a directory below it",
            ));
        };
        let name = text(name.as_ref(), path)?;
        add(path, name, &metadata, &mut found)?;
    }
    let entries: Vec<_> = found.iter().map(|found| found.entry.clone()).collect();
    check(&entries).map_err(|error| match error {
        ManifestError::LinkOutside { .. } => Error::failed(
            error.to_string(),
            "replace the link by what it points to, or send that as well from one directory above",
        ),
        ManifestError::Twice(name) => Error::usage(
            format!("two of the things to send are named \"{name}\""),
            "send them one after the other, or from a directory above both",
        ),
        _ => Error::failed(
            error.to_string().replace("the peer sent", "cannot send"),
            "rename it, then send it again",
        ),
    })?;
    Ok(found)
}

fn text<'a>(name: &'a Path, path: &Path) -> Result<&'a str, Error> {
    name.to_str().ok_or_else(|| {
        Error::failed(
            format!("the name of {} is not text", path.display()),
            "rename it to UTF-8",
        )
    })
}

fn add(path: &Path, name: &str, metadata: &Metadata, found: &mut Vec<Found>) -> Result<(), Error> {
    let failed = Error::io("read", path);
    let kind = metadata.file_type();
    let kind = if kind.is_dir() {
        Kind::Directory
    } else if kind.is_file() {
        Kind::File {
            bytes: metadata.len(),
        }
    } else if kind.is_symlink() {
        let target = std::fs::read_link(path).map_err(failed)?;
        Kind::Link {
            target: text(&target, path)?.to_owned(),
        }
    } else if kind.is_fifo() && !name.contains('/') {
        Kind::Stream
    } else {
        return Err(Error::failed(
            format!("{} is a device or a socket", path.display()),
            "send regular files, directories and symbolic links; `--file -` sends standard input",
        ));
    };
    let is_directory = kind == Kind::Directory;
    found.push(Found {
        entry: Entry {
            path: name.to_owned(),
            mode: metadata.mode() & 0o777,
            seconds: metadata.mtime(),
            nanoseconds: u32::try_from(metadata.mtime_nsec()).unwrap_or(0),
            kind,
        },
        source: Some(path.to_owned()),
    });
    if !is_directory {
        return Ok(());
    }
    let entries = std::fs::read_dir(path).map_err(failed)?;
    let mut entries = entries.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for inner in entries {
        let inner_path = inner.path();
        let inner_name = inner.file_name();
        let inner_name = text(inner_name.as_ref(), &inner_path)?;
        // Left by a transfer to here that did not end.
        if is_partial(inner_name) {
            continue;
        }
        let metadata = inner.metadata().map_err(Error::io("read", &inner_path))?;
        add(
            &inner_path,
            &format!("{name}/{inner_name}"),
            &metadata,
            found,
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> Entry {
        Entry {
            path: path.into(),
            mode: 0o644,
            seconds: 0,
            nanoseconds: 0,
            kind: Kind::File { bytes: 1 },
        }
    }

    fn directory(path: &str) -> Entry {
        Entry {
            kind: Kind::Directory,
            ..file(path)
        }
    }

    fn link(path: &str, target: &str) -> Entry {
        Entry {
            kind: Kind::Link {
                target: target.into(),
            },
            ..file(path)
        }
    }

    #[test]
    fn plain_names_are_kept_as_they_are() {
        let long = "x".repeat(255);
        for name in [
            "model.safetensors",
            "a",
            "with space",
            "näme-ü.bin",
            "a..b",
            ".bashrc",
            &long,
        ] {
            assert_eq!(check(&[file(name)]), Ok(()), "{name}");
        }
        assert_eq!(
            check(&[directory("a"), directory("a/b"), file("a/b/c")]),
            Ok(())
        );
    }

    #[test]
    fn names_that_leave_the_directory_are_refused() {
        for name in [
            "..",
            ".",
            "/etc/passwd",
            "../x",
            "a/../b",
            "a//b",
            "x/",
            "/",
        ] {
            let entries = [directory("a"), file(name)];
            assert!(
                matches!(check(&entries), Err(ManifestError::Outside(_))),
                "{name}"
            );
        }
    }

    #[test]
    fn names_that_deceive_are_refused_and_shown_escaped() {
        for name in ["a\nb", "a\0b", "\u{1b}[31mred", "gpj.\u{202e}exe"] {
            let error = check(&[file(name)]).expect_err(name);
            assert!(matches!(error, ManifestError::Control(_)), "{error}");
            let text = error.to_string();
            assert!(
                !text.chars().any(|c| c.is_control() || is_invisible(c)),
                "{error}"
            );
        }
    }

    #[test]
    fn long_reserved_double_and_orphaned_names_are_refused() {
        assert_eq!(check(&[file("")]), Err(ManifestError::Empty));
        let long = "x".repeat(256);
        assert_eq!(check(&[file(&long)]), Err(ManifestError::LongName(256)));
        let path = "x/".repeat(2_100);
        assert!(matches!(
            check(&[file(&path)]),
            Err(ManifestError::LongPath(_))
        ));
        let reserved = check(&[file(".tcpx-0123.partial")]);
        assert!(matches!(reserved, Err(ManifestError::Reserved(_))));
        assert!(matches!(
            check(&[file("a"), file("a")]),
            Err(ManifestError::Twice(_))
        ));
        assert!(matches!(
            check(&[file("a/b")]),
            Err(ManifestError::NoParent(_))
        ));
        let through_link = [link("a", "b"), file("a/b")];
        assert!(matches!(
            check(&through_link),
            Err(ManifestError::NoParent(_))
        ));
    }

    #[test]
    fn links_may_point_inside_what_is_sent_only() {
        let inside =
            |target: &str| check(&[directory("m"), directory("m/a"), link("m/a/l", target)]);
        for target in ["x", "../blobs/y", "./z", "..", "b/c"] {
            assert_eq!(inside(target), Ok(()), "{target}");
        }
        for target in [
            "/etc/passwd",
            "../../x",
            "../..",
            "b/../c",
            "",
            "a\nb",
            "../../m2/x",
        ] {
            let checked = inside(target);
            assert!(
                matches!(checked, Err(ManifestError::LinkOutside { .. })),
                "{target}"
            );
        }
    }
}
