//! The data channels and what waits for them.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use tcpx_lanes::event_loop::Loop;
use tcpx_net::{Channel, ChannelError, PendingClose, Readiness, ReceiveChunk, SendChunk, Ticket};
use tcpx_wire::session::OperationId;

use super::Core;
use super::operation::InFlight;
use crate::error::Error;

/// Least and longest pause between looks at a close that nothing announces the end of.
const CLOSE_PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(100));

/// A channel and what waits for it.
pub(super) struct ChannelState {
    pub(super) channel: Box<dyn Channel>,
    pub(super) sends: VecDeque<(SendChunk, OperationId, InFlight)>,
    pub(super) receives: VecDeque<(ReceiveChunk, OperationId, InFlight)>,
    /// Scattered receives in the order in which their pool space must go back.
    pub(super) unconsumed: VecDeque<Unconsumed>,
    /// To be closed once nothing reads its pool any more.
    pub(super) closing: bool,
    /// How it broke, until that has ended the connection.
    pub(super) failed: Option<ChannelError>,
    closed: bool,
    /// Never to be closed, see [`Self::keep`].
    kept: bool,
}

impl Drop for Core {
    fn drop(&mut self) {
        let kept = self.channels.drain(..).filter(|state| state.kept);
        kept.for_each(std::mem::forget);
    }
}

impl Core {
    /// When to look again at closes that have not come back: the longer they take, the less often.
    pub(super) fn look_at_closes_at(&self) -> Option<Instant> {
        let pending = self.pending_close()?.1;
        let waited = self.ticked.saturating_duration_since(pending.since);
        Some(self.ticked + (waited / 8).clamp(CLOSE_PAUSE.0, CLOSE_PAUSE.1))
    }

    /// The same as an error.
    pub(crate) fn stuck_close(&self) -> Option<Error> {
        let (channel, pending) = self.pending_close()?;
        Some(Error::CloseStuck {
            peer: self.peer,
            channel,
            call: pending.call,
            stuck: self.ticked.saturating_duration_since(pending.since),
        })
    }

    /// The oldest close that has not come back, and its channel.
    fn pending_close(&self) -> Option<(usize, PendingClose)> {
        let pending = self.channels.iter().enumerate();
        let pending = pending.filter_map(|(at, state)| Some((at, state.channel.pending_close()?)));
        pending.min_by_key(|(_, pending)| pending.since)
    }
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

impl Core {
    /// The event loop that moves what goes one at a time, where a waiting thread may lead it.
    pub(crate) fn own_loop(&self) -> Option<Loop> {
        match self.channels.as_slice() {
            [state] => state.channel.own_loop(),
            _ => None,
        }
    }

    /// Whether every channel has a descriptor to wait on.
    pub(crate) fn announces(&self) -> bool {
        self.channel_descriptors().count() == self.channels.len()
    }

    /// Descriptors that the driver watches for the channels.
    pub(crate) fn channel_descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.channels
            .iter()
            .filter_map(|state| match state.channel.readiness() {
                Readiness::Fd(descriptor) => Some(descriptor),
                Readiness::PollOnly => None,
            })
    }
}

impl ChannelState {
    pub(super) fn new(channel: Box<dyn Channel>) -> Self {
        Self {
            channel,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            unconsumed: VecDeque::new(),
            closing: false,
            failed: None,
            closed: false,
            kept: false,
        }
    }

    /// Requests are in flight, or pool space is to be given back, and nobody will tell us when.
    pub(super) fn must_poll(&self) -> bool {
        // A close that hangs is looked at now and then, see [`Core::look_at_closes_at`].
        let closing = self.channel.pending_close().is_some();
        let poll_only = matches!(self.channel.readiness(), Readiness::PollOnly) && !closing;
        let refused = self.unconsumed.front().is_some_and(|first| first.done);
        // A queued chunk may wait for nothing but the program's GPU work.
        let queued = !self.sends.is_empty() || !self.receives.is_empty();
        refused || (poll_only && (self.channel.in_flight() > 0 || queued))
    }

    /// Chunks are in flight or wait to be.
    pub(super) fn is_moving(&self) -> bool {
        self.channel.in_flight() > 0 || !self.sends.is_empty() || !self.receives.is_empty()
    }

    /// Closes the channel, which takes its pool with it, as soon as no unpack reads that. How it broke meanwhile, as
    /// the peer may have closed it for the same reason, is no news then.
    pub(super) fn close(&mut self) {
        self.closing = true;
        self.failed = None;
        self.close_when_unread();
    }

    /// Closed, or to be closed once nothing reads its pool any more.
    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    pub(super) fn closed(&self) -> bool {
        (self.closing && self.kept) || (self.closed && self.channel.closed())
    }

    /// Nobody can learn when the pool is read no more: its space never goes back, and the channel, whose end
    /// would take the pool with it, stays for as long as the process lives.
    pub(super) fn keep(&mut self) {
        self.kept = true;
    }

    pub(super) fn close_when_unread(&mut self) {
        if self.closing
            && !self.closed
            && !self.kept
            && self.unconsumed.iter().all(|entry| entry.done)
        {
            self.closed = true;
            self.channel.close();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use rustix::event::EventfdFlags;
    use tcpx_lanes::lock;
    use tcpx_memory::{CopyWorker, MemoryError};
    use tcpx_net::{Cancel, ChannelStats, Completion, Posted};

    use super::super::tests::Scene;
    use super::*;

    /// What happened to a channel.
    #[derive(Debug, Default)]
    pub(crate) struct Log {
        closed: AtomicBool,
        dropped: AtomicBool,
        /// Sends it was offered.
        pub(in crate::core) offered: AtomicUsize,
        /// Times it was told that the peer was heard.
        pub(in crate::core) heard: AtomicUsize,
        /// It has no lane.
        pub(in crate::core) is_dead: AtomicBool,
        /// It takes sends, which something reads until it says that they have ended.
        pub(in crate::core) holds: AtomicBool,
        pub(in crate::core) held: Mutex<Vec<SendChunk>>,
        pub(in crate::core) lets_go: AtomicBool,
        /// It fails whatever it is told.
        pub(in crate::core) is_broken: AtomicBool,
        /// Its code panics, at every turn and when it is closed.
        pub(crate) panics: AtomicBool,
    }

    /// A channel that is full, with nothing in flight.
    #[derive(Debug)]
    pub(in crate::core) struct Quiet(Arc<Log>, OwnedFd);

    impl Quiet {
        pub(in crate::core) fn new(log: &Arc<Log>) -> Box<Self> {
            let never_ready = rustix::event::eventfd(0, EventfdFlags::CLOEXEC);
            Box::new(Self(Arc::clone(log), never_ready.unwrap()))
        }
    }

    impl Channel for Quiet {
        fn post_send(&mut self, chunk: SendChunk) -> Result<Posted<SendChunk>, ChannelError> {
            self.0.offered.fetch_add(1, Ordering::SeqCst);
            if self.0.holds.load(Ordering::SeqCst) {
                lock(&self.0.held).push(chunk);
                return Ok(Posted::Accepted);
            }
            Ok(Posted::Full(chunk))
        }
        fn post_receive(
            &mut self,
            chunk: ReceiveChunk,
        ) -> Result<Posted<ReceiveChunk>, ChannelError> {
            Ok(Posted::Full(chunk))
        }
        fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
            assert!(!self.0.panics.load(Ordering::SeqCst), "a defect");
            if self.0.lets_go.load(Ordering::SeqCst) {
                out.extend(
                    lock(&self.0.held)
                        .drain(..)
                        .map(|chunk| Completion::Failed {
                            token: chunk.token,
                            error: ChannelError::Cancelled,
                        }),
                );
            }
            Ok(())
        }
        fn consume(&mut self, _ticket: Ticket) -> Result<Posted<Ticket>, ChannelError> {
            Ok(Posted::Accepted)
        }
        fn cancel(&mut self, _token: u64) -> Cancel {
            match self.0.holds.load(Ordering::SeqCst) {
                true => Cancel::Running,
                false => Cancel::Unsupported,
            }
        }
        fn readiness(&self) -> Readiness<'_> {
            Readiness::Fd(self.1.as_fd())
        }
        fn in_flight(&self) -> usize {
            0
        }
        fn placed(&mut self, _sequence: u64) -> Result<(), ChannelError> {
            match self.0.is_broken.load(Ordering::SeqCst) {
                true => Err(ChannelError::Cancelled),
                false => Ok(()),
            }
        }
        fn close(&mut self) {
            assert!(!self.0.panics.load(Ordering::SeqCst), "a defect");
            self.0.closed.store(true, Ordering::SeqCst);
        }
        fn closed(&self) -> bool {
            self.0.closed.load(Ordering::SeqCst)
        }
        fn peer_heard(&mut self, _rested: bool) {
            self.0.heard.fetch_add(1, Ordering::SeqCst);
        }
        fn is_alive(&self) -> bool {
            !self.0.is_dead.load(Ordering::SeqCst)
        }
        fn describe(&self) -> String {
            "quiet".to_owned()
        }
        fn stats(&self) -> ChannelStats {
            ChannelStats::default()
        }
    }

    impl Drop for Quiet {
        fn drop(&mut self) {
            self.0.dropped.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_channel_whose_pool_may_be_read_for_ever_is_neither_closed_nor_dropped_nor_waited_for() {
        for kept in [false, true] {
            let mut scene = Scene::new();
            let log = Arc::clone(&scene.channel);
            let state = &mut scene.core.channels[0];
            if kept {
                state.keep();
            }
            assert!(!state.closed());
            state.close();
            assert!(state.closed());
            assert_eq!(log.closed.load(Ordering::SeqCst), !kept);
            drop(scene);
            assert_eq!(log.dropped.load(Ordering::SeqCst), !kept);
        }
    }

    #[test]
    fn a_channel_that_was_closed_here_ends_nothing_by_how_it_broke_before() {
        for closes in [false, true] {
            let mut scene = Scene::new();
            scene.core.channel_failed(0, ChannelError::Cancelled);
            if closes {
                scene.core.channels[0].close();
            }
            scene.core.progress();
            assert_eq!(scene.core.refusal().is_none(), closes);
        }
    }

    #[test]
    fn lists_come_back_without_the_room_of_a_long_one() {
        let mut unpacker = super::super::Unpacker::new(CopyWorker::host().unwrap(), None);
        let mut list = unpacker.take_list();
        let entries = (0..100_000u64).map(|index| tcpx_wire::Fragment {
            source_offset: index * 3,
            length: 1,
            destination_offset: index,
        });
        let limits = tcpx_wire::descriptor::Limits {
            pool_bytes: 300_000,
            destination_bytes: 100_000,
            received_bytes: 100_000,
        };
        let built =
            Arc::get_mut(&mut list).map(|list| list.build(&entries.collect::<Vec<_>>(), limits));
        assert_eq!(built, Some(Ok(())));
        let shared = Arc::clone(&list);
        unpacker.give_list_back(Arc::clone(&list));
        assert_eq!(unpacker.lists.len(), 0, "somebody else has it");
        drop(shared);
        unpacker.give_list_back(list);
        let list = unpacker.take_list();
        assert!(list.is_empty() && list.capacity() < 10_000);
        let error = MemoryError::WorkerFailed;
        assert!(error.may_go_on() && !MemoryError::WorkerStopped.may_go_on());
    }
}
