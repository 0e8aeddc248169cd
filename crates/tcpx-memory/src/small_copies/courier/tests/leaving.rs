//! Set-up and the end in every state, and what keeps a courier from its work.

use super::*;
use crate::driver::fake::Launches;
use crate::error::MemoryError;

fn addresses(copies: &SmallCopies) -> [u64; 2] {
    let courier = copies.courier.as_ref().unwrap();
    [courier.memory.device, copies.memory.device]
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
    let mut copies = SmallCopies::new(&gpu).unwrap().with_courier();
    let region = Region::cuda(&gpu, 64).unwrap();
    assert_eq!(write(&mut copies, &region), Ok(64));
    let courier = copies.courier.as_mut().unwrap();
    assert_eq!(courier.copies(), 0);
    room.store(true, Ordering::SeqCst);
    until(courier, Courier::has_left);
    call(courier);
    assert_eq!(write(&mut copies, &region), Ok(64));
    assert_eq!(copies.courier_copies(), 1);
}

#[test]
fn what_cannot_be_launched_leaves_nothing_behind() {
    let gpu = Gpu::fake();
    let left = gpu.downgrade();
    fake::set_launches(Launches::Fail);
    let copies = SmallCopies::new(&gpu).unwrap().with_courier();
    fake::set_launches(Launches::Return);
    assert!(copies.courier.is_none());
    drop((copies, gpu));
    assert!(left.upgrade().is_none());
}

#[test]
fn a_launch_that_is_refused_later_is_not_tried_again_for_a_while() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let courier = copies.courier.as_mut().unwrap();
    until(courier, Courier::has_left);
    fake::set_launches(Launches::Fail);
    let now = Instant::now();
    courier.note(now);
    courier.note(now);
    fake::set_launches(Launches::Return);
    assert!(courier.has_left() && courier.rests_until.is_some());
    let region = Region::cuda(&gpu, 64).unwrap();
    assert_eq!(write(&mut copies, &region), Ok(64));
    assert_eq!(copies.courier_copies(), 0);
}

#[test]
fn where_launches_wait_for_their_end_none_is_called_for_a_while() {
    let (gpu, _kept) = gpu();
    fake::set_launches(Launches::WaitForTheirEnd);
    let mut courier = Courier::new(&gpu).unwrap();
    let (now, mut copies) = (Instant::now(), 0);
    while courier.rests_until.is_none() {
        courier.note(now);
        assert!(courier.has_left() && copies < STRIKES * MOST_WANTED);
        copies += 1;
    }
    fake::set_launches(Launches::Return);
    assert_eq!(courier.rests_until, Some(now + REST));
    courier.end(LONG);
}

#[test]
fn it_leaves_though_orders_follow_each_other_without_a_pause() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    for _ in 0..MOST {
        assert_eq!(write(&mut copies, &region), Ok(64));
        if copies.courier.as_ref().unwrap().has_left() {
            return;
        }
    }
    panic!("it is still there");
}

#[test]
fn a_drop_sends_it_away_and_gives_all_back() {
    for orders in [0, 1] {
        let gpu = Gpu::fake();
        let (left, kept) = (gpu.downgrade(), InContext::enter(&gpu).unwrap());
        let mut copies = copies(&gpu);
        let region = Region::cuda(&gpu, 64).unwrap();
        for _ in 0..orders {
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
        assert!(orders == 0 || got == [1; 64]);
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
fn what_a_courier_that_cannot_come_needs_outlives_a_drop() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let courier = copies.courier.as_mut().unwrap();
    until(courier, Courier::has_left);
    let room = fake::fill_gpu();
    let now = Instant::now();
    courier.note(now);
    courier.note(now);
    assert!(!courier.has_left());
    let [ring, slots] = addresses(&copies);
    drop(copies);
    room.store(true, Ordering::SeqCst);
    assert!(fake::is_allocated(ring) && !fake::is_allocated(slots));
    assert!(!fake::ended_hastily(ring));
}

#[test]
fn what_a_courier_that_is_not_seen_to_go_needs_outlives_a_drop() {
    let (gpu, _kept) = gpu();
    let copies = copies(&gpu);
    let [ring, _] = addresses(&copies);
    fake::lose_courier(ring);
    drop(copies);
    assert!(fake::is_allocated(ring) && !fake::ended_hastily(ring));
}

#[test]
fn an_order_that_cannot_be_followed_is_an_error_and_all_that_it_needs_stays() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    let all = addresses(&copies);
    fake::lose_courier(all[0]);
    assert!(write(&mut copies, &region).is_err());
    let busy = region.read_to(0, &mut [0]);
    assert!(matches!(busy, Err(MemoryError::Busy { .. })));
    let refused = copies.start_write(&region.all(), &[1; 64], None, 2);
    assert_eq!(refused, Ok(false));
    drop(copies);
    assert!(all.into_iter().all(fake::is_allocated));
}
