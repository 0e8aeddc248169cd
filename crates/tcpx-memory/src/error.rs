//! What can go wrong with memory and with the CUDA driver.

use std::ops::Range;
use std::time::Duration;

use crate::bounce::UnpackMethod;
use crate::kind::MemoryKind;
use crate::lease::Access;

/// Why an operation on memory was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A range reaches past the end, or its start lies behind its end.
    #[error("range {start}..{end} does not fit in {len} bytes; give a range inside 0..{len}")]
    OutOfBounds {
        /// First byte asked for.
        start: usize,
        /// One past the last byte asked for.
        end: usize,
        /// Bytes there are.
        len: usize,
    },
    /// Another operation holds an overlapping lease.
    #[error(
        "bytes {}..{} are held for {held} by {by} ({}..{}); wait until it has ended, or use other bytes",
        wanted.start, wanted.end, range.start, range.end
    )]
    Busy {
        /// The range asked for, relative to the region.
        wanted: Range<usize>,
        /// The range that is held, relative to the region.
        range: Range<usize>,
        /// What the holder may do with it.
        held: Access,
        /// Who holds it.
        by: &'static str,
    },
    /// A slice that rides on a read lease was given as a destination.
    #[error("bytes {}..{} are leased for reading only; lease them for writing to use them as a destination",
        range.start, range.end)]
    LeasedForReading {
        /// The slice's range, relative to the region.
        range: Range<usize>,
    },
    /// The operating system gave no memory.
    #[error("cannot allocate {len} bytes of {kind}: {why}; ask for less or free some")]
    Allocation {
        /// What was to be allocated.
        kind: MemoryKind,
        /// How many bytes.
        len: usize,
        /// The system's reason.
        why: String,
    },
    /// Both ends of a copy must have the same length.
    #[error("a copy from {from} bytes to {to} bytes; make both slices equally long")]
    LengthMismatch {
        /// Bytes in the source.
        from: usize,
        /// Bytes in the destination.
        to: usize,
    },
    /// The CPU cannot address these bytes.
    #[error(
        "{kind} cannot be accessed through a CPU pointer; use read_to, write_from or a copy job"
    )]
    NotCpuAccessible {
        /// Where the bytes are.
        kind: MemoryKind,
    },
    /// A job names memory that this worker cannot reach.
    #[error(
        "the copy worker of {worker} cannot reach {kind}; submit the job to the worker of that GPU"
    )]
    WrongWorker {
        /// Whose worker it is.
        worker: MemoryKind,
        /// What it was asked to touch.
        kind: MemoryKind,
    },
    /// The fence was taken on another GPU than the worker's.
    #[error(
        "the fence belongs to {fence}, the copy worker to {worker}; take the fence on the worker's GPU"
    )]
    WrongFence {
        /// Whose worker it is.
        worker: MemoryKind,
        /// Whose fence it is.
        fence: MemoryKind,
    },
    /// An unpack method that cannot work on this pair of memories.
    #[error(
        "the unpack method \"{method}\" cannot move bytes from a pool in {pool} to {destination}; use \"{instead}\""
    )]
    MethodNotPossible {
        /// The method asked for.
        method: UnpackMethod,
        /// Where the pool is.
        pool: MemoryKind,
        /// Where the destination is.
        destination: MemoryKind,
        /// A method that works.
        instead: UnpackMethod,
    },
    /// Pieces of one region lie in memory of several kinds.
    #[error("pieces in {one} and in {other} cannot be one region; make one of each")]
    Unlike {
        /// Where the first piece is.
        one: MemoryKind,
        /// Where another one is.
        other: MemoryKind,
    },
    /// A piece names a parent that was not given.
    #[error("a piece is of parent {parent}, and {parents} were given; count them from 0")]
    NoParent {
        /// Which parent, from 0.
        parent: usize,
        /// How many there are.
        parents: usize,
    },
    /// A region of pieces where memory with one address is needed.
    #[error(
        "this region of {kind} is made of pieces of others; copy it to a plain one, or name its pieces"
    )]
    InPieces {
        /// Where the pieces are.
        kind: MemoryKind,
    },
    /// A descriptor points outside the pool.
    #[error(
        "descriptor {index} reads bytes {start}..{end} of a bounce pool of {len}; the list or the pool is wrong"
    )]
    SourceOutOfBounds {
        /// Which descriptor, from 0.
        index: usize,
        /// First byte read.
        start: u64,
        /// One past the last byte read.
        end: u64,
        /// Bytes in the pool.
        len: usize,
    },
    /// A descriptor points outside the destination.
    #[error(
        "descriptor {index} writes {length} bytes at {start} of a destination of {len}; the list or the destination is wrong"
    )]
    DestinationOutOfBounds {
        /// Which descriptor, from 0.
        index: usize,
        /// First byte written.
        start: u64,
        /// Bytes written.
        length: u32,
        /// Bytes in the destination.
        len: usize,
    },
    /// So many jobs wait that one which can wait has to.
    #[error(
        "the copy worker of {worker} has {jobs} jobs queued; submit again when some have completed"
    )]
    QueueFull {
        /// Whose worker it is.
        worker: MemoryKind,
        /// Jobs that wait before it.
        jobs: usize,
    },
    /// The worker was dropped while the job waited for its fence.
    #[error(
        "the copy worker was dropped while this job waited for earlier GPU work; keep the worker until its jobs have ended"
    )]
    WorkerStopped,
    /// A fault in the copy worker ended it, or left it without means to go on. Memory of jobs that
    /// it had begun stays held, because something may still touch it.
    #[error("a fault ended the copy worker; restart the program and report the fault")]
    WorkerFailed,
    /// Nobody can learn when the job ends. Its memory stays held for as long as the process lives,
    /// because something may still touch it.
    #[error("{source}; the job's memory stays held, so restart the program")]
    EndUnknown {
        /// Why not.
        source: Box<Self>,
    },
    /// The copy worker's thread could not be started.
    #[error("cannot start the copy worker's thread: {why}; raise the process's thread limit")]
    Thread {
        /// The system's reason.
        why: String,
    },
    /// Memory that the program names by an address cannot be used.
    #[error("{len} bytes at {address:#x}: {fault}")]
    Pointer {
        /// The address of its first byte.
        address: u64,
        /// How many bytes.
        len: usize,
        /// Why not.
        fault: PointerFault,
    },
    /// The CUDA driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Why memory that the program names by an address cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PointerFault {
    /// The driver knows no memory there.
    #[error(
        "the CUDA driver of GPU {device} knows no memory there; it was freed or never allocated: give memory that stays until the transfer has ended, and name host memory as such"
    )]
    Unknown {
        /// The device that was named.
        device: u32,
    },
    /// Less is allocated there, or mapped.
    #[error("only {known} of them are allocated there; give a range inside the allocation")]
    TooLong {
        /// Bytes there are.
        known: usize,
    },
    /// It is not a GPU's.
    #[error("this is pinned host memory; name it as host memory")]
    OfHost,
    /// It is another GPU's.
    #[error(
        "the memory is on GPU {owner}, and GPU {device} was named; name GPU {owner}, and use a connection that was opened for it"
    )]
    OfAnotherGpu {
        /// The device that was named.
        device: u32,
        /// The device that it is on.
        owner: u32,
    },
    /// It is this GPU's, but another context's.
    #[error(
        "the memory belongs to another CUDA context of GPU {device}; allocate it in the device's primary context, as the CUDA runtime does"
    )]
    OfAnotherContext {
        /// The device.
        device: u32,
    },
    /// The device has no right to it.
    #[error("GPU {device} may not read and write there; map the memory with cuMemSetAccess")]
    NoAccess {
        /// The device.
        device: u32,
    },
    /// The kernel knows no readable memory there.
    #[error(
        "not all of that is readable memory of this process; it was unmapped or never allocated, or is a GPU's: give memory that stays until the transfer has ended, and name the GPU of its memory"
    )]
    NotMapped,
}

impl MemoryError {
    /// Whether something of the job may still be in flight, now and later.
    pub fn may_go_on(&self) -> bool {
        matches!(self, Self::EndUnknown { .. } | Self::WorkerFailed)
    }
}

/// Why the CUDA driver could not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No usable CUDA driver on this host.
    #[error("no CUDA driver: {why}; install NVIDIA's driver, or use host memory")]
    NoDriver {
        /// What was tried and what happened.
        why: String,
    },
    /// The driver lacks a function.
    #[error("the CUDA driver lacks {name}; it needs CUDA {needs} or later: update NVIDIA's driver")]
    MissingSymbol {
        /// The function.
        name: &'static str,
        /// The CUDA version that brought it.
        needs: &'static str,
    },
    /// There is no such device.
    #[error(
        "no GPU {ordinal}: this process sees {count}; name one of 0..{count} (CUDA_VISIBLE_DEVICES decides which)"
    )]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// Devices there are.
        count: u32,
    },
    /// The calling thread has no current CUDA context.
    #[error(
        "this thread has no current CUDA context; make one current, or open the GPU by its ordinal"
    )]
    NoCurrentContext,
    /// The process is ending, and the driver is torn down.
    #[error("the process is ending, and its CUDA driver with it; end transfers before")]
    ProcessEnds,
    /// What is done on the stream now becomes a part of a graph, and happens when that is launched.
    #[error(
        "the stream of GPU {device} is being captured as a graph, which a transfer cannot be a part of; start it before or after the capture, or after work on another stream"
    )]
    StreamCaptured {
        /// The device's ordinal.
        device: u32,
    },
    /// Whoever waited for the default streams would wait for a stream that is being captured, and
    /// break that.
    #[error(
        "a graph of GPU {device} is being captured from a stream that synchronises with the default streams, so nothing can wait for those; name the stream that the memory's work is on, or none, or capture a non-blocking stream"
    )]
    DefaultStreamsCaptured {
        /// The device's ordinal.
        device: u32,
    },
    /// No device memory left.
    #[error("GPU {device} has no {bytes} bytes of {what} left; free some or ask for less")]
    OutOfMemory {
        /// The device's ordinal.
        device: u32,
        /// Bytes asked for.
        bytes: usize,
        /// Which memory.
        what: MemoryKind,
    },
    /// More fences in use at a time than the pool can hold.
    #[error("{limit} fences are in use on GPU {device}; let operations end before starting more")]
    FencesExhausted {
        /// The device's ordinal.
        device: u32,
        /// The most at a time.
        limit: usize,
    },
    /// The GPU did not finish in time.
    #[error(
        "GPU {device} did not finish {what} within {after:.1?}; look for a kernel that never ends"
    )]
    TimedOut {
        /// The device's ordinal.
        device: u32,
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// The driver cannot load the unpack kernel.
    #[error(
        "GPU {device} cannot load the unpack kernel ({name}); it needs compute capability 7.0 and a driver of CUDA 12.1 or later. Use the unpack method \"d2d\" or \"host\""
    )]
    KernelUnavailable {
        /// The device's ordinal.
        device: u32,
        /// The driver's name for the error.
        name: String,
    },
    /// A driver call failed.
    #[error("{call} failed with {code} ({name}): {hint}")]
    Call {
        /// The driver function.
        call: &'static str,
        /// Its `CUresult`.
        code: i32,
        /// The driver's name for the code.
        name: String,
        /// What it usually means and what to do.
        hint: &'static str,
    },
}
