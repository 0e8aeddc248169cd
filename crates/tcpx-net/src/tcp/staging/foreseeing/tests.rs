//! Chunks that find their bytes copied, and what becomes of those that never come.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use tcpx_memory::{Access, Lease, Region};

use super::super::{Worker, alone, staged_channel};
use super::*;
use crate::tcp::shared::Event;
use crate::tcp::transmit_table::{Outgoing, SendState, Taken, describe};

const CHUNK: usize = 256 << 10;
const LIMIT: Duration = Duration::from_secs(20);

/// A channel over a host worker that stands in for a GPU's, and that nobody else uses.
struct Stand {
    shared: Arc<Shared>,
    free: usize,
    _alone: MutexGuard<'static, ()>,
}

impl Stand {
    fn new() -> Self {
        let alone = alone();
        let shared = staged_channel();
        let free = shared.staging.host.as_ref().unwrap().pool.free_slots();
        Self {
            shared,
            free,
            _alone: alone,
        }
    }

    fn host(&self) -> &Worker {
        self.shared.staging.host.as_ref().unwrap()
    }

    fn copies_end(&self) {
        until("copies still run", || {
            self.shared.staging.short_copies.load(Ordering::SeqCst) == 0
        });
    }

    fn assert_all_is_back(&self) {
        until("slots are still taken", || {
            self.host().pool.free_slots() == self.free
        });
        assert!(!self.host().permits.are_taken());
        assert!(lock(&self.shared.staging.ahead).next().is_none());
    }
}

fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < LIMIT, "{what}");
        std::thread::yield_now();
    }
}

/// Memory of so many chunks, each filled with its number and one.
fn source(chunks: usize) -> (Region, Lease) {
    let region = Region::host(chunks * CHUNK).unwrap();
    for index in 0..chunks {
        let bytes = vec![index as u8 + 1; CHUNK];
        region.write_from(index * CHUNK, &bytes).unwrap();
    }
    let lease = region.lease(.., Access::Read).unwrap();
    (region, lease)
}

fn foreseen(source: &Lease, token: u64, transfer: u64) -> Foreseen {
    Foreseen {
        token,
        transfer,
        source: source.all(),
        chunk_bytes: CHUNK as u32,
        fence: None,
    }
}

fn unstaged(source: &Lease, transfer: u64, sequence: u64, length: usize) -> Unstaged {
    let start = sequence as usize * length;
    let (header, position) = describe(sequence, transfer, start as u64, length);
    Unstaged {
        header,
        position,
        source: source.slice(start..start + length).unwrap(),
        fence: None,
    }
}

/// Posts a chunk; whether its bytes were foreseen.
fn post(shared: &Arc<Shared>, slot: u16, unstaged: Unstaged) -> bool {
    match shared.stage_ahead(slot, unstaged) {
        Some(unstaged) => {
            Shared::stage(shared, slot, unstaged);
            false
        }
        None => true,
    }
}

fn queued(shared: &Shared, count: usize) -> Vec<Outgoing> {
    let mut found = Vec::new();
    until("chunks are missing", || {
        match shared.transmit.take(0) {
            Some(Taken::Chunk(chunk)) => found.push(chunk),
            Some(Taken::Withdrawn(slot)) => panic!("{slot} was withdrawn"),
            None => {}
        }
        found.len() == count
    });
    found.sort_by_key(|chunk| chunk.slot);
    found
}

fn assert_bytes(chunk: &Outgoing, value: u8) {
    let mut bytes = vec![0; chunk.payload.len()];
    chunk.payload.read_to(&mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == value), "{value}");
}

#[test]
fn chunks_find_the_bytes_that_were_copied_and_the_others_are_copied_then() {
    for wait in [true, false] {
        let stand = Stand::new();
        let (shared, (region, lease)) = (&stand.shared, source(16));
        assert!(Shared::foresee(shared, foreseen(&lease, 1, 5)));
        if wait {
            stand.copies_end();
        }
        let found =
            (0..16).map(|index| post(shared, index, unstaged(&lease, 5, index.into(), CHUNK)));
        let found: Vec<bool> = found.collect();
        // One at a time where the copies are slow, as many as are begun where they are not.
        let pieces = found.iter().take_while(|found| **found).count();
        assert!((1..=8).contains(&pieces), "{found:?}");
        assert!(!wait || pieces == 8, "{found:?}");
        assert!(!found[pieces..].contains(&true), "{found:?}");
        assert_eq!(shared.ended_ahead(), [1]);
        let chunks = queued(shared, 16);
        for (index, chunk) in chunks.iter().enumerate() {
            assert_bytes(chunk, index as u8 + 1);
            assert!(chunk.permit.is_some() && chunk.payload.len() == CHUNK);
        }
        let copied = std::iter::from_fn(|| shared.next_event());
        let copied = copied.filter(|event| matches!(event, Event::Copied { .. }));
        assert_eq!(copied.count(), 16);
        drop(chunks);
        stand.copies_end();
        stand.assert_all_is_back();
        drop(lease);
        region.lease(.., Access::Write).expect("nobody reads it");
    }
}

#[test]
fn a_cancelled_send_gives_all_back_and_frees_its_memory() {
    let stand = Stand::new();
    let (shared, (region, lease)) = (&stand.shared, source(16));
    for wait in [true, false] {
        assert!(Shared::foresee(shared, foreseen(&lease, 1, 5)));
        if wait {
            stand.copies_end();
        }
        let answer = shared.cancel_ahead(1);
        assert!(!wait || answer == Some(Cancel::Done), "{answer:?}");
        if answer == Some(Cancel::Pending) {
            until("the end is not told", || shared.ended_ahead() == [1]);
        }
        stand.copies_end();
        stand.assert_all_is_back();
        assert!(shared.cancel_ahead(1).is_none() && shared.ended_ahead().is_empty());
    }
    drop(lease);
    region.lease(.., Access::Write).expect("nobody reads it");
}

#[test]
fn a_chunk_of_another_size_is_copied_anew() {
    let stand = Stand::new();
    let (shared, (_region, lease)) = (&stand.shared, source(4));
    assert!(Shared::foresee(shared, foreseen(&lease, 1, 5)));
    for index in 0..2 {
        assert!(!post(
            shared,
            index,
            unstaged(&lease, 5, index.into(), CHUNK / 2)
        ));
    }
    for chunk in queued(shared, 2) {
        assert_bytes(&chunk, 1);
    }
    until("the end is not told", || shared.ended_ahead() == [1]);
    stand.copies_end();
    stand.assert_all_is_back();
}

#[test]
fn chunks_that_find_no_slot_get_those_of_chunks_to_come() {
    let stand = Stand::new();
    let (shared, (_region, lease)) = (&stand.shared, source(8));
    assert!(Shared::foresee(shared, foreseen(&lease, 1, 5)));
    stand.copies_end();
    let pinned = &stand.host().pool;
    let taken: Vec<_> = std::iter::from_fn(|| pinned.try_take()).collect();
    assert_eq!(taken.len(), stand.free - 8);
    Shared::stage(shared, 3, unstaged(&lease, 9, 0, CHUNK));
    assert_bytes(&queued(shared, 1)[0], 1);
    assert_eq!(shared.ended_ahead(), [1]);
    assert!(
        !post(shared, 0, unstaged(&lease, 5, 0, CHUNK)),
        "it has none any more"
    );
    assert_bytes(&queued(shared, 1)[0], 1);
    drop(taken);
    stand.copies_end();
    stand.assert_all_is_back();
}

#[test]
fn nothing_is_begun_while_chunks_wait_or_slots_are_scarce() {
    let stand = Stand::new();
    let (shared, (_region, lease)) = (&stand.shared, source(8));
    let pinned = &stand.host().pool;
    let half: Vec<_> = (0..pinned.slots().div_ceil(2))
        .map_while(|_| pinned.try_take())
        .collect();
    assert!(!Shared::foresee(shared, foreseen(&lease, 1, 5)));
    drop(half);
    let (slots, permits) = (pinned.slots(), &stand.host().permits);
    let quarter: Vec<_> =
        std::iter::from_fn(|| permits.take_spare(slots, &shared.wakers)).collect();
    assert_eq!(quarter.len(), slots / 4);
    assert!(!Shared::foresee(shared, foreseen(&lease, 1, 5)));
    drop(quarter);
    let copies = &shared.staging.short_copies;
    copies.store(SHORT_COPIES, Ordering::SeqCst);
    assert!(
        !Shared::foresee(shared, foreseen(&lease, 1, 5)),
        "copies enough"
    );
    Shared::stage(shared, 0, unstaged(&lease, 4, 0, CHUNK));
    copies.store(0, Ordering::SeqCst);
    assert!(
        !Shared::foresee(shared, foreseen(&lease, 1, 5)),
        "a chunk waits"
    );
    Shared::stage_waiting(shared);
    drop(queued(shared, 1));
    stand.copies_end();
    stand.assert_all_is_back();
}

#[test]
fn a_chunk_that_is_taken_back_in_the_middle_of_its_copy_fails_alone() {
    let stand = Stand::new();
    let (shared, (_region, lease)) = (&stand.shared, source(2));
    let pinned = stand.host().pool.try_take().unwrap();
    let place = |index: usize| Place {
        payload: pinned
            .slice()
            .slice(index * CHUNK..(index + 1) * CHUNK)
            .unwrap(),
        permit: stand.host().permits.take_spare(8, &shared.wakers).unwrap(),
    };
    let source = Source {
        bytes: lease.all(),
        fence: None,
    };
    let mut ahead = lock(&shared.staging.ahead);
    assert!(ahead.offer(1, 5, source, 2 * CHUNK as u64, CHUNK as u64));
    assert_eq!(
        (ahead.begin(place(0)), ahead.begin(place(1))),
        (Some(0), Some(1))
    );
    drop(ahead);
    for index in 0..2 {
        assert!(post(
            shared,
            index,
            unstaged(&lease, 5, index.into(), CHUNK)
        ));
        let copying = |state: &mut SendState| matches!(state, SendState::Copying { .. });
        assert!(shared.transmit.with(index, copying));
    }
    shared.transmit.withdraw(0);
    let bytes = Ok(CHUNK as u64);
    shared.copy_ahead_ended(0, &bytes);
    shared.copy_ahead_ended(1, &Err(MemoryError::WorkerStopped));
    for expected in 0..2 {
        let event = shared.next_event();
        let failed = matches!(&event, Some(Event::SendFailed { slot, .. }) if *slot == expected);
        assert!(failed, "{event:?}");
    }
    assert!(shared.next_event().is_none());
    drop(pinned);
    stand.assert_all_is_back();
}
