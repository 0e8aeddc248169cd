//! The channel of the device-memory network: two TCP connections, and everything that happens on them
//! in [`Channel::poll`].

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
use super::companion::Companion;
use super::inflow::Inflow;
use super::outflow::Outflow;
use super::slots::SendSlot;
use super::stage::Stage;
use super::watch::{Watch, Which};
use super::zero_copy::InKernel;
use tcpx_net::channel::{
    Cancel, Channel, ChannelStats, Completion, Posted, Readiness, ReceiveChunk, SendChunk, Ticket,
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
    pub(super) companion: OwnedFd,
    pub(super) rule: Option<FlowRule>,
    pub(super) inflow: Inflow,
    pub(super) stage: Stage,
    pub(super) signal: Arc<Waker>,
    pub(super) window: u16,
}

/// Why payload is not in the pool.
const PLAIN: &str = "payload arrives as plain data, not in the pool: the queue's binding ended, or the flow is not steered to it; `tcpx devmem status` shows both";

/// Why a path changed when the other end was the first to give the payload connection up.
const PEER_ENDED: &str = "the peer ended the payload connection; its own output says why";

/// How the peer's end of the connection shows where one writes, or reads too late.
fn is_the_peers_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// How a direction's bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// On the payload connection.
    Payload,
    /// Nowhere: the payload connection is given up, and the peer has not said from where on it wants
    /// them on the companion. Only ever the way out.
    Waiting,
    /// On the companion.
    Companion,
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
    companion: Option<Companion>,
    rule: Option<FlowRule>,
    watch: Watch,
    signal: Arc<Waker>,
    inflow: Inflow,
    outflow: Outflow,
    stage: Stage,
    in_kernel: InKernel<Arc<SendSlot>>,
    way_in: Path,
    way_out: Path,
    /// Room for control messages.
    control: Vec<u8>,
    /// Why the kernel did not take tokens back, until the way in was given up for it.
    stuck_tokens: Option<String>,
    /// The socket in use has room, as far as is known.
    writable: bool,
    /// The kernel has no room to note another zero-copy send, until it reports on one.
    unreported: bool,
    /// Chunks whose arrival the peer was told of.
    told: u64,
    /// The person was told that the path changed.
    changed: bool,
    /// The person was told that payload no longer lands in the pool.
    told_plain: bool,
    window: u16,
    closing: bool,
    /// The peer closed the companion.
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
            companion: Some(Companion::new(parts.companion)),
            rule: parts.rule,
            watch,
            signal,
            inflow: parts.inflow,
            outflow: Outflow::default(),
            stage: parts.stage,
            in_kernel: InKernel::default(),
            way_in: Path::Payload,
            way_out: Path::Payload,
            control: Vec::new(),
            stuck_tokens: None,
            writable: true,
            unreported: false,
            told: 0,
            changed: false,
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

    /// Everything that can be done now.
    fn work(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError> {
        self.give_back_or_leave(out);
        self.rewatch()?;
        let [payload, companion, staging] = self
            .watch
            .ready()
            .map_err(|error| self.system("epoll_wait", error.into()))?;
        if payload.write || companion.write {
            self.writable = true;
        }
        if staging.read {
            self.progress_stage()?;
        }
        if payload.error {
            self.reap_sends(out)?;
        }
        if companion.read {
            self.read_companion(out)?;
        }
        if payload.read && self.way_in == Path::Payload {
            self.receive(out)?;
        } else {
            self.inflow.relieve(out);
        }
        self.tell_peer();
        self.write(out)?;
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
            let mut flags = blocked(waits && self.way_out == Path::Payload);
            if self.way_in == Path::Payload && takes_more {
                flags |= EventFlags::IN;
            }
            // Reports about zero-copy sends come as errors, which need no flag.
            let watched = !flags.is_empty() || !self.in_kernel.is_empty();
            let wanted = watched.then_some(flags);
            let done = self.watch.want(Which::Payload, payload.as_fd(), wanted);
            done.map_err(|error| self.system("epoll_ctl", error.into()))?;
        }
        if let Some(companion) = &self.companion {
            let mut flags = EventFlags::empty();
            let payload_waits = companion.brings_payload() && !takes_more;
            if !self.peer_closed && !payload_waits {
                flags |= EventFlags::IN;
            }
            let data_waits = waits && self.way_out == Path::Companion;
            flags |= blocked(data_waits || companion.wants_write());
            let wanted = (!flags.is_empty() && !self.peer_closed).then_some(flags);
            let done = self
                .watch
                .want(Which::Companion, companion.socket(), wanted);
            done.map_err(|error| self.system("epoll_ctl", error.into()))?;
        }
        Ok(())
    }

    /// Tells the person, once, that the bytes take another path.
    fn path_changed(&mut self, why: String, out: &mut Vec<Completion>) {
        if std::mem::replace(&mut self.changed, true) {
            return;
        }
        self.name.clone_from(&self.plain_name);
        out.push(Completion::PathChanged {
            path: self.name.clone(),
            why,
        });
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
    fn post_send(&mut self, chunk: SendChunk) -> Result<Posted<SendChunk>, ChannelError> {
        self.admit(&chunk.source)?;
        if self.outflow.posted() >= usize::from(self.window) {
            return Ok(Posted::Full(chunk));
        }
        self.queue_send(chunk)?;
        Ok(Posted::Accepted)
    }

    fn post_receive(&mut self, chunk: ReceiveChunk) -> Result<Posted<ReceiveChunk>, ChannelError> {
        self.admit(&chunk.destination)?;
        if self.inflow.posted() >= usize::from(self.window) {
            return Ok(Posted::Full(chunk));
        }
        // The engine unpacks to the destination; the bytes land elsewhere first.
        self.inflow
            .post(chunk.token, chunk.destination.len() as u64);
        Ok(Posted::Accepted)
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
            Ok(()) if self.peer_closed && self.in_flight() > 0 => Err(self.peer_gone()),
            done => done,
        };
        if let Err(error) = &done {
            self.broken = Some(error.clone());
        }
        done
    }

    fn consume(&mut self, ticket: Ticket) -> Result<Posted<Ticket>, ChannelError> {
        match self.inflow.consume(ticket) {
            Ok(()) => {}
            Err(error) => return Err(self.bad_request(format!("ticket {}: {error}", ticket.0))),
        }
        if self.inflow.returns().fragments() >= Self::RETURN_AT_ONCE {
            self.give_back();
        }
        self.close_payload_when_unread();
        Ok(Posted::Accepted)
    }

    fn cancel(&mut self, _token: u64) -> Cancel {
        Cancel::Unsupported
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
        if let Some(companion) = &mut self.companion {
            // The peer's last sends end with this word; a full socket loses it, as a break would.
            let _ = companion.flush();
        }
        self.close_payload();
        if self.companion.take().is_some() {
            self.watch.forget(Which::Companion);
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
    /// Tokens that are given back without waiting for more: half of what the kernel takes in one call.
    const RETURN_AT_ONCE: u64 = 512;
}

impl Drop for DevmemChannel {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests;
