//! What a finished transfer tells.

use std::time::Duration;

use tcpx_memory::UnpackMethod;
use tcpx_wire::Level;

/// A transfer that ended well.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Bytes moved; for a receive this may be less than its room.
    pub bytes: u64,
    /// What is known: sent, placed or verified.
    pub level: Level,
    /// Requests of the network that carried it; 0 for a message that travelled with its
    /// announcement.
    pub chunks: u32,
    /// Fragments that had to be unpacked; 0 where the network placed the bytes itself.
    pub fragments: u64,
    /// From the start of the operation to its end.
    pub elapsed: Duration,
    /// Part of `elapsed` in which at least one chunk was on the wire.
    pub wire: Duration,
    /// Part of `elapsed` in which nothing was on the wire and at least one chunk was unpacked.
    pub unpack: Duration,
    /// The rest: waiting for the peer to match, grant or acknowledge.
    pub wait: Duration,
    /// How fragments were put in place, if there were any.
    pub unpack_method: Option<UnpackMethod>,
    /// CRC32C of the bytes, when the level is verified.
    pub digest: Option<u32>,
}

impl Report {
    /// Of two operations that ran together.
    pub(crate) fn join(self, other: Self) -> Self {
        let elapsed = self.elapsed.max(other.elapsed);
        let (wire, unpack) = (self.wire.max(other.wire), self.unpack.max(other.unpack));
        Self {
            bytes: self.bytes + other.bytes,
            level: self.level.min(other.level),
            chunks: self.chunks + other.chunks,
            fragments: self.fragments + other.fragments,
            elapsed,
            wire,
            unpack,
            wait: elapsed.saturating_sub(wire + unpack),
            unpack_method: self.unpack_method.or(other.unpack_method),
            digest: None,
        }
    }
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes placed (receiver) or acknowledged as placed (sender).
    pub bytes_done: u64,
    /// Bytes in total; 0 until a receive is matched.
    pub bytes_total: u64,
}

/// Splits elapsed time into wire, unpack and wait.
#[derive(Debug, Default)]
pub(crate) struct Phases {
    wire: Duration,
    unpack: Duration,
    since: Duration,
    on_wire: u32,
    unpacking: u32,
}

impl Phases {
    /// Accounts the time since the last change, then changes the number of chunks on the wire and
    /// in the unpacker. `now` counts from the start of the operation.
    pub(crate) fn change(&mut self, now: Duration, on_wire: i32, unpacking: i32) {
        let span = now.saturating_sub(self.since);
        self.since = now;
        if self.on_wire > 0 {
            self.wire += span;
        } else if self.unpacking > 0 {
            self.unpack += span;
        }
        self.on_wire = self.on_wire.saturating_add_signed(on_wire);
        self.unpacking = self.unpacking.saturating_add_signed(unpacking);
    }

    /// `(wire, unpack, wait)` of an operation that took `elapsed`.
    pub(crate) fn split(&self, elapsed: Duration) -> (Duration, Duration, Duration) {
        let wait = elapsed.saturating_sub(self.wire + self.unpack);
        (self.wire, self.unpack, wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn phases_add_up_to_the_elapsed_time() {
        let mut phases = Phases::default();
        phases.change(ms(10), 1, 0); // 10 ms of waiting, then one chunk on the wire
        phases.change(ms(15), -1, 1); // 5 ms of wire, then it is unpacked
        phases.change(ms(18), 1, 0); // 3 ms of unpack alone
        phases.change(ms(20), 0, -1); // hidden behind the wire: counts as wire
        phases.change(ms(21), -1, 0);
        assert_eq!(phases.split(ms(30)), (ms(8), ms(3), ms(19)));
    }
}
