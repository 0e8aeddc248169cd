//! Connections that broke are dialled again: lanes, and the connections that carry control, of the
//! engine and under NCCL alike.
//!
//! Nothing here touches a socket or looks at a clock. An owner of numbered places says how each
//! stands, makes [attempts](Attempt) and fills its places with what they lead to; which are made,
//! when, and which connection takes a place, is decided here.

use std::time::{Duration, Instant};

use crate::dial::{ClientSide, Dial, Stream, Way};
use crate::error::SocketError;
use crate::monitor::{REST, TICK};

/// Between two looks at attempts under way.
pub const STEP: Duration = Duration::from_millis(2);
/// What an attempt over one way may take.
pub const ATTEMPT: Duration = Duration::from_secs(2);

/// Between the end of a round of attempts and the next one. It doubles with each round in vain, up
/// to the longest; where nothing lives, up to the other one, for somebody waits then.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_BARE_PAUSE: Duration = Duration::from_millis(200);

/// A connection under way.
pub trait Attempt {
    /// What it leads to.
    type Link;
    /// Why it leads nowhere.
    type Error;

    /// Takes it further, without waiting.
    ///
    /// # Errors
    /// It has failed.
    fn poll(&mut self, now: Instant) -> Result<Option<Self::Link>, Self::Error>;
}

impl<C: ClientSide, S: Stream> Attempt for Dial<C, S> {
    type Link = (S, Way, C::Outcome);
    type Error = Vec<SocketError>;

    fn poll(&mut self, now: Instant) -> Result<Option<Self::Link>, Self::Error> {
        let opened = Self::poll(self, now)?;
        let joined = opened.map(|opened| opened.join()).transpose();
        joined.map_err(|error| vec![error])
    }
}

/// How a place stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DialState {
    /// It has no connection, and needs none now.
    Unwanted,
    /// Its connection works.
    Filled,
    /// Its connection may be dead. One that comes about takes its place.
    Doubtful,
    /// Its connection is over, and somebody still holds it.
    Leaving,
    /// It has none, and needs one.
    Vacant,
}

/// What a place's owner is to do.
#[derive(Debug)]
pub enum News<A: Attempt> {
    /// It is to end the connection of a doubtful place: another one has come about, and waits.
    Vacate(u16),
    /// This is the connection of a place that has none.
    Fill(u16, A::Link),
    /// An attempt for a place has failed.
    Failed(u16, A::Error),
}

/// What is dialled, and what waits for its place.
#[derive(Debug)]
pub struct Redial<A: Attempt> {
    attempts: Vec<(u16, A)>,
    links: Vec<(u16, A::Link)>,
    /// There are attempts, or were until it was advanced last.
    is_round: bool,
    /// A connection lives for certain.
    lives: bool,
    /// Places whose attempt of this round has failed, a bit for each: they wait for the next one.
    in_vain: u64,
    /// The round before was in vain.
    was_in_vain: bool,
    /// When that ended, and how long the next one waits for.
    ended: Option<Instant>,
    pause: Duration,
    /// When it was last advanced.
    advanced: Option<Instant>,
    /// Since when there is no connection.
    bare: Option<Instant>,
}

impl<A: Attempt> Default for Redial<A> {
    fn default() -> Self {
        Self {
            attempts: Vec::new(),
            links: Vec::new(),
            is_round: false,
            lives: false,
            in_vain: 0,
            was_in_vain: false,
            ended: None,
            pause: FIRST_PAUSE,
            advanced: None,
            bare: None,
        }
    }
}

impl<A: Attempt> Redial<A> {
    /// A connection came from the peer: it takes the place, once nobody holds that.
    pub fn came(&mut self, lane: u16, link: A::Link) {
        self.forget(lane);
        self.links.push((lane, link));
    }

    /// Those of which [one came](Self::came) or came about that has no place yet, a bit for each.
    pub fn coming(&self) -> u64 {
        let coming = self.links.iter();
        coming.fold(0, |lanes, (lane, _)| lanes | 1 << lane)
    }

    /// For how long there has been no connection and none has come about, without the time in which
    /// this process rested; a doubtful one is one.
    pub fn bare(&self, now: Instant) -> Option<Duration> {
        Some(now.saturating_duration_since(self.bare?))
    }

    /// Whether nothing is dialled, and nothing waits for its place.
    pub fn is_idle(&self) -> bool {
        self.attempts.is_empty() && self.links.is_empty()
    }

    /// Nothing is dialled any more.
    pub fn stop(&mut self) {
        self.attempts.clear();
        self.links.clear();
    }

    /// A connection broke before it was used.
    pub fn broke(&mut self, lane: u16) {
        self.in_vain |= 1 << lane;
        self.is_round = true;
    }

    /// Takes what is dialled further, and dials what is due by `dial`, which gives nothing where
    /// the peer dials: what that leads to for these places.
    pub fn advance(
        &mut self,
        now: Instant,
        places: &[DialState],
        mut dial: impl FnMut(u16) -> Option<A>,
    ) -> Vec<News<A>> {
        self.note_places(now, places);
        // What breaks amid a round belongs to it.
        let begins = !self.attempts.is_empty() || self.due().is_none_or(|due| now >= due);
        for (lane, place) in (0..).zip(places).filter(|_| begins) {
            if matches!(place, DialState::Doubtful | DialState::Vacant)
                && !self.has(lane)
                && self.in_vain & 1 << lane == 0
                && let Some(attempt) = dial(lane)
            {
                self.attempts.push((lane, attempt));
            }
        }
        // A round whose last attempt was forgotten ends as well: what failed in it waits for that.
        self.is_round |= !self.attempts.is_empty();
        let mut news = self.poll(now);
        for (lane, link) in std::mem::take(&mut self.links) {
            match places.get(usize::from(lane)) {
                Some(DialState::Vacant | DialState::Unwanted) => {
                    self.bare = None;
                    news.push(News::Fill(lane, link));
                }
                Some(DialState::Doubtful) => {
                    news.push(News::Vacate(lane));
                    self.links.push((lane, link));
                }
                Some(DialState::Leaving) => self.links.push((lane, link)),
                // It moves again.
                Some(DialState::Filled) | None => {}
            }
        }
        news
    }

    /// When to advance it again behind that, where any place wants a connection.
    pub fn next(&mut self, now: Instant) -> Duration {
        self.end_round(now);
        if !self.is_idle() {
            return STEP;
        }
        let due = self.due().filter(|due| now < *due);
        // Where it is due and nothing is dialled, the peer dials.
        due.map_or(TICK, |due| (due - now).min(TICK))
    }

    fn note_places(&mut self, now: Instant, places: &[DialState]) {
        self.end_round(now);
        for (lane, _) in (0..)
            .zip(places)
            .filter(|(_, one)| **one == DialState::Filled)
        {
            self.forget(lane);
        }
        self.lives = places.contains(&DialState::Filled);
        let is_bare = !self.lives && !places.contains(&DialState::Doubtful);
        let before = self.advanced.replace(now);
        let rested = before.is_some_and(|before| now.saturating_duration_since(before) > REST);
        self.bare = match self.bare {
            _ if !is_bare => None,
            Some(since) if !rested => Some(since),
            _ => Some(now),
        };
    }
    /// When the next round is due; `None`: at once.
    fn due(&self) -> Option<Instant> {
        let longest = match self.lives {
            true => LONGEST_PAUSE,
            false => LONGEST_BARE_PAUSE,
        };
        Some(self.ended? + self.pause.min(longest))
    }

    fn poll(&mut self, now: Instant) -> Vec<News<A>> {
        let mut news = Vec::new();
        let mut at = 0;
        while let Some((lane, attempt)) = self.attempts.get_mut(at) {
            match attempt.poll(now) {
                Ok(None) => {
                    at += 1;
                    continue;
                }
                Ok(Some(link)) => self.links.push((*lane, link)),
                Err(error) => {
                    self.in_vain |= 1 << *lane;
                    news.push(News::Failed(*lane, error));
                }
            }
            self.attempts.swap_remove(at);
        }
        news
    }

    /// Ends the round whose attempts are over.
    fn end_round(&mut self, now: Instant) {
        if !self.attempts.is_empty() || !std::mem::take(&mut self.is_round) {
            return;
        }
        let is_in_vain = std::mem::take(&mut self.in_vain) != 0;
        let was_in_vain = std::mem::replace(&mut self.was_in_vain, is_in_vain);
        self.pause = match is_in_vain && was_in_vain {
            true => (self.pause * 2).min(LONGEST_PAUSE),
            false => FIRST_PAUSE,
        };
        self.ended = Some(now);
    }

    /// Whether one is dialled, or waits for its place.
    fn has(&self, lane: u16) -> bool {
        let attempts = self.attempts.iter().map(|(lane, _)| *lane);
        let links = self.links.iter().map(|(lane, _)| *lane);
        attempts.chain(links).any(|one| one == lane)
    }

    fn forget(&mut self, lane: u16) {
        self.attempts.retain(|(one, _)| *one != lane);
        self.links.retain(|(one, _)| *one != lane);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
