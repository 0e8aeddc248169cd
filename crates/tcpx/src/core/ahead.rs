//! What is done before it is needed, while the peer or the wire has its turn.

use std::collections::VecDeque;

use tcpx_memory::Fence;
use tcpx_net::{Cancel, Direction, Foreseen};
use tcpx_wire::session::OperationId;

use super::Core;
use super::tokens::Token;

/// Fences that are looked at ahead; those of more operations are looked at when their bytes move.
const FENCES: usize = 64;
/// How often a fence is looked at ahead: the caller's GPU work may take long.
const LOOKS: u8 = 8;

/// Most bytes of a send that is copied ahead of its grant: a longer one has more to wait for.
const SHORT_BYTES: u64 = 4 << 20;
/// Sends that are to be copied ahead at a time.
const SHORT_SENDS: usize = 4;

/// What is to be done ahead.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Bytes that will go to channels soon, by direction.
    expected: [u64; 2],
    /// Asking the driver whether a fence is reached takes microseconds, and its answer lasts.
    fences: VecDeque<(Fence, u8)>,
    /// Sends that a channel may begin to copy.
    sends: Vec<OperationId>,
}

impl Core {
    /// Chunks of so many bytes will be posted soon.
    pub(crate) fn expect(&mut self, bytes: u64, direction: Direction) {
        let expected = &mut self.ahead.expected[direction as usize];
        *expected = expected.saturating_add(bytes);
    }

    /// Has the channels wake whom they will need. Comes after what the peer waits for was said.
    pub(super) fn rouse_channels(&mut self) {
        for direction in [Direction::Out, Direction::In] {
            let bytes = std::mem::take(&mut self.ahead.expected[direction as usize]);
            if bytes == 0 || self.ended.is_some() {
                continue;
            }
            // What follows is put together by what is known of it, and waking others takes longer.
            if direction == Direction::Out {
                self.look_at_fence();
                self.offer_sends();
            }
            let share = bytes.div_ceil(self.channels.len().max(1) as u64);
            for state in self.channels.iter_mut() {
                state.channel.expect(share, direction);
            }
        }
    }

    /// Notes a send that was announced: while the peer prepares, its first bytes may be copied.
    pub(crate) fn copy_soon(&mut self, id: OperationId, bytes: u64) {
        let sends = &mut self.ahead.sends;
        if bytes <= SHORT_BYTES && sends.len() < SHORT_SENDS {
            sends.push(id);
        }
    }

    /// Offers the announced sends to the channel that will carry them.
    fn offer_sends(&mut self) {
        let mut sends = std::mem::take(&mut self.ahead.sends);
        for id in sends.drain(..) {
            self.offer_send(id);
        }
        self.ahead.sends = sends;
    }

    fn offer_send(&mut self, id: OperationId) {
        // With several channels, the grant says which one carries what.
        let [state] = self.channels.as_mut_slice() else {
            return;
        };
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        let is_over = operation.stopped || operation.outcome.is_some();
        let is_granted = !operation.sequences.is_empty();
        let Some(transfer) = id.sent_transfer() else {
            return;
        };
        if is_over || is_granted || operation.foreseen.is_some() {
            return;
        }
        let source = operation.lease.all();
        let chunk_bytes = self.session.likely_chunk_bytes(source.len() as u64);
        let fence = operation.fence.clone();
        self.next_token += 1;
        let token = self.next_token;
        let send = Foreseen {
            token,
            transfer: transfer.0,
            source,
            chunk_bytes,
            fence,
        };
        if state.channel.foresee(send) {
            operation.foreseen = Some(token);
            operation.outstanding += 1;
            self.tokens.insert(token, Token::Foreseen(id));
        }
    }

    /// Nobody needs what is copied of this send ahead of its grant.
    pub(super) fn end_foreseen(&mut self, id: OperationId) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        let (Some(token), [state]) = (operation.foreseen.take(), self.channels.as_mut_slice())
        else {
            return;
        };
        if state.channel.cancel(token) == Cancel::Done && self.tokens.remove(&token).is_some() {
            operation.outstanding -= 1;
        }
    }

    /// Nothing reads this send's bytes ahead of its grant any more.
    pub(super) fn foreseen_ended(&mut self, id: OperationId) {
        if let Some(operation) = self.operations.get_mut(&id) {
            operation.foreseen = None;
            operation.outstanding -= 1;
            self.settle_operation(id);
        }
    }

    /// Notes a fence that somebody will ask for.
    pub(crate) fn foresee(&mut self, fence: Option<&Fence>) {
        if let Some(fence) = fence.filter(|fence| fence.gpu().is_some())
            && self.ahead.fences.len() < FENCES
        {
            self.ahead.fences.push_back((fence.clone(), LOOKS));
        }
    }

    /// Looks at one fence, when there is nothing else to do.
    pub(super) fn look_at_fence(&mut self) {
        let Some((fence, left)) = self.ahead.fences.pop_front() else {
            return;
        };
        // An error is told to whoever needs the fence.
        if fence.is_reached() == Ok(false) && left > 1 {
            self.ahead.fences.push_back((fence, left - 1));
        }
    }

    /// Says whether somebody polls the channels without being woken for them.
    pub(crate) fn set_looked_for(&mut self, looked_for: bool) {
        self.sink.set_looked_for(looked_for);
        for state in self.channels.iter_mut() {
            state.channel.set_looked_for(looked_for);
        }
    }
}
