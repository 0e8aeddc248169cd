//! What this side wants of the peer: windows of its memory, and transfers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use tcpx::request::Batch;
use tcpx::{After, Error, Region, WindowKey};

use super::{Conn, NOTICE_BYTES, notice_part};
use crate::abi::Status;
use crate::agent::RemoteRegion;
use crate::flight::{Flight, Running};
use crate::info::RegionName;
use crate::lock;
use crate::memory::{Hold, Registered};
use crate::message::{MOST_BYTES, MOST_REGIONS, Message};

/// The peer's windows, one over each region that was asked for, as long as the connection lives:
/// all flights share it.
#[derive(Debug, Default)]
pub(super) struct PeerWindows {
    by_region: HashMap<[u8; RegionName::BYTES], PeerWindow>,
    /// Asked for and not answered.
    asked: usize,
}

/// A window of the peer over one of its regions.
#[derive(Debug)]
enum PeerWindow {
    Asked,
    Open(WindowKey),
    /// The peer has no such region.
    Refused,
}

impl PeerWindows {
    /// Whether who waits for windows must go on waiting.
    pub(super) fn are_coming(&self) -> bool {
        self.asked > 0
    }

    pub(super) fn clear(&mut self) {
        self.by_region.clear();
        self.asked = 0;
    }
}

impl Conn {
    /// A window of the peer over each region, in their order; `None` while some are asked for, or
    /// an error where there is no such region.
    fn windows_of(&self, regions: &[RemoteRegion]) -> Result<Option<Vec<WindowKey>>, Status> {
        let mut windows = lock(&self.windows);
        if self.is_dead() {
            return Err(Status::REMOTE_DISCONNECT);
        }
        let mut keys = Vec::with_capacity(regions.len());
        let (mut missing, mut is_refused) = (Vec::new(), false);
        for region in regions {
            let name = region.info.name;
            match windows.by_region.entry(name.to_bytes()) {
                Entry::Vacant(unknown) => {
                    unknown.insert(PeerWindow::Asked);
                    missing.push(name);
                }
                Entry::Occupied(known) => match known.get() {
                    PeerWindow::Asked => {}
                    PeerWindow::Open(key) => keys.push(*key),
                    // It may be registered again until the next one asks.
                    PeerWindow::Refused => {
                        known.remove();
                        is_refused = true;
                    }
                },
            }
        }
        windows.asked += missing.len();
        drop(windows);
        for regions in missing.chunks(MOST_REGIONS) {
            let regions = regions.to_vec();
            self.send(&Message::AskWindows { regions });
        }
        match is_refused {
            true => Err(Status::NOT_FOUND),
            false => Ok((keys.len() == regions.len()).then_some(keys)),
        }
    }

    /// What waits for them is looked at when this message has been taken.
    pub(super) fn windows_came(
        &self,
        came: Vec<(RegionName, Option<WindowKey>)>,
    ) -> Result<(), &'static str> {
        let mut windows = lock(&self.windows);
        for (region, key) in came {
            match windows.by_region.get_mut(&region.to_bytes()) {
                Some(window @ PeerWindow::Asked) => {
                    *window = key.map_or(PeerWindow::Refused, PeerWindow::Open);
                }
                _ => return Err("a window came that was not asked for"),
            }
            windows.asked -= 1;
        }
        Ok(())
    }

    /// The peer has closed one of these windows, as it does when the memory is deregistered: who
    /// wants them next asks anew, for the memory may have been registered again.
    pub(crate) fn forget_windows(&self, regions: &[RemoteRegion]) {
        let mut windows = lock(&self.windows);
        for region in regions {
            let name = region.info.name.to_bytes();
            if let Entry::Occupied(known) = windows.by_region.entry(name)
                && matches!(known.get(), PeerWindow::Open(_))
            {
                known.remove();
            }
        }
    }

    /// Starts a flight, or ends it; `false` while it must wait for windows, or for others to end.
    pub(super) fn start(self: &Arc<Self>, flight: &Arc<Flight>) -> bool {
        let plan = &flight.plan;
        if flight.is_over() {
            return true;
        }
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
        let keys = match self.windows_of(&plan.remotes) {
            Ok(Some(keys)) => keys,
            Ok(None) => return false,
            Err(status) => {
                flight.end(status);
                return true;
            }
        };
        let batch = match self.batch(flight, &keys) {
            Ok(batch) => batch,
            Err(status) => {
                flight.end(status);
                return true;
            }
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
                    notice: later,
                });
                if is_watched {
                    lock(&self.flights).watched.push(Arc::clone(flight));
                    self.wake_reader();
                }
                true
            }
            Err(Error::Request { .. }) => false,
            Err(error) => {
                flight.end(self.failed(&error));
                true
            }
        }
    }

    /// GPU memory to write from, the same for all transfers until it is deregistered.
    fn source(&self, memory: &Registered, hold: &Arc<Hold>) -> Region {
        let (name, mut sources) = (memory.name.id, lock(&self.sources));
        let region = sources.entry(name).or_insert_with(|| hold.shared_region());
        let region = region.clone();
        drop(sources);
        if memory.is_closed() || self.is_dead() {
            // It was deregistered meanwhile, or the connection has ended.
            self.revoke(name);
        }
        region
    }

    /// Everything that a flight moves. The engine holds its local memory from now on, as long as
    /// something may touch it, and the flight does not: whether its end is asked for is nothing to
    /// the memory.
    fn batch(&self, flight: &Flight, keys: &[WindowKey]) -> Result<Batch<'_>, Status> {
        let plan = &flight.plan;
        let holds = plan.locals.iter().map(|memory| memory.hold());
        let holds: Option<Vec<Hold>> = holds.collect();
        // Some of it was deregistered meanwhile.
        let holds = holds.ok_or(Status::NOT_FOUND)?;
        let regions = plan.locals.iter().zip(holds.into_iter().map(Arc::new));
        let region = |(memory, hold): (&Arc<Registered>, Arc<Hold>)| match plan.is_write {
            true if memory.gpu().is_some() => self.source(memory, &hold),
            _ => hold.region(flight.token()),
        };
        let locals: Vec<_> = regions.map(region).collect();
        let mut batch = self.connection.batch().after(After::Nothing);
        for run in &plan.runs {
            let (start, len) = (run.local_offset as usize, run.len as usize);
            let slice = locals[run.local as usize]
                .slice(start..start + len)
                .map_err(|_| Status::INVALID_PARAM)?;
            let key = &keys[run.remote as usize];
            batch = match plan.is_write {
                true => batch.put(slice, key, run.remote_offset),
                false => batch.get(slice, key, run.remote_offset),
            };
        }
        Ok(batch)
    }
}
