//! One connection's engine: the protocol session, the control stream, the data channels and the
//! operations in progress. Everything happens under one lock, in [`Core::progress`].

mod actions;
mod channels;
mod clock;
mod completions;
mod control_io;
mod coverage;
mod eager;
mod ending;
mod gpu;
mod jobs;
mod one_sided;
mod operation;
mod pace;
mod posting;
mod program;
mod resume;
mod stopping;
#[cfg(test)]
pub(crate) mod tests;

use std::net::SocketAddr;
use tcpx_net::ChannelStats;
use tcpx_wire::session::{OperationId, RequestError};
use tcpx_wire::{Numbered, Session};

use crate::control::Control;
use crate::driver::Turn;
use crate::error::Error;
use crate::establish::SetUp;
use crate::options::Bounds;

use channels::ChannelState;
pub(crate) use channels::Channels;
pub(crate) use clock::Clock;
use ending::Ending;
pub(crate) use gpu::GpuWork;
pub(crate) use jobs::Jobs;
pub(crate) use one_sided::Notice;
use one_sided::OneSided;
use operation::Tokens;
pub(crate) use operation::{Operation, Readers};
use pace::Pace;
pub(crate) use program::Program;
pub(crate) use resume::Resume;

/// See the module's documentation.
pub(crate) struct Core {
    pub(crate) session: Session,
    pub(crate) control: Control,
    /// How another connection takes the control connection's place; `None` where that cannot be.
    resume: Option<Resume>,
    /// What of the things to say may wait for more.
    pub(crate) pace: Pace,
    pub(crate) channels: Channels,
    pub(crate) operations: Numbered<OperationId, Operation>,
    tokens: Tokens,
    pub(crate) jobs: Jobs,
    pub(crate) gpu: GpuWork,
    pub(crate) one_sided: OneSided,
    pub(crate) program: Program,
    pub(crate) clock: Clock,
    pub(crate) ending: Ending,
    pub(crate) peer: SocketAddr,
    pub(crate) bounds: Bounds,
}

impl Core {
    /// Goes on where a set-up has come to.
    pub(crate) fn new(
        set_up: SetUp<'_>,
        resume: Option<Resume>,
        channels: Channels,
        jobs: Jobs,
        gpu: GpuWork,
        program: Program,
    ) -> Self {
        let mut core = Self {
            session: set_up.session,
            control: set_up.control,
            resume,
            pace: Pace::default(),
            channels,
            operations: Numbered::default(),
            tokens: Tokens::default(),
            jobs,
            gpu,
            one_sided: OneSided::default(),
            program,
            clock: set_up.clock,
            ending: Ending::default(),
            peer: set_up.peer,
            bounds: set_up.bounds,
        };
        core.clock.tick();
        for action in set_up.pending {
            core.perform(action);
        }
        core
    }

    /// Whether anything may have come for a thread that looks without a pause while nothing moves.
    pub(crate) fn has_news(&mut self) -> bool {
        self.gpu.has_copied()
            || self.control.has_input()
            || self.gpu.device.is_some() && self.jobs.has_results()
    }

    /// Says whether somebody looks for what channels and jobs come to without being woken for it.
    pub(crate) fn set_looked_for(&mut self, looked_for: bool) {
        self.jobs.set_looked_for(looked_for);
        self.channels.set_looked_for(looked_for);
    }

    /// Does everything that can be done now.
    pub(crate) fn progress(&mut self) -> Turn {
        let mut busy = false;
        let mut more = true;
        self.clock.begin_turn();
        loop {
            let mut again = self.poll_small();
            // A thread that waits looks for what it waits for before the next round; the end of a
            // small copy as a rule is just that, so it does before the socket is asked, too.
            let looks = self.pace.is_driven() && !self.is_moving();
            let copied = again && looks;
            if !copied {
                again |= self.take_in();
            }
            self.pace.looks_again(busy | again);
            again |= self.push_out();
            busy |= again;
            let seen = copied || looks && self.control.is_drained() && !self.is_moving();
            if !again || seen {
                if !again {
                    self.gpu.look_at_fence();
                }
                more = false;
                break;
            }
            if self.clock.is_over() {
                break;
            }
        }
        self.pace.looks_again(false);
        self.turn(busy, more)
    }

    /// Takes in what has come from the peer, the channels and the copies, and what is due; `true`
    /// if there was anything.
    fn take_in(&mut self) -> bool {
        let mut any = self.replace_control();
        let failed = self.channels.any_failed();
        if failed {
            self.control.look_again();
        }
        any |= self.read_control();
        if failed {
            // What the peer has said may have ended the session.
            self.perform_actions();
            self.lose_failed_channels();
            any = true;
        }
        any |= self.poll_channels();
        any |= self.drain_worker();
        let now = self.clock.now();
        if self.session.next_timeout().is_some_and(|due| due <= now) {
            // Nobody is given up whose frames lie in the socket.
            if self.control.ask_again() {
                any |= self.read_control();
            }
            self.session.handle_timeout(now);
        }
        any
    }

    /// Chunks are in flight, wait for a channel, or come soon.
    fn is_moving(&self) -> bool {
        self.one_sided.coming > 0 || self.channels.are_moving()
    }

    /// Does what the program's own request led to. What has arrived meanwhile is left to whoever
    /// waits for it.
    pub(crate) fn start(&mut self) -> Turn {
        self.clock.begin_turn();
        let busy = self.push_out();
        self.turn(busy, false)
    }

    /// Hands out what the session wants done and said; `true` if there may be more at once.
    fn push_out(&mut self) -> bool {
        let mut any = self.read_windows();
        any |= self.perform_actions();
        if self.session.ended() && !self.ending.has_begun() {
            // Nobody needs the channels; closing them ends the requests that the last operations
            // still wait for, which a silent peer would hold up.
            self.say_last_words();
            self.channels.close();
        }
        // What the peer waits for goes first; a chunk that comes early finds its receive soon.
        self.write_control();
        if self.post_pending() {
            any = true;
            self.write_control();
        }
        if !self.ending.has_begun() {
            self.channels.prewake(&mut self.gpu);
        }
        // What was said may have ended an operation.
        any | self.perform_actions()
    }

    /// What a turn would say in which nothing happens.
    pub(crate) fn standing(&self) -> Turn {
        let polls = self.channels.all.iter().any(ChannelState::must_poll);
        let copying = self.gpu.is_copying();
        let finished = self.ending.is_finished();
        Turn {
            more: !finished
                && (self.clock.more
                    || self.session.has_actions()
                    || self.channels.any_failed()
                    || !self.one_sided.reads.is_empty()),
            poll: polls || copying,
            copying: copying && !polls,
            busy: false,
            moving: self.is_moving(),
            finished,
        }
    }

    fn turn(&mut self, busy: bool, more: bool) -> Turn {
        let suspicion = self.look_after_control();
        let last_words = self.settle();
        let next = self.session.next_timeout();
        let closes = self.channels.look_at_closes_at(self.clock.ticked());
        let others = [last_words, self.jobs.retry_at(), closes];
        let others = others
            .into_iter()
            .flatten()
            .map(|at| self.clock.time_of(at));
        let due = others.chain(next).chain(suspicion).min();
        self.clock.due = due.filter(|_| !self.ending.is_finished());
        self.clock.more = more;
        Turn {
            busy,
            ..self.standing()
        }
    }

    /// Why a close that has not come back is an error.
    pub(crate) fn stuck_close(&self) -> Option<Error> {
        let (channel, pending) = self.channels.pending_close()?;
        Some(Error::CloseStuck {
            peer: self.peer,
            channel,
            call: pending.call,
            stuck: self.clock.ticked().saturating_duration_since(pending.since),
        })
    }

    pub(crate) fn request_error(&self, error: RequestError) -> Error {
        Error::Request {
            peer: self.peer,
            error,
        }
    }

    /// Counters of all channels, summed.
    pub(crate) fn statistics(&self) -> ChannelStats {
        let mut sum = ChannelStats::default();
        for state in &self.channels.all {
            sum += state.channel.stats();
        }
        let control = self.control.carried();
        sum.control_bytes_sent = control.sent;
        sum.control_bytes_received = control.received;
        sum
    }
}
