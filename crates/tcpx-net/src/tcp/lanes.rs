//! Handing the lanes of a channel to the event loops, at its start and when one comes back.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use nccl_net::export::fork::PerProcess;
use tcpx_lanes::event_loop::{EventLoops, Loop, loops_wanted};
use tcpx_lanes::socket::{canonical, limit_buffers};
use tcpx_wire::lane_seal::LaneKeys;

use super::NAME;
use super::receive_lane::receive_lane;
use super::shared::{ChannelShared, LaneSocket, Parts, lock};
use super::tcp_channel::TcpChannel;
use super::transmit_lane::transmit_lane;
use super::watch;
use crate::dial::JoinedLane;
use crate::error::{IoError, NetworkError, SocketError};

static LOOPS: PerProcess<OnceLock<Result<EventLoops, IoError>>> = PerProcess::new();

/// The process's loops, which all of its channels share. The first use starts them, for as long as
/// the process lives: as many as are asked for, or with 0 as suit the machine; later ones take what
/// there is.
pub(super) fn loops(asked: u16) -> Result<&'static EventLoops, IoError> {
    LOOPS
        .get()
        .get_or_init(|| EventLoops::start("tcpx", loops_wanted(asked)).map_err(IoError::from))
        .as_ref()
        .map_err(Clone::clone)
}

/// How many those are, or would be.
pub(super) fn count_loops(asked: u16) -> usize {
    match LOOPS.get().get() {
        Some(Ok(loops)) => loops.count(),
        _ => loops_wanted(asked),
    }
}

/// How errors and logs call the channel.
pub(super) fn name(lanes: u16, peer: SocketAddr) -> String {
    let plural = if lanes == 1 { "lane" } else { "lanes" };
    format!("{NAME}, {lanes} {plural} to {peer}")
}

/// Hands the lanes to the event loops, of which `loops` were asked for.
pub(super) fn start(
    streams: Vec<JoinedLane>,
    peer: SocketAddr,
    parts: Parts,
    loops: u16,
) -> Result<TcpChannel, NetworkError> {
    let fail = |operation, cause: IoError| SocketError::Io {
        operation,
        address: peer.to_string(),
        cause,
        hint: "; raise the limits on threads and descriptors",
    };
    let loops = self::loops(loops).map_err(|cause| fail("starting the event loops", cause))?;
    let window = parts.window;
    let lanes = streams.len();
    let places = loops.spread(lanes);
    let shared = ChannelShared::new(parts)
        .map_err(|error| fail("eventfd", std::io::Error::from(error).into()))?;
    watch::register(&shared).map_err(|cause| fail("starting the watching thread", cause.into()))?;
    // Everything that can fail is done. All lanes have joined before the first one starts, so that
    // the first that dies is not the last.
    let joined: Vec<_> = (0u16..)
        .zip(streams.into_iter().zip(places))
        .map(|(lane, (JoinedLane { stream, keys }, place))| {
            let socket = shared.lane_socket(&place, lane, stream, peer);
            shared.roster.join(&socket);
            (socket, keys)
        })
        .collect();
    for (socket, keys) in joined {
        ChannelShared::run_lane(&shared, &socket, keys);
    }
    Ok(TcpChannel::new(shared, window))
}

impl ChannelShared {
    /// A stream as a lane; `peer` is what errors call it if the system does not know.
    fn lane_socket(
        &self,
        place: &Loop,
        lane: u16,
        stream: TcpStream,
        peer: SocketAddr,
    ) -> Arc<LaneSocket> {
        limit_buffers(&stream, self.parts.socket_buffer);
        let peer = stream.peer_addr().map_or(peer, canonical);
        Arc::new(LaneSocket {
            descriptor: stream.into(),
            peer,
            lane,
            since: Instant::now(),
            transmit: place.place(),
            receive: place.place(),
            ended_by_peer: AtomicBool::new(false),
        })
    }

    /// Gives the halves of a lane that has joined to loops.
    fn run_lane(shared: &Arc<Self>, socket: &Arc<LaneSocket>, keys: LaneKeys) {
        let (seal, open) = shared.parts.protection.start(keys);
        let sending = transmit_lane(Arc::clone(shared), Arc::clone(socket), seal);
        let receiving = receive_lane(Arc::clone(shared), Arc::clone(socket), open);
        socket.transmit.start(Box::new(sending));
        socket.receive.start(Box::new(receiving));
    }

    /// Brings a dead lane back with a new stream; `false`: halves of the old one are still there. A
    /// channel that has ended drops it.
    pub(super) fn restore(shared: &Arc<Self>, lane: u16, joined: JoinedLane) -> bool {
        let _adding = lock(&shared.membership);
        let Ok(loops) = loops(0) else {
            return false;
        };
        if shared.is_over() {
            return true;
        }
        let JoinedLane { stream, keys } = joined;
        let peer = SocketAddr::from(([0, 0, 0, 0], 0));
        let all = loops.all();
        let Some(one) = all.fewest() else {
            return false;
        };
        let socket = shared.lane_socket(one, lane, stream, peer);
        let (channel, peer) = (&shared.parts.name, socket.peer);
        let Some(is_back) = shared.roster.join(&socket) else {
            return false;
        };
        match is_back {
            false => tracing::info!(%channel, lane, %peer, "a lane was opened"),
            true => {
                let restored = &shared.counters.lanes_restored;
                restored.fetch_add(1, Ordering::Relaxed);
                tracing::info!(%channel, lane, %peer, "a lane is back");
            }
        }
        *lock(&shared.last_loss) = None;
        Self::run_lane(shared, &socket, keys);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::time::Duration;

    use tcpx_memory::{Access, Region};
    use tcpx_wire::ChunkPlan;
    use tcpx_wire::chunk_header::ChunkHeader;
    use tcpx_wire::frame::TransferId;

    use super::super::Lend;
    use super::super::loss::Lost;
    use super::super::receive_table::Arrival;
    use super::*;
    use crate::channel::{Cancel, Channel, PostAnswer, ReceiveWindow, SendChunk};
    use crate::error::ChannelError;

    #[test]
    fn a_lane_that_comes_back_has_the_first_ones_buffers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let usual = socket2::SockRef::from(&connect()).recv_buffer_size();
        for bytes in [0, 96 << 10] {
            let parts = Parts {
                socket_buffer: bytes,
                ..Parts::of_two_lanes(false, 4)
            };
            let shared = ChannelShared::new(parts).unwrap();
            let joined = JoinedLane {
                stream: connect(),
                keys: LaneKeys::new([1; 32], [2; 32]),
            };
            assert!(ChannelShared::restore(&shared, 0, joined));
            let back = shared.roster.socket(0).unwrap();
            let first = connect();
            limit_buffers(&first, bytes);
            let sizes = |socket: socket2::SockRef<'_>| {
                [
                    socket.send_buffer_size().unwrap(),
                    socket.recv_buffer_size().unwrap(),
                ]
            };
            let back = sizes(socket2::SockRef::from(&*back));
            assert_eq!(back, sizes(socket2::SockRef::from(&first)));
            assert_ne!(Some(back[1]), usual.as_ref().ok().copied());
            shared.closing.store(true, Ordering::Release);
        }
    }

    /// The lane that held the chunk has let go of it meanwhile, and another stream has taken its
    /// place.
    #[test]
    fn a_new_stream_is_not_ended_for_the_old_ones_chunk() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let shared = ChannelShared::new(Parts::of_two_lanes(false, 4)).unwrap();
        let mut far = Vec::new();
        let mut restore = || {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            stream.set_nonblocking(true).unwrap();
            far.push(listener.accept().unwrap());
            let keys = LaneKeys::new([1; 32], [2; 32]);
            ChannelShared::restore(&shared, 0, JoinedLane { stream, keys })
        };
        assert!(restore());
        let before = shared.roster.socket(0).unwrap();
        let mut looks = 0;
        let arrival = shared.without_holder(|| {
            looks += 1;
            if looks == 2 {
                shared.lane_lost(0, Lost::Replaced);
                let until = Instant::now() + Duration::from_secs(60);
                while !restore() {
                    assert!(Instant::now() < until);
                    std::thread::yield_now();
                }
                return Ok(Arrival::Unwanted);
            }
            Ok(Arrival::HeldBy(0))
        });
        assert!(matches!(arrival, Ok(Arrival::Unwanted)));
        let after = shared.roster.socket(0).unwrap();
        assert!(!Arc::ptr_eq(&before, &after));
        // One that holds it still ends.
        let arrival = shared.without_holder(|| Ok(Arrival::HeldBy(0)));
        assert!(matches!(arrival, Ok(Arrival::HeldBy(0))));
        assert!(shared.roster.socket(0).is_none());
        shared.closing.store(true, Ordering::Release);
    }

    const PAGES: usize = 64 << 10;

    /// A channel of two lanes that stages host memory, and the other ends of its lanes.
    fn staged(lend: Lend) -> (TcpChannel, Vec<TcpStream>) {
        channel(Parts {
            lend,
            ..Parts::of_two_lanes(true, 64)
        })
    }

    fn channel(parts: Parts) -> (TcpChannel, Vec<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connect = |_| {
            let near = TcpStream::connect(address).unwrap();
            near.set_nonblocking(true).unwrap();
            let near = JoinedLane {
                stream: near,
                keys: LaneKeys::new([1; 32], [2; 32]),
            };
            (near, listener.accept().unwrap().0)
        };
        let (near, far) = [0, 1].map(connect).into_iter().unzip();
        (start(near, address, parts, 1).unwrap(), far)
    }

    fn send(channel: &mut TcpChannel, sequence: u64, fill: u8) {
        let region = Region::host(PAGES).unwrap();
        region.with_bytes_mut(.., |bytes| bytes.fill(fill)).unwrap();
        let before = channel.stats().chunks_sent;
        post(channel, sequence, &region);
        while channel.stats().chunks_sent == before {
            channel.poll(&mut Vec::new()).unwrap();
            std::thread::yield_now();
        }
    }

    fn post(channel: &mut TcpChannel, sequence: u64, region: &Region) {
        let source = region.lease(.., Access::Read).unwrap().all();
        let chunk = SendChunk {
            token: sequence,
            sequence,
            transfer: sequence,
            offset: 0,
            index: 0,
            total: source.len() as u64,
            window: sequence,
            tag: 0,
            source,
            fence: None,
        };
        assert!(matches!(channel.post_send(chunk), Ok(PostAnswer::Accepted)));
    }

    /// The peer reads nothing of the lane that has the first one.
    #[test]
    fn no_chunk_waits_for_room_on_a_lane_that_has_another() {
        let parts = Parts {
            socket_buffer: 96 << 10,
            ..Parts::of_two_lanes(false, 4)
        };
        let (mut channel, far) = channel(parts);
        for (sequence, bytes) in [(0, 16 << 20), (1, 4096)] {
            post(&mut channel, sequence, &Region::host(bytes).unwrap());
        }
        let came = far.into_iter().map(|mut far| {
            let mut header = [0; ChunkHeader::BYTES];
            far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            far.read_exact(&mut header).unwrap();
            (ChunkHeader::decode(&header).unwrap().transfer, far)
        });
        let (mut came, _far): (Vec<_>, Vec<_>) = came.unzip();
        came.sort_unstable();
        assert_eq!(came, [TransferId(0), TransferId(1)]);
    }

    /// The peer of one connection says at once that a chunk was placed, and reads its lane only
    /// after others were sent to another peer.
    #[test]
    fn a_peer_that_lies_reads_nothing_of_what_others_get() {
        // Both are on this host: slots are copied.
        let (mut lied_to, lying) = staged(Lend::OtherHosts);
        let (mut honest, reading) = staged(Lend::OtherHosts);
        send(&mut lied_to, 0, 0x11);
        assert_eq!(lied_to.stats().bytes_spliced, 0);
        lied_to.placed(0).unwrap();
        let readers = reading.into_iter().map(|mut far| {
            std::thread::spawn(move || {
                let mut some = vec![0; PAGES];
                while far.read(&mut some).is_ok_and(|count| count > 0) {}
            })
        });
        let readers: Vec<_> = readers.collect();
        for sequence in 0..128 {
            send(&mut honest, sequence, 0x5E);
            honest.placed(sequence).unwrap();
        }
        let mut seen = Vec::new();
        // What is on its lanes is there, and nothing follows behind their end.
        drop(lied_to);
        for mut far in lying {
            let _ = far.read_to_end(&mut seen);
        }
        let of_others = seen.iter().filter(|byte| **byte == 0x5E).count();
        assert!(
            seen.len() >= PAGES && of_others < 40,
            "{of_others} of {}",
            seen.len()
        );
        drop(honest);
        for reader in readers {
            reader.join().unwrap();
        }
    }

    #[test]
    fn nothing_is_received_into_memory_leased_for_reading() {
        let (mut channel, _far) = staged(Lend::Never);
        let region = Region::host(4096).unwrap();
        let destination = region.lease(.., Access::Read).unwrap().all();
        let opened = channel.open_window(ReceiveWindow {
            token: 0,
            window: 0,
            cut: ChunkPlan::even(4096, 4096),
            destination,
            fence: None,
        });
        let refused = matches!(&opened, Err(ChannelError::BadRequest { .. }));
        assert!(refused, "{opened:?}");
        assert_eq!(channel.cancel(0), Cancel::Done, "it is not open");
    }

    /// Its pages may be used for something else once the channel is gone.
    #[test]
    fn a_lane_whose_pages_were_not_read_ends_with_a_reset() {
        let (mut channel, far) = staged(Lend::Always);
        send(&mut channel, 0, 0x11);
        drop(channel);
        let ended = far.into_iter().map(|mut far| {
            let mut bytes = Vec::new();
            let end = far.read_to_end(&mut bytes).map_err(|error| error.kind());
            (bytes.len(), end)
        });
        let ended: Vec<_> = ended.collect();
        let reset = Err(std::io::ErrorKind::ConnectionReset);
        assert!(ended.iter().any(|(_, end)| *end == reset), "{ended:?}");
    }
}
