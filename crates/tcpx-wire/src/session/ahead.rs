//! Grants ahead: a receive that waits is granted before the transfer is announced that it is likely to match.
//!
//! The receiver guesses. Its oldest waiting receive will get the peer's next transfer, of the receive's whole
//! length; the next receive the one after that, and so on. A transfer that is as guessed needs no announcement: its
//! chunks are sent to the receive at once. One that is not, the sender announces as ever, after it has *declined*
//! what is left of the grants ahead: from the first wrong guess on none of them holds, as receives of a tag are
//! matched in their order. Both sides number the times that happened, the *epoch*.
//!
//! An announcement and a grant ahead may cross. If they fit, that is the grant, and the chunks may even come before
//! the announcement; else both sides see by themselves that the guess was wrong, and a new epoch begins.
//!
//! A transfer that fits may be announced all the same ([`Config::announces_granted`](super::Config)): then the receiver
//! hears of it before its bytes come.
//!
//! Until one of these is the case, a receive is *open*: it counts as not matched. It returns to those that wait
//! once the data plane has let go of it. If the program ends it meanwhile, it has ended at once, and the receiver
//! *recalls* the grants ahead; should its transfer have been sent nevertheless, that is cancelled.

mod given;
mod taken;

use crate::frame::Level;

pub(super) use given::GivenAhead;
pub(super) use taken::TakenAhead;

/// Most grants ahead at a time.
const MOST: usize = 32;

/// Whether a transfer whose sender asks for `asked` ends as one that was granted ahead at `granted`: nobody is to pay for a
/// comparison that neither side wants.
fn fits_level(asked: Level, granted: Level) -> bool {
    asked <= granted && (granted < Level::Verified || asked == Level::Verified)
}

/// What a receive has to do with grants ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Foresight {
    /// Nothing: its transfer is known.
    None,
    /// Whether the transfer comes that it was granted for is not known yet.
    Open,
    /// That does not come; the data plane still has to let go of the memory. Then the receive waits again.
    Withdrawn,
    /// That does not come, and the receive has ended before.
    Void,
}

#[cfg(test)]
impl super::Session {
    /// Nothing of grants ahead from here to `peer` is left, and both agree on what is next.
    pub(super) fn assert_nothing_ahead(&self, peer: &Self) {
        let (given, taken) = (&self.given_ahead, &peer.taken_ahead);
        assert!(given.is_idle(), "{given:?}");
        assert!(taken.is_empty(), "{taken:?}");
        let ended = self.ended() || peer.ended();
        assert!(
            ended || given.epoch() == taken.epoch(),
            "{given:?} {taken:?}"
        );
        assert!(ended || self.receive_stream.end() == peer.send_stream.end());
    }
}
