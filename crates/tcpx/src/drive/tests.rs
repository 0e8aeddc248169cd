//! Who has the lease, and for how long.

use std::net::TcpStream;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::core::tests::Scene;
use crate::transfer::Transfer;

/// A send that its thread waits for; no engine's thread looks after it. The peer lives.
fn waited_for() -> (Transfer, TcpStream) {
    let (transfer, peer) = Scene::with_a_send();
    let owner = &transfer.connection.0.progress_owner;
    owner.taken.store(true, Ordering::SeqCst);
    (transfer, peer)
}

#[test]
fn the_engine_has_the_connection_when_nobody_comes_back() {
    let (transfer, _peer) = waited_for();
    let shared = &transfer.connection.0;
    shared.release(Leaves::Served, false, None);
    assert!(shared.progress_owner.is_attended());
    let until = shared
        .progress_owner
        .due(shared.lock().clock.origin)
        .unwrap();
    while Instant::now() < until {}
    crate::driver::Driven::progress(&**shared);
    assert!(!shared.progress_owner.is_attended());
}

#[test]
fn the_engine_sleeps_while_a_thread_has_the_token_for_long() {
    let (transfer, _peer) = waited_for();
    let shared = &transfer.connection.0;
    shared.release(Leaves::Served, false, None);
    let owner = &shared.progress_owner;
    owner.taken.store(true, Ordering::SeqCst);
    let origin = shared.lock().clock.origin;
    // No later than the next lease ends: whoever begins that need not wake the engine's thread.
    let until = owner.lease.lasts_until().map(Duration::from_micros);
    let due = owner.due(origin);
    assert!(due.is_none() || due == until.map(|until| origin + until));
    while shared.since_origin(Instant::now()) <= owner.lease.lasts_until().unwrap() {}
    assert_eq!(owner.due(origin), None);
    assert!(owner.is_attended());
}

#[test]
fn a_lease_lasts_as_long_as_any_other() {
    let (transfer, _peer) = waited_for();
    let shared = &transfer.connection.0;
    shared.release(Leaves::Served, false, None);
    let released = shared.lock().clock.ticked();
    let until = shared.since_origin(released + PROGRESS_LEASE);
    assert_eq!(shared.progress_owner.lease.lasts_until(), Some(until));
}

#[test]
fn a_thread_that_polls_keeps_the_connection_until_a_task_waits() {
    let (transfer, _peer) = waited_for();
    let shared = &transfer.connection.0;
    shared.release(Leaves::Served, false, None);
    shared.end_lease(&mut shared.lock());
    shared.drive_once(|| false);
    assert!(shared.progress_owner.lease.lasts_until().is_some());
    assert!(shared.comes_back(&shared.lock()));
    let watch = shared.watch();
    shared.drive_once(|| false);
    assert_eq!(shared.progress_owner.lease.lasts_until(), None);
    assert!(!shared.comes_back(&shared.lock()));
    drop(watch);
}

#[test]
fn a_thread_that_polls_leaves_the_work_to_one_that_waits() {
    let (transfer, _peer) = waited_for();
    let shared = &transfer.connection.0;
    shared.drive_once(|| false);
    assert_eq!(shared.progress_owner.lease.lasts_until(), None);
    assert!(shared.progress_owner.is_taken());
}

#[test]
fn a_budget_spent_in_vain_pauses_busy_polling() {
    let (transfer, _peer) = waited_for();
    let shared = &transfer.connection.0;
    assert!(shared.may_busy_poll());
    shared.pause_busy_poll(Duration::from_secs(60));
    assert!(!shared.may_busy_poll());
    shared.pause_busy_poll(Duration::ZERO);
    assert!(shared.may_busy_poll());
    assert!(shared.may_busy_poll(), "a pause that is over stays over");
}

#[test]
fn a_thread_that_panics_gives_the_token_back() {
    let (transfer, _peer) = Scene::with_a_send();
    let shared = &transfer.connection.0;
    let limit = Instant::now() + Duration::from_secs(60);
    for polls in [true, false] {
        let looks = std::cell::Cell::new(0);
        let panics = || {
            looks.set(looks.get() + 1);
            assert!(looks.get() < 2, "a defect");
            false
        };
        let work = || match polls {
            true => shared.drive_once(panics),
            // Where other threads poll, it does not drive.
            false => assert!(shared.drive(panics, limit)),
        };
        assert!(catch_unwind(AssertUnwindSafe(work)).is_err());
        assert!(!shared.progress_owner.is_taken());
    }
}
