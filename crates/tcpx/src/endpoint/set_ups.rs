//! Set-ups of accepted peers, each on a thread of its own: a peer that proves itself and then says
//! nothing holds up nobody but itself.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_lanes::lock;
use tcpx_net::ListenerNudge;

use crate::connection::Connection;
use crate::error::Error;

/// How long one that has ended waits for those whose clients were told before: far longer than what
/// those say last is under way. A client that leaves it out holds up others for no longer.
pub(super) const HELD: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    running: usize,
    /// Set-ups by number, in the order in which clients were told that they are connected, or
    /// failed before.
    ordered: VecDeque<(u64, Option<Ended>)>,
    next: u64,
}

/// The outcome of a set-up, and until when it waits for others.
struct Ended(Result<Connection, Error>, Instant);

impl State {
    /// The one that is taken next, if it has ended; else when one that has waits no longer.
    fn first(&self) -> Result<usize, Option<Instant>> {
        let now = Instant::now();
        let ended = (0..).zip(&self.ordered);
        let ended = ended.filter_map(|(at, (_, ended))| Some((at, ended.as_ref()?.1)));
        let first = ended.clone().find(|(at, until)| *at == 0 || *until <= now);
        first
            .map(|(at, _)| at)
            .ok_or_else(|| ended.map(|(_, until)| until).min())
    }
}

/// Set-ups under way, and those that have ended and were not taken.
pub(super) struct SetUps {
    state: Arc<Mutex<State>>,
    nudge: ListenerNudge,
    most: usize,
    held: Duration,
}

impl SetUps {
    /// So many at a time.
    pub(super) fn new(nudge: ListenerNudge, most: usize, held: Duration) -> Self {
        Self {
            state: Arc::default(),
            nudge,
            most,
            held,
        }
    }

    /// The first one, if it has ended.
    pub(super) fn take(&self) -> Option<Result<Connection, Error>> {
        let mut state = lock(&self.state);
        let at = state.first().ok()?;
        state.ordered.remove(at)?.1.map(|ended| ended.0)
    }

    /// Whether the first one has ended.
    pub(super) fn has_ended(&self) -> bool {
        lock(&self.state).first().is_ok()
    }

    /// When one that has ended waits no longer for others.
    pub(super) fn looks_at(&self) -> Option<Instant> {
        lock(&self.state).first().err()?
    }

    pub(super) fn are_full(&self) -> bool {
        lock(&self.state).running >= self.most
    }

    /// Starts one, which ends by its own deadline, and calls what it is given before it tells its
    /// client that this side is ready. Nudges whoever waits at the listener when it has ended.
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
            held: self.held,
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
    held: Duration,
    number: u64,
}

impl Running {
    /// Takes the last place, or fills the one that it has.
    fn place(&self, outcome: Option<Result<Connection, Error>>) {
        let outcome = outcome.map(|outcome| Ended(outcome, Instant::now() + self.held));
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

    use tcpx_net::{Auth, Congestion, ListenOptions, Listener};

    use super::*;

    /// Far more than anything here takes.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A set-up that ends with this name, or panics without one, when it is told to; it has told
    /// its client.
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

    /// How those end that end in the other order, each after `look` has had a look; one of them
    /// panics.
    fn ended(held: Duration, look: impl Fn(&SetUps)) -> Vec<String> {
        let listener = Listener::bind(ListenOptions {
            address: ([127, 0, 0, 1], 0).into(),
            auth: Auth::Insecure,
            one_time: false,
            congestion: Congestion::Automatic,
        });
        let listener = listener.unwrap();
        let set_ups = SetUps::new(listener.nudge(), 16, held);
        let names = [Some("first"), None, Some("second"), Some("third")];
        let running = names.map(|name| start(&set_ups, name));
        let ends_at = Instant::now() + LIMIT;
        for (left, one) in running.iter().enumerate().rev() {
            look(&set_ups);
            one.send(()).unwrap();
            while lock(&set_ups.state).running > left {
                assert!(Instant::now() < ends_at);
                std::thread::yield_now();
            }
        }
        let mut all = Vec::new();
        while set_ups.has_ended() {
            let one = set_ups.take().expect("one that has ended");
            all.push(one.map(drop).unwrap_err().to_string());
        }
        assert_eq!(set_ups.looks_at(), None);
        all
    }

    #[test]
    fn clients_that_were_told_first_are_accepted_first() {
        let held = 10 * LIMIT;
        let all = ended(held, |set_ups| assert!(set_ups.take().is_none()));
        let names = ["first", "second", "third"];
        assert_eq!(all.len(), names.len());
        assert!(
            all.iter().zip(names).all(|(one, name)| one.contains(name)),
            "{all:?}"
        );
    }

    #[test]
    fn a_client_that_says_nothing_holds_others_up_for_a_while() {
        let taken = std::cell::Cell::new(0);
        let left = ended(Duration::ZERO, |set_ups| {
            taken.set(taken.get() + usize::from(set_ups.take().is_some()));
        });
        assert_eq!((taken.get(), left.len()), (2, 1));
    }
}
