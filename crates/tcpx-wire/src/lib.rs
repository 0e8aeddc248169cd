//! The tcpx protocol without I/O.
//!
//! Everything here is a function of bytes and values: no socket, no clock, no thread, no unsafe
//! code. Callers move the bytes and pass the time. Whatever arrives from a peer, a plugin or the
//! kernel becomes a checked value or a typed error, never a panic.
//!
//! The bytes are specified in `docs/wire-protocol/`.

#![forbid(unsafe_code)]

/// Keeps what a type holds out of `Debug`.
macro_rules! hidden {
    ($name:ident) => {
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(concat!(stringify!($name), "(hidden)"))
            }
        }
    };
}

/// The same for a type that can be compared, by these fields: in a time that says nothing about
/// them.
macro_rules! secret {
    ($name:ident, $($field:tt),+) => {
        hidden!($name);

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                let mut equal = subtle::Choice::from(1);
                $(equal &= self.$field.ct_eq(&other.$field);)+
                equal.into()
            }
        }

        impl Eq for $name {}
    };
}

/// Bytes at a place that their holder has.
#[inline]
fn array<const LENGTH: usize>(bytes: &[u8], at: usize) -> [u8; LENGTH] {
    *bytes[at..].first_chunk().expect("their holder has them")
}

pub mod chunk_header;
pub mod crc;
mod derive;
pub mod descriptor;
pub mod frame;
pub mod handshake;
pub mod key;
pub mod lane_seal;
pub mod numbered;
pub mod pieces;
pub mod plan;
pub mod range_set;
pub mod record;
pub mod session;
pub mod time;
pub mod window;

pub use chunk_header::{ChunkHeader, ChunkHeaderError, ChunkPayload};
pub use descriptor::{
    Descriptor, Descriptors, EvenList, EvenPieces, Fragment, Limits, ScatterError, ScatterList,
};
pub use frame::{Frame, FrameDecoder, FrameError, Level, Role, Settings, Tag, TransferId};
pub use key::{AnyKey, ClientKey, Identity, Key, KeyError};
pub use numbered::Numbered;
pub use pieces::{PieceList, PieceListError, PieceRun};
pub use plan::{ChunkPlan, Taper};
pub use session::Session;
pub use time::Time;
pub use window::{Place, Rights, WindowKey, WindowKeyError, WindowSecret};

#[cfg(test)]
mod tests {
    /// The page of the protocol shows these bytes.
    pub(crate) fn assert_on_page<'a>(vectors: impl IntoIterator<Item = &'a String>) {
        let page = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/wire-protocol/vectors.md"
        );
        let page = std::fs::read_to_string(page).unwrap();
        let page: String = page.split_whitespace().collect();
        for vector in vectors {
            assert!(page.contains(vector), "{vector}");
        }
    }
}
