//! Where the chunks of a lane go: to the posted receives of the comms that its sender's process has
//! here.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nccl_net::export::Log;
use tcpx_lanes::event_loop::Remote;
use tcpx_lanes::receive_lane::{Answer, End, Progress, ReceiveLane, Target, Violation};
use tcpx_lanes::sealing::ReceiveSeal;
use tcpx_lanes::socket_calls::{self as calls, Span};
use tcpx_wire::ChunkHeader;

use super::group::{Group, Registry};
use super::hello::Hello;
use super::recv_stream::{ClaimOutcome, Part, RecvStream};
use super::to_gpu::ToGpu;
use crate::held::Stream;
use crate::link::{Link, is_forged};

/// A lane behind its hello, which `place` reaches; it acknowledges over the second connection.
pub(crate) fn receive_lane(
    [link, answers]: [Link; 2],
    hello: &Hello,
    registry: Arc<Registry>,
    place: Remote,
    log: Arc<Log>,
) -> Result<ReceiveLane<Comms>, Violation> {
    static LANES: AtomicU64 = AtomicU64::new(0);
    let id = LANES.fetch_add(1, Ordering::Relaxed);
    let group = registry.group(hello.group);
    group.entered(hello, id, &place)?;
    let (stream, seals) = link.into_lane();
    let (answers, _) = answers.into_lane();
    let (seal, sealer) = match seals {
        None => (ReceiveSeal::Plain, None),
        Some((protection, sealer, opener)) => (protection.open(opener), Some(sealer)),
    };
    let comms = Comms {
        stream,
        answers,
        registry,
        place,
        log,
        id,
        group,
        known: HashMap::new(),
    };
    Ok(ReceiveLane::sealed(comms, seal, sealer))
}

/// The peer broke the protocol: its lane ends.
pub(super) fn refuse(log: &Log, peer: &str, violation: &Violation) {
    let (expected, arrived) = (&violation.expected, &violation.arrived);
    log.warn(&format!(
        "lane from {peer} is closed: expected {expected}, got {arrived}; both sides must run the same plugin version"
    ));
}

/// The comms of the process, as one lane finds them.
#[derive(Debug)]
pub(crate) struct Comms {
    stream: Stream,
    answers: Stream,
    registry: Arc<Registry>,
    place: Remote,
    log: Arc<Log>,
    /// The lane's number in this process.
    id: u64,
    group: Arc<Group>,
    /// Comms seen on this lane.
    known: HashMap<u64, Arc<RecvStream>>,
}

/// A chunk whose payload is arriving.
#[derive(Debug)]
pub(crate) struct Arriving {
    recv_stream: Arc<RecvStream>,
    part: Part,
    /// It goes to device memory, through a slot.
    to_gpu: Option<ToGpu>,
}

/// Where the bytes of a part go; `None` while no slot is free.
fn room(part: &Part, to_gpu: &mut Option<ToGpu>) -> Option<Span> {
    match to_gpu {
        None => Some(part.at),
        Some(to_gpu) => to_gpu.room(),
    }
}

impl Comms {
    fn recv_stream(&mut self, id: u64) -> Option<Arc<RecvStream>> {
        if let Some(recv_stream) = self.known.get(&id) {
            return Some(Arc::clone(recv_stream));
        }
        let recv_stream = self.registry.recv_stream(id)?;
        self.known.retain(|_, recv_stream| !recv_stream.is_closed());
        self.known.insert(id, Arc::clone(&recv_stream));
        Some(recv_stream)
    }
}

impl Target for Comms {
    type Claim = Arriving;
    // What was measured here was measured without a mark; the engine's figure is of its own chunks.
    const LOW_WATER: usize = 1;

    fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn answers(&self) -> Option<BorrowedFd<'_>> {
        Some(self.answers.as_fd())
    }

    fn claim(&mut self, header: &ChunkHeader) -> Result<Answer<Arriving>, Violation> {
        let Some(recv_stream) = self.recv_stream(header.transfer.0) else {
            return Ok(Answer::Drain);
        };
        let group = &self.group;
        let claim = || recv_stream.claim(group, self.id, header);
        let mut claimed = claim();
        if let Ok(ClaimOutcome::Held(_)) = claimed {
            // The holder may have let go before it could see this lane in the list.
            group.park(&self.place);
            claimed = claim();
        }
        Ok(match claimed {
            Ok(ClaimOutcome::Write(part)) => {
                let to_gpu = part.device.clone().map(ToGpu::new);
                Answer::Write(Arriving {
                    recv_stream,
                    part,
                    to_gpu,
                })
            }
            Ok(ClaimOutcome::Held(holder)) => {
                // Its sender gave that lane up. Nothing of it may be written once this one begins.
                group.end(holder);
                Answer::Park
            }
            // The comm tells its host why it refuses a chunk; the lane goes on for the others.
            Ok(ClaimOutcome::Drain) | Err(()) => Answer::Drain,
        })
    }

    fn read(
        &mut self,
        arriving: &mut Arriving,
        done: usize,
        behind: &mut [u8],
    ) -> io::Result<Progress> {
        // The comm's memory is ours only while the right to write lives.
        let Some(_writing) = arriving.recv_stream.write() else {
            return Ok(Progress::Withdrawn);
        };
        let Some(room) = room(&arriving.part, &mut arriving.to_gpu) else {
            return Ok(Progress::NoRoom);
        };
        let spans = [room.from(done), Span::of_mut(behind)];
        // SAFETY: what is left of a claimed part of a posted buffer, which its comm leaves to us
        // while `_writing` lives, or of a pinned slot that is ours; `behind` is borrowed
        // exclusively.
        let moved = unsafe { calls::receive_spans(&self.stream, &spans) }?;
        if let Some(error) = self.stream.take_error()? {
            // The sender reset the lane: its memory may have changed before we read it.
            return Err(error);
        }
        arriving.recv_stream.moved();
        Ok(Progress::Moved(moved))
    }

    fn place(&mut self, arriving: &mut Arriving, done: usize, opened: &[u8]) -> io::Result<bool> {
        let Some(_writing) = arriving.recv_stream.write() else {
            // The lane asks before it goes on.
            return Ok(true);
        };
        let Some(room) = room(&arriving.part, &mut arriving.to_gpu) else {
            return Ok(false);
        };
        let to = room.from(done).first(opened.len());
        // SAFETY: memory as for `read`; `opened` is the lane's own.
        unsafe {
            let from = opened.as_ptr();
            from.copy_to_nonoverlapping(to.start().cast_mut(), to.len());
        }
        arriving.recv_stream.moved();
        Ok(true)
    }

    fn is_withdrawn(&self, arriving: &Arriving) -> bool {
        arriving.recv_stream.write().is_none()
    }

    fn complete(&mut self, arriving: Arriving) {
        let Arriving {
            recv_stream,
            part,
            to_gpu,
        } = arriving;
        match to_gpu {
            None => recv_stream.complete_part(&part, true),
            Some(mut to_gpu) => {
                recv_stream.complete_part(&part, false);
                if let Some(_writing) = recv_stream.write() {
                    to_gpu.arrived(to_gpu.left(), &recv_stream, part.sequence);
                }
            }
        }
    }

    fn put_back(&mut self, arriving: Arriving) {
        arriving.recv_stream.put_back(&arriving.part);
    }

    fn ended(&mut self, end: End) {
        let peer = self
            .stream
            .peer_addr()
            .map_or_else(|_| "a peer".to_owned(), |peer| peer.to_string());
        match end {
            End::ByPeer => {}
            End::Broken { cause, .. } => {
                if is_forged(&cause) {
                    self.group.forged();
                }
                self.log.info(&format!("lane from {peer} ended: {cause}"));
            }
            End::Violation(violation) => refuse(&self.log, &peer, &violation),
        }
    }

    fn close(&mut self) {
        self.group.left(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::time::Duration;

    use nccl_net::export::{Buffer, HostLogger};
    use tcpx_lanes::event_loop::{EventLoops, Source, Turn};
    use tcpx_lanes::receive_lane::ACKNOWLEDGEMENT_BYTES;

    use tcpx_wire::TransferId;

    use tcpx_wire::ChunkPayload;

    use super::*;

    const BYTES: usize = 100_000;

    /// A comm that waits for messages 0 and 1, and the lanes of its peer.
    struct Fixture {
        registry: Arc<Registry>,
        recv_stream: Arc<RecvStream>,
        loops: EventLoops,
    }

    impl Fixture {
        fn new(memory: &mut [u8]) -> Self {
            let registry = Arc::new(Registry::default());
            let recv_stream = Arc::new(RecvStream::new(1));
            registry.open(&recv_stream);
            assert!(recv_stream.join(registry.group([7; 16])));
            for (sequence, half) in memory.chunks_mut(BYTES).enumerate() {
                let buffer = Buffer {
                    data: half.as_mut_ptr(),
                    len: half.len(),
                };
                recv_stream.post(sequence as u64, buffer, None);
            }
            let loops = EventLoops::start("tcpx-nccl", 1).unwrap();
            Self {
                registry,
                recv_stream,
                loops,
            }
        }

        /// A lane that the test drives, and its peer's ends, payload's first.
        fn lane(&self, lane: u16, epoch: u32) -> (ReceiveLane<Comms>, [TcpStream; 2]) {
            let connection = || {
                let (link, peer) = Link::bare();
                peer.set_read_timeout(Some(Duration::from_secs(60)))
                    .unwrap();
                (link, peer)
            };
            let [(link, peer), (back, answers)] = [connection(), connection()];
            let hello = Hello {
                group: [7; 16],
                lanes: 2,
                lane,
                epoch,
            };
            let log = Arc::new(Log::new(HostLogger::default(), c"TCPX"));
            let place = self.loops.spread(1)[0].place();
            let registry = Arc::clone(&self.registry);
            let lane = receive_lane([link, back], &hello, registry, place, log);
            (lane.unwrap(), [peer, answers])
        }

        fn is_whole(&self, sequence: u64) -> bool {
            self.recv_stream.progress(sequence) == Some((BYTES as u64, BYTES as u64))
        }
    }

    fn header(sequence: u64, attempt: u8) -> [u8; ChunkHeader::BYTES] {
        let header = ChunkHeader {
            sequence,
            transfer: TransferId(1),
            offset: 0,
            total: BYTES as u64,
            length: BYTES as u32,
            attempt,
            payload: ChunkPayload::Follows,
        };
        header.encode()
    }

    fn acknowledged(mut peer: &TcpStream) -> u64 {
        let mut bytes = [0; ACKNOWLEDGEMENT_BYTES];
        peer.read_exact(&mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    fn reset(stream: TcpStream) {
        let stream = socket2::Socket::from(stream);
        stream.set_linger(Some(Duration::ZERO)).unwrap();
    }

    #[test]
    fn a_chunk_is_acknowledged_only_once_it_was_read() {
        let mut memory = vec![0; 2 * BYTES];
        let fixture = Fixture::new(&mut memory);
        let (mut lane, [mut peer, answers]) = fixture.lane(0, 0);
        peer.write_all(&header(0, 0)).unwrap();
        peer.write_all(&[5; BYTES]).unwrap();
        while !fixture.is_whole(0) {
            assert_ne!(lane.turn(), Turn::End);
        }
        assert_eq!(acknowledged(&answers), (ChunkHeader::BYTES + BYTES) as u64);
        // All of the next chunk has arrived when its sender takes the memory back.
        peer.write_all(&header(1, 0)).unwrap();
        peer.write_all(&[5; BYTES]).unwrap();
        reset(peer);
        while lane.turn() != Turn::End {}
        lane.finish();
        assert!(!fixture.is_whole(1));
        assert_eq!(fixture.recv_stream.refusal(), None, "it may come again");
    }

    #[test]
    fn a_holding_lane_ends_before_the_next_attempt() {
        let mut memory = vec![0; BYTES];
        let fixture = Fixture::new(&mut memory);
        let (mut first, [mut stale, _]) = fixture.lane(0, 0);
        stale.write_all(&header(0, 0)).unwrap();
        stale.write_all(&[4; BYTES / 2]).unwrap();
        while fixture.recv_stream.moves() == 0 {
            assert_ne!(first.turn(), Turn::End);
        }
        let (mut second, [mut peer, answers]) = fixture.lane(1, 0);
        peer.write_all(&header(0, 1)).unwrap();
        peer.write_all(&[5; BYTES]).unwrap();
        for _ in 0..100 {
            assert_ne!(second.turn(), Turn::End);
        }
        assert_eq!(fixture.recv_stream.progress(0), Some((0, BYTES as u64)));
        first.finish();
        while !fixture.is_whole(0) {
            assert_ne!(second.turn(), Turn::End);
        }
        assert_eq!(acknowledged(&answers), (ChunkHeader::BYTES + BYTES) as u64);
        assert!(memory.iter().all(|byte| *byte == 5));
    }
}
