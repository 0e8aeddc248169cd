//! Pairs of channels on loopback, and a raw peer that can misbehave.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tcpx_lanes::sealing::Protection;
use tcpx_memory::{CopyWorker, Region, RegionSlice};
use tcpx_net::dial::dial_lane;
use tcpx_net::{
    Accepted, AcceptedLane, Auth, Channel, ChannelError, Completion, Congestion, DialOptions,
    Exchange, ListenOptions, Listener, Meanwhile, Network, NetworkError, PostAnswer, Readiness,
    ReceiveWindow, SendChunk, Setup, Side, TcpNetwork, TcpOptions, dial,
};
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};
use tcpx_wire::key::Key;
use tcpx_wire::lane_seal::LaneKeys;
use tcpx_wire::{ChunkPlan, TransferId};

/// Nothing that a test waits for takes longer on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Of connections whose lanes die for good in a test.
pub(crate) const DEAD_AFTER: Duration = Duration::from_secs(2);

pub(crate) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

pub(crate) fn key(seed: u8) -> Key {
    Key::generate(&mut |bytes| bytes.fill(seed))
}

pub(crate) fn listener(auth: Auth) -> Listener {
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    Listener::bind(ListenOptions {
        address,
        auth,
        one_time: false,
        congestion: Congestion::Automatic,
    })
    .unwrap()
}

pub(crate) fn dial_options() -> DialOptions {
    DialOptions::until(deadline())
}

/// Rounds of set-up messages within this process.
pub(crate) struct Wire {
    to: Sender<Vec<u8>>,
    from: Receiver<Vec<u8>>,
}

impl Wire {
    pub(crate) fn pair() -> (Self, Self) {
        let (to_right, at_right) = channel();
        let (to_left, at_left) = channel();
        (
            Self {
                to: to_right,
                from: at_left,
            },
            Self {
                to: to_left,
                from: at_right,
            },
        )
    }
}

impl Exchange for Wire {
    fn exchange(&mut self, payload: &[u8], _: &mut dyn Meanwhile) -> Result<Vec<u8>, NetworkError> {
        let gone = |_| NetworkError::Control {
            reason: "the other end has gone".to_owned(),
        };
        self.to
            .send(payload.to_vec())
            .map_err(|error| gone(error.to_string()))?;
        self.from
            .recv_timeout(PATIENCE)
            .map_err(|error| gone(error.to_string()))
    }
}

/// The next lane of a session that has come, or comes.
pub(crate) fn next_lane(accepted: &Accepted) -> AcceptedLane {
    let (mut exchange, _peer) = Wire::pair();
    let lane = accepted.lanes.take(&mut exchange, deadline()).unwrap();
    lane.expect("a lane before the deadline")
}

pub(crate) fn server_side(
    accepted: &Accepted,
    options: TcpOptions,
    channels: u16,
    workers: &[Arc<CopyWorker>],
    (protection, dead_after): (Protection, Duration),
    exchange: &mut dyn Exchange,
) -> Outcome {
    let setup = Setup {
        side: Side::Server,
        session: &accepted.session,
        local: accepted.stream.local_addr().unwrap(),
        peer: accepted.peer,
        channels,
        deadline: deadline(),
        encrypt: protection == Protection::All,
        dead_after,
        congestion: &Congestion::Automatic,
        workers,
        lanes: Some(accepted.lanes.clone()),
        listening: Some(accepted.listening),
    };
    established(options, &setup, exchange)
}

pub(crate) struct Pair {
    pub(crate) client: Box<dyn Channel>,
    pub(crate) server: Box<dyn Channel>,
    _listener: Listener,
}

/// Two channels that face each other.
pub(crate) fn pair(lanes: u16, client: TcpOptions, server: TcpOptions) -> Pair {
    pair_with(lanes, client, server, Vec::new(), Protection::Headers)
}

/// Whether peers have a key follows from how their lanes are protected.
pub(crate) fn auth(protection: Protection) -> Auth {
    match protection {
        Protection::None => Auth::Insecure,
        Protection::Headers | Protection::All => Auth::Key(key(7)),
    }
}

/// As [`pair`], with copy workers on both sides, and lanes that are protected so.
pub(crate) fn pair_with(
    lanes: u16,
    client: TcpOptions,
    server: TcpOptions,
    workers: Vec<Arc<CopyWorker>>,
    protection: Protection,
) -> Pair {
    pair_through(lanes, client, server, workers, protection, |address| {
        address
    })
}

/// As [`pair_with`], where the client opens lanes to what stands in front of the server's address.
pub(crate) fn pair_through(
    lanes: u16,
    client: TcpOptions,
    server: TcpOptions,
    workers: Vec<Arc<CopyWorker>>,
    protection: Protection,
    in_front: impl FnOnce(SocketAddr) -> SocketAddr,
) -> Pair {
    let auth = auth(protection);
    let listener = listener(auth.clone());
    let address = listener.local_addr();
    let lanes_to = in_front(address);
    let (mut ours, mut theirs) = Wire::pair();
    let client_workers = workers.clone();
    let client = std::thread::spawn(move || {
        let (address, workers) = ((address, lanes_to), &client_workers[..]);
        client_side(
            address, &auth, client, lanes, workers, protection, &mut ours,
        )
        .unwrap()
    });
    let accepted = listener.accept(deadline()).unwrap();
    let server = server_side(
        &accepted,
        server,
        lanes,
        &workers,
        (protection, PATIENCE),
        &mut theirs,
    )
    .unwrap();
    Pair {
        client: client.join().unwrap(),
        server,
        _listener: listener,
    }
}

pub(crate) type Outcome = Result<Box<dyn Channel>, NetworkError>;

/// A channel whose peer is heard once and then rests, so that no lane dies because a test that has
/// its other end comes late to it on a busy machine.
fn established(options: TcpOptions, setup: &Setup<'_>, exchange: &mut dyn Exchange) -> Outcome {
    let mut channels = TcpNetwork::new(options).establish(setup, exchange)?;
    let mut channel = channels.remove(0);
    channel.peer_active(false);
    Ok(channel)
}

/// What the client and the server come to whose lanes are to be protected so; that they have a key
/// follows from the first.
pub(crate) fn outcomes(
    key: Protection,
    client: Protection,
    server: Protection,
) -> (Outcome, Outcome) {
    let auth = auth(key);
    let listener = listener(auth.clone());
    let address = listener.local_addr();
    let (mut ours, mut theirs) = Wire::pair();
    let options = TcpOptions::default;
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            client_side(
                (address, address),
                &auth,
                options(),
                1,
                &[],
                client,
                &mut ours,
            )
        });
        let accepted = listener.accept(deadline()).unwrap();
        let server = server_side(
            &accepted,
            options(),
            1,
            &[],
            (server, PATIENCE),
            &mut theirs,
        );
        (client.join().unwrap(), server)
    })
}

pub(crate) fn client_side(
    (address, lanes_to): (SocketAddr, SocketAddr),
    auth: &Auth,
    options: TcpOptions,
    lanes: u16,
    workers: &[Arc<CopyWorker>],
    protection: Protection,
    exchange: &mut dyn Exchange,
) -> Outcome {
    let dialled = dial(address, auth, &dial_options()).unwrap();
    let setup = Setup {
        side: Side::Client,
        session: &dialled.session,
        local: dialled.stream.local_addr().unwrap(),
        peer: lanes_to,
        channels: lanes,
        deadline: deadline(),
        encrypt: protection == Protection::All,
        dead_after: PATIENCE,
        congestion: &Congestion::Automatic,
        workers,
        lanes: None,
        listening: None,
    };
    established(options, &setup, exchange)
}

/// A channel whose peer is this test, byte by byte, and without a key.
pub(crate) struct Raw {
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) lanes: Vec<TcpStream>,
    _listener: Listener,
}

pub(crate) fn raw_peer(lanes: u16, options: TcpOptions) -> Raw {
    raw_peer_with(lanes, options, Protection::None).0
}

/// As [`raw_peer`], with lanes that are protected so: their keys, by lane.
pub(crate) fn raw_peer_with(
    lanes: u16,
    options: TcpOptions,
    protection: Protection,
) -> (Raw, Vec<LaneKeys>) {
    let auth = auth(protection);
    let listener = listener(auth.clone());
    let address = listener.local_addr();
    let (mut ours, mut theirs) = Wire::pair();
    let dialler = std::thread::spawn(move || {
        let until = dial_options();
        let dialled = dial(address, &auth, &until).unwrap();
        let [low, high] = lanes.to_le_bytes();
        let flags = if protection == Protection::All { 3 } else { 1 };
        // As many lanes as asked for, and no addresses.
        let wish = [b'T', b'C', b'P', b'L', 3, 0, low, high, flags, 0, 0, 0];
        ours.exchange(&wish, &mut ()).unwrap();
        (0..lanes)
            .map(|lane| {
                let joined = dial_lane(
                    tcpx_net::Way::to(address),
                    &dialled.session,
                    lane,
                    lanes,
                    &until,
                )
                .unwrap();
                let stream = joined.stream;
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                (stream, joined.keys)
            })
            .unzip()
    });
    let accepted = listener.accept(deadline()).unwrap();
    let channel = server_side(
        &accepted,
        options,
        lanes,
        &[],
        (protection, DEAD_AFTER),
        &mut theirs,
    )
    .unwrap();
    let (lanes, keys) = dialler.join().unwrap();
    let raw = Raw {
        channel,
        lanes,
        _listener: listener,
    };
    (raw, keys)
}

/// The only chunk of a transfer, which is as long as the window of this name.
pub(crate) fn whole(window: u64, length: u32) -> ChunkHeader {
    part(window, 0, (length, length.into()))
}

/// A chunk of a transfer that is cut in chunks of `length` bytes each.
pub(crate) fn part(window: u64, index: u32, (length, total): (u32, u64)) -> ChunkHeader {
    ChunkHeader {
        sequence: index.into(),
        transfer: TransferId(window),
        offset: u64::from(index) * u64::from(length),
        total,
        length,
        attempt: 0,
        payload: ChunkPayload::Follows,
    }
}

pub(crate) fn header(window: u64, length: u32) -> [u8; ChunkHeader::BYTES] {
    whole(window, length).encode()
}

/// Of the first 200,000 bytes of a longer chunk a lane reads so many for certain: in the middle of
/// one it is not woken for less than 128 KiB.
pub(crate) const CERTAIN: u64 = 200_000 - (128 << 10);

/// Sends the only chunk of a window's transfer, up to `bytes` of its payload.
pub(crate) fn write_chunk(mut lane: &TcpStream, window: u64, length: u32, bytes: usize) {
    lane.write_all(&header(window, length)).unwrap();
    write_payload(lane, window, 0..bytes);
}

pub(crate) fn write_payload(mut lane: &TcpStream, window: u64, range: std::ops::Range<usize>) {
    let payload: Vec<u8> = range.map(|at| pattern(window, at)).collect();
    lane.write_all(&payload).unwrap();
}

/// The byte at a place of a transfer.
pub(crate) fn pattern(sequence: u64, at: usize) -> u8 {
    let mixed = (sequence << 32 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

pub(crate) fn filled(sequence: u64, length: usize) -> RegionSlice {
    let region = Region::host(length).unwrap();
    let bytes: Vec<u8> = (0..length).map(|at| pattern(sequence, at)).collect();
    region.write_from(0, &bytes).unwrap();
    region.all()
}

/// Bytes around each destination that must stay as they are.
pub(crate) const GUARD: usize = 61;

pub(crate) fn guarded(length: usize) -> RegionSlice {
    let region = Region::host(length + 2 * GUARD).unwrap();
    region
        .write_from(0, &vec![0xEE; length + 2 * GUARD])
        .unwrap();
    region.slice(GUARD..GUARD + length).unwrap()
}

/// Checks that a destination from [`guarded`] holds a transfer and that nothing around it changed.
pub(crate) fn check(destination: &RegionSlice, sequence: u64) {
    let length = destination.len();
    destination
        .region()
        .with_bytes(.., |bytes| {
            assert!(
                bytes[..GUARD].iter().all(|byte| *byte == 0xEE),
                "written in front of it"
            );
            assert!(
                bytes[GUARD + length..].iter().all(|byte| *byte == 0xEE),
                "written behind it"
            );
            let payload = &bytes[GUARD..GUARD + length];
            let wrong = (0..length).find(|&at| payload[at] != pattern(sequence, at));
            assert_eq!(
                wrong, None,
                "transfer {sequence} of {length} bytes differs there"
            );
        })
        .unwrap();
}

/// Checks that nothing was written to a destination from [`guarded`].
pub(crate) fn untouched(destination: &RegionSlice) {
    let region = destination.region();
    region
        .with_bytes(.., |bytes| assert!(bytes.iter().all(|byte| *byte == 0xEE)))
        .unwrap();
}

/// The only chunk of a transfer to the window that is called as it is.
pub(crate) fn send_chunk(sequence: u64, source: RegionSlice) -> SendChunk {
    SendChunk {
        token: sequence,
        sequence,
        transfer: 1,
        offset: 0,
        index: 0,
        total: source.len() as u64,
        window: sequence,
        tag: 0,
        source,
        fence: None,
    }
}

/// A window for transfers that are cut in chunks of so many bytes.
pub(crate) fn window(name: u64, chunk_bytes: u32, destination: RegionSlice) -> ReceiveWindow {
    ReceiveWindow {
        token: 1000 + name,
        window: name,
        cut: ChunkPlan::even(destination.len() as u64, chunk_bytes),
        destination,
        fence: None,
    }
}

/// A window for a transfer of one chunk.
pub(crate) fn whole_window(name: u64, destination: RegionSlice) -> ReceiveWindow {
    let length = u32::try_from(destination.len()).unwrap();
    window(name, length, destination)
}

pub(crate) fn post_send(channel: &mut dyn Channel, sequence: u64, source: RegionSlice) {
    let posted = channel.post_send(send_chunk(sequence, source)).unwrap();
    assert!(matches!(posted, PostAnswer::Accepted));
}

pub(crate) fn open_window(channel: &mut dyn Channel, name: u64, destination: RegionSlice) {
    channel
        .open_window(whole_window(name, destination))
        .unwrap();
}

pub(crate) fn read_header(mut lane: &TcpStream) -> ChunkHeader {
    let mut bytes = [0; ChunkHeader::BYTES];
    lane.read_exact(&mut bytes).unwrap();
    ChunkHeader::decode(&bytes).unwrap()
}

/// Reads the payload of a chunk and checks it.
pub(crate) fn read_payload(mut lane: &TcpStream, header: &ChunkHeader) {
    let mut payload = vec![0; header.length as usize];
    lane.read_exact(&mut payload).unwrap();
    let window = header.transfer.0;
    let start = header.offset as usize;
    let wrong = (0..payload.len()).find(|&at| payload[at] != pattern(window, start + at));
    assert_eq!(wrong, None, "{header:?}");
}

/// Blocks until one of the channels has something to poll.
pub(crate) fn wait_any(channels: &[&dyn Channel]) {
    let mut watched: Vec<PollFd<'_>> = channels
        .iter()
        .map(|channel| match channel.readiness() {
            Readiness::Fd(descriptor) => PollFd::from_borrowed_fd(descriptor, PollFlags::IN),
            Readiness::PollOnly => panic!("the embedded network has a descriptor"),
        })
        .collect();
    let limit = Timespec {
        tv_sec: PATIENCE.as_secs() as i64,
        tv_nsec: 0,
    };
    let ready = poll(&mut watched, Some(&limit)).unwrap();
    assert!(
        ready > 0,
        "nothing happened for {PATIENCE:?}: {:?}",
        channels[0].describe()
    );
}

/// What a poll gives, but for what ends nothing and is said when it is noticed: that a lane is
/// missing, or a transfer begins.
pub(crate) fn polled(
    channel: &mut dyn Channel,
    out: &mut Vec<Completion>,
) -> Result<(), ChannelError> {
    let polled = channel.poll(out);
    out.retain(|one| {
        !matches!(
            one,
            Completion::LaneMissing { .. } | Completion::Begun { .. }
        )
    });
    polled
}

/// Polls until `count` completions have come.
pub(crate) fn completions(channel: &mut dyn Channel, count: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    loop {
        polled(channel, &mut out).unwrap();
        if out.len() >= count {
            assert_eq!(out.len(), count, "{out:?}");
            return out;
        }
        wait_any(&[channel]);
    }
}

/// Polls until `count` windows are closed, whose transfers are whole and of one chunk each, and
/// that in this order: their tokens.
pub(crate) fn received(channel: &mut dyn Channel, count: usize) -> Vec<u64> {
    let ended = completions(channel, 2 * count);
    ended.chunks(2).map(received_token).collect()
}

/// The token of a window that has taken a transfer of one chunk.
pub(crate) fn received_token(news: &[Completion]) -> u64 {
    match news {
        [
            Completion::Placed {
                token: placed,
                index: 0,
                offset: 0,
                ..
            },
            Completion::Closed { token, .. },
        ] if placed == token => *token,
        other => panic!("not the end of a window: {other:?}"),
    }
}

pub(crate) fn closed_token(completion: &Completion) -> u64 {
    match completion {
        Completion::Closed { token, .. } => *token,
        other => panic!("not the end of a window: {other:?}"),
    }
}

/// Polls until the channel says that it is broken.
pub(crate) fn breakage(channel: &mut dyn Channel) -> (ChannelError, Vec<Completion>) {
    let mut out = Vec::new();
    loop {
        if let Err(error) = polled(channel, &mut out) {
            return (error, out);
        }
        wait_any(&[channel]);
    }
}

/// Closes the channel and returns what it still reported.
pub(crate) fn close(channel: &mut dyn Channel) -> Vec<Completion> {
    let mut out = Vec::new();
    channel.close();
    loop {
        polled(channel, &mut out).unwrap();
        if channel.closed() {
            return out;
        }
        wait_any(&[channel]);
    }
}

pub(crate) fn failed(completion: &Completion) -> (u64, ChannelError) {
    match completion {
        Completion::Failed { token, error } => (*token, error.clone()),
        other => panic!("not a failure: {other:?}"),
    }
}

pub(crate) fn sent_token(completion: &Completion) -> u64 {
    match completion {
        Completion::Sent { token } => *token,
        other => panic!("not a send: {other:?}"),
    }
}

pub(crate) fn options(stage_host: bool) -> TcpOptions {
    TcpOptions {
        stage_host,
        ..TcpOptions::default()
    }
}

/// For what no descriptor announces.
pub(crate) fn wait_until(mut condition: impl FnMut() -> bool) {
    let deadline = deadline();
    while !condition() {
        assert!(Instant::now() < deadline, "it never came true");
        std::thread::yield_now();
    }
}
