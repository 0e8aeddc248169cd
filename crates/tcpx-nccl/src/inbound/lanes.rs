//! The part of a receive comm's connection that has to do with lanes.

use nccl_net::export::NetError;
use tcpx_lanes::socket_calls::Moved;

use super::Inbound;
use crate::error;
use crate::header::{HEADER_BYTES, Header, Record};
use crate::lanes::recv_stream::Refusal;

impl Inbound {
    /// Ends the receives that lanes filled, grants the posted ones, and finds why none can come;
    /// `true` when lanes moved bytes.
    pub(super) fn look_at_lanes(&mut self) -> Result<bool, NetError> {
        let Some(lanes) = &mut self.lanes else {
            return Ok(false);
        };
        if let Some(refusal) = lanes.recv_stream.refusal().cloned() {
            return Err(match refusal {
                Refusal::TooLarge {
                    sequence,
                    total,
                    capacity,
                } => self.refuse(sequence, total, capacity),
                Refusal::Protocol { expected, arrived } => self.protocol(expected, arrived),
                Refusal::Copy(error) => {
                    error::copy(&self.name, "copying a receive to GPU memory")(error)
                }
            });
        }
        if let Some(answers) = &self.answers
            && let Some(grant) = lanes.grant(self.ring.posted(), self.ring.len())
        {
            // 24 bytes, and the sender reads whenever it has a message: they fit.
            match answers.send_whole(&grant.encode(Record::Grant)) {
                Ok(Moved::Bytes(HEADER_BYTES)) => {}
                // The sender has closed, or asks again over other connections. What it sent before
                // may wait to be read, and reading tells.
                Err(_) => {}
                moved => {
                    return Err(
                        self.protocol("a sender that reads its grants", format!("{moved:?}"))
                    );
                }
            }
        }
        let Some(lanes) = &mut self.lanes else {
            return Ok(false);
        };
        Ok(lanes.has_moved())
    }

    /// Bytes of a receive that lanes filled.
    pub(crate) fn landed(&mut self, sequence: u64) -> Option<usize> {
        self.lanes.as_mut()?.landed(sequence)
    }

    /// What has become of a receive after the connection ended: lanes may still hold its bytes.
    pub(crate) fn outlook(&self, sequence: u64) -> Result<(), NetError> {
        let Some(failure) = &self.failure else {
            return Ok(());
        };
        let Some(lanes) = self.lanes.as_ref().filter(|_| self.peer_closed) else {
            return Err(failure.clone());
        };
        let sent = self.sent_in_all.is_some_and(|all| sequence < all);
        // In this order: the last bytes may land between two looks.
        let comes = sent && !lanes.is_gone();
        if comes || lanes.recv_stream.is_copying(sequence) || lanes.is_whole(sequence) {
            return Ok(());
        }
        Err(match sent {
            true => error::lanes_ended(&self.name, "the peer closed all its lanes"),
            false => failure.clone(),
        })
    }

    /// The sender names its lanes.
    pub(super) fn join(&mut self, header: Header) -> Result<(), NetError> {
        let joined = self
            .lanes
            .as_mut()
            .is_some_and(|lanes| lanes.join(header.group()));
        if joined {
            Ok(())
        } else {
            Err(self.protocol(
                "a sender that names its lanes once, to a receiver that has a door",
                "another",
            ))
        }
    }
}
