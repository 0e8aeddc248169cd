//! Types of the header.
#![expect(non_camel_case_types, reason = "these are the names in C")]

use std::ffi::{c_char, c_int, c_void};

/// A time without end, where a call takes milliseconds.
pub const TCPX_FOREVER: u32 = u32::MAX;
/// Most bytes of a key's text, its NUL included.
pub const TCPX_KEY_MAX: usize = 128;
/// Most bytes of a window's key.
pub const TCPX_WINDOW_KEY_MAX: usize = 96;
/// Most bytes of a notification.
pub const TCPX_NOTIFICATION_MAX: usize = 65536;

/// Memory of this process.
pub const TCPX_MEMORY_HOST: c_int = 0;
/// Memory of a CUDA device.
pub const TCPX_MEMORY_CUDA: c_int = 1;

/// Level: every byte is at its destination, and both sides know it. The default.
pub const TCPX_LEVEL_PLACED: c_int = 0;
/// Level: the source may be reused.
pub const TCPX_LEVEL_SENT: c_int = 1;
/// Level: as placed, and the checksums (CRC32C) of both ends were compared.
pub const TCPX_LEVEL_VERIFIED: c_int = 2;

/// CUDA work that comes first: all of the context's default streams. The default. TCPX_ERR_MEMORY
/// while a stream that synchronises with them is being captured as a graph; the capture goes on.
pub const TCPX_AFTER_DEFAULT_STREAMS: c_int = 0;
/// None: the bytes are ready.
pub const TCPX_AFTER_NOTHING: c_int = 1;
/// What was submitted so far to the CUstream in `stream`. TCPX_ERR_MEMORY while that is being
/// captured as a graph; the capture goes on.
pub const TCPX_AFTER_STREAM: c_int = 2;
/// The CUevent in `stream`, which was recorded outside of a capture and stays until the transfer
/// has ended.
pub const TCPX_AFTER_EVENT: c_int = 3;

/// Progress by a thread that waits, and by the library's own at all other times.
pub const TCPX_PROGRESS_BACKGROUND: c_int = 0;
/// Progress by the program alone: while it waits, tests, or calls tcpx_connection_progress. Without
/// that nothing arrives, but the connection stays. Not over plugins.
pub const TCPX_PROGRESS_MANUAL: c_int = 1;

/// As the variable TCPX_LOCAL says; without it, where both processes are one user's and payload is
/// not encrypted.
pub const TCPX_LOCAL_DEFAULT: c_int = 0;

/// Never: payload goes over TCP within the host too.
pub const TCPX_LOCAL_OFF: c_int = 1;

/// With encryption too.
pub const TCPX_LOCAL_ON: c_int = 2;

/// Right of a window: the peer may read.
pub const TCPX_RIGHT_GET: c_int = 1;
/// Right of a window: the peer may write.
pub const TCPX_RIGHT_PUT: c_int = 2;

/// A piece of a batch: write our memory into the peer's window.
pub const TCPX_PUT: c_int = 1;
/// A piece of a batch: read the peer's window into our memory.
pub const TCPX_GET: c_int = 2;

/// A listening endpoint.
#[derive(Debug)]
pub struct tcpx_endpoint(());
/// A connection to one peer.
#[derive(Debug)]
pub struct tcpx_connection(());
/// Memory that transfers read and write.
#[derive(Debug)]
pub struct tcpx_region(());
/// Memory that is open to the peer.
#[derive(Debug)]
pub struct tcpx_window(());
/// A send, receive, put, get, batch or notification that was started.
#[derive(Debug)]
pub struct tcpx_transfer(());
/// Where transfers leave their completions.
#[derive(Debug)]
pub struct tcpx_queue(());

/// Gives memory back to the program; see tcpx_region_wrap.
pub type tcpx_release_fn = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// What this side takes of its peer at a time, each at most 2^20; 0: the default, which is many.
/// The peer keeps the rest, and begins that as others end: nothing fails for it, but a batch of
/// more pieces than fit at all.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_limits {
    /// Puts into windows of this side.
    pub puts: u32,
    /// Notifications, those included that the program has not collected.
    pub notifications: u32,
    /// Gets from its windows.
    pub gets: u32,
    /// Sends for which no receive is there.
    pub asks: u32,
    /// Receives of the peer that wait for sends of this side.
    pub windows: u32,
    /// Tags whose sends it counts.
    pub tags: u32,
    /// Pieces of batches.
    pub pieces: u32,
    /// Windows that a batch names.
    pub list_windows: u32,
}

/// Settings of an endpoint or a connection. Fill it with zeros: every zero means the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_options {
    /// The pre-shared key, as tcpx_endpoint_key and tcpx_key_generate give it. NULL: an endpoint
    /// makes one; a connection needs one unless `insecure`.
    pub key: *const c_char,
    /// Not 0: no key. Whoever reaches the port may connect.
    pub insecure: c_int,
    /// Not 0: payload is encrypted, which both sides must ask for; control always is where there is
    /// a key.
    pub encrypt: c_int,
    /// What this side moves: TCPX_MEMORY_HOST, or TCPX_MEMORY_CUDA, which moves host memory too.
    pub memory: c_int,
    /// The CUDA device, for TCPX_MEMORY_CUDA.
    pub device: u32,
    /// Lanes (TCP connections that carry payload), at most 65535; 0: automatic.
    pub lanes: u32,
    /// Most milliseconds for setting a connection up; 0: 10 s.
    pub connect_timeout_ms: u32,
    /// Milliseconds that each transfer may take in all, unless it sets its own; 0: no limit.
    pub timeout_ms: u32,
    /// Milliseconds that a transfer may stall, a receive that waits for its send included;
    /// 0: `timeout_ms` if that is set, else 30 s.
    pub stall_ms: u32,
    /// Milliseconds of silence after which the peer counts as dead; 0: 10 s.
    pub dead_after_ms: u32,
    /// Not 0: an endpoint accepts one peer, then its key is spent.
    pub one_time: c_int,
    /// A TCPX_PROGRESS_ number.
    pub progress: c_int,
    /// A TCPX_LOCAL_ number: whether peers on this host read payload where it lies.
    pub local: c_int,
    /// In place of `key`: a file that holds it. NULL: none.
    pub key_file: *const c_char,
    /// What this side takes of its peer at a time.
    pub limits: tcpx_limits,
    /// Zeros.
    pub reserved: [u64; 3],
}

/// Settings of one transfer. Fill it with zeros: every zero means the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_transfer_options {
    /// A TCPX_LEVEL_ number.
    pub level: c_int,
    /// A TCPX_AFTER_ number, for CUDA memory.
    pub after: c_int,
    /// The CUstream or CUevent of TCPX_AFTER_STREAM and TCPX_AFTER_EVENT.
    pub stream: *mut c_void,
    /// Most milliseconds in all; 0: as the connection was opened with.
    pub timeout_ms: u32,
    /// Most milliseconds without progress; 0: `timeout_ms` if that is set, else as the connection
    /// was opened with.
    pub stall_ms: u32,
    /// Put, get, batch: bytes for the peer's tcpx_notification once everything is in place. NULL:
    /// none.
    pub notification: *const c_void,
    /// How many, at most TCPX_NOTIFICATION_MAX; with `notification` not NULL it may be 0.
    pub notification_bytes: usize,
    /// Zeros.
    pub reserved: [u64; 4],
}

/// A put or a get of a batch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_piece {
    /// TCPX_PUT or TCPX_GET.
    pub operation: c_int,
    /// Zeros.
    pub reserved: c_int,
    /// Our memory.
    pub region: *mut tcpx_region,
    /// Where the piece begins in it.
    pub offset: usize,
    /// Its length.
    pub bytes: usize,
    /// The peer's window: what tcpx_window_key gave there.
    pub key: *const c_void,
    /// Bytes of that.
    pub key_bytes: usize,
    /// Where the piece begins in the window.
    pub window_offset: u64,
}

/// A transfer that ended well.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_report {
    /// Bytes moved; of a receive perhaps fewer than it has room for.
    pub bytes: u64,
    /// Nanoseconds from its start to its end.
    pub nanoseconds: u64,
    /// A TCPX_LEVEL_ number: what is known.
    pub level: c_int,
    /// Whether `digest` holds something.
    pub has_digest: c_int,
    /// CRC32C of the bytes, at level verified.
    pub digest: u32,
    /// Zeros.
    pub reserved0: u32,
    /// Zeros.
    pub reserved: [u64; 4],
}

/// What a queue tells of a transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_completion_entry {
    /// As given to tcpx_transfer_queue.
    pub key: u64,
    /// TCPX_OK, or how it failed.
    pub code: c_int,
    /// Zeros.
    pub reserved: c_int,
    /// With TCPX_OK.
    pub report: tcpx_report,
}

/// Counters of a connection, from its beginning.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct tcpx_statistics {
    /// Payload bytes handed to the network.
    pub bytes_sent: u64,
    /// Payload bytes taken from the network.
    pub bytes_received: u64,
    /// Chunks sent to their last byte.
    pub chunks_sent: u64,
    /// Chunks received to their last byte.
    pub chunks_received: u64,
    /// Chunks sent again because their lane died.
    pub chunks_resent: u64,
    /// Lanes that died.
    pub lanes_lost: u64,
    /// Lanes that came back.
    pub lanes_restored: u64,
    /// TCP connections of the data plane that are open now.
    pub streams: u64,
    /// Bytes of the control connection sent, which small messages travel on.
    pub control_bytes_sent: u64,
    /// The same, received.
    pub control_bytes_received: u64,
    /// Zeros.
    pub reserved: [u64; 6],
}

const _: () = assert!(size_of::<tcpx_options>() == 56 + 64);
const _: () = assert!(size_of::<tcpx_transfer_options>() == 40 + 32);
const _: () = assert!(size_of::<tcpx_piece>() == 56);
const _: () = assert!(size_of::<tcpx_report>() == 64);
const _: () = assert!(size_of::<tcpx_completion_entry>() == 80);
const _: () = assert!(size_of::<tcpx_statistics>() == 128);
