//! How a connection ends. A panic in the engine or in a network ends one connection, never the
//! thread that others live on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use tcpx_net::ChannelError;

use super::Core;
use crate::connection::Requests;
use crate::control::ControlEnd;
use crate::driver::{START, Turn};
use crate::error::Error;
use crate::event::Event;

/// Time for the last frames to reach the socket, and the peer, once the session has ended: both
/// have said goodbye, and a peer that keeps its end open holds nobody.
const LAST_WORDS: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(crate) struct Ending {
    /// How, and since when; `Ok` after an orderly goodbye.
    how: Option<(Result<(), Error>, Instant)>,
    /// The peer closed its end of the control stream.
    pub(super) peer_closed: bool,
    /// Closed, quiet, and every operation ended.
    finished: bool,
    /// It has panicked.
    is_defect: bool,
}

impl Ending {
    pub(super) fn has_begun(&self) -> bool {
        self.how.is_some()
    }

    /// Not in order.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self.how, Some((Err(_), _)))
    }

    /// Whether nothing is left of the connection.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    /// How the connection ended, once nothing of it is left.
    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        let (how, _) = self.how.as_ref().filter(|_| self.finished)?;
        Some(how.clone())
    }

    /// Nothing is expected of the control connection any more.
    pub(crate) fn control_done(&self) -> bool {
        self.finished || self.is_loss() || self.peer_closed
    }
}

impl Core {
    /// The session or the connection is over.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.has_begun() || self.session.ended()
    }

    /// Why no new operation can start.
    pub(crate) fn refusal(&self) -> Option<Error> {
        let (how, _) = self.ending.how.as_ref()?;
        let closed = Error::Closed { peer: self.peer };
        Some(how.as_ref().err().cloned().unwrap_or(closed))
    }

    /// Gives the socket what the session still has to say: the peer should hear why the connection
    /// ends before it sees its channels closed. What the socket does not take now is lost.
    pub(super) fn say_last_words(&mut self) {
        self.queue_frames();
        self.control.flush();
    }

    /// The control stream is over. After a goodbye that is how it should be: operations that have
    /// all their bytes may still let go of their memory.
    pub(super) fn control_ended(&mut self, end: ControlEnd) {
        if self.session.ended() {
            self.ending.peer_closed = true;
            self.control.forget();
        } else if let Some(end) = self.leave_control(end) {
            self.fail(Error::control(self.peer, end));
        }
    }

    /// Ends the connection with `error`; every operation ends with it too.
    pub(super) fn fail(&mut self, error: Error) {
        // Where the session ended before, that reason stands; its last action follows.
        if self.is_ending() {
            return;
        }
        tracing::warn!(peer = %self.peer, %error, "connection lost");
        self.program.keep(self.peer, &error);
        self.session.fail(self.clock.now(), error.failure());
        self.end(Err(error));
    }

    /// A data channel is broken. A peer that ends the connection says so before it closes its
    /// channels: what it has said is read first, and then the break may be no news.
    pub(super) fn channel_failed(&mut self, index: usize, error: ChannelError) {
        let state = &mut self.channels.all[index];
        if !state.closing {
            state.failed.get_or_insert(error);
        }
    }

    /// Ends the connection whose channel has failed, if all that the peer has said was read and
    /// done.
    pub(super) fn lose_failed_channels(&mut self) {
        for index in 0..self.channels.all.len() {
            let is_heard = self.control.is_drained() && !self.session.has_actions();
            let is_heard = is_heard || self.ending.has_begun();
            let state = &mut self.channels.all[index];
            let failed = state.failed.take_if(|_| is_heard);
            if failed.is_some() && self.session.ended() {
                state.close();
            } else if let Some(error) = failed {
                self.fail(Error::channel(self.peer, index, error));
            }
        }
    }

    /// Records how the connection ended and quiets the data plane.
    pub(super) fn end(&mut self, how: Result<(), Error>) {
        if self.ending.has_begun() {
            return;
        }
        self.emit(&Event::Closed {
            error: how.as_ref().err().map(ToString::to_string),
        });
        if how.is_err() {
            self.say_last_words();
            // A peer that reads nothing does not get to keep the connection.
            self.control.forget();
            self.control.shutdown();
        }
        self.channels.close();
        if let (Err(error), Some(resume)) = (&how, &self.resume) {
            resume.end(error);
        }
        self.ending.how = Some((how, Instant::now()));
        self.end_one_sided();
    }

    /// After the end: finished once nothing points at anybody's memory and, after a goodbye, the
    /// peer has closed its end too. Closing earlier could destroy what the peer has not read yet.
    /// Returns when to look again, should nothing happen until then.
    pub(super) fn settle(&mut self) -> Option<Instant> {
        let (ended, at) = self.ending.how.as_ref()?;
        let waited = at.elapsed() >= LAST_WORDS;
        if waited {
            self.control.forget();
        }
        let orderly = ended.is_ok();
        if orderly && !self.control.wants_write() {
            self.control.finish_writing();
        }
        let parted = !orderly || self.ending.peer_closed || waited;
        let again = (!waited).then_some(*at + LAST_WORDS);
        let quiet = self.tokens.are_over() && self.channels.are_closed();
        if quiet && self.operations.is_empty() && parted && !self.control.wants_write() {
            self.control.shutdown();
            self.ending.finished = true;
            self.program.close(self.counters(), !orderly);
        }
        again
    }

    /// Sees to what is asked, and makes [progress](Core::progress); a panic in it is the end of the
    /// connection.
    pub(crate) fn guarded_progress(&mut self, asked: &Requests) -> Turn {
        let turn = self.guarded(|core| {
            asked.see_to(core);
            core.progress()
        });
        turn.unwrap_or_else(|defect| defect)
    }

    /// As [`start`](Self::start), guarded in the same way.
    pub(crate) fn guarded_start(&mut self) -> Turn {
        self.guarded(Self::start).unwrap_or_else(|defect| defect)
    }

    /// What `work` comes to.
    ///
    /// # Errors
    /// The turn that is left of a connection whose work has panicked.
    pub(crate) fn guarded<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> Result<R, Turn> {
        catch_unwind(AssertUnwindSafe(|| work(self))).map_err(|panic| self.defect(words(&*panic)))
    }

    /// Ends the connection in order; if that does not work either, at once.
    fn defect(&mut self, cause: &str) -> Turn {
        let error = Error::Defect {
            peer: self.peer,
            cause: cause.to_owned(),
        };
        tracing::error!(%error, "the engine goes on without this connection");
        let first = !std::mem::replace(&mut self.ending.is_defect, true);
        if first && catch_unwind(AssertUnwindSafe(|| self.fail(error.clone()))).is_ok() {
            return Turn {
                more: true,
                ..START
            };
        }
        // Leases and channels stay where they are until the last handle is gone: whatever still
        // points at their memory keeps it.
        for operation in self.operations.values_mut() {
            if !std::mem::replace(&mut operation.reported, true) {
                let ended = operation.state.end(Err(error.clone()));
                self.program.wakers.extend(ended);
            }
        }
        if let Some(resume) = &self.resume {
            resume.end(&error);
        }
        let how = &mut self.ending.how;
        how.get_or_insert_with(|| (Err(error), Instant::now()));
        self.end_one_sided();
        self.ending.finished = true;
        Turn {
            finished: true,
            ..START
        }
    }
}

fn words(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without words")
}
