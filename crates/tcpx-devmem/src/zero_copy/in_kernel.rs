//! Memory that the kernel may still send from.

use std::collections::VecDeque;

use super::Done;

/// Zero-copy sends of one socket whose end the kernel has not reported, by their number, each with the
/// slot that it reads. Reports name ranges, and may come in any order.
#[derive(Debug)]
pub(crate) struct InKernel<S> {
    /// Number of the first entry; numbers wrap.
    first: u32,
    slots: VecDeque<Option<S>>,
}

impl<S> Default for InKernel<S> {
    fn default() -> Self {
        Self {
            first: 0,
            slots: VecDeque::new(),
        }
    }
}

/// A report about sends that were not made, or were reported before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("zero-copy report: expected sends within {first}..{next}, {}..={} arrived", .done.first, .done.last)]
pub(crate) struct BadReport {
    done: Done,
    first: u32,
    next: u32,
}

impl<S> InKernel<S> {
    /// The next send was made from this slot.
    pub(crate) fn sent(&mut self, slot: S) {
        self.slots.push_back(Some(slot));
    }

    /// The number of the next send.
    pub(crate) fn next(&self) -> u32 {
        self.first.wrapping_add(self.slots.len() as u32)
    }

    /// The kernel holds nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Lets go of the slots that a report names.
    ///
    /// # Errors
    /// The report cannot be; nothing was let go of.
    pub(crate) fn done(&mut self, done: Done) -> Result<(), BadReport> {
        let place = |number: u32| usize::try_from(number.wrapping_sub(self.first)).ok();
        let bad = BadReport {
            done,
            first: self.first,
            next: self.next(),
        };
        let (Some(from), Some(to)) = (place(done.first), place(done.last)) else {
            return Err(bad);
        };
        if from > to || to >= self.slots.len() {
            return Err(bad);
        }
        if self.slots.range(from..=to).any(Option::is_none) {
            return Err(bad);
        }
        for slot in self.slots.range_mut(from..=to) {
            *slot = None;
        }
        while let Some(None) = self.slots.front() {
            self.slots.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        Ok(())
    }

    /// The slots that no report has named, one for each send; nothing more is to be reported on.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = S> {
        std::mem::take(&mut self.slots).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn range(first: u32, last: u32) -> Done {
        Done {
            first,
            last,
            copied: false,
        }
    }

    /// The number of the first send, and slots whose references tell who holds them.
    fn sent(first: u32, count: usize) -> (InKernel<Arc<()>>, Vec<Arc<()>>) {
        let slots: Vec<_> = (0..count).map(|_| Arc::new(())).collect();
        let mut in_kernel = InKernel {
            first,
            slots: VecDeque::new(),
        };
        for slot in &slots {
            in_kernel.sent(Arc::clone(slot));
        }
        (in_kernel, slots)
    }

    fn held(slots: &[Arc<()>]) -> Vec<bool> {
        slots.iter().map(|one| Arc::strong_count(one) > 1).collect()
    }

    #[test]
    fn reports_in_any_order_free_each_slot_once() {
        let (mut in_kernel, slots) = sent(u32::MAX - 1, 4);
        in_kernel.done(range(0, 1)).unwrap();
        assert_eq!(held(&slots), [true, true, false, false]);
        assert!(in_kernel.done(range(1, 1)).is_err(), "reported before");
        in_kernel.done(range(u32::MAX - 1, u32::MAX)).unwrap();
        assert!(in_kernel.is_empty());
        assert_eq!(held(&slots), [false; 4]);
        assert!(in_kernel.done(range(2, 2)).is_err(), "never sent");
    }

    #[test]
    fn a_report_that_runs_past_the_sends_frees_nothing() {
        let (mut in_kernel, slots) = sent(0, 1);
        for (first, last) in [(0, 1), (1, 0), (5, 5), (u32::MAX, 0)] {
            let refused = in_kernel.done(range(first, last));
            assert!(refused.is_err(), "{first}..={last}");
        }
        assert_eq!(held(&slots), [true]);
        in_kernel.done(range(0, 0)).unwrap();
        assert_eq!(held(&slots), [false]);
    }
}
