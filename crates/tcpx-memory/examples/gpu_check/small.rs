//! Small copies, most of them by the kernel that stays on the GPU, against the driver's own copies.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use tcpx_memory::{After, Fence, Region, RegionSlice, SmallCopies, SmallRead, Work};

use crate::copies::crc32c;
use crate::support::{Bench, Outcome, POISON, Random, limit, same, same_bytes, settle, text};
use crate::user::{LEGACY, User, check};

const MOST: usize = SmallCopies::MOST_BYTES;
/// Writes of the same bytes, one behind the other.
const REPEATS: usize = 6;

fn copies(bench: &Bench) -> Result<SmallCopies, String> {
    let copies = SmallCopies::new(&bench.gpu).map_err(text)?;
    let copies = copies.ok_or_else(|| "no memory for small copies is left".to_owned())?;
    Ok(copies.with_persistent_kernel())
}

/// Writes and waits for the end.
fn write(small: &mut SmallCopies, to: &RegionSlice, bytes: &[u8]) -> Result<(), String> {
    let start = Instant::now();
    if !small.start_write(to, bytes, None, 7).map_err(text)? {
        return Err("no write was started".to_owned());
    }
    let mut ended = Vec::new();
    while ended.is_empty() {
        small.poll(&mut ended);
        if start.elapsed() > limit() {
            return Err("a write did not end".to_owned());
        }
    }
    match ended.pop() {
        Some((7, Ok(count))) if count == bytes.len() as u64 => Ok(()),
        other => Err(format!("a write ended with {other:?}")),
    }
}

fn read(
    small: &mut SmallCopies,
    from: &RegionSlice,
    fence: Option<&Fence>,
) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(from.len());
    match small
        .read(from, fence, limit(), 0, &mut bytes)
        .map_err(text)?
    {
        SmallRead::Whole => Ok(bytes),
        other => Err(format!("a read did not end: {other:?}")),
    }
}

/// Random lengths and places, both ways: what one wrote the driver reads, and the other way round.
pub(crate) fn both_ways(bench: &Bench) -> Outcome {
    let (mut small, mut random) = (copies(bench)?, Random::new());
    let region = bench.region(bench.gpu.kind(), MOST + 256)?;
    let rounds = 3000;
    for round in 0..rounds {
        let most = [16, 300, 5000, MOST][random.below(4)];
        let (len, at) = (random.between(1, most), random.below(256));
        let slice = region.slice(at..at + len).map_err(text)?;
        let context = |error| format!("round {round}, {len} bytes at {at}: {error}");
        let mut whole = vec![POISON; region.len()];
        region.write_from(0, &whole).map_err(text)?;
        let bytes = random.bytes(len);
        // Several that follow each other closely, so that the persistent kernel comes: the
        // program's own access between rounds takes too long for that.
        for _ in 0..REPEATS {
            write(&mut small, &slice, &bytes).map_err(context)?;
        }
        whole[at..at + len].copy_from_slice(&bytes);
        same(&region, &whole).map_err(context)?;
        let fresh = random.bytes(len);
        region.write_from(at, &fresh).map_err(text)?;
        let got = read(&mut small, &slice, None).map_err(context)?;
        same_bytes(&got, &fresh).map_err(context)?;
    }
    told(&small, (REPEATS + 1) * rounds)
}

/// What a kernel of the program has just written is read, and what was just written a kernel reads:
/// at the same places again and again, so that nothing may come from a cache.
pub(crate) fn fresh_bytes(bench: &Bench) -> Outcome {
    let (mut small, mut random) = (copies(bench)?, Random::new());
    let user = bench.user()?;
    let region = bench.region_of(bench.gpu.kind(), &[POISON; MOST])?;
    let rounds = 2000;
    for round in 0..rounds {
        let value = round as u8;
        let len = [8, 4096, MOST][round % 3];
        user.slow_fill(LEGACY, region.all().address(), len, value, 0)?;
        let fence = Fence::take(&bench.gpu, After::DefaultStreams).map_err(text)?;
        let slice = region.slice(..len).map_err(text)?;
        let got = read(&mut small, &slice, Some(&fence))?;
        same_bytes(&got, &vec![value; len]).map_err(|error| format!("round {round}: {error}"))?;
        let bytes = random.bytes(len);
        write(&mut small, &slice, &bytes)?;
        let sum = bench.run(Work::checksum(slice), None)?;
        if sum != u64::from(crc32c(&bytes)) {
            return Err(format!("round {round}: a kernel saw other bytes"));
        }
    }
    told(&small, 2 * rounds)
}

/// Kernels of the program that take every multiprocessor and spin do not stop small copies. They do
/// delay them: the driver's own take a turn of the GPU's time then, which is milliseconds.
pub(crate) fn full_gpu(bench: &Bench) -> Outcome {
    let user = bench.user()?;
    let mut small = copies(bench)?;
    let region = bench.region(bench.gpu.kind(), 4096)?;
    let mut random = Random::new();
    let mut report = Vec::new();
    for (name, is_here) in [("before it comes", false), ("while it is there", true)] {
        let flag = user.flag()?;
        if is_here {
            warm(&mut small, &region, &mut random)?;
        }
        settle()?;
        let called = Instant::now();
        user.spin_everywhere(user.stream, &flag, 20_000_000_000)?;
        let start = Instant::now();
        let mut longest = (Duration::ZERO, 0);
        let outcome = (0..40).try_for_each(|round| {
            let bytes = random.bytes(4096);
            let start = Instant::now();
            write(&mut small, &region.all(), &bytes)?;
            let got = read(&mut small, &region.all(), None)?;
            longest = longest.max((start.elapsed(), round));
            same_bytes(&got, &bytes)
        });
        let took = start.elapsed();
        flag.raise();
        user.wait(user.stream)?;
        outcome.map_err(|error| format!("{name}: {error}"))?;
        if flag.answer() != 1 {
            return Err(format!(
                "{name}: the kernel gave up before the copies had ended; its launch took {:.0?}, \
                 the copies {took:.0?}, a write and a read {:.0?} at most, in round {}",
                start - called,
                longest.0,
                longest.1
            ));
        }
        report.push(format!("{name} 80 copies in {took:.0?}"));
    }
    Ok(report.join(", "))
}

/// Has the persistent kernel come.
fn warm(small: &mut SmallCopies, region: &Region, random: &mut Random) -> Result<(), String> {
    (0..50).try_for_each(|_| write(small, &region.all(), &random.bytes(region.len())))
}

/// A program that waits for its whole GPU, or gives memory back, goes on within a moment while
/// small copies follow each other without a pause; and persistent kernels that are there when their
/// owner goes leave in time.
pub(crate) fn whole_device(bench: &Bench) -> Outcome {
    let user = bench.user()?;
    let done = AtomicBool::new(false);
    let (longest, copied) = thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            let (mut random, mut copied) = (Random::new(), 0);
            while !done.load(Ordering::Relaxed) {
                let mut small = copies(bench)?;
                let region = bench.region(bench.gpu.kind(), 64)?;
                for _ in 0..2000 {
                    let bytes = random.bytes(64);
                    write(&mut small, &region.all(), &bytes)?;
                    same_bytes(&read(&mut small, &region.all(), None)?, &bytes)?;
                }
                copied += small.persistent_copies();
            }
            Ok::<_, String>(copied)
        });
        let longest = wait_again_and_again(user);
        done.store(true, Ordering::Relaxed);
        let copied = traffic.join().map_err(|_| "the traffic panicked")??;
        Ok::<_, String>((longest?, copied))
    })?;
    if longest > Duration::from_secs(1) {
        return Err(format!("the device was waited for {longest:?}"));
    }
    Ok(format!(
        "longest wait {longest:.0?}, {copied} copies by the persistent meanwhile"
    ))
}

fn wait_again_and_again(user: &User) -> Result<Duration, String> {
    let mut longest = Duration::ZERO;
    for _ in 0..500 {
        let start = Instant::now();
        user.inside(|| {
            // SAFETY: the context is current and has no capture.
            check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
        })?;
        let scratch = user.alloc(1 << 20)?;
        user.free(scratch)?;
        longest = longest.max(start.elapsed());
    }
    Ok(longest)
}

/// How many of the copies the persistent kernel made: most of them, where nothing else is on the
/// GPU.
fn told(small: &SmallCopies, all: usize) -> Outcome {
    let by = small.persistent_copies();
    if by < all as u64 / 4 {
        return Err(format!("the persistent made {by} of {all} copies"));
    }
    Ok(format!("{all} copies, {by} by the persistent"))
}
