//! Who may connect.

use std::path::Path;

use tcpx_wire::key::{AnyKey, ClientKey, Key, KeyError};

use crate::key_file::{self, KeyFileError};

/// How peers prove that they may talk to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Auth {
    /// A server's key: with it this side can serve, and connect to any server that has the same.
    Key(Key),
    /// A client's key: with it this side can connect to the server that it is of.
    Client(ClientKey),
    /// Nobody proves anything; both sides must say so.
    Insecure,
}

impl Auth {
    /// Reads a key's text; its length says whose it is.
    ///
    /// # Errors
    /// When the text is not that of a generated key. Errors never hold a part of the text.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        Ok(match AnyKey::parse(text)? {
            AnyKey::Server(key) => Self::Key(key),
            AnyKey::Client(key) => Self::Client(key),
        })
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// The file cannot be read, may be another user's, or holds no key.
    pub fn of_file(path: &Path) -> Result<Self, KeyFileError> {
        Ok(match key_file::read_key(path)? {
            AnyKey::Server(key) => Self::Key(key),
            AnyKey::Client(key) => Self::Client(key),
        })
    }

    /// What this side connects with.
    pub fn client_key(&self) -> Option<ClientKey> {
        match self {
            Self::Key(key) => Some(key.client_key()),
            Self::Client(key) => Some(key.clone()),
            Self::Insecure => None,
        }
    }
}
