//! The path that a connection's bytes take, since it first changed.

use std::sync::OnceLock;

/// Most changes that are kept: two for each channel of any network. What comes after is in the log alone.
const MOST: usize = 128;

/// Changes of path, one behind the other. None is ever taken away, so that readers take no lock and keep
/// what they borrowed.
#[derive(Debug, Default)]
pub(crate) struct PathNews(OnceLock<Box<Change>>);

#[derive(Debug)]
struct Change {
    words: String,
    next: PathNews,
}

impl PathNews {
    /// The path after the last change; `None` while there was none.
    pub(crate) fn latest(&self) -> Option<&str> {
        self.changes().last().map(|change| change.words.as_str())
    }

    /// The bytes take another path.
    pub(crate) fn add(&self, words: String) {
        let (count, last) = self
            .changes()
            .fold((0, self), |(count, _), change| (count + 1, &change.next));
        if count < MOST {
            let next = Self::default();
            // Only the engine adds, under its lock.
            let _ = last.0.set(Box::new(Change { words, next }));
        }
    }

    fn changes(&self) -> impl Iterator<Item = &Change> {
        std::iter::successors(self.0.get(), |change| change.next.0.get()).map(|change| &**change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_change_is_the_path_and_earlier_words_stay() {
        let news = PathNews::default();
        assert_eq!(news.latest(), None);
        news.add("a".to_owned());
        let first = news.latest();
        news.add("b".to_owned());
        assert_eq!((first, news.latest()), (Some("a"), Some("b")));
        (0..2 * MOST).for_each(|change| news.add(change.to_string()));
        let last = (MOST - 3).to_string();
        assert_eq!(news.latest(), Some(last.as_str()), "there is an end");
    }
}
