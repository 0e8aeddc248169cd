//! Jobs of a copy worker.

use std::fmt;
use std::sync::Arc;

use tcpx_wire::Descriptors;

use crate::bounce::{BouncePool, UnpackMethod, check_bounds};
use crate::checksum::KeyedTag;
use crate::error::MemoryError;
use crate::fence::Fence;
use crate::lease::{Access, Held};
use crate::slice::RegionSlice;

/// One piece of work.
#[derive(Clone, Debug)]
pub enum Work {
    /// Copies bytes between any two kinds of memory; the result is their number. Both slices are
    /// equally long.
    Copy {
        /// The source.
        from: RegionSlice,
        /// The destination.
        to: RegionSlice,
    },
    /// Moves fragments from a bounce pool to their places; the result is the number of bytes.
    Unpack {
        /// What the descriptors' source offsets count from.
        pool: BouncePool,
        /// Which bytes go where.
        descriptors: Arc<Descriptors>,
        /// What the descriptors' destination offsets count from.
        to: RegionSlice,
        /// How.
        with: UnpackMethod,
    },
    /// CRC32C (Castagnoli) of the bytes, and a tag under a key; the result is the CRC32C.
    Checksum {
        /// The bytes.
        of: RegionSlice,
        /// The key, and the tag once the job has ended well; none if nobody asks for it.
        tag: Option<Arc<KeyedTag>>,
    },
}

/// Work, what it must wait for, and the sink of its result.
///
/// Jobs are not ordered among each other: one that needs another's result is submitted after that
/// one has completed.
pub struct Job {
    /// What to do.
    pub work: Work,
    /// The caller's GPU work that must end first.
    pub fence: Option<Fence>,
    /// Receives the result.
    pub sink: Arc<dyn CompletionSink>,
    /// Passed to the sink; the worker does not read it.
    pub token: u64,
}

impl Work {
    /// The CRC32C of these bytes alone.
    pub fn checksum(of: RegionSlice) -> Self {
        Self::Checksum { of, tag: None }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("work", &self.work)
            .field("fence", &self.fence)
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}

/// Is notified when jobs end. Every accepted job ends exactly once.
pub trait CompletionSink: Send + Sync {
    /// The job has ended with bytes, a checksum, or an error; nothing of it touches memory any
    /// more, and its slices, leases and descriptors have been dropped. Of an error that says
    /// [`MemoryError::may_go_on`] neither is true, for as long as the process lives.
    ///
    /// Called on the worker's thread, which does nothing else meanwhile: must not block.
    fn complete(&self, token: u64, result: Result<u64, MemoryError>);
}

/// A job that was not accepted.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct SubmitError {
    /// The job, as it was.
    pub job: Box<Job>,
    /// Why.
    #[source]
    pub error: MemoryError,
}

impl From<SubmitError> for MemoryError {
    fn from(refused: SubmitError) -> Self {
        refused.error
    }
}

const HOLDER: &str = "a copy job";

impl Work {
    /// Checks lengths, bounds and methods.
    pub(crate) fn check(&self) -> Result<(), MemoryError> {
        match self {
            Self::Copy { from, to } if from.len() != to.len() => Err(MemoryError::LengthMismatch {
                from: from.len(),
                to: to.len(),
            }),
            Self::Copy { .. } | Self::Checksum { .. } => Ok(()),
            Self::Unpack {
                pool,
                descriptors,
                to,
                with,
            } => {
                // Descriptors count from one address at either end.
                if let Some(end) = [pool.slice(), to]
                    .into_iter()
                    .find(|end| end.is_in_pieces())
                {
                    return Err(MemoryError::InPieces { kind: end.kind() });
                }
                if !with.is_possible(pool.kind(), to.kind()) {
                    return Err(MemoryError::MethodNotPossible {
                        method: *with,
                        pool: pool.kind(),
                        destination: to.kind(),
                        instead: UnpackMethod::automatic(pool.kind(), to.kind()),
                    });
                }
                check_bounds(descriptors, pool.len(), to.len())
            }
        }
    }

    /// Keeps other users away from the bytes while the holds live. To unpack touches fragments, of
    /// a pool and of a destination in which others are written meanwhile: whoever hands them out
    /// keeps those apart.
    pub(crate) fn hold(&self) -> Result<[Option<Held>; 2], MemoryError> {
        let (from, to) = self.ends();
        let hold = match self {
            Self::Unpack { .. } => RegionSlice::keep,
            Self::Copy { .. } | Self::Checksum { .. } => RegionSlice::hold,
        };
        let reading = hold(from, Access::Read, HOLDER)?;
        let writing = to.map(|to| hold(to, Access::Write, HOLDER)).transpose()?;
        Ok([Some(reading), writing])
    }

    /// Bytes it is about.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Copy { from, .. } => from.len() as u64,
            Self::Unpack { descriptors, .. } => descriptors.bytes(),
            Self::Checksum { of, .. } => of.len() as u64,
        }
    }

    /// The source and, if there is one, the destination.
    pub(crate) fn ends(&self) -> (&RegionSlice, Option<&RegionSlice>) {
        match self {
            Self::Copy { from, to } => (from, Some(to)),
            Self::Unpack { pool, to, .. } => (pool.slice(), Some(to)),
            Self::Checksum { of, .. } => (of, None),
        }
    }
}
