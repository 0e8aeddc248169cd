//! Why a card's queue could not be used for device memory: the kernel's own words, and the command
//! that fixes it.

use std::{fmt, io};

use tcpx_lanes::IoError;
use tcpx_net::error::NetworkError;

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
        let system = io::Error::from_raw_os_error(self.errno);
        match &self.words {
            Some(words) => write!(f, "\"{words}\" ({system})"),
            None => write!(f, "{system}"),
        }
    }
}

/// What was refused or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Why {
    /// There is no such interface.
    NoInterface,
    /// The kernel lacks an interface that this needs.
    OldKernel,
    /// With one queue, nothing is left for other traffic.
    SingleQueue,
    /// A rule for the same packets exists.
    FlowTaken,
    /// A flow that no rule can name.
    BadFlow,
    /// What the kernel sent is not what its interface says.
    BadAnswer,
    /// A system call failed on our side.
    System,
    /// The record of changes cannot be kept, so that nothing is changed.
    State,
    /// The record of changes was not written by this version.
    BadState,
    /// The memory layer refused.
    Memory,
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
    /// The kernel refused in another way.
    Other,
}

/// Why a step of setting up device memory, or of undoing it, was refused or failed: what happened,
/// on what, the kernel's own words, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct DevmemError {
    why: Why,
    text: String,
}

impl DevmemError {
    pub(super) fn new(why: Why, text: String) -> Self {
        Self { why, text }
    }

    pub(super) fn no_interface(interface: &str) -> Self {
        let advice = "`tcpx devices` lists those of this host";
        Self::new(
            Why::NoInterface,
            format!("there is no interface {interface}; {advice}"),
        )
    }

    pub(super) fn old_kernel(what: &str, refusal: &Refusal) -> Self {
        let advice = "receiving device memory needs Linux 6.12 or later with CONFIG_NET_DEVMEM, sending it 6.16";
        let text = format!("this kernel has no {what}: {refusal}; {advice}");
        Self::new(Why::OldKernel, text)
    }

    pub(super) fn bad_answer(operation: &str, expected: &str, arrived: &str) -> Self {
        Self::new(
            Why::BadAnswer,
            format!(
                "the kernel's answer to {operation} is not understood: expected {expected}, {arrived} arrived; report this with `uname -a`"
            ),
        )
    }

    pub(super) fn system(operation: &str, cause: io::Error, hint: &str) -> Self {
        let cause = IoError::from(cause);
        Self::new(Why::System, format!("{operation} failed: {cause}; {hint}"))
    }

    /// Whether this, in answer to a bind for sending, leaves the way through host memory: the card
    /// or the kernel cannot send from device memory at all.
    pub fn leaves_staging(&self) -> bool {
        matches!(self.why, Why::NoSend | Why::OldKernel)
    }

    /// In which way it was refused or failed.
    pub fn why(&self) -> Why {
        self.why
    }
}

impl From<DevmemError> for NetworkError {
    fn from(error: DevmemError) -> Self {
        Self::Other {
            cause: error.to_string(),
        }
    }
}
