//! What a transfer holds: names, kinds, sizes, modes and times. A manifest from a peer is hostile
//! until checked.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::sizes::Amount;

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

/// What a sender says first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) entries: Vec<Entry>,
    pub(crate) left_out: LeftOut,
}

/// What the sender could not send.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeftOut {
    pub(crate) count: u64,
    /// The first ones, and why.
    pub(crate) first: Vec<(String, String)>,
}

/// Things that were left out and are listed.
const MOST_LISTED: usize = 100;

impl LeftOut {
    fn add(&mut self, path: &Path, why: &str) {
        self.count += 1;
        if self.first.len() < MOST_LISTED {
            let path = path.to_string_lossy().into_owned();
            self.first.push((path, why.to_owned()));
        }
    }

    /// Takes files out of the list that are left out after all, by their places, which ascend.
    pub(crate) fn take(&mut self, entries: &mut Vec<Entry>, places: &[usize]) {
        for &place in places {
            let path = Path::new(&entries[place].path);
            self.add(path, "it changed while it was sent, or could not be read");
        }
        for &place in places.iter().rev() {
            entries.remove(place);
        }
    }

    /// A line for each of the first ones, whoever said it.
    pub(crate) fn lines(&self) -> Vec<String> {
        let first = self.first.iter().take(MOST_LISTED);
        let lines = first.map(|(path, why)| format!("\"{}\": {}", path.escape_debug(), shown(why)));
        lines.collect()
    }
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
        /// Bytes of these that take space: a file can have holes.
        on_disk: u64,
    },
    /// A symbolic link.
    Link {
        target: String,
    },
}

impl Entry {
    /// Bytes that are known before the transfer.
    pub(crate) fn bytes(&self) -> u64 {
        match self.kind {
            Kind::File { bytes, .. } => bytes,
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

/// Bytes that they need at their destination.
pub(crate) fn on_disk(entries: &[Entry]) -> u64 {
    let needed = entries.iter().map(|entry| match entry.kind {
        Kind::File { bytes, on_disk } => bytes.min(on_disk),
        _ => 0,
    });
    needed.fold(0, u64::saturating_add)
}

/// For a person: what is moved.
pub(crate) fn describe(entries: &[Entry]) -> String {
    let size = Amount(total(entries));
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
    matches!(entry.kind, Kind::File { .. })
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
    #[error(
        "the peer sent the file name \"{0}\", which has control characters or changes of direction in it"
    )]
    Control(String),
    #[error("the peer sent the file name \"{0}\", which this program uses for partial files")]
    Reserved(String),
    #[error("the peer sent the file name \"{0}\" twice")]
    Twice(String),
    #[error("the peer sent \"{0}\" without the directory that it is in")]
    NoParent(String),
    #[error("the peer sent \"{0}\", which was not asked for")]
    Unasked(String),
    #[error("the symbolic link \"{link}\" points to \"{target}\", outside of what is sent")]
    LinkOutside { link: String, target: String },
    #[error("the peer sent {0} entries, at most {MOST_ENTRIES} are allowed")]
    TooMany(usize),
    #[error("the peer sent the time of \"{0}\" with more than 999,999,999 nanoseconds")]
    Time(String),
}

/// A name that cannot change how the text around it is shown.
pub(crate) fn shown(name: &str) -> String {
    name.escape_debug().take(80).collect()
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
            Kind::File { .. } => {}
        }
    }
    Ok(())
}

fn check_path(path: &str) -> Result<(), ManifestError> {
    if path.len() > LONGEST_PATH {
        return Err(ManifestError::LongPath(path.len()));
    }
    if path.chars().any(|c| c.is_control() || turns_text(c)) {
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
        || target.chars().any(|c| c.is_control() || turns_text(c))
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

/// Embeddings, overrides and isolates, which change the order of the text around them. Joiners and
/// marks of direction belong to the spelling of many scripts.
fn turns_text(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Refuses what a client did not ask for: each path's first name has to be the last one of a path
/// that it named.
pub(crate) fn check_asked(entries: &[Entry], paths: &[String]) -> Result<(), ManifestError> {
    let all = paths.iter().any(|path| path == ".");
    let names: BTreeSet<_> = paths
        .iter()
        .filter_map(|path| path.rsplit('/').next())
        .collect();
    let first = |entry: &Entry| entry.path.split('/').next().map(str::to_owned);
    let is_asked = |entry: &&Entry| first(entry).is_some_and(|name| names.contains(&*name));
    match entries.iter().find(|entry| !is_asked(entry)) {
        Some(entry) if !all => Err(ManifestError::Unasked(shown(&entry.path))),
        _ => Ok(()),
    }
}

/// An entry of this host, and where its bytes are.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) entry: Entry,
    pub(crate) source: PathBuf,
}

/// Everything that is sent, directories before what is in them.
#[derive(Debug, Default)]
pub(crate) struct Selection {
    pub(crate) found: Vec<Found>,
    pub(crate) left_out: LeftOut,
    /// The folder that no file may lie outside of when it is opened.
    pub(crate) within: Option<PathBuf>,
}

/// What of the things that are named is sent.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    /// Links give way to what they point to.
    pub(crate) follow: bool,
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
    /// The folder that links may lead into: others may ask for its contents. Without one they may
    /// lead anywhere.
    within: Option<PathBuf>,
}

impl Rules {
    pub(crate) fn new(
        follow: bool,
        include: &[String],
        exclude: &[String],
        within: Option<PathBuf>,
    ) -> Result<Self, Error> {
        let patterns = |texts: &[String]| {
            let all = texts.iter().map(|text| {
                // A folder's pattern may end as its path does.
                Pattern::new(text.trim_end_matches('/')).map_err(|error| {
                    Error::usage(
                        format!("the pattern \"{}\" is wrong: {error}", shown(text)),
                        "write * for any part of a name, ** for any folders, ? for a character, [ab] for one of some",
                    )
                })
            });
            all.collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            follow,
            include: patterns(include)?,
            exclude: patterns(exclude)?,
            within,
        })
    }

    /// Whether one of `patterns` matches what stands at `path` below the directory that is sent.
    fn matches(patterns: &[Pattern], path: &str) -> bool {
        const OPTIONS: MatchOptions = MatchOptions {
            case_sensitive: true,
            require_literal_separator: true,
            require_literal_leading_dot: false,
        };
        let name = path.rsplit('/').next().unwrap_or(path);
        let below = path.split_once('/').map_or(path, |(_, below)| below);
        patterns.iter().any(|pattern| {
            let of = match pattern.as_str().contains('/') {
                true => below,
                false => name,
            };
            pattern.matches_with(of, OPTIONS)
        })
    }

    fn may_lead_to(&self, target: &Path) -> bool {
        let inside = |root: &PathBuf| target.canonicalize().is_ok_and(|it| it.starts_with(root));
        self.within.as_ref().is_none_or(inside)
    }
}

/// Everything below `paths` that `rules` let pass. What a path itself names has to be there; what
/// cannot be sent of the things below it is left out.
pub(crate) fn collect(paths: &[PathBuf], rules: &Rules) -> Result<Selection, Error> {
    let mut walk = Walk {
        rules,
        selection: Selection::default(),
        above: Vec::new(),
    };
    for path in paths {
        let failed = Error::io("open", path);
        // A link that is named is followed: its target is what the user means.
        let metadata = path.metadata().map_err(failed)?;
        can_read(path, &metadata).map_err(failed)?;
        if rules.within.as_ref() == Some(path) {
            walk.add_directory(path, "", &metadata)?;
            continue;
        }
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
        let name = name.to_str().ok_or_else(|| {
            Error::failed(
                format!("the name of {} is not text", path.display()),
                "rename it to UTF-8",
            )
        })?;
        let before = (walk.selection.found.len(), walk.selection.left_out.count);
        walk.add(path, name, &metadata)?;
        let selection = &mut walk.selection;
        if selection.found.len() == before.0 && selection.left_out.count > before.1 {
            return Err(Error::failed(
                format!(
                    "cannot send {}",
                    selection.left_out.lines().pop().unwrap_or_default()
                ),
                "send regular files, directories and symbolic links with names of text",
            ));
        }
    }
    let mut selection = walk.selection;
    selection.within.clone_from(&rules.within);
    if !rules.include.is_empty() {
        drop_empty(&mut selection.found);
    }
    let entries: Vec<_> = selection
        .found
        .iter()
        .map(|found| found.entry.clone())
        .collect();
    check(&entries).map_err(|error| match error {
        ManifestError::Twice(name) => Error::usage(
            format!("two of the things to send are named \"{name}\""),
            "send them one after the other, or from a directory above both",
        ),
        _ => Error::failed(
            error.to_string().replace("the peer sent", "cannot send"),
            "rename it, then send it again",
        ),
    })?;
    Ok(selection)
}

/// Takes directories away that have nothing in them.
fn drop_empty(found: &mut Vec<Found>) {
    let mut needed = BTreeSet::new();
    found.reverse();
    found.retain(|Found { entry, .. }| {
        let is_kept = entry.kind != Kind::Directory || needed.contains(&entry.path);
        if let (true, Some((parent, _))) = (is_kept, entry.path.rsplit_once('/')) {
            needed.insert(parent.to_owned());
        }
        is_kept
    });
    found.reverse();
}

/// Whether this user may read it: told before anything is sent.
fn can_read(path: &Path, metadata: &Metadata) -> std::io::Result<()> {
    let wanted = match metadata.is_dir() {
        true => Access::READ_OK | Access::EXEC_OK,
        false => Access::READ_OK,
    };
    Ok(accessat(CWD, path, wanted, AtFlags::EACCESS)?)
}

/// A walk through directories.
struct Walk<'a> {
    rules: &'a Rules,
    selection: Selection,
    /// The directories that it is in: a link may lead back to one of them.
    above: Vec<(u64, u64)>,
}

impl Walk<'_> {
    fn leave_out(&mut self, path: &Path, why: &str) {
        self.selection.left_out.add(path, why);
    }

    /// What lies at `path`, as `name`, and what is in it. `metadata` is that of a link's target
    /// where it is followed.
    fn add(&mut self, path: &Path, name: &str, metadata: &Metadata) -> Result<(), Error> {
        if self.selection.found.len() >= MOST_ENTRIES {
            return Err(Error::failed(
                format!("more than {MOST_ENTRIES} files and directories are to be sent"),
                "send them in parts, or as one file that tar makes of them",
            ));
        }
        if Rules::matches(&self.rules.exclude, name) {
            return Ok(());
        }
        if let Err(error) = check_path(name) {
            let named = format!("the peer sent the file name \"{}\", which", shown(name));
            let why = error.to_string().replace(&named, "it has a name that");
            let why = why.replace("the peer sent", "it has");
            self.leave_out(path, &why);
            return Ok(());
        }
        let kind = metadata.file_type();
        if kind.is_symlink() {
            return self.add_link(path, name, metadata);
        }
        if !kind.is_dir()
            && !self.rules.include.is_empty()
            && !Rules::matches(&self.rules.include, name)
        {
            return Ok(());
        }
        let kind = if kind.is_dir() {
            Kind::Directory
        } else if kind.is_file() {
            Kind::File {
                bytes: metadata.len(),
                on_disk: metadata.blocks().saturating_mul(512),
            }
        } else {
            self.leave_out(path, "it is a device, a pipe or a socket");
            return Ok(());
        };
        if let Err(error) = can_read(path, metadata) {
            self.leave_out(path, &error.to_string());
            return Ok(());
        }
        let is_directory = kind == Kind::Directory;
        self.push(path, name, metadata, kind);
        if is_directory {
            self.add_directory(path, name, metadata)?;
        }
        Ok(())
    }

    fn push(&mut self, path: &Path, name: &str, metadata: &Metadata, kind: Kind) {
        self.selection.found.push(Found {
            entry: Entry {
                path: name.to_owned(),
                mode: metadata.mode() & 0o777,
                seconds: metadata.mtime(),
                nanoseconds: u32::try_from(metadata.mtime_nsec()).unwrap_or(0),
                kind,
            },
            source: path.to_owned(),
        });
    }

    /// A link that leads outside of what is sent gives way to the file that it points to: in a
    /// snapshot of a model's hub every file is one.
    fn add_link(&mut self, path: &Path, name: &str, metadata: &Metadata) -> Result<(), Error> {
        let target = match std::fs::read_link(path) {
            Ok(target) => target,
            Err(error) => {
                self.leave_out(path, &error.to_string());
                return Ok(());
            }
        };
        let kept = target
            .to_str()
            .filter(|target| check_link(name, target).is_ok());
        if let (false, Some(target)) = (self.rules.follow, kept) {
            let target = target.to_owned();
            let is_wanted =
                self.rules.include.is_empty() || Rules::matches(&self.rules.include, name);
            if is_wanted {
                self.push(path, name, metadata, Kind::Link { target });
            }
            return Ok(());
        }
        match path.metadata() {
            Err(_) => self.leave_out(path, "the link leads nowhere"),
            Ok(_) if !self.rules.may_lead_to(path) => {
                self.leave_out(path, "the link leads outside of what is shared");
            }
            Ok(there) if there.is_dir() && !self.rules.follow => self.leave_out(
                path,
                "the link leads to a directory outside of what is sent; -L sends that",
            ),
            Ok(there) if self.above.contains(&(there.dev(), there.ino())) => {
                self.leave_out(path, "the link leads to a directory that it is in");
            }
            Ok(there) => return self.add(path, name, &there),
        }
        Ok(())
    }

    fn add_directory(&mut self, path: &Path, name: &str, metadata: &Metadata) -> Result<(), Error> {
        let inside = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let mut inside = match inside {
            Ok(inside) => inside,
            Err(error) => {
                self.leave_out(path, &error.to_string());
                return Ok(());
            }
        };
        inside.sort_by_key(std::fs::DirEntry::file_name);
        self.above.push((metadata.dev(), metadata.ino()));
        for inner in inside {
            let (path, name_inside) = (inner.path(), inner.file_name());
            let Some(name_inside) = name_inside.to_str() else {
                self.leave_out(&path, "its name is not UTF-8");
                continue;
            };
            // Left by a transfer to here that did not end.
            if is_partial(name_inside) {
                continue;
            }
            let name_inside = match name {
                "" => name_inside.to_owned(),
                name => format!("{name}/{name_inside}"),
            };
            match inner.metadata() {
                Ok(metadata) => self.add(&path, &name_inside, &metadata)?,
                Err(error) => self.leave_out(&path, &error.to_string()),
            }
        }
        self.above.pop();
        Ok(())
    }
}

/// The paths of `wanted` below the folder `root`, which is shared.
pub(crate) fn shared(root: &Path, wanted: &[String]) -> Result<Vec<PathBuf>, Error> {
    let missing = |path: &str| {
        Error::failed(
            format!("\"{}\" is not in the folder that is shared", shown(path)),
            "give a path below that folder; `HOST:.` is all of it",
        )
    };
    let mut paths = Vec::new();
    for path in wanted {
        if path == "." {
            paths.push(root.to_owned());
            continue;
        }
        check_path(path).map_err(|_| missing(path))?;
        let full = root.join(path);
        match full.canonicalize() {
            Ok(there) if there.starts_with(root) => paths.push(full),
            _ => return Err(missing(path)),
        }
    }
    Ok(paths)
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
            kind: Kind::File {
                bytes: 1,
                on_disk: 1,
            },
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
    fn names_that_deceive_are_refused_and_shown_escaped() {
        for name in ["a\nb", "a\0b", "\u{1b}[31mred", "gpj.\u{202e}exe"] {
            let error = check(&[file(name)]).expect_err(name);
            assert!(matches!(error, ManifestError::Control(_)), "{error}");
            let text = error.to_string();
            assert!(
                !text.chars().any(|c| c.is_control() || turns_text(c)),
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
