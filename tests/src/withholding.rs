//! A network that stops giving pool space back: what the historic stall was made of.

use std::sync::Arc;

use tcpx_net::{Channel, ChannelError, Network, PostAnswer, Ticket};

use crate::tampered::{Tamper, Tampered};

/// Takes only so many tickets back.
#[derive(Clone, Debug)]
pub struct Withholding {
    left: usize,
}

impl Withholding {
    /// Each channel of `inner` consumes `consumes` receives.
    pub fn after_consumes(inner: Arc<dyn Network>, consumes: usize) -> Arc<dyn Network> {
        Tampered::network(inner, Self { left: consumes })
    }
}

impl Tamper for Withholding {
    fn consume(
        &mut self,
        channel: &mut dyn Channel,
        ticket: Ticket,
    ) -> Result<PostAnswer<Ticket>, ChannelError> {
        if self.left == 0 {
            return Ok(PostAnswer::Full(ticket));
        }
        self.left -= 1;
        channel.consume(ticket)
    }
}
