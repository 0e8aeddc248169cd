//! Chunks and windows to channels.

use std::time::Instant;

use tcpx_memory::{Fence, RegionSlice};
use tcpx_net::{ChannelError, PostAnswer, ReceiveChunk, ReceiveWindow, SendChunk};
use tcpx_wire::ChunkPlan;
use tcpx_wire::session::{DataFailure, OperationId};

use super::Core;
use super::operation::{InFlight, Token};
use crate::event::{ChunkEvent, Event};

impl Core {
    /// Opens the memory of a receive to the chunks that name this window.
    pub(super) fn open_window(&mut self, id: OperationId, window: u64, cut: ChunkPlan) {
        let bytes = usize::try_from(cut.bytes()).unwrap_or(usize::MAX);
        let (Some(operation), [state]) = (
            self.operations.get_mut(&id),
            self.channels.all.as_mut_slice(),
        ) else {
            return;
        };
        let destination = match operation.lease.slice(..bytes) {
            Ok(destination) => destination,
            Err(error) => return self.memory_failed(id, &error),
        };
        let token = self.tokens.add(Token::Window(id, Instant::now()));
        let opened = state.channel.open_window(ReceiveWindow {
            token,
            window,
            cut,
            destination,
            fence: operation.fence.clone(),
        });
        match opened {
            Ok(()) => {
                operation.window = Some(token);
                operation.outstanding += 1;
            }
            Err(error) => {
                self.tokens.open.remove(&token);
                self.channel_failed(0, error);
            }
        }
    }

    /// The chunk's bytes, and what they wait for.
    fn chunk_memory(
        &mut self,
        id: OperationId,
        event: &ChunkEvent,
    ) -> Option<(RegionSlice, Option<Fence>)> {
        let operation = self.operations.get_mut(&id)?;
        let start = usize::try_from(event.offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(event.length as usize);
        let failure = match operation.lease.slice(start..end) {
            Ok(slice) if usize::from(event.channel) < self.channels.all.len() => {
                return Some((slice, operation.fence.clone()));
            }
            Ok(_) => DataFailure::Misreport(format!("there is no channel {}", event.channel)),
            Err(error) => DataFailure::Memory(error.to_string()),
        };
        self.session
            .data_failed(self.clock.now(), id, Some(event.index), failure);
        None
    }

    /// Posts a chunk that the session wants sent, to a window and of a transfer of so many bytes,
    /// or queues it behind others: its copy from a GPU begins while the next ones are put together.
    pub(super) fn queue_send(
        &mut self,
        id: OperationId,
        event: ChunkEvent,
        sequence: u64,
        (window, total): (u64, u64),
    ) {
        let Some((source, fence)) = self.chunk_memory(id, &event) else {
            return;
        };
        let flight = InFlight {
            event,
            posted: Instant::now(),
        };
        let chunk = SendChunk {
            token: 0,
            sequence,
            transfer: event.transfer,
            offset: event.offset,
            index: event.index,
            total,
            window,
            tag: event.tag,
            source,
            fence,
        };
        let index = usize::from(event.channel);
        let sends = &mut self.channels.all[index].sends;
        sends.push_back((chunk, id, flight));
        if sends.len() == 1 {
            self.post_sends(index);
        }
    }

    /// Queues a chunk that the session awaits on an ordered network.
    pub(super) fn queue_receive(&mut self, id: OperationId, event: ChunkEvent, sequence: u64) {
        let Some((destination, fence)) = self.chunk_memory(id, &event) else {
            return;
        };
        let flight = InFlight {
            event,
            posted: Instant::now(),
        };
        let chunk = ReceiveChunk {
            token: 0,
            sequence,
            transfer: event.transfer,
            offset: event.offset,
            tag: event.tag,
            destination,
            fence,
        };
        let state = &mut self.channels.all[usize::from(event.channel)];
        state.receives.push_back((chunk, id, flight));
    }

    /// Posts queued chunks in order until the channels are full.
    pub(super) fn post_pending(&mut self) -> bool {
        if self.ending.has_begun() {
            return false;
        }
        let mut any = false;
        for index in 0..self.channels.all.len() {
            any |= self.post_receives(index);
            any |= self.post_sends(index);
        }
        any
    }

    fn post_receives(&mut self, index: usize) -> bool {
        let mut any = false;
        while let Some((mut chunk, id, mut flight)) = self.channels.all[index].receives.pop_front()
        {
            flight.posted = Instant::now();
            chunk.token = self.tokens.add_chunk(id, flight);
            let token = chunk.token;
            match self.channels.all[index].channel.post_receive(chunk) {
                Ok(PostAnswer::Accepted) => self.chunk_posted(id, flight),
                Ok(PostAnswer::Full(chunk)) => {
                    self.tokens.chunks.remove(&token);
                    self.channels.all[index]
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
        while let Some((mut chunk, id, mut flight)) = self.channels.all[index].sends.pop_front() {
            flight.posted = Instant::now();
            chunk.token = self.tokens.add_chunk(id, flight);
            let token = chunk.token;
            match self.channels.all[index].channel.post_send(chunk) {
                Ok(PostAnswer::Accepted) => self.chunk_posted(id, flight),
                Ok(PostAnswer::Full(chunk)) => {
                    self.tokens.chunks.remove(&token);
                    self.channels.all[index]
                        .sends
                        .push_front((chunk, id, flight));
                    return any;
                }
                Err(error) => self.post_failed(index, token, error),
            }
            any = true;
        }
        any
    }

    fn chunk_posted(&mut self, id: OperationId, flight: InFlight) {
        if let Some(operation) = self.operations.get_mut(&id) {
            operation.posted();
        }
        self.emit(&Event::ChunkPosted(flight.event));
    }

    /// A channel that refuses a well-formed chunk can carry nothing any more.
    fn post_failed(&mut self, index: usize, token: u64, error: ChannelError) {
        self.tokens.chunks.remove(&token);
        self.channel_failed(index, error);
    }
}
