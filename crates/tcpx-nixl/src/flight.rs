//! One post of a transfer: how far it is, and what it holds.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tcpx::{Transfer, WindowKey};

use crate::abi::Status;
use crate::conn::Conn;
use crate::lock;
use crate::memory::Hold;
use crate::plan::Plan;

/// The local memory of a flight, in the order of [`Plan::locals`].
pub(crate) type Holds = Arc<Vec<Arc<Hold>>>;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Flight {
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
    holds: Option<Holds>,
    /// The transfer of the engine that it is, once that has started.
    running: Option<Running>,
}

/// What a flight is to the engine.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) transfer: Transfer,
    pub(crate) conn: Arc<Conn>,
    /// Windows that are free again when it has ended well.
    pub(crate) keys: Vec<(u64, WindowKey)>,
    /// A notification that is sent when it has.
    pub(crate) notice: Option<Vec<u8>>,
}

impl Flight {
    /// `None` if some of the memory was deregistered.
    pub(crate) fn new(plan: Arc<Plan>, notice: Option<Vec<u8>>) -> Option<Arc<Self>> {
        let holds: Option<Vec<_>> = plan
            .locals
            .iter()
            .map(|memory| memory.hold().map(Arc::new))
            .collect();
        Some(Arc::new(Self {
            notice,
            status: AtomicI32::new(Status::IN_PROGRESS.0),
            inner: Mutex::new(Inner {
                holds: Some(Arc::new(holds?)),
                running: None,
            }),
            plan,
            token: Arc::new(()),
            started: Instant::now(),
        }))
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
        lock(&self.inner).holds.clone()
    }

    /// What regions over its local memory keep a share of.
    pub(crate) fn token(&self) -> Arc<()> {
        Arc::clone(&self.token)
    }

    /// Whether a transfer of the engine may still touch the local memory.
    pub(crate) fn memory_in_use(&self) -> bool {
        Arc::strong_count(&self.token) > 1
    }

    /// The engine moves it now. If it is over, that ends.
    pub(crate) fn set_running(&self, running: Running) {
        let mut inner = lock(&self.inner);
        if inner.holds.is_some() {
            inner.running = Some(running);
        } else {
            drop(inner);
            running.give_up();
        }
    }

    /// Ends it, once. What still runs of it is cancelled unless all went well.
    pub(crate) fn end(&self, status: Status) {
        let mut inner = lock(&self.inner);
        if inner.holds.take().is_none() {
            return;
        }
        self.status.store(status.0, Ordering::Release);
        let running = inner.running.take();
        drop(inner);
        match running {
            Some(running) if status == Status::SUCCESS => {
                let took = self.started.elapsed();
                running.conn.agent.note_rate(self.plan.bytes, took);
            }
            Some(running) => running.give_up(),
            None => {}
        }
    }

    /// Looks how it stands: that is how its end is learnt.
    pub(crate) fn check(&self) -> Status {
        let status = self.status();
        if status != Status::IN_PROGRESS {
            return status;
        }
        let mut inner = lock(&self.inner);
        let Some(running) = &mut inner.running else {
            return self.status();
        };
        // Makes progress where nobody else does, and never waits.
        let Some(outcome) = running.transfer.test() else {
            return Status::IN_PROGRESS;
        };
        let conn = Arc::clone(&running.conn);
        if let Err(error) = &outcome {
            drop(inner);
            self.end(conn.failed(error));
            return self.status();
        }
        let (keys, notice) = (std::mem::take(&mut running.keys), running.notice.take());
        drop(inner);
        conn.give_back(keys);
        if let Some(notice) = notice {
            conn.send_notice(&notice);
        }
        self.end(Status::SUCCESS);
        self.status()
    }
}

impl Running {
    fn give_up(self) {
        self.transfer.cancel();
        self.conn.close_windows(self.keys);
    }
}
