//! The early end of an operation: everything that points at its memory goes.

use tcpx_net::Cancel;
use tcpx_wire::session::OperationId;

use super::Core;

impl Core {
    /// As [`Self::stop_data`] for an operation that begins anew, as its window was closed before a
    /// send came to it.
    pub(super) fn withdraw(&mut self, id: OperationId) {
        if let Some(operation) = self.operations.get_mut(&id) {
            operation.withdrawn = true;
        }
        self.stop_data(id);
    }

    /// Stops everything that points at the memory of `id`; the session hears `data_quiet` once
    /// nothing does.
    pub(super) fn stop_data(&mut self, id: OperationId) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return;
        };
        operation.stopped = true;
        operation.quiet_owed = true;
        let window = operation.window;
        let reads = &mut self.one_sided.reads;
        let before = reads.len();
        reads.retain(|(of, _)| *of != id);
        operation.outstanding -= u32::from(reads.len() < before);
        if let (Some(token), [state]) = (window, self.channels.all.as_mut_slice())
            && state.channel.cancel(token) == Cancel::Done
            && self.tokens.open.remove(&token).is_some()
            && let Some(operation) = self.operations.get_mut(&id)
        {
            operation.window = None;
            operation.outstanding -= 1;
        }
        let in_flight = self.tokens.chunks.iter();
        let in_flight: Vec<(u64, u16)> = in_flight
            .filter(|(_, (of, _))| *of == id)
            .map(|(token, (_, flight))| (*token, flight.event.channel))
            .collect();
        let mut must_close = false;
        for (token, channel) in in_flight {
            let state = &mut self.channels.all[usize::from(channel)];
            match state.channel.cancel(token) {
                Cancel::Done => {
                    self.tokens.chunks.remove(&token);
                    self.off_wire(id);
                }
                Cancel::Pending => {}
                Cancel::Unsupported => must_close = true,
            }
        }
        for state in self.channels.all.iter_mut() {
            state.sends.retain(|(_, of, _)| *of != id);
            state.receives.retain(|(_, of, _)| *of != id);
        }
        if must_close {
            // Only closing gets the memory back from a network that cannot cancel. The peer hears
            // of the cancellation before it sees its channels break.
            self.say_last_words();
            self.channels.close();
        }
        self.settle_operation(id);
    }
}
