//! The thread that looks after lanes: it notices those that hang, and sees to it that dead ones
//! come back.
//!
//! It looks at what is watched while there is something to look at, and sleeps otherwise: whoever
//! gives it something to look at [requests a check](MonitorHandle::request_check). It looks a
//! [`TICK`] later, not at once: most of what it would see is over by then, and short messages would
//! wake it each.

use crate::lock;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks at lanes that may stall.
pub const TICK: Duration = Duration::from_millis(100);
/// Looks further apart than this: this process was stopped, or had no core. What its lanes did
/// meanwhile, and what was said to it, is not known yet.
pub const REST: Duration = Duration::from_millis(500);

/// What a [`Monitor`] looks at.
pub trait Watched: Send {
    /// Looks at it; nothing here waits.
    fn check_liveness(&mut self) -> Look;
}

/// When the next look is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Never: it is gone.
    Gone,
    /// After a check was requested.
    Asleep,
    /// After this time at the latest.
    In(Duration),
}

/// The thread, which runs from the first [`watch`](Self::watch) until this is dropped; a forked
/// child leaves its parent's alone.
#[derive(Debug)]
pub struct Monitor {
    name: &'static str,
    desk: Arc<Desk>,
    process: u32,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread and those who wake it share.
#[derive(Debug, Default)]
struct Desk {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    subjects: Vec<Box<dyn Watched>>,
    /// When there is something to look at.
    due: Option<Instant>,
    stop: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (subjects, due) = (self.subjects.len(), self.due);
        write!(f, "State({subjects} watched, due: {due:?})")
    }
}

/// Whether something is looked at; kept with it, so that another request costs no lock.
#[derive(Debug)]
pub struct MonitorHandle {
    drawn: AtomicBool,
    desk: Arc<Desk>,
}

impl Monitor {
    /// One whose thread will have this name.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            desk: Arc::default(),
            process: std::process::id(),
            thread: Mutex::default(),
        }
    }

    /// Looks at this until it is gone, for the first time soon.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn watch(&self, subject: Box<dyn Watched>) -> io::Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let desk = Arc::clone(&self.desk);
            let builder = std::thread::Builder::new().name(self.name.to_owned());
            *thread = Some(builder.spawn(move || desk.run())?);
        }
        drop(thread);
        lock(&self.desk.state).subjects.push(subject);
        self.wake();
        Ok(())
    }

    /// Has everything looked at soon.
    pub fn wake(&self) {
        self.desk.look_in(Duration::ZERO);
    }

    /// For something that is watched.
    pub fn handle(&self) -> MonitorHandle {
        MonitorHandle {
            drawn: AtomicBool::new(false),
            desk: Arc::clone(&self.desk),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let thread = self
            .thread
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(thread) = thread.take() else {
            return;
        };
        if self.process != std::process::id() {
            // A fork left the thread in the other process, perhaps with the lock in its hands.
            return std::mem::forget(thread);
        }
        lock(&self.desk.state).stop = true;
        self.desk.changed.notify_one();
        if thread.thread().id() != std::thread::current().id() {
            // Never for long: no look waits. A panic has ended the thread too.
            let _ = thread.join();
        }
    }
}

impl MonitorHandle {
    /// After there is something to look at: has it looked at in a [`TICK`] at the latest.
    pub fn request_check(&self) {
        if !self.drawn.load(Ordering::Relaxed) && !self.drawn.swap(true, Ordering::SeqCst) {
            self.desk.look_in(TICK);
        }
    }

    /// As [`request_check`](Self::request_check), where the next look must not wait for its time.
    pub fn hurry(&self) {
        self.drawn.store(true, Ordering::SeqCst);
        self.desk.look_in(Duration::ZERO);
    }

    /// Before looking; whatever came before is seen, whatever comes later draws again.
    pub fn lower(&self) {
        self.drawn.swap(false, Ordering::SeqCst);
    }

    /// The next look is due anyway: spares the others a wake-up.
    pub fn keep(&self) {
        self.drawn.store(true, Ordering::SeqCst);
    }
}

impl State {
    /// Whether that is sooner than before.
    fn look_in(&mut self, time: Duration) -> bool {
        let due = Instant::now() + time;
        let sooner = self.due.is_none_or(|before| due < before);
        if sooner {
            self.due = Some(due);
        }
        sooner
    }
}

impl Desk {
    fn look_in(&self, time: Duration) {
        if lock(&self.state).look_in(time) {
            self.changed.notify_one();
        }
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        while !state.stop {
            let due = state.due;
            state = match due.map(|due| due.saturating_duration_since(Instant::now())) {
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => self.check_subjects(state),
                Some(time) => {
                    let waited = self.changed.wait_timeout(state, time);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Looks at everything, without the lock.
    fn check_subjects<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.due = None;
        let mut subjects = std::mem::take(&mut state.subjects);
        drop(state);
        let mut next: Option<Duration> = None;
        subjects.retain_mut(|subject| match subject.check_liveness() {
            Look::Gone => false,
            Look::Asleep => true,
            Look::In(time) => {
                next = Some(next.map_or(time, |other| other.min(time)));
                true
            }
        });
        let mut state = lock(&self.state);
        state.subjects.append(&mut subjects);
        if let Some(time) = next {
            state.look_in(time);
        }
        state
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Says that it was looked at, and what it was told to.
    struct Told(Sender<()>, Receiver<Look>);

    impl Watched for Told {
        fn check_liveness(&mut self) -> Look {
            // What is told after this look was seen is for the next one.
            let told = self.1.try_recv().unwrap_or(Look::Asleep);
            // The test may be over.
            let _ = self.0.send(());
            told
        }
    }

    fn watched(monitor: &Monitor) -> (Receiver<()>, Sender<Look>) {
        let (looked, looks) = channel();
        let (tell, told) = channel();
        tell.send(Look::Asleep).expect("it is there");
        let told = Box::new(Told(looked, told));
        monitor.watch(told).expect("a thread");
        looks.recv().expect("a look");
        (looks, tell)
    }

    #[test]
    fn a_request_brings_one_check_until_it_is_lowered() {
        let monitor = Monitor::new("test");
        let monitor_handle = monitor.handle();
        let (looks, tell) = watched(&monitor);
        let before = Instant::now();
        monitor_handle.request_check();
        looks.recv().unwrap();
        assert!(before.elapsed() >= TICK);
        monitor_handle.request_check();
        monitor_handle.keep();
        monitor_handle.request_check();
        assert!(looks.recv_timeout(TICK).is_err());
        monitor_handle.hurry();
        looks.recv().unwrap();
        monitor_handle.lower();
        tell.send(Look::In(Duration::ZERO)).unwrap();
        monitor_handle.request_check();
        // The second one by itself.
        looks.recv().unwrap();
        looks.recv().unwrap();
    }

    #[test]
    fn what_is_gone_is_dropped_as_is_all_with_the_monitor() {
        let monitor = Monitor::new("test");
        let (gone, tell) = watched(&monitor);
        let (stays, _tell) = watched(&monitor);
        tell.send(Look::Gone).unwrap();
        monitor.wake();
        while gone.recv().is_ok() {}
        drop(monitor);
        while stays.recv().is_ok() {}
    }
}
