//! Tokens on their way back to the kernel.

use std::ops::Range;

use tcpx_wire::range_set::RangeSet;
use thiserror::Error;

use crate::cmsg::{Dialect, SOL_SOCKET};

/// Tokens of one socket that are to be given back, as few ranges.
///
/// Room for the ranges is reused: once it has held the most it allocates nothing. Adding costs a
/// binary search, and a move of the ranges behind it when the token joins none of them.
///
/// Take a batch, make the `setsockopt` call, report the answer, until there is no batch:
///
/// ```
/// use tcpx_devmem::cmsg::Dialect;
/// use tcpx_devmem::tokens::{Returned, TokenSet};
///
/// let mut tokens = TokenSet::new();
/// for token in [3, 1, 2, 7] {
///     tokens.insert(token)?;
/// }
/// while let Some(batch) = tokens.batch(Dialect::Mainline) {
///     assert_eq!((batch.level(), batch.option()), (1, 80));
///     assert_eq!(batch.as_bytes().len(), 2 * 8);
///     // let answer = setsockopt(fd, batch.level(), batch.option(), batch.as_bytes())
///     let answer = 4;
///     assert_eq!(batch.answered(answer)?, Returned::All);
/// }
/// # Ok::<(), tcpx_devmem::tokens::TokenError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    ranges: RangeSet,
    /// Set while a batch is taken but not all given back.
    outstanding: Option<Outstanding>,
}

/// The batch at the front of the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Outstanding {
    fragments: u32,
    /// How many of them the kernel says are free; which ones is not known.
    freed: u32,
}

impl TokenSet {
    /// Most ranges that the kernel takes in one call; more are refused with `EINVAL`.
    pub const MOST_RANGES: usize = 128;
    /// Most fragments that the kernel frees in one call; it leaves the rest without an error.
    pub const MOST_FRAGMENTS: u32 = 1024;

    /// No tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a token.
    ///
    /// # Errors
    /// When it is there already, or a batch has not been given back entirely: the kernel may have
    /// reused its tokens for what was just received.
    pub fn insert(&mut self, token: u32) -> Result<(), TokenError> {
        let token = u64::from(token);
        self.insert_range(token..token + 1)
    }

    /// Moves all tokens of `other`, which belong to the same socket, here.
    ///
    /// # Errors
    /// As for [`Self::insert`]; the tokens not moved stay in `other`.
    pub fn append(&mut self, other: &mut Self) -> Result<(), TokenError> {
        other.settled()?;
        while let Some(range) = other.ranges.first() {
            self.insert_range(range.clone())?;
            other.ranges.take_first(range.start);
        }
        Ok(())
    }

    /// Forgets all tokens and keeps the room: for a socket that was closed, which gives them back.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.outstanding = None;
    }

    /// The tokens, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.ranges.iter().cloned()
    }

    /// Number of tokens, one for each fragment.
    pub fn fragments(&self) -> u64 {
        self.ranges().map(|range| range.end - range.start).sum()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The next tokens to give back, within the kernel's limits; `None` when there are none.
    ///
    /// They leave the set only through [`Batch::answered`]. A batch dropped without an answer (the
    /// call failed) is given out again.
    pub fn batch(&mut self, dialect: Dialect) -> Option<Batch<'_>> {
        if self.ranges.is_empty() {
            return None;
        }
        let mut bytes = [0; BATCH_BYTES];
        let mut used = 0;
        let mut room = Self::MOST_FRAGMENTS;
        for (range, place) in self.ranges().zip(bytes.chunks_exact_mut(RANGE_BYTES)) {
            // No more than there is room for; tokens have 32 bits.
            let count = (range.end - range.start).min(room.into()) as u32;
            if count == 0 {
                break;
            }
            room -= count;
            place[..4].copy_from_slice(&(range.start as u32).to_ne_bytes());
            place[4..].copy_from_slice(&count.to_ne_bytes());
            used += RANGE_BYTES;
        }
        let fragments = Self::MOST_FRAGMENTS - room;
        self.outstanding.get_or_insert(Outstanding {
            fragments,
            freed: 0,
        });
        Some(Batch {
            set: self,
            dialect,
            bytes,
            used,
            fragments,
        })
    }

    fn settled(&self) -> Result<(), TokenError> {
        match self.outstanding {
            None => Ok(()),
            Some(Outstanding { fragments, freed }) => {
                Err(TokenError::Unsettled { fragments, freed })
            }
        }
    }

    fn insert_range(&mut self, range: Range<u64>) -> Result<(), TokenError> {
        self.settled()?;
        if self.ranges.overlaps(&range) {
            let mut twice = range.filter(|token| self.ranges.contains(*token));
            // Tokens have 32 bits.
            let token = twice.next().unwrap_or_default() as u32;
            return Err(TokenError::Twice { token });
        }
        self.ranges.insert(range);
        Ok(())
    }

    /// Takes so many tokens off the front.
    fn remove_front(&mut self, fragments: u32) {
        let mut left = u64::from(fragments);
        while left > 0
            && let Some(first) = self.ranges.first().cloned()
        {
            let end = first.end.min(first.start + left);
            left -= end - first.start;
            self.ranges.remove(first.start..end);
        }
    }
}

/// Bytes of a range for the kernel: start u32, count u32.
const RANGE_BYTES: usize = 8;
const BATCH_BYTES: usize = TokenSet::MOST_RANGES * RANGE_BYTES;

/// Tokens for one `setsockopt`.
///
/// Make the call before the next receive on the socket: a token that is free may be handed out
/// again there, and a second return of it would free what was just received.
#[derive(Debug)]
#[must_use = "the tokens stay in the set until the kernel's answer is told"]
pub struct Batch<'a> {
    set: &'a mut TokenSet,
    dialect: Dialect,
    bytes: [u8; BATCH_BYTES],
    used: usize,
    fragments: u32,
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

/// Tokens and answers that do not fit together.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenError {
    /// The kernel handed out a token that it had handed out before.
    #[error("token {token}: expected once until given back, it came twice; close the socket")]
    Twice {
        /// The token.
        token: u32,
    },
    /// A batch has not been given back entirely.
    #[error(
        "tokens: expected {fragments} to be given back before others come, {freed} were; give the batch back before the next receive, else close the socket"
    )]
    Unsettled {
        /// Fragments of the batch.
        fragments: u32,
        /// How many are free.
        freed: u32,
    },
    /// The kernel stopped freeing.
    #[error(
        "tokens: expected {sent} fragments to be freed, the kernel freed {freed} and no more; close the socket, which frees the rest"
    )]
    NotFreed {
        /// Fragments of the batch.
        sent: u32,
        /// How many were freed in all calls for it.
        freed: u32,
    },
    /// No kernel of this dialect answers so.
    #[error(
        "tokens: {answer} is no answer to {sent} fragments of which {before} were free; close the socket"
    )]
    Answer {
        /// Fragments of the batch.
        sent: u32,
        /// How many were freed in earlier calls for it.
        before: u32,
        /// What arrived.
        answer: i32,
    },
}

#[cfg(test)]
mod tests;
