//! What a receive comm says when nothing moves.

use std::time::Instant;

use nccl_net::export::Log;

use super::{Inbound, Phase};

impl Inbound {
    pub(super) fn report_stall(&mut self, log: &Log) {
        let Some(stalled) = self.stall.waiting(Instant::now()) else {
            return;
        };
        // What came over lanes leaves the connection's own count behind.
        let sequence = match (&self.lanes, self.ring.oldest()) {
            (Some(_), Some(oldest)) => oldest,
            _ => self.next,
        };
        let seconds = stalled.as_secs();
        let name = &self.name;
        let Some(request) = self.ring.by_sequence(sequence) else {
            return;
        };
        let (received, size) = (request.received, request.size);
        match request.phase {
            // A receive may be posted long before its message: worth a line, not a warning.
            Phase::Posted
                if let Some((done, total)) =
                    self.lanes.as_ref().and_then(|lanes| lanes.inlet.progress(sequence)) =>
            {
                log.warn(&format!(
                    "{name}: no byte arrived for {seconds} s; message {sequence} has {done} of {total} \
                     bytes, from lanes; see whether the sender still runs"
                ));
            }
            Phase::Posted => log.info(&format!(
                "{name}: waiting {seconds} s for message {sequence}; the peer has sent nothing"
            )),
            _ => log.warn(&format!(
                "{name}: no byte arrived for {seconds} s; message {sequence} has {received} of {size} \
                 bytes; see whether the sender still runs"
            )),
        }
    }
}
