//! Lanes that are opened at once, by the thread that wants them.

use std::time::{Duration, Instant};

use rustix::event::PollFd;
use tcpx_lanes::dial::{Opened, Patience};
use tcpx_wire::handshake::LaneClient;

use super::repair::Dialler;
use crate::channel::Way;
use crate::dial::{JoinedLane, LaneDial, join_lane, most_telling};
use crate::error::NetworkError;
use crate::network::{Exchange, Meanwhile};

/// A way that no lane could be opened over for this long does not keep the next one waiting.
const TRY: Duration = Duration::from_millis(750);

/// Lanes on their way to the listener's answers, from 0 on. They join the session once it is known
/// that they are wanted; the others are closed, and the server has never had them.
pub(super) struct Dials {
    dialler: Dialler,
    deadline: Instant,
    dials: Vec<Wanted>,
}

struct Wanted {
    lane: u16,
    way: Way,
    /// Until the peer's wish is known: a lane that overtakes the client's proof is refused, and
    /// opened once more.
    is_early: bool,
    dial: LaneDial,
    ended: Option<Result<Box<Opened<LaneClient>>, NetworkError>>,
}

/// A lane, and the way that it took.
type Joined = Result<(JoinedLane, Way), NetworkError>;

impl Dials {
    pub(super) fn new(dialler: Dialler, deadline: Instant) -> Self {
        Self {
            dialler,
            deadline,
            dials: Vec::new(),
        }
    }

    /// The peer's wish is known: those that begin from now on are of this dialler and have this
    /// deadline.
    pub(super) fn agreed(&mut self, dialler: Dialler, deadline: Instant) {
        (self.dialler, self.deadline) = (dialler, deadline);
    }

    pub(super) fn count(&self) -> usize {
        self.dials.len()
    }

    /// Another one, which begins when they next [go on](Meanwhile::advance), over the first of
    /// these ways that is answered.
    pub(super) fn want(&mut self, lane: u16, ways: Vec<Way>, is_early: bool) {
        let patience = Patience {
            head_start: TRY,
            ..Patience::default()
        };
        let (way, until) = (ways[0].clone(), self.deadline);
        let dial = self.dialler.begin(lane, ways, until, patience);
        self.dials.push(Wanted {
            lane,
            way,
            is_early,
            dial,
            ended: None,
        });
    }

    /// Waits for the first `lanes` of them, which join the session; says which way each took.
    ///
    /// # Errors
    /// What [`Exchange::wait`] says: a peer that has gone cuts lanes off too.
    pub(super) fn finish(
        mut self,
        lanes: usize,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Joined>, NetworkError> {
        self.dials.truncate(lanes);
        loop {
            self.advance();
            for wanted in &mut self.dials {
                if let Some(Err(error)) = &wanted.ended
                    && wanted.is_early
                {
                    tracing::debug!(%error, "a lane was opened early in vain");
                    let ways = vec![wanted.way.clone()];
                    let (lane, patience) = (wanted.lane, Patience::default());
                    wanted.dial = self.dialler.begin(lane, ways, self.deadline, patience);
                    (wanted.is_early, wanted.ended) = (false, None);
                }
            }
            let due = self.under_way().map(LaneDial::due).min();
            let Some(due) = due else {
                break;
            };
            exchange.wait(self.awaits(), due)?;
        }
        let join = |wanted: Wanted| {
            let joined = wanted.ended?.and_then(|opened| join_lane(*opened));
            if let Ok((_, way)) = &joined
                && *way != wanted.way
            {
                // As where cards of one network answer for each other.
                let hint = match way.local == wanted.way.local {
                    true => {
                        "unless other cards may bring it, so all lanes may share one: where cards have one network, set net.ipv4.conf.all.arp_ignore=1 and net.ipv4.conf.all.arp_announce=2"
                    }
                    false => "so its lanes share others",
                };
                let interface = wanted.way.interface;
                tracing::warn!(peer = %wanted.way.peer, interface, "nothing comes back through this card {hint}");
            }
            Some(joined)
        };
        Ok(self.dials.into_iter().filter_map(join).collect())
    }

    fn under_way(&self) -> impl Iterator<Item = &LaneDial> {
        let all = self.dials.iter();
        all.filter(|one| one.ended.is_none()).map(|one| &one.dial)
    }
}

impl Meanwhile for Dials {
    fn awaits(&self) -> Vec<PollFd<'_>> {
        self.under_way().flat_map(LaneDial::watched).collect()
    }

    fn advance(&mut self) {
        let now = Instant::now();
        for wanted in self.dials.iter_mut().filter(|one| one.ended.is_none()) {
            wanted.ended = match wanted.dial.poll(now) {
                Ok(None) => None,
                Ok(Some(opened)) => Some(Ok(Box::new(opened))),
                Err(errors) => Some(Err(most_telling(errors))),
            };
        }
    }
}
