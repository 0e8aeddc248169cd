//! What each socket has of the pool, until it is closed.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;

use tcpx_devmem::FinishedSends;

/// What one socket has of the pool.
#[derive(Debug)]
pub(super) struct Socket {
    identity: Option<PathBuf>,
    /// Where its payload stream is.
    pub(super) position: u64,
    /// Token to place and length.
    pub(super) tokens: HashMap<u32, (usize, usize)>,
    pub(super) free_tokens: BTreeSet<u32>,
    pub(super) next_token: u32,
    /// Sends out of bound memory by their number: place and length until they are reported on.
    pub(super) sent: Vec<Option<(usize, usize)>>,
    /// Reports taken from the kernel and not handed on.
    pub(super) reports: Vec<FinishedSends>,
}

impl Socket {
    /// Sends that were not reported on.
    pub(super) fn unreported(&self) -> usize {
        self.sent.iter().flatten().count()
    }
}

/// What closed sockets had.
#[derive(Debug, Default)]
pub(super) struct Closed {
    /// Of the pool: places and lengths.
    pub(super) fragments: Vec<(usize, usize)>,
    /// Of the memory to send from, and no report came: places and lengths.
    pub(super) sent: Vec<(usize, usize)>,
}

/// The sockets that were met, by their descriptors.
#[derive(Debug, Default)]
pub(super) struct Sockets(HashMap<RawFd, Socket>);

impl Sockets {
    pub(super) fn of(&mut self, socket: BorrowedFd<'_>) -> &mut Socket {
        let descriptor = socket.as_raw_fd();
        self.0.entry(descriptor).or_insert_with(|| Socket {
            identity: identity(descriptor),
            position: 0,
            tokens: HashMap::new(),
            free_tokens: BTreeSet::new(),
            next_token: 0,
            sent: Vec::new(),
            reports: Vec::new(),
        })
    }

    /// Tokens that nobody gave back.
    pub(super) fn tokens_held(&self) -> usize {
        self.0.values().map(|one| one.tokens.len()).sum()
    }

    /// Forgets the sockets that were closed; what they held. Nobody tells the fake of a close, so
    /// it looks whether a descriptor still is the socket that it was.
    pub(super) fn take_closed(&mut self) -> Closed {
        let mut held = Closed::default();
        let closed = self
            .0
            .extract_if(|descriptor, one| identity(*descriptor) != one.identity);
        for (_, one) in closed {
            held.fragments.extend(one.tokens.into_values());
            held.sent.extend(one.sent.into_iter().flatten());
        }
        held
    }
}

/// `socket:[inode]`, which no later socket of the same descriptor has.
fn identity(descriptor: RawFd) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()
}
