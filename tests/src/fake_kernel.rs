//! A stand-in for the kernel's device-memory receive: bytes of a real connection are put in a pool
//! of host memory, in packets, and described by control messages as the kernel would.
//!
//! What it says follows the facts in `docs/guides/device-memory.md`: lowest free token first, no
//! receive that mixes plain bytes and records, `ENODEV` for ever, errno 525 without room. Memory
//! whose last token came back is overwritten at once, so that a token given back too early is seen;
//! the close of a socket gives all of its tokens back.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::RecvFlags;
use tcpx_devmem::cmsg::{Dialect, SOL_SOCKET};
use tcpx_devmem::{
    Arrival, DevmemError, DevmemNetwork, DevmemOptions, FinishedSends, Flow, LinuxSockets,
    ReceiveQueue, SendPath, SocketCalls, Steering,
};
use tcpx_lanes::control_messages::{HEADER_BYTES, cmsg_align, cmsg_len, cmsg_space};
use tcpx_memory::{Access, BouncePool, DmaBuf, Region, RegionSlice};

use crate::content::scramble;

mod fault_plan;
mod sockets;

pub use fault_plan::{Counts, FaultPlan, Reports};
use sockets::Sockets;

const PAGE: usize = 4096;
/// Memory to send from: fewer slots than chunks in flight.
const SEND_BYTES: usize = 4 << 20;
/// Its number.
const SEND_ID: u32 = 78;
/// The number that every record of the fake names.
const DMABUF_ID: u32 = 77;
/// What free memory is overwritten with.
const POISON: u8 = 0xee;
const TOO_SMALL: i32 = 525;

#[derive(Debug, Default)]
struct State {
    sockets: Sockets,
    /// Fragments on each page.
    pages: Vec<u32>,
    next_page: usize,
    /// Where the next packed fragment goes, on a page that has one.
    packing: Option<usize>,
    steered: Vec<Flow>,
    /// Memory to send from that closed sockets left to the card: places and lengths.
    left_to_card: Vec<(usize, usize)>,
    counts: Counts,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct FakeKernel {
    fault_plan: FaultPlan,
    memory: RegionSlice,
    send_memory: Region,
    state: Mutex<State>,
}

impl FakeKernel {
    /// A kernel with a pool of so many bytes, and the network that receives into it.
    pub fn network(pool_bytes: usize, fault_plan: FaultPlan) -> (Arc<Self>, Arc<DevmemNetwork>) {
        Self::network_in(Region::host(pool_bytes).expect("memory"), fault_plan)
    }

    /// As [`Self::network`], with this memory as the pool: a GPU's too.
    pub fn network_in(region: Region, fault_plan: FaultPlan) -> (Arc<Self>, Arc<DevmemNetwork>) {
        let pool_bytes = region.len();
        let lease = region.lease(.., Access::Write).expect("nobody else");
        let kernel = Arc::new(Self {
            fault_plan,
            memory: lease.all(),
            send_memory: Region::host(SEND_BYTES).expect("memory"),
            state: Mutex::new(State {
                pages: vec![0; pool_bytes / PAGE],
                ..State::default()
            }),
        });
        let pool = Arc::new(BouncePool::written_by_card(lease.all()));
        let steering: Arc<dyn Steering> = Arc::<Self>::clone(&kernel);
        let queue = ReceiveQueue::new(pool, DMABUF_ID, "lo".to_owned(), 1, 1, steering);
        let send = kernel.fault_plan.sends.then(|| {
            // Only the fake sends from it, and it goes by the region.
            let nothing = std::fs::File::open("/dev/null").expect("it is there");
            // SAFETY: no device gets it.
            let memory = unsafe { DmaBuf::from_fd(nothing.into(), kernel.send_memory.clone()) };
            SendPath::new(memory, SEND_ID, "lo".to_owned(), 1, Arc::new(()))
        });
        let options = DevmemOptions {
            receive: vec![queue],
            send,
            ..DevmemOptions::default()
        };
        let calls: Arc<dyn SocketCalls> = Arc::<Self>::clone(&kernel);
        let network = DevmemNetwork::with_calls(options, calls).expect("a network");
        (kernel, Arc::new(network))
    }

    /// What happened until now.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// Tokens that nobody gave back.
    pub fn tokens_held(&self) -> usize {
        self.lock().sockets.tokens_held()
    }

    /// Flows that are steered now.
    pub fn steered(&self) -> usize {
        self.lock().steered.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_plain(&self, position: u64) -> bool {
        self.fault_plan.plain.contains(&position)
    }

    /// Where the piece that begins at `position` ends, and whether it is linear.
    fn piece(&self, position: u64) -> (u64, bool) {
        let packet = self.fault_plan.packet as u64;
        let number = position / packet;
        let end = (number + 1) * packet;
        let split = number * packet + (self.fault_plan.linear_bytes as u64).min(packet);
        let unsplit = self
            .fault_plan
            .linear_every
            .is_some_and(|every| number.is_multiple_of(every));
        if unsplit && position < split {
            (split, true)
        } else {
            (end, false)
        }
    }

    /// A place for `length` bytes.
    fn place(&self, state: &mut State, length: usize) -> Option<usize> {
        let count = state.pages.len();
        if self.fault_plan.packed
            && let Some(at) = state.packing.take()
            && at % PAGE > 0
            && at % PAGE + length <= PAGE
            && state.pages[at / PAGE] > 0
        {
            state.pages[at / PAGE] += 1;
            state.packing = Some(at + length);
            return Some(at);
        }
        let page = (0..count)
            .map(|step| (state.next_page + step) % count)
            .find(|page| state.pages[*page] == 0)?;
        // Not in the order of the pool.
        state.next_page = (page + 1 + scramble(page as u64) as usize % 7) % count;
        state.pages[page] = 1;
        let slack = PAGE - length.min(PAGE);
        let at = page * PAGE
            + if self.fault_plan.packed {
                scramble(state.next_page as u64) as usize % (slack + 1)
            } else {
                0
            };
        state.packing = Some(at + length);
        Some(at)
    }

    fn free(&self, state: &mut State, at: usize, length: usize) {
        state.pages[at / PAGE] -= 1;
        let part = self.memory.slice(at..at + length).expect("in the pool");
        part.write_from(&vec![POISON; length]).expect("our lease");
    }

    /// A socket's close gives its tokens back.
    fn free_closed(&self, state: &mut State) {
        let closed = state.sockets.take_closed();
        for (at, length) in closed.fragments {
            self.free(state, at, length);
            state.counts.freed_by_close += 1;
        }
        state.left_to_card.extend(closed.sent);
    }
}

fn record(kind: i32, offset: u64, size: usize, token: u32, id: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(40);
    bytes.extend_from_slice(&cmsg_len(24).to_ne_bytes());
    bytes.extend_from_slice(&SOL_SOCKET.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    debug_assert_eq!(bytes.len(), HEADER_BYTES);
    bytes.extend_from_slice(&offset.to_ne_bytes());
    bytes.extend_from_slice(&(size as u32).to_ne_bytes());
    bytes.extend_from_slice(&token.to_ne_bytes());
    bytes.extend_from_slice(&id.to_ne_bytes());
    bytes.extend_from_slice(&0u32.to_ne_bytes());
    bytes.resize(cmsg_align(bytes.len()), 0);
    bytes
}

impl SocketCalls for FakeKernel {
    fn receive(
        &self,
        socket: BorrowedFd<'_>,
        into: &RegionSlice,
        control: &mut [u8],
    ) -> io::Result<Arrival> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.counts.failures < u64::from(self.fault_plan.too_small) {
            state.counts.failures += 1;
            return Err(io::Error::from_raw_os_error(TOO_SMALL));
        }
        self.free_closed(state);
        let position = state.sockets.of(socket).position;
        if let Some((at, errno)) = self.fault_plan.fails_at
            && position >= at
        {
            state.counts.failures += 1;
            return Err(io::Error::from_raw_os_error(errno));
        }
        let mut seen = vec![0; into.len().min(256 << 10)];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (_, there) = rustix::net::recv(socket, &mut seen[..], flags)?;
        let mut there = there as u64;
        if let Some((at, _)) = self.fault_plan.fails_at {
            there = there.min(at - position);
        }
        if there == 0 {
            return Ok(Arrival::default());
        }
        let mut arrival = Arrival::default();
        if self.is_plain(position) {
            let bytes = there.min(self.fault_plan.plain.end - position) as usize;
            into.write_from(&seen[..bytes]).expect("our lease");
            state.counts.plain_bytes += bytes as u64;
            arrival.bytes = bytes;
        } else {
            let mut linear = 0;
            while (arrival.bytes as u64) < there && !self.is_plain(position + arrival.bytes as u64)
            {
                let here = position + arrival.bytes as u64;
                if control.len() - arrival.control_bytes < cmsg_space(24) {
                    if arrival.bytes == 0 {
                        return Err(io::Error::from_raw_os_error(TOO_SMALL));
                    }
                    break;
                }
                let (mut end, is_linear) = self.piece(here);
                if here < self.fault_plan.plain.start {
                    end = end.min(self.fault_plan.plain.start);
                }
                let length = (end - here).min(there - arrival.bytes as u64) as usize;
                let bytes = &seen[arrival.bytes..arrival.bytes + length];
                let message = if is_linear {
                    let part = into.slice(linear..linear + length).expect("in the iovec");
                    part.write_from(bytes).expect("our lease");
                    linear += length;
                    state.counts.linear_bytes += length as u64;
                    record(Dialect::Mainline.linear_type(), 0, length, 0, 0)
                } else {
                    let Some(at) = self.place(state, length) else {
                        break;
                    };
                    let part = self.memory.slice(at..at + length).expect("in the pool");
                    part.write_from(bytes).expect("our lease");
                    let own = state.sockets.of(socket);
                    let token = own.free_tokens.pop_first().unwrap_or_else(|| {
                        own.next_token += 1;
                        own.next_token
                    });
                    own.tokens.insert(token, (at, length));
                    state.counts.fragments += 1;
                    state.counts.device_bytes += length as u64;
                    let lies = self
                        .fault_plan
                        .lies_at
                        .is_some_and(|place| (here..here + length as u64).contains(&place));
                    let id = DMABUF_ID + u32::from(lies);
                    record(
                        Dialect::Mainline.device_type(),
                        at as u64,
                        length,
                        token,
                        id,
                    )
                };
                control[arrival.control_bytes..][..message.len()].copy_from_slice(&message);
                arrival.control_bytes += message.len();
                arrival.bytes += length;
            }
            if arrival.bytes == 0 {
                state.counts.dry += 1;
                return Err(io::ErrorKind::WouldBlock.into());
            }
            state.counts.receives += 1;
        }
        let taken = &mut seen[..arrival.bytes];
        let (_, taken) = rustix::net::recv(socket, taken, RecvFlags::DONTWAIT)?;
        assert_eq!(taken, arrival.bytes, "what was seen can be taken");
        state.sockets.of(socket).position += arrival.bytes as u64;
        Ok(arrival)
    }

    fn give_back(
        &self,
        socket: BorrowedFd<'_>,
        level: i32,
        option: i32,
        tokens: &[u8],
    ) -> io::Result<i32> {
        assert_eq!((level, option), (1, Dialect::Mainline.return_option()));
        let mut state = self.lock();
        let state = &mut *state;
        state.counts.returns += 1;
        if let Some((at, errno)) = self.fault_plan.refuses_tokens_at
            && state.counts.returns >= at
        {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let (ranges, rest) = tokens.as_chunks::<8>();
        if !rest.is_empty() || ranges.len() > 128 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut freed = 0;
        for range in ranges {
            let [s0, s1, s2, s3, c0, c1, c2, c3] = *range;
            let start = u32::from_ne_bytes([s0, s1, s2, s3]);
            for token in start..start + u32::from_ne_bytes([c0, c1, c2, c3]) {
                if freed >= self.fault_plan.frees_at_most.min(1024) {
                    break;
                }
                let own = state.sockets.of(socket);
                let Some((at, length)) = own.tokens.remove(&token) else {
                    state.counts.strange_returns += 1;
                    continue;
                };
                own.free_tokens.insert(token);
                self.free(state, at, length);
                freed += 1;
            }
        }
        Ok(freed as i32)
    }

    /// An ordinary zero-copy send: the bytes must stay as they are until the kernel reports, too.
    fn send_device(
        &self,
        socket: BorrowedFd<'_>,
        dmabuf_id: u32,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        assert_eq!(dmabuf_id, SEND_ID);
        let mut state = self.lock();
        let state = &mut *state;
        self.free_closed(state);
        let start = usize::try_from(offset).expect("in memory");
        let overlaps = |(at, bytes): &(usize, usize)| *at < start + length && start < at + bytes;
        state.counts.reused_early += u64::from(state.left_to_card.iter().any(overlaps));
        let own = state.sockets.of(socket);
        let counts = &mut state.counts;
        counts.device_sends += 1;
        if let Some((at, errno)) = self.fault_plan.send_fails_at
            && counts.device_sends >= at
        {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let number = counts.device_sends;
        let is_full = |every| number.is_multiple_of(every);
        if self.fault_plan.no_room_every.is_some_and(is_full) && own.unreported() > 0 {
            counts.device_sends -= 1;
            counts.no_room += 1;
            return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        }
        let part = self.send_memory.slice(start..start + length);
        let base = part.expect("in the memory to send from").host_ptr();
        let flags = libc::MSG_ZEROCOPY | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the region lives as long as the fake, and its slots are not written while they
        // are sent: that is what is tested.
        let sent = unsafe {
            let base = base.expect("host memory");
            libc::send(socket.as_raw_fd(), base.cast(), length, flags)
        };
        let sent = usize::try_from(sent).map_err(|_| {
            counts.device_sends -= 1;
            io::Error::last_os_error()
        })?;
        own.sent.push(Some((start, sent)));
        Ok(sent)
    }

    fn done(&self, socket: BorrowedFd<'_>) -> io::Result<Option<FinishedSends>> {
        let mut state = self.lock();
        let state = &mut *state;
        let own = state.sockets.of(socket);
        let done = match self.fault_plan.reports {
            Reports::InOrder => LinuxSockets.done(socket)?,
            order => {
                while let Some(done) = LinuxSockets.done(socket)? {
                    let one = |number| FinishedSends {
                        first: number,
                        last: number,
                        ..done
                    };
                    own.reports.extend((done.first..=done.last).map(one));
                }
                match order {
                    Reports::Never => None,
                    _ => own.reports.pop(),
                }
            }
        };
        let Some(done) = done else {
            return Ok(None);
        };
        let numbers = done.first as usize..=done.last as usize;
        for sent in &mut own.sent[numbers] {
            let taken = sent.take();
            assert!(taken.is_some(), "a report about a send that was reported");
            state.counts.reports += 1;
        }
        Ok(Some(done))
    }
}

impl Steering for FakeKernel {
    fn insert(&self, flow: Flow) -> Result<u32, DevmemError> {
        let mut state = self.lock();
        state.steered.push(flow);
        Ok(0)
    }

    fn remove(&self, _: u32) {
        self.lock().steered.pop();
    }
}
