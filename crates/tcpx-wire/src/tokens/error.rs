//! Token returns that went wrong.

use thiserror::Error;

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
