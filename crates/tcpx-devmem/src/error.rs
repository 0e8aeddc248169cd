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
    /// The process may not.
    #[error(
        "{operation} on {interface} is not permitted: {refusal}; run as root, or give the program the right: setcap cap_net_admin+ep PROGRAM"
    )]
    NoPermission {
        /// The interface.
        interface: String,
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// Headers are not split from payload.
    #[error(
        "{interface} does not split headers from payload: {refusal}; run `ethtool -G {interface} tcp-data-split on`, or use a card and driver that can"
    )]
    HeaderSplitOff {
        /// The interface.
        interface: String,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// Small packets are not split.
    #[error(
        "{interface} leaves small packets unsplit: {refusal}; run `ethtool -G {interface} hds-thresh 0`"
    )]
    HeaderThreshold {
        /// The interface.
        interface: String,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// An XDP program is attached.
    #[error(
        "{interface} has an XDP program, which cannot see device memory: {refusal}; run `ip link set dev {interface} xdp off`"
    )]
    Xdp {
        /// The interface.
        interface: String,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// An AF_XDP socket has the queue.
    #[error(
        "queue {queue} of {interface} belongs to an AF_XDP socket: {refusal}; stop the program that has it (`ss --xdp -p`), or take another queue"
    )]
    AfXdp {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// The interface has fewer queues.
    #[error(
        "{interface} has no queue {queue}, only {queues}: {refusal}; take one of 0..{queues}, or make more (`ethtool -L {interface} combined N`)"
    )]
    QueueOutOfRange {
        /// The interface.
        interface: String,
        /// The queue asked for.
        queue: u32,
        /// Queues there are.
        queues: u32,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// Other memory is bound to the queue.
    #[error(
        "queue {queue} of {interface} is taken by {by}: {refusal}; take another queue, or end its owner (`tcpx devmem status`)"
    )]
    QueueTaken {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// What is known about the owner.
        by: String,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// The queue is lent to a virtual interface.
    #[error(
        "queue {queue} of {interface} is leased to a virtual interface: {refusal}; bind it through that one, or take another queue"
    )]
    QueueLeased {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// The driver cannot give single queues other memory.
    #[error(
        "the driver of {interface} ({driver}) has no queue operations, so it cannot put payload into device memory: {refusal}; drivers that can: gve, bnxt_en, mlx5_core, fbnic (Linux 6.16 and later)"
    )]
    NoQueueOperations {
        /// The interface.
        interface: String,
        /// Its driver, as sysfs names it.
        driver: String,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// The interface does no DMA.
    #[error(
        "{interface} ({driver}) does no DMA of its own: {refusal}; use a physical card, see `tcpx devices`"
    )]
    NoDma {
        /// The interface.
        interface: String,
        /// Its driver, as sysfs names it.
        driver: String,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// No driver stands behind the interface.
    #[error(
        "{interface} has no driver that can do {operation}: {refusal}; device memory needs a physical card, see `tcpx devices`"
    )]
    NoDriver {
        /// The interface.
        interface: String,
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// The card cannot send from device memory.
    #[error(
        "{interface} cannot send from device memory: {refusal}; sends go through host memory instead"
    )]
    NoSend {
        /// The interface.
        interface: String,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// The pool does not suit the card.
    #[error(
        "{interface} cannot use this pool: {refusal}; make its pages whole and physically aligned, or use another kind of memory"
    )]
    BadPool {
        /// The interface.
        interface: String,
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
    /// The card holds no more rules.
    #[error(
        "{interface} has no room for another flow rule ({rules} there are): {refusal}; use fewer channels, or remove rules (`ethtool -n {interface}`)"
    )]
    RulesFull {
        /// The interface.
        interface: String,
        /// Rules there are.
        rules: u32,
        /// The kernel's answer.
        refusal: Refusal,
    },
    /// Anything else that the kernel refuses.
    #[error("{operation} on {interface} was refused: {refusal}; {hint}")]
    Refused {
        /// The interface.
        interface: String,
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        refusal: Refusal,
        /// What to do.
        hint: &'static str,
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
        matches!(self, Self::NoSend { .. } | Self::OldKernel { .. })
    }
}
impl From<DevmemError> for NetworkError {
    fn from(error: DevmemError) -> Self {
        Self::Other {
            cause: error.to_string(),
        }
    }
}
