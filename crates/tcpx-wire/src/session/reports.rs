//! What the data plane reports.

use super::Session;
use super::action::{Action, Chunk, OperationId};
use super::error::DataFailure;
use super::operation::{Moving, Origin, Stage};
use crate::frame::{Frame, Role, TransferId};
use crate::plan::ChunkPlan;
use crate::time::Time;

impl Session {
    /// The source of a posted chunk may be reused.
    pub fn chunk_sent(&mut self, now: Time, operation: OperationId, index: u32) {
        let holds = self.config.hold_until_placed;
        let passed = self.report(now, operation, index, |moving, chunk| {
            if !moving.posted.contains(chunk.index) {
                Err("was reported sent, but never posted".into())
            } else if !moving.passed.insert(chunk.index) {
                Err("was reported sent twice".into())
            } else {
                Ok(!holds || moving.placed.contains(chunk.index))
            }
        });
        if let Some((chunk, is_free)) = passed {
            if is_free {
                self.streams[Role::Sender as usize].release(&chunk);
                self.pump(Role::Sender);
            }
            self.settle(now, operation);
        }
    }

    /// Chunks have come to the window of a receive, be it in part. Before
    /// [`data_quiet`](Self::data_quiet), so that its end does not say that nothing was written.
    pub fn window_touched(&mut self, operation: OperationId) {
        if let Some(it) = self.operations.get_mut(operation) {
            it.is_begun = true;
        }
    }

    /// The header of a chunk of a transfer that is cut so has come to the window of a receive,
    /// which is matched to it. The data plane has checked that it fits, and says so before it says
    /// anything of its chunks.
    pub fn window_begins(&mut self, now: Time, operation: OperationId, cut: ChunkPlan) {
        let it = self.operations.get_mut(operation);
        let Some(it) = it.filter(|it| it.is_live()) else {
            return;
        };
        let posted = match &mut it.stage {
            Stage::Posted(posted) if !posted.closing => posted,
            Stage::Moving(moving) if moving.is_window && moving.passed.is_empty() => {
                if moving.plan.bytes() == cut.bytes() {
                    moving.plan = moving.plan.recut(cut);
                }
                return;
            }
            _ => return,
        };
        let transfer = TransferId::to_window(posted.window);
        let (plan, asked_by) = (posted.plan.recut(cut), posted.asked_by.take());
        let (tag, level, number) = (it.tag, it.asked, it.number.take());
        it.clock.progressed(now);
        self.posting.open -= 1;
        self.matching.receives_of(tag).vain = 0;
        self.matching.is_sent(tag);
        if let Some(number) = number {
            self.matching.take_announced(tag, number);
        }
        if let Some(asked_by) = asked_by {
            self.operations.unname(operation, asked_by.transfer);
        }
        self.begin_matched(operation, transfer, plan, level);
        self.post_candidates();
    }

    /// The data plane has let go of the window of a receive that goes on.
    pub(super) fn window_closed(&mut self, now: Time, operation: OperationId) {
        if let Some(it) = self.operations.get_mut(operation) {
            let stage = std::mem::replace(&mut it.stage, Stage::Queued);
            self.leave_posting(operation, &stage);
        }
        if let Some(arrival) = self.take_offered(operation) {
            self.match_up(now, operation, arrival);
        }
        self.post_candidates();
    }

    /// A posted chunk arrived with this many bytes, in place or in the bounce pool.
    pub fn chunk_arrived(&mut self, now: Time, operation: OperationId, index: u32, bytes: u64) {
        let arrived = self.report(now, operation, index, |moving, chunk| {
            if !moving.is_posted(chunk.index) {
                Err("arrived, but was never posted".into())
            } else if bytes != u64::from(chunk.length) {
                Err(format!("expected {} bytes, {bytes} arrived", chunk.length))
            } else if !moving.passed.insert(chunk.index) {
                Err("arrived twice".into())
            } else {
                Ok(moving.is_window)
            }
        });
        // Nobody handed it out here.
        if let Some((_, true)) = arrived {
            self.streams[Role::Receiver as usize].begin_chunk(operation, index);
        }
    }

    /// An arrived chunk is at its destination, and its place in the bounce pool was given back.
    pub fn chunk_placed(&mut self, now: Time, operation: OperationId, index: u32) {
        let placed = self.report(now, operation, index, |moving, chunk| {
            if !moving.passed.contains(chunk.index) {
                return Err("was placed, but never arrived".into());
            }
            if !moving.placed.insert(chunk.index) {
                return Err("was placed twice".into());
            }
            moving.placed_bytes += u64::from(chunk.length);
            moving.unacked.push(chunk.index);
            Ok(moving.unacked.len() == 1)
        });
        if let Some((chunk, is_first)) = placed {
            self.acks.placed(now, operation, is_first, &self.config);
            self.streams[Role::Receiver as usize].release(&chunk);
            self.pump(Role::Receiver);
            self.settle(now, operation);
        }
    }

    /// Takes a report of a chunk, unless its operation ends early and is quiet; one that cannot be
    /// ends the operation.
    fn report<T>(
        &mut self,
        now: Time,
        operation: OperationId,
        index: u32,
        take: impl FnOnce(&mut Moving, Chunk) -> Result<T, String>,
    ) -> Option<(Chunk, T)> {
        let it = self.operations.get_mut(operation)?;
        if it.is_quiet() {
            return None;
        }
        let taken = match &mut it.stage {
            Stage::Moving(moving) if index < moving.plan.chunks => {
                let chunk = moving.plan.chunk(index);
                take(moving, chunk).map(|taken| (chunk, taken))
            }
            Stage::Moving(_) => Err("was never posted".into()),
            _ if operation.role() == Role::Receiver => return None,
            _ => Err("was never posted".into()),
        };
        match taken {
            Ok(taken) => {
                it.clock.progressed(now);
                let has_ended = (it.moving()).is_some_and(|moving| moving.placed.contains(index));
                let stream = &mut self.streams[operation.role() as usize];
                stream.chunk_moved(now, operation, index, has_ended);
                Some(taken)
            }
            Err(problem) => {
                let failure = DataFailure::Misreport(format!("chunk {index}: {problem}"));
                self.data_failed(now, operation, Some(index), failure);
                None
            }
        }
    }

    /// Answer to [`Action::DeliverEager`], and to [`read`](Self::read).
    pub fn eager_copied(&mut self, now: Time, operation: OperationId) {
        if operation.role() == Role::Receiver
            && let Some(it) = self.operations.get_mut(operation)
            && let Stage::Eager { done, credit, .. } = &mut it.stage
            && !std::mem::replace(done, true)
        {
            it.clock.progressed(now);
            let credit = std::mem::take(credit);
            self.return_credit(credit);
            self.settle(now, operation);
        }
    }

    /// Answer to [`Action::ComputeDigest`].
    pub fn digest(&mut self, now: Time, operation: OperationId, crc32c: u32, tag: u128) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        if !std::mem::take(&mut it.digests.computing) || it.is_withdrawn() {
            return;
        }
        it.clock.progressed(now);
        match (it.role(), it.wire) {
            // A transfer that is being cancelled is never compared.
            (Role::Sender, Some(transfer)) if !it.is_stopping() => {
                it.digests.ours = Some(tag);
                self.transmit.push_back(Frame::Digest { transfer, tag });
            }
            (Role::Sender, _) => {}
            (Role::Receiver, _) => {
                it.digests.ours = Some(match it.stage {
                    Stage::Eager { .. } => crc32c.into(),
                    _ => tag,
                });
            }
        }
        self.settle(now, operation);
    }

    /// The GPU work is done that a receive was [fenced](super::ReceiveRequest::fenced) by.
    pub fn fence_reached(&mut self, now: Time, operation: OperationId) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        let Origin::Receive { fenced } = &mut it.origin else {
            return;
        };
        if !std::mem::take(fenced) || !it.is_live() {
            return;
        }
        it.clock.progressed(now);
        let (capacity, level) = (it.bytes, it.asked);
        match self.take_offered(operation) {
            Some(arrival) => self.match_up(now, operation, arrival),
            None => self.post_receive_soon(operation, capacity, level),
        }
    }

    /// Chunks go to the data channels, and windows are opened.
    pub(super) fn begin_moving(&mut self) {
        self.pump(Role::Sender);
        self.pump(Role::Receiver);
        self.post_candidates();
    }

    /// Posts chunks as far as the windows of this direction allow.
    pub(super) fn pump(&mut self, role: Role) {
        while self.may_post()
            && let Some(slot) = self.streams[role as usize].next()
        {
            let (operation, index) = (slot.owner, slot.index);
            if let Some(it) = self.operations.get_mut(operation)
                && let Stage::Moving(moving) = &mut it.stage
            {
                moving.posted.insert(index);
                let chunk = moving.plan.chunk(index);
                self.actions.push_back(match role {
                    Role::Sender => Action::PostSend {
                        operation,
                        chunk,
                        transfer: operation.transfer(),
                        window: moving.plan.window,
                        total: it.bytes,
                        tag: it.tag,
                    },
                    Role::Receiver => Action::PostReceive {
                        operation,
                        chunk,
                        transfer: it.wire.unwrap_or(TransferId(0)),
                        tag: it.tag,
                    },
                });
            }
        }
    }
}
