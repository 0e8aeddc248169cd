//! The sending side of a connection: requests, framing, progress.

mod comeback;
mod lanes;
mod replies;
mod status;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use nccl_net::export::{Buffer, MemoryRegion, NetComm, NetError, NetSend, RequestId};
use tcpx_lanes::monitor::MonitorHandle;
use tcpx_lanes::resend::{NextPart, Resend};
use tcpx_lanes::socket_calls::{Moved, Span};

use self::comeback::{Rest, Tended};
use crate::device::Device;
use crate::error;
use crate::header::{HEADER_BYTES, Header, Record};
use crate::lanes::runtime::Runtime;
use crate::lanes::send_path::SendPath;
use crate::link::Link;
use crate::memory::{BufferPlace, DeviceSlice, Memory};
use crate::plugin::ProcessState;
use crate::resume::{COPIES, Resume, copied_bytes};
use crate::ring::Ring;
use crate::stall::Stall;
use crate::status::{Comm, Held, Told, report_stall};

/// Bytes that one call may put on the wire before it returns to its caller.
const CALL_BUDGET: usize = 8 << 20;
/// Tests of a message on lanes between two looks at the comm's own connection.
const POLLS_BETWEEN_LOOKS: u32 = 32;

/// Where the bytes of a send come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Host memory, read by the kernel from where it is.
    Host(Span),
    /// Device memory, which lanes read through pinned memory.
    Device(DeviceSlice),
}

/// How far a send is.
enum Progress {
    /// Its turn has not come, or not ended.
    Waiting,
    /// Lanes have all of it.
    OnLanes,
    /// Its memory is free again.
    Done,
}

/// One send.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) source: Source,
    pub(crate) size: usize,
    /// Registration that the bytes lie in.
    memory: u64,
    /// Header and payload bytes in the socket; of a message that takes lanes, bytes queued.
    written: usize,
    /// It goes over lanes.
    on_lanes: bool,
    /// Its own memory is what is sent again, until the receiver has read up to here.
    held: Option<u64>,
}

impl Request {
    const fn total(&self) -> usize {
        HEADER_BYTES + self.size
    }

    /// Whether the host may have its memory back, where the receiver has `read` so much.
    fn done(&self, read: u64) -> bool {
        self.written == self.total() && self.held.is_none_or(|end| read >= end)
    }
}

/// A sending comm.
#[derive(Debug)]
pub struct SendComm {
    shared: Arc<ProcessState>,
    state: Told<State>,
    /// Keeps the monitor running; let go of last.
    runtime: Arc<Runtime>,
}

/// What brings a comm's connections back.
#[derive(Debug)]
pub(crate) struct Comeback {
    pub(crate) resume: Resume,
    /// The connection that introduced the comm.
    pub(crate) first: Link,
    /// Port at which this process can be reached where the connection comes from; 0: none.
    pub(crate) door: u16,
    pub(crate) runtime: Arc<Runtime>,
}

#[derive(Debug)]
struct State {
    /// Names the comm in this process.
    number: u64,
    name: String,
    /// On which nothing comes back, and what comes back.
    link: Arc<Link>,
    answers: Arc<Link>,
    ring: Ring<Request>,
    /// Sequence of the request whose turn it is.
    next: u64,
    record: [u8; HEADER_BYTES],
    record_bytes: usize,
    failure: Option<NetError>,
    stall: Stall,
    send_path: Option<SendPath>,
    /// Receives that the receiver has granted, its number for this comm, and whether it goes on.
    granted: u64,
    stream_number: u64,
    granting: bool,
    /// Messages above take lanes, by what else was under way when the last one was posted.
    lanes_above: usize,
    /// Calls of `test` that found their message on its way over lanes.
    polls: u32,
    lane_moves: u64,
    /// Messages that the host was told are sent, and their bytes.
    sent: (u64, u64),
    resend: Resend,
    resume: Resume,
    /// Connections and lanes that brought what the receiver did not seal.
    forged: AtomicU64,
    /// The connections before, until the receiver has let go of them.
    before: Vec<Arc<Link>>,
    /// Draws the monitor's.
    monitor_handle: MonitorHandle,
    /// What it sent before that ends here.
    messages_end: u64,
}

impl SendComm {
    /// A comm on its own pair of connections, payload's first, with the lanes for its large
    /// messages.
    pub(crate) fn new(
        shared: Arc<ProcessState>,
        [link, answers]: [Link; 2],
        number: u64,
        name: String,
        send_path: Option<SendPath>,
        comeback: Comeback,
    ) -> Result<Self, NetError> {
        let mut resend = Resend::with_room(COPIES);
        let Comeback {
            resume,
            first,
            door,
            runtime,
        } = comeback;
        let door = Header {
            sequence: door.into(),
            size: 0,
        };
        resend.push(&door.encode(Record::Door));
        if let Some(send_path) = &send_path {
            let group = Header::of_group(&send_path.set().group);
            resend.push(&group.encode(Record::Join));
        }
        let lanes_above = shared.config.inline_bytes;
        let peer = link.peer_addr();
        let state = State {
            number,
            name,
            link: Arc::new(link),
            answers: Arc::new(answers),
            ring: Ring::new(),
            next: 0,
            record: [0; HEADER_BYTES],
            record_bytes: 0,
            failure: None,
            stall: Stall::new(),
            send_path,
            granted: 0,
            stream_number: 0,
            granting: false,
            lanes_above,
            polls: 0,
            lane_moves: 0,
            sent: (0, 0),
            resend,
            resume,
            forged: AtomicU64::new(0),
            before: vec![Arc::new(first)],
            monitor_handle: runtime.monitor.handle(),
            messages_end: 0,
        };
        let state = Told::new(state, peer);
        runtime.watch_over(Tended(state.glance(), Arc::clone(&shared)))?;
        Ok(Self {
            shared,
            state,
            runtime,
        })
    }

    fn lock(&self) -> Held<'_, State> {
        self.state.lock()
    }
}

impl NetComm for SendComm {
    type Memory = Memory;

    fn register(&self, region: MemoryRegion) -> Result<Memory, NetError> {
        let device = Device::for_registration(&self.shared, region)?;
        if let Some(device) = &device {
            let state = self.lock();
            let Some(send_path) = &state.send_path else {
                return Err(no_lanes(&state.name));
            };
            let failed = error::copy(&state.name, "pinning slots for sends");
            send_path.serve_gpu(device).map_err(failed)?;
        }
        Memory::new(region, device.as_ref())
    }

    fn deregister(&self, memory: Memory) -> Result<(), NetError> {
        let mut state = self.lock();
        let given_up = state.give_up(memory.id());
        memory.deregister(given_up, &self.shared.log)
    }

    fn close(self) -> Result<(), NetError> {
        self.end()
    }

    fn test(&self, request: RequestId) -> Result<Option<usize>, NetError> {
        let mut state = self.lock();
        // What is over needs no system call; what lanes carry needs one only now and then, for the
        // other end of the comm's own connection.
        let progress = match state.standing(request) {
            Some(Progress::Done) => Ok(()),
            Some(Progress::OnLanes) if !state.is_time_to_look() => Ok(()),
            _ => state.progress(&self.shared),
        };
        match state.standing(request) {
            Some(Progress::Done) => {
                let size = state.ring.remove(request).map_or(0, |request| request.size);
                state.sent = (state.sent.0 + 1, state.sent.1 + size as u64);
                self.shared.sends.fetch_sub(1, Ordering::Relaxed);
                Ok(Some(size))
            }
            Some(_) => self.state.answer(progress.map(|()| None)),
            None => Err(error::unknown_request(&state.name, request)),
        }
    }
}

impl NetSend for SendComm {
    fn isend(
        &self,
        buffer: Buffer,
        _tag: i32,
        memory: &Memory,
    ) -> Result<Option<RequestId>, NetError> {
        let mut state = self.lock();
        let source = match memory.place(buffer)? {
            BufferPlace::Host => Source::Host(Span::new(buffer.data, buffer.len)),
            BufferPlace::Device(_) if buffer.len == 0 => Source::Host(Span::EMPTY),
            BufferPlace::Device(slice) => Source::Device(slice),
        };
        // A refusal is looked for even when the socket takes everything.
        state.read_back()?;
        if state.ring.is_full() {
            state.progress(&self.shared)?;
            return Ok(None);
        }
        let id = state.ring.post(Request {
            source,
            size: buffer.len,
            memory: memory.id(),
            written: 0,
            on_lanes: false,
            held: None,
        });
        let others = self.shared.sends.fetch_add(1, Ordering::Relaxed);
        let last = self
            .shared
            .last_sender
            .swap(state.number, Ordering::Relaxed);
        let config = &self.shared.config;
        state.lanes_above = match (others, last == state.number) {
            (0, true) => config.inline_bytes,
            (0, false) => config.beside_bytes(),
            _ => config.crowded_bytes(),
        };
        // What fails now is told again by test, which is where the host looks for it.
        let _ = state.progress(&self.shared);
        Ok(id)
    }
}

impl Drop for SendComm {
    fn drop(&mut self) {
        // Its host hears of memory that is held where it closes the comm.
        let _ = self.end();
    }
}

impl SendComm {
    /// Ends it, once.
    fn end(&self) -> Result<(), NetError> {
        let Some((state, ended)) = self.state.end(State::end) else {
            return Ok(());
        };
        let ends_well = matches!(ended, Ok(true));
        self.shared
            .sends
            .fetch_sub(state.ring.len(), Ordering::Relaxed);
        if ends_well && !state.is_over() {
            Rest::start(state, Arc::clone(&self.shared), Arc::clone(&self.runtime));
        } else {
            // The kernel brings what it has, and nothing comes back here that would have it drop
            // some of it. A fork's copy of the socket would hold back the end.
            let _ = state.link.shutdown(std::net::Shutdown::Write);
        }
        ended.map(|_| ())
    }
}

impl State {
    /// Takes everything back from the lanes, and tells the receiver if all was sent; whether it
    /// was.
    ///
    /// # Errors
    /// A lane has not let go of the host's memory.
    fn end(&mut self) -> Result<bool, NetError> {
        // Lanes first: after this they hold nothing of the host's memory.
        let is_clean = self.failure.is_none() && self.next == self.ring.posted();
        let mut is_held = false;
        let whole = self.send_path.take().is_none_or(|send_path| {
            let closed = send_path.close();
            is_held = send_path.send_stream().is_borrowing();
            let sent = closed
                && self.ring.all(|sequence, request| {
                    !request.on_lanes || send_path.send_stream().is_sent(sequence)
                });
            sent && is_clean && send_path.drain(|| self.peer_has_closed())
        });
        // The host has its memory back.
        self.resend.lose_messages();
        if whole && is_clean {
            let end = Header {
                sequence: self.next,
                size: 0,
            };
            self.messages_end = self.resend.end();
            self.resend.push(&end.encode(Record::End));
            // When it does not fit, the receiver takes the close for a failure unless it has
            // everything: never the other way around.
            let _ = self.write();
        }
        match is_held {
            true => Err(error::memory_held(&self.name)),
            false => Ok(whole && is_clean),
        }
    }

    /// Writes what the socket takes.
    fn progress(&mut self, shared: &ProcessState) -> Result<(), NetError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let before = self.next;
        let result = self
            .come_back()
            .and_then(|()| self.look_at_gpu())
            .and_then(|()| self.check_lanes())
            .and_then(|()| self.write());
        let lane_moves = self
            .send_path
            .as_ref()
            .map_or(0, |c| c.send_stream().moves());
        let lanes_moved = std::mem::replace(&mut self.lane_moves, lane_moves) != lane_moves;
        let resting = self.next == self.ring.posted()
            && !self
                .send_path
                .as_ref()
                .is_some_and(|c| c.send_stream().is_busy());
        match result {
            Ok(moved) if moved || lanes_moved || self.next != before => self.stall.moved(),
            Ok(_) if resting => self.stall.moved(),
            Ok(_) if self.stall.waiting(Instant::now()).is_some() => {
                report_stall(&shared.log, |report| self.describe(report));
            }
            Ok(_) => {}
            Err(error) => {
                // The receiver must not wait for what will not come.
                let _ = self.link.shutdown(std::net::Shutdown::Both);
                self.failure = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    fn write(&mut self) -> Result<bool, NetError> {
        let mut budget = CALL_BUDGET;
        let mut looked = false;
        while budget > 0 && (self.next < self.ring.posted() || self.resend.next() != NextPart::New)
        {
            let bytes = match self.resend.next() == NextPart::New && self.takes_lanes() {
                true => self.load()?,
                false => self.write_one()?,
            };
            if bytes > 0 {
                budget = budget.saturating_sub(bytes);
            } else if looked {
                break;
            } else {
                // Grants come this way too.
                self.read_back()?;
                looked = true;
            }
        }
        if !looked && budget == CALL_BUDGET {
            self.read_back()?;
        }
        Ok(budget < CALL_BUDGET)
    }

    /// One call for what is to be written next; 0 when nothing can be written now.
    fn write_one(&mut self) -> Result<usize, NetError> {
        if self.resume.is_away() {
            return Ok(0);
        }
        let copied = copied_bytes(self.send_path.is_some());
        let Self {
            name,
            link,
            ring,
            resend,
            ..
        } = self;
        let (sequence, from, is_new) = match resend.next() {
            NextPart::Bytes(bytes) => {
                let moved = link.send_bytes(bytes);
                return self.wrote(moved);
            }
            NextPart::Message(sequence, from) => (sequence, from, false),
            NextPart::New => (self.next, 0, true),
        };
        let Some(request) = ring.by_sequence(sequence) else {
            return Ok(0);
        };
        let total = request.total();
        // The receiver says before long that it has read enough.
        if is_new && request.size <= copied && resend.copied() + total > COPIES {
            return Ok(0);
        }
        let header = Header {
            sequence,
            size: request.size as u64,
        }
        .encode(Record::Message);
        let header_left = &header[from.min(HEADER_BYTES)..];
        let payload_done = from.saturating_sub(HEADER_BYTES);
        let payload = match &request.source {
            Source::Host(span) => span.from(payload_done),
            // Its memory was registered on a comm that has lanes.
            Source::Device(_) => return Err(no_lanes(name)),
        };
        // SAFETY: the payload lies in memory that the host registered and keeps valid until the
        // request is done.
        let moved = unsafe { link.send_message(header_left, payload) };
        let Ok(Moved::Bytes(bytes)) = moved else {
            return self.wrote(moved);
        };
        if is_new {
            resend.begin(sequence, total);
        }
        request.written = request.written.max(from + bytes);
        let end = resend.end();
        self.wrote(moved)?;
        if from + bytes == total && sequence == self.next {
            self.next += 1;
            self.retain(sequence, &header, end);
        }
        Ok(bytes)
    }
}

fn no_lanes(comm: &str) -> NetError {
    NetError::invalid_argument(format!(
        "{comm}: CUDA memory is moved over lanes, and none could be opened to the peer; see the warning about \
         them, or unset TCPX_NET_DEVICE"
    ))
}
