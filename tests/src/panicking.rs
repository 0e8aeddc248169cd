//! A network whose code panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx_net::{
    Cancel, Capabilities, Channel, ChannelError, ChannelStats, Completion, Exchange, Network,
    NetworkError, Posted, Readiness, ReceiveChunk, SendChunk, Setup, Ticket,
};

/// Like the network inside, but its channels panic.
#[derive(Debug)]
pub struct Panicking {
    inner: Arc<dyn Network>,
    receives: usize,
    times: Arc<AtomicUsize>,
}

impl Panicking {
    /// Every poll and close after `receives` posted receives panics, `times` times in all.
    pub fn after(inner: Arc<dyn Network>, receives: usize, times: usize) -> Arc<dyn Network> {
        Arc::new(Self {
            inner,
            receives,
            times: Arc::new(AtomicUsize::new(times)),
        })
    }
}

impl Network for Panicking {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn channel_count(&self, asked: u16) -> u16 {
        self.inner.channel_count(asked)
    }

    fn chunk_bytes(&self) -> u32 {
        self.inner.chunk_bytes()
    }

    fn windows(&self) -> (u16, u16) {
        self.inner.windows()
    }

    fn can_cancel(&self) -> bool {
        self.inner.can_cancel()
    }

    fn allows_eager(&self) -> bool {
        self.inner.allows_eager()
    }

    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let channels = self.inner.establish(setup, exchange)?;
        let wrap = |inner| -> Box<dyn Channel> {
            Box::new(PanickingChannel {
                inner,
                receives_left: self.receives,
                times: Arc::clone(&self.times),
            })
        };
        Ok(channels.into_iter().map(wrap).collect())
    }
}

#[derive(Debug)]
struct PanickingChannel {
    inner: Box<dyn Channel>,
    receives_left: usize,
    times: Arc<AtomicUsize>,
}

impl PanickingChannel {
    fn maybe(&self) {
        let less = |left: usize| left.checked_sub(1);
        let order = Ordering::SeqCst;
        if self.receives_left == 0 && self.times.fetch_update(order, order, less).is_ok() {
            panic!("made to panic");
        }
    }
}

impl Channel for PanickingChannel {
    fn consume(&mut self, ticket: Ticket) -> Result<Posted<Ticket>, ChannelError> {
        self.inner.consume(ticket)
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn post_send(&mut self, chunk: SendChunk) -> Result<Posted<SendChunk>, ChannelError> {
        self.inner.post_send(chunk)
    }

    fn post_receive(&mut self, chunk: ReceiveChunk) -> Result<Posted<ReceiveChunk>, ChannelError> {
        let posted = self.inner.post_receive(chunk)?;
        if matches!(posted, Posted::Accepted) {
            self.receives_left = self.receives_left.saturating_sub(1);
        }
        Ok(posted)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        self.maybe();
        self.inner.poll(out)
    }

    fn cancel(&mut self, token: u64) -> Cancel {
        self.inner.cancel(token)
    }

    fn discard(&mut self, first: u64, end: u64) {
        self.inner.discard(first, end);
    }

    fn readiness(&self) -> Readiness<'_> {
        self.inner.readiness()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn close(&mut self) {
        self.maybe();
        self.inner.close();
    }

    fn closed(&self) -> bool {
        self.inner.closed()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn stats(&self) -> ChannelStats {
        self.inner.stats()
    }
}
