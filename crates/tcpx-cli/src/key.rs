//! The key of a session: from a file, a variable or a prompt; never from the arguments, which every
//! user of the host can read.

use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use clap::Args;
use tcpx::{Auth, Key, KeyFileError};
use zeroize::Zeroizing;

use crate::advice::split;
use crate::environment::PROGRAM_KEY;
use crate::error::Error;
use crate::output::json::Told;
use crate::output::say::{aside, say};

/// Make a server's key.
#[derive(Args, Debug)]
pub(crate) struct KeyArgs {
    /// The key file, for --key-file. It is made unless it is there, readable by its owner alone.
    pub(crate) file: PathBuf,
}

/// The variable that holds the key.
pub(crate) const KEY_VARIABLE: &str = "TCPX_KEY";

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyError {
    #[error(
        "this connection needs a key, and there is none in {KEY_VARIABLE}, no --key-file, and no terminal to ask at"
    )]
    Missing,
    #[error("{from} holds no key: {why}")]
    Wrong { from: String, why: String },
    #[error("{from} holds a client's key, with which nobody can serve")]
    Client { from: String },
    #[error("the key could not be read from the terminal: {0}")]
    Prompt(io::Error),
    #[error("the system gave no random bytes: {0}")]
    Random(String),
    #[error("the key file {} cannot be written: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    File(#[from] KeyFileError),
}

/// Where a key came from: whether it may be printed again depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyOrigin {
    /// Made for this run; the server prints it.
    Fresh,
    /// The variable.
    Variable,
    /// The file of `--key-file`.
    File(PathBuf),
    /// Typed at the prompt.
    Typed,
    /// `--insecure`: there is none.
    None,
}

/// What a person said about the key. It has no `Debug`: it holds the key's text.
#[derive(Default)]
pub(crate) struct KeySources {
    pub(crate) insecure: bool,
    pub(crate) file: Option<PathBuf>,
    pub(crate) variable: Option<Zeroizing<String>>,
}

impl KeySources {
    /// The sources of this process.
    pub(crate) fn of_process(insecure: bool, file: Option<PathBuf>) -> Self {
        Self {
            insecure,
            file,
            variable: std::env::var(KEY_VARIABLE)
                .or_else(|_| std::env::var(PROGRAM_KEY))
                .ok()
                .map(Zeroizing::new),
        }
    }

    /// The key of a server: given, or a fresh one.
    pub(crate) fn for_server(&self) -> Result<(Auth, KeyOrigin), KeyError> {
        let (auth, origin) = match self.given() {
            Ok(Some(found)) => found,
            Ok(None) => (Auth::Key(fresh()?), KeyOrigin::Fresh),
            // From now on it holds this server's key.
            Err(KeyError::File(KeyFileError::File { file, source }))
                if source.kind() == io::ErrorKind::NotFound
                    && self.file.as_ref() == Some(&file) =>
            {
                let key = create(&file)?;
                aside!("note: the key file {} is new", file.display());
                (Auth::Key(key), KeyOrigin::Fresh)
            }
            Err(error) => return Err(error),
        };
        if let Auth::Client(_) = auth {
            return Err(KeyError::Client {
                from: match &origin {
                    KeyOrigin::File(path) => path.display().to_string(),
                    _ => KEY_VARIABLE.to_owned(),
                },
            });
        }
        Ok((auth, origin))
    }

    /// The key of a client: given, or asked for when there is a terminal.
    pub(crate) fn for_client(&self) -> Result<(Auth, KeyOrigin), KeyError> {
        if let Some(found) = self.given()? {
            return Ok(found);
        }
        // The prompt is at the terminal itself: standard input may be a file to send.
        if !io::stdin().is_terminal() && !io::stderr().is_terminal() {
            return Err(KeyError::Missing);
        }
        let typed = Zeroizing::new(
            rpassword::prompt_password("key (the server printed it): ")
                .map_err(KeyError::Prompt)?,
        );
        Ok((parse(&typed, "what was typed")?, KeyOrigin::Typed))
    }

    /// A flag is nearer to the person than a variable, so it wins.
    fn given(&self) -> Result<Option<(Auth, KeyOrigin)>, KeyError> {
        if self.insecure {
            return Ok(Some((Auth::Insecure, KeyOrigin::None)));
        }
        if let Some(path) = &self.file {
            return Ok(Some((Auth::of_file(path)?, KeyOrigin::File(path.clone()))));
        }
        match self.variable.as_ref().map(|text| text.trim()) {
            None | Some("") => Ok(None),
            Some(text) => Ok(Some((parse(text, KEY_VARIABLE)?, KeyOrigin::Variable))),
        }
    }
}

/// Warns of a key that other users of the host can read.
pub(crate) fn warn_of_readers(path: &Path) {
    if is_readable_by_others(path) {
        aside!(
            "warning: {} can be read by other users of this host; chmod 600 it",
            path.display()
        );
    }
}

/// Whether other users of the host can read the file.
fn is_readable_by_others(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o044 != 0)
}

/// A key nobody has seen.
pub(crate) fn fresh() -> Result<Key, KeyError> {
    tcpx::generate_key().map_err(|error| KeyError::Random(error.to_string()))
}

/// A number that nobody can guess, for contents.
pub(crate) fn seed() -> Result<u64, KeyError> {
    getrandom::u64().map_err(|error| KeyError::Random(error.to_string()))
}

fn parse(text: &str, from: &str) -> Result<Auth, KeyError> {
    Auth::parse(text).map_err(|why| KeyError::Wrong {
        from: from.to_owned(),
        why: split(&why.to_string()).0.replacen("key: ", "", 1),
    })
}

/// The server's key in `path`, which is made if it is not there.
fn server_key(path: &Path) -> Result<Key, KeyError> {
    match create(path) {
        Err(KeyError::Write { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made,
    }
    warn_of_readers(path);
    match Auth::of_file(path).map_err(KeyError::from)? {
        Auth::Key(key) => Ok(key),
        _ => Err(KeyError::Client {
            from: path.display().to_string(),
        }),
    }
}

/// Makes a server's key file, unless it is there, and prints what clients need.
pub(crate) fn run(args: &KeyArgs) -> Result<Told, Error> {
    let path = &args.file;
    let key = server_key(path)?;
    let client = key.client_key();
    say!("server       --key-file {}", path.display());
    say!("clients      {KEY_VARIABLE}={}", client.to_text());
    say!("fingerprint  {}", client.fingerprint());
    Ok(Told::Fields(serde_json::json!({
        "file": path, "client_key": client.to_text(), "fingerprint": client.fingerprint(),
    })))
}

/// A fresh key in a new file that its owner alone can read.
fn create(path: &Path) -> Result<Key, KeyError> {
    let key = fresh()?;
    write_new(path, &Zeroizing::new(key.to_text()))?;
    Ok(key)
}

/// A key's text in a new file that its owner alone can read.
fn write_new(path: &Path, text: &str) -> Result<(), KeyError> {
    let failed = |source| KeyError::Write {
        path: path.to_owned(),
        source,
    };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed)?;
    writeln!(file, "{text}").map_err(failed)?;
    file.sync_all().map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn text(auth: &Auth) -> String {
        match auth {
            Auth::Key(key) => key.to_text(),
            Auth::Client(key) => key.to_text(),
            Auth::Insecure => "none".to_owned(),
        }
    }

    fn file_with(contents: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(contents.as_bytes()).expect("written");
        file
    }

    #[test]
    fn insecure_wins_over_the_file_and_the_file_over_the_variable() {
        let (in_file, in_variable) = (fresh().expect("a key"), fresh().expect("a key"));
        let file = file_with(&format!("{}\n", in_file.to_text()));
        let mut sources = KeySources {
            insecure: true,
            file: Some(file.path().to_owned()),
            variable: Some(in_variable.to_text().into()),
        };
        assert_eq!(
            sources
                .for_client()
                .map(|(auth, _)| text(&auth))
                .expect("none"),
            "none"
        );
        sources.insecure = false;
        let (auth, origin) = sources.for_client().expect("the file's");
        assert_eq!(
            (text(&auth), origin),
            (in_file.to_text(), KeyOrigin::File(file.path().to_owned()))
        );
        sources.file = None;
        let (auth, origin) = sources.for_client().expect("the variable's");
        assert_eq!(
            (text(&auth), origin),
            (in_variable.to_text(), KeyOrigin::Variable)
        );
    }

    #[test]
    fn a_server_without_a_key_makes_a_fresh_one_each_time() {
        let keys = [(); 2].map(|()| KeySources::default().for_server().expect("a key"));
        assert_eq!(keys[0].1, KeyOrigin::Fresh);
        assert_ne!(text(&keys[0].0), text(&keys[1].0));
    }

    #[test]
    fn a_key_file_is_made_once_and_is_its_owners() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("key");
        let made = create(&file).expect("made");
        assert!(!is_readable_by_others(&file));
        assert_eq!(Auth::of_file(&file).expect("a key"), Auth::Key(made));
        let again = create(&file).expect_err("it is there");
        assert!(matches!(again, KeyError::Write { .. }), "{again}");
    }

    #[test]
    fn an_empty_variable_is_no_key() {
        let sources = KeySources {
            variable: Some("  ".to_owned().into()),
            ..KeySources::default()
        };
        assert_eq!(sources.for_server().expect("a key").1, KeyOrigin::Fresh);
    }

    #[test]
    fn a_wrong_key_says_where_it_stood_and_does_not_repeat_it() {
        let file = file_with("not a key");
        let sources = KeySources {
            file: Some(file.path().to_owned()),
            ..KeySources::default()
        };
        let error = sources.for_client().expect_err("no key").to_string();
        assert!(
            error.contains(&file.path().display().to_string()),
            "{error}"
        );
        assert!(!error.contains("not a key"), "{error}");
    }

    #[test]
    fn a_server_makes_the_key_file_that_is_not_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let sources = KeySources {
            file: Some(path.clone()),
            ..KeySources::default()
        };
        let (made, origin) = sources.for_server().expect("a new key");
        // Its client cannot know it yet, so the line for it has it.
        assert_eq!(origin, KeyOrigin::Fresh);
        assert!(!is_readable_by_others(&path));
        let (again, origin) = sources.for_server().expect("the same key");
        assert_eq!((text(&again), origin), (text(&made), KeyOrigin::File(path)));
    }

    #[test]
    fn a_missing_or_endless_key_file_is_an_error() {
        let missing = KeySources {
            file: Some("/nonexistent/key".into()),
            ..KeySources::default()
        };
        assert!(matches!(
            missing.for_client(),
            Err(KeyError::File(KeyFileError::File { .. }))
        ));
        let endless = KeySources {
            file: Some("/dev/zero".into()),
            ..KeySources::default()
        };
        assert!(matches!(
            endless.for_server(),
            Err(KeyError::File(KeyFileError::Key { .. }))
        ));
    }

    #[test]
    fn a_key_file_that_others_can_read_is_noticed() {
        use std::os::unix::fs::PermissionsExt;
        let file = file_with("");
        assert!(!is_readable_by_others(file.path()));
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644))
            .expect("changed");
        assert!(is_readable_by_others(file.path()));
    }
}
