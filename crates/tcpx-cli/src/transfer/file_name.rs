//! File names that came from a peer: hostile until checked.

use std::path::Path;

/// The longest name that common file systems take, in bytes.
const LONGEST: usize = 255;

/// Why a name from the peer is not used. The name itself is shown escaped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FileNameError {
    #[error("the peer sent an empty file name")]
    Empty,
    #[error("the peer sent a file name of {0} bytes, at most {LONGEST} are allowed")]
    TooLong(usize),
    #[error(
        "the peer sent the file name \"{0}\", which has a path in it; only a plain name is allowed"
    )]
    Path(String),
    #[error("the peer sent the file name \"{0}\", which has control characters in it")]
    Control(String),
    #[error("the peer sent the file name \"{0}\"; names that begin with a dot are not accepted")]
    Hidden(String),
}

/// A file name that stays inside the directory it is joined to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileName(String);

impl FileName {
    /// Accepts a plain base name and nothing else.
    ///
    /// Names with a leading dot are refused as well: a peer must not be able to place `.bashrc`.
    pub(crate) fn from_peer(name: &str) -> Result<Self, FileNameError> {
        let shown = || name.escape_debug().take(80).collect::<String>();
        if name.is_empty() {
            return Err(FileNameError::Empty);
        }
        if name.len() > LONGEST {
            return Err(FileNameError::TooLong(name.len()));
        }
        if name.contains(['/', '\\']) || name == ".." || name == "." {
            return Err(FileNameError::Path(shown()));
        }
        if name.chars().any(|c| c.is_control() || is_invisible(c)) {
            return Err(FileNameError::Control(shown()));
        }
        if name.starts_with('.') {
            return Err(FileNameError::Hidden(shown()));
        }
        Ok(Self(name.to_owned()))
    }
}

impl AsRef<Path> for FileName {
    fn as_ref(&self) -> &Path {
        Path::new(&self.0)
    }
}

/// Characters that change how the text around them is shown (directional overrides, zero width).
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names_are_kept_as_they_are() {
        for name in [
            "model.safetensors",
            "a",
            "with space",
            "näme-ü.bin",
            "a..b",
            &"x".repeat(255),
        ] {
            assert_eq!(FileName::from_peer(name).map(|n| n.0).as_deref(), Ok(name));
        }
    }

    #[test]
    fn names_that_leave_the_directory_are_refused() {
        for name in ["..", ".", "/etc/passwd", "../x", "a/b", "a\\b", "x/", "/"] {
            assert!(
                matches!(FileName::from_peer(name), Err(FileNameError::Path(_))),
                "{name}"
            );
        }
    }

    #[test]
    fn names_that_deceive_are_refused_and_shown_escaped() {
        for name in ["a\nb", "a\0b", "\u{1b}[31mred", "gpj.\u{202e}exe"] {
            let error = FileName::from_peer(name).expect_err(name);
            assert!(matches!(error, FileNameError::Control(_)), "{error}");
            assert!(
                !error
                    .to_string()
                    .chars()
                    .any(|c| c.is_control() || is_invisible(c)),
                "{error}"
            );
        }
        assert!(matches!(
            FileName::from_peer(".bashrc"),
            Err(FileNameError::Hidden(_))
        ));
    }

    #[test]
    fn names_are_bounded() {
        assert_eq!(FileName::from_peer(""), Err(FileNameError::Empty));
        assert_eq!(
            FileName::from_peer(&"x".repeat(256)),
            Err(FileNameError::TooLong(256))
        );
    }
}
