//! What the measuring end asks of the other, and what that answers: JSON over whatever joins the
//! two.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Error;
use crate::cost::Cost;
use crate::end::MOST_BYTES;

/// Most messages of one measurement.
pub const MOST_MESSAGES: u32 = 1_000_000;
/// Most of them in flight.
pub const MOST_IN_FLIGHT: u16 = 64;

/// How messages go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Half a round trip, one message at a time.
    Latency,
    /// From this end to the other.
    #[default]
    One,
    /// From the other end to the measuring one.
    Back,
    /// Both directions at once; rates are sums.
    Both,
}

/// Who moves the messages, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Both ends: sends and receives.
    #[default]
    Send,
    /// The measuring end alone, into windows of the other.
    Put,
    /// From windows of the other.
    Get,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send, receive",
            Self::Put => "put",
            Self::Get => "get",
        })
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Run {
    /// How messages go.
    pub mode: Mode,
    /// Who moves them.
    pub op: Op,
    /// Bytes of a message.
    pub bytes: u64,
    /// Messages, in each direction and of each thread.
    pub count: u32,
    /// Of them in flight at a time.
    pub depth: u16,
    /// Bytes of each receive; 0: as the messages.
    pub room: u64,
    /// Tags that the messages take in turn, beyond the first.
    pub more_tags: u64,
    /// Threads that do the same, beyond the first.
    pub more_threads: u16,
    /// A put or get moves pieces of so many bytes, in any order, that a batch lists once for all
    /// messages; 0: whole.
    pub piece: u64,
    /// Fresh contents, made from this number, cross into poisoned memory, and every byte is
    /// compared.
    pub seed: Option<u64>,
}

impl Run {
    /// Messages of one size.
    pub fn new(mode: Mode, op: Op, bytes: u64, count: u32, depth: u16) -> Self {
        Self {
            mode,
            op,
            bytes,
            count,
            depth,
            ..Self::default()
        }
    }

    /// Bytes of a receive.
    pub(crate) fn receives_of(&self) -> u64 {
        self.room.max(self.bytes)
    }

    /// Whether an end sends, and whether it receives; the measuring one begins where messages go
    /// there and back.
    pub(crate) fn directions(&self, measures: bool) -> (bool, bool) {
        match self.mode {
            Mode::One | Mode::Latency => (measures, !measures),
            Mode::Back => (!measures, measures),
            Mode::Both => (true, true),
        }
    }

    /// Payload bytes of it, of both directions and all threads together.
    pub fn moved(&self) -> u64 {
        let is_back_too =
            matches!(self.mode, Mode::Both) || (self.mode == Mode::Latency && self.op == Op::Send);
        let times = u64::from(self.count) * (u64::from(self.more_threads) + 1);
        self.bytes
            .saturating_mul(times)
            .saturating_mul(1 + u64::from(is_back_too))
    }

    /// Refuses what a peer must not ask for.
    ///
    /// # Errors
    /// What would be right.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let sends = self.op == Op::Send;
        let pieces = self.bytes.div_ceil(self.piece.max(1));
        let in_flight = u64::from(self.depth) * (u64::from(self.more_threads) + 1);
        let is_right = self.bytes > 0
            && (in_flight == 1 || self.receives_of().saturating_mul(in_flight) <= MOST_BYTES)
            && (1..=MOST_MESSAGES).contains(&self.count)
            && (1..=MOST_IN_FLIGHT).contains(&self.depth)
            && self.more_tags < 1024
            && self.more_threads < 64
            && (sends || matches!(self.mode, Mode::One | Mode::Latency))
            && (sends || (self.more_tags, self.more_threads, self.room) == (0, 0, 0))
            && (self.piece == 0 || (!sends && pieces <= u64::from(MOST_MESSAGES)));
        if is_right {
            return Ok(());
        }
        Err(Error::unexpected(
            "a measurement of 1 to 1,000,000 messages of as many pieces at most, with 1 to 64 in flight",
            format!("{self:?}"),
        ))
    }
}

/// An order to the other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Order {
    /// Take part in a measurement. [`Answer::Ready`], then [`Answer::Done`].
    Run { run: Run },
    /// A measurement where one end moves all: it is over. [`Answer::Done`].
    Over,
    /// No more. [`Answer::Done`].
    End,
    /// A driver's own, as all below: listen for connections like this, [`Answer::At`]; orders are
    /// about the first one from now on. [`Answer::Done`] when it is there.
    Listen { link: Link, key: String },
    /// Accept so many more, and keep them. [`Answer::Done`] when they are there.
    Keep { count: usize },
    /// Close those, and all comms. [`Answer::Done`].
    Close,
    /// What this process has. [`Answer::Has`].
    Has,
    /// Listen for so many pairs of comms of an NCCL plugin. [`Answer::Handles`].
    Comms { count: usize },
    /// Accept them with so much memory each, and connect back through these handles.
    /// [`Answer::Done`].
    Connect { back: Vec<Vec<u8>>, bytes: usize },
    /// Take part in messages through the plugin. [`Answer::Done`].
    Through { run: Run },
}

/// How a driver connects its ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Link {
    /// Host memory is staged, as if it were a GPU's.
    pub(crate) staged: bool,
    /// GPU of the measuring end, and of the other one; host memory without.
    pub(crate) gpus: Option<[u32; 2]>,
}

/// What the other end says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Its part begins; the keys of windows that it opened.
    Ready { keys: Vec<Vec<u8>> },
    /// It has done its part.
    Done { cost: Cost },
    /// Where to connect.
    At { at: SocketAddr },
    /// Handles of listening comms.
    Handles { handles: Vec<Vec<u8>> },
    /// Bytes of memory, and descriptors.
    Has { has: [u64; 2] },
    /// It cannot, or could not.
    Failed { reason: Reason },
}

impl Answer {
    /// Its part is done, and cost nothing that counts.
    pub(crate) fn done() -> Self {
        let cost = Cost::default();
        Self::Done { cost }
    }
}

/// Why an end does not do its part, for the person at the other one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reason {
    /// What happened.
    pub why: String,
    /// What to do.
    pub hint: String,
}

/// A text for the peer, short enough for any message.
pub fn brief(text: &str) -> String {
    text.chars().take(400).collect()
}

impl From<&Error> for Reason {
    fn from(error: &Error) -> Self {
        let hint = match error {
            Error::Peer(reason) => &reason.hint,
            Error::Failed { hint, .. } => hint,
            _ => "look at what the other side printed",
        };
        Self {
            why: brief(&error.to_string()),
            hint: brief(hint),
        }
    }
}

/// What joins the two ends: messages in order, each way.
pub trait Talk {
    /// Sends a message.
    ///
    /// # Errors
    /// The other end is gone.
    fn send_message(&mut self, message: Value) -> Result<(), Error>;

    /// Waits for the next message.
    ///
    /// # Errors
    /// None came in time, or the other end is gone.
    fn next_message(&mut self, limit: Duration) -> Result<Value, Error>;
}

impl dyn Talk + '_ {
    /// Sends an order or an answer.
    pub(crate) fn send_order<T: Serialize>(&mut self, what: &T) -> Result<(), Error> {
        self.send_message(serde_json::to_value(what).unwrap_or_default())
    }

    /// Waits for one.
    pub(crate) fn expect<T: DeserializeOwned>(
        &mut self,
        what: &'static str,
        limit: Duration,
    ) -> Result<T, Error> {
        let value = self.next_message(limit)?;
        serde_json::from_value(value).map_err(|error| Error::unexpected(what, error.to_string()))
    }

    /// Waits for an answer; what went wrong there is an error.
    pub(crate) fn answer(&mut self, limit: Duration) -> Result<Answer, Error> {
        match self.expect("an answer", limit)? {
            Answer::Failed { reason } => Err(Error::Peer(reason)),
            answer => Ok(answer),
        }
    }

    /// Waits until the other end has done its part.
    pub(crate) fn done(&mut self, limit: Duration) -> Result<Cost, Error> {
        match self.answer(limit)? {
            Answer::Done { cost } => Ok(cost),
            other => Err(Error::unexpected("its costs", format!("{other:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_beyond_a_limit_is_refused() {
        let small = Run::new(Mode::One, Op::Send, 8, 1, 1);
        let pieces = |piece| Run {
            op: Op::Put,
            bytes: 8 << 20,
            piece,
            ..small
        };
        let deep = |bytes| Run {
            bytes,
            depth: MOST_IN_FLIGHT,
            ..small
        };
        let counted = |count| Run { count, ..small };
        let in_flight = |depth| Run { depth, ..small };
        let tagged = |more_tags| Run { more_tags, ..small };
        let threaded = |more_threads| Run {
            more_threads,
            ..small
        };
        for (last, beyond) in [
            (counted(MOST_MESSAGES), counted(MOST_MESSAGES + 1)),
            (counted(1), counted(0)),
            (in_flight(MOST_IN_FLIGHT), in_flight(MOST_IN_FLIGHT + 1)),
            (in_flight(1), in_flight(0)),
            (tagged(1023), tagged(1024)),
            (threaded(63), threaded(64)),
            (deep(32 << 20), deep((32 << 20) + 1)),
            (Run { bytes: 1, ..small }, Run { bytes: 0, ..small }),
            (pieces(9), pieces(8)),
        ] {
            last.check().expect("the last that is allowed");
            let refused = beyond.check();
            assert!(
                matches!(refused, Err(Error::Unexpected { .. })),
                "{beyond:?}"
            );
        }
        for op in [Op::Put, Op::Get] {
            let alone = Run { op, ..small };
            alone.check().expect("one end moves all");
            for wrong in [
                Run {
                    mode: Mode::Both,
                    ..alone
                },
                Run {
                    mode: Mode::Back,
                    ..alone
                },
                Run {
                    more_tags: 1,
                    ..alone
                },
                Run {
                    more_threads: 1,
                    ..alone
                },
                Run { room: 16, ..alone },
            ] {
                assert!(wrong.check().is_err(), "{wrong:?}");
            }
        }
        assert!(
            Run { piece: 1, ..small }.check().is_err(),
            "sends are whole"
        );
    }
}
