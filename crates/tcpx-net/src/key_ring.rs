//! The clients that a server lets in by name.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tcpx_lanes::lock;
use tcpx_wire::key::{AnyKey, Clients, Identity, KnownClient};
use tcpx_wire::{ClientKey, Key, KeyError, KeyId, KeyName};
use thiserror::Error;

/// How the files of a folder end that are keys.
const ENDING: &str = "key";
/// The name of the server's own key.
const SERVER: &str = "server";
/// A key file longer than this is not one, in bytes.
const LONGEST_FILE: u64 = 4096;
/// Most keys of a ring.
const MOST: usize = 1000;
/// What changed this long before it was read may have changed again within the same tick of the
/// clock that its file system has.
const TICK: Duration = Duration::from_secs(2);

/// A server's key and the keys of the clients that it lets in, each with a name. Clones share it:
/// who is removed does not connect any more, and keeps the connections that it has.
///
/// Whoever holds the server's own key, or the client's key that derives from it, is let in as
/// `server`.
#[derive(Clone)]
pub struct KeyRing(Arc<Inner>);

struct Inner {
    server: Key,
    state: Mutex<State>,
}

struct State {
    clients: HashMap<KeyId, KnownClient>,
    folder: Option<Folder>,
}

/// Where the keys lie.
struct Folder {
    path: PathBuf,
    /// It and its files, and when each had last changed before it was read; `None` while something
    /// may have changed since without another time.
    settled: Option<Vec<(PathBuf, SystemTime)>>,
}

impl KeyRing {
    /// A ring without clients.
    ///
    /// # Panics
    /// Never: the name `server` is one.
    pub fn new(server: Key) -> Self {
        Self::with_folder(server, None)
    }

    /// The ring of a folder: `server.key` is the server's own key, `NAME.key` that of a client, as
    /// [`KeyRing::issue`] makes it. Other files do not count. When a client comes and the folder or
    /// a file has changed, all is read again, so to remove a file shuts its client out. A file that
    /// became unusable, or a folder that cannot be read any more, lets nobody in, with a warning.
    ///
    /// # Errors
    /// The folder or a key in it cannot be read, or is none.
    pub fn of_folder(path: &Path) -> Result<Self, KeyRingError> {
        let file = path.join(SERVER).with_extension(ENDING);
        let AnyKey::Server(server) = read_key(&file)? else {
            return Err(KeyRingError::Key {
                file,
                error: KeyError::Client,
            });
        };
        let folder = Folder {
            path: path.to_owned(),
            settled: None,
        };
        let ring = Self::with_folder(server, Some(folder));
        let mut first = None;
        lock(&ring.0.state).read_folder(&ring.0.server, &mut |error| {
            first.get_or_insert(error);
        });
        match first {
            Some(error) => Err(error),
            None => Ok(ring),
        }
    }

    fn with_folder(server: Key, folder: Option<Folder>) -> Self {
        let mut state = State {
            clients: HashMap::new(),
            folder,
        };
        state.add_server(&server);
        Self(Arc::new(Inner {
            server,
            state: Mutex::new(state),
        }))
    }

    /// Lets one client more in; `name` is what errors and `tcpx status` call it.
    ///
    /// # Errors
    /// The key is of another server, or the name or the key is taken.
    pub fn add(&self, name: KeyName, key: ClientKey) -> Result<(), KeyRingError> {
        lock(&self.0.state).add(&self.0.server, name, key)
    }

    /// Makes a key for one client more, and lets it in.
    ///
    /// # Errors
    /// The name is taken, or the system has no random bytes.
    pub fn issue(&self, name: KeyName) -> Result<ClientKey, KeyRingError> {
        let mut filled = Ok(());
        let key = self
            .0
            .server
            .issue(&mut |out| filled = getrandom::fill(out));
        filled.map_err(|error| KeyRingError::Random(io::Error::other(error)))?;
        self.add(name, key.clone())?;
        Ok(key)
    }

    /// Shuts a client out; `false` if there is none of this name. A folder's file stays, and counts
    /// again when the folder has changed: remove the file instead.
    pub fn remove(&self, name: KeyName) -> bool {
        let mut state = lock(&self.0.state);
        let before = state.clients.len();
        state.clients.retain(|_, client| client.name != Some(name));
        state.clients.len() < before
    }

    /// The names and keys of the clients, in the order of the names; the server's own is not among
    /// them.
    pub fn clients(&self) -> Vec<(KeyName, ClientKey)> {
        let state = lock(&self.0.state);
        let named = |client: &KnownClient| Some((client.name?, client.key.clone()));
        let mut all: Vec<_> = state.clients.values().filter_map(named).collect();
        all.retain(|(name, _)| name.as_str() != SERVER);
        all.sort_by_key(|(name, _)| *name);
        all
    }

    /// The server's own key.
    pub fn server(&self) -> &Key {
        &self.0.server
    }

    /// What the server needs for each handshake.
    pub(crate) fn identity(&self) -> Identity {
        self.0.server.identity_for(Arc::new(self.clone()))
    }
}

impl State {
    fn add_server(&mut self, server: &Key) {
        let key = server.client_key();
        let name = SERVER.parse().ok();
        self.clients.insert(key.id(), KnownClient { name, key });
    }

    fn add(&mut self, server: &Key, name: KeyName, key: ClientKey) -> Result<(), KeyRingError> {
        if !key.is_for(server) {
            return Err(KeyRingError::OtherServer { name });
        }
        if self.clients.len() >= MOST {
            return Err(KeyRingError::TooMany);
        }
        let id = key.id();
        let taken =
            |(other, client): (&KeyId, &KnownClient)| *other == id || client.name == Some(name);
        if let Some((_, client)) = self.clients.iter().find(|one| taken(*one)) {
            let by = client.name.unwrap_or(name);
            return Err(KeyRingError::Taken { name, by });
        }
        let name = Some(name);
        self.clients.insert(id, KnownClient { name, key });
        Ok(())
    }

    /// Reads the folder, if there is one and it has changed.
    fn renew(&mut self, server: &Key) {
        let Some(folder) = &self.folder else { return };
        let is_as_it_was = |(path, when): &(PathBuf, SystemTime)| changed(path) == Some(*when);
        if folder
            .settled
            .as_ref()
            .is_some_and(|seen| seen.iter().all(is_as_it_was))
        {
            return;
        }
        self.read_folder(
            server,
            &mut |error| tracing::warn!(%error, "nobody is let in by this key"),
        );
    }

    /// Reads the folder; what is wrong in it goes to `failed` and lets nobody in.
    fn read_folder(&mut self, server: &Key, failed: &mut dyn FnMut(KeyRingError)) {
        let Some(Folder { path, .. }) = &self.folder else {
            return;
        };
        let path = path.clone();
        self.clients.clear();
        self.add_server(server);
        let mut seen = vec![(path.clone(), changed(&path))];
        let read = fs::read_dir(&path).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        match read {
            Err(source) => failed(KeyRingError::Folder { path, source }),
            Ok(entries) => {
                let files = entries.into_iter().map(|entry| entry.path());
                for file in files.filter(|file| is_client_file(file)) {
                    seen.push((file.clone(), changed(&file)));
                    if let Err(error) = self.add_file(server, &file) {
                        failed(error);
                    }
                }
            }
        }
        let old = |(path, when): (PathBuf, Option<SystemTime>)| {
            let age = when?.elapsed().ok()?;
            (age > TICK).then_some((path, when?))
        };
        if let Some(folder) = &mut self.folder {
            folder.settled = seen.into_iter().map(old).collect();
        }
    }

    fn add_file(&mut self, server: &Key, file: &Path) -> Result<(), KeyRingError> {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let name = stem.parse().map_err(|_| KeyRingError::Name {
            file: file.to_owned(),
        })?;
        match read_key(file)? {
            AnyKey::Client(key) => self.add(server, name, key),
            AnyKey::Server(_) => Err(KeyRingError::ServerKey {
                file: file.to_owned(),
            }),
        }
    }
}

impl Clients for KeyRing {
    fn find(&self, id: &KeyId) -> Option<KnownClient> {
        let mut state = lock(&self.0.state);
        state.renew(&self.0.server);
        state.clients.get(id).cloned()
    }
}

impl PartialEq for KeyRing {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for KeyRing {}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.clients().into_iter().map(|(name, _)| name);
        f.debug_list().entries(names).finish()
    }
}

/// When a file or folder last changed.
fn changed(path: &Path) -> Option<SystemTime> {
    fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .ok()
}

/// Whether a file of a folder is the key of a client by its name.
fn is_client_file(file: &Path) -> bool {
    let is_hidden = file
        .file_name()
        .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    !is_hidden
        && file.extension().is_some_and(|ending| ending == ENDING)
        && file.file_stem().is_some_and(|stem| stem != SERVER)
}

pub(crate) fn read_key(file: &Path) -> Result<AnyKey, KeyRingError> {
    let failed = |source| KeyRingError::File {
        file: file.to_owned(),
        source,
    };
    let mut text = zeroize::Zeroizing::new(String::new());
    let opened = File::open(file).map_err(failed)?;
    check_owner(file, &opened.metadata().map_err(failed)?)?;
    let mut opened = opened.take(LONGEST_FILE);
    opened.read_to_string(&mut text).map_err(failed)?;
    AnyKey::parse(&text).map_err(|error| KeyRingError::Key {
        file: file.to_owned(),
        error,
    })
}

/// Refuses a file whose key another user may have put there, and warns of one that others can read.
fn check_owner(file: &Path, metadata: &Metadata) -> Result<(), KeyRingError> {
    let (user, owner) = (rustix::process::geteuid().as_raw(), metadata.uid());
    let untrusted = |why| {
        Err(KeyRingError::Untrusted {
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

/// A key that cannot be one of a ring.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeyRingError {
    /// The folder cannot be read.
    #[error("the folder of keys {} cannot be read: {source}", .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A key file cannot be read.
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
    /// A file holds no key.
    #[error("{} holds no key for this: {error}", .file.display())]
    Key {
        /// The file.
        file: PathBuf,
        /// Why.
        error: KeyError,
    },
    /// A file's name cannot name a key.
    #[error("{}: a key's name has 1 to 32 letters, digits, `-`, `_` and `.`; rename the file", .file.display())]
    Name {
        /// The file.
        file: PathBuf,
    },
    /// A client's file holds a server's key.
    #[error("{} holds a server's key; a client's is needed: `tcpx key FOLDER NAME` makes one", .file.display())]
    ServerKey {
        /// The file.
        file: PathBuf,
    },
    /// The key connects to another server.
    #[error("the key {name} is of another server; issue one with this server's key")]
    OtherServer {
        /// Its name.
        name: KeyName,
    },
    /// The name or the key is there already.
    #[error(
        "the key {name} is there already, as {by}; give every client a name and a key of its own"
    )]
    Taken {
        /// The name of the new one.
        name: KeyName,
        /// The name of the one that is there.
        by: KeyName,
    },
    /// There are too many keys.
    #[error("there are more than 1000 keys; remove those that are not used")]
    TooMany,
    /// The system has no random bytes.
    #[error("the system gave no random bytes for a key: {0}")]
    Random(io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> Key {
        Key::generate(&mut |out| out.fill(7))
    }

    fn name(text: &str) -> KeyName {
        text.parse().expect("a name")
    }

    #[test]
    fn a_key_that_another_user_may_have_put_there_is_refused() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let file = std::env::temp_dir().join(format!("tcpx-key-{}", std::process::id()));
        fs::write(&file, server().to_text().as_bytes()).unwrap();
        let with_mode = |mode| {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            read_key(&file)
        };
        for mode in [0o600, 0o400, 0o644, 0o640] {
            assert!(with_mode(mode).is_ok(), "{mode:o}");
        }
        let refused = with_mode(0o666);
        assert!(
            matches!(refused, Err(KeyRingError::Untrusted { .. })),
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

    fn found(ring: &KeyRing, key: &ClientKey) -> Option<String> {
        ring.find(&key.id())
            .map(|client| client.name.expect("all have names").to_string())
    }

    #[test]
    fn a_removed_client_is_not_found_any_more() {
        let ring = KeyRing::new(server());
        let [ann, bob] = ["ann", "bob"].map(|one| ring.issue(name(one)).expect("a key"));
        assert_eq!(found(&ring, &ann).as_deref(), Some("ann"));
        assert_eq!(
            found(&ring, &server().client_key()).as_deref(),
            Some("server")
        );
        assert!(ring.clone().remove(name("ann")) && !ring.remove(name("ann")));
        assert_eq!(found(&ring, &ann), None);
        assert_eq!(found(&ring, &bob).as_deref(), Some("bob"));
        assert_eq!(ring.clients(), [(name("bob"), bob)]);
    }

    #[test]
    fn taken_names_and_foreign_keys_are_refused() {
        let ring = KeyRing::new(server());
        let ann = ring.issue(name("ann")).expect("a key");
        assert!(matches!(
            ring.issue(name("ann")),
            Err(KeyRingError::Taken { .. })
        ));
        assert!(matches!(
            ring.add(name("bob"), ann),
            Err(KeyRingError::Taken { .. })
        ));
        assert!(matches!(
            ring.issue(name("server")),
            Err(KeyRingError::Taken { .. })
        ));
        let foreign = Key::generate(&mut |out| out.fill(8)).client_key();
        let refused = ring.add(name("bob"), foreign);
        assert!(matches!(refused, Err(KeyRingError::OtherServer { .. })));
    }

    #[test]
    fn files_that_come_and_go_count_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let write =
            |file: &str, text: String| fs::write(folder.path().join(file), text).expect("written");
        write("server.key", server().to_text());
        let ring = KeyRing::of_folder(folder.path()).expect("a ring");
        assert!(ring.clients().is_empty());
        // Of each round some changes fall into one tick of the file system's clock.
        for round in 0..50 {
            let key = server().issue(&mut |out| out.fill(round));
            assert_eq!(found(&ring, &key), None);
            write("ann.key", key.to_text());
            assert_eq!(found(&ring, &key).as_deref(), Some("ann"));
            fs::rename(folder.path().join("ann.key"), folder.path().join("bob.key"))
                .expect("renamed");
            assert_eq!(found(&ring, &key).as_deref(), Some("bob"));
            fs::remove_file(folder.path().join("bob.key")).expect("removed");
            assert_eq!(found(&ring, &key), None);
        }
    }

    #[test]
    fn a_file_that_is_overwritten_long_after_it_was_read_counts() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |file: &str| folder.path().join(file);
        let age = |file: &Path| {
            let long_ago = SystemTime::now() - 100 * TICK;
            File::open(file)
                .and_then(|file| file.set_modified(long_ago))
                .expect("an older time");
        };
        let [ann, other] = [1, 2].map(|seed| server().issue(&mut |out| out.fill(seed)));
        fs::write(path("server.key"), server().to_text()).expect("written");
        fs::write(path("ann.key"), ann.to_text()).expect("written");
        age(&path("ann.key"));
        age(folder.path());
        let ring = KeyRing::of_folder(folder.path()).expect("a ring");
        assert!(
            lock(&ring.0.state)
                .folder
                .as_ref()
                .is_some_and(|folder| folder.settled.is_some())
        );
        assert_eq!(found(&ring, &ann).as_deref(), Some("ann"));
        fs::write(path("ann.key"), other.to_text()).expect("written");
        assert_eq!(found(&ring, &ann), None);
        assert_eq!(found(&ring, &other).as_deref(), Some("ann"));
    }

    #[test]
    fn a_wrong_folder_is_an_error_and_lets_nobody_in() {
        let folder = tempfile::tempdir().expect("a folder");
        let write =
            |file: &str, text: String| fs::write(folder.path().join(file), text).expect("written");
        let open = || KeyRing::of_folder(folder.path());
        assert!(matches!(open(), Err(KeyRingError::File { .. })));
        write("server.key", server().client_key().to_text());
        assert!(matches!(open(), Err(KeyRingError::Key { .. })));
        write("server.key", server().to_text());
        write("notes.txt", "no key".to_owned());
        write(".ann.key", "of an editor".to_owned());
        let ring = open().expect("a ring");
        let ann = server().issue(&mut |out| out.fill(1));
        write("ann.key", ann.to_text());
        assert_eq!(found(&ring, &ann).as_deref(), Some("ann"));
        write("bob.key", "no key".to_owned());
        assert!(matches!(open(), Err(KeyRingError::Key { .. })));
        write("bob.key", server().to_text());
        assert!(matches!(open(), Err(KeyRingError::ServerKey { .. })));
        assert_eq!(found(&ring, &ann).as_deref(), Some("ann"));
        fs::remove_file(folder.path().join("bob.key")).expect("removed");
        write("no name.key", ann.to_text());
        assert!(matches!(open(), Err(KeyRingError::Name { .. })));
        drop(folder);
        assert_eq!(found(&ring, &ann), None);
    }
}
