//! One call's worth of tokens, and the kernel's answer to it.

use super::{BATCH_BYTES, Outstanding, TokenError, TokenSet};
use crate::cmsg::{Dialect, SOL_SOCKET};

/// Tokens for one `setsockopt`.
///
/// Make the call before the next receive on the socket: a token that is free may be handed out
/// again there, and a second return of it would free what was just received.
#[derive(Debug)]
#[must_use = "the tokens stay in the set until the kernel's answer is told"]
pub struct Batch<'a> {
    pub(super) set: &'a mut TokenSet,
    pub(super) dialect: Dialect,
    pub(super) bytes: [u8; BATCH_BYTES],
    pub(super) used: usize,
    pub(super) fragments: u32,
}

impl Batch<'_> {
    /// Level for `setsockopt`.
    pub fn level(&self) -> i32 {
        SOL_SOCKET
    }

    /// Option for `setsockopt`.
    pub fn option(&self) -> i32 {
        self.dialect.return_option()
    }

    /// Value for `setsockopt`: ranges of 8 bytes, at most [`TokenSet::MOST_RANGES`].
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Number of tokens, at most [`TokenSet::MOST_FRAGMENTS`].
    pub fn fragments(&self) -> u32 {
        self.fragments
    }

    /// Tells what `setsockopt` returned when it did not fail.
    ///
    /// The mainline kernel returns how many fragments it freed; Google's returns 0 when it freed
    /// all. When the call failed, drop the batch: nothing is forgotten, and nothing can be added to
    /// the set before the same batch was answered. Google's kernel fails with `EINTR` when it did
    /// not know every token: close the socket then.
    ///
    /// # Errors
    /// When the answer cannot be: more freed than sent, or none of what was left. The tokens stay
    /// in the set; closing the socket gives them back.
    pub fn answered(self, answer: i32) -> Result<Returned, TokenError> {
        let before = self.set.outstanding.map_or(0, |batch| batch.freed);
        let sent = self.fragments;
        let impossible = TokenError::Answer {
            sent,
            before,
            answer,
        };
        let newly = match (self.dialect, u32::try_from(answer)) {
            (Dialect::Google, Ok(0)) => sent - before,
            (Dialect::Mainline, Ok(newly)) if newly <= sent - before => newly,
            _ => return Err(impossible),
        };
        let freed = before + newly;
        if freed == sent {
            self.set.remove_front(sent);
            self.set.outstanding = None;
            return Ok(Returned::All);
        }
        if newly == 0 {
            return Err(TokenError::NotFreed { sent, freed });
        }
        self.set.outstanding = Some(Outstanding {
            fragments: sent,
            freed,
        });
        Ok(Returned::Part { left: sent - freed })
    }
}

/// How far a batch was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what is left must be given back before the next receive"]
pub enum Returned {
    /// All of it; it left the set.
    All,
    /// Not all: the kernel does not say which. The same batch comes again from
    /// [`TokenSet::batch`]; give it back before the next receive on the socket.
    Part {
        /// Fragments still held by the kernel's count.
        left: u32,
    },
}
