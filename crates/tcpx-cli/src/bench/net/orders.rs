//! What the measuring end asks of the other, and what that answers.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tcpx::{Congestion, Connection};

use crate::error::Error;
use crate::messages::{self, ANSWER, REQUEST, Reason, VERDICT};
use crate::perf::summary::Spent;

/// Most messages of one measurement.
pub(crate) const MOST_MESSAGES: u32 = 1_000_000;

/// How messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// Half a round trip, one message at a time.
    Latency,
    /// From this end to the other.
    One,
    /// From the other end to the measuring one.
    #[value(skip)]
    Back,
    /// Both directions at once; rates are sums.
    Both,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latency => "latency",
            Self::One => "one",
            Self::Back => "back",
            Self::Both => "both",
        })
    }
}

/// Who moves the messages, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Op {
    /// Both ends: sends and receives.
    #[value(skip)]
    Send,
    /// Into the other end's window; round trips with a notification behind each.
    Put,
    /// From the other end's window; half a round trip is half of one get.
    Get,
    /// As a put, in pieces that a batch lists once for all messages; no round trips.
    Batch,
    /// As a get, in such pieces.
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
    /// Have fresh contents, made from this number, cross into poisoned memory, and every byte compared.
    pub(crate) seed: Option<u64>,
}

impl Run {
    pub(crate) fn new(mode: Mode, op: Op, bytes: u64, count: u32, depth: u16) -> Self {
        Self {
            mode,
            op,
            bytes,
            count,
            depth,
            at_once: false,
            pieces: None,
            seed: None,
        }
    }

    /// Whether an end sends, and whether it receives; the measuring one begins where messages go there and back.
    pub(super) fn directions(&self, measures: bool) -> (bool, bool) {
        match self.mode {
            Mode::One | Mode::Latency => (measures, !measures),
            Mode::Back => (!measures, measures),
            Mode::Both => (true, true),
        }
    }

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
}

/// An order to the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Order {
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
pub(super) type Reply = Result<Cost, Reason>;

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
    Ok(reply.wait_at_most::<Reply>(limit, "the other end's report")??)
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
