//! What each side reports about itself first.

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
        let check = |field, arrived: u64, least: u64, most: u64| {
            if (least..=most).contains(&arrived) {
                return Ok(());
            }
            Err(InvalidSettings {
                field,
                expected: format!("{least} to {most}"),
                arrived,
            })
        };
        let range = |field, arrived: u32, least: u32, most: u32| {
            check(field, arrived.into(), least.into(), most.into())
        };
        let text = |field, text: &str, least| {
            check(field, text.len() as u64, least, Self::MAX_TEXT_BYTES as u64)
        };
        text("network", &self.network, 1)?;
        text("memory", &self.memory, 0)?;
        text("software", &self.software, 0)?;
        range(
            "channels",
            self.channels.into(),
            1,
            Self::MAX_CHANNELS.into(),
        )?;
        range("chunk_bytes", self.chunk_bytes, 1, Self::MAX_CHUNK_BYTES)?;
        range("send_window", self.send_window.into(), 1, u16::MAX.into())?;
        range(
            "receive_window",
            self.receive_window.into(),
            1,
            u16::MAX.into(),
        )?;
        range("eager_limit", self.eager_limit, 0, MAX_EAGER_BYTES as u32)?;
        range(
            "eager_credit",
            self.eager_credit,
            self.eager_limit,
            u32::MAX,
        )?;
        range("heartbeat_ms", self.heartbeat_ms, 1, u32::MAX - 1)?;
        range(
            "dead_after_ms",
            self.dead_after_ms,
            self.heartbeat_ms + 1,
            u32::MAX,
        )
    }
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
