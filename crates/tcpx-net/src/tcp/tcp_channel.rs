//! The channel of the embedded network: the owner's side of [`Shared`].

mod remaining;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_lanes::socket::{congestion_control, local_ip};
use tcpx_memory::awake::has_spare_cores;
use tcpx_memory::{Fence, FreeWatch, RegionSlice};

use super::receive_table::{ReceiveState, Withdrawal};
use super::repair::Repair;
use super::shared::{Ended, Event, Shared, lock};
use super::transmit_table::{Forgotten, Outgoing, Unstaged, Withdrawn, describe};
use crate::channel::{
    Cancel, Capabilities, Channel, ChannelStats, Completion, Direction, Foreseen, Payload, Posted,
    Readiness, ReceiveChunk, SendChunk, Ticket, Way,
};
use crate::error::ChannelError;

/// Chunks of a transfer of medium size have this many bytes: one lane is woken for each.
const LEAST_CHUNK_BYTES: u64 = 256 << 10;

/// Several TCP streams that carry one stream of chunks.
#[derive(Debug)]
pub(super) struct TcpChannel {
    shared: Arc<Shared>,
    /// By slot: the send in flight.
    sends: Box<[SendSlot]>,
    free_sends: Vec<u16>,
    /// By slot: the token of the receive in flight.
    receives: Box<[Option<u64>]>,
    in_flight: usize,
    /// Sends offered by [`Channel::foresee`] whose end was not reported.
    foreseen: usize,
    /// Ends that were found before they were asked for.
    found: Vec<Completion>,
    capabilities: Capabilities,
    /// Wakes the channel when pinned slots come back.
    _watches: Vec<FreeWatch>,
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
    pub(super) fn new(shared: Arc<Shared>, window: u16) -> Self {
        let watches = shared.staging.watch(&shared.wakers);
        shared.wakers.signal.set_wanted(true);
        let capabilities = Capabilities {
            max_in_flight: window,
            ordered: false,
            can_cancel: true,
            can_resend: false,
            largest_request: shared.staging.largest_request(),
            kinds: shared.staging.kinds(),
        };
        Self {
            shared,
            sends: (0..window).map(|_| SendSlot::default()).collect(),
            free_sends: (0..window).rev().collect(),
            receives: (0..window).map(|_| None).collect(),
            in_flight: 0,
            foreseen: 0,
            found: Vec::new(),
            capabilities,
            _watches: watches,
        }
    }

    fn is_closing(&self) -> bool {
        self.shared.closing.load(Ordering::Acquire)
    }

    /// What every post checks.
    fn admit(&self, memory: &RegionSlice, sequence: u64) -> Result<(), ChannelError> {
        if self.is_closing() || self.shared.ended().is_some() {
            return Err(self.shared.failure(self.in_flight));
        }
        let bytes = memory.len() as u64;
        let most = self.capabilities.largest_request;
        if !(1..=most).contains(&bytes) {
            return Err(self.bad_request(format!(
                "chunk {sequence} has {bytes} bytes, expected 1 to {most}; use another chunk size"
            )));
        }
        self.shared
            .staging
            .admit(memory)
            .map_err(|reason| self.bad_request(reason))
    }

    /// Whether the bytes of a whole transfer may be read now.
    fn admit_whole(&self, memory: &RegionSlice) -> bool {
        let over = self.is_closing() || self.shared.ended().is_some();
        !over && self.shared.staging.admit(memory).is_ok()
    }

    fn bad_request(&self, reason: String) -> ChannelError {
        ChannelError::BadRequest {
            channel: self.shared.name.clone(),
            reason,
        }
    }

    fn send_done(&mut self, slot: u16) -> Option<u64> {
        self.free_sends.push(slot);
        self.source_done(slot)
    }

    /// Nobody reads the source any more.
    fn source_done(&mut self, slot: u16) -> Option<u64> {
        let token = self.sends[usize::from(slot)].token.take();
        self.taken(token)
    }

    fn receive_done(&mut self, slot: u16) -> Option<u64> {
        self.shared.receive.set(slot, ReceiveState::Empty);
        let token = self.receives[usize::from(slot)].take();
        self.taken(token)
    }

    fn taken(&mut self, token: Option<u64>) -> Option<u64> {
        self.in_flight -= usize::from(token.is_some());
        token
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
                Event::Received { slot, bytes } => {
                    self.receive_done(slot).map(|token| Completion::Received {
                        token,
                        payload: Payload::InPlace { bytes },
                    })
                }
                Event::ReceiveFailed { slot, error } => self
                    .receive_done(slot)
                    .map(|token| Completion::Failed { token, error }),
            };
            out.extend(completion);
        }
    }

    /// The chunk of this sequence is needed no more; `placed`: because the peer has read all of it.
    fn forget_chunk(&mut self, sequence: u64, placed: bool) {
        if !self.shared.resend {
            return;
        }
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
                self.shared.wakers.signal.wake();
            }
            return;
        }
    }

    fn lanes_gone(&self) -> bool {
        self.shared.halves.load(Ordering::Acquire) == 0
    }
}

impl Channel for TcpChannel {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn post_send(&mut self, chunk: SendChunk) -> Result<Posted<SendChunk>, ChannelError> {
        self.admit(&chunk.source, chunk.sequence)?;
        let Some(slot) = self.free_sends.pop() else {
            return Ok(Posted::Full(chunk));
        };
        self.sends[usize::from(slot)] = SendSlot {
            token: Some(chunk.token),
            sequence: Some(chunk.sequence),
        };
        self.in_flight += 1;
        let SendChunk {
            sequence,
            transfer,
            offset,
            source,
            fence,
            ..
        } = chunk;
        let bytes = source.len();
        let (header, position) = describe(sequence, transfer, offset, bytes);
        if self.shared.staging.is_needed(&source) {
            let unstaged = Unstaged {
                header,
                position,
                source,
                fence,
            };
            let rest = match self.foreseen {
                0 => Some(unstaged),
                _ => self.shared.stage_ahead(slot, unstaged),
            };
            if let Some(unstaged) = rest {
                Shared::stage(&self.shared, slot, unstaged);
            }
        } else {
            drop::<Option<Fence>>(fence);
            self.shared.transmit.enqueue(Outgoing {
                slot,
                header,
                position,
                payload: source,
                attempt: 0,
                permit: None,
                spliced: None,
            });
            self.shared.wake_sender(bytes);
        }
        if self.shared.resend {
            self.shared.attention.draw();
        }
        Ok(Posted::Accepted)
    }

    fn foresee(&mut self, send: Foreseen) -> bool {
        let begun = self.admit_whole(&send.source) && Shared::foresee(&self.shared, send);
        self.foreseen += usize::from(begun);
        begun
    }

    fn post_receive(&mut self, chunk: ReceiveChunk) -> Result<Posted<ReceiveChunk>, ChannelError> {
        self.admit(&chunk.destination, chunk.sequence)?;
        chunk
            .destination
            .admits_writes()
            .map_err(|error| self.bad_request(error.to_string()))?;
        let slot = self.shared.receive.slot_of(chunk.sequence);
        let token = &mut self.receives[usize::from(slot)];
        if token.is_some() {
            return Ok(Posted::Full(chunk));
        }
        let next = self.shared.receive.next();
        if chunk.sequence < next {
            return Err(self.bad_request(format!(
                "chunk {} was posted after chunk {}; post in sequence order",
                chunk.sequence,
                next - 1
            )));
        }
        *token = Some(chunk.token);
        self.in_flight += 1;
        self.shared.receive.post(chunk);
        self.shared.wake_early();
        Ok(Posted::Accepted)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        self.shared.wakers.signal.clear();
        // First the question and then the events: those that came before the end are seen.
        let lanes_gone = self.lanes_gone();
        let ended = self.shared.ended();
        out.append(&mut self.found);
        self.drain_events(out);
        if self.foreseen > 0 {
            let ended = self.shared.ended_ahead();
            self.foreseen -= ended.len();
            out.extend(ended.into_iter().map(|token| Completion::Sent { token }));
        }
        if self.is_closing() {
            if lanes_gone {
                self.fail_remaining(out);
            }
            return Ok(());
        }
        match ended {
            Some(Ended::Broken(error)) => Err(error),
            Some(Ended::ByPeer) if self.in_flight > 0 => Err(self.shared.failure(self.in_flight)),
            Some(Ended::ByPeer) | None => Ok(()),
        }
    }

    fn consume(&mut self, ticket: Ticket) -> Result<Posted<Ticket>, ChannelError> {
        Err(self.bad_request(format!(
            "this network hands out no tickets, ticket {} arrived; only scattered receives are consumed",
            ticket.0
        )))
    }

    fn cancel(&mut self, token: u64) -> Cancel {
        if self.foreseen > 0
            && let Some(answer) = self.shared.cancel_ahead(token)
        {
            self.foreseen -= usize::from(answer == Cancel::Done);
            return answer;
        }
        let held = |slot: &SendSlot| slot.token == Some(token);
        if let Some(slot) = slot_where(&self.sends, held) {
            match self.shared.transmit.withdraw(slot) {
                Withdrawn::NotYet => return Cancel::Pending,
                Withdrawn::Later => {}
                Withdrawn::Now => self.free_sends.push(slot),
            }
            self.sends[usize::from(slot)].token = None;
            self.in_flight -= 1;
            return Cancel::Done;
        }
        let Some(slot) = slot_where(&self.receives, |held| *held == Some(token)) else {
            // It may have ended, and that was not asked for yet.
            return match self.found.iter().any(|one| one.ends(token)) {
                true => Cancel::Pending,
                false => Cancel::Done,
            };
        };
        match self.shared.receive.cancel(slot) {
            Withdrawal::Done => {
                self.receives[usize::from(slot)] = None;
                self.in_flight -= 1;
                Cancel::Done
            }
            Withdrawal::AskLane(lane) => {
                self.shared.wakers.wake_receivers(1 << lane);
                Cancel::Pending
            }
            Withdrawal::Ending => Cancel::Pending,
        }
    }

    fn discard(&mut self, first: u64, end: u64) {
        self.shared.receive.insert_discards(first..end);
        self.shared.wake_early();
    }

    fn placed(&mut self, sequence: u64) -> Result<(), ChannelError> {
        let held = |slot: &SendSlot| slot.sequence == Some(sequence);
        if self.shared.resend
            && let Some(slot) = slot_where(&self.sends, held)
            && self.shared.transmit.is_unsent(slot, sequence)
        {
            return Err(ChannelError::Protocol {
                channel: self.shared.name.clone(),
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

    fn peer_heard(&mut self, rested: bool) {
        self.shared.presence.note(rested);
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.shared.wakers.signal.as_fd())
    }

    fn set_looked_for(&mut self, looked_for: bool) {
        self.shared.wakers.signal.set_looked_for(looked_for);
    }

    fn set_sent_wanted(&mut self, wanted: bool) {
        self.shared.wakers.signal.set_wanted(wanted);
    }

    fn expect(&mut self, bytes: u64, direction: Direction) {
        // Where they could not look for what comes, they would only be woken twice.
        if !has_spare_cores() {
            return;
        }
        let chunks = bytes.div_ceil(LEAST_CHUNK_BYTES);
        self.shared.staging.rouse();
        self.shared
            .wakers
            .rouse(usize::try_from(chunks).unwrap_or(usize::MAX), direction);
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
        for lane in 0..self.shared.roster.lanes() {
            if let Some(remotes) = self.shared.wakers.take(lane) {
                remotes.transmit.remove();
                remotes.receive.remove();
            }
        }
        self.shared.give_back_ahead();
        self.shared.wakers.signal.wake();
    }

    fn closed(&self) -> bool {
        self.is_closing() && self.in_flight + self.foreseen == 0 && self.lanes_gone()
    }

    fn describe(&self) -> String {
        self.shared.name.clone()
    }

    fn is_alive(&self) -> bool {
        self.shared.roster.live() > 0
    }

    fn ways(&self) -> Vec<Way> {
        let Repair::Dial(dialler) = &self.shared.repair else {
            return Vec::new();
        };
        let mut ways: Vec<Way> = Vec::new();
        // Those of living lanes first.
        for living in [true, false] {
            for (lane, way) in (0u16..).zip(&dialler.routes) {
                let lives = self.shared.roster.socket(lane).is_some();
                if lives == living && !ways.contains(way) {
                    ways.push(way.clone());
                }
            }
        }
        ways
    }

    fn path(&self) -> String {
        format!("{}{}", self.shared.name, self.shared.ways)
    }

    fn lanes_beside(&self, address: IpAddr) -> u16 {
        let lanes = self.shared.roster.lanes();
        let leaves_there = |lane| {
            let socket = self.shared.roster.socket(lane);
            let local = socket.and_then(|socket| local_ip(&*socket));
            local == Some(address.to_canonical())
        };
        if (0..lanes).any(leaves_there) {
            lanes
        } else {
            0
        }
    }

    fn congestion_control(&self) -> Option<String> {
        let mut lanes = 0..self.shared.roster.lanes();
        let socket = lanes.find_map(|lane| self.shared.roster.socket(lane))?;
        congestion_control(&*socket)
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
