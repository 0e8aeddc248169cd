//! Lists of every form.

use tcpx_wire::{Descriptors, Fragment, Limits, ScatterList};

use super::*;
use crate::{Access, Gather};

fn region(gpu: &Gpu, kind: MemoryKind, bytes: &[u8]) -> Region {
    let region = match kind {
        MemoryKind::Pinned => Region::pinned(gpu, bytes.len()).unwrap(),
        MemoryKind::Host => Region::host(bytes.len()).unwrap(),
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
    let worker = CopyWorker::for_gpu(&gpu).unwrap();
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
            let moved = worker.run(work, LIMIT).unwrap();
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
fn a_pools_own_slot_carries_bytes_between_gpu_and_host() {
    let gpu = Gpu::fake();
    let worker = CopyWorker::for_gpu(&gpu).unwrap();
    let hogs: Vec<_> = (0..40).map(|_| worker.slots_to_send(64)).collect();
    let _held: Vec<_> = hogs
        .iter()
        .flat_map(|pool| std::iter::from_fn(|| pool.try_take()))
        .collect();
    let bytes = noise(100_000);
    let (from, to) = (
        region(&gpu, gpu.kind(), &bytes),
        region(&gpu, gpu.kind(), &vec![0; bytes.len()]),
    );
    for pool in [worker.slots_to_send(64), worker.slots_to_receive(64)] {
        let slot = pool.try_take().unwrap();
        assert_eq!(slot.slice().kind(), MemoryKind::Host);
        let part = slot.slice().slice(..bytes.len()).unwrap();
        let out = Work::Copy {
            from: from.all(),
            to: part.clone(),
        };
        let back = Work::Copy {
            from: part,
            to: to.all(),
        };
        for work in [out, back] {
            assert_eq!(worker.run(work, LIMIT), Ok(bytes.len() as u64));
        }
        let mut content = vec![0; bytes.len()];
        to.read_to(0, &mut content).unwrap();
        assert!(content == bytes);
        to.write_from(0, &vec![0; bytes.len()]).unwrap();
    }
}

#[test]
fn lists_of_host_memory_are_copied_to_a_gpus_and_back() {
    let gpu = Gpu::fake();
    let worker = CopyWorker::for_gpu(&gpu).unwrap();
    // Pieces whose ends lie anywhere in what one step of the worker moves, and beyond one.
    let lengths = [1, 4097, 3 << 20, 1 << 20, 70_001, 1, 999_999];
    let bytes = noise(lengths.iter().sum());
    // Each behind a gap, the last one first.
    let gathered = |memory: &Region, access| {
        let mut end = memory.len();
        let pieces = lengths.iter().map(|len| {
            end -= len + 3;
            (0, end..end + len)
        });
        let gather = Gather::new(&[memory.all()], pieces, access).unwrap();
        gather.region("a test").unwrap()
    };
    let room = bytes.len() + 3 * lengths.len();
    let memory = |kind| region(&gpu, kind, &vec![0xA5; room]);
    let (from, on_gpu, to) = (
        memory(MemoryKind::Host),
        memory(gpu.kind()),
        memory(MemoryKind::Host),
    );
    let run = |from: Region, to: Region| {
        let (from, to) = (from.all(), to.all());
        worker.run(Work::Copy { from, to }, LIMIT)
    };
    let len = bytes.len() as u64;
    let source = region(&gpu, MemoryKind::Host, &bytes);
    for whole in [false, true] {
        from.write_from(0, &vec![0xA5; room]).unwrap();
        let list = gathered(&from, Access::Write);
        assert_eq!(run(source.clone(), list), Ok(len));
        let of_gpu = || match whole {
            true => region(&gpu, gpu.kind(), &vec![0; bytes.len()]),
            false => gathered(&on_gpu, Access::Write),
        };
        let there = of_gpu();
        assert_eq!(run(gathered(&from, Access::Read), there.clone()), Ok(len));
        assert_eq!(run(there, gathered(&to, Access::Write)), Ok(len));
        let (mut sent, mut came) = (vec![0; room], vec![0; room]);
        from.read_to(0, &mut sent).unwrap();
        to.read_to(0, &mut came).unwrap();
        assert!(sent == came, "{whole}");
        to.write_from(0, &vec![0xA5; room]).unwrap();
    }
}
