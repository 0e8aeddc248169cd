//! A panic in the engine or in a network ends one connection, never the thread that others live on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::Core;
use crate::driver::{START, Turn};
use crate::error::Error;

impl Core {
    /// As [`Core::progress`]; a panic in it is the end of the connection.
    pub(crate) fn guarded_progress(&mut self) -> Turn {
        self.guarded(Self::progress)
    }

    /// As [`start`](Self::start), guarded in the same way.
    pub(crate) fn guarded_start(&mut self) -> Turn {
        self.guarded(Self::start)
    }

    fn guarded(&mut self, work: fn(&mut Self) -> Turn) -> Turn {
        match catch_unwind(AssertUnwindSafe(|| work(self))) {
            Ok(turn) => turn,
            Err(panic) => self.defect(words(&*panic)),
        }
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
        for operation in self.operations.values() {
            self.wakers.extend(operation.state.end(Err(error.clone())));
            self.ended_some = true;
        }
        self.ended.get_or_insert(Err(error));
        self.ended_at.get_or_insert_with(Instant::now);
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
