//! The data channels and what waits for them.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use tcpx_lanes::event_loop::Loop;
use tcpx_memory::Lease;
use tcpx_net::{
    Channel, ChannelError, Completion, Direction, PeerRead, PendingClose, Readiness, ReceiveChunk,
    SendChunk, Ticket,
};
use tcpx_status::LaneReport;
use tcpx_wire::session::OperationId;
use tcpx_wire::{Place, Time};

use super::Core;
use super::gpu::GpuWork;
use super::operation::InFlight;

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

/// All of a connection, and what goes over them.
pub(crate) struct Channels {
    pub(super) all: Vec<ChannelState>,
    /// The network finds memory by the names of windows.
    pub(crate) is_addressed: bool,
    /// Empty, with room for what one has finished.
    pub(super) completions: Vec<Completion>,
    /// Bytes that will go to them soon, by direction.
    expected: [u64; 2],
    /// When the peer had been heard as they were last told of it, if they were.
    pub(super) last_activity_reported: Option<Time>,
    pub(super) alone: Alone,
}

impl Drop for Channels {
    fn drop(&mut self) {
        let kept = self.all.drain(..).filter(|state| state.kept);
        kept.for_each(std::mem::forget);
    }
}

/// Whether long messages come over the channels one at a time: then the thread that waits for one
/// may move its bytes too.
#[derive(Debug, Default)]
pub(super) struct Alone {
    /// So many in a row must have come one at a time.
    pub(super) usual: u8,
    /// Messages that have begun to come and have not all come.
    pub(super) under_way: usize,
    /// Messages in a row that began to come when none was under way.
    pub(super) came: u8,
    /// So many must still come one at a time after some that did not.
    pub(super) together: u8,
}

impl Alone {
    /// A long message begins to come. Those that came together with it count as under way: the peer
    /// has sent it before it heard of their end.
    pub(super) fn begins(&mut self) {
        self.under_way += 1;
        (self.came, self.together) = match self.under_way {
            1 => (self.came.saturating_add(1), self.together.saturating_sub(1)),
            _ => (0, self.usual),
        };
    }

    /// So many have come.
    pub(super) fn have_come(&mut self, count: usize) {
        self.under_way = self.under_way.saturating_sub(count);
    }

    /// A short message has come, which nobody needs a lane for.
    pub(super) fn short_came(&mut self) {
        self.came = 0;
    }
}

impl Core {
    /// Whether more than one message goes one way at a time, or did a moment ago.
    pub(crate) fn go_several_at_a_time(&self) -> bool {
        let alone = &self.channels.alone;
        alone.under_way > 1 || alone.together > 0 || self.session.sends_under_way() > 1
    }

    /// Whether one message each way goes over the channels, or soon will.
    pub(crate) fn goes_one_at_a_time(&self) -> bool {
        let alone = &self.channels.alone;
        let sends = self.session.sends_under_way() > 0;
        let is_sending = sends && self.channels.are_moving();
        !self.go_several_at_a_time() && (is_sending || alone.came >= alone.usual)
    }
}

impl Channels {
    pub(crate) fn new(channels: Vec<Box<dyn Channel>>, is_addressed: bool, usual: u8) -> Self {
        Self {
            all: channels.into_iter().map(ChannelState::new).collect(),
            is_addressed,
            completions: Vec::new(),
            expected: [0; 2],
            last_activity_reported: None,
            alone: Alone {
                usual,
                ..Alone::default()
            },
        }
    }

    /// Chunks of so many bytes will be posted soon.
    pub(super) fn expect(&mut self, bytes: u64, direction: Direction) {
        let expected = &mut self.expected[direction as usize];
        *expected = expected.saturating_add(bytes);
    }

    /// Has the channels wake whom they will need. Comes after what the peer waits for was said.
    pub(super) fn prewake(&mut self, gpu: &mut GpuWork) {
        for direction in [Direction::Out, Direction::In] {
            let bytes = std::mem::take(&mut self.expected[direction as usize]);
            if bytes == 0 {
                continue;
            }
            // What follows is put together by what is known of it, and waking others takes longer.
            if direction == Direction::Out {
                gpu.look_at_fence();
            }
            let share = bytes.div_ceil(self.all.len().max(1) as u64);
            for state in &mut self.all {
                state.channel.expect(share, direction);
            }
        }
    }

    /// Chunks are in flight or wait to be.
    pub(super) fn are_moving(&self) -> bool {
        self.all.iter().any(ChannelState::is_moving)
    }

    pub(super) fn any_failed(&self) -> bool {
        self.all.iter().any(|state| state.failed.is_some())
    }

    pub(super) fn close(&mut self) {
        self.all.iter_mut().for_each(ChannelState::close);
    }

    pub(super) fn are_closed(&self) -> bool {
        self.all.iter().all(ChannelState::closed)
    }

    /// Says whether somebody polls the channels without being woken for them.
    pub(super) fn set_looked_for(&mut self, looked_for: bool) {
        for state in &mut self.all {
            state.channel.set_looked_for(looked_for);
        }
    }

    /// When to look again at closes that have not come back: the longer they take, the less often.
    pub(super) fn look_at_closes_at(&self, now: Instant) -> Option<Instant> {
        let pending = self.pending_close()?.1;
        let waited = now.saturating_duration_since(pending.since);
        Some(now + (waited / 8).clamp(CLOSE_PAUSE.0, CLOSE_PAUSE.1))
    }

    /// The oldest close that has not come back, and its channel.
    pub(super) fn pending_close(&self) -> Option<(usize, PendingClose)> {
        let pending = self.all.iter().enumerate();
        let pending = pending.filter_map(|(at, state)| Some((at, state.channel.pending_close()?)));
        pending.min_by_key(|(_, pending)| pending.since)
    }

    /// Of networks with one channel for all.
    pub(super) fn only(&self) -> Option<&dyn Channel> {
        match &self.all[..] {
            [one] => Some(&*one.channel),
            _ => None,
        }
    }

    /// The event loop that moves what goes one at a time, where a waiting thread may lead it.
    pub(crate) fn own_loop(&self) -> Option<Loop> {
        self.only()?.own_loop()
    }

    /// Whether every channel has a descriptor to wait on.
    pub(crate) fn announces(&self) -> bool {
        self.descriptors().count() == self.all.len()
    }

    /// Descriptors that the driver watches for the channels.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all
            .iter()
            .filter_map(|state| match state.channel.readiness() {
                Readiness::Fd(descriptor) => Some(descriptor),
                Readiness::PollOnly => None,
            })
    }

    /// Where pieces of the peer's windows lie, if it exposes all of them.
    pub(crate) fn find_in_windows(
        &self,
        pieces: &mut dyn Iterator<Item = (Place, u64)>,
        into: &Lease,
    ) -> Option<PeerRead> {
        let only = self.only().filter(|_| !into.range().is_empty())?;
        only.find_in_windows(pieces, &into.all())
    }

    /// Short name of the data path, for errors.
    pub(super) fn describe(&self) -> String {
        match self.all.as_slice() {
            [] => "no data channel".to_owned(),
            [only] => only.channel.describe(),
            [first, ..] => format!("{} channels, {}", self.all.len(), first.channel.describe()),
        }
    }

    /// The congestion control of the channels' sockets, where they have some.
    pub(crate) fn congestion_control(&self) -> Option<String> {
        let mut channels = self.all.iter();
        channels.find_map(|state| state.channel.congestion_control())
    }

    /// The open lanes of all channels.
    pub(crate) fn lanes(&self) -> Vec<LaneReport> {
        let channels = (0..).zip(self.all.iter());
        let lanes = channels.flat_map(|(channel, state)| {
            let lanes = state.channel.lanes().into_iter();
            lanes.map(move |lane| LaneReport { channel, ..lane })
        });
        lanes.collect()
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
        // A close that hangs is looked at now and then, see [`Channels::look_at_closes_at`].
        let closing = self.channel.pending_close().is_some();
        let poll_only = matches!(self.channel.readiness(), Readiness::PollOnly) && !closing;
        let refused = self.unconsumed.front().is_some_and(|first| first.done);
        // A queued chunk may wait for nothing but the program's GPU work.
        refused || (poll_only && self.is_moving())
    }

    /// Chunks are in flight or wait to be.
    pub(super) fn is_moving(&self) -> bool {
        self.channel.in_flight() > 0 || !self.sends.is_empty() || !self.receives.is_empty()
    }

    /// Closes the channel, which takes its pool with it, as soon as no unpack reads that. How it
    /// broke meanwhile, as the peer may have closed it for the same reason, is no news then.
    pub(super) fn close(&mut self) {
        self.closing = true;
        self.failed = None;
        self.close_when_unread();
    }

    pub(super) fn closed(&self) -> bool {
        (self.closing && self.kept) || (self.closed && self.channel.closed())
    }

    /// Nobody can learn when the pool is read no more: its space never goes back, and the channel,
    /// whose end would take the pool with it, stays for as long as the process lives.
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
    use tcpx_net::{Cancel, ChannelStats, PostAnswer};

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
        fn post_send(&mut self, chunk: SendChunk) -> Result<PostAnswer<SendChunk>, ChannelError> {
            self.0.offered.fetch_add(1, Ordering::SeqCst);
            if self.0.holds.load(Ordering::SeqCst) {
                lock(&self.0.held).push(chunk);
                return Ok(PostAnswer::Accepted);
            }
            Ok(PostAnswer::Full(chunk))
        }
        fn post_receive(
            &mut self,
            chunk: ReceiveChunk,
        ) -> Result<PostAnswer<ReceiveChunk>, ChannelError> {
            Ok(PostAnswer::Full(chunk))
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
        fn consume(&mut self, _ticket: Ticket) -> Result<PostAnswer<Ticket>, ChannelError> {
            Ok(PostAnswer::Accepted)
        }
        fn cancel(&mut self, _token: u64) -> Cancel {
            match self.0.holds.load(Ordering::SeqCst) {
                true => Cancel::Pending,
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
        fn peer_active(&mut self, _rested: bool) {
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
    fn a_channel_that_is_read_for_ever_is_never_dropped() {
        for kept in [false, true] {
            let mut scene = Scene::new();
            let log = Arc::clone(&scene.channel);
            let state = &mut scene.core.channels.all[0];
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
    fn a_channel_closed_here_ends_nothing_by_its_break() {
        for closes in [false, true] {
            let mut scene = Scene::new();
            scene.core.channel_failed(0, ChannelError::Cancelled);
            if closes {
                scene.core.channels.all[0].close();
            }
            scene.core.progress();
            assert_eq!(scene.core.refusal().is_none(), closes);
        }
    }
}
