//! The sending half of a lane: takes chunks from the channel's queue and writes them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::epoll::EventFlags;
use tcpx_wire::chunk_header::ChunkHeader;

use super::event_loop::{Source, Turn};
use super::io::{self as socket_io, Moved, Part};
use super::loss::Lost;
use super::shared::{Event, LaneSocket, Shared};
use super::splice::Splice;
use super::transmit_table::{Outgoing, Taken};
use crate::error::{ChannelError, ChunkPosition};
use crate::socket::forget_unsent;

/// Bytes that a lane may write before the others of its loop get their turn.
const TURN_BYTES: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct TransmitLane {
    shared: Arc<Shared>,
    socket: Arc<LaneSocket>,
    current: Option<Writing>,
    pipe: Pipe,
}

/// How the lane sends slots.
#[derive(Debug)]
enum Pipe {
    /// Not tried yet.
    Untried,
    /// By their pages.
    Ready(Splice),
    /// As everything else: copied, because the system refuses or chunks are not kept.
    Unused,
}

#[derive(Debug)]
struct Writing {
    chunk: Outgoing,
    /// Bytes written, header included.
    written: usize,
}

impl Writing {
    fn position(&self) -> ChunkPosition {
        let done = self.written.saturating_sub(ChunkHeader::BYTES) as u64;
        ChunkPosition {
            done,
            ..self.chunk.position
        }
    }
}

impl TransmitLane {
    pub(super) fn new(shared: Arc<Shared>, socket: Arc<LaneSocket>) -> Self {
        let pipe = if shared.splices() {
            Pipe::Untried
        } else {
            Pipe::Unused
        };
        Self {
            shared,
            socket,
            current: None,
            pipe,
        }
    }

    /// Makes sure that there is a chunk to write.
    fn take(&mut self) -> bool {
        while self.current.is_none() {
            match self.shared.transmit.take(self.socket.lane) {
                Some(Taken::Chunk(chunk)) => self.current = Some(Writing { chunk, written: 0 }),
                Some(Taken::Withdrawn(slot)) => self.shared.report(Event::SendWithdrawn { slot }),
                None => return false,
            }
        }
        true
    }

    /// Writes some of the current chunk.
    fn write(&mut self) -> io::Result<Moved> {
        let Some(Writing { chunk, written }) = &mut self.current else {
            return Ok(Moved::WouldBlock);
        };
        let head = chunk.header.get(*written..).unwrap_or_default();
        let from = written.saturating_sub(ChunkHeader::BYTES);
        let part = Part {
            slice: &chunk.payload,
            from,
            len: chunk.payload.len() - from,
        };
        let socket = self.socket.as_fd();
        // A slot, and nothing else: it is ours, so that it can be kept as it is.
        if chunk.permit.is_none() {
            return socket_io::send(socket, head, part);
        }
        if matches!(self.pipe, Pipe::Untried) {
            self.pipe = Splice::new().map_or(Pipe::Unused, Pipe::Ready);
        }
        let Pipe::Ready(splice) = &mut self.pipe else {
            return socket_io::send(socket, head, part);
        };
        if !head.is_empty() {
            return socket_io::send_more(socket, head);
        }
        match splice.send(socket, part) {
            Ok(moved) => {
                chunk.spliced = true;
                Ok(moved)
            }
            Err(error) if !splice.is_loaded() => {
                tracing::info!(%error, "pages cannot be sent as they are; slots are copied");
                self.pipe = Pipe::Unused;
                socket_io::send(socket, head, part)
            }
            Err(error) => Err(error),
        }
    }

    fn lost(&mut self, cause: io::Error) -> Turn {
        let position = self.current.as_ref().map(Writing::position);
        self.shared
            .lane_lost(self.socket.lane, Lost::broken("sending", position, cause));
        Turn::End
    }

    fn advance(&mut self, bytes: usize) {
        if let Some(Writing { chunk, written }) = &mut self.current {
            *written += bytes;
            if *written == ChunkHeader::BYTES + chunk.payload.len() {
                self.complete();
            }
        }
    }

    fn complete(&mut self) {
        let Some(Writing { chunk, .. }) = self.current.take() else {
            return;
        };
        let counters = &self.shared.counters;
        counters.chunks_sent.fetch_add(1, Ordering::Relaxed);
        counters
            .bytes_sent
            .fetch_add(chunk.payload.len() as u64, Ordering::Relaxed);
        if let Some(chunk) = self.shared.transmit.written(chunk) {
            self.ended(chunk);
        }
    }

    /// The chunk needs its lane no more.
    fn ended(&self, chunk: Outgoing) {
        let slot = chunk.slot;
        drop(chunk);
        self.shared.transmit.free(slot);
        self.shared.report(Event::Sent { slot });
    }

    /// The lane is gone and the channel lives: the others send what may not have arrived.
    fn hand_over(&mut self) {
        let mut count = 0;
        if let Some(Writing { chunk, .. }) = self.current.take() {
            match self.shared.transmit.put_back(chunk) {
                Some(chunk) => self.ended(chunk),
                None => count += 1,
            }
        }
        let lane = self.socket.lane;
        count += self.shared.transmit.requeue(lane);
        if count > 0 && self.socket.ended_by_peer.load(Ordering::Acquire) {
            // It looked like an end in order, and was none: chunks of ours were on it.
            self.shared
                .counters
                .lanes_lost
                .fetch_add(1, Ordering::Relaxed);
        }
        self.shared
            .counters
            .chunks_resent
            .fetch_add(count as u64, Ordering::Relaxed);
        // One more than chunks: whoever woke this lane last for a chunk of its own meant any lane.
        self.shared.transmit.idle.remove(lane);
        for _ in 0..=count {
            self.shared.wake_sender(0);
        }
        if self.shared.staging.has_waiting() {
            self.shared.wakers.wake_any_sender();
        }
    }
}

impl Source for TransmitLane {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn interest(&self) -> EventFlags {
        EventFlags::OUT
    }

    fn turn(&mut self) -> Turn {
        if self.shared.staging.has_waiting() {
            Shared::stage_waiting(&self.shared);
        }
        let mut share = TURN_BYTES;
        while share > 0 {
            if !self.take() {
                return Turn::Rest;
            }
            match self.write() {
                Ok(Moved::Bytes(bytes)) => {
                    share = share.saturating_sub(bytes);
                    self.shared
                        .counters
                        .wire_calls
                        .fetch_add(1, Ordering::Relaxed);
                    self.advance(bytes);
                }
                Ok(Moved::WouldBlock) => return Turn::Rest,
                Ok(Moved::End) => return self.lost(io::ErrorKind::UnexpectedEof.into()),
                Err(error) => return self.lost(error),
            }
        }
        Turn::Again
    }

    fn finish(&mut self) {
        // What the kernel still has of pages that may be used for something else is not sent.
        let is_spliced = |writing: &Writing| writing.chunk.spliced;
        if self.current.as_ref().is_some_and(is_spliced)
            || self.shared.transmit.has_unread_pages(self.socket.lane)
        {
            forget_unsent(self.socket.as_fd());
        }
        // Where nothing is sent again, a lane's end is the channel's, even if the half that saw it first
        // has not said so yet.
        let is_over = self.shared.is_over();
        if is_over || !self.shared.resend {
            if let Some(Writing { chunk, .. }) = self.current.take() {
                let slot = chunk.slot;
                drop(chunk);
                let error = if is_over {
                    self.shared.failure(1)
                } else {
                    ChannelError::PeerClosed {
                        channel: self.shared.name.clone(),
                        outstanding: 1,
                    }
                };
                self.shared.transmit.free(slot);
                self.shared.report(Event::SendFailed { slot, error });
            }
        } else {
            self.hand_over();
        }
        self.shared.half_gone(self.socket.lane);
    }
}
