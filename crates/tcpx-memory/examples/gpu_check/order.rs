//! Order with the program's own GPU work, and independence from it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUstream, CUstreamCaptureMode};
use tcpx_memory::{After, BouncePool, CudaError, Fence, MemoryKind, Region, UnpackMethod, Work};
use tcpx_wire::Fragment;

use crate::support::{Bench, Outcome, POISON, Random, same, settle, text, unpack_work};
use crate::user::{LEGACY, User, after};

const LEN: usize = 1 << 20;
const DELAY: Duration = Duration::from_millis(60);

/// Fills memory slowly on a stream; a copy of it that waits for what `after` names must carry the
/// new bytes, whatever its destination.
fn ordered(
    bench: &Bench,
    stream: CUstream,
    after: impl Fn(&User) -> Result<After, String>,
) -> Outcome {
    let user = bench.user()?;
    for (value, kind) in (0x11..).zip(bench.kinds()) {
        let source = bench.region_of(bench.gpu.kind(), &vec![POISON; LEN])?;
        let target = bench.region(kind, LEN)?;
        settle()?;
        user.slow_fill(
            stream,
            source.all().address(),
            LEN,
            value,
            DELAY.as_nanos() as u64,
        )?;
        let fence = Fence::take(&bench.gpu, after(user)?).map_err(text)?;
        if fence.is_reached().map_err(text)? {
            return Err("the fence was reached before the kernel had ended".to_owned());
        }
        bench.run(
            Work::Copy {
                from: source.all(),
                to: target.all(),
            },
            Some(fence),
        )?;
        same(&target, &vec![value; LEN])?;
    }
    Ok("behind a kernel of 60 ms, to 3 kinds of memory".to_owned())
}

pub(crate) fn after_stream(bench: &Bench) -> Outcome {
    let stream = bench.user()?.stream;
    ordered(bench, stream, |_| Ok(after(stream)))
}

pub(crate) fn after_event(bench: &Bench) -> Outcome {
    let stream = bench.user()?.stream;
    ordered(bench, stream, |user| user.record(stream))
}

pub(crate) fn after_default_streams(bench: &Bench) -> Outcome {
    ordered(bench, LEGACY, |_| Ok(After::DefaultStreams))
}

/// A job behind a slow kernel does not hold up one that waits for nothing.
pub(crate) fn others_go_on(bench: &Bench) -> Outcome {
    let user = bench.user()?;
    let source = bench.region_of(bench.gpu.kind(), &[1; 4096])?;
    let (slow, quick) = (
        bench.region(bench.gpu.kind(), 4096)?,
        bench.region(bench.gpu.kind(), 4096)?,
    );
    let scratch = user.alloc(16)?;
    settle()?;
    user.slow_fill(user.stream, scratch, 16, 1, 200_000_000)?;
    let fence = Fence::take(&bench.gpu, after(user.stream)).map_err(text)?;
    let jobs = bench.jobs();
    let start = Instant::now();
    let copy = |to: &Region| Work::Copy {
        from: source.all(),
        to: to.all(),
    };
    jobs.submit(1, copy(&slow), Some(fence.clone()))?;
    jobs.submit(2, copy(&quick), None)?;
    let (first, result) = jobs.next()?;
    let (took, reached) = (start.elapsed(), fence.is_reached().map_err(text)?);
    result.map_err(text)?;
    if first != 2 || reached {
        return Err(format!(
            "job {first} ended first, after {took:?}; the fence was reached: {reached}"
        ));
    }
    let (second, result) = jobs.next()?;
    result.map_err(text)?;
    user.free(scratch)?;
    Ok(format!(
        "job 2 after {took:?}, job {second} after {:?}",
        start.elapsed()
    ))
}

/// A kernel that spins until our transfers have completed must not stop them, on any stream.
pub(crate) fn spinning_kernel(bench: &Bench) -> Outcome {
    let user = bench.user()?;
    let mut random = Random::new();
    let bytes = random.bytes(6 << 20);
    let regions = bench.kinds().map(|kind| bench.region_of(kind, &bytes));
    let mut targets = Vec::new();
    for from in &regions {
        for kind in bench.kinds() {
            targets.push((
                from.as_ref().map_err(text)?,
                bench.region(kind, bytes.len())?,
            ));
        }
    }
    let list: Vec<Fragment> = (0..4000)
        .map(|index| Fragment {
            source_offset: index * 1448 + 3,
            length: 1448,
            destination_offset: (3999 - index) * 1448 + 5,
        })
        .collect();
    let mut report = Vec::new();
    for (name, stream) in [
        ("own stream", user.stream),
        ("legacy default stream", LEGACY),
    ] {
        let flag = user.flag()?;
        settle()?;
        user.spin(stream, &flag, 20_000_000_000)?;
        let start = Instant::now();
        let outcome = all_jobs(bench, &targets, &list);
        let took = start.elapsed();
        flag.raise();
        user.wait(stream)?;
        outcome.map_err(|error| format!("{name}: {error}"))?;
        if flag.answer() != 1 {
            return Err(format!(
                "{name}: the kernel gave up before the jobs had ended"
            ));
        }
        report.push(format!("{name} {took:.0?}"));
    }
    for (source, target) in &targets {
        let mut expected = bytes.clone();
        for fragment in &list {
            let (from, to) = (
                fragment.source_offset as usize,
                fragment.destination_offset as usize,
            );
            expected[to..to + 1448].copy_from_slice(&bytes[from..from + 1448]);
        }
        same(target, &expected).map_err(|error| format!("from {}: {error}", source.kind()))?;
    }
    Ok(report.join(", "))
}

/// While the program captures a graph, every kind of job ends well, memory comes and goes, and the
/// program gets its graph: of both kinds of streams, in every mode. A fence on the captured stream
/// is refused, and so is one on the default streams where that synchronises with them.
pub(crate) fn graph_capture(bench: &Bench) -> Outcome {
    use CUstreamCaptureMode::{
        CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED,
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    };
    let user = bench.user()?;
    let bytes = Random::new().bytes(6 << 20);
    let fragment = Fragment {
        source_offset: 1,
        length: 1448,
        destination_offset: 7,
    };
    let mut expected = bytes.clone();
    expected[7..7 + 1448].copy_from_slice(&bytes[1..=1448]);
    let sources = bench.kinds().map(|kind| bench.region_of(kind, &bytes));
    for mode in [
        CU_STREAM_CAPTURE_MODE_GLOBAL,
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CU_STREAM_CAPTURE_MODE_RELAXED,
    ] {
        for (stream, blocking) in [(user.stream, false), (user.blocking, true)] {
            let mut targets = Vec::new();
            user.capture(stream, mode, || {
                refused(bench, stream, blocking)?;
                for source in &sources {
                    for to in bench.kinds() {
                        let source = source.as_ref().map_err(text)?;
                        let target = bench.region(to, bytes.len())?;
                        all_jobs(bench, &[(source, target.clone())], &[fragment])?;
                        targets.push(target);
                    }
                }
                drop(bench.region(bench.gpu.kind(), bytes.len())?);
                settle()
            })
            .map_err(|error| format!("{mode:?}, blocking: {blocking}: {error}"))?;
            for target in targets {
                same(&target, &expected)?;
            }
        }
    }
    Ok("all jobs between 3 kinds of memory, 2 kinds of streams, 3 modes".to_owned())
}

/// A hundred captures with a kernel in each, of both kinds of streams, while another thread copies
/// without a pause.
pub(crate) fn captures_beside_copies(bench: &Bench) -> Outcome {
    const CAPTURES: usize = 100;
    let user = bench.user()?;
    let bytes = Random::new().bytes(1 << 20);
    let source = bench.region_of(bench.gpu.kind(), &bytes)?;
    let target = bench.region(MemoryKind::Host, bytes.len())?;
    let scratch = user.alloc(16)?;
    let over = AtomicBool::new(false);
    let copied = std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            let mut copies = 0;
            while !over.load(Ordering::Relaxed) {
                let work = Work::Copy {
                    from: source.all(),
                    to: target.all(),
                };
                bench.run(work, None)?;
                let memory = bench.region(bench.gpu.kind(), 100_000)?;
                drop(memory);
                copies += 1;
            }
            Ok::<_, String>(copies)
        });
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let captured = (0..CAPTURES).try_for_each(|number| {
            let blocking = number % 2 == 1;
            let stream = if blocking { user.blocking } else { user.stream };
            let capture = user.capture(stream, mode, || {
                user.slow_fill(stream, scratch, 16, 1, 0)?;
                refused(bench, stream, blocking)?;
                user.slow_fill(stream, scratch, 16, 2, 0)
            });
            capture.map_err(|error| format!("capture {number}, blocking: {blocking}: {error}"))
        });
        over.store(true, Ordering::Relaxed);
        let copied = copier
            .join()
            .map_err(|_| "the copier panicked".to_owned())?;
        captured.and(copied)
    })?;
    same(&target, &bytes)?;
    user.free(scratch)?;
    Ok(format!("{CAPTURES} captures, {copied} copies"))
}

/// Fences that would get into a graph, or break it, are refused.
fn refused(bench: &Bench, stream: CUstream, blocking: bool) -> Result<(), String> {
    let device = bench.gpu.ordinal();
    let own = Fence::take(&bench.gpu, after(stream)).map(drop);
    if own != Err(CudaError::StreamCaptured { device }) {
        return Err(format!("on the captured stream: {own:?}"));
    }
    let default = Fence::take(&bench.gpu, After::DefaultStreams).map(drop);
    let wanted = match blocking {
        true => Err(CudaError::DefaultStreamsCaptured { device }),
        false => Ok(()),
    };
    match default == wanted {
        true => Ok(()),
        false => Err(format!("on the default streams: {default:?}")),
    }
}

/// A copy, an unpack by every method, and a checksum for every pair of memories.
fn all_jobs(bench: &Bench, targets: &[(&Region, Region)], list: &[Fragment]) -> Result<(), String> {
    for (source, target) in targets {
        let context = |error| format!("{} to {}: {error}", source.kind(), target.kind());
        bench
            .run(
                Work::Copy {
                    from: source.all(),
                    to: target.all(),
                },
                None,
            )
            .map_err(context)?;
        for with in UnpackMethod::ALL {
            if with.is_possible(source.kind(), target.kind()) {
                let pool = BouncePool::from((*source).clone());
                let work = unpack_work(&pool, target.all(), with, list)?;
                bench
                    .run(work, None)
                    .map_err(|error| context(format!("{with}: {error}")))?;
            }
        }
        bench
            .run(Work::checksum(target.all()), None)
            .map_err(context)?;
    }
    let slot = bench.worker.slots_to_receive(1).try_take();
    let slot = slot.ok_or_else(|| "no free slot".to_owned())?;
    debug_assert_eq!(slot.slice().kind(), MemoryKind::Pinned);
    Ok(())
}
