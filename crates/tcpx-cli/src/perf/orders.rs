//! What a list of hosts is measured with: orders to agents, and their answers.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx::Connection;

use super::summary::Summary;
use crate::error::Error;
use crate::link;
use crate::messages::{self, ANSWER, REQUEST};

/// An order to an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Order {
    /// Say what memories take part.
    Describe,
    /// Connect to the memory that receives at this address, prove the contents, and say `Proven`.
    Send {
        /// Index of the memory that sends.
        from: u16,
        ip: IpAddr,
        port: u16,
        bytes: u64,
        iterations: u32,
    },
    /// Measure.
    Go,
    /// No more.
    End,
}

/// An agent's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Reply {
    /// The memories, in order.
    Memories {
        memories: Vec<Memory>,
    },
    /// Every byte was compared; the next order begins the measurement.
    Proven,
    Measured {
        summary: Box<Summary>,
    },
    Failed {
        why: String,
        hint: String,
    },
}

/// A memory that takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Memory {
    /// `GPU 0` or `host`.
    pub(super) name: String,
    /// Where it receives.
    pub(super) port: u16,
}

/// Gives an order and waits for the answer.
pub(super) fn ask(connection: &Connection, order: &Order, limit: Duration) -> Result<Reply, Error> {
    let reply = messages::expect(connection, ANSWER, messages::LONGEST_TRANSFER)?;
    messages::tell(connection, REQUEST, order)?;
    match reply.wait_at_most(limit, "an agent's answer")? {
        Reply::Failed { why, hint } => Err(Error::Peer { what: why, hint }),
        reply => Ok(reply),
    }
}

/// The error for an answer that is none to the order.
pub(super) fn unexpected(expected: &'static str, reply: &Reply) -> Error {
    Error::Unexpected {
        expected,
        arrived: messages::brief(&format!("{reply:?}")),
    }
}

/// Says that there are no more orders, and parts.
pub(super) fn part<T>(connection: Connection, work: Result<T, Error>) -> Result<T, Error> {
    let told = messages::tell(&connection, REQUEST, &Order::End);
    let done = link::part_after(connection, work)?;
    told.map(|()| done)
}
