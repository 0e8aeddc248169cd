//! The way out: sends on the payload lane, or on the ordinary one once that is given up.

use std::io;

use super::{DevmemChannel, PEER_ENDED, is_the_peers_end};
use crate::ordinary::{self, HEADER_BYTES, Header, OrdinaryLane};
use crate::outflow::{NextWrite, Source};
use tcpx_net::channel::{Completion, SendChunk};
use tcpx_net::error::ChannelError;

/// Most payload bytes that one call offers.
const WIRE_CALL: usize = 1 << 20;
/// Calls of one poll; the rest waits for the next one, which comes at once.
const SENDS: usize = 32;

impl DevmemChannel {
    /// Queues a chunk, by way of a slot if that is needed.
    pub(super) fn queue_send(&mut self, chunk: SendChunk) -> Result<(), ChannelError> {
        let (length, sequence) = (chunk.source.len(), chunk.sequence);
        let is_staged = self.stage.is_needed(&chunk.source);
        if !is_staged {
            let source = Source::Host(chunk.source);
            self.outflow.post(chunk.token, sequence, length, source);
            return Ok(());
        }
        self.outflow
            .post(chunk.token, sequence, length, Source::Staging);
        self.stage.begin(sequence, chunk.source, chunk.fence);
        self.progress_stage()
    }

    /// Tells the peer that the payload lane is given up, with the ordinary lane's first bytes.
    pub(super) fn announce(&mut self) -> Result<(), ChannelError> {
        let Some(lane) = &self.ordinary else {
            return Ok(());
        };
        let nothing = Header {
            sequence: 0,
            length: 0,
        };
        match ordinary::send(lane.socket(), &nothing.encode()) {
            Ok(HEADER_BYTES) => Ok(()),
            Ok(_) => self.ordinary_failed(io::ErrorKind::WriteZero.into()),
            Err(error) => self.ordinary_failed(error),
        }
    }

    /// A peer that has closed shows first where one writes; it is no error while nothing is in
    /// flight.
    fn ordinary_failed(&mut self, error: io::Error) -> Result<(), ChannelError> {
        if is_the_peers_end(&error) {
            self.peer_closed = true;
            return Ok(());
        }
        Err(self.system("writing to the ordinary lane", error))
    }

    /// Writes as far as the lane takes it.
    pub(super) fn write(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        for _ in 0..SENDS {
            if !self.writable || self.unreported || self.peer_closed {
                return Ok(());
            }
            let lane = match self.failed_over {
                true => self.ordinary.as_ref().map(OrdinaryLane::socket),
                false => Self::socket_of(&self.payload),
            };
            let (Some(next), Some(socket)) = (self.outflow.next(WIRE_CALL), lane) else {
                return Ok(());
            };
            let sent = match &next {
                NextWrite::Header(header, from) => ordinary::send(socket, &header[*from..]),
                NextWrite::Host(part) => self.calls.send(socket, part),
                NextWrite::Device {
                    slot,
                    offset,
                    length,
                } => {
                    let id = slot.dmabuf_id();
                    self.calls.send_device(socket, id, *offset, *length)
                }
            };
            match (sent, next) {
                (Ok(sent), next) => {
                    self.outflow.wrote(sent);
                    match next {
                        NextWrite::Header(..) => continue,
                        NextWrite::Host(_) => {}
                        NextWrite::Device { slot, .. } => self.in_kernel.sent(slot),
                    }
                    self.stats.bytes_sent += sent as u64;
                }
                (Err(error), _) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.writable = false;
                }
                (Err(error), _) if self.failed_over => return self.ordinary_failed(error),
                (Err(error), _)
                    if error.raw_os_error() == Some(libc::ENOBUFS)
                        && !self.in_kernel.is_empty() =>
                {
                    self.unreported = true;
                }
                (Err(error), next) => {
                    let why = match next {
                        _ if is_the_peers_end(&error) => PEER_ENDED.to_owned(),
                        NextWrite::Device { .. } => {
                            format!("sending out of device memory failed: {error}")
                        }
                        _ => format!("sending on the payload lane failed: {error}"),
                    };
                    return self.fail_over(why, out);
                }
            }
        }
        // More than its share: the next poll goes on.
        self.signal.wake();
        Ok(())
    }

    /// Takes reports about zero-copy sends.
    pub(super) fn reap_sends(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        while !self.in_kernel.is_empty() {
            let Some(socket) = Self::socket_of(&self.payload) else {
                return Ok(());
            };
            match self.calls.done(socket) {
                Ok(Some(done)) => {
                    self.unreported = false;
                    if let Err(bad) = self.in_kernel.done(done) {
                        return Err(self.protocol("reports of sends made".into(), bad.to_string()));
                    }
                }
                Ok(None) => return Ok(()),
                Err(error) => {
                    // The connection's own error: its bytes go another way. What the kernel still
                    // has of them is waited for when the socket is closed.
                    let why = if is_the_peers_end(&error) {
                        PEER_ENDED.to_owned()
                    } else {
                        format!("the payload lane failed: {error}")
                    };
                    return self.fail_over(why, out);
                }
            }
        }
        Ok(())
    }
}
