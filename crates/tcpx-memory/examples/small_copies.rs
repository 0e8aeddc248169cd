//! The GPU's part of a small message, without a network: each step alone, median and p99.
//!
//! `small_copies [GPU [BYTES [COUNT]]]`, by default GPU 0, 8 bytes, 2000 times.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_memory::{
    After, BouncePool, CudaError, Fence, Gpu, MemoryError, Region, SmallCopies, UnpackMethod,
    Unpacker, Work,
};
use tcpx_wire::{Descriptors, Fragment, Limits};

const LIMIT: Duration = Duration::from_secs(1);

/// Errors are for the person who measures: a sentence.
type Outcome<T> = Result<T, String>;

fn text(error: impl ToString) -> String {
    error.to_string()
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, usual: usize| match words.get(index) {
        Some(word) => word.parse().map_err(|_| format!("{word} is no number")),
        None => Ok(usual),
    };
    let done = number(0, 0).and_then(|gpu| {
        let gpu = Gpu::open(u32::try_from(gpu).map_err(text)?).map_err(text)?;
        run(&gpu, number(1, 8)?.max(1), number(2, 2000)?.max(1))
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("small_copies: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a line a step.
fn run(gpu: &Gpu, bytes: usize, count: usize) -> Outcome<()> {
    let device = Region::cuda(gpu, bytes).map_err(text)?;
    let pinned = Region::pinned(gpu, bytes).map_err(text)?;
    let small = SmallCopies::new(gpu).map_err(text)?;
    let mut small = small.ok_or("no memory for small copies is left")?;
    let payload = vec![7; bytes];
    let mut into = Vec::with_capacity(bytes);
    time("fence of the default streams, taken", count, || {
        Fence::take(gpu, After::DefaultStreams).map(drop)
    })?;
    time("the same, taken and reached", count, || {
        let fence = Fence::take(gpu, After::DefaultStreams)?;
        while !fence.is_reached()? {}
        Ok::<_, CudaError>(())
    })?;
    for how in ["by a copy", "by the persistent"] {
        time(&format!("read {how}"), count, || {
            into.clear();
            small.read(&device.all(), None, LIMIT, &mut into).map(drop)
        })?;
        let after = format!("read {how}, after the default streams");
        time(&after, count, || {
            let fence = Fence::take(gpu, After::DefaultStreams)?;
            into.clear();
            let fence = Some(&fence);
            small.read(&device.all(), fence, LIMIT, &mut into).map(drop)
        })?;
        let mut ended = Vec::new();
        time(&format!("written {how}"), count, || {
            small.start_write(&device.all(), &payload, None, 1)?;
            while small.is_busy() {
                small.poll(&mut ended);
            }
            Ok::<_, MemoryError>(())
        })?;
        small = small.with_persistent_kernel();
    }
    let mut unpacker = Unpacker::new(gpu).map_err(text)?;
    for (what, from, to) in [
        ("read by the kernel", &device, &pinned),
        ("written by the kernel", &pinned, &device),
    ] {
        let pool = BouncePool::new(from.all());
        let descriptors = whole(bytes)?;
        time(what, count, || {
            let work = Work::Unpack {
                pool: pool.clone(),
                descriptors: Arc::clone(&descriptors),
                to: to.all(),
                with: UnpackMethod::Kernel,
            };
            unpacker.run(work, LIMIT).map(drop)
        })?;
    }
    Ok(())
}

/// One piece that covers everything.
fn whole(bytes: usize) -> Outcome<Arc<Descriptors>> {
    let whole = Fragment {
        source_offset: 0,
        length: u32::try_from(bytes).map_err(text)?,
        destination_offset: 0,
    };
    let limits = Limits {
        pool_bytes: bytes as u64,
        destination_bytes: bytes as u64,
        received_bytes: bytes as u64,
    };
    let mut descriptors = Descriptors::new();
    descriptors.build(&[whole], limits).map_err(text)?;
    Ok(Arc::new(descriptors))
}

fn time<E: ToString>(
    what: &str,
    count: usize,
    mut step: impl FnMut() -> Result<(), E>,
) -> Outcome<()> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        step().map_err(text)?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let at =
        |hundredths: usize| times[(count * hundredths / 100).min(count - 1)].as_secs_f64() * 1e6;
    println!("{what}: {:.1} us, p99 {:.1} us", at(50), at(99));
    Ok(())
}
