//! The end of a lane's sending half: what becomes of the chunks that it had.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::net::connect_unspec;

use tcpx_lanes::sealing::SendSeal;
use tcpx_lanes::socket::abort;
use tcpx_lanes::splice::Lender;

use super::Queue;
use crate::tcp::shared::lock;
use crate::tcp::transmit_table::Outgoing;

/// How long a card may take to let go of what a socket that was closed had given it.
const UNREAD: Duration = Duration::from_secs(10);

/// How often it is asked for.
const LOOK: Duration = Duration::from_millis(1);

impl Queue {
    /// Ends the lane once the kernel has let go of the memory that it reads where it lies: nobody may be
    /// told before that it is free.
    pub(super) fn part_when_unread(&mut self, unwritten: Option<Outgoing>) {
        let rest = Self {
            shared: Arc::clone(&self.shared),
            socket: Arc::clone(&self.socket),
            chunk: self.chunk,
            sent_short: false,
            lender: Lender::Refused(None),
            uncopied: std::mem::take(&mut self.uncopied),
            seal: SendSeal::Plain,
        };
        let rest = Arc::new(Mutex::new(Some((rest, unwritten))));
        let of_thread = Arc::clone(&rest);
        let end = |rest: &Mutex<Option<(Self, Option<Outgoing>)>>| {
            let taken = lock(rest).take();
            if let Some((mut rest, unwritten)) = taken {
                rest.wait_until_unread();
                rest.part(unwritten);
            }
        };
        let started = std::thread::Builder::new()
            .name("tcpx-unread".to_owned())
            .spawn(move || end(&of_thread));
        if let Err(error) = started {
            tracing::warn!(%error, "no thread to wait for the memory of a lane; waiting here");
            end(&rest);
        }
    }

    /// Drops what was not sent, so that the kernel lets go of it, and takes its reports.
    fn wait_until_unread(&mut self) {
        let until = Instant::now() + UNREAD;
        let waited = connect_unspec(&*self.socket)
            .map_err(io::Error::from)
            .and_then(|()| {
                loop {
                    self.collect()?;
                    if self.uncopied.is_idle() || Instant::now() >= until {
                        return Ok(());
                    }
                    // A closed socket is always ready: there is nothing to wait on.
                    std::thread::sleep(LOOK);
                }
            });
        if !self.uncopied.is_idle() || waited.is_err() {
            // Nobody listens at the other end of this socket any more.
            tracing::warn!(
                channel = %self.shared.parts.name, error = waited.err().map(tracing::field::display),
                "the kernel did not say that it is done with memory of a lane that is gone"
            );
        }
    }

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
        self.hand_over(unwritten);
        self.shared.half_gone(lane);
    }

    /// The lane is gone: the others send what may not have arrived, or its owner ends it with the channel.
    fn hand_over(&mut self, unwritten: Option<Outgoing>) {
        let held = self.uncopied.abandon().into_iter().map(|(_, chunk)| chunk);
        let count =
            self.shared
                .transmit
                .lane_ended(self.socket.lane, held.chain(unwritten), |slot| {
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
            self.shared.wake_sender(0);
        }
        if self.shared.parts.staging.has_waiting() {
            self.shared.roster.wake_any_sender();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::atomic::AtomicBool;

    use tcpx_memory::Region;
    use tcpx_wire::chunk_header::ChunkHeader;

    use super::super::transmit_lane;
    use super::*;
    use crate::channel::SendChunk;
    use crate::error::ChunkPosition;
    use crate::tcp::shared::{LaneSocket, Parts, Shared};
    use crate::tcp::staging::alone;
    use crate::tcp::transmit_table::{Forgotten, Taken, Unstaged, describe};
    use crate::tcp::uncopied::Uncopied;
    use tcpx_lanes::event_loop::Source;
    use tcpx_lanes::send_lane::{Next, Owner, SendLane};
    use tcpx_lanes::zero_copy;

    const CHUNK: usize = 8 << 20;

    fn shared() -> Arc<Shared> {
        let parts = Parts {
            zero_copy: true,
            ..Parts::of_two_lanes(false, 4)
        };
        Shared::new(parts).unwrap()
    }

    fn enqueue(shared: &Shared, slot: u16) {
        let position = ChunkPosition {
            sequence: slot.into(),
            transfer: 0,
            offset: 0,
            length: CHUNK as u64,
            done: 0,
        };
        shared.transmit.enqueue(Outgoing {
            slot,
            header: [0; ChunkHeader::BYTES],
            position,
            payload: Region::host(CHUNK).unwrap().all(),
            attempt: 0,
            permit: None,
            spliced: None,
        });
    }

    /// A lane to a peer that reads nothing, as if that were on another host.
    fn lane(shared: &Arc<Shared>) -> (SendLane<Queue>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let loops = crate::tcp::loops::get(1).unwrap();
        let socket = Arc::new(LaneSocket {
            since: Instant::now(),
            descriptor: stream.into(),
            peer: SocketAddr::from(([0, 0, 0, 0], 0)),
            lane: 0,
            transmit: loops.transmit(),
            receive: loops.receive(),
            ended_by_peer: AtomicBool::new(false),
        });
        shared.roster.join(&socket);
        zero_copy::enable(socket.as_fd()).unwrap();
        let mut lane = transmit_lane(Arc::clone(shared), socket, SendSeal::Plain);
        let uncopied = &mut lane.owner().uncopied;
        assert!(!uncopied.takes(CHUNK), "a receiver on this host");
        *uncopied = Uncopied::new(true);
        (lane, listener.accept().unwrap().0)
    }

    /// A lane whose peer reads nothing keeps what was lent to it, and nobody waits for that.
    #[test]
    fn what_a_silent_lane_keeps_leaves_a_slot_to_sends() {
        const BYTES: usize = 64 << 10;
        let _alone = alone();
        let parts = Parts {
            splice: true,
            ..Parts::of_two_lanes(true, 2)
        };
        let shared = Shared::new(parts).unwrap();
        let (mut lane, _peer) = lane(&shared);
        let source = Region::host(BYTES).unwrap().all();
        let until = Instant::now() + UNREAD * 3;
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
            Shared::stage(&shared, 0, unstaged);
            let mut writing = loop {
                if let Next::Chunk(writing) = lane.owner().next() {
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

    #[test]
    fn a_dead_lanes_chunks_go_on_when_the_kernel_has_let_go_of_them() {
        let shared = shared();
        let (mut lane, _peer) = lane(&shared);
        enqueue(&shared, 0);
        lane.turn();
        assert!(!lane.owner().uncopied.is_idle(), "the peer reads nothing");
        assert!(shared.next_event().is_none());
        lane.finish();
        let until = Instant::now() + UNREAD * 3;
        while shared.transmit.chunks.queued() == 0 {
            assert!(Instant::now() < until, "the lane does not end");
            std::thread::sleep(LOOK);
        }
        let socket = Arc::clone(&lane.owner().socket);
        assert!(
            rustix::net::getpeername(&*socket).is_err(),
            "the kernel may still send it"
        );
        let Some(Taken::Chunk(again)) = shared.transmit.take(1) else {
            panic!("the chunk is not sent again");
        };
        assert_eq!((again.slot, again.attempt), (0, 1));
        assert!(shared.next_event().is_none(), "it was not sent");
    }

    #[test]
    fn what_the_peer_has_not_read_is_waited_for_until_the_kernel_has_dropped_it() {
        let shared = shared();
        let (mut lane, _peer) = lane(&shared);
        enqueue(&shared, 0);
        lane.turn();
        let queue = lane.owner();
        assert!(!queue.uncopied.is_idle(), "the peer reads nothing");
        queue.wait_until_unread();
        assert!(queue.uncopied.is_idle());
    }

    #[test]
    fn a_chunk_that_the_peer_has_placed_ends_when_the_kernel_has_let_go_of_it() {
        use std::io::Read;

        let shared = shared();
        let (mut lane, mut peer) = lane(&shared);
        enqueue(&shared, 1);
        lane.turn();
        // Its end comes as an event, as with any chunk in a lane's hands.
        let forgotten = shared.transmit.forget(1, 1, true);
        assert_eq!(forgotten, Forgotten::Later);
        let reading = std::thread::spawn(move || {
            let mut bytes = vec![0; ChunkHeader::BYTES + CHUNK];
            peer.read_exact(&mut bytes)
        });
        let until = Instant::now() + UNREAD * 3;
        while shared.next_event().is_none() {
            assert!(Instant::now() < until, "the chunk does not end");
            lane.turn();
            std::thread::sleep(LOOK);
        }
        assert!(
            lane.owner().uncopied.is_idle(),
            "reported before it was let go of"
        );
        assert!(!lane.owner().uncopied.takes(CHUNK), "loopback copies");
        reading.join().unwrap().unwrap();
    }
}
