//! The sending half of a lane: takes chunks from the channel's queue and writes them.

mod end;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::epoll::EventFlags;
use tcpx_lanes::event_loop::{Source, Turn};
use tcpx_lanes::socket::is_near;
use tcpx_lanes::socket_calls::{self as socket_io, Moved, Part, WIRE_CALL};
use tcpx_lanes::splice::Splice;
use tcpx_lanes::tcp_info::transport;
use tcpx_lanes::zero_copy;
use tcpx_wire::chunk_header::ChunkHeader;

use super::loss::Lost;
use super::pace::Load;
use super::shared::{Event, LaneSocket, Shared};
use super::transmit_table::{LONG, Next, Outgoing, Taken};
use super::uncopied::Uncopied;
use crate::error::ChunkPosition;

/// Bytes that a lane may write before the others of its loop get their turn.
const TURN_BYTES: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct TransmitLane {
    shared: Arc<Shared>,
    socket: Arc<LaneSocket>,
    current: Option<Writing>,
    /// Bytes of its last chunk.
    chunk: u64,
    /// It has just sent a short chunk.
    sent_short: bool,
    pipe: Pipe,
    /// Host memory that the kernel reads where it lies.
    uncopied: Uncopied,
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
    /// Its slot is sent by its pages where the system allows it.
    by_pages: bool,
    /// Bytes written, header included.
    written: usize,
    /// The last call that sent bytes of it without a copy.
    uncopied: Option<u32>,
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
        // A receiver on this host gets a copy in any case.
        let uncopied = shared.zero_copy
            && !is_near(&*socket)
            && zero_copy::enable(socket.as_fd())
                .inspect_err(|error| tracing::info!(%error, "host memory is sent with a copy"))
                .is_ok();
        Self {
            shared,
            socket,
            current: None,
            chunk: 0,
            sent_short: false,
            pipe,
            uncopied: Uncopied::new(uncopied),
        }
    }

    /// Whether the lane leaves what is queued to others, which are done with it sooner.
    fn leaves_the_rest(&self) -> bool {
        let shared = &self.shared;
        let lane = self.socket.lane;
        if !shared.resend || !shared.paces.is_slow(lane) {
            return false;
        }
        let (queued, with_others) = shared.transmit.left(lane);
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
            match self.shared.transmit.next_after_short(self.socket.lane) {
                Next::Rest => return true,
                Next::Go => return false,
                Next::Wake(other) if self.shared.wakers.wake_sender(other) => return true,
                // It is gone, and rests no more.
                Next::Wake(_) => {}
            }
        }
    }

    /// Makes sure that there is a chunk to write.
    fn take(&mut self) -> bool {
        if self.current.is_none() && self.gives_way() {
            return false;
        }
        while self.current.is_none() {
            if self.leaves_the_rest() {
                self.shared.leave_to_others(self.socket.lane);
                return false;
            }
            match self.shared.transmit.take(self.socket.lane) {
                Some(Taken::Chunk(mut chunk)) => {
                    if self.shared.tells_behind {
                        chunk.tell_behind(self.shared.transmit.queued_bytes());
                    }
                    self.chunk = chunk.payload.len() as u64;
                    self.current = Some(Writing {
                        by_pages: self.shared.may_splice(),
                        chunk,
                        written: 0,
                        uncopied: None,
                    });
                }
                Some(Taken::Withdrawn(slot)) => self.shared.report(Event::SendWithdrawn { slot }),
                None => return false,
            }
        }
        true
    }

    /// Writes some of the current chunk.
    fn write(&mut self) -> io::Result<Moved> {
        let Some(Writing {
            chunk,
            by_pages,
            written,
            uncopied,
        }) = &mut self.current
        else {
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
            if self.uncopied.takes(part.len) {
                if !head.is_empty() {
                    return socket_io::send_more(socket, head);
                }
                match socket_io::send_uncopied(socket, part) {
                    Ok(moved) => {
                        if matches!(moved, Moved::Bytes(_)) {
                            *uncopied = Some(self.uncopied.sent());
                        }
                        return Ok(moved);
                    }
                    Err(error) => self.uncopied.refused(&error),
                }
            }
            return socket_io::send(socket, head, part);
        }
        if matches!(self.pipe, Pipe::Untried) {
            self.pipe = Splice::new(WIRE_CALL).map_or(Pipe::Unused, Pipe::Ready);
        }
        let Pipe::Ready(splice) = &mut self.pipe else {
            return socket_io::send(socket, head, part);
        };
        if !*by_pages {
            return socket_io::send(socket, head, part);
        }
        if !head.is_empty() {
            return socket_io::send_more(socket, head);
        }
        match splice.send(socket, part) {
            Ok(moved) => {
                if let Moved::Bytes(bytes) = moved {
                    chunk.spliced = Some(self.socket.lane);
                    let counter = &self.shared.counters.bytes_spliced;
                    counter.fetch_add(bytes as u64, Ordering::Relaxed);
                }
                Ok(moved)
            }
            // What the pipe has taken and the socket has not is still to be sent.
            Err(error) if is_refusal(&error) => {
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
        if let Some(Writing { chunk, written, .. }) = &mut self.current {
            *written += bytes;
            if *written == ChunkHeader::BYTES + chunk.payload.len() {
                self.complete();
            }
        }
    }

    fn complete(&mut self) {
        if let Some(Writing {
            chunk, uncopied, ..
        }) = self.current.take()
        {
            self.sent_short = chunk.payload.len() < LONG;
            if let Some(chunk) = self.uncopied.hold(uncopied, chunk) {
                self.sent(chunk);
            }
        }
    }

    /// The chunk was written, and the kernel has its bytes or reads them no more.
    fn sent(&self, chunk: Outgoing) {
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
        self.shared.report_sent(slot);
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
}

/// The system does not send pages in this way, whatever the state of the lane.
fn is_refusal(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
            | io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::NetworkDown
    )
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
        if !self.uncopied.is_idle() {
            if let Err(error) = self.collect() {
                return self.lost(error);
            }
            while let Some(chunk) = self.uncopied.release() {
                self.sent(chunk);
            }
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
        if self.uncopied.is_idle() {
            self.part();
        } else {
            self.part_when_unread();
        }
    }
}
