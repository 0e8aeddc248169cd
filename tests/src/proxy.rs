//! A relay in front of a listener that can do to one stream what networks do.
//!
//! The first bytes of a stream say what it is ([`Line`]); faults are set for a line and happen at a
//! byte of its first stream: exactly there while one direction is quiet, else within one piece of it.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::net::SendFlags;

/// How long a pump waits before it looks at its orders again.
const LOOK: Duration = Duration::from_millis(20);
/// Bytes moved at a time.
const PIECE: usize = 16 << 10;

/// What happens to a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Both directions are reset.
    Reset,
    /// Both directions end in order.
    Close,
    /// Nothing is taken any more, in either direction, until [`Proxy::wake`].
    Stall,
    /// Everything is taken and nothing comes out, ends neither; what was taken is held until [`Proxy::wake`].
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

/// A line's orders and what has happened to it.
#[derive(Debug, Default)]
struct State {
    /// The fault, and the bytes towards the server after which it happens.
    fault: Option<(u64, Fault)>,
    up: u64,
    down: u64,
    opened: u32,
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
    /// One bit of so many bytes of each direction of each stream is changed; 0: none.
    flips: AtomicU64,
    /// Bits that were changed.
    flipped: AtomicU64,
    /// What was carried, where somebody listens.
    heard: Mutex<Option<Vec<u8>>>,
    changed: Condvar,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, HashMap<Line, State>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece passes, behind so many bytes of its stream.
    fn pass(&self, piece: &mut [u8], carried: &mut u64) {
        if let Some(heard) = &mut *self.heard() {
            heard.extend_from_slice(piece);
        }
        let every = self.flips.load(Ordering::SeqCst);
        if every > 0 && *carried / every < (*carried + piece.len() as u64) / every {
            // Another byte and bit each time.
            let flipped = self.flipped.fetch_add(1, Ordering::SeqCst) as usize;
            let at = (flipped * 7919) % piece.len();
            piece[at] ^= 1 << (flipped % 8);
        }
        *carried += piece.len() as u64;
    }

    /// Until a stream that is swallowed goes on, or is reset.
    fn wait_until_woken(&self, name: Line, opened: u32) {
        let waits = |lines: &mut HashMap<Line, State>| {
            let line = lines.entry(name).or_default();
            !line.woken && opened > line.reset
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
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let board = Arc::new(Board::default());
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

    /// The line's first stream gets this fault after `bytes` bytes in both directions together.
    pub fn break_line(&self, line: Line, bytes: u64, fault: Fault) {
        let mut lines = self.board.lock();
        let line = lines.entry(line).or_default();
        line.fault = Some((bytes, fault));
        line.woken = false;
        self.board.changed.notify_all();
    }

    /// From now on a bit is changed behind each `bytes` bytes of each direction of each stream.
    pub fn flip_behind(&self, bytes: u64) {
        self.board.flips.store(bytes, Ordering::SeqCst);
    }

    /// Bits that were changed.
    pub fn flipped(&self) -> u64 {
        self.board.flipped.load(Ordering::SeqCst)
    }

    /// From now on what is carried is kept.
    pub fn listen(&self) {
        *self.board.heard() = Some(Vec::new());
    }

    /// What was carried since [`Proxy::listen`], in pieces of all streams as they came.
    pub fn heard(&self) -> Vec<u8> {
        self.board.heard().take().unwrap_or_default()
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
#[derive(Clone, Debug)]
struct End {
    stream: Arc<TcpStream>,
    /// The relay has ended a direction of it.
    is_shut: Arc<AtomicBool>,
}

impl End {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream: Arc::new(stream),
            is_shut: Arc::default(),
        }
    }

    fn shut(&self, how: Shutdown) {
        self.is_shut.store(true, Ordering::SeqCst);
        // It may be down already.
        let _ = self.stream.shutdown(how);
    }

    /// Whether the peer has reset it. The call that hears of it hides it from the others: they find an end.
    fn was_reset(&self) -> bool {
        let nothing = rustix::net::send(&self.stream, &[], SendFlags::NOSIGNAL);
        nothing.is_err() && !self.is_shut.load(Ordering::SeqCst)
    }
}

fn relay(mut client: TcpStream, target: SocketAddr, board: &Arc<Board>) {
    let Ok(mut server) = TcpStream::connect(target) else {
        return;
    };
    let mut head = [0; 16];
    if client.read_exact(&mut head).is_err() || server.write_all(&head).is_err() {
        return;
    }
    let line = match head[12] {
        0 => Line::Control,
        1 => Line::Lane(u16::from_le_bytes([head[14], head[15]])),
        _ => Line::ControlAgain,
    };
    let is_cut = |held: &State| held.last || board.cut.load(Ordering::SeqCst);
    if is_cut(board.lock().entry(line).or_default()) {
        return;
    }
    // A lane that its client opens early, and does not want after all or the server does not know yet, was never one.
    let proof = match line {
        Line::Lane(_) => match shake_hands(&mut client, &mut server) {
            Some(proof) => proof,
            None => return,
        },
        Line::Control | Line::ControlAgain => Vec::new(),
    };
    let opened = {
        let mut lines = board.lock();
        let held = lines.entry(line).or_default();
        if is_cut(held) {
            return;
        }
        held.opened += 1;
        held.opened
    };
    if server.write_all(&proof).is_err() {
        return;
    }
    for stream in [&client, &server] {
        // Without these the relay is slower, nothing else.
        let _ = stream.set_nodelay(true);
        let _ = stream.set_read_timeout(Some(LOOK));
    }
    let (client, server) = (End::new(client), End::new(server));
    let (from, to, up_board) = (client.clone(), server.clone(), Arc::clone(board));
    let up = thread::spawn(move || {
        pump(&from, &to, true, line, opened, &up_board);
    });
    pump(&server, &client, false, line, opened, board);
    // It has ended or ends within one look.
    let _ = up.join();
}

/// Passes a lane's hello and its answer on; the client's proof, which makes it a lane.
fn shake_hands(client: &mut TcpStream, server: &mut TcpStream) -> Option<Vec<u8>> {
    let mut message = vec![0; PIECE];
    let hello = client.read(&mut message).ok()?;
    server.write_all(&message[..hello]).ok()?;
    let answer = server.read(&mut message).ok()?;
    client.write_all(&message[..answer]).ok()?;
    let proof = client.read(&mut message).ok()?;
    (proof > 0).then(|| message[..proof].to_vec())
}

fn pump(from: &End, to: &End, up: bool, name: Line, opened: u32, board: &Board) {
    let mut piece = vec![0; PIECE];
    let mut held = Vec::new();
    let mut carried = 0;
    loop {
        let room = {
            let mut lines = board.lock();
            loop {
                let line = lines.entry(name).or_default();
                if opened <= line.reset {
                    return reset(from, to);
                }
                // A fault is for the stream that was there first.
                let due = line.fault.filter(|_| opened == 1 && !line.woken);
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
            && (&*to.stream).write_all(&std::mem::take(&mut held)).is_err()
        {
            return end_as_told(from, to, name, opened, board);
        }
        let count = match (&*from.stream).read(&mut piece[..room.unwrap_or(PIECE)]) {
            Ok(0) if room.is_none() => {
                board.wait_until_woken(name, opened);
                continue;
            }
            Ok(0) if from.was_reset() => return reset(from, to),
            Ok(0) => return to.shut(Shutdown::Write),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) if room.is_none() => {
                board.wait_until_woken(name, opened);
                continue;
            }
            Err(_) => return end_as_told(from, to, name, opened, board),
        };
        board.pass(&mut piece[..count], &mut carried);
        if room.is_none() {
            held.extend_from_slice(&piece[..count]);
            continue;
        }
        {
            let mut lines = board.lock();
            let line = lines.entry(name).or_default();
            *(if up { &mut line.up } else { &mut line.down }) += count as u64;
        }
        if (&*to.stream).write_all(&piece[..count]).is_err() {
            return end_as_told(from, to, name, opened, board);
        }
    }
}

/// One direction has failed: where that is because the other one is being reset, or a peer has reset it, this end of it
/// must not look like one in order.
fn end_as_told(from: &End, to: &End, name: Line, opened: u32, board: &Board) {
    let lines = board.lock();
    let is_reset = lines.get(&name).is_some_and(|line| {
        let carried = line.up + line.down;
        let ordered = opened <= line.reset;
        ordered
            || opened == 1
                && line
                    .fault
                    .is_some_and(|(after, fault)| fault == Fault::Reset && carried >= after)
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

/// Closing with a linger time of 0 sends a reset; the clones of the other pump end with it.
fn reset(from: &End, to: &End) {
    for End { stream, .. } in [from, to] {
        let linger = libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        // SAFETY: the option's value is a `linger` that lives for the call.
        unsafe {
            libc::setsockopt(
                std::os::fd::AsRawFd::as_raw_fd(&**stream),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of::<libc::linger>() as libc::socklen_t,
            );
        }
        // To an address family of none: an abort of the connection, which both clones see.
        let mut none = libc::sockaddr {
            sa_family: libc::AF_UNSPEC as libc::sa_family_t,
            sa_data: [0; 14],
        };
        // SAFETY: `none` is a socket address of its stated length that lives for the call.
        unsafe {
            libc::connect(
                std::os::fd::AsRawFd::as_raw_fd(&**stream),
                &raw mut none,
                size_of::<libc::sockaddr>() as libc::socklen_t,
            );
        }
    }
}
