//! Which pages of a receive pool are free.

use std::collections::VecDeque;

use crate::shuffle::Shuffle;

/// Free pages in a mixed order, so that neighbours in a message are seldom neighbours in memory.
#[derive(Debug)]
pub(crate) struct Pages {
    free: VecDeque<u32>,
    total: usize,
}

impl Pages {
    pub(crate) fn new(total: u32, shuffle: &mut Shuffle) -> Self {
        let mut free: Vec<u32> = (0..total).collect();
        shuffle.shuffle(&mut free);
        Self {
            total: free.len(),
            free: free.into(),
        }
    }

    pub(crate) const fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Moves `count` pages to `taken`, all or none.
    pub(crate) fn take(&mut self, count: usize, taken: &mut Vec<u32>) -> bool {
        if count > self.free.len() {
            return false;
        }
        taken.extend(self.free.drain(..count));
        true
    }

    /// Takes pages back, in their present mixed order.
    pub(crate) fn give_back(&mut self, pages: &mut Vec<u32>) {
        self.free.extend(pages.drain(..));
        debug_assert!(self.free.len() <= self.total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_mixed_all_or_none_and_return() {
        let mut pages = Pages::new(100, &mut Shuffle::new(9));
        let mut first = Vec::new();
        assert!(pages.take(60, &mut first));
        assert!(first.windows(2).any(|pair| pair[0] > pair[1]));
        let mut second = Vec::new();
        assert!(!pages.take(41, &mut second));
        assert!(second.is_empty());
        assert!(pages.take(40, &mut second));
        assert_eq!(pages.free(), 0);
        pages.give_back(&mut first);
        pages.give_back(&mut second);
        assert_eq!((pages.free(), pages.total()), (100, 100));
        let mut all = Vec::new();
        assert!(pages.take(100, &mut all));
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
    }
}
