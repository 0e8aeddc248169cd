//! The unpacker over a driver in memory that does everything as late as it may.

use std::ops::RangeFrom;

use tcpx_wire::{Descriptors, Fragment, Limits, ScatterList};

use super::*;
use crate::bounce::{BouncePool, UnpackMethod};
use crate::checksum::Crc32c;
use crate::driver::fake;
use crate::kind::MemoryKind;
use crate::region::Region;

const LIMIT: Duration = Duration::from_secs(60);

fn region(gpu: &Gpu, kind: MemoryKind, bytes: &[u8]) -> Region {
    let region = match kind {
        MemoryKind::Pinned => Region::pinned(gpu, bytes.len()).unwrap(),
        _ => Region::cuda(gpu, bytes.len()).unwrap(),
    };
    region.write_from(0, bytes).unwrap();
    region
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x1234_5678_9ABC_DEF1_u64;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as u8
    };
    (0..len).map(next).collect()
}

/// `count` pieces of `length` in turned order, with `gap` bytes between them in the destination.
fn list(count: usize, length: usize, gap: usize) -> (Descriptors, usize, Vec<Fragment>) {
    let fragment = |index: usize| Fragment {
        source_offset: ((count - 1 - index) * length) as u64,
        length: length as u32,
        destination_offset: (index * (length + gap)) as u64,
    };
    let fragments: Vec<_> = (0..count).map(fragment).collect();
    let mut scatter = ScatterList::new();
    fragments
        .iter()
        .for_each(|fragment| scatter.push(*fragment));
    let size = count * (length + gap);
    let mut descriptors = Descriptors::new();
    let limits = Limits {
        pool_bytes: (count * length) as u64,
        destination_bytes: size as u64,
        received_bytes: (count * length) as u64,
    };
    descriptors.build(&scatter, limits).unwrap();
    (descriptors, size, fragments)
}

#[test]
fn lists_of_every_form_arrive() {
    let gpu = Gpu::fake();
    let mut unpacker = Unpacker::new(&gpu).unwrap();
    // Carried and mapped, even and not, longer than all slots together.
    for (count, length, gap) in [
        (1, 1, 0),
        (200, 512, 0),
        (200, 512, 3),
        (1000, 600, 0),
        (1000, 600, 1),
        (5000, 512, 0),
        (5000, 33, 5),
        (140_000, 2, 1),
    ] {
        let (descriptors, size, fragments) = list(count, length, gap);
        let bytes = noise(count * length);
        let mut expected = vec![0xA5; size];
        for one in &fragments {
            let (from, to) = (one.source_offset as usize, one.destination_offset as usize);
            expected[to..to + length].copy_from_slice(&bytes[from..from + length]);
        }
        for kind in [MemoryKind::Pinned, gpu.kind()] {
            let pool = region(&gpu, kind, &bytes);
            let to = region(&gpu, gpu.kind(), &vec![0xA5; size]);
            let work = Work::Unpack {
                pool: BouncePool::from(pool),
                descriptors: Arc::new(descriptors.clone()),
                to: to.all(),
                with: UnpackMethod::Kernel,
            };
            let moved = unpacker.run(work, LIMIT).unwrap();
            assert_eq!(moved, bytes.len() as u64);
            let mut content = vec![0; size];
            to.read_to(0, &mut content).unwrap();
            assert!(
                content == expected,
                "{count} pieces of {length} with gaps of {gap}"
            );
        }
    }
}

#[test]
fn checksums_agree_and_memory_is_held_meanwhile() {
    let gpu = Gpu::fake();
    let mut unpacker = Unpacker::new(&gpu).unwrap();
    let bytes = noise(100_003);
    let memory = region(&gpu, gpu.kind(), &bytes);
    let work = |range: RangeFrom<usize>| Work::Checksum {
        of: memory.slice(range).unwrap(),
    };
    // Begun, and not waited for.
    let ended = unpacker.run(work(0..), Duration::ZERO);
    assert!(
        matches!(ended, Err(MemoryError::Cuda(CudaError::TimedOut { .. }))),
        "{ended:?}"
    );
    assert!(matches!(
        memory.lease(.., crate::Access::Write),
        Err(MemoryError::Busy { .. })
    ));
    let mut crc = Crc32c::new();
    crc.update(&bytes[5..]);
    assert_eq!(unpacker.run(work(5..), LIMIT), Ok(u64::from(crc.finish())));
    memory.lease(.., crate::Access::Write).unwrap();
    assert_eq!(unpacker.run(work(100_003..), LIMIT), Ok(0));
}

#[test]
fn memory_whose_end_nobody_can_learn_is_kept() {
    let gpu = Gpu::fake();
    let mut unpacker = Unpacker::new(&gpu).unwrap();
    let (pool, to) = (
        region(&gpu, gpu.kind(), &[1; 100]),
        region(&gpu, gpu.kind(), &[0; 100]),
    );
    for with in [UnpackMethod::D2d, UnpackMethod::Kernel] {
        let work = Work::Unpack {
            pool: BouncePool::from(pool.clone()),
            descriptors: Arc::new(list(1, 100, 0).0),
            to: to.all(),
            with,
        };
        assert_eq!(unpacker.run(work, LIMIT), Ok(100));
    }
    let work = Work::Unpack {
        pool: BouncePool::from(pool),
        descriptors: Arc::new(list(1, 100, 0).0),
        to: to.all(),
        with: UnpackMethod::D2d,
    };
    fake::lose_streams_of(to.all().device_address().unwrap());
    let ended = unpacker.run(work, LIMIT);
    assert!(
        matches!(ended, Err(MemoryError::EndUnknown { .. })),
        "{ended:?}"
    );
    assert!(matches!(
        to.lease(.., crate::Access::Write),
        Err(MemoryError::Busy { .. })
    ));
}
