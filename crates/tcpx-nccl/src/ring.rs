//! The requests of one comm.

use nccl_net::export::RequestId;

/// Most requests outstanding in a comm; one more gives a NULL request.
pub(crate) const MAX_OUTSTANDING: usize = 16;

/// Requests in posting order.
///
/// There are twice as many ids as requests, handed out in turn: a host that reports a receive
/// consumed some steps after it was done still names a slot that nobody else has.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    slots: [Option<T>; RequestId::LIMIT],
    posted: u64,
    outstanding: usize,
}

const _: () = assert!(MAX_OUTSTANDING * 2 <= RequestId::LIMIT);

impl<T> Ring<T> {
    pub(crate) fn new() -> Self {
        Self {
            slots: std::array::from_fn(|_| None),
            posted: 0,
            outstanding: 0,
        }
    }

    /// Sequence number of the next request.
    pub(crate) const fn posted(&self) -> u64 {
        self.posted
    }

    /// Requests outstanding.
    pub(crate) const fn len(&self) -> usize {
        self.outstanding
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.outstanding == 0
    }

    pub(crate) fn is_full(&self) -> bool {
        self.outstanding >= MAX_OUTSTANDING || self.slots[index(self.posted)].is_some()
    }

    /// Adds the next request; `None` when full.
    pub(crate) fn post(&mut self, request: T) -> Option<RequestId> {
        if self.is_full() {
            return None;
        }
        let at = index(self.posted);
        self.slots[at] = Some(request);
        self.posted += 1;
        self.outstanding += 1;
        Some(id(self.posted - 1))
    }

    pub(crate) fn by_sequence(&mut self, sequence: u64) -> Option<&mut T> {
        let live = self.posted.saturating_sub(RequestId::LIMIT as u64)..self.posted;
        if !live.contains(&sequence) {
            return None;
        }
        self.slots[index(sequence)].as_mut()
    }

    pub(crate) fn by_id(&mut self, id: RequestId) -> Option<&mut T> {
        self.slots.get_mut(usize::try_from(id.0).ok()?)?.as_mut()
    }

    /// The request with its sequence number.
    pub(crate) fn find(&mut self, id: RequestId) -> Option<(u64, &mut T)> {
        let limit = RequestId::LIMIT as u64;
        let at = u64::from(id.0);
        // The last number below `posted` that has this id.
        let rounds = self.posted.checked_sub(at + 1)? / limit;
        Some((rounds * limit + at, self.by_id(id)?))
    }

    /// Whether every request passes, with its sequence number.
    pub(crate) fn all(&self, mut test: impl FnMut(u64, &T) -> bool) -> bool {
        let first = self.posted.saturating_sub(RequestId::LIMIT as u64);
        (first..self.posted).all(|sequence| match &self.slots[index(sequence)] {
            Some(request) => test(sequence, request),
            None => true,
        })
    }

    /// Sequence number of the oldest request that passes.
    pub(crate) fn find_first(&self, mut test: impl FnMut(u64, &T) -> bool) -> Option<u64> {
        let mut found = None;
        self.all(|sequence, request| {
            found = test(sequence, request).then_some(sequence);
            found.is_none()
        });
        found
    }

    pub(crate) fn remove(&mut self, id: RequestId) -> Option<T> {
        let request = self.slots.get_mut(usize::try_from(id.0).ok()?)?.take()?;
        self.outstanding -= 1;
        Some(request)
    }
}

/// The id of the request with a sequence number.
pub(crate) fn id(sequence: u64) -> RequestId {
    // Below 32.
    RequestId(index(sequence) as u32)
}

/// Slot of a sequence number.
fn index(sequence: u64) -> usize {
    // Below 32.
    (sequence % RequestId::LIMIT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_requests_fit_and_an_id_comes_back_last() {
        let mut ring = Ring::new();
        let ids: Vec<_> = (0..16).map(|n| ring.post(n).unwrap()).collect();
        assert_eq!(ring.post(16), None);
        assert_eq!(ring.remove(ids[0]), Some(0));
        let next = ring.post(16).unwrap();
        assert!(!ids.contains(&next));
        assert_eq!(ring.remove(ids[0]), None);
        assert_eq!(ring.by_sequence(16), Some(&mut 16));
        assert_eq!(ring.by_sequence(17), None);
        assert_eq!(ring.find(next), Some((16, &mut 16)));
        assert_eq!(ring.find(RequestId(17)), None);
        assert_eq!(ring.by_id(RequestId(99)), None);
    }

    #[test]
    fn a_request_that_nobody_finishes_blocks_its_id_only() {
        let mut ring = Ring::new();
        let oldest = ring.post(0).unwrap();
        for n in 1..32 {
            let id = ring.post(n).unwrap();
            ring.remove(id);
        }
        assert!(ring.is_full());
        ring.remove(oldest);
        assert!(!ring.is_full());
    }
}
