//! What can go wrong inside the plugin, and the `ncclResult_t` each failure becomes.

use nccl_net::ResultCode;
use nccl_net::export::NetError;
use thiserror::Error;

/// A failure of one call; its text goes to the host's logger, its code to the caller.
///
/// `Clone` because a broken comm gives the same answer again and again.
#[derive(Clone, Debug, Error)]
pub enum PluginError {
    /// A device number out of range.
    #[error("device {device} does not exist, there are {count}; ask devices() for the number")]
    NoSuchDevice {
        /// The number that was passed.
        device: i64,
        /// How many there are.
        count: usize,
    },
    /// An environment variable cannot be used.
    #[error("{name}={value:?}: {why}; expected {expected}")]
    Environment {
        /// Variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong.
        why: String,
        /// What it should look like.
        expected: &'static str,
    },
    /// No interface passed the filter.
    #[error(
        "no network interface is up with an address{}",
        no_interface(filter, found)
    )]
    NoInterface {
        /// The filter.
        filter: String,
        /// What exists.
        found: String,
    },
    /// A system call failed.
    #[error("{operation} failed: {error}; {hint}")]
    System {
        /// The operation, with its object.
        operation: String,
        /// The system's answer.
        error: String,
        /// What to do.
        hint: &'static str,
    },
    /// A handle that `listen` of this plugin did not make.
    #[error("this is not a handle of the tcpx plugin: {why}; both sides must load the same plugin")]
    BadHandle {
        /// What is wrong with it.
        why: String,
    },
    /// Not all ranks have the same key.
    #[error(
        "TCPX_KEY of the listening rank is another one than here, or only one of them has it; give all ranks the same"
    )]
    OtherKey,
    /// The peer could not be reached or did not answer in time.
    #[error("connect to {peer}: {why}")]
    Connect {
        /// Address in the handle.
        peer: String,
        /// What happened, and what to do.
        why: String,
    },
    /// The peer closed or reset the connection.
    #[error(
        "{comm}: the peer closed the connection ({why}) at message {sequence}, {done} of {total} \
         bytes; look at the peer's log for why it ended"
    )]
    PeerClosed {
        /// Comm description.
        comm: String,
        /// EOF or the error text.
        why: String,
        /// Message number.
        sequence: u64,
        /// Bytes done of the message.
        done: u64,
        /// Bytes of the message, 0 when its header had not arrived.
        total: u64,
    },
    /// The lanes that carry the peer's large messages broke.
    #[error("{comm}: {why}; messages are lost, look at the peer's log for why it ended")]
    LanesEnded {
        /// Comm description.
        comm: String,
        /// What broke.
        why: String,
    },
    /// The connection broke, and what its receiver lacks cannot be sent again.
    #[error(
        "{comm}: the connection broke while message {sequence} was on its way, which cannot be sent again: \
         without lanes host messages up to {limit} bytes can be; set TCPX_NET_LANES=2 on this host"
    )]
    Unretained {
        /// Comm description.
        comm: String,
        /// The message.
        sequence: u64,
        /// Largest message of which a copy is retained, bytes.
        limit: usize,
    },
    /// The host gave memory back that a request still used.
    #[error(
        "{comm}: memory was deregistered while message {sequence} used it, so the connection was given up; \
         deregister after test said done"
    )]
    Deregistered {
        /// Comm description.
        comm: String,
        /// The oldest message that used it.
        sequence: u64,
    },
    /// Memory cannot be given back.
    #[error(
        "{comm}: a lane or a copy has not let go of the comm's memory, so it must not be freed; end the process"
    )]
    MemoryHeld {
        /// Comm description.
        comm: String,
    },
    /// The bytes on the connection are not what the protocol says.
    #[error(
        "{comm}: expected {expected}, got {arrived}; the connection is unusable, both sides must run the same plugin version"
    )]
    Protocol {
        /// Comm description.
        comm: String,
        /// What the protocol says.
        expected: String,
        /// What arrived.
        arrived: String,
    },
    /// The posted buffer is smaller than the message.
    #[error(
        "{comm}: message {sequence} has {message} bytes, the posted receive holds {capacity}; \
         nothing was written; post at least {message} bytes"
    )]
    ReceiveTooSmall {
        /// Comm description.
        comm: String,
        /// Message number.
        sequence: u64,
        /// Bytes that the sender announced.
        message: u64,
        /// Bytes that were posted.
        capacity: u64,
    },
    /// The peer could not take a message.
    #[error(
        "{comm}: the receiver refused message {sequence}{}, it had posted {capacity} bytes; post \
         receives at least as large as the sends",
        message.map_or_else(String::new, |bytes| format!(" of {bytes} bytes"))
    )]
    RefusedByPeer {
        /// Comm description.
        comm: String,
        /// Message number.
        sequence: u64,
        /// Bytes sent, while the sender still knows.
        message: Option<u64>,
        /// Bytes the receiver had posted.
        capacity: u64,
    },
    /// A device-unpack receive that no queue slot or pool can hold.
    #[error(
        "{comm}: message {sequence} of {bytes} bytes is above the limit of {limit} bytes for one \
         device receive ({why}); cut it into smaller requests"
    )]
    TooLarge {
        /// Comm description.
        comm: String,
        /// Message number.
        sequence: u64,
        /// Bytes asked for or announced.
        bytes: u64,
        /// The limit.
        limit: u64,
        /// Where the limit comes from.
        why: &'static str,
    },
    /// `irecvConsumed` out of order, or before the receive was done.
    #[error(
        "{comm}: irecvConsumed {why}; consume receives strictly in the order of irecv, after test said done"
    )]
    ConsumeOrder {
        /// Comm description.
        comm: String,
        /// What was wrong.
        why: String,
    },
    /// A request that this comm does not know (any more).
    #[error("{comm}: {why}; never test a request again after done")]
    UnknownRequest {
        /// Comm description.
        comm: String,
        /// What was wrong.
        why: String,
    },
    /// An argument is wrong.
    #[error("{0}")]
    InvalidArgument(String),
    /// A copy to, from or on the GPU failed.
    #[error("{comm}: {operation}: {error}")]
    Copy {
        /// Comm description.
        comm: String,
        /// Which copy.
        operation: String,
        /// The copy worker's words.
        error: String,
    },
}

/// Which interfaces were asked for and which there are, and what to do.
fn no_interface(filter: &str, found: &str) -> String {
    let asked = match filter {
        "" => String::new(),
        filter => format!(" and a name that NCCL_SOCKET_IFNAME={filter:?} admits"),
    };
    match found {
        "" => format!(
            "{asked}; bring one up and give it an address (`ip link set IF up`, `ip address add ...`)"
        ),
        found => format!("{asked}; there are {found}; correct the variable or unset it"),
    }
}

impl PluginError {
    /// The `ncclResult_t` for the host.
    pub const fn code(&self) -> ResultCode {
        match self {
            Self::System { .. }
            | Self::Connect { .. }
            | Self::PeerClosed { .. }
            | Self::LanesEnded { .. }
            | Self::Unretained { .. }
            | Self::MemoryHeld { .. }
            | Self::NoInterface { .. } => ResultCode::SystemError,
            Self::RefusedByPeer { .. } => ResultCode::RemoteError,
            Self::Deregistered { .. } => ResultCode::InvalidUsage,
            Self::InvalidArgument(_)
            | Self::NoSuchDevice { .. }
            | Self::BadHandle { .. }
            | Self::OtherKey
            | Self::Environment { .. } => ResultCode::InvalidArgument,
            Self::Copy { .. } => ResultCode::UnhandledCudaError,
            Self::Protocol { .. }
            | Self::ReceiveTooSmall { .. }
            | Self::TooLarge { .. }
            | Self::ConsumeOrder { .. }
            | Self::UnknownRequest { .. } => ResultCode::InternalError,
        }
    }

    /// A copy that failed, from what says why.
    pub(crate) fn copy<E: ToString>(comm: &str, operation: &str) -> impl Fn(E) -> Self {
        move |error| Self::Copy {
            comm: comm.to_owned(),
            operation: operation.to_owned(),
            error: error.to_string(),
        }
    }

    /// A failed system call.
    pub(crate) fn system(
        operation: impl Into<String>,
        error: &std::io::Error,
        hint: &'static str,
    ) -> Self {
        Self::System {
            operation: operation.into(),
            error: error.to_string(),
            hint,
        }
    }
}

impl From<PluginError> for NetError {
    fn from(error: PluginError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
