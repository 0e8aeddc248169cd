//! The end of a lane's sending half: what becomes of the chunks that it had.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use tcpx_lanes::socket::abort;

use tcpx_memory::MemoryKind;

use super::Queue;
use crate::tcp::transmit_table::Outgoing;

impl Queue {
    /// Ends the lane, which had begun to write a chunk.
    pub(super) fn part(&mut self, unwritten: Option<Outgoing>) {
        let lane = self.socket.lane;
        // What the kernel still has of pages that may be used for something else is not sent.
        let is_lent = |chunk: &Outgoing| chunk.spliced == Some(lane);
        if unwritten.as_ref().is_some_and(is_lent)
            || self.shared.transmit.chunks.keeps(lane, is_lent)
        {
            abort(self.socket.as_fd());
        }
        self.shared.transmit.lends(lane, None);
        self.hand_over(unwritten);
        self.shared.half_gone(lane);
    }

    /// The lane is gone: the others send what may not have arrived, or its owner ends it with the
    /// channel.
    fn hand_over(&mut self, unwritten: Option<Outgoing>) {
        let is_exposed =
            |chunk: &Outgoing| chunk.exposed.is_some() && chunk.payload.kind() == MemoryKind::Host;
        let lane = self.socket.lane;
        let had_exposed = unwritten.as_ref().is_some_and(is_exposed)
            || self.shared.transmit.chunks.keeps(lane, is_exposed);
        if had_exposed && !self.shared.is_over() {
            self.shared.parts.local.failed();
        }
        let count = self
            .shared
            .transmit
            .lane_ended(self.socket.lane, unwritten, |slot| {
                self.shared.send_ended(slot)
            });
        if self.shared.is_over() {
            return;
        }
        if count > 0 && self.socket.ended_by_peer.load(Ordering::Acquire) {
            // It looked like an end in order, and was none: chunks of ours were on it.
            self.shared
                .counters
                .lanes_lost
                .fetch_add(1, Ordering::Relaxed);
        }
        self.shared
            .counters
            .chunks_resent
            .fetch_add(count as u64, Ordering::Relaxed);
        // One more than chunks: whoever woke this lane last for a chunk of its own meant any lane.
        for _ in 0..=count {
            self.shared.wake_another();
        }
        if self.shared.parts.staging.has_waiting() {
            self.shared.roster.wake_any_sender();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    use tcpx_memory::Region;

    use super::super::transmit_lane;
    use super::*;
    use crate::channel::SendChunk;
    use crate::tcp::Lend;
    use crate::tcp::shared::{ChannelShared, LaneSocket, Parts};
    use crate::tcp::staging::alone;
    use crate::tcp::transmit_table::{Forgotten, Unstaged, describe};
    use tcpx_lanes::sealing::SendSeal;
    use tcpx_lanes::send_lane::{NextChunk, Owner, SendLane};

    /// A lane to a peer that reads nothing.
    fn lane(shared: &Arc<ChannelShared>) -> (SendLane<Queue>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let loops = crate::tcp::lanes::loops(1).unwrap().spread(1);
        let place = loops[0].place();
        let socket = Arc::new(LaneSocket {
            since: Instant::now(),
            descriptor: stream.into(),
            peer: SocketAddr::from(([0, 0, 0, 0], 0)),
            lane: 0,
            transmit: place.clone(),
            receive: place,
            ended_by_peer: AtomicBool::new(false),
        });
        shared.roster.join(&socket);
        let lane = transmit_lane(Arc::clone(shared), socket, SendSeal::Plain);
        (lane, listener.accept().unwrap().0)
    }

    /// A lane whose peer reads nothing keeps what was lent to it, and nobody waits for that.
    #[test]
    fn what_a_silent_lane_keeps_leaves_a_slot_to_sends() {
        const BYTES: usize = 64 << 10;
        let _alone = alone();
        let parts = Parts {
            lend: Lend::Always,
            ..Parts::of_two_lanes(true, 2)
        };
        let shared = ChannelShared::new(parts).unwrap();
        let (mut lane, _peer) = lane(&shared);
        let source = Region::host(BYTES).unwrap().all();
        let until = Instant::now() + Duration::from_secs(30);
        for sequence in 0..8 {
            let (header, position) = describe(&SendChunk {
                token: sequence,
                sequence,
                transfer: sequence,
                offset: 0,
                index: 0,
                total: BYTES as u64,
                window: sequence,
                tag: 0,
                source: source.clone(),
                fence: None,
            });
            let unstaged = Unstaged {
                header,
                position,
                source: source.clone(),
                fence: None,
            };
            ChannelShared::stage(&shared, 0, unstaged);
            let mut writing = loop {
                if let NextChunk::Chunk(writing) = lane.owner().next() {
                    break writing;
                }
                assert!(Instant::now() < until, "send {sequence} gets no slot");
                std::thread::yield_now();
            };
            writing.chunk.spliced = writing.by_pages.then_some(0);
            shared.transmit.written(0, writing.chunk, 0);
            let forgotten = shared.transmit.forget(0, sequence, false);
            assert_eq!(forgotten, Forgotten::Free);
            let _copied = shared.next_event();
        }
        assert_eq!(shared.transmit.chunks.unwanted(), 1);
    }
}
