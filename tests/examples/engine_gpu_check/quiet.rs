//! What copies of the program wait for, beside a kernel of its own and connections that come and
//! go.

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

/// A pair of connections that move all sizes, and end. What each way took: to be there, to move, to
/// be gone.
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

/// Resident memory of this process, in MiB.
fn resident() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(text)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next());
    let kibibytes: u64 = kibibytes.ok_or("no VmRSS")?.parse().map_err(text)?;
    Ok(kibibytes / 1024)
}

/// What connections on a GPU take to be there, the first of a process and the next, and the host
/// memory of many. Only the first check of a process sees a first connection.
pub(crate) fn set_up(bench: &Bench) -> Outcome {
    const PAIRS: usize = 16;
    let before = resident()?;
    let timed = |gpus| {
        let start = Instant::now();
        let pair = bench.pair_on(1, None, gpus)?;
        Ok::<_, String>((start.elapsed(), pair))
    };
    // What the first connection of a process takes, wherever its memory is.
    let (without, (sending, receiving)) = timed(false)?;
    close(sending, receiving)?;
    let (first, pair) = timed(true)?;
    let (mut next, mut crowd) = (Vec::new(), vec![pair]);
    while crowd.len() < PAIRS {
        let (took, pair) = timed(true)?;
        next.push(took);
        crowd.push(pair);
    }
    next.sort();
    let many = resident()?.saturating_sub(before);
    for (sending, receiving) in crowd {
        close(sending, receiving)?;
    }
    Ok(format!(
        "the first pair of all {without:.1?}, then the first on a GPU {first:.1?}, the next {:.1?} (median of {}); {} connections take {many} MiB of host memory",
        next[next.len() / 2],
        next.len(),
        2 * PAIRS
    ))
}

/// The program resets the GPU in the middle of transfers: each ends somehow, and so does the
/// process, without a signal.
pub(crate) fn device_reset(bench: &Bench) -> Outcome {
    let len = 64 << 20;
    let bytes = random(len);
    let memory = Memory {
        source: region(Some(&bench.from), &bytes)?,
        target: poisoned(Some(&bench.to), len)?,
        bytes,
    };
    let (sending, receiving) = bench.pair(1, None)?;
    let reset = AtomicBool::new(false);
    let (whole, failed) = thread::scope(|scope| {
        let transfers = scope.spawn(|| {
            let (mut whole, mut failed) = (0, None);
            while failed.is_none() {
                let over = reset.load(Ordering::SeqCst);
                let receive = receiving.receive(memory.target.slice(..len).map_err(text)?, 1);
                let receive = receive.start().map_err(text);
                let send = sending.send(memory.source.all(), 1).start().map_err(text);
                let ends = (
                    send.and_then(|send| send.wait().map_err(text)),
                    receive.and_then(|receive| receive.wait().map_err(text)),
                );
                match ends {
                    (Ok(_), Ok(_)) if over => return Err("a success after the reset".to_owned()),
                    (Ok(_), Ok(_)) => whole += 1,
                    (Err(error), _) | (_, Err(error)) => failed = Some(error),
                }
            }
            Ok((whole, failed.unwrap_or_default()))
        });
        thread::sleep(Duration::from_millis(100));
        // SAFETY: what that leaves of handles is what this check is about.
        let code = unsafe { sys::cuDevicePrimaryCtxReset_v2(bench.from.ordinal() as i32) };
        reset.store(true, Ordering::SeqCst);
        check("cuDevicePrimaryCtxReset", code)?;
        transfers.join().map_err(|_| "a panic".to_owned())?
    })?;
    let again = match bench.pair(1, None) {
        Ok(_) => "a further connection was made".to_owned(),
        Err(error) => format!("a further connection: {error}"),
    };
    Ok(format!("{whole} transfers before, then: {failed}; {again}"))
}

/// A kernel of the program runs for two seconds. Meanwhile connections come, move and go, and no
/// copy of the program waits for them.
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
