//! What `tcpx status` tells of a listening endpoint.

use std::net::SocketAddr;
use std::sync::Arc;

use tcpx_net::ListenerNudge;
use tcpx_status::{
    Description, Ended, ListenerReport, RefusalReport, Registration, Source, register,
};

/// An endpoint's place in the status of its process.
#[derive(Debug)]
pub(super) struct Told {
    listening: Arc<Listening>,
    registration: Registration,
}

#[derive(Debug)]
struct Listening {
    address: SocketAddr,
    nudge: ListenerNudge,
}

impl Told {
    pub(super) fn new(address: SocketAddr, nudge: ListenerNudge) -> Self {
        let listening = Arc::new(Listening { address, nudge });
        let source = Arc::downgrade(&listening);
        Self {
            registration: register(source, false),
            listening,
        }
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let refused = || self.listening.nudge.refusals().count;
        self.registration.ended(|| Ended {
            refused: refused(),
            ..Ended::default()
        });
    }
}

impl Source for Listening {
    fn describe(&self) -> Option<Description> {
        let refusals = self.nudge.refusals();
        Some(Description::Listener(ListenerReport {
            address: self.address.to_string(),
            refused: refusals.count,
            last_refusal: refusals.last.map(|(peer, reason)| RefusalReport {
                peer: peer.to_string(),
                reason,
            }),
        }))
    }
}
