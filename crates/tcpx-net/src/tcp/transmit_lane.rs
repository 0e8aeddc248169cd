//! Whose chunks a lane carries: those in the queue of its channel.

mod end;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_lanes::lane_group;
use tcpx_lanes::sealing::{Head, SendSeal};
use tcpx_lanes::send_lane::{Next, Owner, SendLane};
use tcpx_lanes::socket::is_near;
use tcpx_lanes::socket_calls::{self as calls, Moved, Part, WIRE_CALL};
use tcpx_lanes::splice::Lender;
use tcpx_lanes::tcp_info::transport;
use tcpx_lanes::zero_copy;

use super::loss::Lost;
use super::pace::Load;
use super::permits::Permit;
use super::shared::{Event, LaneSocket, Shared};
use super::transmit_table::{LONG, Outgoing, Taken};
use super::uncopied::Uncopied;
use crate::error::ChunkPosition;

/// The sending half of a lane of a channel.
pub(super) fn transmit_lane(
    shared: Arc<Shared>,
    socket: Arc<LaneSocket>,
    seal: SendSeal,
) -> SendLane<Queue> {
    SendLane::new(Queue::new(shared, socket, seal))
}

/// The queue of a channel, as one of its lanes finds it. Chunks are kept in the channel's table until the peer
/// has placed them.
#[derive(Debug)]
pub(super) struct Queue {
    shared: Arc<Shared>,
    socket: Arc<LaneSocket>,
    /// Bytes of its last chunk.
    chunk: u64,
    /// It has just sent a short chunk.
    sent_short: bool,
    /// Sends slots by their pages, if that is to be tried.
    lender: Lender,
    /// Host memory that the kernel reads where it lies.
    uncopied: Uncopied,
    seal: SendSeal,
}

/// A chunk in the lane's hands.
#[derive(Debug)]
pub(super) struct Writing {
    chunk: Outgoing,
    /// Its header, as this lane sends it.
    head: Head,
    /// Its slot is sent by its pages where the system allows it.
    by_pages: bool,
    /// The last call that sent bytes of it without a copy.
    uncopied: Option<u32>,
}

impl Queue {
    fn new(shared: Arc<Shared>, socket: Arc<LaneSocket>, seal: SendSeal) -> Self {
        let lender = match shared.parts.splice {
            true => Lender::Untried(WIRE_CALL),
            false => Lender::Refused(None),
        };
        // A receiver on this host gets a copy in any case.
        let uncopied = shared.parts.zero_copy
            && !is_near(&*socket)
            && zero_copy::enable(socket.as_fd())
                .inspect_err(|error| tracing::info!(%error, "host memory is sent with a copy"))
                .is_ok();
        Self {
            shared,
            socket,
            chunk: 0,
            sent_short: false,
            lender,
            uncopied: Uncopied::new(uncopied),
            seal,
        }
    }

    /// Whether the lane leaves what is queued to others, which are done with it sooner.
    fn leaves_the_rest(&self) -> bool {
        let shared = &self.shared;
        let lane = self.socket.lane;
        if !shared.paces.is_slow(lane) {
            return false;
        }
        let chunks = &shared.transmit.chunks;
        let others = (0..).zip(chunks.done()).filter(|(other, _)| *other != lane);
        let with_others = others.map(|(_, done)| done.under_way()).sum();
        let queued = chunks.queued() as u64;
        let backlog = transport(&*self.socket).unwrap_or_default().backlog();
        let load = Load {
            chunk: self.chunk,
            queued,
            with_others,
            backlog,
        };
        queued > 0 && shared.paces.is_too_slow(lane, load)
    }

    /// Leaves the next chunk to lanes that rest, after a short one; whether this lane rests then.
    fn gives_way(&mut self) -> bool {
        if !std::mem::take(&mut self.sent_short) {
            return false;
        }
        loop {
            match self
                .shared
                .transmit
                .chunks
                .next_after_short(self.socket.lane)
            {
                lane_group::Next::Rest => return true,
                lane_group::Next::Go => return false,
                lane_group::Next::Wake(other) if self.shared.roster.wake_sender(other) => {
                    return true;
                }
                // It is gone, and rests no more.
                lane_group::Next::Wake(_) => {}
            }
        }
    }

    /// The chunk was written, and the kernel has its bytes or reads them no more.
    fn keep(&self, chunk: Outgoing, end: u64) {
        let counters = &self.shared.counters;
        counters.chunks_sent.fetch_add(1, Ordering::Relaxed);
        counters
            .bytes_sent
            .fetch_add(chunk.payload.len() as u64, Ordering::Relaxed);
        let slot = chunk.slot;
        if self.shared.transmit.written(self.socket.lane, chunk, end) {
            self.shared.send_ended(slot);
        }
    }

    /// Takes the kernel's reports on what it read where it lay.
    fn collect(&mut self) -> io::Result<()> {
        while !self.uncopied.is_idle()
            && let Some(done) = zero_copy::done(self.socket.as_fd())?
        {
            let calls = self
                .uncopied
                .reported(done)
                .map_err(|bad| io::Error::new(io::ErrorKind::InvalidData, bad))?;
            self.shared
                .counters
                .calls_uncopied
                .fetch_add(calls, Ordering::Relaxed);
        }
        Ok(())
    }

    fn write(&mut self, writing: &mut Writing, done: usize) -> io::Result<Moved> {
        let Writing {
            chunk,
            head,
            by_pages,
            uncopied,
        } = writing;
        let from = done.saturating_sub(head.len());
        let head = head.rest(done);
        let sealed = self.seal.send(self.socket.as_fd(), head, &chunk.payload);
        if let Some(moved) = sealed {
            return moved;
        }
        let part = Part {
            slice: &chunk.payload,
            from,
            len: chunk.payload.len() - from,
        };
        let socket = self.socket.as_fd();
        if *by_pages {
            let sent = self.lender.send_part(socket, head, part)?;
            if let Some(error) = self.lender.take_refusal() {
                tracing::info!(%error, "pages cannot be sent as they are; slots are copied");
            }
            if let (true, Moved::Bytes(bytes)) = (sent.lent, &sent.moved) {
                chunk.spliced = Some(self.socket.lane);
                let counter = &self.shared.counters.bytes_spliced;
                counter.fetch_add(*bytes as u64, Ordering::Relaxed);
            }
            return Ok(sent.moved);
        }
        if chunk.permit.is_none() && self.uncopied.takes(part.len_in_one_place()) {
            if !head.is_empty() {
                return calls::send_more(socket, head);
            }
            match calls::send_uncopied(socket, part) {
                Ok(moved) => {
                    if matches!(moved, Moved::Bytes(_)) {
                        *uncopied = Some(self.uncopied.sent());
                    }
                    return Ok(moved);
                }
                Err(error) => self.uncopied.refused(&error),
            }
        }
        calls::send(socket, head, part)
    }
}

impl Owner for Queue {
    type Chunk = Writing;
    const ACKNOWLEDGED: bool = false;

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn begin(&mut self) -> io::Result<bool> {
        if self.shared.parts.staging.has_waiting() {
            Shared::stage_waiting(&self.shared);
        }
        if !self.uncopied.is_idle() {
            self.collect()?;
            while let Some(chunk) = self.uncopied.release() {
                self.keep(chunk, 0);
            }
        }
        Ok(true)
    }

    fn next(&mut self) -> Next<Writing> {
        if self.gives_way() {
            return Next::Rest;
        }
        loop {
            if self.leaves_the_rest() {
                self.shared.leave_to_others(self.socket.lane);
                return Next::Rest;
            }
            match self.shared.transmit.take(self.socket.lane) {
                Some(Taken::Chunk(mut chunk)) => {
                    if self.shared.parts.tells_behind {
                        chunk.tell_behind(self.shared.transmit.queued_bytes());
                    }
                    self.chunk = chunk.payload.len() as u64;
                    // A slot, and nothing else: it is ours, so that it can be kept as it is. Of a chunk that was sent
                    // before, the peer may have read the other copy: nothing says then when this one's pages were.
                    let first = chunk.attempt == 0 && self.shared.may_splice();
                    let by_pages = first && chunk.permit.as_mut().is_some_and(Permit::lend);
                    return Next::Chunk(Writing {
                        head: self.seal.begin(&chunk.header),
                        by_pages,
                        chunk,
                        uncopied: None,
                    });
                }
                Some(Taken::Withdrawn(slot)) => self.shared.report(Event::SendWithdrawn { slot }),
                None => return Next::Rest,
            }
        }
    }

    fn wire_bytes(&self, writing: &Writing) -> usize {
        self.seal.wire_bytes(writing.chunk.payload.len())
    }

    fn send(&mut self, writing: &mut Writing, done: usize) -> io::Result<Moved> {
        let moved = self.write(writing, done)?;
        if matches!(moved, Moved::Bytes(_)) {
            let calls = &self.shared.counters.wire_calls;
            calls.fetch_add(1, Ordering::Relaxed);
        }
        Ok(moved)
    }

    fn written(&mut self, writing: Writing, end: u64) {
        let Writing {
            chunk, uncopied, ..
        } = writing;
        self.sent_short = chunk.payload.len() < LONG;
        if let Some(chunk) = self.uncopied.hold(uncopied, chunk) {
            self.keep(chunk, end);
        }
    }

    fn ended(&mut self, within: Option<(&Writing, usize)>, cause: io::Error) {
        let position = within.map(|(writing, done)| ChunkPosition {
            done: done
                .saturating_sub(writing.head.len())
                .min(writing.chunk.payload.len()) as u64,
            ..writing.chunk.position
        });
        let lost = Lost::broken("sending", position, cause);
        self.shared.lane_lost(self.socket.lane, lost);
    }

    fn close(&mut self, unwritten: Option<Writing>) {
        let unwritten = unwritten.map(|writing| writing.chunk);
        if self.uncopied.is_idle() {
            self.part(unwritten);
        } else {
            self.part_when_unread(unwritten);
        }
    }
}
