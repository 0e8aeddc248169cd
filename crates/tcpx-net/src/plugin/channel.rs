//! One channel of a plugin: a send comm and a receive comm.

use std::collections::VecDeque;
use std::sync::Arc;

use nccl_net::{Done, HostError, LoadMeta, MemoryType, PostOutcome, RecvComm, SendComm};
use tcpx_memory::{CudaError, Fence, MemoryKind, RegionSlice};
use tcpx_wire::{Fragment, ScatterList};

use super::PluginMemory;
use super::closer::{Closer, Closing, LONG_CLOSE};
use super::offload::Offload;
use super::registrations::{LARGEST_REQUEST, Registrations};
use super::set_up::Started;
use crate::channel::{
    Cancel, Channel, ChannelStats, Completion, Payload, PendingClose, PostAnswer, Readiness,
    ReceiveChunk, SendChunk, Ticket,
};
use crate::error::ChannelError;
use crate::network::Side;

/// Requests that a plugin holds per comm.
const MAX_IN_FLIGHT: u16 = 16;
/// Largest receive that a device queue slot can describe: 2,048 fragments of 4 KiB at most, half
/// of them possibly cut by segment boundaries.
const LARGEST_UNPACKED: u64 = 4 << 20;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct PluginChannel {
    name: String,
    /// `None` once closed.
    send: Option<SendComm>,
    receive: Option<RecvComm>,
    send_registrations: Registrations,
    receive_registrations: Registrations,
    /// The plugin and its memory; held so that a plugin's `finalize` runs after the last channel,
    /// and delays no close.
    started: Arc<Started>,
    offload: Option<Offload>,
    sends: VecDeque<(u64, RegionSlice)>,
    receives: VecDeque<Receiving>,
    /// Received and not yet consumed, in the plugin's order.
    unconsumed: VecDeque<Unconsumed>,
    entries: Vec<LoadMeta>,
    /// Lists that came back.
    lists: Vec<ScatterList>,
    failed: Vec<Completion>,
    closer: Arc<Closer>,
    side: Side,
    closing: Vec<ClosingComm>,
    stats: ChannelStats,
}

/// The close of one comm, which holds what the comm may still use: the registrations, and the
/// memory of requests in flight.
#[derive(Debug)]
struct ClosingComm {
    close: Closing,
    /// Requests that were in flight on the comm.
    tokens: Vec<u64>,
    /// That it takes long was logged.
    logged: bool,
}

#[derive(Debug)]
struct Receiving {
    token: u64,
    destination: RegionSlice,
    kind: MemoryType,
}

#[derive(Debug)]
struct Unconsumed {
    ticket: nccl_net::Ticket,
    /// Nothing reads its pool space any more.
    ready: bool,
}

impl PluginChannel {
    pub(super) fn new(
        name: String,
        send: SendComm,
        receive: RecvComm,
        started: Arc<Started>,
        offload: Option<Offload>,
        (closer, side): (Arc<Closer>, Side),
    ) -> Self {
        Self {
            name,
            send: Some(send),
            receive: Some(receive),
            send_registrations: Registrations::default(),
            receive_registrations: Registrations::default(),
            started,
            offload,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            unconsumed: VecDeque::new(),
            entries: Vec::new(),
            lists: Vec::new(),
            failed: Vec::new(),
            closer,
            side,
            closing: Vec::new(),
            stats: ChannelStats::default(),
        }
    }

    fn error(&self, call: &'static str, error: &HostError) -> ChannelError {
        ChannelError::Plugin {
            channel: self.name.clone(),
            call,
            cause: error.to_string(),
        }
    }

    /// The plugin takes device pointers.
    fn takes_cuda(&self) -> bool {
        self.started.properties.pointer_support.cuda()
    }

    /// How the plugin is told of this memory.
    fn memory_type(&self, slice: &RegionSlice) -> Result<MemoryType, ChannelError> {
        match (&self.started.memory, slice.kind()) {
            (PluginMemory::StandIn, MemoryKind::Host) => Ok(MemoryType::Cuda),
            (_, MemoryKind::Host | MemoryKind::Pinned) => Ok(MemoryType::Host),
            (PluginMemory::Gpu(gpu), MemoryKind::Cuda { device })
                if self.takes_cuda() && gpu.ordinal() == device =>
            {
                Ok(MemoryType::Cuda)
            }
            (_, kind) => Err(ChannelError::BadRequest {
                channel: self.name.clone(),
                reason: format!(
                    "the plugin was set up without {kind}; use host memory or a plugin and device that take it"
                ),
            }),
        }
    }

    fn check_length(&self, slice: &RegionSlice, kind: MemoryType) -> Result<(), ChannelError> {
        let largest = self.largest(kind);
        if slice.len() as u64 <= largest {
            return Ok(());
        }
        Err(ChannelError::BadRequest {
            channel: self.name.clone(),
            reason: format!(
                "one request carries at most {largest} bytes, {} were given; use smaller chunks",
                slice.len()
            ),
        })
    }

    fn largest(&self, kind: MemoryType) -> u64 {
        if self.offload.is_some() && kind == MemoryType::Cuda {
            LARGEST_UNPACKED
        } else {
            LARGEST_REQUEST as u64
        }
    }

    /// Has a comm closed on the connection's closing thread.
    fn close_comm<C: Send + 'static>(
        &mut self,
        call: &'static str,
        comm: C,
        close: fn(C) -> Result<(), HostError>,
        tokens: Vec<u64>,
        held: impl Send + 'static,
    ) {
        let (name, memory) = (self.name.clone(), self.started.memory.clone());
        let close = self.closer.run(call, move || {
            // Dropped in the other order, whatever happens.
            let held = held;
            let comm = comm;
            let entered = memory.enter();
            if let Err(error) = &entered {
                tracing::warn!(channel = %name, %error, "entering the GPU's context to close");
            }
            if let Err(error) = close(comm) {
                tracing::warn!(channel = %name, call, %error, "closing a comm of the plugin");
            }
            drop(held);
        });
        self.closing.push(ClosingComm {
            close,
            tokens,
            logged: false,
        });
    }

    fn close_send(&mut self) {
        let (tokens, sources): (Vec<_>, Vec<_>) = self.sends.drain(..).unzip();
        if let Some(send) = self.send.take() {
            let held = (std::mem::take(&mut self.send_registrations), sources);
            self.close_comm("deregMr or closeSend", send, SendComm::close, tokens, held);
        }
    }

    fn close_receive(&mut self, receive: Option<RecvComm>) {
        let receiving = self.receives.drain(..);
        let (tokens, targets) = receiving.map(|one| (one.token, one.destination)).unzip();
        let registrations = std::mem::take(&mut self.receive_registrations);
        let held: (_, Vec<_>) = (registrations, targets);
        let call = "deregMr or closeRecv";
        match receive {
            Some(receive) => self.close_comm(call, receive, RecvComm::close, tokens, held),
            None => self.fail_requests(tokens),
        }
    }

    /// Nothing points at the memory of these requests any more.
    fn fail_requests(&mut self, tokens: Vec<u64>) {
        let error = self.closed_error();
        let failed = tokens.into_iter().map(|token| Completion::Failed {
            token,
            error: error.clone(),
        });
        self.failed.extend(failed);
    }

    /// Takes note of closes that have come back, and logs those that take long.
    fn look_at_closing(&mut self) {
        let mut at = 0;
        while let Some(closing) = self.closing.get_mut(at) {
            if closing.close.ended() {
                let closing = self.closing.remove(at);
                self.fail_requests(closing.tokens);
                continue;
            }
            let pending = closing.close.pending();
            if pending.since.elapsed() >= LONG_CLOSE && !closing.logged {
                closing.logged = true;
                tracing::warn!(
                    channel = %self.name,
                    call = pending.call,
                    "the plugin has not come back from closing a comm; it keeps the comm's memory until then"
                );
            }
            at += 1;
        }
    }

    fn closed_error(&self) -> ChannelError {
        ChannelError::Closed {
            channel: self.name.clone(),
        }
    }

    fn poll_sends(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        while !self.sends.is_empty() {
            let Some(comm) = &mut self.send else { break };
            let done = comm.test_head();
            match done {
                Ok(Some(_)) => {
                    if let Some((token, slice)) = self.sends.pop_front() {
                        self.stats.chunks_sent += 1;
                        self.stats.bytes_sent += slice.len() as u64;
                        out.push(Completion::Sent { token });
                    }
                }
                Ok(None) => break,
                Err(error) => return Err(self.error("test (send)", &error)),
            }
        }
        Ok(())
    }

    fn poll_receives(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        while !self.receives.is_empty() {
            let Some(comm) = &mut self.receive else { break };
            let done = comm.test_head();
            match done {
                Ok(Some(done)) => {
                    let Some(receiving) = self.receives.pop_front() else {
                        break;
                    };
                    let completion = self.received(receiving, &done)?;
                    out.push(completion);
                    self.consume_ready()?;
                }
                Ok(None) => break,
                Err(error) => return Err(self.error("test (receive)", &error)),
            }
        }
        Ok(())
    }

    /// Turns a finished receive into what the engine understands.
    fn received(&mut self, from: Receiving, done: &Done) -> Result<Completion, ChannelError> {
        // A plugin need not write the size. The engine compares this with what was announced; for
        // fragments, their sum must give it too.
        let bytes = done.bytes.unwrap_or(from.destination.len()) as u64;
        self.stats.chunks_received += 1;
        self.stats.bytes_received += bytes;
        let scattered = from.kind == MemoryType::Cuda;
        let Some(slot) = done.slot else {
            return Ok(Completion::Received {
                token: from.token,
                payload: Payload::InPlace { bytes },
            });
        };
        // Every receive of a comm with a device queue takes a slot, whatever memory it went to.
        let ticket = done.ticket;
        let unpacks = self.offload.as_ref().filter(|_| scattered);
        let ready = unpacks.is_none();
        self.unconsumed.push_back(Unconsumed { ticket, ready });
        let payload = match unpacks {
            Some(offload) => {
                offload
                    .take(slot, &mut self.entries)
                    .map_err(|error| ChannelError::Plugin {
                        channel: self.name.clone(),
                        call: "test (device queue)",
                        cause: error.to_string(),
                    })?;
                Payload::Scattered {
                    pool: Arc::clone(offload.pool()),
                    list: scatter_list(&self.entries, self.lists.pop().unwrap_or_default()),
                    bytes,
                    ticket: Ticket(ticket.0),
                }
            }
            None => Payload::InPlace { bytes },
        };
        Ok(Completion::Received {
            token: from.token,
            payload,
        })
    }

    /// Gives slots back to the plugin, in its order.
    fn consume_ready(&mut self) -> Result<(), ChannelError> {
        while self.unconsumed.front().is_some_and(|first| first.ready) {
            let (Some(first), Some(comm)) = (self.unconsumed.pop_front(), &mut self.receive) else {
                break;
            };
            if let Err(error) = comm.consume_next(first.ticket) {
                return Err(self.error("irecvConsumed", &error));
            }
        }
        Ok(())
    }
}

fn scatter_list(entries: &[LoadMeta], mut list: ScatterList) -> ScatterList {
    list.clear();
    list.extend(entries.iter().map(|entry| Fragment {
        source_offset: u64::from(entry.src_off),
        length: entry.len,
        destination_offset: entry.dst_off,
    }));
    list
}

impl Channel for PluginChannel {
    fn recycle(&mut self, list: ScatterList) {
        if self.lists.len() < usize::from(MAX_IN_FLIGHT) {
            self.lists.push(list);
        }
    }

    fn post_send(&mut self, chunk: SendChunk) -> Result<PostAnswer<SendChunk>, ChannelError> {
        let kind = self.memory_type(&chunk.source)?;
        self.check_length(&chunk.source, kind)?;
        let Some(comm) = &mut self.send else {
            return Err(self.closed_error());
        };
        if !reached(&self.name, chunk.fence.as_ref())? {
            return Ok(PostAnswer::Full(chunk));
        }
        let _entered = self
            .started
            .memory
            .enter()
            .map_err(|error| entering(&self.name, &error))?;
        let length = chunk.source.len();
        let posted = self
            .send_registrations
            .of_send(comm, &chunk.source, kind)
            .and_then(|at| comm.isend(&at.memory, at.offset, length, tag(chunk.tag)));
        match posted {
            Ok(PostOutcome::Posted(_)) => {
                self.sends.push_back((chunk.token, chunk.source));
                Ok(PostAnswer::Accepted)
            }
            Ok(PostOutcome::Full) => Ok(PostAnswer::Full(chunk)),
            Err(error) => Err(self.error("isend", &error)),
        }
    }

    fn post_receive(
        &mut self,
        chunk: ReceiveChunk,
    ) -> Result<PostAnswer<ReceiveChunk>, ChannelError> {
        let kind = self.memory_type(&chunk.destination)?;
        self.check_length(&chunk.destination, kind)?;
        let may_write = chunk.destination.admits_writes();
        may_write.map_err(|error| ChannelError::BadRequest {
            channel: self.name.clone(),
            reason: error.to_string(),
        })?;
        let Some(comm) = &mut self.receive else {
            return Err(self.closed_error());
        };
        // Where fragments are unpacked, the copy worker waits for the program's GPU work.
        if self.offload.is_none() && !reached(&self.name, chunk.fence.as_ref())? {
            return Ok(PostAnswer::Full(chunk));
        }
        let _entered = self
            .started
            .memory
            .enter()
            .map_err(|error| entering(&self.name, &error))?;
        let length = chunk.destination.len();
        let posted = self
            .receive_registrations
            .of_receive(comm, &chunk.destination, kind)
            .and_then(|at| comm.irecv(&at.memory, at.offset, length, tag(chunk.tag)));
        match posted {
            Ok(PostOutcome::Posted(_)) => {
                self.receives.push_back(Receiving {
                    token: chunk.token,
                    destination: chunk.destination,
                    kind,
                });
                Ok(PostAnswer::Accepted)
            }
            Ok(PostOutcome::Full) => Ok(PostAnswer::Full(chunk)),
            Err(error) => Err(self.error("irecv", &error)),
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        self.look_at_closing();
        out.append(&mut self.failed);
        if self.sends.is_empty() && self.receives.is_empty() {
            return Ok(());
        }
        let _entered = self
            .started
            .memory
            .enter()
            .map_err(|error| entering(&self.name, &error))?;
        self.poll_sends(out)?;
        self.poll_receives(out)?;
        if self.sends.is_empty() && self.receives.is_empty() {
            self.send_registrations.forget_unused();
            self.receive_registrations.forget_unused();
        }
        Ok(())
    }

    fn consume(&mut self, ticket: Ticket) -> Result<PostAnswer<Ticket>, ChannelError> {
        let entry = self
            .unconsumed
            .iter_mut()
            .find(|entry| entry.ticket.0 == ticket.0 && !entry.ready);
        let Some(entry) = entry else {
            return Err(ChannelError::BadRequest {
                channel: self.name.clone(),
                reason: format!("receive {} waits for no consumption", ticket.0),
            });
        };
        entry.ready = true;
        let _entered = self
            .started
            .memory
            .enter()
            .map_err(|error| entering(&self.name, &error))?;
        self.consume_ready()?;
        Ok(PostAnswer::Accepted)
    }

    fn cancel(&mut self, token: u64) -> Cancel {
        let in_flight = self.sends.iter().any(|(of, _)| *of == token)
            || self
                .receives
                .iter()
                .any(|receiving| receiving.token == token);
        let mut closing = self.closing.iter().flat_map(|closing| &closing.tokens);
        if in_flight {
            Cancel::Unsupported
        } else if closing.any(|of| *of == token) || self.failed.iter().any(|end| end.ends(token)) {
            Cancel::Pending
        } else {
            Cancel::Done
        }
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::PollOnly
    }

    fn in_flight(&self) -> usize {
        let closing = self.closing.iter().map(|closing| closing.tokens.len());
        self.sends.len() + self.receives.len() + self.failed.len() + closing.sum::<usize>()
    }

    fn close(&mut self) {
        let mut receive = self.receive.take();
        if self.offload.as_ref().is_some_and(Offload::is_read) {
            // The plugin frees its pool with the comm: better a comm too many than a stray read.
            tracing::error!(channel = %self.name, "closed while its pool is read; one comm stays open");
            std::mem::forget(receive.take());
        }
        self.unconsumed.clear();
        // Closing a comm is the only way to get memory back from a plugin; what it used goes after.
        // One end closes what it sends on first, the other what it receives on, should each wait
        // for the other.
        match self.side {
            Side::Server => {
                self.close_send();
                self.close_receive(receive);
            }
            Side::Client => {
                self.close_receive(receive);
                self.close_send();
            }
        }
    }

    fn closed(&self) -> bool {
        self.send.is_none() && self.closing.is_empty() && self.failed.is_empty()
    }

    fn pending_close(&self) -> Option<PendingClose> {
        let pending = self.closing.iter().map(|closing| closing.close.pending());
        pending.min_by_key(|pending| pending.since)
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn stats(&self) -> ChannelStats {
        self.stats
    }
}

impl Drop for PluginChannel {
    fn drop(&mut self) {
        if self.send.is_some() {
            self.close();
        }
    }
}

/// Whether the program's GPU work has come to where the plugin may touch the memory. A plugin reads
/// and writes on its own: nothing that it does can be made to wait for an event.
fn reached(channel: &str, fence: Option<&Fence>) -> Result<bool, ChannelError> {
    fence.map_or(Ok(true), |fence| {
        fence.is_reached().map_err(|error| ChannelError::Memory {
            channel: channel.to_owned(),
            operation: "waiting for the program's GPU work",
            cause: error.to_string(),
        })
    })
}

fn entering(channel: &str, error: &CudaError) -> ChannelError {
    ChannelError::Memory {
        channel: channel.to_owned(),
        operation: "entering the GPU's context",
        cause: error.to_string(),
    }
}

/// Plugins take 32-bit tags and ignore them; the low half is enough for their logs.
fn tag(tag: u64) -> i32 {
    (tag & 0x7fff_ffff) as i32
}
