//! A network that stops giving pool space back: what the historic stall was made of.

use std::sync::Arc;

use tcpx_net::{
    Cancel, Capabilities, Channel, ChannelError, ChannelStats, Completion, Exchange, Network,
    NetworkError, Posted, Readiness, ReceiveChunk, SendChunk, Setup, Ticket,
};

/// Like the network inside, but each channel takes only so many tickets back.
#[derive(Debug)]
pub struct Withholding {
    inner: Arc<dyn Network>,
    consumes: usize,
}

impl Withholding {
    /// Each channel of `inner` consumes `consumes` receives.
    pub fn after(inner: Arc<dyn Network>, consumes: usize) -> Arc<dyn Network> {
        Arc::new(Self { inner, consumes })
    }
}

impl Network for Withholding {
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
        let withhold = |inner| -> Box<dyn Channel> {
            let left = self.consumes;
            Box::new(WithholdingChannel { inner, left })
        };
        Ok(channels.into_iter().map(withhold).collect())
    }
}

#[derive(Debug)]
struct WithholdingChannel {
    inner: Box<dyn Channel>,
    left: usize,
}

impl Channel for WithholdingChannel {
    fn consume(&mut self, ticket: Ticket) -> Result<Posted<Ticket>, ChannelError> {
        if self.left == 0 {
            return Ok(Posted::Full(ticket));
        }
        self.left -= 1;
        self.inner.consume(ticket)
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn post_send(&mut self, chunk: SendChunk) -> Result<Posted<SendChunk>, ChannelError> {
        self.inner.post_send(chunk)
    }

    fn post_receive(&mut self, chunk: ReceiveChunk) -> Result<Posted<ReceiveChunk>, ChannelError> {
        self.inner.post_receive(chunk)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
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
