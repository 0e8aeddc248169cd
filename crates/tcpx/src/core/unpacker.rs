//! How unpacking is done on a connection.

use std::sync::Arc;

use tcpx_memory::{CopyWorker, UnpackMethod};
use tcpx_wire::descriptor::Descriptors;

/// Lists kept for the next chunks, and descriptors that one of them keeps room for.
const LISTS_KEPT: usize = 32;
const ROOM_KEPT: usize = 4096;

/// How unpacking is done on this connection.
#[derive(Debug)]
pub(crate) struct Unpacker {
    pub(crate) worker: Arc<CopyWorker>,
    pub(crate) method: Option<UnpackMethod>,
    /// Lists of chunks that have ended, so that a chunk needs no new memory.
    pub(super) lists: Vec<Arc<Descriptors>>,
}

impl Unpacker {
    pub(crate) fn new(worker: Arc<CopyWorker>, method: Option<UnpackMethod>) -> Self {
        Self {
            worker,
            method,
            lists: Vec::new(),
        }
    }

    /// A list that nobody else has.
    pub(super) fn take_list(&mut self) -> Arc<Descriptors> {
        self.lists.pop().unwrap_or_default()
    }

    /// Keeps a list for the next chunk, unless somebody else still has it; without room that few chunks need.
    pub(super) fn give_list_back(&mut self, mut list: Arc<Descriptors>) {
        if self.lists.len() < LISTS_KEPT
            && let Some(ours) = Arc::get_mut(&mut list)
        {
            ours.clear();
            ours.shrink_to(ROOM_KEPT);
            self.lists.push(list);
        }
    }
}
