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
            Err(MemoryError::EndUnknown { .. })
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
        let work = unpack(pool, to, UnpackMethod::Host);
        assert!(matches!(
            bench.run(work),
            Err(MemoryError::EndUnknown { .. })
        ));
        assert!(is_kept(&near) && is_kept(&far), "fetching: {fetching}");
    }
}

/// A list of one piece by this method.
fn unpack(pool: &Region, to: &Region, with: UnpackMethod) -> Work {
    let piece = Fragment {
        source_offset: 0,
        length: pool.len() as u32,
        destination_offset: 0,
    };
    let bytes = pool.len() as u64;
    let limits = Limits {
        pool_bytes: bytes,
        destination_bytes: bytes,
        received_bytes: bytes,
    };
    let mut descriptors = Descriptors::new();
    descriptors.build(&[piece], limits).unwrap();
    Work::Unpack {
        pool: BouncePool::from(pool.clone()),
        descriptors: Arc::new(descriptors),
        to: to.all(),
        with,
    }
}

#[test]
fn memory_of_copies_whose_events_cannot_be_asked_is_kept() {
    type Way = fn(&Region, &Region) -> Work;
    let copy = |from: &Region, to: &Region| Work::Copy {
        from: from.all(),
        to: to.all(),
    };
    let d2d = |from: &Region, to: &Region| unpack(from, to, UnpackMethod::D2d);
    let gather = |from: &Region, to: &Region| unpack(from, to, UnpackMethod::Host);
    let ways: [(&str, MemoryKind, Way); 4] = [
        ("copy", MemoryKind::Pinned, copy),
        ("staged copy", MemoryKind::Host, copy),
        ("d2d", MemoryKind::Pinned, d2d),
        ("gather", MemoryKind::Host, gather),
    ];
    for (name, kind, work) in ways {
        for inward in [true, false] {
            let bench = Bench::new();
            let near = bench.region(kind, &[7; 4096]);
            let far = bench.region(bench.gpu.kind(), &[1; 4096]);
            fake::hide_streams_of(far.all().device_address().unwrap());
            let (from, to) = if inward { (&near, &far) } else { (&far, &near) };
            let ended = bench.run(work(from, to));
            assert!(
                matches!(ended, Err(MemoryError::EndUnknown { .. })),
                "{name}, inward: {inward}: {ended:?}"
            );
            assert!(is_kept(&near) && is_kept(&far), "{name}, inward: {inward}");
        }
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
fn a_panicking_owner_does_not_affect_completions() {
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
    assert_eq!(bench.run(Work::checksum(memory.all())).map(drop), Ok(()));
}
