//! How fast all cores of this host copy memory together: the bound of what passes through it.

use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Larger than a core's share of any cache, in bytes.
const BLOCK: usize = 64 << 20;

/// How long is measured.
const SPAN: Duration = Duration::from_millis(300);

/// 10^9 bytes a second, each byte counted once.
#[expect(clippy::cast_precision_loss, reason = "three digits are printed")]
pub(super) fn copy_rate() -> f64 {
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(64);
    let barrier = Barrier::new(threads);
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let (source, mut target) = (vec![1u8; BLOCK], vec![2u8; BLOCK]);
                    barrier.wait();
                    let started = Instant::now();
                    let mut copied = 0;
                    while started.elapsed() < SPAN {
                        target.copy_from_slice(std::hint::black_box(&source));
                        std::hint::black_box(&mut target);
                        copied += BLOCK;
                    }
                    copied as f64 / started.elapsed().as_secs_f64() / 1e9
                })
            })
            .collect();
        running
            .into_iter()
            .filter_map(|one| one.join().ok())
            .collect()
    });
    rates.iter().sum()
}
