//! What can go wrong when driving a plugin, and what to do about it.

use std::path::PathBuf;

use crate::result::ResultCode;
use crate::tables::AbiVersion;

/// A plugin call that returned something other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} returned {rc}: {hint}{}", mark(self.check()))]
pub struct CallError {
    /// Name of the call in the table.
    pub call: &'static str,
    /// What it returned.
    pub rc: ResultCode,
    /// What is usually wrong, and what to do.
    pub hint: &'static str,
}

impl CallError {
    /// The error of a call that returned `rc`.
    pub const fn new(call: &'static str, rc: ResultCode) -> Self {
        Self {
            call,
            rc,
            hint: hint(call, rc),
        }
    }

    /// The check of `tcpx doctor` that explains it.
    pub const fn check(&self) -> Option<&'static str> {
        Some(match (self.call.as_bytes(), self.rc) {
            (b"init", _) => "TCPX-D033",
            (b"connect" | b"accept", _) => "TCPX-D032",
            (b"regMr", ResultCode::InternalError) => "TCPX-D030",
            (b"isend" | b"irecv", ResultCode::InternalError) => "TCPX-D036",
            (b"isend" | b"irecv" | b"test", ResultCode::SystemError | ResultCode::RemoteError) => {
                "TCPX-D031"
            }
            _ => return None,
        })
    }
}

/// How an error's text names the check that explains it.
fn mark(check: Option<&'static str>) -> String {
    check.map_or_else(String::new, |id| format!(" [{id}]"))
}

/// What to do about a library that the dynamic linker refuses, and the check that explains it. Its
/// words for a mount without programs are always these.
fn refused_library(reason: &str) -> &'static str {
    if reason.contains("failed to map segment") {
        "copy it to a file system that is not mounted noexec [TCPX-D012]"
    } else {
        "check its architecture and that the libraries it needs (CUDA among them) are found \
         [TCPX-D011]"
    }
}

/// The usual cause of a failed call, from how real plugins behave.
const fn hint(call: &'static str, rc: ResultCode) -> &'static str {
    match (call.as_bytes(), rc) {
        (_, ResultCode::UnhandledCudaError) => {
            "a CUDA call failed inside the plugin: check the device and the current context"
        }
        (b"init", ResultCode::InternalError) => {
            "no usable interface, or the plugin runs in this process already: check \
             NCCL_SOCKET_IFNAME and NCCL_GPUDIRECTTCPX_SOCKET_IFNAME, and start it once"
        }
        (b"init", _) => "the plugin cannot run here: set a log sink to see its reason",
        (b"connect" | b"accept", ResultCode::InternalError) => {
            "set-up failed, often because the buffer daemon does not answer: check that it runs \
             and that NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX names its directory (/run/tcpx), then \
             connect afresh"
        }
        (b"connect" | b"accept", _) => {
            "set-up failed: check that the peer is reachable on the plugin's interface"
        }
        (b"regMr", ResultCode::InternalError) => {
            "CUDA memory must start at a multiple of 4096 bytes and the GPU's socket \
             /run/tcpx/get_gpu_fd_* must exist"
        }
        (b"regMr", _) => "the memory could not be registered: check its kind, address and size",
        (b"isend" | b"irecv", ResultCode::InternalError) => {
            "the plugin holds no more requests, the request is larger than its pool, or the \
             memory is not registered on this comm: lower the window or the request's size, and \
             consume finished receives"
        }
        (b"test", ResultCode::SystemError) => {
            "the peer closed the connection: see the peer's log, then connect afresh"
        }
        (b"test", ResultCode::InternalError) => {
            "the plugin refused the head request, or a message was larger than the posted \
             receive: check that both sides agree on sizes"
        }
        (b"irecvConsumed", _) => {
            "the plugin expects consumption in the order of reception: close the comm"
        }
        (_, ResultCode::SystemError | ResultCode::RemoteError) => {
            "a system call failed or the peer is gone: see the plugin's log"
        }
        _ => "see the plugin's log (set a log sink)",
    }
}

/// Why a plugin could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Nothing at the path.
    #[error("no plugin file at {}: install the plugin or set UCCL_TCPX_PLUGIN_PATH [TCPX-D010]", path.display())]
    NoFile {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// The dynamic linker refused the file.
    #[error(
        "{} could not be loaded as a shared library: {reason}; {}", path.display(),
        refused_library(reason)
    )]
    NotALibrary {
        /// The path that was asked for.
        path: PathBuf,
        /// The dynamic linker's words.
        reason: String,
    },
    /// A shared library without a table of any version in question.
    #[error(
        "{} is a library but no network plugin: it has none of the symbols {}; point to the \
         plugin itself [TCPX-D013]", path.display(), looked_for.join(", ")
    )]
    NoTable {
        /// The path that was asked for.
        path: PathBuf,
        /// Symbols that were looked up.
        looked_for: Vec<&'static str>,
    },
    /// Tables, but not of the version that was asked for.
    #[error(
        "{} has no ncclNet {asked} table, only {}; ask for one of those or for none [TCPX-D013]",
        path.display(), list(present)
    )]
    VersionMissing {
        /// The path that was asked for.
        path: PathBuf,
        /// The version asked for.
        asked: AbiVersion,
        /// Versions that the file has, newest first.
        present: Vec<AbiVersion>,
    },
    /// A table with a NULL where a function must be.
    #[error(
        "the ncclNet {version} table of {} has no {function}: the plugin is incomplete, use \
         another build of it [TCPX-D013]", path.display()
    )]
    MissingFunction {
        /// The path that was asked for.
        path: PathBuf,
        /// Version of the table.
        version: AbiVersion,
        /// Name of the function in the ABI.
        function: &'static str,
    },
}

fn list(versions: &[AbiVersion]) -> String {
    let names: Vec<String> = versions.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// Why driving a loaded plugin failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// `init` left the table without a function that every use needs.
    #[error(
        "the ncclNet {version} table has no {function} after init: the plugin is incomplete, use \
         another build of it [TCPX-D013]"
    )]
    MissingFunction {
        /// Version of the table.
        version: AbiVersion,
        /// Name of the function in the ABI.
        function: &'static str,
    },
    /// The plugin said no.
    #[error(transparent)]
    Call(#[from] CallError),
    /// `init` came twice.
    #[error("the plugin was initialised before in this process: share the first Plugin value")]
    AlreadyInitialised,
    /// A call before `init`.
    #[error("the plugin is not initialised: call init first")]
    NotInitialised,
    /// A call after a failed `init`.
    #[error(
        "the plugin failed to initialise and cannot be used: restart the process after the fix"
    )]
    InitFailed,
    /// The plugin reported an impossible number of devices.
    #[error("the plugin reports {count} devices: check its interface variables")]
    DeviceCount {
        /// What it said.
        count: i32,
    },
    /// No such device.
    #[error("device {dev} does not exist: there are {count}, counted from 0")]
    NoSuchDevice {
        /// Asked for.
        dev: usize,
        /// Available.
        count: usize,
    },
    /// Success without a comm where one is due.
    #[error("{call} succeeded without a comm: the plugin breaks its contract, use another build")]
    NullComm {
        /// Name of the call.
        call: &'static str,
    },
    /// Polled after it gave its comm or failed.
    #[error("this connection set-up has ended: start a new one")]
    SetupEnded,
    /// Memory of another comm.
    #[error("the memory is registered on another comm: register it on this one")]
    ForeignMemory,
    /// A piece outside the registered memory.
    #[error(
        "bytes {offset}..{offset}+{len} lie outside the registered memory of {registered} bytes"
    )]
    OutOfRange {
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Size of the registration.
        registered: usize,
    },
    /// More than one call can carry.
    #[error("{bytes} bytes in one call, at most {max} fit: cut it into chunks")]
    TooLarge {
        /// Asked for.
        bytes: usize,
        /// Most.
        max: usize,
    },
    /// A size that cannot be.
    #[error("the plugin reports {reported} bytes for a request of {posted}: close the comm")]
    ImpossibleSize {
        /// What it said.
        reported: i64,
        /// What was posted.
        posted: usize,
    },
    /// Consumption out of order.
    #[error("receive {asked} cannot be consumed now, {} is next", next.map_or("none".into(), |n| n.to_string()))]
    ConsumeOrder {
        /// Asked for.
        asked: u64,
        /// The oldest receive that is not consumed.
        next: Option<u64>,
    },
}
