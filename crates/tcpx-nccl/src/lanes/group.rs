//! The receiving side's books: peer processes with their lanes, and the comms that lanes fill.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use super::chunk::GroupId;
use super::inlet::Inlet;

/// The lanes of one sending process.
#[derive(Debug, Default)]
pub(crate) struct Group {
    /// How many there are, as each of them says.
    lanes: OnceLock<u32>,
    /// Those that ended. The others may not have been looked at yet.
    left: AtomicU32,
    lost: OnceLock<String>,
}

impl Group {
    /// A lane came, of so many; `false` when another one said otherwise.
    pub(crate) fn entered(&self, lanes: u32) -> bool {
        *self.lanes.get_or_init(|| lanes) == lanes
    }

    /// A lane ended between chunks; the others may still hold what is missing.
    pub(crate) fn left(&self) {
        self.left.fetch_add(1, Ordering::SeqCst);
    }

    /// Chunks are lost.
    pub(crate) fn lose(&self, why: String) {
        // The first reason is the news.
        let _ = self.lost.set(why);
    }

    /// Why chunks are lost, if they are.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Why nothing more will arrive, if so.
    pub(crate) fn ended(&self) -> Option<&str> {
        let left = self.left.load(Ordering::SeqCst);
        let empty = self.lanes.get().is_some_and(|lanes| left >= *lanes);
        self.lost()
            .or_else(|| empty.then_some("the peer closed all its lanes"))
    }
}

#[derive(Debug, Default)]
struct Books {
    groups: HashMap<GroupId, Weak<Group>>,
    inlets: HashMap<u64, Arc<Inlet>>,
}

/// What lanes look things up in, once for a comm and then from their own memory.
#[derive(Debug, Default)]
pub(crate) struct Registry(Mutex<Books>);

impl Registry {
    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The group of a peer process, known or new.
    pub(crate) fn group(&self, id: GroupId) -> Arc<Group> {
        let mut books = self.books();
        if let Some(group) = books.groups.get(&id).and_then(Weak::upgrade) {
            return group;
        }
        books.groups.retain(|_, group| group.strong_count() > 0);
        let group = Arc::new(Group::default());
        books.groups.insert(id, Arc::downgrade(&group));
        group
    }

    /// Makes a comm known to lanes.
    pub(crate) fn open(&self, inlet: &Arc<Inlet>) {
        self.books().inlets.insert(inlet.id, Arc::clone(inlet));
    }

    /// Takes a comm away from lanes: after this none writes into its memory, or the answer is `false`.
    pub(crate) fn close(&self, inlet: &Inlet) -> bool {
        self.books().inlets.remove(&inlet.id);
        inlet.close()
    }

    /// The comm with a number.
    pub(crate) fn inlet(&self, id: u64) -> Option<Arc<Inlet>> {
        self.books().inlets.get(&id).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_ends_with_its_last_lane_and_not_before() {
        let group = Group::default();
        assert_eq!(group.ended(), None);
        assert!(group.entered(2) && !group.entered(3));
        group.left();
        // The other one may be in its loop's inbox, with chunks that nobody has read.
        assert_eq!(group.ended(), None);
        assert!(group.entered(2));
        group.left();
        assert!(
            group
                .ended()
                .is_some_and(|why| why.contains("all its lanes"))
        );
        assert_eq!(group.lost(), None);
    }

    #[test]
    fn a_group_is_one_while_somebody_uses_it() {
        let registry = Registry::default();
        let first = registry.group([1; 16]);
        assert!(Arc::ptr_eq(&first, &registry.group([1; 16])));
        assert!(!Arc::ptr_eq(&first, &registry.group([2; 16])));
        first.lose("gone".to_owned());
        drop(first);
        assert_eq!(registry.group([1; 16]).lost(), None);
    }

    #[test]
    fn a_closed_comm_is_unknown_to_lanes() {
        let registry = Registry::default();
        let inlet = Arc::new(Inlet::new(3));
        registry.open(&inlet);
        assert!(registry.inlet(3).is_some());
        assert!(registry.close(&inlet));
        assert!(registry.inlet(3).is_none() && inlet.is_closed());
    }
}
