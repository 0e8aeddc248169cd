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
