//! The embedded network with a gate in its channel.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use tcpx::TcpNetwork;
use tcpx_net::{
    Cancel, Channel, ChannelError, ChannelStats, Completion, Exchange, Features, Network,
    NetworkError, PostAnswer, Readiness, ReceiveChunk, ReceiveWindow, SendChunk, Setup, Ticket,
};

use crate::LONG;

/// Holds calls of [`Channel::poll`] while it is shut.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<(bool, u32)>,
    changed: Condvar,
    /// Sends are refused, as if they waited for GPU work, and counted; nothing announces more.
    pub(crate) poll_only: AtomicBool,
    pub(crate) refuses: AtomicBool,
    pub(crate) refused: AtomicU32,
}

impl Gate {
    pub(crate) fn shut(&self) {
        *self.state.lock().expect("no panic") = (true, 0);
    }

    pub(crate) fn open(&self) {
        self.state.lock().expect("no panic").0 = false;
        self.changed.notify_all();
    }

    /// Waits until a call is held.
    pub(crate) fn entered(&self) {
        let state = self.state.lock().expect("no panic");
        let waited = self
            .changed
            .wait_timeout_while(state, LONG, |(_, held)| *held == 0);
        assert!(!waited.expect("no panic").1.timed_out(), "no call came");
    }

    fn pass(&self) {
        let mut state = self.state.lock().expect("no panic");
        if state.0 {
            state.1 += 1;
            self.changed.notify_all();
            let waited = self
                .changed
                .wait_timeout_while(state, 2 * LONG, |(shut, _)| *shut);
            drop(waited.expect("no panic"));
        }
    }
}

/// The embedded network with a gate in its channel.
#[derive(Debug)]
struct Gated {
    network: TcpNetwork,
    gate: Arc<Gate>,
}

pub(crate) fn gated() -> (Arc<Gate>, Arc<dyn Network>) {
    let gate = Arc::new(Gate::default());
    let network = Gated {
        network: TcpNetwork::default(),
        gate: Arc::clone(&gate),
    };
    (gate, Arc::new(network))
}

impl Network for Gated {
    fn features(&self, asked: u16) -> Features {
        self.network.features(asked)
    }

    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let channels = self.network.establish(setup, exchange)?;
        let gated = |channel| -> Box<dyn Channel> {
            Box::new(GatedChannel {
                channel,
                gate: Arc::clone(&self.gate),
            })
        };
        Ok(channels.into_iter().map(gated).collect())
    }
}

#[derive(Debug)]
struct GatedChannel {
    channel: Box<dyn Channel>,
    gate: Arc<Gate>,
}

impl Channel for GatedChannel {
    fn post_send(&mut self, chunk: SendChunk) -> Result<PostAnswer<SendChunk>, ChannelError> {
        if self.gate.refuses.load(Ordering::Acquire) {
            self.gate.refused.fetch_add(1, Ordering::AcqRel);
            return Ok(PostAnswer::Full(chunk));
        }
        self.channel.post_send(chunk)
    }

    fn post_receive(
        &mut self,
        chunk: ReceiveChunk,
    ) -> Result<PostAnswer<ReceiveChunk>, ChannelError> {
        self.channel.post_receive(chunk)
    }

    fn open_window(&mut self, window: ReceiveWindow) -> Result<(), ChannelError> {
        self.channel.open_window(window)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        self.gate.pass();
        self.channel.poll(out)
    }

    fn consume(&mut self, ticket: Ticket) -> Result<PostAnswer<Ticket>, ChannelError> {
        self.channel.consume(ticket)
    }

    fn cancel(&mut self, token: u64) -> Cancel {
        self.channel.cancel(token)
    }

    fn placed(&mut self, sequence: u64) -> Result<(), ChannelError> {
        self.channel.placed(sequence)
    }

    fn forget(&mut self, sequence: u64) {
        self.channel.forget(sequence);
    }

    fn readiness(&self) -> Readiness<'_> {
        if self.gate.poll_only.load(Ordering::Acquire) {
            return Readiness::PollOnly;
        }
        self.channel.readiness()
    }

    fn in_flight(&self) -> usize {
        self.channel.in_flight()
    }

    fn close(&mut self) {
        self.channel.close();
    }

    fn closed(&self) -> bool {
        self.channel.closed()
    }

    fn describe(&self) -> String {
        self.channel.describe()
    }

    fn stats(&self) -> ChannelStats {
        self.channel.stats()
    }
}
