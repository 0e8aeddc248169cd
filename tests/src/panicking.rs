//! A network whose code panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx_net::Network;

use crate::tampered::{Tamper, Tampered};

/// Panics in a channel's code.
#[derive(Clone, Debug)]
pub struct Panicking {
    receives_left: usize,
    times: Arc<AtomicUsize>,
}

impl Panicking {
    /// Every poll and close after `receives` receives were posted or chunks placed panics, `times`
    /// times in all.
    pub fn after_receives(
        inner: Arc<dyn Network>,
        receives: usize,
        times: usize,
    ) -> Arc<dyn Network> {
        let tamper = Self {
            receives_left: receives,
            times: Arc::new(AtomicUsize::new(times)),
        };
        Tampered::network(inner, tamper)
    }
}

impl Tamper for Panicking {
    fn receives(&mut self) {
        self.receives_left = self.receives_left.saturating_sub(1);
    }

    fn enters(&mut self) {
        let less = |left: usize| left.checked_sub(1);
        let order = Ordering::SeqCst;
        if self.receives_left == 0 && self.times.fetch_update(order, order, less).is_ok() {
            panic!("made to panic");
        }
    }
}
