//! The channel of the device-memory network: a lane for payload and an ordinary one, on which both
//! directions go on when the first one ends. Everything on them happens in [`Channel::poll`].

mod ending;
mod inbound;
mod outbound;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::EventFlags;
use tcpx_lanes::waker::Waker;
use tcpx_memory::RegionSlice;

use super::bound::FlowRule;
use super::calls::SocketCalls;
use super::inflow::Inflow;
use super::ordinary::OrdinaryLane;
use super::outflow::Outflow;
use super::slots::SendSlot;
use super::stage::Stage;
use super::watch::{Watch, Which};
use super::zero_copy::InKernel;
use tcpx_net::channel::{
    Cancel, Channel, ChannelStats, Completion, PostAnswer, Readiness, ReceiveChunk, SendChunk,
    Ticket,
};
use tcpx_net::error::{ChannelError, IoError};

/// What [`DevmemChannel::new`] needs.
#[derive(Debug)]
pub(super) struct Parts {
    /// `devmem, queue 1 of eth0, to 10.0.0.2:12345`.
    pub(super) name: String,
    /// The name once bytes no longer land in the pool.
    pub(super) plain_name: String,
    pub(super) calls: Arc<dyn SocketCalls>,
    pub(super) payload: OwnedFd,
    pub(super) ordinary: OwnedFd,
    pub(super) rule: Option<FlowRule>,
    pub(super) inflow: Inflow,
    pub(super) stage: Stage,
    pub(super) signal: Arc<Waker>,
    pub(super) window: u16,
}

/// Why payload is not in the pool.
const PLAIN: &str = "payload arrives as plain data, not in the pool: the queue's binding ended, or the flow is not steered to it; `tcpx devmem status` shows both";

/// Why a path changed when the other end was the first to give the payload lane up.
const PEER_ENDED: &str = "the peer ended the payload lane; its own output says why";

/// How the peer's end of the connection shows where one writes, or reads too late.
fn is_the_peers_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct DevmemChannel {
    name: String,
    plain_name: String,
    calls: Arc<dyn SocketCalls>,
    /// `None` once given up and nothing reads its part of the pool.
    payload: Option<OwnedFd>,
    /// `None` once closed.
    ordinary: Option<OrdinaryLane>,
    /// The payload lane is given up: all goes over the ordinary one.
    failed_over: bool,
    rule: Option<FlowRule>,
    watch: Watch,
    signal: Arc<Waker>,
    inflow: Inflow,
    outflow: Outflow,
    stage: Stage,
    in_kernel: InKernel<Arc<SendSlot>>,
    /// Room for control messages.
    control: Vec<u8>,
    /// Why the kernel did not take tokens back, until the payload lane was given up for it.
    stuck_tokens: Option<String>,
    /// The socket in use has room, as far as is known.
    writable: bool,
    /// The kernel has no room to note another zero-copy send, until it reports on one.
    unreported: bool,
    /// The person was told that payload no longer lands in the pool.
    told_plain: bool,
    window: u16,
    closing: bool,
    /// The peer closed the ordinary lane.
    peer_closed: bool,
    /// Why nothing works any more.
    broken: Option<ChannelError>,
    failed: Vec<Completion>,
    stats: ChannelStats,
}

impl DevmemChannel {
    pub(super) fn new(parts: Parts) -> rustix::io::Result<Self> {
        let mut watch = Watch::new()?;
        let signal = parts.signal;
        watch.want(Which::Staging, signal.as_fd(), Some(EventFlags::IN))?;
        Ok(Self {
            name: parts.name,
            plain_name: parts.plain_name,
            calls: parts.calls,
            payload: Some(parts.payload),
            ordinary: Some(OrdinaryLane::new(parts.ordinary)),
            failed_over: false,
            rule: parts.rule,
            watch,
            signal,
            inflow: parts.inflow,
            outflow: Outflow::default(),
            stage: parts.stage,
            in_kernel: InKernel::default(),
            control: Vec::new(),
            stuck_tokens: None,
            writable: true,
            unreported: false,
            told_plain: false,
            window: parts.window,
            closing: false,
            peer_closed: false,
            broken: None,
            failed: Vec::new(),
            stats: ChannelStats::default(),
        })
    }

    fn bad_request(&self, reason: String) -> ChannelError {
        ChannelError::BadRequest {
            channel: self.name.clone(),
            reason,
        }
    }

    fn system(&self, operation: &'static str, cause: io::Error) -> ChannelError {
        ChannelError::Failed {
            channel: self.name.clone(),
            operation,
            cause: IoError::from(cause).to_string(),
        }
    }

    fn protocol(&self, expected: String, arrived: String) -> ChannelError {
        ChannelError::Protocol {
            channel: self.name.clone(),
            lane: 1,
            expected,
            arrived,
            position: None,
        }
    }

    /// What every post checks.
    fn admit(&self, memory: &RegionSlice) -> Result<(), ChannelError> {
        if self.closing {
            return Err(ChannelError::Closed {
                channel: self.name.clone(),
            });
        }
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if self.peer_closed {
            return Err(self.peer_gone());
        }
        let (bytes, most) = (memory.len() as u64, self.stage.largest());
        if bytes > most {
            return Err(self.bad_request(format!(
                "one request carries at most {most} bytes, {bytes} were given; use smaller chunks"
            )));
        }
        let takes = memory.kind().is_cpu_accessible() || self.stage.takes_gpu_memory();
        if !takes {
            return Err(self.bad_request(format!(
                "the channel was set up without {}; name the GPU when connecting",
                memory.kind()
            )));
        }
        Ok(())
    }

    fn peer_gone(&self) -> ChannelError {
        ChannelError::PeerClosed {
            channel: self.name.clone(),
            outstanding: self.in_flight(),
        }
    }

    /// Whether something is in flight that only the peer's lanes can end.
    fn must_move(&self) -> bool {
        self.inflow.posted() > 0 || self.outflow.is_pending()
    }

    /// Everything that can be done now.
    fn work(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        // What was placed is not to be sent again.
        self.stats.chunks_sent += self.outflow.end_placed(out);
        self.give_back_or_fail_over(out)?;
        self.rewatch()?;
        let [payload, ordinary, staging] = self
            .watch
            .ready()
            .map_err(|error| self.system("epoll_wait", error.into()))?;
        if payload.write || ordinary.write {
            self.writable = true;
        }
        if staging.read {
            self.progress_stage()?;
        }
        if payload.error {
            self.reap_sends(out)?;
        }
        if ordinary.read {
            self.receive_ordinary(out)?;
        }
        if payload.read && !self.failed_over {
            self.receive(out)?;
        } else {
            self.inflow.relieve(out);
        }
        self.write(out)?;
        self.stats.chunks_sent += self.outflow.end_placed(out);
        self.close_payload_when_unread();
        self.rewatch()
    }

    fn progress_stage(&mut self) -> Result<(), ChannelError> {
        let done = self.stage.progress(&mut self.outflow);
        done.map_err(|error| ChannelError::Memory {
            channel: self.name.clone(),
            operation: "copying a chunk to where it can be sent from",
            cause: error.to_string(),
        })
    }

    /// Watches each descriptor for what is wanted of it now.
    fn rewatch(&mut self) -> Result<(), ChannelError> {
        let blocked = |is: bool| {
            if is {
                EventFlags::OUT
            } else {
                EventFlags::empty()
            }
        };
        let waits = !self.writable && self.outflow.is_pending();
        let takes_more = self.inflow.offer(1).is_some();
        if let Some(payload) = &self.payload {
            let mut flags = blocked(waits && !self.failed_over);
            if !self.failed_over && takes_more {
                flags |= EventFlags::IN;
            }
            // Reports about zero-copy sends come as errors, which need no flag.
            let watched = !flags.is_empty() || !self.in_kernel.is_empty();
            let wanted = watched.then_some(flags);
            let done = self.watch.want(Which::Payload, payload.as_fd(), wanted);
            done.map_err(|error| self.system("epoll_ctl", error.into()))?;
        }
        if let Some(ordinary) = &self.ordinary {
            let mut flags = blocked(waits && self.failed_over);
            if takes_more || !ordinary.waits_for_room() {
                flags |= EventFlags::IN;
            }
            let wanted = (!flags.is_empty() && !self.peer_closed).then_some(flags);
            let done = self.watch.want(Which::Ordinary, ordinary.socket(), wanted);
            done.map_err(|error| self.system("epoll_ctl", error.into()))?;
        }
        Ok(())
    }

    /// Gives the payload lane up, for good: all that the peer has not placed goes over the ordinary
    /// lane, and what comes, comes there. What has come so far stays good.
    fn fail_over(&mut self, why: String, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        if std::mem::replace(&mut self.failed_over, true) {
            return Ok(());
        }
        self.stats.lanes_lost += 1;
        self.stats.chunks_resent += self.outflow.start_over();
        // The CPU sends what waits in slots.
        self.stage.leave_slots(&mut self.outflow);
        (self.writable, self.unreported) = (true, false);
        self.name.clone_from(&self.plain_name);
        out.push(Completion::PathChanged {
            path: self.name.clone(),
            why,
        });
        self.announce()
    }

    /// Tells the person, once, that payload comes past the pool, and goes on.
    fn lands_plain(&mut self, out: &mut Vec<Completion>) {
        if std::mem::replace(&mut self.told_plain, true) {
            return;
        }
        out.push(Completion::PathChanged {
            path: format!("{}; through host memory for now", self.name),
            why: PLAIN.to_owned(),
        });
    }

    fn socket_of(payload: &Option<OwnedFd>) -> Option<BorrowedFd<'_>> {
        payload.as_ref().map(AsFd::as_fd)
    }
}

impl Channel for DevmemChannel {
    fn post_send(&mut self, chunk: SendChunk) -> Result<PostAnswer<SendChunk>, ChannelError> {
        self.admit(&chunk.source)?;
        if self.outflow.posted() >= usize::from(self.window) {
            return Ok(PostAnswer::Full(chunk));
        }
        self.queue_send(chunk)?;
        Ok(PostAnswer::Accepted)
    }

    fn post_receive(
        &mut self,
        chunk: ReceiveChunk,
    ) -> Result<PostAnswer<ReceiveChunk>, ChannelError> {
        self.admit(&chunk.destination)?;
        if self.inflow.posted() >= usize::from(self.window) {
            return Ok(PostAnswer::Full(chunk));
        }
        // The engine unpacks to the destination; the bytes land elsewhere first.
        let bytes = chunk.destination.len() as u64;
        self.inflow.post(chunk.token, chunk.sequence, bytes);
        Ok(PostAnswer::Accepted)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        out.append(&mut self.failed);
        if self.closing {
            // Copies that were under way keep their requests until they end.
            if let Err(error) = self.progress_stage() {
                tracing::debug!(%error, "a copy of a closed channel");
            }
            self.fail_all();
            out.append(&mut self.failed);
            return Ok(());
        }
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let done = self.work(out);
        let done = match done {
            // Of what was sent the control connection may still say that it was placed.
            Ok(()) if self.peer_closed && self.must_move() => Err(self.peer_gone()),
            done => done,
        };
        if let Err(error) = &done {
            self.broken = Some(error.clone());
        }
        done
    }

    fn consume(&mut self, ticket: Ticket) -> Result<PostAnswer<Ticket>, ChannelError> {
        match self.inflow.consume(ticket) {
            Ok(()) => {}
            Err(error) => return Err(self.bad_request(format!("ticket {}: {error}", ticket.0))),
        }
        if self.inflow.returns().fragments() >= Self::RETURN_AT_ONCE {
            self.give_back();
        }
        self.close_payload_when_unread();
        Ok(PostAnswer::Accepted)
    }

    fn cancel(&mut self, token: u64) -> Cancel {
        match self.outflow.is_placed(token) {
            true => Cancel::Pending,
            false => Cancel::Unsupported,
        }
    }

    fn placed(&mut self, sequence: u64) -> Result<(), ChannelError> {
        if !self.outflow.placed(sequence) {
            return Err(self.protocol(
                "placed chunks that were sent".to_owned(),
                format!("chunk {sequence}"),
            ));
        }
        self.signal.wake();
        Ok(())
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.watch.as_fd())
    }

    fn in_flight(&self) -> usize {
        self.inflow.posted() + self.outflow.posted() + self.failed.len()
    }

    fn close(&mut self) {
        if std::mem::replace(&mut self.closing, true) {
            return;
        }
        self.close_payload();
        if self.ordinary.take().is_some() {
            self.watch.forget(Which::Ordinary);
        }
        self.stage.close(&mut self.outflow);
        self.fail_all();
        self.signal.wake();
    }

    fn closed(&self) -> bool {
        self.closing && self.in_flight() == 0
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn stats(&self) -> ChannelStats {
        let mut sum = self.stats;
        sum += self.inflow.stats();
        sum
    }
}

impl DevmemChannel {
    /// Tokens that are given back without waiting for more: half of what the kernel takes in one
    /// call.
    const RETURN_AT_ONCE: u64 = 512;
}

impl Drop for DevmemChannel {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests;
