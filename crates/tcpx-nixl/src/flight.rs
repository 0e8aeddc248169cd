//! One post of a transfer: how far it is, and what it holds.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tcpx::{Transfer, WindowKey};

use crate::abi::Status;
use crate::conn::{Conn, Event};
use crate::memory::Hold;
use crate::plan::Plan;

/// The local memory of a flight, in the order of [`Plan::locals`].
pub(crate) type Holds = Arc<Vec<Arc<Hold>>>;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Flight {
    /// Names it on its connection.
    pub(crate) id: u64,
    pub(crate) plan: Arc<Plan>,
    /// NIXL's notification behind it.
    pub(crate) notice: Option<Vec<u8>>,
    status: AtomicI32,
    inner: Mutex<Inner>,
    /// Every region of the engine over its local memory has a share of this.
    token: Arc<()>,
    started: Instant,
}

#[derive(Debug)]
struct Inner {
    /// Bytes that are not in place yet.
    left: u64,
    holds: Option<Holds>,
    /// What can be cancelled.
    transfers: Vec<Arc<Transfer>>,
    /// The one transfer that the whole flight is, where the poster started it itself.
    direct: Option<Direct>,
    /// The connection that counts its bytes.
    conn: Weak<Conn>,
}

/// A flight that its poster started as one transfer of the engine.
#[derive(Debug)]
pub(crate) struct Direct {
    pub(crate) transfer: Arc<Transfer>,
    pub(crate) conn: Arc<Conn>,
    /// Windows that are free again when it has ended well.
    pub(crate) keys: Vec<(u64, WindowKey)>,
}

/// What the arrival of bytes makes of a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advance {
    /// More bytes are missing, or the flight is over already.
    Going,
    /// Every byte is in place.
    Complete,
    /// More bytes came than were missing.
    TooMany,
}

impl Flight {
    /// `None` if some of the memory was deregistered.
    pub(crate) fn new(id: u64, plan: Arc<Plan>, notice: Option<Vec<u8>>) -> Option<Arc<Self>> {
        let holds: Option<Vec<_>> = plan
            .locals
            .iter()
            .map(|memory| memory.hold().map(Arc::new))
            .collect();
        Some(Arc::new(Self {
            id,
            notice,
            status: AtomicI32::new(Status::IN_PROGRESS.0),
            inner: Mutex::new(Inner {
                left: plan.bytes,
                holds: Some(Arc::new(holds?)),
                transfers: Vec::new(),
                direct: None,
                conn: Weak::new(),
            }),
            plan,
            token: Arc::new(()),
            started: Instant::now(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it stands.
    pub(crate) fn status(&self) -> Status {
        Status(self.status.load(Ordering::Acquire))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.status() != Status::IN_PROGRESS
    }

    /// Its local memory; `None` once it is over.
    pub(crate) fn holds(&self) -> Option<Holds> {
        self.lock().holds.clone()
    }

    /// What regions over its local memory keep a share of.
    pub(crate) fn token(&self) -> Arc<()> {
        Arc::clone(&self.token)
    }

    /// Whether a transfer of the engine may still touch the local memory.
    pub(crate) fn memory_in_use(&self) -> bool {
        Arc::strong_count(&self.token) > 1
    }

    /// Runs `copy` with the local memory, unless the flight is over; it cannot end meanwhile.
    pub(crate) fn with_memory<R>(&self, copy: impl FnOnce(&[Arc<Hold>]) -> R) -> Option<R> {
        let inner = self.lock();
        let holds = inner.holds.as_ref()?;
        Some(copy(holds))
    }

    /// So many more bytes are in place.
    pub(crate) fn advance(&self, bytes: u64) -> Advance {
        let mut inner = self.lock();
        if inner.holds.is_none() {
            return Advance::Going;
        }
        match inner.left.checked_sub(bytes) {
            None => Advance::TooMany,
            Some(0) => {
                inner.left = 0;
                Advance::Complete
            }
            Some(left) => {
                inner.left = left;
                Advance::Going
            }
        }
    }

    /// Bytes that are not in place yet.
    pub(crate) fn left(&self) -> u64 {
        self.lock().left
    }

    /// The connection that is to know when it ends early.
    pub(crate) fn set_conn(&self, conn: &Arc<Conn>) {
        self.lock().conn = Arc::downgrade(conn);
    }

    /// A transfer of the engine that belongs to it; if the flight is over, it is cancelled.
    pub(crate) fn add_transfer(&self, transfer: &Arc<Transfer>) {
        let mut inner = self.lock();
        if inner.holds.is_none() {
            drop(inner);
            transfer.cancel();
            return;
        }
        if inner.transfers.len() >= 64 {
            inner.transfers.retain(|transfer| transfer.test().is_none());
        }
        inner.transfers.push(Arc::clone(transfer));
    }

    /// The whole flight is this one transfer.
    pub(crate) fn set_direct(&self, direct: Direct) {
        self.lock().direct = Some(direct);
    }

    /// Ends it, once. What still runs of it is cancelled unless all went well.
    pub(crate) fn end(&self, status: Status) {
        let mut inner = self.lock();
        if inner.holds.take().is_none() {
            return;
        }
        self.status.store(status.0, Ordering::Release);
        let transfers = std::mem::take(&mut inner.transfers);
        let direct = inner.direct.take();
        let conn = std::mem::take(&mut inner.conn).upgrade();
        drop(inner);
        if status == Status::SUCCESS {
            if let Some(conn) = conn {
                conn.agent
                    .note_rate(self.plan.bytes, self.started.elapsed());
            }
        } else {
            if let Some(conn) = conn {
                conn.post(Event::Look);
            }
            for transfer in transfers {
                transfer.cancel();
            }
            if let Some(direct) = direct {
                direct.transfer.cancel();
                direct.conn.close_windows(direct.keys);
            }
        }
    }

    /// Looks how it stands; a flight of one transfer learns it here.
    pub(crate) fn check(&self) -> Status {
        let status = self.status();
        if status != Status::IN_PROGRESS {
            return status;
        }
        let inner = self.lock();
        let Some(direct) = &inner.direct else {
            return self.status();
        };
        // Makes progress where nobody else does, and never waits.
        let Some(outcome) = direct.transfer.wait_timeout(Duration::ZERO) else {
            return Status::IN_PROGRESS;
        };
        let (conn, keys) = (Arc::clone(&direct.conn), direct.keys.clone());
        drop(inner);
        let status = match outcome {
            Ok(_) => {
                conn.give_back(keys);
                Status::SUCCESS
            }
            Err(error) => conn.failed(&error),
        };
        self.end(status);
        self.status()
    }
}
