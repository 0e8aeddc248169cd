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
    /// Set-ups by number, in the order in which clients were told that they are connected, or failed before; with the
    /// outcome of those that have ended.
    ordered: VecDeque<(u64, Option<Result<Connection, Error>>)>,
    next: u64,
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

    /// The first one, if it has ended.
    pub(super) fn take(&self) -> Option<Result<Connection, Error>> {
        let first = lock(&self.state)
            .ordered
            .pop_front_if(|(_, ended)| ended.is_some());
        first?.1
    }

    /// Whether the first one has ended.
    pub(super) fn has_ended(&self) -> bool {
        let state = lock(&self.state);
        state
            .ordered
            .front()
            .is_some_and(|(_, ended)| ended.is_some())
    }

    pub(super) fn are_full(&self) -> bool {
        lock(&self.state).running >= MOST
    }

    /// Starts one, which ends by its own deadline, and calls what it is given before it tells its client that it is
    /// connected: what is left to do then takes no peer. Nudges whoever waits at the listener when it has ended.
    ///
    /// # Errors
    /// The system has no thread left; the peer was given up.
    pub(super) fn start(
        &self,
        set_up: impl FnOnce(&mut dyn FnMut()) -> Result<Connection, Error> + Send + 'static,
    ) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let running = Running {
            state: Arc::clone(&self.state),
            nudge: self.nudge.clone(),
            number: state.next,
        };
        state.next += 1;
        state.running += 1;
        drop(state);
        std::thread::Builder::new()
            .name("tcpx-set-up".to_owned())
            .spawn(move || {
                let outcome = set_up(&mut || running.place(None));
                running.place(Some(outcome));
            })
            .map_err(|error| Error::system("starting the thread of a set-up", error))?;
        Ok(())
    }
}

impl std::fmt::Debug for SetUps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = lock(&self.state);
        f.debug_struct("SetUps")
            .field("running", &state.running)
            .field("ordered", &state.ordered.len())
            .finish()
    }
}

/// A set-up that runs, whatever becomes of its thread.
struct Running {
    state: Arc<Mutex<State>>,
    nudge: ListenerNudge,
    number: u64,
}

impl Running {
    /// Takes the last place, or fills the one that it has.
    fn place(&self, outcome: Option<Result<Connection, Error>>) {
        let ordered = &mut lock(&self.state).ordered;
        match ordered
            .iter_mut()
            .find(|(number, _)| *number == self.number)
        {
            Some((_, ended)) => *ended = outcome,
            None => ordered.push_back((self.number, outcome)),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.running -= 1;
        // After a panic.
        let is_left =
            |(number, ended): &(u64, Option<_>)| *number != self.number || ended.is_some();
        state.ordered.retain(is_left);
        drop(state);
        self.nudge.nudge();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::{Duration, Instant};

    use tcpx_net::{Auth, Congestion, ListenOptions, Listener};

    use super::*;

    /// Far more than anything here takes.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A set-up that ends with this name, or panics without one, when it is told to; it has told its client.
    fn start(set_ups: &SetUps, name: Option<&'static str>) -> Sender<()> {
        let ((told, tells), (go_on, goes_on)) = (channel(), channel());
        let started = set_ups.start(move |tell| {
            tell();
            told.send(()).unwrap();
            goes_on.recv().unwrap();
            Err(Error::system(
                name.expect("a name"),
                std::io::ErrorKind::Other.into(),
            ))
        });
        started.unwrap();
        tells.recv_timeout(LIMIT).unwrap();
        go_on
    }

    #[test]
    fn clients_that_were_told_first_are_accepted_first() {
        let listener = Listener::bind(ListenOptions {
            address: ([127, 0, 0, 1], 0).into(),
            auth: Auth::Insecure,
            one_time: false,
            congestion: Congestion::Automatic,
        });
        let listener = listener.unwrap();
        let set_ups = SetUps::new(listener.nudge());
        let names = [Some("first"), None, Some("second"), Some("third")];
        let mut running = names.map(|name| start(&set_ups, name));
        let ends_at = Instant::now() + LIMIT;
        running.reverse();
        for (left, one) in (0..running.len()).rev().zip(&running) {
            assert!(set_ups.take().is_none());
            one.send(()).unwrap();
            while lock(&set_ups.state).running > left {
                let waited = listener.accept_unless(ends_at, true, || true);
                assert!(waited.is_ok() && Instant::now() < ends_at);
            }
        }
        for name in names.into_iter().flatten() {
            assert!(set_ups.has_ended());
            let error = set_ups
                .take()
                .expect("one that has ended")
                .map(drop)
                .unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        assert!(!set_ups.has_ended());
    }
}
