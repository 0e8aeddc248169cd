//! Chunks that share launches.

use super::*;

/// `count` fragments of `length` bytes in turned order.
fn turned(count: usize, length: usize) -> Arc<Descriptors> {
    let mut scatter = ScatterList::new();
    for index in 0..count {
        scatter.push(Fragment {
            source_offset: ((count - 1 - index) * length) as u64,
            length: length as u32,
            destination_offset: (index * length) as u64,
        });
    }
    let bytes = (count * length) as u64;
    let limits = Limits {
        pool_bytes: bytes,
        destination_bytes: bytes,
        received_bytes: bytes,
    };
    let mut descriptors = Descriptors::new();
    descriptors.build(&scatter, limits).unwrap();
    Arc::new(descriptors)
}

#[test]
fn chunks_that_wait_together_share_launches() {
    const CHUNKS: usize = 32;
    let bench = Bench::new();
    // Chunks that follow each other, as those of one transfer, and chunks with gaps between them;
    // the last chunk first.
    for (count, length, gap) in [(16, 512, 0), (3, 100, 7)] {
        let size = count * length;
        let bytes = noise(size, count as u32);
        let pool = bench.region(bench.gpu.kind(), &bytes);
        let target = bench.region(bench.gpu.kind(), &vec![1; CHUNKS * (size + gap)]);
        // Another test's pool may have lain there before.
        let launched = || fake::launches(pool.all().device_address().unwrap());
        let before = launched();
        let descriptors = turned(count, length);
        let (stream, gate) = fake::gated_stream();
        let fence = Fence::take(&bench.gpu, fake::after_stream(stream)).unwrap();
        let (sink, ended) = channel();
        for chunk in (0..CHUNKS).rev() {
            let start = chunk * (size + gap);
            let work = Work::Unpack {
                pool: BouncePool::from(pool.clone()),
                descriptors: Arc::clone(&descriptors),
                to: target.slice(start..start + size).unwrap(),
                with: UnpackMethod::Kernel,
            };
            bench.submit(chunk as u64, work, Some(fence.clone()), &sink);
        }
        gate.store(true, Ordering::SeqCst);
        let mut chunks: Vec<_> = (0..CHUNKS)
            .map(|_| ended.recv_timeout(LIMIT).unwrap())
            .map(|(token, result)| (token, result.unwrap()))
            .collect();
        chunks.sort_unstable();
        let all = (0..CHUNKS as u64).map(|token| (token, size as u64));
        assert_eq!(chunks, all.collect::<Vec<_>>());
        let mut expected = vec![1; target.len()];
        for chunk in expected.chunks_exact_mut(size + gap) {
            for (to, from) in chunk
                .chunks_exact_mut(length)
                .zip(bytes.chunks_exact(length).rev())
            {
                to.copy_from_slice(from);
            }
        }
        assert!(content(&target) == expected, "chunks of {count} fragments");
        let launches = launched() - before;
        assert!((1..=CHUNKS / 4).contains(&launches), "{launches} launches");
    }
}

/// Lists that do not fit into a launch lie in the memory of its slot until it has run.
#[test]
fn a_refused_launch_keeps_the_lists_of_others() {
    const SIZE: usize = 40_000;
    let bench = Bench::new();
    // SAFETY: the fake driver refuses this address, so nothing is touched.
    let bad = unsafe { Region::from_cuda_raw(&bench.gpu, fake::BAD_ADDRESS, 100, Arc::new(())) };
    let (stream, gate) = fake::gated_stream();
    let fence = Fence::take(&bench.gpu, fake::after_stream(stream)).unwrap();
    let (sink, ended) = channel();
    let jobs: Vec<_> = (0..40)
        .map(|job| {
            let bytes = noise(SIZE, job);
            let pool = bench.region(bench.gpu.kind(), &bytes);
            let to = bench.region(bench.gpu.kind(), &[1; SIZE]);
            // Different lists, all too long for a launch and too uneven for a short form.
            let count = 300 + job as usize;
            let work = Work::Unpack {
                pool: BouncePool::from(pool),
                descriptors: turned(count, 100),
                to: to.slice(..count * 100).unwrap(),
                with: UnpackMethod::Kernel,
            };
            bench.submit(job.into(), work, Some(fence.clone()), &sink);
            // As many as there are slots, but for the refused one.
            if job == 14 {
                let work = Work::checksum(bad.all());
                bench.submit(99, work, Some(fence.clone()), &sink);
            }
            let mut expected = vec![1; SIZE];
            for (to, from) in expected
                .chunks_exact_mut(100)
                .zip(bytes[..count * 100].chunks_exact(100).rev())
            {
                to.copy_from_slice(from);
            }
            (to, expected)
        })
        .collect();
    gate.store(true, Ordering::SeqCst);
    for _ in 0..=jobs.len() {
        let (token, result) = ended.recv_timeout(LIMIT).unwrap();
        assert_eq!(result.is_err(), token == 99, "{token}: {result:?}");
    }
    for (job, (to, expected)) in jobs.iter().enumerate() {
        assert!(content(to) == *expected, "job {job}");
    }
}

/// Chunks of one transfer share launches; a fault of one of them is not the others'.
#[test]
fn a_shared_launch_that_is_refused_costs_only_the_job_at_fault() {
    const CHUNKS: usize = 40;
    const SIZE: usize = 8 * 600;
    let bench = Bench::new();
    let bytes = noise(SIZE, 5);
    let pool = bench.region(bench.gpu.kind(), &bytes);
    let target = bench.region(bench.gpu.kind(), &[1; CHUNKS * SIZE]);
    let at = |chunk: usize| target.slice(chunk * SIZE..(chunk + 1) * SIZE).unwrap();
    let faulty = [7, 21];
    for chunk in faulty {
        fake::refuse_launches_to(at(chunk).device_address().unwrap());
    }
    let (stream, gate) = fake::gated_stream();
    let fence = Fence::take(&bench.gpu, fake::after_stream(stream)).unwrap();
    let (sink, ended) = channel();
    for chunk in 0..CHUNKS {
        let work = Work::Unpack {
            pool: BouncePool::from(pool.clone()),
            descriptors: turned(8, 600),
            to: at(chunk),
            with: UnpackMethod::Kernel,
        };
        bench.submit(chunk as u64, work, Some(fence.clone()), &sink);
    }
    gate.store(true, Ordering::SeqCst);
    let mut told = [0; CHUNKS];
    for _ in 0..CHUNKS {
        let (token, result) = ended.recv_timeout(LIMIT).unwrap();
        let chunk = usize::try_from(token).unwrap();
        told[chunk] += 1;
        let refused = matches!(result, Err(MemoryError::Cuda(CudaError::Call { .. })));
        assert_eq!(refused, faulty.contains(&chunk), "{chunk}: {result:?}");
    }
    assert_eq!(told, [1; CHUNKS]);
    let mut expected = vec![1; target.len()];
    for (chunk, place) in expected.chunks_exact_mut(SIZE).enumerate() {
        if !faulty.contains(&chunk) {
            for (to, from) in place
                .chunks_exact_mut(600)
                .zip(bytes.chunks_exact(600).rev())
            {
                to.copy_from_slice(from);
            }
        }
    }
    assert!(content(&target) == expected);
}

/// Copies of parts that follow each other at both ends, submitted together and in no order.
fn copy_in_parts(from: &Region, to: &Region, part: usize) -> Vec<Work> {
    let parts = from.len() / part;
    (0..parts)
        .map(|index| index * 7 % parts)
        .map(|index| {
            let of = |region: &Region| region.slice(index * part..(index + 1) * part).unwrap();
            Work::Copy {
                from: of(from),
                to: of(to),
            }
        })
        .collect()
}

/// Submits works that begin at the same time; how each of them ended.
pub(super) fn run_together(bench: &Bench, works: Vec<Work>) -> Vec<Ended> {
    let (stream, gate) = fake::gated_stream();
    let fence = Fence::take(&bench.gpu, fake::after_stream(stream)).unwrap();
    let (sink, ended) = channel();
    let count = works.len();
    for (token, work) in (0..).zip(works) {
        bench.submit(token, work, Some(fence.clone()), &sink);
    }
    gate.store(true, Ordering::SeqCst);
    let mut ends: Vec<_> = (0..count)
        .map(|_| ended.recv_timeout(LIMIT).unwrap())
        .collect();
    ends.sort_by_key(|(token, _)| *token);
    ends
}

#[test]
fn copies_that_go_together_move_all_bytes_and_end_one_by_one() {
    const PARTS: u64 = 32;
    const PART: usize = 5000;
    let bench = Bench::new();
    let len = PARTS as usize * PART;
    for (from, to) in [
        (MemoryKind::Pinned, bench.gpu.kind()),
        (bench.gpu.kind(), MemoryKind::Pinned),
        (bench.gpu.kind(), bench.gpu.kind()),
    ] {
        let bytes = noise(len, 17);
        let (source, target) = (bench.region(from, &bytes), bench.region(to, &vec![1; len]));
        let ends = run_together(&bench, copy_in_parts(&source, &target, PART));
        let each_its_own: Vec<_> = (0..PARTS).map(|token| (token, Ok(PART as u64))).collect();
        assert_eq!(ends, each_its_own, "{from} to {to}");
        assert!(content(&target) == bytes, "{from} to {to}");
        assert!(target.lease(.., Access::Write).is_ok(), "nothing is held");
    }
}

#[test]
fn memory_of_untracked_merged_copies_is_kept() {
    const PART: usize = 4096;
    let bench = Bench::new();
    let near = bench.region(MemoryKind::Pinned, &[7; 8 * PART]);
    let far = bench.region(bench.gpu.kind(), &[1; 8 * PART]);
    // Whichever part a copy begins with.
    for place in 0..8 {
        let part = far.slice(place * PART..).unwrap();
        fake::lose_streams_of(part.device_address().unwrap());
    }
    for (token, end) in run_together(&bench, copy_in_parts(&near, &far, PART)) {
        assert!(
            matches!(end, Err(MemoryError::EndUnknown { .. })),
            "{token}: {end:?}"
        );
    }
    for place in 0..8 {
        let part = place * PART..(place + 1) * PART;
        assert!(near.lease(part.clone(), Access::Write).is_err());
        assert!(far.lease(part, Access::Write).is_err());
    }
}
