//! How a session ends: closed in order, failed, or closed by the peer.

use std::time::Duration;

use super::Session;
use super::action::{Action, OperationId};
use super::error::{ConnectionFailure, EndCause};
use super::one_sided::Origin;
use crate::frame::{Frame, GoodbyeReason, RefuseReason};
use crate::time::Time;

#[derive(Debug)]
pub(super) enum Ending {
    Open,
    /// Finishes what is under way.
    Closing {
        since: Time,
        until: Time,
        goodbye_sent: bool,
    },
    /// Nothing is sent or taken any more; operations may still wait for the data plane.
    Ended {
        failure: Option<ConnectionFailure>,
        reported: bool,
    },
}

impl Session {
    /// It closes, or has ended: the program starts nothing any more.
    pub fn closing(&self) -> bool {
        !matches!(self.ending, Ending::Open)
    }

    /// How the session ends is decided: [`Action::Closed`] follows once every operation ended. The
    /// peer may be gone by then.
    pub fn ended(&self) -> bool {
        matches!(self.ending, Ending::Ended { .. })
    }

    /// Closes in order: receives that match nothing end, transfers under way are finished and
    /// acknowledged, then the peer is told. [`Action::Closed`] follows; after `limit` it ends what is left. Where it
    /// closes already, it takes the longer time of both.
    pub fn close(&mut self, now: Time, limit: Duration) {
        match &mut self.ending {
            Ending::Open => {}
            Ending::Closing { until, .. } => {
                *until = (now + limit).max(*until);
                return;
            }
            Ending::Ended { .. } => return,
        }
        self.ending = Ending::Closing {
            since: now,
            until: now + limit,
            goodbye_sent: false,
        };
        for arrival in self.matching.take_arrivals() {
            self.refuse(arrival, RefuseReason::Shutdown);
        }
        self.refuse_one_sided();
        let waiting = self
            .receives
            .iter()
            .filter(|(_, receive)| receive.origin == Origin::Posted && receive.matched.is_none());
        let mut waiting: Vec<_> = waiting.map(|(operation, _)| *operation).collect();
        waiting.sort_unstable();
        for operation in waiting {
            self.cancel_operation(now, operation, EndCause::Closed);
        }
    }

    /// Says goodbye once nothing is under way.
    pub(super) fn advance_close(&mut self) {
        if let Ending::Closing { goodbye_sent, .. } = &mut self.ending
            && !*goodbye_sent
            && self.sends.is_empty()
            && self.receives.is_empty()
        {
            *goodbye_sent = true;
            self.transmit.push_back(Frame::Goodbye {
                reason: GoodbyeReason::Normal,
                detail: "every operation ended".into(),
            });
        }
    }

    pub(super) fn goodbye_sent(&self) -> bool {
        matches!(
            self.ending,
            Ending::Closing {
                goodbye_sent: true,
                ..
            }
        )
    }

    /// Ends what is left once the time of a close is over; whether it did.
    pub(super) fn check_close(&mut self, now: Time) -> bool {
        let Ending::Closing { since, until, .. } = self.ending else {
            return false;
        };
        let is_over = until <= now;
        if is_over {
            let limit = until.saturating_since(since);
            self.fail(now, ConnectionFailure::CloseTimedOut { limit });
        }
        is_over
    }

    pub(super) fn close_due(&self) -> Option<Time> {
        match self.ending {
            Ending::Closing { until, .. } => Some(until),
            Ending::Open | Ending::Ended { .. } => None,
        }
    }

    /// The connection is lost. Operations whose memory the data plane may still touch get
    /// [`Action::StopData`] and end with [`Session::data_quiet`] (after [`Config::cancel_timeout`](super::Config::cancel_timeout)
    /// at the latest, then with [`Memory::Held`](super::Memory::Held)); all others end at once. [`Action::Closed`] is
    /// the last action.
    pub fn fail(&mut self, now: Time, failure: ConnectionFailure) {
        if self.ended() {
            return;
        }
        match &failure {
            ConnectionFailure::Control { .. } => self.transmit.clear(),
            _ if self.goodbye_sent() => {}
            failure => {
                let reason = match failure {
                    ConnectionFailure::CloseTimedOut { .. } => GoodbyeReason::Shutdown,
                    _ => GoodbyeReason::Error,
                };
                let detail = failure.to_string().into();
                self.transmit.push_back(Frame::Goodbye { reason, detail });
            }
        }
        let cause = EndCause::ConnectionLost {
            failure: failure.clone(),
            standing: None,
        };
        self.end_all(now, &cause, Some(failure));
    }

    pub(super) fn end_all(
        &mut self,
        now: Time,
        cause: &EndCause,
        failure: Option<ConnectionFailure>,
    ) {
        self.ending = Ending::Ended {
            failure,
            reported: false,
        };
        self.matching.clear();
        self.posting.clear();
        self.send_windows.clear();
        self.one_sided.clear();
        self.forget_acks();
        let sends = self.sends.keys().copied().map(OperationId::send);
        let mut all: Vec<_> = sends.chain(self.receives.keys().copied()).collect();
        all.sort_unstable();
        for operation in all {
            let cause = self.cause_of(now, operation, cause);
            let course = Self::course(&mut self.sends, &mut self.receives, operation);
            let Some(course) = course else { continue };
            if course.completed {
                self.timers.disarm(&mut course.clock, operation);
                self.forget(operation);
            } else if course.cancel.is_some() {
                self.settle(now, operation);
            } else {
                self.begin_cancel(now, operation, cause);
            }
        }
    }

    /// `cause` for one operation: a lost connection says where that stood.
    fn cause_of(&self, now: Time, operation: OperationId, cause: &EndCause) -> EndCause {
        match cause {
            EndCause::ConnectionLost { failure, .. } => EndCause::ConnectionLost {
                failure: failure.clone(),
                standing: self.standing(now, operation).map(Box::new),
            },
            other => other.clone(),
        }
    }

    /// Reports the end once every operation ended.
    pub(super) fn report_closed(&mut self) {
        if let Ending::Ended { failure, reported } = &mut self.ending
            && !*reported
            && self.sends.is_empty()
            && self.receives.is_empty()
        {
            *reported = true;
            let failure = failure.take();
            self.actions.push_back(Action::Closed { failure });
        }
    }
}
