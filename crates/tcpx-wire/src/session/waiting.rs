//! What waits for transmission, and whether it bears waiting.

use super::Session;
use super::outgoing::Outgoing;
use crate::frame::Frame;

/// Sends under way above which each end is told at once.
const MANY: usize = 64;

/// Frames that wait for [`Session::poll_transmit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// There are others than those counted here, or the session closes: nothing should be held back.
    pub urgent: bool,
    /// Acknowledgements, and credit for eager payload.
    pub acknowledgements: usize,
    /// Receives that are posted to the peer.
    pub posted: usize,
    /// Posted receives that no send has come to, those included that wait here.
    pub open: usize,
    /// Eager payloads.
    pub eager: usize,
    /// Their bytes.
    pub eager_bytes: u64,
}

impl Session {
    /// What waits for transmission. A caller may leave acknowledgements, posted receives and eager payloads where
    /// they are for a moment, so that several leave together; nothing else.
    pub fn waiting(&self) -> Waiting {
        let mut waiting = Waiting {
            urgent: self.acks.due.is_some() || self.closing(),
            open: self.posting.open,
            ..Waiting::default()
        };
        for frame in &self.transmit {
            match frame {
                Frame::EagerDone { .. } | Frame::EagerCredit { .. } => {
                    waiting.acknowledgements += 1;
                }
                // The next receive may be posted with it.
                Frame::Placed { .. } if self.config.addressed => waiting.acknowledgements += 1,
                Frame::Posted { .. } => waiting.posted += 1,
                Frame::Eager { payload, .. } => {
                    waiting.eager += 1;
                    waiting.eager_bytes += payload.len() as u64;
                }
                _ => {
                    waiting.urgent = true;
                    break;
                }
            }
        }
        waiting
    }

    /// Whether more than the peer's acknowledgement is waited for: to hear at once that chunks were sent.
    pub fn waits_for_sent(&self) -> bool {
        let many = self.sends.len() > MANY;
        let held = self.config.hold_until_placed;
        many || !held || self.ended() || self.sends.values().any(Outgoing::waits_for_sent)
    }

    /// Sends that the peer has not acknowledged, those included that wait for transmission.
    pub fn sends_under_way(&self) -> usize {
        self.sends.len()
    }
}
