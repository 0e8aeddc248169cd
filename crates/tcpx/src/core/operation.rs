//! Operations in progress, and what is waited for of them: requests on channels and jobs on the
//! copy worker, by token.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tcpx_memory::{Fence, KeyedTag, Lease, UnpackMethod};
use tcpx_net::{Exposed, PeerRead, Ticket};
use tcpx_wire::session::{Completed, OperationId, OperationKind};
use tcpx_wire::{Descriptors, Numbered, Role, TransferId};

use super::actions::Outcome;
use super::coverage::Coverage;
use crate::event::ChunkEvent;
use crate::report::{Phases, Report};
use crate::transfer::TransferState;
use crate::window::Use;

/// An operation that the session knows.
pub(crate) struct Operation {
    pub(crate) kind: OperationKind,
    pub(crate) tag: u64,
    /// A notification: it reports the end of its batch, not its own.
    pub(crate) follows: bool,
    /// A put of the peer, or a get with a long answer: its bytes are on their way.
    pub(crate) comes: bool,
    /// What a notification of the peer brought with its frame.
    pub(crate) message: Option<Vec<u8>>,
    /// The peer reads the memory where it lies, until this is dropped: before the memory is free.
    pub(crate) exposed: Option<Exposed>,
    /// The memory; every request and job gets slices that ride on this lease.
    pub(crate) lease: Lease,
    pub(crate) fence: Option<Fence>,
    pub(crate) state: Arc<TransferState>,
    /// Requests and jobs that point at the memory.
    pub(crate) outstanding: u32,
    /// The session wants to hear nothing more of it, except that it is quiet.
    pub(crate) stopped: bool,
    /// A small copy that took too long may have its memory beyond its end at the peer.
    lingers: bool,
    /// Once nothing points at the memory, it begins anew.
    pub(crate) withdrawn: bool,
    /// The session waits to be told that it is quiet.
    pub(crate) quiet_owed: bool,
    /// How it ended, once that is decided.
    pub(crate) outcome: Option<Outcome>,
    /// The program was told.
    pub(crate) reported: bool,
    /// Its transfer, once that is known.
    pub(crate) transfer: TransferId,
    /// The request of its window, while that is open.
    pub(crate) window: Option<u64>,
    pub(crate) fragments: u64,
    pub(crate) method: Option<UnpackMethod>,
    pub(crate) digest: Option<u32>,
    /// What has come of chunks that arrive in parts, by the chunk's index.
    pub(crate) parts: BTreeMap<u32, Coverage>,
    chunks: u32,
    started: Instant,
    phases: Phases,
    /// The windows that the peer uses by it. Dropped last: then the memory is free.
    pub(crate) used: Vec<Use>,
}

/// What reads the memory of a send that begins, beside its chunks.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    /// The peer, where it lies.
    pub(crate) exposed: Option<Exposed>,
    /// A small copy, which took too long to be of use.
    pub(crate) is_copied: bool,
}

impl Operation {
    /// One without a tag and without GPU work that it waits for. The `lease` keeps every
    /// conflicting operation away while sockets and copies use the memory.
    pub(crate) fn new(
        kind: OperationKind,
        lease: Lease,
        state: Arc<TransferState>,
        started: Instant,
    ) -> Self {
        Self {
            kind,
            used: Vec::new(),
            comes: false,
            message: None,
            exposed: None,
            follows: false,
            tag: 0,
            lease,
            fence: None,
            state,
            outstanding: 0,
            stopped: false,
            lingers: false,
            withdrawn: false,
            quiet_owed: false,
            outcome: None,
            reported: false,
            transfer: TransferId(0),
            window: None,
            fragments: 0,
            method: None,
            digest: None,
            parts: BTreeMap::new(),
            chunks: 0,
            started,
            phases: Phases::default(),
        }
    }

    /// These read the memory too: the operation has not ended before they have.
    pub(crate) fn read_by(&mut self, readers: Readers) {
        self.exposed = readers.exposed;
        self.outstanding += u32::from(readers.is_copied);
        self.lingers = readers.is_copied;
    }

    /// Of the peer, for which it may be over while something here still has the memory.
    pub(crate) fn may_linger(&self) -> bool {
        self.kind.is_peers() && (self.stopped || self.lingers)
    }

    /// Nothing points at the memory: what was withdrawn begins anew.
    pub(crate) fn renew_withdrawn(&mut self) {
        if std::mem::take(&mut self.withdrawn) {
            self.stopped = false;
            self.parts.clear();
            self.chunks = 0;
            if self.kind.role() == Role::Receiver {
                self.state.set_total(0);
            }
        }
    }

    /// The bytes of a notification of the peer that has arrived.
    pub(crate) fn take_message(&mut self) -> Option<Vec<u8>> {
        self.message.take().or_else(|| {
            let mut bytes = Vec::new();
            self.lease.append_to(&mut bytes).ok().map(|()| bytes)
        })
    }

    /// A chunk went to a channel.
    pub(crate) fn posted(&mut self) {
        self.outstanding += 1;
        self.chunks += 1;
        self.phases.change(self.started.elapsed(), 1, 0);
    }

    /// A chunk came to the window, whole.
    pub(crate) fn came(&mut self) {
        self.chunks += 1;
        if self.chunks == 1 {
            self.phases.change(self.started.elapsed(), 1, 0);
        }
    }

    /// A chunk left the wire for good.
    pub(crate) fn off_wire(&mut self) {
        self.phases.change(self.started.elapsed(), -1, 0);
        self.outstanding -= 1;
    }

    /// A part of a chunk goes to the unpacker, or with the last one what is in flight of it.
    pub(crate) fn begin_unpack(&mut self, is_last: bool) {
        match is_last {
            true => self.phases.change(self.started.elapsed(), -1, 1),
            false => self.outstanding += 1,
        }
    }

    /// A chunk left the unpacker.
    pub(crate) fn unpacked(&mut self) {
        self.phases.change(self.started.elapsed(), 0, -1);
        self.outstanding -= 1;
    }

    pub(crate) fn report(&self, completed: &Completed, now: Instant) -> Report {
        let elapsed = now.saturating_duration_since(self.started);
        let (wire, unpack, wait) = self.phases.split(elapsed);
        Report {
            bytes: completed.bytes,
            level: completed.level,
            chunks: self.chunks,
            fragments: self.fragments,
            elapsed,
            wire,
            unpack,
            wait,
            unpack_method: self.method,
            digest: self.digest,
        }
    }
}

/// A chunk given to a channel, or about to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub(crate) event: ChunkEvent,
    pub(crate) posted: Instant,
}

/// What a window or job was about.
pub(super) enum Token {
    /// With its list, to be used again, and whether the chunk is whole with it.
    Unpack(OperationId, InFlight, Ticket, Arc<Descriptors>, bool),
    /// A window, and when it was opened.
    Window(OperationId, Instant),
    /// GPU work of the program that a receive comes after.
    Fence(OperationId),
    /// Of the memory of an operation.
    Digest(OperationId, Arc<KeyedTag>),
    Eager(OperationId),
    /// A copy of an operation's memory that took too long to be of use.
    SmallRead(OperationId),
    /// A copy of what lies in windows of the peer, or is a message of its, in memory of a GPU.
    Read(OperationId, PeerRead),
}

/// Requests on channels and jobs on the worker that are under way, by token.
#[derive(Default)]
pub(super) struct Tokens {
    pub(super) open: Numbered<u64, Token>,
    /// Chunks that channels have: no more than their windows, however many operations there are.
    pub(super) chunks: Numbered<u64, (OperationId, InFlight)>,
    last: u64,
}

impl Tokens {
    /// A name for a request or job.
    pub(super) fn name(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn add(&mut self, token: Token) -> u64 {
        let name = self.name();
        self.open.insert(name, token);
        name
    }

    pub(super) fn add_chunk(&mut self, id: OperationId, flight: InFlight) -> u64 {
        let name = self.name();
        self.chunks.insert(name, (id, flight));
        name
    }

    pub(super) fn are_over(&self) -> bool {
        self.open.is_empty() && self.chunks.is_empty()
    }
}
