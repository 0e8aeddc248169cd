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
    let mut copies = SmallCopies::new(&gpu)
        .unwrap()
        .unwrap()
        .with_persistent_kernel();
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
fn without_its_kernel_the_driver_copies_everything() {
    let gpu = Gpu::fake();
    let mut copies = next(&gpu);
    fake::set_launches(Launches::Fail);
    let streams = copies.persistent.as_ref().unwrap().streams;
    copies.make_persistent_kernel(streams);
    fake::set_launches(Launches::Return);
    assert!(copies.persistent.is_none());
    let region = Region::cuda(&gpu, 64).unwrap();
    assert_eq!(write(&mut copies, &region), Ok(64));
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
    let mut persistent = made(&gpu);
    let (now, mut copies) = (Instant::now(), 0);
    while persistent.paused_until.is_none() {
        persistent.note(now);
        assert!(persistent.has_left() && copies <= MAX_SLOW);
        copies += 1;
    }
    fake::set_launches(Launches::Return);
    assert_eq!(persistent.paused_until, Some(now + PAUSE));
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

/// Small copies for the next connection.
fn next(gpu: &Gpu) -> SmallCopies {
    SmallCopies::new(gpu).unwrap().unwrap()
}

/// What the other connections of a GPU have.
fn others(gpu: &Gpu) -> Vec<SmallCopies> {
    std::iter::from_fn(|| SmallCopies::new(gpu).unwrap()).collect()
}

#[test]
fn the_next_connection_takes_what_one_has_left() {
    for requests in [0, 1] {
        let (gpu, _kept) = gpu();
        let mut copies = copies(&gpu);
        let _others = others(&gpu);
        let region = Region::cuda(&gpu, 64).unwrap();
        for _ in 0..requests {
            let started = copies.start_write(&region.all(), &[1; 64], None, 1);
            assert_eq!(started, Ok(true));
        }
        let all = addresses(&copies);
        until(copies.persistent.as_ref().unwrap(), |persistent| {
            requests > 0 || persistent.has_left()
        });
        let stream = copies.streams[0];
        drop(copies);
        // What was in flight is seen to on a thread of its own.
        let start = Instant::now();
        while gpu.resting_small_copies().is_empty() {
            is_at_rest(gpu.api(), stream).unwrap();
            assert!(start.elapsed() < LONG);
        }
        let mut got = [0; 64];
        region.read_to(0, &mut got).unwrap();
        assert!(requests == 0 || got == [1; 64]);
        let mut copies = next(&gpu).with_persistent_kernel();
        assert_eq!(addresses(&copies), all);
        assert_eq!(copies.persistent_copies(), 0);
        assert_eq!(write(&mut copies, &region), Ok(64));
        call(copies.persistent.as_mut().unwrap());
        assert_eq!(write(&mut copies, &region), Ok(64));
        assert_eq!(copies.persistent_copies(), 1);
    }
}

#[test]
fn who_wants_no_persistent_kernel_gets_none_from_others() {
    let (gpu, _kept) = gpu();
    let copies = copies(&gpu);
    let _others = others(&gpu);
    until(
        copies.persistent.as_ref().unwrap(),
        PersistentCopyKernel::has_left,
    );
    let all = addresses(&copies);
    drop(copies);
    let mut copies = next(&gpu);
    assert_eq!(addresses(&copies), all);
    let region = Region::cuda(&gpu, 64).unwrap();
    for _ in 0..3 {
        assert_eq!(write(&mut copies, &region), Ok(64));
    }
    let persistent = copies.persistent.as_ref().unwrap();
    assert!(persistent.has_left() && persistent.copies() == 0);
    drop(copies);
    let copies = next(&gpu).with_persistent_kernel();
    assert_eq!(addresses(&copies), all);
}

#[test]
fn what_a_kernel_that_has_not_started_may_touch_is_nobodys() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let persistent = copies.persistent.as_mut().unwrap();
    until(persistent, PersistentCopyKernel::has_left);
    let room = fake::fill_gpu();
    let now = Instant::now();
    persistent.note(now);
    persistent.note(now);
    assert!(!persistent.has_left());
    let [_, slots] = addresses(&copies);
    drop(copies);
    let other = next(&gpu);
    assert_ne!(other.memory.device, slots);
    room.store(true, Ordering::SeqCst);
    let start = Instant::now();
    loop {
        // The fake does a step whenever a stream is asked about.
        is_at_rest(gpu.api(), other.streams[0]).unwrap();
        let third = next(&gpu);
        if third.memory.device == slots {
            break;
        }
        assert!(start.elapsed() < LONG);
    }
}

#[test]
fn connections_beyond_the_memory_get_no_small_copies() {
    let gpu = Gpu::fake();
    let all = others(&gpu);
    assert_eq!(all.len(), super::super::super::CONNECTIONS);
    // One of them leaves its part to the next.
    let mut all = all;
    let left = all.swap_remove(3).memory.device;
    assert_eq!(next(&gpu).memory.device, left);
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
    assert_ne!(next(&gpu).memory.device, all[1]);
}
