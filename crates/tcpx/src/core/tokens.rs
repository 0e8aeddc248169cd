//! What the engine waits for: requests on channels and jobs on the copy worker, by token.

use std::sync::Arc;
use std::time::Instant;

use tcpx_memory::KeyedTag;
use tcpx_net::Ticket;
use tcpx_wire::descriptor::Descriptors;
use tcpx_wire::session::OperationId;

use super::Core;
use super::operation::InFlight;

/// What a request or job was about.
pub(super) enum Token {
    Send(OperationId, InFlight),
    Receive(OperationId, InFlight),
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
}

impl Core {
    /// Names a request or job.
    pub(super) fn new_token(&mut self, token: Token) -> u64 {
        self.next_token += 1;
        self.tokens.insert(self.next_token, token);
        self.next_token
    }
}
