//! What the peer wants of this side: windows, notifications, staging memory, and pieces out of and into memory here.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx::{Rights, Window};

use super::{Conn, Event, bytes_of, lock, scatter};
use crate::abi::Status;
use crate::agent::Agent;
use crate::memory::{Hold, Staging};
use crate::message::{MOST_NOTICE_BYTES, Message, Piece};
use crate::mover::{Cursor, Pull};

/// Staging memory that a peer puts gathered pieces into.
const SLOTS: u32 = 8;
const SLOT_BYTES: u32 = 512 * 1024;
/// Windows that a peer may have open at a time.
const MOST_WINDOWS: usize = 4096;
/// Pieces that a peer may wait for.
const MOST_PULLED: usize = 1 << 20;
/// Notifications in parts that may be incomplete.
const MOST_PARTIAL: usize = 16;

/// The peer's way into memory of this agent.
#[derive(Debug, Default)]
pub(super) struct Doorway {
    pub(super) windows: Vec<(u64, Window)>,
    pub(super) staging: Option<(Arc<Staging>, Window)>,
}

#[derive(Debug)]
pub(super) struct Partial {
    pub(super) bytes: Vec<u8>,
    /// Bytes that are there.
    pub(super) filled: usize,
}

impl Conn {
    pub(super) fn notice(
        &self,
        id: u64,
        bytes: u64,
        offset: u64,
        part: &[u8],
    ) -> Result<(), &'static str> {
        let (Ok(bytes), Ok(offset)) = (usize::try_from(bytes), usize::try_from(offset)) else {
            return Err("a notification is too long");
        };
        if bytes > MOST_NOTICE_BYTES {
            return Err("a notification is too long");
        }
        if part.len() == bytes && offset == 0 {
            self.agent.push_notice(&self.peer(), part.to_vec());
            return Ok(());
        }
        let mut partial = lock(&self.partial);
        if partial.len() >= MOST_PARTIAL && !partial.contains_key(&id) {
            return Err("too many notifications are incomplete");
        }
        let whole = partial.entry(id).or_insert_with(|| Partial {
            bytes: vec![0; bytes],
            filled: 0,
        });
        let end = offset.checked_add(part.len());
        let place = end.and_then(|end| whole.bytes.get_mut(offset..end));
        place
            .ok_or("a part does not fit in its notification")?
            .copy_from_slice(part);
        whole.filled += part.len();
        if whole.filled >= whole.bytes.len()
            && let Some(whole) = partial.remove(&id)
        {
            drop(partial);
            self.agent.push_notice(&self.peer(), whole.bytes);
        }
        Ok(())
    }

    pub(super) fn open_window(&self, region: u64) -> Result<(), &'static str> {
        let key = self.agent.region(region).and_then(|memory| {
            let hold = Arc::new(memory.hold()?);
            let exposed = hold.region(Arc::new(()));
            let opened = self.connection.expose(exposed.all(), Rights::GetAndPut);
            match opened {
                Ok(window) => {
                    let key = window.key();
                    lock(&self.doorway).windows.push((region, window));
                    Some(key)
                }
                Err(error) => {
                    tracing::error!("no window for {}: {error}", self.peer_text());
                    None
                }
            }
        });
        if lock(&self.doorway).windows.len() > MOST_WINDOWS {
            return Err("it asks for too many windows");
        }
        if key.is_some() && self.agent.region(region).is_none() {
            // It was deregistered meanwhile.
            self.revoke(region);
        }
        self.send(&Message::Window { region, key });
        Ok(())
    }

    /// The peer may not touch the region any more.
    pub(crate) fn revoke(&self, region: u64) {
        self.close_doors(|id, _| id == region);
    }

    /// Closes the windows that are `gone`, by their regions' names and their own.
    pub(super) fn close_doors(&self, gone: impl Fn(u64, u64) -> bool) {
        let mut doorway = lock(&self.doorway);
        let windows = std::mem::take(&mut doorway.windows);
        let (gone, kept): (Vec<_>, Vec<_>) = windows
            .into_iter()
            .partition(|(region, open)| gone(*region, open.key().window));
        doorway.windows = kept;
        drop(doorway);
        // Closing one may wait for the engine.
        drop(gone);
    }

    pub(super) fn open_staging(&self) -> Result<(), &'static str> {
        let mut doorway = lock(&self.doorway);
        if doorway.staging.is_some() {
            return Err("it asks for staging memory twice");
        }
        let staging =
            Staging::new((SLOTS * SLOT_BYTES) as usize).ok_or("no memory for staging is left")?;
        let opened = self.connection.expose(staging.region().all(), Rights::Put);
        let window = opened.map_err(|_| "the connection is over")?;
        let key = window.key();
        doorway.staging = Some((staging, window));
        drop(doorway);
        self.send(&Message::Staging {
            key,
            slots: SLOTS,
            slot_bytes: SLOT_BYTES,
        });
        Ok(())
    }

    /// Runs `read` with the address of what a slot of the staging memory holds.
    pub(super) fn with_slot<R>(
        &self,
        slot: u32,
        pieces: &[Piece],
        read: impl FnOnce(*const u8) -> R,
    ) -> Result<R, &'static str> {
        let staging = {
            let doorway = lock(&self.doorway);
            let staging = doorway.staging.as_ref();
            staging.map(|(staging, _)| Arc::clone(staging))
        };
        let staging = staging.ok_or("it names a slot without staging memory")?;
        let len = bytes_of(pieces);
        if slot >= SLOTS || len > u64::from(SLOT_BYTES) {
            return Err("it names a slot that there is not");
        }
        let offset = slot as usize * SLOT_BYTES as usize;
        let part = staging.part(offset, len as usize);
        Ok(read(part.ok_or("it names a slot that there is not")?))
    }

    /// Bytes of the peer for memory of this agent.
    pub(super) fn pushed(
        &self,
        transfer: u64,
        pieces: &[Piece],
        slot: u32,
    ) -> Result<(), &'static str> {
        let status = self.with_slot(slot, pieces, |from| self.apply(pieces, from))?;
        self.send(&Message::Applied {
            transfer,
            slot,
            bytes: bytes_of(pieces),
            status: status.0,
        });
        Ok(())
    }

    /// Puts bytes in place, all of them or none. `from` is valid for the sum of the pieces.
    fn apply(&self, pieces: &[Piece], from: *const u8) -> Status {
        let mut holds = HeldRegions::default();
        let mut places = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let Some(hold) = holds.of(&self.agent, piece.what) else {
                return Status::NOT_FOUND;
            };
            let Some(place) = hold.host_piece(piece.offset, piece.len as usize) else {
                tracing::error!(
                    "agent {} wrote outside of registered memory; nothing was written",
                    self.peer_text()
                );
                return Status::INVALID_PARAM;
            };
            places.push(place);
        }
        // SAFETY: the places lie in memory that is held, and the slot has bytes for all pieces.
        unsafe { scatter(from, pieces, &places) };
        Status::SUCCESS
    }

    /// The peer wants bytes of memory of this agent.
    pub(super) fn pull(
        self: &Arc<Self>,
        transfer: u64,
        first: u64,
        pieces: Vec<Piece>,
    ) -> Result<(), &'static str> {
        let mut holds = HeldRegions::default();
        let mut status = Status::SUCCESS;
        for piece in &pieces {
            match holds.of(&self.agent, piece.what) {
                None => status = Status::NOT_FOUND,
                Some(hold) if hold.host_piece(piece.offset, piece.len as usize).is_none() => {
                    status = Status::INVALID_PARAM;
                }
                Some(_) => {}
            }
        }
        if status != Status::SUCCESS {
            tracing::error!(
                "agent {} wanted what is not registered memory; nothing was sent",
                self.peer_text()
            );
            self.send(&Message::PullFailed {
                transfer,
                status: status.0,
            });
            return Ok(());
        }
        let waiting = self.pulled.fetch_add(pieces.len(), Ordering::AcqRel);
        if waiting + pieces.len() > MOST_PULLED {
            return Err("it wants too many pieces at a time");
        }
        self.post(Event::Pull(Pull {
            transfer,
            first,
            pieces,
            holds: holds.0,
            done: Cursor::default(),
        }));
        Ok(())
    }

    /// A pull of so many pieces is over.
    pub(crate) fn pull_ended(&self, pieces: usize) {
        self.pulled.fetch_sub(pieces, Ordering::AcqRel);
    }
}

/// Regions of this agent that a message names, held.
#[derive(Debug, Default)]
pub(crate) struct HeldRegions(pub(crate) HashMap<u64, Arc<Hold>>);

impl HeldRegions {
    fn of(&mut self, agent: &Agent, id: u64) -> Option<&Arc<Hold>> {
        match self.0.entry(id) {
            Entry::Occupied(held) => Some(held.into_mut()),
            Entry::Vacant(place) => {
                let hold = agent.region(id)?.hold()?;
                Some(place.insert(Arc::new(hold)))
            }
        }
    }
}
