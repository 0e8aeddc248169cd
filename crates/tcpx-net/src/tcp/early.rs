//! Lanes that the client opens while the server's wish is still under way to it.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use super::agree::Cards;
use super::open::TRY;
use super::repair::Dialler;
use crate::channel::Way;
use crate::dial::{AnsweredLane, JoinedLane};
use crate::error::NetworkError;
use crate::network::{Setup, Side};

/// Lanes by number, each with a thread that opens it up to the server's answer. They join the session once it is known
/// that they are wanted; the others are closed, and the server has never had them.
#[derive(Default)]
pub(super) struct Early(Vec<JoinHandle<Result<AnsweredLane, NetworkError>>>);

impl Early {
    /// Opens as many as the client wishes the way of the control connection, unless they will take others.
    pub(super) fn start(lanes: u16, cards: &Cards, setup: &Setup<'_>) -> Self {
        if setup.side == Side::Server || cards.bind() {
            return Self::default();
        }
        let plain = Way {
            local: None,
            interface: None,
            peer: setup.peer,
        };
        let dialler = Dialler::new(setup, vec![plain; usize::from(lanes)]);
        let dialler = Arc::new(dialler);
        let deadline = setup.deadline.min(Instant::now() + TRY);
        let start = |lane| {
            let dialler = Arc::clone(&dialler);
            let thread = std::thread::Builder::new().name("tcpx-dial".to_owned());
            thread.spawn(move || dialler.ask(lane, deadline))
        };
        // Where the system gives no more threads, the others are opened later.
        Self((0..lanes).map_while(|lane| start(lane).ok()).collect())
    }

    /// The first `lanes` of them, as far as they could be opened.
    pub(super) fn join(self, lanes: u16) -> Vec<Option<JoinedLane>> {
        let wanted = self.0.into_iter().take(usize::from(lanes));
        let joined = wanted.map(|opening| {
            let answered = opening.join().ok()?;
            let joined = answered.and_then(AnsweredLane::join);
            joined
                .inspect_err(|error| tracing::debug!(%error, "a lane was opened early in vain"))
                .ok()
        });
        joined.collect()
    }
}
