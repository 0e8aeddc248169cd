//! Chunks to the data channels, as far as the windows allow.

use super::Session;
use super::action::{Action, OperationId};
use super::incoming::ReceiveStage;
use super::outgoing::SendStage;

impl Session {
    /// Posts what the windows allow.
    pub(super) fn pump_sends(&mut self) {
        while self.may_post()
            && let Some(slot) = self.send_stream.next()
        {
            self.post_send(slot.owner, slot.index);
        }
    }

    fn post_send(&mut self, operation: OperationId, index: u32) {
        let Some(transfer) = operation.sent_transfer() else {
            return;
        };
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let SendStage::Granted(granted) = &mut send.stage else {
            return;
        };
        granted.posted.insert(index);
        self.actions.push_back(Action::PostSend {
            operation,
            chunk: granted.plan.chunk(index),
            transfer,
            window: granted.plan.window,
            total: send.bytes,
            tag: send.tag,
        });
    }

    /// Posts what the windows allow.
    pub(super) fn pump_receives(&mut self) {
        while self.may_post()
            && let Some(slot) = self.receive_stream.next()
        {
            self.post_receive(slot.owner, slot.index);
        }
    }

    fn post_receive(&mut self, operation: OperationId, index: u32) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let Some(matched) = &mut receive.matched else {
            return;
        };
        let ReceiveStage::Granted(granted) = &mut matched.stage else {
            return;
        };
        granted.posted.insert(index);
        self.actions.push_back(Action::PostReceive {
            operation,
            chunk: granted.plan.chunk(index),
            transfer: matched.transfer,
            tag: receive.tag,
        });
    }
}
