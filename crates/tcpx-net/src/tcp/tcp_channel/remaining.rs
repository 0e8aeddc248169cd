//! What is left of a channel without lanes.

use std::sync::Arc;

use super::super::receive_table::Closing;
use super::super::transmit_table::SendState;
use super::{SendSlot, TcpChannel};
use crate::channel::Completion;

impl TcpChannel {
    /// No lane runs any more: ends what none of them had in its hands.
    pub(super) fn fail_remaining(&mut self, out: &mut Vec<Completion>) {
        let error = self.shared.failure();
        let failed = |token| Completion::Failed {
            token,
            error: error.clone(),
        };
        let shared = Arc::clone(&self.shared);
        for (slot, SendSlot { token, .. }) in (0u16..).zip(self.sends.iter_mut()) {
            let ended = shared.transmit.with(slot, |state| match state {
                SendState::Queued(_) | SendState::Waiting(_) => {
                    *state = SendState::Free;
                    true
                }
                // The copy worker still reads or writes; its end brings an event.
                SendState::Copying { cancelled, .. } => {
                    *cancelled = true;
                    false
                }
                SendState::Free | SendState::Taken { .. } | SendState::Withdrawn => false,
            });
            if ended && let Some(token) = token.take() {
                self.in_flight -= 1;
                out.push(failed(token));
            }
        }
        let open: Vec<_> = self
            .windows
            .iter()
            .map(|(token, open)| (*token, open.name))
            .collect();
        for (token, name) in open {
            // No lane has a chunk; the copy worker may, whose end brings the window's.
            if self.shared.receive.close(name) == Closing::Done {
                self.window_ended(token);
                out.push(failed(token));
            }
        }
        // Those to which something had come.
        let mut touched = Vec::new();
        self.drain_windows(&mut touched);
        out.extend(touched.into_iter().map(|news| match news {
            Completion::Closed { token, .. } => failed(token),
            other => other,
        }));
    }
}
