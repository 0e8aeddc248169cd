//! What arrives on a connection, and where it goes.

mod comeback;
mod lanes;
mod status;

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nccl_net::export::{Buffer, Log, NetError};
use tcpx_lanes::health::STALL_BEHIND;
use tcpx_lanes::socket_calls::{MAX_SPANS, Moved, Span};

use crate::error;
use crate::header::{FROM_SENDER, HEADER_BYTES, Header, Record};
use crate::landing::Landing;
use crate::lanes::to_gpu::ToGpu;
use crate::link::{Link, is_forged};
use crate::resume::{Comeback, Waiting, copied_bytes};
use crate::ring::Ring;
use crate::stall::Stall;
use crate::status::report_stall;

/// Bytes that one call may read before it returns to its caller.
const CALL_BUDGET: usize = 8 << 20;

/// Where a receive puts its bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// Straight into the posted buffer.
    Host(Buffer),
    /// Into device memory, through pinned slots.
    Gpu,
}

/// How far a receive is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Posted; neither its header has arrived nor all of it over lanes.
    Posted,
    /// The payload is arriving.
    Payload,
    /// Complete.
    Done,
}

/// One receive.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) target: Target,
    capacity: usize,
    /// Registration that the buffer lies in.
    memory: u64,
    pub(crate) phase: Phase,
    /// Message bytes, once announced.
    pub(crate) size: usize,
    received: usize,
}

impl Request {
    pub(crate) const fn new(target: Target, capacity: usize, memory: u64) -> Self {
        Self {
            target,
            capacity,
            memory,
            phase: Phase::Posted,
            size: 0,
            received: 0,
        }
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        self.hang_up();
    }
}

/// The connection of a receive comm.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) name: String,
    /// On which nothing goes back, and where answers go. Before both came, the connection that
    /// introduced the comm.
    link: Arc<Link>,
    answers: Option<Arc<Link>>,
    pub(crate) ring: Ring<Request>,
    /// Sequence of the message that is arriving.
    next: u64,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    spans: Vec<Span>,
    failure: Option<NetError>,
    /// The connection ended as the peer closed it.
    peer_closed: bool,
    /// Messages that the sender sent before it closed in order.
    sent_in_all: Option<u64>,
    stall: Stall,
    pub(crate) lanes: Option<Landing>,
    /// The message that is arriving, on its way into device memory.
    to_gpu: Option<ToGpu>,
    /// Bytes of the sender's that were read, and so many of them the sender knows of.
    bytes_read: u64,
    bytes_told: u64,
    /// Of those that the sender does not know of, in short messages.
    short_untold: u64,
    /// Connections and lanes that brought what the sender did not seal.
    forged: AtomicU64,
    /// The sender waits for that.
    owes_answer: bool,
    pub(crate) comeback: Option<Comeback>,
    /// The door of the sender's process; 0: unknown.
    door: u16,
    /// The connections broke, or have not come yet.
    waiting: Option<Waiting>,
    /// When a receive has waited for so long, the sender hears of it.
    asks_after: Duration,
}

impl Inbound {
    pub(crate) fn new(
        link: Arc<Link>,
        name: String,
        lanes: Option<Landing>,
        comeback: Option<Comeback>,
    ) -> Self {
        Self {
            name,
            link,
            answers: None,
            ring: Ring::new(),
            next: 0,
            header: [0; HEADER_BYTES],
            header_bytes: 0,
            spans: Vec::with_capacity(MAX_SPANS),
            failure: None,
            peer_closed: false,
            sent_in_all: None,
            stall: Stall::new(),
            lanes,
            to_gpu: None,
            bytes_read: 0,
            bytes_told: 0,
            short_untold: 0,
            forged: AtomicU64::new(0),
            owes_answer: false,
            waiting: comeback.is_some().then(Waiting::first),
            comeback,
            door: 0,
            asks_after: STALL_BEHIND,
        }
    }

    /// The error that ended the connection, if one did.
    pub(crate) fn failure(&self) -> Option<&NetError> {
        self.failure.as_ref()
    }

    /// The address of the sender.
    pub(crate) fn peer(&self) -> io::Result<SocketAddr> {
        self.link.peer_addr()
    }

    /// That error, for a call that needs the connection.
    pub(crate) fn alive(&self) -> Result<(), NetError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// The host takes memory back: nothing writes there when this returns. Gives the failure of a
    /// comm that had receives there; NCCL frees memory before it closes a comm that it aborts.
    ///
    /// # Errors
    /// Something may still write to memory of this comm.
    pub(crate) fn give_up(&mut self, memory: u64) -> Result<Option<NetError>, NetError> {
        let Self { ring, lanes, .. } = self;
        let held = error::memory_held(&self.name);
        let found = ring.find_first(|sequence, request| {
            let over = request.phase == Phase::Done
                || lanes.as_ref().is_some_and(|lanes| lanes.is_whole(sequence));
            request.memory == memory && !over
        });
        let Some(sequence) = found else {
            return match lanes {
                Some(lanes) if lanes.is_held() => Err(held),
                _ => Ok(None),
            };
        };
        let failure = error::deregistered(&self.name, sequence);
        let failure = self.failure.get_or_insert(failure).clone();
        self.close().map(|()| Some(failure))
    }

    /// The host closes the comm: nothing writes to its memory when this returns.
    ///
    /// # Errors
    /// Something still may.
    pub(crate) fn close(&mut self) -> Result<(), NetError> {
        self.hang_up();
        match &self.lanes {
            Some(lanes) if !lanes.close() => Err(error::memory_held(&self.name)),
            _ => Ok(()),
        }
    }

    /// Reads what has arrived for the posted receives, and nothing beyond them.
    pub(crate) fn progress(&mut self, log: &Log) -> Result<(), NetError> {
        self.alive()?;
        let result = self
            .come_back()
            .and_then(|()| self.read())
            .and_then(|moved| Ok(self.look_at_lanes()? || moved));
        self.acknowledge();
        match result {
            Ok(true) => self.moved_on(),
            Ok(false) if self.next == self.ring.posted() || self.ring.is_empty() => {
                self.moved_on();
            }
            Ok(false) => {
                if self.stall.waiting(Instant::now()).is_some() {
                    report_stall(log, |report| self.describe(report));
                }
                self.ask_sender();
            }
            Err(error) => {
                // Receives that ended before stay good; the rest gets this answer for ever.
                self.comeback = None;
                self.failure = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    /// `true` when bytes arrived.
    fn read(&mut self) -> Result<bool, NetError> {
        let mut budget = CALL_BUDGET;
        while self.next < self.ring.posted() && budget > 0 && self.waiting.is_none() {
            // A receive that lanes filled may have been reported before another header came.
            let phase = match self.ring.by_sequence(self.next) {
                Some(request) => request.phase,
                None if self.lanes.is_some() => Phase::Posted,
                None => return Err(self.protocol("a posted receive", "none")),
            };
            let bytes = match phase {
                Phase::Payload => self.read_payload()?,
                _ => self.read_header()?,
            };
            let Some(bytes) = bytes else { break };
            budget = budget.saturating_sub(bytes);
        }
        Ok(budget < CALL_BUDGET)
    }

    /// Reads the rest of a header; `None` when it has not arrived, or is for a later receive.
    fn read_header(&mut self) -> Result<Option<usize>, NetError> {
        let mut bytes = 0;
        if self.header_bytes < HEADER_BYTES {
            let rest = &mut self.header[self.header_bytes..];
            let moved = self.link.receive_bytes(rest);
            let Some(arrived) = self.moved(moved)? else {
                return Ok(None);
            };
            bytes = arrived;
            self.header_bytes += bytes;
            if self.header_bytes < HEADER_BYTES {
                return Ok(Some(bytes));
            }
        }
        let (record, header) = Header::decode(&FROM_SENDER, &self.header)
            .map_err(|(expected, arrived)| self.protocol(expected, arrived))?;
        match record {
            Record::Message => {
                if header.sequence >= self.ring.posted() && self.lanes.is_some() {
                    // Its receive is not posted yet; those before it are the lanes' to fill.
                    return Ok(None);
                }
                self.header_bytes = 0;
                self.announced(header)?;
            }
            Record::Door => {
                self.header_bytes = 0;
                self.door = match (u16::try_from(header.sequence), header.size) {
                    (Ok(port), 0) => port,
                    _ => return Err(self.protocol("a port", format!("{header:?}"))),
                };
            }
            Record::Join => {
                self.header_bytes = 0;
                self.join(header)?;
            }
            _ => {
                self.header_bytes = 0;
                self.sent_in_all = Some(header.sequence);
            }
        }
        Ok(Some(bytes))
    }

    /// A whole header is there: checks it against the receive whose turn it is.
    fn announced(&mut self, header: Header) -> Result<(), NetError> {
        let sequence = header.sequence;
        let skips = self.lanes.as_ref().is_some_and(Landing::is_joined);
        if sequence < self.next || (sequence > self.next && !skips) {
            return Err(self.protocol(
                format!("message {}", self.next),
                format!("message {sequence}"),
            ));
        }
        // What it leaves out comes over lanes.
        self.next = sequence;
        if let Some(lanes) = &mut self.lanes
            && !lanes.comes_inline(sequence, header.size)
        {
            return Err(self.protocol("each message once", format!("message {sequence} twice")));
        }
        let Some(request) = self.ring.by_sequence(sequence) else {
            return Err(self.protocol("a posted receive", "none"));
        };
        let capacity = request.capacity as u64;
        let size = match usize::try_from(header.size) {
            Ok(size) if size <= request.capacity => size,
            _ => return Err(self.refuse(sequence, header.size, capacity)),
        };
        request.size = size;
        if size > 0
            && matches!(request.target, Target::Gpu)
            && let Some(lanes) = &self.lanes
        {
            // NCCL sends LL messages from host memory, and receives them into the GPU's.
            self.to_gpu = lanes.to_gpu(sequence, header.size);
        }
        request.phase = Phase::Payload;
        self.finish_if_whole();
        Ok(())
    }

    /// Reads payload, and the next header behind it when a receive for that is posted.
    fn read_payload(&mut self) -> Result<Option<usize>, NetError> {
        let number = self.next;
        // With lanes the next header need not be for the next receive; it is kept until it fits.
        let another = number + 1 < self.ring.posted();
        let Some(request) = self.ring.by_sequence(number) else {
            return Ok(None);
        };
        let left = request.size - request.received;
        if left == 0 {
            self.finish_if_whole();
            return Ok((self.next > number).then_some(0));
        }
        self.spans.clear();
        match request.target {
            Target::Host(buffer) => {
                let start = buffer.data.wrapping_add(request.received);
                self.spans.push(Span::new(start, left));
            }
            Target::Gpu => match self.to_gpu.as_mut().map(ToGpu::room) {
                Some(Some(room)) => self.spans.push(room),
                // Slots come back by themselves.
                Some(None) => return Ok(None),
                None => return Err(self.protocol("each message once", "one twice")),
            },
        }
        let offered: usize = self.spans.iter().map(|span| span.len()).sum();
        if another && offered == left {
            self.spans.push(Span::of_mut(&mut self.header));
        }
        // SAFETY: the spans are the rest of a buffer that the host posted and leaves to us until
        // the receive is done, cut to the announced size which fits it, or a slot on its way to the
        // GPU; and our header, which is empty between messages.
        let moved = unsafe { self.link.receive_spans(&self.spans) };
        let Some(bytes) = self.moved(moved)? else {
            return Ok(None);
        };
        let payload = bytes.min(left);
        self.header_bytes = bytes - payload;
        if let Some(request) = self.ring.by_sequence(number) {
            request.received += payload;
            if let (Target::Gpu, Some(lanes), Some(to_gpu)) =
                (request.target, &self.lanes, &mut self.to_gpu)
            {
                to_gpu.arrived(payload, &lanes.recv_stream, number);
            }
        }
        self.finish_if_whole();
        Ok(Some(bytes))
    }

    /// Ends the receive whose message is complete.
    fn finish_if_whole(&mut self) {
        let number = self.next;
        let Some(request) = self.ring.by_sequence(number) else {
            return;
        };
        if request.received < request.size {
            return;
        }
        if matches!(request.target, Target::Gpu) && request.size > 0 {
            // It is done when it is copied, like one that lanes brought.
            request.phase = Phase::Posted;
            self.owes_answer |= request.size > copied_bytes(true);
            self.to_gpu = None;
            self.next += 1;
            return;
        }
        let has_lanes = self.lanes.as_ref().is_some_and(Landing::is_joined);
        if request.size <= copied_bytes(has_lanes) {
            self.short_untold += (request.size + HEADER_BYTES) as u64;
        } else {
            // Its own memory is what the sender would send again.
            self.owes_answer |= has_lanes;
        }
        request.phase = Phase::Done;
        self.next += 1;
    }

    /// Tells the sender that its message does not fit; gives the error for our own side.
    fn refuse(&mut self, sequence: u64, message: u64, capacity: u64) -> NetError {
        let notice = Header {
            sequence,
            size: capacity,
        };
        // 24 bytes that a sender reads whenever it calls: they fit, or the connection is gone and
        // the sender knows.
        let _ = self.answers().send_whole(&notice.encode(Record::Refusal));
        NetError::internal(format!(
            "{}: message {sequence} has {message} bytes, the posted receive holds {capacity}; \
             nothing was written; post at least {message} bytes",
            self.name
        ))
    }

    /// Bytes that moved; `None` for none now; an error when the connection ended.
    fn moved(&mut self, moved: io::Result<Moved>) -> Result<Option<usize>, NetError> {
        let why = match moved {
            Ok(Moved::Bytes(bytes)) => {
                self.bytes_read += bytes as u64;
                return Ok(Some(bytes));
            }
            Ok(Moved::WouldBlock) => return Ok(None),
            Ok(Moved::End) => "end of stream".to_owned(),
            Err(error) => {
                if is_forged(&error) {
                    self.forged.fetch_add(1, Ordering::Relaxed);
                }
                let why = error.to_string();
                if self.lose_link(&why) {
                    return Ok(None);
                }
                why
            }
        };
        Err(self.closed(why))
    }

    fn closed(&mut self, why: String) -> NetError {
        let sequence = self.next;
        let (done, total) = self
            .ring
            .by_sequence(sequence)
            .map_or((0, 0), |r| (r.received as u64, r.size as u64));
        self.peer_closed = true;
        error::peer_closed(&self.name, &why, sequence, done, total)
    }

    fn protocol(&self, expected: impl Display, arrived: impl Display) -> NetError {
        error::protocol(&self.name, expected, arrived)
    }
}
