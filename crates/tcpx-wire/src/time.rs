//! A clock reading that the caller brings along.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

/// Microseconds since an origin of the caller's choice. The protocol never reads a clock: every
/// call that depends on time takes one of these, from one monotonic clock per session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Further away than any deadline.
    pub const MAX: Self = Self(u64::MAX);

    /// The span from `earlier` to here; zero when `earlier` is later.
    pub fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    /// Parts of a microsecond count as a whole one, so that a deadline never lies before what was
    /// asked for.
    fn add(self, span: Duration) -> Self {
        // A division of 128 bits, which all nanoseconds together need, takes longer than most of
        // what times are added for.
        let part = span.subsec_nanos().div_ceil(1000).into();
        let micros = span
            .as_secs()
            .saturating_mul(1_000_000)
            .saturating_add(part);
        Self(self.0.saturating_add(micros))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06} s", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_span_counts_as_its_nanoseconds_do(
            start in prop_oneof![0..1000u64, any::<u64>()],
            seconds in prop_oneof![0..1000u64, any::<u64>()],
            nanos in 0..1_000_000_000u32,
        ) {
            let span = Duration::new(seconds, nanos);
            let end = u128::from(start) + span.as_nanos().div_ceil(1000);
            prop_assert_eq!(Time(start) + span, u64::try_from(end).map_or(Time::MAX, Time));
        }
    }

    #[test]
    fn arithmetic_stops_at_the_ends() {
        assert_eq!(Time(1) + Duration::MAX, Time::MAX);
        assert_eq!(Time(1).saturating_since(Time(5)), Duration::ZERO);
        assert_eq!(Time(7).saturating_since(Time(5)), Duration::from_micros(2));
        assert_eq!(Time(0) + Duration::from_nanos(1), Time(1));
    }
}
