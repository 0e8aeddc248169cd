//! Waiting for a set of descriptors, for less than a millisecond where that is asked for.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::buffer::Buffer;
use rustix::event::epoll::{self, Event};
use rustix::event::{PollFd, PollFlags, poll};

use crate::driver::timespec;

/// Longer than any program waits, and short enough to be added to any clock.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// How often a thread that waits for the engine makes sure that it lives.
pub(crate) const LIVENESS_CHECK: Duration = Duration::from_secs(1);

/// The end of `span` from `start` on; of a span without end, as `Duration::MAX`, one that nobody
/// lives to see.
pub(crate) fn deadline(start: Instant, span: Duration) -> Instant {
    start + span.min(FOREVER)
}

/// Microseconds from `origin` to `at`; none where that comes first.
pub(crate) fn micros_since(origin: Instant, at: Instant) -> u64 {
    let span = at.saturating_duration_since(origin);
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// Below this a whole millisecond more would matter.
const FINE: Duration = Duration::from_millis(2);

/// Waits for events of the set, at most for `span`.
///
/// `epoll_wait` takes whole milliseconds, and what is shorter is rounded up; `epoll_pwait2`, which
/// takes nanoseconds, is missing before Linux 5.11 and in older sandboxes. So the set is itself
/// polled for a short span, which costs a second call.
pub(crate) fn wait<Events: Buffer<Event>>(
    set: impl AsFd,
    events: Events,
    span: Duration,
) -> rustix::io::Result<Events::Output> {
    if !span.is_zero() && span < FINE {
        let mut polled = [PollFd::new(&set, PollFlags::IN)];
        // Interrupted or not, what there is by now is taken.
        let _ = poll(&mut polled, Some(&timespec(span)));
        return wait_about(set, events, Duration::ZERO);
    }
    wait_about(set, events, span)
}

/// As [`wait`], with one call, for `span` or up to a millisecond more.
pub(crate) fn wait_about<Events: Buffer<Event>>(
    set: impl AsFd,
    events: Events,
    span: Duration,
) -> rustix::io::Result<Events::Output> {
    epoll::wait(set, events, Some(&timespec(span)))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Instant;

    use rustix::buffer::spare_capacity;
    use rustix::event::epoll::{CreateFlags, EventData, EventFlags};
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// Far more than anything here takes.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_wait_for_less_than_a_millisecond_does_not_last_for_one() {
        let set = epoll::create(CreateFlags::CLOEXEC).expect("a set");
        let span = Duration::from_micros(50);
        let began = Instant::now();
        // On a busy machine one may take longer; rounded up, none takes less.
        while began.elapsed() < LONG {
            let one = Instant::now();
            wait(&set, spare_capacity(&mut Vec::with_capacity(1)), span).expect("waited");
            let lasted = one.elapsed();
            assert!(lasted >= span);
            if lasted < Duration::from_millis(1) {
                return;
            }
        }
        panic!("every wait lasted a millisecond");
    }

    #[test]
    fn what_is_ready_ends_a_wait_of_any_length() {
        let set = epoll::create(CreateFlags::CLOEXEC).expect("a set");
        let ready = eventfd(1, EventfdFlags::CLOEXEC).expect("an eventfd");
        epoll::add(&set, &ready, EventData::new_u64(7), EventFlags::IN).expect("added");
        for span in [Duration::ZERO, FINE / 2, LONG] {
            let mut events = Vec::with_capacity(2);
            wait(&set, spare_capacity(&mut events), span).expect("waited");
            assert_eq!(events.len(), 1, "{span:?}");
        }
    }
}
