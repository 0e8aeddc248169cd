//! Calls of a plugin on a thread of their own: foreign code that does not return must not block the
//! caller.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Why there is no answer.
#[derive(Debug)]
pub enum NoAnswer {
    /// No thread could be started for the call.
    NoThread(io::Error),
    /// The call has not returned. It keeps its thread and its arguments until it does.
    Stuck,
    /// The call panicked.
    Panicked,
}

/// Holds the answer.
///
/// Not a channel: a thread's first wait on a channel registers a destructor, which takes the
/// dynamic linker's lock, and a constructor that hangs holds that lock.
struct Answer<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

enum State<T> {
    Wanted,
    Given(T),
    Panicked,
    /// Nobody waits any more.
    Unwanted,
}

/// The caller's end of it: says that it panicked unless it has said something else.
struct Caller<T>(Arc<Answer<T>>);

/// Runs `work` on a thread of this name and waits for it until `limit` has passed; `late` gets, on
/// that thread, what comes after that.
///
/// # Errors
/// There is no answer in time.
pub fn bounded<T: Send + 'static>(
    name: &str,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce(T) + Send + 'static,
) -> Result<T, NoAnswer> {
    let answer = Arc::new(Answer {
        state: Mutex::new(State::Wanted),
        changed: Condvar::new(),
    });
    let caller = Caller(Arc::clone(&answer));
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            if let Some(unwanted) = caller.give(work()) {
                late(unwanted);
            }
        })
        .map_err(NoAnswer::NoThread)?;
    answer.wait(limit)
}

impl<T> Answer<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, limit: Duration) -> Result<T, NoAnswer> {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            let left = limit.saturating_sub(start.elapsed());
            match std::mem::replace(&mut *state, State::Wanted) {
                State::Given(answer) => return Ok(answer),
                State::Panicked => return Err(NoAnswer::Panicked),
                State::Wanted | State::Unwanted if left.is_zero() => {
                    *state = State::Unwanted;
                    return Err(NoAnswer::Stuck);
                }
                State::Wanted | State::Unwanted => {}
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl<T> Caller<T> {
    /// Returns the answer if the caller no longer waits.
    fn give(&self, answer: T) -> Option<T> {
        let mut state = self.0.lock();
        if !matches!(*state, State::Wanted) {
            return Some(answer);
        }
        *state = State::Given(answer);
        self.0.changed.notify_one();
        None
    }
}

impl<T> Drop for Caller<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if matches!(*state, State::Wanted) {
            *state = State::Panicked;
            self.0.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_answer_in_time_is_given_once_and_a_panic_is_told() {
        let never = |_| panic!("it came in time");
        assert_eq!(bounded("in-time", LONG, || 7, never).unwrap(), 7);
        let panics = bounded("panics", LONG, || -> u8 { panic!("on purpose") }, drop);
        assert!(matches!(panics, Err(NoAnswer::Panicked)));
    }

    #[test]
    fn what_comes_too_late_is_dealt_with_by_the_thread_that_has_it() {
        let (tell, told) = mpsc::channel();
        let (let_go, hold) = mpsc::channel::<()>();
        let late = bounded(
            "too-late",
            Duration::from_millis(10),
            move || hold.recv().unwrap(),
            move |()| {
                let name = std::thread::current().name().map(str::to_owned);
                tell.send(name).unwrap();
            },
        );
        assert!(matches!(late, Err(NoAnswer::Stuck)));
        let_go.send(()).unwrap();
        assert_eq!(
            told.recv_timeout(LONG).unwrap().as_deref(),
            Some("too-late")
        );
    }
}
