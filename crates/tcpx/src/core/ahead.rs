//! What is done before it is needed, while the peer or the wire has its turn.

use std::collections::VecDeque;

use tcpx_memory::{Fence, Work};
use tcpx_net::Direction;
use tcpx_wire::session::OperationId;

use super::Core;
use super::operation::Token;

/// How often a fence is looked at ahead: the caller's GPU work may take long.
const LOOKS: u8 = 8;

/// What is to be done ahead.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Bytes that will go to channels soon, by direction.
    expected: [u64; 2],
    /// Asking the driver whether a fence is reached takes microseconds, and its answer lasts.
    fences: VecDeque<(Fence, u8)>,
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
            }
            let share = bytes.div_ceil(self.channels.len().max(1) as u64);
            for state in self.channels.iter_mut() {
                state.channel.expect(share, direction);
            }
        }
    }

    /// Whether a receive has to wait for GPU work of the program before the peer may hear of its window.
    pub(crate) fn is_fenced(&self, fence: Option<&Fence>) -> bool {
        // An error is told to whoever needs the fence.
        self.is_addressed && fence.is_some_and(|fence| fence.is_reached() == Ok(false))
    }

    /// Tells the session when a receive's fence is reached.
    pub(crate) fn await_fence(&mut self, id: OperationId) {
        let nothing = self.lease_nothing().map(|lease| lease.all());
        match nothing {
            Ok(nothing) => {
                let token = self.new_token(Token::Fence(id));
                self.submit(Work::checksum(nothing), token, id);
            }
            Err(error) => self.memory_failed(id, &error),
        }
    }

    /// Notes a fence that somebody will ask for.
    pub(crate) fn foresee(&mut self, fence: Option<&Fence>) {
        if let Some(fence) = fence.filter(|fence| fence.gpu().is_some())
            && self.ahead.fences.len() < self.bounds.fences
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
