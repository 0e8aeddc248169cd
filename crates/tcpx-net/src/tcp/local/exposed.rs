//! What this side exposes: a table in its own memory, which the peer's process reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use tcpx_memory::RegionSlice;
use tcpx_wire::chunk_header::ChunkHeader;

/// Bytes in front of the entries, by which the reader knows the table.
pub(super) const PROOF_BYTES: usize = 32;
/// Bytes of an entry: name of the window, index of the chunk and 1, address, and number of parts. With one part the
/// address is the payload's; with more it is that of a list of their addresses and lengths.
pub(super) const ENTRY_BYTES: usize = 32;
const WORDS: usize = ENTRY_BYTES / 8;
/// A chunk in more parts is sent in one piece.
pub(super) const MOST_PARTS: usize = 256;

/// The table: proof, then an entry for each send in flight.
#[derive(Debug)]
pub(super) struct Table {
    words: Box<[AtomicU64]>,
}

impl Table {
    pub(super) fn new(proof: &[u8; PROOF_BYTES], entries: u16) -> Arc<Self> {
        let (proof, _) = proof.as_chunks::<8>();
        let proof = proof.iter().map(|word| u64::from_ne_bytes(*word));
        let entries = std::iter::repeat_n(0, WORDS * usize::from(entries));
        Arc::new(Self {
            words: proof.chain(entries).map(AtomicU64::new).collect(),
        })
    }

    /// Where it begins.
    pub(super) fn address(&self) -> u64 {
        self.words.as_ptr().addr() as u64
    }

    fn entry(&self, entry: u16) -> Option<&[AtomicU64; WORDS]> {
        let start = PROOF_BYTES / 8 + WORDS * usize::from(entry);
        self.words.get(start..)?.first_chunk()
    }

    /// Fills the entry of a slot, which is empty. `None` where the chunk has too many parts.
    pub(super) fn expose(
        self: &Arc<Self>,
        slot: u16,
        header: &[u8; ChunkHeader::BYTES],
        payload: &RegionSlice,
    ) -> Option<Exposed> {
        let header = ChunkHeader::decode(header).ok()?;
        let parts = payload.host_parts(0..payload.len()).ok()??;
        let mut parts = parts.map(|(start, len)| [start.addr() as u64, len as u64]);
        let first = parts.next()?;
        let rest: Vec<_> = parts.take(MOST_PARTS).collect();
        let (address, list) = match rest.is_empty() {
            true => (first[0], None),
            false if rest.len() == MOST_PARTS => return None,
            false => {
                let list: Box<[_]> = std::iter::once(first).chain(rest).collect();
                (list.as_ptr().addr() as u64, Some(list))
            }
        };
        let count = list.as_ref().map_or(1, |list| list.len()) as u64;
        let [window, index, at, parts] = self.entry(slot)?;
        for (word, value) in [(at, address), (parts, count), (window, header.transfer.0)] {
            word.store(value, Ordering::Release);
        }
        index.store(header.sequence.wrapping_add(1), Ordering::Release);
        Some(Exposed {
            table: Arc::clone(self),
            slot,
            _list: list,
        })
    }
}

/// A chunk that the peer may read until this is dropped: what it read by then, and nothing that it reads later, counts.
/// Drop it before the payload.
#[derive(Debug)]
pub(in crate::tcp) struct Exposed {
    table: Arc<Table>,
    slot: u16,
    _list: Option<Box<[[u64; 2]]>>,
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if let Some([_, index, ..]) = self.table.entry(self.slot) {
            index.store(0, Ordering::SeqCst);
            // Before anything that is written to the payload from now on.
            fence(Ordering::SeqCst);
        }
    }
}
