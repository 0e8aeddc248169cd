//! The sending half of a lane: takes the next chunk whenever its socket has room.
//!
//! A chunk is kept until the peer has acknowledged that it was read, and handed to the other lanes if this one
//! ends before. Large parts are sent without a copy, see [`Splice`].

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::epoll;
use tcpx_lanes::event_loop::{Source, Turn};
use tcpx_lanes::receive_lane::ACKNOWLEDGEMENT_BYTES;
use tcpx_lanes::socket::is_near;
use tcpx_lanes::socket_calls::{self as socket, Moved, Span};
use tcpx_lanes::splice::Splice;
use tcpx_wire::ChunkHeader;

use super::lane_set::LaneSet;
use super::outlet::Chunk;
use crate::held::Stream;

/// Bytes of a turn, so that the lanes of a loop advance together.
const TURN_BYTES: usize = 2 << 20;
/// Bytes sent and not acknowledged, after which the other lanes shall have the next chunks: unlike copying,
/// splicing would fill one lane in no time.
const MOST_UNACKED: usize = 2 << 20;
/// The same within a host, of all lanes together or of one, whichever is more: there is no way to fill, and
/// what is read soon is read from the cache.
const MOST_UNACKED_IN_HOST: (usize, usize) = (4 << 20, 512 << 10);
/// Most bytes in the pipe: a chunk of the default size.
const PIPE_BYTES: usize = 256 << 10;
/// Chunks up to here are copied: that takes one call.
const COPIED_BYTES: u32 = 64 << 10;
/// Most chunks are larger.
const SMALL_CHUNK_BYTES: usize = 16 << 10;

#[derive(Debug)]
struct Leaving {
    chunk: Chunk,
    header: [u8; ChunkHeader::BYTES],
    /// Its pages are lent.
    splices: bool,
    /// Header and payload bytes in the socket.
    written: usize,
}

/// One lane.
#[derive(Debug)]
pub(super) struct TransmitLane {
    set: Arc<LaneSet>,
    number: u16,
    stream: Stream,
    pipe: Option<Splice>,
    leaving: Option<Leaving>,
    /// Chunks that the peer has not acknowledged, each with the place of its end among all bytes sent.
    unacked: VecDeque<(u64, Chunk)>,
    unacked_bytes: usize,
    most_unacked: usize,
    /// Bytes of chunks that are in the socket to their end.
    sent: u64,
    /// Bytes that the peer has read.
    acknowledged: u64,
    record: [u8; ACKNOWLEDGEMENT_BYTES],
    record_bytes: usize,
    /// Why it ends.
    why: Option<String>,
}

impl TransmitLane {
    pub(super) fn new(set: Arc<LaneSet>, number: u16, stream: Stream) -> Self {
        let most_unacked = most_unacked(set.lanes(), is_near(&stream));
        Self {
            set,
            number,
            stream,
            pipe: None,
            leaving: None,
            unacked: VecDeque::with_capacity(most_unacked / SMALL_CHUNK_BYTES + 1),
            unacked_bytes: 0,
            most_unacked,
            sent: 0,
            acknowledged: 0,
            record: [0; ACKNOWLEDGEMENT_BYTES],
            record_bytes: 0,
            why: None,
        }
    }

    /// Whether the next chunk is for other lanes.
    fn is_waiting(&self) -> bool {
        self.leaving.is_none() && self.unacked_bytes >= self.most_unacked
    }

    /// Whether a chunk goes without a copy.
    fn splices(&mut self, chunk: &Chunk) -> bool {
        if chunk.header.length <= COPIED_BYTES || !self.set.splices() {
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
            let Some(chunk) = self.set.pop() else {
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
            self.leaving = Some(Leaving {
                header: chunk.header.encode(),
                splices: self.splices(&chunk),
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
        let header = &leaving.header[leaving.written.min(ChunkHeader::BYTES)..];
        let payload_written = leaving.written.saturating_sub(ChunkHeader::BYTES);
        let payload = leaving.chunk.payload.from(payload_written);
        let moved = match &mut self.pipe {
            Some(_) if leaving.splices && !header.is_empty() => {
                socket::send_more(&self.stream, header)
            }
            Some(splice) if leaving.splices => {
                // SAFETY: registered memory that its comm keeps, and its host does not write, as long
                // as the chunk lives: until the peer has read it.
                match unsafe { splice.send_span(&self.stream, payload) } {
                    Ok(moved) => Ok(moved),
                    Err(error) if splice.is_loaded() => return Err(error.to_string()),
                    Err(error) => {
                        // Such memory has no pages to lend.
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
                let whole = ChunkHeader::BYTES + leaving.chunk.header.length as usize;
                if leaving.written == whole
                    && let Some(Leaving { chunk, .. }) = self.leaving.take()
                {
                    self.sent += whole as u64;
                    self.unacked_bytes += chunk.payload.len();
                    self.unacked.push_back((self.sent, chunk));
                }
                Ok(bytes)
            }
            Ok(Moved::WouldBlock) | Ok(Moved::End) => Ok(0),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Ends the chunks that the peer has read. Its end is the lane's.
    fn read_acknowledgements(&mut self) -> Result<(), String> {
        loop {
            let rest = &mut self.record[self.record_bytes..];
            match socket::receive_bytes(&self.stream, rest) {
                Ok(Moved::WouldBlock) => return Ok(()),
                Ok(Moved::End) => return Err("end of stream".to_owned()),
                Err(error) => return Err(error.to_string()),
                Ok(Moved::Bytes(bytes)) => self.record_bytes += bytes,
            }
            if self.record_bytes < ACKNOWLEDGEMENT_BYTES {
                continue;
            }
            self.record_bytes = 0;
            self.set.moved();
            let read = u64::from_le_bytes(self.record);
            if !(self.acknowledged..=self.sent).contains(&read) {
                return Err(format!(
                    "the peer has acknowledged {read} bytes, expected {} to {}",
                    self.acknowledged, self.sent
                ));
            }
            self.acknowledged = read;
            while let Some((_, chunk)) = self.unacked.pop_front_if(|(end, _)| *end <= read) {
                self.unacked_bytes -= chunk.payload.len();
                chunk.acknowledged();
            }
        }
    }

    fn fail(&mut self, why: String) -> Turn {
        self.why = Some(why);
        Turn::End
    }
}

/// Bytes that a lane of so many may have unacknowledged.
fn most_unacked(lanes: usize, in_host: bool) -> usize {
    let (all, one) = MOST_UNACKED_IN_HOST;
    match in_host {
        true => (all / lanes.max(1)).clamp(one, MOST_UNACKED),
        false => MOST_UNACKED,
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
            if let Err(why) = self.read_acknowledgements() {
                return self.fail(why);
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
                    Err(why) => return self.fail(why),
                }
            }
            if budget == 0 {
                return Turn::Again;
            }
        }
    }

    fn finish(&mut self) {
        let leaving = self.leaving.take().map(|leaving| leaving.chunk);
        let unacked = self.unacked.drain(..).map(|(_, chunk)| chunk);
        let chunks: Vec<_> = unacked.chain(leaving).collect();
        if chunks.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
        } else {
            // Half a chunk must not look like a whole stream, nor pages that are free again like a chunk. What the
            // kernel still has of them is not sent after this.
            tcpx_lanes::socket::abort(self.stream.as_fd());
        }
        let why = self.why.take();
        let why = why.as_deref().unwrap_or("its event loop let go of it");
        self.set.lane_ended(self.number, chunks, why);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::lanes::carriage::header as of;
    use crate::lanes::outlet::Outlet;

    /// Bytes of a chunk's header.
    const HEADER: usize = ChunkHeader::BYTES;

    fn connected(set: &Arc<LaneSet>) -> (TransmitLane, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tcpx_lanes::socket::prepare_comm(&stream).unwrap();
        let (peer, _) = listener.accept().unwrap();
        peer.set_nonblocking(true).unwrap();
        let lane = TransmitLane::new(Arc::clone(set), 0, Stream::new(stream));
        (lane, peer)
    }

    fn lane(splice: bool) -> (Arc<LaneSet>, TransmitLane, TcpStream) {
        let set = LaneSet::without_lanes(splice);
        let (lane, peer) = connected(&set);
        (set, lane, peer)
    }

    /// Queues message 0 in one chunk.
    fn queue(set: &LaneSet, payload: &[u8]) -> Arc<Outlet> {
        let outlet = Arc::new(Outlet::new(set.load()));
        outlet.begin(0, payload.len());
        let header = of(1, 0, 0, payload.len() as u32, payload.len() as u64);
        set.push(outlet.chunk(header, Span::of(payload))).unwrap();
        outlet
    }

    /// Queues message 0 in one chunk, and lets the lane send until the peer has all of it.
    fn send(
        set: &LaneSet,
        lane: &mut TransmitLane,
        peer: &mut TcpStream,
        payload: &[u8],
    ) -> (Arc<Outlet>, Vec<u8>) {
        let outlet = queue(set, payload);
        let got = receive(lane, peer, HEADER + payload.len());
        (outlet, got)
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

    fn header(got: &[u8]) -> ChunkHeader {
        let mut header = [0; HEADER];
        header.copy_from_slice(&got[..HEADER]);
        ChunkHeader::decode(&header).unwrap()
    }

    #[test]
    fn memory_is_in_use_until_the_peer_says_that_it_read_it() {
        for (splice, bytes) in [(true, 300_001), (false, 300_001), (true, 40_000)] {
            let payload: Vec<u8> = (0..bytes).map(|at| (at % 253) as u8).collect();
            let (set, mut lane, mut peer) = lane(splice);
            let (outlet, got) = send(&set, &mut lane, &mut peer, &payload);
            assert_eq!(got[HEADER..], payload);
            assert_eq!(header(&got).attempt, 0);
            assert_eq!(lane.turn(), Turn::Rest);
            assert!(outlet.is_busy() && !outlet.is_sent(0));
            // In two pieces.
            let read = (HEADER + payload.len()) as u64;
            for piece in read.to_le_bytes().chunks(5) {
                assert!(!outlet.is_sent(0));
                peer.write_all(piece).unwrap();
                while !outlet.is_sent(0) && piece.len() < 5 {
                    assert_eq!(lane.turn(), Turn::Rest);
                }
            }
            assert!(outlet.is_sent(0) && !outlet.is_busy());
            // What was never sent.
            peer.write_all(&(read + 1).to_le_bytes()).unwrap();
            while lane.turn() != Turn::End {}
            assert!(lane.why.is_some_and(|why| why.contains("acknowledged")));
        }
    }

    #[test]
    fn a_lane_leaves_the_next_chunk_to_others_while_enough_is_unacknowledged() {
        let of = |lanes, in_host| most_unacked(lanes, in_host) >> 10;
        let found = [of(2, true), of(12, true), of(12, false)];
        assert_eq!(found, [2048, 512, 2048]);
        let payload = vec![3; 256 << 10];
        let (set, mut lane, mut peer) = lane(true);
        assert!(is_near(&lane.stream));
        lane.most_unacked = 512 << 10;
        let outlets = [payload.len(), payload.len(), 1].map(|bytes| queue(&set, &payload[..bytes]));
        let whole = HEADER + payload.len();
        receive(&mut lane, &mut peer, 2 * whole);
        assert!(outlets.iter().all(|outlet| outlet.is_busy()) && set.has_work());
        peer.write_all(&(whole as u64).to_le_bytes()).unwrap();
        receive(&mut lane, &mut peer, HEADER + 1);
        assert!(outlets[0].is_sent(0) && outlets[1].is_busy() && outlets[2].is_busy());
    }

    #[test]
    fn what_an_ended_lane_may_not_have_brought_goes_over_another_one() {
        let payload: Vec<u8> = (0..300_000).map(|at| (at % 251) as u8).collect();
        let (set, mut first, mut peer) = lane(true);
        let (outlet, _) = send(&set, &mut first, &mut peer, &payload);
        // As a fork would hold it.
        let _copy = first.stream.try_clone().unwrap();
        first.finish();
        let error = peer.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        assert!(outlet.is_busy() && !outlet.is_sent(0));
        let (mut second, mut peer) = connected(&set);
        let got = receive(&mut second, &mut peer, HEADER + payload.len());
        assert_eq!(header(&got).attempt, 1);
        assert_eq!(got[HEADER..], payload);
        peer.write_all(&(got.len() as u64).to_le_bytes()).unwrap();
        while outlet.is_busy() {
            assert_eq!(second.turn(), Turn::Rest);
        }
        assert!(outlet.is_sent(0) && set.failure().is_none());
    }

    #[test]
    fn a_chunk_that_every_lane_ends_with_is_given_up() {
        let set = LaneSet::without_lanes(false);
        let outlet = queue(&set, &[7; 100]);
        let mut lanes = 0;
        while set.failure().is_none() {
            let (mut lane, _peer) = connected(&set);
            assert_ne!(lane.turn(), Turn::End);
            lane.finish();
            lanes += 1;
        }
        assert_eq!(lanes, 256);
        assert!(!outlet.is_busy() && !outlet.is_sent(0));
    }

    #[test]
    fn chunks_of_a_comm_that_closed_are_not_sent_again() {
        let (set, mut lane, mut peer) = lane(true);
        let (outlet, _) = send(&set, &mut lane, &mut peer, &[7; 100_000]);
        outlet.close();
        lane.finish();
        assert!(!outlet.is_busy() && !set.has_work());
    }
}
