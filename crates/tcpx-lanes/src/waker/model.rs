//! Every interleaving of few threads that raise a flag, and of its consumer.

use super::Raised;
use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread::{JoinHandle, spawn};

/// The flag, the work, and the wakes that the consumer's descriptor would count.
type Shared = (Raised, AtomicUsize, AtomicUsize);

/// Each publishes a piece of work.
const PRODUCERS: usize = 2;

/// All interleavings take minutes. Each fault that these models find in a broken copy of the code
/// takes one or two switches of a thread that could go on; `LOOM_MAX_PREEMPTIONS` sets more.
const MOST_SWITCHES: usize = 3;

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound.get_or_insert(MOST_SWITCHES);
    builder.check(model);
}

fn producers(shared: &Arc<Shared>) -> [JoinHandle<()>; PRODUCERS] {
    [(); PRODUCERS].map(|()| {
        let shared = Arc::clone(shared);
        spawn(move || {
            let (raised, work, wakes) = &*shared;
            work.fetch_add(1, Ordering::Relaxed);
            if raised.raise() {
                wakes.fetch_add(1, Ordering::Release);
            }
        })
    })
}

/// The consumer looks, does one last thing that says whether it is to be woken, and waits: without
/// a wake it sleeps for ever, and woken it looks for what was raised.
fn sees_all(
    shared: &Shared,
    producers: [JoinHandle<()>; PRODUCERS],
    last: impl FnOnce(&Raised) -> bool,
) {
    let (raised, work, wakes) = shared;
    raised.lower();
    let mut seen = work.load(Ordering::Relaxed);
    if last(raised) {
        wakes.fetch_add(1, Ordering::Release);
    }
    for producer in producers {
        producer.join().expect("a producer ends");
    }
    if wakes.load(Ordering::Acquire) > 0 && raised.is_raised() {
        raised.lower();
        seen = work.load(Ordering::Relaxed);
    }
    assert_eq!(
        seen, PRODUCERS,
        "work was published, and neither seen nor announced"
    );
}

fn shared() -> Arc<Shared> {
    Arc::new((Raised::new(), AtomicUsize::new(0), AtomicUsize::new(0)))
}

#[test]
fn work_published_before_a_silent_raise_is_seen() {
    explore(|| {
        let shared = shared();
        let producers = producers(&shared);
        let (raised, work, wakes) = &*shared;
        // It must end with nothing unseen.
        let woken_before = wakes.load(Ordering::Acquire);
        raised.lower();
        let seen = work.load(Ordering::Relaxed);
        for producer in producers {
            producer.join().expect("a producer ends");
        }
        let woken_after = wakes.load(Ordering::Acquire);
        assert!(
            seen == PRODUCERS || woken_after > woken_before,
            "work was published, and neither seen nor announced"
        );
    });
}

/// A consumer whose descriptor counts the wakes reads them, looks, and then waits.
#[test]
fn work_published_during_a_read_is_seen_or_announced() {
    explore(|| {
        let shared = shared();
        // One wake has been announced.
        assert!(shared.0.raise());
        shared.2.fetch_add(1, Ordering::Release);
        let producers = producers(&shared);
        let (raised, work, wakes) = &*shared;
        raised.lower_and_read(0, || wakes.swap(0, Ordering::AcqRel) as u64);
        let seen = work.load(Ordering::Relaxed);
        for producer in producers {
            producer.join().expect("a producer ends");
        }
        assert!(
            seen == PRODUCERS || wakes.load(Ordering::Acquire) > 0,
            "work was published, and neither seen nor announced"
        );
    });
}

/// A consumer that looks by itself for a while and then waits is woken for what it did not see.
#[test]
fn work_published_as_the_consumer_stops_is_announced() {
    explore(|| {
        let shared = shared();
        shared.0.set_looked_for(true);
        let producers = producers(&shared);
        sees_all(&shared, producers, |raised| raised.set_looked_for(false));
    });
}
