//! What one side has under way of what the other one limits.
//!
//! Both count alike: from the frame that asks to the last frame about it, whichever side sends that. Frames of a
//! direction keep their order, so that the side which takes never counts more than the one which asks. That one keeps
//! back what does not fit; to the other one it is a breach.

use super::error::SessionError;
use crate::frame::Limits;

/// What is counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Put,
    Notification,
    Get,
}

/// One-sided operations that one side has asked of the other.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct UnderWay {
    puts: u32,
    notifications: u32,
    gets: u32,
    /// Of lists, in all of them.
    pieces: u32,
}

impl UnderWay {
    /// Counts one of so many pieces, if it fits.
    pub(super) fn begin(
        &mut self,
        limits: &Limits,
        kind: Kind,
        pieces: u32,
    ) -> Result<(), SessionError> {
        let (counted, what, limit) = match kind {
            Kind::Put => (self.puts, "puts under way", limits.puts),
            Kind::Notification => (
                self.notifications,
                "notifications under way",
                limits.notifications,
            ),
            Kind::Get => (self.gets, "gets under way", limits.gets),
        };
        within(what, counted as usize, 1, limit)?;
        let what = "pieces of operations under way";
        within(what, self.pieces as usize, pieces, limits.pieces)?;
        *self.counter(kind) += 1;
        self.pieces += pieces;
        Ok(())
    }

    /// The last frame about one was sent, or has come.
    pub(super) fn end(&mut self, kind: Kind, pieces: u32) {
        *self.counter(kind) -= 1;
        self.pieces -= pieces;
    }

    fn counter(&mut self, kind: Kind) -> &mut u32 {
        match kind {
            Kind::Put => &mut self.puts,
            Kind::Notification => &mut self.notifications,
            Kind::Get => &mut self.gets,
        }
    }
}

/// Whether so many more fit; the error is what the side that takes them says of the peer.
pub(super) fn within(
    what: &'static str,
    counted: usize,
    more: u32,
    limit: u32,
) -> Result<(), SessionError> {
    if counted as u64 + u64::from(more) <= u64::from(limit) {
        return Ok(());
    }
    let limit = limit.into();
    Err(SessionError::TooMany { what, limit })
}
