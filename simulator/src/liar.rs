//! A peer that holds the key and lies. It speaks the protocol by hand: it answers what its peer
//! says and asks for things of its own, honestly but for the messages that its seed names.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tcpx::Auth;
use tcpx_net::dial::dial_lane;
use tcpx_net::{DialOptions, Way, dial};
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};
use tcpx_wire::crc::crc32c;
use tcpx_wire::frame::{
    Destination, Extent, Frame, Grant, HEADER_BYTES, LEAST_PLAIN_BYTES, Notified, PlacedChunks,
    TimeLeft, encode,
};
use tcpx_wire::handshake::{Established, Session};
use tcpx_wire::lane_seal::{self, Opener, Sealer};
use tcpx_wire::record::{LENGTH_BYTES, Records};
use tcpx_wire::{FrameDecoder, Level, Place, Role, Settings, Tag, TransferId, WindowKey};

use crate::random::Random;
use crate::system::{self, fail, note};
use crate::{memory, tally};

/// What becomes of a message, be it a frame or a chunk.
#[derive(Clone, Copy, Debug)]
pub enum Lie {
    Never,
    Twice,
    /// Behind some that come after it.
    Late,
    /// A byte of it, or a field, is another one.
    Altered,
    /// One that was said before comes again behind it, of either side.
    Old,
}

pub const LIES: &[Lie] = &[Lie::Never, Lie::Twice, Lie::Late, Lie::Altered, Lie::Old];

#[derive(Clone, Debug)]
pub struct Manners {
    pub seed: u64,
    /// By number of the message.
    pub lies: Vec<(u64, Lie)>,
    /// Acknowledges a chunk before it has read it.
    pub early: bool,
    /// Reads nothing of a lane for so long, at first and in front of each chunk's payload.
    pub pause: Duration,
    /// Opens more lanes than were agreed.
    pub lanes: u16,
    /// Says much more than its peer gives credit for.
    pub floods: bool,
    /// What it says that it takes.
    pub settings: Settings,
}

/// Length of its chunks and those that it grants.
const CHUNK: u32 = 4096;
const LONG: Duration = Duration::from_secs(20);
const BEAT: Duration = Duration::from_secs(4);
/// Bytes of a notification, which bear no mark.
const NOTIFICATION: usize = 8;
/// Bits that flip on the way, at most: payload that is not encrypted bears them.
const FLIPS: usize = 8;
/// Messages of its own accord.
const REQUESTS: u32 = 12;
/// Messages of a flood, each as long as its peer takes one, and bytes of them that wait to be
/// written.
const FLOOD: (u64, usize) = (1_500, 64 << 10);
/// No program receives anything of it.
const UNUSED: Tag = Tag(9);
/// Over one lane alone nobody lends pages.
const LANES: u16 = 2;

#[derive(Clone, Debug)]
enum Message {
    Frame(Frame),
    Chunk(ChunkHeader),
}

struct Lane {
    stream: TcpStream,
    seals: (Sealer, Opener),
    out: Vec<u8>,
    /// What has come of a header.
    head: Vec<u8>,
    /// The chunk that comes, and how much of it is missing.
    coming: Option<(ChunkHeader, usize)>,
    rests_until: Instant,
}

impl Lane {
    /// Bytes that are still to be written, and read of a chunk that comes.
    fn left(&self) -> usize {
        self.out.len() + self.coming.map_or(0, |(_, missing)| missing)
    }
}

pub struct Liar {
    manners: Manners,
    /// What all payload on this connection bears, see `programs::label`.
    label: u8,
    random: Random,
    control: TcpStream,
    records: Records,
    decoder: FrameDecoder,
    came: Vec<u8>,
    out: Vec<u8>,
    sequence: u32,
    lanes: Vec<Lane>,
    /// Most bytes that its peer takes in a frame.
    eager_most: u64,
    /// Messages that were said.
    said: u64,
    late: Vec<Message>,
    old: Vec<Message>,
    transfers: u64,
    /// Of its own transfers that wait: their bytes.
    offered: BTreeMap<TransferId, u64>,
    /// By window: whose it is.
    granted: Vec<TransferId>,
    /// By tag: the number of the next send.
    next: BTreeMap<Tag, u64>,
    requests: u32,
    gets: u64,
    flooded: u64,
    /// Bytes that came without its mark.
    foreign: usize,
}

fn pause() {
    std::thread::sleep(Duration::from_micros(300));
}

/// The pause between two looks: longer where nothing has moved for a while, as the deadlines of its
/// peer take minutes.
fn pause_after(quiet: Duration) {
    match quiet < Duration::from_secs(1) {
        true => pause(),
        false => std::thread::sleep(Duration::from_millis(20)),
    }
}

/// Takes what there is; false: no more comes.
fn take(stream: &mut TcpStream, into: &mut Vec<u8>, most: usize) -> bool {
    let mut bytes = vec![0; most];
    match stream.read(&mut bytes) {
        Ok(0) => false,
        Ok(count) => {
            into.extend_from_slice(&bytes[..count]);
            true
        }
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

/// Writes what it takes; false: it takes no more.
fn give(stream: &mut TcpStream, out: &mut Vec<u8>) -> bool {
    if out.is_empty() {
        return true;
    }
    match stream.write(out) {
        Ok(count) => {
            out.drain(..count);
            true
        }
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

impl Liar {
    /// Connects, and does what the set-up asks for.
    pub fn connect(address: SocketAddr, auth: &Auth, label: u8, manners: Manners) -> Option<Self> {
        memory::aside().for_good();
        system::lie();
        let until = DialOptions::until(Instant::now() + LONG);
        let dialled = dial(address, auth, &until).ok()?;
        let mut liar = Self {
            label,
            random: Random::new(manners.seed),
            control: dialled.stream,
            records: dialled.records,
            decoder: FrameDecoder::new(),
            came: Vec::new(),
            out: Vec::new(),
            sequence: 0,
            lanes: Vec::new(),
            eager_most: 0,
            said: 0,
            late: Vec::new(),
            old: Vec::new(),
            transfers: 0,
            offered: BTreeMap::new(),
            granted: Vec::new(),
            next: BTreeMap::new(),
            requests: 0,
            gets: 0,
            flooded: 0,
            foreign: 0,
            manners,
        };
        // Before that the server may not know the session.
        let welcome = loop {
            if let Some(welcome) = liar.opened() {
                break welcome;
            }
            take(&mut liar.control, &mut liar.came, 1 << 10).then(pause)?;
        };
        Established::read_welcome(&welcome).ok()?;
        liar.put(&Message::Frame(Frame::from(liar.manners.settings.clone())));
        // Two lanes, asked for.
        let payload = b"TCPL\x03\x00\x02\x00\x01\x00\x00\x00".to_vec();
        liar.put(&Message::Frame(Frame::Setup { payload }));
        liar.flush()?;
        for lane in 0..LANES {
            let lane = liar.lane(address, &dialled.session, lane)?;
            liar.lanes.push(lane);
        }
        liar.put(&Message::Frame(Frame::Ready));
        liar.flush()?;
        for more in 0..liar.manners.lanes {
            tally::saw("lanes beyond the agreed");
            // Refused or not: nobody says anything on it.
            drop(liar.lane(address, &dialled.session, LANES + more));
        }
        Some(liar)
    }

    fn flush(&mut self) -> Option<()> {
        while !self.out.is_empty() {
            give(&mut self.control, &mut self.out).then(pause)?;
        }
        Some(())
    }

    fn lane(&self, address: SocketAddr, session: &Session, lane: u16) -> Option<Lane> {
        let until = DialOptions::until(Instant::now() + LONG);
        let joined =
            dial_lane(Way::to(address), session, lane, LANES.max(lane + 1), &until).ok()?;
        Some(Lane {
            stream: joined.stream,
            seals: joined.keys.start(),
            out: Vec::new(),
            head: Vec::new(),
            coming: None,
            rests_until: Instant::now() + self.manners.pause,
        })
    }

    /// Until its peer is gone, or it has said what nobody can go on from. It asks for the key of
    /// the peer's window, and tells when its flood, if it has one, is over.
    pub fn run(
        mut self,
        key: impl Fn() -> Option<WindowKey>,
        is_over: impl Fn() -> bool,
        has_flooded: impl Fn(),
    ) {
        memory::aside().for_good();
        system::lie();
        let mut beat = Instant::now();
        let mut beats = 0;
        let (mut moved, mut last) = (Instant::now(), None);
        while !is_over() {
            if Instant::now() >= beat {
                beat += BEAT;
                self.put(&Message::Frame(Frame::Heartbeat { counter: beats }));
                beats += 1;
            }
            if self.requests < REQUESTS && self.random.one_in(20) {
                self.requests += 1;
                self.request(key().as_ref());
            }
            if self.flood() {
                has_flooded();
            }
            let goes_on = take(&mut self.control, &mut self.came, 64 << 10) && self.hear();
            if !goes_on || !give(&mut self.control, &mut self.out) {
                return;
            }
            for _ in 0..self.lanes.len() {
                let mut lane = self.lanes.remove(0);
                if self.use_lane(&mut lane) {
                    self.lanes.push(lane);
                }
            }
            let left = self.lanes.iter().map(Lane::left).sum::<usize>();
            let now = Some((self.said, self.old.len(), left));
            if now != std::mem::replace(&mut last, now) {
                moved = Instant::now();
            }
            pause_after(moved.elapsed());
        }
    }

    /// What the next record seals.
    fn opened(&mut self) -> Option<Vec<u8>> {
        let length = Records::length(&self.came).ok()??;
        if self.came.len() < LENGTH_BYTES + length {
            return None;
        }
        let mut opened = vec![0; length];
        let sealed = &self.came[LENGTH_BYTES..LENGTH_BYTES + length];
        let count = self.records.open(sealed, &mut opened).ok()?;
        opened.truncate(count);
        self.came.drain(..LENGTH_BYTES + length);
        Some(opened)
    }

    fn hear(&mut self) -> bool {
        while let Some(opened) = self.opened() {
            let mut rest = opened.as_slice();
            loop {
                match self.decoder.next(&mut rest) {
                    Ok(Some(frame)) => self.heard(frame),
                    Ok(None) => break,
                    Err(_) => return false,
                }
            }
        }
        true
    }

    fn transfer(&mut self) -> TransferId {
        self.transfers += 1;
        TransferId(self.transfers - 1)
    }

    /// Something that nobody has asked for.
    fn request(&mut self, key: Option<&WindowKey>) {
        let tag = Tag(self.random.below(3));
        let place = key.map(|key| Place {
            window: key.window,
            secret: key.secret,
            offset: self.random.below(key.bytes),
        });
        let to = match place.filter(|_| self.random.one_in(2)) {
            Some(place) => Destination::Put {
                to: Extent::Place(place),
                notified: Notified::No,
                left: TimeLeft::ANY,
            },
            None => {
                let number = self.next.entry(tag).or_default();
                *number += 1;
                Destination::Receive {
                    tag,
                    number: *number - 1,
                }
            }
        };
        let bytes = self.random.pick(&[1, 100, 1000, 5_000, 20_000]);
        match place.filter(|_| self.random.one_in(4)) {
            Some(place) => {
                self.gets += 1;
                self.say(Message::Frame(Frame::Get {
                    request: self.gets - 1,
                    from: Extent::Place(place),
                    bytes,
                    level: Level::Placed,
                    left: TimeLeft::ANY,
                }));
            }
            None => self.offer(to, bytes, Level::Placed),
        }
    }

    fn offer(&mut self, to: Destination, bytes: u64, level: Level) {
        let transfer = self.transfer();
        let frame = if bytes <= self.eager_most.min(1000) {
            Frame::Eager {
                transfer,
                level,
                to,
                payload: vec![self.label; bytes as usize].into(),
            }
        } else {
            self.offered.insert(transfer, bytes);
            Frame::Waiting {
                transfer,
                level,
                bytes,
                to,
            }
        };
        self.say(Message::Frame(frame));
    }

    /// Messages that no receive waits for, and nobody has given credit for; whether there are no
    /// more.
    fn flood(&mut self) -> bool {
        while self.manners.floods
            && self.eager_most > 0
            && self.flooded < FLOOD.0
            && self.out.len() < FLOOD.1
        {
            tally::saw("flood of messages");
            let transfer = self.transfer();
            let frame = Frame::Eager {
                transfer,
                level: Level::Placed,
                to: Destination::Receive {
                    tag: UNUSED,
                    number: self.flooded,
                },
                payload: vec![self.label; self.eager_most as usize].into(),
            };
            self.flooded += 1;
            self.put(&Message::Frame(frame));
        }
        !self.manners.floods || self.flooded == FLOOD.0
    }

    /// All chunks of a transfer.
    fn write(&mut self, grant: &Grant, total: u64) {
        let step = u64::from(grant.chunk_bytes);
        for (sequence, offset) in (0..total).step_by(step as usize).enumerate() {
            self.say(Message::Chunk(ChunkHeader {
                sequence: sequence as u64,
                transfer: TransferId(grant.window),
                offset,
                total,
                length: step.min(total - offset) as u32,
                attempt: 0,
                payload: ChunkPayload::Follows,
            }));
        }
    }

    fn heard(&mut self, frame: Frame) {
        note(|| format!("the liar hears {}", frame.name()));
        self.old.push(Message::Frame(frame.clone()));
        let answer = match frame {
            Frame::Settings(settings) => {
                self.eager_most = settings.eager_limit.into();
                return;
            }
            Frame::Posted {
                tag,
                number,
                capacity,
                grant,
            } => {
                self.next.insert(tag, number + 1);
                let total = self.random.pick(&[capacity, capacity / 2 + 1]);
                return self.write(&grant, total);
            }
            Frame::Grant { transfer, grant } => {
                let Some(total) = self.offered.remove(&transfer) else {
                    return;
                };
                return self.write(&grant, total);
            }
            Frame::Get {
                request,
                bytes,
                level,
                ..
            } => return self.offer(Destination::Reply { request }, bytes, level),
            Frame::Waiting {
                transfer, level, ..
            } => {
                let window = self.granted.len() as u64;
                self.granted.push(transfer);
                let grant = Grant {
                    chunk_bytes: CHUNK,
                    window,
                    level,
                    taper: None,
                };
                Frame::Grant { transfer, grant }
            }
            Frame::Eager {
                transfer, payload, ..
            } => {
                if payload.len() > NOTIFICATION {
                    self.look_at(&payload);
                }
                let bytes = payload.len().max(256) as u32;
                self.say(Message::Frame(Frame::EagerCredit { bytes }));
                Frame::EagerDone { transfer }
            }
            Frame::Digest { transfer, tag } => Frame::Verdict {
                transfer,
                tag,
                matches: true,
            },
            Frame::Cancel { transfer, from, .. } => Frame::Cancelled {
                transfer,
                from: match from {
                    Role::Sender => Role::Receiver,
                    Role::Receiver => Role::Sender,
                },
            },
            Frame::Forget { tag, .. } => Frame::Forgotten {
                tag,
                forgotten: true,
            },
            Frame::Goodbye { .. } => Frame::GoodbyeAck,
            _ => return,
        };
        self.say(Message::Frame(answer));
    }

    fn say(&mut self, message: Message) {
        let number = self.said;
        self.said += 1;
        let lie = self.manners.lies.iter().find(|(at, _)| *at == number);
        let lie = lie.map(|(_, lie)| *lie);
        if let Some(lie) = lie {
            tally::saw(&format!("lie: {lie:?}").to_lowercase());
            note(|| {
                format!("the liar, {lie:?}: {message:?}")
                    .chars()
                    .take(300)
                    .collect()
            });
        }
        match lie {
            Some(Lie::Never) => {}
            Some(Lie::Late) => self.late.push(message.clone()),
            Some(Lie::Altered) => {
                let altered = self.altered(&message);
                self.put(&altered);
            }
            None => self.put(&message),
            Some(Lie::Twice) => {
                self.put(&message);
                self.put(&message);
            }
            Some(Lie::Old) => {
                self.put(&message);
                if !self.old.is_empty() {
                    let old = self.random.pick(&self.old);
                    self.put(&old);
                }
            }
        }
        self.old.push(message);
        if !matches!(lie, Some(Lie::Late)) && self.random.one_in(3) {
            for late in std::mem::take(&mut self.late) {
                self.put(&late);
            }
        }
    }

    /// The same with another value somewhere.
    fn altered(&mut self, message: &Message) -> Message {
        match message {
            Message::Frame(frame) => {
                let mut bytes = Vec::new();
                if encode(frame, 0, &mut bytes).is_err() || bytes.len() <= HEADER_BYTES {
                    return message.clone();
                }
                // What is no frame any more is not said: parsers are tried elsewhere.
                for _ in 0..8 {
                    let mut tried = bytes.clone();
                    let fields = (bytes.len() - HEADER_BYTES).min(64);
                    tried[HEADER_BYTES + self.random.index(fields)] ^= 1 << self.random.below(8);
                    tried[HEADER_BYTES - 4..HEADER_BYTES].fill(0);
                    let sum = crc32c(&tried).to_le_bytes();
                    tried[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&sum);
                    if let Ok(Some(frame)) = FrameDecoder::new().next(&mut tried.as_slice()) {
                        return Message::Frame(frame);
                    }
                }
                message.clone()
            }
            Message::Chunk(header) => {
                let mut header = *header;
                let bit = 1 << self.random.below(14);
                match self.random.below(6) {
                    0 => header.sequence ^= bit,
                    1 => header.transfer.0 ^= bit & 7,
                    2 => header.offset ^= bit,
                    3 => header.total ^= bit,
                    4 => header.length ^= bit as u32,
                    _ => header.attempt ^= bit as u8,
                }
                Message::Chunk(header)
            }
        }
    }

    fn put(&mut self, message: &Message) {
        match message {
            Message::Frame(frame) => {
                let mut bytes = Vec::new();
                if encode(frame, self.sequence, &mut bytes).is_err() {
                    return;
                }
                self.sequence = self.sequence.wrapping_add(1);
                // It never encrypts.
                let plain = match frame {
                    Frame::Eager { payload, .. } if payload.len() >= LEAST_PLAIN_BYTES => {
                        payload.len()
                    }
                    _ => 0,
                };
                let (mut rest, plain) = bytes.split_at(bytes.len() - plain);
                while !rest.is_empty() {
                    let count = self.records.seal(rest, &mut self.out);
                    rest = &rest[count..];
                }
                self.out.extend_from_slice(plain);
            }
            Message::Chunk(header) => {
                let lanes = self.lanes.len();
                if let Some(lane) = self.lanes.get_mut(self.random.index(lanes)) {
                    lane.out
                        .extend_from_slice(&lane.seals.0.seal_header(&header.encode()));
                    let end = lane.out.len() + (header.length as usize).min(1 << 17);
                    lane.out.resize(end, self.label);
                }
            }
        }
    }

    /// Of what it is sent every byte bears the mark of its connection.
    fn look_at(&mut self, came: &[u8]) {
        let is_foreign = |byte: &&u8| **byte & 3 != self.label & 3;
        self.foreign += came.iter().filter(is_foreign).count();
        if self.foreign > FLIPS {
            fail("a lying peer got bytes of another connection");
        }
    }

    /// Writes and reads what it can; whether there will be more.
    fn use_lane(&mut self, lane: &mut Lane) -> bool {
        let mut lives = give(&mut lane.stream, &mut lane.out);
        while lives && Instant::now() >= lane.rests_until {
            let missing = match lane.coming {
                Some((_, missing)) => missing.min(64 << 10),
                None => lane_seal::HEADER_BYTES - lane.head.len(),
            };
            let mut came = Vec::new();
            lives = take(&mut lane.stream, &mut came, missing);
            if came.is_empty() {
                break;
            }
            if let Some((header, missing)) = &mut lane.coming {
                if header.total > NOTIFICATION as u64 {
                    self.look_at(&came);
                }
                *missing -= came.len();
                if *missing == 0 {
                    let header = *header;
                    lane.coming = None;
                    if !self.manners.early {
                        self.placed(&header);
                    }
                }
                continue;
            }
            lane.head.extend_from_slice(&came);
            let Ok(mut sealed) = <[u8; lane_seal::HEADER_BYTES]>::try_from(&lane.head[..]) else {
                continue;
            };
            lane.head.clear();
            let header = lane.seals.1.open_header(&mut sealed).ok();
            let header = header.and_then(|bytes| ChunkHeader::decode(&bytes).ok());
            let Some(header) = header else {
                return false;
            };
            lane.coming = Some((header, header.length as usize));
            if self.manners.early {
                tally::saw("early acknowledgement");
                lane.rests_until = Instant::now() + self.manners.pause;
                self.placed(&header);
            }
        }
        lives
    }

    fn placed(&mut self, header: &ChunkHeader) {
        if let Some(transfer) = self.granted.get(header.transfer.0 as usize) {
            let (transfer, index) = (*transfer, header.sequence as u32);
            self.say(Message::Frame(Frame::Placed {
                transfer,
                chunks: PlacedChunks::single(index),
            }));
        }
    }
}
