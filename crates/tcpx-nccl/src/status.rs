//! What `tcpx status` tells of a process under NCCL: its comms, and the lanes to each peer process.

use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use nccl_net::export::{Log, NetError};
use tcpx_lanes::lock;
use tcpx_status::{
    ConnectionReport, Counters, Description, Ended, OperationReport, Registration, Source,
};

/// An operation without progress for this long counts as stalled.
pub(crate) const STALLED: Duration = Duration::from_secs(1);

/// How long the status waits for a call of NCCL's to come back.
const CALL_LIMIT: Duration = Duration::from_millis(200);

/// Has the status of this process tell of a comm or of lanes.
pub(crate) fn register(source: Weak<dyn Source>) -> Registration {
    // The thread that answers runs code of this file.
    crate::pin::keep_loaded();
    tcpx_status::follow_listeners(crate::held::follow);
    tcpx_status::register(source, true)
}

/// What a comm keeps.
pub(crate) trait Comm: Debug + Send {
    /// Says what it is and where its operations stand.
    fn describe(&self, report: &mut ConnectionReport);

    /// What it has counted.
    fn counters(&self) -> Counters;

    /// The error that ended it.
    fn failure(&self) -> Option<&NetError>;
}

/// A comm of the host program, of which the status tells until it is dropped. Then nothing of it is
/// left, whoever looks at it meanwhile.
#[derive(Debug)]
pub(crate) struct Told<C: Comm + 'static> {
    comm: Arc<KeptComm<C>>,
    registration: Registration,
    /// The error that ended it is among the last errors of the process.
    has_failed: AtomicBool,
}

#[derive(Debug)]
struct KeptComm<C> {
    peer: String,
    since: Instant,
    /// `None` once the comm is dropped.
    state: Mutex<Option<C>>,
}

/// A comm, locked.
pub(crate) struct Held<'a, C>(MutexGuard<'a, Option<C>>);

const OPEN: &str = "a comm is there until its owner drops it";

impl<C> Deref for Held<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        self.0.as_ref().expect(OPEN)
    }
}

impl<C> DerefMut for Held<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        self.0.as_mut().expect(OPEN)
    }
}

impl<C: Comm> Told<C> {
    /// A comm that is connected to `peer`.
    pub(crate) fn new(state: C, peer: io::Result<SocketAddr>) -> Self {
        let comm = Arc::new(KeptComm {
            peer: peer.map_or_else(|error| error.to_string(), |peer| peer.to_string()),
            since: Instant::now(),
            state: Mutex::new(Some(state)),
        });
        let source = Arc::downgrade(&comm);
        Self {
            registration: register(source),
            comm,
            has_failed: AtomicBool::new(false),
        }
    }

    pub(crate) fn lock(&self) -> Held<'_, C> {
        Held(lock(&self.comm.state))
    }

    /// The answer to a call, whose error the status tells of once.
    pub(crate) fn answer<T>(&self, result: Result<T, NetError>) -> Result<T, NetError> {
        result.inspect_err(|error| {
            if !self.has_failed.swap(true, Ordering::Relaxed) {
                self.registration
                    .failed(self.comm.peer.clone(), error.to_string());
            }
        })
    }

    /// Does the last of it and takes it out: nobody finds it any more. `None` where that was done
    /// before.
    pub(crate) fn end<R>(&self, last: impl FnOnce(&mut C) -> R) -> Option<(C, R)> {
        let (state, result) = {
            let mut state = lock(&self.comm.state);
            let result = last(state.as_mut()?);
            (state.take()?, result)
        };
        let (counters, lost) = (state.counters(), state.failure().is_some());
        self.registration.ended(|| Ended {
            counters,
            lost,
            refused: 0,
        });
        Some((state, result))
    }

    /// For who looks at it now and then.
    pub(crate) fn glance(&self) -> Glance<C> {
        Glance(Arc::downgrade(&self.comm))
    }
}

/// A comm that somebody looks at now and then, who does not keep it.
#[derive(Debug)]
pub(crate) struct Glance<C>(Weak<KeptComm<C>>);

impl<C> Glance<C> {
    /// Looks at it; `busy` where its host is at it, `gone` where it is dropped.
    pub(crate) fn with_comm<T>(&self, act: impl FnOnce(&mut C) -> T, busy: T, gone: T) -> T {
        let Some(comm) = self.0.upgrade() else {
            return gone;
        };
        let mut state = match comm.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return busy,
        };
        state.as_mut().map_or(gone, act)
    }
}

impl<C: Comm> Drop for Told<C> {
    fn drop(&mut self) {
        // Taken out first: a thread that looks may have a share of what it lay in for longer.
        drop(self.end(|_| ()));
    }
}

impl<C: Comm> Source for KeptComm<C> {
    fn describe(&self) -> Option<Description> {
        let mut report = ConnectionReport {
            peer: self.peer.clone(),
            network: "NCCL".to_owned(),
            up_seconds: self.since.elapsed().as_secs_f64(),
            ..ConnectionReport::default()
        };
        let asked = Instant::now();
        loop {
            match self.state.try_lock() {
                Ok(state) => {
                    let state = state.as_ref()?;
                    state.describe(&mut report);
                    report.counters = state.counters();
                    report.stuck = state.failure().map(ToString::to_string);
                }
                Err(TryLockError::WouldBlock) if asked.elapsed() < CALL_LIMIT => {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
                Err(_) => report.stuck = Some("a call of NCCL's does not come back".to_owned()),
            }
            return Some(Description::Connection(Box::new(report)));
        }
    }
}

/// An operation that runs.
pub(crate) struct Running<'a> {
    pub(crate) kind: &'static str,
    pub(crate) sequence: u64,
    pub(crate) done: u64,
    pub(crate) total: u64,
    /// Since the comm last moved.
    pub(crate) waited: Duration,
    /// Who must act next.
    pub(crate) next: &'a str,
    /// It has begun, or the peer is asked for it.
    pub(crate) is_due: bool,
}

impl Running<'_> {
    /// Adds it to what is told of its comm.
    pub(crate) fn describe(&self, report: &mut ConnectionReport) {
        report.operations_running += 1;
        report.operations_stalled += u64::from(self.is_due && self.waited >= STALLED);
        let Self {
            kind,
            sequence,
            done,
            total,
            next,
            ..
        } = self;
        let waited_seconds = self.waited.as_secs_f64();
        report.operations.push(OperationReport {
            kind: format!("{kind} {sequence}"),
            tag: None,
            bytes_done: *done,
            bytes_total: *total,
            waited_seconds,
            next: (*next).to_owned(),
            line: format!(
                "{kind} {sequence}: {done} of {total} bytes, {waited_seconds:.1} s without progress; next: {next}"
            ),
        });
    }
}

/// Tells the log of a comm that has stalled what its status tells of its first operation. A receive
/// may be posted long before its message: worth a line, not a warning.
pub(crate) fn report_stall(log: &Log, describe: impl FnOnce(&mut ConnectionReport)) {
    let mut report = ConnectionReport::default();
    describe(&mut report);
    let first = report.operations.first();
    let line = first.map_or("its lanes have yet to end", |first| &first.line);
    let text = format!("{}: {line}", report.path);
    match report.operations_stalled {
        0 => log.info(&text),
        _ => log.warn(&text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A comm that says when it is gone, as one does that lends memory of its host to lanes.
    #[derive(Debug)]
    struct Lender(Arc<AtomicBool>);

    impl Comm for Lender {
        fn describe(&self, _: &mut ConnectionReport) {}

        fn counters(&self) -> Counters {
            Counters::default()
        }

        fn failure(&self) -> Option<&NetError> {
            None
        }
    }

    impl Drop for Lender {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }

    #[test]
    fn a_comm_is_gone_when_its_close_returns_whoever_looks() {
        let is_gone = Arc::new(AtomicBool::new(false));
        let comm = Told::new(
            Lender(Arc::clone(&is_gone)),
            Err(io::Error::other("no peer")),
        );
        let glance = comm.glance();
        // The shares of a scrape and of the monitor, which have yet to look.
        let shares = [glance.0.upgrade(), Weak::clone(&glance.0).upgrade()];
        let source = shares[0].as_ref().unwrap();
        assert!(source.describe().is_some());
        drop(comm);
        assert!(is_gone.load(Ordering::Acquire));
        assert!(source.describe().is_none());
        assert_eq!(glance.with_comm(|_| "open", "busy", "gone"), "gone");
    }
}
