//! What this side wants of the peer: windows of its memory, and transfers.

use std::sync::Arc;

use tcpx::request::Batch;
use tcpx::{After, Error, WindowKey};

use super::{Conn, NOTICE_BYTES, notice_part};
use crate::abi::Status;
use crate::flight::{Flight, Running};
use crate::lock;
use crate::memory::Hold;
use crate::message::{MOST_BYTES, Message};

/// Windows of the peer over one of its regions. Each is one flight's at a time: the engine refuses a put into bytes of a window
/// that another one is writing, and NIXL's callers write the same bytes from several threads.
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
        if !lock(&self.flights).waiting.is_empty() {
            self.wake_reader();
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
        // What waits for it is looked at when this message has been taken.
        Ok(())
    }

    /// Starts a flight, or ends it; `false` while it must wait for windows, or for others to end.
    pub(super) fn start(self: &Arc<Self>, flight: &Arc<Flight>) -> bool {
        let plan = &flight.plan;
        if self.is_dead() {
            flight.end(Status::REMOTE_DISCONNECT);
            return true;
        }
        if plan.bytes == 0 {
            if let Some(notice) = &flight.notice {
                self.send_notice(notice);
            }
            flight.end(Status::SUCCESS);
            return true;
        }
        let regions: Vec<u64> = plan.remotes.iter().map(|region| region.info.id).collect();
        let keys = match self.take_keys(&regions) {
            Ok(Some(keys)) => keys,
            Ok(None) => return false,
            Err(status) => {
                flight.end(status);
                return true;
            }
        };
        let Some(batch) = self.batch(flight, &keys) else {
            self.give_back(keys);
            return true;
        };
        let is_long = |notice: &&Vec<u8>| notice.len() > MOST_BYTES - NOTICE_BYTES;
        let (batch, later) = match &flight.notice {
            None => (batch, None),
            Some(notice) if is_long(&notice) => (batch, Some(notice.clone())),
            Some(notice) => {
                let message = notice_part(self.agent.next_id(), notice.len(), 0, notice);
                (batch.notify(&message.to_bytes()), None)
            }
        };
        match batch.start() {
            Ok(transfer) => {
                let is_watched = later.is_some();
                flight.set_running(Running {
                    transfer,
                    conn: Arc::clone(self),
                    keys,
                    notice: later,
                });
                if is_watched {
                    lock(&self.flights).watched.push(Arc::clone(flight));
                    self.wake_reader();
                }
                true
            }
            Err(Error::Request { .. }) => {
                self.give_back(keys);
                false
            }
            Err(error) => {
                self.give_back(keys);
                flight.end(self.failed(&error));
                true
            }
        }
    }

    /// Everything that a flight moves; `None` if it is over, or ends here.
    fn batch(&self, flight: &Flight, keys: &[(u64, WindowKey)]) -> Option<Batch<'_>> {
        let (plan, holds) = (&flight.plan, flight.holds()?);
        let region = |hold: &Arc<Hold>| hold.region(flight.token());
        let locals: Vec<_> = holds.iter().map(region).collect();
        let mut batch = self.connection.batch().after(After::Nothing);
        for run in &plan.runs {
            let (start, len) = (run.local_offset as usize, run.len as usize);
            let Ok(slice) = locals[run.local as usize].slice(start..start + len) else {
                flight.end(Status::INVALID_PARAM);
                return None;
            };
            let key = &keys[run.remote as usize].1;
            batch = match plan.is_write {
                true => batch.put(slice, key, run.remote_offset),
                false => batch.get(slice, key, run.remote_offset),
            };
        }
        Some(batch)
    }
}
