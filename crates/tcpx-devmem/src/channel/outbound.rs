//! The way out: sends on the payload connection, or on the companion once that is given up.

use std::io;

use tcpx_memory::RegionSlice;

use super::{DevmemChannel, PEER_ENDED, Path, is_the_peers_end};
use crate::outflow::{Next, Source};
use tcpx_net::channel::{Completion, SendChunk};
use tcpx_net::error::ChannelError;

/// Most payload bytes that one call offers.
const WIRE_CALL: usize = 1 << 20;
/// Calls of one poll; the rest waits for the next one, which comes at once.
const SENDS: usize = 32;

/// What a call is about to send.
enum Bytes {
    Host(RegionSlice),
    Device { offset: u64, length: usize },
}

impl DevmemChannel {
    /// Queues a chunk, by way of a slot if that is needed.
    pub(super) fn queue_send(&mut self, chunk: SendChunk) -> Result<(), ChannelError> {
        let length = chunk.source.len() as u64;
        if self.stage.is_needed(&chunk.source) {
            let start = self.outflow.post(chunk.token, length, Source::Staging);
            self.stage.begin(start, chunk.source, chunk.fence);
            self.progress_stage()
        } else {
            self.outflow
                .post(chunk.token, length, Source::Host(chunk.source));
            Ok(())
        }
    }

    /// Gives the payload connection up for sending, until the peer says from where on it wants the
    /// bytes on the companion.
    pub(super) fn leave_out(&mut self, why: &str) {
        if self.way_out != Path::Payload {
            return;
        }
        self.way_out = Path::Waiting;
        tracing::debug!(channel = %self.name, why, "the payload connection is given up");
        if let Some(payload) = &self.payload {
            // The peer reads what is under way and then the end. A socket that is not connected
            // any more has told it already.
            let _ = rustix::net::shutdown(payload, rustix::net::Shutdown::Write);
        }
    }

    /// Writes words and payload as far as the sockets take them.
    pub(super) fn write(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        match self.way_out {
            Path::Payload => self.write_payload(out)?,
            Path::Waiting => {}
            Path::Companion => return self.write_companion(out),
        }
        self.flush_words().map(drop)
    }

    /// Writes words; true when none are left.
    fn flush_words(&mut self) -> Result<bool, ChannelError> {
        let Some(companion) = self.companion.as_mut().filter(|_| !self.peer_closed) else {
            return Ok(true);
        };
        match companion.flush() {
            Ok(done) => Ok(done),
            Err(error) => self.companion_failed(error).map(|()| true),
        }
    }

    /// A peer that has closed shows first where one writes; it is no error while nothing is in flight.
    fn companion_failed(&mut self, error: io::Error) -> Result<(), ChannelError> {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                self.peer_closed = true;
                Ok(())
            }
            _ => Err(self.system("writing to the companion connection", error)),
        }
    }

    fn write_payload(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        for _ in 0..SENDS {
            if !self.writable || self.unreported {
                return Ok(());
            }
            let Some(next) = self.outflow.next() else {
                return Ok(());
            };
            let Some(bytes) = self.bytes_of(&next)? else {
                return Ok(());
            };
            let Some(socket) = Self::socket_of(&self.payload) else {
                return Ok(());
            };
            let (sent, slot) = match (&bytes, next.source) {
                (Bytes::Device { offset, length }, Source::Device { slot, .. }) => {
                    let id = slot.dmabuf_id();
                    let sent = self.calls.send_device(socket, id, *offset, *length);
                    (sent, Some(std::sync::Arc::clone(slot)))
                }
                (Bytes::Host(part), _) => (self.calls.send(socket, part), None),
                _ => return Ok(()),
            };
            match sent {
                Ok(sent) => {
                    if let Some(slot) = slot {
                        self.in_kernel.sent(slot);
                    }
                    self.outflow.wrote(sent);
                    self.stats.bytes_sent += sent as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.writable = false;
                }
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOBUFS)
                        && !self.in_kernel.is_empty() =>
                {
                    self.unreported = true;
                }
                Err(error) => {
                    let why = match slot {
                        _ if is_the_peers_end(&error) => PEER_ENDED.to_owned(),
                        Some(_) => format!("sending out of device memory failed: {error}"),
                        None => format!("sending on the payload connection failed: {error}"),
                    };
                    self.leave_out(&why);
                    self.path_changed(why, out);
                    return Ok(());
                }
            }
        }
        // More than its share: the next poll goes on.
        self.signal.wake();
        Ok(())
    }

    /// What its socket has taken is sent: nobody asks for it again on another path.
    fn write_companion(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        for _ in 0..SENDS {
            if !self.flush_words()? || self.peer_closed {
                return Ok(());
            }
            self.stats.chunks_sent += self.outflow.let_go(out);
            let (Some(next), Some(companion)) = (self.outflow.next(), &self.companion) else {
                return Ok(());
            };
            let Some(Bytes::Host(part)) = self.bytes_of(&next)? else {
                return Ok(());
            };
            if !self.writable {
                return Ok(());
            }
            let sent = self.calls.send(companion.socket(), &part);
            match sent {
                Ok(sent) => {
                    self.outflow.wrote(sent);
                    self.stats.bytes_sent += sent as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.writable = false;
                    return Ok(());
                }
                Err(error) => return self.companion_failed(error),
            }
        }
        self.signal.wake();
        Ok(())
    }

    /// The next bytes as one call may send them; `None` while they are being copied.
    fn bytes_of(&self, next: &Next<'_>) -> Result<Option<Bytes>, ChannelError> {
        let length = next.length.min(WIRE_CALL);
        match next.source {
            Source::Host(slice) => slice
                .slice(next.from..next.from + length)
                .map(|part| Some(Bytes::Host(part)))
                .map_err(|error| ChannelError::Memory {
                    channel: self.name.clone(),
                    operation: "cutting a chunk",
                    cause: error.to_string(),
                }),
            Source::Device { slot, .. } => Ok(Some(Bytes::Device {
                offset: slot.offset() + next.from as u64,
                length,
            })),
            Source::Staging | Source::Failed => Ok(None),
        }
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
                        format!("the payload connection failed: {error}")
                    };
                    self.leave_out(&why);
                    self.path_changed(why, out);
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}
