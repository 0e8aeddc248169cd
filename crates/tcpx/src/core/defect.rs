//! A panic in the engine or in a network ends one connection, never the thread that others live on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::Core;
use crate::driver::{START, Turn};
use crate::error::Error;
use crate::requests::Requests;

impl Core {
    /// Sees to what is asked, and makes [progress](Core::progress); a panic in it is the end of the connection.
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
        self.defects += 1;
        let first = self.defects == 1;
        if first && catch_unwind(AssertUnwindSafe(|| self.fail(error.clone()))).is_ok() {
            return Turn {
                more: true,
                ..START
            };
        }
        // Leases and channels stay where they are until the last handle is gone: whatever still
        // points at their memory keeps it.
        for operation in self.operations.values_mut() {
            let parts = operation.deferred.take().map_or(0, |batch| batch.give_up());
            let state = &operation.state;
            if !std::mem::replace(&mut operation.reported, true) {
                self.wakers.extend(state.end(Err(error.clone())));
            }
            for _ in 0..parts {
                self.wakers.extend(state.end(Ok(None)));
            }
        }
        if let Some(resume) = &self.resume {
            resume.end(&error);
        }
        self.ended.get_or_insert(Err(error));
        self.ended_at.get_or_insert_with(Instant::now);
        self.end_one_sided();
        self.finished = true;
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
