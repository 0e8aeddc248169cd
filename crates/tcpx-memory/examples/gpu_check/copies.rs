//! Copies, checksums and blocking access of all kinds of memory.

use std::any::Any;
use std::sync::Arc;

use tcpx_memory::{CopyWorker, CudaError, Gpu, MemoryError, MemoryKind, PinnedSlot, Region, Work};

use crate::support::{Bench, Outcome, POISON, Random, same, same_bytes, text};

const SIZES: [usize; 7] = [0, 1, 4095, 4096, (1 << 20) + 3, (9 << 20) + 5, 40 << 20];

/// Errors of the driver that a program must tell apart.
pub(crate) fn typed_errors(bench: &Bench) -> Outcome {
    let huge = Region::cuda(&bench.gpu, 1 << 50);
    if !matches!(huge, Err(MemoryError::Cuda(CudaError::OutOfMemory { .. }))) {
        return Err(format!("2^50 bytes: {huge:?}"));
    }
    let device = Gpu::open(1_000);
    if !matches!(device, Err(CudaError::NoSuchDevice { .. })) {
        return Err(format!("device 1000: {device:?}"));
    }
    let region = bench.region(bench.gpu.kind(), 16)?;
    let bytes = region.with_bytes(.., |_| ());
    if !matches!(bytes, Err(MemoryError::NotCpuAccessible { .. })) {
        return Err(format!("with_bytes: {bytes:?}"));
    }
    Ok("out of memory, no such device, not accessible by the CPU".to_owned())
}

/// What is written to any kind of memory is read back, with nothing beside it changed.
pub(crate) fn blocking_access(bench: &Bench) -> Outcome {
    let mut random = Random::new();
    for kind in bench.kinds() {
        for size in SIZES {
            let bytes = random.bytes(size);
            let mut expected = vec![POISON; size + 77];
            let region = bench.region_of(kind, &expected)?;
            region.write_from(33, &bytes).map_err(text)?;
            expected[33..33 + size].copy_from_slice(&bytes);
            same(&region, &expected).map_err(|error| format!("{size} bytes: {error}"))?;
        }
    }
    Ok(format!("{} sizes of 3 kinds", SIZES.len()))
}

/// Copies between all pairs of memories.
pub(crate) fn all_kinds(bench: &Bench) -> Outcome {
    let mut random = Random::new();
    for from in bench.kinds() {
        for to in bench.kinds() {
            for size in SIZES {
                let bytes = random.bytes(size);
                let (start, offset) = (random.below(33), random.below(33));
                let mut around = vec![0; start];
                around.extend_from_slice(&bytes);
                let source = bench.region_of(from, &around)?;
                let mut expected = vec![POISON; offset + size + 40];
                let target = bench.region_of(to, &expected)?;
                expected[offset..offset + size].copy_from_slice(&bytes);
                let work = Work::Copy {
                    from: source.slice(start..).map_err(text)?,
                    to: target.slice(offset..offset + size).map_err(text)?,
                };
                let context = |error| format!("{size} bytes from {from} to {to}: {error}");
                let moved = bench.run(work, None).map_err(context)?;
                if moved != size as u64 {
                    return Err(context(format!("the result is {moved}")));
                }
                same(&target, &expected).map_err(context)?;
            }
        }
    }
    Ok(format!("{} sizes of 9 pairs", SIZES.len()))
}

/// Memory that the program allocated itself, and given back in the end.
pub(crate) fn foreign_memory(bench: &Bench) -> Outcome {
    let user = bench.user()?;
    let owner: Arc<dyn Any + Send + Sync> = Arc::new(());
    let len = 3_000_001;
    let address = user.alloc(len)?;
    // SAFETY: allocated just now with that length, and freed below, after the region.
    let region = unsafe { Region::from_cuda_raw(&bench.gpu, address, len, Arc::clone(&owner)) };
    let bytes = Random::new().bytes(len);
    let source = bench.region_of(MemoryKind::Pinned, &bytes)?;
    bench.run(
        Work::Copy {
            from: source.all(),
            to: region.all(),
        },
        None,
    )?;
    let read = user.read(address, len)?;
    same_bytes(&read, &bytes)?;
    drop(region);
    user.free(address)?;
    Ok("written by a job, read by the program".to_owned())
}

/// Checksums by jobs and by blocking calls.
pub(crate) fn checksums(bench: &Bench) -> Outcome {
    let mut random = Random::new();
    for size in SIZES {
        let bytes = random.bytes(size);
        let expected = crc32c(&bytes);
        for kind in bench.kinds() {
            let region = bench.region_of(kind, &bytes)?;
            let by_job = bench.run(Work::checksum(region.all()), None)?;
            let by_call = region.checksum(..).map_err(text)?;
            if by_job != u64::from(expected) || by_call != expected {
                return Err(format!(
                    "{size} bytes of {kind}: job {by_job:08x}, call {by_call:08x}, expected {expected:08x}"
                ));
            }
        }
    }
    Ok(format!("{} sizes of 3 kinds", SIZES.len()))
}

/// Bit by bit, so that it shares nothing with the code under test.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let mut table = [0_u32; 256];
    for (index, entry) in table.iter_mut().enumerate() {
        *entry = (0..8).fold(index as u32, |crc, _| {
            (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg())
        });
    }
    !bytes.iter().fold(!0, |crc, byte| {
        (crc >> 8) ^ table[((crc ^ u32::from(*byte)) & 0xFF) as usize]
    })
}

/// All slots at once, to the GPU and back.
pub(crate) fn pinned_slots(bench: &Bench) -> Outcome {
    let pool = bench.worker.pinned();
    let mut slots: Vec<PinnedSlot> = std::iter::from_fn(|| pool.try_take()).collect();
    let count = slots.len();
    if count < 40 {
        return Err(format!("{count} slots"));
    }
    let mut random = Random::new();
    let bytes = random.bytes(count * 4096);
    let target = bench.region(bench.gpu.kind(), count * 4096)?;
    let jobs = bench.jobs();
    for (index, slot) in slots.iter().enumerate() {
        let part = slot.slice().slice(index..index + 4096).map_err(text)?;
        part.write_from(&bytes[index * 4096..][..4096])
            .map_err(text)?;
        let to = target
            .slice(index * 4096..(index + 1) * 4096)
            .map_err(text)?;
        jobs.submit(index as u64, Work::Copy { from: part, to }, None)?;
    }
    // The slots' copies are under way, and must keep them.
    slots.clear();
    let mut seen = vec![false; count];
    for _ in 0..count {
        let (token, result) = jobs.next()?;
        result.map_err(text)?;
        if std::mem::replace(&mut seen[token as usize], true) {
            return Err(format!("job {token} ended twice"));
        }
    }
    same(&target, &bytes)?;
    if pool.free_slots() != pool.slots() {
        return Err(format!(
            "{} of {} slots came back",
            pool.free_slots(),
            pool.slots()
        ));
    }
    Ok(format!("{count} slots"))
}

/// Memory of another GPU is refused, with the reason.
pub(crate) fn peers(bench: &Bench) -> Outcome {
    let other = match Gpu::open(1) {
        Ok(other) => other,
        Err(error) => return Ok(format!("skipped: {error}")),
    };
    let there = Region::cuda(&other, 4096).map_err(text)?;
    let here = bench.region(bench.gpu.kind(), 4096)?;
    let work = Work::Copy {
        from: here.all(),
        to: there.all(),
    };
    match bench.run(work, None) {
        Err(error) if error.contains("cannot reach") => Ok(error),
        other => Err(format!("expected a refusal, got {other:?}")),
    }
}

/// Whoever asks gets the one worker, whoever had it before.
pub(crate) fn worker_restarts(bench: Bench) -> Outcome {
    let ordinal = bench.gpu.ordinal();
    drop(bench);
    let bytes = Random::new().bytes(100_000);
    for round in 0..3 {
        let bench = Bench::open().map_err(|error| format!("round {round}: {error}"))?;
        let again = CopyWorker::for_gpu(&Gpu::open(ordinal).map_err(text)?).map_err(text)?;
        if !Arc::ptr_eq(&bench.worker, &again) {
            return Err("two workers for one GPU".to_owned());
        }
        let source = bench.region_of(MemoryKind::Pinned, &bytes)?;
        let target = bench.region(bench.gpu.kind(), bytes.len())?;
        bench.run(
            Work::Copy {
                from: source.all(),
                to: target.all(),
            },
            None,
        )?;
        drop((bench, again));
        // Blocking access needs no worker.
        same(&target, &bytes).map_err(|error| format!("round {round}: {error}"))?;
    }
    Ok("3 times".to_owned())
}
