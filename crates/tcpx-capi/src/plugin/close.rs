//! Closing comms: foreign code that may not come back.

use std::sync::{Arc, Mutex, OnceLock, TryLockError};

use tcpx_net::plugin::{Closer, Closing, LONG_CLOSE};

use crate::error::{Failure, Outcome};
use crate::handles::{self, Handle};
use crate::plugin::codes::TCPX_TIMEOUT;

/// The one close of a comm, on a thread of its own, and what it returned.
#[derive(Debug, Default)]
pub(crate) struct Close(OnceLock<(Closing, Arc<OnceLock<Outcome<()>>>)>);

impl Close {
    /// Has `close` run, once, which makes the plugin's `call` and needs `state`, and waits for it;
    /// then the handle has ended.
    pub(crate) fn run<T>(
        &self,
        handle: Handle,
        call: &'static str,
        state: &Mutex<T>,
        close: impl FnOnce() -> Outcome<()> + Send + 'static,
    ) -> Outcome<()> {
        let (closing, result) = self.0.get_or_init(|| {
            let result = Arc::new(OnceLock::new());
            let returned = Arc::clone(&result);
            let job = move || _ = returned.set(close());
            (Arc::<Closer>::default().run(call, job), result)
        });
        if closing.wait(LONG_CLOSE) {
            handles::remove([handle]);
            let returned = result.get().cloned();
            return returned.unwrap_or_else(|| Err(Failure::poisoned()));
        }
        let what = match state.try_lock() {
            Err(TryLockError::WouldBlock) => "another call on this comm",
            _ => call,
        };
        Err(Failure::new(
            TCPX_TIMEOUT,
            format!(
                "{what} of the plugin has not returned after {} s: until it does, the plugin has the \
                 comm and the memory registered on it; leave that memory in place, and call again to \
                 go on waiting",
                LONG_CLOSE.as_secs()
            ),
        ))
    }
}
