//! Windows: memory that a side opens to its peer, and the key that lets the peer in.

use subtle::ConstantTimeEq;
use thiserror::Error;
use zeroize::Zeroize;

/// What the peer may do in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rights {
    /// Read with get.
    Get,
    /// Write with put.
    Put,
    /// Both.
    GetAndPut,
}

impl Rights {
    /// Whether the peer may read.
    pub const fn allow_get(self) -> bool {
        matches!(self, Self::Get | Self::GetAndPut)
    }

    /// Whether the peer may write.
    pub const fn allow_put(self) -> bool {
        matches!(self, Self::Put | Self::GetAndPut)
    }
}

/// What only those know who hold the window's key.
#[derive(Clone, Copy, Zeroize)]
pub struct WindowSecret([u8; Self::BYTES]);

secret!(WindowSecret, 0);

impl WindowSecret {
    /// Bytes of a secret.
    pub const BYTES: usize = 16;

    /// A new secret; `fill` must fill all the bytes it gets from a cryptographic random source.
    pub fn generate(fill: &mut dyn FnMut(&mut [u8])) -> Self {
        let mut bytes = [0; Self::BYTES];
        fill(&mut bytes);
        Self(bytes)
    }

    /// The same, as memory that two processes share has it.
    pub fn words(&self) -> [u64; 2] {
        let (words, _) = self.0.as_chunks::<8>();
        std::array::from_fn(|at| u64::from_ne_bytes(words[at]))
    }

    pub(crate) const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

/// What lets the peer into a window. It is valid on the connection that the window was exposed on,
/// until the window is revoked, and travels by any means: whoever holds it and that connection may
/// use the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowKey {
    /// The window; never reused on a connection.
    pub window: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// What the peer may do.
    pub rights: Rights,
    /// Whether lists of pieces may name it: the network finds memory by name.
    pub takes_lists: bool,
    /// Whether its owner has it in memory of a GPU. A list names windows of one sort.
    pub is_on_gpu: bool,
    /// What proves that the peer was given the key.
    pub secret: WindowSecret,
}

/// Beside the rights in a key's bytes: lists of pieces may name it.
const TAKES_LISTS: u8 = 4;
/// Likewise: it is in memory of a GPU.
const IS_ON_GPU: u8 = 8;

/// First bytes of a key's bytes: a name and a version.
const KEY_START: [u8; 4] = *b"TXW\x01";

impl WindowKey {
    /// Wipes the secret from this place in memory.
    pub fn wipe(&mut self) {
        self.secret.zeroize();
    }

    /// Length of [`WindowKey::to_bytes`].
    pub const BYTES: usize = 4 + 1 + 8 + 8 + WindowSecret::BYTES;

    /// The key's bytes, to be given to the peer.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&KEY_START);
        bytes[4] = match self.rights {
            Rights::Get => 1,
            Rights::Put => 2,
            Rights::GetAndPut => 3,
        };
        bytes[4] |= if self.takes_lists { TAKES_LISTS } else { 0 };
        bytes[4] |= if self.is_on_gpu { IS_ON_GPU } else { 0 };
        bytes[5..13].copy_from_slice(&self.window.to_le_bytes());
        bytes[13..21].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[21..].copy_from_slice(self.secret.as_bytes());
        bytes
    }

    /// Reads a key's bytes.
    ///
    /// # Errors
    /// When they are not those of a key. Errors hold no part of the bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, WindowKeyError> {
        let error = WindowKeyError {
            arrived: bytes.len(),
        };
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| error)?;
        let sort = bytes[4];
        let rights = match sort & !(TAKES_LISTS | IS_ON_GPU) {
            1 => Rights::Get,
            2 => Rights::Put,
            3 => Rights::GetAndPut,
            _ => return Err(error),
        };
        if bytes[..4] != KEY_START {
            return Err(error);
        }
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        Ok(Self {
            window: number(5),
            bytes: number(13),
            rights,
            takes_lists: sort & TAKES_LISTS != 0,
            is_on_gpu: sort & IS_ON_GPU != 0,
            secret: WindowSecret(std::array::from_fn(|byte| bytes[21 + byte])),
        })
    }

    /// The place at `offset` in the window.
    pub const fn at(&self, offset: u64) -> Place {
        Place {
            window: self.window,
            secret: self.secret,
            offset,
        }
    }
}

/// Bytes that are not a window's key.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "window key: expected the {} bytes of a key, {arrived} bytes arrived that are none; pass the key as it was made, by the same version",
    WindowKey::BYTES
)]
pub struct WindowKeyError {
    /// How many arrived.
    pub arrived: usize,
}

/// Where in a window of the peer a transfer begins, and the proof that it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The window.
    pub window: u64,
    /// Its secret.
    pub secret: WindowSecret,
    /// First byte, from the start of the window.
    pub offset: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(rights: Rights) -> WindowKey {
        WindowKey {
            window: 0x0102_0304_0506_0708,
            bytes: u64::MAX,
            rights,
            takes_lists: rights == Rights::Put,
            is_on_gpu: rights == Rights::Get,
            secret: WindowSecret([0xa5; 16]),
        }
    }

    #[test]
    fn a_key_survives_its_bytes_and_hides_its_secret() {
        const { assert!(WindowKey::BYTES <= 96) };
        for rights in [Rights::Get, Rights::Put, Rights::GetAndPut] {
            let key = key(rights);
            assert_eq!(WindowKey::from_bytes(&key.to_bytes()), Ok(key));
            assert!(!format!("{key:?}").contains("165"), "{key:?}");
        }
    }

    #[test]
    fn bytes_that_are_no_key_are_refused() {
        let bytes = key(Rights::Put).to_bytes();
        for length in 0..bytes.len() {
            assert_eq!(
                WindowKey::from_bytes(&bytes[..length]),
                Err(WindowKeyError { arrived: length })
            );
        }
        let mut longer = bytes.to_vec();
        longer.push(0);
        let arrived = longer.len();
        assert_eq!(
            WindowKey::from_bytes(&longer),
            Err(WindowKeyError { arrived })
        );
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes;
            bytes[at] = byte;
            WindowKey::from_bytes(&bytes)
        };
        let none = Err(WindowKeyError {
            arrived: bytes.len(),
        });
        assert_eq!(with(0, b'X'), none);
        assert_eq!(with(3, 2), none);
        for sort in [0, 4, 8, 12, 16, 17, 255] {
            assert_eq!(with(4, sort), none);
        }
    }
}
