//! One connection's engine: the protocol session, the control stream, the data channels and the
//! operations in progress. Everything happens under one lock, in [`Core::progress`].

mod actions;
mod ahead;
mod alone;
mod channels;
mod completions;
mod coverage;
mod defect;
mod eager;
mod history;
mod jobs;
mod one_sided;
mod operation;
mod pace;
mod posting;
mod resume;
mod stopping;
mod talk;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::{Duration, Instant};

use tcpx_memory::{Gpu, Job, SmallCopies, TagKey};
use tcpx_net::{Channel, ChannelError, ChannelStats, Completion, Peer};
use tcpx_wire::session::{Action, OperationId, RequestError};
use tcpx_wire::{Numbered, Session, Time};

use crate::control::{Control, ControlEnd};
use crate::driver::Turn;
use crate::error::Error;
use crate::event::{Event, Observer};
use crate::options::Bounds;
use crate::wait::micros_since;

use ahead::Ahead;
use alone::Alone;
use channels::ChannelState;
use history::History;
use jobs::Finished;
pub(crate) use jobs::{Sink, Unpacker};
pub(crate) use one_sided::Notice;
use one_sided::OneSided;
use operation::Token;
pub(crate) use operation::{Operation, Readers};
use pace::Pace;
pub(crate) use resume::Resume;

/// Looks at copies under way, which cost nothing, between two at the socket.
const LOOKS_AT_COPIES: usize = 64;

/// Time for the last frames to reach the socket, and the peer, once the session has ended: both have said goodbye, and a
/// peer that keeps its end open holds nobody.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// See the module's documentation.
pub(crate) struct Core {
    pub(crate) session: Session,
    pub(crate) control: Control,
    channels: Vec<ChannelState>,
    pub(crate) operations: Numbered<OperationId, Operation>,
    pub(crate) unpacker: Unpacker,
    pub(crate) gpu: Option<Gpu>,
    /// For payload of GPU memory that travels with its announcement.
    pub(crate) small: Option<SmallCopies>,
    one_sided: OneSided,
    pub(crate) sink: Arc<Sink>,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) peer: Peer,
    pub(crate) origin: Instant,
    /// Session time when the clock was last looked at.
    clock: Time,
    /// The same as the system counts.
    ticked: Instant,
    /// When the turn that runs has taken its time, and its steps since it looked whether it has.
    turn_until: Instant,
    steps: u32,
    /// Requests on channels and jobs on the worker, by token.
    tokens: Numbered<u64, Token>,
    next_token: u64,
    completions: Vec<Completion>,
    finished_jobs: Vec<Finished>,
    /// Jobs that the copy worker has yet to take.
    waiting_jobs: VecDeque<Job>,
    /// Jobs that it has.
    jobs_under_way: usize,
    /// Why the connection ended; `Ok` after an orderly goodbye.
    ended: Option<Result<(), Error>>,
    ended_at: Option<Instant>,
    /// How another connection takes the control connection's place; `None` where that cannot be.
    resume: Option<Resume>,
    /// When the peer had been heard as channels were last told of it, if they were.
    told_heard: Option<Time>,
    /// The peer closed its end of the control stream.
    peer_closed: bool,
    /// The network finds memory by the names of windows.
    is_addressed: bool,
    /// Of what is verified; it derives from the session's secret.
    tag_key: TagKey,
    /// Closed, quiet, and every operation ended.
    finished: bool,
    /// The path that the bytes take.
    pub(crate) path: Arc<Mutex<String>>,
    /// When to come again even if nothing happens.
    pub(crate) due: Option<Time>,
    /// The last turn used up its share.
    more: bool,
    /// An operation of the program's or of the peer's has ended, or all have, since this was last forgotten.
    ended_some: bool,
    /// Of transfers that have ended; woken when the lock is free again, as that runs the program's code.
    pub(crate) wakers: Vec<Waker>,
    /// Panics in `progress`.
    defects: u32,
    ahead: Ahead,
    alone: Alone,
    /// What of the things to say may wait for more.
    pub(crate) pace: Pace,
    /// What `tcpx status` tells of operations that have ended.
    pub(crate) history: History,
    pub(crate) bounds: Bounds,
}

/// What [`Core::new`] needs.
pub(crate) struct Parts {
    pub(crate) session: Session,
    pub(crate) control: Control,
    pub(crate) channels: Vec<Box<dyn Channel>>,
    pub(crate) unpacker: Unpacker,
    pub(crate) gpu: Option<Gpu>,
    pub(crate) small: Option<SmallCopies>,
    pub(crate) sink: Arc<Sink>,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) peer: Peer,
    pub(crate) path: String,
    pub(crate) origin: Instant,
    pub(crate) resume: Option<Resume>,
    /// The network finds memory by the names of windows.
    pub(crate) is_addressed: bool,
    /// Of what is verified; it derives from the session's secret.
    pub(crate) tag_key: TagKey,
    /// Actions of the session that came during the set-up.
    pub(crate) early: VecDeque<Action>,
    pub(crate) bounds: Bounds,
}

impl Core {
    pub(crate) fn new(parts: Parts) -> Self {
        let mut core = Self {
            session: parts.session,
            control: parts.control,
            channels: parts.channels.into_iter().map(ChannelState::new).collect(),
            operations: Numbered::default(),
            unpacker: parts.unpacker,
            gpu: parts.gpu,
            small: parts.small,
            one_sided: OneSided::default(),
            sink: parts.sink,
            observer: parts.observer,
            peer: parts.peer,
            origin: parts.origin,
            clock: Time(0),
            ticked: parts.origin,
            turn_until: parts.origin,
            steps: 0,
            tokens: Numbered::default(),
            next_token: 0,
            completions: Vec::new(),
            finished_jobs: Vec::new(),
            waiting_jobs: VecDeque::new(),
            jobs_under_way: 0,
            ended: None,
            ended_at: None,
            resume: parts.resume,
            told_heard: None,
            peer_closed: false,
            is_addressed: parts.is_addressed,
            tag_key: parts.tag_key,
            finished: false,
            path: Arc::new(Mutex::new(parts.path)),
            due: None,
            more: false,
            ended_some: false,
            wakers: Vec::new(),
            defects: 0,
            ahead: Ahead::default(),
            alone: Alone::default(),
            pace: Pace::default(),
            history: History::default(),
            bounds: parts.bounds,
        };
        core.tick();
        for action in parts.early {
            core.perform(action);
        }
        core
    }

    /// Session time: microseconds since the connection's start, as of the last [`Core::tick`].
    pub(crate) fn now(&self) -> Time {
        self.clock
    }

    /// When the clock was last looked at.
    pub(crate) fn ticked(&self) -> Instant {
        self.ticked
    }

    /// Looks at the clock: once for what is done together, as a look costs more than most steps.
    pub(crate) fn tick(&mut self) {
        self.ticked = Instant::now();
        self.clock = self.time_of(self.ticked);
    }

    /// After a step of a turn, which may have been a long one: whether the turn has taken its time.
    fn is_spent(&mut self, was_long: bool) -> bool {
        let most = self.bounds.steps;
        self.steps += if was_long { most } else { 1 };
        if self.steps < most {
            return false;
        }
        self.steps = 0;
        self.turn_until <= Instant::now()
    }

    /// The same moment in session time.
    pub(crate) fn time_of(&self, at: Instant) -> Time {
        Time(micros_since(self.origin, at))
    }

    /// The same moment as the system counts.
    pub(crate) fn instant_of(&self, at: Time) -> Instant {
        self.origin + Duration::from_micros(at.0)
    }

    /// Whether an operation has ended since [`Core::forget_ended`].
    pub(crate) fn has_ended_some(&self) -> bool {
        self.ended_some
    }

    pub(crate) fn forget_ended(&mut self) {
        self.ended_some = false;
    }

    /// Whether anything may have come for a thread that looks without a pause while nothing moves.
    pub(crate) fn has_news(&mut self) -> bool {
        if let Some(small) = self.small.as_ref().filter(|small| small.is_busy())
            && (0..LOOKS_AT_COPIES).any(|_| small.has_news())
        {
            return true;
        }
        self.control.look() || self.gpu.is_some() && self.sink.has_results()
    }

    /// Does everything that can be done now.
    pub(crate) fn progress(&mut self) -> Turn {
        let mut busy = false;
        let mut more = true;
        self.turn_until = self.ticked + self.bounds.turn;
        loop {
            let mut again = self.poll_small();
            // A thread that waits looks for what it waits for before the next round; the end of a small copy as a rule is
            // just that, so it does before the socket is asked, too.
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
                    self.look_at_fence();
                }
                more = false;
                break;
            }
            self.tick();
            if self.turn_until <= self.ticked {
                break;
            }
        }
        self.pace.looks_again(false);
        self.turn(busy, more)
    }

    /// Takes in what has come from the peer, the channels and the copies, and what is due; `true` if there was anything.
    fn take_in(&mut self) -> bool {
        let mut any = self.replace_control();
        let failed = self.has_failed_channel();
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
        let now = self.now();
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
        self.awaits_bytes() || self.channels.iter().any(ChannelState::is_moving)
    }

    /// Does what the program's own request led to. What has arrived meanwhile is left to whoever
    /// waits for it.
    pub(crate) fn start(&mut self) -> Turn {
        self.turn_until = self.ticked + self.bounds.turn;
        let busy = self.push_out();
        self.turn(busy, false)
    }

    /// Hands out what the session wants done and said; `true` if there may be more at once.
    fn push_out(&mut self) -> bool {
        let mut any = self.read_windows();
        any |= self.perform_actions();
        self.close_useless_channels();
        // What the peer waits for goes first; a chunk that comes early finds its receive soon.
        self.write_control();
        if self.post_pending() {
            any = true;
            self.write_control();
        }
        self.rouse_channels();
        // What was said may have ended an operation.
        any | self.perform_actions()
    }

    pub(crate) fn is_addressed(&self) -> bool {
        self.is_addressed
    }

    /// What a turn would say in which nothing happens.
    pub(crate) fn standing(&self) -> Turn {
        let polls = self.channels.iter().any(ChannelState::must_poll);
        let copying = self.small.as_ref().is_some_and(SmallCopies::is_busy);
        Turn {
            more: !self.finished
                && (self.more
                    || self.session.has_actions()
                    || self.has_failed_channel()
                    || !self.one_sided.reads.is_empty()),
            poll: polls || copying,
            copying: copying && !polls,
            busy: false,
            moving: self.is_moving(),
            finished: self.finished,
        }
    }

    fn turn(&mut self, busy: bool, more: bool) -> Turn {
        let suspicion = self.look_after_control();
        let last_words = self.settle();
        let next = self.session.next_timeout();
        let others = [last_words, self.retry_jobs_at(), self.look_at_closes_at()];
        let others = others.into_iter().flatten().map(|at| self.time_of(at));
        let due = others.chain(next).chain(suspicion).min();
        self.due = due.filter(|_| !self.finished);
        self.more = more;
        Turn {
            busy,
            ..self.standing()
        }
    }

    /// Once the session is over nobody needs the channels; closing them ends the requests that the
    /// last operations still wait for, which a silent peer would hold up.
    fn close_useless_channels(&mut self) {
        if self.session.ended() && self.ended.is_none() {
            self.say_last_words();
            for channel in self.channels.iter_mut() {
                channel.close();
            }
        }
    }

    /// Gives the socket what the session still has to say: the peer should hear why the connection
    /// ends before it sees its channels closed. What the socket does not take now is lost.
    fn say_last_words(&mut self) {
        self.queue_frames();
        self.control.flush();
    }

    fn control_is_down(&self) -> bool {
        matches!(self.ended, Some(Err(_)))
    }

    /// The control stream is over. After a goodbye that is how it should be: operations that have
    /// all their bytes may still let go of their memory.
    fn control_ended(&mut self, end: ControlEnd) {
        if self.session.ended() {
            self.peer_closed = true;
            self.control.forget();
        } else if let Some(end) = self.leave_control(end) {
            self.fail(Error::control(self.peer, end));
        }
    }

    /// Ends the connection with `error`; every operation ends with it too.
    pub(crate) fn fail(&mut self, error: Error) {
        // Where the session ended before, that reason stands; its last action follows.
        if self.ended.is_some() || self.session.ended() {
            return;
        }
        tracing::warn!(peer = %self.peer, %error, "connection lost");
        self.history.keep(self.peer, &error);
        let now = self.now();
        self.session.fail(now, error.failure());
        self.end(Err(error));
    }

    /// A data channel is broken. A peer that ends the connection says so before it closes its channels: what it has
    /// said is read first, and then the break may be no news.
    fn channel_failed(&mut self, index: usize, error: ChannelError) {
        let state = &mut self.channels[index];
        if !state.is_closing() {
            state.failed.get_or_insert(error);
        }
    }

    fn has_failed_channel(&self) -> bool {
        self.channels.iter().any(|state| state.failed.is_some())
    }

    /// Ends the connection whose channel has failed, if all that the peer has said was read and done.
    fn lose_failed_channels(&mut self) {
        for index in 0..self.channels.len() {
            let is_heard = self.control.is_drained() && !self.session.has_actions();
            let is_heard = is_heard || self.ended.is_some();
            let failed = self.channels[index].failed.take_if(|_| is_heard);
            if failed.is_some() && self.session.ended() {
                self.channels[index].close();
            } else if let Some(error) = failed {
                self.fail(Error::channel(self.peer, index, error));
            }
        }
    }

    /// Records how the connection ended and quiets the data plane.
    fn end(&mut self, how: Result<(), Error>) {
        if self.ended.is_some() {
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
        for channel in self.channels.iter_mut() {
            channel.close();
        }
        if let (Err(error), Some(resume)) = (&how, &self.resume) {
            resume.end(error);
        }
        self.ended = Some(how);
        self.end_one_sided();
        self.ended_at = Some(Instant::now());
    }

    /// After the end: finished once nothing points at anybody's memory and, after a goodbye, the
    /// peer has closed its end too. Closing earlier could destroy what the peer has not read yet.
    /// Returns when to look again, should nothing happen until then.
    fn settle(&mut self) -> Option<Instant> {
        let (Some(ended), Some(at)) = (&self.ended, self.ended_at) else {
            return None;
        };
        let waited = at.elapsed() >= LAST_WORDS;
        if waited {
            self.control.forget();
        }
        let orderly = ended.is_ok();
        if orderly && !self.control.wants_write() {
            self.control.finish_writing();
        }
        let parted = !orderly || self.peer_closed || waited;
        let quiet = self.tokens.is_empty() && self.channels.iter().all(ChannelState::closed);
        if quiet && self.operations.is_empty() && parted && !self.control.wants_write() {
            self.control.shutdown();
            self.finished = true;
            self.history.close(self.counters(), !orderly);
        }
        (!waited).then_some(at + LAST_WORDS)
    }

    /// How the connection ended, once nothing of it is left.
    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        if self.finished {
            self.ended.clone()
        } else {
            None
        }
    }

    /// Why no new operation can start.
    pub(crate) fn refusal(&self) -> Option<Error> {
        match &self.ended {
            None => None,
            Some(Ok(())) => Some(Error::Closed { peer: self.peer }),
            Some(Err(error)) => Some(error.clone()),
        }
    }

    pub(crate) fn request_error(&self, error: RequestError) -> Error {
        Error::Request {
            peer: self.peer,
            error,
        }
    }

    /// Nothing is expected of the control connection any more.
    pub(crate) fn control_done(&self) -> bool {
        self.finished || self.control_is_down() || self.peer_closed
    }

    /// The congestion control of the channels' sockets, where they have some.
    pub(crate) fn congestion_control(&self) -> Option<String> {
        let mut channels = self.channels.iter();
        channels.find_map(|state| state.channel.congestion_control())
    }

    /// Counters of all channels, summed.
    pub(crate) fn statistics(&self) -> ChannelStats {
        let mut sum = ChannelStats::default();
        for state in self.channels.iter() {
            sum += state.channel.stats();
        }
        let control = self.control.carried();
        sum.control_bytes_sent = control.sent;
        sum.control_bytes_received = control.received;
        sum
    }

    /// Tells the observer. It is the program's code: a panic in it must not end the engine's thread,
    /// which other connections live on too, nor leave the work around this call half done.
    pub(crate) fn emit(&self, event: &Event) {
        if let Some(observer) = &self.observer
            && catch_unwind(AssertUnwindSafe(|| observer.event(event))).is_err()
        {
            tracing::error!(peer = %self.peer, "the observer panicked; the engine goes on");
        }
    }
}
