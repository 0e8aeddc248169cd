//! What this side wants of the peer: windows of its memory, transfers, and the answers to them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx::{After, WindowKey};

use super::{Conn, NOTICE_BYTES, bytes_of, lock, notice_part, scatter};
use crate::abi::Status;
use crate::conn::Event;
use crate::flight::{Advance, Direct, Flight};
use crate::message::{MOST_BYTES, Message, Piece};
use crate::plan::FEW_RUNS;

/// Windows of the peer over one of its regions.
#[derive(Debug, Default)]
pub(super) struct Keys {
    pub(super) free: Vec<WindowKey>,
    /// Asked for and not answered.
    pub(super) asked: usize,
    /// There is no such region any more.
    pub(super) refused: bool,
}

impl Conn {
    /// A window of the peer over each region, for one flight alone; `None` while some are asked for, or an
    /// error where there is no such region.
    pub(crate) fn take_keys(
        &self,
        regions: &[u64],
    ) -> Result<Option<Vec<(u64, WindowKey)>>, Status> {
        let mut keys = lock(&self.keys);
        if self.is_dead() {
            return Err(Status::REMOTE_DISCONNECT);
        }
        let mut missing = Vec::new();
        for region in regions {
            let known = keys.entry(*region).or_default();
            if known.refused {
                return Err(Status::NOT_FOUND);
            }
            if known.free.is_empty() {
                if known.asked == 0 {
                    known.asked += 1;
                    missing.push(*region);
                } else {
                    missing.push(u64::MAX);
                }
            }
        }
        if missing.is_empty() {
            let take = |region: &u64| {
                let key = keys.get_mut(region)?.free.pop()?;
                Some((*region, key))
            };
            return Ok(regions.iter().map(take).collect());
        }
        drop(keys);
        for region in missing.into_iter().filter(|region| *region != u64::MAX) {
            self.send(&Message::AskWindow { region });
        }
        Ok(None)
    }

    /// Windows that nothing uses any more.
    pub(crate) fn give_back(&self, free: Vec<(u64, WindowKey)>) {
        if free.is_empty() {
            return;
        }
        let mut keys = lock(&self.keys);
        for (region, key) in free {
            if let Some(known) = keys.get_mut(&region) {
                known.free.push(key);
            }
        }
        drop(keys);
        if self.moving.load(Ordering::Acquire) > 0 {
            self.post(Event::Look);
        }
    }

    /// Windows that something may still use at the peer: nothing of this side does any more.
    pub(crate) fn close_windows(&self, keys: Vec<(u64, WindowKey)>) {
        for (_, key) in keys {
            if !self.is_dead() {
                self.send(&Message::CloseWindow { window: key.window });
            }
        }
    }

    pub(super) fn window_came(
        &self,
        region: u64,
        key: Option<WindowKey>,
    ) -> Result<(), &'static str> {
        let mut keys = lock(&self.keys);
        let known = keys.get_mut(&region).filter(|known| known.asked > 0);
        let known = known.ok_or("a window came that was not asked for")?;
        known.asked -= 1;
        match key {
            Some(key) => known.free.push(key),
            None => known.refused = true,
        }
        drop(keys);
        self.post(Event::Look);
        Ok(())
    }

    /// A flight whose bytes are counted here.
    pub(crate) fn add_flight(self: &Arc<Self>, flight: &Arc<Flight>) {
        flight.set_conn(self);
        lock(&self.flights).insert(flight.id, Arc::clone(flight));
        if self.is_dead() {
            self.remove_flight(flight.id);
            flight.end(Status::REMOTE_DISCONNECT);
        }
    }

    pub(crate) fn remove_flight(&self, id: u64) {
        lock(&self.flights).remove(&id);
    }

    pub(super) fn flight(&self, id: u64) -> Option<Arc<Flight>> {
        lock(&self.flights).get(&id).cloned()
    }

    /// So many bytes of a flight are in place. `false` if that cannot be.
    pub(crate) fn advance(&self, flight: &Arc<Flight>, bytes: u64) -> bool {
        match flight.advance(bytes) {
            Advance::Going => true,
            Advance::TooMany => false,
            Advance::Complete => {
                if let Some(notice) = &flight.notice {
                    self.send_notice(notice);
                }
                self.remove_flight(flight.id);
                flight.end(Status::SUCCESS);
                true
            }
        }
    }

    /// Starts a flight on its poster's thread, if that needs nothing but a call or two; else the mover does it.
    pub(crate) fn start_at_once(self: &Arc<Self>, flight: &Arc<Flight>) -> bool {
        if self.moving.load(Ordering::Acquire) > 0 || self.is_dead() {
            return false;
        }
        let plan = &flight.plan;
        if plan.bytes == 0 {
            self.advance(flight, 0);
            return true;
        }
        if !plan.gathered.is_empty() || plan.alone.len() > FEW_RUNS {
            return false;
        }
        let notice = flight.notice.as_deref().unwrap_or_default();
        if notice.len() > MOST_BYTES - NOTICE_BYTES {
            return false;
        }
        let regions: Vec<u64> = plan.remotes.iter().map(|region| region.id).collect();
        let Ok(Some(keys)) = self.take_keys(&regions) else {
            return false;
        };
        let Some(holds) = flight.holds() else {
            return true;
        };
        let locals: Vec<_> = holds
            .iter()
            .map(|hold| hold.region(flight.token()))
            .collect();
        let mut batch = self.connection.batch().after(After::Nothing);
        for run in &plan.alone {
            let (start, len) = (run.local_offset as usize, run.len as usize);
            let Ok(slice) = locals[run.local as usize].slice(start..start + len) else {
                return false;
            };
            let key = &keys[run.remote as usize].1;
            batch = match plan.is_write {
                true => batch.put(slice, key, run.remote_offset),
                false => batch.get(slice, key, run.remote_offset),
            };
        }
        if flight.notice.is_some() {
            let message = notice_part(self.agent.next_id(), notice.len(), 0, notice);
            batch = batch.notify(&message.to_bytes());
        }
        match batch.start() {
            Ok(transfer) => {
                flight.set_direct(Direct {
                    transfer: Arc::new(transfer),
                    conn: Arc::clone(self),
                    keys,
                });
                true
            }
            Err(error) => {
                tracing::debug!("left to the mover: {error}");
                self.give_back(keys);
                false
            }
        }
    }

    /// Bytes that this side asked for.
    pub(super) fn answered(
        &self,
        transfer: u64,
        pieces: &[Piece],
        slot: u32,
    ) -> Result<(), &'static str> {
        let flight = self.flight(transfer);
        let placed = self.with_slot(slot, pieces, |from| {
            let Some(flight) = &flight else {
                // It was released meanwhile.
                return Ok(());
            };
            let placed = flight.with_memory(|holds| {
                let mut places = Vec::with_capacity(pieces.len());
                for piece in pieces {
                    let run = usize::try_from(piece.what)
                        .ok()
                        .and_then(|what| flight.plan.gathered.get(what))
                        .ok_or("an answer names a piece that there is not")?;
                    let len = u64::from(piece.len);
                    let fits = piece
                        .offset
                        .checked_add(len)
                        .is_some_and(|end| end <= run.len);
                    let place = holds[run.local as usize]
                        .host_piece(run.local_offset.wrapping_add(piece.offset), len as usize);
                    match place {
                        Some(place) if fits => places.push(place),
                        _ => return Err("an answer does not fit in its piece"),
                    }
                }
                // SAFETY: the places lie in memory that is held, and the slot has bytes for all pieces.
                unsafe { scatter(from, pieces, &places) };
                Ok(())
            });
            placed.unwrap_or(Ok(()))
        })?;
        placed?;
        self.send(&Message::SlotFree { slot });
        if let Some(flight) = flight {
            if !self.advance(&flight, bytes_of(pieces)) {
                return Err("it answered more than was asked");
            }
            if flight.is_over() {
                self.remove_flight(transfer);
            } else if self.moving.load(Ordering::Acquire) > 0 {
                self.post(Event::Look);
            }
        }
        Ok(())
    }

    pub(super) fn applied(
        &self,
        transfer: u64,
        slot: u32,
        bytes: u64,
        status: i32,
    ) -> Result<(), &'static str> {
        self.post(Event::SlotFree(slot));
        let Some(flight) = self.flight(transfer) else {
            return Ok(());
        };
        if status != 0 {
            self.remove_flight(transfer);
            flight.end(refusal(status));
            return Ok(());
        }
        if flight.is_over() {
            self.remove_flight(transfer);
            return Ok(());
        }
        match self.advance(&flight, bytes) {
            true => Ok(()),
            false => Err("it answered more than was asked"),
        }
    }
}

/// A status that a peer named: it is never a success.
pub(super) fn refusal(status: i32) -> Status {
    match Status(status) {
        Status::NOT_FOUND => Status::NOT_FOUND,
        Status::INVALID_PARAM => Status::INVALID_PARAM,
        _ => Status::BACKEND,
    }
}
