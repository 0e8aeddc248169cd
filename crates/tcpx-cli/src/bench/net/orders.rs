//! What the measuring end asks of the other, and what that answers.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tcpx::{Congestion, Connection};

use crate::error::Error;
use crate::messages::{self, ANSWER, Answer, REQUEST, VERDICT};
use crate::perf::summary::Spent;

/// Most messages of one measurement.
pub(crate) const MOST_MESSAGES: u32 = 1_000_000;

/// How messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// There and back, one at a time.
    Latency,
    /// From the measuring end to the other.
    One,
    /// From the other end to the measuring one.
    Back,
    /// Both ways at once.
    Both,
}

/// Who moves the messages, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Op {
    /// Both ends: sends and receives.
    Send,
    /// The end whose bytes they are.
    Put,
    /// The end that wants them.
    Get,
    /// As a put, in pieces.
    Batch,
    /// As a get, in pieces.
    BatchGet,
}

impl Op {
    /// Whether its messages are moved in pieces.
    pub(crate) fn is_batch(self) -> bool {
        matches!(self, Self::Batch | Self::BatchGet)
    }

    /// For a person.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Send => "send, receive",
            Self::Put => "put",
            Self::Get => "get",
            Self::Batch => "batch, notified",
            Self::BatchGet => "batch of gets",
        }
    }
}

/// The order of a message's pieces in their batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Layout {
    /// As they lie, so that they are one run.
    Dense,
    /// Every second one, then the others.
    Strided,
    /// Any order.
    Shuffled,
}

/// The pieces of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pieces {
    /// Bytes of each; the last one may be shorter.
    pub(crate) bytes: u64,
    pub(crate) layout: Layout,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Run {
    pub(crate) mode: Mode,
    pub(crate) op: Op,
    /// Bytes of a message.
    pub(crate) bytes: u64,
    /// Messages, in each direction.
    pub(crate) count: u32,
    /// Of them in flight at a time.
    pub(crate) depth: u16,
    /// Wait for no work on the GPU's default streams.
    pub(crate) at_once: bool,
    /// Of a batch; 64 in any order by default.
    pub(crate) pieces: Option<Pieces>,
}

impl Run {
    /// Payload bytes of it, both directions together where there are two.
    pub(crate) fn moved(&self) -> u64 {
        let directions = match self.mode {
            Mode::One | Mode::Back => 1,
            Mode::Latency | Mode::Both => 2,
        };
        self.bytes * u64::from(self.count) * directions
    }

    /// How a batch is cut.
    pub(super) fn cut(&self) -> Pieces {
        self.pieces.unwrap_or_else(|| Pieces {
            bytes: self.bytes.div_ceil(64).max(1),
            layout: Layout::Shuffled,
        })
    }
}

/// How plain streams are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Drive {
    /// Calls that sleep.
    Blocking,
    /// Calls that return at once, again and again.
    Spinning,
}

/// A measurement of plain loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRun {
    pub(super) run: Run,
    pub(super) streams: u16,
    pub(super) drive: Drive,
    /// Have the messages compared with the pattern of this number; then nothing is timed.
    pub(super) seed: Option<u64>,
}

/// An order to the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Order {
    /// Fresh contents into poisoned memory, every byte compared, in both directions.
    Verify {
        op: Op,
        bytes: u64,
        depth: u16,
        seed: u64,
    },
    /// A measurement.
    Run(Run),
    /// A measurement of plain loops.
    Raw(RawRun),
    /// `iperf3 -s -1`.
    Iperf3,
    /// No more.
    End,
}

/// What the other end says after it has done its part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Reply {
    Done(Cost),
    Failed { why: String, hint: String },
}

/// Where to meet it, for plain streams and iperf3.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct At {
    pub(super) port: u16,
    /// The congestion control of the sockets there, as that end read it back.
    pub(super) congestion: Option<String>,
}

/// What a measurement cost one end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cost {
    /// Processor time of the process, in microseconds.
    pub(crate) cpu_us: u64,
    /// Bytes of pinned slots in use, the most that was seen.
    pub(crate) pinned: u64,
    /// Where the time of its messages went.
    pub(crate) spent: Spent,
}

/// Tag of the reply that says where plain streams meet.
const PLACE: u64 = 5;

/// Gives an order and waits until the other end is ready for it.
pub(super) fn give(
    connection: &Connection,
    order: &Order,
    limit: std::time::Duration,
) -> Result<messages::Expected, Error> {
    let answer = messages::expect(connection, ANSWER, limit)?;
    let reply = messages::expect(connection, VERDICT, messages::LONGEST_TRANSFER)?;
    messages::tell(connection, REQUEST, order)?;
    messages::ready(answer)?;
    Ok(reply)
}

/// Waits for what the other end says after its part.
pub(super) fn finished(
    reply: messages::Expected,
    limit: std::time::Duration,
) -> Result<Cost, Error> {
    match reply.wait_at_most(limit, "the other end's report")? {
        Reply::Done(cost) => Ok(cost),
        Reply::Failed { why, hint } => Err(Error::Peer { what: why, hint }),
    }
}

/// Says that this end is ready.
pub(super) fn ready(connection: &Connection) -> Result<(), Error> {
    messages::tell(connection, ANSWER, &Answer::Ready)
}

/// Says where plain streams meet; the other end must have asked with [`expect_place`].
pub(super) fn meet_at(connection: &Connection, at: &At) -> Result<(), Error> {
    messages::tell(connection, PLACE, at)
}

/// What plain streams at this end are given: the congestion control that the connection's lanes have.
pub(super) fn same_congestion(connection: &Connection) -> Congestion {
    match connection.congestion_control() {
        Some(name) => Congestion::Named(name),
        None => Congestion::Automatic,
    }
}

/// Posts the receive of the place where plain streams meet.
pub(super) fn expect_place(
    connection: &Connection,
    limit: std::time::Duration,
) -> Result<messages::Expected, Error> {
    messages::expect(connection, PLACE, limit)
}
