//! What the programs' operations must have come to: a model of all that was sent, put and told,
//! which the bytes of every destination are compared with.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tcpx::{Connection, Delivered, Error, Region, Report};
use tcpx_memory::CopyWorker;
use tcpx_wire::frame::CancelReason;
use tcpx_wire::session::{ConnectionFailure, DataFailure, EndCause};

use super::Scene;
use super::actions::{LATE, LONGEST, Program, Running, What};
use crate::plan::{SLOT, SLOTS};
use crate::system::{self, fail, note};
use crate::{memory, tally};

pub(super) const GUARD: usize = 64;
/// What lies around and in a destination before anything comes.
const EMPTY: u8 = 0xA5;
/// What the program writes once its memory is its own again.
pub(super) const SCRIBBLED: u8 = 0x5A;

/// Messages of so many bytes tell each other apart.
const LEAST_TOLD: usize = 8;

/// What the last two bits of all payload of a connection are; those of memory that is `EMPTY` are
/// of connection 0.
pub fn label(connection: usize) -> u8 {
    (connection as u8 + 1) & 3
}

/// The bytes of a payload, of which none is `EMPTY`.
pub(super) fn content(name: u64, bytes: usize) -> Vec<u8> {
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
    for byte in out.iter_mut().filter(|byte| **byte == EMPTY) {
        *byte ^= 0x40;
    }
    out
}

pub(super) fn name(connection: usize, side: usize, operation: usize, part: usize) -> u64 {
    ((connection as u64) << 40)
        | ((side as u64) << 32)
        | ((operation as u64) << 8)
        | part as u64
        | 1 << 60
}

/// A send that was started, in the order of its tag.
pub(super) struct Sent {
    pub(super) message: usize,
    pub(super) bytes: usize,
    /// By which receive of its tag.
    pub(super) received: Option<usize>,
    /// How the sender's operation ended; false: with an error.
    pub(super) ended: Option<bool>,
}

/// What both programs of a connection know of each other.
#[derive(Default)]
pub(super) struct Model {
    /// By sending side and tag.
    pub(super) sends: BTreeMap<(usize, u64), Vec<Sent>>,
    /// By owner of the window and slot: whose content the bytes may be of.
    pub(super) slots: BTreeMap<(usize, usize), Slot>,
    /// By receiving side and tag: a receive has ended early. The message of its number comes to a
    /// later one.
    pub(super) ended_early: BTreeSet<(usize, u64)>,
    /// By side and tag: its program has cancelled a send or a receive.
    pub(super) cancelled: BTreeSet<(usize, u64)>,
    /// Those of which messages came in another order than they were sent.
    pub(super) disordered: BTreeSet<(usize, u64)>,
    /// By receiving side: notifications that were sent, and whether they came.
    pub(super) notifications: BTreeMap<(usize, u64), Notified>,
}

#[derive(Clone, Default)]
pub(super) struct Slot {
    /// Puts that may have written it: names and bytes.
    pub(super) writers: Vec<(u64, usize)>,
    /// All of the last one's bytes are there.
    pub(super) settled: bool,
    /// A put that did not succeed may write still.
    pub(super) spoilt: bool,
}

#[derive(Default)]
pub(super) struct Notified {
    pub(super) came: bool,
    /// Its batch has succeeded.
    pub(super) applied: bool,
}

pub fn host(bytes: usize) -> Region {
    Region::host(bytes.max(1)).unwrap_or_else(|error| fail(&format!("no memory: {error}")))
}

/// A destination with guards around it.
pub(super) fn guarded(bytes: usize) -> Region {
    let region = host(bytes + 2 * GUARD);
    fill(&region, EMPTY, "new memory");
    region
}

pub(super) fn fill(region: &Region, with: u8, what: &str) {
    let filled = region.with_bytes_mut(.., |bytes| bytes.fill(with));
    if let Err(error) = filled {
        fail(&format!("{what} is in use: {error}"));
    }
}

pub(super) fn contents(region: &Region, what: &str) -> Vec<u8> {
    region
        .with_bytes(.., <[u8]>::to_vec)
        .unwrap_or_else(|error| fail(&format!("{what} is in use: {error}")))
}

impl Program<'_> {
    pub(super) fn may_fail(&self, error: &Error, what: &str) {
        // Whatever a peer says, nothing of ours contradicts itself; and one of ours says nothing
        // wrong, as what flips on the way is found below the frames.
        let is_wrong = |failure: &ConnectionFailure| {
            let is_stuck = matches!(
                failure,
                ConnectionFailure::DataPlaneStuck { .. }
                    | ConnectionFailure::ChannelStateLost { .. }
            );
            // An operation can end without its connection here.
            is_stuck || matches!(failure, ConnectionFailure::Protocol(_)) && !self.scene.lied
        };
        let is_defect = match error {
            Error::Defect { .. } | Error::EngineStuck { .. } => true,
            Error::ConnectionLost { failure, .. } => is_wrong(failure),
            Error::Operation { error, .. } => match &error.cause {
                EndCause::Data { failure, .. } => matches!(failure, DataFailure::Misreport(_)),
                EndCause::ConnectionLost { failure, .. } => is_wrong(failure),
                _ => false,
            },
            _ => false,
        };
        if is_defect {
            fail(&format!("{what}: {error}"));
        }
        let is_open = || !self.scene.is_closing.load(Ordering::SeqCst);
        if self.scene.strict || self.scene.closes.is_some() && is_open() {
            fail(&format!(
                "{what} failed, and nothing happened that may not be survived: {error}"
            ));
        }
    }

    pub(super) fn check_age(&self, at: usize) {
        let running = &self.running[at];
        let age = running.age();
        if age > LONGEST || running.lateness().is_some_and(|late| late > LATE) {
            let status = self.connection.as_ref().map(Connection::status);
            fail(&format!(
                "an operation has no end: {:?} after {age:?}: {status:?}",
                running.transfer
            ));
        }
    }

    pub(super) fn take_notifications(&mut self) {
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

    pub(super) fn ended(&mut self, running: Running, outcome: Result<Report, Error>) {
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
        let (age, late) = (running.age(), running.lateness());
        let Running {
            what,
            regions,
            transfer,
            deadline,
            cancelled,
            ..
        } = running;
        drop(transfer);
        if let Some(late) = late.filter(|late| *late > LATE) {
            fail(&format!(
                "an operation ended {late:?} after its deadline of {deadline:?}"
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
        if let Err(error) = &outcome
            && let What::Send { tag, .. } | What::Receive { tag, .. } = &what
        {
            self.check_reason(error, *tag);
        }
        match &what {
            What::Send { message, tag } => self.send_ended(*message, *tag, outcome.is_ok()),
            What::Receive { tag, .. } if outcome.is_err() => {
                let ended = (self.side, *tag);
                self.scene.model().ended_early.insert(ended);
            }
            _ => {}
        }
        match &what {
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
            What::Send { .. } | What::Receive { .. } | What::Get { .. } => {}
        }
        if held {
            return;
        }
        for region in &regions {
            fill(region, SCRIBBLED, "memory of an operation that has ended");
        }
        self.left.extend(regions);
    }

    /// Who says that the peer's program has cancelled it is right.
    fn check_reason(&self, error: &Error, tag: u64) {
        let error = match error {
            Error::MemoryHeld { error } => error,
            error => error,
        };
        let reason = match error {
            Error::Operation { error, .. } => match &error.cause {
                EndCause::PeerCancelled { reason, .. } => *reason,
                _ => return,
            },
            _ => return,
        };
        let by_peer = (1 - self.side, tag);
        let is_innocent = !self.scene.model().cancelled.contains(&by_peer);
        if reason == CancelReason::Requested && is_innocent && !self.scene.lied {
            fail(&format!(
                "nobody has cancelled anything of tag {tag}: {error}"
            ));
        }
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
        let candidates: Vec<_> = sends
            .iter()
            .map(|one| content(name(self.scene.number, from, one.message, 0), one.bytes))
            .collect();
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
                let fits = |(one, whole): (&Sent, &Vec<u8>)| {
                    one.received.is_none() && *whole == inner[..count]
                };
                let Some(at) = sends.iter().zip(&candidates).position(fits) else {
                    fail(&format!(
                        "a receive of tag {tag} succeeded with {count} bytes that are no message, or one that came before"
                    ));
                };
                let mut is_disordered = false;
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
                        is_disordered = true;
                    }
                }
                sends[at].received = Some(number);
                if is_disordered {
                    model.disordered.insert((self.side, tag));
                }
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
                // Who reads the sender's memory late finds what its program has made of it, and
                // says that it failed.
                let is_late = |byte: u8| byte == SCRIBBLED && self.scene.is_local;
                let is_part = |whole: &Vec<u8>| {
                    let mut pairs = inner.iter().zip(whole);
                    let rest = inner.get(whole.len()..).unwrap_or_default();
                    pairs.all(|(byte, of)| *byte == EMPTY || byte == of || is_late(*byte))
                        && rest.iter().all(|byte| *byte == EMPTY)
                };
                let is_known = is_empty || candidates.iter().any(is_part);
                if !is_known {
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
    pub(super) fn check_window(&self, settled: bool) {
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
    pub(super) fn check_left(&self) {
        let _aside = memory::aside();
        for region in &self.left {
            let bytes = contents(region, "memory of an operation that ended long ago");
            if bytes.iter().any(|byte| *byte != SCRIBBLED) {
                fail("memory was written after its operation had ended");
            }
        }
    }
}

impl Scene {
    /// Nothing happened that may not be survived: everything was received.
    pub(super) fn check_all(&self) {
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
