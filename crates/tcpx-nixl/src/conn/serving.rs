//! What the peer wants of this side: windows and notifications.

use std::collections::HashMap;
use std::sync::Arc;

use tcpx::{Rights, Window, WindowKey};

use super::Conn;
use crate::info::RegionName;
use crate::lock;
use crate::message::{MOST_NOTICE_BYTES, Message};

/// Notifications in parts that may be incomplete.
const MOST_PARTIAL: usize = 16;

/// The peer's windows of this agent's memory, by the number of the region: one over each, however
/// often it asks.
pub(super) type Doorway = HashMap<u64, Window>;

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

    /// Answers with a window over each region that the peer has the metadata of.
    pub(super) fn open_windows(&self, regions: Vec<RegionName>) {
        let open = |region: RegionName| (region, self.open_window(&region));
        let windows = regions.into_iter().map(open).collect();
        self.send(&Message::Windows { windows });
    }

    fn open_window(&self, region: &RegionName) -> Option<WindowKey> {
        let memory = self.agent.region(region)?;
        if let Some(window) = lock(&self.doorway).get(&region.id) {
            return Some(window.key());
        }
        let exposed = Arc::new(memory.hold()?).shared_region();
        match self.connection.expose(exposed.all(), Rights::GetAndPut) {
            Ok(window) => {
                let key = window.key();
                lock(&self.doorway).insert(region.id, window);
                if memory.is_closed() {
                    // It was deregistered meanwhile.
                    self.revoke(region.id);
                }
                Some(key)
            }
            Err(error) => {
                tracing::error!("no window for {}: {error}", self.peer_text());
                None
            }
        }
    }

    /// The peer may not touch the region any more, and nothing is written from it.
    pub(crate) fn revoke(&self, region: u64) {
        let source = lock(&self.sources).remove(&region);
        let gone = lock(&self.doorway).remove(&region);
        // Closing it may wait for the engine.
        drop((gone, source));
    }
}
