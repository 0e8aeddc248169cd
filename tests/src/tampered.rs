//! A network whose channels do something else than those of the network inside, at a few of their
//! calls.

use std::fmt::Debug;
use std::sync::Arc;

use tcpx_net::{
    Cancel, Channel, ChannelError, ChannelStats, Completion, Exchange, Features, Network,
    NetworkError, PendingClose, PostAnswer, Readiness, ReceiveChunk, ReceiveWindow, SendChunk,
    Setup, Ticket,
};

/// What is done to one channel.
pub trait Tamper: Clone + Debug + Send + Sync + 'static {
    /// Called with a ticket that the engine gives back; it may keep it from the channel.
    ///
    /// # Errors
    /// The channel's.
    fn consume(
        &mut self,
        channel: &mut dyn Channel,
        ticket: Ticket,
    ) -> Result<PostAnswer<Ticket>, ChannelError> {
        channel.consume(ticket)
    }

    /// The channel has accepted a receive, or placed a chunk in a window.
    fn receives(&mut self) {}

    /// The engine polls or closes the channel, or a chunk was placed.
    fn enters(&mut self) {}
}

/// Like the network inside, but for what `tamper` does; each channel has a copy of it.
#[derive(Debug)]
pub struct Tampered<T> {
    inner: Arc<dyn Network>,
    tamper: T,
}

impl<T: Tamper> Tampered<T> {
    /// Wraps a network.
    pub fn network(inner: Arc<dyn Network>, tamper: T) -> Arc<dyn Network> {
        Arc::new(Self { inner, tamper })
    }
}

impl<T: Tamper> Network for Tampered<T> {
    fn features(&self, asked: u16) -> Features {
        self.inner.features(asked)
    }

    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let channels = self.inner.establish(setup, exchange)?;
        let wrap = |inner| -> Box<dyn Channel> {
            let tamper = self.tamper.clone();
            Box::new(TamperedChannel { inner, tamper })
        };
        Ok(channels.into_iter().map(wrap).collect())
    }
}

#[derive(Debug)]
struct TamperedChannel<T> {
    inner: Box<dyn Channel>,
    tamper: T,
}

impl<T: Tamper> Channel for TamperedChannel<T> {
    fn consume(&mut self, ticket: Ticket) -> Result<PostAnswer<Ticket>, ChannelError> {
        self.tamper.consume(&mut *self.inner, ticket)
    }

    fn post_send(&mut self, chunk: SendChunk) -> Result<PostAnswer<SendChunk>, ChannelError> {
        self.inner.post_send(chunk)
    }

    fn post_receive(
        &mut self,
        chunk: ReceiveChunk,
    ) -> Result<PostAnswer<ReceiveChunk>, ChannelError> {
        let posted = self.inner.post_receive(chunk)?;
        if matches!(posted, PostAnswer::Accepted) {
            self.tamper.receives();
        }
        Ok(posted)
    }

    fn open_window(&mut self, window: ReceiveWindow) -> Result<(), ChannelError> {
        self.inner.open_window(window)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        self.tamper.enters();
        self.inner.poll(out)?;
        for completion in out.iter() {
            if matches!(completion, Completion::Placed { .. }) {
                self.tamper.receives();
                self.tamper.enters();
            }
        }
        Ok(())
    }

    fn cancel(&mut self, token: u64) -> Cancel {
        self.inner.cancel(token)
    }

    fn readiness(&self) -> Readiness<'_> {
        self.inner.readiness()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn close(&mut self) {
        self.tamper.enters();
        self.inner.close();
    }

    fn closed(&self) -> bool {
        self.inner.closed()
    }

    fn pending_close(&self) -> Option<PendingClose> {
        self.inner.pending_close()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn stats(&self) -> ChannelStats {
        self.inner.stats()
    }
}
