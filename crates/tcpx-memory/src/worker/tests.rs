//! The host worker against plain oracles.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use proptest::prelude::*;
use tcpx_wire::{Descriptors, Fragment, Limits, ScatterList};

use super::*;
use crate::bounce::{BouncePool, UnpackMethod};
use crate::job::{CompletionSink, Work};
use crate::lease::Access;
use crate::region::Region;

const LIMIT: Duration = Duration::from_secs(60);

struct Channel(Sender<(u64, Result<u64, MemoryError>)>);

impl CompletionSink for Channel {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        drop(self.0.send((token, result)));
    }
}

type Completions = Receiver<(u64, Result<u64, MemoryError>)>;

fn channel() -> (Arc<Channel>, Completions) {
    let (sender, receiver) = mpsc::channel();
    (Arc::new(Channel(sender)), receiver)
}

fn job(work: Work, sink: &Arc<Channel>, token: u64) -> Job {
    Job {
        work,
        fence: None,
        sink: Arc::<Channel>::clone(sink),
        token,
    }
}

fn run(work: Work) -> Result<u64, MemoryError> {
    let (sink, completions) = channel();
    CopyWorker::host()?.submit(job(work, &sink, 7))?;
    let (token, result) = completions.recv_timeout(LIMIT).unwrap();
    assert_eq!(token, 7);
    result
}

fn region(bytes: &[u8]) -> Region {
    let region = Region::host(bytes.len()).unwrap();
    region.write_from(0, bytes).unwrap();
    region
}

fn content(region: &Region) -> Vec<u8> {
    region.with_bytes(.., <[u8]>::to_vec).unwrap()
}

#[test]
fn copies_move_exactly_their_bytes() {
    let from = region(b"0123456789");
    let to = region(&[b'.'; 10]);
    let work = Work::Copy {
        from: from.slice(2..6).unwrap(),
        to: to.slice(5..9).unwrap(),
    };
    assert_eq!(run(work), Ok(4));
    assert_eq!(content(&to), b".....2345.");
}

#[test]
fn checksums_arrive_as_results() {
    let bytes = region(b"xx123456789");
    assert_eq!(
        run(Work::checksum(bytes.slice(2..).unwrap())),
        Ok(0xE306_9283)
    );
}

#[test]
fn jobs_that_do_not_fit_come_back() {
    let (from, to) = (region(&[1; 10]), region(&[2; 10]));
    let work = Work::Copy {
        from: from.slice(..3).unwrap(),
        to: to.slice(..4).unwrap(),
    };
    assert_eq!(
        run(work),
        Err(MemoryError::LengthMismatch { from: 3, to: 4 })
    );

    let lease = to.lease(.., Access::Write).unwrap();
    let (sink, _completions) = channel();
    let plain = Work::Copy {
        from: from.all(),
        to: to.all(),
    };
    let refused = CopyWorker::host()
        .unwrap()
        .submit(job(plain, &sink, 3))
        .unwrap_err();
    assert!(matches!(refused.error, MemoryError::Busy { .. }));
    assert_eq!(refused.job.token, 3);
    assert_eq!(
        run(Work::Copy {
            from: from.all(),
            to: lease.all()
        }),
        Ok(10)
    );
    drop(lease);
    assert_eq!(content(&to), [1; 10]);
}

#[test]
fn when_a_job_has_ended_its_memory_is_free() {
    let (from, to) = (region(&[1; 10]), region(&[2; 10]));
    for _ in 0..100 {
        run(Work::Copy {
            from: from.all(),
            to: to.all(),
        })
        .unwrap();
        to.write_from(0, &[3; 10]).unwrap();
    }
}

/// Keeps a worker from its next job until the test lets go of the sender.
struct Gate(Mutex<Receiver<()>>);

impl CompletionSink for Gate {
    fn complete(&self, _: u64, _: Result<u64, MemoryError>) {
        let _ = lock(&self.0).recv();
    }
}

#[test]
fn every_job_is_taken_and_ends_in_order_however_little_room() {
    for room in [1, 2, 7, ROOM] {
        let worker = CopyWorker::start_host(room).unwrap();
        let source = region(&[9; 64]);
        let (shut, gate) = mpsc::channel();
        let first = Job {
            work: Work::checksum(source.all()),
            fence: None,
            sink: Arc::new(Gate(Mutex::new(gate))),
            token: 0,
        };
        worker.submit(first).unwrap();
        let (sink, completions) = channel();
        let jobs = 2 * ROOM as u64;
        for token in 0..jobs {
            let work = Work::checksum(source.all());
            worker.submit(job(work, &sink, token)).unwrap();
        }
        let deferrable = job(Work::checksum(source.all()), &sink, jobs);
        let refused = worker
            .submit_deferrable(deferrable, usize::MAX)
            .unwrap_err();
        assert!(
            matches!(refused.error, MemoryError::QueueFull { jobs, .. } if jobs == room),
            "{}",
            refused.error
        );
        assert_eq!(refused.job.token, jobs);
        drop(refused);
        drop((shut, sink));
        for token in 0..jobs {
            let (ended, result) = completions.recv_timeout(LIMIT).unwrap();
            assert_eq!(ended, token, "of {room}");
            result.unwrap();
        }
        assert!(completions.recv_timeout(LIMIT).is_err(), "one more ended");
    }
}

#[test]
fn a_sink_that_panics_costs_only_itself() {
    struct Panics;
    impl CompletionSink for Panics {
        fn complete(&self, _: u64, _: Result<u64, MemoryError>) {
            panic!("expected by the test");
        }
    }
    let source = region(&[9; 64]);
    let work = Work::checksum(source.all());
    let bad = Job {
        work: work.clone(),
        fence: None,
        sink: Arc::new(Panics),
        token: 0,
    };
    CopyWorker::host().unwrap().submit(bad).unwrap();
    assert!(run(work).is_ok());
}

#[test]
fn a_sink_that_panics_when_it_is_let_go_of_costs_nobody() {
    struct Explosive(Sender<u64>);
    impl CompletionSink for Explosive {
        fn complete(&self, token: u64, _: Result<u64, MemoryError>) {
            self.0.send(token).ok();
        }
    }
    impl Drop for Explosive {
        fn drop(&mut self) {
            assert!(thread::panicking(), "expected by the test");
        }
    }
    let worker = CopyWorker::start_host(ROOM).unwrap();
    let source = region(&[9; 64]);
    let work = Work::checksum(source.all());
    let (told, ended) = mpsc::channel();
    let bad = Job {
        work: work.clone(),
        fence: None,
        sink: Arc::new(Explosive(told)),
        token: 3,
    };
    worker.submit(bad).unwrap();
    assert_eq!(ended.recv_timeout(LIMIT), Ok(3));
    let (sink, completions) = channel();
    worker.submit(job(work, &sink, 4)).unwrap();
    assert!(matches!(completions.recv_timeout(LIMIT), Ok((4, Ok(_)))));
}

#[test]
fn dropping_the_worker_lets_accepted_jobs_end() {
    let worker = CopyWorker::start_host(ROOM).unwrap();
    let source = region(&[9; 4096]);
    let (sink, completions) = channel();
    for token in 0..4000 {
        let work = Work::checksum(source.all());
        worker.submit(job(work, &sink, token)).unwrap();
    }
    drop((worker, sink));
    let mut tokens = Vec::new();
    while let Ok((token, result)) = completions.recv_timeout(LIMIT) {
        assert!(result.is_ok(), "{result:?}");
        tokens.push(token);
    }
    assert_eq!(tokens, (0..4000).collect::<Vec<_>>());
}

#[test]
fn all_who_ask_share_one_worker() {
    let first = CopyWorker::host().unwrap();
    assert!(Arc::ptr_eq(&first, &CopyWorker::host().unwrap()));
}

#[test]
fn descriptors_made_for_other_memory_are_refused() {
    let pool = BouncePool::from(region(&[1; 100]));
    let to = region(&[0; 100]);
    let piece = Fragment {
        source_offset: 90,
        length: 11,
        destination_offset: 0,
    };
    let limits = Limits {
        pool_bytes: 200,
        destination_bytes: 200,
        received_bytes: 11,
    };
    let mut descriptors = Descriptors::new();
    descriptors.build(&[piece], limits).unwrap();
    let work = |pool: &BouncePool, to| Work::Unpack {
        pool: pool.clone(),
        descriptors: Arc::new(descriptors.clone()),
        to,
        with: UnpackMethod::Kernel,
    };
    let refused = run(work(&pool, to.all())).unwrap_err();
    assert!(
        matches!(
            refused,
            MemoryError::SourceOutOfBounds {
                end: 101,
                len: 100,
                ..
            }
        ),
        "{refused}"
    );
    let pool = BouncePool::from(region(&[1; 101]));
    assert_eq!(run(work(&pool, to.all())), Ok(11));
    let refused = run(work(&pool, to.slice(..10).unwrap())).unwrap_err();
    assert!(
        matches!(refused, MemoryError::DestinationOutOfBounds { len: 10, .. }),
        "{refused}"
    );
}

fn fragments() -> impl Strategy<Value = Vec<(u32, u16, u16)>> {
    let length = prop_oneof![1..40_u16, 1..2000_u16, Just(1448_u16), Just(4096_u16)];
    // Where in the pool, how many bytes, and how many to leave out before them in the destination.
    prop::collection::vec((0..60_000_u32, length, 0..20_u16), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_method_unpacks_what_the_list_says(
        fragments in fragments(),
        order in any::<u64>(),
        pool_start in 0..16_usize,
        to_start in 0..16_usize,
    ) {
        let bytes: Vec<u8> = (0..66_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let pool = region(&bytes);
        let pool_slice = pool.slice(pool_start..).unwrap();
        let mut list = Vec::new();
        let mut end = 0_u64;
        for &(source, length, gap) in &fragments {
            end += u64::from(gap);
            list.push(Fragment {
                source_offset: source.into(),
                length: length.into(),
                destination_offset: end,
            });
            end += u64::from(length);
        }
        list.sort_by_key(|fragment| fragment.destination_offset.wrapping_mul(order | 1));
        let mut expected = vec![0xA5; to_start + end as usize + 32];
        let mut scatter = ScatterList::new();
        for fragment in &list {
            let from = pool_start + fragment.source_offset as usize;
            let to = to_start + fragment.destination_offset as usize;
            let length = fragment.length as usize;
            expected[to..to + length].copy_from_slice(&bytes[from..from + length]);
            scatter.push(*fragment);
        }
        let limits = Limits {
            pool_bytes: pool_slice.len() as u64,
            destination_bytes: end,
            received_bytes: list.iter().map(|fragment| u64::from(fragment.length)).sum(),
        };
        let mut descriptors = Descriptors::new();
        descriptors.build(&scatter, limits).unwrap();
        let descriptors = Arc::new(descriptors);
        for with in UnpackMethod::ALL {
            let to = region(&vec![0xA5; expected.len()]);
            let work = Work::Unpack {
                pool: BouncePool::new(pool_slice.clone()),
                descriptors: Arc::clone(&descriptors),
                to: to.slice(to_start..to_start + end as usize).unwrap(),
                with,
            };
            prop_assert_eq!(run(work), Ok(limits.received_bytes));
            prop_assert!(content(&to) == expected, "{} unpacked something else", with);
        }
    }
}
