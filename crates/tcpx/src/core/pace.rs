//! What may wait for company before it is written: acknowledgements, posted receives, and small
//! messages.
//!
//! A write costs more than a small message. So while a thread of the program makes progress on the
//! connection, or has the lease on it:
//! - in its own turns everything waits until it looks in vain;
//! - a small message waits behind as many others that are on their way, and a posted receive while
//!   the peer has another one that it has not filled: it has enough to do until then;
//! - an acknowledgement waits for the call that usually follows the end of a wait at once, and that
//!   of a get for the next call whenever it comes: no program of the peer waits for it.
//!
//! Who stops looking after the connection writes what is left; if it does not come back, the
//! engine's thread does when the lease ends, after
//! [`PROGRESS_LEASE`](crate::drive::PROGRESS_LEASE).

use std::time::{Duration, Instant};

use tcpx_wire::session::Waiting;

/// What follows within this time follows at once.
const SOON: Duration = Duration::from_micros(20);
/// How often in a row something must have followed at once before it is counted on.
const USUAL: u8 = 4;
/// Most acknowledgements that wait.
const MOST_ACKNOWLEDGEMENTS: usize = 64;
/// Posted receives that are written at once, whatever the peer has left.
const MOST_POSTED: usize = 8;
/// Bytes of small messages that are written at once.
const WORTH_A_WRITE: u64 = 64 << 10;

/// How the program goes about with a connection.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// A thread of the program looks after the connection, or did a moment ago.
    attended: bool,
    /// The work of this turn is done by a thread of the program, which takes another turn.
    driven: bool,
    looks_again: bool,
    /// When the last wait ended, until the program calls again.
    left: Option<Instant>,
    /// Ends of waits in a row that a send or a receive followed at once.
    returns: u8,
}

impl Pace {
    /// Says whether somebody will write soon what waits.
    pub(crate) fn attend(&mut self, attended: bool) {
        self.attended = attended;
    }

    /// The turns that follow are those of a thread that waits, or no more.
    pub(crate) fn drive(&mut self, driven: bool) {
        self.driven = driven;
    }

    pub(super) fn is_driven(&self) -> bool {
        self.driven
    }

    /// Whether the turn goes on, or another one follows it.
    pub(super) fn looks_again(&mut self, again: bool) {
        self.looks_again = again;
    }

    /// The program starts a send or a receive.
    pub(crate) fn calls(&mut self, now: Instant) {
        if let Some(left) = self.left.take() {
            let at_once = now.saturating_duration_since(left) <= SOON;
            self.returns = if at_once {
                self.returns.saturating_add(1)
            } else {
                0
            };
        }
    }

    /// The program waits for something.
    pub(crate) fn waits(&mut self) {
        if self.left.take().is_some() {
            self.returns = 0;
        }
    }

    /// The program has what it waited for.
    pub(crate) fn leaves(&mut self, now: Instant) {
        self.left = Some(now);
    }

    /// Whether `waiting` may go with what comes next; `sends` are under way or waiting.
    pub(super) fn holds(&self, waiting: &Waiting, sends: usize) -> bool {
        if !self.attended || waiting.urgent || waiting.acknowledgements > MOST_ACKNOWLEDGEMENTS {
            return false;
        }
        if self.driven {
            return self.looks_again;
        }
        match (waiting.eager, waiting.posted) {
            (0, 0) => {
                let unawaited = waiting.unawaited > 0;
                self.returns >= USUAL || unawaited && waiting.unawaited == waiting.acknowledgements
            }
            (0, posted) => posted < MOST_POSTED && waiting.open > posted,
            (eager, _) => {
                waiting.eager_bytes < WORTH_A_WRITE && sends.saturating_sub(eager) >= eager
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACKNOWLEDGEMENT: Waiting = Waiting {
        urgent: false,
        acknowledgements: 1,
        unawaited: 0,
        posted: 0,
        open: 0,
        eager: 0,
        eager_bytes: 0,
    };
    const MESSAGE: Waiting = Waiting {
        acknowledgements: 0,
        eager: 1,
        eager_bytes: 4096,
        ..ACKNOWLEDGEMENT
    };

    fn attended() -> Pace {
        let mut pace = Pace::default();
        pace.attend(true);
        pace
    }

    /// A program that calls so long after the end of each wait.
    fn returning(after: Duration) -> Pace {
        let mut pace = attended();
        let mut now = Instant::now();
        for _ in 0..USUAL {
            pace.leaves(now);
            now += after;
            pace.calls(now);
            pace.waits();
        }
        pace.leaves(now);
        pace
    }

    #[test]
    fn an_acknowledgement_waits_for_the_call_that_usually_follows() {
        let mut pace = returning(SOON);
        assert!(pace.holds(&ACKNOWLEDGEMENT, 0));
        let urgent = Waiting {
            urgent: true,
            ..ACKNOWLEDGEMENT
        };
        assert!(!pace.holds(&urgent, 0));
        // It waits again, for something that it began before.
        pace.waits();
        assert!(!pace.holds(&ACKNOWLEDGEMENT, 0));
        assert!(!returning(SOON * 2).holds(&ACKNOWLEDGEMENT, 0));
        assert!(!attended().holds(&ACKNOWLEDGEMENT, 0));
    }

    #[test]
    fn the_acknowledgement_of_a_get_waits_whatever_follows() {
        let unawaited = Waiting {
            unawaited: 1,
            ..ACKNOWLEDGEMENT
        };
        assert!(attended().holds(&unawaited, 0));
        assert!(!Pace::default().holds(&unawaited, 0));
        let with_another = Waiting {
            acknowledgements: 2,
            ..unawaited
        };
        assert!(!attended().holds(&with_another, 0));
    }

    #[test]
    fn what_is_held_back_is_bounded() {
        let many = Waiting {
            acknowledgements: MOST_ACKNOWLEDGEMENTS + 1,
            ..ACKNOWLEDGEMENT
        };
        assert!(!returning(SOON).holds(&many, 0));
        let long = Waiting {
            eager_bytes: WORTH_A_WRITE,
            ..MESSAGE
        };
        assert!(!attended().holds(&long, 2));
        let posted = |posted| Waiting {
            posted,
            open: 1000,
            ..ACKNOWLEDGEMENT
        };
        assert!(attended().holds(&posted(MOST_POSTED - 1), 0));
        assert!(!attended().holds(&posted(MOST_POSTED), 0));
    }

    #[test]
    fn a_message_waits_only_behind_as_many_that_are_on_their_way() {
        let pace = attended();
        assert!(!pace.holds(&MESSAGE, 1) && pace.holds(&MESSAGE, 2));
        let four = Waiting {
            eager: 4,
            ..MESSAGE
        };
        assert!(pace.holds(&four, 8) && !pace.holds(&four, 7));
        assert!(!Pace::default().holds(&MESSAGE, 2));
    }

    #[test]
    fn a_receive_waits_only_while_another_can_be_filled() {
        let posted = |posted, open| Waiting {
            posted,
            open,
            ..ACKNOWLEDGEMENT
        };
        // Whatever the program is used to.
        for pace in [attended(), returning(SOON)] {
            assert!(!pace.holds(&posted(1, 1), 0) && pace.holds(&posted(1, 2), 0));
            assert!(pace.holds(&posted(4, 5), 0) && !pace.holds(&posted(4, 4), 0));
        }
    }

    #[test]
    fn nothing_waits_where_nobody_looks_after_the_connection() {
        let mut pace = returning(SOON);
        pace.attend(false);
        assert!(!pace.holds(&MESSAGE, 2));
        pace.drive(true);
        pace.looks_again(true);
        assert!(!pace.holds(&ACKNOWLEDGEMENT, 0));
    }

    #[test]
    fn a_thread_that_waits_writes_before_it_looks_in_vain() {
        let mut pace = Pace::default();
        pace.attend(true);
        pace.drive(true);
        pace.looks_again(true);
        assert!(pace.holds(&ACKNOWLEDGEMENT, 0) && pace.holds(&MESSAGE, 1));
        pace.looks_again(false);
        assert!(!pace.holds(&ACKNOWLEDGEMENT, 0) && !pace.holds(&MESSAGE, 2));
    }
}
