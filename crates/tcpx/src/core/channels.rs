//! The data channels and what waits for them.

use std::collections::VecDeque;

use tcpx_net::{Channel, Readiness, ReceiveChunk, SendChunk, Ticket};
use tcpx_wire::session::OperationId;

use super::operation::InFlight;

/// A channel and what waits for it.
pub(super) struct ChannelState {
    pub(super) channel: Box<dyn Channel>,
    pub(super) sends: VecDeque<(SendChunk, OperationId, InFlight)>,
    pub(super) receives: VecDeque<(ReceiveChunk, OperationId, InFlight)>,
    /// Scattered receives in the order in which their pool space must go back.
    pub(super) unconsumed: VecDeque<Unconsumed>,
    /// To be closed once nothing reads its pool any more.
    pub(super) closing: bool,
    closed: bool,
}

pub(super) struct Unconsumed {
    pub(super) ticket: Ticket,
    pub(super) operation: OperationId,
    pub(super) flight: InFlight,
    /// Nothing reads the pool space any more.
    pub(super) done: bool,
    /// The bytes are at their destination.
    pub(super) placed: bool,
}

impl ChannelState {
    pub(super) fn new(channel: Box<dyn Channel>) -> Self {
        Self {
            channel,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            unconsumed: VecDeque::new(),
            closing: false,
            closed: false,
        }
    }

    /// Requests are in flight, or pool space is to be given back, and nobody will tell us when.
    pub(super) fn must_poll(&self) -> bool {
        let poll_only = matches!(self.channel.readiness(), Readiness::PollOnly);
        let refused = self.unconsumed.front().is_some_and(|first| first.done);
        // A queued chunk may wait for nothing but the program's GPU work.
        let queued = !self.sends.is_empty() || !self.receives.is_empty();
        refused || (poll_only && (self.channel.in_flight() > 0 || queued))
    }

    /// Chunks are in flight or wait to be.
    pub(super) fn is_moving(&self) -> bool {
        self.channel.in_flight() > 0 || !self.sends.is_empty() || !self.receives.is_empty()
    }

    /// Closes the channel, which takes its pool with it, as soon as no unpack reads that.
    pub(super) fn close(&mut self) {
        self.closing = true;
        self.close_when_unread();
    }

    /// Closed, or to be closed once nothing reads its pool any more.
    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    pub(super) fn closed(&self) -> bool {
        self.closed && self.channel.closed()
    }

    pub(super) fn close_when_unread(&mut self) {
        if self.closing && !self.closed && self.unconsumed.iter().all(|entry| entry.done) {
            self.closed = true;
            self.channel.close();
        }
    }
}
