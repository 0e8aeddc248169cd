//! What a fake kernel does, and what it has done.

use std::ops::Range;

/// How packets arrive. Positions count in the payload stream of each socket.
#[derive(Clone, Debug)]
pub struct FaultPlan {
    /// Payload bytes of a packet.
    pub packet: usize,
    /// Every so many packets, one is not split: its first bytes are linear.
    pub linear_every: Option<u64>,
    /// How many bytes are linear then.
    pub linear_bytes: usize,
    /// Packets lie at any place of a page, and share pages.
    pub packed: bool,
    /// These bytes come plain, as after an unbind.
    pub plain: Range<u64>,
    /// From here on each receive fails with this errno.
    pub fails_at: Option<(u64, i32)>,
    /// The first so many receives fail with errno 525, whatever room there is.
    pub too_small: u32,
    /// Each return of tokens frees at most so many.
    pub frees_at_most: usize,
    /// From this call on, returns of tokens fail with this errno.
    pub refuses_tokens_at: Option<(u64, i32)>,
    /// A record lies about its dma-buf at this place.
    pub lies_at: Option<u64>,
    /// There is memory to send from.
    pub sends: bool,
    /// Every so many sends out of it find no room to be noted (`ENOBUFS`).
    pub no_room_every: Option<u64>,
    /// From this send on, all of them fail with this errno.
    pub send_fails_at: Option<(u64, i32)>,
    /// How the kernel reports on sends.
    pub reports: Reports,
}

/// When reports about sends come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reports {
    /// As the real kernel makes them.
    InOrder,
    /// One for each call; of those there are, the last call's first.
    Backwards,
    /// Never: the card does not let go of what it was given.
    Never,
}

impl Default for FaultPlan {
    fn default() -> Self {
        Self {
            packet: 1448,
            linear_every: None,
            linear_bytes: 100,
            packed: false,
            plain: 0..0,
            fails_at: None,
            too_small: 0,
            frees_at_most: 1024,
            refuses_tokens_at: None,
            lies_at: None,
            sends: false,
            no_room_every: None,
            send_fails_at: None,
            reports: Reports::InOrder,
        }
    }
}

/// What happened, for assertions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Receives that brought records.
    pub receives: u64,
    /// Fragments handed out in the pool.
    pub fragments: u64,
    /// Bytes handed out in the pool.
    pub device_bytes: u64,
    /// Bytes handed out as linear ones among records.
    pub linear_bytes: u64,
    /// Plain bytes.
    pub plain_bytes: u64,
    /// Receives that found no page.
    pub dry: u64,
    /// Calls that returned tokens.
    pub returns: u64,
    /// Fragments whose pages came back with the close of their socket.
    pub freed_by_close: u64,
    /// Calls that named a token which nobody had.
    pub strange_returns: u64,
    /// Receives that failed on purpose.
    pub failures: u64,
    /// Sends out of bound memory.
    pub device_sends: u64,
    /// Those of them that the kernel has reported on.
    pub reports: u64,
    /// Those that found no room to be noted.
    pub no_room: u64,
    /// Sends out of memory that the card still had from a closed socket.
    pub reused_early: u64,
}
