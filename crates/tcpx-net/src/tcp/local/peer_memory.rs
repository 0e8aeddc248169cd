//! Reading the memory of the peer's process.

use std::io;

use rustix::process::Pid;
use tcpx_lanes::socket_calls::{Part, Span, read_process, read_process_bytes};
use tcpx_memory::RegionSlice;
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};

use super::exposed::{ENTRY_BYTES, MOST_PARTS, PROOF_BYTES};

/// Bytes that one call copies: a lane looks at the rest of its work in between.
const SLICE_BYTES: usize = 256 << 10;

/// The memory of the peer's process, and its table there.
#[derive(Debug)]
pub(in crate::tcp) struct PeerMemory {
    process: Pid,
    table: u64,
}

/// Where an exposed chunk lies.
#[derive(Debug)]
pub(in crate::tcp) struct Source {
    /// Window and index, as the entry has them while the chunk is exposed.
    live: [u8; 16],
    entry: u64,
    /// The part that is being read, by address and length.
    part: [u64; 2],
    /// Those behind it, the last one first.
    rest: Vec<[u64; 2]>,
}

/// What a read came to.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::tcp) enum Read {
    /// So many bytes are there.
    Bytes(usize),
    /// The sender has let go of the chunk.
    LetGo,
}

impl PeerMemory {
    /// The memory of this process, if its table begins with the proof.
    ///
    /// # Errors
    /// The kernel lets nobody read it, or something else is there.
    pub(super) fn proven(process: Pid, table: u64, proof: &[u8; PROOF_BYTES]) -> io::Result<Self> {
        let memory = Self { process, table };
        let mut there = [0; PROOF_BYTES];
        memory.read_all(table, &mut there)?;
        match there == *proof {
            true => Ok(memory),
            false => Err(io::Error::other("it holds another value")),
        }
    }

    fn read_all(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        match read_process_bytes(self.process, remote(at, into.len() as u64), into)? {
            bytes if bytes == into.len() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Where the payload of a chunk lies; `None` where its sender has let go of it.
    ///
    /// # Errors
    /// The peer's memory cannot be read, or says what cannot be.
    pub(in crate::tcp) fn find(&self, header: &ChunkHeader) -> io::Result<Option<Source>> {
        let ChunkPayload::Exposed { entry } = header.payload else {
            return Ok(None);
        };
        let entry = self
            .table
            .wrapping_add((PROOF_BYTES + ENTRY_BYTES * usize::from(entry)) as u64);
        let mut live = [0; 16];
        live[..8].copy_from_slice(&header.transfer.0.to_ne_bytes());
        live[8..].copy_from_slice(&header.sequence.wrapping_add(1).to_ne_bytes());
        let mut words = [[0; 8]; ENTRY_BYTES / 8];
        self.read_all(entry, words.as_flattened_mut())?;
        let [_, _, address, count] = words.map(u64::from_ne_bytes);
        if words.as_flattened()[..16] != live {
            return Ok(None);
        }
        let length = u64::from(header.length);
        let mut source = Source {
            live,
            entry,
            part: [address, length],
            rest: Vec::new(),
        };
        if count != 1 {
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            if count > MOST_PARTS {
                return Err(impossible(format!("{count} parts")));
            }
            let mut list = vec![[[0; 8]; 2]; count];
            let read = self.read_all(address, list.as_flattened_mut().as_flattened_mut());
            // What is let go of meanwhile may say anything.
            if !self.is_live(&source)? {
                return Ok(None);
            }
            read?;
            let parts = list.into_iter().rev();
            source.rest = parts.map(|part| part.map(u64::from_ne_bytes)).collect();
            let mut lengths = source.rest.iter().map(|[_, len]| *len);
            let sum = lengths.try_fold(0u64, u64::checked_add);
            if sum != Some(length) {
                return Err(impossible(format!("parts of {sum:?} bytes")));
            }
            source.part = source.rest.pop().unwrap_or_default();
        }
        Ok(Some(source))
    }

    fn is_live(&self, source: &Source) -> io::Result<bool> {
        let mut there = [0; 16];
        self.read_all(source.entry, &mut there)?;
        Ok(there == source.live)
    }

    /// Copies what follows the first `done` bytes of a chunk, some of it.
    ///
    /// # Errors
    /// The peer's memory cannot be read.
    pub(in crate::tcp) fn read(
        &self,
        source: &mut Source,
        into: &RegionSlice,
        done: usize,
    ) -> io::Result<Read> {
        let wanted = (into.len() - done).min(SLICE_BYTES);
        let mut spans = [Span::EMPTY; MOST_PARTS + 1];
        let (mut count, mut left) = (0, wanted as u64);
        for [at, len] in std::iter::once(&source.part).chain(source.rest.iter().rev()) {
            if left == 0 {
                break;
            }
            let len = left.min(*len);
            spans[count] = remote(*at, len);
            (count, left) = (count + 1, left - len);
        }
        // Read behind the payload in the same call: what it says then was so when the last byte was copied.
        spans[count] = remote(source.entry, source.live.len() as u64);
        let mut there = [0; 16];
        let part = Part {
            slice: into,
            from: done,
            len: wanted,
        };
        let read = read_process(self.process, &spans[..=count], part, &mut there);
        if read
            .as_ref()
            .is_ok_and(|read| *read == wanted + there.len())
        {
            if there != source.live {
                return Ok(Read::LetGo);
            }
        } else if !self.is_live(source)? {
            return Ok(Read::LetGo);
        }
        let bytes = read?.min(wanted);
        if bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        source.skip(bytes as u64);
        Ok(Read::Bytes(bytes))
    }
}

impl Source {
    fn skip(&mut self, mut bytes: u64) {
        loop {
            let [at, len] = &mut self.part;
            let step = bytes.min(*len);
            (*at, *len, bytes) = (at.wrapping_add(step), *len - step, bytes - step);
            if *len > 0 {
                return;
            }
            let Some(next) = self.rest.pop() else {
                return;
            };
            self.part = next;
        }
    }
}

fn remote(at: u64, len: u64) -> Span {
    // An address of the other process; lengths are those of chunks.
    Span::new(std::ptr::without_provenance_mut(at as usize), len as usize)
}

fn impossible(what: String) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the peer's table says {what}"),
    )
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use rustix::process::getpid;
    use tcpx_memory::{Access, Gather, Region};
    use tcpx_wire::TransferId;

    use super::super::exposed::{Exposed, Table};
    use super::*;

    const PROOF: [u8; PROOF_BYTES] = [7; PROOF_BYTES];
    const LENGTH: usize = 600_000;

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
        let exposed = table.expose(entry, &header.encode(), payload);
        exposed.expect("few parts")
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
        PeerMemory::proven(getpid(), table.address(), &PROOF).unwrap()
    }

    #[test]
    fn memory_without_the_proof_is_nobodys() {
        let table = Table::new(&PROOF, 2);
        for (at, proof) in [(table.address(), [8; PROOF_BYTES]), (16, PROOF)] {
            assert!(PeerMemory::proven(getpid(), at, &proof).is_err());
        }
    }

    #[test]
    fn what_is_exposed_is_read_whole_in_one_part_and_in_many() {
        let (table, source) = (Table::new(&PROOF, 2), filled());
        let pieces = (0..200).rev().map(|at| at * 3000..(at + 1) * 3000);
        let gathered = gathered(&source, pieces);
        for (window, payload) in [(1, source.all()), (2, gathered)] {
            let header = header(window, 1, LENGTH);
            let _exposed = expose(&table, &header, &payload);
            let into = Region::host(LENGTH).unwrap();
            let mut found = peer(&table).find(&header).unwrap().unwrap();
            let mut done = 0;
            while done < LENGTH {
                match peer(&table).read(&mut found, &into.all(), done).unwrap() {
                    Read::Bytes(bytes) => done += bytes,
                    Read::LetGo => panic!("it is exposed"),
                }
            }
            let (mut sent, mut came) = (vec![0; LENGTH], vec![0; LENGTH]);
            payload.read_to(&mut sent).unwrap();
            into.read_to(0, &mut came).unwrap();
            assert!(sent == came, "window {window}");
        }
    }

    #[test]
    fn what_was_let_go_of_is_not_read_to_its_end_whoever_has_the_entry_now() {
        for exposed_again in [false, true] {
            let (table, source) = (Table::new(&PROOF, 2), filled());
            let first = header(5, 1, LENGTH);
            let exposed = expose(&table, &first, &source.all());
            let into = Region::host(LENGTH).unwrap().all();
            let mut found = peer(&table).find(&first).unwrap().unwrap();
            let read = peer(&table).read(&mut found, &into, 0).unwrap();
            assert_eq!(read, Read::Bytes(SLICE_BYTES));
            drop(exposed);
            let next = header(6, 1, LENGTH);
            let _next = exposed_again.then(|| expose(&table, &next, &source.all()));
            let read = peer(&table).read(&mut found, &into, SLICE_BYTES).unwrap();
            assert_eq!(read, Read::LetGo);
            assert!(peer(&table).find(&first).unwrap().is_none());
        }
    }

    #[test]
    fn a_chunk_in_too_many_parts_is_not_exposed() {
        let (table, source) = (Table::new(&PROOF, 1), filled());
        for (parts, is_exposed) in [(MOST_PARTS, true), (MOST_PARTS + 1, false)] {
            let gathered = gathered(&source, (0..parts).map(|at| at * 2..at * 2 + 1));
            let header = header(1, 0, parts);
            let exposed = table.expose(0, &header.encode(), &gathered);
            assert_eq!(exposed.is_some(), is_exposed, "{parts} parts");
        }
    }

    #[test]
    fn a_table_that_says_what_cannot_be_is_an_error() {
        let (table, source) = (Table::new(&PROOF, 1), filled());
        let header = header(1, 0, LENGTH);
        let _exposed = expose(&table, &header, &source.slice(..10).unwrap());
        // Another length than the header's reads what lies behind; there is a list with none.
        let words = [[1, 1, 0, 2], [1, 1, 0, 1 << 40], [1, 1, 16, 1]];
        for entry in words {
            let memory: Vec<u64> = [u64::from_ne_bytes([7; 8]); 4]
                .into_iter()
                .chain(entry)
                .collect();
            let peer = PeerMemory::proven(getpid(), memory.as_ptr().addr() as u64, &PROOF).unwrap();
            let into = Region::host(LENGTH).unwrap().all();
            let found = peer.find(&header);
            let read = found.and_then(|found| peer.read(&mut found.unwrap(), &into, 0));
            assert!(read.is_err(), "{entry:?}: {read:?}");
        }
    }
}
