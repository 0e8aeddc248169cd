//! The sending side of a connection: requests, framing, progress.

use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nccl_net::export::{Buffer, MemoryRegion, NetComm, NetError, NetSend, RequestId};
use tcpx_memory::RegionSlice;

use crate::config::Mode;
use crate::device::Device;
use crate::error::PluginError;
use crate::header::{HEADER_BYTES, Header, Record};
use crate::memory::{Memory, Place};
use crate::plugin::Shared;
use crate::ring::Ring;
use crate::socket::{self, Moved, Span};
use crate::staging::Staging;
use crate::stall::Stall;

/// Bytes that one call may put on the wire before it returns to its caller.
const CALL_BUDGET: usize = 8 << 20;

/// Where the bytes of a send come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Host memory, read by the kernel from where it is.
    Host(Span),
    /// Device memory, read through pinned staging.
    Device(RegionSlice),
}

/// One send.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) source: Source,
    pub(crate) size: usize,
    /// Header and payload bytes in the socket.
    written: usize,
}

impl Request {
    const fn total(&self) -> usize {
        HEADER_BYTES + self.size
    }

    const fn done(&self) -> bool {
        self.written == self.total()
    }
}

/// A sending comm.
#[derive(Debug)]
pub struct SendComm {
    shared: Arc<Shared>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    name: String,
    stream: TcpStream,
    ring: Ring<Request>,
    /// Sequence of the request that is on the wire.
    next: u64,
    staging: Option<Staging>,
    refusal: [u8; HEADER_BYTES],
    refusal_bytes: usize,
    failure: Option<PluginError>,
    stall: Stall,
}

impl SendComm {
    pub(crate) fn new(shared: Arc<Shared>, stream: TcpStream, name: String) -> Self {
        Self {
            shared,
            state: Mutex::new(State {
                name,
                stream,
                ring: Ring::new(),
                next: 0,
                staging: None,
                refusal: [0; HEADER_BYTES],
                refusal_bytes: 0,
                failure: None,
                stall: Stall::new(),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NetComm for SendComm {
    type Memory = Memory;

    fn register(&self, region: MemoryRegion) -> Result<Memory, NetError> {
        let device = Device::for_registration(&self.shared, region)?;
        if let Some(device) = &device
            && self.shared.config.mode == Mode::Unpack
        {
            let mut state = self.lock();
            if state.staging.is_none() {
                // Pinned now, so that no send ever allocates.
                state.staging = Some(Staging::new(device)?);
            }
        }
        Ok(Memory::new(region, device.as_ref())?)
    }

    fn test(&self, request: RequestId) -> Result<Option<usize>, NetError> {
        let mut state = self.lock();
        let progress = state.progress(&self.shared);
        let name = state.name.clone();
        let found = state.ring.by_id(request).map(|r| (r.done(), r.size));
        match found {
            Some((true, size)) => {
                state.ring.remove(request);
                Ok(Some(size))
            }
            Some((false, _)) => {
                progress?;
                Ok(None)
            }
            None => Err(PluginError::UnknownRequest {
                comm: name,
                why: format!("request {} is not in flight", request.0),
            }
            .into()),
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
            Place::Host => Source::Host(Span::new(buffer.data, buffer.len)),
            Place::Device(slice) => Source::Device(slice),
        };
        // A refusal is looked for even when the socket takes everything.
        state.look_for_refusal()?;
        if state.ring.is_full() {
            state.progress(&self.shared)?;
            return Ok(None);
        }
        let id = state.ring.post(Request {
            source,
            size: buffer.len,
            written: 0,
        });
        // What fails now is told again by test, which is where the host looks for it.
        let _ = state.progress(&self.shared);
        Ok(id)
    }
}

impl State {
    /// Writes what the socket takes.
    fn progress(&mut self, shared: &Shared) -> Result<(), PluginError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let before = self.next;
        let result = self.write();
        match result {
            Ok(moved) if moved || self.next != before => self.stall.moved(),
            Ok(_) if self.next == self.ring.posted() => self.stall.moved(),
            Ok(_) => self.report_stall(shared),
            Err(error) => {
                self.failure = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    fn write(&mut self) -> Result<bool, PluginError> {
        let mut budget = CALL_BUDGET;
        while self.next < self.ring.posted() && budget > 0 {
            if let Some(staging) = &mut self.staging {
                staging.fill(&self.name, &mut self.ring)?;
            }
            match self.write_one()? {
                0 => {
                    self.look_for_refusal()?;
                    break;
                }
                bytes => budget = budget.saturating_sub(bytes),
            }
        }
        Ok(budget < CALL_BUDGET)
    }

    /// One call for the request whose turn it is; 0 when nothing can be written now.
    fn write_one(&mut self) -> Result<usize, PluginError> {
        let sequence = self.next;
        let Self {
            name,
            stream,
            ring,
            staging,
            ..
        } = self;
        let Some(request) = ring.by_sequence(sequence) else {
            return Ok(0);
        };
        let header = Header {
            sequence,
            size: request.size as u64,
        }
        .encode(Record::Message);
        let header_left = &header[request.written.min(HEADER_BYTES)..];
        let payload_done = request.written.saturating_sub(HEADER_BYTES);
        let payload = match &request.source {
            Source::Host(span) => span.from(payload_done),
            Source::Device(_) if request.size == 0 => Span::EMPTY,
            Source::Device(_) => match staging.as_mut().map(|s| s.ready(name, sequence)) {
                Some(Ok(Some(span))) => span,
                Some(Ok(None)) => return Ok(0),
                Some(Err(error)) => return Err(error),
                None => return Err(no_staging(name)),
            },
        };
        let spans = [Span::of(header_left), payload];
        // SAFETY: the header is ours; the payload lies in memory that the host registered and keeps
        // valid until the request is done, or in our staging memory, whose slot is held.
        let moved = unsafe { socket::send(stream, &spans) };
        let bytes = match moved {
            Moved::Bytes(bytes) => bytes,
            Moved::Later | Moved::End => return Ok(0),
            Moved::Broken(error) => {
                // The receiver may have said why before it hung up.
                self.look_for_refusal()?;
                return Err(self.closed(error.to_string()));
            }
        };
        request.written += bytes;
        if let (Source::Device(_), Some(staging)) = (&request.source, staging) {
            staging.sent(bytes.saturating_sub(header_left.len()));
        }
        if request.done() {
            self.next += 1;
        }
        Ok(bytes)
    }

    /// Reads the other direction, where a receiver says that it cannot take a message.
    fn look_for_refusal(&mut self) -> Result<(), PluginError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let moved = socket::receive_bytes(&self.stream, &mut self.refusal[self.refusal_bytes..]);
        let failure = match moved {
            Moved::Later => return Ok(()),
            Moved::Bytes(bytes) => {
                self.refusal_bytes += bytes;
                if self.refusal_bytes < HEADER_BYTES {
                    return Ok(());
                }
                self.refused()
            }
            Moved::End => self.closed("end of stream".to_owned()),
            Moved::Broken(error) => self.closed(error.to_string()),
        };
        self.failure = Some(failure.clone());
        Err(failure)
    }

    fn refused(&mut self) -> PluginError {
        match Header::decode(Record::Refusal, &self.refusal) {
            Ok(refusal) => PluginError::RefusedByPeer {
                comm: self.name.clone(),
                sequence: refusal.sequence,
                message: self
                    .ring
                    .by_sequence(refusal.sequence)
                    .map(|request| request.size as u64),
                capacity: refusal.size,
            },
            Err((expected, arrived)) => PluginError::Protocol {
                comm: self.name.clone(),
                expected,
                arrived,
            },
        }
    }

    fn closed(&mut self, why: String) -> PluginError {
        let (done, total) = self.ring.by_sequence(self.next).map_or((0, 0), |request| {
            let done = request.written.saturating_sub(HEADER_BYTES);
            (done as u64, request.size as u64)
        });
        PluginError::PeerClosed {
            comm: self.name.clone(),
            why,
            sequence: self.next,
            done,
            total,
        }
    }

    fn report_stall(&mut self, shared: &Shared) {
        let Some(stalled) = self.stall.waiting(Instant::now()) else {
            return;
        };
        let sequence = self.next;
        let (done, total) = self
            .ring
            .by_sequence(sequence)
            .map_or((0, 0), |r| (r.written.saturating_sub(HEADER_BYTES), r.size));
        shared.log.warn(&format!(
            "{}: no byte moved for {} s; message {sequence}, {done} of {total} bytes are sent; the \
             peer reads nothing: see whether it posts receives",
            self.name,
            stalled.as_secs()
        ));
    }
}

fn no_staging(comm: &str) -> PluginError {
    PluginError::InvalidArgument(format!(
        "{comm}: device memory was registered on another comm; register it on this one"
    ))
}
