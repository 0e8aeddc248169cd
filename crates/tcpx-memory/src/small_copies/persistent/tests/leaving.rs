//! Set-up and the end in every state, and what keeps a persistent kernel from running.

use super::*;
use crate::driver::fake::Launches;
use crate::error::MemoryError;

fn addresses(copies: &SmallCopies) -> [u64; 2] {
    let persistent = copies.persistent.as_ref().unwrap();
    [persistent.memory.device, copies.memory.device]
}

fn write(copies: &mut SmallCopies, region: &Region) -> Result<u64, MemoryError> {
    let bytes = vec![5; region.len()];
    assert_eq!(copies.start_write(&region.all(), &bytes, None, 1), Ok(true));
    let mut told = ended(copies);
    assert_eq!(told.len(), 1);
    told.remove(0).1
}

#[test]
fn set_up_does_not_wait_for_room_on_the_gpu() {
    let (gpu, _kept) = gpu();
    let room = fake::fill_gpu();
    let mut copies = SmallCopies::new(&gpu).unwrap().with_persistent_kernel();
    let region = Region::cuda(&gpu, 64).unwrap();
    assert_eq!(write(&mut copies, &region), Ok(64));
    let persistent = copies.persistent.as_mut().unwrap();
    assert_eq!(persistent.copies(), 0);
    room.store(true, Ordering::SeqCst);
    until(persistent, PersistentCopyKernel::has_left);
    call(persistent);
    assert_eq!(write(&mut copies, &region), Ok(64));
    assert_eq!(copies.persistent_copies(), 1);
}

#[test]
fn a_failed_launch_leaks_nothing() {
    let gpu = Gpu::fake();
    let left = gpu.downgrade();
    fake::set_launches(Launches::Fail);
    let copies = SmallCopies::new(&gpu).unwrap().with_persistent_kernel();
    fake::set_launches(Launches::Return);
    assert!(copies.persistent.is_none());
    drop((copies, gpu));
    assert!(left.upgrade().is_none());
}

#[test]
fn a_refused_launch_pauses_launches() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let persistent = copies.persistent.as_mut().unwrap();
    until(persistent, PersistentCopyKernel::has_left);
    fake::set_launches(Launches::Fail);
    let now = Instant::now();
    persistent.note(now);
    persistent.note(now);
    fake::set_launches(Launches::Return);
    assert!(persistent.has_left() && persistent.paused_until.is_some());
    let region = Region::cuda(&gpu, 64).unwrap();
    assert_eq!(write(&mut copies, &region), Ok(64));
    assert_eq!(copies.persistent_copies(), 0);
}

#[test]
fn launches_that_block_pause_launches() {
    let (gpu, _kept) = gpu();
    fake::set_launches(Launches::WaitForTheirEnd);
    let mut persistent = PersistentCopyKernel::new(&gpu).unwrap();
    let (now, mut copies) = (Instant::now(), 0);
    while persistent.paused_until.is_none() {
        persistent.note(now);
        assert!(persistent.has_left() && copies <= MAX_SLOW);
        copies += 1;
    }
    fake::set_launches(Launches::Return);
    assert_eq!(persistent.paused_until, Some(now + PAUSE));
    persistent.end(LONG);
}

#[test]
fn the_kernel_leaves_even_under_constant_requests() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    for _ in 0..MAX_POLLS {
        assert_eq!(write(&mut copies, &region), Ok(64));
        if copies.persistent.as_ref().unwrap().has_left() {
            return;
        }
    }
    panic!("it is still there");
}

#[test]
fn a_drop_sends_it_away_and_gives_all_back() {
    for requests in [0, 1] {
        let gpu = Gpu::fake();
        let (left, kept) = (gpu.downgrade(), InContext::enter(&gpu).unwrap());
        let mut copies = copies(&gpu);
        let region = Region::cuda(&gpu, 64).unwrap();
        for _ in 0..requests {
            let started = copies.start_write(&region.all(), &[1; 64], None, 1);
            assert_eq!(started, Ok(true));
        }
        let all = addresses(&copies);
        assert!(all.into_iter().all(fake::is_allocated));
        drop(copies);
        assert!(!all.into_iter().any(fake::is_allocated));
        assert!(!fake::ended_hastily(all[0]));
        let mut got = [0; 64];
        region.read_to(0, &mut got).unwrap();
        assert!(requests == 0 || got == [1; 64]);
        drop((region, kept, gpu));
        // Memory is freed on a thread of its own.
        let start = Instant::now();
        while left.upgrade().is_some() {
            assert!(start.elapsed() < LONG);
            thread::yield_now();
        }
    }
}

#[test]
fn memory_outlives_a_drop_before_the_kernel_starts() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let persistent = copies.persistent.as_mut().unwrap();
    until(persistent, PersistentCopyKernel::has_left);
    let room = fake::fill_gpu();
    let now = Instant::now();
    persistent.note(now);
    persistent.note(now);
    assert!(!persistent.has_left());
    let [ring, slots] = addresses(&copies);
    drop(copies);
    room.store(true, Ordering::SeqCst);
    assert!(fake::is_allocated(ring) && !fake::is_allocated(slots));
    assert!(!fake::ended_hastily(ring));
}

#[test]
fn memory_outlives_a_drop_while_the_kernel_may_run() {
    let (gpu, _kept) = gpu();
    let copies = copies(&gpu);
    let [ring, _] = addresses(&copies);
    fake::lose_persistent(ring);
    drop(copies);
    assert!(fake::is_allocated(ring) && !fake::ended_hastily(ring));
}

#[test]
fn a_request_of_a_lost_kernel_fails_and_keeps_its_memory() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    let all = addresses(&copies);
    fake::lose_persistent(all[0]);
    assert!(write(&mut copies, &region).is_err());
    let busy = region.read_to(0, &mut [0]);
    assert!(matches!(busy, Err(MemoryError::Busy { .. })));
    let refused = copies.start_write(&region.all(), &[1; 64], None, 2);
    assert_eq!(refused, Ok(false));
    drop(copies);
    assert!(all.into_iter().all(fake::is_allocated));
}
