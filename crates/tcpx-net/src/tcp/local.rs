//! Peers on the same host: the receiver of a chunk copies it from where it lies in the sender's
//! memory.
//!
//! Nothing but its owner writes memory, so deadlines, cancels and deregistrations are local as on
//! every path. A sender [exposes](exposed) a chunk in an entry of its table, which the peer has
//! mapped, and says on a lane which one; the receiver [reads](peer_memory) entry, payload and entry
//! again, of [GPU memory](gpu_memory) by its copy worker. Only an entry that is still the chunk's
//! after the last byte is success: a sender that lets go of memory empties the entry first. A
//! message that one copy moves is exposed as a whole: the frame that asks for it says where, and
//! whoever takes that frame copies it, or has its copy worker do so, and no lane is woken. A window
//! is exposed by the first get that its owner has checked: later ones are made without the owner.
//!
//! Which process the peer is [the kernel says](proof), and the peer's memory holds what the two
//! ends of the session alone know. The kernel asks for the right to read host memory with each
//! call; where it refuses, that goes over TCP.

mod exposed;
mod gpu_memory;
mod peer_memory;
mod proof;

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tcpx_memory::{MemoryKind, ReadUntilWritten, RegionSlice};
use tcpx_wire::frame::Exposure;

use super::transmit_table::Outgoing;
use crate::network::Setup;
pub use exposed::Exposed;
pub(super) use exposed::Mark;
use exposed::{HOST, MOST_PARTS, PartWords, Table};
use gpu_memory::GpuMemory;
pub use peer_memory::PeerRead;
pub(super) use peer_memory::{MemoryOwner, PeerMemory, Read, Source};
pub(super) use proof::Door;

/// Whether payload may be read where it lies in the memory of a peer on the same host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local {
    /// Never.
    Off,
    /// Where the kernel proves the peer's process, and lets its memory be read; not with
    /// encryption.
    Auto,
    /// With encryption too.
    On,
}

impl Local {
    /// What `TCPX_LOCAL` says; anything else is automatic.
    pub(super) fn of_process() -> Self {
        let said = std::env::var("TCPX_LOCAL").ok();
        said.and_then(|text| text.parse().ok())
            .unwrap_or(Self::Auto)
    }
}

/// A text that is neither `auto` nor `on` nor `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected auto, on or off")]
pub struct ParseLocalError;

impl FromStr for Local {
    type Err = ParseLocalError;

    fn from_str(text: &str) -> Result<Self, ParseLocalError> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(ParseLocalError),
        }
    }
}

/// Longest message in host memory that whoever takes its frame copies: a longer one goes over
/// lanes, whose threads copy beside that one.
const MOST_HOST_BYTES: usize = 1 << 20;

/// How much of it goes at a time; tests draw all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalSizes {
    /// Payload of fewer bytes follows its header: reading it elsewhere takes calls of its own,
    /// which copying it twice does not.
    pub least: usize,
    /// Bytes that one call copies, at least 1: a lane looks at the rest of its work in between.
    /// They take some 20 us.
    pub slice: usize,
    /// Messages that are exposed by their place in a frame at a time; others go over lanes.
    pub messages: u16,
    /// Windows that are exposed at a time, once the peer has got something there.
    pub windows: u16,
    /// Regions of the peer's GPUs that are mapped at a time; others come over TCP.
    pub imports: usize,
    /// Bytes of a chunk or message that is read from a GPU by one copy; half of it, and so on,
    /// where it lies in too many parts. A multiple of what both ends cut at.
    pub chunk: u32,
    /// Parts of a chunk or message that are exposed, 1 to 1,024: what lies in more goes over lanes.
    pub parts: usize,
}

impl Default for LocalSizes {
    fn default() -> Self {
        Self {
            least: 16 << 10,
            slice: 256 << 10,
            messages: 64,
            windows: 1024,
            imports: 1 << 14,
            chunk: 256 << 20,
            parts: MOST_PARTS,
        }
    }
}

/// What one side of a channel knows of a peer on its host.
#[derive(Debug, Default)]
pub(super) struct LocalPath {
    /// Where chunks are exposed.
    table: Option<Arc<Table>>,
    sizes: LocalSizes,
    /// Whose memory this side reads.
    pub(super) peer: Option<PeerMemory>,
    /// Both ends have GPUs.
    gpus: Option<Arc<GpuMemory>>,
    /// The peer reads this process's memory, and this one the peer's.
    exposes_host: bool,
    reads_host: bool,
    /// Why it does not.
    why_not: Option<String>,
    /// An exposed chunk was not read: what follows goes over lanes.
    has_failed: AtomicBool,
    /// The owner was not told that.
    has_news: AtomicBool,
}

fn is_on_gpu(memory: &RegionSlice) -> bool {
    matches!(memory.kind(), MemoryKind::Cuda { .. })
}

/// The parts of host memory as a table names them.
fn host_parts(payload: &RegionSlice) -> impl Iterator<Item = PartWords> {
    let parts = payload.host_parts(0..payload.len()).ok().flatten();
    let parts = parts.into_iter().flatten();
    parts.map(|(start, len)| [HOST, start.addr() as u64, len as u64])
}

impl LocalPath {
    /// None, although the peer is on this host, or seems so.
    pub(super) fn none(why: Option<String>) -> Self {
        let mut path = Self::default();
        path.why_not = why;
        path
    }

    fn refused(&mut self, setup: &Setup<'_>, error: &std::io::Error) {
        tracing::info!(peer = %setup.peer, %error, "memory of the peer, which is on this host, cannot be read where it lies");
        self.why_not = Some(error.to_string());
    }

    /// Exposes a chunk, if the peer may read it; its lane says so in the header.
    pub(super) fn expose(&self, chunk: &Outgoing) -> Option<Exposed> {
        let table = self.table.as_ref()?;
        let (slot, header, payload) = (chunk.slot, &chunk.header, &chunk.payload);
        if is_on_gpu(payload) {
            let parts = self.gpus.as_ref()?.parts(payload)?;
            return table.expose(slot, header, parts.into_iter());
        }
        // Nobody was told of it before.
        let goes = self.exposes_host
            && payload.kind() == MemoryKind::Host
            && chunk.permit.is_none()
            && chunk.attempt == 0
            && payload.len() >= self.sizes.least
            && !self.has_failed.load(Ordering::Relaxed);
        goes.then(|| table.expose(slot, header, host_parts(payload)))?
    }

    /// Exposes a message, if the peer may read it; a frame says where. GPU memory that the peer
    /// does not know is not offered to it for that: chunks do.
    pub(super) fn expose_message(&self, source: &RegionSlice) -> Option<(Exposure, Exposed)> {
        let table = self.table.as_ref()?;
        let bytes = u32::try_from(source.len()).ok()?;
        if is_on_gpu(source) {
            let gpus = self.gpus.as_ref().filter(|_| bytes <= self.sizes.chunk)?;
            return table.expose_message(bytes, gpus.parts(source)?.into_iter());
        }
        let goes = self.exposes_host
            && source.kind() == MemoryKind::Host
            && (self.sizes.least..=MOST_HOST_BYTES).contains(&source.len())
            && !self.has_failed.load(Ordering::Relaxed);
        goes.then(|| table.expose_message(bytes, host_parts(source)))?
    }

    /// Where a message lies that goes to memory of this kind; `None` where the peer exposes it no
    /// more.
    ///
    /// # Errors
    /// It is not read here, or the peer's table says what cannot be.
    pub(super) fn find_message(
        &self,
        at: &Exposure,
        to: MemoryKind,
    ) -> std::io::Result<Option<PeerRead>> {
        let found = match &self.peer {
            Some(peer) => peer.find_message(at, self.gpus.as_deref(), to)?,
            None => return Err(exposed::impossible("what is not read here".to_owned())),
        };
        let is_long = at.bytes as usize > MOST_HOST_BYTES;
        match found {
            Some(found) if found.gpu_memory().is_none() && (is_long || !self.reads_host) => Err(
                exposed::impossible("host memory, which is not read here".to_owned()),
            ),
            found => Ok(found),
        }
    }

    /// Exposes a window to the peer, which has shown its secret and may get there, until the result
    /// is dropped.
    pub(super) fn expose_window(
        &self,
        window: &tcpx_wire::Place,
        memory: &RegionSlice,
    ) -> Option<ReadUntilWritten> {
        let table = self.table.as_ref()?;
        if is_on_gpu(memory) {
            let parts = self.gpus.as_ref()?.parts(memory)?;
            return memory.until_written(|| table.expose_window(window, parts.into_iter()));
        }
        let goes = self.exposes_host
            && memory.kind() == MemoryKind::Host
            && !self.has_failed.load(Ordering::Relaxed);
        goes.then(|| memory.until_written(|| table.expose_window(window, host_parts(memory))))?
    }

    /// Where pieces of the peer's windows lie, if it exposes them and they are read to here without
    /// it.
    pub(super) fn find_in_windows(
        &self,
        pieces: &mut dyn Iterator<Item = (tcpx_wire::Place, u64)>,
        into: &RegionSlice,
    ) -> Option<PeerRead> {
        let (peer, kind) = (self.peer.as_ref()?, into.kind());
        let (gpus, most) = match kind {
            MemoryKind::Host if self.reads_host => (None, MOST_HOST_BYTES),
            MemoryKind::Cuda { .. } => (self.gpus.as_deref(), self.sizes.chunk as usize),
            _ => return None,
        };
        if into.len() > most {
            return None;
        }
        // What the table says that cannot be, its owner says as it is.
        let found = peer.find_in_windows(pieces, gpus, kind).ok()??;
        let is_here = found.gpu_memory().is_some() == is_on_gpu(into);
        is_here.then_some(found)
    }

    /// Copies some more of it, as [`PeerMemory::read_on`] does.
    ///
    /// # Errors
    /// The peer's memory cannot be read.
    pub(super) fn read_on(
        &self,
        read: &mut PeerRead,
        into: &RegionSlice,
    ) -> std::io::Result<Option<bool>> {
        match &self.peer {
            Some(peer) => peer.read_on(read, into),
            None => Err(exposed::impossible("what is not read here".to_owned())),
        }
    }

    /// Whether both ends read each other's GPU memory.
    pub(super) fn has_gpus(&self) -> bool {
        self.gpus.is_some()
    }

    /// Whether the peer reads this memory of a GPU where it lies, so that it needs no slots.
    pub(super) fn reads_gpu(&self, source: &RegionSlice) -> bool {
        let gpus = self.gpus.as_ref().filter(|_| is_on_gpu(source));
        gpus.is_some_and(|gpus| gpus.is_readable(source))
    }

    /// How long the chunks of a transfer from this memory may be, if the peer reads it with one
    /// copy each.
    pub(super) fn chunk_bytes(&self, source: &RegionSlice) -> Option<u32> {
        let gpus = self.gpus.as_ref().filter(|_| is_on_gpu(source))?;
        gpus.chunk_bytes(source, self.sizes.chunk)
    }

    /// Where an exposed chunk lies that goes to memory of this kind.
    ///
    /// # Errors
    /// The peer's table says what cannot be.
    pub(super) fn find(
        &self,
        header: &tcpx_wire::chunk_header::ChunkHeader,
        to: MemoryKind,
    ) -> std::io::Result<Option<Source>> {
        let Some(peer) = &self.peer else {
            return Ok(None);
        };
        peer.find(header, self.gpus.as_deref(), to)
    }

    /// A lane ended with an exposed chunk of host memory: the peer may have failed to read it.
    pub(super) fn failed(&self) {
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            self.has_news.store(true, Ordering::Relaxed);
        }
    }

    /// Why chunks are exposed no more, said once.
    pub(super) fn news(&self) -> Option<&'static str> {
        let is_new = self.has_news.load(Ordering::Relaxed);
        (is_new && self.has_news.swap(false, Ordering::Relaxed)).then_some(
            "a lane ended with payload that the peer was to read where it lies; TCPX_LOCAL=off has it sent from the start",
        )
    }

    /// What a person is told of it; nothing for a peer of another host.
    pub(super) fn describe(&self) -> String {
        let exposes = self.exposes_host && !self.has_failed.load(Ordering::Relaxed);
        let mut all = String::new();
        all.push_str(match (exposes, self.reads_host) {
            (true, true) => ", local: host memory is read where it lies",
            (true, false) => ", local: host memory is read where it lies by the peer",
            (false, true) => ", local: host memory of the peer is read where it lies",
            (false, false) => "",
        });
        if self.gpus.is_some() {
            all.push_str(", local: GPU memory is read where it lies");
        }
        if let Some(why_not) = &self.why_not {
            let what = if self.table.is_some() {
                "host memory "
            } else {
                ""
            };
            all.push_str(&format!(", {what}not local: {why_not}"));
        }
        all
    }
}

impl Drop for LocalPath {
    fn drop(&mut self) {
        if let Some(gpus) = &self.gpus {
            gpus.close();
        }
    }
}
