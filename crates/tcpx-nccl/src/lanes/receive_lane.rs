//! The receiving end of a lane: reads each chunk to where its header says.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::epoll;

use super::chunk::{CHUNK_HEADER_BYTES, ChunkHeader, GROUP_BYTES, decode_group};
use super::group::{Group, Registry};
use super::inlet::Inlet;
use super::looper::{Lane, Turn};
use crate::log::Log;
use crate::socket::{self, Moved, Span, Stream};

/// Bytes of a turn, so that the lanes of a loop advance together.
const TURN_BYTES: usize = 2 << 20;
/// Where payload goes that nobody wants any more.
const SCRATCH_BYTES: usize = 64 << 10;

/// A chunk whose payload is arriving.
#[derive(Debug)]
struct Arriving {
    /// `None`: read and dropped.
    inlet: Option<Arc<Inlet>>,
    sequence: u64,
    at: Span,
}

/// One lane, from the end of its handshake on.
#[derive(Debug)]
pub(crate) struct ReceiveLane {
    stream: Stream,
    registry: Arc<Registry>,
    log: Arc<Log>,
    group: Option<Arc<Group>>,
    header: [u8; CHUNK_HEADER_BYTES],
    header_bytes: usize,
    arriving: Option<Arriving>,
    left: usize,
    /// Comms seen on this lane.
    known: HashMap<u64, Arc<Inlet>>,
    /// Made when the first chunk is dropped.
    scratch: Vec<u8>,
}

impl ReceiveLane {
    pub(crate) fn new(stream: Stream, registry: Arc<Registry>, log: Arc<Log>) -> Self {
        Self {
            stream,
            registry,
            log,
            group: None,
            header: [0; CHUNK_HEADER_BYTES],
            header_bytes: 0,
            arriving: None,
            left: 0,
            known: HashMap::new(),
            scratch: Vec::new(),
        }
    }

    /// Reads once; `None` when nothing has arrived, an error when the lane ended.
    fn read(&mut self) -> Result<Option<usize>, String> {
        let moved = match &self.arriving {
            None => {
                let end = if self.group.is_some() {
                    CHUNK_HEADER_BYTES
                } else {
                    GROUP_BYTES
                };
                socket::receive_bytes(&self.stream, &mut self.header[self.header_bytes..end])
            }
            Some(arriving) => {
                // The comm's memory is ours only while the right to write lives.
                let writing = arriving.inlet.as_ref().map(|inlet| inlet.write());
                let payload = match writing {
                    Some(Some(_)) => arriving.at,
                    _ => {
                        self.scratch.resize(SCRATCH_BYTES, 0);
                        let bytes = self.left.min(self.scratch.len());
                        Span::of_mut(&mut self.scratch[..bytes])
                    }
                };
                let whole = payload.len() == self.left;
                let spans = [payload, Span::of_mut(&mut self.header)];
                let spans = if whole { &spans[..] } else { &spans[..1] };
                // SAFETY: the payload's span is what is left of a claimed part of a posted buffer,
                // which its comm leaves to us while `writing` lives, or our scratch memory; the
                // header is ours and empty while a payload arrives.
                let moved = unsafe { socket::receive(&self.stream, spans) };
                if let (Moved::Bytes(bytes), Some(inlet), Some(Some(_))) =
                    (&moved, &arriving.inlet, &writing)
                {
                    inlet.wrote(arriving.sequence, (*bytes).min(self.left));
                }
                moved
            }
        };
        let bytes = match moved {
            Moved::Bytes(bytes) => bytes,
            Moved::Later => return Ok(None),
            Moved::End => return Err("end of stream".to_owned()),
            Moved::Broken(error) => return Err(error.to_string()),
        };
        self.advance(bytes)?;
        Ok(Some(bytes))
    }

    /// Accounts for bytes that were read.
    fn advance(&mut self, bytes: usize) -> Result<(), String> {
        let payload = bytes.min(self.left);
        self.left -= payload;
        if let Some(arriving) = &mut self.arriving {
            arriving.at = arriving.at.from(payload);
            if self.left == 0 {
                self.arriving = None;
            }
        }
        self.header_bytes += bytes - payload;
        let Some(group) = &self.group else {
            if self.header_bytes == GROUP_BYTES {
                let mut record = [0; GROUP_BYTES];
                record.copy_from_slice(&self.header[..GROUP_BYTES]);
                let group = self.registry.group(decode_group(&record)?);
                group.entered();
                self.group = Some(group);
                self.header_bytes = 0;
            }
            return Ok(());
        };
        if self.header_bytes < CHUNK_HEADER_BYTES {
            return Ok(());
        }
        self.header_bytes = 0;
        let header = ChunkHeader::decode(&self.header)?;
        let group = Arc::clone(group);
        let inlet = self.inlet(header.stream);
        let claimed = inlet.and_then(|inlet| {
            let at = inlet.claim(&group, &header).ok()?;
            Some((inlet, at))
        });
        self.left = header.len as usize;
        let (inlet, at) = match claimed {
            Some((inlet, at)) => (Some(inlet), Span::new(at, self.left)),
            None => (None, Span::EMPTY),
        };
        self.arriving = Some(Arriving {
            inlet,
            sequence: header.sequence,
            at,
        });
        Ok(())
    }

    fn inlet(&mut self, id: u64) -> Option<Arc<Inlet>> {
        if let Some(inlet) = self.known.get(&id) {
            return Some(Arc::clone(inlet));
        }
        let inlet = self.registry.inlet(id)?;
        self.known.retain(|_, inlet| !inlet.is_closed());
        self.known.insert(id, Arc::clone(&inlet));
        Some(inlet)
    }

    /// The lane is over: whoever waits for its bytes must hear of it.
    fn end(&mut self, why: &str) {
        let Some(group) = self.group.take() else {
            return;
        };
        if why == "end of stream" && self.left == 0 && self.header_bytes == 0 {
            group.left();
        } else {
            let peer = self
                .stream
                .peer_addr()
                .map_or_else(|_| "a peer".to_owned(), |peer| peer.to_string());
            group.lose(format!("a lane from {peer} broke: {why}"));
            self.log.info(&format!("lane from {peer} ended: {why}"));
        }
    }
}

impl Drop for ReceiveLane {
    fn drop(&mut self) {
        self.end("our side closed it");
    }
}

impl Lane for ReceiveLane {
    fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn interest(&self) -> epoll::EventFlags {
        epoll::EventFlags::IN | epoll::EventFlags::RDHUP
    }

    fn turn(&mut self) -> Turn {
        let mut budget = TURN_BYTES;
        while budget > 0 {
            match self.read() {
                Ok(Some(bytes)) => budget = budget.saturating_sub(bytes),
                Ok(None) => return Turn::Rest,
                Err(why) => {
                    self.end(&why);
                    return Turn::End;
                }
            }
        }
        Turn::Again
    }
}
