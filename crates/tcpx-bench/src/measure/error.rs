//! Why something could not be measured.

use std::io;

use tcpx::MemoryError;

use crate::orders::Reason;
use crate::pattern::Difference;

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine's own error.
    #[error(transparent)]
    Engine(Box<tcpx::Error>),
    /// Memory could not be made or reached.
    #[error("{doing}: {source}")]
    Memory {
        /// What was being done.
        doing: &'static str,
        /// Why it failed.
        source: MemoryError,
    },
    /// Something else arrived than was sent.
    #[error("the contents are wrong: {0}")]
    Contents(#[from] Difference),
    /// The system refused something.
    #[error("could not {doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The other end says why it did not do its part.
    #[error("the peer reports: {}", .0.why)]
    Peer(Reason),
    /// The other end speaks of something else.
    #[error("the peer sent {arrived}, expected {expected}")]
    Unexpected {
        /// What was expected.
        expected: &'static str,
        /// What came.
        arrived: String,
    },
    /// What joins the ends, or makes memory, has an error of its own.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// Anything else, with what to do about it.
    #[error("{what}")]
    Failed {
        /// What happened.
        what: String,
        /// What to do.
        hint: String,
    },
}

impl From<tcpx::Error> for Error {
    fn from(error: tcpx::Error) -> Self {
        Self::Engine(Box::new(error))
    }
}

impl From<tcpx::NetworkError> for Error {
    fn from(error: tcpx::NetworkError) -> Self {
        tcpx::Error::from(error).into()
    }
}

impl Error {
    /// An error with what to do about it.
    pub fn failed(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Failed {
            what: what.into(),
            hint: hint.into(),
        }
    }

    pub(crate) fn unexpected(expected: &'static str, arrived: impl Into<String>) -> Self {
        Self::Unexpected {
            expected,
            arrived: arrived.into(),
        }
    }

    /// For `map_err`.
    pub(crate) fn memory(doing: &'static str) -> impl FnOnce(MemoryError) -> Self {
        move |source| Self::Memory { doing, source }
    }

    /// For `map_err`.
    pub(crate) fn system(doing: &'static str) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::System { doing, source }
    }
}
