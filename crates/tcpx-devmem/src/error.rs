//! Why a card's queue could not be used for device memory: the kernel's own words, and the command that
//! mends it.

use std::fmt;
use tcpx_net::error::NetworkError;

use tcpx_lanes::IoError;

/// What the kernel answered to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Its error number.
    pub errno: i32,
    /// Its own words, where it gave any.
    pub words: Option<String>,
}

impl Refusal {
    /// A number without words.
    pub(super) fn of(errno: i32) -> Self {
        Self { errno, words: None }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let system = std::io::Error::from_raw_os_error(self.errno);
        match &self.words {
            Some(words) => write!(f, "\"{words}\" ({system})"),
            None => write!(f, "{system}"),
        }
    }
}

/// In which way the kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Why {
    /// The process may not.
    NoPermission,
    /// Headers are not split from payload.
    HeaderSplitOff,
    /// Small packets are not split.
    HeaderThreshold,
    /// An XDP program is attached.
    Xdp,
    /// An AF_XDP socket has the queue.
    AfXdp,
    /// The interface has fewer queues.
    QueueOutOfRange,
    /// Other memory is bound to the queue.
    QueueTaken,
    /// The queue is lent to a virtual interface.
    QueueLeased,
    /// The driver cannot give single queues other memory.
    NoQueueOperations,
    /// The interface does no DMA.
    NoDma,
    /// No driver stands behind the interface.
    NoDriver,
    /// The card cannot send from device memory.
    NoSend,
    /// The pool does not suit the card.
    BadPool,
    /// The card holds no more rules.
    RulesFull,
    /// In another one.
    Other,
}

/// Why a step of setting up device memory, or of undoing it, was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DevmemError {
    /// There is no such interface.
    #[error("there is no interface {interface}; `tcpx devices` lists those of this host")]
    NoInterface {
        /// The name asked for.
        interface: String,
    },
    /// The kernel lacks an interface that this needs.
    #[error(
        "this kernel has no {what}: {refusal}; receiving device memory needs Linux 6.12 or later with CONFIG_NET_DEVMEM, sending it 6.16"
    )]
    OldKernel {
        /// The interface.
        what: &'static str,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// With one queue, nothing is left for other traffic.
    #[error(
        "{interface} has a single receive queue, and other traffic needs one; run `ethtool -L {interface} combined 2`"
    )]
    SingleQueue {
        /// The interface.
        interface: String,
    },
    /// A rule for the same packets exists.
    #[error(
        "{interface} has a rule for {flow} already, to queue {queue} (rule {rule}); run `ethtool -N {interface} delete {rule}` if nobody needs it"
    )]
    FlowTaken {
        /// The interface.
        interface: String,
        /// The packets.
        flow: String,
        /// Where they go now.
        queue: u64,
        /// The rule's number.
        rule: u32,
    },
    /// A flow that no rule can name.
    #[error(
        "{flow} is no flow for a rule: {why}; use both addresses of one established connection"
    )]
    BadFlow {
        /// The flow.
        flow: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The kernel refused a step on an interface.
    #[error("{what}: {refusal}; {mend}")]
    Refused {
        /// In which way.
        why: Why,
        /// The step, and on what.
        what: String,
        /// The kernel's answer.
        refusal: Refusal,
        /// What to do.
        mend: String,
    },
    /// What the kernel sent is not what its interface says.
    #[error(
        "the kernel's answer to {operation} is not understood: expected {expected}, {arrived} arrived; report this with `uname -a`"
    )]
    BadAnswer {
        /// What was asked.
        operation: &'static str,
        /// What should have come.
        expected: &'static str,
        /// What came.
        arrived: String,
    },
    /// A system call failed on our side.
    #[error("{operation} failed: {cause}; {hint}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        cause: IoError,
        /// What to do.
        hint: &'static str,
    },
    /// The record of changes cannot be kept, so that nothing is changed.
    #[error(
        "{operation} {path} failed: {cause}; run as root, or make the folder writable for this user"
    )]
    State {
        /// What was tried.
        operation: &'static str,
        /// The file or folder.
        path: String,
        /// The system's reason.
        cause: IoError,
    },
    /// The record of changes was not written by this version.
    #[error(
        "{path} is no record of this version of tcpx: {why}; look at it, undo what it says by hand, and delete it"
    )]
    BadState {
        /// The file.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// The memory layer refused.
    #[error("memory for {interface}: {cause}")]
    Memory {
        /// The interface.
        interface: String,
        /// The memory layer's words.
        cause: String,
    },
}

impl DevmemError {
    /// Whether this, in answer to a bind for sending, leaves the way through host memory: the card or
    /// the kernel cannot send from device memory at all.
    pub fn leaves_staging(&self) -> bool {
        self.why() == Some(Why::NoSend) || matches!(self, Self::OldKernel { .. })
    }

    /// In which way the kernel refused, if it did.
    pub fn why(&self) -> Option<Why> {
        match self {
            Self::Refused { why, .. } => Some(*why),
            _ => None,
        }
    }
}
impl From<DevmemError> for NetworkError {
    fn from(error: DevmemError) -> Self {
        Self::Other {
            cause: error.to_string(),
        }
    }
}
