//! What the session asks for.

use std::sync::Arc;

use tcpx_net::Direction;
use tcpx_wire::numbered::take_out;
use tcpx_wire::session::{
    Action, Chunk, Completed, Memory, OperationError, OperationId, OperationKind, Output, Takes,
};
use tcpx_wire::{Role, TransferId};

use super::Core;
use crate::error::{Error, OperationName};
use crate::event::{ChunkEvent, Event};

/// How an operation ended, kept until nothing points at its memory.
pub(super) type Outcome = Result<Completed, OperationError>;

impl Core {
    /// Does what the session wants, as far as the turn has time; `true` if it wanted anything.
    pub(super) fn perform_actions(&mut self) -> bool {
        let mut any = false;
        if self.session.has_postponed() {
            self.collect_notifications();
        }
        while self.perform_next(Takes::Actions) {
            any = true;
            if self.clock.is_spent(false) {
                break;
            }
        }
        any
    }

    /// Does the next thing that the session wants; `false` if there is none.
    pub(super) fn perform_next(&mut self, takes: Takes) -> bool {
        let Some(Output::Action(action)) = self.session.poll(takes) else {
            return false;
        };
        self.perform(action);
        true
    }

    pub(super) fn perform(&mut self, action: Action) {
        match action {
            Action::Matched {
                operation,
                bytes,
                transfer,
                chunks,
                ..
            } => {
                if let Some(operation) = self.operations.get_mut(&operation) {
                    operation.state.set_total(bytes);
                    operation.transfer = transfer;
                    // What comes to a posted window is there already.
                    let is_awaited = chunks > 0 && transfer.window().is_none();
                    if is_awaited && operation.kind.role() == Role::Receiver {
                        self.channels.expect(bytes, Direction::In);
                    }
                }
            }
            Action::OpenWindow {
                operation,
                window,
                cut,
                ..
            } => self.open_window(operation, window, cut),
            Action::PostSend {
                operation,
                chunk,
                transfer,
                window,
                total,
                tag,
            } => {
                let event = chunk_event(Role::Sender, chunk, transfer.0, tag.0);
                self.queue_send(operation, event, chunk.sequence, (window, total));
            }
            Action::PostReceive {
                operation,
                chunk,
                transfer,
                tag,
            } => {
                let event = chunk_event(Role::Receiver, chunk, transfer.0, tag.0);
                self.queue_receive(operation, event, chunk.sequence);
            }
            Action::ChunkDropped { chunk } => {
                if let Some(state) = self.channels.all.get_mut(usize::from(chunk.channel)) {
                    state.channel.forget(chunk.sequence);
                }
            }
            Action::Redial { lane } => {
                for state in self.channels.all.iter_mut() {
                    state.channel.redial(lane);
                }
            }
            Action::ChunkAcknowledged { operation, chunk } => {
                // The network need not send it again.
                let index = usize::from(chunk.channel);
                if let Some(state) = self.channels.all.get_mut(index)
                    && let Err(error) = state.channel.placed(chunk.sequence)
                {
                    self.channel_failed(index, error);
                }
                if let Some(operation) = self.operations.get(&operation) {
                    operation.state.add_done(u64::from(chunk.length));
                }
            }
            action @ (Action::PutArrives { .. }
            | Action::NotificationArrives { .. }
            | Action::GetArrives { .. }) => self.perform_one_sided(action),
            Action::DeliverEager { operation, payload } => self.deliver_eager(operation, payload),
            Action::ComputeDigest { operation, bytes } => self.start_digest(operation, bytes),
            Action::StopData { operation } => self.stop_data(operation),
            Action::Withdraw { operation } => self.withdraw(operation),
            Action::Complete {
                operation,
                outcome,
                memory,
            } => self.complete(operation, outcome, memory),
            Action::Closed { failure } => {
                let how = failure.map_or(Ok(()), |failure| Err(Error::lost(self.peer, failure)));
                self.end(how);
            }
            // Set-up is over when a connection has a core.
            Action::PeerSettings(_) | Action::Setup(_) | Action::PeerReady => {}
        }
    }

    /// The session is done with an operation; the program hears of it once nothing points at its
    /// memory, or at once if that cannot be had before the channels are closed.
    fn complete(&mut self, id: OperationId, outcome: Outcome, memory: Memory) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        operation.outcome = Some(outcome);
        if memory == Memory::Held {
            self.report_outcome(id, true);
        }
        self.settle_operation(id);
    }

    /// Called whenever an operation's requests and jobs became fewer or its end was decided.
    pub(super) fn settle_operation(&mut self, id: OperationId) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        if operation.outstanding > 0 {
            return;
        }
        if std::mem::take(&mut operation.quiet_owed) {
            operation.renew_withdrawn();
            self.session.data_quiet(self.clock.now(), id);
        }
        self.report_outcome(id, false);
    }

    /// Tells the program how the operation ended. With `held` the operation, and with it its
    /// memory, is kept until nothing points at it any more.
    fn report_outcome(&mut self, id: OperationId, held: bool) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        let Some(outcome) = operation.outcome.clone() else {
            return;
        };
        let now = self.clock.ticked();
        let (kind, tag) = (operation.kind, operation.tag);
        let role = kind.role();
        let result = match outcome {
            Ok(completed) => Ok(operation.report(&completed, now)),
            Err(error) => Err(error),
        };
        let state = Arc::clone(&operation.state);
        let follows = operation.follows;
        let reported = std::mem::replace(&mut operation.reported, true);
        self.one_sided.coming -= usize::from(std::mem::take(&mut operation.comes));
        if !reported && kind == OperationKind::PeerNotification {
            let came = result.as_ref().ok().and_then(|_| operation.take_message());
            self.notification_ended(id, came);
        }
        if !held {
            // The lease ends here: from now on the memory is the program's again.
            let ended = take_out(&mut self.operations, &id);
            if ended.is_some_and(|ended| ended.may_linger()) {
                self.lingering_ended();
            }
        }
        if reported {
            return;
        }
        self.program.ended_some = true;
        let result = result.map_err(|error| {
            let channels = self.channels.describe();
            let operation = OperationName { kind, tag };
            Error::operation(self.peer, channels, operation, error, held)
        });
        if kind.is_peers() {
            if let Err(error) = &result {
                tracing::warn!(%error, "what the peer does in a window failed");
            }
            return;
        }
        match &result {
            Ok(report) => self.program.completed(report.elapsed),
            Err(error) => {
                self.program.failed();
                // One that ended with its connection has nothing more to tell.
                if !self.is_ending() {
                    self.program.keep(self.peer, error);
                }
            }
        }
        self.emit(&match &result {
            Ok(report) => Event::Completed {
                role,
                tag,
                bytes: report.bytes,
                level: report.level,
            },
            Err(error) => Event::Failed {
                role,
                tag,
                error: error.to_string(),
            },
        });
        // What follows a batch has no report of its own.
        let result = result.map(|report| (!follows).then_some(report));
        self.program.wakers.extend(state.end(result));
        if let Some(notice) = state.due_notice()
            && let Err(error) = self.notify(notice, Arc::clone(&state), TransferId(0), 0)
        {
            self.program.wakers.extend(state.end(Err(error)));
        }
    }
}

fn chunk_event(role: Role, chunk: Chunk, transfer: u64, tag: u64) -> ChunkEvent {
    ChunkEvent {
        role,
        transfer,
        tag,
        index: chunk.index,
        channel: chunk.channel,
        offset: chunk.offset,
        length: chunk.length,
    }
}
