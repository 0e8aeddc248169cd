//! Connects in progress, between one poll and the next.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use super::error::NetError;

/// Connects that may be in progress at once.
const MOST: usize = 16_384;
/// A host polls without a pause, and has no call to give a connect up: one that nobody polled for
/// so long belongs to a communicator that was aborted.
const ABANDONED: Duration = Duration::from_secs(600);

/// The connects, by tokens.
#[derive(Debug)]
pub(super) struct Connects<C>(BTreeMap<u64, (C, Instant)>);

impl<C> Default for Connects<C> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<C> Connects<C> {
    /// Takes the connect that `token` names.
    pub(super) fn take(&mut self, token: u64) -> Option<C> {
        self.0.remove(&token).map(|(connect, _)| connect)
    }

    /// Keeps a connect that was polled `now`, and names it, by `token` again or by a new one.
    ///
    /// Tokens are random: handle bytes come from a peer, and must not reach another connect.
    pub(super) fn keep(
        &mut self,
        token: Option<u64>,
        connect: C,
        now: Instant,
    ) -> Result<u64, NetError> {
        if token.is_none() {
            self.0
                .retain(|_, (_, polled)| now.saturating_duration_since(*polled) < ABANDONED);
        }
        if self.0.len() >= MOST {
            return Err(NetError::internal("too many connects under way"));
        }
        let mut token = token.unwrap_or(0);
        while token == 0 || self.0.contains_key(&token) {
            token = RandomState::new().hash_one(self.0.len());
        }
        self.0.insert(token, (connect, now));
        Ok(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connect_lasts_while_it_is_polled() {
        let start = Instant::now();
        let mut connects = Connects::default();
        let polled = connects.keep(None, 1, start).unwrap();
        let abandoned = connects.keep(None, 2, start).unwrap();
        assert_ne!(polled, abandoned);
        let later = start + ABANDONED - Duration::from_secs(1);
        assert_eq!(connects.take(polled), Some(1));
        assert_eq!(connects.keep(Some(polled), 1, later).unwrap(), polled);
        // A new one makes room.
        connects.keep(None, 3, start + ABANDONED).unwrap();
        assert_eq!(connects.take(abandoned), None);
        assert_eq!(connects.take(polled), Some(1));
    }

    #[test]
    fn there_is_an_end_to_connects_that_nobody_finishes() {
        let now = Instant::now();
        let mut connects = Connects::default();
        for number in 0..MOST {
            connects.keep(None, number, now).unwrap();
        }
        assert!(connects.keep(None, 0, now).is_err());
        assert!(connects.keep(None, 0, now + ABANDONED).is_ok());
    }
}
