//! One end of a connection: its comm, and a ledger of what C was promised.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use nccl_net::constants::{MAX_REQUESTS_PER_COMM, UNPACK_MAX_RECEIVE_BYTES};
use nccl_net::{
    Connecting, Done, HostError, MemoryHandle, MemoryType, PostOutcome, RecvComm, SendComm, Ticket,
};
use tcpx_memory::{Gpu, lock};

use crate::error::{Failure, Outcome};
use crate::handles::{self, Handle};
use crate::plugin::close::Close;
use crate::plugin::codes::TCPX_TIMEOUT;
use crate::plugin::descriptors::Queue;
use crate::plugin::memory::Registered;
use crate::plugin::types::{
    TCPX_SIZE_UNKNOWN, tcpx_completion, tcpx_descriptor, tcpx_device_handle,
};

/// Longest wait of a registration for a connect that is not up yet.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// A plugin has no descriptor to wait on.
const POLL_PAUSE: Duration = Duration::from_millis(1);

/// An end. One call at a time; other ends are not held up by it.
#[derive(Debug)]
pub(crate) struct End {
    state: Mutex<State>,
    close: Close,
}

#[derive(Debug)]
struct State {
    comm: Comm,
    /// Requests posted so far.
    posted: u64,
    /// In the order of posting: what the comm holds, then what the plugin has not taken yet.
    in_flight: VecDeque<Flight>,
    /// Done, in the same order. Sends leave when C was told; receives when they are consumed.
    finished: VecDeque<Finished>,
    memories: HashSet<Handle>,
    /// Whose context was current when its memory was registered: plugins look for it when they
    /// close.
    gpu: Option<Gpu>,
    /// The first failure; nothing is posted or tested after it.
    failed: Option<Failure>,
    /// The queue as `accept` shows it, at an address that stays.
    device: Option<Shown>,
}

/// What C may look at as long as the comm is open.
#[derive(Debug)]
struct Shown(Box<tcpx_device_handle>);

// SAFETY: addresses that nobody follows here.
unsafe impl Send for Shown {}

#[derive(Debug)]
enum Comm {
    Connecting(Connecting),
    Send(SendComm),
    Recv(RecvComm, Option<QueueOrWhy>),
    Closed,
}

/// The queue, or why device memory cannot be received; host memory can be without one.
type QueueOrWhy = Outcome<Box<Queue>>;

#[derive(Debug)]
struct Flight {
    /// The comm's own number of it, which counts the requests that it took.
    ticket: Ticket,
    /// Until the plugin takes it.
    waiting: Option<Piece>,
    request: Option<Handle>,
    memory: Handle,
    kind: MemoryType,
    bytes: usize,
}

#[derive(Debug)]
struct Finished {
    flight: Flight,
    size: i64,
    descriptors: Vec<tcpx_descriptor>,
    pool: (u64, usize),
    /// C has seen `done`.
    told: bool,
}

impl Finished {
    fn completion(&self) -> tcpx_completion {
        let empty = self.descriptors.is_empty();
        let (pool, pool_bytes) = if empty { (0, 0) } else { self.pool };
        tcpx_completion {
            size: self.size,
            descriptors: if empty {
                std::ptr::null()
            } else {
                self.descriptors.as_ptr()
            },
            count: self.descriptors.len(),
            pool: std::ptr::with_exposed_provenance(pool as usize),
            pool_bytes,
        }
    }
}

/// A piece of registered memory and what to post on it.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) handle: Handle,
    pub(crate) memory: Arc<Registered>,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
    pub(crate) tag: i32,
}

impl End {
    fn new(comm: Comm, device: Option<Shown>) -> Self {
        Self {
            state: Mutex::new(State {
                comm,
                posted: 0,
                in_flight: VecDeque::new(),
                finished: VecDeque::new(),
                memories: HashSet::new(),
                gpu: None,
                failed: None,
                device,
            }),
            close: Close::default(),
        }
    }

    pub(crate) fn connecting(attempt: Connecting) -> Self {
        Self::new(Comm::Connecting(attempt), None)
    }

    pub(crate) fn receiving(comm: RecvComm) -> Outcome<Self> {
        let queue = Queue::of(&comm).map(|queue| queue.map(Box::new));
        let device = comm.device_handle().map(|device| {
            Shown(Box::new(tcpx_device_handle {
                net_device_type: nccl_net::constants::NET_DEVICE_UNPACK,
                net_device_version: nccl_net::constants::NET_DEVICE_UNPACK_VERSION,
                handle: std::ptr::with_exposed_provenance_mut(device.address.get()),
                size: device.size,
                needs_proxy_progress: i32::from(device.needs_proxy_progress),
            }))
        });
        Ok(Self::new(Comm::Recv(comm, queue.transpose()), device))
    }

    fn state(&self) -> Outcome<MutexGuard<'_, State>> {
        let state = self.state.lock().map_err(|_| Failure::poisoned())?;
        if matches!(state.comm, Comm::Closed) {
            return Err(Failure::closed("the comm"));
        }
        Ok(state)
    }

    /// Whether the connect is still under way, after one more poll of it unless another call has
    /// the comm.
    pub(crate) fn is_connecting(&self) -> bool {
        match self.state.try_lock() {
            Ok(mut state) => matches!(state.poll_connect(), Ok(false)),
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Poisoned(_)) => false,
        }
    }

    /// Polls the connect until it is up, or `limit` has passed; whether it is.
    pub(crate) fn wait_connect(&self, limit: Duration) -> Outcome<bool> {
        let deadline = Instant::now() + limit;
        while !self.state()?.poll_connect()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL_PAUSE);
        }
        Ok(true)
    }

    /// Where the description of the device queue lies; NULL without one.
    pub(crate) fn device(&self) -> Outcome<*mut tcpx_device_handle> {
        Ok(match &mut self.state()?.device {
            Some(device) => &raw mut *device.0,
            None => std::ptr::null_mut(),
        })
    }

    /// Registers memory and enters its handle with `enter`.
    ///
    /// # Safety
    /// As for [`SendComm::register`].
    pub(crate) unsafe fn register(
        &self,
        data: *mut u8,
        bytes: usize,
        kind: MemoryType,
        enter: impl FnOnce(MemoryHandle) -> Outcome<Handle>,
    ) -> Outcome<Handle> {
        if !self.wait_connect(CONNECT_TIME)? {
            return Err(Failure::new(
                TCPX_TIMEOUT,
                format!(
                    "the plugin has not connected after {} s: see whether the peer accepts, then \
                     call again to go on waiting, or close the comm",
                    CONNECT_TIME.as_secs()
                ),
            ));
        }
        let mut state = self.state()?;
        let memory = match &state.comm {
            // SAFETY: forwarded.
            Comm::Send(comm) => unsafe { comm.register(data, bytes, kind) }?,
            // SAFETY: forwarded.
            Comm::Recv(comm, _) => unsafe { comm.register(data, bytes, kind) }?,
            Comm::Connecting(_) | Comm::Closed => return Err(Failure::closed("the comm")),
        };
        if kind == MemoryType::Cuda {
            // Host memory that stands in for a GPU's has none.
            state.gpu = Gpu::current().ok();
        }
        let handle = enter(memory)?;
        state.memories.insert(handle);
        Ok(handle)
    }

    /// Gives memory up, unless a request needs it; `forget` then takes its handle out.
    pub(crate) fn deregister(&self, memory: Handle, forget: impl FnOnce()) -> Outcome<()> {
        let mut state = self.state()?;
        if !state.memories.contains(&memory) {
            return Err(elsewhere());
        }
        let uses = |flight: &Flight| flight.memory == memory;
        let flying = state.in_flight.iter().filter(|flight| uses(flight)).count();
        let unconsumed = state.finished.iter().filter(|done| uses(&done.flight));
        // A send that is done needs its memory no more, told or not.
        let unconsumed = match state.comm {
            Comm::Recv(..) => unconsumed.count(),
            _ => 0,
        };
        if flying + unconsumed > 0 {
            return Err(Failure::usage(format!(
                "{flying} requests in flight and {unconsumed} receives that are not consumed use \
                 this memory: finish and consume them, or close the comm, before you deregister \
                 or free it"
            )));
        }
        state.memories.remove(&memory);
        forget();
        Ok(())
    }

    /// Posts a request; `enter` makes its handle out of its number. `None`: no room now.
    pub(crate) fn post(
        &self,
        piece: Piece,
        enter: impl FnOnce(u64) -> Outcome<Handle>,
    ) -> Outcome<Option<Handle>> {
        let mut guard = self.state()?;
        let state = &mut *guard;
        state.check()?;
        // Another thread may have deregistered it since its handle was looked up.
        if !state.memories.contains(&piece.handle) {
            return Err(elsewhere());
        }
        // Receives count until they are consumed, sends until C knows that they are done.
        if state.in_flight.len() + state.finished.len() >= MAX_REQUESTS_PER_COMM {
            return Ok(None);
        }
        let (kind, bytes) = (piece.memory.kind, piece.bytes);
        if let Comm::Recv(_, Some(queue)) = &state.comm
            && kind == MemoryType::Cuda
        {
            queue.as_ref().map_err(Failure::clone)?;
            if bytes > UNPACK_MAX_RECEIVE_BYTES {
                return Err(Failure::argument(format!(
                    "a receive of {bytes} bytes: the plugin's queue describes at most \
                     {UNPACK_MAX_RECEIVE_BYTES} a request; send and receive in chunks"
                )));
            }
        }
        let ticket = Ticket(state.posted);
        state.in_flight.push_back(Flight {
            ticket,
            request: None,
            memory: piece.handle,
            kind,
            bytes,
            waiting: Some(piece),
        });
        if let Err(failure) = state.post_waiting() {
            // What waits before it meets the same error when it is tested.
            state.in_flight.pop_back();
            return Err(failure);
        }
        state.posted += 1;
        // Without a handle nobody could ever collect it.
        let handle = enter(ticket.0).map_err(|failure| state.fail(failure))?;
        if let Some(flight) = state.in_flight.back_mut() {
            flight.request = Some(handle);
        }
        Ok(Some(handle))
    }

    /// Tests the oldest requests, and tells of this one once. `forget` takes out the handle of a
    /// send that is told.
    pub(crate) fn test(
        &self,
        number: u64,
        forget: impl FnOnce(Option<Handle>),
    ) -> Outcome<Option<tcpx_completion>> {
        let mut guard = self.state()?;
        let state = &mut *guard;
        loop {
            if let Some(at) = state.finished_at(number) {
                let done = &mut state.finished[at];
                if done.told {
                    return Err(Failure::usage(
                        "this receive was reported as done before: stop testing at the first done \
                         == 1, and give the request to tcpx_irecv_consumed",
                    ));
                }
                done.told = true;
                let completion = done.completion();
                if matches!(state.comm, Comm::Send(_)) {
                    let told = state.finished.remove(at);
                    forget(told.and_then(|told| told.flight.request));
                }
                return Ok(Some(completion));
            }
            state.check()?;
            if !state.test_head().map_err(|failure| state.fail(failure))? {
                return Ok(None);
            }
        }
    }

    /// Where a request stands that is not done, in words.
    pub(crate) fn standing(&self, number: u64) -> String {
        let Ok(state) = self.state() else {
            return "its comm is closed".to_owned();
        };
        let side = match state.comm {
            Comm::Send(_) => "the peer takes no bytes",
            _ => "the peer sends no bytes, or pool space is not consumed",
        };
        let inside = match &state.comm {
            Comm::Send(comm) => comm.look_inside_head(),
            Comm::Recv(comm, _) => comm.look_inside_head(),
            Comm::Connecting(_) | Comm::Closed => None,
        };
        // A plugin of another layout has nothing to say.
        let inside = inside.map_or_else(String::new, |found| {
            format!("; of the oldest in flight the plugin says that {found}")
        });
        let ahead = state
            .in_flight
            .iter()
            .position(|flight| flight.ticket.0 == number);
        // Only the bytes that come decide, so it was no error to post it.
        let beyond = match &state.comm {
            Comm::Recv(_, Some(Ok(queue))) => {
                let pool = queue.pool().1;
                let first = state.in_flight.front();
                first
                    .filter(|flight| flight.kind == MemoryType::Cuda && flight.bytes > pool)
                    .map_or_else(String::new, |flight| {
                        format!(
                            "; the oldest may take {} bytes and the plugin's pool has {pool}: send in \
                             smaller pieces",
                            flight.bytes
                        )
                    })
            }
            _ => String::new(),
        };
        match ahead {
            Some(ahead) => format!(
                "request {number} of {} bytes has {ahead} ahead of it and {} done ones wait to be \
                 collected; {}{beyond}{inside}",
                state.in_flight[ahead].bytes,
                state.finished.len(),
                match &state.in_flight[ahead].waiting {
                    Some(_) => "the plugin has not taken it yet",
                    None => side,
                }
            ),
            None => "another thread has it".to_owned(),
        }
    }

    /// What the last test of this request found, once more.
    pub(crate) fn completion(&self, number: u64) -> Outcome<tcpx_completion> {
        let state = self.state()?;
        match state.finished_at(number).map(|at| &state.finished[at]) {
            Some(done) if done.told => Ok(done.completion()),
            _ => Err(Failure::usage(
                "the request is not done: test it, or wait for it, first",
            )),
        }
    }

    /// Gives the oldest received pool space back; `forget` takes out the request's handle.
    pub(crate) fn consume(&self, number: u64, forget: impl FnOnce(Option<Handle>)) -> Outcome<()> {
        let mut guard = self.state()?;
        let state = &mut *guard;
        match state.finished.front() {
            Some(first) if first.flight.ticket.0 == number && first.told => {}
            Some(first) if first.flight.ticket.0 != number => {
                return Err(Failure::usage(format!(
                    "receive {number} cannot be consumed now, receive {} is the oldest: consume in \
                     the order of posting",
                    first.flight.ticket.0
                )));
            }
            _ => {
                return Err(Failure::usage(
                    "the receive is not done: consume it after done == 1, when its bytes are \
                     unpacked",
                ));
            }
        }
        state.check()?;
        if let Comm::Recv(comm, queue) = &mut state.comm
            && queue.is_some()
            && let Err(error) = comm.consume_next(Ticket(number))
        {
            return Err(state.fail(error.into()));
        }
        let consumed = state.finished.pop_front();
        forget(consumed.and_then(|consumed| consumed.flight.request));
        Ok(())
    }

    /// Closes the comm, and takes out all handles that end with it.
    pub(crate) fn close(self: &Arc<Self>, call: &'static str, handle: Handle) -> Outcome<()> {
        let end = Arc::clone(self);
        self.close
            .run(handle, call, &self.state, move || end.close_now())
    }

    fn close_now(&self) -> Outcome<()> {
        // Whatever a panic left half done, the comm can be closed.
        let mut state = lock(&self.state);
        let comm = std::mem::replace(&mut state.comm, Comm::Closed);
        let finished = std::mem::take(&mut state.finished);
        let finished = finished.into_iter().map(|done| done.flight);
        let flights = finished.chain(std::mem::take(&mut state.in_flight));
        let mut ended: Vec<_> = flights.filter_map(|flight| flight.request).collect();
        ended.extend(state.memories.drain());
        let gpu = state.gpu.take();
        drop(state);
        let _entered = gpu.as_ref().map(Gpu::enter);
        let result = match comm {
            Comm::Send(comm) => comm.close(),
            Comm::Recv(comm, queue) => {
                // The queue reads what the comm owns.
                drop(queue);
                comm.close()
            }
            Comm::Connecting(_) | Comm::Closed => Ok(()),
        };
        // Registrations end after their comm.
        handles::remove(ended);
        Ok(result?)
    }
}

fn elsewhere() -> Failure {
    Failure::argument(
        "mhandle is registered on another comm, or no more: pass the comm that it was registered on",
    )
}

impl State {
    fn check(&self) -> Outcome<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn fail(&mut self, failure: Failure) -> Failure {
        self.failed.get_or_insert(failure).clone()
    }

    fn finished_at(&self, number: u64) -> Option<usize> {
        self.finished
            .iter()
            .position(|done| done.flight.ticket.0 == number)
    }

    /// Polls a connect that is not up; whether the comm is there.
    fn poll_connect(&mut self) -> Outcome<bool> {
        let Comm::Connecting(attempt) = &mut self.comm else {
            return Ok(true);
        };
        if let Some(failure) = &self.failed {
            return Err(failure.clone());
        }
        match attempt.poll() {
            Ok(None) => Ok(false),
            Ok(Some(comm)) => {
                self.comm = Comm::Send(comm);
                Ok(true)
            }
            Err(error) => Err(self.fail(error.into())),
        }
    }

    /// Gives the plugin what it has not taken yet, as long as it takes it. There are plugins that
    /// take a receive only once the peer has posted its send; NCCL posts again, programs need not.
    fn post_waiting(&mut self) -> Outcome<()> {
        for flight in &mut self.in_flight {
            let Some(piece) = &flight.waiting else {
                continue;
            };
            let (memory, offset, tag) = (&piece.memory.memory, piece.offset, piece.tag);
            let posted = match &mut self.comm {
                Comm::Send(comm) => comm.isend(memory, offset, flight.bytes, tag)?,
                Comm::Recv(comm, _) => comm.irecv(memory, offset, flight.bytes, tag)?,
                Comm::Connecting(_) | Comm::Closed => return Err(Failure::closed("the comm")),
            };
            match posted {
                PostOutcome::Posted(ticket) => debug_assert_eq!(ticket, flight.ticket),
                PostOutcome::Full => break,
            }
            flight.waiting = None;
        }
        Ok(())
    }

    /// Tests the head; whether it is done.
    fn test_head(&mut self) -> Outcome<bool> {
        self.post_waiting()?;
        let done = match &mut self.comm {
            Comm::Send(comm) => comm.test_head()?,
            Comm::Recv(comm, _) => comm.test_head()?,
            Comm::Connecting(_) | Comm::Closed => return Err(Failure::closed("the comm")),
        };
        let Some(done) = done else { return Ok(false) };
        let Some(flight) = self.in_flight.pop_front() else {
            return Err(HostError::SetupEnded.into());
        };
        let finished = self.received(flight, done)?;
        self.finished.push_back(finished);
        Ok(true)
    }

    fn received(&mut self, flight: Flight, done: Done) -> Outcome<Finished> {
        let size = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        let mut finished = Finished {
            size: done.bytes.map_or(TCPX_SIZE_UNKNOWN, size),
            flight,
            descriptors: Vec::new(),
            pool: (0, 0),
            told: false,
        };
        let bytes = finished.flight.bytes;
        match (&mut self.comm, done.slot) {
            (Comm::Recv(_, Some(Ok(queue))), Some(slot))
                if finished.flight.kind == MemoryType::Cuda =>
            {
                let (sum, descriptors) = queue.take(slot, bytes, done.bytes)?;
                finished.size = size(sum as usize);
                finished.descriptors = descriptors;
                finished.pool = queue.pool();
            }
            // A send is done when all of it is.
            (Comm::Send(_), _) => finished.size = size(bytes),
            _ => {}
        }
        Ok(finished)
    }
}
