//! Peers that ask for as much work as they may: other connections of the process go on beside them,
//! and they cost little memory.

use std::io::{Read, Write};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tcpx::{Auth, CompletionQueue, Connection, Endpoint, Region, Rights, WindowKey};
use tcpx_wire::frame::{CancelReason, Destination, Extent, Frame, Grant, Notified, TimeLeft};
use tcpx_wire::pieces::PieceList;
use tcpx_wire::{Level, Role, Tag, TransferId};

use crate::peer::Peer;
use crate::{LONG, key, local, pair, tcp};

/// Pieces of a list, no two of which are one run: as many as fit in the memory that a peer may
/// cost.
const PIECES: u32 = 1 << 18;
/// As many as a side keeps at most, in four times that memory.
const MOST_PIECES: u32 = 1 << 20;
/// Tags that have a count at the other side.
const TAGS: u64 = 80_000;
/// What tells that everything before it was seen to.
const MARK: Tag = Tag(u64::MAX);
/// Gets of a turn, at least.
const GETS: usize = 200;
/// A busy machine may slow down all turns but one.
const TURNS: usize = 20;
/// How much longer one get of a hundred may take beside a peer that means harm.
const SLOWER: u32 = 5;
/// Bytes that such a peer may cost.
const MEMORY: usize = 32 << 20;

/// A peer that means harm within the rules.
struct Hostile {
    peer: Peer,
    window: WindowKey,
    /// Its transfers, and what else it counts.
    transfers: u64,
    steps: u64,
    marks: u64,
    /// Of its long lists.
    pieces: u32,
}

impl Hostile {
    fn transfer(&mut self) -> TransferId {
        self.transfers += 1;
        TransferId(self.transfers - 1)
    }

    fn step(&mut self) -> u64 {
        self.steps += 1;
        self.steps - 1
    }

    fn eager(&mut self, to: Destination, bytes: usize) -> Frame {
        Frame::Eager {
            transfer: self.transfer(),
            level: Level::Placed,
            to,
            payload: vec![1; bytes].into(),
        }
    }

    /// The last piece ends behind the window if it is `bad`.
    fn long_list(&self, is_bad: bool) -> PieceList {
        let mut list = PieceList::default();
        let room = u64::from(self.pieces) * 4;
        for at in 0..u64::from(self.pieces) - 1 {
            let offset = (at * 3 + at % 2) % room;
            list.push(&self.window.at(offset), 1).expect("a piece");
        }
        let last = if is_bad { self.window.bytes } else { 0 };
        list.push(&self.window.at(last), 1).expect("a piece");
        list
    }

    fn tell(number: u64, list: &PieceList) -> impl Iterator<Item = Frame> {
        let mut parts = list.parts().into_iter().peekable();
        std::iter::from_fn(move || {
            let part = parts.next()?;
            Some(Frame::Pieces {
                list: number,
                last: parts.peek().is_none(),
                part,
            })
        })
    }
}

/// What it says at first, and then again and again.
struct Flood {
    name: &'static str,
    first: fn(&mut Hostile) -> Vec<Frame>,
    more: fn(&mut Hostile) -> Vec<Frame>,
    /// Each byte is written by itself.
    singly: bool,
    pieces: u32,
}

fn nothing(_: &mut Hostile) -> Vec<Frame> {
    Vec::new()
}

/// Sends that ask for a receive, and end.
fn cancel(hostile: &mut Hostile) -> Vec<Frame> {
    let (step, transfer) = (hostile.step(), hostile.transfer());
    let to = Destination::Receive {
        tag: Tag(step % TAGS),
        number: step / TAGS,
    };
    vec![
        Frame::Waiting {
            transfer,
            level: Level::Placed,
            bytes: 1 << 20,
            to,
        },
        Frame::Cancel {
            transfer,
            from: Role::Sender,
            reason: CancelReason::Requested,
            detail: "".into(),
        },
    ]
}

/// Puts that ask, and end.
fn put(hostile: &mut Hostile) -> Vec<Frame> {
    let transfer = hostile.transfer();
    vec![
        Frame::Waiting {
            transfer,
            level: Level::Placed,
            bytes: u64::from(hostile.pieces),
            to: Destination::Put {
                to: Extent::Pieces(0),
                notified: Notified::No,
                left: TimeLeft::ANY,
            },
        },
        Frame::Cancel {
            transfer,
            from: Role::Sender,
            reason: CancelReason::Requested,
            detail: "".into(),
        },
    ]
}

/// Gets that are refused for the last piece of their list.
fn bad_get(hostile: &mut Hostile) -> Vec<Frame> {
    vec![Frame::Get {
        request: hostile.step(),
        from: Extent::Pieces(0),
        bytes: hostile.pieces.into(),
        level: Level::Placed,
        left: TimeLeft::ANY,
    }]
}

/// Lists that nothing names.
fn list(hostile: &mut Hostile) -> Vec<Frame> {
    let number = hostile.step();
    let list = hostile.long_list(false);
    let drop = Frame::DropPieces { list: number };
    Hostile::tell(number, &list).chain([drop]).collect()
}

/// As many as may be, which nobody collects.
fn notifications(hostile: &mut Hostile) -> Vec<Frame> {
    let to = Destination::Notification {
        first: TransferId(0),
        count: 0,
    };
    (0..4000).map(|_| hostile.eager(to, 256)).collect()
}

fn heartbeat(hostile: &mut Hostile) -> Vec<Frame> {
    let counter = hostile.step();
    vec![Frame::Heartbeat { counter }]
}

/// That of what it was sent it has read nothing.
fn acknowledgement(_: &mut Hostile) -> Vec<Frame> {
    vec![Frame::Received { read: 0 }]
}

/// Windows of a byte that are closed again.
fn tiny_window(hostile: &mut Hostile) -> Vec<Frame> {
    let step = hostile.step();
    // Its count begins anew with each answer.
    let (tag, number) = (Tag(step % 1000), 0);
    let grant = Grant {
        window: step,
        chunk_bytes: 4096,
        taper: None,
        level: Level::Placed,
    };
    vec![
        Frame::Posted {
            tag,
            number,
            capacity: 1,
            grant,
        },
        Frame::Unpost { tag, number },
    ]
}

const FLOODS: [Flood; 8] = [
    flood("cancels", nothing, cancel),
    flood(
        "puts of a long list",
        |hostile| Hostile::tell(0, &hostile.long_list(false)).collect(),
        put,
    ),
    Flood {
        pieces: MOST_PIECES,
        ..flood(
            "gets of a million runs",
            |hostile| Hostile::tell(0, &hostile.long_list(true)).collect(),
            bad_get,
        )
    },
    flood("lists", nothing, list),
    flood("notifications", notifications, heartbeat),
    flood("acknowledgements", nothing, acknowledgement),
    flood("tiny windows", nothing, tiny_window),
    Flood {
        singly: true,
        ..flood("single bytes", nothing, heartbeat)
    },
];

const fn flood(
    name: &'static str,
    first: fn(&mut Hostile) -> Vec<Frame>,
    more: fn(&mut Hostile) -> Vec<Frame>,
) -> Flood {
    Flood {
        name,
        first,
        more,
        singly: false,
        pieces: PIECES,
    }
}

/// How long an honest get takes at most but for one of a hundred, of so many, until it is over.
fn gets(
    user: &Connection,
    key: &WindowKey,
    mut is_over: impl FnMut() -> bool,
) -> (Duration, usize) {
    let to = Region::host(4096).expect("memory");
    let mut times = Vec::new();
    loop {
        let began = Instant::now();
        let get = user.get(to.all(), key, 0).start().expect("room");
        get.wait().expect("an honest get");
        times.push(began.elapsed());
        if is_over() {
            break;
        }
    }
    times.sort_unstable();
    (times[(times.len() - 1) * 99 / 100], times.len())
}

/// Bytes of the process's memory that are in RAM.
fn memory() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("the system tells");
    let pages = pages.split(' ').nth(1).and_then(|field| field.parse().ok());
    pages.map_or(0, |pages: usize| pages * 4096)
}

/// Bytes of a turn at most: fewer frames than answers that may wait for it to read them.
const MOST: usize = 1 << 20;
/// More threads than cores are at work, of which each may have its core for so long. What took its
/// time before took a hundred milliseconds and more.
const SLICE: Duration = Duration::from_millis(8);

/// Runs in a process of its own, of which it looks at the memory.
#[test]
fn a_peer_that_asks_for_much_work_does_not_stop_others() {
    const ALONE: &str = "TEST_ALONE";
    let name = "starving::a_peer_that_asks_for_much_work_does_not_stop_others";
    if std::env::var_os(ALONE).is_none() {
        let own = std::env::current_exe().expect("a program");
        let mut command = Command::new(own);
        command.args([name, "--exact", "--nocapture"]);
        let output = command.env(ALONE, "1").output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("single bytes"), "it has run: {said}");
        eprintln!("{said}");
        return;
    }
    let mut options = tcp(Auth::Key(key()));
    options.limits.pieces = MOST_PIECES;
    options.limits.tags = 2 * TAGS as u32;
    let (owner, user) = pair(&options, &options);
    let bytes = Region::host(4096).expect("memory");
    let window = owner.expose(bytes.all(), Rights::Get).expect("open");
    let honest = window.key();
    let endpoint = Endpoint::listen(local(), options.clone()).expect("a free port");
    let address = endpoint.local_addr();
    let room = Region::host(MOST_PIECES as usize * 4).expect("memory");
    for flood in FLOODS {
        let auth = options.auth.clone();
        let connecting = thread::spawn(move || {
            let (mut peer, session) = Peer::connect(address, &auth);
            let lane = peer.set_up(address, &session);
            (peer, lane)
        });
        let theirs = endpoint.accept(LONG).expect("it has the key");
        let (peer, lane) = connecting.join().expect("no panic");
        peer.stream.set_nodelay(true).expect("a socket");
        let open = theirs.expose(room.all(), Rights::GetAndPut).expect("open");
        let mut answers = peer.stream.try_clone().expect("a socket");
        let reading = thread::spawn(move || {
            // Its answers are read, as otherwise it would be cut off.
            let mut buffer = vec![0; 1 << 20];
            while answers.read(&mut buffer).is_ok_and(|read| read > 0) {}
        });
        let mut hostile = Hostile {
            peer,
            window: open.key(),
            transfers: 0,
            steps: 0,
            marks: 0,
            pieces: flood.pieces,
        };
        let before = memory();
        let mut first = (flood.first)(&mut hostile);
        let mut most = 64 << 10;
        let (mut best, mut cost) = (f64::MAX, 0);
        for _ in 0..TURNS {
            // Made before: to make it takes the machine more than to read it.
            let mut said = Vec::new();
            while said.len() < most {
                if first.is_empty() {
                    first = (flood.more)(&mut hostile);
                }
                first
                    .drain(..)
                    .for_each(|frame| said.extend(hostile.peer.encode(&frame)));
            }
            let number = hostile.marks;
            hostile.marks += 1;
            let mark = hostile.eager(Destination::Receive { tag: MARK, number }, 8);
            said.extend(hostile.peer.encode(&mark));
            let queue = CompletionQueue::new().expect("a queue");
            let seen = Region::host(8).expect("memory");
            let mark = theirs.receive(seen.all(), MARK.0).start().expect("alive");
            mark.queue(&queue, 0);
            let mut left = GETS;
            let (alone, _) = gets(&user, &honest, || {
                left -= 1;
                left == 0
            });
            let mut stream = hostile.peer.stream.try_clone().expect("a socket");
            let length = said.len();
            let writing = thread::spawn(move || match flood.singly {
                true => said.chunks(1).try_for_each(|byte| stream.write_all(byte)),
                false => stream.write_all(&said),
            });
            let mut completions = Vec::new();
            let (beside, count) = gets(&user, &honest, || {
                let seen = queue.poll(&mut completions, 1, Duration::ZERO);
                seen.expect("a queue") > 0
            });
            for completion in completions {
                completion.outcome.expect("nothing of it is a breach");
            }
            writing.join().expect("no panic").expect("it reads");
            cost = cost.max(memory().saturating_sub(before + 2 * length));
            if count < GETS && most < MOST {
                // Too little to see anything.
                most *= 2;
                continue;
            }
            let beside = beside.saturating_sub(SLICE);
            best = best.min(beside.as_secs_f64() / alone.as_secs_f64());
            if best < f64::from(SLOWER) {
                break;
            }
        }
        let name = flood.name;
        eprintln!("{name}: {best:.1} times as long, {} KiB", cost >> 10);
        assert!(best < f64::from(SLOWER), "{name}: {best:.1} times as long");
        let memory = MEMORY * (flood.pieces / PIECES) as usize;
        assert!(cost < memory, "{name}: {} MiB", cost >> 20);
        hostile
            .peer
            .stream
            .shutdown(std::net::Shutdown::Both)
            .expect("a socket");
        reading.join().expect("no panic");
        drop((lane, open, theirs));
    }
}
