//! What may wait for company before it is written: acknowledgements, and small messages behind others.
//!
//! A write costs more than a small message. So an acknowledgement waits while the thread that looks
//! after the connection will look again at once, or has answered its last messages, or posted the next receives,
//! at once. Where receives have ended together, the next ones that are posted, with what waits already, leave once there
//! is one for each. And small messages that follow each other closely go together while as many earlier ones are on
//! their way. Nothing waits unless a thread of the program looks after the connection: who stops doing so writes, and
//! if it does not come back, the engine's thread does within [`PROGRESS_LEASE`](crate::drive::PROGRESS_LEASE) at the latest.

use std::time::{Duration, Instant};

use tcpx_wire::session::Waiting;

/// What follows within this time follows at once.
const SOON: Duration = Duration::from_micros(20);
/// How often in a row something must have followed at once before it is counted on.
const USUAL: u8 = 4;
/// Most acknowledgements that wait.
const MOST_ACKNOWLEDGEMENTS: usize = 64;
/// Posted receives that are written at once, though others are likely to follow.
const MOST_POSTED: usize = 8;
/// Bytes of small messages that are written at once.
const WORTH_A_WRITE: u64 = 64 << 10;

/// What a thread of the program last did with the connection.
#[derive(Clone, Copy, Debug)]
enum Did {
    /// It sent something small.
    Sent(Instant),
    /// It left with what it had waited for.
    Left(Instant),
}

/// How the program goes about with a connection.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// A thread of the program looks after the connection, or did a moment ago.
    attended: bool,
    /// The work of this turn is done by a thread of the program, which takes another turn.
    driven: bool,
    looks_again: bool,
    last: Option<Did>,
    /// Ends of waits in a row that a send followed at once.
    replies: u8,
    /// Ends of waits in a row that a receive followed at once.
    renewals: u8,
    /// The last one, until a receive follows.
    left: Option<Instant>,
    /// Sends in a row that another call followed at once.
    company: u8,
    /// Receives that have ended since the program last waited, and that no new one has followed yet.
    owed: u32,
    /// The last new one, while others are owed.
    renewed: Option<Instant>,
    /// Of those that were owed, how many in a row followed the one before at once.
    together: u8,
}

impl Pace {
    /// Says whether somebody will write soon what waits.
    pub(crate) fn attend(&mut self, attended: bool) {
        self.attended = attended;
    }

    pub(super) fn is_attended(&self) -> bool {
        self.attended
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

    /// The program is about to send, once it has what it sends.
    pub(crate) fn answers(&mut self, now: Instant) {
        if let Some(Did::Left(at)) = self.last {
            count(&mut self.replies, at, now);
            self.last = None;
        }
    }

    /// The program starts a send.
    pub(crate) fn sends(&mut self, now: Instant) {
        self.answers(now);
        self.comes_back(now);
        self.last = Some(Did::Sent(now));
    }

    /// The program starts a receive, which may stand between a message and its answer.
    pub(crate) fn receives(&mut self, now: Instant) {
        if let Some(at) = self.left.take() {
            count(&mut self.renewals, at, now);
        }
        self.renews(now);
        self.owed = self.owed.saturating_sub(1);
        self.renewed = (self.owed > 0).then_some(now);
        self.comes_back(now);
    }

    /// The program waits for something.
    pub(crate) fn waits(&mut self, now: Instant) {
        if let Some(Did::Left(_)) = self.last {
            self.replies = 0;
            self.last = None;
        }
        if self.left.take().is_some() {
            self.renewals = 0;
        }
        self.renews(now);
        self.owed = 0;
        self.comes_back(now);
    }

    /// The program has what it waited for.
    pub(crate) fn leaves(&mut self, now: Instant) {
        self.last = Some(Did::Left(now));
        self.left = Some(now);
    }

    /// A receive has ended as it should.
    pub(super) fn received(&mut self) {
        self.owed = self.owed.saturating_add(1);
    }

    /// What was said of the receive before this need wait no longer.
    fn renews(&mut self, now: Instant) {
        if let Some(at) = self.renewed.take() {
            count(&mut self.together, at, now);
        }
    }

    fn comes_back(&mut self, now: Instant) {
        if let Some(Did::Sent(at)) = self.last {
            count(&mut self.company, at, now);
            self.last = None;
        }
    }

    /// Whether `waiting` may go with what comes next; `sends` are under way or waiting.
    pub(super) fn holds(&self, waiting: &Waiting, sends: usize) -> bool {
        if !self.attended || waiting.urgent || waiting.acknowledgements > MOST_ACKNOWLEDGEMENTS {
            return false;
        }
        if self.driven {
            return self.looks_again;
        }
        match waiting.eager {
            0 if waiting.posted > 0 => {
                self.owed > 0 && self.together >= USUAL && waiting.posted < MOST_POSTED
            }
            0 => self.replies >= USUAL || self.renewals >= USUAL,
            held => {
                // Else the peer is done with those on the way before these come.
                let busy = sends.saturating_sub(held) >= held;
                self.company >= USUAL && busy && waiting.eager_bytes < WORTH_A_WRITE
            }
        }
    }
}

/// Counts what followed `at`, if it did at once.
fn count(row: &mut u8, at: Instant, now: Instant) {
    *row = if now.saturating_duration_since(at) <= SOON {
        row.saturating_add(1)
    } else {
        0
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACKNOWLEDGEMENT: Waiting = Waiting {
        urgent: false,
        acknowledgements: 1,
        posted: 0,
        eager: 0,
        eager_bytes: 0,
    };
    const MESSAGE: Waiting = Waiting {
        urgent: false,
        acknowledgements: 0,
        posted: 0,
        eager: 1,
        eager_bytes: 4096,
    };

    fn used_to(mut what: impl FnMut(&mut Pace)) -> Pace {
        let mut pace = Pace::default();
        pace.attend(true);
        for _ in 0..=USUAL {
            what(&mut pace);
        }
        pace
    }

    /// A program that sends one message behind the other.
    fn sending() -> Pace {
        let now = Instant::now();
        used_to(|pace| pace.sends(now))
    }

    /// A program that answers each message at once, with bytes that take so long to be had.
    fn answering(reading: Duration) -> Pace {
        let mut now = Instant::now();
        used_to(move |pace| {
            pace.leaves(now);
            now += SOON / 2;
            pace.receives(now);
            pace.answers(now);
            now += reading;
            pace.sends(now);
        })
    }

    #[test]
    fn bytes_that_come_from_a_gpu_may_take_their_time() {
        let pace = answering(SOON * 2);
        assert!(pace.holds(&ACKNOWLEDGEMENT, 0));
    }

    #[test]
    fn an_acknowledgement_waits_for_the_answer_that_usually_follows() {
        let mut pace = answering(Duration::ZERO);
        assert!(pace.holds(&ACKNOWLEDGEMENT, 0));
        let urgent = Waiting {
            urgent: true,
            ..ACKNOWLEDGEMENT
        };
        assert!(!pace.holds(&urgent, 0));
        pace.leaves(Instant::now());
        pace.waits(Instant::now());
        assert!(!pace.holds(&ACKNOWLEDGEMENT, 0));
    }

    #[test]
    fn an_acknowledgement_waits_for_the_receive_that_usually_follows_and_leaves_with_it() {
        let now = Instant::now();
        let mut pace = used_to(|pace| {
            pace.leaves(now);
            pace.receives(now + SOON / 2);
            pace.waits(now + SOON);
        });
        pace.leaves(now);
        assert!(pace.holds(&ACKNOWLEDGEMENT, 0));
        let granted = Waiting {
            posted: 1,
            ..ACKNOWLEDGEMENT
        };
        assert!(!pace.holds(&granted, 0));
        // It waits again, for something that it began before.
        pace.waits(now);
        assert!(!pace.holds(&ACKNOWLEDGEMENT, 0));
        let mut late = used_to(|pace| {
            pace.leaves(now);
            pace.receives(now + SOON * 2);
        });
        late.leaves(now);
        assert!(!late.holds(&ACKNOWLEDGEMENT, 0));
    }

    #[test]
    fn receives_that_follow_several_ended_ones_leave_together() {
        let mut now = Instant::now();
        let granted = Waiting {
            posted: 1,
            ..ACKNOWLEDGEMENT
        };
        let many = Waiting {
            posted: MOST_POSTED,
            ..ACKNOWLEDGEMENT
        };
        let one_of_two = |pace: &mut Pace, now: Instant| {
            pace.received();
            pace.received();
            pace.leaves(now);
            pace.receives(now);
        };
        let mut pace = used_to(|pace| {
            one_of_two(pace, now);
            assert!(pace.together >= USUAL || !pace.holds(&granted, 0));
            pace.receives(now + SOON);
            pace.waits(now + SOON);
        });
        one_of_two(&mut pace, now);
        assert!(pace.holds(&granted, 0), "the other one follows");
        assert!(!pace.holds(&many, 0));
        pace.attend(false);
        assert!(!pace.holds(&granted, 0));
        pace.attend(true);
        now += SOON;
        pace.receives(now);
        assert!(!pace.holds(&granted, 0));
        // It waits for something else instead, at once.
        one_of_two(&mut pace, now);
        pace.waits(now);
        one_of_two(&mut pace, now);
        assert!(pace.holds(&granted, 0));
        // The other one takes its time: it is no longer counted on.
        pace.receives(now + SOON * 2);
        one_of_two(&mut pace, now + SOON * 2);
        assert!(!pace.holds(&granted, 0));
    }

    #[test]
    fn a_message_waits_for_the_next_only_behind_others_that_are_on_their_way() {
        let pace = sending();
        assert!(!pace.holds(&MESSAGE, 1));
        assert!(pace.holds(&MESSAGE, 2));
        let enough = Waiting {
            eager_bytes: WORTH_A_WRITE,
            ..MESSAGE
        };
        assert!(!pace.holds(&enough, 2));
        let half = Waiting {
            eager: 4,
            ..MESSAGE
        };
        assert!(pace.holds(&half, 8) && !pace.holds(&half, 7));
        assert!(!Pace::default().holds(&MESSAGE, 2));
    }

    #[test]
    fn nothing_waits_where_nobody_looks_after_the_connection() {
        let mut pace = sending();
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
