//! Work whose end nobody can learn, and owners that panic.

use super::*;

/// The memory of a copy that nothing tells the end of.
fn untraceable(bench: &Bench, len: usize) -> Region {
    let region = bench.region(bench.gpu.kind(), &vec![1; len]);
    fake::lose_streams_of(region.all().device_address().unwrap());
    region
}

/// Without an event nobody knows when the copy ends, so nobody may have its memory, ever.
fn is_kept(region: &Region) -> bool {
    matches!(
        region.lease(.., Access::Write),
        Err(MemoryError::Busy { .. })
    )
}

#[test]
fn memory_of_a_staged_copy_that_cannot_be_followed_is_kept() {
    for inward in [true, false] {
        let bench = Bench::new();
        let (host, far) = (
            bench.region(MemoryKind::Host, &[7; 5000]),
            untraceable(&bench, 5000),
        );
        let (from, to) = if inward { (&host, &far) } else { (&far, &host) };
        let copy = |from: &Region, to: &Region| Work::Copy {
            from: from.all(),
            to: to.all(),
        };
        assert!(matches!(
            bench.run(copy(from, to)),
            Err(MemoryError::Cuda(CudaError::Call { .. }))
        ));
        assert!(is_kept(&host) && is_kept(&far), "inward: {inward}");
        // The copy still uses the worker's own memory, too: no later job may have that.
        let (other, target) = (
            bench.region(MemoryKind::Host, &[8; 100]),
            bench.region(bench.gpu.kind(), &[0; 100]),
        );
        assert!(bench.run(copy(&other, &target)).is_err());
        assert!(!is_kept(&target), "a job that did not begin keeps nothing");
    }
}

#[test]
fn memory_of_a_gather_that_cannot_be_followed_is_kept() {
    // Once on the way from the pool, once on the way to the destination.
    for fetching in [true, false] {
        let bench = Bench::new();
        let (near, far) = (
            bench.region(MemoryKind::Pinned, &[7; 4096]),
            untraceable(&bench, 4096),
        );
        let (pool, to) = if fetching {
            (&far, &near)
        } else {
            (&near, &far)
        };
        let mut scatter = ScatterList::new();
        scatter.push(Fragment {
            source_offset: 0,
            length: 4096,
            destination_offset: 0,
        });
        let limits = Limits {
            pool_bytes: 4096,
            destination_bytes: 4096,
            received_bytes: 4096,
        };
        let mut descriptors = Descriptors::new();
        descriptors.build(&scatter, limits).unwrap();
        let work = Work::Unpack {
            pool: BouncePool::from(pool.clone()),
            descriptors: Arc::new(descriptors),
            to: to.all(),
            with: UnpackMethod::Host,
        };
        assert!(matches!(
            bench.run(work),
            Err(MemoryError::Cuda(CudaError::Call { .. }))
        ));
        assert!(is_kept(&near) && is_kept(&far), "fetching: {fetching}");
    }
}

/// What keeps a foreign region may be the program's own code.
struct Explosive;

impl Drop for Explosive {
    fn drop(&mut self) {
        assert!(
            std::thread::panicking(),
            "an owner that panics when it is let go of"
        );
    }
}

#[test]
fn a_foreign_owner_that_panics_neither_hides_the_end_of_its_job_nor_stops_others() {
    let bench = Bench::new();
    let memory = bench.region(bench.gpu.kind(), &[1; 100]);
    let address = memory.all().device_address().unwrap();
    // SAFETY: the region above outlives the job.
    let foreign = unsafe { Region::from_cuda_raw(&bench.gpu, address, 100, Arc::new(Explosive)) };
    let target = bench.region(MemoryKind::Pinned, &[0; 100]);
    let (sink, ended) = channel();
    let from = foreign.all();
    drop(foreign);
    let to = target.all();
    bench.submit(1, Work::Copy { from, to }, None, &sink);
    assert_eq!(ended.recv_timeout(LIMIT), Ok((1, Ok(100))));
    assert_eq!(
        bench.run(Work::Checksum { of: memory.all() }).map(drop),
        Ok(())
    );
}
