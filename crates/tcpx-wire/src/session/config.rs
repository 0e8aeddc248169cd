//! What one side is configured with, and what both sides agree on.

use std::time::Duration;

use super::error::SessionError;
use crate::frame::{InvalidSettings, Limits, Settings, TimeLeft};
use crate::plan::{ChunkPlan, Taper};

/// Smallest chunk both sides may agree on, and what every chunk size is a multiple of.
pub const CHUNK_GRAIN_BYTES: u32 = 4096;
/// Longest transfer: [`u32::MAX`] chunks of the smallest size.
pub const MAX_TRANSFER_BYTES: u64 = CHUNK_GRAIN_BYTES as u64 * u32::MAX as u64;

/// Longest payload that a frame says the place of: its receiver copies it with one job.
pub const MAX_EXPOSED_BYTES: u64 = 1 << 28;

/// Credit that an eager payload takes at least: the receiver remembers more of it than its bytes.
const LEAST_CREDIT: u64 = 256;

/// What each piece of a list counts for beside its bytes.
const PIECE_BYTES: u64 = 256;

/// The work of an operation on so many pieces of lists, in bytes.
fn work(bytes: u64, pieces: u32) -> u64 {
    bytes.saturating_add(PIECE_BYTES * u64::from(pieces))
}

/// Credit that an eager payload of so many bytes takes.
pub(super) fn eager_cost(bytes: u64, pieces: u32) -> u64 {
    work(bytes, pieces).max(LEAST_CREDIT)
}

/// Longest notification.
pub const MAX_NOTIFICATION_BYTES: u64 = 64 * 1024;

/// How long an operation may take. Both clocks are the caller's [`Time`](crate::time::Time).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// Longest time without any progress of this very operation, or before it begins, of what it
    /// waits behind; 30 s by default.
    pub stall: Duration,
    /// Longest time from the request to its end; none by default.
    pub total: Option<Duration>,
}

/// Of what the peer began, as it says.
impl From<TimeLeft> for Deadlines {
    fn from(left: TimeLeft) -> Self {
        let limit = |ms: u32| (ms < u32::MAX).then(|| Duration::from_millis(ms.into()));
        Self {
            stall: limit(left.stall_ms).unwrap_or(Duration::MAX),
            total: limit(left.total_ms),
        }
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            stall: Duration::from_secs(30),
            total: None,
        }
    }
}

/// How much one side of a session does at a time.
#[derive(Clone, Copy, Debug)]
pub struct SessionBounds {
    /// Most operations of this side at a time per direction, those included that wait for the peer
    /// to take them, and that ended here but that the peer still owes an answer for. 262,144 by
    /// default: a batch may have as many parts as a list has pieces.
    pub max_operations: usize,
    /// Bytes of notifications that the program has not collected, beside [`Limits::notifications`]
    /// of them; one is always taken. 1 MiB by default.
    pub unread_bytes: u64,
    /// Frames that may wait while the peer still sends, beside those that the limits of both sides
    /// allow; 65,536 by default.
    pub backlog: u64,
    /// Windows of a tag in a row that eager sends made vain, after which its receives wait to be
    /// asked. Opening and closing so many takes about as long as the round trip that a long send
    /// then asks in. 8 by default.
    pub vain_windows: u8,
    /// Bytes that a transfer sends to an addressed network before the next one has its turn: a
    /// short one does not wait for the end of a long one, and neighbours of a long one can still be
    /// copied together. 4 MiB by default.
    pub turn_bytes: u32,
    /// Longest wait for the data plane and for the peer's part in the early end of an operation; 75
    /// ms by default. Its memory is [held](super::Memory::Held) where the data plane takes longer,
    /// and what was delivered is unknown where the peer does.
    pub answer_timeout: Duration,
}

impl Default for SessionBounds {
    fn default() -> Self {
        Self {
            max_operations: 1 << 18,
            unread_bytes: 1 << 20,
            backlog: 1 << 16,
            vain_windows: 8,
            turn_bytes: 4 << 20,
            answer_timeout: Duration::from_millis(75),
        }
    }
}

/// Parameters of one side of a session.
#[derive(Clone, Debug)]
pub struct Config {
    /// What the peer is told.
    pub ours: Settings,
    /// For operations that bring none of their own.
    pub deadlines: Deadlines,
    /// Placed chunks that are acknowledged without waiting for more; 64 by default.
    pub ack_batch: u32,
    /// Longest time a placed chunk waits for its acknowledgement; 50 us by default.
    pub ack_delay: Duration,
    /// How much it does at a time.
    pub bounds: SessionBounds,
    /// Whether the network can drop one transfer and keep its channels. Where it cannot, the end
    /// of a granted operation by cancel, deadline or failure ends the connection too.
    pub cancellable: bool,
    /// Whether a chunk keeps its place in the send window until the peer acknowledged it, instead
    /// of until [`Session::chunk_sent`](super::Session::chunk_sent). Off by default.
    pub hold_until_placed: bool,
    /// Whether the network finds the memory of a chunk by the name of its window
    /// ([`Action::OpenWindow`](super::Action::OpenWindow)), in any order. Receives are then posted
    /// to the peer, whose sends write without asking. Else chunks are received in the order in
    /// which they are sent, and each transfer is granted its place. Both sides must agree. Off by
    /// default.
    pub addressed: bool,
    /// Whether payload of any length travels sealed. Else a send that is to be verified takes no
    /// eager payload of [`LEAST_PLAIN_BYTES`](crate::frame::LEAST_PLAIN_BYTES) and more, and a
    /// receive of such ends placed. Off by default.
    pub seals_payload: bool,
    /// Chunks that a transfer to here is cut into at least, as far as chunks of
    /// [`Config::least_chunk_bytes`] allow it, so that a transfer of medium size keeps all lanes of
    /// its channels busy. 1 by default: all chunks have the agreed size.
    pub pieces: u32,
    /// Bytes below which [`Config::pieces`] cuts no chunk; 256 KiB by default.
    pub least_chunk_bytes: u32,
    /// Shorter chunks at the end of a transfer to here that is cut into chunks of the agreed size
    /// and at least twice as long, while no other one is under way. None by default.
    pub taper: Option<Taper>,
    /// As [`SessionBounds::answer_timeout`], where the connection is lost; 5 s by default, but not
    /// longer than the operation's own deadline allows.
    pub cancel_timeout: Duration,
}

impl Config {
    /// The defaults with these settings, for a network that can cancel.
    pub fn new(ours: Settings) -> Self {
        Self {
            ours,
            deadlines: Deadlines::default(),
            ack_batch: 64,
            ack_delay: Duration::from_micros(50),
            bounds: SessionBounds::default(),
            cancellable: true,
            hold_until_placed: false,
            addressed: false,
            seals_payload: false,
            pieces: 1,
            least_chunk_bytes: 256 * 1024,
            taper: None,
            cancel_timeout: Duration::from_secs(5),
        }
    }

    /// How a transfer to here is cut, which has so many pieces of lists. Channels take turns by the
    /// chunk: one with pieces is shorter, and makes no more work.
    pub(super) fn cut(&self, bytes: u64, pieces: u32, agreed: u32, alone: bool) -> ChunkPlan {
        let most = u128::from(agreed) * u128::from(bytes) / u128::from(work(bytes, pieces).max(1));
        // It is at most what was agreed, which is a multiple of the grain.
        let most = (most.max(1) as u32).next_multiple_of(CHUNK_GRAIN_BYTES);
        // Beside other transfers the lanes are busy anyway, and large chunks cost less.
        match alone {
            true => self.cut_alone(bytes, most),
            false => ChunkPlan::even(bytes, most),
        }
    }

    fn cut_alone(&self, bytes: u64, agreed: u32) -> ChunkPlan {
        let chunk_bytes = self.chunk_bytes(bytes, agreed);
        let taper = self.taper.filter(|taper| {
            let tail = taper.bytes(chunk_bytes);
            chunk_bytes == agreed && tail.is_some_and(|tail| bytes / 2 >= tail)
        });
        ChunkPlan::new(bytes, chunk_bytes, taper)
            .unwrap_or_else(|| ChunkPlan::even(bytes, chunk_bytes))
    }

    /// Bytes of the chunks of a transfer to here.
    pub(super) fn chunk_bytes(&self, bytes: u64, agreed: u32) -> u32 {
        let piece = bytes.div_ceil(self.pieces.max(1).into());
        let piece = u32::try_from(piece.next_multiple_of(CHUNK_GRAIN_BYTES.into()));
        piece
            .unwrap_or(agreed)
            .max(self.least_chunk_bytes)
            .min(agreed)
    }
}

/// What both sides' settings make together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Data channels in use: the lesser of both sides.
    pub channels: u16,
    /// Most bytes of a chunk: the lesser of both sides.
    pub chunk_bytes: u32,
    /// Chunks in flight per channel from here: our send window, at most the peer's receive window.
    pub send_window: u16,
    /// Chunks posted per channel to here.
    pub receive_window: u16,
    /// Longest eager payload from here in bytes.
    pub eager_limit: u32,
    /// Eager bytes the peer holds for us.
    pub eager_credit: u32,
    /// Time between heartbeats from here: ours, at most a third of the peer's patience.
    pub heartbeat: Duration,
    /// Silence after which the peer is given up.
    pub dead_after: Duration,
    /// What the peer takes of this side at a time.
    pub limits: Limits,
}

impl Agreed {
    /// Longest eager payload beside other sends: longer ones move on lanes at the same time.
    pub(super) fn eager_beside(&self) -> u32 {
        self.eager_limit.div_ceil(2)
    }

    /// # Errors
    /// When the peer's settings are out of bounds, or do not fit ours.
    pub(super) fn new(ours: &Settings, theirs: &Settings) -> Result<Self, SessionError> {
        theirs.validate()?;
        if theirs.network != ours.network {
            return Err(SessionError::NetworkMismatch {
                ours: ours.network.clone(),
                theirs: theirs.network.clone(),
            });
        }
        for chunk_bytes in [ours.chunk_bytes, theirs.chunk_bytes] {
            if chunk_bytes < CHUNK_GRAIN_BYTES || chunk_bytes % CHUNK_GRAIN_BYTES != 0 {
                return Err(invalid(
                    "chunk_bytes",
                    "a multiple of 4096, at least that,",
                    chunk_bytes,
                ));
            }
        }
        // Below this even a busy but healthy side would look dead or do nothing but prove its life.
        const LEAST_PATIENCE_MS: u32 = 30;
        for dead_after_ms in [ours.dead_after_ms, theirs.dead_after_ms] {
            if dead_after_ms < LEAST_PATIENCE_MS {
                let expected = format!("at least {LEAST_PATIENCE_MS}");
                return Err(invalid("dead_after_ms", expected, dead_after_ms));
            }
        }
        let heartbeat_ms = ours.heartbeat_ms.min(theirs.dead_after_ms / 3);
        Ok(Self {
            channels: ours.channels.min(theirs.channels),
            chunk_bytes: ours.chunk_bytes.min(theirs.chunk_bytes),
            send_window: ours.send_window.min(theirs.receive_window),
            receive_window: ours.receive_window,
            eager_limit: ours.eager_limit.min(theirs.eager_limit),
            eager_credit: theirs.eager_credit,
            heartbeat: Duration::from_millis(heartbeat_ms.into()),
            dead_after: Duration::from_millis(ours.dead_after_ms.into()),
            limits: theirs.limits,
        })
    }
}

fn invalid(field: &'static str, expected: impl Into<String>, arrived: u32) -> SessionError {
    let (expected, arrived) = (expected.into(), arrived.into());
    SessionError::Settings(InvalidSettings {
        field,
        expected,
        arrived,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pieces: u32) -> Config {
        Config {
            pieces,
            ..Config::new(crate::session::tests::settings())
        }
    }

    #[test]
    fn only_medium_transfers_are_cut_into_pieces() {
        const MIB: u64 = 1 << 20;
        let cut = |bytes| config(24).chunk_bytes(bytes, 1 << 20);
        assert_eq!(
            [1, 4 * MIB, 256 * MIB, MAX_TRANSFER_BYTES].map(cut),
            [256 << 10, 256 << 10, 1 << 20, 1 << 20]
        );
        assert_eq!(cut(12 * MIB), 512 << 10);
        assert_eq!(cut(12 * MIB + 1), (512 << 10) + CHUNK_GRAIN_BYTES);
        assert_eq!(config(1).chunk_bytes(4 * MIB, 1 << 20), 1 << 20);
        assert_eq!(config(24).chunk_bytes(4 * MIB, 64 << 10), 64 << 10);
    }
}
