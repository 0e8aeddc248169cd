//! Chunks to channels, in the order of their sequence.

use std::time::Instant;

use tcpx_net::{ChannelError, Posted, ReceiveChunk, SendChunk};
use tcpx_wire::Role;
use tcpx_wire::session::{DataFailure, OperationId};

use super::Core;
use super::operation::InFlight;
use super::tokens::Token;
use crate::event::{ChunkEvent, Event};

impl Core {
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
        self.channel_failed(index, error);
    }
}
