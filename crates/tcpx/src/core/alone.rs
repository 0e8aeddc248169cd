//! Whether long messages go one at a time: then the thread that waits for one may move its bytes too.

use super::Core;

/// What comes over the channels.
#[derive(Debug, Default)]
pub(super) struct Alone {
    /// So many in a row must have come one at a time.
    pub(super) usual: u8,
    /// Messages that have begun to come and have not all come.
    pub(super) under_way: usize,
    /// Messages in a row that began to come when none was under way.
    pub(super) came: u8,
    /// So many must still come one at a time after some that did not.
    pub(super) together: u8,
}

impl Alone {
    /// A long message begins to come. Those that came together with it count as under way: the peer has sent it before it
    /// heard of their end.
    pub(super) fn begins(&mut self) {
        self.under_way += 1;
        (self.came, self.together) = match self.under_way {
            1 => (self.came.saturating_add(1), self.together.saturating_sub(1)),
            _ => (0, self.usual),
        };
    }

    /// So many have come.
    pub(super) fn have_come(&mut self, count: usize) {
        self.under_way = self.under_way.saturating_sub(count);
    }

    /// A short message has come, which nobody needs a lane for.
    pub(super) fn short_came(&mut self) {
        self.came = 0;
    }
}

impl Core {
    /// Whether more than one message goes one way at a time, or did a moment ago.
    pub(crate) fn go_several_at_a_time(&self) -> bool {
        let alone = &self.channels.alone;
        alone.under_way > 1 || alone.together > 0 || self.session.sends_under_way() > 1
    }

    /// Whether one message each way goes over the channels, or soon will.
    pub(crate) fn goes_one_at_a_time(&self) -> bool {
        let alone = &self.channels.alone;
        let sends = self.session.sends_under_way() > 0;
        let is_sending = sends && self.channels.are_moving();
        !self.go_several_at_a_time() && (is_sending || alone.came >= alone.usual)
    }
}
