//! What copies of the program wait for, beside a kernel of its own and connections that come and go.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult, CUstream};
use tcpx::{Gpu, Region};

use crate::bench::{Bench, Outcome, close, compare, poisoned, random, region, text};
use crate::user::{User, check};

/// How long the program's kernel runs, unless everything is done before.
const KERNEL: Duration = Duration::from_secs(2);
/// How long connections come and go meanwhile, and how long copies are looked at without them.
const BUSY: Duration = Duration::from_millis(1500);
const ALONE: Duration = Duration::from_millis(400);
/// No copy may wait for longer than this, or than four times as long as without connections.
const LIMIT: Duration = Duration::from_millis(1);

/// In the announcement, by the persistent kernel, in one chunk, and in several.
const SIZES: [usize; 4] = [64, 100_000, 1 << 20, 9 << 20];

/// Copies of 4 KiB, one after the other, on a stream of the program.
struct Copies<'a> {
    user: &'a User,
    stream: CUstream,
    to: u64,
    from: Region,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Sync for Copies<'_> {}

/// What copies took: how many there were, how many over the limit, and the longest.
#[derive(Clone, Copy, Default)]
struct Waits {
    count: usize,
    over: usize,
    longest: Duration,
}

impl<'a> Copies<'a> {
    fn new(user: &'a User, gpu: &Gpu) -> Result<Self, String> {
        let mut stream = ptr::null_mut();
        user.inside(|| {
            // SAFETY: the pointer is valid for one handle.
            check("cuStreamCreate", unsafe {
                sys::cuStreamCreate(&raw mut stream, 1)
            })
        })?;
        Ok(Self {
            user,
            stream,
            to: user.alloc(4096)?,
            from: Region::pinned(gpu, 4096).map_err(text)?,
        })
    }

    /// Copies until `done` is set.
    fn watch(&self, done: &AtomicBool) -> Result<Waits, String> {
        let from = self.from.all().address();
        self.user.inside(|| {
            let mut waits = Waits::default();
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                // SAFETY: both ends have 4 KiB and stay.
                let issued =
                    unsafe { sys::cuMemcpyHtoDAsync_v2(self.to, from as _, 4096, self.stream) };
                check("cuMemcpyHtoDAsync", issued)?;
                loop {
                    // SAFETY: the stream stays.
                    match unsafe { sys::cuStreamQuery(self.stream) } {
                        CUresult::CUDA_ERROR_NOT_READY => {}
                        other => break check("cuStreamQuery", other)?,
                    }
                }
                let took = start.elapsed();
                waits.count += 1;
                waits.over += usize::from(took > LIMIT);
                waits.longest = waits.longest.max(took);
            }
            Ok(waits)
        })
    }

    /// As [`watch`](Self::watch), beside `work`.
    fn beside<R>(&self, work: impl FnOnce() -> Result<R, String>) -> Result<(Waits, R), String> {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| self.watch(&done));
            let result = work();
            done.store(true, Ordering::Relaxed);
            let waits = watch.join().map_err(|_| "a panic".to_owned())??;
            Ok((waits, result?))
        })
    }
}

/// Memory of the program that moves, which is there before and after all connections.
struct Memory {
    source: Region,
    target: Region,
    bytes: Vec<u8>,
}

/// A pair of connections that move all sizes, and end. What each way took: to be there, to move, to be gone.
fn come_and_go(bench: &Bench, memory: &Memory, in_order: bool) -> Result<[Duration; 3], String> {
    let start = Instant::now();
    let (sending, receiving) = bench.pair(1, None)?;
    let there = start.elapsed();
    for len in SIZES {
        let part = |region: &Region| region.slice(..len).map_err(text);
        let receive = receiving.receive(part(&memory.target)?, 1).start();
        let receive = receive.map_err(text)?;
        let send = sending.send(part(&memory.source)?, 1).start();
        send.map_err(text)?.wait().map_err(text)?;
        receive.wait().map_err(text)?;
    }
    let moved = start.elapsed();
    if in_order {
        close(sending, receiving)?;
    } else {
        // In the middle of a transfer.
        let receive = receiving.receive(memory.target.all(), 2).start();
        let send = sending.send(memory.source.all(), 2).start();
        drop(sending);
        // They end somehow.
        drop(send.map_err(text)?.wait());
        drop(receive.map_err(text)?.wait());
    }
    Ok([there, moved - there, start.elapsed() - moved])
}

/// A kernel of the program runs for two seconds. Meanwhile connections come, move and go, and no copy of the program
/// waits for them.
pub(crate) fn connections_come_and_go(bench: &Bench) -> Outcome {
    let len = SIZES[SIZES.len() - 1];
    let bytes = random(len);
    let memory = Memory {
        source: region(Some(&bench.from), &bytes)?,
        target: poisoned(Some(&bench.to), len)?,
        bytes,
    };
    let user = bench.user(0)?;
    let copies = Copies::new(user, &bench.from)?;
    // The first ones set everything up; this process has had some if other checks came before.
    let first = come_and_go(bench, &memory, true)?;
    come_and_go(bench, &memory, false)?;
    let flag = user.flag()?;
    user.spin(user.stream, &flag, KERNEL.as_nanos() as u64)?;
    let start = Instant::now();
    let outcome = (|| {
        let (alone, ()) = copies.beside(|| {
            thread::sleep(ALONE);
            Ok(())
        })?;
        let (beside, pairs) = copies.beside(|| {
            let mut pairs = Vec::new();
            while start.elapsed() < ALONE + BUSY {
                pairs.push(come_and_go(bench, &memory, pairs.len() % 4 != 3)?);
            }
            Ok(pairs)
        })?;
        Ok((alone, beside, pairs))
    })();
    let ran = start.elapsed();
    flag.raise();
    user.wait(user.stream)?;
    let (alone, beside, mut pairs) = outcome.map_err(|error: String| error)?;
    if ran < KERNEL && flag.answer() != 1 {
        return Err("the kernel did not run all the time".to_owned());
    }
    compare(&memory.target, &memory.bytes)?;
    pairs.sort();
    let count = pairs.len();
    let [there, moved, gone] = pairs[count / 2];
    let report = format!(
        "{count} pairs beside a kernel ({there:.1?} to be there, {moved:.1?} to move, {gone:.1?} to be gone; the first one \
         {:.1?}, {:.1?}, {:.1?}); {} copies, the longest {:.0?}, {} over {LIMIT:?}; without connections {} copies, \
         the longest {:.0?}",
        first[0],
        first[1],
        first[2],
        beside.count,
        beside.longest,
        beside.over,
        alone.count,
        alone.longest
    );
    match beside.longest <= LIMIT.max(alone.longest * 4) {
        true => Ok(report),
        false => Err(report),
    }
}
