//! Windows of this side: memory that the peer may write and read.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tcpx_lanes::lock;
use tcpx_wire::WindowKey;

use crate::connection::Shared;
use crate::error::Error;
use crate::wait::deadline;

/// Memory that is open to the peer of one connection, see
/// [`Connection::expose`](crate::Connection::expose). Dropping it revokes it, without waiting.
pub struct Window {
    connection: Arc<Shared>,
    key: WindowKey,
    uses: Arc<Uses>,
}

impl Window {
    pub(crate) fn new(connection: Arc<Shared>, key: WindowKey, uses: Arc<Uses>) -> Self {
        Self {
            connection,
            key,
            uses,
        }
    }

    /// What lets the peer in; give it to the peer by any means.
    pub fn key(&self) -> WindowKey {
        self.key
    }

    /// Closes the window: the peer starts nothing there any more, and what it has under way ends
    /// early, or is finished where the network cannot cancel. Returns once nothing of the peer
    /// points at the memory.
    ///
    /// # Errors
    /// Something of the peer still runs there after `timeout`. The window is closed all the same.
    pub fn revoke(self, timeout: Duration) -> Result<(), Error> {
        let shared = &self.connection;
        shared.check_process()?;
        shared.revoke(self.key.window);
        let limit = deadline(Instant::now(), timeout);
        let (are_over, sleep) = (|| self.uses.are_over(), |left| self.uses.sleep(left));
        if shared.wait(limit, are_over, sleep) {
            return Ok(());
        }
        let stuck = Error::TimedOut {
            peer: shared.peer_name(),
            what: "the end of what uses the window",
            limit: timeout,
        };
        Err(shared.stuck().unwrap_or(stuck))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.connection.revoke(self.key.window);
        self.key.wipe();
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

/// What the peer does in a window.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    revoked: bool,
}

impl State {
    fn is_over(&self) -> bool {
        self.revoked && self.running == 0
    }
}

impl Uses {
    pub(crate) fn begin(uses: &Arc<Self>) -> Use {
        lock(&uses.state).running += 1;
        Use(Arc::clone(uses))
    }

    /// Nothing new begins any more.
    pub(crate) fn revoke(&self) {
        self.change(|state| state.revoked = true);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        if state.is_over() {
            self.over.notify_all();
        }
    }

    /// The window is closed, and nothing runs there.
    fn are_over(&self) -> bool {
        lock(&self.state).is_over()
    }

    /// Sleeps until that is so, at most for `limit`.
    fn sleep(&self, limit: Duration) {
        let going = |state: &mut State| !state.is_over();
        drop((self.over).wait_timeout_while(lock(&self.state), limit, going));
    }
}

/// One operation of the peer in a window; it is over when this is dropped.
#[derive(Debug)]
pub(crate) struct Use(Arc<Uses>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.change(|state| state.running -= 1);
    }
}
