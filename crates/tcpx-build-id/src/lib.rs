//! The build id of the plugin file.
//!
//! The plugin carries a text made from its version and a hash of its sources. A program or test
//! that is about to load the file computes the same text from the sources it was built with, and
//! so notices a file that was left over from other sources. The hash is over contents, never over
//! times. Nothing here needs the plugin to be built.
//!
//! - A build script calls [`for_build_script`]; its crate then has `env!("TCPX_BUILD_ID")`, and is
//!   built again when a source of the plugin changes. The plugin does so, and so does a program
//!   that will run where there are no sources.
//! - A test computes [`of_sources`] when it runs.
//! - Either calls [`verify`] on the file that it is about to load.

#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use thiserror::Error;

/// The crates that end up in the plugin file, and what decides their dependencies.
const INPUTS: [&str; 8] = [
    "Cargo.lock",
    "Cargo.toml",
    "crates/nccl-net",
    "crates/tcpx-lanes",
    "crates/tcpx-memory",
    "crates/tcpx-nccl",
    "crates/tcpx-status",
    "crates/tcpx-wire",
];

/// Kinds of files that are compiled or included; documents and test data are not.
const SOURCES: [&str; 8] = ["rs", "c", "h", "cu", "ptx", "toml", "lock", "map"];

/// What an id starts with.
const MARK: &str = "tcpx-nccl ";
/// Characters of the hash in an id.
const HASH_CHARACTERS: usize = 32;
/// Longest id that is looked for in a file.
const MAX_ID: usize = 128;

/// A plugin file that is not what was expected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildIdError {
    /// The file cannot be read.
    #[error(
        "the plugin file {path} cannot be read: {error}; build it with `cargo build -p tcpx-nccl`"
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// The file was built from other sources, or is another plugin.
    #[error(
        "the plugin file {path} has build id {}, expected {expected:?}; build it again with \
         `cargo build -p tcpx-nccl`",
        found.as_ref().map_or_else(|| "none".to_owned(), |id| format!("{id:?}"))
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// The id that the sources have.
        expected: String,
        /// The id in the file, if it has one.
        found: Option<String>,
    },
}

/// Checks that a plugin file has the id `expected`.
///
/// # Errors
/// When it has another or none, or cannot be read.
pub fn verify(path: &Path, expected: &str) -> Result<(), BuildIdError> {
    let found = of_file(path).map_err(|error| BuildIdError::Unreadable {
        path: path.to_owned(),
        error,
    })?;
    if found.as_deref() == Some(expected) {
        return Ok(());
    }
    Err(BuildIdError::Other {
        path: path.to_owned(),
        expected: expected.to_owned(),
        found,
    })
}

/// Gives the crate of the calling build script `env!("TCPX_BUILD_ID")`; `folder` is that crate's.
///
/// In the workspace the id is that of the sources. A published package stands alone; its version
/// names its sources.
///
/// # Errors
/// When a source cannot be read.
pub fn for_build_script(folder: &Path) -> io::Result<()> {
    let root = folder.join("../..");
    let mut out = io::stdout().lock();
    let id = if root.join("crates/tcpx-nccl/Cargo.toml").is_file() {
        for path in inputs(&root) {
            writeln!(out, "cargo::rerun-if-changed={}", path.display())?;
        }
        of_sources(&root)?
    } else {
        writeln!(out, "cargo::rerun-if-changed=build.rs")?;
        id_with(Sha256::new())
    };
    writeln!(out, "cargo::rustc-env=TCPX_BUILD_ID={id}")
}

/// The files and folders that the id depends on.
fn inputs(root: &Path) -> Vec<PathBuf> {
    INPUTS
        .iter()
        .map(|input| root.join(input))
        .filter(|path| path.exists())
        .collect()
}

/// The id of a plugin built from the workspace at `root`.
///
/// # Errors
/// When a source cannot be read, or there are none.
pub fn of_sources(root: &Path) -> io::Result<String> {
    let mut files = Vec::new();
    for input in inputs(root) {
        collect(&input, &mut files)?;
    }
    if files.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("{} holds no sources of the plugin", root.display()),
        ));
    }
    let mut named = Vec::with_capacity(files.len());
    for file in files {
        let name = file.strip_prefix(root).unwrap_or(&file);
        named.push((name.to_string_lossy().into_owned(), file));
    }
    named.sort();
    let mut hash = Sha256::new();
    for (name, file) in named {
        let bytes = fs::read(&file)?;
        // Lengths keep a byte from moving between a name and a file unseen.
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(&bytes);
    }
    Ok(id_with(hash))
}

fn id_with(hash: Sha256) -> String {
    let hash = HEXLOWER.encode(&hash.finalize());
    format!(
        "{MARK}{} sources {}",
        env!("CARGO_PKG_VERSION"),
        &hash[..HASH_CHARACTERS]
    )
}

/// The id in a plugin file; `None` when the file has none. The file is read, not loaded.
///
/// # Errors
/// When the file cannot be read.
pub fn of_file(path: &Path) -> io::Result<Option<String>> {
    Ok(find(&fs::read(path)?))
}

fn find(bytes: &[u8]) -> Option<String> {
    let mark = MARK.as_bytes();
    let starts = bytes
        .windows(mark.len())
        .enumerate()
        .filter(|(_, window)| *window == mark);
    for (start, _) in starts {
        let text: String = bytes[start..]
            .iter()
            .take(MAX_ID)
            .map(|byte| char::from(*byte))
            .take_while(|c| c.is_ascii_graphic() || *c == ' ')
            .collect();
        // The words must be there; the text may run on into its neighbour in the file.
        if let Some((head, tail)) = text.split_once(" sources ")
            && tail.len() >= HASH_CHARACTERS
            && tail[..HASH_CHARACTERS]
                .bytes()
                .all(|b| b.is_ascii_hexdigit())
        {
            return Some(format!("{head} sources {}", &tail[..HASH_CHARACTERS]));
        }
    }
    None
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            let entry = entry?.path();
            // Tests of a crate are no part of the file.
            let is_test = entry.file_name().is_some_and(|name| name == "tests");
            if !is_test {
                collect(&entry, files)?;
            }
        }
    } else if path
        .extension()
        .and_then(|extension| extension.to_str())
        .is_some_and(|extension| SOURCES.contains(&extension))
    {
        files.push(path.to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("crates/tcpx-nccl/src")).unwrap();
        fs::write(root.path().join("Cargo.toml"), "a").unwrap();
        fs::write(root.path().join("crates/tcpx-nccl/src/lib.rs"), "b").unwrap();
        root
    }

    #[test]
    fn the_id_follows_the_contents_and_the_names_and_nothing_else() {
        let root = workspace();
        let lib = root.path().join("crates/tcpx-nccl/src/lib.rs");
        let first = of_sources(root.path()).unwrap();
        fs::write(&lib, "b").unwrap();
        fs::write(root.path().join("crates/tcpx-nccl/notes.md"), "new").unwrap();
        assert_eq!(of_sources(root.path()).unwrap(), first);
        fs::write(&lib, "c").unwrap();
        assert_ne!(of_sources(root.path()).unwrap(), first);
        fs::rename(&lib, lib.with_file_name("other.rs")).unwrap();
        fs::write(lib.with_file_name("other.rs"), "b").unwrap();
        assert_ne!(of_sources(root.path()).unwrap(), first);
    }

    #[test]
    fn a_folder_without_sources_has_no_id() {
        let empty = tempfile::tempdir().unwrap();
        assert!(of_sources(empty.path()).is_err());
    }

    #[test]
    fn the_id_is_found_in_a_file_among_other_bytes() {
        let id = of_sources(workspace().path()).unwrap();
        let mut file = b"\x7fELF tcpx-nccl tcpx-nccl x sources zz\0\xff".to_vec();
        assert_eq!(find(&file), None);
        file.extend_from_slice(id.as_bytes());
        assert_eq!(find(&file).as_deref(), Some(id.as_str()));
        file.extend_from_slice(b"neighbouring text\0");
        assert_eq!(find(&file).as_deref(), Some(id.as_str()));
        assert_eq!(find(b""), None);
    }

    #[test]
    fn a_file_with_another_id_or_none_is_told_from_the_right_one() {
        let root = workspace();
        let id = of_sources(root.path()).unwrap();
        let file = root.path().join("plugin.so");
        assert!(matches!(
            verify(&file, &id),
            Err(BuildIdError::Unreadable { .. })
        ));
        fs::write(&file, "no id").unwrap();
        let error = verify(&file, &id).unwrap_err().to_string();
        assert!(error.contains("none") && error.contains(&id), "{error}");
        fs::write(&file, &id).unwrap();
        verify(&file, &id).unwrap();
        fs::write(root.path().join("crates/tcpx-nccl/src/new.rs"), "new").unwrap();
        let newer = of_sources(root.path()).unwrap();
        let error = verify(&file, &newer).unwrap_err().to_string();
        assert!(error.contains(&id) && error.contains(&newer), "{error}");
    }

    #[test]
    fn every_crate_in_the_plugin_file_decides_its_id() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for input in INPUTS.iter().filter(|input| input.starts_with("crates/")) {
            let manifest = fs::read_to_string(root.join(input).join("Cargo.toml")).unwrap();
            let (_, used) = manifest.split_once("[dependencies]\n").unwrap_or_default();
            for line in used.lines().take_while(|line| !line.starts_with('[')) {
                let name = line.split(['.', ' ']).next().unwrap_or_default();
                if name.starts_with("tcpx") || name == "nccl-net" {
                    let used = format!("crates/{name}");
                    assert!(INPUTS.contains(&used.as_str()), "{input} uses {used}");
                }
            }
        }
    }

    #[test]
    fn this_workspace_has_an_id() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let id = of_sources(&root).unwrap();
        assert!(id.starts_with("tcpx-nccl 0."), "{id}");
    }
}
