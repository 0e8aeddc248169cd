//! TCP connections between sockets of this process. A socket is one end of a local pair; the
//! network holds the other end, and carries bytes between the two when the seed says so.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use super::{MICRO, MILLI, Nanos, SECOND, fail, note, raw};
use crate::random::Random;
use crate::{memory, tally};

/// What a seed chooses of the network.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Time on the way, at least and at most.
    pub latency: (Nanos, Nanos),
    /// Bytes that are carried at a time.
    pub pieces: Vec<usize>,
    /// Bytes that a receiver may leave unread.
    pub window: usize,
    /// Bytes on the way in one direction.
    pub in_flight: usize,
    /// Both ends are on one host: what a receiver has no room for stays where its sender has it.
    pub near: bool,
    /// What the system makes of a socket's send buffer; `None`: what is asked for.
    pub send_buffer: Option<usize>,
    /// A connection keeps a link when another one is reset: one that loses all of them at once
    /// takes its peer for dead.
    pub spares: bool,
}

/// What breaks. Links are chosen among the living ones, by remainder.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Both ends hear of a reset.
    Reset(usize),
    /// One direction ends as if its sender had ended it.
    HalfClose(usize),
    /// Nothing moves on a link for a while.
    Stall(usize, Nanos),
    /// Nor on any.
    StallAll(Nanos),
    /// Nothing moves on a link any more, and nobody is told.
    Swallow(usize),
    /// A lane's card is cut off for a while: nothing moves on it, nor on what is dialled in its
    /// place.
    Cut(usize, Nanos),
    /// As soon as two of them have bytes under way, all lanes of a connection stall. After this
    /// time the others go on for a moment and are reset: that one gets what they had, and its
    /// sender hears only then what the peer had read.
    Strand(usize, Nanos),
    /// A bit flips on a link.
    Flip(usize),
    /// New connections are refused for a while.
    Refuse(Nanos),
    /// The clock jumps: nobody ran for a while.
    TimeJump(Nanos),
    /// A thread does not run for a while, be it an event loop, the copy worker or the monitor.
    Doze(usize, Nanos),
    /// So many times a thread of lanes is held up for so long at most, before it reads what is its
    /// turn.
    HeldLanes(u32, Nanos),
    /// The copy workers do not run for a while.
    SlowCopies(Nanos),
    /// So many of the copy workers' next jobs fail.
    FailedCopies(u32),
    /// All links are reset, and new ones are refused for ever: the peer died.
    Die,
}

/// Sockets of a connection's server, at most: four lanes and control, and some on their way in or
/// out.
const MOST_SOCKETS: usize = 24;
/// Of what a client says first: its purpose and, where that is a lane, whose number.
const HELLO_BYTES: usize = 16;
const PURPOSE_LANE: u8 = 1;
/// How long a lane stalls that is left alone: less than makes it dead.
const STRANDED: Nanos = 800 * MILLI;
/// The moment for which the others go on, and how long after their end that is heard which was said
/// meanwhile.
const MOMENT: Nanos = 10 * MILLI;
const NEWS: Nanos = 5 * MILLI;
/// A link that is as old carries a connection.
const SETTLED: Nanos = 200 * MILLI;

#[derive(Debug)]
enum Item {
    Data(Vec<u8>),
    Fin,
    Reset,
}

/// Memory whose pages are in a stream instead of a copy.
#[derive(Debug)]
struct Lent {
    /// The first byte's place in the stream.
    at: u64,
    start: usize,
    /// What it holds, as long as somebody reads it.
    bytes: Vec<u8>,
    /// Another link has had them too: a chunk that is sent again, which its peer may have read
    /// there.
    again: bool,
}

/// One direction of a link.
#[derive(Debug, Default)]
struct Direction {
    /// Bytes in the sender's socket.
    unsent: usize,
    /// Memory that is lent to the stream, until its receiver has read it.
    lent: VecDeque<Lent>,
    on_the_way: VecDeque<(Nanos, Item)>,
    bytes_on_the_way: usize,
    /// Bytes in the receiver's socket.
    unread: usize,
    /// It takes no more until some are read: small pieces need much of its memory.
    full: bool,
    /// The sender ended it.
    ended: bool,
    ended_on_the_way: bool,
    /// Nothing more is carried.
    over: bool,
    stopped_until: Nanos,
    flips: bool,
    sent: u64,
    placed: u64,
    read: u64,
    last_sent: Nanos,
    last_placed: Nanos,
    busy: Nanos,
}

#[derive(Debug)]
struct Link {
    /// Our ends.
    far: [i32; 2],
    /// The sockets are open.
    open: [bool; 2],
    /// By sender.
    directions: [Direction; 2],
    /// Where its client dialled: every connection has a listener to itself.
    port: u16,
    /// What its client says first, as far as that has come.
    hello: Vec<u8>,
    made: Nanos,
    /// When both ends hear of a reset.
    resets_at: Nanos,
    /// Its client says what it has read before it has.
    lies: bool,
    /// A bit of it has flipped, or will: somebody ends it for that.
    flipped: bool,
}

#[derive(Debug)]
enum Kind {
    Fresh { far: i32 },
    Listening { far: i32, backlog: VecDeque<i32> },
    Connected { link: usize, side: usize },
}

#[derive(Debug)]
struct Socket {
    kind: Kind,
    v6: bool,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    /// Descriptors of it.
    count: usize,
    was_reset: bool,
    /// The reset was reported.
    told: bool,
    resets_at_close: bool,
}

#[derive(Clone, Debug)]
pub enum Step {
    Take(usize, usize),
    Place(usize, usize),
    Reset(usize),
}

pub struct Network {
    settings: Settings,
    sockets: Vec<Socket>,
    descriptors: BTreeMap<i32, usize>,
    links: Vec<Link>,
    next_port: u16,
    refuses_until: Nanos,
    /// Lanes whose cards are cut off, by their connection's port, and until when.
    cuts: Vec<(u16, u16, Nanos)>,
    /// By descriptor of a pipe's end: memory whose pages are in it.
    pipes: BTreeMap<i32, (usize, usize)>,
    /// Links, the memory that they had pages of, and what it held, unless other bytes went out from
    /// there since.
    once_lent: Vec<(usize, usize, Vec<u8>)>,
}

impl Link {
    /// The number of the lane that it is; `None` for a control connection, or before it has said
    /// so.
    fn lane(&self) -> Option<u16> {
        let hello = <[u8; HELLO_BYTES]>::try_from(&self.hello[..]).ok()?;
        (hello[12] == PURPOSE_LANE).then(|| u16::from_le_bytes([hello[14], hello[15]]))
    }

    /// Some bytes are under way.
    fn is_busy(&self) -> bool {
        self.directions.iter().any(|one| one.under_way() > 0)
    }

    /// Nothing moves on it before.
    fn stop(&mut self, until: Nanos) {
        for direction in &mut self.directions {
            direction.stop(until);
        }
    }

    /// Both ends are there, and nobody has ended it.
    fn lives(&self) -> bool {
        let ended = |one: &Direction| one.over || one.ended;
        self.open == [true; 2] && !self.directions.iter().any(ended)
    }
}

impl Direction {
    /// Bytes that its receiver has not read.
    fn under_way(&self) -> usize {
        self.unsent + self.bytes_on_the_way + self.unread
    }

    /// Nothing moves before.
    fn stop(&mut self, until: Nanos) {
        self.stopped_until = self.stopped_until.max(until);
    }

    /// Its receiver has read up to there, in a `far` host as it came there and else from where it
    /// is lent, and what it has read of these pages it `sees`.
    fn let_go(&mut self, to: u64, sees: impl Fn(&Lent) -> bool) {
        while let Some(lent) = self.lent.front()
            && lent.at < to
        {
            let mut now = vec![0; lent.bytes.len()];
            // What is not mapped any more is nobody's.
            if sees(lent) && raw::read_memory(lent.start, &mut now) && now != lent.bytes {
                fail("bytes changed while their socket had their pages");
            }
            if lent.at + lent.bytes.len() as u64 > to {
                return;
            }
            self.lent.pop_front();
        }
    }
}

impl Network {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            sockets: Vec::new(),
            descriptors: BTreeMap::new(),
            links: Vec::new(),
            next_port: 40_000,
            refuses_until: 0,
            cuts: Vec::new(),
            pipes: BTreeMap::new(),
            once_lent: Vec::new(),
        }
    }

    pub fn has(&self, fd: i32) -> bool {
        self.descriptors.contains_key(&fd)
    }

    pub fn open(&self) -> usize {
        self.descriptors.len()
    }

    fn socket(&mut self, fd: i32) -> Option<&mut Socket> {
        let id = *self.descriptors.get(&fd)?;
        self.sockets.get_mut(id)
    }

    fn end_of(&self, fd: i32) -> Option<(usize, usize)> {
        match self.sockets[*self.descriptors.get(&fd)?].kind {
            Kind::Connected { link, side } => Some((link, side)),
            _ => None,
        }
    }

    fn port(&mut self) -> u16 {
        self.next_port += 1;
        self.next_port
    }

    /// Makes a socket; an error number if that cannot be.
    pub fn make(&mut self, v6: bool) -> Result<i32, i32> {
        let [near, far] = raw::pair().ok_or(libc::EMFILE)?;
        self.add(near, Kind::Fresh { far }, v6);
        Ok(near)
    }

    fn add(&mut self, fd: i32, kind: Kind, v6: bool) {
        self.descriptors.insert(fd, self.sockets.len());
        self.sockets.push(Socket {
            kind,
            v6,
            local: None,
            peer: None,
            count: 1,
            was_reset: false,
            told: false,
            resets_at_close: false,
        });
    }

    pub fn copied(&mut self, fd: i32, copy: i32) {
        if let Some(id) = self.descriptors.get(&fd).copied() {
            self.sockets[id].count += 1;
            self.descriptors.insert(copy, id);
        }
    }

    pub fn is_v6(&mut self, fd: i32) -> bool {
        self.socket(fd).is_some_and(|socket| socket.v6)
    }

    pub fn bind(&mut self, fd: i32, mut address: SocketAddr) {
        if address.port() == 0 {
            let port = self.port();
            address.set_port(port);
        }
        if let Some(socket) = self.socket(fd) {
            socket.local = Some(address);
        }
    }

    pub fn listen(&mut self, fd: i32) {
        if let Some(socket) = self.socket(fd)
            && let Kind::Fresh { far } = socket.kind
        {
            socket.kind = Kind::Listening {
                far,
                backlog: VecDeque::new(),
            };
        }
    }

    /// Connects; an error number if nobody listens.
    pub fn connect(&mut self, fd: i32, to: SocketAddr, now: Nanos) -> Result<(), i32> {
        let listening = self.descriptors.values().copied().find(|id| {
            let socket = &self.sockets[*id];
            matches!(socket.kind, Kind::Listening { .. })
                && socket.local.is_some_and(|local| local.port() == to.port())
        });
        if now < self.refuses_until {
            tally::saw("refused dial");
            return Err(libc::ECONNREFUSED);
        }
        let listening = listening.ok_or(libc::ECONNREFUSED)?;
        let port = self.port();
        let link = self.links.len();
        let socket = self.socket(fd).ok_or(libc::EBADF)?;
        let Kind::Fresh { far } = socket.kind else {
            return Err(libc::EISCONN);
        };
        let ip = socket.local.map_or(to.ip(), |local| local.ip());
        let from = SocketAddr::new(ip, port);
        (socket.local, socket.peer) = (Some(from), Some(to));
        socket.kind = Kind::Connected { link, side: 0 };
        let [near, other] = raw::pair().ok_or(libc::EMFILE)?;
        let v6 = self.sockets[listening].v6;
        self.add(near, Kind::Connected { link, side: 1 }, v6);
        if let Some(accepted) = self.sockets.last_mut() {
            (accepted.local, accepted.peer) = (Some(to), Some(from));
        }
        self.links.push(Link {
            far: [far, other],
            open: [true; 2],
            directions: Default::default(),
            port: to.port(),
            hello: Vec::new(),
            made: now,
            resets_at: Nanos::MAX,
            lies: !super::is_honest(),
            flipped: false,
        });
        if let Kind::Listening { far, backlog } = &mut self.sockets[listening].kind {
            backlog.push_back(near);
            // Makes it readable.
            raw::write(*far, &[1]);
        }
        note(|| format!("link {link}: {from} to {to}"));
        Ok(())
    }

    pub fn accept(&mut self, fd: i32) -> Result<i32, i32> {
        let socket = self.socket(fd).ok_or(libc::EBADF)?;
        let Kind::Listening { backlog, .. } = &mut socket.kind else {
            return Err(libc::EINVAL);
        };
        let accepted = backlog.pop_front().ok_or(libc::EAGAIN)?;
        raw::read(fd, &mut [0]);
        if let Some((link, _)) = self.end_of(accepted) {
            let port = self.links[link].port;
            let open = self
                .links
                .iter()
                .filter(|one| one.port == port && one.open[1]);
            if open.count() > MOST_SOCKETS {
                fail("a connection has more sockets than lanes that it may have");
            }
        }
        Ok(accepted)
    }

    pub fn local(&mut self, fd: i32) -> Option<SocketAddr> {
        let v6 = self.is_v6(fd);
        let any = match v6 {
            true => SocketAddr::from(([0u16; 8], 0)),
            false => SocketAddr::from(([0u8; 4], 0)),
        };
        Some(self.socket(fd)?.local.unwrap_or(any))
    }

    pub fn peer(&mut self, fd: i32) -> Option<SocketAddr> {
        self.socket(fd)?.peer
    }

    pub fn set_resets_at_close(&mut self, fd: i32) {
        if let Some(socket) = self.socket(fd) {
            socket.resets_at_close = true;
        }
    }

    /// So many bytes came into a socket.
    pub fn was_given(&mut self, fd: i32, bytes: usize, now: Nanos) {
        if let Some((link, side)) = self.end_of(fd) {
            let direction = &mut self.links[link].directions[side];
            direction.unsent += bytes;
            direction.last_sent = now;
        }
    }

    /// A pipe has the pages of this memory, unless it has some already.
    pub fn is_loaded(&mut self, pipe: i32, with: impl FnOnce() -> Option<(usize, usize)>) {
        if !self.pipes.contains_key(&pipe) {
            self.pipes.extend(with().map(|memory| (pipe, memory)));
        }
    }

    /// The last so many bytes that came into a socket are the first of the pages in a pipe, and no
    /// copy.
    pub fn was_lent(&mut self, pipe: i32, fd: i32, bytes: usize) {
        let _aside = memory::aside();
        let Some((start, length)) = self.pipes.remove(&pipe) else {
            fail("pages of a pipe that nobody has loaded");
        };
        if length > bytes {
            self.pipes.insert(pipe, (start + bytes, length - bytes));
        }
        if let Some((link, side)) = self.end_of(fd) {
            note(|| format!("{bytes} bytes are lent to link {link}"));
            tally::saw("lent pages");
            let mut content = vec![0; bytes];
            if raw::read_memory(start, &mut content) {
                let again = self.was_lent_before(link, start, &content);
                let direction = &mut self.links[link].directions[side];
                let at = direction.sent + (direction.unsent - bytes) as u64;
                direction.lent.push_back(Lent {
                    at,
                    start,
                    bytes: content,
                    again,
                });
            }
        }
    }

    /// Whether another link has had these bytes from there.
    fn was_lent_before(&mut self, link: usize, start: usize, bytes: &[u8]) -> bool {
        let end = start + bytes.len();
        let mut again = false;
        self.once_lent.retain(|(by, at, held)| {
            let (from, to) = (start.max(*at), end.min(at + held.len()));
            let is_same = from >= to || bytes[from - start..to - start] == held[from - at..to - at];
            again |= from < to && is_same && *by != link;
            is_same
        });
        self.once_lent.push((link, start, bytes.to_vec()));
        again
    }

    /// Whether one of its ends has given the link of this socket up.
    fn has_ended(&self, fd: i32) -> bool {
        self.end_of(fd)
            .is_some_and(|(link, _)| !self.links[link].lives())
    }

    /// So many bytes were read from a socket; `drops`: by one who has not seen them. Of a chunk
    /// that came over another link too its sender may have put anything there.
    pub fn was_read(&mut self, fd: i32, bytes: usize, drops: bool) {
        let _aside = memory::aside();
        let is_honest = super::is_honest();
        let ends = drops && self.has_ended(fd);
        if let Some((link, side)) = self.end_of(fd) {
            let direction = &mut self.links[link].directions[1 - side];
            direction.read += bytes as u64;
            if self.settings.near {
                direction.let_go(direction.read, |lent| {
                    is_honest && !(ends || drops && lent.again)
                });
            }
            direction.unread = direction.unread.saturating_sub(bytes);
            direction.full = false;
        }
    }

    /// A fork's child may have written to what it shares.
    pub fn recount(&mut self) {
        for link in &mut self.links {
            for (far, direction) in link.far.iter().zip(&mut link.directions) {
                if *far >= 0 && !direction.over {
                    direction.unsent = raw::unread(*far);
                }
            }
        }
    }

    /// The error of a socket whose connection was reset, once.
    pub fn take_error(&mut self, fd: i32) -> Option<i32> {
        let socket = self.socket(fd)?;
        let first = socket.was_reset && !std::mem::replace(&mut socket.told, true);
        first.then_some(libc::ECONNRESET)
    }

    /// The program ends a direction.
    pub fn shutdown(&mut self, fd: i32, how: i32) {
        if let Some((link, side)) = self.end_of(fd)
            && how != libc::SHUT_RD
        {
            self.links[link].directions[side].ended = true;
        }
    }

    /// The program drops a connection without a word.
    pub fn abort(&mut self, fd: i32, now: Nanos, random: &mut Random) {
        if let Some((link, side)) = self.end_of(fd) {
            self.reset_from(link, side, now, random);
            raw::shutdown(self.links[link].far[side], libc::SHUT_RDWR);
            self.links[link].directions[1 - side].over = true;
        }
    }

    /// A descriptor was closed.
    pub fn close(&mut self, fd: i32, unread: usize, now: Nanos, random: &mut Random) {
        let Some(id) = self.descriptors.remove(&fd) else {
            return;
        };
        let socket = &mut self.sockets[id];
        socket.count -= 1;
        if socket.count > 0 {
            return;
        }
        let resets = socket.resets_at_close || unread > 0;
        match &mut socket.kind {
            Kind::Fresh { far } => raw::close(*far),
            Kind::Listening { far, backlog } => {
                raw::close(*far);
                for waiting in std::mem::take(backlog) {
                    let unread = raw::unread(waiting);
                    raw::close(waiting);
                    self.close(waiting, unread.max(1), now, random);
                }
            }
            Kind::Connected { link, side } => {
                let (link, side) = (*link, *side);
                self.links[link].open[side] = false;
                if resets {
                    self.reset_from(link, side, now, random);
                } else {
                    self.links[link].directions[side].ended = true;
                }
                self.forget(link);
            }
        }
    }

    /// Lets go of a link that nobody has any more: what a socket held when it was closed is sent
    /// still, until the other end's system says that there is nobody.
    fn forget(&mut self, link: usize) {
        let link = &mut self.links[link];
        let is_sent = |one: &Direction| one.unsent > 0 && !one.over;
        if link.open == [false; 2] && !link.directions.iter().any(is_sent) {
            for (far, direction) in link.far.iter_mut().zip(&mut link.directions) {
                direction.over = true;
                direction.on_the_way.clear();
                if *far >= 0 {
                    raw::close(std::mem::replace(far, -1));
                }
            }
        }
    }

    fn arrives(&self, direction: &Direction, now: Nanos, random: &mut Random) -> Nanos {
        let (least, most) = self.settings.latency;
        let at = now + least + random.below(most - least + 1);
        direction
            .on_the_way
            .back()
            .map_or(at, |(last, _)| at.max(*last))
    }

    /// One side's system tells the other that there is no connection.
    fn reset_from(&mut self, link: usize, side: usize, now: Nanos, random: &mut Random) {
        let _aside = memory::aside();
        let at = self.arrives(&self.links[link].directions[side], now, random);
        let direction = &mut self.links[link].directions[side];
        if !direction.over {
            direction.unsent = 0;
            // What has left the socket is read as it lies there, whatever becomes of the
            // connection.
            direction.lent.retain(|lent| lent.at < direction.sent);
            direction.ended_on_the_way = true;
            direction.on_the_way.push_back((at, Item::Reset));
        }
    }

    /// A socket hears of a reset.
    fn was_reset(&mut self, link: usize, side: usize) {
        for direction in &mut self.links[link].directions {
            direction.over = true;
        }
        for socket in &mut self.sockets {
            if matches!(socket.kind, Kind::Connected { link: of, side: its } if (of, its) == (link, side))
            {
                socket.was_reset = true;
            }
        }
        raw::shutdown(self.links[link].far[side], libc::SHUT_RDWR);
    }

    /// Both ends hear of a reset.
    fn reset(&mut self, link: usize) {
        self.links[link].resets_at = Nanos::MAX;
        self.was_reset(link, 0);
        self.was_reset(link, 1);
    }

    /// Links of which bytes wait to be read.
    pub fn unread(&self) -> Vec<usize> {
        let waits = |link: &Link| {
            (0..2).any(|side| link.open[side] && link.directions[1 - side].unread > 0)
        };
        (0..self.links.len())
            .filter(|at| waits(&self.links[*at]))
            .collect()
    }

    /// What the network can do now.
    pub fn steps(&self, now: Nanos) -> Vec<Step> {
        let mut steps = Vec::new();
        for (link, one) in self.links.iter().enumerate() {
            if one.resets_at <= now {
                steps.push(Step::Reset(link));
            }
            for (side, direction) in one.directions.iter().enumerate() {
                if direction.over || now < direction.stopped_until {
                    continue;
                }
                let ahead = direction.bytes_on_the_way;
                let room = match self.settings.near {
                    true => self.settings.window.saturating_sub(direction.unread),
                    false => usize::MAX,
                };
                let has = direction.unsent > 0 && ahead < self.settings.in_flight.min(room);
                let ends = direction.ended && direction.unsent == 0;
                if !direction.ended_on_the_way && (has || ends) {
                    steps.push(Step::Take(link, side));
                }
                if let Some((at, item)) = direction.on_the_way.front()
                    && *at <= now
                    && (!matches!(item, Item::Data(_))
                        || direction.unread < self.settings.window && !direction.full
                        || !one.open[1 - side])
                {
                    steps.push(Step::Place(link, side));
                }
            }
        }
        steps
    }

    /// When it can do more.
    pub fn next_event(&self, now: Nanos) -> Option<Nanos> {
        let directions = self.links.iter().flat_map(|link| &link.directions);
        let moving = directions.filter(|direction| !direction.over);
        let next = moving.filter_map(|direction| {
            let waits = direction.unsent > 0 || direction.ended && !direction.ended_on_the_way;
            if now < direction.stopped_until {
                let has = waits || !direction.on_the_way.is_empty();
                return has
                    .then_some(direction.stopped_until)
                    .filter(|until| *until < Nanos::MAX);
            }
            direction
                .on_the_way
                .front()
                .map(|(at, _)| *at)
                .filter(|at| *at > now)
        });
        let resets = self.links.iter().map(|link| link.resets_at);
        next.chain(resets.filter(|at| *at < Nanos::MAX)).min()
    }

    pub fn step(&mut self, step: &Step, now: Nanos, random: &mut Random) {
        let (Step::Take(link, _) | Step::Place(link, _) | Step::Reset(link)) = *step;
        match *step {
            Step::Take(link, side) => self.take(link, side, now, random),
            Step::Place(link, side) => self.place(link, side, now, random),
            Step::Reset(link) => self.reset(link),
        }
        self.forget(link);
    }

    fn take(&mut self, link: usize, side: usize, now: Nanos, random: &mut Random) {
        let _aside = memory::aside();
        let at = self.arrives(&self.links[link].directions[side], now, random);
        let piece = random.pick(&self.settings.pieces);
        let one = &mut self.links[link];
        let direction = &mut one.directions[side];
        if direction.unsent == 0 {
            direction.ended_on_the_way = true;
            direction.on_the_way.push_back((at, Item::Fin));
            return;
        }
        let mut bytes = vec![0; piece.min(direction.unsent)];
        let count = raw::read(one.far[side], &mut bytes);
        let Ok(count) = usize::try_from(count) else {
            // Its socket was ended meanwhile, and what was in it went with it.
            direction.unsent = 0;
            return;
        };
        bytes.truncate(count);
        direction.unsent -= count;
        if count == 0 {
            direction.unsent = 0;
            return;
        }
        if !self.settings.near {
            direction.let_go(direction.sent + count as u64, |lent| {
                !one.lies && !lent.again
            });
        }
        if std::mem::take(&mut direction.flips) {
            let bit = random.index(8 * count);
            bytes[bit / 8] ^= 1 << (bit % 8);
            tally::saw("flipped bit");
        }
        direction.sent += count as u64;
        direction.bytes_on_the_way += count;
        direction.last_sent = now;
        let missing = HELLO_BYTES.saturating_sub(one.hello.len());
        if side == 0 && missing > 0 {
            one.hello.extend(bytes.iter().take(missing));
            let (port, lane) = (one.port, one.lane());
            let is_cut =
                |cut: &&(u16, u16, Nanos)| Some((cut.0, cut.1)) == lane.map(|lane| (port, lane));
            let until = self.cuts.iter().filter(is_cut).map(|cut| cut.2).max();
            one.stop(until.unwrap_or(0));
        }
        one.directions[side]
            .on_the_way
            .push_back((at, Item::Data(bytes)));
    }

    fn place(&mut self, link: usize, side: usize, now: Nanos, random: &mut Random) {
        let _aside = memory::aside();
        let one = &mut self.links[link];
        let Some((at, item)) = one.directions[side].on_the_way.pop_front() else {
            return;
        };
        let far = one.far[1 - side];
        match item {
            Item::Data(bytes) if !one.open[1 - side] => {
                // Nobody has the other end: its system answers with a reset.
                one.directions[side].bytes_on_the_way -= bytes.len();
                self.reset_from(link, 1 - side, now, random);
            }
            Item::Data(mut bytes) => {
                let direction = &mut one.directions[side];
                let room = self.settings.window.saturating_sub(direction.unread);
                let taken = raw::write(far, &bytes[..bytes.len().min(room)]);
                let taken = match usize::try_from(taken) {
                    Ok(taken) => taken,
                    Err(_) if taken == -(libc::EAGAIN as isize) => {
                        direction.on_the_way.push_front((at, Item::Data(bytes)));
                        direction.full = true;
                        return;
                    }
                    // The program reads no more: its system drops it.
                    Err(_) => {
                        direction.bytes_on_the_way -= bytes.len();
                        return;
                    }
                };
                direction.bytes_on_the_way -= taken;
                direction.unread += taken;
                direction.placed += taken as u64;
                direction.busy += now.saturating_sub(direction.last_placed).min(MILLI);
                direction.last_placed = now;
                if taken < bytes.len() {
                    direction
                        .on_the_way
                        .push_front((at, Item::Data(bytes.split_off(taken))));
                }
            }
            Item::Fin => {
                if one.open[1 - side] {
                    raw::shutdown(far, libc::SHUT_WR);
                }
            }
            Item::Reset => self.was_reset(link, 1 - side),
        }
    }

    /// A link among the living ones.
    fn living(&self, which: usize) -> Option<usize> {
        let living: Vec<_> = (0..self.links.len())
            .filter(|at| self.links[*at].lives())
            .collect();
        (!living.is_empty()).then(|| living[which % living.len()])
    }

    /// Whether its connection has another link, which has been there for long enough to count and
    /// has not been struck.
    fn is_spare(&self, link: usize, now: Nanos) -> bool {
        let works = |(at, other): (usize, &Link)| {
            let moves = |one: &Direction| {
                !one.over && !one.ended && now >= one.stopped_until.saturating_add(SETTLED)
            };
            at != link
                && other.port == self.links[link].port
                && other.open == [true; 2]
                && !other.flipped
                && other.directions.iter().all(moves)
                && now >= other.made + SETTLED
        };
        !self.settings.spares || self.links.iter().enumerate().any(works)
    }

    /// A living lane of this kind, whose connection has another one that no cut concerns.
    fn to_cut(&self, which: usize, is_fit: impl Fn(&Link) -> bool) -> Option<(usize, u16, u16)> {
        let is_cut = |port, lane| self.cuts.iter().any(|cut| (cut.0, cut.1) == (port, lane));
        let lanes: Vec<_> = (0..self.links.len())
            .filter(|at| self.links[*at].lives())
            .filter_map(|at| Some((at, self.links[at].port, self.links[at].lane()?)))
            .filter(|(_, port, lane)| !is_cut(*port, *lane))
            .collect();
        let has_other = |(_, port, lane): &&(usize, u16, u16)| {
            lanes
                .iter()
                .any(|other| other.1 == *port && other.2 != *lane)
        };
        let fits = |(link, ..): &&(usize, u16, u16)| is_fit(&self.links[*link]);
        let able: Vec<_> = lanes.iter().filter(has_other).filter(fits).collect();
        (!able.is_empty()).then(|| *able[which % able.len()])
    }

    /// Does it, unless there is nothing yet that it could strike.
    pub fn strike(&mut self, fault: &Fault, now: Nanos, random: &mut Random) -> bool {
        let _aside = memory::aside();
        match *fault {
            Fault::Reset(which) => {
                if let Some(link) = self.living(which).filter(|link| self.is_spare(*link, now)) {
                    note(|| format!("link {link} is reset"));
                    tally::saw("reset");
                    self.reset(link);
                }
            }
            Fault::HalfClose(which) => {
                if let Some(link) = self.living(which) {
                    let side = random.index(2);
                    note(|| format!("link {link} ends from side {side}"));
                    tally::saw("half-close");
                    let direction = &mut self.links[link].directions[side];
                    direction.on_the_way.clear();
                    direction.bytes_on_the_way = 0;
                    direction.over = true;
                    raw::shutdown(self.links[link].far[1 - side], libc::SHUT_WR);
                }
            }
            Fault::Stall(which, span) => {
                if let Some(link) = self.living(which) {
                    note(|| format!("link {link} stalls"));
                    tally::saw("stall");
                    self.links[link].stop(now + span);
                }
            }
            Fault::StallAll(span) => {
                tally::saw("stall of all");
                self.links.iter_mut().for_each(|link| link.stop(now + span));
            }
            Fault::Swallow(which) => {
                if let Some(link) = self.living(which) {
                    note(|| format!("link {link} is swallowed"));
                    tally::saw("swallowed link");
                    self.links[link].stop(Nanos::MAX);
                }
            }
            Fault::Cut(which, span) => {
                // In the middle of a chunk, if it can be.
                let to_cut = self.to_cut(which, Link::is_busy);
                let to_cut = to_cut.or_else(|| self.to_cut(which, |_| true));
                if let Some((link, port, lane)) = to_cut {
                    note(|| format!("lane {lane}, link {link}, is cut"));
                    tally::saw("cut lane");
                    self.links[link].stop(now + span);
                    self.cuts.push((port, lane, now + span));
                }
            }
            Fault::Strand(which, span) => {
                let left = self.to_cut(which, Link::is_busy).filter(|(_, port, _)| {
                    let is_one = |link: &&Link| {
                        link.port == *port
                            && link.lane().is_some()
                            && link.lives()
                            && link.is_busy()
                    };
                    self.links.iter().filter(is_one).count() > 1
                });
                if let Some((link, port, lane)) = left {
                    let [here, there] = self.links[link].directions.each_ref();
                    // The side that is sent more says what it has read.
                    let teller = usize::from(here.under_way() > there.under_way());
                    note(|| format!("lane {lane}, link {link}, is left alone"));
                    tally::saw("lane left alone");
                    for (at, other) in self.links.iter_mut().enumerate() {
                        match other.lane() {
                            _ if other.port != port || !other.lives() => {}
                            Some(_) if at == link => other.stop(now + STRANDED),
                            Some(_) => {
                                other.stop(now + span);
                                other.resets_at = now + span + MOMENT;
                            }
                            None => other.directions[teller].stop(now + span + MOMENT + NEWS),
                        }
                    }
                } else {
                    return false;
                }
            }
            Fault::Flip(which) => {
                if let Some(link) = self.living(which).filter(|link| self.is_spare(*link, now)) {
                    self.links[link].directions[random.index(2)].flips = true;
                    self.links[link].flipped = true;
                }
            }
            Fault::Refuse(span) => self.refuses_until = self.refuses_until.max(now + span),
            Fault::TimeJump(_)
            | Fault::Doze(..)
            | Fault::HeldLanes(..)
            | Fault::SlowCopies(_)
            | Fault::FailedCopies(_) => {}
            Fault::Die => {
                tally::saw("death");
                self.refuses_until = Nanos::MAX;
                while let Some(link) = self.living(0) {
                    self.reset(link);
                }
            }
        }
        true
    }

    /// Nothing moves to the server on the links of a connection before.
    pub fn stop(&mut self, port: u16, until: Nanos) {
        for link in self.links.iter_mut().filter(|link| link.port == port) {
            link.directions[0].stopped_until = until;
        }
    }

    /// What stalled goes on.
    pub fn heal(&mut self) {
        self.cuts.clear();
        for link in &mut self.links {
            for direction in &mut link.directions {
                direction.stopped_until = 0;
            }
        }
    }

    /// What the system tells of a connection.
    pub fn info(&self, fd: i32, now: Nanos) -> Option<libc::tcp_info> {
        let (link, side) = self.end_of(fd)?;
        let directions = &self.links[link].directions;
        let (out, back) = (&directions[side], &directions[1 - side]);
        // SAFETY: all of its fields are numbers.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        const PACKET: usize = 1448;
        let stopped =
            (now < out.stopped_until || out.over) && (out.unsent > 0 || out.bytes_on_the_way > 0);
        let waited = now.saturating_sub(out.last_placed.max(out.last_sent));
        info.tcpi_state = 1;
        info.tcpi_snd_mss = PACKET as u32;
        info.tcpi_bytes_acked = out.placed;
        info.tcpi_bytes_sent = out.sent;
        info.tcpi_bytes_received = back.placed;
        info.tcpi_unacked = out.bytes_on_the_way.div_ceil(PACKET) as u32;
        info.tcpi_notsent_bytes = out.unsent as u32;
        if stopped && info.tcpi_unacked == 0 {
            // The system would have sent some of it, which the way swallowed.
            info.tcpi_unacked = 1;
        }
        info.tcpi_busy_time = out.busy / MICRO;
        info.tcpi_rtt = (self.settings.latency.1 / MICRO) as u32;
        info.tcpi_last_ack_recv = (now.saturating_sub(out.last_placed) / MILLI) as u32;
        info.tcpi_last_data_sent = (now.saturating_sub(out.last_sent) / MILLI) as u32;
        if stopped {
            // Tries at 200 ms, and then each after twice the time.
            let (mut at, mut pause, mut tries) = (200 * MILLI, 400 * MILLI, 0);
            while at <= waited && tries < 15 {
                tries += 1;
                info.tcpi_last_data_sent = ((waited - at) / MILLI) as u32;
                at += pause;
                pause = (2 * pause).min(120 * SECOND);
            }
            info.tcpi_retransmits = tries;
            info.tcpi_probes = tries;
        }
        Some(info)
    }

    /// What the system makes of a send buffer of this length.
    pub fn send_buffer(&self, asked: usize) -> usize {
        self.settings.send_buffer.unwrap_or(asked)
    }

    pub fn describe(&self, now: Nanos) -> String {
        let mut text = String::new();
        for (at, link) in self
            .links
            .iter()
            .enumerate()
            .filter(|(_, link)| link.open != [false; 2])
        {
            let ways = link.directions.iter().map(|one| {
                format!(
                    "{} unsent, {} on the way, {} unread, over {}, ended {}, stopped {}",
                    one.unsent,
                    one.bytes_on_the_way,
                    one.unread,
                    one.over,
                    one.ended,
                    now < one.stopped_until,
                )
            });
            text += &format!(
                "  link {at}: open {:?}: {:?}\n",
                link.open,
                ways.collect::<Vec<_>>()
            );
        }
        text
    }
}
