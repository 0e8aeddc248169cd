//! What is asked of the driver, and what its two ends tell each other.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// One case, as `cargo xtask gate` asks for it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Case {
    #[serde(flatten)]
    pub(crate) kind: Kind,
    /// Milliseconds to measure for, about.
    pub(crate) ms: u64,
    /// How the two ends are connected.
    #[serde(default)]
    pub(crate) link: Link,
}

/// What is measured.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Kind {
    /// One message there and one back: `p50` and `p99` of the round trip in microseconds.
    RoundTrip {
        size: usize,
        /// Processes that only take time from a core meanwhile.
        #[serde(default)]
        busy: usize,
    },
    /// Messages one way: `rate` in bytes a second and `cpu`, processor seconds of both ends for 10^9 bytes.
    Stream {
        size: usize,
        depth: usize,
        /// Bytes of each receive; 0: as the messages.
        #[serde(default)]
        room: usize,
        /// Tags that the messages take in turn.
        #[serde(default = "one")]
        tags: u64,
        /// Threads of the program that send, each so many in flight.
        #[serde(default = "one")]
        threads: u64,
        /// The same in the other direction at once; the rate is the sum.
        #[serde(default)]
        both: bool,
        /// A lane is reset so often; 0: never. Needs a relay.
        #[serde(default)]
        reset_ms: u64,
    },
    /// Connections made and closed one after the other: `p50` in microseconds.
    SetUp,
    /// Connections that nobody uses: `memory` bytes and `descriptors` of both ends, for each.
    Idle { connections: usize },
    /// Messages through the tables of an NCCL plugin: a round trip with `window` 0, else one way.
    Plugin {
        size: usize,
        comms: usize,
        window: usize,
    },
}

fn one() -> u64 {
    1
}

/// How the ends are connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Link {
    /// Where the other end listens; loopback by default.
    pub(crate) host: Option<String>,
    /// Host memory is staged, as if it were a GPU's.
    pub(crate) staged: bool,
    /// Lanes; 0: automatic.
    pub(crate) lanes: u16,
    /// Microseconds that a relay between the ends holds every byte.
    pub(crate) relay_us: Option<u64>,
}

/// The other end's part.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum Part {
    /// Listen for one connection that is kept.
    Listen { link: Link, key: String },
    /// Accept it.
    Accept,
    /// Close the connections that were kept.
    Close,
    /// Send each message of tag 1 back under tag 2.
    Echo { size: usize, count: usize },
    /// Receive messages, and send as many if `both`.
    Sink {
        size: usize,
        room: usize,
        depth: usize,
        count: usize,
        tags: u64,
        threads: u64,
        both: bool,
    },
    /// Accept so many connections more and keep them until [`Part::Close`].
    Keep { count: usize },
    /// What this process has and has used.
    Facts,
    /// Of a plugin.
    Plugin(PluginPart),
}

/// The other end's part in a case of a plugin.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum PluginPart {
    /// Listen for so many pairs of comms; the answer holds a handle for each.
    Listen { comms: usize },
    /// Accept them, and connect back through these handles, each comm with so many bytes of memory.
    Accept { back: Vec<Vec<u8>>, bytes: usize },
    /// Take part in a measurement.
    Measure {
        size: usize,
        window: usize,
        count: usize,
    },
    /// Close all comms.
    Close,
}

/// What the other end says.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum Answer {
    /// Nothing is said.
    Nothing,
    Done,
    Listening(SocketAddr),
    Handles(Vec<Vec<u8>>),
    Facts(Facts),
    Failed(String),
}

/// What a process has and has used.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Facts {
    pub(crate) cpu_seconds: f64,
    pub(crate) memory: f64,
    pub(crate) descriptors: f64,
}

/// Figures by their names.
pub(crate) type Figures = BTreeMap<&'static str, f64>;
