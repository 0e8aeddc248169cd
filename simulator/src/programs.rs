//! The programs at both ends of each connection, and what they check.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tcpx::{
    Auth, Connection, Deadlines, Delivered, Endpoint, Error, Level, Options, ProgressMode, Region,
    Report, Rights, TcpNetwork, TcpOptions, Transfer, Window, WindowKey,
};
use tcpx_memory::CopyWorker;

use crate::liar::Liar;
use crate::plan::{Action, Manner, Plan, SLOT, SLOTS, Side};
use crate::system::{self, fail, note};
use crate::{memory, tally};

const GUARD: usize = 64;
/// What lies around and in a destination before anything comes.
const EMPTY: u8 = 0xA5;
/// What the program writes once its memory is its own again.
const SCRIBBLED: u8 = 0x5A;
/// No operation without an end of its own lives longer, whatever happens: its stall limit, the limits after which
/// a peer is given up, and what a clock that jumps takes away.
const LONGEST: Duration = Duration::from_secs(150);
const STALL: Duration = Duration::from_secs(30);
/// An operation with a deadline ends by then.
const LATE: Duration = Duration::from_secs(12);
pub const GOODBYE: Duration = Duration::from_secs(60);
/// Some times what bytes are on their way for at most.
const REVIVED: Duration = Duration::from_millis(50);

/// Messages of so many bytes tell each other apart.
const LEAST_TOLD: usize = 8;

/// What the last two bits of all payload of a connection are; those of memory that is `EMPTY` are of connection 0.
pub fn label(connection: usize) -> u8 {
    (connection as u8 + 1) & 3
}

/// The bytes of a payload.
fn content(name: u64, bytes: usize) -> Vec<u8> {
    let label = u64::from(label((name >> 40) as usize)) * 0x0101_0101_0101_0101;
    let mut out = Vec::with_capacity(bytes + 8);
    let mut word = name.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    while out.len() < bytes {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        out.extend_from_slice(&(word & 0xFCFC_FCFC_FCFC_FCFC | label).to_le_bytes());
    }
    out.truncate(bytes);
    out
}

fn name(connection: usize, side: usize, operation: usize, part: usize) -> u64 {
    ((connection as u64) << 40)
        | ((side as u64) << 32)
        | ((operation as u64) << 8)
        | part as u64
        | 1 << 60
}

/// A send that was started, in the order of its tag.
struct Sent {
    message: usize,
    bytes: usize,
    /// By which receive of its tag.
    received: Option<usize>,
    /// How the sender's operation ended; false: with an error.
    ended: Option<bool>,
}

/// What both programs of a connection know of each other.
#[derive(Default)]
struct Model {
    /// By sending side and tag.
    sends: BTreeMap<(usize, u64), Vec<Sent>>,
    /// By owner of the window and slot: whose content the bytes may be of.
    slots: BTreeMap<(usize, usize), Slot>,
    /// By receiving side: notifications that were sent, and whether they came.
    notifications: BTreeMap<(usize, u64), Notified>,
}

#[derive(Clone, Default)]
struct Slot {
    /// Puts that may have written it: names and bytes.
    writers: Vec<(u64, usize)>,
    /// All of the last one's bytes are there.
    settled: bool,
    /// A put that did not succeed may write still.
    spoilt: bool,
}

#[derive(Default)]
struct Notified {
    came: bool,
    /// Its batch has succeeded.
    applied: bool,
}

/// One connection, as both its programs see it.
struct Scene {
    number: usize,
    strict: bool,
    /// The other side is a liar.
    lied: bool,
    patience: Duration,
    model: Mutex<Model>,
    keys: Mutex<[Option<WindowKey>; 2]>,
    windows: [Region; 2],
    finished: Mutex<[bool; 2]>,
    ready: Barrier,
    done: Barrier,
}

impl Scene {
    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum What {
    Send {
        message: usize,
        tag: u64,
    },
    /// `number`: among the receives of this side.
    Receive {
        number: usize,
        message: usize,
        tag: u64,
    },
    Put {
        operation: usize,
        slots: Vec<usize>,
        bytes: usize,
        notify: bool,
    },
    Get {
        slot: Slot,
        bytes: usize,
    },
}

struct Running {
    what: What,
    transfer: Transfer,
    /// Memory of this side; that of receives and gets has guards.
    regions: Vec<Region>,
    cancel_at: Option<Instant>,
    cancelled: bool,
    started: Instant,
    /// What the clock had jumped by then.
    jumped: Duration,
    deadline: Option<Duration>,
}

impl Running {
    /// How long it has run, less what the clock has jumped.
    fn age(&self) -> Duration {
        self.started
            .elapsed()
            .saturating_sub(system::jumped() - self.jumped)
    }
}

struct Program<'a> {
    scene: &'a Scene,
    side: usize,
    connection: Option<Connection>,
    window: Option<Window>,
    running: Vec<Running>,
    /// Memory that nothing may touch any more.
    left: Vec<Region>,
    revoked: bool,
    receives: usize,
}

pub fn host(bytes: usize) -> Region {
    Region::host(bytes.max(1)).unwrap_or_else(|error| fail(&format!("no memory: {error}")))
}

/// A destination with guards around it.
fn guarded(bytes: usize) -> Region {
    let region = host(bytes + 2 * GUARD);
    fill(&region, EMPTY, "new memory");
    region
}

fn fill(region: &Region, with: u8, what: &str) {
    let filled = region.with_bytes_mut(.., |bytes| bytes.fill(with));
    if let Err(error) = filled {
        fail(&format!("{what} is in use: {error}"));
    }
}

fn contents(region: &Region, what: &str) -> Vec<u8> {
    region
        .with_bytes(.., <[u8]>::to_vec)
        .unwrap_or_else(|error| fail(&format!("{what} is in use: {error}")))
}

impl Program<'_> {
    fn connection(&self) -> &Connection {
        self.connection
            .as_ref()
            .unwrap_or_else(|| fail("the program has no connection"))
    }

    fn run(&mut self, side: &Side) {
        for (_, action) in &side.actions {
            if self.connection.is_none() {
                break;
            }
            note(|| format!("{}.{} {action:?}", self.scene.number, self.side));
            if matches!(action, Action::Revoke) {
                tally::saw("revoke");
            }
            self.act(action);
            self.look();
        }
        while !self.running.is_empty() {
            self.wait_for_one();
        }
    }

    fn deadlines(manner: &Manner) -> Deadlines {
        Deadlines {
            stall: STALL,
            total: manner.deadline,
        }
    }

    fn level(manner: &Manner) -> Level {
        if manner.verified {
            Level::Verified
        } else {
            Level::Placed
        }
    }

    fn act(&mut self, action: &Action) {
        let scene = self.scene;
        match action {
            Action::Send {
                message,
                tag,
                bytes,
                manner,
            } => {
                let region = host(*bytes);
                let name = name(scene.number, self.side, *message, 0);
                region
                    .write_from(0, &content(name, *bytes))
                    .unwrap_or_else(|error| fail(&error.to_string()));
                let slice = region
                    .slice(..*bytes)
                    .unwrap_or_else(|error| fail(&error.to_string()));
                // Before it starts: its bytes may come at once.
                let sent = Sent {
                    message: *message,
                    bytes: *bytes,
                    received: None,
                    ended: None,
                };
                scene
                    .model()
                    .sends
                    .entry((self.side, *tag))
                    .or_default()
                    .push(sent);
                let send = self.connection().send(slice, *tag);
                let started = send
                    .level(Self::level(manner))
                    .deadlines(Self::deadlines(manner))
                    .start();
                let what = What::Send {
                    message: *message,
                    tag: *tag,
                };
                if !self.started(started, what, vec![region], manner) {
                    let mut model = scene.model();
                    if let Some(sends) = model.sends.get_mut(&(self.side, *tag)) {
                        sends.pop();
                    }
                }
            }
            Action::Receive {
                message,
                tag,
                room,
                manner,
            } => {
                let region = guarded(*room);
                let slice = region
                    .slice(GUARD..GUARD + room)
                    .unwrap_or_else(|error| fail(&error.to_string()));
                let receive = self.connection().receive(slice, *tag);
                let started = receive
                    .level(Self::level(manner))
                    .deadlines(Self::deadlines(manner))
                    .start();
                self.receives += 1;
                let what = What::Receive {
                    number: self.receives,
                    message: *message,
                    tag: *tag,
                };
                self.started(started, what, vec![region], manner);
            }
            Action::Put {
                operation,
                slots,
                bytes,
                notify,
                manner,
            } => self.put(*operation, slots, *bytes, *notify, manner),
            Action::Get {
                slot,
                bytes,
                manner,
                ..
            } => self.get(*slot, *bytes, manner),
            Action::Pause(span) => self.pause(*span),
            Action::Settle(most) => {
                while self.running.len() > *most {
                    self.wait_for_one();
                }
            }
            Action::Revoke => {
                if let Some(window) = self.window.take() {
                    match window.revoke(LONGEST) {
                        Ok(()) => self.revoked = true,
                        Err(error) => self.may_fail(&error, "revoking"),
                    }
                }
                self.check_window(false);
            }
            Action::Fork => {
                tally::saw("fork");
                system::fork(|| {
                    self.running.clear();
                    self.window = None;
                    self.connection = None;
                });
            }
            Action::Leave => {
                tally::saw("leave");
                // What runs is cancelled, and nobody hears how it ends.
                for running in std::mem::take(&mut self.running) {
                    self.forget(running);
                }
                self.window = None;
                self.connection = None;
            }
        }
    }

    /// An operation is left to itself: nothing is known of its memory, nor of what the peer gets.
    fn forget(&mut self, running: Running) {
        if let What::Put { slots, .. } = &running.what {
            let mut model = self.scene.model();
            for slot in slots {
                model
                    .slots
                    .entry((1 - self.side, *slot))
                    .or_default()
                    .spoilt = true;
            }
        }
        drop(running);
    }

    fn pause(&mut self, span: Duration) {
        let until = Instant::now() + span;
        while Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(Duration::from_micros(500)));
            self.look();
        }
    }

    /// Slots that an operation of this side uses now.
    fn busy(&self) -> Vec<usize> {
        let slots = self.running.iter().filter_map(|one| match &one.what {
            What::Put { slots, .. } => Some(slots.clone()),
            _ => None,
        });
        slots.flatten().collect()
    }

    fn put(
        &mut self,
        operation: usize,
        slots: &[usize],
        bytes: usize,
        notify: bool,
        manner: &Manner,
    ) {
        let scene = self.scene;
        while self.busy().iter().any(|slot| slots.contains(slot)) {
            self.wait_for_one();
        }
        if self.connection.is_none() {
            return;
        }
        let Some(key) = scene.key(1 - self.side) else {
            return;
        };
        let mut regions = Vec::new();
        let before = scene.model().slots.clone();
        let mut batch = self
            .connection
            .as_ref()
            .map(Connection::batch)
            .unwrap_or_else(|| fail("no connection"));
        for (part, slot) in slots.iter().enumerate() {
            let name = name(scene.number, self.side, operation, part);
            let region = host(bytes);
            region
                .write_from(0, &content(name, bytes))
                .unwrap_or_else(|error| fail(&error.to_string()));
            let slice = region
                .slice(..bytes)
                .unwrap_or_else(|error| fail(&error.to_string()));
            batch = batch.put(slice, &key, (slot * SLOT) as u64);
            regions.push(region);
            let mut model = scene.model();
            let slot = model.slots.entry((1 - self.side, *slot)).or_default();
            slot.writers.push((name, bytes));
            slot.settled = false;
        }
        let told = name(scene.number, self.side, operation, 99);
        if notify {
            batch = batch.notify(&told.to_le_bytes());
            scene
                .model()
                .notifications
                .insert((1 - self.side, told), Notified::default());
        }
        let started = batch
            .level(Self::level(manner))
            .deadlines(Self::deadlines(manner))
            .start();
        let what = What::Put {
            operation,
            slots: slots.to_vec(),
            bytes,
            notify,
        };
        if !self.started(started, what, regions, manner) {
            let mut model = scene.model();
            model.notifications.remove(&(1 - self.side, told));
            for slot in slots {
                let key = (1 - self.side, *slot);
                model
                    .slots
                    .insert(key, before.get(&key).cloned().unwrap_or_default());
            }
        }
    }

    fn get(&mut self, slot: usize, bytes: usize, manner: &Manner) {
        let scene = self.scene;
        while self.busy().contains(&slot) {
            self.wait_for_one();
        }
        if self.connection.is_none() {
            return;
        }
        let Some(key) = scene.key(1 - self.side) else {
            return;
        };
        let before = scene
            .model()
            .slots
            .get(&(1 - self.side, slot))
            .cloned()
            .unwrap_or_default();
        let region = guarded(bytes);
        let slice = region
            .slice(GUARD..GUARD + bytes)
            .unwrap_or_else(|error| fail(&error.to_string()));
        let get = self.connection().get(slice, &key, (slot * SLOT) as u64);
        let started = get
            .level(Self::level(manner))
            .deadlines(Self::deadlines(manner))
            .start();
        // Nothing writes there before it ends: a put to the slot waits, as for one of its own.
        self.started(
            started,
            What::Get {
                slot: before,
                bytes,
            },
            vec![region],
            manner,
        );
        let is_get = |one: &Running| matches!(one.what, What::Get { .. });
        while self.running.iter().any(is_get) {
            self.wait_for_one();
        }
    }

    /// Takes an operation on; whether it runs.
    fn started(
        &mut self,
        started: Result<Transfer, Error>,
        what: What,
        regions: Vec<Region>,
        manner: &Manner,
    ) -> bool {
        match started {
            Ok(transfer) => {
                let now = Instant::now();
                self.running.push(Running {
                    what,
                    transfer,
                    regions,
                    cancel_at: manner.cancel.map(|span| now + span),
                    cancelled: false,
                    started: now,
                    jumped: system::jumped(),
                    deadline: manner.deadline,
                });
                true
            }
            Err(error) => {
                self.may_fail(&error, "starting");
                // Nothing was started.
                for region in &regions {
                    fill(region, SCRIBBLED, "memory of what did not start");
                }
                self.left.extend(regions);
                false
            }
        }
    }

    fn may_fail(&self, error: &Error, what: &str) {
        if matches!(error, Error::Defect { .. } | Error::EngineStuck { .. }) {
            fail(&format!("{what}: {error}"));
        }
        if self.scene.strict {
            fail(&format!(
                "{what} failed, and nothing happened that may not be survived: {error}"
            ));
        }
    }

    /// Looks at everything that runs, once.
    fn look(&mut self) {
        let now = Instant::now();
        let mut at = 0;
        while at < self.running.len() {
            let running = &mut self.running[at];
            if running.cancel_at.is_some_and(|cancel| cancel <= now) {
                running.cancel_at = None;
                running.cancelled = true;
                tally::saw("cancel");
                running.transfer.cancel();
            }
            match running.transfer.test() {
                Some(outcome) => {
                    let running = self.running.remove(at);
                    self.ended(running, outcome);
                }
                None => {
                    self.check_age(at);
                    at += 1;
                }
            }
        }
        self.take_notifications();
    }

    /// Waits a while for the oldest.
    fn wait_for_one(&mut self) {
        let Some(oldest) = self.running.first() else {
            return;
        };
        let next = self.running.iter().filter_map(|one| one.cancel_at).min();
        let left = next.map(|at| at.saturating_duration_since(Instant::now()));
        // Of the oldest no other end is waited for than its own, unless others have to be looked after.
        let most = match self.running.len() {
            1 => self.scene.patience,
            _ => Duration::from_secs(1),
        };
        let span = left.unwrap_or(most).min(most);
        if let Some(outcome) = oldest.transfer.wait_timeout(span) {
            let running = self.running.remove(0);
            self.ended(running, outcome);
        }
        self.look();
    }

    fn check_age(&self, at: usize) {
        let running = &self.running[at];
        let age = running.age();
        let deadline = running.deadline.unwrap_or(Duration::MAX);
        let most = LONGEST.min(deadline.saturating_add(LATE));
        if age > most {
            let status = self.connection.as_ref().map(Connection::status);
            fail(&format!(
                "an operation has no end: {:?} after {age:?}: {status:?}",
                running.transfer
            ));
        }
    }

    fn take_notifications(&mut self) {
        let Some(connection) = &self.connection else {
            return;
        };
        while let Ok(Some(bytes)) = connection.notification(Duration::ZERO) {
            let Ok(told) = <[u8; 8]>::try_from(&bytes[..]) else {
                fail("a notification that nobody sent");
            };
            if self.scene.lied {
                continue;
            }
            let mut model = self.scene.model();
            let Some(known) = model
                .notifications
                .get_mut(&(self.side, u64::from_le_bytes(told)))
            else {
                fail("a notification that nobody sent");
            };
            if std::mem::replace(&mut known.came, true) {
                fail("a notification came twice");
            }
        }
    }

    fn ended(&mut self, running: Running, outcome: Result<Report, Error>) {
        note(|| {
            let outcome = outcome
                .as_ref()
                .map(|report| report.bytes)
                .map_err(ToString::to_string);
            let what = match &running.what {
                What::Send { message, tag } => format!("send {message} tag {tag}"),
                What::Receive { message, tag, .. } => format!("receive {message} tag {tag}"),
                What::Put { operation, .. } => format!("put {operation}"),
                What::Get { .. } => "get".to_owned(),
            };
            format!(
                "{}.{} {what} ended: {outcome:?}",
                self.scene.number, self.side
            )
        });
        let age = running.age();
        let Running {
            what,
            regions,
            transfer,
            deadline,
            cancelled,
            ..
        } = running;
        drop(transfer);
        if let Some(deadline) = deadline
            && age > deadline.saturating_add(LATE)
        {
            fail(&format!(
                "an operation with a deadline of {deadline:?} ended after {age:?}"
            ));
        }
        if deadline.is_some_and(|deadline| outcome.is_err() && age >= deadline) {
            tally::saw("deadline that passed");
        }
        let held = matches!(outcome, Err(Error::MemoryHeld { .. }));
        if let Err(error) = &outcome
            && !cancelled
        {
            self.may_fail(error, "an operation");
        }
        match &what {
            What::Send { message, tag } => self.send_ended(*message, *tag, outcome.is_ok()),
            What::Receive { number, tag, .. } if !held => {
                self.received(*number, *tag, &regions[0], &outcome)
            }
            What::Put {
                operation,
                slots,
                bytes,
                notify,
            } => {
                self.put_ended(*operation, slots, *bytes, *notify, outcome.is_ok());
            }
            What::Get { slot, bytes } if !held => {
                self.got(slot, *bytes, &regions[0], outcome.is_ok())
            }
            What::Receive { .. } | What::Get { .. } => {}
        }
        if held {
            return;
        }
        for region in &regions {
            fill(region, SCRIBBLED, "memory of an operation that has ended");
        }
        self.left.extend(regions);
    }

    fn send_ended(&self, message: usize, tag: u64, succeeded: bool) {
        let mut model = self.scene.model();
        let sends = model.sends.get_mut(&(self.side, tag));
        if let Some(sent) =
            sends.and_then(|sends| sends.iter_mut().find(|one| one.message == message))
        {
            sent.ended = Some(succeeded);
        }
    }

    fn guards(bytes: &[u8], what: &str) {
        let (head, rest) = bytes.split_at(GUARD);
        let tail = &rest[rest.len() - GUARD..];
        if head.iter().chain(tail).any(|byte| *byte != EMPTY) {
            fail(&format!("bytes outside of {what} were written"));
        }
    }

    /// A liar's bytes are never those of memory that nothing was written to.
    fn is_whole(bytes: &[u8]) {
        if bytes.contains(&EMPTY) {
            fail("a liar's bytes have come, it says, and some have not");
        }
    }

    fn received(&self, number: usize, tag: u64, region: &Region, outcome: &Result<Report, Error>) {
        let _aside = memory::aside();
        let bytes = contents(region, "memory of a receive that has ended");
        Self::guards(&bytes, "a receive");
        let inner = &bytes[GUARD..bytes.len() - GUARD];
        let from = 1 - self.side;
        let mut model = self.scene.model();
        let sends = model.sends.entry((from, tag)).or_default();
        match outcome {
            Ok(report) => {
                let count = report.bytes as usize;
                if count > inner.len() {
                    fail("a receive reports more bytes than it has room for");
                }
                // One may write a long message to where it then says a short one went.
                if self.scene.lied {
                    return Self::is_whole(&inner[..count]);
                }
                if inner[count..].iter().any(|byte| *byte != EMPTY) {
                    fail("bytes behind a message were written");
                }
                let fits = |one: &Sent| {
                    let whole = content(name(self.scene.number, from, one.message, 0), one.bytes);
                    one.bytes == count && whole == inner[..count]
                };
                let Some(at) = sends
                    .iter()
                    .position(|one| one.received.is_none() && fits(one))
                else {
                    fail(&format!(
                        "a receive of tag {tag} succeeded with {count} bytes that are no message, or one that came before"
                    ));
                };
                // Shorter ones may be alike.
                if count >= LEAST_TOLD {
                    let is_told = |one: &&Sent| one.bytes >= LEAST_TOLD;
                    let before = sends[..at]
                        .iter()
                        .filter(is_told)
                        .filter_map(|one| one.received)
                        .max();
                    let after = sends[at..]
                        .iter()
                        .filter(is_told)
                        .filter_map(|one| one.received)
                        .min();
                    if before.is_some_and(|other| other > number)
                        || after.is_some_and(|other| other < number)
                    {
                        fail(&format!(
                            "receives of tag {tag} got messages in another order than they were sent"
                        ));
                    }
                }
                sends[at].received = Some(number);
            }
            Err(error) => {
                let is_empty = inner.iter().all(|byte| *byte == EMPTY);
                if error.delivered() == Some(Delivered::None) && !is_empty {
                    fail(&format!(
                        "nothing was delivered, it says, and bytes were written: {error}"
                    ));
                }
                if self.scene.lied {
                    return;
                }
                let candidates: Vec<_> = sends
                    .iter()
                    .map(|one| content(name(self.scene.number, from, one.message, 0), one.bytes))
                    .collect();
                let is_part = |whole: &Vec<u8>| {
                    let mut pairs = inner.iter().zip(whole);
                    let rest = inner.get(whole.len()..).unwrap_or_default();
                    pairs.all(|(byte, of)| *byte == EMPTY || byte == of)
                        && rest.iter().all(|byte| *byte == EMPTY)
                };
                if !is_empty && !candidates.iter().any(is_part) {
                    fail("a failed receive holds bytes that are of no message of its tag");
                }
            }
        }
    }

    fn put_ended(
        &self,
        operation: usize,
        slots: &[usize],
        bytes: usize,
        notify: bool,
        succeeded: bool,
    ) {
        let _aside = memory::aside();
        let mut model = self.scene.model();
        let owner = 1 - self.side;
        for (part, at) in slots.iter().enumerate() {
            let slot = model.slots.entry((owner, *at)).or_default();
            if !succeeded {
                slot.spoilt = true;
                continue;
            }
            if slot.spoilt || self.scene.lied {
                continue;
            }
            slot.settled = true;
            // Right now, its bytes are there.
            let start = GUARD + at * SLOT;
            let there = self.scene.windows[owner].with_bytes(start..start + bytes, <[u8]>::to_vec);
            if let Ok(there) = there
                && there != content(name(self.scene.number, self.side, operation, part), bytes)
            {
                fail("a put has succeeded, and its bytes are not there");
            }
        }
        if notify && succeeded {
            let told = name(self.scene.number, self.side, operation, 99);
            if let Some(known) = model.notifications.get_mut(&(owner, told)) {
                known.applied = true;
            }
        }
    }

    /// What a slot holds when everything is settled: each put over those before it.
    fn expected(slot: &Slot) -> Vec<u8> {
        let mut expected = vec![EMPTY; SLOT];
        for (name, bytes) in &slot.writers {
            expected[..*bytes].copy_from_slice(&content(*name, *bytes));
        }
        expected
    }

    fn got(&self, slot: &Slot, bytes: usize, region: &Region, succeeded: bool) {
        let _aside = memory::aside();
        let all = contents(region, "memory of a get that has ended");
        Self::guards(&all, "a get");
        let inner = &all[GUARD..all.len() - GUARD];
        if self.scene.lied {
            if succeeded {
                Self::is_whole(inner);
            }
            return;
        }
        if succeeded && !slot.spoilt && inner != &Self::expected(slot)[..bytes] {
            fail("a get has succeeded with bytes that are not the window's");
        }
    }

    /// This side's window, once nothing of the peer runs there, or whenever only its guards count.
    fn check_window(&self, settled: bool) {
        let _aside = memory::aside();
        let region = &self.scene.windows[self.side];
        let Ok(bytes) = region.with_bytes(.., <[u8]>::to_vec) else {
            // Nobody says when that ends of a window that was dropped: only that it does.
            if self.revoked {
                fail("a window is in use after its end");
            }
            return;
        };
        Self::guards(&bytes, "a window");
        if self.scene.lied {
            return;
        }
        let model = self.scene.model();
        for at in 0..SLOTS {
            let slot = model
                .slots
                .get(&(self.side, at))
                .cloned()
                .unwrap_or_default();
            let there = &bytes[GUARD + at * SLOT..GUARD + (at + 1) * SLOT];
            if settled && !slot.spoilt && slot.settled && there != Self::expected(&slot) {
                fail("a window holds other bytes than its puts");
            }
            let written = slot
                .writers
                .iter()
                .map(|(_, bytes)| *bytes)
                .max()
                .unwrap_or(0);
            if there[written..].iter().any(|byte| *byte != EMPTY) {
                fail("bytes of a window were written to which nothing was put");
            }
        }
    }

    /// What no operation has any more is as the program left it.
    fn check_left(&self) {
        let _aside = memory::aside();
        for region in &self.left {
            let bytes = contents(region, "memory of an operation that ended long ago");
            if bytes.iter().any(|byte| *byte != SCRIBBLED) {
                fail("memory was written after its operation had ended");
            }
        }
    }
}

pub fn options(plan: &Plan, key: &Auth, manual: bool, encrypt: bool) -> Options {
    let network = TcpNetwork::new(TcpOptions {
        window: plan.window,
        stage_host: plan.stage,
        ..TcpOptions::default()
    });
    Options {
        channels: plan.lanes,
        chunk_bytes: Some(plan.chunk_bytes),
        eager_limit: plan.eager_limit,
        encrypt,
        progress: if manual {
            ProgressMode::Manual
        } else {
            ProgressMode::Background
        },
        ..Options::new(Arc::new(network), key.clone())
    }
}

fn program(
    scene: &Scene,
    side: usize,
    connection: Connection,
    plan: &Side,
    unbroken: bool,
) -> Vec<Region> {
    let region = &scene.windows[side];
    let slots = region.slice(GUARD..GUARD + SLOTS * SLOT);
    let slots = slots.unwrap_or_else(|error| fail(&error.to_string()));
    let window = match connection.expose(slots, Rights::GetAndPut) {
        Ok(window) => Some(window),
        Err(error) if scene.strict => fail(&format!("exposing failed: {error}")),
        // A liar may have ended the connection, or another connection's faults, which have begun.
        Err(_) => None,
    };
    let key = window.as_ref().map(Window::key);
    let mut keys = scene.keys.lock().unwrap_or_else(PoisonError::into_inner);
    if scene.lied {
        // As good as any.
        keys[1 - side].clone_from(&key);
    }
    keys[side] = key;
    drop(keys);
    scene.ready.wait();
    if side == 0 {
        system::begin_faults();
    }
    let mut program = Program {
        scene,
        side,
        connection: Some(connection),
        window,
        running: Vec::new(),
        left: Vec::new(),
        revoked: false,
        receives: 0,
    };
    program.run(plan);
    if !scene.lied {
        scene.set_done(side);
    }
    // Under manual progress, what the peer still waits for comes only while this side makes progress. A flood takes
    // longer than most programs.
    if plan.manual || scene.lied {
        let most = if scene.lied { 10 } else { 120 };
        let until = Instant::now() + Duration::from_secs(most);
        while program.connection.is_some() && !scene.is_done(1 - side) && Instant::now() < until {
            program.look();
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    scene.done.wait();
    if side == 0 {
        // What a lane that was given up still has moves now, while its slots serve other chunks.
        system::heal();
        std::thread::sleep(REVIVED);
    }
    scene.done.wait();
    program.take_notifications();
    program.act(&Action::Revoke);
    if let Some(connection) = program.connection.take() {
        let outcome = connection.close(GOODBYE);
        note(|| format!("{}.{side} closed: {outcome:?}", scene.number));
        // A break at the last moment leaves one side without the other's goodbye.
        if let Err(error) = outcome
            && unbroken
        {
            program.may_fail(&error, "closing");
        }
    }
    scene.done.wait();
    if scene.lied {
        scene.set_done(side);
    }
    program.check_left();
    program.check_window(true);
    if side == 0 && scene.strict {
        scene.check_all();
    }
    program.left
}

/// What came of a client's dialling.
enum Dialled {
    Engine(Connection),
    Liar(Box<Liar>),
}

type Dialling = std::thread::JoinHandle<Option<Dialled>>;

impl Scene {
    fn key(&self, side: usize) -> Option<WindowKey> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)[side]
    }

    fn is_done(&self, side: usize) -> bool {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)[side]
    }

    fn set_done(&self, side: usize) {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)[side] = true;
    }

    /// Nothing happened that may not be survived: everything was received.
    fn check_all(&self) {
        let model = self.model();
        for ((side, tag), sends) in &model.sends {
            if let Some(lost) = sends
                .iter()
                .find(|one| one.received.is_none() && one.bytes >= LEAST_TOLD)
            {
                fail(&format!(
                    "message {} of side {side}, tag {tag}, was not received",
                    lost.message
                ));
            }
        }
        if model
            .notifications
            .values()
            .any(|known| known.applied && !known.came)
        {
            fail("a notification never came");
        }
    }
}

/// All connections were closed: nothing of them stays.
pub fn all_closed() {
    // What is left of the connections ends by itself.
    let until = Instant::now() + Duration::from_secs(60);
    while system::open_sockets() > 0 {
        if Instant::now() > until {
            fail(&format!(
                "{} sockets are open after everything was closed",
                system::open_sockets()
            ));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let in_use = CopyWorker::host().map(|worker| worker.pinned_in_use());
    if !matches!(in_use, Ok(0)) {
        fail(&format!(
            "slots are in use after all connections were closed: {in_use:?}"
        ));
    }
}

/// Runs a plan; returns when everything of it has ended as it should.
pub fn run(plan: &Plan) {
    let key = tcpx::generate_key().unwrap_or_else(|error| fail(&error.to_string()));
    let auth = Auth::Key(key);
    let address: SocketAddr = match plan.near {
        true => ([127, 0, 0, 1], 0).into(),
        false => ([10, 0, 0, 1], 0).into(),
    };
    let mut pairs = Vec::new();
    let mut endpoints = Vec::new();
    let mut accept = |server: Options, dial: &dyn Fn(SocketAddr) -> Dialling| {
        let endpoint = Endpoint::listen(address, server)
            .unwrap_or_else(|error| fail(&format!("listening failed: {error}")));
        let dialling = dial(endpoint.local_addr());
        let accepted = endpoint.accept(plan.patience);
        endpoints.push(endpoint);
        match (dialling.join(), accepted) {
            (Ok(dialled), Ok(accepted)) => dialled.map(|dialled| (dialled, accepted)),
            // Lanes beyond the agreed number may come before that is agreed.
            (Ok(Some(Dialled::Liar(_)) | None), Err(_)) => None,
            (_, Err(error)) => fail(&format!("accepting failed: {error}")),
            (Err(_), _) => fail("the dialling thread panicked"),
        }
    };
    let liar = plan.liar.as_ref().and_then(|(side, manners)| {
        accept(options(plan, &auth, side.manual, false), &|to| {
            let (auth, manners) = (auth.clone(), manners.clone());
            std::thread::spawn(move || {
                let liar = Liar::connect(to, &auth, label(0), manners)?;
                Some(Dialled::Liar(Box::new(liar)))
            })
        })
    });
    for sides in &plan.connections {
        let server = options(plan, &auth, sides[1].manual, plan.encrypt);
        pairs.extend(accept(server, &|to| {
            let client = options(plan, &auth, sides[0].manual, plan.encrypt);
            std::thread::spawn(move || match Endpoint::connect(to, &client) {
                Ok(dialled) => Some(Dialled::Engine(dialled)),
                Err(error) => fail(&format!("connecting failed: {error}")),
            })
        }));
    }
    let scene = |number: usize, lied: bool| {
        let programs = if lied { 1 } else { 2 };
        Scene {
            number,
            strict: plan.strict && !lied,
            lied,
            patience: plan.patience,
            model: Mutex::default(),
            keys: Mutex::default(),
            windows: [(); 2].map(|()| guarded(SLOTS * SLOT)),
            ready: Barrier::new(programs),
            done: Barrier::new(programs),
            finished: Mutex::default(),
        }
    };
    let lied = scene(0, true);
    let scenes: Vec<_> = (1..=plan.connections.len())
        .map(|number| scene(number, false))
        .collect();
    let left: Vec<Region> = std::thread::scope(|threads| {
        let mut running = Vec::new();
        let unbroken = plan.system.faults.is_empty();
        let mut start = |scene, side: usize, connection, actions| {
            running
                .push(threads.spawn(move || program(scene, side, connection, actions, unbroken)));
        };
        let all = scenes.iter().zip(&plan.connections).zip(pairs);
        for ((scene, [client, server]), (dialled, accepted)) in all {
            if let Dialled::Engine(dialled) = dialled {
                start(scene, 0, dialled, client);
            }
            start(scene, 1, accepted, server);
        }
        if let (Some((side, _)), Some((Dialled::Liar(liar), accepted))) = (&plan.liar, liar) {
            start(&lied, 1, accepted, side);
            let lied = &lied;
            threads.spawn(move || {
                liar.run(|| lied.key(1), || lied.is_done(1), || lied.set_done(0));
                lied.set_done(0);
            });
        }
        running
            .into_iter()
            .flat_map(|one| one.join().unwrap_or_else(|_| fail("a program panicked")))
            .collect()
    });
    system::end_faults();
    drop(endpoints);
    all_closed();
    for window in scenes.iter().chain([&lied]).flat_map(|one| &one.windows) {
        contents(window, "a window, after all connections were closed");
    }
    for region in &left {
        let bytes = contents(
            region,
            "memory of an operation, after all connections were closed",
        );
        if bytes.iter().any(|byte| *byte != SCRIBBLED) {
            fail("memory was written after its connection had ended");
        }
    }
}
