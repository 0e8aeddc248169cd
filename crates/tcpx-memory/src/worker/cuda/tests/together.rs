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
    // Chunks that follow each other, as those of one transfer, and chunks with gaps between them; the
    // last chunk first.
    for (count, length, gap) in [(16, 512, 0), (3, 100, 7)] {
        let size = count * length;
        let bytes = noise(size, count as u32);
        let pool = bench.region(bench.gpu.kind(), &bytes);
        let target = bench.region(bench.gpu.kind(), &vec![1; CHUNKS * (size + gap)]);
        let descriptors = turned(count, length);
        let (stream, gate) = fake::gated_stream();
        let fence = Fence::take(&bench.gpu, After::Stream(stream)).unwrap();
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
        let launches = fake::launches(pool.all().device_address().unwrap());
        assert!((1..=CHUNKS / 4).contains(&launches), "{launches} launches");
    }
}
