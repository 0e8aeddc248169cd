//! The courier over a driver in memory, on which it does something only when somebody asks the driver.

mod hand_over;
mod leaving;

use super::super::SmallCopies;
use super::super::tests::ended;
use super::*;
use crate::driver::fake;
use crate::gpu::InContext;
use crate::region::Region;

const LONG: Duration = Duration::from_secs(60);

/// A GPU whose context is current for as long as the second lives.
fn gpu() -> (Gpu, InContext) {
    let gpu = Gpu::fake();
    let kept = InContext::enter(&gpu).unwrap();
    (gpu, kept)
}

/// Has the fake do a step.
fn look(courier: &Courier) {
    is_at_rest(courier.gpu.api(), courier.stream).unwrap();
}

/// Waits until `seen` says so.
fn until(courier: &Courier, seen: impl Fn(&Courier) -> bool) {
    let start = Instant::now();
    while !seen(courier) {
        look(courier);
        assert!(start.elapsed() < LONG);
    }
}

/// A courier that was set up and has left.
fn set_up(gpu: &Gpu) -> Courier {
    let courier = Courier::new(gpu).unwrap();
    until(&courier, Courier::has_left);
    courier
}

/// A courier that is there, or that would come at the next look.
fn called(gpu: &Gpu) -> Courier {
    let mut courier = set_up(gpu);
    let now = Instant::now();
    courier.note(now);
    courier.note(now + SOON / 2);
    assert!(!courier.has_left());
    courier
}

/// Small copies whose courier is there.
fn copies(gpu: &Gpu) -> SmallCopies {
    let mut copies = SmallCopies::new(gpu).unwrap().with_courier();
    let courier = copies.courier.as_mut().unwrap();
    until(courier, Courier::has_left);
    call(courier);
    copies
}

fn call(courier: &mut Courier) {
    let now = Instant::now();
    // On a busy machine orders may have looked slow.
    courier.rests_until = None;
    (0..=MOST_WANTED).for_each(|_| courier.note(now));
    until(courier, Courier::is_here);
}

#[test]
fn stays_without_an_order_become_rare_and_one_with_an_order_ends_that() {
    let (gpu, _kept) = gpu();
    let mut courier = set_up(&gpu);
    let mut now = Instant::now();
    let mut copies_until_it_is_called = |courier: &mut Courier| {
        // Long after the last one.
        now += SOON * 2;
        let mut copies = 0;
        courier.note(now);
        while courier.has_left() {
            courier.note(now);
            copies += 1;
        }
        copies
    };
    for wanted in [1, 2, 4, 8, 16, 32, 64, 64] {
        assert_eq!(copies_until_it_is_called(&mut courier), wanted);
        until(&courier, Courier::has_left);
    }
    assert_eq!(copies_until_it_is_called(&mut courier), MOST_WANTED);
    courier.write((0, 0), LEAVE, (0, 0));
    until(&courier, Courier::has_left);
    assert_eq!(copies_until_it_is_called(&mut courier), 1);
    courier.end(LONG);
}

#[test]
fn it_is_called_when_one_copy_soon_follows_another() {
    let (gpu, _kept) = gpu();
    let mut courier = set_up(&gpu);
    let now = Instant::now();
    for apart in 0..4 {
        courier.note(now + SOON * apart);
        assert!(courier.has_left());
    }
    courier.note(now + SOON * 7 / 2);
    assert!(!courier.has_left() && !courier.is_here());
    until(&courier, Courier::is_here);
    courier.end(LONG);
}

#[test]
fn it_leaves_when_nothing_is_ordered() {
    let (gpu, _kept) = gpu();
    let courier = called(&gpu);
    let mut looks = 0;
    while !courier.has_left() {
        look(&courier);
        looks += 1;
    }
    // Each lets the fake take several, so that no more than so many are needed.
    assert!(looks <= PATIENCE / 16 + 1, "{looks}");
    assert!(!courier.is_here());
    courier.end(LONG);
}

#[test]
fn what_is_slow_again_and_again_is_not_called_for_a_while() {
    let (gpu, _kept) = gpu();
    let mut courier = called(&gpu);
    let order = Order {
        stay: courier.stay,
        since: Instant::now() - SLOW * 2,
        looks: 0,
    };
    for _ in 0..STRIKES {
        assert_eq!(courier.rests_until, None);
        courier.ended(&order);
    }
    let until_then = courier.rests_until.unwrap();
    until(&courier, Courier::has_left);
    for early in [REST / 2, REST / 2 - SOON / 2] {
        courier.note(until_then - early);
        assert!(courier.has_left());
    }
    courier.note(until_then);
    courier.note(until_then + SOON / 4);
    courier.note(until_then + SOON / 2);
    assert!(!courier.has_left());
    courier.end(LONG);
}

#[test]
fn one_order_that_is_fast_makes_good_for_slow_ones() {
    let (gpu, _kept) = gpu();
    let mut courier = set_up(&gpu);
    let given = |since| Order {
        stay: courier.stay,
        since,
        looks: 0,
    };
    let now = Instant::now();
    let (slow, fast) = (given(now - SLOW * 2), given(now + LONG));
    for order in [&slow, &fast].repeat(STRIKES as usize) {
        courier.ended(order);
    }
    assert_eq!(courier.rests_until, None);
    courier.end(LONG);
}

#[test]
fn bytes_travel_both_ways_and_nothing_beside_them() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let start = Instant::now();
    for round in 0_usize.. {
        let len = [1, 8, 100, 4096, SmallCopies::MOST_BYTES][round % 5];
        let sent: Vec<u8> = (0..len).map(|at| (at % 251 + round) as u8).collect();
        let region = Region::cuda(&gpu, len + 2).unwrap();
        region.write_from(0, &vec![0xA5; len + 2]).unwrap();
        let middle = region.slice(1..=len).unwrap();
        assert_eq!(copies.start_write(&middle, &sent, None, 7), Ok(true));
        assert_eq!(ended(&mut copies), [(7, Ok(len as u64))]);
        assert!(start.elapsed() < LONG);
        let mut got = Vec::new();
        assert_eq!(copies.read(&middle, None, LONG, &mut got), Ok(true));
        assert_eq!(got, sent);
        let mut whole = vec![0; len + 2];
        region.read_to(0, &mut whole).unwrap();
        assert_eq!((whole[0], whole[len + 1]), (0xA5, 0xA5));
        // More than the ring has, and more than one stay.
        if copies.courier_copies() > 3 * ORDERS as u64 {
            return;
        }
        if !copies.courier.as_ref().unwrap().is_here() {
            let courier = copies.courier.as_mut().unwrap();
            until(courier, Courier::has_left);
            call(courier);
        }
    }
}

#[test]
fn an_order_that_is_left_behind_is_copied_by_the_driver() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    let mut left_behind = 0;
    let start = Instant::now();
    while left_behind < 3 {
        assert!(start.elapsed() < LONG);
        let courier = copies.courier.as_mut().unwrap();
        if !courier.is_here() {
            until(courier, Courier::has_left);
            call(courier);
        }
        fake::desert(courier.memory.device);
        let value = left_behind + 1;
        let started = copies.start_write(&region.all(), &[value; 64], None, 1);
        assert_eq!(started, Ok(true));
        let was_ordered = copies.slots.get(0).unwrap().order.is_some();
        let courier = copies.courier.as_mut().unwrap();
        until(courier, Courier::has_left);
        // Called again before anybody looks at the order.
        call(courier);
        assert_eq!(ended(&mut copies), [(1, Ok(64))]);
        let mut got = [0; 64];
        region.read_to(0, &mut got).unwrap();
        assert_eq!(got, [value; 64]);
        left_behind += u8::from(was_ordered);
    }
}

#[test]
fn all_slots_may_be_orders_at_a_time() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, ORDERS * 8).unwrap();
    for index in 0..ORDERS {
        let to = region.slice(index * 8..(index + 1) * 8).unwrap();
        let started = copies.start_write(&to, &[index as u8; 8], None, index as u64);
        assert_eq!(started, Ok(true));
    }
    let mut told = ended(&mut copies);
    told.sort_unstable_by_key(|(token, _)| *token);
    let all: Vec<_> = (0..ORDERS as u64).map(|token| (token, Ok(8))).collect();
    assert_eq!(told, all);
    assert_eq!(copies.courier_copies(), ORDERS as u64);
    let mut got = vec![0; ORDERS * 8];
    region.read_to(0, &mut got).unwrap();
    let mut bytes = got.iter().enumerate();
    assert!(bytes.all(|(at, byte)| *byte == (at / 8) as u8));
}

#[test]
fn memory_is_held_until_the_end_of_an_order() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    assert_eq!(
        copies.start_write(&region.all(), &[3; 64], None, 1),
        Ok(true)
    );
    assert!(region.read_to(0, &mut [0]).is_err());
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
    assert_eq!(region.read_to(0, &mut [0]), Ok(()));
}

#[test]
fn where_ends_are_seen_by_events_none_is_called() {
    let (gpu, _kept) = gpu();
    let mut copies = SmallCopies::new(&gpu).unwrap();
    copies.ends.as_mut().unwrap().look_at_events();
    assert!(copies.with_courier().courier.is_none());
}

#[test]
fn the_ptx_has_the_kernel_with_its_parameter() {
    let ptx = include_str!("../../ptx/courier.ptx");
    let parameter = format!("tcpx_courier_param_0[{}]", size_of::<Stay>());
    assert!(ptx.contains(".entry tcpx_courier(") && ptx.contains(&parameter));
}
