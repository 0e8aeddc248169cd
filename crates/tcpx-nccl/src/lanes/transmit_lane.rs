//! The sending end of a lane: takes the next chunk whenever its socket has room.
//!
//! Large parts are sent without a copy, see [`Splice`]; such a chunk is done when the peer has answered
//! that it was read, others when they are in the socket.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::epoll;
use tcpx_lanes::event_loop::{Source, Turn};
use tcpx_lanes::socket::is_near;
use tcpx_lanes::socket_calls::{self as socket, Moved, Span};
use tcpx_lanes::splice::Splice;

use super::chunk::{ANSWER_BYTES, CHUNK_HEADER_BYTES};
use super::lane_set::LaneSet;
use super::outlet::Chunk;
use crate::held::Stream;

/// Bytes of a turn, so that the lanes of a loop advance together.
const TURN_BYTES: usize = 2 << 20;
/// Bytes sent and not answered, after which the other lanes shall have the next chunks: unlike copying,
/// splicing would fill one lane in no time.
const UNANSWERED_BYTES: usize = 2 << 20;
/// The same within a host, of all lanes together or of one, whichever is more: there is no way to fill, and
/// what is read soon is read from the cache.
const UNANSWERED_IN_HOST: (usize, usize) = (4 << 20, 512 << 10);
/// Most bytes in the pipe: a chunk of the default size.
const PIPE_BYTES: usize = 256 << 10;
/// Chunks up to here are copied: that takes one call and no answer.
const COPIED_BYTES: u32 = 64 << 10;

#[derive(Debug)]
struct Leaving {
    chunk: Chunk,
    header: [u8; CHUNK_HEADER_BYTES],
    /// Header and payload bytes in the socket.
    written: usize,
}

/// One lane.
#[derive(Debug)]
pub(super) struct TransmitLane {
    set: Arc<LaneSet>,
    number: u16,
    // Closed before the chunks below end: what the kernel still has of their pages is not sent then.
    stream: Stream,
    pipe: Option<Splice>,
    leaving: Option<Leaving>,
    /// Spliced chunks that the peer has not answered, and their bytes.
    unanswered: VecDeque<Chunk>,
    unanswered_bytes: usize,
    most_unanswered: usize,
    /// Answered in all.
    answers: u64,
    answer: [u8; ANSWER_BYTES],
    answer_bytes: usize,
}

impl TransmitLane {
    pub(super) fn new(set: Arc<LaneSet>, number: u16, stream: Stream) -> Self {
        let most_unanswered = most_unanswered(set.lanes(), is_near(&stream));
        Self {
            set,
            number,
            stream,
            pipe: None,
            leaving: None,
            unanswered: VecDeque::with_capacity(most_unanswered / COPIED_BYTES as usize),
            unanswered_bytes: 0,
            most_unanswered,
            answers: 0,
            answer: [0; ANSWER_BYTES],
            answer_bytes: 0,
        }
    }

    /// Whether the next chunk is for other lanes.
    fn is_waiting(&self) -> bool {
        self.leaving.is_none() && self.unanswered_bytes >= self.most_unanswered
    }

    /// Whether a chunk goes without a copy.
    fn splices(&mut self, chunk: &Chunk) -> bool {
        if chunk.header.len <= COPIED_BYTES || !self.set.splices() {
            return false;
        }
        if self.pipe.is_none() {
            match Splice::new(PIPE_BYTES) {
                Ok(splice) => self.pipe = Some(splice),
                Err(error) => self.set.stop_splicing(&error),
            }
        }
        self.pipe.is_some()
    }

    /// Finds a chunk unless one is under way; `false` when there is nothing to send.
    fn find(&mut self) -> bool {
        if self.leaving.is_some() {
            return true;
        }
        loop {
            let Some(mut chunk) = self.set.pop() else {
                self.set.rest(self.number);
                if !self.set.has_work() {
                    return false;
                }
                self.set.unrest(self.number);
                continue;
            };
            if chunk.is_stale() {
                continue;
            }
            chunk.header.answered = self.splices(&chunk);
            self.leaving = Some(Leaving {
                header: chunk.header.encode(),
                chunk,
                written: 0,
            });
            return true;
        }
    }

    /// One call; 0 when the socket is full.
    fn write(&mut self) -> Result<usize, String> {
        let Some(leaving) = &mut self.leaving else {
            return Ok(0);
        };
        let header = &leaving.header[leaving.written.min(CHUNK_HEADER_BYTES)..];
        let payload_written = leaving.written.saturating_sub(CHUNK_HEADER_BYTES);
        let payload = leaving.chunk.payload.from(payload_written);
        let moved = match &mut self.pipe {
            Some(_) if leaving.chunk.header.answered && !header.is_empty() => {
                socket::send_more(&self.stream, header)
            }
            Some(splice) if leaving.chunk.header.answered => {
                // SAFETY: registered memory that its comm keeps, and its host does not write, as long
                // as the chunk lives: until the peer answers.
                match unsafe { splice.send_span(&self.stream, payload) } {
                    Ok(moved) => Ok(moved),
                    Err(error) if splice.is_loaded() => return Err(error.to_string()),
                    Err(error) => {
                        // Such memory has no pages to lend. Copied, the chunk is answered all the same.
                        self.set.stop_splicing(&error);
                        self.pipe = None;
                        return self.write();
                    }
                }
            }
            _ => {
                let spans = [Span::of(header), payload];
                // SAFETY: the header is ours; the payload is registered memory that its comm keeps
                // for as long as the chunk lives.
                unsafe { socket::send_spans(&self.stream, &spans) }
            }
        };
        match moved {
            Ok(Moved::Bytes(bytes)) => {
                self.set.moved();
                leaving.written += bytes;
                if leaving.written == CHUNK_HEADER_BYTES + leaving.chunk.header.len as usize
                    && let Some(Leaving { chunk, .. }) = self.leaving.take()
                {
                    if chunk.header.answered {
                        self.unanswered_bytes += chunk.payload.len();
                        self.unanswered.push_back(chunk);
                    } else {
                        chunk.sent();
                    }
                }
                Ok(bytes)
            }
            Ok(Moved::WouldBlock) | Ok(Moved::End) => Ok(0),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Ends the chunks that the peer has read. Its end is the lane's.
    fn read_answers(&mut self) -> Result<(), String> {
        loop {
            let rest = &mut self.answer[self.answer_bytes..];
            match socket::receive_bytes(&self.stream, rest) {
                Ok(Moved::WouldBlock) => return Ok(()),
                Ok(Moved::End) => return Err("end of stream".to_owned()),
                Err(error) => return Err(error.to_string()),
                Ok(Moved::Bytes(bytes)) => self.answer_bytes += bytes,
            }
            if self.answer_bytes < ANSWER_BYTES {
                continue;
            }
            self.answer_bytes = 0;
            self.set.moved();
            let answers = u64::from_le_bytes(self.answer);
            while self.answers < answers {
                let Some(chunk) = self.unanswered.pop_front() else {
                    return Err(format!(
                        "the peer has answered {answers} chunks of {}",
                        self.answers
                    ));
                };
                self.unanswered_bytes -= chunk.payload.len();
                chunk.sent();
                self.answers += 1;
            }
        }
    }

    fn fail(&mut self, why: &str) -> Turn {
        let peer = self
            .stream
            .peer_addr()
            .map_or_else(|_| "the peer".to_owned(), |peer| peer.to_string());
        self.set.fail(format!("a lane to {peer} broke: {why}"));
        Turn::End
    }
}

/// Bytes that a lane of so many may have unanswered.
fn most_unanswered(lanes: usize, in_host: bool) -> usize {
    let (all, one) = UNANSWERED_IN_HOST;
    match in_host {
        true => (all / lanes.max(1)).clamp(one, UNANSWERED_BYTES),
        false => UNANSWERED_BYTES,
    }
}

impl Drop for TransmitLane {
    fn drop(&mut self) {
        if self.leaving.is_none() && self.unanswered.is_empty() {
            if self.set.is_open() {
                // Its loop ended or took no more lanes: chunks might wait for it without an end.
                self.set.fail("a lane was given up".to_owned());
            }
            let _ = self.stream.shutdown(Shutdown::Write);
            return;
        }
        // Half a chunk must not look like a whole stream, nor pages that are free again like a chunk.
        tcpx_lanes::socket::abort(self.stream.as_fd());
        self.set.fail("a lane ended within a chunk".to_owned());
    }
}

impl Source for TransmitLane {
    fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn interest(&self) -> epoll::EventFlags {
        epoll::EventFlags::OUT | epoll::EventFlags::IN | epoll::EventFlags::RDHUP
    }

    fn turn(&mut self) -> Turn {
        let mut budget = TURN_BYTES;
        loop {
            // Until nothing is to be read: the socket is watched for edges. Before a failure counts: a
            // peer that was done may have ended another lane first.
            if let Err(why) = self.read_answers() {
                return self.fail(&why);
            }
            if self.set.failure().is_some() {
                return Turn::End;
            }
            if self.is_waiting() {
                return Turn::Rest;
            }
            if !self.find() {
                return if self.set.is_closing() {
                    Turn::End
                } else {
                    Turn::Rest
                };
            }
            while budget > 0 && self.leaving.is_some() {
                match self.write() {
                    Ok(0) => return Turn::Rest,
                    Ok(bytes) => budget = budget.saturating_sub(bytes),
                    Err(why) => return self.fail(&why),
                }
            }
            if budget == 0 {
                return Turn::Again;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use nccl_net::export::HostLogger;

    use super::*;
    use crate::lanes::chunk::ChunkHeader;
    use crate::lanes::outlet::Outlet;
    use crate::log::Log;

    fn lane(splice: bool) -> (Arc<LaneSet>, TransmitLane, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tcpx_lanes::socket::prepare_comm(&stream).unwrap();
        let (peer, _) = listener.accept().unwrap();
        peer.set_nonblocking(true).unwrap();
        let log = Arc::new(Log::new(HostLogger::default()));
        let set = Arc::new(LaneSet::new(
            [7; 16],
            Vec::new(),
            Vec::new(),
            0,
            splice,
            log,
        ));
        let lane = TransmitLane::new(Arc::clone(&set), 0, Stream::new(stream));
        (set, lane, peer)
    }

    /// Queues message 0 in one chunk, and lets the lane send until the peer has all of it.
    fn send(
        set: &LaneSet,
        lane: &mut TransmitLane,
        peer: &mut TcpStream,
        payload: &[u8],
    ) -> (Arc<Outlet>, Vec<u8>) {
        let outlet = Arc::new(Outlet::new(set.load()));
        outlet.begin(0, payload.len());
        set.push(outlet.chunk(header(payload.len()), Span::of(payload)))
            .unwrap();
        let got = receive(lane, peer, CHUNK_HEADER_BYTES + payload.len());
        (outlet, got)
    }

    /// The header of message 0 in one chunk.
    fn header(len: usize) -> ChunkHeader {
        ChunkHeader {
            stream: 1,
            sequence: 0,
            offset: 0,
            total: len as u64,
            len: len as u32,
            answered: false,
        }
    }

    /// Lets the lane send until the peer has so many bytes; there must be no more.
    fn receive(lane: &mut TransmitLane, peer: &mut TcpStream, bytes: usize) -> Vec<u8> {
        let mut got = Vec::new();
        let mut some = vec![0; 65_536];
        while got.len() < bytes {
            assert_ne!(lane.turn(), Turn::End);
            if let Ok(bytes) = peer.read(&mut some) {
                got.extend_from_slice(&some[..bytes]);
            }
        }
        assert_eq!(got.len(), bytes);
        got
    }

    #[test]
    fn spliced_memory_is_in_use_until_the_peer_says_that_it_read_it() {
        let payload: Vec<u8> = (0..300_001).map(|at| (at % 253) as u8).collect();
        let (set, mut lane, mut peer) = lane(true);
        let (outlet, got) = send(&set, &mut lane, &mut peer, &payload);
        assert_eq!(got[CHUNK_HEADER_BYTES..], payload);
        let mut header = [0; CHUNK_HEADER_BYTES];
        header.copy_from_slice(&got[..CHUNK_HEADER_BYTES]);
        assert!(ChunkHeader::decode(&header).unwrap().answered);
        assert_eq!(lane.turn(), Turn::Rest);
        assert!(outlet.is_busy() && !outlet.is_sent(0));
        // In two pieces.
        let answer = 1u64.to_le_bytes();
        for piece in answer.chunks(5) {
            assert!(!outlet.is_sent(0));
            peer.write_all(piece).unwrap();
            assert_eq!(lane.turn(), Turn::Rest);
        }
        assert!(outlet.is_sent(0) && !outlet.is_busy());
        // An answer for what was never sent.
        peer.write_all(&2u64.to_le_bytes()).unwrap();
        assert_eq!(lane.turn(), Turn::End);
        assert!(set.failure().unwrap().contains("answered 2 chunks"));
    }

    #[test]
    fn small_chunks_and_those_of_a_set_that_does_not_splice_are_done_when_they_are_in_the_socket() {
        for (splice, bytes) in [(true, 65_536), (false, 300_000)] {
            let (set, mut lane, mut peer) = lane(splice);
            let (outlet, _) = send(&set, &mut lane, &mut peer, &vec![3; bytes]);
            assert!(outlet.is_sent(0) && !outlet.is_busy());
        }
    }

    #[test]
    fn a_lane_leaves_the_next_chunk_to_others_while_enough_is_unanswered() {
        let of = |lanes, in_host| most_unanswered(lanes, in_host) >> 10;
        let found = [of(2, true), of(12, true), of(12, false)];
        assert_eq!(found, [2048, 512, 2048]);
        let payload = vec![3; 256 << 10];
        let (set, mut lane, mut peer) = lane(true);
        assert!(is_near(&lane.stream));
        lane.most_unanswered = 512 << 10;
        let outlets: Vec<_> = [payload.len(), payload.len(), 1]
            .into_iter()
            .map(|len| {
                let outlet = Arc::new(Outlet::new(set.load()));
                outlet.begin(0, len);
                set.push(outlet.chunk(header(len), Span::of(&payload[..len])))
                    .unwrap();
                outlet
            })
            .collect();
        receive(
            &mut lane,
            &mut peer,
            2 * (CHUNK_HEADER_BYTES + payload.len()),
        );
        assert!(outlets.iter().all(|outlet| outlet.is_busy()) && set.has_work());
        peer.write_all(&1u64.to_le_bytes()).unwrap();
        receive(&mut lane, &mut peer, CHUNK_HEADER_BYTES + 1);
        assert!(outlets[0].is_sent(0) && outlets[1].is_busy() && outlets[2].is_sent(0));
    }

    #[test]
    fn a_lane_that_ends_with_unread_pages_resets_its_connection() {
        let payload = vec![3; 300_000];
        let (set, mut lane, mut peer) = lane(true);
        let (outlet, _) = send(&set, &mut lane, &mut peer, &payload);
        // As a fork would hold it.
        let _copy = lane.stream.try_clone().unwrap();
        drop(lane);
        assert!(!outlet.is_busy() && !outlet.is_sent(0));
        assert!(set.failure().is_some());
        let error = peer.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
}
