//! A relay in front of a listener that can do to one stream what networks do, and flip bits of all.
//!
//! The first bytes of a stream say what it is ([`Line`]); faults are set for a line and happen at a
//! byte of its first stream: exactly there while one direction is quiet, else within one piece of
//! it.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::net::SendFlags;
use tcpx_lanes::{lock, socket};

use crate::faults::random;

/// How long a pump waits before it looks at its orders again.
const LOOK: Duration = Duration::from_millis(20);
/// Bytes moved at a time.
const PIECE: usize = 16 << 10;
/// Pieces of a stream among which its hello is: behind it anything may look like one.
const EARLY: u32 = 4;

/// What happens to a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Both directions are reset.
    Reset,
    /// Both directions end in order.
    Close,
    /// Nothing is taken any more, in either direction, until [`Proxy::wake`].
    Stall,
    /// Everything is taken and nothing comes out, ends neither; what was taken is held until
    /// [`Proxy::wake`].
    Swallow,
}

/// What a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Line {
    /// The first control connection; or any lane of the NCCL plugin, in the order of their coming.
    Control,
    /// One that takes its place.
    ControlAgain,
    /// A lane.
    Lane(u16),
}

/// Bits that relays have flipped.
#[derive(Debug, Default)]
pub struct Flips {
    /// In control connections, and in lanes.
    by_kind: [AtomicU64; 2],
}

impl Flips {
    /// In control connections; of the NCCL plugin, in all.
    pub fn control(&self) -> u64 {
        self.by_kind[0].load(Ordering::Relaxed)
    }

    /// In lanes.
    pub fn lanes(&self) -> u64 {
        self.by_kind[1].load(Ordering::Relaxed)
    }

    /// In both.
    pub fn sum(&self) -> u64 {
        self.control() + self.lanes()
    }
}

/// A line's orders and what has happened to it.
#[derive(Debug, Default)]
struct State {
    /// The fault, and the bytes towards the server after which it happens.
    fault: Option<(u64, Fault)>,
    up: u64,
    down: u64,
    opened: u32,
    /// The number of its first stream; under NCCL of its first one of payload.
    first: Option<u32>,
    /// That of its last one of payload under NCCL; 0: none came.
    payload: u32,
    woken: bool,
    /// No stream takes the first one's place.
    last: bool,
    /// Streams up to this one are reset.
    reset: u32,
}

#[derive(Debug, Default)]
struct Board {
    lines: Mutex<HashMap<Line, State>>,
    /// Nothing goes through any more.
    cut: AtomicBool,
    flips: Arc<Flips>,
    /// Bits flip behind a flip, too: in a control connection, and in a lane.
    goes_on: [bool; 2],
    /// Bytes from one flip to the next in a control connection, and in a lane; empty: none there.
    gaps: Mutex<[Range<u64>; 2]>,
    /// What was carried, where somebody listens.
    heard: Mutex<Option<Vec<u8>>>,
    changed: Condvar,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, HashMap<Line, State>> {
        lock(&self.lines)
    }

    /// A piece of a stream passes; `left`: bytes before the next flip of its direction, once there
    /// are any.
    fn pass(&self, piece: &mut [u8], kind: usize, left: &mut Option<u64>) {
        if let Some(heard) = &mut *lock(&self.heard) {
            heard.extend_from_slice(piece);
        }
        let gap = lock(&self.gaps)[kind].clone();
        if gap.is_empty() {
            return;
        }
        let gap = || gap.start + random() % (gap.end - gap.start);
        let mut at = left.unwrap_or_else(gap);
        while at < piece.len() as u64 {
            piece[at as usize] ^= 1 << (random() % 8);
            self.flips.by_kind[kind].fetch_add(1, Ordering::Relaxed);
            at = match self.goes_on[kind] {
                true => at + 1 + gap(),
                false => u64::MAX,
            };
        }
        *left = Some(at - piece.len() as u64);
    }

    /// Has its place among the streams of its line, unless no stream takes it any more.
    fn open(&self, stream: &Stream) -> bool {
        let mut lines = self.lock();
        let line = lines.entry(stream.line).or_default();
        let opens = !line.last && !self.cut.load(Ordering::SeqCst);
        line.opened += u32::from(opens);
        stream.number.store(line.opened, Ordering::SeqCst);
        if opens {
            line.first.get_or_insert(line.opened);
        }
        opens
    }

    /// A piece came early on a stream to its server: payload of a comm or lane under NCCL begins
    /// with its hello.
    fn look_for_hello(&self, stream: &Stream, piece: &[u8]) {
        let is_hello = |word: &[u8]| word == b"TxCo" || word == b"TxLn";
        if piece.windows(4).any(is_hello) {
            let mut lines = self.lock();
            let line = lines.entry(stream.line).or_default();
            if line.payload == 0 {
                line.first = Some(stream.number());
            }
            line.payload = stream.number();
        }
    }

    /// Until a stream that is swallowed goes on, or is reset.
    fn wait_until_woken(&self, stream: &Stream) {
        let waits = |lines: &mut HashMap<Line, State>| {
            let line = lines.entry(stream.line).or_default();
            !line.woken && !stream.is_reset(line)
        };
        let lines = self.changed.wait_while(self.lock(), waits);
        drop(lines);
    }
}

/// The relay; it lives as long as the process.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    board: Arc<Board>,
}

impl Proxy {
    /// Relays to `target` from a port of its own.
    pub fn start(target: SocketAddr) -> Self {
        // Under NCCL payload that is not sealed goes over any connection.
        Self::with_flips(target, &Arc::default(), [true; 2])
    }

    /// The same; `flips` counts the bits that it flips. `goes_on`: in a lane it goes on flipping
    /// behind a flip. What is sealed ends with the first one, and others behind it would change
    /// what nobody reads.
    pub fn flipping(target: SocketAddr, flips: &Arc<Flips>, goes_on: bool) -> Self {
        Self::with_flips(target, flips, [false, goes_on])
    }

    fn with_flips(target: SocketAddr, flips: &Arc<Flips>, goes_on: [bool; 2]) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let board = Arc::new(Board {
            flips: Arc::clone(flips),
            goes_on,
            ..Board::default()
        });
        let lines = Arc::clone(&board);
        thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let lines = Arc::clone(&lines);
                thread::spawn(move || relay(client, target, &lines));
            }
        });
        Self { address, board }
    }

    /// Where to connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// As [`break_line`](Self::break_line), of the last stream of payload that came: that of a
    /// comm, once it is connected.
    pub fn break_last(&self, line: Line, bytes: u64, fault: Fault) {
        let mut lines = self.board.lock();
        let last = lines.entry(line).or_default();
        last.first = Some(last.payload);
        drop(lines);
        self.break_line(line, bytes, fault);
    }

    /// The line's first stream of payload gets this fault after `bytes` bytes in both directions
    /// together.
    pub fn break_line(&self, line: Line, bytes: u64, fault: Fault) {
        let mut lines = self.board.lock();
        let line = lines.entry(line).or_default();
        line.fault = Some((bytes, fault));
        line.woken = false;
        self.board.changed.notify_all();
    }

    /// From now on bits flip: so many bytes lie from one to the next in each direction of a control
    /// connection, and of a lane; where that is empty, none does.
    pub fn flip(&self, gaps: [Range<u64>; 2]) {
        *lock(&self.board.gaps) = gaps;
    }

    /// Bits that were flipped.
    pub fn flipped(&self) -> u64 {
        self.board.flips.sum()
    }

    /// From now on what is carried is kept.
    pub fn listen(&self) {
        *lock(&self.board.heard) = Some(Vec::new());
    }

    /// What was carried since [`Proxy::listen`], in pieces of all streams as they came.
    pub fn heard(&self) -> Vec<u8> {
        lock(&self.board.heard).take().unwrap_or_default()
    }

    /// From now on no stream takes the place of the line's present one.
    pub fn refuse(&self, line: Line) {
        self.board.lock().entry(line).or_default().last = true;
    }

    /// Resets the line's present stream.
    pub fn reset(&self, line: Line) {
        let mut lines = self.board.lock();
        let line = lines.entry(line).or_default();
        line.reset = line.opened;
        self.board.changed.notify_all();
    }

    /// Resets all streams, and takes no other one.
    pub fn cut(&self) {
        let mut lines = self.board.lock();
        self.board.cut.store(true, Ordering::SeqCst);
        for line in lines.values_mut() {
            line.reset = line.opened;
        }
        self.board.changed.notify_all();
    }

    /// Stalled and swallowed streams of the line go on.
    pub fn wake(&self, line: Line) {
        let mut lines = self.board.lock();
        lines.entry(line).or_default().woken = true;
        self.board.changed.notify_all();
    }

    /// Bytes that this line's streams have carried, both directions together.
    pub fn carried(&self, line: Line) -> u64 {
        let lines = self.board.lock();
        lines.get(&line).map_or(0, |line| line.up + line.down)
    }

    /// How many streams this line has had.
    pub fn opened(&self, line: Line) -> u32 {
        let lines = self.board.lock();
        lines.get(&line).map_or(0, |line| line.opened)
    }
}

/// One end of what is relayed.
#[derive(Debug)]
struct End {
    stream: TcpStream,
    /// The relay has ended a direction of it.
    is_shut: AtomicBool,
}

impl End {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            is_shut: AtomicBool::new(false),
        }
    }

    fn shut(&self, how: Shutdown) {
        self.is_shut.store(true, Ordering::SeqCst);
        // It may be down already.
        let _ = self.stream.shutdown(how);
    }

    /// Whether the peer has reset it. The call that hears of it hides it from the others: they find
    /// an end.
    fn was_reset(&self) -> bool {
        let nothing = rustix::net::send(&self.stream, &[], SendFlags::NOSIGNAL);
        nothing.is_err() && !self.is_shut.load(Ordering::SeqCst)
    }
}

/// What is relayed.
#[derive(Debug)]
struct Stream {
    line: Line,
    /// Which of the line's streams it is, from 1 on; 0 while it is none: a lane that its client
    /// opens early, and does not want after all or the server does not know yet, was never one.
    number: AtomicU32,
    /// The server has answered a lane's hello: what its client says next proves it.
    answered: AtomicBool,
}

impl Stream {
    fn number(&self) -> u32 {
        self.number.load(Ordering::SeqCst)
    }

    fn is_first(&self, line: &State) -> bool {
        line.first == Some(self.number())
    }

    fn is_reset(&self, line: &State) -> bool {
        (1..=line.reset).contains(&self.number())
    }

    /// For what its bits flip: in a control connection, or in a lane.
    fn kind(&self) -> usize {
        usize::from(matches!(self.line, Line::Lane(_)))
    }
}

fn relay(mut client: TcpStream, target: SocketAddr, board: &Arc<Board>) {
    let Ok(mut server) = TcpStream::connect(target) else {
        return;
    };
    let mut head = [0; 16];
    if client.read_exact(&mut head).is_err() {
        return;
    }
    let stream = Stream {
        line: match head[12] {
            0 => Line::Control,
            1 => Line::Lane(u16::from_le_bytes([head[14], head[15]])),
            _ => Line::ControlAgain,
        },
        number: AtomicU32::new(0),
        answered: AtomicBool::new(false),
    };
    let mut left = None;
    board.pass(&mut head, stream.kind(), &mut left);
    let is_lane = stream.kind() == 1;
    if !is_lane && !board.open(&stream) || server.write_all(&head).is_err() {
        return;
    }
    for stream in [&client, &server] {
        // Without these the relay is slower, nothing else.
        let _ = stream.set_nodelay(true);
        let _ = stream.set_read_timeout(Some(LOOK));
    }
    let (client, server) = (End::new(client), End::new(server));
    thread::scope(|scope| {
        scope.spawn(|| pump(&client, &server, true, left, &stream, board));
        pump(&server, &client, false, None, &stream, board);
    });
}

fn pump(from: &End, to: &End, up: bool, mut left: Option<u64>, stream: &Stream, board: &Board) {
    let mut piece = vec![0; PIECE];
    let mut held = Vec::new();
    let mut early = if up { EARLY } else { 0 };
    loop {
        let room = {
            let mut lines = board.lock();
            loop {
                let line = lines.entry(stream.line).or_default();
                if stream.is_reset(line) {
                    return reset(from, to);
                }
                // A fault is for the stream that was there first.
                let due = line.fault.filter(|_| stream.is_first(line) && !line.woken);
                let left = due.map(|(after, _)| after.saturating_sub(line.up + line.down));
                match (due, left) {
                    (Some((_, Fault::Stall)), Some(0)) => {
                        lines = board
                            .changed
                            .wait(lines)
                            .unwrap_or_else(PoisonError::into_inner);
                    }
                    (Some((_, Fault::Reset)), Some(0)) => return reset(from, to),
                    (Some((_, Fault::Close)), Some(0)) => return end(from, to),
                    (Some((_, Fault::Swallow)), Some(0)) => break None,
                    (_, Some(left)) => break Some(left.min(PIECE as u64) as usize),
                    (_, None) => break Some(PIECE),
                }
            }
        };
        if room.is_some()
            && !held.is_empty()
            && (&to.stream).write_all(&std::mem::take(&mut held)).is_err()
        {
            return end_as_told(from, to, stream, board);
        }
        let count = match (&from.stream).read(&mut piece[..room.unwrap_or(PIECE)]) {
            Ok(0) if room.is_none() => {
                board.wait_until_woken(stream);
                continue;
            }
            Ok(0) if from.was_reset() => return reset(from, to),
            Ok(0) => return to.shut(Shutdown::Write),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) if room.is_none() => {
                board.wait_until_woken(stream);
                continue;
            }
            Err(_) => return end_as_told(from, to, stream, board),
        };
        if early > 0 {
            early -= 1;
            board.look_for_hello(stream, &piece[..count]);
        }
        board.pass(&mut piece[..count], stream.kind(), &mut left);
        if room.is_none() {
            held.extend_from_slice(&piece[..count]);
            continue;
        }
        if stream.number() > 0 {
            let mut lines = board.lock();
            let line = lines.entry(stream.line).or_default();
            *(if up { &mut line.up } else { &mut line.down }) += count as u64;
        } else if !up {
            stream.answered.store(true, Ordering::SeqCst);
        } else if stream.answered.load(Ordering::SeqCst) && !board.open(stream) {
            return end(from, to);
        }
        if (&to.stream).write_all(&piece[..count]).is_err() {
            return end_as_told(from, to, stream, board);
        }
    }
}

/// One direction has failed: where that is because the other one is being reset, or a peer has
/// reset it, this end of it must not look like one in order.
fn end_as_told(from: &End, to: &End, stream: &Stream, board: &Board) {
    let lines = board.lock();
    let is_reset = lines.get(&stream.line).is_some_and(|line| {
        let carried = line.up + line.down;
        let faulty = line
            .fault
            .is_some_and(|(after, fault)| fault == Fault::Reset && carried >= after);
        stream.is_reset(line) || stream.is_first(line) && faulty
    });
    drop(lines);
    if is_reset || from.was_reset() || to.was_reset() {
        reset(from, to);
    } else {
        end(from, to);
    }
}

fn end(from: &End, to: &End) {
    for end in [from, to] {
        end.shut(Shutdown::Both);
    }
}

fn reset(from: &End, to: &End) {
    for end in [from, to] {
        socket::abort(end.stream.as_fd());
    }
}
