//! What channels have finished, and pool space back to them.

use tcpx_lanes::lock;
use tcpx_memory::BouncePool;
use tcpx_net::{Completion, Payload, PostAnswer, Ticket};
use tcpx_wire::ScatterList;
use tcpx_wire::session::{DataFailure, OperationId};
use tcpx_wire::{Role, TransferId};

use super::Core;
use super::channels::Unconsumed;

use super::operation::{InFlight, Operation, Token};
use crate::event::{ChunkEvent, Event};

impl Core {
    /// Takes what the channels have finished; `true` if anything was.
    pub(super) fn poll_channels(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.channels.all.len() {
            let mut completions = std::mem::take(&mut self.channels.completions);
            let polled = self.channels.all[index].channel.poll(&mut completions);
            any |= !completions.is_empty();
            let mut have_come = 0;
            for completion in completions.drain(..) {
                have_come += usize::from(matches!(
                    completion,
                    Completion::Closed { touched: true, .. }
                ));
                self.completed(index, completion);
            }
            self.channels.alone.have_come(have_come);
            self.channels.completions = completions;
            if let Err(error) = polled {
                self.channel_failed(index, error);
            }
            self.consume_ready(index);
        }
        any
    }

    fn completed(&mut self, index: usize, completion: Completion) {
        let now = self.clock.now();
        match completion {
            Completion::Sent { token } => {
                let Some((id, flight)) = self.tokens.chunks.remove(&token) else {
                    return;
                };
                if self.operations.get(&id).is_some_and(|op| op.stopped) {
                    // Before the operation may be quiet: the network keeps the chunk for sending
                    // again.
                    self.session.chunk_sent(now, id, flight.event.index);
                }
                if self.off_wire(id) {
                    self.session.chunk_sent(now, id, flight.event.index);
                    self.emit(&Event::ChunkSent(flight.event));
                }
            }
            Completion::Part {
                token,
                pool,
                list,
                ticket,
            } => {
                if let Some(&(id, flight)) = self.tokens.chunks.get(&token) {
                    self.scattered(index, (id, flight), &pool, &list, ticket, None);
                }
            }
            Completion::PathChanged { path, why } => self.path_changed(index, path, why),
            Completion::LaneMissing { lane } => self.session.ask_for_lane(lane),
            Completion::Received { token, payload } => {
                let Some((id, flight)) = self.tokens.chunks.remove(&token) else {
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
                        let last = Some(bytes);
                        self.scattered(index, (id, flight), &pool, &list, ticket, last);
                        self.channels.all[index].channel.recycle(list);
                    }
                }
            }
            Completion::Begun { token, cut } => {
                self.channels.alone.begins();
                if let Some(Token::Window(id, _)) = self.tokens.open.get(&token)
                    && self.operations.get(id).is_some_and(|op| !op.stopped)
                {
                    self.session.window_begins(now, *id, cut);
                }
            }
            Completion::Placed {
                token,
                index: chunk,
                offset,
                bytes,
            } => self.placed_in_window(token, chunk, offset, bytes),
            Completion::NotPlaced {
                token,
                index: chunk,
                error,
            } => {
                if let Some(Token::Window(id, _)) = self.tokens.open.get(&token) {
                    let failure = DataFailure::Channel(error.to_string());
                    self.session.data_failed(now, *id, Some(chunk), failure);
                }
            }
            Completion::Closed { token, touched } => {
                if let Some(Token::Window(id, _)) = self.tokens.open.remove(&token) {
                    if touched {
                        self.session.window_touched(id);
                    }
                    self.window_closed(id);
                }
            }
            Completion::Failed { token, error } => {
                if let Some(Token::Window(id, _)) = self.tokens.open.remove(&token) {
                    // Whether anything came is not known.
                    self.session.window_touched(id);
                    if self.window_closed(id) {
                        let failure = DataFailure::Channel(error.to_string());
                        self.session.data_failed(now, id, None, failure);
                    }
                } else if let Some((id, flight)) = self.tokens.chunks.remove(&token)
                    && self.off_wire(id)
                {
                    let event = flight.event;
                    let (transfer, channel) = (TransferId(event.transfer), event.channel);
                    let failure = DataFailure::Channel(format!(
                        "transfer {transfer} channel {channel} offset {}: {error}",
                        event.offset
                    ));
                    let index = Some(event.index);
                    self.session.data_failed(now, id, index, failure);
                }
            }
        }
    }

    /// Unpacks what has come of a chunk; of a part at once, so that its pool space goes back before
    /// the rest comes.
    fn scattered(
        &mut self,
        index: usize,
        (operation, flight): (OperationId, InFlight),
        pool: &BouncePool,
        list: &ScatterList,
        ticket: Ticket,
        last: Option<u64>,
    ) {
        self.emit_arrival(flight.event, list, pool);
        self.channels.all[index].unconsumed.push_back(Unconsumed {
            ticket,
            operation,
            flight,
            done: false,
            placed: false,
        });
        if !self.unpack(operation, flight, pool, list, ticket, last) {
            self.pool_read(index, ticket, false);
        }
    }

    fn path_changed(&mut self, index: usize, path: String, why: String) {
        tracing::warn!(peer = %self.peer, channel = index, %path, %why, "the path changed");
        let which = match self.channels.all.len() {
            0 | 1 => String::new(),
            _ => format!("channel {index}: "),
        };
        let mut current = lock(&self.program.path);
        *current = format!("{which}{path} ({why})");
        drop(current);
        self.emit(&Event::PathChanged {
            channel: u16::try_from(index).unwrap_or(u16::MAX),
            path,
            why,
        });
    }

    fn received_in_place(&mut self, id: OperationId, flight: InFlight, bytes: u64) {
        if !self.off_wire(id) {
            return;
        }
        // The session compares the length with the plan and fails the operation if it is wrong.
        self.session
            .chunk_arrived(self.clock.now(), id, flight.event.index, bytes);
        if bytes == u64::from(flight.event.length) {
            self.placed(id, flight);
        }
    }

    /// A chunk of a window's transfer is at its destination.
    fn placed_in_window(&mut self, token: u64, index: u32, offset: u64, bytes: u32) {
        let Some(&Token::Window(id, posted)) = self.tokens.open.get(&token) else {
            return;
        };
        let Some(operation) = self.operations.get_mut(&id).filter(|op| !op.stopped) else {
            return;
        };
        operation.came();
        let (tag, transfer) = (operation.tag, operation.transfer);
        let event = ChunkEvent {
            role: Role::Receiver,
            transfer: transfer.window().unwrap_or(transfer.0),
            tag,
            index,
            channel: 0,
            offset,
            length: bytes,
        };
        self.session
            .chunk_arrived(self.clock.now(), id, index, bytes.into());
        self.placed(id, InFlight { event, posted });
    }

    /// Nothing points at the memory of a window any more; `true` if the session still wants to hear
    /// of it.
    fn window_closed(&mut self, id: OperationId) -> bool {
        self.ended_of(id, |operation| {
            operation.window = None;
            operation.outstanding -= 1;
        })
    }

    /// Gives pool space back in order, as far as unpacking has come.
    pub(super) fn consume_ready(&mut self, index: usize) {
        self.channels.all[index].close_when_unread();
        while let Some(first) = self.channels.all[index].unconsumed.front() {
            if !first.done {
                return;
            }
            let (ticket, id, flight, placed) =
                (first.ticket, first.operation, first.flight, first.placed);
            if !self.channels.all[index].closing {
                match self.channels.all[index].channel.consume(ticket) {
                    Ok(PostAnswer::Accepted) => {}
                    Ok(PostAnswer::Full(_)) => return,
                    Err(error) => {
                        self.channel_failed(index, error);
                    }
                }
            }
            self.channels.all[index].unconsumed.pop_front();
            let stopped = self.operations.get(&id).is_none_or(|op| op.stopped);
            if placed && !stopped {
                self.placed(id, flight);
            }
        }
        self.channels.all[index].close_when_unread();
    }

    fn placed(&mut self, id: OperationId, flight: InFlight) {
        if let Some(operation) = self.operations.get(&id) {
            operation.state.add_done(u64::from(flight.event.length));
        }
        self.session
            .chunk_placed(self.clock.now(), id, flight.event.index);
        self.emit(&Event::ChunkPlaced {
            chunk: flight.event,
            elapsed: flight.posted.elapsed(),
        });
    }

    /// Accounts a request that has ended; `true` if the session still wants to hear of it.
    pub(super) fn off_wire(&mut self, id: OperationId) -> bool {
        self.ended_of(id, Operation::off_wire)
    }

    /// As [`Self::off_wire`], of a job.
    pub(super) fn job_off(&mut self, id: OperationId) -> bool {
        self.ended_of(id, |operation| operation.outstanding -= 1)
    }

    pub(super) fn ended_of(
        &mut self,
        id: OperationId,
        account: impl FnOnce(&mut Operation),
    ) -> bool {
        let Some(operation) = self.operations.get_mut(&id) else {
            return false;
        };
        account(operation);
        let wanted = !operation.stopped;
        self.settle_operation(id);
        wanted
    }

    /// Nothing reads the pool space of `ticket` any more; `placed` if its bytes are in place.
    pub(super) fn pool_read(&mut self, index: usize, ticket: Ticket, placed: bool) {
        let queue = &mut self.channels.all[index].unconsumed;
        if let Some(entry) = queue.iter_mut().find(|entry| entry.ticket == ticket) {
            entry.done = true;
            entry.placed = placed;
        }
        self.consume_ready(index);
    }
}
