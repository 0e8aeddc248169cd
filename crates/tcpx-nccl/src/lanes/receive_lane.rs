//! The receiving end of a lane: reads each chunk to where its header says.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::epoll;
use tcpx_lanes::event_loop::{Source, Turn};
use tcpx_lanes::socket_calls::{self as socket, Moved, Span};

use super::chunk::{ANSWER_BYTES, CHUNK_HEADER_BYTES, ChunkHeader, GROUP_BYTES, decode_group};
use super::group::{Group, Registry};
use super::inlet::Inlet;
use super::to_gpu::ToGpu;
use crate::held::Stream;
use crate::log::Log;

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
    /// It goes to GPU memory, and `at` is nothing.
    to_gpu: Option<ToGpu>,
    /// The sender waits until it was read.
    answered: bool,
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
    /// Chunks read whose senders waited for the answer.
    read: u64,
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
            read: 0,
            known: HashMap::new(),
            scratch: Vec::new(),
        }
    }

    /// Reads once; `None` when nothing has arrived, an error when the lane ended.
    fn read(&mut self) -> Result<Option<usize>, String> {
        let moved = match &mut self.arriving {
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
                let may_write = matches!(writing, Some(Some(_)));
                let payload = match &mut arriving.to_gpu {
                    Some(to_gpu) if may_write => match to_gpu.room() {
                        Some(room) => room,
                        None => return Ok(None),
                    },
                    None if may_write => arriving.at,
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
                // which its comm leaves to us while `writing` lives, or of a pinned slot that is
                // ours, or our scratch memory; the header is ours and empty while a payload arrives.
                let moved = unsafe { socket::receive_spans(&self.stream, spans) };
                if arriving.answered
                    && let Ok(Some(error)) = self.stream.take_error()
                {
                    // The sender reset the lane: its memory may have changed before we read it.
                    return Err(error.to_string());
                }
                if let Ok(Moved::Bytes(bytes)) = moved
                    && arriving.answered
                    && bytes >= self.left
                {
                    // Before the comm hears of it: it may close then, and so may its process.
                    self.read += 1;
                    answer(&self.stream, self.read)?;
                }
                if let (Ok(Moved::Bytes(bytes)), Some(inlet), true) =
                    (&moved, &arriving.inlet, may_write)
                {
                    let bytes = (*bytes).min(self.left);
                    match &mut arriving.to_gpu {
                        Some(to_gpu) => to_gpu.arrived(bytes, inlet, arriving.sequence),
                        None => inlet.wrote(arriving.sequence, bytes),
                    }
                }
                moved
            }
        };
        let bytes = match moved {
            Ok(Moved::Bytes(bytes)) => bytes,
            Ok(Moved::WouldBlock) => return Ok(None),
            Ok(Moved::End) => return Err("end of stream".to_owned()),
            Err(error) => return Err(error.to_string()),
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
                let (id, lanes) = decode_group(&record)?;
                let group = self.registry.group(id);
                if !group.entered(lanes) {
                    return Err("lanes that disagree about their number".to_owned());
                }
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
        let (inlet, at, to_gpu) = match claimed {
            Some((inlet, at)) => match inlet.device(&header) {
                Some(device) => (Some(inlet), Span::EMPTY, Some(ToGpu::new(device))),
                None => (Some(inlet), Span::new(at, self.left), None),
            },
            None => (None, Span::EMPTY, None),
        };
        self.arriving = Some(Arriving {
            inlet,
            sequence: header.sequence,
            at,
            to_gpu,
            answered: header.answered,
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

/// Tells the sender how many chunks were read.
fn answer(stream: &Stream, read: u64) -> Result<(), String> {
    let answer: [u8; ANSWER_BYTES] = read.to_le_bytes();
    match socket::send_bytes(stream, &answer) {
        Ok(Moved::Bytes(ANSWER_BYTES)) => Ok(()),
        Err(error) => Err(error.to_string()),
        // The few chunks that a sender leaves unanswered fit any buffer.
        moved => Err(format!("the sender reads no answers: {moved:?}")),
    }
}

impl Drop for ReceiveLane {
    fn drop(&mut self) {
        self.end("our side closed it");
    }
}

impl Source for ReceiveLane {
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use nccl_net::export::{Buffer, HostLogger};

    use super::*;
    use crate::lanes::chunk::encode_group;

    const BYTES: usize = 100_000;

    /// A lane, its peer's end, and a comm that waits for messages 0 and 1.
    fn lane(memory: &mut [u8]) -> (ReceiveLane, TcpStream, Arc<Inlet>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let (stream, _) = listener.accept().unwrap();
        tcpx_lanes::socket::prepare_comm(&stream).unwrap();
        let registry = Arc::new(Registry::default());
        let inlet = Arc::new(Inlet::new(1));
        registry.open(&inlet);
        assert!(inlet.join(registry.group([7; 16])));
        for (sequence, half) in memory.chunks_mut(BYTES).enumerate() {
            let buffer = Buffer {
                data: half.as_mut_ptr(),
                len: half.len(),
            };
            inlet.post(sequence as u64, buffer, None);
        }
        let log = Arc::new(Log::new(HostLogger::default()));
        (
            ReceiveLane::new(Stream::new(stream), registry, log),
            peer,
            inlet,
        )
    }

    fn header(sequence: u64) -> [u8; CHUNK_HEADER_BYTES] {
        let header = ChunkHeader {
            stream: 1,
            sequence,
            offset: 0,
            total: BYTES as u64,
            len: BYTES as u32,
            answered: true,
        };
        header.encode()
    }

    #[test]
    fn a_chunk_is_answered_once_it_was_read_and_one_of_a_lane_that_was_reset_does_not_count() {
        let mut memory = vec![0; 2 * BYTES];
        let (mut lane, mut peer, inlet) = lane(&mut memory);
        peer.write_all(&encode_group(&[7; 16], 1)).unwrap();
        peer.write_all(&header(0)).unwrap();
        peer.write_all(&[5; BYTES]).unwrap();
        while inlet.progress(0) != Some((BYTES as u64, BYTES as u64)) {
            assert_eq!(lane.turn(), Turn::Rest);
        }
        let mut answer = [0; ANSWER_BYTES];
        peer.read_exact(&mut answer).unwrap();
        assert_eq!(u64::from_le_bytes(answer), 1);
        // All of the next chunk has arrived when its sender takes the memory back.
        peer.write_all(&header(1)).unwrap();
        peer.write_all(&[5; BYTES]).unwrap();
        let peer = socket2::Socket::from(peer);
        peer.set_linger(Some(Duration::ZERO)).unwrap();
        drop(peer);
        while lane.turn() != Turn::End {}
        assert!(
            inlet
                .progress(1)
                .is_none_or(|(written, _)| written < BYTES as u64)
        );
        assert!(inlet.group().unwrap().lost().is_some());
    }
}
