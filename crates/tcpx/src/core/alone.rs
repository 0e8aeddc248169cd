//! Whether long messages go one at a time: then the thread that waits for one may move its bytes too.

use super::Core;

/// So many messages in a row must have come one at a time.
const USUAL: u8 = 8;

/// What comes over the channels.
#[derive(Debug, Default)]
pub(super) struct Alone {
    /// Messages that have begun to come and have not all come.
    under_way: usize,
    /// Messages in a row that began to come when none was under way.
    came: u8,
    /// So many must still come one at a time after some that did not.
    together: u8,
}

impl Alone {
    /// A long message begins to come. Those that came together with it count as under way: the peer has sent it before it
    /// heard of their end.
    pub(super) fn begins(&mut self) {
        self.under_way += 1;
        (self.came, self.together) = match self.under_way {
            1 => (self.came.saturating_add(1), self.together.saturating_sub(1)),
            _ => (0, USUAL),
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
        let several_come = self.channels.alone.under_way > 1 || self.channels.alone.together > 0;
        several_come || self.session.sends_under_way() > 1
    }

    /// Whether one message each way goes over the channels, or soon will.
    pub(crate) fn goes_one_at_a_time(&self) -> bool {
        let sends = self.session.sends_under_way() > 0;
        let is_sending = sends && self.channels.are_moving();
        !self.go_several_at_a_time() && (is_sending || self.channels.alone.came >= USUAL)
    }
}
