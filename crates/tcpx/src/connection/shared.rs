//! What the engine's threads and the program's handles have of a connection.

use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use tcpx_lanes::lock;
use tcpx_memory::awake::{FEW_CORES, cores, give_way};
use tcpx_memory::{Gpu, InContext, MemoryKind, fork};
use tcpx_wire::session::OperationId;

use super::PeerInfo;
use super::patience::Patience;
use super::watching::Watching;
use crate::core::Core;
use crate::drive::ProgressOwner;
use crate::driver::{Driven, DrivenId, Driver, READ, Turn};
use crate::error::Error;
use crate::notifications::Notifications;

/// What the engine and all handles share.
pub(crate) struct Shared {
    pub(super) core: Mutex<Core>,
    pub(super) ended: Condvar,
    pub(crate) driver: Arc<Driver>,
    pub(crate) id: DrivenId,
    pub(super) peer: PeerInfo,
    path: Arc<Mutex<String>>,
    /// The process that opened it, among those that forks made.
    generation: u32,
    pub(super) gpu: Option<Gpu>,
    /// The program looks on: its code is called in the middle of the engine's work.
    observed: bool,
    pub(super) origin: Instant,
    /// Microseconds from `origin` to when the driver last began to work, and 0 when it is idle.
    pub(super) working_since: AtomicU64,
    /// When the engine must look again by itself, in microseconds from `origin`; at most.
    pub(super) due: AtomicU64,
    /// Whether a thread that waits does the engine's work.
    pub(crate) progress_owner: ProgressOwner,
    /// All of it tells by itself when there is something to do.
    pub(crate) announces: bool,
    /// What becomes of callers while the engine is inside foreign code.
    pub(super) patience: Patience,
    /// How the control socket is watched.
    pub(super) watching: Mutex<Watching>,
    /// What is asked of the engine without waiting for its lock.
    pub(super) requests: Requests,
    notifications: Arc<Notifications>,
    /// How the connection ended, once nothing of it is left.
    pub(super) outcome: Mutex<Option<Result<(), Error>>>,
}

/// Requests that the next turn sees to. The engine may hang inside the network's library while it
/// holds its lock; leaving a request never waits for that.
#[derive(Default)]
pub(crate) struct Requests {
    asked: Mutex<Vec<Ask>>,
    /// There may be some; for looking without the lock.
    any: AtomicBool,
}

enum Ask {
    Cancel(OperationId),
    /// Closes a window.
    Revoke(u64),
    /// Closes the connection, within this time.
    Close(Duration),
    /// The same, as the program has let go of it.
    Leave,
}

impl Requests {
    fn add(&self, asks: impl IntoIterator<Item = Ask>) {
        lock(&self.asked).extend(asks);
        self.any.store(true, Ordering::Release);
    }

    /// Passes everything asked so far to the session.
    pub(crate) fn see_to(&self, core: &mut Core) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        self.any.store(false, Ordering::Relaxed);
        let asked = std::mem::take(&mut *lock(&self.asked));
        let now = core.clock.now();
        for ask in asked {
            match ask {
                Ask::Cancel(operation) => core.session.cancel(now, operation),
                Ask::Revoke(window) => core.revoke(window),
                Ask::Close(limit) => core.session.close(now, limit),
                Ask::Leave if core.session.closing() => {}
                Ask::Leave => core.session.close(now, core.bounds.leave),
            }
        }
    }
}

/// Looks at the engine's lock before a thread sleeps until it is free, as waking it takes longer
/// than a turn: on few cores, where another thread has the core between two looks, and elsewhere.
const LOOKS_AT_LOCK: (u32, u32) = (16, 4);

/// The engine's lock. Wakers of transfers that ended while it was held are woken after it.
pub(crate) struct Locked<'a>(Option<MutexGuard<'a, Core>>);

impl<'a> Locked<'a> {
    fn new(core: MutexGuard<'a, Core>) -> Self {
        Self(Some(core))
    }
}

impl Deref for Locked<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        self.0.as_ref().expect("held until this is dropped")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.0.as_mut().expect("held until this is dropped")
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let Some(mut core) = self.0.take() else {
            return;
        };
        if core.program.wakers.is_empty() {
            return;
        }
        let wakers = std::mem::take(&mut core.program.wakers);
        drop(core);
        for waker in wakers {
            if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
                tracing::error!("a waker of the program panicked");
            }
        }
    }
}

impl Shared {
    pub(crate) fn new(
        core: Core,
        driver: Arc<Driver>,
        id: DrivenId,
        peer: PeerInfo,
        patience: Patience,
    ) -> Arc<Self> {
        let origin = core.clock.origin;
        let gpu = core.gpu.device.clone();
        let observed = core.program.observer.is_some();
        let path = Arc::clone(&core.program.path);
        let announces = core.channels.announces();
        let notifications = core.one_sided.notifications();
        Arc::new(Self {
            core: Mutex::new(core),
            ended: Condvar::new(),
            driver,
            id,
            peer,
            path,
            generation: fork::generation(),
            gpu,
            observed,
            origin,
            working_since: AtomicU64::new(0),
            due: AtomicU64::new(0),
            progress_owner: ProgressOwner::new(),
            announces,
            patience,
            watching: Mutex::new(Watching::For(READ)),
            requests: Requests::default(),
            notifications,
            outcome: Mutex::new(None),
        })
    }

    /// Whether a fork's child asks: nothing here may be touched, and no lock be taken, which a
    /// thread of the parent may have held at that moment.
    pub(crate) fn is_inherited(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Refuses a fork's child.
    pub(crate) fn check_process(&self) -> Result<(), Error> {
        match self.is_inherited() {
            true => Err(Error::OtherProcess { what: "connection" }),
            false => Ok(()),
        }
    }

    /// Takes the engine's lock. A thread that panicked inside left the connection unusable, but
    /// never memory in use by others: it is still closed in order.
    pub(crate) fn lock(&self) -> Locked<'_> {
        let looks = match cores() <= FEW_CORES {
            true => LOOKS_AT_LOCK.0,
            false => LOOKS_AT_LOCK.1,
        };
        for _ in 0..looks {
            if let Some(core) = self.try_lock() {
                return core;
            }
            give_way();
        }
        Locked::new(lock(&self.core))
    }

    /// As [`lock`](Self::lock), if nobody has it.
    pub(crate) fn try_lock(&self) -> Option<Locked<'_>> {
        match self.core.try_lock() {
            Ok(core) => Some(Locked::new(core)),
            Err(TryLockError::Poisoned(poisoned)) => Some(Locked::new(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Runs `work` on the engine and then what it led to.
    pub(super) fn with_core<R>(&self, work: impl FnOnce(&mut Core) -> R) -> Result<R, Error> {
        let mut core = self.lock_in_time()?;
        core.clock.tick();
        let foreign = self.patience.foreign;
        let result = core.guarded(|core| {
            let result = work(core);
            if !foreign {
                self.requests.see_to(core);
            }
            result
        });
        let result = match result {
            Ok(result) => result,
            Err(turn) => {
                let defect = core.refusal();
                self.finish_turn(core, turn);
                let peer = self.peer.name();
                return Err(defect.unwrap_or(Error::Closed { peer }));
            }
        };
        if foreign {
            drop(core);
            self.driver.wake(self.id);
            return Ok(result);
        }
        if core.session.waiting().urgent && !self.comes_back(&core) {
            self.leave_to_engine(&mut core);
        }
        let turn = core.guarded_start();
        self.finish_turn(core, turn);
        Ok(result)
    }

    /// Has a request that was left seen to: here if the engine is at rest, else by its thread.
    pub(super) fn nudge(&self) {
        if self.patience.foreign {
            return self.driver.wake(self.id);
        }
        let Some(mut core) = self.try_lock() else {
            return self.driver.wake(self.id);
        };
        let turn = self.turn(&mut core);
        self.finish_turn(core, turn);
    }

    /// Foreign code is called, which only the engine's thread may be inside of.
    pub(crate) fn is_foreign(&self) -> bool {
        self.patience.foreign
    }

    /// Keeps the GPU's context for a thread that does the engine's work, unless that calls the
    /// program's code.
    pub(crate) fn stay_in_context(&self) -> Option<InContext> {
        let gpu = self.gpu.as_ref().filter(|_| !self.observed)?;
        // What the driver refuses here it refuses again where it matters.
        InContext::enter(gpu).ok()
    }

    /// The program's code is called in the middle of the engine's work.
    pub(crate) fn is_observed(&self) -> bool {
        self.observed
    }

    /// This side moves memory of a GPU.
    pub(crate) fn has_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Everything that can be done now.
    pub(crate) fn turn(&self, core: &mut Core) -> Turn {
        core.clock.tick();
        self.working_since
            .store(core.clock.now().0.max(1), Ordering::Relaxed);
        let turn = core.guarded_progress(&self.requests);
        self.working_since.store(0, Ordering::Relaxed);
        if self.progress_owner.is_manual() && core.refusal().is_some() {
            self.end_manual(core);
        }
        if turn.finished {
            // A late signal would keep the driver awake: nobody lowers it any more.
            for descriptor in core.channels.descriptors() {
                self.driver.unwatch(descriptor);
            }
            *lock(&self.outcome) = core.ending.outcome();
            self.ended.notify_all();
        }
        self.set_due(core.clock.due);
        self.wake_sleeper(core);
        turn
    }

    pub(crate) fn cancel(&self, operations: impl Iterator<Item = OperationId>) {
        self.post_requests(operations.map(Ask::Cancel));
    }

    pub(crate) fn revoke(&self, window: u64) {
        self.post_requests([Ask::Revoke(window)]);
    }

    /// Leaves requests, and has them seen to.
    fn post_requests(&self, asks: impl IntoIterator<Item = Ask>) {
        if self.is_inherited() {
            return;
        }
        self.requests.add(asks);
        self.nudge();
    }

    pub(crate) fn notifications(&self) -> &Notifications {
        &self.notifications
    }

    /// Which path the bytes take.
    pub(super) fn path(&self) -> String {
        lock(&self.path).clone()
    }

    pub(crate) fn peer_name(&self) -> SocketAddr {
        self.peer.name()
    }

    /// Whether the connection reaches memory of this kind.
    pub(super) fn check_memory(&self, kind: MemoryKind) -> Result<(), Error> {
        match (kind, &self.gpu) {
            (MemoryKind::Cuda { device }, Some(gpu)) if gpu.ordinal() == device => Ok(()),
            (MemoryKind::Cuda { .. }, other) => Err(Error::Setting {
                what: "memory of a transfer",
                expected: other.as_ref().map_or_else(
                    || "host memory, as the connection was opened without a GPU".to_owned(),
                    |gpu| format!("memory of GPU {}", gpu.ordinal()),
                ),
                arrived: kind.to_string(),
            }),
            _ => Ok(()),
        }
    }

    /// Closes the connection within `limit`; without one, as nobody holds it any more.
    pub(super) fn close(&self, limit: Option<Duration>) {
        if !self.is_inherited() && self.progress_owner.is_manual() {
            self.end_manual(&mut self.lock());
        }
        self.post_requests([limit.map_or(Ask::Leave, Ask::Close)]);
    }
}

impl Driven for Shared {
    fn progress(&self) -> Turn {
        self.make_way();
        let mut core = self.lock();
        self.expire_lease(&mut core);
        let turn = self.turn(&mut core);
        self.watch_control(&mut core);
        match self.progress_owner.is_manual() {
            // This was for what was due; the rest is the program's.
            true => Turn {
                poll: false,
                more: false,
                ..turn
            },
            false => turn,
        }
    }

    fn due(&self) -> Option<Instant> {
        let lease = self.progress_owner.due(self.origin);
        let due = match self.due.load(Ordering::SeqCst) {
            u64::MAX => return lease,
            due => self.due_for_engine(self.origin + Duration::from_micros(due)),
        };
        Some(lease.map_or(due, |lease| lease.min(due)))
    }
}
