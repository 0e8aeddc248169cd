//! Whose an order is: each is carried out once, by the courier or by the driver.

use std::sync::atomic::AtomicBool;

use super::*;

fn courier(copies: &mut SmallCopies) -> &mut Courier {
    copies.courier.as_mut().unwrap()
}

fn ring(copies: &SmallCopies) -> u64 {
    copies.courier.as_ref().unwrap().memory.device
}

fn is_ordered(copies: &SmallCopies, slot: usize) -> bool {
    copies.slots.get(slot).unwrap().order.is_some()
}

/// Starts writing such bytes to all of a region, which is the courier's to do.
fn order(copies: &mut SmallCopies, region: &Region, value: u8) {
    let bytes = vec![value; region.len()];
    let started = copies.start_write(&region.all(), &bytes, None, u64::from(value));
    assert_eq!(started, Ok(true));
    assert!(is_ordered(copies, 0));
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_to(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn whoever_has_a_courier_keeps_it() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    order(&mut copies, &region, 1);
    let before = ring(&copies);
    let mut copies = copies.with_courier();
    assert_eq!(ring(&copies), before);
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
    assert_eq!((copies.courier_copies(), fake::orders_done(before)), (1, 1));
}

#[test]
fn an_order_that_ends_between_two_looks_is_not_copied_again() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    order(&mut copies, &region, 1);
    // The driver, asked whether the kernel is there, lets it end the order and leave.
    fake::hurry(ring(&copies));
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
    assert_eq!(copies.courier_copies(), 1);
    assert_eq!(bytes_of(&region), [1; 64]);
}

#[test]
fn what_was_left_behind_no_other_courier_carries_out() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    order(&mut copies, &region, 1);
    fake::desert(ring(&copies));
    until(courier(&mut copies), Courier::has_left);
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
    region.write_from(0, &[2; 64]).unwrap();
    // The next one comes, finds nothing and leaves.
    until(courier(&mut copies), Courier::has_left);
    call(courier(&mut copies));
    until(courier(&mut copies), Courier::has_left);
    assert_eq!(fake::orders_done(ring(&copies)), 0);
    assert_eq!(bytes_of(&region), [2; 64]);
}

#[test]
fn what_one_left_behind_does_not_wait_for_the_next_to_leave() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    order(&mut copies, &region, 1);
    fake::desert(ring(&copies));
    until(courier(&mut copies), Courier::has_left);
    call(courier(&mut copies));
    copies.poll(&mut Vec::new());
    assert!(courier(&mut copies).is_here() && !is_ordered(&copies, 0));
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
}

#[test]
fn that_an_order_was_left_behind_is_news() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    order(&mut copies, &region, 1);
    assert!(!copies.has_news());
    fake::desert(ring(&copies));
    until(courier(&mut copies), Courier::has_left);
    assert!(copies.has_news());
    // The driver copies now, and there is no news until that has ended.
    copies.poll(&mut Vec::new());
    assert!(copies.is_busy() && !copies.has_news());
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
}

#[test]
fn numbers_of_orders_and_of_stays_may_begin_anew() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    until(courier(&mut copies), Courier::has_left);
    let (start, before) = (Instant::now(), copies.courier_copies());
    let one = courier(&mut copies);
    one.next = u32::MAX - ORDERS as u32 * 2;
    one.stay = u32::MAX - 1;
    for at in [RING_BYTES, RING_BYTES + APART] {
        let word = one.memory.host.as_ptr().wrapping_add(at);
        // SAFETY: the word is aligned, and the kernel has left.
        unsafe { AtomicU32::from_ptr(word.cast()) }.store(one.stay, Ordering::Release);
    }
    for value in (0..=u8::MAX).cycle() {
        let one = courier(&mut copies);
        let begun = (one.next, one.stay);
        if (1..1000).contains(&begun.0) && (1..1000).contains(&begun.1) {
            break;
        }
        if !one.is_here() {
            until(one, Courier::has_left);
            call(one);
        }
        order(&mut copies, &region, value);
        assert_eq!(ended(&mut copies), [(u64::from(value), Ok(64))]);
        assert_eq!(bytes_of(&region), [value; 64]);
        assert!(start.elapsed() < LONG);
    }
    assert!(copies.courier_copies() - before >= ORDERS as u64 * 2);
    let done = fake::orders_done(ring(&copies));
    assert_eq!(done as u64, copies.courier_copies());
}

#[test]
fn each_order_is_carried_out_once_whoever_is_faster() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let regions = [(); 4].map(|()| Region::cuda(&gpu, 64).unwrap());
    let (ring, stream) = (ring(&copies), courier(&mut copies).stream.addr());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _kept = InContext::enter(&gpu).unwrap();
            while !done.load(Ordering::Relaxed) {
                let stream = std::ptr::with_exposed_provenance_mut(stream);
                is_at_rest(gpu.api(), stream).unwrap();
                thread::yield_now();
            }
        });
        for round in 0..4000_usize {
            let value = round as u8;
            for (token, region) in regions.iter().enumerate() {
                let started = copies.start_write(&region.all(), &[value; 64], None, token as u64);
                assert_eq!(started, Ok(true));
            }
            assert_eq!(ended(&mut copies).len(), regions.len());
            let mut got = Vec::new();
            let region = &regions[round % regions.len()];
            assert_eq!(copies.read(&region.all(), None, LONG, &mut got), Ok(true));
            assert_eq!(got, [value; 64]);
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(fake::orders_done(ring) as u64, copies.courier_copies());
    assert!(copies.courier_copies() > 0);
}

#[test]
fn what_is_longer_than_an_order_the_driver_copies() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    for (len, is_the_couriers) in [(MOST_BYTES, true), (MOST_BYTES + 1, false)] {
        let region = Region::cuda(&gpu, len).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        assert_eq!(copies.start_write(&region.all(), &bytes, None, 1), Ok(true));
        let slot = copies.slots.in_use().next().unwrap();
        assert_eq!(is_ordered(&copies, slot), is_the_couriers);
        assert_eq!(ended(&mut copies), [(1, Ok(len as u64))]);
        assert_eq!(bytes_of(&region), bytes);
    }
    assert_eq!(copies.courier_copies(), 1);
}
