//! Reading the memory of the peer's process.

use std::io;

use rustix::process::Pid;
use tcpx_lanes::socket_calls::{Part, Span, read_process, read_process_bytes};
use tcpx_memory::{Access, Gather, MemoryKind, RegionSlice};
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};
use tcpx_wire::frame::Exposure;

use super::exposed::{HOST, MOST_PARTS, Mark, PROOF_BYTES, PartWords, Table, impossible};
use super::gpu_memory::GpuMemory;

/// Parts that one call copies.
const SLICE_PARTS: usize = 256;

/// The peer's table, and the memory of its process, if that may be read.
#[derive(Debug)]
pub(in crate::tcp) struct PeerMemory {
    pub(super) table: Table,
    pub(super) process: Option<Process>,
    pub(super) slice: usize,
}

/// A process whose memory may be read, and that holds a proof which it alone knows.
#[derive(Debug)]
pub(super) struct Process {
    id: Pid,
    /// Where the proof is.
    at: u64,
    proof: [u8; PROOF_BYTES],
}

/// Where an exposed chunk lies.
#[derive(Debug)]
pub(in crate::tcp) struct Source {
    pub(in crate::tcp) mark: Mark,
    pub(in crate::tcp) place: MemoryOwner,
}

/// What is read in windows of the peer's that it exposes, or of a message.
#[derive(Debug)]
pub struct PeerRead {
    pub(super) source: Source,
    /// What has to be exposed until all of it is read.
    marks: Vec<Mark>,
    bytes: usize,
    done: usize,
}

impl PeerRead {
    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// It lies in memory of a GPU: copy it from there, and then read on.
    pub fn gpu_memory(&self) -> Option<&RegionSlice> {
        match &self.source.place {
            MemoryOwner::Gpu(memory) => Some(memory),
            MemoryOwner::Host { .. } => None,
        }
    }
}

/// In whose memory.
#[derive(Debug)]
pub(in crate::tcp) enum MemoryOwner {
    /// The process's.
    Host {
        /// The part that is being read.
        part: PartWords,
        /// Those behind it, the last one first.
        rest: Vec<PartWords>,
    },
    /// A GPU's, as this process has it mapped.
    Gpu(RegionSlice),
}

/// What a read came to.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::tcp) enum Read {
    /// So many bytes are there.
    Bytes(usize),
    /// The sender has let go of the chunk.
    LetGo,
}

impl Process {
    /// The process of this number, if this one may read its memory and it knows the proof.
    ///
    /// # Errors
    /// The kernel lets nobody read it, or something else is there.
    pub(super) fn prove(id: Pid, at: u64, proof: [u8; PROOF_BYTES]) -> io::Result<Self> {
        let process = Self { id, at, proof };
        let mut there = [0; PROOF_BYTES];
        match read_process_bytes(id, process.proof(), &mut there)? {
            PROOF_BYTES if there == proof => Ok(process),
            PROOF_BYTES => Err(io::Error::other("it holds another value")),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn proof(&self) -> Span {
        remote(self.at, PROOF_BYTES as u64)
    }

    /// Fills a part from these spans, as far as one call does. `None`: the process has ended, and
    /// what has its number now says something else.
    fn read(&self, spans: &[Span], into: Part<'_>) -> io::Result<Option<usize>> {
        let (wanted, mut there) = (into.len, [0; PROOF_BYTES]);
        let read = match read_process(self.id, spans, into, &mut there) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
                return Ok(None);
            }
            read => read?,
        };
        let is_proven = match read.checked_sub(wanted) {
            Some(PROOF_BYTES) => there == self.proof,
            // Another call then, which finds the same process or none.
            _ => Self::prove(self.id, self.at, self.proof).is_ok(),
        };
        Ok(is_proven.then_some(read.min(wanted)))
    }
}

impl PeerMemory {
    /// Where the payload of a chunk lies, which goes to memory of this kind; `None` where its
    /// sender has let go of it.
    ///
    /// # Errors
    /// The peer's memory cannot be read, or its table says what cannot be.
    pub(in crate::tcp) fn find(
        &self,
        header: &ChunkHeader,
        gpus: Option<&GpuMemory>,
        to: MemoryKind,
    ) -> io::Result<Option<Source>> {
        let ChunkPayload::Exposed { entry } = header.payload else {
            return Ok(None);
        };
        self.source(Mark::new(entry, header), header.length.into(), gpus, to)
    }

    fn source(
        &self,
        mark: Mark,
        length: u64,
        gpus: Option<&GpuMemory>,
        to: MemoryKind,
    ) -> io::Result<Option<Source>> {
        let Some((part, rest, there)) = self.table.parts(mark)? else {
            return Ok(None);
        };
        if there != length {
            return Err(impossible(format!("{there} bytes, not {length}")));
        }
        let place = MemoryOwner::new(gpus, to, part, rest)?;
        Ok(Some(Source { mark, place }))
    }

    /// Where a message lies, which goes to memory of this kind; `None` where its sender has let go
    /// of it.
    ///
    /// # Errors
    /// As of [`Self::find`].
    pub(super) fn find_message(
        &self,
        at: &Exposure,
        gpus: Option<&GpuMemory>,
        to: MemoryKind,
    ) -> io::Result<Option<PeerRead>> {
        let mark = Mark::of_message(at);
        let source = self.source(mark, at.bytes.into(), gpus, to)?;
        Ok(source.map(|source| PeerRead {
            source,
            marks: vec![mark],
            bytes: at.bytes as usize,
            done: 0,
        }))
    }

    /// Where these pieces of windows lie, which go to memory of this kind. `None` where their owner
    /// has to be asked: it exposes not all of them, or they do not lie there.
    ///
    /// # Errors
    /// As of [`Self::find`].
    pub(super) fn find_in_windows(
        &self,
        pieces: &mut dyn Iterator<Item = (tcpx_wire::Place, u64)>,
        gpus: Option<&GpuMemory>,
        to: MemoryKind,
    ) -> io::Result<Option<PeerRead>> {
        let (mut marks, mut parts, mut all) = (Vec::new(), Vec::new(), 0);
        for (place, bytes) in pieces {
            let Some(mark) = self.table.find_window(&place) else {
                return Ok(None);
            };
            let Some((mut part, mut rest, there)) = self.table.parts(mark)? else {
                return Ok(None);
            };
            let end = place.offset.checked_add(bytes);
            if end.is_none_or(|end| end > there) {
                return Ok(None);
            }
            skip(&mut part, &mut rest, place.offset);
            all += bytes as usize;
            let mut left = bytes;
            while left > 0 {
                let [of, at, len] = part;
                let len = len.min(left);
                parts.push([of, at, len]);
                left -= len;
                skip(&mut part, &mut rest, len);
            }
            if parts.len() > MOST_PARTS {
                return Ok(None);
            }
            if marks.last() != Some(&mark) {
                marks.push(mark);
            }
        }
        parts.reverse();
        let (Some(mark), Some(part)) = (marks.first().copied(), parts.pop()) else {
            return Ok(None);
        };
        let place = MemoryOwner::new(gpus, to, part, parts)?;
        Ok(Some(PeerRead {
            source: Source { mark, place },
            marks,
            bytes: all,
            done: 0,
        }))
    }

    /// Copies some more of it, in host memory: whether all of it was exposed until all was read,
    /// once it is, or it is not any more.
    ///
    /// # Errors
    /// The peer's memory cannot be read.
    pub(super) fn read_on(
        &self,
        read: &mut PeerRead,
        into: &RegionSlice,
    ) -> io::Result<Option<bool>> {
        if read.gpu_memory().is_none() {
            match self.read(&mut read.source, into, read.done)? {
                Read::LetGo => return Ok(Some(false)),
                Read::Bytes(bytes) => read.done += bytes,
            }
            if read.done < into.len() {
                return Ok(None);
            }
        }
        Ok(Some(read.marks.iter().all(|mark| self.is_live(*mark))))
    }

    /// Whether the sender has not let go of the chunk: all that was read of it before was its
    /// payload.
    pub(in crate::tcp) fn is_live(&self, mark: Mark) -> bool {
        self.table.is_live(mark)
    }

    /// Copies what follows the first `done` bytes of a chunk in host memory, some of it.
    ///
    /// # Errors
    /// The peer's memory cannot be read.
    pub(in crate::tcp) fn read(
        &self,
        source: &mut Source,
        into: &RegionSlice,
        done: usize,
    ) -> io::Result<Read> {
        let (MemoryOwner::Host { part, rest }, Some(process)) = (&mut source.place, &self.process)
        else {
            return Err(impossible("host memory, which is not read here".to_owned()));
        };
        let most = (into.len() - done).min(self.slice.max(1));
        let mut spans = [Span::EMPTY; SLICE_PARTS + 1];
        let (mut wanted, mut count) = (0, 0);
        for ([_, at, len], span) in std::iter::once(&*part)
            .chain(rest.iter().rev())
            .zip(&mut spans[..SLICE_PARTS])
        {
            let len = (most as u64 - wanted).min(*len);
            *span = remote(*at, len);
            (wanted, count) = (wanted + len, count + usize::from(len > 0));
        }
        let local = Part {
            slice: into,
            from: done,
            len: wanted as usize,
        };
        spans[count] = process.proof();
        let read = process.read(&spans[..=count], local);
        if !self.is_live(source.mark) {
            return Ok(Read::LetGo);
        }
        match read? {
            None => Ok(Read::LetGo),
            Some(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(bytes) => {
                skip(part, rest, bytes as u64);
                Ok(Read::Bytes(bytes))
            }
        }
    }
}

impl MemoryOwner {
    fn new(
        gpus: Option<&GpuMemory>,
        to: MemoryKind,
        part: PartWords,
        rest: Vec<PartWords>,
    ) -> io::Result<Self> {
        let is_host = |[of, ..]: &PartWords| *of == HOST;
        match gpus {
            _ if is_host(&part) && rest.iter().all(is_host) => Ok(Self::Host { part, rest }),
            Some(gpus) => Ok(Self::Gpu(mapped(gpus, to, part, rest)?)),
            None => Err(impossible("GPU memory, which is not read here".to_owned())),
        }
    }
}

/// The parts as memory of this process.
fn mapped(
    gpus: &GpuMemory,
    to: MemoryKind,
    part: PartWords,
    rest: Vec<PartWords>,
) -> io::Result<RegionSlice> {
    let unknown = || impossible("GPU memory that nobody knows".to_owned());
    let place = |part: PartWords| {
        let [of, at, len] = part.map(|word| usize::try_from(word).unwrap_or(usize::MAX));
        (of as u64, at..at.saturating_add(len))
    };
    if rest.is_empty() {
        let (of, range) = place(part);
        let memory = gpus.imported(of, to).ok_or_else(unknown)?;
        return memory.slice(range).map_err(io::Error::other);
    }
    let (mut names, mut parents) = (Vec::new(), Vec::new());
    let mut pieces = Vec::with_capacity(rest.len() + 1);
    for part in std::iter::once(part).chain(rest.into_iter().rev()) {
        let (of, range) = place(part);
        let known = match names.iter().position(|name| *name == of) {
            Some(known) => known,
            None => {
                names.push(of);
                parents.push(gpus.imported(of, to).ok_or_else(unknown)?);
                names.len() - 1
            }
        };
        pieces.push((known, range));
    }
    let gathered = Gather::new(&parents, pieces.into_iter(), Access::Read)
        .and_then(|gather| gather.region("the peer's send"));
    gathered
        .map(|region| region.all())
        .map_err(io::Error::other)
}

fn skip(part: &mut PartWords, rest: &mut Vec<PartWords>, mut bytes: u64) {
    loop {
        let [_, at, len] = &mut *part;
        let step = bytes.min(*len);
        (*at, *len, bytes) = (at.wrapping_add(step), *len - step, bytes - step);
        if *len > 0 {
            return;
        }
        let Some(next) = rest.pop() else {
            return;
        };
        *part = next;
    }
}

fn remote(at: u64, len: u64) -> Span {
    // An address of the other process; lengths are those of chunks.
    Span::new(std::ptr::without_provenance_mut(at as usize), len as usize)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use rustix::process::getpid;
    use std::os::fd::AsFd;

    use tcpx_lanes::shared_words::SharedWords;
    use tcpx_memory::Region;
    use tcpx_wire::{TransferId, WindowSecret};

    use super::super::LocalSizes;
    use super::super::exposed::{Exposed, MOST_PARTS};
    use super::super::host_parts;
    use super::*;

    const PROOF: [u8; PROOF_BYTES] = [7; PROOF_BYTES];
    const LENGTH: usize = 600_000;
    const MESSAGES: u16 = 3;
    const WINDOWS: u16 = 2;
    const SLICE_BYTES: usize = 250_000;

    fn header(window: u64, entry: u16, length: usize) -> ChunkHeader {
        ChunkHeader {
            sequence: 0,
            transfer: TransferId(window),
            offset: 0,
            total: 0,
            length: length as u32,
            attempt: 0,
            payload: ChunkPayload::Exposed { entry },
        }
    }

    fn expose(table: &Arc<Table>, header: &ChunkHeader, payload: &RegionSlice) -> Exposed {
        let ChunkPayload::Exposed { entry } = header.payload else {
            panic!("it is exposed");
        };
        let exposed = table.expose(entry, &header.encode(), host_parts(payload));
        exposed.expect("few parts")
    }

    fn table(chunks: u16) -> Arc<Table> {
        let sizes = LocalSizes {
            messages: MESSAGES,
            windows: WINDOWS,
            ..LocalSizes::default()
        };
        Table::new(&PROOF, chunks, &sizes).unwrap()
    }

    fn filled() -> Region {
        let region = Region::host(LENGTH).unwrap();
        let bytes: Vec<u8> = (0..LENGTH).map(|at| (at / 7) as u8).collect();
        region.write_from(0, &bytes).unwrap();
        region
    }

    fn gathered(source: &Region, pieces: impl Iterator<Item = Range<usize>>) -> RegionSlice {
        let pieces = pieces.map(|piece| (0, piece));
        let gather = Gather::new(&[source.all()], pieces, Access::Read).unwrap();
        gather.region("a test").unwrap().all()
    }

    fn peer(table: &Table) -> PeerMemory {
        let words = SharedWords::open(table.as_fd().try_clone_to_owned().unwrap()).unwrap();
        PeerMemory {
            table: Table::of_peer(words, table.windows),
            process: Some(Process::prove(getpid(), table.address(), PROOF).unwrap()),
            slice: SLICE_BYTES,
        }
    }

    fn find(peer: &PeerMemory, header: &ChunkHeader) -> io::Result<Option<Source>> {
        peer.find(header, None, MemoryKind::Host)
    }

    #[test]
    fn memory_without_the_proof_is_nobodys() {
        let table = table(2);
        for (at, proof) in [(table.address(), [8; PROOF_BYTES]), (16, PROOF)] {
            assert!(Process::prove(getpid(), at, proof).is_err());
        }
        Process::prove(getpid(), table.address(), PROOF).unwrap();
    }

    /// The kernel may have given the number of one that has ended to another.
    #[test]
    fn nothing_is_read_of_a_process_that_lost_the_proof() {
        for pieces in [1, 2 * SLICE_PARTS] {
            let (table, source) = (table(1), filled());
            let part = LENGTH / pieces;
            let all = gathered(&source, (0..pieces).map(|at| at * part..(at + 1) * part));
            let header = header(1, 0, pieces * part);
            let _exposed = expose(&table, &header, &all);
            let into = Region::host(LENGTH).unwrap().all();
            let mut peer = peer(&table);
            let mut found = find(&peer, &header).unwrap().unwrap();
            let read = peer.read(&mut found, &into, 0).unwrap();
            assert!(matches!(read, Read::Bytes(_)), "{read:?}");
            for (id, proof) in [
                (getpid(), [8; PROOF_BYTES]),
                (Pid::from_raw(i32::MAX).unwrap(), PROOF),
            ] {
                let at = table.address();
                peer.process = Some(Process { id, at, proof });
                let mut found = find(&peer, &header).unwrap().unwrap();
                let read = peer.read(&mut found, &into, 0).unwrap();
                assert_eq!(read, Read::LetGo, "{pieces} pieces of {id:?}");
            }
        }
    }

    fn message(table: &Arc<Table>, source: &RegionSlice) -> (Exposure, Exposed) {
        let bytes = source.len() as u32;
        let exposed = table.expose_message(bytes, host_parts(source));
        exposed.expect("an entry is free")
    }

    fn read_message(peer: &PeerMemory, at: &Exposure, into: &Region) -> bool {
        let found = peer.find_message(at, None, MemoryKind::Host).unwrap();
        found.is_some_and(|mut read| read_all(peer, &mut read, &into.all()))
    }

    #[test]
    fn messages_are_read_until_they_are_let_go_of() {
        let (table, source) = (table(2), filled());
        let peer = peer(&table);
        let mut sent = vec![0; LENGTH];
        source.read_to(0, &mut sent).unwrap();
        let into = Region::host(LENGTH).unwrap();
        let mut before = None;
        for _ in 0..3 * MESSAGES {
            let (at, exposed) = message(&table, &source.all());
            into.write_from(0, &vec![0; LENGTH]).unwrap();
            assert!(read_message(&peer, &at, &into));
            let mut came = vec![0; LENGTH];
            into.read_to(0, &mut came).unwrap();
            assert!(sent == came);
            // What has its entry now is another one.
            if let Some(before) = before.replace(at) {
                assert!(!read_message(&peer, &before, &into));
            }
            drop(exposed);
            assert!(!read_message(&peer, &at, &into));
        }
        let all: Vec<_> = (0..MESSAGES)
            .map(|_| message(&table, &source.all()))
            .collect();
        assert!(
            table
                .expose_message(LENGTH as u32, host_parts(&source.all()))
                .is_none()
        );
        drop(all);
        // Nor in too many parts, which takes no entry.
        for _ in 0..2 * MESSAGES {
            let parts = vec![[HOST, 0, 1]; MOST_PARTS + 1];
            assert!(table.expose_message(1, parts.into_iter()).is_none());
        }
        message(&table, &source.all());
    }

    #[test]
    fn what_is_exposed_is_read_whole_in_one_part_and_in_many() {
        let (table, source) = (table(2), filled());
        let pieces = (0..200).rev().map(|at| at * 3000..(at + 1) * 3000);
        let gathered = gathered(&source, pieces);
        let slices = [61, 2999, 3000, 65_537, SLICE_BYTES];
        let whole = (1..)
            .zip(slices)
            .map(|(window, slice)| (window, slice, source.all()));
        let parts = (9..)
            .zip(slices)
            .map(|(window, slice)| (window, slice, gathered.clone()));
        for (window, slice, payload) in whole.chain(parts) {
            let peer = PeerMemory {
                slice,
                ..peer(&table)
            };
            let header = header(window, 1, LENGTH);
            let _exposed = expose(&table, &header, &payload);
            let into = Region::host(LENGTH).unwrap();
            let mut found = find(&peer, &header).unwrap().unwrap();
            let mut done = 0;
            while done < LENGTH {
                match peer.read(&mut found, &into.all(), done).unwrap() {
                    Read::Bytes(bytes) => done += bytes,
                    Read::LetGo => panic!("it is exposed"),
                }
            }
            let (mut sent, mut came) = (vec![0; LENGTH], vec![0; LENGTH]);
            payload.read_to(&mut sent).unwrap();
            into.read_to(0, &mut came).unwrap();
            assert!(sent == came, "window {window} by {slice} bytes");
        }
    }

    #[test]
    fn what_was_released_is_not_read_to_its_end() {
        for exposed_again in [false, true] {
            let (table, source) = (table(2), filled());
            let first = header(5, 1, LENGTH);
            let exposed = expose(&table, &first, &source.all());
            let into = Region::host(LENGTH).unwrap().all();
            let mut found = find(&peer(&table), &first).unwrap().unwrap();
            let read = peer(&table).read(&mut found, &into, 0).unwrap();
            assert_eq!(read, Read::Bytes(SLICE_BYTES));
            drop(exposed);
            let next = header(6, 1, LENGTH);
            let _next = exposed_again.then(|| expose(&table, &next, &source.all()));
            let read = peer(&table).read(&mut found, &into, SLICE_BYTES).unwrap();
            assert_eq!(read, Read::LetGo);
            assert!(find(&peer(&table), &first).unwrap().is_none());
        }
    }

    fn place(window: u64, offset: usize) -> tcpx_wire::Place {
        tcpx_wire::Place {
            window,
            secret: WindowSecret::generate(&mut |bytes| bytes.fill(window as u8)),
            offset: offset as u64,
        }
    }

    fn expose_window(table: &Arc<Table>, window: u64, memory: &RegionSlice) -> Option<Exposed> {
        table.expose_window(&place(window, 0), host_parts(memory))
    }

    fn find_window(
        peer: &PeerMemory,
        pieces: &[(tcpx_wire::Place, usize)],
    ) -> io::Result<Option<PeerRead>> {
        let mut pieces = pieces.iter().map(|(place, bytes)| (*place, *bytes as u64));
        peer.find_in_windows(&mut pieces, None, MemoryKind::Host)
    }

    fn read_all(peer: &PeerMemory, read: &mut PeerRead, into: &RegionSlice) -> bool {
        loop {
            if let Some(is_whole) = peer.read_on(read, into).unwrap() {
                return is_whole;
            }
        }
    }

    #[test]
    fn pieces_of_windows_are_read_by_who_knows_their_secrets() {
        let (table, source) = (table(2), filled());
        let pieces = (0..60).rev().map(|at| at * 10_000..(at + 1) * 10_000);
        let gathered = gathered(&source, pieces);
        let whole = expose_window(&table, 5, &source.all());
        let parts = expose_window(&table, 6, &gathered);
        assert!(whole.is_some() && parts.is_some());
        let mut of = [vec![0; LENGTH], vec![0; LENGTH]];
        source.read_to(0, &mut of[0]).unwrap();
        gathered.read_to(&mut of[1]).unwrap();
        let lists = [
            vec![(5, 0, LENGTH)],
            vec![(6, 0, LENGTH)],
            vec![
                (6, 9_999, 2),
                (5, LENGTH - 1, 1),
                (5, 7, 300_000),
                (6, 123, 290_000),
            ],
            (0..1000)
                .map(|at| (5 + at as u64 % 2, at * 13, 1))
                .collect(),
        ];
        let slices = [61, 10_000, SLICE_BYTES].into_iter();
        for (slice, list) in slices.flat_map(|slice| lists.iter().map(move |list| (slice, list))) {
            let peer = PeerMemory {
                slice,
                ..peer(&table)
            };
            let bytes = list.iter().map(|(_, _, bytes)| bytes).sum();
            let into = Region::host(bytes).unwrap();
            let pieces = list
                .iter()
                .map(|(window, at, bytes)| (place(*window, *at), *bytes));
            let pieces: Vec<_> = pieces.collect();
            let mut read = find_window(&peer, &pieces).unwrap().expect("exposed");
            assert!(read_all(&peer, &mut read, &into.all()));
            let mut came = vec![0; bytes];
            into.read_to(0, &mut came).unwrap();
            let mut expected = Vec::<u8>::new();
            for (window, at, bytes) in list {
                expected.extend(&of[*window as usize - 5][*at..at + bytes]);
            }
            assert!(came == expected, "{slice} bytes at a time");
        }
        let peer = peer(&table);
        let other_secret = tcpx_wire::Place {
            secret: place(7, 0).secret,
            ..place(5, 0)
        };
        for (place, bytes) in [
            (other_secret, 1),
            (place(7, 0), 1),
            (place(5, 1), LENGTH),
            (place(5, usize::MAX), 1),
            (place(5 + u64::from(WINDOWS), 0), 1),
        ] {
            let found = find_window(&peer, &[(place, bytes)]).unwrap();
            assert!(found.is_none(), "{place:?}");
        }
        let many: Vec<_> = (0..=MOST_PARTS).map(|at| (place(5, at), 1)).collect();
        assert!(find_window(&peer, &many).unwrap().is_none());
    }

    #[test]
    fn a_window_that_is_let_go_of_is_not_read_to_its_end() {
        let next_there = 5 + u64::from(WINDOWS);
        // Then its entry is empty, has the same window, or another one.
        for next in [None, Some(5), Some(next_there)] {
            let (table, source) = (table(2), filled());
            let peer = peer(&table);
            let exposed = expose_window(&table, 5, &source.all());
            assert!(expose_window(&table, next_there, &source.all()).is_none());
            let other = expose_window(&table, 6, &source.all());
            let pieces = [(place(6, 0), 1), (place(5, 0), LENGTH), (place(6, 0), 1)];
            let into = Region::host(LENGTH + 2).unwrap().all();
            let mut of_two = find_window(&peer, &pieces).unwrap().expect("exposed");
            let mut of_one = find_window(&peer, &pieces[1..2]).unwrap().expect("exposed");
            let part = into.slice(..LENGTH).unwrap();
            assert_eq!(peer.read_on(&mut of_one, &part).unwrap(), None);
            drop(exposed);
            let _next = next.map(|next| expose_window(&table, next, &source.all()).unwrap());
            assert_eq!(peer.read_on(&mut of_one, &part).unwrap(), Some(false));
            assert!(
                !read_all(&peer, &mut of_two, &into),
                "one of two is exposed"
            );
            let found = find_window(&peer, &pieces[1..2]).unwrap();
            assert_eq!(found.is_some(), next == Some(5));
            drop(other);
        }
    }

    #[test]
    fn a_chunk_in_too_many_parts_is_not_exposed() {
        let (table, source) = (table(1), filled());
        for (parts, is_exposed) in [(MOST_PARTS, true), (MOST_PARTS + 1, false)] {
            let gathered = gathered(&source, (0..parts).map(|at| at * 2..at * 2 + 1));
            let header = header(1, 0, parts);
            let exposed = table.expose(0, &header.encode(), host_parts(&gathered));
            assert_eq!(exposed.is_some(), is_exposed, "{parts} parts");
        }
    }

    #[test]
    fn a_table_that_says_what_cannot_be_is_an_error() {
        let source = filled();
        let at = source.all().address();
        let header = header(1, 0, LENGTH);
        let length = LENGTH as u64;
        let lies: [&[PartWords]; 6] = [
            &[[HOST, at, length - 1]],
            &[[HOST, at, length + 1]],
            &[[HOST, at, length], [HOST, at, u64::MAX]],
            &[[HOST, at, 1], [HOST, at, 1]],
            &[[1, 0, length]],
            &[[HOST, 16, length]],
        ];
        for parts in lies {
            let table = table(1);
            let _exposed = table.expose(0, &header.encode(), parts.iter().copied());
            let into = Region::host(LENGTH).unwrap().all();
            let peer = peer(&table);
            let found = find(&peer, &header);
            let read = found.and_then(|found| peer.read(&mut found.unwrap(), &into, 0));
            assert!(read.is_err(), "{parts:?}: {read:?}");
        }
        let table = table(1);
        let beyond = ChunkHeader {
            payload: ChunkPayload::Exposed {
                entry: 1 + MESSAGES + WINDOWS,
            },
            ..header
        };
        assert!(find(&peer(&table), &beyond).is_err());
    }
}
