//! What a command can end with: one line that says what, and an exit code. What to do is in
//! [`advice`].

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use tcpx::{MemoryError, NetworkError, Refusals};
use tcpx_net::{ChannelError, SocketError};
use tcpx_wire::session::{ConnectionFailure, EndCause};

use crate::advice::{self, split, without_marks};
use crate::files::manifest::ManifestError;
use crate::files::store::StoreError;
use crate::key::KeyError;
use crate::messages::Reason;
use crate::pattern::Difference;
use crate::plugin_file::PluginFileError;
use crate::plugin_file::contents::ContentsError;
use crate::sizes::{grouped, time};

#[cfg(test)]
mod tests;

/// Why a command did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{what}")]
    Usage { what: String, hint: String },
    #[error(transparent)]
    Engine(Box<tcpx::Error>),
    #[error("{doing}: {source}")]
    Memory {
        doing: &'static str,
        source: MemoryError,
    },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Plugin(#[from] PluginFileError),
    #[error(transparent)]
    PluginContents(#[from] ContentsError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// All others have arrived.
    #[error("{count} of the things to send {} left out", if *.count == 1 { "was" } else { "were" })]
    LeftOut { count: u64 },
    #[error("cancelled by the user")]
    Interrupted { signal: u8 },
    /// Where another error came about: the peer, and how far the transfer was.
    #[error("{source}")]
    At { place: String, source: Box<Self> },
    #[error("could not {doing} {}: {source}", .path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("could not {doing}: {source}")]
    Process {
        doing: &'static str,
        source: io::Error,
    },
    #[error("could not write to standard output: {0}")]
    Output(io::Error),
    /// A server's wait is over.
    #[error("no client connected to {address} within {}{}", time(*.waited), turned_away(.refusals))]
    NoClient {
        address: SocketAddr,
        waited: Duration,
        refusals: Box<Refusals>,
    },
    #[error("nothing moved for {}", time(*.limit))]
    NothingMoved { limit: Duration },
    #[error("the address `{address}` cannot be used: {why}")]
    Address { address: String, why: String },
    #[error("the contents are wrong: {0}")]
    Contents(#[from] Difference),
    #[error("{what} are not equal: {ours} here, {theirs} at the peer")]
    Digest {
        what: &'static str,
        ours: String,
        theirs: String,
    },
    #[error("the peer reports: {}", .0.why)]
    Peer(Reason),
    #[error("the peer sent {arrived}, expected {expected}")]
    Unexpected {
        expected: &'static str,
        arrived: String,
    },
    #[error("{what}")]
    Failed { what: String, hint: String },
}

impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        Self::Peer(reason)
    }
}

impl From<tcpx_bench::Error> for Error {
    fn from(error: tcpx_bench::Error) -> Self {
        use tcpx_bench::Error as Bench;
        match error {
            Bench::Engine(error) => Self::Engine(error),
            Bench::Memory { doing, source } => Self::Memory { doing, source },
            Bench::Contents(difference) => Self::Contents(difference),
            Bench::System { doing, source } => Self::Process { doing, source },
            Bench::Peer(reason) => Self::Peer(reason),
            Bench::Unexpected { expected, arrived } => Self::Unexpected { expected, arrived },
            Bench::Failed { what, hint } => Self::Failed { what, hint },
            // Errors of this program come back as they were.
            Bench::Other(error) => match error.downcast::<Self>() {
                Ok(own) => *own,
                Err(other) => Self::failed(other.to_string(), "run it again with --debug"),
            },
        }
    }
}

impl From<Error> for tcpx_bench::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Engine(error) => Self::Engine(error),
            error => Self::Other(Box::new(error)),
        }
    }
}

impl From<tcpx::Error> for Error {
    fn from(error: tcpx::Error) -> Self {
        Self::Engine(Box::new(error))
    }
}

impl Error {
    pub(crate) fn usage(what: impl Into<String>, hint: impl Into<String>) -> Self {
        let (what, hint) = (what.into(), hint.into());
        Self::Usage { what, hint }
    }

    /// Either text may name a check of the doctor by its mark.
    pub(crate) fn failed(what: impl Into<String>, hint: impl Into<String>) -> Self {
        let (what, hint) = (what.into(), hint.into());
        Self::Failed { what, hint }
    }

    pub(crate) fn gpu(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::failed(format!("{} [TCPX-D005]", split(&what.into()).0), hint)
    }

    pub(crate) fn unexpected(expected: &'static str, arrived: impl Into<String>) -> Self {
        let arrived = arrived.into();
        Self::Unexpected { expected, arrived }
    }

    /// For `map_err`.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Io {
            doing,
            path: path.to_owned(),
            source,
        }
    }

    /// For `map_err`.
    pub(crate) fn process(doing: &'static str) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Process { doing, source }
    }

    /// What a person can do about it.
    pub(crate) fn hint(&self) -> String {
        advice::of(self).hint.into_owned()
    }

    /// 2 when the command line is wrong, 23 when some files were left out as with rsync, else 1.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage { .. } => 2,
            Self::LeftOut { .. } => 23,
            Self::Interrupted { signal } => 128 + signal,
            Self::At { source, .. } => return source.exit_code(),
            _ => 1,
        })
    }

    /// What happened, without the advice that [`Self::hint`] gives.
    pub(crate) fn what(&self) -> String {
        if let Self::Engine(error) = self
            && let Some(how) = went_away(error)
        {
            return format!("the peer went away ({how})");
        }
        let text = without_marks(&self.to_string());
        match self {
            Self::At { source, .. } => source.what(),
            Self::Engine(_)
            | Self::Memory { .. }
            | Self::Key(KeyError::File(_))
            | Self::Plugin(PluginFileError::BuildId(_)) => split(&text).0.to_owned(),
            _ => text,
        }
    }

    /// What happened and what to do, with the marks that name a check of the doctor.
    pub(crate) fn full_text(&self) -> String {
        match self {
            Self::Failed { what, hint } => format!("{what}; {hint}"),
            Self::At { source, .. } => source.full_text(),
            _ => self.to_string(),
        }
    }

    /// Whether a signal ended the work.
    pub(crate) fn is_interrupted(&self) -> bool {
        match self {
            Self::At { source, .. } => source.is_interrupted(),
            other => matches!(other, Self::Interrupted { .. }),
        }
    }

    /// Whether nobody listens there, perhaps not yet.
    pub(crate) fn is_refused(&self) -> bool {
        let Self::Engine(error) = self else {
            return false;
        };
        let refused =
            |error: &NetworkError| matches!(error.socket(), Some(SocketError::Refused { .. }));
        matches!(&**error, tcpx::Error::Network(error) if refused(error))
    }

    /// Where it came about, if that is known.
    pub(crate) fn place(&self) -> Option<&str> {
        match self {
            Self::At { place, .. } => Some(place),
            _ => None,
        }
    }

    /// For memory errors in a `map_err`.
    pub(crate) fn memory(doing: &'static str) -> impl FnOnce(MemoryError) -> Self {
        move |source| Self::Memory { doing, source }
    }
}

/// What was refused while a server waited, as the end of a sentence.
fn turned_away(refusals: &Refusals) -> String {
    let Some((peer, reason)) = &refusals.last else {
        return String::new();
    };
    let (plural, were) = if refusals.count == 1 {
        ("", "was")
    } else {
        ("s", "were")
    };
    let count = grouped(refusals.count);
    format!(
        ", and {count} connection{plural} {were} refused, the last from {peer}: {}",
        split(reason).0
    )
}

/// How a peer was lost: `None` where it is there, or said why it ended.
pub(crate) fn went_away(error: &tcpx::Error) -> Option<&'static str> {
    match error {
        tcpx::Error::ConnectionLost { failure, .. } => connection_went_away(failure),
        tcpx::Error::Operation { error, .. } => match &error.cause {
            EndCause::ConnectionLost { failure, .. } => connection_went_away(failure),
            _ => None,
        },
        tcpx::Error::ChannelLost { error, .. } => lane_went_away(error),
        tcpx::Error::MemoryHeld { error } => went_away(error),
        _ => None,
    }
}

fn connection_went_away(failure: &ConnectionFailure) -> Option<&'static str> {
    match failure {
        ConnectionFailure::PeerDead { .. } => Some("host unreachable or network cut"),
        ConnectionFailure::Control { .. } | ConnectionFailure::Channels { .. } => {
            Some("process ended or connection reset")
        }
        _ => None,
    }
}

fn lane_went_away(error: &ChannelError) -> Option<&'static str> {
    match error {
        ChannelError::PeerClosed { .. } => Some("process ended"),
        // The control connection lived all the time.
        ChannelError::NoLaneLeft { .. } => Some("network cut"),
        ChannelError::LaneLost { cause, .. } => match cause.kind {
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => Some("process ended"),
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
                Some("host unreachable")
            }
            io::ErrorKind::TimedOut => Some("network cut"),
            _ => None,
        },
        _ => None,
    }
}
