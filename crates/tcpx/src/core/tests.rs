//! One side's core, with the test as its peer.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tcpx_memory::{Access, CopyWorker, Region, TagKey};
use tcpx_net::ControlStream;
use tcpx_wire::frame::{
    CancelReason, Destination, Extent, Frame, Grant, Limits, Notified, PlacedChunks, RefuseReason,
    Settings, TimeLeft, TransferId, encode,
};
use tcpx_wire::record::Records;
use tcpx_wire::session::{
    Config, ConnectionFailure, GetRequest, OperationKind, ReceiveRequest, SendRequest,
};
use tcpx_wire::{FrameDecoder, Level, Place, Role, Tag, Time, WindowKey, WindowSecret};

use super::channels::tests::{Log, Quiet};
use super::*;
use crate::connection::{Handle, Patience, PeerInfo, Shared};
use crate::control::tests::{frames, opened, records};
use crate::driver::Driver;
use crate::options::Bounds;
use crate::transfer::{Transfer, TransferState};

/// Longest wait for bytes within the host.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Scene {
    pub(crate) core: Core,
    pub(super) peer: TcpStream,
    records: Records,
    /// Frames that the peer has said.
    said: u32,
    pub(crate) channel: Arc<Log>,
    driver: Arc<Driver>,
    /// What began last.
    last: Option<OperationId>,
}

fn settings() -> Settings {
    Settings {
        network: "tcp".into(),
        channels: 1,
        chunk_bytes: 4096,
        send_window: 4,
        receive_window: 4,
        eager_limit: 1024,
        eager_credit: 1 << 20,
        heartbeat_ms: 1000,
        dead_after_ms: 10_000,
        limits: Limits::default(),
        memory: "host".into(),
        software: "test".into(),
    }
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::with(settings())
    }

    fn with(settings: Settings) -> Self {
        Self::resumable(false, settings, Bounds::default())
    }

    /// Whose peer says what it has read, if its control connection may be resumed.
    fn resumable(resumable: bool, settings: Settings, bounds: Bounds) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, address) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let (records, theirs) = records(1);
        let control = ControlStream { stream, records };
        let control = Control::new(control, resumable, false, false, &bounds);
        let (config, deadline) = (Config::new(settings.clone()), Instant::now() + LIMIT);
        let mut tells = || ();
        let peer_name = address;
        let mut set_up =
            SetUp::new(control, config, bounds, peer_name, deadline, &mut tells).unwrap();
        set_up.session.ready();
        for frame in [Frame::from(settings), Frame::Ready] {
            set_up.session.frame(Time(0), frame).unwrap();
        }
        let driver = Driver::new("test").unwrap();
        let channel = Arc::<Log>::default();
        let worker = CopyWorker::host().unwrap();
        let (tag_key, driven) = (TagKey::new([0; 32]), (&driver, driver.reserve()));
        let mut core = Core::new(
            set_up,
            None,
            Channels::new(vec![Quiet::new(&channel)], false, bounds.alone),
            Jobs::new(worker, None, tag_key, driven, bounds),
            GpuWork::new(None, None),
            Program::default(),
        );
        core.progress();
        Self {
            core,
            peer,
            records: theirs,
            said: 0,
            channel,
            driver,
            last: None,
        }
    }

    /// An operation of the program, whose end is to be seen in what this returns.
    pub(crate) fn begin(&mut self, role: Role, tag: u64, bytes: usize) -> Arc<TransferState> {
        let (now, level) = (self.core.clock.now(), Level::Placed);
        let started = match role {
            Role::Sender => self.core.session.send(
                now,
                SendRequest {
                    to: Destination::next_receive(Tag(tag)),
                    bytes: bytes as u64,
                    level,
                    deadlines: None,
                    eager: (bytes <= 1024).then(|| vec![0; bytes].into()),
                    chunk_bytes: None,
                },
            ),
            Role::Receiver => self.core.session.receive(
                now,
                ReceiveRequest {
                    tag: Tag(tag),
                    capacity: bytes as u64,
                    level,
                    deadlines: None,
                    fenced: false,
                },
            ),
        };
        let state = TransferState::new(bytes as u64);
        let region = Region::host(bytes).unwrap();
        let kind = match role {
            Role::Sender => OperationKind::Send,
            Role::Receiver => OperationKind::Receive,
        };
        let lease = region.lease(.., Access::Write).unwrap();
        let mut operation =
            Operation::new(kind, lease, Arc::clone(&state), self.core.clock.ticked());
        operation.tag = tag;
        let started = started.unwrap();
        self.last = Some(started);
        self.core.operations.insert(started, operation);
        self.core.start();
        state
    }

    /// The peer says all of this at once.
    fn say(&mut self, frames: impl IntoIterator<Item = Frame>) {
        let mut bytes = Vec::new();
        for frame in frames {
            encode(&frame, self.said, &mut bytes).unwrap();
            self.said += 1;
        }
        self.write(&bytes);
    }

    /// The peer seals these bytes and writes them.
    fn write(&mut self, mut bytes: &[u8]) {
        let mut sealed = Vec::new();
        while !bytes.is_empty() {
            let count = self.records.seal(bytes, &mut sealed);
            bytes = &bytes[count..];
        }
        self.peer.write_all(&sealed).unwrap();
    }

    /// The connection as the program has it, with no engine's thread that looks after it, and the
    /// peer.
    pub(crate) fn into_shared(self) -> (Arc<Shared>, TcpStream) {
        let settings = settings();
        let peer = PeerInfo {
            address: self.core.peer,
            network: settings.network,
            channels: settings.channels,
            chunk_bytes: settings.chunk_bytes,
            memory: settings.memory,
            software: settings.software,
        };
        let patience = Patience::new(false, LIMIT);
        let (driver, id) = (self.driver, 1);
        let shared = Shared::new(self.core, driver, id, peer, patience);
        (shared, self.peer)
    }

    /// A send that runs, and the peer.
    pub(crate) fn with_a_send() -> (Transfer, TcpStream) {
        let mut scene = Self::new();
        let sent = scene.begin(Role::Sender, 1, 8);
        let started = scene.last.unwrap();
        let (shared, peer) = scene.into_shared();
        let handle = Arc::new(Handle(shared));
        (Transfer::new(sent, started.into(), handle), peer)
    }

    /// A turn of a thread of the program that waits, once something has come.
    fn drive(&mut self) -> Turn {
        let start = Instant::now();
        while !self.core.has_news() {
            assert!(start.elapsed() < LIMIT, "nothing comes");
        }
        self.core.clock.tick();
        self.core.pace.attend(true);
        self.core.pace.drive(true);
        let turn = self.core.progress();
        self.core.pace.drive(false);
        turn
    }
}

fn message(transfer: u64, tag: u64) -> Frame {
    numbered(transfer, tag, 0)
}

/// The message of this number of its tag.
fn numbered(transfer: u64, tag: u64, number: u64) -> Frame {
    Frame::Eager {
        transfer: TransferId(transfer),
        level: Level::Placed,
        to: Destination::Receive {
            tag: Tag(tag),
            number,
        },
        payload: vec![7; 8].into(),
    }
}

#[test]
fn a_part_of_a_frame_shows_that_the_peer_lives() {
    let mut scene = Scene::new();
    let mut bytes = Vec::new();
    encode(&message(0, 1), scene.said, &mut bytes).unwrap();
    let (first, rest) = bytes.split_at(20);
    for part in [first, rest] {
        let before = scene.core.session.heard();
        while scene.core.clock.now() == before {
            scene.core.clock.tick();
        }
        scene.write(part);
        scene.drive();
        assert!(scene.core.session.heard() > before);
    }
}

#[test]
fn what_a_look_has_read_is_taken_by_the_next_turn() {
    let mut scene = Scene::new();
    let received = scene.begin(Role::Receiver, 1, 8);
    scene.say([message(0, 1)]);
    let start = Instant::now();
    while !scene.core.has_news() {
        assert!(start.elapsed() < LIMIT, "nothing comes");
    }
    scene.drive();
    assert!(received.has_ended() && !scene.core.has_news());
}

/// A channel that was never told takes the peer for one at work.
#[test]
fn channels_hear_of_the_peer_once_a_millisecond() {
    let mut scene = Scene::new();
    let told = [(1, 1), (900, 1), (1000, 1), (1001, 2), (2000, 2), (2001, 3)];
    for (counter, (micros, times)) in (0..).zip(told) {
        let before = scene.core.session.heard();
        let beat = Frame::Heartbeat { counter };
        scene.core.session.frame(Time(micros), beat).unwrap();
        scene.core.tell_that_peer_was_heard(before);
        assert_eq!(
            scene.channel.heard.load(Ordering::SeqCst),
            times,
            "{micros}"
        );
    }
}

#[test]
fn a_get_with_a_long_answer_moves_until_it_ends() {
    let mut scene = Scene::new();
    for (request, bytes) in (0..).zip([8, 1 << 20]) {
        let place = Place {
            window: 1,
            offset: 0,
            secret: WindowSecret::generate(&mut |_| {}),
        };
        let asked = GetRequest {
            from: Extent::Place(place),
            bytes,
            level: Level::Placed,
            deadlines: None,
        };
        let (now, ticked) = (scene.core.clock.now(), scene.core.clock.ticked());
        let id = scene.core.session.get(now, asked).unwrap();
        let region = Region::host(bytes as usize).unwrap();
        let lease = region.lease(.., Access::Write).unwrap();
        let state = TransferState::new(bytes);
        let get = Operation::new(OperationKind::Get, lease, Arc::clone(&state), ticked);
        scene.core.operations.insert(id, get);
        scene.core.get_started(id);
        scene.core.start();
        assert_eq!(scene.core.standing().moving, bytes > 8);
        let reason = RefuseReason::UnknownWindow;
        scene.say([Frame::RefuseGet { request, reason }]);
        scene.drive();
        assert!(state.has_ended() && !scene.core.standing().moving);
    }
}

/// As a copy that the program's work on a GPU holds up, or a lane that another connection's bytes
/// keep busy.
#[test]
fn a_cancelled_send_that_something_reads_costs_nobody_else() {
    let mut scene = Scene::new();
    scene.channel.holds.store(true, Ordering::SeqCst);
    let sent = scene.begin(Role::Sender, 1, 8000);
    let grant = Grant {
        window: 0,
        chunk_bytes: 4096,
        taper: None,
        level: Level::Placed,
    };
    let transfer = TransferId(0);
    scene.say([Frame::Grant { transfer, grant }]);
    scene.drive();
    assert_eq!(scene.channel.offered.load(Ordering::SeqCst), 2);
    let start = Instant::now();
    let now = scene.core.clock.now();
    scene.core.session.cancel(now, scene.last.unwrap());
    while !sent.has_ended() {
        assert!(start.elapsed() < LIMIT, "it does not end");
        scene.core.clock.tick();
        scene.core.progress();
    }
    let ended = sent.outcome();
    assert!(
        matches!(ended, Some(Err(Error::MemoryHeld { .. }))),
        "{ended:?}"
    );
    let received = scene.begin(Role::Receiver, 1, 8);
    scene.say([message(0, 1)]);
    scene.drive();
    assert!(received.has_ended() && scene.core.refusal().is_none());
    assert_eq!(scene.core.operations.len(), 1, "its memory is in use");
    scene.channel.lets_go.store(true, Ordering::SeqCst);
    scene.core.progress();
    assert_eq!(scene.core.operations.len(), 0);
}

#[test]
fn last_words_are_said_to_a_peer_that_has_said_nothing() {
    let bounds = Bounds {
        queued: 1,
        ..Bounds::default()
    };
    let mut scene = Scene::resumable(true, settings(), bounds);
    let _sent = scene.begin(Role::Sender, 1, 8);
    assert!(!scene.core.control.has_room());
    let cause = "it is over".to_owned();
    let now = scene.core.clock.now();
    scene
        .core
        .session
        .fail(now, ConnectionFailure::SetUp { cause });
    scene.core.progress();
    drop(scene.core);
    let mut bytes = Vec::new();
    scene.peer.set_read_timeout(Some(LIMIT)).unwrap();
    scene.peer.read_to_end(&mut bytes).unwrap();
    let plain = opened(&mut scene.records, &bytes).concat();
    let heard = frames(&plain, &mut FrameDecoder::new());
    let is_goodbye = matches!(heard.last(), Some(Frame::Goodbye { .. }));
    assert!(is_goodbye, "{heard:?}");
}

/// The channel fails with the acknowledgement of every chunk of a window, on a thread with little
/// stack.
#[test]
fn a_channel_that_fails_often_ends_the_connection_once() {
    const CHUNKS: u32 = 16_384;
    let ended = || {
        let window = CHUNKS.try_into().unwrap();
        let mut scene = Scene::with(Settings {
            send_window: window,
            receive_window: window,
            ..settings()
        });
        scene.channel.holds.store(true, Ordering::SeqCst);
        let sent = scene.begin(Role::Sender, 1, CHUNKS as usize * 4096);
        let grant = Grant {
            window: 0,
            chunk_bytes: 4096,
            taper: None,
            level: Level::Placed,
        };
        let transfer = TransferId(0);
        scene.say([Frame::Grant { transfer, grant }]);
        let start = Instant::now();
        while scene.channel.offered.load(Ordering::SeqCst) < CHUNKS as usize {
            assert!(start.elapsed() < LIMIT, "not all are posted");
            scene.core.clock.tick();
            scene.core.progress();
        }
        scene.channel.is_broken.store(true, Ordering::SeqCst);
        scene.channel.lets_go.store(true, Ordering::SeqCst);
        let placed = |first| Frame::Placed {
            transfer,
            chunks: PlacedChunks {
                first,
                bits: u64::MAX,
            },
        };
        scene.say((0..CHUNKS).step_by(64).map(placed));
        while !sent.has_ended() || scene.core.refusal().is_none() {
            assert!(start.elapsed() < LIMIT, "it does not end");
            scene.core.clock.tick();
            scene.core.progress();
        }
        (sent.outcome(), scene.core.refusal())
    };
    let thread = std::thread::Builder::new().stack_size(512 << 10);
    let (sent, refusal) = thread.spawn(ended).unwrap().join().unwrap();
    assert!(sent.is_some(), "{sent:?}");
    assert!(
        matches!(refusal, Some(Error::ChannelLost { .. })),
        "{refusal:?}"
    );
}

/// The peer begins this, for which there is no room yet, and ends it, again and again; what is kept
/// of it each time is bounded.
fn begun_and_ended(
    mut scene: Scene,
    began: impl Fn(TransferId) -> Frame,
    kept: fn(&Core) -> usize,
) {
    const TIMES: u64 = 20_000;
    let Limits { puts, gets, .. } = Limits::default();
    let start = Instant::now();
    for first in (0..TIMES).step_by(100) {
        let frames = (first..first + 100).map(TransferId).flat_map(|transfer| {
            let cancel = Frame::Cancel {
                transfer,
                from: Role::Sender,
                reason: CancelReason::Requested,
                detail: "".into(),
            };
            // Some stay.
            let ended = (transfer.0 > 2000).then_some(cancel);
            [began(transfer)].into_iter().chain(ended)
        });
        scene.say(frames.collect::<Vec<_>>());
        let mut left = 2;
        while left > 0 {
            assert!(start.elapsed() < LIMIT, "it does not end");
            scene.core.clock.tick();
            left -= i32::from(!scene.core.progress().busy);
        }
        let kept = kept(&scene.core);
        assert!(kept <= 2 * (puts + gets) as usize + 100, "{kept} are kept");
    }
    assert!(scene.core.refusal().is_none() && kept(&scene.core) > 0);
}

#[test]
fn puts_that_end_before_their_memory_is_free_are_forgotten() {
    let mut scene = Scene::new();
    let memory = Region::host(8).unwrap();
    let secret = WindowSecret::generate(&mut |_| {});
    let rights = tcpx_wire::Rights::Put;
    let key = |session: &mut Session| WindowKey {
        window: session.expose(secret, 8, rights),
        bytes: 8,
        rights,
        takes_lists: false,
        is_on_gpu: false,
        secret,
    };
    let (key, _) = scene.core.expose(key, memory.all());
    // What the peer has ended before still has the memory.
    scene.begin(Role::Receiver, 1, 8);
    let ended = scene.core.operations.get_mut(&scene.last.unwrap()).unwrap();
    ended.kind = OperationKind::PeerPut;
    ended.lease = memory.lease(.., Access::Write).unwrap();
    ended.stopped = true;
    let put = |transfer| Frame::Waiting {
        transfer,
        level: Level::Placed,
        bytes: 8,
        to: Destination::Put {
            to: Extent::Place(key.at(0)),
            notified: Notified::No,
            left: TimeLeft::ANY,
        },
    };
    begun_and_ended(scene, put, |core| core.one_sided.behind_lingering.len());
}
