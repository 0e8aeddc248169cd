//! What this side exposes: a table in memory that the peer's process has mapped, too.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use tcpx_lanes::lock;
use tcpx_lanes::shared_words::SharedWords;
use tcpx_wire::Place;
use tcpx_wire::chunk_header::ChunkHeader;
use tcpx_wire::frame::Exposure;

use super::LocalSizes;

/// Bytes in front of the entries, by which the reader knows the process that the table is of.
pub(super) const PROOF_BYTES: usize = 32;
const PROOF: usize = PROOF_BYTES / 8;
/// Words of an entry: name of the window, index of the chunk and 1, number of parts, the first
/// part, and of a window that the peer gets from its secret.
const ENTRY: usize = 8;
/// Words of a part: [whose memory](HOST), address or offset there, length.
const PART: usize = 3;
/// Most parts of an entry.
pub(super) const MOST_PARTS: usize = 1024;
/// Words of one entry with its further parts, which lie behind all entries.
const ALL: usize = ENTRY + PART * MOST_PARTS;

/// Marks parts of the process's own address space. GPU memory counts from 1.
pub(super) const HOST: u64 = 0;

/// Where a part lies.
pub(super) type PartWords = [u64; PART];

/// The table: proof, an entry for each send in flight, others for messages and for windows, and
/// their further parts.
#[derive(Debug)]
pub(super) struct Table {
    words: SharedWords,
    owners: Mutex<Owners>,
    /// Parts that are exposed at a time.
    most_parts: usize,
    /// The last entries, each of which windows of many numbers may have.
    pub(super) windows: u16,
}

/// Entries that no message has, and those that windows have.
#[derive(Debug, Default)]
struct Owners {
    free: Vec<u16>,
    windows: BTreeSet<u16>,
    /// What marks the last message or window: none has the mark of another.
    last: u64,
}

/// What is known of an entry that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tcp) struct Mark {
    entry: u16,
    /// Window and index, as the entry has them while the chunk is exposed; of a window its mark in
    /// place of the index.
    live: [u64; 2],
}

impl Mark {
    pub(super) fn new(entry: u16, header: &ChunkHeader) -> Self {
        let live = [header.transfer.0, header.sequence.wrapping_add(1)];
        Self { entry, live }
    }

    pub(super) fn of_message(at: &Exposure) -> Self {
        let (entry, live) = (at.entry, [at.mark, 1]);
        Self { entry, live }
    }
}

impl Table {
    /// One of so many chunks, of messages that are exposed by their place in a frame, and of
    /// windows.
    pub(super) fn new(
        proof: &[u8; PROOF_BYTES],
        chunks: u16,
        sizes: &LocalSizes,
    ) -> io::Result<Arc<Self>> {
        let others = chunks.saturating_add(sizes.messages);
        let entries = others.saturating_add(sizes.windows);
        let words = SharedWords::new(PROOF + ALL * usize::from(entries))?;
        let (proof, _) = proof.as_chunks::<8>();
        for (word, value) in words.words().iter().zip(proof) {
            word.store(u64::from_ne_bytes(*value), Ordering::Release);
        }
        let owners = Mutex::new(Owners {
            free: (chunks..others).rev().collect(),
            ..Owners::default()
        });
        Ok(Arc::new(Self {
            words,
            owners,
            most_parts: sizes.parts,
            windows: entries - others,
        }))
    }

    /// The table of a peer, which has entries for so many windows.
    pub(super) fn of_peer(words: SharedWords, windows: u16) -> Self {
        Self {
            words,
            owners: Mutex::default(),
            most_parts: 0,
            windows,
        }
    }

    /// Where it begins in the process that made it.
    pub(super) fn address(&self) -> u64 {
        self.words.words().as_ptr().addr() as u64
    }

    fn entries(&self) -> usize {
        self.words.words().len().saturating_sub(PROOF) / ALL
    }

    fn entry(&self, entry: u16) -> Option<&[AtomicU64; ENTRY]> {
        let words = self.words.words();
        let at = usize::from(entry);
        words
            .get(PROOF + ENTRY * at..)?
            .first_chunk()
            .filter(|_| at < self.entries())
    }

    /// Where a window is exposed, if no other one is there.
    fn entry_of(&self, window: u64) -> Option<u16> {
        let first = self.entries().checked_sub(self.windows.into())?;
        let place = window.checked_rem(self.windows.into())?;
        u16::try_from(first as u64 + place).ok()
    }

    /// The words of its parts behind the first.
    fn further(&self, entry: u16) -> Option<&[AtomicU64]> {
        let (words, entries) = (self.words.words(), self.entries());
        let start = PROOF + ENTRY * entries + PART * MOST_PARTS * usize::from(entry);
        words.get(start..start + PART * MOST_PARTS)
    }

    /// Exposes a chunk in the entry of its slot, which is empty. `None` where there are too many
    /// parts.
    pub(super) fn expose(
        self: &Arc<Self>,
        slot: u16,
        header: &[u8; ChunkHeader::BYTES],
        parts: impl Iterator<Item = PartWords>,
    ) -> Option<Exposed> {
        let header = ChunkHeader::decode(header).ok()?;
        self.fill(Mark::new(slot, &header), parts)?;
        let table = Arc::clone(self);
        Some(Exposed {
            table,
            entry: slot,
            what: What::Chunk,
        })
    }

    /// Exposes a message of so many bytes in an entry that is free. `None` where there is none, or
    /// there are too many parts.
    pub(super) fn expose_message(
        self: &Arc<Self>,
        bytes: u32,
        parts: impl Iterator<Item = PartWords>,
    ) -> Option<(Exposure, Exposed)> {
        let mut owners = lock(&self.owners);
        let entry = owners.free.pop()?;
        owners.last += 1;
        let mark = owners.last;
        drop(owners);
        let table = Arc::clone(self);
        let exposed = Exposed {
            table,
            entry,
            what: What::Message,
        };
        let at = Exposure { entry, mark, bytes };
        self.fill(Mark::of_message(&at), parts)?;
        Some((at, exposed))
    }

    /// Exposes a window to a peer that has shown its secret. `None` where another one has its
    /// entry, or there are too many parts.
    pub(super) fn expose_window(
        self: &Arc<Self>,
        window: &Place,
        parts: impl Iterator<Item = PartWords>,
    ) -> Option<Exposed> {
        let entry = self.entry_of(window.window)?;
        let mut owners = lock(&self.owners);
        if !owners.windows.insert(entry) {
            return None;
        }
        owners.last += 1;
        let live = [window.window, owners.last];
        drop(owners);
        let table = Arc::clone(self);
        let exposed = Exposed {
            table,
            entry,
            what: What::Window,
        };
        exposed.set_secret(window.secret.words());
        self.fill(Mark { entry, live }, parts)?;
        Some(exposed)
    }

    /// The window that the peer exposes to who knows its secret.
    pub(super) fn find_window(&self, window: &Place) -> Option<Mark> {
        let entry = self.entry_of(window.window)?;
        let [name, mark, .., one, other] = self.entry(entry)?;
        let [name, mark, one, other] =
            [name, mark, one, other].map(|word| word.load(Ordering::Acquire));
        let is_known = name == window.window && mark != 0 && [one, other] == window.secret.words();
        let live = [name, mark];
        is_known.then_some(Mark { entry, live })
    }

    /// Fills an entry that is empty.
    fn fill(&self, mark: Mark, mut parts: impl Iterator<Item = PartWords>) -> Option<()> {
        let [window, index, count, first @ .., _, _] = self.entry(mark.entry)?;
        let store = |words: &[AtomicU64], part: PartWords| {
            for (word, value) in words.iter().zip(part) {
                word.store(value, Ordering::Release);
            }
        };
        store(first, parts.next()?);
        let mut places = self.further(mark.entry)?.chunks(PART);
        let mut all = 1;
        for part in parts {
            if all == self.most_parts {
                return None;
            }
            store(places.next()?, part);
            all += 1;
        }
        count.store(all as u64, Ordering::Release);
        window.store(mark.live[0], Ordering::Release);
        index.store(mark.live[1], Ordering::Release);
        Some(())
    }

    /// Whether the chunk is exposed: what was read before was its payload.
    pub(super) fn is_live(&self, mark: Mark) -> bool {
        // Behind everything that was read of the payload.
        fence(Ordering::SeqCst);
        self.entry(mark.entry).is_some_and(|[window, index, ..]| {
            [window, index].map(|word| word.load(Ordering::SeqCst)) == mark.live
        })
    }

    /// The first part of an exposed chunk, the others, the last one first, and the bytes of all.
    /// `None` where it is not exposed.
    ///
    /// # Errors
    /// It says what cannot be.
    pub(super) fn parts(&self, mark: Mark) -> io::Result<Option<(PartWords, Vec<PartWords>, u64)>> {
        let Some([_, _, count, first @ .., _, _]) = self.entry(mark.entry) else {
            return Err(impossible("no such entry".to_owned()));
        };
        if !self.is_live(mark) {
            return Ok(None);
        }
        let load = |words: &[AtomicU64]| {
            let mut part = PartWords::default();
            for (value, word) in part.iter_mut().zip(words) {
                *value = word.load(Ordering::Acquire);
            }
            part
        };
        let (first, count) = (load(first), count.load(Ordering::Acquire));
        let further = usize::try_from(count).unwrap_or(usize::MAX).wrapping_sub(1);
        let words = self.further(mark.entry).unwrap_or_default();
        let further: Vec<_> = match further {
            0 => Vec::new(),
            further => words.chunks(PART).take(further).rev().map(load).collect(),
        };
        // What is let go of meanwhile may say anything.
        if !self.is_live(mark) {
            return Ok(None);
        }
        let sum = {
            let mut lengths = further.iter().chain([&first]).map(|[_, _, len]| *len);
            lengths.try_fold(0u64, u64::checked_add)
        };
        match sum.filter(|_| further.len() as u64 + 1 == count) {
            Some(sum) => Ok(Some((first, further, sum))),
            None => Err(impossible(format!("{count} parts of {sum:?} bytes"))),
        }
    }
}

impl AsFd for Table {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.words.as_fd()
    }
}

pub(super) fn impossible(what: String) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the peer's table says {what}"),
    )
}

/// Payload that the peer may read until this is dropped: what it read by then, and nothing that it
/// reads later, counts. Drop it before the payload.
#[derive(Debug)]
pub struct Exposed {
    table: Arc<Table>,
    entry: u16,
    what: What,
}

#[derive(Debug)]
enum What {
    Chunk,
    Message,
    Window,
}

impl Exposed {
    fn set_secret(&self, secret: [u64; 2]) {
        if let Some([.., one, other]) = self.table.entry(self.entry) {
            one.store(secret[0], Ordering::Release);
            other.store(secret[1], Ordering::Release);
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if let Some([_, index, ..]) = self.table.entry(self.entry) {
            index.store(0, Ordering::SeqCst);
            // Before anything that is written to the payload from now on.
            fence(Ordering::SeqCst);
        }
        match self.what {
            What::Chunk => {}
            What::Message => lock(&self.table.owners).free.push(self.entry),
            What::Window => {
                self.set_secret([0; 2]);
                lock(&self.table.owners).windows.remove(&self.entry);
            }
        }
    }
}
