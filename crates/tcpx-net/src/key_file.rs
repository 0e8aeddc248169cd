//! Key files, and whom their contents may come from.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tcpx_wire::KeyError;
use tcpx_wire::key::AnyKey;
use thiserror::Error;

/// A key file longer than this is not one, in bytes.
const LONGEST_FILE: u64 = 4096;

pub(crate) fn read_key(file: &Path) -> Result<AnyKey, KeyFileError> {
    let failed = |source| KeyFileError::File {
        file: file.to_owned(),
        source,
    };
    let mut text = zeroize::Zeroizing::new(String::new());
    let opened = File::open(file).map_err(failed)?;
    check_owner(file, &opened.metadata().map_err(failed)?)?;
    let mut opened = opened.take(LONGEST_FILE);
    opened.read_to_string(&mut text).map_err(failed)?;
    AnyKey::parse(&text).map_err(|error| KeyFileError::Key {
        file: file.to_owned(),
        error,
    })
}

/// Refuses a file whose key another user may have put there, and warns of one that others can read.
fn check_owner(file: &Path, metadata: &Metadata) -> Result<(), KeyFileError> {
    let (user, owner) = (rustix::process::geteuid().as_raw(), metadata.uid());
    let untrusted = |why| {
        Err(KeyFileError::Untrusted {
            file: file.to_owned(),
            why,
        })
    };
    match metadata.mode() {
        // A pipe, or the terminal.
        _ if !metadata.is_file() => Ok(()),
        _ if ![user, 0].contains(&owner) && user != 0 => untrusted("belongs to another user"),
        mode if mode & 0o002 != 0 => untrusted("can be written by every user of this host"),
        mode if mode & 0o064 != 0 => {
            tracing::warn!(file = %file.display(), "others can read or change this key file; chmod 600 it");
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A file without a key that may be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeyFileError {
    /// The file cannot be read.
    #[error("the key file {} cannot be read: {source}", .file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The key may be another user's.
    #[error("the key file {} {why}: who can change it lets in whom they like; make it your own (`chown`, `chmod 600`)", .file.display())]
    Untrusted {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The file holds no key.
    #[error("{} holds no key: {error}", .file.display())]
    Key {
        /// The file.
        file: PathBuf,
        /// Why.
        error: KeyError,
    },
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tcpx_wire::Key;

    use super::*;

    #[test]
    fn a_key_that_another_user_may_have_put_there_is_refused() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let file = std::env::temp_dir().join(format!("tcpx-key-{}", std::process::id()));
        fs::write(
            &file,
            Key::generate(&mut |out| out.fill(7)).to_text().as_bytes(),
        )
        .unwrap();
        let with_mode = |mode| {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            read_key(&file)
        };
        for mode in [0o600, 0o400, 0o644, 0o640] {
            assert!(with_mode(mode).is_ok(), "{mode:o}");
        }
        let refused = with_mode(0o666);
        assert!(
            matches!(refused, Err(KeyFileError::Untrusted { .. })),
            "{refused:?}"
        );
        assert!(with_mode(0o600).is_ok());
        // Root reads what it is told to; who is not root cannot give a file away.
        let is_root = rustix::process::geteuid().is_root();
        if is_root && chown(&file, Some(12_345), None).is_ok() {
            assert!(read_key(&file).is_ok());
        }
        fs::remove_file(&file).unwrap();
    }
}
