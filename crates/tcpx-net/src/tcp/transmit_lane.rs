//! Whose chunks a lane carries: those in the queue of its channel.

mod end;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_lanes::sealing::{Head, SendSeal};
use tcpx_lanes::send_lane::{NextChunk, Owner, SendLane};
use tcpx_lanes::socket::may_be_near;
use tcpx_lanes::socket_calls::{self as calls, Moved, Part, WIRE_CALL};
use tcpx_lanes::splice::Lender;
use tcpx_lanes::tcp_info::{given, transport};
use tcpx_memory::{Region, RegionSlice};

use super::Lend;
use super::lane_rates::Load;
use super::loss::Lost;
use super::permits::Permit;
use super::shared::{ChannelShared, Event, LaneSocket};
use super::transmit_table::{Acknowledged, LONG, Outgoing, Taken};
use crate::error::{ChannelError, ChunkPosition};

/// The sending half of a lane of a channel.
pub(super) fn transmit_lane(
    shared: Arc<ChannelShared>,
    socket: Arc<LaneSocket>,
    seal: SendSeal,
) -> SendLane<Queue> {
    SendLane::new(Queue::new(shared, socket, seal))
}

/// The queue of a channel, as one of its lanes finds it. Chunks are kept in the channel's table
/// until the peer has placed them.
#[derive(Debug)]
pub(super) struct Queue {
    shared: Arc<ChannelShared>,
    socket: Arc<LaneSocket>,
    /// Bytes of its last chunk.
    chunk: u64,
    /// Sends slots by their pages, if that is to be tried.
    lender: Lender,
    seal: SendSeal,
    /// The lane ends amid a chunk whose memory it cannot read.
    unreadable: Option<ChannelError>,
}

/// A chunk in the lane's hands.
#[derive(Debug)]
pub(super) struct Writing {
    chunk: Outgoing,
    /// Its header, as this lane sends it.
    head: Head,
    /// Its slot is sent by its pages where the system allows it.
    by_pages: bool,
    /// Its payload is a copy that nobody else has.
    is_own: bool,
    /// Nothing follows its header: the peer reads its payload where it lies.
    is_exposed: bool,
}

impl Queue {
    fn new(shared: Arc<ChannelShared>, socket: Arc<LaneSocket>, seal: SendSeal) -> Self {
        let lender = match shared.parts.lend {
            Lend::Always => Lender::new(WIRE_CALL),
            Lend::OtherHosts if !may_be_near(&*socket) => {
                let (of_lane, start) = (Arc::clone(&socket), given(&*socket).unwrap_or(u64::MAX));
                let acknowledged = move |end: u64| {
                    let transport = transport(&*of_lane).unwrap_or_default();
                    transport.acknowledged >= start.saturating_add(end)
                };
                let acknowledged = Acknowledged(Box::new(acknowledged));
                shared.transmit.lends(socket.lane, Some(acknowledged));
                Lender::new(WIRE_CALL)
            }
            Lend::OtherHosts | Lend::Never => Lender::never(),
        };
        Self {
            shared,
            socket,
            chunk: 0,
            lender,
            seal,
            unreadable: None,
        }
    }

    /// Whether the lane leaves what is queued to others, which are done with it sooner.
    fn leaves_the_rest(&self) -> bool {
        let shared = &self.shared;
        let lane = self.socket.lane;
        if !shared.lane_rates.is_slow(lane) {
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
        queued > 0 && shared.lane_rates.is_too_slow(lane, load)
    }

    /// Copies the payload of a chunk aside: what is left of it goes out from there, as the peer may
    /// count what it reads of it, and the source is its program's again. Not that of a slot, which
    /// is no program's.
    fn copy_aside(&self, writing: &mut Writing) {
        let Writing { chunk, is_own, .. } = writing;
        if *is_own || chunk.permit.is_some() {
            return;
        }
        let copied = match chunk.exposed.take() {
            // Nothing of it goes out, and the peer counts nothing that it reads from now on.
            Some(_) => Region::host(1)
                .map(|own| own.all())
                .map_err(io::Error::other),
            None => copied(&chunk.payload),
        };
        match copied {
            Ok(own) => {
                *is_own = true;
                chunk.payload = own;
                self.shared.report(Event::Copied { slot: chunk.slot });
            }
            Err(error) => {
                tracing::warn!(%error, "a chunk in the socket keeps the memory that it is sent from");
            }
        }
    }

    fn write(&mut self, writing: &mut Writing, done: usize) -> io::Result<Moved> {
        let Writing {
            chunk,
            head,
            by_pages,
            is_exposed,
            ..
        } = writing;
        let from = done.saturating_sub(head.len());
        let head = head.rest(done);
        if *is_exposed {
            return calls::send_bytes(self.socket.as_fd(), head);
        }
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
        calls::send(socket, head, part)
    }
}

impl Owner for Queue {
    type Chunk = Writing;

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn turn_bytes(&self) -> usize {
        self.shared.parts.turn_bytes
    }

    fn begin(&mut self) -> bool {
        if self.shared.parts.staging.has_waiting() {
            ChannelShared::stage_waiting(&self.shared);
        }
        true
    }

    fn resume(&mut self, writing: &mut Writing) {
        let transmit = &self.shared.transmit;
        if transmit.is_to_let_go(self.socket.lane, writing.chunk.slot) {
            self.copy_aside(writing);
        }
    }

    fn next(&mut self) -> NextChunk<Writing> {
        loop {
            if self.leaves_the_rest() {
                self.shared.leave_to_others(self.socket.lane);
                return NextChunk::Rest;
            }
            match self.shared.transmit.take(self.socket.lane) {
                Some(Taken::Chunk(mut chunk)) => {
                    // Others are woken one by the other: whoever queues chunks has more to do.
                    self.shared.wake_sender();
                    if chunk.exposed.is_some() {
                        // As before on another lane.
                    } else if let Some(exposed) = self.shared.parts.local.expose(&chunk) {
                        chunk.expose(exposed);
                    } else if !chunk.payload.kind().is_cpu_accessible() {
                        let error = ChannelError::Memory {
                            channel: self.shared.parts.name.clone(),
                            operation: "sending",
                            cause: "the peer reads this memory of the GPU no more".to_owned(),
                        };
                        self.shared.send_failed(self.socket.lane, chunk, error);
                        continue;
                    }
                    self.chunk = chunk.payload.len() as u64;
                    // A slot, and nothing else: it is ours, so that it can be kept as it is. Of a
                    // chunk that was sent before, the peer may have read the other copy: nothing
                    // says then when this one's pages were.
                    let is_first = chunk.attempt == 0 && self.shared.may_splice();
                    // Many short chunks at a time are copied: else one lane takes one after the
                    // other before others are awake, and their reader reads them so. Between GPUs
                    // of a host 16 MiB took 1.2 times as long, and 256 KiB in eights 1.6 times; a
                    // few are there sooner without a copy.
                    let lends = is_first
                        && (chunk.payload.len() >= LONG || self.shared.transmit.leaves_lanes());
                    let by_pages = lends && chunk.permit.as_mut().is_some_and(Permit::lend);
                    return NextChunk::Chunk(Writing {
                        head: self.seal.begin(&chunk.header),
                        by_pages,
                        is_exposed: chunk.exposed.is_some(),
                        chunk,
                        is_own: false,
                    });
                }
                Some(Taken::Withdrawn(slot)) => self.shared.report(Event::SendWithdrawn { slot }),
                None => return NextChunk::Rest,
            }
        }
    }

    fn wire_bytes(&self, writing: &Writing) -> usize {
        match writing.is_exposed {
            true => writing.head.len(),
            false => self.seal.wire_bytes(writing.chunk.payload.len()),
        }
    }

    fn send(&mut self, writing: &mut Writing, done: usize) -> io::Result<Moved> {
        let moved = self.write(writing, done)?;
        let is_full = matches!(moved, Moved::WouldBlock);
        let chunks = &self.shared.transmit.chunks;
        chunks.set_full(self.socket.lane, is_full);
        if is_full {
            // What is queued does not wait for room here.
            self.shared.wake_sender();
        }
        Ok(moved)
    }

    fn unreadable(&mut self, writing: Writing, _cause: &io::Error) -> Result<(), Writing> {
        let error = self.shared.unmapped("sending", &writing.chunk.payload);
        self.shared
            .send_failed(self.socket.lane, writing.chunk, error);
        Ok(())
    }

    fn written(&mut self, writing: Writing, end: u64) {
        let chunk = writing.chunk;
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

    fn ended(&mut self, within: Option<(&Writing, usize)>, cause: io::Error) {
        if let Some((writing, _)) = within.filter(|_| calls::is_fault(&cause)) {
            self.unreadable = Some(self.shared.unmapped("sending", &writing.chunk.payload));
        }
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
        let mut unwritten = unwritten.map(|writing| writing.chunk);
        if let Some(error) = self.unreadable.take()
            && let Some(chunk) = unwritten.take()
        {
            self.shared.send_failed(self.socket.lane, chunk, error);
        }
        self.part(unwritten);
    }
}

/// A copy of a payload that a program may have taken away in the meantime.
fn copied(payload: &RegionSlice) -> io::Result<RegionSlice> {
    let own = Region::host(payload.len()).map_err(io::Error::other)?;
    let part = Part {
        slice: payload,
        from: 0,
        len: payload.len(),
    };
    own.with_bytes_mut(.., |bytes| calls::copy_checked(part, bytes))
        .map_err(io::Error::other)??;
    Ok(own.all())
}
