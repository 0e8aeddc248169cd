//! The persistent kernel over the fake driver, where it makes a step only when the driver is
//! called.

mod hand_over;
mod leaving;

use super::super::tests::ended;
use super::super::{SmallCopies, SmallRead};
use std::thread;

use super::*;
use crate::driver::fake;
use crate::gpu::{InContext, create_stream};
use crate::region::Region;

const LONG: Duration = Duration::from_secs(60);

/// A GPU whose context is current for as long as the second lives.
fn gpu() -> (Gpu, InContext) {
    let gpu = Gpu::fake();
    let kept = InContext::enter(&gpu).unwrap();
    (gpu, kept)
}

/// What a kernel of its own takes.
fn memory(gpu: &Gpu) -> MappedHost {
    MappedHost::pin(gpu, PersistentCopyKernel::BYTES).unwrap()
}

fn made(gpu: &Gpu) -> PersistentCopyKernel {
    let streams = [(); PLACES].map(|()| create_stream(gpu.api()).unwrap());
    PersistentCopyKernel::new(gpu, memory(gpu), streams).unwrap()
}

/// Has the fake do a step.
fn look(persistent: &PersistentCopyKernel) {
    is_at_rest(persistent.gpu.api(), persistent.stream()).unwrap();
}

/// Waits until `seen` holds.
fn until(persistent: &PersistentCopyKernel, seen: impl Fn(&PersistentCopyKernel) -> bool) {
    let start = Instant::now();
    while !seen(persistent) {
        look(persistent);
        assert!(start.elapsed() < LONG);
    }
}

/// A persistent kernel that was set up and has left.
fn set_up(gpu: &Gpu) -> PersistentCopyKernel {
    let persistent = made(gpu);
    until(&persistent, PersistentCopyKernel::has_left);
    persistent
}

/// A persistent kernel that runs, or would start at the next poll.
fn called(gpu: &Gpu) -> PersistentCopyKernel {
    let mut persistent = set_up(gpu);
    let now = Instant::now();
    persistent.note(now);
    persistent.note(now + SOON / 2);
    assert!(!persistent.has_left());
    persistent
}

/// Small copies whose persistent kernel runs.
fn copies(gpu: &Gpu) -> SmallCopies {
    let mut copies = SmallCopies::new(gpu)
        .unwrap()
        .unwrap()
        .with_persistent_kernel();
    let persistent = copies.persistent.as_mut().unwrap();
    until(persistent, PersistentCopyKernel::has_left);
    call(persistent);
    copies
}

fn call(persistent: &mut PersistentCopyKernel) {
    let now = Instant::now();
    // On a busy machine requests may have looked slow.
    persistent.paused_until = None;
    persistent.note(now);
    persistent.note(now);
    until(persistent, PersistentCopyKernel::is_resident);
}

#[test]
fn the_kernel_is_launched_when_copies_follow_closely() {
    let (gpu, _kept) = gpu();
    let mut persistent = set_up(&gpu);
    let now = Instant::now();
    for apart in 0..4 {
        persistent.note(now + SOON * apart);
        assert!(persistent.has_left());
    }
    persistent.note(now + SOON * 7 / 2);
    assert!(!persistent.has_left() && !persistent.is_resident());
    until(&persistent, PersistentCopyKernel::is_resident);
}

#[test]
fn the_kernel_leaves_without_requests() {
    let (gpu, _kept) = gpu();
    let persistent = called(&gpu);
    let mut looks = 0;
    while !persistent.has_left() {
        look(&persistent);
        looks += 1;
    }
    // Each lets the fake serve several, so a bounded number is enough.
    assert!(looks <= IDLE_POLLS / 16 + 1, "{looks}");
    assert!(!persistent.is_resident());
}

#[test]
fn slow_requests_in_a_row_pause_launches() {
    let (gpu, _kept) = gpu();
    let mut persistent = called(&gpu);
    let request = WorkRequest {
        residency: persistent.residency,
        since: Instant::now() - SLOW * 2,
        polls: 0,
    };
    for _ in 0..MAX_SLOW {
        assert_eq!(persistent.paused_until, None);
        persistent.ended(&request);
    }
    let until_then = persistent.paused_until.unwrap();
    until(&persistent, PersistentCopyKernel::has_left);
    for early in [PAUSE / 2, PAUSE / 2 - SOON / 2] {
        persistent.note(until_then - early);
        assert!(persistent.has_left());
    }
    persistent.note(until_then);
    persistent.note(until_then + SOON / 4);
    persistent.note(until_then + SOON / 2);
    assert!(!persistent.has_left());
}

#[test]
fn one_fast_request_resets_the_count_of_slow_ones() {
    let (gpu, _kept) = gpu();
    let mut persistent = set_up(&gpu);
    let given = |since| WorkRequest {
        residency: persistent.residency,
        since,
        polls: 0,
    };
    let now = Instant::now();
    let (slow, fast) = (given(now - SLOW * 2), given(now + LONG));
    for request in [&slow, &fast].repeat(MAX_SLOW as usize) {
        persistent.ended(request);
    }
    assert_eq!(persistent.paused_until, None);
}

#[test]
fn bytes_are_copied_both_ways_and_nothing_else() {
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
        let read = copies.read(&middle, None, LONG, 0, &mut got);
        assert_eq!(read, Ok(SmallRead::Whole));
        assert_eq!(got, sent);
        let mut whole = vec![0; len + 2];
        region.read_to(0, &mut whole).unwrap();
        assert_eq!((whole[0], whole[len + 1]), (0xA5, 0xA5));
        // More than the ring holds, and more than one residency.
        if copies.persistent_copies() > 3 * REQUESTS as u64 {
            return;
        }
        if !copies.persistent.as_ref().unwrap().is_resident() {
            let persistent = copies.persistent.as_mut().unwrap();
            until(persistent, PersistentCopyKernel::has_left);
            call(persistent);
        }
    }
}

#[test]
fn the_driver_copies_an_unserved_request() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    let mut left_behind = 0;
    let start = Instant::now();
    while left_behind < 3 {
        assert!(start.elapsed() < LONG);
        let persistent = copies.persistent.as_mut().unwrap();
        if !persistent.is_resident() {
            until(persistent, PersistentCopyKernel::has_left);
            call(persistent);
        }
        fake::desert(persistent.memory.device);
        let value = left_behind + 1;
        let started = copies.start_write(&region.all(), &[value; 64], None, 1);
        assert_eq!(started, Ok(true));
        let was_requested = copies.slots.get(0).unwrap().request.is_some();
        let persistent = copies.persistent.as_mut().unwrap();
        until(persistent, PersistentCopyKernel::has_left);
        // Launched again before anything polls the request.
        call(persistent);
        assert_eq!(ended(&mut copies), [(1, Ok(64))]);
        let mut got = [0; 64];
        region.read_to(0, &mut got).unwrap();
        assert_eq!(got, [value; 64]);
        left_behind += u8::from(was_requested);
    }
}

#[test]
fn all_slots_may_be_requests_at_once() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, REQUESTS * 8).unwrap();
    for index in 0..REQUESTS {
        let to = region.slice(index * 8..(index + 1) * 8).unwrap();
        let started = copies.start_write(&to, &[index as u8; 8], None, index as u64);
        assert_eq!(started, Ok(true));
    }
    let mut told = ended(&mut copies);
    told.sort_unstable_by_key(|(token, _)| *token);
    let all: Vec<_> = (0..REQUESTS as u64).map(|token| (token, Ok(8))).collect();
    assert_eq!(told, all);
    assert_eq!(copies.persistent_copies(), REQUESTS as u64);
    let mut got = vec![0; REQUESTS * 8];
    region.read_to(0, &mut got).unwrap();
    let mut bytes = got.iter().enumerate();
    assert!(bytes.all(|(at, byte)| *byte == (at / 8) as u8));
}

#[test]
fn memory_is_held_until_a_request_completes() {
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
fn the_ptx_has_the_kernel_with_its_parameter() {
    let ptx = include_str!("../../kernels/tcpx.ptx");
    let parameter = format!("tcpx_persistent_copy_param_0[{}]", size_of::<Residency>());
    assert!(ptx.contains(".entry tcpx_persistent_copy(") && ptx.contains(&parameter));
}
