//! The receiving side's registry: peer processes with their lanes, and the comms that lanes fill.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use tcpx_lanes::event_loop::Remote;
use tcpx_lanes::lock;
use tcpx_lanes::receive_lane::Violation;
use tcpx_wire::handshake::SessionId;

use super::hello::{GroupId, Hello};
use super::recv_stream::RecvStream;
use crate::resume::LinkInbox;

/// The lanes of one sending process.
#[derive(Debug, Default)]
pub(crate) struct Group {
    lanes: Mutex<Lanes>,
    /// Lanes that brought what their peer did not seal, and that no comm has counted.
    forged: AtomicU64,
}

#[derive(Debug, Default)]
struct Lanes {
    /// By number: one more than the epoch of the lane that came last; 0: none came.
    epochs: Vec<u64>,
    live: Vec<Live>,
    /// Lanes that wait until another one has let go of a chunk.
    parked: Vec<Remote>,
}

/// A lane that came and did not end.
#[derive(Debug)]
struct Live {
    /// Its number in this process.
    id: u64,
    number: u16,
    place: Remote,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Lanes> {
        lock(&self.lanes)
    }

    /// A lane came, which `place` reaches and `id` names; the lane of its number that it replaces
    /// ends.
    pub(crate) fn entered(&self, hello: &Hello, id: u64, place: &Remote) -> Result<(), Violation> {
        let mut lanes = self.lock();
        let wrong = |expected: String, arrived: String| Violation {
            expected,
            arrived,
            chunk: None,
        };
        let count = usize::from(hello.lanes);
        if lanes.epochs.is_empty() {
            lanes.epochs.resize(count, 0);
        }
        let known = lanes.epochs.len();
        let Some(epoch) = lanes.epochs.get_mut(usize::from(hello.lane)) else {
            return Err(wrong(format!("one of {known} lanes"), format!("{hello:?}")));
        };
        let (before, now) = (*epoch, u64::from(hello.epoch) + 1);
        if known != count || now <= before {
            return Err(wrong(
                format!("one of {known} lanes, of epoch {before} at least"),
                format!("{hello:?}"),
            ));
        }
        *epoch = now;
        for old in lanes.live.iter().filter(|old| old.number == hello.lane) {
            old.place.remove();
        }
        lanes.live.push(Live {
            id,
            number: hello.lane,
            place: place.clone(),
        });
        Ok(())
    }

    /// A lane brought what its peer did not seal.
    pub(crate) fn forged(&self) {
        self.forged.fetch_add(1, Ordering::Relaxed);
    }

    /// How many did, once.
    pub(crate) fn take_forged(&self) -> u64 {
        self.forged.swap(0, Ordering::Relaxed)
    }

    /// A lane has ended, and holds no chunk any more.
    pub(crate) fn left(&self, id: u64) {
        let mut lanes = self.lock();
        lanes.live.retain(|one| one.id != id);
        let parked = std::mem::take(&mut lanes.parked);
        drop(lanes);
        parked.iter().for_each(Remote::resume);
    }

    /// Ends a lane, for another one has a later attempt of its chunk.
    pub(crate) fn end(&self, id: u64) {
        let lanes = self.lock();
        if let Some(lane) = lanes.live.iter().find(|one| one.id == id) {
            lane.place.remove();
        }
    }

    /// Resumes a lane when the next one has ended. Look at what it waits for once more afterwards.
    pub(crate) fn park(&self, place: &Remote) {
        self.lock().parked.push(place.clone());
    }

    /// Whether all lanes came and have ended. One that did not come yet may be in its loop's inbox,
    /// with chunks that nobody has read.
    pub(crate) fn is_gone(&self) -> bool {
        let lanes = self.lock();
        let all_came = lanes.epochs.iter().all(|epoch| *epoch > 0);
        all_came && !lanes.epochs.is_empty() && lanes.live.is_empty()
    }
}

#[derive(Debug, Default)]
struct RegistryState {
    groups: HashMap<GroupId, Weak<Group>>,
    recv_streams: HashMap<u64, Arc<RecvStream>>,
    /// Receive comms, by the session that introduced them.
    comms: HashMap<SessionId, Arc<LinkInbox>>,
}

/// What lanes look things up in, once for a comm and then from their own memory.
#[derive(Debug, Default)]
pub(crate) struct Registry(Mutex<RegistryState>);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        lock(&self.0)
    }

    /// The group of a peer process, known or new.
    pub(crate) fn group(&self, id: GroupId) -> Arc<Group> {
        let mut state = self.lock();
        if let Some(group) = state.groups.get(&id).and_then(Weak::upgrade) {
            return group;
        }
        state.groups.retain(|_, group| group.strong_count() > 0);
        let group = Arc::new(Group::default());
        state.groups.insert(id, Arc::downgrade(&group));
        group
    }

    /// Makes a comm known to lanes.
    pub(crate) fn open(&self, recv_stream: &Arc<RecvStream>) {
        self.lock()
            .recv_streams
            .insert(recv_stream.id, Arc::clone(recv_stream));
    }

    /// Takes a comm away from lanes: after this none writes into its memory, or the answer is
    /// `false`.
    pub(crate) fn close(&self, recv_stream: &RecvStream) -> bool {
        self.lock().recv_streams.remove(&recv_stream.id);
        recv_stream.close()
    }

    /// A receive comm's connections can come.
    pub(crate) fn expect(&self, session: SessionId, inbox: &Arc<LinkInbox>) {
        self.lock().comms.insert(session, Arc::clone(inbox));
    }

    /// They cannot any more.
    pub(crate) fn forget(&self, session: SessionId) {
        self.lock().comms.remove(&session);
    }

    /// Where a comm's own connections go; `None`: there is no such comm (any more).
    pub(crate) fn comm(&self, session: SessionId) -> Option<Arc<LinkInbox>> {
        self.lock().comms.get(&session).cloned()
    }

    /// The comm with a number.
    pub(crate) fn recv_stream(&self, id: u64) -> Option<Arc<RecvStream>> {
        self.lock().recv_streams.get(&id).cloned()
    }
}

#[cfg(test)]
mod tests {
    use tcpx_lanes::event_loop::EventLoops;

    use super::*;

    fn hello(lane: u16, lanes: u16, epoch: u32) -> Hello {
        Hello {
            group: [1; 16],
            lanes,
            lane,
            epoch,
        }
    }

    #[test]
    fn a_group_is_gone_with_its_last_lane_and_not_before() {
        let loops = EventLoops::start("tcpx-nccl", 1).unwrap();
        let place = loops.spread(1)[0].place();
        let group = Group::default();
        assert!(!group.is_gone());
        group.entered(&hello(1, 2, 0), 7, &place).unwrap();
        group.left(7);
        // The other one may be in its loop's inbox, with chunks that nobody has read.
        assert!(!group.is_gone());
        group.entered(&hello(0, 2, 0), 8, &place).unwrap();
        assert!(!group.is_gone());
        group.left(8);
        assert!(group.is_gone());
        group.entered(&hello(0, 2, 1), 9, &place).unwrap();
        assert!(!group.is_gone(), "it was dialled again");
    }

    #[test]
    fn extra_lanes_and_those_of_older_epochs_are_refused() {
        let loops = EventLoops::start("tcpx-nccl", 1).unwrap();
        let place = loops.spread(1)[0].place();
        let group = Group::default();
        group.entered(&hello(1, 2, 4), 7, &place).unwrap();
        for refused in [
            hello(2, 3, 0),
            hello(0, 3, 0),
            hello(0, 1, 0),
            hello(1, 2, 4),
        ] {
            assert!(group.entered(&refused, 8, &place).is_err(), "{refused:?}");
        }
        group.entered(&hello(1, 2, 5), 8, &place).unwrap();
    }

    #[test]
    fn a_group_is_one_while_somebody_uses_it() {
        let registry = Registry::default();
        let first = registry.group([1; 16]);
        assert!(Arc::ptr_eq(&first, &registry.group([1; 16])));
        assert!(!Arc::ptr_eq(&first, &registry.group([2; 16])));
        let before = Arc::downgrade(&first);
        drop(first);
        registry.group([1; 16]);
        assert!(before.upgrade().is_none());
    }

    #[test]
    fn a_closed_comm_is_unknown_to_lanes() {
        let registry = Registry::default();
        let recv_stream = Arc::new(RecvStream::new(3));
        registry.open(&recv_stream);
        assert!(registry.recv_stream(3).is_some());
        assert!(registry.close(&recv_stream));
        assert!(registry.recv_stream(3).is_none() && recv_stream.is_closed());
    }
}
