//! GPU memory that the two processes of a path open to each other: a thread of the channel's asks
//! the driver, so that no lane and no engine waits for it.
//!
//! Memory that a send is to leave from is offered to the peer once for each region, while payload
//! goes over lanes; as soon as the peer has it mapped, chunks name it. The peer lets go of it when
//! the region's last reference is gone, and when the channel ends. The memory is given back once
//! the peer has said that it reads nothing of it any more.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};
use tcpx_lanes::lock;
use tcpx_lanes::waker::Waker;
use tcpx_memory::{
    CudaError, Gpu, KeptMemory, MemoryHandle, MemoryKind, Region, RegionId, RegionSlice,
    RegionWatch, SegmentRow, Shareable, WeakRegion,
};

use super::super::CHUNK_BYTES;
use super::LocalSizes;
use super::exposed::PartWords;

/// Longest region of the peer's that is mapped.
const LONGEST: u64 = 1 << 44;

const WORDS: usize = 12;
const BYTES: usize = 8 * WORDS;

/// What one side tells the other: a kind, a name, two numbers, and a handle's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// Where the table is in the process that says so, of which this is the descriptor; whether
    /// there are GPUs; entries for windows.
    Table {
        address: u64,
        has_gpus: bool,
        windows: u16,
    },
    /// A region of the very process that both ends are in.
    Own { name: u64 },
    /// An allocation, by its handle.
    Allocation { name: u64, handle: [u8; 64] },
    /// A segment of so many bytes, of a row of `all`, by this descriptor.
    Segment { name: u64, len: u64, all: u64 },
    /// It is to be unmapped.
    LetGo { name: u64 },
    /// It is mapped, or it cannot be.
    Answer { name: u64, is_mapped: bool },
    /// What was to be unmapped is not read any more.
    Unread { name: u64 },
}

impl Message {
    fn encode(self) -> [u8; BYTES] {
        let mut handle_bytes = [0; 64];
        let words = match self {
            Self::Table {
                address,
                has_gpus,
                windows,
            } => [7, windows.into(), address, has_gpus.into()],
            Self::Allocation { name, handle } => {
                handle_bytes = handle;
                [2, name, 0, 0]
            }
            Self::Segment { name, len, all } => [3, name, len, all],
            Self::LetGo { name } => [4, name, 0, 0],
            Self::Answer { name, is_mapped } => [5, name, is_mapped.into(), 0],
            Self::Own { name } => [6, name, 0, 0],
            Self::Unread { name } => [8, name, 0, 0],
        };
        let mut bytes = [0; BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[32..].copy_from_slice(&handle_bytes);
        bytes
    }

    fn decode(bytes: &[u8; BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let [kind, name, one, other] = std::array::from_fn(|at| u64::from_ne_bytes(words[at]));
        Some(match kind {
            2 => Self::Allocation {
                name,
                handle: *bytes.last_chunk()?,
            },
            3 => Self::Segment {
                name,
                len: one,
                all: other,
            },
            4 => Self::LetGo { name },
            5 => Self::Answer {
                name,
                is_mapped: one == 1,
            },
            6 => Self::Own { name },
            7 => Self::Table {
                address: one,
                has_gpus: other == 1,
                windows: name.try_into().ok()?,
            },
            8 => Self::Unread { name },
            _ => return None,
        })
    }

    /// Sends it whole; `false` where the socket has no room now.
    pub(super) fn send(
        self,
        socket: impl AsFd,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<bool> {
        let bytes = self.encode();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.as_slice();
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, flags) {
            Ok(_) => Ok(true),
            Err(error) if error == rustix::io::Errno::AGAIN => Ok(false),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The next one, with its descriptor; `None` where nothing is there now.
    ///
    /// # Errors
    /// The other end is gone, or says something else.
    pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<(Self, Option<OwnedFd>)>> {
        let mut bytes = [0; BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut into = [IoSliceMut::new(&mut bytes)];
        let came = match recvmsg(socket, &mut into, &mut ancillary, flags) {
            Ok(came) => came.bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut descriptor = None;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(mut all) = message {
                descriptor = all.next();
            }
        }
        match came {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            BYTES => match Self::decode(&bytes) {
                Some(message) => Ok(Some((message, descriptor))),
                None => Err(io::ErrorKind::InvalidData.into()),
            },
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// GPU memory of this side that the peer has, and the reverse.
#[derive(Debug)]
pub(in crate::tcp) struct GpuMemory {
    state: Mutex<State>,
    /// Wakes the thread.
    wake: Waker,
    /// What this side offers goes out on the first, what the peer does comes on the second.
    sockets: [OwnedFd; 2],
    gpus: Vec<Gpu>,
    /// Both ends are this process.
    is_own: bool,
    sizes: LocalSizes,
}

#[derive(Debug, Default)]
struct State {
    /// What the peer has mapped, by the address that it begins at.
    offered: BTreeMap<u64, Offered>,
    /// Regions that were offered, or are to be, and live.
    regions: HashSet<RegionId>,
    /// For the thread.
    tasks: VecDeque<Task>,
    /// The peer's memory, for each of this side's GPUs.
    imported: HashMap<u64, Imported>,
    /// Memory whose region has ended, by name: until the peer reads nothing of it any more.
    kept: HashMap<u64, KeptMemory>,
    /// The peer's memory that it wants back, as some of it is being read here; with its names.
    read: HashMap<RegionId, u64>,
    is_over: bool,
}

#[derive(Debug, Clone, Copy)]
struct Offered {
    name: u64,
    len: u64,
    region: RegionId,
}

#[derive(Debug)]
enum Task {
    Offer(WeakRegion, RegionId),
    LetGo(u64),
    Unread(u64),
}

#[derive(Debug)]
enum Imported {
    /// As each of the GPUs reaches it.
    Mapped(Vec<Region>),
    /// A region of this very process, whose driver opens no handle of its own.
    Own(WeakRegion),
}

impl GpuMemory {
    /// Opens memory to the peer and the reverse, from now on.
    pub(super) fn start(
        sockets: [OwnedFd; 2],
        gpus: Vec<Gpu>,
        is_own: bool,
        sizes: LocalSizes,
    ) -> io::Result<Arc<Self>> {
        let wake = Waker::new()?;
        let memory = Arc::new(Self {
            state: Mutex::default(),
            wake,
            sockets,
            gpus,
            is_own,
            sizes,
        });
        let of_thread = Arc::clone(&memory);
        thread::Builder::new()
            .name("tcpx-local".to_owned())
            .spawn(move || {
                let offers = Offers {
                    memory: of_thread,
                    outboxes: Default::default(),
                    offering: None,
                    unanswered: HashMap::new(),
                    rows: HashMap::new(),
                };
                offers.run();
            })?;
        Ok(memory)
    }

    /// No more is offered, and what the peer has offered is unmapped once nothing reads it.
    pub(super) fn close(&self) {
        lock(&self.state).is_over = true;
        for socket in &self.sockets {
            shutdown(socket, Shutdown::Both).ok();
        }
        self.wake.wake();
    }

    /// Whether the peer reads all of this where it lies, by one chunk. What it does not know is
    /// offered to it.
    pub(super) fn is_readable(self: &Arc<Self>, source: &RegionSlice) -> bool {
        self.count_known(source, self.sizes.parts).is_some()
    }

    /// In how many parts this lies, at most so many, if the peer reads all of it where it lies.
    /// What it does not know is offered to it.
    fn count_known(self: &Arc<Self>, source: &RegionSlice, most: usize) -> Option<usize> {
        let mut parts = source.device_parts(0..source.len()).ok()??;
        let mut state = lock(&self.state);
        let mut find = state.finder();
        let mut count = 0;
        let mut few = parts.by_ref().take(most).inspect(|_| count += 1);
        if few.all(|(at, len)| find(at, len as u64).is_some()) {
            return parts.next().is_none().then_some(count);
        }
        drop(find);
        if !state.is_over {
            for region in source.region().parents() {
                self.offer(&mut state, region);
            }
        }
        None
    }

    fn offer(self: &Arc<Self>, state: &mut State, region: &Region) {
        let id = region.id();
        if !state.regions.insert(id) {
            return;
        }
        let memory: Weak<Self> = Arc::downgrade(self);
        region.watch(memory);
        state.tasks.push_back(Task::Offer(region.downgrade(), id));
        self.wake.wake();
    }

    /// The parts of a source that the [peer reads](Self::is_readable), as its table names them, if
    /// they are few enough.
    pub(super) fn parts(&self, source: &RegionSlice) -> Option<Vec<PartWords>> {
        let state = lock(&self.state);
        let parts = source.device_parts(0..source.len()).ok()??;
        let mut find = state.finder();
        let parts = parts.take(self.sizes.parts + 1).map(|(at, len)| {
            let (name, offset) = find(at, len as u64)?;
            Some([name, offset, len as u64])
        });
        let parts: Option<Vec<_>> = parts.collect();
        parts.filter(|parts| parts.len() <= self.sizes.parts)
    }

    /// How long the chunks of a transfer may be that the peer reads where it lies, at most
    /// `longest`.
    pub(super) fn chunk_bytes(self: &Arc<Self>, source: &RegionSlice, longest: u32) -> Option<u32> {
        let count = self.count_known(source, usize::MAX)?;
        if count <= self.sizes.parts {
            return Some(longest);
        }
        let fits = |bytes: u32| {
            let parts = source.device_parts(0..source.len()).ok()??;
            let lengths = parts.map(|(_, len)| len as u64);
            is_in_few(lengths, bytes.into(), self.sizes.parts).then_some(bytes)
        };
        // In a longer one than so many parts make on average, some chunk would lie in more.
        let mean = source.len() / count * self.sizes.parts;
        std::iter::successors(Some(longest), |bytes| Some(bytes / 2))
            .skip_while(|bytes| *bytes > CHUNK_BYTES && *bytes as usize > mean)
            .take_while(|bytes| *bytes > CHUNK_BYTES)
            .find_map(fits)
    }

    /// Memory that the peer has offered, as a GPU of this kind reaches it; for host memory the
    /// first does.
    pub(super) fn imported(&self, name: u64, to: MemoryKind) -> Option<RegionSlice> {
        let state = lock(&self.state);
        match state.imported.get(&name)? {
            Imported::Mapped(regions) => {
                let its = regions.iter().find(|region| region.kind() == to);
                Some(its.or_else(|| regions.first())?.all())
            }
            Imported::Own(region) => Some(region.upgrade()?.all()),
        }
    }
}

/// Whether no chunk of so many bytes lies in more than so many of the parts with these lengths.
fn is_in_few(mut lengths: impl Iterator<Item = u64>, bytes: u64, most: usize) -> bool {
    let (mut count, mut at) = (0, 0);
    lengths.all(|len| {
        let chunk = at / bytes;
        (at, count) = (at + len, count + 1);
        let is_few = count <= most;
        if at / bytes > chunk {
            // Of the last one there is some already, unless this part ends where a chunk does.
            count = usize::from(at % bytes > 0);
        }
        is_few
    })
}

impl RegionWatch for GpuMemory {
    fn ended(&self, id: RegionId, kept: KeptMemory) {
        let mut state = lock(&self.state);
        if let Some(name) = state.read.remove(&id) {
            if !state.read.values().any(|other| *other == name) {
                state.tasks.push_back(Task::Unread(name));
            }
            drop((state, kept));
            return self.wake.wake();
        }
        state.regions.remove(&id);
        let is_over = state.is_over;
        let State {
            offered,
            tasks,
            kept: all_kept,
            ..
        } = &mut *state;
        offered.retain(|_, one| {
            if one.region == id && !is_over {
                all_kept.insert(one.name, kept.clone());
                tasks.push_back(Task::LetGo(one.name));
            }
            one.region != id
        });
        drop((state, kept));
        self.wake.wake();
    }
}

impl State {
    /// Says the name of the offered memory that so many bytes lie in, and where. Most parts of a
    /// list lie in the memory of the one before.
    fn finder(&self) -> impl FnMut(u64, u64) -> Option<(u64, u64)> {
        let mut last = None;
        move |at, len| {
            let lies_in = |(start, one): (u64, Offered)| {
                let offset = at.checked_sub(start)?;
                (offset.checked_add(len)? <= one.len).then_some((one.name, offset))
            };
            if let Some(found) = last.and_then(lies_in) {
                return Some(found);
            }
            let (start, one) = self.offered.range(..=at).next_back()?;
            last = Some((*start, *one));
            last.and_then(lies_in)
        }
    }
}

/// Regions that channels within this process have offered, by name.
static OWN: Mutex<BTreeMap<u64, WeakRegion>> = Mutex::new(BTreeMap::new());
static NEXT_NAME: AtomicU64 = AtomicU64::new(1);

/// What the thread works with.
struct Offers {
    memory: Arc<GpuMemory>,
    /// What is to be sent: to the peer as the one that offers, and as the one that is offered.
    outboxes: [VecDeque<(Message, Option<OwnedFd>)>; 2],
    /// Segments that are still to go out.
    offering: Option<Offering>,
    /// What the peer has not answered yet, by name, with where it begins.
    unanswered: HashMap<u64, (u64, Offered)>,
    /// Rows of segments that are not complete; `None` of one that cannot be mapped.
    rows: HashMap<u64, (u64, Option<SegmentRow>)>,
}

struct Offering {
    gpu: Gpu,
    name: u64,
    at: u64,
    end: u64,
    all: u64,
}

impl Offers {
    fn run(mut self) {
        while !lock(&self.memory.state).is_over {
            let acted = self.flush().and_then(|()| self.wait());
            if let Err(error) = acted.and_then(|()| self.take_messages()) {
                tracing::debug!(%error, "GPU memory is opened to the peer no more");
                break;
            }
        }
        let mut state = lock(&self.memory.state);
        state.is_over = true;
        let offered = std::mem::take(&mut state.offered);
        let imported = std::mem::take(&mut state.imported);
        let kept = std::mem::take(&mut state.kept);
        drop(state);
        let unanswered = self.unanswered.values().map(|(_, one)| one);
        for one in offered.values().chain(unanswered) {
            lock(&OWN).remove(&one.name);
        }
        // Outside of the lock: lanes look there.
        drop((imported, kept));
    }

    fn wait(&self) -> io::Result<()> {
        let wants = |outbox: usize| match self.outboxes[outbox].is_empty() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        };
        let mut all = [
            PollFd::new(&self.memory.wake, PollFlags::IN),
            PollFd::new(&self.memory.sockets[0], wants(0)),
            PollFd::new(&self.memory.sockets[1], wants(1)),
        ];
        match poll(&mut all, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.memory.wake.clear();
        Ok(())
    }

    /// Sends what there is room for.
    fn flush(&mut self) -> io::Result<()> {
        loop {
            if self.outboxes[0].is_empty() {
                self.fill();
            }
            let mut sent = false;
            for (outbox, socket) in self.outboxes.iter_mut().zip(&self.memory.sockets) {
                while let Some((message, descriptor)) = outbox.front() {
                    if !message.send(socket, descriptor.as_ref().map(AsFd::as_fd))? {
                        break;
                    }
                    outbox.pop_front();
                    sent = true;
                }
            }
            if !sent {
                return Ok(());
            }
        }
    }

    /// The next segment, or what the next task has to say.
    fn fill(&mut self) {
        while self.outboxes[0].is_empty() {
            if let Some(offering) = self.offering.take() {
                self.offer_segment(offering);
                continue;
            }
            let Some(task) = lock(&self.memory.state).tasks.pop_front() else {
                return;
            };
            match task {
                Task::LetGo(name) => self.let_go(name),
                Task::Unread(name) => {
                    self.outboxes[1].push_back((Message::Unread { name }, None));
                    return;
                }
                Task::Offer(region, id) => {
                    // Its last reference may end here.
                    if let Some(region) = region.upgrade()
                        && let Err(error) = self.offer(&region, id)
                    {
                        tracing::info!(%error, "memory of the GPU goes over TCP");
                    }
                }
            }
        }
    }

    fn let_go(&mut self, name: u64) {
        lock(&OWN).remove(&name);
        self.outboxes[0].push_back((Message::LetGo { name }, None));
    }

    fn offer_segment(&mut self, mut offering: Offering) {
        let Offering { name, all, .. } = offering;
        match offering.gpu.share(offering.at) {
            Ok(Shareable {
                start,
                len,
                handle: MemoryHandle::Segment(segment),
            }) if start == offering.at && len > 0 => {
                offering.at += len;
                let message = Message::Segment { name, len, all };
                self.outboxes[0].push_back((message, Some(segment)));
                self.offering = Some(offering).filter(|one| one.at < one.end);
            }
            refused => {
                tracing::info!(?refused, "memory of the GPU goes over TCP");
                self.unanswered.remove(&name);
                self.let_go(name);
            }
        }
    }

    fn offer(&mut self, region: &Region, id: RegionId) -> Result<(), CudaError> {
        let name = NEXT_NAME.fetch_add(1, Ordering::Relaxed);
        let all = region.all();
        let (Some(start), Some(gpu)) = (all.device_address(), region.gpu()) else {
            return Ok(());
        };
        let (start, len, message) = if self.memory.is_own {
            lock(&OWN).insert(name, region.downgrade());
            (start, region.len() as u64, Some(Message::Own { name }))
        } else {
            let first = gpu.share(start)?;
            match first.handle {
                MemoryHandle::Legacy(handle) => {
                    let message = Message::Allocation { name, handle };
                    (first.start, first.len, Some(message))
                }
                MemoryHandle::Segment(_) => {
                    let last = gpu.share(start + region.len().saturating_sub(1) as u64)?;
                    let end = last.start + last.len;
                    let all = end.saturating_sub(first.start);
                    self.offering = Some(Offering {
                        gpu: gpu.clone(),
                        name,
                        at: first.start,
                        end,
                        all,
                    });
                    (first.start, all, None)
                }
            }
        };
        self.outboxes[0].extend(message.map(|message| (message, None)));
        let offered = Offered {
            name,
            len,
            region: id,
        };
        self.unanswered.insert(name, (start, offered));
        Ok(())
    }

    /// Does what the peer asks, and sees what it answers.
    fn take_messages(&mut self) -> io::Result<()> {
        for socket in 0..self.memory.sockets.len() {
            while let Some((message, descriptor)) = Message::receive(&self.memory.sockets[socket])?
            {
                match (socket, message) {
                    (0, Message::Answer { name, is_mapped }) => self.answered(name, is_mapped),
                    (0, Message::Unread { name }) => {
                        let kept = lock(&self.memory.state).kept.remove(&name);
                        drop(kept);
                    }
                    (1, Message::LetGo { name }) => self.unmap(name),
                    (1, message) => {
                        if let Some((name, imported)) = self.import(message, descriptor) {
                            let is_mapped = imported.is_some();
                            let mut state = lock(&self.memory.state);
                            state.imported.extend(imported.map(|one| (name, one)));
                            drop(state);
                            let answer = Message::Answer { name, is_mapped };
                            self.outboxes[1].push_back((answer, None));
                        }
                    }
                    _ => return Err(io::ErrorKind::InvalidData.into()),
                }
            }
        }
        Ok(())
    }

    /// The peer wants memory back: what still reads it ends, and then the peer is told.
    fn unmap(&mut self, name: u64) {
        self.rows.remove(&name);
        let mut state = lock(&self.memory.state);
        let Some(Imported::Mapped(regions)) = state.imported.remove(&name) else {
            state.tasks.push_back(Task::Unread(name));
            return;
        };
        state
            .read
            .extend(regions.iter().map(|region| (region.id(), name)));
        drop(state);
        for region in &regions {
            let memory: Weak<GpuMemory> = Arc::downgrade(&self.memory);
            region.watch(memory);
        }
        drop(regions);
    }

    fn answered(&mut self, name: u64, is_mapped: bool) {
        let Some((start, offered)) = self.unanswered.remove(&name) else {
            return;
        };
        let mut state = lock(&self.memory.state);
        if !is_mapped {
            return;
        }
        if !state.regions.contains(&offered.region) {
            state.tasks.push_back(Task::LetGo(name));
            return;
        }
        // Of two regions that begin at one place the longer one serves both.
        match state.offered.get(&start) {
            Some(there) if there.len >= offered.len => state.tasks.push_back(Task::LetGo(name)),
            _ => {
                if let Some(there) = state.offered.insert(start, offered) {
                    state.tasks.push_back(Task::LetGo(there.name));
                }
            }
        }
    }

    /// Opens what the peer offers; the name of what it hears of then, and the memory if it is open.
    fn import(
        &mut self,
        message: Message,
        descriptor: Option<OwnedFd>,
    ) -> Option<(u64, Option<Imported>)> {
        let mapped = lock(&self.memory.state).imported.len();
        let has_room = mapped + self.rows.len() < self.memory.sizes.imports;
        let refused = |error: &CudaError| {
            tracing::info!(%error, "memory of the peer's GPU comes over TCP");
        };
        match message {
            Message::Own { name } => {
                let own = lock(&OWN).get(&name).cloned();
                // What lies on another GPU than this side's its workers do not reach.
                let reaches = |region: &WeakRegion| {
                    let gpu = region.upgrade().and_then(|region| region.gpu().cloned());
                    let gpus = &self.memory.gpus;
                    gpu.is_some_and(|gpu| gpus.iter().all(|own| own.is_same(&gpu)))
                };
                let own = own.filter(|own| self.memory.is_own && has_room && reaches(own));
                Some((name, own.map(Imported::Own)))
            }
            Message::Allocation { name, handle } => {
                let open = |gpu: &Gpu| gpu.open_legacy(handle);
                let opened: Result<Vec<_>, _> = match has_room {
                    true => self.memory.gpus.iter().map(open).collect(),
                    false => Ok(Vec::new()),
                };
                let opened = opened.inspect_err(refused).ok();
                let opened = opened.filter(|all| !all.is_empty());
                Some((name, opened.map(Imported::Mapped)))
            }
            Message::Segment { name, len, all } => {
                let gpus = &self.memory.gpus;
                let (left, row) = self.rows.entry(name).or_insert_with(|| {
                    let row = (has_room && all <= LONGEST)
                        .then(|| SegmentRow::new(gpus, all as usize))
                        .and_then(|row| row.inspect_err(refused).ok());
                    (all, row)
                });
                *left = left.saturating_sub(len);
                let added = match (row.as_mut(), &descriptor) {
                    (Some(row), Some(segment)) => row.add(segment, len as usize),
                    _ => Ok(()),
                };
                if let Err(error) = &added {
                    refused(error);
                }
                if added.is_err() || descriptor.is_none() {
                    *row = None;
                }
                if *left > 0 {
                    return None;
                }
                let (_, row) = self.rows.remove(&name)?;
                let row = row.map(SegmentRow::finish);
                let row = row.and_then(|row| row.inspect_err(refused).ok());
                Some((name, row.map(Imported::Mapped)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_lie_in_as_many_parts_as_they_meet() {
        let all: [&[u64]; 5] = [
            &[4; 9],
            &[1, 30, 1, 1, 1],
            &[8, 8, 3, 5, 8],
            &[40],
            &[3; 20],
        ];
        for lengths in all {
            for bytes in 1..=16 {
                let total: u64 = lengths.iter().sum();
                let meets = |chunk: u64| {
                    let mut end = 0;
                    let parts = lengths.iter().filter(|len| {
                        end += **len;
                        end - **len < (chunk + 1) * bytes && end > chunk * bytes
                    });
                    parts.count()
                };
                let most = (0..total.div_ceil(bytes)).map(meets).max().unwrap_or(0);
                let fits = |most| is_in_few(lengths.iter().copied(), bytes, most);
                assert!(fits(most), "{lengths:?} in chunks of {bytes}");
                assert!(!fits(most - 1), "{lengths:?} in chunks of {bytes}");
            }
        }
    }
}
