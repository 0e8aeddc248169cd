//! Each request is served once, by the persistent kernel or by the driver.

use std::sync::atomic::AtomicBool;

use super::*;

fn persistent(copies: &mut SmallCopies) -> &mut PersistentCopyKernel {
    copies.persistent.as_mut().unwrap()
}

fn ring(copies: &SmallCopies) -> u64 {
    copies.persistent.as_ref().unwrap().memory.device
}

fn is_requested(copies: &SmallCopies, slot: usize) -> bool {
    copies.slots.get(slot).unwrap().request.is_some()
}

/// Starts writing such bytes to all of a region; the persistent kernel copies them.
fn request(copies: &mut SmallCopies, region: &Region, value: u8) {
    let bytes = vec![value; region.len()];
    let started = copies.start_write(&region.all(), &bytes, None, u64::from(value));
    assert_eq!(started, Ok(true));
    assert!(is_requested(copies, 0));
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_to(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_second_call_keeps_the_kernel() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    request(&mut copies, &region, 1);
    let before = ring(&copies);
    let mut copies = copies.with_persistent_kernel();
    assert_eq!(ring(&copies), before);
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
    assert_eq!(
        (copies.persistent_copies(), fake::requests_done(before)),
        (1, 1)
    );
}

#[test]
fn a_request_that_completes_between_polls_is_not_repeated() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    request(&mut copies, &region, 1);
    // The driver, asked whether the kernel runs, lets it complete the request and leave.
    fake::hurry(ring(&copies));
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
    assert_eq!(copies.persistent_copies(), 1);
    assert_eq!(bytes_of(&region), [1; 64]);
}

#[test]
fn an_unserved_request_is_not_served_by_the_next_kernel() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    request(&mut copies, &region, 1);
    fake::desert(ring(&copies));
    until(persistent(&mut copies), PersistentCopyKernel::has_left);
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
    region.write_from(0, &[2; 64]).unwrap();
    // The next one starts, finds nothing and leaves.
    until(persistent(&mut copies), PersistentCopyKernel::has_left);
    call(persistent(&mut copies));
    until(persistent(&mut copies), PersistentCopyKernel::has_left);
    assert_eq!(fake::requests_done(ring(&copies)), 0);
    assert_eq!(bytes_of(&region), [2; 64]);
}

#[test]
fn an_unserved_request_does_not_wait_for_the_next_kernel() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    request(&mut copies, &region, 1);
    fake::desert(ring(&copies));
    until(persistent(&mut copies), PersistentCopyKernel::has_left);
    call(persistent(&mut copies));
    copies.poll(&mut Vec::new());
    assert!(persistent(&mut copies).is_resident() && !is_requested(&copies, 0));
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
}

#[test]
fn an_unserved_request_is_news() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    request(&mut copies, &region, 1);
    assert!(!copies.has_news());
    fake::desert(ring(&copies));
    until(persistent(&mut copies), PersistentCopyKernel::has_left);
    assert!(copies.has_news());
    // The driver copies now, and there is no news until that copy completes.
    copies.poll(&mut Vec::new());
    assert!(copies.is_busy() && !copies.has_news());
    assert_eq!(ended(&mut copies), [(1, Ok(64))]);
}

#[test]
fn numbers_of_requests_and_residencies_wrap() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let region = Region::cuda(&gpu, 64).unwrap();
    until(persistent(&mut copies), PersistentCopyKernel::has_left);
    let (start, before) = (Instant::now(), copies.persistent_copies());
    let one = persistent(&mut copies);
    one.next = u32::MAX - REQUESTS as u32 * 2;
    one.residency = u32::MAX - 1;
    for at in [RING_BYTES, RING_BYTES + APART] {
        let word = one.memory.host.as_ptr().wrapping_add(at);
        // SAFETY: the word is aligned, and the kernel has left.
        unsafe { AtomicU32::from_ptr(word.cast()) }.store(one.residency, Ordering::Release);
    }
    for value in (0..=u8::MAX).cycle() {
        let one = persistent(&mut copies);
        let begun = (one.next, one.residency);
        if (1..1000).contains(&begun.0) && (1..1000).contains(&begun.1) {
            break;
        }
        if !one.is_resident() {
            until(one, PersistentCopyKernel::has_left);
            call(one);
        }
        request(&mut copies, &region, value);
        assert_eq!(ended(&mut copies), [(u64::from(value), Ok(64))]);
        assert_eq!(bytes_of(&region), [value; 64]);
        assert!(start.elapsed() < LONG);
    }
    assert!(copies.persistent_copies() - before >= REQUESTS as u64 * 2);
    let done = fake::requests_done(ring(&copies));
    assert_eq!(done as u64, copies.persistent_copies());
}

#[test]
fn each_request_is_copied_once_in_any_race() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    let regions = [(); 4].map(|()| Region::cuda(&gpu, 64).unwrap());
    let (ring, stream) = (ring(&copies), persistent(&mut copies).stream().addr());
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
            let read = copies.read(&region.all(), None, LONG, 0, &mut got);
            assert_eq!(read, Ok(SmallRead::Whole));
            assert_eq!(got, [value; 64]);
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(fake::requests_done(ring) as u64, copies.persistent_copies());
    assert!(copies.persistent_copies() > 0);
}

#[test]
fn the_driver_copies_what_exceeds_a_request() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    for (len, is_persistent) in [(MOST_BYTES, true), (MOST_BYTES + 1, false)] {
        let region = Region::cuda(&gpu, len).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        assert_eq!(copies.start_write(&region.all(), &bytes, None, 1), Ok(true));
        let slot = copies.slots.in_use().next().unwrap();
        assert_eq!(is_requested(&copies, slot), is_persistent);
        assert_eq!(ended(&mut copies), [(1, Ok(len as u64))]);
        assert_eq!(bytes_of(&region), bytes);
    }
    assert_eq!(copies.persistent_copies(), 1);
}

/// The slot is overwritten after the request: what lies in the request itself does not come from
/// there.
#[test]
fn a_short_write_takes_its_bytes_along() {
    let (gpu, _kept) = gpu();
    let mut copies = copies(&gpu);
    for len in 1..=MOST_INLINE + 1 {
        let one = persistent(&mut copies);
        if !one.is_resident() {
            until(one, PersistentCopyKernel::has_left);
            call(one);
        }
        let region = Region::cuda(&gpu, len).unwrap();
        let bytes: Vec<u8> = (1..=len as u8).collect();
        assert_eq!(copies.start_write(&region.all(), &bytes, None, 1), Ok(true));
        assert!(is_requested(&copies, 0));
        // SAFETY: the slot is longer, and the fake copies in calls of this thread alone.
        unsafe { copies.host(0).write_bytes(0xEE, len) };
        assert_eq!(ended(&mut copies), [(1, Ok(len as u64))]);
        let is_inline = len <= MOST_INLINE;
        assert_eq!(bytes_of(&region) == bytes, is_inline, "{len} bytes");
    }
}
