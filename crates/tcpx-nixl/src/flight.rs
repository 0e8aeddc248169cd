//! One post of a transfer, and how far it is.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tcpx::{Error, Transfer};
use tcpx_wire::frame::RefuseReason;
use tcpx_wire::session::EndCause;

use crate::abi::Status;
use crate::conn::{Conn, Work};
use crate::lock;
use crate::plan::Plan;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) plan: Arc<Plan>,
    /// NIXL's notification behind it.
    pub(crate) notice: Option<Vec<u8>>,
    status: AtomicI32,
    course: Mutex<Course>,
    /// Its windows were asked for anew.
    is_second: AtomicBool,
    /// Every region of the engine over its local memory has a share of this.
    token: Arc<()>,
    started: Instant,
}

/// How far a flight is. None of it keeps memory registered: the engine does, while a transfer may
/// touch the memory.
#[derive(Debug)]
enum Course {
    /// For a connection, windows or room.
    Waiting,
    Running(Running),
    Over,
}

/// What a flight is to the engine.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) transfer: Transfer,
    pub(crate) conn: Arc<Conn>,
    /// A notification that is sent when it has.
    pub(crate) notice: Option<Vec<u8>>,
}

impl Flight {
    pub(crate) fn new(plan: Arc<Plan>, notice: Option<Vec<u8>>) -> Arc<Self> {
        Arc::new(Self {
            notice,
            status: AtomicI32::new(Status::IN_PROGRESS.0),
            course: Mutex::new(Course::Waiting),
            is_second: AtomicBool::new(false),
            plan,
            token: Arc::new(()),
            started: Instant::now(),
        })
    }

    /// How it stands.
    pub(crate) fn status(&self) -> Status {
        Status(self.status.load(Ordering::Acquire))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.status() != Status::IN_PROGRESS
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
        let mut course = lock(&self.course);
        if matches!(*course, Course::Over) {
            drop(course);
            running.transfer.cancel();
        } else {
            *course = Course::Running(running);
        }
    }

    /// Ends it, once. What still runs of it is cancelled unless all went well.
    pub(crate) fn end(&self, status: Status) {
        let mut course = lock(&self.course);
        let before = std::mem::replace(&mut *course, Course::Over);
        if matches!(before, Course::Over) {
            return;
        }
        self.status.store(status.0, Ordering::Release);
        drop(course);
        match before {
            Course::Running(running) if status == Status::SUCCESS => {
                let took = self.started.elapsed();
                running.conn.agent.note_rate(self.plan.bytes, took);
            }
            Course::Running(running) => running.transfer.cancel(),
            Course::Waiting | Course::Over => {}
        }
    }

    /// Looks how it stands: that is how its end is learnt.
    pub(crate) fn check(self: &Arc<Self>) -> Status {
        let status = self.status();
        if status != Status::IN_PROGRESS {
            return status;
        }
        let mut course = lock(&self.course);
        let Course::Running(running) = &mut *course else {
            return self.status();
        };
        // Makes progress where nobody else does, and never waits.
        let Some(outcome) = running.transfer.test() else {
            return Status::IN_PROGRESS;
        };
        let conn = Arc::clone(&running.conn);
        if let Err(error) = &outcome {
            if is_window_gone(error) && !self.is_second.swap(true, Ordering::Relaxed) {
                *course = Course::Waiting;
                drop(course);
                conn.forget_windows(&self.plan.remotes);
                conn.submit(Work::Flight(Arc::clone(self)));
                return self.status();
            }
            drop(course);
            self.end(conn.failed(error));
            return self.status();
        }
        let notice = running.notice.take();
        drop(course);
        if let Some(notice) = notice {
            conn.send_notice(&notice);
        }
        self.end(Status::SUCCESS);
        self.status()
    }
}

/// Whether the owner of the memory has closed a window that this side knows.
fn is_window_gone(error: &Error) -> bool {
    let reason = RefuseReason::UnknownWindow;
    matches!(error, Error::Operation { error, .. } if error.cause == EndCause::Refused { reason })
}
