//! The GPU worker over a driver in memory that does everything as late as it may.

mod lists;
mod lost;
mod pieces;
mod together;
mod turns;

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use tcpx_wire::{Descriptors, Fragment, Limits, ScatterList};

use super::*;
use crate::bounce::{BouncePool, UnpackMethod};
use crate::driver::fake;
use crate::fence::Fence;
use crate::job::{CompletionSink, Job, Work};
use crate::kind::MemoryKind;
use crate::lease::Access;
use crate::region::Region;

const LIMIT: Duration = Duration::from_secs(60);

type Ended = (u64, Result<u64, MemoryError>);

struct Channel(Sender<Ended>);

impl CompletionSink for Channel {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        self.0.send((token, result)).ok();
    }
}

struct Bench {
    gpu: Gpu,
    worker: CopyWorker,
}

impl Bench {
    fn new() -> Self {
        let gpu = Gpu::fake();
        Self {
            worker: start(&gpu).unwrap(),
            gpu,
        }
    }

    fn region(&self, kind: MemoryKind, bytes: &[u8]) -> Region {
        let region = self.empty(kind, bytes.len());
        region.write_from(0, bytes).unwrap();
        region
    }

    fn empty(&self, kind: MemoryKind, len: usize) -> Region {
        let region = match kind {
            MemoryKind::Host => Region::host(len),
            MemoryKind::Pinned => Region::pinned(&self.gpu, len),
            MemoryKind::Cuda { .. } => Region::cuda(&self.gpu, len),
        };
        region.unwrap()
    }

    fn kinds(&self) -> [MemoryKind; 3] {
        [MemoryKind::Host, MemoryKind::Pinned, self.gpu.kind()]
    }

    fn submit(&self, token: u64, work: Work, fence: Option<Fence>, sink: &Arc<Channel>) {
        let job = Job {
            work,
            fence,
            sink: Arc::<Channel>::clone(sink),
            token,
        };
        self.worker.submit(job).unwrap();
    }

    fn run(&self, work: Work) -> Result<u64, MemoryError> {
        let (sink, ended) = channel();
        self.submit(7, work, None, &sink);
        ended.recv_timeout(LIMIT).unwrap().1
    }
}

fn channel() -> (Arc<Channel>, Receiver<Ended>) {
    let (sender, receiver) = mpsc::channel();
    (Arc::new(Channel(sender)), receiver)
}

fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_to(0, &mut bytes).unwrap();
    bytes
}

fn noise(len: usize, seed: u32) -> Vec<u8> {
    let mixed = |at: u32| (at.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 23) as u8;
    (0..len as u32).map(mixed).collect()
}

#[test]
fn copies_between_all_kinds_of_memory() {
    let bench = Bench::new();
    for from in bench.kinds() {
        for to in bench.kinds() {
            for len in [0, 1, 4097, (1 << 20) + 1, (9 << 20) + 5] {
                let bytes = noise(len, 3);
                let (source, target) = (
                    bench.region(from, &bytes),
                    bench.region(to, &vec![1; len + 9]),
                );
                let part = target.slice(5..5 + len).unwrap();
                let moved = bench.run(Work::Copy {
                    from: source.all(),
                    to: part,
                });
                assert_eq!(moved, Ok(len as u64), "{from} to {to}");
                let found = content(&target);
                assert!(
                    found[5..5 + len] == bytes,
                    "{len} bytes from {from} to {to}"
                );
                assert_eq!((&found[..5], &found[5 + len..]), (&[1; 5][..], &[1; 4][..]));
            }
        }
    }
    assert_eq!(
        fake::contexts_on_this_thread(),
        0,
        "a context was left on the caller's thread"
    );
}

#[test]
fn checksums_of_all_kinds_of_memory() {
    let bench = Bench::new();
    for len in [0, 9, (5 << 20) + 77] {
        let bytes = if len == 9 {
            b"123456789".to_vec()
        } else {
            noise(len, 5)
        };
        let expected = u64::from(crc_fast::crc32_iscsi(&bytes));
        for kind in bench.kinds() {
            let region = bench.region(kind, &bytes);
            assert_eq!(
                bench.run(Work::checksum(region.all())),
                Ok(expected),
                "{kind}"
            );
            assert_eq!(region.checksum(..).map(u64::from), Ok(expected), "{kind}");
        }
    }
}

/// A list without overlaps in the destination, its sources all over the pool.
fn list(count: usize, longest: usize, pool: usize, seed: u32) -> (Vec<Fragment>, usize) {
    let dice = noise(count * 8, seed);
    let dice = |index: usize| {
        u32::from_le_bytes(dice[index * 4..index * 4 + 4].try_into().unwrap()) as usize
    };
    let mut end = 0;
    let fragments = (0..count).map(|index| {
        let length = 1 + dice(index * 2) % longest;
        end += dice(index * 2 + 1) % 5;
        let source_offset = (dice(index * 2 + 1) % (pool - length)) as u64;
        let fragment = Fragment {
            source_offset,
            length: length as u32,
            destination_offset: end as u64,
        };
        end += length;
        fragment
    });
    (fragments.collect(), end)
}

#[test]
fn every_method_unpacks_between_all_kinds_of_memory() {
    let bench = Bench::new();
    let pool_bytes = noise(6 << 20, 11);
    let shapes = [
        (1, 1),
        (200, 300),
        (1500, 3000),
        (3000, 1448),
        (40_000, 60),
        (3, 3 << 20),
    ];
    for (count, longest) in shapes {
        let (fragments, end) = list(count, longest, pool_bytes.len(), count as u32);
        let mut expected = vec![1; end + 20];
        let mut scatter = ScatterList::new();
        for fragment in &fragments {
            let (from, to) = (
                fragment.source_offset as usize,
                7 + fragment.destination_offset as usize,
            );
            let length = fragment.length as usize;
            expected[to..to + length].copy_from_slice(&pool_bytes[from..from + length]);
            scatter.push(*fragment);
        }
        let received_bytes = fragments
            .iter()
            .map(|fragment| u64::from(fragment.length))
            .sum();
        let limits = Limits {
            pool_bytes: pool_bytes.len() as u64,
            destination_bytes: end as u64,
            received_bytes,
        };
        let mut descriptors = Descriptors::new();
        descriptors.build(&scatter, limits).unwrap();
        let descriptors = Arc::new(descriptors);
        for pool in bench.kinds().map(|kind| bench.region(kind, &pool_bytes)) {
            for kind in bench.kinds() {
                for with in UnpackMethod::ALL {
                    if !with.is_possible(pool.kind(), kind) {
                        continue;
                    }
                    let target = bench.region(kind, &vec![1; expected.len()]);
                    let work = Work::Unpack {
                        pool: BouncePool::from(pool.clone()),
                        descriptors: Arc::clone(&descriptors),
                        to: target.slice(7..7 + end).unwrap(),
                        with,
                    };
                    assert_eq!(bench.run(work), Ok(received_bytes));
                    let case =
                        format!("{count} fragments by {with} from {} to {kind}", pool.kind());
                    assert!(content(&target) == expected, "{case}");
                }
            }
        }
    }
}

#[test]
fn what_a_card_wrote_is_flushed_before_it_is_unpacked() {
    let bench = Bench::new();
    let memory = bench.region(bench.gpu.kind(), &noise(8192, 3));
    let target = bench.region(MemoryKind::Pinned, &[0; 100]);
    let fragment = Fragment {
        source_offset: 50,
        length: 100,
        destination_offset: 0,
    };
    let limits = Limits {
        pool_bytes: 8192,
        destination_bytes: 100,
        received_bytes: 100,
    };
    let mut descriptors = Descriptors::new();
    descriptors.build(&[fragment], limits).unwrap();
    let descriptors = Arc::new(descriptors);
    let unpack = |pool| {
        let before = fake::device_memory::workers_flushes();
        let work = Work::Unpack {
            pool,
            descriptors: Arc::clone(&descriptors),
            to: target.all(),
            with: UnpackMethod::Kernel,
        };
        assert_eq!(bench.run(work), Ok(100));
        fake::device_memory::workers_flushes() - before
    };
    assert_eq!(unpack(BouncePool::new(memory.all())), 0);
    assert_eq!(unpack(BouncePool::written_by_card(memory.all())), 1);
    assert_eq!(content(&target), noise(8192, 3)[50..150]);
}

#[test]
fn a_job_waits_for_its_fence_and_others_do_not_wait_for_it() {
    let bench = Bench::new();
    let source = bench.region(bench.gpu.kind(), &[1; 100]);
    let targets = [0, 1].map(|_| bench.region(MemoryKind::Pinned, &[0; 100]));
    let (stream, gate) = fake::gated_stream();
    let fence = Fence::take(&bench.gpu, fake::after_stream(stream)).unwrap();
    let (sink, ended) = channel();
    let copy = |to: &Region| Work::Copy {
        from: source.all(),
        to: to.all(),
    };
    bench.submit(1, copy(&targets[0]), Some(fence.clone()), &sink);
    bench.submit(2, copy(&targets[1]), None, &sink);
    assert_eq!(ended.recv_timeout(LIMIT), Ok((2, Ok(100))));
    assert_eq!(fence.is_reached(), Ok(false));
    assert!(!fence.was_reached());
    assert!(matches!(
        targets[0].read_to(0, &mut [0]),
        Err(MemoryError::Busy { .. })
    ));
    gate.store(true, Ordering::SeqCst);
    assert_eq!(ended.recv_timeout(LIMIT), Ok((1, Ok(100))));
    assert!(fence.was_reached());
    assert_eq!(content(&targets[0]), [1; 100]);
}

#[test]
fn a_worker_that_is_dropped_ends_the_jobs_that_wait() {
    let bench = Bench::new();
    let source = bench.region(MemoryKind::Host, &[1; 100]);
    let target = bench.region(bench.gpu.kind(), &[0; 100]);
    let (stream, _gate) = fake::gated_stream();
    let fence = Fence::take(&bench.gpu, fake::after_stream(stream)).unwrap();
    let (sink, ended) = channel();
    bench.submit(
        1,
        Work::Copy {
            from: source.all(),
            to: target.all(),
        },
        Some(fence),
        &sink,
    );
    drop(bench.worker);
    assert_eq!(
        ended.recv_timeout(LIMIT),
        Ok((1, Err(MemoryError::WorkerStopped)))
    );
    assert_eq!(content(&target), [0; 100]);
}

#[test]
fn a_refused_copy_ends_its_job_with_the_drivers_words() {
    let bench = Bench::new();
    // SAFETY: the fake driver refuses this address, so nothing is touched.
    let bad = unsafe { Region::from_cuda_raw(&bench.gpu, fake::BAD_ADDRESS, 100, Arc::new(())) };
    for kind in bench.kinds() {
        let source = bench.region(kind, &[1; 100]);
        let result = bench.run(Work::Copy {
            from: source.all(),
            to: bad.all(),
        });
        let called = |error: &CudaError| {
            matches!(
                error,
                CudaError::Call {
                    call: "cuMemcpyAsync",
                    ..
                }
            )
        };
        assert!(
            matches!(&result, Err(MemoryError::Cuda(error)) if called(error)),
            "{result:?}"
        );
        source.write_from(0, &[2; 100]).unwrap();
    }
    assert!(bench.run(Work::checksum(bad.all())).is_err());
    assert!(
        bad.lease(.., Access::Write).is_ok(),
        "the failed jobs still hold the memory"
    );
}

#[test]
fn slots_stay_taken_until_their_copies_have_landed() {
    let bench = Bench::new();
    let pool = bench.worker.slots_to_receive(64);
    let bytes = noise(64 * 1000, 17);
    let target = bench.region(bench.gpu.kind(), &vec![0; bytes.len()]);
    let (sink, ended) = channel();
    // Two rounds, so that slots are used again while the first copies may be in flight.
    for (index, part) in bytes.chunks(1000).enumerate() {
        let slot = loop {
            if let Some(slot) = pool.try_take() {
                break slot;
            }
            ended.recv_timeout(LIMIT).unwrap().1.unwrap();
        };
        slot.slice().write_from(part).unwrap();
        let to = target
            .slice(index * 1000..index * 1000 + part.len())
            .unwrap();
        let from = slot.slice().slice(..part.len()).unwrap();
        bench.submit(index as u64, Work::Copy { from, to }, None, &sink);
    }
    drop(sink);
    while let Ok((_, result)) = ended.recv_timeout(LIMIT) {
        result.unwrap();
    }
    assert!(content(&target) == bytes);
    assert_eq!(pool.free_slots(), pool.slots());
}

#[test]
fn more_jobs_than_events_all_end_once() {
    let bench = Bench::new();
    let source = bench.region(MemoryKind::Pinned, &noise(4000, 1));
    let target = bench.region(bench.gpu.kind(), &[0; 4000]);
    let (sink, ended) = channel();
    for token in 0..4000 {
        let at = token as usize;
        let (from, to) = (
            source.slice(at..=at).unwrap(),
            target.slice(at..=at).unwrap(),
        );
        bench.submit(token, Work::Copy { from, to }, None, &sink);
    }
    drop(sink);
    let mut tokens = Vec::new();
    while let Ok((token, result)) = ended.recv_timeout(LIMIT) {
        result.unwrap();
        tokens.push(token);
    }
    tokens.sort_unstable();
    assert_eq!(tokens, (0..4000).collect::<Vec<_>>());
    assert!(content(&target) == noise(4000, 1));
}

/// The caller's work may take long, and jobs that wait for it may fill the worker.
#[test]
fn a_worker_that_can_take_no_more_jobs_pauses_between_looks() {
    let bench = Bench::new();
    let source = bench.region(MemoryKind::Host, &[1; 10]);
    let (stream, gate) = fake::gated_stream();
    let fence = Fence::take(&bench.gpu, fake::after_stream(stream)).unwrap();
    let (sink, ended) = channel();
    // Once all of these were accepted, as many wait for their fence as may, and the queue is full.
    let jobs = 2 * ROOM as u64;
    let start = Instant::now();
    for token in 0..jobs {
        let mut job = Job {
            work: Work::checksum(source.all()),
            fence: Some(fence.clone()),
            sink: Arc::<Channel>::clone(&sink),
            token,
        };
        while let Err(refused) = bench.worker.submit_deferrable(job, usize::MAX) {
            assert!(matches!(refused.error, MemoryError::QueueFull { .. }));
            assert!(start.elapsed() < LIMIT);
            job = *refused.job;
            std::thread::yield_now();
        }
    }
    // 64 looks a round, and 100 us after each.
    let (start, before) = (Instant::now(), fake::looks(stream));
    while fake::looks(stream) - before < 64 * 1000 {
        assert!(start.elapsed() < LIMIT);
        // Not busy: the worker and this thread share the fake driver's lock.
        std::thread::sleep(Duration::from_millis(1));
    }
    let least = Duration::from_micros(100) * 998;
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
    gate.store(true, Ordering::SeqCst);
    for _ in 0..jobs {
        ended.recv_timeout(LIMIT).unwrap().1.unwrap();
    }
}

#[test]
fn out_of_memory_is_told_apart() {
    let gpu = Gpu::fake();
    let huge = Region::cuda(&gpu, 1 << 50);
    assert!(
        matches!(huge, Err(MemoryError::Cuda(CudaError::OutOfMemory { .. }))),
        "{huge:?}"
    );
}

/// The driver refuses other threads the query of an event while one captures, and breaks the
/// capture: a copy in flight must not look ended, and the program must not lose its graph.
#[test]
fn the_worker_does_not_disturb_a_graph_capture() {
    let bench = Bench::new();
    let bytes = noise(5 << 20, 9);
    let sources = bench.kinds().map(|kind| bench.region(kind, &bytes));
    let own = fake::capture_mode();
    for mode in [
        fake::Mode::Global,
        fake::Mode::ThreadLocal,
        fake::Mode::Relaxed,
    ] {
        for blocking in [true, false] {
            let current = bench.gpu.enter().unwrap();
            let stream = fake::begin_capture(blocking, mode);
            drop(current);
            let mut targets = Vec::new();
            for from in &sources {
                for kind in bench.kinds() {
                    let to = bench.empty(kind, bytes.len());
                    let moved = bench.run(Work::Copy {
                        from: from.all(),
                        to: to.all(),
                    });
                    assert_eq!(moved, Ok(bytes.len() as u64), "{} to {kind}", from.kind());
                    targets.push(to);
                }
            }
            drop(bench.empty(bench.gpu.kind(), 100));
            assert!(Region::wait_for_frees(LIMIT));
            assert!(fake::end_capture(stream), "{mode:?}, blocking: {blocking}");
            assert!(targets.iter().all(|to| content(to) == bytes));
        }
    }
    assert_eq!(fake::capture_mode(), own, "the thread's own mode is back");
}
