//! The data plane of a connection: chunks to channels, fragments to the copy worker, pool space
//! back to the network.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use tcpx_memory::{BouncePool, Job, MemoryError, MemoryKind, Region, UnpackMethod, Work};
use tcpx_net::{
    Cancel, Channel, ChannelError, Completion, Payload, Posted, Readiness, ReceiveChunk, SendChunk,
    Ticket,
};
use tcpx_wire::Role;
use tcpx_wire::descriptor::{Descriptors, Limits};
use tcpx_wire::scatter::ScatterList;
use tcpx_wire::session::{DataFailure, OperationId};

use super::Core;
use super::operation::InFlight;
use crate::error::Error;
use crate::event::{ChunkEvent, Event};

/// Fragments shown in an event.
const SAMPLE: usize = 8;
/// Bytes of the first fragment shown in an event.
const PROBE: usize = 64;

/// A channel and what waits for it.
pub(super) struct ChannelState {
    pub(super) channel: Box<dyn Channel>,
    sends: VecDeque<(SendChunk, OperationId, InFlight)>,
    receives: VecDeque<(ReceiveChunk, OperationId, InFlight)>,
    /// Scattered receives in the order in which their pool space must go back.
    unconsumed: VecDeque<Unconsumed>,
    /// To be closed once nothing reads its pool any more.
    closing: bool,
    closed: bool,
}

struct Unconsumed {
    ticket: Ticket,
    operation: OperationId,
    flight: InFlight,
    /// Nothing reads the pool space any more.
    done: bool,
    /// The bytes are at their destination.
    placed: bool,
}

/// What a request or job was about.
pub(super) enum Token {
    Send(OperationId, InFlight),
    Receive(OperationId, InFlight),
    Unpack(OperationId, InFlight, Ticket),
    Digest(OperationId),
    Eager(OperationId),
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
        refused || (poll_only && (self.channel.in_flight() > 0 || !self.sends.is_empty()))
    }

    /// Closes the channel, which takes its pool with it, as soon as no unpack reads that.
    pub(super) fn close(&mut self) {
        self.closing = true;
        self.close_when_unread();
    }

    pub(super) fn closed(&self) -> bool {
        self.closed && self.channel.closed()
    }

    fn close_when_unread(&mut self) {
        if self.closing && !self.closed && self.unconsumed.iter().all(|entry| entry.done) {
            self.closed = true;
            self.channel.close();
        }
    }
}

impl Core {
    pub(super) fn new_token(&mut self, token: Token) -> u64 {
        self.next_token += 1;
        self.tokens.insert(self.next_token, token);
        self.next_token
    }

    /// Queues a chunk that the session wants on the wire.
    pub(super) fn queue_chunk(&mut self, id: OperationId, event: ChunkEvent, sequence: u64) {
        let now = self.now();
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        let start = usize::try_from(event.offset).unwrap_or(usize::MAX);
        let slice = operation
            .lease
            .slice(start..start.saturating_add(event.length as usize));
        let Some(state) = self.channels.get_mut(usize::from(event.channel)) else {
            let failure = DataFailure::Misreport(format!("there is no channel {}", event.channel));
            self.session
                .data_failed(now, id, Some(event.index), failure);
            return;
        };
        let slice = match slice {
            Ok(slice) => slice,
            Err(error) => {
                let failure = DataFailure::Memory(error.to_string());
                self.session
                    .data_failed(now, id, Some(event.index), failure);
                return;
            }
        };
        let flight = InFlight {
            event,
            posted: Instant::now(),
        };
        let fence = operation.fence.clone();
        match event.role {
            Role::Sender => {
                let chunk = SendChunk {
                    token: 0,
                    sequence,
                    transfer: event.transfer,
                    offset: event.offset,
                    tag: event.tag,
                    source: slice,
                    fence,
                };
                state.sends.push_back((chunk, id, flight));
            }
            Role::Receiver => {
                let chunk = ReceiveChunk {
                    token: 0,
                    sequence,
                    transfer: event.transfer,
                    offset: event.offset,
                    tag: event.tag,
                    destination: slice,
                    fence,
                };
                state.receives.push_back((chunk, id, flight));
            }
        }
    }

    /// Posts queued chunks in order until the channels are full.
    pub(super) fn post_pending(&mut self) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let mut any = false;
        for index in 0..self.channels.len() {
            any |= self.post_receives(index);
            any |= self.post_sends(index);
        }
        any
    }

    fn post_receives(&mut self, index: usize) -> bool {
        let mut any = false;
        while let Some((mut chunk, id, mut flight)) = self.channels[index].receives.pop_front() {
            flight.posted = Instant::now();
            chunk.token = self.new_token(Token::Receive(id, flight));
            let (token, sequence) = (chunk.token, chunk.sequence);
            match self.channels[index].channel.post_receive(chunk) {
                Ok(Posted::Accepted) => self.chunk_posted(id, flight, sequence),
                Ok(Posted::Full(chunk)) => {
                    self.tokens.remove(&token);
                    self.channels[index]
                        .receives
                        .push_front((chunk, id, flight));
                    return any;
                }
                Err(error) => self.post_failed(index, token, error),
            }
            any = true;
        }
        any
    }

    fn post_sends(&mut self, index: usize) -> bool {
        let mut any = false;
        while let Some((mut chunk, id, mut flight)) = self.channels[index].sends.pop_front() {
            flight.posted = Instant::now();
            chunk.token = self.new_token(Token::Send(id, flight));
            let (token, sequence) = (chunk.token, chunk.sequence);
            match self.channels[index].channel.post_send(chunk) {
                Ok(Posted::Accepted) => self.chunk_posted(id, flight, sequence),
                Ok(Posted::Full(chunk)) => {
                    self.tokens.remove(&token);
                    self.channels[index].sends.push_front((chunk, id, flight));
                    return any;
                }
                Err(error) => self.post_failed(index, token, error),
            }
            any = true;
        }
        any
    }

    fn chunk_posted(&mut self, id: OperationId, flight: InFlight, sequence: u64) {
        if let Some(operation) = self.operations.get_mut(&id) {
            operation.posted(sequence);
        }
        self.emit(&Event::ChunkPosted(flight.event));
    }

    /// A channel that refuses a well-formed chunk can carry nothing any more.
    fn post_failed(&mut self, index: usize, token: u64, error: ChannelError) {
        self.tokens.remove(&token);
        let error = Error::channel(self.peer, index, error);
        self.fail(error);
    }

    /// Takes what the channels have finished; `true` if anything was.
    pub(super) fn poll_channels(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.channels.len() {
            let mut completions = std::mem::take(&mut self.completions);
            let polled = self.channels[index].channel.poll(&mut completions);
            any |= !completions.is_empty();
            for completion in completions.drain(..) {
                self.completed(index, completion);
            }
            self.completions = completions;
            if let Err(error) = polled {
                let error = Error::channel(self.peer, index, error);
                self.fail(error);
            }
            self.consume_ready(index);
        }
        any
    }

    fn completed(&mut self, index: usize, completion: Completion) {
        let now = self.now();
        match completion {
            Completion::Sent { token } => {
                let Some(Token::Send(id, flight)) = self.tokens.remove(&token) else {
                    return;
                };
                if self.off_wire(id) {
                    self.session.chunk_sent(now, id, flight.event.index);
                    self.emit(&Event::ChunkSent(flight.event));
                }
            }
            Completion::Received { token, payload } => {
                let Some(Token::Receive(id, flight)) = self.tokens.remove(&token) else {
                    return;
                };
                match payload {
                    Payload::InPlace { bytes } => self.received_in_place(id, flight, bytes),
                    Payload::Scattered {
                        pool,
                        list,
                        bytes,
                        ticket,
                    } => {
                        self.emit_arrival(flight.event, &list, &pool);
                        let unpacking = self.unpack(id, flight, pool, &list, bytes, ticket);
                        self.channels[index].unconsumed.push_back(Unconsumed {
                            ticket,
                            operation: id,
                            flight,
                            done: !unpacking,
                            placed: false,
                        });
                    }
                }
            }
            Completion::Failed { token, error } => {
                let (Some(Token::Send(id, flight)) | Some(Token::Receive(id, flight))) =
                    self.tokens.remove(&token)
                else {
                    return;
                };
                if self.off_wire(id) {
                    let failure = DataFailure::Channel(error.to_string());
                    let index = Some(flight.event.index);
                    self.session.data_failed(now, id, index, failure);
                }
            }
        }
    }

    fn received_in_place(&mut self, id: OperationId, flight: InFlight, bytes: u64) {
        if !self.off_wire(id) {
            return;
        }
        let now = self.now();
        // The session compares the length with the plan and fails the operation if it is wrong.
        self.session
            .chunk_arrived(now, id, flight.event.index, bytes);
        if bytes == u64::from(flight.event.length) {
            self.placed(id, flight);
        }
    }

    /// Hands fragments to the copy worker; `false` if that was not possible or not wanted.
    fn unpack(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: Arc<BouncePool>,
        list: &ScatterList,
        bytes: u64,
        ticket: Ticket,
    ) -> bool {
        let now = self.now();
        let index = flight.event.index;
        let Some(operation) = self.operations.get_mut(&id) else {
            return false;
        };
        if operation.stopped {
            self.off_wire(id);
            return false;
        }
        self.session.chunk_arrived(now, id, index, bytes);
        match self.unpack_job(id, flight, pool, list, bytes) {
            Ok(work) => {
                if let Some(operation) = self.operations.get_mut(&id) {
                    operation.off_wire(true);
                    operation.fragments += list.len() as u64;
                }
                let token = self.new_token(Token::Unpack(id, flight, ticket));
                self.submit(work, token, id);
                true
            }
            Err(failure) => {
                self.off_wire(id);
                self.session.data_failed(now, id, Some(index), failure);
                false
            }
        }
    }

    fn unpack_job(
        &mut self,
        id: OperationId,
        flight: InFlight,
        pool: Arc<BouncePool>,
        list: &ScatterList,
        bytes: u64,
    ) -> Result<Work, DataFailure> {
        let length = u64::from(flight.event.length);
        let limits = Limits {
            pool_bytes: pool.len() as u64,
            destination_bytes: length,
            received_bytes: bytes,
        };
        let mut descriptors = Descriptors::with_capacity(list.len());
        descriptors
            .build(list, limits)
            .map_err(|error| DataFailure::Misreport(error.to_string()))?;
        let gone = || DataFailure::Misreport("its operation has ended".to_owned());
        let operation = self.operations.get_mut(&id).ok_or_else(gone)?;
        let start = usize::try_from(flight.event.offset).unwrap_or(usize::MAX);
        let to = operation
            .lease
            .slice(start..start.saturating_add(flight.event.length as usize))
            .map_err(|error| DataFailure::Memory(error.to_string()))?;
        let with = self
            .unpacker
            .method
            .unwrap_or_else(|| UnpackMethod::automatic(pool.kind(), to.kind()));
        operation.method = Some(with);
        Ok(Work::Unpack {
            pool: (*pool).clone(),
            descriptors: Arc::new(descriptors),
            to,
            with,
        })
    }

    /// Gives a job to the copy worker; a refusal is its result.
    pub(super) fn submit(&mut self, work: Work, token: u64, id: OperationId) {
        let fence = self.operations.get(&id).and_then(|op| op.fence.clone());
        let sink = Arc::clone(&self.sink);
        let job = Job {
            work,
            fence,
            sink,
            token,
        };
        if let Err(refused) = self.unpacker.worker.submit(job) {
            self.job_finished(token, Err(refused.error));
        }
    }

    /// Takes what the copy worker has finished; `true` if anything was.
    pub(super) fn drain_worker(&mut self) -> bool {
        let mut finished = std::mem::take(&mut self.finished_jobs);
        self.sink.take(&mut finished);
        let any = !finished.is_empty();
        for (token, result) in finished.drain(..) {
            self.job_finished(token, result);
        }
        self.finished_jobs = finished;
        any
    }

    fn job_finished(&mut self, token: u64, result: Result<u64, MemoryError>) {
        let now = self.now();
        match self.tokens.remove(&token) {
            Some(Token::Unpack(id, flight, ticket)) => {
                let stopped = self.unpacked(id);
                let placed = result.is_ok() && !stopped;
                let channel = usize::from(flight.event.channel);
                let queue = &mut self.channels[channel].unconsumed;
                if let Some(entry) = queue.iter_mut().find(|entry| entry.ticket == ticket) {
                    entry.done = true;
                    entry.placed = placed;
                }
                if let (Err(error), false) = (result, stopped) {
                    let index = Some(flight.event.index);
                    let failure = DataFailure::Memory(error.to_string());
                    self.session.data_failed(now, id, index, failure);
                }
                self.consume_ready(channel);
            }
            Some(Token::Digest(id)) => {
                if self.job_off(id) {
                    match result {
                        Ok(crc) => {
                            // The worker answers a CRC32C: 32 bits.
                            let crc = u32::try_from(crc).unwrap_or_default();
                            if let Some(operation) = self.operations.get_mut(&id) {
                                operation.digest = Some(crc);
                            }
                            self.session.digest(now, id, crc);
                        }
                        Err(error) => self.memory_failed(id, &error),
                    }
                }
            }
            Some(Token::Eager(id)) => {
                if self.job_off(id) {
                    match result {
                        Ok(_) => self.session.eager_copied(now, id),
                        Err(error) => self.memory_failed(id, &error),
                    }
                }
            }
            Some(Token::Send(..) | Token::Receive(..)) | None => {}
        }
    }

    /// Gives pool space back in order, as far as unpacking has come.
    fn consume_ready(&mut self, index: usize) {
        self.channels[index].close_when_unread();
        while let Some(first) = self.channels[index].unconsumed.front() {
            if !first.done {
                return;
            }
            let (ticket, id, flight, placed) =
                (first.ticket, first.operation, first.flight, first.placed);
            if !self.channels[index].closing {
                match self.channels[index].channel.consume(ticket) {
                    Ok(Posted::Accepted) => {}
                    Ok(Posted::Full(_)) => return,
                    Err(error) => {
                        let error = Error::channel(self.peer, index, error);
                        self.fail(error);
                    }
                }
            }
            self.channels[index].unconsumed.pop_front();
            let stopped = self.operations.get(&id).is_none_or(|op| op.stopped);
            if placed && !stopped {
                self.placed(id, flight);
            }
        }
        self.channels[index].close_when_unread();
    }

    fn placed(&mut self, id: OperationId, flight: InFlight) {
        let now = self.now();
        if let Some(operation) = self.operations.get(&id) {
            operation.state.add_done(u64::from(flight.event.length));
        }
        self.session.chunk_placed(now, id, flight.event.index);
        self.emit(&Event::ChunkPlaced {
            chunk: flight.event,
            elapsed: flight.posted.elapsed(),
        });
    }

    /// Accounts a request that has ended; `true` if the session still wants to hear of it.
    fn off_wire(&mut self, id: OperationId) -> bool {
        let Some(operation) = self.operations.get_mut(&id) else {
            return false;
        };
        operation.off_wire(false);
        let wanted = !operation.stopped;
        self.settle_operation(id);
        wanted
    }

    /// Accounts a finished unpack; `true` if the operation was stopped meanwhile.
    fn unpacked(&mut self, id: OperationId) -> bool {
        let Some(operation) = self.operations.get_mut(&id) else {
            return true;
        };
        operation.unpacked();
        let stopped = operation.stopped;
        self.settle_operation(id);
        stopped
    }

    /// Accounts a finished digest or eager copy; `true` if the session still wants to hear of it.
    fn job_off(&mut self, id: OperationId) -> bool {
        let Some(operation) = self.operations.get_mut(&id) else {
            return false;
        };
        operation.outstanding -= 1;
        let wanted = !operation.stopped;
        self.settle_operation(id);
        wanted
    }

    /// Stops everything that points at the memory of `id`; the session hears `data_quiet` once
    /// nothing does.
    pub(super) fn stop_data(&mut self, id: OperationId) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        operation.stopped = true;
        operation.quiet_owed = true;
        let role = operation.role;
        let unposted = operation.sequences.clone();
        let in_flight: Vec<(u64, u16)> = self
            .tokens
            .iter()
            .filter_map(|(token, what)| match what {
                Token::Send(of, flight) | Token::Receive(of, flight) if *of == id => {
                    Some((*token, flight.event.channel))
                }
                _ => None,
            })
            .collect();
        let mut must_close = false;
        for (token, channel) in in_flight {
            match self.channels[usize::from(channel)].channel.cancel(token) {
                Cancel::Done => {
                    self.tokens.remove(&token);
                    self.off_wire(id);
                }
                Cancel::Pending => {}
                Cancel::Unsupported => must_close = true,
            }
        }
        for state in &mut self.channels {
            state.sends.retain(|(_, of, _)| *of != id);
            state.receives.retain(|(_, of, _)| *of != id);
            if role == Role::Receiver {
                // The peer may still send what was granted and will now never be posted.
                state.channel.discard(unposted.start, unposted.end);
            }
        }
        if must_close {
            // Only closing gets the memory back from a network that cannot cancel.
            for state in &mut self.channels {
                state.close();
            }
        }
        self.settle_operation(id);
    }

    /// Digest of the whole operation, for level *verified*.
    pub(super) fn start_digest(&mut self, id: OperationId, bytes: u64) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        match operation.lease.slice(..length) {
            Ok(of) => {
                operation.outstanding += 1;
                let token = self.new_token(Token::Digest(id));
                self.submit(Work::Checksum { of }, token, id);
            }
            Err(error) => self.memory_failed(id, &error),
        }
    }

    /// Copies an eager payload to its destination.
    pub(super) fn deliver_eager(&mut self, id: OperationId, payload: &[u8]) {
        let now = self.now();
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        if payload.is_empty() {
            self.session.eager_copied(now, id);
            return;
        }
        let copied = operation.lease.slice(..payload.len()).and_then(|to| {
            if !matches!(to.kind(), MemoryKind::Cuda { .. }) {
                // The slice rides on the operation's lease, so this is the only writer.
                return to.write_from(payload).map(|()| None);
            }
            let staging = Region::host(payload.len())?;
            staging.write_from(0, payload)?;
            let from = staging.all();
            Ok(Some(Work::Copy { from, to }))
        });
        match copied {
            Ok(None) => self.session.eager_copied(now, id),
            Ok(Some(work)) => {
                operation.outstanding += 1;
                let token = self.new_token(Token::Eager(id));
                self.submit(work, token, id);
            }
            Err(error) => self.memory_failed(id, &error),
        }
    }

    fn memory_failed(&mut self, id: OperationId, error: &MemoryError) {
        let now = self.now();
        let failure = DataFailure::Memory(error.to_string());
        self.session.data_failed(now, id, None, failure);
    }

    fn emit_arrival(&self, chunk: ChunkEvent, list: &ScatterList, pool: &BouncePool) {
        if self.observer.is_none() {
            return;
        }
        let fragments = list.fragments();
        let sample = fragments
            .iter()
            .take(SAMPLE)
            .map(|f| (f.source_offset, f.length, f.destination_offset))
            .collect();
        let probe = fragments.first().and_then(|first| {
            let start = usize::try_from(first.source_offset).ok()?;
            let length = usize::try_from(first.length).ok()?.min(PROBE);
            let mut bytes = vec![0; length];
            let part = pool.slice().slice(start..start.checked_add(length)?).ok()?;
            part.read_to(&mut bytes).ok()?;
            Some(bytes)
        });
        self.emit(&Event::ChunkArrived {
            chunk,
            fragments: fragments.len(),
            sample,
            probe,
        });
    }
}
