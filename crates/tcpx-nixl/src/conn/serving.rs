//! What the peer wants of this side: windows and notifications.

use std::sync::Arc;

use tcpx::{Rights, Window};

use super::Conn;
use crate::lock;
use crate::message::{MOST_NOTICE_BYTES, Message};

/// Windows that a peer may have open at a time.
const MOST_WINDOWS: usize = 4096;
/// Notifications in parts that may be incomplete.
const MOST_PARTIAL: usize = 16;

/// The peer's way into memory of this agent.
#[derive(Debug, Default)]
pub(super) struct Doorway {
    pub(super) windows: Vec<(u64, Window)>,
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
}
