//! The answer to `GET /status`.

use serde::{Deserialize, Serialize};

use crate::counters::Counters;

/// Names the form of a [`Report`].
pub const SCHEMA: &str = "tcpx.process";

/// The version of that form; a change that breaks readers raises it.
pub const VERSION: u32 = 1;

/// What a process tells about itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u32,
    /// The process.
    pub pid: u32,
    /// Its name, as the system shows it.
    pub program: String,
    /// Its rank, where whoever started it says so.
    #[serde(default)]
    pub rank: Option<String>,
    /// Our name and version.
    pub software: String,
    /// When the report was made, in seconds since its first source.
    pub at_seconds: f64,
    /// Connections since the process began.
    pub connections_opened: u64,
    /// Those of them that an error ended.
    pub connections_lost: u64,
    /// Peers that listeners refused since the process began.
    pub peers_refused: u64,
    /// GPU memory of other processes.
    #[serde(default)]
    pub mappings: Mappings,
    /// Counts since the process began, connections that have ended included.
    pub totals: Counters,
    /// Where it listens.
    pub listeners: Vec<ListenerReport>,
    /// Its connections.
    pub connections: Vec<ConnectionReport>,
    /// The last errors of operations and connections, the newest last.
    pub errors: Vec<FailureReport>,
}

/// GPU memory of other processes on the host, as a process has it mapped: each mapping keeps its
/// owner's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mappings {
    /// Those that are open.
    pub open: u64,
    /// IPC handles since the process began that were closed while its kernels ran, which held up
    /// its copies.
    pub held_up: u64,
}

/// A listening endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ListenerReport {
    /// Its address.
    pub address: String,
    /// Connections that it refused.
    pub refused: u64,
    /// The last of them.
    pub last_refusal: Option<RefusalReport>,
}

/// A connection that was refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RefusalReport {
    /// Where it came from.
    pub peer: String,
    /// Why it was refused.
    pub reason: String,
}

/// A connection to a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConnectionReport {
    /// Its number in the process.
    pub id: u64,
    /// The peer's address.
    pub peer: String,
    /// The peer's software.
    pub peer_software: String,
    /// The network.
    pub network: String,
    /// The path that the bytes take, in words.
    pub path: String,
    /// Congestion control of its sockets.
    pub congestion: Option<String>,
    /// Its age in seconds.
    pub up_seconds: f64,
    /// Counts since it began.
    pub counters: Counters,
    /// Its lanes, where the network has some.
    pub lanes: Vec<LaneReport>,
    /// How many operations run.
    pub operations_running: u64,
    /// How many of them stall for a second or longer.
    pub operations_stalled: u64,
    /// Those that stall for longest, and what they wait for.
    pub operations: Vec<OperationReport>,
    /// What keeps it from telling more.
    pub stuck: Option<String>,
}

/// One TCP connection of the data plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneReport {
    /// The data channel that it belongs to.
    pub channel: u16,
    /// Its number in the channel.
    pub lane: u16,
    /// The peer's address.
    pub peer: String,
    /// Bytes that the kernel sent, again or not.
    pub bytes_sent: u64,
    /// Bytes that the kernel received.
    pub bytes_received: u64,
    /// Packets that TCP sent again.
    pub retransmits: u64,
    /// The round trip that TCP measured, in microseconds.
    pub round_trip_us: u64,
    /// Bytes that TCP has not sent yet, or that the peer's system has not acknowledged.
    pub backlog_bytes: u64,
}

/// An operation that runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperationReport {
    /// Send, receive, put and so on.
    pub kind: String,
    /// Its tag, where it has one.
    pub tag: Option<u64>,
    /// Bytes that need nothing more.
    pub bytes_done: u64,
    /// All of its bytes; the capacity of a receive that is not matched.
    pub bytes_total: u64,
    /// Seconds since its last progress.
    pub waited_seconds: f64,
    /// Who must act next.
    pub next: String,
    /// The whole standing, in one line.
    pub line: String,
}

/// An error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailureReport {
    /// When, as [`Report::at_seconds`].
    pub at_seconds: f64,
    /// The peer's address.
    pub peer: String,
    /// The error, in one line.
    pub error: String,
}
