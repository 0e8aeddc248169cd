//! Small copies over a driver in memory that does everything as late as it may.

use std::sync::LazyLock;
use std::sync::atomic::Ordering;

use super::*;
use crate::driver::fake;
use crate::region::Region;

const LONG: Duration = Duration::from_secs(60);
/// The name of a read that is abandoned.
const READ: u64 = 99;

/// What the writes end with that are in flight.
pub(super) fn ended(copies: &mut SmallCopies) -> Vec<(u64, Result<u64, MemoryError>)> {
    let (start, mut ended) = (Instant::now(), Vec::new());
    while copies.is_busy() && start.elapsed() < LONG {
        copies.poll(&mut ended);
    }
    ended
}

/// What is read behind bytes that are there already.
fn read(
    copies: &mut SmallCopies,
    from: &RegionSlice,
    fence: Option<&Fence>,
    limit: Duration,
) -> Result<Option<Vec<u8>>, MemoryError> {
    let mut bytes = vec![9];
    let whole = copies.read(from, fence, limit, READ, &mut bytes)? == SmallRead::Whole;
    assert_eq!(bytes[0], 9);
    assert!(whole || bytes.len() == 1, "nothing was to be appended");
    Ok(whole.then(|| bytes.split_off(1)))
}

/// Every length goes to the GPU and back.
fn round_trips(gpu: &Gpu, copies: &mut SmallCopies) {
    for len in [1, 8, 4096, SLOT, SLOT + 1, SmallCopies::MOST_BYTES] {
        let sent: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        let region = Region::cuda(gpu, len + 2).unwrap();
        region.write_from(0, &vec![0xA5; len + 2]).unwrap();
        let middle = region.slice(1..=len).unwrap();
        assert_eq!(copies.start_write(&middle, &sent, None, 7), Ok(true));
        assert_eq!(ended(copies), [(7, Ok(len as u64))]);
        let got = read(copies, &middle, None, LONG).unwrap();
        assert_eq!(got.as_deref(), Some(sent.as_slice()));
        let mut whole = vec![0; len + 2];
        region.read_to(0, &mut whole).unwrap();
        assert_eq!((whole[0], whole[len + 1]), (0xA5, 0xA5));
        assert_eq!(whole[1..=len], sent);
        let other = Region::cuda(gpu, len + 2).unwrap();
        other.write_from(0, &vec![0x5A; len + 2]).unwrap();
        let to = other.slice(1..=len).unwrap();
        assert_eq!(copies.start_within(&middle, &to, None, 8), Ok(true));
        assert_eq!(ended(copies), [(8, Ok(len as u64))]);
        other.read_to(0, &mut whole).unwrap();
        assert_eq!((whole[0], whole[len + 1]), (0x5A, 0x5A));
        assert_eq!(whole[1..=len], sent);
    }
}

#[test]
fn a_copy_within_the_gpu_takes_one_slot_and_holds_both_ends() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let most = SmallCopies::MOST_WITHIN;
    let regions: Vec<_> = (0..=SLOTS)
        .map(|_| Region::cuda(&gpu, most + 1).unwrap())
        .collect();
    let part = |at: usize, len| regions[at].slice(..len).unwrap();
    for (from, to) in [(most + 1, most + 1), (0, 0), (8, 9)] {
        let started = copies.start_within(&part(0, from), &part(1, to), None, 1);
        assert_eq!(started, Ok(false), "{from} bytes to {to}");
    }
    for (token, to) in (1..).zip(&regions[1..]) {
        let slice = to.slice(..most).unwrap();
        let started = copies.start_within(&part(0, most), &slice, None, token);
        assert_eq!(started, Ok(true));
        assert!(to.read_to(0, &mut [0]).is_err(), "it is written");
    }
    assert!(regions[0].write_from(0, &[1]).is_err(), "it is read");
    let further = copies.start_within(&part(0, 1), &part(0, 1), None, 99);
    assert_eq!(further, Ok(false), "no slot is free");
    assert_eq!(ended(&mut copies).len(), SLOTS);
    for region in &regions {
        region.write_from(0, &[1]).unwrap();
    }
}

#[test]
fn bytes_travel_both_ways_and_nothing_beside_them() {
    let gpu = Gpu::fake();
    round_trips(&gpu, &mut SmallCopies::new(&gpu).unwrap().unwrap());
}

#[test]
fn an_end_is_seen_without_the_driver_and_not_early() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let region = Region::cuda(&gpu, 64).unwrap();
    let (started, mut told) = (Instant::now(), Vec::new());
    for number in 1..=3 {
        let written = copies.start_write(&region.all(), &[number; 64], None, 1);
        assert_eq!(written, Ok(true));
        // Nothing runs on this driver before somebody asks it.
        assert!(!copies.has_news());
        while !copies.has_news() && told.is_empty() {
            copies.poll(&mut told);
            assert!(started.elapsed() < LONG);
        }
        told.extend(ended(&mut copies));
        assert_eq!(std::mem::take(&mut told), [(1, Ok(64))]);
        let mut got = [0; 64];
        region.read_to(0, &mut got).unwrap();
        assert_eq!(got, [number; 64]);
    }
}

#[test]
fn memory_of_an_abandoned_read_is_freed_after_the_copy() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let region = Region::cuda(&gpu, 64).unwrap();
    assert_eq!(
        read(&mut copies, &region.all(), None, Duration::ZERO),
        Ok(None)
    );
    assert!(copies.is_busy());
    let busy = copies.start_write(&region.all(), &[1; 64], None, 1);
    assert!(matches!(busy, Err(MemoryError::Busy { .. })));
    let (start, mut told) = (Instant::now(), Vec::new());
    while told.is_empty() {
        assert!(region.write_from(0, &[1]).is_err(), "it is read");
        copies.poll(&mut told);
        assert!(start.elapsed() < LONG);
    }
    assert_eq!(told, [(READ, Ok(64))]);
    assert!(!copies.is_busy());
    region.write_from(0, &[1]).unwrap();
}

#[test]
fn an_untracked_copy_fails_and_keeps_its_memory() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let region = Region::cuda(&gpu, 64).unwrap();
    fake::hide_streams_of(region.all().device_address().unwrap());
    assert_eq!(
        copies.start_write(&region.all(), &[3; 64], None, 1),
        Ok(true)
    );
    let told = ended(&mut copies);
    assert!(matches!(told.as_slice(), [(1, Err(_))]), "{told:?}");
    let busy = region.read_to(0, &mut [0]);
    assert!(matches!(busy, Err(MemoryError::Busy { .. })));
    let refused = copies.start_write(&region.all(), &[3; 64], None, 2);
    assert_eq!(refused, Ok(false));
}

#[test]
fn what_is_too_long_or_of_another_place_is_left_to_others() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let long = Region::cuda(&gpu, SmallCopies::MOST_BYTES + 1).unwrap();
    let elsewhere = Region::host(64).unwrap();
    for region in [long, elsewhere] {
        assert_eq!(read(&mut copies, &region.all(), None, LONG), Ok(None));
        let bytes = vec![0; region.len()];
        let started = copies.start_write(&region.all(), &bytes, None, 1);
        assert_eq!(started, Ok(false));
    }
    let region = Region::cuda(&gpu, 8).unwrap();
    let wrong = copies.start_write(&region.all(), &[0; 7], None, 1);
    assert!(matches!(wrong, Err(MemoryError::LengthMismatch { .. })));
}

#[test]
fn the_wait_for_a_fence_ends_at_the_limit() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let region = Region::cuda(&gpu, 64).unwrap();
    let (stream, open) = fake::gated_stream();
    let fence = Fence::take(&gpu, fake::after_stream(stream)).unwrap();
    let limit = Duration::from_millis(5);
    assert_eq!(
        read(&mut copies, &region.all(), Some(&fence), limit),
        Ok(None)
    );
    let refused = copies.start_write(&region.all(), &[1; 64], Some(&fence), 1);
    assert_eq!((refused, copies.is_busy()), (Ok(false), false));
    open.store(true, Ordering::SeqCst);
    let read = read(&mut copies, &region.all(), Some(&fence), LONG).unwrap();
    assert_eq!(read.map(|bytes| bytes.len()), Some(64));
}

#[test]
fn copies_beyond_the_slots_are_left_to_others() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let region = Region::cuda(&gpu, (SLOTS + 1) * 8).unwrap();
    let mut write = |index: usize| {
        let to = region.slice(index * 8..(index + 1) * 8).unwrap();
        copies.start_write(&to, &[index as u8; 8], None, index as u64)
    };
    assert!((0..SLOTS).all(|index| write(index) == Ok(true)));
    assert_eq!(write(SLOTS), Ok(false));
    assert_eq!(ended(&mut copies).len(), SLOTS);
    let mut got = vec![0; SLOTS * 8];
    region.read_to(0, &mut got).unwrap();
    assert!(
        got.iter()
            .enumerate()
            .all(|(at, byte)| *byte == (at / 8) as u8)
    );
}

#[test]
fn a_long_copy_takes_adjacent_slots_for_itself() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    // Long ones get 12 of 16 slots: 3, 4, 4, and then there are not two; short ones the other five.
    let lens = [
        2 * SLOT + 1,
        4 * SLOT,
        3 * SLOT + 7,
        SLOT + 1,
        SLOT,
        1,
        1,
        1,
        1,
        1,
    ];
    let regions = lens.map(|len| Region::cuda(&gpu, len).unwrap());
    let bytes = |at: usize| vec![at as u8 + 1; lens[at]];
    let started: Vec<_> = (0..lens.len())
        .map(|at| copies.start_write(&regions[at].all(), &bytes(at), None, at as u64))
        .map(Result::unwrap)
        .collect();
    let refused = |at: usize| at == 3 || at == 9;
    assert!((0..lens.len()).all(|at| started[at] != refused(at)));
    assert_eq!(copies.slots.in_use().count(), SLOTS);
    assert_eq!(ended(&mut copies).len(), lens.len() - 2);
    assert_eq!(copies.slots.in_use().count(), 0);
    for at in (0..lens.len()).filter(|at| !refused(*at)) {
        let mut got = vec![0; lens[at]];
        regions[at].read_to(0, &mut got).unwrap();
        assert_eq!(got, bytes(at));
    }
    let region = Region::cuda(&gpu, SmallCopies::MOST_BYTES + 1).unwrap();
    let too_long = vec![0; region.len()];
    let refused = copies.start_write(&region.all(), &too_long, None, 1);
    assert_eq!(refused, Ok(false));
}

#[test]
fn behind_a_long_read_that_was_given_up_none_is_tried() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let region = Region::cuda(&gpu, SLOT + 1).unwrap();
    let mut read = |len: usize, limit| {
        let from = region.slice(..len).unwrap();
        let mut bytes = Vec::new();
        let whole = copies.read(&from, None, limit, READ, &mut bytes);
        (whole, copies.slots.in_use().count())
    };
    assert_eq!(
        read(SLOT + 1, Duration::ZERO),
        (Ok(SmallRead::Abandoned), 2)
    );
    assert_eq!(read(SLOT + 1, LONG), (Ok(SmallRead::NotStarted), 2));
    assert_eq!(read(8, LONG), (Ok(SmallRead::Whole), 2));
    copies.poll(&mut Vec::new());
    while !copies.slots.is_empty() {
        copies.poll(&mut Vec::new());
    }
    let mut bytes = Vec::new();
    let read = copies.read(&region.all(), None, LONG, READ, &mut bytes);
    assert_eq!(read, Ok(SmallRead::Whole));
}

proptest::proptest! {
    #[test]
    fn overlapping_copies_keep_out_of_each_others_slots(
        lens in proptest::collection::vec(1..=SmallCopies::MOST_BYTES, 1..24),
        polls in proptest::collection::vec(0usize..4, 24),
    ) {
        static GPU: LazyLock<Gpu> = LazyLock::new(Gpu::fake);
        let gpu = &*GPU;
        let mut copies = SmallCopies::new(gpu).unwrap().unwrap();
        let (mut told, mut began) = (Vec::new(), Vec::new());
        for (at, (len, polls)) in lens.into_iter().zip(polls).enumerate() {
            let region = Region::cuda(gpu, len).unwrap();
            let bytes = vec![at as u8 + 1; len];
            if copies.start_write(&region.all(), &bytes, None, at as u64).unwrap() {
                began.push((at, region, bytes));
            }
            for _ in 0..polls {
                copies.poll(&mut told);
            }
        }
        told.extend(ended(&mut copies));
        proptest::prop_assert_eq!((told.len(), copies.slots.in_use().count()), (began.len(), 0));
        for (at, region, bytes) in began {
            proptest::prop_assert!(told.contains(&(at as u64, Ok(bytes.len() as u64))));
            let mut got = vec![0; bytes.len()];
            region.read_to(0, &mut got).unwrap();
            proptest::prop_assert!(got == bytes);
        }
    }
}

#[test]
fn memory_is_held_while_a_copy_is_under_way() {
    let gpu = Gpu::fake();
    let mut copies = SmallCopies::new(&gpu).unwrap().unwrap();
    let region = Region::cuda(&gpu, 64).unwrap();
    let slice = region.all();
    assert_eq!(copies.start_write(&slice, &[3; 64], None, 1), Ok(true));
    let busy = region.read_to(0, &mut [0]);
    assert!(matches!(busy, Err(MemoryError::Busy { .. })));
    ended(&mut copies);
    assert_eq!(region.read_to(0, &mut [0]), Ok(()));
}
