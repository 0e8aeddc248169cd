//! The channel of the embedded network: the owner's side of [`Shared`].

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_lanes::event_loop::Loop;
use tcpx_lanes::health::STALL_BEHIND;
use tcpx_lanes::socket::congestion_control;
use tcpx_lanes::tcp_info::lane_report;
use tcpx_memory::awake::has_spare_cores;
use tcpx_memory::{Fence, FreeWatch, MemoryKind, ReadUntilWritten, RegionSlice};
use tcpx_status::LaneReport;
use tcpx_wire::Place;
use tcpx_wire::frame::{Exposure, Settings};

use super::local::{Exposed, PeerRead};
use super::loss::Lost;
use super::receive_table::Closing;
use super::shared::{ChannelShared, Event, LaneSocket, Parts, lock};
use super::transmit_table::{Forgotten, Outgoing, SendState, Unstaged, Withdrawn, describe};
use super::watch;
use crate::channel::{
    Cancel, Channel, ChannelStats, Completion, Direction, PostAnswer, Readiness, ReceiveChunk,
    ReceiveWindow, SendChunk, Ticket, Way,
};
use crate::error::ChannelError;

/// Chunks of a transfer of medium size have this many bytes: one lane is woken for each.
const LEAST_CHUNK_BYTES: u64 = 256 << 10;

/// Several TCP streams that carry one stream of chunks.
#[derive(Debug)]
pub(super) struct TcpChannel {
    shared: Arc<ChannelShared>,
    /// By slot: the send in flight, of the slots that were ever used; idle connections need none.
    sends: Vec<SendSlot>,
    free_sends: Vec<u16>,
    /// Most slots.
    window: u16,
    /// By token: windows that are open.
    windows: BTreeMap<u64, OpenWindow>,
    /// Sends, and windows that a chunk has come to.
    in_flight: usize,
    /// Ends that were found before they were asked for.
    found: Vec<Completion>,
    /// Wakes the channel when pinned slots come back.
    _watches: Vec<FreeWatch>,
}

/// What the owner knows of an open window.
#[derive(Debug, Clone, Copy)]
struct OpenWindow {
    name: u64,
    /// A chunk of it was reported.
    begun: bool,
}

/// What the owner knows of a send's slot.
#[derive(Debug, Clone, Copy, Default)]
struct SendSlot {
    /// The request, until its source may be reused.
    token: Option<u64>,
    /// The chunk that had the slot last.
    sequence: Option<u64>,
}

impl TcpChannel {
    pub(super) fn new(shared: Arc<ChannelShared>, window: u16) -> Self {
        let watches = shared.parts.staging.watch(&shared.roster);
        Self {
            shared,
            sends: Vec::new(),
            free_sends: Vec::new(),
            window,
            windows: BTreeMap::new(),
            in_flight: 0,
            found: Vec::new(),
            _watches: watches,
        }
    }

    fn is_closing(&self) -> bool {
        self.shared.closing.load(Ordering::Acquire)
    }

    /// What every post checks.
    fn admit(
        &self,
        memory: &RegionSlice,
        sequence: u64,
        bytes: u64,
        most: u64,
    ) -> Result<(), ChannelError> {
        if self.is_closing() || self.shared.ended().is_some() {
            return Err(self.shared.failure());
        }
        if !(1..=most).contains(&bytes) {
            return Err(self.bad_request(format!(
                "chunk {sequence} has {bytes} bytes, expected 1 to {most}; use another chunk size"
            )));
        }
        self.shared
            .parts
            .staging
            .admit(memory)
            .map_err(|reason| self.bad_request(reason))
    }

    fn bad_request(&self, reason: String) -> ChannelError {
        ChannelError::BadRequest {
            channel: self.shared.parts.name.clone(),
            reason,
        }
    }

    /// The slot that was free last, or one that was never used.
    fn free_slot(&mut self) -> Option<u16> {
        if let Some(slot) = self.free_sends.pop() {
            return Some(slot);
        }
        let slot = u16::try_from(self.sends.len()).ok()?;
        (slot < self.window).then(|| self.sends.push(SendSlot::default()))?;
        Some(slot)
    }

    fn send_done(&mut self, slot: u16) -> Option<u64> {
        self.free_sends.push(slot);
        self.source_done(slot)
    }

    /// Nobody reads the source any more.
    fn source_done(&mut self, slot: u16) -> Option<u64> {
        let token = self.sends[usize::from(slot)].token.take();
        self.in_flight -= usize::from(token.is_some());
        token
    }

    /// A window is closed.
    fn window_ended(&mut self, token: u64) {
        let ended = self.windows.remove(&token);
        self.in_flight -= usize::from(ended.is_some_and(|window| window.begun));
    }

    fn drain_events(&mut self, out: &mut Vec<Completion>) {
        while let Some(event) = self.shared.next_event() {
            let completion = match event {
                Event::Copied { slot } => self
                    .source_done(slot)
                    .map(|token| Completion::Sent { token }),
                Event::Sent { slot } => {
                    self.send_done(slot).map(|token| Completion::Sent { token })
                }
                Event::SendFailed { slot, error } => self
                    .send_done(slot)
                    .map(|token| Completion::Failed { token, error }),
                Event::SendWithdrawn { slot } => {
                    self.free_sends.push(slot);
                    None
                }
            };
            out.extend(completion);
        }
    }

    fn drain_windows(&mut self, out: &mut Vec<Completion>) {
        let first = out.len();
        self.shared.receive.drain(out);
        for completion in &out[first..] {
            match completion {
                Completion::Begun { token, .. } => {
                    if let Some(window) = self.windows.get_mut(token) {
                        window.begun = true;
                        self.in_flight += 1;
                    }
                }
                Completion::Closed { token, .. } => self.window_ended(*token),
                _ => {}
            }
        }
    }

    /// The chunk of this sequence is needed no more; `placed`: because the peer has read all of it.
    fn forget_chunk(&mut self, sequence: u64, placed: bool) {
        // News of the slots' former chunks must not be taken for those of the next.
        let mut found = std::mem::take(&mut self.found);
        self.drain_events(&mut found);
        self.found = found;
        for slot in (0u16..).take(self.sends.len()) {
            if self.sends[usize::from(slot)].sequence != Some(sequence) {
                continue;
            }
            let done = match self.shared.transmit.forget(slot, sequence, placed) {
                Forgotten::Free => self.send_done(slot),
                Forgotten::Settled => self.source_done(slot),
                Forgotten::Later => return,
                Forgotten::Unknown => continue,
            };
            self.found
                .extend(done.map(|token| Completion::Sent { token }));
            if !self.found.is_empty() {
                self.shared.roster.signal.wake();
            }
            return;
        }
    }

    /// No lane runs any more: ends what none of them had in its hands.
    fn fail_remaining(&mut self, out: &mut Vec<Completion>) {
        let error = self.shared.failure();
        let failed = |token| Completion::Failed {
            token,
            error: error.clone(),
        };
        let shared = Arc::clone(&self.shared);
        for (slot, SendSlot { token, .. }) in (0u16..).zip(self.sends.iter_mut()) {
            let ended = shared.transmit.with_slot(slot, |state| match state {
                SendState::Queued(_) | SendState::Waiting(_) => {
                    *state = SendState::Free;
                    true
                }
                // The copy worker still reads or writes; its end brings an event.
                SendState::Copying { cancelled, .. } => {
                    *cancelled = true;
                    false
                }
                SendState::Free | SendState::Taken { .. } | SendState::Withdrawn => false,
            });
            if ended && let Some(token) = token.take() {
                self.in_flight -= 1;
                out.push(failed(token));
            }
        }
        let open: Vec<_> = self
            .windows
            .iter()
            .map(|(token, open)| (*token, open.name))
            .collect();
        for (token, name) in open {
            // No lane has a chunk; the copy worker may, whose end brings the window's.
            if self.shared.receive.close(name) == Closing::Done {
                self.window_ended(token);
                out.push(failed(token));
            }
        }
        // Those to which something had come.
        let mut touched = Vec::new();
        self.drain_windows(&mut touched);
        out.extend(touched.into_iter().map(|news| match news {
            Completion::Closed { token, .. } => failed(token),
            other => other,
        }));
    }
}

impl Channel for TcpChannel {
    fn post_send(&mut self, chunk: SendChunk) -> Result<PostAnswer<SendChunk>, ChannelError> {
        let shared = &self.shared;
        let is_read_there = shared.parts.local.reads_gpu(&chunk.source);
        let most = match is_read_there {
            true => Settings::MAX_CHUNK_BYTES.into(),
            false => shared.parts.staging.largest_request(),
        };
        let bytes = chunk.source.len() as u64;
        self.admit(&chunk.source, chunk.sequence, bytes, most)?;
        let Some(slot) = self.free_slot() else {
            return Ok(PostAnswer::Full(chunk));
        };
        self.sends[usize::from(slot)] = SendSlot {
            token: Some(chunk.token),
            sequence: Some(chunk.sequence),
        };
        self.in_flight += 1;
        let (header, position) = describe(&chunk);
        let SendChunk { source, fence, .. } = chunk;
        let outgoing = |payload| Outgoing::new(slot, header, position, payload);
        if is_read_there {
            ChannelShared::send_where_it_lies(&self.shared, outgoing(source), fence);
        } else if self.shared.parts.staging.is_needed(&source) {
            let unstaged = Unstaged {
                header,
                position,
                source,
                fence,
            };
            ChannelShared::stage(&self.shared, slot, unstaged);
        } else {
            drop::<Option<Fence>>(fence);
            self.shared.transmit.enqueue(outgoing(source));
            self.shared.wake_sender();
        }
        self.shared.monitor_handle.request_check();
        Ok(PostAnswer::Accepted)
    }

    fn open_window(&mut self, window: ReceiveWindow) -> Result<(), ChannelError> {
        // Each chunk is a request of its own.
        let chunk = window
            .destination
            .len()
            .min(window.cut.chunk_bytes() as usize);
        let most = self.shared.parts.staging.largest_request();
        self.admit(&window.destination, window.window, chunk as u64, most)?;
        if window.cut.bytes() != window.destination.len() as u64 {
            return Err(self.bad_request(format!(
                "window {} is planned for {} bytes and has {}; plan it for its length",
                window.window,
                window.cut.bytes(),
                window.destination.len()
            )));
        }
        window
            .destination
            .admits_writes()
            .map_err(|error| self.bad_request(error.to_string()))?;
        let (token, name) = (window.token, window.window);
        self.shared.receive.open(window).map_err(|window| {
            self.bad_request(format!(
                "window {} was opened after a later one; open windows in the order of their names",
                window.window
            ))
        })?;
        self.windows
            .insert(token, OpenWindow { name, begun: false });
        Ok(())
    }

    fn post_receive(
        &mut self,
        chunk: ReceiveChunk,
    ) -> Result<PostAnswer<ReceiveChunk>, ChannelError> {
        Err(self.bad_request(format!(
            "chunk {} was posted on a network that is addressed; open a window",
            chunk.sequence
        )))
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        self.shared.roster.signal.clear();
        // First the question and then the events: those that came before the end are seen.
        let lanes_gone = self.shared.roster.is_empty();
        let ended = self.shared.ended();
        out.append(&mut self.found);
        self.drain_events(out);
        self.drain_windows(out);
        let missing = self.shared.roster.take_missing();
        out.extend(missing.map(|lane| Completion::LaneMissing { lane }));
        if let Some(why) = self.shared.parts.local.news() {
            out.push(Completion::PathChanged {
                path: self.path(),
                why: why.to_owned(),
            });
        }
        if self.is_closing() {
            if lanes_gone {
                self.fail_remaining(out);
            }
            return Ok(());
        }
        match ended {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn consume(&mut self, ticket: Ticket) -> Result<PostAnswer<Ticket>, ChannelError> {
        Err(self.bad_request(format!(
            "this network hands out no tickets, ticket {} arrived; only scattered receives are consumed",
            ticket.0
        )))
    }

    fn cancel(&mut self, token: u64) -> Cancel {
        let held = |slot: &SendSlot| slot.token == Some(token);
        if let Some(slot) = slot_where(&self.sends, held) {
            match self.shared.transmit.withdraw(slot) {
                Withdrawn::NotYet => return Cancel::Pending,
                Withdrawn::InHand(lane) => {
                    self.shared.let_go(lane);
                    return Cancel::Pending;
                }
                Withdrawn::Later => {}
                Withdrawn::Now => self.free_sends.push(slot),
            }
            self.sends[usize::from(slot)].token = None;
            self.in_flight -= 1;
            return Cancel::Done;
        }
        let Some(window) = self.windows.get(&token).copied() else {
            // It may have ended, and that was not asked for yet.
            return match self.found.iter().any(|one| one.ends(token)) {
                true => Cancel::Pending,
                false => Cancel::Done,
            };
        };
        match self.shared.receive.close(window.name) {
            Closing::Done => {
                self.window_ended(token);
                Cancel::Done
            }
            Closing::AskLanes(lanes) => {
                self.shared.roster.wake_receivers(lanes);
                if lanes == 0 {
                    // Its end may be there already.
                    self.shared.roster.signal.wake();
                }
                Cancel::Pending
            }
        }
    }

    fn placed(&mut self, sequence: u64) -> Result<(), ChannelError> {
        let held = |slot: &SendSlot| slot.sequence == Some(sequence);
        if let Some(slot) = slot_where(&self.sends, held)
            && self.shared.transmit.is_unsent(slot, sequence)
        {
            return Err(ChannelError::Protocol {
                channel: self.shared.parts.name.clone(),
                lane: 0,
                expected: "acknowledgements of chunks that were sent".to_owned(),
                arrived: format!("one of chunk {sequence}, which was not"),
                position: None,
            });
        }
        self.forget_chunk(sequence, true);
        Ok(())
    }

    fn forget(&mut self, sequence: u64) {
        self.forget_chunk(sequence, false);
    }

    fn peer_active(&mut self, rested: bool) {
        self.shared.peer_liveness.note(rested);
    }

    fn redial(&mut self, lane: u16) {
        if self.shared.roster.want_unopened() {
            watch::wake();
        }
        let stood = |socket: &Arc<LaneSocket>| socket.since.elapsed() >= STALL_BEHIND;
        if let Some(socket) = self.shared.roster.socket(lane).filter(stood) {
            let text = "the peer gave it up and asked for another one";
            let how = Lost::given_up("receiving", text.to_owned());
            self.shared.lane_lost_only(lane, Some(&socket), how);
        }
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.shared.roster.signal.as_fd())
    }

    fn set_looked_for(&mut self, looked_for: bool) {
        self.shared.roster.signal.set_looked_for(looked_for);
    }

    fn chunk_bytes(&self, source: &RegionSlice) -> Option<u32> {
        self.shared.parts.local.chunk_bytes(source)
    }

    fn expose(&self, source: &RegionSlice) -> Option<(Exposure, Exposed)> {
        let exposed = self.shared.parts.local.expose_message(source)?;
        let sent = &self.shared.counters.bytes_sent;
        sent.fetch_add(exposed.0.bytes.into(), Ordering::Relaxed);
        Some(exposed)
    }

    fn find_exposed(&self, at: &Exposure, to: MemoryKind) -> io::Result<Option<PeerRead>> {
        self.shared.parts.local.find_message(at, to)
    }

    fn own_loop(&self) -> Option<Loop> {
        // Slots may be sent by their pages, which raises signals in threads that are not ours.
        if self.shared.parts.staging.has_slots() {
            return None;
        }
        let home = self.shared.roster.socket(0)?.receive.home();
        let lanes = self.shared.roster.sockets();
        let lanes = lanes.filter(|socket| socket.receive.home().is(&home));
        (home.sources() == 2 * lanes.count()).then_some(home)
    }

    fn expose_window(&self, window: &Place, memory: &RegionSlice) -> Option<ReadUntilWritten> {
        self.shared.parts.local.expose_window(window, memory)
    }

    fn find_in_windows(
        &self,
        pieces: &mut dyn Iterator<Item = (Place, u64)>,
        into: &RegionSlice,
    ) -> Option<PeerRead> {
        self.shared.parts.local.find_in_windows(pieces, into)
    }

    fn read_on(&self, read: &mut PeerRead, into: &RegionSlice) -> io::Result<Option<bool>> {
        let ended = self.shared.parts.local.read_on(read, into)?;
        if ended == Some(true) {
            let received = &self.shared.counters.bytes_received;
            received.fetch_add(into.len() as u64, Ordering::Relaxed);
        }
        Ok(ended)
    }

    fn expect(&mut self, bytes: u64, direction: Direction) {
        // Where they could not look for what comes, they would only be woken twice.
        if !has_spare_cores() {
            return;
        }
        // What the peer reads with one copy comes in one chunk.
        let chunks = match self.shared.parts.local.has_gpus() {
            true => 1,
            false => bytes.div_ceil(LEAST_CHUNK_BYTES),
        };
        self.shared
            .roster
            .prewake(usize::try_from(chunks).unwrap_or(usize::MAX), direction);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn close(&mut self) {
        let joining = lock(&self.shared.membership);
        if self.shared.closing.swap(true, Ordering::AcqRel) {
            return;
        }
        drop(joining);
        for socket in self.shared.roster.sockets() {
            socket.transmit.remove();
            socket.receive.remove();
        }
        self.shared.roster.signal.wake();
    }

    fn closed(&self) -> bool {
        self.is_closing()
            && self.in_flight == 0
            && self.windows.is_empty()
            && self.shared.roster.is_empty()
    }

    fn describe(&self) -> String {
        self.shared.parts.name.clone()
    }

    fn is_alive(&self) -> bool {
        self.shared.roster.live() > 0
    }

    fn ways(&self) -> Vec<Way> {
        let mut ways: Vec<Way> = Vec::new();
        // Those of living lanes first.
        for living in [true, false] {
            for (lane, way) in (0u16..).zip(self.shared.parts.repair.routes()) {
                let lives = self.shared.roster.socket(lane).is_some();
                if lives == living && !ways.contains(way) {
                    ways.push(way.clone());
                }
            }
        }
        ways
    }

    fn path(&self) -> String {
        let Parts {
            name, ways, local, ..
        } = &self.shared.parts;
        format!("{name}{ways}{}", local.describe())
    }

    fn congestion_control(&self) -> Option<String> {
        let socket = self.shared.roster.sockets().next()?;
        congestion_control(&*socket)
    }

    fn lanes(&self) -> Vec<LaneReport> {
        let open = self.shared.roster.sockets();
        open.map(|socket| lane_report(&*socket, socket.lane, socket.peer))
            .collect()
    }

    fn stats(&self) -> ChannelStats {
        self.shared.stats()
    }
}

impl Drop for TcpChannel {
    fn drop(&mut self) {
        // The loops drop the lanes; each keeps the memory in its hands alive until then.
        self.close();
    }
}

fn slot_where<T>(slots: &[T], held: impl Fn(&T) -> bool) -> Option<u16> {
    u16::try_from(slots.iter().position(held)?).ok()
}
