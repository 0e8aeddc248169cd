//! What each side reports about itself first.

#[cfg(test)]
use proptest::strategy::Strategy;
use thiserror::Error;

use super::MAX_EAGER_BYTES;

/// A side's parameters; the first frame after the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The network in use: `tcp`, or `plugin:NAME`; 1 to 64 bytes.
    pub network: String,
    /// Data channels (lanes) this side wants; 1 to [`Settings::MAX_CHANNELS`].
    pub channels: u16,
    /// Chunk length in bytes this side wants; 1 to [`Settings::MAX_CHUNK_BYTES`].
    pub chunk_bytes: u32,
    /// Chunks in flight per channel as a sender; at least 1.
    pub send_window: u16,
    /// Chunks in flight per channel as a receiver; at least 1.
    pub receive_window: u16,
    /// Longest eager transfer in bytes, at most [`MAX_EAGER_BYTES`]; 0 turns eager transfers off.
    pub eager_limit: u32,
    /// Eager bytes this side can hold; at least its `eager_limit`.
    pub eager_credit: u32,
    /// Milliseconds between this side's heartbeats; at least 1.
    pub heartbeat_ms: u32,
    /// Milliseconds of silence after which this side gives the other up; above `heartbeat_ms`.
    pub dead_after_ms: u32,
    /// What this side takes of the other one at a time.
    pub limits: Limits,
    /// The memory this side moves, for the log; at most 64 bytes.
    pub memory: String,
    /// Name and version of this side's software, for the log; at most 64 bytes.
    pub software: String,
}

impl Settings {
    /// Most data channels of a session.
    pub const MAX_CHANNELS: u16 = 1024;
    /// Longest chunk in bytes.
    pub const MAX_CHUNK_BYTES: u32 = 1 << 30;
    /// Most bytes of each text.
    pub const MAX_TEXT_BYTES: usize = 64;

    /// Checks every bound named at the fields.
    ///
    /// # Errors
    /// The first field that is out of bounds.
    pub fn validate(&self) -> Result<(), InvalidSettings> {
        let text = Self::MAX_TEXT_BYTES as u64;
        let (most, most_short) = (u32::MAX.into(), u16::MAX.into());
        let eager_limit = u64::from(self.eager_limit);
        let heartbeat_ms = u64::from(self.heartbeat_ms);
        check("network", self.network.len() as u64, 1, text)?;
        check("memory", self.memory.len() as u64, 0, text)?;
        check("software", self.software.len() as u64, 0, text)?;
        check("channels", self.channels, 1, Self::MAX_CHANNELS.into())?;
        check(
            "chunk_bytes",
            self.chunk_bytes,
            1,
            Self::MAX_CHUNK_BYTES.into(),
        )?;
        check("send_window", self.send_window, 1, most_short)?;
        check("receive_window", self.receive_window, 1, most_short)?;
        check("eager_limit", eager_limit, 0, MAX_EAGER_BYTES as u64)?;
        check("eager_credit", self.eager_credit, eager_limit, most)?;
        check("heartbeat_ms", heartbeat_ms, 1, most - 1)?;
        check("dead_after_ms", self.dead_after_ms, heartbeat_ms + 1, most)?;
        self.limits.validate()
    }
}

/// What a side takes of its peer at a time; each is at least 1. The peer is told, keeps back what
/// is beyond, and begins that as others end: nobody fails because of a limit, but who exceeds it
/// breaks the protocol. Both count alike: from the frame that asks to the last frame about it,
/// whichever side sends that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Puts into windows of this side.
    pub puts: u32,
    /// Notifications, those included that its program has not collected.
    pub notifications: u32,
    /// Gets from its windows; what answers them needs no room at the peer.
    pub gets: u32,
    /// Sends that ask for a receive which is not there.
    pub asks: u32,
    /// Receives that the peer has announced and no send of this side has met: those that are
    /// posted, and those before them.
    pub windows: u32,
    /// Tags whose sends it counts. Those that receives of its own wait for, when the peer would
    /// forget them, are left out.
    pub tags: u32,
    /// Pieces of lists that it keeps; and as many of puts and gets under way.
    pub pieces: u32,
    /// Windows that a list names.
    pub list_windows: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            puts: 4096,
            notifications: 4096,
            gets: 64,
            asks: 1024,
            windows: 1024,
            tags: 1 << 16,
            pieces: 1 << 18,
            list_windows: 1 << 16,
        }
    }
}

impl Limits {
    /// Operations that they allow at a time.
    pub(crate) fn operations(&self) -> u64 {
        let kinds = [
            self.puts,
            self.notifications,
            self.gets,
            self.asks,
            self.windows,
        ];
        kinds.map(u64::from).iter().sum()
    }

    /// Most of each.
    pub const MOST: u32 = 1 << 20;

    fn validate(&self) -> Result<(), InvalidSettings> {
        for (field, value) in [
            ("puts", self.puts),
            ("notifications", self.notifications),
            ("gets", self.gets),
            ("asks", self.asks),
            ("windows", self.windows),
            ("tags", self.tags),
            ("pieces", self.pieces),
            ("list_windows", self.list_windows),
        ] {
            check(field, value, 1, Self::MOST.into())?;
        }
        Ok(())
    }
}

fn check(
    field: &'static str,
    arrived: impl Into<u64>,
    least: u64,
    most: u64,
) -> Result<(), InvalidSettings> {
    let arrived = arrived.into();
    if (least..=most).contains(&arrived) {
        return Ok(());
    }
    Err(InvalidSettings {
        field,
        expected: format!("{least} to {most}"),
        arrived,
    })
}

/// A setting outside its bounds.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("settings: {field} must be {expected}, {arrived} arrived; correct it on that side")]
pub struct InvalidSettings {
    /// Name of the field.
    pub field: &'static str,
    /// The legal values; of a text, its length in bytes.
    pub expected: String,
    /// What arrived.
    pub arrived: u64,
}

/// Limits that are drawn, for tests.
#[cfg(test)]
pub(crate) fn drawn_limits<L: Strategy<Value = u32>>(
    limit: impl Fn() -> L,
    pieces: impl Strategy<Value = u32>,
) -> impl Strategy<Value = Limits> {
    let drawn = (
        (limit(), limit(), limit(), limit()),
        (limit(), limit(), pieces, limit()),
    );
    drawn.prop_map(|(first, second)| {
        let (puts, notifications, gets, asks) = first;
        let (windows, tags, pieces, list_windows) = second;
        Limits {
            puts,
            notifications,
            gets,
            asks,
            windows,
            tags,
            pieces,
            list_windows,
        }
    })
}
