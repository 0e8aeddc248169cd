//! Set-ups of accepted peers, each on a thread of its own: a peer that proves itself and then says
//! nothing holds up nobody but itself.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use tcpx_lanes::lock;
use tcpx_net::ListenerNudge;

use crate::connection::Connection;
use crate::error::Error;

/// Most set-ups at a time; further peers wait at the listener.
const MOST: usize = 16;

#[derive(Default)]
struct State {
    running: usize,
    ended: VecDeque<Result<Connection, Error>>,
}

/// Set-ups under way, and those that have ended and were not taken.
pub(super) struct SetUps {
    state: Arc<Mutex<State>>,
    nudge: ListenerNudge,
}

impl SetUps {
    pub(super) fn new(nudge: ListenerNudge) -> Self {
        Self {
            state: Arc::default(),
            nudge,
        }
    }

    /// One that has ended.
    pub(super) fn take(&self) -> Option<Result<Connection, Error>> {
        lock(&self.state).ended.pop_front()
    }

    /// Whether one has ended.
    pub(super) fn has_ended(&self) -> bool {
        !lock(&self.state).ended.is_empty()
    }

    pub(super) fn are_full(&self) -> bool {
        lock(&self.state).running >= MOST
    }

    /// Starts one, which ends by its own deadline; nudges whoever waits at the listener then.
    ///
    /// # Errors
    /// The system has no thread left; the peer was given up.
    pub(super) fn start(
        &self,
        set_up: impl FnOnce() -> Result<Connection, Error> + Send + 'static,
    ) -> Result<(), Error> {
        let running = Running {
            state: Arc::clone(&self.state),
            nudge: self.nudge.clone(),
        };
        lock(&self.state).running += 1;
        std::thread::Builder::new()
            .name("tcpx-set-up".to_owned())
            .spawn(move || running.end(set_up()))
            .map_err(|error| Error::system("starting the thread of a set-up", error))?;
        Ok(())
    }
}

impl std::fmt::Debug for SetUps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = lock(&self.state);
        f.debug_struct("SetUps")
            .field("running", &state.running)
            .field("ended", &state.ended.len())
            .finish()
    }
}

/// A set-up that runs, whatever becomes of its thread.
struct Running {
    state: Arc<Mutex<State>>,
    nudge: ListenerNudge,
}

impl Running {
    fn end(self, outcome: Result<Connection, Error>) {
        lock(&self.state).ended.push_back(outcome);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        lock(&self.state).running -= 1;
        self.nudge.nudge();
    }
}
