//! What a side's program does.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Wake};
use std::time::{Duration, Instant};

use tcpx::{Connection, Deadlines, Error, Level, Region, Transfer, Window};
use tcpx_wire::session::RequestError;

use super::Scene;
use super::checks::{GUARD, Notified, SCRIBBLED, Sent, Slot, content, fill, guarded, host, name};
use crate::plan::{Action, Manner, SLOT, Side};
use crate::system::{self, fail, note};
use crate::tally;

/// No operation without an end of its own lives longer, whatever happens: its stall limit, those of
/// the operations that its program began before it, behind which it may wait for room, the limits
/// after which a peer is given up, and what a clock that jumps takes away.
pub(super) const LONGEST: Duration = Duration::from_secs(1800);
/// An operation with a deadline ends so much later at the latest, as long as the threads run that
/// see to it.
pub(super) const LATE: Duration = Duration::from_millis(100);

pub(super) enum What {
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

impl What {
    fn tag(&self) -> Option<u64> {
        match self {
            Self::Send { tag, .. } | Self::Receive { tag, .. } => Some(*tag),
            Self::Put { .. } | Self::Get { .. } => None,
        }
    }
}

pub(super) struct Running {
    pub(super) what: What,
    pub(super) transfer: Transfer,
    /// Memory of this side; that of receives and gets has guards.
    pub(super) regions: Vec<Region>,
    pub(super) cancel_at: Option<Instant>,
    pub(super) cancelled: bool,
    pub(super) started: Instant,
    /// What the clock had jumped by then.
    pub(super) jumped: Duration,
    /// How long its program was busy with waiting for something else.
    pub(super) unseen: Duration,
    pub(super) deadline: Option<Duration>,
    /// Where it has a deadline.
    pub(super) end: Option<Arc<End>>,
}

/// When an operation with a deadline ended.
pub(super) struct End {
    began: Moment,
    ended: OnceLock<Moment>,
}

/// The time without what the clock has jumped, and for how long threads that see to deadlines were
/// stopped until then.
#[derive(Clone, Copy)]
struct Moment(Instant, Duration);

impl Moment {
    fn now() -> Self {
        Self(Instant::now() - system::jumped(), system::stopped())
    }
}

impl Wake for End {
    fn wake(self: Arc<Self>) {
        self.ended.get_or_init(Moment::now);
    }
}

impl End {
    /// Of an operation that begins now.
    fn of(transfer: &Transfer) -> Arc<Self> {
        let end = Arc::new(Self {
            began: Moment::now(),
            ended: OnceLock::new(),
        });
        let waker = Arc::clone(&end).into();
        let polled = transfer.poll_outcome(&mut Context::from_waker(&waker));
        if polled.is_ready() {
            Arc::clone(&end).wake();
        }
        end
    }
}

impl Running {
    /// By how much it has ended, or runs, behind its deadline, while all threads ran.
    pub(super) fn lateness(&self) -> Option<Duration> {
        let end = self.end.as_ref()?;
        let ended = end.ended.get().copied();
        let Moment(at, stopped) = ended.unwrap_or_else(Moment::now);
        let Moment(began, before) = end.began;
        let late = at.checked_duration_since(began.checked_add(self.deadline?)?)?;
        Some(late.saturating_sub(stopped - before))
    }

    /// How long it has run, less what the clock has jumped.
    pub(super) fn age(&self) -> Duration {
        self.started
            .elapsed()
            .saturating_sub(system::jumped() - self.jumped + self.unseen)
    }
}

pub(super) struct Program<'a> {
    pub(super) scene: &'a Scene,
    pub(super) side: usize,
    pub(super) connection: Option<Connection>,
    pub(super) window: Option<Window>,
    pub(super) running: Vec<Running>,
    /// Memory that nothing may touch any more.
    pub(super) left: Vec<Region>,
    pub(super) revoked: bool,
    pub(super) receives: usize,
}

impl Program<'_> {
    fn connection(&self) -> &Connection {
        self.connection
            .as_ref()
            .unwrap_or_else(|| fail("the program has no connection"))
    }

    pub(super) fn run(&mut self, side: &Side) {
        for (_, action) in &side.actions {
            if self.connection.is_none() {
                break;
            }
            note(|| format!("{}.{} {action:?}", self.scene.number, self.side));
            if matches!(action, Action::Revoke) {
                tally::saw("revoke");
            }
            system::goes_on();
            self.act(action);
            self.check_running();
        }
        self.scene.started[self.side].store(true, Ordering::SeqCst);
        if self.scene.closes == Some(self.side) {
            self.close_amid();
        }
        while !self.running.is_empty() {
            self.wait_for_one();
        }
    }

    /// Closes while operations run: those of this side that the peer has what they need for are
    /// waited for.
    fn close_amid(&mut self) {
        while !self.scene.started[1 - self.side].load(Ordering::SeqCst) {
            self.check_running();
            std::thread::sleep(self.scene.looks);
        }
        let Some(connection) = self.connection.take() else {
            return;
        };
        tally::saw("close amid operations");
        self.scene.is_closing.store(true, Ordering::SeqCst);
        if let Err(error) = connection.close(LONGEST) {
            fail(&format!("closing amid operations failed: {error}"));
        }
        for running in std::mem::take(&mut self.running) {
            let Some(outcome) = running.transfer.test() else {
                fail("an operation runs although its connection was closed");
            };
            if let Err(error) = &outcome
                && !matches!(running.what, What::Receive { .. })
            {
                fail(&format!("a close in time has cost an operation: {error}"));
            }
            self.ended(running, outcome);
        }
    }

    fn deadlines(&self, manner: &Manner) -> Deadlines {
        Deadlines {
            stall: self.scene.stall,
            total: manner.deadline,
        }
    }

    pub(super) fn act(&mut self, action: &Action) {
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
                let mut deadlines = self.deadlines(manner);
                if scene.queues {
                    deadlines.stall = manner.stall;
                }
                let started = self.with_room(|connection| {
                    let send = connection.send(slice.clone(), *tag);
                    send.level(manner.level).deadlines(deadlines).start()
                });
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
                let deadlines = self.deadlines(manner);
                let started = self.with_room(|connection| {
                    let receive = connection.receive(slice.clone(), *tag);
                    receive.level(manner.level).deadlines(deadlines).start()
                });
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
                    let began = Instant::now();
                    let revoked = window.revoke(LONGEST);
                    // It has not looked at its operations meanwhile.
                    let waited = began.elapsed();
                    self.running.iter_mut().for_each(|one| one.unseen += waited);
                    match revoked {
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
        if let Some(tag) = running.what.tag() {
            self.scene.model().cancelled.insert((self.side, tag));
        }
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
            self.check_running();
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
        let (mut regions, mut puts) = (Vec::new(), Vec::new());
        let before = scene.model().slots.clone();
        for (part, slot) in slots.iter().enumerate() {
            let name = name(scene.number, self.side, operation, part);
            let region = host(bytes);
            region
                .write_from(0, &content(name, bytes))
                .unwrap_or_else(|error| fail(&error.to_string()));
            let slice = region
                .slice(..bytes)
                .unwrap_or_else(|error| fail(&error.to_string()));
            puts.push((slice, (slot * SLOT) as u64));
            regions.push(region);
            let mut model = scene.model();
            let slot = model.slots.entry((1 - self.side, *slot)).or_default();
            slot.writers.push((name, bytes));
            slot.settled = false;
        }
        let told = name(scene.number, self.side, operation, 99);
        if notify {
            scene
                .model()
                .notifications
                .insert((1 - self.side, told), Notified::default());
        }
        // Notifications wait until the peer's program collects those before them.
        let mut deadlines = self.deadlines(manner);
        if !notify {
            deadlines.stall = manner.stall;
        }
        let started = self.with_room(|connection| {
            let mut batch = connection.batch();
            for (slice, at) in &puts {
                batch = batch.put(slice.clone(), &key, *at);
            }
            if notify {
                batch = batch.notify(&told.to_le_bytes());
            }
            let level = manner.level.max(Level::Placed);
            batch.level(level).deadlines(deadlines).start()
        });
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
        let deadlines = self.deadlines(manner);
        let started = self.with_room(|connection| {
            let get = connection.get(slice.clone(), &key, (slot * SLOT) as u64);
            let level = manner.level.max(Level::Placed);
            get.level(level).deadlines(deadlines).start()
        });
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

    /// Starts an operation, once there is room for it: as others end, and as the peer answers for
    /// those that have ended here. Who has a liar for a peer waits for no answers.
    fn with_room(
        &mut self,
        start: impl Fn(&Connection) -> Result<Transfer, Error>,
    ) -> Result<Transfer, Error> {
        let began = (Instant::now(), system::jumped());
        loop {
            let started = start(self.connection());
            let is_full = matches!(
                started,
                Err(Error::Request {
                    error: RequestError::Full { .. },
                    ..
                })
            );
            if !is_full || self.scene.lied && self.running.is_empty() {
                return started;
            }
            tally::saw("full queue");
            if began.0.elapsed().saturating_sub(system::jumped() - began.1) > LONGEST {
                fail("there is no room for an operation although others have ended");
            }
            match self.running.is_empty() {
                true => {
                    self.check_running();
                    std::thread::sleep(self.scene.looks);
                }
                false => self.wait_for_one(),
            }
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
                let end = manner.deadline.map(|_| End::of(&transfer));
                self.running.push(Running {
                    what,
                    transfer,
                    regions,
                    cancel_at: manner.cancel.map(|span| now + span),
                    cancelled: false,
                    started: now,
                    jumped: system::jumped(),
                    unseen: Duration::ZERO,
                    deadline: manner.deadline,
                    end,
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

    /// Looks at everything that runs, once.
    pub(super) fn check_running(&mut self) {
        let now = Instant::now();
        let mut at = 0;
        while at < self.running.len() {
            let running = &mut self.running[at];
            if running.cancel_at.is_some_and(|cancel| cancel <= now) {
                running.cancel_at = None;
                running.cancelled = true;
                tally::saw("cancel");
                if let Some(tag) = running.what.tag() {
                    self.scene.model().cancelled.insert((self.side, tag));
                }
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
        // Of the oldest no other end is waited for than its own, unless others have to be looked
        // after; notifications are collected well before the peer takes their room for a stall.
        let most = match self.running.len() {
            1 => self.scene.patience.min(Duration::from_secs(5)),
            _ => Duration::from_secs(1),
        };
        let span = left.unwrap_or(most).min(most);
        if let Some(outcome) = oldest.transfer.wait_timeout(span) {
            let running = self.running.remove(0);
            self.ended(running, outcome);
        }
        self.check_running();
    }
}
