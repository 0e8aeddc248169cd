//! What a seed makes two or more programs do, on which system, and what breaks meanwhile.

use std::time::Duration;

use tcpx::{Bounds, Level, Limits};
use tcpx_net::LocalSizes;
use tcpx_wire::Settings;
use tcpx_wire::session::SessionBounds;

use crate::liar::{LIES, Manners};
use crate::random::Random;
use crate::system::{self, MICRO, MILLI, Nanos, SECOND, network, network::Fault};

/// The usual stall limit.
pub const STALL: Duration = Duration::from_secs(30);

/// Bytes of a slot of a window, and slots that each side's window has.
pub const SLOT: usize = 48 << 10;
pub const SLOTS: usize = 6;

/// What one side's program does with an operation that it has started.
#[derive(Clone, Debug)]
pub struct Manner {
    /// Cancels it after this time.
    pub cancel: Option<Duration>,
    /// Ends it after this time.
    pub deadline: Option<Duration>,
    /// Ends it after this time without progress, where nothing of the peer's program holds it up: a
    /// put, and a send of [a queue](Plan::queues).
    pub stall: Duration,
    /// Of a send; that of anything else is at least placed.
    pub level: Level,
}

#[derive(Clone, Debug)]
pub enum Action {
    Send {
        message: usize,
        tag: u64,
        bytes: usize,
        manner: Manner,
    },
    Receive {
        message: usize,
        tag: u64,
        room: usize,
        manner: Manner,
    },
    Put {
        operation: usize,
        slots: Vec<usize>,
        bytes: usize,
        notify: bool,
        manner: Manner,
    },
    Get {
        slot: usize,
        bytes: usize,
        manner: Manner,
    },
    Pause(Duration),
    /// Waits until no more than so many operations run.
    Settle(usize),
    /// Closes this side's window.
    Revoke,
    /// Drops the connection with all that runs.
    Leave,
    /// A fork's child drops all that it has inherited.
    Fork,
}

#[derive(Clone, Debug)]
pub struct Side {
    /// With the number by which it is left out when a failure is made smaller.
    pub actions: Vec<(usize, Action)>,
    pub manual: bool,
}

impl Side {
    /// How many of its sends end before anybody receives them.
    fn sent(&self) -> usize {
        let is_sent = |(_, action): &&(usize, Action)| matches!(action, Action::Send { manner, .. } if manner.level == Level::Sent);
        self.actions.iter().filter(is_sent).count()
    }
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub system: system::Settings,
    /// For each connection: the client's side and the server's.
    pub connections: Vec<[Side; 2]>,
    /// They come to one listener, in this order, and their servers' sides make progress alike.
    pub one_listener: bool,
    /// One more, of which a liar is the client.
    pub liar: Option<(Side, Manners)>,
    /// Nothing happens after which an operation may fail.
    pub strict: bool,
    /// One side starts everything at once, which takes long, and the other one is ready for it.
    pub queues: bool,
    /// How long anything else may wait for the peer's program.
    pub stall: Duration,
    /// How often a program looks that waits for the other one.
    pub looks: Duration,
    /// The side that closes its connections while what it has started runs.
    pub closes: Option<usize>,
    /// How long waits last that nothing else ends.
    pub patience: Duration,
    pub lanes: u16,
    pub chunk_bytes: u32,
    pub window: u16,
    pub eager_limit: u32,
    /// Of the client's side and the server's.
    pub limits: [Limits; 2],
    pub bounds: Bounds,
    /// Bytes that a lane moves in a turn.
    pub turn_bytes: usize,
    pub encrypt: bool,
    pub stage: bool,
    /// The peer's address is this host's.
    pub near: bool,
    /// Payload is read where it lies by a peer on this host, so much at a time.
    pub local: Option<LocalSizes>,
    /// What it is there for is how much one peer costs another one: see `fair`.
    pub is_fair: bool,
    /// What can be left out: actions first, then faults.
    pub items: usize,
}

/// Drawn apart: seeds keep what else they stand for.
fn local(seed: u64) -> Option<LocalSizes> {
    let mut random = Random::new(!seed);
    random.one_in(2).then(|| LocalSizes {
        least: random.pick(&[1, 100, 4_096, 16_384]),
        slice: random.pick(&[1_000, 4_097, 65_536, 1 << 20]),
        messages: random.pick(&[1, 2, 64]),
        parts: random.pick(&[1, 3, 1024]),
        windows: random.pick(&[1, 2, 1024]),
        ..LocalSizes::default()
    })
}

/// Drawn apart, too. A liar takes the place of a set-up for as long as that may last.
fn other_bounds(seed: u64, bounds: Bounds, lies: bool) -> Bounds {
    let mut random = Random::new(seed.rotate_left(32));
    Bounds {
        frames: random.pick(&[1, 2, 16]),
        pending: random.pick(&[1, 2, 32]),
        set_ups: if lies { 16 } else { random.pick(&[1, 2, 16]) },
        retry: Duration::from_millis(random.pick(&[1, 50])),
        eager_credit: random.pick(&[1, 100_000, 2 << 20]),
        session: SessionBounds {
            unread_bytes: random.pick(&[1, 100, 1 << 20]),
            backlog: random.pick(&[0, 20, 1 << 16]),
            ..bounds.session
        },
        ..bounds
    }
}

/// Drawn apart, too. The longest batch of a program has three puts and a notification. What tells a
/// peer what has arrived is queued, too, and the peer tells that alone nobody: there is room for as
/// much as comes without an answer. So is there for so many sends that end before anybody receives
/// them, which their peer may never do.
fn more_bounds(random: &mut Random, bounds: Bounds, fills: bool, sent: usize) -> Bounds {
    let (queued, told_frames, told_bytes) = random.pick(&[
        (64 << 10, 1, 1),
        (32 << 10, 2, 1_000),
        (2 << 20, 1, 256 << 10),
        (2 << 20, 64, 256 << 10),
    ]);
    let max_operations = random.pick(&[4, 5, 8, 1 << 14]);
    Bounds {
        ahead: bounds.frames + random.pick(&[2, 64]),
        // What fills a peer's limits is all started.
        session: SessionBounds {
            max_operations: if fills {
                1 << 14
            } else {
                sent + max_operations
            },
            ..bounds.session
        },
        steps: random.pick(&[1, 3, 32]),
        queued,
        told_frames,
        told_bytes,
        ..bounds
    }
}

/// Drawn apart, too. What a connection that nobody holds has left when its time is over ends early.
fn last_bounds(seed: u64, bounds: Bounds, strict: bool) -> Bounds {
    let mut random = Random::new(seed.rotate_left(48));
    let leave = random.pick(&[1, 20, 5_000]);
    Bounds {
        queue: random.pick(&[1, 2, 3072]),
        leave: Duration::from_millis(if strict { 5_000 } else { leave }),
        alone: random.pick(&[1, 2, 8]),
        session: SessionBounds {
            turn_bytes: random.pick(&[1, 10_000, 4 << 20]),
            ..bounds.session
        },
        ..bounds
    }
}

const TINY: &[usize] = &[0, 1, 7, 23, 100, 1000];
const SMALL: &[usize] = &[0, 1, 100, 4096, 4097, 16_384, 20_000, 40_000];
const STREAM: &[usize] = &[4_096, 8_192, 16_384, 20_000];
const LARGE: &[usize] = &[1, 4096, 16_385, 70_000, 140_000, 300_000];

impl Plan {
    /// That of a seed, without the items whose numbers are given.
    pub fn new(seed: u64, without: &dyn Fn(usize) -> bool, verbose: bool) -> Self {
        let mut random = Random::new(seed.wrapping_mul(0xD134_2543_DE82_EF95) + 1);
        let is_fair = random.one_in(40);
        // Slots are sent by their pages: of chunks that are long for their lanes, between two
        // programs of one host.
        let lends = !is_fair && random.one_in(3);
        // One side sends, and cancels, one short message after the other.
        let streams = lends && random.one_in(2);
        let strict = random.one_in(2) && !streams;
        // Without faults, nothing that moves stalls, be its limit little longer than a chunk takes,
        // and much before it.
        let calm = strict && random.one_in(2);
        let closes = (calm && !is_fair && random.one_in(2)).then(|| random.index(2));
        let queues = calm && !is_fair && !lends && random.one_in(4);
        // What a close or the last of a queue waits for takes longer than a limit that either could
        // have beside it.
        let is_slow = closes.is_some() || queues;
        let pace = match random.below(4) {
            _ if is_fair => 4,
            pace if lends || is_slow => 2 + pace % 2,
            pace => pace,
        };
        let (pieces, sizes): (Vec<usize>, &[usize]) = match pace {
            _ if streams => (vec![16_384, 262_144], STREAM),
            0 if random.one_in(2) => (vec![1], TINY),
            0 => (vec![1, 1, 1, 1448], TINY),
            1 => (vec![1, 7, 100, 1448], SMALL),
            2 => (vec![100, 1448, 4096, 65_536], LARGE),
            4 => (vec![16_384, 65_536], LARGE),
            _ => (vec![1448, 16_384, 262_144], LARGE),
        };
        // A flood of pieces of a byte each has no end.
        let is_coarse = pieces.iter().all(|piece| *piece >= 100);
        let near = random.one_in(2) || lends;
        let (least, varies): (&[Nanos], &[Nanos]) = match is_slow {
            true => (&[20_000, 100_000], &[0, 50_000, 100_000]),
            false => (&[5, 20, 50, 500], &[0, 10, 200, 5_000]),
        };
        let (least, varies) = (random.pick(least) * MICRO, random.pick(varies) * MICRO);
        let least_window = if lends { 65_536 } else { 0 };
        let windows: &[usize] = match is_slow {
            true => &[2_000, 4_096],
            false => &[300, 4_096, 65_536, 1 << 20],
        };
        let window = random.pick(windows).max(least_window);
        let in_flight = random.pick(&[2_000, 65_536, 1 << 20]).max(least_window);
        let network = network::Settings {
            latency: (least, least + if is_fair { 0 } else { varies }),
            window: if is_fair { 1 << 20 } else { window },
            in_flight: if is_fair { 1 << 20 } else { in_flight },
            near,
            send_buffer: random.pick(&[None, None, Some(2_048), Some(16_384)]),
            pieces,
            spares: strict,
        };
        let mut items = 0;
        let mut item = || {
            items += 1;
            !without(items - 1)
        };
        let mut connections = Vec::new();
        for _ in 0..random.pick(if streams { &[1] } else { &[1, 1, 1, 2, 3] }) {
            connections.push(Self::connection(
                &mut random,
                sizes,
                (strict, calm),
                (streams, queues),
                &mut item,
            ));
        }
        let mut liar = None;
        // One beside programs that are slow makes more calls than they do.
        if random.one_in(4) && !is_slow {
            let side = Self::connection(
                &mut random,
                sizes,
                (false, false),
                (streams, false),
                &mut item,
            );
            let manners = Self::manners(&mut random, is_coarse, &mut item);
            let [_, side] = side;
            liar = item().then_some((side, manners));
        }
        let ends = match is_fair {
            true => 4,
            false => 2 * connections.len() + usize::from(liar.is_some()),
        };
        // A flood is of long messages.
        let floods = liar.as_ref().is_some_and(|(_, manners)| manners.floods);
        let eager_limit = random.pick(if lends {
            &[0, 1_024]
        } else {
            &[0, 1_024, 32_768]
        });
        let encrypt = random.one_in(3) && !lends;
        let lanes = match random.pick(&[1, 1, 1, 2, 3, 4]) {
            1 if lends => 2,
            lanes => lanes,
        };
        let stage = random.one_in(2) || lends;
        let kinds = Faults {
            strict,
            encrypt,
            stage,
            lends,
            streams,
        };
        let mut faults: Vec<(u64, Fault)> = Vec::new();
        let mut last = 0;
        // Short programs are over soon.
        let reach = random.pick(if streams {
            &[100, 400]
        } else {
            &[200, 2_000, 6_000]
        });
        let count = random.pick(if lends { &[1, 4, 8] } else { &[0, 1, 2, 4, 8] });
        for _ in 0..count {
            // One may strike while another one lasts.
            last = match random.one_in(2) {
                true => random.below(reach),
                false => last + random.below(100),
            };
            let fault = kinds.one(&mut random);
            if item() && !calm {
                faults.push((last, fault));
            }
        }
        faults.sort_by_key(|(at, _)| *at);
        let limits = [(); 2].map(|()| Self::some_limits(&mut random));
        let bounds = Bounds {
            turn: Duration::from_nanos(random.pick(&[1, 20_000, 200_000, 200_000])),
            jobs: random.pick(&[1, 2, 64]),
            session: SessionBounds {
                answer_timeout: Duration::from_millis(random.pick(&[1, 20, 75])),
                vain_windows: random.pick(&[1, 2, 8]),
                ..SessionBounds::default()
            },
            ..Bounds::default()
        };
        let bounds = other_bounds(seed, bounds, liar.is_some());
        let mut apart = Random::new(seed.rotate_left(16) ^ 0xB0D5);
        let sent = connections.iter().flatten().map(Side::sent).max();
        let bounds = more_bounds(&mut apart, bounds, queues || is_fair, sent.unwrap_or(0));
        let bounds = last_bounds(seed, bounds, strict);
        let limits = match queues {
            true => [(); 2].map(|()| Self::limits(&mut apart, &[1, 2, 4])),
            false => limits,
        };
        let one_listener = apart.one_in(2);
        if one_listener {
            let manual = connections[0][1].manual;
            connections
                .iter_mut()
                .for_each(|one| one[1].manual = manual);
        }
        let eager_limit = match lends {
            true => eager_limit,
            false => apart.pick(&[eager_limit, 1, 100, 4_097, 131_072]),
        };
        Self {
            system: system::Settings {
                seed,
                cores: random.pick(&[1, 2, 4, 8]),
                preempts: random.pick(&[3, 10, 50, 1_000]),
                network,
                ends,
                late_copies: random.pick(if lends { &[0, 0, 12] } else { &[0, 12] }),
                faults,
                room: Random::new(seed.rotate_left(40) ^ 0x2003).pick(&[1, 2, 4096]),
                verbose,
            },
            connections,
            one_listener,
            liar,
            strict,
            queues,
            stall: if is_slow { 20 * STALL } else { STALL },
            looks: Duration::from_micros(if is_slow { 10_000 } else { 1_000 }),
            closes,
            patience: random.pick(&[Duration::from_secs(20), Duration::MAX]),
            lanes,
            chunk_bytes: random.pick(if is_slow {
                &[4_096]
            } else {
                &[4_096, 16_384, 65_536]
            }),
            window: random.pick(if lends {
                &[2, 2, 4, 64]
            } else {
                &[1, 2, 4, 64]
            }),
            eager_limit: if floods { 32_768 } else { eager_limit },
            limits,
            bounds,
            encrypt,
            stage,
            near,
            local: local(seed).filter(|_| near),
            turn_bytes: apart.pick(&[1, 5_000, 4 << 20]),
            is_fair,
            items,
        }
    }

    fn connection(
        random: &mut Random,
        sizes: &[usize],
        (strict, calm): (bool, bool),
        (streams, queues): (bool, bool),
        item: &mut dyn FnMut() -> bool,
    ) -> [Side; 2] {
        let mut sides = [(); 2].map(|()| Side {
            actions: Vec::new(),
            manual: random.one_in(5),
        });
        let cancels = random.pick(if streams { &[2] } else { &[2, 6] });
        // What one side alone does, or nothing beside something else, tells of faults that the rest
        // would show.
        let only = random.pick(if streams || queues {
            &[Some(0), Some(1)]
        } else {
            &[None, None, Some(0), Some(1)]
        });
        let is_alone = strict && random.one_in(2) && !queues;
        let manner = |random: &mut Random| Manner {
            cancel: (!strict && random.one_in(cancels))
                .then(|| Duration::from_micros(random.below(20_000))),
            deadline: random.one_in(8).then(|| match strict {
                true => Duration::MAX,
                false => Duration::from_millis(random.pick(&[1, 20, 500, 4_000])),
            }),
            stall: match calm {
                true => random.pick(&[Duration::from_secs(4), Duration::from_secs(10), STALL]),
                false => STALL,
            },
            level: random.pick(&[
                Level::Sent,
                Level::Placed,
                Level::Placed,
                Level::Placed,
                Level::Verified,
            ]),
        };
        let mut at = 0;
        let steps = random.pick(match (streams, queues) {
            (true, _) => &[60],
            // Ten times the least of their limits, and more.
            (_, true) => &[20, 40],
            _ => &[3, 8, 20, 40],
        });
        for step in 0..steps {
            let from = only.unwrap_or(random.index(2));
            let bytes = random.pick(sizes);
            let mine = manner(random);
            let theirs = manner(random);
            // A get is waited for.
            let kind = random.below(match (streams, queues) {
                (true, _) => 5,
                (_, true) => 7,
                _ => 10,
            });
            let slots = random.index(SLOTS - 1);
            let several = 1 + random.index(3);
            let room = bytes + random.pick(&[0, 0, 0, 1, 5_000]);
            let short = !strict && random.one_in(20);
            let tag = random.below(3);
            let span = random.below(3_000);
            let settle = random.index(6);
            let notify = random.one_in(2);
            let is_in = item();
            let number = at;
            at += 1;
            if !is_in {
                continue;
            }
            let mut add = |side: usize, action| sides[side].actions.push((number, action));
            match kind {
                0..=4 => {
                    add(
                        from,
                        Action::Send {
                            message: step,
                            tag,
                            bytes,
                            manner: mine,
                        },
                    );
                    let room = if short { bytes / 2 } else { room };
                    add(
                        1 - from,
                        Action::Receive {
                            message: step,
                            tag,
                            room,
                            manner: theirs,
                        },
                    );
                }
                5 | 6 => {
                    let slots = (slots..(slots + several).min(SLOTS)).collect();
                    let bytes = bytes.min(SLOT);
                    add(
                        from,
                        Action::Put {
                            operation: step,
                            slots,
                            bytes,
                            notify,
                            manner: mine,
                        },
                    );
                }
                7 => add(
                    from,
                    Action::Get {
                        slot: slots,
                        bytes: bytes.min(SLOT),
                        manner: mine,
                    },
                ),
                8 if span.is_multiple_of(4) => add(from, Action::Fork),
                8 => add(from, Action::Pause(Duration::from_micros(span))),
                _ => add(from, Action::Settle(settle)),
            }
            if is_alone {
                (0..2).for_each(|side| add(side, Action::Settle(0)));
            }
        }
        for side in &mut sides {
            let ends = (!strict)
                .then(|| random.pick(&[None, None, Some(Action::Revoke), Some(Action::Leave)]));
            if let Some(Some(end)) = ends {
                let place = random.index(side.actions.len() + 1);
                if item() {
                    side.actions.insert(place, (at, end));
                }
            }
            at += 1;
        }
        sides
    }

    /// What a side takes at a time; the longest list of a program has three pieces.
    fn some_limits(random: &mut Random) -> Limits {
        match random.one_in(2) {
            true => Limits::default(),
            false => Self::limits(random, &[1, 2, 3, 20]),
        }
    }

    fn limits(random: &mut Random, of: &[u32]) -> Limits {
        let mut few = || random.pick(of);
        Limits {
            puts: few(),
            notifications: few(),
            gets: few(),
            asks: few(),
            windows: few(),
            tags: few(),
            pieces: 3 * few(),
            list_windows: few(),
        }
    }

    /// What a liar says of itself; half of them that a few connections have so.
    fn lied_settings(random: &mut Random) -> Settings {
        let limits = Self::some_limits(random);
        let eager_limit = random.pick(&[0, 1, 1_024, 131_072]);
        let dead_after_ms = random.pick(&[3_000, 60_000, u32::MAX]);
        Settings {
            network: "tcp".into(),
            channels: random.pick(&[1, 2, u16::MAX]),
            chunk_bytes: random.pick(&[4_096, 12_288, Settings::MAX_CHUNK_BYTES]),
            send_window: random.pick(&[1, 8, u16::MAX]),
            receive_window: random.pick(&[1, 8, u16::MAX]),
            eager_limit,
            eager_credit: random.pick(&[eager_limit, 131_072, u32::MAX]),
            heartbeat_ms: random.pick(&[1, 1_000, dead_after_ms - 1]),
            dead_after_ms,
            limits,
            memory: "host".into(),
            software: "by hand".into(),
        }
    }

    fn manners(random: &mut Random, is_coarse: bool, item: &mut dyn FnMut() -> bool) -> Manners {
        let mut lies = Vec::new();
        for _ in 0..random.pick(&[0, 1, 1, 2, 8]) {
            let lie = (random.below(40), random.pick(LIES));
            if item() {
                lies.push(lie);
            }
        }
        let seed = random.next();
        Manners {
            seed,
            lies,
            early: random.one_in(3),
            pause: Duration::from_millis(random.pick(&[0, 0, 20, 2_000, 40_000])),
            lanes: random.pick(&[0, 0, 0, 0, 0, 40]),
            floods: random.one_in(4) && is_coarse && item(),
            settings: Self::lied_settings(&mut Random::new(!seed)),
        }
    }
}

/// Of what kinds faults are.
struct Faults {
    strict: bool,
    encrypt: bool,
    stage: bool,
    lends: bool,
    streams: bool,
}

impl Faults {
    fn one(&self, random: &mut Random) -> Fault {
        let which = random.index(64);
        let span = |random: &mut Random, most: Nanos| random.below(most) + MILLI;
        match random.below(4) {
            _ if self.streams => return Fault::Strand(which, span(random, 10 * MILLI)),
            0 | 1 if self.lends => return Fault::Strand(which, span(random, 40 * MILLI)),
            2 if self.stage && self.strict => return Fault::SlowCopies(span(random, SECOND)),
            // As long as this, that a cancel does not wait for their end.
            2 if self.stage && random.one_in(2) => {
                return Fault::SlowCopies(span(random, 12 * SECOND));
            }
            2 if self.stage => return Fault::FailedCopies(random.pick(&[1, 4, 16])),
            3 if self.encrypt => return Fault::Flip(which),
            _ => {}
        }
        match random.below(if self.strict { 12 } else { 18 }) {
            0..=2 => Fault::Reset(which),
            3 => Fault::Stall(which, span(random, 2 * SECOND)),
            4..=6 => Fault::Swallow(which),
            7 => Fault::Refuse(span(random, SECOND)),
            8 => Fault::StallAll(span(random, SECOND)),
            9 => Fault::Doze(which, span(random, SECOND)),
            10 | 11 => Fault::Cut(which, span(random, 90 * SECOND)),
            12 => Fault::HalfClose(which),
            13 => Fault::TimeJump(span(random, 20 * SECOND)),
            14 => Fault::StallAll(span(random, 30 * SECOND)),
            // As long as this, that a deadline does not wait for them.
            15 | 16 => Fault::HeldLanes(random.pick(&[1, 4, 16]), span(random, 12 * SECOND)),
            _ => Fault::Die,
        }
    }
}
