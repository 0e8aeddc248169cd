//! Whose chunks a lane carries: those in the queue of its set.
//!
//! Large parts are sent without a copy, see [`Lender`].

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_lanes::sealing::{Head, Protection, SendSeal};
use tcpx_lanes::send_lane::{NextChunk, Owner, SendLane};
use tcpx_lanes::socket_calls::{self as calls, Moved, Span};
use tcpx_lanes::splice::Lender;
use tcpx_wire::lane_seal::{Opener, Sealer};

use super::lane_set::LaneSet;
use super::retention::{self, Retention};
use super::send_stream::Chunk;
use crate::held::Stream;
use crate::link::is_forged;

/// Bytes sent and not acknowledged, after which the other lanes shall have the next chunks: unlike
/// copying, splicing would fill one lane in no time.
const MOST_UNACKED: u64 = 2 << 20;
/// Most bytes in the pipe: a chunk of the default size.
const PIPE_BYTES: usize = 256 << 10;
/// Chunks up to here are copied: that takes one call.
const COPIED_BYTES: usize = retention::SLOT_BYTES;

/// The sending half of a lane of a set.
pub(super) fn transmit_lane(
    set: Arc<LaneSet>,
    number: u16,
    (stream, answers): (Arc<Stream>, Stream),
    seals: Option<(Protection, Sealer, Opener)>,
) -> SendLane<Queue> {
    let (seal, opener) = match seals {
        None => (SendSeal::Plain, None),
        Some((protection, sealer, opener)) => (protection.seal(sealer), Some(opener)),
    };
    let queue = Queue {
        retention: Arc::clone(set.retention(number)),
        set,
        number,
        stream,
        answers,
        lender: Lender::new(PIPE_BYTES),
        seal,
        why: None,
    };
    SendLane::opening(queue, opener)
}

/// The queue of a set, as one of its lanes finds it.
#[derive(Debug)]
pub(super) struct Queue {
    set: Arc<LaneSet>,
    retention: Arc<Retention>,
    number: u16,
    stream: Arc<Stream>,
    /// Where the peer acknowledges.
    answers: Stream,
    lender: Lender,
    seal: SendSeal,
    /// Why the lane ends.
    why: Option<String>,
}

/// A chunk in the lane's hands.
#[derive(Debug)]
pub(super) struct Leaving {
    chunk: Chunk,
    /// Its header, as this lane sends it.
    head: Head,
    /// Its pages are lent.
    lends: bool,
}

impl Owner for Queue {
    type Chunk = Leaving;

    fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn answers(&self) -> Option<BorrowedFd<'_>> {
        Some(self.answers.as_fd())
    }

    fn begin(&mut self) -> bool {
        self.set.failure().is_none()
    }

    fn most_unacked(&self) -> u64 {
        MOST_UNACKED
    }

    fn next(&mut self) -> NextChunk<Leaving> {
        loop {
            let Some(mut chunk) = self.set.chunks.take(self.number) else {
                return match self.set.is_closing() {
                    true => NextChunk::End,
                    false => NextChunk::Rest,
                };
            };
            if !chunk.begin() {
                continue;
            }
            self.set.chunks.took(self.number);
            return NextChunk::Chunk(Leaving {
                head: self.seal.begin(&chunk.header.encode()),
                lends: chunk.payload.len() > COPIED_BYTES
                    && self.set.splices()
                    && !chunk.is_in_slot()
                    && !self.seal.seals_payload(),
                chunk,
            });
        }
    }

    fn wire_bytes(&self, leaving: &Leaving) -> usize {
        self.seal.wire_bytes(leaving.chunk.payload.len())
    }

    fn send(&mut self, leaving: &mut Leaving, done: usize) -> io::Result<Moved> {
        let head = leaving.head.rest(done);
        let whole = leaving.chunk.payload;
        let payload = whole.from(done.saturating_sub(leaving.head.len()));
        let moved = if self.seal.seals_payload() {
            let text = match whole.is_empty() {
                true => &[][..],
                // SAFETY: registered memory that its comm keeps as long as the chunk lives and
                // whose host leaves it alone, a pinned slot, or a copy of ours.
                false => unsafe { std::slice::from_raw_parts(whole.start(), whole.len()) },
            };
            let sent = self.seal.send(&self.stream, head, text);
            leaving.chunk.retain(&self.retention);
            sent.unwrap_or(Ok(Moved::WouldBlock))?
        } else if leaving.lends {
            // SAFETY: registered memory that its comm keeps as long as the chunk lives, for what
            // lies in a slot is not lent. Its bytes do not change either: until the peer has read
            // them.
            let sent = unsafe { self.lender.send(&self.stream, head, payload) }?;
            if let Some(error) = self.lender.take_refusal() {
                self.set.stop_splicing(&error);
            }
            sent.moved
        } else {
            // SAFETY: the header is ours; the payload is such memory, a pinned slot, or a copy of
            // ours.
            let sent = unsafe { calls::send_spans(&self.stream, &[Span::of(head), payload]) };
            // After the peer has got what the socket takes, and while the bytes are in the cache.
            leaving.chunk.retain(&self.retention);
            sent?
        };
        if matches!(moved, Moved::Bytes(_)) {
            self.set.chunks.moved(self.number);
        }
        Ok(moved)
    }

    fn written(&mut self, leaving: Leaving, end: u64) {
        self.set.chunks.keep(self.number, end, leaving.chunk);
    }

    fn read_to(&mut self, place: u64) {
        while let Some(chunk) = self.set.chunks.read_to(self.number, place) {
            chunk.acknowledged();
        }
    }

    fn ended(&mut self, _within: Option<(&Leaving, usize)>, cause: io::Error) {
        let is_forged = u64::from(is_forged(&cause));
        self.set.forged.fetch_add(is_forged, Ordering::Relaxed);
        self.why = Some(cause.to_string());
    }

    fn close(&mut self, unwritten: Option<Leaving>) {
        let unread = self.set.chunks.end(self.number).into_iter();
        let unread: Vec<_> = unread
            .chain(unwritten.map(|leaving| leaving.chunk))
            .collect();
        if unread.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
        } else {
            // Half a chunk must not look like a whole stream, nor pages that are free again like a
            // chunk. What the kernel still has of them is not sent after this.
            tcpx_lanes::socket::abort(self.stream.as_fd());
        }
        let why = self.why.take();
        let why = why.as_deref().unwrap_or("its event loop let go of it");
        self.set.lane_ended(self.number, unread, why);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use tcpx_lanes::event_loop::{Source, Turn};
    use tcpx_wire::ChunkHeader;

    use super::*;
    use crate::lanes::send_path::header as of;
    use crate::lanes::send_stream::SendStream;

    /// Bytes of a chunk's header.
    const HEADER: usize = ChunkHeader::BYTES;

    /// The other end: it reads payload, and writes answers.
    struct Peer {
        payload: TcpStream,
        answers: TcpStream,
    }

    impl Read for Peer {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.payload.read(into)
        }
    }

    impl Write for Peer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.answers.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn connection() -> (Stream, TcpStream) {
        let (stream, peer) = crate::link::tcp_pair();
        peer.set_nonblocking(true).unwrap();
        (stream, peer)
    }

    fn connected(set: &Arc<LaneSet>) -> (SendLane<Queue>, Peer) {
        let ((stream, payload), (back, answers)) = (connection(), connection());
        let lane = transmit_lane(Arc::clone(set), 0, (Arc::new(stream), back), None);
        (lane, Peer { payload, answers })
    }

    fn lane(splice: bool) -> (Arc<LaneSet>, SendLane<Queue>, Peer) {
        let set = LaneSet::without_lanes(splice);
        let (lane, peer) = connected(&set);
        (set, lane, peer)
    }

    /// Queues message 0 in one chunk.
    fn queue(set: &LaneSet, payload: &[u8]) -> Arc<SendStream> {
        let send_stream = Arc::new(SendStream::new(set.load()));
        send_stream.begin(0, payload.len());
        let header = of(1, 0, 0, payload.len() as u32, payload.len() as u64);
        set.push(send_stream.chunk(header, Span::of(payload)))
            .unwrap();
        send_stream
    }

    /// Queues message 0 in one chunk, and lets the lane send until the peer has all of it.
    fn send(
        set: &LaneSet,
        lane: &mut SendLane<Queue>,
        peer: &mut Peer,
        payload: &[u8],
    ) -> (Arc<SendStream>, Vec<u8>) {
        let send_stream = queue(set, payload);
        let got = receive(lane, peer, HEADER + payload.len());
        (send_stream, got)
    }

    /// Lets the lane send until the peer has so many bytes; there must be no more.
    fn receive(lane: &mut SendLane<Queue>, peer: &mut Peer, bytes: usize) -> Vec<u8> {
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
        for (splice, bytes) in [(true, 300_001), (false, 300_001), (true, 70_000)] {
            let payload: Vec<u8> = (0..bytes).map(|at| (at % 253) as u8).collect();
            let (set, mut lane, mut peer) = lane(splice);
            let (send_stream, got) = send(&set, &mut lane, &mut peer, &payload);
            assert_eq!(got[HEADER..], payload);
            assert_eq!(header(&got).attempt, 0);
            assert_eq!(lane.turn(), Turn::Rest);
            assert!(send_stream.is_busy() && !send_stream.is_sent(0));
            // In two pieces.
            let read = (HEADER + payload.len()) as u64;
            for piece in read.to_le_bytes().chunks(5) {
                assert!(!send_stream.is_sent(0));
                peer.write_all(piece).unwrap();
                while !send_stream.is_sent(0) && piece.len() < 5 {
                    assert_eq!(lane.turn(), Turn::Rest);
                }
            }
            assert!(send_stream.is_sent(0) && !send_stream.is_busy());
            // What was never sent.
            peer.write_all(&(read + 1).to_le_bytes()).unwrap();
            while lane.turn() != Turn::End {}
            assert!(
                lane.owner()
                    .why
                    .take()
                    .is_some_and(|why| why.contains("acknowledged"))
            );
        }
    }

    #[test]
    fn a_lane_with_enough_unacknowledged_leaves_chunks() {
        let payload = vec![3; MOST_UNACKED as usize / 2];
        let (set, mut lane, mut peer) = lane(true);
        let send_streams =
            [payload.len(), payload.len(), 1].map(|bytes| queue(&set, &payload[..bytes]));
        let whole = HEADER + payload.len();
        receive(&mut lane, &mut peer, 2 * whole);
        assert!(
            send_streams.iter().all(|send_stream| send_stream.is_busy()) && set.chunks.queued() > 0
        );
        peer.write_all(&(whole as u64).to_le_bytes()).unwrap();
        receive(&mut lane, &mut peer, HEADER + 1);
        assert!(
            send_streams[0].is_sent(0) && send_streams[1].is_busy() && send_streams[2].is_busy()
        );
    }

    #[test]
    fn an_ended_lanes_chunks_go_over_another_one() {
        let payload: Vec<u8> = (0..300_000).map(|at| (at % 251) as u8).collect();
        let (set, mut first, mut peer) = lane(true);
        let (send_stream, _) = send(&set, &mut first, &mut peer, &payload);
        // As a fork would hold it.
        let _copy = first.owner().stream.try_clone().unwrap();
        first.finish();
        let error = peer.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert!(send_stream.is_busy() && !send_stream.is_sent(0));
        let (mut second, mut peer) = connected(&set);
        let got = receive(&mut second, &mut peer, HEADER + payload.len());
        assert_eq!(header(&got).attempt, 1);
        assert_eq!(got[HEADER..], payload);
        peer.write_all(&(got.len() as u64).to_le_bytes()).unwrap();
        while send_stream.is_busy() {
            assert_eq!(second.turn(), Turn::Rest);
        }
        assert!(send_stream.is_sent(0) && set.failure().is_none());
    }

    #[test]
    fn a_short_chunk_is_sent_at_once_and_sent_again_from_its_copy() {
        let before: Vec<u8> = (0..65_536).map(|at| (at % 251) as u8).collect();
        let mut payload = before.clone();
        let (set, mut first, mut peer) = lane(true);
        let (send_stream, _) = send(&set, &mut first, &mut peer, &payload);
        assert!(send_stream.is_sent(0) && !send_stream.is_borrowing() && send_stream.is_busy());
        payload.fill(0xee);
        // Its comm closes, and what it was told is sent goes on.
        send_stream.close();
        first.finish();
        let (mut second, mut peer) = connected(&set);
        let got = receive(&mut second, &mut peer, HEADER + payload.len());
        assert_eq!(header(&got).attempt, 1);
        assert_eq!(got[HEADER..], before);
        peer.write_all(&(got.len() as u64).to_le_bytes()).unwrap();
        while send_stream.is_busy() {
            assert_eq!(second.turn(), Turn::Rest);
        }
    }

    #[test]
    fn without_a_free_slot_the_peer_must_read_a_short_chunk() {
        let (set, mut lane, mut peer) = lane(true);
        let taken: Vec<_> = std::iter::from_fn(|| {
            // SAFETY: borrowed for the call.
            unsafe { set.retention(0).copy(Span::of(&[1])) }
        })
        .collect();
        let (send_stream, got) = send(&set, &mut lane, &mut peer, &[7; 1000]);
        assert!(!taken.is_empty() && send_stream.is_borrowing() && !send_stream.is_sent(0));
        peer.write_all(&(got.len() as u64).to_le_bytes()).unwrap();
        while send_stream.is_busy() {
            assert_eq!(lane.turn(), Turn::Rest);
        }
        assert!(send_stream.is_sent(0));
    }

    #[test]
    fn a_closing_set_keeps_lanes_until_all_is_read() {
        let (set, mut lane, mut peer) = lane(true);
        assert!(set.enter());
        let (_, got) = send(&set, &mut lane, &mut peer, &[7; 1000]);
        set.release_comm();
        for _ in 0..10 {
            assert_eq!(lane.turn(), Turn::Rest);
        }
        peer.write_all(&(got.len() as u64).to_le_bytes()).unwrap();
        while lane.turn() != Turn::End {}
    }

    #[test]
    fn a_chunk_that_every_lane_ends_with_is_given_up() {
        let set = LaneSet::without_lanes(false);
        let send_stream = queue(&set, &[7; 100_000]);
        let mut lanes = 0;
        while set.failure().is_none() {
            let (mut lane, _peer) = connected(&set);
            assert_ne!(lane.turn(), Turn::End);
            lane.finish();
            lanes += 1;
        }
        assert_eq!(lanes, 256);
        assert!(!send_stream.is_busy() && !send_stream.is_sent(0));
    }

    #[test]
    fn chunks_of_a_comm_that_closed_are_not_sent_again() {
        let (set, mut lane, mut peer) = lane(true);
        let (send_stream, _) = send(&set, &mut lane, &mut peer, &[7; 100_000]);
        send_stream.close();
        lane.finish();
        assert!(!send_stream.is_borrowing());
        let (mut next, _peer) = connected(&set);
        assert_eq!(next.turn(), Turn::Rest);
        assert!(!send_stream.is_busy() && set.chunks.queued() == 0);
    }
}
